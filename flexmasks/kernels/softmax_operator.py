"""The operator torch.ops.flexmasks.masked_softmax, its gradient, and the operator of that.

masked_softmax(x, bounds, bits, mask, visible, scale) is softmax(x * scale) over the visible columns of x [..., K], and
0 at the hidden columns. A column is visible where none of the three tensors hides it. Each tensor may be None, and
broadcasts to the leading dimensions of x:

bounds: int32 [..., 2], the first visible column of each row and the end; 0 and 0 for a row that sees nothing.
bits: int32 [..., ceil(K / 32)]; column k is visible where bit k % 32 of word k // 32 is set. `bits` need `bounds`, and
    no bit is set outside of them.
mask: boolean or integer [..., K or 1]; if `visible`, places where it is not 0 are visible, else places where it is 0.

masked_softmax_backward(dy, y, bounds, scale) is the gradient of x.

Triton kernels run both operators on a GPU in float16, bfloat16 and float32; plain torch runs them elsewhere. The
operators know neither transforms of torch.func nor forward mode: flexmasks.softmax does not call them there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.kernels import softmax_plain
from flexmasks.kernels.direct import TRITON_DTYPES, is_plain, on
from flexmasks.kernels.operators import NAMESPACE, define, library


def masked_softmax(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """Run the operator, without the dispatcher where nothing needs it."""
    if not is_plain(x):
        return _forward_op(x, bounds, bits, mask, visible, scale)  # type: ignore[no-any-return]
    if x.requires_grad and torch.is_grad_enabled():
        return _Softmax.apply(x, bounds, bits, mask, visible, scale)  # type: ignore[no-any-return]
    return _forward(x, bounds, bits, mask, visible, scale)


def _gradient(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    if torch.is_grad_enabled() or has_transforms():
        return softmax_plain.gradient(dy, y, scale)  # operations that have derivatives
    return _backward(dy, y, bounds, scale) if is_plain(y, dy) else _backward_op(dy, y, bounds, scale)


@compat.constant_in_graphs
def has_transforms() -> bool:
    """Whether derivatives or batches are asked for that the operators do not know."""
    return compat.transforms_active() or compat.in_forward_derivative()


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


def _run(*args: Any) -> Tensor:
    if compat.in_forward_derivative():  # torch would take the result for a constant
        raise RuntimeError("flexmasks: this operator has no forward derivatives; call flexmasks.masked_softmax itself.")
    return _forward(*args)


_forward_op = define(
    "masked_softmax(Tensor x, Tensor? bounds, Tensor? bits, Tensor? mask, bool visible, Scalar scale) -> Tensor",
    _run,
    _fake,
)
_backward_op = define(
    "masked_softmax_backward(Tensor dy, Tensor y, Tensor? bounds, Scalar scale) -> Tensor",
    _backward,
    lambda dy, y, *_: _fake(y),
)


# --- the gradient ---


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bounds, *_, ctx.scale = inputs
    ctx.save_for_backward(output, bounds)


class _Softmax(torch.autograd.Function):
    """The softmax outside of torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        y = _forward(*args)
        _save(ctx, args, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, bounds = ctx.saved_tensors
        return _gradient(dy, y, bounds, ctx.scale), None, None, None, None, None


torch.library.register_autograd(f"{NAMESPACE}::masked_softmax", _Softmax.backward, setup_context=_save, lib=library)
