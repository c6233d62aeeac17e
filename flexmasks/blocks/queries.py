"""Which queries see a key, exactly, in memory that does not grow with the number of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmasks.blocks.decide import Axis, decide, dependence
from flexmasks.blocks.elements import Elements, MaskMod
from flexmasks.blocks.strips import moved

_BLOCK = 128
_BLOCKS_OF_STRIP = 1 << 22  # over all batch elements, heads and keys


def queries_that_see(
    mask_mod: MaskMod, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device
) -> Tensor:
    """Which queries see a key, bool [B, H, Q], with B and H 1 if the mask does not depend on the index."""
    batch, heads = dependence(mask_mod, batch, heads, device) if batch * heads > 1 else (1, 1)
    columns = Axis(kv_len, _BLOCK)
    height = _BLOCK * max(1, _BLOCKS_OF_STRIP // (batch * heads * columns.count))
    strips = []
    for first in range(0, q_len, height):
        rows = Axis(min(height, q_len - first), _BLOCK)
        strips.append(_of_strip(moved(mask_mod, first, 0), batch, heads, rows, columns, device))
    return torch.cat(strips, -1)


def _of_strip(mask_mod: MaskMod, batch: int, heads: int, rows: Axis, columns: Axis, device: torch.device) -> Tensor:
    decided = decide(mask_mod, batch, heads, rows, columns, device)
    shape = batch, heads, rows.count, columns.count
    certain, possible = (x.expand(shape).to(device) for x in (decided.certain, decided.possible))
    sees_block = certain.any(-1)
    seen = sees_block[..., None].expand(-1, -1, -1, _BLOCK).contiguous()  # [B, H, rows, queries of a block]
    undecided = possible & ~sees_block[..., None]
    # The first undecided block of each row of blocks, then the second one: most queries see a key in the first ones.
    blocks = undecided.nonzero()[undecided.cumsum(-1)[undecided].argsort(stable=True)]
    elements = Elements(mask_mod, device, decided.widest)
    at_once, inside = elements.blocks_at_once(_BLOCK * _BLOCK), torch.arange(_BLOCK, device=device)
    while len(blocks):
        b, h, row, column = blocks[:at_once].unbind(1)
        visible = elements(b, h, rows.positions(row, inside), columns.positions(column, inside))
        block, place = visible.any(-1).nonzero().unbind(1)
        seen[b[block], h[block], row[block], place] = True
        b, h, row, _ = blocks[at_once:].unbind(1)
        blocks = blocks[at_once:][~seen.all(-1)[b, h, row]]
    return seen.flatten(2)[..., : rows.length]


def first_key(mask_mod: MaskMod, b: int, h: int, q: int, kv_len: int, device: torch.device) -> int:
    """The first key that a query sees, which must see one."""
    b_, h_ = (torch.tensor([n], device=device) for n in (b, h))
    keys = torch.arange(kv_len, device=device)
    return int(Elements(mask_mod, device)(b_, h_, torch.tensor([[q]], device=device), keys[None]).int().argmax())
