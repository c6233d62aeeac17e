"""Masks and scores as data that torch.compile can trace: a text, then tensors and numbers.

The text says where these belong. A user's function is the name of its template, see `flexmasks.spec.templates`, and
what it captured.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.spec.captures import Opaque
from flexmasks.spec.definitions import FUNCTIONS, Definition, define, from_pickle
from flexmasks.spec.templates import made, noted, read, reads_of
from flexmasks.spec.values import Mask, Modifier, Score

Data = tuple[Any, ...]  # the text, then the tensors and numbers
_MAKE_IT_OUTSIDE = (
    "make a Mask of it outside the compiled function, with flexmasks.get_mask(function), and pass the Mask."
)
_PASS_TENSORS = "let it read plain tensors and numbers, and make a Mask of it with flexmasks.get_mask(function)."
_LEAF = "leaf"
_PROBLEM = "problem: "  # begins the name of a template that cannot be made


def data_of(value: Modifier, device: torch.device) -> Data:
    """Return a mask or score as data. torch traces this function."""
    leaves: list[Any] = []
    return compat.text_of(_described(value, device, leaves)), *leaves


def _described(value: Modifier, device: torch.device, leaves: list[Any]) -> tuple[Any, ...]:
    """Return a mask or score as tuples of constants, and append the rest to `leaves`."""
    definition = value.definition
    name: str = definition.name
    captured: list[Any] = []
    if not definition.own:
        name, captured = _name_and_captured(definition)
    leaves += captured
    params = []
    for key, given in value.params.items():
        parameter = definition.parameters[key]
        if parameter.is_sequence(given) and not isinstance(given[0] if given else None, Modifier):
            given = parameter.tensor(given, device)
        params.append((key, _part(given, device, leaves)))
    return definition.own, name, len(captured), tuple(params)


def _part(value: Any, device: torch.device, leaves: list[Any]) -> tuple[Any, ...]:
    """Return a parameter's value as constants, and append the rest to `leaves`."""
    if isinstance(value, Tensor):
        leaves.append(value)
        return (_LEAF,)
    if isinstance(value, Modifier):
        return "inner", _described(value, device, leaves)
    if isinstance(value, tuple):
        return "tuple", tuple([_part(v, device, leaves) for v in value])
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = compat.as_constant(value)  # numbers are parts of kernels
    if value is None or isinstance(value, bool | int | str):
        return "value", value
    leaves.append(value)  # the text of others, such as infinity and dtypes, cannot be read back
    return (_LEAF,)


def is_readable(value: Modifier) -> bool:
    """Return whether all functions of a mask or score were looked into outside."""
    if not (value.definition.own or isinstance(value.definition.reads, tuple)):
        return False
    for parameter in value.params.values():
        for inner in parameter if isinstance(parameter, tuple) else (parameter,):
            if isinstance(inner, Modifier) and not is_readable(inner):
                return False
    return True


def _name_and_captured(definition: Definition) -> tuple[str, list[Any]]:
    """Return the name of the template of a user's functions, and what they captured."""
    function, reads, what = definition.function, definition.reads, f"the {definition.kind} function {definition.name!r}"
    if isinstance(reads, str):
        _fail(f"{what} reads {reads}, which torch.compile cannot follow; {_PASS_TENSORS}")
    if not isinstance(function, types.FunctionType):
        _fail(f"{what} is a {type(function).__name__}, which torch.compile cannot follow; pass a plain function.")
    if reads is not None:
        name, captured = f"{_noted(*definition.functions)}", read(reads)
    elif function.__code__.co_freevars:  # not a Mask made outside
        _fail(f"{what} captures variables; {_MAKE_IT_OUTSIDE}")
    else:
        name, captured = f"{_noted_alone(function)}", []
    if name.startswith(_PROBLEM):
        _fail(f"{what} reads {name.removeprefix(_PROBLEM)}; {_MAKE_IT_OUTSIDE}")
    return name, captured


@compat.constant_in_graphs
def _noted(*functions: Any) -> str:
    try:
        return noted(*functions)
    except Opaque as problem:
        return f"{_PROBLEM}{problem}"


@compat.constant_in_graphs
def _noted_alone(function: Any) -> str:
    """Return the name of the template of a function that captures nothing."""
    reads = reads_of(function)
    if reads:
        return f"{_PROBLEM}{reads if isinstance(reads, str) else 'tensors or numbers among its variables'}"
    return noted(function, *[None] * (len(FUNCTIONS) - 1))


def _definition_of(kind: str, template: str, captured: Any) -> Definition:
    """Return the definition of a user's functions."""
    function, *hooks = made(template, captured)
    return define(kind, function, **dict(zip(FUNCTIONS[1:], hooks, strict=True)))


def of_data(kind: str, data: Data) -> Modifier:
    """Return the mask or score that `data_of` turned into data."""
    text, *leaves = data
    return _made(kind, compat.value_of_text(text), iter(leaves))


def _made(kind: str, described: Any, leaves: Iterator[Any]) -> Modifier:
    own, name, count, params = described
    captured = [next(leaves) for _ in range(count)]
    definition = from_pickle(kind, name) if own else _definition_of(kind, name, captured)
    cls = Mask if kind == "mask" else Score
    return cls(definition, {key: _value(kind, value, leaves) for key, value in params})


def _value(kind: str, part: Any, leaves: Iterator[Any]) -> Any:
    """Return the parameter's value that `_part` turned into constants."""
    if part[0] == _LEAF:
        return next(leaves)
    if part[0] == "inner":
        return _made(kind, part[1], leaves)
    return tuple(_value(kind, v, leaves) for v in part[1]) if part[0] == "tuple" else part[1]


def _fail(message: str) -> NoReturn:
    raise ValueError(f"flexmasks.attention: {message}")
