"""Which integers of a captured table a range holds: two ranges that overlap may still share none.

A block that two documents meet in has a wide range of ids, which overlaps the ranges of most other blocks although it
holds two ids only. Ids go by a hash into buckets, and blocks that share no bucket share no id.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmasks.ranges.context import reads_values, version_of
from flexmasks.ranges.value import BLOCK_DIMS, Steps

_BUCKETS, _BITS = 1024, 64
_FACTOR = -7046029254386353131  # 2**64 divided by the golden ratio, for a multiplicative hash
_BITS_OF_HASH = 54  # of 64, which the shift drops: 2**10 buckets are left
_FEW = 8  # undecided blocks for each row and column that are left to a look at their elements
_AT_ONCE = 1 << 18
_SAMPLE, _MOSTLY = 1 << 14, 0.9  # of so many places this share has common integers, where the others are not looked at


class Members(NamedTuple):
    """The integers table[first..end - 1] in ranges that follow each other."""

    table: Tensor
    steps: Steps
    version: int  # of the table

    def words(self, device: torch.device) -> Tensor:
        """The buckets of each range as bits, int64 [ranges, 16]."""
        first, size, end = self.steps.first, self.steps.size, self.steps.end
        buckets = (self.table[first:end].detach().to(device).long() * _FACTOR >> _BITS_OF_HASH) & (_BUCKETS - 1)
        ranges = -(-(end - first) // size)
        place = torch.arange(end - first, device=device) // size * _BUCKETS + buckets
        has = torch.zeros(ranges * _BUCKETS, dtype=torch.bool, device=device).index_fill_(0, place, True)
        bits = torch.arange(_BITS, device=device)
        return (has.view(ranges, _BUCKETS // _BITS, _BITS).long() << bits).sum(-1)


def members_of(table: Tensor, steps: Steps | None) -> Members | None:
    if steps is None or steps.dim < BLOCK_DIMS - 2 or steps.first < 0 or table.ndim != 1 or steps.end > len(table):
        return None
    is_integer = not table.dtype.is_floating_point and table.dtype not in (torch.bool, torch.uint64)
    return Members(table, steps, version_of(table)) if is_integer else None


def without_strangers(certain: Tensor, possible: Tensor, x: Members | None, y: Members | None) -> Tensor:
    """Which ranges are possibly equal, without those that share no integer, where many are undecided."""
    if x is None or y is None or x.steps.dim == y.steps.dim or not reads_values():
        return possible
    if any(version_of(m.table) != m.version for m in (x, y)):  # the function changed it
        return possible
    rows, columns = (x, y) if x.steps.dim == BLOCK_DIMS - 2 else (y, x)
    if int(possible.count_nonzero()) - int(certain.count_nonzero()) <= _FEW * sum(possible.shape[-2:]):
        return possible
    possible = possible.clone(memory_format=torch.contiguous_format)
    flat = possible.view(-1)
    undecided = (possible & ~certain).view(-1).nonzero()[:, 0]
    of_rows, of_columns = rows.words(possible.device), columns.words(possible.device)

    def share(places: Tensor) -> Tensor:
        return (of_rows[places // len(of_columns)] & of_columns[places % len(of_columns)]).any(-1)

    spread = undecided[:: -(-len(undecided) // _SAMPLE)]
    if int(share(spread).count_nonzero()) > len(spread) * _MOSTLY:
        return possible
    for places in undecided.split(_AT_ONCE):
        flat[places] = share(places)
    return possible
