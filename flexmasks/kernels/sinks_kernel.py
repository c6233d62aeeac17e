"""Triton kernels that fold attention sinks into output and lse, and their gradients.

A program takes ROWS queries of one head. The forward kernel moves the output twice, once in and once out; the backward
kernel moves it three times.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexmasks.kernels.launches import names_of_strides

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
