"""Dropout of attention weights, held against the formula written out in float64 with the same kept pairs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flexmasks
from flexmasks import road
from flexmasks.backends import flex_dropout, flex_kernels
from flexmasks.backends.call import Unavailable
from flexmasks.backends.flex_dropout import Drawn, DropoutKernel, attend_kept
from flexmasks.backends.flex_kernels import InPlaceOfScore
from flexmasks.backends.table import BACKENDS
from flexmasks.dropout import Dropout
from flexmasks.plans.mask_plan import MaskPlan

P = 0.3
SEED = 11
IDS = torch.tensor([0] * 17 + [1] * 30 + [2] * 3)


def kept(dropout: Dropout, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Return which pairs a call with an int as its seed keeps, bool [batch, heads, q_len, kv_len]."""
    change = dropout.kept((batch, heads, q_len), kv_len, torch.device("cpu"))
    sizes = torch.meshgrid(*map(torch.arange, (batch, heads, q_len, kv_len)), indexing="ij")
    return change(torch.zeros(()), *sizes) == 0


def inputs(
    heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 50,
    kv_len: int = 50,
    size: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (heads, q_len, size), (kv_heads, kv_len, size), (kv_heads, kv_len, 24)
    return [torch.randn(2, *shape, dtype=dtype).requires_grad_() for shape in shapes]


def written_out(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, keep: Tensor, p: float = P, bias: Any = 0.0, sinks: Any = None
) -> tuple[Tensor, Tensor]:
    """Return the output and the lse."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[3]) + bias).masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[2]]
    return (weights * keep / (1 - p)) @ v, scores.logsumexp(-1)


def check(results: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], leaves: list[Tensor]) -> None:
    """Compare output, lse and all gradients."""
    factors = [torch.randn_like(x) for x in wanted]
    sees_something = wanted[1] != -math.inf
    factors[1] = factors[1] * sees_something
    gradients = [
        torch.autograd.grad([out, lse.masked_fill(~sees_something, 0.0)], leaves, factors)
        for out, lse in (results, wanted)
    ]
    for got, want in zip((*results, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"mask": "causal"},
    "window": {"mask": "sliding_window", "window": 3},
    "documents": {"mask": ["causal", "document"], "document_ids": IDS},
    "rows that see nothing": {"mask": lambda b, h, q, kv: (q > kv) & (kv % 3 != 1)},
}


@pytest.mark.parametrize("name", MASKS)
def test_against_the_formula(name: str) -> None:
    q, k, v = inputs()
    learned = torch.randn(4, 50, 50, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    call = MASKS[name]
    params = {n: x for n, x in call.items() if n != "mask"}
    masks = call.get("mask", "full")
    visible = torch.ones((), dtype=torch.bool)
    for mask in masks if isinstance(masks, list) else [masks]:
        visible = visible & flexmasks.dense_mask(mask, 50, **(params if mask not in ("causal", "full") else {}))
    keep = kept(Dropout(P, SEED), 2, 4, 50, 50)
    given = {"dropout_p": P, "dropout_seed": SEED, "return_lse": True, **call}
    check(flexmasks.attention(q, k, v, **given), written_out(q, k, v, visible, keep), [q, k, v])
    results = flexmasks.attention(q, k, v, score=learned, sink_logits=sinks, **given)
    wanted = written_out(q, k, v, visible, keep, bias=learned, sinks=sinks)
    check(results, wanted, [q, k, v, learned, sinks])


@settings(max_examples=12)
@given(
    sizes=st.tuples(*[st.integers(1, n) for n in (2, 2, 2, 40, 40)]),
    p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    window=st.integers(0, 40),
)
def test_any_call(sizes: tuple[int, ...], p: float, seed: int, dtype: torch.dtype, window: int) -> None:
    batch, kv_heads, groups, q_len, kv_len = sizes
    heads = kv_heads * groups
    torch.manual_seed(1)
    q, k, v = (
        torch.randn(batch, h, n, 8, dtype=dtype).requires_grad_()
        for h, n in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    )
    call = {"mask": "sliding_window", "window": window, "q_offset": max(0, kv_len - q_len)}
    out = flexmasks.attention(q, k, v, dropout_p=p, dropout_seed=seed, **call)
    precise = [x.detach().double().requires_grad_() for x in (q, k, v)]
    visible = flexmasks.dense_mask(call["mask"], q_len, kv_len, window=window, q_offset=call["q_offset"])
    keep = kept(Dropout(p, seed), batch, heads, q_len, kv_len)
    want, _ = written_out(*precise, visible, keep, p if keep.any() else 0.0)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2}[dtype]
    pairs = [(out, want)]
    if keep.any():
        grads = [torch.autograd.grad(x.sum(), leaves) for x, leaves in ((out, (q, k, v)), (want, precise))]
        pairs += zip(*grads, strict=True)
    for got, wanted in pairs:
        scale = max(1.0, float(wanted.detach().abs().max()))
        assert float((got.double() - wanted).detach().abs().max()) <= tolerance * scale


@pytest.mark.parametrize("seed", [SEED, None])
def test_statistics(seed: int | None) -> None:
    """Pairs are dropped with probability p, independently in rows, in columns and in cycles of two rows and columns."""
    torch.manual_seed(SEED)
    size = 500
    for p in (0.1, 0.5):
        keep = kept(Dropout(p, seed), 1, 3, size, size)[0].double()
        x = (keep - (1 - p)) / math.sqrt(p * (1 - p))
        assert abs(float(x.mean())) * math.sqrt(x.numel()) < 5
        assert float(x.mean(-1).abs().max()) * math.sqrt(size) < 6
        assert float(x.mean(-2).abs().max()) * math.sqrt(size) < 6
        across = (x[0] * x[1], x[0] * x[2].mT, x[0] * x[1].mT, x[0] * x[0].mT.triu(1))
        assert all(abs(float(y.mean())) * size < 6 for y in across)  # other heads, keys in place of queries
        for one in (x[0], x[1].mT):
            products = (one @ one.mT / math.sqrt(size)).fill_diagonal_(0)  # of two rows: near a normal number
            pairs = size * (size - 1)
            assert float(products.abs().max()) < 8
            cycles = float(products.square().sum()) / pairs  # 1 + the mean over cycles; xor alone gives `size`
            assert abs(cycles - 1) < 6 * math.sqrt(4 / pairs)
            assert float(torch.linalg.matrix_norm(one, 2)) < 2.1 * math.sqrt(size)


def test_words() -> None:
    """By words with odd lower halves, p holds exactly over all keys of a row and all queries of a column."""
    change = Dropout(0.3, SEED).kept((2, 3, 40), 50, torch.device("cpu"))
    drawn = Dropout(0.3).kept((2, 3, 40), 50, torch.device("cpu"))
    for words in (x.params[name] for x in (change, drawn) for name in ("q_words", "kv_words")):
        assert (words % 2 == 1).all()
        assert words.unique().numel() == words.numel()
    every = (torch.arange(1 << 16) << 15 | 12345).int()
    for one, many in (("q_words", "kv_words"), ("kv_words", "q_words")):
        word, zeros, places = change.params[one][:1, :1, :1], torch.zeros(1 << 16).long(), torch.arange(1 << 16)
        indices = (zeros, places) if one == "q_words" else (places, zeros)
        given = {one: word, many: every.view(1, 1, -1), "dropped": change.params["dropped"]}
        scores = type(change)(change._definition, given)(torch.zeros(()), zeros, zeros, *indices)
        assert int((scores == -math.inf).sum()) == round(0.3 * (1 << 16))


def test_words_depend_on_places_alone() -> None:
    whole = kept(Dropout(0.5, 3), 2, 3, 40, 50)
    assert torch.equal(kept(Dropout(0.5, 3), 2, 3, 30, 20), whole[:, :, :30, :20])
    others = [kept(Dropout(0.5, seed), 2, 3, 40, 50) for seed in (4, -3, 3 + (1 << 32), 3 - (1 << 63))]
    for one, other in itertools.combinations([whole, *others, whole.roll(1, 1), whole.roll(1, 0)], 2):
        assert abs(float((one == other).double().mean()) - 0.5) < 0.03


def test_what_draws() -> None:
    q, k, v = inputs()

    def call(**given: Any) -> Tensor:
        return flexmasks.attention(q, k, v, mask="causal", dropout_p=P, **given)

    torch.manual_seed(5)
    first, second = call(), call()
    torch.manual_seed(5)
    assert torch.equal(call(), first)
    assert not torch.equal(first, second)
    assert torch.equal(call(dropout_seed=torch.Generator().manual_seed(5)), first)
    fixed = call(dropout_seed=7)
    assert torch.equal(fixed, call(dropout_seed=torch.tensor([7], dtype=torch.int32)))
    assert not torch.equal(fixed, call(dropout_seed=8))
    plan = flexmasks.plan("causal", 50)
    assert torch.equal(flexmasks.attention(q, k, v, mask=plan, dropout_p=P, dropout_seed=7), fixed)


def test_no_dropout_is_the_call_without() -> None:
    q, k, v = inputs()
    state = torch.get_rng_state()
    assert torch.equal(flexmasks.attention(q, k, v, dropout_p=0, dropout_seed=3), flexmasks.attention(q, k, v))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("p", [1, 1.0, 1 - 1e-9])
def test_all_are_dropped(p: float) -> None:
    q, k, v = inputs()
    out, lse = flexmasks.attention(q, k, v, mask="causal", dropout_p=p, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, flexmasks.attention(q, k, v, mask="causal", return_lse=True)[1])
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_rows_whose_keys_are_all_dropped() -> None:
    """Of two keys both are often dropped; what is hidden may hold anything."""
    q, k, v = inputs(dtype=torch.float32)
    with torch.no_grad():
        q[:, :, 49], k[:, :, 49], v[:, :, 48] = math.nan, math.inf, math.nan
    mask = flexmasks.get_mask(lambda b, h, q, kv: (q // 2 == kv // 2) & (q < 48))
    out = flexmasks.attention(q, k, v, mask=mask, dropout_p=0.8, dropout_seed=SEED)
    keep = kept(Dropout(0.8, SEED), 2, 4, 50, 50) & flexmasks.dense_mask(mask, 50)
    is_empty = ~keep.any(-1)
    assert 0.5 < float(is_empty[:, :, :48].double().mean()) < 0.8
    assert torch.equal((out == 0).all(-1), is_empty)
    to_q, *others = torch.autograd.grad(out.sum(), (q, k, v))
    assert torch.equal((to_q == 0).all(-1)[:, :, 48:], torch.ones(2, 4, 2, dtype=torch.bool))
    assert all(x.isfinite().all() and (x[:, :, 48:] == 0).all() for x in (to_q, *others))


def test_the_whole_mask_takes_what_dropout_adds() -> None:
    """Rows whose keys are all dropped included."""
    change = Dropout(0.8, SEED).kept((2, 4, 50), 50, torch.device("cpu"))
    results = []
    for backend in ("short", "reference"):
        q, k, v = inputs(dtype=torch.float32)
        out = flexmasks.attention(q, k, v[..., :8], mask="causal", score=["alibi", change], backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    others = flexmasks.explain(q, k, k, score=lambda s, b, h, q, kv: torch.where(q > kv, s, -1.0)).others
    assert others["short"] == "it takes only score changes that add to the score"


@pytest.mark.parametrize("how", ["varlen", "jagged"])
def test_sequences_end_to_end(how: str) -> None:
    q, k, v = (x.detach()[:1].requires_grad_() for x in inputs(kv_heads=4))
    offsets, call = [0, 17, 47, 50], {"mask": "causal", "score": "alibi", "dropout_p": P, "dropout_seed": SEED}
    if how == "varlen":
        tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
        out, lse = flexmasks.varlen_attention(*tokens, offsets, return_lse=True, **call)
        results = out.transpose(0, 1)[None], lse[None]
    else:
        at = torch.tensor(offsets)
        nested = [torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1), at).transpose(1, 2) for x in (q, k, v)]
        out, lse = flexmasks.attention(*nested, return_lse=True, **call)
        results = out.values()[None], lse.values()[None]
    distance = torch.arange(50)[:, None] - torch.arange(50)
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625], dtype=torch.float64)
    bias = -slopes[:, None, None] * distance
    visible = (IDS[:, None] == IDS) & (distance >= 0)
    check(results, written_out(q, k, v, visible, kept(Dropout(P, SEED), 1, 4, 50, 50), bias=bias), [q, k, v])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpoints(use_reentrant: bool) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flexmasks.attention(q, k, v, mask="causal", dropout_p=P)

    gradients = []
    for run in (layer, lambda *x: checkpoint(layer, *x, use_reentrant=use_reentrant)):
        leaves = inputs()
        torch.manual_seed(2)
        run(*leaves).square().sum().backward()
        gradients.append([x.grad for x in leaves])
    for got, want in zip(*gradients, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("by_kinds", [False, True])
def test_a_mask_is_planned_once(by_kinds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are new in each call; what was planned for the mask is not, on a GPU for calls of one kind either."""
    if by_kinds:
        monkeypatch.setattr(road, "_KINDS_ON", ("cpu",))
    q, k, v = (x.detach() for x in inputs())
    ids, planned = [IDS.clone() for _ in range(4)], []
    build, by_program = MaskPlan._build, MaskPlan._prepared_by
    monkeypatch.setattr(MaskPlan, "_build", lambda self: (planned.append(self), build(self))[1])
    monkeypatch.setattr(MaskPlan, "_prepared_by", lambda self, x: (planned.append(self), by_program(self, x))[1])
    flexmasks.clear_caches()
    for number, one in enumerate(ids):
        for _ in range(3):
            flexmasks.attention(q, k, v, mask=["causal", "document"], document_ids=one, dropout_p=P)
        before = len(planned)
        entries = flexmasks.cache_info()["plans"].entries
        flexmasks.attention(q, k, v, mask=["causal", "document"], document_ids=one, dropout_p=P)
        assert (len(planned), flexmasks.cache_info()["plans"].entries) == (before, entries), number


@pytest.mark.slow
def test_inside_compile() -> None:
    """One graph draws anew at each step, for any length, and its backward pass drops the same pairs."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def layer(q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None) -> Tensor:
        return flexmasks.attention(q, k, v, mask="causal", dropout_p=P, dropout_seed=seed)

    q, k, v = inputs()
    first, second = layer(q, k, v, None), layer(q, k, v, None)
    assert not torch.equal(first, second)
    layer(*inputs(q_len=40, kv_len=40), None)
    assert counter.frame_count == 1
    keep = kept(Dropout(P, SEED), 2, 4, 50, 50)
    want, _ = written_out(q, k, v, torch.ones(50, 50).tril().bool(), keep)
    got = layer(q, k, v, torch.tensor(SEED))
    torch.testing.assert_close(got, want)
    pairs = zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)
    assert not torch.equal(layer(q, k, v, torch.tensor(SEED + 1)), got)
    assert counter.frame_count == 2
    with pytest.raises(Exception, match="must be an int, a tensor or None"):
        torch.compile(flexmasks.attention, backend="eager", fullgraph=True)(
            q, k, v, dropout_p=P, dropout_seed=torch.Generator()
        )


# --- in one backward pass ---


def _sum_precisely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator sums in float32."""
    monkeypatch.setattr(flex_dropout, "less_row_products", lambda x, y, given, factor: (x * y).sum(-1) * -factor)


def test_one_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    (batch, heads, n, size), p = (2, 4, 128, 16), 0.3
    q = torch.randn(batch, heads, n, size, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(batch, 2, n, size, dtype=torch.float64, requires_grad=True) for _ in range(2))
    slopes = torch.rand(heads, dtype=torch.float64)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, slopes: Tensor) -> Tensor:
        return 3 * torch.tanh(s) - slopes[h] * (i - j)

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (j % 5 != 1) & (i > 3)  # four rows see nothing

    dropout = Dropout(p, 11)
    change = dropout.kept((batch, heads, n), n, q.device)
    places = torch.meshgrid(*map(torch.arange, (batch, heads, n, n)), indexing="ij")
    keep = change(torch.zeros(()), *places) == 0
    scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(size)
    scores = score(scores, *places, slopes).masked_fill(~mask(*places), -math.inf)
    weights = scores.softmax(-1).nan_to_num() * keep / (1 - p)
    wanted, lse = weights @ v.repeat_interleave(2, 1), scores.detach().logsumexp(-1)

    functions = flex_dropout._Functions(score, mask, 1, dropout.dropped, 1 - p)
    _sum_precisely(monkeypatch)
    torch.compiler.allow_in_graph(flex_dropout._attend)
    blocks = flexmasks.block_mask(mask, n, n, batch=1, heads=1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(q: Tensor, k: Tensor, v: Tensor, drawn: Drawn, blocks: Any) -> Tensor:
        given = InPlaceOfScore(attend_kept, functions.name, (*drawn, slopes))
        return attend_kept(q, k, v, given, blocks, None, True, None)

    got = call(q, k, v, Drawn.of(change, lse, p), blocks)
    factor = torch.randn_like(wanted)
    pairs = zip(*(torch.autograd.grad(x, (q, k, v), factor) for x in (got, wanted)), strict=True)
    for a, b in ((got, wanted), *pairs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.fixture
def by_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls on the CPU take the way of a GPU, by a compiler that runs torch's operators."""
    compile_by_torch = torch.compile
    _sum_precisely(monkeypatch)
    monkeypatch.setattr(road, "_KINDS_ON", ("cpu",))
    monkeypatch.setattr(road, "choose", lambda call: ([BACKENDS["flex"]], {}))
    monkeypatch.setattr(flex_kernels, "_as_stored", lambda score_mod: score_mod)  # for torch's kernels on a CPU
    monkeypatch.setattr(torch, "compile", lambda f, *, options, **how: compile_by_torch(f, backend="aot_eager", **how))
    flexmasks.clear_caches()
    yield
    flexmasks.clear_caches()


_CALLS: dict[str, dict[str, Any]] = {
    "documents and a score": {"mask": ["causal", "document"], "document_ids": IDS, "score": "alibi"},
    "rows that see nothing": {"mask": lambda b, h, q, kv: (q > kv) & (kv % 3 != 1)},
}


@pytest.mark.parametrize("name", _CALLS)
def test_calls_with_one_backward_pass(name: str, by_flex: None) -> None:
    q, k, v = inputs()

    def run(**more: Any) -> Any:
        torch.manual_seed(SEED)
        return flexmasks.attention(q, k, v, dropout_p=P, **_CALLS[name], **more)

    results = [run(return_lse=True)[0], run(), run()]  # the first one by two calls
    factor = torch.randn_like(results[0])
    for one in results[1:]:
        assert one.grad_fn.name().startswith("CompiledFunction"), one.grad_fn.name()
    wanted, *others = [(x, *torch.autograd.grad(x, (q, k, v), factor)) for x in results]
    for got in others:
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_no_second_derivatives(by_flex: None) -> None:
    q, k, v = inputs()
    for _ in range(2):
        out = flexmasks.attention(q, k, v, mask="causal", dropout_p=P)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(out.sum(), q, create_graph=True)


def test_two_backward_passes_where_one_fails(by_flex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fails(*_: Any) -> Tensor:
        calls.append(1)
        raise Unavailable("no kernel")

    monkeypatch.setattr(DropoutKernel, "_run", fails)
    q, k, v = inputs()
    given = {"mask": "causal", "dropout_p": P, "dropout_seed": SEED}
    out = flexmasks.attention(q, k, v, **given)
    assert torch.equal(out, flexmasks.attention(q, k, v, **given))
    assert len(calls) == 1
    keep, visible = kept(Dropout(P, SEED), 2, 4, 50, 50), torch.ones(50, 50).tril().bool()
    torch.testing.assert_close(out, written_out(q, k, v, visible, keep)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("length", "dtype", "has_score"),
    [(300, torch.bfloat16, True), (512, torch.bfloat16, False), (512, torch.float32, True)],
)
def test_one_backward_pass_on_a_gpu(length: int, dtype: torch.dtype, has_score: bool) -> None:
    torch.manual_seed(0)
    shapes = (4, length, 16), (2, length, 16), (2, length, 32)
    q, k, v = (torch.randn(2, *shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes)
    bias = torch.randn(4, length, length, device="cuda", dtype=dtype) if has_score else None
    call = {"mask": "causal", "score": bias, "dropout_p": P, "dropout_seed": SEED, "backend": "flex"}
    visible, keep = torch.ones(length, length).tril().bool().cuda(), kept(Dropout(P, SEED), 2, 4, length, length).cuda()
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    flexmasks.clear_caches()
    for _ in range(2):
        out = flexmasks.attention(q, k, v, **call)
        wanted, _ = written_out(*leaves, visible, keep, bias=0.0 if bias is None else bias.double())
        factor = torch.randn_like(out)
        got = out, *torch.autograd.grad(out, (q, k, v), factor)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
        for a, b in zip(got, (wanted, *torch.autograd.grad(wanted, leaves, factor.double())), strict=True):
            assert float((a.double() - b).detach().abs().max()) <= tolerance * max(1, float(b.detach().abs().max()))
    assert len(flex_dropout._BY_NAME) == 1


# --- kernels of compilers ---


@pytest.mark.campaign
def test_compiled_for_a_cpu() -> None:
    """torch's kernel gives no lse there, so this is the call for the kept pairs alone."""
    q, k, v = (x.detach() for x in inputs(dtype=torch.float32))
    call = {"mask": "causal", "score": Dropout(P, SEED).kept((2, 4, 50), 50, q.device)}
    got = flexmasks.attention(q, k, v, backend="flex", **call)
    torch.testing.assert_close(got, flexmasks.attention(q, k, v, backend="reference", **call))


def _on_gpu(dtype: torch.dtype, **sizes: int) -> list[Tensor]:
    return [x.detach().to("cuda", dtype).requires_grad_() for x in inputs(size=16, **sizes)]  # flex takes no fewer


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "flex", "short"])
def test_on_a_gpu(backend: str, dtype: torch.dtype) -> None:
    if backend == "short" and dtype == torch.float32:
        pytest.skip("it takes half precision only")
    q, k, v = _on_gpu(dtype, q_len=300, kv_len=300)
    bias = torch.randn(4, 300, 300, device="cuda", dtype=dtype).requires_grad_()
    call = {"mask": "causal", "score": bias, "dropout_p": P, "dropout_seed": SEED, "return_lse": True}
    results = flexmasks.attention(q, k, v, backend=backend, **call)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    visible = torch.ones(300, 300, device="cuda").tril().bool()
    keep = kept(Dropout(P, SEED), 2, 4, 300, 300).cuda()
    wanted = written_out(*leaves[:3], visible, keep, bias=leaves[3])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-3
    grads: list[Any] = []
    for (out, lse), x in ((results, [q, k, v, bias]), (wanted, leaves)):
        grads.append(torch.autograd.grad(out.sum() + lse.sum(), x))
    for got, want in (*zip(results, wanted, strict=True), *zip(*grads, strict=True)):
        assert float((got.double() - want).detach().abs().max()) <= tolerance * max(1, float(want.detach().abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_new_words_compile_and_wait_for_nothing(mask: str) -> None:
    q, k, v = _on_gpu(torch.bfloat16, q_len=512, kv_len=512)
    ids = (torch.arange(512) // 200).cuda()
    call = {"mask": "causal"} if mask == "causal" else {"mask": lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)}

    def step() -> Tensor:
        out = flexmasks.attention(q, k, v, dropout_p=P, **call)
        out.sum().backward()
        return out.detach()

    step(), step(), step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first, second = step(), step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.equal(first, second)


@pytest.mark.gpu
def test_cuda_graphs_draw_anew() -> None:
    q, k, v = (x.detach() for x in _on_gpu(torch.bfloat16, q_len=256, kv_len=256))
    for _ in range(3):
        flexmasks.attention(q, k, v, mask="causal", dropout_p=P)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexmasks.attention(q, k, v, mask="causal", dropout_p=P)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(*found)
