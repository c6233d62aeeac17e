from typing import Annotated

from torch import Tensor

from flexmasks.spec import Band, Size, register_mask

# Numbers of tokens: one number, which kernels take as a tensor if it changes often.
Reach = Annotated[int | Tensor, "int in 0.. | int[] in 0.."]


def _band(size: Size, *, left: int | Tensor, right: int | Tensor) -> Band | None:
    return None if isinstance(left, Tensor) or isinstance(right, Tensor) else Band(left, right)


@register_mask(example=lambda length: {"left": length // 4, "right": length // 8}, band=_band)
def local(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, left: Reach, right: Reach) -> Tensor:
    """Each query sees itself, `left` keys before it and `right` keys after it.

    left, right: numbers of keys on each side; FlashAttention's window_size=(left, right).

    Source: Beltagy et al., Longformer, 2020 (its window w is left = right = w // 2).
    Peers: FlashAttention window_size=(left, right); JAX splash LocalMask(window_size=(left, right)),
        make_local_attention_mask; xformers LocalAttentionFromBottomRightMask(left, right); Hugging Face
        sliding_window_bidirectional_mask_function (left = right = its window).
    """
    return (q - kv <= left) & (kv - q <= right)
