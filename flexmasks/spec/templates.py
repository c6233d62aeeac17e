"""Templates: functions without the tensors and numbers that they captured.

Inside a user's torch.compile a mask's function must be called on ranges, which torch cannot trace. So it is called
behind torch's back, by plain Python, and what it captured must reach it as inputs of the user's graph: a graph that
kept the tensors themselves would see old values at its next run.

`captured_of` is asked outside, where a function can be looked into. It returns plain functions that torch can trace,
and that return what the function captured. `noted` puts the function's structure into a table and returns its name
there. `made` fills it with captured values.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import types
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flexmasks import compat
from flexmasks.cache import FACT, KINDS, Part
from flexmasks.spec.structure import CONSTANTS, Place, Readable, Structure, Walk, flatten

# Each structure with the number of its tensors. An entry counts one byte.
_TEMPLATES: Part[tuple[Structure, int]] = Part(KINDS, "templates")
_READ_NO_NAMES = ("flexmasks.spec.indexing", "flexmasks.spec.parameters")  # modules with help for masks of users


class Read(NamedTuple):
    """One captured tensor or number, as a way to it that torch can trace.

    source: a function without arguments that returns a captured variable, or None to start from `function` itself.
    steps: what to read one after the other: ("item", key) or ("attribute", name).
    """

    function: Any
    source: Callable[[], Any] | None
    steps: tuple[tuple[str, Any], ...]


class Captured(NamedTuple):
    """Functions, with ways to what they captured.

    reads: of all tensors, then of all numbers.
    constants: of strings and the like, which choose what a function computes: torch compiles anew for others.
    ways: a text that is equal for equal reads in the same functions.
    text: a text that is equal for functions that differ in tensors and numbers only, for which torch compiles once.
    """

    functions: tuple[Any, ...]
    reads: tuple[Read, ...]
    constants: tuple[Read, ...]
    ways: str
    text: str


def captured_of(*functions: Any) -> Captured | str:
    """Return what functions captured, or why they cannot be read."""
    walk = Walk(elements=True)
    structure = walk.structure(functions)
    if structure.unreadable:
        return structure.unreadable
    if any(isinstance(value, Readable) for _, value, *_ in walk.seen.values()):
        return "a Mask or Score inside a function; combine masks with `&`, `|` and `~` instead"
    places = [*walk.leaves.places, *(number.place for number in walk.leaves.numbers)]
    reads, constants = (
        tuple([_way(walk, place, id(functions)) for place in found if place is not None])
        for found in (places, walk.leaves.constants)
    )
    ways = repr([(r.source and r.source.__code__.co_names + r.source.__code__.co_freevars, r.steps) for r in reads])
    text = hashlib.sha256(_content(structure.kind, with_signs=False).encode()).hexdigest()
    return Captured(functions, reads, constants, ways, text)


def _way(walk: Walk, place: Place, root: int) -> Read:
    """Return the way to a place, from the innermost function that holds it, or from what the root holds."""
    steps: list[tuple[str, Any]] = []
    while True:
        _, holder, above = walk.seen[place.holder]
        if isinstance(holder, types.FunctionType):
            return _way_in(holder, place, steps)
        if place.kind == "argument":
            steps[:0] = ("attribute", "args"), ("item", place.key)
        else:
            steps.insert(0, (place.kind, place.key))
        if above is None or above[0] == root:
            return Read(holder, None, tuple(steps))
        place = Place(*above)


def _way_in(function: types.FunctionType, place: Place, steps: list[tuple[str, Any]]) -> Read:
    """Return the way to a place in a function, and the steps from there."""
    code = function.__code__
    if place.kind == "attribute":
        if place.key == "__dict__":  # torch 2.11 does not trace this name
            (_, name), *steps = steps
            return Read(function, None, (("attribute", name), *steps))
        return Read(function, None, ((place.kind, place.key), *steps))
    if place.kind == "default":
        first = code.co_argcount - len(function.__defaults__ or ())
        number = code.co_varnames.index(place.key) - first
        return Read(function, None, (("attribute", "__defaults__"), ("item", number), *steps))
    reader_code = _reader_code(place.key, in_closure=place.kind == "variable")
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple([cells[name] for name in reader_code.co_freevars])
    return Read(function, types.FunctionType(reader_code, function.__globals__, None, None, closure), tuple(steps))


@functools.lru_cache(maxsize=1024)
def _reader_code(name: str, in_closure: bool) -> types.CodeType:
    """Return the code of a function that returns a variable of its closure, or a global one.

    It is the same object for the same variable: torch recompiles for another code object.
    """
    space: dict[str, Any] = {}
    exec(f"def outer({name if in_closure else ''}):\n    return lambda: {name}", space)
    code: types.CodeType = space["outer"](*[None] * in_closure).__code__
    return code


def read(reads: Sequence[Read]) -> list[Any]:
    """Return the captured values. torch can trace this function."""
    values = []
    for function, source, steps in reads:
        value = function if source is None else source()
        for kind, name in steps:
            value = value[name] if kind == "item" else getattr(value, name)
        values.append(value)
    return values


def constants_in(reads: Sequence[Read]) -> list[Any]:
    """Return the captured strings and the like, None for what is none any more. torch can trace this function."""
    return [x if isinstance(x, CONSTANTS) else None for x in read(reads)]


def noted(*functions: Any) -> str:
    """Note the structure of functions in the table, and return its name there.

    Equal names stand for equal structures, in every process. What functions of this library return may follow from what
    users have registered, so functions that call them get other names each time, except in exported programs.
    """
    structure, leaves = flatten(functions, elements=True)
    name = hashlib.sha256(_content(structure.kind).encode()).hexdigest()
    if _may_read_registry(structure.kind) and not compat.is_exporting():
        name += uuid.uuid4().hex
    _TEMPLATES.put(name, (), (structure, len(leaves.tensors)), FACT)
    return name


def made(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the functions of a noted structure, with captured values in the order of `Captured.reads`."""
    noted = _TEMPLATES.get(name)
    if noted is None:
        raise RuntimeError("flexmasks: a mask's function is missing; it was noted too long ago.")
    structure, count = noted
    functions: tuple[Any, ...] = structure.fill(values[:count], values[count:], has_own_globals=True)
    return functions


def _may_read_registry(key: Any) -> bool:
    # Whether a key holds code of this library that may look up names.
    if isinstance(key, tuple):
        return any(map(_may_read_registry, key))
    name = key.__name__ if isinstance(key, types.ModuleType) else getattr(key, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == "flexmasks" and name not in _READ_NO_NAMES


def _content(key: Any, with_signs: bool = True) -> str:
    # Text that is equal in every process.
    if isinstance(key, tuple):
        key = key if with_signs or key[:1] != ("number",) else key[:1]
        return f"({', '.join([_content(part, with_signs) for part in key])})"
    if isinstance(key, types.CodeType):
        return marshal.dumps(key).hex()
    if isinstance(key, types.FunctionType | type):
        return f"{key.__module__}.{key.__qualname__}"
    return getattr(key, "__name__", repr(key))
