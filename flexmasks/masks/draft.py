from typing import Annotated

import torch
from torch import Tensor

from flexmasks.spec import register_mask

Length = Annotated[int, "int in 1.."]


@register_mask(example=lambda length: {"length": length // 2})
def eagle3(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, length: Length) -> Tensor:
    """Training of a draft model over several steps, as in EAGLE-3.

    Query q sees the keys of step 0 causally, and its own key, the q-th, of each later step.

    length: number of positions in a step. The keys of step 0 come first, then `length` keys for each later step.

    Padding at the end of a step is seen only by queries that are padding themselves.

    Source: Li et al., EAGLE-3, 2025 (training-time test).
    Peers: SpecForge generate_eagle3_mask(seq_lengths, Q_LEN=length), which also hides the rows of padding.
    """
    return (kv <= q) & (kv < length) | (kv >= length) & ((kv - q) % length == 0)


@register_mask(example=lambda length: {"length": length // 2, "block": length // 16})
def block_diffusion(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, length: Length, block: Length) -> Tensor:
    """Training of block diffusion: noised tokens, then the same tokens clean.

    Noised tokens see the noised tokens of their own block and the clean tokens of earlier blocks. Clean tokens see the
    clean tokens of their own and of earlier blocks.

    length: number of tokens; positions 0 to length - 1 are noised, the next `length` positions are clean.
    block: number of tokens in a block.

    Source: Arriola et al., Block Diffusion (BD3-LM), 2025, figure 3.
    Peers: attention-gym generate_block_diffusion_mask(length, block).
    """
    q_noised, kv_noised = q < length, kv < length
    row = torch.where(q_noised, q, q - length) // block
    column = torch.where(kv_noised, kv, kv - length) // block
    own = (row == column) & (q_noised == kv_noised)
    return own | ((column < row) & ~kv_noised)
