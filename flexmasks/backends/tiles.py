"""Attention by tiles, with its gradient written by hand.

This is the fast way of the reference backend.

A tile is some queries of some heads, against the keys that their blocks reach. Keys of empty blocks are left out. Of
the other keys, only the run from the first to the last that may be hidden is masked. All tiles write their scores to
the same buffers, so memory grows with Q + KV, not with Q x KV; the backward pass computes the scores again. On a CPU
the tiles are dealt to a few threads, see `flexmasks.workers`.

Each step is a matrix product or an operation for which torch has vector instructions. Choosing by a boolean is not
such an operation. A mask is therefore a tensor of integers as wide as the scores: all bits are set where a key is
visible, none where it is hidden. `scores & mask` sets hidden scores to 0 whatever they are, NaN and infinity too.
Where a hidden score has become a factor of 0 in a product, NaN and infinity in the other factor are replaced first.

With grouped-query attention several query heads share a head of keys. A *group* here is one head of keys of one batch
element, with the query heads that share it: the unit of the batched matrix products.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from flexmasks.backends.plain import exponentials, precise_dtype
from flexmasks.backends.slices import Visible
from flexmasks.blocks.elements import Elements, over_indices, over_visible
from flexmasks.blocks.lists import pairs_shown
from flexmasks.spec.structure import flatten
from flexmasks.workers import Workers

_MAX_SCORES = 1 << 21  # in a tile, so that they stay in a large cache and threads seldom wait for each other
_MIN_QUERIES, _MAX_QUERIES = 32, 128  # in a tile; with fewer queries, keys are read too often
_LOG2E = 1 / math.log(2)
_MINUS_INFINITY = {torch.int32: -(1 << 23), torch.int64: -(1 << 52)}  # the bits of -inf as an integer
_ALL = slice(None)


class _ReachedKeys(NamedTuple):
    """The keys that a tile's queries reach, and which are hidden.

    A query reaches the keys of its partial and full blocks.
    """

    selection: slice | Tensor  # selects the keys in a tensor of all keys; a slice if they follow each other
    positions: Tensor
    masked: slice  # within `positions`, from the first to the last key that may be hidden
    visible_bits: Tensor | None  # int[batch or 1, heads or 1, queries, masked]; None if no key is hidden


class _Tile(NamedTuple):
    """Some queries of some heads, and the keys that they reach."""

    groups: slice
    batch: slice
    heads: slice  # query heads
    queries: slice
    keys: _ReachedKeys


class _Backward(NamedTuple):
    """Tensors that all parts of the backward pass share."""

    q: Tensor
    keys: Tensor
    values: Tensor
    finite_q: Tensor
    finite_keys: Tensor
    grad_out: Tensor
    delta: Tensor
    shift: Tensor
    grad_q: Tensor
    learned: Sequence[Tensor]


class Tiles:
    """A call of attention without its tensors, cut into tiles.

    Inside a tile, `rows` are the queries of all query heads of a group: scores are [groups, rows, keys].
    """

    def __init__(
        self, q: Tensor, k: Tensor, score_mod: Callable[..., Tensor] | None, visible: Visible, scale: float | None
    ) -> None:
        self._batch, self._heads, self._q_len, size = q.shape
        self._kv_heads, self._kv_len = k.shape[1:3]
        self._heads_per_group = self._heads // self._kv_heads
        self._device = q.device
        self._dtype = precise_dtype(q)
        self._integer = torch.int64 if q.dtype == torch.float64 else torch.int32  # as wide as a score
        self._score_mod, self._elements = score_mod, Elements(visible.mask_mod, q.device)
        self._block_size, self._partial, self._full = visible.block_size, visible.partial, visible.full
        self._scale = 1 / math.sqrt(size) if scale is None else scale
        # Powers of 2 are cheaper than powers of e. Without a score_mod, scores are logarithms to base 2 from the start;
        # changed scores are not: rounding would part equal ones, such as a bias of -1e20, from each other.
        self._base = _LOG2E if score_mod is None else 1.0

    def _divide(self) -> None:
        """Choose the threads of the next pass, and how large its tiles may be."""
        groups, ranges_of_queries = self._batch * self._kv_heads, -(-self._q_len // _MAX_QUERIES)
        scores = self._batch * self._heads * self._q_len * self._kv_len
        self._workers = Workers.of(self._device, scores, groups * ranges_of_queries)
        count = self._workers.count
        self._max_scores = _MAX_SCORES // count
        # If there are few queries, each thread has tiles only if a tile has few of the groups.
        self._max_groups = groups if count == 1 else -(-groups // -(-2 * count // ranges_of_queries))

    # --- the forward and the backward pass ---

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output in q's dtype, and the natural log-sum-exp."""
        self._divide()

        def prepared() -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
            # One batch element if all share memory.
            keys, values = (self._by_group(x[:1] if x.stride(0) == 0 else x) for x in (k, v))
            finite_values = zero_nonfinite(values)
            nonfinite = None if finite_values is values else values.isfinite().logical_not_().to(self._dtype)
            out = q.new_zeros(*q.shape[:3], v.shape[3])
            lse = torch.full((*q.shape[:3], 1), -math.inf, dtype=self._dtype, device=self._device)
            return keys, finite_values, nonfinite, out, lse

        of_all_tiles = self._workers.one(prepared)
        parts = range(self._workers.count)
        self._workers.all([functools.partial(self._forward_part, part, q, *of_all_tiles) for part in parts])
        *_, out, lse = of_all_tiles
        return out, lse[..., 0]

    def _forward_part(
        self,
        part: int,
        q: Tensor,
        keys: Tensor,
        finite_values: Tensor,
        nonfinite: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Write a thread's part of the output and lse."""
        (buffer,) = self._buffers(1)
        for tile in self._tiles(part):
            scores = self._scores(self._rows_of(q, tile), keys, tile, buffer)
            if self._score_mod is not None:
                scores.copy_(self._changed(self._score_mod, scores, tile))
            self._set_hidden_to_minus_infinity(scores, tile)
            weights, total, tile_lse = exponentials(scores, self._exponentials_in_place, self._base)
            tile_out = (weights @ self._keys_of(finite_values, tile)).div_(total)
            if nonfinite is not None:
                tile_out.masked_fill_(weights.sign() @ self._keys_of(nonfinite, tile) > 0, math.nan)
            self._write(out, tile, tile_out)
            self._write(lse, tile, tile_lse)

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
        """Return the gradients of q, k, v and of learned tensors.

        Learned tensors are captured tensors of the score_mod that need a gradient.
        """
        self._divide()

        def prepared() -> _Backward:
            keys, values = self._by_group(k), self._by_group(v)
            sees_something = (lse != -math.inf)[..., None]
            rows = torch.where(sees_something, grad_out, 0.0)  # a row that sees nothing may have a gradient of NaN
            return _Backward(
                q=q,
                keys=keys,
                values=values,
                finite_q=zero_nonfinite(q),
                finite_keys=zero_nonfinite(keys),
                grad_out=rows,
                delta=(rows.to(self._dtype) * out).sum(-1, keepdim=True) - grad_lse[..., None],
                shift=torch.where(sees_something, lse[..., None] * -self._base, -math.inf),
                grad_q=torch.zeros_like(q, memory_format=torch.contiguous_format),
                learned=learned,
            )

        def summed(parts: list[list[Tensor]]) -> tuple[Tensor, ...]:
            (grad_k, grad_v, *grad_learned), *others = parts
            for part in others:
                for total, x in zip((grad_k, grad_v, *grad_learned), part, strict=True):
                    total.add_(x)
            grad_k.mul_(self._scale)
            grad_k, grad_v = (grad.mT.reshape(x.shape).to(x.dtype) for grad, x in ((grad_k, k), (grad_v, v)))
            return grad_k, grad_v, *(x.to(t.dtype) for x, t in zip(grad_learned, learned, strict=True))

        shared = self._workers.one(prepared)
        parts = range(self._workers.count)
        gradients = self._workers.all([functools.partial(self._backward_part, part, shared) for part in parts])
        return shared.grad_q, *self._workers.one(lambda: summed(gradients))

    def _backward_part(self, part: int, shared: _Backward) -> list[Tensor]:
        """Write a part of the gradient of q, and return its part of the others.

        The others are the gradients of k, without the scale, [groups, D, keys], of v, [groups, Dv, keys], and of the
        learned tensors.
        """
        q, keys, values, finite_q, finite_keys, grad_out, delta, shift, grad_q, learned = shared
        # The keys come last: the products added to these then read both factors along their rows.
        grad_k, grad_v = (torch.zeros_like(x.mT, memory_format=torch.contiguous_format) for x in (keys, values))
        grad_learned = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, self._dtype)) for x in learned]
        buffers = self._buffers(2 if self._score_mod is None else 3)
        for tile in self._tiles(part):
            grad_rows = self._rows_of(grad_out, tile)
            scores = changed = weights = self._scores(self._rows_of(q, tile), keys, tile, buffers[0])
            if self._score_mod is not None:
                with torch.enable_grad():
                    scores = scores.detach().requires_grad_()
                    changed = self._changed(self._score_mod, scores, tile)
                weights = self._scores_in(buffers[2], tile)
            self._exponentials(changed.detach(), self._rows_of(shift, tile), weights)
            self._set_hidden_to_zero(weights, tile)
            _add_product(grad_v[tile.groups], tile.keys.selection, grad_rows.mT, weights)
            grads = torch.bmm(grad_rows, self._keys_of(values, tile).mT, out=self._scores_in(buffers[1], tile))
            grads.sub_(self._rows_of(delta, tile)).mul_(weights)
            self._set_hidden_to_zero(grads, tile)
            if self._score_mod is not None:
                grads = self._before_score_mod(grads, scores, changed, learned, grad_learned, tile)
            self._write(grad_q, tile, (grads @ self._keys_of(finite_keys, tile)).mul_(self._scale))
            _add_product(grad_k[tile.groups], tile.keys.selection, self._rows_of(finite_q, tile).mT, grads)
        return [grad_k, grad_v, *grad_learned]

    def _exponentials_in_place(self, scores: Tensor, peak: Tensor) -> Tensor:
        return self._exponentials(scores, -peak, scores)

    def _exponentials(self, scores: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """Write the exponentials of shifted scores; both are logarithms to the tiles' base."""
        shifted = torch.add(shift, scores, out=out)
        return (shifted if self._score_mod is None else shifted.mul_(_LOG2E)).exp2_()

    def _before_score_mod(
        self,
        grads: Tensor,
        scores: Tensor,
        changed: Tensor,
        learned: Sequence[Tensor],
        grad_learned: Sequence[Tensor],
        tile: _Tile,
    ) -> Tensor:
        """Return the gradients of scores, given the gradients of the changed scores.

        The gradients of the learned tensors are added to `grad_learned`.
        """
        if not changed.requires_grad:
            return torch.zeros_like(grads)
        of_scores, *of_learned = torch.autograd.grad(changed, [scores, *learned], grads, allow_unused=True)
        bits = tile.keys.visible_bits
        if bits is not None and not all(x is None or x.sum().isfinite() for x in of_learned):
            visible = bits.new_ones((*bits.shape[:3], len(tile.keys.positions)), dtype=torch.bool)
            visible[..., tile.keys.masked] = bits != 0
            with torch.enable_grad():
                changed = self._changed(cast(Callable[..., Tensor], self._score_mod), scores, tile, visible)
            of_scores, *of_learned = torch.autograd.grad(changed, [scores, *learned], grads, allow_unused=True)
        if of_scores is None:
            grads = torch.zeros_like(grads)
        else:
            grads = of_scores.contiguous()
            self._set_hidden_to_zero(grads, tile)
        for total, part in zip(grad_learned, of_learned, strict=True):
            if part is not None:
                total.add_(part)
        return grads

    # --- a tile's part of tensors ---

    def _by_group(self, x: Tensor) -> Tensor:
        """Return keys or values as [groups, keys, D]. If x has only one batch element, the result has only one too."""
        return x.to(self._dtype).reshape(len(x) * self._kv_heads, self._kv_len, -1)

    def _keys_of(self, x: Tensor, tile: _Tile) -> Tensor:
        """Return the tile's part of keys or values, given as `_by_group` returns them."""
        if len(x) == self._batch * self._kv_heads:
            return x[tile.groups, tile.keys.selection]
        kv_heads = slice(tile.heads.start // self._heads_per_group, tile.heads.stop // self._heads_per_group)
        return x[kv_heads, tile.keys.selection].repeat(_length(tile.batch), 1, 1)

    def _rows_of(self, x: Tensor, tile: _Tile) -> Tensor:
        """Return the tile's part of [batch, heads, queries, D] as [groups, rows, D]."""
        part = x[tile.batch, tile.heads, tile.queries].to(self._dtype)
        return part.reshape(_length(tile.groups), -1, part.shape[-1])

    def _write(self, x: Tensor, tile: _Tile, rows: Tensor) -> None:
        target = x[tile.batch, tile.heads, tile.queries]
        target.copy_(rows.view(target.shape))

    def _by_head(self, scores: Tensor, tile: _Tile) -> Tensor:
        """Return scores [groups, rows, keys] as [batch, heads, queries, keys]."""
        return scores.view(_length(tile.batch), _length(tile.heads), _length(tile.queries), -1)

    def _buffers(self, count: int) -> list[Tensor]:
        """Return `count` buffers, each with room for the scores of any tile."""
        scores_of_all_keys = self._batch * self._heads * min(self._q_len, _MAX_QUERIES) * self._kv_len
        scores_of_smallest_tile = _MIN_QUERIES * self._heads_per_group * self._kv_len
        size = min(scores_of_all_keys, max(self._max_scores, scores_of_smallest_tile))
        return [torch.empty(size, dtype=self._dtype, device=self._device) for _ in range(count)]

    def _scores_in(self, buffer: Tensor, tile: _Tile) -> Tensor:
        shape = _length(tile.groups), self._heads_per_group * _length(tile.queries), len(tile.keys.positions)
        return buffer[: math.prod(shape)].view(shape)

    # --- scores ---

    def _scores(self, queries: Tensor, keys: Tensor, tile: _Tile, buffer: Tensor) -> Tensor:
        scaled = queries * (self._scale * self._base)
        return torch.bmm(scaled, self._keys_of(keys, tile).mT, out=self._scores_in(buffer, tile))

    def _changed(
        self, score_mod: Callable[..., Tensor], scores: Tensor, tile: _Tile, visible: Tensor | None = None
    ) -> Tensor:
        """Return the changed scores; visible: bool [batch or 1, heads or 1, queries, keys], see `over_visible`."""
        b, h, q = self._indices(tile.batch, tile.heads, tile.queries)
        changed = over_visible(score_mod, visible, self._by_head(scores, tile), b, h, q, tile.keys.positions)
        return changed.to(self._dtype).reshape(scores.shape)

    def _set_hidden_to_zero(self, scores: Tensor, tile: _Tile) -> None:
        if tile.keys.visible_bits is not None:
            self._masked_integers(scores, tile).bitwise_and_(tile.keys.visible_bits)

    def _set_hidden_to_minus_infinity(self, scores: Tensor, tile: _Tile) -> None:
        bits = tile.keys.visible_bits
        if bits is not None:
            minus_infinity = bits.bitwise_not().bitwise_and_(_MINUS_INFINITY[self._integer])
            self._masked_integers(scores, tile).bitwise_and_(bits).bitwise_or_(minus_infinity)

    def _masked_integers(self, scores: Tensor, tile: _Tile) -> Tensor:
        """Return a view of possibly hidden scores as integers of the same bits."""
        return self._by_head(scores, tile)[..., tile.keys.masked].view(self._integer)

    # --- the tiles of a call ---

    def _tiles(self, part: int) -> Iterator[_Tile]:
        """Yield the tiles of a part of the call.

        Tiles are dealt out in turn. All parts together cover all blocks in use.
        """
        numbers = itertools.count()
        start = 0
        while start < self._q_len:
            stop = min(start + _MAX_QUERIES, self._q_len)
            max_keys = len(_used_columns(*self._blocks(slice(start, stop)))) * self._block_size[1]
            if max_keys:
                scores_per_query = self._heads_per_group * max_keys
                stop = min(stop, start + max(_MIN_QUERIES, self._max_scores // scores_per_query))
                max_groups = max(1, self._max_scores // (scores_per_query * (stop - start)))
                is_of_part = (n % self._workers.count == part for n in numbers)
                yield from self._tiles_of(slice(start, stop), min(max_groups, self._max_groups), is_of_part)
            start = stop

    def _tiles_of(self, queries: slice, max_groups: int, is_of_part: Iterator[bool]) -> Iterator[_Tile]:
        """Yield the tiles of some queries that are of the part.

        A tile has all groups of its batch elements, or some groups of one batch element.
        """
        max_batch = max(1, max_groups // self._kv_heads)
        by_batch, by_head = (n > 1 for n in self._full.shape[:2])

        # A mask that depends neither on the batch nor on the head reaches the same keys in the next tile.
        @functools.lru_cache(maxsize=1)
        def cached_keys(b: int, stop_b: int, h: int, stop_h: int) -> _ReachedKeys | None:
            return self._reached_keys(slice(b, stop_b), slice(h, stop_h), queries)

        for b, kv_head in itertools.product(range(0, self._batch, max_batch), range(0, self._kv_heads, max_groups)):
            if not next(is_of_part):
                continue
            stop_b, stop_kv_head = min(b + max_batch, self._batch), min(kv_head + max_groups, self._kv_heads)
            h, stop_h = kv_head * self._heads_per_group, stop_kv_head * self._heads_per_group
            keys = cached_keys(*((b, stop_b) if by_batch else (0, 1)), *((h, stop_h) if by_head else (0, 1)))
            if keys is not None:
                group = b * self._kv_heads + kv_head
                groups = slice(group, group + (stop_b - b) * (stop_kv_head - kv_head))
                yield _Tile(groups, slice(b, stop_b), slice(h, stop_h), queries, keys)

    def _blocks(self, queries: slice, batch: slice = _ALL, heads: slice = _ALL) -> tuple[Tensor, Tensor]:
        """Return which blocks of the queries are partial, and which full. Each is bool[batch, heads, rows, columns]."""
        size = self._block_size[0]
        index = batch, heads, slice(queries.start // size, -(-queries.stop // size))
        return self._partial[index], self._full[index]

    def _reached_keys(self, batch: slice, heads: slice, queries: slice) -> _ReachedKeys | None:
        """Return the keys that the queries reach, or None if all their blocks are empty."""
        partial, full = self._blocks(queries, batch, heads)
        columns = _used_columns(partial, full)
        if not columns:
            return None
        size = self._block_size[1]
        starts = torch.tensor(columns, device=self._device) * size
        positions = (starts[:, None] + torch.arange(size, device=self._device)).flatten()
        positions = positions[: len(positions) - max(0, (columns[-1] + 1) * size - self._kv_len)]
        selection: slice | Tensor = positions
        if columns[-1] - columns[0] < len(columns):
            selection = slice(columns[0] * size, columns[0] * size + len(positions))
        is_full = full.flatten(0, 2).all(0).tolist()
        not_full = [place for place, column in enumerate(columns) if not is_full[column]]
        if not not_full:
            return _ReachedKeys(selection, positions, slice(0, 0), None)
        masked = slice(not_full[0] * size, (not_full[-1] + 1) * size)
        visible = self._visible((partial, full), batch, heads, queries, positions[masked])
        return _ReachedKeys(selection, positions, masked, visible.to(self._integer).neg_())  # -1 has all bits set

    def _visible(
        self, blocks: tuple[Tensor, Tensor], batch: slice, heads: slice, queries: slice, positions: Tensor
    ) -> Tensor:
        """Return which keys at `positions` the queries see.

        The result is bool[batch or 1, heads or 1, queries, positions].
        """
        b, h, q = self._indices(batch, heads, queries)
        count = len(b) * len(h)
        by_function = self._elements(
            b.repeat_interleave(len(h)), h.repeat(len(b)), q.expand(count, -1), positions.expand(count, -1)
        ).view(len(b), len(h), len(q), -1)
        return pairs_shown(
            blocks, self._block_size, q, positions, by_function, first_row=queries.start // self._block_size[0]
        )

    def _indices(self, *slices: slice) -> list[Tensor]:
        return [torch.arange(s.start, s.stop, device=self._device) for s in slices]


def learned_by(score_mod: Callable[..., Tensor] | None, device: torch.device) -> list[Tensor] | None:
    """Return the captured tensors of a score_mod that need a gradient, or None if unknown."""
    if score_mod is None or not torch.is_grad_enabled():
        return []
    structure, leaves = flatten(score_mod)
    if structure.unreadable:
        # If the result for one score needs no gradient, the variables that cannot be read learn nothing.
        index = torch.zeros(1, dtype=torch.int64, device=device)
        score = torch.zeros((1, 1, 1, 1), device=device)
        if over_indices(score_mod, (0,))(score, index, index, index, index).requires_grad:
            return None
    return [t for t in leaves.all_tensors if t.requires_grad]


def with_views(score_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a score_mod that reads views of the tensors that learn.

    One of them may be made of another. The gradient of a view is that of its own reads alone, and autograd adds the
    others; that of the tensor itself would count them twice.
    """
    structure, leaves = flatten(score_mod)
    views = [t.view_as(t) if t.requires_grad else t for t in leaves.tensors]
    return cast(Callable[..., Tensor], structure.fill(views, has_own_globals=True)) if structure.is_whole else score_mod


def _length(part: slice) -> int:
    return part.stop - part.start  # type: ignore[no-any-return]


def _used_columns(partial: Tensor, full: Tensor) -> list[int]:
    return (partial | full).flatten(0, 2).any(0).nonzero()[:, 0].tolist()


def zero_nonfinite(x: Tensor) -> Tensor:
    """Return the tensor with 0 in place of NaN and infinity. The tensor itself is returned if its sum is finite."""
    if x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite():  # the usual case, in one pass
        return x
    return torch.where(x.isfinite(), x, 0.0)


def _add_product(total: Tensor, keys: slice | Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total[..., keys] in place."""
    if isinstance(keys, slice):
        total[..., keys].baddbmm_(left, right)
    else:
        total.index_add_(2, keys, left @ right)
