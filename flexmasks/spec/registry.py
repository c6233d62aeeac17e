"""The registry: names of masks and scores, and what is known of each."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from flexmasks.cache import clear_caches
from flexmasks.spec.parameters import Size, describe
from flexmasks.spec.values import CHAIN, Definition, Mask, Score, define

if TYPE_CHECKING:
    from flexmasks.plans.windows import Band

Function = TypeVar("Function", bound=Callable[..., Tensor])
_Made = TypeVar("_Made", Mask, Score)
_REGISTRY: dict[str, dict[str, Definition]] = {"mask": {}, "score": {}}
# What torch's own functions call it, and what to pass here.
_HABITS = {
    "is_causal": 'pass mask="causal"',
    "attn_mask": "pass `mask`, a name or function, or `block_mask`",
    "mask_mod": "pass `mask`",
    "score_mod": "pass `score`",
    "enable_gqa": "grouped heads are seen from the shapes",
    "dropout_p": "there is no dropout of attention weights",
}


@dataclass(frozen=True)
class Entry:
    """One row of `list_masks()` or `list_scores()`."""

    name: str
    signature: str  # its parameters, as one would write them
    summary: str  # the first line of its docstring
    source: str  # the paper or library it comes from, or ""
    peers: str  # what other libraries call it, or ""


def register_mask(
    *,
    name: str | None = None,
    example: Callable[[int], dict[str, Any]] | None = None,
    prepare: Callable[..., dict[str, Any]] | None = None,
    inner_size: Callable[..., Size] | None = None,
    dense: Callable[..., Band | None] | None = None,
) -> Callable[[Function], Function]:
    """Register a mask: one plain function `(b, h, q, kv, *, parameters) -> bool` of index tensors.

    The decorated function is returned unchanged; registered again, by a notebook's cell that runs once more say, it
    takes the place of what it was. Its docstring's first line is the mask's one-line meaning, its
    paragraph that starts with `Source:` says where it comes from, one that starts with `Peers:` what other libraries
    call it. Annotate parameters as flexmasks.spec.parameters says.

    Args:
        name: the name to register; the function's own by default.
        example: `example(length)` gives parameters that show the mask well at that length, batch size 1: those of its
            picture and its code in the gallery, and of its row in the benchmarks.
        prepare: `prepare(size, *, parameters)` makes the function's arguments from the user's parameters: it may
            check what a specification cannot say (raising ValueError) and compute tensors once. The mask's
            parameters are then prepare's, and the function takes what prepare returns. `size` is a
            flexmasks.spec.Size, or None where the mask is called by itself.
        inner_size: for masks that hold masks: `inner_size(size, **parameters)`, the sizes that those see.
        dense: for masks that some kernels have themselves: `dense(size, **parameters)`, the mask as a
            flexmasks.spec.Band, or None where these parameters make it another.

    Raises:
        ValueError: the name is taken by another function, or not an identifier.
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
    return _register("mask", name, example=example, prepare=prepare, inner_size=inner_size, dense=dense)


def register_score(
    *,
    name: str | None = None,
    example: Callable[[int], dict[str, Any]] | None = None,
    prepare: Callable[..., dict[str, Any]] | None = None,
    inner_size: Callable[..., Size] | None = None,
    dense: Callable[..., float | None] | None = None,
) -> Callable[[Function], Function]:
    """Register a score change: one plain function `(score, b, h, q, kv, *, parameters) -> score`.

    Arguments and errors are those of `register_mask`, but for `dense(size, **parameters)`: the cap, where the change
    is a soft-cap.
    """
    return _register("score", name, example=example, prepare=prepare, inner_size=inner_size, dense=dense)


def get_mask(name: str | Mask | Callable[..., Tensor], /, **params: Any) -> Mask:
    """The mask of that name with its parameters; also of a plain function `(b, h, q, kv, *, parameters)`.

    Raises ValueError for an unknown name, TypeError for unknown or missing parameters.

    Example:
        >>> import flexmasks
        >>> flexmasks.get_mask("sliding_window", window=256)
        sliding_window(window=256)
    """
    return _get(Mask, name, params)


def get_score(name: str | Score | Callable[..., Tensor], /, **params: Any) -> Score:
    """The score change of that name with its parameters; also of a plain function `(score, b, h, q, kv, *, ...)`.

    Raises ValueError for an unknown name, TypeError for unknown or missing parameters.

    Example:
        >>> import flexmasks
        >>> flexmasks.get_score("softcap", cap=30.0)
        softcap(cap=30.0)
    """
    return _get(Score, name, params)


def list_masks() -> list[Entry]:
    """The registered masks, by name.

    Example:
        >>> import flexmasks
        >>> [m.signature for m in flexmasks.list_masks() if m.name == "causal"]
        ['causal()']
    """
    return [_entry(d) for _, d in sorted(_REGISTRY["mask"].items())]


def list_scores() -> list[Entry]:
    """The registered score changes, by name."""
    return [_entry(d) for _, d in sorted(_REGISTRY["score"].items())]


def definition(kind: str, name: str) -> Definition:
    """The definition registered under that name, or a ValueError with the nearest names."""
    known = _REGISTRY[kind]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        other = "score" if kind == "mask" else "mask"
        if name in _REGISTRY[other]:
            raise ValueError(f"flexmasks: {name!r} is a {other}, pass it as `{other}=`, not as `{kind}=`.")
        if kind == "mask" and not name.isidentifier() and any(c in name for c in "&|~"):
            raise ValueError(
                f"flexmasks: no mask is named {name!r}; masks are combined as values: "
                'flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids).'
            )
        names = f"flexmasks.list_{kind}s() names the {len(known)} that there are."
        hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else names
        raise ValueError(f"flexmasks: no {kind} is named {name!r}; {hint}")
    return known[name]


def is_own(kind: str, name: str) -> bool:
    """Whether that is a name of the library's own, whose functions never change."""
    found = _REGISTRY[kind].get(name)
    return found is not None and found.own


def functions_of(kind: str, value: Any) -> Any:
    """A mask or score given as in a call, for `captures.capture` to read: a name as the functions that it stands for.

    A name of the library's own stays: its functions never change.
    """
    if isinstance(value, str):
        found = definition(kind, value)
        return value if found.own else (found.function, found.prepare, found.inner_size, found.dense)
    if isinstance(value, (list, tuple)):
        return [functions_of(kind, v) for v in value]
    return value


def from_arguments(mask: Any, score: Any, params: Mapping[str, Any]) -> tuple[Mask | None, Score | None]:
    """The mask and the score of a call whose extra keyword arguments are `params`.

    Each parameter goes to the one of them that takes it; TypeError where none or several do.
    """
    scores = list(score) if isinstance(score, list | tuple) else [] if score is None else [score]
    targets = [_pending("mask", mask)] if mask is not None else []
    targets += [_pending("score", s) for s in scores]
    shares: list[dict[str, Any]] = [{} for _ in targets]
    for name, value in params.items():
        takers = [i for i, (d, bound) in enumerate(targets) if name in d.parameters and name not in bound]
        if len(takers) == 1:
            shares[takers[0]][name] = value
        elif takers:
            owners = " and ".join(f"{targets[i][0].kind} {targets[i][0].name!r}" for i in takers)
            raise TypeError(
                f"flexmasks: `{name}` is a parameter of {owners}; say which: pass "
                f"flexmasks.get_mask(..., {name}=...) or flexmasks.get_score(..., {name}=...) instead of the name."
            )
        elif any(name in bound for _, bound in targets):
            raise TypeError(f"flexmasks: `{name}` is given twice: the mask or score already has it.")
        else:
            takes = "; ".join(
                f"{d.kind} {d.name!r} takes {', '.join(f'`{p}`' for p in d.parameters if p not in bound) or 'none'}"
                for d, bound in targets
            )
            hint = _HABITS.get(name, takes or "no mask or score is given by name")
            raise TypeError(f"flexmasks: no parameter is named `{name}`; {hint}.")
    made = [
        (Mask if d.kind == "mask" else Score).of(d, {**bound, **share})
        for (d, bound), share in zip(targets, shares, strict=True)
    ]
    masks = [m for m in made if isinstance(m, Mask)]
    changes = [m for m in made if isinstance(m, Score)]
    chained = Score(CHAIN, {"scores": tuple(changes)}) if len(changes) > 1 else next(iter(changes), None)
    return next(iter(masks), None), chained


def _pending(kind: str, value: Any) -> tuple[Definition, Mapping[str, Any]]:
    if isinstance(value, str):
        return definition(kind, value), {}
    if isinstance(value, Mask | Score):
        if value.kind != kind:
            raise TypeError(f"flexmasks: {value!r} is a {value.kind}, pass it as `{value.kind}=`, not as `{kind}=`.")
        return value.definition, value.params
    if isinstance(value, bool) or not callable(value):
        dense = "; a dense mask `m` is mask='dense', visible=m" if isinstance(value, Tensor) else ""
        raise TypeError(
            f"flexmasks: `{kind}` must be a name, a {kind.title()} or a function, got {describe(value)}{dense}."
        )
    return define(kind, value), {}


def _get(cls: type[_Made], name: Any, params: Mapping[str, Any]) -> _Made:
    kind = cls.kind
    found, bound = _pending(kind, name)
    doubled = [n for n in params if n in bound]
    if doubled:
        raise TypeError(f"flexmasks: `{doubled[0]}` is given twice: the {kind} already has it.")
    return cls.of(found, {**bound, **params})


def _register(kind: str, name: str | None, **hooks: Any) -> Callable[[Function], Function]:
    def decorator(function: Function) -> Function:
        made = replace(define(kind, function, name, **hooks), registered=True)
        if not isinstance(made.name, str) or not made.name.isidentifier():
            raise ValueError(f"flexmasks: a {kind} needs a name that is an identifier, got {made.name!r}.")
        known = _REGISTRY[kind].get(made.name)
        there = known.function if known is not None else function
        if (there.__module__, there.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(f"flexmasks: a {kind} named {made.name!r} is registered already, by {there.__module__}.")
        if known is not None and known.own:  # which caches know by its name
            clear_caches()
        _REGISTRY[kind][made.name] = made
        return function

    return decorator


def _entry(d: Definition) -> Entry:
    parameters = ", ".join(n if p.required else f"{n}={p.default!r}" for n, p in d.parameters.items())
    return Entry(
        name=d.name,
        signature=f"{d.name}({parameters})",
        summary=d.doc.partition("\n")[0],
        source=_paragraph(d.doc, "Source"),
        peers=_paragraph(d.doc, "Peers"),
    )


def _paragraph(doc: str, title: str) -> str:
    """What a docstring says after `title:`, on one line; it ends at an empty line or where another title starts."""
    found = re.search(rf"^{title}: (.*?)(?=\n\s*\n|\n[A-Z]\w*:|\Z)", doc, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""
