"""Rules of indexing, and of joining and splitting dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.ranges.context import GiveUp, captured_bounds, current_evaluation, index_guard, version_of
from flexmasks.ranges.members import members_of
from flexmasks.ranges.operands import as_range, everywhere
from flexmasks.ranges.reach import NARROW, IndexReach, extreme_of
from flexmasks.ranges.value import BLOCK_DIMS, Range, rule


@rule("getitem")
def getitem(values: Any, index: Any) -> Any:
    """The least and the greatest element that the index reaches; None if an index is a truth value, a slice that
    contains a range, or a tensor or range with dimensions.
    """
    indices = list(index) if isinstance(index, tuple) else [index]
    if any(type(i) is list and any(isinstance(x, Range) for x in i) for i in indices):
        raise GiveUp("a list of numbers as an index")  # torch's meaning of such a list changes with its version
    if isinstance(values, Tensor) and not any(isinstance(i, Range) for i in indices):
        return values[index]
    if all(i is None or i is Ellipsis for i in indices):
        return unsqueezed(values, indices)
    if not isinstance(values, Range | Tensor) or sum(i is not Ellipsis for i in indices) > values.ndim:
        return None
    if not all(i is Ellipsis or type(i) in (int, slice) or _is_number(i) for i in indices):
        return None
    if isinstance(values, _Rows):
        return getitem(values.unchanged_table(), (*values.indices, *indices))
    values, indices = _numbers_first(values, indices)
    if 0 in values.shape:
        raise GiveUp("an index of an empty tensor")
    if isinstance(values, Tensor) and len(indices) < values.ndim:
        return _Rows(values, tuple(indices))
    return _elements(values, indices) if indices else values


def _is_number(index: Any) -> bool:
    return isinstance(index, Range | Tensor) and index.ndim == 0


def _numbers_first(values: Any, indices: list[Any]) -> tuple[Any, list[Any]]:
    """Take the slices of values[indices], and move their dimensions behind those that numbers index."""
    place = next((n for n, i in enumerate(indices) if i is Ellipsis), len(indices))
    missing = values.ndim - sum(i is not Ellipsis for i in indices)
    indices = [*indices[:place], *[slice(None)] * missing, *indices[place + 1 :]]
    numbers = [d for d, i in enumerate(indices) if not isinstance(i, slice)]
    slices = tuple(i if isinstance(i, slice) else slice(None) for i in indices)
    order = [*numbers, *(d for d in range(values.ndim) if d not in numbers)]
    if order != sorted(order) or any(i != slice(None) for i in slices):
        values = _rearranged(values, lambda end: end[slices].permute(*order, *range(len(order), end.ndim)))
    return values, [indices[d] for d in numbers]


def _rearranged(values: Any, arrange: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(values, Tensor):
        return arrange(values)
    ends = [arrange(end) for end in expanded_ends(values)]
    return Range(ends[0], ends[-1], values.dtype, values.limit)


def expanded_ends(r: Range) -> list[Tensor]:
    """The ends, one if exact, in the shape that the function sees and the four dimensions of blocks."""
    return [end.expand(*r.shape, *block_shape(end)) for end in ((r.lo,) if r.exact else (r.lo, r.hi))]


def block_shape(end: Tensor) -> tuple[int, ...]:
    shape = end.shape[max(0, end.ndim - BLOCK_DIMS) :]
    return (*(1,) * (BLOCK_DIMS - len(shape)), *shape)


def _elements(values: Range | Tensor, indices: list[Any]) -> Range:
    if (guarded := index_guard.get()) is not None:
        indices = [guarded(values, i, n) for i, n in zip(indices, values.shape, strict=False)]
    if any(getattr(i, "constant_in", None) for i in indices):
        indices = [_first_of_same(i, values, d) for d, i in enumerate(indices)]
    reaches = [IndexReach(i, n) for i, n in zip(indices, values.shape, strict=False)]
    if isinstance(values, Range):
        lo, hi, limit = values.lo, values.hi, values.limit
    else:
        if values.dtype in NARROW:
            lo = hi = values.detach()
            limit = float(torch.iinfo(values.dtype).max) + 1
        else:
            lo, hi, limit = captured_bounds(values)
        evaluation = current_evaluation.get()
        for d, reach in enumerate(reaches):
            if evaluation is not None and evaluation.reads_values and reach.steps is not None:
                evaluation.reached.append((reach.steps, values, d, indices[0] is evaluation.batch, 0))
    is_single = all(i.first is i.last for i in reaches)
    if is_single and lo is hi:
        element = extreme_of(lo, values.ndim, reaches, torch.amin)
        return Range(element, element, values.dtype, limit)
    greatest = extreme_of(hi, values.ndim, reaches, torch.amax)
    reached = Range(extreme_of(lo, values.ndim, reaches, torch.amin), greatest, values.dtype, limit)
    if not isinstance(values, Range) and lo is hi:
        reached.members = members_of(values, reaches[0].steps)
    return reached


def _first_of_same(index: Any, values: Any, d: int) -> Any:
    """An index whose blocks reach equal elements becomes that of the first one."""
    is_constant = isinstance(index, Range) and isinstance(values, Tensor) and bool(index.constant_in)
    is_constant = is_constant and (id(values), version_of(values), d) in index.constant_in
    return Range(index.lo, index.lo, index.known_dtype, index.limit) if is_constant else index


class _Rows(Range):
    """Rows table[indices] with fewer indices than dimensions, looked up when they are needed."""

    def __init__(self, table: Tensor, indices: tuple[Any, ...]) -> None:
        self.table, self.indices = table, indices
        self._dtype, self.ndim = table.dtype, table.ndim - len(indices)
        self.limit_reached, self.steps, self.comparison, self.members = False, None, None, None
        self._range: Range | None = None
        self._table_version = version_of(table)

    def unchanged_table(self) -> Tensor:
        if version_of(self.table) != self._table_version:
            raise GiveUp("a tensor that was changed in place after it was indexed")
        return self.table

    def _looked_up(self) -> Range:
        if self._range is None:
            self._range = _elements(self.unchanged_table(), list(self.indices))
        return self._range

    @property
    def lo(self) -> Tensor:  # type: ignore[override]
        return self._looked_up().lo

    @property
    def hi(self) -> Tensor:  # type: ignore[override]
        return self._looked_up().hi

    @property
    def limit(self) -> float:  # type: ignore[override]
        return self._looked_up().limit

    @property
    def shape(self) -> torch.Size:
        return self.table.shape[len(self.indices) :]


@rule("take")
def take(a: Any, index: Any) -> Any:
    return getitem(a.reshape(-1), index) if isinstance(a, Tensor) else None


def unsqueezed(a: Range, index: list[Any]) -> Range:
    if Ellipsis not in index:
        index = [*index, Ellipsis]
    shape: list[int] = []
    for i in index:
        shape += [1] if i is None else a.shape
    arranged: Range = _rearranged(a, lambda end: end.reshape(*shape, *block_shape(end)))
    return arranged


@rule("unsqueeze")
def unsqueeze(a: Any, dim: int) -> Range:
    place = dim % (a.ndim + 1)
    if a.ndim and 0 < place < a.ndim:
        raise GiveUp("a new dimension between other dimensions")
    return unsqueezed(a, [None, ...] if place == 0 else [..., None])


@rule("unbind")
def unbind(a: Any, dim: int = 0) -> tuple[Any, ...] | None:
    if not isinstance(a, Range) or not -a.ndim <= dim < a.ndim:
        return None
    before = (slice(None),) * (dim % a.ndim)
    return tuple(getitem(a, (*before, n)) for n in range(a.shape[dim]))


@rule("stack")
def stack(tensors: Any, dim: int = 0) -> Range | None:
    ranges = [as_range(t) for t in tensors]
    r = ranges[0]
    if any((x.dtype, x.shape) != (r.dtype, r.shape) for x in ranges) or not -r.ndim - 1 <= dim <= r.ndim:
        return None
    place = dim % (r.ndim + 1)
    ends = [expanded_ends(x) for x in ranges]
    lo = torch.stack(torch.broadcast_tensors(*[e[0] for e in ends]), place)
    exact = all(x.exact for x in ranges)
    hi = lo if exact else torch.stack(torch.broadcast_tensors(*[e[-1] for e in ends]), place)
    return Range(lo, hi, r.dtype, max(x.limit for x in ranges))


@rule("bucketize")
def bucketize(a: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Range | None:
    if not (isinstance(a, Range) and a.ndim == 0 and isinstance(boundaries, Tensor) and boundaries.ndim == 1):
        return None
    if a.dtype != boundaries.dtype or a.dtype == torch.bool or not len(boundaries):
        return None
    lower, upper, _ = captured_bounds(boundaries)
    dtype, count = torch.int32 if out_int32 else torch.int64, float(len(boundaries))
    lo = torch.searchsorted(upper, a.lo.contiguous(), right=right).double()
    hi = lo if a.exact and lower is upper else torch.searchsorted(lower, a.hi.contiguous(), right=right).double()
    is_sorted = everywhere((upper[1:] >= upper[:-1]) & (lower[1:] >= lower[:-1]))
    if is_sorted is False:
        return None
    if is_sorted is True:
        return Range(lo, hi, dtype, count)
    return Range(torch.where(is_sorted, lo, 0.0), torch.where(is_sorted, hi, count), dtype, count)


@rule("searchsorted")
def searchsorted(
    sorted_sequence: Any, a: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None
) -> Range | None:
    return bucketize(a, sorted_sequence, out_int32=out_int32, right=right or side == "right")
