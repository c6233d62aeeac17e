from typing import Annotated, Any

from torch import Tensor

from flexmasks.params import Size, check_canvas, pair
from flexmasks.registry import register_mask


def _prepare(
    size: Size | None,
    *,
    height: Annotated[int, "int in 1.."],
    width: Annotated[int, "int in 1.."],
    window: Annotated[int | tuple[int, int], "int in 0.. | int(2) in 0.."],
) -> dict[str, Any]:
    check_canvas(size, height, width)
    return {"width": width, "window": pair(window)}


@register_mask(prepare=_prepare, example=lambda length: {"height": 16, "width": length // 16, "window": 4})
def sasa(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, width: int, window: tuple[int, int]) -> Tensor:
    """Each pixel sees those at most `window` rows and `window` columns away: a 2-D window, cut at the edges.

    height, width: the canvas; token t is row t // width, column t % width, and the keys are height * width.
    window: the distance, one for both axes or (rows, columns); inside, 2 * window + 1 pixels per axis are visible.

    Source: Ramachandran et al., Stand-Alone Self-Attention in Vision Models, 2019.
    """
    rows, columns = q // width - kv // width, q % width - kv % width
    near = (rows <= window[0]) & (-window[0] <= rows)
    return near & (columns <= window[1]) & (-window[1] <= columns)
