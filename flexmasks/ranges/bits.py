"""Rules of bits: shifts, and, or, exclusive or, not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.ranges.arithmetic import floor_divide, multiply, power_of_two, remainder, subtract
from flexmasks.ranges.context import EXACT_LIMIT
from flexmasks.ranges.operands import any_value_where, as_common_dtype, as_range, common_dtype, fitted, is_inexact
from flexmasks.ranges.truth import both_true, either_true, logical_not, one_true
from flexmasks.ranges.value import Range, reflected, rule


@rule("lshift", "bitwise_left_shift")
def shift_left(a: Any, b: Any) -> Range | None:
    factor = power_of_two(a, b)
    return None if factor is None else multiply(a, factor)


@rule("rshift", "bitwise_right_shift")
def shift_right(a: Any, b: Any) -> Range | None:
    divisor = power_of_two(a, b, largest=31)
    return None if divisor is None else floor_divide(a, divisor)


rule("rlshift")(reflected(shift_left))
rule("rrshift")(reflected(shift_right))


@rule("invert", "bitwise_not")
def invert(a: Any) -> Range | None:
    x = as_range(a)
    if x.dtype.is_floating_point:
        return None
    return logical_not(x) if x.dtype == torch.bool else subtract(-1, x)


@rule("and", "rand", "bitwise_and")
def bitwise_and(a: Any, b: Any) -> Range | None:
    if _are_truth_values(a, b):
        return both_true(a, b)
    if type(b) is int and abs(b) < 2**62:
        selects_last_bits, clears_last_bits = b & (b + 1) == 0, -b & (-b - 1) == 0
        if selects_last_bits or clears_last_bits:
            if common_dtype(a, b).is_floating_point:
                return None
            return remainder(a, b + 1) if b >= 0 else multiply(floor_divide(a, -b), -b)
    return _bitwise(a, b, torch.bitwise_and, _ends_of_and)


@rule("or", "ror", "bitwise_or")
def bitwise_or(a: Any, b: Any) -> Range | None:
    return either_true(a, b) if _are_truth_values(a, b) else _bitwise(a, b, torch.bitwise_or, _ends_of_or)


@rule("xor", "rxor", "bitwise_xor")
def bitwise_xor(a: Any, b: Any) -> Range | None:
    return one_true(a, b) if _are_truth_values(a, b) else _bitwise(a, b, torch.bitwise_xor, _ends_of_xor)


def _are_truth_values(a: Any, b: Any) -> bool:
    return all(type(x) is bool or getattr(x, "dtype", None) == torch.bool for x in (a, b))


def _bitwise(
    a: Any, b: Any, operation: Callable[..., Tensor], ends_of: Callable[[Range, Range, Tensor], tuple[Tensor, Tensor]]
) -> Range | None:
    """A bitwise operation on integers: by `operation` where both are exact, else bounded by `ends_of`, which also gets
    2**n - 1 for the largest number n of bits that an operand may have.
    """
    operands = as_common_dtype(a, b)
    if operands is None or operands[2].is_floating_point:
        return None
    x, y, dtype = operands
    limit = 2.0 * max(x.limit, y.limit, 1.0)
    if x.exact and y.exact and limit < EXACT_LIMIT:
        lo = operation(x.lo.long(), y.lo.long()).double()
        return fitted(lo, lo, dtype, limit, True)
    largest = torch.maximum(torch.maximum(x.hi, -1 - x.lo), torch.maximum(y.hi, -1 - y.lo)).clamp(min=0.0)
    # Not by frexp, whose exponent torch's compiler for CPUs gets wrong. Rounding gives large numbers one bit too many.
    bits = torch.floor(torch.log2(largest.clamp(min=0.5)) + 1e-9) + 1
    all_bits = torch.exp2(bits).round() - 1
    return fitted(*any_value_where(is_inexact(x, y), *ends_of(x, y, all_bits)), dtype, limit)


def _have_same_sign(x: Range, y: Range) -> Tensor:
    return ((x.lo >= 0) & (y.lo >= 0)) | ((x.hi < 0) & (y.hi < 0))


def _ends_of_and(x: Range, y: Range, all_bits: Tensor) -> tuple[Tensor, Tensor]:
    """A bound above is an operand that is not negative, or of two negative ones each."""
    one_not_negative = (x.lo >= 0) | (y.lo >= 0)
    smaller, larger = torch.minimum(x.hi, y.hi), torch.maximum(x.hi, y.hi)
    mixed = torch.where(x.lo >= 0, x.hi, torch.where(y.lo >= 0, y.hi, larger))
    return torch.where(one_not_negative, 0.0, -1 - all_bits), torch.where(_have_same_sign(x, y), smaller, mixed)


def _ends_of_or(x: Range, y: Range, all_bits: Tensor) -> tuple[Tensor, Tensor]:
    # x | y is ~(~x & ~y).
    not_x, not_y = (Range(-1 - r.hi, -1 - r.lo, r.dtype) for r in (x, y))
    lo, hi = _ends_of_and(not_x, not_y, all_bits)
    return -1 - hi, -1 - lo


def _ends_of_xor(x: Range, y: Range, all_bits: Tensor) -> tuple[Tensor, Tensor]:
    signs_differ = ((x.lo >= 0) & (y.hi < 0)) | ((x.hi < 0) & (y.lo >= 0))
    return torch.where(_have_same_sign(x, y), 0.0, -1 - all_bits), torch.where(signs_differ, -1.0, all_bits)
