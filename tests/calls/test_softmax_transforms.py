"""The masked softmaxes under every transform of torch, and the bare operators."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DEVICES, TOLERANCE, error, one_in
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import flexmasks

pytestmark = pytest.mark.usefixtures("one_thread")
FORWARD = torch.ops.flexmasks.masked_softmax.default
BACKWARD = torch.ops.flexmasks.masked_softmax_backward.default
EMPTY_SHAPES = list(itertools.product([(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], [False, True]))


# --- derivatives and vmap ---


def problem() -> tuple[Tensor, Tensor, Tensor, Any, Any]:
    """Return scores, a direction, the hidden places, the call, and the same function in torch's own operations."""
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
    scale = torch.tensor(0.5)
    slope = torch.func.jvp(lambda s: flexmasks.scaled_masked_softmax(x, masks[0], s), (scale,), (scale,))[1]
    _, want = torch.func.jvp(lambda x: flexmasks.scaled_masked_softmax(x, masks[0], scale), (x,), (x,))
    close(slope, want)  # the softmax of scale * x changes with both alike
    mapped = vmap(lambda m: flexmasks.scaled_masked_softmax(x, m))(masks)
    close(mapped, torch.stack([flexmasks.scaled_masked_softmax(x, m) for m in masks]))
    planned = vmap(grad(lambda t: flexmasks.masked_softmax(t, mask="causal", q_offset=0).pow(2).sum()))(many)
    close(
        planned,
        torch.stack(
            [grad(lambda t: flexmasks.masked_softmax(t, mask="causal", q_offset=0).pow(2).sum())(t) for t in many]
        ),
    )


@pytest.mark.slow
def test_gradients_of_gradients() -> None:
    x, _, _, call, _ = problem()
    x.requires_grad_()
    options = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(call, (x,), **options)
    assert torch.autograd.gradgradcheck(call, (x,), check_fwd_over_rev=True)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_derivatives_of_derivatives(order: int) -> None:
    """Forward and reverse mode, nested in any order, agree for the call and torch's operations."""
    x, _, _, call, naive = problem()
    directions = torch.randn(order, *x.shape, dtype=x.dtype)

    def forward(f: Any, v: Tensor) -> Any:
        return lambda x: jvp(f, (x,), (v,))[1]

    def reverse(f: Any, v: Tensor) -> Any:
        return lambda x: vjp(f, x)[1](v)[0]

    for modes in itertools.product((forward, reverse), repeat=order):
        functions = [call, naive]
        for mode, v in zip(modes, directions, strict=True):
            functions = [mode(f, v) for f in functions]
        close(*(f(x) for f in functions))


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
    assert error(got, want, float(want.norm()) / want.numel() ** 0.5) < 4 * TOLERANCE[dtype]


def tangent(function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor | None:
    """Return the tangent of a function's result, where `v` is that of `x`."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, v))).tangent


@pytest.mark.parametrize("is_compiled", [False, True])
def test_forward_mode_without_torch_func(is_compiled: bool) -> None:
    x, v, _, call, naive = problem()
    if is_compiled:
        compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
        try:
            tangent(compiled(torch.sin), x, v)
        except torch._dynamo.exc.Unsupported:
            pytest.skip("torch.compile takes no tensors with tangents, from torch 2.15 on")
        call = compiled(call)
    close(tangent(call, x, v), jvp(naive, (x,), (v,))[1])


@pytest.mark.slow
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


def test_parameters_of_a_mask_may_be_mapped() -> None:
    x, lengths = torch.randn(3, 2, 2, 5, 5), torch.tensor([[1, 2], [5, 4], [3, 0]])

    def by_name(x: Tensor, lengths: Tensor) -> Tensor:
        return flexmasks.masked_softmax(x, q_offset=0, mask="grouped_tril", seq_lens=lengths)

    def by_function(x: Tensor, lengths: Tensor) -> Tensor:
        return flexmasks.masked_softmax(x, q_offset=0, mask=lambda b, h, q, kv: (kv < lengths[b]) | (q == kv))

    for f in (by_name, by_function):
        each = [f(*t) for t in zip(x, lengths, strict=True)]
        torch.testing.assert_close(vmap(f)(x, lengths), torch.stack(each))
        torch.testing.assert_close(vmap(f, (None, 0))(x[0], lengths), torch.stack([f(x[0], n) for n in lengths]))
        slope = grad(lambda x, n, f=f: f(x, n).pow(2).sum())
        torch.testing.assert_close(
            vmap(slope)(x, lengths), torch.stack([slope(*t) for t in zip(x, lengths, strict=True)])
        )


@pytest.mark.parametrize("device", DEVICES)
def test_transforms_with_nothing_planned(device: str) -> None:
    """Rows planned inside a transform work after it, and inside other transforms."""
    x = torch.randn(1, 1, 3, 4, device=device)

    def total(x: Tensor) -> Tensor:
        return flexmasks.masked_softmax(x, mask="causal", q_offset=0).pow(2).sum()

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


# --- operators ---


def operator_arguments(device: str) -> list[tuple[Any, ...]]:
    heads, q_len = 3, 4
    dtype = torch.float64 if device == "cpu" else torch.float32
    x = torch.randn(2, heads, q_len, 40, dtype=dtype, device=device, requires_grad=True)
    row = torch.arange(q_len)
    bounds = torch.stack([row, row * 13], -1).int().expand(2, 1, q_len, 2).contiguous().to(device)
    bits = torch.randint(-(2**31), 2**31, (1, heads, q_len, 2)).int().to(device)
    mask = (torch.rand(2, 1, 1, 40) < 0.5).to(device)
    return [
        (x, bounds, None, None, False, 0.7),
        (x, bounds, bits, None, False, 1.0),
        (x, None, None, mask, False, -0.7),
        (x, bounds, None, mask, True, 1.0),
        (x, None, None, None, False, 1.0),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_operators(device: str) -> None:
    for call_arguments in operator_arguments(device):
        torch.library.opcheck(FORWARD, call_arguments)
    x, bounds, *_ = operator_arguments(device)[0]
    y = FORWARD(x, bounds, None, None, False, 0.7).detach()
    torch.library.opcheck(BACKWARD, (torch.randn_like(y), y, bounds, 0.7))


def test_the_operators_refuse_forward_mode() -> None:
    """An exported program calls the operator itself, and torch would take the derivative for 0."""
    x = torch.randn(2, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"this operator has no forward derivatives; call flexmasks\.masked_softmax"):
        jvp(lambda x: FORWARD(x, None, None, None, False, 1.0), (x,), (x,))
    with pytest.raises(RuntimeError):
        grad(lambda x: FORWARD(x, None, None, None, False, 1.0).square().sum())(x)


def test_the_formula_warns_once_if_it_is_large(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, v, _, call, _ = problem()
    softmax = sys.modules["flexmasks.softmax"]
    softmax._warn_once.cache_clear()  # type: ignore[attr-defined]
    jvp(call, (x,), (v,))
    assert not caplog.records
    monkeypatch.setattr(softmax, "_LARGE", x.numel() - 1)
    call(x)
    assert not caplog.records
    for _ in range(2):
        jvp(call, (x,), (v,))
    (record,) = caplog.records
    assert "take several times the memory of the scores" in record.getMessage()


# --- torch.compile, torch.export, make_fx, fake tensors ---


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dynamic", "backend"),
    [
        (True, "aot_eager"),
        pytest.param(True, "inductor", marks=pytest.mark.campaign),
        pytest.param(False, "inductor", marks=pytest.mark.campaign),
    ],
)
def test_compiled(dynamic: bool, backend: str, device: str) -> None:
    """Calls by name, function, Mask and tensor in one graph, which is compiled once for all of them."""
    torch._dynamo.reset()
    lengths = torch.tensor([3, 4], device=device)
    window = flexmasks.get_mask("sliding_window", window=5) & (lambda b, h, q, kv: kv != 3)

    def several(x: Tensor) -> tuple[Tensor, ...]:
        by_name = flexmasks.masked_softmax(x * 2, q_offset=0, mask="grouped_tril", seq_lens=lengths) + 1
        by_function = flexmasks.masked_softmax(
            x, q_offset=0, mask=lambda b, h, q, kv: (kv % 3 == h) & (kv < q), scale=0.5
        )
        by_value = flexmasks.masked_softmax(x, q_offset=0, mask=window)
        by_tensor = flexmasks.scaled_masked_softmax(x, x[:, :1] > 0, 0.5).exp()
        return by_name, by_function, by_value, by_tensor

    compiled = torch.compile(several, fullgraph=True, dynamic=dynamic, backend=backend)
    for q_len, kv_len in ((6, 33), (7, 40)):
        x = torch.randn(2, 3, q_len, kv_len, device=device, requires_grad=True)
        got, want = compiled(x), several(x)
        directions = [torch.randn_like(y) for y in got]
        for y, wanted in zip(got, want, strict=True):
            assert torch.allclose(y, wanted, atol=1e-6)
        assert torch.allclose(*(torch.autograd.grad(ys, x, directions)[0] for ys in (got, want)), atol=1e-6)


@pytest.mark.slow
def test_exported() -> None:
    class Softmax(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            causal = flexmasks.masked_softmax(x, q_offset=0, mask="causal")
            return causal, flexmasks.scaled_masked_softmax(x, mask, 0.5)

    x, mask = torch.randn(2, 3, 6, 33), torch.rand(2, 1, 6, 33) < 0.5
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = {"x": {3: length}, "mask": {3: length}}
    for strict in (True, False):
        exported = torch.export.export(Softmax(), (x, mask), dynamic_shapes=shapes, strict=strict).module()
        for call_arguments in ((x, mask), (torch.randn(2, 3, 6, 40), torch.rand(2, 1, 6, 40) < 0.5)):
            for got, want in zip(exported(*call_arguments), Softmax()(*call_arguments), strict=True):
                assert torch.allclose(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dynamic"), one_in(3, EMPTY_SHAPES))
def test_compiled_with_nothing(shape: tuple[int, ...], dynamic: bool) -> None:
    torch._dynamo.reset()
    shift = torch.tensor(1)

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="eager")
    def several(x: Tensor) -> tuple[Tensor, ...]:
        by_function = flexmasks.masked_softmax(
            x, q_offset=0, mask=lambda b, h, q, kv: (q + shift > kv) & (kv != b) | (h > 0)
        )
        return by_function, flexmasks.masked_softmax(x, q_offset=0, mask="causal")

    for y in several(torch.zeros(shape)):
        assert y.shape == shape


@pytest.mark.slow
@pytest.mark.parametrize("dim", one_in(2, range(4)))
def test_compiled_with_sizes_that_depend_on_data(dim: int) -> None:
    """One graph runs at sizes that only the run knows: how many of 8 elements are not 0."""
    torch._dynamo.reset()

    def ones(count: int) -> Tensor:
        return (torch.arange(8) < count).float()

    def scores(counted: Tensor) -> Tensor:
        sizes = [2, 3, 4, 5]
        sizes[dim] = counted.nonzero().shape[0]
        return torch.arange(float(math.prod(sizes))).reshape(sizes).cos()

    def all_of(counted: Tensor) -> list[Tensor]:
        x = scores(counted)
        seen = torch.ones(x.shape, dtype=torch.bool)
        line = torch.ones([n if d == dim else 1 for d, n in enumerate(x.shape)], dtype=torch.bool)
        return [
            flexmasks.masked_softmax(x, q_offset=0, mask=lambda b, h, q, kv: (q >= kv) & (kv != b) | (h > 0)),
            flexmasks.masked_softmax(x, q_offset=0, mask="causal"),
            flexmasks.masked_softmax(x, mask=seen),
            flexmasks.scaled_masked_softmax(x, ~line),
        ]

    def wrong(counted: Tensor) -> Tensor:
        return flexmasks.scaled_masked_softmax(torch.zeros(2, 3), counted.nonzero()[:, 0] > 0)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(all_of, fullgraph=True, backend="aot_eager")
        for count in (7, 1, 0):
            torch.testing.assert_close(compiled(ones(count)), all_of(ones(count)))
        if dim == 0:
            compiled = torch.compile(wrong, fullgraph=True, backend="aot_eager")
            assert compiled(ones(3)).shape == (2, 3)
            with pytest.raises(RuntimeError):
                compiled(ones(4))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_by_make_fx(mode: str) -> None:
    """Lengths, and inputs that a function captures, stay inputs of the graph."""

    def function(x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        return (
            flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=lengths, q_offset=0),
            flexmasks.masked_softmax(x, q_offset=0, mask=lambda b, h, q, kv: kv < lengths[b] + q),
            grad(lambda x: flexmasks.masked_softmax(x, mask="causal", q_offset=0).pow(2).sum())(x),
        )

    graph = make_fx(function, tracing_mode=mode)(torch.randn(2, 3, 4, 5), torch.tensor([4, 4]))
    sizes = (2, 3, 6, 7) if mode == "symbolic" else (2, 3, 4, 5)
    x, lengths = torch.randn(sizes), torch.tensor([2, 3])
    torch.testing.assert_close(graph(x, lengths), function(x, lengths))


@pytest.mark.parametrize("mask", ["causal", lambda b, h, q, kv: q > kv])
def test_fake_and_meta_scores(mask: Any) -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3, 4, 5)
        assert flexmasks.masked_softmax(x, mask=mask, q_offset=0).shape == x.shape
        lengths = torch.tensor([1, 2])
        assert flexmasks.masked_softmax(x, q_offset=0, mask="grouped_tril", seq_lens=lengths).shape == x.shape
    assert flexmasks.masked_softmax(x, mask=mask, q_offset=0).shape == x.shape
    x = torch.empty(2, 3, 4, 5, device="meta", requires_grad=True)
    y = flexmasks.masked_softmax(x, q_offset=0, mask=mask)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    for lengths in (torch.empty(2, dtype=torch.int64, device="meta"), [3, 4]):
        assert flexmasks.masked_softmax(x, q_offset=0, mask="grouped_tril", seq_lens=lengths).shape == x.shape


def test_fake_and_meta_tensors() -> None:
    with torch._subclasses.FakeTensorMode():
        y = flexmasks.scaled_masked_softmax(torch.empty(2, 3, 4), torch.empty(3, 4, dtype=torch.bool))
    assert y.shape == (2, 3, 4)
    x = torch.empty(2, 3, 4, device="meta", requires_grad=True)
    y = flexmasks.scaled_masked_softmax(x, torch.empty(3, 4, dtype=torch.bool, device="meta"))
    assert torch.autograd.grad(y.sum(), x)[0].shape == (2, 3, 4)


@pytest.mark.slow
def test_errors_inside_a_compiled_function() -> None:
    for call, message in (
        (lambda x: flexmasks.masked_softmax(x, mask=lambda b, h, q, kv: q), "a boolean tensor, got one of int64"),
        (lambda x: flexmasks.scaled_masked_softmax(x, x[..., :2] > 0), "must broadcast to x's shape"),
        (lambda x: flexmasks.masked_softmax(x, mask="casual"), "did you mean 'causal'"),
        (lambda x: flexmasks.masked_softmax(x, scale=math.nan), "`scale` must be finite"),
    ):  # fmt: skip
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            torch.compile(call, fullgraph=True, backend="eager")(torch.zeros(2, 3, 4, 5))


@pytest.mark.slow
def test_a_scale_that_depends_on_a_shape_compiles_once() -> None:
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counted)
    def scaled(x: Tensor) -> Tensor:
        return flexmasks.masked_softmax(x, q_offset=0, mask="causal", scale=x.shape[-1] ** -0.5)

    for columns in (5, 6, 7, 9, 12, 20, 33, 40, 41, 55):
        x = torch.randn(2, 2, 8, columns)
        torch.testing.assert_close(
            scaled(x), flexmasks.masked_softmax(x, mask="causal", q_offset=0, scale=columns**-0.5)
        )
    assert counted.frame_count <= 2
