"""Plans of masks: their blocks, the plans of a template for other tensors, and how plans of a kind are made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import check_equal_block_masks, documents, error, one_in
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

import flexmasks
from flexmasks import Mask, get_mask
from flexmasks.blocks.lists import lists_of
from flexmasks.cache import PLANS, Part
from flexmasks.plans import mask_plan, plan
from flexmasks.plans.bounds import SizedMask
from flexmasks.plans.mask_plan import GivenPlan, MaskPlan
from flexmasks.plans.recorded import Recorded
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.whole import whole_of
from flexmasks.spec.aliases import Aliases
from flexmasks.spec.parameters import Size
from flexmasks.spec.structure import Opaque

BATCH, HEADS, LENGTH = 2, 2, 512
CPU = torch.device("cpu")
SIZE = Size(BATCH, 1, LENGTH, LENGTH, CPU)
_IMAGE = {"height": 32, "width": 40, "kernel": 5}


def of_ids(ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv])


# Masks of documents and the same function as torch takes it.
OF_IDS: dict[str, Callable[[Tensor], Any]] = {
    "lambda": of_ids,
    "names": lambda ids: get_mask("causal") & get_mask("document", document_ids=ids),
}


def torchs_blocks(ids: Tensor, block_size: tuple[int, int] = (128, 128), heads: int = 1) -> BlockMask:
    return create_block_mask(of_ids(ids), BATCH, heads, LENGTH, LENGTH, "cpu", BLOCK_SIZE=block_size)


def shown(mask_mod: Callable[..., Tensor]) -> Tensor:
    return create_mask(mask_mod, BATCH, 1, LENGTH, LENGTH, "cpu")


@pytest.mark.parametrize("block_size", [(128, 128), (64, 256)])
@pytest.mark.parametrize("name", OF_IDS)
def test_blocks_are_those_of_torch(name: str, block_size: tuple[int, int]) -> None:
    ids = documents(LENGTH)
    planned = MaskPlan(get_mask(OF_IDS[name](ids)), SIZE, block_size=block_size)
    check_equal_block_masks(planned.block_mask, torchs_blocks(ids, block_size))
    other = planned.resized((32, 32))
    check_equal_block_masks(other.block_mask, torchs_blocks(ids, (32, 32)))
    assert planned.resized((32, 32)) is other
    assert planned.resized(block_size) is planned


# --- templates ---


@pytest.mark.parametrize("with_aliases", [False, True])
@pytest.mark.parametrize("name", OF_IDS)
def test_templates_make_blocks_of_other_tensors(name: str, with_aliases: bool) -> None:
    """Exact ones where bounds are not allowed. Tensors may lie in pieces."""
    aliases = Aliases() if with_aliases else None
    template = MaskPlan(get_mask(OF_IDS[name](documents(LENGTH))), SIZE, aliases=aliases).template()
    for ids in (documents(LENGTH), documents(LENGTH), documents(2 * LENGTH)[:, ::2]):
        planned = template.with_tensors([ids])
        assert planned.inputs == [ids]
        check_equal_block_masks(planned.block_mask, torchs_blocks(ids))
        assert torch.equal(shown(planned.mod()), shown(of_ids(ids)))
        assert torch.equal(shown(planned.bound()), shown(of_ids(ids)))


def test_templates_run_what_plans_of_their_kind_have_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a plan of a template then take no work of the mask's function in Python."""
    calls: list[int] = []
    by_bounds = mask_plan.plan_bounds
    monkeypatch.setattr(mask_plan, "plan_bounds", lambda kind: calls.append(1) or by_bounds(kind))
    flexmasks.clear_caches()
    for _ in range(3):  # the second plan is recorded
        ids = documents(LENGTH)
        planned = MaskPlan(get_mask(of_ids(ids)), SIZE, aliases=Aliases(), allows_bounds=True)
        assert planned.block_mask is not None
    template = planned.template()
    monkeypatch.setattr(mask_plan, "build", lambda *_: pytest.fail("planned exactly"))
    monkeypatch.setattr(plan, "PROGRAMS", None)  # nor is anything looked up
    monkeypatch.setattr(mask_plan, "PROGRAMS", None)
    for _ in range(3):
        ids = documents(LENGTH)
        made = template.with_tensors([ids]).block_mask
        assert torch.equal(shown(made.mask_mod), shown(of_ids(ids)))
        listed, needed = made.to_dense(), torchs_blocks(ids).to_dense()
        assert (listed >= needed).all()
        assert listed.sum() <= 1.25 * needed.sum()
    assert len(calls) == 1


def test_starts_are_the_last_tensor_of_a_template() -> None:
    starts, size = torch.tensor([0, 100]), Size(BATCH, 1, 100, LENGTH, CPU)
    template = MaskPlan(get_mask("sliding_window", window=torch.tensor(30)), size, starts, aliases=Aliases()).template()
    for window, at in ((9, [5, 200]), (200, [412, 0])):
        starts = torch.tensor(at)
        planned = template.with_tensors([torch.tensor(window), starts])
        assert planned.offset is starts

        def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, starts=starts, window=window) -> Tensor:  # type: ignore[no-untyped-def]
            return (starts[b] + q >= kv) & (starts[b] + q - kv <= window)

        check_equal_block_masks(planned.block_mask, create_block_mask(visible, BATCH, 1, 100, LENGTH, "cpu"))


class Firsts(NamedTuple):
    """A form of a kernel's own."""

    firsts: Tensor  # int64 [B or 1, H or 1, Q]


def test_a_kernel_brings_a_form_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once for unchanged tensors, and recorded for the others as all forms are."""
    monkeypatch.setattr(plan, "_PLANS_TO_RECORD", 2)
    cache: Part[Firsts] = Part(PLANS, "firsts of tests")
    made: list[int] = []

    def firsts_of(given: SizedMask) -> list[Tensor]:
        made.append(1)
        return [whole_of(given).visible.byte().argmax(-1)]

    for _ in range(4):
        ids = documents(LENGTH)
        for _ in range(2):
            planned = MaskPlan(get_mask("document", document_ids=ids), SIZE)
            firsts = planned.made(cache, Firsts, firsts_of).firsts
            assert torch.equal(firsts, shown(lambda b, h, q, kv, ids=ids: ids[b, q] == ids[b, kv]).byte().argmax(-1))
    assert len(made) == 2  # with the tensors of the first plan, and to record


def _plans() -> dict[str, tuple[Any, list[Tensor]]]:
    """A plan of each class, of which forms have been made, and its tensors."""
    ids, slopes, starts = documents(LENGTH), torch.rand(HEADS), torch.tensor([0, 3])
    size = Size(BATCH, HEADS, LENGTH - 3, LENGTH, CPU)
    mask = MaskPlan(get_mask(of_ids(ids)), size, starts, aliases=Aliases(), allows_bounds=True)
    score = ScorePlan(flexmasks.get_score("alibi", slopes=slopes), size, starts, aliases=Aliases())
    assert mask.block_mask is not None
    assert mask.resized((32, 32)).block_mask is not None
    assert mask.whole is not None
    assert score.mod() is not None
    given = torchs_blocks(ids)
    lists = [t for t in lists_of(given) if t is not None]
    of_given = GivenPlan(given, aliases=Aliases())
    assert of_given.numbers is not None
    return {"mask": (mask, [ids, starts]), "score": (score, [slopes, starts]), "given": (of_given, [ids, *lists])}


@pytest.mark.parametrize("which", one_in(3, ["mask", "score", "given"]))
def test_templates_hold_no_tensor(which: str) -> None:
    """Neither the user's nor an alias of one, which would hold its memory."""
    flexmasks.clear_caches()
    plans = _plans()
    planned, tensors = plans[which]
    template = planned.template()
    assert [t is x for t, x in zip(planned.inputs, tensors, strict=True)] == [True] * len(tensors)
    memory = [weakref.ref(t.untyped_storage()) for t in tensors]
    del planned, tensors, plans
    gc.collect()
    assert all(ref() is None for ref in memory)
    assert template.template is not None


def test_templates_of_scores_learn() -> None:
    """Gradients flow into the tensors of the plan that a template makes."""
    distances = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    size = Size(BATCH, HEADS, LENGTH, LENGTH, CPU)
    score = flexmasks.get_score("alibi", slopes=torch.rand(HEADS, requires_grad=True))
    template = ScorePlan(score, size).template()
    at = torch.arange(HEADS)[:, None, None], torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    for _ in range(2):
        slopes, weights = torch.rand(HEADS, requires_grad=True), torch.randn(HEADS, LENGTH, LENGTH)
        score_mod = template.with_tensors([slopes]).mod()
        got = score_mod(torch.zeros(()), torch.tensor(0), *at)
        want = slopes[:, None, None] * distances
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(x, slopes, weights)[0] for x in (got, want)))


class _Settings:
    window = 9


_SETTINGS = _Settings()


def test_no_template_is_of_what_may_change_unnoticed() -> None:
    limits, settings = torch.tensor([30, 60]), [_SETTINGS]
    opaque = get_mask(lambda b, h, q, kv: (kv < limits[b]) & (q - kv < settings[0].window))
    planned = MaskPlan(opaque, SIZE)
    assert planned.opaque
    with pytest.raises(Opaque):
        planned.template()
    given = create_block_mask(of_ids(documents(LENGTH)), BATCH, 1, LENGTH, LENGTH, "cpu")
    with pytest.raises(Opaque):  # it would hold the user's own function
        GivenPlan(given).template()
    given.mask_mod = opaque._definition.function
    with pytest.raises(Opaque):
        GivenPlan(given, aliases=Aliases()).template()


def test_templates_of_given_blocks() -> None:
    """The lists are inputs as the captured tensors are."""
    planned = GivenPlan(torchs_blocks(documents(LENGTH)), aliases=Aliases())
    template = planned.template()
    assert planned.resized((64, 64)) is None
    assert planned.resized((128, 128)) is planned
    for _ in range(2):
        ids = documents(LENGTH)
        want = torchs_blocks(ids)
        other = template.with_tensors([ids, *lists_of(want)])
        check_equal_block_masks(other.block_mask, want)
        assert torch.equal(shown(other.mod()), shown(of_ids(ids)))
        assert other.block_size == (128, 128)
        assert other.kernel_key == planned.kernel_key


# --- plans of one kind ---


def test_a_function_that_reads_values_is_planned_exactly() -> None:
    """It cannot be recorded, and `explain` says so."""
    lens = torch.tensor([40, 60])

    def mask_of(lens: Tensor) -> Mask:
        limit = lens.clone()
        return get_mask(lambda b, h, q, kv: kv < (limit[b] if int(limit.max()) > 50 else limit[b] - 1))

    q = torch.randn(2, 1, 64, 16)
    for _ in range(3):
        mask = mask_of(lens)
        out = flexmasks.attention(q, q, q, mask=mask, backend="reference")
        assert (
            error(out, scaled_dot_product_attention(q, q, q, attn_mask=flexmasks.dense_mask(mask, 64, batch=2))) < 1e-5
        )
    assert "exact" in flexmasks.explain(q, q, q, mask=mask_of(lens)).plan


def test_a_mask_that_ranges_hardly_understand_is_planned_exactly() -> None:
    """Bounds would compute every block."""
    q = torch.randn(1, 1, 512, 16)
    for _ in range(3):
        ids = documents()[0]
        mask = get_mask(lambda b, h, q, kv, ids=ids: torch.fmod(ids[q].double() - ids[kv], 1e9).sin() == 0)
        out = flexmasks.attention(q, q, q, mask=mask, backend="reference")
        assert error(out, scaled_dot_product_attention(q, q, q, attn_mask=flexmasks.dense_mask(mask, 512))) < 1e-5
    assert "blocks" in flexmasks.explain(q, q, q, mask=mask).plan


def test_other_lengths_need_no_exact_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once bounds of a function are known to be good, they plan it at any length from the first call on."""
    flexmasks.clear_caches()
    exact: list[int] = []
    build = mask_plan.build
    monkeypatch.setattr(mask_plan, "build", lambda *args: exact.append(args[3]) or build(*args))
    for length in (64, 64, 96, 160, 96):
        ids = documents(length)
        q = torch.randn(BATCH, 1, length, 16)
        mask = get_mask("document", document_ids=ids)
        out = flexmasks.attention(q, q, q, mask=mask, backend="reference")
        want = scaled_dot_product_attention(q, q, q, attn_mask=flexmasks.dense_mask(mask, length))
        assert error(out, want) < 1e-5
    assert exact == [64]
    with pytest.raises(ValueError, match="seq_lens"):
        flexmasks.attention(q, q, q, mask="grouped_tril", seq_lens=torch.tensor([1, 97]))


def test_layouts_of_tensors_are_kinds_of_their_own() -> None:
    """A tensor of other strides is planned by its own values."""
    q = torch.randn(2, 1, 64, 16)
    for ids in (documents(64), documents(128)[:, ::2], documents(64).T.contiguous().T):
        for _ in range(3):
            params = {"mask": get_mask("document", document_ids=ids.clone(memory_format=torch.preserve_format))}
            out = flexmasks.attention(q, q, q, **params, backend="reference")
            mask = flexmasks.dense_mask(params["mask"], 64)
            assert error(out, scaled_dot_product_attention(q, q, q, attn_mask=mask)) < 1e-5


@pytest.mark.parametrize(("q_len", "backend"), [(4, "auto"), (130, "reference")])
def test_an_offset_that_is_a_parameter_too(q_len: int, backend: str) -> None:
    """Calls with one tensor in both places are recorded for themselves; others have two tensors."""
    batch, keys = 2, 300
    q, (k, v) = torch.randn(batch, 2, q_len, 8), torch.randn(2, batch, 2, keys, 8)

    def check(prefix_len: Tensor, starts: Tensor) -> None:
        out = flexmasks.attention(q, k, v, mask="prefix_lm", prefix_len=prefix_len, q_offset=starts, backend=backend)
        at_q = (starts[:, None] + torch.arange(q_len))[:, None, :, None]
        visible = (torch.arange(keys) <= at_q) | (torch.arange(keys) < prefix_len[:, None, None, None])
        assert error(out, scaled_dot_product_attention(q.double(), k.double(), v.double(), visible)) < 1e-5

    for n in range(17):  # on a CPU, plans of few queries are recorded the 16th time
        both = torch.tensor([n, 3 * n + 1])
        check(both, both)
    for n in range(17):
        check(torch.tensor([200 - n, 20]), torch.tensor([10 + n, 100]))
    check(both, both)


def test_lengths_that_change_are_recorded_late_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There recording takes as long as many plans, which would be lost where each step has another length."""
    recordings = []
    monkeypatch.setattr(plan, "Recorded", lambda *args, **kwargs: recordings.append(1) or Recorded(*args, **kwargs))
    flexmasks.clear_caches()

    def step(length: int) -> int:
        q = torch.randn(1, 2, length, 16, requires_grad=True)
        mask = get_mask("document", document_ids=torch.arange(length) // 7)
        assert flexmasks.explain(q, q, q, mask=mask).backend == "short"
        flexmasks.attention(q, q, q, mask=mask)
        return len(recordings)

    assert [step(length) for length in range(100, 120)] == [0] * 20
    assert [step(64) for _ in range(20)] == [0] * 15 + [1] * 5


def _of_documents(length: int, each: int) -> Mask:
    return get_mask("document", document_ids=torch.arange(length) // each)


@pytest.mark.parametrize("mask", [_of_documents(1280, 200), get_mask("natten", **_IMAGE)], ids=["tensor", "tables"])
def test_the_blocks_that_are_computed(mask: Mask) -> None:
    """As many of 128 x 128 for 128 queries, in blocks of any size, of this mask or the first of its kind."""
    flexmasks.clear_caches()
    size = Size(1, 1, 1280, 1280, CPU)
    blocks = mask.blocks(1280, block_size=128)
    found = MaskPlan(mask, size).computed(1)
    assert found[:3] == (blocks.full / 10, blocks.partial / 10, True)
    smaller = mask.blocks(1280, block_size=64)
    flexmasks.clear_caches()
    assert MaskPlan(mask, size, block_size=(64, 64)).computed(1)[:2] == (smaller.full / 40, smaller.partial / 40)


def test_the_first_mask_of_a_kind_says_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones of about the same lengths are not looked at."""
    flexmasks.clear_caches()
    first = MaskPlan(_of_documents(1280, 200), Size(1, 1, 1280, 1280, CPU)).computed(1)
    monkeypatch.setattr(MaskPlan, "_prepared", property(lambda self: pytest.fail("its blocks are looked at")))
    assert MaskPlan(_of_documents(1100, 30), Size(1, 1, 1100, 1100, CPU)).computed(1) == first
    for other in (
        get_mask("prefix_lm", prefix_len=torch.tensor([30])),
        get_mask("document", document_ids=torch.arange(640) % 2),  # no sequences
    ):
        assert MaskPlan(other, Size(1, 1, 640, 640, CPU)).computed(1, may_look=False) == (2.5, 1, False, 0, 1)


_WINDOWS = {"causal": {}, "full": {}, "sliding_window": {"window": 256}, "local": {"left": 128, "right": 512}}


@pytest.mark.parametrize("name", _WINDOWS)
def test_the_blocks_of_a_window_are_known_without_a_look(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = get_mask(name, **_WINDOWS[name])
    blocks = mask.blocks(2048, block_size=128)
    monkeypatch.setattr(MaskPlan, "_prepared", property(lambda self: pytest.fail("its blocks are looked at")))
    found = MaskPlan(mask, Size(1, 1, 2048, 2048, CPU)).computed(1)
    assert found.full == pytest.approx(blocks.full / 16, rel=0.1)
    assert found.partial == pytest.approx(blocks.partial / 16, rel=0.2)
