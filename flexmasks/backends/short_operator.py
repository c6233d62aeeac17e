"""The operator torch.ops.flexmasks.short, its backward operator and its gradient: the kernels of short sequences on a
GPU, in graphs of torch.compile.

The mask and what is added to the scores are tensors, which the graph computes from those of each run. It is for scores
that learn: torch's kernels would sum their gradient by atomic operations. It is registered when flexmasks is imported,
so that a saved graph finds it; Triton is imported at its first run.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import Call
from flexmasks.kernels.whole_mask import WholeMask, with_bias
from flexmasks.plans.bounds import MaskKind
from flexmasks.plans.score_plan import is_bias
from flexmasks.plans.traced import TracedMask, TracedScore
from flexmasks.plans.whole import added_of, as_rows, spanned_of
from flexmasks.spec.values import Mask, Score


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of a traced call, whose score adds numbers."""
    q, k, v = compat.with_rows_together(call.q, call.k, call.v)
    mask, score = cast(TracedMask, call.mask), cast(TracedScore, call.score)
    of_mask, of_score = cast(Mask, mask.value), cast(Score, score.value)
    with torch.no_grad():
        visible, *spans = spanned_of(MaskKind(of_mask, mask.offset, mask.size, False, (1, 1)))
    is_own = is_bias(of_score, score.size)
    added = as_rows([of_score.params["bias"]]) if is_own else added_of(of_score, score.offset, score.size)
    scale = q.shape[3] ** -0.5 if call.scale is None else call.scale
    return torch.ops.flexmasks.short(q, k, v, visible, *spans, added, scale)  # type: ignore[no-any-return]


@torch.library.custom_op("flexmasks::short", mutates_args=())
def _short(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, key_spans: Tensor, query_spans: Tensor, added: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from flexmasks.kernels.whole_mask_launch import kernels_of

    mask = _mask_of(q, visible, key_spans, query_spans, added, scale)
    return kernels_of(q, k, v, mask).forward(q, k, v, mask)


def _mask_of(
    q: Tensor, visible: Tensor, key_spans: Tensor, query_spans: Tensor, added: Tensor, scale: float
) -> WholeMask:  # fmt: skip
    """The mask as kernels take it, whatever layouts the compiler has chosen for what the graph computes."""
    visible, key_spans, query_spans = visible.contiguous(), key_spans.contiguous(), query_spans.contiguous()
    return with_bias(WholeMask(visible, key_spans, query_spans, None, None, None, scale), as_rows([added]), q.shape[0])


@_short.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q) if q.shape[3] == v.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("flexmasks::short_backward", mutates_args=())
def _short_backward(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, key_spans: Tensor, query_spans: Tensor, added: Tensor,
    out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, scale: float, learns: bool,
) -> list[Tensor]:  # fmt: skip
    from flexmasks.kernels.whole_mask_launch import kernels_of

    mask = _mask_of(q, visible, key_spans, query_spans, added, scale)
    d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
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
