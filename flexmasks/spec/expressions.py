"""Mask functions as expressions of their indices.

A function is called once, with expressions in place of indices, and what it does to them is written down. So closures
are read without looking into them, also while torch.compile traces, where their variables cannot be read.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _of_two(operation: str, is_reflected: bool = False) -> Callable[[Expression, Any], Expression]:
    """The method of Expression that writes an operator with two operands down."""

    def method(self: Expression, other: Any) -> Expression:
        return Expression(operation, *((other, self) if is_reflected else (self, other)))

    return method


class Expression:
    """An operation on operands: other expressions, numbers and tensors.

    operation: the name of a function of `operator`; "torch" for a function of torch, whose operands are it, its
        arguments by position, and pairs of names and arguments; "getitem", whose operands are a table and its indices;
        "constant"; "parameter", whose operand is the name of a number; or the name of an index, "b", "h", "q" or "kv",
        which has no operands.
    """

    def __init__(self, operation: str, *operands: Any) -> None:
        self.operation = operation
        self.operands = operands

    __lt__ = _of_two("lt")
    __le__ = _of_two("le")
    __gt__ = _of_two("gt")
    __ge__ = _of_two("ge")
    __eq__ = _of_two("eq")  # type: ignore[assignment] # as for tensors
    __ne__ = _of_two("ne")  # type: ignore[assignment] # as for tensors
    __hash__ = None  # type: ignore[assignment] # equality is an expression

    __add__ = _of_two("add")
    __radd__ = _of_two("add", is_reflected=True)
    __sub__ = _of_two("sub")
    __rsub__ = _of_two("sub", is_reflected=True)
    __mul__ = _of_two("mul")
    __rmul__ = _of_two("mul", is_reflected=True)
    __floordiv__ = _of_two("floordiv")
    __rfloordiv__ = _of_two("floordiv", is_reflected=True)
    __mod__ = _of_two("mod")
    __rmod__ = _of_two("mod", is_reflected=True)
    __and__ = _of_two("and_")
    __rand__ = _of_two("and_", is_reflected=True)
    __or__ = _of_two("or_")
    __ror__ = _of_two("or_", is_reflected=True)
    __xor__ = _of_two("xor")
    __rxor__ = _of_two("xor", is_reflected=True)
    __iter__ = None  # without it Python would ask for items without end

    def __getitem__(self, index: Any) -> Expression:
        return _item(self, index)

    def __bool__(self) -> bool:
        raise TypeError("an index stands for many values at once, and has no truth value")

    def __neg__(self) -> Expression:
        return Expression("neg", self)

    def __invert__(self) -> Expression:
        return Expression("inv", self)

    def __abs__(self) -> Expression:
        return Expression("abs", self)

    abs = __abs__

    # Methods and properties of tensors that masks call on an index, or on a result.

    def new_ones(self, *size: Any, dtype: Any = None, **options: Any) -> Expression:
        """Return 1, or True, which stands for a tensor of it."""
        return Expression("constant", True if dtype is torch.bool else 1)

    def new_zeros(self, *size: Any, dtype: Any = None, **options: Any) -> Expression:
        """Return 0, or False, which stands for a tensor of it."""
        return Expression("constant", False if dtype is torch.bool else 0)

    def to(self, *given: Any, **options: Any) -> Expression:
        """The same on any device, or as a whole number or a boolean. Raises TypeError for other dtypes."""
        dtypes = [x for x in (*given, *options.values()) if isinstance(x, torch.dtype | Tensor | Expression)]
        if not dtypes:
            return self
        if dtypes[0] is torch.bool:
            return Expression("ne", self, 0)
        if dtypes[0] is torch.int32 or dtypes[0] is torch.int64:
            return Expression("add", self, 0)  # a boolean becomes a number
        raise TypeError(f"an expression has no values in the dtype of {dtypes[0]}")

    device = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Expression:
        if function is torch.Tensor.__getitem__:
            return _item(*args)
        return Expression("torch", function, args, tuple((kwargs or {}).items()))


def _as_method(function: Callable[..., Any]) -> Callable[..., Expression]:
    return lambda self, *args, **kwargs: Expression("torch", function, (self, *args), tuple(kwargs.items()))


for _name in ("clamp", "clip", "minimum", "maximum", "logical_and", "logical_or", "logical_xor", "logical_not"):
    setattr(Expression, _name, _as_method(getattr(torch, _name)))
for _name, _dtype in {"bool": torch.bool, "int": torch.int32, "long": torch.int64}.items():
    setattr(Expression, _name, functools.partialmethod(Expression.to, _dtype))

INDICES = tuple([Expression(name) for name in ("b", "h", "q", "kv")])


class _IndexingByExpressions(TorchFunctionMode):
    """A mode that writes `tensor[expression]` down, for which torch calls no method of the expression."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Expression) for i in index):
                return _item(*args)
        return function(*args, **(kwargs or {}))


def _item(table: Any, index: Any) -> Expression:
    return Expression("getitem", table, *(index if isinstance(index, tuple) else (index,)))


def recorded(function: Callable[..., Any]) -> Any:
    """What a mask function returns for indices that are expressions. Raises what the function does, if it only runs on
    tensors; torch.compile can trace this.
    """
    with _IndexingByExpressions():
        return function(*INDICES)


def expression_of(function: Callable[..., Any]) -> Expression | None:
    """What a mask function computes, or None if it only runs on tensors; torch.compile can trace this."""
    try:
        result = recorded(function)
    except Exception:
        return None
    return result if isinstance(result, Expression) else None


def indices_in(value: Any) -> str:
    """Which of the letters b, h, q and k an expression depends on."""
    if isinstance(value, list | tuple):
        return "".join([indices_in(v) for v in value])
    if not isinstance(value, Expression):
        return ""
    return indices_in(value.operands) if value.operands else value.operation[0]


def are_same(a: Any, b: Any) -> bool:
    """Whether two expressions differ at most in a position, q or kv."""
    if isinstance(a, Expression) and isinstance(b, Expression):
        if not a.operands and not b.operands:
            return a.operation == b.operation or {a.operation, b.operation} == {"q", "kv"}
        return a.operation == b.operation and are_same(a.operands, b.operands)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(are_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Expression | Tensor) or isinstance(b, Expression | Tensor):
        return a is b
    return type(a) is type(b) and bool(a == b)


def value_of(value: Any, batch: Tensor, position: Tensor) -> Any:
    """An expression's value, for indices of batch elements and positions that broadcast."""
    if isinstance(value, list | tuple):
        return type(value)([value_of(v, batch, position) for v in value])
    if not isinstance(value, Expression):
        return value
    if not value.operands:
        return batch if value.operation == "b" else position
    if value.operation == "constant":
        return value.operands[0]
    if value.operation == "torch":
        function, args, kwargs = value_of(value.operands, batch, position)
        return function(*args, **dict(kwargs))
    if value.operation == "getitem":
        table, *index = value_of(value.operands, batch, position)
        return table[tuple(index)]
    return getattr(operator, value.operation)(*value_of(value.operands, batch, position))
