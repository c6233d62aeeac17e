"""Biases that learn: of pairs, of images, and of forget gates, against plain formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import TOLERANCE, error, exact, in_campaigns, one_in, try_examples
from hypothesis import strategies as st
from oracles import attend
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

import flexmasks
from flexmasks.plans.recorded import Learning
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.whole import added_of
from flexmasks.spec.parameters import Size

BATCH, HEADS, SIDE = 4, 2, 7
LENGTH = SIDE * SIDE
ROW, COLUMN = torch.arange(LENGTH) // SIDE, torch.arange(LENGTH) % SIDE
_Bias = Callable[..., Tensor]


def _differences(log_gates: Tensor) -> Tensor:
    sums = log_gates.cumsum(-1)
    return sums[..., :, None] - sums[..., None, :]


# The shapes of what learns, the other parameters, and the bias [B or 1, H, Q, K] as a user of SDPA writes it.
BIASES: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, int], _Bias]] = {
    "pair_bias": (
        {"bias": (2, HEADS, LENGTH, LENGTH)},
        {"group": 2},
        lambda bias: bias[:, None].expand(-1, 2, -1, -1, -1).flatten(0, 1),
    ),
    "relative_bias_2d": (
        {"table": (HEADS, 2 * SIDE - 1, 2 * SIDE - 1)},
        {"height": SIDE, "width": SIDE},
        lambda table: table[None, :, ROW[:, None] - ROW + SIDE - 1, COLUMN[:, None] - COLUMN + SIDE - 1],
    ),
    "decomposed_bias": (
        {"rel_h": (BATCH, HEADS, LENGTH, SIDE), "rel_w": (BATCH, HEADS, LENGTH, SIDE)},
        {},
        lambda rel_h, rel_w: rel_h[..., ROW] + rel_w[..., COLUMN],
    ),
    "forgetting": ({"log_gates": (BATCH, HEADS, LENGTH)}, {}, _differences),
}
_LENS = torch.tensor([LENGTH, 30, 0, 1])
MASKS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "full": ({}, torch.ones(1, 1, 1, LENGTH, dtype=torch.bool)),
    "causal": ({"mask": "causal"}, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()),
    "key_padding": (
        {"mask": "key_padding", "attention_mask": torch.arange(LENGTH) < _LENS[:, None]},
        (torch.arange(LENGTH) < _LENS[:, None])[:, None, None],
    ),
}


def _check(name: str, mask: str, dtype: torch.dtype, attention: Callable[..., Tensor], learns: bool = True) -> None:
    """Compare a call and its gradients with the formula; what learns comes of a computation, as in a model."""
    shapes, others, bias = BIASES[name]
    arguments, visible = MASKS[mask]
    leaves = [x.to(dtype).requires_grad_() for x in torch.randn(3, BATCH, HEADS, LENGTH, 16)]
    learned = {n: torch.randn(shape).to(dtype).requires_grad_(learns) for n, shape in shapes.items()}
    made = {n: logsigmoid(t) if n == "log_gates" else t * 2 for n, t in learned.items()}
    out = attention(*leaves, score=name, **arguments, **made, **others)
    inputs = [exact(x) for x in leaves]
    parameters = {n: exact(t) for n, t in made.items()}
    want, _ = attend(*inputs, visible, lambda s: s + bias(**parameters))
    assert error(out, want) < TOLERANCE[dtype]
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, [*leaves, *(made.values() if learns else ())], upstream)
    wanted = torch.autograd.grad(want, [*inputs, *(parameters.values() if learns else ())], upstream.double())
    for x, y in zip(got, wanted, strict=True):
        assert error(x, y, unit=0.2) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", BIASES)
def test_gradients(name: str, mask: str, dtype: torch.dtype) -> None:
    _check(name, mask, dtype, flexmasks.attention)


@pytest.mark.parametrize("name", BIASES)
def test_gradients_of_the_lse(name: str) -> None:
    """What is added to all scores of a row changes its lse alone, as the gates up to the query do."""
    shapes, others, bias = BIASES[name]
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, 16, dtype=torch.float64)
    learned = {n: torch.randn(shape, dtype=torch.float64, requires_grad=True) for n, shape in shapes.items()}
    _, lse = flexmasks.attention(q, k, v, mask="causal", score=name, return_lse=True, **learned, **others)
    _, want = attend(q, k, v, MASKS["causal"][1], lambda s: s + bias(**learned))
    upstream = torch.randn_like(want)
    got, wanted = (torch.autograd.grad(x, list(learned.values()), upstream) for x in (lse, want))
    assert torch.allclose(lse, want, atol=1e-12)
    for x, y in zip(got, wanted, strict=True):
        assert torch.allclose(x, y, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BIASES)
def test_short_calls_without_compiling(name: str, dtype: torch.dtype) -> None:
    """The gradients of q, k and v, where the bias is given."""
    call = lambda *a, **k: flexmasks.attention(*a, **k, backend="short")  # noqa: E731
    _check(name, "causal", dtype, call, learns=False)


@pytest.mark.parametrize("mask", ["full", "key_padding"])
@pytest.mark.parametrize(
    ("backend", "name"), [*one_in(2, [("aot_eager", n) for n in BIASES]), in_campaigns(("inductor", "pair_bias"))]
)
def test_inside_compile(name: str, mask: str, backend: str) -> None:
    torch._dynamo.reset()

    def call(*tensors: Tensor, **arguments: Any) -> Tensor:
        return flexmasks.attention(*tensors, **arguments) * 1

    _check(name, mask, torch.float32, torch.compile(call, fullgraph=True, backend=backend))


@pytest.mark.slow
def test_groups_of_any_number_and_length_inside_compile() -> None:
    torch._dynamo.reset()

    def call(q: Tensor, bias: Tensor, group: int, backend: str = "auto") -> Tensor:
        return flexmasks.attention(q, q, q, score="pair_bias", bias=bias, group=group, backend=backend)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for groups, group, length in ((2, 3, 10), (3, 4, 17), (1, 6, 12)):
        q, bias = torch.randn(groups * group, 2, length, 8), torch.randn(groups, 2, length, length, requires_grad=True)
        out, want = compiled(q, bias, group), call(q, bias, group, "reference")
        assert error(out, want) < TOLERANCE[torch.float32]
        (got,), (wanted,) = (torch.autograd.grad(x.square().sum(), bias) for x in (out, want))
        assert error(got, wanted) < TOLERANCE[torch.float32]


# --- the running sum of forget gates ---


@pytest.mark.parametrize("offset", ["last", torch.tensor([20, 3])])
def test_decoding_continues_a_sequence(offset: Any) -> None:
    """The gates are those of all keys, for any number of queries."""
    q, k, v = torch.randn(3, 2, HEADS, 24, 8, dtype=torch.float64)
    gates = logsigmoid(torch.randn(2, HEADS, 24, dtype=torch.float64))
    whole = flexmasks.attention(q, k, v, mask="causal", score="forgetting", log_gates=gates)
    starts = [20, 20] if isinstance(offset, str) else offset.tolist()
    last = torch.stack([x[:, n : n + 4] for x, n in zip(q, starts, strict=True)])
    out = flexmasks.attention(last, k, v, mask="causal", score="forgetting", log_gates=gates, q_offset=offset)
    want = torch.stack([x[:, n : n + 4] for x, n in zip(whole, starts, strict=True)])
    assert torch.allclose(out, want, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_in_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    """In half precision the difference of two large sums is coarse."""
    length = 1000
    q, k, v = torch.randn(3, 1, 1, length, 8).to(dtype)
    gates = (-torch.rand(1, 1, length) / 2).to(dtype).requires_grad_()
    out = flexmasks.attention(q, k, v, mask="causal", score="forgetting", log_gates=gates)
    (got,) = torch.autograd.grad(out, gates, torch.ones_like(out))
    leaf = exact(gates)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    want, _ = attend(q.double(), k.double(), v.double(), visible, lambda s: s + _differences(leaf))
    assert error(out, want) < TOLERANCE[dtype]
    (wanted,) = torch.autograd.grad(want, leaf, torch.ones_like(want))
    assert got.dtype == dtype
    assert error(got, wanted) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_the_sums_are_computed_once_a_call(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 2, 300, 8)
    sums: list[torch.Size] = []
    cumsum = Tensor.cumsum
    monkeypatch.setattr(Tensor, "cumsum", lambda x, *a, **k: (sums.append(x.shape), cumsum(x, *a, **k))[1])
    for _ in range(3):  # a new autograd graph each time
        sums.clear()
        gates = torch.rand(1, 2, 300).neg().requires_grad_()
        out = flexmasks.attention(q, k, v, mask="causal", score="forgetting", log_gates=gates, backend=backend)
        out.sum().backward()
        assert sums.count(gates.shape) == 1


@pytest.mark.usefixtures("quick_kernels")
def test_gates_that_change_in_place_change_the_sums() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    gates = -torch.rand(1, 2, 20)
    call = lambda gates: flexmasks.attention(q, k, v, mask="causal", score="forgetting", log_gates=gates)  # noqa: E731
    before = call(gates)
    gates.mul_(3)
    after = call(gates)
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.allclose(after, call(gates.clone()), atol=1e-6)


@pytest.mark.slow
def test_derivatives_of_derivatives_and_checkpoints() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    x = torch.randn(1, 2, 9, dtype=torch.float64, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return flexmasks.attention(q, k, v, mask="causal", score="forgetting", log_gates=logsigmoid(x))

    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)
    (want,) = torch.autograd.grad(layer(x).square().sum(), x)
    (got,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), x)
    assert torch.allclose(got, want, atol=1e-12)
    assert torch.allclose(torch.func.grad(lambda x: layer(x).square().sum())(x.detach()), want, atol=1e-12)


def test_sequences_in_one_row_with_gates_of_their_own() -> None:
    """Inside `packed` each sequence has a row of gates, as long as the longest sequence."""
    offsets = [0, 5, 12]
    gates = -torch.rand(2, 2, 7, dtype=torch.float64)
    q, k, v = torch.randn(3, 1, 2, 12, 4, dtype=torch.float64)
    score = flexmasks.packed(flexmasks.scores.forgetting(log_gates=gates), offsets)
    out = flexmasks.attention(q, k, v, mask=flexmasks.packed("causal", offsets), score=score)
    for own, start, stop in zip(gates, offsets, offsets[1:], strict=False):
        parts = [x[:, :, start:stop] for x in (q, k, v)]
        alone = flexmasks.attention(*parts, mask="causal", score="forgetting", log_gates=own[None, :, : stop - start])
        assert torch.allclose(out[:, :, start:stop], alone, atol=1e-12)


# --- equal to other scores ---


def test_groups_share_a_bias_without_copies() -> None:
    """A kernel reads the user's own tensor, whatever the number of batch elements."""
    bias = torch.randn(2, 4, 64, 64)
    score = flexmasks.get_score("pair_bias", bias=bias, group=128)
    prepared = score._resolve(Size(256, 4, 64, 64, torch.device("cpu")))
    assert not [x for x in prepared.values() if isinstance(x, Tensor)]


def test_any_groups() -> None:
    def check(groups: int, group: int, heads: int, rows: int, columns: int, offset: int) -> None:
        q = torch.randn(groups * group, 2, rows, 4, dtype=torch.float64)
        k, v = torch.randn(2, groups * group, 2, columns, 4, dtype=torch.float64)
        leaf = torch.randn(groups, heads, rows, columns, dtype=torch.float64, requires_grad=True)
        out = flexmasks.attention(q, k, v, score="pair_bias", bias=leaf, group=group, q_offset=offset)
        want, _ = attend(q, k, v, None, lambda s: s + leaf.repeat_interleave(group, 0))
        assert torch.allclose(out, want, atol=1e-12)
        upstream = torch.randn_like(out)
        (got,), (wanted,) = (torch.autograd.grad(x, leaf, upstream) for x in (out, want))
        assert torch.allclose(got, wanted, atol=1e-10)

    sizes = st.integers(1, 4)
    try_examples(30, check, sizes, sizes, st.sampled_from([1, 2]), st.integers(1, 9), st.integers(1, 9), sizes)


def test_images_of_one_row_and_of_one_column() -> None:
    """There `relative_bias_2d` is `relative_bias`, whose distances go the other way."""

    def check(length: int, is_row: bool) -> None:
        q, k, v = torch.randn(3, 2, 3, length, 4, dtype=torch.float64)
        table = torch.randn(3, 2 * length - 1, dtype=torch.float64)
        height, width = (1, length) if is_row else (length, 1)
        image = table.view(3, 2 * height - 1, 2 * width - 1)
        out = flexmasks.attention(q, k, v, score="relative_bias_2d", table=image, height=height, width=width)
        assert torch.allclose(out, flexmasks.attention(q, k, v, score="relative_bias", table=table.flip(1)), atol=1e-12)

    try_examples(20, check, st.integers(1, 12), st.booleans())


def test_forgetting_in_documents_needs_no_packed() -> None:
    def check(lengths: list[int]) -> None:
        q, k, v = torch.randn(3, 1, 2, sum(lengths), 4, dtype=torch.float64)
        gates = logsigmoid(torch.randn(1, 2, sum(lengths), dtype=torch.float64))
        ids = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
        mask = flexmasks.masks.causal() & flexmasks.masks.document(document_ids=ids)
        out = flexmasks.attention(q, k, v, mask=mask, score="forgetting", log_gates=gates)
        parts = [x.split(lengths, 2) for x in (q, k, v, gates)]
        alone = [
            flexmasks.attention(*own, mask="causal", score="forgetting", log_gates=g)
            for *own, g in zip(*parts, strict=True)
        ]
        assert torch.allclose(out, torch.cat(alone, 2), atol=1e-11)

    try_examples(20, check, st.lists(st.integers(1, 12), min_size=1, max_size=5))


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("name", ["pair_bias", "decomposed_bias"])
def test_a_row_for_each_query_says_where_queries_are(name: str) -> None:
    """Pooled queries of an image, as in MViTv2, have no position among the keys."""
    q, (k, v) = torch.randn(2, 3, 6, 8), torch.randn(2, 2, 3, 24, 8)
    rel_h, rel_w = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 6)
    bias = (rel_h[..., None] + rel_w[..., None, :]).flatten(3)
    params = {"bias": bias} if name == "pair_bias" else {"rel_h": rel_h, "rel_w": rel_w}
    want, _ = attend(q, k, v, None, lambda s: s + bias)
    assert error(flexmasks.attention(q, k, v, score=name, **params), want) < TOLERANCE[torch.float32]


# --- errors ---

WRONG: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "groups": (
        "pair_bias",
        {"bias": torch.zeros(3, 2, 6, 6), "group": 2},
        ValueError,
        r"`bias` must have one row for all, or one for each `group` = 2 of the 4 batch elements, got float32\[3, 2",
    ),
    "a part of a group": (
        "pair_bias",
        {"bias": torch.zeros(2, 2, 6, 6), "group": 3},
        ValueError,
        "one for each `group` = 3 of the 4 batch elements",
    ),
    "no group": ("pair_bias", {"bias": torch.zeros(4, 2, 6, 6), "group": 0}, ValueError, "`group` must be int in 1.."),
    "heads": ("pair_bias", {"bias": torch.zeros(4, 3, 6, 6)}, ValueError, r"\(here H=2, KV=6\), got float32\[4, 3, 6"),
    "keys": ("pair_bias", {"bias": torch.zeros(4, 2, 6, 5)}, ValueError, r"\(here H=2, KV=6\), got float32\[4, 2, 6"),
    "rows": (
        "pair_bias",
        {"bias": torch.zeros(4, 2, 5, 6)},
        ValueError,
        "a row for each of the 6 positions of queries",
    ),
    "pairs alone": ("pair_bias", {"bias": torch.zeros(6, 6)}, ValueError, r"must be float\[G, H, N, KV\]"),
    "whole numbers": ("pair_bias", {"bias": torch.ones(4, 2, 6, 6).int()}, TypeError, r"must be float\[G, H, N, KV\]"),
    "an image": (
        "relative_bias_2d",
        {"table": torch.zeros(2, 5, 7), "height": 3, "width": 4},
        ValueError,
        r"height \* width = 3 \* 4 = 12, the call has 6 keys",
    ),
    "a table": (
        "relative_bias_2d",
        {"table": torch.zeros(2, 2, 3), "height": 2, "width": 3},
        ValueError,
        r"`table` must be \[query heads, 2 \* height - 1, 2 \* width - 1\], here \[2, 3, 5\], got float32\[2, 2, 3\]",
    ),
    "a flat table": (
        "relative_bias_2d",
        {"table": torch.zeros(15, 2), "height": 2, "width": 3},
        ValueError,
        r"`table` must be float\[H, R, C\]",
    ),
    "rows of keys": (
        "decomposed_bias",
        {"rel_h": torch.zeros(4, 2, 6, 3), "rel_w": torch.zeros(4, 2, 6, 3)},
        ValueError,
        "are for 3 rows and 3 columns of keys, 9 in all, the call has 6 keys",
    ),
    "queries": (
        "decomposed_bias",
        {"rel_h": torch.zeros(4, 2, 6, 2), "rel_w": torch.zeros(4, 2, 5, 3)},
        ValueError,
        r"`rel_w` must be float\[B, H, N, C\] \(here B=4, H=2, N=6\), got float32\[4, 2, 5, 3\]",
    ),
    "heads as batch": (
        "decomposed_bias",
        {"rel_h": torch.zeros(8, 6, 2), "rel_w": torch.zeros(8, 6, 3)},
        ValueError,
        r"`rel_h` must be float\[B, H, N, R\]",
    ),
    "gates": (
        "forgetting",
        {"log_gates": torch.zeros(4, 6, 2)},
        ValueError,
        r"`log_gates` must be float\[B, H, S\] \(here B=4, H=2, S=6\), got float32\[4, 6, 2\]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_shapes(wrong: str) -> None:
    name, params, kind, message = WRONG[wrong]
    q = torch.randn(4, 2, 6, 8)
    with pytest.raises(kind, match=message) as raised:
        flexmasks.attention(q, q, q, score=name, **params)
    assert f"flexmasks score {name!r}" in str(raised.value)


def test_gates_of_the_queries_alone() -> None:
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match=r"float\[B, H, S\] \(here B=1, H=2, S=9\), got float32\[1, 2, 1\]"):
        flexmasks.attention(q, k, k, mask="causal", score="forgetting", log_gates=torch.zeros(1, 2, 1), q_offset="last")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.slow), "checkpoint", "twice"])
def test_scores_that_read_a_tensor_and_what_is_made_of_it(way: str, device: str) -> None:
    """Each gives its own part of the gradient, once."""
    if device == "cuda" and way != "eager":
        pytest.skip("these take the ways of a CPU")
    q, k, v = torch.randn(3, 2, 2, 40, 16, device=device)
    table, factor = torch.randn(40, device=device, requires_grad=True), torch.ones((), device=device)
    factor.requires_grad_()
    upstream = torch.randn(2, 2, 40, 16, device=device)
    visible = torch.ones(40, 40, dtype=torch.bool, device=device).tril()

    def gradients(attend: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        made = 2 * table * factor
        out = attend(made.sin(), made)
        found = torch.autograd.grad((out * upstream).sum(), (table, factor, made), create_graph=way == "twice")
        return torch.autograd.grad(found[0].square().sum(), (table, factor)) if way == "twice" else found

    def ours(of_query: Tensor, of_key: Tensor) -> Tensor:
        score = lambda s, b, h, q, kv: s + of_query[q] * of_key[kv] + table[kv]  # noqa: E731
        return flexmasks.attention(q, k, v, mask="causal", score=score)

    def formula(of_query: Tensor, of_key: Tensor) -> Tensor:
        scores = q @ k.mT / 4 + of_query[:, None] * of_key + table
        return scores.masked_fill(~visible, -math.inf).softmax(-1) @ v

    attend: Callable[[Tensor, Tensor], Tensor] = {
        "compiled": torch.compile(ours, backend="aot_eager", fullgraph=True),
        "checkpoint": lambda *x: checkpoint(ours, *x, use_reentrant=False),
    }.get(way, ours)
    torch._dynamo.reset()
    for got, want in zip(gradients(attend), gradients(formula), strict=True):
        assert error(got.cpu(), want.double().cpu(), unit=float(want.abs().max())) < 1e-4


_SHARED = torch.zeros(2 * LENGTH)


@pytest.mark.parametrize("name", ["own", "of data", "of a global", "that asks"])
def test_numbers_of_learning_scores(name: str) -> None:
    """From the second call on the operations of the library's own scores run, and users' functions as they are."""
    table = torch.randn(HEADS, 2 * SIDE - 1, 2 * SIDE - 1).requires_grad_()
    flat = torch.randn(2 * LENGTH).requires_grad_()

    scores: dict[str, Any] = {
        "own": flexmasks.get_score("relative_bias_2d", table=table, height=SIDE, width=SIDE),
        "of data": lambda s, b, h, q, kv: s + flat[q - kv + LENGTH] * flat.data[kv - q + LENGTH],
        "of a global": lambda s, b, h, q, kv: s + flat[q - kv + LENGTH] + _SHARED[kv - q + LENGTH],
        "that asks": lambda s, b, h, q, kv: s + (flat if flat.requires_grad else 0 * flat)[q - kv + LENGTH],
    }
    score, learned = flexmasks.get_score(scores[name]), table if name == "own" else flat
    size = Size(BATCH, HEADS, LENGTH, LENGTH, torch.device("cpu"))
    summand = ScorePlan(score, size).summand()
    for step in range(4):
        with torch.no_grad():
            learned.add_(1)
            _SHARED.fill_(step)
        want = added_of(score, 0, size)
        got = summand.numbers(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool))
        assert torch.equal(got, want)
        slopes = torch.randn_like(got)
        assert torch.equal(*(torch.autograd.grad(x, learned, slopes)[0] for x in (got, want)))
    assert isinstance(summand.of, Learning) == (name == "own")
