"""The masks, one file for each or for some that belong together: they register themselves, as all files here do."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)
