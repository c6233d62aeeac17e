"""Pieces of blocks in which the numbers that a mask's function reads of queries or of keys alone do not change.

Where a block has text and an image, its ids are a range, and so are the numbers of other tables: ranges of the block do
not know which of them come together. In a piece each table has one number, so that ranges decide any combination.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from flexmasks.blocks.decide import Axis
from flexmasks.blocks.elements import block_indices
from flexmasks.ranges import Range
from flexmasks.ranges.context import Cut, version_of

MOST_PIECES = 16  # of a block along an axis
_MOST_CHANGES = 8  # of a table in a block, on average
_MOST_READ = 1 << 20  # elements of a table in which changes are searched


class Pieces:
    """Pieces of the blocks of an axis. A block with more than 16 is not cut, one with fewer repeats its last one.

    dim: of the block dimensions, 2 for queries and 3 for keys.
    batch: tables [batch, positions] cut the blocks of each batch element elsewhere.
    """

    def __init__(self, axis: Axis, dim: int, cuts: Sequence[Cut], batch: int, device: torch.device) -> None:
        self._axis, size = axis, axis.block_size
        cuts = [cut for cut in cuts if cut.dim == dim and (cut.table is None or cut.table.numel() <= _MOST_READ)]
        # Places count the positions in all blocks of a batch element, then those of the next one.
        self._lines = batch if any(_has_lines(cut, batch) for cut in cuts) else 1
        found = {cut: _changes(cut, axis, self._lines).to(device) for cut in cuts}
        few = {cut: at for cut, at in found.items() if len(at) <= _MOST_CHANGES * self._lines * axis.count}
        starts = size * torch.arange(self._lines * axis.count, device=device)[:, None]
        at = torch.cat([starts[:0, 0], *few.values()]).unique()
        at = at[at % size > 0]
        in_block = torch.bincount(at // size, minlength=len(starts))
        self._counts = in_block + 1
        at = at[in_block[at // size] < MOST_PIECES]
        in_block *= in_block < MOST_PIECES
        number = torch.arange(len(at), device=device) - (in_block.cumsum(0) - in_block)[at // size]
        ends = starts + size
        starts = starts.repeat(1, MOST_PIECES)
        starts[at // size, number + 1] = at
        self._starts = starts.cummax(1).values
        later = torch.cat([self._starts[:, 1:], ends], 1)
        self._lasts = torch.where(later > self._starts, later, ends) - 1
        # What is read of a table by other rows than those of batch elements may change too often.
        self._constant_in = _tables_of(few) - _tables_of(cut for cut in cuts if cut not in few)

    def counts(self, b: Tensor, block: Tensor) -> Tensor:
        """How many pieces blocks [n] of batch elements [n] have."""
        return self._counts[self._line(b) * self._axis.count + block]

    def range(self, b: Tensor, block: Tensor, count: int, shape: tuple[int, ...]) -> Range:
        """The positions in the first pieces of blocks [n] of batch elements [n], in a shape."""
        line = self._line(b)
        to_position = (self._axis.first - line * self._axis.count * self._axis.block_size)[:, None]
        places = (x[line * self._axis.count + block, :count] for x in (self._starts, self._lasts))
        ends = ((x + to_position).clamp(max=self._axis.length - 1) for x in places)
        positions = block_indices(*(x.double().view(shape) for x in ends))
        positions.constant_in = self._constant_in
        return positions

    def _line(self, b: Tensor) -> Tensor:
        return b if self._lines > 1 else torch.zeros_like(b)


def _tables_of(cuts: Iterable[Cut]) -> frozenset[tuple[int, int, int]]:
    return frozenset(
        (id(cut.table), version_of(cut.table), cut.along)
        for cut in cuts
        if cut.table is not None and (cut.unit, cut.shift) == (1, 0)
    )


def _has_lines(cut: Cut, batch: int) -> bool:
    has_rows = cut.table is not None and cut.of_batch and batch > 1 and cut.table.ndim == 2
    return has_rows and (len(cast(Tensor, cut.table)), cut.along) == (batch, 1)


def _changes(cut: Cut, axis: Axis, lines: int) -> Tensor:
    """The places from which on the numbers of a cut are others than before."""
    if cut.table is None:
        first, stop = -(-cut.shift // cut.period) * cut.period, cut.shift - (-axis.length // cut.unit)
        number = torch.arange(first, max(first, stop), cut.period)
        line = torch.zeros_like(number)
    else:
        table = cut.table.detach().movedim(cut.along, -1)
        table = table.reshape(-1, table.shape[-1])
        changed = table[:, 1:] != table[:, :-1]
        changed = changed if _has_lines(cut, lines) else changed.any(0, keepdim=True)
        line, number = changed.nonzero().unbind(1)
        number = number + 1
    at = (number - cut.shift) * cut.unit - axis.first
    is_inside = (at >= 0) & (at < axis.length - axis.first)
    line, at = line[is_inside], at[is_inside]
    lines_of = line if _has_lines(cut, lines) else torch.arange(lines, device=at.device)[:, None]
    return (lines_of * axis.count * axis.block_size + at).flatten()
