from typing import Annotated

from torch import Tensor

from flexmasks.registry import register_mask


@register_mask(example=lambda length: {"seq_lens": [length * 3 // 4]})
def padding(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, seq_lens: Annotated[Tensor, "int[B] in 0..KV"]) -> Tensor:
    """Every query sees the first `seq_lens[b]` keys; the keys past them are padding.

    seq_lens: number of real keys of each batch element. Queries are not masked: a padded query gives some output.

    Source: the key padding mask of torch.nn.MultiheadAttention, which marks the hidden keys instead.
    """
    return (kv < seq_lens[b]) & (q >= 0)
