"""The operators torch.ops.flexmasks.attend, with its backward operator and its gradient, and torch.ops.flexmasks.bits.

They are registered when flexmasks is imported, so that a saved graph finds them. What they compute is imported at their
first run, see `flexmasks.backends.tiles_operator`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("flexmasks::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    partial: Tensor,
    full: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    floats: Sequence[float],
    text: str,
) -> tuple[Tensor, Tensor]:
    from flexmasks.backends import tiles_operator

    return tiles_operator.forward(q, k, v, partial, full, (tensors, numbers, floats, text))


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=dtype)


@torch.library.custom_op("flexmasks::attend_backward", mutates_args=())
def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
    partial: Tensor,
    full: Tensor,
    tensors: Sequence[Tensor],
    learned: Sequence[int],
    numbers: Sequence[int],
    floats: Sequence[float],
    text: str,
) -> list[Tensor]:
    """Return the gradients of q, k, v and of the tensors at the places `learned`."""
    from flexmasks.backends import tiles_operator

    made = q, k, v, out, lse, grad_out, grad_lse
    return tiles_operator.backward(made, partial, full, learned, (tensors, numbers, floats, text))


@_attend_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> list[Tensor]:
    tensors, learned = more[6:8]
    return [x.new_empty(x.shape) for x in (q, k, v, *(tensors[place] for place in learned))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, partial, full, tensors, *ctx.rest = inputs
    ctx.learned = [place for place, t in enumerate(tensors) if t.requires_grad]
    ctx.save_for_backward(q, k, v, *output, partial, full, *tensors)


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, partial, full, *tensors = ctx.saved_tensors
    more = partial, full, tensors, ctx.learned, *ctx.rest
    grad_q, grad_k, grad_v, *grads = _attend_backward(q, k, v, out, lse, grad_out, grad_lse, *more)
    of_tensors: list[Tensor | None] = [None] * len(tensors)
    for place, grad in zip(ctx.learned, grads, strict=True):
        of_tensors[place] = grad
    # torch takes an empty list for one of tensors, and wants a list back.
    of_numbers: list[list[Any] | None] = [None if part else [] for part in ctx.rest[:2]]
    return grad_q, grad_k, grad_v, None, None, of_tensors, *of_numbers, None


@torch.library.custom_op("flexmasks::bits", mutates_args=())
def _bits(
    q: Tensor,
    k: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    floats: Sequence[float],
    text: str,
    shape: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from flexmasks.backends import tiles_operator

    return tiles_operator.bits(q, k, shape, (tensors, numbers, floats, text))


@_bits.register_fake
def _(q: Tensor, k: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *blocks, height, words = more[-1]
    return (
        q.new_empty((math.prod(blocks), height, words), dtype=torch.int32),
        q.new_empty(blocks, dtype=torch.int32),
        q.new_empty(blocks, dtype=torch.bool),
        q.new_empty(blocks, dtype=torch.bool),
    )


_attend.register_autograd(_gradients, setup_context=_save)
