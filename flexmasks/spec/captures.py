"""What a user's function reads besides its arguments: the tensors, and a key of everything else.

Block masks and kernels of a plain function are found again by the function's code and by what it captured
(closure, defaults, globals, its own attributes), never by the function object: a lambda written inside a training
step is a new object each time and must still hit. What cannot be read with certainty (an object's attributes, a
class, an import inside the function) makes the function opaque: nothing that depends on it is cached, which is
slower and never wrong.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CONSTANTS = frozenset(
    (type(None), bool, int, str, bytes, type(Ellipsis), torch.dtype, torch.device, torch.Size, torch.layout)
)
_LIBRARIES = {"torch", "math", "numpy", "operator", "functools", "builtins", "_operator", "_functools", "flexmasks"}
_ANYTHING = {"globals", "locals", "vars", "eval", "exec", "open", "__import__", "__globals__", "__builtins__"}


class Opaque(Exception):
    """The function reads something whose value cannot be known to be unchanged."""


def capture(value: Any, tensors: list[Tensor]) -> Hashable:
    """A key of a function and all that it reads, or of any other value; tensors met are appended to `tensors`.

    Raises Opaque where some captured object cannot be read; `tensors` has what was found all the same.
    """
    reader = Reader(tensors)
    return reader.finish(reader.key(value))


def capture_plainly(function: types.FunctionType, tensors: list[Tensor]) -> Hashable | None:
    """`capture` in a third of its time, for functions that read constants, plain tensors and libraries; else None."""
    names, unsure = _names_read(function.__code__)
    if unsure or function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        return None
    key: list[Hashable] = [function.__code__]
    found = [("", _cell(c)) for c in function.__closure__ or ()]
    variables = function.__globals__
    for name, value in found + [(n, variables[n]) for n in names if n in variables]:
        kind: Any = type(value)
        if kind in _CONSTANTS:
            key += [name, kind, value]
        elif kind is float or kind is range:
            key += [name, repr(value)]
        elif kind is Tensor and not vars(value):
            tensors.append(value)
            key += [name, value.dtype, value.ndim]
        elif kind is types.ModuleType and _is_library(value.__name__):
            key += [name, value]
        else:
            return None
    return tuple(key)


class Aliases:
    """Values with aliases of their tensors in place of these, so that they may be kept beyond the tensors' own life.

    An alias shares the memory. One tensor has one alias here, in whatever values it occurs.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # by id, with what it is of, which keeps the id its own

    def of(self, value: Any) -> Any:
        """The value; raises Opaque for what cannot be made anew, or needs a gradient."""
        kind = type(value)
        plain = kind in _CONSTANTS or kind in (float, complex, range)
        if plain or isinstance(value, (np.generic, types.ModuleType, type)):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, None
            self._made[id(value)] = value, self._make(value, kind)
        return self._made[id(value)][1]

    def _make(self, value: Any, kind: type) -> Any:
        if kind is Tensor and not value.requires_grad and not vars(value):
            return value.detach()
        if isinstance(value, Readable):
            return value.aliased(self)
        if kind in (tuple, list):
            return kind(map(self.of, value))
        if kind is dict:
            return {k: self.of(v) for k, v in value.items()}
        if kind is types.FunctionType:
            return self._function(value)
        if kind is functools.partial:
            made = functools.partial(self.of(value.func), *map(self.of, value.args))
            made.keywords.update({k: self.of(v) for k, v in value.keywords.items()})
            return made
        if kind is types.BuiltinFunctionType and value.__self__ is None:
            return value
        raise Opaque(f"an object of type {kind.__name__}")

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__):
            return function
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        code, name = function.__code__, function.__name__
        made = types.FunctionType(code, function.__globals__, name, self.of(function.__defaults__), cells)
        self._made[id(function)] = function, made  # which its own closure may hold
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not yet assigned
                cell.cell_contents = self.of(old.cell_contents)
        made.__kwdefaults__ = self.of(function.__kwdefaults__)
        made.__dict__.update(self.of(function.__dict__))
        return made


class Readable:
    """What tells its own key: Mask and Score."""

    def aliased(self, aliases: Aliases) -> Any:
        """The same, made of `aliases.of(...)` of the parts."""
        raise NotImplementedError

    def read(self, reader: Reader) -> Hashable:
        """The key, made of `reader.key(...)` of the parts."""
        raise NotImplementedError


class Reader:
    """One walk through a value: `key` of each part, then `finish`."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._opaque: str | None = None
        # Objects met, by id: held until the walk ends, for an id may be given anew once its object is gone.
        self._seen: dict[int, tuple[int, Any]] = {}

    def finish(self, key: Hashable) -> Hashable:
        """The key of the whole, or Opaque raised where some part could not be read."""
        if self._opaque is not None:
            raise Opaque(self._opaque)
        return key

    def key(self, value: Any) -> Hashable:
        """A key of one value: equal keys and equal tensors mean that functions behave equally."""
        kind = type(value)
        if kind in _CONSTANTS:
            return kind, value
        if kind is float or kind is complex or kind is range:
            return kind, repr(value)  # 0.0 and -0.0 are equal and differ, as do range(0, 3, 2) and range(0, 4, 2)
        if id(value) in self._seen:  # a function that refers to itself, say
            return "seen", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        if kind is types.FunctionType:
            return self._function(value)
        if kind is dict:
            return kind, *[(self.key(k), self.key(v)) for k, v in value.items()]
        if kind is tuple or kind is list:
            if value and type(value[0]) is int and set(map(type, value)) == {int}:
                return kind, int, tuple(value)
            return kind, *map(self.key, value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Readable):
            return value.read(self)
        if kind is types.MethodType:
            return kind, self.key(value.__func__), self.key(value.__self__)
        if kind is functools.partial:
            return kind, *map(self.key, (value.func, value.args, value.keywords, value.__dict__))
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if isinstance(value, (types.ModuleType, type)):
            known = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
            return value if _is_library(known) else self._refuse(f"{value!r}, whose variables may change", value)
        if kind in (types.MethodDescriptorType, types.WrapperDescriptorType):  # torch.Tensor.add
            return kind, value.__name__, self.key(value.__objclass__)
        if kind in (types.BuiltinFunctionType, types.MethodWrapperType):  # math.exp, tensor.__getitem__
            if value.__self__ is None:
                return value if _is_library(value.__module__) else self._refuse(f"{value!r}", value)
            return kind, value.__name__, self.key(value.__self__)
        return self._refuse(f"an object of type {kind.__name__}", value)

    def _tensor(self, value: Tensor) -> Hashable:
        self._tensors.append(value)
        if type(value) not in (Tensor, torch.nn.Parameter):
            return self._refuse(f"a tensor of type {type(value).__name__}")
        attributes = {n: a for n, a in vars(value).items() if not n.startswith("_dynamo")}  # torch.compile's own
        return Tensor, value.dtype, value.ndim, self.key(attributes) if attributes else None

    def _function(self, function: types.FunctionType) -> Hashable:
        library = _is_library(function.__globals__.get("__name__"))
        if library and function.__closure__ is None:
            return function
        parts = [self.key(_cell(c)) for c in function.__closure__ or ()]
        for more in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            parts.append(self.key(more) if more else None)
        if not library:
            names, unsure = _names_read(function.__code__)
            if unsure:
                self._refuse(unsure.format(repr(function.__name__)))
            variables = function.__globals__
            parts += [(n, self.key(variables[n])) for n in names if n in variables]
        return function.__code__, *parts

    def _refuse(self, what: str, value: Any = None) -> Hashable:
        """Note that something cannot be read; its tensors are looked for all the same: one may need a gradient."""
        self._opaque = self._opaque or what
        attributes = getattr(value, "__dict__", None)
        if not isinstance(value, (types.ModuleType, type)) and isinstance(attributes, dict):
            inner = [a for v in attributes.values() if type(v) is dict for a in v.values()]  # nn.Module keeps them so
            self._tensors += [a for a in (*attributes.values(), *inner) if isinstance(a, Tensor)]
        return None


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


@functools.lru_cache(maxsize=1024)
def _names_read(code: types.CodeType) -> tuple[tuple[str, ...], str]:
    """The global names that code and the functions inside it read, and why it may read more than these, or ""."""
    names, imports = _names_and_imports(code)
    if not all(map(_is_library, imports)):
        return tuple(sorted(names)), "an import inside {}"
    return tuple(sorted(names)), "" if _ANYTHING.isdisjoint(names) else "a call in {} that may read anything"


def _names_and_imports(code: types.CodeType) -> tuple[set[str], set[str]]:
    names, imports = _ANYTHING.intersection(code.co_names), set[str]()  # also as attributes
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            imports.add(instruction.argval)
        elif "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
            names.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            more = _names_and_imports(constant)
            names.update(more[0])
            imports.update(more[1])
    return names, imports


def _is_library(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES
