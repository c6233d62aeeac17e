from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.masks.block_sparse import block_sparse
from flexmasks.masks.natten import check_canvas
from flexmasks.spec import Size, register_mask


def _prepare(
    size: Size | None,
    *,
    length: Annotated[int, "int in 1.."],
    block: Annotated[int, "int in 1.."],
    window: Annotated[int, "int in 0.."] = 1,
    global_blocks: Annotated[int, "int in 0.."] = 1,
    random_blocks: Annotated[int, "int in 0.."] = 3,
    seed: Annotated[int, "int in 0.."] = 0,
) -> dict[str, Any]:
    check_canvas(size, {"length": length})
    blocks = -(-length // block)
    edges = min(global_blocks, (blocks + 1) // 2)
    row, column = torch.arange(blocks)[:, None], torch.arange(blocks)
    layout = (row - column).abs() <= window
    for index in (row, column):
        layout |= (index < edges) | (index >= blocks - edges)
    layout.scatter_(1, _draw(blocks, window, edges, random_blocks, seed), True)
    return {"layout": layout if size is None else layout.to(size.device), "block": (block, block)}


@register_mask(
    prepare=_prepare, example=lambda length: {"length": length, "block": max(1, length // 32), "random_blocks": 2}
)
def bigbird(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, layout: Tensor, block: tuple[int, int]) -> Tensor:
    """Blocks of queries see the blocks next to them, global blocks at both ends, and some random ones.

    length: number of positions, of queries and of keys.
    block: number of positions of a block; the last block of the sequence may be shorter.
    window: blocks on each side that a block sees besides itself.
    global_blocks: first and last blocks, so many at each end, that see, and are seen by, everything.
    random_blocks: other blocks that each block sees besides, drawn without repetition; all where there are fewer.
    seed: of the draw, which depends on the seed, the number of blocks and the numbers above, not on the device.
    Kept as a table of a byte for each pair of blocks.

    Source: Zaheer et al., Big Bird, 2020 (BigBird-ITC).
    Peers: Hugging Face BigBird block_size=block, num_random_blocks=random_blocks, window and global_blocks 1, with
        another draw; DeepSpeed BigBirdSparsityConfig(num_sliding_window_blocks=2 * window + 1).
    """
    return block_sparse(b, h, q, kv, layout=layout, block=block)


def _draw(blocks: int, window: int, edges: int, count: int, seed: int) -> Tensor:
    """For each block, `count` of those that it does not see anyhow, its own where there are no more: [blocks, count].

    Floyd's sampling without repetition, of all rows at once: step n draws one of the first `top + 1`, and takes `top`
    itself where it was drawn before.
    """
    row = torch.arange(blocks)
    near = (row - window).clamp(edges, blocks - edges)  # the window, within what is not global
    width = (row + window + 1).clamp(edges, blocks - edges) - near
    free = blocks - 2 * edges - width
    uniform = torch.rand((blocks, count), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    drawn = torch.full((blocks, count), -1, dtype=torch.int64)
    for n in range(count):
        top = free - free.clamp(max=count) + n
        one = (uniform[:, n] * (top + 1)).long()
        one = torch.where((drawn[:, :n] == one[:, None]).any(1), top, one)
        drawn[:, n] = torch.where(top < free, one, -1)
    among_all = drawn + edges
    among_all += (among_all >= near[:, None]) * width[:, None]
    return torch.where(drawn < 0, row[:, None], among_all)
