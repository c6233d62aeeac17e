"""Every registered score change against the naive formula, and tensors that learn."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    DEVICES,
    TOLERANCE,
    arguments,
    check_oracle,
    error,
    exact,
    in_campaigns,
    label,
    not_for_flash,
    noted_bounds_hold,
    one_in,
    qkv,
    skip_unless_flash_takes,
    spread,
)
from oracles import SCORE_CASES, SCORES, Case, attend, dense
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import flex_attention

import flexmasks
from flexmasks import compat, flex
from flexmasks.backends import tiles
from flexmasks.plans import plan, score_plan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.sizes import sized
from flexmasks.request import Request
from flexmasks.road import plan_call
from flexmasks.spec import cap_of, definitions
from flexmasks.spec.arguments import from_arguments
from flexmasks.spec.parameters import Size


def _causal(case: Case) -> Tensor:
    """Return the causal mask of a case's sizes."""
    return dense(Case("causal", {}, case.batch, case.heads, case.q_len, case.kv_len, case.q_offset))


def _changed(case: Case, params: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return the oracle of a case as a function of the scores."""
    return lambda scores: SCORES[case.name](scores, case, **params)


# `packed` and `paged` hold other scores: they are tested below and in test_paging, sequence by sequence.
@pytest.mark.parametrize("name", sorted({s.name for s in flexmasks.list_scores()} - {"packed", "paged"} | set(SCORES)))
def test_a_score_has_an_oracle_and_three_cases(name: str) -> None:
    check_oracle(name, "score", SCORES, SCORE_CASES)


def test_the_example_of_relative_bias_fits_any_length() -> None:
    q = torch.zeros(1, 1, 1, 8)
    for length in range(1, 12):
        table = definitions.definition("score", "relative_bias").example(length)["table"]  # type: ignore[misc]
        assert len(table[0]) == 2 * (length // 4) + 1
        flexmasks.attention(q, q, q, score="relative_bias", table=table, backend="reference")


@pytest.mark.parametrize("case", SCORE_CASES, ids=label)
def test_reference_in_float64_with_gradients(case: Case) -> None:
    leaves = [exact(x) for x in qkv(case, torch.float32, size=8, v_size=5)]
    others = [exact(x) for x in leaves]
    params = arguments(case)
    learned = {n: exact(t) for n, t in params.items() if isinstance(t, Tensor) and t.is_floating_point()}
    learned_too = {n: exact(t) for n, t in learned.items()}
    out = flexmasks.attention(*leaves, mask="causal", score=case.name, **(params | learned))
    want, _ = attend(*others, _causal(case), _changed(case, case.params | learned_too))
    assert torch.allclose(out, want, atol=1e-12, rtol=1e-12)
    weight = torch.randn_like(out)
    out.backward(weight)
    want.backward(weight)
    for x, y in zip([*leaves, *learned.values()], [*others, *learned_too.values()], strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert torch.allclose(x.grad, y.grad, atol=1e-9, rtol=1e-9)


# Errors allowed of gradients that sum over pairs. In float32 the rounding of single pairs is multiplied by the size of
# a bias, such as sandwich's products near 64, while the sum has the size of their differences.
_SUMMED_TOLERANCE = {dtype: 2 * tolerance for dtype, tolerance in TOLERANCE.items()} | {torch.float32: 2e-4}


def _compiled(case: Case, dtype: torch.dtype, device: str, backend: str) -> None:
    leaves = qkv(case, dtype, device, v_size=32 if backend == "flex_flash" or case.q_len % 2 else 16)
    others = [exact(x) for x in leaves]
    params = arguments(case, device)
    params |= {n: t.float() for n, t in params.items() if isinstance(t, Tensor) and t.is_floating_point()}
    cuda = device == "cuda"
    learns = cuda and backend == "flex"  # the other kernels have no gradients of the tensors that a score captured
    learned = {n: t for n, t in params.items() if learns and isinstance(t, Tensor) and t.is_floating_point()}
    for t in learned.values():
        t.requires_grad_()
    learned_too = {n: exact(t) for n, t in learned.items()}
    with torch.set_grad_enabled(cuda):
        out = flexmasks.attention(*leaves, mask="causal", score=case.name, backend=backend, **params)
    want, lse = attend(*others, _causal(case), _changed(case, case.params | learned_too))
    assert error(out, want) < TOLERANCE[dtype]
    if cuda:
        weight = torch.randn_like(out)
        out.backward(weight)
        want.backward(weight.double().cpu(), retain_graph=True)
        if dtype != torch.float32 and learned:
            _add_rounding(want, lse, out, weight, list(learned_too.values()))
        for x, y in zip([*leaves, *learned.values()], [*others, *learned_too.values()], strict=True):
            if y.ndim == 4:
                assert error(x.grad, y.grad) < 2 * TOLERANCE[dtype]
            else:  # gradients of slopes and tables sum many pairs, which may cancel
                assert error(x.grad, y.grad, unit=1.0) < _SUMMED_TOLERANCE[dtype]


def _add_rounding(want: Tensor, lse: Tensor, out: Tensor, weight: Tensor, learned: list[Tensor]) -> None:
    """Add to the exact gradients the error of flash kernels whose `out` is in half precision.

    The kernels compute the gradient of scores as P * (dP - sum(out * dout)). An error of the sum reaches all scores of
    its row by their weights P, as a gradient of lse would. In the gradient of a bias the error is multiplied by the
    size of the bias, not by its differences: with sandwich's products near 64, rounding to bfloat16 moves the gradient
    by 60%.
    """
    rounding = ((want - out.double().cpu()) * weight.double().cpu()).sum(-1).detach()
    torch.autograd.backward(lse, rounding, inputs=learned)


_IN_TURN = [
    ["softcap", "temperature", "checkerboard", "relative_bias", "distance_bias"],
    ["alibi", "t5_bias", "dense_bias", "sandwich", "kerple"],
    ["pair_bias", "relative_bias_2d", "decomposed_bias", "forgetting", "ssmax", "long_temperature"],
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quick_kernels", "names"),
    [*(("without C++", names) for names in _IN_TURN), *one_in(2, [("in C++", names) for names in _IN_TURN])],
    indirect=["quick_kernels"],
)
@pytest.mark.usefixtures("quick_kernels")
def test_scores_that_share_a_kernel(names: list[str]) -> None:
    """Each changes what the one before it made."""
    first = {case.name: case for case in spread(SCORE_CASES, 1)}
    assert first.keys() == {name for group in _IN_TURN for name in group}
    cases = [replace(first[name], q_len=21, kv_len=30, q_offset=first["dense_bias"].q_offset) for name in names]
    scores = []
    for case in cases:
        params = {
            n: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in arguments(case).items()
        }
        offset = params.pop("q_offset")
        scores.append(flexmasks.get_score(case.name, **params))
    leaves = [x.detach() for x in qkv(cases[0], torch.float32, v_size=16)]
    out = flexmasks.attention(*leaves, mask="causal", score=scores, q_offset=offset, backend="flex")

    def changed(x: Tensor) -> Tensor:
        for case in cases:
            x = SCORES[case.name](x, case, **case.params)
        return x

    want, _ = attend(*(exact(x) for x in leaves), _causal(cases[0]), changed)
    assert error(out, want) < TOLERANCE[torch.float32]


@pytest.mark.campaign
@pytest.mark.parametrize("case", spread(SCORE_CASES, 1), ids=label)
def test_compiled_float32_cpu(case: Case) -> None:
    _compiled(case, torch.float32, "cpu", "flex")


_HALF = [(case, (torch.float16, torch.bfloat16)[n % 2]) for n, case in enumerate(spread(SCORE_CASES, 3)[1::3])]
# On a CPU a kernel takes seconds to compile: the half precisions take turns with one score each, campaigns try all.
_HALF_ON_CPU = [*one_in(2, _HALF[:2]), *(pytest.param(*pair, marks=pytest.mark.campaign) for pair in _HALF[2:])]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), _HALF_ON_CPU, ids=label)
def test_compiled_half_cpu(case: Case, dtype: torch.dtype) -> None:
    _compiled(case, dtype, "cpu", "flex")


# Each score has three cases, and each of them one dtype; campaigns try it in the other dtypes.
_ON_GPU = [
    pytest.param(case, dtype, marks=[] if n % 3 == turn else pytest.mark.campaign)
    for turn, dtype in enumerate(TOLERANCE)
    for n, case in enumerate(spread(SCORE_CASES, 3))
]


# Scores whose results depend on fewer indices than there are scores: w is float [S], and heads float [H].
_NARROW: dict[str, Callable[..., Callable[..., Tensor]]] = {
    "keys": lambda w, heads: lambda s, b, h, q, kv: w[kv],
    "queries": lambda w, heads: lambda s, b, h, q, kv: w[q],
    "heads": lambda w, heads: lambda s, b, h, q, kv: heads[h],
    "positions": lambda w, heads: lambda s, b, h, q, kv: kv * 0.05,
    "zero": lambda w, heads: lambda s, b, h, q, kv: s * 0,
    "constant": lambda w, heads: lambda s, b, h, q, kv: torch.full((), 1.5),
    "hidden keys": lambda w, heads: lambda s, b, h, q, kv: torch.where(w[kv] > 0, 0.0, -math.inf),
    "NaN": lambda w, heads: lambda s, b, h, q, kv: torch.where(s.isnan(), 0.0, w[kv]),
}
_NARROW_MASKS: dict[str, Callable[..., Tensor]] = {
    "all": lambda b, h, q, kv: torch.ones_like(q, dtype=torch.bool),
    "first keys": lambda b, h, q, kv: kv < 5,
    "last queries": lambda b, h, q, kv: q > 3,
    "one sequence": lambda b, h, q, kv: b == 0,
    "causal": lambda b, h, q, kv: q >= kv,
}


def _narrow_calls() -> list[Any]:
    """Return ways to call, scores and dtypes; each is compiled to C++, which takes seconds."""
    ways = ["attention", "drop-in", "plan", "varlen", "inside torch.compile", "inside torch.compile, readable"]
    cases = [
        (way, name, list(_NARROW_MASKS)[n % 5], list(TOLERANCE)[n % 3])
        for n, (name, way) in enumerate(itertools.product(_NARROW, ways))
    ]
    return [("attention", "keys", "first keys", torch.float32), *one_in(24, cases)]


def _check_narrow(way: str, name: str, mask_name: str, dtype: torch.dtype, device: str, backend: str = "auto") -> None:
    length, heads = 100, 2
    q, k, v = torch.randn(3, 2, heads, length, 32).to(device, dtype)
    w, of_heads = torch.randn(length, device=device), torch.randn(heads, device=device)
    score, mask = _NARROW[name](w, of_heads), _NARROW_MASKS[mask_name]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flexmasks.attention(q, k, v, mask=mask, score=score, backend=backend)

    if way == "plan":
        plan = flexmasks.plan(mask, length, batch=2, heads=heads, score=score, device=device)
        out = flexmasks.attention(q, k, v, mask=plan)
    elif way == "varlen":
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        out = flexmasks.varlen_attention(*rows, [0, length, 2 * length], mask=mask, score=score)
        out = out.unflatten(0, (2, length)).transpose(1, 2)
    elif way == "drop-in":
        block_mask = flex.create_block_mask(mask, 2, heads, length, length, device)
        out = flex.flex_attention(q, k, v, score, block_mask)
    elif way == "attention":
        out = call(q, k, v)
    else:
        if way.endswith("readable"):
            score = flexmasks.get_score(score)
        torch._dynamo.reset()
        out = torch.compile(call, fullgraph=True)(q, k, v)
    b, h, i, j = torch.meshgrid(*map(torch.arange, (2, heads, length, length)), indexing="ij")
    of_cpu = _NARROW[name](w.cpu(), of_heads.cpu())
    scores = of_cpu(q.double().cpu() @ k.double().cpu().mT / math.sqrt(32), b, h, i, j).double().expand(b.shape)
    scores = scores.masked_fill(~mask(b, h, i, j), -math.inf)
    want = scores.softmax(-1).nan_to_num() @ v.double().cpu()
    assert error(out, want) < TOLERANCE[dtype]


@pytest.mark.parametrize(("way", "name", "mask", "dtype"), _narrow_calls())
def test_scores_that_depend_on_few_indices(way: str, name: str, mask: str, dtype: torch.dtype) -> None:
    _check_narrow(way, name, mask, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", _NARROW)
@pytest.mark.parametrize("mask", ["all", "causal"])
@pytest.mark.parametrize("way", ["attention", "inside torch.compile"])
def test_scores_that_depend_on_few_indices_gpu(way: str, name: str, mask: str) -> None:
    _check_narrow(way, name, mask, torch.bfloat16, "cuda")


def test_gradients_of_scores_that_are_nan_where_the_mask_hides() -> None:
    """The quotient is infinite, and its derivative too, at the key behind the query."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 200, 16))
    at = torch.arange(200)
    out = flexmasks.attention(
        q, k, v, mask="causal", score=lambda s, b, h, q, kv: s / (1 + q - kv), backend="reference"
    )
    distance = at[:, None] - at
    scores = (q @ k.mT / 4) / (1 + distance.clamp(min=0))
    want = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), upstream)
    for x, y in zip(got, torch.autograd.grad(want, (q, k, v), upstream), strict=True):
        assert error(x, y) < TOLERANCE[torch.float32]


# Scores of t, float [H], whose values or derivatives are not finite at some pairs that _SHOWN hides.
_ENDLESS: dict[str, Callable[[Tensor], Callable[..., Tensor]]] = {
    "log1p": lambda t: lambda s, b, h, q, kv: s - t[h] * torch.log1p((q - kv).float()),
    "sqrt": lambda t: lambda s, b, h, q, kv: s - (q - kv).float().sqrt() * t[h],
    "pow": lambda t: lambda s, b, h, q, kv: s - (q - kv).float() ** t[h],
    "division": lambda t: lambda s, b, h, q, kv: s + t[h] / (q - kv + 1),
    "softplus": lambda t: lambda s, b, h, q, kv: s + torch.nn.functional.softplus(t[h] / (q - kv + 1).float().sqrt()),
    "sigmoid": lambda t: lambda s, b, h, q, kv: s * torch.sigmoid(t[h] * torch.log((q - kv + 1).float())),
    "lookup": lambda t: lambda s, b, h, q, kv: s + torch.index_select(t, 0, h[None])[0] * torch.log1p((q - kv).float()),
    "one number": lambda t: lambda s, b, h, q, kv: s - t.mean() * torch.log1p((q - kv).float()),
    "many numbers": lambda t: lambda s, b, h, q, kv: s - (t * torch.log1p((q - kv).float())).sum(),
    "of scores": lambda t: lambda s, b, h, q, kv: s / t[h],  # which are NaN at hidden keys
}


def _shown(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (kv < 40) & (q > 2)


def _check_endless(way: str, name: str, dtype: torch.dtype, device: str, backend: str) -> None:
    """Check gradients against the formula over visible pairs, of whose scores alone a row is made.

    Keys that nobody sees hold NaN.
    """
    batch, heads, length, size = 2, 2, 48, 16
    q, k, v = torch.randn(3, batch, heads, length, size).to(device, dtype)
    t = torch.rand(heads).to(device, dtype) + 0.5
    clean = [x.cpu().double().clone().requires_grad_() for x in (q, k, v, t)]
    k = k.clone()
    if backend == "reference":
        k[:, :, 40:] = math.nan
    upstream = torch.randn_like(q)

    def call(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return flexmasks.attention(q, k, v, mask=_shown, score=_ENDLESS[name](t), backend=backend)

    given = [x.clone().requires_grad_() for x in (q, k, v, t)]
    if way == "torch.func":
        got = torch.func.grad(lambda *x: (call(*x) * upstream).sum(), (0, 1, 2, 3))(q, k, v, t)
    elif way == "vmap":
        got = [x[0] for x in torch.func.vmap(torch.func.vjp(call, q, k, v, t)[1])(upstream[None])]
    elif way == "inside torch.compile":
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
        got = torch.autograd.grad(compiled(*given), given, upstream)
    else:
        got = torch.autograd.grad(call(*given), given, upstream, create_graph=way == "create_graph")

    b, h, i, j = torch.meshgrid(*map(torch.arange, (batch, heads, length, length)), indexing="ij")
    visible = _shown(b, h, i, j)
    pairs = [x[visible] for x in (b, h, i, j)]
    of_pairs = torch.vmap(_ENDLESS[name](clean[3]))((clean[0] @ clean[1].mT / size**0.5)[visible], *pairs)
    scores = torch.full(visible.shape, -math.inf, dtype=torch.float64).masked_scatter(visible, of_pairs.double())
    weights = scores[:, :, 3:].softmax(-1)
    want = torch.autograd.grad(weights @ clean[2], clean, upstream[:, :, 3:].double().cpu())
    for x, y in zip(got, want, strict=True):
        assert error(x.detach(), y, unit=1.0) < (1e-6 if dtype == torch.float64 else 20 * TOLERANCE[dtype])


_WAYS = ["eager", "create_graph", "torch.func", "vmap"]


@pytest.mark.parametrize(
    ("way", "name"),
    [*itertools.product(_WAYS, _ENDLESS), *one_in(10, [("inside torch.compile", name) for name in _ENDLESS])],
)
def test_hidden_pairs_teach_nothing(way: str, name: str) -> None:
    _check_endless(way, name, torch.float64, "cpu", "reference")


@pytest.mark.gpu
@pytest.mark.parametrize("name", _ENDLESS)
@pytest.mark.parametrize("way", ["eager", "inside torch.compile"])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("reference", torch.float32), ("auto", torch.bfloat16), ("flex", torch.float32), ("flex", torch.bfloat16)],
)
def test_hidden_pairs_teach_nothing_gpu(way: str, name: str, backend: str, dtype: torch.dtype) -> None:
    if way == "inside torch.compile" and name in ("one number", "many numbers", "lookup") and backend == "auto":
        pytest.skip("torch compiles no gradients of reductions and lookups in scores, and says so")
    if backend == "flex" and name == "one number":
        pytest.skip("torch's kernel compiles no reductions in scores, and says so")
    if backend == "flex":
        q = torch.randn(2, 2, 48, 16, device="cuda", dtype=dtype, requires_grad=True)
        t = torch.rand(2, device="cuda", requires_grad=True)
        reason = flexmasks.explain(q, q, q, mask=_shown, score=_ENDLESS[name](t)).others.get("flex", "")
        if not reason.startswith("it can run"):
            pytest.skip(f"flex refuses it: {reason}")
    _check_endless(way, name, dtype, "cuda", backend)


def test_kernels_of_gpus_sum_over_scores_that_have_gradients() -> None:
    """The backward pass that torch makes of a score: at a hidden pair, the gradient of the score is 0."""
    assert compat.flex_attention is flex_attention
    create = importlib.import_module("torch._higher_order_ops.flex_attention").create_fw_bw_graph
    score, *indices = torch.zeros(()).requires_grad_(), *torch.zeros(4, dtype=torch.int32)

    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, t: Tensor) -> Tensor:
        with TransformGetItemToIndex():
            return _ENDLESS["log1p"](t)(score, b, h, q, kv)

    _, backward = create(changed, (score, *indices), (torch.zeros(2).requires_grad_(),))
    for q, gradient, want in ((2, 0.0, 0.0), (7, 0.0, 0.0), (7, 3.0, -3.0 * math.log1p(4))):
        pair = [torch.tensor(n, dtype=torch.int32) for n in (0, 1, q, 3)]
        *_, learned = backward(torch.tensor(5.0), *pair, torch.tensor(gradient), torch.rand(2))
        assert torch.allclose(learned, torch.tensor([0.0, want]))
    _, backward = create(lambda score, b, h, q, kv, t: t * kv, (score, *indices), (torch.ones(()).requires_grad_(),))
    given, *_ = backward(torch.tensor(5.0), *indices, torch.tensor(3.0), torch.tensor(1.0))
    assert given == 0  # a score that does not depend on the given one: torch's kernels need a number


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), one_in(2, _ON_GPU), ids=label)
def test_compiled_gpu(case: Case, dtype: torch.dtype) -> None:
    _compiled(case, dtype, "cuda", "flex")


_FOR_FLASH = [case for case in SCORE_CASES if not isinstance(case.params.get("cap"), Tensor)]  # none as a tensor


@pytest.mark.parametrize("case", one_in(2, _FOR_FLASH), ids=label)
def test_is_written_for_flash(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexmasks.spec.indexing._DEVICES_OF_CONSTANT_INDICES", ())  # constants are made as on a GPU
    params = arguments(case)
    offset = params.pop("q_offset")
    size = Size(case.batch, case.heads, case.q_len, case.kv_len, torch.device("cpu"))
    plan = ScorePlan(flexmasks.get_score(case.name, **params), sized(size, offset), offset)
    assert not_for_flash(case, plan.mod(), scored=True) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), one_in(3, _HALF), ids=label)
def test_flash_gpu(case: Case, dtype: torch.dtype) -> None:
    skip_unless_flash_takes(qkv(case, dtype, "cuda"), mask="causal", score=case.name, **arguments(case, "cuda"))
    _compiled(case, dtype, "cuda", "flex_flash")


def test_several_compose_in_order() -> None:
    case = Case("full", {}, 2, 3, 20, 20)
    q, k, v = (exact(x) for x in qkv(case, torch.float32))
    slopes = torch.rand(3, dtype=torch.float64)
    alibi = Case("alibi", {}, 2, 3, 20, 20)
    plain = lambda score, b, h, q, kv: score + 0.1 * h  # noqa: E731
    out = flexmasks.attention(q, k, v, score=["alibi", plain, "softcap"], slopes=slopes, cap=2.0)
    heads = torch.arange(3, dtype=torch.float64).view(1, 3, 1, 1)

    def changed(scores: Tensor) -> Tensor:
        return SCORES["softcap"](SCORES["alibi"](scores, alibi, slopes=slopes) + 0.1 * heads, alibi, cap=2.0)

    assert torch.allclose(out, attend(q, k, v, None, changed)[0], atol=1e-12)
    other = flexmasks.attention(q, k, v, score=["softcap", plain, "alibi"], slopes=slopes, cap=2.0)
    assert not torch.allclose(out, other)


def _numbers_and_dtypes() -> list[Any]:
    """Return kernels, backends, queries, numbers of changes and dtypes; one kernel a day is compiled to C++."""
    dtypes = [torch.float32, torch.bfloat16]
    lengths = [40, 2]  # kernels for many queries and for few
    cases = [("without C++", *case) for case in itertools.product(["auto", "reference"], lengths, range(4), dtypes)]
    many, few = ([("in C++", "auto", *case) for case in itertools.product([n], range(4), dtypes)] for n in lengths)
    return [*cases, *one_in(8, many), *map(in_campaigns, few)]


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize(
    ("quick_kernels", "backend", "q_len", "number", "dtype"),
    _numbers_and_dtypes(),
    ids=label,
    indirect=["quick_kernels"],
)
def test_tensors_in_float64_change_scores_in_float32(backend: str, q_len: int, number: int, dtype: torch.dtype) -> None:
    q, k, v = torch.randn(1, 3, q_len, 8), *torch.randn(2, 1, 3, 40, 8)
    slopes = torch.rand(3, dtype=torch.float64)
    bias = torch.randn(3, q_len, 40, dtype=torch.float64)
    row, column, head = torch.arange(q_len)[:, None], torch.arange(40), torch.arange(3)[:, None, None]
    steep = slopes[:, None, None]
    changes: list[tuple[Any, Any]] = [
        (flexmasks.get_score("alibi", slopes=slopes), lambda scores: scores - steep * (row - column)),
        (flexmasks.get_score(lambda score, b, h, q, kv: score + bias[h, q, kv]), lambda scores: scores + bias),
        (flexmasks.get_score(lambda score, b, h, q, kv: score * slopes[h]), lambda scores: scores * steep),
        (
            flexmasks.get_score(lambda score, b, h, q, kv: score + (h + kv).double() / 7),
            lambda scores: scores + (head + column).double() / 7,
        ),
    ]
    score, change = changes[number]
    want = change(q.double() @ k.double().mT / 8**0.5).softmax(-1) @ v.double()
    out = flexmasks.attention(*(x.to(dtype) for x in (q, k, v)), score=score, q_offset=0, backend=backend)
    assert out.dtype == dtype
    assert (out - want).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("q_len", "dtype"), one_in(6, list(itertools.product([40, 2], [torch.float16, torch.bfloat16, torch.float64])))
)
def test_scores_of_another_dtype(q_len: int, dtype: torch.dtype, device: str) -> None:
    """A function may return them in less precision; they are scores all the same."""
    q, k, v = (x.to(device) for x in (torch.randn(1, 3, q_len, 16), *torch.randn(2, 1, 3, 40, 16)))
    scores = q.double() @ k.double().mT / 16**0.5
    want = ((scores.float() * 0.7).to(dtype).double().softmax(-1) @ v.double()).cpu()
    for backend in ("flex", "reference"):
        score = lambda score, b, h, q, kv: (score * 0.7).to(dtype)  # noqa: E731
        out = flexmasks.attention(q, k, v, score=score, q_offset=0, backend=backend)
        assert out.dtype == torch.float32
        assert error(out, want) < TOLERANCE[torch.float32 if dtype == torch.float64 else dtype], backend
    if device == "cpu" and (q_len, dtype) == (40, torch.float16):
        run = torch.compile(lambda q: flexmasks.attention(q, k, v, score=score, q_offset=0), fullgraph=True)
        assert error(run(q), want) < TOLERANCE[torch.float32 if dtype == torch.float64 else dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision_change_scores_in_float32(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 3, 300, 8)
    slopes = (torch.rand(3) / 32).to(dtype)
    out = flexmasks.attention(q, k, v, score="alibi", slopes=slopes, backend="reference")
    distance = torch.arange(300)[:, None] - torch.arange(300)
    want = (q.double() @ k.double().mT / 8**0.5 - slopes.double()[:, None, None] * distance).softmax(-1) @ v.double()
    assert error(out, want) < TOLERANCE[torch.float32]


def test_gradients_of_captured_tensors_in_half_precision_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile has a part of the gradient; in bfloat16 a sum of many stops growing."""
    monkeypatch.setattr(tiles, "_MAX_SCORES", 1)  # as many tiles as there may be
    q, k, v = (torch.randn(2, 4, n, 8) for n in (2400, 64, 64))
    factor = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    leaf = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = flexmasks.attention(q, k, v, score=lambda s, b, h, q, kv: s * factor, backend="reference")
    want = (q.double() @ k.double().mT / 8**0.5 * leaf).softmax(-1) @ v.double()
    upstream = want.detach() - v.mean(2, keepdim=True)  # all pairs add to the gradient
    (got,), (exactly,) = (torch.autograd.grad(x, y, upstream.to(x.dtype)) for x, y in ((out, factor), (want, leaf)))
    assert error(got, exactly) < 2 * 2**-8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs_grad", "backend"),  # on a CPU no kernel of flexmasks has gradients
    [(False, "aot_eager"), (True, "aot_eager"), *one_in(3, [(False, "inductor")])],
)
def test_tensors_in_float64_inside_compile(needs_grad: bool, backend: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=needs_grad)
    distances = torch.arange(40)[:, None] - torch.arange(40)

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return flexmasks.attention(q, k, v, score="alibi", slopes=slopes)

    out = torch.compile(run, fullgraph=True, backend=backend)(q, k, v, slopes)
    scores = q.double() @ k.double().mT / 8**0.5 - slopes[:, None, None] * distances
    want = scores.softmax(-1) @ v.double()
    assert (out - want).abs().max() <= TOLERANCE[torch.float32]
    if needs_grad:
        got, wanted = (torch.autograd.grad(x.square().sum(), slopes)[0] for x in (out, want))
        assert torch.allclose(got, wanted, rtol=1e-4)


def test_packed_scores_are_those_of_each_sequence() -> None:
    lengths, heads = (7, 0, 30, 12), 3
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = torch.randn(3, 1, heads, int(offsets[-1]), 8, dtype=torch.float64)
    per_sequence = torch.rand(len(lengths), dtype=torch.float64)

    def scaled(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * per_sequence[b] - 0.1 * (q - kv)

    score = flexmasks.get_score(scaled)
    out = flexmasks.attention(q, k, v, mask=flexmasks.packed("causal", offsets), score=flexmasks.packed(score, offsets))
    for i, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if start == stop:
            continue
        n = stop - start
        distance = torch.arange(n)[:, None] - torch.arange(n)
        own = [x[:, :, start:stop] for x in (q, k, v)]
        want, _ = attend(*own, distance >= 0, lambda s, d=distance, i=i: s * per_sequence[i] - 0.1 * d)
        assert torch.allclose(out[:, :, start:stop], want, atol=1e-12)


_RELATIVE: dict[str, dict[str, Any]] = {
    "alibi": {"slopes": torch.tensor([0.3, 0.1, 0.7])},
    "checkerboard": {},
    "relative_bias": {"table": torch.randn(3, 9)},
    "softcap": {"cap": 2.0},
    "t5_bias": {"table": torch.randn(8, 3), "max_distance": 6},
    "temperature": {"temperatures": torch.tensor([0.5, 2.0, 3.0])},
}


@pytest.mark.parametrize("starts", ["alike", "queries later", "other keys"])
@pytest.mark.parametrize("name", _RELATIVE)
def test_packed_scores_of_distances_are_those_of_each_sequence(name: str, starts: str) -> None:
    """Tables of sequences are made only where distances in them are not those of the call."""
    params = {n: x.double() if isinstance(x, Tensor) else x for n, x in _RELATIVE[name].items()}
    score = flexmasks.get_score(name, **params)
    lengths = (7, 0, 30, 12)
    key_lengths = (9, 4, 30, 20) if starts == "other keys" else lengths
    start = 3 if starts == "queries later" else 0
    offsets, kv_offsets = (torch.tensor([0, *n]).cumsum(0) for n in (lengths, key_lengths))
    q = torch.randn(1, 3, int(offsets[-1]) + 5, 8, dtype=torch.float64)  # 5 tokens of padding
    k, v = torch.randn(2, 1, 3, int(kv_offsets[-1]) + 5, 8, dtype=torch.float64)
    places = (offsets, kv_offsets if starts == "other keys" else None, start)
    packed = flexmasks.packed(score, *places)
    resolved = packed._resolve(Size(1, 3, q.shape[2], k.shape[2], q.device))
    assert (resolved["q_position"] is None) == (starts == "alike")
    out = flexmasks.attention(q, k, v, mask=flexmasks.packed("causal", *places), score=packed)
    for i, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
        own = (q[:, :, int(offsets[i]) :][:, :, :n], *(x[:, :, int(kv_offsets[i]) :][:, :, :m] for x in (k, v)))
        want = flexmasks.attention(*own, mask="causal", score=score, q_offset=start)
        assert torch.allclose(out[:, :, int(offsets[i]) :][:, :, :n], want, atol=1e-12)


def test_a_relative_change_of_a_user_is_packed_without_tables() -> None:
    @flexmasks.register_score(name="nearer_is_more", example=lambda length: {}, relative=True)
    def nearer_is_more(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Scores minus a tenth of the distance."""
        return score - 0.1 * (q - kv)

    try:
        size = Size(1, 2, 20, 20, torch.device("cpu"))
        near = flexmasks.get_score("nearer_is_more")
        both = from_arguments(None, ["softcap", near], {"cap": 3.0})[1]
        by_place = from_arguments(None, ["softcap", lambda s, b, h, q, kv: s + q], {"cap": 3.0})[1]
        for score, is_relative in ((near, True), (both, True), (by_place, False)):
            tables = flexmasks.packed(score, [0, 5, 20])._resolve(size)
            assert (tables["kv_position"] is None) == is_relative
    finally:
        definitions._NAMES["score"].pop("nearer_is_more")


@pytest.mark.parametrize("inner", ["alibi", "softcap"])
def test_a_planned_call_reads_no_offsets_of_a_packed_score(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would have to finish its work first, and a CUDA graph could not be captured."""
    offsets = torch.tensor([0, 5, 20])
    score = flexmasks.packed(flexmasks.get_score(inner, **({"cap": 30.0} if inner == "softcap" else {})), offsets)
    q = torch.randn(1, 2, 20, 8)
    mask = flexmasks.get_mask("causal")
    reads: list[Tensor] = []
    to_list = Tensor.tolist
    for module in (plan, score_plan):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)  # values of tensors may then not be checked
    monkeypatch.setattr(Tensor, "tolist", lambda x: (reads.append(x), to_list(x))[1])
    request = Request(mask, score, {}, None, None, 0, None, False, "auto", None)
    planned = plan_call(q, q, q, request)
    assert planned.call.cap == (30.0 if inner == "softcap" else None)
    assert not reads


def test_a_packed_softcap_is_a_softcap() -> None:
    score = flexmasks.packed(flexmasks.get_score("softcap", cap=30.0), [0, 5, 20])
    assert cap_of(score, Size(1, 2, 20, 20, torch.device("cpu"))) == 30.0
    assert (
        cap_of(flexmasks.packed(flexmasks.get_score("alibi"), [0, 5, 20]), Size(1, 2, 20, 20, torch.device("cpu")))
        is None
    )


@pytest.mark.usefixtures("quick_kernels")
def test_what_begins_to_learn_gets_its_gradient() -> None:
    q = torch.randn(1, 2, 16, 8)
    temperatures = torch.tensor([3.0, 7.0])

    def call() -> Tensor:
        return flexmasks.attention(q, q, q, mask="causal", score="temperature", temperatures=temperatures)

    before = call()
    temperatures.requires_grad_()
    after = call()
    assert torch.allclose(before, after, atol=1e-6)
    after.square().sum().backward()
    assert temperatures.grad is not None
    assert temperatures.grad.abs().min() > 0


def test_temperatures_are_as_exact_as_the_queries() -> None:
    q = torch.randn(1, 2, 16, 8, dtype=torch.float64)
    out = flexmasks.attention(q, q, q, score="temperature", temperatures=[3.0, 7.0])
    scores = q @ q.mT / 8**0.5 / torch.tensor([3.0, 7.0], dtype=torch.float64)[:, None, None]
    assert torch.allclose(out, scores.softmax(-1) @ q, atol=1e-14)


def test_bounds_that_scores_note_hold() -> None:
    found = set()
    for case in SCORE_CASES:
        params = {n: v for n, v in arguments(case).items() if n != "q_offset"}
        if noted_bounds_hold(case, flexmasks.get_score(case.name, **params)):
            found.add(case.name)
    assert "t5_bias" in found


def test_the_strength_of_a_temperature_learns() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    strength, exact_strength = (torch.tensor(0.3, dtype=t, requires_grad=True) for t in (torch.float32, torch.float64))
    out = flexmasks.attention(q, k, v, mask="causal", score="long_temperature", floor=4, strength=strength)
    steps = torch.tensor([1 + (i + 1) // 4 for i in range(20)], dtype=torch.float64).log()
    scores = q.double() @ k.double().mT / math.sqrt(8) * (1 + exact_strength * steps[:, None])
    want = scores.masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -math.inf).softmax(-1) @ v.double()
    assert error(out, want) < TOLERANCE[torch.float32]
    got, wanted = (torch.autograd.grad(x.square().sum(), s)[0] for x, s in ((out, strength), (want, exact_strength)))
    assert error(got, wanted) < TOLERANCE[torch.float32]
