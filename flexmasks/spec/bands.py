"""Native forms of masks and scores: bands and caps.

Some kernels compute windows, also inside sequences, and soft-caps without any function of indices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexmasks.spec.definitions import AND
from flexmasks.spec.parameters import Size, may_read
from flexmasks.spec.values import Mask, Score


@dataclass(frozen=True)
class Sequences:
    """Sequences laid end to end over all batch elements.

    q and kv are int32[N + 1], the start of each sequence and the end of the last one.

    If tensors may not be read, nobody knows where padding starts. Then the sequences cover all tokens: padding is in
    sequences of its own, and kernels must hide what they compute there.
    """

    q: Tensor
    kv: Tensor
    longest: tuple[int, int]  # lengths of the longest sequence of queries, and of keys, or upper bounds of them
    used: tuple[int, int] | None  # ends of the last sequence of queries, and of keys; padding follows; None: unknown
    # Numbers of queries and of keys before the padding in each batch element, int64[1], if `used` is None.
    counts: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.kv.nbytes

    def of_heads(self, heads: int, length: int) -> Sequences:
        """Return the sequences of [B, H, S, D], read as one line head after head.

        This holds for self-attention without padding, or with padding in sequences of its own, where `self` lays batch
        elements of `length` tokens end to end.
        """
        starts, end = self.q[:-1].long(), self.q[-1:].long() * heads
        steps = torch.arange(heads, device=starts.device)[:, None] + starts // length * (heads - 1)
        # An empty sequence at the end of a batch element counts as one of the next batch element, if there is a next.
        line = torch.minimum(starts + steps * length, end).flatten().sort().values
        q = torch.cat([line, end]).int()
        used = None if self.used is None else (heads * self.used[0], heads * self.used[1])
        return Sequences(q, q, self.longest, used, self.counts)


@dataclass(frozen=True)
class Band:
    """A mask of the keys at distances -left..right of a query.

    The distance is kv - q, inside the query's own sequence. A bound of None means that there is none.

    left, right: numbers of keys before and after the query's position, both included.
    sequences: a function that finds the sequences, and returns None if the tokens are not laid end to end; None in its
        place for one sequence of all tokens.
    """

    left: int | None = None
    right: int | None = None
    sequences: Callable[[], Sequences | None] | None = None


def band_of(mask: Mask, size: Size) -> Band | None:
    """Return a mask as a band, or None if it is none at these sizes."""
    if mask.definition is AND:
        bands = [band_of(m, size) for m in mask.params["masks"]]
        return None if None in bands else intersection([b for b in bands if b is not None])
    hook = mask.definition.native
    return None if hook is None else hook(size, **mask.checked(size))


def cap_of(score: Score, size: Size) -> float | None:
    """Return the cap of a soft-cap, or None for any other score."""
    hook = score.definition.native
    return None if hook is None else hook(size, **score.checked(size))


def intersection(bands: list[Band]) -> Band | None:
    """Return the band of pairs that all bands show.

    The result is None if more than one band has sequences.
    """
    lefts = [b.left for b in bands if b.left is not None]
    rights = [b.right for b in bands if b.right is not None]
    with_sequences = [b.sequences for b in bands if b.sequences is not None]
    if len(with_sequences) > 1:
        return None
    return Band(min(lefts, default=None), min(rights, default=None), next(iter(with_sequences), None))


def in_sequences(
    band: Band | None,
    size: Size,
    offsets: Tensor,
    kv_offsets: Tensor | None = None,
    q_start: int | Tensor = 0,
    max_length: int | None = None,
) -> Band | None:
    """Return the band inside sequences that are laid end to end in each batch element.

    The result is None if the band is None or has sequences already. `Band.sequences` decides later whether kernels can
    take the sequences. If it may not read tensors, the result is also None where only their values could decide.

    offsets, kv_offsets: int[N + 1], the starts of each sequence's queries and keys, from 0, and the end of the last
        one; kv_offsets is offsets by default.
    q_start: the position of each sequence's first query; its first key is at 0.
    max_length: an upper bound of the lengths of sequences.
    """
    if band is None or band.sequences is not None:
        return None
    is_bounded = (band.left, band.right) != (None, None)
    tensors = [x for x in (offsets, kv_offsets, q_start) if isinstance(x, Tensor)]
    if not may_read(size, *tensors):
        # Kernels count windows from the end of a sequence's queries and the end of its keys.
        if is_bounded and not (kv_offsets is None and isinstance(q_start, int) and q_start == 0):
            return None
        return replace(band, sequences=lambda: _with_padding(size, offsets, kv_offsets, max_length))

    def find() -> Sequences | None:
        q_starts = offsets.long()
        kv_starts = q_starts if kv_offsets is None else kv_offsets.long()
        q_lengths = q_starts.diff()
        # Kernels count windows from the end of a sequence's queries and the end of its keys.
        if is_bounded and not bool(((kv_starts.diff() - q_lengths == q_start) | (q_lengths == 0)).all()):
            return None
        starts_of_both = [x.tolist() for x in (q_starts, kv_starts)]
        for starts, length in zip(starts_of_both, (size.q_len, size.kv_len), strict=True):
            has_no_padding = size.batch == 1 or starts[-1] == length
            if starts[0] != 0 or starts[-1] > length or sorted(starts) != starts or not has_no_padding:
                return None
        return _over_batch(starts_of_both, size)

    return replace(band, sequences=find)


def _with_padding(size: Size, offsets: Tensor, kv_offsets: Tensor | None, max_length: int | None) -> Sequences:
    """Return the sequences of all batch elements without reading a value.

    The queries and keys behind the last sequence of a batch element follow in sequences of at most `max_length` tokens,
    the same number for both.
    """
    lengths = size.q_len, size.kv_len
    longest = [max(1, n if max_length is None else min(n, max_length)) for n in lengths]
    count = max(-(-n // most) for n, most in zip(lengths, longest, strict=True))
    starts = offsets.long()
    q = _lay(starts, size.batch, size.q_len, longest[0], count)
    if kv_offsets is None and size.q_len == size.kv_len:
        return Sequences(q, q, (longest[0], longest[1]), None, (starts[-1:], starts[-1:]))
    kv_starts = starts if kv_offsets is None else kv_offsets.long()
    kv = _lay(kv_starts, size.batch, size.kv_len, longest[1], count)
    return Sequences(q, kv, (longest[0], longest[1]), None, (starts[-1:], kv_starts[-1:]))


def _lay(starts: Tensor, batch: int, length: int, longest: int, count: int) -> Tensor:
    """Return the starts of sequences laid end to end over batch elements.

    The last value is the end of the last sequence. Batch elements have `length` tokens. `count` sequences of at most
    `longest` tokens hold the padding of each batch element.
    """
    steps = torch.arange(1, count + 1, device=starts.device) * longest
    ends = torch.cat([starts[1:], (starts[-1:] + steps).clamp(max=length)])
    first = torch.arange(batch, device=starts.device)[:, None] * length
    return torch.cat([starts[:1], (first + ends).flatten()]).int()


def in_runs(ids: Tensor, size: Size) -> Band | None:
    """Return the band that shows all pairs inside each run of equal ids.

    ids is [S] or [B, S]. The result is None if a run cannot be a sequence, or if the ids may not be read. If the ids
    decrease somewhere, the band's `sequences` returns None.
    """
    if not may_read(size, ids):
        return None
    if size.q_offset != 0 or size.q_len != size.kv_len or ids.shape[-1] != size.q_len:
        return None

    def find() -> Sequences | None:
        before, after = ids[..., :-1], ids[..., 1:]  # compared, not subtracted: a difference may overflow
        if bool((after < before).any()):
            return None
        is_last = torch.nn.functional.pad(after != before, (0, 1), value=True)
        starts = [0, *(is_last.reshape(-1).nonzero()[:, 0] + 1).tolist()]
        return _over_batch([starts, starts], replace(size, batch=1) if ids.ndim == 2 else size)

    return Band(sequences=find)


def _over_batch(starts_of_both: list[list[int]], size: Size) -> Sequences:
    """Return the sequences of all batch elements.

    starts_of_both: the starts inside one batch element, for the queries and for the keys, or inside all of them.
    """
    lengths = size.q_len, size.kv_len
    longest = [max((b - a for a, b in itertools.pairwise(starts)), default=0) for starts in starts_of_both]
    rows = [
        [0, *(i * length + n for i in range(size.batch) for n in starts[1:])]
        for starts, length in zip(starts_of_both, lengths, strict=True)
    ]
    q = torch.tensor(rows[0], dtype=torch.int32, device=size.device)
    kv = q if rows[0] == rows[1] else torch.tensor(rows[1], dtype=torch.int32, device=size.device)
    return Sequences(q, kv, (longest[0], longest[1]), (rows[0][-1], rows[1][-1]))
