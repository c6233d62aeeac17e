"""Undecided blocks looked at element by element."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmasks.blocks import limits
from flexmasks.blocks.decide import Axis, Decided
from flexmasks.blocks.elements import Elements, block_indices, coordinates_of
from flexmasks.blocks.limits import progress
from flexmasks.blocks.lists import flat_nonzero
from flexmasks.blocks.pieces import MOST_PIECES, Pieces

_PARTS = 8  # parts of a block along each axis; also the positions that are looked at first along each axis
_MAX_PAIRS = 256  # pairs of a block in the second look
_SAMPLES, _SPREAD = 16, (0.7549, 0.5698)  # positions of all blocks, and the steps between them: the R2 sequence
_FEW = 16  # one block in so many is few
_PIECES = 1, 4, MOST_PIECES  # along an axis of a block; those with few and with many are looked at apart
_MANY = 64  # blocks; fewer are looked at whole sooner than their pieces are found
_SHUFFLE = 45  # an odd factor shuffles the queries: their number in a block is mostly a power of two


def look_at(elements: Elements, decided: Decided, rows: Axis, columns: Axis) -> tuple[Tensor, Tensor]:
    """Whether any, and whether all pairs of each block are visible, booleans of the shape of `decided`. Of a block that
    is unknown when the work is spent, not any and yet all are.

    Where many blocks are undecided, the first look is at one position after the other of all blocks. The next one is at
        8 x 8 positions of each block, where most blocks turn out to be partial. If many are left, ranges look at pieces
        between positions at which what the function reads changes. The next look is at pairs with each query and each
        key once, where most blocks of finer patterns turn out to be partial. The remaining blocks are cut into 8 x 8
        parts. The parts that ranges cannot decide are looked at element by element: first one part of each block, then
        the other parts.
    """
    any_visible = decided.certain.clone(memory_format=torch.contiguous_format)
    all_visible = decided.possible.clone(memory_format=torch.contiguous_format)
    is_open = any_visible ^ all_visible
    looks = _Looks(elements, rows, columns, any_visible, all_visible)
    if int(is_open.count_nonzero()) > max(limits.BLOCKS_ON_CPU, is_open.numel() // _FEW):
        looks.at_all_blocks(is_open)
    places = flat_nonzero(is_open)
    del is_open
    if max(rows.block_size, columns.block_size) <= _PARTS:
        places = looks.take(looks.at_samples, places, is_last=True)
    else:
        places = looks.take(looks.at_samples, places)
        if decided.cuts and len(places) >= _MANY:
            axes = (rows, 2), (columns, 3)
            cut = [Pieces(axis, dim, decided.cuts, len(any_visible), places.device) for axis, dim in axes]
            places = looks.take(functools.partial(looks.at_pieces, cut), places)
        places = looks.take(looks.at_pairs, places)
        places = looks.take(looks.at_parts, places, is_last=True)
    any_visible.view(-1)[places] = False
    all_visible.view(-1)[places] = True
    return any_visible, all_visible


@dataclass(frozen=True)
class _Looks:
    """Looks at blocks. Each notes in `any_visible` and `all_visible`, of some blocks [n, (b, h, row, column)], what it
    sees of their pairs.
    """

    elements: Elements
    rows: Axis
    columns: Axis
    any_visible: Tensor  # of all blocks
    all_visible: Tensor

    def take(self, look: Callable[..., Tensor | None], places: Tensor, is_last: bool = False) -> Tensor:
        """Look at the blocks at flat places, and return the places of those that are still open."""
        seen = self.any_visible.view(-1), self.all_visible.view(-1)
        work, still_open, looked_at = self.elements.work, [places[:0]], 0
        at_once = self.elements.blocks_at_once(max(_PARTS**2, self.rows.block_size, self.columns.block_size))
        if look != self.at_parts:
            at_once = limits.elements_at_once(places.device) // 2
        with progress("looking at undecided blocks", len(places), "block", work.shows_progress) as advance:
            for chunk in places.split(at_once) if len(places) else ():
                if work.is_spent:
                    return torch.cat([*still_open, places[looked_at:]])
                any_visible, all_visible = (x[chunk] for x in seen)
                is_decided = look(coordinates_of(chunk, self.any_visible.shape), any_visible, all_visible)
                seen[0][chunk], seen[1][chunk] = any_visible, all_visible
                if not is_last or work.is_spent:
                    is_open = any_visible <= all_visible
                    still_open.append(chunk[is_open if is_decided is None else is_open & ~is_decided])
                looked_at += len(chunk)
                advance(len(chunk))
        return torch.cat(still_open)

    def at_all_blocks(self, is_open: Tensor) -> None:
        """Look at one position after the other of all blocks, as long as that settles many. `is_open` says afterwards
        which are still open.
        """
        batch, heads, *shape = is_open.shape
        b = torch.arange(batch, device=is_open.device).double().view(-1, 1, 1, 1)
        h = torch.arange(heads, device=is_open.device).double().view(1, -1, 1, 1)
        at_once = min(limits.blocks_at_once(is_open.device), limits.WIDE_ELEMENTS_AT_ONCE // self.elements.widest)
        at_once = max(1, at_once // (batch * heads * shape[1]))
        for strip in torch.arange(shape[0], device=is_open.device).split(at_once):
            chosen = slice(int(strip[0]), int(strip[-1]) + 1)
            still, some, every = (x[:, :, chosen] for x in (is_open, self.any_visible, self.all_visible))
            left = int(still.count_nonzero())
            for n in range(_SAMPLES):
                if self.elements.work.is_spent or left <= still.numel() // _FEW:
                    break
                q = self.rows.positions(strip, _nth_sample(n, _SPREAD[0], self.rows, strip.device))
                every_column = torch.arange(shape[1], device=strip.device)
                kv = self.columns.positions(every_column, _nth_sample(n, _SPREAD[1], self.columns, strip.device))
                seen = self.elements.by_ranges((b, h, q.double().view(1, 1, -1, 1), kv.double().view(1, 1, 1, -1)))
                if seen is None:
                    return
                seen = seen.to(still.device).expand(still.shape)
                some |= seen
                every &= seen
                before, left = left, int((still & (some <= every)).count_nonzero())
                if n > 1 and before - left < before // _FEW:
                    break
            still &= some <= every

    def at_samples(self, blocks: Tensor, any_visible: Tensor, all_visible: Tensor) -> None:
        """Look at some pairs; of small blocks, at all pairs."""
        q, kv = _sampled_positions(self.rows, blocks[:, 2]), _sampled_positions(self.columns, blocks[:, 3])
        any_of_samples, all_of_samples = self._at_positions(blocks, q, kv)
        any_visible |= any_of_samples
        all_visible &= all_of_samples

    def at_pieces(self, pieces: Sequence[Pieces], blocks: Tensor, any_visible: Tensor, all_visible: Tensor) -> Tensor:
        """Look by ranges at pieces of blocks, and return which blocks they decide."""
        is_decided = torch.zeros_like(any_visible)
        b, _, row, column = blocks.T
        counts = torch.maximum(pieces[0].counts(b, row), pieces[1].counts(b, column))
        for least, most in itertools.pairwise(_PIECES):
            chosen = ((counts > least) & (counts <= most)).nonzero()[:, 0]
            for chunk in chosen.split(max(1, limits.elements_at_once(blocks.device) // most**2)) if len(chosen) else ():
                b, h, row, column = blocks[chunk].T
                at_b, at_h = (block_indices(x, x) for x in (y.double().view(-1, 1, 1, 1) for y in (b, h)))
                queries = pieces[0].range(b, row, most, (-1, 1, most, 1))
                keys = pieces[1].range(b, column, most, (-1, 1, 1, most))
                truth = self.elements.on_ranges(at_b, at_h, queries, keys)
                if truth is None:
                    return is_decided
                shape = len(chunk), 1, most, most
                certain, possible = (x.to(blocks.device).expand(shape).flatten(1) for x in (truth.lo, truth.hi))
                any_visible[chunk] |= certain.any(1)
                all_visible[chunk] &= possible.all(1)
                is_decided[chunk] = certain.all(1) | ~possible.any(1)
        return is_decided

    def at_pairs(self, blocks: Tensor, any_visible: Tensor, all_visible: Tensor) -> None:
        """Look at some pairs, spread over all queries and keys of each block."""
        count = min(_MAX_PAIRS, max(self.rows.block_size, self.columns.block_size))
        n = torch.arange(count, device=blocks.device)
        q_offsets = n * _SHUFFLE % count * self.rows.block_size // count
        kv_offsets = n * self.columns.block_size // count

        for chunk in torch.arange(len(blocks), device=blocks.device).split(self.elements.blocks_at_once(count)):
            q = self.rows.positions(blocks[chunk, 2], q_offsets)
            kv = self.columns.positions(blocks[chunk, 3], kv_offsets)
            b, h = (blocks[chunk, d].repeat_interleave(count) for d in (0, 1))
            visible = self.elements(b, h, q.view(-1, 1), kv.view(-1, 1)).view(len(chunk), count)
            any_visible[chunk] |= visible.any(1)
            all_visible[chunk] &= visible.all(1)

    def at_parts(self, blocks: Tensor, any_visible: Tensor, all_visible: Tensor) -> None:
        """Look at all pairs."""
        certain, possible = self._decide_parts(blocks)
        any_visible |= certain.flatten(1).any(1)
        all_visible &= possible.flatten(1).all(1)
        parts = (possible & ~certain).nonzero()
        is_first = torch.ones(len(parts), dtype=torch.bool, device=parts.device)
        torch.ne(parts[1:, 0], parts[:-1, 0], out=is_first[1:])
        for some_parts in (parts[is_first], parts[~is_first]):
            block = some_parts[:, 0]
            block, row, column = some_parts[any_visible[block] <= all_visible[block]].unbind(1)
            q = _positions_of_part(self.rows, blocks[block, 2], row)
            kv = _positions_of_part(self.columns, blocks[block, 3], column)
            any_of_part, all_of_part = self._at_positions(blocks[block], q, kv)
            any_visible[block[any_of_part]] = True
            all_visible[block[~all_of_part]] = False

    def _at_positions(self, blocks: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Whether any, and whether all pairs of positions [n, queries] and [n, keys] are visible; not any and yet all
        when the work is spent.
        """
        at_once = self.elements.blocks_at_once(q.shape[1] * kv.shape[1])
        found = torch.zeros(2, len(blocks), dtype=torch.bool, device=blocks.device)
        found[1] = True
        for n in range(0, len(blocks), at_once):
            if self.elements.work.is_spent:
                break
            chunk = slice(n, n + at_once)
            visible = self.elements(blocks[chunk, 0], blocks[chunk, 1], q[chunk], kv[chunk]).flatten(1)
            found[0, chunk], found[1, chunk] = visible.any(1), visible.all(1)
        return found[0], found[1]

    def _decide_parts(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Whether parts of each block are certainly, and possibly, visible: booleans [n, 8, 8]."""
        n = len(blocks)
        parts = torch.arange(_PARTS, device=blocks.device).expand(n, _PARTS)
        at_b, at_h = (blocks[:, d].double().view(n, 1, 1, 1) for d in (0, 1))
        indices = [block_indices(x, x) for x in (at_b, at_h)]
        for axis, dim, shape in ((self.rows, 2, (n, 1, _PARTS, 1)), (self.columns, 3, (n, 1, 1, _PARTS))):
            positions = _positions_of_part(axis, blocks[:, dim].repeat_interleave(_PARTS), parts.flatten())
            indices.append(block_indices(positions[:, 0].double().view(shape), positions[:, -1].double().view(shape)))
        shape = (n, 1, _PARTS, _PARTS)
        truth = self.elements.on_ranges(*indices)
        if truth is None:
            certain = torch.zeros(shape, dtype=torch.bool, device=blocks.device)
            return certain[:, 0], ~certain[:, 0]
        return truth.lo.to(blocks.device).expand(shape)[:, 0], truth.hi.to(blocks.device).expand(shape)[:, 0]


def _nth_sample(n: int, spread: float, axis: Axis, device: torch.device) -> Tensor:
    return torch.tensor([int((n * spread + 0.5) % 1 * axis.block_size)], device=device)


def _sampled_positions(axis: Axis, block: Tensor) -> Tensor:
    """Positions of each block, its first and last among them; the axis's last one in place of those past its end."""
    count = min(_PARTS, axis.block_size)
    offsets = torch.arange(count, device=block.device) * (axis.block_size - 1) // max(1, count - 1)
    return axis.positions(block, offsets)


def _positions_of_part(axis: Axis, block: Tensor, part: Tensor) -> Tensor:
    """Positions of one part of each block; in place of those past the end of the block or of the axis the last one."""
    size = -(-axis.block_size // _PARTS)
    offsets = part[:, None] * size + torch.arange(size, device=block.device)
    return axis.positions(block, offsets.clamp(max=axis.block_size - 1))
