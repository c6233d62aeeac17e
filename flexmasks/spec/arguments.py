"""Arguments of a call, as users write them, to Mask and Score values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.spec.by_name import says_what_to_write
from flexmasks.spec.definitions import (
    CHAIN,
    CONSTRUCTORS,
    Definition,
    advice_on_name,
    constructed_by,
    define,
    definition,
    hint_for,
    names,
    of_pairs,
)
from flexmasks.spec.parameters import describe, in_message
from flexmasks.spec.values import Mask, Score

MaskLike = str | Mask | Callable[..., Tensor] | Tensor
ScoreLike = str | Score | Callable[..., Tensor] | Tensor
if TYPE_CHECKING:
    Masks = MaskLike | Sequence[MaskLike] | compat.BlockMask  # what attention takes as a mask
else:
    Masks = Any  # the class takes long to import
Ints = Tensor | Sequence[int]
Alignment = int | Ints | Literal["first", "last"] | None  # see `plans.alignment`
Layout = Literal["bhsd", "bshd"]
Seed = int | Tensor | torch.Generator | None  # of dropout
Pages = Tensor | Sequence[Sequence[int]]
_Value = TypeVar("_Value", Mask, Score)


def _with_names(kind: str) -> Callable[..., str]:
    # What to write in place of parameters that have no names.
    def hint(name: Any, *given: Any) -> str:
        known, bound = _definition_and_params(kind, name)
        free = [parameter for parameter in known.parameters if parameter not in bound]
        if not free:
            return f"get_{kind}({known.name!r}), which takes no parameters"
        return f"get_{kind}({known.name!r}, {', '.join(f'{p}={describe(v)}' for p, v in zip(free, given))})"  # noqa: B905

    return hint


@says_what_to_write(_with_names("mask"))
def get_mask(name: MaskLike, /, **params: Any) -> Mask:
    """Return a mask, by its name or a function `(b, h, q, kv, *, parameters)`, with its parameters.

    Raises ValueError for an unknown name, TypeError for unknown or missing parameters.

    Example:
        >>> import flexmasks
        >>> flexmasks.get_mask("sliding_window", window=256)
        sliding_window(window=256)
    """
    return _get(Mask, name, params)


@says_what_to_write(_with_names("score"))
def get_score(name: ScoreLike, /, **params: Any) -> Score:
    """Return a score change, by its name or a function `(score, b, h, q, kv, *, parameters)`, with its parameters.

    Raises ValueError for an unknown name, TypeError for unknown or missing parameters.

    Example:
        >>> import flexmasks
        >>> flexmasks.get_score("softcap", cap=30.0)
        softcap(cap=30.0)
    """
    return _get(Score, name, params)


def from_arguments(mask: Any, score: Any, params: Mapping[str, Any]) -> tuple[Mask | None, Score | None]:
    """Return the mask and the score of a call whose extra keyword arguments are `params`.

    Each parameter goes to the mask or score that takes it. Raises TypeError for a parameter that no mask or score
    takes, or that more than one takes. A list of masks becomes one mask of what all show, a list of scores one score
    that applies them in order.
    """
    masks = list(mask) if isinstance(mask, list | tuple) else [] if mask is None else [mask]
    if mask is not None and not masks:
        raise TypeError("flexmasks: `mask` is an empty list; leave it out where all keys are visible.")
    scores = list(score) if isinstance(score, list | tuple) else [] if score is None else [score]
    targets = [_definition_and_params("mask", m) for m in masks]
    targets += [_definition_and_params("score", s) for s in scores]
    own_params: list[dict[str, Any]] = [{} for _ in targets]
    for name, value in params.items():
        takers = [i for i, (d, given) in enumerate(targets) if name in d.parameters and name not in given]
        if len(takers) != 1:
            raise TypeError(f"flexmasks: {_problem(name, value, targets, takers)}")
        own_params[takers[0]][name] = value
    values = [(d, {**given, **own}) for (d, given), own in zip(targets, own_params, strict=True)]
    made = None
    for value in values[: len(masks)]:
        made = Mask._of(*value) if made is None else made & Mask._of(*value)
    changes = [Score._of(*value) for value in values[len(masks) :]]
    return made, Score(CHAIN, {"scores": tuple(changes)}) if len(changes) > 1 else next(iter(changes), None)


def _problem(name: str, value: Any, targets: list[tuple[Definition, Mapping[str, Any]]], takers: list[int]) -> str:
    if takers:
        owners = " and ".join(f"{targets[i][0].kind} {targets[i][0].name!r}" for i in takers)
        return (
            f"`{name}` is a parameter of {owners}; say which: pass flexmasks.get_mask(..., {name}=...) or "
            f"flexmasks.get_score(..., {name}=...) instead of the name."
        )
    if any(name in given for _, given in targets):
        return f"`{name}` is given twice: the mask or score already has it."
    takes = "; ".join(
        f"{d.kind} {d.name!r} takes {', '.join(f'`{p}`' for p in d.parameters if p not in given) or 'none'}"
        for d, given in targets
    )
    free = tuple([p for d, given in targets for p in d.parameters if p not in given])
    advice = advice_on_name(name, value, free, takes or "no mask or score is given by name")
    return f"no parameter is named `{name}`; {advice}"


def functions_of(kind: str, value: Any) -> Any:
    """Return a mask or score, as a user passes it to a call, in a form that `structure.flatten` takes apart.

    A registered name becomes the functions of its definition. One of the library's own names stays a name, because
    its functions never change.
    """
    if isinstance(value, str):
        known = definition(kind, value)
        return value if known.by_library else known.functions
    if isinstance(value, (list, tuple)):
        return [functions_of(kind, v) for v in value]
    alone = value._alone if isinstance(value, Mask | Score) else None
    return value if alone is None else alone


def _definition_and_params(kind: str, value: Any) -> tuple[Definition, Mapping[str, Any]]:
    """Return the definition and the bound parameters of a mask or score, as a user passes it to a call."""
    if isinstance(value, str):
        return definition(kind, value), {}
    if isinstance(value, Mask | Score):
        if value._kind != kind:
            raise TypeError(f"flexmasks: {value!r} is a {value._kind}, pass it as `{value._kind}=`, not as `{kind}=`.")
        return value._definition, value.params
    if (pairs := of_pairs(kind, value)) is not None:
        return pairs
    if isinstance(value, bool) or not callable(value) or constructed_by(kind, value):
        got = f"{in_message(value)}{hint_for(kind, value)}"
        raise TypeError(f"flexmasks: `{kind}` must be a name, a {kind.title()} or a function, got {got}.")
    return define(kind, value), {}


def _get(cls: type[_Value], name: Any, params: Mapping[str, Any]) -> _Value:
    known, given = _definition_and_params(cls._kind, name)
    doubled = [n for n in params if n in given]
    if doubled:
        raise TypeError(f"flexmasks: `{doubled[0]}` is given twice: the {cls._kind} already has it.")
    return cls._of(known, {**given, **params})


Constructor = Callable[..., Mask | Score]


def constructors(kind: str, **written: Constructor) -> dict[str, Constructor]:
    """Return the constructors of all masks or scores of the library, by their names.

    written: those that are written by hand, by their names.
    """
    own = {name: d for name, d in sorted(names(kind).items()) if d.by_library}
    made = {name: written.get(name) or _constructor(d) for name, d in own.items()}
    CONSTRUCTORS[kind].update({name: (constructor, own[name]) for name, constructor in made.items()})
    return made


def _constructor(d: Definition) -> Constructor:
    """Return a function that does what `get_mask` does with this definition's name, for `help` and editors too."""
    get, name, parameters = (get_mask if d.kind == "mask" else get_score), d.name, tuple(d.parameters)

    def construct(**params: Any) -> Mask | Score:
        return get(name, **params)

    def hint(*given: Any) -> str:
        shown = ", ".join(f"{p}={describe(v)}" for p, v in zip(parameters, given, strict=False))
        return f"{name}({shown})" + ("" if parameters else ", which takes no parameters")

    read = inspect.signature(d.prepare or d.function)  # the user's parameters are prepare's, if there is one
    taken = [p for p in read.parameters.values() if p.kind is p.KEYWORD_ONLY]
    signature = read.replace(parameters=taken, return_annotation=Mask if d.kind == "mask" else Score)
    construct.__name__ = construct.__qualname__ = name
    construct.__module__ = f"flexmasks.{d.kind}s"  # pickles find the constructor there
    construct.__doc__ = d.doc
    construct.__dict__["__signature__"] = signature
    return says_what_to_write(hint)(construct)
