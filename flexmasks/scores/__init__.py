"""The score changes: importing this package imports every file of the folder, and each file registers its scores."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)
