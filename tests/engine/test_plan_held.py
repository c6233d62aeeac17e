"""Plans that a user holds: what they give, what later calls find in them, and how they change."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DEVICES, TOLERANCE, arguments, error, label, one_in, spread
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import MASK_CASES, SCORE_CASES, Case
from quick_kernels import in_cpp_on_day
from quick_kernels import quick_kernels as quick_kernels
from test_kept import refused
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import flexmasks
from flexmasks import pages, road
from flexmasks.plans import plan as plans

BATCH, HEADS, LENGTH = 2, 4, 300
OF_DEVICE = {"cpu": ("auto", "flex", "short", "reference"), "cuda": ("auto", "flex", "short", "reference")}


def qkv(device: str = "cpu", length: int = LENGTH, requires_grad: bool = True) -> list[Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shape = BATCH, HEADS, length, 32
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=requires_grad) for _ in range(3)]


def drawn_ids(device: str, seed: int, length: int = LENGTH) -> Tensor:
    drawn = torch.rand(BATCH, length, generator=torch.Generator().manual_seed(seed)) < 0.02
    return drawn.cumsum(1).to(device)


def same(ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: ids[b, q] == ids[b, kv]


def packed(ids: Tensor) -> flexmasks.Mask:
    return flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)


def seen(ids: Tensor) -> Tensor:
    """Return the pairs that `packed` shows, [B, 1, Q, KV]."""
    position = torch.arange(ids.shape[1], device=ids.device)
    return ((ids[:, :, None] == ids[:, None]) & (position[:, None] >= position))[:, None]


def expected(tensors: list[Tensor], visible: Tensor, bias: Tensor | float = 0.0) -> list[Tensor]:
    """Return SDPA in float64 and its gradients."""
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    added = (torch.zeros_like(visible, dtype=torch.float64) + bias).masked_fill(~visible, -torch.inf)
    out = scaled_dot_product_attention(*leaves, attn_mask=added)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out.sum(), leaves))]


def check(tensors: list[Tensor], ids: Tensor, attend: Callable[..., Tensor], **given: Any) -> None:
    out = attend(*tensors, **given)
    results = [out, *(torch.autograd.grad(out.sum(), tensors) if out.requires_grad else ())]
    for got, want in zip(results, expected(tensors, seen(ids)), strict=False):
        assert error(got, want) < 3 * TOLERANCE[got.dtype]


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", range(4))
def test_plans_take_new_tensors_on_each_backend(device: str, number: int) -> None:
    backend = OF_DEVICE[device][number]
    tensors = qkv(device, requires_grad=(device, backend) != ("cpu", "flex"))
    plan = flexmasks.plan(packed(drawn_ids(device, 0)), LENGTH, batch=BATCH, heads=HEADS)
    for step in range(4):
        for _ in range(2):
            check(tensors, drawn_ids(device, step), flexmasks.attention, mask=plan, backend=backend)
        plan.update(document_ids=drawn_ids(device, step + 1))


def test_later_calls_search_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv()
    plan = flexmasks.plan(packed(drawn_ids("cpu", 0)), LENGTH)
    want = flexmasks.attention(*tensors, mask=plan)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a later call plans")

    for module, name in ((plans, "flatten"), (road, "flatten"), (road, "_simple_key"), (road, "plan_call")):
        monkeypatch.setattr(module, name, refuse)
    assert torch.equal(flexmasks.attention(*tensors, mask=plan), want)


def test_a_new_plan_without_tensors_takes_what_earlier_calls_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv()
    want = flexmasks.attention(*tensors, mask=flexmasks.get_mask("sliding_window", window=9))

    def refuse(*_: Any) -> Any:
        raise AssertionError("the call plans")

    monkeypatch.setattr(road, "run_first_time", refuse)
    for _ in range(2):
        plan = flexmasks.plan("sliding_window", LENGTH, window=9)
        for _ in range(2):
            assert torch.equal(flexmasks.attention(*tensors, mask=plan), want)
    with pytest.raises(AssertionError, match="the call plans"):
        flexmasks.attention(*tensors, mask=flexmasks.plan("sliding_window", LENGTH, window=8))


@pytest.mark.parametrize("made", ["outside", "inside"])
def test_plans_compile(made: str) -> None:
    tensors = qkv()
    plan = flexmasks.plan(packed(drawn_ids("cpu", 0)), LENGTH, batch=BATCH, heads=HEADS)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def two_layers(q: Tensor, k: Tensor, v: Tensor, given: Any) -> Tensor:
        mask = given
        if made == "inside":
            mask = flexmasks.plan(packed(given), q.shape[2], batch=q.shape[0], heads=q.shape[1])
        return flexmasks.attention(flexmasks.attention(q, k, v, mask=mask), k, v, mask=mask)

    for seed in (0, 1):
        ids = drawn_ids("cpu", seed)
        plan.update(document_ids=ids)
        got = two_layers(*tensors, plan if made == "outside" else ids)
        first = expected(tensors, seen(ids))[0]
        want = expected([first, *tensors[1:]], seen(ids))[0]
        assert error(got, want) < 3 * TOLERANCE[got.dtype]


def test_plans_in_activation_checkpoints() -> None:
    tensors, ids = qkv(), drawn_ids("cpu", 3)
    plan = flexmasks.plan(packed(ids), LENGTH)
    check(
        tensors,
        ids,
        lambda *given: checkpoint(lambda *x: flexmasks.attention(*x, mask=plan), *given, use_reentrant=False),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["mask", "score", "block_mask"])
def test_updates_before_the_backward_pass_of_a_checkpoint(how: str, reentrant: bool, device: str) -> None:
    ids = drawn_ids(device, 0)
    plan = flexmasks.plan(packed(ids), LENGTH, batch=BATCH, heads=HEADS)
    if how == "score":
        plan = flexmasks.plan("causal", LENGTH, score=lambda s, b, h, q, kv: s + ids[b, kv], device=device)
    given: dict[str, Any] = {"block_mask": plan.block_mask} if how == "block_mask" else {"mask": plan}
    given["backend"] = "reference" if device == "cpu" else "auto"
    names = {"ids"} & plan.tensors.keys() or {"document_ids"}
    for seed in range(2):
        out = checkpoint(lambda *x: flexmasks.attention(*x, **given), *qkv(device), use_reentrant=reentrant)
        plan.update(**dict.fromkeys(names, drawn_ids(device, seed)))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("backend", ["short", "reference"])
def test_a_change_before_the_backward_pass_raises(backend: str) -> None:
    """Or gives the gradients of the mask of the forward pass, where the backend keeps its own tensors."""
    tensors, ids = qkv(), drawn_ids("cpu", 0)
    plan = flexmasks.plan(packed(ids), LENGTH)
    for _ in range(3):  # the first plans of a kind are made otherwise than later ones
        out = flexmasks.attention(*tensors, mask=plan, backend=backend)
        plan.update(document_ids=drawn_ids("cpu", 1))
        with refused():
            got = torch.autograd.grad(out.sum(), tensors)
            for x, want in zip(got, expected(tensors, seen(ids))[1:], strict=True):
                assert error(x, want) < 3 * TOLERANCE[x.dtype]
        plan.update(document_ids=ids)


def test_the_tensors_of_a_plan_are_its_own() -> None:
    """Changes of the user's tensors do not reach it; `update` changes none of them; a direct change is noticed."""
    tensors, ids = qkv(), drawn_ids("cpu", 0)
    plan = flexmasks.plan(packed(ids), LENGTH)
    check(tensors, ids, flexmasks.attention, mask=plan)
    before = ids.clone()
    ids.zero_()
    check(tensors, before, flexmasks.attention, mask=plan)
    plan.update(document_ids=drawn_ids("cpu", 5))
    assert not ids.any()
    check(tensors, drawn_ids("cpu", 5), flexmasks.attention, mask=plan)
    own = plan.tensors["document_ids"][0]
    own.copy_(drawn_ids("cpu", 6))
    check(tensors, drawn_ids("cpu", 6), flexmasks.attention, mask=plan)


@pytest.mark.usefixtures("quick_kernels")
def test_captured_variables_and_offsets_are_updated() -> None:
    lens, starts = torch.tensor([200, 90]), torch.tensor([100, 0])
    mask = lambda b, h, q, kv: (kv < lens[b]) & (kv <= q)  # noqa: E731
    plan = flexmasks.plan(mask, 50, LENGTH, batch=BATCH, heads=HEADS, q_offset=starts)
    q, k, v = qkv(requires_grad=False)
    position = torch.arange(LENGTH)
    for _ in range(3):
        out = flexmasks.attention(q[:, :, :50], k, v, mask=plan)
        queries = position[:50] + starts[:, None]
        visible = (position <= queries[..., None]) & (position < lens[:, None, None])
        want = expected([q[:, :, :50], k, v], visible[:, None])[0].nan_to_num(0.0)
        assert error(out, want) < TOLERANCE[out.dtype]
        lens, starts = lens // 2, starts // 3
        plan.update(lens=lens, q_offset=starts)


@pytest.mark.usefixtures("quick_kernels")
def test_scores_in_plans() -> None:
    tensors, ids = qkv(requires_grad=False), drawn_ids("cpu", 0)
    slopes = torch.rand(HEADS)
    plan = flexmasks.plan(packed(ids), LENGTH, score="alibi", slopes=slopes)
    position = torch.arange(LENGTH)
    for _ in range(3):
        bias = -slopes.double()[:, None, None] * (position[:, None] - position).abs()
        got = flexmasks.attention(*tensors, mask=plan)
        assert error(got, expected(tensors, seen(ids), bias)[0]) < TOLERANCE[got.dtype]
        slopes, ids = torch.rand(HEADS), drawn_ids("cpu", 7)
        plan.update(slopes=slopes, document_ids=ids)
    with pytest.raises(TypeError, match="has a score"):
        flexmasks.attention(*tensors, mask=plan, score="softcap", cap=3.0)
    alone = flexmasks.plan(packed(ids), LENGTH)
    want = flexmasks.attention(*tensors, mask=packed(ids), score="softcap", cap=3.0)
    for _ in range(2):
        assert error(flexmasks.attention(*tensors, mask=alone, score="softcap", cap=3.0), want.double()) < 1e-5


@pytest.mark.usefixtures("quick_kernels")
def test_tables_of_a_mask_and_a_score_are_updated_together() -> None:
    """A kernel reads tables that are made of both."""
    tensors, offsets = qkv(requires_grad=False), torch.tensor([0, 100, 170, LENGTH])
    score = flexmasks.packed(flexmasks.get_score(lambda s, b, h, q, kv: s - 0.01 * q * kv), offsets)
    plan = flexmasks.plan(flexmasks.packed("causal", offsets), LENGTH, score=score)
    for _ in range(3):
        sequence = torch.searchsorted(offsets, torch.arange(LENGTH), right=True) - 1
        position = torch.arange(LENGTH) - offsets[sequence]
        visible = (sequence[:, None] == sequence) & (position[:, None] >= position)
        bias = -0.01 * (position[:, None] * position).double()
        for _ in range(2):
            got = flexmasks.attention(*tensors, mask=plan, backend="flex")
            assert error(got, expected(tensors, visible, bias)[0]) < TOLERANCE[got.dtype]
        offsets = torch.tensor([0, *torch.randint(1, LENGTH, (2,)).sort().values, LENGTH])
        plan.update(offsets=offsets)


def test_scores_that_learn() -> None:
    """They keep their gradients: the tensor stays the user's own."""
    tensors, slopes = qkv(requires_grad=False), torch.rand(HEADS, requires_grad=True)
    plan = flexmasks.plan("causal", LENGTH, score="alibi", slopes=slopes)
    for _ in range(2):
        got, want = (
            torch.autograd.grad(flexmasks.attention(*tensors, **given).square().sum(), slopes)[0]
            for given in ({"mask": plan}, {"mask": "causal", "score": "alibi", "slopes": slopes})
        )
        assert torch.equal(got, want)
        with torch.no_grad():
            slopes.mul_(2)
    with pytest.raises(ValueError, match="no tensors of its own"):
        plan.update(slopes=slopes)


class _Switch:
    is_causal = True


@pytest.mark.usefixtures("quick_kernels")
def test_functions_that_read_what_no_plan_can_copy() -> None:
    switch, tensors = _Switch(), qkv(requires_grad=False)
    plan = flexmasks.plan(lambda b, h, q, kv: (q >= kv) if switch.is_causal else (q <= kv), LENGTH)
    for is_causal in (True, False, True):
        switch.is_causal = is_causal
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        visible = visible.tril() if is_causal else visible.triu()
        got = flexmasks.attention(*tensors, mask=plan)
        assert error(got, expected(tensors, visible)[0]) < TOLERANCE[got.dtype]


_STATE: Any = {}


def _shared(b: Tensor, q: Tensor) -> Tensor:
    return _STATE["other"][b, q]


GLOBAL: dict[str, Callable[..., Tensor]] = {
    "dictionary": lambda b, h, q, kv: _STATE["ids"][b, q] == _STATE["ids"][b, kv],
    "list": lambda b, h, q, kv: _STATE["list"][0][b, q] == _STATE["list"][0][b, kv],
    "function": lambda b, h, q, kv: _shared(b, q) == _shared(b, kv),
}


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("held", GLOBAL)
@pytest.mark.parametrize("is_first_local", [False, True])
def test_tensors_of_global_variables_are_read_at_each_call(held: str, is_first_local: bool) -> None:
    """No copy of a function has them for itself: the plan owns no tensors, and says so when it is to be updated."""
    ids = drawn_ids("cpu", 0)
    _STATE.update(ids=ids, list=[ids], other=ids)
    function, local = GLOBAL[held], same(ids)
    mask = flexmasks.get_mask(local) & function if is_first_local else function
    plan = flexmasks.plan(mask, LENGTH, batch=2)
    assert not plan.owns_tensors
    with pytest.raises(ValueError, match="the plan has no tensors of its own"):
        plan.update(ids=drawn_ids("cpu", 1))
    for seed in range(3):
        new, tensors = drawn_ids("cpu", seed), qkv(requires_grad=False)
        _STATE.update(ids=new, list=[new], other=new)
        visible = new[:, None, :, None] == new[:, None, None, :]
        if is_first_local:
            visible = visible & (ids[:, None, :, None] == ids[:, None, None, :])
        got = flexmasks.attention(*tensors, mask=plan)
        assert error(got, expected(tensors, visible)[0]) < TOLERANCE[got.dtype]


_WINDOW = 5


Change = Callable[[Any], None]


def _variables() -> dict[str, tuple[Callable[..., Tensor], Change]]:
    """Masks of a window that changes, and what changes it."""
    window: Any = 5
    listed = [5]

    def change(n: Any) -> None:
        nonlocal window
        window = n

    def with_default(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, n: int = 5) -> Tensor:
        return (q - kv).abs() <= n

    return {
        "closure": (lambda b, h, q, kv: (q - kv).abs() <= window, change),
        "list": (lambda b, h, q, kv: (q - kv).abs() <= listed[0], lambda n: listed.__setitem__(0, n)),
        "default": (with_default, lambda n: setattr(with_default, "__defaults__", (n,))),
        "global": (lambda b, h, q, kv: (q - kv).abs() <= _WINDOW, lambda n: globals().update(_WINDOW=n)),
    }


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("kind", ["mask", "score"])
@pytest.mark.parametrize(
    ("tensor", "backend"),
    [
        pytest.param("none", "auto", marks=pytest.mark.slow),  # on a CPU it compiles
        ("none", "reference"),
        pytest.param("captured", "auto", marks=pytest.mark.slow),
        ("beside", "reference"),
    ],
)
@pytest.mark.parametrize("name", _variables())
def test_numbers_are_read_at_each_call_of_a_plan(name: str, tensor: str, kind: str, backend: str) -> None:
    """A plan has copies of its tensors, and of no function that holds none."""
    (function, change), shown = _variables()[name], torch.ones(LENGTH, dtype=torch.bool)
    change(5)
    mask = (lambda b, h, q, kv: shown[kv] & function(b, h, q, kv)) if tensor == "captured" else function
    call: dict[str, Any] = {"mask": mask}
    if kind == "score":
        call = {"mask": "full", "score": lambda s, b, h, q, kv: s + mask(b, h, q, kv).float()}
    if tensor == "beside":
        call["mask"] = flexmasks.get_mask(call["mask"]) & flexmasks.masks.padding(kv_lens=torch.tensor([LENGTH] * 2))
    plan = flexmasks.plan(q_len=LENGTH, **call)
    distances = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    becomes = torch.tensor(3)
    for step, window in enumerate((5, 20, becomes, becomes)):
        change(becomes.mul_(2) if step == 3 else window)
        visible = distances <= window
        for learns in (False, True)[: 1 + (step > 0)]:  # the first call that learns comes after a change
            tensors = qkv(requires_grad=learns)
            out = flexmasks.attention(*tensors, mask=plan, backend=backend)
            bias = visible.float() if kind == "score" else 0.0
            seen = torch.ones_like(visible) if kind == "score" else visible
            assert error(out, expected(tensors, seen, bias)[0]) < TOLERANCE[out.dtype]
    change(5)


def _beside(ids: Tensor) -> dict[str, tuple[Callable[..., Tensor], Change]]:
    """Masks that read documents and a window, which changes, in the same closure; and what changes the window."""
    window: Any = 5
    listed, named, keywords = [5, "a"], {"window": 5}, {"n": 5}
    near = lambda q, kv: (q - kv).abs() <= window  # noqa: E731

    def by_keyword(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, n: int = 5) -> Tensor:
        return (ids[b, q] == ids[b, kv]) & ((q - kv).abs() <= n)

    def with_itself(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, depth: int = 1) -> Tensor:
        return with_itself(b, h, q, kv, depth - 1) & near(q, kv) if depth else ids[b, q] == ids[b, kv]

    def change(n: Any) -> None:
        nonlocal window
        window = n

    def replace(n: Any) -> None:
        nonlocal near
        near = lambda q, kv, n=n: (q - kv).abs() <= n  # noqa: E731

    return {
        "number": (lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & ((q - kv).abs() <= window), change),
        "list": (
            lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & ((q - kv).abs() <= listed[0]),
            lambda n: listed.__setitem__(0, n),
        ),
        "dictionary": (
            lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & ((q - kv).abs() <= named["window"]),
            lambda n: named.update(window=n),
        ),
        "function": (lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & near(q, kv), change),
        "other function": (lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & near(q, kv), replace),
        "recursion": (with_itself, change),
        "keyword": (by_keyword, lambda n: by_keyword.__kwdefaults__.update(n=n)),
        "keywords of a partial": (
            lambda b, h, q, kv: by_keyword(b, h, q, kv, **keywords),
            lambda n: keywords.update(n=n),
        ),
    }


@in_cpp_on_day(3, 7)
@pytest.mark.parametrize("name", one_in(2, list(_beside(torch.zeros(BATCH, LENGTH)))))
def test_variables_beside_the_tensors_of_a_plan(name: str) -> None:
    """They are read at each call, whatever they become, tensors too, and updates leave them."""
    ids = drawn_ids("cpu", 0)
    (function, change), own = _beside(ids)[name], ids.clone()
    plan = flexmasks.plan(function, LENGTH, batch=BATCH)
    distances = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    ids.zero_()  # the user's own
    window: Any = 5
    for step in range(7):
        if step in (1, 3):
            change(window := 20 - step)
        if step in (2, 3):
            plan.update(ids=(own := drawn_ids("cpu", step)))
        if step == 4:
            change(window := torch.tensor(9))
        if step > 4:
            window.mul_(2)
        tensors = qkv(requires_grad=step % 2 == 0)
        visible = (own[:, None, :, None] == own[:, None, None, :]) & (distances <= window)
        got = flexmasks.attention(*tensors, mask=plan)
        assert error(got, expected(tensors, visible)[0]) < TOLERANCE[got.dtype], step
    assert {len(owned) for owned in plan.tensors.values()} == {1}


_SIZES = [30, 50]


def _near(q: Tensor, kv: Tensor, *, reach: int = 20) -> Tensor:
    return (q - kv).abs() <= reach


def _in_list(q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() <= _SIZES[0]


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("helper", ["keyword", "list"])
def test_updates_where_functions_read_global_constants(helper: str) -> None:
    """A plan owns its tensors beside them, and sees when they change."""
    ids = drawn_ids("cpu", 0)
    masks: dict[str, Callable[..., Tensor]] = {
        "keyword": lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & _near(q, kv),
        "list": lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & _in_list(q, kv),
    }
    plan = flexmasks.plan(masks[helper], LENGTH, batch=2)
    distances = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    for seed, reach in enumerate((20, 20, 9)):
        new, tensors = drawn_ids("cpu", seed), qkv(requires_grad=False)
        plan.update(ids=new)
        _SIZES[0] = reach
        _near.__kwdefaults__["reach"] = reach
        visible = (new[:, None, :, None] == new[:, None, None, :]) & (distances <= reach)
        got = flexmasks.attention(*tensors, mask=plan)
        assert error(got, expected(tensors, visible)[0]) < TOLERANCE[got.dtype]
    _near.__kwdefaults__["reach"] = 20


def with_default(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, n: int = 5) -> Tensor:
    return (q - kv).abs() <= n


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("mask", [with_default, flexmasks.get_mask(with_default) & packed(drawn_ids("cpu", 0))])
def test_plans_of_functions_of_a_module_are_pickled(mask: Any) -> None:
    plan = flexmasks.plan(mask, LENGTH)
    tensors = qkv(requires_grad=False)
    out = flexmasks.attention(*tensors, mask=plan)
    assert torch.equal(flexmasks.attention(*tensors, mask=pickle.loads(pickle.dumps(plan))), out)


def test_plans_are_copied_pickled_and_shown() -> None:
    ids = drawn_ids("cpu", 0)
    plan = flexmasks.plan(packed(ids), LENGTH, batch=BATCH, heads=HEADS)
    want = flexmasks.block_mask(packed(ids), LENGTH, batch=BATCH, heads=HEADS)
    blocks = (
        torch.nn.functional.pad(seen(ids), (0, 84, 0, 84)).unflatten(3, (3, 128)).unflatten(2, (3, 128)).amax((3, 5))
    )
    edges = torch.tensor([128, 128, 44])
    empty = 1 - (blocks * edges[:, None] * edges).sum().item() / (BATCH * LENGTH**2)
    others = copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), plan.to("cpu")
    for other in (plan, *others):
        assert repr(other) == repr(plan)
        assert torch.equal(other.block_mask.to_dense(), want.to_dense())
        assert other.sparsity == pytest.approx(empty)
        check(qkv(), ids, flexmasks.attention, mask=other)
    plan.update(document_ids=drawn_ids("cpu", 1))
    changed = flexmasks.block_mask(packed(drawn_ids("cpu", 1)), LENGTH, batch=BATCH, heads=HEADS)
    assert torch.equal(plan.block_mask.to_dense(), changed.to_dense())
    assert torch.equal(others[0].block_mask.to_dense(), want.to_dense())
    explanation = plan.explain(*qkv(), backend="reference")
    assert explanation.backend == "reference"


def test_calls_that_do_not_fit() -> None:
    q, k, v = qkv(requires_grad=False)
    plan = flexmasks.plan("sliding_window", LENGTH, batch=BATCH, heads=HEADS, window=3)
    fewer_heads = q[:, :2], k[:, :2], v[:, :2]
    for tensors in ((q[:, :, 1:], k, v), (q, k[:, :, 1:], v[:, :, 1:]), (q[:1], k[:1], v[:1]), fewer_heads):
        for attend, options in ((flexmasks.attention, {"mask": plan}), (plan.explain, {})):
            with pytest.raises(ValueError, match=r"q_len=300, kv_len=300, batch=2, heads=4 on cpu, and q is"):
                attend(*tensors, **options)
    for options, message in (
        ({"q_offset": 1}, "has its own `q_offset`"),
        ({"block_mask": plan.block_mask}, "not both"),
        ({"window": 3}, "given twice|no parameter"),
    ):
        with pytest.raises(TypeError, match=message):
            flexmasks.attention(q, k, v, mask=plan, **options)
    with pytest.raises(TypeError, match="Plan"):
        flexmasks.get_mask(plan)
    with pytest.raises(ValueError, match="it has none"):
        plan.update(window=torch.tensor(3))
    with pytest.raises(ValueError, match="in 0"):
        flexmasks.plan("padding", LENGTH, batch=1, heads=1, kv_lens=torch.tensor([-1]))


_IDS, _TABLE = torch.arange(1500) // 100, torch.ones(20, 20)
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "too long": ("document_ids", {"mask": "document", "document_ids": _IDS}),
    "list": ("document_ids", {"mask": "document", "document_ids": _IDS.tolist()}),
    "and": ("document_ids", {"mask": flexmasks.masks.causal() & flexmasks.masks.document(document_ids=_IDS)}),
    "not": ("document_ids", {"mask": ~flexmasks.masks.document(document_ids=_IDS)}),
    "or": ("visible", {"mask": flexmasks.masks.causal() | flexmasks.masks.dense(visible=_TABLE > 0)}),
    "dtype": ("document_ids", {"mask": "document", "document_ids": torch.rand(10)}),
    "value": ("kv_lens", {"mask": "padding", "kv_lens": torch.tensor([-1, 3])}),
    "number": ("window", {"mask": "sliding_window", "window": -1}),
    "batch": ("kv_lens", {"mask": "padding", "kv_lens": torch.tensor([1, 2]), "batch": 3}),
    "batch of two": (
        "kv_lens",
        {"mask": [flexmasks.masks.padding(kv_lens=torch.ones(n, dtype=torch.int64)) for n in (2, 3)]},
    ),
    "batch of a mask and a score": (
        "bias",
        {"mask": "padding", "kv_lens": torch.tensor([1, 2]), "score": "dense_bias", "bias": torch.ones(3, 1, 10, 10)},
    ),
    "heads": ("slopes", {"mask": "causal", "score": "alibi", "slopes": torch.rand(4), "heads": 3}),
    "score": ("bias", {"mask": "causal", "score": "dense_bias", "bias": _TABLE}),
    "learns": ("bias", {"mask": "causal", "score": "dense_bias", "bias": _TABLE.clone().requires_grad_()}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WRONG)
def test_parameters_that_do_not_fit_are_refused_when_a_plan_is_made(name: str, device: str) -> None:
    parameter, call = WRONG[name]
    if device != "cpu" and name == "value":
        pytest.skip("it would wait for the GPU: the first call says so")
    call = {
        n: x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for n, x in call.items()
    }
    call |= {"mask": call["mask"].to(device)} if isinstance(call["mask"], flexmasks.Mask) else {}
    if isinstance(call["mask"], list):
        call["mask"] = [m.to(device) for m in call["mask"]]
    with pytest.raises((ValueError, TypeError), match=f"`{parameter}` must be"):
        flexmasks.plan(q_len=10, device=device, **call)


@pytest.mark.parametrize("case", spread(MASK_CASES + SCORE_CASES, 3), ids=label)
def test_plans_refuse_no_parameter_that_fits(case: Case) -> None:
    """Of a batch and heads that are named, or that any call may have."""
    call = {"mask" if case in MASK_CASES else "score": case.name, **arguments(case)}
    sizes = {"batch": case.batch, "heads": case.heads}
    for known in ((), ("batch",), ("heads",), ("batch", "heads")):
        flexmasks.plan(**{"mask": "full"} | call, q_len=case.q_len, kv_len=case.kv_len, **{n: sizes[n] for n in known})


@pytest.mark.parametrize(
    "use",
    [
        lambda plan: flexmasks.get_mask("causal") & plan,
        lambda plan: plan | flexmasks.get_mask("causal"),
        lambda plan: ~plan,
        lambda plan: plan & (lambda b, h, q, kv: q >= kv),
        flexmasks.get_mask,
        lambda plan: flexmasks.plan(plan, 10),
        lambda plan: flexmasks.block_mask(plan, 10),
        lambda plan: flexmasks.masked_softmax(torch.zeros(10, 10), mask=plan),
        lambda plan: flexmasks.attention(*torch.zeros(3, 1, 1, 10, 8), score=plan),
        lambda plan: flexmasks.attention(*torch.zeros(3, 1, 1, 10, 8), mask=["causal", plan]),
        lambda plan: flexmasks.varlen_attention(*torch.zeros(3, 10, 1, 8), [0, 10], mask=plan),
    ],
)
def test_a_plan_in_place_of_a_mask(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"a plan, which .* takes in place of a mask; write plan.mask"):
        use(flexmasks.plan("causal", 10))


def test_updates_that_do_not_fit_change_nothing() -> None:
    tensors, lens = qkv(), torch.tensor([100, 50])
    plan = flexmasks.plan("padding", LENGTH, batch=BATCH, heads=HEADS, kv_lens=lens)
    want = flexmasks.attention(*tensors, mask=plan)
    wrong = torch.tensor([1]), torch.tensor([1.0, 2.0]), torch.tensor([1, 1000]), [1, 2, 3], "x"
    for value in wrong:
        with pytest.raises((ValueError, TypeError), match="kv_lens"):
            plan.update(kv_lens=value)
        assert torch.equal(flexmasks.attention(*tensors, mask=plan), want)
    plan.update(kv_lens=[7, 9])
    assert torch.equal(plan.tensors["kv_lens"][0], torch.tensor([7, 9]))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), length=st.sampled_from([1, 64, 129, 300]), steps=st.integers(1, 3))
def test_random_plans(seed: int, length: int, steps: int) -> None:
    tensors = qkv(length=length)
    plan = flexmasks.plan(packed(drawn_ids("cpu", seed, length)), length)
    for step in range(steps):
        ids = drawn_ids("cpu", seed + step, length)
        plan.update(document_ids=ids)
        check(tensors, ids, flexmasks.attention, mask=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "short", "flex_flash"])
def test_captured_graphs_see_updates(backend: str) -> None:
    tensors = [x.detach() for x in qkv("cuda")]
    plan = flexmasks.plan(packed(drawn_ids("cuda", 0)), LENGTH, batch=BATCH, heads=HEADS)
    if backend == "flex_flash" and flexmasks.explain(*tensors, mask=plan).others.get("flex_flash"):
        pytest.skip("flex_flash does not run here")
    for _ in range(3):
        flexmasks.attention(*tensors, mask=plan, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexmasks.attention(*tensors, mask=plan, backend=backend)
    for seed in range(1, 5):
        ids = drawn_ids("cuda", seed)
        plan.update(document_ids=ids)
        graph.replay()
        assert error(out, expected(tensors, seen(ids))[0]) < 3 * TOLERANCE[out.dtype]


@pytest.mark.gpu
def test_updates_wait_for_nothing() -> None:
    tensors = [x.detach() for x in qkv("cuda")]
    plan = flexmasks.plan(packed(drawn_ids("cuda", 0)), LENGTH, batch=BATCH, heads=HEADS)
    drawn = [drawn_ids("cuda", seed) for seed in range(6)]
    for step, ids in enumerate(drawn):
        if step == 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            plan.update(document_ids=ids)
            out = flexmasks.attention(*tensors, mask=plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert error(out, expected(tensors, seen(ids))[0]) < 3 * TOLERANCE[out.dtype]


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize(
    "way", ["autocast", "a plan in autocast", "jagged tensors", "pages in autocast", "given blocks", "options"]
)
def test_every_way_in_finds_what_an_earlier_call_made(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids = torch.randn(3, 1, 2, 96, 16), torch.arange(96).expand(1, -1) // 40
    plan = flexmasks.plan(flexmasks.get_mask("document", document_ids=ids), 96)
    blocks = create_block_mask(same(ids), 1, None, 96, 96, device="cpu")
    offsets, table, lens = torch.tensor([0, 30, 96]), torch.arange(6).view(1, 6), torch.tensor([90])
    jagged = [torch.nested.nested_tensor_from_jagged(y[0].transpose(0, 1), offsets).transpose(1, 2) for y in x]
    caches = [y[0].transpose(0, 1).reshape(6, 16, 2, 16) for y in x[1:]]

    def call() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=way != "jagged tensors"):
            if way == "autocast":
                return flexmasks.attention(*x, mask="document", document_ids=ids)
            if way == "a plan in autocast":
                return flexmasks.attention(*x, mask=plan)
            if way == "jagged tensors":
                return flexmasks.attention(*jagged, mask="causal").values()
            if way == "given blocks":
                return flexmasks.attention(*x, block_mask=blocks)
            if way == "options":
                return flexmasks.attention(*x, mask="causal", kernel_options={"BLOCK_M": 64})
            return flexmasks.paged_attention(x[0][:, :, :1], *caches, table, lens, mask="causal")

    with torch.no_grad():
        want = call()
        for module, name in ((road, "run_first_time"), (road, "plan_call"), (pages, "plan_call")):
            monkeypatch.setattr(module, name, None)
        assert torch.equal(call(), want)


@pytest.mark.slow
def test_given_blocks_that_change_are_other_blocks() -> None:
    tensors, ids = qkv(requires_grad=False), drawn_ids("cpu", 0)
    blocks = create_block_mask(same(ids), BATCH, None, LENGTH, LENGTH, device="cpu")
    results = [flexmasks.attention(*tensors, block_mask=blocks) for _ in range(2)]
    plan = flexmasks.plan(packed(ids), LENGTH)
    flexmasks.attention(*tensors, mask=plan)
    for mask in ("causal", plan):
        with pytest.raises(TypeError, match="not both"):
            flexmasks.attention(*tensors, mask=mask, block_mask=blocks)
    ids[:, -20:] += 1
    results += [flexmasks.attention(*tensors, block_mask=blocks)]
    assert torch.equal(*results[:2])
    assert not torch.equal(*results[1:])
    want = flexmasks.attention(*tensors, block_mask=blocks, backend="reference")
    assert error(results[2], want) < TOLERANCE[torch.float32]
    for count in (blocks.kv_num_blocks, blocks.full_kv_num_blocks):
        count.zero_()
    assert flexmasks.attention(*tensors, block_mask=blocks).count_nonzero() == 0
    alive = weakref.ref(ids)
    del blocks, ids
    gc.collect()
    assert alive() is None


@pytest.mark.usefixtures("quick_kernels")
def test_small_tensors_of_inference_mode_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        tensors, lens = qkv(requires_grad=False), torch.tensor([LENGTH, 30])
        for new in ([LENGTH, 30], [20, 20], [100, 20]):
            lens.copy_(torch.tensor(new))
            want = flexmasks.attention(*tensors, mask="padding", kv_lens=new)
            for _ in range(2):
                assert torch.equal(flexmasks.attention(*tensors, mask="padding", kv_lens=lens), want)
        monkeypatch.setattr(road, "run_first_time", None)
        assert torch.equal(flexmasks.attention(*tensors, mask="padding", kv_lens=lens), want)
