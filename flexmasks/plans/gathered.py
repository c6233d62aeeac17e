"""Copies of the pages of a few sequences, for many queries on a CPU.

In a copy the keys of a sequence lie side by side. In the pool a block has keys of several sequences, and it is computed
for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexmasks.plans.shifted import Offset, offsets_of

_MAX_BYTES = 1 << 26  # bytes of keys that are copied together, of more than one sequence


@dataclass(frozen=True)
class Gathered:
    """Batch elements whose pages are copied together."""

    batch: slice
    pages: list[Tensor]  # int64, the pages in use of each batch element
    room: int  # keys that each batch element has room for
    sequences: Tensor  # int32[G], the batch elements
    firsts: Tensor  # int32[B], the positions of the first and the last query of each batch element of the call
    lasts: Tensor
    q_offset: Tensor  # int64[G]
    kv_lens: Tensor  # int64[G]
    is_whole: bool  # all keys of the call lie in pages

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.pages, self.firsts, self.lasts, self.q_offset, self.kv_lens))

    def gathered(self, cache: Tensor) -> Tensor:
        """Copy the keys or values of each batch element from a cache [n_pages, page_size, Hkv, D]: [G, Hkv, room, D].

        Places behind the last page in use hold 0: kernels may read them, and weigh their values with 0.
        """
        size = cache.shape[1]
        keys = cache.new_empty(len(self.pages), self.room, *cache.shape[2:])
        for own, pages in zip(keys, self.pages, strict=True):
            end = len(pages) * size
            torch.index_select(cache, 0, pages, out=own[:end].unflatten(0, (-1, size)))
            own[end:] = 0
        return keys.transpose(1, 2)


def parts_of(page_table: Tensor, kv_lens: Tensor, q_offset: Offset, q_len: int, cache: Tensor) -> list[Gathered]:
    """The parts of a batch, whose copies of the cache's keys or values take bounded memory.

    The host reads the lengths. None of the given tensors is kept.
    """
    batch, columns = page_table.shape
    size = cache.shape[1]
    lens = kv_lens.tolist()
    together = max(1, _MAX_BYTES // (columns * cache[0].numel() * cache.element_size()))
    q_offset = offsets_of(q_offset, batch, kv_lens.device)
    firsts, lasts = q_offset.int(), (q_offset + q_len - 1).int()
    used = torch.arange(0, columns * size, size) < kv_lens[:, None]
    is_whole = not bool((used & ((page_table < 0) | (page_table >= len(cache)))).any())
    parts = []
    for first in range(0, batch, together):
        members = slice(first, min(first + together, batch))
        numbers = (page_table[b, : -(-lens[b] // size)].long() for b in range(members.start, members.stop))
        pages = [own.clamp(0, len(cache) - 1) for own in numbers]  # entries of keys that no query sees may be anything
        sequences = torch.arange(members.start, members.stop, dtype=torch.int32, device=kv_lens.device)
        rows = q_offset[members].clone(), kv_lens[members].long().clone()
        parts.append(Gathered(members, pages, columns * size, sequences, firsts, lasts, *rows, is_whole))
    return parts
