from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, always, bytes_of_bits, entries_of_keys, first_row, register_mask, row_of

_TOKENS = 64  # a byte holds no more, so that ranges know of a block of keys which of its bits are set
_ENTRIES_AT_ONCE = 1 << 26  # as bytes, before they become bits


def _prepare(
    size: Size | None,
    *,
    indices: Annotated[Tensor, "int[N, G, K] in -1.. | int[B, N, G, K] in -1.. | int[1, N, G, K] in -1.."],
    granularity: Annotated[int, "int in 1.."] = 1,
) -> dict[str, Any]:
    if size is not None and _is_flat(indices, size):
        indices = indices.unflatten(0, (size.batch, size.q_len))
    count = indices.shape[-2]
    heads = count if size is None else size.heads
    if not count or heads % count:
        raise ValueError(
            f"`indices` must have one row for all heads, for each key head, or for each query head, of {heads}, got "
            f"{count}."
        )
    reason = f": {{keys}} keys are {{count}} entries of {granularity} tokens"
    if size is not None and size.end_to_end is not None:
        reason += "; for entries along the whole row write topk(...) & flexmasks.packed(..., offsets)"
    entries = entries_of_keys(size, "indices", indices, granularity, reason)
    bits = max(1, min(8, _TOKENS // granularity))
    return {
        "chosen": _bits_of(indices, entries, bits),
        "granularity": granularity,
        "bits": bits,
        "share": heads // count,
        "first": _first_row(indices, size),
    }


def _is_flat(indices: Tensor, size: Size) -> bool:
    """Whether there is a row for each query of each batch element."""
    is_known = indices.ndim == 3 and size.batch > 1 and size.end_to_end is None and "Q" not in size.at_most
    return is_known and indices.shape[0] == size.batch * size.q_len


def _first_row(indices: Tensor, size: Size | None) -> int | Tensor:
    """The position of the query of the first row, see `first_row`; of sequences laid end to end, int[batch]."""
    rows = indices.shape[-3]
    if size is None or size.end_to_end is None or indices.ndim == 4 or rows == 1:
        return first_row("indices", rows, size)
    offsets, count = size.end_to_end
    if rows != count:
        raise ValueError(
            f"`indices` [rows, G, k] must have a row for each of the {count} queries of all sequences, got {rows}; "
            "[sequences, rows, G, k] has rows for each sequence."
        )
    return (size.q_offset if size.starts is None else size.starts) - offsets[: size.batch]


def _bits_of(indices: Tensor, entries: int, bits: int) -> Tensor:
    """The entries of each row as bits, int8[..., G, queries, bytes] with some bits of each byte.

    The highest of them stands in all higher ones, too, so that a byte whose entries are all chosen is -1.
    """
    lists = indices.transpose(-3, -2)
    rows = lists.flatten(0, -2)
    width = -(-entries // bits) or 1
    none, spare = width * 8, 8 - bits

    def packed(part: Tensor) -> Tensor:
        place = part.long()
        place = place if bits == 8 else place // bits * 8 + place % bits + spare
        place = torch.where((part < 0) | (part >= entries), none, place)  # indices that are not read may be anything
        is_chosen = torch.zeros(part.shape[0], none + 8, dtype=torch.uint8, device=part.device).scatter_(1, place, 1)
        return (bytes_of_bits(is_chosen)[:, :width].view(torch.int8) >> spare).contiguous()

    parts = 1  # a power of 2: in graphs of any length each number of parts is a graph of its own
    while parts * _ENTRIES_AT_ONCE < rows.shape[0] * none:
        parts *= 2
    step = -(-rows.shape[0] // parts)
    made = [packed(rows[n * step : (n + 1) * step] if parts > 1 else rows) for n in range(parts)]
    return torch.cat(made).view(*lists.shape[:-1], width)


@register_mask(
    prepare=_prepare,
    example=lambda length: {
        "indices": [[[i, i * 5 % (i + 1), i // 2, 0 if i % 2 else -1]] for i in range(length)],
    },
)
def topk(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    chosen: Tensor,
    granularity: int,
    bits: int,
    share: int,
    first: int | Tensor = 0,
) -> Tensor:
    """Keys, or short runs of keys, that were chosen for each query.

    indices: [rows, G, k] or [batch or 1, rows, G, k], the chosen entries of each row, in any order; -1 for none. G is
        1, the number of key heads, or that of query heads. There is a row for each query of the call, or for each
        position from 0 on, or one for all. A query whose entries are all -1 sees nothing, and entries that stand twice
        count once. [batch * queries, G, k] are the rows of each batch element after those of the one before: for them
        `block_mask` and `dense_mask` need `batch=`, and torch's pipelines, which split batches, [batch, queries, G, k].
    granularity: number of tokens in an entry: entry i is the keys i * granularity to (i + 1) * granularity - 1, of
        which the last entry may have fewer.

    The mask is kept as bits, at most KV / 8 bytes for each row and list, and blocks of which nobody chose a key are
    skipped. Combine it with `causal` to hide the future inside the chosen entries. q, k and v get gradients, the choice
    gets none. Entries behind the last key are errors where indices are read, and count as -1 where they are not, in
    calls on a GPU and in graphs.

    Inside sequences laid end to end, by `varlen_attention`, `packed` and jagged tensors, [rows, G, k] has a row for
    each query of all sequences, and entries count from the first key of the query's own sequence. For entries that
    count along the whole row write `topk & flexmasks.packed("causal", offsets)`. `block_topk` is for blocks of queries
    that choose together.

    Source: DeepSeek-V3.2 (DeepSeek Sparse Attention), 2025; Yuan et al., Native Sparse Attention, 2025.
    Peers: FlashMLA sparse_prefill's indices [T_q, G, k]; cuDNN frontend's sparse attention; transformers' layers that
        select by an indexer add a matrix of 0 and -inf.
    """
    entry = kv // granularity
    row: tuple[Tensor | int, ...] = h // share if chosen.shape[-3] > 1 else always(0, kv), row_of(chosen, q, first, b)
    if chosen.ndim == 4:
        row = b if chosen.shape[0] > 1 else always(0, kv), *row
    return (chosen[*row, entry // bits].int() >> (entry % bits).int()) & 1 != 0
