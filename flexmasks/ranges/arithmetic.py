"""Rules of arithmetic: sums, products, quotients, remainders, roots, exponentials, rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.ranges.context import EXACT_LIMIT, INF, current_evaluation
from flexmasks.ranges.operands import (
    any_value_where,
    as_common_dtype,
    as_dtype,
    as_range,
    common_dtype,
    everywhere,
    fits,
    fitted,
    float_dtype,
    is_inexact,
    is_integer,
    may_be_nan,
)
from flexmasks.ranges.truth import both_true, either_true
from flexmasks.ranges.value import Range, Steps, reflected, rule

# --- sums and products ---


@rule("add", "radd")
def add(a: Any, b: Any, *, alpha: Any = 1) -> Range | None:
    operands = as_common_dtype(a, b)
    if alpha != 1:
        return None
    if operands is None:
        return either_true(a, b)
    x, y, dtype = operands
    exact = x.exact and y.exact
    lo = x.lo + y.lo
    result = fitted(lo, lo if exact else x.hi + y.hi, dtype, x.limit + y.limit, exact)
    if isinstance(b, int):
        result.limit_reached = x.limit_reached and b >= 0
        result.steps = None if x.steps is None else x.steps.moved(b)
    return result


@rule("sub", "subtract")
def subtract(a: Any, b: Any, *, alpha: Any = 1) -> Range | None:
    operands = as_common_dtype(a, b)
    if operands is None or alpha != 1:
        return None
    x, y, dtype = operands
    exact = x.exact and y.exact
    lo = x.lo - y.hi
    result = fitted(lo, lo if exact else x.hi - y.lo, dtype, x.limit + y.limit, exact)
    if isinstance(b, int) and x.steps is not None:
        result.steps = x.steps.moved(-b)
    return result


rule("rsub")(reflected(subtract))


@rule("mul", "multiply", "rmul")
def multiply(a: Any, b: Any) -> Range | None:
    operands = as_common_dtype(a, b)
    if operands is None:
        return both_true(a, b)
    x, y, dtype = operands
    limit = x.limit * y.limit if min(x.limit, y.limit) > 0 else 0.0
    if x.exact and y.exact:
        lo = x.lo * y.lo
        return fitted(lo, lo, dtype, limit, True)
    lo, hi = _extremes_of_ends(x, y, torch.mul)
    if dtype.is_floating_point:
        lo, hi = any_value_where(is_inexact(x, y), lo, hi)  # 0 * inf is NaN
    return fitted(lo, hi, dtype, limit)


def _extremes_of_ends(x: Range, y: Range, operation: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """The ends of an operation that is monotone in each operand. NaN, which 0 * inf gives, counts as 0."""
    results = [operation(a, b).nan_to_num(0.0, INF, -INF) for a in {x.lo, x.hi} for b in {y.lo, y.hi}]
    lo = hi = results[0]
    for result in results[1:]:
        lo, hi = torch.minimum(lo, result), torch.maximum(hi, result)
    return lo, hi


@rule("neg", "negative")
def negative(a: Any) -> Range | None:
    x = as_range(a)
    if x.dtype == torch.bool:
        return None
    lo = -x.hi
    return fitted(lo, lo if x.exact else -x.lo, x.dtype, x.limit, x.exact)


@rule("positive", "clone", "detach", "contiguous")
def unchanged(a: Any) -> Any:
    """A copy is its operand, since no operation changes a range in place."""
    return a


@rule("abs", "absolute")
def absolute(a: Any) -> Range | None:
    x = as_range(a)
    if x.dtype == torch.bool:
        return None
    if x.exact and not x.dtype.is_floating_point:
        lo = x.lo.abs()
        return fitted(lo, lo, x.dtype, x.limit, True)
    lo, hi = torch.maximum(x.lo, -x.hi).clamp(min=0.0), torch.maximum(x.hi, -x.lo)
    if x.dtype.is_floating_point:
        lo, hi = any_value_where(may_be_nan(x), lo, hi)
    return fitted(lo, hi, x.dtype, x.limit)


@rule("sign", "sgn")
def sign(a: Any) -> Range | None:
    x = as_range(a)
    if x.dtype == torch.bool:
        return None
    lo = x.lo.sign()
    hi = lo if x.exact else x.hi.sign()
    if x.dtype.is_floating_point:
        lo, hi = any_value_where(may_be_nan(x), lo, hi)
        return Range(lo, hi, x.dtype)
    return Range(lo, hi, x.dtype, 1.0)


# --- quotients and remainders ---


def _quotient_ends(x: Range, y: Range, rounding: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor]:
    lo, hi = _extremes_of_ends(x, y, lambda a, b: a / b if rounding is None else rounding(a / b))
    return any_value_where(_may_be_zero(y) | is_inexact(x, y), lo, hi)


def _may_be_zero(y: Range) -> Tensor:
    """Whether y may be 0 in each block; very small floats count as 0, because some machines round them to it."""
    tiny = torch.finfo(y.dtype).tiny if y.dtype.is_floating_point else 0.0
    return (y.lo <= tiny) & (y.hi >= -tiny)


def _is_plain_divisor(b: Any, dtype: torch.dtype) -> bool:
    """Whether integers of `dtype` can be divided by the Python integer b without a conversion."""
    return type(b) is int and b != 0 and fits(b, dtype)


def _rounded_quotient(a: Any, b: Any, rounding: Callable[[Tensor], Tensor]) -> Range | None:
    operands = as_common_dtype(a, b)
    if operands is None:
        return None
    x, y, dtype = operands
    if dtype.is_floating_point:  # a float's quotient may round to the next integer on either side
        lo, hi = _quotient_ends(x, y, rounding)
        return fitted(lo - 1, hi + 1, dtype, INF)
    plain = _is_plain_divisor(b, dtype)
    if x.exact and plain and x.limit < EXACT_LIMIT:
        lo = rounding(x.lo / b)
        return fitted(lo, lo, dtype, x.limit + 1, True)
    return fitted(*_quotient_ends(x, y, rounding), dtype, x.limit + 1 if plain else INF)


@rule("floordiv", "floor_divide")
def floor_divide(a: Any, b: Any) -> Range | None:
    quotient = _rounded_quotient(a, b, torch.floor)
    steps = a.steps if quotient is not None and isinstance(a, Range) and type(b) is int and b > 0 else None
    if quotient is None or steps is None:
        return quotient
    if b % steps.size == 0 and steps.first % steps.size == 0:  # all numbers of a step have one quotient
        return Range(quotient.lo, quotient.lo, quotient.known_dtype, quotient.limit)
    quotient.steps = steps.divided(b)
    _note_multiples(steps, b)
    return quotient


def _note_multiples(steps: Steps, b: int) -> None:
    evaluation = current_evaluation.get()
    if evaluation is not None and evaluation.reads_values:
        evaluation.reached.append((steps, None, 0, False, b))


rule("rfloordiv")(reflected(floor_divide))


@rule("truediv", "div", "divide", "true_divide")
def true_divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Range | None:
    if rounding_mode is not None:
        return _rounded_quotient(a, b, {"floor": torch.floor, "trunc": torch.trunc}[rounding_mode])
    operands = as_common_dtype(a, b)
    if operands is None:
        return None
    x, y, dtype = operands
    dtype = float_dtype(dtype)
    return fitted(*_quotient_ends(as_dtype(x, dtype), as_dtype(y, dtype), None), dtype, INF)


rule("rdiv")(reflected(true_divide))


def _remainder(rounding: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Range | None]:
    """The rule of x - y * rounding(x / y): it has the sign of y with torch.floor, and of x with torch.trunc."""

    def remainder_of(a: Any, b: Any) -> Range | None:
        operands = as_common_dtype(a, b)
        if operands is None:
            return None
        x, y, dtype = operands
        plain = _is_plain_divisor(b, dtype)
        limit = abs(b) if plain else INF
        if x.exact and plain and x.limit < EXACT_LIMIT and not dtype.is_floating_point:
            lo = rounding(x.lo / b).mul_(-b).add_(x.lo)  # in place: there may be many elements
            return fitted(lo, lo, dtype, limit, True)
        if isinstance(a, Range) and a.steps is not None and plain and b > 0:
            _note_multiples(a.steps, b)
        gap = 0.0 if dtype.is_floating_point else 1.0  # to y; a float's remainder may round up to y
        if rounding is torch.floor:
            lo, hi = (y.lo + gap).clamp(max=0.0), (y.hi - gap).clamp(min=0.0)
        else:
            largest = torch.maximum(-y.lo, y.hi) - gap
            lo, hi = torch.maximum(-largest, x.lo.clamp(max=0.0)), torch.minimum(largest, x.hi.clamp(min=0.0))
        if dtype.is_floating_point:
            return fitted(*any_value_where(_may_be_zero(y) | is_inexact(x, y), lo, hi), dtype, INF)
        first, last = rounding(x.lo / y.lo), rounding(x.hi / y.lo)
        same_quotient = (y.lo == y.hi) & (y.lo != 0) & (first == last) & ~is_inexact(x, y)
        lo = torch.where(same_quotient, x.lo - y.lo * first, lo)
        hi = torch.where(same_quotient, x.hi - y.lo * first, hi)
        return fitted(*any_value_where(_may_be_zero(y), lo, hi), dtype, limit)

    return remainder_of


remainder = rule("mod", "remainder")(_remainder(torch.floor))
rule("rmod")(reflected(remainder))
rule("fmod")(_remainder(torch.trunc))


# --- powers, roots, exponentials ---


@rule("pow")
def power(a: Any, exponent: Any) -> Range | None:
    """Powers with exponent 0.5, 1 or 2, or with base 2."""
    if type(a) is int and a == 2 and isinstance(exponent, Range):
        factor = power_of_two(1, exponent)
        return None if factor is None else multiply(1, factor)
    if type(exponent) is float and exponent in (0.5, 2.0) and isinstance(a, Range):
        if exponent == 0.5:
            return _sqrt(a)
        a, exponent = as_dtype(a, float_dtype(a.dtype)), 2
    if type(exponent) is not int or exponent not in (1, 2) or not isinstance(a, Range) or a.dtype == torch.bool:
        return None
    if exponent == 1:
        return a
    magnitude = absolute(a)
    return None if magnitude is None else multiply(magnitude, magnitude)


rule("rpow")(reflected(power))


rule("square")(lambda a: power(a, 2))


def power_of_two(a: Any, exponent: Any, largest: int = 30) -> Any:
    """The factor 2**exponent by which `a` is shifted, an int or a Range. None if an operand is not an integer, or if
    the exponent may lie outside 0..largest or exceed the bits of the dtype, where torch may not define the shift.
    """
    if not all(type(x) is int or (isinstance(x, Range) and is_integer(x.dtype)) for x in (a, exponent)):
        return None
    if type(exponent) is int:
        return 2**exponent if 0 <= exponent <= largest else None
    dtype = common_dtype(a, exponent)
    is_defined = everywhere((exponent.lo >= 0) & (exponent.hi <= min(largest, torch.iinfo(dtype).bits + largest - 32)))
    if is_defined is False:
        return None
    lo = torch.exp2(exponent.lo)
    hi = lo if exponent.exact else torch.exp2(exponent.hi)
    if is_defined is True:
        return Range(lo, hi, dtype, 2.0**largest)
    return Range(torch.where(is_defined, lo, -INF), torch.where(is_defined, hi, INF), dtype)


def _increasing(operation: Callable[[Tensor], Tensor], least: float = -INF) -> Callable[[Any], Range]:
    """The rule of an increasing function of floats, which is NaN for arguments below `least`."""

    def increasing(a: Any) -> Range:
        x = as_range(a)
        dtype = float_dtype(x.dtype)
        x = as_dtype(x, dtype)
        lo, hi = any_value_where(may_be_nan(x) | (x.lo < least), operation(x.lo), operation(x.hi))
        slack = 4 * torch.finfo(dtype).eps  # results on other machines may differ in the last bits
        return fitted(lo - slack * (1 + lo.abs()), hi + slack * (1 + hi.abs()), dtype, INF)

    return increasing


_sqrt = rule("sqrt")(_increasing(torch.sqrt, least=0.0))
rule("exp")(_increasing(torch.exp))
rule("exp2")(_increasing(torch.exp2))
rule("log")(_increasing(torch.log, least=0.0))
rule("log2")(_increasing(torch.log2, least=0.0))
rule("log10")(_increasing(torch.log10, least=0.0))
rule("log1p")(_increasing(torch.log1p, least=-1.0))
rule("tanh")(_increasing(torch.tanh))
rule("sigmoid")(_increasing(torch.sigmoid))


# --- rounding ---


def _rounded(operation: Callable[[Tensor], Tensor]) -> Callable[[Any], Range]:
    def rounded(a: Any) -> Range:
        x = as_range(a)
        if not x.dtype.is_floating_point:
            return x
        lo = operation(x.lo)
        return Range(lo, lo if x.exact else operation(x.hi), x.dtype, x.limit)

    return rounded


rule("floor")(_rounded(torch.floor))
rule("ceil")(_rounded(torch.ceil))
rule("trunc", "fix")(_rounded(torch.trunc))
rule("round")(_rounded(torch.round))
