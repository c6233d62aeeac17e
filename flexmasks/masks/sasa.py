from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.masks.natten import Order, Pixels, Words, are_words_faster, pixels_of, place, seen_by_words, words_of
from flexmasks.spec import Size, check_canvas, pair, register_mask

Sides = tuple[int, int]  # of rows and columns


def _prepare(
    size: Size | None,
    *,
    height: Annotated[int, "int in 1.."],
    width: Annotated[int, "int in 1.."],
    window: Annotated[int | tuple[int, int], "int in 0.. | int(2) in 0.."],
    order: Order = None,
) -> dict[str, Any]:
    canvas = height, width
    check_canvas(size, {"height": height, "width": width})
    pixels = pixels_of(size, order, canvas)
    prepared = {"canvas": canvas, "window": pair(window), "pixels": pixels}
    if size is None or not are_words_faster(size, canvas, pixels):
        return prepared | {"words": None}
    fields = []
    tokens = torch.arange(height * width, dtype=torch.int32, device=size.device)
    for i, length, distance in zip(place(tokens, canvas, pixels), canvas, pair(window), strict=True):
        fields.append((length - 1, i, *reach(i, length, distance)))
    return prepared | {"words": words_of(size, fields)}


def reach(i: Tensor, length: int, distance: int) -> tuple[Tensor, Tensor]:
    """The first and the last pixel that i sees on one axis."""
    far = min(distance, length)
    return torch.where(i < far, 0, i - far), torch.where(i + far < length, i + far, length - 1)


def _in_kernels(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, canvas: Sides, window: Sides, pixels: Pixels, words: Words | None
) -> Tensor:
    if words is None:
        return sasa(b, h, q, kv, canvas=canvas, window=window, pixels=pixels, words=None)
    return seen_by_words(q, kv, words)


@register_mask(
    prepare=_prepare, compiled=_in_kernels, example=lambda length: {"height": 16, "width": length // 16, "window": 4}
)
def sasa(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, canvas: Sides, window: Sides, pixels: Pixels, words: Words | None
) -> Tensor:
    """A window of rows and columns around each pixel, cut at the edges.

    height, width: the canvas; token t is in row t // width and column t % width, and there are height * width keys.
    window: the greatest distance, one for both axes or (rows, columns); away from the edges 2 * window + 1 pixels per
        axis are visible.
    order: the pixel of each token if tokens are not in row-major order, as flexmasks.orders gives it; see the mask
        `natten`.

    Source: Ramachandran et al., Stand-Alone Self-Attention in Vision Models, 2019.
    Peers: xformers local_2d_pattern(distance=window + 1, p=inf); `natten` shifts the window at the edges instead.
    """
    row, column = place(q, canvas, pixels)
    other_row, other_column = place(kv, canvas, pixels)
    rows, columns = row - other_row, column - other_column
    near = (rows <= window[0]) & (-window[0] <= rows)
    return near & (columns <= window[1]) & (-window[1] <= columns)
