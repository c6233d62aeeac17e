"""Captures: what a user's function reads beyond its arguments.

A capture has two results: the tensors, and a key of everything else.

Caches find the block masks and kernels of a plain function by the function's code and by what it captured (closure,
defaults, globals, its own attributes), never by the function object: a lambda inside a training step is a new object
each time, and must still be found. Some captured things cannot be read with certainty: an object's attributes, a
class, an import inside the function. They make the function opaque: nothing that depends on it is cached, which is
slower and never wrong.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import math
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexmasks import compat

# Types whose objects never change and stand for themselves in a key. float is no such type: 0.0 == -0.0.
_CONSTANT_TYPES = frozenset(
    (type(None), bool, int, str, bytes, type(Ellipsis), torch.dtype, torch.device, torch.Size, torch.layout)
)
# Packages whose functions, modules and classes are taken as constants.
_LIBRARIES = {"torch", "math", "numpy", "operator", "functools", "builtins", "_operator", "_functools", "flexmasks"}
# Names by which code can read any variable at all.
_NAMES_OF_ANYTHING = {"globals", "locals", "vars", "eval", "exec", "open", "__import__", "__globals__", "__builtins__"}


class Place(NamedTuple):
    """The place of a value in a function, a dictionary or a functools.partial."""

    holder: int  # its id
    kind: str  # "variable" of a closure, "default", "global variable", "parameter" or "item"
    name: str


class Opaque(Exception):
    """Raised for a function that reads something that may change unnoticed."""


def capture(value: Any, tensors: list[Tensor]) -> Hashable:
    """Return a key of a value, or of a function and what it reads.

    Tensors that are read are appended to `tensors`. Raises Opaque if a captured object cannot be read; `tensors` then
    has the tensors that could be read.
    """
    reader = Reader(tensors)
    return reader.finish(reader.key(value))


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors that a function reads, as far as they show."""
    tensors: list[Tensor] = []
    with contextlib.suppress(Opaque):
        capture(value, tensors)
    return tensors


def capture_plainly(function: types.FunctionType, tensors: list[Tensor]) -> Hashable | None:
    """Return a key of a function that reads only common kinds of values, else None.

    It takes a third of the time of `capture`, which matters because every call of `attention` with a function runs it.
    The common kinds are constants, numbers, plain tensors and modules of libraries. Their four rules are repeated from
    `Reader.key`, for speed: a change of one of them there must be made here too.
    """
    names, uncertainty = global_names(function.__code__)
    if uncertainty or function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        return None
    key: list[Hashable] = [function.__code__]
    in_closure = [("", _cell_contents(c)) for c in function.__closure__ or ()]
    variables = function.__globals__
    for name, value in in_closure + [(n, variables[n]) for n in names if n in variables]:
        kind: Any = type(value)
        if kind in _CONSTANT_TYPES:
            key += [name, kind, value]
        elif kind is float or kind is range:
            key += [name, repr(value)]
        elif kind is Tensor and not vars(value):
            tensors.append(value)
            key += [name, value.dtype, value.ndim]
        elif kind is types.ModuleType and is_library(value.__name__):
            key += [name, value]
        else:
            return None
    return tuple(key)


_MAX_COPIED = 1 << 24  # the most bytes for which an expanded tensor is written out


def in_one_piece(tensor: Tensor) -> Tensor:
    """Return a tensor as compiled kernels take it: contiguous, or expanded from what is contiguous.

    torch's compiler fails for some tensors with gaps, and compiles anew for each layout. Only small tensors are written
    out where they are expanded.
    """
    if tensor.is_contiguous():
        return tensor
    if tensor.nelement() * tensor.element_size() <= _MAX_COPIED:
        return tensor.contiguous()
    part = tensor
    for dim, step in enumerate(tensor.stride()):
        part = part if step else part.narrow(dim, 0, 1)
    return part.contiguous().expand(tensor.shape)


class Aliases:
    """Copies of values with an alias in place of each tensor.

    A cache may keep a copy without keeping the user's tensors.

    An alias is a tensor object of its own that shares the tensor's memory, or has a copy of it if the tensor lies in
    pieces. All copies made by one object have the same alias for the same tensor.

    replacements: pairs of a tensor and the tensor that copies have in its place, instead of an alias.
    """

    def __init__(self, replacements: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        # Copies by the id of the original. The original is kept too, so that no other object gets its id.
        self._copies: dict[int, tuple[Any, Any]] = {id(old): (old, new) for old, new in replacements}
        self.nbytes = 0  # bytes of the tensors that were copied

    def of(self, value: Any) -> Any:
        """Return a copy of a value, or the value itself if it holds no tensors.

        Raises Opaque for a value that cannot be copied, and for a tensor that requires a gradient.
        """
        kind = type(value)
        is_constant = kind in _CONSTANT_TYPES or kind in (float, complex, range)
        if is_constant or isinstance(value, (np.generic, types.ModuleType, type)):
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = value, None
            self._copies[id(value)] = value, self._copy(value, kind)
        return self._copies[id(value)][1]

    def _copy(self, value: Any, kind: type) -> Any:
        if kind is Tensor and not value.requires_grad and not vars(value):
            alias = in_one_piece(value.detach())
            if not value.is_contiguous():
                kept = (n for n, step in zip(alias.shape, alias.stride(), strict=True) if step)
                self.nbytes += math.prod(kept) * alias.element_size()
            return alias
        if isinstance(value, Readable):
            return value.aliased(self)
        if kind in (tuple, list):
            return kind(map(self.of, value))
        if kind is dict:
            return {k: self.of(v) for k, v in value.items()}
        if kind is types.FunctionType:
            return self._function(value)
        if kind is functools.partial:
            copied = functools.partial(self.of(value.func), *map(self.of, value.args))
            copied.keywords.update({k: self.of(v) for k, v in value.keywords.items()})
            return copied
        if kind is types.BuiltinFunctionType and (value.__self__ is None or _is_constant(value.__self__)):
            return value
        raise Opaque(f"an object of type {kind.__name__}")

    def _global_names(self, function: types.FunctionType) -> tuple[str, ...]:
        """Return the names of the globals that a copy of a function has for itself."""
        return ()

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        names, variables = self._global_names(function), function.__globals__
        has_attributes = function.__defaults__ or function.__kwdefaults__ or function.__dict__
        if not (names or function.__closure__ or has_attributes):
            return function
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        code, name = function.__code__, function.__name__
        own: dict[str, Any] = variables
        if names:
            own = {n: variables[n] for n in ("__name__", "__builtins__") if n in variables}
        copied = types.FunctionType(code, own, name, self.of(function.__defaults__), cells)
        self._copies[id(function)] = function, copied  # known before its closure is copied, which may hold it
        own.update((n, self.of(variables[n])) for n in names)
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                cell.cell_contents = self.of(original.cell_contents)
        copied.__kwdefaults__ = self.of(function.__kwdefaults__)
        copied.__dict__.update(self.of(function.__dict__))
        return copied


class InOnePiece(Aliases):
    """Copies of values with contiguous tensors, through which gradients go."""

    def _copy(self, value: Any, kind: type) -> Any:
        return in_one_piece(value) if isinstance(value, Tensor) else super()._copy(value, kind)


class WithoutWrappers(Aliases):
    """Copies of values without torch.func's wrappers around whole numbers.

    Gradients of torch.func wrap each tensor that is made inside. Batches of torch.func.vmap stay wrapped.

    floats: whether other numbers are unwrapped, too, as in masks, through which no gradient goes.
    """

    def __init__(self, floats: bool = False) -> None:
        super().__init__()
        self.has_unwrapped = False
        self._floats = floats

    def _copy(self, value: Any, kind: type) -> Any:
        if not isinstance(value, Tensor):
            return super()._copy(value, kind)
        plain = value
        is_left = not self._floats and (value.is_floating_point() or value.is_complex())
        while compat.is_wrapped(plain):
            if is_left or compat.is_batched(plain):
                return value
            plain = compat.unwrapped(plain)
        self.has_unwrapped = self.has_unwrapped or plain is not value
        return plain


class Frozen(Aliases):
    """Copies of functions that compute later, in a backward pass, what the functions compute now.

    All their variables keep the values that they have now, globals too. Tensors keep their memory, so they may not be
    changed in place meanwhile.

    is_whole: whether nothing was left out, as the attributes of objects are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_whole = True
        self._versions: list[tuple[Tensor, int]] = []

    def check(self) -> None:
        """Raise torch's own error if a tensor was changed in place."""
        for t, expected in self._versions:
            if compat.version(t) != expected:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{t.type()} {list(t.shape)}] is at version {compat.version(t)}; expected version {expected} "
                    "instead. The mask or the score of flexmasks.attention reads this tensor: change a copy of it."
                )

    def of(self, value: Any) -> Any:
        """Return a copy of a value, or the value itself."""
        if isinstance(value, (types.ModuleType, type)) and not _is_constant(value):
            self.is_whole = False
        return super().of(value)

    def _copy(self, value: Any, kind: type) -> Any:
        if isinstance(value, Tensor):
            is_plain = kind is Tensor and not (value.requires_grad or vars(value))
            kept = value.detach() if is_plain else value
            if not kept.is_inference():
                self._versions.append((kept, compat.version(kept)))
            return kept
        try:
            return super()._copy(value, kind)
        except Opaque:
            self.is_whole = False
            return value

    def _global_names(self, function: types.FunctionType) -> tuple[str, ...]:
        if is_library(function.__globals__.get("__name__")):
            return ()
        names, uncertainty = global_names(function.__code__)
        self.is_whole = self.is_whole and not uncertainty
        return () if uncertainty else tuple(n for n in names if n in function.__globals__)


class Refilled:
    """A value that is made again and again, with other tensors.

    It holds none of the tensors that are replaced. Copies are those of `Aliases`, at a fifth of the time.

    replaced: the tensors that are replaced.
    places: places whose values are replaced.

    Raises Opaque for a value that cannot be copied, for a function that refers to itself, and for a place that no copy
    reaches: globals, because torch looks them up in the module of the function.
    """

    def __init__(self, value: Any, replaced: Sequence[Tensor], places: Sequence[Place] = ()) -> None:
        self._tensors = {id(t): n for n, t in enumerate(replaced)}
        self._places = {place: len(replaced) + n for n, place in enumerate(places)}
        self._entered: set[int] = set()
        self._make = self._maker(value)
        if self._places:
            place = next(iter(self._places))
            raise Opaque(f"`{place.name}`, a {place.kind} that no copy of the function can have otherwise")
        self._tensors = {}

    def __call__(self, values: Sequence[Any]) -> Any:
        """Return the value with these tensors, or other values, for the replaced tensors and places."""
        return self._make(values)

    def _maker(self, value: Any) -> Callable[[Sequence[Any]], Any]:
        """Return a function from values to a copy of a value with these values."""
        kind = type(value)
        if id(value) in self._tensors:
            return operator.itemgetter(self._tensors[id(value)])
        if kind not in (tuple, list, dict, types.FunctionType, functools.partial):
            kept = Aliases().of(value)
            return lambda values: kept
        if id(value) in self._entered:
            raise Opaque("a function that refers to itself")
        self._entered.add(id(value))
        try:
            return self._maker_of_parts(value, kind)
        finally:
            self._entered.discard(id(value))

    def _maker_in(self, place: Place, value: Any) -> Callable[[Sequence[Any]], Any]:
        n = self._places.pop(place, None)
        return self._maker(value) if n is None else operator.itemgetter(n)

    def _maker_of_parts(self, value: Any, kind: type) -> Callable[[Sequence[Any]], Any]:
        if kind is dict:
            parts = {n: self._maker_in(Place(id(value), "item", str(n)), v) for n, v in value.items()}
            return lambda values: {n: make(values) for n, make in parts.items()}
        if kind is not types.FunctionType and kind is not functools.partial:
            makers = [self._maker(v) for v in value]
            return lambda values: kind([make(values) for make in makers])
        if kind is functools.partial:
            function, keywords = self._maker(value.func), self._maker(value.keywords)
            args = [self._maker_in(Place(id(value), "item", f"argument {n}"), v) for n, v in enumerate(value.args)]
            return lambda values: functools.partial(
                function(values), *[make(values) for make in args], **keywords(values)
            )
        return self._maker_of_function(value)

    def _maker_of_function(self, value: types.FunctionType) -> Callable[[Sequence[Any]], Any]:
        if not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__):
            return lambda values: value
        code, variables, name = value.__code__, value.__globals__, value.__name__
        cells, defaults = ([self._maker_in(*p) for p in parts] for parts in (_variables(value), _defaults(value)))
        others = [self._maker(v) for v in (value.__kwdefaults__, value.__dict__)]

        def make(values: Sequence[Any]) -> types.FunctionType:
            keyword_defaults, attributes = (m(values) for m in others)
            closure = tuple([types.CellType(cell(values)) for cell in cells])
            made = types.FunctionType(code, variables, name, tuple([d(values) for d in defaults]) or None, closure)
            if keyword_defaults:
                made.__kwdefaults__ = keyword_defaults
            if attributes:
                made.__dict__.update(attributes)
            return made

        return make


class Readable:
    """Base of classes whose objects know how to be read and copied: Mask and Score."""

    def aliased(self, aliases: Aliases) -> Any:
        """Return a copy of the object, made of `aliases.of(...)` of its parts."""
        raise NotImplementedError

    def read(self, reader: Reader) -> Hashable:
        """Return the key of the object, made of `reader.key(...)` of its parts."""
        raise NotImplementedError


class Reader:
    """One walk through a value: `key` of each part, then `finish`."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._unreadable: str | None = None  # the first part that could not be read, in words
        # Numbers of the objects read, by id. The objects are held during the walk: an id is free once its object dies.
        self._seen: dict[int, tuple[int, Any]] = {}

    def finish(self, key: Hashable) -> Hashable:
        """Return the key of the whole value.

        Raises Opaque if some part could not be read.
        """
        if self._unreadable is not None:
            raise Opaque(self._unreadable)
        return key

    def key(self, value: Any) -> Hashable:
        """Return a key of one value.

        Functions with equal keys and equal tensors do the same computation.

        `capture_plainly` repeats the rules for constants, numbers, plain tensors and modules.
        """
        kind = type(value)
        if kind in _CONSTANT_TYPES:
            return kind, value
        if kind is float or kind is complex or kind is range:
            # repr, since 0.0 == -0.0 and range(0, 3, 2) == range(0, 4, 2), although they act differently
            return kind, repr(value)
        if id(value) in self._seen:  # such as a function that refers to itself
            return "seen", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        if kind is types.FunctionType:
            return self._function(value)
        if kind is dict:
            return kind, *[(self.key(k), self.slot(Place(id(value), "item", str(k)), v)) for k, v in value.items()]
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
            places = [Place(id(value), "item", f"argument {n}") for n in range(len(value.args))]
            parts = [self.key(x) for x in (value.func, value.keywords, value.__dict__)]
            return "partial", *parts, *map(self.slot, places, value.args)
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if isinstance(value, (types.ModuleType, type)):
            return value if _is_constant(value) else self._refuse(f"{value!r}, whose variables may change", value)
        if kind in (types.MethodDescriptorType, types.WrapperDescriptorType):  # torch.Tensor.add
            return kind, value.__name__, self.key(value.__objclass__)
        if kind in (types.BuiltinFunctionType, types.MethodWrapperType):  # math.exp, tensor.__getitem__
            if value.__self__ is None:
                return value if is_library(value.__module__) else self._refuse(f"{value!r}", value)
            return kind, value.__name__, self.key(value.__self__)
        return self._refuse(f"an object of type {kind.__name__}", value)

    def slot(self, place: Place, value: Any) -> Hashable:
        """Return a key of the value in a place."""
        return self.key(value)

    def _tensor(self, value: Tensor) -> Hashable:
        self._tensors.append(value)
        if type(value) not in (Tensor, torch.nn.Parameter):
            return self._refuse(f"a tensor of type {type(value).__name__}")
        # torch.compile notes attributes of its own on tensors; they change nothing.
        attributes = {n: a for n, a in vars(value).items() if not n.startswith("_dynamo")}
        return Tensor, value.dtype, value.ndim, self.key(attributes) if attributes else None

    def _function(self, function: types.FunctionType) -> Hashable:
        in_library = is_library(function.__globals__.get("__name__"))
        if in_library and function.__closure__ is None:
            return function
        parts = [self.slot(place, value) for place, value in _variables(function)]
        parts += [len(parts), *(self.slot(place, value) for place, value in _defaults(function))]
        for values in (function.__kwdefaults__, function.__dict__):
            parts.append(self.key(values) if values else None)
        if not in_library:
            names, uncertainty = global_names(function.__code__)
            if uncertainty:
                self._refuse(uncertainty.format(repr(function.__name__)))
            variables = function.__globals__
            places = [Place(id(function), "global variable", n) for n in names if n in variables]
            parts += [(place.name, self.slot(place, variables[place.name])) for place in places]
        return function.__code__, *parts

    def _refuse(self, what: str, value: Any = None) -> Hashable:
        """Note that something cannot be read, and collect the tensors among a value's attributes.

        The tensors matter although nothing will be cached: one of them may require a gradient.
        """
        self._unreadable = self._unreadable or what
        attributes = getattr(value, "__dict__", None)
        if not isinstance(value, (types.ModuleType, type)) and isinstance(attributes, dict):
            # An nn.Module holds its parameters in dicts among its attributes.
            in_dicts = [a for v in attributes.values() if type(v) is dict for a in v.values()]
            self._tensors += [a for a in (*attributes.values(), *in_dicts) if isinstance(a, Tensor)]
        return None


class NamedTensors(Reader):
    """A walk that notes the places of tensors."""

    def __init__(self) -> None:
        super().__init__([])
        self.found: list[tuple[Place, Tensor]] = []

    def slot(self, place: Place, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            self.found.append((place, value))
        return self.key(value)


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _variables(function: types.FunctionType) -> list[tuple[Place, Any]]:
    """Return the places and values of the variables in a function's closure."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(Place(id(function), "variable", name), _cell_contents(cell)) for name, cell in cells]


def _defaults(function: types.FunctionType) -> list[tuple[Place, Any]]:
    """Return the places and values of the defaults of a function's positional arguments."""
    defaults, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return [(Place(id(function), "default", name), value) for name, value in zip(names, defaults, strict=True)]


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> tuple[tuple[str, ...], str]:
    """Return the global names that code reads, inner functions included.

    Also returns why the code may read other variables, or "".
    """
    names, imports = _names_and_imports(code)
    if not all(map(is_library, imports)):
        return tuple(sorted(names)), "an import inside {}"
    reads_anything = not _NAMES_OF_ANYTHING.isdisjoint(names)
    return tuple(sorted(names)), "a call in {} that may read anything" if reads_anything else ""


def _names_and_imports(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the global names that code reads and its imports, inner functions included."""
    # `co_names` has attributes too: `builtins.eval` reads anything as `eval` does.
    names, imports = _NAMES_OF_ANYTHING.intersection(code.co_names), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            imports.add(instruction.argval)
        elif "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
            names.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_names, inner_imports = _names_and_imports(constant)
            names.update(inner_names)
            imports.update(inner_imports)
    return names, imports


def _is_constant(value: Any) -> bool:
    """Return whether a value is a module or class of `_LIBRARIES`."""
    if isinstance(value, types.ModuleType):
        return is_library(value.__name__)
    return isinstance(value, type) and is_library(value.__module__)


def is_library(module: Any) -> bool:
    """Return whether a module's functions are taken as constants, given its name."""
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES
