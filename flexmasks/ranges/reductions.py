"""Rules of reductions over dimensions that the function sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.ranges.context import EXACT_LIMIT, INF
from flexmasks.ranges.lookup import block_shape, expanded_ends, unsqueezed
from flexmasks.ranges.operands import any_value_where, as_number, as_range, fitted, may_be_nan
from flexmasks.ranges.selection import maximum, minimum
from flexmasks.ranges.truth import as_truth, equal, logical_not
from flexmasks.ranges.value import Range, broadcast_shape, rule


def _reduction(operation: Callable[..., Tensor]) -> Callable[..., Range | None]:
    """The rule of a reduction that is monotone in each element, so each end is reduced by itself."""

    def reduce(a: Any, dim: Any = None, keepdim: bool = False) -> Range | None:
        x = as_range(a)
        dims = range(x.ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
        if dim is not None and not (len(dims) and all(type(d) is int and -x.ndim <= d < x.ndim for d in dims)):
            return None
        if x.ndim == 0:
            return x
        dims = tuple(d % x.ndim for d in dims)
        ends = [operation(end, dim=dims, keepdim=keepdim) for end in expanded_ends(x)]
        if not x.dtype.is_floating_point:
            return Range(ends[0], ends[-1], x.dtype, x.limit)
        blocks = block_shape(torch.empty(broadcast_shape(x.lo, x.hi), device="meta"))
        nan = may_be_nan(x).expand(*x.shape, *blocks).any(dim=dims, keepdim=keepdim)
        return Range(*any_value_where(nan, ends[0], ends[-1]), x.dtype, x.limit)

    return reduce


amin = rule("amin")(_reduction(torch.amin))
amax = rule("amax")(_reduction(torch.amax))
_sum_of_ends = _reduction(torch.sum)


def _reduction_of_truth(operation: Callable[..., Tensor]) -> Callable[..., Range | None]:
    of_ends = _reduction(operation)

    def reduce(a: Any, dim: Any = None, keepdim: bool = False) -> Range | None:
        # Of uint8, torch's results of any and all are uint8, not bool.
        return None if getattr(a, "dtype", None) == torch.uint8 else of_ends(as_truth(a), dim, keepdim)

    return reduce


any_of = rule("any")(_reduction_of_truth(torch.any))
rule("all")(_reduction_of_truth(torch.all))


def _of_one_or_two(
    of_two: Callable[..., Any], of_elements: Callable[..., Range | None], return_type: Callable[[Any], Any]
) -> Callable[..., Any]:
    """The rule of torch.min or torch.max of two operands, of the elements of one, or along a dimension, an int."""

    def extreme(a: Any, b: Any = None, keepdim: bool = False, *, dim: int | None = None) -> Any:
        dim = b if type(b) is int else dim
        if dim is not None:
            return _extreme_along(a, dim, keepdim, of_elements, return_type)
        return of_two(a, b) if b is not None else of_elements(a)

    return extreme


rule("min")(_of_one_or_two(minimum, amin, torch.return_types.min))
rule("max")(_of_one_or_two(maximum, amax, torch.return_types.max))


def _extreme_along(
    a: Any, dim: int, keepdim: bool, extreme: Callable[..., Range | None], return_type: Callable[[Any], Any]
) -> Any:
    values = extreme(a, dim, keepdim)
    if values is None:
        return None
    last = torch.full_like(values.lo, max(0.0, a.shape[dim] - 1.0) if a.ndim else 0.0, dtype=torch.float64)
    limit = float(max(1, math.prod(a.shape)))
    return return_type((values, Range(torch.zeros_like(last), last, torch.int64, limit)))


@rule("sum")
def sum_of(a: Any, dim: Any = None, keepdim: bool = False) -> Range | None:
    x = as_number(a)
    count = math.prod(x.shape)
    if not x.dtype.is_floating_point:
        total = _sum_of_ends(x, dim, keepdim) if x.limit * count < EXACT_LIMIT else None
        return None if total is None else Range(total.lo, total.hi, torch.int64, x.limit * count)
    largest = torch.maximum(-x.lo, x.hi)  # of each absolute value; the rounding error grows with the sum of these
    lo, hi, error = (_sum_of_ends(Range(end, end, torch.int64), dim, keepdim) for end in (x.lo, x.hi, largest))
    if lo is None or hi is None or error is None:
        return None
    slack = error.lo * (2 * (count + 1) * torch.finfo(x.dtype).eps)
    return fitted(lo.lo - slack, hi.lo + slack, x.dtype, INF)


@rule("count_nonzero")
def count_nonzero(a: Any, dim: Any = None) -> Range | None:
    return sum_of(as_truth(a), dim)


@rule("isin")
def isin(a: Any, values: Any, *, assume_unique: bool = False, invert: bool = False) -> Range | None:
    if not isinstance(a, Range) or a.ndim:
        return None
    if isinstance(values, Range | Tensor) and values.ndim:
        a = unsqueezed(a, [None] * values.ndim)
    is_any = any_of(equal(a, values))
    return logical_not(is_any) if invert else is_any
