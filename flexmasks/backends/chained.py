"""Chained indexing, `table[q][kv]`, read as one index, `table[q, kv]`.

Kernels cannot hold the row `table[q]`.
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
