from typing import Annotated

from torch import Tensor

from flexmasks.masks.local import Reach
from flexmasks.spec import register_mask

Step = Annotated[int, "int in 1.."]


@register_mask(example=lambda length: {"window": length // 4, "dilation": 4})
def dilated_window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, window: Reach, dilation: Step) -> Tensor:
    """Each query sees every `dilation`-th key on both sides, up to `window` away.

    window: the greatest distance, included: window // dilation keys on each side. Combine with `causal` for one side.
    dilation: distance between neighboring visible keys; 1 leaves no gaps.

    Source: Beltagy et al., Longformer, 2020 (its window counts keys: window = w // 2 * dilation here).
    Peers: attention-gym generate_dilated_sliding_window(window, dilation); NATTEN na1d shifts the window at the edges:
        `natten1d`.
    """
    return (q - kv <= window) & (kv - q <= window) & ((q - kv) % dilation == 0)


@register_mask(example=lambda length: {"stride": length // 16})
def strided(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, stride: Step) -> Tensor:
    """Each query sees `stride` keys before it, and every `stride`-th key further back.

    stride: the reach of the near keys, and the distance between the far keys. The query's own key is visible, too.

    Source: Child et al., Sparse Transformers, 2019, figure 3b (both of its heads in one).
    Peers: OpenAI sparse_attention has both parts as attn_mode "local" and "strided" with local_attn_ctx=stride.
    """
    return (kv <= q) & ((q - kv <= stride) | ((q - kv) % stride == 0))


@register_mask(example=lambda length: {"stride": length // 8, "summary": length // 64})
def fixed(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, stride: Step, summary: Annotated[int, "int in 0.."]
) -> Tensor:
    """Each query sees its block so far, and the ends of earlier blocks.

    stride: number of positions in a block.
    summary: number of keys at the end of each block that all later queries see; the whole block from `stride` on.

    Source: Child et al., Sparse Transformers, 2019, figure 3c (both of its heads in one; summary is c, stride is l).
    Peers: DeepSpeed FixedSparsityConfig(attention="unidirectional", num_local_blocks=stride) with one global block is
        this with summary=1, in blocks for positions.
    """
    return (kv <= q) & ((q // stride == kv // stride) | (kv % stride >= stride - summary))
