from collections.abc import Callable, Sequence
from typing import Any, overload

from torch import Tensor

from flexmasks.spec import (
    Mask,
    Score,
    example_pages,
    get_mask,
    get_score,
    positions_in_pages,
    prepare_pages,
    register_mask,
    says_what_to_write,
    size_inside_pages,
)


def _example(length: int) -> dict[str, Any]:
    return {"inner": get_mask("causal"), **example_pages(length)}


@register_mask(name="paged", prepare=prepare_pages, inner_size=size_inside_pages, example=_example)
def paged_mask(
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
    """Any mask over a paged KV cache, one pool of pages for all batch elements.

    inner: the mask inside a sequence; its kv is the position there. It sees P * page_size keys.
    page_table: [B, P]; entry p of a sequence is the page of the pool that holds its keys from p * page_size on. Entries
        of keys that no query sees may hold anything; sequences may share pages. Of a page that a sequence holds twice,
        as in a ring, the last keys count.
    kv_lens: number of keys of each sequence. Keys past it, and in pages of other sequences, are hidden.
    page_size: number of keys in a page; the number of keys of the whole pool must be a multiple of it.

    If pages are smaller than the blocks of the BlockMask, a block is computed for all sequences with a page in it.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
    Peers: torch PagedAttention.get_mask_mod; vLLM and FlashAttention block_table and cache_seqlens, which
        `flexmasks.paged_attention` takes as they are; xformers PagedBlockDiagonalPaddedKeysMask and
        PagedBlockDiagonalGappyKeysMask, with causal inside PagedBlockDiagonalCausalWithOffsetPaddedKeysMask and
        PagedBlockDiagonalCausalWithOffsetGappyKeysMask, with sliding_window
        PagedBlockDiagonalCausalLocalPaddedKeysMask.
    """
    position = positions_in_pages(b, kv, first_positions, kv_lens, page_size)
    return (first_positions[b, kv // page_size] >= 0) & (position < kv_lens[b]) & inner(b, h, q, position)


# fmt: off
@overload
def paged(  # type: ignore[overload-overlap] # a Score can be called, too
    inner: Score, page_table: Tensor | Sequence[Sequence[int]], kv_lens: Tensor | Sequence[int], page_size: int
) -> Score: ...
@overload
def paged(
    inner: str | Mask | Callable[..., Tensor], page_table: Tensor | Sequence[Sequence[int]],
    kv_lens: Tensor | Sequence[int], page_size: int,
) -> Mask: ...
# fmt: on


@says_what_to_write()
def paged(
    inner: str | Mask | Score | Callable[..., Tensor],
    page_table: Tensor | Sequence[Sequence[int]],
    kv_lens: Tensor | Sequence[int],
    page_size: int,
) -> Mask | Score:
    """Return a mask (or Score) over keys in pages of a paged KV cache.

    The cache is one pool of pages. Key n of the pool is slot n % page_size of page n // page_size. Inside, kv is the
    position in the batch element's own sequence; keys in pages of other batch elements, and keys past its length, are
    hidden.

    Args:
        inner: a Mask, the name of a mask without parameters, a mask function, or a Score. Inside there are
            P * page_size keys.
        page_table: int[B, P]; entry [b, p] is the page of the pool that holds the keys of batch element b from
            p * page_size on. Only the first ceil(kv_lens[b] / page_size) entries of row b are read, and those of keys
            that no query sees may hold anything. Batch elements may share pages (of a common prefix). Of a page that
            one of them holds twice (a ring), each slot holds the last of its keys.
        kv_lens: int[B], the number of keys of each batch element, from 0 to P * page_size.
        page_size: keys in a page, at least 1.

    Returns:
        A Mask, or a Score if `inner` is one.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.

    Example:
        >>> import flexmasks
        >>> mask = flexmasks.paged("causal", [[2, 0]], [3], page_size=2)  # its keys are in slots 4, 5, 0
        >>> flexmasks.dense_mask(mask, 3, 6, q_offset="first")[0, 0].int()
        tensor([[0, 0, 0, 0, 1, 0],
                [0, 0, 0, 0, 1, 1],
                [1, 0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    given: dict[str, Any] = {"page_table": page_table, "kv_lens": kv_lens, "page_size": page_size}
    if isinstance(inner, Score):
        return get_score("paged", inner=inner, **given)
    return get_mask("paged", inner=get_mask(inner), **given)
