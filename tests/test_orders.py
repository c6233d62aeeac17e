"""Orders of tokens, and masks of tokens in these orders."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import flexmasks
from flexmasks.orders import inverse_order, morton_order, tile_order

CANVASES = [(1,), (7,), (4, 4), (5, 9), (8, 3), (1, 6), (2, 3, 4), (4, 4, 4), (3, 5, 2, 4)]


def morton_code(pixel: tuple[int, ...], canvas: tuple[int, ...]) -> int:
    """Return the code bit by bit from the lowest, last axis first; an axis has no more bits than its length needs."""
    code = place = 0
    for bit in range(max(canvas).bit_length()):
        for x, n in reversed(list(zip(pixel, canvas, strict=True))):
            if (n - 1) >> bit:
                code |= ((x >> bit) & 1) << place
                place += 1
    return code


@pytest.mark.parametrize("canvas", CANVASES)
def test_orders(canvas: tuple[int, ...]) -> None:
    pixels = list(itertools.product(*map(range, canvas)))
    numbers = range(len(pixels))
    assert morton_order(canvas).tolist() == sorted(numbers, key=lambda n: morton_code(pixels[n], canvas))
    for tile in ((1,) * len(canvas), (2,) * len(canvas), (3, 2, 2, 1)[: len(canvas)], canvas):
        key = {n: tuple(x // t for x, t in zip(pixels[n], tile, strict=True)) for n in numbers}
        assert tile_order(canvas, tile).tolist() == sorted(numbers, key=lambda n, key=key: (key[n], n))
    assert torch.equal(tile_order(canvas, (1,) * len(canvas)), torch.arange(len(pixels)))
    for order in (morton_order(canvas), tile_order(canvas, (2,) * len(canvas))):
        x = torch.randn(len(pixels), 3)
        assert torch.equal(x[order][inverse_order(order)], x)
        assert torch.equal(inverse_order(inverse_order(order)), order)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "canvas", "params"),
    [
        ("natten", {"height": 10, "width": 12}, {"kernel": (3, 5), "stride": (1, 2)}),
        ("sasa", {"height": 10, "width": 12}, {"window": 2}),
        ("natten3d", {"depth": 4, "height": 5, "width": 6}, {"kernel": 3, "causal": (True, False, False)}),
    ],
)
def test_attention_in_an_order(name: str, canvas: dict[str, int], params: dict[str, object]) -> None:
    tokens = math.prod(canvas.values())
    q, k, v = torch.randn(3, 1, 2, tokens, 8, dtype=torch.float64)
    want = flexmasks.attention(q, k, v, mask=name, **canvas, **params)
    for order in (morton_order(tuple(canvas.values())), tile_order(tuple(canvas.values()), (2, 3, 2)[: len(canvas)])):
        out = flexmasks.attention(
            q[:, :, order], k[:, :, order], v[:, :, order], mask=name, order=order, **canvas, **params
        )
        assert torch.allclose(out[:, :, inverse_order(order)], want, atol=1e-12)


def test_tiles_touch_fewer_blocks() -> None:
    canvas = {"height": 64, "width": 256}
    rows = flexmasks.get_mask("natten", kernel=7, **canvas).blocks(64 * 256)
    for order in (tile_order((64, 256), (8, 16)), morton_order((64, 256))):
        tiles = flexmasks.get_mask("natten", kernel=7, order=order, **canvas).blocks(64 * 256)
        assert tiles.partial + tiles.full < 0.8 * (rows.partial + rows.full)
        assert tiles.undecided == tiles.partial


def test_bad_orders() -> None:
    for call in (
        lambda: tile_order((4, 4), (2,)),
        lambda: tile_order((4, 0), (2, 2)),
        lambda: morton_order(()),
        lambda: morton_order((3, -1)),
    ):
        with pytest.raises(ValueError, match="flexmasks: `canvas`"):
            call()
    with pytest.raises(ValueError, match="each pixel once"):
        flexmasks.block_mask("natten", 16, height=4, width=4, kernel=3, order=torch.zeros(16, dtype=torch.long))
