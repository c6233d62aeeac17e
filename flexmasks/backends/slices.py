"""Attention by slices: the reference backend's way that torch itself can differentiate, transform and trace.

A slice is some queries of all heads, against the run of keys from the first to the last that their blocks reach. A
slice has at most `_MAX_SCORES` scores. All its derivatives compute them again, those of any order, so that memory never
grows with Q x KV. Unlike `flexmasks.backends.tiles`, which is faster, all of it is made of operations that torch
differentiates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexmasks import compat
from flexmasks.backends.call import exports_any_length
from flexmasks.backends.plain import attend, precise_dtype, scores_of, tangents
from flexmasks.blocks.elements import over_indices, over_visible
from flexmasks.blocks.lists import of_block_mask, pairs_shown
from flexmasks.context import is_traced_or_transformed
from flexmasks.kernels.operators import positions

_MAX_SCORES = 1 << 24  # scores held at once


class OverIndices(NamedTuple):
    """The functions of a call over vectors of indices.

    mask: of b, h, q and kv, bool [b, h, q, kv].
    score: of which pairs are visible, or None, scores [b, h, q, kv] and these indices, see `over_visible`.
    """

    mask: Callable[..., Tensor]
    score: Callable[..., Tensor] | None


class Visible(NamedTuple):
    """The keys that each query sees: a function, and blocks."""

    mask_mod: Callable[..., Tensor]
    partial: Tensor  # bool[B or 1, H or 1, rows, columns] of blocks
    full: Tensor
    block_size: tuple[int, int]  # queries, keys

    @classmethod
    def of(cls, block_mask: compat.BlockMask) -> Visible:
        return cls(block_mask.mask_mod, *of_block_mask(block_mask), block_mask.BLOCK_SIZE)


class _Shared(NamedTuple):
    """The common part of all slices of a call."""

    visible: Visible | None  # None: all keys are reached, and the mask's function is asked for each
    functions: OverIndices
    scale: float | None
    may_read: bool  # values of tensors, on the host
    all_finite: bool  # q, k and v have neither NaN nor infinity
    check: Callable[[], None] | None  # raises an error if a tensor that the functions read was changed


class _Slice(NamedTuple):
    """The queries and keys of a slice. Each run has its first position and the position behind its last."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int


def attend_by_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    visible: Visible | None,
    scale: float | None,
    functions: OverIndices | None = None,
    check: Callable[[], None] | None = None,
    learned: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and lse as `reference.attend` does, by operations that torch differentiates.

    visible: may be None while torch traces, if the mask's function is among `functions`.
    functions: `score_mod` and the mask's function over indices, if torch.compile traces the call, which cannot always
        trace how vmap makes them.
    check: called before these functions run, also when the backward pass computes scores again.
    learned: the tensors that `score_mod` reads and that need a gradient, None if they are not known. Then the second
        derivatives of a call keep all its scores.
    """
    # While torch traces or transforms, no value can be read. Then every key counts as reached and any value as
    # possibly not finite, and torch decides what to keep for the backward pass.
    may_read, is_in_graph = not is_traced_or_transformed(), functions is not None
    all_finite = may_read and bool(torch.stack([x.detach().isfinite().all() for x in (q, k, v)]).all())
    functions = functions or _over_indices(cast(Visible, visible), score_mod)
    shared = _Shared(visible, functions, scale, may_read, all_finite, check)
    outs, lses = [], []
    parts = _traced_slices(q, k) if is_in_graph else _slices(cast(Visible, visible), q, k, may_read)
    for part in parts:
        keys = slice(part.kv_start, part.kv_stop)
        inputs = q[:, :, part.q_start : part.q_stop], k[:, :, keys], v[:, :, keys]
        of_slice = functools.partial(_attend_slice, part=part, shared=shared)
        if may_read and learned is not None:
            out, lse = _recomputed(of_slice, learned, *inputs)
        # One slice alone needs no more memory if it is kept.
        elif torch.is_grad_enabled() and (may_read or (is_in_graph and len(parts) > 1)):
            out, lse = checkpoint(of_slice, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            out, lse = of_slice(*inputs)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _over_indices(visible: Visible, score_mod: Callable[..., Tensor] | None) -> OverIndices:
    of_scores = None if score_mod is None else functools.partial(over_visible, score_mod)
    return OverIndices(over_indices(visible.mask_mod), of_scores)


# --- derivatives of any order that keep nothing but their inputs ---


def _recomputed(function: Callable[..., tuple[Tensor, ...]], learned: Sequence[Tensor], *inputs: Tensor) -> Any:
    """Return the results of a function, of which only its inputs are kept for its derivatives.

    learned: tensors that the function reads by itself, and that need a gradient.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (*learned, *inputs))):
        with torch.no_grad():  # which a score's own derivative may leave
            return function(*inputs)
    return Recomputed.apply(lambda *given: function(*given[len(learned) :]), len(learned), *learned, *inputs)


class Recomputed(torch.autograd.Function):
    """A function of tensors, computed again by its backward pass, which is such a function, too."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], count: Any, *tensors: Tensor) -> Any:
        """count: of the tensors in front, which the function has by itself."""
        ctx.function, ctx.count = function, count
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        again = functools.partial(needed_gradients, ctx.function, ctx.count, needed)
        if torch.is_grad_enabled():
            found = iter(Recomputed.apply(again, ctx.count, *tensors, *grads))
        else:
            found = iter(again(*tensors, *grads))
        return None, None, *(next(found) if need else None for need in needed)


def gradients(
    function: Callable[..., tuple[Tensor, ...]], count: int, needed: Sequence[bool], *tensors: Tensor
) -> list[Tensor | None]:
    """Return the gradients of the inputs of a function, which runs again, and None for those that need none.

    count: of the inputs in front, which the function has by itself.
    tensors: its inputs, and the gradients of its results.
    """
    found = iter(needed_gradients(function, count, needed, *tensors))
    return [next(found) if need else None for need in needed]


def needed_gradients(
    function: Callable[..., tuple[Tensor, ...]], count: int, needed: Sequence[bool], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Return those gradients that `gradients` returns beside None."""
    inputs, grads = tensors[: len(needed)], tensors[len(needed) :]
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [x.view_as(x) if differentiable and x.requires_grad else x.detach() for x in inputs[count:]]
        given = [
            *inputs[:count],
            *(x.requires_grad_(need or x.requires_grad) for x, need in zip(aliases, needed[count:], strict=True)),
        ]
        results = function(*given)
    wanted = [x for x, need in zip(given, needed, strict=True) if need]
    return torch.autograd.grad(results, wanted, grads, create_graph=differentiable, materialize_grads=True)


# --- the slices ---


def _slices(visible: Visible, q: Tensor, k: Tensor, may_read: bool) -> list[_Slice]:
    """Return the slices of a call: rows of blocks, or parts of a row.

    A row is cut if it has more than `_MAX_SCORES` scores.
    """
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    rows, columns = visible.block_size
    used = (visible.partial | visible.full).any(0).any(0)  # bool[rows, columns] of blocks
    step = max(1, _MAX_SCORES // (batch * heads * rows * kv_len))  # rows of blocks taken together
    slices = []
    for first in range(0, used.shape[0], step):
        last = min(first + step, used.shape[0])
        reached = [0, used.shape[1] - 1]
        if may_read:
            reached = used[first:last].any(0).nonzero()[:, 0].tolist() or [0]
        kv_start, kv_stop = reached[0] * columns, min((reached[-1] + 1) * columns, kv_len)
        max_queries = max(1, min(rows * step, _MAX_SCORES // (batch * heads * (kv_stop - kv_start))))
        stop = min(last * rows, q_len)
        for q_start in range(first * rows, stop, max_queries):
            slices.append(_Slice(q_start, min(q_start + max_queries, stop), kv_start, kv_stop))
    return slices


def _traced_slices(q: Tensor, k: Tensor) -> list[_Slice]:
    """Return the slices of a call that torch.compile traces, which reach all keys.

    Only their number depends on the lengths, which may be symbolic: another length with as many slices is the same
    graph. A program of torch.export for any length has one slice.
    """
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    if exports_any_length(q, k):
        return [_Slice(0, q_len, 0, kv_len)]
    count = min(q_len, -(-batch * heads * q_len * kv_len // _MAX_SCORES))
    step = -(-q_len // count)
    return [_Slice(n * step, min((n + 1) * step, q_len), 0, kv_len) for n in range(count) if n * step < q_len]


def _attend_slice(q: Tensor, k: Tensor, v: Tensor, part: _Slice, shared: _Shared) -> tuple[Tensor, Tensor]:
    """Return output and lse of a slice, given its queries, keys and values."""
    if shared.check is not None:
        shared.check()
    batch, heads = q.shape[:2]
    dtype, precise = q.dtype, precise_dtype(q)
    q, k, v = q.to(precise), k.to(precise), v.to(precise)
    bad_q = bad_k = bad_v = None
    if not shared.all_finite:
        bad_q, bad_k = ~q.isfinite().all(-1), ~k.isfinite().all(-1)
        bad_v = ~v.isfinite()
        q, k, v = (torch.where(x.isfinite(), x, 0.0) for x in (q, k, v))
    heads_per_group = heads // k.shape[1]
    q_positions = positions(part.q_stop, q.device, part.q_start)
    kv_positions = positions(part.kv_stop, q.device, part.kv_start)
    visible = _visible(part, shared, (batch, heads), q_positions, kv_positions)

    def changed(scores: Tensor) -> Tensor:
        if shared.functions.score is not None:
            b, h = (positions(n, scores.device) for n in (batch, heads))
            scores = shared.functions.score(visible, scores, b, h, q_positions, kv_positions)
        if bad_q is None or bad_k is None:
            return scores
        has_bad_factor = bad_q[..., None] | bad_k.repeat_interleave(heads_per_group, 1)[:, :, None]
        return torch.where(has_bad_factor, math.nan, scores)

    out, lse, weights = attend(scores_of(q, k, shared.scale, changed, visible), v)
    if bad_v is not None:
        is_weighted = (weights.detach().nan_to_num() > 0).to(precise)
        bad_values = is_weighted @ bad_v.repeat_interleave(heads_per_group, 1).to(precise)
        out = torch.where(bad_values > 0, math.nan, out)
    return out.to(dtype), lse


def tangents_by_slices(
    *given: Tensor, score_mod: Callable[..., Tensor] | None, visible: Visible, scale: float,
    learned: Sequence[Tensor] | None, check: Callable[[], None] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the tangents of output and lse, which torch can differentiate; see `attend_by_slices`.

    given: q, k, v, their tangents, output and lse.
    """
    shared = _Shared(visible, _over_indices(visible, score_mod), scale, True, True, check)
    of_slices = []
    for part in _slices(visible, given[0], given[1], may_read=True):
        rows, keys = slice(part.q_start, part.q_stop), slice(part.kv_start, part.kv_stop)
        inputs = [x[:, :, keys if place in _OF_KEYS else rows] for place, x in enumerate(given)]
        of_slice = functools.partial(_tangents_of_slice, part=part, shared=shared)
        of_slices.append(of_slice(*inputs) if learned is None else _recomputed(of_slice, learned, *inputs))
    of_out, of_lse = zip(*of_slices, strict=True)
    return torch.cat(of_out, 2), torch.cat(of_lse, 2)


_OF_KEYS = 1, 2, 4, 5  # k, v and their tangents


def _tangents_of_slice(*given: Tensor, part: _Slice, shared: _Shared) -> tuple[Tensor, Tensor]:
    if shared.check is not None:
        shared.check()
    dtype, precise = given[0].dtype, precise_dtype(given[0])
    q, k, v, q_tangent, k_tangent, v_tangent, out, lse = (x.to(precise) for x in given)
    b, h = (positions(n, q.device) for n in q.shape[:2])
    indices = positions(part.q_stop, q.device, part.q_start), positions(part.kv_stop, q.device, part.kv_start)
    visible, score = _visible(part, shared, (len(b), len(h)), *indices), shared.functions.score
    scores = scores_of(q, k, shared.scale, None, None)
    slopes = scores_of(q_tangent, k, shared.scale, None, None) + scores_of(q, k_tangent, shared.scale, None, None)
    if score is not None:
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            before = scores.view_as(scores) if scores.requires_grad else scores.detach().requires_grad_()
            scores = score(visible, before, b, h, *indices).to(precise)
        factor = torch.zeros_like(scores)
        if scores.requires_grad:  # a changed score depends on its own score alone: one gradient has all derivatives
            (factor,) = torch.autograd.grad(
                scores, before, torch.ones_like(scores), create_graph=differentiable, materialize_grads=True
            )
        scores, slopes = scores if differentiable else scores.detach(), slopes * factor
    if visible is not None:
        scores, slopes = torch.where(visible, scores, -math.inf), torch.where(visible, slopes, 0.0)
    of_out, of_lse = tangents(scores, slopes, v, v_tangent, out, lse)
    return of_out.to(dtype), of_lse


def _visible(
    part: _Slice, shared: _Shared, sizes: tuple[int, int], q_positions: Tensor, kv_positions: Tensor
) -> Tensor | None:
    """Return which keys of a slice are visible, or None if all are.

    sizes: of batch and heads. The result is bool[B or 1, H or 1, queries, keys].
    """
    if shared.visible is None:
        b, h = (positions(n, q_positions.device) for n in sizes)
        return shared.functions.mask(b, h, q_positions, kv_positions)
    rows, columns = shared.visible.block_size
    first_row = part.q_start // rows
    partial, full = (
        x[:, :, first_row : -(-part.q_stop // rows)] for x in (shared.visible.partial, shared.visible.full)
    )
    if shared.may_read and not partial.any() and full[..., kv_positions // columns].all():
        return None
    b, h = (positions(n, q_positions.device) for n in partial.shape[:2])
    by_function = shared.functions.mask(b, h, q_positions, kv_positions)
    return pairs_shown((partial, full), (rows, columns), q_positions, kv_positions, by_function, first_row)
