from typing import Annotated

import torch
from torch import Tensor

from flexmasks.spec import always, at, register_mask

Intervals = Annotated[Tensor, "int[N, 2] | int[B, N, 2]"]
Images = Annotated[Tensor, "int[KV] in -1..N-1 | int[B, KV] in -1..N-1"]


def _example(length: int) -> dict[str, object]:
    starts = [length * i // 4 for i in range(4)]
    return {
        "intervals": [[start, start + length // 2] for start in starts],
        "image_ids": [i * 4 // length for i in range(length)],
    }


@register_mask(example=_example)
def vision_cross(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, intervals: Intervals, image_ids: Images) -> Tensor:
    """Text sees the images whose interval it is in: image i if start_i <= q < end_i.

    intervals: (start, end) of each of the N images in text positions, for all batch elements or for each.
    image_ids: the image of each key, for all batch elements or for each; -1 for a padding key, which no query sees.

    Source: Alayrac et al., Flamingo, 2022 (there an image's interval ends where the next image's begins).
    Peers: attention-gym generate_vision_cross_attention_mask_mod(intervals, tokens per image);
        torchtune VisionCrossAttentionMask.
    """
    image = at(image_ids, b, kv)
    known = torch.where(image < 0, 0, image).int()
    where = (b, known) if intervals.ndim == 3 else (known,)
    start, end = (intervals[*where, always(n, kv)] for n in range(2))
    return (image >= 0) & (start <= q) & (q < end)
