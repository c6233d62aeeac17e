from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.plans.windows import Band, band_of, in_sequences
from flexmasks.spec.packing import inside_sequences, sequences
from flexmasks.spec.parameters import Size
from flexmasks.spec.registry import get_mask, register_mask
from flexmasks.spec.values import Mask


def _example(length: int) -> dict[str, Any]:
    return {"inner": get_mask("causal"), "offsets": [0, length // 8, length // 2, length * 5 // 8, length]}


def _dense(size: Size, *, inner: Mask, **places: Any) -> Band | None:
    inside = inside_sequences(size, inner=inner, **places)
    return in_sequences(band_of(inner, inside), size, places["offsets"], places["kv_offsets"], places["q_start"])


@register_mask(prepare=sequences, inner_size=inside_sequences, example=_example, dense=_dense)
def packed(
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

    Sequences do not see each other.

    inner: the mask inside a sequence; its batch index is the number of the sequence, its positions start at 0 there.
    offsets: where each sequence starts, and the end of the last (cu_seqlens of varlen attention); later tokens are
        padding.
    kv_offsets: the same for the keys if they are packed differently; by default `offsets`.
    q_start: the position of the first query of each sequence, one for all or one for each; by default 0, the position
        of the first key. `kv_offsets.diff() - offsets.diff()` aligns the ends of queries and keys.

    Source: FlexAttention: jagged sequences, Dong et al., 2024.
    Peers: attention-gym generate_doc_mask_mod(mask_mod, offsets); xformers BlockDiagonalMask and
        BlockDiagonalCausalMask (BlockDiagonalCausalFromBottomRightMask by q_start); FlashAttention varlen
        cu_seqlens_q, cu_seqlens_k, whose causal and windows align the ends; FlashMask Prefix LM Document Mask is a
        prefix_lm inside.
    """
    sequence = q_sequence[q]
    inside = inner(torch.where(sequence < 0, 0, sequence), h, q_position[q], kv_position[kv])
    return (sequence == kv_sequence[kv]) & inside
