"""The keys that each query sees as a few intervals, found by one call of a mask's function.

What depends on the query alone, or on the key alone, is computed for all of them. A comparison of both is an interval
of keys for each query if the key's side rises or falls from key to key, or if equal keys lie next to each other; logic
joins such intervals. No value is read: where values do not let a comparison be intervals, these are not `known`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmasks.ranges.context import GiveUp
from flexmasks.ranges.evaluate import evaluate
from flexmasks.ranges.lookup import block_shape
from flexmasks.ranges.operands import as_dtype, as_number, as_range, common_dtype
from flexmasks.ranges.value import BLOCK_DIMS, Range

MOST = 8  # intervals that are kept of a query while they are joined
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_OPPOSITE = {"gt": "le", "ge": "lt", "ne": "eq"}
_NAMES = {"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne"}
_NAMES |= {"rand": "and", "bitwise_and": "and", "logical_and": "and", "ror": "or", "bitwise_or": "or"}
_NAMES |= {"logical_or": "or", "rxor": "xor", "bitwise_xor": "xor", "logical_xor": "xor", "invert": "not"}
_NAMES |= {"bitwise_not": "not", "logical_not": "not", "subtract": "sub"}
_LARGEST = {torch.int32: 2.0**30, torch.int64: 2.0**51}  # up to which the sum of two numbers is exact


class SeenKeys(NamedTuple):
    """Intervals of keys [starts, stops), in order and apart from each other; those that are left over are empty."""

    starts: Tensor  # int64 [B or 1, H or 1, Q or 1, n]
    stops: Tensor
    known: Tensor  # bool [B or 1, H or 1, Q or 1]: whether these are the keys that the query sees


class _Keys(Range):
    """A truth value of each query and key, as the keys where it is true."""

    def __init__(self, intervals: SeenKeys) -> None:
        nothing = torch.zeros((), dtype=torch.bool, device=intervals.starts.device)
        super().__init__(nothing, nothing, torch.bool)
        self.intervals = intervals


class _Sum(Range):
    """A number of the query plus a number of the key, or its absolute value. None is 0."""

    def __init__(self, of_query: Range | None, of_key: Range | None, is_absolute: bool = False) -> None:
        some = next(x for x in (of_query, of_key) if x is not None)
        super().__init__(some.lo, some.hi, torch.int64)
        self.of_query, self.of_key, self.is_absolute = of_query, of_key, is_absolute


def seen_keys(mask_mod: Any, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> SeenKeys:
    """The keys that each query sees. Raises GiveUp if an operation on queries and keys is none of those that are known.

    Raises what `evaluate` raises.
    """
    pairs = _Pairs(kv_len, device)
    sizes = enumerate((batch, heads, q_len, kv_len))
    vectors = (torch.arange(n, device=device).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in sizes)
    b, h, q, kv = (Range.of_indices(x, x, x.numel() - 1) for x in vectors)
    evaluated = evaluate(mask_mod, b, h, q, kv, device, reads_values=False, pairs=pairs)
    return _apart(pairs.keys(evaluated.truth), kv_len)


class _Pairs:
    """The rules of operations on numbers of queries and of keys."""

    def __init__(self, kv_len: int, device: torch.device) -> None:
        self._end, self._device = kv_len, device

    def __call__(self, name: str, args: tuple[Any, ...]) -> Range | None:
        """The result of an operation, or None if it is none on a query and a key."""
        ranges = list(_ranges_in(args))
        if not any(type(r) in (_Keys, _Sum) for r in ranges) and not {2, 3} <= {d for r in ranges for d in _varies(r)}:
            return None
        name = _NAMES.get(name, name)
        if name in _MIRRORED and len(args) == 2:
            return self._compared(name, *args)
        if name in ("and", "or", "xor", "not", "where") and len(args) <= 3:
            return _Keys(self._joined(name, [self.keys(a) for a in args]))
        if name in ("add", "radd", "sub", "rsub", "neg") and len(args) == 1 + (name != "neg"):
            a, b = (0, *args) if name == "neg" else reversed(args) if name[0] == "r" else args
            return _sum(a, b if name.endswith("add") else _negative(b))
        if name in ("abs", "absolute") and type(args[0]) is _Sum:
            return _Sum(args[0].of_query, args[0].of_key, is_absolute=True)
        raise GiveUp(f"`{name}` of a query and a key")

    def keys(self, value: Any) -> SeenKeys:
        """The keys where a truth value is true."""
        r = as_range(value)
        if type(r) is _Keys:
            return r.intervals
        if r.known_dtype != torch.bool or r.ndim:
            raise GiveUp("logic of numbers")
        lo, hi = (_in_blocks(end, self._device) for end in (r.lo, r.hi))
        known = lo == hi
        if 3 not in _varies(r):
            stops = torch.where(lo, self._end, 0)
            return SeenKeys(torch.zeros_like(stops), stops, known[..., 0])
        before, behind = F.pad(lo, (1, 0))[..., :-1], F.pad(lo, (0, 1))[..., 1:]
        place = torch.arange(self._end, device=lo.device)
        starts = torch.where(lo & ~before, place, self._end).sort(-1).values
        stops = torch.where(lo & ~behind, place + 1, self._end).sort(-1).values
        return _cut(starts, stops, known.all(-1), self._end)

    def _joined(self, name: str, given: list[SeenKeys]) -> SeenKeys:
        first, *rest = given
        if name == "not":
            return self._not(first)
        if name == "and":
            return self._and(first, rest[0])
        if name == "or":
            return self._not(self._and(self._not(first), self._not(rest[0])))
        a, b = rest if name == "where" else (self._not(rest[0]), rest[0])  # xor is the opposite where the first holds
        return self._joined("or", [self._and(first, a), self._and(self._not(first), b)])

    def _and(self, a: SeenKeys, b: SeenKeys) -> SeenKeys:
        return _in_both(a, b, self._end)

    def _not(self, x: SeenKeys) -> SeenKeys:
        return _others(x, self._end)

    def _compared(self, name: str, a: Any, b: Any) -> Range:
        x: Range | None
        if type(a) is _Keys or type(b) is _Keys:
            if name not in ("eq", "ne"):
                raise GiveUp("an order of truth values")
            differ = self._joined("xor", [self.keys(a), self.keys(b)])
            return _Keys(differ if name == "ne" else self._joined("not", [differ]))
        if type(b) is _Sum and b.is_absolute:
            name, a, b = _MIRRORED[name], b, a
        if type(a) is _Sum and a.is_absolute:
            if name in _OPPOSITE:
                return _Keys(self._joined("not", [self.keys(self._compared(_OPPOSITE[name], a, b))]))
            if name == "eq":
                raise GiveUp("a distance of a query and a key that is one number")
            plain = _Sum(a.of_query, a.of_key)
            ends = self._compared(name, plain, b), self._compared(_MIRRORED[name], plain, _negative(b))
            return _Keys(self._joined("and", [self.keys(x) for x in ends]))
        if type(a) is not _Sum and type(b) is not _Sum:
            dtype = common_dtype(a, b)
            left, right = (as_number(v) if dtype == torch.bool else as_dtype(v, dtype) for v in (a, b))
            name, x, y = (_MIRRORED[name], right, left) if 3 in _varies(right) else (name, left, right)
        else:
            difference = _sum(a, _negative(b))
            x, other = difference.of_key, difference.of_query
            y = as_range(0) if other is None else _negated(other)
        if x is None or x.ndim or y.ndim or 2 in _varies(x) or 3 in _varies(y):
            raise GiveUp(f"`{name}` of numbers of a query and a key")
        found = _compared_keys("eq" if name == "ne" else name, x, y, self._end)
        return _Keys(_others(found, self._end) if name == "ne" else found)


def _ranges_in(args: Any) -> Iterator[Range]:
    for a in args:
        if isinstance(a, Range):
            yield a
        elif type(a) in (tuple, list):
            yield from _ranges_in(a)


def _varies(r: Range) -> list[int]:
    """The dimensions of the query, 2, and of the key, 3, along which a range varies."""
    shapes = block_shape(r.lo), block_shape(r.hi)
    return [d for d in (2, 3) if max(shape[d] for shape in shapes) > 1]


def _sum(a: Any, b: Any) -> _Sum:
    parts: list[list[Range]] = [[], []]
    for x in (a, b):
        if type(x) is _Sum and not x.is_absolute:
            for found, part in zip(parts, (x.of_query, x.of_key), strict=True):
                found += [] if part is None else [part]
        else:
            r = as_range(x)
            if r.known_dtype not in _LARGEST or r.ndim or type(r) is not Range or len(_varies(r)) == 2:
                raise GiveUp("arithmetic of a query and a key other than of whole numbers")
            parts[3 in _varies(r)].append(_small(r))
    return _Sum(_added(parts[0]), _added(parts[1]))


def _added(parts: list[Range]) -> Range | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return Range(parts[0].lo + parts[1].lo, parts[0].hi + parts[1].hi, torch.int64)


def _small(r: Range) -> Range:
    """The numbers, unknown where sums of them may not be exact."""
    is_large = ~((r.lo.abs() <= _LARGEST[r.known_dtype]) & (r.hi.abs() <= _LARGEST[r.known_dtype]))
    return Range(torch.where(is_large, -torch.inf, r.lo), torch.where(is_large, torch.inf, r.hi), torch.int64)


def _negated(r: Range) -> Range:
    return Range(-r.hi, -r.lo, r.known_dtype)


def _negative(x: Any) -> Any:
    if type(x) is not _Sum:
        r = as_range(x)
        if r.known_dtype not in _LARGEST:
            raise GiveUp("arithmetic of a query and a key other than of whole numbers")
        return _negated(_small(r))
    if x.is_absolute:
        raise GiveUp("arithmetic of a distance")
    of_query, of_key = (None if part is None else _negated(part) for part in (x.of_query, x.of_key))
    return _Sum(of_query, of_key)


def _compared_keys(name: str, of_key: Range, of_query: Range, end: int) -> SeenKeys:
    """The keys whose number is less, greater or equal to that of the query."""
    device = of_key.lo.device
    low, high = (_in_blocks(e, device)[:, :, 0] for e in (of_key.lo, of_key.hi))  # [B or 1, H or 1, KV]
    wanted, upper = (_in_blocks(e, device)[..., 0] for e in (of_query.lo, of_query.hi))  # [B or 1, H or 1, Q or 1]
    lead = torch.broadcast_shapes(low.shape[:2], wanted.shape[:2])
    known = (low == high).all(-1, keepdim=True) & (wanted == upper)
    low, wanted = (x.expand(*lead, -1).contiguous() for x in (low, wanted))
    steps = low.diff(dim=-1)
    breaks, rises = steps < 0, (steps < 0).sum(-1, keepdim=True) <= 1
    breaks = torch.where(rises, breaks, steps > 0)
    are_two = rises | (breaks.sum(-1, keepdim=True) <= 1)  # numbers rise, or fall, in two pieces at most
    rising, sought = (torch.where(rises, x, -x) for x in (low, wanted))
    place = torch.arange(end, device=device)
    half = torch.where(F.pad(breaks, (1, 0)), place, end).amin(-1, keepdim=True)  # where the second piece starts
    starts: list[Tensor] = []  # in each piece
    stops: list[Tensor] = []
    for first, stop in ((torch.zeros_like(half), half), (half, torch.full_like(half, end))):
        piece = torch.where(place < first, -torch.inf, torch.where(place < stop, rising, torch.inf))
        below, up_to = (torch.searchsorted(piece, sought, right=right).clamp(first, stop) for right in (False, True))
        if name == "eq":
            starts, stops = [*starts, below], [*stops, up_to]
        else:
            is_prefix = rises if name in ("lt", "le") else ~rises
            cut = torch.where(is_prefix == (name in ("lt", "gt")), below, up_to)
            starts.append(torch.where(is_prefix, first, cut))
            stops.append(torch.where(is_prefix, cut, stop))
    if name == "eq":  # in any order, equal keys may lie next to each other
        in_order, places = low.sort(dim=-1, stable=True)
        first, stop = (torch.searchsorted(in_order, wanted, right=right) for right in (False, True))
        start = torch.where(stop > first, places.gather(-1, first.clamp(max=end - 1)), 0)
        last = torch.where(stop > first, places.gather(-1, (stop - 1).clamp(min=0)) + 1, 0)
        are_known = are_two | (last - start == stop - first)
        starts = [torch.where(are_two, x, y) for x, y in zip(starts, (start, last), strict=True)]
        stops = [torch.where(are_two, x, last) for x in stops]
    else:
        are_known = are_two
    return SeenKeys(torch.stack(starts, -1), torch.stack(stops, -1), (known & are_known).expand(wanted.shape))


def _in_blocks(end: Tensor, device: torch.device) -> Tensor:
    """An end of a range with four dimensions. Adding takes a number to a GPU without a copy, which waits."""
    if end.device == device:
        return end.view(block_shape(end))
    return torch.zeros((1,) * BLOCK_DIMS, dtype=end.dtype, device=device) + end


def _is_empty(x: SeenKeys) -> Tensor:
    return x.known & (x.starts >= x.stops).all(-1)


def _in_both(a: SeenKeys, b: SeenKeys, end: int) -> SeenKeys:
    """The keys in both. Where one is known to be empty, the other need not be known."""
    starts = torch.maximum(a.starts[..., :, None], b.starts[..., None, :]).flatten(-2)
    stops = torch.minimum(a.stops[..., :, None], b.stops[..., None, :]).flatten(-2)
    known = (a.known & b.known) | _is_empty(a) | _is_empty(b)
    is_empty = (starts >= stops) | ~known[..., None]
    # The intervals of a set are apart from each other, so their starts are in the order of their stops.
    starts, stops = (torch.where(is_empty, end, x).sort(-1).values for x in (starts, stops))
    most = a.starts.shape[-1] + b.starts.shape[-1] - 1
    return _cut(starts[..., :most], stops[..., :most], known, end)


def _others(x: SeenKeys, end: int) -> SeenKeys:
    """The other keys."""
    first = torch.zeros_like(x.starts[..., :1])
    return SeenKeys(torch.cat([first, x.stops], -1), torch.cat([x.starts, first + end], -1), x.known)


def _cut(starts: Tensor, stops: Tensor, known: Tensor, end: int) -> SeenKeys:
    if starts.shape[-1] > MOST:
        known = known & (starts[..., MOST] == end)
    return SeenKeys(starts[..., :MOST], stops[..., :MOST], known)


def _apart(x: SeenKeys, end: int) -> SeenKeys:
    """The same keys in intervals that do not touch each other, with empty ones behind all others."""
    everything = SeenKeys(torch.zeros_like(x.starts[..., :1]), torch.full_like(x.starts[..., :1], end), x.known)
    return _in_both(_others(_in_both(_others(x, end), everything, end), end), everything, end)
