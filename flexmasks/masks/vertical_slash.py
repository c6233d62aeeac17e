from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.params import Size
from flexmasks.registry import register_mask


def _prepare(
    size: Size | None,
    *,
    vertical: Annotated[Tensor, "int[N] in -1..KV-1 | int[H, N] in -1..KV-1 | int[B, H, N] in -1..KV-1"],
    slash: Annotated[Tensor, "int[M] in -1..S-1 | int[H, M] in -1..S-1 | int[B, H, M] in -1..S-1"],
) -> dict[str, Any]:
    length = [1 + int(t.max()) if t.numel() else 1 for t in (vertical, slash)]
    if size is not None:
        length = [size.kv_len, size.positions]
    return {"vertical": _marked(vertical, length[0]), "slash": _marked(slash, length[1])}


def _example(length: int) -> dict[str, Any]:
    return {
        "vertical": [0, 1, 2, 3, length // 4, length // 4 + 1, length // 2],
        "slash": [*range(length // 16), length // 4, length * 5 // 8],
    }


@register_mask(prepare=_prepare, example=_example)
def vertical_slash(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, vertical: Tensor, slash: Tensor) -> Tensor:
    """Causal attention to some columns and some diagonals: chosen keys, and keys at chosen distances.

    vertical: the keys that all later queries see, for all, for each query head, or for each batch element and head;
        -1 for none.
    slash: the distances q - kv at which every query sees a key, in the same way; 0 is the query's own key.

    Source: Jiang et al., MInference, 2024 (vertical-slash heads; A-shape heads are `sink_window`).
    Peers: MInference vertical_slash_sparse_attention(v_idx, s_idx) and vLLM sparse_attn_func round slashes up to
        blocks of 64, so that they see more.
    """
    distance = torch.where(q < kv, 0, q - kv)
    return (kv <= q) & (_at(vertical, b, h, kv) | _at(slash, b, h, distance))


def _at(table: Tensor, b: Tensor, h: Tensor, position: Tensor) -> Tensor:
    if table.ndim == 3:
        return table[b, h, position]
    return table[h, position] if table.ndim == 2 else table[position]


def _marked(indices: Tensor, length: int) -> Tensor:
    marked = torch.zeros((*indices.shape[:-1], length + 1), dtype=torch.bool, device=indices.device)
    return marked.scatter_(-1, torch.where(indices < 0, length, indices).long(), True)[..., :-1].contiguous()
