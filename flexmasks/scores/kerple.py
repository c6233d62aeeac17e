from typing import Annotated

import torch
from torch import Tensor

from flexmasks.spec import register_score

PerHead = Annotated[Tensor, "float[H]"]


@register_score(example=lambda length: {"scales": [1.0], "rates": [0.5]}, relative=True)
def kerple(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    scales: PerHead,
    rates: PerHead,
) -> Tensor:
    """Scores minus the logarithm of the distance, as each head learns it (KERPLE).

    The score becomes score - scales[h] * log(1 + rates[h] * |q - kv|).

    scales, rates: one for each query head, above 0. Tensors that require a gradient get one.

    Source: Chi et al., KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation, 2022 (its
        logarithmic kernel).
    Peers: GPT-NeoX ParallelKerpleLog (bias_p=scales, bias_a=rates).
    """
    return score - scales[h] * torch.log(1 + rates[h] * (q - kv).abs().to(score.dtype))
