from torch import Tensor

from flexmasks.masks.local import Reach
from flexmasks.spec import Band, Size, register_mask


def _band(size: Size, *, window: int | Tensor) -> Band | None:
    return None if isinstance(window, Tensor) else Band(left=window, right=0)


@register_mask(example=lambda length: {"window": length // 4}, band=_band)
def sliding_window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, window: Reach) -> Tensor:
    """Each query sees itself and the `window` keys before it.

    window: number of earlier keys, so that window + 1 keys are visible in all; Hugging Face's sliding_window=W is
        window=W-1. A tensor may change without a new compilation.

    Source: Jiang et al., Mistral 7B, 2023; Child et al., Sparse Transformers, 2019.
    Peers: FlashAttention window_size=(window, 0); attention-gym generate_sliding_window(window); Hugging Face
        sliding_window=window + 1, the layer type "sliding_attention", sliding_window_causal_mask_function and
        create_sliding_window_causal_mask; xformers LowerTriangularFromBottomRightMask().make_local_attention(window +
        1), which is LowerTriangularFromBottomRightLocalAttentionMask; FlashInfer window_left=window; JAX splash
        LocalMask(window_size=(window, 0)); FlashMask Sliding Window Mask; SWA in papers on language models.
    """
    return (kv <= q) & (q - kv <= window)
