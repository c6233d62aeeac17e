from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, bounded, check_covers_queries, register_score


def _prepare(
    size: Size | None,
    *,
    table: Annotated[Tensor, "float[H, W]"],
    distances: Annotated[Tensor, "int[N, KV] in 0..W-1 | int[B, N, KV] in 0..W-1"],
) -> dict[str, Any]:
    check_covers_queries("distances", distances.shape[-2], size)
    return {"table": table, "distances": bounded(distances.detach(), 0, table.shape[1] - 1)}


def _example(length: int) -> dict[str, Any]:
    # Nodes are neighbors in the graph if their numbers differ in one bit, as the corners of a cube are.
    bits = ((torch.arange(length)[:, None] >> torch.arange(length.bit_length())) & 1).float()
    distances = torch.cdist(bits, bits, p=0).clamp(max=7).int()
    return {"table": [[-d / 4 for d in range(8)]], "distances": distances}


@register_score(prepare=_prepare, example=_example)
def distance_bias(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, table: Tensor, distances: Tensor
) -> Tensor:
    """Scores plus a learned bias of given distances, table[h, distances[b, q, kv]].

    table: [query heads, distances]. A tensor that requires a gradient gets one.
    distances: [queries, keys] for all batch elements or for each, such as distances in a graph. Pairs that are out of
        reach need a number of their own.

    Source: Ying et al., Graphormer, 2021 (spatial encoding).
    Peers: attention-gym generate_graphormer_spatial_bias(table, distances); Hugging Face Graphormer spatial_pos.
    """
    distance = distances[b, q, kv] if distances.ndim == 3 else distances[q, kv]
    return score + table[h, distance.int()]
