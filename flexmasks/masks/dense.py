from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, first_row, leading, register_mask, row_of


def _prepare(
    size: Size | None,
    *,
    visible: Annotated[
        Tensor, "bool[N, KV] | bool[B, H, N, KV] | bool[B, 1, N, KV] | bool[1, H, N, KV] | bool[1, 1, N, KV]"
    ],
) -> dict[str, Any]:
    try:
        first = first_row("visible", visible.shape[-2], size)
    except ValueError as error:
        raise ValueError(f"{error} Padding [batch, keys] is mask='key_padding', attention_mask=...") from None
    return {"visible": visible, "first": first}


def _example(length: int) -> dict[str, Any]:
    return {"visible": torch.ones(length, length, dtype=torch.bool).tril(length // 8).triu(-length // 4)}


@register_mask(prepare=_prepare, example=_example)
def dense(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, visible: Tensor, first: int | Tensor = 0) -> Tensor:
    """A boolean tensor, True where the key is visible.

    visible: [queries, keys] for all, or [batch or 1, query heads or 1, queries, keys]. It has a row for each query of
        the call, or for each position from 0 on, or one for all. A tensor of booleans that is passed as the mask is
        this one, also as [query heads, queries, keys]. The kernel reads the tensor itself, one byte for each pair, and
        skips blocks without a visible pair.

    Source: the attn_mask of torch's scaled_dot_product_attention.
    Peers: torch SDPA attn_mask; xformers tensor biases; TransformerEngine arbitrary; JAX splash NumpyMask; FlashInfer
        custom_mask.
    """
    return visible[*leading(visible, b, h, q), row_of(visible, q, first, b), kv]
