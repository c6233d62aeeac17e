"""Whole blocks as bits, each word with 32 keys of a query."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks import limits
from flexmasks.blocks.decide import Axis
from flexmasks.blocks.elements import Elements, MaskMod, coordinates_of, places_of
from flexmasks.blocks.lists import flat_nonzero
from flexmasks.workers import Workers

BITS = 32  # of a word
_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1, it gathers them in the highest byte of the product


class Bits(NamedTuple):
    """Partial blocks of a mask, and their bits."""

    places: Tensor  # int64 [n], flat places in `shape`, in order
    shape: torch.Size  # B, H, rows and columns of blocks
    words: Tensor  # int32 [n, queries, keys / 32], on the device of the mask


def can_be_bits(block_size: tuple[int, int]) -> bool:
    """Return whether blocks of this size can be bits: powers of 2 from 32 on."""
    return all(n >= BITS and n & (n - 1) == 0 for n in block_size)


def are_few(blocks: int, block_size: tuple[int, int]) -> bool:
    """Return whether the bits of all these blocks may be kept at once."""
    return blocks * block_size[0] * block_size[1] <= limits.ELEMENTS_KEPT


def words_of(elements: Elements, blocks: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """Return the words of blocks: int32 [n, queries, keys / 32].

    Queries and keys past the edge have the bits of the last query and key.

    blocks: [n, (b, h, row, column)], on the device that the function sees its indices on.
    """
    height, width = rows.block_size, columns.block_size
    words = torch.empty((len(blocks), height, width // BITS), dtype=torch.int32, device=blocks.device)
    q_offsets, kv_offsets = torch.arange(height, device=blocks.device), torch.arange(width, device=blocks.device)
    parts = list(zip(*(x.split(_blocks_at_once(elements, height * width)) for x in (blocks, words)), strict=True))

    def evaluate(parts: list[tuple[Tensor, Tensor]]) -> None:
        for chunk, out in parts:
            b, h, row, column = chunk.unbind(1)
            q = (row[:, None] * height + q_offsets).clamp_(max=rows.length - 1)
            kv = (column[:, None] * width + kv_offsets).clamp_(max=columns.length - 1)
            out.copy_(packed(elements(b, h, q, kv)))

    workers = Workers(1, 0)
    if not compat.transforms_active():  # a transform is active in the caller's thread only
        workers = Workers.of(blocks.device, len(blocks) * height * width, max(1, len(parts)))
    workers.all([functools.partial(evaluate, parts[n :: workers.count]) for n in range(workers.count)])
    return words


def _blocks_at_once(elements: Elements, size: int) -> int:
    on_cpu = elements.device.type == "cpu"
    at_once = limits.WHOLE_ELEMENTS_AT_ONCE_ON_CPU if on_cpu else limits.WHOLE_ELEMENTS_AT_ONCE_ON_GPU
    return min(elements.blocks_at_once(size), max(1, at_once // size))


def packed(visible: Tensor) -> Tensor:
    """Return booleans [n, queries, keys] as words [n, queries, keys / 32].

    The lowest bit is the first key. Eight booleans are read as one number, its lowest byte first.
    """
    eight = visible.contiguous().view(torch.int64)
    return ((eight * _GATHER) >> 56).to(torch.uint8).view(torch.int32)


def seen_in(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether any, and whether all bits of each block are set."""
    flat = words.flatten(1)
    return (flat != 0).any(1), (flat == -1).all(1)


def inside_the_edge(words: Tensor, row: Tensor, column: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """Return words in which queries and keys past the edge are hidden.

    row, column: of each block.
    """
    if rows.length % rows.block_size == 0 and columns.length % columns.block_size == 0:
        return words
    q, kv = (
        torch.arange(axis.count * axis.block_size, device=words.device).view(axis.count, axis.block_size) < axis.length
        for axis in (rows, columns)
    )
    return words & -q.int()[row][:, :, None] & packed(kv[:, None])[column]


def bits_of_partial(
    partial: Tensor, undecided: Tensor, compact: torch.Size, words: Tensor, rows: Axis, columns: Axis
) -> Bits:
    """Return the bits of all partial blocks.

    partial: bool [B, H, rows, columns].
    undecided, words: flat places of blocks in the shape `compact`, in order, and the words of these blocks. A dimension
        on which the mask does not depend has size 1 there. All other partial blocks are full, but for the edge.
    """
    places = flat_nonzero(partial)
    coordinates = coordinates_of(places, partial.shape)
    among = places_of(coordinates, compact)
    if not torch.equal(among, undecided):
        number = torch.searchsorted(undecided, among).clamp_(max=max(0, len(undecided) - 1))
        full = words.new_full((1, *words.shape[1:]), -1)
        if len(undecided):
            number = torch.where(undecided[number] == among, number, len(undecided))
        words = torch.cat([words, full])[number.to(words.device)]
    row, column = coordinates[:, 2:].to(words.device).unbind(1)
    return Bits(places, partial.shape, inside_the_edge(words, row, column, rows, columns))


def bits_in_parts(
    mask_mod: MaskMod, blocks: Tensor, lengths: tuple[int, int], block_size: tuple[int, int]
) -> Iterator[Tensor]:
    """Yield the words of blocks, some blocks at a time.

    Pairs past the edge are hidden.

    blocks: [n, (b, h, row, column)].
    """
    rows, columns = (Axis(length, size) for length, size in zip(lengths, block_size, strict=True))
    elements = Elements(mask_mod, blocks.device)
    for chunk in blocks.split(max(1, limits.ELEMENTS_KEPT // (block_size[0] * block_size[1]))) if len(blocks) else ():
        yield inside_the_edge(words_of(elements, chunk, rows, columns), chunk[:, 2], chunk[:, 3], rows, columns)
