from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.masks.paged import _example as _mask_example
from flexmasks.spec.paging import inside_pages, pages
from flexmasks.spec.registry import get_score, register_score


def _example(length: int) -> dict[str, Any]:
    return _mask_example(length) | {"inner": get_score("alibi")}


@register_score(prepare=pages, inner_size=inside_pages, example=_example)
def paged(
    score: Tensor,
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
    """Any score change over a paged KV cache.

    inner: the change inside a sequence; its kv is the position there.
    page_table, kv_lens, page_size: as in the mask `paged`.

    A pair that the mask `paged` hides gets an arbitrary score.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
    """
    first = first_positions[b, kv // page_size]
    return inner(score, b, h, q, torch.where(first < 0, 0, first) + kv % page_size)
