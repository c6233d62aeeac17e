"""The mask of a case, evaluated pair by pair, and attention by the naive formula."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from oracles.case import MASKS, Case, offsets, plain


@functools.cache  # keyed by the identity of a case; no test changes the result
def dense(case: Case) -> torch.BoolTensor:
    """Return the mask of a case as [B, H, Q, K], evaluated pair by pair."""
    oracle, params, starts = MASKS[case.name], plain(case.params), offsets(case)
    rows = [
        [
            [
                [oracle(b, h, starts[b] + row, kv, case, **params) for kv in range(case.kv_len)]
                for row in range(case.q_len)
            ]
            for h in range(case.heads)
        ]
        for b in range(case.batch)
    ]
    mask = torch.tensor(rows, dtype=torch.bool)
    assert mask.shape == (case.batch, case.heads, case.q_len, case.kv_len)
    return mask  # type: ignore[return-value]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scores_fn: Callable[[Tensor], Tensor] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [B, H, Q, Dv] and natural-log lse [B, H, Q] by the naive formula, in the inputs' dtype.

    Query head h uses key head h // (H // Hkv). A row that sees nothing gives exactly 0, and lse -inf.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    assert heads % kv_heads == 0
    assert v.shape[1] == kv_heads
    owner = [h // (heads // kv_heads) for h in range(heads)]
    k, v = k[:, owner], v[:, owner]
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if scores_fn is not None:
        scores = scores_fn(scores)
    visible = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
    some = visible.any(dim=-1)
    # Hidden scores are replaced before exp, and hidden results after exp: no inf or NaN can reach the backward pass.
    peak = scores.detach().masked_fill(~visible, -math.inf).amax(dim=-1, keepdim=True)
    peak = torch.where(some[..., None], peak, torch.zeros_like(peak))
    shifted = torch.where(visible, scores - peak, torch.zeros_like(scores))
    weights = torch.where(visible, shifted.exp(), torch.zeros_like(scores))
    total = weights.sum(dim=-1)
    total = torch.where(some, total, torch.ones_like(total))
    out = (weights / total[..., None]) @ v
    lse = torch.where(some, peak[..., 0] + total.log(), torch.full_like(total, -math.inf))
    return out, lse
