from typing import Annotated

from torch import Tensor

from flexmasks.spec import register_mask

Marks = Annotated[Tensor, "bool[B, KV] | int[B, KV] in 0..1"]


@register_mask(example=lambda length: {"kv_lens": [length * 3 // 4]})
def padding(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, kv_lens: Annotated[Tensor, "int[B] in 0..KV"]) -> Tensor:
    """Every query sees the first `kv_lens[b]` keys; the keys after them are padding.

    kv_lens: number of real keys of each batch element. Queries are not masked: a padded query gives some output.

    Source: the key padding mask of torch.nn.MultiheadAttention, which marks the hidden keys instead.
    Peers: FlashAttention cache_seqlens, seqused_k; Hugging Face's [B, S] masks of ones and zeros are `key_padding`;
        inside `packed`, with the starts of the keys as kv_offsets: xformers BlockDiagonalPaddedKeysMask and
        BlockDiagonalGappyKeysMask, and with causal and q_start BlockDiagonalCausalWithOffsetPaddedKeysMask and
        BlockDiagonalCausalWithOffsetGappyKeysMask; with a window xformers BlockDiagonalLocalAttentionPaddedKeysMask,
        BlockDiagonalCausalLocalAttentionPaddedKeysMask and BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask.
    """
    return kv < kv_lens[b]


@register_mask(example=lambda length: {"attention_mask": [[i >= length // 4 for i in range(length)]]})
def key_padding(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, attention_mask: Marks) -> Tensor:
    """Every query sees the keys that a [B, KV] mask marks by 1.

    attention_mask: 1 or True for real keys, 0 or False for padding on any side, as tokenizers give it. Combined with
        `causal`, queries that are padding on the left see nothing and give output 0.

    Source: Hugging Face tokenizers' attention_mask.
    Peers: Hugging Face padding_mask_function; torch.nn.MultiheadAttention key_padding_mask marks the hidden keys.
    """
    return attention_mask[b, kv] != 0
