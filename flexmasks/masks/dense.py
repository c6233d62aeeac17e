from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, check_covers_queries, leading, register_mask


def _prepare(
    size: Size | None,
    *,
    visible: Annotated[
        Tensor, "bool[N, KV] | bool[B, H, N, KV] | bool[B, 1, N, KV] | bool[1, H, N, KV] | bool[1, 1, N, KV]"
    ],
) -> dict[str, Any]:
    check_covers_queries("visible", visible.shape[-2], size)
    return {"visible": visible}


def _example(length: int) -> dict[str, Any]:
    return {"visible": torch.ones(length, length, dtype=torch.bool).tril(length // 8).triu(-length // 4)}


@register_mask(prepare=_prepare, example=_example)
def dense(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, visible: Tensor) -> Tensor:
    """A boolean tensor, True where the key is visible.

    visible: [queries, keys] for all, or [batch or 1, query heads or 1, queries, keys]. The kernel reads the tensor
        itself, one byte for each pair, and skips blocks without a visible pair.

    Source: the attn_mask of torch's scaled_dot_product_attention.
    Peers: torch SDPA attn_mask; xformers tensor biases; TransformerEngine arbitrary; JAX splash NumpyMask; FlashInfer
        custom_mask.
    """
    return visible[*leading(visible, b, h, q), q, kv]
