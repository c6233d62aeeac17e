"""Attention weights and their sums against the softmax, written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import try_examples
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexmasks
from flexmasks import weighing

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH, HEADS = 2, 4
Q, KV = 13, 17
OFFSET = KV - Q
IDS, SEEN = torch.arange(KV) // 6, torch.rand(HEADS, Q, KV, generator=torch.Generator().manual_seed(0)) < 0.4
LENS = torch.tensor([17, 9])
BIAS = torch.randn(HEADS, Q, KV, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
B, H, ROW, KEY = (torch.arange(n).view([-1 if d == n_d else 1 for d in range(4)]) for n_d, n in
                  enumerate((BATCH, HEADS, Q, KV)))  # fmt: skip
POSITION = ROW + OFFSET
CAUSAL = KEY <= POSITION
# Arguments of a call, and the pairs that they show.
MASKS: dict[str, tuple[Callable[[], dict[str, Any]], Tensor]] = {
    "none": (dict, KEY >= 0),
    "name": (lambda: {"mask": "sliding_window", "window": 4, "q_offset": "last"}, CAUSAL & (KEY >= POSITION - 4)),
    "lengths": (
        lambda: {"mask": "grouped_tril", "seq_lens": LENS, "q_offset": OFFSET},
        CAUSAL & (LENS[:, None, None, None] > POSITION),
    ),
    "documents": (
        lambda: {"mask": flexmasks.masks.causal() & flexmasks.masks.document(document_ids=IDS), "q_offset": OFFSET},
        CAUSAL & (IDS[POSITION] == IDS[KEY]),
    ),
    "function": (
        lambda: {"mask": lambda b, h, q, kv: (q + h + b >= kv) & (kv % 3 != 1), "q_offset": 0},
        (ROW + H + B >= KEY) & (KEY % 3 != 1),
    ),
    "offsets": (lambda: {"mask": "causal", "q_offset": [0, 4]}, ROW + torch.tensor([0, 4])[:, None, None, None] >= KEY),
    "booleans": (lambda: {"mask": SEEN}, SEEN.expand(BATCH, -1, -1, -1)),
    "plan": (lambda: {"mask": flexmasks.plan("causal", Q, KV, batch=BATCH, heads=HEADS, q_offset=OFFSET)}, CAUSAL),
    "block mask": (lambda: {"mask": flexmasks.block_mask("causal", Q, KV, q_offset=OFFSET)}, CAUSAL),
}
SCORES: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "none": (None, lambda s: s),
    "function": (lambda s, b, h, q, kv: s + 0.1 * h * kv - 0.2 * b, lambda s: s + 0.1 * H * KEY - 0.2 * B),
    "cap and bias": ([flexmasks.scores.softcap(cap=1.5), BIAS], lambda s: 1.5 * torch.tanh(s / 1.5) + BIAS),
}
ROWS: dict[str, tuple[Any, list[int]]] = {
    "all": (None, list(range(Q))),
    "last": (slice(-5, None), list(range(Q - 5, Q))),
    "range": (range(1, 12, 3), [1, 4, 7, 10]),
    "one": (-1, [Q - 1]),
    "list": ([7, -1, 0, 7], [7, Q - 1, 0, 7]),
    "tensor": (torch.tensor([3, 2], dtype=torch.int32), [3, 2]),
    "one tensor": (torch.tensor(-2), [Q - 2]),
}
HEADS_OF: dict[str, tuple[Any, list[int]]] = {
    "all": (None, list(range(HEADS))),
    "some": ([3, 0], [3, 0]),
    "one": (2, [2]),
}
KEY_HEADS = (1, 2, 4)


def inputs(kv_heads: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and logits of sinks that learn."""
    made = torch.Generator().manual_seed(seed)
    sizes = (BATCH, HEADS, Q, 8), (BATCH, kv_heads, KV, 8), (HEADS,)
    q, k, sinks = (torch.randn(size, generator=made).to(dtype).requires_grad_() for size in sizes)
    return q, k, sinks


def plainly(
    q: Tensor, k: Tensor, visible: Tensor, change: Callable[[Tensor], Tensor], scale: float, sinks: Tensor | None
) -> Tensor:
    """Return all weights, [B, H, Q, KV], in float64."""
    owner = [h // (HEADS // k.shape[1]) for h in range(HEADS)]
    scores = change(torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()[:, owner]) * scale)
    numerators = torch.where(visible, (scores - scores.detach().amax(-1, keepdim=True)).exp(), 0.0)
    total = numerators.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.double()[:, None, None] - scores.detach().amax(-1, keepdim=True)).exp()
    return numerators / torch.where(total == 0, 1.0, total)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}


def check(
    mask: str, score: str, rows: str, heads: str, kv_heads: int, dtype: torch.dtype, with_sinks: bool, scale: float
) -> None:
    """Check weights, the greatest ones, and sums per key of one call, with their gradients."""
    (given, visible), (change, plain_change) = MASKS[mask], SCORES[score]
    (chosen, places), (of_heads, numbers) = ROWS[rows], HEADS_OF[heads]
    q, k, sinks = inputs(kv_heads, dtype)
    arguments = given() | {"score": change, "scale": scale, "sink_logits": sinks if with_sinks else None}
    want = plainly(q, k, visible, plain_change, scale, arguments["sink_logits"])
    leaves = [q, k, *[sinks] * with_sinks]

    got = flexmasks.weights(q, k, rows=chosen, heads=of_heads, **arguments)
    of_these = want[:, numbers][:, :, places]
    check_equal(got, of_these, leaves, dtype)
    shown = visible.expand_as(want)[:, numbers][:, :, places]
    assert not got[~shown].any()

    topk = flexmasks.weights(q, k, rows=chosen, heads=of_heads, topk=5, **arguments)
    is_key = torch.arange(5) < shown.sum(-1, keepdim=True)
    check_equal(topk.values, torch.where(is_key, of_these.topk(5).values, 0.0), leaves, dtype)
    assert torch.equal(topk.indices >= 0, is_key)
    assert torch.equal(got.gather(-1, topk.indices.clamp(min=0)) * is_key, topk.values)

    sums = flexmasks.key_sums(q, k, rows=chosen, **arguments)
    check_equal(sums, want[:, :, places].sum(2), leaves, dtype)


def check_equal(got: Tensor, want: Tensor, leaves: list[Tensor], dtype: torch.dtype) -> None:
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    assert got.shape == want.shape
    assert float((got - want).detach().abs().max()) < TOLERANCE[dtype]
    if dtype in (torch.float64, torch.float32):
        into = torch.arange(want.numel(), dtype=torch.float64).view_as(want).cos()
        found, wanted = (torch.autograd.grad((x * into).sum(), leaves, retain_graph=True) for x in (got, want))
        for one, other in zip(found, wanted, strict=True):
            assert float((one - other).abs().max()) < 10 * TOLERANCE[dtype]


EXAMPLES = [
    *map(st.sampled_from, (sorted(MASKS), sorted(SCORES), sorted(ROWS), sorted(HEADS_OF), KEY_HEADS, list(TOLERANCE))),
    st.booleans(),
    st.sampled_from((8**-0.5, 1.7)),
]


def test_weights_and_sums() -> None:
    try_examples(12, check, *EXAMPLES)


@pytest.mark.campaign
def test_weights_and_sums_of_many_calls() -> None:
    try_examples(300, check, *EXAMPLES)


def test_gradients_of_small_calls() -> None:
    q, k, sinks = inputs(2)
    q, k, sinks = q[:1, :2, :3, :2], k[:1, :1, :3, :2], sinks[:2]
    table = torch.randn(2, 3, 3, dtype=torch.float64)

    def call(function: Any, **more: Any) -> Any:
        def called(q: Tensor, k: Tensor, sinks: Tensor, table: Tensor) -> Any:
            return function(q, k, mask="causal", score=table, sink_logits=sinks, **more)

        return called

    leaves = [x.detach().requires_grad_() for x in (q, k, sinks, table)]
    assert torch.autograd.gradcheck(call(flexmasks.weights, rows=[1, -1], heads=[1]), leaves, fast_mode=True)
    assert torch.autograd.gradcheck(call(flexmasks.key_sums, rows=slice(1, 3)), leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call(flexmasks.key_sums), leaves, fast_mode=True)


def test_equal_scores_and_few_keys() -> None:
    """Of equal scores the earlier keys count, and weights that are 0 by rounding belong to keys that are seen."""
    for dtype in (torch.float32, torch.float64):
        zero = torch.zeros(1, 1, 6, 4, dtype=dtype)
        values, indices = flexmasks.weights(zero, -zero, mask="causal", topk=4)
        assert indices[0, 0].tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1], *[[0, 1, 2, 3]] * 3]
        assert values[0, 0, 1].tolist() == [0.5, 0.5, 0, 0]
        score = torch.tensor([-2000.0, 0.0, -1000.0, -0.0, -torch.inf, 0.5]).to(dtype)[None, None, None]
        found = flexmasks.weights(zero, zero, score=score, topk=8, rows=0)
        assert found.indices.tolist() == [[[[5, 1, 3, 2, 0, -1, -1, -1]]]]
        assert found.values[0, 0, 0, 3:].tolist() == [0] * 5
        assert flexmasks.weights(zero, zero, topk=1, heads=[]).indices.shape == (1, 0, 6, 1)
        steps = torch.randint(4, (6, 50), generator=torch.Generator().manual_seed(0)).to(dtype)
        for topk in (1, 7, 20):
            keys = flexmasks.weights(zero, zero.new_zeros(1, 1, 50, 4), score=steps, topk=topk).indices[0, 0]
            for row, found in zip(steps.tolist(), keys.tolist(), strict=True):
                assert found == sorted(range(50), key=lambda n: -row[n])[:topk]


def test_what_is_hidden_may_be_nan_and_rows_may_see_nothing() -> None:
    q, k, _ = (x.detach() for x in inputs(2, torch.float32))
    shown = (KEY < 4) & (ROW != 3) & (B >= 0) & (H >= 0)
    broken = k.clone()
    broken[:, :, 4:] = torch.nan
    want = plainly(q, k, shown, lambda s: s, 8**-0.5, None)
    got = flexmasks.weights(q, broken, mask=shown)
    assert torch.allclose(got.double(), want, atol=1e-6)
    assert not got[:, :, 3].any()
    values, indices = flexmasks.weights(q, broken, mask=shown, rows=3, topk=2)
    assert (indices == -1).all()
    assert not values.any()
    assert torch.allclose(flexmasks.key_sums(q, k, mask=shown).double(), want.sum(2), atol=1e-5)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_without_queries_or_keys(q_len: int, kv_len: int) -> None:
    q, k = torch.zeros(2, 4, q_len, 8), torch.zeros(2, 2, kv_len, 8)
    assert flexmasks.weights(q, k, mask="causal").shape == (2, 4, q_len, kv_len)
    assert (flexmasks.weights(q, k, mask="causal", topk=3).indices == -1).all()
    assert flexmasks.key_sums(q, k, mask="causal").tolist() == torch.zeros(2, 4, kv_len).tolist()


def test_the_lse_of_a_call() -> None:
    q, k, sinks = inputs(2, torch.float32)
    for rows in (None, slice(-3, None)):
        given: dict[str, Any] = {"mask": "causal", "q_offset": OFFSET, "sink_logits": sinks}
        lse = flexmasks.attention(q, k, k, return_lse=True, **given)[1]
        want = flexmasks.key_sums(q, k, rows=rows, **given)
        assert torch.allclose(flexmasks.key_sums(q, k, rows=rows, lse=lse, **given), want, atol=1e-6)


def test_keys_of_fewer_bits() -> None:
    q, k, _ = (x.detach() for x in inputs(2, torch.bfloat16))
    k = k.to(torch.float8_e4m3fn)
    for function in (flexmasks.weights, flexmasks.key_sums):
        want = function(q, k.bfloat16(), mask="causal", q_offset=OFFSET)
        assert torch.allclose(function(q, k, mask="causal", q_offset=OFFSET), want, atol=1e-5)


def test_weights_under_autocast_are_those_of_its_dtype() -> None:
    q, k, _ = (x.detach() for x in inputs(2, torch.float32))
    half = q.bfloat16(), k.bfloat16()
    for function in (flexmasks.weights, flexmasks.key_sums):
        want = function(*half, mask="causal", q_offset=OFFSET)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(function(q, k, mask="causal", q_offset=OFFSET), want)


class _Largest(TorchDispatchMode):
    """Knows how many elements the largest tensor in memory has that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                _Largest.elements = max(_Largest.elements, x.untyped_storage().nbytes() // x.itemsize)
        return out


def test_no_call_holds_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    length, rows = 2000, 64
    q, k = (torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(2))
    monkeypatch.setattr(weighing, "_AT_ONCE", 1 << 17)
    calls = {
        "rows": lambda: flexmasks.weights(q, k, mask="causal", rows=slice(-rows, None)),
        "topk": lambda: flexmasks.weights(q, k, mask="causal", topk=4).values,
        "sums of rows": lambda: flexmasks.key_sums(q, k, mask="causal", rows=slice(-rows, None)),
    }
    for name, call in calls.items():
        _Largest.elements = 0
        with _Largest():
            call().sum().backward()
        assert _Largest.elements <= 2 * rows * length, name


def test_a_mask_that_changes_before_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighing, "_AT_ONCE", 1)
    q, k, _ = inputs(2)
    ids = IDS[:Q].clone()
    values = flexmasks.weights(q, k[:, :, :Q], mask="document", document_ids=ids, topk=2).values
    ids[0] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


def test_inside_torch_compile() -> None:
    q, k, _ = (x.detach() for x in inputs(2, torch.float32))

    def call(q: Tensor, k: Tensor) -> Tensor:
        return torch.compiler.disable(flexmasks.weights)(q + 1, k, rows=-1).sum(2)

    assert torch.equal(torch.compile(call, backend="eager")(q, k), call(q, k))
    with pytest.raises(Exception, match="disable"):
        torch.compile(lambda q, k: flexmasks.weights(q, k, rows=-1), backend="eager", fullgraph=True)(q, k)


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "row": ({"rows": [Q]}, r"weights: `rows` must be from -13 to 12, got \[13\]"),
    "head": ({"heads": -5}, "weights: `heads` must be from -4 to 3, got -5"),
    "rows of booleans": ({"rows": [True, False]}, r"weights: `rows` must be an int, a slice, or ints \[n\], got"),
    "rows that are text": ({"rows": "last"}, "weights: `rows` must be an int, a slice, or ints .*, got 'last'"),
    "two dimensions": ({"rows": [[1]]}, "weights: `rows` must be an int"),
    "no key": ({"topk": 0}, "weights: `topk` must be an int of at least 1, got 0"),
    "half a key": ({"topk": 1.5}, "weights: `topk` must be an int of at least 1, got 1.5"),
    "no offset": ({"mask": "causal"}, "weights: 13 queries, 17 keys: pass q_offset=4 or 'last'"),
    "sinks": ({"sink_logits": torch.zeros(3)}, r"weights: `sink_logits` must be a floating tensor \[H\] = \[4\]"),
    "a name": ({"mask": "casual"}, "did you mean 'causal'"),
    "another argument": ({"block_mask": None}, "weights: no argument is named `block_mask`"),
    "a function": ({"mask": lambda b, h, q, kv: q - kv, "q_offset": 0}, "must return a boolean tensor"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    arguments, says = ERRORS[name]
    q, k, _ = inputs(2)
    with pytest.raises((ValueError, TypeError), match=f"flexmasks[. ].*{says}|{says}"):
        flexmasks.weights(q, k, **arguments)


def test_errors_of_sums() -> None:
    q, k, _ = inputs(2)
    with pytest.raises(ValueError, match=r"key_sums: `lse` must be a tensor \[B, H, Q\] = \[2, 4, 13\], got"):
        flexmasks.key_sums(q, k, lse=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="key_sums: q and k must have one head size D"):
        flexmasks.key_sums(q, k[..., :4])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_and_sums_on_a_gpu(dtype: torch.dtype) -> None:
    """Sums on each backend that runs them, and documents of new ids."""
    made = torch.Generator(device="cuda").manual_seed(0)
    q, k = (torch.randn(2, n, 1024, 64, generator=made, device="cuda").to(dtype).requires_grad_() for n in (8, 2))
    for backend in ("auto", "flex", "reference"):
        for _ in range(3):
            ids = (torch.rand(2, 1024, generator=made, device="cuda") < 0.01).cumsum(1)
            masks: Any = flexmasks.masks.causal() & flexmasks.masks.document(document_ids=ids)
            shown = flexmasks.dense_mask(masks, 1024, batch=2).cpu()
            exact = [x.detach().double().cpu().requires_grad_() for x in (q, k)]
            scores = exact[0] @ exact[1].repeat_interleave(4, 1).mT / 8
            want = torch.where(shown, scores, -torch.inf).softmax(-1)
            got = flexmasks.weights(q, k, mask=masks, rows=slice(-64, None), heads=[7, 1])
            assert torch.allclose(got.double().cpu(), want[:, [7, 1], -64:], atol=2e-6)
            best = flexmasks.weights(q, k, mask=masks, topk=8)
            assert torch.allclose(best.values.double().cpu(), want.topk(8).values, atol=2e-6)
            assert torch.equal(
                (best.indices >= 0).cpu(), torch.arange(8) < shown.sum(-1, keepdim=True).expand(-1, 8, -1, -1)
            )
            sums = flexmasks.key_sums(q, k, mask=masks, backend=backend)
            assert torch.allclose(sums.double().cpu(), want.sum(2), rtol=1e-4, atol=1e-4)
            found = torch.autograd.grad(sums.square().sum(), [q, k])
            wanted = torch.autograd.grad(want.sum(2).square().sum(), exact)
            for one, other in zip(found, wanted, strict=True):
                error = (one.double().cpu() - other).norm() / other.norm()
                assert float(error) < (2e-4 if dtype == torch.float32 else 2e-2)
