"""Orders of tokens, masks of tokens in these orders, and calls with tokens in tiles."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from functions import short_and_campaign
from helpers import TOLERANCE, error, try_examples
from hypothesis import strategies as st
from oracles import Case, attend, dense
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor

import flexmasks
from flexmasks.kernels import wide
from flexmasks.orders import in_tiles, inverse_order, morton_order, tile_order

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


# --- calls in tiles ---

IMAGE: dict[str, Any] = {"mask": "natten", "height": 12, "width": 16, "kernel": 5}


def leaves(tokens: int, heads: int = 2, kv_heads: int = 2, size: int = 8, v_size: int = 8) -> list[Tensor]:
    shapes = ((2, heads, tokens, size), (2, kv_heads, tokens, size), (2, kv_heads, tokens, v_size))
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def check(name: str, params: dict[str, Any], order: Tensor, tensors: list[Tensor], **options: Any) -> None:
    """Compare output, lse and gradients with the naive formula, by tokens in rows."""
    tokens, heads = tensors[0].shape[2], tensors[0].shape[1]
    seen = dense(Case(name, params, 1, 1, tokens, tokens)).expand(2, heads, -1, -1)  # slow, and the same for all heads
    arguments = {"mask": name, "return_lse": True, **params, **options}
    out, lse = in_tiles(flexmasks.attention, *tensors, order=order, **arguments)
    want = attend(*tensors, seen, scale=options.get("scale"))
    weights = [torch.randn_like(x) for x in want]
    for x, y in zip((out, lse), want, strict=True):
        assert x.shape == y.shape
        assert error(x, y) < 1e-12
    got, wanted = (
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(results, weights, strict=True)), tensors)
        for results in ((out, lse), want)
    )
    assert all(error(x, y) < 1e-12 for x, y in zip(got, wanted, strict=True))


@st.composite
def canvases(draw: st.DrawFn) -> tuple[str, dict[str, Any], tuple[int, ...]]:
    axes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=2, max_size=3))
    tile = tuple(draw(st.integers(1, n + 1)) for n in axes)
    params: dict[str, Any] = dict(zip(("depth", "height", "width")[-len(axes) :], axes, strict=True))
    if len(axes) == 2 and draw(st.booleans()):
        return "sasa", params | {"window": tuple(draw(st.integers(0, 9)) for _ in axes)}, tile
    dilation = tuple(draw(st.integers(1, n)) for n in axes)
    kernel = tuple(draw(st.integers(1, n // d)) for n, d in zip(axes, dilation, strict=True))
    stride = tuple(draw(st.integers(1, k)) for k in kernel)
    params |= {
        "dilation": dilation,
        "kernel": kernel,
        "stride": stride,
        "causal": tuple(draw(st.booleans()) for _ in axes),
    }
    return "natten" if len(axes) == 2 else "natten3d", params, tile


@pytest.mark.slow
@short_and_campaign(8, 300)
def test_random_neighborhoods_in_tiles(examples: int) -> None:
    def one(drawn: tuple[str, dict[str, Any], tuple[int, ...]]) -> None:
        name, params, tile = drawn
        canvas = tuple(params[axis] for axis in ("depth", "height", "width") if axis in params)
        check(name, params, tile_order(canvas, tile), leaves(math.prod(canvas)))

    try_examples(examples, one, canvases())


def test_grouped_heads_and_another_size_of_v_in_tiles() -> None:
    order = tile_order((6, 8), (3, 4)).int()
    check("natten", {"height": 6, "width": 8, "kernel": 3}, order, leaves(48, 4, 2, v_size=4), scale=0.3)


@pytest.mark.slow
def test_a_composition_in_tiles() -> None:
    q, k, v = torch.randn(3, 1, 2, 192, 8)
    order = tile_order((12, 16), (4, 8))
    mask = flexmasks.get_mask(IMAGE["mask"], order=order, height=12, width=16, kernel=5) & flexmasks.get_mask(
        "sasa", order=order, height=12, width=16, window=1
    )
    plan = flexmasks.plan(mask, 192, heads=2)
    out = in_tiles(lambda q, k, v, order: flexmasks.attention(q, k, v, mask=plan), q, k, v, order=order)
    seen = flexmasks.dense_mask("natten", 192, height=12, width=16, kernel=5) & flexmasks.dense_mask(
        "sasa", 192, height=12, width=16, window=1
    )
    assert error(out, attend(q, k, v, seen)[0]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["plain", "transposed", "expanded", "unaligned", "narrow"])
@pytest.mark.parametrize("copies", ["wide", "single"])
def test_tokens_go_into_tiles_and_back(
    copies: str, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every memory layout, with first and second derivatives, and of many gradients at once."""
    monkeypatch.setattr(wide, "on_gpu", lambda device: copies == "wide")
    order = tile_order((4, 6), (2, 2))  # not its own inverse
    size = 3 if layout == "narrow" else 16
    x = torch.randn(2 * 24 * 3 * size + 1).to(dtype)
    x = x[1:] if layout == "unaligned" else x[:-1]
    x = x.view(2, 24, 3, size).mT.mT.transpose(1, 2) if layout == "transposed" else x.view(2, 3, 24, size)
    x[..., 0, 0] = 7.0
    x = x[:1].expand(2, 3, 24, size) if layout == "expanded" else x
    seen = []

    def attend_nothing(q: Tensor, k: Tensor, v: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(q.detach())
        return q * k, v[..., 0]

    y = x.detach().requires_grad_()
    ones = torch.ones_like(y)
    out, lse = in_tiles(attend_nothing, y, ones, y, order=order)
    assert seen[0].equal(x[:, :, order])
    assert out.equal(x)
    assert lse.equal(x[..., 0])
    weight = torch.randn_like(x)
    tokens = torch.arange(24).to(dtype)[:, None]
    (grad,) = torch.autograd.grad(
        (in_tiles(lambda q, k, v, order: q * q * tokens, y, y, y, order=order) * weight).sum(), y, create_graph=True
    )
    of_token = tokens[inverse_order(order)]
    torch.testing.assert_close(grad, 2 * y * weight * of_token)
    (second,) = torch.autograd.grad(grad.sum(), y)
    torch.testing.assert_close(second, 2 * weight * of_token)
    many = torch.stack([weight, 2 * weight])
    moved = in_tiles(lambda q, k, v, order: q * tokens, y, y, y, order=order)
    (grads,) = torch.autograd.grad(moved, y, many, is_grads_batched=True)
    assert grads.equal(many * of_token)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
def test_tiles_in_transforms() -> None:
    q, k, v = torch.randn(3, 1, 2, 192, 8)
    order = tile_order((12, 16), (4, 8))

    def loss(q: Tensor) -> Tensor:
        return in_tiles(flexmasks.attention, q, k, v, order=order, **IMAGE).square().sum()

    rows = q.clone().requires_grad_()
    want = torch.autograd.grad(flexmasks.attention(rows, k, v, **IMAGE).square().sum(), rows)[0]
    assert error(torch.func.grad(loss)(q), want) < 1e-5
    assert error(torch.func.vmap(torch.func.grad(loss))(q[None])[0], want) < 1e-5


@pytest.mark.slow
def test_tiles_inside_torch_compile() -> None:
    """A whole graph, with the gradients of eager calls in rows."""
    tensors = [torch.randn(1, 2, 192, 8, requires_grad=True) for _ in range(3)]
    order = tile_order((12, 16), (4, 8))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return in_tiles(flexmasks.attention, q, k, v, order=order, **IMAGE)

    got = call(*tensors)
    want = flexmasks.attention(*tensors, **IMAGE)
    assert error(got, want) < 1e-5
    weight = torch.randn_like(got)
    for x, y in zip(*(torch.autograd.grad((o * weight).sum(), tensors) for o in (got, want)), strict=True):
        assert error(x, y) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dilation", [1, 4])
def test_tiles_on_a_gpu(dilation: int, dtype: torch.dtype) -> None:
    """Rows and tiles give the same, in CUDA graphs too."""
    params = {"mask": "natten", "height": 96, "width": 128, "kernel": 23, "dilation": dilation}
    order = tile_order((96, 128), (8, 16)).cuda()
    tensors = [torch.randn(2, 2, 96 * 128, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    rows = flexmasks.attention(*tensors, **params)
    tiled = in_tiles(flexmasks.attention, *tensors, order=order, **params)
    assert error(tiled, rows.cpu()) < TOLERANCE[dtype]
    weight = torch.randn_like(rows)
    grads = [torch.autograd.grad((out * weight).sum(), tensors) for out in (tiled, rows)]
    assert all(error(x, y.cpu()) < 2 * TOLERANCE[dtype] for x, y in zip(*grads, strict=True))
    frozen = [x.detach() for x in tensors]
    with torch.no_grad():
        in_tiles(flexmasks.attention, *frozen, order=order, **params)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = in_tiles(flexmasks.attention, *frozen, order=order, **params)
        frozen[0].copy_(torch.randn_like(frozen[0]))
        graph.replay()
        assert error(out, flexmasks.attention(*frozen, **params).cpu()) < TOLERANCE[dtype]
