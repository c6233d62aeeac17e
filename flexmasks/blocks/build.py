"""The blocks of a mask, and the whole mask as booleans."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks import limits
from flexmasks.blocks.bits import Bits, are_few, bits_of_partial, visible_in_words, words_of
from flexmasks.blocks.decide import Axis, Decided, decide, decide_within, dependence
from flexmasks.blocks.elements import Elements, MaskMod, boolean, coordinates_of, over_indices
from flexmasks.blocks.limits import Work
from flexmasks.blocks.lists import flat_nonzero, index_lists, made_of
from flexmasks.blocks.undecided import look_at
from flexmasks.devices import on_gpu
from flexmasks.kernels.index_lists import index_lists as index_lists_operator
from flexmasks.kernels.index_lists import plain_index_lists
from flexmasks.kernels.operators import positions

_PAIRS_AT_ONCE = 1 << 26  # pairs of a mask as booleans that are evaluated at once


class Layout(NamedTuple):
    """The index tensors of a BlockMask, without the mask function and the user's tensors that it may hold."""

    q_len: int
    kv_len: int
    block_size: tuple[int, int]
    indices: tuple[Tensor, ...]  # in BlockMask's order: kv, full_kv, q, full_q, each (counts, indices)
    undecided: int | None  # number of blocks looked at element by element, None for bounds
    not_understood: tuple[str, ...]  # names of operations that ranges do not know, or the reason why they gave up
    bits: Bits | None = None  # bits of the partial blocks, if they were asked for and are few
    unknown: int = 0  # number of partial blocks that may be empty or full, because they were not looked at

    def block_mask(self, mask_mod: MaskMod) -> compat.BlockMask:
        return made_of((self.q_len, self.kv_len), self.indices, self.block_size, mask_mod)


def build(
    mask_mod: MaskMod,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    block_size: tuple[int, int] = (128, 128),
    with_bits: bool = False,
    may_be_narrow: bool = False,
    work: Work | None = None,
    count: Callable[[], Tensor | None] | None = None,
) -> Layout:
    """Find a mask's empty, partial and full blocks, exactly those of torch's create_block_mask.

    with_bits: whether undecided blocks are evaluated whole, and their bits kept; `bits.can_be_bits` must hold.
    may_be_narrow: whether lists of many blocks may have fewer places than there are blocks, where torch's kernels take
        such lists: on a GPU, from torch 2.14 on.
    work: if it is limited, blocks that are unknown when it is spent count as partial.
    count: returns how many pairs of each block are visible, int [B or 1, H or 1, rows, columns], if that is known; then
        the function is not called.

    Raises MemoryError if there are too many blocks.
    """
    rows, columns = Axis(q_len, block_size[0]), Axis(kv_len, block_size[1])
    may_be_narrow &= compat.TAKES_NARROW_LISTS and on_gpu(device)  # other kernels want a place for each block
    if batch * heads * rows.count * columns.count > limits.BLOCKS_AT_ONCE:
        batch, heads = dependence(mask_mod, batch, heads, device) if batch * heads > 1 else (1, 1)
        limits.check_blocks(batch * heads, (q_len, kv_len), block_size, device, has_wide_lists=not may_be_narrow)
    work = Work.exact() if work is None else work
    counts = count() if count is not None else None
    if counts is None:
        decided = decide_within(work, mask_mod, batch, heads, rows, columns, device)
    else:
        decided = Decided(counts == math.prod(block_size), counts > 0, (), 1)
    shape = (*decided.certain.shape[:2], rows.count, columns.count)
    is_narrow = may_be_narrow and 4 * math.prod(shape) > limits.ENTRIES_OF_WIDE_LISTS
    limits.check_blocks(shape[0] * shape[1], (q_len, kv_len), block_size, device, has_wide_lists=not is_narrow)
    if math.prod(shape) > 4 * limits.BLOCKS_ON_CPU:
        decided = decided._replace(certain=decided.certain.to(device), possible=decided.possible.to(device))
    ones = None
    if not is_narrow and decided.certain.is_cuda:  # filled while the host prepares the next operations
        ones = torch.ones(4 * math.prod(shape), dtype=torch.int32, device=decided.certain.device)
    if counts is None:
        found = _find(decided, Elements(mask_mod, device, decided.widest, work), rows, columns, with_bits)
    else:
        found = _Found(_marked(decided.possible, decided.certain, rows, columns), 0, None, 0)
    not_understood, marked = decided.not_understood, found.partial_and_full
    del decided  # frees its memory before the lists are made
    indices = tuple(t.to(device) for t in index_lists(marked, ones, is_narrow))
    return Layout(q_len, kv_len, block_size, indices, found.undecided, not_understood, found.bits, found.unknown)


class _Found(NamedTuple):
    partial_and_full: Tensor  # which blocks are partial and which are full, bool [2, B, H, rows, columns]
    undecided: int  # number of blocks that ranges did not decide
    bits: Bits | None  # of the partial blocks
    unknown: int  # number of partial blocks that may be empty or full


def _find(decided: Decided, elements: Elements, rows: Axis, columns: Axis, with_bits: bool) -> _Found:
    compact = decided.certain.shape
    count = int((decided.possible ^ decided.certain).count_nonzero())
    words: Tensor | None = None
    undecided = torch.zeros(0, dtype=torch.int64, device="cpu")
    if with_bits and are_few(count, (rows.block_size, columns.block_size)):
        undecided = flat_nonzero((decided.possible ^ decided.certain).contiguous())
        words = words_of(elements, coordinates_of(undecided, compact).to(elements.device), rows, columns)
        any_visible, all_visible = (decided.certain.clone(memory_format=torch.contiguous_format) for _ in range(2))
        seen = torch.stack(visible_in_words(words)).to(any_visible.device)
        any_visible.view(-1)[undecided], all_visible.view(-1)[undecided] = seen
    else:
        any_visible, all_visible = look_at(elements, decided, rows, columns) if count else (decided.certain,) * 2
    partial_and_full = _marked(any_visible, all_visible, rows, columns)
    bits = None if words is None else bits_of_partial(partial_and_full[0], undecided, compact, words, rows, columns)
    is_exact = words is not None or not elements.work.is_spent
    unknown = 0 if is_exact else int((all_visible & ~any_visible).expand(partial_and_full.shape[1:]).sum())
    return _Found(partial_and_full, count, bits, unknown)


def _marked(any_visible: Tensor, all_visible: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """Which blocks are partial and which are full: bool [2, B, H, rows, columns]."""
    shape = (2, *any_visible.shape[:2], rows.count, columns.count)
    partial, full = marked = torch.empty(shape, dtype=torch.bool, device=any_visible.device)
    full.copy_(any_visible & all_visible)
    if rows.length % rows.block_size:  # for torch a block that the edge cuts is partial: pairs past the edge are hidden
        full[..., -1, :] = False
    if columns.length % columns.block_size:
        full[..., -1] = False
    torch.bitwise_xor((any_visible | all_visible).expand(full.shape), full, out=partial)
    return marked


def bounds(
    mask_mod: MaskMod,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    block_size: tuple[int, int] = (128, 128),
    is_traced: bool = False,
) -> Layout:
    """Find the blocks that are certainly full or possibly visible, from ranges alone, by operations of fixed shapes.

    A block that ranges cannot decide counts as partial: kernels evaluate the mask there, so attention is exact all the
    same. The host reads no value of a tensor, so the operations can be traced, compiled, and captured in a CUDA graph.

    is_traced: whether torch.compile traces this; no memory is asked for then.
    """
    rows, columns = Axis(q_len, block_size[0]), Axis(kv_len, block_size[1])
    if not is_traced:
        limits.check_blocks(1, (q_len, kv_len), block_size, device)
    decided = decide(mask_mod, batch, heads, rows, columns, device, reads_values=False)
    shape = (*decided.certain.shape[:2], rows.count, columns.count)
    full, possible = (x.expand(shape).to(device) for x in (decided.certain, decided.possible))
    if q_len % block_size[0]:  # for torch a block that the edge cuts is partial: pairs past the edge are hidden
        full = full & (torch.arange(rows.count, device=device) < rows.count - 1)[:, None]
    if kv_len % block_size[1]:
        full = full & (torch.arange(columns.count, device=device) < columns.count - 1)
    return Layout(q_len, kv_len, block_size, lists_of_blocks(possible, full), None, decided.not_understood)


def lists_of_blocks(possible: Tensor, full: Tensor) -> tuple[Tensor, ...]:
    """The index tensors of blocks of which some and all pairs are visible, by operations of fixed shapes."""
    # A compiler that sees the operations fuses them; on a CPU the operator would only be one more call.
    make_lists = index_lists_operator if on_gpu(full.device) else plain_index_lists
    return tuple(make_lists((possible & ~full).contiguous(), full.contiguous()))


def any_visible(mask_mod: MaskMod, batch: int, heads: int, rows: Axis, columns: Axis, device: torch.device) -> Tensor:
    """Whether any pair of each block is visible, so that kernels compute it: bool [B, H, rows, columns], with B and H 1
    if the mask does not depend on the index.
    """
    decided = decide(mask_mod, batch, heads, rows, columns, device)
    visible = look_at(Elements(mask_mod, device, decided.widest), decided, rows, columns)[0]
    return visible.expand(*visible.shape[:2], rows.count, columns.count)


def materialize(mask_mod: MaskMod, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """The mask: bool [batch or 1, heads or 1, q_len, kv_len]. What else is computed, such as distances, is bounded.

    Raises MemoryError if the mask takes more memory than is free.
    """
    if compat.is_compiling():  # torch traces neither ranges nor questions about memory
        indices = [positions(n, device) for n in (batch, heads, q_len, kv_len)]
        return boolean(over_indices(mask_mod)(*indices), 4)
    batch, heads = dependence(mask_mod, batch, heads, device)
    limits.check_memory(
        batch * heads * q_len * kv_len,
        device,
        f"the mask of {q_len:,} queries x {kv_len:,} keys as booleans",
        "Ask for a part of the queries at a time, with `q_offset`, or for blocks: flexmasks.block_mask.",
    )
    b, h, q, kv = (torch.arange(n, device=device) for n in (batch, heads, q_len, kv_len))
    rows = max(1, _PAIRS_AT_ONCE // (batch * heads * kv_len))
    if rows >= q_len:
        return boolean(over_indices(mask_mod)(b, h, q, kv), 4)
    mask = torch.empty(batch, heads, q_len, kv_len, dtype=torch.bool, device=device)
    for part, out in zip(q.split(rows), mask.split(rows, 2), strict=True):
        out.copy_(boolean(over_indices(mask_mod)(b, h, part, kv), 4))
    return mask
