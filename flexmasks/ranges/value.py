"""Range of an index over many blocks, and the dispatch of its operations."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.ranges.context import (
    INF,
    GiveUp,
    Refused,
    current_evaluation,
    evaluations_of_mixed_dtypes,
    give_up_on_mixed_dtypes,
)

BLOCK_DIMS = 4  # batch, heads, query blocks, key blocks
_START = 1 << 13  # an operation starts in the time in which it computes so many numbers
_MAX_ELEMENTS = 1 << 24  # elements of a tensor with dimensions that a rule computes with
LIKE_FUNCTIONS = ("zeros_like", "ones_like", "full_like")

# Operations that use their operands once, if these are truth values or stored.
_SINGLE_USES = {"and", "rand", "bitwise_and", "or", "ror", "bitwise_or", "invert", "bitwise_not"}
_SINGLE_USES |= {"logical_and", "logical_or", "logical_not", "lt", "le", "gt", "ge", "eq", "ne"}

_AnyRule = TypeVar("_AnyRule", bound=Callable[..., Any])
_RULES: dict[str, Callable[..., Any]] = {}


def rule(*names: str) -> Callable[[_AnyRule], _AnyRule]:
    """Register the decorated function as the rule of torch operations.

    names: torch's names, without surrounding underscores: "add" means torch.add, Tensor.add and the `+` of a range and
        an operand, "rsub" means the `-` of an operand and a range.

    The function is called with the operation's own arguments, of which at least one is a Range or a sequence with one.
    It returns a Range that contains every value that can occur, or None for arguments that it does not cover. An
    operation counts as not understood if its rule returns None or its arguments do not fit the rule's signature.
    """

    def register(function: _AnyRule) -> _AnyRule:
        for name in names:
            if name in _RULES:
                raise ValueError(f"flexmasks: the operation {name!r} already has a range rule.")
            _RULES[name] = function
        return function

    return register


def reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(b, a)


@dataclass(frozen=True)
class Steps:
    """Ranges that follow each other without gaps: along `dim`, block n holds the `size` numbers from `first + n * size`
    on, as far as they are below `end`.
    """

    first: int
    size: int
    end: int
    dim: int  # of the block dimensions, from 0 to 3

    def moved(self, by: int) -> Steps:
        return Steps(self.first + by, self.size, self.end + by, self.dim)

    def divided(self, by: int) -> Steps | None:
        """The steps of the quotients rounded down, or None if they overlap."""
        if self.size % by or self.first % by:
            return None
        return Steps(self.first // by, self.size // by, -(-self.end // by), self.dim)


class Range:
    """Numbers or truth values between `lo` and `hi`, one per block.

    The last four dimensions of `lo` and `hi` are [batch, heads, query blocks, key blocks]. Before them come the `ndim`
    dimensions that the mask's function sees: none for an index, one for a row of a table. For truth values both ends
    are bool, "certainly" and "possibly". For numbers both are float64. If both ends are the same tensor object, the
    value is exact.

    limit: bound of the absolute value, as a Python number. It can prove that nothing overflows without reading the
        tensors.
    limit_reached: whether the value `limit` itself occurs in some block.
    steps: describes ranges that follow each other without a gap, otherwise None.
    """

    __array_ufunc__ = None  # makes NumPy's numbers leave operators to this class
    # Tables that have one element at all indices of a block, along which dimension: (id, version, dimension).
    constant_in: frozenset[tuple[int, int, int]] = frozenset()

    def __init__(
        self,
        lo: Tensor,
        hi: Tensor,
        dtype: torch.dtype,
        limit: float = INF,
        limit_reached: bool = False,
        steps: Steps | None = None,
    ) -> None:
        self.lo, self.hi, self._dtype = lo, hi, dtype
        self.limit, self.limit_reached, self.steps = limit, limit_reached, steps
        self.ndim = max(0, lo.ndim - BLOCK_DIMS, hi.ndim - BLOCK_DIMS)
        self.members: Any = None  # the integers in each range, see `ranges.members`, if they are known
        # The operator and the two integers whose comparison gave this truth value.
        self.comparison: tuple[str, Any, Any] | None = None
        evaluation = current_evaluation.get() if self.ndim else None
        if evaluation is not None:
            for end in (lo, hi):
                evaluation.note_width(math.prod(end.shape[: max(0, end.ndim - BLOCK_DIMS)]))

    @classmethod
    def of_indices(
        cls, lo: Tensor, hi: Tensor, limit: int, steps: Steps | None = None, limit_reached: bool = True
    ) -> Range:
        """The range of indices from lo to hi inclusive, one tensor if each block has one index.

        limit: an upper bound of all indices. limit_reached: whether it is one of them.
        """
        low = lo.double()
        return cls(low, low if hi is lo else hi.double(), torch.int64, limit, limit_reached, steps)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The type; inside an evaluation reading it counts as a question for the type.

        Python and torch read this attribute when they check `isinstance(q, torch.Tensor)`. An answer that only pretends
        would let torch read the memory of a tensor that does not exist, and "no" would be wrong of the elements. So
        the evaluation ends.
        """
        evaluation = current_evaluation.get()
        if evaluation is None or evaluation.rule_depth:
            return type(self)
        evaluation.ask_for_type(sys._getframe(1))
        return type(self)

    @property
    def exact(self) -> bool:
        return self.lo is self.hi

    @property
    def dtype(self) -> torch.dtype:
        if evaluations_of_mixed_dtypes:
            give_up_on_mixed_dtypes()
        return self._dtype

    @property
    def known_dtype(self) -> torch.dtype:
        """The dtype, even where torch's may be another one."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        evaluation = current_evaluation.get()
        return self.lo.device if evaluation is None else evaluation.device

    @property
    def shape(self) -> torch.Size:
        """The shape that the function sees, empty for an index."""
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
        return lambda *args, **kwargs: dispatch(method, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __iter__(self) -> Any:
        return iter(dispatch(torch.Tensor.unbind, (self,), {})) if self.ndim else _refuse("iterate over an index")

    def __repr__(self) -> str:
        return f"Range({self.lo}, {self.hi}, {self.dtype})"

    def __getitem__(self, index: Any) -> Any:
        return dispatch(torch.Tensor.__getitem__, (self, index), {})

    def __len__(self) -> int:
        return self.shape[0] if self.ndim else _refuse("take the `len()` of an index")

    __hash__ = object.__hash__


def _refuse(action: str) -> NoReturn:
    raise Refused(
        f"a mask function may not {action}: its arguments stand for many indices at once. Use `&`, `|`, `~` for "
        "and, or, not, `(a < b) & (b < c)` for chained comparisons, torch.where for if, torch.minimum for min."
    )


def _refusal(action: str) -> Callable[..., NoReturn]:
    return lambda *_, **__: _refuse(action)


_REFUSED = {
    "__bool__": "decide by `if`, `and`, `or`, `not` or a chained comparison of an index",
    "item": "call `.item()` on an index",
    "tolist": "call `.tolist()` on an index",
    "__int__": "call `int()` on an index",
    "__float__": "call `float()` on an index",
    "__index__": "use an index as a Python integer, or index a list by it (capture a tensor instead)",
    "__array__": "turn an index into a NumPy array, or index one by it (capture a torch tensor instead)",
}
for _name, _action in _REFUSED.items():
    setattr(Range, _name, _refusal(_action))


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def operate(self: Range, *operands: Any) -> Any:
        if operands and not isinstance(operands[0], Range):
            if isinstance(operands[0], np.bool_):
                raise GiveUp("a truth value of NumPy, which torch takes for a number")
            if isinstance(operands[0], np.integer | np.floating):
                operands = (operands[0].item(),)
            if not isinstance(operands[0], Tensor | int | float):
                return NotImplemented
        return dispatch(method, (self, *operands), {})

    return operate


_IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift setitem".split()  # noqa: SIM905
_OPERATORS = """
    add radd sub rsub mul rmul floordiv rfloordiv truediv rtruediv mod rmod pow rpow and rand or ror xor rxor
    lshift rlshift rshift rrshift neg pos abs invert eq ne lt le gt ge matmul rmatmul
"""
for _name in (*_OPERATORS.split(), *_IN_PLACE):
    setattr(Range, f"__{_name}__", _operator(f"__{_name}__"))


def broadcast_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """torch.broadcast_shapes, which takes longer than an operation on small tensors, only where shapes differ."""
    return tuple(a.shape) if a.shape == b.shape else tuple(torch.broadcast_shapes(a.shape, b.shape))


def truth_range(certain: Tensor, possible: Tensor) -> Range:
    return Range(certain, possible, torch.bool, 1.0)


def check_size(shape: torch.Size) -> None:
    if math.prod(shape) > _MAX_ELEMENTS:
        raise GiveUp(f"a tensor of {math.prod(shape)} elements in arithmetic")


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if name.startswith("__"):
        name = name.strip("_")
    # All other names of the same tensor would have to change, too.
    if name in _IN_PLACE or name.endswith("_") or kwargs.get("out") is not None:
        raise GiveUp(f"{name} changes a tensor in place")
    if func is torch.Tensor.where:  # the method's condition comes second: a.where(condition, b)
        args = (args[1], args[0], *args[2:]) if len(args) > 1 else args
    makes_constant = name.startswith("new_") or name in LIKE_FUNCTIONS  # with an index's dtype and device
    if makes_constant and not any(isinstance(x, Range) for x in (*args[1:], *kwargs.values())):
        # The index's own dtype, which may not be certain, counts only if the call gives none.
        dtype = args[0].known_dtype if kwargs.get("dtype") is not None else args[0].dtype
        like = torch.zeros(args[0].shape, dtype=dtype, device=args[0].device)
        return func(like, *args[1:], **kwargs)
    evaluation = current_evaluation.get()
    if evaluation is None:
        return _result_of(func, name, args, kwargs)
    evaluation.rule_depth += 1
    try:
        result = _result_of(func, name, args, kwargs)
        if type(result) is Range:  # rows of a table are looked up later
            evaluation.computed += _START + result.lo.numel() + (0 if result.exact else result.hi.numel())
        return result
    finally:
        evaluation.rule_depth -= 1


def _result_of(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with compat.without_torch_function():  # so the mode of `evaluate` skips the rules' own operations
        evaluation = current_evaluation.get()
        if evaluation is not None and evaluation.pairs is not None:
            of_pair = evaluation.pairs(name, (*args, *kwargs.values()))
            if of_pair is not None:
                return of_pair
        function = _RULES.get(name)
        if function is not None:
            try:
                result = function(*args, **kwargs)
            except TypeError as error:
                # Without a frame below this one, the arguments did not fit the rule's signature.
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise
                result = None
            if result is not None:
                if isinstance(result, Range) and compat.is_compiling() and not compat.is_exporting():
                    _store(name, result)
                return result
        if evaluation is not None:
            plain_name = _plain_name(name)
            if plain_name not in evaluation.not_understood:
                evaluation.not_understood.append(plain_name)
            if evaluation.mixed_dtypes:
                raise GiveUp(f"{plain_name} of numbers that came from mixed dtypes")
        return _any_value(func, args, kwargs)


def _store(name: str, result: Range) -> None:
    """Make torch's compiler store the ends of an operation's result.

    The compiler computes again at each use what it does not store, and a rule uses the ends of its operands many times:
        the time to compile would grow exponentially with the length of a chain of operations. as_strided reads memory.
    """
    if name not in _SINGLE_USES or result.known_dtype != torch.bool:
        lo, hi = result.lo, result.hi
        result.lo = _stored_end(lo)
        result.hi = result.lo if hi is lo else _stored_end(hi)


def _stored_end(end: Tensor) -> Tensor:
    end = end.clone(memory_format=torch.contiguous_format)
    return end.as_strided(end.shape, end.stride())


def _plain_name(name: str) -> str:
    if name == "getitem":
        return "indexing"
    return name[1:] if name[:1] == "r" and name[1:] in _RULES else name


def _any_value(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The range of all values, in the dtype and shape that the operation gives for zeros."""
    ranges: list[Range] = []

    def zeros_like(value: Any) -> Any:
        if isinstance(value, Range):
            ranges.append(value)
            return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        return type(value)(zeros_like(v) for v in value) if type(value) in (tuple, list) else value

    try:
        result = func(*(zeros_like(a) for a in args), **{k: zeros_like(v) for k, v in kwargs.items()})
    except Exception as error:  # if the function is wrong, the evaluation element by element raises it
        raise GiveUp(str(error)) from error
    ends = [end for r in ranges for end in (r.lo, r.hi)]
    blocks = torch.broadcast_shapes(*(end.shape[max(0, end.ndim - BLOCK_DIMS) :] for end in ends))

    def any_value(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)([any_value(v) for v in value])
        if not isinstance(value, Tensor):
            raise GiveUp(f"{getattr(func, '__name__', func)} gives no tensor")
        shape = blocks
        if value.ndim:
            shape = torch.Size((*value.shape, *(1,) * (BLOCK_DIMS - len(blocks)), *blocks))
            check_size(shape)
        if value.dtype == torch.bool:
            never = torch.zeros(shape, dtype=torch.bool, device=ends[0].device)
            return truth_range(never, ~never)
        hi = torch.full(shape, INF, dtype=torch.float64, device=ends[0].device)
        return Range(-hi, hi, value.dtype)

    return any_value(result)
