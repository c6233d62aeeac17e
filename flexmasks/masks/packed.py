from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from flexmasks.spec import (
    Band,
    Mask,
    Score,
    Size,
    band_of,
    get_mask,
    get_score,
    in_sequences,
    prepare_sequences,
    register_mask,
    says_what_to_write,
    size_inside_sequences,
)


def _example(length: int) -> dict[str, Any]:
    return {"inner": get_mask("causal"), "offsets": [0, length // 8, length // 2, length * 5 // 8, length]}


def _band(size: Size, *, inner: Mask, **places: Any) -> Band | None:
    inside = size_inside_sequences(size, inner=inner, **places)
    return in_sequences(band_of(inner, inside), size, **places)


@register_mask(name="packed", prepare=prepare_sequences, inner_size=size_inside_sequences, example=_example, band=_band)
def packed_mask(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    inner: Callable[..., Tensor],
    q_sequence: Tensor,
    q_position: Tensor,
    kv_sequence: Tensor,
    kv_position: Tensor,
) -> Tensor:
    """Any mask inside each of several sequences laid end to end.

    inner: the mask inside a sequence, which sees no other one; its batch index is the number of the sequence, its
        positions start at 0 there.
    offsets: where each sequence starts, and the end of the last one (cu_seqlens of varlen attention); later tokens are
        padding.
    kv_offsets: the same for the keys if they are packed differently; by default `offsets`.
    q_start: the position of the first query of each sequence, one for all or one for each; by default 0, the position
        of the first key. `kv_offsets.diff() - offsets.diff()` aligns the ends of queries and keys.
    max_length: an upper bound of the lengths of sequences, for plans that do not read `offsets`.

    Source: FlexAttention: jagged sequences, Dong et al., 2024.
    Peers: attention-gym generate_doc_mask_mod(mask_mod, offsets); xformers BlockDiagonalMask and
        BlockDiagonalCausalMask (BlockDiagonalCausalFromBottomRightMask by q_start); xformers
        BlockDiagonalCausalLocalAttentionMask and BlockDiagonalCausalLocalAttentionFromBottomRightMask have a
        sliding_window inside; FlashAttention varlen cu_seqlens_q, cu_seqlens_k, whose causal and windows align the
        ends; FlashMask Prefix LM Document Mask is a prefix_lm inside.
    """
    sequence = q_sequence[q]
    inside = inner(torch.where(sequence < 0, 0, sequence), h, q_position[q], kv_position[kv])
    return (sequence == kv_sequence[kv]) & inside


# fmt: off
@overload
def packed(  # type: ignore[overload-overlap] # a Score can be called, too
    inner: Score, offsets: Tensor | Sequence[int], kv_offsets: Tensor | Sequence[int] | None = None,
    q_start: int | Tensor | Sequence[int] = 0, *, max_length: int | None = None,
) -> Score: ...
@overload
def packed(
    inner: str | Mask | Callable[..., Tensor], offsets: Tensor | Sequence[int],
    kv_offsets: Tensor | Sequence[int] | None = None, q_start: int | Tensor | Sequence[int] = 0, *,
    max_length: int | None = None, **params: Any,
) -> Mask: ...
# fmt: on


@says_what_to_write()
def packed(
    inner: str | Mask | Score | Callable[..., Tensor],
    offsets: Tensor | Sequence[int],
    kv_offsets: Tensor | Sequence[int] | None = None,
    q_start: int | Tensor | Sequence[int] = 0,
    *,
    max_length: int | None = None,
    **params: Any,
) -> Mask | Score:
    """Return a mask (or Score) inside sequences laid end to end, which do not see each other.

    Args:
        inner: a Mask, a mask's name, a mask function, or a Score. Inside, the batch index is the number of the
            sequence and positions start at 0.
        offsets: int[N + 1], the start of each of N sequences and the end of the last (cu_seqlens of varlen
            attention); any total length. Tokens past the end are padding.
        kv_offsets: the same for the keys, if they are packed differently.
        q_start: the position of the first query of each sequence, int >= 0 or int[N], as `q_offset` is for a whole
            call; the first key is at 0. `kv_offsets.diff() - offsets.diff()` puts each last query at its last key,
            as FlashAttention's varlen attention does.
        max_length: an upper bound of the lengths of sequences, of queries and of keys (max_seqlen of varlen attention).
            Tables of `inner` may have any lengths up to it. A plan that does not read `offsets` on the host assumes
            this bound; by default it assumes that a sequence may have all tokens, which costs memory. A tensor
            `q_start` is then assumed to be at most this bound, too. A new bound compiles nothing.
        **params: parameters of `inner`.

    Returns:
        A Mask, or a Score if `inner` is one.

    Example:
        >>> import flexmasks
        >>> flexmasks.dense_mask(flexmasks.packed("causal", [0, 1, 3]), 3)[0, 0].int()
        tensor([[1, 0, 0],
                [0, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    places: dict[str, Any] = {"offsets": offsets}
    if kv_offsets is not None:
        places["kv_offsets"] = kv_offsets
    if type(q_start) is not int or q_start != 0:
        places["q_start"] = q_start
    if max_length is not None:
        places["max_length"] = max_length
    if isinstance(inner, Score):
        return get_score("packed", inner=get_score(inner, **params), **places)
    return get_mask("packed", inner=get_mask(inner, **params), **places)
