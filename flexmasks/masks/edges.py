from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, bounded, entries_of_keys, may_read, register_mask, rows_of_csr

_TILE = 32  # rows and columns; a row of a tile is one word


def _prepare(
    size: Size | None, *, crow: Annotated[Tensor, "int[R]"], col: Annotated[Tensor, "int[N] in 0.."]
) -> dict[str, Any]:
    rows, columns = crow.shape[0] - 1, entries_of_keys(size, "col", col, 1, ", the number of keys")
    if size is not None and "S" not in size.at_most and rows < size.positions_of_q:
        raise ValueError(
            f"`crow` must have a row for each of {size.positions_of_q} positions of queries, and so one number more, "
            f"got {len(crow)} numbers."
        )
    q, kv = rows_of_csr(size, "crow", crow, "col", col), col.long()
    across = -(-columns // _TILE)
    # Edges in the order of their tiles, then rows, then columns. Edges that were not read may lie in a spare row.
    code = ((q // _TILE * across + kv // _TILE) * _TILE + q % _TILE) * _TILE + kv % _TILE
    code = code.sort().values
    tile, bit = code // _TILE**2, code % _TILE
    number = _changes(tile).cumsum(0)  # tile 0 is empty
    tiles = torch.zeros((rows // _TILE + 1) * across, dtype=torch.int32, device=code.device)
    count = min(col.shape[0], tiles.shape[0])
    if may_read(size, crow, col):
        count = int(number[-1]) if len(number) else 0
    tiles.index_put_((tile,), number.int())
    words = torch.zeros((count + 1) * _TILE, dtype=torch.int64, device=code.device)
    value = torch.where(_changes(code), 1 << bit, 0)  # each bit once
    words.index_add_(0, number * _TILE + code // _TILE % _TILE, value)
    return {"tiles": bounded(tiles.view(-1, across), 0, count), "words": words.int().view(-1, _TILE)}


def _counts(size: Size, block_size: tuple[int, int], *, crow: Tensor, col: Tensor) -> Tensor:
    q, kv = rows_of_csr(size, "crow", crow, "col", col) - size.q_offset, col.long()
    edges = (q * size.kv_len + kv)[(q >= 0) & (q < size.q_len)].unique()
    rows, columns = (-(-length // n) for length, n in zip((size.q_len, size.kv_len), block_size, strict=True))
    block = edges // size.kv_len // block_size[0] * columns + edges % size.kv_len // block_size[1]
    return torch.bincount(block, minlength=rows * columns).view(1, 1, rows, columns)


def _changes(numbers: Tensor) -> Tensor:
    """Where sorted numbers differ from the number before, also at the first."""
    return torch.nn.functional.pad(numbers[1:] != numbers[:-1], (1, 0), value=True)[: numbers.shape[0]]


def _example(length: int) -> dict[str, Any]:
    columns = [sorted({q, q * 7 % length, q // 2}) for q in range(length)]
    crow = [0]
    for row in columns:
        crow.append(crow[-1] + len(row))
    return {"crow": crow, "col": [kv for row in columns for kv in row]}


@register_mask(prepare=_prepare, example=_example, counts=_counts)
def edges(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, tiles: Tensor, words: Tensor) -> Tensor:
    """The edges of a graph: each query sees the keys that its row lists.

    crow: [rows + 1], the place in `col` where the keys of each query position start, and the number of edges, as in
        the format CSR; with `q_offset` also of the positions before the first query.
    col: the keys of all queries, row after row, in any order; a key may be listed twice.

    The mask is kept as the bits of those tiles of 32 x 32 pairs that have an edge, and a table of 4 bytes for each
    tile: never as a matrix of all pairs. Exact blocks are counted from the edges, where the whole mask is this one.

    Source: Dwivedi and Bresson, A Generalization of Transformer Networks to Graphs, 2020.
    Peers: torch.sparse_csr_tensor's indices; DGL's and PyTorch Geometric's adjacency, of which each row has the
        neighbors that send to its node; SciPy csr_array (indptr, indices).
    """
    tile = tiles[q // _TILE, kv // _TILE]
    return (tile > 0) & ((words[tile, q % _TILE] >> (kv % _TILE).int()) & 1 != 0)
