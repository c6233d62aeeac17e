from typing import Annotated

from torch import Tensor

from flexmasks.spec import per_batch, register_mask

Length = Annotated[int | Tensor, "int in 0.. | int[] in 0.. | int[B] in 0.."]


@register_mask(example=lambda length: {"prefix_len": length // 4})
def prefix_lm(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, prefix_len: Length) -> Tensor:
    """Every query sees the prefix, keys 0 to prefix_len - 1; later keys causally.

    prefix_len: length of the prefix, one for all or one for each batch element. If it is longer than the keys,
        everything is visible. Inside documents: `packed(prefix_lm(prefix_len=[one per document]), offsets)`.

    Source: Raffel et al., T5, 2020, section 3.2.1.
    Peers: attention-gym generate_prefix_lm_mask(prefix_len); FlashMask Prefix LM Causal Mask.
    """
    return (kv <= q) | (kv < per_batch(prefix_len, b))
