"""Ranges: what a mask says of a whole block of indices, from one call of its function.

The idea
--------
A mask is a function of indices. A BlockMask asks of every block, 128 queries by 128 keys say, whether the mask lets
all of its pairs through (a full block), none (empty, to be skipped) or some (partial). torch's create_block_mask calls
the function on every pair to find out: a million tokens have 10^12 of them, in 67 million blocks.

Here the function is called once, on *ranges* of indices in place of indices. Take a window of 192 keys,

    >>> def window(b, h, q, kv):
    ...     return (kv <= q) & (q - kv <= 192)

over 512 tokens. Four blocks of queries stand for the ranges 0..127, 128..255, 256..383 and 384..511, and so do four
blocks of keys. A Range is two tensors, the least and the greatest number of each block, the queries' along one
dimension and the keys' along another:

    >>> import torch
    >>> from flexmasks.ranges import Range, evaluate
    >>> first, last = torch.arange(0, 512, 128), torch.arange(127, 512, 128)
    >>> q = Range.of_indices(first.view(1, 1, 4, 1), last.view(1, 1, 4, 1), limit=511)
    >>> kv = Range.of_indices(first.view(1, 1, 1, 4), last.view(1, 1, 1, 4), limit=511)

Arithmetic on ranges gives the range of all results. The least distance of a query from a key is its block's least
query minus the other's greatest key, so `q - kv` is one subtraction of tensors for each end, and broadcasting makes a
matrix of all blocks of it:

    >>> distance = q - kv
    >>> distance.lo[0, 0].int()
    tensor([[-127, -255, -383, -511],
            [   1, -127, -255, -383],
            [ 129,    1, -127, -255],
            [ 257,  129,    1, -127]], dtype=torch.int32)
    >>> distance.hi[0, 0].int()
    tensor([[ 127,   -1, -129, -257],
            [ 255,  127,   -1, -129],
            [ 383,  255,  127,   -1],
            [ 511,  383,  255,  127]], dtype=torch.int32)

A comparison gives a range of truth values: `lo` says "certainly", `hi` says "possibly". A distance that is at most 192
for the greatest is certainly in the window, one that is above 192 for the least is not possibly. `&`, `|` and `~`
combine the two:

    >>> b = h = Range.of_indices(torch.zeros(1), torch.zeros(1), limit=0)
    >>> seen = evaluate(window, b, h, q, kv).truth
    >>> seen.lo[0, 0].int()  # certainly: full blocks
    tensor([[0, 0, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 0, 0]], dtype=torch.int32)
    >>> seen.hi[0, 0].int()  # not possibly: empty blocks
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [0, 1, 1, 1]], dtype=torch.int32)

Seven of sixteen blocks are empty. None is full: even next to the diagonal the distance comes to 255. The nine others
are *undecided*, and only they are looked at element by element (in flexmasks.blocks), which finds all of them partial.
For a million tokens that is some 24,000 blocks of 67 million.

What it costs
-------------
One operation on a matrix of blocks for each operation of the function that mixes queries and keys, and one on a line
of blocks for all others: 128 x 128 times less than every pair. To that come the undecided blocks, those at the edges
of what the mask shows: their number grows with the length for a window or for documents, not with its square. The
function is called, not compiled.

The shape of the answer says more: it has a batch, or a head, dimension if the function uses that index.

What it knows
-------------
Arithmetic, comparisons, logic, bits, casts, roots and exponentials, `torch.where`, reductions, `torch.bucketize`, and
indexing of captured tensors: by an exact index it is a lookup, by a range the least and greatest element in reach.
Every result holds each value that can occur (soundness). An operation that is not known here gives "anything", so that
blocks are looked at element by element: slower, never wrong; and so is a function that ranges cannot go through.
`Mask.blocks` and `explain` name what it was. Correlations are lost: `q - q` is not 0 but -127..127, which again is
slower and not wrong. A Range does what an integer tensor does, and is none: `isinstance(q, torch.Tensor)` is False.

How it is exact
---------------
Bounds are float64, exact for integers below 2^52; an integer that its dtype might not hold becomes "anything", and
floats are widened by their rounding error. A float may be NaN only where its range is all of -inf..inf. Where both
ends of a range are one and the same tensor it is an exact value: called on single elements, ranges give what the
function gives.

Source: interval arithmetic: Moore, Interval Analysis, 1966; the sparse table of range minima: Bender and
Farach-Colton, The LCA Problem Revisited, 2000; block masks: Dong et al., Flex Attention, 2024.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmasks import compat

_INF = math.inf
_EXACT = 2.0**52  # integers below are exact in float64
_BLOCK_DIMS = 4
_LARGEST = 1 << 24  # elements that a tensor may have which the function itself sees as one
_MOVED = 1 << 17  # elements of a captured tensor that are worth moving from a GPU
_NUMBERS = (bool, int, float)
_CONSTANTS = ("zeros_like", "ones_like", "full_like")


class GiveUp(Exception):
    """The function cannot be evaluated on ranges at all, for the reason given; every block is undecided."""


class Refused(ValueError):
    """The function is no mask, in a way that torch would refuse, too."""


class TooLarge(Exception):
    """The function captured too much to be evaluated on the CPU for a GPU."""


class TooWide(Exception):
    """The function makes tensors of so many elements that it cannot be evaluated for so many blocks at once."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.width = width


@dataclass(frozen=True)
class Steps:
    """That a range is, in the block at place n of dimension `dim`, `first + n * size` and what follows below `end`."""

    first: int
    size: int
    end: int
    dim: int

    def moved(self, by: int) -> Steps:
        return Steps(self.first + by, self.size, self.end + by, self.dim)


class Range:
    """A number (or truth value) somewhere between `lo` and `hi`, of torch type `dtype`, for each of many blocks.

    The last four dimensions of `lo` and `hi` are those of the blocks, [batch, heads, query blocks, key blocks];
    before them stand the `ndim` dimensions that the mask's function sees: none for an index, one for a row of a table.

    `limit` bounds the absolute value, as a Python number: where it shows that nothing overflows, no tensor has to
    be looked at. `reached` says that in some block the value `limit` itself occurs. `steps` is there where the
    ranges follow each other without a gap.
    """

    __slots__ = ("_dtype", "compared", "hi", "limit", "lo", "ndim", "reached", "steps")
    __array_ufunc__ = None  # NumPy's numbers leave operators to this class

    def __init__(
        self,
        lo: Tensor,
        hi: Tensor,
        dtype: torch.dtype,
        limit: float = _INF,
        reached: bool = False,
        steps: Steps | None = None,
    ) -> None:
        self.lo, self.hi, self._dtype, self.limit, self.reached, self.steps = lo, hi, dtype, limit, reached, steps
        self.ndim = max(0, lo.ndim - _BLOCK_DIMS, hi.ndim - _BLOCK_DIMS)
        self.compared: tuple[str, Any, Any] | None = None  # the integers whose comparison this truth value is
        evaluation = _evaluation.get() if self.ndim else None
        if evaluation is not None:
            for end in (lo, hi):
                evaluation.note_width(math.prod(end.shape[: max(0, end.ndim - _BLOCK_DIMS)]))

    @classmethod
    def of_indices(cls, lo: Tensor, hi: Tensor, limit: int, steps: Steps | None = None, reached: bool = True) -> Range:
        """Indices from lo to hi inclusive, none above `limit`; the same tensor twice for exact ones."""
        low = lo.double()
        return cls(low, low if hi is lo else hi.double(), torch.int64, limit, reached, steps)

    @property
    def exact(self) -> bool:
        """Whether this is known to be a single value in each block."""
        return self.lo is self.hi

    @property
    def dtype(self) -> torch.dtype:
        """The torch type; rules may read it always, a function as long as it is sure to be torch's."""
        if _mixing:
            _observe_dtype()
        return self._dtype

    @property
    def device(self) -> torch.device:
        evaluation = _evaluation.get()
        return self.lo.device if evaluation is None else evaluation.device

    @property
    def shape(self) -> torch.Size:  # to the function an index is a number
        return torch.Size(broadcast_shape(self.lo, self.hi)[: self.ndim])

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

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
        raise Refused(
            f"a mask function may not {what}: its arguments stand for many indices at once. Use `&`, `|`, `~` for "
            "and, or, not, `(a < b) & (b < c)` for chained comparisons, torch.where for if, torch.minimum for min."
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
        return int(self._refuse("use an index as a Python integer, or index a list by it (capture a tensor instead)"))

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self._refuse("turn an index into a NumPy array, or index one by it (capture a torch tensor instead)")

    def __iter__(self) -> Any:
        return iter(_dispatch(torch.Tensor.unbind, (self,), {})) if self.ndim else self._refuse("iterate over an index")

    def __repr__(self) -> str:
        return f"Range({self.lo}, {self.hi}, {self.dtype})"

    def __getitem__(self, index: Any) -> Any:
        return _dispatch(torch.Tensor.__getitem__, (self, index), {})

    def __len__(self) -> int:
        return self.shape[0] if self.ndim else int(self._refuse("take the `len()` of an index"))

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


_IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift setitem".split()  # noqa: SIM905
_OPERATORS = """
    add radd sub rsub mul rmul floordiv rfloordiv truediv rtruediv mod rmod pow rpow and rand or ror xor rxor
    lshift rlshift rshift rrshift neg pos abs invert eq ne lt le gt ge matmul rmatmul
"""
for _name in (*_OPERATORS.split(), *_IN_PLACE):
    setattr(Range, f"__{_name}__", _operator(f"__{_name}__"))


class _Evaluation:
    """One call of a function on ranges: where the call is, where the ranges are, and what was met on the way."""

    def __init__(self, device: torch.device, here: torch.device, widest: float) -> None:
        self.device, self.here, self._may_be = device, here, widest
        self.not_understood: list[str] = []
        self.mixed = False  # dtypes met in one operation: the result's may not be what it is in torch
        self.in_rules = 0
        self.widest = 1  # the most elements that a tensor had which the function saw
        self._bounds: dict[tuple[int, int], tuple[Tensor, tuple[Tensor, Tensor, float]]] = {}

    def note_width(self, width: int) -> None:
        """Before it is combined with other ranges to a tensor of all blocks."""
        if width > self._may_be:
            raise TooWide(width)
        self.widest = max(self.widest, width)

    def bounds_of(self, values: Tensor) -> tuple[Tensor, Tensor, float]:
        """`_bounds_of` of a captured tensor, brought to where the ranges are and kept for this evaluation."""
        key = id(values), _version(values)
        found = self._bounds.get(key)
        if found is None:
            if values.ndim and values.device != self.device:
                raise Refused(
                    f"a mask function uses a tensor on {values.device} with indices on {self.device}; move it there."
                )
            if values.device != self.here and self.here.type == "cpu" and values.numel() > _MOVED:
                raise TooLarge(f"a tensor of {values.numel()} elements")
            found = self._bounds[key] = values, _bounds_of(values.detach().to(self.here))
        return found[1]


# Evaluations that mixed dtypes; mostly none, which is quickly seen.
_mixing: set[_Evaluation] = set()
_evaluation: ContextVar[_Evaluation | None] = ContextVar("evaluation", default=None)


def _observe_dtype() -> None:
    """Raise GiveUp where a function looks at a dtype that may not be what it is in torch."""
    evaluation = _evaluation.get()
    if evaluation is not None and evaluation.mixed and not evaluation.in_rules:
        raise GiveUp("the dtype of an operation that mixes dtypes")


def _version(tensor: Tensor) -> int:
    """It grows when the tensor is changed in place."""
    return -1 if tensor.is_inference() else compat.version(tensor)


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


class Evaluated(NamedTuple):
    """What a mask's function gave on ranges."""

    truth: Range  # for each block
    not_understood: tuple[str, ...]  # operations
    widest: int  # the most elements that a tensor had which the function saw


def evaluate(
    function: Callable[..., Any],
    b: Range,
    h: Range,
    q: Range,
    kv: Range,
    device: torch.device | None = None,
    widest: float = _INF,
) -> Evaluated:
    """Call a mask's function on ranges.

    `device` is where the function finds its indices to be, by default where they are. Small problems of a GPU are
    evaluated on the CPU: tensors that the function captured are brought there. `widest` is how many elements a tensor
    may have that the function sees.

    Raises TooLarge or TooWide where that cannot be, GiveUp where nothing can be said, ValueError or TypeError where the
    function is no mask.
    """
    here = q.lo.device
    evaluation = _Evaluation(device or here, here, widest)
    token = _evaluation.set(evaluation)
    try:
        try:
            with _Mode():
                result = function(b, h, q, kv)
        except (GiveUp, Refused, TooLarge, TooWide):
            raise
        except Exception as error:  # the evaluation element by element says whether the function is to blame
            raise GiveUp(f"{type(error).__name__}: {error}") from error
        if isinstance(result, bool) or not isinstance(result, Range | Tensor):
            raise TypeError(f"a mask function must return a boolean tensor, got {result!r}.")
        dtype = result._dtype if isinstance(result, Range) else result.dtype  # a boolean one is torch's, too
        if dtype is not torch.bool:
            _observe_dtype()
            raise TypeError(
                "a mask function must return a boolean tensor, "
                f"got one of {str(dtype).removeprefix('torch.')}; compare, as in `q >= kv`."
            )
        if result.ndim:
            raise GiveUp("a result that is no number")
        return Evaluated(_as_range(result), tuple(evaluation.not_understood), evaluation.widest)
    finally:
        _evaluation.reset(token)
        _mixing.discard(evaluation)


def _dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if name.startswith("__"):
        name = name.strip("_")
    if name in _IN_PLACE or name.endswith("_") or kwargs.get("out") is not None:  # what else is this tensor?
        raise GiveUp(f"{name} changes a tensor in place")
    if func is torch.Tensor.where:  # a.where(condition, b)
        args = (args[1], args[0], *args[2:]) if len(args) > 1 else args
    constant = name.startswith("new_") or name in _CONSTANTS  # of some index's dtype and device
    if constant and not any(isinstance(x, Range) for x in (*args[1:], *kwargs.values())):
        like = torch.zeros(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        return func(like, *args[1:], **kwargs)
    rule = _RULES.get(name)
    evaluation = _evaluation.get()
    if evaluation is None:
        return _by_rule(rule, name, func, args, kwargs)
    evaluation.in_rules += 1
    try:
        return _by_rule(rule, name, func, args, kwargs)
    finally:
        evaluation.in_rules -= 1


def _by_rule(rule: Any, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with compat.without_torch_function():  # what rules do with the ends of ranges is no business of `_Mode`
        if rule is not None:
            try:
                result = rule(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise
                result = None  # an overload that the rule does not have: it was not entered
            if result is not None:
                return result
        evaluation = _evaluation.get()
        known = {"getitem": "indexing"}.get(name, name[1:] if name[:1] == "r" and name[1:] in _RULES else name)
        if evaluation is not None and known not in evaluation.not_understood:
            evaluation.not_understood.append(known)
        if evaluation is not None and evaluation.mixed:
            raise GiveUp(f"{known} of numbers that came from mixed dtypes")
        return _anything(func, args, kwargs)


def _anything(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation that is not known: any value of the dtype that it has on plain numbers."""
    ranges: list[Range] = []

    def sample(value: Any) -> Any:
        if isinstance(value, Range):
            ranges.append(value)
            return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        return type(value)(sample(v) for v in value) if type(value) in (tuple, list) else value

    try:
        result = func(*(sample(a) for a in args), **{k: sample(v) for k, v in kwargs.items()})
    except Exception as error:  # the element by element evaluation says what is wrong, if anything is
        raise GiveUp(str(error)) from error
    ends = [end for r in ranges for end in (r.lo, r.hi)]
    blocks = torch.broadcast_shapes(*(end.shape[max(0, end.ndim - _BLOCK_DIMS) :] for end in ends))

    def anything(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)([anything(v) for v in value])
        if not isinstance(value, Tensor):
            raise GiveUp(f"{getattr(func, '__name__', func)} gives no tensor")
        shape = blocks
        if value.ndim:
            shape = torch.Size((*value.shape, *(1,) * (_BLOCK_DIMS - len(blocks)), *blocks))
            _check_size(shape)
        if value.dtype == torch.bool:
            certain = torch.zeros(shape, dtype=torch.bool, device=ends[0].device)
            return _truth(certain, ~certain)
        hi = torch.full(shape, _INF, dtype=torch.float64, device=ends[0].device)
        return Range(-hi, hi, value.dtype)

    return anything(result)


def _truth(lo: Tensor, hi: Tensor) -> Range:
    return Range(lo, hi, torch.bool, 1.0)


def _as_range(value: Any) -> Range:
    if isinstance(value, Range):
        return value
    if isinstance(value, _NUMBERS):
        return _constant(value)
    if isinstance(value, Tensor):
        lo, hi, limit = _bounds_of_captured(value)
        if value.ndim:
            _check_size(value.shape)
            exact = lo is hi
            lo = lo.view(*value.shape, *(1,) * _BLOCK_DIMS)
            hi = lo if exact else hi.view(lo.shape)
        return Range(lo, hi, value.dtype, limit)
    raise GiveUp(f"{value!r} is no number")


def _constant(value: float) -> Range:
    kind = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    if kind != torch.bool and abs(value) < _EXACT:
        lo = torch.tensor(value, dtype=torch.float64, device="cpu")  # whatever the default device
        return Range(lo, lo, kind, abs(value))
    try:
        lo, hi, limit = _bounds_of(torch.tensor(value, dtype=kind, device="cpu"))
    except (RuntimeError, OverflowError, ValueError) as error:
        raise GiveUp(f"{value} is no int64") from error
    return Range(lo, hi, kind, limit)


def broadcast_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """torch.broadcast_shapes of two, which takes longer than an operation."""
    return tuple(a.shape) if a.shape == b.shape else tuple(torch.broadcast_shapes(a.shape, b.shape))


def _check_size(shape: torch.Size) -> None:
    if math.prod(shape) > _LARGEST:
        raise GiveUp(f"a tensor of {math.prod(shape)} elements in arithmetic")


def _bounds_of_captured(values: Tensor) -> tuple[Tensor, Tensor, float]:
    evaluation = _evaluation.get()
    return _bounds_of(values) if evaluation is None else evaluation.bounds_of(values)


def _bounds_of(values: Tensor) -> tuple[Tensor, Tensor, float]:
    """The values as bounds, the same tensor twice where float64 holds them all, and the greatest absolute value."""
    if values.dtype == torch.bool:
        return values, values, 1.0
    if values.is_complex():
        raise GiveUp("complex numbers")
    bound = values.detach().double()
    limit = float(bound.abs().max()) if bound.numel() else 0.0
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
    evaluation = _evaluation.get()
    if evaluation is not None:
        evaluation.mixed = True
        _mixing.add(evaluation)
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
    if alpha != 1:
        return None
    if both is None:
        return _or(a, b)
    x, y, dtype = both
    exact = x.exact and y.exact
    lo = x.lo + y.lo
    result = _result(lo, lo if exact else x.hi + y.hi, dtype, x.limit + y.limit, exact)
    if isinstance(b, int):
        result.reached = x.reached and b >= 0
        result.steps = None if x.steps is None else x.steps.moved(b)
    return result


def _sub(a: Any, b: Any, *, alpha: Any = 1) -> Range | None:
    both = _both(a, b)
    if both is None or alpha != 1:
        return None
    x, y, dtype = both
    exact = x.exact and y.exact
    lo = x.lo - y.hi
    result = _result(lo, lo if exact else x.hi - y.lo, dtype, x.limit + y.limit, exact)
    if isinstance(b, int) and x.steps is not None:
        result.steps = x.steps.moved(-b)
    return result


def _mul(a: Any, b: Any) -> Range | None:
    both = _both(a, b)
    if both is None:
        return _and(a, b)
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
    if x.exact and not x.dtype.is_floating_point:
        lo = x.lo.abs()
        return _result(lo, lo, x.dtype, x.limit, True)
    lo, hi = torch.maximum(x.lo, -x.hi).clamp(min=0.0), torch.maximum(x.hi, -x.lo)
    if x.dtype.is_floating_point:
        lo, hi = _anything_where(_maybe_nan(x), lo, hi)
    return _result(lo, hi, x.dtype, x.limit)


def _quotient(x: Range, y: Range, rounding: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor]:
    lo, hi = _corners(x, y, lambda a, b: a / b if rounding is None else rounding(a / b))
    return _anything_where(_through_zero(y) | _inexact(x, y), lo, hi)


def _through_zero(y: Range) -> Tensor:
    """Where it may be 0, or a float so small that some machine takes it for 0."""
    least = torch.finfo(y.dtype).tiny if y.dtype.is_floating_point else 0.0
    return (y.lo <= least) & (y.hi >= -least)


def _plain_divisor(b: Any, dtype: torch.dtype) -> bool:
    """Whether it is a Python integer that operands of that dtype can be divided by as it is."""
    return type(b) is int and b != 0 and _fits(b, dtype)


def _integer_quotient(a: Any, b: Any, rounding: Callable[[Tensor], Tensor]) -> Range | None:
    both = _both(a, b)
    if both is None:
        return None
    x, y, dtype = both
    if dtype.is_floating_point:  # a float's quotient may round to the integer beside
        lo, hi = _quotient(x, y, rounding)
        return _result(lo - 1, hi + 1, dtype, _INF)
    if x.exact and _plain_divisor(b, dtype) and x.limit < _EXACT:
        lo = rounding(x.lo / b)
        return _result(lo, lo, dtype, x.limit + 1, True)
    return _result(*_quotient(x, y, rounding), dtype, x.limit + 1 if _plain_divisor(b, dtype) else _INF)


def _floor_divide(a: Any, b: Any) -> Range | None:
    return _integer_quotient(a, b, torch.floor)


def _true_divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Range | None:
    if rounding_mode is not None:
        return _integer_quotient(a, b, {"floor": torch.floor, "trunc": torch.trunc}[rounding_mode])
    both = _both(a, b)
    if both is None:
        return None
    x, y, dtype = both
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    return _result(*_quotient(_as_dtype(x, dtype), _as_dtype(y, dtype), None), dtype, _INF)


def _rest(rounding: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Range | None]:
    """x - y * rounding(x / y): by floor it has y's sign, by trunc x's, and is always smaller than y.

    With one y, and x within one multiple of it: the rests of x's ends; else all rests there are.
    """

    def rule(a: Any, b: Any) -> Range | None:
        both = _both(a, b)
        if both is None:
            return None
        x, y, dtype = both
        limit = abs(b) if _plain_divisor(b, dtype) else _INF
        if x.exact and _plain_divisor(b, dtype) and x.limit < _EXACT and not dtype.is_floating_point:
            lo = x.lo - b * rounding(x.lo / b)
            return _result(lo, lo, dtype, limit, True)
        below = 0.0 if dtype.is_floating_point else 1.0  # a float's rest may round up to y
        if rounding is torch.floor:
            lo, hi = (y.lo + below).clamp(max=0.0), (y.hi - below).clamp(min=0.0)
        else:
            size = torch.maximum(-y.lo, y.hi) - below
            lo, hi = torch.maximum(-size, x.lo.clamp(max=0.0)), torch.minimum(size, x.hi.clamp(min=0.0))
        if not dtype.is_floating_point:
            first, last = rounding(x.lo / y.lo), rounding(x.hi / y.lo)
            one = (y.lo == y.hi) & (y.lo != 0) & (first == last) & ~_inexact(x, y)
            lo, hi = torch.where(one, x.lo - y.lo * first, lo), torch.where(one, x.hi - y.lo * first, hi)
            return _result(*_anything_where(_through_zero(y), lo, hi), dtype, limit)
        return _result(*_anything_where(_through_zero(y) | _inexact(x, y), lo, hi), dtype, _INF)

    return rule


_remainder, _fmod = _rest(torch.floor), _rest(torch.trunc)


def _power(a: Any, exponent: Any) -> Range | None:
    if type(a) is int and a == 2 and isinstance(exponent, Range):
        return _shift_left(1, exponent)
    if type(exponent) is float and exponent in (0.5, 2.0) and isinstance(a, Range):
        if exponent == 0.5:
            return _monotone(torch.sqrt, 0.0)(a)
        a, exponent = _as_dtype(a, a.dtype if a.dtype.is_floating_point else torch.get_default_dtype()), 2
    if type(exponent) is not int or exponent not in (1, 2) or not isinstance(a, Range) or a.dtype == torch.bool:
        return None
    if exponent == 1:
        return a
    size = _abs(a)
    return None if size is None else _mul(size, size)


def _sign(a: Any) -> Range | None:
    x = _as_range(a)
    if x.dtype == torch.bool:
        return None
    lo = x.lo.sign()
    hi = lo if x.exact else x.hi.sign()
    if x.dtype.is_floating_point:
        lo, hi = _anything_where(_maybe_nan(x), lo, hi)
        return Range(lo, hi, x.dtype)
    return Range(lo, hi, x.dtype, 1.0)


def _shift_left(a: Any, b: Any) -> Range | None:
    shifted = _powers_of_two(a, b)
    return None if shifted is None else _mul(a, shifted)


def _shift_right(a: Any, b: Any) -> Range | None:
    shifted = _powers_of_two(a, b)
    return None if shifted is None else _floor_divide(a, shifted)


def _powers_of_two(a: Any, b: Any) -> Any:
    """2**b for a shift of integers by b from 0 to 30 everywhere; None for another, which torch may not define."""
    if not all(type(x) is int or (isinstance(x, Range) and _is_integer(x.dtype)) for x in (a, b)):
        return None
    if type(b) is int:
        return 2**b if 0 <= b < 31 else None
    dtype = _common(a, b)
    if not _all((b.lo >= 0) & (b.hi <= min(30, torch.iinfo(dtype).bits - 2))):
        return None
    lo = torch.exp2(b.lo)
    return Range(lo, lo if b.exact else torch.exp2(b.hi), dtype, 2.0**30)


def _all(places: Tensor) -> bool:
    return bool(places.all())


def _minimum(a: Any, b: Any) -> Range | None:
    return _extreme(a, b, torch.minimum)


def _maximum(a: Any, b: Any) -> Range | None:
    return _extreme(a, b, torch.maximum)


def _min_max(
    rule: Callable[[Any, Any], Range | None], of_all: Callable[..., Tensor], kind: Callable[[Any], Any]
) -> Callable[..., Any]:
    """torch.min and torch.max of one tensor or of two; a number as the second argument is a dimension."""

    def of_one_or_two(a: Any, b: Any = None, keepdim: bool = False, *, dim: int | None = None) -> Any:
        dim = b if type(b) is int else dim
        if dim is not None:
            return _of_dim(_reduced(of_all), kind)(a, dim, keepdim)
        return rule(a, b) if b is not None else _reduced(of_all)(a)

    return of_one_or_two


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
    dtype = getattr(a, "dtype", None)
    if any(type(x) is float for x in (min, max)) and isinstance(a, Range) and _is_integer(a.dtype):
        dtype = torch.get_default_dtype()
        a = _as_dtype(a, dtype)
    for x in (min, max):
        same = x is None or type(x) is int or (isinstance(x, Range | Tensor) and x.dtype == dtype)
        if not same and not (type(x) is float and dtype is not None and dtype.is_floating_point):
            return None  # a bound of another dtype may change that of the result
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
        if c.exact and x.exact and y.exact:
            lo = torch.where(c.lo, x.lo, y.lo)
            return _truth(lo, lo)
        lo = torch.where(c.lo, x.lo, torch.where(c.hi, x.lo & y.lo, y.lo))
        hi = torch.where(c.lo, x.hi, torch.where(c.hi, x.hi | y.hi, y.hi))
        return _truth(lo, hi)
    x, y = _as_dtype(a, dtype), _as_dtype(b, dtype)
    if c.exact and x.exact and y.exact:
        lo = torch.where(c.lo, x.lo, y.lo)
        return Range(lo, lo, dtype, max(x.limit, y.limit))
    x, y = _where_it_holds(c, a, x, True), _where_it_holds(c, b, y, False)
    lo = torch.where(c.lo, x.lo, torch.where(c.hi, torch.minimum(x.lo, y.lo), y.lo))
    hi = torch.where(c.lo, x.hi, torch.where(c.hi, torch.maximum(x.hi, y.hi), y.hi))
    return Range(lo, hi, dtype, max(x.limit, y.limit))


def _masked_fill(a: Any, mask: Any, value: Any) -> Range | None:
    dtype = getattr(a, "dtype", torch.bool)
    if (
        type(value) not in _NUMBERS
        or not isinstance(a, Range)
        or (type(value) is float and not dtype.is_floating_point)
    ):
        return None
    return _where(mask, bool(value) if dtype == torch.bool else _as_dtype(value, dtype), a)


def _where_it_holds(condition: Range, given: Any, value: Range, holds: bool) -> Range:
    """What is left of a number where a comparison of it holds, or where it does not: x < 3 ? x : 3 is at most 3."""
    if condition.compared is None or not isinstance(given, Range):
        return value
    name, a, b = condition.compared
    if not holds:
        name = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}[name]
    if given is b:
        a, b, name = b, a, {"<": ">", "<=": ">=", ">": "<", ">=": "<="}[name]
    if given is not a:
        return value
    if given.dtype != value.dtype or not _fits(b, given.dtype):
        return value
    other, strict = _as_range(b), float(len(name) == 1)
    if name.startswith("<"):
        return Range(value.lo, torch.minimum(value.hi, other.hi - strict), value.dtype, value.limit)
    return Range(torch.maximum(value.lo, other.lo + strict), value.hi, value.dtype, value.limit)


def _fits(x: Any, dtype: torch.dtype) -> bool:
    """Whether a number is an integer of that dtype, or a Python integer which that holds."""
    if not _is_integer(dtype):
        return False
    info = torch.iinfo(dtype)
    return info.min <= x <= info.max if type(x) is int else getattr(x, "dtype", None) == dtype


def _monotone(operation: Callable[[Tensor], Tensor], least: float = -_INF) -> Callable[[Any], Range]:
    """A function that grows with its argument, of floats from `least` on; below it is NaN."""

    def rule(a: Any) -> Range:
        x = _as_range(a)
        dtype = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
        x = _as_dtype(x, dtype)
        lo, hi = _anything_where(_maybe_nan(x) | (x.lo < least), operation(x.lo), operation(x.hi))
        slack = 4 * torch.finfo(dtype).eps  # machines differ in the last bits
        return _result(lo - slack * (1 + lo.abs()), hi + slack * (1 + hi.abs()), dtype, _INF)

    return rule


def _rounded(operation: Callable[[Tensor], Tensor]) -> Callable[[Any], Range]:
    def rule(a: Any) -> Range:
        x = _as_range(a)
        if not x.dtype.is_floating_point:
            return x
        lo = operation(x.lo)
        return Range(lo, lo if x.exact else operation(x.hi), x.dtype, x.limit)

    return rule


# --- truth ---


def _compare(
    certain: Callable[[Range, Range], Tensor], possible: Callable[[Range, Range], Tensor], name: str | None = None
) -> Callable[[Any, Any], Range]:
    def rule(a: Any, b: Any) -> Range:
        dtype = _common(a, b)
        x, y = (_number(v) if dtype == torch.bool else _as_dtype(v, dtype) for v in (a, b))
        if x.exact and y.exact:
            truth = certain(x, y)
            return _truth(truth, truth)
        result = _truth(certain(_without_nan(x), _without_nan(y)), possible(x, y))
        if name is not None and _is_integer(dtype):
            result.compared = name, a, b
        return result

    return rule


def _without_nan(r: Range) -> Range:
    """With ends that compare as false where the number may be NaN."""
    if not r.dtype.is_floating_point:
        return r
    nan = _maybe_nan(r)
    return Range(torch.where(nan, math.nan, r.lo), torch.where(nan, math.nan, r.hi), r.dtype)


_less = _compare(lambda x, y: x.hi < y.lo, lambda x, y: x.lo < y.hi, "<")
_at_most = _compare(lambda x, y: x.hi <= y.lo, lambda x, y: x.lo <= y.hi, "<=")
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


def _logical(rule: Callable[[Any, Any], Range]) -> Callable[[Any, Any], Range | None]:
    """torch converts both to one dtype first, in which a small number may become 0."""

    def of_one_dtype(a: Any, b: Any) -> Range | None:
        kinds = {getattr(x, "dtype", torch.float64) for x in (a, b)}
        return None if len(kinds) > 1 and any(k.is_floating_point for k in kinds) else rule(a, b)

    return of_one_dtype


def _bitwise(
    of_truth_values: Callable[..., Range],
    of_exact: Callable[..., Tensor],
    of_ranges: Callable[[Range, Range, Tensor], tuple[Tensor, Tensor]],
) -> Callable[..., Range | None]:
    def rule(a: Any, b: Any) -> Range | None:
        if all(isinstance(x, bool) or getattr(x, "dtype", None) == torch.bool for x in (a, b)):
            return of_truth_values(a, b)
        both = _both(a, b)
        if both is None or both[2].is_floating_point:
            return None
        x, y, dtype = both
        if (
            of_exact is torch.bitwise_and
            and type(b) is int
            and abs(b) < 2**62
            and (b & (b + 1) == 0 or -b & (-b - 1) == 0)
        ):
            # the last bits, or all but the last: the rest of a division by a power of two, or all but the rest
            return _remainder(a, b + 1) if b >= 0 else _mul(_floor_divide(a, -b), -b)
        limit = 2.0 * max(x.limit, y.limit, 1.0)
        if x.exact and y.exact and limit < _EXACT:
            lo = of_exact(x.lo.long(), y.lo.long()).double()
            return _result(lo, lo, dtype, limit, True)
        largest = torch.maximum(torch.maximum(x.hi, -1 - x.lo), torch.maximum(y.hi, -1 - y.lo)).clamp(min=0.0)
        ones = torch.exp2(torch.frexp(largest).exponent.double()) - 1  # no result has a bit above those
        return _result(*_anything_where(_inexact(x, y), *of_ranges(x, y, ones)), dtype, limit)

    return rule


def _same_sign(x: Range, y: Range) -> Tensor:
    return ((x.lo >= 0) & (y.lo >= 0)) | ((x.hi < 0) & (y.hi < 0))


def _bits_and(x: Range, y: Range, ones: Tensor) -> tuple[Tensor, Tensor]:
    """What is not negative bounds the result; two negative numbers leave one below both."""
    some = (x.lo >= 0) | (y.lo >= 0)
    least, most = torch.minimum(x.hi, y.hi), torch.maximum(x.hi, y.hi)
    same = _same_sign(x, y)
    hi = torch.where(same, least, torch.where(x.lo >= 0, x.hi, torch.where(y.lo >= 0, y.hi, most)))
    return torch.where(some, 0.0, -1 - ones), hi


def _bits_or(x: Range, y: Range, ones: Tensor) -> tuple[Tensor, Tensor]:
    """x | y is ~(~x & ~y)."""
    not_x, not_y = (Range(-1 - r.hi, -1 - r.lo, r.dtype) for r in (x, y))
    lo, hi = _bits_and(not_x, not_y, ones)
    return -1 - hi, -1 - lo


def _bits_xor(x: Range, y: Range, ones: Tensor) -> tuple[Tensor, Tensor]:
    """Not negative where both signs are the same, negative where they differ."""
    same = _same_sign(x, y)
    differ = ((x.lo >= 0) & (y.hi < 0)) | ((x.hi < 0) & (y.lo >= 0))
    return torch.where(same, 0.0, -1 - ones), torch.where(differ, -1.0, ones)


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


def _to(a: Any, *args: Any, **kwargs: Any) -> Any:
    values = (*args, *kwargs.values())
    by_number = bool(args) and isinstance(args[0], _NUMBERS)
    if by_number or any(isinstance(x, str) and "Tensor" in x for x in values):
        raise GiveUp("a conversion by name")
    wanted = [x for x in values if isinstance(x, torch.dtype)]
    wanted += [x.dtype for x in values if isinstance(x, Range | Tensor)]
    evaluation = _evaluation.get()
    if evaluation is not None and evaluation.mixed and any(isinstance(x, Range) for x in values):
        raise GiveUp("the dtype of an operation that mixes dtypes")
    if isinstance(a, Tensor):
        return a.to(wanted[0])
    return _cast(wanted[0])(a) if wanted else a


def _index(values: Any, index: Any) -> Any:
    """values[index]: the least and greatest element that the index can reach."""
    indices = list(index) if isinstance(index, tuple) else [index]
    if isinstance(values, Tensor) and not any(isinstance(i, Range) for i in indices):
        return values[index]
    if all(i is None or i is Ellipsis for i in indices):
        return _unsqueezed(values, indices)
    if not isinstance(values, Range | Tensor) or sum(i is not Ellipsis for i in indices) > values.ndim:
        return None
    if not all(i is Ellipsis or type(i) in (int, slice) or _is_number(i) for i in indices):
        return None
    if isinstance(values, _Rows):
        return _index(values.unchanged(), (*values.indices, *indices))
    values, indices = _numbers_first(values, indices)
    if 0 in values.shape:
        raise GiveUp("an empty tensor is indexed")
    if isinstance(values, Tensor) and len(indices) < values.ndim:
        return _Rows(values, tuple(indices))
    return _elements(values, indices) if indices else values


def _is_number(index: Any) -> bool:
    return isinstance(index, Range | Tensor) and index.ndim == 0


def _numbers_first(values: Any, indices: list[Any]) -> tuple[Any, list[Any]]:
    """values[indices] as an indexing of the first dimensions by numbers, slices taken and what is left behind them."""
    place = next((n for n, i in enumerate(indices) if i is Ellipsis), len(indices))
    missing = values.ndim - sum(i is not Ellipsis for i in indices)
    indices = [*indices[:place], *[slice(None)] * missing, *indices[place + 1 :]]
    numbers = [d for d, i in enumerate(indices) if not isinstance(i, slice)]
    slices = tuple(i if isinstance(i, slice) else slice(None) for i in indices)
    order = [*numbers, *(d for d in range(values.ndim) if d not in numbers)]
    if order != sorted(order) or any(i != slice(None) for i in slices):
        values = _rearranged(values, lambda end: end[slices].permute(*order, *range(len(order), end.ndim)))
    return values, [indices[d] for d in numbers]


def _rearranged(values: Any, arrange: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, or the ends of a range, with the dimensions that the function sees arranged anew."""
    if isinstance(values, Tensor):
        return arrange(values)
    ends = [end.expand(*values.shape, *_blocks_of(end)) for end in (values.lo, values.hi)[: 2 - values.exact]]
    ends = [arrange(end) for end in ends]
    return Range(ends[0], ends[-1], values.dtype, values.limit)


def _blocks_of(end: Tensor) -> tuple[int, ...]:
    shape = end.shape[max(0, end.ndim - _BLOCK_DIMS) :]
    return (*(1,) * (_BLOCK_DIMS - len(shape)), *shape)


def _elements(values: Range | Tensor, indices: list[Any]) -> Range:
    shape = values.shape
    numbers = [_Index(i, n) for i, n in zip(indices, shape, strict=False)]
    if isinstance(values, Tensor):
        lo, hi, limit = _bounds_of_captured(values)
    else:
        lo, hi, limit = values.lo, values.hi, values.limit
    single = all(i.first is i.last for i in numbers)
    if single and lo is hi:
        least = _reach(lo, values.ndim, numbers, torch.amin)
        return Range(least, least, values.dtype, limit)
    most = _reach(hi, values.ndim, numbers, torch.amax)
    return Range(_reach(lo, values.ndim, numbers, torch.amin), most, values.dtype, limit)


class _Rows(Range):
    """table[indices] with fewer indices than dimensions: looked up when its elements are needed, if ever."""

    __slots__ = ("_found", "_made_of", "indices", "table")

    def __init__(self, table: Tensor, indices: tuple[Any, ...]) -> None:
        self.table, self.indices = table, indices
        self._dtype, self.ndim = table.dtype, table.ndim - len(indices)
        self.reached, self.steps, self.compared = False, None, None
        self._found: Range | None = None
        self._made_of = _version(table)

    def unchanged(self) -> Tensor:
        """The table, if it is what it was."""
        if _version(self.table) != self._made_of:
            raise GiveUp("a tensor is changed in place once it was indexed")
        return self.table

    def _get(self) -> Range:
        if self._found is None:
            self._found = _elements(self.unchanged(), list(self.indices))
        return self._found

    @property
    def lo(self) -> Tensor:  # type: ignore[override]
        return self._get().lo

    @property
    def hi(self) -> Tensor:  # type: ignore[override]
        return self._get().hi

    @property
    def limit(self) -> float:  # type: ignore[override]
        return self._get().limit

    @property
    def shape(self) -> torch.Size:
        return self.table.shape[len(self.indices) :]


class _Index:
    """One index of a dimension of n elements: the first and the last position that it reaches.

    All positions where it may leave 0..n-1 or -n..-1. One tensor twice where it is exact.
    """

    def __init__(self, index: Any, n: int) -> None:
        self.steps: Steps | None = None
        self.constant: int | None = None
        if type(index) is int and -n <= index < n:
            self.constant = index % n
            self.first = self.last = torch.tensor(self.constant, device="cpu")
            return
        r = _as_range(index)
        if type(index) is int:
            raise GiveUp("an index out of range")
        if r.dtype not in (torch.int64, torch.int32):  # torch takes others for a mask, or refuses them
            raise GiveUp("an indexing by other than integers")
        if r.reached and n <= r.limit < _INF:
            raise Refused(f"a mask function indexes a dimension of {n} elements with an index up to {int(r.limit)}.")
        if r.steps is not None and r.steps.first >= 0 and r.steps.end <= n:
            self.first, self.last, self.steps = r.lo.long(), r.hi.long(), r.steps
            return
        lo = torch.where(r.hi < 0, r.lo + n, r.lo)  # -1 is the last
        if r.exact and _all((lo >= 0) & (lo < n)):
            self.first = self.last = lo.long()
            return
        hi = torch.where(r.hi < 0, r.hi + n, r.hi)
        inside = (lo >= 0) & (hi < n)
        self.first, self.last = torch.where(inside, lo, 0.0).long(), torch.where(inside, hi, n - 1.0).long()


def _reach(values: Tensor, ndim: int, indices: list[_Index], extreme: Callable[..., Tensor]) -> Tensor:
    """The extreme of values[indices], where values has `ndim` dimensions before those of the blocks, if it has these.

    Dimension by dimension: a range of each is reduced, which leaves the dimension with one element; then the exact
    indices are looked up together.
    """
    values = values.reshape(*values.shape[:ndim], *(1,) * (_BLOCK_DIMS - values.ndim + ndim), *values.shape[ndim:])
    exact: dict[int, Tensor] = {}
    ranged: dict[int, tuple[Tensor, Tensor]] = {}
    for d, index in enumerate(indices):
        if index.constant is not None:
            values = values.narrow(d, index.constant, 1)
        elif index.first is index.last:
            exact[d] = index.first
        elif index.steps is not None and values.shape[ndim + index.steps.dim] == 1:
            values = _reach_by_steps(values, d, ndim + index.steps.dim, index.steps, extreme)
        else:
            first, last = torch.broadcast_tensors(index.first, index.last)
            ranged[d] = first, last
    values = _reach_by_ranges(values, ndim, ranged, extreme)
    if exact:
        values = _look_up(values, ndim, exact)
    return values[(0,) * len(indices)]


def _reach_by_steps(values: Tensor, d: int, target: int, steps: Steps, extreme: Callable[..., Tensor]) -> Tensor:
    """Of ranges that follow each other: dimension `d` has one element then, and `target` one for each range."""
    n = steps.end - steps.first
    whole, rest = divmod(n, steps.size)
    values = values.narrow(d, steps.first, n)
    parts = []
    if whole:
        parts.append(extreme(values.narrow(d, 0, whole * steps.size).unflatten(d, (whole, steps.size)), dim=d + 1))
    if rest:
        parts.append(extreme(values.narrow(d, n - rest, rest), dim=d, keepdim=True))
    return torch.cat(parts, d).transpose(d, target) if len(parts) > 1 else parts[0].transpose(d, target)


def _reach_by_ranges(
    values: Tensor, ndim: int, ranged: dict[int, tuple[Tensor, Tensor]], extreme: Callable[..., Tensor]
) -> Tensor:
    """Of any ranges: where they have few elements, these are looked up; else one dimension after the other."""
    if not ranged:
        return values
    lengths = [int((last - first).max()) + 1 for first, last in ranged.values()]
    shape = torch.broadcast_shapes(values.shape[ndim:], *(first.shape for first, _ in ranged.values()))
    rest = math.prod(n for d, n in enumerate(values.shape[:ndim]) if d not in ranged)
    if math.prod(shape) * rest * math.prod(lengths) <= max(1 << 16, min(4 * values.numel(), 2 * _LARGEST)):
        positions = {}
        for n, (d, (first, last)) in enumerate(ranged.items()):
            places = torch.arange(lengths[n], device=values.device)
            places = places.view(-1, *(1,) * (len(ranged) - 1 - n + _BLOCK_DIMS))
            first, last = (x.reshape(*(1,) * (_BLOCK_DIMS - x.ndim), *x.shape) for x in (first, last))
            positions[d] = torch.minimum(first + places, last)
        return extreme(_look_up(values, ndim, positions), dim=tuple(range(len(ranged))))
    if len(ranged) > 1:
        for d, ends in ranged.items():
            values = _reach_by_ranges(values, ndim, {d: ends}, extreme)
        return values
    ((d, ends),) = ranged.items()
    levels = max(lengths).bit_length()
    if (
        max(math.prod(shape) * rest, levels * values.numel() // 2) > 4 * _LARGEST
    ):  # all of it, in the shape that says what the result depends on
        whole = extreme(values, dim=d, keepdim=True)
        return whole.expand(*whole.shape[:ndim], *shape)
    return _reach_by_sparse_table(values, ndim, d, *ends, extreme)


def _reach_by_sparse_table(
    values: Tensor, ndim: int, d: int, first: Tensor, last: Tensor, extreme: Callable[..., Tensor]
) -> Tensor:
    """Level k of the table holds the extreme of each run of 2^k elements; two runs cover a range."""
    level = torch.frexp((last - first + 1).double()).exponent.long() - 1
    pick = torch.minimum if extreme is torch.amin else torch.maximum
    if values.dtype == torch.bool:
        pick = torch.logical_and if extreme is torch.amin else torch.logical_or
    levels = [values]
    n = values.shape[d]
    for k in range(int(level.max())):
        step = min(2**k, n)
        shifted = torch.cat([levels[-1].narrow(d, step, n - step), levels[-1].narrow(d, n - step, step)], d)
        levels.append(pick(levels[-1], shifted))
    table = torch.stack(levels)
    runs = (_look_up(table, ndim + 1, {0: level, d + 1: start}) for start in (first, last - (1 << level) + 1))
    return pick(*runs)[0]


def _look_up(values: Tensor, ndim: int, positions: dict[int, Tensor]) -> Tensor:
    """values at `positions` of some of its `ndim` first dimensions, which then have one element.

    Dimensions of the positions before those of the blocks become the first ones of the result.
    """
    if len(positions) == ndim and values.shape[ndim:] == (1,) * _BLOCK_DIMS:
        found = values.reshape(values.shape[:ndim])[tuple(positions[d] for d in range(ndim))]
        found = found.reshape(*(1,) * (_BLOCK_DIMS - found.ndim), *found.shape)
        more = found.ndim - _BLOCK_DIMS
        return found.view(*found.shape[:more], *(1,) * ndim, *found.shape[more:])
    where = [torch.zeros((), dtype=torch.long, device=values.device)] * _BLOCK_DIMS
    for n in range(_BLOCK_DIMS):
        size = values.shape[ndim + n]
        if size > 1:
            where[n] = torch.arange(size, device=values.device).view(-1, *(1,) * (_BLOCK_DIMS - 1 - n))
    kept = [d for d in range(ndim) if d not in positions]
    arranged = values.permute(*positions, *range(ndim, values.ndim), *kept)
    found = arranged[(*positions.values(), *where)]
    blocks = found.ndim - len(kept)
    found = found.reshape(*(1,) * (_BLOCK_DIMS - blocks), *found.shape)
    more = max(0, blocks - _BLOCK_DIMS)
    order = [*range(more), *range(found.ndim - len(kept), found.ndim), *range(more, more + _BLOCK_DIMS)]
    found = found.permute(order)
    for d in sorted(positions):
        found = found.unsqueeze(more + d)
    return found


# --- dimensions that the function sees ---


def _unsqueezed(a: Range, index: list[Any]) -> Range:
    """a[index] with an index of None and Ellipsis."""
    if Ellipsis not in index:
        index = [*index, Ellipsis]
    shape: list[int] = []
    for i in index:
        shape += [1] if i is None else a.shape

    arranged: Range = _rearranged(a, lambda end: end.reshape(*shape, *_blocks_of(end)))
    return arranged


def _unsqueeze(a: Any, dim: int) -> Range:
    place = dim % (a.ndim + 1)
    if a.ndim and 0 < place < a.ndim:
        raise GiveUp("a dimension put between others")
    return _unsqueezed(a, [None, ...] if place == 0 else [..., None])


def _reduced(operation: Callable[..., Tensor], of: Callable[[Any], Range] | None = None) -> Callable[..., Range | None]:
    """A reduction of the dimensions that the function sees, one that is monotone in each element."""

    def rule(a: Any, dim: Any = None, keepdim: bool = False) -> Range | None:
        if of is not None and getattr(a, "dtype", None) == torch.uint8:
            return None  # its truth values are uint8
        x = _as_range(a) if of is None else of(a)
        dims = range(x.ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
        if dim is not None and not (len(dims) and all(type(d) is int and -x.ndim <= d < x.ndim for d in dims)):
            return None
        if x.ndim == 0:
            return x
        dims = [d % x.ndim for d in dims]
        ends = [end.expand(*x.shape, *_blocks_of(end)) for end in ((x.lo,) if x.exact else (x.lo, x.hi))]
        ends = [operation(end, dim=tuple(dims), keepdim=keepdim) for end in ends]
        if not x.dtype.is_floating_point:
            return Range(ends[0], ends[-1], x.dtype, x.limit)
        nan = _maybe_nan(x).expand(*x.shape, *_blocks_of(torch.empty(broadcast_shape(x.lo, x.hi), device="meta")))
        return Range(*_anything_where(nan.any(dim=tuple(dims), keepdim=keepdim), ends[0], ends[-1]), x.dtype, x.limit)

    return rule


def _of_dim(rule: Callable[..., Range | None], kind: Callable[[Any], Any]) -> Callable[..., Any]:
    """torch.min and torch.max along a dimension: the extremes, and where they are."""

    def along(a: Any, dim: int, keepdim: bool) -> Any:
        values = rule(a, dim, keepdim)
        if values is None:
            return None
        last = torch.full_like(values.lo, max(0.0, a.shape[dim] - 1.0) if a.ndim else 0.0, dtype=torch.float64)
        return kind((values, Range(torch.zeros_like(last), last, torch.int64, float(max(1, math.prod(a.shape))))))

    return along


def _sum(a: Any, dim: Any = None, keepdim: bool = False) -> Range | None:
    x = _number(a)
    count = math.prod(x.shape)
    if not x.dtype.is_floating_point:
        added = _reduced(torch.sum)(x, dim, keepdim) if x.limit * count < _EXACT else None
        return None if added is None else Range(added.lo, added.hi, torch.int64, x.limit * count)
    size = torch.maximum(-x.lo, x.hi)  # of the greatest of each; the sum's error grows with all of them
    parts = [_reduced(torch.sum)(Range(end, end, torch.int64), dim, keepdim) for end in (x.lo, x.hi, size)]
    if parts[0] is None or parts[1] is None or parts[2] is None:
        return None
    lo, hi, slack = (p.lo for p in parts)  # type: ignore[union-attr]
    slack = slack * (2 * (count + 1) * torch.finfo(x.dtype).eps)
    return _result(lo - slack, hi + slack, x.dtype, _INF)


def _unbind(a: Any, dim: int = 0) -> tuple[Any, ...] | None:
    if not isinstance(a, Range) or not -a.ndim <= dim < a.ndim:
        return None
    before = (slice(None),) * (dim % a.ndim)
    return tuple(_index(a, (*before, n)) for n in range(a.shape[dim]))


def _stack(tensors: Any, dim: int = 0) -> Range | None:
    ranges = [_as_range(t) for t in tensors]
    r = ranges[0]
    if any((x.dtype, x.shape) != (r.dtype, r.shape) for x in ranges) or not -r.ndim - 1 <= dim <= r.ndim:
        return None
    place = dim % (r.ndim + 1)
    exact = all(x.exact for x in ranges)
    ends = []
    for all_ends in ([x.lo for x in ranges], [x.hi for x in ranges])[: 2 - exact]:
        all_ends = [end.expand(*r.shape, *_blocks_of(end)) for end in all_ends]
        ends.append(torch.stack(torch.broadcast_tensors(*all_ends), place))
    return Range(ends[0], ends[-1], r.dtype, max(x.limit for x in ranges))


def _bucketize(a: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Range | None:
    """How many of the sorted boundaries are below a number, or not above it with `right`."""
    if not (isinstance(a, Range) and a.ndim == 0 and isinstance(boundaries, Tensor) and boundaries.ndim == 1):
        return None
    if a.dtype != boundaries.dtype or isinstance(boundaries, Range) or not len(boundaries):
        return None
    bounds, same, _ = _bounds_of_captured(boundaries)
    if bounds is not same or a.dtype == torch.bool or not _all(bounds[1:] >= bounds[:-1]):
        return None
    lo = torch.searchsorted(bounds, a.lo.contiguous(), right=right).double()
    hi = lo if a.exact else torch.searchsorted(bounds, a.hi.contiguous(), right=right).double()
    return Range(lo, hi, torch.int32 if out_int32 else torch.int64, float(len(boundaries)))


def _searchsorted(
    sorted_sequence: Any, a: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None
) -> Range | None:
    return _bucketize(a, sorted_sequence, out_int32=out_int32, right=right or side == "right")


def _is_in(a: Any, values: Any, *, assume_unique: bool = False, invert: bool = False) -> Range | None:
    if not isinstance(a, Range) or a.ndim:
        return None
    if isinstance(values, Range | Tensor) and values.ndim:
        a = _unsqueezed(a, [None] * values.ndim)
    found = _reduced(torch.any, _boolean)(_equal(a, values))
    return _not(found) if invert else found


_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "radd"), _add),
    **dict.fromkeys(("sub", "subtract"), _sub),
    "rsub": lambda a, b: _sub(b, a),
    **dict.fromkeys(("mul", "multiply", "rmul"), _mul),
    **dict.fromkeys(("neg", "negative"), _neg),
    **dict.fromkeys(("positive", "clone", "detach", "contiguous"), lambda a: a),
    **dict.fromkeys(("abs", "absolute"), _abs),
    "square": lambda a: _power(a, 2),
    **dict.fromkeys(("floordiv", "floor_divide"), _floor_divide),
    "rfloordiv": lambda a, b: _floor_divide(b, a),
    **dict.fromkeys(("truediv", "div", "divide", "true_divide"), _true_divide),
    "rdiv": lambda a, b: _true_divide(b, a),
    **dict.fromkeys(("mod", "remainder"), _remainder),
    "fmod": _fmod,
    "rmod": lambda a, b: _remainder(b, a),
    "pow": _power,
    "rpow": lambda a, b: _power(b, a),
    "sqrt": _monotone(torch.sqrt, 0.0),
    "exp": _monotone(torch.exp),
    "exp2": _monotone(torch.exp2),
    "log": _monotone(torch.log, 0.0),
    "log2": _monotone(torch.log2, 0.0),
    "log10": _monotone(torch.log10, 0.0),
    "log1p": _monotone(torch.log1p, -1.0),
    "tanh": _monotone(torch.tanh),
    "sigmoid": _monotone(torch.sigmoid),
    **dict.fromkeys(("lshift", "bitwise_left_shift"), _shift_left),
    **dict.fromkeys(("rshift", "bitwise_right_shift"), _shift_right),
    "rlshift": lambda a, b: _shift_left(b, a),
    "rrshift": lambda a, b: _shift_right(b, a),
    **dict.fromkeys(("sign", "sgn"), _sign),
    "minimum": _minimum,
    "maximum": _maximum,
    "min": _min_max(_minimum, torch.amin, torch.return_types.min),
    "max": _min_max(_maximum, torch.amax, torch.return_types.max),
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_min": lambda a, min: _clamp(a, min=min),
    "clamp_max": lambda a, max: _clamp(a, max=max),
    "where": _where,
    "masked_fill": _masked_fill,
    "floor": _rounded(torch.floor),
    "ceil": _rounded(torch.ceil),
    **dict.fromkeys(("trunc", "fix"), _rounded(torch.trunc)),
    "round": _rounded(torch.round),
    **dict.fromkeys(("lt", "less"), _less),
    **dict.fromkeys(("le", "less_equal"), _at_most),
    **dict.fromkeys(("gt", "greater"), _greater),
    **dict.fromkeys(("ge", "greater_equal"), _at_least),
    "eq": _equal,
    **dict.fromkeys(("ne", "not_equal"), _unequal),
    "logical_not": _not,
    "logical_and": _logical(_and),
    "logical_or": _logical(_or),
    "logical_xor": _logical(_xor),
    **dict.fromkeys(("invert", "bitwise_not"), _invert),
    **dict.fromkeys(("and", "rand", "bitwise_and"), _bitwise(_and, torch.bitwise_and, _bits_and)),
    **dict.fromkeys(("or", "ror", "bitwise_or"), _bitwise(_or, torch.bitwise_or, _bits_or)),
    **dict.fromkeys(("xor", "rxor", "bitwise_xor"), _bitwise(_xor, torch.bitwise_xor, _bits_xor)),
    "isin": _is_in,
    "any": _reduced(torch.any, _boolean),
    "all": _reduced(torch.all, _boolean),
    "amin": _reduced(torch.amin),
    "amax": _reduced(torch.amax),
    "sum": _sum,
    "count_nonzero": lambda a, dim=None: _sum(_boolean(a), dim),
    "bucketize": _bucketize,
    "searchsorted": _searchsorted,
    "unsqueeze": _unsqueeze,
    "unbind": _unbind,
    "stack": _stack,
    "to": _to,
    "type_as": _to,
    "type": lambda a, *args: _to(a, *args) if args else None,
    "bool": _cast(torch.bool),
    "int": _cast(torch.int32),
    "long": _cast(torch.int64),
    "short": _cast(torch.int16),
    "float": _cast(torch.float32),
    "double": _cast(torch.float64),
    "half": _cast(torch.float16),
    "bfloat16": _cast(torch.bfloat16),
    "getitem": _index,
    "take": lambda a, index: _index(a.reshape(-1), index) if isinstance(a, Tensor) else None,
}
