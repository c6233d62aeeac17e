from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from flexmasks.masks.block_sparse import block_sparse
from flexmasks.spec import Size, check_canvas, constant_in_graphs, constants, register_mask


def _prepare(
    size: Size | None,
    *,
    length: Annotated[int, "int in 1.."],
    block: Annotated[int, "int in 1.."],
    window: Annotated[int, "int in 0.."] = 1,
    global_blocks: Annotated[int, "int in 0.."] = 1,
    random_blocks: Annotated[int, "int in 0.."] = 3,
    seed: Annotated[int, "int in 0.."] = 0,
    both_ends: Annotated[bool, "bool"] = True,
) -> dict[str, Any]:
    check_canvas(size, {"length": length})
    blocks = -(-length // block)
    edges = (min(global_blocks, (blocks + 1) // 2),) * 2 if both_ends else (min(global_blocks, blocks), 0)
    blocks, window, edges, count, seed = constants((blocks, window, edges, min(random_blocks, blocks), seed))
    visible_blocks = _layout(blocks, window, edges, count, seed, None if size is None else size.device)
    return {"visible_blocks": visible_blocks, "block": (block, block)}


@register_mask(
    prepare=_prepare, example=lambda length: {"length": length, "block": max(1, length // 32), "random_blocks": 2}
)
def bigbird(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, visible_blocks: Tensor, block: tuple[int, int]) -> Tensor:
    """Neighboring, global and random blocks of keys for each block of queries.

    length: number of positions, of queries and of keys.
    block: number of positions in a block; the last block of the sequence may be shorter.
    window: number of neighboring blocks that a block sees on each side, in addition to itself.
    global_blocks: number of blocks at each end that see everything and are seen by everything.
    random_blocks: number of further blocks that each block sees, drawn without repetition; all further blocks if there
        are fewer.
    seed: seed of the draw. The draw depends on the seed, the number of blocks and the numbers above, not on the device.
    both_ends: False for global blocks at the front only.

    The mask is kept as a table of one byte for each pair of blocks.

    Source: Zaheer et al., Big Bird, 2020 (BigBird-ITC).
    Peers: Hugging Face BigBird with block_size=block and num_random_blocks=random_blocks, where window and
        global_blocks are 1 and the draw is different; DeepSpeed BigBirdSparsityConfig(block=block,
        num_sliding_window_blocks=2 * window + 1, num_global_blocks=global_blocks) is both_ends=False, and its
        num_random_blocks are drawn among all blocks, those that are visible anyway included; with
        attention="unidirectional" it is this & block_causal.
    """
    return block_sparse(b, h, q, kv, visible_blocks=visible_blocks, block=block)


# Inside a user's torch.compile the table is a constant.
@constant_in_graphs
def _layout(
    blocks: int, window: int, edges: tuple[int, int], count: int, seed: int, device: torch.device | None
) -> Tensor:
    """The table of visible blocks, computed by NumPy because torch traces no draw."""
    row, column = np.arange(blocks)[:, None], np.arange(blocks)
    visible_blocks = abs(row - column) <= window
    for index in (row, column):
        visible_blocks |= (index < edges[0]) | (index >= blocks - edges[1])
    np.put_along_axis(visible_blocks, _draw(blocks, window, edges, count, seed), True, 1)
    return torch.tensor(visible_blocks, device=device)


def _draw(blocks: int, window: int, edges: tuple[int, int], count: int, seed: int) -> Any:
    """Draw `count` blocks for each block that it does not see otherwise: [blocks, count], with a block's own number
    where there are fewer. `edges` are the numbers of global blocks at the front and at the end.

    This is Floyd's sampling without repetition, for all rows at once: step n draws one of the first `top + 1` blocks,
    and takes `top` if that block was drawn before.
    """
    row = np.arange(blocks)
    front, end = edges[0], blocks - edges[1]
    near = (row - window).clip(front, end)  # first block of the window, without global blocks
    width = (row + window + 1).clip(front, end) - near
    free = end - front - width
    uniform = _uniform(blocks * count, seed).reshape(blocks, count)
    drawn = np.full((blocks, count), -1)
    for n in range(count):
        top = free - free.clip(max=count) + n
        choice = (uniform[:, n] * (top + 1)).astype(np.int64)
        choice = np.where((drawn[:, :n] == choice[:, None]).any(1), top, choice)
        drawn[:, n] = np.where(top < free, choice, -1)
    among_all = drawn + front
    among_all += (among_all >= near[:, None]) * width[:, None]
    return np.where(drawn < 0, row[:, None], among_all)


def _uniform(count: int, seed: int) -> Any:
    """The numbers that torch.rand draws on a CPU with this seed, in float64."""
    words = np.random.RandomState(seed % 2**32).randint(0, 2**32, (count, 2), np.uint32).astype(np.uint64)
    return (((words[:, 0] << np.uint64(32)) | words[:, 1]) & np.uint64(2**53 - 1)) / 2.0**53
