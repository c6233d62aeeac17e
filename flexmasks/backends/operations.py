"""Operations of a mask's or score's function, as a compiler sees them.

A silent error of a compiler does not show in a trial run, so a function passes a look only if all its operations are
on a list of operations that are known to be compiled correctly, within the bounds that they need.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmasks import compat

UNREADABLE = "its function cannot be traced"
DTYPE = "it asks for the dtype of an index, which kernels count in 32 bits and Python in 64"
MAKE_CONSTANTS = {"full", "zeros", "ones", "scalar_tensor", "full_like", "zeros_like", "ones_like"}
MAKE_CONSTANTS |= {"new_full", "new_zeros", "new_ones", "lift_fresh", "lift_fresh_copy"}
KEEP_VALUES = {"_to_copy", "alias", "clone", "convert_element_type", "detach", "expand", "view"}
_SAME = {"__rshift__": "bitwise_right_shift", "__lshift__": "bitwise_left_shift"}  # two names of one operation
_DIVISIONS = {"div", "floor_divide", "remainder"}
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}

Bounds = tuple[float, float]
UNBOUNDED: Bounds = (-math.inf, math.inf)
_TENSOR: Any = torch.Tensor
# What a function calls to ask for a dtype, and casts, which do nothing if a tensor has the dtype already.
_QUESTIONS = _TENSOR.dtype.__get__, _TENSOR.itemsize.__get__, _TENSOR.element_size, torch.result_type
_CASTS = _TENSOR.int, _TENSOR.to, _TENSOR.type


class Trace(compat.TorchDispatchMode):
    """Follows the operations of a function: constants, bounds, and errors met.

    torch's own tracer would make torch refuse compiled calls in all threads while it traces; a mode affects one thread.
    Tensors are known by their ids.
    """

    compiler = "its compiler"

    def __init__(self, is_score: bool) -> None:
        super().__init__()
        self.is_score = is_score
        self.errors: dict[str, None] = {}  # in the order met
        self.divisions = 0  # divisions and remainders
        self._bounds: dict[int, Bounds] = {}
        self._constants: set[int] = set()
        self._held: list[Tensor] = []  # keeps the ids of tensors unique
        self._decompositions = compat.decompositions()

    def is_known(self, name: str, args: Any) -> bool:
        """Return whether the operation is on the list."""
        raise NotImplementedError

    def find_errors(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        """Note errors of an operation on the list, whose result and its bounds are known already."""
        raise NotImplementedError

    def start(self, scores: Sequence[Tensor], indices: Sequence[Tensor]) -> None:
        """Note what the function is called with: perhaps a score, and b, h, q, kv."""

    def meet(self, name: str, args: Any) -> None:
        """Note errors of an operation before the compiler takes it apart."""

    def check_result(self, value: Any) -> None:
        """Note errors that only show in what the function returns."""

    def learn(self, x: Tensor, bounds: Bounds) -> None:
        """Note a tensor of the function's own with the bounds of its values."""
        self._held.append(x)
        self._bounds[id(x)] = UNBOUNDED if any(map(math.isnan, bounds)) else bounds

    def bounds_of(self, name: str, out: Tensor, args: Any, kwargs: Any) -> Bounds:
        """Return the bounds of an operation's results."""
        return UNBOUNDED

    def is_wider_in_python(self, x: Tensor) -> bool:
        """Return whether a tensor has another dtype where indices have 64 bits."""
        return False

    def cast(self, x: Tensor, is_index: bool = False) -> Tensor:
        """Return what a cast of an index to 32 bits, which kernels count in, or to the type of an index, makes."""
        return x

    def varies(self, x: Any) -> bool:
        """Return whether the compiler sees a value that is not constant."""
        return isinstance(x, Tensor) and id(x) not in self._constants

    def is_captured(self, x: Tensor) -> bool:
        """Return whether a tensor is none of the function's own."""
        return id(x) not in self._bounds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        name = _SAME.get(name, name)
        if func.namespace == "prim":  # not a computation: a query of a tensor's device, say
            return func(*args, **kwargs)
        self.meet(name, args)
        for decomposed in (self._decompositions.get(func), func.decompose):
            if decomposed is not None:
                with self:
                    out = decomposed(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        out = func(*args, **kwargs)
        self.divisions += name in _DIVISIONS
        if func._schema.is_mutable or not self.is_known(name, args) or not isinstance(out, Tensor):
            self.errors[f"{self.compiler} is not known to compile `{name}` correctly"] = None
        else:
            tensors = [x for x in args if isinstance(x, Tensor)]
            is_zero = name == "mul" and any(type(x) is int and x == 0 for x in args)
            if name in MAKE_CONSTANTS or is_zero or (name != "index" and not any(map(self.varies, tensors))):
                self._constants.add(id(out))
            self.learn(out, self.bounds_of(name, out, args, kwargs))
            self.find_errors(name, out, args, kwargs)
        return out


class _Lookups(TorchFunctionMode):
    """Shows indexing by numbers as one operation, as torch does where it traces a function for flex_attention."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            if all(isinstance(i, Tensor | int) for i in index):
                numbers = [i if isinstance(i, Tensor) else torch.tensor(i, device=tensor.device) for i in index]
                return torch.ops.aten.index(tensor, numbers)
        return func(*args, **(kwargs or {}))


class _Questions(TorchFunctionMode):
    """Notes an error if a function asks for a dtype that differs in Python."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _CASTS and out is args[0] and self._trace.is_wider_in_python(out):
            return self._trace.cast(out)
        if func is _TENSOR.type_as and self._trace.is_wider_in_python(args[1]):
            return self._trace.cast(out, is_index=True)
        asks = func in _QUESTIONS or (func in _CASTS and isinstance(out, str))
        if asks and any(isinstance(x, Tensor) and self._trace.is_wider_in_python(x) for x in args):
            self._trace.errors[DTYPE] = None
        return out


class _ReadsOfPairs(Trace):
    """Counts the bytes that a function reads for each pair of a query and a key."""

    def __init__(self, is_score: bool) -> None:
        super().__init__(is_score)
        self.bytes = 0
        self._sides: dict[int, frozenset[str]] = {}  # by id of a value: whether it depends on the query, and on the key

    def start(self, scores: Sequence[Tensor], indices: Sequence[Tensor]) -> None:
        self._sides = {id(x): frozenset([side]) for x, side in zip(indices[2:], ("q", "kv"), strict=True)}

    def is_known(self, name: str, args: Any) -> bool:
        return True

    def find_errors(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        given = itertools.chain.from_iterable(
            x if isinstance(x, list | tuple) else [x] for x in (*args, *kwargs.values())
        )
        operands = [x for x in given if isinstance(x, Tensor)]
        sides = frozenset[str]().union(*(self._sides.get(id(x), ()) for x in operands))
        self._sides[id(out)] = sides
        if len(sides) == 2 and any(x.ndim and not self._sides.get(id(x)) for x in operands):
            self.bytes += out.element_size()


def bytes_for_pairs(
    function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int], is_score: bool
) -> int | None:
    """Return how many bytes a mask_mod or score_mod reads for each pair of a query and a key; None if nobody can tell.

    sizes: batch, query heads, queries and keys.
    """
    trace = _ReadsOfPairs(is_score)
    _, value = follow(trace, function, device, sizes, is_score)
    return None if value is None else trace.bytes


class _Comparisons(Trace):
    """Notes whether a function compares floating numbers."""

    of_floats = False

    def is_known(self, name: str, args: Any) -> bool:
        return True

    def find_errors(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        is_float = (isinstance(x, float) or (isinstance(x, Tensor) and x.is_floating_point()) for x in args)
        self.of_floats |= name in COMPARISONS and any(is_float)


def compares_floats(function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int]) -> bool:
    """Return whether a mask_mod compares floating numbers, up to an operation that cannot be traced."""
    trace = _Comparisons(is_score=False)
    follow(trace, function, device, sizes, is_score=False)
    return trace.of_floats


def follow(
    trace: Trace, function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int], is_score: bool
) -> tuple[str | None, Any]:
    """Follow a mask_mod or score_mod.

    Returns the first error, or None, and what the function returned.

    sizes: batch, query heads, queries and keys.
    """
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(compat.compile_lock)
            for context in (torch.no_grad(), compat.outside_transforms(), compat.without_dispatch_modes()):
                stack.enter_context(context)
            stack.enter_context(compat.fake_mode())
            indices = [torch.zeros((), dtype=torch.int32, device=device) for _ in sizes]
            for x, n in zip(indices, sizes, strict=True):
                trace.learn(x, (0, n - 1))
            scores = [torch.zeros((), device=device)] if is_score else []
            for x in scores:
                trace.learn(x, UNBOUNDED)
            trace.start(scores, indices)
            with _Lookups(), _Questions(trace), trace:
                value = function(*scores, *indices)
    except Exception as error:
        what = error if isinstance(error, compat.MissingFromTorch) else type(error).__name__
        return f"{UNREADABLE}: {what}", None
    trace.check_result(value)
    return next(iter(trace.errors), None), value
