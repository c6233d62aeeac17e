"""Whether torch's FLASH backend computes a function rightly: it gets much wrong without saying so.

Read, and in part run, of its compiler in torch 2.11 to 2.13 (CuteDSLOpOverrides, CuTe, flash-attn-4 4.0.0b36): `where`
between two numbers makes booleans of them; remainders have the sign of the dividend, as in C; a cast to bool keeps the
lowest bit; negative indices read before a tensor; a view of a tensor is read as the tensor; what is infinite where the
mask hides is multiplied by 0 in the backward pass; a mask that is a constant looks at no blocks (pytorch issue 188322);
GPUs of capability 10 and above read scores' tensors by vectors, some wrongly (issue 188878). So a function may do only
what is known to be right.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmasks import compat

UNREADABLE = "its function cannot be looked at"
NO_BLOCKS = "it looks at no blocks where the mask's function is a constant"
_BOOLEANS = "its compiler makes booleans of two numbers that torch.where chooses from"
_REMAINDER = "its compiler gives remainders of negative numbers another sign than torch does"
_TRUTH = "its compiler takes the lowest bit of a number for its truth"
_INDEX = "its compiler reads wrongly where an index is negative, which it may be here"
_VIEW = "its compiler reads tensors wrongly that the function changes as a whole"
_VECTORS = "its compiler reads some tensors wrongly on GPUs of this kind"
_INFINITE = "its backward pass is NaN where a factor is infinite and hidden, which it may be here"

_CONSTANTS = {"full", "zeros", "ones", "scalar_tensor", "full_like", "zeros_like", "ones_like"}
_CONSTANTS |= {"new_full", "new_zeros", "new_ones", "lift_fresh", "lift_fresh_copy"}
_SAME = {"_to_copy", "alias", "clone", "convert_element_type", "detach", "expand", "view"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_RIGHT = {"abs", "add", "div", "exp", "exp2", "floor_divide", "index", "maximum", "minimum", "mul", "neg", "remainder"}
_RIGHT |= {"rsub", "sigmoid", "sub", "tanh", "tanh_approx", "where"} | _CONSTANTS | _SAME | _COMPARISONS
_RIGHT |= {f"{kind}_{name}" for kind in ("bitwise", "logical") for name in ("and", "or", "not")} | {"bitwise_xor"}

Bounds = tuple[float, float]
_ANYTHING: Bounds = (-math.inf, math.inf)
_TABLE: Bounds = (-(2.0**30), 2.0**30)  # the whole numbers that tensors are taken to hold


def mistake(
    function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int], scored: bool = False
) -> str | None:
    """Why FLASH may get a mask_mod wrong, or a score_mod where `scored`; None where it does not.

    sizes: of batch, query heads, queries and keys. That it looks at no blocks is said of every constant: whether that
    matters, the blocks tell.
    """
    seen = _Seen(scored, scored and compat.FLASH_READS_VECTORS and _is_blackwell(device))
    try:
        with contextlib.ExitStack() as inside:
            for context in (torch.no_grad(), compat.outside_transforms(), compat.without_dispatch_modes()):
                inside.enter_context(context)
            inside.enter_context(compat.fake_mode())
            given = [torch.zeros((), dtype=torch.int32, device=device) for _ in sizes]
            for x, n in zip(given, sizes, strict=True):
                seen.learn(x, (0, n - 1))
            scores = [torch.zeros((), device=device)] if scored else []
            with compat.TransformGetItemToIndex(), seen:
                value = function(*scores, *given)
    except Exception as error:
        return f"{UNREADABLE}: {type(error).__name__}"
    seen.check(value)
    if not seen.mistakes and not scored and not seen.varies(value):
        return NO_BLOCKS
    return next(iter(seen.mistakes), None)


def _is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def _rounded(low: float, high: float) -> Bounds:
    """The bounds of values between these after rounding to whole numbers, in whichever way."""
    return low if math.isinf(low) else math.floor(low), high if math.isinf(high) else math.ceil(high)


class _Seen(compat.TorchDispatchMode):
    """Follows the operations of a function: what are numbers, between which bounds values are, and the mistakes.

    Unlike a tracer it is of one thread: torch refuses compiled calls in all threads while one of them traces.
    """

    def __init__(self, scored: bool, by_vectors: bool) -> None:
        super().__init__()
        self.scored, self.by_vectors = scored, by_vectors
        self.mistakes: dict[str, None] = {}
        self._bounds: dict[int, Bounds] = {}  # by the ids of tensors, as all here
        self._constants: set[int] = set()
        self._unsure: set[int] = set()  # remainders that are wrong, unless only 0 is asked for
        self._compared: dict[int, tuple[str, Any, Any]] = {}
        self._made: dict[tuple[Any, ...], Tensor] = {}  # by an operation and what it is of
        self._firsts: dict[int, Tensor] = {}  # what is made twice is the first of both
        self._held: list[Tensor] = []  # so that an id stays its own
        self._decompositions = compat.inductor_decompositions()

    def learn(self, x: Tensor, bounds: Bounds) -> None:
        """From now on this tensor is known, with its bounds."""
        self._held.append(x)
        low, high = bounds
        fits = x.is_floating_point() or -(2**31) <= low <= high < 2**31
        self._bounds[id(x)] = bounds if fits and not (math.isnan(low) or math.isnan(high)) else _ANYTHING

    def varies(self, x: Any) -> bool:
        """Whether the compiler sees something else than a number in it."""
        return isinstance(x, Tensor) and id(x) not in self._constants

    def check(self, *used: Any) -> None:
        """Note what must not be used as it is."""
        if any(id(x) in self._unsure for x in used):
            self.mistakes[_REMAINDER] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question for a tensor's device, say
            return func(*args, **kwargs)
        for decomposed in (self._decompositions.get(func), func.decompose):
            if decomposed is not None:
                with self:
                    out = decomposed(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        out = func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        right = name in _RIGHT or (name == "pow" and type(args[1]) is int and args[1] > 0)
        if func._schema.is_mutable or not right or not isinstance(out, Tensor):
            self.mistakes[f"nobody has shown that its compiler gets `{name}` right"] = None
        else:
            self._find_mistakes(name, out, args)
            self.learn(out, self._bounds_of(name, out, args, kwargs))
            if name in _COMPARISONS:
                self._compared[id(out)] = (name, *args[:2])
            if not kwargs and all(isinstance(x, Tensor | int | float) for x in args):
                of = (func, *(id(self._first(x)) if isinstance(x, Tensor) else (type(x), x) for x in args))
                self._firsts[id(out)] = self._made.setdefault(of, out)
        return out

    def _find_mistakes(self, name: str, out: Tensor, args: Any) -> None:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if not (name in ("eq", "ne") and type(args[1]) is int and args[1] == 0):
            self.check(*tensors)
        if name == "index":
            self._check_index(*args)
        elif any(x.ndim for x in tensors):
            self.mistakes[_VIEW] = None
        of_zero = name == "mul" and any(type(x) is int and x == 0 for x in args)
        if name in _CONSTANTS or of_zero or (name != "index" and not any(map(self.varies, tensors))):
            self._constants.add(id(out))
        if name == "where" and out.dtype != torch.bool and not any(map(self.varies, args[1:])):
            self.mistakes[_BOOLEANS] = None
        if name == "remainder" and not self._by_either_sign(out, *args[:2]):
            self._unsure.add(id(out))
        truth = name.startswith("logical") or (name in _SAME and out.dtype == torch.bool)
        if truth and any(x.dtype != torch.bool for x in tensors):
            self.mistakes[_TRUTH] = None
        if name in _SAME and out.dtype in (torch.float16, torch.bfloat16):
            self.mistakes["its compiler does not round to half precision"] = None
        if self.scored and name == "div" and self.varies(args[1]):
            self.mistakes[_INFINITE] = None
        if self.scored and name in ("exp", "exp2") and self._of(args[0])[1] > 80:
            self.mistakes[_INFINITE] = None

    def _check_index(self, table: Tensor, indices: Sequence[Tensor | None]) -> None:
        self.check(*indices)
        if table.dtype == torch.uint8:
            self.mistakes["its compiler takes uint8 for signed"] = None
        if any(i is None or i.dtype == torch.bool or self._of(i)[0] < 0 for i in indices):
            self.mistakes[_INDEX] = None
        if self.by_vectors:
            self.mistakes[_VECTORS] = None

    def _by_either_sign(self, out: Tensor, dividend: Any, divisor: Any) -> bool:
        """Whether a remainder is the same by either sign."""
        ones = type(divisor) is int and abs(divisor) == 1 and not out.is_floating_point()
        return ones or (self._of(dividend)[0] >= 0 and self._of(divisor)[0] >= 0)

    def _of(self, x: Any) -> Bounds:
        return (x, x) if isinstance(x, int | float) else self._bounds.get(id(x), _ANYTHING)

    def _bounds_of(self, name: str, out: Tensor, args: Any, kwargs: Any) -> Bounds:
        if out.dtype == torch.bool:
            return 0, 1
        if name in _SAME:
            bounds = self._of(args[0]) if out.dtype not in (torch.int8, torch.uint8, torch.int16) else _ANYTHING
            return bounds if out.is_floating_point() else _rounded(*bounds)
        if name in ("full", "full_like", "scalar_tensor"):
            return self._of(args[0 if name == "scalar_tensor" else 1])
        if name == "index":
            return getattr(args[0], "bounds", _ANYTHING if out.is_floating_point() else _TABLE)
        if name == "where":
            return self._chosen(*args)
        (a, b), (c, d) = (self._of(x) for x in (*args, 0)[:2])
        if name in ("sub", "rsub", "add") and kwargs.get("alpha", 1) != 1:
            return _ANYTHING
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
            return (0, math.inf) if args[1] % 2 == 0 else _ANYTHING
        if name in ("exp", "exp2"):
            return 0, (math.exp if name == "exp" else math.exp2)(min(b, 700.0))
        return _ANYTHING

    def _first(self, x: Any) -> Any:
        return self._firsts.get(id(x), x)

    def _chosen(self, condition: Any, x: Any, y: Any) -> Bounds:
        """Of where(condition, x, y): what was compared is where it is chosen on its side of what it was compared to."""
        (a, b), (c, d) = self._of(x), self._of(y)
        name, one, other = self._compared.get(id(condition), ("", None, None))
        low, high = self._of(other)
        one, x, y = map(self._first, (one, x, y))
        if one is y and name in ("lt", "le"):
            c = max(c, low)
        elif one is y and name in ("gt", "ge"):
            d = min(d, high)
        elif one is x and name in ("lt", "le"):
            b = min(b, high)
        elif one is x and name in ("gt", "ge"):
            a = max(a, low)
        return min(a, c), max(b, d)
