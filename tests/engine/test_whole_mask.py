"""Backend "short" as on a GPU: kernels that take the whole mask as a tensor.

With TRITON_INTERPRET=1 Triton's interpreter runs the kernels on a CPU. The interpreter must be chosen before Triton is
imported, so `test_by_the_interpreter` runs this file in a process of its own.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import (
    DEVICES,
    TOLERANCE,
    arguments,
    check_by_the_interpreter,
    check_lse,
    compiled_for_hopper,
    error,
    exact,
    label,
    on_gpu_of,
    one_in,
    qkv,
    try_examples,
)
from hypothesis import strategies as st
from oracles import MASK_CASES, SCORE_CASES, SCORES, Case, attend
from oracles import dense as dense_of
from torch import Tensor

import flexmasks
from flexmasks import road
from flexmasks.backends import short
from flexmasks.kernels.whole_mask import TILE, Line, WholeMask, spans_of
from flexmasks.plans import plan

launch = pytest.importorskip("flexmasks.kernels.whole_mask_launch")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FP16, BF16 = torch.float16, torch.bfloat16

on_devices = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else DEVICES[1:], indirect=True)
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")] if INTERPRETED else []  # NumPy warns of 0 / 0


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of a test, which counts as a GPU."""
    monkeypatch.setattr(short, "_ON_GPU", ("cpu", "cuda"))
    monkeypatch.setattr(road, "_KINDS_ON", ("cpu", "cuda"))
    monkeypatch.setattr(plan, "_PLANS_TO_RECORD", 1)
    flexmasks.clear_caches()
    yield request.param
    flexmasks.clear_caches()


def in_short(turns: int, cases: list[Any]) -> list[Any]:
    """Return all cases; the interpreter, which is slow, tries one in `turns` each day, and all in campaigns."""
    return one_in(turns, cases) if INTERPRETED else cases


def results(leaves: list[Tensor], backend: str = "short", **call: Any) -> list[Tensor]:
    """Return output, lse and gradients, for upstream gradients that depend on the sizes only."""
    out, lse = flexmasks.attention(*leaves, return_lse=True, backend=backend, **call)
    seen = torch.where(lse == -math.inf, 0, lse)
    generator = torch.Generator().manual_seed(out.numel())
    d_out, d_lse = (torch.randn(x.shape, generator=generator).to(x) for x in (out, seen))
    return [out, seen, *torch.autograd.grad([out, seen], leaves, [d_out, d_lse])]


def expected(leaves: list[Tensor], visible: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Return the same from the oracle."""
    others = [exact(x) for x in leaves]
    out, lse = attend(*others, visible.cpu(), change) if change else attend(*others, visible.cpu())
    seen = torch.where(lse == -math.inf, 0, lse)
    generator = torch.Generator().manual_seed(out.numel())
    d_out, d_lse = (torch.randn(x.shape, generator=generator).to(x) for x in (out, seen))
    d_out = d_out.float().to(leaves[0].dtype).double()
    return [out, seen, *torch.autograd.grad([out, seen], others, [d_out, d_lse.float().double()])]


def check(got: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> None:
    assert max(map(error, got, want)) < 2 * TOLERANCE[dtype]
    assert all(x.dtype == dtype for n, x in enumerate(got) if n != 1)


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_by_the_interpreter() -> None:
    check_by_the_interpreter(__file__)


# --- exactness ---


@on_devices
@pytest.mark.parametrize("case", in_short(60, MASK_CASES), ids=label)
def test_every_mask(case: Case, device: str) -> None:
    dtype = FP16 if case.kv_len % 3 else BF16
    leaves = qkv(case, dtype, device, grouped=case.kv_len % 2 == 0)
    check(results(leaves, mask=case.name, **arguments(case, device)), expected(leaves, dense_of(case)), dtype)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("case", in_short(12, SCORE_CASES), ids=label)
def test_scores_that_add(case: Case, device: str) -> None:
    leaves = qkv(case, FP16, device)
    call = {"mask": "causal", "score": case.name, **arguments(case, device)}
    reason = flexmasks.explain(*leaves, **call).others.get("short")
    if reason is not None and "asked for" not in reason and "faster here" not in reason:
        assert "score changes that add" in reason
        return
    seen = dense_of(Case("causal", {}, case.batch, case.heads, case.q_len, case.kv_len, case.q_offset))
    want = expected(leaves, seen, lambda scores: SCORES[case.name](scores, case, **case.params))
    check(results(leaves, **call), want, FP16)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize(("offset", "is_absolute"), in_short(2, [(0, False), (3, True), (40, False), (40, True)]))
def test_lines_over_the_distance(device: str, offset: int, is_absolute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distances of ALiBi are computed and not read, also where a tensor holds the slopes."""
    q_len, kv_len = 37, 70
    distances = torch.arange(kv_len) - torch.arange(q_len)[:, None] - offset
    distances = -distances.abs() if is_absolute else distances
    lines, kernels_of = [], launch.kernels_of

    def noted(q: Tensor, k: Tensor, v: Tensor, mask: WholeMask) -> Any:
        lines.append(mask.line)
        assert mask.bias is None
        return kernels_of(q, k, v, mask)

    monkeypatch.setattr(launch, "kernels_of", noted)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.1])
    q, k, v = (torch.randn(2, 4, n, 16).to(device, FP16).requires_grad_() for n in (q_len, kv_len, kv_len))
    call: dict[str, Any] = {"mask": "causal", "score": "alibi", "slopes": slopes.to(device), "q_offset": offset}
    want = expected(
        [q, k, v],
        dense_of(Case("causal", {}, 2, 4, q_len, kv_len, offset)),
        lambda scores: scores + slopes.double()[:, None, None] * distances,
    )
    check(results([q, k, v], bidirectional=is_absolute, **call), want, FP16)
    assert [line.is_absolute for line in lines] == [is_absolute]


@pytest.mark.slow
@on_devices
def test_random_masks(device: str) -> None:
    """Masks with empty rows, columns and tiles, for lengths and head sizes that nothing divides."""

    def try_one(
        batch: int, heads: tuple[int, int], lengths: tuple[int, int], sizes: tuple[int, int], by: tuple[bool, bool],
        dtype: torch.dtype, seed: int,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        q_len, kv_len = lengths
        shape = batch if by[0] else 1, heads[0] if by[1] else 1, q_len, kv_len
        seen = torch.rand(shape, generator=generator) < 0.3
        seen &= torch.rand(*shape[:3], 1, generator=generator) < 0.8
        seen[..., q_len // 3 :, : kv_len // 2] = False
        shapes = (heads[0], q_len, sizes[0]), (heads[1], kv_len, sizes[0]), (heads[1], kv_len, sizes[1])
        leaves = [torch.randn(batch, *s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]
        marks = seen.to(device)

        def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return marks[b % len(marks), h % marks.shape[1], q, kv]

        check(results(leaves, mask=mask, q_offset=0), expected(leaves, seen), dtype)

    longest = 90 if INTERPRETED else 150  # more than a tile
    lengths = st.tuples(st.integers(1, longest), st.integers(1, longest))
    try_examples(
        2 if INTERPRETED else 60, try_one, st.integers(1, 3), st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
        lengths, st.sampled_from([(16, 16), (8, 40), (64, 64), (72, 128)]), st.tuples(st.booleans(), st.booleans()),
        st.sampled_from([FP16, BF16]), st.integers(0, 2**31),
    )  # fmt: skip


@on_devices
def test_hidden_keys_may_hold_anything(device: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 200, 16).to(device, BF16)
    with torch.no_grad():
        want = flexmasks.attention(q, k, v, mask="sliding_window", window=5, backend="short")
        k[:, :, 100] = math.nan
        k[:, :, 150] = math.inf
        got = flexmasks.attention(q, k, v, mask="sliding_window", window=5, backend="short")
    is_hidden = torch.ones(200, dtype=torch.bool)
    is_hidden[100:106] = is_hidden[150:156] = False
    got, want = got.cpu(), want.cpu()
    assert torch.equal(got[:, :, is_hidden], want[:, :, is_hidden])
    assert bool(got[:, :, 100:106].isnan().all())


@on_devices
@pytest.mark.parametrize("lowest", [-1e20, torch.finfo(torch.float32).min, -math.inf])
def test_very_low_scores(lowest: float, device: str) -> None:
    """A row whose scores are all very low is a row like others; one of -inf sees nothing."""
    q, k, v = (torch.randn(1, 2, 70, 16).to(device, FP16).requires_grad_() for _ in range(3))
    bias = torch.zeros(70, 70, device=device)
    bias[10:20] = lowest

    def score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + bias[q, kv]

    got = results([q, k, v], score=score)
    want = results([q, k, v], "reference", score=score)
    assert max(error(a, b.double().cpu()) for a, b in zip(got, want, strict=True)) < 2 * TOLERANCE[FP16]


@on_devices
@pytest.mark.parametrize("steepness", [-3.0, 3.0])
def test_steep_lines_beyond_the_last_row(steepness: float, device: str) -> None:
    """Rows that fill the last tile have scores, too, of which no gradient may come."""
    leaves = [torch.randn(2, 2, 70, 16).to(device, FP16).requires_grad_() for _ in range(3)]
    got = results(leaves, score=lambda s, b, h, q, kv: s + steepness * (q - kv))
    q, kv = torch.arange(70)[:, None], torch.arange(70)
    check(got, expected(leaves, torch.ones(70, 70, dtype=torch.bool), lambda s: s + steepness * (q - kv)), FP16)


@pytest.mark.slow
@on_devices
def test_layouts(device: str) -> None:
    """Rows may lie anywhere, and upstream gradients may be expanded or transposed."""
    fused = torch.randn(2, 65, 3, 4, 24).to(device, FP16).requires_grad_()
    plain = fused.detach().clone().requires_grad_()
    for backend, x in (("short", fused), ("reference", plain)):
        q, k, v = x.unbind(2)
        call = {"mask": "sliding_window", "window": 9, "backend": backend}
        out = flexmasks.attention(*(t.transpose(1, 2) for t in (q, k, v)), **call)
        (out.sum() + out.transpose(2, 3)[..., 1:].float().square().sum()).backward()
    assert fused.grad is not None
    assert plain.grad is not None
    assert error(fused.grad, plain.grad.cpu()) < 2 * TOLERANCE[FP16]
    q, k = torch.randn(2, 1, 2, 24, 40).to(device, FP16).transpose(3, 4)  # the last stride is not 1
    v = torch.randn(1, 2, 41, 32).to(device, FP16)[:, :, 1:, 8:24]
    q[:, :, 7] = 0
    with torch.no_grad():
        got, want = (flexmasks.attention(q, k, v, mask="causal", backend=b) for b in ("short", "reference"))
    assert error(got, want.cpu()) < TOLERANCE[FP16]


@pytest.mark.slow
@on_devices
def test_sinks_and_gradients_of_some(device: str) -> None:
    q, k, v = (torch.randn(2, 4, 50, 16).to(device, BF16) for _ in range(3))
    sinks = torch.randn(4).to(device).requires_grad_()
    k.requires_grad_()
    grads = []
    for backend in ("short", "reference"):
        call = {"mask": "sliding_window", "window": 9, "backend": backend}
        out = flexmasks.attention(q, k, v, sink_logits=sinks, **call)
        grads.append([out, *torch.autograd.grad(out.float().square().sum(), (k, sinks))])
    assert max(error(a, b.cpu()) for a, b in zip(*grads, strict=True)) < 2 * TOLERANCE[BF16]
    _, lse = flexmasks.attention(q, k, v, return_lse=True, mask="sliding_window", window=9, backend="short")
    assert torch.autograd.grad(lse.sum(), k)[0].isfinite().all()


@on_devices
def test_derivatives_of_gradients_and_batches_of_them(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8).to(device, FP16).requires_grad_() for _ in range(3))
    found = []
    for backend in ("short", "reference"):
        out = flexmasks.attention(q, k, v, mask="sliding_window", window=3, backend=backend)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), (q, k, v), retain_graph=True)
        units = torch.eye(out.numel()).to(device, FP16)[:3].view(3, *out.shape)
        found.append([*second, *torch.autograd.grad(out, (q, k), units, is_grads_batched=True)])
    assert max(error(a, b.cpu()) for a, b in zip(*found, strict=True)) < 0.02


# --- new tensors ---


@pytest.mark.slow
@on_devices
def test_new_tensors_at_every_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with new tensors are renewed, compile nothing more, and see changes in place."""
    compiled = launch.compiled
    made: list[str] = []

    def noted(kernel: Any, *others: Any) -> Any:
        made.append(kernel.__name__)
        return compiled(kernel, *others)

    monkeypatch.setattr(launch, "compiled", noted)
    monkeypatch.setattr(launch, "_kernels", launch.Launches("of a test"))
    q, k, v = (torch.randn(2, 2, 96, 16).to(device, FP16).requires_grad_() for _ in range(3))
    for step in range(3 if INTERPRETED else 5):
        ids = (torch.arange(96) // (5 + step)).to(device)
        slopes = torch.rand(2).to(device)
        mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
        call = {"mask": mask, "score": "alibi", "slopes": slopes}
        for _ in range(2):
            got, want = results([q, k, v], **call), results([q, k, v], "reference", **call)
            assert max(error(a, b.double().cpu()) for a, b in zip(got, want, strict=True)) < 2 * TOLERANCE[FP16]
            ids += (torch.arange(96) // 50).to(device)  # changed in place
        if step == 1:
            made.clear()
    assert not made
    assert flexmasks.cache_info()["kinds"].parts["calls"].entries > 0


# --- biases that learn ---


def _table(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, table: Tensor) -> Tensor:
    return score + table[h, kv - q + 96]


_H = 2 if INTERPRETED else 4
_BIASES: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    # The shape of what learns for B, H, Q and KV = 4, _H, 96, 70, and the score.
    "of all": ((96, 70), lambda bias: bias),
    "of heads": ((1, _H, 96, 70), lambda bias: flexmasks.scores.dense_bias(bias=bias)),
    "of elements": ((4, 1, 96, 70), lambda bias: bias),
    "of both": ((4, _H, 96, 70), lambda bias: bias),
    "of pairs": ((2, _H, 96, 70), lambda bias: flexmasks.scores.pair_bias(bias=bias, group=2)),
    "of keys": ((1, 1, 1, 70), lambda bias: bias),
    "of keys and groups": ((2, _H, 1, 70), lambda bias: flexmasks.scores.pair_bias(bias=bias, group=2)),
    "table": ((_H, 200), lambda table: flexmasks.get_score(_table, table=table)),
    "rows": ((4, _H, 96, 7), lambda rows: lambda s, b, h, q, kv: s + rows[b, h, q, kv // 10]),
}


def _with_bias(name: str, learned: Tensor, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Return what a score of `_BIASES` adds, [B, H, Q, KV]."""
    q, kv = torch.arange(q_len)[:, None], torch.arange(kv_len)
    if name == "table":
        return learned[:, kv - q + 96][None].expand(batch, -1, -1, -1)
    if name == "rows":
        return learned[..., kv // 10]
    if "pairs" in name or "groups" in name:
        learned = learned.repeat_interleave(batch // len(learned), 0)
    return learned.expand(batch, heads, q_len, kv_len)


def _step(leaves: list[Tensor], name: str, **call: Any) -> list[Tensor]:
    """Return output, lse and gradients, also of what learns, the last of the leaves."""
    q, k, v, learned = leaves
    score = _BIASES[name][1](learned)
    out, lse = flexmasks.attention(q, k, v, score=score, return_lse=True, q_offset="first", **call)
    seen = torch.where(lse == -math.inf, 0, lse)
    generator = torch.Generator().manual_seed(5)
    upstream = [torch.randn(x.shape, generator=generator).to(x) for x in (out, seen)]
    return [out, seen, *torch.autograd.grad([out, seen], leaves, upstream)]


def _formula(leaves: list[Tensor], name: str, visible: Tensor) -> list[Tensor]:
    """The same in float64."""
    others = [exact(x) for x in leaves]
    q, k, v, learned = others
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[3])
    scores = scores + _with_bias(name, learned, *scores.shape)
    scores = scores.masked_fill(~visible.cpu(), -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.where(empty, 0, torch.where(empty, 0.0, scores).softmax(-1))
    out = weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    seen = torch.where(empty, 0.0, scores).logsumexp(-1).masked_fill(empty[..., 0], 0)
    generator = torch.Generator().manual_seed(5)
    upstream = [torch.randn(x.shape, generator=generator) for x in (out, seen)]
    upstream[0] = upstream[0].to(leaves[0].dtype).double()
    return [out, seen, *torch.autograd.grad([out, seen], others, [upstream[0], upstream[1].double()])]


def _learning(name: str, device: str, dtype: torch.dtype, kv_heads: int = _H, size: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    shapes = (4, _H, 96, size), (4, kv_heads, 70, size), (4, kv_heads, 70, size), _BIASES[name][0]
    made = [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]
    return [x.requires_grad_() for x in made]


@on_devices
@pytest.mark.parametrize("name", in_short(len(_BIASES), list(_BIASES)))
def test_biases_that_learn(name: str, device: str) -> None:
    """Their gradients are sums in one order, equal at each run; new tensors at each step make no new kernels."""
    dtype = FP16 if INTERPRETED or "e" in name else BF16
    leaves = _learning(name, device, dtype, kv_heads=_H // 2 if "of" in name else _H)
    generator = torch.Generator().manual_seed(1)
    lens = torch.tensor([70, 33, 0, 64], device=device)
    masks: list[tuple[Any, Tensor]] = [
        (lambda b, h, q, kv: kv < lens[b], torch.arange(70) < lens.cpu()[:, None, None, None]),
        (shown := torch.rand(4, 1, 96, 70, generator=generator).to(device) < 0.3, shown),
    ]
    for mask, visible in masks[: 1 if INTERPRETED else 2]:
        want = _formula(leaves, name, visible)
        assert (
            flexmasks.explain(*leaves[:3], mask=mask, score=_BIASES[name][1](leaves[3]), q_offset=0).backend == "short"
        )
        got = _step(leaves, name, mask=mask)
        for a, b, unit in zip(got, want, (0.05, 0.05, 0.05, 0.05, 0.05, float(want[5].abs().max())), strict=True):
            assert error(a, b, unit=unit) < 2 * TOLERANCE[dtype]
        for _ in range(1 if INTERPRETED else 10):
            assert all(map(torch.equal, got, _step(leaves, name, mask=mask)))
    again = [torch.randn_like(x).requires_grad_() for x in leaves]
    want = _formula(again, name, visible)
    for a, b, unit in zip(_step(again, name, mask=mask), want, (*(0.05,) * 5, float(want[5].abs().max())), strict=True):
        assert error(a, b, unit=unit) < 2 * TOLERANCE[dtype]


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("name", in_short(4, ["of pairs", "of heads", "of keys", "table"]))
def test_biases_that_learn_inside_torch_compile(name: str, device: str, request: pytest.FixtureRequest) -> None:
    """Torch's own kernels would sum their gradients by atomics. New tensors at each step compile nothing."""
    # The sum over the pairs that read one entry of a table is the compiler's, which orders it where it is told to.
    torch.use_deterministic_algorithms(name == "table")
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    compiler: Any = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(flexmasks.attention, fullgraph=True, backend=compiler)

    def results_of(call: Callable[..., Any], leaves: list[Tensor], lens: Tensor, backend: str) -> list[Tensor]:
        *qkv, learned = leaves
        score = _BIASES[name][1](learned)
        score = flexmasks.get_score(score) if callable(score) else score
        how = {"return_lse": True, "q_offset": "first", "backend": backend}
        out, lse = call(*qkv, mask="padding", kv_lens=lens, score=score, **how)
        return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)]

    torch._dynamo.reset()
    for seed in range(2):
        leaves = _learning(name, device, FP16, kv_heads=_H // 2)
        leaves[3] = leaves[3].float()  # as autocast has it
        leaves = [(x.detach() + seed).requires_grad_() for x in leaves]
        lens = torch.tensor([70, 33, 1, 64 - seed], device=device)
        got = results_of(compiled, leaves, lens, "short")
        want = results_of(flexmasks.attention, leaves, lens, "reference")
        for a, b in zip(got, want, strict=True):
            assert error(a, b.double().cpu()) < TOLERANCE[FP16]
        if seed or not INTERPRETED:
            assert all(map(torch.equal, got, results_of(compiled, leaves, lens, "short")))
    assert compiler.frame_count == 1


@on_devices
@pytest.mark.parametrize(
    ("learns", "shown"), in_short(8, list(itertools.product([True, False], ["all", "keys", "pairs", "windows"])))
)
def test_heads_of_one_tile(shown: str, learns: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs go over batch elements: here some over several of them, the last over fewer."""
    monkeypatch.setattr(launch, "_OF_TILES", dict.fromkeys(launch._OF_TILES, (4, 2, 4 if INTERPRETED else 12)))
    batch, heads, queries, keys = 18 if INTERPRETED else 54, 2, 30, 49
    generator = torch.Generator().manual_seed(3)
    shapes = (batch, heads, queries, 16), (batch, heads, keys, 16), (batch, heads, keys, 32), (2, heads, queries, keys)
    made = [torch.randn(s, generator=generator).to(device, FP16) for s in shapes]
    leaves = [x.requires_grad_(learns or n < 3) for n, x in enumerate(made)]
    sizes = {
        "all": None,
        "keys": (1, 1, 1, keys),
        "pairs": (1, heads, queries, keys),
        "windows": (batch, 1, queries, keys),
    }
    size = sizes[shown]
    visible = torch.ones(1, dtype=torch.bool) if size is None else torch.rand(size, generator=generator) < 0.6
    mask = None if size is None else visible.to(device)

    def step(tensors: list[Tensor], call: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        out, lse = call(*tensors)
        seen = torch.where(lse == -math.inf, 0, lse)
        generator = torch.Generator().manual_seed(5)
        upstream = [torch.randn(x.shape, generator=generator).to(x) for x in (out, seen)]
        return [out, seen, *torch.autograd.grad([out, seen], tensors[: 4 if learns else 3], upstream)]

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        score = flexmasks.scores.pair_bias(bias=bias, group=batch // 2)
        return flexmasks.attention(q, k, v, mask=mask, score=score, return_lse=True, q_offset=0, backend="short")

    def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT / 4 + bias.repeat_interleave(batch // 2, 0)
        scores = scores.masked_fill(~visible, -math.inf)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.where(empty, 0, torch.where(empty, 0.0, scores).softmax(-1))
        return weights @ v, scores.logsumexp(-1)

    got, want = step(leaves, ours), step([exact(x) for x in leaves], formula)
    for a, b in zip(got, want, strict=True):
        assert error(a, b, unit=float(b.detach().abs().max())) < 2 * TOLERANCE[FP16]
    assert all(map(torch.equal, got, step(leaves, ours)))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize("length", [49, 144, 197, 385])
@pytest.mark.parametrize("size", [16, 32, 64, 96, 128])
def test_sizes_of_windows_and_proteins(length: int, size: int) -> None:
    """Lengths that no tile divides, also where autocast casts q, k and v, and the bias is float32."""
    shape = (6, 4, length, size)
    q, k, v = (torch.randn(shape, device="cuda", dtype=BF16).requires_grad_() for _ in range(3))
    bias = torch.randn(3, 4, length, length, device="cuda").requires_grad_()
    lens = torch.tensor([length, 1, length // 2, length - 1, 0, length], device="cuda")
    d_out = torch.randn(shape, device="cuda", dtype=BF16)

    def step() -> list[Tensor]:
        score = flexmasks.scores.pair_bias(bias=bias, group=2)
        out = flexmasks.attention(q, k, v, mask="padding", kv_lens=lens, score=score, backend="short")
        return [out, *torch.autograd.grad(out, (q, k, v, bias), d_out)]

    others = [exact(x) for x in (q, k, v, bias)]
    scores = others[0] @ others[1].mT / math.sqrt(size) + others[3].repeat_interleave(2, 0)
    visible = torch.arange(length) < lens.cpu()[:, None, None, None]
    out = torch.where(visible, scores.masked_fill(~visible, -1e30).softmax(-1), 0) @ others[2]
    want = [out, *torch.autograd.grad(out, others, d_out.double().cpu())]
    got = step()
    for a, b in zip(got, want, strict=True):
        assert error(a, b, unit=float(b.detach().abs().max())) < 2 * TOLERANCE[BF16]
    assert all(map(torch.equal, got, step()))
    with torch.autocast("cuda", torch.bfloat16):
        assert all(map(torch.equal, got, step()))


@pytest.mark.slow
@on_devices
def test_steps_with_a_bias_of_pairs(device: str) -> None:
    """A bias that a layer makes at each step, a part of a model's parameters, or one without a gradient."""
    leaves = _learning("of pairs", device, FP16)
    visible = torch.ones(4, 1, 96, 70, dtype=torch.bool)
    want = _formula(leaves, "of pairs", visible)
    for _ in range(3):
        made = leaves[3] * 1  # no leaf
        score = flexmasks.scores.pair_bias(bias=made, group=2)
        out = flexmasks.attention(*leaves[:3], backend="short", score=score)
        assert error(out, want[0]) < 2 * TOLERANCE[FP16]
        parameter = torch.nn.Parameter(leaves[3].detach())
        score = flexmasks.scores.pair_bias(bias=parameter, group=2)
        out, lse = flexmasks.attention(*leaves[:3], backend="short", score=score, return_lse=True)
        (out.float().sum() + lse.sum()).backward()
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        with torch.no_grad():
            assert error(flexmasks.attention(*leaves[:3], backend="short", score=score), want[0]) < 2 * TOLERANCE[FP16]
    assert flexmasks.cache_info()["kinds"].parts["calls"].entries == 3  # no leaf, with the lse, and without gradients


@on_devices
def test_other_tensors_learn_at_the_next_call(device: str) -> None:
    """Calls that differ only in which of their tensors learn: none, one or the other of one shape, or both."""
    q, k, v = (torch.randn(1, 2, n, 16, device=device, dtype=FP16) for n in (32, 40, 40))
    fixed = [torch.randn(2, 40, device=device, dtype=FP16) for _ in range(2)]
    for learning in ((), (0,), (1,), (0, 1), (), (1,), (0,)):
        made = [torch.randn_like(x).requires_grad_() if n in learning else x for n, x in enumerate(fixed)]
        score = lambda s, b, h, i, j, a=made[0], c=made[1]: s + a[h, i] + c[h, j]  # noqa: E731
        others = [exact(x) for x in made]
        added = others[0][:, :32, None] + others[1][:, None]
        want, want_lse = attend(*map(exact, (q, k, v)), None, lambda s, added=added: s + added)
        out, lse = flexmasks.attention(q, k, v, score=score, q_offset=0, backend="short", return_lse=True)
        check_lse(lse, want_lse, TOLERANCE[FP16])
        assert error(out, want) < 2 * TOLERANCE[FP16]
        assert out.requires_grad == bool(learning)
        if learning:
            got = torch.autograd.grad(out.sum() + (lse * lse).sum(), [made[n] for n in learning])
            learned = torch.autograd.grad(want.sum() + (want_lse * want_lse).sum(), [others[n] for n in learning])
            for x, y in zip(got, learned, strict=True):
                assert error(x, y, unit=float(y.abs().max())) < 4 * TOLERANCE[FP16]


@pytest.mark.slow
@on_devices
def test_new_lengths_and_biases_at_every_step(device: str) -> None:
    q, k, v, _ = _learning("of pairs", device, FP16)
    for step in range(3 if INTERPRETED else 4):
        bias = torch.randn(2, _H, 96, 70, device=device, dtype=FP16).requires_grad_()
        lens = torch.tensor([70, 33 + step, 0, 64], device=device)
        got = _step([q, k, v, bias], "of pairs", mask="padding", kv_lens=lens, backend="short")
        want = _formula([q, k, v, bias], "of pairs", torch.arange(70) < lens.cpu()[:, None, None, None])
        for a, b in zip(got, want, strict=True):
            assert error(a, b, unit=float(b.detach().abs().max())) < 2 * TOLERANCE[FP16]
    kinds = flexmasks.cache_info()["kinds"].parts["calls"]
    assert kinds.entries == 1
    assert kinds.hits >= 1


# --- the choice, and sizes ---


def test_spans_hold_all_visible_pairs() -> None:
    def try_one(batch: int, heads: int, q_len: int, kv_len: int, share: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        visible = torch.rand(batch, heads, q_len, kv_len, generator=generator) < share
        for spans, rows in zip(spans_of(visible, q_len), (visible, visible.transpose(2, 3)), strict=True):
            assert spans.shape == (batch, heads, -(-rows.shape[2] // TILE), 2)
            assert spans.dtype == torch.int32
            for b, h, n in torch.cartesian_prod(*map(torch.arange, spans.shape[:3])).view(-1, 3).tolist():
                places = rows[b, h, n * TILE : (n + 1) * TILE].any(0).nonzero().flatten().tolist()
                first, end = spans[b, h, n].tolist()
                assert not places or (first, end) == (places[0] // TILE, places[-1] // TILE + 1)
                assert places or end == 0

    sizes = st.integers(1, 200)
    shares = st.sampled_from([0.0, 1e-4, 1e-3, 0.01, 1.0])
    try_examples(40, try_one, st.integers(1, 2), st.integers(1, 2), sizes, sizes, shares, st.integers(0, 2**31))


@pytest.mark.gpu
def test_auto_takes_it_for_small_calls() -> None:
    def backend(length: int, *, heads: int = 4, dtype: torch.dtype = BF16, size: int = 64, **call: Any) -> str:
        q = torch.randn(1, heads, length, size, device="cuda", dtype=dtype)
        return flexmasks.explain(q, q, q, **({"mask": "sliding_window", "window": 9} | call)).backend

    def causal() -> str:
        q = torch.randn(1, 4, 256, 64, device="cuda", dtype=BF16)
        return flexmasks.explain(q, q, q, mask="causal").backend

    assert backend(256) == backend(1024, score="alibi") == backend(300, return_lse=True) == "short"
    assert causal() == "sdpa"
    others = "flex", "flex_flash", "fa4"
    assert backend(4096, heads=64) in others
    assert backend(256, score="softcap", cap=3.0) in others
    assert backend(256, dtype=torch.float32) == "flex"
    assert backend(256, size=256) in others


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("added", "size"), one_in(2, list(itertools.product(["nothing", "bias", "line"], [64, 128]))))
def test_tiles_fit_a_hopper_gpu(size: int, added: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory fits a processor, matrix products take tensor cores, and rows come by copies of 16 bytes."""
    texts = [made.asm["ptx"] for made in _compiled(size, added, 90, monkeypatch)]
    assert all("wgmma.mma_async" in text and "cp.async" in text for text in texts)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("size", one_in(2, [64, 128]))
def test_tiles_fit_a_small_gpu(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 100 KB of shared memory, on compute capability 8.6, 8.9 and 12.x."""
    _compiled(size, "bias", 86, monkeypatch)


def _compiled(size: int, added: str, arch: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the kernels of both passes for a compute capability; their shared memory fits a program."""
    found = []

    def compiled(kernel: Any, _programs: int, warps: int, *given: tuple[Any, ...]) -> Callable[..., None]:
        made = compiled_for_hopper(kernel, warps, tuple(a for part in given for a in part), arch)
        assert made.metadata.shared <= {90: 227, 86: 99}[arch] * 2**10
        found.append(made)
        return lambda *_: None

    on_gpu_of(monkeypatch, (arch // 10, arch % 10))
    monkeypatch.setattr(launch, "compiled", compiled)
    monkeypatch.setattr(launch, "_kernels", launch.Launches("of a test"))
    q, k, v, d_out = torch.empty(4, 1, 2, 256, size, dtype=BF16)
    visible = torch.ones(1, 1, 256, 256, dtype=torch.bool)
    weight = None if added == "nothing" else torch.ones(1, 2, 1, 1)
    bias = torch.zeros(1, 1, 256, 256) if added == "bias" else None
    line = Line(1.0, 0.0, 0, False) if added == "line" else None
    mask = WholeMask(visible, *spans_of(visible, 256), weight, bias, line, 0.1)
    kernels = launch.kernels_of(q, k, v, mask)
    out, lse = kernels.forward(q, k, v, mask)
    kernels.backward(d_out, None, q, k, v, out, lse, mask, learns=bias is not None)
    assert len(found) == 3 + (bias is not None)
    return found
