"""Masks and scores encoded for torch.compile, which can trace them: strings, numbers and tensors in tuples.

A user's function is a name in a table, if it reads nothing but its arguments: ranges are computed behind torch's back,
where a variable that changes would not be seen. Any other function only torch's tracing can read.
"""

from __future__ import annotations

import hashlib
import marshal
import types
from typing import Any, NoReturn

import torch

from flexmasks import compat
from flexmasks.cache import FACT, KINDS, Part
from flexmasks.graphs import Flat, text_of
from flexmasks.spec.code import read_by
from flexmasks.spec.definitions import FUNCTIONS, Definition, define, from_pickle
from flexmasks.spec.values import Mask, Modifier, Score

_READS = "reads"  # begins what stands in place of the name of functions that read other variables
_FUNCTIONS: Part[tuple[Any, ...]] = Part(KINDS, "functions_in_graphs")


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
    name = definition.name if definition.by_library else _name_of(definition)
    params = ""
    for key, value in mask.params.items():
        parameter = definition.parameters[key]
        if parameter.is_sequence(value) and not isinstance(value[0] if value else None, Modifier):
            value = parameter.tensor(value, device)
        params += f"({key!r}, {_text_of_value(value, device, leaves)}),"
    return f"({definition.by_library}, {name!r}, ({params}))"


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


def encode_if_readable(value: Modifier | None, device: torch.device) -> Flat | None:
    """Return a mask or score encoded, or None. torch traces this function."""
    try:
        return None if value is None else encode(value, device)
    except Unreadable:
        return None


def _name_of(definition: Definition) -> str:
    """Return the name in the table of a user's functions. Raises Unreadable."""
    for function in definition.functions:
        if function is not None and not isinstance(function, types.FunctionType):
            _fail(definition, f"is a {type(function).__name__}")
        if function is not None and function.__code__.co_freevars:
            _fail(definition, "captures variables")
    name = f"{_named(*definition.functions)}"
    if name.startswith(_READS):
        _fail(definition, name)
    return name


@compat.constant_in_graphs
def _named(*functions: Any) -> str:
    """Put functions into the table and return their name, which is the same in every process, or what they read."""
    reads = next((f"{_READS} {found}" for f in functions if f is not None and (found := read_by(f))), None)
    if reads is not None:
        return reads
    contents = [None if f is None else (marshal.dumps(f.__code__), f.__defaults__, f.__kwdefaults__) for f in functions]
    name = hashlib.sha256(repr(contents).encode()).hexdigest()
    _FUNCTIONS.put(name, (), functions, FACT)
    return name


def decode(kind: str, encoded: Any) -> Modifier:
    """Return the mask or score of the tuples that functions of `in_graph` get in place of `encode`'s result."""
    by_library, name, params = encoded
    if by_library:
        definition = from_pickle(kind, name)
    else:
        functions = _FUNCTIONS.get(name)
        if functions is None:
            raise RuntimeError("flexmasks: a mask's function is missing; it was noted too long ago.")
        definition = define(kind, **dict(zip(FUNCTIONS, functions, strict=True)))
    cls = Mask if kind == "mask" else Score
    return cls(definition, {key: value_of(kind, value) for key, value in params})


def value_of(kind: str, encoded: Any) -> Any:
    if encoded[0] == "inner":
        return decode(kind, encoded[1])
    if encoded[0] == "tuple":
        return tuple(value_of(kind, v) for v in encoded[1])
    return encoded[1]


def _fail(definition: Definition, why: str) -> NoReturn:
    raise Unreadable(
        f"flexmasks.attention: the {definition.kind} function {definition.name!r} {why}: inside torch.compile write it "
        "at the top level of a module, with tensors and numbers as parameters after `*`, and pass these by name, as in "
        f"attention(..., {definition.kind}=function, ids=ids)."
    )
