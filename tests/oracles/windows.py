"""Masks by the distance of a query and a key, and by global tokens."""

from __future__ import annotations

from typing import Any

import torch

from oracles.case import Case, Random, int32, int64, mask_oracle, row_of

RANDOM = Random(1)


@mask_oracle
def full(b: int, h: int, q: int, kv: int, size: Case) -> bool:
    """Every pair."""
    return True


@mask_oracle
def causal(b: int, h: int, q: int, kv: int, size: Case) -> bool:
    """Pairs where kv <= q."""
    return kv <= q


@mask_oracle
def inverse_causal(b: int, h: int, q: int, kv: int, size: Case) -> bool:
    """Pairs where kv >= q."""
    return kv >= q


@mask_oracle
def sliding_window(b: int, h: int, q: int, kv: int, size: Case, window: int) -> bool:
    """Pairs where q - window <= kv <= q: `window` earlier keys and the query's own."""
    return kv <= q and q - kv <= window


@mask_oracle
def local(b: int, h: int, q: int, kv: int, size: Case, left: int, right: int) -> bool:
    """Pairs where -right <= q - kv <= left: `left` earlier keys, the query's own, `right` later ones."""
    return -right <= q - kv <= left


@mask_oracle
def band(b: int, h: int, q: int, kv: int, size: Case, lower: int, upper: int) -> bool:
    """Pairs where lower <= kv - q <= upper."""
    return lower <= kv - q <= upper


@mask_oracle
def dilated_window(b: int, h: int, q: int, kv: int, size: Case, window: int, dilation: int) -> bool:
    """Keys q, q +- dilation, q +- 2 * dilation, ... within `window`."""
    return kv in {q + side * n * dilation for side in (-1, 1) for n in range(window // dilation + 1)}


@mask_oracle
def sink_window(b: int, h: int, q: int, kv: int, size: Case, sinks: int, window: int) -> bool:
    """Keys up to q that are below `sinks`, or at most `window` before q."""
    return kv <= q and (kv < sinks or kv >= q - window)


@mask_oracle
def global_tokens(b: int, h: int, q: int, kv: int, size: Case, tokens: Any) -> bool:
    """Pairs where a token is global: below a number, or marked."""
    if isinstance(tokens, int):
        return q < tokens or kv < tokens
    marked = row_of(tokens, b)
    return bool(marked[q] or marked[kv])


@mask_oracle
def longformer(b: int, h: int, q: int, kv: int, size: Case, window: int, tokens: Any) -> bool:
    """Pairs at most `window` apart, or with a global token."""
    return abs(q - kv) <= window or global_tokens(b, h, q, kv, size, tokens)


CASES: list[Case] = [
    Case("full", {}),
    Case("full", {}, batch=3, heads=1, q_len=17, kv_len=53, q_offset=36),
    Case("full", {}, q_len=1, kv_len=70, q_offset=(69, 3)),
    Case("causal", {}),
    Case("causal", {}, heads=3, q_len=23, kv_len=61),
    Case("causal", {}, q_len=61, kv_len=23),
    Case("causal", {}, q_len=19, kv_len=64, q_offset=45),
    Case("causal", {}, batch=3, q_len=9, kv_len=50, q_offset=(0, 17, 41)),
    Case("causal", {}, q_len=1, kv_len=33, q_offset=(32, 0)),
    Case("causal", {}, q_len=1, kv_len=1),
    Case("causal", {}, q_len=300, kv_len=300),
    Case("causal", {}, q_len=150, kv_len=300, q_offset=(150, 77)),
    Case("causal", {}, q_len=40, kv_len=150, q_offset=110),
    Case("inverse_causal", {}),
    Case("inverse_causal", {}, q_len=29, kv_len=61, q_offset=(32, 5)),
    Case("inverse_causal", {}, batch=1, heads=1, q_len=150, kv_len=140),
    Case("sliding_window", {"window": 8}),
    Case("sliding_window", {"window": 0}, q_len=37, kv_len=37),
    Case("sliding_window", {"window": 1000}, q_len=37, kv_len=50),
    # Queries beyond the last key's reach see nothing.
    Case("sliding_window", {"window": 5}, q_len=70, kv_len=41),
    Case("sliding_window", {"window": int64(15)}, heads=3, q_len=20, kv_len=70, q_offset=50),
    Case("sliding_window", {"window": int32(16)}, q_len=15, kv_len=65, q_offset=(50, 7)),
    Case("sliding_window", {"window": int64(0)}, q_len=1, kv_len=30, q_offset=(29, 4)),
    Case("sliding_window", {"window": 130}, q_len=300, kv_len=300),
    Case("sliding_window", {"window": int32(3)}, q_len=300, kv_len=150),
    Case("sliding_window", {"window": 127}, q_len=44, kv_len=300, q_offset=(256, 128)),
    Case("local", {"left": 4, "right": 9}),
    Case("local", {"left": 0, "right": 0}, q_len=33, kv_len=55),
    Case("local", {"left": 0, "right": 3}, q_len=33, kv_len=33),
    Case("local", {"left": 6, "right": 0}, q_len=69, kv_len=31),
    Case("local", {"left": 500, "right": 500}, q_len=29, kv_len=44),
    Case("local", {"left": int64(10), "right": int32(2)}, q_len=18, kv_len=60, q_offset=42),
    Case("local", {"left": int32(3), "right": int64(7)}, q_len=18, kv_len=60, q_offset=(0, 31)),
    # The second batch element's queries all lie beyond the reach of the keys.
    Case("local", {"left": 2, "right": int64(1)}, q_len=16, kv_len=24, q_offset=(8, 3)),
    Case("band", {"lower": -5, "upper": 3}),
    Case("band", {"lower": 4, "upper": 9}, q_len=33, kv_len=45),
    Case("band", {"lower": -20, "upper": -7}, q_len=16, kv_len=37, q_offset=(0, 21)),
    Case("band", {"lower": 3, "upper": 2}, q_len=20, kv_len=20),
    Case("band", {"lower": int64(-100), "upper": int32(40)}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("dilated_window", {"window": 9, "dilation": 3}),
    Case("dilated_window", {"window": int64(10), "dilation": 4}, q_len=31, kv_len=47, q_offset=(0, 16)),
    Case("dilated_window", {"window": 5, "dilation": 1}, q_len=50, kv_len=29),
    Case("dilated_window", {"window": 3, "dilation": 7}, q_len=20, kv_len=20),
    Case("sink_window", {"sinks": 3, "window": 6}),
    Case("sink_window", {"sinks": 0, "window": 0}, q_len=33, kv_len=21),
    Case("sink_window", {"sinks": int64(4), "window": int64(9)}, q_len=15, kv_len=60, q_offset=(45, 20)),
    Case("sink_window", {"sinks": 30, "window": 25}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("global_tokens", {"tokens": 3}),
    Case("global_tokens", {"tokens": RANDOM.bools(0.1, 53)}, q_len=19, kv_len=53, q_offset=34),
    Case("global_tokens", {"tokens": RANDOM.bools(0.2, 2, 40)}),
    Case("global_tokens", {"tokens": 0}, q_len=20, kv_len=20),
    Case("longformer", {"window": 4, "tokens": 2}),
    Case(
        "longformer",
        {"window": int64(6), "tokens": RANDOM.bools(0.1, 2, 61)},
        q_len=61,
        kv_len=50,
    ),
    Case("longformer", {"window": 20, "tokens": torch.arange(150) % 71 == 5}, batch=1, heads=1, q_len=150, kv_len=150),
]
