"""Masks that are given as tables or lists."""

from __future__ import annotations

import math
from typing import Any

import torch

from oracles.case import Case, Random, int32, int64, mask_oracle, row_of, table_of

RANDOM = Random(5)


@mask_oracle
def dense(b: int, h: int, q: int, kv: int, size: Case, visible: Any) -> bool:
    """Pairs that the table marks."""
    return bool(table_of(visible, b, h)[q][kv])


@mask_oracle
def vertical_slash(b: int, h: int, q: int, kv: int, size: Case, vertical: Any, slash: Any) -> bool:
    """Pairs where kv <= q, and kv is among the columns or q - kv among the distances."""

    def numbers(values: Any) -> Any:
        if values and isinstance(values[0], list) and isinstance(values[0][0], list):
            return values[b][h]
        return values[h] if values and isinstance(values[0], list) else values

    return kv <= q and (kv in numbers(vertical) or q - kv in numbers(slash))


@mask_oracle
def flashmask(b: int, h: int, q: int, kv: int, size: Case, startend_row_indices: Any, causal: bool) -> bool:
    """Pairs outside the hidden rows of column kv and, if causal, not above the diagonal."""
    heads = startend_row_indices[b % len(startend_row_indices)]
    rows = heads[h % len(heads)][kv]
    if causal:
        start, end = rows if len(rows) == 2 else (rows[0], math.inf)
        return kv <= q and not start <= q < end
    if len(rows) == 2:
        return q < rows[0] and q >= rows[1]
    return not rows[0] <= q < rows[1] and not rows[2] <= q < rows[3]


@mask_oracle
def slices(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    q_ranges: list[list[int]],
    kv_ranges: list[list[int]],
    types: list[int] | None = None,
) -> bool:
    """Pairs in a slice whose type shows them.

    Type 1 hides the pairs above the diagonal through the slice's last pair. Type 2 hides the pairs below the diagonal
    through its first pair. Type 3 hides both.
    """
    for n, ((q_start, q_end), (kv_start, kv_end)) in enumerate(zip(q_ranges, kv_ranges, strict=True)):
        if not (q_start <= q < q_end and kv_start <= kv < kv_end):
            continue
        shown_by_type = {
            0: True,
            1: kv - (kv_end - 1) <= q - (q_end - 1),
            2: kv - kv_start >= q - q_start,
            3: q - q_start <= kv - kv_start <= (kv_end - kv_start) - (q_end - q_start) + (q - q_start),
        }
        if shown_by_type[0 if types is None else types[n]]:
            return True
    return False


@mask_oracle
def intervals(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    starts: Any,
    ends: Any,
    other_starts: Any = None,
    other_ends: Any = None,
) -> bool:
    """Keys of the query's interval or of its other one."""
    pairs = [(starts, ends)] if other_starts is None else [(starts, ends), (other_starts, other_ends)]
    return any(kv in range(row_of(first, b)[q], row_of(end, b)[q]) for first, end in pairs)


@mask_oracle
def edges(b: int, h: int, q: int, kv: int, size: Case, crow: list[int], col: list[int]) -> bool:
    """Keys that are listed for q."""
    return kv in col[crow[q] : crow[q + 1]]


@mask_oracle
def topk(b: int, h: int, q: int, kv: int, size: Case, indices: Any, granularity: int = 1) -> bool:
    """Keys of the entries that are listed for q; h // (heads / G) is the list of head h. With a row for each query of
    the call, q_offset's query has the first row, and batch elements have the rows one after another, if there are so
    many.
    """
    of_call = q - (size.q_offset if isinstance(size.q_offset, int) else size.q_offset[b])
    if isinstance(indices[0][0][0], list):
        rows = indices[b if len(indices) > 1 else 0]
        lists = rows[of_call if len(rows) == size.q_len else q]
    else:
        lists = indices[b * size.q_len + of_call if len(indices) == size.batch * size.q_len else q]
    return any(
        kv in range(i * granularity, (i + 1) * granularity) for i in lists[h * len(lists) // size.heads] if i >= 0
    )


def _graph(rows: int, columns: int, fraction: float) -> dict[str, Any]:
    """Return a random graph in which some edges stand twice, and the columns of a row in any order."""
    marked = RANDOM.bools(fraction, rows, columns)
    listed = [[*row.nonzero()[:, 0].flip(0).tolist(), *row.nonzero()[:2, 0].tolist()] for row in marked]
    counts = torch.tensor([0, *map(len, listed)])
    return {"crow": counts.cumsum(0), "col": int64([kv for row in listed for kv in row])}


CASES: list[Case] = [
    Case("intervals", {"starts": RANDOM.ints(-3, 30, 40), "ends": RANDOM.ints(0, 50, 2, 40)}),
    Case(
        "intervals",
        {
            name: RANDOM.ints(0, 50, 2, 37, dtype=torch.int32)
            for name in ("starts", "ends", "other_starts", "other_ends")
        },
        q_len=17,
        kv_len=50,
        q_offset=(20, 4),
    ),
    Case("intervals", {"starts": torch.zeros(150).int(), "ends": torch.arange(150) // 2}, 1, 1, 150, 150),
    Case("edges", _graph(40, 40, 0.1)),
    Case("edges", _graph(70, 75, 0.02), q_len=33, kv_len=75, q_offset=(37, 4)),
    Case("edges", {"crow": torch.zeros(41).int(), "col": int64([])}),
    Case("edges", _graph(150, 150, 0.01), 1, 1, 150, 150),
    Case("topk", {"indices": RANDOM.ints(-1, 40, 40, 1, 5)}),
    Case(
        "topk",
        {"indices": RANDOM.ints(-1, 13, 2, 37, 2, 3, dtype=torch.int32), "granularity": 4},
        2,
        4,
        17,
        50,
        (20, 4),
    ),
    Case("topk", {"indices": RANDOM.ints(-1, 3, 2, 40, 3, 1), "granularity": 16}, heads=3),
    Case("topk", {"indices": RANDOM.ints(-1, 50, 2 * 17, 1, 4, dtype=torch.int32)}, 2, 4, 17, 50, (20, 4)),
    Case("topk", {"indices": RANDOM.ints(-1, 5, 1, 17, 4, 2), "granularity": 12}, 2, 4, 17, 50, 30),
    Case("topk", {"indices": RANDOM.ints(0, 150, 150, 1, 9)}, 1, 1, 150, 150),
    Case("dense", {"visible": RANDOM.bools(0.3, 40, 40)}),
    Case("dense", {"visible": RANDOM.bools(0.3, 2, 3, 31, 31)}, heads=3, q_len=17, kv_len=31, q_offset=(14, 0)),
    Case("dense", {"visible": RANDOM.bools(0.3, 2, 1, 40, 40)}),
    Case("dense", {"visible": RANDOM.bools(0.3, 1, 2, 40, 40)}),
    Case("dense", {"visible": torch.ones(150, 150, dtype=torch.bool).tril(3)}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("vertical_slash", {"vertical": int64([0, 5, 30]), "slash": int64([0, 1, 9])}),
    Case(
        "vertical_slash",
        {"vertical": RANDOM.ints(-1, 51, 3, 4, dtype=torch.int32), "slash": RANDOM.ints(-1, 51, 2, 3, 5)},
        heads=3,
        q_len=20,
        kv_len=51,
        q_offset=(31, 6),
    ),
    Case("vertical_slash", {"vertical": int64([-1]), "slash": int64([3, 3])}, q_len=30, kv_len=20),
    Case(
        "vertical_slash",
        {"vertical": int64([1, 140]), "slash": torch.arange(20)},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
    Case("flashmask", {"startend_row_indices": RANDOM.ints(0, 41, 2, 1, 40, 1), "causal": True}),
    Case("flashmask", {"startend_row_indices": RANDOM.ints(0, 41, 2, 2, 40, 2), "causal": True}),
    Case("flashmask", {"startend_row_indices": RANDOM.ints(0, 41, 1, 1, 40, 2, dtype=torch.int32), "causal": False}),
    Case(
        "flashmask",
        {"startend_row_indices": RANDOM.ints(0, 60, 1, 2, 53, 4), "causal": False},
        q_len=20,
        kv_len=53,
        q_offset=(33, 4),
    ),
    # A wide, a high and a square slice of each type.
    Case(
        "slices",
        {
            "q_ranges": int64([[0, 5], [5, 7], [7, 12]] * 4) + 13 * torch.arange(4).repeat_interleave(3)[:, None],
            "kv_ranges": int64([[0, 2], [3, 8], [20, 25]] * 4),
            "types": torch.arange(4).repeat_interleave(3),
        },
        q_len=53,
        kv_len=30,
    ),
    Case("slices", {"q_ranges": int32([[0, 9], [9, 40]]), "kv_ranges": int32([[0, 40], [3, 5]])}),
    # Slices that touch, overlap, are empty, or have neither queries nor keys.
    Case(
        "slices",
        {
            "q_ranges": int64([[4, 30], [0, 20], [10, 40], [10, 10], [3, 9], [0, 40], [12, 31]]),
            "kv_ranges": int64([[0, 7], [7, 12], [10, 30], [0, 50], [50, 50], [38, 39], [20, 51]]),
            "types": int32([0, 0, 1, 0, 3, 2, 3]),
        },
        q_len=40,
        kv_len=51,
    ),
    Case(
        "slices",
        {
            "q_ranges": RANDOM.ints(0, 54, 12, 2).sort(1).values,
            "kv_ranges": RANDOM.ints(0, 54, 12, 2).sort(1).values,
            "types": RANDOM.ints(0, 4, 12),
        },
        q_len=20,
        kv_len=53,
        q_offset=(33, 4),
    ),
    Case("slices", {"q_ranges": int64([[7, 7]]), "kv_ranges": int64([[0, 9]])}, q_len=20, kv_len=9),
    Case(
        "slices",
        {
            "q_ranges": int64([[0, 60], [60, 150], [60, 150]]),
            "kv_ranges": int64([[0, 60], [60, 150], [0, 20]]),
            "types": int64([1, 1, 0]),
        },
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
]
