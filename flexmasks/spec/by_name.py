"""Errors of calls that got an argument by position where it needs its name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

from flexmasks import compat

_Function = TypeVar("_Function", bound=Callable[..., Any])


def says_what_to_write(hint: Callable[..., str] | None = None) -> Callable[[_Function], _Function]:
    """Decorate a public call whose later arguments need names.

    If such an argument is given by position, the call raises a TypeError that says what to write.

    hint: takes all arguments that were given by position, and returns what to write, as the rest of a sentence after
        "write". By default the first argument that needs a name gets the name that fits its type.
    """

    def decorate(function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters.values()
        by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        most = len(by_position)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > most:
                what = hint(*args) if hint is not None else named(args[most], by_name)
                taken = f"takes {', '.join(by_position)} by position" if by_position else "takes nothing by position"
                raise TypeError(f"flexmasks.{function.__name__} {taken}; write {what}.")
            return function(*args, **kwargs)

        return cast(_Function, call)

    return decorate


def named(value: Any, names: list[str]) -> str:
    """Return what to write for an argument, with the name that fits its type.

    names: of all arguments that it may be.
    """
    if isinstance(value, str) and "mask" in names:
        return f'mask="{value}"'
    kind = getattr(value, "kind", "mask" if callable(value) else "")  # a Mask or Score says what it is
    if isinstance(value, compat.BlockMask):
        kind = "block_mask"
    if isinstance(value, Tensor) and "mask" in names and value.ndim >= 2:
        return 'mask="dense", visible=m for a boolean tensor m'
    if kind in names:
        return f"`{kind}=` before the {kind.replace('_', ' ')}"
    return f"the names of the others: {', '.join(f'{name}=' for name in names)}"
