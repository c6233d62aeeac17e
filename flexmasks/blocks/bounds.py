"""Blocks from ranges alone, by tensor operations of fixed shapes.

A block that ranges cannot decide counts as partial: kernels evaluate the mask there, so attention is exact all the
same. No value of a tensor is read by the host. The operations can be traced, compiled, and captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from flexmasks import compat
from flexmasks.blocks import limits
from flexmasks.blocks.build import Layout
from flexmasks.blocks.decide import Axis, decide
from flexmasks.blocks.elements import MaskMod
from flexmasks.kernels.index_lists import index_lists, plain_index_lists


def bounds(
    mask_mod: MaskMod,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    block_size: tuple[int, int] = (128, 128),
) -> Layout:
    """Find the blocks that are certainly full, and the blocks that are possibly visible.

    Every visible pair is in a partial or full block, and no hidden pair in a full block. Partial blocks may be empty or
    full.

    Raises ValueError or TypeError where the function is not a mask.
    """
    rows, columns = Axis(q_len, block_size[0]), Axis(kv_len, block_size[1])
    if not compat.is_compiling():
        limits.check_blocks(1, (q_len, kv_len), block_size, device)
    decided = decide(mask_mod, batch, heads, q_len, kv_len, device, block_size, reads_values=False)
    shape = (*decided.certain.shape[:2], rows.count, columns.count)
    full, possible = decided.certain.expand(shape), decided.possible.expand(shape)
    if q_len % block_size[0]:  # for torch a block that the edge cuts is partial: pairs past the edge are hidden
        full = full & (torch.arange(rows.count, device=device) < rows.count - 1)[:, None]
    if kv_len % block_size[1]:
        full = full & (torch.arange(columns.count, device=device) < columns.count - 1)
    # A compiler that sees the operations fuses them; on a CPU the operator would only be one more call.
    make_lists = index_lists if device.type == "cuda" else plain_index_lists
    return Layout(
        q_len=q_len,
        kv_len=kv_len,
        block_size=block_size,
        indices=tuple(make_lists((possible & ~full).contiguous(), full.contiguous())),
        undecided=None,
        not_understood=decided.not_understood,
    )
