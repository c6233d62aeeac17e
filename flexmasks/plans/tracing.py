"""A function of tensors becomes a program: the operations that it does, without its work in Python.

Operations are noted while they run on real tensors: torch's own tracing takes ten times as long. What depends on no
input is computed once and kept, and operations whose results nobody needs are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from flexmasks import compat

_MAX_KEPT_ELEMENTS = 1 << 18  # larger constants are computed at each run
_aten = torch.ops.aten
_ARRAYS = Tensor.numpy, Tensor.__array__, Tensor.__dlpack__


@dataclass(eq=False)
class _Value:
    """An input, a constant, or what an operation gives."""

    like: Tensor  # the value itself if it is kept, else a tensor like it without data
    varies: bool  # it depends on an input

    @property
    def is_kept(self) -> bool:
        return not (self.varies or self.like.is_meta)


@dataclass(eq=False)
class _Operation:
    """An operation of torch; values stand in place of tensors among its arguments, and in lists among them."""

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[_Value] = field(default_factory=list)
    gives_one: bool = True  # a tensor, not a tuple

    def __post_init__(self) -> None:
        given = [*self.args, *self.kwargs.values()]
        self.read = [x for arg in given for x in (arg if type(arg) is list else (arg,)) if type(x) is _Value]


def trace(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Operations:
    """Return the program of a function from tensors to a list of tensors; it holds for inputs of the same layouts.

    Raises what the function raises, and RuntimeError where it reads a value that depends on an input.
    """
    tracer = _Tracer(inputs)
    with compat.keeping_environment(), tracer, _NoArrays():  # a mode of torch's imports torch._dynamo
        results = torch.func.functionalize(function)(*inputs)
    outputs = [tracer.value_of(x) for x in results]
    return Operations(tracer.inputs, _needed(tracer.operations, outputs), outputs)


class _NoArrays(TorchFunctionMode):
    """Refuses arrays of tensors: to make one is no operation, and functionalized tensors have no memory to share."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ARRAYS:
            raise RuntimeError(f"{func.__name__} reads values of a tensor")
        return func(*args, **(kwargs or {}))


class _Tracer(compat.TorchDispatchMode):
    """Notes operations while they run. Values that depend on an input are not kept."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self._values = WeakTensorKeyDictionary()
        self.inputs = [self._noted(x, varies=True) for x in inputs]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_values = {name: self._with_values(x) for name, x in kwargs.items()}
        operation = _Operation(func, [self._with_values(x) for x in args], of_values)
        varies = any(x.varies for x in operation.read)
        if varies and (_has_booleans(args[1]) if func is _aten.index.Tensor else _reads_values(func)):
            raise RuntimeError(f"{func} reads values of a tensor")
        out = func(*args, **kwargs)
        operation.gives_one = isinstance(out, Tensor)
        if isinstance(out, Tensor | tuple | list):  # else the host reads a constant
            results = [out] if isinstance(out, Tensor) else out
            operation.results = [self._noted(x, varies) for x in results]
            self.operations.append(operation)
        return out

    def _noted(self, tensor: Tensor, varies: bool) -> _Value:
        like = tensor
        if varies or tensor.numel() > _MAX_KEPT_ELEMENTS:
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        value = self._values[tensor] = _Value(like, varies)
        return value

    def _with_values(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self.value_of(argument)
        return [self._with_values(x) for x in argument] if isinstance(argument, tuple | list) else argument

    def value_of(self, tensor: Tensor) -> _Value:
        """Return the value of a tensor; one that no operation made is a constant."""
        value = self._values.get(tensor)
        if value is None:
            value = self._values[tensor] = _Value(tensor, varies=False)
        return cast(_Value, value)


@functools.cache
def _reads_values(function: Any) -> bool:
    """Return whether an operation may read values on the host, or values may decide the shape of its result."""
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(function.tags)


def _has_booleans(indices: Sequence[Tensor | None]) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _needed(operations: Sequence[_Operation], outputs: Sequence[_Value]) -> list[_Operation]:
    used, needed = set(outputs), []
    for operation in reversed(operations):
        if any(value in used and not value.is_kept for value in operation.results):
            needed.append(operation)
            used.update(operation.read)
    return needed[::-1]


# --- running ---


class _Step(NamedTuple):
    """An operation, with the places of its tensors among all values of a program.

    places: of each argument that is a tensor.
    lists: of the tensors in each argument that is a list of tensors and None.
    named: of each keyword argument that is a tensor.
    last: places of values that no later step reads.
    """

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    places: list[tuple[int, int]]
    lists: list[tuple[int, list[int | None]]]
    named: list[tuple[str, int]]
    results: list[int]
    gives_one: bool
    last: list[int]


def _step_of(operation: _Operation, users_line: Callable[[_Value], int]) -> _Step:
    """Return a step, which holds no value: a value would keep alive all that it was made from."""
    places, lists, args = [], [], []
    for n, x in enumerate(operation.args):
        if isinstance(x, _Value):
            places.append((n, users_line(x)))
        elif isinstance(x, list) and any(isinstance(y, _Value) for y in x):
            lists.append((n, [users_line(y) if isinstance(y, _Value) else None for y in x]))
        else:
            args.append(x)
            continue
        args.append(None)
    named = [(name, users_line(x)) for name, x in operation.kwargs.items() if isinstance(x, _Value)]
    kwargs = {name: x for name, x in operation.kwargs.items() if not isinstance(x, _Value)}
    results = [users_line(x) for x in operation.results]
    return _Step(operation.function, args, kwargs, places, lists, named, results, operation.gives_one, [])


class Operations:
    """Operations from tensors to a list of tensors. `varies` says for each output whether it depends on an input."""

    def __init__(self, inputs: Sequence[_Value], operations: Sequence[_Operation], outputs: Sequence[_Value]) -> None:
        self.varies = [value.varies for value in outputs]
        places_of = {value: n for n, value in enumerate(inputs)}
        self._values: list[Tensor | None] = [None] * len(inputs)

        def users_line(value: _Value) -> int:
            if value not in places_of:
                places_of[value] = len(self._values)
                self._values.append(value.like if value.is_kept else None)
            return places_of[value]

        self.steps = [_step_of(operation, users_line) for operation in operations]
        self._outputs = [users_line(value) for value in outputs]
        read = {*self._outputs, *range(len(inputs))}
        for step in reversed(self.steps):
            places = {place for _, place in (*step.places, *step.named)}
            places |= {n for _, ns in step.lists for n in ns if n is not None}
            unread = {*places, *step.results} - read
            step.last.extend(n for n in unread if self._values[n] is None)
            read |= places

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        values: list[Any] = self._values.copy()
        values[: len(inputs)] = inputs
        for function, args, kwargs, places, lists, named, results, gives_one, last in self.steps:
            given = args.copy()
            for n, place in places:
                given[n] = values[place]
            for n, inner in lists:
                given[n] = [None if place is None else values[place] for place in inner]
            if named:
                kwargs = kwargs | {name: values[place] for name, place in named}
            out = function(*given, **kwargs)
            if gives_one:
                values[results[0]] = out
            else:
                for place, x in zip(results, out, strict=True):
                    values[place] = x
            for place in last:
                values[place] = None
        return [values[place] for place in self._outputs]
