"""Integrations: calls of other libraries come in, calls of the public functions go out."""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["diffusers", "distributed", "huggingface"]

if TYPE_CHECKING:
    from flexmasks.integrations import diffusers as diffusers
    from flexmasks.integrations import distributed as distributed
    from flexmasks.integrations import huggingface as huggingface
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"{__name__} has no `{name}`")
        return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(name for name in globals() if name.startswith("__")) + __all__
