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

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.kernels.direct import is_for_triton, is_plain, on
from flexmasks.kernels.operators import NAMESPACE, define, library
from flexmasks.workers import Workers


def softmax_alone(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """Do what the operator does for a plain x, without the dispatcher."""
    if x.requires_grad and torch.is_grad_enabled():
        return _Softmax.apply(x, bounds, bits, mask, visible, scale)  # type: ignore[no-any-return]
    return _forward(x, bounds, bits, mask, visible, scale)


def _gradient(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    if torch.is_grad_enabled() or has_transforms():
        return plain_gradient(dy, y, scale)  # operations that have derivatives
    return _backward(dy, y, bounds, scale) if is_plain(y, dy) else _backward_op(dy, y, bounds, scale)


@compat.constant_in_graphs
def has_transforms() -> bool:
    """Whether derivatives or batches are asked for that the operators do not know."""
    return compat.transforms_active() or compat.in_forward_derivative()


# --- the computation ---


def _forward(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    if is_for_triton(x):
        from flexmasks.kernels import softmax_launch  # Triton is not installed on every system

        with on(x.device):
            return softmax_launch.forward(x, bounds, bits, mask, visible, scale)
    return plain_forward(x, bounds, bits, mask, visible, scale)


def _backward(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    if is_for_triton(y):
        from flexmasks.kernels import softmax_launch

        with on(y.device):
            return softmax_launch.backward(dy, y, bounds, scale)
    return plain_backward(dy, y, scale)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _run(*args: Any) -> Tensor:
    if compat.in_forward_derivative():  # torch would take the result for a constant
        raise RuntimeError("flexmasks: this operator has no forward derivatives; call flexmasks.masked_softmax itself.")
    return _forward(*args)


softmax_operator = define(
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


_PART_ELEMENTS = 1 << 20  # elements computed at once, which bounds the memory of float32 copies


# --- in plain torch ---


def plain_forward(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """The operator flexmasks::masked_softmax."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = torch.arange(x.shape[-1], device=x.device)

    def compute(part: tuple[slice, ...]) -> None:
        part_bounds, part_bits, part_mask = (None if t is None else _cut(t, part) for t in (bounds, bits, mask))
        hidden = hidden_places(columns, part_bounds, part_bits, part_mask, visible)
        _cut(y, part).copy_(softmax(_cut(x, part), hidden, scale))

    _for_parts(y, compute)
    return y


def plain_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """The gradient of x, given the gradient of the softmax y."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)

    def compute(part: tuple[slice, ...]) -> None:
        _cut(dx, part).copy_(plain_gradient(_cut(dy, part), _cut(y, part), scale))

    _for_parts(y, compute)
    return dx


def softmax(x: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """softmax(x * scale) over visible columns, and 0 elsewhere, by operations that have derivatives.

    hidden: booleans that broadcast to x, True = hidden, or None.
    """
    scores = x.to(_accumulator(x.dtype)) * scale
    if hidden is None:
        return scores.softmax(-1).to(x.dtype)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return weights.masked_fill(hidden, 0.0).to(x.dtype)  # the weights of a row that sees nothing are NaN


def plain_gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """The gradient of x by operations that have derivatives. Places where y is 0 are hidden: there dy is not read, and
    the gradient is 0.
    """
    hidden = y == 0
    weights = y.to(_accumulator(y.dtype))
    slopes = dy.to(weights.dtype).masked_fill(hidden, 0)
    slopes = scale * weights * (slopes - (weights * slopes).sum(-1, keepdim=True))
    return slopes.masked_fill(hidden, 0).to(y.dtype)


def hidden_places(
    columns: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool
) -> Tensor | None:
    """The hidden places, broadcasting to [..., K], or None where nothing is hidden."""
    hidden = None
    if mask is not None:
        marked = mask if mask.dtype == torch.bool else mask != 0
        hidden = ~marked if visible else marked
    if bits is not None:
        word, bit = columns // 32, (columns % 32).int()
        unset = (bits.index_select(-1, word) >> bit) & 1 == 0
        hidden = unset if hidden is None else hidden | unset
    if bounds is not None:
        outside = (columns < bounds[..., :1]) | (columns >= bounds[..., 1:])
        hidden = outside if hidden is None else hidden | outside
    return hidden


def _for_parts(x: Tensor, compute: Callable[[tuple[slice, ...]], None]) -> None:
    if x.numel() == 0:
        return
    rows = x.numel() // x.shape[-1]
    workers = Workers.of(x.device, x.numel(), rows)
    count = workers.count
    parts = list(_parts(x.shape, min(_PART_ELEMENTS, x.numel()) // (count if count == 1 else 2 * count)))

    def compute_all(own: Sequence[tuple[slice, ...]]) -> None:
        for part in own:
            compute(part)

    with torch.no_grad():
        workers.all([functools.partial(compute_all, parts[n::count]) for n in range(count)])


def _parts(shape: torch.Size, elements: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices of the leading dimensions: parts of at most that many elements, or single rows."""
    *leading, size = shape
    steps: list[int] = []
    for n in reversed(leading):
        steps.insert(0, max(1, min(n, elements // size)))
        size *= steps[0]
    starts = (range(0, n, step) for n, step in zip(leading, steps, strict=True))
    for part in itertools.product(*starts):
        yield tuple(slice(start, start + step) for start, step in zip(part, steps, strict=True))


def _cut(x: Tensor, part: tuple[slice, ...]) -> Tensor:
    """A part of a tensor; dimensions of size 1 and missing ones broadcast, so they are not cut."""
    own = part[len(part) - x.ndim + 1 :] if x.ndim else ()
    return x[tuple(slice(None) if n == 1 else p for n, p in zip(x.shape[:-1], own, strict=True))]


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
