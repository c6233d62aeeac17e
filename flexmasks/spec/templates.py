"""Templates: functions without the tensors and numbers that they captured.

Inside a user's torch.compile a mask's function must be called on ranges, which torch cannot trace. So it is called
behind torch's back, by plain Python, and what it captured must reach it as inputs of the user's graph: a graph that
kept the tensors themselves would see old values at its next run.

`captured_of` is asked outside, where a function can be looked into. It returns the functions and the ways to what they
captured, which `read` goes inside the graph. `noted` puts the function's structure into a table and returns its name
there. `made` fills it with captured values.
"""

from __future__ import annotations

import hashlib
import marshal
import types
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from flexmasks import compat
from flexmasks.cache import FACT, KINDS, Part
from flexmasks.spec.structure import CONSTANTS, Readable, Structure, Walk, Way, flatten

# Each structure with the number of its tensors.
_TEMPLATES: Part[tuple[Structure, int]] = Part(KINDS, "templates")
_READ_NO_NAMES = ("flexmasks.spec.indexing", "flexmasks.spec.parameters")  # modules with help for masks of users


class Captured(NamedTuple):
    """Functions, with ways to what they captured.

    leaves: to all tensors, then to all numbers.
    constants: to strings, other functions and the like, which choose what a function computes: torch compiles anew for
        others.
    ways: the ways to leaves as a text.
    text: is equal for functions that differ in tensors and numbers only, for which torch compiles once.
    """

    functions: tuple[Any, ...]
    leaves: tuple[Way, ...]
    constants: tuple[Way, ...]
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
    tensors, numbers, constants = map(tuple, walk.ways)
    text = hashlib.sha256(_content(structure.key_without_numbers, with_signs=False).encode()).hexdigest()
    return Captured(functions, tensors + numbers, constants, repr(tensors + numbers), text)


def read(functions: tuple[Any, ...], ways: Sequence[Way]) -> list[Any]:
    """Return the values at ways from functions. torch can trace this function."""
    values = []
    for steps in ways:
        value: Any = functions
        for kind, name in steps:
            if kind == "length":
                value = f"{len(value)}"
                continue
            value = value[name] if kind == "item" else getattr(value, name)
        values.append(value)
    return values


def constants_in(functions: tuple[Any, ...], ways: Sequence[Way]) -> list[Any]:
    """Return the captured strings and the like, None for what is none any more. torch can trace this function."""
    return [x if isinstance(x, CONSTANTS) else None for x in read(functions, ways)]


def noted(*functions: Any) -> str:
    """Note the structure of functions in the table, and return its name there.

    Equal names stand for equal structures, in every process. What functions of this library return may follow from what
    users have registered, so functions that call them get other names each time, except in exported programs.
    """
    structure, leaves = flatten(functions, elements=True)
    name = hashlib.sha256(_content(structure.key_without_numbers).encode()).hexdigest()
    if _may_read_registry(structure.key_without_numbers) and not compat.is_exporting():
        name += uuid.uuid4().hex
    _TEMPLATES.put(name, (), (structure, len(leaves.tensors)), FACT)
    return name


def made(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the functions of a noted structure, with captured values in the order of `Captured.leaves`."""
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
