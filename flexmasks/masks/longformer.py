from typing import Annotated, Any

from torch import Tensor

from flexmasks.masks.local import Reach
from flexmasks.spec import at, register_mask

Count = Annotated[int, "int in 0.."]
Positive = Annotated[int, "int in 1.."]
Tokens = Annotated[int | Tensor, "int in 0.. | bool[S] | bool[B, S]"]


def _example(length: int) -> dict[str, Any]:
    return {"tokens": length // 16}


@register_mask(example=_example)
def global_tokens(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, tokens: Tokens) -> Tensor:
    """Global tokens see every key and are seen by every query; all else is hidden.

    tokens: the number of global tokens at the start, or a boolean for each position, for all batch elements or for
        each.

    Combine this mask by `|` with a mask of what the other tokens see.

    Source: Ainslie et al., ETC, 2020; Beltagy et al., Longformer, 2020.
    Peers: Hugging Face Longformer global_attention_mask == 1; DeepSpeed VariableSparsityConfig(
        horizontal_global_attention=True), global_block_indices, which count blocks.
    """
    return _is_global(tokens, b, q) | _is_global(tokens, b, kv)


@register_mask(example=lambda length: {"window": length // 16, **_example(length)})
def longformer(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, window: Reach, tokens: Tokens) -> Tensor:
    """A window on both sides of each query, and global tokens.

    window: number of keys on each side.
    tokens: the global tokens, as in the mask `global_tokens`; they see everything and are seen by everything.

    Source: Beltagy et al., Longformer, 2020 (its window size w is window = w // 2).
    Peers: attention-gym generate_global_sliding_window(window, is_global=tokens); FlashMask Global + Sliding Window
        Mask; Hugging Face Longformer attention_window=2 * window; DeepSpeed BSLongformerSparsityConfig works on blocks.
    """
    near = (q - kv <= window) & (kv - q <= window)
    return near | global_tokens(b, h, q, kv, tokens=tokens)


@register_mask(example=lambda length: {"frame": length // 8, "window": length // 64, "tokens": length // 32})
def temporal_window(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, frame: Positive, window: Count, tokens: Count = 0
) -> Tensor:
    """Each token of a video sees its neighborhood in every frame.

    frame: number of tokens in a frame; frames follow each other from position `tokens` on.
    window: the greatest distance between two places in their frames, included.
    tokens: number of tokens of text before the video, which see everything and are seen by everything.

    Source: Xi et al., Sparse VideoGen, 2025 (temporal heads; its spatial heads are `longformer`).
    Peers: attention-gym generate_temporal_head_mask_mod(tokens, frames, frame, width), where
        window + 1 = width * frame // frames, and generate_spatial_head_mask_mod.
    """
    shift = -tokens % frame  # q - tokens may be negative, and some kernels compute wrong remainders of negative numbers
    distance = (q + shift) % frame - (kv + shift) % frame
    near = (distance <= window) & (-window <= distance)
    return near | (q < tokens) | (kv < tokens)


def _is_global(tokens: int | Tensor, b: Tensor, position: Tensor) -> Tensor:
    return at(tokens, b, position) if isinstance(tokens, Tensor) else position < tokens
