"""A function of tensors becomes a program: the operations that it does, without its work in Python.

Operations are noted while they run on real tensors: torch's own tracing takes ten times as long. What depends on no
input is computed once and kept, repeated operations are merged, and those that do nothing are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flexmasks import compat

_MAX_KEPT_ELEMENTS = 1 << 18  # larger constants are computed at each run
_aten = torch.ops.aten


@dataclass(eq=False)
class _Value:
    """An input, a constant, or what an operation gives."""

    like: Tensor  # the value itself if it is kept, else a tensor like it without data
    varies: bool  # it depends on an input
    made_by: _Operation | None = None
    uses: int = 0

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

    @property
    def is_view(self) -> bool:
        return any(r.alias_info for r in self.function._schema.returns)

    def replace(self, same: dict[_Value, _Value]) -> None:
        def replaced(x: Any) -> Any:
            if type(x) is list:
                return [replaced(y) for y in x]
            return same.get(x, x) if type(x) is _Value else x

        self.args = [replaced(x) for x in self.args]
        self.kwargs = {name: replaced(x) for name, x in self.kwargs.items()}
        self.read = [same.get(x, x) for x in self.read]


def trace(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], factored: bool = False) -> Program:
    """Return the program of a function from tensors to a list of tensors; it holds for inputs of the same layouts.

    factored: see `plans.recorded.Recorded`.

    Raises what the function raises, and RuntimeError where it reads a value that depends on an input.
    """
    tracer = _Tracer(inputs)
    with compat.keeping_environment(), tracer:  # a mode of torch's imports torch._dynamo
        results = torch.func.functionalize(function)(*inputs)
    outputs = [tracer.value_of(x) for x in results]
    operations, outputs = _simplified(tracer.operations, outputs, keeps_results=not factored)
    if factored:
        operations, outputs = _with_factors(operations, outputs)
    return Program(tracer.inputs, _needed(operations, outputs), outputs)


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
            operation.results = [self._noted(x, varies, operation) for x in results]
            self.operations.append(operation)
        return out

    def _noted(self, tensor: Tensor, varies: bool, made_by: _Operation | None = None) -> _Value:
        like = tensor
        if varies or tensor.numel() > _MAX_KEPT_ELEMENTS:
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        value = self._values[tensor] = _Value(like, varies, made_by)
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


# --- fewer operations ---


def _needed(operations: Sequence[_Operation], outputs: Sequence[_Value]) -> list[_Operation]:
    """The operations that outputs need. Counts the uses of their values."""
    for operation in operations:
        for value in (*operation.read, *operation.results):
            value.uses = 0
    for value in outputs:
        value.uses += 1
    needed = []
    for operation in reversed(operations):
        if any(value.uses and not value.is_kept for value in operation.results):
            needed.append(operation)
            for value in operation.read:
                value.uses += 1
    return needed[::-1]


def _simplified(
    operations: Sequence[_Operation], outputs: Sequence[_Value], keeps_results: bool
) -> tuple[list[_Operation], list[_Value]]:
    """Merge repeated operations, and leave out those that do nothing, or whose results are kept.

    keeps_results: also what is as large as an output may be kept.
    """
    if not keeps_results:
        least = min(value.like.numel() for value in outputs)
        for value in (value for operation in operations for value in operation.results):
            if value.is_kept and value.like.numel() >= least:
                value.like = value.like.to("meta")
    operations = _needed(operations, outputs)  # a value with a use that nobody needs seems to be used twice
    given_out = set(outputs)
    for operation in reversed(operations):
        if operation.is_view and not given_out.isdisjoint(operation.results):
            given_out.add(operation.args[0])
    same: dict[_Value, _Value] = {}
    known: dict[Hashable, _Operation] = {}
    simplified = []
    for operation in operations:
        operation.replace(same)
        source = _same_as(operation, given_out) if operation.gives_one else None
        key = operation.function, _key(operation.args), _key(operation.kwargs)
        if source is None:
            first = known.setdefault(key, operation)
            if first is operation:
                simplified.append(operation)
                continue
            sources = first.results
        else:
            sources = [source]
        for value, other in zip(operation.results, sources, strict=True):
            same[value] = other
            other.uses += value.uses
    return simplified, [same.get(value, value) for value in outputs]


def _key(value: Any) -> Hashable:
    """Return a key of an operation's arguments; numbers of different types differ."""
    if isinstance(value, list):
        return tuple(_key(v) for v in value)
    if isinstance(value, dict):
        return tuple((n, _key(v)) for n, v in value.items())
    is_exact = isinstance(value, _Value | int | torch.dtype | torch.device)
    return (type(value), value if is_exact else repr(value))


def _same_as(operation: _Operation, given_out: set[_Value]) -> _Value | None:
    """Return the value that an operation repeats, or None."""
    function, args = operation.function, operation.args
    if function in (_aten.detach.default, _aten.lift_fresh_copy.default):
        return cast(_Value, args[0])
    if function is _aten.clone.default and _copies_in_vain(operation):
        return cast(_Value, args[0])
    if operation.results[0] in given_out:  # a result may not be the memory of an input
        return None
    if function is _aten.index.Tensor and _counts_up(operation):
        return cast(_Value, args[0])
    return _added_to_zero(operation) if function is _aten.add.Tensor else None


def _copies_in_vain(clone: _Operation) -> bool:
    """Return whether an operation copies a new contiguous tensor that nothing else uses."""
    source: _Value = clone.args[0]
    like = source.like
    keeps_layout = clone.kwargs.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
    if not keeps_layout or not like.is_contiguous():
        return False
    while source.made_by is not None and source.uses == 1 and source.made_by.gives_one:
        if source.like.numel() != like.numel():
            return False
        if not source.made_by.is_view:
            return True
        source = source.made_by.args[0]
    return False


def _added_to_zero(add: _Operation) -> _Value | None:
    """Return what an operation adds to kept zeros, if it is the operation's value."""
    result = add.results[0].like
    for zeros, other in (add.args, add.args[::-1]):
        if not isinstance(zeros, _Value) or not isinstance(other, _Value) or add.kwargs:
            continue
        if zeros.is_kept and _layout(result) == _layout(other.like) and not bool(zeros.like.any()):
            return other
    return None


def _counts_up(index: _Operation) -> bool:
    """Return whether an operation reads all elements along the first dimension, in their order."""
    source, indices = index.args
    places = indices[0]
    if len(indices) > 1 or not places.is_kept or places.like.ndim != 1:
        return False
    if _layout(source.like) != _layout(index.results[0].like):
        return False
    return bool((places.like == torch.arange(len(places.like), device=places.like.device)).all())


def _layout(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype  # later views of a tensor depend on its strides


# --- products ---


def _with_factors(operations: list[_Operation], outputs: list[_Value]) -> tuple[list[_Operation], list[_Value]]:
    """Give out the factors of the output, if it is a product."""
    [product] = outputs
    ndim, size = product.like.ndim, product.like.numel()
    while _broadcasts(product):
        product = cast(_Operation, product.made_by).args[0]
    operation = product.made_by
    is_negative = operation is not None and operation.function is _aten.sub.Tensor and not operation.kwargs
    is_negative = is_negative and _is_zero(cast(_Operation, operation).args[0])
    if is_negative:
        operation = getattr(cast(_Operation, operation).args[1], "made_by", None)
    if operation is None or operation.function is not _aten.mul.Tensor:
        return operations, outputs
    factors = [x for x in operation.args if isinstance(x, _Value) and x.like.dtype == torch.float32]
    if len(factors) < 2:
        return operations, outputs
    weight, numbers = sorted(factors, key=_has_columns)
    if _has_columns(weight) or numbers.like.numel() >= size:
        return operations, outputs
    operations = list(operations)
    if is_negative:
        weight = _appended(operations, _aten.neg.default, weight)
    shapes = [[1] * (ndim - x.like.ndim) + [*x.like.shape] for x in (numbers, weight)]
    outputs = [
        _appended(operations, _aten.view.default, x, shape) for x, shape in zip((numbers, weight), shapes, strict=True)
    ]
    return operations, outputs


def _appended(operations: list[_Operation], function: Any, value: _Value, *args: Any) -> _Value:
    like = function(value.like, *args)
    operation = _Operation(function, [value, *args], {})
    operation.results = [_Value(like, value.varies, operation)]
    operations.append(operation)
    return operation.results[0]


def _broadcasts(value: _Value) -> bool:
    """Whether a value behind a product only repeats it, or is a copy."""
    operation = value.made_by
    if operation is None:
        return False
    if operation.function is _aten.unsqueeze.default:
        return bool(operation.args[1] == 0)
    return operation.function in (_aten.clone.default, _aten.expand.default, _aten.slice.Tensor)  # slices of repeats


def _has_columns(value: _Value) -> bool:
    return value.like.shape[-1:] not in ((), (1,))


def _is_zero(value: Any) -> bool:
    return isinstance(value, _Value) and value.is_kept and not bool(value.like.any())


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


def _step_of(operation: _Operation, place_of: Callable[[_Value], int]) -> _Step:
    """Return a step, which holds no value: a value would keep alive all that it was made from."""
    places, lists, args = [], [], []
    for n, x in enumerate(operation.args):
        if isinstance(x, _Value):
            places.append((n, place_of(x)))
        elif isinstance(x, list) and any(isinstance(y, _Value) for y in x):
            lists.append((n, [place_of(y) if isinstance(y, _Value) else None for y in x]))
        else:
            args.append(x)
            continue
        args.append(None)
    named = [(name, place_of(x)) for name, x in operation.kwargs.items() if isinstance(x, _Value)]
    kwargs = {name: x for name, x in operation.kwargs.items() if not isinstance(x, _Value)}
    results = [place_of(x) for x in operation.results]
    return _Step(operation.function, args, kwargs, places, lists, named, results, operation.gives_one, [])


class Program:
    """Operations from tensors to a list of tensors. `varies` says for each output whether it depends on an input."""

    def __init__(self, inputs: Sequence[_Value], operations: Sequence[_Operation], outputs: Sequence[_Value]) -> None:
        self.varies = [value.varies for value in outputs]
        places_of = {value: n for n, value in enumerate(inputs)}
        self._values: list[Tensor | None] = [None] * len(inputs)

        def place_of(value: _Value) -> int:
            if value not in places_of:
                places_of[value] = len(self._values)
                self._values.append(value.like if value.is_kept else None)
            return places_of[value]

        self.steps = [_step_of(operation, place_of) for operation in operations]
        self._outputs = [place_of(value) for value in outputs]
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
