"""Orders of the tokens of a canvas, that is, which pixel each token is: it decides how many blocks a window touches.

A canvas is (height, width), (depth, height, width), or of any number of axes. Row-major order, the last axis fastest,
is that of `x.flatten()`. An order is a permutation: `order[t]` is the row-major number of the pixel that token t is.

    order = tile_order((48, 64), (8, 16))
    q, k, v = (x[:, :, order] for x in (q, k, v))  # from row-major tokens to tiles, one tile after the other
    out = flexmasks.attention(q, k, v, mask="natten", height=48, width=64, kernel=7, order=order)
    out = out[:, :, inverse_order(order)]  # and back

In row-major order a block of 128 tokens is some rows, or part of one, and a window of 7 x 7 pixels touches the blocks
of 7 rows; in tiles of 8 x 16 it touches the neighboring tiles only: of a canvas of 128 x 256 pixels 2116 blocks, not
3584. Where a row is one block, 128 pixels, and the window lower than a tile, row-major order touches fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def tile_order(canvas: Sequence[int], tile: Sequence[int]) -> Tensor:
    """The order of tiles, row-major among them and inside each; tiles at the end of an axis may be cut.

    Raises ValueError unless both have the same number of axes, all at least 1.

    Example:
        >>> tile_order((2, 4), (2, 2))
        tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    if len(canvas) != len(tile) or min(*canvas, *tile) < 1:
        raise ValueError(
            f"flexmasks: `canvas` and `tile` must have the same axes, all at least 1, got {canvas}, {tile}."
        )
    axes = coordinates(torch.arange(math.prod(canvas)), canvas)
    number = torch.zeros_like(axes[0])
    for axis, length, size in zip(axes, canvas, tile, strict=True):
        number = number * -(-length // size) + axis // size
    return number.argsort(stable=True)


def morton_order(canvas: Sequence[int]) -> Tensor:
    """The Z-order of Morton: by the axes' bits, interleaved, those of the last axis the lowest.

    Canvases need not be powers of two: pixels that are not there are left out.

    Example:
        >>> morton_order((2, 4))
        tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    if not canvas or min(canvas) < 1 or sum((n - 1).bit_length() for n in canvas) > 62:
        raise ValueError(
            f"flexmasks: `canvas` must have axes of at least 1, and fewer than 2**62 pixels, got {canvas}."
        )
    axes = coordinates(torch.arange(math.prod(canvas)), canvas)
    code = torch.zeros_like(axes[0])
    bits = [(n - 1).bit_length() for n in canvas]
    place = 0
    for bit in range(max(bits)):
        for axis, count in zip(reversed(axes), reversed(bits), strict=True):
            if bit < count:
                code |= (axis >> bit & 1) << place
                place += 1
    return code.argsort()


def inverse_order(order: Tensor) -> Tensor:
    """The way back: `inverse_order(order)[p]` is the token that pixel p is; x[order][inverse_order(order)] is x.

    Example:
        >>> inverse_order(torch.tensor([2, 0, 1]))
        tensor([1, 2, 0])
    """
    inverse = torch.empty_like(order, dtype=torch.int64)
    inverse[order.long()] = torch.arange(len(order), device=order.device)
    return inverse


def coordinates(pixel: Tensor, canvas: Sequence[int]) -> list[Tensor]:
    """The coordinates, one for each axis, of pixels given by their row-major number."""
    found = []
    for n in reversed(canvas[1:]):
        found.append(pixel % n)
        pixel = pixel // n
    return [pixel, *reversed(found)]
