from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, device_of_float64, register_score


def _prepare(
    size: Size | None, *, scales: Annotated[Tensor, "float[H]"], rates: Annotated[Tensor, "float[H]"]
) -> dict[str, Any]:
    biases = None
    if size is not None and not (scales.requires_grad or rates.requires_grad):
        device = device_of_float64(size.device)
        distance = torch.arange(size.positions, dtype=torch.float64, device=device)
        factor, rate = (x.to(device).double()[:, None] for x in (scales, rates))
        biases = (factor * torch.log1p(rate * distance)).to(size.dtype).to(size.device)
    return {"scales": scales, "rates": rates, "biases": biases}


@register_score(prepare=_prepare, example=lambda length: {"scales": [1.0], "rates": [0.5]}, relative=True)
def kerple(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    scales: Tensor,
    rates: Tensor,
    biases: Tensor | None,
) -> Tensor:
    """Scores minus the logarithm of the distance, as each head learns it (KERPLE).

    The score becomes score - scales[h] * log(1 + rates[h] * |q - kv|).

    scales, rates: one for each query head, above 0. Tensors that require a gradient get one.

    Source: Chi et al., KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation, 2022 (its
        logarithmic kernel).
    Peers: GPT-NeoX ParallelKerpleLog (bias_p=scales, bias_a=rates).
    """
    distance = (q - kv).abs()
    if biases is None:
        return score - scales[h] * torch.log(1 + rates[h] * distance.to(score.dtype))
    return score - biases[h, distance]
