"""Masks of drafting, diffusion and caches of language models."""

from __future__ import annotations

from typing import Any

import torch

from oracles.case import Case, Random, int32, int64, mask_oracle, number_of, row_of, runs

RANDOM = Random(4)


@mask_oracle
def tree(b: int, h: int, q: int, kv: int, size: Case, parents: Any, start: Any = 0) -> bool:
    """Keys on the way from q up to its root, and all keys before the tree.

    Before the tree the mask is causal; after it nothing is visible.
    """
    first = number_of(start, b)
    above = row_of(parents, b)
    end = first + len(above)
    if q >= end or kv >= end:
        return False
    if q < first or kv < first:
        return kv <= q
    node = q - first
    while node >= 0:
        if node == kv - first:
            return True
        node = above[node]
    return False


@mask_oracle
def eagle3(b: int, h: int, q: int, kv: int, size: Case, length: int) -> bool:
    """Keys up to q among the first `length`, and the key at q's place among each later `length`."""
    step, place = divmod(kv, length)
    return kv <= q if step == 0 else place == q % length


@mask_oracle
def block_diffusion(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    length: int,
    block: int | None = None,
    block_ids: Any = None,
    clean_first: bool = False,
) -> bool:
    """Blocks of a noised half and a clean half, one after the other.

    A noised query sees its own noised block and earlier clean ones, a clean query the clean blocks up to its own.
    """

    def block_of(token: int) -> int:
        return int(row_of(block_ids, b)[token]) if block is None else token // block

    q_clean, kv_clean = ((i < length) if clean_first else (i >= length) for i in (q, kv))
    row, column = (block_of(i - length if i >= length else i) for i in (q, kv))
    if q_clean:
        return kv_clean and column <= row
    return column < row if kv_clean else column == row


@mask_oracle
def anchored(b: int, h: int, q: int, kv: int, size: Case, anchors: Any, block: int, context: int) -> bool:
    """For the queries of block n, the first anchors[n] keys and the keys of block n behind the context."""
    n = q // block
    anchor = row_of(anchors, b)[n]
    drafts = range(context + n * block, context + (n + 1) * block)
    return anchor >= 0 and (kv < min(anchor, context) or kv in drafts)


@mask_oracle
def key_eviction(b: int, h: int, q: int, kv: int, size: Case, evicted: Any) -> bool:
    """Pairs where kv <= q < evicted[kv]."""
    if isinstance(evicted[0], list) and isinstance(evicted[0][0], list):
        rows = evicted[b]
        return kv <= q < (rows[h] if len(rows) > 1 else rows[0])[kv]
    return kv <= q < row_of(evicted, b)[kv]


CASES: list[Case] = [
    Case("tree", {"parents": int64([-1, 0, 0, 1, 1, 2, 4, 6]), "start": 25}, q_len=8, kv_len=33, q_offset=25),
    Case("tree", {"parents": int32([-1, -1, 0, 1, 1, 2, 0, -1, 7, 3])}, q_len=14, kv_len=12),
    Case(
        "tree",
        {"parents": int64([[-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]]), "start": int64([30, 11])},
        q_len=5,
        kv_len=40,
        q_offset=(30, 11),
    ),
    Case("tree", {"parents": int64([-1, 0, 0, 1]), "start": int32([0, 9])}, q_len=20, kv_len=20),
    Case("tree", {"parents": int64([[(n - 1) // 3 for n in range(40)], [n - 1 - n % 2 for n in range(40)]])}),
    Case(
        "tree",
        {"parents": int64([-1, *(max(0, n - 1 - n * n % 7) for n in range(1, 100))]), "start": 50},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
    Case("eagle3", {"length": 20}, q_len=20, kv_len=60),
    Case("eagle3", {"length": 40}),
    Case("eagle3", {"length": 13}, batch=3, q_len=13, kv_len=26),
    Case("eagle3", {"length": 60}, batch=1, heads=1, q_len=60, kv_len=180),
    Case("block_diffusion", {"length": 20, "block": 4}),
    Case("block_diffusion", {"length": 23, "block": 5}, q_len=46, kv_len=46),
    Case("block_diffusion", {"length": 20, "block": 1}, q_len=11, kv_len=40, q_offset=(0, 29)),
    Case("block_diffusion", {"length": 75, "block": 16}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("block_diffusion", {"length": 20, "block": 3, "clean_first": True}),
    Case(
        "block_diffusion",
        {"length": 21, "block_ids": torch.stack([runs([2, 9, 1, 9]), RANDOM.ints(0, 4, 21)]), "clean_first": True},
        q_len=20,
        kv_len=42,
        q_offset=(22, 5),
    ),
    Case("block_diffusion", {"length": 20, "block_ids": runs([5, 1, 7, 7], torch.int32)}),
    Case("anchored", {"anchors": int64([0, 9, -1, 20]), "block": 5, "context": 20}, q_len=20, kv_len=40),
    Case("anchored", {"anchors": RANDOM.ints(-1, 12, 2, 13), "block": 3, "context": 11}, q_len=37, kv_len=50),
    Case("anchored", {"anchors": int32([3, 70]), "block": 75, "context": 70}, 1, 1, q_len=150, kv_len=150),
    Case("key_eviction", {"evicted": RANDOM.ints(0, 50, 40)}),
    Case(
        "key_eviction",
        {"evicted": RANDOM.ints(0, 70, 2, 51, dtype=torch.int32)},
        q_len=17,
        kv_len=51,
        q_offset=(34, 20),
    ),
    Case("key_eviction", {"evicted": RANDOM.ints(0, 60, 2, 3, 40)}, heads=3),
    Case("key_eviction", {"evicted": RANDOM.ints(0, 60, 2, 1, 40)}, heads=3),
    Case("key_eviction", {"evicted": torch.arange(150) + 60}, batch=1, heads=1, q_len=150, kv_len=150),
]
