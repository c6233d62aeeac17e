from typing import Annotated

import torch
from torch import Tensor

from flexmasks.spec import register_mask


@register_mask(example=lambda length: {"length": length // 2})
def eagle3(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, length: Annotated[int, "int in 1.."]) -> Tensor:
    """Training of a draft model for several steps: causal keys of the first step, then each query's own of the others.

    length: number of positions of a step. The keys are those of step 0, causal, then `length` of each later step, of
        which query q sees only the q-th.
    Tokens of padding on the right of a step are seen by such tokens only.

    Source: Li et al., EAGLE-3, 2025 (training-time test).
    Peers: SpecForge generate_eagle3_mask(seq_lengths, Q_LEN=length), which also hides the rows of padding.
    """
    return (kv <= q) & (kv < length) | (kv >= length) & ((kv - q) % length == 0)


@register_mask(example=lambda length: {"length": length // 2, "block": length // 16})
def block_diffusion(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    length: Annotated[int, "int in 1.."],
    block: Annotated[int, "int in 1.."],
) -> Tensor:
    """Training of block diffusion: a noised copy of the tokens, then the clean ones.

    length: number of tokens; positions 0 to length - 1 are noised, the next `length` are clean.
    block: number of tokens of a block. Noised tokens see their own block of noised tokens and the blocks of clean
        tokens before it; clean tokens see the clean blocks up to their own.

    Source: Arriola et al., Block Diffusion (BD3-LM), 2025, figure 3.
    Peers: attention-gym generate_block_diffusion_mask(length, block).
    """
    q_noised, kv_noised = q < length, kv < length
    row = torch.where(q_noised, q, q - length) // block
    column = torch.where(kv_noised, kv, kv - length) // block
    own = (row == column) & (q_noised == kv_noised)
    return own | ((column < row) & ~kv_noised)
