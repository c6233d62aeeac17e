"""Ranges: what a mask says of a whole block of indices, from one call of its function.

A mask is a function of indices. Called with *ranges* of indices it answers for every pair of a block at once.
Take causal, `kv <= q`, and the block of queries 128..255 against keys 0..127: the largest kv, 127, is at most the
smallest q, 128, so the mask is certainly true there: a full block. Against keys 256..383 the smallest kv is above
the largest q: not possibly true, an empty block. Against keys 128..255 it is possible and not certain: undecided,
and only such blocks need to be looked at element by element.

So a Range stands for a number that is somewhere between `lo` and `hi`; arithmetic on ranges gives the range of all
results (interval arithmetic), a comparison gives a truth value that is a range too, `lo` "certainly" and `hi`
"possibly". `lo` and `hi` are tensors that broadcast over [batch, heads, query blocks, key blocks], so one call
answers for all blocks, and the shape of the answer says whether the mask depends on the batch or the head at all.

Every result holds each value that can occur (soundness); an operation that is not known here gives "anything", so
that a block is looked at element by element: slower, never wrong. Bounds are float64, exact for integers below
2^52; an integer that its dtype might not hold becomes "anything", and floats are widened by their rounding error.
A float may be NaN only where its range is all of -inf..inf.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_INF = math.inf
_EXACT = 2.0**52  # integers below are exact in float64
_NUMBERS = (bool, int, float)
_CONSTANTS = ("zeros_like", "ones_like", "full_like")


class GiveUp(Exception):
    """The function cannot be evaluated on ranges at all; every block is undecided."""


class Range:
    """A number (or truth value) somewhere between `lo` and `hi`, of torch type `dtype`, for each of many blocks.

    `limit` bounds the absolute value, as a Python number: where it shows that nothing overflows, no tensor has to
    be looked at. `reached` says that in some block the value `limit` itself occurs.
    """

    __slots__ = ("dtype", "hi", "limit", "lo", "reached")
    __array_ufunc__ = None  # NumPy's numbers leave operators to this class

    def __init__(self, lo: Tensor, hi: Tensor, dtype: torch.dtype, limit: float = _INF, reached: bool = False) -> None:
        self.lo, self.hi, self.dtype, self.limit, self.reached = lo, hi, dtype, limit, reached

    @classmethod
    def of_indices(cls, lo: Tensor, hi: Tensor, limit: int) -> Range:
        """Indices from lo to hi inclusive, the greatest of all `limit`; the same tensor twice for exact ones."""
        low = lo.double()
        return cls(low, low if hi is lo else hi.double(), torch.int64, limit, reached=True)

    @property
    def exact(self) -> bool:
        """Whether this is known to be a single value in each block."""
        return self.lo is self.hi

    @property
    def device(self) -> torch.device:
        return self.lo.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size(())  # to the mask's function an index is a number

    @property
    def ndim(self) -> int:
        return 0

    def dim(self) -> int:
        return 0

    @property
    def is_cuda(self) -> bool:
        return self.lo.is_cuda

    def __getattr__(self, name: str) -> Any:
        if not hasattr(torch.Tensor, name):
            raise AttributeError(f"an index has no attribute {name!r}")
        method = getattr(torch.Tensor, name)
        if not callable(method):
            raise GiveUp(f"the attribute {name!r} of an index")
        return lambda *args, **kwargs: _dispatch(method, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def _refuse(self, what: str) -> Any:
        raise ValueError(
            f"a mask function may not {what}: its arguments stand for many indices at once. Use `&`, `|`, `~` for "
            "and, or, not, `(a < b) & (b < c)` for chained comparisons, and torch.where for if."
        )

    def __bool__(self) -> bool:
        return bool(self._refuse("decide by `if`, `and`, `or`, `not` or a chained comparison of an index"))

    def item(self) -> Any:
        return self._refuse("call `.item()` on an index")

    def tolist(self) -> Any:
        return self._refuse("call `.tolist()` on an index")

    def __int__(self) -> int:
        return int(self._refuse("call `int()` on an index"))

    def __float__(self) -> float:
        return float(self._refuse("call `float()` on an index"))

    def __index__(self) -> int:
        return int(self._refuse("use an index as a Python integer (to index a list, or in `range`)"))

    def __iter__(self) -> Any:
        return self._refuse("iterate over an index")

    def __getitem__(self, index: Any) -> Any:
        raise GiveUp("an index is indexed itself")

    def __len__(self) -> int:
        return int(self._refuse("take the `len()` of an index"))

    __hash__ = object.__hash__


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def operate(self: Range, *others: Any) -> Any:
        if others and isinstance(others[0], np.bool_):
            raise GiveUp("a truth value of NumPy, which torch takes for a number")
        if others and isinstance(others[0], np.integer | np.floating):
            others = (others[0].item(),)
        if others and not isinstance(others[0], Range | Tensor | int | float):
            return NotImplemented
        return _dispatch(method, (self, *others), {})

    return operate


_OPERATORS = """
    add radd sub rsub mul rmul floordiv rfloordiv truediv rtruediv mod rmod pow rpow and rand or ror xor rxor
    lshift rlshift rshift rrshift neg pos abs invert eq ne lt le gt ge
"""
for _name in _OPERATORS.split():
    setattr(Range, f"__{_name}__", _operator(f"__{_name}__"))


_not_understood: ContextVar[list[str] | None] = ContextVar("not_understood", default=None)


class _Mode(TorchFunctionMode):
    """Lets a range index a tensor that knows nothing of ranges."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.Tensor.__getitem__ and not any(
            isinstance(a, Range) or (isinstance(a, tuple | list) and any(isinstance(x, Range) for x in a))
            for a in (*args, *kwargs.values())
        ):
            return func(*args, **kwargs)
        return _dispatch(func, args, kwargs)


def evaluate(function: Callable[..., Any], b: Range, h: Range, q: Range, kv: Range) -> tuple[Range, list[str]]:
    """Call a mask's function on ranges: the truth value for each block, and the operations not understood.

    Raises GiveUp where nothing can be said, ValueError or TypeError where the function is no mask.
    """
    unknown: list[str] = []
    token = _not_understood.set(unknown)
    try:
        with _Mode():
            result = function(b, h, q, kv)
    finally:
        _not_understood.reset(token)
    if isinstance(result, bool) or not isinstance(result, Range | Tensor):
        raise TypeError(f"a mask function must return a boolean tensor, got {result!r}.")
    if result.dtype is not torch.bool:
        raise TypeError(
            f"a mask function must return a boolean tensor, got one of {str(result.dtype).removeprefix('torch.')}; "
            "compare, as in `q >= kv`."
        )
    return _as_range(result), unknown


def _dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if name.startswith("__"):
        name = name.strip("_")
    elif name.endswith("_"):
        raise GiveUp(f"{name} changes an index in place")
    constant = name.startswith("new_") or name in _CONSTANTS  # of some index's dtype and device
    if constant and not any(isinstance(x, Range) for x in (*args[1:], *kwargs.values())):
        like = torch.zeros((), dtype=args[0].dtype, device=args[0].device)
        return func(like, *args[1:], **kwargs)
    rule = _RULES.get(name)
    if rule is not None:
        try:
            result = rule(*args, **kwargs)
        except TypeError as error:  # an overload that the rule does not have
            if "argument" not in str(error):
                raise
            result = None
        if result is not None:
            return result
    unknown = _not_understood.get()
    if unknown is not None and name not in unknown:
        unknown.append(name)
    return _anything(func, args, kwargs)


def _anything(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Range:
    """The result of an operation that is not known: any value of the dtype that it has on plain numbers."""
    ranges: list[Range] = []

    def sample(value: Any) -> Any:
        if isinstance(value, Range):
            ranges.append(value)
            return torch.zeros((), dtype=value.dtype, device=value.device)
        return type(value)(sample(v) for v in value) if type(value) in (tuple, list) else value

    try:
        result = func(*(sample(a) for a in args), **{k: sample(v) for k, v in kwargs.items()})
    except Exception as error:  # the element by element evaluation says what is wrong, if anything is
        raise GiveUp(str(error)) from error
    if not isinstance(result, Tensor) or result.ndim:
        raise GiveUp(f"{func} gives no number")
    shape = torch.broadcast_shapes(*(r.lo.shape for r in ranges))
    device = ranges[0].device
    if result.dtype == torch.bool:
        certain = torch.zeros(shape, dtype=torch.bool, device=device)
        return _truth(certain, ~certain)
    hi = torch.full(shape, _INF, dtype=torch.float64, device=device)
    return Range(-hi, hi, result.dtype)


def _truth(lo: Tensor, hi: Tensor) -> Range:
    return Range(lo, hi, torch.bool, 1.0)


def _as_range(value: Any) -> Range:
    if isinstance(value, Range):
        return value
    if isinstance(value, _NUMBERS):
        kind = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
        try:
            value = torch.tensor(value, dtype=kind, device="cpu")  # whatever the default device
        except (RuntimeError, OverflowError) as error:
            raise GiveUp(f"{value} is no int64") from error
    if isinstance(value, Tensor) and value.ndim == 0:
        lo, hi, limit = _bounds_of(value)
        return Range(lo, hi, value.dtype, limit)
    raise GiveUp(f"{value!r} is no number")


def _bounds_of(values: Tensor) -> tuple[Tensor, Tensor, float]:
    """The values as bounds, the same tensor twice where float64 holds them all, and the greatest absolute value."""
    if values.dtype == torch.bool:
        return values, values, 1.0
    if values.is_complex():
        raise GiveUp("complex numbers")
    bound = values.detach().double()
    limit = float(bound.abs().max())
    if limit < _EXACT:
        return bound, bound, limit
    end = torch.full_like(bound, _INF)
    if not values.dtype.is_floating_point:  # conversion may have rounded
        return torch.nextafter(bound, -end), torch.nextafter(bound, end), _INF
    if math.isnan(limit):
        return torch.where(bound.isnan(), -_INF, bound), torch.where(bound.isnan(), _INF, bound), _INF
    return bound, bound, limit


def _number(value: Any) -> Range:
    r = _as_range(value)
    if r.dtype != torch.bool:
        return r
    lo = r.lo.double()
    return Range(lo, lo if r.exact else r.hi.double(), torch.int64, 1.0)


def _common(*operands: Any) -> torch.dtype:
    """The dtype of an operation on these. Python numbers give way to tensors of their category.

    Of several in one category it is the narrowest, the more cautious one: torch's promotion depends on which of the
    operands vmap sees as batched, and some operations compute in the narrower dtype.
    """
    dtypes = {x.dtype for x in operands if isinstance(x, Range | Tensor)}
    if any(d.is_complex for d in dtypes):
        raise GiveUp("complex numbers")
    kinds = [{d for d in dtypes if d.is_floating_point}, {d for d in dtypes if _is_integer(d)}]
    if kinds[0]:
        return _narrowest(kinds[0])
    if any(isinstance(x, float) for x in operands):
        return torch.get_default_dtype()
    if kinds[1]:
        return _narrowest(kinds[1])
    return torch.int64 if any(type(x) is int for x in operands) else torch.bool


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype != torch.bool


def _narrowest(dtypes: set[torch.dtype]) -> torch.dtype:
    if len(dtypes) == 1:
        return next(iter(dtypes))
    try:
        wide = functools.reduce(torch.promote_types, dtypes)
    except RuntimeError as error:  # most unsigned types do not mix
        raise GiveUp(str(error)) from error
    if len(dtypes) > 2 or wide not in dtypes:
        raise GiveUp(f"an operation that mixes {dtypes}")
    return next(d for d in dtypes if d != wide)


def _result(lo: Tensor, hi: Tensor, dtype: torch.dtype, limit: float, exact: bool = False) -> Range:
    """A result of arithmetic: widened by rounding, or to anything where the dtype might not hold it."""
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        lo = (lo - lo.abs() * (2 * info.eps) - info.tiny).nan_to_num(-_INF, _INF, -_INF)
        hi = (hi + hi.abs() * (2 * info.eps) + info.tiny).nan_to_num(_INF, _INF, -_INF)
        lo = torch.where(lo < -info.max, -_INF, lo.clamp(max=info.max))
        hi = torch.where(hi > info.max, _INF, hi.clamp(min=-info.max))
        return Range(lo, hi, dtype)
    most = min(float(torch.iinfo(dtype).max), _EXACT)
    least = max(float(torch.iinfo(dtype).min), -_EXACT)
    if limit < min(most, -least):
        return Range(lo, lo if exact else hi, dtype, limit)
    outside = ~((lo >= least) & (hi <= most))  # also NaN
    return Range(torch.where(outside, -_INF, lo), torch.where(outside, _INF, hi), dtype)


def _as_dtype(value: Any, dtype: torch.dtype) -> Range:
    """A number as one of that dtype: rounded where a float, anything where an integer of it may not hold the number."""
    r = _number(value)
    if r.dtype == dtype:
        return r
    if dtype.is_floating_point and not r.dtype.is_floating_point and r.limit < 1 / torch.finfo(dtype).eps:
        return Range(r.lo, r.hi, dtype, r.limit)
    if isinstance(value, _NUMBERS) and r.exact and float(r.lo.to(dtype)) == float(r.lo):
        return Range(r.lo, r.hi, dtype, r.limit)
    return _result(r.lo, r.hi, dtype, r.limit, r.exact)


def _both(a: Any, b: Any) -> tuple[Range, Range, torch.dtype] | None:
    dtype = _common(a, b)
    return None if dtype == torch.bool else (_as_dtype(a, dtype), _as_dtype(b, dtype), dtype)


def _maybe_nan(*operands: Range) -> Tensor:
    masks = [(x.lo == -_INF) & (x.hi == _INF) for x in operands]
    return masks[0] if len(masks) == 1 else masks[0] | masks[1]


def _inexact(*operands: Range) -> Tensor:
    """Where an end is infinite, or an integer that float64 may have rounded."""
    masks = [~((x.lo > -_EXACT) & (x.hi < _EXACT)) for x in operands]
    return masks[0] | masks[1]


def _anything_where(places: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(places, -_INF, lo), torch.where(places, _INF, hi)


# --- arithmetic ---


def _add(a: Any, b: Any, *, alpha: Any = 1) -> Range | None:
    both = _both(a, b)
    if both is None or alpha != 1:
        return None
    x, y, dtype = both
    exact = x.exact and y.exact
    lo = x.lo + y.lo
    result = _result(lo, lo if exact else x.hi + y.hi, dtype, x.limit + y.limit, exact)
    result.reached = x.reached and isinstance(b, int) and b >= 0
    return result


def _sub(a: Any, b: Any, *, alpha: Any = 1) -> Range | None:
    both = _both(a, b)
    if both is None or alpha != 1:
        return None
    x, y, dtype = both
    exact = x.exact and y.exact
    lo = x.lo - y.hi
    return _result(lo, lo if exact else x.hi - y.lo, dtype, x.limit + y.limit, exact)


def _mul(a: Any, b: Any) -> Range | None:
    both = _both(a, b)
    if both is None:
        return None
    x, y, dtype = both
    limit = x.limit * y.limit if min(x.limit, y.limit) > 0 else 0.0
    if x.exact and y.exact:
        lo = x.lo * y.lo
        return _result(lo, lo, dtype, limit, True)
    lo, hi = _corners(x, y, torch.mul)
    if dtype.is_floating_point:
        lo, hi = _anything_where(_inexact(x, y), lo, hi)  # 0 * inf is NaN
    return _result(lo, hi, dtype, limit)


def _corners(x: Range, y: Range, operation: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """The least and greatest result of an operation that is monotone in each operand; NaN (0 * inf) counts as 0."""
    ends = [operation(a, b).nan_to_num(0.0, _INF, -_INF) for a in {x.lo, x.hi} for b in {y.lo, y.hi}]
    lo = hi = ends[0]
    for end in ends[1:]:
        lo, hi = torch.minimum(lo, end), torch.maximum(hi, end)
    return lo, hi


def _neg(a: Any) -> Range | None:
    x = _as_range(a)
    if x.dtype == torch.bool:
        return None
    lo = -x.hi
    return _result(lo, lo if x.exact else -x.lo, x.dtype, x.limit, x.exact)


def _abs(a: Any) -> Range | None:
    x = _as_range(a)
    if x.dtype == torch.bool:
        return None
    lo, hi = torch.maximum(x.lo, -x.hi).clamp(min=0.0), torch.maximum(x.hi, -x.lo)
    if x.dtype.is_floating_point:
        lo, hi = _anything_where(_maybe_nan(x), lo, hi)
    return _result(lo, hi, x.dtype, x.limit)


def _divide(x: Range, y: Range, rounding: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor]:
    lo, hi = _corners(x, y, lambda a, b: a / b if rounding is None else rounding(a / b))
    through_zero = (y.lo <= 0) & (y.hi >= 0)
    return _anything_where(through_zero | _inexact(x, y), lo, hi)


def _floor_divide(a: Any, b: Any) -> Range | None:
    both = _both(a, b)
    if both is None or both[2].is_floating_point:  # a float's quotient may round up to the next integer
        return None
    x, y, dtype = both
    lo, hi = _divide(x, y, torch.floor)
    limit = x.limit + 1 if isinstance(b, int) and b != 0 else _INF
    return _result(lo, hi, dtype, limit)


def _true_divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Range | None:
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    both = _both(a, b)
    if both is None:
        return None
    x, y, dtype = both
    if rounding_mode == "trunc" and not dtype.is_floating_point:
        return _result(*_divide(x, y, torch.trunc), dtype, _INF)
    if rounding_mode is not None:
        return None
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    return _result(*_divide(_as_dtype(x, dtype), _as_dtype(y, dtype), None), dtype, _INF)


def _remainder(a: Any, b: Any) -> Range | None:
    """x % y, of y's sign. With one y, and x within one multiple of it: the remainders of x's ends; else all of them."""
    both = _both(a, b)
    if both is None or both[2].is_floating_point:
        return None
    x, y, dtype = both
    lo_multiple, hi_multiple = torch.floor(x.lo / y.lo), torch.floor(x.hi / y.lo)
    one = (y.lo == y.hi) & (y.lo != 0) & (lo_multiple == hi_multiple) & ~_inexact(x, y)
    lo = torch.where(one, x.lo - y.lo * lo_multiple, (y.lo + 1).clamp(max=0.0))
    hi = torch.where(one, x.hi - y.lo * hi_multiple, (y.hi - 1).clamp(min=0.0))
    limit = abs(b) if isinstance(b, int) and b != 0 else _INF
    return _result(*_anything_where((y.lo <= 0) & (y.hi >= 0), lo, hi), dtype, limit)


def _power(a: Any, exponent: Any) -> Range | None:
    if type(exponent) is not int or exponent not in (1, 2) or not isinstance(a, Range) or a.dtype == torch.bool:
        return None
    if exponent == 1:
        return a
    size = _abs(a)
    return None if size is None else _mul(size, size)


def _shift_left(a: Any, b: Any) -> Range | None:
    return _mul(a, 2**b) if _shifts(a, b) else None


def _shift_right(a: Any, b: Any) -> Range | None:
    return _floor_divide(a, 2**b) if _shifts(a, b) else None


def _shifts(a: Any, b: Any) -> bool:
    return type(b) is int and 0 <= b < 32 and isinstance(a, Range) and _is_integer(a.dtype)


def _minimum(a: Any, b: Any) -> Range | None:
    return _extreme(a, b, torch.minimum)


def _maximum(a: Any, b: Any) -> Range | None:
    return _extreme(a, b, torch.maximum)


def _min_max(rule: Callable[[Any, Any], Range | None]) -> Callable[[Any, Any], Range | None]:
    """torch.min and torch.max of two tensors; a number as the second argument is a dimension."""
    return lambda a, b: None if isinstance(b, _NUMBERS) else rule(a, b)


def _extreme(a: Any, b: Any, operation: Callable[..., Tensor]) -> Range | None:
    both = _both(a, b)
    if both is None:
        return None
    x, y, dtype = both
    exact = x.exact and y.exact
    lo = operation(x.lo, y.lo)
    hi = lo if exact else operation(x.hi, y.hi)
    if dtype.is_floating_point and not exact:
        lo, hi = _anything_where(_maybe_nan(x, y), lo, hi)
    return Range(lo, hi, dtype, max(x.limit, y.limit))


def _clamp(a: Any, min: Any = None, max: Any = None) -> Range | None:  # torch's names
    raised = a if min is None else _maximum(a, min)
    return raised if max is None or raised is None else _minimum(raised, max)


def _where(condition: Any, a: Any = None, b: Any = None) -> Range | None:
    if a is None or b is None:
        return None
    c = _as_range(condition)
    if c.dtype != torch.bool:
        return None
    dtype = _common(a, b)
    if dtype == torch.bool:
        x, y = _as_range(a), _as_range(b)
        lo = torch.where(c.lo, x.lo, torch.where(c.hi, x.lo & y.lo, y.lo))
        hi = torch.where(c.lo, x.hi, torch.where(c.hi, x.hi | y.hi, y.hi))
        return _truth(lo, hi)
    x, y = _as_dtype(a, dtype), _as_dtype(b, dtype)
    exact = c.exact and x.exact and y.exact
    lo = torch.where(c.lo, x.lo, torch.where(c.hi, torch.minimum(x.lo, y.lo), y.lo))
    hi = lo if exact else torch.where(c.lo, x.hi, torch.where(c.hi, torch.maximum(x.hi, y.hi), y.hi))
    return Range(lo, hi, dtype, max(x.limit, y.limit))


def _rounded(operation: Callable[[Tensor], Tensor]) -> Callable[[Any], Range]:
    def rule(a: Any) -> Range:
        x = _as_range(a)
        if not x.dtype.is_floating_point:
            return x
        return Range(operation(x.lo), operation(x.hi), x.dtype, x.limit)

    return rule


# --- truth ---


def _compare(
    certain: Callable[[Range, Range], Tensor], possible: Callable[[Range, Range], Tensor]
) -> Callable[[Any, Any], Range]:
    def rule(a: Any, b: Any) -> Range:
        dtype = _common(a, b)
        x, y = (_number(v) if dtype == torch.bool else _as_dtype(v, dtype) for v in (a, b))
        if x.exact and y.exact:
            truth = certain(x, y)
            return _truth(truth, truth)
        return _truth(certain(_without_nan(x), _without_nan(y)), possible(x, y))

    return rule


def _without_nan(r: Range) -> Range:
    """With ends that compare as false where the number may be NaN."""
    if not r.dtype.is_floating_point:
        return r
    nan = _maybe_nan(r)
    return Range(torch.where(nan, math.nan, r.lo), torch.where(nan, math.nan, r.hi), r.dtype)


_less = _compare(lambda x, y: x.hi < y.lo, lambda x, y: x.lo < y.hi)
_at_most = _compare(lambda x, y: x.hi <= y.lo, lambda x, y: x.lo <= y.hi)
_equal = _compare(
    lambda x, y: (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo),
    lambda x, y: (x.lo <= y.hi) & (y.lo <= x.hi),
)


def _greater(a: Any, b: Any) -> Range:
    return _less(b, a)


def _at_least(a: Any, b: Any) -> Range:
    return _at_most(b, a)


def _unequal(a: Any, b: Any) -> Range:
    return _not(_equal(a, b))


def _boolean(value: Any) -> Range:
    r = _as_range(value)
    return r if r.dtype == torch.bool else _unequal(r, 0)


def _not(a: Any) -> Range:
    x = _boolean(a)
    lo = ~x.hi
    return _truth(lo, lo if x.exact else ~x.lo)


def _and(a: Any, b: Any) -> Range:
    x, y = _boolean(a), _boolean(b)
    lo = x.lo & y.lo
    return _truth(lo, lo if x.exact and y.exact else x.hi & y.hi)


def _or(a: Any, b: Any) -> Range:
    x, y = _boolean(a), _boolean(b)
    lo = x.lo | y.lo
    return _truth(lo, lo if x.exact and y.exact else x.hi | y.hi)


def _xor(a: Any, b: Any) -> Range:
    x, y = _boolean(a), _boolean(b)
    lo = (x.lo & ~y.hi) | (~x.hi & y.lo)
    return _truth(lo, lo if x.exact and y.exact else (x.hi & ~y.lo) | (~x.lo & y.hi))


def _bitwise(rule: Callable[..., Range]) -> Callable[..., Range | None]:
    def of_truth_values(*operands: Any) -> Range | None:
        if all(isinstance(x, bool) or getattr(x, "dtype", None) == torch.bool for x in operands):
            return rule(*operands)
        return None  # of the bits of integers

    return of_truth_values


def _invert(a: Any) -> Range | None:
    x = _as_range(a)
    if x.dtype.is_floating_point:
        return None
    return _not(x) if x.dtype == torch.bool else _sub(-1, x)


# --- conversion and indexing ---


def _cast(to: torch.dtype) -> Callable[..., Range]:
    def rule(a: Any, **_: Any) -> Range:
        x = _as_range(a)
        if to == torch.bool:
            return _boolean(x)
        if to.is_complex:
            raise GiveUp("complex numbers")
        if x.dtype.is_floating_point and not to.is_floating_point:
            return _result(x.lo.trunc(), x.hi.trunc(), to, _INF)
        return _as_dtype(x, to)

    return rule


def _to(a: Any, *args: Any, **kwargs: Any) -> Range:
    values = (*args, *kwargs.values())
    if not isinstance(a, Range) or any(isinstance(x, str) and "Tensor" in x for x in values):
        raise GiveUp("a conversion by name")
    wanted = [x for x in values if isinstance(x, torch.dtype)]
    wanted += [x.dtype for x in values if isinstance(x, Range | Tensor)]
    return _cast(wanted[0])(a) if wanted else a


def _index(tensor: Any, indices: Any) -> Any:
    """tensor[indices]: the least and greatest element that the indices can reach."""
    indices = indices if isinstance(indices, tuple) else (indices,)
    if not any(isinstance(i, Range) for i in indices):
        return tensor[indices if len(indices) > 1 else indices[0]]
    if not isinstance(tensor, Tensor) or len(indices) != tensor.ndim:
        raise GiveUp("an indexing that gives no number")
    if not all(isinstance(i, int | Range) or (isinstance(i, Tensor) and i.ndim == 0) for i in indices):
        raise GiveUp("an indexing by other than numbers")
    if tensor.numel() == 0:
        raise GiveUp("an empty tensor is indexed")
    ends = [_ends(i, n) for i, n in zip(indices, tensor.shape, strict=True)]
    lo, hi, limit = _bounds_of(tensor)
    least = _reach(lo, ends, torch.amin)
    exact = lo is hi and all(first is last for first, last in ends)
    return Range(least, least if exact else _reach(hi, ends, torch.amax), tensor.dtype, limit)


def _ends(index: Any, n: int) -> tuple[Tensor, Tensor]:
    """The first and last position an index reaches; all positions where it may leave 0..n-1 (and so wrap)."""
    if type(index) is int and -n <= index < n:
        position = torch.tensor(index % n, device="cpu")
        return position, position
    r = _as_range(index)
    if not _is_integer(r.dtype) or r.dtype == torch.uint8:  # torch takes these for a mask, or refuses them
        raise GiveUp("an indexing by other than integers")
    if r.reached and n <= r.limit < _INF:
        raise ValueError(f"a mask function indexes a dimension of {n} elements with an index up to {int(r.limit)}.")
    inside = (r.lo >= 0) & (r.hi < n)
    first = torch.where(inside, r.lo, 0.0).long()
    if r.exact and inside.all():
        return first, first
    return first, torch.where(inside, r.hi, n - 1.0).long()


def _reach(values: Tensor, ends: list[tuple[Tensor, Tensor]], extreme: Callable[..., Tensor]) -> Tensor:
    ranged = [d for d, (first, last) in enumerate(ends) if first is not last]
    if len(ranged) > 1:  # one of them by its range, the others whole
        kept = max(ranged, key=lambda d: values.shape[d])
        whole = [d for d in ranged if d != kept]
        values = extreme(values, dim=whole, keepdim=True)
        zero = torch.zeros((), dtype=torch.long, device=values.device)
        ends = [(zero, zero) if d in whole else e for d, e in enumerate(ends)]
        ranged = [kept]
    if not ranged:
        return values[tuple(first for first, _ in ends)]
    dim = ranged[0]
    first, last = ends[dim]
    # A sparse table: level k holds the extreme of each run of 2^k elements; two runs cover a range.
    level = torch.frexp((last - first + 1).double()).exponent.long() - 1
    pick = torch.minimum if extreme is torch.amin else torch.maximum
    if values.dtype == torch.bool:
        pick = torch.logical_and if extreme is torch.amin else torch.logical_or
    levels = [values]
    n = values.shape[dim]
    for k in range(int(level.max())):
        step = min(2**k, n)
        shifted = torch.cat([levels[-1].narrow(dim, step, n - step), levels[-1].narrow(dim, n - step, step)], dim)
        levels.append(pick(levels[-1], shifted))
    table = torch.stack(levels)
    second = last - (1 << level) + 1
    left = table[(level, *(first if d == dim else e[0] for d, e in enumerate(ends)))]
    right = table[(level, *(second if d == dim else e[0] for d, e in enumerate(ends)))]
    return pick(left, right)


_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "radd", "iadd"), _add),
    **dict.fromkeys(("sub", "subtract", "isub"), _sub),
    "rsub": lambda a, b: _sub(b, a),
    **dict.fromkeys(("mul", "multiply", "rmul", "imul"), _mul),
    **dict.fromkeys(("neg", "negative"), _neg),
    **dict.fromkeys(("positive", "clone", "detach", "contiguous"), lambda a: a),
    **dict.fromkeys(("abs", "absolute"), _abs),
    "square": lambda a: _power(a, 2),
    **dict.fromkeys(("floordiv", "floor_divide"), _floor_divide),
    "rfloordiv": lambda a, b: _floor_divide(b, a),
    **dict.fromkeys(("truediv", "div", "divide", "true_divide"), _true_divide),
    "rdiv": lambda a, b: _true_divide(b, a),
    **dict.fromkeys(("mod", "remainder"), _remainder),
    "rmod": lambda a, b: _remainder(b, a),
    "pow": _power,
    **dict.fromkeys(("lshift", "bitwise_left_shift"), _shift_left),
    **dict.fromkeys(("rshift", "bitwise_right_shift"), _shift_right),
    "minimum": _minimum,
    "maximum": _maximum,
    "min": _min_max(_minimum),
    "max": _min_max(_maximum),
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_min": lambda a, min: _clamp(a, min=min),
    "clamp_max": lambda a, max: _clamp(a, max=max),
    "where": _where,
    "floor": _rounded(torch.floor),
    "ceil": _rounded(torch.ceil),
    "trunc": _rounded(torch.trunc),
    **dict.fromkeys(("lt", "less"), _less),
    **dict.fromkeys(("le", "less_equal"), _at_most),
    **dict.fromkeys(("gt", "greater"), _greater),
    **dict.fromkeys(("ge", "greater_equal"), _at_least),
    "eq": _equal,
    **dict.fromkeys(("ne", "not_equal"), _unequal),
    "logical_not": _not,
    "logical_and": _and,
    "logical_or": _or,
    "logical_xor": _xor,
    **dict.fromkeys(("invert", "bitwise_not"), _invert),
    **dict.fromkeys(("and", "rand", "iand", "bitwise_and"), _bitwise(_and)),
    **dict.fromkeys(("or", "ror", "ior", "bitwise_or"), _bitwise(_or)),
    **dict.fromkeys(("xor", "rxor", "ixor", "bitwise_xor"), _bitwise(_xor)),
    "to": _to,
    "type": _to,
    "bool": _cast(torch.bool),
    "int": _cast(torch.int32),
    "long": _cast(torch.int64),
    "short": _cast(torch.int16),
    "float": _cast(torch.float32),
    "double": _cast(torch.float64),
    "half": _cast(torch.float16),
    "bfloat16": _cast(torch.bfloat16),
    "getitem": _index,
}
