"""Masks of images and videos."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from oracles.case import Case, Random, int32, int64, mask_oracle, pair, row_of, runs

RANDOM = Random(6)


def _natten_axis(i: int, j: int, length: int, kernel: int, dilation: int, causal: bool, stride: int = 1) -> bool:
    """Return whether position i sees position j of one axis.

    The function lists the dilation group of i, and in the group the window. Each `stride` neighbors of a group share
    the window of their leader: the middle neighbor, of two the right neighbor, or if causal the last neighbor. If the
    group ends before the leader, the last position of the group leads.
    """
    group = [x for x in range(length) if x % dilation == i % dilation]
    if j not in group:
        return False
    place = i // dilation
    assert group[place] == i
    assert stride <= kernel <= len(group)
    together = range(place // stride * stride, place // stride * stride + stride)
    leader = min(together[-1] if causal else together[stride // 2], len(group) - 1)
    if causal:
        window = [group[p] for p in range(len(group)) if leader - kernel < p <= place]
    else:
        start = leader - kernel // 2
        while start < 0:
            start += 1
        while start + kernel > len(group):
            start -= 1
        window = group[start : start + kernel]
        assert len(window) == kernel
    return j in window


def _neighborhood(
    q: int,
    kv: int,
    canvas: tuple[int, ...],
    order: list[int] | None,
    kernel: Any,
    dilation: Any,
    stride: Any,
    causal: Any,
) -> bool:
    """Return whether a query sees a key along every axis of the canvas.

    Tokens are pixels in row-major order, or the pixels that `order` names. If not causal, a query sees exactly
    `kernel` keys of its dilation group: the keys start kernel // 2 before the leader, and at the edges they are moved
    to lie inside. If causal, a query sees no key after itself, and at most kernel - 1 keys before the leader.
    """
    pixels = list(itertools.product(*map(range, canvas)))
    places = [pixels[n if order is None else order[n]] for n in (q, kv)]
    kernel, dilation, stride, causal = (
        x if isinstance(x, tuple) else (x,) * len(canvas) for x in (kernel, dilation, stride, causal)
    )
    axes = zip(*places, canvas, kernel, dilation, causal, stride, strict=True)
    return all(_natten_axis(*axis) for axis in axes)


@mask_oracle
def sasa(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    height: int,
    width: int,
    window: int | tuple[int, int],
    order: list[int] | None = None,
) -> bool:
    """Pixels at most window_rows rows and window_cols columns apart.

    Tokens are pixels in row-major order, or the pixels that `order` names.
    """
    window_rows, window_cols = pair(window)
    assert 0 <= q < height * width
    assert 0 <= kv < height * width
    if order is not None:
        q, kv = order[q], order[kv]
    q_row, q_col = q // width, q % width
    kv_row, kv_col = kv // width, kv % width
    return abs(q_row - kv_row) <= window_rows and abs(q_col - kv_col) <= window_cols


@mask_oracle
def natten(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    height: int,
    width: int,
    kernel: int | tuple[int, int],
    dilation: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
    causal: bool | tuple[bool, bool] = False,
    order: list[int] | None = None,
) -> bool:
    """A neighborhood of rows and columns."""
    return _neighborhood(q, kv, (height, width), order, kernel, dilation, stride, causal)


@mask_oracle
def natten1d(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    length: int,
    kernel: int,
    dilation: int = 1,
    stride: int = 1,
    causal: bool = False,
) -> bool:
    """A neighborhood of positions."""
    return _neighborhood(q, kv, (length,), None, kernel, dilation, stride, causal)


@mask_oracle
def natten3d(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    depth: int,
    height: int,
    width: int,
    kernel: int | tuple[int, int, int],
    dilation: int | tuple[int, int, int] = 1,
    stride: int | tuple[int, int, int] = 1,
    causal: bool | tuple[bool, bool, bool] = False,
    order: list[int] | None = None,
) -> bool:
    """A neighborhood of depths, rows and columns."""
    return _neighborhood(q, kv, (depth, height, width), order, kernel, dilation, stride, causal)


@mask_oracle
def sliding_tile(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    canvas: tuple[int, ...],
    tile: tuple[int, ...],
    window: tuple[int, ...],
    text: int = 0,
) -> bool:
    """Pairs where kv's tile is in the window around q's tile; text sees all and is seen by all."""
    pixels, inside = math.prod(canvas), math.prod(tile)
    assert size.kv_len == pixels + text
    if q >= pixels or kv >= pixels:
        return True
    counts = [n // t for n, t in zip(canvas, tile, strict=True)]
    tiles = list(itertools.product(*map(range, counts)))
    places = zip(tiles[q // inside], tiles[kv // inside], counts, window, strict=True)
    return all(_natten_axis(i, j, n, w, 1, False) for i, j, n, w in places)


@mask_oracle
def temporal_window(b: int, h: int, q: int, kv: int, size: Case, frame: int, window: int, tokens: int = 0) -> bool:
    """Pairs with a text token, or whose places in their frames are at most `window` apart."""
    if q < tokens or kv < tokens:
        return True
    frames = [range(start, start + frame) for start in range(tokens, max(q, kv) + 1, frame)]
    places = [next(f.index(n) for f in frames if n in f) for n in (q, kv)]
    return abs(places[0] - places[1]) <= window


@mask_oracle
def vision_cross(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    intervals: Any,
    image_ids: Any,
) -> bool:
    """Keys of images whose interval (start, end) holds the query: start <= q < end.

    The interval is intervals[image_ids[kv]]; the id -1 marks padding, which nothing sees.
    """
    rows: Any = intervals[b] if isinstance(intervals[0][0], list) else intervals
    image = row_of(image_ids, b)[kv]
    if image < 0:
        return False
    start, end = rows[image]
    return bool(start <= q < end)


def _sasa(height: int, width: int, window: int | tuple[int, int], batch: int = 2, heads: int = 2) -> Case:
    """Return a sasa case over the whole canvas."""
    params = {"height": height, "width": width, "window": window}
    return Case("sasa", params, batch=batch, heads=heads, q_len=height * width, kv_len=height * width)


def _natten(height: int, width: int, kernel: int | tuple[int, int], **more: Any) -> Case:
    """Return a natten case over the whole canvas."""
    params = {"height": height, "width": width, "kernel": kernel, **more}
    return Case("natten", params, q_len=height * width, kv_len=height * width)


def _volume(name: str, canvas: dict[str, int], text: int = 0, **more: Any) -> Case:
    """Return a case over a whole canvas, and `text` tokens after it."""
    tokens = math.prod(canvas.values()) + text
    return Case(name, {**canvas, **more}, q_len=tokens, kv_len=tokens)


def _tiles(canvas: tuple[int, ...], tile: tuple[int, ...], window: tuple[int, ...], text: int = 0) -> Case:
    """Return a sliding_tile case."""
    params = {"canvas": canvas, "tile": tile, "window": window, **({"text": text} if text else {})}
    tokens = math.prod(canvas) + text
    return Case("sliding_tile", params, q_len=tokens, kv_len=tokens)


CASES: list[Case] = [
    _sasa(8, 8, 1),
    _sasa(5, 9, 2, batch=3),
    _sasa(9, 5, (1, 3), heads=3),
    _sasa(6, 7, (2, 0)),
    _sasa(7, 6, 0),
    _sasa(4, 11, 20),
    _sasa(1, 37, (0, 4)),
    _sasa(41, 1, 3),
    _volume("sasa", {"height": 6, "width": 7}, window=(1, 2), order=RANDOM.order(42)),
    _natten(8, 8, 3),
    _natten(5, 9, 5),
    _natten(10, 6, (7, 3)),
    _natten(6, 7, (4, 2)),
    _natten(7, 9, 4),
    _natten(5, 6, (5, 6)),
    _natten(6, 7, 1),
    _natten(1, 13, (1, 5)),
    _natten(31, 1, (6, 1)),
    _natten(7, 9, 3, dilation=2),
    _natten(7, 10, (3, 2), dilation=(2, 4)),
    _natten(8, 8, (2, 4), dilation=(3, 2)),
    _natten(6, 11, (5, 3), dilation=(1, 3), causal=False),
    _natten(6, 8, 3, causal=True),
    _natten(7, 7, (4, 3), causal=(True, False)),
    _natten(5, 11, (2, 4), causal=(False, True)),
    _natten(9, 7, 3, dilation=2, causal=True),
    _natten(7, 8, (2, 3), dilation=(3, 2), causal=(False, True)),
    _natten(11, 5, (4, 2), dilation=(2, 2), causal=(True, False)),
    _natten(4, 6, (4, 6), causal=(True, True)),
    _volume("natten", {"height": 7, "width": 8}, kernel=(4, 5), stride=(3, 2)),
    _volume("natten", {"height": 9, "width": 6}, kernel=3, stride=(2, 3), dilation=(2, 1), causal=(True, False)),
    _volume("natten", {"height": 6, "width": 8}, kernel=3, order=RANDOM.order(48)),
    _volume("natten1d", {"length": 40}, kernel=7),
    _volume("natten1d", {"length": 37}, kernel=6, dilation=3),
    _volume("natten1d", {"length": 41}, kernel=8, stride=4),
    _volume("natten1d", {"length": 29}, kernel=5, stride=3, causal=True),
    _volume("natten1d", {"length": 47}, kernel=5, stride=3, dilation=2),
    _volume("natten1d", {"length": 150}, kernel=150),
    _volume("natten3d", {"depth": 3, "height": 4, "width": 5}, kernel=3),
    _volume("natten3d", {"depth": 4, "height": 3, "width": 5}, kernel=(2, 3, 4), causal=(True, False, False)),
    _volume("natten3d", {"depth": 5, "height": 4, "width": 3}, kernel=(2, 2, 3), dilation=(2, 2, 1), stride=(2, 1, 3)),
    _volume("natten3d", {"depth": 2, "height": 4, "width": 6}, kernel=(1, 3, 3), order=int32(list(range(47, -1, -1)))),
    _tiles((6, 8), (2, 4), (1, 1)),
    _tiles((8, 6), (2, 2), (3, 2)),
    _tiles((4, 4, 6), (2, 2, 3), (1, 2, 2)),
    _tiles((6, 6), (2, 3), (3, 1), text=7),
    _tiles((3, 4, 4), (1, 2, 2), (3, 1, 2), text=3),
    Case("temporal_window", {"frame": 9, "window": 2, "tokens": 4}),
    Case("temporal_window", {"frame": 7, "window": 0}, q_len=21, kv_len=44, q_offset=(0, 23)),
    Case("temporal_window", {"frame": 50, "window": 12, "tokens": 3}, batch=1, heads=1, q_len=153, kv_len=153),
    Case(
        "vision_cross",
        {"intervals": int64([[0, 10], [10, 25], [25, 40]]), "image_ids": runs([8, 16, 9])},
        q_len=40,
        kv_len=33,
    ),
    # Overlapping, empty and never-named intervals, padding between and after the images.
    Case(
        "vision_cross",
        {
            "intervals": int32([[[3, 30], [20, 45], [9, 9]], [[0, 45], [44, 45], [0, 1]]]),
            "image_ids": int32([[0] * 12 + [-1] * 3 + [1] * 10 + [-1] * 4, [2] * 5 + [1] * 20 + [-1] * 4]),
        },
        q_len=45,
        kv_len=29,
    ),
    Case(
        "vision_cross",
        {"intervals": int64([[5, 21], [21, 60]]), "image_ids": RANDOM.ints(-1, 2, 3, 34, dtype=torch.int32)},
        batch=3,
        q_len=51,
        kv_len=34,
    ),
    Case(
        "vision_cross",
        {
            "intervals": int32([[[0, 16], [16, 50]], [[48, 64], [2, 70]]]),
            "image_ids": int64([1] * 17 + [0] * 17 + [-1]),
        },
        heads=3,
        q_len=20,
        kv_len=35,
        q_offset=33,
    ),
    Case(
        "vision_cross",
        {"intervals": int64([[0, 12], [12, 61]]), "image_ids": RANDOM.ints(-1, 2, 2, 48)},
        q_len=11,
        kv_len=48,
        q_offset=(4, 37),
    ),
    Case("vision_cross", {"intervals": int64([[0, 30]]), "image_ids": int64([-1] * 21)}, q_len=30, kv_len=21),
]
