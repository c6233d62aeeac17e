"""Triton kernels of the masked softmax, forward and backward, and their launch.

What moves, for N elements of s bytes of which a share f is visible: forward N s (1 + f), x read where it is visible
and y written; backward N s (1 + 2 f), y and dy read where y is visible and dx written. Columns before a row's first
visible one and from its end on are not read. A row is held in registers; a longer one is read twice.

Loads are masked by limits rounded to 16 elements and never by the mask itself, which would split them into single
elements. Column counts and strides come divided by GRAIN, a power of two, which proves their alignment to the compiler
for any length without compiling for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = math.log2(math.e)
_LEAST = torch.finfo(torch.float32).tiny  # what is below is 0 to a kernel
_KINDS = 4096  # of calls whose launches are kept
_LONGEST = {"forward": 32768, "backward": 16384}  # columns of a row that fit in registers
_SPARSEST = 4  # stride of a row's elements up to which a kernel reads them, and that is faster than a copy
_OUTER = 3  # dimensions around the rows that kernels know


@dataclass(frozen=True)
class Config:
    """How a kernel goes about rows of some length: rows per program and warps.

    chunk: columns of a row looked at at once where it is read twice, else 0: it is held in registers. halvings: how
    often the width that is held, or a chunk, may be halved for rows that see few columns; 0 where rows have no bounds.
    """

    rows: int
    warps: int
    halvings: int
    chunk: int = 0


def config(kind: str, columns: int, itemsize: int, bounded: bool) -> Config:
    """What to launch for rows of so many columns; `bounded`: they have limits. The best of a sweep on one H200."""
    block = triton.next_power_of_2(max(columns, 16))
    if columns <= 2048:
        return Config(max(1, min(64, 1024 // block)), 1, 1 if bounded and block >= 512 else 0)
    if not bounded and columns <= _LONGEST[kind]:
        return Config(1, 4 if columns <= 4096 else 8 if columns <= 8192 else 16, 0)
    kilobytes = columns * itemsize / 1024
    if kilobytes <= 8:
        return Config(1, 2, 1, 1024) if kind == "forward" else Config(1, 4, 1, 2048)
    for most, warps, chunk in ((16, 4, 2048), (32, 8, 4096), (64, 16, 4096)):
        if kilobytes <= most:
            return Config(1, warps, 0, chunk)
    return Config(1, 16, 0, 8192)


# --- forward ---


@triton.jit
def _place(n_inner, n_blocks, n_one, INNER: tl.constexpr, OUTER: tl.constexpr):
    """This program's block of rows, and its indices in up to three dimensions around the rows.

    The inner one changes fastest: programs that share rows of a mask run at the same time, and read it once.
    """
    block = tl.program_id(0)
    inner = block * 0
    one = inner
    two = inner
    if INNER:
        inner = block % n_inner
        block = block // n_inner
    if OUTER >= 1:
        one = block // n_blocks
        block = block % n_blocks
    if OUTER >= 2:
        two = one // n_one
        one = one % n_one
    return block, inner.to(tl.int64), one.to(tl.int64), two.to(tl.int64)


@triton.jit
def _limits(at, is_row, ROWS: tl.constexpr):
    """First visible column and end of each row; both rounded to 16 outwards; and how wide the widest is."""
    if ROWS == 1:
        first = tl.load(at)
        end = tl.load(at + 1)
    else:
        first = tl.load(at, mask=is_row, other=0)
        end = tl.load(at + 1, mask=is_row, other=0)
    low = first // 16 * 16
    high = (end + 15) // 16 * 16
    width = high - low
    if ROWS > 1:
        width = tl.max(tl.max(width, 1), 0)
    return first, end, low, high, width


@triton.jit
def _clear_around(at, start, columns, is_row, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write 0 to all columns but start..start + WIDTH - 1."""
    for chunk in tl.static_range(0, BLOCK, WIDTH):
        column = chunk + tl.arange(0, WIDTH)[None, :]
        outside = ((column < start) | (column >= start + WIDTH)) & (column < columns)
        if ROWS > 1:
            outside = outside & is_row
        tl.store(at + column, tl.zeros((ROWS, WIDTH), at.dtype.element_ty), mask=outside)


@triton.jit
def _clear(at, start, stop, CHUNK: tl.constexpr):
    """Write 0 to columns start..stop - 1."""
    for chunk in range(start, stop, CHUNK):
        column = chunk + tl.arange(0, CHUNK)[None, :]
        tl.store(at + column, tl.zeros((1, CHUNK), at.dtype.element_ty), mask=column < stop)


@triton.jit
def _span(columns, low, high, CHUNK: tl.constexpr, BOUNDS: tl.constexpr):
    """From where to where a long row is read, and in how many chunks."""
    if BOUNDS:
        start = low
        stop = high
    else:
        start = columns * 0
        stop = columns
    return start, stop, tl.cdiv(stop - start, CHUNK)


@triton.jit
def _visible(
    bits,
    mask,
    column,
    inside,
    first,
    end,
    MASK_COLUMN: tl.constexpr,
    BOUNDS: tl.constexpr,
    VISIBLE: tl.constexpr,
):
    """Which columns are visible, of those `inside`."""
    visible = inside
    if bits is not None:
        words = tl.load(bits + column // 32, mask=inside, other=0)
        visible = visible & (((words >> (column % 32)) & 1) != 0)
    elif BOUNDS:  # one comparison for two: a column before the first is a great number
        visible = (column - first).to(tl.uint32, bitcast=True) < (end - first).to(tl.uint32, bitcast=True)
    if mask is not None:
        marked = tl.load(mask + column * MASK_COLUMN, mask=inside, other=0)
        if VISIBLE:
            visible = visible & (marked != 0)
        else:
            visible = visible & (marked == 0)
    return visible


@triton.jit
def _scores(
    x,
    bits,
    mask,
    column,
    inside,
    first,
    end,
    X_COLUMN: tl.constexpr,
    MASK_COLUMN: tl.constexpr,
    BOUNDS: tl.constexpr,
    VISIBLE: tl.constexpr,
    SIGN: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Scores at `column`, -inf where hidden, their sign changed for a negative scale; and where they are visible.

    `inside` limits what is read.
    """
    scores = tl.load(x + column * X_COLUMN, mask=inside, other=0, eviction_policy=POLICY).to(tl.float32)
    visible = _visible(bits, mask, column, inside, first, end, MASK_COLUMN, BOUNDS, VISIBLE)
    if SIGN < 0:
        scores = -scores
    return tl.where(visible, scores, float("-inf")), visible


@triton.jit
def _weights(scores, most, visible, scale, SIGN: tl.constexpr):
    """exp(score - most), 0 where hidden if anything is visible: NaN for a row of -inf only, as in torch."""
    if SIGN == 0:  # 1 where visible, but for NaN and inf
        return tl.where(visible, tl.exp2(scores * 0.0), 0.0)
    return tl.exp2((scores - most) * scale)


@triton.jit
def _inside(column, columns, is_row, low, high, ROWS: tl.constexpr, BOUNDS: tl.constexpr, FROM_LOW: tl.constexpr):
    """Which columns exist, and which of them are to be read; FROM_LOW: none is before `low`."""
    exists = column < columns
    if ROWS > 1:
        exists = exists & is_row
    inside = exists
    if BOUNDS:
        inside = inside & (column < high)
        if not FROM_LOW:
            inside = inside & (column >= low)
    return exists, inside


@triton.jit
def _forward_tile(
    y,
    x,
    bounds,
    bits,
    mask,
    columns,
    is_row,
    first,
    end,
    low,
    high,
    scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    X_COLUMN: tl.constexpr,
    MASK_COLUMN: tl.constexpr,
    BOUNDS: tl.constexpr,
    VISIBLE: tl.constexpr,
    SIGN: tl.constexpr,
):
    """Rows in registers: all columns, or WIDTH of them from `low` on where that holds all visible ones."""
    column = tl.arange(0, WIDTH)[None, :]
    if WIDTH < BLOCK:
        column = low + column
    exists, inside = _inside(column, columns, is_row, low, high, ROWS, BOUNDS, WIDTH < BLOCK)
    scores, visible = _scores(
        x, bits, mask, column, inside, first, end, X_COLUMN, MASK_COLUMN, BOUNDS, VISIBLE, SIGN, ""
    )
    if WIDTH < BLOCK:
        _clear_around(y, low, columns, is_row, ROWS, BLOCK, WIDTH)
    if ROWS > 1:
        weights = _weights(scores, tl.max(scores, 1)[:, None], visible, scale, SIGN)
        weights = tl.where(visible, weights * (1.0 / tl.sum(weights, 1)[:, None]), 0.0)
        tl.store(y + column, weights.to(y.dtype.element_ty), mask=exists)
    else:  # hidden weights are 0 by themselves; to choose by `visible` once more would cost as much as all else
        most = tl.max(tl.max(scores, 1), 0)
        weights = _weights(scores, tl.where(most == float("-inf"), 0.0, most), visible, scale, SIGN)
        total = tl.sum(tl.sum(weights, 1), 0)
        weights = weights * tl.where(total == 0, 0.0, 1.0 / total)
        tl.store(y + column, weights.to(y.dtype.element_ty), mask=exists)
        if _is_odd(most, total, first, end, BOUNDS):
            if BOUNDS:  # read again, as what follows: else it would be kept in registers for this rare case
                first = tl.load(bounds)
                end = tl.load(bounds + 1)
            visible = _visible(bits, mask, column, inside, first, end, MASK_COLUMN, BOUNDS, VISIBLE)
            weights = tl.where(visible, float("nan"), 0.0)
            tl.store(y + column, weights.to(y.dtype.element_ty), mask=exists)


@triton.jit
def _is_odd(most, total, first, end, BOUNDS: tl.constexpr):
    """Whether a row's visible places are NaN: for a NaN or inf, or for nothing but -inf; hidden ones are not."""
    odd = (total != total) | (most == float("-inf"))
    if BOUNDS:
        odd = odd & (end > first)
    return odd


@triton.jit
def _fits(chunk: tl.constexpr):
    """How wide rows are for which chunks of that size are best: a little more is not worth a chunk twice as large."""
    return chunk * 5 // 4


@triton.jit
def _forward_long(
    y,
    x,
    bits,
    mask,
    columns,
    first,
    end,
    low,
    high,
    scale,
    CHUNK: tl.constexpr,
    X_COLUMN: tl.constexpr,
    MASK_COLUMN: tl.constexpr,
    BOUNDS: tl.constexpr,
    VISIBLE: tl.constexpr,
    SIGN: tl.constexpr,
):
    """One row that does not fit in registers, in two passes: its maximum and sum, then the result, last columns first.

    What is visible is read twice, the second time mostly from the cache.
    """
    start, stop, n_chunks = _span(columns, low, high, CHUNK, BOUNDS)
    _clear(y, columns * 0, start, CHUNK)
    _clear(y, start + n_chunks * CHUNK, columns, CHUNK)
    most = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for chunk in range(start, stop, CHUNK):
        column = chunk + tl.arange(0, CHUNK)[None, :]
        exists, inside = _inside(column, columns, True, low, high, 1, BOUNDS, True)
        scores, visible = _scores(
            x, bits, mask, column, inside, first, end, X_COLUMN, MASK_COLUMN, BOUNDS, VISIBLE, SIGN, ""
        )
        new = tl.maximum(most, tl.max(tl.max(scores, 1), 0))
        finite = tl.where(new == float("-inf"), 0.0, new)  # -inf only, so far
        weights = _weights(scores, finite, visible, scale, SIGN)
        total = total * tl.where(most == float("-inf"), 0.0, tl.exp2((most - new) * scale))
        total += tl.sum(tl.sum(weights, 1), 0)
        most = new
    factor = tl.where(total == 0, 0.0, 1.0 / total)
    finite = tl.where(most == float("-inf"), 0.0, most)
    for n in range(n_chunks):
        column = start + (n_chunks - 1 - n) * CHUNK + tl.arange(0, CHUNK)[None, :]
        exists, inside = _inside(column, columns, True, low, high, 1, BOUNDS, True)
        scores, visible = _scores(
            x, bits, mask, column, inside, first, end, X_COLUMN, MASK_COLUMN, BOUNDS, VISIBLE, SIGN, "evict_first"
        )
        weights = _weights(scores, finite, visible, scale, SIGN) * factor
        tl.store(y + column, weights.to(y.dtype.element_ty), mask=exists)
    if _is_odd(most, total, first, end, BOUNDS):
        for n in range(n_chunks):
            column = start + n * CHUNK + tl.arange(0, CHUNK)[None, :]
            exists, inside = _inside(column, columns, True, low, high, 1, BOUNDS, True)
            visible = _visible(bits, mask, column, inside, first, end, MASK_COLUMN, BOUNDS, VISIBLE)
            weights = tl.where(visible, float("nan"), 0.0)
            tl.store(y + column, weights.to(y.dtype.element_ty), mask=exists)


def _changing(*tensors: str) -> list[str]:
    """Parameters that nothing is compiled anew for: sizes, and strides of tensors."""
    sizes = ["columns", "n_rows", "n_inner", "n_blocks", "n_one"]
    return sizes + [f"{name}_{dim}" for name in tensors for dim in ("row", "inner", "one", "two")]


@triton.jit(do_not_specialize=_changing("y", "x", "bounds", "bits", "mask"))
def _forward(
    y,
    x,
    bounds,
    bits,
    mask,
    columns,
    n_rows,
    n_inner,
    n_blocks,
    n_one,
    y_row,
    y_inner,
    y_one,
    y_two,
    x_row,
    x_inner,
    x_one,
    x_two,
    bounds_row,
    bounds_inner,
    bounds_one,
    bounds_two,
    bits_row,
    bits_inner,
    bits_one,
    bits_two,
    mask_row,
    mask_inner,
    mask_one,
    mask_two,
    scale,
    GRAIN: tl.constexpr,
    MASK_GRAIN: tl.constexpr,
    X_COLUMN: tl.constexpr,
    MASK_COLUMN: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
    LONG: tl.constexpr,
    VISIBLE: tl.constexpr,
    SIGN: tl.constexpr,
):
    """Y = softmax(x * scale) over the visible columns, 0 at hidden ones; scale is |scale| * log2(e)."""
    block, inner, one, two = _place(n_inner, n_blocks, n_one, INNER, OUTER)
    columns = columns * GRAIN
    row = block.to(tl.int64)
    is_row = True
    if ROWS > 1:
        row = row * ROWS + tl.arange(0, ROWS)[:, None]
        is_row = row < n_rows
    y += (row * y_row + inner * y_inner + one * y_one + two * y_two) * GRAIN
    x += (row * x_row + inner * x_inner + one * x_one + two * x_two) * GRAIN
    first = 0
    end = 0
    low = 0
    high = 0
    width = 0
    BOUNDS: tl.constexpr = bounds is not None
    if BOUNDS:
        bounds += row * bounds_row + inner * bounds_inner + one * bounds_one + two * bounds_two
        first, end, low, high, width = _limits(bounds, is_row, ROWS)
    if bits is not None:
        bits += row * bits_row + inner * bits_inner + one * bits_one + two * bits_two
    if mask is not None:
        mask += (row * mask_row + inner * mask_inner + one * mask_one + two * mask_two) * MASK_GRAIN
    if LONG:
        for n in tl.static_range(0, HALVINGS + 1):
            if ((n == 0) | (width <= _fits(BLOCK >> n))) & ((n == HALVINGS) | (width > _fits(BLOCK >> (n + 1)))):
                _forward_long(
                    y,
                    x,
                    bits,
                    mask,
                    columns,
                    first,
                    end,
                    low,
                    high,
                    scale,
                    BLOCK >> n,
                    X_COLUMN,
                    MASK_COLUMN,
                    BOUNDS,
                    VISIBLE,
                    SIGN,
                )
    else:
        for n in tl.static_range(0, HALVINGS + 1):
            if (HALVINGS == 0) | ((width <= BLOCK >> n) & (width > (BLOCK >> (n + 1) if n < HALVINGS else -1))):
                _forward_tile(
                    y,
                    x,
                    bounds,
                    bits,
                    mask,
                    columns,
                    is_row,
                    first,
                    end,
                    low,
                    high,
                    scale,
                    ROWS,
                    BLOCK,
                    BLOCK >> n,
                    X_COLUMN,
                    MASK_COLUMN,
                    BOUNDS,
                    VISIBLE,
                    SIGN,
                )


# --- backward ---


@triton.jit
def _products(
    y,
    dy,
    column,
    inside,
    Y_COLUMN: tl.constexpr,
    DY_COLUMN: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Y and y * dy, 0 where y is 0 whatever dy is."""
    weights = tl.load(y + column * Y_COLUMN, mask=inside, other=0, eviction_policy=POLICY).to(tl.float32)
    slopes = tl.load(dy + column * DY_COLUMN, mask=inside, other=0, eviction_policy=POLICY).to(tl.float32)
    return weights, tl.where(weights == 0, 0.0, weights * slopes)


@triton.jit
def _backward_tile(
    dx,
    dy,
    y,
    columns,
    is_row,
    low,
    high,
    scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    Y_COLUMN: tl.constexpr,
    DY_COLUMN: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """Rows in registers: all columns, or WIDTH of them from `low` on where that holds all visible ones."""
    column = tl.arange(0, WIDTH)[None, :]
    if WIDTH < BLOCK:
        column = low + column
    exists, inside = _inside(column, columns, is_row, low, high, ROWS, BOUNDS, WIDTH < BLOCK)
    weights, products = _products(y, dy, column, inside, Y_COLUMN, DY_COLUMN, "")
    if WIDTH < BLOCK:
        _clear_around(dx, low, columns, is_row, ROWS, BLOCK, WIDTH)
    total = tl.sum(products, 1)[:, None]
    slopes = tl.where(weights == 0, 0.0, scale * (products - weights * total))
    tl.store(dx + column, slopes.to(dx.dtype.element_ty), mask=exists)


@triton.jit
def _backward_long(
    dx,
    dy,
    y,
    columns,
    low,
    high,
    scale,
    CHUNK: tl.constexpr,
    Y_COLUMN: tl.constexpr,
    DY_COLUMN: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """One row that does not fit in registers, in two passes: the sum, then the result."""
    start, stop, n_chunks = _span(columns, low, high, CHUNK, BOUNDS)
    covered = start + n_chunks * CHUNK
    _clear(dx, columns * 0, start, CHUNK)
    _clear(dx, covered, columns, CHUNK)
    total_of = tl.zeros((1, CHUNK), tl.float32)
    for chunk in range(start, stop, CHUNK):
        column = chunk + tl.arange(0, CHUNK)[None, :]
        _exists, inside = _inside(column, columns, True, low, high, 1, BOUNDS, True)
        weights, products = _products(y, dy, column, inside, Y_COLUMN, DY_COLUMN, "")
        total_of += products
    total = tl.sum(tl.sum(total_of, 1), 0)
    for chunk in range(start, stop, CHUNK):
        column = chunk + tl.arange(0, CHUNK)[None, :]
        exists, inside = _inside(column, columns, True, low, high, 1, BOUNDS, True)
        weights, products = _products(y, dy, column, inside, Y_COLUMN, DY_COLUMN, "evict_first")
        slopes = tl.where(weights == 0, 0.0, scale * (products - weights * total))
        tl.store(dx + column, slopes.to(dx.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=_changing("dx", "dy", "y", "bounds"))
def _backward(
    dx,
    dy,
    y,
    bounds,
    columns,
    n_rows,
    n_inner,
    n_blocks,
    n_one,
    dx_row,
    dx_inner,
    dx_one,
    dx_two,
    dy_row,
    dy_inner,
    dy_one,
    dy_two,
    y_row,
    y_inner,
    y_one,
    y_two,
    bounds_row,
    bounds_inner,
    bounds_one,
    bounds_two,
    scale,
    GRAIN: tl.constexpr,
    DY_COLUMN: tl.constexpr,
    Y_COLUMN: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
    LONG: tl.constexpr,
):
    """dx = scale * (y * dy - y * sum(y * dy)), 0 where y is 0."""
    block, inner, one, two = _place(n_inner, n_blocks, n_one, INNER, OUTER)
    columns = columns * GRAIN
    row = block.to(tl.int64)
    is_row = True
    if ROWS > 1:
        row = row * ROWS + tl.arange(0, ROWS)[:, None]
        is_row = row < n_rows
    dx += (row * dx_row + inner * dx_inner + one * dx_one + two * dx_two) * GRAIN
    dy += (row * dy_row + inner * dy_inner + one * dy_one + two * dy_two) * GRAIN
    y += (row * y_row + inner * y_inner + one * y_one + two * y_two) * GRAIN
    low = 0
    high = 0
    width = 0
    BOUNDS: tl.constexpr = bounds is not None
    if BOUNDS:
        bounds += row * bounds_row + inner * bounds_inner + one * bounds_one + two * bounds_two
        _first, _end, low, high, width = _limits(bounds, is_row, ROWS)
    if LONG:
        for n in tl.static_range(0, HALVINGS + 1):
            if ((n == 0) | (width <= _fits(BLOCK >> n))) & ((n == HALVINGS) | (width > _fits(BLOCK >> (n + 1)))):
                _backward_long(dx, dy, y, columns, low, high, scale, BLOCK >> n, Y_COLUMN, DY_COLUMN, BOUNDS)
    else:
        for n in tl.static_range(0, HALVINGS + 1):
            if (HALVINGS == 0) | ((width <= BLOCK >> n) & (width > (BLOCK >> (n + 1) if n < HALVINGS else -1))):
                _backward_tile(
                    dx, dy, y, columns, is_row, low, high, scale, ROWS, BLOCK, BLOCK >> n, Y_COLUMN, DY_COLUMN, BOUNDS
                )


# --- launch ---

_Launch = Callable[..., Any]
_launches: dict[Hashable, tuple[_Launch, tuple[Any, ...], tuple[Any, ...]]] = {}


def forward(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """The softmax of x; arguments are those of the op flexmasks::masked_softmax."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    factor = abs(scale) * _LOG2E
    sign = 0 if factor < _LEAST else 1 if scale > 0 else -1
    key = (_layout_of(x), _layout_of(bounds), _layout_of(bits), _layout_of(mask), visible, sign, x.device.index)
    launch = _launches.get(key)
    if launch is not None:
        run, numbers, constants = launch
        run(y, x, bounds, bits, mask, *numbers, factor, *constants)
        return y
    if _column(x) > _SPARSEST:
        return forward(x.contiguous(), bounds, bits, mask, visible, scale)
    if mask is not None and _column(mask) * x.shape[-1] >= 2**31:
        return forward(x, bounds, bits, mask.contiguous(), visible, scale)
    made = _grid("forward", [y, x, bounds, bits, mask])
    if made is None:
        bounds, bits, mask = (_expanded(t, x.shape[:-1]) for t in (bounds, bits, mask))
        return forward(x.contiguous(), bounds, bits, mask, visible, scale)
    grains = [_grain(made.strides[:2], x.shape[-1]), _grain(made.strides[4:], 0)]
    numbers = made.numbers(x.shape[-1], (grains[0], grains[0], 1, 1, grains[1]))
    of_mask = 0 if mask is None else _column(mask)
    constants = (*grains, _column(x), of_mask, *made.constants, visible, sign)
    compiled = _forward[(made.programs,)](
        y, x, bounds, bits, mask, *numbers, factor, *constants, num_warps=made.config.warps
    )
    _remember(key, compiled, made.programs, numbers, constants)
    return y


def backward(dy: Tensor, y: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    """The gradient of x; arguments are those of the op flexmasks::masked_softmax_backward."""
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if not dx.numel():
        return dx
    key = (_layout_of(dy), _layout_of(y), _layout_of(bounds), y.device.index)
    launch = _launches.get(key)
    if launch is not None:
        run, numbers, constants = launch
        run(dx, dy, y, bounds, *numbers, scale, *constants)
        return dx
    if max(_column(dy), _column(y)) > _SPARSEST:
        return backward(dy.contiguous(), y.contiguous(), bounds, scale)
    made = _grid("backward", [dx, dy, y, bounds])
    if made is None:
        return backward(dy.contiguous(), y.contiguous(), _expanded(bounds, y.shape[:-1]), scale)
    grain = _grain(made.strides[:3], y.shape[-1])
    numbers = made.numbers(y.shape[-1], (grain, grain, grain, 1))
    constants = (grain, _column(dy), _column(y), *made.constants)
    compiled = _backward[(made.programs,)](dx, dy, y, bounds, *numbers, scale, *constants, num_warps=made.config.warps)
    _remember(key, compiled, made.programs, numbers, constants)
    return dx


def _remember(key: Hashable, compiled: Any, programs: int, numbers: Any, constants: Any) -> None:
    if compiled is None:  # interpreted
        return
    if len(_launches) >= _KINDS:
        _launches.clear()
    _launches[key] = compiled[(programs, 1, 1)], numbers, constants


def _layout_of(tensor: Tensor | None) -> Hashable:
    """All of a tensor that a launch depends on."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0


@dataclass(frozen=True)
class _Grid:
    """How the leading dimensions of some tensors are laid over programs."""

    sizes: list[int]  # of the dimensions: rows, inner, one, two
    strides: list[list[int]]  # for each tensor, along each of them
    inner: bool
    config: Config
    constants: tuple[Any, ...]

    @property
    def blocks(self) -> int:
        return -(-self.sizes[0] // self.config.rows)

    @property
    def programs(self) -> int:
        return self.blocks * math.prod(self.sizes[1:])

    def numbers(self, columns: int, grains: Sequence[int]) -> tuple[int, ...]:
        """The kernels' integers: sizes, then strides, divided by each tensor's grain."""
        strides = (s // g for line, g in zip(self.strides, grains, strict=True) for s in line)
        return columns // grains[0], self.sizes[0], self.sizes[1], self.blocks, self.sizes[2], *strides


def _grid(kind: str, tensors: list[Tensor | None]) -> _Grid | None:
    """The grid of [..., columns] tensors that broadcast to the first, or None where it has too many dimensions.

    Dimensions that follow each other in the memory of all tensors are taken as one.
    """
    shape = tensors[0].shape[:-1]  # type: ignore[union-attr] # the output
    lines = [_strides(t, shape) for t in tensors]
    dims: list[tuple[int, list[int]]] = []
    for n, *strides in zip(shape, *lines, strict=True):
        if n == 1:
            continue
        if dims and all(before == s * n for before, s in zip(dims[-1][1], strides, strict=True)):
            dims[-1] = dims[-1][0] * n, strides
        else:
            dims.append((n, strides))
    none = (1, [0] * len(tensors))
    rows = dims.pop() if dims else none
    if len(dims) > _OUTER:
        return None
    inner = none
    # programs that read the same rows of a mask, which comes last, follow each other
    shared = [d for d in dims if kind == "forward" and tensors[-1] is not None and d[1][-1] == 0]
    if shared or len(dims) == _OUTER:
        inner = max(shared or dims)
        dims.remove(inner)
    outer = len(dims)
    one, two = (*reversed(dims), none, none)[:2]
    columns = tensors[0].shape[-1]  # type: ignore[union-attr]
    bounded = tensors[2 if kind == "forward" else 3] is not None
    chosen = config(kind, columns, tensors[0].element_size(), bounded)  # type: ignore[union-attr]
    block = chosen.chunk or triton.next_power_of_2(max(columns, 16))
    order = (rows, inner, one, two)
    return _Grid(
        sizes=[d[0] for d in order],
        strides=[[d[1][i] for d in order] for i in range(len(tensors))],
        inner=inner is not none,
        config=chosen,
        constants=(inner is not none, outer, chosen.rows, block, chosen.halvings, chosen.chunk > 0),
    )


def _column(tensor: Tensor) -> int:
    """The stride of the last dimension, 0 where it has one element or is not there."""
    return 0 if not tensor.ndim or tensor.shape[-1] == 1 else tensor.stride(-1)


def _strides(tensor: Tensor | None, shape: Sequence[int]) -> list[int]:
    """Strides of the leading dimensions of a tensor as one of that leading shape."""
    if tensor is None:
        return [0] * len(shape)
    own = [0 if n == 1 else s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)]
    return [0] * (len(shape) - len(own)) + own


def _grain(strides: Sequence[Sequence[int]], columns: int) -> int:
    """The greatest power of two, up to 16, that divides columns and strides."""
    return math.gcd(16, columns, *(s for line in strides for s in line))


def _expanded(tensor: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    return None if tensor is None else tensor.expand(*shape, tensor.shape[-1]).contiguous()
