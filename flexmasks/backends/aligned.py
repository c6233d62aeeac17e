"""Packed documents laid out so that each starts at a block, for kernels whose tiles of keys are cut at blocks.

A tile then has the keys of one document alone, at the places where it would have them if the document were the only
one: the results of a document do not depend on where in a row it lies. The tokens are copied into slots, and results
are taken out again; functions of masks and scores get the tokens' own indices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.build import lists_of_blocks
from flexmasks.blocks.lists import made_of, of_block_mask
from flexmasks.errors import Unfit
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.portable import function_of_lists
from flexmasks.plans.windows import Look


def in_one_list(block_mask: compat.BlockMask, *, full_are_hidden: bool = False) -> compat.BlockMask:
    """Return a BlockMask whose full blocks are partial ones.

    torch's kernels read partial blocks first, then full ones. Here they read all in the order of their keys.

    full_are_hidden: the function may hide pairs of full blocks, as that of a user's own BlockMask.
    """
    partial, full = of_block_mask(block_mask)
    mask_mod = block_mask.mask_mod
    if full_are_hidden and block_mask.full_kv_num_blocks is not None:
        mask_mod = function_of_lists(block_mask)
    return _of_possible(block_mask.seq_lengths, partial | full, block_mask.BLOCK_SIZE, _hiding(mask_mod))


def _hiding(mask_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a mask by which a kernel hides scores, though the lengths that it knows may tell that it hides none."""

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask_mod(b, h, q, kv) & _is_pair(q, kv)

    return visible


def _is_pair(q: Tensor, kv: Tensor) -> Tensor:
    """True, which no compiler knows: in all kernels the place of q or that of kv comes from a list of blocks.

    A choice by it stays between two products, which a compiler would otherwise fuse with what follows, as the code
    around them tells.
    """
    return (q >= 0) & (kv >= 0)


def rounded_first(score_mod: Callable[..., Tensor] | None) -> Callable[..., Tensor] | None:
    """Return a score change that gets scores rounded, in kernels of any form.

    A kernel multiplies scores by the scale. Where a change adds a product to them, a compiler fuses the sum with either
    product, and so rounds the other one alone. A choice leaves it one of them, see `_is_pair`.
    """
    if score_mod is None:
        return None
    own = score_mod

    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return own(torch.where(_is_pair(q, kv), score, 0.0), b, h, q, kv)

    return changed


def _of_possible(lengths: Any, possible: Tensor, block_size: Any, mask_mod: Callable[..., Tensor]) -> compat.BlockMask:
    by_row, of_row, _, _, by_column, of_column, *_ = lists_of_blocks(possible, torch.zeros_like(possible))
    lists = by_row, of_row, None, None, by_column, of_column, None, None
    return made_of(lengths, lists, block_size, mask_mod)


class Aligned(NamedTuple):
    """Slots of the tokens of each row of a batch, or of one row for all."""

    table: Tensor  # int32 [B or 1, slots], what kernels read: the token in a slot, or -1 - token for padding
    tokens: Tensor  # int64 [B or 1, slots], a token of the same document for padding
    slots: Tensor  # int64 [B or 1, S], the slot of each token
    documents: Tensor  # int64 [B or 1, slots], the number of the slot's document
    is_wrong: Tensor  # bool, whether there are more documents than were promised
    starts: Tensor  # int32 [N + 1], where the documents of all rows start, end to end, and the last one's end
    unpadded: Tensor | None = None  # int32, the number of tokens before the padding of a row; None if there is none
    # Inside documents the mask is causal: slots tell it, as their distances are those of tokens, and padding is behind.
    is_causal: bool = False

    @classmethod
    def of(cls, mask: MaskPlan) -> tuple[Aligned, tuple[Look, ...]]:
        """Return the slots of a mask's documents, and looks that confirm them. Raises Unfit."""
        made, look = mask.sequences()
        with torch.no_grad():
            size, count = mask.size, made.q.shape[0] - 1
            in_row = count // size.batch if look is None else mask.room_in_row(made)
            step = math.lcm(*mask.block_size)
            room = -(-(size.q_len + torch.sym_min(in_row, size.q_len) * (step - 1)) // step) * step
            placed = _placed(made.q, size.batch, size.q_len, room, step)
            window = mask.window
            is_causal = window is not None and window.has_sequences and (window.left, window.right) == (None, 0)
            placed = placed._replace(is_causal=is_causal)
            if look is None:
                before_padding = made.counts[0]
                return placed._replace(is_wrong=placed.is_wrong | (before_padding < 0), unpadded=before_padding), ()
            return placed, (look, Look.at(placed.is_wrong.int().view(1), functools.partial(_judge, in_row)))

    def for_batch(self, batch: int) -> Aligned:
        """Return the slots of one row if they are those of all."""
        if batch > 1:
            return self
        table, tokens, slots, documents = (t[:1] for t in self[:4])
        return self._replace(table=table, tokens=tokens, slots=slots, documents=documents)

    def block_mask(self, block_mask: compat.BlockMask, *, in_graph: bool = False) -> compat.BlockMask:
        """Return the BlockMask of slots for one of tokens, in one list, see `in_one_list`.

        in_graph: the user's torch.compile may run flex_attention as a debugger does, which reads no lists.

        A block of slots is computed if a block of tokens is that has tokens of both its rows and its columns, and if it
        lies in one document.
        """
        height, width = block_mask.BLOCK_SIZE
        length = self.table.shape[1]
        partial, full = of_block_mask(block_mask)
        possible = partial | full
        rows, columns = self._blocks(height), self._blocks(width)
        batch = torch.arange(self.table.shape[0], device=self.table.device)[:, None, None, None]
        of_batch = batch if possible.shape[0] > 1 else torch.zeros_like(batch)
        heads = torch.arange(possible.shape[1], device=self.table.device)[:, None, None]
        shown = None
        for row in (rows.first // height, rows.last // height):
            for column in (columns.first // width, columns.last // width):
                seen = possible[of_batch, heads, row[:, None, :, None], column[:, None, None, :]]
                shown = seen if shown is None else shown | seen
        is_one = rows.document[:, None, :, None] == columns.document[:, None, None, :]
        has_tokens = rows.has_tokens[:, None, :, None] & columns.has_tokens[:, None, None, :]
        if self.unpadded is not None:
            has_tokens = has_tokens & (rows.first < self.unpadded)[:, None, :, None]
        shown = (cast(Tensor, shown) & is_one & has_tokens).contiguous()
        mask_mod = self._mask_mod(block_mask.mask_mod)
        if self.is_causal:
            mask_mod = self._causal_inside() if in_graph else _causal
        return _of_possible((length, length), shown, block_mask.BLOCK_SIZE, mask_mod)

    def _blocks(self, size: int) -> _Blocks:
        table, tokens = self.table, self.tokens
        return _Blocks(tokens[:, ::size], tokens[:, size - 1 :: size], self.documents[:, ::size], table[:, ::size] >= 0)

    def _mask_mod(self, mask_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
        table, has_rows = self.table, self.table.shape[0] > 1

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            row = b if has_rows else b % 1
            q, kv = table[row, i], table[row, j]
            seen = mask_mod(b, h, torch.where(q < 0, -1 - q, q), torch.where(kv < 0, -1 - kv, kv))
            return seen & (q >= 0) & (kv >= 0)

        return visible

    def _causal_inside(self) -> Callable[..., Tensor]:
        documents, has_rows = self.documents.int(), self.table.shape[0] > 1
        if self.unpadded is not None:
            documents = torch.where(self.tokens < self.unpadded, documents, -1)

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            row = b if has_rows else b % 1
            own = documents[row, i]
            return (j <= i) & (own == documents[row, j]) & (own >= 0)

        return visible

    def score_mod(self, score_mod: Callable[..., Tensor] | None, *, is_relative: bool) -> Callable[..., Tensor] | None:
        """is_relative: the score depends on distances alone."""
        if score_mod is None or is_relative:
            return score_mod
        table, has_rows, of_tokens = self.table, self.table.shape[0] > 1, score_mod

        def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            row = b if has_rows else b % 1
            q, kv = table[row, i], table[row, j]
            return of_tokens(score, b, h, torch.where(q < 0, -1 - q, q), torch.where(kv < 0, -1 - kv, kv))

        return changed

    def around(self, attend: Callable[..., tuple[Tensor, Tensor | None]], *qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return output and lse, or None, of tokens whose slots `attend` takes."""
        out, lse = attend(*map(self.laid, qkv))
        return self.taken(out), None if lse is None else self.taken(lse[..., None])[..., 0]

    def laid(self, x: Tensor) -> Tensor:
        """Return [B, H, slots, D] of [B, H, S, D]. A padded slot has what a token of its document has."""
        return cast(Tensor, _Taken.apply(x, self.tokens, self.slots, None))

    def like(self, x: Tensor) -> Tensor:
        """Return a tensor without memory that is like `laid(x)`."""
        batch, heads, _, size = x.shape
        return x.new_empty((batch, self.table.shape[1], heads, size), device="meta").transpose(1, 2)

    def taken(self, x: Tensor) -> Tensor:
        """Return [B, H, S, D] of [B, H, slots, D], NaN if there are more documents than were promised.

        No key in a padded slot is seen. Its query sees nothing, or, where the mask is causal in slots, its gradient
        is 0.
        """
        padding = self.table < 0 if self.is_causal else None
        return torch.where(self.is_wrong, math.nan, cast(Tensor, _Taken.apply(x, self.slots, self.tokens, padding)))


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def _judge(in_row: int, is_wrong: list[int]) -> None:
    if is_wrong[0]:
        raise Unfit(f"the kernel takes at most {in_row} documents in a row here, and there are more")


class _Blocks(NamedTuple):
    """Blocks of slots [B or 1, blocks]: the first and the last token of each, its document, and if it has tokens."""

    first: Tensor
    last: Tensor
    document: Tensor
    has_tokens: Tensor


def _placed(offsets: Tensor, batch: int, length: int, room: int, step: int) -> Aligned:
    """Return where tokens lie if each document starts at a multiple of `step`, by operations of fixed shapes.

    offsets: int32 [N + 1], where the documents of all rows of `length` tokens start, end to end, and the last ends.
    room: the number of slots of a row.
    """
    starts = offsets.long()
    device, first, ends = starts.device, starts[:-1], starts[1:]
    whole = (ends - first + step - 1) // step * step
    until = whole.cumsum(0)  # the slots of all documents up to one
    before = until - whole
    tokens = torch.arange(batch * length, device=device)
    # Inductor searches the memory that a slice is a view of from its beginning on: `starts`, in place of `ends`.
    of_token = torch.searchsorted(starts, tokens, right=True) - 1
    firsts = torch.arange(batch, device=device)[:, None] * length
    of_row, last_of_row = of_token.view(batch, length)[:, :1], of_token.view(batch, length)[:, -1:]
    begins = before[of_row]  # of each row, among the slots of all rows
    slots = (before[of_token] + tokens - first[of_token]).view(batch, length) - begins
    places = torch.arange(room, device=device) + begins
    documents = torch.minimum(torch.searchsorted(until, places, right=True), last_of_row)
    in_slot, stop = first[documents] + places - before[documents], ends[documents]
    has_token = in_slot < stop
    own = torch.minimum(in_slot, stop - 1) - firsts
    is_wrong = (slots[:, -1] >= room).any()
    table = torch.where(has_token, own, -1 - own).int()
    return Aligned(table, own, slots.clamp(max=room - 1), documents, is_wrong, offsets)


class _Taken(torch.autograd.Function):
    """Rows of [B, H, S, D] by their numbers [B or 1, N], whose gradient is taken back by numbers, without any sum.

    hidden: bool [B or 1, S], rows whose gradient is 0; None for none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, back: Tensor, hidden: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, hidden)
        return _rows(x, numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back, hidden = ctx.saved_tensors
        taken = _rows(gradient, back)
        return taken if hidden is None else taken.masked_fill_(hidden[:, None, :, None], 0), None, None, None


def _rows(x: Tensor, numbers: Tensor) -> Tensor:
    if numbers.shape[0] == 1:
        return x.index_select(2, numbers[0])
    batch = torch.arange(x.shape[0], device=x.device)[:, None]
    return x.transpose(1, 2)[batch, numbers].transpose(1, 2)
