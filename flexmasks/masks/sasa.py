from typing import Annotated, Any

from torch import Tensor

from flexmasks.masks.natten import check_canvas, pixels_of, place
from flexmasks.spec import Size, pair, register_mask


def _prepare(
    size: Size | None,
    *,
    height: Annotated[int, "int in 1.."],
    width: Annotated[int, "int in 1.."],
    window: Annotated[int | tuple[int, int], "int in 0.. | int(2) in 0.."],
    order: Annotated[Tensor | None, "int[KV] in 0..KV-1"] = None,
) -> dict[str, Any]:
    check_canvas(size, {"height": height, "width": width})
    return {"canvas": (height, width), "window": pair(window), "pixels": pixels_of(size, order, (height, width))}


@register_mask(prepare=_prepare, example=lambda length: {"height": 16, "width": length // 16, "window": 4})
def sasa(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    canvas: tuple[int, int],
    window: tuple[int, int],
    pixels: Tensor | None,
) -> Tensor:
    """A window of rows and columns around each pixel, cut at the edges.

    height, width: the canvas; token t is in row t // width and column t % width, and there are height * width keys.
    window: the greatest distance, one for both axes or (rows, columns); away from the edges 2 * window + 1 pixels per
        axis are visible.
    order: the pixel of each token if tokens are not in row-major order, as flexmasks.orders gives it.

    Source: Ramachandran et al., Stand-Alone Self-Attention in Vision Models, 2019.
    Peers: xformers local_2d_pattern(distance=window + 1, p=inf); `natten` shifts the window at the edges instead.
    """
    row, column = place(q, canvas, pixels)
    other_row, other_column = place(kv, canvas, pixels)
    rows, columns = row - other_row, column - other_column
    near = (rows <= window[0]) & (-window[0] <= rows)
    return near & (columns <= window[1]) & (-window[1] <= columns)
