from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, device_of_float64, register_score

_FREQUENCIES_AT_ONCE = 8  # fewer need more kernels, more need more memory


def _prepare(
    size: Size | None,
    *,
    dims: Annotated[int, "int in 2.."] = 128,
    ratios: Annotated[Tensor | None, "float[H]"] = None,
    positions: Annotated[int | None, "int in S.."] = None,
) -> dict[str, Any]:
    if dims % 2:
        raise ValueError(f"`dims` must be even, got {dims}.")
    if size is None:
        if ratios is None or positions is None:
            raise ValueError(
                "called by itself it does not know the number of heads and positions; pass ratios=[...], one per head, "
                "and positions=..., the longest length."
            )
        return {"products": _products(positions, dims, ratios.dtype, ratios.device), "ratios": ratios}
    if ratios is None:
        head = torch.arange(1, size.heads + 1, dtype=torch.float64, device=device_of_float64(size.device))
        ratios = (size.heads / (8 * head)).to(size.dtype).to(size.device)
    return {"products": _products(positions or size.positions, dims, size.dtype, size.device), "ratios": ratios}


def _products(positions: int, dims: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The inner product of two sinusoidal embeddings for each distance."""
    there = device_of_float64(device)
    distance = torch.arange(positions, dtype=torch.float64, device=there)
    products = torch.zeros_like(distance)
    for part in torch.arange(dims // 2, dtype=torch.float64, device=there).split(_FREQUENCIES_AT_ONCE):
        products += torch.cos(distance / 10000.0 ** (2 * part[:, None] / dims)).sum(0)
    return products.to(dtype).to(device)


@register_score(prepare=_prepare, example=lambda length: {})
def sandwich(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, products: Tensor, ratios: Tensor) -> Tensor:
    """Scores plus the inner product of the sinusoidal embeddings of both positions.

    The score becomes score + ratios[h] * sum_i cos((q - kv) / 10000^(2i/dims)).

    dims: size of the embeddings, even; i runs over 0 to dims / 2 - 1 (128 in the paper, whatever the head size).
    ratios: one for each query head; by default the ratios of the paper, H / (8 (h + 1)) for head h of H, counted from
        0. A tensor that requires a gradient gets one.
    positions: number of positions that the table of products covers; by default the number of positions of the call.

    A score_mod of torch's own flex_attention needs both `ratios` and `positions`.

    Source: Chi et al., Dissecting Transformer Length Extrapolation, 2023.
    Peers: attention-gym generate_sandwich_bias(heads, max_seq_len, d_bar=dims); NeMo's sandwich also subtracts dims /
        2, which a softmax does not see.
    """
    return score + products[(q - kv).abs()] * ratios[h]
