"""The operator torch.ops.flexmasks.visible_tiles: the tiles of keys that queries see.

visible_tiles(visible) of booleans [B, H, Q, KV] is (partial_counts, partial, full_counts, full). A tile is 128 keys;
the last one may have fewer. In a full tile all queries see all keys, in a partial tile some query sees some key. Counts
are int32 [B, H]. Lists are int32 [B, H, ceil(KV / 128)], and have these tiles in order, and behind them all others.

A Triton kernel runs the operator on a GPU, and plain torch elsewhere.

Example:

>>> visible = torch.arange(400).view(1, 1, 1, 400) >= 200
>>> visible_tiles(visible)[:2]
[tensor([[1]], dtype=torch.int32), tensor([[[1, 0, 2, 3]]], dtype=torch.int32)]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmasks.kernels.direct import on
from flexmasks.kernels.few_queries_checks import TILE
from flexmasks.kernels.operators import define


def _run(visible: Tensor) -> list[Tensor]:
    if visible.is_cuda:
        from flexmasks.kernels.visible_tiles_kernel import tiles_of  # needs Triton

        with on(visible.device):
            return tiles_of(visible)
    more = -visible.shape[-1] % TILE
    seen = F.pad(visible.any(2), (0, more)).unflatten(-1, (-1, TILE)).any(-1)
    full = F.pad(visible.all(2), (0, more), value=True).unflatten(-1, (-1, TILE)).all(-1)
    return [*_listed(seen & ~full), *_listed(full)]


def _fake(visible: Tensor) -> list[Tensor]:
    batch, heads, _, keys = visible.shape
    shapes = 2 * [(batch, heads), (batch, heads, -(-keys // TILE))]
    return [visible.new_empty(shape, dtype=torch.int32) for shape in shapes]


def _listed(marked: Tensor) -> list[Tensor]:
    return [marked.sum(-1, dtype=torch.int32), torch.argsort(~marked, dim=-1, stable=True).int()]


visible_tiles = define("visible_tiles(Tensor visible) -> Tensor[]", _run, _fake)
