"""Launches of the Triton kernels of attention sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
from torch import Tensor

from flexmasks.cache import Launches
from flexmasks.kernels.launches import Launch, Tensors, compiled, grain_of, layouts_of, new, strides_of
from flexmasks.kernels.sinks_kernel import fold_kernel, gradients_kernel, sum_kernel

_ELEMENTS, _WARPS = 4096, 4  # of a program
_FEW, _WARPS_OF_FEW = 8, 1  # rows of a program if a head has no more, as in decoding
_MAX_ROWS = 256
_CHUNK = 1024  # parts of a sum that are added together
_launches: Launches[Launch] = Launches("sinks")


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
        launch = _compiled(fold_kernel, tensors, tensors[:-1])
        _launches.keep(key, launch)
    launch(tensors, ())
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
        launch = _compiled(gradients_kernel, tensors, (d_out, d_lse, d_new_out, d_new_lse, out, lse), count)
        _launches.keep(key, launch)
    launch(tensors, ())
    if partial is not None:
        key = "sum", partial.shape, sinks.dtype, sinks.device.index
        launch = _launches.get(key)
        if launch is None:
            launch = compiled(sum_kernel, heads, _WARPS, (d_sinks, partial), (), (count, _CHUNK))
            _launches.keep(key, launch)
        launch((d_sinks, partial), ())
    return d_out, d_lse, d_sinks


def _compiled(kernel: Any, tensors: Tensors, with_strides: Sequence[Any], *counts: int) -> Launch:
    """Compile a kernel for tensors like these, of which the sinks are the last one.

    with_strides: tensors whose strides the kernel takes. Those with rows like the output and those like the lse
        alternate; the last two are output and lse.
    """
    *_, out, lse = with_strides
    heads, queries = lse.shape[-2:]
    width = _width(out)
    rows = _rows(queries, width)
    blocks = -(-queries // rows)
    grain = grain_of([stride for tensor in with_strides[::2] for stride in _strides(tensor)])
    strides: list[int] = []
    for of_rows, of_lse in zip(with_strides[::2], with_strides[1::2], strict=True):
        strides += [stride // grain for stride in _strides(of_rows)] + _strides(of_lse, rows=False)
    _, of_head, of_query = _strides(out)
    numbers = heads, queries, blocks, *counts, *strides, *cast(Tensor, tensors[-1]).stride()
    constants = out.shape[-1], width, rows, grain, 0 < of_head < of_query
    programs = lse.numel() // queries * blocks
    warps = _WARPS_OF_FEW if rows == _FEW else _WARPS
    return compiled(kernel, programs, warps, tensors, (), (*numbers, *constants))


def _rows(queries: int, width: int) -> int:
    rows = max(1, min(_MAX_ROWS, _ELEMENTS // width))
    return min(_FEW, rows) if queries <= _FEW else rows


def _width(out: Tensor) -> int:
    return int(triton.next_power_of_2(out.shape[-1]))


def _strides(tensor: Tensor | None, *, rows: bool = True) -> list[int]:
    """The strides of batch, head and query, behind which with `rows` columns follow; 0 for dimensions of size 1 and
    for missing ones.
    """
    if tensor is None:
        return [0, 0, 0]
    n_dims = tensor.ndim - rows
    return [0] * (3 - n_dims) + strides_of(tensor, n_dims)
