from typing import Annotated, Any

from torch import Tensor

from flexmasks.params import Size, check_covers_queries
from flexmasks.registry import register_score


def _prepare(
    size: Size | None,
    *,
    table: Annotated[Tensor, "float[H, W]"],
    distances: Annotated[Tensor, "int[N, KV] in 0..W-1 | int[B, N, KV] in 0..W-1"],
) -> dict[str, Any]:
    check_covers_queries("distances", distances.shape[-2], size)
    return {"table": table, "distances": distances}


def _example(length: int) -> dict[str, Any]:
    return {
        "table": [[-d / 4 for d in range(8)]],
        "distances": [[min(7, (i ^ j).bit_count()) for j in range(length)] for i in range(length)],
    }


@register_score(prepare=_prepare, example=_example)
def distance_bias(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, table: Tensor, distances: Tensor
) -> Tensor:
    """A learned bias by a given distance of each pair, in a graph say: score + table[h, distances[b, q, kv]].

    table: [query heads, distances]. A tensor that requires a gradient gets one.
    distances: [queries, keys] for all batch elements or for each; give what is out of reach a number of its own.

    Source: Ying et al., Graphormer, 2021 (spatial encoding).
    Peers: attention-gym generate_graphormer_spatial_bias(table, distances); Hugging Face Graphormer spatial_pos.
    """
    return score + table[h, distances[b, q, kv] if distances.ndim == 3 else distances[q, kv]]
