"""Updates of plans that a user holds: which tensors a name means, which values fit, and what an error leaves."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
from helpers import TOLERANCE, error, one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor

import flexmasks
from flexmasks import road
from flexmasks.backends.call import Plans, Ready
from flexmasks.backends.short_gpu import GpuKernel
from flexmasks.plans import data
from flexmasks.plans.held import Launch
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.spec.aliases import Aliases
from flexmasks.spec.parameters import Size

LENGTH = 100


def qkv(length: int = LENGTH, q_len: int | None = None) -> list[Tensor]:
    return [torch.randn(2, 2, n, 16) for n in (q_len or length, length, length)]


def assert_same(got: Tensor, want: Tensor) -> None:
    assert error(got, want) < TOLERANCE[got.dtype]


def numbers(most: int) -> Tensor:
    return torch.randint(0, most, (2,))


def tables(most: int) -> Tensor:
    return torch.randint(0, most, (LENGTH,))


def in_tuple(lens: Tensor) -> Callable[..., Tensor]:
    held = (lens,)
    return lambda b, h, q, kv: kv < held[0][b]


def by_argument(x: Tensor, y: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: (x[q] <= y[kv]) | (q == kv)


# A mask and where queries start, of tensors by their names.
SHARED: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[int], Tensor]]] = {
    "kv_lens, q_offset": (
        lambda kv_lens, q_offset: flexmasks.get_mask("padding", kv_lens=kv_lens) & flexmasks.get_mask("causal"),
        lambda kv_lens, q_offset: q_offset,
        numbers,
    ),
    ", q_offset": (lambda lens, q_offset: in_tuple(lens), lambda lens, q_offset: q_offset, numbers),
    "document_ids, span_ids": (
        lambda document_ids, span_ids: (
            flexmasks.get_mask("document", document_ids=document_ids)
            & flexmasks.get_mask("bidirectional_spans", span_ids=span_ids)
        ),
        lambda *_: 0,
        tables,
    ),
    "x, y": (by_argument, lambda *_: 0, tables),
}


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("names", SHARED)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 99))
def test_each_name_of_a_tensor_is_updated_alone(names: str, seed: int) -> None:
    torch.manual_seed(seed)
    mask, offset, draw = SHARED[names]
    tensors, shared = qkv(q_len=LENGTH if draw is tables else 5), draw(60)
    now = [shared, shared]
    plan = flexmasks.plan(mask(*now), tensors[0].shape[2], LENGTH, q_offset=offset(*now), score="alibi")
    for place in (1, 0, 1):
        if name := names.split(", ")[place]:
            now[place] = draw(60)
            plan.update(**{name: now[place]})
        want = flexmasks.attention(*tensors, mask=mask(*now), q_offset=offset(*now), score="alibi")
        assert_same(flexmasks.attention(*tensors, mask=plan), want)


@pytest.mark.usefixtures("quick_kernels")
def test_one_name_of_two_places_is_updated_in_both() -> None:
    tensors, ids = qkv(), tables(3)

    def mask(ids: Tensor) -> flexmasks.Mask:
        same = flexmasks.get_mask("document", document_ids=ids)
        return same & ~flexmasks.get_mask("document", document_ids=ids // 2) | flexmasks.get_mask("causal")

    plan = flexmasks.plan(mask(ids), LENGTH)
    same = flexmasks.plan(
        flexmasks.get_mask("document", document_ids=ids) & ~flexmasks.get_mask("document", document_ids=ids), LENGTH
    )
    assert len(same.tensors["document_ids"]) == 1
    new = tables(3)
    plan.update(document_ids=new)
    want = flexmasks.get_mask("document", document_ids=new)
    assert_same(flexmasks.attention(*tensors, mask=plan), flexmasks.attention(*tensors, mask=want & ~want | "causal"))


def with_default(bias: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv, *, bias=bias: score + bias[kv]


def in_partial(bias: Tensor) -> Callable[..., Tensor]:
    def add(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, bias: Tensor) -> Tensor:
        return score + bias[kv]

    return functools.partial(add, bias=bias)


@pytest.mark.parametrize("make", [with_default, in_partial])
def test_defaults_of_parameters_have_new_values(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in half precision are copied to q's dtype: from the new tensors, not from those of the first call."""
    monkeypatch.setattr(road, "_KINDS_ON", ("cpu", "cuda"))
    flexmasks.clear_caches()
    plan = flexmasks.plan("causal", LENGTH, score=make(torch.randn(LENGTH).bfloat16()))
    for _ in range(3):
        q, k, v = qkv()
        bias = torch.randn(LENGTH).bfloat16()
        plan.update(bias=bias)
        added = bias.float().expand(LENGTH, -1).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added)
        assert_same(flexmasks.attention(q, k, v, mask=plan), want)
        assert_same(flexmasks.attention(q, k, v, mask="causal", score=make(bias)), want)
    flexmasks.clear_caches()


def test_a_bias_that_a_gpu_reads_where_it_lies_keeps_its_launch() -> None:
    """A CUDA graph that holds the launch would else refuse the update."""
    size = Size(1, 2, LENGTH, LENGTH, torch.device("cpu"))
    aliases = Aliases()
    mask = MaskPlan(flexmasks.get_mask("document", document_ids=tables(3)), size, aliases=aliases)
    score = ScorePlan(flexmasks.get_score("dense_bias", bias=torch.randn(1, 2, LENGTH, LENGTH)), size, aliases=aliases)
    kernel = GpuKernel(1.0, False, False, line=None, summand=score.summand()._replace(tensors=()))
    plans = Plans(mask, score)
    score.tensors[0].add_(1)
    launch = Launch(Ready(kernel, kernel.forms(plans)), plans, is_in_graph=True)
    assert launch.in_place(launch.again()) == []


@pytest.mark.usefixtures("quick_kernels")
def test_updates_forget_calls_whose_masks_grow_too_large_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tables(9).to(torch.uint8)
    plan = flexmasks.plan(lambda b, h, q, kv: -ids[q] > ids[kv], LENGTH)
    flexmasks.attention(*qkv(), mask=plan, backend="flex")
    assert len(plan.launches) == 1
    monkeypatch.setattr(data, "_CAPACITIES", (0,))
    plan.update(ids=tables(200).to(torch.uint8))
    assert not plan.launches


@pytest.mark.parametrize("offsets", [[0, 60, 40, LENGTH], [-3, 5, 40, LENGTH]])
def test_later_scores_of_a_kind_are_checked_on_a_cpu(offsets: list[int]) -> None:
    flexmasks.clear_caches()
    q, k, v = [x.requires_grad_() for x in qkv()]
    call: dict[str, Any] = {"score": "packed", "inner": flexmasks.get_score("alibi"), "backend": "short"}
    for n in range(2):
        flexmasks.attention(q, k, v, offsets=torch.tensor([0, n, 40, LENGTH]), **call)
    with pytest.raises(ValueError, match="offsets"):
        flexmasks.attention(q, k, v, offsets=torch.tensor(offsets), **call)


def test_a_variable_named_as_the_offset_is_not_the_offset() -> None:
    q_offset = torch.tensor([50, 20])
    mask = lambda b, h, q, kv: kv < q_offset[b]  # noqa: E731
    both = flexmasks.plan(mask, 5, LENGTH, q_offset=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="another name for the variable"):
        both.update(q_offset=[3, 3])
    alone = flexmasks.plan(mask, 5, LENGTH, q_offset=0)
    alone.update(q_offset=[3, 3])
    assert alone.q_offset == 0
    tensors = qkv(q_len=5)
    want = flexmasks.attention(*tensors, mask="padding", kv_lens=[3, 3], q_offset=0)
    assert_same(flexmasks.attention(*tensors, mask=alone), want)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("length", [LENGTH, 1300])
def test_values_that_learn_are_refused(length: int) -> None:
    tensors, zeros = qkv(length), torch.zeros(length, length)
    plan = flexmasks.plan("causal", length, score="dense_bias", bias=zeros)
    want = flexmasks.attention(*tensors, mask=plan)

    def updated(bias: Tensor) -> Tensor:
        plan.update(bias=bias)
        return flexmasks.attention(*tensors, mask=plan).sum()

    biases = torch.ones(2, length, length)
    for transform, bias in (
        (lambda f: f, biases[0].requires_grad_()),
        (torch.func.grad, biases[0]),
        (torch.vmap, biases),
    ):
        with pytest.raises(ValueError, match=r"Plan.update: `bias` must .*Pass `bias.detach\(\)`"):
            transform(updated)(bias)
    assert torch.equal(flexmasks.attention(*tensors, mask=plan), want)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("modes", "length"),
    one_in(2, list(itertools.product(["iii", "oio", "ioo", "oii", "ooi", "iio"], [LENGTH, 1300, 1700]))),
)
def test_updates_of_plans_in_inference_mode(length: int, modes: str) -> None:
    """The plan, its first call, and the update are each inside inference mode or outside of it."""
    flexmasks.clear_caches()
    inside = [mode == "i" for mode in modes]
    ids, tensors = torch.arange(length), qkv(length)
    with torch.inference_mode(inside[0]):
        plan = flexmasks.plan("document", length, document_ids=ids // 30)
    with torch.inference_mode(inside[1]):
        flexmasks.attention(*tensors, mask=plan)
    for size in (10, 70):
        with torch.inference_mode(inside[2]):
            plan.update(document_ids=torch.arange(length) // size)
        for mode in (True, False):
            with torch.inference_mode(mode):
                got = flexmasks.attention(*tensors, mask=plan)
            assert_same(got, flexmasks.attention(*tensors, mask="document", document_ids=ids // size))


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.slow
@pytest.mark.parametrize("length", [LENGTH, 1500])
@pytest.mark.parametrize("sizes", [{}, {"batch": 2}, {"heads": 2}, {"batch": 2, "heads": 2}])
@pytest.mark.parametrize("name", ["grouped_tril", "packed"])
def test_updates_that_raise_leave_the_plan(name: str, sizes: dict[str, int], length: int) -> None:
    tensors = qkv(length)
    mask, param, right, wrong = {
        "grouped_tril": (lambda x: flexmasks.get_mask(name, seq_lens=x), "seq_lens", [length, 60], [-5, 2000]),
        "packed": (lambda x: flexmasks.packed("causal", x), "offsets", [0, 60, length], [0, 60, 2 * length]),
    }[name]
    plan = flexmasks.plan(mask(torch.tensor(right)), length, **sizes)
    want = flexmasks.attention(*tensors, mask=plan)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"\b{param}\b"):
            plan.update(**{param: torch.tensor(wrong)})
        assert torch.equal(flexmasks.attention(*tensors, mask=plan), want)


def _with_table(size: Any, *, groups: Tensor) -> dict[str, Any]:
    return {"groups": groups, "table": 2 * torch.arange(int(groups.max()) + 1)}


@pytest.fixture
def of_groups() -> str:
    """The name of a mask that reads a table of as many places as there are groups."""

    @flexmasks.register_mask(prepare=_with_table)
    def of_groups(
        b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, groups: Annotated[Tensor, "int[S]"], table: Any = None
    ) -> Tensor:
        return table[groups[q].clamp(min=0)] == table[groups[kv].clamp(min=0)]

    return "of_groups"


@pytest.mark.usefixtures("quick_kernels")
def test_all_calls_see_values_of_which_tables_have_another_size(of_groups: str) -> None:
    """Calls with and without gradients read the same tensors."""
    tensors, groups = qkv(1300), torch.arange(1300)
    plan = flexmasks.plan(of_groups, 1300, groups=groups // 50)
    for size in (50, 200, 100):
        plan.update(groups=groups // size)
        want = flexmasks.attention(*tensors, mask="document", document_ids=groups // size, backend="reference")
        for learns in (False, True):
            with torch.set_grad_enabled(learns):
                assert_same(flexmasks.attention(*tensors, mask=plan, backend="flex"), want)


def test_updates_that_captured_calls_refuse_leave_the_plan(of_groups: str) -> None:
    tensors, groups = qkv(1300), torch.arange(1300)
    plan = flexmasks.plan(of_groups, 1300, groups=groups // 50)
    want = flexmasks.attention(*tensors, mask=plan, backend="flex")
    for launch in plan.launches.values():
        launch.is_in_graph = True
    with pytest.raises(RuntimeError, match="other shapes"):
        plan.update(groups=groups // 200)
    assert len(plan.launches) == 1
    assert torch.equal(flexmasks.attention(*tensors, mask=plan, backend="flex"), want)
    assert torch.equal(flexmasks.attention(*tensors, mask=plan.mask, backend="flex"), want)


@pytest.mark.usefixtures("quick_kernels")
def test_updates_of_plans_whose_batch_size_shapes_do_not_tell() -> None:
    """A check of values at another batch size than the calls have refuses none."""
    tensors = [torch.randn(4, 2, LENGTH, 16) for _ in range(3)]
    plan = flexmasks.plan("full", LENGTH, score="pair_bias", bias=torch.zeros(2, 2, LENGTH, LENGTH), group=2)
    bias = torch.randn(2, 2, LENGTH, LENGTH)
    for _ in range(2):
        flexmasks.attention(*tensors, mask=plan)
        plan.update(bias=bias)
        want = flexmasks.attention(*tensors, score="pair_bias", bias=bias, group=2)
        assert_same(flexmasks.attention(*tensors, mask=plan), want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("is_list", [False, True])
def test_numbers_that_do_not_fit_are_refused(dtype: torch.dtype, is_list: bool) -> None:
    plan = flexmasks.plan("document", LENGTH, document_ids=torch.arange(LENGTH).to(dtype))
    ids = tables(100)
    plan.update(document_ids=ids.tolist() if is_list else ids)
    assert torch.equal(plan.tensors["document_ids"][0], ids.to(dtype))
    for number in (torch.iinfo(dtype).max + 1, torch.iinfo(dtype).min - 1, 1 << 40):
        wrong = ids.index_fill(0, torch.tensor(7), number)
        with pytest.raises(TypeError, match=rf"`document_ids` must have dtype {dtype}, got torch.int64, whose numbers"):
            plan.update(document_ids=wrong.tolist() if is_list else wrong)
    assert torch.equal(plan.tensors["document_ids"][0], ids.to(dtype))


@pytest.mark.parametrize(
    "value",
    [
        [0] * 1000,
        [[1, 2], [3]] * 200,
        "x" * 1000,
        torch.arange(LENGTH).to_sparse(),
        torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
    ],
    ids=["long", "ragged", "text", "sparse", "nested"],
)
def test_messages_of_wrong_values_are_short(value: Any) -> None:
    plan = flexmasks.plan("document", LENGTH, document_ids=torch.arange(LENGTH))
    with pytest.raises(ValueError, match=r"Plan.update: `document_ids` must be .*, got ") as raised:
        plan.update(document_ids=value)
    assert len(str(raised.value)) < 250


# --- what a plan shows ---

_GROUPS = torch.arange(256) // 128


class _Side:
    def __init__(self) -> None:
        self.ids = torch.arange(256) // 128


@pytest.mark.parametrize("reads", ["a global variable", "an attribute", "the plan's own tensor"])
def test_what_a_plan_shows_follows_changes(reads: str) -> None:
    side = _Side()
    mask: dict[str, Any] = {
        "a global variable": lambda b, h, q, kv: _GROUPS[q] == _GROUPS[kv],
        "an attribute": lambda b, h, q, kv: side.ids[q] == side.ids[kv],
        "the plan's own tensor": flexmasks.get_mask("document", document_ids=side.ids),
    }
    plan = flexmasks.plan(mask[reads], 256)
    assert plan.sparsity == 0.5
    assert plan.blocks is plan.blocks
    own = {"a global variable": _GROUPS, "an attribute": side.ids}
    own.get(reads, plan.mask.params.get("document_ids")).zero_()
    assert plan.sparsity == plan.blocks.sparsity == 0.0
    assert plan.block_mask.to_dense().all()
    if reads == "an attribute":
        for size, sparsity in [(128, 0.5), (256, 0.0)] * 4:  # in memory that former tensors have left
            side.ids = torch.arange(256) // size
            assert plan.sparsity == sparsity
    _GROUPS.copy_(torch.arange(256) // 128)


def test_a_plan_is_the_mask_that_it_explains() -> None:
    plan = flexmasks.plan("causal", LENGTH)
    with pytest.raises(TypeError, match=r"flexmasks.Plan.explain: the plan is the mask; pass no `mask`"):
        plan.explain(*qkv(), mask="full")


def test_devices_have_the_names_that_tensors_give_them() -> None:
    tensors = qkv()
    for plan in (flexmasks.plan("causal", LENGTH, device="cpu:0"), flexmasks.plan("causal", LENGTH).to("cpu:0")):
        assert plan.sizes.device == torch.device("cpu")
        assert_same(flexmasks.attention(*tensors, mask=plan), flexmasks.attention(*tensors, mask="causal"))


@pytest.mark.parametrize("q_offset", [[0, 95], (3, 7), "last", 4])
def test_plans_made_inside_compile_take_the_offsets_of_calls(q_offset: Any) -> None:
    q, k, v = qkv(q_len=5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor) -> Tensor:
        return flexmasks.attention(q, k, v, mask=flexmasks.plan("causal", 5, LENGTH, q_offset=q_offset))

    assert_same(attend(q), flexmasks.attention(q, k, v, mask="causal", q_offset=q_offset))
