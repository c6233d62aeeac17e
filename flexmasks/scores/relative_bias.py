from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, describe, register_score


def _prepare(size: Size | None, *, table: Annotated[Tensor, "float[H, W]"]) -> dict[str, Any]:
    if table.shape[1] % 2 == 0:
        raise ValueError(f"`table` must have 2 * max_distance + 1 columns, an odd number, got {describe(table)}.")
    return {"table": table}


def _example(length: int) -> dict[str, Any]:
    return {"table": [[-abs(d) / length for d in range(-(length // 4), length // 4 + 1)]]}


@register_score(prepare=_prepare, example=_example, relative=True)
def relative_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, table: Tensor) -> Tensor:
    """Scores plus a learned bias of the distance, table[h, kv - q + max_distance].

    table: [H, 2 * max_distance + 1], column 0 for keys max_distance or more before the query, the last column for keys
        max_distance or more after it. A tensor that requires a gradient gets one.

    Source: Shaw et al., Self-Attention with Relative Position Representations, 2018; Raffel et al., T5, 2020.
    Peers: xformers and SDPA take such a bias as a dense tensor; T5's buckets are `t5_bias`.
    """
    reach = table.shape[1] // 2
    distance = kv - q
    distance = torch.where(distance < -reach, -reach, distance)
    distance = torch.where(distance > reach, reach, distance)
    return score + table[h, distance + reach]
