"""Detect functions that Inductor may compute otherwise than Python does.

Inductor makes torch's kernels for CPUs and those in Triton. Known differences (torch 2.11 to 2.15):

- Kernels count positions in 32 bits, Python in 64, and compilers of C++ assume that sums do not overflow.
- Numbers of less than 32 bits are computed in 32 bits, and half precision in single precision.
- On a CPU what depends on neither q nor kv has no dimensions, and does not widen an int8 beside it. In Python it does.
- Floating sums and products may be fused or approximated; x * 0 is 0 though x is infinite.
- A row of a captured tensor, and a reduction over one, ends the process or gives wrong results.
- In comparisons, where and clamp, torch.vmap, which create_mask uses, lets captured tensors without dimensions widen
  nothing.
- Kernels in Triton read memory before the tensor at a negative index.

A truth value that depends on the last bit of a floating number differs, so masks compute with whole numbers only, and
compare floating numbers as they are read. A score may differ by rounding, but not choose by numbers that it rounded to
half precision.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks.backends.operations import COMPARISONS, KEEP_VALUES, MAKE_CONSTANTS, UNBOUNDED, Bounds, Trace, follow

OVERFLOW = "a whole number may not fit the type that kernels compute it in"
HALF = "it chooses by numbers in half precision, which kernels do not round to"
NARROW = "of two types of numbers, kernels may not compute in the one that Python takes"
_MIXED = "kernels convert numbers of different types otherwise"
_FLOATING = "kernels round floating numbers otherwise, which could change what is visible"
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
_CHOICES = {
    "ceil", "floor", "floor_divide", "fmod", "isinf", "isnan", "remainder", "round", "sign", "signbit", "trunc",
    *COMPARISONS,
}  # fmt: skip
_HALF = (torch.float16, torch.bfloat16)
# Operations that do not round.
_SELECTIONS = {"abs", "clamp", "clamp_max", "clamp_min", "index", "maximum", "minimum", "neg", "where"}


def inexact(
    function: Callable[..., Tensor],
    device: torch.device,
    sizes: Sequence[int],
    is_score: bool = False,
    reasons: Collection[str] | None = None,
) -> str | None:
    """Return why Inductor may compute a function otherwise than Python does, or None.

    The function is a mask_mod, or a score_mod if `is_score`.

    sizes: batch, query heads, queries and keys. reasons: those that count, by default all.
    """
    trace = _Trace(is_score, device)
    first, _ = follow(trace, function, device, sizes, is_score)
    return first if reasons is None else next((e for e in trace.errors if e in reasons), None)


def divisions(function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int]) -> int:
    """Return the number of divisions and remainders in a mask_mod.

    Those before an operation that cannot be traced count.
    """
    trace = _Trace(False, device)
    follow(trace, function, device, sizes, is_score=False)
    return trace.divisions


class _Type(NamedTuple):
    """Properties of a tensor on which the promotion of dtypes depends."""

    indices: frozenset[int]  # that a tensor depends on: places in b, h, q, kv
    wide: torch.dtype  # in Python, where no tensor has dimensions
    narrow: torch.dtype  # the least one in kernels and torch.vmap


class _Trace(Trace):
    """Follows the operations of a function as Inductor sees them."""

    compiler = "torch's compiler"

    def __init__(self, is_score: bool, device: torch.device) -> None:
        super().__init__(is_score)
        self._on_cpu = device.type == "cpu"
        self._types: dict[int, _Type] = {}
        self._halves: set[int] = set()  # of numbers that Python rounds to half precision and kernels do not

    def start(self, scores: Sequence[Tensor], indices: Sequence[Tensor]) -> None:
        for place, x in enumerate(indices):
            self._types[id(x)] = _Type(frozenset([place]), torch.int64, torch.int64)
        for x in scores:
            self._types[id(x)] = _Type(frozenset(range(len(indices))), x.dtype, x.dtype)

    def is_wider_in_python(self, x: Tensor) -> bool:
        return self._type_of(x).wide != x.dtype

    def meet(self, name: str, args: Any) -> None:
        if name.startswith("clamp"):
            self._check_operands(name, [x for x in args if isinstance(x, Tensor)])

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
        self._note_type(name, out, args)
        self._check_choices(name, out, tensors, rounds_quotient=kwargs.get("rounding_mode") is not None)
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

    def _type_of(self, x: Tensor) -> _Type:
        return self._types.get(id(x)) or _Type(frozenset(), x.dtype, x.dtype)

    def _note_type(self, name: str, out: Tensor, args: Any) -> None:
        """Note the type of a result, and errors of its operands."""
        if name in MAKE_CONSTANTS:
            return
        sources = [x for x in (args[1] if name == "index" else args) if isinstance(x, Tensor)]
        indices = frozenset[int]().union(*[self._type_of(x).indices for x in sources])
        self._types[id(out)] = _Type(indices, out.dtype, out.dtype)
        if name == "index":
            return
        operands = sources[1:] if name == "where" else sources
        wide, narrow = self._check_operands(name, operands)
        if out.dtype == functools.reduce(torch.promote_types, [x.dtype for x in operands]):
            self._types[id(out)] = _Type(indices, wide, narrow)

    def _check_operands(self, name: str, operands: Sequence[Tensor]) -> tuple[torch.dtype, torch.dtype]:
        """Return the common dtype of operands in Python, and the narrowest in kernels.

        Note an error if they do not fit the narrowest.
        """
        wide = functools.reduce(torch.promote_types, [self._type_of(x).wide for x in operands])
        narrow = self._narrowest(name, [self._type_of(x) for x in operands])
        if narrow.is_floating_point:
            differs = narrow in _HALF or name in COMPARISONS
        else:
            differs = not all(_fits(self.bounds_or_any(x), narrow) for x in operands)
        if narrow != wide and differs:
            self.errors[NARROW] = None
        return wide, narrow

    def _narrowest(self, name: str, types: Sequence[_Type]) -> torch.dtype:
        """Return the least dtype that kernels or torch.vmap may convert operands to.

        Of one kind of numbers, tensors without dimensions do not widen those that have some. torch's CPU kernels give
        dimensions to what depends on q or kv. For torch.vmap, captured tensors have none, which counts where its rule
        of an operation does not take care of it.
        """
        found = every = functools.reduce(torch.promote_types, [t.narrow for t in types])
        having = [{2, 3}] if self._on_cpu and name != "clamp" else []
        selects = name == "where" or name.startswith("clamp")  # of floats, kernels then round less than Python does
        if name in COMPARISONS or (selects and not every.is_floating_point):
            having.append({0, 1, 2, 3})
        for places in having:
            dtypes = [t.narrow for t in types if t.indices & places]
            if dtypes:
                dtype = functools.reduce(torch.promote_types, dtypes)
                if dtype != torch.bool and dtype.is_floating_point == every.is_floating_point:
                    found = min(found, dtype, key=lambda d: d.itemsize)
        return found

    def _check_choices(self, name: str, out: Tensor, tensors: Sequence[Tensor], rounds_quotient: bool) -> None:
        """Note an error of a choice by numbers that only Python rounds to half precision."""
        from_half = any(id(x) in self._halves for x in tensors)
        to_whole = name in KEEP_VALUES and not out.is_floating_point()
        if from_half and (name in _CHOICES or name.startswith("logical") or to_whole or rounds_quotient):
            self.errors[HALF] = None
        if name in KEEP_VALUES:
            rounds = not _converts_exactly(tensors[0].dtype, out.dtype, self.bounds_or_any(tensors[0]))
        else:
            rounds = name != "index" and name not in MAKE_CONSTANTS | _SELECTIONS
        if out.is_floating_point() and (from_half or (rounds and out.dtype in _HALF)):
            self._halves.add(id(out))

    def _check_index(self, out: Tensor, table: Tensor, indices: Sequence[Tensor | None]) -> None:
        is_whole = out.ndim or not self.is_captured(table) or len(indices) != table.ndim
        if is_whole or table.layout != torch.strided or table.is_neg() or table.is_conj():
            self.errors[WHOLE] = None
        if any(i is None or i.ndim or i.dtype not in (torch.int32, torch.int64) for i in indices):
            self.errors[_INDEX] = None
        elif not self._on_cpu and any(self.bounds_or_any(i)[0] < 0 for i in indices):
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
        bounds = self.bounds_of(name, out, args, kwargs)
        info = torch.iinfo(out.dtype)
        if not _fits(bounds, out.dtype):
            self.errors[OVERFLOW] = None
        elif not _fits(bounds, self._type_of(out).narrow):
            self.errors[NARROW] = None
        for x in args:
            if type(x) is int and not info.min <= x <= info.max:
                self.errors[OVERFLOW] = None
        if name == "abs" and self.bounds_or_any(args[0]) == _IN_LARGE_TENSORS:  # may hold -2**63, unlike differences
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


def _fits(bounds: Bounds, dtype: torch.dtype) -> bool:
    """Return whether a dtype of whole numbers, or bool, holds all values within bounds."""
    least, largest = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return least <= bounds[0] <= bounds[1] <= largest


def _holds(number: float, dtype: torch.dtype) -> bool:
    """Return whether comparing with a number is the same in a dtype's precision."""
    return dtype == torch.float32 or float(torch.tensor(number, dtype=dtype, device="cpu")) == float(number)


def _converts_exactly(source: torch.dtype, target: torch.dtype, bounds: Bounds) -> bool:
    """Return whether a conversion from or to floating numbers does not round."""
    if not target.is_floating_point:  # bool and whole numbers
        return False
    if source.is_floating_point:
        return bool(torch.promote_types(source, target) == target)
    return max(-bounds[0], bounds[1]) <= 1 << _EXACT_INTEGERS[target]
