"""Blocks that ranges decide: certainly full, or not possibly visible."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexmasks.blocks import limits
from flexmasks.blocks.elements import MaskMod, dependence_by_vmap
from flexmasks.blocks.limits import Work
from flexmasks.devices import device_of_float64
from flexmasks.kernels.operators import positions
from flexmasks.ranges import GiveUp, Range, Steps, TooLarge, TooWide
from flexmasks.ranges.context import Cut
from flexmasks.ranges.evaluate import evaluate
from flexmasks.ranges.value import broadcast_shape

_CPU = torch.device("cpu")
_GROUP = 8  # blocks of a group along each axis


@dataclass(frozen=True)
class Axis:
    """Positions `first`..`length` - 1 of queries or keys, in blocks of `block_size`; the last block may be shorter."""

    length: int
    block_size: int
    first: int = 0

    @property
    def count(self) -> int:
        return -(-(self.length - self.first) // self.block_size)

    def blocks(self, start: int, count: int) -> Axis:
        """The axis of the blocks start..start + count - 1."""
        return Axis(min(self.length, (start + count) * self.block_size), self.block_size, start * self.block_size)

    def positions(self, block: Tensor, offsets: Tensor) -> Tensor:
        """Positions [n, offsets] in blocks [n]; the last position in place of those past the end."""
        return (block[:, None] * self.block_size + offsets).clamp_(max=self.length - 1)

    def range(self, dim: int, device: torch.device) -> Range:
        lo = positions(self.length, device, self.first, self.block_size, torch.float64)
        hi = (lo + (self.block_size - 1)).clamp(max=self.length - 1)
        steps = Steps(self.first, self.block_size, self.length, dim)
        shape = [-1 if d == dim else 1 for d in range(4)]
        return Range.of_indices(lo.view(shape), hi.view(shape), self.length - 1, steps)


class Decided(NamedTuple):
    """Booleans [B, H, rows, columns], of size 1 where the mask does not depend on the index, and two facts."""

    certain: Tensor  # whether all pairs of a block are certainly visible
    possible: Tensor  # whether any pair of a block is possibly visible
    not_understood: tuple[str, ...]  # names of operations that ranges do not know, or the reason why they gave up
    widest: int  # elements of the largest tensor that the function saw
    computed: int = 0  # numbers in the results of the function's operations
    cuts: tuple[Cut, ...] = ()  # where numbers that the function reads of queries or keys alone change


def decide(
    mask_mod: MaskMod,
    batch: int,
    heads: int,
    rows: Axis,
    columns: Axis,
    device: torch.device,
    reads_values: bool = True,
) -> Decided:
    """What ranges know of each block; few blocks are decided on the CPU, and the result stays there.

    reads_values: whether the host may read values of tensors. If not, all is decided on `device`, by operations whose
        shapes depend on shapes only; where it has no float64, still on the CPU.
    """
    blocks = rows.count * columns.count
    sizes = batch, heads
    if batch * heads > 1 and batch * heads * blocks > limits.BLOCKS_AT_ONCE:
        sizes = dependence(mask_mod, batch, heads, device, reads_values)
    if reads_values and blocks <= limits.BLOCKS_ON_CPU:
        with contextlib.suppress(TooLarge):
            return _decide_in_slices(mask_mod, sizes, rows, columns, device, _CPU)
    there = device_of_float64(device)
    return _decide_in_slices(mask_mod, sizes, rows, columns, device, there, reads_values=reads_values)


def decide_within(
    work: Work, mask_mod: MaskMod, batch: int, heads: int, rows: Axis, columns: Axis, device: torch.device
) -> Decided:
    """What `decide` returns. Of many blocks whose decision would take too much work, groups are decided."""
    if work.limit < math.inf:
        tall, wide = (Axis(axis.length, _GROUP * axis.block_size) for axis in (rows, columns))
        groups = decide(mask_mod, batch, heads, tall, wide, device)
        if groups.computed * _GROUP**2 > limits.WORK_OF_DECIDING:
            certain, possible = (_of_members(x, rows.count, columns.count) for x in (groups.certain, groups.possible))
            return groups._replace(certain=certain, possible=possible)
    return decide(mask_mod, batch, heads, rows, columns, device)


def _of_members(groups: Tensor, rows: int, columns: int) -> Tensor:
    for dim, n in ((2, rows), (3, columns)):
        if groups.shape[dim] > 1 or n <= _GROUP:  # otherwise the mask does not depend on the index
            groups = groups.repeat_interleave(_GROUP, dim).narrow(dim, 0, n)
    return groups


def dependence(
    mask_mod: MaskMod, batch: int, heads: int, device: torch.device, reads_values: bool = True
) -> tuple[int, int]:
    """The batch and head size of a mask, 1 where the function does not depend on that index."""
    one = Axis(1, 1)
    there = device_of_float64(device)
    decided = _decide_at_once(mask_mod, (batch, heads), one, one, device, there, reads_values=reads_values)
    if isinstance(decided, str):
        return dependence_by_vmap(mask_mod, batch, heads, device)
    return decided.certain.shape[0], decided.certain.shape[1]


def _decide_in_slices(
    mask_mod: MaskMod,
    sizes: tuple[int, int],
    rows: Axis,
    columns: Axis,
    device: torch.device,
    compute_device: torch.device,
    width: int = 1,
    reads_values: bool = True,
) -> Decided:
    """Decide a slice of the rows at a time.

    sizes: of batch and heads.
    width: elements of the largest tensor that the function makes. The larger it is, the fewer rows are in a slice.

    Raises TooLarge where the function captured a tensor too large to be copied to `compute_device`.
    """
    blocks_of_row = sizes[0] * sizes[1] * columns.count
    at_once = limits.blocks_at_once(compute_device)
    step = max(1, at_once // (blocks_of_row * width))
    slices: list[Decided] = []
    parts = [rows]  # not by `range`, which would read a symbolic number of rows
    if rows.count > step:
        parts = [rows.blocks(n, min(step, rows.count - n)) for n in range(0, rows.count, step)]
    for part in parts:
        max_width = max(width, at_once // (blocks_of_row * part.count)) if step > 1 else math.inf
        try:
            decided = _decide_at_once(mask_mod, sizes, part, columns, device, compute_device, max_width, reads_values)
        except TooWide as error:
            return _decide_in_slices(mask_mod, sizes, rows, columns, device, compute_device, error.width, reads_values)
        if isinstance(decided, str):
            shape = (*dependence_by_vmap(mask_mod, *sizes, device), rows.count, columns.count)
            certain = torch.zeros(shape, dtype=torch.bool, device=compute_device)
            return Decided(certain, ~certain, (decided,), 1)
        slices.append(decided)
        if decided.certain.shape[2] == 1 < part.count:  # the mask does not depend on the query
            break
    if len(slices) == 1:
        return slices[0]
    certain, possible = torch.cat([s.certain for s in slices], 2), torch.cat([s.possible for s in slices], 2)
    return slices[0]._replace(certain=certain, possible=possible, computed=sum(s.computed for s in slices))


def _decide_at_once(
    mask_mod: MaskMod,
    sizes: tuple[int, int],
    rows: Axis,
    columns: Axis,
    device: torch.device,
    compute_device: torch.device,
    max_width: float = math.inf,
    reads_values: bool = True,
) -> Decided | str:
    """What ranges know of all blocks, or why they gave up."""
    b = positions(sizes[0], compute_device).view(-1, 1, 1, 1)
    h = positions(sizes[1], compute_device).view(1, -1, 1, 1)
    indices = Range.of_indices(b, b, sizes[0] - 1), Range.of_indices(h, h, sizes[1] - 1)
    q, kv = rows.range(2, compute_device), columns.range(3, compute_device)
    try:
        truth, not_understood, widest, computed, cuts = evaluate(
            mask_mod, *indices, q, kv, device, max_width, reads_values
        )
    except GiveUp as reason:
        return str(reason)
    shape = broadcast_shape(truth.lo, truth.hi)
    shape = (*(1,) * (4 - len(shape)), *shape)
    certain, possible = (end.to(compute_device).expand(shape) for end in (truth.lo, truth.hi))
    return Decided(certain, possible, not_understood, widest, computed, cuts)
