import functools
import operator
from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, always, register_mask


def _prepare(
    size: Size | None,
    *,
    q_ranges: Annotated[Tensor, "int[N, 2] in 0..S"],
    kv_ranges: Annotated[Tensor, "int[N, 2] in 0..KV"],
    types: Annotated[Tensor | None, "int[N] in 0..3"] = None,
) -> dict[str, Any]:
    for name, ranges in (("q_ranges", q_ranges), ("kv_ranges", kv_ranges)):
        wrong = (ranges[:, 0] > ranges[:, 1]).nonzero()[:, 0].tolist()
        if wrong:
            raise ValueError(
                f"`{name}` must not end before they start, got {ranges[wrong[0]].tolist()} as number {wrong[0]}."
            )
    last = int(q_ranges.max()) if q_ranges.numel() else 0
    length = last if size is None else size.positions_of_q
    first, end = _runs(*_lines(q_ranges.long(), kv_ranges.long(), types, length), length)
    return {"first": first, "end": end}


def _example(length: int) -> dict[str, Any]:
    a, b, c = length // 4, length // 2, length * 3 // 4
    return {
        "q_ranges": [[0, a], [a, b], [b, length], [b, c], [c, length]],
        "kv_ranges": [[0, a], [0, b], [0, a // 2], [a, c], [b, length]],
        "types": [0, 1, 0, 3, 1],
    }


@register_mask(prepare=_prepare, example=_example)
def slices(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, first: Tensor, end: Tensor) -> Tensor:
    """Rectangles of queries and keys, each full or cut along diagonals.

    A pair is visible if at least one slice shows it.

    q_ranges, kv_ranges: the start and the end of the queries and of the keys of each slice; the end itself is outside.
        Slices may share queries, keys and pairs.
    types: the shape of each slice, by default full.
        0, full: all pairs.
        1, causal: its last query sees its last key, and each query before it one key less:
            kv_end - kv >= q_end - q.
        2, inverse causal: its first query sees its first key, and each query after it one key less:
            kv - kv_start >= q - q_start.
        3, bi-causal: causal and inverse causal, a band.

    For each query a kernel checks as many runs of keys as the query with most runs has; slices that touch are one run.

    Source: Tao et al., MagiAttention, 2025 (AttnSlice).
    Peers: MagiAttention flex_flash_attn_func(q_ranges, k_ranges, attn_type_map), for slices that share no pair.
    """
    runs = [(always(n, q), q) for n in range(len(first))]
    return functools.reduce(operator.or_, [(first[run] <= kv) & (kv < end[run]) for run in runs])


def _lines(q_ranges: Tensor, kv_ranges: Tensor, types: Tensor | None, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """List the queries of each slice, each with its range of visible keys.

    Returns the queries, their first visible keys, and the ends of their visible keys.
    Queries from `length` on, and queries that see no key of the slice, are left out.
    """
    counts = q_ranges.clamp(max=length).diff()[:, 0]
    of = torch.repeat_interleave(counts)
    place = torch.arange(len(of), device=of.device) - (counts.cumsum(0) - counts)[of]
    q = q_ranges[of, 0] + place
    first, end = kv_ranges[of].unbind(1)
    if types is not None:
        first = first + place * (types[of] >= 2)
        end = end - (q_ranges[of, 1] - 1 - q) * (types[of] % 2)
    some = first < end
    return q[some], first[some], end[some]


def _runs(q: Tensor, first: Tensor, end: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Merge the ranges of keys of each query into runs.

    Returns two tables [runs, length], of where the runs of each query start and end. Runs that touch are merged. A
    query with fewer runs than others has runs that start behind all keys and end at 0: in a block of queries they
    change neither the least start nor the greatest end.
    """
    behind = int(end.max()) + 1 if len(end) else 1
    q, first, end = (x[torch.argsort(q * behind + first)] for x in (q, first, end))
    # The greatest end among the query's runs up to this one.
    reached = torch.cummax(q * behind + end, 0).values - q * behind
    starts = torch.ones_like(q, dtype=torch.bool)
    starts[1:] = (q[1:] != q[:-1]) | (first[1:] > reached[:-1])
    ends = torch.ones_like(starts)
    ends[:-1] = starts[1:]
    q, first, end = q[starts], first[starts], reached[ends]
    number = torch.arange(len(q), device=q.device) - torch.searchsorted(q, q)
    runs = max(1, int(number.max()) + 1) if len(q) else 1
    firsts, all_ends = q.new_full((runs, length), behind), q.new_zeros((runs, length))
    firsts[number, q], all_ends[number, q] = first, end
    return firsts, all_ends
