"""Helpers of launches of Triton kernels.

The first call of a layout chooses tile sizes and compiles the kernel. Its launch is kept, so later calls of the same
layout only pass their tensors. Kernels get strides divided by a grain, and multiply them by it: that proves their
alignment to the compiler, so that one kernel works for all lengths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmasks.compat import raw_stream
from flexmasks.kernels.compiling import announce_once

Tensors: TypeAlias = Sequence[Tensor | None]
Numbers: TypeAlias = tuple[Any, ...]
# Takes the tensors of a kernel and the numbers behind them; the other arguments are the same at each launch.
Launch: TypeAlias = Callable[[Tensors, Numbers], None]


class Settings(NamedTuple):
    """The queries and keys of a program or of a step, and the settings of a kernel."""

    rows: int
    keys: int
    warps: int
    stages: int


def new(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor that holds anything; torch.empty, which checks its arguments longer, takes twice the time."""
    return torch.empty_strided(*_strided(tuple(shape)), dtype=dtype, device=device)


@functools.lru_cache(maxsize=4096)
def _strided(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = [max(1, n) for n in shape]
    return shape, tuple(math.prod(sizes[n + 1 :]) for n in range(len(sizes)))


def layouts_of(*tensors: Tensor | None) -> list[Hashable]:
    """All properties of each tensor on which a launch depends."""
    return [None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0) for x in tensors]


def strides_of(tensor: Tensor | None, dims: int) -> list[int]:
    """The strides of the first dimensions; 0 for dimensions of size 1, which broadcast."""
    if tensor is None:
        return [0] * dims
    return [0 if n == 1 else stride for n, stride in zip(tensor.shape[:dims], tensor.stride()[:dims], strict=True)]


def names_of_strides(tensors: str, dims: str) -> list[str]:
    """The names of strides among a kernel's parameters. Like sizes, Triton must not specialize them: each value would
    compile another kernel.
    """
    return [f"{tensor}_{dim}" for tensor in tensors.split() for dim in dims.split()]


def grain_of(strides: list[int]) -> int:
    """8 if it divides all strides, else 1. 8 numbers are enough for loads of 16 bytes; other grains would compile more
    kernels while a cache grows.
    """
    return 8 if math.gcd(8, *strides) == 8 else 1


def with_grain(strides: list[int]) -> tuple[int, list[int]]:
    """The grain of strides, and the strides divided by it."""
    grain = grain_of(strides)
    return grain, [stride // grain for stride in strides]


def width_of(size: int) -> int:
    """The numbers of a row in a kernel, where sizes are powers of two."""
    return max(16, int(triton.next_power_of_2(size)))


def dot_type(dtype: torch.dtype, kernel: Any) -> tl.dtype:
    """The type of the operands of a kernel's matrix products."""
    if dtype == torch.bfloat16 and not isinstance(kernel, triton.JITFunction):
        return tl.float32  # Triton's interpreter multiplies the bits of bfloat16 as if they were integers
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def compiled(
    kernel: Any, programs: int, warps: int, tensors: Tensors, numbers: Numbers, fixed: Numbers, **options: Any
) -> Launch:
    """Compile a kernel for tensors and numbers like these, and return its launch; `fixed` are the arguments behind
    them, which are the same at each launch, and `options` those of Triton.
    """
    if not isinstance(kernel, triton.JITFunction):  # Triton's interpreter compiles nothing
        run = kernel[(programs,)]
        return lambda tensors, numbers: run(*tensors, *numbers, *fixed)
    announce_once(f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}")
    made = kernel.warmup(*tensors, *numbers, *fixed, grid=(programs,), num_warps=warps, **options)
    return launch_of(made, programs, fixed)


def launch_of(made: Any, programs: int, fixed: Numbers) -> Launch:
    """The launch of a compiled kernel on the current device. It does what made[(programs, 1, 1)] does, in half the
    host's time: it passes addresses, because Triton asks the driver about each tensor, and calls no hooks of Triton's
    profiler.
    """
    run, function, metadata = made.run, made.function, made.packed_metadata
    device = torch.device("cuda", torch.cuda.current_device())

    def launch(tensors: Tensors, numbers: Numbers) -> None:
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        run(programs, 1, 1, raw_stream(device), function, metadata, None, None, None, *addresses, *numbers, *fixed)

    launch.made = made  # type: ignore[attr-defined] # from Triton 3.8 on, the function is unloaded when nothing has it
    return launch
