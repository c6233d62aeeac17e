"""Counts of a BlockMask's blocks, and facts that kernels rely on."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.elements import Elements, MaskMod, coordinates_of
from flexmasks.blocks.lists import in_use, lists_of

_TILE = 16  # the fewest keys that a kernel looks at in one step


def pairs_in_blocks(counts: Tensor, indices: Tensor, lengths: tuple[int, int], block_size: tuple[int, int]) -> int:
    """The number of pairs in listed blocks, of which the edge may cut the last ones.

    counts, indices: [..., rows] and [..., rows, n], lists of key blocks as a BlockMask has them.
    lengths: numbers of queries and keys.
    """
    (height, width), (q_len, kv_len) = block_size, lengths
    rows, columns = counts.shape[-1], -(-kv_len // width)
    has_last_column = ((indices == columns - 1) & in_use(counts, indices)).any(-1)
    keys = counts.long() * width - has_last_column * (columns * width - kv_len)
    queries = (q_len - torch.arange(rows, device=counts.device) * height).clamp(max=height)
    return int((keys * queries).sum())


def _nth_listed(nth: Tensor, counts: Tensor, indices: Tensor) -> Tensor:
    # The result is [n, (b, h, row, column)].
    counts_of_line = counts.flatten().long()
    ends = counts_of_line.cumsum(0)
    line = torch.searchsorted(ends, nth, right=True)
    column = indices.flatten(0, -2)[line, nth - ends[line] + counts_of_line[line]].long()
    return torch.cat([coordinates_of(line, counts.shape), column[:, None]], 1)


def visible_in_blocks(
    mask_mod: MaskMod,
    blocks: Tensor,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    keys: int | None = None,
    repeat_last_query: bool = False,
) -> Iterator[Tensor]:
    """Yield which pairs of blocks [n, (b, h, row, column)] are visible, in chunks [n, queries, keys].

    keys: number of keys of each block to look at, from its first on; by default all.
    repeat_last_query: queries past the edge see what the last query sees. By default they see nothing. Keys past the
        edge are always hidden.
    """
    (height, width), (q_len, kv_len) = block_size, lengths
    keys = width if keys is None else keys
    elements = Elements(mask_mod, blocks.device)
    q_offsets, kv_offsets = torch.arange(height, device=blocks.device), torch.arange(keys, device=blocks.device)
    for chunk in blocks.split(elements.blocks_at_once(height * keys)) if len(blocks) else ():
        b, h, row, column = chunk.unbind(1)
        q, kv = row[:, None] * height + q_offsets, column[:, None] * width + kv_offsets
        visible = elements(b, h, q.clamp(max=q_len - 1), kv.clamp(max=kv_len - 1))
        visible = visible & (kv < kv_len)[:, None, :]
        yield visible if repeat_last_query else visible & (q < q_len)[:, :, None]


@dataclass(frozen=True, repr=False)
class Blocks:
    """Counts of a mask's blocks, as `Mask.blocks` returns them.

    Counts and shares are over the batch and heads that the mask depends on. Shares count existing pairs of a query and
    a key: where the edge cuts a block, only its pairs inside the edge count.

    They are exact if `unknown` is 0. Otherwise they are those of the BlockMask, where unknown blocks are partial:
    `partial` is at most that large, and `empty`, `full` and `sparsity` are at least that large.

    Example:
        >>> import flexmasks
        >>> blocks = flexmasks.get_mask("causal").blocks(1024)
        >>> blocks.empty, blocks.partial, blocks.full
        (28, 8, 28)
        >>> f"{blocks.sparsity:.1%} skipped, {blocks.hidden:.1%} of the rest hidden"
        '43.8% skipped, 11.0% of the rest hidden'
        >>> blocks.kernel_options
        {'ROWS_GUARANTEED_SAFE': True, 'BLOCKS_ARE_CONTIGUOUS': True}
    """

    block_mask: compat.BlockMask  # for `attention`, or torch's flex_attention
    undecided: int | None = None  # number of blocks looked at element by element, None if it is not known
    not_understood: tuple[str, ...] = ()  # names of operations that ranges do not know, or why they gave up
    unknown: int = 0  # number of partial blocks that may be empty or full: they were not looked at to the end

    @property
    def total(self) -> int:
        return self._partial[0].numel() * -(-self.block_mask.seq_lengths[1] // self._block_size[1])

    @functools.cached_property
    def partial(self) -> int:
        """The number of blocks where kernels evaluate the mask: with visible and hidden pairs, or cut by the edge."""
        return int(self._partial[0].sum())

    @functools.cached_property
    def full(self) -> int:
        """The number of blocks without hidden pairs, where kernels do not evaluate the mask."""
        return int(self._full[0].sum())

    @property
    def empty(self) -> int:
        """The number of blocks without visible pairs, which kernels skip."""
        return self.total - self.partial - self.full

    @property
    def _all_pairs(self) -> int:
        return self._partial[0][..., 0].numel() * self._lengths[0] * self._lengths[1]

    @functools.cached_property
    def shares(self) -> tuple[float, float, float]:
        """The shares of all pairs in empty, partial and full blocks, from 0 to 1."""
        partial, full = self.partial_pairs / self._all_pairs, self.full_pairs / self._all_pairs
        return max(0.0, 1 - partial - full), partial, full

    @property
    def sparsity(self) -> float:
        """The share of pairs in empty blocks, from 0 to 1."""
        return self.shares[0]

    @functools.cached_property
    def hidden(self) -> float:
        """The share of hidden pairs in partial and full blocks, from 0 to 1; evaluates the mask in partial blocks."""
        computed = self.partial_pairs + self.full_pairs
        return self.hidden_pairs() / computed if computed else 0.0

    @functools.cached_property
    def partial_pairs(self) -> int:
        return pairs_in_blocks(*self._partial, self._lengths, self._block_size)

    @functools.cached_property
    def full_pairs(self) -> int:
        return pairs_in_blocks(*self._full, self._lengths, self._block_size)

    def hidden_pairs(self, most_blocks: int | None = None) -> float:
        """The number of hidden pairs in partial blocks, estimated from `most_blocks` of them, evenly spread."""
        if not self.partial:
            return 0.0
        counts, indices = self._partial
        looked_at = self.partial if most_blocks is None else min(self.partial, most_blocks)
        nth = torch.arange(looked_at, device=counts.device) * self.partial // looked_at
        blocks = _nth_listed(nth, counts, indices)
        chunks = visible_in_blocks(self.block_mask.mask_mod, blocks, self._lengths, self._block_size)
        visible = sum(int(visible.sum()) for visible in chunks)
        (height, width), (q_len, kv_len) = self._block_size, self._lengths
        queries = (q_len - blocks[:, 2] * height).clamp(max=height)
        keys = (kv_len - blocks[:, 3] * width).clamp(max=width)
        return self.partial_pairs * (1 - visible / int((queries * keys).sum()))

    @functools.cached_property
    def contiguous(self) -> bool:
        """Whether the blocks in each list follow without gaps.

        The kernel option BLOCKS_ARE_CONTIGUOUS promises this for the lists of partial and of full blocks. It holds for
        causal attention if the lengths are multiples of the block size. Otherwise the edge makes some blocks partial,
        which leaves gaps in the lists of columns.
        """
        lists = lists_of(self.block_mask)
        if self.block_mask.q_indices is None:
            return False
        pairs = zip(lists[::2], lists[1::2], strict=True)
        return all(n is None or i is None or _is_without_gaps(n, i) for n, i in pairs)

    @functools.cached_property
    def rows_guaranteed_safe(self) -> bool:
        """Whether each query sees one of a kernel's first 16 keys.

        These are the first keys of the first block in the query's list, where partial blocks come before full blocks.
        The kernel option ROWS_GUARANTEED_SAFE needs this, which is more than its documentation says: with the option a
        kernel gives NaN for a row that sees nothing in the first tile of keys, even if the row sees keys in later
        tiles. It holds for causal attention, but not for a sliding window.
        """
        counts, indices = self._partial
        if bool(((counts == 0) & (self._full[0] == 0)).any()):
            return False
        b, h, row = (counts > 0).nonzero().unbind(1)
        blocks = torch.stack([b, h, row, indices[b, h, row, 0].long()], 1)
        keys = min(_TILE, self._block_size[1])
        chunks = visible_in_blocks(self.block_mask.mask_mod, blocks, self._lengths, self._block_size, keys, True)
        return all(bool(visible.any(2).all()) for visible in chunks)

    @property
    def kernel_options(self) -> dict[str, bool]:
        """The options of torch's Triton kernel for many queries that are proven to hold.

        ROWS_GUARANTEED_SAFE holds only without a score_mod, for a score_mod that returns -inf also hides pairs.
        `attention` sets neither option by itself: they gain a few percent at most, a changed option recompiles the
        kernel, and what holds for one content of a tensor may not hold for the next.
        """
        facts = {"ROWS_GUARANTEED_SAFE": self.rows_guaranteed_safe, "BLOCKS_ARE_CONTIGUOUS": self.contiguous}
        return {name: True for name, holds in facts.items() if holds}

    def __str__(self) -> str:
        rows, columns = self._block_size
        empty, partial, full, skipped = self._in_words()
        lines = [
            f"blocks of {rows} x {columns}: {self.total}, of which empty {empty}, partial {partial}, full {full}; "
            f"skipped: {skipped}"
        ]
        if self.unknown:
            lines.append(f"unknown: {self.unknown}, which count as partial; Mask.blocks(..., exact=True) looks at them")
        elif self.undecided is not None:
            lines.append(f"looked at element by element: {self.undecided}")
        if self.not_understood:
            lines.append(f"not understood by ranges: {', '.join(self.not_understood)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        height, width = self._block_size
        empty, partial, full, skipped = self._in_words()
        counts = f"{self.total} of {height} x {width}, {empty} empty, {partial} partial, {full} full"
        return f"Blocks({counts}; {skipped} of the pairs skipped)"

    def _in_words(self) -> tuple[str, str, str, str]:
        least, most = ("at least ", "at most ") if self.unknown else ("", "")
        return f"{least}{self.empty}", f"{most}{self.partial}", f"{least}{self.full}", f"{least}{self.sparsity:.1%}"

    @property
    def _block_size(self) -> tuple[int, int]:
        return self.block_mask.BLOCK_SIZE

    @property
    def _lengths(self) -> tuple[int, int]:
        return self.block_mask.seq_lengths

    @property
    def _partial(self) -> tuple[Tensor, Tensor]:
        return self.block_mask.kv_num_blocks, self.block_mask.kv_indices

    @property
    def _full(self) -> tuple[Tensor, Tensor]:
        block_mask = self.block_mask
        if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
            return torch.zeros_like(block_mask.kv_num_blocks), block_mask.kv_indices
        return block_mask.full_kv_num_blocks, block_mask.full_kv_indices


def _is_without_gaps(counts: Tensor, indices: Tensor) -> bool:
    gaps = indices[..., 1:] - indices[..., :-1] != 1
    return not bool((gaps & in_use(counts, indices)[..., 1:]).any())
