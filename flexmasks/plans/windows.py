"""Masks that dense kernels have themselves, and what such a kernel is to be told: windows, and packed sequences.

A definition's hook `dense` says it of a mask, as a Band; `told` fits it to the lengths of a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexmasks.spec.parameters import Size
from flexmasks.spec.values import AND, Mask, Score


@dataclass(frozen=True)
class Sequences:
    """Sequences laid end to end over all batch elements: int32[N + 1], where each starts and where the last ends."""

    q: Tensor
    kv: Tensor
    longest: tuple[int, int]  # of the queries' and of the keys' sequences
    used: tuple[int, int]  # where the last of them ends; what follows is padding

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.kv.nbytes

    def of_heads(self, heads: int, length: int) -> Sequences:
        """Those of self-attention without padding, with each head of each batch element laid end to end, [B, H, S]."""
        starts = self.q[:-1][self.q.diff() > 0].long()
        steps = torch.arange(heads, device=starts.device)[:, None] + starts // length * (heads - 1)
        last = self.q[-1:].long() * heads
        q = torch.cat([(starts + steps * length).flatten().sort().values, last]).int()
        return Sequences(q, q, self.longest, (heads * self.used[0], heads * self.used[1]))


@dataclass(frozen=True)
class Band:
    """A mask that shows each query the keys at kv - q in [-left, right], None for no bound, of its own sequence."""

    left: int | None = None
    right: int | None = None
    sequences: Callable[[], Sequences | None] | None = None  # None where they turn out not to be laid end to end


@dataclass(frozen=True)
class Dense:
    """A band over the keys [first, last), with query i at their position i + offset; left and right only if needed."""

    left: int | None
    right: int | None
    offset: int
    keys: tuple[int, int]
    sequences: Callable[[], Sequences | None] | None

    def cut(self, x: Tensor) -> Tensor:
        """Those of the keys or values [B, H, KV, D] that are seen."""
        first, last = self.keys
        return x if (first, last) == (0, x.shape[2]) else x[:, :, first:last]

    def pairs(self, q_len: int) -> float:
        """How many pairs of a query and a key are visible, about: those of one sequence."""
        keys = self.keys[1] - self.keys[0]

        def below(diagonal: int) -> float:
            """The area of 0 <= kv < min(keys, q + diagonal)."""
            first, last = (min(max(n, 0), keys) for n in (diagonal, diagonal + q_len))
            return (last - first) * (last + first) / 2 + keys * max(0, diagonal + q_len - max(diagonal, keys))

        seen = q_len * keys if self.right is None else below(self.offset + self.right)
        return seen if self.left is None else seen - below(self.offset - self.left)


def told(mask: Mask, size: Size) -> Dense | None:
    """What a dense kernel is to be told of the mask at these lengths, or None where that is not all of it."""
    band = band_of(mask, size)
    if band is None:
        return None
    if band.sequences is not None:
        return None if size.q_offset else Dense(band.left, band.right, 0, (0, size.kv_len), band.sequences)
    left, right, offset, end = band.left, band.right, size.q_offset, size.q_offset + size.q_len
    first = 0 if left is None else max(0, offset - left)
    last = size.kv_len if right is None else min(size.kv_len, end + right)
    if left is not None and end - 1 - left >= size.kv_len:
        return None  # the last queries see nothing
    if right is not None and offset + right >= last - 1:
        right = None
    if left is not None and end - 1 - left <= first:
        left = None
    return Dense(left, right, offset - first, (first, last), None)


def band_of(mask: Mask, size: Size) -> Band | None:
    """The mask as a band, or None."""
    if mask.definition is AND:
        bands = [band_of(m, size) for m in mask.params["masks"]]
        return None if None in bands else _both([b for b in bands if b is not None])
    hook = mask.definition.dense
    return None if hook is None else hook(size, **mask.checked(size))


def soft_cap(score: Score, size: Size) -> float | None:
    """The cap, where the change of scores is a soft-cap as kernels have it."""
    hook = score.definition.dense
    return None if hook is None else hook(size, **score.checked(size))


def _both(bands: list[Band]) -> Band | None:
    lefts, rights = (
        [n for n in side if n is not None] for side in zip(*((b.left, b.right) for b in bands), strict=True)
    )
    packed = [b.sequences for b in bands if b.sequences is not None]
    if len(packed) > 1:
        return None
    return Band(min(lefts, default=None), min(rights, default=None), packed[0] if packed else None)


def in_sequences(
    band: Band | None, size: Size, q: Tensor, kv: Tensor | None = None, q_start: int | Tensor = 0
) -> Band | None:
    """The band inside sequences that are laid end to end in each batch element: q, kv int[N + 1], from 0.

    q_start: the position of each sequence's first query; its first key is at 0.
    """
    if band is None or band.sequences is not None:
        return None
    bounded = (band.left, band.right) != (None, None)

    def laid() -> Sequences | None:
        q_starts = q.long()
        kv_starts = q_starts if kv is None else kv.long()
        many = q_starts.diff()
        if bounded and not bool(((kv_starts.diff() - many == q_start) | (many == 0)).all()):
            return None  # kernels count from the ends of a sequence's queries and keys
        places = [x.tolist() for x in (q_starts, kv_starts)]
        lengths = size.q_len, size.kv_len
        for starts, length in zip(places, lengths, strict=True):
            whole = size.batch == 1 or starts[-1] == length
            if starts[0] != 0 or starts[-1] > length or sorted(starts) != starts or not whole:
                return None
        return _over_batch(places, size)

    return replace(band, sequences=laid)


def in_runs(ids: Tensor, size: Size) -> Band | None:
    """Full in each run of equal ids, [S] or [B, S], where ids never fall."""
    if size.q_offset != 0 or size.q_len != size.kv_len or ids.shape[-1] != size.q_len:
        return None

    def laid() -> Sequences | None:
        before, after = ids[..., :-1], ids[..., 1:]  # not their difference, which may overflow
        if bool((after < before).any()):
            return None
        ends = torch.nn.functional.pad(after != before, (0, 1), value=True)
        starts = [0, *(ends.reshape(-1).nonzero()[:, 0] + 1).tolist()]
        return _over_batch([starts, starts], replace(size, batch=1) if ids.ndim == 2 else size)

    return Band(sequences=laid)


def _over_batch(places: list[list[int]], size: Size) -> Sequences:
    """Sequences whose starts in each batch element are `places`, of the queries and of the keys."""
    lengths = size.q_len, size.kv_len
    longest = [max((b - a for a, b in itertools.pairwise(p)), default=0) for p in places]
    rows = [
        [0, *(i * length + n for i in range(size.batch) for n in p[1:])]
        for p, length in zip(places, lengths, strict=True)
    ]
    q = torch.tensor(rows[0], dtype=torch.int32, device=size.device)
    kv = q if rows[0] == rows[1] else torch.tensor(rows[1], dtype=torch.int32, device=size.device)
    return Sequences(q, kv, (longest[0], longest[1]), (rows[0][-1], rows[1][-1]))
