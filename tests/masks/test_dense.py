"""Backend "short": short sequences with gradients on a CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import THREE_OF_EACH, TOLERANCE, arguments, error, exact, label, one_in, qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import MASK_CASES, SCORE_CASES, SCORES, Case, attend
from oracles import dense as dense_of
from torch import Tensor

import flexmasks
from flexmasks.backends import waiting

pytestmark = pytest.mark.usefixtures("one_thread")


def both(leaves: list[Tensor], upstream: Tensor, **call: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return output and gradients of "short" and of the reference."""
    results = []
    for backend in ("short", "reference"):
        own = [x.detach().clone().requires_grad_() for x in leaves]
        out = flexmasks.attention(*own, backend=backend, **{"q_offset": 0, **call})
        results.append([out, *torch.autograd.grad(out, own, upstream)])
    return results[0], results[1]


@pytest.mark.parametrize("case", one_in(3, THREE_OF_EACH), ids=label)
def test_every_mask(case: Case) -> None:
    is_first = case == next(c for c in MASK_CASES if c.name == case.name)
    for dtype in TOLERANCE if is_first else [torch.float32]:
        leaves = qkv(case, dtype, grouped=case.kv_len % 2 == 0)
        others = [exact(x) for x in leaves]
        out = flexmasks.attention(*leaves, mask=case.name, backend="short", **arguments(case))
        want, _ = attend(*others, dense_of(case))
        weight = torch.randn_like(out)
        got = [out, *torch.autograd.grad(out, leaves, weight)]
        wanted = [want, *torch.autograd.grad(want, others, weight.double())]
        assert max(map(error, got, wanted)) < 2 * TOLERANCE[dtype]
        assert all(x.dtype == dtype for x in got)


@pytest.mark.parametrize("case", SCORE_CASES, ids=label)
def test_scores_that_add(case: Case) -> None:
    leaves = qkv(case, torch.float32)
    call = {"mask": "causal", "score": case.name, **arguments(case)}
    reason = flexmasks.explain(*leaves, **call).others.get("short")
    if reason is not None:
        assert "score changes that add" in reason
        return
    others = [exact(x) for x in leaves]
    out = flexmasks.attention(*leaves, backend="short", **call)
    seen = dense_of(Case("causal", {}, case.batch, case.heads, case.q_len, case.kv_len, case.q_offset))
    want, _ = attend(*others, seen, lambda scores: SCORES[case.name](scores, case, **case.params))
    weight = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, leaves, weight)]
    wanted = [want, *torch.autograd.grad(want, others, weight.double())]
    assert max(map(error, got, wanted)) < 2 * TOLERANCE[torch.float32]


@settings(max_examples=40)
@given(
    st.integers(1, 3), st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 6)]), st.integers(1, 70), st.integers(1, 70),
    st.booleans(), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_random_masks(
    batch: int, heads: tuple[int, int], q_len: int, kv_len: int, by_batch: bool, by_head: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    seen = torch.rand(batch if by_batch else 1, heads[0] if by_head else 1, q_len, kv_len, generator=generator) < 0.4
    sizes = ((heads[0], q_len), (heads[1], kv_len), (heads[1], kv_len))
    q, k, v = (torch.randn(batch, h, n, 8, generator=generator) for h, n in sizes)
    upstream = torch.randn(q.shape, generator=generator)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return seen[b % len(seen), h % seen.shape[1], q, kv]

    got, want = both([q, k, v], upstream, mask=mask)
    unit = 0.2  # of the numbers whose sum a gradient of 0 is, where queries see one key each
    assert max(error(x, y, unit) for x, y in zip(got, want, strict=True)) < 2 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v", "q", "upstream"])
def test_poison(where: str, poison: float) -> None:
    """What is hidden reaches nothing; what is seen reaches what it reaches in the reference."""
    for position, is_hidden in ((7, True), (20, False)):
        tensors = dict(zip(("q", "k", "v", "upstream"), torch.randn(4, 1, 2, 40, 8), strict=True))
        clean, _ = both([tensors[n] for n in "qkv"], tensors["upstream"], mask=_hides_the_seventh)
        tensors[where][0, 1, position, 3] = poison
        got, want = both([tensors[n] for n in "qkv"], tensors["upstream"], mask=_hides_the_seventh)
        for a, b, c in zip(got, want, clean, strict=True):
            assert torch.equal(a.isfinite(), b.isfinite())
            assert torch.allclose(a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0), atol=1e-5)
            if is_hidden:
                assert torch.allclose(a, c, atol=1e-5)


def _hides_the_seventh(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (kv != 7) & (q != 7)


def test_derivatives_of_gradients_and_batches_of_them() -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    results = []
    for backend in ("short", "reference"):
        out = flexmasks.attention(q, k, v, mask="sliding_window", window=3, backend=backend)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), (q, k, v), retain_graph=True)
        units = torch.eye(out.numel())[:3].view(3, *out.shape)
        batches = torch.autograd.grad(out, (q, k), units, is_grads_batched=True)
        results.append([*second, *batches])
    assert max(map(error, *results)) < 1e-4


def test_strides_and_gradients_of_some() -> None:
    q, k, v = (torch.randn(2, 40, 3, 8).transpose(1, 2) for _ in range(3))
    upstream = torch.randn(3, 40, 8, 2).permute(3, 0, 1, 2)
    got, want = both([q, k, v], upstream, mask="sliding_window", window=5)
    assert max(map(error, got, want)) < 1e-5
    k.requires_grad_()
    out = flexmasks.attention(q, k, v, mask="sliding_window", window=5, backend="short")
    out.backward(torch.ones(()).expand_as(out))
    with torch.no_grad():
        q.add_(1)
    assert k.grad is not None


def test_auto_takes_it_where_it_is_fastest() -> None:
    def backend(length: int, **call: Any) -> str:
        q = torch.randn(1, 2, length, 8, requires_grad=True)
        return flexmasks.explain(q, q, q, **{"mask": "sliding_window", "window": 9, **call}).backend

    assert backend(256) == backend(waiting.MAX_LENGTH) == "short"
    assert backend(waiting.MAX_LENGTH + 1) == backend(64, return_lse=True) == "reference"
    assert backend(64, score="softcap", cap=3.0) == "reference"
    slopes = torch.rand(2, requires_grad=True)
    assert backend(64, score="alibi", slopes=slopes) == "reference"  # it learns


def test_new_tensors_at_every_step() -> None:
    q, k, v, upstream = torch.randn(4, 2, 2, 64, 8)
    for step in range(6):
        ids = torch.arange(64) // (5 + step)
        mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
        got, want = both([q, k, v], upstream, mask=mask)
        assert max(map(error, got, want)) < 1e-5
        ids += torch.arange(64) // 50  # changed in place
        got, want = both([q, k, v], upstream, mask=mask)
        assert max(map(error, got, want)) < 1e-5


def _cases_at_the_end(steps: list[tuple[int, int]]) -> list[Case]:
    """Return masks and scores with tables as long as the positions, for queries that start at these offsets."""
    cases = []
    for offset in steps:
        some = torch.arange(20) % 7 < 3
        sizes: Any = {"q_len": 5, "kv_len": 20, "q_offset": offset}
        cases += [
            Case("document", {"document_ids": torch.arange(20) // 9 % 2}, **sizes),
            Case("global_tokens", {"tokens": torch.stack([some, ~some])}, **sizes),
            Case("vertical_slash", {"vertical": torch.tensor([1, 5]), "slash": torch.tensor([0, 11, 19])}, **sizes),
            Case("vertical_slash", {"vertical": (1, 5), "slash": (0, 11, 19)}, **sizes),
            Case("sandwich", {"dims": 8}, **sizes),
        ]
    return cases


@pytest.mark.parametrize(
    "steps", [[(15, 7)], [(3, 5), (15, 14), (4, 4)], [(n, 14) for n in range(16)] + [(7, 3), (15, 15)]],
    ids=["1", "3", "18"],
)  # fmt: skip
def test_queries_that_end_at_the_last_key(steps: list[tuple[int, int]]) -> None:
    """A tensor may say that queries end with the keys, at the first step, later, or after the plan is recorded."""
    flexmasks.clear_caches()
    cases = _cases_at_the_end(steps)
    for case in cases if len(steps) < 16 else cases[4::5]:
        leaves = qkv(case, torch.float32, size=8)
        others = [exact(x) for x in leaves]
        kind = "score" if case.name in SCORES else "mask"
        out = flexmasks.attention(*leaves, **{kind: case.name}, backend="short", **arguments(case))
        seen = dense_of(case if kind == "mask" else Case("full", {}, q_len=5, kv_len=20))
        change = (lambda scores: SCORES[case.name](scores, case, **case.params)) if kind == "score" else None  # noqa: B023
        want, _ = attend(*others, seen, change)
        weight = torch.randn_like(out)
        got = [out, *torch.autograd.grad(out, leaves, weight)]
        wanted = [want, *torch.autograd.grad(want, others, weight.double())]
        assert max(map(error, got, wanted)) < 2 * TOLERANCE[torch.float32]
