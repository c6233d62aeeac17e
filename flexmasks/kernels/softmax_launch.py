"""Launches of the Triton kernels of the masked softmax: rows of a program, and how tensors lie over programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flexmasks.cache import Launches
from flexmasks.kernels.launches import Launch, Numbers, Tensors, compiled, layouts_of
from flexmasks.kernels.softmax_backward import backward_kernel
from flexmasks.kernels.softmax_forward import forward_kernel

_LOG2_E = math.log2(math.e)
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # smaller factors count as 0
_MAX_REGISTER_COLUMNS = {"forward": 32768, "backward": 16384}  # columns of a row without limits that registers hold
_MAX_COLUMNS_OF_8_WARPS = {"forward": 16384, "backward": 8192}
_MAX_COLUMN_STRIDE = 4  # up to this stride between a row's elements, reading them is faster than copying first
_MAX_OUTER_DIMS = 3  # dimensions around the rows that kernels support
_launches: Launches[Launch] = Launches("softmax")


def forward(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """The operator flexmasks::masked_softmax."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    factor, sign = abs(scale) * _LOG2_E, 1 if scale > 0 else -1
    if factor < _SMALLEST_SCALE:
        return forward(x * 0.0, bounds, bits, mask, visible, 1.0)
    tensors = y, x, bounds, bits, mask
    key = (*layouts_of(x, bounds, bits, mask), visible, sign, x.device.index)
    launch = _launches.get(key)
    if launch is None:
        if _column_stride(x) > _MAX_COLUMN_STRIDE:
            return forward(x.contiguous(), bounds, bits, mask, visible, scale)
        if mask is not None and _column_stride(mask) * x.shape[-1] >= 2**31:
            return forward(x, bounds, bits, mask.contiguous(), visible, scale)
        grid = _grid("forward", tensors, bounds is not None, shared=mask)
        if grid is None:
            bounds, bits, mask = (_expanded(t, x.shape[:-1]) for t in (bounds, bits, mask))
            return forward(x.contiguous(), bounds, bits, mask, visible, scale)
        grain, mask_grain = _grain(grid.strides[:2], x.shape[-1]), _grain(grid.strides[4:], 0)
        numbers = grid.numbers(x.shape[-1], (grain, grain, 1, 1, mask_grain))
        mask_stride = 0 if mask is None else _column_stride(mask)
        constants = (grain, mask_grain, _column_stride(x), mask_stride, *grid.constants, visible, sign)
        launch = grid.compiled(forward_kernel, tensors, factor, (*numbers, *constants))
        _launches.keep(key, launch)
    launch(tensors, (factor,))
    return y


def backward(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    """The operator flexmasks::masked_softmax_backward."""
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if not dx.numel():
        return dx
    tensors = dx, dy, y, bounds
    key = (*layouts_of(dy, y, bounds), y.device.index)
    launch = _launches.get(key)
    if launch is None:
        if max(_column_stride(dy), _column_stride(y)) > _MAX_COLUMN_STRIDE:
            return backward(dy.contiguous(), y.contiguous(), bounds, scale)
        grid = _grid("backward", tensors, bounds is not None)
        if grid is None:
            return backward(dy.contiguous(), y.contiguous(), _expanded(bounds, y.shape[:-1]), scale)
        grain = _grain(grid.strides[:3], y.shape[-1])
        numbers = grid.numbers(y.shape[-1], (grain, grain, grain, 1))
        compiles = isinstance(backward_kernel, triton.JITFunction)  # Triton's interpreter knows no assembly
        constants = (grain, _column_stride(dy), _column_stride(y), *grid.constants, compiles)
        launch = grid.compiled(backward_kernel, tensors, scale, (*numbers, *constants))
        _launches.keep(key, launch)
    launch(tensors, (scale,))
    return dx


# --- rows per program ---


@dataclass(frozen=True)
class Config:
    """Settings of a kernel for rows of some length.

    A program takes one of three ways: registers hold whole rows; or, with `chunks`, the visible part of a row with
    limits; or with `is_long` a row is read twice.

    warps: warps of a program.
    block: columns that are read together: those of a row, rounded up to a power of two, or of a chunk.
    rows: rows of a program, if registers hold whole rows.
    halvings: how often the width held in registers may be halved for rows that see few columns; 0 if rows have no
        limits.
    chunks: most chunks that registers hold.
    registers: most registers of a thread, or None for as many as the compiler takes.
    """

    warps: int
    block: int
    rows: int = 1
    halvings: int = 0
    chunks: int = 0
    registers: int | None = None
    is_long: bool = False


# Warps, columns of a chunk, chunks and registers, by a kernel, the bytes of an element and the kilobytes of a row. With
# fewer registers for a thread more programs run at once; with too few the compiler reads one chunk after the other.
_IN_CHUNKS: dict[tuple[str, int], dict[int, tuple[int, int, int, int | None]]] = {
    ("forward", 2): {4: (2, 1024, 2, 48), 8: (4, 1024, 4, 56), 16: (4, 1024, 8, 96), 32: (4, 2048, 8, 168)},
    ("forward", 4): {4: (4, 512, 2, None), 8: (4, 512, 4, None), 16: (4, 1024, 4, 80)},
    ("backward", 2): {4: (2, 1024, 2, 64), 8: (4, 1024, 4, 64), 16: (8, 2048, 4, 64), 32: (16, 4096, 4, 64)},
    ("backward", 4): {4: (2, 512, 2, None), 8: (4, 512, 4, None), 16: (4, 1024, 4, None)},
}


def config(kind: str, columns: int, itemsize: int, bounded: bool) -> Config:
    """The fastest configuration in sweeps on one H200; kind is "forward" or "backward", bounded rows have limits."""
    block = triton.next_power_of_2(max(columns, 16))
    kilobytes = columns * itemsize / 1024
    if bounded and kilobytes > 2:
        for up_to, (warps, chunk, chunks, registers) in _IN_CHUNKS[kind, itemsize].items():
            if kilobytes <= up_to:
                return Config(warps, chunk, chunks=chunks, registers=registers)
    if columns <= 2048:
        return Config(1, block, max(1, min(64, 1024 // block)), 1 if bounded and block >= 512 else 0)
    if not bounded and columns <= _MAX_REGISTER_COLUMNS[kind]:
        return Config(4 if columns <= 4096 else 8 if columns <= _MAX_COLUMNS_OF_8_WARPS[kind] else 16, block)
    for up_to, warps, chunk in ((16, 4, 2048), (32, 8, 4096), (64, 16, 4096)):
        if kilobytes <= up_to:
            return Config(warps, chunk, is_long=True)
    return Config(16, 8192, is_long=True)


# --- leading dimensions over programs ---


class _Dim(NamedTuple):
    """A leading dimension, and the stride of each tensor along it."""

    size: int
    strides: list[int]


@dataclass(frozen=True)
class _Grid:
    sizes: list[int]  # of the dimensions: rows, inner, one, two
    strides: list[list[int]]  # for each tensor, along each of the four dimensions
    config: Config
    constants: tuple[Any, ...]

    @property
    def blocks(self) -> int:
        """The number of programs that the rows take."""
        return -(-self.sizes[0] // self.config.rows)

    def compiled(self, kernel: Any, tensors: Tensors, factor: float, numbers: Numbers) -> Launch:
        limit = {} if self.config.registers is None else {"maxnreg": self.config.registers}
        programs = self.blocks * math.prod(self.sizes[1:])
        return compiled(kernel, programs, self.config.warps, tensors, (factor,), numbers, **limit)

    def numbers(self, columns: int, grains: Sequence[int]) -> tuple[int, ...]:
        """The kernels' integers: sizes, then strides, divided by each tensor's grain."""
        strides = (stride // grain for line, grain in zip(self.strides, grains, strict=True) for stride in line)
        return columns // grains[0], self.sizes[0], self.sizes[1], self.blocks, self.sizes[2], *strides


def _grid(kind: str, tensors: Sequence[Any], bounded: bool, shared: Tensor | None = None) -> _Grid | None:
    """Lay [..., columns] tensors over programs, the output and inputs that broadcast to it; None if there are too many
    dimensions. Programs that read the same rows of `shared`, the last of the inputs, follow each other.
    """
    output: Tensor = tensors[0]
    dims = _merged(tensors, output.shape[:-1])
    absent = _Dim(1, [0] * len(tensors))
    rows = dims.pop() if dims else absent
    if len(dims) > _MAX_OUTER_DIMS:
        return None
    inner = absent
    candidates = [dim for dim in dims if shared is not None and dim.strides[-1] == 0]
    if candidates or len(dims) == _MAX_OUTER_DIMS:
        inner = max(candidates or dims)
        dims.remove(inner)
    one, two = (*reversed(dims), absent, absent)[:2]
    order = (rows, inner, one, two)
    columns = output.shape[-1]
    chosen = config(kind, columns, output.element_size(), bounded)
    return _Grid(
        sizes=[dim.size for dim in order],
        strides=[[dim.strides[i] for dim in order] for i in range(len(tensors))],
        config=chosen,
        constants=(
            *(inner is not absent, len(dims)),
            *(chosen.rows, chosen.block, chosen.halvings, chosen.chunks, chosen.is_long),
        ),
    )


def _merged(tensors: Tensors, shape: Sequence[int]) -> list[_Dim]:
    """The leading dimensions above size 1, merged where they are adjacent in the memory of all tensors."""
    dims: list[_Dim] = []
    for n, *strides in zip(shape, *(_strides(t, shape) for t in tensors), strict=True):
        if n == 1:
            continue
        if dims and all(before == stride * n for before, stride in zip(dims[-1].strides, strides, strict=True)):
            dims[-1] = _Dim(dims[-1].size * n, strides)
        else:
            dims.append(_Dim(n, strides))
    return dims


def _strides(tensor: Tensor | None, shape: Sequence[int]) -> list[int]:
    """The strides of a tensor's leading dimensions, broadcast to a leading shape."""
    if tensor is None:
        return [0] * len(shape)
    own = [0 if n == 1 else s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)]
    return [0] * (len(shape) - len(own)) + own


def _column_stride(tensor: Tensor) -> int:
    """The stride of the last dimension, 0 if it has one element or is missing."""
    return 0 if not tensor.ndim or tensor.shape[-1] == 1 else tensor.stride(-1)


def _grain(strides: Sequence[Sequence[int]], columns: int) -> int:
    """The greatest power of two, up to 16, that divides columns and strides."""
    return math.gcd(16, columns, *(s for line in strides for s in line))


def _expanded(tensor: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    return None if tensor is None else tensor.expand(*shape, tensor.shape[-1]).contiguous()
