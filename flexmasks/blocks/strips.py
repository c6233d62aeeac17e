"""Blocks found and counted, and queries that see a key, in strips of queries, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmasks.blocks import limits
from flexmasks.blocks.build import any_visible, build
from flexmasks.blocks.counts import Blocks
from flexmasks.blocks.decide import Axis, decide, dependence
from flexmasks.blocks.elements import Elements, MaskMod
from flexmasks.blocks.limits import Work

_BLOCKS_OF_STRIP = 1 << 22  # blocks of a strip, over all batch elements, heads and keys that are looked at together
_VISIBLE_OF_STRIP = 1 << 24  # blocks of a strip of `visible_in_strips`, over all keys, one byte each
_BLOCK = 128  # queries and keys of a block in `queries_that_see`
_MAX_RUNS = 8  # the most runs of undecided parts of a strip that are looked at one by one
_SAMPLED_PAIRS = 1 << 24  # pairs in partial blocks that are evaluated to measure the share of hidden ones


@dataclass(frozen=True)
class Counts:
    """Counts of the blocks of one batch element and head."""

    empty: int
    partial: int
    full: int
    shares: tuple[float, float, float]  # of all pairs in empty, partial and full blocks, from 0 to 1
    hidden: float  # share of the pairs in partial and full blocks that the mask hides, from 0 to 1
    estimated: bool  # whether `hidden` is measured in a part of the partial blocks, evenly spread
    unknown: int  # number of partial blocks that may be empty or full, because the search was bounded


def count_in_strips(
    mask_mod: MaskMod, q_len: int, kv_len: int, block_size: tuple[int, int], device: torch.device
) -> Counts:
    """Count the blocks of a mask at b = h = 0.

    Strips of queries are counted one after the other. Each strip is cut into parts along the keys. Only the parts from
    the first to the last undecided part are looked at. If there are many partial blocks, hidden pairs are counted in
    some of them, evenly spread. The search is bounded.
    """
    work = Work.bounded(q_len * kv_len)
    height, width = block_size
    rows_of_strip = height * max(1, _BLOCKS_OF_STRIP // -(-kv_len // width))
    columns_of_part = width * max(1, rows_of_strip // width)
    strips, parts = Axis(q_len, rows_of_strip), Axis(kv_len, columns_of_part)
    shape = strips.count, parts.count
    limits.check_blocks(1, (q_len, kv_len), (rows_of_strip, columns_of_part), device)
    decided = decide(mask_mod, 1, 1, strips, parts, device)
    certain, possible = (x[0, 0].cpu().expand(shape).clone() for x in (decided.certain, decided.possible))
    if q_len % height:  # blocks that the edge cuts are partial
        certain[-1] = False
    if kv_len % width:
        certain[:, -1] = False
    partial = partial_pairs = full_pairs = unknown = 0
    hidden_pairs, estimated = 0.0, False
    sampled_blocks = max(1, _SAMPLED_PAIRS // shape[0] // (height * width))
    for strip in range(shape[0]):
        rows = min(rows_of_strip, q_len - strip * rows_of_strip)
        undecided = (possible[strip] & ~certain[strip]).nonzero()[:, 0].tolist()
        first, end = (undecided[0], undecided[-1] + 1) if undecided else (0, 0)
        full_parts = [n for n in certain[strip].nonzero()[:, 0].tolist() if not first <= n < end]
        full_pairs += sum(rows * min(columns_of_part, kv_len - n * columns_of_part) for n in full_parts)
        if undecided:
            start = first * columns_of_part
            part = moved(mask_mod, strip * rows_of_strip, start)
            keys = min(kv_len, end * columns_of_part) - start
            layout = build(part, 1, 1, rows, keys, device, block_size, work=work)
            unknown += layout.unknown
            blocks = Blocks(layout.block_mask(part))
            partial += blocks.partial
            partial_pairs += blocks.partial_pairs
            full_pairs += blocks.full_pairs
            hidden_pairs += blocks.hidden_pairs(sampled_blocks)
            estimated |= blocks.partial > sampled_blocks
    full = full_pairs // (height * width)  # the edge cuts no full block
    computed, all_pairs = partial_pairs + full_pairs, q_len * kv_len
    return Counts(
        empty=-(-q_len // height) * -(-kv_len // width) - partial - full,
        partial=partial,
        full=full,
        shares=(1 - computed / all_pairs, partial_pairs / all_pairs, full_pairs / all_pairs),
        hidden=hidden_pairs / computed if computed else 0.0,
        estimated=estimated,
        unknown=unknown,
    )


def visible_in_strips(
    mask_mod: MaskMod,
    batch: int,
    heads: int,
    rows: tuple[int, int],
    kv_len: int,
    block_size: tuple[int, int],
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """Yield strips of queries: the position of the first query, and which blocks have visible pairs, booleans [B, H,
    rows, columns]. B and H are 1 if the mask does not depend on the index.

    rows: the first query and the end of the queries. Blocks of queries start at the first one, blocks of keys at key 0.
    """
    (start, stop), (height, width) = rows, block_size
    batch, heads = dependence(mask_mod, batch, heads, device) if batch * heads > 1 else (1, 1)
    columns = -(-kv_len // width)
    rows_of_strip = min(max(1, _VISIBLE_OF_STRIP // (batch * heads * columns)), -(-(stop - start) // height))
    tall, wide = rows_of_strip * height, rows_of_strip * width  # a strip is cut into parts of this width
    strips, wide_parts = Axis(stop - start, tall), Axis(kv_len, wide)
    decided = decide(moved(mask_mod, start, 0), batch, heads, strips, wide_parts, device)
    shape = (*decided.certain.shape[:2], strips.count, wide_parts.count)
    certain, possible = (x.expand(shape).cpu() for x in (decided.certain, decided.possible))
    undecided = (possible & ~certain).flatten(0, 1).any(0)
    for strip, first in enumerate(range(start, stop, tall)):
        queries = Axis(min(tall, stop - first), height)
        parts = certain[:, :, strip, None].repeat_interleave(rows_of_strip, 3)[..., :columns]
        visible = parts.expand(-1, -1, queries.count, -1).to(device, copy=True)
        for part, end in _runs(undecided[strip].nonzero()[:, 0].tolist()):
            keys = Axis(min(kv_len, end * wide) - part * wide, width)
            seen = any_visible(moved(mask_mod, first, part * wide), batch, heads, queries, keys, device)
            visible[..., part * rows_of_strip : end * rows_of_strip] = seen.to(device)
        yield first, visible


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """The first place and the end of each run of places; of many runs of all together, because each costs a search."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = runs[-1][0], place + 1
        else:
            runs.append((place, place + 1))
    return runs if len(runs) <= _MAX_RUNS else [(runs[0][0], runs[-1][1])]


def moved(mask_mod: MaskMod, q_start: int, kv_start: int) -> MaskMod:
    """The mask of the queries and keys from these positions on."""
    if not (q_start or kv_start):
        return mask_mod
    return lambda b, h, q, kv: mask_mod(b, h, q + q_start, kv + kv_start)


# --- queries ---


def queries_that_see(
    mask_mod: MaskMod, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device
) -> Tensor:
    """Which queries see a key, bool [B, H, Q], with B and H 1 if the mask does not depend on the index."""
    batch, heads = dependence(mask_mod, batch, heads, device) if batch * heads > 1 else (1, 1)
    columns = Axis(kv_len, _BLOCK)
    height = _BLOCK * max(1, _BLOCKS_OF_STRIP // (batch * heads * columns.count))
    strips = []
    for first in range(0, q_len, height):
        rows = Axis(min(height, q_len - first), _BLOCK)
        strips.append(_of_strip(moved(mask_mod, first, 0), batch, heads, rows, columns, device))
    return torch.cat(strips, -1)


def _of_strip(mask_mod: MaskMod, batch: int, heads: int, rows: Axis, columns: Axis, device: torch.device) -> Tensor:
    decided = decide(mask_mod, batch, heads, rows, columns, device)
    shape = batch, heads, rows.count, columns.count
    certain, possible = (x.expand(shape).to(device) for x in (decided.certain, decided.possible))
    sees_block = certain.any(-1)
    seen = sees_block[..., None].expand(-1, -1, -1, _BLOCK).contiguous()  # [B, H, rows, queries of a block]
    undecided = possible & ~sees_block[..., None]
    # The first undecided block of each row of blocks, then the second one: most queries see a key in the first ones.
    blocks = undecided.nonzero()[undecided.cumsum(-1)[undecided].argsort(stable=True)]
    elements = Elements(mask_mod, device, decided.widest)
    at_once, inside = elements.blocks_at_once(_BLOCK * _BLOCK), torch.arange(_BLOCK, device=device)
    while len(blocks):
        b, h, row, column = blocks[:at_once].unbind(1)
        visible = elements(b, h, rows.positions(row, inside), columns.positions(column, inside))
        block, place = visible.any(-1).nonzero().unbind(1)
        seen[b[block], h[block], row[block], place] = True
        b, h, row, _ = blocks[at_once:].unbind(1)
        blocks = blocks[at_once:][~seen.all(-1)[b, h, row]]
    return seen.flatten(2)[..., : rows.length]


def first_key(mask_mod: MaskMod, b: int, h: int, q: int, kv_len: int, device: torch.device) -> int:
    """The first key that a query sees, which must see one."""
    b_, h_ = (torch.tensor([n], device=device) for n in (b, h))
    keys = torch.arange(kv_len, device=device)
    return int(Elements(mask_mod, device)(b_, h_, torch.tensor([[q]], device=device), keys[None]).int().argmax())
