"""What torch's compilers are known to compute as Python does: the functions that kernels may get as they are.

A silent error of a compiler shows in no trial run. So a mask's function goes to a kernel only if each of its operations
stands in one table, with dtypes for which Inductor's C++, Inductor's Triton and FLASH's CuTe get it right, and if whole
numbers stay within the type that kernels compute them in. Any other mask goes as its bits, see `plans.data`, which is
exact for every function.

A score change may differ by rounding, so Inductor compiles it as it is; FLASH takes those of its own table.

Outside the table are, for example (torch 2.11 to 2.15, flash-attn-4 4.0.0b36):

- Positions that overflow 32 bits, in which kernels count. Numbers of less than 32 bits, which they compute in 32, and
  floating numbers that are rounded: what is visible would depend on the last bit.
- Rows of captured tensors, negative indices and constants beyond 32 bits: kernels end the process or read other memory.
- Captured whole numbers of two types, if the wider one depends on neither q nor kv: it widens nothing in C++, and
  under torch.vmap what is captured does not.
- In CuTe: where(condition, 1, 0) gives booleans, a remainder has the dividend's sign, a cast to bool keeps the lowest
  bit, bytes are signed, views are read as the tensor itself, a constant mask skips all blocks (pytorch issue 188322),
  and the backward pass multiplies infinite factors by 0. GPUs of capability 10 and above read tensors in scores by
  vectors, some wrongly (pytorch issue 188878).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.operations import COMPARISONS, KEEP_VALUES, MAKE_CONSTANTS, UNBOUNDED, Bounds, Trace, follow
from flexmasks.devices import nvidia_major

CONSTANT = "it is constant"
NEGATIVE = "kernels read wrong memory at a negative index, and an index may be negative"
OVERFLOW = "a whole number may not fit the type that kernels compute it in"
WHOLE = "it takes rows of captured tensors, or changes them as a whole"
SIGN = "FLASH gives remainders of negative numbers the wrong sign"
_BOOLEANS = "FLASH makes booleans of torch.where between two numbers"
_LOWEST_BIT = "FLASH reads only the lowest bit of a number used as a truth value"
_CONSTANT_INDEX = "FLASH takes no constant index"
_SINGLE = "Metal kernels compute whole numbers in single precision, and one may be beyond 2**24"
_UNCONVERTED = "Metal kernels leave numbers as they are where a function converts them to whole ones or to truth values"
# What ends the process or reads other memory, in a score change too.
KILLERS = (WHOLE, NEGATIVE, OVERFLOW)
# Reasons against a mask that hold for FLASH's compiler alone. Against a score change, all but KILLERS do.
OF_FLASH_ALONE = {SIGN, _BOOLEANS, _LOWEST_BIT, _CONSTANT_INDEX}
OF_METAL_ALONE = {_SINGLE, _UNCONVERTED}
OF_SIZES = {_SINGLE, NEGATIVE, OVERFLOW, SIGN}  # reasons that smaller sizes of a call may not have

# The table, by kinds of operands.
_NUMBERS = {torch.int32, torch.int64}
_OF_NUMBERS = {
    "abs", "add", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "clamp", "clamp_max", "clamp_min", "div", "floor_divide", "maximum", "minimum", "mul", "neg", "pow",
    "remainder", "rsub", "sub", "where", *COMPARISONS,
}  # fmt: skip
_OF_TRUTH = {
    "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "eq", "logical_and", "logical_not", "logical_or", "ne",
    "where",
}  # fmt: skip
_READ_AS_THEY_ARE = {torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.float64}
_OF_WHAT_IS_READ = {"lt", "le", "gt", "ge"}  # of one dtype
_SELECTIONS = {"abs", "clamp", "clamp_max", "clamp_min", "maximum", "minimum", "neg", "where"}  # of floating numbers
_OF_SCORES_ON_FLASH = {
    *_OF_NUMBERS, *_OF_TRUTH, "exp", "exp2", "sigmoid", "tanh", "tanh_approx", "index",
} - {"bitwise_left_shift", "bitwise_right_shift", "clamp", "clamp_max", "clamp_min", "pow"}  # fmt: skip

_EXACT_INTEGERS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}  # bits
_IN_LARGE_TENSORS: Bounds = (-(2.0**60), 2.0**60)  # assumed of captured 64-bit tensors
_IN_SMALL_TENSORS = 2.0**30  # the largest number of those that a function converts to 32 bits
_HALF = (torch.float16, torch.bfloat16)


def outside_table(
    function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int], is_score: bool = False
) -> tuple[str, ...]:
    """Return why kernels may compute a mask_mod, or FLASH a score_mod, otherwise than Python does; () if they do not.

    sizes: batch, query heads, queries and keys.
    """
    trace = _Table(is_score, compat.FLASH_READS_VECTORS and nvidia_major(device) >= 10, on_metal=device.type == "mps")
    unreadable, _ = follow(trace, function, device, sizes, is_score)
    return tuple(trace.errors) or ((unreadable,) if unreadable else ())


def divisions(function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int]) -> int:
    """Return the number of divisions and remainders in a mask_mod, up to an operation that cannot be traced."""
    trace = _Table(False, False)
    follow(trace, function, device, sizes, is_score=False)
    return trace.divisions


class _Table(Trace):
    """Follows the operations of a function, and notes what does not stand in the table."""

    compiler = "torch's compiler"

    def __init__(self, is_score: bool, reads_vectors: bool, on_metal: bool = False) -> None:
        super().__init__(is_score)
        self._reads_vectors, self._on_metal = reads_vectors, on_metal
        # By id: the dtypes of the captured whole numbers of which a value was made. Indices of pairs have none: kernels
        # count them in 32 bits, Python in 64, which is the same as long as they fit.
        self._captured: dict[int, frozenset[torch.dtype]] = {}
        self._wrong_signs: set[int] = set()  # remainders that are right only in a comparison with 0
        self._of_pairs: set[int] = set()  # what depends on q or kv
        self._comparisons: dict[int, tuple[str, Any, Any]] = {}
        self._by_operation: dict[tuple[Any, ...], Tensor] = {}  # first result of an operation on given inputs
        self._firsts: dict[int, Tensor] = {}  # by a result, the first result of the same operation

    def start(self, scores: Sequence[Tensor], indices: Sequence[Tensor]) -> None:
        self._of_pairs.update(map(id, (*scores, *indices[2:])))

    def is_wider_in_python(self, x: Tensor) -> bool:
        return x.dtype == torch.int32 and not self.is_captured(x) and not self._dtypes_of(x)

    def cast(self, x: Tensor, is_index: bool = False) -> Tensor:
        made = x.clone()
        self._captured[id(made)] = frozenset() if is_index else frozenset([made.dtype])
        return made

    def meet(self, name: str, args: Any) -> None:
        if name.startswith("clamp") and len({x.dtype for x in args if isinstance(x, Tensor)}) > 1:
            self.note("kernels clamp numbers by those of another type otherwise")

    def is_known(self, name: str, args: Any) -> bool:
        if name in KEEP_VALUES or name in MAKE_CONSTANTS or name == "index":
            return True
        if self.is_score:
            return name in _OF_SCORES_ON_FLASH or (name == "pow" and type(args[1]) is int and args[1] > 0)
        return name in _OF_NUMBERS | _OF_TRUTH

    def check_result(self, value: Any) -> None:
        self._check_signs(value)
        if not isinstance(value, Tensor) or (not self.varies(value) and not self.is_score):
            self.note(CONSTANT)
        elif self.is_captured(value):
            self.note(WHOLE)
        elif not self.is_score and value.dtype != torch.bool:
            self.note("it returns no truth values")

    def note(self, error: str) -> None:
        self.errors[error] = None

    def find_errors(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        tensors = [x for x in args if isinstance(x, Tensor)]
        numbers = [x for x in args if isinstance(x, int | float) and not isinstance(x, bool)]
        if not (name in ("eq", "ne") and type(args[1]) is int and args[1] == 0):
            self._check_signs(*tensors)
        if name == "index":
            self._check_index(out, *args)
        elif any(x.ndim for x in (*tensors, out)):
            self.note(WHOLE)
        if name == "where" and out.dtype != torch.bool and not any(map(self.varies, args[1:])):
            self.note(_BOOLEANS)
        if name == "remainder" and not self._has_one_sign(out, *args[:2]):
            self._wrong_signs.add(id(out))
        of_truth = name.startswith("logical") or (name in KEEP_VALUES and out.dtype == torch.bool)
        if of_truth and any(x.dtype != torch.bool for x in tensors):
            self.note(_LOWEST_BIT)
        self._captured[id(out)] = self._captured_dtypes(name, out, tensors)
        if any(id(x) in self._of_pairs for x in (args[1] if name == "index" else tensors)):
            self._of_pairs.add(id(out))
        if any(type(x) is int and not -(2**31) <= x < 2**31 for x in numbers) and torch.int64 not in self._dtypes_of(
            *tensors
        ):
            self.note(OVERFLOW)
        if self.is_score:
            self._check_score(name, out, args)
        else:
            self._check_dtypes(name, out, args, tensors, numbers)
        if not out.is_floating_point() and out.dtype != torch.bool:
            self._check_whole_numbers(name, out, args)
        if self._on_metal:
            self._check_metal(name, out, tensors)
        if name in COMPARISONS:
            self._comparisons[id(out)] = (name, *args[:2])
        if not kwargs and all(isinstance(x, Tensor | int | float) for x in args):
            operation = (name, *(id(self._first(x)) if isinstance(x, Tensor) else (type(x), x) for x in args))
            self._firsts[id(out)] = self._by_operation.setdefault(operation, out)

    def _check_metal(self, name: str, out: Tensor, tensors: Sequence[Tensor]) -> None:
        """Note what torch's kernels for MPS get wrong, which compute all numbers in float32."""
        for x in (*tensors, out):
            is_whole = not x.is_floating_point() and x.dtype != torch.bool
            low, high = self._bounds[id(x)] if x is out else self.bounds_or_any(x)
            if is_whole and max(-low, high) > 1 << _EXACT_INTEGERS[torch.float32]:
                self.note(_SINGLE)
        if name in KEEP_VALUES and tensors[0].dtype != out.dtype:
            is_truncated = tensors[0].is_floating_point() and not out.is_floating_point()
            if out.dtype == torch.bool or is_truncated:
                self.note(_UNCONVERTED)

    def _check_signs(self, *used: Any) -> None:
        if any(id(x) in self._wrong_signs for x in used):
            self.note(SIGN)

    def _has_one_sign(self, out: Tensor, dividend: Any, divisor: Any) -> bool:
        is_zero = type(divisor) is int and abs(divisor) == 1 and not out.is_floating_point()
        return is_zero or (self.bounds_or_any(dividend)[0] >= 0 and self.bounds_or_any(divisor)[0] >= 0)

    def _dtypes_of(self, *tensors: Tensor) -> frozenset[torch.dtype]:
        found = [self._captured.get(id(x)) or self._own_dtype(x) for x in tensors]
        return frozenset[torch.dtype]().union(*found)

    def _own_dtype(self, x: Tensor) -> frozenset[torch.dtype]:
        return frozenset([x.dtype]) if self.is_captured(x) and x.dtype in _NUMBERS else frozenset()

    def _captured_dtypes(self, name: str, out: Tensor, tensors: Sequence[Tensor]) -> frozenset[torch.dtype]:
        if out.dtype not in _NUMBERS:
            return frozenset()
        if name == "index" or name in MAKE_CONSTANTS or (name in KEEP_VALUES and tensors[0].dtype != out.dtype):
            return frozenset([out.dtype])
        return self._dtypes_of(*tensors)

    def _check_index(self, out: Tensor, table: Tensor, indices: Sequence[Tensor | None]) -> None:
        is_whole = out.ndim or not self.is_captured(table) or len(indices) != table.ndim
        if is_whole or table.layout != torch.strided or table.is_neg() or table.is_conj():
            self.note(WHOLE)
        if table.dtype not in _NUMBERS | _READ_AS_THEY_ARE | {torch.bool}:
            self.note(f"kernels are not known to read tensors of type {str(table.dtype).removeprefix('torch.')}")
        if any(i is None or i.ndim or i.dtype not in _NUMBERS for i in indices):
            self.note("it takes indices that are no 32-bit or 64-bit numbers")
        elif any(self.bounds_or_any(i)[0] < 0 for i in indices):
            self.note(NEGATIVE)
        elif not all(map(self.varies, indices)):
            self.note(_CONSTANT_INDEX)
        self._check_signs(*indices)
        if self.is_score and self._reads_vectors:
            self.note("FLASH reads some tensors wrongly on GPUs of this kind")

    def _check_score(self, name: str, out: Tensor, args: Any) -> None:
        """Note what FLASH gets wrong in a score change by more than rounding."""
        infinite = "FLASH's backward pass is NaN where a hidden factor is infinite, and a factor may be infinite here"
        if name in KEEP_VALUES and out.dtype in _HALF:
            self.note("FLASH does not round to half precision")
        if name == "div" and self.varies(args[1]):
            self.note(infinite)
        if name in ("exp", "exp2") and self.bounds_or_any(args[0])[1] > 80:
            self.note(infinite)

    def _check_dtypes(self, name: str, out: Tensor, args: Any, tensors: Sequence[Tensor], numbers: Any) -> None:
        """Note an operation of a mask that is not in the table for the dtypes of its operands."""
        if name == "index":
            return
        if name in MAKE_CONSTANTS:
            if not all(_holds(x, out.dtype) for x in numbers):
                self.note(f"it makes a number that {str(out.dtype).removeprefix('torch.')} does not hold")
            return
        operands = tensors[1:] if name == "where" and tensors and tensors[0].dtype == torch.bool else tensors
        dtypes = {x.dtype for x in operands}
        if name in KEEP_VALUES:
            is_right = _converts_exactly(tensors[0].dtype, out.dtype, self.bounds_or_any(tensors[0]))
        elif dtypes <= {torch.bool}:
            is_right = name in _OF_TRUTH
        elif dtypes <= _NUMBERS:
            is_right = name in _OF_NUMBERS and not out.is_floating_point()
            wide = [x for x in operands if not _fits(self.bounds_or_any(x), torch.int32)]
            if len(self._dtypes_of(*operands)) > 1 and any(id(x) not in self._of_pairs for x in wide):
                self.note("of two types of whole numbers, kernels may not compute in the one that Python takes")
        else:
            (dtype, *others) = dtypes
            selects = dtype.is_floating_point and name in _SELECTIONS
            is_right = not others and dtype in _READ_AS_THEY_ARE and (name in _OF_WHAT_IS_READ or selects)
            is_right = is_right and all(_holds(x, dtype) for x in numbers)
        if not is_right:
            names = ", ".join(sorted(str(x).removeprefix("torch.") for x in dtypes))
            self.note(f"kernels are not known to compute `{name}` of {names} as Python does")

    def _check_whole_numbers(self, name: str, out: Tensor, args: Any) -> None:
        """Note an error of an operation whose result is a whole number."""
        if name not in ("index", *MAKE_CONSTANTS) and not _fits(self._bounds[id(out)], out.dtype):
            self.note(OVERFLOW)
        if name == "abs" and self.bounds_or_any(args[0]) == _IN_LARGE_TENSORS:  # may hold -2**63, unlike differences
            self.note(OVERFLOW)
        if name in ("div", "floor_divide", "remainder"):
            least, most = self.bounds_or_any(args[1])
            if least <= 0 <= most:
                self.note("it may divide by 0")
        if "shift" in name:
            least, most = self.bounds_or_any(args[1])
            if not 0 <= least <= most < 32:
                self.note("it may shift by less than 0 or more than 31 bits")

    def bounds_or_any(self, x: Any) -> Bounds:
        """Return the bounds of an operand's values."""
        if isinstance(x, int | float):
            return x, x
        return _bounds_in(x) if self.is_captured(x) else self._bounds[id(x)]

    def bounds_of(self, name: str, out: Tensor, args: Any, kwargs: Any) -> Bounds:
        """Return the bounds of an operation's results."""
        if out.dtype == torch.bool:
            return 0, 1
        if name in KEEP_VALUES:
            return _converted(self.bounds_or_any(args[0]), args[0].dtype, out.dtype)
        if name == "index":
            return _bounds_in(args[0])
        if name in MAKE_CONSTANTS:
            return self._bounds_of_constant(name, out, args)
        if name == "where":
            return self._chosen(*args)
        if name.startswith("clamp"):
            return self._bounds_of_clamp(name, args, kwargs)
        if name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"):
            return self._bounds_of_bits(name, args)
        (a, b), (c, d) = (self.bounds_or_any(x) for x in (*args, 0)[:2])
        if name in ("add", "sub", "rsub"):
            ends = [kwargs.get("alpha", 1) * x for x in (c, d)]
            if name == "rsub":
                return UNBOUNDED if kwargs.get("alpha", 1) != 1 else (c - b, d - a)
            return (a + min(ends), b + max(ends)) if name == "add" else (a - max(ends), b - min(ends))
        if name == "mul":
            ends = [x * y if x and y else 0.0 for x in (a, b) for y in (c, d)]
            return min(ends), max(ends)
        if name in ("neg", "abs"):
            return (-b, -a) if name == "neg" else (max(a, -b, 0), max(b, -a))
        if name in ("maximum", "minimum"):
            return (max(a, c), max(b, d)) if name == "maximum" else (min(a, c), min(b, d))
        if name in ("div", "floor_divide") and c > 0 and d < math.inf:
            ends = [x / y for x in (a, b) for y in (c, d)]
            mode = kwargs.get("rounding_mode") if name == "div" else "floor"
            return (min(ends), max(ends)) if mode is None else _rounded(min(ends), max(ends), down=mode == "floor")
        if name in ("div", "floor_divide") and d < 0:
            return -max(abs(a), abs(b)), max(abs(a), abs(b))
        if name == "remainder" and (c > 0 or d < 0):
            return (min(c, 0), max(d, 0)) if out.is_floating_point() else (min(c + 1, 0), max(d - 1, 0))
        if name == "bitwise_right_shift":
            return min(a, 0), max(b, 0)
        if name == "bitwise_left_shift" and 0 <= c <= d < 32:
            return min(a, 0) * 2**d, max(b, 0) * 2**d
        if name == "pow":
            return self._bounds_of_power((a, b), args[1])
        if name in ("exp", "exp2"):
            return 0, (math.exp if name == "exp" else math.exp2)(min(b, 700.0))
        return UNBOUNDED

    def _bounds_of_constant(self, name: str, out: Tensor, args: Any) -> Bounds:
        if "zeros" in name or "ones" in name:
            return (1, 1) if "ones" in name else (0, 0)
        if name.startswith("lift_fresh"):
            value = _value_of_constant(out)
            return UNBOUNDED if value is None or math.isnan(value) else (value, value)
        return self.bounds_or_any(args[0 if name == "scalar_tensor" else 1])

    def _bounds_of_power(self, bounds: Bounds, exponent: Any) -> Bounds:
        is_even = isinstance(exponent, int | float) and exponent % 2 == 0
        if type(exponent) is not int or not 1 <= exponent < 64 or math.inf in (-bounds[0], bounds[1]):
            return (0, math.inf) if is_even or bounds[0] > 0 else UNBOUNDED
        largest = max(abs(bounds[0]), abs(bounds[1])) ** exponent
        return (0 if is_even else -largest), largest

    def _bounds_of_clamp(self, name: str, args: Any, kwargs: Any) -> Bounds:
        given = dict(zip(("min", "max") if name != "clamp_max" else ("max",), args[1:], strict=False)) | kwargs
        low, high = self.bounds_or_any(args[0])
        if given.get("min") is not None:
            low, high = (max(x, y) for x, y in zip((low, high), self.bounds_or_any(given["min"]), strict=True))
        if given.get("max") is not None:
            low, high = (min(x, y) for x, y in zip((low, high), self.bounds_or_any(given["max"]), strict=True))
        return low, high

    def _bounds_of_bits(self, name: str, args: Any) -> Bounds:
        bounds = [self.bounds_or_any(x) for x in args[:2]]
        largest = max(max(-low - 1, high) for low, high in bounds)
        if math.isinf(largest):
            return UNBOUNDED
        power = float(1 << int(max(largest, 0)).bit_length())
        if name == "bitwise_and" and any(low >= 0 for low, _ in bounds):
            return 0, min(high for low, high in bounds if low >= 0)
        return (0 if name != "bitwise_not" and all(low >= 0 for low, _ in bounds) else -power), power - 1

    def _first(self, x: Any) -> Any:
        return self._firsts.get(id(x), x)

    def _chosen(self, condition: Any, x: Any, y: Any) -> Bounds:
        """Return the bounds of where(condition, x, y); a comparison bounds the operand that it selects."""
        (a, b), (c, d) = self.bounds_or_any(x), self.bounds_or_any(y)
        name, compared, limit = self._comparisons.get(id(condition), ("", None, None))
        low, high = UNBOUNDED if limit is None else self.bounds_or_any(limit)
        compared, x, y = map(self._first, (compared, x, y))
        if compared is y and name in ("lt", "le"):
            c = max(c, low)
        elif compared is y and name in ("gt", "ge"):
            d = min(d, high)
        elif compared is x and name in ("lt", "le"):
            b = min(b, high)
        elif compared is x and name in ("gt", "ge"):
            a = max(a, low)
        return min(a, c), max(b, d)


def _bounds_in(table: Tensor) -> Bounds:
    """Return the bounds of the numbers in a captured tensor."""
    known: Bounds | None = getattr(table, "bounds", None)  # see spec.indexing.bounded
    if known is not None or table.is_floating_point() or table.dtype == torch.bool:
        return known or ((0, 1) if table.dtype == torch.bool else UNBOUNDED)
    info = torch.iinfo(table.dtype)
    return _IN_LARGE_TENSORS if info.bits == 64 else (info.min, info.max)


def _converted(bounds: Bounds, source: torch.dtype, target: torch.dtype) -> Bounds:
    """Return the bounds of converted values: who converts to 32 bits, as where queries start, has small numbers."""
    if target.is_floating_point:
        return bounds
    low, high = _rounded(*bounds) if source.is_floating_point else bounds
    if target == torch.int32 and not _fits((low, high), target):
        return max(low, -_IN_SMALL_TENSORS), min(high, _IN_SMALL_TENSORS)
    info = torch.iinfo(target)
    return max(low, info.min), min(high, info.max)


def _rounded(low: float, high: float, down: bool = False) -> Bounds:
    """Return the bounds of values in low..high after rounding to integers, down or in any direction."""
    of_high = math.floor if down else math.ceil
    return low if math.isinf(low) else math.floor(low), high if math.isinf(high) else of_high(high)


def _value_of_constant(x: Tensor) -> float | None:
    """Return the value of a tensor without data that was made of a number, or None."""
    constant = getattr(x, "constant", None)
    if constant is None or constant.numel() != 1:
        return None
    with compat.without_dispatch_modes():
        return cast(float, constant.item())


def _fits(bounds: Bounds, dtype: torch.dtype) -> bool:
    """Return whether a dtype of whole numbers holds all values within bounds."""
    info = torch.iinfo(dtype)
    return info.min <= bounds[0] <= bounds[1] <= info.max


def _holds(number: float, dtype: torch.dtype) -> bool:
    """Return whether a number is the same in a dtype's precision; float32 is that of numbers."""
    if dtype == torch.bool:
        return False
    if not dtype.is_floating_point:
        return isinstance(number, int) and _fits((number, number), dtype)
    return dtype == torch.float32 or float(torch.tensor(number, dtype=dtype, device="cpu")) == float(number)


def _converts_exactly(source: torch.dtype, target: torch.dtype, bounds: Bounds) -> bool:
    """Return whether all compilers convert as Python does."""
    if source == target:
        return True
    if source.is_floating_point:
        return target.is_floating_point and torch.promote_types(source, target) == target
    if target.is_floating_point:
        return max(-bounds[0], bounds[1]) <= 1 << _EXACT_INTEGERS[target]
    return target in _NUMBERS
