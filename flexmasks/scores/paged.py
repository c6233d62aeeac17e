from collections.abc import Callable
from typing import Any

from torch import Tensor

from flexmasks.spec import (
    example_pages,
    get_score,
    positions_in_pages,
    prepare_pages,
    register_score,
    size_inside_pages,
)


def _example(length: int) -> dict[str, Any]:
    return {"inner": get_score("alibi"), **example_pages(length)}


@register_score(prepare=prepare_pages, inner_size=size_inside_pages, example=_example)
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
    return inner(score, b, h, q, positions_in_pages(b, kv, first_positions, kv_lens, page_size))
