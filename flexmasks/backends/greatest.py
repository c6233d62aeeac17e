"""The greatest score of each query among the keys that it sees, in plain torch. No gradient flows through it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flexmasks.blocks.elements import over_indices

_MAX_SCORES = 1 << 24  # scores held at once


def greatest_scores(
    q: Tensor, k: Tensor, score_mod: Callable[..., Tensor] | None, mask_mod: Callable[..., Tensor], scale: float | None
) -> Tensor:
    """Return the greatest score of each query, [B, H, Q], -inf for one that sees nothing.

    The result is float32, or float64 if q is.

    q: [B, H, Q, D]; k: [B, Hkv, KV, D].
    """
    batch, heads, q_len, size = q.shape
    precise = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = k.detach().to(precise).repeat_interleave(heads // k.shape[1], 1).mT
    scaled = q.detach().to(precise) * (1 / math.sqrt(size) if scale is None else scale)
    b, h, kv = (torch.arange(n, device=q.device) for n in (batch, heads, k.shape[2]))
    step = max(1, _MAX_SCORES // (batch * heads * k.shape[2]))
    parts = []
    with torch.no_grad():
        for start in range(0, q_len, step):
            rows = torch.arange(start, min(start + step, q_len), device=q.device)
            scores = scaled[:, :, start : start + step] @ keys
            if score_mod is not None:
                scores = over_indices(score_mod, (0,))(scores, b, h, rows, kv).to(precise)
            parts.append(torch.where(over_indices(mask_mod)(b, h, rows, kv), scores, -math.inf).amax(-1))
    return torch.cat(parts, 2)
