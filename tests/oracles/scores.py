"""Score changes: functions of the scaled scores [B, H, Q, K] before the mask.

Tensors stay tensors, so gradients flow.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oracles.case import Case, Random, offsets, score_oracle

RANDOM = Random(8)


def _table(scores: Tensor, case: Case, cell: Callable[[int, int, int], Tensor]) -> Tensor:
    """Return cell(h, q, kv) at every place of the scores, q with its offset added."""
    batch, heads, q_len, kv_len = scores.shape
    starts = offsets(case)
    assert len(starts) == batch
    cells = [
        cell(h, starts[b] + row, kv).to(scores.dtype)
        for b in range(batch)
        for h in range(heads)
        for row in range(q_len)
        for kv in range(kv_len)
    ]
    return torch.stack(cells).reshape(batch, heads, q_len, kv_len)


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of Press et al. 2021.

    A power of two has 2^(-8 (i + 1) / heads). Another number of heads begins with the slopes of the largest
    power of two n below it, followed by the slopes of 2n at even positions until there are enough.
    """
    n = 1
    while n * 2 <= heads:
        n *= 2
    slopes = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    position = 0
    while len(slopes) < heads:
        slopes.append(2.0 ** (-8.0 * (position + 1) / (2 * n)))
        position += 2
    return slopes


@score_oracle
def alibi(scores: Tensor, case: Case, slopes: Tensor | None = None, bidirectional: bool = False) -> Tensor:
    """s - slope_h * (q - kv), or of |q - kv|."""
    heads = scores.shape[1]
    per_head = torch.tensor(alibi_slopes(heads), dtype=torch.float64) if slopes is None else slopes
    assert per_head.shape == (heads,)
    return scores - _table(scores, case, lambda h, q, kv: per_head[h] * float(abs(q - kv) if bidirectional else q - kv))


@score_oracle
def softcap(scores: Tensor, case: Case, cap: float) -> Tensor:
    """cap * tanh(s / cap)."""
    return cap * torch.tanh(scores / cap)


@score_oracle
def relative_bias(scores: Tensor, case: Case, table: Tensor) -> Tensor:
    """s + table[h, clip(kv - q, -D, D) + D], for a table of [H, 2 * D + 1]."""
    assert table.shape[0] == scores.shape[1]
    assert table.shape[1] % 2 == 1
    reach = (table.shape[1] - 1) // 2
    return scores + _table(scores, case, lambda h, q, kv: table[h, min(max(kv - q, -reach), reach) + reach])


@score_oracle
def checkerboard(scores: Tensor, case: Case) -> Tensor:
    """s * 0.5 where |q - kv| is odd, s * 2 where it is even."""
    half, double = torch.tensor(0.5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    return scores * _table(scores, case, lambda h, q, kv: half if abs(q - kv) % 2 == 1 else double)


@score_oracle
def t5_bias(scores: Tensor, case: Case, table: Tensor, max_distance: int = 128, bidirectional: bool = True) -> Tensor:
    """s + table[bucket, h], with the buckets of T5's code.

    Half of a side's buckets go by the distance, the other half by its logarithm.
    """
    buckets = table.shape[0]

    def bucket(distance: int) -> int:
        side, first = buckets, 0
        if bidirectional:
            side //= 2
            first = side if distance > 0 else 0
            far = abs(distance)
        else:
            far = -min(distance, 0)
        exact = side // 2
        if far < exact:
            return first + far
        # 1e-9: a quotient of logarithms that is a whole number may come out a little below it
        beyond = math.log(far / exact) / math.log(max_distance / exact) * (side - exact) + 1e-9
        return first + min(exact + int(beyond), side - 1)

    return scores + _table(scores, case, lambda h, q, kv: table[bucket(kv - q), h])


@score_oracle
def distance_bias(scores: Tensor, case: Case, table: Tensor, distances: Tensor) -> Tensor:
    """s + table[h, distance], one matrix of distances for all batch elements or one for each."""
    batch, heads, q_len, kv_len = scores.shape
    rows = []
    for b, start in enumerate(offsets(case)):
        own = distances[b] if distances.ndim == 3 else distances
        for h in range(heads):
            rows += [table[h, int(own[start + row, kv])] for row in range(q_len) for kv in range(kv_len)]
    return scores + torch.stack(rows).reshape(batch, heads, q_len, kv_len)


@score_oracle
def dense_bias(scores: Tensor, case: Case, bias: Tensor) -> Tensor:
    """s + bias, of the rows from the first query on, for all batch elements and heads or for each."""
    count = scores.shape[2]
    bias = bias[None, None] if bias.ndim == 2 else bias
    rows = [bias[min(b, len(bias) - 1), :, start : start + count] for b, start in enumerate(offsets(case))]
    return scores + torch.stack(rows)


@score_oracle
def sandwich(scores: Tensor, case: Case, dims: int = 128, ratios: Tensor | None = None, positions: int = 0) -> Tensor:
    """s + ratio times the product of the embeddings of q and kv.

    The ratio is H / 8(h + 1) by default, an embedding sin and cos of position / 10000^(2i / dims).
    """

    def embedding(position: int) -> list[float]:
        angles = [position / 10000 ** (2 * i / dims) for i in range(dims // 2)]
        return [f(a) for a in angles for f in (math.sin, math.cos)]

    heads = scores.shape[1]
    places = {n: embedding(n) for n in range(max(offsets(case)) + max(case.q_len, case.kv_len))}

    def cell(h: int, q: int, kv: int) -> Tensor:
        product = sum(x * y for x, y in zip(places[q], places[kv], strict=True))
        return product * (torch.tensor(heads / (8 * (h + 1)), dtype=torch.float64) if ratios is None else ratios[h])

    return scores + _table(scores, case, cell)


@score_oracle
def temperature(scores: Tensor, case: Case, temperatures: Tensor) -> Tensor:
    """s / t_h."""
    return scores / _table(scores, case, lambda h, q, kv: temperatures[h])


@score_oracle
def pair_bias(scores: Tensor, case: Case, bias: Tensor, group: int = 1) -> Tensor:
    """s + bias, each group's repeated for its batch elements, of the rows from the first query on."""
    batch, heads, count, _ = scores.shape
    repeated = bias.repeat_interleave(group, 0) if len(bias) > 1 else bias.repeat(batch, 1, 1, 1)
    assert len(repeated) == batch
    repeated = repeated.repeat(1, heads // bias.shape[1], 1, 1)
    return scores + torch.stack([rows[:, i : i + count] for rows, i in zip(repeated, offsets(case), strict=True)])


@score_oracle
def relative_bias_2d(scores: Tensor, case: Case, table: Tensor, height: int, width: int) -> Tensor:
    """s + table[h, row of q - row of kv + height - 1, column of q - column of kv + width - 1]."""
    assert table.shape == (scores.shape[1], 2 * height - 1, 2 * width - 1)
    pixels = [(row, column) for row in range(height) for column in range(width)]

    def cell(h: int, q: int, kv: int) -> Tensor:
        (row, column), (other_row, other_column) = pixels[q], pixels[kv]
        return table[h, row - other_row + height - 1, column - other_column + width - 1]

    return scores + _table(scores, case, cell)


@score_oracle
def decomposed_bias(scores: Tensor, case: Case, rel_h: Tensor, rel_w: Tensor) -> Tensor:
    """Add rel_h to the scores as [B, H, Q, rows, 1] and rel_w as [B, H, Q, 1, columns], as Segment Anything does."""
    batch, heads, count, _ = scores.shape
    image = scores.view(batch, heads, count, rel_h.shape[3], rel_w.shape[3])
    own_h, own_w = (
        torch.stack([rows[:, i : i + count] for rows, i in zip(rel, offsets(case), strict=True)])
        for rel in (rel_h, rel_w)
    )
    return (image + own_h[..., :, None] + own_w[..., None, :]).view(scores.shape)


@score_oracle
def forgetting(scores: Tensor, case: Case, log_gates: Tensor) -> Tensor:
    """s + the sum of the logarithms of the gates kv + 1 to q; for later keys minus that of q + 1 to kv."""
    rows = []
    for b, start in enumerate(offsets(case)):
        for gates in log_gates[b]:
            for q in range(start, start + scores.shape[2]):
                rows += [gates[kv + 1 : q + 1].sum() - gates[q + 1 : kv + 1].sum() for kv in range(scores.shape[3])]
    return scores + torch.stack(rows).reshape(scores.shape)


@score_oracle
def kerple(scores: Tensor, case: Case, scales: Tensor, rates: Tensor) -> Tensor:
    """s - scale * ln(1 + rate * |q - kv|)."""
    return scores - _table(scores, case, lambda h, q, kv: scales[h] * (1 + rates[h] * abs(q - kv)).log())


@score_oracle
def ssmax(scores: Tensor, case: Case, scales: Tensor) -> Tensor:
    """s * scale * ln(q + 1)."""
    return scores * _table(scores, case, lambda h, q, kv: scales[h] * math.log(q + 1))


@score_oracle
def long_temperature(scores: Tensor, case: Case, floor: int = 8192, strength: float = 0.1) -> Tensor:
    """s * (1 + strength * ln(1 + whole steps of `floor` in q + 1))."""
    return scores * _table(
        scores,
        case,
        lambda h, q, kv: torch.tensor(1 + strength * math.log(1 + math.floor((q + 1) / floor)), dtype=torch.float64),
    )


CASES: list[Case] = [
    Case("kerple", {"scales": RANDOM.floats(2).abs(), "rates": RANDOM.floats(2).abs()}),
    Case("kerple", {"scales": RANDOM.floats(3).abs(), "rates": RANDOM.floats(3).abs()}, 2, 3, 17, 51, (3, 30)),
    Case(
        "kerple",
        {"scales": RANDOM.floats(2).abs(), "rates": RANDOM.floats(2).abs() + 9},
        q_len=9,
        kv_len=70,
        q_offset=61,
    ),
    Case("ssmax", {"scales": RANDOM.floats(2)}),
    Case("ssmax", {"scales": RANDOM.floats(3)}, 2, 3, 17, 51, (3, 30)),
    Case("ssmax", {"scales": RANDOM.floats(2)}, q_len=20, kv_len=30, q_offset=10),
    Case("long_temperature", {"floor": 4}),
    Case("long_temperature", {"floor": 1, "strength": -0.2}, q_len=17, kv_len=51, q_offset=(3, 30)),
    Case("long_temperature", {"floor": 30, "strength": 2.0}, q_len=20, kv_len=50, q_offset=30),
    Case("alibi", {}, heads=2, q_len=23, kv_len=23),
    Case("alibi", {}, heads=3, q_len=13, kv_len=30, q_offset=17),
    Case("alibi", {}, heads=8, q_len=17, kv_len=11),
    Case("alibi", {}, heads=12, q_len=9, kv_len=18, q_offset=(9, 2)),
    Case("alibi", {"slopes": RANDOM.floats(2).abs()}, heads=2, q_len=33, kv_len=20),
    Case("alibi", {"slopes": RANDOM.floats(3)}, heads=3, q_len=12, kv_len=29, q_offset=(0, 17)),
    Case("alibi", {"slopes": RANDOM.floats(8)}, heads=8, q_len=11, kv_len=11, q_offset=5),
    Case("alibi", {"slopes": RANDOM.floats(12)}, heads=12, q_len=10, kv_len=13),
    Case("alibi", {"bidirectional": True}, heads=3, q_len=13, kv_len=30, q_offset=(0, 17)),
    Case("softcap", {"cap": 20.0}),
    Case("softcap", {"cap": 0.5}, heads=3, q_len=17, kv_len=51),
    Case("softcap", {"cap": 2.5}, q_len=12, kv_len=21, q_offset=(3, 9)),
    Case("softcap", {"cap": torch.tensor(1.5)}, heads=3, q_len=14, kv_len=37),
    Case("relative_bias", {"table": RANDOM.floats(2, 9)}, q_len=29, kv_len=29),
    Case("relative_bias", {"table": RANDOM.floats(3, 101)}, heads=3, q_len=15, kv_len=26),
    Case("relative_bias", {"table": RANDOM.floats(2, 33)}, q_len=14, kv_len=37, q_offset=23),
    Case("relative_bias", {"table": RANDOM.floats(4, 15)}, heads=4, q_len=12, kv_len=19, q_offset=(0, 7)),
    Case("relative_bias", {"table": RANDOM.floats(2, 1)}, q_len=21, kv_len=10),
    Case("checkerboard", {}, q_len=31, kv_len=31),
    Case("checkerboard", {}, heads=3, q_len=18, kv_len=27, q_offset=9),
    Case("checkerboard", {}, q_len=10, kv_len=14, q_offset=(1, 4)),
    Case("t5_bias", {"table": RANDOM.floats(32, 2)}, q_len=40, kv_len=40),
    Case(
        "t5_bias",
        {"table": RANDOM.floats(16, 3), "max_distance": 30, "bidirectional": False},
        heads=3,
        q_len=33,
        kv_len=45,
    ),
    Case("t5_bias", {"table": RANDOM.floats(8, 2), "max_distance": 20}, q_len=14, kv_len=60, q_offset=(46, 9)),
    Case("t5_bias", {"table": RANDOM.floats(32, 1)}, batch=1, heads=1, q_len=3, kv_len=300, q_offset=297),
    Case("distance_bias", {"table": RANDOM.floats(2, 5), "distances": RANDOM.ints(0, 5, 21, 30)}, q_len=21, kv_len=30),
    Case(
        "distance_bias",
        {"table": RANDOM.floats(3, 9), "distances": RANDOM.ints(0, 9, 2, 17, 17)},
        heads=3,
        q_len=9,
        kv_len=17,
        q_offset=(8, 4),
    ),
    Case(
        "distance_bias",
        {"table": RANDOM.floats(2, 2), "distances": RANDOM.ints(0, 2, 2, 9, 9)},
        q_len=9,
        kv_len=9,
    ),
    Case("dense_bias", {"bias": RANDOM.floats(21, 30)}, q_len=21, kv_len=30),
    Case("dense_bias", {"bias": RANDOM.floats(2, 3, 17, 17)}, heads=3, q_len=9, kv_len=17, q_offset=(8, 4)),
    Case("dense_bias", {"bias": RANDOM.floats(1, 2, 23, 14)}, q_len=9, kv_len=14, q_offset=14),
    Case("dense_bias", {"bias": RANDOM.floats(2, 1, 12, 33)}, q_len=12, kv_len=33),
    Case("sandwich", {}, q_len=23, kv_len=23),
    Case("sandwich", {"dims": 6}, heads=3, q_len=13, kv_len=30, q_offset=(17, 2)),
    Case("sandwich", {"dims": 64}, heads=8, q_len=12, kv_len=9),
    Case("sandwich", {"ratios": RANDOM.floats(2), "positions": 50}, q_len=12, kv_len=19),
    Case("temperature", {"temperatures": RANDOM.floats(2).abs() + 0.5}, q_len=23, kv_len=31),
    Case("temperature", {"temperatures": RANDOM.floats(3) - 3.0}, heads=3, q_len=12, kv_len=29, q_offset=17),
    Case("temperature", {"temperatures": RANDOM.floats(8).exp()}, heads=8, q_len=11, kv_len=11),
    Case("pair_bias", {"bias": RANDOM.floats(1, 2, 21, 30), "group": 2}, q_len=21, kv_len=30),
    Case("pair_bias", {"bias": RANDOM.floats(2, 2, 17, 23), "group": 3}, batch=6, q_len=17, kv_len=23),
    Case("pair_bias", {"bias": RANDOM.floats(2, 1, 20, 20), "group": 2}, batch=4, heads=3, q_len=20, kv_len=20),
    Case("pair_bias", {"bias": RANDOM.floats(2, 2, 24, 24)}, q_len=9, kv_len=24, q_offset=(15, 4)),
    Case("relative_bias_2d", {"table": RANDOM.floats(2, 9, 11), "height": 5, "width": 6}, q_len=21, kv_len=30),
    Case("relative_bias_2d", {"table": RANDOM.floats(2, 13, 13), "height": 7, "width": 7}, q_len=49, kv_len=49),
    Case(
        "relative_bias_2d",
        {"table": RANDOM.floats(3, 5, 15), "height": 3, "width": 8},
        heads=3,
        q_len=6,
        kv_len=24,
        q_offset=(18, 5),
    ),
    Case("relative_bias_2d", {"table": RANDOM.floats(2, 39, 1), "height": 20, "width": 1}, q_len=20, kv_len=20),
    Case(
        "decomposed_bias",
        {"rel_h": RANDOM.floats(2, 2, 21, 5), "rel_w": RANDOM.floats(2, 2, 21, 6)},
        q_len=21,
        kv_len=30,
    ),
    Case(
        "decomposed_bias",
        {"rel_h": RANDOM.floats(2, 3, 24, 8), "rel_w": RANDOM.floats(2, 3, 24, 3)},
        heads=3,
        q_len=9,
        kv_len=24,
        q_offset=(15, 2),
    ),
    Case(
        "decomposed_bias",
        {"rel_h": RANDOM.floats(1, 2, 13, 1), "rel_w": RANDOM.floats(1, 2, 13, 7)},
        batch=1,
        q_len=13,
        kv_len=7,
    ),
    Case("forgetting", {"log_gates": -RANDOM.floats(2, 2, 30).abs()}, q_len=21, kv_len=30),
    Case("forgetting", {"log_gates": -RANDOM.floats(2, 3, 29).abs()}, heads=3, q_len=12, kv_len=29, q_offset=(17, 5)),
    Case("forgetting", {"log_gates": RANDOM.floats(1, 2, 33)}, batch=1, q_len=1, kv_len=33, q_offset=32),
]
