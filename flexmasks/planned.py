"""A call from the start: checks, plans, and the way to its backend.

Calls with jagged tensors and with sinks become plain calls here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import Call, Result
from flexmasks.backends.plain import attend_nothing, computes_nothing, greatest_scores
from flexmasks.backends.table import run as run_on_backend
from flexmasks.blocks.lists import as_kernels_read
from flexmasks.kernels.sinks import with_sinks
from flexmasks.masks.packed import packed
from flexmasks.plans.alignment import aligned, sequences_aligned
from flexmasks.plans.bounds import unread
from flexmasks.plans.checks import ATTENTION, any_nested, check_offset, described, fail
from flexmasks.plans.mask_plan import GivenPlan, MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.sizes import block_size_for, is_capturing
from flexmasks.request import Request, checked
from flexmasks.spec.aliases import Aliases
from flexmasks.spec.arguments import from_arguments, get_mask
from flexmasks.spec.parameters import can_be_read
from flexmasks.spec.values import Score


class Planned(NamedTuple):
    """A call, and the plans that it was made from."""

    call: Call
    aliases: Aliases
    where_last: Tensor | None = None  # where the last queries of each sequence start, if the plans read it

    @property
    def mask(self) -> MaskPlan | GivenPlan:
        return cast(MaskPlan | GivenPlan, self.call.mask)

    @property
    def score(self) -> ScorePlan | None:
        return cast(ScorePlan | None, self.call.score)


def run_first_time(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Result, Planned | None]:
    """Check, plan and run a call.

    Returns the result, and the plans if what was made may be cached.
    """
    if computes_nothing(q, k, v):
        return Result(*run_nothing(q, k, v, request)), None
    planned = plan_call(q, k, v, request)
    return run_on_backend(planned.call, request.backend_name), planned


def run_nothing(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return the result of a call that computes nothing.

    Its mask and score are checked, but for the values of tensors.
    """
    if compat.in_tracing_mode() and any(isinstance(x, compat.FakeTensor) for x in (q, k, v)):
        fail(
            "make_fx cannot hold it with fake tensors, because blocks are planned; use torch.export.export, "
            "torch.compile, or make_fx with tracing_mode='real'.",
            RuntimeError,
        )
    size, values = checked(q, k, v, request), from_arguments(request.mask, request.score, request.params)
    size = unread(size, aligned(ATTENTION, request.q_offset, size, values))
    for value in values:
        if value is not None:
            value.checked(size)
    out, lse = attend_nothing(q, k, v, learned_by(values[1]))
    return out, lse if request.return_lse else None


def greatest_of(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
    """Return the greatest score of each query of a call, see `attention`."""
    if compat.is_compiling():
        fail(
            "`return_max` is not for a call inside torch.compile; there, use flexmasks.flex.flex_attention with "
            "return_aux=AuxRequest(max_scores=True).",
            RuntimeError,
        )
    if any_nested(q, k, v):
        fail("`return_max` takes no jagged tensors; pass padded ones, with a mask of their lengths.", TypeError)
    if computes_nothing(q, k, v):
        precise = torch.promote_types(q.dtype, torch.float32)
        return torch.full(q.shape[:3], -math.inf, dtype=precise, device=q.device)
    call = plan_call(q, k, v, request).call
    score_mod = None if call.score is None else call.score.mod()
    return greatest_scores(q, k, score_mod, call.mask.blocks().block_mask, call.scale)


def learned_by(score: Score | None) -> list[Tensor]:
    """Return the tensors of a score change that learn."""
    return [] if score is None else [t for t in score.tensors() if t.requires_grad]


def plan_call(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Planned:
    """Check a call's arguments and plan its mask and score."""
    size = checked(q, k, v, request)
    mask, score = from_arguments(request.mask, request.score, request.params)
    q_offset = aligned(ATTENTION, request.q_offset, size, (mask, score))
    aliases = Aliases()
    mask_plan: MaskPlan | GivenPlan
    if request.block_mask is not None:
        mask_plan = GivenPlan(as_kernels_read(request.block_mask), aliases)
    else:
        mask = get_mask("full") if mask is None else mask
        mask_plan = MaskPlan(
            mask, size, q_offset, lift=True, block_size=block_size_for(size), aliases=aliases, allows_bounds=True,
            exact=False,
        )  # fmt: skip
    score_plan = None if score is None else ScorePlan(score, size, q_offset, aliases=aliases)
    plans = [mask_plan] if score_plan is None else [mask_plan, score_plan]
    learns = learns_any(t for plan in plans for t in plan.tensors)
    needs_grad = learns_any((q, k, v))
    call = Call(
        q=q,
        k=k,
        v=v,
        mask=mask_plan,
        score=score_plan,
        q_offset=q_offset,
        scale=None if request.scale is None else float(request.scale),
        with_lse=request.return_lse,
        kernel_options=request.kernel_options,
        needs_grad=learns or needs_grad,
        learns=learns,
        sinks=request.sink_logits,
    )
    return Planned(call, aliases)


def learns_any(tensors: Iterable[Tensor]) -> bool:
    """Return whether a gradient of some of the tensors is wanted."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class Sinks(NamedTuple):
    """The sinks of a call, and whether it wants the lse."""

    logits: Tensor
    with_lse: bool


def sinks_of(request: Request) -> tuple[Sinks | None, Request]:
    """Return the sinks of a call or None, and the request for its backend.

    With sinks that asks for the lse: backends that know no sinks give it, and the sinks are folded into it.
    """
    if request.sink_logits is None:
        return None, request
    return Sinks(request.sink_logits, request.return_lse), request._replace(return_lse=True)


def with_sinks_of(result: Result, sinks: Sinks | None) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call, into which its sinks are folded."""
    if sinks is None:
        return result.out, result.lse
    if result.has_sinks:
        return result.out, result.lse if sinks.with_lse else None
    return with_sinks(result.out, cast(Tensor, result.lse), *sinks)


@contextlib.contextmanager
def under_autocast(q: Any, k: Any, v: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the tensors as torch.autocast casts them, and cast nothing else inside."""
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch knows no autocast of "meta"
        yield q, k, v
        return
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        yield cast_as(q, dtype), cast_as(k, dtype), cast_as(v, dtype)


def cast_as(x: Any, dtype: torch.dtype) -> Any:
    """Cast as torch does for scaled_dot_product_attention: floats, but not float64."""
    casts = isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in (torch.float64, dtype)
    return x.to(dtype) if casts else x


def laid_end_to_end(q: Any, k: Any, v: Any, request: Request) -> tuple[Tensor, Tensor, Tensor, Request]:
    """Return jagged nested tensors as dense tensors, with all sequences laid end to end.

    The dense tensors are [1, H, total, D], and the request gets a `packed` mask and score.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        is_jagged = isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged
        # While torch traces, every size is an int for `isinstance`.
        is_jagged = is_jagged and x.dim() == 4
        if not is_jagged or (not compat.is_compiling() and isinstance(x.shape[2], int)):
            fail(
                f"with nested tensors, q, k and v must all be jagged [B, H, jagged, D]; `{name}` is "
                f"{described(x)}. A tensor [B, jagged, H, D] needs `.transpose(1, 2)`."
            )
        if cast(Any, x).lengths() is not None:
            fail(f"`{name}` is a jagged nested tensor with holes; make it contiguous.")
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_v = (x.offsets() for x in (q, k, v))
    may_read = can_be_read(cu_seqlens_k) and can_be_read(cu_seqlens_v)
    if cu_seqlens_k is not cu_seqlens_v and may_read and not torch.equal(cu_seqlens_k, cu_seqlens_v):
        fail("the sequences of k and v have different lengths.")
    if q.shape[0] != k.shape[0]:
        fail(f"q has {q.shape[0]} sequences, k has {k.shape[0]}.")
    if request.block_mask is not None:
        fail("jagged nested tensors take `mask`, not `block_mask`.", TypeError)
    q_dense, k_dense, v_dense = (x.values().unsqueeze(0) for x in (q, k, v))
    cu_seqlens_k = None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k
    waits = not is_capturing(q.device)
    request = inside_sequences(ATTENTION, request, q_dense, k_dense, cu_seqlens_q, cu_seqlens_k, waits)
    return q_dense, k_dense, v_dense, request


def as_nested(q: Tensor, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return dense output and lse as nested tensors of q's lengths."""
    cu_seqlens_q = cast(Any, q).offsets()
    return compat.nested(out[0], cu_seqlens_q, 2), None if lse is None else compat.nested(lse[0], cu_seqlens_q, 2)


def inside_sequences(
    call: str,
    request: Request,
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    waits: bool = False,
    max_length: Any = None,
) -> Request:
    """Return the request for sequences laid end to end, given a request for each sequence.

    q, k: [1, H, total, D].
    waits: see `sequences_aligned`.
    max_length: as for `packed`.
    """
    mask, score = from_arguments(request.mask, request.score, request.params)
    lengths = q.shape[2], k.shape[2]
    offset = sequences_aligned(
        call, request.q_offset, cu_seqlens_q, cu_seqlens_k, q.shape[1], lengths, (mask, score), waits
    )
    check_offset(call, offset, len(cu_seqlens_q) - 1, q.device)
    layout = cu_seqlens_q, cu_seqlens_k, offset
    mask = packed(get_mask("full") if mask is None else mask, *layout, max_length=max_length)
    score = None if score is None else packed(score, *layout, max_length=max_length)
    return request._replace(mask=mask, score=score, params={}, q_offset=0)
