"""Extremes of the elements of a tensor that ranges of indices reach.

`values` has `ndim` dimensions that the function sees, followed by the four dimensions of the blocks, which have size 1
in a captured tensor. `extreme` is torch.amin or torch.amax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.ranges.context import INF, GiveUp, Refused, current_evaluation, reads_values
from flexmasks.ranges.operands import as_range, everywhere
from flexmasks.ranges.value import BLOCK_DIMS, Steps

Extreme = Callable[..., Tensor]
NARROW = (torch.int8, torch.uint8, torch.int16)  # tables of these take up to eight times their memory as float64
_ALWAYS_LOOKED_UP = 1 << 16  # up to this many elements are looked up one by one, whatever the size of the tensor
_MAX_LOOKED_UP = 1 << 25  # elements looked up one by one at once
_MAX_TABLE = 1 << 26  # elements of a table of runs, or of a result


class IndexReach:
    """First and last position that an index of a dimension of n elements reaches.

    `first` and `last` are one tensor if the index is exact. They are 0 and n - 1 in blocks where the index may leave
    0..n-1 and -n..-1.
    """

    def __init__(self, index: Any, n: int) -> None:
        self.steps: Steps | None = None
        self.constant: int | None = None
        if type(index) is int and -n <= index < n:
            self.constant = index % n
            self.first = self.last = torch.tensor(self.constant, device="cpu")
            return
        r = as_range(index)
        if type(index) is int:
            raise GiveUp("an index out of range")
        if r.dtype not in (torch.int64, torch.int32):  # torch takes other dtypes for a mask, or refuses them
            raise GiveUp("indexing by anything but integers")
        if r.limit_reached and n <= r.limit < INF:
            raise Refused(f"a mask function indexes a dimension of {n} elements with an index up to {int(r.limit)}.")
        if r.steps is not None and r.steps.first >= 0 and r.steps.end <= n:
            self.first, self.last, self.steps = r.lo.long(), r.hi.long(), r.steps
            return
        lo = torch.where(r.hi < 0, r.lo + n, r.lo)  # -1 is the last position
        if r.exact and not reads_values():  # an index out of range is an error of the function itself
            self.first = self.last = lo.clamp(0, n - 1).long()
            return
        if r.exact and everywhere((lo >= 0) & (lo < n)):
            self.first = self.last = lo.long()
            return
        hi = torch.where(r.hi < 0, r.hi + n, r.hi)
        inside = (lo >= 0) & (hi < n)
        self.first, self.last = torch.where(inside, lo, 0.0).long(), torch.where(inside, hi, n - 1.0).long()


def extreme_of(values: Tensor, ndim: int, indices: list[IndexReach], extreme: Extreme) -> Tensor:
    """The extreme of values[indices] for each block, without the indexed dimensions, which come first among the `ndim`.
    The dimensions of the blocks may be missing in `values`. Narrow integers become float64, as other bounds are.
    """
    values = values.reshape(*values.shape[:ndim], *(1,) * (BLOCK_DIMS - values.ndim + ndim), *values.shape[ndim:])
    exact: dict[int, Tensor] = {}
    ranges: dict[int, tuple[Tensor, Tensor]] = {}
    for d, index in enumerate(indices):
        if index.constant is not None:
            values = values.narrow(d, index.constant, 1)
        elif index.first is index.last:
            exact[d] = index.first
        elif index.steps is not None and values.shape[ndim + index.steps.dim] == 1:
            values = _extreme_by_steps(values, d, ndim + index.steps.dim, index.steps, extreme)
        else:
            first, last = torch.broadcast_tensors(index.first, index.last)
            ranges[d] = first, last
    values = _extreme_by_ranges(values, ndim, ranges, extreme)
    if exact:
        values = _look_up(values, ndim, exact)
    values = values[(0,) * len(indices)]
    return values.double() if values.dtype in NARROW else values


def _extreme_by_steps(values: Tensor, d: int, block_dim: int, steps: Steps, extreme: Extreme) -> Tensor:
    """Reduce dimension `d` by ranges without gaps, to one element for each range along `block_dim`."""
    n = steps.end - steps.first
    whole, rest = divmod(n, steps.size)
    values = values.narrow(d, steps.first, n)
    parts = []
    if whole:
        parts.append(extreme(values.narrow(d, 0, whole * steps.size).unflatten(d, (whole, steps.size)), dim=d + 1))
    if rest:
        parts.append(extreme(values.narrow(d, n - rest, rest), dim=d, keepdim=True))
    return torch.cat(parts, d).transpose(d, block_dim) if len(parts) > 1 else parts[0].transpose(d, block_dim)


def _extreme_by_ranges(values: Tensor, ndim: int, ranges: dict[int, tuple[Tensor, Tensor]], extreme: Extreme) -> Tensor:
    """Reduce dimensions by any ranges, given as the first and the last position by dimension."""
    if not ranges:
        return values
    shape = torch.broadcast_shapes(values.shape[ndim:], *(first.shape for first, _ in ranges.values()))
    unreduced = math.prod(n for d, n in enumerate(values.shape[:ndim]) if d not in ranges)
    if reads_values():
        lengths = [int((last - first).max()) + 1 for first, last in ranges.values()]
    else:
        lengths = [values.shape[d] for d in ranges]
    in_reach = math.prod(shape) * unreduced * math.prod(lengths)
    evaluation = current_evaluation.get()
    if evaluation is not None:
        evaluation.computed += min(in_reach, _MAX_LOOKED_UP)
    if in_reach <= max(_ALWAYS_LOOKED_UP, min(4 * values.numel(), _MAX_LOOKED_UP)):
        return _extreme_one_by_one(values, ndim, ranges, lengths, extreme)
    if len(ranges) > 1:
        for d, ends in ranges.items():
            values = _extreme_by_ranges(values, ndim, {d: ends}, extreme)
        return values
    ((d, ends),) = ranges.items()
    levels = max(lengths).bit_length()
    if max(math.prod(shape) * unreduced, levels * values.numel() // 2) > _MAX_TABLE:
        # The extreme of the whole dimension, in the shape that says which blocks' indices the result depends on.
        whole = extreme(values, dim=d, keepdim=True)
        return whole.expand(*whole.shape[:ndim], *shape)
    return _extreme_by_runs(values, ndim, d, *ends, levels, extreme)


def _extreme_one_by_one(
    values: Tensor, ndim: int, ranges: dict[int, tuple[Tensor, Tensor]], lengths: list[int], extreme: Extreme
) -> Tensor:
    """Look up each element in reach, at most `lengths` in a range of each dimension, and reduce them."""
    positions = {}
    for n, (d, (first, last)) in enumerate(ranges.items()):
        places = torch.arange(lengths[n], device=values.device)
        places = places.view(-1, *(1,) * (len(ranges) - 1 - n + BLOCK_DIMS))
        first, last = (x.reshape(*(1,) * (BLOCK_DIMS - x.ndim), *x.shape) for x in (first, last))
        positions[d] = torch.minimum(first + places, last)
    return extreme(_look_up(values, ndim, positions), dim=tuple(range(len(ranges))))


def _extreme_by_runs(
    values: Tensor, ndim: int, d: int, first: Tensor, last: Tensor, level_count: int, extreme: Extreme
) -> Tensor:
    """Reduce dimension `d` by a sparse table: level k of `level_count` holds the extreme of each run of 2^k elements,
    and two runs of one level cover a range.
    """
    level = torch.frexp((last - first + 1).double()).exponent.long() - 1
    pick = torch.minimum if extreme is torch.amin else torch.maximum
    if values.dtype == torch.bool:
        pick = torch.logical_and if extreme is torch.amin else torch.logical_or
    levels = [values]
    n = values.shape[d]
    for k in range(level_count - 1):
        step = min(2**k, n)
        shifted = torch.cat([levels[-1].narrow(d, step, n - step), levels[-1].narrow(d, n - step, step)], d)
        levels.append(pick(levels[-1], shifted))
    table = torch.stack(levels)
    runs = (_look_up(table, ndim + 1, {0: level, d + 1: start}) for start in (first, last - (1 << level) + 1))
    return pick(*runs)[0]


def _look_up(values: Tensor, ndim: int, positions: dict[int, Tensor]) -> Tensor:
    """The elements at `positions` of some of the `ndim` dimensions, each of which has one element in the result.
    Further dimensions of positions before the dimensions of the blocks become the first dimensions of the result.
    """
    if len(positions) == ndim and values.shape[ndim:] == (1,) * BLOCK_DIMS:
        elements = _indexed(values.reshape(values.shape[:ndim]), [positions[d] for d in range(ndim)])
        elements = elements.reshape(*(1,) * (BLOCK_DIMS - elements.ndim), *elements.shape)
        further = elements.ndim - BLOCK_DIMS
        return elements.view(*elements.shape[:further], *(1,) * ndim, *elements.shape[further:])
    block_positions = [torch.zeros((), dtype=torch.long, device=values.device)] * BLOCK_DIMS
    for n in range(BLOCK_DIMS):
        size = values.shape[ndim + n]
        if size > 1:
            block_positions[n] = torch.arange(size, device=values.device).view(-1, *(1,) * (BLOCK_DIMS - 1 - n))
    kept = [d for d in range(ndim) if d not in positions]
    arranged = values.permute(*positions, *range(ndim, values.ndim), *kept)
    elements = _indexed(arranged, [*positions.values(), *block_positions])
    indexed_dims = elements.ndim - len(kept)
    elements = elements.reshape(*(1,) * (BLOCK_DIMS - indexed_dims), *elements.shape)
    further = max(0, indexed_dims - BLOCK_DIMS)
    order = [*range(further), *range(elements.ndim - len(kept), elements.ndim), *range(further, further + BLOCK_DIMS)]
    elements = elements.permute(order)
    for d in sorted(positions):
        elements = elements.unsqueeze(further + d)
    return elements


def _indexed(values: Tensor, indices: list[Tensor]) -> Tensor:
    """values[indices], where numbers among the indices get a dimension: torch reads an index without dimensions on the
    host, and its fake tensors give a wrong shape for one.
    """
    with_dims = [i if i.ndim else i.view(1) for i in indices]
    return torch.ops.aten.index(values, with_dims)  # type: ignore[no-any-return] # torch's operators have no types
