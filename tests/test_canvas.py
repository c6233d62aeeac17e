"""Tokens in tiles for one call: `order="auto"` gives the results of row-major order."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from functions import short_and_campaign
from helpers import TOLERANCE, error, try_examples
from hypothesis import given
from hypothesis import strategies as st
from oracles import Case, attend, dense
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch._dynamo.utils import counters

import flexmasks
from flexmasks import canvas, orders
from flexmasks.kernels import wide
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.request import Request
from flexmasks.spec import Size

CPU = torch.device("cpu")
LARGE = {"height": 64, "width": 64, "kernel": 15}  # wins in tiles
SMALL = {"height": 16, "width": 16, "kernel": 5}  # is quick, but goes into tiles only `always_in_tiles`


@pytest.fixture
def always_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all tokens into tiles, however little it saves."""
    monkeypatch.setattr(canvas, "_MIN_SAVED_KEYS", {"cpu": -math.inf})
    flexmasks.clear_caches()


def leaves(tokens: int, heads: int = 2, kv_heads: int = 2, size: int = 8, v_size: int = 8) -> list[Tensor]:
    shapes = ((2, heads, tokens, size), (2, kv_heads, tokens, size), (2, kv_heads, tokens, v_size))
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def check(name: str, params: dict[str, Any], tensors: list[Tensor], **options: Any) -> None:
    """Compare output, lse and gradients with the naive formula, by tokens in rows."""
    tokens, heads = tensors[0].shape[2], tensors[0].shape[1]
    seen = dense(Case(name, params, 1, 1, tokens, tokens)).expand(2, heads, -1, -1)  # slow, and the same for all heads
    out, lse = flexmasks.attention(*tensors, mask=name, order="auto", return_lse=True, **params, **options)
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
def canvases(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    axes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=2, max_size=3))
    params: dict[str, Any] = dict(zip(("depth", "height", "width")[-len(axes) :], axes, strict=True))
    if len(axes) == 2 and draw(st.booleans()):
        return "sasa", params | {"window": tuple(draw(st.integers(0, 9)) for _ in axes)}
    dilation = tuple(draw(st.integers(1, n)) for n in axes)
    kernel = tuple(draw(st.integers(1, n // d)) for n, d in zip(axes, dilation, strict=True))
    stride = tuple(draw(st.integers(1, k)) for k in kernel)
    params |= {"dilation": dilation, "kernel": kernel, "stride": stride}
    return "natten" if len(axes) == 2 else "natten3d", params | {"causal": tuple(draw(st.booleans()) for _ in axes)}


@pytest.mark.slow
@short_and_campaign(8, 300)
@pytest.mark.usefixtures("always_in_tiles")
def test_random_neighborhoods_in_tiles(examples: int) -> None:
    def one(drawn: tuple[str, dict[str, Any]]) -> None:
        name, params = drawn
        check(name, params, leaves(math.prod(params.get(axis, 1) for axis in ("depth", "height", "width"))))

    try_examples(examples, one, canvases())


@pytest.mark.usefixtures("always_in_tiles")
def test_grouped_heads_and_another_size_of_v() -> None:
    check("natten", {"height": 6, "width": 8, "kernel": 3}, leaves(48, heads=4, kv_heads=2, v_size=4), scale=0.3)


def test_tokens_go_into_tiles_and_back() -> None:
    tiles = canvas.CanvasTiles((4, 6), (1, 1), (2, 3))
    assert tiles.order(CPU).equal(orders.tile_order((4, 6), (2, 3)).int())
    of_groups = canvas.CanvasTiles((4, 6, 4), (2, 1, 2), (1, 3, 2))
    x = torch.arange(2 * 96).view(2, 96)
    assert of_groups.put(x, 1).equal(x[:, of_groups.order(CPU).long()])
    assert of_groups.back(of_groups.put(x, 1), 1).equal(x)
    depth, _, width = orders.coordinates(of_groups.order(CPU), (4, 6, 4))
    groups = (2 * (depth % 2) + width % 2).view(4, 24)
    assert groups.equal(torch.arange(4, dtype=torch.int32)[:, None].expand(4, 24))  # one group after the other
    assert str(of_groups) == "tiles of 1 x 3 x 2 pixels of every 2 x 1 x 2th pixel"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["plain", "transposed", "expanded", "unaligned", "narrow"])
def test_wide_copies_are_those_of_single_numbers(
    layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every memory layout, with first and second derivatives, and of many gradients at once."""
    monkeypatch.setattr(wide, "on_gpu", lambda device: True)
    tiles = canvas.CanvasTiles((4, 6), (1, 1), (2, 3))
    size = 3 if layout == "narrow" else 16
    x = torch.randn(2 * 24 * 3 * size + 1).to(dtype)
    x = x[1:] if layout == "unaligned" else x[:-1]
    x = x.view(2, 24, 3, size).mT.mT.transpose(1, 2) if layout == "transposed" else x.view(2, 3, 24, size)
    x[..., 0, 0] = math.nan
    x = x[:1].expand(2, 3, 24, size) if layout == "expanded" else x
    order = tiles.order(CPU).long()
    assert torch.equal(tiles.put(x, 2).nan_to_num(7.0), x[:, :, order].nan_to_num(7.0))
    assert tiles.put(x[..., 0], 2).nan_to_num(7.0).equal(x[..., 0][:, :, order].nan_to_num(7.0))
    y = torch.randn_like(x, requires_grad=True)
    assert tiles.back(tiles.put(y, 2), 2).equal(y)
    weight = torch.randn_like(x)
    for move in (lambda x: tiles.put(x, 2), lambda x: x[:, :, order]):
        (grad,) = torch.autograd.grad((move(y) ** 2 * weight).sum(), y, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), y)
        assert grad.equal(2 * y * weight[:, :, order.argsort()])
        assert second.equal(2 * weight[:, :, order.argsort()])
        many = torch.stack([weight, 2 * weight])
        (grads,) = torch.autograd.grad(move(y), y, many, is_grads_batched=True)
        assert grads.equal(many[:, :, :, order.argsort()])


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("natten", {"height": 64, "width": 128, "kernel": 7, "dilation": 4}),
        ("natten", {"height": 64, "width": 64, "kernel": (9, 31)}),
        ("natten", {"height": 56, "width": 56, "kernel": 7}),
        ("natten", {"height": 48, "width": 96, "kernel": 16, "stride": 8}),
        ("natten", {"height": 48, "width": 96, "kernel": 16, "stride": 8, "causal": True}),
        ("natten3d", {"depth": 8, "height": 16, "width": 32, "kernel": (4, 8, 8)}),
        ("sasa", {"height": 64, "width": 64, "window": (2, 20)}),
    ],
)
def test_no_other_tile_computes_fewer_blocks(
    name: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all tiles that fit, in groups and not, the best was chosen, or rows if it saves too little."""
    monkeypatch.setattr(canvas, "block_size_for", lambda size: (128, 128))
    monkeypatch.setattr(canvas, "_MIN_SAVED_KEYS", {"cpu": 256})
    flexmasks.clear_caches()
    axes = canvas._axes(flexmasks.get_mask(name, **params))
    lengths, groups = tuple(a.length for a in axes), tuple(a.groups for a in axes)
    tokens = math.prod(lengths)
    size = Size(1, 1, tokens, tokens, CPU)

    def keys(order: Tensor | None) -> float:
        plan = MaskPlan(flexmasks.get_mask(name, **params, order=order), size, block_size=(128, 128))
        return tokens * (1 - plan.blocks().sparsity)

    found = canvas._found(name, tuple(params.items()), CPU)
    ways = [
        canvas.CanvasTiles(lengths, g, tile)
        for g in {groups, (1,) * len(axes)}
        for tile in itertools.product([2**n for n in range(8)], repeat=len(axes))
        if math.prod(tile) == 128 and all(a % (t * n) == 0 for a, t, n in zip(lengths, tile, g, strict=True))
    ]
    least = min((keys(way.order(CPU)) for way in ways), default=math.inf)
    rows = keys(None)
    if found is None:
        assert rows - least < 256
    else:
        assert keys(canvas.CanvasTiles(lengths, *found).order(CPU)) <= min(least, rows - 256)


def test_calls_in_which_tokens_stay_in_rows() -> None:
    q = torch.randn(1, 1, 4096, 8)
    auto = flexmasks.get_mask("natten", **LARGE, order="auto")

    def is_in_tiles(**call: Any) -> bool:
        return canvas.tiles_for(q, q, q, Request(**call)) is not None

    assert is_in_tiles(mask=auto)
    assert is_in_tiles(mask="natten", params={**LARGE, "order": "auto"})
    assert is_in_tiles(mask="natten", params={**LARGE, "kernel": [15, np.int64(15)], "order": "auto"})
    assert is_in_tiles(mask=flexmasks.get_mask("natten", **LARGE), params={"order": "auto"})
    assert not is_in_tiles(mask="natten", params=LARGE)
    assert not is_in_tiles(mask=auto & "causal")
    assert not is_in_tiles(mask=auto, score="alibi")
    assert not is_in_tiles(mask=auto, q_offset=torch.zeros(1, dtype=torch.int64))
    assert not is_in_tiles(mask=flexmasks.get_mask("natten", height=64, width=64, kernel=1, order="auto"))


@pytest.mark.usefixtures("always_in_tiles")
def test_masks_composed_of_one_in_tiles() -> None:
    """They hold tokens in rows, as do all dense masks."""
    q = torch.randn(1, 1, 256, 8)
    auto, rows = (flexmasks.get_mask("natten", **SMALL, order=order) for order in ("auto", None))
    assert canvas.tiles_for(q, q, q, Request(mask=auto)) is not None
    for mask, same in ((auto, rows), (auto & "causal", rows & "causal"), (~auto, ~rows)):
        seen = flexmasks.dense_mask(same, 256)
        assert flexmasks.dense_mask(mask, 256).equal(seen)
        out = flexmasks.attention(q, q, q, mask=mask, backend="reference")
        assert error(out, attend(q, q, q, seen)[0]) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("always_in_tiles", "quick_kernels")
def test_tiles_in_transforms_and_on_a_default_device() -> None:
    """The first and later calls give the same, and the order that is kept is a plain tensor."""
    q, k, v = torch.randn(3, 1, 1, 256, 8)

    def loss(q: Tensor, order: str | None = "auto") -> Tensor:
        return flexmasks.attention(q, k, v, mask="natten", **SMALL, order=order).square().sum()

    want = torch.autograd.grad(loss(q.requires_grad_(), None), q)[0]
    q = q.detach()
    for plain_first in (False, True):
        flexmasks.clear_caches()
        if plain_first:
            loss(q)
        assert error(torch.func.grad(loss)(q), want) < 1e-5
        assert error(torch.autograd.grad(loss(leaf := q.clone().requires_grad_()), leaf)[0], want) < 1e-5
    flexmasks.clear_caches()
    with torch.device("meta"):
        loss(q)
        assert canvas.tiles_for(q, k, v, Request(mask="natten", params={**SMALL, "order": "auto"})) is not None
    # What is given beside a mask belongs to it.
    auto = flexmasks.get_mask("natten", **SMALL, order="auto")
    dilated = flexmasks.attention(q, k, v, mask="natten", **SMALL, dilation=2)
    assert error(flexmasks.attention(q, k, v, mask=auto, dilation=2), dilated) < 1e-5
    with pytest.raises(TypeError, match="is_causal"):
        flexmasks.attention(q, k, v, mask=auto, is_causal=True)


def test_what_explain_says_of_tiles() -> None:
    q = torch.randn(1, 1, 4096, 8)
    text = str(flexmasks.explain(q, q, q, mask="natten", **LARGE, order="auto"))
    assert "order: auto: the call takes its tokens into tiles of" in " ".join(text.split())
    plain = flexmasks.explain(q, q, q, mask="natten", **LARGE)
    assert plain.order == ""
    assert "order" not in str(plain)
    # What keeps tokens in rows: a score, and another mask beside it.
    auto = flexmasks.get_mask("natten", **LARGE, order="auto")
    for call in ({"mask": auto, "score": "alibi"}, {"mask": auto & "causal"}, {"mask": ["causal", auto]}):
        assert flexmasks.explain(q, q, q, **call).order.startswith("auto: tokens stay in rows")
    assert "order: auto: tokens stay" in str(flexmasks.explain(q, q, q, **call))


@pytest.mark.slow
@pytest.mark.usefixtures("always_in_tiles")
def test_tiles_inside_torch_compile() -> None:
    """A whole graph, in which the tiles are constants, with the gradients of eager calls in rows."""
    tensors = [torch.randn(1, 2, 256, 8, requires_grad=True) for _ in range(3)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flexmasks.attention(q, k, v, mask="natten", **SMALL, order="auto")

    got = call(*tensors)
    graphs = counters["stats"]["unique_graphs"]
    call(*(x.detach().clone().requires_grad_() for x in tensors))
    assert counters["stats"]["unique_graphs"] == graphs
    want = flexmasks.attention(*tensors, mask="natten", **SMALL)
    assert error(got, want) < 1e-5
    weight = torch.randn_like(got)
    for x, y in zip(*(torch.autograd.grad((o * weight).sum(), tensors) for o in (got, want)), strict=True):
        assert error(x, y) < 1e-5


def test_tiles_of_wrong_calls() -> None:
    """They get the errors of calls with tokens in rows."""
    q = torch.randn(1, 1, 64, 8)
    for params, words in (
        ({"height": 8, "width": 9, "kernel": 3}, "8 \\* 9 = 72, the call has 64 keys"),
        ({"height": 8, "width": 8, "kernel": 9}, "the kernel does not fit"),
        ({"height": 8, "width": 8, "kernel": [3, 3, 3]}, "`kernel` must be"),
        ({"height": 8, "kernel": 3}, "needs `width`"),
        ({"height": 8, "width": 8.0, "kernel": 3}, "`width` must be int"),
        ({"height": 8, "width": 8, "kernel": 3, "dilatation": 2}, "dilatation"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            flexmasks.attention(q, q, q, mask="natten", order="auto", **params)
    with pytest.raises(TypeError, match=r"`order` must be int\[KV\] in 0\.\.KV-1 \| 'auto'.*got 'tiles'"):
        flexmasks.attention(q, q, q, mask="natten", height=8, width=8, kernel=3, order="tiles")
    with pytest.raises(ValueError, match="must"):
        flexmasks.attention(q, q, q[:, :, :-1], mask="natten", height=8, width=8, kernel=3, order="auto")
    with pytest.raises(TypeError, match="given twice"):
        flexmasks.attention(q, q, q, mask=flexmasks.get_mask("natten", **LARGE, order="auto"), order="auto")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dilation", [1, 4])
def test_tiles_on_a_gpu(dilation: int, dtype: torch.dtype) -> None:
    """Rows and tiles give the same, in CUDA graphs too."""
    params = {"height": 96, "width": 128, "kernel": 23, "dilation": dilation}
    tensors = [torch.randn(2, 2, 96 * 128, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    assert canvas.tiles_for(*tensors, Request(mask="natten", params={**params, "order": "auto"})) is not None
    rows, tiled = (flexmasks.attention(*tensors, mask="natten", **params, order=order) for order in (None, "auto"))
    assert error(tiled, rows.cpu()) < TOLERANCE[dtype]
    weight = torch.randn_like(rows)
    grads = [torch.autograd.grad((out * weight).sum(), tensors) for out in (tiled, rows)]
    assert all(error(x, y.cpu()) < 2 * TOLERANCE[dtype] for x, y in zip(*grads, strict=True))
    frozen = [x.detach() for x in tensors]
    with torch.no_grad():
        flexmasks.attention(*frozen, mask="natten", **params, order="auto")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flexmasks.attention(*frozen, mask="natten", **params, order="auto")
        frozen[0].copy_(torch.randn_like(frozen[0]))
        graph.replay()
        assert error(out, flexmasks.attention(*frozen, mask="natten", **params).cpu()) < TOLERANCE[dtype]


@given(st.data())
def test_wide_copies_between_any_layouts(data: st.DataObject) -> None:
    def laid(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of this shape, as a part of a larger one with its dimensions in any order."""
        places = data.draw(st.permutations(range(len(shape))))
        if data.draw(st.booleans()):  # the last dimension stays the last one, as where copies are wide
            places = [*(n for n in places if n != len(shape) - 1), len(shape) - 1]
        more = [shape[n] + data.draw(st.sampled_from([0, 0, 1, 8])) for n in places]
        first = data.draw(st.sampled_from([0, 0, 1]))
        numbers = torch.zeros(first + math.prod(more), dtype=dtype)[first:].view(more)
        return numbers.permute([places.index(n) for n in range(len(shape))])[tuple(slice(n) for n in shape)]

    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.int64]))
    shape = [*data.draw(st.lists(st.integers(0, 4), max_size=3)), data.draw(st.sampled_from([1, 6, 8, 16]))]
    place, x = laid(shape, dtype), laid(shape, dtype)
    x.copy_(torch.arange(1, 1 + x.numel()).view(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide, "on_gpu", lambda device: True)
        wide.copy(place, x)
    assert place.equal(x)
