"""Masks of chunks and of blocks of tokens."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from oracles.case import Case, Random, int32, int64, mask_oracle, number_of, pair, row_of, runs, table_of

RANDOM = Random(3)


@mask_oracle
def chunked(b: int, h: int, q: int, kv: int, size: Case, chunk: int, start: int | list[int] = 0) -> bool:
    """Pairs in one of the chunks [start + n * chunk, start + (n + 1) * chunk), n any integer."""
    first = number_of(start, b)
    while first > q:
        first -= chunk
    while first + chunk <= q:
        first += chunk
    return first <= kv < first + chunk


@mask_oracle
def chunked_causal(b: int, h: int, q: int, kv: int, size: Case, chunk: int, start: int | list[int] = 0) -> bool:
    """Pairs in one chunk where kv <= q."""
    return kv <= q and chunked(b, h, q, kv, size, chunk, start)


@mask_oracle
def block_causal(
    b: int, h: int, q: int, kv: int, size: Case, block: int | None = None, ids: Any = None, strict: bool = False
) -> bool:
    """Keys below the end of the block that q is in, or with `strict` below its start."""
    if ids is not None:
        own, seen = row_of(ids, b)[q], row_of(ids, b)[kv]
        return bool(seen < own if strict else seen <= own)
    assert block is not None
    end = block
    while end <= q:
        end += block
    return kv < end - block if strict else kv < end


@mask_oracle
def block_window(b: int, h: int, q: int, kv: int, size: Case, chunk: int, left: int, right: int) -> bool:
    """Keys from the start of the chunk `left` chunks before q's to the end of that `right` chunks after it."""
    start = q - q % chunk
    return start - left * chunk <= kv < start + (1 + right) * chunk


@mask_oracle
def strided(b: int, h: int, q: int, kv: int, size: Case, stride: int) -> bool:
    """Keys from max(0, q - stride) to q, and the keys q, q - stride, q - 2 * stride, ..."""
    return max(0, q - stride) <= kv <= q or kv in range(q, -1, -stride)


@mask_oracle
def fixed(b: int, h: int, q: int, kv: int, size: Case, stride: int, summary: int) -> bool:
    """Keys up to q that are in q's block, or among the last `summary` of any block."""
    blocks = [list(range(start, start + stride)) for start in range(0, max(q, kv) + 1, stride)]
    own = next(block for block in blocks if q in block)
    return kv <= q and (kv in own or any(kv in block[max(0, stride - summary) :] for block in blocks))


@functools.cache
def _bigbird_blocks(
    length: int, block: int, window: int, global_blocks: int, random_blocks: int, seed: int, both_ends: bool
) -> list[set[int]]:
    """Return the blocks that each block sees, the random ones drawn by Floyd's algorithm.

    Step n of row i takes element [i, n] of uniform float64 numbers [blocks, random_blocks] from torch's generator.
    """
    blocks = math.ceil(length / block)
    uniform = torch.rand(
        (blocks, random_blocks), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    everything = set(range(blocks))
    edges = {i for i in range(blocks) if i < global_blocks or (both_ends and i >= blocks - global_blocks)}
    visible_blocks = []
    for i in range(blocks):
        near = {j for j in everything if abs(i - j) <= window}
        rest = sorted(everything - near - edges)
        wanted = min(random_blocks, len(rest))
        drawn: list[int] = []
        for n in range(wanted):
            top = len(rest) - wanted + n
            candidate = math.floor(uniform[i][n] * (top + 1))
            drawn.append(top if candidate in drawn else candidate)
        assert len(set(drawn)) == wanted
        visible_blocks.append(everything if i in edges else near | edges | {rest[n] for n in drawn})
    return visible_blocks


@mask_oracle
def bigbird(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    length: int,
    block: int,
    window: int = 1,
    global_blocks: int = 1,
    random_blocks: int = 3,
    seed: int = 0,
    both_ends: bool = True,
) -> bool:
    """Pairs where kv's block is near q's block, or drawn for it, or one block is global."""
    rows = _bigbird_blocks(length, block, window, global_blocks, random_blocks, seed, both_ends)
    return kv // block in rows[q // block]


@mask_oracle
def block_sparse(b: int, h: int, q: int, kv: int, size: Case, visible_blocks: Any, block: Any) -> bool:
    """Pairs whose blocks are marked."""
    rows, columns = pair(block)
    return bool(table_of(visible_blocks, b, h)[q // rows][kv // columns])


@mask_oracle
def bsr(
    b: int, h: int, q: int, kv: int, size: Case, crow_indices: list[int], col_indices: list[int], block: Any
) -> bool:
    """Pairs where kv's block is listed for q's row of blocks."""
    rows, columns = pair(block)
    row = q // rows
    return kv // columns in col_indices[crow_indices[row] : crow_indices[row + 1]]


@mask_oracle
def block_topk(b: int, h: int, q: int, kv: int, size: Case, indices: Any, block: Any) -> bool:
    """Pairs where kv's block is among the blocks chosen for q's block."""
    rows, columns = pair(block)
    return kv // columns in table_of(indices, b, h)[q // rows]


CASES: list[Case] = [
    Case("chunked", {"chunk": 7}),
    Case("chunked", {"chunk": 1, "start": 3}, q_len=21, kv_len=33),
    Case("chunked", {"chunk": 16, "start": int64([0, 13])}, q_len=19, kv_len=53, q_offset=(34, 20)),
    Case("chunked", {"chunk": 100}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("chunked_causal", {"chunk": 8}),
    Case("chunked_causal", {"chunk": 9, "start": int32([5, 12])}, q_len=40, kv_len=40),
    Case("chunked_causal", {"chunk": 500}, q_len=31, kv_len=57, q_offset=26),
    Case("chunked_causal", {"chunk": 50, "start": -7}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("block_causal", {"block": 6}),
    Case("block_causal", {"block": 1}, q_len=33, kv_len=47, q_offset=(14, 3)),
    Case("block_causal", {"block": 48}, batch=1, heads=1, q_len=150, kv_len=160),
    Case("block_causal", {"ids": RANDOM.ints(-3, 5, 2, 40), "strict": True}),
    Case("block_causal", {"ids": runs([1, 4, 9, 16, 25, 36, 49]), "strict": False}, q_len=60, kv_len=140, q_offset=80),
    Case("block_causal", {"ids": RANDOM.order(40).int()}, q_len=15, kv_len=40, q_offset=(4, 25)),
    Case("block_window", {"chunk": 4, "left": 2, "right": 1}),
    Case("block_window", {"chunk": 7, "left": 0, "right": 0}, q_len=23, kv_len=47, q_offset=(24, 3)),
    Case("block_window", {"chunk": 16, "left": 1, "right": 2}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("strided", {"stride": 5}),
    Case("strided", {"stride": 1}, q_len=30, kv_len=25),
    Case("strided", {"stride": 16}, q_len=23, kv_len=60, q_offset=(37, 9)),
    Case("strided", {"stride": 40}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("fixed", {"stride": 8, "summary": 2}),
    Case("fixed", {"stride": 5, "summary": 0}, q_len=33, kv_len=21),
    Case("fixed", {"stride": 4, "summary": 9}, q_len=17, kv_len=49, q_offset=(32, 11)),
    Case("fixed", {"stride": 60, "summary": 7}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("bigbird", {"length": 60, "block": 4}, q_len=60, kv_len=60),
    Case("bigbird", {"length": 41, "block": 3, "random_blocks": 2, "seed": 7}, q_len=41, kv_len=41),
    Case("bigbird", {"length": 40, "block": 2, "window": 0, "global_blocks": 0, "random_blocks": 1}),
    Case("bigbird", {"length": 40, "block": 5, "window": 2, "global_blocks": 2, "random_blocks": 9}),
    Case("bigbird", {"length": 30, "block": 4, "global_blocks": 50}, q_len=30, kv_len=30),
    Case("bigbird", {"length": 33, "block": 64}, q_len=33, kv_len=33),
    Case("bigbird", {"length": 50, "block": 3, "global_blocks": 2, "both_ends": False}, q_len=50, kv_len=50),
    Case("bigbird", {"length": 30, "block": 4, "global_blocks": 50, "both_ends": False}, q_len=30, kv_len=30),
    Case("bigbird", {"length": 200, "block": 16, "seed": 3}, batch=1, heads=1, q_len=200, kv_len=200),
    Case("block_sparse", {"visible_blocks": RANDOM.bools(0.4, 8, 8), "block": 5}),
    Case(
        "block_sparse",
        {"visible_blocks": RANDOM.bools(0.4, 2, 2, 7, 9), "block": (8, 6)},
        q_len=20,
        kv_len=50,
        q_offset=(30, 3),
    ),
    Case("block_sparse", {"visible_blocks": RANDOM.bools(0.4, 1, 3, 40, 2), "block": (1, 20)}, heads=3),
    Case(
        "block_sparse",
        {"visible_blocks": RANDOM.bools(0.4, 10, 10), "block": 16},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=160,
    ),
    Case("bsr", {"crow_indices": int64([0, 2, 2, 3, 6]), "col_indices": int64([0, 2, 1, 3, 0, 2]), "block": 10}),
    Case(
        "bsr",
        {"crow_indices": int32([0, 1, 4]), "col_indices": int32([2, 0, 1, 3]), "block": (16, 8)},
        q_len=27,
        kv_len=29,
    ),
    Case(
        "bsr",
        {"crow_indices": int64([0, 0, 0]), "col_indices": int64([]), "block": 20},
        q_len=11,
        kv_len=40,
        q_offset=29,
    ),
    Case(
        "bsr",
        {"crow_indices": torch.arange(0, 21, 2), "col_indices": RANDOM.ints(0, 10, 20), "block": 16},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
    Case("block_topk", {"indices": RANDOM.ints(-1, 8, 8, 3), "block": 5}),
    Case("block_topk", {"indices": RANDOM.ints(-1, 7, 2, 2, 40, 2, dtype=torch.int32), "block": (1, 6)}),
    Case(
        "block_topk",
        {"indices": RANDOM.ints(0, 5, 2, 1, 9, 2), "block": (6, 10)},
        q_len=21,
        kv_len=50,
        q_offset=(29, 0),
    ),
    Case("block_topk", {"indices": torch.full((3, 1), -1), "block": 16}, q_len=40, kv_len=33),
]
