"""Operands of rules in a common dtype, and results that fit a dtype."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from flexmasks.ranges.context import (
    EXACT_LIMIT,
    INF,
    GiveUp,
    bounds_of_values,
    captured_bounds,
    current_evaluation,
    evaluations_of_mixed_dtypes,
    reads_values,
)
from flexmasks.ranges.value import BLOCK_DIMS, Range, check_size

PYTHON_NUMBERS = (bool, int, float)


# --- to ranges ---


def as_range(value: Any) -> Range:
    if isinstance(value, Range):
        return value
    if isinstance(value, PYTHON_NUMBERS):
        return _range_of_number(value)
    if isinstance(value, Tensor):
        lo, hi, limit = captured_bounds(value)
        if value.ndim:
            check_size(value.shape)
            exact = lo is hi
            lo = lo.view(*value.shape, *(1,) * BLOCK_DIMS)
            hi = lo if exact else hi.view(lo.shape)
        return Range(lo, hi, value.dtype, limit)
    raise GiveUp(f"{value!r} is not a number")


def _range_of_number(value: float) -> Range:
    dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    if dtype != torch.bool and abs(value) < EXACT_LIMIT:
        lo = torch.tensor(value, dtype=torch.float64, device="cpu")  # whatever torch's default device is
        return Range(lo, lo, dtype, abs(value))
    try:
        lo, hi, limit = bounds_of_values(torch.tensor(value, dtype=dtype, device="cpu"))
    except (RuntimeError, OverflowError, ValueError) as error:
        raise GiveUp(f"{value} does not fit int64") from error
    return Range(lo, hi, dtype, limit)


def as_number(value: Any) -> Range:
    """An operand as numbers: truth values become 0 and 1."""
    r = as_range(value)
    if r.dtype != torch.bool:
        return r
    lo = r.lo.double()
    return Range(lo, lo if r.exact else r.hi.double(), torch.int64, 1.0)


def as_dtype(value: Any, dtype: torch.dtype) -> Range:
    """An operand in a dtype: a float is rounded, an integer that the dtype might not hold becomes any value."""
    r = as_number(value)
    if r.dtype == dtype:
        return r
    if dtype.is_floating_point and not r.dtype.is_floating_point and r.limit < 1 / torch.finfo(dtype).eps:
        return Range(r.lo, r.hi, dtype, r.limit)
    if isinstance(value, PYTHON_NUMBERS) and r.exact and _holds(dtype, value):
        return Range(r.lo, r.hi, dtype, r.limit)
    return fitted(r.lo, r.hi, dtype, r.limit, r.exact)


def _holds(dtype: torch.dtype, number: float) -> bool:
    if not math.isfinite(number):
        return dtype.is_floating_point and math.isinf(number)
    if not dtype.is_floating_point:
        return number == int(number) and fits(int(number), dtype)
    if number == 0:
        return True
    info = torch.finfo(dtype)
    digits = math.frexp(number)[0] * 2 / info.eps
    return info.tiny <= abs(number) <= info.max and digits == int(digits)


def as_common_dtype(a: Any, b: Any) -> tuple[Range, Range, torch.dtype] | None:
    """Two operands in their common dtype, and the dtype; None if both are truth values."""
    dtype = common_dtype(a, b)
    return None if dtype == torch.bool else (as_dtype(a, dtype), as_dtype(b, dtype), dtype)


# --- dtypes ---


def common_dtype(*operands: Any) -> torch.dtype:
    """The dtype in which an operation on these operands computes.

    Floats come before integers and integers before truth values. Within a category, tensors and ranges come before
        Python numbers, and the narrowest of their dtypes is taken. That is the cautious choice: torch's promotion
        depends on which of the operands vmap sees as batched, and some operations compute in the narrower dtype.
    """
    dtypes = {x.dtype for x in operands if isinstance(x, Range | Tensor)}
    if any(d.is_complex for d in dtypes):
        raise GiveUp("complex numbers")
    floats, integers = {d for d in dtypes if d.is_floating_point}, {d for d in dtypes if is_integer(d)}
    if floats:
        return _narrowest(floats)
    if any(isinstance(x, float) for x in operands):
        return torch.get_default_dtype()
    if integers:
        return _narrowest(integers)
    return torch.int64 if any(type(x) is int for x in operands) else torch.bool


def _narrowest(dtypes: set[torch.dtype]) -> torch.dtype:
    """The narrower of two dtypes; the evaluation records that they were mixed."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    evaluation = current_evaluation.get()
    if evaluation is not None:
        evaluation.mixed_dtypes = True
        evaluations_of_mixed_dtypes.add(evaluation)
    try:
        widest = functools.reduce(torch.promote_types, dtypes)
    except RuntimeError as error:  # torch does not mix most unsigned types
        raise GiveUp(str(error)) from error
    if len(dtypes) > 2 or widest not in dtypes:
        raise GiveUp(f"an operation that mixes {dtypes}")
    return next(d for d in dtypes if d != widest)


def is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype != torch.bool


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the result of a function such as sqrt."""
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def fits(x: Any, dtype: torch.dtype) -> bool:
    """Whether `dtype` holds the integer x, a Python integer or a range or tensor of that dtype."""
    if not is_integer(dtype):
        return False
    info = torch.iinfo(dtype)
    return info.min <= x <= info.max if type(x) is int else getattr(x, "dtype", None) == dtype


# --- results ---


def fitted(lo: Tensor, hi: Tensor, dtype: torch.dtype, limit: float, exact: bool = False) -> Range:
    """A result in a dtype: a float is widened by its rounding error, an integer that the dtype might not hold is any
    value.
    """
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        lo = (lo - lo.abs() * (2 * info.eps) - info.tiny).nan_to_num(-INF, INF, -INF)
        hi = (hi + hi.abs() * (2 * info.eps) + info.tiny).nan_to_num(INF, INF, -INF)
        lo = torch.where(lo < -info.max, -INF, lo.clamp(max=info.max))
        hi = torch.where(hi > info.max, INF, hi.clamp(min=-info.max))
        return Range(lo, hi, dtype)
    largest = min(float(torch.iinfo(dtype).max), EXACT_LIMIT)
    least = max(float(torch.iinfo(dtype).min), -EXACT_LIMIT)
    if limit < min(largest, -least):
        return Range(lo, lo if exact else hi, dtype, limit)
    outside = ~((lo >= least) & (hi <= largest))  # true for NaN, too
    return Range(torch.where(outside, -INF, lo), torch.where(outside, INF, hi), dtype)


def any_value_where(blocks: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(blocks, -INF, lo), torch.where(blocks, INF, hi)


def may_be_nan(*operands: Range) -> Tensor:
    """The blocks where an operand may be NaN: a float may be only where its range is all of -inf..inf."""
    blocks = [(x.lo == -INF) & (x.hi == INF) for x in operands]
    return blocks[0] if len(blocks) == 1 else blocks[0] | blocks[1]


def is_inexact(x: Range, y: Range) -> Tensor:
    """The blocks where an end of x or y is infinite or may be rounded."""
    x_inexact, y_inexact = (~((r.lo > -EXACT_LIMIT) & (r.hi < EXACT_LIMIT)) for r in (x, y))
    return x_inexact | y_inexact


def everywhere(blocks: Tensor) -> bool | Tensor:
    """Whether all blocks are true: a bool, or a tensor where the host may not read values."""
    return bool(blocks.all()) if reads_values() else blocks.all()
