"""Triton kernel of the tiles of keys that some query sees.

A program looks at a group of tiles of one element, a batch element or a head of it. If an element has several groups,
its last program to finish makes the list, in order. The kernel reads Q x KV bytes for each element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmasks.kernels.few_queries_checks import TILE
from flexmasks.kernels.index_lists_kernel import MAX_CHUNK, list_chunk

_GROUP_PAIRS = 2**15  # pairs of a query and a key that a program looks at together
_MAX_TOGETHER = 16  # queries of these pairs

_PARTIAL: tl.constexpr = tl.constexpr(1)
_FULL: tl.constexpr = tl.constexpr(2)


@triton.jit
def tiles_kernel(
    visible, partial_counts, partial, full_counts, full, marks, arrived, queries, keys, n_tiles, groups,
    GROUP: tl.constexpr, TOGETHER: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Mark GROUP tiles of an element; the last program lists its tiles. Unless groups are ALONE, `marks` has a byte for
    each tile, and `arrived` a 0 for each element.
    """
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
    kinds = tl.where(tile >= n_tiles, 0, tl.where(every != 0, _FULL, tl.where(some != 0, _PARTIAL, 0)))
    partial += element * n_tiles
    full += element * n_tiles
    if ALONE:
        is_partial = (kinds == _PARTIAL).to(tl.int32)
        is_full = (kinds == _FULL).to(tl.int32)
        n_partial = tl.sum(is_partial)
        n_full = tl.sum(is_full)
        list_chunk(is_partial, partial, n_partial, 0, 0, n_tiles, GROUP)
        list_chunk(is_full, full, n_full, 0, 0, n_tiles, GROUP)
        tl.store(partial_counts + element, n_partial)
        tl.store(full_counts + element, n_full)
    else:
        line = marks + element * n_tiles
        tl.store(line + tile, kinds.to(tl.int8), mask=tile < n_tiles)
        tl.debug_barrier()  # all threads have stored their marks before the program counts as arrived
        earlier = tl.atomic_add(arrived + element, 1, sem="acq_rel")
        tl.debug_barrier()
        if earlier == groups - 1:
            n_partial = tl.zeros((), tl.int32)
            n_full = tl.zeros((), tl.int32)
            for start in range(0, n_tiles, CHUNK):
                place = start + tl.arange(0, CHUNK)
                of_chunk = tl.load(line + place, mask=place < n_tiles, other=0, volatile=True)
                n_partial += tl.sum((of_chunk == _PARTIAL).to(tl.int32))
                n_full += tl.sum((of_chunk == _FULL).to(tl.int32))
            tl.store(partial_counts + element, n_partial)
            tl.store(full_counts + element, n_full)
            before_partial = tl.zeros((), tl.int32)
            before_full = tl.zeros((), tl.int32)
            for start in range(0, n_tiles, CHUNK):
                place = start + tl.arange(0, CHUNK)
                of_chunk = tl.load(line + place, mask=place < n_tiles, other=0, volatile=True)
                is_partial = (of_chunk == _PARTIAL).to(tl.int32)
                is_full = (of_chunk == _FULL).to(tl.int32)
                before_partial = list_chunk(is_partial, partial, n_partial, before_partial, start, n_tiles, CHUNK)
                before_full = list_chunk(is_full, full, n_full, before_full, start, n_tiles, CHUNK)


def tiles_of(visible: Tensor) -> list[Tensor]:
    visible = visible.contiguous()
    batch, heads, queries, keys = visible.shape
    n_tiles = -(-keys // TILE)
    shapes = 2 * [(batch, heads), (batch, heads, n_tiles)]
    lists = [torch.empty(shape, dtype=torch.int32, device=visible.device) for shape in shapes]
    together = min(_MAX_TOGETHER, triton.next_power_of_2(max(1, queries)))
    group = min(_GROUP_PAIRS // TILE // together, triton.next_power_of_2(max(1, n_tiles)))
    groups = max(1, -(-n_tiles // group))
    marks = arrived = lists[0]
    if groups > 1:
        marks = torch.empty((batch, heads, n_tiles), dtype=torch.int8, device=visible.device)
        arrived = torch.zeros((batch, heads), dtype=torch.int32, device=visible.device)
    if batch * heads:
        tiles_kernel[batch * heads, groups](
            visible.view(torch.uint8), *lists, marks, arrived, queries, keys, n_tiles, groups,
            GROUP=group, TOGETHER=together, CHUNK=min(MAX_CHUNK, triton.next_power_of_2(max(1, n_tiles))), TILE=TILE,
            ALONE=groups == 1, num_warps=max(1, min(16, group * together // 8)),
        )  # fmt: skip
    return lists
