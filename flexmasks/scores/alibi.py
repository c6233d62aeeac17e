from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Factors, Size, register_score


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of the ALiBi paper for any number of heads.

    A power of two has the geometric sequence 2^(-8/heads), 2^(-16/heads), ...; any other number has the slopes of
    the power of two below it, then every second slope of the power above it.

    Example:
        >>> alibi_slopes(4)
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    if heads > below:
        slopes += [2.0 ** (-4 * (i + 1) / below) for i in range(0, 2 * below, 2)]
    return slopes[:heads]


def _prepare(
    size: Size | None,
    *,
    slopes: Annotated[Tensor | None, "float[H]"] = None,
    bidirectional: Annotated[bool, "bool"] = False,
) -> dict[str, Any]:
    if slopes is not None:
        return {"slopes": slopes, "bidirectional": bidirectional}
    if size is None:
        raise ValueError("called by itself it does not know the number of heads; pass slopes=[...], one per head.")
    return {"slopes": None, "bidirectional": bidirectional, "heads": size.heads}


def _factors(size: Size, *, slopes: Tensor | None, bidirectional: bool) -> Factors:
    if slopes is None:
        slopes = _slope(torch.arange(size.heads, device=size.device), size.heads, size.dtype)
    return Factors(slopes, bidirectional)


@register_score(prepare=_prepare, example=lambda length: {}, factors=_factors, relative=True)
def alibi(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    slopes: Tensor | None,
    bidirectional: bool,
    heads: int = 0,
) -> Tensor:
    """Scores minus a slope of each head times the distance (ALiBi).

    FlexAttention's example adds the slope times (q - kv), a bonus for distant keys; the paper subtracts it, as here.

    slopes: one for each query head, in score - slopes[h] * (q - kv). By default the slopes of the paper, if the number
        of heads is known; a score_mod of torch's own flex_attention needs `slopes`. A tensor that requires a gradient
        gets one.
    bidirectional: True for the distance |q - kv|, for encoders. By default a key after the query gets a bonus, which
        causal masks hide.

    Source: Press et al., Train Short, Test Long, 2022.
    Peers: attention-gym generate_alibi_bias(heads) has other slopes if the number of heads is no power of two;
        FlashAttention alibi_slopes (bidirectional); xformers LowerTriangularMaskWithTensorBias.
    """
    behind = kv - q
    if bidirectional:
        behind = torch.where(behind > 0, -behind, behind)
    return score + (_slope(h, heads, score.dtype) if slopes is None else slopes[h]) * behind


def _slope(h: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """`alibi_slopes(heads)[h]`, computed: in a kernel that is cheaper than reading a tensor."""
    below = 1 << (heads.bit_length() - 1)
    slope = torch.exp2((h + 1).to(dtype) * (-8 / below))
    if heads == below:
        return slope
    return torch.where(h < below, slope, torch.exp2((2 * (h - below) + 1).to(dtype) * (-4 / below)))
