from torch import Tensor

from flexmasks.spec import Band, register_mask


@register_mask(example=lambda length: {}, band=lambda size: Band(right=0))
def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Each query sees itself and the keys before it.

    Where there are other numbers of queries than of keys, `q_offset` says where the queries start: "first" is the
    top-left alignment of torch's is_causal, "last" the bottom-right one of FlashAttention.

    Source: Vaswani et al., Attention Is All You Need, 2017.
    Peers: torch SDPA is_causal and causal_upper_left (top-left), causal_lower_right; FlashAttention causal
        (bottom-right since 2.1); attention-gym causal_mask; Hugging Face causal_mask_function, create_causal_mask and
        the layer type "full_attention" of language models; xformers LowerTriangularMask and
        LowerTriangularFromBottomRightMask; JAX splash CausalMask(offset=q_offset), make_causal_mask; FlashMask Causal
        Mask; MagiAttention CAUSAL (bottom-right); Transformer-XL's memory, by its length as q_offset.
    """
    return kv <= q
