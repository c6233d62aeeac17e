from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, first_row, leading, register_score, row_of


def _prepare(
    size: Size | None,
    *,
    bias: Annotated[
        Tensor, "float[N, KV] | float[B, H, N, KV] | float[B, 1, N, KV] | float[1, H, N, KV] | float[1, 1, N, KV]"
    ],
) -> dict[str, Any]:
    return {"bias": bias, "first": first_row("bias", bias.shape[-2], size)}


def _example(length: int) -> dict[str, Any]:
    position = torch.arange(length)
    return {"bias": -0.1 * (position[:, None] - position).abs().float().sqrt()}


@register_score(prepare=_prepare, example=_example)
def dense_bias(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, bias: Tensor, first: int | Tensor = 0
) -> Tensor:
    """Scores plus a tensor of queries x keys.

    bias: [queries, keys] for all, or [batch or 1, query heads or 1, queries, keys]. It has a row for each query of the
        call, or for each position from 0 on, or one for all. A floating tensor that is passed as the score is this one,
        also as [query heads, queries, keys]. A tensor that requires a gradient gets one. The kernel reads the tensor
        itself: where a bias follows from a table, `relative_bias`, `relative_bias_2d`, `t5_bias` and `distance_bias`
        read less memory, and `pair_bias` where groups of batch elements share one.

    Source: the float attn_mask of torch's scaled_dot_product_attention.
    Peers: torch SDPA attn_mask; xformers tensor biases; Hugging Face position_bias.
    """
    return score + bias[*leading(bias, b, h, q), row_of(bias, q, first, b), kv]
