from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, first_row, register_score, row_of


def _prepare(
    size: Size | None,
    *,
    rel_h: Annotated[Tensor, "float[B, H, N, R]"],
    rel_w: Annotated[Tensor, "float[B, H, N, C]"],
) -> dict[str, Any]:
    rows, columns = rel_h.shape[-1], rel_w.shape[-1]
    if size is not None and not size.fits("KV", rows * columns):
        raise ValueError(
            f"`rel_h` and `rel_w` are for {rows} rows and {columns} columns of keys, {rows * columns} in all, the call "
            f"has {size.kv_len} keys."
        )
    return {"rel_h": rel_h, "rel_w": rel_w, "first": first_row("rel_h", rel_h.shape[-2], size)}


def _example(length: int) -> dict[str, Any]:
    # Each query turns to its own row, and weakly to its own column, of 16 rows.
    token = torch.arange(length)
    row, column = token // (length // 16), token % (length // 16)
    rel_h = -0.5 * (row[:, None] - torch.arange(16)).abs().float().sqrt()
    rel_w = -0.1 * (column[:, None] - torch.arange(length // 16)).abs().float().sqrt()
    return {"rel_h": rel_h[None, None], "rel_w": rel_w[None, None]}


@register_score(prepare=_prepare, example=_example)
def decomposed_bias(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, rel_h: Tensor, rel_w: Tensor, first: int | Tensor = 0
) -> Tensor:
    """Scores plus each query's biases of the key's row and of its column.

    The score becomes score + rel_h[b, h, q, kv // columns] + rel_w[b, h, q, kv % columns].

    rel_h: [batch, query heads, queries, rows of keys]. Mostly it is computed from q and a table, so that it has a row
        for each query of the call; it may also have one for each position from 0 on.
    rel_w: [batch, query heads, queries, columns of keys], likewise. There are rows * columns keys. Tensors that require
        a gradient get one.

    Source: Li et al., MViTv2, 2021 (arXiv 2112.01526); Kirillov et al., Segment Anything, 2023 (arXiv 2304.02643).
    Peers: rel_h and rel_w of add_decomposed_rel_pos in Segment Anything and in detectron2, and of
        get_decomposed_rel_pos in Hugging Face's SamVisionAttention, are [batch * heads, rows, columns, ...] and
        computed from q without its scale: reshape them to [batch, heads, queries, ...].
    """
    columns = rel_w.shape[-1]
    row = row_of(rel_h, q, first, b)
    return score + rel_h[b, h, row, kv // columns] + rel_w[b, h, row, kv % columns]
