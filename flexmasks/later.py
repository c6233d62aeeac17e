"""Modules that are imported at the first call: `later.road` is `flexmasks.road`.

The public functions of `attention` read them here, so that processes that only make masks do not import them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexmasks import dropout as dropout
    from flexmasks import pages as pages
    from flexmasks import request as request
    from flexmasks import road as road
    from flexmasks import sharded as sharded
    from flexmasks.backends import traced_blocks as traced_blocks
    from flexmasks.plans import lengths as lengths
    from flexmasks.plans import portable as portable

_MODULES = {
    "dropout": "flexmasks.dropout",
    "lengths": "flexmasks.plans.lengths",
    "pages": "flexmasks.pages",
    "portable": "flexmasks.plans.portable",
    "request": "flexmasks.request",
    "road": "flexmasks.road",
    "sharded": "flexmasks.sharded",
    "traced_blocks": "flexmasks.backends.traced_blocks",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = globals()[name] = importlib.import_module(_MODULES[name])
        return module
