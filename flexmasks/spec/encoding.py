"""Masks and scores encoded for torch.compile, which can trace them: strings, numbers and tensors in tuples.

A user's function is the name of its template, see `flexmasks.spec.templates`, and what it captured.
"""

from __future__ import annotations

import types
from typing import Any, NoReturn

import torch

from flexmasks import compat
from flexmasks.graphs import Flat, text_of
from flexmasks.spec.definitions import FUNCTIONS, Definition, define, from_pickle
from flexmasks.spec.structure import Opaque
from flexmasks.spec.templates import captured_of, constants_in, made, noted, read
from flexmasks.spec.values import Mask, Modifier, Score

_MAKE_IT_OUTSIDE = (
    "make a Mask of it outside the compiled function, with flexmasks.get_mask(function), and pass the Mask."
)
_PASS_THEM = (
    "pass them by name, as parameters behind `*` in its signature: attention(..., mask=function, ids=ids); or "
    f"{_MAKE_IT_OUTSIDE}"
)
_PASS_TENSORS = "let it read plain tensors and numbers, and make a Mask of it with flexmasks.get_mask(function)."
_PROBLEM = "problem: "  # begins the name of a template that cannot be made


class Unreadable(ValueError):
    """Error of a mask or score with a function that only torch's tracing can read."""


def encode(mask: Modifier, device: torch.device) -> Flat:
    """Return a mask encoded, in the form in which graphs take it. torch traces this function.

    Raises Unreadable.
    """
    leaves: list[Any] = []
    text = _text_of(mask, device, leaves)
    return Flat(text, tuple(leaves))


def _text_of(mask: Modifier, device: torch.device, leaves: list[Any]) -> str:
    definition = mask.definition
    name, captured = definition.name, "()"
    if not definition.by_library:
        name, values = _name_and_captured(definition)
        captured = text_of(tuple(values), leaves)
    params = ""
    for key, value in mask.params.items():
        parameter = definition.parameters[key]
        if parameter.is_sequence(value) and not isinstance(value[0] if value else None, Modifier):
            value = parameter.tensor(value, device)
        params += f"({key!r}, {_text_of_value(value, device, leaves)}),"
    return f"({definition.by_library}, {name!r}, {captured}, ({params}))"


def _text_of_value(value: Any, device: torch.device, leaves: list[Any]) -> str:
    if isinstance(value, Modifier):
        return f"('inner', {_text_of(value, device, leaves)})"
    if isinstance(value, tuple):
        parts = ""
        for v in value:
            parts += f"{_text_of_value(v, device, leaves)},"
        return f"('tuple', ({parts}))"
    if isinstance(value, int | float) and not isinstance(value, bool) and not compat.is_exporting():
        value = compat.as_constant(value)  # numbers are parts of kernels
    return text_of(("value", value), leaves)


def is_readable(value: Modifier) -> bool:
    """Whether all functions of a mask or score were looked into outside of the compiled function."""
    return all(m.definition.by_library or isinstance(m.definition.captured, tuple) for m in value.inside())


def _name_and_captured(definition: Definition) -> tuple[str, list[Any]]:
    """Return the name of the template of a user's functions, and what they captured."""
    function, known = definition.function, definition.captured
    what, captured = f"the {definition.kind} function {definition.name!r}", []
    if isinstance(known, str):
        _fail(f"{what} reads {known}, which torch.compile cannot follow; {_PASS_TENSORS}")
    if known is None and not isinstance(function, types.FunctionType):
        _fail(f"{what} is a {type(function).__name__}; {_MAKE_IT_OUTSIDE}")
    if known is not None:
        constants = constants_in(known.functions, known.constants)
        name = f"{_noted(known.ways, known.text, constants, *known.functions)}"
        captured = read(known.functions, known.leaves)
    elif function.__code__.co_freevars:  # not a Mask made outside
        _fail(f"{what} captures variables; {_PASS_THEM}")
    else:
        name = f"{_noted_alone(function)}"
    if name.startswith(_PROBLEM):
        _fail(f"{what} reads {name.removeprefix(_PROBLEM)}; {_MAKE_IT_OUTSIDE}")
    return name, captured


@compat.constant_in_graphs
def _noted(ways: str, text: str, constants: list[Any], *functions: Any) -> str:
    # The name of the template of functions. torch traces anew where one of these arguments has changed.
    captured = captured_of(*functions)
    if isinstance(captured, str) or captured.ways != ways:
        return f"{_PROBLEM}variables that hold another kind of value than when the Mask was made"
    try:
        return noted(*functions)
    except Opaque as problem:
        return f"{_PROBLEM}{problem}"


@compat.constant_in_graphs
def _noted_alone(function: Any) -> str:
    # The name of the template of a function that captures nothing.
    captured = captured_of(function)
    if isinstance(captured, str) or captured.leaves or captured.constants:
        return (
            f"{_PROBLEM}{captured if isinstance(captured, str) else 'tensors, numbers or strings among its variables'}"
        )
    return noted(function, *[None] * (len(FUNCTIONS) - 1))


def decode(kind: str, encoded: Any) -> Modifier:
    """Return the mask or score of the tuples that functions of `in_graph` get in place of `encode`'s result."""
    own, name, captured, params = encoded
    if own:
        definition = from_pickle(kind, name)
    else:
        definition = define(kind, **dict(zip(FUNCTIONS, made(name, captured), strict=True)))
    cls = Mask if kind == "mask" else Score
    return cls(definition, {key: value_of(kind, value) for key, value in params})


def value_of(kind: str, encoded: Any) -> Any:
    if encoded[0] == "inner":
        return decode(kind, encoded[1])
    if encoded[0] == "tuple":
        return tuple(value_of(kind, v) for v in encoded[1])
    return encoded[1]


def _fail(message: str) -> NoReturn:
    raise Unreadable(f"flexmasks.attention: {message}")
