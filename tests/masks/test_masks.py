"""Every registered mask against the oracle written from its definition."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functions import short_and_campaign
from helpers import (
    DEVICES,
    THREE_OF_EACH,
    TOLERANCE,
    arguments,
    check_lse,
    check_oracle,
    error,
    exact,
    in_campaigns,
    is_turn,
    label,
    not_for_flash,
    noted_bounds_hold,
    one_in,
    qkv,
    skip_unless_flash_takes,
    spread,
    try_examples,
)
from hypothesis import strategies as st
from oracles import MASK_CASES, MASKS, Case, attend, dense
from oracles.case import int32, int64, runs
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention

import flexmasks
from benchmarks import private_torch
from flexmasks import Mask
from flexmasks.masks.natten import seen_by_words, words_of
from flexmasks.plans.bounds import reads_made_tensors
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.spec import Band, Size
from flexmasks.spec.definitions import definition
from flexmasks.spec.structure import replaced


@pytest.mark.parametrize("name", sorted({m.name for m in flexmasks.list_masks()} | set(MASKS)))
def test_a_mask_has_an_oracle_and_three_cases(name: str) -> None:
    check_oracle(name, "mask", MASKS, MASK_CASES)


@pytest.mark.parametrize("case", MASK_CASES, ids=label)
def test_dense_mask(case: Case) -> None:
    got = flexmasks.dense_mask(
        case.name, case.q_len, case.kv_len, batch=case.batch, heads=case.heads, **arguments(case)
    )
    want = dense(case)
    assert got.dtype == torch.bool
    assert all(n in (1, full) for n, full in zip(got.shape[:2], want.shape[:2], strict=True))
    assert torch.equal(got.expand_as(want), want)


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    """Return whole numbers as a tensor of the dtype if they fit in it, else the unchanged value."""
    numbers = torch.tensor(value) if isinstance(value, list) else value
    if not isinstance(numbers, torch.Tensor) or numbers.is_floating_point() or numbers.dtype == torch.bool:
        return value
    return numbers.to(dtype) if torch.equal(numbers.to(dtype).long(), numbers.long()) else value


@pytest.mark.parametrize("case", MASK_CASES, ids=label)
def test_small_whole_numbers(case: Case) -> None:
    wide, want = arguments(case), dense(case)
    for dtype in (torch.uint8, torch.int8, torch.int16):
        params = {name: value if name == "q_offset" else _narrowed(value, dtype) for name, value in wide.items()}
        if any(params[name] is not value for name, value in wide.items()):
            got = flexmasks.dense_mask(case.name, case.q_len, case.kv_len, batch=case.batch, heads=case.heads, **params)
            assert torch.equal(got.expand_as(want), want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("name", ["sasa", "natten"])
def test_orders_in_small_whole_numbers(name: str, dtype: torch.dtype) -> None:
    count = torch.iinfo(dtype).max + 1
    params: dict[str, Any] = {"height": 8, "width": count // 8}
    params |= {"window": 9} if name == "sasa" else {"kernel": 5}
    order = torch.randperm(count)
    want = flexmasks.dense_mask(name, count, order=order, **params)
    assert torch.equal(flexmasks.dense_mask(name, count, order=order.to(dtype), **params), want)


def test_more_documents_than_small_whole_numbers() -> None:
    none = torch.full((300,), -1, dtype=torch.int8)
    seen = flexmasks.dense_mask("shared_prefix", 300, document_ids=torch.arange(300), prefix_of=none)
    assert torch.equal(seen[0, 0], torch.eye(300, dtype=torch.bool))


def test_shared_prefixes_in_small_whole_numbers() -> None:
    for ids, prefix_of in ((torch.tensor([255, 0]), [-1] * 256), (torch.tensor([44, 0]), [300] + [-1] * 300)):
        seen = flexmasks.dense_mask("shared_prefix", 2, document_ids=ids.byte(), prefix_of=prefix_of)
        assert seen[0, 0].tolist() == [[True, False], [False, True]]


def test_nothing_in_lists() -> None:
    assert not flexmasks.dense_mask("bsr", 4, crow_indices=[0, 0, 0], col_indices=[], block=2).any()
    assert torch.equal(flexmasks.dense_mask("vertical_slash", 4, vertical=[], slash=[0])[0, 0], torch.eye(4).bool())


# --- functions that kernels compute in place of a mask's own ---


@pytest.mark.parametrize("by_words", [True, False])
@pytest.mark.parametrize("case", [c for c in MASK_CASES if definition("mask", c.name).compiled], ids=label)
def test_what_kernels_compute(case: Case, by_words: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where words are not faster, as on canvases whose sizes are powers of two."""
    if not by_words:
        for module in ("natten", "sasa"):
            monkeypatch.setattr(sys.modules[f"flexmasks.masks.{module}"], "are_words_faster", lambda *_: False)
    flexmasks.clear_caches()
    sizes = case.batch, case.heads, case.q_len, case.kv_len
    planned = flexmasks.block_mask(
        case.name, case.q_len, case.kv_len, batch=case.batch, heads=case.heads, block_size=16, **arguments(case)
    )
    assert torch.equal(create_mask(planned.mask_mod, *sizes, "cpu"), dense(case))


@st.composite
def neighborhoods(draw: st.DrawFn) -> tuple[str, dict[str, Any], int]:
    """Neighborhoods on small canvases, and the number of their pixels."""
    canvas = draw(st.lists(st.integers(1, 7), min_size=2, max_size=3))
    order = draw(st.none() | st.permutations(range(math.prod(canvas))))
    params: dict[str, Any] = dict(zip(("depth", "height", "width")[-len(canvas) :], canvas, strict=True))
    if len(canvas) == 2 and draw(st.booleans()):
        window = tuple(draw(st.integers(0, 9)) for _ in canvas)
        return "sasa", params | {"window": window, "order": order}, math.prod(canvas)
    dilation = tuple(draw(st.integers(1, n)) for n in canvas)
    kernel = tuple(draw(st.integers(1, n // d)) for n, d in zip(canvas, dilation, strict=True))
    stride = tuple(draw(st.integers(1, k)) for k in kernel)
    params |= {"dilation": dilation, "kernel": kernel, "stride": stride, "order": order}
    params["causal"] = tuple(draw(st.booleans()) for _ in canvas)
    return "natten" if len(canvas) == 2 else "natten3d", params, math.prod(canvas)


def _check_neighborhood(drawn: tuple[str, dict[str, Any], int]) -> None:
    name, params, tokens = drawn
    planned = flexmasks.block_mask(name, tokens, block_size=16, **params)
    got = create_mask(planned.mask_mod, 1, 1, tokens, tokens, "cpu")
    assert torch.equal(got, flexmasks.dense_mask(name, tokens, **params))


@pytest.mark.slow
@short_and_campaign(30, 1000)
def test_neighborhoods_as_kernels_compute_them(examples: int) -> None:
    try_examples(examples, _check_neighborhood, neighborhoods())


@pytest.mark.parametrize("count", [2**10, 2**13])
def test_neighborhoods_that_fit_no_word(count: int) -> None:
    """Coordinates and guard bits of 31 bits together fit in one word."""
    axis = 2**10
    fields = [(axis - 1, *[torch.arange(4, dtype=torch.int32)] * 3), (count // 2 - 1, *[torch.zeros(4).int()] * 3)]
    fields.append((2**9 - 1, *[torch.zeros(4).int()] * 3))
    words = words_of(Size(1, 1, 4, 4, torch.device("cpu")), fields)
    assert (words is not None) == (count == 2**10)
    if words is not None:
        i = torch.arange(4)
        assert torch.equal(seen_by_words(i[:, None], i[None], words), torch.eye(4, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "params", "has_words"),
    [
        ("natten3d", {"depth": 6, "height": 10, "width": 12, "kernel": 3}, True),
        ("natten3d", {"depth": 6, "height": 8, "width": 16, "kernel": 3}, False),  # a GPU divides by shifts
        ("natten3d", {"depth": 6, "height": 8, "width": 16, "kernel": 3, "dilation": (1, 2, 1)}, True),
        ("natten", {"height": 10, "width": 12, "kernel": 3}, False),
        ("natten", {"height": 10, "width": 12, "kernel": 3, "stride": 3}, True),
        ("sasa", {"height": 10, "width": 12, "window": 3}, False),
    ],
)
def test_neighborhoods_whose_coordinates_are_dear(name: str, params: dict[str, Any], has_words: bool) -> None:
    """Which of them get words depends on the device; only there kernels are said to read tensors."""
    tokens = math.prod(params.get(axis, 1) for axis in ("depth", "height", "width"))
    size = Size(1, 1, tokens, tokens, torch.device("meta"), may_read=False)  # as a GPU, which may not be here
    mask = flexmasks.get_mask(name, **params)
    resolved = mask._resolve(size)
    assert (resolved["words"] is not None) == has_words
    assert reads_made_tensors(mask & "causal", (mask & "causal")._resolve(size)) == has_words
    on_cpu = MaskPlan(mask, Size(1, 1, tokens, tokens, torch.device("cpu")))
    assert on_cpu.computed(1).reads_tensors
    assert (
        not MaskPlan(flexmasks.get_mask("causal"), Size(1, 1, 640, 640, torch.device("cpu"))).computed(1).reads_tensors
    )


@pytest.mark.slow
def test_a_users_function_for_kernels() -> None:
    """Plans call the function, and kernels the one that is compiled."""

    def every_other(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, step: int) -> Tensor:
        return (q >= kv) & (kv % step == 0)

    @flexmasks.register_mask(compiled=every_other)
    def causal_by_step(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, step: int) -> Tensor:
        return q >= kv

    q, k, v = torch.randn(3, 1, 2, 30, 16)
    mask = flexmasks.get_mask("causal_by_step", step=3)
    causal = torch.ones(30, 30, dtype=torch.bool).tril()
    assert torch.equal(flexmasks.dense_mask(mask, 30)[0, 0], causal)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=causal & (torch.arange(30) % 3 == 0))
    with torch.no_grad():
        planned = flexmasks.block_mask(mask, 30)
        compiled = torch.compile(flex_attention, backend="aot_eager")
        assert torch.allclose(compiled(q, k, v, block_mask=planned), want, atol=1e-6)
        call = torch.compile(flexmasks.attention, fullgraph=True, backend="aot_eager")
        assert torch.allclose(call(q, k, v, mask=mask, backend="flex"), want, atol=1e-6)


def test_a_users_mask_that_holds_a_mask() -> None:
    def halved(size: Size, **params: Any) -> Size:
        return dataclasses.replace(size, q_len=size.q_len // 2, kv_len=size.kv_len // 2)

    @flexmasks.register_mask(inner_size=halved)
    def of_pairs(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, inner: Mask) -> Tensor:
        """The inner mask at pairs of tokens."""
        seen: Tensor = inner(b, h, q // 2, kv // 2)
        return seen

    mask = flexmasks.get_mask("of_pairs", inner=flexmasks.get_mask("document", document_ids=[0, 0, 1, 1]))
    want = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool()
    assert torch.equal(flexmasks.dense_mask(mask, 8)[0, 0], want)


def test_a_users_band() -> None:
    @flexmasks.register_mask(band=lambda size: Band(right=0))
    def up_to_here(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Keys up to the query."""
        return q >= kv

    q, k, v = torch.randn(3, 1, 2, 16, 8)
    assert flexmasks.explain(q, k, v, mask="up_to_here").backend == "sdpa"
    out = flexmasks.attention(q, k, v, mask="up_to_here")
    assert torch.equal(out, flexmasks.attention(q, k, v, mask="causal"))


def of_a_table(table: Tensor) -> Mask:
    """Register a mask whose functions captured a tensor, and return it."""

    def compiled(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[kv] & (kv <= q)

    @flexmasks.register_mask(compiled=compiled)
    def by_table(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & table[kv]

    return flexmasks.get_mask("by_table")


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.slow
def test_a_function_for_kernels_that_captured_a_tensor() -> None:
    """A mask that is registered again with another tensor is not computed with the former one."""
    q, k, v = torch.randn(3, 1, 2, 30, 16)
    index = torch.arange(30)
    for n in range(4):
        table = torch.rand(30) < 0.5
        mask = of_a_table(table)
        want = attend(*(exact(x) for x in (q, k, v)), (index <= index[:, None]) & table)[0]
        with torch.no_grad():
            assert error(flexmasks.attention(q, k, v, mask=mask, backend="flex"), want) < TOLERANCE[torch.float32], n
        blind = replaced(mask, [(table, torch.zeros(30, dtype=torch.bool))])
        assert not blind._bind(blind._resolve(None), for_kernels=True)(0, 0, index[:, None], index).any()


def test_a_function_for_kernels_takes_the_same_arguments() -> None:
    with pytest.raises(TypeError, match=r"mask 'near': `compiled` must take the arguments of the mask's function, \(b"):

        @flexmasks.register_mask(compiled=lambda b, h, q, kv: q >= kv)
        def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, window: int) -> Tensor:
            return (q - kv).abs() <= window


@pytest.mark.slow
def test_a_sequence_that_is_longer_than_its_canvas() -> None:
    """Lengths below a bound are not read. Kernels read nothing behind the canvas."""
    offsets = torch.tensor([0, 32, 40])
    inner = flexmasks.get_mask("natten", height=4, width=4, kernel=3)
    mask = flexmasks.packed(inner, offsets, max_length=64)
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    seen = flexmasks.dense_mask(inner, 16)[:, :, :8, :8]
    want = attend(*(exact(x[:, :, 32:]) for x in (q, k, v)), seen)[0]
    for backend in ("reference", "flex"):
        with torch.no_grad():
            out = flexmasks.attention(q, k, v, mask=mask, backend=backend)
        assert error(out[:, :, 32:], want) < TOLERANCE[torch.float32]


# --- attention ---


@pytest.mark.parametrize("case", THREE_OF_EACH, ids=label)
def test_reference_in_float64_with_gradients(case: Case) -> None:
    leaves = [exact(x) for x in qkv(case, torch.float32, grouped=case.kv_len % 2 == 0, size=8, v_size=12)]
    others = [exact(x) for x in leaves]
    out, lse = flexmasks.attention(*leaves, mask=case.name, return_lse=True, backend="reference", **arguments(case))
    want, want_lse = attend(*others, dense(case))
    assert torch.allclose(out, want, atol=1e-12, rtol=1e-12)
    check_lse(lse, want_lse, 1e-12)
    some = ~want_lse.isinf()
    weight, lse_weight = torch.randn_like(out), torch.randn_like(lse)
    ((out * weight).sum() + (lse * lse_weight)[some].sum()).backward()
    ((want * weight).sum() + (want_lse * lse_weight)[some].sum()).backward()
    for x, y in zip(leaves, others, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert torch.allclose(x.grad, y.grad, atol=1e-9, rtol=1e-9)


def _compiled(case: Case, dtype: torch.dtype, device: str, backend: str) -> None:
    v_size = 32 if backend == "flex_flash" or case.q_len % 2 else 48
    leaves = qkv(case, dtype, device, grouped=case.kv_len % 2 == 0, v_size=v_size)
    others = [exact(x) for x in leaves]
    mask = dense(case)
    cuda = device == "cuda"
    with_lse = cuda and backend == "flex"
    with torch.set_grad_enabled(cuda):
        result = flexmasks.attention(
            *leaves, mask=case.name, backend=backend, return_lse=with_lse, **arguments(case, device)
        )
        out = result[0] if with_lse else result
    want, want_lse = attend(*others, mask)
    assert out.dtype == dtype
    assert error(out, want) < TOLERANCE[dtype]
    hidden = ~mask.any(-1)
    assert torch.all(out.cpu()[hidden.expand(out.shape[:3])] == 0)
    if with_lse:
        check_lse(result[1], want_lse, TOLERANCE[dtype])
    with torch.set_grad_enabled(cuda):
        _check_new_tensors(case, leaves, device, backend, with_lse, result)
    if cuda:
        weight = torch.randn_like(out)
        out.backward(weight)
        want.backward(weight.double().cpu())
        for x, y in zip(leaves, others, strict=True):
            assert error(x.grad, y.grad) < 2 * TOLERANCE[dtype]


def _check_new_tensors(case: Case, leaves: list[Tensor], device: str, backend: str, with_lse: bool, want: Any) -> None:
    """Check that calls with new tensors plan without the exact blocks, compile nothing, and give the same."""
    params = arguments(case, device)
    graphs = private_torch.compiled_graphs()
    for _ in range(3):
        renewed = {n: _renewed(v) for n, v in params.items()}
        if all(renewed[n] is params[n] for n in params):
            return
        got = flexmasks.attention(*leaves, mask=case.name, backend=backend, return_lse=with_lse, **renewed)
        for x, y in zip(*((r if with_lse else (r,)) for r in (got, want)), strict=True):
            assert torch.equal(x, y) or error(x, y.detach().double().cpu()) < TOLERANCE[leaves[0].dtype]
    assert private_torch.compiled_graphs() == graphs


def _renewed(value: Any) -> Any:
    """Return a parameter with copies in place of its tensors, inner masks' included."""
    if isinstance(value, Mask):
        params = {n: _renewed(v) for n, v in value.params.items()}
        is_same = all(params[n] is v for n, v in value.params.items())
        return value if is_same else type(value)(value._definition, params)
    return value.clone() if isinstance(value, Tensor) else value


# Each mask has three cases, one in each dtype. A kernel takes seconds to compile, so on a CPU few masks have their own,
# the others in campaigns.
_THREE = spread(MASK_CASES, 3)
_OF_DTYPE = {
    dtype: [_THREE[n + (n // 3 + turn) % 3] for n in range(0, len(_THREE), 3)] for turn, dtype in enumerate(TOLERANCE)
}
_ALONE = ("slices", torch.float32), ("grouped_tril", torch.float16), ("flashmask", torch.bfloat16)
_TODAY = [alone for n, alone in enumerate(_ALONE) if is_turn(n, len(_ALONE))]
_ON_CPU = [
    (case, dtype) if (case.name, dtype) in _TODAY else in_campaigns((case, dtype))
    for dtype, cases in _OF_DTYPE.items()
    for case in cases
]


def _by_turns(dtypes: list[torch.dtype]) -> list[Any]:
    """Return each mask in each dtype. The suite tries some masks each day, in one of the dtypes."""
    return one_in(
        4,
        [
            (case, dtype) if n % len(dtypes) == turn else in_campaigns((case, dtype))
            for turn, dtype in enumerate(dtypes)
            for n, case in enumerate(_OF_DTYPE[dtype])
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), _ON_CPU, ids=label)
def test_compiled_cpu(case: Case, dtype: torch.dtype) -> None:
    _compiled(case, dtype, "cpu", "flex")


# A case of each mask for 40 positions. Most queries start at 16 or 5; some masks have no other cases of that length.
_SIZES = 2, 2, 40, 40
_LATER = {
    case.name: dataclasses.replace(case, q_len=24, q_offset=(16, 5))
    for case in MASK_CASES
    if (case.batch, case.heads, case.q_len, case.kv_len) == _SIZES and case.q_offset == 0
}
_OTHERS = [
    Case("anchored", {"anchors": int64([[9, 0, -1, 10, 3], [1, 2, 4, -1, 0]]), "block": 8, "context": 10}),
    Case("cross_document", {"q_document_ids": runs([13, 20, 7]), "kv_document_ids": int32([[0, 2] * 20, [1] * 40])}),
    Case("natten", {"height": 5, "width": 8, "kernel": (3, 4), "dilation": (1, 2), "causal": (False, True)}),
    Case("natten3d", {"depth": 2, "height": 4, "width": 5, "kernel": (2, 3, 2), "stride": (1, 2, 1)}),
    Case("packed", {"mask": ("causal", {}), "offsets": int32([0, 11, 11, 30])}),
    Case("paged", {"mask": ("local", {"left": 9, "right": 2}), "page_table": int32([[5, 0, 7], [2, 3, 1]]),
                   "kv_lens": int64([14, 9]), "page_size": 5}),
    Case("sasa", {"height": 8, "width": 5, "window": (1, 2), "order": torch.arange(40).flip(0)}),
    Case("sliding_tile", {"canvas": (4, 8), "tile": (2, 4), "window": (1, 1), "text": 8}),
    Case("vision_cross", {"intervals": int64([[3, 19], [15, 40]]), "image_ids": int64([-1, 0, 1, 0] * 10)}),
]  # fmt: skip
_TOGETHER = list(_LATER.values())
_GROUPS = [_OTHERS, *(_TOGETHER[n : n + 13] for n in range(0, len(_TOGETHER), 13))]


def test_every_mask_is_in_a_kernel() -> None:
    assert {case.name for group in _GROUPS for case in group} == set(MASKS)


@pytest.mark.slow
@pytest.mark.parametrize("cases", one_in(4, _GROUPS), ids=lambda cases: f"{cases[0].name} to {cases[-1].name}")
def test_masks_that_share_a_kernel(cases: list[Case]) -> None:
    """A tensor chooses one of the masks. New tensors, of which it is one, compile nothing from the third call on."""
    leaves = [x.detach() for x in qkv(cases[0], torch.float32, grouped=len(cases) % 2 == 0, v_size=48)]
    graphs = []
    for n, case in enumerate(cases):
        chosen = torch.tensor([n])
        masks = [_renewed(_mask_of(c)) & _chosen(chosen, i) for i, c in enumerate(cases)]
        start = arguments(case)["q_offset"]
        with torch.no_grad():
            out = flexmasks.attention(
                *leaves, mask=functools.reduce(operator.or_, masks), q_offset=start, backend="flex"
            )
        want, _ = attend(*map(exact, leaves), dense(case))
        assert error(out, want) < TOLERANCE[torch.float32], case
        hidden = ~dense(case).any(-1)
        assert torch.all(out[hidden] == 0), case
        graphs.append(private_torch.compiled_graphs())
    assert graphs[1] == graphs[-1]


def _chosen(chosen: Tensor, number: int) -> Any:
    return lambda b, h, q, kv: chosen[0] == number


def _mask_of(case: Case) -> Mask:
    params = arguments(case)
    del params["q_offset"]
    return flexmasks.get_mask(case.name, **params)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), _by_turns(list(TOLERANCE)), ids=label)
def test_compiled_gpu(case: Case, dtype: torch.dtype) -> None:
    _compiled(case, dtype, "cuda", "flex")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), _by_turns([torch.float16, torch.bfloat16]), ids=label)
def test_flash_gpu(case: Case, dtype: torch.dtype) -> None:
    skip_unless_flash_takes(qkv(case, dtype, "cuda"), mask=case.name, **arguments(case, "cuda"))
    _compiled(case, dtype, "cuda", "flex_flash")


@pytest.mark.parametrize("case", THREE_OF_EACH, ids=label)
def test_is_written_for_flash(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexmasks.spec.indexing._DEVICES_OF_CONSTANT_INDICES", ())  # constants are made as on a GPU
    sizes = {"batch": case.batch, "heads": case.heads}
    made = flexmasks.block_mask(case.name, case.q_len, case.kv_len, **sizes, **arguments(case))
    assert not_for_flash(case, made.mask_mod) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dense_kernels_with_gradients(dtype: torch.dtype, causal: bool, device: str) -> None:
    """Plain and causal attention go to torch's SDPA."""
    case = Case("causal" if causal else "full", {}, 2, 4, 150, 150)
    grouped = device == "cpu" or dtype != torch.float32  # torch has no kernel for grouped heads on CUDA in float32
    leaves = qkv(case, dtype, device, grouped)
    others = [exact(x) for x in leaves]
    out = flexmasks.attention(*leaves, mask=case.name, backend="sdpa")
    want, _ = attend(*others, dense(case))
    weight = torch.randn_like(out)
    out.backward(weight)
    want.backward(weight.double().cpu())
    assert error(out, want) < TOLERANCE[dtype]
    for x, y in zip(leaves, others, strict=True):
        assert error(x.grad, y.grad) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("name", sorted(MASKS))
def test_blocks_are_decided_by_ranges(name: str) -> None:
    """At the registered example, hardly any blocks but partial ones are looked at element by element."""
    length = 8192
    blocks = flexmasks.get_mask(name, **(definition("mask", name).example or dict)(length)).blocks(length)
    assert blocks.not_understood == ()
    assert blocks.undecided is not None
    assert blocks.undecided <= 1.25 * blocks.partial + 64


BAD = [
    ("band", {"lower": 1.5, "upper": 2}, TypeError, "`lower` must be int"),
    ("chunked", {"chunk": 0}, ValueError, "`chunk` must be int in 1.."),
    ("block_causal", {}, ValueError, "pass one of the two, .* got neither"),
    ("block_causal", {"block": 4, "ids": [0] * 64}, ValueError, "pass one of the two, .* got both"),
    ("block_diffusion", {"length": 32}, ValueError, "pass one of the two, .* got neither"),
    ("block_diffusion", {"length": 32, "block_ids": [0] * 31}, ValueError, "each of 32 tokens, got 31"),
    ("block_diffusion", {"length": 31, "block_ids": [0] * 31}, ValueError, "make 62 positions, got 64"),
    ("anchored", {"anchors": [0, 33], "block": 32, "context": 32}, ValueError, "at most 32, .* got 33"),
    ("anchored", {"anchors": [0, 3], "block": 16, "context": 32}, ValueError, "a block for each of the 64 .* got 32"),
    ("groups", {"q_group": [0] * 63, "kv_group": [0] * 64}, ValueError, "a group for each of the 64 pos"),
    (
        "intervals",
        {"starts": [0] * 63, "ends": [0] * 63},
        ValueError,
        "`starts` must have an interval for each of the 64",
    ),
    (
        "intervals",
        {"starts": [0] * 64, "ends": [0] * 64, "other_ends": [0] * 64},
        ValueError,
        "pass `other_starts` beside `other_ends`",
    ),
    ("edges", {"crow": [0] * 64 + [2], "col": [0]}, ValueError, "rise from 0 to 1, the length of `col`, got ends"),
    ("edges", {"crow": [0, 1], "col": [0]}, ValueError, "64 positions of queries, and so one number more, got 2"),
    ("edges", {"crow": [], "col": []}, ValueError, "64 positions of queries, and so one number more, got 0 numbers"),
    ("edges", {"crow": [0, 5, 3] + [5] * 62, "col": [0] * 5}, ValueError, r"from 0 to 5, .* got \[5, 3\] at place 1"),
    ("edges", {"crow": [0] * 64 + [1], "col": [64]}, ValueError, "`col` must be below 64, .* got 64"),
    ("topk", {"indices": [[[0], [0], [0]]] * 64}, ValueError, "for each query head, of [0-9]+, got 3"),
    ("topk", {"indices": [[[16]]] * 64, "granularity": 4}, ValueError, "below 16: 64 keys are 16 entries of 4"),
    ("topk", {"indices": [[[0]]] * 63}, ValueError, "`indices` must have a row for each of the 64 pos"),
    ("bigbird", {"length": 60, "block": 4}, ValueError, "length = 60, the call has 64 keys"),
    (
        "cross_document",
        {"q_document_ids": [0] * 63, "kv_document_ids": [0] * 64},
        ValueError,
        "each of the 64 pos",
    ),
    ("shared_prefix", {"document_ids": [2] * 64, "prefix_of": [0, 0]}, ValueError, "has 2 documents, .* up to 2"),
    ("multi_item", {"prefix_len": 65, "item_positions": [0] * 64}, ValueError, "`prefix_len` must be int in 0..S"),
    ("tree", {"parents": [-1, 2, 0]}, ValueError, "before their children, got parent 2 of token 1"),
    ("tree", {"parents": [-1, 0], "start": 63}, ValueError, "2 tokens from position 63 on does not fit in 64"),
    ("flashmask", {"startend_row_indices": [[[[1]] * 64]], "causal": False}, ValueError, "2 or 4 indices .* got 1"),
    ("slices", {"q_ranges": [[0, 9]], "kv_ranges": [[0, 9], [3, 4]]}, ValueError, "`kv_ranges` must be int\\[N, 2\\]"),
    ("slices", {"q_ranges": [[0, 65]], "kv_ranges": [[0, 9]]}, ValueError, "in 0..S \\(here N=1, S=64\\), .* to 65"),
    ("slices", {"q_ranges": [[0, 64]], "kv_ranges": [[0, 65]]}, ValueError, "`kv_ranges` must be int"),
    (
        "slices",
        {"q_ranges": [[0, 64], [5, 3]], "kv_ranges": [[0, 1]] * 2},
        ValueError,
        "`q_ranges` must not end before they start, got \\[5, 3\\] as number 1",
    ),
    ("slices", {"q_ranges": [[0, 4]], "kv_ranges": [[0, 4]], "types": [4]}, ValueError, "`types` must be int\\[N\\]"),
    ("key_padding", {"attention_mask": [[2] * 64]}, ValueError, "`attention_mask` must be bool"),
    ("dense", {"visible": torch.ones(63, 64, dtype=torch.bool)}, ValueError, "64 positions of queries"),
    ("dense", {"visible": torch.ones(64, 64)}, TypeError, "`visible` must be bool"),
    (
        "block_sparse",
        {"visible_blocks": [[True] * 4] * 3, "block": 16},
        ValueError,
        "make 4 x 4 blocks here, got 3 x 4",
    ),
    ("bsr", {"crow_indices": [0, 2, 1], "col_indices": [0, 1], "block": 32}, ValueError, "must rise from 0 to 2"),
    (
        "bsr",
        {"crow_indices": [0, 1, 2], "col_indices": [0, 2], "block": 32},
        ValueError,
        "`col_indices` must be below 2",
    ),
    ("block_topk", {"indices": [[0], [2]], "block": 32}, ValueError, "`indices` must be below 2"),
    ("vertical_slash", {"vertical": [64], "slash": [0]}, ValueError, "`vertical` must be int"),
    ("natten1d", {"length": 64, "kernel": 3, "stride": 4}, ValueError, "`stride` must be at most the kernel"),
    ("natten1d", {"length": 64, "kernel": 33, "dilation": 2}, ValueError, "pass a kernel of at most 32 there"),
    (
        "natten3d",
        {"depth": 4, "height": 4, "width": 5, "kernel": 3},
        ValueError,
        "depth \\* height \\* width = 4 \\* 4",
    ),
    ("sliding_tile", {"canvas": (8, 8), "tile": (3, 4), "window": (1, 1)}, ValueError, "must divide the canvas"),
    ("sliding_tile", {"canvas": (8, 8), "tile": (4, 4), "window": (3, 1)}, ValueError, "fit in its tiles \\(2, 2\\)"),
    ("sliding_tile", {"canvas": (8, 8), "tile": (4, 4, 1), "window": (1, 1)}, ValueError, "the same number of axes"),
    ("sliding_tile", {"canvas": (8, 4), "tile": (4, 4), "window": (1, 1)}, ValueError, "have 32 \\+ 0 = 32 tokens"),
]


@pytest.mark.parametrize(("name", "params", "kind", "words"), BAD)
def test_bad_parameters(name: str, params: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"^flexmasks mask '{name}': .*{words}"):
        flexmasks.block_mask(name, 64, **params)


@pytest.mark.parametrize(
    ("mask", "score", "params"),
    [
        ("dense", None, {"visible": torch.ones(5, 12, dtype=torch.bool)}),
        ("cross_document", None, {"q_document_ids": [0] * 4, "kv_document_ids": [0] * 12}),
        (None, "dense_bias", {"bias": torch.zeros(5, 12)}),
        (None, "distance_bias", {"distances": torch.zeros(4, 12, dtype=torch.int64), "table": torch.zeros(2, 2)}),
    ],
)
def test_rows_of_the_positions_before_the_queries_count(mask: Any, score: Any, params: dict[str, Any]) -> None:
    q, k, v = torch.randn(1, 2, 4, 8), *torch.randn(2, 1, 2, 12, 8)
    for start in (6, torch.tensor([6])):
        with pytest.raises(ValueError, match=r"for each of the 10 positions of queries .*, got [45]"):
            flexmasks.attention(q, k, v, mask=mask, score=score, q_offset=start, **params)


def test_blocks_of_slices_are_those_of_documents() -> None:
    """Slices side by side cost no more than one slice, and leave only partial blocks undecided."""
    ends = torch.tensor([0, 700, 701, 3000, 4096, 6500, 8192])
    ranges = torch.stack([ends[:-1], ends[1:]], 1)
    ids = torch.repeat_interleave(torch.arange(6), ends.diff())
    want = (flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)).blocks(8192)
    cut = (
        ranges[:, 0] + ranges.diff()[:, 0] // 3
    )  # each causal slice is written as one full slice and two causal slices
    upper, lower, left = (ranges[:, 0], cut), (cut, ranges[:, 1]), (ranges[:, 0], cut)
    q_ranges = torch.cat([torch.stack(r, 1) for r in (upper, lower, lower)])
    kv_ranges = torch.cat([torch.stack(r, 1) for r in (upper, lower, left)])
    types = torch.tensor([1, 1, 0]).repeat_interleave(6)
    for mask in (
        flexmasks.get_mask("slices", q_ranges=ranges, kv_ranges=ranges, types=[1] * 6),
        flexmasks.get_mask("slices", q_ranges=q_ranges, kv_ranges=kv_ranges, types=types),
    ):
        got = mask.blocks(8192)
        assert (got.partial, got.full, got.undecided) == (want.partial, want.full, want.partial)
        assert torch.equal(got.block_mask.to_dense(), want.block_mask.to_dense())


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.slow
def test_slices_of_one_kernel_with_other_numbers_of_runs() -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 16)
    for kv_ranges in ([[0, 64]] * 2, [[0, 10], [20, 30]], [[0, 10], [10, 30]]):
        params = {"q_ranges": [[0, 64], [5, 60]], "kv_ranges": kv_ranges, "types": [1, 0]}
        want, _ = attend(*map(exact, (q, k, v)), flexmasks.dense_mask("slices", 64, **params))
        assert error(flexmasks.attention(q, k, v, mask="slices", **params), want) < TOLERANCE[q.dtype]


@pytest.mark.parametrize("both_ends", [True, False])
@pytest.mark.parametrize("global_blocks", [0, 1, 2, 3, 9])
def test_global_blocks_of_bigbird(global_blocks: int, both_ends: bool) -> None:
    block = torch.arange(35) // 5
    is_global = (block < global_blocks) | (both_ends & (block >= 7 - global_blocks))
    want = is_global[:, None] | is_global | ((block[:, None] - block).abs() <= 1)
    params = {"length": 35, "block": 5, "global_blocks": global_blocks, "random_blocks": 0, "both_ends": both_ends}
    assert torch.equal(flexmasks.dense_mask("bigbird", 35, **params)[0, 0], want)


def test_the_draw_of_bigbird() -> None:
    """Each row draws its number of random blocks; one seed draws the same blocks, another seed others."""
    params = {"length": 640, "block": 10, "window": 2, "global_blocks": 1, "random_blocks": 5}
    first, again, other = (flexmasks.dense_mask("bigbird", 640, seed=s, **params)[0, 0, ::10, ::10] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first[5:-5].sum(1).tolist() == [5 + 2 + 5] * 54


def test_bounds_that_masks_note_hold() -> None:
    found = set()
    for case in MASK_CASES:
        params = {n: v for n, v in arguments(case).items() if n != "q_offset"}
        if noted_bounds_hold(case, flexmasks.get_mask(case.name, **params)):
            found.add(case.name)
    assert "packed" in found


def test_heads_follow_from_tables_of_heads() -> None:
    q_group, kv_group = torch.tensor([[[0, 1, 2, 0], [1, 1, 0, -1], [2, 0, 0, 0]]]), torch.tensor([0, 1, 0, 2])
    groups = flexmasks.masks.groups(q_group=q_group, kv_group=kv_group)
    shown = (q_group[..., None] == kv_group) & (q_group[..., None] >= 0)
    assert torch.equal(flexmasks.dense_mask(~groups, 4), ~shown)
    assert flexmasks.block_mask(groups, 4).shape == (1, 3, 4, 4)
    q = torch.randn(2, 3, 4, 8)
    want = (q @ q.mT / 8**0.5).masked_fill(~shown, -math.inf).softmax(-1).nan_to_num(0.0) @ q
    assert torch.allclose(flexmasks.attention(q, q, q, mask=flexmasks.plan(groups, 4)), want, atol=1e-6)


def test_sizes_follow_from_the_tables_that_are_not_for_all() -> None:
    random = torch.Generator().manual_seed(0)
    tables = [torch.rand(*shape, 8, 8, generator=random) < 0.5 for shape in ((1, 1), (1, 3), (2, 1))]
    for order in itertools.permutations(tables):
        mask = functools.reduce(operator.and_, (flexmasks.masks.dense(visible=table) for table in order))
        assert torch.equal(flexmasks.dense_mask(mask, 8), tables[0] & tables[1] & tables[2])
        assert flexmasks.block_mask(mask, 8).shape == (2, 3, 8, 8)


def test_edges_of_a_dense_graph_take_no_more_than_its_tiles() -> None:
    """Where values are not read, as on a GPU, the number of tiles with an edge is not known."""
    graph = torch.ones(64, 64, dtype=torch.bool)
    edges = {"crow": torch.arange(65) * 64, "col": torch.arange(64).repeat(64)}
    size = Size(1, 1, 64, 64, torch.device("cpu"), may_read=False)
    prepared = definition("mask", "edges").prepare(size, **edges)  # type: ignore[misc]
    assert len(prepared["words"]) <= 3 * 2 + 1  # of 2 x 2 tiles, a row for edges outside of all rows, an empty tile
    index = torch.arange(64)
    shown = definition("mask", "edges").function(index, index, index[:, None], index, **prepared)
    assert torch.equal(shown, graph)


def test_edges_in_every_second_place_raise_no_warning() -> None:
    crow = torch.arange(9).repeat_interleave(2)[::2]
    torch.set_warn_always(True)  # torch warns of searchsorted once in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # pyproject.toml ignores this one
            shown = flexmasks.dense_mask("edges", 8, crow=crow, col=torch.arange(8))
    finally:
        torch.set_warn_always(False)
    assert torch.equal(shown[0, 0], torch.eye(8, dtype=torch.bool))
