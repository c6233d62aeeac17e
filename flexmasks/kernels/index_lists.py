"""The operators torch.ops.flexmasks.index_lists, the lists of a BlockMask from booleans, and visible_tiles, the tiles
of keys that queries see.

index_lists(partial, full) of two booleans [B, H, rows, columns] is the eight index tensors of a BlockMask, in its
order: for partial and for full blocks the counts [B, H, rows] and the lists [B, H, rows, columns], then the same by
columns. A list names the marked places of a line in order, and behind them all other places, as torch has it.

visible_tiles(visible) of booleans [B, H, Q, KV] is (partial_counts, partial, full_counts, full). A tile is 128 keys;
the last one may have fewer. In a full tile all queries see all keys, in a partial tile some query sees some key. Counts
are int32 [B, H]. Lists are int32 [B, H, ceil(KV / 128)], and have these tiles in order, and behind them all others.

Triton kernels run the operators on a GPU, and plain torch elsewhere.

Example:

>>> visible = torch.arange(400).view(1, 1, 1, 400) >= 200
>>> visible_tiles(visible)[:2]
[tensor([[1]], dtype=torch.int32), tensor([[[1, 0, 2, 3]]], dtype=torch.int32)]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmasks.devices import runs_own_kernels
from flexmasks.kernels.direct import on
from flexmasks.kernels.few_queries_checks import TILE
from flexmasks.kernels.operators import define


def _run(partial: Tensor, full: Tensor) -> list[Tensor]:
    if runs_own_kernels(partial.device):
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


def _run_tiles(visible: Tensor) -> list[Tensor]:
    if runs_own_kernels(visible.device):
        from flexmasks.kernels.index_lists_kernel import tiles_of  # needs Triton

        with on(visible.device):
            return tiles_of(visible)
    more = -visible.shape[-1] % TILE
    seen = F.pad(visible.any(2), (0, more)).unflatten(-1, (-1, TILE)).any(-1)
    full = F.pad(visible.all(2), (0, more), value=True).unflatten(-1, (-1, TILE)).all(-1)
    return [*_listed(seen & ~full), *_listed(full)]


def _fake_of_tiles(visible: Tensor) -> list[Tensor]:
    batch, heads, _, keys = visible.shape
    shapes = 2 * [(batch, heads), (batch, heads, -(-keys // TILE))]
    return [visible.new_empty(shape, dtype=torch.int32) for shape in shapes]


def _listed(marked: Tensor) -> list[Tensor]:
    return [marked.sum(-1, dtype=torch.int32), torch.argsort(~marked, dim=-1, stable=True).int()]


visible_tiles = define("visible_tiles(Tensor visible) -> Tensor[]", _run_tiles, _fake_of_tiles)
