"""Forward mode and second order: tangents by the Triton kernel and by slices, against float64.

With TRITON_INTERPRET=1 Triton's interpreter runs the kernel on a CPU. The interpreter must be chosen before Triton is
imported. Hence the last test runs this file in a process of its own.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers import TOLERANCE, check_by_the_interpreter, error, exact, in_campaigns, one_in
from quick_kernels import quick_kernels  # noqa: F401
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp

import flexmasks
from flexmasks.backends import slices, tangents

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS_ON = "cpu" if INTERPRETED else "cuda"
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")] if INTERPRETED else []
needs_kernel = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="the kernel needs a GPU or Triton's interpreter"
)
by_slices = pytest.mark.skipif(INTERPRETED, reason="runs without the kernel")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LENGTH, HEADS = 150, 2 if INTERPRETED else 4

Call = dict[str, Any]
CALLS: dict[str, Callable[[str], Call]] = {
    "full": lambda device: {},
    "causal": lambda device: {"mask": "causal"},
    "window": lambda device: {"mask": "sliding_window", "window": 9},
    "documents": lambda device: {
        "mask": flexmasks.get_mask("causal")
        & flexmasks.get_mask("document", document_ids=torch.arange(LENGTH, device=device) // 40)
    },
    "lengths": lambda device: {"mask": "grouped_tril", "seq_lens": torch.tensor([LENGTH, 70], device=device)},
    "function": lambda device: {"mask": lambda b, h, q, kv: (q >= kv) & (kv % 7 != 3)},
    "blocks": lambda device: {"block_mask": flexmasks.block_mask("causal", LENGTH, device=device, block_size=64)},
    "plan": lambda device: {"mask": flexmasks.plan("causal", LENGTH, batch=2, heads=HEADS, device=device)},
}


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the interpreter run the kernel on a CPU, and fail if the kernel fails."""
    if INTERPRETED:
        monkeypatch.setattr(tangents, "runs_own_kernels", lambda device: True)
    failures: list[str] = []
    monkeypatch.setattr(tangents, "_failures", failures)
    yield failures
    assert not failures


def made(device: str, dtype: torch.dtype, kv_len: int = LENGTH, size: int = 24, v_size: int = 16) -> list[Tensor]:
    """Return q, k and v with grouped heads, and their tangents."""
    shapes = (2, HEADS, LENGTH, size), (2, HEADS // 2, kv_len, size), (2, HEADS // 2, kv_len, v_size)
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes * 2]


def written_out(visible: Tensor | None, sinks: Tensor | None = None, cap: float = 0.0) -> Callable[..., Any]:
    """Return attention by its formula, of q, k and v, with lse; a row that sees nothing has lse -inf and output 0."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT / math.sqrt(q.shape[3])
        scores = cap * (scores / cap).tanh() if cap else scores
        seen = torch.ones_like(scores, dtype=torch.bool) if visible is None else visible.expand(scores.shape)
        lse = torch.where(seen.any(-1), scores.masked_fill(~seen, -1e300).logsumexp(-1), -math.inf)
        lse = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None])
        weights = torch.where(seen, (scores - lse[..., None].nan_to_num(neginf=0.0)).exp(), 0.0)
        return weights @ v, lse

    return attend


def seen_by(call: Call, device: str) -> Tensor | None:
    if not call:
        return None
    if "block_mask" in call:
        call = {"mask": "causal"}
    mask = call["mask"]
    if not isinstance(mask, str) and hasattr(mask, "update"):  # a plan
        mask = "causal"
    params = {name: value for name, value in call.items() if name != "mask"}
    return flexmasks.dense_mask(mask, LENGTH, batch=2, heads=HEADS, device=torch.device(device), **params)


def check(call: Callable[..., Any], want: Callable[..., Any], given: Sequence[Tensor], by_duals: bool = False) -> None:
    """Compare output, lse and their tangents."""
    dtype = given[0].dtype
    exactly = jvp(want, tuple(map(exact_without_gradient, given[:3])), tuple(map(exact_without_gradient, given[3:])))
    if by_duals:
        with forward_ad.dual_level():
            duals = call(*map(forward_ad.make_dual, given[:3], given[3:]))
            found = tuple(zip(*map(forward_ad.unpack_dual, duals), strict=True))
    else:
        found = jvp(call, tuple(given[:3]), tuple(given[3:]))
    for got, exact_results in zip(found, exactly, strict=True):
        for x, y in zip(got, exact_results, strict=True):
            finite = y.isfinite()
            assert torch.equal(finite, x.isfinite())
            assert error(torch.where(finite, x, 0), torch.where(finite, y, 0)) < 2 * TOLERANCE.get(dtype, 1e-13)


def exact_without_gradient(x: Tensor) -> Tensor:
    return exact(x).detach()


# --- the kernel ---


def of_the_kernel() -> list[Any]:
    """Return masks and dtypes; the interpreter, which takes a second for a call, has few outside of campaigns."""
    if not INTERPRETED:
        return list(itertools.product(CALLS, (FP32, FP16, BF16)))
    others = [in_campaigns(x) for x in itertools.product(CALLS, (FP32,)) if x[0] != "documents"]
    return [("lengths", FP16), ("documents", FP32), *others]


@needs_kernel
@pytest.mark.parametrize(("name", "dtype"), of_the_kernel())
def test_the_kernel(name: str, dtype: torch.dtype) -> None:
    """With sinks output and lse come from the call without tangents, and without sinks from the kernel."""
    call, given = CALLS[name](KERNELS_ON), made(KERNELS_ON, dtype)
    seen, sinks = seen_by(call, KERNELS_ON), torch.randn(HEADS, device=KERNELS_ON)
    attend = functools.partial(flexmasks.attention, return_lse=True, **call)
    with torch.no_grad():
        check(attend, written_out(seen), given, by_duals=name == "documents")
    check(functools.partial(attend, sink_logits=sinks), written_out(seen, sinks), given)


@needs_kernel
def test_the_kernel_with_other_lengths_layouts_and_sizes_of_heads() -> None:
    """Of random masks with full, empty and partial blocks, and rows that see nothing or everything."""
    for size, v_size, kv_len in ((64, 64, 256), (16, 40, 70)):
        given = made(KERNELS_ON, FP32, kv_len, size, v_size)
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
        shares = torch.rand(LENGTH + 3, 1, device=KERNELS_ON)
        pairs = torch.rand(2, HEADS, LENGTH + 3, kv_len, device=KERNELS_ON) < shares
        pairs[0, 0, :, :128], pairs[1, 1, :, 128:] = True, False
        pairs[1, 0, 40], pairs[0, 1, 41] = False, True
        mask = lambda b, h, q, kv: pairs[b, h, q, kv]  # noqa: B023, E731
        call = functools.partial(flexmasks.attention, return_lse=True, mask=mask, q_offset=3)
        check(call, written_out(pairs[:, :, 3:]), given)


@needs_kernel
def test_gradients_of_tangents_of_the_kernel() -> None:
    """The output's gradient is that of the call without tangents; that of the tangent goes by slices."""
    given = [x.requires_grad_() for x in made(KERNELS_ON, FP32)]
    want = list(map(exact, given))
    loss = lambda out, tangent: out.square().sum() + (tangent * out).square().sum()  # noqa: E731
    results = []
    calls = (
        functools.partial(flexmasks.attention, mask="causal"),
        lambda *x: written_out(seen_by(CALLS["causal"](KERNELS_ON), KERNELS_ON))(*x)[0],
    )
    for call, leaves in zip(calls, (given, want), strict=True):
        results.append(torch.autograd.grad(loss(*jvp(call, tuple(leaves[:3]), tuple(leaves[3:]))), leaves))
    assert all(error(x, y) < 1e-4 for x, y in zip(*results, strict=True))


@needs_kernel
def test_slices_where_triton_fails(
    monkeypatch: pytest.MonkeyPatch, failures: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    from flexmasks.kernels import tangent_kernel

    def fail(*_: Any) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(tangent_kernel, "tangents_of", fail)
    with caplog.at_level(logging.WARNING, logger="flexmasks"), torch.no_grad():
        check(functools.partial(flexmasks.attention, return_lse=True), written_out(None), made(KERNELS_ON, FP32))
    assert failures.pop() == "RuntimeError: no C compiler"
    assert "Triton failed" in caplog.text


# --- by slices ---


@by_slices
@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize(("name", "by_duals"), one_in(3, list(itertools.product(CALLS, [False, True]))))
def test_tangents_by_slices(name: str, by_duals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 and float64, with a score, and with sinks; calls that are made again, and a reference, too."""
    monkeypatch.setattr(slices, "_MAX_SCORES", 1 << 17)
    call = CALLS[name]("cpu")
    seen, sinks = seen_by(call, "cpu"), torch.randn(HEADS)
    attend = functools.partial(flexmasks.attention, return_lse=True, **call)
    for dtype in (FP32, torch.float64):
        given = made("cpu", dtype)
        check(attend, written_out(seen), given, by_duals)
        if name == "plan":
            continue
        capped = functools.partial(attend, score="softcap", cap=2.0, sink_logits=sinks.to(dtype))
        check(capped, written_out(seen, sinks, 2.0), given, by_duals)
    check(functools.partial(attend, backend="reference"), written_out(seen), given, by_duals)


@by_slices
def test_one_tangent_among_q_k_and_v() -> None:
    q, k, v, *_, tangent = made("cpu", torch.float64, v_size=24)
    call = functools.partial(flexmasks.attention, mask="causal")
    want = written_out(seen_by({"mask": "causal"}, "cpu"))
    for place in range(3):
        function = lambda x, f: f(*[x if n == place else y for n, y in enumerate((q, k, v))])  # noqa: B023, E731
        given = (q, k, v)[place]
        along = torch.randn_like(given)
        got = jvp(lambda x: function(x, call), (given,), (along,))[1]  # noqa: B023
        exactly = jvp(lambda x: function(x, want)[0], (given,), (along,))[1]  # noqa: B023
        assert torch.allclose(got, exactly, atol=1e-12)
    # Not that of an input: a function of something else.
    assert torch.equal(jvp(lambda x: x + call(q, k, v).sum(), (tangent,), (tangent,))[1], tangent)


@by_slices
@pytest.mark.parametrize("score", [None, "learned"])
def test_gradients_of_outputs_and_tangents(score: str | None) -> None:
    """First and second ones, together in one step, of what the score learns, too."""
    given = [exact(x) for x in made("cpu", torch.float64)]
    factors = torch.rand(HEADS, dtype=torch.float64, requires_grad=True)
    changed: Call = {} if score is None else {"score": lambda s, b, h, q, kv: s * factors[h]}
    seen = seen_by({"mask": "causal"}, "cpu")

    def want(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * factors[:, None, None] if score else q
        return written_out(seen)(q, k, v)[0]

    leaves, results = [*given, factors] if score else given, []
    for call in (functools.partial(flexmasks.attention, mask="causal", **changed), want):
        out, tangent = jvp(call, tuple(given[:3]), tuple(given[3:]))
        target = torch.autograd.grad(
            (out - tangent.detach()).square().sum(), [*given[:3], *leaves[6:]], retain_graph=True
        )
        first = torch.autograd.grad(out.square().sum() + tangent.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
        results.append([*target, *first, *second])
    assert all(error(x, y) < 1e-10 for x, y in zip(*results, strict=True))


@by_slices
@pytest.mark.parametrize("name", one_in(6, ["documents", "lengths", "capped", "sinks", "blocks", "learned"]))
def test_inside_torch_compile(name: str) -> None:
    """One operator for tangents, and slices where torch must look inside: outputs and all gradients."""
    factors = torch.rand(HEADS, requires_grad=True)
    more: dict[str, Call] = {
        "capped": {"mask": "causal", "score": "softcap", "cap": 2.0},
        "sinks": {"mask": "causal", "sink_logits": factors},
        "learned": {"mask": "causal", "score": "alibi", "slopes": factors},
    }
    call = more[name] if name in more else CALLS[name]("cpu")
    attend = functools.partial(flexmasks.attention, **call)
    leaves = [x.requires_grad_() for x in made("cpu", FP32)] + [factors] * (name in ("sinks", "learned"))

    def step(*given: Tensor) -> tuple[Tensor, Tensor]:
        return jvp(lambda *qkv: attend(*qkv), given[:3], given[3:])  # type: ignore[no-any-return]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, step):
        out, tangent = function(*leaves[:6])
        results.append([out, tangent, *torch.autograd.grad(out.square().sum() + tangent.square().sum(), leaves)])
    assert all(error(x, y) < 1e-5 for x, y in zip(*results, strict=True))


@by_slices
def test_nested_transforms_go_by_the_reference() -> None:
    q, k, v, *_ = made("cpu", torch.float64, v_size=24)
    call = lambda q: flexmasks.attention(q, k, v, mask="causal").sum()  # noqa: E731
    want = lambda q: written_out(seen_by({"mask": "causal"}, "cpu"))(q, k, v)[0].sum()  # noqa: E731
    got, exactly = (jvp(torch.func.grad(f), (q,), (q.flip(2),))[1] for f in (call, want))
    assert torch.allclose(got, exactly, atol=1e-10)
    got, exactly = (jvp(lambda x: jvp(f, (x,), (q,))[1], (q,), (q.flip(2),))[1] for f in (call, want))  # noqa: B023
    assert torch.allclose(got, exactly, atol=1e-10)


@by_slices
@pytest.mark.parametrize("way", ["second order", "jvp", "both"])
def test_nothing_is_kept_that_grows_with_pairs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length = 512
    monkeypatch.setattr(slices, "_MAX_SCORES", length * 64)
    q, k, v, *along = (torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(6))
    kept: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def note(x: Tensor) -> _Kept:
        kept.add(noted := _Kept(x))
        return noted

    backend = "reference" if way == "second order" else "auto"
    call = functools.partial(flexmasks.attention, mask="causal", backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept.tensor):
        out = call(q, k, v) if way == "second order" else sum(jvp(call, (q, k, v), tuple(along)))
        if way != "jvp":
            first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
            out = sum(x.square().sum() for x in first)
    memory = {x.tensor.untyped_storage().data_ptr(): x.tensor.untyped_storage().nbytes() for x in kept}
    assert 0 < sum(memory.values()) < 4 * length * length / 2  # half of the scores
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


class _Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


# --- long calls on a GPU ---


@pytest.mark.gpu
def test_long_calls_take_no_memory_that_grows_with_pairs() -> None:
    """Full attention over 16,384 tokens in forward mode, and second derivatives over 8,192."""
    q, k, v, *along = (torch.randn(1, 8, 16384, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(6))
    flexmasks.attention(q, k, v).sum().backward()  # compiles

    def peak(step: Callable[[], Any]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before

    def forward() -> None:
        out, tangent = jvp(flexmasks.attention, (q, k, v), tuple(along))
        torch.autograd.grad((out - tangent.detach()).float().square().sum(), (q, k, v))

    def second() -> None:
        leaves = [x[:, :, :8192].detach().requires_grad_() for x in (q, k, v)]
        out = flexmasks.attention(*leaves, mask="causal", backend="reference")
        first = torch.autograd.grad(out.float().square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(x.float().square().sum() for x in first), leaves)

    assert peak(forward) < 1 << 30  # the scores of all heads would take 4 GB in bfloat16
    assert peak(second) < 2 << 30


# --- by the interpreter ---


@by_slices
def test_the_kernel_by_the_interpreter() -> None:
    """The tests of this file in a process that chose Triton's interpreter before it was imported."""
    pytest.importorskip("triton")
    check_by_the_interpreter(__file__)
