"""Attention weights: those of some rows and heads, the greatest ones of each query, and their sums per key."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from flexmasks import Plan, attention, masked_softmax
from flexmasks.extend import (
    Alignment,
    MaskLike,
    PairsOfCall,
    ScoreLike,
    as_number,
    in_message,
    over_indices,
    over_visible,
    says_what_to_write,
    under_autocast,
)

Chosen = int | slice | range | Sequence[int] | Tensor
Masks = MaskLike | Plan | BlockMask | Sequence[MaskLike]
_INTS = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8
_AT_ONCE = 1 << 23  # weights held at once where the greatest are looked for


class TopKeys(NamedTuple):
    """The keys of the greatest weights of each query, as `flexmasks.weights(..., topk=)` returns them.

    values: the weights, [B, heads, rows, topk], the greatest first, 0 where a query sees fewer keys.
    indices: the keys, int64 [B, heads, rows, topk], -1 where a query sees fewer.
    """

    values: Tensor
    indices: Tensor


@overload
def weights(q: Tensor, k: Tensor, *, topk: None = None, **arguments: Any) -> Tensor: ...


@overload
def weights(q: Tensor, k: Tensor, *, topk: int, **arguments: Any) -> TopKeys: ...


@says_what_to_write()
def weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Masks | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    scale: float | None = None,
    q_offset: Alignment = None,
    sink_logits: Tensor | None = None,
    rows: Chosen | None = None,
    heads: Chosen | None = None,
    topk: int | None = None,
    **params: Any,
) -> Tensor | TopKeys:
    """Return the attention weights of some queries and heads, or the keys of the greatest weights of each query.

    They are the exact softmax(score(q @ k^T * scale)) of the call `flexmasks.attention(q, k, v, ...)` with the same
    arguments, 0 at hidden keys. Its memory is that of what is asked for, and of as many keys and numbers of the mask:
    the last 64 rows of 131,072 tokens are 64 x 131,072 weights a head. With `topk` the weights of some rows are held at
    a time, never those of all.

    The weights of a row that sees nothing are 0; those of any other add up to 1, or to less by the weight of its sink.
    Values do not matter. In the backward pass hidden keys must be finite.

    Inside torch.compile the call is left out of the graph, which breaks there. On a GPU the host waits for the values
    of the mask's tensors, which are checked.

    Args:
        q: queries, [B, H, Q, D].
        k: keys, [B, Hkv, KV, D]; H must be a multiple of Hkv, and of batch size 1 they are for all queries.
        mask, score, scale, q_offset, sink_logits, params: as in `flexmasks.attention`; a plan and a BlockMask are
            masks, too. `q_offset` is the position of query 0, whatever `rows` says.
        rows: the queries, counted from 0, or from the end if negative: an int, a slice such as `slice(-64, None)`, a
            range, or a list or tensor of ints in any order. By default all, which are Q x KV weights for each head.
        heads: the query heads, likewise.
        topk: for each row the number of its greatest weights. Of equal scores the earlier keys count.

    Returns:
        The weights, [B, heads, rows, KV], float32 (float64 for float64), also of one row or head; or with `topk` a
        tuple of values and indices, [B, heads, rows, topk]: the weights in falling order, and their keys, int64.
        Behind the keys that a row sees, values are 0 and indices -1. Weights have gradients to q, k, sinks and what the
        score learns.

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass.

    Example:
        >>> import torch, flexmasks
        >>> q, k = torch.zeros(1, 4, 100, 16), torch.zeros(1, 2, 100, 16)
        >>> last = flexmasks.weights(q, k, mask="sliding_window", window=4, rows=slice(-2, None), heads=[0, 3])
        >>> last.shape, last[0, 0, -1, -7:]
        (torch.Size([1, 2, 2, 100]), tensor([0.0000, 0.0000, 0.2000, 0.2000, 0.2000, 0.2000, 0.2000]))
        >>> flexmasks.weights(q, k, mask="causal", rows=1, heads=0, topk=3).indices
        tensor([[[[ 0,  1, -1]]]])
    """
    with under_autocast(q, k, k) as (q, k, _):
        pairs = PairsOfCall.of(
            q, k, mask=mask, score=score, scale=scale, q_offset=q_offset, sink_logits=sink_logits, params=params
        )
        q, k = pairs.q, pairs.k
        of_heads = _chosen("weights", "heads", heads, q.shape[1], q.device)
        of_rows = _chosen("weights", "rows", rows, q.shape[2], q.device)
        k = k if heads is None else k[:, of_heads // (q.shape[1] // k.shape[1])]
        q, k = q[:, :, of_rows][:, of_heads], k.to(torch.promote_types(q.dtype, torch.float32))
        sink_logits = None if sink_logits is None else sink_logits[of_heads]
        if topk is None:
            return _weighed(pairs, q, k, sink_logits, of_heads, of_rows)[0]
        topk = as_number(topk)
        if type(topk) is not int or topk < 1:
            raise ValueError(f"flexmasks.weights: `topk` must be an int of at least 1, got {in_message(topk)}.")
        return _top_keys(pairs, q, k, sink_logits, of_heads, of_rows, topk)


def _top_keys(
    pairs: PairsOfCall, q: Tensor, k: Tensor, sinks: Tensor | None, heads: Tensor, rows: Tensor, topk: int
) -> TopKeys:
    """Return the greatest weights and their keys: of some rows of the queries of one key head at a time.

    q, k, heads, rows: as for `_weighed`.
    """

    def greatest(*part: Any) -> tuple[Tensor, Tensor]:
        return _greatest(*_weighed(pairs, *part), topk)

    group = max(1, q.shape[1] // max(1, k.shape[1]))
    step = max(1, _AT_ONCE // max(1, q.shape[0] * group * k.shape[2]))
    of_heads = []
    for n, (of_group, numbers) in enumerate(zip(q.split(group, 1), heads.split(group), strict=True)):
        shared = k[:, n : n + 1], None if sinks is None else sinks.split(group)[n], numbers
        of_rows = []
        for part, places in zip(of_group.split(step, 2), rows.split(step), strict=True):
            if torch.is_grad_enabled() and len(places) < len(rows):  # the backward pass computes them again
                of_rows.append(checkpoint(greatest, part, *shared, places, use_reentrant=False))
            else:
                of_rows.append(greatest(part, *shared, places))
        of_heads.append([torch.cat(parts, 2) for parts in zip(*of_rows, strict=True)])
    return TopKeys(*(torch.cat(parts, 1) for parts in zip(*of_heads, strict=True)))


def _weighed(
    pairs: PairsOfCall, q: Tensor, k: Tensor, sinks: Tensor | None, heads: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weights of rows, and their scores, which are -inf at hidden keys, [B, heads, rows, KV].

    q: [B, heads, rows, D].
    k: [B, Hkv, KV, D], in the dtype of the weights; its heads fit those of q.
    heads, rows: their numbers in the call.
    """
    pairs.check()
    precise = torch.promote_types(q.dtype, torch.float32)
    (batch, n_heads, n_rows, width), (n_keys, kv_len) = q.shape, k.shape[1:3]
    grouped = (q.to(precise) * pairs.scale).reshape(batch, n_keys, n_heads // max(1, n_keys) * n_rows, width)
    scores = (grouped @ k.mT).reshape(batch, n_heads, n_rows, kv_len)
    indices = torch.arange(batch, device=q.device), heads, rows, torch.arange(kv_len, device=q.device)
    visible = None if pairs.mask is None else over_indices(pairs.mask)(*indices)
    if pairs.score is not None:
        scores = over_visible(pairs.score, visible, scores, *indices).to(precise)
    scores = scores if visible is None else torch.where(visible, scores, -torch.inf)
    if sinks is None:
        return masked_softmax(scores, mask=visible), scores
    of_sinks = sinks.to(precise)[:, None, None].expand(batch, -1, n_rows, 1)
    return masked_softmax(torch.cat([scores, of_sinks], -1), mask=None)[..., :-1], scores


def _greatest(weights: Tensor, scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return the greatest weights and their keys, see `TopKeys`. Scores tell weights apart that are rounded alike."""
    count, scores = min(topk, scores.shape[-1]), scores.detach()
    found = scores.topk(min(topk + 1, scores.shape[-1]))
    keys, later = found.indices[..., :count], found.values[..., 1:]
    is_tied = ((later == found.values[..., :-1]) & (later > -torch.inf)).any(-1)
    if bool(is_tied.any()):  # torch says nothing about the order of equal scores
        keys[is_tied] = scores[is_tied].sort(dim=-1, descending=True, stable=True).indices[:, :count]
    values, is_hidden = weights.gather(-1, keys), scores.gather(-1, keys) == -torch.inf
    missing = 0, topk - count
    pad = torch.nn.functional.pad
    return pad(values, missing), pad(keys.masked_fill(is_hidden, -1), missing, value=-1)


@says_what_to_write()
def key_sums(
    q: Tensor,
    k: Tensor,
    *,
    mask: Masks | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    scale: float | None = None,
    q_offset: Alignment = None,
    sink_logits: Tensor | None = None,
    rows: Chosen | None = None,
    lse: Tensor | None = None,
    backend: str = "auto",
    **params: Any,
) -> Tensor:
    """Return how much attention each key gets: the sum of its weights over all queries that see it, or some of them.

    It is `flexmasks.weights(q, k, ...).sum(2)`, of which no weight is held: two calls of `flexmasks.attention`, one for
    the lse of the queries and one in which keys and queries change places. So it has their memory, speed and backends.
    Caches that keep the keys with the greatest sums are H2O (Zhang et al., 2023), and SnapKV for the last rows.

    Args:
        q, k, mask, score, scale, q_offset, sink_logits, rows, params: as in `flexmasks.weights`.
        lse: the lse of all queries, [B, H, Q], where `flexmasks.attention(..., return_lse=True)` has returned it for
            the same arguments; by default it is computed.
        backend: the backend of both calls, as in `flexmasks.attention`.

    Returns:
        The sums, [B, H, KV], float32 (float64 for float64), one for each query head: those of a key head are
        `sums.unflatten(1, (Hkv, -1)).sum(2)`. Keys that nobody sees have 0, and all sums of a head add up to the number
        of queries that see a key, or to less by the weights of sinks. They have gradients to q, k, sinks and what the
        score learns. For the transposed call keys of grouped heads are copied for each query head.

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass.

    Source: Zhang et al., H2O: Heavy-Hitter Oracle, 2023; Li et al., SnapKV, 2024.

    Example:
        >>> import torch, flexmasks
        >>> q, k = torch.zeros(1, 2, 4, 16), torch.zeros(1, 1, 4, 16)
        >>> flexmasks.key_sums(q, k, mask="causal")[0, 0]
        tensor([2.0833, 1.0833, 0.5833, 0.2500])
    """
    with under_autocast(q, k, k) as (q, k, _):
        pairs = PairsOfCall.of(
            q, k, mask=mask, score=score, scale=scale, q_offset=q_offset, sink_logits=sink_logits, params=params
        )
        q, k = pairs.q, pairs.k
        places = None if rows is None else _chosen("key_sums", "rows", rows, q.shape[2], q.device)
        if lse is not None and (not isinstance(lse, Tensor) or lse.shape != q.shape[:3]):
            wanted = f"`lse` must be a tensor [B, H, Q] = {list(q.shape[:3])}"
            raise ValueError(f"flexmasks.key_sums: {wanted}, got {in_message(lse)}.")
        if places is not None:
            q, lse = q[:, :, places], None if lse is None else lse[:, :, places]
        options: dict[str, Any] = {"scale": pairs.scale, "return_lse": True, "backend": backend}

        def functions(turned: bool) -> list[Any]:
            given = (_mask_at, pairs.mask), (_score_at, pairs.score)
            return [
                None if function is None else functools.partial(at, function=function, places=places, turned=turned)
                for at, function in given
            ]

        if lse is None:
            given = {"mask": mask, "score": score, "q_offset": q_offset, **params}
            if places is not None:
                given = dict(zip(("mask", "score"), functions(turned=False), strict=True)) | {"q_offset": 0}
            lse = attention(q, k, k, sink_logits=sink_logits, **given, **options)[1]
        # All pairs of a query that sees nothing are hidden, and what is added to them must be finite.
        added = lse.masked_fill(lse == -torch.inf, 0.0).neg()[:, :, None]
        of_mask, of_score = functions(turned=True)
        scores = added if of_score is None else [of_score, added]
        keys = k.to(q.dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
        sums: Tensor = attention(keys, q, q, mask=of_mask, score=scores, q_offset=0, **options)[1].exp()
        return sums


def _mask_at(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, function: Callable[..., Tensor], places: Tensor | None, turned: bool
) -> Tensor:
    """A mask's function for queries at some places of the call; `turned` for keys that stand in place of queries."""
    q, kv = (kv, q) if turned else (q, kv)
    return function(b, h, q if places is None else places[q], kv)


def _score_at(score: Tensor, *indices: Tensor, function: Callable[..., Tensor], **how: Any) -> Tensor:
    return _mask_at(*indices, function=functools.partial(function, score), **how)


def _chosen(call: str, name: str, given: Any, count: int, device: torch.device) -> Tensor:
    """Return which of `count` rows or heads are chosen, int64 [n]."""
    if given is None:
        return torch.arange(count, device=device)
    given = range(count)[given] if isinstance(given, slice) else as_number(given)
    chosen = None
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of torch; what is wrong is said below
        chosen = torch.as_tensor(given, device=device)
        chosen = chosen[None] if chosen.ndim == 0 else chosen
    if chosen is None or chosen.ndim != 1 or (len(chosen) and chosen.dtype not in _INTS):
        wanted = f"`{name}` must be an int, a slice, or ints [n]"
        raise TypeError(f"flexmasks.{call}: {wanted}, got {in_message(given)}.")
    if bool(((chosen < -count) | (chosen >= count)).any()):
        wanted = f"`{name}` must be from {-count} to {count - 1}"
        raise ValueError(f"flexmasks.{call}: {wanted}, got {in_message(given)}.")
    return chosen.long() % count
