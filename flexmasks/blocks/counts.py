"""What a BlockMask skips, and what kernels may rely on: read off its lists, and proven element by element."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks.blocks.build import Elements, in_use

_TILE = 16  # keys that a kernel looks at in one go, at least


@dataclass(frozen=True)
class Blocks:
    """The blocks of a mask, counted: what `Mask.blocks` gives.

    Counts and shares are over the batch and heads that the mask depends on. Shares count pairs of a query and a key
    that exist: where a length is no multiple of the block size, the blocks at the edge count with what they have.

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

    block_mask: BlockMask  # torch's, to be given to `attention` or to flex_attention
    undecided: int | None = None  # blocks that ranges left open, looked at element by element; None: not known
    not_understood: tuple[str, ...] = ()  # operations of the function that ranges do not know, or why they gave up

    @property
    def total(self) -> int:
        """Number of blocks."""
        return self._partial[0].numel() * -(-self.block_mask.seq_lengths[1] // self._sizes[1])

    @functools.cached_property
    def partial(self) -> int:
        """Number of blocks with visible and hidden pairs: kernels evaluate the mask there."""
        return int(self._partial[0].sum())

    @functools.cached_property
    def full(self) -> int:
        """Number of blocks that are visible as a whole: kernels leave out the mask there."""
        return int(self._full[0].sum())

    @property
    def empty(self) -> int:
        """Number of blocks that are hidden as a whole: kernels skip them."""
        return self.total - self.partial - self.full

    @functools.cached_property
    def shares(self) -> tuple[float, float, float]:
        """The shares of all pairs that lie in empty, partial and full blocks."""
        partial, full = (area / self._pairs for area in (self._area(*self._partial), self._area(*self._full)))
        return max(0.0, 1 - partial - full), partial, full

    @property
    def sparsity(self) -> float:
        """The share of all pairs that is skipped, from 0 to 1: those in empty blocks."""
        return self.shares[0]

    @functools.cached_property
    def hidden(self) -> float:
        """The share of the computed pairs, those in partial and full blocks, that the mask hides: work for nothing.

        Evaluates the mask at every pair in partial blocks.
        """
        computed = self._area(*self._partial) + self._area(*self._full)
        if not computed:
            return 0.0
        b, h, i, n = in_use(*self._partial).nonzero().unbind(1)
        j = self._partial[1][b, h, i, n].long()
        visible = self._area(*self._full) + sum(int(seen.sum()) for seen in self._seen(b, h, i, j, self._sizes[1]))
        return 1 - visible / computed

    @functools.cached_property
    def contiguous(self) -> bool:
        """Whether the blocks of every list, partial and full, of a row and of a column, are next to each other.

        That is what the kernel option BLOCKS_ARE_CONTIGUOUS promises. Causal attention has it where the lengths are
        multiples of the block size: blocks that the edge cuts are partial, which leaves gaps in the lists of columns.
        """
        made = self.block_mask
        if made.q_num_blocks is None or made.q_indices is None:
            return False
        columns = [(made.q_num_blocks, made.q_indices)]
        if made.full_q_num_blocks is not None and made.full_q_indices is not None:
            columns.append((made.full_q_num_blocks, made.full_q_indices))
        return all(_without_gap(*lines) for lines in (self._partial, self._full, *columns))

    @functools.cached_property
    def rows_guaranteed_safe(self) -> bool:
        """Whether every query sees one of the first 16 keys of the first block in its list, partial before full.

        That is what the kernel option ROWS_GUARANTEED_SAFE needs, more than its documentation says: with it a kernel
        gives NaN for a row that sees nothing in the first tile it looks at, also where the row sees keys in later
        ones. Causal attention has it, a sliding window has not.
        """
        counts, indices = self._partial
        if bool(((counts == 0) & (self._full[0] == 0)).any()):
            return False
        b, h, i = (counts > 0).nonzero().unbind(1)
        j = indices[b, h, i, 0].long()
        keys = min(_TILE, self._sizes[1])
        return all(bool(seen.any(2).all()) for seen in self._seen(b, h, i, j, keys, missing_rows=True))

    @property
    def kernel_options(self) -> dict[str, bool]:
        """Options for torch's flex_attention that are proven to hold: for its kernel for many queries, on triton.

        ROWS_GUARANTEED_SAFE holds without a score_mod; one that returns -inf hides, too. `attention` sets both by
        itself for masks without tensors; what holds for a tensor may not for the next, and a change compiles anew.
        """
        facts = {"ROWS_GUARANTEED_SAFE": self.rows_guaranteed_safe, "BLOCKS_ARE_CONTIGUOUS": self.contiguous}
        return {name: True for name, holds in facts.items() if holds}

    def __str__(self) -> str:
        rows, columns = self._sizes
        lines = [
            f"blocks of {rows} x {columns}: {self.total}, of which empty {self.empty}, partial {self.partial}, "
            f"full {self.full}; skipped: {self.sparsity:.1%}"
        ]
        if self.undecided is not None:
            lines.append(f"looked at element by element: {self.undecided}")
        if self.not_understood:
            lines.append(f"which ranges left open, as they do not understand: {', '.join(self.not_understood)}")
        return "\n".join(lines)

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.block_mask.BLOCK_SIZE

    @property
    def _partial(self) -> tuple[Tensor, Tensor]:
        return self.block_mask.kv_num_blocks, self.block_mask.kv_indices

    @property
    def _full(self) -> tuple[Tensor, Tensor]:
        made = self.block_mask
        if made.full_kv_num_blocks is None or made.full_kv_indices is None:
            return torch.zeros_like(made.kv_num_blocks), made.kv_indices
        return made.full_kv_num_blocks, made.full_kv_indices

    @property
    def _pairs(self) -> int:
        q_len, kv_len = self.block_mask.seq_lengths
        return self._partial[0][..., 0].numel() * q_len * kv_len

    def _area(self, counts: Tensor, indices: Tensor) -> int:
        """Pairs in the listed blocks."""
        (height, width), (q_len, kv_len) = self._sizes, self.block_mask.seq_lengths
        rows, columns = counts.shape[-1], -(-kv_len // width)
        with_last = ((indices == columns - 1) & in_use(counts, indices)).any(-1)
        wide = counts.long() * width - with_last * (columns * width - kv_len)
        high = (q_len - torch.arange(rows, device=counts.device) * height).clamp(max=height)
        return int((wide * high).sum())

    def _seen(
        self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, keys: int, missing_rows: bool = False
    ) -> Iterator[Tensor]:
        """Which pairs of blocks (b, h, i, j) with their first `keys` keys are visible, [n, queries, keys] in chunks.

        What lies past the edge is hidden, or, with `missing_rows`, queries past it see what the last one sees.
        """
        (height, width), (q_len, kv_len) = self._sizes, self.block_mask.seq_lengths
        device = i.device
        elements = Elements(self.block_mask.mask_mod, device)
        rows, columns = torch.arange(height, device=device), torch.arange(keys, device=device)
        for part in torch.arange(len(b), device=device).split(elements.at_once(height * keys)):
            q, kv = i[part, None] * height + rows, j[part, None] * width + columns
            seen = elements(b[part], h[part], q.clamp(max=q_len - 1), kv.clamp(max=kv_len - 1))
            seen = seen & (kv < kv_len)[:, None, :]
            yield seen if missing_rows else seen & (q < q_len)[:, :, None]


def _without_gap(counts: Tensor, indices: Tensor) -> bool:
    gaps = indices[..., 1:] - indices[..., :-1] != 1
    return not bool((gaps & in_use(counts, indices)[..., 1:]).any())
