"""Masks inside sequences that are packed end to end, or kept in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracles.case import MASKS, Case, Random, int32, int64, mask_oracle, number_of

RANDOM = Random(7)


@mask_oracle
def packed(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    mask: tuple[str, dict[str, Any]],
    offsets: list[int],
    kv_offsets: list[int] | None = None,
    q_start: int | list[int] = 0,
) -> bool:
    """Pairs of one sequence i that the inner mask shows, at their positions in the sequence.

    These are q - offsets[i] + q_start[i] and kv - kv_offsets[i].
    """
    kv_bounds = offsets if kv_offsets is None else kv_offsets
    count = len(offsets) - 1
    for i in range(count):
        if offsets[i] <= q < offsets[i + 1] and kv_bounds[i] <= kv < kv_bounds[i + 1]:
            name, params = mask
            start = number_of(q_start, i)
            inner = Case(
                name,
                params,
                batch=count,
                heads=size.heads,
                q_len=max(offsets[n + 1] - offsets[n] for n in range(count)),
                kv_len=max(kv_bounds[n + 1] - kv_bounds[n] for n in range(count)),
            )
            return MASKS[name](i, h, q - offsets[i] + start, kv - kv_bounds[i], inner, **params)
    return False


@mask_oracle
def paged(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    mask: tuple[str, dict[str, Any]],
    page_table: list[list[int]],
    kv_lens: list[int],
    page_size: int,
) -> bool:
    """Slots kv that hold key n < kv_lens[b] of the sequence, where the inner mask shows (b, h, q, n)."""
    for n in range(kv_lens[b]):
        if kv == page_table[b][n // page_size] * page_size + n % page_size:
            name, params = mask
            inner = Case(name, params, size.batch, size.heads, size.q_len, len(page_table[b]) * page_size)
            return MASKS[name](b, h, q, n, inner, **params)
    return False


def _packed_case(
    name: str,
    inner: dict[str, Any],
    lengths: list[int],
    kv_lengths: list[int] | None = None,
    dtype: torch.dtype = torch.int64,
    trailing: int = 0,
    q_start: int | list[int] = 0,
) -> Case:
    """Return a packed case of sequences of these lengths, with `trailing` tokens of no sequence after the last."""
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    params: dict[str, Any] = {"mask": (name, inner), "offsets": torch.tensor(bounds, dtype=dtype)}
    kv_total = bounds[-1]
    if kv_lengths is not None:
        kv_bounds = [sum(kv_lengths[:i]) for i in range(len(kv_lengths) + 1)]
        params["kv_offsets"] = torch.tensor(kv_bounds, dtype=dtype)
        kv_total = kv_bounds[-1]
    if q_start != 0:
        params["q_start"] = torch.tensor(q_start, dtype=dtype) if isinstance(q_start, list) else q_start
    return Case("packed", params, batch=1, q_len=bounds[-1] + trailing, kv_len=kv_total + trailing)


def _paged_case(
    name: str,
    inner: dict[str, Any],
    page_size: int,
    page_table: list[list[int]],
    kv_lens: list[int],
    q_len: int = 40,
    n_pages: int = 8,
    q_offset: int | tuple[int, ...] = 0,
    make: Callable[[Any], Tensor] = int64,
) -> Case:
    params = {
        "mask": (name, inner), "page_table": make(page_table), "kv_lens": make(kv_lens), "page_size": page_size,
    }  # fmt: skip
    return Case("paged", params, len(kv_lens), 2, q_len, n_pages * page_size, q_offset)


CASES: list[Case] = [
    _packed_case("causal", {}, [13, 1, 26]),
    _packed_case("causal", {}, [100, 28, 1, 99, 72], dtype=torch.int32),
    # An empty sequence first, in the middle and last.
    _packed_case("causal", {}, [0, 20, 0, 0, 31, 0], dtype=torch.int32),
    _packed_case("causal", {}, [37]),
    _packed_case("causal", {}, [9, 14, 8], [16, 3, 33]),
    _packed_case("causal", {}, [17, 12], trailing=6),
    # Where the queries of each sequence start: ends aligned, and anywhere.
    _packed_case("causal", {}, [9, 1, 8, 0], [16, 30, 33, 4], q_start=[7, 29, 25, 4]),
    _packed_case("causal", {}, [9, 14, 8], [16, 3, 33], dtype=torch.int32, q_start=[0, 20, 5], trailing=3),
    _packed_case("sliding_window", {"window": 5}, [40, 130, 3], [60, 150, 23], q_start=20),
    _packed_case("prefix_lm", {"prefix_len": int64([15, 0, 9])}, [8, 20, 11], [20, 25, 30], q_start=[12, 5, 0]),
    _packed_case("grouped_tril", {"seq_lens": int64([10, 0, 31])}, [10, 5, 17], [12, 5, 30], q_start=[2, 0, 14]),
    _packed_case("full", {}, [1, 1, 1, 30, 1]),
    # The second sequence has no keys, the third no queries.
    _packed_case("full", {}, [12, 9, 0, 20], [30, 0, 11, 6], dtype=torch.int32),
    _packed_case("grouped_tril", {"seq_lens": int64([10, 0, 7, 16])}, [10, 5, 17, 16]),
    _packed_case("grouped_tril", {"seq_lens": int32([129, 60])}, [150, 150], dtype=torch.int32),
    _packed_case("padding", {"kv_lens": int32([4, 0, 22])}, [15, 8, 11], [9, 6, 22]),
    _packed_case("sliding_window", {"window": 4}, [21, 3, 0, 30]),
    _packed_case("sliding_window", {"window": int64(40)}, [128, 129, 43], dtype=torch.int32),
    _packed_case("sliding_window", {"window": 0}, [5, 20, 12], [5, 10, 31]),
    _packed_case("local", {"left": 3, "right": 6}, [25, 1, 16]),
    _packed_case("prefix_lm", {"prefix_len": int64([5, 0, 40, 9])}, [18, 20, 11, 9]),
    _packed_case("prefix_lm", {"prefix_len": 6}, [24, 4, 13], [15, 20, 30], dtype=torch.int32),
    _packed_case("document", {"document_ids": RANDOM.ints(0, 3, 3, 28)}, [28, 5, 19]),
    _packed_case("natten", {"height": 4, "width": 5, "kernel": (3, 2), "causal": (False, True)}, [20, 20, 20]),
    _paged_case("causal", {}, 5, [[6, 2, 1, 3], [0, 7, 5, 4]], [20, 17], q_len=20),
    # Past the last page in use the table holds anything.
    _paged_case("causal", {}, 8, [[3, -1, 99], [5, 0, 2], [-7, -7, -7]], [3, 24, 0], q_offset=(2, 9, 0), make=int32),
    # The first two pages are shared, one sequence ends in the second of them.
    _paged_case("full", {}, 16, [[4, 1, 6], [4, 1, 0], [4, 1, 1]], [41, 48, 20], q_len=7),
    _paged_case("sliding_window", {"window": 9}, 16, [[7, 3, 0, 4]], [60], q_len=30, q_offset=30),
    _paged_case("sliding_window", {"window": int64(40)}, 1, [[9, 4, 0, 1], [2, 3, 5, 8]], [4, 3], n_pages=10),
    _paged_case("padding", {"kv_lens": int32([3, 30])}, 12, [[1, 0, 5], [2, 4, 3]], [36, 25], make=int32),
    _paged_case("prefix_lm", {"prefix_len": int64([5, 20])}, 7, [[1, 0, 5], [2, 4, 3]], [21, 9], q_len=21),
    _paged_case("document", {"document_ids": RANDOM.ints(0, 2, 2, 48)}, 16, [[1, 0, 5], [2, 4, 3]], [44, 48]),
    _paged_case("causal", {}, 130, [[2, 0], [1, 3]], [250, 131], q_len=3, n_pages=4, q_offset=(247, 128)),
    _paged_case("local", {"left": 30, "right": 2}, 64, [[5, 1, 0]], [150], q_len=140, n_pages=6, q_offset=4),
]
