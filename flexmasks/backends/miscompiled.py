"""Detect functions that torch's FLASH backend silently miscompiles.

Known errors of its compiler in torch 2.11 to 2.13 (CuteDSLOpOverrides, CuTe, flash-attn-4 4.0.0b36):

- `torch.where` between two numbers gives booleans.
- A remainder has the sign of the dividend, as in C, where torch's has the sign of the divisor.
- A cast of a number to bool keeps its lowest bit.
- A negative index reads memory before the tensor.
- A view of a captured tensor is read as the tensor itself.
- The backward pass multiplies an infinite factor by 0 where the mask hides, which is NaN.
- A constant mask skips all blocks (pytorch issue 188322).
- GPUs of capability 10 and above read tensors in scores by vectors, some wrongly (pytorch issue 188878).

A silent error does not show in a trial run, so a function passes only if all its operations are on a list of
operations that are known to be compiled correctly, within the bounds that they need.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmasks import compat

UNREADABLE = "its function cannot be traced"
NO_BLOCKS = "it skips all blocks if the mask's function is a constant"
_BOOLEANS = "its compiler makes booleans of torch.where between two numbers"
_REMAINDER = "its compiler gives remainders of negative numbers the wrong sign"
_TRUTH = "its compiler reads only the lowest bit of a number used as a truth value"
_INDEX = "its compiler reads wrong memory at a negative index, and an index may be negative here"
_VIEW = "its compiler reads tensors wrongly if the function changes them as a whole"
_VECTORS = "its compiler reads some tensors wrongly on GPUs of this kind"
_INFINITE = "its backward pass is NaN where a hidden factor is infinite, and a factor may be infinite here"

_MAKE_CONSTANTS = {"full", "zeros", "ones", "scalar_tensor", "full_like", "zeros_like", "ones_like"}
_MAKE_CONSTANTS |= {"new_full", "new_zeros", "new_ones", "lift_fresh", "lift_fresh_copy"}
_KEEP_VALUES = {"_to_copy", "alias", "clone", "convert_element_type", "detach", "expand", "view"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_CORRECT = {
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "div", "exp", "exp2", "floor_divide",
    "index", "logical_and", "logical_not", "logical_or", "maximum", "minimum", "mul", "neg", "remainder", "rsub",
    "sigmoid", "sub", "tanh", "tanh_approx", "where", *_MAKE_CONSTANTS, *_KEEP_VALUES, *_COMPARISONS,
}  # fmt: skip

Bounds = tuple[float, float]
_UNBOUNDED: Bounds = (-math.inf, math.inf)
_INTEGERS_IN_TENSORS: Bounds = (-(2.0**30), 2.0**30)  # assumed of captured tensors


def miscompiled(
    function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int], is_score: bool = False
) -> str | None:
    """Return why FLASH may miscompile a mask_mod or score_mod, or None.

    The function is a score_mod if `is_score`.

    sizes: batch, query heads, queries and keys. NO_BLOCKS is returned for every constant mask, though a constant that
    shows all pairs needs no blocks.
    """
    trace = _Trace(is_score, is_score and compat.FLASH_READS_VECTORS and _is_blackwell(device))
    try:
        with contextlib.ExitStack() as stack:
            for context in (torch.no_grad(), compat.outside_transforms(), compat.without_dispatch_modes()):
                stack.enter_context(context)
            stack.enter_context(compat.fake_mode())
            indices = [torch.zeros((), dtype=torch.int32, device=device) for _ in sizes]
            for x, n in zip(indices, sizes, strict=True):
                trace.learn(x, (0, n - 1))
            scores = [torch.zeros((), device=device)] if is_score else []
            with compat.TransformGetItemToIndex(), trace:
                value = function(*scores, *indices)
    except Exception as error:
        return f"{UNREADABLE}: {type(error).__name__}"
    trace.check(value)
    if not trace.errors and not is_score and not trace.varies(value):
        return NO_BLOCKS
    return next(iter(trace.errors), None)


def _is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def _rounded(low: float, high: float) -> Bounds:
    """Return the bounds of values in low..high after rounding to integers in any direction."""
    return low if math.isinf(low) else math.floor(low), high if math.isinf(high) else math.ceil(high)


class _Trace(compat.TorchDispatchMode):
    """Follows the operations of a function: constants, bounds, and errors met.

    torch's own tracer would make torch refuse compiled calls in all threads while it traces; a mode affects one thread.
    Tensors are known by their ids.
    """

    def __init__(self, is_score: bool, reads_vectors: bool) -> None:
        super().__init__()
        self.is_score, self.reads_vectors = is_score, reads_vectors
        self.errors: dict[str, None] = {}  # in the order met
        self._bounds: dict[int, Bounds] = {}
        self._constants: set[int] = set()
        self._wrong_remainders: set[int] = set()  # remainders that are correct only in a comparison with 0
        self._comparisons: dict[int, tuple[str, Any, Any]] = {}
        self._by_operation: dict[tuple[Any, ...], Tensor] = {}  # first result of an operation on given inputs
        self._firsts: dict[int, Tensor] = {}  # by a result, the first result of the same operation
        self._held: list[Tensor] = []  # keeps the ids of tensors unique
        self._decompositions = compat.inductor_decompositions()

    def learn(self, x: Tensor, bounds: Bounds) -> None:
        """Note a tensor with the bounds of its values."""
        self._held.append(x)
        low, high = bounds
        fits = x.is_floating_point() or -(2**31) <= low <= high < 2**31
        self._bounds[id(x)] = bounds if fits and not (math.isnan(low) or math.isnan(high)) else _UNBOUNDED

    def varies(self, x: Any) -> bool:
        """Return whether the compiler sees a value that is not constant."""
        return isinstance(x, Tensor) and id(x) not in self._constants

    def check(self, *used: Any) -> None:
        """Note an error if a wrong remainder is used."""
        if any(id(x) in self._wrong_remainders for x in used):
            self.errors[_REMAINDER] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # not a computation: a query of a tensor's device, say
            return func(*args, **kwargs)
        for decomposed in (self._decompositions.get(func), func.decompose):
            if decomposed is not None:
                with self:
                    out = decomposed(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        out = func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        is_correct = name in _CORRECT or (name == "pow" and type(args[1]) is int and args[1] > 0)
        if func._schema.is_mutable or not is_correct or not isinstance(out, Tensor):
            self.errors[f"its compiler is not known to compile `{name}` correctly"] = None
        else:
            self._find_errors(name, out, args)
            self.learn(out, self._bounds_of(name, out, args, kwargs))
            if name in _COMPARISONS:
                self._comparisons[id(out)] = (name, *args[:2])
            if not kwargs and all(isinstance(x, Tensor | int | float) for x in args):
                operation = (func, *(id(self._first(x)) if isinstance(x, Tensor) else (type(x), x) for x in args))
                self._firsts[id(out)] = self._by_operation.setdefault(operation, out)
        return out

    def _find_errors(self, name: str, out: Tensor, args: Any) -> None:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if not (name in ("eq", "ne") and type(args[1]) is int and args[1] == 0):
            self.check(*tensors)
        if name == "index":
            self._check_index(*args)
        elif any(x.ndim for x in tensors):
            self.errors[_VIEW] = None
        is_zero = name == "mul" and any(type(x) is int and x == 0 for x in args)
        if name in _MAKE_CONSTANTS or is_zero or (name != "index" and not any(map(self.varies, tensors))):
            self._constants.add(id(out))
        if name == "where" and out.dtype != torch.bool and not any(map(self.varies, args[1:])):
            self.errors[_BOOLEANS] = None
        if name == "remainder" and not self._sign_does_not_matter(out, *args[:2]):
            self._wrong_remainders.add(id(out))
        is_truth = name.startswith("logical") or (name in _KEEP_VALUES and out.dtype == torch.bool)
        if is_truth and any(x.dtype != torch.bool for x in tensors):
            self.errors[_TRUTH] = None
        if name in _KEEP_VALUES and out.dtype in (torch.float16, torch.bfloat16):
            self.errors["its compiler does not round to half precision"] = None
        if self.is_score and name == "div" and self.varies(args[1]):
            self.errors[_INFINITE] = None
        if self.is_score and name in ("exp", "exp2") and self._bounds_or_any(args[0])[1] > 80:
            self.errors[_INFINITE] = None

    def _check_index(self, table: Tensor, indices: Sequence[Tensor | None]) -> None:
        self.check(*indices)
        if table.dtype == torch.uint8:
            self.errors["its compiler reads uint8 as signed"] = None
        if any(i is None or i.dtype == torch.bool or self._bounds_or_any(i)[0] < 0 for i in indices):
            self.errors[_INDEX] = None
        if self.reads_vectors:
            self.errors[_VECTORS] = None

    def _sign_does_not_matter(self, out: Tensor, dividend: Any, divisor: Any) -> bool:
        """Return whether a remainder is the same with either sign.

        torch gives it the divisor's sign, FLASH's compiler the dividend's.
        """
        is_zero = type(divisor) is int and abs(divisor) == 1 and not out.is_floating_point()
        return is_zero or (self._bounds_or_any(dividend)[0] >= 0 and self._bounds_or_any(divisor)[0] >= 0)

    def _bounds_or_any(self, x: Any) -> Bounds:
        return (x, x) if isinstance(x, int | float) else self._bounds.get(id(x), _UNBOUNDED)

    def _bounds_of(self, name: str, out: Tensor, args: Any, kwargs: Any) -> Bounds:
        if out.dtype == torch.bool:
            return 0, 1
        if name in _KEEP_VALUES:
            bounds = (
                self._bounds_or_any(args[0]) if out.dtype not in (torch.int8, torch.uint8, torch.int16) else _UNBOUNDED
            )
            return bounds if out.is_floating_point() else _rounded(*bounds)
        if name in ("full", "full_like", "scalar_tensor"):
            return self._bounds_or_any(args[0 if name == "scalar_tensor" else 1])
        if name == "index":
            return getattr(args[0], "bounds", _UNBOUNDED if out.is_floating_point() else _INTEGERS_IN_TENSORS)
        if name == "where":
            return self._chosen(*args)
        (a, b), (c, d) = (self._bounds_or_any(x) for x in (*args, 0)[:2])
        if name in ("sub", "rsub", "add") and kwargs.get("alpha", 1) != 1:
            return _UNBOUNDED
        if name == "add":
            return a + c, b + d
        if name in ("sub", "rsub"):
            return (a - d, b - c) if name == "sub" else (c - b, d - a)
        if name == "mul":
            ends = [x * y if x and y else 0.0 for x in (a, b) for y in (c, d)]
            return min(ends), max(ends)
        if name in ("neg", "abs"):
            return (-b, -a) if name == "neg" else (max(a, -b, 0), max(b, -a))
        if name in ("maximum", "minimum"):
            return (max(a, c), max(b, d)) if name == "maximum" else (min(a, c), min(b, d))
        if name in ("div", "floor_divide") and c > 0 and d < math.inf:
            ends = [x / y for x in (a, b) for y in (c, d)]
            exact = kwargs.get("rounding_mode") is None and name == "div"
            return (min(ends), max(ends)) if exact else _rounded(min(ends), max(ends))
        if name == "remainder" and c > 0:
            return 0, d
        if name == "bitwise_and" and max(a, c) >= 0:
            return 0, min(y for x, y in ((a, b), (c, d)) if x >= 0)
        if name == "pow":
            return (0, math.inf) if args[1] % 2 == 0 else _UNBOUNDED
        if name in ("exp", "exp2"):
            return 0, (math.exp if name == "exp" else math.exp2)(min(b, 700.0))
        return _UNBOUNDED

    def _first(self, x: Any) -> Any:
        return self._firsts.get(id(x), x)

    def _chosen(self, condition: Any, x: Any, y: Any) -> Bounds:
        """Return the bounds of where(condition, x, y); a comparison bounds the operand that it selects."""
        (a, b), (c, d) = self._bounds_or_any(x), self._bounds_or_any(y)
        name, compared, limit = self._comparisons.get(id(condition), ("", None, None))
        low, high = self._bounds_or_any(limit)
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
