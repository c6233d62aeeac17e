"""Blocks that parts of a sequence compute, and keys that they see."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from flexmasks import get_mask
from flexmasks.extend import (
    Band,
    MaskLike,
    MaskOverLengths,
    band_of,
    definition_of,
    in_message,
    inside,
    progress,
    says_what_to_write,
)

WHERE = "flexmasks.integrations.distributed"
_MOST_SPANS = 32  # each costs a pass over the mask's tensors
Parts = tuple[tuple[int, int], ...]  # parts of a sequence, (start, stop), ascending


def fail(call: str, message: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{WHERE}.{call}: {message}")


def check_int(call: str, name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        fail(call, f"`{name}` must be an int above 0, got {in_message(value)}.")


def check_range(call: str, name: str, value: Any, length: int) -> None:
    is_pair = (
        isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(n, int | np.integer) for n in value)
    )
    if not is_pair or not 0 <= value[0] <= value[1] <= length:
        fail(call, f"{name} must be (start, stop) with 0 <= start <= stop <= {length}, got {in_message(value)}.")


def are_ascending(parts: Sequence[tuple[int, int]]) -> bool:
    """Whether the starts ascend; torch.compile traces this for symbolic lengths, which it cannot sort."""
    return all(before[0] <= after[0] for before, after in itertools.pairwise(parts))


def merged(parts: Sequence[tuple[int, int]]) -> Parts:
    """Return parts in ascending order; parts that touch or overlap become one, empty ones none."""
    result: list[tuple[int, int]] = []
    for start, stop in parts if are_ascending(parts) else sorted(parts):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        elif start < stop:
            result.append((start, stop))
    return tuple(result)


def cut(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """A part as `count` parts, cut as torch.chunk cuts; the last ones may be shorter, or empty."""
    size = -(-(stop - start) // count)
    return [(min(start + i * size, stop), min(start + (i + 1) * size, stop)) for i in range(count)]


def following(lengths: Sequence[int]) -> tuple[Parts, ...]:
    """The parts of processes that hold a sequence one after the other."""
    stops = itertools.accumulate(lengths)
    return tuple(((stop - n, stop),) if n else () for n, stop in zip(lengths, stops, strict=True))


def size_of(parts: Parts) -> int:
    return sum(stop - start for start, stop in parts)


def common(parts: Parts, others: Parts) -> Parts:
    """The positions that are in both, in the order of `parts`, cut at the ends of both."""
    both = ((max(a, c), min(b, d)) for a, b in parts for c, d in others)
    return tuple((start, stop) for start, stop in both if start < stop)


def seen_through(band: Band, rows: tuple[int, int], length: int) -> tuple[int, int]:
    """The keys that rows (start, stop) of a sequence of some length see through a window."""
    first = 0 if band.left is None else max(0, rows[0] - band.left)
    return first, length if band.right is None else max(first, min(length, rows[1] + band.right))


class CountedMask:
    """A mask over a sequence of some length, whose blocks are counted strip by strip.

    call: the name of the function that errors name.
    """

    def __init__(
        self, call: str, mask: MaskLike, length: int, block_size: int, batch: int | None, heads: int | None
    ) -> None:
        check_int(call, "length", length)
        check_int(call, "block_size", block_size)
        mask = get_mask(mask)
        # The host decides strip by strip, and would wait for another device at each of them.
        mask = mask.to("cpu") if all(definition_of(m).by_library for m in inside(mask)) else mask
        self._mask = MaskOverLengths(
            f"{WHERE}.{call}", mask, q_len=length, batch=batch, heads=heads, block_size=block_size
        )
        self.size, self.length, self.block_size = self._mask.size, length, block_size

    def strips(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Tensor]]:
        """Yield strips of the computed blocks of some rows, as `MaskOverLengths.strips` does."""
        rows = sum(stop - start for start, stop in spans)
        with progress(f"counting the blocks of {self._mask.mask!r}", rows, "row") as advance:
            for start, stop in spans:
                for first, visible in self._mask.strips((start, stop)):
                    yield first, visible
                    advance(min(stop - first, visible.shape[2] * self.block_size))

    @functools.cached_property
    def _band(self) -> Band | None:
        band = band_of(self._mask.mask, self.size)
        return None if band is None or band.sequences is not None else band

    def seen(self, parts: Sequence[Parts]) -> list[Parts]:
        """The keys that each rank sees, given its parts of the sequence."""
        if self._band is None:
            return self.of_parts(parts)[1]
        return [merged([seen_through(self._band, part, self.length) for part in own]) for own in parts]

    def of_parts(self, parts: Sequence[Parts]) -> tuple[Tensor, list[Parts]]:
        """The number of blocks that each rank computes, int64 [ranks, heads or 1], summed over batch elements, and the
        keys that it sees, given its parts of the sequence.

        Blocks of queries start where a part starts. Parts that meet at a whole number of blocks are counted together.
        If more than 32 counts would be needed, blocks of queries start at multiples of the block size, and a row of
        blocks that is cut counts for both parts.
        """
        bounds = sorted((start, stop, rank) for rank, own in enumerate(parts) for start, stop in own)
        spans: list[tuple[int, int]] = []
        for start, stop, _ in bounds:
            if spans and start == spans[-1][1] and (start - spans[-1][0]) % self.block_size == 0:
                spans[-1] = spans[-1][0], stop
            else:
                spans.append((start, stop))
        if len(spans) > _MOST_SPANS:
            spans = [(0, self.length)]
        columns = -(-self.length // self.block_size)
        seen = torch.zeros(len(parts), columns, dtype=torch.bool, device="cpu")
        blocks = torch.zeros(len(parts), 1, dtype=torch.int64, device="cpu")
        at = 0
        for first, visible in self.strips(spans):
            copies = self.size.batch // visible.shape[0]
            span_stop = next(stop for start, stop in spans if start <= first < stop)
            end = min(first + visible.shape[2] * self.block_size, span_stop)  # a last block may reach further
            while bounds[at][1] <= first:
                at += 1
            for start, stop, rank in bounds[at:]:
                if start >= end:
                    break
                rows = slice(max(0, start - first) // self.block_size, -(-(stop - first) // self.block_size))
                own = visible[:, :, rows]
                if blocks.shape[1] != own.shape[1]:
                    blocks = blocks.expand(-1, own.shape[1]).clone()
                blocks[rank] += own.sum((0, 2, 3)).cpu() * copies
                if self._band is None:
                    seen[rank] |= own.flatten(0, 2).any(0).cpu()
        return blocks, [self._keys_in(columns) for columns in seen] if self._band is None else self.seen(parts)

    def _keys_in(self, seen: Tensor) -> Parts:
        """The keys in columns of blocks, bool [columns], as ranges."""
        edges = torch.nn.functional.pad(seen.to(torch.int8), (1, 1)).diff().nonzero()[:, 0] * self.block_size
        starts, stops = edges.clamp(max=self.length).view(-1, 2).unbind(1)
        return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


@says_what_to_write()
def computed_blocks(
    mask: MaskLike, length: int, *, block_size: int = 128, batch: int | None = None, heads: int | None = None
) -> Tensor:
    """Return the number of computed blocks in each row of blocks: int64 [rows].

    Computed blocks are partial and full blocks, summed over batch elements and heads. They are counted in strips of
    rows, in bounded memory.

    Args:
        mask: a name, a Mask, or a function (b, h, q, kv) -> bool of index tensors.
        length: the number of queries, and of keys.
        block_size: queries and keys of a block.
        batch, heads: numbers of batch elements and heads, by default those of the mask's tensors, or 1.

    Raises:
        ValueError, TypeError: an input does not fit.

    Example:
        >>> from flexmasks.integrations.distributed import computed_blocks
        >>> computed_blocks("causal", 512).tolist()
        [1, 2, 3, 4]
    """
    counted = CountedMask("computed_blocks", mask, length, block_size, batch, heads)
    rows = []
    for _, visible in counted.strips([(0, length)]):
        copies = counted.size.batch * counted.size.heads // visible.shape[:2].numel()
        rows.append(visible.sum((0, 1, 3)).cpu() * copies)
    return torch.cat(rows)


@says_what_to_write()
def seen_by(
    mask: MaskLike,
    rows: tuple[int, int],
    length: int,
    *,
    block_size: int = 128,
    batch: int | None = None,
    heads: int | None = None,
) -> Parts:
    """Return the keys that some queries see, as ranges (start, stop), ascending and apart.

    For windows (causal, sliding_window, ...) the ranges are exact. For other masks they are whole blocks of keys, of
    which the last one may be cut by the end of the sequence. They cover what any batch element and head sees.

    Args:
        rows: (start, stop), the queries, from 0 to at most `length`.
        mask, length, block_size, batch, heads: as in `computed_blocks`.

    Raises:
        ValueError, TypeError: an input does not fit.

    Example:
        >>> import flexmasks
        >>> from flexmasks.integrations.distributed import seen_by
        >>> seen_by(flexmasks.get_mask("sink_window", window=100, sinks=4), (2048, 3072), 4096)
        ((0, 128), (1920, 3072))
    """
    counted = CountedMask("seen_by", mask, length, block_size, batch, heads)
    check_range("seen_by", "`rows`", rows, length)
    start, stop = rows
    return counted.seen([((start, stop),)])[0] if start < stop else ()
