"""What code reads: variables, and attributes of objects."""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

from torch.nn import Module

# Packages whose functions, modules and classes are taken as constants.
_LIBRARIES = {"torch", "math", "numpy", "operator", "functools", "builtins", "_operator", "_functools", "flexmasks"}
# Help for masks of users; what the rest of this library returns may follow from what users have registered.
_HELP = ("flexmasks.spec.indexing", "flexmasks.spec.parameters")
# Names by which code can read any variable at all.
_NAMES_OF_ANYTHING = {"globals", "locals", "vars", "eval", "exec", "open", "__import__", "__globals__", "__builtins__"}
_SKIPPED = {"CACHE", "NOP", "EXTENDED_ARG", "RESUME"}
_NO_VALUE = {"MAKE_CELL", "COPY_FREE_VARS", "LOAD_CLOSURE"}  # they name a variable, and read none
_READ_OF_MODULES: Any = Module.__getattr__
_PLAIN_READS: Any = object.__getattribute__, types.SimpleNamespace.__getattribute__

# What code reads of an object: its attributes by name, with what it reads of each, or None where it takes the attribute
# as a whole.
Attributes = Mapping[str, "Attributes | None"]


@lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> tuple[tuple[str, ...], str]:
    """Return the global names that code reads, inner functions included, and why it may read other variables, or ""."""
    names, imports = set[str](), set[str]()
    for inner in _codes(code):
        # `co_names` has attributes too: `builtins.eval` reads anything as `eval` does.
        names |= _NAMES_OF_ANYTHING.intersection(inner.co_names)
        for instruction in dis.get_instructions(inner):
            if instruction.opname == "IMPORT_NAME":
                imports.add(instruction.argval)
            elif "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
                names.add(instruction.argval)
    if not all(map(is_library, imports)):
        return tuple(sorted(names)), "an import inside {}"
    reads_anything = not _NAMES_OF_ANYTHING.isdisjoint(names)
    return tuple(sorted(names)), "a call in {} that may read anything" if reads_anything else ""


def read_by(function: types.FunctionType) -> str:
    """Return what a function reads besides its arguments and what modules of libraries hold, in words, or ""."""
    names, uncertainty = global_names(function.__code__)
    if uncertainty:
        return uncertainty.format(repr(function.__name__))
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    is_made_anew = "<" in function.__qualname__  # a lambda, or a function inside one: torch knows it by its code
    if defaults and (is_made_anew or not all(isinstance(x, bool | int | float | str | None) for x in defaults)):
        return "the defaults of its parameters"
    variables = function.__globals__
    changing = (name for name in names if name in variables and not _is_fixed(variables[name]))
    return next((f"the variable {name!r}" for name in changing), "")


def _is_fixed(value: Any) -> bool:
    """Whether a variable is a module of a library, or help for masks; another name may stand for another function."""
    if isinstance(value, types.ModuleType):
        return is_library(value.__name__) and (value.__name__ in _HELP or not value.__name__.startswith("flexmasks"))
    return (
        isinstance(value, types.FunctionType) and value.__globals__.get("__name__") in _HELP and not value.__closure__
    )


@lru_cache(maxsize=1024)
def attributes_read(code: types.CodeType, name: str) -> Attributes | None:
    """Return the attributes that code, inner functions included, reads of a variable; None if it does anything else
    with the variable, such as to call a method, to pass it on or to change it.
    """
    found: dict[str, Any] = {}
    for inner in _codes(code):
        steps = [i for i in dis.get_instructions(inner) if i.opname not in _SKIPPED]
        for n, step in enumerate(steps):
            named = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # 3.13 has loads of two names
            is_of_variable = "FAST" in step.opname or "DEREF" in step.opname or "GLOBAL" in step.opname
            is_of_variable = is_of_variable or step.opname == "LOAD_NAME"
            if not is_of_variable or name not in named or step.opname in _NO_VALUE:
                continue
            chain = [follower.argval for follower in itertools.takewhile(_reads_attribute, steps[n + 1 :])]
            if "LOAD" not in step.opname or "STORE" in step.opname or name in named[:-1] or not chain:
                return None
            _note(found, chain)
    return found


def attributes_of(function: types.FunctionType, name: str) -> Attributes | None:
    """Return the attributes that a function reads of a variable, see `attributes_read`."""
    return attributes_read(function.__code__, name)


def attributes_of_owner(method: Any) -> Attributes | None:
    """Return the attributes that the function of a method reads of its object."""
    has_owner = isinstance(method, types.FunctionType) and method.__code__.co_argcount > 0
    return attributes_read(method.__code__, method.__code__.co_varnames[0]) if has_owner else None


def _note(found: dict[str, Any], chain: list[str]) -> None:
    """Note that code reads a chain of attributes, and takes the last one as a whole."""
    first, *rest = chain
    if not rest:
        found[first] = None
    elif found.setdefault(first, {}) is not None:
        _note(found[first], rest)


def _reads_attribute(instruction: dis.Instruction) -> bool:
    """Whether an instruction puts an attribute in the place of its object, and does not go on to call it."""
    calls = sys.version_info >= (3, 12) and bool((instruction.arg or 0) & 1)
    return instruction.opname == "LOAD_ATTR" and not calls


def has_plain_attribute(value: Any, name: str) -> bool:
    """Return whether reading an attribute runs no code but torch's for modules, and finds no method."""
    kind = type(value)
    own = getattr(value, "__dict__", {})
    of_class = next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), None)
    if kind.__getattribute__ not in _PLAIN_READS or hasattr(of_class, "__set__"):
        return isinstance(of_class, types.MemberDescriptorType) and hasattr(value, name)
    if name in own or (of_class is not None and not hasattr(of_class, "__get__")):
        return True
    is_module = isinstance(value, Module) and getattr(kind, "__getattr__", None) is _READ_OF_MODULES
    return of_class is None and is_module and any(name in own[n] for n in ("_parameters", "_buffers", "_modules"))


def plain_function(function: Any) -> tuple[Any, int]:
    """Return the function whose code a callable runs, and how many of its first arguments are bound."""
    bound = 0
    if isinstance(function, partial):
        bound, function = len(function.args), function.func
    if isinstance(function, types.MethodType):
        return function.__func__, bound + 1
    return (function, bound) if isinstance(function, types.FunctionType) else (type(function).__call__, bound + 1)


class TakenInGraph(NamedTuple):
    """What a callable takes, as far as torch.compile can read it: it traces no `inspect.signature` of many callables.

    The values of defaults are left out: where a parameter is not given, the function itself has its default.
    """

    function: types.FunctionType  # the plain function
    positional: tuple[str, ...]  # names
    least: int  # how many arguments by position it needs
    takes_any: bool  # it takes any number of them
    named: tuple[tuple[str, bool], ...]  # parameters after `*`, and whether each is required
    may_have_defaults: bool  # those after `*`
    is_annotated: bool  # annotations of parameters after `*` can be read


def taken_in_graph(function: Any) -> TakenInGraph | None:
    """Return what a callable takes, or None of one without Python code. torch traces this function."""
    plain, bound = plain_function(function)
    if not isinstance(plain, types.FunctionType):
        return None
    while hasattr(plain, "__wrapped__"):  # as inspect.signature does
        plain = plain.__wrapped__
    code = plain.__code__
    most = code.co_argcount
    positional, names = code.co_varnames[bound:most], code.co_varnames[most : most + code.co_kwonlyargcount]
    # torch fails to read defaults of a function that the graph makes: all, or in 2.11 those after `*`. Keywords of a
    # partial may give arguments by position.
    is_partial, is_nested = isinstance(function, partial), bool(code.co_flags & inspect.CO_NESTED)
    least = 0 if is_partial or is_nested else len(positional) - len(plain.__defaults__ or ())
    defaults: Mapping[str, Any] | None = {}
    if names:
        try:
            if plain.__kwdefaults__ is not None:
                defaults = None if is_nested else plain.__kwdefaults__
        except AttributeError:
            defaults = None
    given = function.keywords if is_partial else {}
    named = tuple([(n, defaults is not None and n not in defaults and n not in given) for n in names])
    is_annotated = defaults is not None and any(n in plain.__annotations__ for n in names)
    takes_any = bool(code.co_flags & inspect.CO_VARARGS)
    return TakenInGraph(plain, positional, least, takes_any, named, defaults is None or bool(defaults), is_annotated)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def is_library(module: Any) -> bool:
    """Return whether a module's functions are taken as constants, given its name."""
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES
