import bisect
from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, bounded, constant_in_graphs, constants, register_score


def t5_bucket(distance: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> int:
    """Return the bucket of T5's relative positions for the distance kv - q.

    The first half of the buckets holds one distance each. The other half grows in geometric progression up to
    max_distance, and the last bucket takes all greater distances. With `bidirectional` each direction has half of
    all buckets: earlier keys the first half, later keys the second. Without it later keys are in bucket 0.

    Example:
        >>> [t5_bucket(d) for d in (0, -1, -7, -8, -127, -500, 1, 127)]
        [0, 1, 7, 8, 15, 15, 17, 31]
    """
    side = buckets // 2 if bidirectional else buckets
    first = side if bidirectional and distance > 0 else 0
    far = abs(distance) if bidirectional else max(0, -distance)
    exact = side // 2
    steps = side - exact
    if far < exact:
        return first + far
    # Count, in whole numbers, the steps of (max_distance / exact) ** (1 / steps) that lead from `exact` to `far`.
    step = 0
    while step + 1 < steps and far**steps >= max_distance ** (step + 1) * exact ** (steps - step - 1):
        step += 1
    return first + exact + step


def _prepare(
    size: Size | None,
    *,
    table: Annotated[Tensor, "float[N, H]"],
    max_distance: Annotated[int, "int in 1.."] = 128,
    bidirectional: Annotated[bool, "bool"] = True,
) -> dict[str, Any]:
    buckets = table.shape[0]
    if buckets < (4 if bidirectional else 2) or (bidirectional and buckets % 2):
        raise ValueError(f"`table` must have an even number of at least 4 buckets, 2 where causal, got {buckets}.")
    if max_distance <= buckets // (4 if bidirectional else 2):
        raise ValueError(
            f"`max_distance` must be above {buckets // (4 if bidirectional else 2)}, the distances that have a bucket "
            f"of their own, got {max_distance}."
        )
    buckets, reach = constants((buckets, max_distance))
    return {"table": table, "buckets": _buckets(buckets, reach, bidirectional, table.device)}


# Inside a user's torch.compile the table is a constant, computed once, and not a kernel.
@constant_in_graphs
def _buckets(buckets: int, reach: int, bidirectional: bool, device: torch.device) -> Tensor:
    """The bucket of each distance from -reach to reach, computed on the device."""
    distance = torch.arange(-reach, reach + 1, dtype=torch.int32, device=device)
    table = torch.zeros_like(distance)
    last = t5_bucket(-reach, buckets, reach, bidirectional)
    far = 0
    for bucket in range(1, last + 1):  # the buckets of earlier keys, nearest first
        far = bisect.bisect_left(range(reach), bucket, far, key=lambda d: t5_bucket(-d, buckets, reach, bidirectional))
        table += distance <= -far
    if bidirectional:
        table = torch.where(distance > 0, table.flip(0) + buckets // 2, table)
    return bounded(table, 0, buckets - 1)


def _example(length: int) -> dict[str, Any]:
    return {"table": [[-(n % 16) / 8] for n in range(32)]}


@register_score(prepare=_prepare, example=_example, relative=True)
def t5_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, table: Tensor, buckets: Tensor) -> Tensor:
    """Scores plus T5's relative position bias, table[bucket of kv - q, h].

    table: [buckets, query heads]. A tensor that requires a gradient gets one.
    max_distance: from this distance on, all distances share the last bucket of their side. Near distances have buckets
        of their own.
    bidirectional: True for encoders, where half of the buckets are for later keys; False for decoders, where later keys
        share bucket 0.

    T5 does not scale its scores: pass `scale=1.0` to attention.

    Source: Raffel et al., T5, 2020, section 2.1.
    Peers: Hugging Face T5Attention relative_attention_bias.weight, relative_attention_num_buckets and max_distance.
    """
    reach = buckets.shape[0] // 2
    distance = kv - q
    distance = torch.where(distance < -reach, -reach, distance)
    distance = torch.where(distance > reach, reach, distance)
    return score + table[buckets[distance + reach], h]
