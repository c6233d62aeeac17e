"""The masks and scores that are most like a function: `flexmasks.alike`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks import Mask, Score, get_mask, get_score, list_masks, list_scores
from flexmasks.asking.compare import Pair, compare
from flexmasks.asking.pasted import Pasted, read
from flexmasks.extend import (
    Parameter,
    ScoreOverLengths,
    Size,
    definition,
    in_message,
    says_what_to_write,
    tensors_of,
)

_CALL = "flexmasks.alike"
_PAIRS = 4096  # on which candidates are compared at first
_CHANGES = ("length // n", "n - 1", "n // 2", "2 * n + 1", "n + 1", "2 * n", "-n")
_MOST, _MOST_WITH_OTHERS = 100, 5  # choices of the parameters without a default, alone and with one or two others
_MOST_OF_ONE = (40, 14, 8, 5)  # and of each without a default, if there are one, two, three or more
_MOST_COMBINED = 512  # of the candidates that show all that a function shows
_MOST_PAIRS = 1 << 25  # that are compared exactly; of longer masks these are of the last queries
_LENGTHS = (16, 37, 64, 128)
_SHOWN, _TRIED = 3, 24  # answers, and candidates that are compared exactly
_DERIVED, _NOT_ITS_OWN, _A_TENSOR, _COMBINED = 0.25, 0.5, 0.5, 0.5  # what these cost, beside 1 for each parameter
_ANY = 65  # a function that takes so many batch elements or heads takes any
_FAILS = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, AttributeError)


class Likeness(NamedTuple):
    """A mask or score of this library beside a function.

    mask: the mask or score.
    written: how to write it, with the names that a text leaves open.
    equal: whether both are the same at all lengths that were compared.
    share: the share of pairs that are the same at the longest of these lengths.
    lengths: the lengths; of long ones the last queries are compared.
    proved: whether both are the same at all lengths, or None if no solver is installed or none can decide.
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
        if self.equal or self.proved is False:
            at = " and ".join(", ".join(f"{n:,}" for n in self.lengths).rsplit(", ", 1))
            return f"{self.written}: the same at {at} tokens" + ", but not at all lengths" * (not self.equal)
        first = "" if self.first is None else f", first in (b, h, q, kv) = {self.first}"
        share = f"{max(1 - self.share, 1e-4):.2%} of the pairs of {self.lengths[-1]:,} tokens"
        return f"{self.written}: differs in {share}{first}"


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
    same, so are combinations of two by `&` and `|`.

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
    given = read(function, names)
    best: list[Likeness] = []
    for place in _places(given):
        given = _as_mask(given, place)
        found = _nearest(given, place)
        if not best or (found and found[0].equal):
            best = found
        if best and best[0].equal:
            break
    answer = Likenesses(best)
    answer.made_up = given.made_up
    return answer


# --- where a function is looked at ---


class _Place(NamedTuple):
    """Sizes, and some indices (b, h, q, kv) within them."""

    size: Size
    pairs: tuple[Tensor, ...]

    @classmethod
    def of(cls, length: int, batch: int, heads: int, numbers: Sequence[Any]) -> _Place:
        """Return random pairs, of which three quarters lie where masks with such numbers change."""
        steps = torch.tensor([n for n in numbers if n < length] or [1])
        generator = torch.Generator().manual_seed(0)

        def draw(high: int) -> Tensor:
            return torch.randint(0, high, (_PAIRS,), generator=generator)

        q, kv, kind, step = draw(length), draw(length), draw(4), steps[draw(len(steps))]
        kv = torch.where(kind < 2, q + step * (draw(3) - 1) + draw(5) - 2, kv)
        q, kv = (torch.where(kind == 2, x // step * step + draw(3) - 1, x).clamp(0, length - 1) for x in (q, kv))
        return cls(Size(batch, heads, length, length, q.device), (draw(batch), draw(heads), q, kv))

    def values(self, value: Mask | Score) -> Tensor:
        """Return which of the pairs a mask shows, or what a score makes of scores at some queries and keys."""
        if isinstance(value, Mask):
            return value(*self.pairs).expand(_PAIRS)
        q, kv, (batch, heads) = self.pairs[2][:16], self.pairs[3][:64], (self.size.batch, self.size.heads)
        scores = 4 * torch.randn(batch, heads, 16, 64, generator=torch.Generator().manual_seed(0))
        over = ScoreOverLengths(_CALL, value, q_len=self.size.q_len, batch=batch, heads=heads)
        return over.changed(scores, torch.arange(batch), torch.arange(heads), q, kv).flatten()


def _places(given: Pasted) -> Iterator[_Place]:
    """Yield sizes at which a function may be one of the library's, the likeliest first."""

    def largest(most: int, *directions: tuple[int, ...]) -> int:
        """Return the largest number up to `most` before which all indices along the directions work."""
        low, high = 1, most + 1
        while high - low > 1:
            middle = most if high > most else (low + high) // 2
            works = False
            with contextlib.suppress(*_FAILS):
                works = all(given.at(*((middle - 1) * torch.tensor(d)[:, None])) is not None for d in directions)
            low, high = (middle, high) if works else (low, middle)
        return low

    own = [n for n in given.numbers if type(n) is int and n > 1]
    has_length = any(type(n) is int and n == given.length for n in given.made_up.values())
    most = max([given.length * (1 + has_length), *(t.shape[-1] for t in tensors_of(given.value) if t.ndim)])
    length = largest(most, (0, 0, 1, 1), (0, 0, 1, 0), (0, 0, 0, 1))
    batch, heads = largest(_ANY, (1, 0, 0, 0)), largest(_ANY, (0, 1, 0, 0))
    some = batch % _ANY or 1, heads % _ANY or 8
    yield _Place.of(length, *some, own)
    if has_length:  # which may be a part of the sequence, or all of it
        yield _Place.of(given.length, *some, own)
    if isinstance(given.value, Score):
        yield from (_Place.of(length, some[0], n, own) for n in own if heads == _ANY > n)


def _as_mask(given: Pasted, place: _Place) -> Pasted:
    """Return a score that only hides pairs as a mask, and all else as it is."""
    if isinstance(score := given.value, Score):
        before, after = (place.values(get_score(f)) for f in (lambda score, b, h, q, kv: score, score))
        hidden = after == -torch.inf
        if hidden.any() and torch.equal(after[~hidden], before[~hidden]):
            mask = get_mask(lambda b, h, q, kv: score(torch.zeros(()), b, h, q, kv) == 0)
            return given._replace(value=mask, at=torch.vmap(mask))
    return given


# --- candidates ---


class _Value(NamedTuple):
    """A value of a parameter, how to write it, and how far it is from what the function holds."""

    value: Any
    text: str
    cost: float = 0.0


class _Candidate(NamedTuple):
    """A mask or score, how to write it, how long that is, and its values at a place."""

    made: Any
    text: str
    cost: float
    values: Tensor


def _candidates(given: Pasted, place: _Place) -> Iterator[_Candidate]:
    """Yield masks or scores with all likely parameters."""
    kind = "mask" if isinstance(given.value, Mask) else "score"
    entries, get = (list_masks(), get_mask) if kind == "mask" else (list_scores(), get_score)
    pool = _pool(given, place.size.q_len)
    for entry in entries:
        parameters = definition(kind, entry.name).parameters
        if "seed" in parameters:  # no other function draws the same
            continue
        options = {name: _options(p, pool, place.size) for name, p in parameters.items()}
        required = [name for name, p in parameters.items() if p.required]
        free = [name for name, p in parameters.items() if not p.required and not p.is_length]
        most = _MOST_OF_ONE[min(len(required), len(_MOST_OF_ONE)) - 1]
        needed = _choices([(name, options[name][:most]) for name in required])
        rarity = 1 / (1 + entry.peers.count(";"))  # few libraries have it, and so it is meant more rarely
        some = [names for count in (1, 2) for names in itertools.combinations(free, count)]
        others = [choice for names in some for choice in _choices([(name, options[name][:5]) for name in names])]
        choices = [*needed[:_MOST], *(a | b for a, b in itertools.product(needed[:_MOST_WITH_OTHERS], others))]
        for own in choices:
            text = ", ".join(f"{name}={v.text}" for name, v in own.items())
            cost = rarity + sum(1 + v.cost for v in own.values())
            with contextlib.suppress(*_FAILS):  # values do not fit each other, or this place
                made = get(entry.name, **{name: v.value for name, v in own.items()})
                yield _Candidate(made, f"{entry.name}({text})", cost, place.values(made))


def _choices(options: Sequence[tuple[str, list[_Value]]]) -> list[dict[str, _Value]]:
    """Return values for several parameters, the likeliest first."""
    names = [name for name, _ in options]
    products = itertools.product(*(values for _, values in options))
    chosen = sorted(products, key=lambda values: sum(v.cost for v in values))
    return [dict(zip(names, values, strict=True)) for values in chosen]


def _pool(given: Pasted, length: int) -> list[_Value]:
    """Return values for parameters, the likeliest first."""
    pool = [_Value(t, name, _A_TENSOR) for name, t in given.tensors.items()]
    pool += [_Value(n, text) for n, text in given.numbers.items()]
    pool += [_Value(n, repr(n), cost) for n, cost in ((0, _DERIVED), (1, _NOT_ITS_OWN)) if n not in given.numbers]
    known = {0, 1, *given.numbers}
    for change, (n, own) in itertools.product(_CHANGES, given.numbers.items()):
        other = eval(change, {"n": n, "length": length}) if n else 0  # one of `_CHANGES`
        text = change.replace("n", own) if own.isidentifier() and "length" not in change else repr(other)
        pool += [_Value(other, text, _DERIVED)] if other not in known else []
        known.add(other)
    for name, t in given.tensors.items():
        if t.ndim == 1 and len(t) < _ANY and t.dtype in (torch.int32, torch.int64):
            pool += [_Value(t + n, f"{name} {'+-'[n < 0]} 1", _A_TENSOR + _DERIVED) for n in (1, -1)]
        pool += [_Value(t[None], f"{name}[None]", _A_TENSOR + _DERIVED)] if t.ndim == 3 else []
    pool += [_Value(torch.tensor([n]), f"[{text}]", _A_TENSOR) for n, text in given.numbers.items() if type(n) is int]
    pool += [_Value(value, repr(value)) for value in (True, False)]
    return [*pool, *(_Value(get_mask(name), f"{name}()", _A_TENSOR) for name in ("causal", "full"))]


def _options(parameter: Parameter, pool: Sequence[_Value], size: Size) -> list[_Value]:
    """Return the values that a parameter takes. One without a specification takes masks."""
    options = []
    for one in pool:
        with contextlib.suppress(ValueError, TypeError):
            if bool(parameter.alternatives) != isinstance(one.value, Mask):
                parameter.check(_CALL, one.value, size, size.named())
                options.append(one)
    return options


# --- answers ---


def _nearest(given: Pasted, place: _Place) -> list[Likeness]:
    """Return the candidates that are most like a function, or combinations of two that are the same."""
    is_mask = isinstance(given.value, Mask)
    wanted = given.at(*place.pairs) if is_mask else place.values(given.value)
    found = sorted(_candidates(given, place), key=lambda one: one.cost)
    rows = torch.stack([one.values for one in found] or [wanted])
    if is_mask:
        shares = (1 + (rows & wanted).sum(1)) / (1 + (rows | wanted).sum(1))
    else:
        shares = torch.isclose(rows, wanted, rtol=1e-4, atol=1e-5).float().mean(1)
    ranked = [(found[n], shares[n].item()) for n in shares.argsort(descending=True, stable=True)]
    if is_mask and (given.tensors or not (shares == 1).any()):
        ranked += [(one, 1.0) for one in _combined(found, rows, wanted)]
        ranked.sort(key=lambda one: (-one[1], one[0].cost))
    answers: dict[bytes, Likeness] = {}  # by the values here
    for tried, (one, share) in enumerate(ranked, 1):
        key = one.values.numpy().tobytes()
        before = answers.get(key)
        if before and (share < 1 or before.proved or (before.equal and not given.tensors)):
            continue
        if answer := _compared(one, given, place.size, share):
            answers[key] = min(filter(None, (before, answer)), key=lambda one: (not one.equal, not one.proved))
        if len(answers) > _SHOWN or tried == _TRIED:
            break
    return sorted(answers.values(), key=lambda one: (not one.equal, not one.proved))[:_SHOWN]


def _combined(found: Sequence[_Candidate], rows: Tensor, wanted: Tensor) -> Iterator[_Candidate]:
    """Yield the cheapest pairs of candidates that together show what is wanted, by `&` or `|`. `found` begins with the
    cheapest.
    """
    for operator, shown, target in (("&", rows, wanted), ("|", ~rows, ~wanted)):  # a | b is ~(~a & ~b)
        chosen = ((shown | ~target).all(1) & ~shown.all(1)).nonzero().flatten()[:_MOST_COMBINED].tolist()
        extra = shown[chosen][:, ~target].float()
        costs = torch.tensor([found[n].cost for n in chosen])
        cost = torch.where((extra @ extra.T == 0).triu(), costs[:, None] + costs, torch.inf).flatten()
        for place in cost.argsort(stable=True)[: min(_SHOWN, int(cost.isfinite().sum()))].tolist():
            a, b = (found[chosen[n]] for n in divmod(place, len(chosen)))
            made = a.made & b.made if operator == "&" else a.made | b.made
            yield _Candidate(made, f"{a.text} {operator} {b.text}", a.cost + b.cost + _COMBINED, wanted)


def _compared(one: _Candidate, given: Pasted, size: Size, share: float) -> Likeness | None:
    """Compare a candidate and the function exactly. Return None if the candidate is not for these lengths."""
    mask, length = given.value, size.q_len
    if isinstance(mask, Score):
        return Likeness(one.made, one.text, share == 1, share, (length,))
    first, lengths, proved = None, [], None
    for n in (*(n for n in _LENGTHS if n < length), length):
        queries = min(n, max(1, _MOST_PAIRS // (n * size.batch * size.heads)))  # the last ones
        try:
            found = compare(mask, one.made, queries, n, q_offset="last", batch=size.batch, heads=size.heads)
        except _FAILS:  # it is for the whole length only
            if n == length:
                return None
            continue
        lengths.append(n)
        if first is None and found.first is not None:
            b, h, q, kv = found.first
            first = b, h, q + n - queries, kv
        share = 1 - (found.only_a + found.only_b) / (queries * n * size.batch * size.heads)
    with contextlib.suppress(*_FAILS, ImportError):  # without a solver, or if none can read them, it is not known
        proved = compare(mask, one.made, lengths="all").equal if first is None else None
    if proved is False and (tensors_of(one.made) or tensors_of(mask)):  # which stand for any in a proof
        proved = None
    return Likeness(one.made, one.text, first is None and proved is not False, share, tuple(lengths), proved, first)
