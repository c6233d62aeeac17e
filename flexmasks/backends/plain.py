"""Attention in plain torch: the formula that several backends share, and calls that no backend runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.elements import over_indices
from flexmasks.blocks.lists import of_block_mask, pairs_shown
from flexmasks.devices import runs_triton
from flexmasks.kernels.operators import positions

_MAX_SCORES = 1 << 24  # scores held at once


# --- the formula ---


def scores_of(
    q: Tensor, k: Tensor, scale: float | None, change: Callable[[Tensor], Tensor] | None, visible: Tensor | None
) -> Tensor:
    """The scores [B, H, Q, KV] of q [B, H, Q, D] and k [B, Hkv, KV, D], changed, and -inf where a pair is hidden.

    visible: bool that broadcasts to the scores, None if all pairs are.
    """
    rows = _grouped(q * (1 / math.sqrt(q.shape[3]) if scale is None else scale), k)
    scores = (rows @ k.mT).reshape(*q.shape[:3], k.shape[2])
    if change is not None:
        scores = change(scores).to(q.dtype)
    return scores if visible is None else torch.where(visible, scores, -math.inf)


def attend(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output [B, H, Q, Dv], the lse [B, H, Q], and the weights before they are divided by their sum.

    scores: as `scores_of` returns them; v: [B, Hkv, KV, Dv]. A row without visible scores learns nothing.
    """
    weights, total, lse = exponentials(scores)
    out = (_grouped(weights, v) @ v).reshape(*scores.shape[:3], v.shape[3]) / total
    return out.masked_fill(lse == -math.inf, 0.0), lse[..., 0], weights


def tangents(
    scores: Tensor, slopes: Tensor, v: Tensor, v_tangent: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The tangents of output and lse, given those of the scores and of v.

    out, lse: of these scores, with attention sinks folded in or without.
    """
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    slopes = weights * slopes
    of_lse = slopes.sum(-1)
    of_out = (_grouped(weights, v) @ v_tangent + _grouped(slopes, v) @ v).reshape(out.shape)
    return of_out - of_lse[..., None] * out, of_lse


def exponentials(
    scores: Tensor,
    of_distances: Callable[[Tensor, Tensor], Tensor] = lambda scores, peak: (scores - peak).exp_(),
    base: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Exponentials of the distances of scores [..., KV] from the highest one, what divides them [..., 1], and the
    natural lse [..., 1]. Equal scores have equal weights, however low they are. Where all are -inf, all weights are 0.

    of_distances: returns the exponentials, given scores and the highest ones, which are logarithms to the base
        e ** (1 / base).
    """
    peak = scores.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == -math.inf, 0.0)
    weights = of_distances(scores, peak)
    total = weights.sum(-1, keepdim=True)
    sees_nothing = total == 0  # False if the total is NaN
    total = total.masked_fill(sees_nothing, 1.0)
    return weights, total, (total.log() + peak / base).masked_fill(sees_nothing, -math.inf)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[B, H, Q, N] with the heads that share a head of k as rows, [B, Hkv, H / Hkv * Q, N]."""
    return x.reshape(len(x), k.shape[1], -1, x.shape[3])


# --- calls that no backend runs ---


def attend_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    mask_mod: Callable[..., Tensor],
    block_mask: compat.BlockMask | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Output and lse of a call by operations that ONNX has.

    score_mod, mask_mod: the bound functions of the score, or None, and of the mask.
    block_mask: the blocks in which the mask's function counts, None for all.
    """
    precise = precise_dtype(q)
    indices = [torch.arange(n, device=q.device) for n in (*q.shape[:3], k.shape[2])]
    scores = scores_of(
        q.to(precise), k.to(precise), scale, _change(score_mod, *indices), _visible(mask_mod, block_mask, *indices)
    )
    out, lse, _ = attend(scores, v.to(precise))
    return out.to(q.dtype), lse


def precise_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _change(score_mod: Callable[..., Tensor] | None, *indices: Tensor) -> Callable[[Tensor], Tensor] | None:
    return None if score_mod is None else lambda scores: over_indices(score_mod, (0,))(scores, *indices)


def _visible(
    mask_mod: Callable[..., Tensor], block_mask: compat.BlockMask | None, b: Tensor, h: Tensor, q: Tensor, kv: Tensor
) -> Tensor:
    by_function = over_indices(mask_mod)(b, h, q, kv)
    if block_mask is None:
        return by_function
    return pairs_shown(of_block_mask(block_mask), block_mask.BLOCK_SIZE, q, kv, by_function)


def greatest_scores(
    q: Tensor, k: Tensor, score_mod: Callable[..., Tensor] | None, block_mask: Any, scale: float | None
) -> Tensor:
    """The greatest score of each query among the keys that it sees, [B, H, Q], -inf for one that sees nothing. No
    gradient flows through it.

    The result is float32, or float64 if q is. On a GPU torch's kernel gives it, elsewhere plain torch does.

    q: [B, H, Q, D]; k: [B or 1, Hkv, KV, D]. block_mask: None if every key is seen.
    """
    with torch.no_grad():
        q, k = q.detach(), k.detach()
        if runs_triton(q.device):
            k = k.to(q.dtype).expand(q.shape[0], -1, -1, -1)
            grouped = q.shape[1] != k.shape[1]
            _, aux = compiled_flex_attention()(
                q, k, k.view_as(k), score_mod, block_mask, scale, grouped, return_aux=compat.AuxRequest(max_scores=True)
            )
            return cast(Tensor, aux.max_scores)
        q, k = q.to(precise_dtype(q)), k.to(precise_dtype(q))
        b, h, kv = (positions(n, q.device) for n in (*q.shape[:2], k.shape[2]))
        step = max(1, _MAX_SCORES // (len(b) * len(h) * len(kv)))
        parts = []
        for start in range(0, q.shape[2], step):
            part = q[:, :, start : start + step]
            indices = b, h, positions(start + part.shape[2], q.device, start), kv
            visible = None if block_mask is None else _visible(block_mask.mask_mod, block_mask, *indices)
            parts.append(scores_of(part, k, scale, _change(score_mod, *indices), visible).amax(-1))
        return torch.cat(parts, 2)


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(compat.flex_attention)


def computes_nothing(*tensors: Any) -> bool:
    """Whether q, k or v is empty or has no data, as tensors on the meta device and of a FakeTensorMode."""
    return any(
        isinstance(x, Tensor) and (0 in x.shape or x.is_meta or isinstance(x, compat.FakeTensor)) for x in tensors
    )


def attend_nothing(q: Tensor, k: Tensor, v: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Output 0 [B, H, Q, Dv] and lse -inf [B, H, Q], as for rows that see nothing. All gradients are 0.

    learned: tensors of a score that require a gradient.
    """
    never = torch.zeros((), dtype=torch.bool, device=q.device)
    joined = sum((x.sum() for x in learned), q.sum() + k.sum() + v.sum()).to(q.dtype)
    out = torch.where(never, joined, 0.0).expand(*q.shape[:3], v.shape[3]).contiguous()
    return out, torch.where(never, out.sum(-1).to(precise_dtype(q)), -math.inf)
