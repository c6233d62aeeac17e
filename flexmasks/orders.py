"""Orders of the tokens of a canvas: which pixel each token is.

A canvas is (height, width), (depth, height, width), or has any number of axes. Row-major order, in which the last axis
is the fastest, is the order of `x.flatten()`. An order is a permutation: `order[t]` is the row-major number of the
pixel that token t is.

    order = tile_order((48, 64), (8, 16))  # one tile after the other
    out = in_tiles(flexmasks.attention, q, k, v, order=order, mask="natten", height=48, width=64, kernel=7)

`in_tiles` takes row-major q, k and v into the order and the output back. A model that keeps its tokens in tiles does so
once, by `x[:, order]` and `x[:, inverse_order(order)]`, and passes `order=order` to each call.

The order decides how many blocks a window touches. In row-major order a block of 128 tokens is some rows, or part of a
row, and a window of 7 x 7 pixels touches the blocks of 7 rows. In tiles of 8 x 16 pixels it touches only neighboring
tiles: on a canvas of 128 x 256 pixels 2116 blocks instead of 3584. If one row is one block, 128 pixels, and the window
is lower than a tile, row-major order touches fewer blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmasks.kernels.wide import in_wide_numbers, may_be_wide
from flexmasks.spec.by_name import says_what_to_write as _says_what_to_write
from flexmasks.spec.parameters import freeze as _freeze


@_says_what_to_write()
def tile_order(canvas: Sequence[int], tile: Sequence[int]) -> Tensor:
    """Return the order of tiles, row-major among tiles and inside each tile.

    Tiles at the end of an axis may be cut. Raises ValueError unless canvas and tile have the same number of axes, all
    at least 1.

    Example:
        >>> tile_order((2, 4), (2, 2))
        tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    canvas, tile = _axes(canvas=canvas, tile=tile)
    if len(canvas) != len(tile) or min(*canvas, *tile) < 1:
        raise ValueError(
            f"flexmasks: `canvas` and `tile` must have the same number of axes, all at least 1, got {canvas}, {tile}."
        )
    axes = coordinates(torch.arange(math.prod(canvas)), canvas)
    number = torch.zeros_like(axes[0])
    for axis, length, size in zip(axes, canvas, tile, strict=True):
        number = number * -(-length // size) + axis // size
    return number.argsort(stable=True)


@_says_what_to_write()
def morton_order(canvas: Sequence[int]) -> Tensor:
    """Return Morton's Z-order: pixels sorted by the interleaved bits of their coordinates.

    The bits of the last axis are the lowest. A side of the canvas need not be a power of two: the order then
    skips the pixels that do not exist.

    Example:
        >>> morton_order((2, 4))
        tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    (canvas,) = _axes(canvas=canvas)
    bits = [(n - 1).bit_length() for n in canvas]
    if not canvas or min(canvas) < 1 or sum(bits) > 62:
        raise ValueError(
            f"flexmasks: `canvas` must have axes of at least 1, and fewer than 2**62 pixels, got {canvas}."
        )
    axes = coordinates(torch.arange(math.prod(canvas)), canvas)
    code = torch.zeros_like(axes[0])
    place = 0
    for bit in range(max(bits)):
        for axis, count in zip(reversed(axes), reversed(bits), strict=True):
            if bit < count:
                code |= (axis >> bit & 1) << place
                place += 1
    return code.argsort()


@_says_what_to_write()
def inverse_order(order: Tensor) -> Tensor:
    """Return the inverse of an order: the token that each pixel is.

    `x[order][inverse_order(order)]` is `x`.

    Example:
        >>> inverse_order(torch.tensor([2, 0, 1]))
        tensor([1, 2, 0])
    """
    if not isinstance(order, Tensor) or order.ndim != 1:
        raise TypeError(f"flexmasks: `order` must be a tensor of one dimension, got {order!r}.")
    # Not in place: selective activation checkpointing keeps results of operations, which may not change then.
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(places).scatter(0, order.long(), places)


@_says_what_to_write()
def in_tiles(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, order: Tensor, **arguments: Any) -> Any:
    """Call `attend` with the tokens of q, k and v in an order, and return its results with tokens as they were.

    `order` goes to `attend`, too: masks that have this parameter see the same pairs of pixels in any order. Results are
    those of the call without an order, within rounding, and gradients as well.

    Args:
        attend: `flexmasks.attention`, or a function of yours with its arguments. For a composition, or a plan, of masks
            with the order pass `lambda q, k, v, order: flexmasks.attention(q, k, v, mask=plan)`.
        q, k, v: [B, H, S, D] with a token for each pixel, in row-major order.
        order: int[S], on the device of q, such as `tile_order` gives it. Keep it: with the same tensor a later call
            finds its plan.
        arguments: the other arguments of `attend`.

    Returns:
        What `attend` returns, a tensor or a tuple of tensors [B, H, S, ...].

    Raises:
        TypeError: `order` is no tensor of one dimension.
        ValueError: q, k and v do not have as many tokens as the order, or are on another device.

    Example:
        >>> import flexmasks
        >>> image = {"mask": "natten", "height": 32, "width": 32, "kernel": 7}
        >>> q, k, v = torch.randn(3, 1, 2, 32 * 32, 16)
        >>> order = tile_order((32, 32), (8, 16))
        >>> out = in_tiles(flexmasks.attention, q, k, v, order=order, **image)
        >>> torch.allclose(out, flexmasks.attention(q, k, v, **image), atol=1e-5)
        True
    """
    back = inverse_order(order)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[2] != len(order) or x.device != order.device:
            raise ValueError(
                f"flexmasks.orders.in_tiles: `{name}` must be [B, H, {len(order)}, D] on {order.device}, as `order` is "
                f"int[{len(order)}] there, got {tuple(x.shape)} on {x.device}."
            )
    into = order.long()
    results = attend(*(_Moved.apply(x, into, back) for x in (q, k, v)), order=order, **arguments)
    if isinstance(results, Tensor):
        return _Moved.apply(results, back, into)
    return tuple(_Moved.apply(x, back, into) for x in results)


class _Moved(torch.autograd.Function):
    """x[:, :, order]. Its gradient is moved back; that of torch's index_select would be added up by atomics."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        if x.ndim == 4 and may_be_wide(x):
            return in_wide_numbers(x).index_select(2, order).view(x.dtype)
        return x.index_select(2, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _Moved.apply(gradients[0], inverse, order), None, None


def _axes(**given: Any) -> list[tuple[int, ...]]:
    found = [_freeze(axes) for axes in given.values()]
    for (name, value), axes in zip(given.items(), found, strict=True):
        if not isinstance(axes, tuple) or not all(type(n) is int for n in axes):
            raise TypeError(f"flexmasks: `{name}` must be a tuple of ints, such as (48, 64), got {value!r}.")
    return found


def coordinates(pixel: Tensor, canvas: Sequence[int]) -> list[Tensor]:
    """Return the coordinates of pixels, one for each axis, from row-major numbers.

    Example:
        >>> import torch
        >>> from flexmasks import orders
        >>> [x.tolist() for x in orders.coordinates(torch.tensor([0, 5, 11]), (3, 4))]
        [[0, 1, 2], [0, 1, 3]]
    """
    inner = []
    for n in reversed(canvas[1:]):
        inner.append(pixel % n)
        pixel = pixel // n
    return [pixel, *reversed(inner)]
