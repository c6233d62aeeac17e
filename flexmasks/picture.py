"""Pictures of a mask's blocks, as text."""

from __future__ import annotations

import shutil
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks.attention import MaskLike, block_mask
from flexmasks.blocks import of_block_mask
from flexmasks.facts import Blocks

_EMPTY, _PARTIAL, _FULL = "·", "▒", "█"
_ELEMENTS = 48  # up to so many positions a picture shows each of them


def text(made: BlockMask, b: int = 0, h: int = 0, columns: int | None = None) -> str:
    """The blocks of one batch element and head as text, rows are queries, scaled down to so many columns."""
    columns = max(8, columns or min(shutil.get_terminal_size().columns, 80))
    partial, full = (x[min(b, x.shape[0] - 1), min(h, x.shape[1] - 1)].cpu() for x in of_block_mask(made))
    step = -(-max(partial.shape) // columns)
    wide = 2 if 2 * partial.shape[1] // step <= columns and made.BLOCK_SIZE != (1, 1) else 1  # a character is tall
    some, whole = _shrunk(partial | full, step, any), _shrunk(full, step, all)
    cell = {(False, False): _EMPTY, (True, False): _PARTIAL, (True, True): _FULL}
    rows = ["".join(wide * cell[s, f] for s, f in zip(*row, strict=True)) for row in zip(some, whole, strict=True)]
    empty, partly, fully = Blocks(made).shares
    sizes = f"{made.BLOCK_SIZE[0] * step} x {made.BLOCK_SIZE[1] * step}"
    drawn = "a character is" if wide == 1 else "two characters are"
    legend = f"{_EMPTY} empty {empty:.1%}   {_PARTIAL} partial {partly:.1%}   {_FULL} full {fully:.1%}"
    q_len, kv_len = made.seq_lengths
    return "\n".join([*rows, legend, f"{q_len} queries (down) x {kv_len} keys (across), {drawn} {sizes} of them"])


def show(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    b: int = 0,
    h: int = 0,
    batch: int | None = None,
    heads: int | None = None,
    block_size: int | tuple[int, int] | None = None,
    q_offset: int | Tensor = 0,
    columns: int | None = None,
    **params: Any,
) -> None:
    """Print which blocks of a mask are empty, partial and full, and the share of pairs in each.

    Args:
        mask, q_len, kv_len, batch, heads, q_offset, params: as in `flexmasks.block_mask`.
        b, h: the batch element and head to draw.
        block_size: an int or a pair; by default single elements up to 48 positions, else 128.
        columns: characters to use in width, the terminal's by default.

    Example:
        >>> import flexmasks
        >>> flexmasks.show("sliding_window", 6, window=2)
        █·····
        ██····
        ███···
        ·███··
        ··███·
        ···███
        · empty 58.3%   ▒ partial 0.0%   █ full 41.7%
        6 queries (down) x 6 keys (across), a character is 1 x 1 of them
    """
    if block_size is None:
        block_size = 1 if max(q_len, kv_len or q_len) <= _ELEMENTS else 128
    made = block_mask(
        mask,
        q_len,
        kv_len,
        batch=batch,
        heads=heads,
        block_size=block_size,
        q_offset=q_offset,
        **params,
    )
    print(text(made, b, h, columns))


def _shrunk(blocks: Tensor, step: int, combine: Any) -> list[list[bool]]:
    rows = blocks.tolist()
    return [
        [
            combine(value for line in rows[i : i + step] for value in line[j : j + step])
            for j in range(0, len(rows[0]), step)
        ]
        for i in range(0, len(rows), step)
    ]
