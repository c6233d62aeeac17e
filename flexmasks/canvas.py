"""Tokens of images and videos in tiles for one call, asked for by `order="auto"`.

In row-major order a block of tokens is a few rows, or part of one, and a window touches the blocks of all its rows. In
tiles it touches its neighbors only. So a call may take q, k and v into tiles and its output back into rows: its result
is that of row-major order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.cache import FACT, KINDS, PLANS, Part
from flexmasks.kernels.wide import in_wide_numbers, may_be_wide
from flexmasks.masks.natten import apart, limits
from flexmasks.masks.sasa import reach
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.plan import outside_transforms
from flexmasks.plans.sizes import block_size_for, is_capturing
from flexmasks.request import Request
from flexmasks.spec import pair
from flexmasks.spec.arguments import get_mask
from flexmasks.spec.parameters import Size, freeze
from flexmasks.spec.values import Mask

_HOST = torch.device("cpu")  # where axes are looked at, whatever the default device is
_MASKS = ("natten", "natten3d", "sasa")  # the masks whose order may be "auto"
# Keys that each query must see fewer in computed blocks, so that tiles are worth the way into them and back. On a CPU
# forward and backward passes with 256 to 1,254 keys fewer took 0.4 to 1.0 of the time, with 96 fewer up to 1.4. On an
# H200 forward passes with 652 to 16,902 keys fewer took 0.55 to 0.92, with gradients 0.54 to 1.08; a forward pass with
# 576 fewer took 1.42.
_MIN_SAVED_KEYS = {"cuda": 640, "cpu": 256}
_Found = tuple[tuple[int, ...], tuple[int, ...]] | tuple[()]
_FOUND: Part[_Found] = Part(KINDS, "tiles")
_ORDERS: Part[Tensor] = Part(PLANS, "orders_of_tiles")


class CanvasTiles(NamedTuple):
    """A row-major canvas whose tokens go into tiles, one tile after the other."""

    canvas: tuple[int, ...]
    groups: tuple[int, ...]  # by axis: every groups-th pixel stands together
    tile: tuple[int, ...]

    def put(self, x: Tensor, dim: int) -> Tensor:
        """Return a tensor with its tokens, the dimension `dim`, in tiles."""
        return _permuted(x, dim, *self._parts())

    def back(self, x: Tensor, dim: int) -> Tensor:
        """Return a tensor with its tokens in rows again."""
        return _permuted(x, dim, *_inverse(*self._parts()))

    def order(self, device: torch.device) -> Tensor:
        """Return the pixel of each token, as the functions of flexmasks.orders do.

        Calls get the same tensor again, so that their plans are found again, except while a CUDA graph is captured.
        """
        pixels = math.prod(self.canvas)
        if compat.is_compiling():
            return self.put(torch.arange(pixels, dtype=torch.int32, device=device), 0)
        made = _ORDERS.get((self, device))
        if made is None:
            with compat.without_dispatch_modes(), outside_transforms(()), torch.no_grad():
                made = self.put(torch.arange(pixels, dtype=torch.int32, device=device), 0)
            if not is_capturing(device):
                _ORDERS.put((self, device), (), made, made.nbytes)
        return made

    def __str__(self) -> str:
        apart = "" if max(self.groups) == 1 else f" of every {' x '.join(map(str, self.groups))}th pixel"
        return f"tiles of {' x '.join(map(str, self.tile))} pixels{apart}"

    def _parts(self) -> tuple[list[int], list[int]]:
        """Return the sizes of the parts of all axes, and these parts in the order of tiles.

        In rows the parts of an axis are the number of a tile, a pixel in it, and a group. In tiles the groups of all
        axes come first, then the numbers, then the pixels.
        """
        axes = zip(self.canvas, self.tile, self.groups, strict=True)
        sizes = [n for length, tile, groups in axes for n in (length // (tile * groups), tile, groups)]
        return sizes, [3 * axis + part for part in (2, 0, 1) for axis in range(len(self.canvas))]


# --- the way of tokens ---


def _inverse(sizes: Sequence[int], places: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return sizes and places by which `_permuted` takes the way back."""
    return [sizes[n] for n in places], [places.index(n) for n in range(len(places))]


def _permuted(x: Tensor, dim: int, sizes: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return a tensor with a dimension split into parts, which are put in another order."""
    if not may_be_wide(x):
        return _copied(x, dim, sizes, places)
    if x.requires_grad and torch.is_grad_enabled():
        moved: Tensor = _Move.apply(x, dim, sizes, places)
        return moved
    wide = in_wide_numbers(x) if x.ndim > dim + 1 else x
    return _copied(wide, dim, sizes, places).view(x.dtype)


def _copied(x: Tensor, dim: int, sizes: Sequence[int], places: Sequence[int]) -> Tensor:
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    parts = x.reshape(*before, *sizes, *after)
    parts = parts.permute(*range(dim), *[dim + n for n in places], *range(dim + len(sizes), parts.ndim))
    return parts.contiguous().reshape(*before, math.prod(sizes), *after)


class _Move(torch.autograd.Function):
    """`_permuted` with a gradient, which goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], places: Sequence[int]) -> Tensor:
        ctx.back = dim, *_inverse(sizes, places)
        return _permuted(x, dim, sizes, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _permuted(gradients[0], *ctx.back), None, None, None


def tiles_for(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[CanvasTiles, Request] | None:
    """Return tiles that a call takes its tokens into, and its request there.

    The result is None for other calls. Tokens stay in rows where their positions mean more than pixels: in a
    composition of masks, with a score change, and with q_offset.
    """
    given: Any = request.mask
    is_value = isinstance(given, Mask)
    name = given.name if is_value else given
    if not isinstance(name, str) or name not in _MASKS:
        return None
    own = given.params if is_value else {}
    order = request.params.get("order", own.get("order"))
    if not isinstance(order, str) or order != "auto":
        return None
    if own.keys() & request.params.keys() or (is_value and not given.definition.by_library):
        return None  # a parameter is given twice, and the call says so; or the mask is another one of this name
    # Where all lengths are that of the canvas, queries start at 0 if nothing is said.
    is_plain = request.score is None and isinstance(request.q_offset, int | None) and not request.q_offset
    if not is_plain or request.block_mask is not None:
        return None
    if not all(isinstance(x, Tensor) and not x.is_nested and x.ndim == 4 for x in (q, k, v)):
        return None
    if q.device.type not in _MIN_SAVED_KEYS:
        return None
    numbers = tuple(
        (n, compat.constants(freeze(value))) for n, value in {**own, **request.params}.items() if n != "order"
    )
    canvas = tuple(value for axis in ("depth", "height", "width") for n, value in numbers if n == axis)
    if any(type(n) is not int for n in canvas) or any(x.shape[2] != math.prod(canvas) for x in (q, k, v)):
        return None  # there are fewer queries than keys; or the canvas is wrong, and the call says so
    found = _found(name, numbers, q.device)
    if found is None:
        return None
    tiles = CanvasTiles(canvas, *found)
    mask = get_mask(name, **dict(numbers), order=tiles.order(q.device))
    return tiles, request._replace(mask=mask, params={})


def order_in_words(request: Request, tiles: CanvasTiles | None) -> str:
    """Return what order="auto" does in a call, or "" if no mask of the call has it.

    tiles: what `tiles_for` returned for the call.
    """
    if tiles is not None:
        return f"auto: the call takes its tokens into {tiles}, and its output back into rows"
    masks = request.mask if isinstance(request.mask, list | tuple) else [request.mask]
    orders = [m.params.get("order") for mask in masks if isinstance(mask, Mask) for m in mask.inside()]
    if any(isinstance(mask, str) and mask in _MASKS for mask in masks):
        orders.append(request.params.get("order"))
    if not any(isinstance(order, str) for order in orders):
        return ""
    return (
        "auto: tokens stay in rows; tiles are for a call with this mask alone, without a score and q_offset, with as "
        "many queries as keys, where they save enough blocks"
    )


# --- which tiles ---


@compat.constant_in_graphs
def _found(
    name: str, numbers: tuple[tuple[str, Any], ...], device: torch.device
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return groups and tile for a mask, or None if its tokens stay in rows.

    numbers: the mask's parameters without its order.
    """
    key = name, numbers, device
    try:
        known = _FOUND.get(key)
    except TypeError:  # a parameter cannot be hashed, and the call says so
        return None
    if known is None:
        try:
            with compat.without_dispatch_modes(), outside_transforms(()), torch.no_grad():
                known = _find(name, dict(numbers), device)
        except (TypeError, ValueError):  # a parameter is wrong, and the call says so
            return None
        _FOUND.put(key, (), known, FACT)
    return known or None


def _find(name: str, numbers: dict[str, Any], device: torch.device) -> _Found:
    """Return what `_found` returns, or ()."""
    rows = get_mask(name, **numbers)
    axes = _axes(rows)
    canvas = tuple(axis.length for axis in axes)
    tokens = math.prod(canvas)
    size = Size(1, 1, tokens, tokens, device)
    block_size = block_size_for(size)
    groups = tuple(axis.groups for axis in axes)
    tiles = [
        tile
        for tile in itertools.product(*[_divisors(axis.length // axis.groups, block_size[1]) for axis in axes])
        if block_size[1] % math.prod(tile) == 0
    ]
    # Where a block has several tiles, they stand side by side along the last axis.
    costs = {
        tile: math.prod(
            axis.touched(n) for axis, n in zip(axes, (*tile[:-1], block_size[1] // math.prod(tile[:-1])), strict=True)
        )
        for tile in tiles
    }
    best = CanvasTiles(canvas, groups, min(tiles, key=lambda tile: (costs[tile], -math.prod(tile), -tile[-1])))
    in_tiles = get_mask(name, **numbers, order=best.order(device))
    seen = [tokens * (1 - MaskPlan(mask, size, block_size=block_size).blocks().sparsity) for mask in (rows, in_tiles)]
    return (best.groups, best.tile) if seen[0] - seen[1] >= _MIN_SAVED_KEYS[device.type] else ()


class _Axis(NamedTuple):
    """An axis of a canvas, and what its pixels see along it."""

    length: int
    groups: int
    first: Tensor  # int[groups, pixels of a group]: the first visible pixel of the group
    last: Tensor

    def touched(self, size: int) -> int:
        """Return how many pairs of tiles of this size have visible pixels."""
        lows = torch.stack([part.amin(1) for part in self.first.split(size, 1)])
        highs = torch.stack([part.amax(1) for part in self.last.split(size, 1)])
        return int((highs // size - lows // size + 1).sum())


def _axes(mask: Mask) -> list[_Axis]:
    if mask.name == "sasa":
        given = mask.params
        each = zip((given["height"], given["width"]), pair(given["window"]), strict=True)
        return [_axis(n, 1, *reach(torch.arange(n, device=_HOST), n, window)) for n, window in each]
    axes = mask.resolve(None)["axes"]
    pixels = [apart(torch.arange(axis[0], device=_HOST), axis[2]) for axis in axes]
    return [_axis(axis[0], axis[2], *limits(*i, *axis)) for i, axis in zip(pixels, axes, strict=True)]


def _axis(length: int, dilation: int, first: Tensor, last: Tensor) -> _Axis:
    """Return an axis, given the first and the last visible pixel of each pixel.

    They are numbers in the pixel's group. The groups are those of the dilation, or one group if they are not equally
    long.
    """
    first = first.clamp(min=0)
    if length % dilation == 0:
        return _Axis(length, dilation, *(x.view(-1, dilation).T for x in (first, last)))
    group = torch.arange(length, device=_HOST) % dilation
    return _Axis(length, 1, *((x * dilation + group)[None] for x in (first, last)))


def _divisors(length: int, most: int) -> list[int]:
    return [n for n in range(1, min(length, most) + 1) if length % n == 0 and most % n == 0]
