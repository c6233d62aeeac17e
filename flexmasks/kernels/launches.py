"""Helpers of launches: keys of layouts, kernels compiled without running, and launches that are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
import triton
import triton.language as tl
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


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor starts where loads of 16 bytes may."""
    return tensor.data_ptr() % 16 == 0


def strides_of(tensor: Tensor | None, dims: int) -> list[int]:
    """Return the strides of the first dimensions; 0 for dimensions of size 1, which broadcast."""
    if tensor is None:
        return [0] * dims
    return [0 if n == 1 else stride for n, stride in zip(tensor.shape[:dims], tensor.stride()[:dims], strict=True)]


def grain_of(strides: list[int]) -> int:
    """Return 8 if it divides all strides, else 1.

    8 numbers are enough for loads of 16 bytes. Other grains would compile more kernels while a cache grows.
    """
    return 8 if math.gcd(8, *strides) == 8 else 1


def width_of(size: int) -> int:
    """Return the numbers of a row in a kernel, where sizes are powers of two."""
    return max(16, int(triton.next_power_of_2(size)))


def dot_type(dtype: torch.dtype, kernel: Any) -> tl.dtype:
    """Return the type of the operands of a kernel's matrix products."""
    if dtype == torch.bfloat16 and not isinstance(kernel, triton.JITFunction):
        return tl.float32  # Triton's interpreter multiplies the bits of bfloat16 as if they were integers
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def compiled(kernel: Any, programs: int, warps: int, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Compile a kernel for arguments like these, and return a function that launches it."""
    if not isinstance(kernel, triton.JITFunction):  # Triton's interpreter compiles nothing
        return cast(Callable[..., Any], kernel[(programs,)])
    made = kernel.warmup(*arguments, grid=(programs,), num_warps=warps)
    return cast(Callable[..., Any], made[(programs, 1, 1)])
