"""Triton kernel of the tiles of keys that some query sees.

A program looks at a group of tiles of one element, a batch element or a head of it. If an element has several groups,
its last program to finish makes the list, in order. The kernel reads Q x KV bytes for each element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmasks.kernels.few_queries_plain import TILE

_GROUP_KEYS = 2**13  # pairs of a query and a key that a program looks at together
_MAX_TOGETHER = 16  # queries of these pairs
_MAX_CHUNK = 4096  # tiles that are listed together


@triton.jit
def _list(marks, tiles, element, n_tiles, count, before, start, CHUNK: tl.constexpr):
    """Write the list of a chunk of tiles.

    Returns the number of marked tiles up to its end.
    """
    tile = start + tl.arange(0, CHUNK)
    is_marked = (marks != 0).to(tl.int32)
    up_to_tile = before + tl.cumsum(is_marked, 0)
    place = tl.where(is_marked != 0, up_to_tile - 1, count + tile - up_to_tile)
    tl.store(tiles + element * n_tiles + place, tile, mask=tile < n_tiles)
    return before + tl.sum(is_marked)


@triton.jit
def tiles_kernel(
    visible, counts, tiles, marks, arrived, queries, keys, n_tiles, groups,
    GROUP: tl.constexpr, TOGETHER: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Mark GROUP tiles of an element; the last program lists its tiles.

    marks: a byte for each tile. arrived: for each element 0. Both are not used if groups are ALONE.
    """
    element = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    key = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    seen = tl.zeros((GROUP,), tl.int32)
    for start in range(0, queries, TOGETHER):
        query = start + tl.arange(0, TOGETHER)
        at = visible + (element * queries + query[:, None, None]) * keys + key[None, :, :]
        pairs = tl.load(at, mask=(query < queries)[:, None, None] & (key < keys)[None, :, :], other=0)
        seen = tl.maximum(seen, tl.max(tl.max(pairs.to(tl.int32), 2), 0))
    if ALONE:
        count = tl.sum((seen != 0).to(tl.int32))
        tl.store(counts + element, count)
        _list(seen, tiles, element, n_tiles, count, 0, 0, GROUP)
    else:
        line = marks + element * n_tiles
        tl.store(line + tile, seen.to(tl.int8), mask=tile < n_tiles)
        tl.debug_barrier()  # all threads have stored their marks before the program counts as arrived
        earlier = tl.atomic_add(arrived + element, 1, sem="acq_rel")
        tl.debug_barrier()
        if earlier == groups - 1:
            count = tl.zeros((), tl.int32)
            for start in range(0, n_tiles, CHUNK):
                place = start + tl.arange(0, CHUNK)
                of_chunk = tl.load(line + place, mask=place < n_tiles, other=0, volatile=True)
                count += tl.sum((of_chunk != 0).to(tl.int32))
            tl.store(counts + element, count)
            before = tl.zeros((), tl.int32)
            for start in range(0, n_tiles, CHUNK):
                place = start + tl.arange(0, CHUNK)
                of_chunk = tl.load(line + place, mask=place < n_tiles, other=0, volatile=True)
                before = _list(of_chunk, tiles, element, n_tiles, count, before, start, CHUNK)


def tiles_of(visible: Tensor) -> list[Tensor]:
    """Return counts and tiles of booleans [B, H, Q, KV]."""
    visible = visible.contiguous()
    batch, heads, queries, keys = visible.shape
    n_tiles = -(-keys // TILE)
    counts = torch.empty((batch, heads), dtype=torch.int32, device=visible.device)
    tiles = torch.empty((batch, heads, n_tiles), dtype=torch.int32, device=visible.device)
    together = min(_MAX_TOGETHER, triton.next_power_of_2(max(1, queries)))
    group = _GROUP_KEYS // TILE // together
    groups = max(1, -(-n_tiles // group))
    marks = arrived = counts
    if groups > 1:
        marks = torch.empty((batch, heads, n_tiles), dtype=torch.int8, device=visible.device)
        arrived = torch.zeros((batch, heads), dtype=torch.int32, device=visible.device)
    if counts.numel():
        tiles_kernel[batch * heads, groups](
            visible.view(torch.uint8), counts, tiles, marks, arrived, queries, keys, n_tiles, groups,
            GROUP=group, TOGETHER=together, CHUNK=min(_MAX_CHUNK, triton.next_power_of_2(n_tiles)), TILE=TILE,
            ALONE=groups == 1, num_warps=8,
        )  # fmt: skip
    return [counts, tiles]
