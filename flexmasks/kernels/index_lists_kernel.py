"""Triton kernels of the index lists, and of the tiles of keys that some query sees.

For N blocks the kernel of index lists reads 2 N bytes and writes 8 N bytes, for lists by rows and once more for lists
by columns. A line longer than a chunk is read twice, first to count its marked places.

A program of the tiles looks at a group of tiles of one element, a batch element or a head of it. If an element has no
other tiles, the program lists them; else it marks them, and the kernel of the index lists makes lists of the marks. The
kernel reads Q x KV bytes for each element.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmasks.kernels.few_queries_checks import TILE

MAX_CHUNK = 4096  # places of a line that one program holds


@triton.jit
def list_chunk(is_marked, places, count, before, start, end, CHUNK: tl.constexpr):
    """Write the part of a list that a chunk of places makes; return how many places up to its end are marked.

    count, before: how many of all places are marked, and of those before the chunk.
    """
    place = start + tl.arange(0, CHUNK)
    up_to_place = before + tl.cumsum(is_marked, 0)
    in_list = tl.where(is_marked != 0, up_to_place - 1, count + place - up_to_place)
    tl.store(places + in_list, place, mask=place < end)
    return before + tl.sum(is_marked)


@triton.jit
def _list_lines(
    partial, full, partial_counts, partial_lists, full_counts, full_lists,
    lines, places, matrix_stride, line_stride, place_stride,
    CHUNK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        marked, counts, lists = partial, partial_counts, partial_lists
    else:
        marked, counts, lists = full, full_counts, full_lists
    marked += (line // lines) * matrix_stride + (line % lines) * line_stride
    lists += line * places
    offsets = tl.arange(0, CHUNK)
    count = 0
    for start in range(0, places, CHUNK):
        place = start + offsets
        count += tl.sum(tl.load(marked + place.to(tl.int64) * place_stride, mask=place < places, other=0).to(tl.int32))
    tl.store(counts + line, count)
    before = 0  # marked places in earlier chunks
    for start in range(0, places, CHUNK):
        place = start + offsets
        is_marked = tl.load(marked + place.to(tl.int64) * place_stride, mask=place < places, other=0).to(tl.int32)
        before = list_chunk(is_marked, lists, count, before, start, places, CHUNK)


def lists_of(partial: Tensor, full: Tensor, by_row: bool) -> list[Tensor]:
    """Counts and lists of partial, then of full blocks, by rows or by columns of bool [B, H, rows, columns]."""
    partial, full = partial.contiguous(), full.contiguous()
    batch, heads, rows, columns = partial.shape
    lines, places = (rows, columns) if by_row else (columns, rows)
    strides = (columns, 1) if by_row else (1, columns)
    outputs = [
        torch.empty((batch, heads, lines, *more), dtype=torch.int32, device=partial.device)
        for more in ((), (places,), (), (places,))
    ]
    chunk = min(triton.next_power_of_2(places), MAX_CHUNK)
    grid = batch * heads * lines, 2
    numbers = partial.view(torch.uint8), full.view(torch.uint8)
    _list_lines[grid](
        *numbers, *outputs, lines, places, rows * columns, *strides,
        CHUNK=chunk, num_warps=min(8, max(1, chunk // 256)),
    )  # fmt: skip
    return outputs


_GROUP_PAIRS = 2**15  # pairs of a query and a key that a program looks at together
_MAX_TOGETHER = 16  # queries of these pairs


@triton.jit
def tiles_kernel(
    visible, partial_counts, partial, full_counts, full, queries, keys, n_tiles,
    GROUP: tl.constexpr, TOGETHER: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """List the tiles of an element that has one group, which then is ALONE; else mark them in `partial` and `full`."""
    element = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    key = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    some = tl.zeros((GROUP,), tl.int32)
    every = some + 1
    for start in range(0, queries, TOGETHER):
        query = start + tl.arange(0, TOGETHER)
        at = visible + (element * queries + query[:, None, None]) * keys + key[None, :, :]
        exists = (query < queries)[:, None, None] & (key < keys)[None, :, :]
        pairs = tl.load(at, mask=exists, other=0).to(tl.int32)
        some = tl.maximum(some, tl.max(tl.max(pairs, 2), 0))
        every = tl.minimum(every, tl.min(tl.min(tl.where(exists, pairs, 1), 2), 0))
    is_tile = tile < n_tiles
    is_full = (is_tile & (every != 0)).to(tl.int32)
    is_partial = (is_tile & (every == 0) & (some != 0)).to(tl.int32)
    partial += element * n_tiles
    full += element * n_tiles
    if ALONE:
        n_partial = tl.sum(is_partial)
        n_full = tl.sum(is_full)
        list_chunk(is_partial, partial, n_partial, 0, 0, n_tiles, GROUP)
        list_chunk(is_full, full, n_full, 0, 0, n_tiles, GROUP)
        tl.store(partial_counts + element, n_partial)
        tl.store(full_counts + element, n_full)
    else:
        tl.store(partial + tile, is_partial.to(tl.int8), mask=is_tile)
        tl.store(full + tile, is_full.to(tl.int8), mask=is_tile)


def tiles_of(visible: Tensor) -> list[Tensor]:
    visible = visible.contiguous()
    batch, heads, queries, keys = visible.shape
    n_tiles = -(-keys // TILE)
    together = min(_MAX_TOGETHER, triton.next_power_of_2(max(1, queries)))
    group = min(_GROUP_PAIRS // TILE // together, triton.next_power_of_2(max(1, n_tiles)))
    is_alone = n_tiles <= group or not batch * heads
    if is_alone:
        shapes = 2 * [(batch, heads), (batch, heads, n_tiles)]
        outputs: list[Any] = [torch.empty(shape, dtype=torch.int32, device=visible.device) for shape in shapes]
    else:
        marks = torch.empty((2, batch, heads, 1, n_tiles), dtype=torch.int8, device=visible.device)
        outputs = [None, marks[0], None, marks[1]]
    if batch * heads:
        tiles_kernel[batch * heads, max(1, -(-n_tiles // group))](
            visible.view(torch.uint8), *outputs, queries, keys, n_tiles,
            GROUP=group, TOGETHER=together, TILE=TILE, ALONE=is_alone,
            num_warps=max(1, min(16, group * together // 8)),
        )  # fmt: skip
    return outputs if is_alone else [t.squeeze(2) for t in lists_of(marks[0], marks[1], by_row=True)]
