"""Plans of masks with tensors: recorded, renewed for new tensors, captured in CUDA graphs."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from helpers import (
    DEVICES,
    TOLERANCE,
    captured,
    check_equal_block_masks,
    documents,
    error,
    in_campaigns,
    on_gpu_of,
    one_in,
    without_waits,
)
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

import flexmasks
from benchmarks import private_torch
from flexmasks import Mask, context, get_mask, road
from flexmasks.blocks.lists import of_block_mask, pairs_shown
from flexmasks.context import Context
from flexmasks.plans import mask_plan, sizes
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.whole import added_of
from flexmasks.request import Request
from flexmasks.spec.bands import factors_of
from flexmasks.spec.parameters import Size
from flexmasks.spec.parts import PartOfCall, part_of, rows_of

BATCH, HEADS, LENGTH = 2, 2, 512
CPU = torch.device("cpu")


def of_ids(ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv])


# Masks with new tensors at every call: what a training loop has.
NEW: dict[str, Callable[[str], dict[str, Any]]] = {
    "documents": lambda device: {
        "mask": get_mask("causal") & get_mask("document", document_ids=documents(device=device))
    },
    "grouped_tril": lambda device: {
        "mask": "grouped_tril",
        "seq_lens": torch.randint(0, LENGTH + 1, (BATCH,), device=device),
    },
    "key_padding": lambda device: {
        "mask": "key_padding",
        "attention_mask": torch.arange(LENGTH, device=device) < torch.randint(1, LENGTH, (BATCH, 1), device=device),
    },
    "lambda": lambda device: {"mask": of_ids(documents(device=device))},
    "ALiBi": lambda device: {
        "mask": get_mask("causal") & get_mask("document", document_ids=documents(device=device)),
        "score": "alibi",
        "slopes": torch.rand(HEADS, device=device),
    },
    "windows": lambda device: {
        "mask": get_mask("sliding_window", window=torch.tensor(int(torch.randint(60, ())), device=device))
        | get_mask("local", left=torch.tensor(int(torch.randint(9, ())), device=device), right=3)
    },
    "packed": lambda device: {
        "mask": get_mask(
            "packed",
            inner=get_mask("sliding_window", window=50),
            offsets=torch.tensor([0, int(torch.randint(1, 200, ())), 300, LENGTH]).to(device),
        )
    },
    "q_offset": lambda device: {"mask": "causal", "q_offset": torch.randint(0, 9, (BATCH,), device=device)},
}


TURNS = ("from the start", "renewed")


@pytest.fixture(params=TURNS)
def on_cpu_too(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew calls on a CPU as on a GPU, or not."""
    if request.param == "renewed":
        monkeypatch.setattr(road, "_KINDS_ON", ("cpu", "cuda"))


def qkv(device: str, requires_grad: bool = False, kind: str = "") -> list[Tensor]:
    """Return q, k and v; queries that start later are fewer, so that they end among the keys."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    lengths = LENGTH - 8 if kind == "q_offset" else LENGTH, LENGTH, LENGTH
    shapes = [(BATCH, HEADS, n, 32) for n in lengths]
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=requires_grad) for shape in shapes]


def dense(params: dict[str, Any], q_len: int) -> Tensor:
    """Return the whole mask of a call's arguments, as booleans."""
    arguments = {n: v for n, v in params.items() if n not in ("score", "slopes")}
    return flexmasks.dense_mask(arguments.pop("mask"), q_len, LENGTH, batch=BATCH, heads=HEADS, **arguments)


def expected(tensors: list[Tensor], params: dict[str, Any], device: str) -> Tensor:
    """Return SDPA with the dense mask, in float64."""
    q, k, v = (x.detach().double() for x in tensors)
    visible = dense(params, q.shape[2]).expand(BATCH, HEADS, -1, -1)
    bias = torch.zeros_like(visible, dtype=torch.float64)
    if "slopes" in params:
        position = torch.arange(LENGTH, device=device)
        bias = bias - params["slopes"].double()[:, None, None] * (position[:, None] - position).abs()
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~visible, -torch.inf))
    return out.nan_to_num(0.0).cpu()


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("on_cpu_too", "kind"), one_in(8, list(product(TURNS, NEW))), indirect=["on_cpu_too"])
@pytest.mark.usefixtures("on_cpu_too")
def test_new_tensors_at_every_step(kind: str, device: str) -> None:
    """Nothing is compiled after the first step, and every step is right."""
    tensors = qkv(device, kind=kind)
    graphs = None
    for _ in range(5):
        params = NEW[kind](device)
        out = flexmasks.attention(*tensors, **params)
        again = flexmasks.attention(*tensors, **params)  # another layer with the same tensors
        assert torch.equal(out, again)
        assert error(out, expected(tensors, params, device)) < 2 * TOLERANCE[out.dtype]
        assert graphs in (None, private_torch.compiled_graphs())
        graphs = private_torch.compiled_graphs()


@pytest.mark.parametrize("on_cpu_too", ["renewed"], indirect=True)
@pytest.mark.usefixtures("on_cpu_too", "quick_kernels")
def test_a_score_that_learns_is_no_renewed_call() -> None:
    """Earlier calls with tensors of the same layout had no gradients."""
    q, k, v = qkv("cpu")
    for learns in (False, False, False, True):
        slopes = (torch.rand(HEADS) / LENGTH).requires_grad_(learns)
        out = flexmasks.attention(q, k, v, mask="causal", score="alibi", slopes=slopes)
        assert out.requires_grad == learns
    leaf = slopes.detach().double().requires_grad_()
    at = torch.arange(LENGTH)
    scores = q.double() @ k.double().mT / 32**0.5 - leaf[:, None, None] * (at[:, None] - at)
    want = scores.masked_fill(at[:, None] < at, -torch.inf).softmax(-1) @ v.double()
    (got,), (exactly,) = (torch.autograd.grad(x.square().sum(), y) for x, y in ((out, slopes), (want, leaf)))
    assert torch.allclose(got.double(), exactly, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NEW)
def test_steps_with_gradients_neither_wait_nor_compile(kind: str) -> None:
    tensors = qkv("cuda", requires_grad=True, kind=kind)

    def step(params: dict[str, Any]) -> None:
        out = tensors[0]
        for _ in range(2):
            out = flexmasks.attention(out, *tensors[1:], **params)
        out.sum().backward()

    params = [NEW[kind]("cuda") for _ in range(8)]
    for p in params[:2]:
        step(p)
    graphs = private_torch.compiled_graphs()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for p in params[2:]:
            step(p)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert private_torch.compiled_graphs() == graphs


def test_the_backend_does_not_depend_on_values() -> None:
    q = torch.randn(1, 1, 256, 16)
    same, distinct = torch.zeros(256, dtype=torch.int32), torch.arange(256, dtype=torch.int32)
    names = {flexmasks.explain(q, q, q, mask="document", document_ids=ids).backend for ids in (same, distinct)}
    assert len(names) == 1


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("slopes", [None, torch.rand(8), torch.rand(8).bfloat16()], ids=["none", "float", "half"])
def test_biases_of_alibi_take_no_memory_for_each_head(slopes: Tensor | None, bidirectional: bool) -> None:
    """Few queries have one row of numbers for all heads."""
    flexmasks.clear_caches()
    q, k = torch.randn(2, 8, 1, 16), torch.randn(2, 8, 1000, 16)
    call: dict[str, Any] = {"mask": "full", "score": "alibi", "slopes": slopes, "bidirectional": bidirectional}
    starts = [torch.tensor([499 + n, 899 + n]) for n in range(3)]  # plans live as long as they
    for call["q_offset"] in starts:
        out = flexmasks.attention(q, k, k, backend="decode", **call)
        assert error(out, flexmasks.attention(q, k, k, backend="reference", **call)) < 1e-5
    assert flexmasks.cache_info()["plans"].parts["added"].bytes == 3 * 4 * (2 * 1000 + 8)


def test_factors_of_alibi_inside_others() -> None:
    """In sequences laid end to end, in parts of a call and in rows, what is added is that of the function."""
    slopes, offsets = torch.rand(4), torch.tensor([0, 5, 9])
    alibi = flexmasks.get_score("alibi", slopes=slopes, bidirectional=True)
    part = PartOfCall(batch=2, heads=4, length=12, first_head=1, first_position=3)
    places = [torch.tensor(x) for x in ([1, 0], [3, 4], [8, 9], [0, 6])]
    rows = rows_of(alibi, *places, tokens=12)
    for score, size in (
        (flexmasks.scores.packed(alibi, offsets), Size(1, 4, 9, 9, torch.device("cpu"))),
        (part_of(alibi, part), Size(1, 2, 5, 7, torch.device("cpu"))),
        (rows, Size(2, 4, 3, 12, torch.device("cpu"), 3)),
    ):
        assert factors_of(score, size) is not None
        assert ScorePlan(score, size, size.q_offset).added.weight is not None
        want = added_of(score, size.q_offset, size)
        assert error(ScorePlan(score, size, size.q_offset).added.product(), want.double()) < 1e-6
    for more in ({"kv_offsets": [0, 4, 9]}, {"q_start": 1}, {"q_start": torch.tensor([1, 2])}):
        score = flexmasks.scores.packed(alibi, offsets, **more)
        assert factors_of(score, Size(1, 4, 9, 9, torch.device("cpu"))) is None


# --- block masks of new tensors ---


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan block masks on a CPU as where the host would wait for values."""
    monkeypatch.setattr(context, "reads_at_once", lambda device: False)
    monkeypatch.setattr(mask_plan.MaskPlan, "_check_values", lambda self: None)


# By the ids of documents: a mask, and the same as torch takes it.
OF_IDS: dict[str, Callable[[Tensor], tuple[Any, Callable[..., Tensor]]]] = {
    "document": lambda ids: (
        get_mask("document", document_ids=ids),
        lambda b, h, q, kv: ids[b, q] == ids[b, kv],
    ),
    "causal & document": lambda ids: (get_mask("causal") & get_mask("document", document_ids=ids), of_ids(ids)),
    "sliding_window & document": lambda ids: (
        get_mask("sliding_window", window=40) & get_mask("document", document_ids=ids),
        lambda b, h, q, kv: (q >= kv) & (q - kv <= 40) & (ids[b, q] == ids[b, kv]),
    ),
    "key_padding": lambda ids: (
        get_mask("key_padding", attention_mask=ids < 4),
        lambda b, h, q, kv: ids[b, kv] < 4,
    ),
    "lambda": lambda ids: (of_ids(ids), of_ids(ids)),
}


def shown(made: BlockMask, device: str) -> Tensor:
    """Return the pairs that a block mask shows."""
    at = torch.arange(LENGTH, device=device)
    by_function = create_mask(made.mask_mod, BATCH, 1, LENGTH, LENGTH, device)
    return pairs_shown(of_block_mask(made), made.BLOCK_SIZE, at, at, by_function)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OF_IDS)
@pytest.mark.usefixtures("as_on_gpu")
def test_block_masks_of_new_tensors_wait_for_nothing(name: str, device: str) -> None:
    flexmasks.clear_caches()
    tensors = qkv(device)
    for step in range(7):
        mask, function = OF_IDS[name](documents(device=device))
        with without_waits(device) if step > 1 else contextlib.nullcontext():
            made = flexmasks.block_mask(mask, LENGTH, batch=BATCH)
        want = create_block_mask(function, BATCH, 1, LENGTH, LENGTH, device)
        assert torch.equal(shown(made, device), create_mask(function, BATCH, 1, LENGTH, LENGTH, device))
        blocks, needed = (int(x.kv_num_blocks.sum() + x.full_kv_num_blocks.sum()) for x in (made, want))
        assert blocks <= 1.25 * needed
        if step in (0, 6):  # the first is exact, and others are if that is wanted
            checked = made if step == 0 else flexmasks.block_mask(mask, LENGTH, batch=BATCH, check=True)
            check_equal_block_masks(checked, want)
    given = {"backend": "reference"} if device == "cpu" else {}
    got, expected = (flexmasks.attention(*tensors, **way, **given) for way in ({"block_mask": made}, {"mask": mask}))
    assert error(got, expected.double().cpu()) < 2 * TOLERANCE[got.dtype]


@pytest.mark.usefixtures("as_on_gpu")
def test_block_masks_by_bounds_travel() -> None:
    flexmasks.clear_caches()
    for _ in range(3):
        mask, function = OF_IDS["causal & document"](documents())
        made = flexmasks.block_mask(mask, LENGTH, batch=BATCH)
    visible = create_mask(function, BATCH, 1, LENGTH, LENGTH, "cpu")
    for other in (pickle.loads(pickle.dumps(made)), made.to("cpu")):
        assert torch.equal(shown(other, "cpu"), visible)


@pytest.mark.usefixtures("as_on_gpu")
def test_values_of_a_block_mask_are_checked_if_that_is_wanted() -> None:
    flexmasks.clear_caches()
    call: dict[str, Any] = {"mask": "grouped_tril", "q_len": LENGTH}
    flexmasks.block_mask(**call, seq_lens=torch.tensor([9, LENGTH]))
    wrong = torch.tensor([9, LENGTH + 1])
    flexmasks.block_mask(**call, seq_lens=wrong)
    for more in ({"check": True}, {"as_data": True}):
        with pytest.raises(ValueError, match=r"`seq_lens` .* 513"):
            flexmasks.block_mask(**call, **more, seq_lens=wrong)


@pytest.mark.usefixtures("as_on_gpu")
def test_each_kind_shows_that_it_needs_no_batch() -> None:
    """Earlier calls of the same sizes were told the number of batch elements."""
    flexmasks.clear_caches()
    for _ in range(2):
        flexmasks.block_mask(of_ids(documents()[:1]), LENGTH, batch=1)
    with pytest.raises(ValueError, match="depends on its batch index; pass `batch`"):
        flexmasks.block_mask(of_ids(documents()[:1]), LENGTH)


# --- CUDA graphs ---


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NEW)
def test_captured_calls_see_changes_in_place(kind: str) -> None:
    tensors = qkv("cuda", kind=kind)
    params = NEW[kind]("cuda")
    graph, out = captured(lambda: flexmasks.attention(*tensors, **params))
    held = list(_tensors_of(params))
    for _ in range(50):
        for place, new in zip(held, _tensors_of(NEW[kind]("cuda")), strict=True):
            place.copy_(new)
        graph.replay()
        assert error(out, expected(tensors, params, "cuda")) < 2 * TOLERANCE[out.dtype]


def _tensors_of(params: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors of a call's arguments, those that a mask holds included."""
    for value in params.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mask):
            yield from value._tensors()
        elif callable(value):
            yield from get_mask(value)._tensors()


@pytest.mark.slow
@pytest.mark.parametrize("on_cpu_too", [in_campaigns("from the start"), "renewed"], indirect=True)
@pytest.mark.usefixtures("on_cpu_too")
@pytest.mark.parametrize("device", DEVICES)
def test_one_tensor_in_two_places(device: str) -> None:
    """Two tensors come in its places at the next call."""
    tensors = qkv(device)

    def check(left: Tensor, right: Tensor) -> None:
        params = {"mask": "local", "left": left, "right": right}
        out = flexmasks.attention(*tensors, **params)
        assert error(out, expected(tensors, params, device)) < TOLERANCE[tensors[0].dtype]

    flexmasks.clear_caches()
    for left, right in ((3, 3), (50, 50), (7, 7), (4, 60), (60, 4)):
        left_tensor = torch.tensor(left, device=device)
        check(left_tensor, left_tensor if left == right else torch.tensor(right, device=device))


@pytest.mark.slow
def test_planning_again_needs_a_call_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(road, "_KINDS_ON", ("cpu", "cuda"))
    q = torch.randn(BATCH, HEADS, LENGTH, 32)
    flexmasks.clear_caches()

    def planned_again(params: dict[str, Any]) -> Any:
        return road.plan_again(road.known_call(q, q, q, Request(params={}, **params), Context.now(q.device)))

    assert planned_again(NEW["documents"]("cpu")) is None
    for _ in range(2):
        flexmasks.attention(q, q, q, **NEW["documents"]("cpu"))
    params = NEW["documents"]("cpu")
    replay = planned_again(params)
    assert replay is not None
    assert error(replay(q, q, q).out, expected([q, q, q], params, "cpu")) < 1e-5


@pytest.mark.parametrize(
    ("capability", "block_size"),
    [((9, 0), (128, 128)), ((10, 0), (256, 128)), ((11, 0), (256, 128)), ((12, 0), (128, 128))],
)
def test_block_sizes_suit_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], block_size: tuple[int, int]
) -> None:
    on_gpu_of(monkeypatch, capability)
    size = Size(1, 1, 4096, 4096, torch.device("cuda", 0))
    assert sizes.block_size_for(size) == block_size


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(700, 700), (100, 900)])
@pytest.mark.parametrize("kind", ["causal", "documents", "own"])
def test_blocks_of_256_queries(
    monkeypatch: pytest.MonkeyPatch, kind: str, lengths: tuple[int, int], device: str
) -> None:
    monkeypatch.setattr(road, "block_size_for", lambda size: (256, 128))
    flexmasks.clear_caches()
    q_len, kv_len = lengths
    ids = torch.arange(kv_len, device=device) // 230

    def own(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & ((kv + h) % 3 != 0)

    mask, mask_mod = {
        "causal": (get_mask("causal"), lambda b, h, q, kv: q >= kv),
        "documents": (
            get_mask("cross_document", q_document_ids=ids[:q_len].clone(), kv_document_ids=ids.clone()),
            lambda b, h, q, kv: ids[q] == ids[kv],
        ),
        "own": (get_mask(own), own),
    }[kind]
    q, k, v = (torch.randn(2, 2, n, 32, device=device, requires_grad=True) for n in (q_len, kv_len, kv_len))
    out = flexmasks.attention(q, k, v, mask=mask, q_offset=0)
    seen = create_mask(mask_mod, 2, 2, q_len, kv_len, device=device)
    wanted = scaled_dot_product_attention(q, k, v, attn_mask=seen)
    upstream = torch.randn_like(out)
    got, want = ([x, *torch.autograd.grad(x, (q, k, v), upstream)] for x in (out, wanted))
    assert max(error(x, y.cpu()) for x, y in zip(got, want, strict=True)) < TOLERANCE[torch.float32]
