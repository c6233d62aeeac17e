"""Helpers of launches: keys of layouts, and kernels compiled without running."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import triton
from torch import Tensor


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
