"""Answers for all lengths, and for all values of parameters."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks import Mask
from flexmasks.asking.formulas import Point, Read, Table, Undecided, are_same, smallest
from flexmasks.asking.subject import subject_of, takes
from flexmasks.extend import (
    Expression,
    MaskOverLengths,
    Parameter,
    as_number,
    definition_of,
    flatten,
    formula_of,
    in_message,
    inside,
)

Limits = Mapping[str, tuple[int | str | None, int | str | None] | Literal["increasing"]]  # of parameters, by name
_INDICES = ("b", "h", "q", "kv")
_LENGTH = "q_len"  # of queries and of keys
_SIDE = 8  # of the picture of a counterexample
_LARGEST = 1 << 24  # elements of its tables
# What solvers raise, and masks that do not take the numbers of a counterexample.
_UNDECIDED = (Undecided, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)


@dataclass(frozen=True, repr=False)
class Proof:
    """What `flexmasks.compare` found for all lengths; it prints as one line.

    Attributes:
        verdict: "proved" if the masks are the same, "refuted" if they are not, or "not decided".
        over: the lengths and values of parameters that the verdict holds for, in words.
        equal, implies, implied: as in a Comparison; None for what is not decided.
        reason: why it is not decided whether they are equal, or "".
        first: the smallest (b, h, q, kv) at which the masks differ, at the least length and with the smallest
            parameters there, or None.
        parameters: the values of parameters and tables there.
        example: the Comparison with these, at 8 queries and keys, or at the least length if that is longer or
            parameters depend on it; or None.
    """

    over: str
    equal: bool | None = None
    implies: bool | None = None
    implied: bool | None = None
    reason: str = ""
    first: tuple[int, int, int, int] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    example: Any = None

    @property
    def verdict(self) -> Literal["proved", "refuted", "not decided"]:
        return "not decided" if self.equal is None else "proved" if self.equal else "refuted"

    def show(self) -> None:
        """Print the answer, and show the counterexample if there is one."""
        print(self)
        if self.example is not None:
            self.example.show()

    def __repr__(self) -> str:
        if self.equal is None:
            return f"Proof(not decided for {self.over}: {self.reason})"
        if self.equal:
            return f"Proof(proved for {self.over}: a and b are the same)"
        where = _named({**dict(zip(_INDICES, self.first or (), strict=True)), **self.parameters})
        shows = "all that a shows" if self.implies else "no more than a" if self.implied else "other pairs than a"
        return f"Proof(refuted for {self.over}: b shows {shows}, and they differ at {where})"


def check_without_sizes(call: str, lengths: Any, sizes: Mapping[str, Any]) -> None:
    """Raise ValueError unless a call is for all lengths and no size is given."""
    given = [name for name, size in sizes.items() if size is not None]
    if lengths != "all" or given:
        got = f"`{'`, `'.join(given)}`" if given else f"lengths={lengths!r}"
        raise ValueError(
            f'{call}: lengths="all", which `parameters` need, is for all lengths, batch elements, heads and offsets of '
            f"queries: pass none of them, got {got}."
        )


def over_all(
    call: str,
    a: tuple[Any, Mapping[str, Any]],
    b: tuple[Any, Mapping[str, Any]],
    limits: Limits,
    over_lengths: Callable[..., Any],
) -> Proof:
    """Return whether masks are the same at all lengths and for all values of parameters.

    call: the name of the public call, with which errors begin.
    a, b: masks as a user hands them over, each with parameters for it.
    over_lengths: compares Masks over lengths.

    Raises ValueError, TypeError, or ImportError if no solver is installed.
    """
    sides = [_Side(call, given, params, limits) for given, params in (a, b)]
    box = _Box(call, limits, sides)
    try:
        one, other = [side.expression(box.symbols) for side in sides]
        point = box.smallest(Expression("xor", one, other))
        if point is None:
            return Proof(box.text, True, True, True)
        found = _Example(point, sides, box, 0 if box.has_length else _SIDE)
        if len(found.shown) == 1:
            raise Undecided(f"a solver finds a difference at {found.first}, and the masks have none there")
        example = over_lengths(*found.masks, found.size, batch=found.first[0] + 1, heads=found.first[1] + 1)
    except _UNDECIDED as reason:
        return Proof(box.text, reason=str(reason))
    implies, implied = box.are_implied(one, other), box.are_implied(other, one)
    return Proof(box.text, False, implies, implied, "", found.first, found.parameters, example)


def found_over_all(
    call: str, given: Any, params: Mapping[str, Any], documents: Mask | None, limits: Limits
) -> Iterator[tuple[str, str, tuple[int, int, int, int] | None]]:
    """Yield what is true of a mask at some length and for some values of parameters: a kind of finding, words, and the
    smallest (b, h, q, kv). The kind is "not decided", without a pair, where the words say why.

    documents: a mask of pairs outside of which the mask is to show none.
    """
    sides = [_Side(call, given, params, limits)]
    sides += [] if documents is None else [_Side(call, documents, {}, limits)]
    box = _Box(call, limits, sides)
    q, kv = Expression("q"), Expression("kv")
    try:
        shown, *same = [side.expression(box.symbols) for side in sides]
    except Undecided as reason:
        yield "not decided", str(reason), None
        return
    hidden = Expression("xor", shown, True)
    questions: dict[str, tuple[Any, str | None, str]] = {
        "does not see itself": (Expression("and_", hidden, kv == q), None, "a query hides its own key"),
        "sees the future": (Expression("and_", shown, kv > q), None, "a query sees a later key"),
        "sees nothing": (shown, "kv", "a query sees no key"),
        "seen by nobody": (shown, "q", "no query sees a key"),
    }
    for document in same:
        crosses = Expression("and_", shown, Expression("xor", document, True))
        questions["crosses a document"] = crosses, None, "a query sees a key of another document"
    sees_itself = False
    for kind, (condition, nowhere, words) in questions.items():
        try:
            point = None if nowhere and sees_itself else box.smallest(condition, nowhere)
            sees_itself |= kind == "does not see itself" and point is None
            if point is not None:
                found = _Example(point, sides, box, 0)
                sizes = {"q_len": found.size, "batch": found.first[0] + 1, "heads": found.first[1] + 1}
                MaskOverLengths(call, found.masks[0], **sizes)  # which refuses lengths that the mask does not take
                yield kind, f"{words} with {_named({_LENGTH: found.size, **found.parameters})}", found.first
        except _UNDECIDED as reason:
            yield "not decided", f"{kind}: {reason}", None


def _named(values: Mapping[str, Any]) -> str:
    short = {n: v.tolist() if isinstance(v, Tensor) and v.numel() <= 2 * _SIDE else v for n, v in values.items()}
    return ", ".join(f"{name}={in_message(v) if isinstance(v, Tensor) else v}" for name, v in short.items())


class _Side:
    """A mask in whose place a solver looks at all masks with other numbers and tables.

    numbers: the names of its numbers, among them tensors of one number.
    tables: the names and values of its other tensors.
    """

    def __init__(self, call: str, given: Any, params: Mapping[str, Any], names: Iterable[str]) -> None:
        if isinstance(given, BlockMask | Tensor):
            raise ValueError(
                f'{call}: lengths="all" is for names, masks and functions, which have no lengths of their own, got '
                f"{in_message(given)}."
            )
        some = {name: 1 for name in names if takes(given, name)}
        self.mask = _opened(subject_of(given, some | dict(params)).mask, names)
        self._structure, leaves = flatten(self.mask)
        self._numbers = [(number.name, number.value) for number in leaves.numbers]
        tensors = zip(leaves.places, leaves.tensors, strict=True)
        self._tensors = [("" if place is None else place.name, tensor) for place, tensor in tensors]
        self.numbers = {name for name, _ in self._numbers} | {name for name, t in self._tensors if not t.ndim}
        self.tables = [(name, t) for name, t in self._tensors if t.ndim]

    def filled(self, values: Mapping[str, Any], table: Callable[[Tensor], Tensor] = lambda t: t) -> Mask:
        """Return the mask with other values of named numbers, and other tables."""
        numbers = [values.get(name, number) for name, number in self._numbers]
        tensors = [table(t) if t.ndim else values.get(name, t) for name, t in self._tensors]
        filled: Mask = self._structure.fill(tensors, numbers, has_own_globals=True)
        return filled

    def expression(self, values: Mapping[str, Any]) -> Any:
        """Return what the mask computes of the indices and of these values."""
        try:
            return formula_of(self.filled(values) if values else self.mask)
        except Exception as error:  # whatever a function raises that takes tensors only
            raise Undecided(f"{self.mask!r} cannot be read as a formula: {error}") from None


def _opened(mask: Mask, names: Iterable[str]) -> Mask:
    """A mask with a number under each of these names that it, or a mask inside, takes, and tensors for sequences."""

    def opened(parameter: Parameter | None, value: Any) -> Any:
        if isinstance(value, tuple) and any(isinstance(v, Mask) for v in value):
            return tuple(opened(parameter, v) for v in value)
        if isinstance(value, Mask):
            return _opened(value, names)
        return parameter.tensor(value, None) if parameter and parameter.is_sequence(value) else value

    definition = definition_of(mask)
    known = definition.parameters
    params = {name: opened(known.get(name), value) for name, value in mask.params.items()}
    return Mask(definition, {name: 1 for name in names if name in known} | params)


def _check_limits(call: str, limits: Limits, numbers: set[str], tables: set[str]) -> None:
    for name, value in limits.items():
        if name not in (numbers | tables | {_LENGTH}).difference(_INDICES):
            known = ", ".join(f"`{n}`" for n in sorted((numbers | tables) - {"", *_INDICES})) or "none"
            raise ValueError(f"{call}: `parameters` names `{name}`; the parameters of these masks are {known}.")
        if not (isinstance(value, list | tuple) and len(value) == 2) and not (value == "increasing" and name in tables):
            raise ValueError(
                f"{call}: `parameters` has limits, such as {{{name!r}: (0, None)}}, or 'increasing' for a table that "
                f"never falls, got {name!r}: {value!r}."
            )


def _in_words(limits: Sequence[Any]) -> str:
    return " in " + "..".join("" if x is None else str(x) for x in limits)


class _Box:
    """The lengths and values of parameters that a question is about.

    names: the numbers that are symbols, beyond the length.
    symbols: the expressions that stand for them.
    has_length: whether limits speak of the length.
    text: the box in words.
    """

    def __init__(self, call: str, limits: Limits, sides: Sequence[_Side]) -> None:
        self._call, self._sides = call, sides
        numbers = {name for side in sides for name in side.numbers}
        tables = {name for side in sides for name, _ in side.tables}
        _check_limits(call, limits, numbers, tables)
        self.names = [name for name in limits if name not in tables and name != _LENGTH]
        self.symbols = {name: Expression("parameter", name) for name in limits if name not in tables}
        self.has_length = any(_LENGTH in (name, *limits[name]) for name in limits)
        b, h, q, kv = (Expression(name) for name in _INDICES)
        length = Expression("parameter", _LENGTH)
        conditions = [b >= 0, h >= 0, q >= 0, kv >= 0, q < length, kv < length]
        self._order, texts = [_LENGTH], []
        for name in (n for n in limits if n not in tables):
            symbol, distance = Expression("parameter", name), Expression("parameter", f"distance of {name} from 0")
            if name in self.names:
                self._order += [distance.operands[0], name]
                conditions += [symbol <= distance, -symbol <= distance]
            for low, high in (map(self._limit, limits[name]), self._specified(name, None)):
                conditions += [low <= symbol] * (low is not None) + [symbol <= high] * (high is not None)
            texts.append(name + _in_words(limits[name]))
        self._order += _INDICES
        named: list[tuple[Tensor, list[str]]] = []  # distinct tables, each with all its names
        for name, tensor in (table for side in sides for table in side.tables):
            known = next((names for t, names in named if are_same(t, tensor)), None)
            if known is None:
                named.append((tensor, [name]))
            elif name not in known:
                known.append(name)
        self._tables = []
        for tensor, names in named:
            given = [limits[name] for name in names if name in limits]
            pairs = [tuple(map(self._limit, pair)) for pair in given if pair != "increasing"]
            conditions += [low <= high for low, high in pairs if low is not None and high is not None]
            pairs += [self._specified(name, tensor) for name in names]
            if tensor.dtype in (torch.int32, torch.int64):
                pairs.append((torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max))
            lows, highs = ([x for x in side if x is not None] for side in zip(*pairs, strict=True))
            self._tables.append(Table(tensor, lows, highs, "increasing" in given))
            texts.append(f"any {'increasing ' * ('increasing' in given)}{' = '.join(names)}")
            texts[-1] += "".join(_in_words(pair) for pair in given if pair != "increasing")
        self.text = ", ".join(["all lengths", *dict.fromkeys(texts)])
        self._domain = functools.reduce(operator.and_, conditions)
        if self.smallest(True) is None:
            raise ValueError(f"{call}: `parameters` leaves no values, got {dict(limits)}.")

    def smallest(self, condition: Any, nowhere: str | None = None) -> Point | None:
        return smallest(self._order, self._domain, condition, self._tables, nowhere)

    def are_implied(self, one: Any, other: Any) -> bool | None:
        """Whether the pairs that one mask shows are shown by the other, None if that is not decided."""
        try:
            return self.smallest(Expression("and_", one, Expression("xor", other, True))) is None
        except Undecided:
            return None

    def _limit(self, limit: Any) -> Any:
        limit = as_number(limit)
        if limit is None or type(limit) is int:
            return limit
        if limit not in (*self.names, _LENGTH):
            raise ValueError(
                f"{self._call}: a limit in `parameters` is an int, None, {_LENGTH!r} or the name of another parameter "
                f"there, got {limit!r}."
            )
        return Expression("parameter", limit)

    def _specified(self, name: str, tensor: Tensor | None) -> tuple[Any, Any]:
        """The limits of a number's or a table's values that the specification of the parameter has."""
        known = [definition_of(m).parameters.get(name) for side in self._sides for m in inside(side.mask)]
        for a in (a for parameter in known if parameter is not None for a in parameter.alternatives):
            is_table = a.dims is not None and tensor is not None and len(a.dims) == tensor.ndim
            is_of_dtype = (a.kind == "bool") == (tensor is not None and tensor.dtype is torch.bool)
            if is_of_dtype and (is_table or (a.dims is None and tensor is None)):
                return _specified_limit(a.low), _specified_limit(a.high)
        return None, None


def _specified_limit(text: str) -> Any:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    size, _, less = text.partition("-")
    return Expression("parameter", _LENGTH) - int(less or 0) if size in ("S", "Q", "KV") else None


class _Example:
    """Masks with the numbers and tables of a point where a formula holds.

    first: b, h, q and kv there.
    size: the number of queries and keys, at least `least`.
    shown: what the masks say of the pair.
    """

    def __init__(self, point: Point, sides: Sequence[_Side], box: _Box, least: int) -> None:
        b, h, q, kv = (point.values[name] for name in _INDICES)
        self.first = b, h, q, kv
        self.size = max(point.values[_LENGTH], least)
        self._tables: list[tuple[Tensor, Tensor]] = []
        tables = [table for side in sides for table in side.tables]
        for old in {id(read.table): read.table for read in point.reads}.values():
            if not any(are_same(old, table) for _, table in tables):
                raise Undecided("it depends on the values of a table that a mask computes")
            self._tables.append((old, self._made(old, [read for read in point.reads if read.table is old])))
        values: dict[str, Any] = {name: point.values[name] for name in box.names}
        self.masks = [side.filled(values, self._table) for side in sides]
        named = {name: self._table(table) for name, table in tables if name and self._table(table) is not table}
        self.parameters = values | named
        self.shown = {bool(mask(*map(torch.tensor, self.first))) for mask in self.masks}

    def _table(self, table: Tensor) -> Tensor:
        """The tensor in place of a mask's own, or the same if the formula reads nothing of it."""
        return next((new for old, new in self._tables if are_same(old, table)), table)

    def _made(self, old: Tensor, reads: Sequence[Read]) -> Tensor:
        shape = []
        for n in range(old.ndim):
            index = {getattr(read.indices[n], "operation", "") for read in reads}
            least = 1 + max(read.places[n] for read in reads)
            shape.append(least if index in ({"b"}, {"h"}) else max(self.size, least))
        if math.prod(shape) > _LARGEST:
            raise Undecided(f"an example needs a table of shape {shape}")
        new = torch.full(shape, min(read.value for read in reads), dtype=old.dtype, device=old.device)
        for read in sorted(reads, key=lambda read: read.places):
            new[read.places[:-1]][read.places[-1] :] = read.value
        return new
