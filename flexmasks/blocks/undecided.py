"""Undecided blocks looked at element by element."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flexmasks.blocks.decide import Axis
from flexmasks.blocks.elements import Elements, block_indices
from flexmasks.ranges import GiveUp, TooLarge
from flexmasks.ranges.evaluate import evaluate

_PARTS = 8  # parts of a block along each axis; also the positions that are looked at first along each axis
_MAX_PAIRS = 256  # pairs of a block in the second look
_SHUFFLE = 45  # an odd factor shuffles the queries: their number in a block is mostly a power of two


def look_at(elements: Elements, blocks: Tensor, rows: Axis, columns: Axis) -> tuple[Tensor, Tensor]:
    """Whether any, and whether all pairs of blocks [n, (b, h, row, column)] are visible.

    The first look is at 8 x 8 positions of each block, where most blocks turn out to be partial. The second look is at
        pairs with each query and each key once, where most blocks of finer patterns turn out to be partial. The
        remaining blocks are cut into 8 x 8 parts. The parts that ranges cannot decide are looked at element by element:
        first one part of each block, then the other parts.
    """
    q, kv = _sampled_positions(rows, blocks[:, 2]), _sampled_positions(columns, blocks[:, 3])
    any_visible, all_visible = _look_at_positions(elements, blocks, q, kv)
    unresolved = (any_visible == all_visible).nonzero()[:, 0]
    if not len(unresolved) or max(rows.block_size, columns.block_size) <= _PARTS:
        return any_visible, all_visible
    any_of_pairs, all_of_pairs = _look_at_pairs(elements, blocks[unresolved], rows, columns)
    any_visible[unresolved] |= any_of_pairs
    all_visible[unresolved] &= all_of_pairs
    unresolved = unresolved[any_visible[unresolved] == all_visible[unresolved]]
    for chunk in unresolved.split(elements.blocks_at_once(16 * _PARTS**2)) if len(unresolved) else ():
        certain, possible = _decide_parts(elements, blocks[chunk], rows, columns)
        any_visible[chunk] |= certain.flatten(1).any(1)
        all_visible[chunk] &= possible.flatten(1).all(1)
        parts = (possible & ~certain).nonzero()
        is_first = torch.ones(len(parts), dtype=torch.bool, device=parts.device)
        torch.ne(parts[1:, 0], parts[:-1, 0], out=is_first[1:])
        for some_parts in (parts[is_first], parts[~is_first]):
            block = chunk[some_parts[:, 0]]
            is_unresolved = any_visible[block] == all_visible[block]
            block, some_parts = block[is_unresolved], some_parts[is_unresolved]
            q = _positions_of_part(rows, blocks[block, 2], some_parts[:, 1])
            kv = _positions_of_part(columns, blocks[block, 3], some_parts[:, 2])
            any_of_part, all_of_part = _look_at_positions(elements, blocks[block], q, kv)
            any_visible[block[any_of_part]] = True
            all_visible[block[~all_of_part]] = False
    return any_visible, all_visible


def _sampled_positions(axis: Axis, block: Tensor) -> Tensor:
    """Positions of each block, its first and last among them; the axis's last one in place of those past its end."""
    count = min(_PARTS, axis.block_size)
    offsets = torch.arange(count, device=block.device) * (axis.block_size - 1) // max(1, count - 1)
    return axis.positions(block, offsets)


def _positions_of_part(axis: Axis, block: Tensor, part: Tensor) -> Tensor:
    """Positions of one part of each block; in place of those past the end of the block or of the axis the last one."""
    size = -(-axis.block_size // _PARTS)
    offsets = part[:, None] * size + torch.arange(size, device=block.device)
    return axis.positions(block, offsets.clamp(max=axis.block_size - 1))


def _look_at_positions(elements: Elements, blocks: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Whether any, and whether all pairs of positions [n, queries] and [n, keys] are visible."""
    at_once = elements.blocks_at_once(q.shape[1] * kv.shape[1])
    chunks = (slice(n, n + at_once) for n in range(0, max(1, len(blocks)), at_once))
    return _any_and_all(elements(blocks[chunk, 0], blocks[chunk, 1], q[chunk], kv[chunk]) for chunk in chunks)


def _look_at_pairs(elements: Elements, blocks: Tensor, rows: Axis, columns: Axis) -> tuple[Tensor, Tensor]:
    """Whether any, and whether all of some pairs are visible, spread over all queries and keys of each block."""
    count = min(_MAX_PAIRS, max(rows.block_size, columns.block_size))
    n = torch.arange(count, device=blocks.device)
    q_offsets = n * _SHUFFLE % count * rows.block_size // count
    kv_offsets = n * columns.block_size // count

    def visible_in(chunk: Tensor) -> Tensor:
        q, kv = rows.positions(chunk[:, 2], q_offsets), columns.positions(chunk[:, 3], kv_offsets)
        b, h = (chunk[:, d].repeat_interleave(count) for d in (0, 1))
        return elements(b, h, q.view(-1, 1), kv.view(-1, 1)).view(len(chunk), count)

    return _any_and_all(map(visible_in, blocks.split(elements.blocks_at_once(count))))


def _any_and_all(chunks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    found = [(visible.flatten(1).any(1), visible.flatten(1).all(1)) for visible in chunks]
    return found[0] if len(found) == 1 else (torch.cat([a for a, _ in found]), torch.cat([b for _, b in found]))


def _decide_parts(elements: Elements, blocks: Tensor, rows: Axis, columns: Axis) -> tuple[Tensor, Tensor]:
    """Whether parts of each block are certainly, and possibly, visible: booleans [n, 8, 8]."""
    n = len(blocks)
    parts = torch.arange(_PARTS, device=blocks.device).expand(n, _PARTS)
    at_b, at_h = (blocks[:, d].double().view(n, 1, 1, 1) for d in (0, 1))
    indices = [block_indices(x, x) for x in (at_b, at_h)]
    for axis, dim, shape in ((rows, 2, (n, 1, _PARTS, 1)), (columns, 3, (n, 1, 1, _PARTS))):
        positions = _positions_of_part(axis, blocks[:, dim].repeat_interleave(_PARTS), parts.flatten())
        indices.append(block_indices(positions[:, 0].double().view(shape), positions[:, -1].double().view(shape)))
    b, h, q, kv = indices
    shape = (n, 1, _PARTS, _PARTS)
    try:
        truth = evaluate(elements.mask_mod, b, h, q, kv, elements.device).truth
    except (GiveUp, TooLarge):
        certain = torch.zeros(shape, dtype=torch.bool, device=blocks.device)
        return certain[:, 0], ~certain[:, 0]
    return truth.lo.to(blocks.device).expand(shape)[:, 0], truth.hi.to(blocks.device).expand(shape)[:, 0]
