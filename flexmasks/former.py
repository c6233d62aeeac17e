"""Former module paths, for old imports and old pickles.

Each name is found in the room that holds it now.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

_ROOMS = {  # by former module: the modules that hold its names now
    "dense": ("spec.bands", "plans.windows"),
    "examples": ("spec.examples",),
    "explanation": ("plans.explanation",),
    "facts": ("blocks.counts",),
    "gallery": ("pictures.gallery",),
    "packing": ("masks.packed",),
    "paging": ("masks.paged",),
    "params": ("spec.parameters", "spec.indexing"),
    "picture": ("pictures.picture", "pictures.show"),
    "registry": ("spec.registry", "spec.arguments", "spec.definitions"),
    "timing": ("bench.clock",),
    "values": ("spec.values", "spec.definitions"),
}
_RENAMED = {"_registered": "from_pickle"}  # names inside old pickles


class _Former(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        former = self.__name__.removeprefix("flexmasks.")
        if not name.startswith("__"):
            for room in _ROOMS[former]:
                module = importlib.import_module(f"flexmasks.{room}")
                if hasattr(module, _RENAMED.get(name, name)):
                    return getattr(module, _RENAMED.get(name, name))
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


for _name in _ROOMS:
    sys.modules[f"flexmasks.{_name}"] = _Former(f"flexmasks.{_name}")
    setattr(sys.modules["flexmasks"], _name, sys.modules[f"flexmasks.{_name}"])
