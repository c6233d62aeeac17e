"""Independent oracles: every mask and score written element by element, straight from its definition.

Nothing here imports or mirrors the library, so an agreement between the two means something. Slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


# eq=False: params hold tensors and dicts, whose generated __eq__ and __hash__ would raise; identity serves instead.
@dataclass(frozen=True, eq=False)
class Case:
    """One set of parameters of one registered mask or score, and the sizes it is tried at."""

    name: str
    params: dict[str, Any]  # python numbers/bools/tuples, or torch tensors on the CPU
    batch: int = 2
    heads: int = 2
    q_len: int = 40
    kv_len: int = 40
    q_offset: int | tuple[int, ...] = 0  # added to q before the mask sees it; a tuple has one per batch element


# ---------------------------------------------------------------------------------------------------------------------
# Masks: True = visible. Every parameter arrives as plain Python (tensors as nested lists), q with its offset added.
# ---------------------------------------------------------------------------------------------------------------------


def _full(b: int, h: int, q: int, kv: int, size: Case) -> bool:
    """Always."""
    return True


def _causal(b: int, h: int, q: int, kv: int, size: Case) -> bool:
    """kv <= q."""
    return kv <= q


def _grouped_tril(b: int, h: int, q: int, kv: int, size: Case, seq_lens: list[int]) -> bool:
    """kv <= q, with both q and kv below seq_lens[b]."""
    return kv <= q and q < seq_lens[b] and kv < seq_lens[b]


def _padding(b: int, h: int, q: int, kv: int, size: Case, seq_lens: list[int]) -> bool:
    """kv < seq_lens[b]; queries are not cut."""
    return kv < seq_lens[b]


def _sliding_window(b: int, h: int, q: int, kv: int, size: Case, window: int) -> bool:
    """kv <= q and q - kv <= window: `window` earlier keys and the query's own."""
    return kv <= q and q - kv <= window


def _local(b: int, h: int, q: int, kv: int, size: Case, left: int, right: int) -> bool:
    """-right <= q - kv <= left: `left` earlier keys, the query's own, `right` later keys."""
    return -right <= q - kv <= left


def _prefix_lm(b: int, h: int, q: int, kv: int, size: Case, prefix_len: int | list[int]) -> bool:
    """kv < prefix_len(b) or kv <= q."""
    prefix = prefix_len[b] if isinstance(prefix_len, list) else prefix_len
    return kv < prefix or kv <= q


def _document(b: int, h: int, q: int, kv: int, size: Case, document_ids: list[int] | list[list[int]]) -> bool:
    """ids[q] == ids[kv], with one row of ids for all or one per batch element."""
    first = document_ids[0]
    ids: Any = document_ids[b] if isinstance(first, list) else document_ids
    return bool(ids[q] == ids[kv])


def _sasa(b: int, h: int, q: int, kv: int, size: Case, height: int, width: int, window: int | tuple[int, int]) -> bool:
    """Row-major tokens; |row distance| <= window_rows and |column distance| <= window_cols."""
    window_rows, window_cols = window if isinstance(window, tuple) else (window, window)
    assert 0 <= q < height * width
    assert 0 <= kv < height * width
    q_row, q_col = q // width, q % width
    kv_row, kv_col = kv // width, kv % width
    return abs(q_row - kv_row) <= window_rows and abs(q_col - kv_col) <= window_cols


def _natten_axis(i: int, j: int, length: int, kernel: int, dilation: int, causal: bool) -> bool:
    """Whether position i sees position j of one axis, by listing i's dilation group and its window in it."""
    group = [x for x in range(length) if x % dilation == i % dilation]
    if j not in group:
        return False
    place = i // dilation
    assert group[place] == i
    assert kernel <= len(group)
    if causal:
        window = [group[p] for p in range(len(group)) if place - kernel < p <= place]
    else:
        start = place - kernel // 2
        while start < 0:
            start += 1
        while start + kernel > len(group):
            start -= 1
        window = group[start : start + kernel]
        assert len(window) == kernel
    return j in window


def _natten(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    height: int,
    width: int,
    kernel: int | tuple[int, int],
    dilation: int | tuple[int, int] = 1,
    causal: bool | tuple[bool, bool] = False,
) -> bool:
    """Row-major tokens; both axes must see each other.

    Not causal: exactly `kernel` keys of the dilation group, starting kernel // 2 before the query, shifted at the
    edges to lie inside. Causal: the query and up to kernel - 1 earlier members of the group.
    """
    kernels = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    dilations = dilation if isinstance(dilation, tuple) else (dilation, dilation)
    causals = causal if isinstance(causal, tuple) else (causal, causal)
    rows = _natten_axis(q // width, kv // width, height, kernels[0], dilations[0], causals[0])
    return rows and _natten_axis(q % width, kv % width, width, kernels[1], dilations[1], causals[1])


def _vision_cross(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    intervals: list[list[int]] | list[list[list[int]]],
    image_ids: list[int] | list[list[int]],
) -> bool:
    """image_ids[kv] >= 0 and start <= q < end, where (start, end) = intervals[image_ids[kv]]; id -1 is padding."""
    first_row, first_id = intervals[0][0], image_ids[0]
    rows: Any = intervals[b] if isinstance(first_row, list) else intervals
    ids: Any = image_ids[b] if isinstance(first_id, list) else image_ids
    image = ids[kv]
    if image < 0:
        return False
    start, end = rows[image]
    return bool(start <= q < end)


def _packed(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    mask: tuple[str, dict[str, Any]],
    offsets: list[int],
    kv_offsets: list[int] | None = None,
) -> bool:
    """Both of the same sequence i, and the inner mask says so at (i, h, q - offsets[i], kv - kv_offsets[i])."""
    kv_bounds = offsets if kv_offsets is None else kv_offsets
    count = len(offsets) - 1
    for i in range(count):
        if offsets[i] <= q < offsets[i + 1] and kv_bounds[i] <= kv < kv_bounds[i + 1]:
            name, params = mask
            inner = Case(
                name,
                params,
                batch=count,
                heads=size.heads,
                q_len=max(offsets[n + 1] - offsets[n] for n in range(count)),
                kv_len=max(kv_bounds[n + 1] - kv_bounds[n] for n in range(count)),
            )
            return MASKS[name](i, h, q - offsets[i], kv - kv_bounds[i], inner, **params)
    return False


MASKS: dict[str, Callable[..., bool]] = {
    "full": _full,
    "causal": _causal,
    "grouped_tril": _grouped_tril,
    "padding": _padding,
    "sliding_window": _sliding_window,
    "local": _local,
    "prefix_lm": _prefix_lm,
    "document": _document,
    "sasa": _sasa,
    "natten": _natten,
    "vision_cross": _vision_cross,
    "packed": _packed,
}


# ---------------------------------------------------------------------------------------------------------------------
# Scores: what becomes of the scaled scores [B, H, Q, K] before the mask. Tensors stay tensors, so gradients flow.
# ---------------------------------------------------------------------------------------------------------------------


def _table(scores: Tensor, case: Case, cell: Callable[[int, int, int], Tensor]) -> Tensor:
    """cell(h, q, kv) at every place of the scores, q with its offset added."""
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
    """Press et al. 2021: 2^(-8 (i + 1) / heads) for a power of two; else those of the largest power of two n below,
    followed by the slopes of 2n at even positions until there are enough."""
    n = 1
    while n * 2 <= heads:
        n *= 2
    slopes = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    position = 0
    while len(slopes) < heads:
        slopes.append(2.0 ** (-8.0 * (position + 1) / (2 * n)))
        position += 2
    return slopes


def _alibi(scores: Tensor, case: Case, slopes: Tensor | None = None) -> Tensor:
    """s - slope_h * (q - kv)."""
    heads = scores.shape[1]
    per_head = torch.tensor(alibi_slopes(heads), dtype=torch.float64) if slopes is None else slopes
    assert per_head.shape == (heads,)
    return scores - _table(scores, case, lambda h, q, kv: per_head[h] * float(q - kv))


def _softcap(scores: Tensor, case: Case, cap: float) -> Tensor:
    """cap * tanh(s / cap)."""
    return cap * torch.tanh(scores / cap)


def _relative_bias(scores: Tensor, case: Case, table: Tensor) -> Tensor:
    """s + table[h, clip(kv - q, -D, D) + D], for a table of [H, 2 * D + 1]."""
    assert table.shape[0] == scores.shape[1]
    assert table.shape[1] % 2 == 1
    reach = (table.shape[1] - 1) // 2
    return scores + _table(scores, case, lambda h, q, kv: table[h, min(max(kv - q, -reach), reach) + reach])


def _checkerboard(scores: Tensor, case: Case) -> Tensor:
    """s * 0.5 where |q - kv| is odd, s * 2 where it is even."""
    half, double = torch.tensor(0.5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    return scores * _table(scores, case, lambda h, q, kv: half if abs(q - kv) % 2 == 1 else double)


SCORES: dict[str, Callable[..., Tensor]] = {
    "alibi": _alibi,
    "softcap": _softcap,
    "relative_bias": _relative_bias,
    "checkerboard": _checkerboard,
}


# ---------------------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------------------

_GENERATOR = torch.Generator().manual_seed(20240817)


def _int32(values: Any) -> Tensor:
    """An int32 tensor of the values."""
    return torch.tensor(values, dtype=torch.int32)


def _int64(values: Any) -> Tensor:
    """An int64 tensor of the values."""
    return torch.tensor(values, dtype=torch.int64)


def _random_ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Random whole numbers in [low, high)."""
    return torch.randint(low, high, shape, generator=_GENERATOR, dtype=dtype)


def _random_floats(*shape: int) -> Tensor:
    """Normal float64 numbers, a leaf tensor."""
    return torch.randn(*shape, generator=_GENERATOR, dtype=torch.float64)


def _runs(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Ids 0, 1, 2, ... each repeated by its length."""
    return torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)], dtype=dtype)


_PLAIN_CASES: list[Case] = [
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
]

_LENGTH_CASES: list[Case] = [
    Case("grouped_tril", {"seq_lens": _int64([40, 13])}),
    Case("grouped_tril", {"seq_lens": _int32([0, 1, 39])}, batch=3, q_len=40, kv_len=40),
    Case("grouped_tril", {"seq_lens": _int64([30, 61])}, q_len=21, kv_len=61, q_offset=40),
    Case("grouped_tril", {"seq_lens": _int32([25, 47])}, q_len=17, kv_len=50, q_offset=(8, 33)),
    Case("grouped_tril", {"seq_lens": _int64([16, 33])}, q_len=57, kv_len=33),
    Case("grouped_tril", {"seq_lens": _int32([129, 128, 0, 300])}, batch=4, q_len=300, kv_len=300),
    Case("grouped_tril", {"seq_lens": _int64([200, 131])}, q_len=50, kv_len=257, q_offset=(150, 128)),
    Case("padding", {"seq_lens": _int64([40, 13])}),
    Case("padding", {"seq_lens": _int32([0, 1, 64])}, batch=3, q_len=30, kv_len=64),
    Case("padding", {"seq_lens": _int64([16, 17])}, q_len=55, kv_len=17),
    Case("padding", {"seq_lens": _int32([69, 48])}, heads=3, q_len=5, kv_len=70, q_offset=(64, 43)),
    Case("padding", {"seq_lens": _int64([0, 0])}, q_len=20, kv_len=20),
    Case("prefix_lm", {"prefix_len": 11}),
    Case("prefix_lm", {"prefix_len": 0}, q_len=33, kv_len=47),
    Case("prefix_lm", {"prefix_len": 100}, q_len=33, kv_len=47),
    Case("prefix_lm", {"prefix_len": _int64(16)}, q_len=39, kv_len=39),
    Case("prefix_lm", {"prefix_len": _int32(40)}, q_len=21, kv_len=66, q_offset=30),
    Case("prefix_lm", {"prefix_len": _int64([0, 7, 50])}, batch=3, q_len=50, kv_len=50),
    Case("prefix_lm", {"prefix_len": _int32([45, 1])}, q_len=10, kv_len=60, q_offset=(20, 50)),
    Case("prefix_lm", {"prefix_len": _int64([5, 20])}, q_len=61, kv_len=30),
]

_WINDOW_CASES: list[Case] = [
    Case("sliding_window", {"window": 8}),
    Case("sliding_window", {"window": 0}, q_len=37, kv_len=37),
    Case("sliding_window", {"window": 1000}, q_len=37, kv_len=50),
    # Queries beyond the last key's reach see nothing.
    Case("sliding_window", {"window": 5}, q_len=70, kv_len=41),
    Case("sliding_window", {"window": _int64(15)}, heads=3, q_len=20, kv_len=70, q_offset=50),
    Case("sliding_window", {"window": _int32(16)}, q_len=15, kv_len=65, q_offset=(50, 7)),
    Case("sliding_window", {"window": _int64(0)}, q_len=1, kv_len=30, q_offset=(29, 4)),
    Case("sliding_window", {"window": 130}, q_len=300, kv_len=300),
    Case("sliding_window", {"window": _int32(3)}, q_len=300, kv_len=150),
    Case("sliding_window", {"window": 127}, q_len=44, kv_len=300, q_offset=(256, 128)),
    Case("local", {"left": 4, "right": 9}),
    Case("local", {"left": 0, "right": 0}, q_len=33, kv_len=55),
    Case("local", {"left": 0, "right": 3}, q_len=33, kv_len=33),
    Case("local", {"left": 6, "right": 0}, q_len=69, kv_len=31),
    Case("local", {"left": 500, "right": 500}, q_len=29, kv_len=44),
    Case("local", {"left": _int64(10), "right": _int32(2)}, q_len=18, kv_len=60, q_offset=42),
    Case("local", {"left": _int32(3), "right": _int64(7)}, q_len=18, kv_len=60, q_offset=(0, 31)),
    # The second batch element's queries all lie beyond the reach of the keys.
    Case("local", {"left": 2, "right": _int64(1)}, q_len=16, kv_len=24, q_offset=(8, 40)),
]

_DOCUMENT_CASES: list[Case] = [
    Case("document", {"document_ids": _runs([7, 16, 1, 16])}),
    Case("document", {"document_ids": _random_ints(0, 4, 2, 40)}),
    Case("document", {"document_ids": _random_ints(-2, 3, 3, 53, dtype=torch.int32)}, batch=3, q_len=53, kv_len=53),
    Case("document", {"document_ids": torch.arange(30, dtype=torch.int32)}, q_len=30, kv_len=30),
    Case("document", {"document_ids": torch.zeros(2, 45, dtype=torch.int64)}, q_len=45, kv_len=45),
    Case("document", {"document_ids": _random_ints(0, 3, 62, dtype=torch.int32)}, q_len=19, kv_len=62, q_offset=43),
    Case("document", {"document_ids": _random_ints(0, 3, 2, 62)}, q_len=19, kv_len=50, q_offset=(5, 43)),
    Case("document", {"document_ids": _random_ints(0, 2, 2, 66)}, q_len=66, kv_len=20),
    # Ids that differ only above the lowest 32 bits.
    Case("document", {"document_ids": _random_ints(0, 3, 35) * 2**32 + 7}, q_len=35, kv_len=35),
    Case("document", {"document_ids": _runs([100, 28, 1, 99, 72], torch.int32)}, q_len=300, kv_len=300),
    Case("document", {"document_ids": _random_ints(0, 5, 2, 150)}, heads=1, q_len=150, kv_len=150),
    Case(
        "document",
        {"document_ids": torch.stack([_runs([127, 2, 171]), _runs([256, 44])])},
        q_len=44,
        kv_len=300,
        q_offset=(100, 256),
    ),
]


def _sasa_case(height: int, width: int, window: int | tuple[int, int], batch: int = 2, heads: int = 2) -> Case:
    """A sasa case over the whole canvas."""
    params = {"height": height, "width": width, "window": window}
    return Case("sasa", params, batch=batch, heads=heads, q_len=height * width, kv_len=height * width)


def _natten_case(height: int, width: int, kernel: int | tuple[int, int], **more: Any) -> Case:
    """A natten case over the whole canvas."""
    params = {"height": height, "width": width, "kernel": kernel, **more}
    return Case("natten", params, q_len=height * width, kv_len=height * width)


_CANVAS_CASES: list[Case] = [
    _sasa_case(8, 8, 1),
    _sasa_case(5, 9, 2, batch=3),
    _sasa_case(9, 5, (1, 3), heads=3),
    _sasa_case(6, 7, (2, 0)),
    _sasa_case(7, 6, 0),
    _sasa_case(4, 11, 20),
    _sasa_case(1, 37, (0, 4)),
    _sasa_case(41, 1, 3),
    _natten_case(8, 8, 3),
    _natten_case(5, 9, 5),
    _natten_case(10, 6, (7, 3)),
    _natten_case(6, 7, (4, 2)),
    _natten_case(7, 9, 4),
    _natten_case(5, 6, (5, 6)),
    _natten_case(6, 7, 1),
    _natten_case(1, 13, (1, 5)),
    _natten_case(31, 1, (6, 1)),
    _natten_case(7, 9, 3, dilation=2),
    _natten_case(7, 10, (3, 2), dilation=(2, 4)),
    _natten_case(8, 8, (2, 4), dilation=(3, 2)),
    _natten_case(6, 11, (5, 3), dilation=(1, 3), causal=False),
    _natten_case(6, 8, 3, causal=True),
    _natten_case(7, 7, (4, 3), causal=(True, False)),
    _natten_case(5, 11, (2, 4), causal=(False, True)),
    _natten_case(9, 7, 3, dilation=2, causal=True),
    _natten_case(7, 8, (2, 3), dilation=(3, 2), causal=(False, True)),
    _natten_case(11, 5, (4, 2), dilation=(2, 2), causal=(True, False)),
    _natten_case(4, 6, (4, 6), causal=(True, True)),
]

_VISION_CASES: list[Case] = [
    Case(
        "vision_cross",
        {"intervals": _int64([[0, 10], [10, 25], [25, 40]]), "image_ids": _runs([8, 16, 9])},
        q_len=40,
        kv_len=33,
    ),
    # Overlapping, empty and never-named intervals, padding between and after the images.
    Case(
        "vision_cross",
        {
            "intervals": _int32([[[3, 30], [20, 45], [9, 9]], [[0, 45], [44, 45], [0, 1]]]),
            "image_ids": _int32([[0] * 12 + [-1] * 3 + [1] * 10 + [-1] * 4, [2] * 5 + [1] * 20 + [-1] * 4]),
        },
        q_len=45,
        kv_len=29,
    ),
    Case(
        "vision_cross",
        {"intervals": _int64([[5, 21], [21, 60]]), "image_ids": _random_ints(-1, 2, 3, 34, dtype=torch.int32)},
        batch=3,
        q_len=51,
        kv_len=34,
    ),
    Case(
        "vision_cross",
        {
            "intervals": _int32([[[0, 16], [16, 50]], [[48, 64], [2, 70]]]),
            "image_ids": _int64([1] * 17 + [0] * 17 + [-1]),
        },
        heads=3,
        q_len=20,
        kv_len=35,
        q_offset=33,
    ),
    Case(
        "vision_cross",
        {"intervals": _int64([[0, 12], [12, 61]]), "image_ids": _random_ints(-1, 2, 2, 48)},
        q_len=11,
        kv_len=48,
        q_offset=(4, 50),
    ),
    Case("vision_cross", {"intervals": _int64([[0, 30]]), "image_ids": _int64([-1] * 21)}, q_len=30, kv_len=21),
]


def _packed_case(
    name: str,
    inner: dict[str, Any],
    lengths: list[int],
    kv_lengths: list[int] | None = None,
    dtype: torch.dtype = torch.int64,
    trailing: int = 0,
) -> Case:
    """A packed case of sequences of these lengths, with `trailing` tokens of no sequence after the last."""
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    params: dict[str, Any] = {"mask": (name, inner), "offsets": torch.tensor(bounds, dtype=dtype)}
    kv_total = bounds[-1]
    if kv_lengths is not None:
        kv_bounds = [sum(kv_lengths[:i]) for i in range(len(kv_lengths) + 1)]
        params["kv_offsets"] = torch.tensor(kv_bounds, dtype=dtype)
        kv_total = kv_bounds[-1]
    return Case("packed", params, batch=1, q_len=bounds[-1] + trailing, kv_len=kv_total + trailing)


_PACKED_CASES: list[Case] = [
    _packed_case("causal", {}, [13, 1, 26]),
    _packed_case("causal", {}, [100, 28, 1, 99, 72], dtype=torch.int32),
    # An empty sequence first, in the middle and last.
    _packed_case("causal", {}, [0, 20, 0, 0, 31, 0], dtype=torch.int32),
    _packed_case("causal", {}, [37]),
    _packed_case("causal", {}, [9, 14, 8], [16, 3, 33]),
    _packed_case("causal", {}, [17, 12], trailing=6),
    _packed_case("full", {}, [1, 1, 1, 30, 1]),
    # The second sequence has no keys, the third no queries.
    _packed_case("full", {}, [12, 9, 0, 20], [30, 0, 11, 6], dtype=torch.int32),
    _packed_case("grouped_tril", {"seq_lens": _int64([10, 0, 7, 16])}, [10, 5, 17, 16]),
    _packed_case("grouped_tril", {"seq_lens": _int32([129, 60])}, [150, 150], dtype=torch.int32),
    _packed_case("padding", {"seq_lens": _int32([4, 0, 22])}, [15, 8, 11], [9, 6, 22]),
    _packed_case("sliding_window", {"window": 4}, [21, 3, 0, 30]),
    _packed_case("sliding_window", {"window": _int64(40)}, [128, 129, 43], dtype=torch.int32),
    _packed_case("sliding_window", {"window": 0}, [5, 20, 12], [5, 10, 31]),
    _packed_case("local", {"left": 3, "right": 6}, [25, 1, 16]),
    _packed_case("prefix_lm", {"prefix_len": _int64([5, 0, 40, 9])}, [18, 20, 11, 9]),
    _packed_case("prefix_lm", {"prefix_len": 6}, [24, 4, 13], [15, 20, 30], dtype=torch.int32),
    _packed_case("document", {"document_ids": _random_ints(0, 3, 3, 28)}, [28, 5, 19]),
    _packed_case("natten", {"height": 4, "width": 5, "kernel": (3, 2), "causal": (False, True)}, [20, 20, 20]),
]

MASK_CASES: list[Case] = [
    *_PLAIN_CASES,
    *_LENGTH_CASES,
    *_WINDOW_CASES,
    *_DOCUMENT_CASES,
    *_CANVAS_CASES,
    *_VISION_CASES,
    *_PACKED_CASES,
]

SCORE_CASES: list[Case] = [
    Case("alibi", {}, heads=2, q_len=23, kv_len=23),
    Case("alibi", {}, heads=3, q_len=13, kv_len=30, q_offset=17),
    Case("alibi", {}, heads=8, q_len=17, kv_len=11),
    Case("alibi", {}, heads=12, q_len=9, kv_len=18, q_offset=(9, 2)),
    Case("alibi", {"slopes": _random_floats(2).abs()}, heads=2, q_len=33, kv_len=20),
    Case("alibi", {"slopes": _random_floats(3)}, heads=3, q_len=12, kv_len=29, q_offset=(0, 17)),
    Case("alibi", {"slopes": _random_floats(8)}, heads=8, q_len=11, kv_len=11, q_offset=5),
    Case("alibi", {"slopes": _random_floats(12)}, heads=12, q_len=10, kv_len=13),
    Case("softcap", {"cap": 20.0}),
    Case("softcap", {"cap": 0.5}, heads=3, q_len=17, kv_len=51),
    Case("softcap", {"cap": 2.5}, q_len=37, kv_len=21, q_offset=(3, 9)),
    Case("relative_bias", {"table": _random_floats(2, 9)}, q_len=29, kv_len=29),
    Case("relative_bias", {"table": _random_floats(3, 101)}, heads=3, q_len=15, kv_len=26),
    Case("relative_bias", {"table": _random_floats(2, 33)}, q_len=14, kv_len=37, q_offset=23),
    Case("relative_bias", {"table": _random_floats(4, 15)}, heads=4, q_len=12, kv_len=19, q_offset=(0, 7)),
    Case("relative_bias", {"table": _random_floats(2, 1)}, q_len=21, kv_len=10),
    Case("checkerboard", {}, q_len=31, kv_len=31),
    Case("checkerboard", {}, heads=3, q_len=18, kv_len=27, q_offset=9),
    Case("checkerboard", {}, q_len=25, kv_len=14, q_offset=(1, 4)),
]


# ---------------------------------------------------------------------------------------------------------------------
# What the tests call
# ---------------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The value with every tensor in it turned into nested lists, 0-dim tensors into numbers."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(inner) for inner in value)
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


def offsets(case: Case) -> list[int]:
    """The q_offset of each batch element."""
    if isinstance(case.q_offset, tuple):
        assert len(case.q_offset) == case.batch
        return list(case.q_offset)
    return [case.q_offset] * case.batch


def dense(case: Case) -> torch.BoolTensor:
    """The mask of a case as [B, H, Q, K], asked place by place."""
    oracle, params, starts = MASKS[case.name], plain(case.params), offsets(case)
    rows = [
        [
            [
                [oracle(b, h, starts[b] + row, kv, case, **params) for kv in range(case.kv_len)]
                for row in range(case.q_len)
            ]
            for h in range(case.heads)
        ]
        for b in range(case.batch)
    ]
    mask = torch.tensor(rows, dtype=torch.bool)
    assert mask.shape == (case.batch, case.heads, case.q_len, case.kv_len)
    return mask  # type: ignore[return-value]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scores_fn: Callable[[Tensor], Tensor] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The naive formula in the inputs' dtype: (out [B, H, Q, Dv], natural-log lse [B, H, Q]).

    Query head h uses key head h // (H // Hkv). A row that sees nothing gives exactly 0, and lse -inf.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    assert heads % kv_heads == 0
    assert v.shape[1] == kv_heads
    owner = [h // (heads // kv_heads) for h in range(heads)]
    k, v = k[:, owner], v[:, owner]
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if scores_fn is not None:
        scores = scores_fn(scores)
    visible = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
    some = visible.any(dim=-1)
    # Hidden scores are replaced before exp, and its result again after: no inf or NaN can then reach the backward.
    peak = scores.detach().masked_fill(~visible, -math.inf).amax(dim=-1, keepdim=True)
    peak = torch.where(some[..., None], peak, torch.zeros_like(peak))
    shifted = torch.where(visible, scores - peak, torch.zeros_like(scores))
    weights = torch.where(visible, shifted.exp(), torch.zeros_like(scores))
    total = weights.sum(dim=-1)
    total = torch.where(some, total, torch.ones_like(total))
    out = (weights / total[..., None]) @ v
    lse = torch.where(some, peak[..., 0] + total.log(), torch.full_like(total, -math.inf))
    return out, lse
