"""Attention and its gradient in plain torch, a tile of scores at a time: what the reference backend computes with.

A tile is some queries against the keys that their blocks reach: keys of empty blocks are left out, and of the others
only what lies between the first and the last that may be hidden is masked. All tiles use the same buffers, so that
memory grows with Q + KV; the backward pass computes their scores anew.

Every step is a matrix product or an operation that torch has vector instructions for. Choosing by a boolean is none,
so a mask is made of words, all bits set where a key is visible, and hidden scores are cleared by `&`, whatever they
are, NaN and infinity too. Where hidden ones are multiplied by zero instead, NaN and infinity are left out before.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks.blocks.elements import Elements, over_indices
from flexmasks.blocks.lists import of_block_mask

_TILE = 1 << 21  # scores of a tile: these stay in a large cache, and threads meet seldom
_ROWS = (32, 128)  # queries of a tile, at least and at most; with fewer, keys are read too often
_LOG2E = 1 / math.log(2)
_INFINITY = {torch.int32: -(1 << 23), torch.int64: -(1 << 52)}  # -inf as a word
_ALL = slice(None)


class _Reach(NamedTuple):
    """The keys that some block of a tile's queries reaches."""

    keys: slice | Tensor  # positions: a slice where they follow each other
    positions: Tensor
    masked: slice  # of these keys, from the first to the last that may be hidden
    bits: Tensor | None  # [batch or 1, heads or 1, rows, masked]: all set where visible, else none


class _Tile(NamedTuple):
    """Some queries of some heads, and the keys that they reach."""

    pairs: slice  # of a batch element and a head of keys
    batch: slice
    heads: slice  # of queries
    rows: slice
    keys: slice | Tensor
    positions: Tensor
    masked: slice
    bits: Tensor | None


class Tiles:
    """A call of attention, all but its tensors, cut into tiles."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        score_mod: Callable[..., Tensor] | None,
        block_mask: BlockMask,
        scale: float | None,
    ) -> None:
        self._batch, self._heads, self._q_len, size = q.shape
        self._kv_heads, self._kv_len = k.shape[1:3]
        self._groups = self._heads // self._kv_heads
        self._device = q.device
        self._dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self._word = torch.int64 if q.dtype == torch.float64 else torch.int32
        self._score_mod, self._elements = score_mod, Elements(block_mask.mask_mod, q.device)
        self._block_size = block_mask.BLOCK_SIZE
        self._partial, self._full = of_block_mask(block_mask)
        self._scale = 1 / math.sqrt(size) if scale is None else scale
        # Powers of 2 are cheaper than those of e. Scores that nothing changes are to base 2 from the start.
        self._base, self._to_base_2 = (_LOG2E, 1.0) if score_mod is None else (1.0, _LOG2E)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output in q's dtype and natural log-sum-exp."""
        keys, values = self._of_pairs(_once(k)), self._of_pairs(_once(v))
        clean = _clean(values)
        bad = None if clean is values else values.isfinite().logical_not_().to(self._dtype)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.full((*q.shape[:3], 1), -math.inf, dtype=self._dtype, device=self._device)
        (buffer,) = self._buffers(1)
        for tile in self._tiles():
            scores = self._scores(self._taken(q, tile), keys, tile, buffer)
            if self._score_mod is not None:
                scores.copy_(self._changed(self._score_mod, scores, tile))
            self._hide(scores, tile)
            peak = scores.amax(-1, keepdim=True)
            peak.masked_fill_(peak == -math.inf, 0.0).mul_(self._to_base_2)
            weights = torch.add(-peak, scores, alpha=self._to_base_2, out=scores).exp2_()
            total = weights.sum(-1, keepdim=True)
            unseen = total == 0  # not so if NaN
            total.masked_fill_(unseen, 1.0)
            found = (weights @ self._reached(clean, tile)).div_(total)
            if bad is not None:
                found.masked_fill_(weights.sign() @ self._reached(bad, tile) > 0, math.nan)
            self._put(out, tile, found)
            self._put(lse, tile, total.log2_().add_(peak).div_(_LOG2E).masked_fill_(unseen, -math.inf))
        return out, lse[..., 0]

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
        """The gradients of q, k, v and of the tensors that the change of scores learns."""
        keys, values = self._of_pairs(k), self._of_pairs(v)
        clean_q, clean_keys = _clean(q), _clean(keys)
        grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
        # [pairs, size, keys]: so the products that they sum up read both factors along their rows
        grad_k, grad_v = (torch.zeros_like(x.mT, memory_format=torch.contiguous_format) for x in (keys, values))
        grad_learned = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, self._dtype)) for x in learned]
        seen = (lse != -math.inf)[..., None]
        grad_out = torch.where(seen, grad_out, 0.0)  # of the others it may be NaN
        delta = (grad_out.to(self._dtype) * out).sum(-1, keepdim=True) - grad_lse[..., None]
        shift = torch.where(seen, lse[..., None] * -_LOG2E, -math.inf)
        buffers = self._buffers(2 if self._score_mod is None else 3)
        for tile in self._tiles():
            queries, grad_found = self._taken(q, tile), self._taken(grad_out, tile)
            scores = changed = self._scores(queries, keys, tile, buffers[0])
            weights = scores
            if self._score_mod is not None:
                with torch.enable_grad():
                    scores = scores.detach().requires_grad_()
                    changed = self._changed(self._score_mod, scores, tile)
                weights = self._room(buffers[2], tile)
            torch.add(self._taken(shift, tile), changed.detach(), alpha=self._to_base_2, out=weights).exp2_()
            self._clear(weights, tile)
            _accumulate(grad_v[tile.pairs], tile.keys, grad_found.mT, weights)
            grads = torch.bmm(grad_found, self._reached(values, tile).mT, out=self._room(buffers[1], tile))
            grads.sub_(self._taken(delta, tile)).mul_(weights)
            self._clear(grads, tile)
            if self._score_mod is not None:
                inputs = [scores, *learned]
                parts: Sequence[Tensor | None] = [None] * len(inputs)
                if changed.requires_grad:
                    parts = torch.autograd.grad(changed, inputs, grads, allow_unused=True)
                of_scores, *of_learned = parts
                grads = torch.zeros_like(grads) if of_scores is None else self._clear(of_scores.contiguous(), tile)
                for total, part in zip(grad_learned, of_learned, strict=True):
                    if part is not None:
                        total.add_(part)
            self._put(grad_q, tile, (grads @ self._reached(clean_keys, tile)).mul_(self._scale))
            _accumulate(grad_k[tile.pairs], tile.keys, self._taken(clean_q, tile).mT, grads)
        grad_k.mul_(self._scale)
        grad_k, grad_v = (x.mT.reshape(k.shape).to(k.dtype) for x in (grad_k, grad_v))
        return grad_q, grad_k, grad_v, *(x.to(t.dtype) for x, t in zip(grad_learned, learned, strict=True))

    def _of_pairs(self, x: Tensor) -> Tensor:
        """Keys or values as [pairs, keys, size]; pairs of one batch element where all have the same."""
        return x.to(self._dtype).reshape(len(x) * self._kv_heads, self._kv_len, -1)

    def _reached(self, x: Tensor, tile: _Tile) -> Tensor:
        """The tile's part of keys or values."""
        if len(x) == self._batch * self._kv_heads:
            return x[tile.pairs, tile.keys]
        heads = slice(tile.heads.start // self._groups, tile.heads.stop // self._groups)
        return x[heads, tile.keys].repeat(tile.batch.stop - tile.batch.start, 1, 1)

    def _taken(self, x: Tensor, tile: _Tile) -> Tensor:
        """The tile's part of [batch, heads, rows, size] as [pairs, rows of all heads of a pair, size]."""
        part = x[tile.batch, tile.heads, tile.rows].to(self._dtype)
        return part.reshape(tile.pairs.stop - tile.pairs.start, -1, part.shape[-1])

    def _put(self, x: Tensor, tile: _Tile, part: Tensor) -> None:
        """The inverse of `_taken`."""
        target = x[tile.batch, tile.heads, tile.rows]
        target.copy_(part.view(target.shape))

    def _by_head(self, scores: Tensor, tile: _Tile) -> Tensor:
        """[pairs, rows of all heads of a pair, keys] as [batch, heads, rows, keys]."""
        shape = (part.stop - part.start for part in (tile.batch, tile.heads, tile.rows))
        return scores.view(*shape, -1)

    def _buffers(self, count: int) -> list[Tensor]:
        """Room for the scores of any tile, so many times."""
        rows = self._batch * self._heads * min(self._q_len, _ROWS[1])
        size = min(rows * self._kv_len, max(_TILE, _ROWS[0] * self._groups * self._kv_len))
        return [torch.empty(size, dtype=self._dtype, device=self._device) for _ in range(count)]

    def _room(self, buffer: Tensor, tile: _Tile) -> Tensor:
        pairs, rows = tile.pairs.stop - tile.pairs.start, self._groups * (tile.rows.stop - tile.rows.start)
        keys = len(tile.positions)
        return buffer[: pairs * rows * keys].view(pairs, rows, keys)

    def _scores(self, queries: Tensor, keys: Tensor, tile: _Tile, buffer: Tensor) -> Tensor:
        return torch.bmm(
            queries * (self._scale * self._base), self._reached(keys, tile).mT, out=self._room(buffer, tile)
        )

    def _changed(self, score_mod: Callable[..., Tensor], scores: Tensor, tile: _Tile) -> Tensor:
        b, h, q = (torch.arange(s.start, s.stop, device=self._device) for s in (tile.batch, tile.heads, tile.rows))
        changed = over_indices(score_mod, (0,))(self._by_head(scores, tile), b, h, q, tile.positions)
        return changed.to(self._dtype).reshape(scores.shape)

    def _clear(self, scores: Tensor, tile: _Tile) -> Tensor:
        """Set what is hidden to 0."""
        if tile.bits is not None:
            self._by_head(scores, tile)[..., tile.masked].view(self._word).bitwise_and_(tile.bits)
        return scores

    def _hide(self, scores: Tensor, tile: _Tile) -> None:
        """Set what is hidden to -inf."""
        if tile.bits is not None:
            words = self._by_head(scores, tile)[..., tile.masked].view(self._word)
            words.bitwise_and_(tile.bits).bitwise_or_(tile.bits.bitwise_not().bitwise_and_(_INFINITY[self._word]))

    def _tiles(self) -> Iterator[_Tile]:
        """All tiles of which some key may be visible."""
        start = 0
        while start < self._q_len:
            stop = min(start + _ROWS[1], self._q_len)
            width = len(self._columns(self._flags(slice(start, stop)))) * self._block_size[1]
            if width:
                stop = min(stop, start + max(_ROWS[0], _TILE // (self._groups * width)))
                yield from self._tiles_of(slice(start, stop), _TILE // (self._groups * (stop - start) * width))
            start = stop

    def _tiles_of(self, rows: slice, pairs: int) -> Iterator[_Tile]:
        """The tiles of these queries, of about so many pairs: of whole batch elements or of heads of one."""
        pairs = max(1, pairs)
        elements = max(1, pairs // self._kv_heads)
        by_batch, by_head = (n > 1 for n in self._full.shape[:2])

        @functools.lru_cache(maxsize=1)  # where the mask does not depend on it, the next tile reaches the same
        def reach(b: int, stop_b: int, h: int, stop_h: int) -> _Reach | None:
            return self._reach(slice(b, stop_b), slice(h, stop_h), rows)

        for b, h in itertools.product(range(0, self._batch, elements), range(0, self._kv_heads, pairs)):
            stop_b, stop_h = min(b + elements, self._batch), min(h + pairs, self._kv_heads)
            of_queries = slice(h * self._groups, stop_h * self._groups)
            own = (b, stop_b) if by_batch else (0, 1), (of_queries.start, of_queries.stop) if by_head else (0, 1)
            found = reach(*own[0], *own[1])
            if found is not None:
                first = b * self._kv_heads + h
                pairs_here = slice(first, first + (stop_b - b) * (stop_h - h))
                yield _Tile(pairs_here, slice(b, stop_b), of_queries, rows, *found)

    def _flags(self, rows: slice, batch: slice = _ALL, heads: slice = _ALL) -> tuple[Tensor, Tensor]:
        """Of the blocks of these queries, which are partial and which are full."""
        size = self._block_size[0]
        blocks = batch, heads, slice(rows.start // size, -(-rows.stop // size))
        return self._partial[blocks], self._full[blocks]

    def _columns(self, flags: tuple[Tensor, Tensor]) -> list[int]:
        """The blocks of keys that some query reaches."""
        return (flags[0] | flags[1]).flatten(0, 2).any(0).nonzero()[:, 0].tolist()

    def _reach(self, batch: slice, heads: slice, rows: slice) -> _Reach | None:
        flags = self._flags(rows, batch, heads)
        columns = self._columns(flags)
        if not columns:
            return None
        size = self._block_size[1]
        starts = torch.tensor(columns, device=self._device) * size
        positions = (starts[:, None] + torch.arange(size, device=self._device)).flatten()
        positions = positions[: len(positions) - max(0, (columns[-1] + 1) * size - self._kv_len)]
        keys: slice | Tensor = positions
        if columns[-1] - columns[0] < len(columns):
            keys = slice(columns[0] * size, columns[0] * size + len(positions))
        seen = flags[1].flatten(0, 2).all(0).tolist()
        open_ = [n for n, column in enumerate(columns) if not seen[column]]
        if not open_:
            return _Reach(keys, positions, slice(0, 0), None)
        masked = slice(open_[0] * size, (open_[-1] + 1) * size)
        visible = self._visible(flags, batch, heads, rows, positions[masked])
        return _Reach(keys, positions, masked, visible.to(self._word).neg_())

    def _visible(
        self, flags: tuple[Tensor, Tensor], batch: slice, heads: slice, rows: slice, positions: Tensor
    ) -> Tensor:
        """Booleans [batch or 1, heads or 1, rows, positions]."""
        b, h, q = (torch.arange(s.start, s.stop, device=self._device) for s in (batch, heads, rows))
        pairs = len(b) * len(h)
        inside = self._elements(
            b.repeat_interleave(len(h)), h.repeat(len(b)), q.expand(pairs, -1), positions.expand(pairs, -1)
        )
        inside = inside.view(len(b), len(h), len(q), -1)
        size = self._block_size[0]
        partial, full = (x[..., positions // self._block_size[1]] for x in flags)
        if full.shape[2] > 1:
            partial, full = (x[:, :, q // size - rows.start // size] for x in (partial, full))
        return (inside & partial).logical_or_(full)


def _once(x: Tensor) -> Tensor:
    """Keys or values of one batch element, where all have the same, in the same memory."""
    return x[:1] if x.stride(0) == 0 else x


def _clean(x: Tensor) -> Tensor:
    """The tensor, 0 in place of NaN and infinity: where it is multiplied by the zeros of what is hidden."""
    if x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite():  # mostly so, and one pass
        return x
    return torch.where(x.isfinite(), x, 0.0)


def _accumulate(total: Tensor, keys: slice | Tensor, left: Tensor, right: Tensor) -> None:
    """total[..., keys] += left @ right."""
    if isinstance(keys, slice):
        total[..., keys].baddbmm_(left, right)
    else:
        total.index_add_(2, keys, left @ right)
