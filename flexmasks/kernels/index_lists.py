"""The operator torch.ops.flexmasks.index_lists: the lists of a BlockMask from booleans.

index_lists(partial, full) of two booleans [B, H, rows, columns] is the eight index tensors of a BlockMask, in its
order: for partial and for full blocks the counts [B, H, rows] and the lists [B, H, rows, columns], then the same by
columns. A list names the marked places of a line in order, and behind them all other places, as torch has it.

A Triton kernel runs the operator on a GPU, and plain torch elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmasks.kernels.direct import on
from flexmasks.kernels.operators import define


def _run(partial: Tensor, full: Tensor) -> list[Tensor]:
    if partial.is_cuda:
        from flexmasks.kernels.index_lists_kernel import lists_of  # needs Triton

        with on(partial.device):
            return [*lists_of(partial, full, by_row=True), *lists_of(partial, full, by_row=False)]
    return plain_index_lists(partial, full)


def _fake(partial: Tensor, full: Tensor) -> list[Tensor]:
    *outer, rows, columns = partial.shape
    by_row = [partial.new_empty(shape, dtype=torch.int32) for shape in ((*outer, rows), (*outer, rows, columns))]
    by_column = [partial.new_empty(shape, dtype=torch.int32) for shape in ((*outer, columns), (*outer, columns, rows))]
    return [torch.empty_like(t) for t in (*by_row, *by_row, *by_column, *by_column)]


def plain_index_lists(partial: Tensor, full: Tensor) -> list[Tensor]:
    """What the operator returns, by torch's own operations, which compilers can see through."""
    marked = torch.stack([partial, full])
    return [t for by_line in (marked, marked.mT) for t in plain_lists(by_line)]


def plain_lists(marked: Tensor) -> list[Tensor]:
    """Counts and lists of partial, then of full blocks, of bool [2, B, H, lines, places]."""
    up_to_place = torch.cumsum(marked, -1, dtype=torch.int32)
    counts = up_to_place[..., -1]
    places = torch.arange(marked.shape[-1], dtype=torch.int32, device=marked.device)
    in_list = torch.where(marked, up_to_place - 1, counts[..., None] + places - up_to_place)
    lists = torch.empty_like(up_to_place).scatter_(-1, in_list.long(), places.expand(marked.shape))
    return [t.clone(memory_format=torch.contiguous_format) for n in range(2) for t in (counts[n], lists[n])]


index_lists = define("index_lists(Tensor partial, Tensor full) -> Tensor[]", _run, _fake)
