"""The operator torch.ops.flexmasks.visible_tiles: the tiles of keys that some query sees.

visible_tiles(visible) of booleans [B, H, Q, KV] is (counts, tiles): int32 [B, H], how many tiles of 128 keys have a
key that some query sees, and int32 [B, H, ceil(KV / 128)], these tiles in order, and behind them all others.

A Triton kernel runs the operator on a GPU, and plain torch elsewhere.

Example:

>>> visible = torch.arange(300).view(1, 1, 1, 300) >= 200
>>> visible_tiles(visible)
[tensor([[2]], dtype=torch.int32), tensor([[[1, 2, 0]]], dtype=torch.int32)]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmasks.kernels.few_queries_plain import TILE


@torch.library.custom_op("flexmasks::visible_tiles", mutates_args=())
def visible_tiles(visible: Tensor) -> list[Tensor]:
    """Run the operator; see the top of the file."""
    if visible.is_cuda:
        from flexmasks.kernels.visible_tiles_kernel import tiles_of  # needs Triton

        return tiles_of(visible)
    seen = F.pad(visible.any(2), (0, -visible.shape[-1] % TILE)).unflatten(-1, (-1, TILE)).any(-1)
    return [seen.sum(-1, dtype=torch.int32), torch.argsort(~seen, dim=-1, stable=True).int()]


@visible_tiles.register_fake
def _(visible: Tensor) -> list[Tensor]:
    batch, heads, _, keys = visible.shape
    return [visible.new_empty(shape, dtype=torch.int32) for shape in ((batch, heads), (batch, heads, -(-keys // TILE)))]
