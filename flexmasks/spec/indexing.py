"""Helpers for writing mask and score functions and their `prepare` functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flexmasks.spec.parameters import Size, may_read

_DEVICES_OF_CONSTANT_INDICES = ("cpu",)  # devices whose compiled kernels take a Python number as an index


def per_batch(value: int | Tensor, b: Tensor) -> int | Tensor:
    """Return batch element `b`'s value of a parameter: one number, or one number per batch element."""
    return value[b] if isinstance(value, Tensor) and value.ndim else value


def at(table: Tensor, b: Tensor, position: Tensor) -> Tensor:
    """Return a table's value at `position`; the table is [positions], or [batch, positions]."""
    return table[b, position] if table.ndim == 2 else table[position]


def at_head(table: Tensor, b: Tensor, h: Tensor, position: Tensor) -> Tensor:
    """Return a table's value at `position`; the table may be one for `at`, or [batch or 1, heads or 1, positions]."""
    return table[*leading(table, b, h, position), position] if table.ndim == 3 else at(table, b, position)


def always(n: int, index: Tensor) -> Tensor | int:
    """Return the constant `n` in a form that every compiler accepts as an index.

    FLASH's compiler accepts no constant index, so on a GPU the constant is computed from `index`, one of the
    function's own indices. `index % 1` is used because torch folds `index * 0` into a constant. On a CPU the plain
    number makes kernels up to 1.5 times as fast.
    """
    if index.device is None or index.device.type in _DEVICES_OF_CONSTANT_INDICES:  # None: an index of a formula
        return n
    return index % 1 + n if n else index % 1


def leading(table: Tensor, b: Tensor, h: Tensor, other: Tensor) -> tuple[Any, ...]:
    """Return the indices of the batch and head dimensions of a table.

    A table [queries, keys] has none. In a dimension of size 1 the index is always 0. This 0 is made from the index
    `other`, so that the mask depends on b and h only if the table does.
    """
    if table.ndim == 2:
        return ()
    return tuple(i if n > 1 else always(0, other) for i, n in zip((b, h), table.shape, strict=False))


def bounded(table: Tensor, low: int, high: int) -> Tensor:
    """Note that a table's values lie in low..high, both included, and return the table.

    From these bounds, the checks of functions know that an index read from the table is not negative, and that sums of
    its values fit their type.
    """
    if not torch.compiler.is_dynamo_compiling():  # Dynamo knows no attributes of tensors
        table.bounds = low, high  # type: ignore[attr-defined]
    return table


def pair(value: Any) -> tuple[Any, Any]:
    """Return a parameter for two axes as a pair; a single value holds for both."""
    return value if isinstance(value, tuple) else (value, value)


def first_row(name: str, count: int, size: Size | None) -> int | Tensor:
    """Return the position of the query of a table's first row, for parameter `name` with `count` rows.

    It is one number, or int[batch]. A table has a row for each position, or for each query of the call. Raises
    ValueError for fewer rows, but for one.
    """
    if count == 1 or size is None:
        return 0
    starts = size.q_offset if size.starts is None else size.starts
    if count == size.q_len and "Q" not in size.at_most:
        return starts.clone() if isinstance(starts, Tensor) else starts  # kept, as the user's tensor must not be
    if size.most_queries is not None and "Q" in size.at_most and (isinstance(starts, Tensor) or starts):
        return torch.where(size.most_queries() == count, starts, 0).expand(size.batch)
    check_covers_queries(name, count, size)
    return 0


def row_of(table: Tensor, q: Tensor, first: int | Tensor, b: Tensor) -> Tensor:
    """Return the row of a query in a table; one row is that of all."""
    if table.shape[-2] == 1:
        return q * 0
    if isinstance(first, Tensor):
        return q - (first[b] if first.ndim else first).type_as(q)
    return q - first if first else q


def check_covers_queries(name: str, count: int, size: Size | None, what: str = "a row") -> None:
    """Raise ValueError if parameter `name` has `count` entries, too few for all positions of queries."""
    if size is not None and "S" not in size.at_most and count < size.positions_of_q:
        raise ValueError(
            f"`{name}` must have {what} for each of the {size.positions_of_q} positions of queries (positions before "
            f"q_offset count too), got {count}."
        )


def check_one_of_two(**given: Any) -> None:
    """Raise ValueError if neither or both of two parameters are given."""
    (name, one), (other_name, other) = given.items()
    if (one is None) == (other is None):
        got = "neither" if one is None else "both"
        raise ValueError(f"pass one of the two, `{name}` or `{other_name}`, got {got}.")


def entries_of_keys(size: Size | None, name: str, indices: Tensor, tokens: int, reason: str) -> int:
    """Return how many entries of some tokens the keys are, of which parameter `name` has indices.

    reason: what the ValueError says if an index is not below their number, with {keys} and {count} for both numbers.
    """
    used = int(indices.max()) + 1 if may_read(size, indices) and indices.numel() else 1
    if size is None:
        return used
    entries = -(-size.kv_len // tokens)
    if used > entries:
        why = reason.format(keys=size.kv_len, count=entries)
        raise ValueError(f"`{name}` must be below {entries}{why}, got {used - 1}.")
    return entries


def rows_of_csr(size: Size | None, crow_name: str, crow: Tensor, col_name: str, col: Tensor) -> Tensor:
    """Return the row of each entry of a matrix in the format CSR, or the number of rows for entries outside of all.

    crow: where the entries of each row start in `col`, and their number. ValueError if it does not rise from 0 to it.
    """
    starts = crow.long().contiguous()  # searchsorted warns of other tensors
    if may_read(size, crow):
        ends = torch.stack([starts[0], starts[-1]]).tolist() if len(starts) else []
        falls = (starts.diff() < 0).nonzero()[:, 0].tolist()
        if ends != [0, len(col)] or falls:
            got = f"{starts[falls[0] : falls[0] + 2].tolist()} at place {falls[0]}" if falls else f"ends {ends}"
            raise ValueError(f"`{crow_name}` must rise from 0 to {len(col)}, the length of `{col_name}`, got {got}.")
    return torch.searchsorted(starts, torch.arange(col.shape[0], device=starts.device), right=True) - 1


def check_canvas(size: Size | None, canvas: dict[str, int]) -> None:
    """Raise ValueError unless a call has exactly the tokens of the canvas, whose axes have names and lengths."""
    count = math.prod(list(canvas.values()))  # Dynamo traces no other form
    if size is not None and not (size.fits("KV", count) and size.fits("S", count)):
        terms = [" * ".join(canvas), *([" * ".join(map(str, canvas.values()))] if len(canvas) > 1 else []), str(count)]
        raise ValueError(
            f"the canvas does not match the length: {' = '.join(terms)}, "
            f"the call has {size.kv_len} keys and positions up to {size.positions}."
        )
