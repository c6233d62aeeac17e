import functools
import operator
from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, always, may_read, register_mask


def _prepare(
    size: Size | None,
    *,
    q_ranges: Annotated[Tensor, "int[N, 2] in 0..S"],
    kv_ranges: Annotated[Tensor, "int[N, 2] in 0..KV"],
    types: Annotated[Tensor | None, "int[N] in 0..3"] = None,
) -> dict[str, Any]:
    tensors = [x for x in (q_ranges, kv_ranges, types) if x is not None]
    readable = may_read(size, *tensors)
    if readable:
        for name, ranges in (("q_ranges", q_ranges), ("kv_ranges", kv_ranges)):
            wrong = (ranges[:, 0] > ranges[:, 1]).nonzero()[:, 0].tolist()
            if wrong:
                raise ValueError(
                    f"`{name}` must not end before they start, got {ranges[wrong[0]].tolist()} as number {wrong[0]}."
                )
    if size is None:
        q_len, kv_len = (int(x.max()) if x.numel() else 0 for x in (q_ranges, kv_ranges))
    else:
        q_len, kv_len = size.positions_of_q, size.kv_len
    if not q_ranges.shape[0]:
        nothing = torch.zeros((1, q_len), dtype=torch.int32, device=q_ranges.device)
        return {"first": nothing, "end": nothing}
    lines = _lines(q_ranges.long(), kv_ranges.long(), types, q_len, readable)
    most = None if readable else max(1, min(q_ranges.shape[0], -(-kv_len // 2)))
    first, end = _runs(*lines, q_len, kv_len, most)
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

    q_ranges, kv_ranges: the start and the end of the queries and of the keys of each slice; the end itself is outside.
        Slices may share queries, keys and pairs; a pair is visible if at least one slice shows it.
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


def _lines(
    q_ranges: Tensor, kv_ranges: Tensor, types: Tensor | None, length: int, readable: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """List the queries of each slice with the first visible key of each and the end of its visible keys. In place of
    queries from `length` on, and of those that see no key of the slice, `length` stands, with no keys. If values are
    not readable, there are as many lines as slices that hold all queries would need.
    """
    counts = q_ranges.clamp(max=length).diff()[:, 0]
    ends = counts.cumsum(0)
    lines = int(ends[-1]) if readable else q_ranges.shape[0] * length
    number = torch.arange(lines, device=counts.device)
    of = torch.searchsorted(ends, number, right=True).clamp(max=q_ranges.shape[0] - 1)
    place = number - (ends - counts)[of]
    q = q_ranges[of, 0] + place
    first, end = kv_ranges[of].unbind(1)
    if types is not None:
        first = first + place * (types[of] >= 2)
        end = end - (q_ranges[of, 1] - 1 - q) * (types[of] % 2)
    some = (first < end) & (number < ends[-1])
    return torch.where(some, q, length), torch.where(some, first, 0), torch.where(some, end, 0)


def _runs(q: Tensor, first: Tensor, end: Tensor, length: int, kv_len: int, most: int | None) -> tuple[Tensor, Tensor]:
    """Merge the ranges of keys of each query into runs, and return two int32 tables [runs, length] of their starts and
    ends. Runs that touch are merged. A query with fewer runs has further ones that start behind all keys and end at 0:
    in a block of queries they change neither the least start nor the greatest end.

    most: the most runs that a query may have; None: as many as the query with most runs has, which is read.
    """
    behind = kv_len + 1
    q, first, end = (x[torch.argsort(q * behind + first)] for x in (q, first, end))
    # The greatest end among the query's ranges up to this one.
    reached = torch.cummax(q * behind + end, 0).values - q * behind
    starts = torch.nn.functional.pad((q[1:] != q[:-1]) | (first[1:] > reached[:-1]), (1, 0), value=True)[: q.shape[0]]
    ends = torch.nn.functional.pad(starts[1:], (0, 1), value=True)[: q.shape[0]]
    run = starts.cumsum(0)
    number = run - run[torch.searchsorted(q, q)]
    runs = most or (int(number.max()) + 1 if len(number) else 1)
    tables = []
    for outside, values, is_kept in ((behind, first, starts), (0, reached, ends)):
        # Values that are not kept go to one more column, which is cut off.
        place = torch.where(is_kept & (q < length), number * (length + 1) + q, length)
        table = q.new_full((runs * (length + 1),), outside).scatter_(0, place, values)
        tables.append(table.view(runs, length + 1)[:, :length].int())
    return tables[0], tables[1]
