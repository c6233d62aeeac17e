"""Errors of the public calls: arguments that do not fit, and short tracebacks."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.errors import users_frames
from flexmasks.spec.definitions import advice_on_tensor, meant_by, owners_of
from flexmasks.spec.elsewhere import ADVICE
from flexmasks.spec.parameters import in_message

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# What errors of a call name first that come from what it is made of.
_WITHIN = {
    "flexmasks.flex.flex_attention": ("flexmasks.attention:",),
    "flexmasks.integrations.distributed.attention": ("flexmasks.attention:",),
    "flexmasks.varlen_attention": ("flexmasks.attention:", "flexmasks mask 'packed':"),
    "flexmasks.paged_attention": ("flexmasks.attention:",),
    "flexmasks.sdpa": ("flexmasks.attention:",),
    "flexmasks.weights": ("flexmasks.attention:",),
    "flexmasks.key_sums": ("flexmasks.attention:",),
}
_UNKNOWN = re.compile(r"flexmasks: no parameter is named `(\w+)`; (?!did you mean)(.*)")


def says_what_to_write(
    hint: Callable[..., str] | None = None, also: tuple[str, ...] = ()
) -> Callable[[_Function], _Function]:
    """Decorate a public call, so that its errors say what to write.

    Arguments by position that need names, arguments that the call does not take and missing ones raise a TypeError that
    says what to write. The traceback of an error of this library shows the user's code and the call alone.

    hint: takes all arguments that were given by position, and returns what to write, as the rest of a sentence after
        "write". By default the first argument that needs a name gets the name that fits its type.
    also: the names of arguments that the call takes and its signature does not have.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.name != "self"]
        by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        most = len(by_position) + ("self" in signature.parameters)
        most = sys.maxsize if any(p.kind is p.VAR_POSITIONAL for p in parameters) else most
        takes_params = any(p.kind is p.VAR_KEYWORD for p in parameters)
        where = _public_name(function)
        names = (*(p.name for p in parameters if p.kind in _NAMED), *also)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > most:
                taken = f"takes {', '.join(by_position)} by position" if by_position else "takes nothing by position"
                if hint is None and not by_name and not takes_params:
                    raise TypeError(f"{where} {taken}, got {in_message(args[most])}.")
                what = hint(*args) if hint is not None else named(args[most], by_name)
                raise TypeError(f"{where} {taken}; write {what}.")
            if torch.compiler.is_dynamo_compiling():  # traces no tracebacks, and writes one of all frames
                try:
                    return function(*args, **kwargs)
                except (ValueError, TypeError) as error:
                    message = f"{error.args[0]}" if error.args else ""
                    if not message.startswith("flexmasks"):
                        raise
                    kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(message)
            try:
                return function(*args, **kwargs)
            except (ValueError, TypeError) as error:
                if str(error).startswith("flexmasks"):
                    unknown = _UNKNOWN.match(str(error))
                    if unknown and unknown[1] in kwargs and names:
                        error.args = (_no_argument(where, unknown[1], names, unknown[2]),)
                    for within in _WITHIN.get(where, ()):
                        if str(error).startswith(within):
                            error.args = (f"{where}:{str(error).removeprefix(within)}",)
                    raise error.with_traceback(users_frames(error.__traceback__)) from error.__cause__
                problem = _unfit(where, signature, names, args, kwargs)
                if not problem:
                    raise
                raise TypeError(problem) from None

        return cast(_Function, call)

    return decorate


def _no_argument(where: str, name: str, names: tuple[str, ...], advice: str) -> str:
    """Return the message of a call with an argument that neither it nor its mask or score takes.

    names: what the call takes.
    advice: what mask and score make of it.
    """
    if meant := meant_by(name, names):
        advice = f"did you mean `{meant}`?"
    elif name not in ADVICE and not owners_of(name):
        advice = f"it takes {', '.join(names)}; {advice}"
    return f"{where}: no argument is named `{name}`; {advice}"


def _public_name(function: Callable[..., Any]) -> str:
    parts = function.__module__.split(".")
    own = ("integrations", "orders", "flex", "trees")  # modules whose names the package does not have itself
    has_own_names = any(part in own for part in parts[1:2]) or parts[1:] in (["masks"], ["scores"])
    return ".".join([*(parts[:3] if has_own_names else parts[:1]), function.__qualname__])


def _unfit(
    where: str, signature: inspect.Signature, names: tuple[str, ...], args: Any, kwargs: Mapping[str, Any]
) -> str:
    """Return the message of a call whose arguments do not fit its signature, or "". names: what it takes."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = f"it takes {', '.join(names) or 'none'}"
        others = [name for name in kwargs if name not in names]
        known = ADVICE if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()) else {}
        hints = {n: f"write `{meant}`" if (meant := meant_by(n, names)) else known.get(n, "") for n in others}
        if others and "unexpected" in str(error):
            hint = f"; {hints[others[0]]}" if hints[others[0]] else owners_of(others[0])
            return f"{where}: no argument is named `{others[0]}`; {takes}{hint}."
        return f"{where}: {error}; {'; '.join([takes, *(f'for `{n}` {hint}' for n, hint in hints.items() if hint)])}."
    return ""


def named(value: Any, names: list[str]) -> str:
    """Return what to write for an argument: of all names that it may have, the one that fits its type."""
    if isinstance(value, str) and "mask" in names:
        return f'mask="{value}"'
    kind = getattr(value, "_kind", "mask" if callable(value) else "")  # a Mask or Score says what it is
    if isinstance(value, compat.BlockMask):
        kind = "block_mask"
    if isinstance(value, Tensor) and "mask" in names and value.ndim >= 2:
        return "mask=m for a boolean tensor m" if value.dtype == torch.bool else advice_on_tensor("mask", value)
    if kind in names:
        return f"`{kind}=` before the {kind.replace('_', ' ')}"
    return f"the names of the others: {', '.join(f'{name}=' for name in names)}" if names else "the names of all"
