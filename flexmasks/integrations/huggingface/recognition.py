"""Mask functions of transformers as Masks of this library."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks import Mask, get_mask
from flexmasks.extend import Expression, are_same, expression_of, indices_in, value_of

_FAR = 1 << 30  # farther than any key


@dataclass(frozen=True)
class Positions:
    """The positions of a step, counted from the start of the text; flexmasks counts them from the first key.

    first, key_stop: keys are at `first` .. `key_stop` - 1.
    query_stop: queries are before it.
    trusted: whether all parts of the mask function are transformers' own.
    packed: whether another part of the function shows a query its own document of a packed row only. Counted from the
        start of the document or of the text, a query and a key then have the same distance.
    """

    batch: int
    first: int
    key_stop: int
    query_stop: int
    device: torch.device
    trusted: bool
    packed: bool = False


class Interval(NamedTuple):
    """The keys at distances `low` to `high` from a query, both included; by default all.

    remapped: whether positions are counted from the start of a document of a packed row.
    """

    low: int = -_FAR
    high: int = _FAR
    remapped: bool = False

    def narrowed(self, other: Interval) -> Interval:
        return Interval(max(self.low, other.low), min(self.high, other.high), self.remapped or other.remapped)


@dataclass
class Parts:
    """Masks that must all show a pair of a query and a key.

    packing: those that keep the documents of a packed row apart.
    """

    others: list[Mask]
    packing: list[Mask]

    def mask(self) -> Mask:
        masks = self.others + self.packing
        return functools.reduce(operator.and_, masks) if masks else get_mask("full")

    def to(self, device: torch.device | str) -> Parts:
        return Parts([m.to(device) for m in self.others], [m.to(device) for m in self.packing])


def recognized(function: Callable[..., Any], positions: Positions) -> Parts | None:
    """A mask function as masks of this library, or None if some part of it has no such mask. torch.compile can trace
    this.
    """
    expression = expression_of(function)
    found = None if expression is None else _conjunction(expression, positions)
    return None if found is None else found[0]


def _conjunction(expression: Expression, positions: Positions) -> tuple[Parts, Interval | None] | None:
    """A chain of `and` as masks, and as an interval of keys if it is one; or None if some part of it has no mask."""
    interval = Interval()
    equal: list[Mask] = []
    packing: list[Mask] = []
    others: list[Mask] = []
    seeing: list[Tensor] = []
    factors = [factor for factor in _operands(expression, "and_") if not _is_constant(factor, True)]
    # The spans of an overlay look like documents. Another part tells them apart, which only queries in spans fulfil.
    indices = [indices_in(factor) for factor in factors]
    shows_spans = any("q" in sides and "k" not in sides for sides in indices)
    packs = [_keeps_documents_apart(factor, positions) for factor in factors]
    is_packed = positions.packed or (any(packs) and not shows_spans)
    for factor, sides, is_packing in zip(factors, indices, packs, strict=True):
        own = _interval(factor, positions)
        mask: Mask | None = None
        if own is not None:
            interval = interval.narrowed(own)
            continue
        if "h" in sides:
            return None
        if "q" in sides and "k" not in sides:
            seeing.append(_values(factor, positions).bool())
            continue
        if _is_constant(factor, False):
            mask = get_mask("band", lower=1, upper=0)
        elif "q" not in sides:
            mask = get_mask("key_padding", attention_mask=_values(factor, positions, positions.key_stop).bool())
        elif factor.operation == "eq":
            mask = _of_equal(factor, positions)
        elif factor.operation == "or_":
            mask = _union(factor, replace(positions, packed=is_packed))
        if mask is None:
            return None
        (packing if is_packing else equal if mask.name == "document" else others).append(mask)
    if interval.remapped and not is_packed:
        return None
    if seeing:
        documents = packing or equal
        others.append(_of_queries(seeing, documents.pop() if documents else None))
    others = equal + others
    return Parts(_of_interval(interval) + others, packing), None if others or packing else interval


def _keeps_documents_apart(factor: Expression, positions: Positions) -> bool:
    """Whether a part of a mask shows queries their own documents."""
    if not positions.trusted or factor.operation != "eq" or not are_same(*factor.operands):
        return False
    sides = sorted("".join(s for s in "qk" if s in indices_in(x)) for x in factor.operands)
    return sides == ["k", "q"] and all(x.operation == "getitem" for x in factor.operands)


def _of_queries(seeing: list[Tensor], document: Mask | None) -> Mask:
    """The mask of queries that see everything, or their own document."""
    visible = functools.reduce(operator.and_, seeing)
    ids = torch.zeros_like(visible, dtype=torch.int32) if document is None else document.params["document_ids"]
    return get_mask("cross_document", q_document_ids=torch.where(visible, ids, ids.amin() - 1), kv_document_ids=ids)


def _union(expression: Expression, positions: Positions) -> Mask | None:
    """The mask of a chain of `or`."""
    terms = [t for t in _operands(expression, "or_") if not _is_constant(t, False)]
    if not terms:
        return get_mask("band", lower=1, upper=0)
    masks, intervals = [], []
    for term in terms:
        found = _conjunction(term, positions)
        if found is None:
            return None
        parts, interval = found
        masks.append(parts.mask())
        intervals.append(interval)
    if len(terms) == 2:
        for interval, other in zip(intervals, terms[::-1], strict=True):
            spans = _spans(other, positions) if interval is not None and interval[:2] == (-_FAR, 0) else None
            if spans is not None:
                return get_mask("bidirectional_spans", span_ids=spans)
        joined = _joined(*intervals)
        if joined is not None:
            return Parts(_of_interval(joined), []).mask()
    return functools.reduce(operator.or_, masks)


def _spans(expression: Expression, positions: Positions) -> Tensor | None:
    """The span of each position, negative for none, if an expression shows queries their own spans."""
    factors = [f for f in _operands(expression, "and_") if not _is_constant(f, True)]
    if len(factors) != 2 or factors[0].operation != "eq" or not are_same(*factors[0].operands):
        return None
    ids, test = factors[0].operands[0], factors[1]
    is_not_negative = test.operation == "ge" and type(test.operands[1]) is int and test.operands[1] == 0
    if is_not_negative and are_same(test.operands[0], ids) and "h" not in indices_in(ids):
        return _values(ids, positions)
    return None


def _joined(one: Interval | None, other: Interval | None) -> Interval | None:
    """The interval that two intervals without a gap make."""
    if one is None or other is None:
        return None
    if one.low > one.high:  # it is empty
        return other
    if other.low > other.high:
        return one
    if max(one.low, other.low) > min(one.high, other.high) + 1:
        return None
    return Interval(min(one.low, other.low), max(one.high, other.high))


# --- intervals ---


class _Linear(NamedTuple):
    """A linear function of the positions of query and key.

    q, kv: the factors of the positions.
    remapped: as in Interval.
    """

    q: int
    kv: int
    constant: int
    remapped: bool = False

    def plus(self, other: _Linear, factor: int) -> _Linear:
        q, kv, constant, remapped = other
        return _Linear(
            self.q + factor * q, self.kv + factor * kv, self.constant + factor * constant, self.remapped or remapped
        )


def _interval(factor: Any, positions: Positions) -> Interval | None:
    """The interval of a comparison of distances, or None for anything else."""
    if factor.operation not in ("lt", "le", "gt", "ge"):
        return None
    is_strict = factor.operation in ("lt", "gt")
    less, more = factor.operands if factor.operation in ("lt", "le") else factor.operands[::-1]
    if isinstance(less, Expression) and less.operation == "abs":
        distance = _linear(less.operands[0], positions)
        if type(more) is not int or distance is None or distance[:3] not in ((1, -1, 0), (-1, 1, 0)):
            return None
        limit = more - is_strict
        return Interval(-limit, limit, distance.remapped)
    one, other = _linear(less, positions), _linear(more, positions)
    if one is None or other is None:
        return None
    q, kv, constant, remapped = one.plus(other, -1)
    limit = -constant - is_strict  # the distance times q, or kv, is at most this
    if (q, kv) == (-1, 1):
        return Interval(high=limit, remapped=remapped)
    if (q, kv) == (1, -1):
        return Interval(low=-limit, remapped=remapped)
    if (q, kv) in ((-1, 0), (0, -1), (-1, -1)) and limit >= 0 and not remapped:  # positions are not negative
        return Interval()
    return None


def _linear(value: Any, positions: Positions) -> _Linear | None:
    """A number as a linear function of positions, or None if it is none."""
    if type(value) is int:
        return _Linear(0, 0, value)
    if not isinstance(value, Expression):
        return None
    if value.operation in ("q", "kv"):
        return _Linear(int(value.operation == "q"), int(value.operation == "kv"), 0)
    if value.operation == "getitem" and positions.trusted and len(value.operands) == 3:
        # transformers itself compares only one table of positions: the position of each token in its document.
        index = value.operands[2]
        position = _linear(index, positions)
        if position is None or position.constant or position.remapped or indices_in(value.operands[1]) != "b":
            return None
        return position._replace(remapped=True)
    if value.operation not in ("neg", "add", "sub"):
        return None
    before, last = [0, *value.operands] if value.operation == "neg" else value.operands
    one, other = _linear(before, positions), _linear(last, positions)
    return None if one is None or other is None else one.plus(other, 1 if value.operation == "add" else -1)


def _of_interval(interval: Interval) -> list[Mask]:
    """The mask of an interval, or none if it shows everything."""
    low, high, _ = interval
    if (low, high) == (-_FAR, _FAR):
        return []
    if (low, high) == (-_FAR, 0):
        return [get_mask("causal")]
    if high == 0 and low <= 0:
        return [get_mask("sliding_window", window=-low)]
    if (low, high) == (0, _FAR):
        return [get_mask("inverse_causal")]
    if -_FAR < low <= 0 <= high < _FAR:
        return [get_mask("local", left=-low, right=high)]
    return [get_mask("band", lower=low, upper=high)]


# --- values of positions ---


def _of_equal(factor: Expression, positions: Positions) -> Mask | None:
    """The mask of equal values of a query and a key."""
    one, other = factor.operands
    if indices_in(one).count("k"):
        one, other = other, one
    if not isinstance(one, Expression) or not isinstance(other, Expression):
        return None
    if "k" in indices_in(one) or "q" in indices_in(other):
        return None
    if not are_same(one, other):
        ids = {"q_document_ids": _values(one, positions), "kv_document_ids": _values(other, positions)}
        return get_mask("cross_document", **ids)
    chunk = _chunk(one)
    if chunk is not None:
        return get_mask("chunked", chunk=chunk[0], start=chunk[1] - positions.first)
    return get_mask("document", document_ids=_values(one, positions))


def _chunk(value: Expression) -> tuple[int, Any] | None:
    """The length of chunks, and where the first one starts, if a value is the number of a position's chunk."""
    if value.operation != "floordiv" or type(value.operands[1]) is not int or value.operands[1] < 1:
        return None
    (position, chunk), start = value.operands, 0
    if isinstance(position, Expression) and position.operation == "sub":
        position, first = position.operands
        if not isinstance(first, Expression) or first.operation != "getitem" or len(first.operands) != 2:
            return None
        start, batch = first.operands
        if not isinstance(start, Tensor) or start.ndim != 1 or not _is_index(batch, "b"):
            return None
    return (chunk, start) if _is_index(position, "q", "kv") else None


def _values(value: Any, positions: Positions, stop: int | None = None) -> Tensor:
    """The values of an expression of one position, [batch, positions from the first key to `stop`].

    stop: by default the end of the keys and queries.
    """
    if stop is None:
        stop = max(positions.key_stop, positions.query_stop)
    if value.operation == "getitem" and len(value.operands) == 3:
        table, batch, position = value.operands
        is_plain = _is_index(batch, "b") and _is_index(position, "q", "kv")
        if is_plain and isinstance(table, Tensor) and table.ndim == 2 and table.shape[0] == positions.batch:
            return table if (positions.first, stop) == (0, table.shape[1]) else table[:, positions.first : stop]
    batch = torch.arange(positions.batch, device=positions.device)[:, None]
    position = torch.arange(positions.first, stop, device=positions.device)[None]
    result = value_of(value, batch, position)
    return torch.broadcast_to(torch.as_tensor(result, device=positions.device), (positions.batch, position.shape[1]))


# --- forms of expressions ---


def _operands(expression: Expression, operation: str) -> list[Any]:
    if expression.operation != operation:
        return [expression]
    operands = []
    for operand in expression.operands:
        if not isinstance(operand, Expression):
            operand = Expression("constant", operand)
        operands += _operands(operand, operation)
    return operands


def _is_index(value: Any, *names: str) -> bool:
    return isinstance(value, Expression) and value.operation in names


def _is_constant(factor: Expression, value: bool) -> bool:
    return factor.operation == "constant" and factor.operands[0] is value
