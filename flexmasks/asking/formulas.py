"""Expressions as formulas over whole numbers, and the smallest point where one holds.

islpy decides sums, comparisons, and `//` and `%` by constants. z3 also decides tables, as functions that may be any,
and products of symbols where it can.
"""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks.extend import Expression

# Some seconds each, counted so that no answer depends on the machine.
_ISL_OPERATIONS, _Z3_RESOURCES = 5_000_000, 3_000_000
# Functions of torch that are named otherwise here.
_NAMES = {"absolute": "abs", "min": "minimum", "max": "maximum", "clip": "clamp", "and": "and_", "or": "or_"}
_NAMES |= {"remainder": "mod", "floor_divide": "floordiv", "subtract": "sub", "multiply": "mul"}
_NAMES |= {"invert": "inv", "logical_not": "inv", "logical_and": "and_", "logical_or": "or_", "logical_xor": "xor"}


class Undecided(Exception):
    """Why a formula is not decided, in words."""


class Table(NamedTuple):
    """A tensor that stands for any of its kind.

    lows, highs: limits of its values, numbers or expressions of symbols.
    is_increasing: whether its values never fall along the last dimension.
    """

    tensor: Tensor
    lows: Sequence[Any]
    highs: Sequence[Any]
    is_increasing: bool


class Read(NamedTuple):
    """A value of a table.

    indices, places: the indices as the formula has them, and their values.
    """

    table: Tensor
    indices: tuple[Any, ...]
    places: tuple[int, ...]
    value: int


class Point(NamedTuple):
    """Where a formula holds: values of the symbols, and of the tables that it reads."""

    values: Mapping[str, int]
    reads: Sequence[Read] = ()


def smallest(
    symbols: Sequence[str], domain: Expression, condition: Any, tables: Sequence[Table], nowhere: str | None = None
) -> Point | None:
    """Return the point of the domain where the condition holds, lexicographically smallest by the symbols in this
    order, or None if there is none.

    nowhere: a symbol for no value of which the condition is to hold, with the other symbols' values at the point.

    Raises Undecided, or ImportError if no solver is installed.
    """
    reasons, missing = [], []
    theories = {"islpy": _Affine} if nowhere is not None else {"islpy": _Affine, "z3": _WithTables}
    for package, theory in theories.items():
        try:
            solver = importlib.import_module(package)
        except ImportError:
            missing.append(package)
            continue
        try:
            return theory(solver, symbols, tables).smallest(domain, condition, nowhere)
        except Undecided as reason:
            reasons.append(str(reason))
    install = f"{' and '.join(missing)} of pip install 'flexmasks[proofs]'"
    if not reasons:
        raise ImportError(f'flexmasks: lengths="all" needs {install}.')
    raise Undecided(reasons[-1] + (f"; {install} may decide it" if missing else ""))


class _Theory:
    """How a solver writes numbers and truth values: what both write alike."""

    truth: Any  # the type of truth values
    symbols: dict[str, Any]
    constant: Callable[[int], Any]
    compare: Callable[[str, Any, Any], Any]
    choose: Callable[[Any, Any, Any], Any]
    inverse: Callable[[Any], Any]
    divide: Callable[[Any, Any], Any]
    read: Callable[[Any, tuple[Any, ...]], Any]
    smallest: Callable[[Expression, Any, str | None], Point | None]

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """An expression, a number or a tensor of one number in the solver's form."""
        if isinstance(value, Expression):
            if id(value) not in self._known:
                self._known[id(value)] = value, self._of_operation(*_as_operator(value))
            return self._known[id(value)][1]
        if isinstance(value, Tensor) and not value.ndim:
            value = value.item()
        if type(value) not in (bool, int):
            raise Undecided(f"only whole numbers are read, not {type(value).__name__}")
        return self.constant(value)

    def number(self, value: Any) -> Any:
        made = self.of(value)
        return self.choose(made, self.constant(1), self.constant(0)) if isinstance(made, self.truth) else made

    def _of_operation(self, operation: str, operands: tuple[Any, ...]) -> Any:
        if operation == "constant":
            return self.of(operands[0])
        if operation == "parameter" or not operands:
            return self.symbols[operands[0] if operands else operation]
        if operation == "getitem":
            return self.read(operands[0], operands[1:])
        made = list(map(self.of, operands))
        are_truths = [isinstance(x, self.truth) for x in made]
        if operation in ("add", "mul") and all(are_truths):  # torch adds booleans to a boolean
            operation = "or_" if operation == "add" else "and_"
        if operation in ("and_", "or_", "xor", "inv", "where") and all(are_truths):
            return self._of_truths(operation, *made)
        if operation == "where" and are_truths[0]:
            return self.choose(made[0], *map(self.number, operands[1:]))
        x, *rest = map(self.number, operands)
        if operation in ("neg", "abs"):
            negative = self.constant(0) - x
            return negative if operation == "neg" else self.choose(self.compare("gt", x, negative), x, negative)
        if len(rest) == 1 and operation in ("lt", "le", "gt", "ge", "eq", "ne"):
            return self.compare(operation, x, *rest)
        if len(rest) == 1 and operation in ("add", "sub", "mul"):
            return getattr(operator, operation)(x, *rest)
        if len(rest) == 1 and operation in ("minimum", "maximum"):
            return self.choose(self.compare("lt" if operation == "minimum" else "gt", x, *rest), x, *rest)
        if len(rest) == 1 and operation in ("floordiv", "mod"):
            quotient = self.divide(x, *rest)
            return quotient if operation == "floordiv" else x - quotient * rest[0]
        raise Undecided(f"`{operation}` of such values is not read")

    def _of_truths(self, operation: str, x: Any, y: Any = None, z: Any = None) -> Any:
        if operation == "where":
            return (x & y) | (self.inverse(x) & z)
        if operation == "xor":
            return (x | y) & self.inverse(x & y)
        return self.inverse(x) if operation == "inv" else getattr(operator, operation)(x, y)


def _as_operator(expression: Expression) -> tuple[str, tuple[Any, ...]]:
    """An expression's operation and operands, of a function of torch as of an operator."""
    operation, operands = expression.operation, expression.operands
    if operation == "getitem" and getattr(operands[0], "operation", "") == "getitem":  # table[b][q]
        return operation, (*_as_operator(operands[0])[1], *operands[1:])
    if operation != "torch":
        return operation, operands
    function, args, named = operands[0], operands[1], dict(operands[2])
    name = function.__name__.strip("_")
    if name in ("clamp", "clip"):
        low, high = (*args[1:], None, None)[:2]
        low, high = named.get("min", low), named.get("max", high)
        above = args[0] if low is None else Expression("maximum", args[0], low)
        return _as_operator(Expression("add", above, 0) if high is None else Expression("minimum", above, high))
    if named:
        raise Undecided(f"torch.{name} is not read with {', '.join(named)}")
    if name.startswith("logical"):
        args = tuple(Expression("ne", value, 0) for value in args)
    return _NAMES.get(name, name), args


class _Affine(_Theory):
    """Formulas of islpy: sets of points, and sums that are different on parts of the space."""

    def __init__(self, isl: Any, symbols: Sequence[str], tables: Sequence[Table]) -> None:
        super().__init__()
        self._isl, self.truth, self._context = isl, isl.Set, isl.Context()
        self._context.set_max_operations(_ISL_OPERATIONS)
        self._space = isl.Space.create_from_names(self._context, set=list(symbols))
        local, kind = isl.LocalSpace.from_space(self._space), isl.dim_type.set
        places = enumerate(symbols)
        self.symbols = {name: isl.PwAff.from_aff(isl.Aff.var_on_domain(local, kind, n)) for n, name in places}

    def smallest(self, domain: Expression, condition: Any, nowhere: str | None) -> Point | None:
        kind, names = self._isl.dim_type.set, list(self.symbols)
        try:
            within = self.of(domain)
            found = within & self.of(condition)
            if nowhere is not None:
                found = within - found.eliminate(kind, names.index(nowhere), 1)
            if found.is_empty():
                return None
            point = found.lexmin().sample_point()
        except self._isl.Error as error:
            is_long = "operations" in str(error)
            raise Undecided("it has too many cases" if is_long else "it multiplies symbols") from None
        return Point({name: point.get_coordinate_val(kind, n).to_python() for n, name in enumerate(names)})

    def constant(self, value: int) -> Any:
        if type(value) is bool:
            return (self.truth.universe if value else self.truth.empty)(self._space)
        return self._isl.PwAff.val_on_domain(self.truth.universe(self._space), self._number(value))

    def compare(self, operation: str, x: Any, y: Any) -> Any:
        return getattr(x, f"{operation}_set")(y)

    def choose(self, condition: Any, x: Any, y: Any) -> Any:
        return x.intersect_domain(condition).union_add(y.intersect_domain(condition.complement()))

    def inverse(self, truth: Any) -> Any:
        return truth.complement()

    def divide(self, x: Any, y: Any) -> Any:
        divisor = y.max_val().to_python() if y.is_cst() else 0
        if not divisor:
            raise Undecided("it divides by 0" if y.is_cst() else "it divides by a symbol")
        return (x if divisor > 0 else x.neg()).scale_down_val(self._number(abs(divisor))).floor()

    def read(self, table: Any, indices: tuple[Any, ...]) -> Any:
        raise Undecided("it reads a table")

    def _number(self, value: int) -> Any:
        return self._isl.Val.read_from_str(self._context, str(value))  # of any size


class _WithTables(_Theory):
    """Formulas of z3, where a table is a function that may be any."""

    def __init__(self, z3: Any, symbols: Sequence[str], tables: Sequence[Table]) -> None:
        super().__init__()
        self._z3, self.truth, self._context = z3, z3.BoolRef, z3.Context()
        self.symbols = {name: z3.Int(name, self._context) for name in symbols}
        self._tables = tables
        self._reads: list[tuple[Tensor, tuple[Any, ...], list[Any], Any]] = []
        self._mistakes: list[tuple[Any, str]] = []  # what must not hold, and what is wrong if it does

    def smallest(self, domain: Expression, condition: Any, nowhere: str | None) -> Point | None:
        z3 = self._z3
        within, holds = self.of(domain), self.of(condition)
        solver = z3.Solver(ctx=self._context)
        solver.set("rlimit", _Z3_RESOURCES)
        solver.add(within, *self._facts())
        for mistake, reason in self._mistakes:
            if solver.check(mistake) != z3.unsat:
                raise Undecided(reason)
        solver.add(holds)
        answer = solver.check()
        if answer == z3.unknown:
            raise Undecided("z3 did not find out in some seconds")
        if answer == z3.unsat:
            return None
        model = solver.model()

        def value(x: Any) -> int:
            found = model.eval(x, model_completion=True)
            return int(z3.is_true(found)) if isinstance(found, z3.BoolRef) else found.as_long()

        places = [place for _, _, at, _ in self._reads for place in at]
        solver.set("rlimit", _Z3_RESOURCES // 10)
        for term in [*self.symbols.values(), *places]:  # by halves, which is faster than what z3 has for it
            least, answer = -abs(value(term)), z3.sat
            while least < value(term) and answer != z3.unknown:
                middle = (least + value(term)) // 2
                answer = solver.check(term <= middle)
                if answer == z3.sat:
                    model = solver.model()
                else:
                    least = middle + 1
            solver.add(term == value(term))
        reads = [Read(table, indices, tuple(map(value, places)), value(x)) for table, indices, places, x in self._reads]
        return Point({name: value(symbol) for name, symbol in self.symbols.items()}, reads)

    def _facts(self) -> list[Any]:
        """What is known of the values that are read from tables."""
        facts = []
        for table in self._tables:
            reads = [(places, x) for tensor, _, places, x in self._reads if are_same(tensor, table.tensor)]
            for _, x in reads:
                facts += [x >= self.of(low) for low in table.lows] + [x <= self.of(high) for high in table.highs]
            for (one, x), (other, y) in itertools.permutations(reads, 2) if table.is_increasing else ():
                is_in_row = [i == j for i, j in zip(one[:-1], other[:-1], strict=True)]
                facts.append(self._z3.Implies(self._z3.And(*is_in_row, one[-1] <= other[-1]), x <= y))
        return facts

    def constant(self, value: int) -> Any:
        return (self._z3.BoolVal if type(value) is bool else self._z3.IntVal)(value, self._context)

    def compare(self, operation: str, x: Any, y: Any) -> Any:
        return getattr(operator, operation)(x, y)

    def choose(self, condition: Any, x: Any, y: Any) -> Any:
        return self._z3.If(condition, x, y)

    def inverse(self, truth: Any) -> Any:
        return self._z3.Not(truth)

    def divide(self, x: Any, y: Any) -> Any:
        self._mistakes.append((y == 0, "it may divide by 0"))
        return self._z3.If(y > 0, x / y, (-x) / (-y))  # z3 rounds down for divisors above 0

    def read(self, table: Any, indices: tuple[Any, ...]) -> Any:
        z3 = self._z3
        places = [self.of(i) for i in indices]
        is_whole = isinstance(table, Tensor) and table.dtype in (torch.bool, torch.int32, torch.int64)
        if not is_whole or len(indices) != table.ndim or any(isinstance(place, self.truth) for place in places):
            raise Undecided("tables are read in bool, int32 and int64, with a number as index of each dimension")
        table = next((known for known, *_ in self._reads if are_same(known, table)), table)
        self._mistakes += [(place < 0, "it may read a table at a negative index") for place in places]
        kind = z3.IntSort(self._context)
        result = z3.BoolSort(self._context) if table.dtype is torch.bool else kind
        value = z3.Function(f"table {id(table)}", *[kind] * table.ndim, result)(*places)
        self._reads.append((table, indices, places, value))
        return value


def are_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors stand for one table: they have the same dtype and values."""
    return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
