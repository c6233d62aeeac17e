"""Functions rewritten so that kernels compute them as Python does.

Kernels cannot hold the row `table[q]` of chained indexing, they count positions in 32 bits, in Triton they know no
negative indices, and on a CPU what depends on b or h alone does not widen what depends on q or kv.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.spec.structure import flatten


class _Rows:
    """A captured tensor, indexed so far by fewer indices than it has dimensions.

    from_the_front: whether negative indices, which count from the end, become others.
    """

    def __init__(self, table: Tensor, from_the_front: bool, indices: tuple[Any, ...] = ()) -> None:
        self.table, self.from_the_front, self.indices = table, from_the_front, indices

    def __getitem__(self, index: Any) -> Any:
        indices = (*self.indices, *(index if isinstance(index, tuple) else (index,)))
        if len(indices) < self.table.ndim:
            return _Rows(self.table, self.from_the_front, indices)
        if self.from_the_front:
            indices = tuple([_from_the_front(i, n) for i, n in zip(indices, self.table.shape, strict=True)])
        return self.table[indices]

    @property
    def shape(self) -> torch.Size:
        return self.table.shape[len(self.indices) :]


def _from_the_front(index: Any, length: int) -> Any:
    if isinstance(index, Tensor):
        return torch.where(index < 0, index + length, index).clamp(min=0)
    return index + length if type(index) is int and index < 0 else index


def with_one_index(function: Callable[..., Tensor], from_the_front: bool = False) -> Callable[..., Tensor] | None:
    """Return a function in which all indices of a captured tensor are one index.

    The function fails if it does anything else with such a tensor. The result is None if no tensor can be replaced.

    from_the_front: whether no index is negative.
    """
    structure, leaves = flatten(function)
    ndim = 1 if from_the_front else 2
    if structure.unreadable or all(t.ndim < ndim for t in leaves.tensors):
        return None
    made: Callable[..., Tensor] = structure.fill(
        [_Rows(t, from_the_front) if t.ndim >= ndim else t for t in leaves.tensors]
    )
    return made


def with_wide_positions(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a mask_mod or score_mod that computes with indices of 64 bits, as Python does."""

    def wide(*arguments: Tensor) -> Tensor:
        return function(*arguments[:-4], *[x.long() for x in arguments[-4:]])

    return wide


def with_wide_indices(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function with 64-bit indices, which all have dimensions.

    torch's CPU kernels give dimensions to q and kv only.
    """

    def wide(*arguments: Tensor) -> Tensor:
        b, h, q, kv = [x.long() for x in arguments[-4:]]
        return function(*arguments[:-4], torch.where(q < 0, q, b), torch.where(q < 0, q, h), q, kv)

    return wide


def _both(function: Callable[..., Tensor], from_the_front: bool = False) -> Callable[..., Tensor] | None:
    chained = with_one_index(function, from_the_front)
    return None if chained is None else with_wide_positions(chained)


# Ways to rewrite a function so that torch can trace the new one.
WAYS_IN_TRACE: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "with positions of 64 bits": with_wide_positions,
    "with b and h of as many dimensions as q": with_wide_indices,
}
# Ways to rewrite a function, cheapest first.
WAYS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor] | None]] = {
    "with chained indices as one index": with_one_index,
    **WAYS_IN_TRACE,
    "with chained indices as one index, and positions of 64 bits": _both,
}
FROM_THE_FRONT = {
    "with no negative index": functools.partial(with_one_index, from_the_front=True),
    "with no negative index, and positions of 64 bits": functools.partial(_both, from_the_front=True),
}
WAYS |= FROM_THE_FRONT
