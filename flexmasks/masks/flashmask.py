from typing import Annotated, Any

from torch import Tensor

from flexmasks.masks.dense import leading
from flexmasks.spec import Size, always, register_mask


@register_mask(example=lambda length: {"evicted": [i + 1 + i * 37 % (length // 2) for i in range(length)]})
def key_eviction(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    evicted: Annotated[Tensor, "int[KV] | int[B, KV] | int[B, H, KV] | int[B, 1, KV]"],
) -> Tensor:
    """Causal, with keys that are dropped after some time: key j is visible to queries j to evicted[j] - 1.

    evicted: the first query position that no longer sees each key, for all, for each batch element, or for each
        batch element and query head. A key of evicted[j] <= j is never seen.

    Source: Chen et al., NACL, 2024; Wang et al., FlashMask, 2024 (Random Eviction Mask).
    Peers: FlashMask startend_row_indices[..., 0] with causal=True.
    """
    if evicted.ndim == 3:
        end = evicted[b, h if evicted.shape[1] > 1 else always(0, kv), kv]
    else:
        end = evicted[b, kv] if evicted.ndim == 2 else evicted[kv]
    return (kv <= q) & (q < end)


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
    """FlashMask's intervals: of each key, up to two runs of queries that do not see it.

    startend_row_indices: [batch or 1, query heads or 1, keys, n], of each key, with ends exclusive: for causal=True
        (start) or (start, end) of the hidden queries below the diagonal; for causal=False (start of those below, end
        of those above) or (start, end below, start, end above). A lone start reaches to the last query, a lone end
        from the first.
    causal: whether keys after the query are hidden besides.

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
