from typing import Annotated

import torch
from torch import Tensor

from flexmasks.spec import register_score


@register_score(example=lambda length: {"scales": [0.4]})
def ssmax(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, scales: Annotated[Tensor, "float[H]"]
) -> Tensor:
    """Scores times the logarithm of the number of keys so far (scalable softmax).

    The score becomes score * scales[h] * log(q + 1): attention to many keys stays as sharp as to few. The first query
    sees one key, whatever its score.

    scales: one for each query head. A tensor that requires a gradient gets one.

    Source: Nakanishi, Scalable-Softmax Is Superior for Attention, 2025.
    Peers: none by name; implementations scale the queries by s * log(n).
    """
    return score * (scales[h] * torch.log((q + 1).to(score.dtype)))


@register_score(example=lambda length: {"floor": length // 16})
def long_temperature(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    floor: Annotated[int, "int in 1.."] = 8192,
    strength: Annotated[float, "float"] = 0.1,
) -> Tensor:
    """Sharper scores for far queries, a step more after each `floor` tokens.

    The score becomes score * (1 + strength * log(1 + (q + 1) // floor)).

    floor: number of tokens in a step; queries before position floor - 1 stay as they are.
    strength: how much sharper; 0 for nothing.

    Source: Llama 4, 2025 (inference-time temperature of layers without positions).
    Peers: Hugging Face Llama4TextAttention floor_scale, attn_scale with attn_temperature_tuning; Ministral 3's
        llama_4_scaling_beta, original_max_position_embeddings count (q) // floor, one position later.
    """
    return score * (1 + strength * torch.log(((q + 1) // floor + 1).to(score.dtype)))
