"""Former paths of modules, for old imports and old pickles.

A former module finds each of its names in the modules that hold them now.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

_MODULES = {  # by former module: the modules that hold its names now
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
_RENAMED = {"_registered": "from_pickle"}  # names that old pickles hold


class _Former(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        former = self.__name__.removeprefix("flexmasks.")
        if not name.startswith("__"):
            for path in _MODULES[former]:
                module = importlib.import_module(f"flexmasks.{path}")
                if hasattr(module, _RENAMED.get(name, name)):
                    return getattr(module, _RENAMED.get(name, name))
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


for _name in _MODULES:
    sys.modules[f"flexmasks.{_name}"] = _Former(f"flexmasks.{_name}")
    setattr(sys.modules["flexmasks"], _name, sys.modules[f"flexmasks.{_name}"])
