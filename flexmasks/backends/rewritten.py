"""Functions rewritten so that kernels compute them as Python does.

Kernels cannot hold the row `table[q]` of chained indexing, and they count positions in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flexmasks.spec.captures import Opaque, Refilled, capture


class _Rows:
    """A captured tensor, indexed so far by fewer indices than it has dimensions."""

    def __init__(self, table: Tensor, indices: tuple[Any, ...] = ()) -> None:
        self.table, self.indices = table, indices

    def __getitem__(self, index: Any) -> Any:
        indices = (*self.indices, *(index if isinstance(index, tuple) else (index,)))
        return self.table[indices] if len(indices) == self.table.ndim else _Rows(self.table, indices)


def with_one_index(function: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    """Return a function in which all indices of a captured tensor are one index.

    The function fails if it does anything else with a tensor of more than one dimension. The result is None if no such
    tensor can be replaced.
    """
    captured: list[Tensor] = []
    try:
        capture(function, captured)
        tables = [t for t in captured if t.ndim > 1]
        return Refilled(function, tables)([_Rows(t) for t in tables]) if tables else None
    except Opaque:
        return None


def with_wide_positions(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a mask_mod or score_mod that computes with indices of 64 bits, as Python does."""

    def wide(*arguments: Tensor) -> Tensor:
        return function(*arguments[:-4], *[x.long() for x in arguments[-4:]])

    return wide


def _both(function: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    chained = with_one_index(function)
    return None if chained is None else with_wide_positions(chained)


# Ways to rewrite a function, cheapest first.
WAYS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor] | None]] = {
    "with chained indices as one index": with_one_index,
    "with positions of 64 bits": with_wide_positions,
    "with chained indices as one index, and positions of 64 bits": _both,
}
