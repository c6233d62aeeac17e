"""Kernels that changing numbers, batch sizes and heads compile: few, with right results."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import DEVICES, TOLERANCE, error, one_in
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from flexmasks.backends import flex, flex_kernels
from flexmasks.spec import numbers

pytestmark = pytest.mark.usefixtures("cold")


LENGTH = 160  # two blocks
ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("flex", "flex_flash")]


@pytest.fixture(params=["cpu without C++", pytest.param("cpu", marks=pytest.mark.campaign), *ON_GPU])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a backend, "cpu" for flex on a CPU. Kernels are counted, so they need no C++, which is slow to compile.

    Without it there is one block: outside of the blocks that kernels ask for, what masks show may be anything.
    """
    if request.param == "flex_flash":
        pytest.importorskip("flash_attn.cute")
    if request.param == "cpu without C++":
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        monkeypatch.setitem(globals(), "LENGTH", 30)
    return str(request.param).partition(" ")[0]


def name_of(backend: str) -> str:
    return "flex" if backend == "cpu" else backend


def naive(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, change: Callable[..., Tensor] | None = None) -> Tensor:
    """Return softmax(change(q @ k^T / sqrt(D))) @ v in float64, with keys repeated for grouped heads."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if change is not None:
        b, h, i, j = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
        scores = change(scores, b, h, i, j)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)
    return weights @ v


def kernels_of(calls: Sequence[Callable[[], None]]) -> list[int]:
    """Return how many kernels each call compiles."""
    counts = []
    for call in calls:
        start = counters["stats"]["unique_graphs"]
        call()
        counts.append(counters["stats"]["unique_graphs"] - start)
    return counts


def check(
    backend: str,
    shape: tuple[int, int, int, int],
    mask: Any,
    visible: Tensor | None = None,
    change: Callable[..., Tensor] | None = None,
    kv_heads: int | None = None,
    **arguments: Any,
) -> None:
    """Compare a call with the naive result; `visible` is torch's own mask of a function by default."""
    device = "cpu" if backend == "cpu" else "cuda"
    dtype = torch.float32 if backend == "cpu" else torch.bfloat16
    batch, heads, length, size = shape
    q, k, v = (
        torch.randn(batch, n, length, size, device=device, dtype=dtype) for n in (heads, *[kv_heads or heads] * 2)
    )
    with torch.no_grad():
        out = flexmasks.attention(q, k, v, mask=mask, backend=name_of(backend), **arguments)
    if visible is None:
        visible = create_mask(mask, batch, heads, length, length, device).cpu()
    assert error(out, naive(q, k, v, visible, change)) < TOLERANCE[dtype]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


# --- numbers of scores ---


def scaled(n: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score * n - (q - kv) * 0.1


def by_default(n: float) -> Callable[..., Tensor]:
    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, n: float = n) -> Tensor:
        return score + n * (h + 1)

    return change


def by_partial(n: float) -> Callable[..., Tensor]:
    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, n: int) -> Tensor:
        return torch.where((q - kv) % n == 0, score, score - 1)

    return functools.partial(change, n=int(n))


FACTOR = 1


def reads_a_global(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score - kv % FACTOR


def by_global(n: float) -> Callable[..., Tensor]:
    global FACTOR
    FACTOR = int(n)
    return reads_a_global


def nested(n: float) -> Callable[..., Tensor]:
    inner = scaled(n)
    return lambda score, b, h, q, kv: torch.tanh(inner(score, b, h, q, kv))


@pytest.mark.parametrize(
    "backend", ["cpu without C++", pytest.param("cpu", marks=pytest.mark.slow), *ON_GPU], indirect=True
)
@pytest.mark.parametrize(
    "make", [scaled, *(pytest.param(make, marks=pytest.mark.campaign) for make in (by_partial, by_default, nested))]
)
def test_numbers_of_scores_become_inputs(make: Callable[..., Any], backend: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(numbers, "MAX_COMPILED_VALUES", 1)

    def call(n: float) -> None:
        change = make(n)
        check(backend, (1, 2, LENGTH, 16), causal, change=change, score=change)

    made = [functools.partial(call, n) for n in (2.0, 3.0, 4.0, 2.0, 7.0)]
    if backend == "flex_flash":
        with pytest.raises(ValueError, match="takes no numbers of score changes as inputs"):
            kernels_of(made)
    else:
        assert kernels_of(made) == [1, 1, 0, 0, 0]


@pytest.mark.campaign
def test_twelve_caps_compile_seven_kernels(backend: str) -> None:
    calls = [
        functools.partial(
            check, backend, (1, 2, LENGTH, 16), causal,
            change=lambda score, b, h, q, kv, cap=cap: cap * torch.tanh(score / cap), score="softcap", cap=cap,
        )
        for cap in (0.5 + 0.25 * n for n in range(7 if backend == "flex_flash" else 12))
    ]  # fmt: skip
    if backend == "flex_flash":
        with pytest.raises(ValueError, match="takes no numbers of score changes as inputs"):
            kernels_of(calls)
    else:
        assert kernels_of(calls) == [1] * 7 + [0] * 5


def times(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, factor: float) -> Tensor:
    return score * factor


def branching(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, n: float) -> Tensor:
    return score * n if n > 1 else score + n


_TRIL = torch.ones(30, 30, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("name", "way"), one_in(3, list(itertools.product(["cap", "factor"], ["outside", "inside", "inside in float64"])))
)
def test_an_annealed_number_compiles_few_kernels(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a new value at each step. On a CPU there are gradients inside torch.compile alone."""
    torch._dynamo.reset()
    trains, attend = way != "outside", functools.partial(flexmasks.attention, backend="flex")
    if trains:
        attend = torch.compile(flexmasks.attention, fullgraph=True, backend="aot_eager")  # type: ignore[assignment]
    else:
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    dtype, tolerance = (torch.float64, 1e-12) if "64" in way else (torch.float32, TOLERANCE[torch.float32])
    start = counters["stats"]["unique_graphs"]
    for n in (0.5 + 0.1 * step for step in range(20)):
        score, change = {
            "cap": ("softcap", lambda s, b, h, q, kv, n=n: n * torch.tanh(s / n)),
            "factor": (times, lambda s, b, h, q, kv, n=n: s * n),
        }[name]
        qkv = [torch.randn(1, 2, 30, 16, dtype=dtype, requires_grad=trains) for _ in range(3)]
        out = attend(*qkv, mask="causal", score=score, **{name: n})
        exactly = [x.detach().double().requires_grad_() for x in qkv]
        want = naive(*exactly, _TRIL, change)
        assert error(out, want) < tolerance
        if trains:
            pairs = [torch.autograd.grad(y.square().sum(), x) for y, x in ((out, qkv), (want, exactly))]
            assert all(error(x, y) < 4 * tolerance for x, y in zip(*pairs, strict=True))
    assert counters["stats"]["unique_graphs"] - start <= (2 if trains else 7)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.campaign)])
def test_a_number_that_decides_stays_constant_inside_compile(
    dynamic: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flexmasks.attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (2.0, 3.0, 0.5, 4.0):
        q, k, v = torch.randn(3, 1, 2, 30, 16).unbind()
        out = compiled(q, k, v, mask="causal", score=branching, n=n)
        want = naive(q, k, v, _TRIL, lambda s, b, h, q, kv, n=n: s * n if n > 1 else s + n)
        assert error(out, want) < TOLERANCE[torch.float32]
    warnings = [record.getMessage() for record in caplog.records if record.name == "flexmasks"]
    assert len(warnings) == 1
    assert "`n`, read by a score function, had more than" in warnings[0]


@pytest.mark.slow
def test_an_annealed_window_inside_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flexmasks.attention, fullgraph=True, backend="aot_eager")
    start, distance = counters["stats"]["unique_graphs"], torch.arange(30)[:, None] - torch.arange(30)
    for window in range(2, 22):
        q, k, v = torch.randn(3, 1, 2, 30, 16).unbind()
        out = compiled(q, k, v, mask="sliding_window", window=window)
        assert error(out, naive(q, k, v, (distance >= 0) & (distance <= window))) < TOLERANCE[torch.float32]
    assert counters["stats"]["unique_graphs"] - start <= 3


def decides(n: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score * n if n > 3 else score + n


def by_type(n: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score * n if isinstance(n, float) else score


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (by_global, "reads `FACTOR`, a global variable"),
        pytest.param(decides, "fails with tensors in their places", marks=pytest.mark.campaign),
        (by_type, "computes otherwise"),
    ],
)
def test_numbers_that_cannot_be_inputs_are_right_and_warned_of_once(
    make: Callable[..., Any], reason: str, backend: str, monkeypatch: Any, caplog: Any
) -> None:
    if backend == "flex_flash":
        pytest.skip("flex_flash leaves such calls to flex")
    monkeypatch.setattr(numbers, "MAX_COMPILED_VALUES", 2)
    with caplog.at_level(logging.WARNING, "flexmasks"):
        for n in (2.0, 3.0, 4.0, 5.0):
            change = make(n)
            check(backend, (1, 2, LENGTH, 16), causal, change=change, score=change)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "`, read by a score function, had more than 2 values" in caplog.text
    assert reason in caplog.text


# --- numbers of masks ---


@pytest.mark.campaign
def test_a_number_that_changes_with_the_tensors_compiles_few_kernels(backend: str) -> None:
    """After six values of the number a mask goes as data, also where its tensors have new values."""

    def call(n: int) -> None:
        shown = torch.rand(2, LENGTH, device="cpu" if backend == "cpu" else "cuda") > 0.1
        check(backend, (2, 2, LENGTH, 16), lambda b, h, q, kv: (q + n >= kv) & shown[b, kv])

    counts = kernels_of([functools.partial(call, n) for n in [*range(9), *range(9), *range(9)]])
    assert sum(counts) <= 8  # six values, the data, and torch's second look at a size
    assert sum(counts[18:]) == 0


@pytest.mark.campaign
def test_numbers_of_registered_masks_compile_few_kernels(backend: str) -> None:
    def call(chunk: int) -> None:
        mask = flexmasks.get_mask("chunked", chunk=chunk)
        check(backend, (1, 2, LENGTH, 16), mask, visible=flexmasks.dense_mask(mask, LENGTH))

    calls = [functools.partial(call, n) for n in range(1, 11)]
    assert kernels_of(calls) == [1] * 7 + [0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("of", ["mask", pytest.param("score", marks=pytest.mark.campaign)])
def test_first_numbers_compile_nothing_where_later_numbers_run(
    of: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first numbers have kernels of their own for one sequence only."""
    if (of, backend) == ("score", "flex_flash"):
        pytest.skip("it takes no numbers of score changes as inputs")
    monkeypatch.setattr(numbers, "MAX_COMPILED_VALUES", 2)

    def call(batch: int, n: int) -> None:
        if of == "mask":
            mask = flexmasks.get_mask("chunked", chunk=n)
            check(backend, (batch, 2, LENGTH, 16), mask, visible=flexmasks.dense_mask(mask, LENGTH))
        else:
            check(backend, (batch, 2, LENGTH, 16), causal, change=scaled(n), score=scaled(n))

    calls = [(1, 2), (1, 3), (1, 4), (2, 4), (2, 2), (2, 3), (1, 2), (1, 3), (2, 5)]
    assert kernels_of([functools.partial(call, *numbers) for numbers in calls]) == [1, 1, 1, 1] + [0] * 5


@pytest.mark.slow
def test_first_numbers_compile_nothing_at_other_lengths(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that has run a first number at one length compiles for no other one where later numbers run there."""
    monkeypatch.setattr(numbers, "MAX_COMPILED_VALUES", 1)

    def call(length: int, n: int) -> None:
        mask = flexmasks.get_mask("sliding_window", window=n)
        check(backend, (1, 2, length, 16), mask, visible=flexmasks.dense_mask(mask, length))

    calls = [(0, 9), (0, 8), *[(n, 8) for n in (10, 20, 25)], (22, 9), (25, 9), (0, 9), (15, 8)]
    counts = kernels_of([functools.partial(call, LENGTH - shorter, n) for shorter, n in calls])
    assert counts[:2] == [1, 1]
    assert counts[5:] == [0] * 4


@pytest.mark.campaign
def test_first_numbers_keep_their_kernels_beside_other_forms(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that goes as data, or a score with inputs, needs no other kernels for first numbers of the other one."""
    if backend == "flex_flash":
        pytest.skip("it takes no numbers of score changes as inputs")
    monkeypatch.setattr(numbers, "MAX_COMPILED_VALUES", 2)

    def call(chunk: int, factor: float) -> None:
        mask = flexmasks.get_mask("chunked", chunk=chunk)
        visible = flexmasks.dense_mask(mask, LENGTH)
        check(backend, (1, 2, LENGTH, 16), mask, visible=visible, change=scaled(factor), score=scaled(factor))

    calls = [(2, 1.5), (3, 1.5), (4, 1.5), (4, 2.5), (4, 3.5)]
    counts = kernels_of([functools.partial(call, *numbers) for numbers in [*calls, *calls, (5, 4.5), (5, 1.5)]])
    assert counts[5:] == [0] * 7


def generating(start: int, shown: Tensor) -> Callable[..., Tensor]:
    """Return a mask in the way of transformers: closures around closures, with where the queries start as a number."""

    def moved(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return causal(b, h, q + start, kv + 0)

    def padded(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return shown[b, kv]

    def both(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        result = q.new_ones((), dtype=torch.bool)
        for mask in (moved, padded):
            result = result & mask(b, h, q, kv)
        return result

    return both


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
def test_a_generated_token_compiles_nothing(device: str) -> None:
    """The prompt compiles a kernel, and so do two lengths of one query, and those again beyond 128 keys.

    On a GPU the first token compiles its function too.
    """
    cache = torch.randn(2, 2, 2, 150, 16, device=device)

    def call(length: int, queries: int) -> None:
        q, (k, v) = torch.randn(2, 4, queries, 16, device=device), cache[:, :, :, :length]
        shown = torch.arange(length, device=device) >= torch.tensor([[5], [0]], device=device)
        mask = generating(length - queries, shown)
        with torch.no_grad():
            out = flexmasks.attention(q, k, v, mask=mask, q_offset="last")
        visible = create_mask(mask, 2, 4, queries, length, device)
        assert error(out, naive(q, k, v, visible.cpu())) < (TOLERANCE[torch.float32] if device == "cpu" else 2e-3)

    calls = [functools.partial(call, 120, 120), *(functools.partial(call, n, 1) for n in range(121, 145))]
    assert sum(kernels_of(calls)) <= (5 if device == "cpu" else 6)


@pytest.mark.parametrize("device", DEVICES)
def test_decoding_with_a_slice_of_a_longer_padding_mask(device: str) -> None:
    """torch's CPU kernels for any length raise for this function: it then goes as data, and compiles no more."""
    shown = torch.ones(2, 400, dtype=torch.bool, device=device)
    shown[0, :7] = False

    def call(length: int) -> None:
        q, (k, v) = torch.randn(2, 4, 1, 16, device=device), torch.randn(2, 2, 2, length, 16, device=device)
        part = shown[:, :length]
        with torch.no_grad():
            mask = flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) & part[b, kv])
            out = flexmasks.attention(q, k, v, mask=mask, q_offset=length - 1)
        assert error(out, naive(q, k, v, part[:, None, None].cpu())) < (1e-5 if device == "cpu" else 2e-3)

    counts = kernels_of([functools.partial(call, n) for n in range(300, 308)])
    assert sum(counts[:3]) <= 4
    assert sum(counts[3:]) == 0


# --- lengths ---


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "document", "key_padding", None])
def test_lengths_of_whole_tiles_have_their_own_kernels(mask: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sets of kernels, each for any length, read and write nothing outside of q, k and v, where NaN are.

    Lengths come in any order, also of queries and keys that differ.
    """

    def padded(length: int) -> Tensor:
        x = torch.full((2, 2, length + 256, 64), math.nan, device="cuda", dtype=torch.bfloat16)
        x[:, :, 128 : length + 128] = torch.randn(2, 2, length, 64, device="cuda")
        return x[:, :, 128 : length + 128].requires_grad_()

    def call(queries: int, keys: int) -> None:
        q, k, v = padded(queries), padded(keys), padded(keys)
        ids = torch.arange(max(queries, keys), device="cuda").expand(2, -1) // 200 % 2
        shown = torch.rand(2, keys, device="cuda") > 0.3
        arguments = {"document": {"document_ids": ids}, "key_padding": {"attention_mask": shown}}.get(mask or "", {})
        out = flexmasks.attention(q, k, v, mask=mask, q_offset=0, backend="flex", score="alibi", **arguments)
        gradient = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v), gradient)
        visible = flexmasks.dense_mask(
            mask or "full", queries, keys, q_offset=0, batch=2, heads=2, device="cuda", **arguments
        )
        exact = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
        wanted = naive(*exact, visible.cpu(), lambda score, b, h, i, j: score + 2.0 ** (-4.0 * (h + 1)) * (j - i))
        assert error(out, wanted) < 2e-2
        for x, y in zip(found, torch.autograd.grad(wanted, exact, gradient.double().cpu()), strict=True):
            assert error(x, y) < 3e-2

    monkeypatch.setattr(flex, "_LEAST_PADDED", (1024, 0))
    whole = [(384, 384), (512, 512), (640, 640), (1152, 1152), (896, 896)]
    others = [(300, 300), (450, 450), (700, 700), (1000, 1000), (833, 833)]
    long = [(1100, 1100), (1250, 1250), (1433, 1433), (1030, 1030), (1407, 1407)]
    mixed = [lengths for three in zip(whole, others, long, strict=True) for lengths in three]
    counts = kernels_of([functools.partial(call, *lengths) for lengths in mixed])
    assert sum(counts[:9]) <= 6
    assert sum(counts[9:]) == 0
    for lengths in [(384, 512), (384, 500), (1024, 256), (1000, 256), (1024, 300), (1100, 256)]:
        call(*lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 8, 1], ids=["at the start", "aligned", "not aligned"])
@pytest.mark.parametrize("batch", [1, 2])
def test_slices_of_one_projection_have_kernels_for_any_length(batch: int, first: int) -> None:
    """The projection begins at element `first` of a tensor; one that is not aligned is copied, and compiles nothing."""

    def call(length: int) -> None:
        whole = torch.randn(first + batch * length * 4 * 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        projection = whole[first:].view(batch, length, 4, 64)
        q, k, v = (x.transpose(1, 2) for x in projection.split([2, 1, 1], 2))
        out = flexmasks.attention(q, k, v, mask="causal", backend="flex")
        gradient = torch.randn_like(out)
        (found,) = torch.autograd.grad(out, whole, gradient)
        exact = whole.detach().double().cpu().requires_grad_()
        parts = exact[first:].view(batch, length, 4, 64).transpose(1, 2).split([2, 1, 1], 1)
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        wanted = naive(*parts, visible)
        assert error(out, wanted) < 2e-2
        assert error(found, torch.autograd.grad(wanted, exact, gradient.double().cpu())[0]) < 3e-2

    counts = kernels_of([functools.partial(call, n) for n in (256, 512, 640, 300, 433, 717, 1024, 1000, 384)])
    assert sum(counts[:6]) <= 4
    assert sum(counts[6:]) == 0


class Traced(Exception):
    """torch has traced a graph, which the test does not compile."""


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 2, 0, 3)], ids=["[B, S, H, D]", "[S, B, H, D]"])
def test_strides_inside_a_token_are_constants(order: tuple[int, ...], batch: int) -> None:
    """Triton then sees that rows of slices of a projection are aligned; lengths are symbolic all the same."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)

        def run(*args: Any) -> None:
            raise Traced

        return run

    torch._dynamo.reset()
    compiled = torch.compile(flex_kernels.flex, fullgraph=True, backend=keep)
    blocks = flexmasks.block_mask("causal", 256)
    for length in (96, 160, 224):
        sizes = {0: (batch, length), 1: (length, batch)}[order[0]]
        slices = torch.randn(*sizes, 24, 32).split([16, 4, 4], 2)
        q, k, v = (x.permute(order) for x in slices)
        blocks = flexmasks.block_mask("causal", length)
        packed = [flex_kernels.packed_dims(x) for x in (q, k, v)]
        assert any(packed[0])
        with pytest.raises(Traced):
            compiled(q, k, v, None, blocks, None, None, False, packed)
    assert len(graphs) == 2
    inputs = [x.meta["example_value"] for x in graphs[1].graph.nodes if x.op == "placeholder"]
    tensors = [x for x in inputs if isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point()]
    assert len(tensors) == 3
    for x in tensors:
        assert isinstance(x.shape[2], torch.SymInt)
        strides = [str(n) for n in x.stride()]  # a symbol that must have one value is shown as this value
        assert strides[1:] == ["32", "768", "1"] if order[0] == 0 else strides[0] == "768" and strides[1] == "32"


def test_which_strides_are_packed() -> None:
    def of(x: Tensor) -> tuple[int, ...]:
        return tuple(dim for dim, is_packed in enumerate(flex_kernels.packed_dims(x)) if is_packed)

    x = torch.empty(3, 64, 24, 32)
    assert of(x[:, :, :16].transpose(1, 2)) == (2,)
    assert of(x[:, :, :16].permute(1, 2, 0, 3)) == (0,)
    assert of(x) == of(x.transpose(1, 2)) == of(x.permute(1, 2, 0, 3)) == of(x.transpose(1, 2).contiguous()) == ()
    assert of(torch.empty(3, 8, 256, 32)[:, :, :100]) == ()  # a cache of more keys
    assert of(torch.empty(1, 1, 64, 32).expand(3, 8, 64, 32)) == ()


# --- batch sizes and heads ---

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.campaign
def test_eleven_batch_sizes_of_a_paged_cache_compile_three_kernels(backend: str) -> None:
    device, dtype = ("cpu", torch.float32) if backend == "cpu" else ("cuda", torch.bfloat16)
    k_cache, v_cache = torch.randn(2, 64, 16, 2, 16, device=device, dtype=dtype)

    def call(batch: int) -> None:
        tables = torch.stack([torch.randperm(64)[:8] for _ in range(batch)]).int().to(device)
        lengths = torch.randint(1, 128, (batch,), device=device)
        q = torch.randn(batch, 4, 1, 16, device=device, dtype=dtype)
        name = name_of(backend)
        with torch.no_grad():
            out = flexmasks.paged_attention(q, k_cache, v_cache, tables, lengths, mask="causal", backend=name)
        k, v = (x[tables.long()].flatten(1, 2).transpose(1, 2) for x in (k_cache, v_cache))
        visible = (torch.arange(128, device=device) < lengths[:, None]).cpu()[:, None, None]
        assert error(out, naive(q, k, v, visible)) < TOLERANCE[dtype]

    counts = kernels_of([functools.partial(call, n) for n in SIZES])
    if backend == "cpu":
        assert counts == [1, 1, 1] + [0] * 8  # one sequence, two, and any number
    else:
        assert sum(counts) <= len(SIZES)  # torch's decoding kernel on a GPU needs the batch size


@pytest.mark.slow
def test_eleven_batch_sizes_compile_three_kernels(backend: str) -> None:
    device = "cpu" if backend == "cpu" else "cuda"

    def call(batch: int) -> None:
        lengths = torch.randint(1, LENGTH, (batch,), device=device)
        visible = flexmasks.dense_mask("grouped_tril", LENGTH, batch=batch, seq_lens=lengths).cpu()
        check(backend, (batch, 4, LENGTH, 16), "grouped_tril", visible, kv_heads=2, seq_lens=lengths)

    assert kernels_of([functools.partial(call, n) for n in SIZES]) == [1, 1, 1] + [0] * 8


@pytest.mark.parametrize("device", DEVICES)
def test_explain_says_what_stays_constant(device: str) -> None:
    q, k, v = torch.randn(3, 2, 2, 160, 16, device=device)
    with torch.no_grad():
        text = str(flexmasks.explain(q, k, v, mask="grouped_tril", seq_lens=[160, 3], backend="flex"))
    words = " ".join(text.split())
    assert "the first few new batch sizes, lengths and memory layouts" in words
    assert "number of heads" in words
