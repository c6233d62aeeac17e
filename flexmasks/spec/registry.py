"""The registry: it gives masks and scores their names, and lists them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from flexmasks.cache import clear_caches
from flexmasks.spec.arguments import get_mask, get_score
from flexmasks.spec.bands import Band, Factors
from flexmasks.spec.by_name import says_what_to_write
from flexmasks.spec.definitions import OPERATORS, Definition, define, definition, names
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask, Score

Function = TypeVar("Function", bound=Callable[..., Tensor])


@dataclass(frozen=True, repr=False)
class Entry:
    """One row of `list_masks()` or `list_scores()`."""

    name: str
    signature: str  # name and parameters, as one would write a call
    summary: str  # first line of the docstring
    source: str  # the paper or library that it comes from, or ""
    peers: str  # its names in other libraries, or ""
    kind: str = "mask"  # or "score"

    def __repr__(self) -> str:
        return f"Entry({self.kind} {self.signature}: {self.summary})"

    def example(self, length: int) -> Mask | Score:
        """Return the mask or score with the parameters of its example for this many queries and keys.

        Raises ValueError if it needs parameters and was registered without an example.

        Example:
            >>> import flexmasks
            >>> [entry.example(64) for entry in flexmasks.list_masks() if entry.name == "sliding_window"]
            [sliding_window(window=16)]
        """
        return example(self.kind, self.name, length)


def example(kind: str, name: str, length: int) -> Mask | Score:
    """Return a mask or score with its example's parameters; ValueError if it has no example and needs parameters."""
    known = definition(kind, name)
    if known.example is None and any(p.required for p in known.parameters.values()):
        raise ValueError(f"register {name!r} with example=lambda length: {{...}}, parameters that show it well.")
    params = known.example(length) if known.example is not None else {}
    return get_mask(name, **params) if kind == "mask" else get_score(name, **params)


def _how_to_register(kind: str) -> Callable[..., str]:
    """Return what to write in place of a decorator that got an argument by position."""

    def hint(given: Any, *more: Any) -> str:
        if isinstance(given, str):
            return f"@flexmasks.register_{kind}(name={given!r}) above the function"
        return f"@flexmasks.register_{kind}(), with parentheses, above the function"

    return hint


@says_what_to_write(_how_to_register("mask"))
def register_mask(
    *,
    name: str | None = None,
    example: Callable[[int], dict[str, Any]] | None = None,
    prepare: Callable[..., dict[str, Any]] | None = None,
    inner_size: Callable[..., Size] | None = None,
    band: Callable[..., Band | None] | None = None,
    compiled: Callable[..., Tensor] | None = None,
    counts: Callable[..., Tensor | None] | None = None,
) -> Callable[[Function], Function]:
    """Register a mask, one plain function of index tensors `(b, h, q, kv, *, parameters) -> bool`.

    The decorator returns the function unchanged. A function that is registered again, for example because a notebook's
    cell runs twice, replaces its earlier version. The first line of the docstring is the mask's one-line meaning; a
    paragraph that starts with `Source:` says where the mask comes from, and a paragraph that starts with `Peers:` how
    other libraries call it. Annotate parameters as flexmasks.spec.parameters describes.

    Args:
        name: the name to register; the function's own name by default.
        example: `example(length)` returns parameters that show the mask well at that length, for batch size 1. The
            gallery's picture and code and the benchmarks' row are made with them.
        prepare: `prepare(size, *, parameters)` returns the function's arguments, computed from the user's parameters.
            It may check what a specification cannot express (raising ValueError) and compute tensors once. The mask's
            parameters are then prepare's parameters. `size` is a flexmasks.spec.Size, or None if the mask is
            called by itself. If `size.may_read` is False, it must not read values of tensors on the host, so that it
            can be traced and captured: no `int(x)`, no `if x.any()`, no shapes that depend on values, and no checks of
            values. `flexmasks.spec.may_read(size, *tensors)` says whether they may run. Return tensors by themselves or
            in tuples and dicts; with tensors inside lists, functions or objects each new call is planned anew.
        inner_size: for masks that hold masks: `inner_size(size, **parameters)` returns the Size that inner masks see.
        band: for masks that some kernels know natively: `band(size, **parameters)` returns the mask as a
            flexmasks.spec.Band, or None if it is no band with these parameters.
        compiled: another function with the same arguments and the same values, which kernels compute for each pair in
            its place, because it takes fewer operations there. Plans and pictures call the function itself, whose
            arithmetic shows which blocks are visible.
        counts: for masks that are given as lists of pairs: `counts(size, block_size, **parameters)` returns how many
            different pairs of each block are visible, int [batch or 1, heads or 1, blocks of queries, blocks of keys],
            or None if that is not known. block_size is (queries, keys), and query 0 of the blocks is at position
            size.q_offset. Exact plans ask it where the whole mask is this one, and then look at no pair.

    Raises:
        ValueError: another function has this name, or the name is no identifier.
        TypeError: the function does not take four indices.

    Example:
        >>> import flexmasks
        >>> @flexmasks.register_mask(example=lambda length: {"stride": 4})
        ... def every_nth(b, h, q, kv, *, stride: int):
        ...     '''Keys at multiples of `stride`.'''
        ...     return kv % stride == 0
        >>> flexmasks.get_mask("every_nth", stride=2)
        every_nth(stride=2)
    """
    hooks: dict[str, Any] = {"example": example, "prepare": prepare, "inner_size": inner_size, "band": band}
    return _register("mask", name, **hooks, compiled=compiled, counts=counts)


@says_what_to_write(_how_to_register("score"))
def register_score(
    *,
    name: str | None = None,
    example: Callable[[int], dict[str, Any]] | None = None,
    prepare: Callable[..., dict[str, Any]] | None = None,
    inner_size: Callable[..., Size] | None = None,
    cap: Callable[..., float | None] | None = None,
    factors: Callable[..., Factors | None] | None = None,
    relative: bool = False,
) -> Callable[[Function], Function]:
    """Register a score change, one plain function `(score, b, h, q, kv, *, parameters) -> score`.

    Args:
        name, example, prepare, inner_size: as for `register_mask`.
        cap: for soft-caps, which some kernels know natively: `cap(size, **parameters)` returns the cap, or None if
            the change is no soft-cap with these parameters.
        factors: for changes that add a slope of each head times the distance, as ALiBi, which some kernels compute:
            `factors(size, **parameters)` returns flexmasks.spec.Factors, or None.
        relative: True if the new score depends on the old one, on h and on kv - q alone, and the function takes any
            distance. In sequences laid end to end, such a change reads no positions.

    Raises:
        ValueError, TypeError: as `register_mask` does.

    Example:
        >>> import flexmasks
        >>> @flexmasks.register_score(example=lambda length: {"factor": 0.5})
        ... def scaled(score, b, h, q, kv, *, factor: float):
        ...     '''All scores times a factor.'''
        ...     return score * factor
        >>> flexmasks.get_score("scaled", factor=2.0)
        scaled(factor=2.0)
    """
    hooks: dict[str, Any] = {"example": example, "prepare": prepare, "inner_size": inner_size}
    return _register("score", name, relative=relative, **hooks, cap=cap, factors=factors)


@says_what_to_write()
def list_masks() -> list[Entry]:
    """Return the registered masks, sorted by name.

    Example:
        >>> import flexmasks
        >>> [m.signature for m in flexmasks.list_masks() if m.name == "causal"]
        ['causal()']
    """
    return [_entry(d) for _, d in sorted(names("mask").items())]


@says_what_to_write()
def list_scores() -> list[Entry]:
    """Return the registered score changes, sorted by name.

    Example:
        >>> import flexmasks
        >>> [s.signature for s in flexmasks.list_scores() if s.name == "softcap"]
        ['softcap(cap, exact=False)']
    """
    return [_entry(d) for _, d in sorted(names("score").items())]


def _register(kind: str, name: str | None, *, relative: bool = False, **hooks: Any) -> Callable[[Function], Function]:
    for hook, given in hooks.items():
        if given is not None and not callable(given):
            such_as = ", such as lambda length: {...}" if hook == "example" else ""
            raise TypeError(f"flexmasks.register_{kind}: `{hook}` must be a function{such_as}, got {given!r}.")
    if not isinstance(relative, bool):
        raise TypeError(f"flexmasks.register_{kind}: `relative` must be True or False, got {relative!r}.")

    def decorator(function: Function) -> Function:
        made = replace(define(kind, function, name, **hooks), registered=True, relative=relative)
        if not isinstance(made.name, str) or not made.name.isidentifier():
            raise ValueError(f"flexmasks: a {kind} needs a name that is an identifier, got {made.name!r}.")
        _check_compiled(made)
        known = names(kind).get(made.name) or OPERATORS.get((kind, made.name))
        earlier = known.function if known is not None else function
        if _place_of(earlier) != _place_of(function):
            raise ValueError(f"flexmasks: a {kind} named {made.name!r} is registered already, by {earlier.__module__}.")
        if known is not None and known.by_library:  # caches know an own definition by its name
            clear_caches()
        names(kind)[made.name] = made
        return function

    return decorator


def _place_of(function: Function) -> tuple[str, str]:
    """Return where a function, or the class of a callable object, is defined."""
    place = function if hasattr(function, "__qualname__") else type(function)
    return place.__module__, place.__qualname__


def _check_compiled(d: Definition) -> None:
    """Raise TypeError if the function for kernels takes other arguments than the mask's own."""
    if d.compiled is None:
        return
    mine, other = (inspect.signature(f).parameters for f in (d.function, d.compiled))
    if list(mine) != list(other) or any(mine[n].kind != other[n].kind for n in mine):
        raise TypeError(
            f"flexmasks mask {d.name!r}: `compiled` must take the arguments of the mask's function, "
            f"{inspect.signature(d.function)}, its signature is {inspect.signature(d.compiled)}."
        )


def _entry(d: Definition) -> Entry:
    parameters = ", ".join(n if p.required else f"{n}={p.default!r}" for n, p in d.parameters.items())
    return Entry(
        name=d.name,
        signature=f"{d.name}({parameters})",
        summary=d.doc.partition("\n")[0],
        source=d.paragraph("Source"),
        peers=d.paragraph("Peers"),
        kind=d.kind,
    )
