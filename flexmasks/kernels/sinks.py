"""Attention sinks, folded into output and lse of a kernel that knows none.

A sink is one more key that all queries of its head see: its score is the sink's logit, and its value is 0. So the
output is scaled by sigmoid(lse - sink), and the new lse is logaddexp(lse, sink). A row that sees nothing has output 0
and lse -inf, and gets the sink as its lse. A head with a sink of -inf has none.

Triton kernels compute it on a GPU in float16, bfloat16 and float32, one for each pass; their gradients go through the
formula in plain torch where they are differentiated in turn. Plain torch computes the rest, and all that torch.compile
traces, which makes one kernel of it by itself. In place of these kernels the formula under torch.compile takes as long
within calls of 4,096 tokens and more (0.99 to 1.05), but a decoding step then takes 1.6 times as long (H200).
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import math
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.errors import passing_error
from flexmasks.kernels.direct import is_for_triton, is_plain, on

_log = logging.getLogger("flexmasks")
_LARGEST_SIZE = 1024  # of a head, for the Triton kernels
# They take the place of an lse and a sink of -inf, whose difference would be NaN. The lse gets the lower number: keys
# have no share of a row that sees nothing.
_LOWEST, _LOWEST_SINK = -1e30, -1e29
_failures: list[str] = []  # why Triton failed; then plain torch computes all


def with_sinks(
    out: Tensor,
    lse: Tensor,
    sink_logits: Tensor,
    return_lse: bool,
    by_operator: bool = False,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale `out` by sigmoid(lse - sink) and fold the sinks into `lse`; return the output and, with return_lse, the new
    lse.

    out, lse: [B, H, Q, D] and [B, H, Q], or both without B. If nothing needs a gradient, both may be changed.
    sink_logits: floats [H].
    by_operator: into which no compiler looks, so that a graph has the bits that other calls have. Gradients of sinks
        are added sequence by sequence.
    starts: where the sequences of queries start, end to end in all rows, and the last one's end, int32 [N + 1]; None if
        each row is one.
    """
    tensors = out, lse, sink_logits
    if by_operator:
        out, lse = torch.ops.flexmasks.fold_sinks(*tensors, starts)
        return out, lse if return_lse else None
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    are_plain = is_plain(*tensors)
    if are_plain and _fits(*tensors):
        if learns:
            return _Fold.apply(*tensors, return_lse)  # type: ignore[no-any-return]
        result: tuple[Tensor, Tensor | None] | None = _launched("fold", *tensors, return_lse, True)
        if result is not None:
            return result
    return _plain(*tensors, return_lse, may_change=not learns and are_plain)


def folded(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The new output and lse, for the operator."""
    found = _launched("fold", out, lse, sinks, True, False) if _fits(out, lse, sinks) else None
    return _plain(out, lse, sinks, True) if found is None else found  # type: ignore[return-value]


def gradients(
    d_new_out: Tensor, d_new_lse: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, starts: Tensor | None
) -> tuple[Tensor, ...]:
    """The gradients of out, lse and sinks, for the operator."""
    given = d_new_out, d_new_lse, out, lse, sinks
    found = _launched("gradients", *given, (True, True, False)) if _fits(out, lse, sinks) else None
    d_out, d_lse, _ = cast("tuple[Tensor, ...]", _plain_gradients(*given) if found is None else found)
    # The shares of keys and of a sink add up to 1.
    to_sink = torch.where(sinks[:, None] == -math.inf, 0.0, d_new_lse - d_lse)
    heads, queries = to_sink.shape[-2:]
    to_sink = to_sink.view(-1, heads, queries).transpose(0, 1).flatten(1)
    if starts is None:
        starts = torch.arange(0, to_sink.shape[1] + 1, queries, dtype=torch.int32, device=out.device)
    d_sinks = _launched("sum_in_sequences", to_sink, starts, sinks.dtype) if _fits(out, lse, sinks) else None
    return d_out, d_lse, _plain_sum(to_sink, starts, sinks.dtype) if d_sinks is None else d_sinks


# --- the Triton kernels ---


def _fits(out: Tensor, lse: Tensor, sinks: Tensor) -> bool:
    return (
        is_for_triton(out)
        and lse.dtype == torch.float32
        and out.ndim in (3, 4)
        and 0 < out.shape[-1] <= _LARGEST_SIZE
        and (out.stride(-1) == 1 or out.shape[-1] == 1)
        and out.numel() > 0
        and 0 not in out.stride()
        and not _failures
        and _has_triton()
    )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _launched(name: str, out: Tensor, *arguments: Any) -> Any:
    """Launch "fold" or "gradients", or return None if Triton cannot compile them: without a C compiler, for example."""
    from flexmasks.kernels import sinks_kernel

    try:
        with on(out.device):
            return getattr(sinks_kernel, name)(out, *arguments)
    except Exception as error:  # Triton raises errors of any type
        if passing_error(error) is not None:
            raise
        if not _failures:
            _log.warning(
                "attention sinks run in plain torch, because Triton failed: %s: %s", type(error).__name__, error
            )
        _failures.append(str(error))
        return None


class _Fold(compat.SingleLevelFunction):
    """The new output, and the new lse or None, by the Triton kernels."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, sinks: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(out, lse, sinks)
        ctx.set_materialize_grads(False)
        result = _launched("fold", out, lse, sinks, with_lse, False)
        return _plain(out, lse, sinks, with_lse) if result is None else result

    @staticmethod
    def backward(ctx: Any, d_new_out: Tensor | None, d_new_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, sinks = ctx.saved_tensors
        found = None
        given = [x for x in (d_new_out, d_new_lse, out, lse, sinks) if x is not None]
        if d_new_out is not None and not torch.is_grad_enabled() and not _failures and is_plain(*given):
            found = _launched("gradients", d_new_out, d_new_lse, out, lse, sinks, ctx.needs_input_grad[:3])
        if found is None:
            found = _plain_gradients(d_new_out, d_new_lse, out, lse, sinks)
        return *found, None


# --- in plain torch ---


def _plain_sum(x: Tensor, starts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums [H] of x [H, tokens], each sequence by itself, and then all in their order."""
    parts = [x[:, first:end].sum(1).to(dtype) for first, end in itertools.pairwise(starts.tolist())]
    return functools.reduce(torch.add, parts)


def _plain(
    out: Tensor, lse: Tensor, sink_logits: Tensor, with_lse: bool, *, may_change: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The new output, and the new lse or None, by torch's own operations."""
    sinks = sink_logits.to(lse.dtype)[:, None]
    if may_change and not with_lse:  # in place, which a host launches sooner
        return out.mul_(lse.clamp_(min=_LOWEST).sub_(sinks).sigmoid_()[..., None]), None
    finite_lse = lse.clamp(min=_LOWEST)
    of_keys = torch.sigmoid(finite_lse - sinks.clamp(min=_LOWEST_SINK))
    out = (out * of_keys[..., None]).to(out.dtype)
    if not with_lse:
        return out, None
    lse_of_nothing = torch.where(sinks == -math.inf, -math.inf, sinks)  # no gradient for a head without a sink
    return out, torch.where(lse == -math.inf, lse_of_nothing, torch.logaddexp(finite_lse, sinks))


def _plain_gradients(
    d_new_out: Tensor | None, d_new_lse: Tensor | None, out: Tensor, lse: Tensor, sink_logits: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of out, lse and sinks by differentiable operations."""
    distance = lse.clamp(min=_LOWEST) - sink_logits.to(lse.dtype)[:, None]
    of_keys, of_sink = torch.where(lse == -math.inf, 0.0, torch.sigmoid(distance)), torch.sigmoid(-distance)
    d_out = None
    to_lse = to_sink = torch.zeros_like(lse)
    if d_new_out is not None:
        slopes = d_new_out.to(lse.dtype)
        d_out = (slopes * of_keys[..., None]).to(out.dtype)
        of_share = (slopes * out).sum(-1) * of_keys * of_sink
        to_lse, to_sink = of_share, -of_share
    if d_new_lse is not None:
        to_lse, to_sink = to_lse + d_new_lse * of_keys, to_sink + d_new_lse * of_sink
    d_sinks = to_sink.sum(-1).sum_to_size(sink_logits.shape)
    return d_out, to_lse, d_sinks.to(sink_logits.dtype)
