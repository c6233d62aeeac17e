"""Helpers of launches: keys of layouts, kernels compiled without running, and launches that are kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import triton
from torch import Tensor

_MAX_LAUNCHES = 4096
_Launch = TypeVar("_Launch")


class Launches(dict[Hashable, _Launch]):
    """Launches by layouts of tensors."""

    def keep(self, key: Hashable, launch: _Launch) -> None:
        """Keep a launch; when there are too many, all others are dropped."""
        if len(self) >= _MAX_LAUNCHES:
            self.clear()
        self[key] = launch


def layout_of(tensor: Tensor | None) -> Hashable:
    """Return all properties of a tensor on which a launch depends."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0


def compiled(kernel: Any, programs: int, warps: int, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Compile a kernel for arguments like these, and return a function that launches it."""
    if not isinstance(kernel, triton.JITFunction):  # Triton's interpreter compiles nothing
        return cast(Callable[..., Any], kernel[(programs,)])
    made = kernel.warmup(*arguments, grid=(programs,), num_warps=warps)
    return cast(Callable[..., Any], made[(programs, 1, 1)])
