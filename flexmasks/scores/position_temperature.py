from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, device_of_float64, register_score


def _of_positions(size: Size | None, factor: Callable[[Tensor], Tensor]) -> Tensor | None:
    """A table of the factors of all positions, which kernels read sooner than they take logarithms."""
    if size is None:
        return None
    position = torch.arange(size.positions, dtype=torch.float64, device=device_of_float64(size.device))
    return factor(position).to(size.dtype).to(size.device)


def _log_of_keys(position: Tensor) -> Tensor:
    return torch.log(position + 1)


def _prepare_ssmax(size: Size | None, *, scales: Annotated[Tensor, "float[H]"]) -> dict[str, Any]:
    return {"scales": scales, "logs": _of_positions(size, _log_of_keys)}


@register_score(prepare=_prepare_ssmax, example=lambda length: {"scales": [0.4]})
def ssmax(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, scales: Tensor, logs: Tensor | None) -> Tensor:
    """Scores times the logarithm of the number of keys so far (scalable softmax).

    The score becomes score * scales[h] * log(q + 1): attention to many keys stays as sharp as to few. The first query
    sees one key, whatever its score.

    scales: one for each query head. A tensor that requires a gradient gets one.

    Source: Nakanishi, Scalable-Softmax Is Superior for Attention, 2025.
    Peers: none by name; implementations scale the queries by s * log(n).
    """
    return score * (scales[h] * (_log_of_keys(q.to(score.dtype)) if logs is None else logs[q]))


def _factor(position: Tensor, floor: int, strength: float | Tensor) -> Tensor:
    return 1 + strength * torch.log(torch.floor((position + 1) / floor) + 1)


def _prepare_long_temperature(
    size: Size | None,
    *,
    floor: Annotated[int, "int in 1.."] = 8192,
    strength: Annotated[float | Tensor, "float | float[]"] = 0.1,
) -> dict[str, Any]:
    def factor(position: Tensor) -> Tensor:
        return _factor(position, floor, strength.to(position.device) if isinstance(strength, Tensor) else strength)

    return {"floor": floor, "strength": strength, "factors": _of_positions(size, factor)}


@register_score(prepare=_prepare_long_temperature, example=lambda length: {"floor": length // 16})
def long_temperature(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    floor: int,
    strength: float | Tensor,
    factors: Tensor | None,
) -> Tensor:
    """Sharper scores for far queries, a step more after each `floor` tokens.

    The score becomes score * (1 + strength * log(1 + (q + 1) // floor)).

    floor: number of tokens in a step; queries before position floor - 1 stay as they are.
    strength: how much sharper; 0 for nothing. A tensor that requires a gradient gets one.

    Source: Llama 4, 2025 (inference-time temperature of layers without positions).
    Peers: Hugging Face Llama4TextAttention floor_scale, attn_scale with attn_temperature_tuning; Ministral 3's
        llama_4_scaling_beta, original_max_position_embeddings count (q) // floor, one position later.
    """
    return score * (_factor(q.to(score.dtype), floor, strength) if factors is None else factors[q])
