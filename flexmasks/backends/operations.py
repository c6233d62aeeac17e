"""Operations of a mask's or score's function, as a compiler sees them.

A silent error of a compiler does not show in a trial run, so a function passes a look only if all its operations are
on a list of operations that are known to be compiled correctly, within the bounds that they need.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmasks import compat

UNREADABLE = "its function cannot be traced"
DTYPE = "it asks for the dtype of an index, which kernels count in 32 bits and Python in 64"
MAKE_CONSTANTS = {"full", "zeros", "ones", "scalar_tensor", "full_like", "zeros_like", "ones_like"}
MAKE_CONSTANTS |= {"new_full", "new_zeros", "new_ones", "lift_fresh", "lift_fresh_copy"}
KEEP_VALUES = {"_to_copy", "alias", "clone", "convert_element_type", "detach", "expand", "view"}
_SAME = {"__rshift__": "bitwise_right_shift", "__lshift__": "bitwise_left_shift"}  # two names of one operation
_DIVISIONS = {"div", "floor_divide", "remainder"}
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}

Bounds = tuple[float, float]
UNBOUNDED: Bounds = (-math.inf, math.inf)
_TENSOR: Any = torch.Tensor
# What a function calls to ask for a dtype, and casts, which do nothing if a tensor has the dtype already.
_QUESTIONS = _TENSOR.dtype.__get__, _TENSOR.itemsize.__get__, _TENSOR.element_size, torch.result_type
_CASTS = _TENSOR.int, _TENSOR.to, _TENSOR.type
INTEGERS_IN_TENSORS: Bounds = (-(2.0**30), 2.0**30)  # assumed of captured tensors


class Trace(compat.TorchDispatchMode):
    """Follows the operations of a function: constants, bounds, and errors met.

    torch's own tracer would make torch refuse compiled calls in all threads while it traces; a mode affects one thread.
    Tensors are known by their ids.
    """

    compiler = "its compiler"

    def __init__(self, is_score: bool) -> None:
        super().__init__()
        self.is_score = is_score
        self.errors: dict[str, None] = {}  # in the order met
        self.divisions = 0  # divisions and remainders
        self._bounds: dict[int, Bounds] = {}
        self._constants: set[int] = set()
        self._comparisons: dict[int, tuple[str, Any, Any]] = {}
        self._by_operation: dict[tuple[Any, ...], Tensor] = {}  # first result of an operation on given inputs
        self._firsts: dict[int, Tensor] = {}  # by a result, the first result of the same operation
        self._held: list[Tensor] = []  # keeps the ids of tensors unique
        self._decompositions = compat.decompositions()

    def is_known(self, name: str, args: Any) -> bool:
        """Return whether the operation is on the list."""
        raise NotImplementedError

    def find_errors(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        """Note errors of an operation on the list."""
        raise NotImplementedError

    def start(self, scores: Sequence[Tensor], indices: Sequence[Tensor]) -> None:
        """Note what the function is called with: perhaps a score, and b, h, q, kv."""

    def meet(self, name: str, args: Any) -> None:
        """Note errors of an operation before the compiler takes it apart."""

    def check_result(self, value: Any) -> None:
        """Note errors that only show in what the function returns."""

    def learn(self, x: Tensor, bounds: Bounds) -> None:
        """Note a tensor with the bounds of its values."""
        self._held.append(x)
        low, high = bounds
        fits = x.is_floating_point() or -(2**31) <= low <= high < 2**31
        self._bounds[id(x)] = bounds if fits and not (math.isnan(low) or math.isnan(high)) else UNBOUNDED

    def is_wider_in_python(self, x: Tensor) -> bool:
        """Return whether a tensor has another dtype where indices have 64 bits."""
        return False

    def cast(self, x: Tensor) -> Tensor:
        """Return what a cast to 32 bits makes of an index, which kernels count in 32 bits."""
        return x

    def varies(self, x: Any) -> bool:
        """Return whether the compiler sees a value that is not constant."""
        return isinstance(x, Tensor) and id(x) not in self._constants

    def is_captured(self, x: Tensor) -> bool:
        """Return whether a tensor is none of the function's own."""
        return id(x) not in self._bounds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        name = _SAME.get(name, name)
        if func.namespace == "prim":  # not a computation: a query of a tensor's device, say
            return func(*args, **kwargs)
        self.meet(name, args)
        for decomposed in (self._decompositions.get(func), func.decompose):
            if decomposed is not None:
                with self:
                    out = decomposed(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        out = func(*args, **kwargs)
        self.divisions += name in _DIVISIONS
        if func._schema.is_mutable or not self.is_known(name, args) or not isinstance(out, Tensor):
            self.errors[f"{self.compiler} is not known to compile `{name}` correctly"] = None
        else:
            tensors = [x for x in args if isinstance(x, Tensor)]
            is_zero = name == "mul" and any(type(x) is int and x == 0 for x in args)
            if name in MAKE_CONSTANTS or is_zero or (name != "index" and not any(map(self.varies, tensors))):
                self._constants.add(id(out))
            self.find_errors(name, out, args, kwargs)
            self.learn(out, self.bounds_of(name, out, args, kwargs))
            if name in COMPARISONS:
                self._comparisons[id(out)] = (name, *args[:2])
            if not kwargs and all(isinstance(x, Tensor | int | float) for x in args):
                operation = (func, *(id(self._first(x)) if isinstance(x, Tensor) else (type(x), x) for x in args))
                self._firsts[id(out)] = self._by_operation.setdefault(operation, out)
        return out

    def bounds_or_any(self, x: Any) -> Bounds:
        """Return the bounds of an operand's values."""
        if isinstance(x, int | float):
            return x, x
        captured: Bounds = getattr(x, "bounds", UNBOUNDED)  # see spec.indexing.bounded
        return self._bounds.get(id(x), captured)

    def bounds_of(self, name: str, out: Tensor, args: Any, kwargs: Any) -> Bounds:
        """Return the bounds of an operation's results."""
        if out.dtype == torch.bool:
            return 0, 1
        if name in KEEP_VALUES:
            bounds = (
                self.bounds_or_any(args[0]) if out.dtype not in (torch.int8, torch.uint8, torch.int16) else UNBOUNDED
            )
            return bounds if out.is_floating_point() else _rounded(*bounds)
        if name in ("lift_fresh", "lift_fresh_copy"):
            value = _value_of_constant(out)
            return UNBOUNDED if value is None or math.isnan(value) else (value, value)
        if name in ("full", "full_like", "scalar_tensor"):
            return self.bounds_or_any(args[0 if name == "scalar_tensor" else 1])
        if name == "index":
            return getattr(args[0], "bounds", UNBOUNDED if out.is_floating_point() else INTEGERS_IN_TENSORS)
        if name == "where":
            return self._chosen(*args)
        (a, b), (c, d) = (self.bounds_or_any(x) for x in (*args, 0)[:2])
        if name in ("sub", "rsub", "add") and kwargs.get("alpha", 1) != 1:
            return UNBOUNDED
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
            mode = kwargs.get("rounding_mode") if name == "div" else "floor"
            return (min(ends), max(ends)) if mode is None else _rounded(min(ends), max(ends), down=mode == "floor")
        if name == "remainder" and c > 0:
            return 0, d if out.is_floating_point() else d - 1
        if name == "bitwise_and" and max(a, c) >= 0:
            return 0, min(y for x, y in ((a, b), (c, d)) if x >= 0)
        if name == "pow":
            is_even = isinstance(args[1], int | float) and args[1] % 2 == 0
            return (0, math.inf) if is_even or a > 0 else UNBOUNDED
        if name in ("exp", "exp2"):
            return 0, (math.exp if name == "exp" else math.exp2)(min(b, 700.0))
        return UNBOUNDED

    def _first(self, x: Any) -> Any:
        return self._firsts.get(id(x), x)

    def _chosen(self, condition: Any, x: Any, y: Any) -> Bounds:
        """Return the bounds of where(condition, x, y); a comparison bounds the operand that it selects."""
        (a, b), (c, d) = self.bounds_or_any(x), self.bounds_or_any(y)
        name, compared, limit = self._comparisons.get(id(condition), ("", None, None))
        low, high = self.bounds_or_any(limit)
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


class _Lookups(TorchFunctionMode):
    """Shows indexing by numbers as one operation, as torch does where it traces a function for flex_attention."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            if all(isinstance(i, Tensor | int) for i in index):
                numbers = [i if isinstance(i, Tensor) else torch.tensor(i, device=tensor.device) for i in index]
                return torch.ops.aten.index(tensor, numbers)
        return func(*args, **(kwargs or {}))


class _Questions(TorchFunctionMode):
    """Notes an error if a function asks for a dtype that differs in Python."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _CASTS and out is args[0] and self._trace.is_wider_in_python(out):
            return self._trace.cast(out)
        asks = func in _QUESTIONS or (func in _CASTS and isinstance(out, str))
        if asks and any(isinstance(x, Tensor) and self._trace.is_wider_in_python(x) for x in args):
            self._trace.errors[DTYPE] = None
        return out


def follow(
    trace: Trace, function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int], is_score: bool
) -> tuple[str | None, Any]:
    """Follow a mask_mod or score_mod.

    Returns the first error, or None, and what the function returned.

    sizes: batch, query heads, queries and keys.
    """
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(compat.compile_lock)
            for context in (torch.no_grad(), compat.outside_transforms(), compat.without_dispatch_modes()):
                stack.enter_context(context)
            stack.enter_context(compat.fake_mode())
            indices = [torch.zeros((), dtype=torch.int32, device=device) for _ in sizes]
            for x, n in zip(indices, sizes, strict=True):
                trace.learn(x, (0, n - 1))
            scores = [torch.zeros((), device=device)] if is_score else []
            for x in scores:
                trace.learn(x, UNBOUNDED)
            trace.start(scores, indices)
            with _Lookups(), _Questions(trace), trace:
                value = function(*scores, *indices)
    except Exception as error:
        what = error if isinstance(error, compat.MissingFromTorch) else type(error).__name__
        return f"{UNREADABLE}: {what}", None
    trace.check_result(value)
    return next(iter(trace.errors), None), value
