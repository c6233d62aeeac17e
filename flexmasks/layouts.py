"""Layouts of q, k and v that become the layout of a plain call: autocast, jagged tensors, sequences end to end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.context import autocast_dtype, is_capturing
from flexmasks.masks.packed import packed
from flexmasks.plans.alignment import sequences_aligned
from flexmasks.plans.checks import ATTENTION, check_offset, described, fail
from flexmasks.request import Request
from flexmasks.spec.arguments import from_arguments, get_mask
from flexmasks.spec.parameters import can_be_read

_DIMS = 4  # of q, k and v


def as_kernels_read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v for all batch elements of q, without a copy; those of one batch element are for all.

    Queries that lie one element apart, as `unfold` makes them of a signal, are copied: products on a CPU read them as
    if they were transposed.
    """
    for x in (q, k, v):
        if not isinstance(x, Tensor) or x.ndim != _DIMS or x.layout is not torch.strided:
            return q, k, v
    if k.shape[0] == v.shape[0] == 1 != q.shape[0]:
        k, v = k.expand(q.shape[0], -1, -1, -1), v.expand(q.shape[0], -1, -1, -1)
    if not q.is_cuda and q.stride(2) == q.stride(3) == 1 < q.shape[3]:
        q = q.contiguous()
    return q, k, v


@contextlib.contextmanager
def under_autocast(q: Any, k: Any, v: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the tensors as torch.autocast casts them, and cast nothing else inside."""
    dtype = autocast_dtype(q.device) if isinstance(q, Tensor) else None
    if dtype is None:
        yield q, k, v
        return
    with torch.autocast(q.device.type, enabled=False):
        yield cast_as(q, dtype), cast_as(k, dtype), cast_as(v, dtype)


def cast_as(x: Any, dtype: torch.dtype) -> Any:
    """Cast as torch does for scaled_dot_product_attention: floats, but not float64."""
    casts = isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in (torch.float64, dtype)
    return x.to(dtype) if casts else x


def laid_end_to_end(
    q: Any, k: Any, v: Any, request: Request, is_traced: bool = False
) -> tuple[Tensor, Tensor, Tensor, Request]:
    """Return jagged nested tensors as dense tensors, with all sequences laid end to end.

    The dense tensors are [1, H, total, D], and the request gets a `packed` mask and score.

    is_traced: whether torch.compile traces the call.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        is_jagged = isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged
        # While torch traces, every size is an int for `isinstance`.
        is_jagged = is_jagged and x.dim() == 4
        if not is_jagged or (not is_traced and isinstance(x.shape[2], int)):
            fail(
                f"with nested tensors, q, k and v must all be jagged [B, H, jagged, D]; `{name}` is "
                f"{described(x)}. A tensor [B, jagged, H, D] needs `.transpose(1, 2)`."
            )
        if cast(Any, x).lengths() is not None:
            fail(f"`{name}` is a jagged nested tensor with holes; make it contiguous.")
    offsets, kv_offsets, v_offsets = (x.offsets() for x in (q, k, v))
    may_read = can_be_read(kv_offsets) and can_be_read(v_offsets)
    if kv_offsets is not v_offsets and may_read and not torch.equal(kv_offsets, v_offsets):
        fail("the sequences of k and v have different lengths.")
    if q.shape[0] != k.shape[0]:
        fail(f"q has {q.shape[0]} sequences, k has {k.shape[0]}.")
    if request.block_mask is not None:
        fail("jagged nested tensors take `mask`, not `block_mask`.", TypeError)
    q_dense, k_dense, v_dense = (x.values().unsqueeze(0) for x in (q, k, v))
    kv_offsets = None if kv_offsets is offsets else kv_offsets
    waits = not is_capturing(q.device)
    request = inside_sequences(ATTENTION, request, q_dense, k_dense, offsets, kv_offsets, waits)
    return q_dense, k_dense, v_dense, request


def as_nested(q: Tensor, out: Tensor, lse: Tensor | None, is_traced: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return dense output and lse as nested tensors of q's lengths; is_traced: as for `laid_end_to_end`."""
    given = cast(Any, q).offsets(), 2, is_traced
    return compat.nested(out[0], *given), None if lse is None else compat.nested(lse[0], *given)


def inside_sequences(
    call: str,
    request: Request,
    q: Tensor,
    k: Tensor,
    offsets: Tensor,
    kv_offsets: Tensor | None,
    waits: bool = False,
    max_length: Any = None,
) -> Request:
    """Return the request for sequences laid end to end, given a request for each sequence.

    q, k: [1, H, total, D].
    offsets, kv_offsets: as for `packed`.
    waits: see `sequences_aligned`.
    max_length: as for `packed`.
    """
    mask, score = from_arguments(request.mask, request.score, request.params)
    lengths = q.shape[2], k.shape[2]
    q_start = sequences_aligned(call, request.q_offset, offsets, kv_offsets, q.shape[1], lengths, (mask, score), waits)
    check_offset(call, q_start, len(offsets) - 1, q.device)
    places = offsets, kv_offsets, q_start
    mask = packed(get_mask("full") if mask is None else mask, *places, max_length=max_length)
    score = None if score is None else packed(score, *places, max_length=max_length)
    return request._replace(mask=mask, score=score, params={}, q_offset=0)
