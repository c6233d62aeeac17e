"""The greatest score of each query among the keys that it sees. No gradient flows through it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.elements import over_indices
from flexmasks.blocks.lists import of_block_mask, pairs_shown
from flexmasks.kernels.separate import positions

_MAX_SCORES = 1 << 24  # scores held at once


def greatest_scores(
    q: Tensor, k: Tensor, score_mod: Callable[..., Tensor] | None, block_mask: Any, scale: float | None
) -> Tensor:
    """Return the greatest score of each query, [B, H, Q], -inf for one that sees nothing.

    The result is float32, or float64 if q is. On a GPU torch's kernel gives it, elsewhere plain torch does.

    q: [B, H, Q, D]; k: [B or 1, Hkv, KV, D]. block_mask: None if every key is seen.
    """
    with torch.no_grad():
        if not q.is_cuda:
            return _by_slices(q, k, score_mod, block_mask, scale)
        attend = compiled_flex_attention()
        q, k = q.detach(), k.detach().to(q.dtype).expand(q.shape[0], -1, -1, -1)
        grouped = q.shape[1] != k.shape[1]
        _, aux = attend(
            q, k, k.view_as(k), score_mod, block_mask, scale, grouped, return_aux=compat.AuxRequest(max_scores=True)
        )
        return cast(Tensor, aux.max_scores)


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(compat.flex_attention)


def _by_slices(
    q: Tensor, k: Tensor, score_mod: Callable[..., Tensor] | None, block_mask: Any, scale: float | None
) -> Tensor:
    batch, heads, q_len, size = q.shape
    precise = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = k.detach().to(precise).repeat_interleave(heads // k.shape[1], 1).mT
    scaled = q.detach().to(precise) * (1 / math.sqrt(size) if scale is None else scale)
    b, h, kv = (positions(n, q.device) for n in (batch, heads, k.shape[2]))
    step = max(1, _MAX_SCORES // (batch * heads * k.shape[2]))
    blocks = None if block_mask is None else of_block_mask(block_mask)
    parts = []
    for start in range(0, q_len, step):
        rows = positions(min(start + step, q_len), q.device, start)
        scores = scaled[:, :, start : start + step] @ keys
        if score_mod is not None:
            scores = over_indices(score_mod, (0,))(scores, b, h, rows, kv).to(precise)
        if blocks is not None:
            by_function = over_indices(block_mask.mask_mod)(b, h, rows, kv)
            visible = pairs_shown(blocks, block_mask.BLOCK_SIZE, rows, kv, by_function)
            scores = torch.where(visible, scores, -math.inf)
        parts.append(scores.amax(-1))
    return torch.cat(parts, 2)
