from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.params import Size
from flexmasks.registry import register_score


def _prepare(size: Size | None, *, cap: Annotated[float, "float in 0.."]) -> dict[str, Any]:
    if cap == 0:
        raise ValueError(f"`cap` must be above 0, got {cap}.")
    return {"cap": float(cap)}


@register_score(prepare=_prepare, example=lambda length: {"cap": 30.0})
def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, cap: float) -> Tensor:
    """Scores bent into (-cap, cap): cap * tanh(score / cap).

    cap: the bound, above 0 (Gemma 2 uses 50, Grok-1 30).

    Source: Bello et al., Neural Combinatorial Optimization, 2017; Gemma 2, 2024.
    Peers: attention-gym generate_tanh_softcap(cap); FlashAttention softcap=cap; FlashInfer logits_soft_cap=cap.
    """
    return cap * torch.tanh(score / cap)
