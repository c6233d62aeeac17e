"""The operators torch.ops.flexmasks.attend and torch.ops.flexmasks.short, with their backward operators and their
gradients, torch.ops.flexmasks.tangents, torch.ops.flexmasks.bits and torch.ops.flexmasks.fold_sinks.

They are registered when flexmasks is imported, so that a saved graph finds them. What they compute is imported at their
first run: for attend and bits see `flexmasks.backends.tiles_operator`; short runs the kernels of short sequences on a
GPU, in graphs of torch.compile. Its mask and what is added to the scores are tensors, which the graph computes from
those of each run. It is for scores that learn: torch's kernels would sum their gradient by atomic operations. (Where
several pairs read one entry of a table, the graph adds up what this operator gives to them: Inductor by atomic
operations, unless torch's deterministic mode is on.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexmasks.kernels.operators import define


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


def _tangents(given: Sequence[Tensor], grads: Sequence[Tensor], *leaves: Any) -> list[Tensor]:
    from flexmasks.backends import tangents

    return tangents.for_graph(given, grads, leaves)


define(
    "tangents(Tensor[] given, Tensor[] grads, Tensor[] tensors, SymInt[] numbers, float[] floats, str s) -> Tensor[]",
    _tangents, lambda given, grads, *_: [x.new_empty(x.shape) for x in (given if grads else given[6:])],
)  # fmt: skip


@torch.library.custom_op("flexmasks::short", mutates_args=())
def _short(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, key_spans: Tensor, query_spans: Tensor, added: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from flexmasks.kernels.whole_mask_launch import kernels_of

    mask = _mask_of(q, visible, key_spans, query_spans, added, scale)
    return kernels_of(q, k, v, mask).forward(q, k, v, mask)


def _mask_of(q: Tensor, visible: Tensor, key_spans: Tensor, query_spans: Tensor, added: Tensor, scale: float) -> Any:
    """The mask as kernels take it, whatever layouts the compiler has chosen for what the graph computes."""
    from flexmasks.kernels.direct import with_rows_together
    from flexmasks.kernels.whole_mask import WholeMask, in_wide_rows, with_bias

    visible, key_spans, query_spans = visible.contiguous(), key_spans.contiguous(), query_spans.contiguous()
    mask = WholeMask(in_wide_rows(visible), key_spans, query_spans, None, None, None, scale)
    (added,) = with_rows_together(added)
    return with_bias(mask, added, q.shape[0])


@_short.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q) if q.shape[3] == v.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("flexmasks::short_backward", mutates_args=())
def _short_backward(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, key_spans: Tensor, query_spans: Tensor, added: Tensor,
    out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, scale: float, learns: bool,
) -> list[Tensor]:  # fmt: skip
    from flexmasks.kernels.direct import with_rows_together
    from flexmasks.kernels.whole_mask_launch import kernels_of

    mask = _mask_of(q, visible, key_spans, query_spans, added, scale)
    (d_out,) = with_rows_together(d_out)
    grads = kernels_of(q, k, v, mask).backward(d_out, d_lse.contiguous(), q, k, v, out, lse, mask, learns)
    return list(grads)


@_short_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> list[Tensor]:
    added, learns = more[3], more[-1]
    return [*map(torch.empty_like, (q, k, v)), *([added.new_empty(added.shape)] if learns else [])]


def _save_short(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients_of_short(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    learns = ctx.needs_input_grad[6]
    d_q, d_k, d_v, *d_added = _short_backward(*ctx.saved_tensors, d_out, d_lse, ctx.scale, learns)
    return d_q, d_k, d_v, None, None, None, d_added[0] if learns else None, None


_short.register_autograd(_gradients_of_short, setup_context=_save_short)


@torch.library.custom_op("flexmasks::fold_sinks", mutates_args=())
def _fold_sinks(out: Tensor, lse: Tensor, sinks: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    from flexmasks.kernels.sinks import folded

    return folded(out, lse, sinks)


@torch.library.custom_op("flexmasks::fold_sinks_backward", mutates_args=())
def _fold_sinks_backward(
    d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from flexmasks.kernels.sinks import gradients

    d_old_out, d_old_lse, d_sinks = gradients(d_out, d_lse, out, lse, sinks, starts)
    return d_old_out, d_old_lse, d_sinks


@_fold_sinks.register_fake
def _(out: Tensor, lse: Tensor, sinks: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), torch.empty_like(lse)


@_fold_sinks_backward.register_fake
def _(d_out: Tensor, d_lse: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d_old_out, d_old_lse, d_sinks = map(torch.empty_like, given[:3])
    return d_old_out, d_old_lse, d_sinks


def _save_for_sinks(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _gradients_of_sinks(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    return *_fold_sinks_backward(d_out, d_lse, *ctx.saved_tensors), None


_fold_sinks.register_autograd(_gradients_of_sinks, setup_context=_save_for_sinks)
