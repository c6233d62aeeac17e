"""Keys in pages of one pool that all batch elements share: a mask or a score change over the pages' slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec.parameters import Size
from flexmasks.spec.registry import get_mask, get_score
from flexmasks.spec.values import Mask, Score


def paged(
    inner: str | Mask | Score | Callable[..., Tensor],
    page_table: Tensor | Sequence[Sequence[int]],
    kv_lens: Tensor | Sequence[int],
    page_size: int,
) -> Any:
    """A mask (or Score) over keys that lie in pages of one pool: a paged KV cache.

    Key n of the pool is slot n % page_size of page n // page_size. Inside, kv is the position in the batch element's
    own sequence; keys of pages that are not its own, and those past its length, are hidden.

    Args:
        inner: a Mask, a mask's name where it has no parameters, a mask function, or a Score. Inside there are
            P * page_size keys.
        page_table: int[B, P], the page of the pool that holds keys p * page_size and following of batch element b. Only
            the first ceil(kv_lens[b] / page_size) of a row are read. Batch elements may share pages (of a common
            prefix).
        kv_lens: int[B], how many keys each batch element has, from 0 to P * page_size.
        page_size: keys in a page, at least 1.

    Returns:
        A Mask, or a Score where `inner` is one.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.

    Example:
        >>> import flexmasks
        >>> mask = flexmasks.paged("causal", [[2, 0]], [3], page_size=2)  # its keys are in slots 4, 5, 0
        >>> flexmasks.dense_mask(mask, 3, 6)[0, 0].int()
        tensor([[0, 0, 0, 0, 1, 0],
                [0, 0, 0, 0, 1, 1],
                [1, 0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    given: dict[str, Any] = {"page_table": page_table, "kv_lens": kv_lens, "page_size": page_size}
    if isinstance(inner, Score):
        return get_score("paged", inner=inner, **given)
    return get_mask("paged", inner=get_mask(inner), **given)


def pages(
    size: Size | None,
    *,
    inner: Any,
    page_table: Annotated[Tensor, "int[B, P]"],
    kv_lens: Annotated[Tensor, "int[B] in 0.."],
    page_size: Annotated[int, "int in 1.."],
) -> dict[str, Any]:
    """Prepare a paged mask or score: of each page of the pool its first position in each sequence, -1 where in none.

    Without sizes the pool ends with the last page that is in use.
    """
    batch, columns = page_table.shape
    page_table = page_table.long()  # which holds any number of pages
    starts = torch.arange(0, columns * page_size, page_size, dtype=torch.int32, device=page_table.device)
    used = starts < kv_lens[:, None]
    if size is None:
        count = 1 + int(torch.where(used, page_table, 0).amax())
    elif size.kv_len % page_size:
        raise ValueError(f"`page_size` = {page_size} must divide the {size.kv_len} keys of the call, whole pages.")
    else:
        count = size.kv_len // page_size
    inside = used & (page_table >= 0) & (page_table < count)
    # what is not in use goes to a column of its own, which is cut off
    first = torch.full((batch, count + 1), -1, dtype=torch.int32, device=page_table.device)
    first.scatter_(1, torch.where(inside, page_table, count), starts.expand(batch, columns))
    first = first[:, :count].contiguous()
    found = torch.stack([kv_lens.amax(), used.sum(), inside.sum(), (first >= 0).sum()])
    longest, in_use, in_pool, distinct = found.tolist()
    if longest > columns * page_size:
        raise ValueError(
            f"`kv_lens` is at most {columns} pages * `page_size` {page_size} = {columns * page_size}, got {longest}."
        )
    if in_pool < in_use:
        b, place = (used & ~inside).nonzero()[0].tolist()
        raise ValueError(
            f"`page_table` must have pages 0..{count - 1} where it is in use, got {int(page_table[b, place])} for page "
            f"{place} of batch element {b}, which has {int(kv_lens[b])} keys."
        )
    if distinct < in_use:
        b = int((used.sum(1) != (first >= 0).sum(1)).nonzero()[0])
        raise ValueError(f"`page_table` has a page twice in batch element {b}; sequences may share a page, not repeat.")
    return {"inner": inner, "first_positions": first, "kv_lens": kv_lens, "page_size": page_size}


def inside_pages(size: Size, *, inner: Any, page_table: Tensor, kv_lens: Tensor, page_size: int) -> Size:
    """The sizes that a mask or score inside pages sees."""
    if not isinstance(inner, Mask | Score):
        raise ValueError(f"`inner` must be a Mask or a Score, as get_mask or get_score make them, got {inner!r}.")
    if not page_table.numel():
        raise ValueError("`page_table` needs a page for each batch element at least.")
    return replace(size, kv_len=page_table.shape[1] * page_size)
