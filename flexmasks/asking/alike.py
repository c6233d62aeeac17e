"""The masks and scores that are most like a function: `flexmasks.alike`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks import Mask, Score, get_mask, get_score, list_masks, list_scores
from flexmasks.asking.compare import compare
from flexmasks.asking.pasted import LONGEST, Pasted, length_for, of_function, of_text, saying
from flexmasks.extend import (
    Parameter,
    ScoreOverLengths,
    definition,
    definition_of,
    flatten,
    in_message,
    says_what_to_write,
)

_CALL = "flexmasks.alike"
_PAIRS = 4096  # on which candidates are compared at first
_CHANGES = ("{} - 1", "{} // 2", "2 * {} + 1", "{} + 1", "2 * {}", "-{}", "1 - {}")
_MOST = 300  # choices of a mask's parameters
_MOST_OF_ONE = (40, 14, 6, 4)  # and of each without a default, if there are one, two, three or more
_MOST_COMBINED = 128  # of the nearest, and of the cheapest candidates
_MOST_PAIRS = 1 << 25  # that are compared exactly; of longer masks these are of the last queries
_LENGTHS = (16, 37, 64, 128)
_SHOWN, _ALTERNATIVES = 3, 6  # answers, and candidates that show the same, of which some may not be for the length
_DERIVED, _NOT_ITS_OWN, _A_TENSOR = 0.25, 0.5, 0.5  # what values cost, beside 1 for each parameter
_EXTENTS = ("length", "depth", "height", "width", "context")  # parameters that are parts of the length
_MOST_LENGTHS = 64  # batch elements whose lengths may be one more or less
_MOST_BATCH, _MOST_HEADS = 4, 8  # of functions without tensors that say how many there are
_FAILS = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, AttributeError)
Pair = tuple[int, int, int, int]


class Likeness(NamedTuple):
    """A mask or score of this library beside a function.

    mask: the mask or score.
    written: how to write it, with the names that a text leaves open.
    equal: whether both are the same at all lengths that were compared.
    share: the share of pairs that are the same at the longest of these lengths.
    lengths: the lengths.
    proved: whether both are the same at all lengths, or None if this is not decided.
    first: the first pair (b, h, q, kv) that one of them shows alone, or None; of scores always None.
    """

    mask: Mask | Score
    written: str
    equal: bool
    share: float
    lengths: tuple[int, ...]
    proved: bool | None = None
    first: Pair | None = None

    def __str__(self) -> str:
        if self.proved:
            return f"{self.written}: the same, proved for all lengths"
        if self.equal:
            at = " and ".join(", ".join(f"{n:,}" for n in self.lengths).rsplit(", ", 1))
            return f"{self.written}: the same at {at} tokens"
        first = "" if self.first is None else f", but not (b, h, q, kv) = {self.first}"
        return f"{self.written}: {min(self.share, 0.9999):.2%} of the pairs of {self.lengths[-1]:,} tokens{first}"


class Likenesses(tuple[Likeness, ...]):
    """What is most like a function, the nearest first; it prints as lines. `made_up` are values by name."""

    made_up: Mapping[str, Any]

    def __repr__(self) -> str:
        lines = [str(one) for one in self] or ["nothing is like it"]
        if self.made_up:
            shown = ", ".join(
                f"{n} = {'a causal mask' if callable(v) and not isinstance(v, Tensor) else in_message(v)}"
                for n, v in self.made_up.items()
            )
            lines.append(f"made up, since the text does not say: {shown}")
        return "\n".join(lines)


@says_what_to_write()
def alike(function: str | Callable[..., Any] | Tensor, /, **names: Any) -> Likenesses:
    """Return the masks, or scores, of this library that are most like a function, the nearest first.

    Every registered mask is compared, with numbers and tensors of the function as its parameters; where none is the
    same, so are combinations of two and three by `&` and `|`.

    Args:
        function: a mask function (b, h, q, kv), a score function (score, b, h, q, kv), a function that makes one of
            them or a dense mask, a boolean tensor [queries, keys] or [batch or 1, heads or 1, queries, keys], or Python
            text of one of these functions, or of an expression of q and kv. A text is run in this process. A score
            function that only hides pairs by -inf counts as a mask.
        names: values of names that a text leaves open, and of the arguments of a function that makes one. Those that
            are not given are made up, after their use: numbers, flags, lengths, or ids of documents.

    Raises:
        ValueError, TypeError: the text is no Python, has no such function, fails, or calls what it does not define.

    Example:
        >>> import flexmasks
        >>> print(flexmasks.alike("lambda b, h, q, kv: (q >= kv) & (q - kv < window)")[0])
        sliding_window(window=window - 1): the same, proved for all lengths
    """
    best: list[Likeness] = []
    made_up: Mapping[str, Any] = {}
    for part in (1, 2):  # lengths in a text may be those of halves
        if isinstance(function, str):
            given = of_text(function, names, part)
        elif isinstance(function, Tensor | Mask | Score):
            given = Pasted(function, function.shape[-1] if isinstance(function, Tensor) else 0)
        elif not callable(function):
            raise TypeError(f"{_CALL}: pass a function, its text, or a dense mask, got {in_message(function)}.")
        else:
            given = of_function(function, names, part)
        found = _like(given)
        if not best or (found and found[0].equal):
            best, made_up = found, given.made_up
        has_length = any(type(v) is int and v == given.length for v in given.made_up.values())
        if (best and best[0].equal) or not has_length:
            break
    likenesses = Likenesses(best)
    likenesses.made_up = made_up
    return likenesses


def _like(given: Pasted) -> list[Likeness]:
    function = given.function
    facts = _Facts.of(given)
    if not isinstance(function, Tensor | Mask) and (isinstance(function, Score) or _positions(function) == 5):
        with saying(given.made_up):
            hides = _hidden_by(get_score(function))
        if hides is None:
            return _scores_like(get_score(function), facts, given.length)
        function = hides
    mask = get_mask(function)
    with saying(given.made_up):
        dtype = mask(*torch.zeros(4, dtype=torch.int64)).dtype
    if dtype != torch.bool:
        raise TypeError(f"{_CALL}: a mask function returns booleans, this one {str(dtype).removeprefix('torch.')}.")
    shows: Callable[..., Tensor] = mask if isinstance(function, Mask | Tensor) else torch.vmap(mask)  # as torch does
    reach = [n for tensor in facts.tensors if (n := tensor.value.shape[-1]) <= LONGEST]
    lengths = (given.length, given.length // 2)  # which a text may name
    most = max(given.length, length_for(n for n in facts.own if n not in lengths), *reach, 0)
    # A function of a canvas is one of all its pixels only.
    sides = sorted({n for n in facts.own if type(n) is int and n > 2})
    canvases = [a * b for a, b in itertools.combinations_with_replacement(sides, 2) if most != a * b <= most]
    found = _masks_like(mask, shows, facts, most)
    for length in [] if (found and found[0].equal) or isinstance(function, Tensor) else canvases[-2:]:
        of_canvas = _masks_like(mask, shows, facts, length, _EXTENTS)
        if of_canvas and of_canvas[0].equal:
            return of_canvas
    return found


def _positions(function: Any) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)


# --- what a function holds ---


class _Value(NamedTuple):
    """A value of a parameter, and how to write it."""

    value: Any
    text: str
    cost: float = 0.0  # more for a half of a number of the function, and most for one that it does not have


class _Facts(NamedTuple):
    """Numbers and tensors, from which parameters are taken. `own` are the numbers in the function itself."""

    own: list[Any]
    numbers: list[_Value]
    tensors: list[_Value]

    @classmethod
    def of(cls, given: Pasted) -> _Facts:
        names, literals, tensors = dict(given.made_up), set(given.numbers), []
        held = _inside(given.function, set())
        if isinstance(given.function, Tensor):  # whose text may say its numbers
            held = iter(()) if given.numbers or given.made_up else _distances(given.function)
        for name, value in held:
            if name:
                names.setdefault(name, value)
            else:
                literals.add(value)
        numbers: dict[Any, _Value] = {}
        for name, value in names.items():
            if isinstance(value, Tensor):
                tensors.append(_Value(value, name))
                if value.ndim == 3:  # for all batch elements
                    tensors.append(_Value(value[None], f"{name}[None]", _DERIVED))
                if value.ndim == 1 and len(value) <= _MOST_LENGTHS and _kind_of(value) == "int":
                    tensors += [_Value(value + n, f"{name} {'+-'[n < 0]} 1", _DERIVED) for n in (1, -1)]
            elif type(value) in (int, float):
                numbers.setdefault(value, _Value(value, name if name in given.made_up else repr(value)))
        for value in (*sorted(literals - {0, 1}, reverse=True), 0, 1):
            numbers.setdefault(value, _Value(value, repr(value), 0.0 if value in literals else _NOT_ITS_OWN))
        own = [n for n in numbers if n not in (0, 1)]
        for change in _CHANGES:
            for number in own:
                other = eval(change.format(f"({number})"))  # one of `_CHANGES`
                text = numbers[number].text
                text = change.format(text) if text.isidentifier() else repr(other)
                numbers.setdefault(other, _Value(other, text, _NOT_ITS_OWN if other < 0 else _DERIVED))
        return cls(own, list(numbers.values()), tensors)


def _inside(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors of a function and of those that it calls, with their names, "" for literals."""
    if id(function) in seen:
        return
    seen.add(id(function))
    variables: dict[str, Any] = {}
    if isinstance(function, Mask | Score):
        variables |= {**function.params, "": definition_of(function).function}
    elif hasattr(function, "func"):  # functools.partial
        variables |= {**function.keywords, "": function.func}
    elif isinstance(function, types.FunctionType) and not function.__module__.startswith(("torch", "flexmasks")):
        codes = [function.__code__]
        while codes:
            for constant in codes.pop().co_consts:
                codes += [constant] if isinstance(constant, types.CodeType) else []
                several = constant if isinstance(constant, tuple) else (constant,)
                yield from (("", number) for number in several if type(number) in (int, float))
        found = inspect.getclosurevars(function)
        variables |= {**found.globals, **found.nonlocals}
    for name, value in variables.items():
        if isinstance(value, Tensor) or type(value) in (int, float):
            yield name, value.item() if isinstance(value, Tensor) and not value.ndim else value
        elif callable(value):
            yield from _inside(value, seen)


def _distances(visible: Tensor) -> Iterator[tuple[str, int]]:
    """Yield where the runs of visible keys start and end in two rows, as keys and as distances."""
    rows = visible.reshape(-1, visible.shape[-1])
    for q in (visible.shape[-2] // 2, visible.shape[-2] - 1):
        edges = rows[q].int().diff().nonzero().flatten()
        for kv in (edges[:4] + 1).tolist():
            yield from (("", kv), ("", abs(q - kv)))


# --- candidates ---


@dataclass(frozen=True)
class _Candidate:
    """A mask or score, how to write it, and how long that is."""

    made: Any
    text: str
    cost: float
    has_tensors: bool
    operator: str = ""

    def joined(self, operator: str, other: _Candidate) -> _Candidate:
        texts = [f"({c.text})" if c.operator not in ("", operator) else c.text for c in (self, other)]
        made = self.made & other.made if operator == "&" else self.made | other.made
        has_tensors = self.has_tensors or other.has_tensors
        return _Candidate(made, f" {operator} ".join(texts), self.cost + other.cost + 1, has_tensors, operator)


def _candidates(kind: str, length: int, facts: _Facts, having: Sequence[str] = ()) -> Iterator[_Candidate]:
    """Yield masks or scores with all likely parameters; with `having`, those that have a parameter of these names."""
    entries, get = (list_masks(), get_mask) if kind == "mask" else (list_scores(), get_score)
    for entry in entries:
        parameters = definition(kind, entry.name).parameters
        options = {n: _options(p, length, facts) for n, p in parameters.items()}
        required = [n for n, p in parameters.items() if p.required]
        if not all(options[n] for n in required) or "seed" in parameters:  # no other function has the same draw
            continue
        if having and not any(name in parameters for name in having):
            continue
        most = _MOST_OF_ONE[min(len(required), len(_MOST_OF_ONE)) - 1]
        free = [[(n, v) for v in options[n][:6]] for n in options if n not in required]
        further: list[Sequence[tuple[str, _Value]]] = [(), *((one,) for own in free for one in own)]
        further += [two for a, b in itertools.combinations(free, 2) for two in itertools.product(a[:3], b[:3])]
        choices = itertools.product(further, itertools.product(*(options[n][:most] for n in required)))
        for others, chosen in itertools.islice(choices, _MOST):
            own = dict(zip(required, chosen, strict=True)) | dict(others)
            try:
                made = get(entry.name, **{n: v.value for n, v in own.items()})
            except _FAILS:
                continue
            text = ", ".join(f"{n}={v.text}" for n, v in own.items())
            # Of equal masks the one with the fewest parameters is meant, and numbers rather than tensors.
            cost = sum(1 + v.cost + _A_TENSOR * (not isinstance(v.value, int | float)) for v in own.values())
            has_tensors = any(isinstance(v.value, Tensor | list) for v in own.values())
            yield _Candidate(made, f"{entry.name}({text})", cost, has_tensors)


def _options(parameter: Parameter, length: int, facts: _Facts) -> list[_Value]:
    """Return values for a parameter, the likeliest first."""
    if parameter.name == "inner":
        return [_Value(get_mask(name), f"{name}()") for name in ("causal", "full")]
    found: list[_Value] = []
    for one in sorted(parameter.alternatives, key=lambda one: not one.dims):  # tensors first
        low = float(one.low) if one.low.lstrip("-").isdigit() else -float("inf")
        whole = [v for v in facts.numbers if type(v.value) is int and v.value >= low]
        if one.dims:
            found += [v for v in facts.tensors if v.value.ndim == len(one.dims) and _kind_of(v.value) == one.kind]
            if one.dims == ("B",) and one.kind == "int":  # a number for all batch elements
                found += [_Value([v.value], f"[{v.text}]", v.cost) for v in whole]
        elif one.dims is not None or one.kind not in ("int", "float", "bool"):
            continue
        elif one.kind == "bool":
            found += [_Value(value, repr(value)) for value in (True, False) if value is not parameter.default]
        elif one.count is not None:
            several = itertools.product([v for v in whole if not v.cost][:5], repeat=one.count)
            found += [_Value(tuple(v.value for v in vs), f"({', '.join(v.text for v in vs)})") for vs in several]
        elif parameter.name in _EXTENTS:
            own = [v for v in whole if v.cost < _DERIVED and v.value > 1]
            parts = [*(length // v.value for v in own if length % v.value == 0), length, length // 2]
            found += [*own[:3], *(_Value(n, repr(n), _NOT_ITS_OWN) for n in parts)]
        else:
            found += whole if one.kind == "int" else [v for v in facts.numbers if v.value >= low]
    return found


def _kind_of(tensor: Tensor) -> str:
    return "bool" if tensor.dtype == torch.bool else "float" if tensor.is_floating_point() else "int"


# --- masks ---


def _masks_like(
    mask: Mask, shows: Callable[..., Tensor], facts: _Facts, most: int, having: Sequence[str] = ()
) -> list[Likeness]:
    works = functools.partial(_works, mask)
    length = _largest(lambda n: works(0, 0, n, n) and works(0, 0, 0, n) and works(0, 0, n, 0), most)
    batch, heads = _largest(lambda n: works(n, 0, 0, 0), 65), _largest(lambda n: works(0, n, 0, 0), 65)
    indices = _pairs(length, min(batch, _MOST_BATCH), min(heads, _MOST_HEADS), facts.own)
    of_first = [shows(*(x * (i != d) for i, x in enumerate(indices))).bool() for d in (0, 1)]
    wanted = shows(*indices).bool()
    if batch > 64:
        batch = 1 if torch.equal(of_first[0], wanted) else _MOST_BATCH
    if heads > 64:
        heads = 1 if torch.equal(of_first[1], wanted) else _MOST_HEADS
    indices = _pairs(length, batch, heads, facts.own)
    wanted = shows(*indices).bool()
    alternatives: dict[bytes, list[_Candidate]] = {}  # by what they show
    for candidate in _candidates("mask", length, facts, having):
        try:
            shown = candidate.made(*indices).expand(_PAIRS)
        except _FAILS:  # parameters do not fit each other, or this length
            continue
        alternatives.setdefault(shown.numpy().tobytes(), []).append(candidate)
    if not alternatives:
        return []
    groups = [sorted(own, key=lambda c: c.cost)[:_ALTERNATIVES] for own in alternatives.values()]
    rows = torch.stack([torch.frombuffer(bytearray(key), dtype=torch.bool) for key in alternatives])
    found = [own[0] for own in groups]
    share = (rows & wanted).sum(1) / (rows | wanted).sum(1).clamp(min=1)
    order = sorted(range(len(found)), key=lambda n: (-float(share[n]), found[n].cost))
    nearest = [groups[n] for n in order]
    best = found[order[0]]
    is_same = torch.equal(rows[order[0]], wanted)
    joined: list[_Candidate] = []
    if not having and (best.has_tensors or not is_same):  # a mask of tensors may be the same for these values only
        joined = sorted(_combined(found, rows, wanted), key=lambda c: c.cost)[:1]
        joined = [c for c in joined if not is_same or c.cost <= best.cost + 1]
        nearest.insert(0, joined)
    sizes = {"batch": batch, "heads": heads}
    compared = (
        one
        for own in nearest
        if (one := next((one for c in own if (one := _compared(c, mask, length, sizes))), None)) is not None
    )
    results = sorted(itertools.islice(compared, _SHOWN + 1), key=lambda one: (not one.equal, not one.proved))
    # A combination comes before one mask that is the same for these tensors only.
    if joined and len(results) > 1 and results[0].written == joined[0].text and results[1].equal:
        first, second = results[:2]
        is_one_mask = first.proved == second.proved and _proved(first.mask, second.mask) is not False
        results[:2] = (second, first) if is_one_mask else (first, second)
    return results[:_SHOWN]


def _works(function: Callable[..., Tensor], *indices: int) -> bool:
    try:
        function(*map(torch.tensor, indices))
    except _FAILS:
        return False
    return True


def _largest(works: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` whose indices, which end before it, all work."""
    low, high = 1, most + 1
    while high - low > 1:
        middle = most if high > most else (low + high) // 2
        low, high = (middle, high) if works(middle - 1) else (low, middle)
    return low


def _pairs(length: int, batch: int, heads: int, numbers: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return indices (b, h, q, kv), of which three quarters lie where masks with such numbers change."""
    steps = torch.tensor([n for n in numbers if type(n) is int and 0 < n < length] or [1])
    generator = torch.Generator().manual_seed(0)

    def draw(high: int) -> Tensor:
        return torch.randint(0, high, (_PAIRS,), generator=generator)

    q, kv, kind, step = draw(length), draw(length), draw(4), steps[draw(len(steps))]
    kv = torch.where(kind < 2, q + step * (draw(3) - 1) + draw(5) - 2, kv)
    q, kv = (torch.where(kind == 2, x // step * step + draw(3) - 1, x).clamp(0, length - 1) for x in (q, kv))
    return draw(batch), draw(heads), q, kv


def _compared(candidate: _Candidate, mask: Mask, length: int, sizes: dict[str, Any]) -> Likeness | None:
    """Compare a candidate and the function exactly. Return None if the candidate is not for this length."""
    equal, first, share, lengths = True, None, 1.0, []
    for n in (*(n for n in _LENGTHS if n < length), length):
        queries = min(n, max(1, _MOST_PAIRS // (n * sizes["batch"] * sizes["heads"])))  # the last ones
        try:
            found = compare(mask, candidate.made, queries, n, q_offset="last", **sizes)
        except _FAILS:  # it is for the whole length only
            if n == length:
                return None
            continue
        lengths.append(n)
        equal, first = equal and found.equal, first or _moved(found.first, n - queries)
        share = 1 - (found.only_a + found.only_b) / (queries * n * sizes["batch"] * sizes["heads"])
    proved = _proved(mask, candidate.made) if equal else None
    if proved is False and (candidate.has_tensors or flatten(mask)[1].tensors):  # which stand for any in a proof
        proved = None
    return Likeness(candidate.made, candidate.text, proved is not False and equal, share, tuple(lengths), proved, first)


def _proved(a: Any, b: Any) -> bool | None:
    """Return whether masks are the same at all lengths, or None if no solver is installed, or none can read them."""
    with contextlib.suppress(*_FAILS, ImportError):
        return compare(a, b, lengths="all").equal
    return None


def _moved(pair: Pair | None, start: int) -> Pair | None:
    return None if pair is None else (*pair[:2], pair[2] + start, pair[3])


# --- combinations ---


def _combined(found: Sequence[_Candidate], rows: Tensor, wanted: Tensor) -> Iterator[_Candidate]:
    """Yield combinations that show what is wanted: of two or three by `&` or `|`, (a | b) & c, and (a & b) | c."""
    costs = torch.tensor([c.cost for c in found])

    def joined(operator: str, chosen: Sequence[int]) -> _Candidate:
        made = found[chosen[0]]
        for n in chosen[1:]:
            made = made.joined(operator, found[n])
        return made

    for operator, other, shown, target in (("&", "|", rows, wanted), ("|", "&", ~rows, ~wanted)):  # a | b is ~(~a & ~b)
        if chosen := _together(shown, target, costs):
            yield joined(operator, chosen)
        around = ((shown | ~target).all(1) & ~shown.all(1) & (shown & ~target).any(1)).nonzero().flatten()
        for one in around[(shown[around] & ~target).sum(1).argsort()[:12]].tolist():
            left = shown[one]  # the pairs that the others still decide
            if chosen := _together(~shown[:, left], ~target[left], costs):
                yield joined(other, chosen).joined(operator, found[one])


def _together(shown: Tensor, target: Tensor, costs: Tensor) -> Sequence[int]:
    """Return the cheapest two rows, or else three, that show the target where all of them show it; or nothing."""
    rows = ((shown | ~target).all(1) & ~shown.all(1) & (shown & ~target).any(1)).nonzero().flatten()
    nearest = rows[shown[rows].sum(1).argsort()[:_MOST_COMBINED]]
    rows = torch.cat([nearest, rows[costs[rows].argsort(stable=True)[:_MOST_COMBINED]]]).unique()
    count = len(rows)
    extra = shown[rows][:, ~target].float()
    both, cost = extra @ extra.T, costs[rows, None] + costs[rows]
    if (both == 0).any():
        cheapest = divmod(int(torch.where(both == 0, cost, torch.inf).argmin()), count)
        return [int(rows[n]) for n in cheapest]
    a, b = torch.triu_indices(count, count, 1)
    least = both[a, b].argsort()[:32]
    a, b = a[least], b[least]
    three = (extra[a] * extra[b]) @ extra.T
    if not (three == 0).any():
        return []
    pair, third = divmod(int(torch.where(three == 0, cost[a, b, None] + costs[rows], torch.inf).argmin()), count)
    return [int(rows[n]) for n in (a[pair], b[pair], third)]


# --- scores ---


def _grid(score: Score, **sizes: int) -> tuple[Tensor, Tensor]:
    """Return scores [B, H, 16, 64], and how a score change changes them."""
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randint(0, sizes["q_len"], (n,), generator=generator) for n in (16, 64))
    scores = torch.randn(sizes["batch"], sizes["heads"], len(q), len(kv), generator=generator) * 4
    over = ScoreOverLengths(_CALL, score, **sizes)
    return scores, over.changed(scores, torch.arange(sizes["batch"]), torch.arange(sizes["heads"]), q, kv)


def _hidden_by(score: Score) -> Callable[..., Tensor] | None:
    """Return the mask of a score function that only hides pairs, or None for another one."""
    scores, changed = _grid(score, q_len=_LENGTHS[-1], batch=1, heads=1)
    hidden = changed == -torch.inf
    if not hidden.any() or not torch.equal(changed[~hidden], scores[~hidden]):
        return None
    return lambda b, h, q, kv: score(torch.zeros(()), b, h, q, kv) == 0


def _scores_like(score: Score, facts: _Facts, length: int) -> list[Likeness]:
    works = functools.partial(_works, functools.partial(score, torch.zeros(())))
    length = _largest(lambda n: works(0, 0, n, 0) and works(0, 0, 0, n), length)
    batch = _largest(lambda n: works(n, 0, 0, 0), 65) % 65  # 0 if there is no tensor of batch elements
    results: dict[str, Likeness] = {}
    for heads in dict.fromkeys((_MOST_HEADS, *(n for n in facts.own if type(n) is int and 1 < n <= 64))):
        sizes = {"q_len": length, "batch": max(1, batch), "heads": heads}
        for candidate in _candidates("score", length, facts):
            try:
                changed, wanted = (_grid(one, **sizes)[1] for one in (candidate.made, score))
            except _FAILS:  # it is for other lengths, or another number of heads
                continue
            share = float(torch.isclose(changed, wanted, rtol=1e-4, atol=1e-5).float().mean())
            if candidate.text not in results or share > results[candidate.text].share:
                results[candidate.text] = Likeness(candidate.made, candidate.text, share == 1, share, (length,))
    return sorted(results.values(), key=lambda one: -one.share)[:_SHOWN]
