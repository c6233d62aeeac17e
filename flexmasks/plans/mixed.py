"""Mixed batches: sequences that decode, and others that take chunks of a prompt.

Their queries are laid end to end. They become batches of rows, where a row has queries of one sequence only. On a CPU,
sequences with equally many queries are one batch. On a GPU, where the host reads no number of queries, pieces of a
fixed number of queries are one batch: its shape depends on the shapes of the call alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FEWEST_ROWS, _MOST_ROWS = 16, 64  # queries in a piece: the smallest tile of a kernel, and four of them


class PagedSequences(NamedTuple):
    """The sequences of a mixed batch."""

    offsets: Tensor  # int64[N + 1], the first query of each sequence, and the end of the last one
    q_offset: Tensor  # int64[N], the position of the first query of each sequence
    page_table: Tensor  # int[N, P]
    kv_lens: Tensor  # int[N]

    @property
    def lasts(self) -> Tensor:
        """The position of the last query of each sequence, int32[N]; 0 if it has neither queries nor keys."""
        return (self.q_offset + self.offsets.diff() - 1).clamp(min=0).int()


class Batch(NamedTuple):
    """A batch, of which each row has queries of one sequence."""

    tokens: Tensor  # int64[B, n], the query in each place
    sequences: Tensor  # int32[B]
    q_offset: Tensor  # int64[B], the position of the first query
    page_table: Tensor  # int[B, P]
    kv_lens: Tensor  # int[B]


class Mixed(NamedTuple):
    """A mixed batch as batches of rows."""

    batches: list[Batch]
    places: Tensor  # int64[T], the place of each query among those of all rows; queries of no sequence are behind them
    firsts: Tensor  # int32[N], the positions of the first and the last query of each sequence
    lasts: Tensor
    offsets: Tensor  # int32[N], the first query of each sequence among all


def by_number_of_queries(given: PagedSequences, total: int) -> Mixed:
    """Batches of sequences with equally many queries. The host reads the offsets.

    total: the number T of queries, with those of no sequence.
    """
    by_count: dict[int, list[int]] = {}
    for sequence, count in enumerate(given.offsets.diff().tolist()):
        if count:
            by_count.setdefault(count, []).append(sequence)
    batches = []
    device = given.offsets.device
    places = torch.full((total,), int(given.offsets[-1]), device=device)
    before = 0
    for count, members in by_count.items():
        chosen = torch.tensor(members, device=device)
        tokens = given.offsets[chosen][:, None] + torch.arange(count, device=device)
        places[tokens] = torch.arange(before, before + tokens.numel(), device=device).view_as(tokens)
        before += tokens.numel()
        rows = given.q_offset[chosen], given.page_table[chosen], given.kv_lens[chosen]
        batches.append(Batch(tokens, chosen.int(), *rows))
    return Mixed(batches, places, given.q_offset.int(), given.lasts, given.offsets[:-1].int())


def in_pieces(given: PagedSequences, total: int) -> Mixed:
    """One batch of pieces of the same number of queries; `total` as above. The host reads no value.

    The last piece of a sequence has queries that count for nothing, and some pieces are empty: there are as many as the
    sequences may need.
    """
    offsets, count, device = given.offsets, len(given.kv_lens), given.offsets.device
    if not total:
        return Mixed([], offsets.new_empty(0), given.q_offset.int(), given.lasts, offsets[:-1].int())
    n = _FEWEST_ROWS
    while n < _MOST_ROWS and n * count < total:
        n *= 2
    needed = (offsets.diff() + n - 1) // n
    ends = needed.cumsum(0)
    before = ends - needed
    piece = torch.arange(total // n + count, device=device)
    sequence = torch.searchsorted(ends, piece, right=True)
    is_used = sequence < count
    sequence = sequence.clamp(max=count - 1)
    skipped = torch.where(is_used, (piece - before[sequence]) * n, 0)
    tokens = (offsets[sequence] + skipped)[:, None] + torch.arange(n, device=device)
    rows = Batch(
        tokens.clamp(0, total - 1),
        sequence.int(),
        given.q_offset[sequence] + skipped,
        given.page_table[sequence],
        torch.where(is_used, given.kv_lens[sequence], 0),
    )
    token = torch.arange(total, device=device)
    owner = (torch.searchsorted(offsets, token, right=True) - 1).clamp(0, count - 1)
    place = before[owner] * n + token - offsets[owner]
    places = torch.where(token < offsets[-1], place, len(piece) * n)
    of_sequences = given.q_offset.int(), given.lasts, offsets[:-1].int()
    return Mixed([Batch(*map(_with_layout, rows))], places, *map(_with_layout, of_sequences))


def _with_layout(x: Tensor) -> Tensor:
    """Fix a tensor's layout: torch 2.11 compiles no function that reads one whose layout its compiler may choose."""
    return x.as_strided(x.shape, x.stride())
