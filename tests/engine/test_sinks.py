"""Attention sinks folded into output and lse: plain torch, and the Triton kernels, against float64.

With TRITON_INTERPRET=1 Triton's interpreter runs the kernels on a CPU. The interpreter must be chosen before Triton is
imported. Hence the last test runs this file in a process of its own.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    DEVICES,
    TOLERANCE,
    assembly,
    check_by_the_interpreter,
    check_lse,
    error,
    exact,
    one_in,
    try_examples,
)
from hypothesis import strategies as st
from torch import Tensor

import flexmasks
from flexmasks.kernels import direct, sinks
from flexmasks.kernels.sinks import with_sinks

triton = pytest.importorskip("triton")
launch = pytest.importorskip("flexmasks.kernels.sinks_kernel")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF = math.inf

on_devices = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else DEVICES)
# NumPy, which computes for the interpreter, warns of inf and 0 / 0.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")] if INTERPRETED else []
needs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="the kernels need a GPU or Triton's interpreter"
)
KERNELS_ON = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the interpreter run the kernels on a CPU, and fail if the kernels fail."""
    if INTERPRETED:
        monkeypatch.setattr(direct, "runs_own_kernels", lambda device: True)
    failures: list[str] = []
    monkeypatch.setattr(sinks, "_failures", failures)
    yield failures
    assert not failures


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the launches of a test: "fold" and "gradients"."""
    names: list[str] = []

    def counted(name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        names.append(name)
        return run(*arguments)

    for name in ("fold", "gradients"):
        monkeypatch.setattr(launch, name, functools.partial(counted, name, getattr(launch, name)))
    return names


# --- cases and the oracle ---


@dataclass(frozen=True)
class Case:
    """Random output, lse and sinks.

    layout: "plain"; "heads last" for [B, Q, H, D] in memory; "cut" for a part of larger tensors.
    hidden: share of the rows that see nothing. without: share of the heads without a sink.
    """

    batch: int | None = 2
    heads: int = 3
    queries: int = 70
    size: int = 16
    dtype: torch.dtype = FP32
    sink_dtype: torch.dtype = FP32
    layout: str = "plain"
    hidden: float = 0.2
    without: float = 0.3
    range: float = 5.0  # of lse and sinks
    seed: int = 0


def made(case: Case, device: str = "cpu") -> list[Tensor]:
    """Return output, lse and sinks of a case."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    leading = [n for n in (case.batch, case.heads, case.queries) if n is not None]
    out, lse, logits = normal(*leading, case.size), normal(*leading) * case.range, normal(case.heads) * case.range
    is_hidden = torch.rand(leading, generator=generator) < case.hidden
    lse = lse.masked_fill(is_hidden, -INF)
    out = out.masked_fill(is_hidden[..., None], 0)
    logits = logits.masked_fill(torch.rand(case.heads, generator=generator) < case.without, -INF)
    out, lse, logits = out.to(device, case.dtype), lse.to(device), logits.to(device, case.sink_dtype)
    if case.layout == "heads last":
        out = out.transpose(-2, -3).contiguous().transpose(-2, -3)
        lse = lse.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif case.layout == "cut":
        out = torch.cat([out, out, out], -1)[..., case.size : 2 * case.size]
        lse = torch.stack([lse, lse], -1)[..., 1]
        logits = torch.stack([logits, logits], -1)[..., 0]
    return [out, lse, logits]


def formula(out: Tensor, lse: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and lse with one more key, whose score is the sink, and whose value is 0; in float64.

    The lse of the keys is the score of one key, whose value is the output.
    """
    scores = torch.stack([lse, logits[:, None].expand(lse.shape)], -1)
    nothing = (scores == -INF).all(-1)
    weights = scores.masked_fill(nothing[..., None], 0).softmax(-1)
    weights = torch.where(scores == -INF, 0.0, weights)
    total = scores.masked_fill(nothing[..., None], 0).logsumexp(-1).masked_fill(nothing, -INF)
    return out * weights[..., :1], total


def differentiated(
    function: Callable[..., tuple[Tensor, Tensor | None]], leaves: list[Tensor], slopes: list[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of output and lse weighted by slopes, of which one may be None."""
    results = [(x, s) for x, s in zip(function(*leaves), slopes, strict=True) if s is not None and x is not None]
    outputs, weights = zip(*results, strict=True)
    return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))


def check(case: Case, device: str, uses: str = "both", shape_of_slopes: str = "like out") -> None:
    """Check values and gradients of a case.

    uses: "out", "lse" or "both" get a gradient.
    shape_of_slopes: "like out", "transposed" in memory or "one number".
    """
    given = made(case, device)
    want, want_lse = formula(*(x.double().cpu() for x in given))
    tolerance = TOLERANCE[case.dtype]

    leaves = [x.detach().requires_grad_() for x in given]
    with_lse = uses != "out"
    out, lse = with_sinks(*leaves, with_lse)
    assert out.dtype == case.dtype
    if device == KERNELS_ON:
        assert out.stride() == torch.empty_like(given[0]).stride()
    assert error(out, want, 1e-2) < tolerance
    assert (lse is not None) == with_lse
    if lse is not None:
        check_lse(lse, want_lse, 1e-5)

    slopes: list[Tensor | None] = [
        torch.randn(out.shape).to(device, case.dtype),
        torch.randn(given[1].shape).to(device),
    ]
    if shape_of_slopes == "transposed":
        slopes = [x.mT.contiguous().mT if x is not None else None for x in slopes]
    elif shape_of_slopes == "one number":
        slopes = [x.flatten()[0].expand(x.shape) if x is not None else None for x in slopes]
    slopes = [slopes[0] if uses != "lse" else None, slopes[1] if with_lse else None]
    got = differentiated(lambda *x: with_sinks(*x, with_lse), leaves, slopes)
    exact_slopes = [None if s is None else s.double().cpu() for s in slopes]
    wanted = differentiated(formula, [exact(x) for x in given], exact_slopes)
    for g, w, x in zip(got, wanted, given, strict=True):
        if uses == "lse" and g is None:
            continue
        assert g is not None
        assert g.dtype == x.dtype
        assert error(g, torch.zeros(x.shape) if w is None else w, 0.1) < 2 * max(tolerance, TOLERANCE.get(x.dtype, 0))
    assert got[1] is not None
    assert torch.all(got[1][given[1] == -INF] == 0)
    if case.without == 1:
        assert got[2] is not None
        assert torch.all(got[2] == 0)

    without_gradients = [x.clone(memory_format=torch.preserve_format) for x in given]
    out, lse = with_sinks(*without_gradients, with_lse)
    assert error(out, want, 1e-2) < tolerance
    if lse is not None:
        check_lse(lse, want_lse, 1e-5)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return random cases."""
    return Case(
        batch=draw(st.sampled_from([None, 1, 2, 3])),
        heads=draw(st.integers(1, 4)),
        queries=draw(st.integers(1, 20) | st.integers(1, 300)),
        size=draw(st.sampled_from([1, 8, 64, 80, 128, 256]) | st.integers(1, 300)),
        dtype=draw(st.sampled_from([FP32, FP16, BF16])),
        sink_dtype=draw(st.sampled_from([FP32, FP16, BF16, torch.float64])),
        layout=draw(st.sampled_from(["plain", "heads last", "cut"])),
        hidden=draw(st.sampled_from([0.0, 0.3, 1.0])),
        without=draw(st.sampled_from([0.0, 0.3, 1.0])),
        range=draw(st.sampled_from([0.1, 5.0, 80.0])),
        seed=draw(st.integers(0, 2**30)),
    )


@on_devices
@pytest.mark.parametrize(
    ("layout", "dtype", "sizes"),
    one_in(
        4 if INTERPRETED else 1,
        list(itertools.product(["plain", "heads last", "cut"], [FP32, FP16, BF16], [(1, 64), (8, 72), (130, 128)])),
    ),
    ids=str,
)
def test_layouts(layout: str, dtype: torch.dtype, sizes: tuple[int, int], device: str) -> None:
    queries, size = sizes
    rows = 70 if INTERPRETED and queries > 70 else queries  # more than a program has
    check(Case(queries=rows, size=size, dtype=dtype, layout=layout), device)


@pytest.mark.slow
@on_devices
def test_random_cases(device: str) -> None:
    options = st.sampled_from(["both", "out", "lse"]), st.sampled_from(["like out", "transposed", "one number"])
    count = 10 if INTERPRETED else 60
    try_examples(count, lambda case, uses, shape: check(case, device, uses, shape), cases(), *options)


@on_devices
@pytest.mark.parametrize("uses", ["both", "out", "lse"])
@pytest.mark.parametrize(("hidden", "without"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_rows_and_heads_of_nothing(hidden: float, without: float, uses: str, device: str) -> None:
    """Rows that see nothing get the sink as their lse; heads without a sink keep output and lse."""
    case = Case(hidden=hidden, without=without)
    check(case, device, uses)
    given = made(case, device)
    out, lse = with_sinks(*(x.clone() for x in given), True)
    if hidden:
        assert lse is not None
        assert torch.equal(lse, given[2][:, None].expand(lse.shape))
    elif lse is not None:
        assert torch.equal(out, given[0])
        assert torch.equal(lse, given[1])


@on_devices
def test_far_apart_and_not_a_number(device: str) -> None:
    """No sum is lost where lse and sink are far apart, and a NaN stays one."""
    lse = torch.tensor([[[-1e20, -200.0, 0.0, 200.0, 1e20, math.nan]]], device=device)
    for logit in (-300.0, 0.0, 300.0):
        logits = torch.tensor([logit], device=device)
        out, new = with_sinks(torch.ones(1, 1, 6, 1, device=device), lse.clone(), logits, True)
        want, want_lse = formula(torch.ones(1, 1, 6, 1).double(), lse.double().cpu(), logits.double().cpu())
        assert new is not None
        assert torch.allclose(out.cpu().double(), want, 1e-5, 1e-30, equal_nan=True)
        assert torch.allclose(new.cpu().double(), want_lse, 1e-6, 1e-6, equal_nan=True)


# --- which way a call goes ---


@needs_kernels
def test_launches(launched: list[str]) -> None:
    """One launch forward, one call backward; in place where nothing needs a gradient."""
    given = made(Case(dtype=FP16), KERNELS_ON)
    out, _ = with_sinks(given[0], *given[1:], True)
    assert out is given[0]
    assert launched == ["fold"]
    leaves = [x.requires_grad_() for x in made(Case(dtype=FP16), KERNELS_ON)]
    before = leaves[0].detach().clone()
    out, lse = with_sinks(*leaves, True)
    assert torch.equal(leaves[0], before)
    assert lse is not None
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    assert launched == ["fold", "fold", "gradients"]
    leaves[0].grad = None
    only_out = with_sinks(leaves[0], *(x.detach() for x in leaves[1:]), False)[0]
    only_out.sum().backward()
    assert launched == ["fold", "fold", "gradients", "fold", "gradients"]
    assert leaves[0].grad is not None


@pytest.mark.parametrize("uses", [(0,), (1,), (0, 1)], ids=["out", "lse", "both"])
def test_gradients_in_plain_torch(uses: tuple[int, ...]) -> None:
    """They are those of the plain operations; the first row sees nothing, and the second head has no sink."""
    out, lse, logits = torch.randn(2, 3, 5, 8).double(), torch.randn(2, 3, 5).double(), torch.randn(3).double()
    lse[:, :, 0], logits[1] = -math.inf, -math.inf
    out[:, :, 0] = 0.0
    leaves = [x.requires_grad_() for x in (out, lse, logits)]
    new = sinks._plain(*leaves, True)
    upstream = [torch.randn_like(x) if n in uses else None for n, x in enumerate(new)]
    upstream = [x if x is None else x.masked_fill(y.isinf(), 0.0) for x, y in zip(upstream, new, strict=True)]
    got = sinks._plain_gradients(*upstream, *(x.detach() for x in leaves))
    want = torch.autograd.grad([new[n] for n in uses], leaves, [upstream[n] for n in uses], allow_unused=True)
    for x, y in zip(got, want, strict=True):
        assert (x is None and y is None) or torch.allclose(x.nan_to_num(), y.nan_to_num(), atol=1e-12)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float64, FP32])
@pytest.mark.parametrize("learns", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_some_gradients(learns: tuple[int, ...], dtype: torch.dtype, launched: list[str]) -> None:
    """Gradients of some of the tensors only; float64 runs in plain torch."""
    given = made(Case(), KERNELS_ON)
    given = [x.to(dtype) for x in given]
    leaves = [x.requires_grad_(n in learns) for n, x in enumerate(given)]
    out, lse = with_sinks(*leaves, True)
    assert lse is not None
    seen = lse.isfinite()
    weight, lse_weight = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out * weight).sum() + (lse * lse_weight)[seen].sum(), [leaves[n] for n in learns])
    others = [exact(x) for x in given]
    want, want_lse = formula(*others)
    loss = (want * weight.double().cpu()).sum() + (want_lse * lse_weight.double().cpu())[seen.cpu()].sum()
    for g, w in zip(got, torch.autograd.grad(loss, [others[n] for n in learns]), strict=True):
        assert error(g, w) < 2e-5
    assert launched == ([] if dtype == torch.float64 else ["fold", "gradients"])


@on_devices
def test_second_derivatives(device: str, launched: list[str]) -> None:
    """Gradients are differentiated in plain torch, also where the kernels gave the output."""
    given = made(Case(queries=5, size=3) if device == KERNELS_ON else Case(hidden=0, without=0), device)
    slopes = [torch.randn(given[0].shape).to(device), torch.randn(given[1].shape).to(device)]
    results = []
    for function, own in ((lambda *x: with_sinks(*x, True), given), (formula, [x.double().cpu() for x in given])):
        leaves = [x.detach().clone().requires_grad_() for x in own]
        weights = [s.to(own[0]).requires_grad_() for s in slopes]
        first = torch.autograd.grad(function(*leaves), leaves, weights, create_graph=True)
        seconds = torch.autograd.grad([(g.sin()).sum() for g in first], [*leaves, *weights])
        results.append([*first, *seconds])
    for got, want in zip(*results, strict=True):
        assert error(got, want) < 3e-5
    assert launched == (["fold"] if device == KERNELS_ON else [])


@on_devices
def test_twice_differentiable_in_float64(device: str) -> None:
    given = [x.double() for x in made(Case(batch=1, heads=2, queries=4, size=3, hidden=0, without=0), device)]
    leaves = [x.requires_grad_() for x in given]
    assert torch.autograd.gradcheck(lambda *x: with_sinks(*x, True), leaves)
    assert torch.autograd.gradgradcheck(lambda *x: with_sinks(*x, True), leaves)


@on_devices
def test_transforms(device: str, launched: list[str]) -> None:
    """Transforms, forward derivatives, batched gradients, subclasses and dispatch modes run in plain torch."""
    case = Case(queries=5, size=4, hidden=0, without=0)
    given = made(case, device)
    want = [x.to(device, FP32) for x in formula(*(x.double().cpu() for x in given))]

    def loss(*leaves: Tensor) -> Tensor:
        out, lse = with_sinks(*leaves, True)
        assert lse is not None
        return out.sin().sum() + lse.cos().sum()

    leaves = [x.detach().requires_grad_() for x in given]
    gradients = torch.autograd.grad(loss(*leaves), leaves)
    launched.clear()
    for got, wanted in zip(torch.func.grad(loss, (0, 1, 2))(*given), gradients, strict=True):
        assert torch.allclose(got, wanted, 1e-4, 1e-5)
    mapped = torch.func.vmap(lambda out, lse: with_sinks(out, lse, given[2], True))(*given[:2])
    directions = [torch.randn_like(x) for x in given]
    _, along = torch.func.jvp(loss, tuple(given), tuple(directions))
    wanted = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    assert torch.allclose(along, wanted, 1e-3, 1e-3)
    for got, exactly in zip(mapped, want, strict=True):
        assert torch.allclose(got, exactly, 1e-4, 1e-5)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert torch.allclose(with_sinks(*given, True)[0], want[0], 1e-4, 1e-5)
    assert launched == []
    out = with_sinks(*leaves, False)[0]
    slopes = torch.randn(2, *out.shape, device=device)
    launched.clear()
    batched = torch.autograd.grad(out, leaves, slopes, is_grads_batched=True, retain_graph=True)
    assert launched == []
    for n in range(2):
        for got, exactly in zip(batched, torch.autograd.grad(out, leaves, slopes[n], retain_graph=True), strict=True):
            assert torch.allclose(got[n], exactly, 1e-4, 1e-5)


@on_devices
@pytest.mark.parametrize("dtype", [FP32, FP16])  # Triton's interpreter does not round to bfloat16
def test_gradients_of_sinks_are_added_sequence_by_sequence(dtype: torch.dtype, device: str) -> None:
    """Those of sequences end to end in two rows are those of each one alone, added as autograd adds them."""
    import flexmasks.backends.operators  # noqa: F401

    lens, length = (1200, 1, 0, 299, 800, 700), 1500
    starts = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)
    out, lse, logits = made(Case(queries=length, dtype=dtype, sink_dtype=dtype), device)
    slopes = torch.randn_like(out), torch.randn_like(lse)

    def gradient(out: Tensor, lse: Tensor, slopes: tuple[Tensor, Tensor], **sequences: Any) -> Tensor:
        leaf = logits.detach().requires_grad_()
        found = with_sinks(out, lse, leaf, True, by_operator=True, **sequences)
        return torch.autograd.grad(found, leaf, slopes)[0]

    alone = []
    for first, end in itertools.pairwise(starts.tolist()):
        row, cut = first // length, slice(first % length, first % length + end - first)
        if first < end:
            alone.append(
                gradient(
                    out[row : row + 1, :, cut], lse[row : row + 1, :, cut], [x[row : row + 1, :, cut] for x in slopes]
                )
            )
    assert torch.equal(gradient(out, lse, slopes, starts=starts), functools.reduce(torch.add, alone))
    rows = [gradient(out[i : i + 1], lse[i : i + 1], [x[i : i + 1] for x in slopes]) for i in range(2)]
    assert torch.equal(gradient(out, lse, slopes), rows[0] + rows[1])


@needs_kernels
def test_a_failing_compiler(
    failures: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where Triton compiles nothing, plain torch runs, and a warning says so."""

    def compiled(*_: Any) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(launch, "compiled", compiled)
    monkeypatch.setattr(launch, "_launches", launch.Launches("of a test"))
    with caplog.at_level(logging.WARNING, "flexmasks"):
        for _ in range(2):
            with_sinks(*made(Case(), KERNELS_ON), True)
            out, _ = with_sinks(*(x.requires_grad_() for x in made(Case(), KERNELS_ON)), True)
            out.sum().backward()
    assert failures == ["no C compiler"]
    failures.clear()
    assert [record.getMessage() for record in caplog.records] == [
        "attention sinks run in plain torch, because Triton failed: RuntimeError: no C compiler"
    ]


def test_changing_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch sizes, heads and lengths share kernels; head sizes, and strides that no 8 divides, have their own."""
    kernels = set()

    def compiled(kernel: Any, _programs: int, warps: int, *given: tuple[Any, ...]) -> Callable[..., None]:
        arguments = [a for part in given for a in part]
        pairs = list(zip(kernel.params, arguments, strict=True))
        specialized = [
            p.name for p, a in pairs if isinstance(a, int) and not p.is_constexpr and not p.do_not_specialize
        ]
        assert not specialized
        kernels.add((kernel.__name__, warps, *[a for p, a in pairs if p.is_constexpr]))
        return lambda *_: None

    if INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    monkeypatch.setattr(launch, "compiled", compiled)
    monkeypatch.setattr(launch, "_launches", launch.Launches("of a test"))

    def run(case: Case) -> None:
        given = made(case)
        launch.fold(*given, True, False)
        launch.gradients(torch.ones_like(given[0]), torch.ones_like(given[1]), *given, (True, True, True))

    for queries in (9, 64, 65, 1000):
        for batch in (1, 2, 5):
            for heads in (1, 2, 3):
                run(Case(batch, heads, queries, 64, FP16))
    assert len(kernels) == 3  # forward, backward, and the sum of its parts
    for queries in range(1, 9):
        run(Case(2, 2, queries, 64, FP16))
    assert len(kernels) == 5  # few queries
    for layout in ("heads last", "plain"):
        run(replace(Case(2, 3, 100, 64, FP16), layout=layout))
    assert len(kernels) == 7
    run(Case(2, 3, 100, 63, FP16))
    assert len(kernels) == 9


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("size", "dtype"), [(64, "fp16"), (72, "bf16"), (128, "fp32"), (256, "fp16")])
def test_loads_and_stores_are_wide(size: int, dtype: str) -> None:
    """Each row is loaded and stored by 16 bytes, also if its size is no power of two."""
    width = triton.next_power_of_2(size)
    constants: dict[str, Any] = {"SIZE": size, "WIDTH": width, "ROWS": 4096 // width, "GRAIN": 8}
    rows, floats = dict.fromkeys(["out", "new_out", "d_out", "d_new_out"], f"*{dtype}"), "*fp32"
    others = dict.fromkeys(["lse", "new_lse", "d_lse", "d_new_lse", "sinks", "partial"], floats)
    n_wide = 4096 // 128 // (4 if dtype == "fp32" else 8)  # for each thread and tensor
    for kernel, n_loaded in ((launch.fold_kernel, 1), (launch.gradients_kernel, 2)):
        for heads_first in (False, True):
            code = assembly(kernel, rows | others, constants | {"HEADS_FIRST": heads_first}, 4)
            for operation, count in (("ld", n_loaded * n_wide), ("st", n_wide)):
                found = re.findall(operation + r"\.global[\w:.]*?(?:\.v(\d))?\.b(\d+)", code)
                assert [int(n or 1) * int(bits) for n, bits in found].count(128) == count


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_kernels_of_a_call() -> None:
    """In attention on Triton, sinks add one kernel forward, two backward, and none that computes element by element."""
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    logits = torch.randn(4, device="cuda", requires_grad=True)

    def names(with_sink: bool) -> list[str]:
        def step() -> None:
            sink = {"sink_logits": logits} if with_sink else {}
            # Both calls give the lse, which the sinks need.
            out, lse = flexmasks.attention(
                q, k, v, mask="sliding_window", window=100, backend="flex", return_lse=True, **sink
            )
            torch.autograd.grad((out, lse), (q, k, v, *sink.values()), (torch.ones_like(out), torch.ones_like(lse)))

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        events = (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        return sorted(event.name for event in events)

    more = names(True)
    for name in names(False):
        more.remove(name)
    assert sorted(more) == ["fold_kernel", "gradients_kernel", "sum_kernel"]


@pytest.mark.gpu
@pytest.mark.campaign  # takes more memory than other processes may leave
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_beyond_2_to_the_31() -> None:
    out = torch.ones(2, 130, 2**16, 128, device="cuda", dtype=FP16)
    assert out.numel() > 2**31
    lse, logits = torch.zeros(out.shape[:3], device="cuda"), torch.linspace(-3, 3, 130, device="cuda")
    given = [x.requires_grad_() for x in (out, lse, logits)]
    new, _ = with_sinks(*given, False)
    shares = torch.sigmoid(-logits.detach())
    assert torch.allclose(new[-1, :, -1, -1].float(), shares, 1e-2)
    slopes = torch.zeros_like(new)
    slopes[:, :, -1] = 1
    d_out, d_lse, d_sinks = torch.autograd.grad(new, given, slopes)
    assert torch.allclose(d_out[-1, :, -1, -1].float(), shares, 1e-2)
    assert torch.allclose(d_lse[-1, :, -1], 128 * shares * (1 - shares), 1e-4)
    assert torch.allclose(d_sinks, -2 * 128 * shares * (1 - shares), 1e-4)


@needs_kernels
def test_the_same_bits_again() -> None:
    """The gradient of the sinks is summed in one order."""
    given = [x.requires_grad_() for x in made(Case(heads=2, queries=300 if INTERPRETED else 9000), KERNELS_ON)]
    out, _ = with_sinks(*given, False)
    slopes = torch.randn_like(out)
    first, *others = (torch.autograd.grad(out, given[2], slopes, retain_graph=True)[0] for _ in range(3))
    assert all(torch.equal(first, x) for x in others)


# --- by the interpreter ---


@pytest.mark.skipif(INTERPRETED, reason="Triton is interpreted in this process already")
def test_kernels_by_the_interpreter() -> None:
    """The tests of this file and of padding, in a process that chose Triton's interpreter before it was imported."""
    check_by_the_interpreter(__file__, str(Path(__file__).with_name("test_padding.py")))
