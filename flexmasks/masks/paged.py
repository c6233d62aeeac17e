from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.spec.paging import inside_pages, pages
from flexmasks.spec.registry import get_mask, register_mask


def _example(length: int) -> dict[str, Any]:
    size = max((n for n in range(1, length // 8 + 1) if length % n == 0), default=1)
    count = length // size
    table = [*range(1, count, 2), *range(0, count, 2)]
    return {"inner": get_mask("causal"), "page_table": [table], "kv_lens": [length * 7 // 8], "page_size": size}


@register_mask(prepare=pages, inner_size=inside_pages, example=_example)
def paged(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    inner: Callable[..., Tensor],
    first_positions: Tensor,
    kv_lens: Tensor,
    page_size: int,
) -> Tensor:
    """Any mask over a paged KV cache.

    All batch elements share the pages of one pool.

    inner: the mask inside a sequence; its kv is the position there. It sees P * page_size keys.
    page_table: the page of the pool that holds keys p * page_size and following of a sequence. Entries past a
        sequence's last page may hold anything; sequences may share pages.
    kv_lens: number of keys of each sequence. Keys past it, and in pages of other sequences, are hidden.
    page_size: number of keys in a page; the number of keys of the whole pool must be a multiple of it.

    If pages are smaller than the blocks of the BlockMask, a block is computed for all sequences with a page in it.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
    Peers: torch PagedAttention.get_mask_mod; vLLM and FlashAttention block_table and cache_seqlens, which
        `flexmasks.paged_attention` takes as they are.
    """
    first = first_positions[b, kv // page_size]
    position = torch.where(first < 0, 0, first) + kv % page_size
    return (first >= 0) & (position < kv_lens[b]) & inner(b, h, q, position)
