"""Calls as backends see them: kernels with their forms, what proves them, and kinds of calls for other tensors."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import documents, on_gpu_of
from torch import Tensor
from torch._inductor.exc import InductorError
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flexmasks
from flexmasks import Mask, get_mask
from flexmasks.backends import fa4_package
from flexmasks.backends.call import (
    BlocksAndScore,
    Inputs,
    Kernel,
    Kind,
    Operand,
    PageTable,
    Plans,
    Ready,
    Result,
    Unavailable,
    first_line,
    proven,
    with_gradients_once,
)
from flexmasks.backends.table import BACKENDS, choose, is_not_here, why_not
from flexmasks.plans import plan
from flexmasks.plans.mask_plan import GivenPlan, MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.request import Request
from flexmasks.road import plan_call
from flexmasks.spec.aliases import Aliases
from flexmasks.spec.parameters import Size
from flexmasks.spec.structure import Opaque, tensors_of

BATCH, HEADS, LENGTH = 2, 2, 512
CPU = torch.device("cpu")
SIZE = Size(BATCH, HEADS, LENGTH, LENGTH, CPU)
MISSING = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class _Sums(Kernel):
    """A kernel of q, which adds sinks and its forms where it may."""

    def __init__(self, folds: bool) -> None:
        self.folds = folds

    def folds_sinks(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> bool:
        return self.folds

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any
    ) -> tuple[Tensor, Tensor | None]:
        return sum((*forms, q if sinks is None else q + sinks), torch.zeros(())), None


@pytest.mark.parametrize("folds", [True, False])
def test_sinks_go_to_kernels_that_fold_them(folds: bool) -> None:
    """The result says whether they are in it."""
    q, sinks, form = torch.randn(3, 4)
    ready = Ready(_Sums(folds), (form,))
    assert ready(q, q, q).has_sinks is False
    result = ready(q, q, q, sinks)
    assert result.has_sinks == folds
    assert torch.equal(result.out, form + (q + sinks if folds else q))
    assert result.ready is ready


def test_bytes_of_forms_are_those_of_their_tensors() -> None:
    """By which caches are bounded. What is no tensor counts nothing."""
    assert Ready(_Sums(False), ()).nbytes == 0
    assert Ready(_Sums(False), (torch.zeros(3, 5), 7, None, torch.zeros(2, dtype=torch.int64))).nbytes == 60 + 16
    blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, "cpu")
    (form,) = _Functions().forms(Plans(GivenPlan(blocks)))
    lists = [t for t in blocks.as_tuple() if isinstance(t, Tensor)]
    assert Ready(_Functions(), (form,)).nbytes == sum(t.nbytes for t in lists) > 0


def test_a_first_call_runs_the_kernel_with_its_forms() -> None:
    class Doubled(_Sums):
        def forms(self, plans: Plans) -> tuple[Tensor]:
            return (plans.mask * 2,)

    q, form = torch.randn(2, 4)
    call: Any = SimpleNamespace(needs_grad=False)
    result = Doubled(False).first(call, Inputs(q, q, q, None, Plans(form)))
    assert isinstance(result, Result)
    assert torch.equal(result.out, q + 2 * form)


def test_gradients_of_kernels_that_have_no_second_ones() -> None:
    """Autograd alone would take these for 0."""
    x = torch.randn(3, requires_grad=True)
    out = with_gradients_once("flex", x.exp(), "ExpBackward0")
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert torch.equal(gradient, x.exp())
    with pytest.raises(RuntimeError, match="'flex' cannot be differentiated twice"):
        gradient.sum().backward()
    other = with_gradients_once("flex", x.exp(), "SinBackward0")  # no output of that kernel
    (gradient,) = torch.autograd.grad(other.sum(), x, create_graph=True)
    assert torch.allclose(torch.autograd.grad(gradient.sum(), x)[0], x.exp())


# --- kinds ---


def _of_ids(ids: Tensor) -> Any:
    return lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv])


def _planned(ids: Tensor, slopes: Tensor) -> Plans:
    mask = MaskPlan(get_mask(_of_ids(ids)), SIZE, aliases=Aliases(), allows_bounds=True)
    return Plans(mask, ScorePlan(flexmasks.get_score("alibi", slopes=slopes), SIZE, aliases=Aliases()))


def test_kinds_plan_other_tensors() -> None:
    """Mask and score each get their own, in any order of the call's tensors, and gradients flow into these."""
    ids, slopes = documents(LENGTH), torch.rand(HEADS)
    kind = Kind(_Functions(), _planned(ids, slopes), [slopes, ids], None)
    at = torch.arange(HEADS)[:, None, None], torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    for learns in (False, True, False):
        ids, slopes = documents(LENGTH), torch.rand(HEADS, requires_grad=learns)
        plans = kind.plans([slopes, ids])
        assert plans.pages is None
        shape = BATCH, HEADS, LENGTH, LENGTH
        assert torch.equal(create_mask(plans.mask.mod(), *shape, "cpu"), create_mask(_of_ids(ids), *shape, "cpu"))
        got = plans.score.mod()(torch.zeros(()), torch.tensor(0), *at)
        want = slopes[:, None, None] * (at[2] - at[1])
        torch.testing.assert_close(got, want)
        if learns:
            torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), slopes)[0] for x in (got, want)))


def test_kinds_of_pages_take_lengths_and_table_last() -> None:
    """Where the last queries start is made of the lengths of each call."""
    lens, table, window = torch.tensor([50, 3]), torch.zeros(BATCH, 4, dtype=torch.int32), torch.tensor(9)
    size = Size(BATCH, HEADS, 5, LENGTH, CPU)
    starts = (lens - 5).clamp(min=0)
    mask = MaskPlan(get_mask("sliding_window", window=window), size, starts, aliases=Aliases(), allows_bounds=True)
    kind = Kind(_Functions(), Plans(mask, None, PageTable(lens, table)), [window, lens, table], starts)
    others = [torch.tensor(70), torch.tensor([400, 2]), torch.ones(BATCH, 4, dtype=torch.int32)]
    plans = kind.plans(others)
    assert plans.score is None
    assert plans.pages is not None
    assert plans.pages.lens is others[1]
    assert plans.pages.table is others[2]
    assert plans.mask.offset.tolist() == [395, 0]
    assert plans.mask.tensors[0] is others[0]


def test_a_kind_needs_one_place_for_each_tensor() -> None:
    both = torch.tensor(5)
    mask = MaskPlan(get_mask("local", left=both, right=both), SIZE, aliases=Aliases())
    with pytest.raises(Opaque, match="one tensor in two places"):
        Kind(_Functions(), Plans(mask), [both, both], None)
    with pytest.raises(Opaque, match="was made of those of the call"):
        Kind(_Functions(), Plans(mask), [both.clone()], None)
    ids = documents(LENGTH)
    given = GivenPlan(create_block_mask(_of_ids(ids), BATCH, 1, LENGTH, LENGTH, "cpu"))
    with pytest.raises(Opaque, match="no copy can hold other tensors"):
        Kind(_Functions(), Plans(given), [ids], None)


def test_a_kind_holds_no_tensor() -> None:
    flexmasks.clear_caches()
    ids, slopes = documents(LENGTH), torch.rand(HEADS)
    plans = _planned(ids, slopes)
    kind = Kind(_Functions(), plans, [ids, slopes], None)
    assert kind.kernel.forms(plans)
    memory = [weakref.ref(t.untyped_storage()) for t in (ids, slopes)]
    del ids, slopes, plans
    gc.collect()
    assert [ref() for ref in memory] == [None, None]
    assert kind.plans([documents(LENGTH), torch.rand(HEADS)]).mask.block_mask is not None


class _Functions(Kernel):
    """A kernel that reads blocks."""

    def forms(self, plans: Plans) -> tuple[BlocksAndScore]:
        return (BlocksAndScore.of(plans),)


def test_numbers_by_head_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU functions read 0-dimensional tensors by the head's index. Kernels for the CPU do not: none is run."""
    monkeypatch.setattr(plan, "compiles_by_triton", lambda device: True)
    flexmasks.clear_caches()

    def two_windows(n: int) -> tuple[Mask, list[Tensor]]:
        numbers = [torch.tensor(n), torch.tensor(100 - n)]
        return get_mask("sliding_window", window=numbers[0]) | get_mask("local", left=numbers[1], right=0), numbers

    for n in (3, 4, 5):
        mask, numbers = two_windows(n)
        of_mask = MaskPlan(mask, SIZE, aliases=Aliases(), allows_bounds=True)
        assert of_mask.block_mask is not None
    kind = Kind(_Functions(), Plans(of_mask), numbers, None)
    for n in (50, 7):
        mask, numbers = two_windows(n)
        renewed = kind.kernel.forms(kind.plans(numbers))[0].block_mask.mask_mod
        shape = BATCH, HEADS, LENGTH, LENGTH
        assert torch.equal(create_mask(renewed, *shape, "cpu"), create_mask(mask, *shape, "cpu"))


class _Kernel(Kernel):
    """A kernel whose gradient fails."""

    key = "kernel"

    def __init__(self, fault: Exception) -> None:
        self.fault: Exception | None = fault
        self.runs = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any) -> tuple[Tensor, None]:
        self.runs += 1
        out = q + k + v
        if self.fault is not None and q.requires_grad:
            fault = self.fault

            def fail(gradient: Tensor) -> Tensor:
                raise fault

            out.register_hook(fail)
        return out, None


def _call_of(key: str) -> Any:
    return SimpleNamespace(needs_grad=True, outcome_key=key)


def test_a_kernel_is_proven_only_when_its_gradient_had_memory() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    given, inputs = _call_of("kind"), Inputs(q, k, v, None, Plans(None))
    kernel = _Kernel(MISSING)
    ready = Ready(kernel, ())
    for runs in (2, 4):  # each call tries the gradient, which finds no memory, and then runs
        assert proven(given, ready, inputs).out.shape == q.shape
        assert kernel.runs == runs
    kernel.fault = ValueError("no such kernel")
    with pytest.raises(Unavailable, match="ValueError: no such kernel"):
        proven(given, ready, inputs)
    kernel.fault, kernel.runs = None, 0
    for runs in (2, 3):
        proven(given, ready, inputs)
        assert kernel.runs == runs


@pytest.mark.usefixtures("cold")
def test_a_call_is_tried_out_beside_activation_checkpointing() -> None:
    """What a backend saves to prove that it has gradients is not what the call saves."""

    class Tried(Kernel):
        key = "tried out in a test"

        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any
        ) -> tuple[Tensor, None]:
            return (q.exp() @ k.mT.exp()) @ v.sin(), None

    tensors, ready = [torch.randn(1, 2, 5, 3, requires_grad=True) for _ in range(3)], Ready(Tried(), ())
    calls = []

    def region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(_call_of("tried out"))
        return proven(calls[-1], ready, Inputs(q, k, v, None, Plans(None))).out.cos()

    got = torch.autograd.grad(checkpoint(region, *tensors, use_reentrant=False).sum(), tensors)
    want = torch.autograd.grad(ready(*tensors).out.cos().sum(), tensors)
    assert len(calls) == 2
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.usefixtures("cold")
def test_a_call_that_is_tried_out_is_forgotten() -> None:
    failures, kept = (torch.OutOfMemoryError, ValueError, None), []
    for fails, hooks_are_allowed in itertools.product(failures, (True, False)):
        kept.append(_storages_of_a_trial(fails, hooks_are_allowed))
    gc.collect()
    assert all(kept)
    assert all(ref() is None for ref in itertools.chain(*kept))


def _storages_of_a_trial(fails: type[Exception] | None, hooks_are_allowed: bool) -> list[Any]:
    """Try out a call, whose backward pass may fail, and return weak references to what it saved."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = x.exp()
            ctx.save_for_backward(x, out)
            kept.append(weakref.ref(out.untyped_storage()))
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if fails is not None:
                raise fails("for a test")
            return gradient * ctx.saved_tensors[1]

    class Forgotten(Kernel):
        key = f"forgotten in a test, {fails}, {hooks_are_allowed}"

        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any
        ) -> tuple[Tensor, None]:
            return Fails.apply(q + k + v), None

    kept: list[Any] = []
    q = torch.randn(3, requires_grad=True)
    forbidden = torch.autograd.graph.disable_saved_tensors_hooks("none here")
    with contextlib.nullcontext() if hooks_are_allowed else forbidden:
        try:
            proven(_call_of("?"), Ready(Forgotten(), ()), Inputs(q, q, q, None, Plans(None)))
        except Unavailable:
            assert fails is ValueError
    return kept


@pytest.mark.parametrize("cause", [None, OSError("lib.so: file too short"), EOFError(), SyntaxError("null bytes")])
def test_only_damaged_files_are_called_damaged(cause: Exception | None) -> None:
    """What torch's compiler cannot do is no fault of the disk."""
    inner = AssertionError("All the buffers should be in input_buffers")
    inner.__cause__ = cause
    assert ("TORCHINDUCTOR_CACHE_DIR" in first_line(InductorError(inner, None))) == (cause is not None)
    assert "TORCHINDUCTOR" not in first_line(InductorError(ModuleNotFoundError("No module named 'x'"), None))


# --- questions ---


class _NothingComputes(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a question computes {func}")


_IDS = documents(300)
_ASKED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": "causal"},
    "window": {"mask": "sliding_window", "window": 20},
    "window of tensors": {"mask": get_mask("sliding_window", window=torch.tensor(20))},
    "documents": {"mask": "document", "document_ids": _IDS},
    "padding": {"mask": get_mask("causal") & get_mask("padding", kv_lens=torch.tensor([100, 300]))},
    "packed": {"mask": flexmasks.packed("causal", offsets=torch.tensor([0, 100, 300]))},
    "captured": {"mask": lambda b, h, q, kv: (q >= kv) & (_IDS[b, q] == _IDS[b, kv])},
    "outside the table": {"mask": lambda b, h, q, kv: q**7 >= kv},
    "too many bits": {"mask": lambda b, h, q, kv: q * 2**40 + h * 7 + b >= kv * 2**40},
    "alibi": {"mask": "causal", "score": "alibi"},
    "softcap": {"score": "softcap", "cap": 30.0},
    "bias": {"score": "dense_bias", "bias": torch.randn(1, 4, 300, 300)},
    "score of tensors": {"score": lambda score, b, h, q, kv: score + _IDS[b, kv].float()},
    "score that scales": {"score": lambda score, b, h, q, kv: score * (q - kv)},
    "start": {"mask": "causal", "q_offset": 7},
    "starts": {"mask": "causal", "q_offset": torch.tensor([0, 0])},
    "blocks": {"block_mask": create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 300, 300, "cpu")},
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", _ASKED)
def test_questions_compute_nothing(name: str, needs_grad: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends are asked about every call: whoever refuses must not have made a form, or waited for a GPU."""
    flexmasks.clear_caches()
    named = {"mask", "score", "block_mask", "q_offset"}
    given = {n: x for n, x in _ASKED[name].items() if n in named}
    q = torch.randn(2, 4, 300, 64, dtype=torch.bfloat16, requires_grad=needs_grad)
    request = Request(params={n: x for n, x in _ASKED[name].items() if n not in named}, **given)
    call = plan_call(q, q, q, request).call
    if device == "cuda":  # whose kernels nothing here would run
        monkeypatch.setattr(fa4_package, "why_missing", lambda: "")
        on_gpu_of(monkeypatch, (9, 0))
        on_gpu = call.q._replace(device=torch.device("cuda", 0))
        call = replace(call, q=on_gpu, k=on_gpu, v=on_gpu)
    answers = {}
    with _NothingComputes():
        for backend in BACKENDS.values():
            answers[backend.name] = why_not(backend.name, call), backend.adds_in_any_order(call)
            assert call.outcome_key is not None
    assert answers["reference"] == (None, None)
    if device == "cuda":
        assert not any(str(reason).startswith("it runs on") for reason, _ in answers.values())


@pytest.fixture
def on_t4(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of compute capability 7.5, as those of free notebooks, which only answers questions."""
    on_gpu_of(monkeypatch, (7, 5))


_ON_T4 = "causal", "sliding window", "documents", "own"


@pytest.mark.usefixtures("on_t4")
@pytest.mark.parametrize("queries", [1, 300])
@pytest.mark.parametrize("name", _ON_T4)
def test_where_triton_compiles_nothing_torch_runs(name: str, queries: int) -> None:
    masks: dict[str, Any] = {
        "causal": get_mask("causal"),
        "sliding window": get_mask("sliding_window", window=9),
        "documents": get_mask("causal") & get_mask("document", document_ids=torch.arange(300) // 99),
        "own": get_mask(lambda b, h, q, kv: q % 3 >= kv % 4),
    }
    q, k = torch.randn(2, 4, queries, 64, dtype=torch.float16), torch.randn(2, 4, 300, 64, dtype=torch.float16)
    call = plan_call(q, k, k, Request(masks[name], params={}, q_offset="last")).call
    there = [x._replace(device=torch.device("cuda", 0)) for x in (call.q, call.k, call.v)]
    call = replace(call, q=there[0], k=there[1], v=there[2])
    able, reasons = choose(call)
    by_torch = name == "causal" or (name, queries) == ("sliding window", 1)  # whose window is a part of the keys
    assert [backend.name for backend in able] == ["sdpa"] * by_torch + ["reference"]
    for other in ("flex", "decode", "short"):
        assert reasons[other] == "it does not run on compute capability 7.5: Triton needs 8.0" or other == "decode"
        assert is_not_here(reasons[other]) or (other, queries) == ("decode", 300)


def test_calls_hold_none_of_q_k_v() -> None:
    q, k, v = torch.randn(3, 2, 4, 30, 16).unbind()
    call = plan_call(q, k, v, Request("causal", params={})).call
    assert not tensors_of({name: value for name, value in vars(call).items() if name not in ("mask", "score")})
    assert (call.q.shape, call.k.stride(0), call.v.numel()) == (q.shape, k.stride(0), v.numel())
    for x in (q, q.transpose(1, 2), q[:, :, :1].expand(2, 4, 3, 16), q[:1, :, ::2], q[:1, :, :1]):
        assert Operand.of(x).is_contiguous() == x.is_contiguous()
