"""Inside `flexmasks.invariant` torch's Triton kernels read blocks in one list, and documents that start at blocks."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from flex_without_gpu import _graph
from helpers import TOLERANCE, error, on_gpu_of
from test_invariant import WAYS, Kind, _alone, _decoded, _sequences
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.utils._pytree import tree_map_only

import flexmasks
from flexmasks import get_mask, get_score, inside_compile
from flexmasks.backends import fa4_package, flex, flex_invariant, kernel_tiles, padded, table
from flexmasks.backends.aligned import Aligned, _placed, in_one_list
from flexmasks.backends.encoded import Encoded
from flexmasks.blocks.lists import of_block_mask
from flexmasks.errors import Unfit
from flexmasks.kernels.row_products import less_row_products
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.windows import Look
from flexmasks.spec import Band, Mask, in_sequences
from flexmasks.spec.definitions import define
from flexmasks.spec.encoding import encode
from flexmasks.spec.parameters import Size

CPU = torch.device("cpu")


def every_third(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv <= q) & ((q - kv) % 3 != 1)


def sloped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score + (kv - q) * 0.3


def _ids(*lens: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))


def _shown(block_mask: Any, batch: int, heads: int) -> Tensor:
    """The pairs that a kernel shows which reads the lists by rows, or those by columns, for which it is the same."""
    lengths, blocks = block_mask.seq_lengths, of_block_mask(block_mask)
    assert block_mask.full_kv_num_blocks is None
    assert block_mask.full_q_num_blocks is None
    (by_row, _), by_column = blocks, torch.zeros_like(blocks[0])
    for place in itertools.product(*map(range, block_mask.q_num_blocks.shape)):
        count, listed = int(block_mask.q_num_blocks[place]), block_mask.q_indices[place]
        assert listed[:count].tolist() == sorted(listed[:count].tolist())
        by_column[place[0], place[1], listed[:count].long(), place[2]] = True
    assert torch.equal(by_row, by_column)
    for place in itertools.product(*map(range, block_mask.kv_num_blocks.shape)):
        listed = block_mask.kv_indices[place][: int(block_mask.kv_num_blocks[place])].tolist()
        assert listed == sorted(listed)
    height, width = block_mask.BLOCK_SIZE
    computed = by_row.repeat_interleave(height, 2).repeat_interleave(width, 3)[:, :, : lengths[0], : lengths[1]]
    places = (batch, heads, *lengths)
    indices = [torch.arange(n).view([-1 if d == e else 1 for e in range(4)]) for d, n in enumerate(places)]
    return block_mask.mask_mod(*indices) & computed


def test_one_list_in_the_order_of_keys() -> None:
    mask = get_mask("prefix_lm", prefix_len=150)
    blocks = flexmasks.block_mask(mask, 500, block_size=64, batch=1, heads=2)
    assert blocks.full_kv_num_blocks.any()
    assert torch.equal(_shown(in_one_list(blocks), 1, 1), flexmasks.dense_mask(mask, 500))


def test_full_blocks_stay_full() -> None:
    """Also those of a user, whose function may hide pairs of them."""
    blocks = flexmasks.block_mask("causal", 256, block_size=64)
    blocks.mask_mod = lambda b, h, q, kv: (q >= kv) & (q - kv < 64)
    shown = _shown(in_one_list(blocks, full_are_hidden=True), 1, 1)
    assert torch.equal(shown, flexmasks.dense_mask("causal", 256))


def halves(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return ((q < 150) == (kv < 150)) & (q >= kv)


_OF_USER = define(
    "mask", halves, "halves", band=lambda size: in_sequences(Band(right=0), size, torch.tensor([0, 150, 400]))
)
_LENS = (100, 1, 99, 128, 72)
_OF_DOCUMENTS = {
    "ids": get_mask("document", document_ids=_ids(*_LENS)) & get_mask("prefix_lm", prefix_len=90),
    "ids of each row": get_mask("document", document_ids=torch.stack([_ids(*_LENS), _ids(3, 397)]))
    & get_mask("causal"),
    "promised ids": get_mask("document", document_ids=_ids(*_LENS), contiguous=True, max_documents=5),
    "offsets": flexmasks.packed("prefix_lm", torch.tensor([0, 7, 7, 135, 300]), prefix_len=5),
    "causal, with padding": flexmasks.packed("causal", torch.tensor([0, 7, 7, 135, 300])),
    "function": get_mask("document", document_ids=_ids(*_LENS)) & get_mask(every_third),
    "a user's band": Mask._of(_OF_USER, {}),
}


def _aligned(mask: Any, length: int = 400, block_size: tuple[int, int] = (64, 64)) -> tuple[Aligned, Any]:
    plan = MaskPlan(mask, Size(2, 2, length, length, CPU), block_size=block_size)
    aligned, looks = Aligned.of(plan)
    for look in looks:
        look.confirm()
    aligned = aligned.for_batch(plan.block_mask.kv_num_blocks.shape[0])
    return aligned, aligned.block_mask(plan.block_mask)


@pytest.mark.parametrize("name", _OF_DOCUMENTS)
def test_documents_start_at_blocks(name: str) -> None:
    """And each query sees in the slots what it sees without them."""
    mask = _OF_DOCUMENTS[name]
    aligned, blocks = _aligned(mask)
    shown = _shown(blocks, len(aligned.table), 1)
    want = flexmasks.dense_mask(mask, 400, batch=2)
    for b, slots in enumerate(aligned.slots):
        got = shown[min(b, len(shown) - 1), 0]
        assert torch.equal(got[slots][:, slots], want[min(b, len(want) - 1), 0])
        assert got[slots].sum() == want[min(b, len(want) - 1), 0].sum()  # no padding is seen
        assert aligned.is_causal or not got[aligned.table[b] < 0].any()
        documents = aligned.documents[b][slots]
        starts = slots[torch.cat([torch.tensor([True]), documents[1:] != documents[:-1]])]
        assert (starts % 64 == 0).all()
    assert not aligned.is_wrong


def test_slots_search_no_slices() -> None:
    """Inductor would search the memory that a slice is a view of, from its beginning on."""
    graph = make_fx(lambda starts: tuple(_placed(starts, 1, 400, 768, 128)[:5]))(torch.tensor([0, 100, 400])).graph
    searches = graph.find_nodes(op="call_function", target=torch.ops.aten.searchsorted.Tensor)
    assert searches
    assert all(node.args[0].target is not torch.ops.aten.slice.Tensor for node in searches)


def test_broken_promises_give_nan() -> None:
    mask = get_mask("document", document_ids=_ids(*[4] * 100), contiguous=True, max_documents=5)
    size = replace(Size(2, 2, 400, 400, CPU), may_read=False)
    aligned, _ = Aligned.of(MaskPlan(mask, size))
    x = torch.randn(2, 2, 400, 8)
    assert aligned.taken(aligned.laid(x)).isnan().all()


def test_more_documents_than_the_first_are_found_out() -> None:
    """By a look, once the kernel is launched: their slots are made for as many documents in a row as the first had."""
    first = MaskPlan(
        get_mask("document", document_ids=_ids(200, 200)) & get_mask(every_third), Size(1, 2, 400, 400, CPU)
    )
    slots = [Aligned.of(first)[0].table.shape]
    for lens in ((1, 399), (50,) * 8):
        plan = first.template().with_tensors([_ids(*lens)])
        aligned, looks = Aligned.of(plan)
        slots.append(aligned.table.shape)
        if len(lens) <= 2:
            list(map(Look.confirm, looks))
    assert len({*slots}) == 1
    with pytest.raises(Unfit, match="at most 2 documents in a row"):
        list(map(Look.confirm, looks))


def test_tokens_go_into_slots_and_back() -> None:
    """Gradients too; padding has a token of its document."""
    for name in ("ids", "ids of each row"):
        aligned, _ = _aligned(_OF_DOCUMENTS[name])
        x = torch.randn(2, 3, 400, 4, requires_grad=True)
        laid, weights = aligned.laid(x), torch.randn(2, 3, 400, 4)
        assert torch.equal(aligned.taken(laid), x)
        assert aligned.like(x).shape == laid.shape
        of_slots, gradient = torch.autograd.grad(aligned.taken(laid), (laid, x), weights)
        assert torch.equal(gradient, weights)
        is_padding = (aligned.table < 0).expand(2, -1)
        assert aligned.is_causal == (name == "ids of each row") == (not of_slots.transpose(1, 2)[is_padding].any())
        ids = aligned.documents.expand(2, -1)[:, None, :, None].expand(2, 1, -1, 1).float()
        assert torch.equal(aligned.laid(aligned.taken(ids)), ids)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float | None, options: Any, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """What torch's kernels compute of lists: uncompiled, flex_attention asks the function of a mask alone."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, *torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij"))
    scores = scores.masked_fill(~_shown(block_mask, *q.shape[:2]), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return weights @ v, lse if with_lse else None


def _run(self: Any, q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, *others: Any) -> Any:
    attend = functools.partial(padded.with_padding, _attend) if padded.has_more_tokens(block_mask, q, k) else _attend
    return attend(q, k, v, score_mod, block_mask, *others)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flex run calls on a CPU inside `invariant`, without compiling."""
    flex_on_cpu = replace(table.BACKENDS["flex"], varies=flex_invariant._refuses_documents)
    monkeypatch.setitem(table.BACKENDS, "flex", flex_on_cpu)
    monkeypatch.setattr(flex.Runner, "__call__", _run)


@pytest.mark.parametrize("score", [None, get_score("alibi")], ids=str)
def test_calls_give_what_they_give_outside(on_cpu: None, score: Any) -> None:
    q, k, v = torch.randn(3, 2, 4, 400, 16)
    masks = [get_mask("causal"), *_OF_DOCUMENTS.values(), flexmasks.block_mask(every_third, 400, batch=1, heads=1)]
    for mask in masks:
        given = {"score": score, "mask" if isinstance(mask, flexmasks.Mask) else "block_mask": mask}
        with flexmasks.invariant():
            out = flexmasks.attention(q, k, v, backend="flex", **given)
        assert error(out, flexmasks.attention(q, k, v, backend="reference", **given)) < TOLERANCE[torch.float32]


def test_explain_knows_slots(on_cpu: None) -> None:
    q = torch.randn(1, 2, 400, 16)
    with flexmasks.invariant():
        found = flexmasks.explain(q, q, q, mask=_OF_DOCUMENTS["function"], backend="flex")
    assert found.invariant == "yes"
    assert found.compiles.startswith("yes")


@pytest.mark.slow
def test_graphs_give_what_calls_give(on_cpu: None) -> None:
    """Also where a compiler for debugging reads no lists of blocks."""
    q, k, v = torch.randn(3, 2, 4, 300, 16)
    masks = [flexmasks.packed(inner, torch.tensor([0, 100, 130, 290])) for inner in ("causal", get_mask(every_third))]
    masks += [get_mask("prefix_lm", prefix_len=90)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        with flexmasks.invariant():
            return [flexmasks.attention(q, k, v, mask=mask, score="alibi", backend="flex") for mask in masks]

    for mask, out in zip(masks, attend(q, k, v), strict=True):
        want = flexmasks.attention(q, k, v, mask=mask, score="alibi", backend="reference")
        assert error(out, want) < TOLERANCE[torch.float32]


def test_scattered_documents_are_refused(on_cpu: None) -> None:
    q = torch.randn(1, 1, 200, 16)
    ids = torch.arange(200) % 2
    mask = get_mask("document", document_ids=ids) & get_mask("prefix_lm", prefix_len=20)
    with flexmasks.invariant(), pytest.raises(ValueError, match="tokens on both sides of another one"):
        flexmasks.attention(q, q, q, mask=mask, backend="flex")


# --- which calls, and by which options ---


def _call(mask: Any, dtype: torch.dtype = torch.float32, score: Any = None, **how: Any) -> Any:
    """Return a call of a GPU as graphs of torch.compile see it."""
    batch, length, size, options = (
        how.get(n, d) for n, d in (("batch", 1), ("length", 300), ("size", 64), ("options", {}))
    )
    encoded: list[Any] = [None if x is None else encode(x, CPU).values() for x in (mask, score)]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(how.get("device", "cuda:0")) as device:
        encoded = tree_map_only(Tensor, lambda x: torch.empty_like(x, device=device), encoded)
        q = torch.empty(batch, 4, length, size, dtype=dtype)
        plans = Encoded(encoded[0], score=encoded[1]).plans(q, q)
        return inside_compile._call_of(plans, q, q, q, None, options, (True, False, False), must_be_invariant=True)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which FlashAttention 4 can be called."""
    monkeypatch.setattr(fa4_package, "refuses_package", lambda call: None)
    on_gpu_of(monkeypatch, (9, 0))
    monkeypatch.setattr(kernel_tiles, "float32_is_exact", lambda: True)


_PROMISED = get_mask("document", document_ids=_ids(100, 200), contiguous=True, max_documents=2)
_PADDED = get_mask("padding", kv_lens=torch.tensor([200]))
_MARKS = get_mask("key_padding", attention_mask=torch.ones(1, 300, dtype=torch.bool))
_PAGED = flexmasks.paged("causal", [[0, 1, 2]], [300], 100)
_CAUSAL, _PREFIX = get_mask("causal"), get_mask("prefix_lm", prefix_len=9)
_HALF = torch.bfloat16
_BY_FA4 = "FlashAttention 4 runs such masks here"
_ELSEWHERE = "must know where documents start"


@pytest.mark.parametrize(
    ("reason", "call"),
    [
        (None, (_CAUSAL,)),
        (None, (_CAUSAL & _PROMISED,)),
        (None, (_PREFIX & _PROMISED, _HALF)),
        (None, (flexmasks.packed(_PREFIX, torch.tensor([0, 100, 200])), _HALF)),
        (None, (_CAUSAL & _PADDED,)),
        (None, (_CAUSAL, _HALF, get_score("alibi"))),
        (_BY_FA4, (_CAUSAL, _HALF)),
        (_BY_FA4, (_CAUSAL, _HALF, get_score("softcap", cap=9.0))),
        (_BY_FA4, (_CAUSAL & _PADDED, _HALF)),
        (_BY_FA4, (get_mask("document", document_ids=_ids(100, 200)) & _CAUSAL, _HALF)),
        (_BY_FA4, (flexmasks.packed(_CAUSAL, torch.tensor([0, 100, 200])), _HALF)),
        (_ELSEWHERE, (_CAUSAL | _PROMISED,)),
        (_ELSEWHERE, (~_PROMISED,)),
        (_ELSEWHERE, (flexmasks.packed(_CAUSAL, torch.tensor([0, 9]), torch.tensor([0, 11])),)),
        (_ELSEWHERE, (flexmasks.packed(_CAUSAL, torch.tensor([0, 9]), q_start=3),)),
        (_ELSEWHERE, (flexmasks.packed(_PROMISED, torch.tensor([0, 300])),)),
        ("several", (_PROMISED & flexmasks.packed(_CAUSAL, torch.tensor([0, 9])),)),
        ("marks of padding", (_CAUSAL & _MARKS,)),
        ("in any order", (_PAGED,)),
    ],
)  # fmt: skip
def test_refusals(reason: str | None, call: Sequence[Any], hopper: None) -> None:
    found = flex_invariant.varies(_call(*call))
    assert found is None if reason is None else found is not None and reason in found


def test_refusals_of_calls(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "takes no kernel_options" in str(flex_invariant.varies(_call(_CAUSAL, options={"BLOCK_M": 64})))
    assert "on a CPU" in str(flex_invariant.varies(_call(_CAUSAL, device="cpu")))
    given = MaskPlan(_CAUSAL, Size(1, 4, 300, 300, CPU), block_size=(64, 64), lists=[None])
    call = replace(_call(_CAUSAL), mask=given)
    assert flex_invariant.varies(call) is None  # tiles of float32 have 64 queries
    half = replace(_call(_CAUSAL, _HALF, get_score("alibi")), mask=given)
    assert "do not divide blocks of 64" in str(flex_invariant.varies(half))
    given.opaque = True
    assert "it is not known whether" in str(flex_invariant.varies(replace(_call(_CAUSAL, _HALF), mask=given)))
    monkeypatch.setattr(flex_invariant, "adds_in_order", lambda: False)
    assert "lacks the name" in str(flex_invariant.varies(_call(_CAUSAL)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options_are_fixed(dtype: torch.dtype, hopper: None) -> None:
    """By the dtype, the head sizes and the functions; never by lengths or the batch."""
    calls = [_call(_CAUSAL, dtype, batch=b, length=n) for b, n in ((1, 1), (1, 300), (7, 4096), (1, 100_000))]
    options = list(map(flex_invariant.options, calls))
    assert all(one == options[0] for one in options)
    assert {"BACKEND": "TRITON", "IS_DIVISIBLE": True, flex_invariant.IN_ORDER: True}.items() <= options[0].items()
    assert {"fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1"} <= options[0].keys()
    assert options[0] != flex_invariant.options(_call(_CAUSAL, dtype, size=256))


def test_backward_adds_in_order() -> None:
    """torch's kernels get the sums of rows from an operator, and an output of 0 for their own."""
    assert flex_invariant.adds_in_order()
    functions: Any = (lambda score, *_: score, [], every_third, [])
    for in_order in (True, False):
        options = {flex_invariant.IN_ORDER: True} if in_order else {}
        _, graph = _graph(16, torch.float32, functions, options)
        (backward,) = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention_backward)
        sums = graph.graph.find_nodes(op="call_function", target=less_row_products)
        assert len(sums) == in_order
        *_, out, _, gradient, of_lse = backward.args[:7]
        assert (out.target is torch.ops.aten.expand.default) == in_order
        if in_order:
            assert of_lse is sums[0]
            assert sums[0].args[1] is gradient


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_gradients_of_sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of output and lse."""
    assert flex_invariant.adds_in_order()
    # torch refuses gradients on a CPU, where it has them as plain operations.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    q, k, v = torch.randn(3, 1, 2, 60, 16).requires_grad_()
    weights, of_lse = torch.randn(1, 2, 60, 16), torch.randn(1, 2, 60)
    options: Any = {flex_invariant.IN_ORDER: True}
    sums: list[Tensor] = []
    monkeypatch.setattr(
        flex_invariant, "less_row_products", lambda *args: sums.append(less_row_products(*args)) or sums[-1]
    )
    out, aux = flex_attention(q, k, v, kernel_options=options, return_aux=AuxRequest(lse=True))
    got = torch.autograd.grad((out, aux.lse), (q, k, v), (weights, of_lse))
    scores = q @ k.mT / 4
    want = torch.autograd.grad((scores.softmax(-1) @ v, scores.logsumexp(-1)), (q, k, v), (weights, of_lse))
    assert len(sums) == 1
    assert all(error(x, y) < 2 * TOLERANCE[torch.float32] for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_less_row_products(device: str) -> None:
    x, y = torch.randn(2, 3, 5, 70, 40, device=device).half()
    given = torch.randn(5, 70, 3, device=device).permute(2, 0, 1)
    want = (x.double() * y.double()).sum(-1)
    torch.testing.assert_close(less_row_products(x, y, None, 0.5).double(), -0.5 * want, atol=1e-4, rtol=1e-5)
    got = less_row_products(x, y, given, 2.0)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), given - 2 * want, atol=1e-4, rtol=1e-5)
    assert torch.equal(
        got[1:2, 3:4, 9:11], less_row_products(x[1:2, 3:4, 9:11], y[1:2, 3:4, 9:11], given[1:2, 3:4, 9:11], 2.0)
    )


# --- on a GPU ---

_ALIBI = {"score": "alibi"}
KINDS = {
    "causal": Kind(_CAUSAL, {}),
    "window": Kind(get_mask("sliding_window", window=100), {"scale": 0.2}, sinks=True),
    "alibi": Kind(_CAUSAL, _ALIBI),
    "prefix": Kind(get_mask("prefix_lm", prefix_len=150), {}),
    "function": Kind(get_mask(every_third), {}),
    "functions": Kind(get_mask(every_third), {"score": sloped}),
}
_LOCAL = {"prefix": ("offsets", "varlen", "compiled")}  # ways that say a mask inside documents


_CASES = [
    ("causal", torch.float32, (4, 4, 64)),
    ("causal", torch.float32, (4, 2, 128)),
    ("window", torch.float32, (4, 2, 64)),
    ("alibi", torch.bfloat16, (4, 4, 64)),
    ("alibi", torch.bfloat16, (8, 2, 128)),
    ("alibi", torch.float16, (4, 2, 96)),
    ("prefix", torch.bfloat16, (4, 2, 64)),
    ("prefix", torch.float32, (2, 2, 128)),
    ("function", torch.float32, (2, 1, 256)),
    ("functions", torch.float16, (4, 2, 96)),  # a scale that is no power of two rounds
]
_WAYS = [  # those of a case in one process, which compiles once
    pytest.param(n, way, marks=[pytest.mark.gpu, pytest.mark.xdist_group(f"flex {n}")])
    for n, (kind, *_) in enumerate(_CASES)
    for way in _LOCAL.get(kind, WAYS)
]


@functools.cache
def _each_alone(n: int) -> list[tuple[Tensor, ...]]:
    kind, dtype, shape = _CASES[n]
    made = _sequences("cuda", shape, dtype)
    with flexmasks.invariant():
        found = _alone(made, KINDS[kind])
    span = made.spans()[4]
    q, k, v = (x[span].transpose(0, 1)[None].double() for x in made.tensors[:3])
    given = {"mask": KINDS[kind].mask, "return_lse": True, **KINDS[kind].given(made)}
    out, lse = flexmasks.attention(q, k, v, backend="reference", **given)
    assert error(found[4][0], out[0].transpose(0, 1)) < TOLERANCE[dtype]
    assert error(found[4][1], lse[0].t()) < TOLERANCE[dtype]
    return found


@pytest.mark.parametrize(("n", "way"), _WAYS)
def test_training(n: int, way: str) -> None:
    """Output, lse and gradients of packed sequences are those of each one alone."""
    kind, dtype, shape = _CASES[n]
    made, wrong = _sequences("cuda", shape, dtype), []
    with contextlib.nullcontext() if way == "plan" else flexmasks.invariant():
        got = WAYS[way](made, KINDS[kind])
    for length, one, other in zip(made.lens, got, _each_alone(n), strict=True):
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), one, other, strict=True):
            wrong += [] if torch.equal(x, y) else [(length, name)]
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        ("causal", torch.float32, (4, 2, 64)),
        ("alibi", torch.bfloat16, (8, 2, 128)),
        ("prefix", torch.float16, (4, 4, 64)),
    ],
)
def test_decoding(kind: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Chunks of a prefill and single tokens have the bits of one prefill, from caches of any layout."""
    made = _sequences("cuda", shape, dtype)
    length, room, wrong = 1000, 1280, []
    q, k, v = (x[:length].transpose(0, 1)[None] for x in made.tensors[:3])
    call = {"mask": KINDS[kind].mask, "return_lse": True, **KINDS[kind].given(made)}
    caches = [torch.cat([x, x.new_full((1, x.shape[1], room - length, x.shape[3]), 3.0)], 2) for x in (k, v)]
    with flexmasks.invariant(), torch.no_grad():
        want = flexmasks.attention(q, k, v, **call)
        for first, stop in ((200, 270), (500, 501), (999, 1000)):
            for what, (out, lse) in _decoded(q, k, v, caches, first, stop, call):
                is_same = (
                    torch.equal(out[-1], want[0][0, :, first:stop]),
                    torch.equal(lse[-1], want[1][0, :, first:stop]),
                )
                wrong += [] if all(is_same) else [(what, first, stop, is_same)]
    assert not wrong


_OF_A_PROCESS = """
import hashlib, torch, flexmasks
torch.manual_seed(0)
q, k, v, weights = torch.randn(4, 2, 4, 700, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
with flexmasks.invariant():
    out, lse = flexmasks.attention(q, k, v, mask="causal", score="alibi", return_lse=True)
results = out, lse, *torch.autograd.grad(out, (q, k, v), weights)
print(hashlib.sha256(b"".join(x.detach().float().cpu().numpy().tobytes() for x in results)).hexdigest())
"""


@pytest.mark.gpu
def test_processes_agree(tmp_path: Path) -> None:
    """With caches of their own."""
    found = []
    for n in range(2):
        folders = {name: str(tmp_path / f"{name}{n}") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        done = fresh.run(_OF_A_PROCESS, **folders)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]
