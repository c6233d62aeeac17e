from typing import Annotated, Any

from torch import Tensor

from flexmasks.spec import Size, always, at_head, leading, register_mask

Ends = Annotated[Tensor, "int[KV] | int[B, KV] | int[B, H, KV] | int[B, 1, KV]"]


@register_mask(example=lambda length: {"evicted": [i + 1 + i * 37 % (length // 2) for i in range(length)]})
def key_eviction(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, evicted: Ends) -> Tensor:
    """Causal attention whose keys are dropped: queries j to evicted[j] - 1 see key j.

    evicted: the first query position that no longer sees each key, for all, for each batch element, or for each
        batch element and query head. A key with evicted[j] <= j is never seen.

    Source: Chen et al., NACL, 2024; Wang et al., FlashMask, 2024 (Random Eviction Mask).
    Peers: FlashMask startend_row_indices[..., 0] with causal=True, its Random Eviction Mask.
    """
    return (kv <= q) & (q < at_head(evicted, b, h, kv))


def _prepare(
    size: Size | None,
    *,
    startend_row_indices: Annotated[
        Tensor, "int[B, H, KV, N] | int[B, 1, KV, N] | int[1, H, KV, N] | int[1, 1, KV, N]"
    ],
    causal: Annotated[bool, "bool"],
) -> dict[str, Any]:
    given = startend_row_indices.shape[-1]
    if given not in ((1, 2) if causal else (2, 4)):
        raise ValueError(
            f"`startend_row_indices` must end with {'1 or 2' if causal else '2 or 4'} indices for causal={causal}, "
            f"got {given}."
        )
    return {"rows": startend_row_indices, "causal": causal}


def _example(length: int) -> dict[str, Any]:
    step = length // 8
    lower = [[min(length, (i // step + 2) * step), max(0, (i // step - 1) * step)] for i in range(length)]
    return {"startend_row_indices": [[lower]], "causal": False}


@register_mask(prepare=_prepare, example=_example)
def flashmask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, rows: Tensor, causal: bool) -> Tensor:
    """FlashMask's intervals: up to two hidden runs of queries for each key.

    startend_row_indices: [batch or 1, query heads or 1, keys, n], the ends of the hidden runs of queries; a run starts
        at its start and ends before its end. With causal=True n is 1, (start), or 2, (start, end), of the run below the
        diagonal. With causal=False n is 2, (start of the run below, end of the run above), or 4, (start, end of the run
        below, start, end of the run above). A run without an end reaches the last query, a run without a start begins
        at the first query.
    causal: True to hide the keys after each query too.

    Source: Wang et al., FlashMask, 2024, section 4.1.
    Peers: PaddlePaddle flashmask_attention(startend_row_indices, causal); its heads are key heads, here query heads.
    """
    count = rows.shape[3]
    ends = [rows[*leading(rows, b, h, kv), kv, always(n, kv)] for n in range(count)]
    if causal:
        hidden = q >= ends[0]
        if count == 2:
            hidden = hidden & (q < ends[1])
        return (kv <= q) & ~hidden
    if count == 2:
        return (q < ends[0]) & (q >= ends[1])
    below = (q >= ends[0]) & (q < ends[1])
    return ~below & ~((q >= ends[2]) & (q < ends[3]))
