from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, always, check_covers_queries, entries_of_keys, register_mask

_WORD = 32
_ENTRIES_AT_ONCE = 1 << 27  # as booleans, before they become bits


def _prepare(
    size: Size | None,
    *,
    indices: Annotated[Tensor, "int[N, G, K] in -1.. | int[B, N, G, K] in -1.."],
    granularity: Annotated[int, "int in 1.."] = 1,
) -> dict[str, Any]:
    rows, count = indices.shape[-3:-1]
    check_covers_queries("indices", rows, size, "a row of indices")
    heads = count if size is None else size.heads
    if not count or heads % count:
        raise ValueError(
            f"`indices` must have one row for all heads, for each key head, or for each query head, of {heads}, got "
            f"{count}."
        )
    reason = f": {{keys}} keys are {{count}} entries of {granularity} tokens"
    entries = entries_of_keys(size, "indices", indices, granularity, reason)
    return {"words": _words(indices, entries), "granularity": granularity, "share": heads // count}


def _words(indices: Tensor, entries: int) -> Tensor:
    """The entries of each row as bits: int32[..., G, queries, words]."""
    width = -(-entries // _WORD) or 1
    places = torch.where(indices < 0, width * _WORD, indices.long()).transpose(-3, -2)
    value = 1 << torch.arange(_WORD, device=indices.device)
    rows = places.reshape(-1, places.shape[-1])
    words = [
        torch.zeros(len(part), width * _WORD + 1, dtype=torch.bool, device=indices.device)
        .scatter_(1, part, True)[:, :-1]
        .view(-1, width, _WORD)
        .mul(value)
        .sum(-1)
        .int()
        for part in rows.split(max(1, _ENTRIES_AT_ONCE // (width * _WORD)))
    ]
    return torch.cat(words).view(*places.shape[:-1], width)


@register_mask(
    prepare=_prepare,
    example=lambda length: {
        "indices": [[[i, i * 5 % (i + 1), i // 2, 0 if i % 2 else -1]] for i in range(length)],
    },
)
def topk(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, words: Tensor, granularity: int, share: int) -> Tensor:
    """Keys, or short runs of keys, that were chosen for each query.

    indices: [positions, G, k] or [batch, positions, G, k], the chosen entries of each query position, in any order; -1
        for none. G is 1, the number of key heads, or that of query heads. A query whose entries are all -1 sees
        nothing. With `q_offset` also of the positions before the first query.
    granularity: number of tokens in an entry: entry i is the keys i * granularity to (i + 1) * granularity - 1.

    The mask is kept as one bit for each query and entry. Combine it with `causal` to hide the future inside the chosen
    entries. `block_topk` is for blocks of queries that choose together.

    Source: DeepSeek-V3.2 (DeepSeek Sparse Attention), 2025; Yuan et al., Native Sparse Attention, 2025.
    Peers: FlashMLA sparse_prefill's indices [T_q, G, k]; cuDNN frontend's sparse attention; transformers' layers that
        select by an indexer add a matrix of 0 and -inf.
    """
    entry = kv // granularity
    head = h // share if words.shape[-3] > 1 else always(0, kv)
    row = (b, head, q) if words.ndim == 4 else (head, q)
    return (words[*row, entry // _WORD] >> (entry % _WORD).int()) & 1 != 0
