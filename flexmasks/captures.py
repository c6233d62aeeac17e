"""What a user's function reads besides its arguments: the tensors, and a key of everything else.

Block masks and kernels of a plain function are found again by the function's code and by what it captured
(closure, defaults, globals), never by the function object: a lambda written inside a training step is a new
object each time and must still hit. What cannot be read with certainty (an object's attributes, say) makes
the function opaque: nothing that depends on it is cached, which is slower and never wrong.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_LIBRARIES = {"torch", "math", "numpy", "operator", "functools", "builtins", "flexmasks"}


class Opaque(Exception):
    """The function reads something whose value cannot be known to be unchanged."""


def capture(value: Any, tensors: list[Tensor]) -> Hashable:
    """A key of a function and all that it reads, or of any other value; tensors met are appended to `tensors`.

    Raises Opaque where some captured object cannot be read.
    """
    return _key(value, tensors, {})


# Objects met on the way, by id: held until the key is made, for an id may be given anew once its object is gone.
_Seen = dict[int, tuple[int, Any]]


def _key(value: Any, tensors: list[Tensor], seen: _Seen) -> Hashable:
    if isinstance(value, _CONSTANTS):
        return type(value), value
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor, value.dtype, value.ndim
    if id(value) in seen:  # a function that refers to itself
        return "seen", seen[id(value)][0]
    seen[id(value)] = len(seen), value
    if isinstance(value, tuple | list):
        return type(value), *(_key(v, tensors, seen) for v in value)
    if isinstance(value, dict):
        return dict, *((_key(k, tensors, seen), _key(v, tensors, seen)) for k, v in value.items())
    if hasattr(value, "capture"):  # a Mask or a Score
        return value.capture(tensors)
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType | type) or _is_library(value):
        if isinstance(value, types.ModuleType) and not _is_library(value):
            raise Opaque(f"the module {value.__name__}, whose variables may change")
        return id(value), getattr(value, "__name__", "")
    if isinstance(value, types.FunctionType):
        return _function_key(value, tensors, seen)
    if isinstance(value, types.MethodType):
        return "method", _key(value.__func__, tensors, seen), _key(value.__self__, tensors, seen)
    if isinstance(value, functools.partial):
        return "partial", *(_key(v, tensors, seen) for v in (value.func, value.args, value.keywords))
    raise Opaque(f"an object of type {type(value).__name__}")


def _function_key(function: types.FunctionType, tensors: list[Tensor], seen: _Seen) -> Hashable:
    cells = [_cell(c) for c in function.__closure__ or ()]
    names = _global_names(function.__code__)
    world = {n: function.__globals__[n] for n in names if n in function.__globals__}
    captured = (cells, function.__defaults__, function.__kwdefaults__, world)
    return function.__code__, *(_key(c, tensors, seen) for c in captured)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def _global_names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return sorted(set(names))


def _is_library(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES and not hasattr(value, "__self__")
