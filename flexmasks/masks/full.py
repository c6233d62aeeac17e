from torch import Tensor

from flexmasks.spec import Band, register_mask


@register_mask(example=lambda length: {}, band=lambda size: Band())
def full(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Every query sees every key.

    Source: Vaswani et al., Attention Is All You Need, 2017.
    Peers: torch SDPA without attn_mask; flex_attention noop_mask; Hugging Face bidirectional_mask_function and
        create_bidirectional_mask; TransformerEngine no_mask; JAX splash FullMask; MagiAttention FULL.
    """
    return kv >= 0
