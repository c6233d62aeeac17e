"""Rules that choose one of their operands: minimum, maximum, clamp, where, masked_fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.ranges.operands import (
    PYTHON_NUMBERS,
    any_value_where,
    as_common_dtype,
    as_dtype,
    as_range,
    common_dtype,
    fits,
    is_integer,
    may_be_nan,
)
from flexmasks.ranges.value import Range, rule

_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _extreme(operation: Callable[..., Tensor]) -> Callable[[Any, Any], Range | None]:
    def extreme(a: Any, b: Any) -> Range | None:
        operands = as_common_dtype(a, b)
        if operands is None:
            return None
        x, y, dtype = operands
        exact = x.exact and y.exact
        lo = operation(x.lo, y.lo)
        hi = lo if exact else operation(x.hi, y.hi)
        if dtype.is_floating_point and not exact:
            lo, hi = any_value_where(may_be_nan(x, y), lo, hi)
        return Range(lo, hi, dtype, max(x.limit, y.limit))

    return extreme


minimum = rule("minimum")(_extreme(torch.minimum))
maximum = rule("maximum")(_extreme(torch.maximum))


@rule("clamp", "clip")
def clamp(a: Any, min: Any = None, max: Any = None) -> Range | None:  # torch's names
    dtype = getattr(a, "dtype", None)
    if any(type(x) is float for x in (min, max)) and isinstance(a, Range) and is_integer(a.dtype):
        dtype = torch.get_default_dtype()
        a = as_dtype(a, dtype)
    for x in (min, max):
        keeps_dtype = x is None or type(x) is int or (isinstance(x, Range | Tensor) and x.dtype == dtype)
        if not keeps_dtype and not (type(x) is float and dtype is not None and dtype.is_floating_point):
            return None
    raised = a if min is None else maximum(a, min)
    return raised if max is None or raised is None else minimum(raised, max)


rule("clamp_min")(lambda a, min: clamp(a, min=min))
rule("clamp_max")(lambda a, max: clamp(a, max=max))


@rule("where")
def where(condition: Any, a: Any = None, b: Any = None) -> Range | None:
    if a is None or b is None:
        return None
    c = as_range(condition)
    if c.dtype != torch.bool:
        return None
    dtype = common_dtype(a, b)
    x, y = (as_range(v) if dtype == torch.bool else as_dtype(v, dtype) for v in (a, b))
    if c.exact and x.exact and y.exact:
        lo = torch.where(c.lo, x.lo, y.lo)
        return Range(lo, lo, dtype, max(x.limit, y.limit))
    x, y = _narrowed_by(c, a, x, holds=True), _narrowed_by(c, b, y, holds=False)
    lo = torch.where(c.lo, x.lo, torch.where(c.hi, torch.minimum(x.lo, y.lo), y.lo))
    hi = torch.where(c.lo, x.hi, torch.where(c.hi, torch.maximum(x.hi, y.hi), y.hi))
    return Range(lo, hi, dtype, max(x.limit, y.limit))


def _narrowed_by(condition: Range, operand: Any, value: Range, holds: bool) -> Range:
    """Narrow an operand with the range `value` to its values where a comparison of it holds, or with `holds` off does
    not. So the rule of `where` finds that torch.where(x < 3, x, 3) is at most 3.
    """
    if condition.comparison is None or not isinstance(operand, Range):
        return value
    operator, a, b = condition.comparison
    if not holds:
        operator = _NEGATED[operator]
    if operand is b:
        a, b, operator = b, a, _SWAPPED[operator]
    if operand is not a or operand.dtype != value.dtype or not fits(b, operand.dtype):
        return value
    other = as_range(b)
    gap = 1.0 if operator in ("<", ">") else 0.0  # between an integer and the next
    if operator in ("<", "<="):
        return Range(value.lo, torch.minimum(value.hi, other.hi - gap), value.dtype, value.limit)
    return Range(torch.maximum(value.lo, other.lo + gap), value.hi, value.dtype, value.limit)


@rule("masked_fill")
def masked_fill(a: Any, mask: Any, value: Any) -> Range | None:
    dtype = getattr(a, "dtype", torch.bool)
    is_lossy = type(value) is float and not dtype.is_floating_point
    if type(value) not in PYTHON_NUMBERS or not isinstance(a, Range) or is_lossy:
        return None
    return where(mask, bool(value) if dtype == torch.bool else as_dtype(value, dtype), a)
