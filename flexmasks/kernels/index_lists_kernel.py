"""Triton kernel of the index lists.

For N blocks the kernel reads 2 N bytes and writes 8 N bytes, for lists by rows and once more for lists by columns. A
line longer than a chunk is read twice, first to count its marked places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
