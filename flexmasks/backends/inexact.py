"""Detect functions that Inductor may compute otherwise than Python does.

Inductor makes torch's kernels for CPUs and those in Triton. Known differences (torch 2.11 to 2.15):

- Kernels count positions in 32 bits, Python in 64, and compilers of C++ assume that sums do not overflow.
- Numbers of less than 32 bits are computed in 32 bits, and half precision in single precision.
- Floating sums and products may be fused or approximated; x * 0 is 0 though x is infinite.
- A row of a captured tensor, and a reduction over one, ends the process or gives wrong results.
- Operands without dimensions are promoted to other dtypes than in torch.vmap, which create_mask uses.
- Kernels in Triton read memory before the tensor at a negative index.

A truth value that depends on the last bit of a floating number differs, so masks compute with whole numbers only, and
compare floating numbers as they are read. A score may differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmasks.backends.operations import (
    COMPARISONS,
    KEEP_VALUES,
    MAKE_CONSTANTS,
    UNBOUNDED,
    Bounds,
    Trace,
    follow,
)

OVERFLOW = "a whole number may not fit the type that kernels compute it in"
_FLOATING = "kernels round floating numbers otherwise, which could change what is visible"
_MIXED = "kernels convert numbers of different types otherwise"
_TRUTH = "kernels compute with truth values otherwise"
WHOLE = "it takes rows of captured tensors, or changes them as a whole"
NEGATIVE = "kernels read wrong memory at a negative index, and an index may be negative"
_INDEX = "it takes indices that are no 32-bit or 64-bit numbers"
_ZERO = "it may divide by 0"
_SHIFT = "it may shift by less than 0 or more than 31 bits"
_CONSTANT = "it is constant"
_TYPE = "kernels are not known to read tensors of type {}"

_WHOLE_NUMBERS = {
    "abs", "add", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "clamp", "clamp_max", "clamp_min", "div", "floor_divide", "index", "logical_and", "logical_not",
    "logical_or", "maximum", "minimum", "mul", "neg", "pow", "remainder", "rsub", "sub", "where", *MAKE_CONSTANTS,
    *KEEP_VALUES, *COMPARISONS,
}  # fmt: skip
_OF_SCORES = {
    "atan", "ceil", "cos", "erf", "exp", "exp2", "expm1", "floor", "isinf", "isnan", "log", "log1p", "log2", "pow",
    "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "tan", "tanh", "tanh_approx",
    "trunc",
}  # fmt: skip
_READABLE = {
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_EXACT_INTEGERS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}  # bits
_IN_LARGE_TENSORS: Bounds = (-(2.0**60), 2.0**60)  # assumed of captured 64-bit tensors
_ORDER = {"lt", "le", "gt", "ge"}
# Operations that do not round.
_SELECTIONS = {"abs", "clamp", "clamp_max", "clamp_min", "index", "maximum", "minimum", "neg", "where"}


def inexact(
    function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int], is_score: bool = False
) -> str | None:
    """Return why Inductor may compute a function otherwise than Python does, or None.

    The function is a mask_mod, or a score_mod if `is_score`.

    sizes: batch, query heads, queries and keys.
    """
    return follow(_Trace(is_score, device), function, device, sizes, is_score)[0]


def divisions(function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int]) -> int:
    """Return the number of divisions and remainders in a mask_mod.

    Those before an operation that cannot be traced count.
    """
    trace = _Trace(False, device)
    follow(trace, function, device, sizes, is_score=False)
    return trace.divisions


class _Trace(Trace):
    """Follows the operations of a function as Inductor sees them."""

    compiler = "torch's compiler"

    def __init__(self, is_score: bool, device: torch.device) -> None:
        super().__init__(is_score)
        self._may_be_negative = device.type == "cpu"  # indices

    def is_known(self, name: str, args: Any) -> bool:
        return name in _WHOLE_NUMBERS or (self.is_score and name in _OF_SCORES)

    def check_result(self, value: Any) -> None:
        if not self.varies(value):
            if not self.is_score:
                self.errors[_CONSTANT] = None
        elif self.is_captured(value):
            self.errors[WHOLE] = None

    def learn(self, x: Tensor, bounds: Bounds) -> None:
        self._held.append(x)
        self._bounds[id(x)] = UNBOUNDED if any(map(math.isnan, bounds)) else bounds

    def find_errors(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if name == "index":
            self._check_index(out, *args)
        elif any(x.ndim for x in (*tensors, out)):
            self.errors[WHOLE] = None
        for x in tensors:
            if x.dtype not in _READABLE:
                self.errors[_TYPE.format(str(x.dtype).removeprefix("torch."))] = None
        floating = [x for x in tensors if x.is_floating_point()]
        if out.is_floating_point() or floating:
            if not self.is_score:
                self._check_floating(name, out, args, floating)
        elif out.dtype == torch.bool or any(x.dtype == torch.bool for x in tensors):
            self._check_truth(name, out, tensors)
        if not out.is_floating_point() and out.dtype != torch.bool:
            self._check_whole(name, out, args, kwargs)

    def _check_index(self, out: Tensor, table: Tensor, indices: Sequence[Tensor | None]) -> None:
        is_whole = out.ndim or not self.is_captured(table) or len(indices) != table.ndim
        if is_whole or table.layout != torch.strided or table.is_neg() or table.is_conj():
            self.errors[WHOLE] = None
        if any(i is None or i.ndim or i.dtype not in (torch.int32, torch.int64) for i in indices):
            self.errors[_INDEX] = None
        elif not self._may_be_negative and any(self.bounds_or_any(i)[0] < 0 for i in indices):
            self.errors[NEGATIVE] = None

    def _check_floating(self, name: str, out: Tensor, args: Any, floating: Sequence[Tensor]) -> None:
        """Note an error unless an operation only selects, compares or converts without rounding."""
        numbers = [x for x in args if isinstance(x, int | float) and not isinstance(x, bool)]
        dtypes = {x.dtype for x in args if isinstance(x, Tensor) and not (name == "where" and x.dtype == torch.bool)}
        if name in KEEP_VALUES:
            source = args[0]
            if not _converts_exactly(source.dtype, out.dtype, self.bounds_or_any(source)):
                self.errors[_FLOATING] = None
        elif name in MAKE_CONSTANTS or name == "index":
            pass
        elif name not in _ORDER | _SELECTIONS:
            self.errors[_FLOATING] = None
        elif len(dtypes) > 1 or not floating:
            self.errors[_MIXED] = None
        elif any(not _holds(x, floating[0].dtype) for x in numbers):
            self.errors[_FLOATING] = None

    def _check_truth(self, name: str, out: Tensor, tensors: Sequence[Tensor]) -> None:
        """Note an error of an operation that takes or gives truth values."""
        truths = [x.dtype == torch.bool for x in tensors]
        if name in COMPARISONS:
            wrong = any(truths) and not (all(truths) and name in ("eq", "ne"))
        elif name in KEEP_VALUES | MAKE_CONSTANTS or name in ("index", "where"):
            wrong = False
        else:
            wrong = not (name.startswith(("logical", "bitwise_")) and "shift" not in name and all(truths))
        if wrong:
            self.errors[_TRUTH] = None

    def _check_whole(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        """Note an error of an operation whose result is a whole number."""
        low, high = self.bounds_of(name, out, args, kwargs)
        info = torch.iinfo(out.dtype)
        if not info.min <= low <= high <= info.max:
            self.errors[OVERFLOW] = None
        for x in args:
            if type(x) is int and not info.min <= x <= info.max:
                self.errors[OVERFLOW] = None
        if name in ("div", "floor_divide", "remainder"):
            least, most = self.bounds_or_any(args[1])
            if least <= 0 <= most:
                self.errors[_ZERO] = None
        if "shift" in name:
            least, most = self.bounds_or_any(args[1])
            if not 0 <= least <= most < 32:
                self.errors[_SHIFT] = None

    def bounds_of(self, name: str, out: Tensor, args: Any, kwargs: Any) -> Bounds:
        if out.dtype == torch.bool or out.is_floating_point():
            return (0, 1) if out.dtype == torch.bool else UNBOUNDED
        if name in KEEP_VALUES:
            source = args[0]
            bounds = self.bounds_or_any(source)
            return (0, 1) if source.dtype == torch.bool else UNBOUNDED if source.is_floating_point() else bounds
        if name == "index":
            info = torch.iinfo(out.dtype)
            every: Bounds = _IN_LARGE_TENSORS if info.bits == 64 else (info.min, info.max)
            return getattr(args[0], "bounds", None) or every
        if name in ("zeros", "zeros_like", "new_zeros"):
            return 0, 0
        if name in ("ones", "ones_like", "new_ones"):
            return 1, 1
        if name in ("full", "new_full") and isinstance(args[1], int):
            return args[1], args[1]
        if name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"):
            return self._bounds_of_bits(name, args)
        (a, b), (c, d) = (self.bounds_or_any(x) for x in (*args, 0)[:2])
        if name.startswith("clamp"):
            return self._bounds_of_clamp(name, (a, b), args, kwargs)
        if name == "bitwise_right_shift":
            return min(a, 0), max(b, 0)
        if name == "bitwise_left_shift" and 0 <= c <= d < 32:
            return min(a, 0) * 2**d, max(b, 0) * 2**d
        if name == "pow":
            n = args[1]
            if type(n) is not int or not 1 <= n < 64 or math.inf in (-a, b):
                return UNBOUNDED
            largest = max(abs(a), abs(b)) ** n
            return (0 if n % 2 == 0 else -largest), largest
        if name in ("div", "floor_divide", "remainder") and (c > 0 or d < 0):
            if name == "remainder":
                return min(c + 1, 0), max(d - 1, 0)
            largest = max(abs(a), abs(b))
            return -largest, largest
        if name in ("sub", "rsub", "add") and isinstance(alpha := kwargs.get("alpha", 1), int) and alpha != 1:
            ends = alpha * c, alpha * d
            c, d = min(ends), max(ends)
            return (a + c, b + d) if name == "add" else (a - d, b - c) if name == "sub" else UNBOUNDED
        return super().bounds_of(name, out, args, kwargs)

    def _bounds_of_clamp(self, name: str, bounds: Bounds, args: Any, kwargs: Any) -> Bounds:
        given = dict(zip(("min", "max") if name != "clamp_max" else ("max",), args[1:], strict=False)) | kwargs
        low, high = bounds
        if given.get("min") is not None:
            low, high = (max(x, y) for x, y in zip((low, high), self.bounds_or_any(given["min"]), strict=True))
        if given.get("max") is not None:
            low, high = (min(x, y) for x, y in zip((low, high), self.bounds_or_any(given["max"]), strict=True))
        return low, high

    def _bounds_of_bits(self, name: str, args: Any) -> Bounds:
        bounds = [self.bounds_or_any(x) for x in args[:2]]
        largest = max(max(-low, high) for low, high in bounds)
        if math.isinf(largest):
            return UNBOUNDED
        power = float(1 << int(largest).bit_length())
        if name == "bitwise_and" and any(low >= 0 for low, _ in bounds):
            return 0, min(high for low, high in bounds if low >= 0)
        return (0 if name != "bitwise_not" and all(low >= 0 for low, _ in bounds) else -power), power - 1


def _holds(number: float, dtype: torch.dtype) -> bool:
    """Return whether comparing with a number is the same in a dtype's precision."""
    return dtype == torch.float32 or float(torch.tensor(number, dtype=dtype)) == float(number)


def _converts_exactly(source: torch.dtype, target: torch.dtype, bounds: Bounds) -> bool:
    """Return whether a conversion from or to floating numbers does not round."""
    if not target.is_floating_point:  # bool and whole numbers
        return False
    if source.is_floating_point:
        return bool(torch.promote_types(source, target) == target)
    return max(-bounds[0], bounds[1]) <= 1 << _EXACT_INTEGERS[target]
