"""The masked softmaxes against a float64 oracle, under every transform of torch, and their row plans."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import functions
import numpy as np
import oracles
import pytest
import torch
import triton
from functions import Drawn, drawn
from helpers import DEVICES, TOLERANCE, arguments, error, label, spread
from hypothesis import given, settings
from oracles import MASK_CASES, Case
from softmax_oracle import softmax
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from flexmasks.kernels import softmax_plain
from flexmasks.plans import rows
from flexmasks.spec.parameters import Size

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BOUND = TOLERANCE | {torch.float64: 1e-12}
NAN, INF = math.nan, math.inf
pytestmark = pytest.mark.usefixtures("one_thread")
FORWARD = torch.ops.flexmasks.masked_softmax.default
BACKWARD = torch.ops.flexmasks.masked_softmax_backward.default
LENGTHS = [1, 2, 15, 16, 17, 127, 128, 1000, 1001, 2048, 4097]


def poisoned(x: Tensor, visible: Tensor) -> Tensor:
    poison = torch.tensor([NAN, INF, -INF], dtype=x.dtype)[torch.randint(3, x.shape)]
    return torch.where(visible.expand(x.shape), x, poison)


def check(call: Any, x: Tensor, visible: Tensor, scale: float, device: str) -> None:
    """Output and gradient of `call`, with poison in what is hidden of both."""
    dy = torch.randn(x.shape).to(x.dtype)
    want, want_dx = softmax(x, visible, scale, dy)
    x = poisoned(x, visible).to(device).requires_grad_()
    y = call(x)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    hidden = ~visible.expand(x.shape)
    assert torch.all(y.detach().cpu()[hidden] == 0)
    assert error(y, want, 1e-9) < BOUND[x.dtype]
    y.backward(poisoned(dy, visible).to(device))
    assert x.grad is not None
    assert torch.all(x.grad.cpu()[hidden] == 0)
    unit = max(1e-9, float(want.norm()) / max(1, want.numel()) ** 0.5)
    assert error(x.grad, want_dx, unit) < 2 * BOUND[x.dtype]


# --- masks ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [c for c in MASK_CASES if c.q_offset == 0], ids=label)
def test_masks(case: Case, device: str) -> None:
    visible = oracles.dense(case)
    x = torch.randn(case.batch, case.heads, case.q_len, case.kv_len)
    given_arguments = arguments(case, device)
    del given_arguments["q_offset"]
    check(lambda x: flexmasks.masked_softmax(x, mask=case.name, **given_arguments), x, visible, 1.0, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", LENGTHS)
def test_lengths(columns: int, dtype: torch.dtype, device: str) -> None:
    x = (torch.randn(2, 2, 5, columns) * 2).to(dtype)
    lengths = torch.tensor([3, columns // 2])
    q, kv = torch.arange(5)[:, None], torch.arange(columns)
    visible = (kv <= q * columns // 4) & (kv < lengths.view(2, 1, 1, 1))
    scale = -0.5
    there = lengths.to(device)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q * columns // 4) & (kv < there[b])

    check(lambda x: flexmasks.masked_softmax(x, mask=mask, scale=scale), x, visible, scale, device)
    seen = visible.to(device)
    check(lambda x: flexmasks.masked_softmax(x, mask=seen, scale=scale), x, visible, scale, device)
    check(lambda x: flexmasks.scaled_masked_softmax(x, ~seen, scale), x, visible, scale, device)
    check(lambda x: flexmasks.scaled_masked_softmax(x, (~seen).int(), scale), x, visible, scale, device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_example_of_grouped_tril(device: str) -> None:
    """Rows 3 and 4 of batch 0 and row 4 of batch 1 are zero; a rightful probability of exactly 1 / S is kept."""
    x = torch.zeros(3, 2, 5, 5, device=device)
    y = flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=torch.tensor([3, 4, 5], device=device)).cpu()
    for b, length in enumerate((3, 4, 5)):
        for r in range(5):
            want = [1 / (r + 1) if c <= r and r < length and c < length else 0.0 for c in range(5)]
            assert torch.equal(y[b, 0, r], torch.tensor(want))
    assert torch.all(y[2, :, 4] == 0.2)
    one = flexmasks.masked_softmax(torch.randn(1, 1, 1, 1, device=device), mask="grouped_tril", seq_lens=[1])
    assert one.item() == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing(shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    for y in (
        flexmasks.masked_softmax(x),
        flexmasks.masked_softmax(x, mask="causal"),
        flexmasks.masked_softmax(x, mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)),
        flexmasks.scaled_masked_softmax(x, torch.ones(1, dtype=torch.bool, device=device)),
    ):
        assert y.shape == x.shape
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.shape == x.shape


@pytest.mark.parametrize("device", DEVICES)
def test_masks_that_broadcast(device: str) -> None:
    x = torch.randn(2, 3, 4, 37)
    for shape in ((37,), (4, 37), (4, 1), (2, 1, 1, 37), (2, 1, 4, 37), (3, 1, 1), ()):
        hidden = torch.rand(shape) < 0.5
        there = hidden.to(device)
        check(lambda x, m=there: flexmasks.scaled_masked_softmax(x, m), x, ~hidden, 1.0, device)
    line = torch.rand(37) < 0.5
    check(lambda x: flexmasks.scaled_masked_softmax(x, line.to(device)), x[0, 0, 0], ~line, 1.0, device)


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str) -> None:
    base = torch.randn(4, 3, 20, 24, device=device)
    for x in (
        base.transpose(2, 3),
        base.transpose(0, 1),
        base[..., ::2],
        base[:, :, ::3],
        base[:1].expand(4, 3, 20, 24),
    ):
        want, _ = softmax(x, torch.ones(x.shape[-2:], dtype=torch.bool).tril())
        y = flexmasks.masked_softmax(x, mask="causal")
        assert y.is_contiguous()
        assert error(y, want, 1e-9) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_what_torch_gives_for_infinite_scores(device: str) -> None:
    x = torch.randn(6, 8, device=device)
    x[0] = -INF
    x[1, 3] = INF
    x[2, 3] = NAN
    x[3, :5] = -INF
    x[4] = torch.finfo(torch.float32).min
    hidden = torch.arange(8, device=device) > 6
    y = flexmasks.scaled_masked_softmax(x, hidden)
    assert torch.allclose(y[:, :7], torch.softmax(x[:, :7], -1), equal_nan=True)
    assert torch.all(y[:, 7] == 0)


@pytest.mark.parametrize("shape", [(64, 128, 128), (128, 64, 1, 128), (8192, 1, 128), (16, 1, 1 << 16)])
def test_memory_is_bounded(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision is not copied to float32 as a whole, however its rows are laid out."""
    monkeypatch.setattr(softmax_plain, "_PART_ELEMENTS", math.prod(shape) // 8)
    x = torch.randn(shape).bfloat16()
    hidden = torch.rand(shape[-1]) < 0.5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        y = flexmasks.scaled_masked_softmax(x, hidden)
        dx = BACKWARD(x, y, None, 1.0)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest <= x.nbytes
    monkeypatch.setattr(softmax_plain, "_PART_ELEMENTS", x.numel())
    assert torch.equal(y, flexmasks.scaled_masked_softmax(x, hidden))
    assert torch.equal(dx, BACKWARD(x, y, None, 1.0))


# --- torch's transforms ---


def problem() -> tuple[Tensor, Tensor, Tensor, Any, Any]:
    """Scores, a direction, the hidden places, the call, and the same in torch's own operations."""
    x, v = torch.randn(2, 2, 3, 4, 17, dtype=torch.float64)
    hidden = torch.rand(2, 1, 4, 17) < 0.4
    hidden[0, 0, 1] = True

    def naive(x: Tensor) -> Tensor:
        weights = torch.softmax((x * 0.7).masked_fill(hidden, -1e300), -1)
        return torch.where(hidden, 0, weights)

    return x, v, hidden, lambda x: flexmasks.scaled_masked_softmax(x, hidden, 0.7), naive


def close(a: Any, b: Any) -> None:
    for got, want in zip(*(torch.utils._pytree.tree_leaves(t) for t in (a, b)), strict=True):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)


def test_transforms() -> None:
    x, v, _, call, naive = problem()

    def loss(f: Any) -> Any:
        return lambda x: (f(x) ** 2 * v).sum()

    close(grad(loss(call))(x), grad(loss(naive))(x))
    close(vjp(call, x)[1](v), vjp(naive, x)[1](v))
    close(jvp(call, (x,), (v,)), jvp(naive, (x,), (v,)))
    close(jacrev(call)(x), jacrev(naive)(x))
    close(jacfwd(call)(x), jacfwd(naive)(x))
    second = [grad(lambda x, f=f: grad(loss(f))(x).pow(3).sum()) for f in (call, naive)]
    close(second[0](x), second[1](x))
    forward_over_reverse = [jvp(grad(loss(f)), (x,), (v,)) for f in (call, naive)]
    close(*forward_over_reverse)
    many = torch.randn(5, *x.shape, dtype=x.dtype)
    close(vmap(call)(many), torch.stack([naive(t) for t in many]))
    close(vmap(call, 2, 1)(many.movedim(0, 2)), torch.stack([naive(t) for t in many], 1))
    close(vmap(grad(loss(call)))(many), torch.stack([grad(loss(naive))(t) for t in many]))
    close(grad(lambda t: vmap(call)(t).pow(2).sum())(many), grad(lambda t: vmap(naive)(t).pow(2).sum())(many))
    masks = torch.rand(3, 4, 1) < 0.5
    mapped = vmap(lambda m: flexmasks.scaled_masked_softmax(x, m))(masks)
    close(mapped, torch.stack([flexmasks.scaled_masked_softmax(x, m) for m in masks]))
    planned = vmap(grad(lambda t: flexmasks.masked_softmax(t, mask="causal").pow(2).sum()))(many)
    close(
        planned, torch.stack([grad(lambda t: flexmasks.masked_softmax(t, mask="causal").pow(2).sum())(t) for t in many])
    )


def test_gradients_of_gradients() -> None:
    x, _, _, call, _ = problem()
    x.requires_grad_()
    options = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(call, (x,), **options)
    assert torch.autograd.gradgradcheck(call, (x,), check_fwd_over_rev=True)


def operator_arguments(device: str = "cpu") -> list[tuple[Any, ...]]:
    dtype = torch.float64 if device == "cpu" else torch.float32
    x = torch.randn(2, 3, 4, 40, dtype=dtype, device=device, requires_grad=True)
    bounds = torch.stack([torch.arange(4), torch.arange(4) * 13], -1).int().expand(2, 1, 4, 2).contiguous().to(device)
    bits = torch.randint(-(2**31), 2**31, (1, 3, 4, 2)).int().to(device)
    mask = (torch.rand(2, 1, 1, 40) < 0.5).to(device)
    return [
        (x, bounds, None, None, False, 0.7),
        (x, bounds, bits, None, False, 1.0),
        (x, None, None, mask, False, -0.7),
        (x, bounds, None, mask, True, 1.0),
        (x, None, None, None, False, 1.0),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_operators(device: str) -> None:
    for given_arguments in operator_arguments(device):
        torch.library.opcheck(FORWARD, given_arguments)
    x, bounds, *_ = operator_arguments(device)[0]
    y = FORWARD(x, bounds, None, None, False, 0.7).detach().requires_grad_()
    torch.library.opcheck(BACKWARD, (torch.randn_like(y).requires_grad_(), y, bounds, 0.7))


def test_operators_are_differentiable() -> None:
    for x, *rest in operator_arguments()[1:3]:
        assert torch.autograd.gradcheck(lambda x, rest=rest: FORWARD(x, *rest), (x,))
        assert torch.autograd.gradgradcheck(lambda x, rest=rest: FORWARD(x, *rest), (x,))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_derivatives_of_derivatives(order: int) -> None:
    """Forward mode and reverse mode, in any order, of the call and of the bare operator."""
    x, _, hidden, call, naive = problem()
    directions = torch.randn(order, *x.shape, dtype=x.dtype)

    def forward(f: Any, v: Tensor) -> Any:
        return lambda x: jvp(f, (x,), (v,))[1]

    def reverse(f: Any, v: Tensor) -> Any:
        return lambda x: vjp(f, x)[1](v)[0]

    def operator(x: Tensor) -> Tensor:
        return FORWARD(x, None, None, hidden, False, 0.7)  # type: ignore[no-any-return]

    for modes in itertools.product((forward, reverse), repeat=order):
        functions = [call, operator, naive]
        for mode, v in zip(modes, directions, strict=True):
            functions = [mode(f, v) for f in functions]
        got, of_operator, want = (f(x) for f in functions)
        close(got, want)
        close(of_operator, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_second_derivatives_are_summed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4000)
    v, w = torch.randn(2, *x.shape)
    hidden = torch.rand(4000) < 0.3

    def second(f: Any, dtype: torch.dtype) -> Tensor:
        one, v_, w_ = (t.to(dtype) for t in (x.to(given), v.to(given), w.to(given)))
        one.requires_grad_()
        (first,) = torch.autograd.grad(f(one), one, v_, create_graph=True)
        return torch.autograd.grad(first, one, w_)[0]

    given = dtype
    want = second(lambda x: x.masked_fill(hidden, -1e300).softmax(-1), torch.float64)
    got = second(lambda x: flexmasks.scaled_masked_softmax(x, hidden), dtype)
    assert error(got, want, float(want.norm()) / want.numel() ** 0.5) < 4 * BOUND[dtype]


def test_forward_mode_without_torch_func() -> None:
    x, v, _, call, naive = problem()
    want = jvp(naive, (x,), (v,))[1]
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, v))).tangent
        close(tangent, want)


def test_transforms_inside_a_compiled_function() -> None:
    x, v, _, call, naive = problem()

    def transformed(f: Any) -> Any:
        def loss(x: Tensor) -> Tensor:
            return (f(x) ** 2 * v).sum()

        return lambda x: (
            grad(loss)(x),
            jvp(f, (x,), (v,))[1],
            jvp(grad(loss), (x,), (v,))[1],
            vmap(grad(loss), 0, 1)(torch.stack([x, v])),
            jacfwd(lambda x: f(x)[0, 0, 0])(x),
        )

    torch._dynamo.reset()
    close(torch.compile(transformed(call), fullgraph=True, backend="aot_eager")(x), transformed(naive)(x))


def test_functionalize() -> None:
    x, _, _, call, naive = problem()
    close(torch.func.functionalize(call)(x), naive(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    lengths = torch.tensor([3, 4], device=device)

    def by_name(x: Tensor) -> Tensor:
        return flexmasks.masked_softmax(x * 2, mask="grouped_tril", seq_lens=lengths) + 1

    def by_function(x: Tensor) -> Tensor:
        return flexmasks.masked_softmax(x, mask=lambda b, h, q, kv: (kv % 3 == h) & (kv < q), scale=0.5)

    window = flexmasks.get_mask("sliding_window", window=5) & (lambda b, h, q, kv: kv != 3)

    def by_value(x: Tensor) -> Tensor:
        return flexmasks.masked_softmax(x, mask=window)

    def by_tensor(x: Tensor) -> Tensor:
        return flexmasks.scaled_masked_softmax(x, x[:, :1] > 0, 0.5).exp()

    for function in (by_name, by_function, by_value, by_tensor):
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        for q_len, kv_len in ((6, 33), (7, 40)):
            x = torch.randn(2, 3, q_len, kv_len, device=device, requires_grad=True)
            got, want = compiled(x), function(x)
            assert torch.allclose(got, want, atol=1e-6)
            dy = torch.randn_like(got)
            assert torch.allclose(*(torch.autograd.grad(y, x, dy)[0] for y in (got, want)), atol=1e-6)


def test_exported() -> None:
    class Softmax(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            causal = flexmasks.masked_softmax(x, mask="causal")
            return causal, flexmasks.scaled_masked_softmax(x, mask, 0.5)

    x, mask = torch.randn(2, 3, 6, 33), torch.rand(2, 1, 6, 33) < 0.5
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = {"x": {3: length}, "mask": {3: length}}
    for strict in (True, False):
        exported = torch.export.export(Softmax(), (x, mask), dynamic_shapes=shapes, strict=strict).module()
        for given_arguments in ((x, mask), (torch.randn(2, 3, 6, 40), torch.rand(2, 1, 6, 40) < 0.5)):
            for got, want in zip(exported(*given_arguments), Softmax()(*given_arguments), strict=True):
                assert torch.allclose(got, want)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_compiled_with_nothing(shape: tuple[int, ...], dynamic: bool) -> None:
    torch._dynamo.reset()
    shift = torch.tensor(1)

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def several(x: Tensor) -> tuple[Tensor, ...]:
        by_function = flexmasks.masked_softmax(x, mask=lambda b, h, q, kv: q + shift > kv)
        by_other = flexmasks.masked_softmax(x, mask=lambda b, h, q, kv: (q >= kv) & (kv != b) | (h > 0))
        return by_function, by_other, flexmasks.masked_softmax(x, mask="causal")

    for y in several(torch.zeros(shape)):
        assert y.shape == shape


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_compiled_with_sizes_that_depend_on_data(dim: int) -> None:
    torch._dynamo.reset()

    def scores(counted: Tensor) -> Tensor:
        sizes = [2, 3, 4, 5]
        sizes[dim] = counted.nonzero().shape[0]
        return torch.arange(float(math.prod(sizes))).reshape(sizes).cos()

    def all_of(counted: Tensor) -> list[Tensor]:
        x = scores(counted)
        seen = torch.ones(x.shape, dtype=torch.bool)
        line = torch.ones([n if d == dim else 1 for d, n in enumerate(x.shape)], dtype=torch.bool)
        return [
            flexmasks.masked_softmax(x, mask=lambda b, h, q, kv: (q >= kv) & (kv != b) | (h > 0)),
            flexmasks.masked_softmax(x, mask="causal"),
            flexmasks.masked_softmax(x, mask=seen),
            flexmasks.scaled_masked_softmax(x, ~line),
        ]

    def wrong(counted: Tensor) -> Tensor:
        return flexmasks.scaled_masked_softmax(torch.zeros(2, 3), counted.nonzero()[:, 0] > 0)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(all_of, fullgraph=True, backend="aot_eager")
        for count in (7, 1, 0):
            torch.testing.assert_close(compiled(torch.ones(count)), all_of(torch.ones(count)))
        if dim == 0:
            compiled = torch.compile(wrong, fullgraph=True, backend="aot_eager")
            assert compiled(torch.ones(3)).shape == (2, 3)
            with pytest.raises(RuntimeError):
                compiled(torch.ones(4))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_leaves_the_dtype(device: str) -> None:
    with torch.autocast(device, torch.bfloat16):
        x = torch.randn(1, 1, 4, 4, device=device, requires_grad=True)
        y = flexmasks.masked_softmax(x, mask="causal")
        y.sum().backward()
    assert y.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_by_make_fx(mode: str) -> None:
    """Lengths, and what a function captures of the inputs, stay inputs of the graph."""

    def function(x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        return (
            flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=lengths),
            flexmasks.masked_softmax(x, mask=lambda b, h, q, kv: kv < lengths[b] + q),
            grad(lambda x: flexmasks.masked_softmax(x, mask="causal").pow(2).sum())(x),
        )

    graph = make_fx(function, tracing_mode=mode)(torch.randn(2, 3, 4, 5), torch.tensor([4, 4]))
    sizes = (2, 3, 6, 7) if mode == "symbolic" else (2, 3, 4, 5)
    x, lengths = torch.randn(sizes), torch.tensor([2, 3])
    torch.testing.assert_close(graph(x, lengths), function(x, lengths))


def test_what_a_mask_is_made_of_may_be_mapped() -> None:
    x, lengths = torch.randn(3, 2, 2, 5, 5), torch.tensor([[1, 2], [5, 4], [3, 0]])

    def by_name(x: Tensor, lengths: Tensor) -> Tensor:
        return flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=lengths)

    def by_function(x: Tensor, lengths: Tensor) -> Tensor:
        return flexmasks.masked_softmax(x, mask=lambda b, h, q, kv: (kv < lengths[b]) | (q == kv))

    for f in (by_name, by_function):
        each = [f(*t) for t in zip(x, lengths, strict=True)]
        torch.testing.assert_close(vmap(f)(x, lengths), torch.stack(each))
        torch.testing.assert_close(vmap(f, (None, 0))(x[0], lengths), torch.stack([f(x[0], n) for n in lengths]))
        slope = grad(lambda x, n, f=f: f(x, n).pow(2).sum())
        torch.testing.assert_close(
            vmap(slope)(x, lengths), torch.stack([slope(*t) for t in zip(x, lengths, strict=True)])
        )


@pytest.mark.parametrize("mask", ["causal", lambda b, h, q, kv: q > kv])
def test_fake_and_meta_scores(mask: Any) -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3, 4, 5)
        assert flexmasks.masked_softmax(x, mask=mask).shape == x.shape
        lengths = torch.tensor([1, 2])
        assert flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=lengths).shape == x.shape
    assert flexmasks.masked_softmax(x, mask=mask).shape == x.shape
    x = torch.empty(2, 3, 4, 5, device="meta", requires_grad=True)
    y = flexmasks.masked_softmax(x, mask=mask)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    for lengths in (torch.empty(2, dtype=torch.int64, device="meta"), [3, 4]):
        assert flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=lengths).shape == x.shape


def test_fake_and_meta_tensors() -> None:
    with torch._subclasses.FakeTensorMode():
        y = flexmasks.scaled_masked_softmax(torch.empty(2, 3, 4), torch.empty(3, 4, dtype=torch.bool))
    assert y.shape == (2, 3, 4)
    x = torch.empty(2, 3, 4, device="meta", requires_grad=True)
    y = flexmasks.scaled_masked_softmax(x, torch.empty(3, 4, dtype=torch.bool, device="meta"))
    assert torch.autograd.grad(y.sum(), x)[0].shape == (2, 3, 4)


# --- row plans ---


def check_rows(mod: Any, batch: int, heads: int, q_len: int, kv_len: int) -> rows.Rows:
    """Bounds and bits against the dense mask."""
    cpu = torch.device("cpu")
    made = rows.build(mod, batch, heads, q_len, kv_len, cpu)
    visible = create_mask(mod, batch, heads, q_len, kv_len, device="cpu")
    if made.bounds is None:
        assert made.bits is None
        assert bool(visible.all())
        return made
    bounds = made.bounds.expand(batch, heads, q_len, 2)
    for seen, (first, end) in zip(visible.flatten(0, 2).tolist(), bounds.flatten(0, 2).tolist(), strict=True):
        places = [n for n, s in enumerate(seen) if s]
        assert (first, end) == ((places[0], places[-1] + 1) if places else (0, 0))
    interval = (torch.arange(kv_len) >= bounds[..., :1]) & (torch.arange(kv_len) < bounds[..., 1:])
    if made.bits is None:
        assert torch.equal(interval, visible)
    else:
        assert not torch.equal(interval, visible)
        words = made.bits.expand(batch, heads, q_len, -1)
        assert words.shape[-1] == -(-kv_len // 32)
        column = torch.arange(kv_len)
        assert torch.equal((words[..., column // 32].long() >> (column % 32) & 1).bool(), visible)
    return made


@pytest.mark.parametrize("case", spread([c for c in MASK_CASES if c.q_offset == 0], 4), ids=label)
def test_rows_of_registered_masks(case: Case) -> None:
    given_arguments = arguments(case)
    del given_arguments["q_offset"]
    made = flexmasks.get_mask(case.name, **given_arguments)
    size = Size(case.batch, case.heads, case.q_len, case.kv_len, torch.device("cpu"))
    check_rows(made.bind(made.resolve(size)), case.batch, case.heads, case.q_len, case.kv_len)


@pytest.mark.parametrize("write", [functions.structured, functions.composed])
def test_rows_of_random_masks(write: Any) -> None:
    with_holes = 0

    @settings(max_examples=150)
    @given(drawn(write))
    def right(case: Drawn) -> None:
        nonlocal with_holes
        made = check_rows(functions.compiled(case.expression, functions.LONG_TABLES), *case.sizes[:4])
        with_holes += made.bits is not None

    right()
    assert 10 < with_holes < 140


def test_random_compositions() -> None:
    @settings(max_examples=40)
    @given(drawn(functions.structured))
    def right(case: Drawn) -> None:
        mod = functions.compiled(case.expression, functions.LONG_TABLES)
        visible = create_mask(mod, case.batch, case.heads, case.q_len, case.kv_len, device="cpu")[:, :, :9]
        x = torch.randn(visible.shape)
        inner = flexmasks.get_mask(mod) & flexmasks.get_mask("full")
        check(lambda x: flexmasks.masked_softmax(x, mask=inner), x, visible, 1.0, "cpu")

    right()


def test_rows_have_the_dimensions_that_the_mask_depends_on() -> None:
    assert check_rows(lambda b, h, q, kv: kv >= 0, 2, 3, 5, 300) == rows.Rows(None, None)
    for mod, shape in (
        (lambda b, h, q, kv: kv < 200, (1, 1, 1, 2)),
        (lambda b, h, q, kv: (kv <= q) & (kv > b), (2, 1, 5, 2)),
        (lambda b, h, q, kv: kv < 100 + 50 * h, (1, 3, 1, 2)),
        (lambda b, h, q, kv: q > 3, (1, 1, 5, 2)),
        (lambda b, h, q, kv: kv % 7 != h, (1, 3, 1, 2)),
    ):
        made = check_rows(mod, 2, 3, 5, 300)
        assert made.bounds is not None
        assert made.bounds.shape == shape


def test_rows_are_kept() -> None:
    flexmasks.clear_caches()
    x, lengths = torch.randn(2, 2, 8, 8), torch.tensor([5, 8])

    def hits() -> int:
        return flexmasks.cache_info()["rows"].hits

    first = flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=lengths)
    assert hits() == 0
    flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=lengths)
    assert hits() == 1
    lengths[0] = 3
    second = flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=lengths)
    assert hits() == 1
    assert not torch.equal(first, second)
    assert flexmasks.cache_info()["rows"].entries == 1
    del lengths
    assert flexmasks.cache_info()["rows"].entries == 0


# --- errors ---

X = torch.zeros(2, 3, 4, 5)
NESTED = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: flexmasks.masked_softmax([1.0]), TypeError, "`x` must be a tensor .*, got list; use torch.as_tensor"),
        (lambda: flexmasks.masked_softmax(X.int()), TypeError, r"`x` must be .* float16, .*, got int32\[2, 3, 4, 5\]"),
        (lambda: flexmasks.masked_softmax(NESTED), TypeError, "`x` must be a dense tensor, got a nested one"),
        (lambda: flexmasks.scaled_masked_softmax(X, NESTED > 0), TypeError, "`mask` must be a dense tensor, got a nes"),
        (lambda: flexmasks.masked_softmax(X, mask=(X > 0).to_sparse()), TypeError, "`mask` must be .* layout .*sparse"),
        (lambda: flexmasks.scaled_masked_softmax(X, (X > 0).to_sparse()), TypeError, "`mask` must be a dense tensor"),
        (lambda: flexmasks.masked_softmax(X, mask=[True] * 5), TypeError, "boolean tensor, .* list; use torch"),
        (lambda: flexmasks.scaled_masked_softmax(X, np.ones(5) > 0), TypeError, "got ndarray; use torch.as_tensor"),
        (lambda: flexmasks.masked_softmax(X, mask=torch.nn.Linear(5, 5)), TypeError, "mask Linear: .* 5 were given"),
        (lambda: flexmasks.masked_softmax(X, scale=torch.tensor(2.0)), TypeError, "got Tensor; multiply `x` by it"),
        (lambda: flexmasks.masked_softmax(X, scale=1j), TypeError, "`scale` must be a number, got 1j"),
        (lambda: flexmasks.masked_softmax(X[0]), ValueError, r"4 dimensions, \[B, H, Q, K\], got float32\[3, 4, 5\]"),
        (lambda: flexmasks.masked_softmax(X.to_sparse()), TypeError, "dense tensor"),
        (lambda: flexmasks.masked_softmax(X, scale="1"), TypeError, "`scale` must be a number, got '1'"),
        (lambda: flexmasks.masked_softmax(X, scale=True), TypeError, "`scale` must be a number, got True"),
        (lambda: flexmasks.masked_softmax(X, scale=NAN), ValueError, "`scale` must be finite, at most .*, got nan"),
        (lambda: flexmasks.masked_softmax(X, mask="casual"), ValueError, "did you mean 'causal'"),
        (lambda: flexmasks.masked_softmax(X, window=2), TypeError, "no parameter is named `window`"),
        (lambda: flexmasks.masked_softmax(X, mask=X > 0, window=2), TypeError, "no parameter is named `window`"),
        (lambda: flexmasks.masked_softmax(X, mask="sliding_window"), TypeError, "needs `window`"),
        (lambda: flexmasks.masked_softmax(X, mask="grouped_tril", seq_lens=[1, 9]), ValueError, "seq_lens"),
        (lambda: flexmasks.masked_softmax(X, mask=X), TypeError, "or a boolean tensor, True = visible, got float32"),
        (lambda: flexmasks.masked_softmax(X, mask=X[:, :2] > 0), ValueError, r"broadcast to x's shape \[2, 3, 4, 5\]"),
        (lambda: flexmasks.masked_softmax(X, mask=X[None] > 0), ValueError, "must broadcast"),
        (lambda: flexmasks.masked_softmax(X, mask=lambda b, h, q, kv: q), TypeError, "boolean"),
        (lambda: flexmasks.scaled_masked_softmax(X, X), TypeError, "boolean or integer .* True = hidden, got float32"),
        (lambda: flexmasks.scaled_masked_softmax(X, None), TypeError, "boolean or integer tensor, .* got NoneType"),
        (lambda: flexmasks.scaled_masked_softmax(X, X[..., :2] > 0), ValueError, "must broadcast"),
        (lambda: flexmasks.scaled_masked_softmax(X, (X > 0).to("meta")), ValueError, "`mask` is on meta, `x` on cpu"),
        (lambda: flexmasks.scaled_masked_softmax(X[0, 0, 0, 0], X > 0), ValueError, "at least one dimension"),
    ],
)  # fmt: skip
def test_errors(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert str(caught.value).startswith("flexmasks")


def test_errors_inside_a_compiled_function() -> None:
    for call, message in (
        (lambda x: flexmasks.masked_softmax(x, mask=lambda b, h, q, kv: q), "a boolean tensor, got one of int64"),
        (lambda x: flexmasks.scaled_masked_softmax(x, x[..., :2] > 0), "must broadcast to x's shape"),
        (lambda x: flexmasks.masked_softmax(x, mask="casual"), "did you mean 'causal'"),
        (lambda x: flexmasks.masked_softmax(x, scale=NAN), "`scale` must be finite"),
    ):  # fmt: skip
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            torch.compile(call, fullgraph=True, backend="eager")(X)


@pytest.mark.parametrize("scale", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_numbers_of_all_kinds(scale: Any) -> None:
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(flexmasks.masked_softmax(x, scale=scale), flexmasks.masked_softmax(x, scale=0.5))
    assert torch.equal(flexmasks.masked_softmax(x, scale=np.int64(2)), flexmasks.masked_softmax(x, scale=2))


def test_a_module_is_a_mask() -> None:
    class Threshold(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("most", torch.tensor(2))

        def forward(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q - kv < self.most

    x, module = torch.randn(1, 2, 6, 6), Threshold()
    for most in (2, 4):
        module.most.fill_(most)
        want = flexmasks.masked_softmax(x, mask=lambda b, h, q, kv: q - kv < most)  # noqa: B023
        assert torch.equal(flexmasks.masked_softmax(x, mask=module), want)
        compiled = torch.compile(lambda x: flexmasks.masked_softmax(x, mask=module), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), want)


# --- kernels ---


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton is interpreted in this process already")
@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7),
    reason="the interpreter of Triton 3.6 has no loops over loaded numbers with a new NumPy",
)
def test_kernels_by_the_interpreter() -> None:
    """The kernels' own tests, in a process that chose Triton's interpreter before it was imported."""
    file = Path(__file__).with_name("test_softmax_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    ran = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=file.parents[1],
        capture_output=True,
    )
    assert ran.returncode == 0, ran.stdout.decode()[-4000:]
    assert " passed" in ran.stdout.decode()


@pytest.mark.parametrize("device", DEVICES)
def test_transforms_with_nothing_planned(device: str) -> None:
    """A plan made inside a transform serves after it, and inside others."""
    x = torch.randn(1, 1, 3, 4, device=device)

    def total(x: Tensor) -> Tensor:
        return flexmasks.masked_softmax(x, mask="causal").pow(2).sum()

    def expected(x: Tensor) -> Tensor:
        hidden = ~torch.ones(3, 4, dtype=torch.bool, device=device).tril()
        return x.masked_fill(hidden, -torch.inf).softmax(-1).pow(2).sum()

    for transform in (torch.func.grad, torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        want = transform(expected)(x)
        flexmasks.clear_caches()
        for _ in range(2):
            torch.testing.assert_close(transform(total)(x), want)
        assert torch.isfinite(total(x))
    flexmasks.clear_caches()
    made = torch.func.grad(lambda x: x.sum() + flexmasks.block_mask("causal", 256, device=device).kv_num_blocks.sum())
    assert torch.equal(made(x), torch.ones_like(x))


@pytest.mark.parametrize("device", DEVICES)
def test_negative_views(device: str) -> None:
    values = torch.randn(2, 1, 5, 6, device=device)
    x = torch.complex(values, values).conj().imag
    assert x.is_neg()
    want = flexmasks.masked_softmax(-values, mask="causal")
    assert torch.equal(flexmasks.masked_softmax(x, mask="causal"), want)
    leaf = values.clone().requires_grad_()
    y = flexmasks.masked_softmax(leaf, mask="causal")
    (of_negative,) = torch.autograd.grad(y, leaf, x, retain_graph=True)
    (of_plain,) = torch.autograd.grad(y, leaf, -values)
    assert torch.equal(of_negative, of_plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-50, -1e-50, 0.0])
def test_scales_next_to_nothing(scale: float, device: str) -> None:
    x = torch.tensor([[5.0, 1, 2], [-3e38, 3e38, 1], [torch.nan, 1, 2]], device=device).view(1, 1, 3, 3)
    want = torch.tensor([[1 / 3] * 3, [1 / 3] * 3, [torch.nan] * 3], device=device).view(1, 1, 3, 3)
    torch.testing.assert_close(flexmasks.masked_softmax(x, scale=scale), want, equal_nan=True)


def test_a_scale_that_depends_on_a_shape_compiles_once() -> None:
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counted)
    def scaled(x: Tensor) -> Tensor:
        return flexmasks.masked_softmax(x, mask="causal", scale=x.shape[-1] ** -0.5)

    for columns in (5, 6, 7, 9, 12, 20, 33, 40, 41, 55):
        x = torch.randn(2, 2, 8, columns)
        torch.testing.assert_close(scaled(x), flexmasks.masked_softmax(x, mask="causal", scale=columns**-0.5))
    assert counted.frame_count <= 2
