from typing import Annotated

from torch import Tensor

from flexmasks.registry import register_score


@register_score(example=lambda length: {"temperatures": [2.0]})
def temperature(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, temperatures: Annotated[Tensor, "float[H]"]
) -> Tensor:
    """Scores divided by a temperature of each head: score / temperatures[h].

    temperatures: one per query head, not 0; above 1 attention is flatter. A tensor that requires a gradient gets one.

    Source: Henry et al., Query-Key Normalization, 2020; Liu et al., Swin Transformer V2, 2022.
    Peers: Hugging Face Swin V2 logit_scale multiplies, by its exponential.
    """
    return score / temperatures[h]
