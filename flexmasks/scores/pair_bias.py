from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, describe, first_row, leading, register_score, row_of


def _prepare(
    size: Size | None,
    *,
    bias: Annotated[Tensor, "float[G, H, N, KV] | float[G, 1, N, KV]"],
    group: Annotated[int, "int in 1.."] = 1,
) -> dict[str, Any]:
    groups = bias.shape[0]
    if size is not None and groups != 1 and groups * group != size.batch:
        raise ValueError(
            f"`bias` must have one row for all, or one for each `group` = {group} of the {size.batch} batch elements, "
            f"got {describe(bias)}."
        )
    return {"bias": bias, "group": group, "first": first_row("bias", bias.shape[-2], size)}


def _example(length: int) -> dict[str, Any]:
    # Residues of two strands that lie side by side, in opposite directions.
    position = torch.arange(length)
    apart = (position[:, None] + position - length + 1).abs()
    return {"bias": (-0.1 * torch.minimum(apart, (position[:, None] - position).abs()).float().sqrt())[None, None]}


@register_score(prepare=_prepare, example=_example)
def pair_bias(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, bias: Tensor, group: int, first: int | Tensor = 0
) -> Tensor:
    """Scores plus a bias of pairs that groups share, bias[b // group, h, q, kv].

    bias: [groups, query heads or 1, queries, keys], or one group for all batch elements. It has a row for each query of
        the call, or for each position from 0 on, or one for all. A tensor that requires a gradient gets one, summed
        over the batch elements of a group.
    group: number of consecutive batch elements that share a bias. In triangle attention each of the N rows of a pair
        representation is a batch element, and the rows of one protein share a bias: `group=N`.

    On a GPU in half precision the backend "short" sums the gradient in one order, so that it is the same at each run.
    Where groups are single batch elements this is `dense_bias`. The bias is not repeated for the elements of a group.

    Source: Jumper et al., AlphaFold, 2021 (supplement, algorithms 13 and 14: triangle attention).
    Peers: OpenFold's triangle_bias and the last of DS4Sci_EvoformerAttention's biases, [B, 1, H, N, N] for queries
        [B, N, N, H, D].
    """
    row = b // group if group > 1 else b
    return score + bias[*leading(bias, row, h, q), row_of(bias, q, first, b), kv]
