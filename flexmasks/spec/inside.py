"""Masks and scores inside sequences laid end to end, and inside pages: their `prepare` and `inner_size` hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.blocks.build import build
from flexmasks.blocks.decide import Axis, decide
from flexmasks.blocks.limits import Work
from flexmasks.spec.indexing import always, bounded
from flexmasks.spec.parameters import Size, may_read
from flexmasks.spec.values import Mask, Score

_MAX_POSITION = 2**30  # positions are 32-bit integers, with room for sums
_LENGTHS = ("Q", "KV", "S")  # names of the sizes that depend on lengths

# --- sequences laid end to end ---


def prepare_sequences(
    size: Size | None,
    *,
    inner: Any,
    offsets: Annotated[Tensor, "int[N] in 0..S"],
    kv_offsets: Annotated[Tensor | None, "int[M] in 0..S"] = None,
    q_start: Annotated[int | Tensor, "int in 0.. | int[L] in 0.."] = 0,
    max_length: Annotated[int | None, "length in 0.."] = None,
) -> dict[str, Any]:
    """Find the sequence of each query and key, and its position there.

    Queries past the last sequence get sequence -1, keys past it sequence -2. A score change that depends on distances
    alone gets no tables where distances in a sequence equal distances in the call.
    """
    q_len, kv_len = (None, None) if size is None else (size.positions_of_q, size.kv_len)
    starts_alike = kv_offsets is None and isinstance(q_start, int) and q_start == 0
    if starts_alike and isinstance(inner, Score) and inner._is_relative():
        _length_of("offsets", offsets, size, q_len)
        return {"inner": inner, **dict.fromkeys(("q_sequence", "q_position", "kv_sequence", "kv_position"))}
    if kv_offsets is None:
        kv_offsets = offsets
    elif kv_offsets.shape[0] != offsets.shape[0]:
        raise ValueError(f"`offsets` has {offsets.shape[0] - 1} sequences, `kv_offsets` has {kv_offsets.shape[0] - 1}.")
    q_sequence, q_position = _unpack("offsets", offsets, size, q_len, -1)
    if isinstance(q_start, Tensor):
        # Padding counts as the last query of the first sequence, so that no table is too short for it.
        last = (q_start[0] + offsets[1] - offsets[0] - 1).clamp(min=0)
        q_position = torch.where(q_sequence < 0, last, q_position + q_start[q_sequence]).int()
    else:
        q_position += q_start
    kv_sequence, kv_position = _unpack("kv_offsets", kv_offsets, size, kv_len, -2)
    max_position = _MAX_POSITION if isinstance(q_start, Tensor) else q_start + q_position.shape[0]
    return {
        "inner": inner,
        "q_sequence": q_sequence,
        "q_position": bounded(q_position, 0, max_position),
        "kv_sequence": kv_sequence,
        "kv_position": bounded(kv_position, 0, kv_position.shape[0]),
    }


def size_inside_sequences(
    size: Size, *, inner: Any, offsets: Tensor, kv_offsets: Tensor | None, q_start: int | Tensor, max_length: int | None
) -> Size:
    """Return the sizes that a mask or score inside packed sequences sees.

    With `max_length`, or if values may not be read, lengths are upper bounds. A `q_start` that may not be read is
    assumed to be at most the length of the keys.
    """
    _check_inner(inner)
    if offsets.numel() < 2:
        raise ValueError("`offsets` needs at least two values: 0 and the total length.")
    sequences = offsets.shape[0] - 1
    starts = q_start if isinstance(q_start, Tensor) else None
    end_to_end = offsets, size.positions_of_q
    size = replace(
        size, batch=sequences, starts=starts, most_queries=lambda: offsets.long().diff().max(), end_to_end=end_to_end
    )
    if isinstance(q_start, Tensor) and q_start.shape[0] != sequences:
        raise ValueError(f"`q_start` has {q_start.shape[0]} values, `offsets` has {sequences} sequences.")
    if not isinstance(q_start, Tensor) and q_start > _MAX_POSITION:
        raise ValueError(f"positions must be at most 2**30, but `q_start` is {q_start}.")
    if not may_read(size, offsets, *(x for x in (kv_offsets, q_start) if isinstance(x, Tensor))):
        q_len, kv_len = (size.positions_of_q, size.kv_len) if max_length is None else (max_length, max_length)
        q_offset = kv_len if isinstance(q_start, Tensor) else q_start
        return replace(size, q_len=q_len, kv_len=kv_len, q_offset=q_offset, at_most=_LENGTHS)
    lengths = offsets.long().diff()
    kv_lengths = lengths if kv_offsets is None else kv_offsets.long().diff()
    ends = torch.stack([lengths.max(), kv_lengths.max(), (lengths + q_start).max()])
    q_len, kv_len, positions = ends.tolist()  # positions: the most that the queries of a sequence reach
    if positions < 0:
        shown = ", ".join(map(str, offsets[:4].tolist()))
        raise ValueError(f"`offsets` must rise from 0, as [0, 30, 50] for sequences of 30 and 20 tokens, got {shown}.")
    if positions > _MAX_POSITION:
        raise ValueError(f"positions must be at most 2**30, but `q_start` and the lengths give {positions}.")
    if max_length is None:
        return replace(size, q_len=q_len, kv_len=kv_len, q_offset=positions - q_len)
    if max(q_len, kv_len) > max_length:
        raise ValueError(f"`max_length` is {max_length}, but a sequence has {max(q_len, kv_len)} tokens.")
    q_offset = max(0, positions - max_length) if isinstance(q_start, Tensor) else q_start
    return replace(size, q_len=max_length, kv_len=max_length, q_offset=q_offset, at_most=_LENGTHS)


def _unpack(name: str, offsets: Tensor, size: Size | None, length: int | None, padding: int) -> tuple[Tensor, Tensor]:
    """Return each token's sequence (`padding` past the last one) and its position there, both int32[length]."""
    length = _length_of(name, offsets, size, length)
    offsets = offsets.contiguous().int()
    token = torch.arange(length, dtype=torch.int32, device=offsets.device)
    sequence = torch.searchsorted(offsets, token, right=True, out_int32=True) - 1
    used = token < offsets[-1]
    return torch.where(used, sequence, padding), torch.where(used, token - offsets[sequence], 0)


def _length_of(name: str, offsets: Tensor, size: Size | None, length: int | None) -> int:
    """The number of tokens, by default the end of the last sequence; the offsets are checked if they may be read."""
    offsets = offsets.long()
    if may_read(size, offsets):
        first, last, shortest = torch.stack([offsets[0], offsets[-1], offsets.diff().min()]).tolist()
        length = last if length is None else length
        if first != 0 or last > length or shortest < 0:
            hint = "; of lengths they are torch.nn.functional.pad(lengths.cumsum(0), (1, 0))" if first > 0 else ""
            raise ValueError(
                f"`{name}` must rise from 0 to at most the length {length}, got {_shortened(offsets)}{hint}."
            )
    return int(offsets[-1]) if length is None else length


def _shortened(values: Tensor) -> str:
    numbers = [str(n) for n in values[:6].tolist()]
    return ", ".join(numbers) + (", ..." if len(values) > 6 else "")


# --- pages of one pool ---


def prepare_pages(
    size: Size | None,
    *,
    inner: Any,
    page_table: Annotated[Tensor, "int[B, P]"],
    kv_lens: Annotated[Tensor, "int[B] in 0.."],
    page_size: Annotated[int, "int in 1.."],
) -> dict[str, Any]:
    """Find the positions of keys in pages, see `_first_positions`.

    Without sizes the pool ends with the last page in use.
    """
    page_table = page_table.long()  # page numbers may come in a narrow dtype that the pool's size does not fit
    if size is None:
        used = torch.arange(page_table.shape[1], device=page_table.device) * page_size < kv_lens[:, None]
        pages = 1 + int(torch.where(used, page_table, 0).amax())
    elif size.kv_len % page_size:
        raise ValueError(f"`page_size` = {page_size} must divide the {size.kv_len} keys of the call into whole pages.")
    else:
        pages = size.kv_len // page_size
    if may_read(size, page_table, kv_lens):
        check_pages(size, inner, page_table, kv_lens, page_size, pages)
    first = _first_positions(page_table, kv_lens, page_size, pages)
    return {"inner": inner, "first_positions": first, "kv_lens": kv_lens, "page_size": page_size}


def _first_positions(page_table: Tensor, kv_lens: Tensor, page_size: int, pages: int) -> Tensor:
    """Return the positions of the first keys in pages, int32 [B, pages + 1].

    They are -1 in sequences that do not hold the page; of a page that a sequence holds twice, the last keys count. The
    last column has what the last page in use held before, or holds: in a ring, its slots behind the last key have keys
    of the turn before.
    """
    batch, columns = page_table.shape
    starts = torch.arange(0, columns * page_size, page_size, dtype=torch.int32, device=page_table.device)
    used = starts < kv_lens[:, None]
    inside = used & (page_table >= 0) & (page_table < pages)
    # Entries of no page, or not in use, are scattered to the last column, which is then written anew.
    first = torch.full((batch, pages + 1), -1, dtype=torch.int32, device=page_table.device)
    first.scatter_reduce_(1, torch.where(inside, page_table, pages), starts.expand(batch, columns), "amax")
    last = (used.sum(1, keepdim=True) - 1).clamp(min=0)
    is_earlier = inside & (page_table == page_table.gather(1, last)) & (starts < last * page_size)
    earlier = torch.where(is_earlier, starts, -1).amax(1)
    earlier = torch.where(earlier < 0, last[:, 0].int() * page_size, earlier)
    return first.scatter_(1, torch.full_like(last, pages), earlier[:, None])


def positions_in_pages(b: Tensor, kv: Tensor, first_positions: Tensor, kv_lens: Tensor, page_size: int) -> Tensor:
    """Return the positions of slots of a pool in sequences, and any in sequences that do not hold their page."""
    first, slot = first_positions[b, kv // page_size], kv % page_size
    position = torch.where(first < 0, 0, first) + slot
    earlier = first_positions[b, always(first_positions.shape[1] - 1, b)]
    return torch.where(position < kv_lens[b], position, earlier + slot)


def check_pages(
    size: Size | None,
    inner: Any,
    page_table: Tensor,
    kv_lens: Tensor,
    page_size: int,
    pages: int,
    *,
    by_position: bool = False,
    sequences: Tensor | None = None,
) -> None:
    """Raise ValueError for lengths that exceed the table, and for keys that a query sees and that are not there.

    The host reads the values.

    pages: the number of pages of the pool.
    by_position: whether each key is read from the page of its position, so that a page may have the keys of several.
    sequences: what batch elements are called in messages.
    """
    page_table, columns = page_table.long(), page_table.shape[1]
    starts = torch.arange(0, columns * page_size, page_size, device=page_table.device)
    used = starts < kv_lens[:, None]
    outside = used & ((page_table < 0) | (page_table >= pages))
    missing = torch.where(outside, page_size, 0)  # how many of the first keys of each entry are not in its page
    if not by_position:
        first = _first_positions(page_table, kv_lens, page_size, pages)
        newest = first.gather(1, page_table.clamp(0, pages - 1))
        # The last page in use may have replaced some keys, other pages have replaced all.
        replaced = torch.where(starts == first[:, pages:], kv_lens[:, None] - newest, page_size).clamp(max=page_size)
        missing = torch.where(used & ~outside & (newest > starts), replaced, missing)
    longest, most_missing = torch.stack([kv_lens.amax().long(), missing.amax()]).tolist()
    if longest > columns * page_size:
        raise ValueError(
            f"`kv_lens` must be at most {columns} pages * `page_size` {page_size} = {columns * page_size}, "
            f"got {longest}."
        )
    if size is None or not isinstance(inner, Mask) or not size.q_len or not most_missing:
        return
    size = replace(size, kv_len=columns * page_size)
    mask_mod, device = _mod_of(inner, size), page_table.device
    queries, entries = Axis(size.q_len, size.q_len), Axis(size.kv_len, page_size)
    possible = decide(mask_mod, size.batch, size.heads, queries, entries, device).possible.to(device)
    if not bool(((missing > 0) & possible.any(2).any(1)).any()):
        return
    sizes = size.batch, size.heads, size.q_len, size.kv_len
    keys = build(mask_mod, *sizes, device, (size.q_len, 1), work=Work.bounded(math.prod(sizes)))
    slots = torch.arange(page_size, device=device)
    is_seen = keys.block_mask(mask_mod).to_dense().bool().any(2).any(1).unflatten(1, (columns, page_size))
    is_seen = is_seen & (slots < missing[..., None]) & (starts[:, None] + slots < kv_lens[:, None, None])
    for b, place, slot in is_seen.nonzero()[:1].tolist():
        name, length, page = int(b if sequences is None else sequences[b]), int(kv_lens[b]), int(page_table[b, place])
        if outside[b, place]:
            raise ValueError(
                f"`page_table` must have pages 0..{pages - 1} where a query sees keys, got {page} for page {place} of "
                f"batch element {name}, which has {length} keys."
            )
        raise ValueError(
            f"`page_table` has a page twice in batch element {name}, page {page}, of which only the last keys count, "
            f"but a query sees an earlier one, key {place * page_size + slot} of {length}."
        )


def _mod_of(mask: Mask, size: Size) -> Callable[..., Tensor]:
    """Return the mask_mod of queries that start where the sizes say."""
    mask_mod, starts = mask._bind(mask._resolve(size)), size.starts
    if starts is None:
        return lambda b, h, q, kv: mask_mod(b, h, q + size.q_offset, kv)
    return lambda b, h, q, kv: mask_mod(b, h, q + starts[b].type_as(q), kv)


def size_inside_pages(size: Size, *, inner: Any, page_table: Tensor, kv_lens: Tensor, page_size: int) -> Size:
    _check_inner(inner)
    if not page_table.numel():
        raise ValueError("`page_table` needs at least one page for each batch element.")
    return replace(size, kv_len=page_table.shape[1] * page_size)


def example_pages(length: int) -> dict[str, Any]:
    """Return pages for one sequence of 7/8 of `length` keys: those with odd numbers come first."""
    page_size = max((n for n in range(1, length // 8 + 1) if length % n == 0), default=1)
    pages = length // page_size
    page_table = [[*range(1, pages, 2), *range(0, pages, 2)]]
    return {"page_table": page_table, "kv_lens": [length * 7 // 8], "page_size": page_size}


def _check_inner(inner: Any) -> None:
    if not isinstance(inner, Mask | Score):
        raise ValueError(f"`inner` must be a Mask or a Score, as get_mask or get_score make them, got {inner!r}.")
