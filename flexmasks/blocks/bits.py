"""Whole blocks as bits, each word with 32 keys of a query."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks import limits
from flexmasks.blocks.decide import Axis
from flexmasks.blocks.elements import Elements, MaskMod, coordinates_of, places_of
from flexmasks.blocks.lists import flat_nonzero, grid
from flexmasks.workers import Workers

BITS = 32  # of a word
_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1, it gathers them in the highest byte of the product


class Bits(NamedTuple):
    """Partial blocks of a mask, and their bits."""

    places: Tensor  # int64 [n], flat places in `shape`, in order
    shape: torch.Size  # B, H, rows and columns of blocks
    words: Tensor  # int32 [n, queries, keys / 32], on the device of the mask


def can_be_bits(block_size: tuple[int, int]) -> bool:
    return all(n >= BITS and n & (n - 1) == 0 for n in block_size)


def are_few(blocks: int, block_size: tuple[int, int]) -> bool:
    return blocks * block_size[0] * block_size[1] <= limits.ELEMENTS_KEPT


def words_of(elements: Elements, blocks: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """Words of blocks [n, (b, h, row, column)]: int32 [n, queries, keys / 32], in which queries and keys past the edge
    have the bits of the last query and key.
    """
    height, width = rows.block_size, columns.block_size
    words = torch.empty((len(blocks), height, width // BITS), dtype=torch.int32, device=blocks.device)
    q_offsets, kv_offsets = torch.arange(height, device=blocks.device), torch.arange(width, device=blocks.device)
    most = limits.whole_elements_at_once(elements.device)
    at_once = min(elements.blocks_at_once(height * width), max(1, most // (height * width)))
    parts = list(zip(blocks.split(at_once), words.split(at_once), strict=True))

    def evaluate(parts: list[tuple[Tensor, Tensor]]) -> None:
        for chunk, out in parts:
            b, h, row, column = chunk.unbind(1)
            out.copy_(packed(elements(b, h, rows.positions(row, q_offsets), columns.positions(column, kv_offsets))))

    workers = Workers(1, 0)
    if not compat.transforms_active():  # a transform is active in the caller's thread only
        workers = Workers.of(blocks.device, len(blocks) * height * width, max(1, len(parts)))
    workers.all([functools.partial(evaluate, parts[n :: workers.count]) for n in range(workers.count)])
    return words


def packed(visible: Tensor) -> Tensor:
    """Booleans [n, queries, keys] as words [n, queries, keys / 32], the first key in the lowest bit."""
    return bytes_of_bits(visible).view(torch.int32)


def bytes_of_bits(ones: Tensor) -> Tensor:
    """Booleans, or bytes of 0 and 1, [..., 8 n] as uint8 [..., n], the first in the lowest bit."""
    return ((ones.contiguous().view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def words_of_pairs(visible: Tensor, block_size: tuple[int, int], is_traced: bool = False) -> Tensor:
    """Booleans [B, H, Q, KV] as words of blocks, [B, H, rows, columns, queries, keys / 32].

    Pairs past the edge are hidden. is_traced: whether torch.compile traces the operations.
    """
    (q_len, kv_len), (height, width) = visible.shape[2:], block_size
    rows, columns = grid((q_len, kv_len), block_size)
    padded = F.pad(visible, (0, columns * width - kv_len, 0, rows * height - q_len))
    blocks = padded.unflatten(3, (columns, width)).unflatten(2, (rows, height)).transpose(3, 4)
    if is_traced:  # Inductor of torch 2.11 views no booleans as numbers
        shifts = torch.arange(BITS, device=visible.device)
        words: Tensor = (blocks.unflatten(-1, (-1, BITS)).long() << shifts).sum(-1).to(torch.int32)
        return words
    words = packed(blocks.flatten(0, 3))
    return words.view(*visible.shape[:2], rows, columns, height, width // BITS)


def visible_in_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """Whether any, and whether all pairs of each block [..., queries, keys / 32] are visible."""
    flat = words.flatten(-2)
    return (flat != 0).any(-1), (flat == -1).all(-1)


def inside_the_edge(words: Tensor, row: Tensor, column: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """Words of blocks at `row` and `column`, with queries and keys past the edge hidden."""
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
    """The bits of all partial blocks.

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
    """Yield the words of blocks [n, (b, h, row, column)], some blocks at a time, with pairs past the edge hidden."""
    rows, columns = (Axis(length, size) for length, size in zip(lengths, block_size, strict=True))
    elements = Elements(mask_mod, blocks.device)
    for chunk in blocks.split(max(1, limits.ELEMENTS_KEPT // (block_size[0] * block_size[1]))) if len(blocks) else ():
        yield inside_the_edge(words_of(elements, chunk, rows, columns), chunk[:, 2], chunk[:, 3], rows, columns)
