from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.spec import (
    Factors,
    Score,
    Size,
    cap_of,
    factors_of,
    get_score,
    prepare_sequences,
    register_score,
    size_inside_sequences,
)


def _example(length: int) -> dict[str, Any]:
    return {"inner": get_score("alibi"), "offsets": [0, length // 8, length // 2, length * 5 // 8, length]}


def _cap(size: Size, *, inner: Score, **places: Any) -> float | None:
    return cap_of(inner, size_inside_sequences(size, inner=inner, **places))


def _factors(
    size: Size, *, inner: Score, kv_offsets: Tensor | None, q_start: int | Tensor, **places: Any
) -> Factors | None:
    if kv_offsets is not None or isinstance(q_start, Tensor) or q_start:
        return None  # distances in a sequence are not those in the call
    inner_size = size_inside_sequences(size, inner=inner, kv_offsets=kv_offsets, q_start=q_start, **places)
    return factors_of(inner, inner_size)


@register_score(
    prepare=prepare_sequences, inner_size=size_inside_sequences, example=_example, cap=_cap, factors=_factors
)
def packed(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    inner: Callable[..., Tensor],
    q_sequence: Tensor | None,
    q_position: Tensor | None,
    kv_sequence: Tensor | None,
    kv_position: Tensor | None,
) -> Tensor:
    """Any score change inside each of several sequences laid end to end.

    inner: the change inside a sequence; its batch index is the number of the sequence, its positions start at 0.
    offsets, kv_offsets, q_start, max_length: as in the mask `packed`.

    A pair of two sequences gets an arbitrary score, so a mask must hide it.

    Source: FlexAttention: jagged sequences, Dong et al., 2024.
    """
    if q_sequence is None or q_position is None or kv_position is None:  # the change needs distances alone
        return inner(score, b, h, q, kv)
    sequence = q_sequence[q]
    return inner(score, torch.where(sequence < 0, 0, sequence), h, q_position[q], kv_position[kv])
