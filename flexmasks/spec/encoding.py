"""Masks and scores encoded for torch.compile, which can trace them: strings, numbers and tensors in tuples.

A user's function is a name in a table, if it reads nothing but its arguments: ranges are computed behind torch's back,
where a variable that changes would not be seen. Any other function only torch's tracing can read.
"""

from __future__ import annotations

import hashlib
import inspect
import marshal
import types
from typing import Any, NoReturn

import torch

from flexmasks import compat
from flexmasks.cache import FACT, KINDS, Part
from flexmasks.graphs import Flat, text_of
from flexmasks.spec.code import global_names, read_by, taken_in_graph
from flexmasks.spec.definitions import FUNCTIONS, Definition, define, from_pickle
from flexmasks.spec.numbers import MAX_SYMBOLS_COMPILED_IN, Seen, difference, seen_of
from flexmasks.spec.parameters import Parameter, Size
from flexmasks.spec.values import Mask, Modifier, Score

_READS = "reads"  # begins what stands in place of the name of functions that read other variables
_INDICES = {"mask": 4, "score": 5}  # arguments by position
_FUNCTIONS: Part[tuple[Any, ...]] = Part(KINDS, "functions_in_graphs")


class Unreadable(ValueError):
    """Error of a mask or score with a function that only torch's tracing can read."""


def encode(mask: Modifier, device: torch.device, dtype: torch.dtype = torch.float32) -> Flat:
    """Return a mask encoded, in the form in which graphs take it. torch traces this function.

    dtype: of floats that become tensors.

    Raises Unreadable.
    """
    leaves: list[Any] = []
    text = _text_of(mask, device, dtype, leaves)
    return Flat(text, tuple(leaves))


def _text_of(mask: Modifier, device: torch.device, dtype: torch.dtype, leaves: list[Any]) -> str:
    definition = mask._definition
    name = definition.name if definition.by_library else _name_of(definition)
    params = ""
    for key, value in mask.params.items():
        parameter = definition.parameters[key]
        if parameter.is_sequence(value) and not isinstance(value[0] if value else None, Modifier):
            value = parameter.tensor(value, device)
        elif _is_number(value) and not compat.is_exporting() and _may_be_input(definition, key):
            value = _constant_or_input(
                value, (name, key), device, _dtype_of(value, parameter, dtype), not parameter.takes_tensor(0)
            )
        params += f"({key!r}, {_text_of_value(value, device, dtype, leaves)}),"
    return f"({definition.by_library}, {name!r}, ({params}))"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _may_be_input(definition: Definition, key: str) -> bool:
    """Return whether a number of a graph may become a tensor: its parameter says so, or a score's function takes it."""
    parameter = definition.parameters[key]
    is_plain = definition.kind == "score" and definition.prepare is None and parameter.is_plain_number
    return parameter.takes_tensor(0) or (not definition.by_library and is_plain)


def _constant_or_input(
    value: Any, place: tuple[str, str], device: torch.device, dtype: torch.dtype, must_be_tried: bool
) -> Any:
    """Return a number that torch knows as it is; any other as a constant of the graph, or as a tensor.

    must_be_tried: the function takes a tensor only if `note_constants` has seen that it can.

    Only a product with a tensor reaches kernels as an input. A float that was once made a constant stays one in all
    later graphs of its code (seen with torch 2.13).
    """
    if compat.has_static_value(value):
        return value
    if _is_compiled_in(place, 0 if isinstance(value, float) else MAX_SYMBOLS_COMPILED_IN, must_be_tried):
        value = compat.as_constant(value)
        _note(place, value)
        return value
    return torch.ones((), dtype=dtype, device=device) * value


def _dtype_of(value: float, parameter: Parameter, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in a number's place, given that of floats."""
    return dtype if isinstance(value, float) or parameter.spec.startswith("float") else torch.int64


@compat.constant_in_graphs
def _is_compiled_in(place: tuple[str, str], most: int, must_be_tried: bool) -> bool:
    seen, compilation = seen_in_graphs(*place), compat.compilation()
    if not seen.decided or seen.decided[0] is not compilation:  # which may trace code twice, and then the same way
        is_constant = bool(seen.why_constant) or (must_be_tried and not seen.checked)
        seen.decided = compilation, is_constant or len(seen.compiled) < most
        if seen.why_constant:
            seen.warn("score", [place[1]])
    return bool(seen.decided[1])


@compat.constant_in_graphs
def _note(place: tuple[str, str], value: float) -> None:
    seen_in_graphs(*place).note(value)


def seen_in_graphs(name: str, key: str) -> Seen:
    """Return what is known of the numbers that were a parameter inside torch.compile."""
    return seen_of(("in graphs", name, key))


def note_constants(score: Modifier, size: Size) -> None:
    """Note which numbers of users' score changes cannot be tensors. The tensors among the parameters have values."""
    for inner in score._inside():
        definition, params = inner._definition, inner.params
        numbers = {n: x for n, x in params.items() if _is_number(x) and _may_be_input(definition, n)}
        if not numbers or definition.by_library:
            continue
        function = inner._bind(inner._resolve(size))
        name = _named(*definition.functions)
        for n, x in numbers.items():
            tensor = torch.full((), x, dtype=_dtype_of(x, definition.parameters[n], size.dtype), device=size.device)
            other = Score(definition, {**params, n: tensor})
            sizes = size.batch, size.heads, size.q_len, size.kv_len
            made = other._bind(other._resolve(size))
            seen = seen_in_graphs(name, n)
            seen.why_constant = seen.why_constant or difference(function, made, size.device, sizes)
            seen.checked.add(n)


def _text_of_value(value: Any, device: torch.device, dtype: torch.dtype, leaves: list[Any]) -> str:
    if isinstance(value, Modifier):
        return f"('inner', {_text_of(value, device, dtype, leaves)})"
    if isinstance(value, tuple):
        parts = ""
        for v in value:
            parts += f"{_text_of_value(v, device, dtype, leaves)},"
        return f"('tuple', ({parts}))"
    if _is_number(value) and not compat.is_exporting():
        value = compat.as_constant(value)  # numbers are parts of kernels
    return text_of(("value", value), leaves)


def encode_if_readable(value: Modifier | None, device: torch.device, dtype: torch.dtype = torch.float32) -> Flat | None:
    """Return a mask or score encoded, or None. torch traces this function."""
    try:
        return None if value is None else encode(value, device, dtype)
    except Unreadable:
        return None


def _name_of(definition: Definition) -> str:
    """Return the name in the table of a user's functions. Raises Unreadable."""
    for function in definition.functions:
        if function is not None and not isinstance(function, types.FunctionType):
            _fail(definition, f"is a {type(function).__name__}")
        if function is not None and function.__code__.co_freevars:
            _fail(definition, "captures variables")
    if torch.compiler.is_dynamo_compiling() and definition.function.__code__.co_flags & inspect.CO_NESTED:
        taken = taken_in_graph(definition.function)
        if taken is None or taken.may_have_defaults or len(taken.positional) > _INDICES[definition.kind]:
            # torch cannot take these as constants if they are tensors
            _fail(definition, "is made inside, and its parameters may have defaults")
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
    name = hashlib.sha256(repr([f and _content(f) for f in functions]).encode()).hexdigest()
    _FUNCTIONS.put(name, (), functions, FACT)
    return name


def _content(function: types.FunctionType) -> tuple[Any, ...]:
    """Return what decides what a function does: code, defaults, and the modules that it reads, see `read_by`."""
    names, _ = global_names(function.__code__)
    modules = [getattr(function.__globals__.get(name), "__name__", None) for name in names]
    return marshal.dumps(function.__code__), function.__defaults__, function.__kwdefaults__, modules


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
    return cls(definition, {key: _decoded(kind, value) for key, value in params})


def _decoded(kind: str, encoded: Any) -> Any:
    if encoded[0] == "inner":
        return decode(kind, encoded[1])
    if encoded[0] == "tuple":
        return tuple(_decoded(kind, v) for v in encoded[1])
    return encoded[1]


def _fail(definition: Definition, why: str) -> NoReturn:
    raise Unreadable(
        f"flexmasks.attention: the {definition.kind} function {definition.name!r} {why}: inside torch.compile write it "
        "at the top level of a module, with tensors and numbers as parameters after `*`, and pass these by name, as in "
        f"attention(..., {definition.kind}=function, ids=ids)."
    )
