"""Rules of comparisons and of logic: pairs of "certainly" and "possibly" true."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.ranges.members import without_strangers
from flexmasks.ranges.operands import as_dtype, as_number, as_range, common_dtype, is_integer, may_be_nan
from flexmasks.ranges.value import Range, reflected, rule, truth_range


def _comparison(
    exact: Callable[[Tensor, Tensor], Tensor],
    certain: Callable[[Range, Range], Tensor],
    possible: Callable[[Range, Range], Tensor],
    operator: str | None = None,
) -> Callable[[Any, Any], Range]:
    """The rule of a comparison; the result keeps an `operator` and its operands for the rule of `where`."""

    def compare(a: Any, b: Any) -> Range:
        dtype = common_dtype(a, b)
        x, y = (as_number(v) if dtype == torch.bool else as_dtype(v, dtype) for v in (a, b))
        if x.exact and y.exact:
            truth = exact(x.lo, y.lo)
            return truth_range(truth, truth)
        low, high = certain(_without_nan(x), _without_nan(y)), possible(x, y)
        if operator == "==" and isinstance(a, Range) and isinstance(b, Range):
            high = without_strangers(low, high, a.members, b.members)
        result = truth_range(low, high)
        if operator in ("<", "<=") and is_integer(dtype):
            result.comparison = operator, a, b
        return result

    return compare


def _without_nan(r: Range) -> Range:
    # It compares as false where it may be NaN.
    if not r.dtype.is_floating_point:
        return r
    nan = may_be_nan(r)
    return Range(torch.where(nan, math.nan, r.lo), torch.where(nan, math.nan, r.hi), r.dtype)


less = rule("lt", "less")(_comparison(torch.lt, lambda x, y: x.hi < y.lo, lambda x, y: x.lo < y.hi, "<"))
less_equal = rule("le", "less_equal")(_comparison(torch.le, lambda x, y: x.hi <= y.lo, lambda x, y: x.lo <= y.hi, "<="))
equal = rule("eq")(
    _comparison(
        torch.eq,
        lambda x, y: (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo),
        lambda x, y: (x.lo <= y.hi) & (y.lo <= x.hi),
        "==",
    )
)
rule("gt", "greater")(reflected(less))
rule("ge", "greater_equal")(reflected(less_equal))


@rule("ne", "not_equal")
def not_equal(a: Any, b: Any) -> Range:
    return logical_not(equal(a, b))


def as_truth(value: Any) -> Range:
    r = as_range(value)
    return r if r.dtype == torch.bool else not_equal(r, 0)


@rule("logical_not")
def logical_not(a: Any) -> Range:
    x = as_truth(a)
    certain = ~x.hi
    return truth_range(certain, certain if x.exact else ~x.lo)


def _logic(
    certain: Callable[[Range, Range], Tensor], possible: Callable[[Range, Range], Tensor]
) -> Callable[[Any, Any], Range]:
    def combine(a: Any, b: Any) -> Range:
        x, y = as_truth(a), as_truth(b)
        lo = certain(x, y)
        return truth_range(lo, lo if x.exact and y.exact else possible(x, y))

    return combine


both_true = _logic(lambda x, y: x.lo & y.lo, lambda x, y: x.hi & y.hi)
either_true = _logic(lambda x, y: x.lo | y.lo, lambda x, y: x.hi | y.hi)
one_true = _logic(
    lambda x, y: (x.lo & ~y.hi) | (~x.hi & y.lo),
    lambda x, y: (x.hi & ~y.lo) | (~x.lo & y.hi),
)


def _unless_dtypes_mix_with_floats(function: Callable[[Any, Any], Range]) -> Callable[[Any, Any], Range | None]:
    """The rule of torch.logical_and, logical_or or logical_xor, which first convert both operands to one dtype: that
    may turn a small float into 0.
    """

    def logical(a: Any, b: Any) -> Range | None:
        dtypes = {getattr(x, "dtype", torch.float64) for x in (a, b)}
        return None if len(dtypes) > 1 and any(d.is_floating_point for d in dtypes) else function(a, b)

    return logical


rule("logical_and")(_unless_dtypes_mix_with_floats(both_true))
rule("logical_or")(_unless_dtypes_mix_with_floats(either_true))
rule("logical_xor")(_unless_dtypes_mix_with_floats(one_true))
