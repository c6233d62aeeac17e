from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, entries_of_keys, leading, pair, register_mask, rows_of_csr

Block = Annotated[int | tuple[int, int], "int in 1.. | int(2) in 1.."]
_REASON = ": there are {count} blocks of keys"


def _prepare(
    size: Size | None,
    *,
    visible_blocks: Annotated[
        Tensor, "bool[M, N] | bool[B, H, M, N] | bool[B, 1, M, N] | bool[1, H, M, N] | bool[1, 1, M, N]"
    ],
    block: Block,
) -> dict[str, Any]:
    return _checked(size, visible_blocks, pair(block))


def _example(length: int) -> dict[str, Any]:
    block = torch.arange(16)
    return {"visible_blocks": (block[:, None] * 5 + block * 3) % 7 < 2, "block": -(-length // 16)}


@register_mask(prepare=_prepare, example=_example)
def block_sparse(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, visible_blocks: Tensor, block: tuple[int, int]
) -> Tensor:
    """A boolean table of blocks, True where the whole block is visible.

    visible_blocks: [rows, columns] of blocks for all, or [batch or 1, query heads or 1, rows, columns].
    block: number of positions in a block, an int or (queries, keys); blocks at the end may be cut.

    Source: Gray et al., Block-Sparse GPU Kernels, 2017.
    Peers: DeepSpeed SparsityConfig.make_layout and xformers BlockSparse have layouts [heads, rows, columns]; the lists
        of a torch BlockMask name the same blocks.
    """
    return visible_blocks[*leading(visible_blocks, b, h, q), q // block[0], kv // block[1]]


def _bsr_prepare(
    size: Size | None,
    *,
    crow_indices: Annotated[Tensor, "int[R]"],
    col_indices: Annotated[Tensor, "int[N] in 0.."],
    block: Block,
) -> dict[str, Any]:
    rows = rows_of_csr(size, "crow_indices", crow_indices, "col_indices", col_indices)
    columns = entries_of_keys(size, "col_indices", col_indices, pair(block)[1], _REASON)
    # Indices that were not read may be anything; inside torch.compile, kernels are chosen over tensors of zeros. So
    # the table has a spare row, for columns outside of all rows.
    visible_blocks = torch.zeros((crow_indices.shape[0], columns), dtype=torch.bool, device=rows.device)
    visible = torch.ones_like(rows, dtype=torch.bool)  # not True, which is copied from the host
    visible_blocks.index_put_((rows, col_indices.long()), visible)
    return _checked(size, visible_blocks[:-1], pair(block))


def _bsr_example(length: int) -> dict[str, Any]:
    columns = [sorted({0, row // 2, row}) for row in range(16)]
    crow = [sum(map(len, columns[:row])) for row in range(17)]
    return {"crow_indices": crow, "col_indices": [c for row in columns for c in row], "block": -(-length // 16)}


@register_mask(prepare=_bsr_prepare, example=_bsr_example)
def bsr(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, visible_blocks: Tensor, block: tuple[int, int]) -> Tensor:
    """Visible blocks in the block compressed sparse row format.

    crow_indices: [rows + 1], the place in `col_indices` where the columns of each row of blocks start, and the end.
    col_indices: the columns of the visible blocks, row after row.
    block: number of positions in a block, an int or (queries, keys); blocks at the end may be cut.

    Source: the block compressed sparse row format of sparse linear algebra.
    Peers: torch.sparse_bsr_tensor's indices; FlashInfer BlockSparseAttentionWrapper(indptr, indices, R, C);
        SciPy bsr_array (indptr, indices).
    """
    return block_sparse(b, h, q, kv, visible_blocks=visible_blocks, block=block)


def _topk_prepare(
    size: Size | None,
    *,
    indices: Annotated[
        Tensor,
        "int[M, N] in -1.. | int[B, H, M, N] in -1.. | int[B, 1, M, N] in -1.. "
        "| int[1, H, M, N] in -1.. | int[1, 1, M, N] in -1..",
    ],
    block: Block,
) -> dict[str, Any]:
    columns = entries_of_keys(size, "indices", indices, pair(block)[1], _REASON)
    visible_blocks = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    is_none = (indices < 0) | (indices >= columns)  # indices that are not read may be anything
    visible_blocks.scatter_(-1, torch.where(is_none, columns, indices.long()), True)
    return _checked(size, visible_blocks[..., :-1].contiguous(), pair(block))


@register_mask(
    prepare=_topk_prepare,
    example=lambda length: {
        "indices": [sorted({0, row // 3, row})[:3] + [-1] * (3 - len({0, row // 3, row})) for row in range(16)],
        "block": -(-length // 16),
    },
)
def block_topk(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, visible_blocks: Tensor, block: tuple[int, int]
) -> Tensor:
    """Blocks of keys that were chosen for each block of queries.

    indices: [rows, k] for all, or [batch or 1, query heads or 1, rows, k], the chosen blocks of keys, in any order;
        -1 for none. A router's top-k chooses them, for example.
    block: number of positions in a block, an int or (queries, keys); (1, 64) chooses for each query by itself.

    The mask is kept as a table of one byte for each pair of blocks. Combine it with `causal` to hide the future inside
    the chosen blocks.

    Source: Lu et al., MoBA, 2025; Yuan et al., Native Sparse Attention, 2025 (its selected branch).
    Peers: attention-gym create_vsa_block_mask; flash-linear-attention parallel_nsa(block_indices).
    """
    return block_sparse(b, h, q, kv, visible_blocks=visible_blocks, block=block)


def _checked(size: Size | None, visible_blocks: Tensor, block: tuple[int, int]) -> dict[str, Any]:
    if size is not None:
        need = -(-size.positions_of_q // block[0]), -(-size.kv_len // block[1])
        have = visible_blocks.shape[-2], visible_blocks.shape[-1]
        if not size.at_most and (have[0] < need[0] or have[1] < need[1]):
            raise ValueError(
                f"blocks of {block[0]} x {block[1]} make {need[0]} x {need[1]} blocks here, got {have[0]} x {have[1]}."
            )
    return {"visible_blocks": visible_blocks, "block": block}
