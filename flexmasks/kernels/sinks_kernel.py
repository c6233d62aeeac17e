"""Triton kernels that fold attention sinks into output and lse, their gradients, and the launches of both.

A program takes ROWS queries of one head. The forward kernel moves the output twice, once in and once out; the backward
kernel moves it three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmasks.cache import Launches
from flexmasks.kernels.launches import (
    Launch,
    Tensors,
    compiled,
    grain_of,
    layouts_of,
    names_of_strides,
    new,
    strides_of,
)

_LOWEST: tl.constexpr = tl.constexpr(-1e30)  # takes the place of an lse of -inf, from which no sink can be subtracted

_NUMBERS = ["heads", "queries", "blocks", "sink_stride", "count"]
_NUMBERS += names_of_strides("out lse new_out new_lse d_out d_lse d_new_out d_new_lse", "batch head query")


@triton.jit
def _position(heads, blocks, ROWS: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """A program's batch element, head, block of rows, and rows. Programs whose rows are neighbors in memory follow each
    other: with HEADS_FIRST those of neighboring heads.
    """
    program = tl.program_id(0)
    if HEADS_FIRST:
        head = program % heads
        block = program // heads % blocks
    else:
        block = program % blocks
        head = program // blocks % heads
    batch = program // blocks // heads
    row = block * ROWS + tl.arange(0, ROWS)
    return batch.to(tl.int64), head.to(tl.int64), block, row.to(tl.int64)


@triton.jit
def _shares(lse, sink):
    """The shares of keys and sink in the weights, the sigmoids of lse - sink and of sink - lse, and their common lse. A
    row that sees nothing has an lse of -inf. Then the sink has all the weight, and if it is -inf itself, none.
    """
    sees_nothing = lse == float("-inf")
    distance = tl.where(sees_nothing, _LOWEST, lse) - sink
    small = tl.exp(-tl.abs(distance))
    total = 1.0 + small
    larger = 1.0 / total
    smaller = small / total
    of_keys = tl.where(sees_nothing, 0.0, tl.where(distance >= 0, larger, smaller))
    of_sink = tl.where(distance >= 0, smaller, larger)
    both = tl.maximum(lse, sink) + tl.log(total)
    return of_keys, of_sink, both


@triton.jit(do_not_specialize=_NUMBERS)
def fold_kernel(
    new_out, new_lse, out, lse, sinks,
    heads, queries, blocks,
    new_out_batch, new_out_head, new_out_query, new_lse_batch, new_lse_head, new_lse_query,
    out_batch, out_head, out_query, lse_batch, lse_head, lse_query, sink_stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GRAIN: tl.constexpr, HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """Write new_out = out * sigmoid(lse - sink), maybe out itself, and new_lse = logaddexp(lse, sink), unless None."""
    batch, head, _block, row = _position(heads, blocks, ROWS, HEADS_FIRST)
    is_row = row < queries
    sink = tl.load(sinks + head * sink_stride).to(tl.float32)
    of_row = tl.load(lse + batch * lse_batch + head * lse_head + row * lse_query, mask=is_row, other=0.0)
    of_keys, _of_sink, both = _shares(of_row, sink)
    column = tl.arange(0, WIDTH)[None, :]
    exists = is_row[:, None] & (column < SIZE)
    row_start = (batch * out_batch + head * out_head + row * out_query) * GRAIN
    values = tl.load(out + row_start[:, None] + column, mask=exists, other=0.0).to(tl.float32) * of_keys[:, None]
    row_start = (batch * new_out_batch + head * new_out_head + row * new_out_query) * GRAIN
    tl.store(new_out + row_start[:, None] + column, values.to(new_out.dtype.element_ty), mask=exists)
    if new_lse is not None:
        tl.store(new_lse + batch * new_lse_batch + head * new_lse_head + row * new_lse_query, both, mask=is_row)


@triton.jit(do_not_specialize=_NUMBERS)
def gradients_kernel(
    d_out, d_lse, partial, d_new_out, d_new_lse, out, lse, sinks,
    heads, queries, blocks, count,
    d_out_batch, d_out_head, d_out_query, d_lse_batch, d_lse_head, d_lse_query,
    d_new_out_batch, d_new_out_head, d_new_out_query, d_new_lse_batch, d_new_lse_head, d_new_lse_query,
    out_batch, out_head, out_query, lse_batch, lse_head, lse_query, sink_stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GRAIN: tl.constexpr, HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """Write the gradients of out and lse, and parts of those of the sinks, each unless it is None. `partial` is float32
    [heads, count], with a part of each of a head's `count` programs.
    """
    batch, head, block, row = _position(heads, blocks, ROWS, HEADS_FIRST)
    is_row = row < queries
    sink = tl.load(sinks + head * sink_stride).to(tl.float32)
    of_row = tl.load(lse + batch * lse_batch + head * lse_head + row * lse_query, mask=is_row, other=0.0)
    of_keys, of_sink, _both = _shares(of_row, sink)
    column = tl.arange(0, WIDTH)[None, :]
    exists = is_row[:, None] & (column < SIZE)
    row_start = (batch * d_new_out_batch + head * d_new_out_head + row * d_new_out_query) * GRAIN
    slopes = tl.load(d_new_out + row_start[:, None] + column, mask=exists, other=0.0).to(tl.float32)
    row_start = (batch * out_batch + head * out_head + row * out_query) * GRAIN
    values = tl.load(out + row_start[:, None] + column, mask=exists, other=0.0).to(tl.float32)
    if d_out is not None:
        row_start = (batch * d_out_batch + head * d_out_head + row * d_out_query) * GRAIN
        scaled = slopes * of_keys[:, None]
        tl.store(d_out + row_start[:, None] + column, scaled.to(d_out.dtype.element_ty), mask=exists)
    of_share = tl.sum(slopes * values, 1) * of_keys * of_sink  # gradient of lse - sink by the output
    to_lse = of_share
    to_sink = -of_share
    if d_new_lse is not None:
        at = d_new_lse + batch * d_new_lse_batch + head * d_new_lse_head + row * d_new_lse_query
        slope = tl.load(at, mask=is_row, other=0.0)
        to_lse += slope * of_keys
        to_sink += slope * of_sink
    if d_lse is not None:
        tl.store(d_lse + batch * d_lse_batch + head * d_lse_head + row * d_lse_query, to_lse, mask=is_row)
    if partial is not None:
        tl.store(partial + head * count + batch * blocks + block, tl.sum(tl.where(is_row, to_sink, 0.0), 0))


@triton.jit(do_not_specialize=_NUMBERS)
def sum_kernel(totals, partial, count, CHUNK: tl.constexpr):
    """Write the sum of each head's parts, always in the same order."""
    head = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        sums += tl.load(partial + head * count + place, mask=place < count, other=0.0)
    tl.store(totals + head, tl.sum(sums, 0).to(totals.dtype.element_ty))


@triton.jit(do_not_specialize=["count", "head_stride"])
def sequence_sum_kernel(totals, x, starts, count, head_stride, CHUNK: tl.constexpr):
    """Write the sum of each head's numbers: `count` sequences each by itself, and then all in their order."""
    head = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = totals.dtype.element_ty
    total = tl.zeros((1,), tl.float32)
    end = tl.load(starts)
    for n in range(count):
        first = end
        end = tl.load(starts + n + 1)
        sums = tl.zeros((CHUNK,), tl.float32)
        for start in range(first, end, CHUNK):
            place = start + tl.arange(0, CHUNK)
            sums += tl.load(x + head * head_stride + place, mask=place < end, other=0.0)
        total = (total + tl.sum(sums, 0).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(totals + head + tl.arange(0, 1), total.to(dtype))


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


def sum_in_sequences(x: Tensor, starts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums [H] of x, float32 [H, tokens], each sequence by itself, and then all in their order.

    starts: where sequences start, and the last one's end, int32 [N + 1].
    """
    totals = new((x.shape[0],), dtype, x.device)
    tensors = totals, x, starts
    key = "sequences", x.shape, starts.shape, starts.dtype, dtype, x.device.index
    launch = _launches.get(key)
    if launch is None:
        numbers = starts.shape[0] - 1, x.stride(0), _CHUNK
        launch = compiled(sequence_sum_kernel, x.shape[0], _WARPS, tensors, (), numbers)
        _launches.keep(key, launch)
    launch(tensors, ())
    return totals


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
