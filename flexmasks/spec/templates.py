"""Templates: functions without the tensors and numbers that they captured.

Inside a user's torch.compile a mask's function must be called on ranges, which torch cannot trace. So it is called
behind torch's back, by plain Python, and what it captured must reach it as inputs of the user's graph: a graph that
kept the tensors themselves would see old values at its next run.

`reads_of` is asked outside, where a function can be looked into. It returns plain functions that torch can trace, and
that return what the function captured. `noted` puts the rest of the function, its template, into a table and returns
its name there. `made` puts captured values into a template.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import marshal
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flexmasks import compat
from flexmasks.cache import Cache
from flexmasks.spec.captures import Opaque, Readable, capture, global_names, is_library

_TEMPLATES: Cache[Any] = Cache("templates", max_bytes=4096)  # an entry counts one byte
_NUMBERS = (int, float)  # captured numbers are inputs, because torch makes changing numbers symbolic

_READ_NO_NAMES = ("flexmasks.spec.indexing", "flexmasks.spec.parameters")  # modules with help for masks of users
_OF_EVERY_MODULE: tuple[str, ...] = ("__builtins__", "__name__")


class Read(NamedTuple):
    """One captured tensor or number, as a way to it that torch can trace.

    source: a function without arguments that returns captured variables, or None to start from `function` itself.
    steps: what to read one after the other: ("item", key) or ("attribute", name).
    """

    function: Any
    source: Callable[[], tuple[Any, ...]] | None
    steps: tuple[tuple[str, Any], ...]


def reads_of(*functions: Any) -> tuple[Read, ...] | str:
    """Return ways to what functions captured, or why it cannot be read.

    The ways lead to all captured tensors and numbers.
    """
    try:
        tensors: list[Tensor] = []
        capture(functions, tensors)
        reads: list[Read] = []
        walks = [_Walk(lambda value, read: reads.append(read)) for _ in functions]
        for walk, function in zip(walks, functions, strict=True):
            walk.copy(function, Read(function, None, ()))
    except Opaque as reason:
        return str(reason)
    return tuple(reads)


def read(reads: Sequence[Read]) -> list[Any]:
    """Return the captured values. torch can trace this function."""
    values = []
    for function, source, steps in reads:
        value = function if source is None else source()
        for kind, name in steps:
            value = value[name] if kind == "item" else getattr(value, name)
        values.append(value)
    return values


def noted(*functions: Any) -> str:
    """Note the template of functions in the table, and return its name there.

    Equal names stand for equal templates, in every process. What functions of this library return may follow from what
    users have registered, so templates that call them get other names each time, except in exported programs.
    """
    holes = itertools.count()
    template = tuple(_Walk(lambda value, _: _Hole(next(holes))).copy(f, Read(f, None, ())) for f in functions)
    tensors: list[Tensor] = []
    key = capture(template, tensors)
    name = hashlib.sha256(_content(key).encode()).hexdigest()
    if _may_read_registry(key) and not compat.is_exporting():
        name += uuid.uuid4().hex
    _TEMPLATES.put(name, (), template, 1)
    return name


def made(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the functions of a template, with captured values in their places."""
    template = _TEMPLATES.get(name)
    if template is None:
        raise RuntimeError("flexmasks: a mask's function is missing; it was noted too long ago.")
    walk = _Walk(lambda hole, _: values[hole.number])
    return tuple(walk.copy(function, Read(function, None, ())) for function in template)


class _Hole(Readable):
    """The place of a captured value in a template."""

    def __init__(self, number: int) -> None:
        self.number = number

    def read(self, reader: Any) -> Any:
        return "hole", self.number


class _Walk:
    """One walk through functions, which copies them with other captured values.

    leaf: called with each tensor, number or hole, and with the Read that leads there; it returns the replacement.
    """

    def __init__(self, leaf: Callable[[Any, Read], Any]) -> None:
        self._leaf = leaf
        # Copies of functions by the id of the original. The original is held, so that no other object gets its id.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def copy(self, value: Any, way: Read) -> Any:
        """Return a copy of a value, or the value itself if it holds no leaf.

        way: the Read that leads to the value.
        """
        kind = type(value)
        if isinstance(value, Tensor) or kind in _NUMBERS or kind is _Hole:
            return self._leaf(value, way)
        if kind is tuple or kind is list:
            parts = [self.copy(v, _then(way, "item", n)) for n, v in enumerate(value)]
            return value if _same(parts, value) else kind(parts)
        if kind is dict:
            entries = {k: self.copy(v, _then(way, "item", k)) for k, v in value.items()}
            return value if _same(entries.values(), value.values()) else entries
        if kind is types.FunctionType:
            return self._function(value)
        if kind is functools.partial:
            return self._partial(value, way)
        if isinstance(value, Readable):
            raise Opaque("a Mask or Score inside a function; combine masks with `&`, `|` and `~` instead")
        return value

    def _partial(self, value: functools.partial[Any], way: Read) -> Any:
        function = self.copy(value.func, Read(value.func, None, ()))
        args = self.copy(value.args, _then(way, "attribute", "args"))
        keywords = self.copy(value.keywords, _then(way, "attribute", "keywords"))
        is_same = function is value.func and args is value.args and keywords is value.keywords
        return value if is_same else functools.partial(function, *args, **keywords)

    def _function(self, function: types.FunctionType) -> Any:
        if id(function) in self._copies:
            return self._copies[id(function)][1]
        in_library = is_library(function.__globals__.get("__name__"))
        if in_library and function.__closure__ is None:
            return function
        code, variables = function.__code__, function.__globals__
        cells = tuple(types.CellType() for _ in code.co_freevars)
        names = [n for n, _ in _set_variables(function)]
        globals_read = [] if in_library else [n for n in global_names(code)[0] if n in variables]
        # Only the global variables that the function reads: a template must not keep a module's tensors alive.
        globals_of_copy = variables if in_library else {n: variables[n] for n in _OF_EVERY_MODULE if n in variables}
        copied = types.FunctionType(code, globals_of_copy, function.__name__, None, cells)
        self._copies[id(function)] = function, copied  # known before its variables are copied, which may hold it
        reader = _reader(function, tuple(names), tuple(globals_read))
        changes = False
        for place, (name, value) in enumerate([*_set_variables(function), *((n, variables[n]) for n in globals_read)]):
            part = self.copy(value, Read(function, reader, (("item", place),)))
            changes = changes or part is not value
            if place < len(names):
                cells[code.co_freevars.index(name)].cell_contents = part
            else:
                globals_of_copy[name] = part
        defaults = self.copy(function.__defaults__ or (), Read(function, None, (("attribute", "__defaults__"),)))
        keywords = self.copy(function.__kwdefaults__ or {}, Read(function, None, (("attribute", "__kwdefaults__"),)))
        copied.__defaults__, copied.__kwdefaults__ = defaults or None, keywords or None
        copied.__annotations__ = function.__annotations__
        if not changes and _same(defaults, function.__defaults__ or ()) and keywords == (function.__kwdefaults__ or {}):
            self._copies[id(function)] = function, function
            return function
        return copied


def _then(way: Read, kind: str, name: Any) -> Read:
    return way._replace(steps=(*way.steps, (kind, name)))


def _same(parts: Any, originals: Any) -> bool:
    return all(a is b for a, b in zip(parts, originals, strict=True))


def _set_variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a function's closure that have values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def _reader(
    function: types.FunctionType, names: tuple[str, ...], globals_read: tuple[str, ...]
) -> Callable[[], tuple[Any, ...]]:
    """Return a function that returns variables of another function: of its closure, then global ones."""
    code = _reader_code(names, globals_read)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[n] for n in code.co_freevars)
    return types.FunctionType(code, function.__globals__, code.co_name, None, closure)


@functools.lru_cache(maxsize=1024)
def _reader_code(names: tuple[str, ...], globals_read: tuple[str, ...]) -> types.CodeType:
    """Return the code of a reader.

    It is the same object for the same names: torch recompiles for another code object.
    """
    result = "".join(f"{n}, " for n in names + globals_read)
    source = f"def outer({', '.join(names)}):\n    def captured():\n        return ({result})\n    return captured"
    space: dict[str, Any] = {}
    exec(source, space)
    code: types.CodeType = space["outer"](*[None] * len(names)).__code__
    return code


def _may_read_registry(key: Any) -> bool:
    """Return whether a key holds code of this library that may look up names."""
    if isinstance(key, tuple):
        return any(map(_may_read_registry, key))
    name = key.__name__ if isinstance(key, types.ModuleType) else getattr(key, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == "flexmasks" and name not in _READ_NO_NAMES


def _content(key: Any) -> str:
    """Return a key as text that is equal in every process."""
    if isinstance(key, tuple):
        return f"({', '.join(map(_content, key))})"
    if isinstance(key, types.CodeType):
        return marshal.dumps(key).hex()
    if isinstance(key, types.FunctionType | type):
        return f"{key.__module__}.{key.__qualname__}"
    return getattr(key, "__name__", repr(key))
