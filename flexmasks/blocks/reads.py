"""Where a mask's function reads outside of a tensor that it captured."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmasks.blocks.elements import MaskMod
from flexmasks.ranges import Range
from flexmasks.ranges.context import current_evaluation, index_guard

_INDICES = (torch.int32, torch.int64)


def reads_outside(mask_mod: MaskMod, *, before: bool = False, of: Tensor | None = None) -> MaskMod:
    """A mask of the pairs at which a function reads a tensor at an index that the tensor does not have. It never fails
    for such an index.

    before: show the pairs of negative indices instead, for which Python takes elements from the end.
    of: look at this tensor alone; rows of it are not seen where ranges give up.
    """

    def reads(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        found: list[Any] = [torch.zeros((), dtype=torch.bool, device=q.device)]

        def guarded(table: Any, index: Any, n: int) -> Any:
            if type(index) is not int and not _is_index(index):
                return index
            outside = (index >= n) | (index < -n)
            if of is None or table is of:
                shown = index < 0 if before else outside
                found.append(torch.full((), shown, device=q.device) if type(shown) is bool else shown)
            if type(index) is int:
                return 0 if outside else index
            if isinstance(outside, Range) and not outside.hi.any():
                return index  # ranges know more of an index that is not clamped
            return index.clamp(-n, n - 1)  # not torch.clamp, which knows no ranges here

        if current_evaluation.get() is None:
            with _GuardedLookups(guarded):
                mask_mod(b, h, q, kv)
        else:
            token = index_guard.set(guarded)
            try:
                mask_mod(b, h, q, kv)
            finally:
                index_guard.reset(token)
        result: Tensor = functools.reduce(operator.or_, found)
        return result

    return reads


def _is_index(index: Any) -> bool:
    return isinstance(index, Range | Tensor) and index.dtype in _INDICES


class _GuardedLookups(TorchFunctionMode):
    def __init__(self, guarded: Callable[[Any, Any, int], Any]) -> None:
        super().__init__()
        self._guarded = guarded

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if all(isinstance(i, int | slice | Tensor) for i in indices):
                places = zip(indices, table.shape, strict=False)
                args = table, tuple(self._guarded(table, i, n) for i, n in places)
        elif func in (torch.take, Tensor.take):
            table, index = args
            args = table, self._guarded(table, index, table.numel())
        return func(*args, **(kwargs or {}))
