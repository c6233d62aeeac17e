"""Whole masks as tensors, with the tiles that hold all visible pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.build import materialize
from flexmasks.blocks.decide import dependence
from flexmasks.blocks.elements import boolean, over_indices, over_visible
from flexmasks.blocks.lists import of_block_mask, pairs_shown
from flexmasks.kernels.index_lists import visible_tiles
from flexmasks.kernels.whole_mask import in_wide_rows, spans_of
from flexmasks.plans.bounds import SizedMask
from flexmasks.plans.sizes import Offset, shifted_mask, shifted_score
from flexmasks.spec.bands import Factors
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Score


class Whole(NamedTuple):
    """A whole mask, and its tiles of 128 keys."""

    visible: Tensor  # bool [B or 1, H or 1, Q, KV]
    # The lists of `visible_tiles`: int32 [B or 1, H or 1], and with the tiles behind them.
    partial_counts: Tensor
    partial: Tensor
    full_counts: Tensor
    full: Tensor


class Spanned(NamedTuple):
    """A whole mask of many queries, and the spans of its tiles, see `kernels.whole_mask`."""

    visible: Tensor  # bool [B or 1, H or 1, Q or 1, KV or more]
    key_spans: Tensor
    query_spans: Tensor


class Added(NamedTuple):
    """Numbers that a score change adds to all scores. They are weight * numbers, or numbers if there is no weight."""

    numbers: Tensor  # float32 [B or 1, H or 1, Q or 1, KV]
    weight: Tensor | None = None  # float32 [B or 1, H or 1, Q or 1, 1]

    def product(self) -> Tensor:
        return self.numbers if self.weight is None else self.weight * self.numbers


def whole_of(given: SizedMask) -> Whole:
    visible = _visible_of(given)
    return Whole(visible, *visible_tiles(visible))


def spanned_of(given: SizedMask) -> Spanned:
    visible = _visible_of(given, one_row=True)
    return Spanned(in_wide_rows(visible), *spans_of(visible, given.size.q_len))


def _visible_of(given: SizedMask, one_row: bool = False) -> Tensor:
    """The pairs that are visible, by operations of fixed shapes; the host reads values only if the sizes say so.

    one_row: a mask that does not depend on the query has one row, for all of them.

    Raises what the mask's own function raises.
    """
    size = given.size
    mask_mod = shifted_mask(given.mask._bind(given.mask._resolve(size, given.lifted)), given.offset)
    batch, heads = dependence(mask_mod, size.batch, size.heads, size.device, reads_values=False)
    indices = (torch.arange(n, device=size.device) for n in (batch, heads, size.q_len, size.kv_len))
    visible = boolean(over_indices(mask_mod)(*indices), 4)
    if one_row and visible.stride(2) == 0:  # vmap has expanded what does not depend on this index
        visible = visible[:, :, :1]
    return visible.clone(memory_format=torch.contiguous_format)


def visible_in(block_mask: compat.BlockMask, batch: int, heads: int) -> Tensor:
    """The pairs that given blocks show, bool [batch or 1, heads or 1, Q, KV]."""
    blocks = of_block_mask(block_mask)
    device = blocks[0].device
    q, kv = (torch.arange(n, device=device) for n in block_mask.seq_lengths)
    by_function = materialize(block_mask.mask_mod, batch, heads, len(q), len(kv), device)
    return pairs_shown(blocks, block_mask.BLOCK_SIZE, q, kv, by_function)


def added_of(score: Score, offset: Offset, size: Size) -> Tensor:
    """What a score change adds, which only adds: float32 [B or 1, H or 1, Q or 1, KV].

    The host reads no value of a tensor unless the sizes say that it may.
    """
    return added_by(shifted_score(score._bind(score._resolve(size)), offset), size)


def multiplied(factors: Factors, offset: Offset, size: Size) -> tuple[Tensor, Tensor]:
    """Numbers and weight, see `Added`, of a score change that adds the slope of each head times the distance."""
    rows, keys = (torch.arange(n, device=size.device) for n in (size.q_len, size.kv_len))
    starts = offset if isinstance(offset, int) else offset.view(-1, 1, 1, 1)
    distance = keys - (rows[:, None] + starts)
    distance = -distance.abs() if factors.is_absolute else distance
    weight = factors.slopes.float().view(1, -1, 1, 1).clone()  # in memory of its own
    return distance.float().expand(*[1] * (4 - distance.ndim), *distance.shape), weight


def added_by(score_mod: Callable[..., Tensor], size: Size, visible: Tensor | None = None) -> Tensor:
    """What a score_mod adds, see `added_of`; with gradients, where they are wanted.

    visible: bool [B or 1, H or 1, Q or 1, KV or more]; tensors learn from what is added to visible pairs alone.
    """
    indices = [torch.arange(n, device=size.device) for n in (size.batch, size.heads, size.q_len, size.kv_len)]
    no_score = torch.zeros((), dtype=size.dtype, device=size.device)
    added = over_visible(score_mod, None, no_score, *indices)
    fixed = [dim for dim in range(3) if added.stride(dim) == 0]  # vmap has expanded what does not depend on this index
    if visible is not None and added.requires_grad:
        seen = visible[..., : size.kv_len].any(fixed, keepdim=True) if fixed else visible[..., : size.kv_len]
        added = over_visible(score_mod, seen, no_score, *indices)
    for dim in fixed:
        added = added.narrow(dim, 0, 1)
    return added.float().clone(memory_format=torch.contiguous_format)


class Summand(NamedTuple):
    """What a score change adds, made at each call of its tensors, which may learn."""

    tensors: Sequence[Tensor]
    of: Callable[[Sequence[Tensor], Tensor], Tensor]  # of these tensors, and of which pairs are visible

    def numbers(self, visible: Tensor) -> Tensor:
        """The numbers [G, H or 1, Q or 1, KV], of any floating dtype; B / G batch elements share a row.

        visible: as for `added_by`.
        """
        return self.of(self.tensors, visible)


def as_rows(tensors: Sequence[Tensor]) -> Tensor:
    """A bias as kernels read it: with four dimensions, the last in one piece."""
    bias = tensors[0].expand(*(1,) * (4 - tensors[0].ndim), *tensors[0].shape)
    return bias if bias.stride(3) == 1 else bias.contiguous()
