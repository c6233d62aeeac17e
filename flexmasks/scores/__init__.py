"""The score changes: importing this package imports and registers every one.

Each name is a function that makes the score change: `softcap(cap=30.0)` is `get_score("softcap", cap=30.0)`.
"""

import importlib
import pkgutil
from typing import NoReturn

from flexmasks.errors import no_such_name as _no_such_name
from flexmasks.masks.packed import packed as _packed
from flexmasks.masks.paged import paged as _paged
from flexmasks.spec.arguments import constructors as _constructors
from flexmasks.spec.definitions import nearest as _nearest

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)
_made = _constructors("score", packed=_packed, paged=_paged)
globals().update(_made)  # in place of the modules of the same names
__all__ = list(_made)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if name.startswith("__")) + __all__


def __getattr__(name: str) -> NoReturn:
    raise _no_such_name(__name__, name, "" if name.startswith("_") else _nearest("score", name))
