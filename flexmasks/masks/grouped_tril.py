from typing import Annotated

from torch import Tensor

from flexmasks.spec import register_mask


@register_mask(example=lambda length: {"seq_lens": [length * 3 // 4]})
def grouped_tril(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, seq_lens: Annotated[Tensor, "int[B] in 0..S"]
) -> Tensor:
    """Causal attention within the first `seq_lens[b]` tokens of each batch element.

    The tokens after them are padding: they see nothing, and nothing sees them.

    seq_lens: number of real tokens of each batch element. Later rows give output 0.

    Source: the grouped lower-triangular masked softmax of jagged ranking models.
    Peers: `causal` and FlashAttention varlen's cu_seqlens, where padding is not stored; TransformerEngine
        padding_causal.
    """
    return (kv <= q) & (q < seq_lens[b]) & (kv < seq_lens[b])
