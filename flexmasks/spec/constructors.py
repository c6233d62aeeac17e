"""Constructors: the functions of `flexmasks.masks` and `flexmasks.scores`, one for each definition of the library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from flexmasks.spec.arguments import get_mask, get_score
from flexmasks.spec.by_name import says_what_to_write
from flexmasks.spec.definitions import CONSTRUCTORS, Definition, names
from flexmasks.spec.parameters import describe
from flexmasks.spec.values import Mask, Score

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
