"""Attention whose bits do not depend on what else is in a call, for `flexmasks.invariant` on a CPU.

Queries and keys lie in tiles of one shape, counted from the first key of their sequence: a query at position p stands
in row p % 32 of tile p // 32, a key at position p in column p % 128. So every matrix product has the shape that it has
for the sequence alone, and each of its elements the same place in it. The tiles of keys are read in order, with the
softmax made as they come; gradients of keys add those of the tiles of queries in order. Hidden pairs add exact zeros,
so that tiles of hidden pairs are left out, and what stands at the places of no token changes nothing. How many tiles
one operation computes is free: each of its products is by itself.

Elementwise operations compute whole vectors of the processor here, as each tile has a multiple of them. The elements
at the end of an odd number would be computed in another way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexmasks.backends.ordered_places import KEYS, QUERIES, OrderedTiles
from flexmasks.backends.plain import precise_dtype
from flexmasks.backends.slices import Visible
from flexmasks.backends.tiles import zero_nonfinite
from flexmasks.blocks.elements import Elements, with_indexing_by_numbers
from flexmasks.workers import Workers

_MAX_SCORES = 1 << 19  # computed by one operation


class _Step(NamedTuple):
    """Tiles of queries, each with a tile of keys."""

    q: Tensor  # places in the present part of the tiles of queries, ascending
    kv: Tensor
    masked: Tensor  # places in these, where not all pairs are seen
    hidden: Tensor | None  # bool [masked, heads or 1, 32, 128]


class _Backward(NamedTuple):
    """What the backward pass reads, in tiles."""

    rows: Tensor  # queries times the scale
    finite_rows: Tensor
    slopes: Tensor  # the gradient of the output
    delta: Tensor
    ends: Tensor  # the lse, inf for what sees nothing
    keys: Tensor
    finite_keys: Tensor
    values: Tensor

    def of(self, heads: slice, step: _Step, start: int) -> _Backward:
        """Return a step's part; start: the first tile of queries of the present part."""
        places = [step.q + start] * 5 + [step.kv] * 3
        return _Backward(*(x[heads].index_select(1, at) for x, at in zip(self, places, strict=True)))


class Ordered:
    """A call of attention without its tensors, in tiles of sequences. Tensors "in tiles" are [kv heads, tiles, ...]."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        score_mod: Callable[..., Tensor] | None,
        visible: Visible,
        scale: float | None,
        layout: OrderedTiles,
        sinks: Tensor | None,
    ) -> None:
        _, heads, self._q_len, size = q.shape
        self._kv_heads, self._kv_len = k.shape[1:3]
        self._group, self._dtype, self._layout = heads // self._kv_heads, precise_dtype(q), layout
        self._scale = 1 / math.sqrt(size) if scale is None else scale
        self._score_mod = None if score_mod is None else _over_tiles(score_mod)
        self._elements, self._block_size = Elements(visible.mask_mod, q.device), visible.block_size
        self._blocks = visible.partial, visible.full
        self._sinks = None if sinks is None else sinks.detach().to(self._dtype).reshape(self._kv_heads, 1, -1, 1)
        some, full = (visible.partial | visible.full).any(1), visible.full.all(1)
        self._counts = [torch.nn.functional.pad(x.cumsum(1).cumsum(2), (1, 0, 1, 0)) for x in (some, full)]
        self._q, self._kv = layout.q.clamp(min=0) % self._q_len, layout.kv.clamp(min=0) % self._kv_len
        self._b = layout.q.amax(1) // self._q_len
        self._spans = [  # the first block of tokens of a tile, and the one behind the last
            (torch.where(tokens < 0, at.amax(1, keepdim=True), at).amin(1) // n, at.amax(1) // n + 1)
            for tokens, at, n in zip(layout[:2], (self._q, self._kv), self._block_size, strict=True)
        ]
        self._are_whole = [(tokens >= 0).all(1) for tokens in layout[:2]]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output in q's dtype, and the natural log-sum-exp."""
        rows, keys = self._queries(q).mul_(self._scale), self._keys(k)
        finite = zero_nonfinite(v)
        values, nonfinite = self._keys(finite), None if finite is v else self._keys(~v.isfinite())
        out = rows.new_empty(*rows.shape[:3], v.shape[3])
        lse = rows.new_empty(*rows.shape[:3], 1)
        self._of_heads(functools.partial(self._forward_part, rows, keys, values, nonfinite, out, lse))
        return self._rows(out, q).to(q.dtype), self._rows(lse, q)[..., 0]

    def _forward_part(
        self,
        rows: Tensor,
        keys: Tensor,
        values: Tensor,
        nonfinite: Tensor | None,
        out: Tensor,
        lse: Tensor,
        heads: slice,
    ) -> None:
        for part in self._parts(heads):
            own = rows[heads, part]
            peak, total = self._at_first(own, heads)
            summed = torch.zeros_like(out[heads, part])
            spoilt = torch.zeros_like(summed, dtype=torch.bool)
            for step in self._steps(part):
                scores = _product(own.index_select(1, step.q), keys[heads].index_select(1, step.kv).mT)
                if self._score_mod is not None:
                    scores = self._changed(self._score_mod, scores, heads, part, step)
                self._hide(scores, step, heads, -math.inf)
                before = peak.index_select(1, step.q)
                peak[:, step.q] = now = torch.maximum(before, scores.amax(-1, keepdim=True))
                shift = now.masked_fill(now == -math.inf, 0.0)
                weights, fade = (scores - shift).exp_(), (before - shift).exp_()
                total[:, step.q] = total.index_select(1, step.q) * fade + weights.sum(-1, keepdim=True)
                own_values = values[heads].index_select(1, step.kv)
                summed[:, step.q] = summed.index_select(1, step.q) * fade + _product(weights, own_values)
                if nonfinite is not None:
                    spoilt[:, step.q] |= _product(weights.sign(), nonfinite[heads].index_select(1, step.kv)) > 0
            total.masked_fill_(total == 0, 1.0)  # False for NaN
            # A sum of hidden pairs alone may be -0.0, and is 0.0 where they were left out.
            out[heads, part] = (summed / total).masked_fill_(spoilt, math.nan).add_(0.0)
            lse[heads, part] = total.log() + peak

    def _at_first(self, rows: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Return the highest score and the sum of weights before the first key: those of the sinks, if there are some.

        A sink is a key that all queries of its head see, whose value is 0.
        """
        peak = rows.new_full((*rows.shape[:3], 1), -math.inf)
        if self._sinks is not None:
            peak.view(*rows.shape[:2], self._group, -1)[:] = self._sinks[heads]
        return peak, (peak != -math.inf).to(self._dtype)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor,
        learned: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, and of sinks if these are in `learned`."""
        rows, keys = self._queries(q).mul_(self._scale), self._keys(k)
        ends = self._queries(lse[..., None], -math.inf)
        sees_nothing = ends == -math.inf  # such a row may have a gradient of NaN
        slopes = self._queries(grad_out).masked_fill_(sees_nothing, 0.0)
        delta = (slopes * self._queries(out)).sum(-1, keepdim=True) - self._queries(grad_lse[..., None])
        delta.masked_fill_(sees_nothing, 0.0)
        ends.masked_fill_(sees_nothing, math.inf)
        given = _Backward(rows, zero_nonfinite(rows), slopes, delta, ends, keys, zero_nonfinite(keys), self._keys(v))
        of_q, of_k, of_v = (torch.zeros_like(x) for x in (rows, keys, given.values))
        self._of_heads(functools.partial(self._backward_part, given, of_q, of_k, of_v))
        of_sinks = []
        if learned and self._sinks is not None:
            logits = self._sinks.expand(*ends.shape[:2], self._group, QUERIES).reshape(ends.shape)
            shares = (logits - ends).exp_().mul_(delta).view(*ends.shape[:2], self._group, -1)
            # Each sequence's own first, then in order: as if each had been a call of its own.
            spans = torch.stack([self._layout.first, self._layout.end])
            counts = spans.unique_consecutive(return_counts=True, dim=1)[1].tolist()
            of_each = (-x.contiguous().sum((1, 3)).flatten().to(learned[0].dtype) for x in shares.split(counts, 1))
            of_sinks = [functools.reduce(torch.add, of_each)]
        return (
            self._rows(of_q.mul_(self._scale), q).to(q.dtype),
            *(_in_place(self._layout.kv, grad, x).to(x.dtype) for grad, x in ((of_k, k), (of_v, v))),
            *of_sinks,
        )

    def _backward_part(self, given: _Backward, of_q: Tensor, of_k: Tensor, of_v: Tensor, heads: slice) -> None:
        """Add to gradients in tiles: of queries, without the scale, of keys and of values."""
        for part in self._parts(heads):
            for step in self._steps(part):
                own = given.of(heads, step, part.start)
                scores = changed = _product(own.rows, own.keys.mT)
                if self._score_mod is not None:
                    with torch.enable_grad():
                        scores = scores.requires_grad_()
                        changed = self._changed(self._score_mod, scores, heads, part, step)
                weights = (changed.detach() - own.ends).exp_()
                self._hide(weights, step, heads, 0.0)
                of_v[heads].index_add_(1, step.kv, _product(weights.mT, own.slopes))
                grads = _product(own.slopes, own.values.mT).sub_(own.delta).mul_(weights)
                self._hide(grads, step, heads, 0.0)
                if self._score_mod is not None:
                    if not changed.requires_grad:
                        continue
                    (found,) = torch.autograd.grad(changed, [scores], grads, allow_unused=True)
                    if found is None:
                        continue
                    grads = found.contiguous()
                    self._hide(grads, step, heads, 0.0)
                of_q[heads].index_add_(1, step.q + part.start, _product(grads, own.finite_keys))
                of_k[heads].index_add_(1, step.kv, _product(grads.mT, own.finite_rows))

    # --- tensors in tiles, and back ---

    def _queries(self, x: Tensor, filling: float = 0.0) -> Tensor:
        """Return [B, H, Q, N] in tiles [kv heads, tiles, heads of a group x 32, N]."""
        tiles = _tiled(self._layout.q, x, filling, self._dtype)
        return tiles.view(self._kv_heads, self._group, *tiles.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _keys(self, x: Tensor) -> Tensor:
        """Return [B, kv heads, KV, N] in tiles [kv heads, tiles, 128, N]."""
        return _tiled(self._layout.kv, x, 0.0, self._dtype)

    def _rows(self, tiles: Tensor, q: Tensor) -> Tensor:
        """Return what `_queries` made tiles of."""
        by_head = tiles.view(*tiles.shape[:2], self._group, QUERIES, -1).transpose(1, 2).flatten(0, 1)
        return _in_place(self._layout.q, by_head, q)

    # --- the tiles of a call ---

    def _of_heads(self, compute: Callable[[slice], None]) -> None:
        """Call a function with all heads of keys, dealt to threads that compute their operations alone."""
        workers = Workers.alone(self._kv_heads)
        each = -(-self._kv_heads // workers.count)
        starts = range(0, self._kv_heads, each)
        with torch.autocast("cpu", enabled=False):  # as in the threads of workers, also where one part runs in this one
            workers.all([functools.partial(compute, slice(n, min(n + each, self._kv_heads))) for n in starts])

    def _parts(self, heads: slice) -> Iterator[slice]:
        """Yield parts of the tiles of queries."""
        count = len(self._layout.q)
        step = max(1, _MAX_SCORES // ((heads.stop - heads.start) * self._group * QUERIES * KEYS))
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def _steps(self, part: slice) -> Iterator[_Step]:
        """Yield steps which together have all pairs of tiles with visible pairs, in order of keys."""
        first = self._layout.first[part, None]
        count = self._layout.end[part, None] - first
        numbers = torch.arange(int(count.max()), device="cpu")
        kv = torch.where(numbers < count, first + numbers, 0)
        (top, bottom), (left, right) = ((x[:, None] for x in self._spans[0]), (x[kv] for x in self._spans[1]))
        top, bottom = top[part], bottom[part]
        b = self._b[part, None] if len(self._counts[0]) > 1 else 0
        some, full = (
            x[b, bottom, right] - x[b, top, right] - x[b, bottom, left] + x[b, top, left] for x in self._counts
        )
        is_full = (full == (bottom - top) * (right - left)) & self._are_whole[1][kv]
        if self._score_mod is not None:  # which might make NaN of what stands at the places of no query
            is_full &= self._are_whole[0][part, None]
        for number in numbers.tolist():
            q = ((some[:, number] > 0) & (number < count[:, 0])).nonzero()[:, 0]
            if len(q):
                masked = is_full[q, number].logical_not_().nonzero()[:, 0]
                hidden = self._hidden(q[masked] + part.start, kv[q[masked], number]) if len(masked) else None
                yield _Step(q, kv[q, number], masked, hidden)

    def _hidden(self, q_tiles: Tensor, kv_tiles: Tensor) -> Tensor:
        """Return which pairs of tiles are hidden, bool [tiles, heads or 1, 32, 128]."""
        batch, heads = self._blocks[0].shape[:2]
        b, q, kv = self._b[q_tiles], self._q[q_tiles], self._kv[kv_tiles]
        b = b if batch > 1 else torch.zeros_like(b)
        h = torch.arange(heads, device="cpu").repeat(len(b))
        b, q, kv = (x.repeat_interleave(heads, 0) for x in (b, q, kv))
        visible = self._elements(b, h, q, kv)
        rows, columns = q // self._block_size[0], kv // self._block_size[1]
        partial, full = (
            x[b[:, None, None], h[:, None, None], rows[:, :, None], columns[:, None]] for x in self._blocks
        )
        visible = (full | (partial & visible)).view(-1, heads, QUERIES, KEYS)
        q_there, kv_there = self._layout.q[q_tiles] >= 0, self._layout.kv[kv_tiles] >= 0
        return ~(visible & q_there[:, None, :, None] & kv_there[:, None, None])

    # --- scores [kv heads, tiles, heads of a group x 32, 128] ---

    def _hide(self, scores: Tensor, step: _Step, heads: slice, value: float) -> None:
        """Write a value in place of hidden scores."""
        if step.hidden is None:
            return
        hidden = step.hidden
        if hidden.shape[1] > 1:
            hidden = hidden[:, heads.start * self._group : heads.stop * self._group]
            hidden = hidden.view(len(hidden), -1, self._group, QUERIES, KEYS).transpose(0, 1)
        shape = scores.shape[0], len(step.masked), self._group, QUERIES, KEYS
        scores[:, step.masked] = (
            scores.index_select(1, step.masked).view(shape).masked_fill(hidden, value).flatten(2, 3)
        )

    def _changed(
        self, score_mod: Callable[..., Tensor], scores: Tensor, heads: slice, part: slice, step: _Step
    ) -> Tensor:
        count, in_group, q_tiles = len(scores), self._group, step.q + part.start
        shape = count, len(step.q), in_group, QUERIES
        h = (
            torch.arange(heads.start * in_group, heads.stop * in_group, device="cpu")
            .view(count, 1, in_group, 1)
            .expand(shape)
        )
        b, q = self._b[q_tiles, None, None].expand(shape), self._q[q_tiles, None].expand(shape)
        kv = self._kv[step.kv].expand(count, -1, -1)
        changed = score_mod(
            scores.flatten(0, 1), *(x.reshape(-1, in_group * QUERIES) for x in (b, h, q)), kv.flatten(0, 1)
        )
        return changed.to(self._dtype).reshape(scores.shape)


def _over_tiles(score_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a score_mod over scores [n, rows, keys], with b, h and q [n, rows], and kv [n, keys].

    Each row has its own b and h, so that what is computed of them alone comes in whole vectors, too.
    """
    for dims in ((0, None, None, None, 0), (0, 0, 0, 0, None), (0, 0, 0, 0, 0)):
        score_mod = torch.vmap(score_mod, in_dims=dims)
    return with_indexing_by_numbers(score_mod)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, each of two dimensions of matrices."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).view(*left.shape[:3], -1)


def _tiled(places: Tensor, x: Tensor, filling: float, dtype: torch.dtype) -> Tensor:
    """Return [B, heads, S, N] in tiles [heads, tiles, tokens, N]."""
    in_rows = x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[3])
    tiles = in_rows.index_select(1, places.clamp(min=0).flatten()).to(dtype)
    return tiles.view(len(tiles), *places.shape, x.shape[3]).masked_fill_((places < 0)[..., None], filling)


def _in_place(places: Tensor, tiles: Tensor, like: Tensor) -> Tensor:
    """Return what `_tiled` made tiles of, [B, heads, S, N]; like: has these sizes but for N."""
    batch, heads, length, _ = like.shape
    is_there = (places >= 0).flatten()
    rows = tiles.new_zeros(heads, batch * length, tiles.shape[3])
    rows.index_copy_(1, places.flatten()[is_there], tiles.flatten(1, 2)[:, is_there])
    return rows.view(heads, batch, length, -1).transpose(0, 1).contiguous()
