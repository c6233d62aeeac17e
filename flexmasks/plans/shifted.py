"""Functions of masks and scores for queries that start at an offset."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Offset = int | Tensor


def shifted_mask(mask_mod: Callable[..., Tensor], offset: Offset) -> Callable[..., Tensor]:
    """The mask_mod with query i at position i + offset."""
    if isinstance(offset, int) and offset == 0:
        return mask_mod
    if isinstance(offset, int) or offset.ndim == 0:
        return lambda b, h, q, kv: mask_mod(b, h, q + offset, kv)
    return lambda b, h, q, kv: mask_mod(b, h, q + offset[b].type_as(q), kv)


def shifted_score(score_mod: Callable[..., Tensor], offset: Offset) -> Callable[..., Tensor]:
    """The score_mod with query i at position i + offset.

    Results of another dtype than the scores are float32, or float64 for scores in float64: kernels would take numbers
    of 64 bits, or of 16, for numbers of 32 bits.
    """
    changed = _in_dtype_of_scores(score_mod)
    if isinstance(offset, int) and offset == 0:
        return changed
    if isinstance(offset, int) or offset.ndim == 0:
        return lambda score, b, h, q, kv: changed(score, b, h, q + offset, kv)
    return lambda score, b, h, q, kv: changed(score, b, h, q + offset[b].type_as(q), kv)


def _in_dtype_of_scores(score_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        result = score_mod(score, b, h, q, kv)
        if not isinstance(result, Tensor):
            got = "None" if result is None else f"a {type(result).__name__}"
            raise TypeError(f"a score function must return a floating number for each score, got {got}.")
        if result.dtype == score.dtype or not result.dtype.is_floating_point:  # which the plan refuses
            return result
        return result.to(torch.float64 if score.dtype == torch.float64 else torch.float32)

    return changed


def offsets_of(offset: Offset, count: int, device: torch.device) -> Tensor:
    """Where queries start for each of `count` batch elements, int64."""
    if isinstance(offset, Tensor):
        return offset.long()
    return torch.full((count,), offset, dtype=torch.int64, device=device)


def offset_of_last(lengths: Tensor, q_len: int | Tensor) -> Tensor:
    """Where the last queries of sequences start, 0 for sequences without keys.

    q_len: the number of queries, or of each sequence's queries.
    """
    if lengths.dtype not in (torch.int32, torch.int64):
        lengths = lengths.long()
    return (lengths - q_len).clamp(min=0)
