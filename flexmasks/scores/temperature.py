from typing import Annotated, Any

from torch import Tensor

from flexmasks.spec import Size, register_score


def _prepare(size: Size | None, *, temperatures: Annotated[Tensor, "float[H]"]) -> dict[str, Any]:
    # On FLASH a division at every pair takes twice as long as a multiplication. The reciprocal of a learned tensor
    # would belong to the autograd graph of a single call, and FLASH takes no learned tensors.
    if size is None or temperatures.requires_grad:
        return {"by": temperatures, "divides": True}
    return {"by": 1 / temperatures.to(size.dtype), "divides": False}


@register_score(prepare=_prepare, example=lambda length: {"temperatures": [2.0]}, relative=True)
def temperature(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, by: Tensor, divides: bool) -> Tensor:
    """Scores divided by a temperature of each head: score / temperatures[h].

    temperatures: one for each query head, not 0; above 1 attention is flatter. A tensor that requires a gradient gets
        one.

    Source: Henry et al., Query-Key Normalization, 2020; Liu et al., Swin Transformer V2, 2022.
    Peers: Hugging Face Swin V2 logit_scale multiplies, by its exponential.
    """
    return score / by[h] if divides else score * by[h]
