"""Attention in plain operations, which ONNX has."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.elements import over_indices
from flexmasks.blocks.lists import of_block_mask, pairs_shown
from flexmasks.kernels.softmax_plain import softmax


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    mask_mod: Callable[..., Tensor],
    block_mask: compat.BlockMask | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Q, Dv] and the natural log-sum-exp [B, H, Q].

    score_mod, mask_mod: the bound functions of the score, or None, and of the mask.
    block_mask: the blocks in which the mask's function counts, None for all.
    """
    batch, heads, q_len, size = q.shape
    precise = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (x.to(precise).repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    indices = [torch.arange(n, device=q.device) for n in (batch, heads, q_len, k.shape[2])]
    scores = (q.to(precise) * (1 / math.sqrt(size) if scale is None else scale)) @ k.transpose(-2, -1)
    if score_mod is not None:
        scores = over_indices(score_mod, (0,))(scores, *indices).to(precise)
    visible = over_indices(mask_mod)(*indices)
    if block_mask is not None:
        visible = pairs_shown(of_block_mask(block_mask), block_mask.BLOCK_SIZE, indices[2], indices[3], visible)
    hidden = ~visible
    out = softmax(scores, hidden, 1.0) @ v
    sees_nothing = hidden.all(-1).expand(scores.shape[:-1])
    lse = scores.masked_fill(hidden, -math.inf).logsumexp(-1)
    return out.to(q.dtype), lse.masked_fill(sees_nothing, -math.inf)
