"""Launches of the Triton kernels of attention sinks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flexmasks.cache import Launches
from flexmasks.kernels.launches import compiled, grain_of, layouts_of, new, strides_of
from flexmasks.kernels.sinks_kernel import fold_kernel, gradients_kernel, sum_kernel

_ELEMENTS, _WARPS = 4096, 4  # of a program
_FEW, _WARPS_OF_FEW = 8, 1  # rows of a program if a head has no more, as in decoding
_MAX_ROWS = 256
_CHUNK = 1024  # parts of a sum that are added together
_launches: Launches[Callable[..., Any]] = Launches("sinks")


def fold(out: Tensor, lse: Tensor, sinks: Tensor, with_lse: bool, in_place: bool) -> tuple[Tensor, Tensor | None]:
    """`out` scaled by sigmoid(lse - sink), in place or not, and logaddexp(lse, sink) or None.

    out, lse: [B, H, Q, D] and float32 [B, H, Q], or both without B. The last stride of `out` is 1.
    sinks: floats [H].
    """
    new_out = out if in_place else torch.empty_like(out)
    new_lse = torch.empty_like(lse) if with_lse else None
    tensors = new_out, new_lse, out, lse, sinks
    key = "fold", with_lse, in_place, out.device.index, *layouts_of(out, lse, sinks)
    launch = _launches.get(key)
    if launch is None:
        tiling = _Tiling.of(out, lse, (new_out, out))
        numbers = *tiling.numbers, *tiling.strides(new_out, new_lse, out, lse), *sinks.stride()
        launch = _kept(key, fold_kernel, tiling.programs, tiling.warps, tensors, (*numbers, *tiling.constants))
    launch(*tensors)
    return new_out, new_lse


def gradients(
    d_new_out: Tensor, d_new_lse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of out, lse and sinks by those of the results of `fold`; None where one is not wanted."""
    if d_new_out.stride(-1) != 1 and d_new_out.shape[-1] > 1:
        d_new_out = d_new_out.contiguous()
    given = d_new_out, d_new_lse, out, lse, sinks
    d_out = torch.empty_like(out) if wanted[0] else None
    d_lse = torch.empty_like(lse) if wanted[1] else None
    d_sinks = partial = None
    heads, queries = lse.shape[-2:]
    count = lse.numel() // (heads * queries) * -(-queries // _rows(queries, _width(out)))
    if wanted[2]:
        d_sinks = new((heads,), sinks.dtype, sinks.device)
        partial = new((heads, count), torch.float32, sinks.device)
    tensors = d_out, d_lse, partial, *given
    key = "gradients", *wanted, out.device.index, *layouts_of(*given)
    launch = _launches.get(key)
    if launch is None:
        tiling = _Tiling.of(out, lse, (d_out, d_new_out, out))
        strides = tiling.strides(d_out, d_lse, d_new_out, d_new_lse, out, lse)
        numbers = *tiling.numbers, count, *strides, *sinks.stride()
        launch = _kept(key, gradients_kernel, tiling.programs, tiling.warps, tensors, (*numbers, *tiling.constants))
    launch(*tensors)
    if partial is not None:
        key = "sum", partial.shape, sinks.dtype, sinks.device.index
        launch = _launches.get(key)
        if launch is None:
            launch = _kept(key, sum_kernel, heads, _WARPS, (d_sinks, partial), (count, _CHUNK))
        launch(d_sinks, partial)
    return d_out, d_lse, d_sinks


def _kept(
    key: Hashable,
    kernel: Any,
    programs: int,
    warps: int,
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[Any, ...],
) -> Callable[..., Any]:
    """Compile a kernel, and keep its launch, which takes tensors of the same layouts."""
    run = compiled(kernel, programs, warps, tensors, scalars)

    def launch(*tensors: Tensor | None) -> None:
        run(tensors, scalars)

    _launches.keep(key, launch)
    return launch


class _Tiling(NamedTuple):
    numbers: tuple[int, int, int]  # heads, queries of a head, programs of a head and batch element
    programs: int
    warps: int
    grain: int  # a power of two that divides the strides of rows
    constants: tuple[Any, ...]

    @classmethod
    def of(cls, out: Tensor, lse: Tensor, rows_of: Sequence[Tensor | None]) -> _Tiling:
        """The tiling of an output; `rows_of` are all tensors of its shape."""
        heads, queries = lse.shape[-2:]
        width = _width(out)
        rows = _rows(queries, width)
        blocks = -(-queries // rows)
        grain = grain_of([stride for tensor in rows_of for stride in _strides(tensor)])
        _, of_head, of_query = _strides(out)
        constants = out.shape[-1], width, rows, grain, 0 < of_head < of_query
        programs = lse.numel() // queries * blocks
        return cls((heads, queries, blocks), programs, _WARPS_OF_FEW if rows == _FEW else _WARPS, grain, constants)

    def strides(self, *tensors: Tensor | None) -> list[int]:
        """The strides of tensors, of which those with rows like the output and those like the lse alternate."""
        grains = self.grain, 1
        return [s // grains[n % 2] for n, tensor in enumerate(tensors) for s in _strides(tensor, rows=n % 2 == 0)]


def _rows(queries: int, width: int) -> int:
    rows = max(1, min(_MAX_ROWS, _ELEMENTS // width))
    return min(_FEW, rows) if queries <= _FEW else rows


def _width(out: Tensor) -> int:
    return int(triton.next_power_of_2(out.shape[-1]))


def _strides(tensor: Tensor | None, *, rows: bool = True) -> list[int]:
    """The strides of batch, head and query; 0 for dimensions of size 1 or missing ones. With `rows` a column
    follows.
    """
    if tensor is None:
        return [0, 0, 0]
    n_dims = tensor.ndim - rows
    return [0] * (3 - n_dims) + strides_of(tensor, n_dims)
