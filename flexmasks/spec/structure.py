"""Structures: a function, partial, tuple or Mask is taken apart once, into an immutable structure and its leaves.

`flatten(value)` returns both, and `structure.fill(...)` puts the value together again with other leaves. The leaves are
the tensors that the value reads, and the numbers that a kernel could read as inputs. Functions are taken apart by their
code and by what they read beyond their arguments: closure, defaults, globals, attributes.

Caches find what they keep by the key of a structure, never by the function object: a lambda inside a training step is a
new object each time, and must still be found. Of an object of any class, as the `self` of a model, it is read what the
code reads: its attributes. Some things cannot be read with certainty: an object that the code passes on or whose method
it calls, a class, an import inside the function. They make a structure opaque: nothing that depends on it is cached,
which is slower and never wrong.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexmasks.cache import identity
from flexmasks.spec.code import (
    Attributes,
    attributes_of,
    attributes_of_owner,
    global_names,
    has_plain_attribute,
    is_library,
)
from flexmasks.spec.leaves import MOST, Leaves, Place

# Types whose objects never change and stand for themselves in a key. float is no such type: 0.0 == -0.0.
_CONSTANT_TYPES = frozenset(
    (type(None), bool, int, str, bytes, type(Ellipsis), torch.dtype, torch.device, torch.Size, torch.layout)
)
_WRITTEN_TYPES = frozenset((float, complex, range))  # equal objects of these types may act differently
_OF_EVERY_MODULE = ("__builtins__", "__name__")
_MAX_ARRAY = 1 << 12  # bytes of a NumPy array that are read at each call


class Opaque(Exception):
    """Raised for a value that reads something which may change unnoticed."""


PartNumber = int | tuple[int, int]  # of a part, or of a function and of its cell


class Filling:
    """The leaves with which a structure is filled, and the parts that are shared or made of them so far, by number."""

    def __init__(
        self, tensors: Sequence[Any], numbers: Sequence[Any], has_own_globals: bool, shared: Mapping[PartNumber, Any]
    ) -> None:
        self.tensors, self.numbers, self.has_own_globals = tensors, numbers, has_own_globals
        self.parts = dict(shared)

    def sequence(self, recipes: Iterable[Recipe]) -> list[Any]:
        return [make(self) for make in recipes]

    def dictionary(self, recipes: Mapping[Any, Recipe]) -> dict[Any, Any]:
        return {key: make(self) for key, make in recipes.items()}


Recipe = Callable[[Filling], Any]  # makes a part of the leaves, and holds none itself


def _once(number: int, recipe: Recipe, filling: Filling) -> Any:
    # Made once for all places that hold it.
    if number not in filling.parts:
        filling.parts[number] = recipe(filling)
    return filling.parts[number]


def _unfinished(filling: Filling) -> Any:
    raise Opaque("an object that holds itself")


def _kept(value: Any) -> Recipe:
    return lambda _: value


class _FunctionParts(NamedTuple):
    plain: types.FunctionType | None  # the function itself, if nothing can change in it but global variables
    code: types.CodeType
    name: str
    variables: dict[str, Any]  # the global ones of its module
    cells: list[Recipe | None]  # None for a variable that has no value yet
    defaults: list[Recipe]
    keyword_defaults: Recipe  # of a dictionary or None, as those of the attributes
    attributes: Recipe
    annotations: dict[str, Any] | None
    own_globals: dict[str, Recipe]  # those that it reads


def _copy_of_function(parts: _FunctionParts, number: int, filling: Filling) -> Callable[..., Any]:
    has_own = filling.has_own_globals and parts.own_globals
    if parts.plain is not None and not has_own:
        return parts.plain
    # Only the global variables that the function reads: the copy must not keep a module's tensors alive.
    variables = parts.variables
    space = {n: variables[n] for n in _OF_EVERY_MODULE if n in variables} if has_own else variables
    shared = [filling.parts.get((number, n)) for n in range(len(parts.cells))]
    cells = tuple([types.CellType() if cell is None else cell for cell in shared])
    made = types.FunctionType(parts.code, space, parts.name, None, cells)
    filling.parts[number] = made  # before its closure is filled, which may hold it
    for own, cell, make in zip(shared, cells, parts.cells, strict=True):
        if own is None and make is not None:
            cell.cell_contents = make(filling)
    made.__defaults__ = tuple(filling.sequence(parts.defaults)) or None
    made.__kwdefaults__ = parts.keyword_defaults(filling)
    made.__dict__.update(parts.attributes(filling) or {})
    if parts.annotations:
        made.__annotations__ = parts.annotations
    if has_own:
        space.update(filling.dictionary(parts.own_globals))
    return made


@dataclass(slots=True, eq=False)
class Structure:
    """What is left of a value without its leaves. It holds none of them."""

    _key: Hashable
    _numbers: Sequence[int | float]
    _recipe: Recipe
    unreadable: str  # what could not be read, in words, or ""
    # Whether `fill` leaves nothing out, as the attributes of objects. A tensor of another class can be filled in, and
    # not be read.
    is_whole: bool
    reads_objects: bool  # attributes of objects, which others may change

    @property
    def key_without_numbers(self) -> Hashable:
        """Key of the value without the contents of tensors and without numbers. Raises Opaque."""
        if self.unreadable:
            raise Opaque(self.unreadable)
        return self._key

    @property
    def key(self) -> Hashable:
        """Key of the value without the contents of tensors. Raises Opaque."""
        return self.key_without_numbers, *[repr(n) if type(n) is float else n for n in self._numbers]

    def fill(
        self,
        tensors: Sequence[Any],
        numbers: Sequence[Any] | None = None,
        has_own_globals: bool = False,
        shared: Mapping[PartNumber, Any] = types.MappingProxyType({}),
    ) -> Any:
        """Return the value with other leaves, in the order of `Leaves`.

        numbers: by default those that the value has.
        has_own_globals: let copies of functions have the global variables that they read for themselves. By default
            they share those of their module, where torch looks them up, and leaves among them are not replaced.
        shared: parts that are not copied, see `Walk.without_tensors`.
        """
        return self._recipe(Filling(tensors, self._numbers if numbers is None else numbers, has_own_globals, shared))


def flatten(value: Any, *, contents: bool = True, lifts: bool = False) -> tuple[Structure, Leaves]:
    """Take a value apart.

    contents: whether the elements of sequences that become tensors, and the bounds of lengths, belong to the structure.
        Without them it describes a kernel, which takes the elements as inputs, and cannot be filled.
    lifts: leave out the numbers that `Modifier._resolve` makes tensors.
    """
    walk = Walk(contents, lifts)
    return walk.structure(value), walk.leaves


def tensors_of(value: Any) -> list[Tensor]:
    return flatten(value)[1].all_tensors


def key_of(value: Any, tensors: list[Tensor]) -> Hashable:
    """Return the key of a value, and append its tensors. Raises Opaque."""
    structure, leaves = flatten(value)
    tensors += leaves.all_tensors
    return structure.key


def state_of(value: Any, tensors: list[Tensor]) -> Hashable | None:
    """The state of everything that a value reads, or None if it cannot be known.

    The tensors that it reads are appended to `tensors`. Who compares states holds them: others may take their places.
    """
    try:
        key = key_of(value, tensors)
    except Opaque:
        return None
    states = [identity(t) for t in tensors]
    return None if None in states else (key, *states)


def plain_key(function: types.FunctionType, tensors: list[Tensor]) -> Hashable | None:
    """Return a key of a function that reads only common kinds of values, and append its tensors, else None.

    It takes a quarter of the time of `key_of`, which matters because every call of `attention` with a function runs it.
    The common kinds are constants, numbers, plain tensors and modules of libraries. Their rules are repeated from
    `Walk.take`, for speed: a change of one of them there must be made here too.
    """
    names, uncertainty = global_names(function.__code__)
    if uncertainty or function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        return None
    key: list[Hashable] = [function.__code__]
    in_closure: list[tuple[str, Any]] = [
        ("", None if is_empty(c) else c.cell_contents) for c in function.__closure__ or ()
    ]
    variables = function.__globals__
    read: list[tuple[str, Any]] = in_closure + [(n, variables[n]) for n in names if n in variables]
    for name, value in read:
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


def with_tensors(value: Any, change: Callable[[Tensor], Any], has_own_globals: bool = False) -> Any:
    """Return a copy of a value with other tensors. Raises Opaque.

    has_own_globals: also in place of those in global variables, see `Structure.fill`.
    """
    structure, leaves = flatten(value)
    if not structure.is_whole:
        raise Opaque(structure.unreadable)
    return structure.fill([change(t) for t in leaves.tensors], has_own_globals=has_own_globals)


def replaced(value: Any, pairs: Iterable[tuple[Tensor, Any]]) -> Any:
    """Return a copy of a value with other objects in place of some tensors. Raises Opaque."""
    others = {id(old): new for old, new in pairs}
    return with_tensors(value, lambda t: others.get(id(t), t))


def with_inputs(structure: Structure, leaves: Leaves, inputs: Mapping[int, Tensor]) -> Any:
    """Return a function that `flatten` took apart, with tensors for some of its numbers, by place in `Leaves.numbers`.

    Raises Opaque for a number in a global variable.
    """
    for n in inputs:
        number = leaves.numbers[n]
        if number.is_global:
            raise Opaque(f"`{number.name}`, a {number.place.kind} that no copy of the function can have otherwise")
    return structure.fill(leaves.tensors, [inputs.get(n, number.value) for n, number in enumerate(leaves.numbers)])


class Readable:
    """Base of classes whose objects say how they are taken apart: Mask and Score."""

    def _taken(self, walk: Walk) -> tuple[Hashable, Recipe]:
        """Return the key of the object without leaves, and its recipe, by `walk.take(part, place)` of its parts."""
        raise NotImplementedError


class Walk:
    """One walk through a value, see `flatten`. Places are the fields of a `Place`."""

    def __init__(self, contents: bool = True, lifts: bool = False, by_name: bool = False) -> None:
        self.contents, self.lifts, self.by_name = contents, lifts, by_name
        self.leaves = Leaves()
        self._unreadable, self._is_whole = "", True
        self._global_depth = 0
        self._count = 0  # of parts
        self._reached = 0  # tensors, those reached again included, and parts that are not finished
        # By id: the number of the part, the object and its place. The objects are held during the walk: an id is free
        # once its object dies.
        self.seen: dict[int, tuple[int, Any, Any]] = {}
        self._recipes: dict[int, Recipe] = {}  # by the number of the part, of those that are taken
        self._have_tensors: set[int] = set()  # numbers of parts, and of those that hold themselves
        self._cells: dict[PartNumber, types.CellType] = {}  # in which no tensor was reached
        self._owners: dict[int, tuple[Any, Any]] = {}  # by id: objects of which attributes are read, and their places

    def structure(self, value: Any) -> Structure:
        key, recipe = self.take(value)
        numbers = [value for _, value, _ in self.leaves._numbers]
        return Structure(key, numbers, recipe, self._unreadable, self._is_whole, bool(self._owners))

    def take(self, value: Any, place: Any = None) -> tuple[Hashable, Recipe]:
        """Return a key of a part without leaves, and its recipe.

        place: None in a tuple or list, where numbers are constants.
        """
        kind = type(value)
        if kind in _CONSTANT_TYPES:
            if kind is int and place is not None and -MOST <= value <= MOST:
                return self._number(value, place, value > 0)
            return (kind, value), lambda _: value
        if kind in _WRITTEN_TYPES:
            if kind is float and place is not None:
                return self._number(value, place, None)
            return (kind, repr(value)), lambda _: value
        known = self.seen.get(id(value))
        if known is not None and not self._takes_again(value, known, place):
            number = known[0]  # of a tensor in two places, or of a function that refers to itself
            if number in self._have_tensors:
                self._reach_tensor()
            elif number not in self._recipes:
                self._reached += 1  # it is not finished, and may have tensors
            return ("seen", number), self._recipes.get(number) or partial(_once, number, _unfinished)
        number, self._count = self._count, self._count + 1
        self.seen[id(value)] = number, value, place
        rule = _RULES.get(kind) or _rule_for(value) or Walk._unknown
        reached = self._reached
        key, recipe = rule(self, value)
        self._recipes[number] = recipe = partial(_once, number, recipe)
        if self._reached > reached:
            self._have_tensors.add(number)
        return key, recipe

    def without_tensors(self) -> dict[PartNumber, Any]:
        """The parts and cells of closures that hold no tensor, which a copy may share with the value."""
        parts: dict[PartNumber, Any] = {number: value for number, value, _ in self.seen.values()}
        return self._cells | {number: value for number, value in parts.items() if number not in self._have_tensors}

    def _reach_tensor(self) -> None:
        self._reached += 1
        self.leaves.has_global |= self._global_depth > 0

    def refuse(self, what: str, value: Any = None) -> tuple[Hashable, Recipe]:
        """Note that something cannot be read, and collect the tensors among a value's attributes.

        The tensors matter although nothing will be cached: one of them may require a gradient.
        """
        self._unreadable, self._is_whole = self._unreadable or what, False
        attributes = getattr(value, "__dict__", None)
        if not isinstance(value, (types.ModuleType, type)) and isinstance(attributes, dict):
            # An nn.Module holds its parameters in dicts among its attributes.
            in_dicts = [a for v in attributes.values() if type(v) is dict for a in v.values()]
            self.leaves.nearby += [a for a in (*attributes.values(), *in_dicts) if isinstance(a, Tensor)]
        return None, _kept(value)

    def _unknown(self, value: Any) -> tuple[Hashable, Recipe]:
        return self.refuse(f"an object of type {type(value).__name__}", value)

    def _read(self, value: Any, place: Any, attributes: Callable[[], Attributes | None]) -> tuple[Hashable, Recipe]:
        """Take apart what code reads: a value, or of an object its attributes, and a copy gets a namespace of them."""
        if _is_known(value):
            return self.take(value, place)
        found = attributes()
        if not found or not all(has_plain_attribute(value, name) for name in found):
            return self._unknown(value)
        self._owners[id(value)] = value, place
        keys: list[Hashable] = [types.SimpleNamespace]
        recipes = {}
        for name in found:
            at = id(value), "attribute", name
            key, recipes[name] = self._read(getattr(value, name), at, partial(found.get, name))
            keys.append((name, key))
        return tuple(keys), lambda filling: types.SimpleNamespace(**filling.dictionary(recipes))

    def _takes_again(self, value: Any, known: tuple[int, Any, Any], place: Any) -> bool:
        number, _, former = known
        if number not in self._recipes:  # it holds itself
            return False
        return self.by_name and isinstance(value, Tensor) and _name_of(former) != _name_of(place)

    def _number(self, value: int | float, place: Any, sign: bool | None) -> tuple[Hashable, Recipe]:
        n = len(self.leaves._numbers)
        self.leaves._numbers.append((place, value, self._global_depth > 0))
        return ("number", sign), lambda filling: filling.numbers[n]

    def _tensor(self, value: Tensor) -> tuple[Hashable, Recipe]:
        n = len(self.leaves.tensors)
        self._reach_tensor()
        self.leaves.tensors.append(value)
        self.leaves._places.append(self.seen[id(value)][2])
        attributes: dict[str, Any] = {}
        if type(value) in (Tensor, torch.nn.Parameter):
            # torch.compile notes attributes of its own on tensors; they change nothing.
            attributes = {n: a for n, a in vars(value).items() if not n.startswith("_dynamo")}
        else:
            self._unreadable = self._unreadable or f"a tensor of type {type(value).__name__}"
        of_attributes = self.take(attributes, (id(value), "attribute", "__dict__"))[0] if attributes else None
        return (Tensor, value.dtype, value.ndim, of_attributes), lambda filling: filling.tensors[n]

    def _dict(self, value: dict[Any, Any]) -> tuple[Hashable, Recipe]:
        keys: list[Hashable] = [dict]
        recipes = {}
        for k, v in value.items():
            key, recipes[k] = self.take(v, (id(value), "item", k))
            keys.append((self.take(k)[0], key))
        return tuple(keys), lambda filling: filling.dictionary(recipes)

    def _sequence(self, value: Any) -> tuple[Hashable, Recipe]:
        kind = type(value)
        if value and type(value[0]) is int and set(map(type, value)) == {int}:
            kept = tuple(value)
            return (kind, int, kept), lambda _: kind(kept)
        keys: list[Any] = [kind]
        recipes = []
        for v in value:
            key, recipe = self.take(v)
            keys.append(key)
            recipes.append(recipe)
        return tuple(keys), lambda filling: kind(filling.sequence(recipes))

    def _partial(self, value: partial[Any]) -> tuple[Hashable, Recipe]:
        (of_function, function), (of_keywords, keywords), (of_attributes, _) = (
            self.take(getattr(value, n), (id(value), "attribute", n)) for n in ("func", "keywords", "__dict__")
        )
        taken = [self.take(v, (id(value), "argument", n)) for n, v in enumerate(value.args)]
        args = [recipe for _, recipe in taken]
        key = "partial", of_function, of_keywords, of_attributes, *[key for key, _ in taken]
        return key, lambda filling: partial(function(filling), *filling.sequence(args), **keywords(filling))

    def _method(self, value: types.MethodType) -> tuple[Hashable, Recipe]:
        called, place = value.__func__, (id(value), "attribute", "__self__")
        of_function, function = self.take(called, (id(value), "attribute", "__func__"))
        of_owner, owner = self._read(value.__self__, place, partial(attributes_of_owner, called))
        key = types.MethodType, of_function, of_owner
        return key, lambda filling: types.MethodType(function(filling), owner(filling))

    def _of_numpy(self, value: Any) -> tuple[Hashable, Recipe]:
        if value.dtype.hasobject or value.nbytes > _MAX_ARRAY:
            return self.refuse("a NumPy scalar" if isinstance(value, np.generic) else "a NumPy array")
        return (type(value), value.dtype.str, value.shape, value.tobytes()), _kept(value.copy())

    def _module_or_class(self, value: Any) -> tuple[Hashable, Recipe]:
        if is_library(value.__name__ if isinstance(value, types.ModuleType) else value.__module__):
            return value, _kept(value)
        return self.refuse(f"{value!r}, whose variables may change", value)

    def _descriptor(self, value: Any) -> tuple[Hashable, Recipe]:  # torch.Tensor.add
        return (type(value), value.__name__, self.take(value.__objclass__)[0]), _kept(value)

    def _builtin(self, value: Any) -> tuple[Hashable, Recipe]:  # math.exp, tensor.__getitem__
        if value.__self__ is None:
            is_known = is_library(value.__module__)
            return (value, _kept(value)) if is_known else self.refuse(f"{value!r}", value)
        (key, owner), name = self.take(value.__self__, (id(value), "attribute", "__self__")), value.__name__
        return (type(value), name, key), lambda filling: getattr(owner(filling), name)

    def _function(self, function: types.FunctionType) -> tuple[Hashable, Recipe]:
        variables, code, holder = function.__globals__, function.__code__, id(function)
        in_library = is_library(variables.get("__name__"))
        if in_library and function.__closure__ is None:
            return function, _kept(function)
        key: list[Hashable] = [code]
        cells: list[Recipe | None] = []
        part: Hashable
        recipe: Recipe | None
        for n, (name, cell) in enumerate(zip(code.co_freevars, function.__closure__ or (), strict=True)):
            part, recipe, reached = None, None, self._reached
            if not is_empty(cell):
                place = holder, "variable", name
                part, recipe = self._read(cell.cell_contents, place, partial(attributes_of, function, name))
            key.append(part)
            cells.append(recipe)
            if self._reached == reached:
                self._cells[self.seen[holder][0], n] = cell
        defaults: list[Recipe] = []
        if given := function.__defaults__:
            for name, value in zip(code.co_varnames[code.co_argcount - len(given) :], given, strict=False):
                part, recipe = self.take(value, (holder, "default", name))
                key.append(part)
                defaults.append(recipe)
        keywords, attributes = function.__kwdefaults__, function.__dict__
        of_keywords, make_keywords = of_attributes, make_attributes = None, _kept(None)
        if keywords:
            of_keywords, make_keywords = self.take(keywords, (holder, "attribute", "__kwdefaults__"))
        if attributes:
            of_attributes, make_attributes = self.take(attributes, (holder, "attribute", "__dict__"))
        key += [of_keywords, of_attributes]
        own: dict[str, Recipe] = {}
        if not in_library:
            names, uncertainty = global_names(code)
            if uncertainty:
                self.refuse(uncertainty.format(repr(function.__name__)))
            self._global_depth += 1
            for name in names:
                if name in variables:
                    place = holder, "global variable", name
                    part, own[name] = self._read(variables[name], place, partial(attributes_of, function, name))
                    key += [name, part]
            self._global_depth -= 1
            own = {} if uncertainty else own
        plain = None if cells or defaults or keywords or attributes else function
        parts = _FunctionParts(
            plain, code, function.__name__, variables, cells, defaults, make_keywords, make_attributes,
            None if plain else function.__annotations__, own,
        )  # fmt: skip
        return tuple(key), partial(_copy_of_function, parts, self.seen[holder][0])


def _name_of(place: Any) -> str:
    return "" if place is None else Place(*place).name


def is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


_RULES: dict[type, Callable[[Walk, Any], tuple[Hashable, Recipe]]] = {
    Tensor: Walk._tensor,
    dict: Walk._dict,
    tuple: Walk._sequence,
    list: Walk._sequence,
    types.FunctionType: Walk._function,
    partial: Walk._partial,
    types.MethodType: Walk._method,
    types.ModuleType: Walk._module_or_class,
    types.MethodDescriptorType: Walk._descriptor,
    types.WrapperDescriptorType: Walk._descriptor,
    types.BuiltinFunctionType: Walk._builtin,
    types.MethodWrapperType: Walk._builtin,
}


def _is_known(value: Any) -> bool:
    """Return whether an object is taken apart as a whole."""
    kind = type(value)
    is_constant = kind in _CONSTANT_TYPES or kind in _WRITTEN_TYPES
    return is_constant or kind in _RULES or _rule_for(value) is not None


def _rule_for(value: Any) -> Callable[[Walk, Any], tuple[Hashable, Recipe]] | None:
    """Return how an object of a derived type is taken apart."""
    if isinstance(value, Tensor):
        return Walk._tensor
    if isinstance(value, Readable):
        return lambda walk, readable: readable._taken(walk)
    if isinstance(value, np.generic) or type(value) is np.ndarray:
        return Walk._of_numpy
    if isinstance(value, (types.ModuleType, type)):
        return Walk._module_or_class
    return None
