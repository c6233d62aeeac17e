"""Attention of few queries by Triton kernels on a GPU, against float64.

With TRITON_INTERPRET=1 Triton's interpreter runs the kernels on a CPU. The interpreter must be chosen before Triton is
imported. Hence the last test runs this file in a process of its own.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers import (
    DEVICES,
    TOLERANCE,
    check_by_the_interpreter,
    check_lse,
    compiled_for_hopper,
    error,
    in_campaigns,
    label,
    on_gpu_of,
    one_in,
    try_examples,
)
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from flexmasks.kernels import few_queries
from flexmasks.kernels.few_queries import attend_band, attend_few
from flexmasks.kernels.index_lists import visible_tiles

launch = pytest.importorskip("flexmasks.kernels.few_queries_launch")
launches = pytest.importorskip("flexmasks.kernels.launches")
CompiledKernel = pytest.importorskip("triton.compiler").CompiledKernel
tiles_of = pytest.importorskip("flexmasks.kernels.index_lists_kernel").tiles_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAN = math.nan
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

on_devices = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else DEVICES[1:])
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")] if INTERPRETED else []  # NumPy warns of 0 / 0


def in_short(kept: Sequence[Any], *lists: Sequence[Any]) -> list[Any]:
    """Return all combinations of values; the interpreter, which is slow, tries those kept, a third of them each day."""
    every = [combined if len(lists) > 1 else combined[0] for combined in itertools.product(*lists)]
    assert set(kept) <= set(every)
    if not INTERPRETED:
        return every
    return [*(one_in(3, kept) if len(kept) > 2 else kept), *(in_campaigns(c) for c in every if c not in kept)]


# --- cases and the oracle ---


@dataclass(frozen=True)
class Call:
    """A call with random numbers.

    visible, lists: sizes of the first two dimensions of `visible` and of the lists of tiles.
    share: of the keys that a query sees in partial tiles; full tiles and empty tiles are as frequent.
    page_size: 0 without pages.
    layout: "plain", "keys first" in memory, "strided", or "one" for keys that all batch elements share.
    """

    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    queries: int = 1
    kv_len: int = 300
    k_size: int = 16
    v_size: int = 16
    dtype: torch.dtype = FP32
    visible: tuple[int, int] = (2, 1)
    lists: tuple[int, int] = (2, 1)
    page_size: int = 0
    table: torch.dtype = torch.int32
    layout: str = "plain"
    cap: float | None = None
    weight: tuple[int, int, int] | None = None  # sizes of all dimensions but the last, as those of bias
    bias: tuple[int, int, int] | None = None
    kinds: str = "epf"  # of tiles: empty, partial, full
    seed: int = 0
    band: tuple[int | None, int | None] | None = None  # left and right of a band, in place of lists of tiles
    starts: int | str = "each"  # where the queries of a band start: a number, "each" its own, or "last"
    lowest: float | None = None  # bias of the second query, and of the third one from the seventh key on
    has_lens: bool = False  # of a band: sequences have lengths of their own


@dataclass
class Made:
    """The arguments of a call, and what it must return."""

    arguments: list[Any]
    out: Tensor = field(default_factory=Tensor)
    lse: Tensor = field(default_factory=Tensor)


def made(call: Call) -> Made:
    """Return a call's arguments, with NaN and garbage in all places that must not be read, and its results."""
    generator = torch.Generator().manual_seed(call.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(call.dtype)

    def number(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator)

    kv_len = call.kv_len if not call.page_size else -(-call.kv_len // call.page_size) * call.page_size
    if call.band is None:
        mask, seen = made_lists(call, kv_len, number, generator)
    else:
        mask, seen = made_band(call, kv_len, number)

    q = normal(call.batch, call.heads, call.queries, call.k_size)
    is_read = mask.any(2).any(1)  # [B, KV]
    table = None
    if call.page_size:
        per_sequence = kv_len // call.page_size
        n_pages = call.batch * per_sequence + 3
        shape = n_pages, call.page_size, call.key_heads
        k_pool, v_pool = normal(*shape, call.k_size), normal(*shape, call.v_size)
        table = torch.randperm(n_pages, generator=generator)[: call.batch * per_sequence].view(call.batch, -1)
        table[:, 0] = table[0, 0]  # a page that all sequences share
        slots = (table[..., None] * call.page_size + torch.arange(call.page_size)).flatten(1)  # [B, KV]
        used = torch.zeros(n_pages * call.page_size, dtype=torch.bool)
        used[slots[is_read]] = True
        k, v = (pool.flatten(0, 1)[slots].transpose(1, 2) for pool in (k_pool, v_pool))
        for pool in (k_pool, v_pool):
            pool.flatten(0, 1)[~used] = NAN
        page_is_read = is_read.view(call.batch, per_sequence, call.page_size).any(-1)
        most = 2**31 - 1 if call.table == torch.int32 else 2**40
        garbage = torch.tensor([-1, most, n_pages])[number(3, *table.shape)]
        table = torch.where(page_is_read, table, garbage).to(call.table)
        given = k_pool, v_pool
        if call.layout == "keys first":  # a pool of [pages, heads, page size, size] in memory
            given = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in given)
        elif call.layout == "strided":
            given = tuple(torch.cat([t, t], 1)[:, : call.page_size] for t in given)
    else:
        k = normal(call.batch, call.key_heads, kv_len, call.k_size)
        v = normal(call.batch, call.key_heads, kv_len, call.v_size)
        if call.layout == "one":
            k, v = k[:1].expand(k.shape), v[:1].expand(v.shape)
            is_read = is_read.any(0, True)
        given = tuple(torch.where(is_read[:, None, :, None], t, NAN) for t in (k, v))
        if call.layout == "keys first":
            given = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in given)
        elif call.layout == "strided":
            given = tuple(torch.cat([t, t], -1)[..., : t.shape[-1]] for t in given)
            q = torch.cat([q, q], 1)[:, : call.heads]
        elif call.layout == "one":
            given = tuple(t[:1].expand(call.batch, -1, -1, -1) for t in given)

    def change(sizes: tuple[int, int, int] | None, last: int) -> Tensor | None:
        return None if sizes is None else torch.randn(*sizes, last, generator=generator)

    weight, bias = change(call.weight, 1), change(call.bias, kv_len)
    if bias is not None and call.lowest is not None:
        bias[:, :, 1], bias[:, :, 2, 7:] = call.lowest, call.lowest
    out, lse = oracle(q, k, v, mask, 0.3, call.cap, weight, bias)
    seen, numbers = (seen, []) if call.band is None else (seen[:2], seen[2:])
    return Made([q, *given, table, *seen, weight, bias, 0.3, call.cap, *numbers], out, lse)


def made_lists(
    call: Call, kv_len: int, number: Callable[..., Tensor], generator: torch.Generator
) -> tuple[Tensor, list[Any]]:
    """Return a random mask [B, H, Q, KV], and its lists of tiles with `visible`."""
    n_tiles = -(-kv_len // 128)
    # Outside of partial tiles `visible` holds random values that nobody may read.
    kinds = number(len(call.kinds), *call.lists, n_tiles)
    is_full = by_key(torch.tensor([k == "f" for k in call.kinds])[kinds], kv_len)
    is_partial = by_key(torch.tensor([k == "p" for k in call.kinds])[kinds], kv_len)
    visible = torch.rand(*call.visible, call.queries, kv_len, generator=generator) < 0.4
    visible &= torch.rand(*call.visible, call.queries, 1, generator=generator) < 0.8  # some queries see nothing
    mask = (is_full | (is_partial & visible)).expand(call.batch, call.heads, call.queries, kv_len)
    lists = []
    for kind in "pf":
        counts = torch.zeros(call.lists, dtype=torch.int32)
        tiles = torch.full((*call.lists, n_tiles), 2**31 - 1, dtype=torch.int32)
        for b in range(call.lists[0]):
            for h in range(call.lists[1]):
                of_kind = [t for t in range(n_tiles) if call.kinds[kinds[b, h, t]] == kind]
                counts[b, h] = len(of_kind)
                tiles[b, h, : len(of_kind)] = torch.tensor(of_kind, dtype=torch.int32)[torch.randperm(len(of_kind))]
        lists += [counts, tiles]

    return mask, [*lists, visible]


def made_band(call: Call, kv_len: int, number: Callable[..., Tensor]) -> tuple[Tensor, list[Any]]:
    """Return the mask [B, H, Q, KV] of a band, pair by pair, and the band's arguments."""
    assert call.band is not None
    (left, right), starts, lens = call.band, None, None
    if call.has_lens:
        lens = number(kv_len + 1, call.batch).int()
        lens[0] = 0 if call.batch > 2 else kv_len
    if call.starts == "each":
        starts = number(kv_len + call.queries + 20, call.batch)
    mask = torch.zeros(call.batch, 1, call.queries, kv_len, dtype=torch.bool)
    for b in range(call.batch):
        length = kv_len if lens is None else int(lens[b])
        start = call.starts
        if not isinstance(start, int):
            start = max(0, length - call.queries) if starts is None else int(starts[b])
        for i in range(call.queries):
            low = 0 if left is None else max(0, start + i - left)
            high = length if right is None else max(0, min(length, start + i + right + 1))
            mask[b, 0, i, low:high] = True
    start = call.starts if isinstance(call.starts, int) else None
    return mask.expand(-1, call.heads, -1, -1), [starts, lens, start, left, right]


def by_key(of_tile: Tensor, kv_len: int) -> Tensor:
    """Return a property of tiles [b, h, tiles] as one of keys, [b, h, 1, KV]."""
    return of_tile[..., torch.arange(kv_len) // 128][:, :, None]


def oracle(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None,
    weight: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Textbook attention in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if bias is not None:  # beside a very low one, a score is lost in float32
        scores = (scores.float() + (1 if weight is None else weight) * bias).double()
    scores = torch.where(mask, scores, -math.inf)
    peak = scores.amax(-1, keepdim=True)
    peak = torch.where(peak == -math.inf, 0.0, peak)
    weights = (scores - peak).exp()
    total = weights.sum(-1)
    out = torch.einsum("bhqk,bhkd->bhqd", weights / total.clamp(min=1e-300)[..., None], v)
    return out, total.log() + peak[..., 0]


def run(arguments: list[Any], device: str) -> tuple[Tensor, Tensor]:
    """Return output and lse of the operators on a GPU, or of their kernels, which the interpreter runs on a CPU."""
    there = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
    for n in (0, 1, 2):  # moving to another device keeps strides only of tensors without holes
        if isinstance(arguments[n], Tensor) and device != "cpu":
            there[n] = strided_like(there[n], arguments[n])
    name = "attend_few" if isinstance(arguments[8], Tensor) and arguments[8].dtype == torch.bool else "attend_band"
    return getattr(launch if device == "cpu" else few_queries, name)(*there)  # type: ignore[no-any-return]


def strided_like(tensor: Tensor, other: Tensor) -> Tensor:
    result = torch.empty_strided(other.shape, other.stride(), dtype=tensor.dtype, device=tensor.device)
    return result.copy_(tensor) if 0 not in other.stride() else tensor[:1].expand(tensor.shape)


def check(call: Call, device: str = "cpu") -> None:
    want = made(call)
    out, lse = run(want.arguments, device)
    assert out.dtype == call.dtype
    assert lse.dtype == torch.float32
    assert error(out, want.out) < TOLERANCE[call.dtype]
    check_lse(lse, want.lse, 1e-4 if call.dtype == FP32 else TOLERANCE[call.dtype])
    assert torch.all(out.cpu()[want.lse == -math.inf] == 0)


# --- results ---


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize(
    ("queries", "page_size"),
    in_short([(1, 0), (1, 7), (1, 16), (4, 64), (17, 128), (64, 256)], [1, 4, 17, 64], [0, 7, 16, 64, 128, 256]),
)
def test_queries_and_pages(queries: int, page_size: int, device: str) -> None:
    check(Call(queries=queries, page_size=page_size, kv_len=400), device)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize(
    ("size", "dtype"),
    in_short(
        [(16, BF16), (64, FP16), (80, BF16), (80, FP32), (128, BF16), (256, FP16)],
        [16, 64, 80, 128, 256], [FP32, FP16, BF16],
    ),
    ids=label,
)  # fmt: skip
def test_sizes(size: int, dtype: torch.dtype, device: str) -> None:
    check(Call(k_size=size, v_size=size, dtype=dtype, queries=3), device)


@on_devices
@pytest.mark.parametrize(("k_size", "v_size", "page_size"), [(64, 16, 0), (24, 80, 16), (192, 128, 16)])
def test_values_of_another_size(k_size: int, v_size: int, page_size: int, device: str) -> None:
    check(Call(k_size=k_size, v_size=v_size, page_size=page_size, kv_len=200), device)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize(
    ("heads", "by_head", "page_size"),
    in_short(
        [((1, 1), "", 0), ((4, 4), "both", 16), ((6, 2), "lists", 0), ((6, 2), "both", 16), ((8, 1), "visible", 16)],
        [(1, 1), (4, 4), (6, 2), (8, 1)], ["", "lists", "visible", "both"], [0, 16],
    ),
    ids=str,
)  # fmt: skip
def test_heads(heads: tuple[int, int], by_head: str, page_size: int, device: str) -> None:
    """Grouped heads share programs, unless lists differ by head."""
    of_lists = heads[0] if by_head in ("lists", "both") else 1
    of_visible = heads[0] if by_head in ("visible", "both") else 1
    check(
        Call(
            heads=heads[0], key_heads=heads[1], lists=(2, of_lists), visible=(2, of_visible), queries=2,
            page_size=page_size,
        ),
        device,
    )  # fmt: skip


@on_devices
@pytest.mark.parametrize(
    ("lists", "visible", "layout"),
    in_short(
        [(1, 1, "plain"), (1, 3, "keys first"), (3, 1, "strided"), (3, 3, "one")],
        [1, 3], [1, 3], ["plain", "keys first", "strided", "one"],
    ),
)  # fmt: skip
def test_broadcasting_and_layouts(lists: int, visible: int, layout: str, device: str) -> None:
    check(Call(batch=3, kv_len=200, lists=(lists, 1), visible=(visible, 1), layout=layout), device)


@on_devices
@pytest.mark.parametrize(
    ("page_size", "layout"),
    in_short([(16, "keys first"), (128, "strided")], [16, 128], ["keys first", "strided"]),
)
def test_layouts_of_pools(page_size: int, layout: str, device: str) -> None:
    check(Call(page_size=page_size, layout=layout, dtype=FP16), device)


@on_devices
@pytest.mark.parametrize("page_size", [7, 16, 256])
def test_wide_page_numbers(page_size: int, device: str) -> None:
    check(Call(page_size=page_size, table=torch.int64, queries=2), device)


CHANGES = {
    "none": {},
    "by head": {"bias": (1, 4, 1)},
    "by query": {"bias": (2, 1, 5)},
    "weight of each row": {"weight": (2, 4, 5), "bias": (1, 4, 1)},
    "weight of each head": {"weight": (1, 4, 1), "bias": (2, 1, 1), "page_size": 16},
    "one weight": {"weight": (1, 1, 1), "bias": (2, 4, 5)},
}


@on_devices
@pytest.mark.parametrize(
    ("change", "cap"),
    in_short([("none", 0.7), ("none", 1000.0), ("by query", None), ("weight of each row", 30.0),
        ("weight of each head", None)],
        list(CHANGES), [None, 0.7, 30.0, 1000.0]),
)  # fmt: skip
def test_scores(change: str, cap: float | None, device: str) -> None:
    check(Call(queries=5, cap=cap, kv_len=200, **CHANGES[change]), device)


@on_devices
@pytest.mark.parametrize(
    ("kinds", "page_size"),
    in_short(
        [("e", 0), ("p", 16), ("f", 128), ("ep", 128), ("ef", 16)], ["e", "p", "f", "ep", "ef"], [0, 16, 128]
    ),
)  # fmt: skip
def test_kinds_of_tiles(kinds: str, page_size: int, device: str) -> None:
    """Only empty tiles, which makes sequences without keys, only partial ones, and only full ones."""
    check(Call(kinds=kinds, page_size=page_size, kv_len=384, batch=3, lists=(3, 1), visible=(3, 1)), device)


@on_devices
def test_scores_of_minus_infinity(device: str) -> None:
    """A bias may hide all keys of a query, in full tiles too."""
    call = made(Call(kinds="f", bias=(2, 4, 1)))
    call.arguments[10][0, 1] = -math.inf
    out, lse = run(call.arguments, device)
    assert torch.all(out[0, 1] == 0)
    assert torch.all(lse[0, 1] == -math.inf)
    assert error(out[1], call.out[1]) < 1e-5


@on_devices
def test_nan_is_not_hidden(device: str) -> None:
    """Queries, and keys that are seen, make NaN of NaN."""
    call = made(Call(kinds="f"))
    call.arguments[0][1, 2] = NAN
    call.arguments[1][0, 1, 7] = NAN
    out, lse = run(call.arguments, device)
    assert torch.all(out[1, 2].isnan())
    assert torch.all(lse[1, 2].isnan())
    assert torch.all(out[0, 2:].isnan())
    assert bool(out[0, :2].isfinite().all())
    assert bool(out[1, :2].isfinite().all())


@on_devices
def test_nothing_to_compute(device: str) -> None:
    for call in (Call(batch=0, visible=(1, 1), lists=(1, 1)), Call(queries=0)):
        arguments = made(replace(call, batch=2, queries=1)).arguments
        q = torch.empty(call.batch, call.heads, call.queries, 16)
        k, v = (t[: call.batch] for t in arguments[1:3])
        visible = arguments[8][:1, :, : call.queries]
        lists = [t[:1] for t in arguments[4:8]]
        out, lse = run([q, k, v, None, *lists, visible, *arguments[9:]], device)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:-1]
    none = made(Call()).arguments
    none[1:3] = [t[:, :, :0] for t in none[1:3]]
    none[5], none[7], none[8] = none[5][..., :0], none[7][..., :0], none[8][..., :0]
    none[4].zero_()
    none[6].zero_()
    out, lse = run(none, device)
    assert torch.all(out == 0)
    assert torch.all(lse == -math.inf)


def calls() -> st.SearchStrategy[Call]:
    """Return random calls."""

    @st.composite
    def one(draw: Callable[[Any], Any]) -> Call:
        batch, group, key_heads = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
        queries = draw(st.sampled_from([1, 2, 3, 8] if INTERPRETED else [1, 2, 3, 8, 33]))
        heads = group * key_heads

        def sizes(n: int) -> tuple[int, ...]:
            return tuple(draw(st.sampled_from([1, most])) for most in (batch, heads, queries)[:n])

        page_size = draw(st.sampled_from([0, 0, 1, 5, 16, 48, 128, 512]))
        bias = draw(st.one_of(st.none(), st.just(sizes(3))))
        return Call(
            batch, heads, key_heads, queries, draw(st.sampled_from([1, 100, 128, 300, 513])),
            draw(st.sampled_from([8, 16, 40])), draw(st.sampled_from([8, 16, 40])),
            draw(st.sampled_from([FP32, FP16, BF16])),
            sizes(2), sizes(2), page_size, draw(st.sampled_from([torch.int32, torch.int64])),
            draw(st.sampled_from(["plain", "keys first", "strided"])), draw(st.sampled_from([None, 2.0])),
            draw(st.one_of(st.none(), st.just(sizes(3)))) if bias else None, bias,
            draw(st.sampled_from(["epf", "epp", "eef", "p", "f"])), draw(st.integers(0, 1000)),
        )  # fmt: skip

    return one()


@pytest.mark.slow
@on_devices
def test_random_calls(device: str) -> None:
    try_examples({"cpu": 5, "cuda": 15}[device], lambda call: check(call, device), calls())


@on_devices
@pytest.mark.campaign
def test_many_random_calls(device: str) -> None:
    try_examples(150, lambda call: check(call, device), calls())


@on_devices
@pytest.mark.parametrize(
    ("lowest", "processors"),
    in_short(
        [(-1e9, 40), (-1e20, 1), (torch.finfo(FP32).min, 40), (-math.inf, 40)],
        [-1e9, -1e20, torch.finfo(FP32).min, -math.inf], [1, 40],
    ),
)  # fmt: skip
def test_very_low_scores(lowest: float, processors: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose scores are all very low is a row like others, also in several shares."""
    monkeypatch.setattr(launch, "_processors", lambda device: processors)
    monkeypatch.setattr(launch, "_launches", launch.Launches("of a test"))
    check(Call(queries=3, kv_len=460, bias=(1, 1, 3), lowest=lowest), device)


@on_devices
@pytest.mark.parametrize("processors", [1, 40])
def test_shares(processors: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for all tiles of an element, and a share for nearly each tile, of few and of very many elements."""
    monkeypatch.setattr(launch, "_processors", lambda device: processors)
    monkeypatch.setattr(launch, "_launches", launch.Launches("of a test"))
    check(Call(batch=3, heads=1, key_heads=1, kv_len=1500, lists=(3, 1), visible=(1, 1), seed=1), device)
    if not INTERPRETED:
        check(Call(batch=150, kv_len=700, heads=8, key_heads=8, lists=(150, 8), visible=(150, 1)), device)


@pytest.mark.slow
def test_shares_cover_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many elements: their counts are read in parts."""
    if not INTERPRETED:
        pytest.skip("test_shares has as many")
    monkeypatch.setattr(launch, "_processors", lambda device: 1000)
    monkeypatch.setattr(launch, "_launches", launch.Launches("of a test"))
    monkeypatch.setattr(launch, "_FEW_COUNTS", 2)
    monkeypatch.setattr(launch, "_MAX_COUNTS", 4)
    check(Call(batch=11, heads=1, key_heads=1, kv_len=400, lists=(11, 1), visible=(1, 1), seed=3))


# --- bands ---

CAUSAL, WINDOW, LOCAL, FULL = (None, 0), (100, 0), (130, 40), (None, None)


@on_devices
@pytest.mark.parametrize(
    ("band", "queries", "starts", "page_size"),
    in_short(
        [(CAUSAL, 1, "each", 0), (CAUSAL, 4, "last", 16), (WINDOW, 17, "each", 7), (LOCAL, 1, "each", 16),
         (FULL, 4, 0, 7), ((7, None), 4, "each", 16)],
        [CAUSAL, WINDOW, LOCAL, FULL, (7, None)], [1, 4, 17], ["each", "last", 0, 250], [0, 7, 16],
    ),
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("has_lens", [True] if INTERPRETED else [False, True])
def test_bands(band: Any, queries: int, starts: int | str, page_size: int, has_lens: bool, device: str) -> None:
    """Queries that start before, among and behind the keys, and sequences without keys."""
    for seed in range(1 if INTERPRETED else 4):
        call = Call(3, 2, 1, queries, 280, dtype=FP16, page_size=page_size, band=band, starts=starts, seed=seed)
        check(replace(call, has_lens=has_lens), device)


@on_devices
def test_tiles_that_some_queries_see_whole(device: str) -> None:
    """The first query sees all of the second and third tile, the last one not their first or last key."""
    for band in ((72, 183), (70, 181), (72, None), (None, 183)):
        check(Call(1, 1, 1, 4, 500, band=band, starts=200), device)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("change", in_short(["by query", "weight of each row"], list(CHANGES)))
def test_scores_of_bands(change: str, device: str) -> None:
    for has_lens in (False,) if INTERPRETED else (False, True):
        check(Call(queries=5, cap=30.0, kv_len=200, band=LOCAL, has_lens=has_lens, **CHANGES[change]), device)
    if not INTERPRETED:
        check(Call(queries=5, kv_len=384, band=CAUSAL, **CHANGES[change]), device)


@on_devices
@pytest.mark.parametrize("processors", [1, 40, 1000])
def test_shares_of_bands(processors: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_processors", lambda device: processors)
    monkeypatch.setattr(launch, "_launches", launch.Launches("of a test"))
    monkeypatch.setattr(launch, "_FEW_COUNTS", 2)
    monkeypatch.setattr(launch, "_MAX_COUNTS", 4)
    batch, kv_len = (3, 500) if INTERPRETED else (7, 1300)
    for starts in ("each",) if INTERPRETED else ("each", "last"):
        check(Call(batch, 2, 1, 2, kv_len, band=(300, 5), starts=starts, has_lens=True, seed=processors), device)


@on_devices
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_numbers_of_bands(dtype: torch.dtype, device: str) -> None:
    """Positions and lengths of any dtype and strides."""
    call = made(Call(kv_len=100, band=CAUSAL, has_lens=True))
    call.arguments[4:6] = [x.to(dtype).repeat_interleave(2)[::2] for x in call.arguments[4:6]]
    out, lse = run(call.arguments, device)
    assert error(out, call.out) < 1e-5
    check_lse(lse, call.lse, 1e-4)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("starts", in_short([2**31 - 1], [0, 2**31 - 1, "each"]))
def test_large_numbers_of_bands(starts: int | str, device: str) -> None:
    for band in ((2**31 - 1, 2**31 - 1), (2**40, 2**40), (2**31 - 150, 0)):
        check(Call(kv_len=200, band=band, starts=starts), device)


@on_devices
def test_no_keys_of_bands(device: str) -> None:
    call = made(Call(band=CAUSAL))
    call.arguments[1:3] = [t[:, :, :0] for t in call.arguments[1:3]]
    out, lse = run(call.arguments, device)
    assert torch.all(out == 0)
    assert torch.all(lse == -math.inf)
    batch = [a[:0] if isinstance(a, Tensor) else a for a in call.arguments]
    assert run(batch, device)[0].shape == (0, 4, 1, 16)


def band_calls() -> st.SearchStrategy[Call]:
    """Return random calls of bands."""
    bounds = st.one_of(st.none(), st.sampled_from([0, 1, 50, 128, 1000]))
    starts = st.sampled_from(["each", "each", "last", 0, 127, 128, 5000])
    return st.builds(replace, calls(), band=st.tuples(bounds, bounds), starts=starts, has_lens=st.booleans())


@pytest.mark.slow
@on_devices
def test_random_bands(device: str) -> None:
    try_examples({"cpu": 5, "cuda": 20}[device], lambda call: check(call, device), band_calls())


@on_devices
@pytest.mark.campaign
def test_many_random_bands(device: str) -> None:
    try_examples(200, lambda call: check(call, device), band_calls())


# --- the operators ---


@pytest.mark.gpu
@pytest.mark.parametrize("call", [Call(), Call(page_size=16, cap=2.0, weight=(1, 1, 1), bias=(2, 4, 1), dtype=BF16)])
def test_opcheck(call: Call) -> None:
    for operator, band in ((attend_few, None), (attend_band, LOCAL)):
        arguments = made(replace(call, band=band, has_lens=band is not None)).arguments
        torch.library.opcheck(operator, [a.cuda() if isinstance(a, Tensor) else a for a in arguments])


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_inside_compile(dynamic: bool) -> None:
    functions = {
        band: torch.compile(lambda *a, attend=attend: attend(*a), fullgraph=True, backend="eager", dynamic=dynamic)
        for band, attend in ((None, attend_few), (CAUSAL, attend_band))
    }
    for kv_len, (band, compiled) in itertools.product((300, 500), functions.items()):
        call = made(Call(page_size=16, kv_len=kv_len, band=band))
        out, lse = compiled(*(a.cuda() if isinstance(a, Tensor) else a for a in call.arguments))
        assert error(out, call.out) < 1e-5
        check_lse(lse, call.lse, 1e-4)


def test_no_derivatives() -> None:
    for name, band in (("attend_few", None), ("attend_band", CAUSAL)):
        given = made(Call(band=band)).arguments
        with FakeTensorMode() as mode:
            arguments = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in given]
            out, _ = getattr(few_queries, name)(arguments[0].requires_grad_(), *arguments[1:])
        with pytest.raises(NotImplementedError, match=rf"{name} has no derivatives; flexmasks\.attention takes"):
            out.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_what_no_kernel_takes(device: str) -> None:
    for call in (Call(dtype=torch.float64), Call(k_size=20), *([Call()] if device == "cpu" else [])):
        arguments = [a.to(device) if isinstance(a, Tensor) else a for a in made(call).arguments]
        with pytest.raises(ValueError, match=r"kernels run on a GPU, in float16, .* up to 256; got torch\.float"):
            attend_few(*arguments)


WRONG: dict[str, Callable[[list[Any]], Any]] = {
    "k must be": lambda a: [*a[:1], a[1].half(), *a[2:]],
    "v must be": lambda a: [*a[:2], a[2][:, :, :-1], *a[3:]],
    "page_table must be": lambda a: [*a[:3], torch.zeros(3, 2, dtype=torch.int32), *a[4:]],
    "partial_counts must be": lambda a: [*a[:4], a[4].long(), *a[5:]],
    "full must be": lambda a: [*a[:7], a[7][:, 0], *a[8:]],
    "visible must be": lambda a: [*a[:8], a[8][..., :-1], *a[9:]],
    "bias must be": lambda a: [*a[:10], torch.zeros(2, 1, 1, 1), *a[11:]],
    "weight must be": lambda a: [*a[:9], *[torch.zeros(2, 1, 1, 300)] * 2, *a[11:]],
    "got no bias": lambda a: [*a[:9], torch.zeros(2, 1, 1, 1), *a[10:]],
    "heads of q, 3, must be a multiple of the heads of k, 2": lambda a: [a[0][:, :3], *a[1:]],
    "last stride of k must be 1": lambda a: [*a[:1], a[1].transpose(2, 3).contiguous().transpose(2, 3), *a[2:]],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "place"), [("q_starts", 4), ("kv_lens", 5)])
def test_errors_of_bands(name: str, place: int, device: str) -> None:
    arguments = made(Call(band=CAUSAL, has_lens=True)).arguments
    for wrong in (torch.zeros(2), torch.zeros(3, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)):
        arguments[place] = wrong
        with pytest.raises(ValueError, match=f"{name} must be"):
            run(arguments, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_start", [-1, -5, 2**31])
def test_errors_of_places(q_start: int, device: str) -> None:
    arguments = made(Call(band=CAUSAL)).arguments
    arguments[-3] = q_start
    with pytest.raises(ValueError, match="q_start must be from 0 to"):
        run(arguments, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("message", WRONG)
def test_errors(message: str, device: str) -> None:
    arguments = WRONG[message](made(Call()).arguments)
    there = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
    with pytest.raises(ValueError, match=message):
        (launch.attend_few if device == "cpu" else attend_few)(*there)


def test_launches_pass_what_triton_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's launcher gets what `kernel[grid]` gives it, with addresses for tensors, and without hooks."""

    class Loaded(CompiledKernel):  # type: ignore[misc]
        def __del__(self) -> None:
            """Unload nothing."""

    seen: list[tuple[Any, ...]] = []
    made = object.__new__(Loaded)
    vars(made).update(_run=lambda *a: seen.append(a), module=object(), function=11, packed_metadata=(4, 1, 0))
    vars(made).update(name="kernel", src=None)  # of what hooks get
    monkeypatch.setattr(launches, "raw_stream", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    x = torch.zeros(3)
    launch = launches.launch_of(made, 5, (3,))
    launch([x, None], (1.0,))
    assert any(held is made for held in gc.get_referents(vars(launch)))  # nothing else may hold it
    made[(5, 1, 1)](x, None, 1.0, 3, stream=7)
    got, want = ([*arguments[:6], *arguments[9:]] for arguments in seen)  # the others are of hooks
    assert got == [x.data_ptr() if a is x else a for a in want]
    assert seen[0][6:9] == (None, None, None)


def test_calls_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host makes few calls for a layout that it knows: decoding calls the operator in each layer of each token."""
    launched: list[str] = []
    monkeypatch.setattr(launch, "_launches", launch.Launches("of a test"))
    monkeypatch.setattr(launch, "compiled", lambda kernel, *_: lambda *_: launched.append(kernel.__name__))
    arguments = made(Call(page_size=16, kv_len=2000, cap=3.0, weight=(1, 1, 1), bias=(1, 1, 1))).arguments
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    launch.attend_few(*arguments)
    again = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    sys.setprofile(counted)
    launch.attend_few(*again)
    sys.setprofile(None)
    assert launched == ["attend_kernel", "join_kernel"] * 2
    assert len(launch._launches) == 1
    assert count < 60  # three for each of eleven tensors, and some
    launched.clear()
    count = 0
    banded = made(Call(page_size=16, kv_len=2000, cap=3.0, band=CAUSAL, has_lens=True)).arguments
    launch.attend_band(*banded)
    again = [a.clone() if isinstance(a, Tensor) else a for a in banded]
    sys.setprofile(counted)
    launch.attend_band(*again)
    sys.setprofile(None)
    assert launched == ["attend_kernel", "join_kernel"] * 2
    assert len(launch._launches) == 2
    assert count < 60
    launch.attend_few(*made(Call(queries=2)).arguments)
    assert len(launch._launches) == 3


# --- what is compiled ---


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_growing_caches_compile_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and numbers of sequences are no constants of the kernels."""
    kernels = set()

    def compiled(kernel: Any, _programs: int, warps: int, *given: tuple[Any, ...]) -> Callable[..., None]:
        arguments = [a for part in given for a in part]
        constants = [a for p, a in zip(kernel.params, arguments, strict=True) if p.is_constexpr]
        specialized = [
            p.name
            for p, a in zip(kernel.params, arguments, strict=True)
            if isinstance(a, int) and not p.is_constexpr and not p.do_not_specialize
        ]
        assert not specialized
        kernels.add((kernel.__name__, warps, *constants))
        return lambda *_: None

    monkeypatch.setattr(launch, "_launches", launch.Launches("of a test"))
    monkeypatch.setattr(launch, "compiled", compiled)
    for kv_len in [*range(200, 300, 3), 256, 384, 1000, 1024]:
        launch.attend_few(*made(Call(kv_len=kv_len)).arguments)
    assert len(kernels) <= 4  # lengths that are multiples of 128, of 8, and others; and the kernel that joins shares
    for batch in range(2, 9):
        launch.attend_few(*made(Call(batch=batch, kv_len=1024, lists=(batch, 1), visible=(batch, 1))).arguments)
    assert len(kernels) <= 4
    kernels.clear()
    for n in (1, 100, 128, 200, 256, 1000, 1024):
        for band in ((None, 0), (n, 0), (n, n), (None, None)):
            launch.attend_band(*made(Call(batch=1 + n % 5, kv_len=n, band=band, has_lens=True)).arguments)
            launch.attend_band(*made(Call(kv_len=n, band=band, has_lens=True, starts="last")).arguments)
            launch.attend_band(*made(Call(kv_len=n, band=band, has_lens=True, starts=n)).arguments)
    assert len(kernels) <= 4  # each kernel, and of the first one the form without shares


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")  # Triton 3.9
@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    "call",
    one_in(
        2,
        [
            Call(8, 32, 8, kv_len=8192, k_size=128, v_size=128, dtype=BF16),
            Call(8, 8, 8, kv_len=1000, k_size=72, v_size=72, dtype=FP16, page_size=8),
            Call(8, 8, 1, kv_len=8192, k_size=128, v_size=128, dtype=BF16, page_size=16, bias=(1, 8, 1), cap=30.0),
            Call(8, 32, 8, 17, 8192, k_size=128, v_size=128, dtype=BF16, page_size=256, table=torch.int64),
            Call(8, 4, 4, kv_len=8192, k_size=64, v_size=64, dtype=FP32),
            Call(8, 32, 8, kv_len=8192, k_size=128, v_size=128, dtype=BF16, band=(None, 0)),
            Call(8, 32, 8, 4, 8192, k_size=128, v_size=128, dtype=BF16, band=(100, 0), page_size=16, has_lens=True),
            Call(
                8,
                8,
                1,
                4,
                8192,
                k_size=64,
                v_size=64,
                dtype=FP16,
                band=(None, 0),
                page_size=256,
                starts="last",
                has_lens=True,
                bias=(1, 8, 1),
            ),
        ],
    ),
    ids=["contiguous", "pages-of-8", "pages-of-16", "pages-of-256", "float32", "band", "band-pages", "band-bias"],
)
def test_loads_are_wide_and_ahead(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values come by asynchronous copies of 16 bytes, two steps ahead, in both loops."""
    made_kernels = []

    def compiled(kernel: Any, _programs: int, warps: int, *given: tuple[Any, ...]) -> Callable[..., None]:
        arguments = [a for part in given for a in part]
        named = dict(zip([p.name for p in kernel.params], arguments, strict=True))
        made_kernels.append((compiled_for_hopper(kernel, warps, arguments).asm["ptx"], named, warps))
        return lambda *_: None

    monkeypatch.setattr(launch, "_launches", launch.Launches("of a test"))
    monkeypatch.setattr(launch, "_processors", lambda device: 132)
    monkeypatch.setattr(launch, "compiled", compiled)
    attend = launch.attend_few if call.band is None else launch.attend_band
    attend(*made(replace(call, batch=2, kv_len=call.kv_len // 8)).arguments)  # the same layout but for sizes
    text, named, warps = made_kernels[0]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+|\d+)", text)
    assert {int(n, 0) for n in copies} == {16}
    width = named["K_WIDTH"] + named["V_WIDTH"]
    in_step = named["KEYS"] * width * call.dtype.itemsize // (16 * 32 * warps)
    assert len(copies) >= 2 * 3 * in_step  # in each loop, and for two steps before it


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")  # Triton 3.9
@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("size", [128, 256])
def test_fits_a_small_gpu(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 100 KB of shared memory, on compute capability 8.6, 8.9 and 12.x; the largest kernel of each head size."""
    made_kernels = []

    def compiled(kernel: Any, _programs: int, warps: int, *given: tuple[Any, ...]) -> Callable[..., None]:
        made_kernels.append(compiled_for_hopper(kernel, warps, tuple(a for part in given for a in part), arch=86))
        return lambda *_: None

    monkeypatch.setattr(launch, "_launches", launch.Launches("of a test"))
    monkeypatch.setattr(launch, "_processors", lambda device: 84)
    on_gpu_of(monkeypatch, (8, 6))
    monkeypatch.setattr(launch, "compiled", compiled)
    call = Call(2, 128, 1, kv_len=1024, k_size=size, v_size=size, dtype=BF16, band=(None, 0), bias=(1, 128, 1))
    launch.attend_band(*made(call).arguments)
    assert max(made.metadata.shared for made in made_kernels) <= 101_376


@pytest.mark.parametrize(
    ("elements", "key_heads", "rows", "size", "kv_len"),
    [
        (64, 8, 4, 128, 8192),
        (8, 8, 4, 128, 32768),
        (1, 8, 4, 128, 131072),
        (256, 16, 1, 64, 2048),
        (1, 1, 1, 128, 131072),
        (1, 8, 256, 128, 131072),
        (4096, 1, 1, 64, 4096),
    ],
)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_choices(elements: int, key_heads: int, rows: int, size: int, kv_len: int, itemsize: int) -> None:
    """Programs fill a GPU once at least, and their shared memory fits a processor."""
    tiles = kv_len // 128
    memory = 227 * 2**10  # of a Hopper GPU
    choice = launch._choice(rows, size, size, itemsize, elements, key_heads, tiles, 132, memory)
    programs = (choice.shares or elements) * key_heads * -(-rows // choice.rows)
    assert programs >= 132
    assert choice.shares == 0 or elements < choice.shares <= elements * tiles + elements
    assert choice.keys in (16, 32, 64, 128)
    assert (choice.stages * 2 * choice.keys + choice.rows) * size * itemsize <= memory


# --- on a GPU ---


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    """A replay reads the counts, lists, tables and masks of its time."""
    first, second = (
        [a.cuda() if isinstance(a, Tensor) else a for a in made(Call(page_size=16, kv_len=3000, seed=n)).arguments]
        for n in (1, 2)
    )
    attend_few(*first)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend_few(*first)
    for a, b in zip(first, second, strict=True):
        if isinstance(a, Tensor):
            a.copy_(b)
    graph.replay()
    want = made(Call(page_size=16, kv_len=3000, seed=2))
    assert error(out, want.out) < 1e-5
    check_lse(lse, want.lse, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16, 128])
def test_beyond_2_to_the_31(page_size: int) -> None:
    """The last tiles of a cache with more than 2**31 numbers."""
    kv_len, size = 2**24 + 4096, 128
    k = torch.zeros(1, 1, kv_len, size, dtype=FP16, device="cuda")
    v = torch.zeros_like(k)
    q = torch.randn(1, 1, 1, size, dtype=FP16, device="cuda")
    k[:, :, -128:].normal_()
    v[:, :, -128:].normal_()
    want, want_lse = oracle(
        *(t.cpu() for t in (q, k[:, :, -128:], v[:, :, -128:])), torch.tensor(True), 0.1, None, None, None
    )
    table = None
    if page_size:
        k, v = (t.view(-1, page_size, 1, size) for t in (k, v))
        table = torch.arange(kv_len // page_size, dtype=torch.int32, device="cuda")[None]
    for is_full in (False, True):
        one = torch.ones(1, 1, dtype=torch.int32, device="cuda")
        tile = (one * (kv_len // 128 - 1))[..., None]
        visible = torch.ones(1, device="cuda", dtype=torch.bool).expand(1, 1, 1, kv_len)
        counts = [0 * one, one] if is_full else [one, 0 * one]
        out, lse = attend_few(q, k, v, table, counts[0], tile, counts[1], tile, visible, None, None, 0.1, None)
        assert error(out, want) < TOLERANCE[FP16]
        check_lse(lse, want_lse, TOLERANCE[FP16])


# --- the tiles that queries see ---


@pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else DEVICES)
@pytest.mark.parametrize(
    ("queries", "kv_len"),
    in_short(
        [(1, 1), (3, 128), (17, 300), (64, 300), (1, 9000), (3, 9000)], [1, 3, 17, 64], [1, 128, 300, 9000, 600_000]
    ),
)
def test_visible_tiles(queries: int, kv_len: int, device: str) -> None:
    """Partial and full tiles come first in their lists, and in order; several programs look at a long line."""
    if INTERPRETED and queries * kv_len > 30_000:
        pytest.skip("the interpreter is slow")
    n_tiles = -(-kv_len // 128)
    kinds = torch.randint(3, (3, 2, n_tiles))
    kinds[0], kinds[1, 0], kinds[1, 1] = 0, 1, 2
    visible = (kinds == 2).repeat_interleave(128, -1)[:, :, None, :kv_len].repeat(1, 1, queries, 1)
    last_keys = (torch.arange(n_tiles) * 128 + 127).clamp(max=kv_len - 1)
    first_keys = torch.arange(n_tiles) * 128
    is_alone = (first_keys == last_keys) & (queries == 1)  # one pair is full or empty
    kinds[(kinds == 1) & is_alone] = 0
    for b, h, tile in (kinds == 1).nonzero().tolist():
        query = int(torch.randint(queries, ()))
        visible[b, h, query, last_keys[tile]] = True
        if tile % 3 == 0:  # all pairs but one
            visible[b, h, :, first_keys[tile] : last_keys[tile] + 1] = True
            visible[b, h, query, first_keys[tile]] = False
    find = tiles_of if INTERPRETED else visible_tiles
    for _ in range(3):
        found = [t.cpu() for t in find(visible.to(device))]
        for kind, counts, tiles in ((1, *found[:2]), (2, *found[2:])):
            assert counts.dtype == tiles.dtype == torch.int32
            assert torch.equal(counts, (kinds == kind).sum(-1).int())
            for b, h in itertools.product(range(3), range(2)):
                of_kind, others = ((kinds[b, h] == kind) == is_it for is_it in (True, False))
                assert tiles[b, h].tolist() == [*of_kind.nonzero()[:, 0].tolist(), *others.nonzero()[:, 0].tolist()]


@pytest.mark.skipif(INTERPRETED, reason="runs the plain version")
def test_opcheck_of_tiles() -> None:
    torch.library.opcheck(torch.ops.flexmasks.visible_tiles, (torch.rand(2, 1, 3, 300) < 0.01,))


# --- by the interpreter ---


@pytest.mark.skipif(INTERPRETED, reason="Triton is interpreted in this process already")
@pytest.mark.parametrize("selection", ["not campaign", pytest.param("campaign", marks=pytest.mark.campaign)])
def test_kernels_by_the_interpreter(selection: str) -> None:
    """The tests of this file, in a process that chose Triton's interpreter before it was imported."""
    check_by_the_interpreter(__file__, "-m", selection)
