"""The operator torch.ops.flexmasks.short, its backward operator and its gradient: the kernels of short sequences on a
GPU, in graphs of torch.compile.

The mask and what is added to the scores are tensors, which the graph computes from those of each run. It is for scores
that learn: torch's kernels would sum their gradient by atomic operations. (Where several pairs read one entry of a
table, the graph adds up what this operator gives to them: Inductor by atomic operations, unless torch's deterministic
mode is on.) It is registered when flexmasks is imported, so that a saved graph finds it; what it computes is imported
at its first run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    learns = ctx.needs_input_grad[6]
    d_q, d_k, d_v, *d_added = _short_backward(*ctx.saved_tensors, d_out, d_lse, ctx.scale, learns)
    return d_q, d_k, d_v, None, None, None, d_added[0] if learns else None, None


_short.register_autograd(_gradients, setup_context=_save)
