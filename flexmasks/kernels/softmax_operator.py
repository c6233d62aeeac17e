"""The operator torch.ops.flexmasks.masked_softmax, its backward operator, and their derivatives.

masked_softmax(x, bounds, bits, mask, visible, scale) is softmax(x * scale) over the visible columns of x [..., K], and
0 at the hidden columns. A column is visible where none of the three tensors hides it. Each tensor may be None, and
broadcasts to the leading dimensions of x:

bounds: int32 [..., 2], the first visible column of each row and the end; 0 and 0 for a row that sees nothing.
bits: int32 [..., ceil(K / 32)]; column k is visible where bit k % 32 of word k // 32 is set. `bits` need `bounds`, and
    no bit is set outside of them.
mask: boolean or integer [..., K or 1]; if `visible`, places where it is not 0 are visible, else places where it is 0.

masked_softmax_backward(dy, y, bounds, scale) is the gradient of x.

Triton kernels run both operators on a GPU in float16, bfloat16 and float32; plain torch runs them elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flexmasks import compat
from flexmasks.kernels import softmax_plain
from flexmasks.kernels.direct import TRITON_DTYPES, is_plain, on
from flexmasks.kernels.operators import define, library
from flexmasks.kernels.softmax_plain import over_visible, row_dot


def masked_softmax(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """Run the operator, without the dispatcher where nothing needs it."""
    if not is_plain(x):
        return _forward_op(x, bounds, bits, mask, visible, scale)  # type: ignore[no-any-return]
    if x.requires_grad and torch.is_grad_enabled():
        return _function(Softmax).apply(None, x, bounds, bits, mask, visible, scale)  # type: ignore[no-any-return]
    return _forward(x, bounds, bits, mask, visible, scale)


def _gradient(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    if is_plain(y, dy) and not torch.is_grad_enabled():
        return _backward(dy, y, bounds, scale)
    return _backward_op(dy, y, bounds, scale)  # type: ignore[no-any-return]


# --- the computation ---


def _forward(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    if x.is_cuda and x.dtype in TRITON_DTYPES:
        from flexmasks.kernels import softmax_launch  # Triton is not installed on every system

        with on(x.device):
            return softmax_launch.forward(x, bounds, bits, mask, visible, scale)
    return softmax_plain.forward(x, bounds, bits, mask, visible, scale)


def _backward(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    if y.is_cuda and y.dtype in TRITON_DTYPES:
        from flexmasks.kernels import softmax_launch

        with on(y.device):
            return softmax_launch.backward(dy, y, bounds, scale)
    return softmax_plain.backward(dy, y, scale)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_forward_op = define(
    "masked_softmax(Tensor x, Tensor? bounds, Tensor? bits, Tensor? mask, bool visible, Scalar scale) -> Tensor",
    _forward,
    _fake,
)
_backward_op = define(
    "masked_softmax_backward(Tensor dy, Tensor y, Tensor? bounds, Scalar scale) -> Tensor",
    _backward,
    lambda dy, y, *_: _fake(y),
)


# --- derivatives ---
#
# torch.library.register_autograd knows neither forward mode nor torch.func: with it jvp and jacfwd return derivatives
# of 0 without an error, and grad, vjp, jacrev and vmap of grad raise RuntimeError, also inside torch.compile. So each
# operator calls a Function for one transform after the other.


@functools.cache
def _function(derivatives: Any) -> Any:
    """A Function of derivatives, made at its first use."""
    return type(derivatives.__name__, (derivatives, compat.SingleLevelFunction), {})


def _below_autograd(op: Any, keyset: Any, *args: Any) -> Tensor:
    """Run an operator of which a Function has the derivatives.

    torch turns forward mode off inside a Function. It is turned on again: otherwise the outer ones of nested transforms
    would treat the results as constants.
    """
    with compat.below_autograd(), torch.enable_grad(), compat.forward_derivatives(True):
        return op.redispatch(compat.after_autograd_keys & keyset, *args)  # type: ignore[no-any-return]


class Softmax:
    """The softmax and its derivatives; `keyset` is None where no transform is active."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
        _, bounds, *_, ctx.scale = args
        if keyset is None:
            y = _forward(*args)
        else:
            y = _below_autograd(_forward_op, keyset, *args)
            ctx.save_for_forward(y, bounds)
        ctx.save_for_backward(y, bounds)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, bounds = ctx.saved_tensors
        return None, _gradient(dy, y, bounds, ctx.scale), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, _: None, dx: Tensor, *__: None) -> Tensor:
        y, bounds = ctx.saved_tensors
        with compat.forward_derivatives(True):
            return _gradient(dx, y, bounds, ctx.scale)  # the Jacobian is symmetric


class SoftmaxGradient:
    """The backward operator and its derivatives."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
        dx = _below_autograd(_backward_op, keyset, dy, y, bounds, scale)
        ctx.save_for_backward(dy, y, bounds)
        ctx.save_for_forward(dy, y, bounds)
        ctx.scale = scale
        return dx

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        dy, y, bounds = ctx.saved_tensors
        d_dy = _gradient(d, y, bounds, ctx.scale) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[2]:
            return None, d_dy, None, None, None
        d_y = over_visible(lambda y, d, dy: ctx.scale * (d * (dy - row_dot(y, dy)) - dy * row_dot(d, y)), y, d, dy)
        return None, d_dy, d_y, None, None

    @staticmethod
    def jvp(ctx: Any, _: None, d_dy: Tensor | None, d_y: Tensor | None, *__: None) -> Tensor:
        dy, y, bounds = ctx.saved_tensors
        with compat.forward_derivatives(True):
            dy, y = (forward_ad.unpack_dual(t, level=0).primal for t in (dy, y))  # level 0 is the only one
            d_dx = torch.zeros_like(y) if d_dy is None else _gradient(d_dy, y, bounds, ctx.scale)
            if d_y is None:
                return d_dx
            return d_dx + over_visible(
                lambda y, d_y, dy: ctx.scale * (d_y * (dy - row_dot(y, dy)) - y * row_dot(d_y, dy)), y, d_y, dy
            )


# --- registration ---


def _register(op: Any, derivatives: Any) -> None:
    def autograd(keyset: Any, *args: Any) -> Any:
        with compat.single_level_autograd():
            return _function(derivatives).apply(keyset, *args)

    def vmapped(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return op(*_batched(info.batch_size, in_dims, args)), 0

    name = op._schema.name
    library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_vmap(name, vmapped, lib=library)


def _batched(size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[Any]:
    """An operator's arguments under vmap, with the mapped dimension first. The tensors that must have the output's full
    shape (x; dy and y) get one if they lack it.
    """
    ndim = args[0].ndim - (in_dims[0] is not None)
    batched = []
    for n, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
        if dim is not None:
            arg = arg.movedim(dim, 0)
            arg = arg.reshape(size, *(1,) * (ndim + 1 - arg.ndim), *arg.shape[1:])
        elif n == 0 or (n == 1 and len(args) == 4):  # x; dy and y
            arg = arg.expand(size, *arg.shape)
        batched.append(arg)
    return batched


_register(_forward_op, Softmax)
_register(_backward_op, SoftmaxGradient)
