import math
from typing import Annotated, Any

from torch import Tensor

from flexmasks.masks.natten import sees
from flexmasks.orders import coordinates
from flexmasks.spec import Size, register_mask

Axes = Annotated[tuple[int, int] | tuple[int, int, int], "int(2) in 1.. | int(3) in 1.."]


def _prepare(
    size: Size | None, *, canvas: Axes, tile: Axes, window: Axes, text: Annotated[int, "int in 0.."] = 0
) -> dict[str, Any]:
    if not len(canvas) == len(tile) == len(window):
        raise ValueError(
            f"`canvas`, `tile` and `window` must have the same number of axes, got {canvas}, {tile} and {window}."
        )
    tiles = tuple(n // t for n, t in zip(canvas, tile, strict=True))
    if any(n % t for n, t in zip(canvas, tile, strict=True)) or any(w > n for w, n in zip(window, tiles, strict=True)):
        raise ValueError(
            f"`tile` must divide the canvas and `window` fit in its tiles {tiles}, got {tile} and {window}."
        )
    pixels = math.prod(canvas)
    if size is not None and not (size.fits("KV", pixels + text) and size.fits("S", pixels + text)):
        raise ValueError(
            f"the canvas and the text have {pixels} + {text} = {pixels + text} tokens, "
            f"the call has {size.kv_len} keys and positions up to {size.positions}."
        )
    return {"tiles": tiles, "window": window, "tile": math.prod(tile), "pixels": pixels}


def _example(length: int) -> dict[str, Any]:
    return {"canvas": (16, length // 16), "tile": (4, length // 128), "window": (3, 3)}


@register_mask(prepare=_prepare, example=_example)
def sliding_tile(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    tiles: tuple[int, ...],
    window: tuple[int, ...],
    tile: int,
    pixels: int,
) -> Tensor:
    """Each tile of an image or a video sees a window of tiles.

    canvas: (height, width) or (depth, height, width). The tokens are in tiles, one tile after the other, as
        flexmasks.orders.tile_order(canvas, tile) puts them.
    tile: the sides of a tile, which divide the canvas. A tile with as many tokens as a block leaves no partial block.
    window: the sides of the window in tiles, which shifts inward at an edge; an even side has one more tile before the
        query's tile than after it.
    text: number of tokens of text after the canvas; they see everything and are seen by everything.

    Source: Zhang et al., Fast Video Generation with Sliding Tile Attention, 2025.
    Peers: attention-gym generate_sta_mask_mod_2d and _3d (their kernel counts pixels, window * tile); FastVideo
        sliding_tile_attention (odd windows).
    """
    i, j = coordinates(q // tile, tiles), coordinates(kv // tile, tiles)
    seen = (q >= pixels) | (kv >= pixels)
    near = q >= 0
    for n, (length, side) in enumerate(zip(tiles, window, strict=True)):
        near = near & sees((i[n], None), (j[n], None), length, side, 1, 1, False)
    return seen | near
