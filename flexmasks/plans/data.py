"""Masks as data: the bits of partial blocks, which kernels read instead of a function.

A kernel that reads bits is exact for every function, and is the same for all functions.

Source: JAX's splash attention keeps partial blocks so; Inductor's and FLASH's compilers, which evaluate some functions
otherwise than Python does, never see the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.bits import BITS, Bits, bits_in_parts, can_be_bits
from flexmasks.blocks.elements import coordinates_of, places_of
from flexmasks.blocks.lists import grid, in_use, lists_of, made_of, of_block_mask
from flexmasks.spec.indexing import bounded

# Sizes of the table of words, in bytes. Few sizes need few kernels, because a kernel is compiled for each size.
_CAPACITIES = (1 << 18, 1 << 21, 1 << 24, 1 << 26, 1 << 28)
_PRODUCTS_AT_ONCE = 1 << 22  # numbers of 64 bits
_MAX_LISTS = 1 << 24  # bytes of block lists that may be repeated for each batch element and head


class CannotBeData(ValueError):
    """Error of a mask that cannot go as data."""


class TooLargeForData(CannotBeData):
    """Error of a mask whose bits take too much memory."""


@dataclass(frozen=True)
class MaskData:
    """Lists of blocks, and the bits of partial blocks."""

    lengths: tuple[int, int]
    block_size: tuple[int, int]
    lists: tuple[Tensor | None, ...]  # as in BlockMask
    words: Tensor  # int32 [blocks, queries, keys / 32], the bits of different partial blocks, an empty and a full one
    table: Tensor  # int32 [B, H, rows, columns], the place of each block's bits in `words`
    different: int  # number of different partial blocks

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.lists, self.words, self.table) if t is not None)

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return self.words.shape, self.table.shape

    def block_mask(self, for_flash: bool = False) -> compat.BlockMask:
        mask_mod = (_divided if for_flash else reading_bits)(self.words, self.table, self.block_size)
        return made_of(self.lengths, self.lists, self.block_size, mask_mod)


def data_of(block_mask: compat.BlockMask, batch: int, heads: int, bits: Bits | None = None) -> MaskData:
    """A BlockMask's blocks, and the bits of partial ones, which are computed if they are not given.

    batch, heads: sizes of a call. Small lists are repeated for each of them, so that all masks have the same kernel.

    Raises CannotBeData, and TooLargeForData for too many different blocks. Raises what the mask's function raises.
    """
    lengths, block_size = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    if not can_be_bits(block_size):
        raise CannotBeData("blocks can be data only if their sizes are powers of 2 from 32 on")
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    rows, columns = grid(lengths, block_size)
    is_small = batch * heads * rows * columns * 4 <= _MAX_LISTS
    sizes = (batch, heads) if is_small else (counts.shape[0], counts.shape[1])
    parts_of_words: Iterable[Tensor]
    if bits is None:
        blocks = in_use(counts, indices).nonzero()
        blocks[:, 3] = indices[tuple(blocks.unbind(1))]
        parts_of_words = bits_in_parts(block_mask.mask_mod, blocks, lengths, block_size)
    else:
        blocks, parts_of_words = coordinates_of(bits.places, bits.shape), [bits.words]
    words, number, different = _distinct_words(parts_of_words, block_size, counts.device)
    shape = (*counts.shape[:2], next_power_of_2(rows), next_power_of_2(columns))
    # Eager flex_attention asks mask_mod for all pairs, not only for those of partial blocks.
    table = torch.full(shape, different, dtype=torch.int32, device=counts.device)
    table[..., :rows, :columns].masked_fill_(of_block_mask(block_mask)[1], different + 1)
    table.view(-1).scatter_(0, places_of(blocks, shape).to(counts.device), number.int())
    table = table.expand(*sizes, -1, -1).contiguous()
    lists = [None if t is None else t.expand(*sizes, *t.shape[2:]).contiguous() for t in lists_of(block_mask)]
    return MaskData(lengths, block_size, tuple(lists), words, bounded(table, 0, len(words) - 1), different)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is at least n, and 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def reading_bits(words: Tensor, table: Tensor, block_size: tuple[int, int]) -> Callable[..., Tensor]:
    """Return a mask_mod that reads bits by shifts."""
    (q_shift, kv_shift), (q_rest, kv_rest) = (n.bit_length() - 1 for n in block_size), (n - 1 for n in block_size)
    has_batch, has_heads = table.shape[0] > 1, table.shape[1] > 1

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        number = table[b if has_batch else b % 1, h if has_heads else h % 1, q >> q_shift, kv >> kv_shift]
        word = words[number, q & q_rest, (kv & kv_rest) >> 5]
        return (word >> (kv & 31)) & 1 != 0

    return visible


def _divided(words: Tensor, table: Tensor, block_size: tuple[int, int]) -> Callable[..., Tensor]:
    """Return a mask_mod that reads bits by divisions, for FLASH's compiler, which knows no shifts."""
    height, width = block_size
    has_batch, has_heads = table.shape[0] > 1, table.shape[1] > 1
    bits = torch.ones(BITS, dtype=torch.int32, device=words.device) << torch.arange(BITS, device=words.device).int()

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        number = table[b if has_batch else b % 1, h if has_heads else h % 1, q // height, kv // width]
        return words[number, q % height, kv % width // 32] & bits[kv % 32] != 0

    return visible


def _distinct_words(
    parts_of_words: Iterable[Tensor], block_size: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """The different blocks' words, behind them those of an empty and of a full block; each block's number; how many
    differ.
    """
    height, width = block_size
    bytes_of_block = height * width // 8
    weights = torch.randint(
        -(1 << 62), 1 << 62, (height * width // BITS,), generator=torch.Generator().manual_seed(0), device="cpu"
    )
    weights = (weights | 1).to(device)
    parts: list[Tensor] = []
    numbers: list[Tensor] = []
    count = 0
    for words in parts_of_words:
        distinct, number = _distinct(words.flatten(1), weights)
        parts.append(distinct)
        numbers.append(number + count)
        count += len(distinct)
        if (count + 2) * bytes_of_block > _CAPACITIES[-1]:
            parts, numbers = _joined(parts, numbers, weights)
            count = len(parts[0])
        if (count + 2) * bytes_of_block > _CAPACITIES[-1]:
            raise TooLargeForData(f"the bits of its different partial blocks take more than {_CAPACITIES[-1] >> 20} MB")
    if len(parts) > 1:
        parts, numbers = _joined(parts, numbers, weights)
    count = len(parts[0]) if parts else 0
    capacity = next(n for n in _CAPACITIES if (count + 2) * bytes_of_block <= n) // bytes_of_block
    words = torch.zeros((capacity, height, width // BITS), dtype=torch.int32, device=device)
    words[count + 1] = -1
    if not parts:
        return words, torch.zeros(0, dtype=torch.int64, device=device), 0
    words[:count] = parts[0].view(-1, height, width // BITS)
    return words, numbers[0], count


def _joined(parts: list[Tensor], numbers: list[Tensor], weights: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The parts as one, without repetitions, and all numbers in it."""
    distinct, number = _distinct(torch.cat(parts), weights)
    return [distinct], [number[torch.cat(numbers)]]


def _distinct(words: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The different rows, and the number of each row among them. The host waits for the device once.

    Rows are compared by their sums with random weights. If the sums of two different rows are equal, rows are sorted.
    """
    if not len(words):
        return words, torch.zeros(0, dtype=torch.int64, device=words.device)
    at_once = max(1, _PRODUCTS_AT_ONCE // words.shape[1])
    sums, order = torch.cat([(chunk * weights).sum(1) for chunk in words.split(at_once)]).sort()
    is_first = torch.ones(len(words), dtype=torch.bool, device=words.device)
    torch.ne(sums[1:], sums[:-1], out=is_first[1:])
    number_in_order = is_first.cumsum(0) - 1
    number = torch.empty_like(order).scatter_(0, order, number_in_order)
    one_of_each = torch.empty_like(order).scatter_(0, number_in_order, order)  # one row of each sum, and then nothing
    is_right = (words[one_of_each[number]] == words).all()
    count, are_right = torch.stack([number_in_order[-1] + 1, is_right]).tolist()
    if are_right:
        return words[one_of_each[:count]], number
    distinct, number = torch.unique(words, dim=0, return_inverse=True)
    return distinct, number
