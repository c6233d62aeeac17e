from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, register_mask


def _prepare(
    size: Size | None,
    *,
    vertical: Annotated[Tensor, "int[N] in -1..KV-1 | int[H, N] in -1..KV-1 | int[B, H, N] in -1..KV-1"],
    slash: Annotated[Tensor, "int[M] in -1..S-1 | int[H, M] in -1..S-1 | int[B, H, M] in -1..S-1"],
) -> dict[str, Any]:
    return {
        "vertical": _table(vertical, None if size is None else size.kv_len),
        "slash": _table(slash, None if size is None else size.positions),
    }


def _example(length: int) -> dict[str, Any]:
    return {
        "vertical": [0, 1, 2, 3, length // 4, length // 4 + 1, length // 2],
        "slash": [*range(length // 16), length // 4, length * 5 // 8],
    }


@register_mask(prepare=_prepare, example=_example)
def vertical_slash(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, vertical: Tensor, slash: Tensor) -> Tensor:
    """Causal attention to chosen keys, and to keys at chosen distances.

    vertical: the keys that all later queries see, for all, for each query head, or for each batch element and head;
        -1 for none.
    slash: the distances q - kv at which every query sees a key, in the same form; 0 is the query's own key.

    Source: Jiang et al., MInference, 2024 (vertical-slash heads; A-shape heads are `sink_window`).
    Peers: MInference vertical_slash_sparse_attention(v_idx, s_idx), which rounds slashes up to blocks of 64 and so
        shows more.
    """
    return (kv <= q) & (_marks(vertical, b, h, kv) | _marks(slash, b, h, q - kv))


def _marks(table: Tensor, b: Tensor, h: Tensor, index: Tensor) -> Tensor:
    """Whether the table marks an index; its last element is False and stands for every index outside."""
    rest = table.shape[-1] - 1
    index = torch.where(index < 0, rest, index)
    index = torch.where(index > rest, rest, index).int()
    if table.ndim == 3:
        return table[b, h, index]
    return table[h, index] if table.ndim == 2 else table[index]


def _table(indices: Tensor, count: int | None) -> Tensor:
    """A table that marks the indices, with one more element than `count`, by default as many as the indices need."""
    if count is None:
        count = int(indices.max()) + 1 if indices.numel() else 0
    marked = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.bool, device=indices.device)
    marked.scatter_(-1, torch.where(indices < 0, count, indices.long()), True)
    marked[..., -1].fill_(False)  # not by `=`, which copies the value from the host
    return marked
