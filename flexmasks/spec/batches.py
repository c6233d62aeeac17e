"""Masks and scores as nodes of torch's pytrees, so that torch's pipelines split them with their microbatches.

torch.distributed.pipelining splits the tensors among the leaves of its arguments along the first dimension. One leaf
stands for a mask: the indices of its batch elements. Of all of them the mask itself comes back, of some of them a mask
for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmasks import compat
from flexmasks.spec.definitions import add_operator, define
from flexmasks.spec.parameters import Parameter, Size, can_be_read, implied_size
from flexmasks.spec.values import Mask, Modifier, Score

_Value = TypeVar("_Value", bound=Modifier)


class _Shared:
    """The leaf of a mask that is the same for all batch elements."""


class _Unknown(Tensor):
    """The leaf of a mask that differs among batch elements, whose number is not known."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (func is torch.tensor_split and args[1] != 1) or func is Tensor.__getitem__:
            raise ValueError(
                "flexmasks: a mask or score whose function reads the batch index in a way of its own cannot be split "
                "into microbatches, because nothing says how many batch elements it is for: read tensors by it, as in "
                "`ids[b, q]`, or make the mask in the module's `forward`, of tensors that are split."
            )
        return super().__torch_function__(func, types, args, kwargs or {})


_CPU = torch.device("cpu")
_MOST_CHUNKS = 4096  # torch asks whether a leaf has an element for each microbatch


# --- how many batch elements a mask is for ---


class _Reads(TorchFunctionMode):
    """Notes the lengths of tensors that a function reads by its batch index, and None for any other use of it."""

    def __init__(self, b: Tensor) -> None:
        super().__init__()
        self._b, self.lengths = b, set[int | None]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[0] is not self._b:
            first, *others = args[1] if isinstance(args[1], tuple) else (args[1],)
            if first is self._b:
                self.lengths.add(len(args[0]))
                args = args[0], (first.clone(), *others)
        groups = [x if isinstance(x, list | tuple) else [x] for x in (*args, *(kwargs or {}).values())]
        if any(x is self._b for group in groups for x in group):
            self.lengths.add(None)
        return func(*args, **(kwargs or {}))


def _batches_of(value: Modifier) -> set[int | None]:
    """Return the numbers of batch elements of what a mask or score reads by their index; None stands for any number."""
    definition = value._definition
    found = set[int | None]().union(*map(_batches_of, value._operands()))
    if not definition.by_library or (found and definition.inner_size is not None):
        found = _read_by(value)
    found.add(implied_size("B", definition.parameters, value.params) or 1)
    return found - {1}


def _read_by(value: Modifier) -> set[int | None]:
    b, h, q, kv = (torch.tensor(0, device=_CPU) for _ in range(4))
    score = [torch.tensor(0.0, device=_CPU)] if isinstance(value, Score) else []
    reads = _Reads(b)
    with torch.no_grad(), reads:
        try:
            value._standalone(_CPU)(*score, b, h, q, kv)
        except Exception:  # the function is a user's
            reads.lengths.add(None)
    return reads.lengths


# --- a mask for some of its batch elements ---


def _of_some(value: _Value, rows: list[int], batch: int) -> _Value:
    """Return a mask or score of `batch` batch elements for those of these numbers."""
    if not _batches_of(value):
        return value
    definition = value._definition
    if definition.by_library and definition.inner_size is None:
        params = {n: _param(definition.parameters[n], x, rows, batch) for n, x in value.params.items()}
        return type(value)(definition, params)
    given = {"inner": value, "rows": rows, "batch": batch}
    return type(value)._of(_MASK_OF_SOME if isinstance(value, Mask) else _SCORE_OF_SOME, given)


def _param(parameter: Parameter, given: Any, rows: list[int], batch: int) -> Any:
    if isinstance(given, Modifier):
        return _of_some(given, rows, batch)
    if isinstance(given, tuple) and any(isinstance(x, Modifier) for x in given):
        return tuple(_param(parameter, x, rows, batch) for x in given)
    if implied_size("B", {parameter.name: parameter}, {parameter.name: given}) != batch:
        return given  # it is the same for all batch elements
    if not isinstance(given, Tensor):
        return tuple(given[row] for row in rows)
    first, end = (rows[0], rows[-1] + 1) if rows else (0, 0)
    return given[first:end] if rows == [*range(first, end)] else given[rows]


def _prepare(
    size: Size | None, *, inner: Any, rows: Annotated[Tensor, "int[B]"], batch: Annotated[int, "length in 0.."]
) -> dict[str, Any]:
    return {"inner": inner, "rows": rows}


def _size_of_all(size: Size, *, inner: Any, rows: Tensor, batch: int) -> Size:
    return replace(size, batch=batch, starts=None, most_queries=None, end_to_end=None)


def _of_rows(*indices: Tensor, inner: Callable[..., Tensor], rows: Tensor) -> Tensor:
    *score, b, h, q, kv = indices
    return inner(*score, rows[b], h, q, kv)


_HOOKS: dict[str, Any] = {"registered": True, "prepare": _prepare, "inner_size": _size_of_all}
_MASK_OF_SOME = add_operator(define("mask", _of_rows, "mask_of_some", **_HOOKS))
_SCORE_OF_SOME = add_operator(define("score", _of_rows, "score_of_some", **_HOOKS))


# --- nodes of pytrees ---


def _flatten(value: Modifier) -> tuple[list[Any], tuple[Modifier, int]]:
    # Nothing is split inside torch.compile, fake modes and transforms of torch.func, whose leaf it would be.
    is_traced = compat.transforms_active() or not can_be_read(torch.empty(0, device=_CPU))
    if is_traced or not (batches := _batches_of(value)):
        return [_Shared()], (value, 0)
    counts = [n for n in batches if n is not None]
    if len(counts) != 1:
        return [torch.zeros(_MOST_CHUNKS, dtype=torch.int8, device=_CPU).as_subclass(_Unknown)], (value, _MOST_CHUNKS)
    return [torch.arange(counts[0], device=_CPU)], (value, counts[0])


def _unflatten(leaves: Iterable[Any], context: tuple[Modifier, int]) -> Any:
    (leaf,), (value, batch) = leaves, context
    if isinstance(leaf, _Shared | _Unknown):
        return value
    if not isinstance(leaf, Tensor):
        return (leaf,)  # what a caller put in place of the leaf, in a tree of the same form, as a spec of the arguments
    if not can_be_read(leaf) and len(leaf) == batch:
        return value
    rows = leaf.tolist()
    return value if rows == [*range(batch)] else _of_some(value, rows, batch)


for _kind in (Mask, Score):
    compat.register_pytree_node(_kind, _flatten, _unflatten)
