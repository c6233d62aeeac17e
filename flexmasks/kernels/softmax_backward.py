"""Triton kernel of the masked softmax's backward pass.

For N elements of s bytes, of which a fraction f is visible, the kernel moves N s (1 + 2 f) bytes: it reads y and dy
where y is visible and writes dx. It reads no column before a row's first visible column, nor after its last. Registers
hold a row or its visible part; a row too long for registers is read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexmasks.kernels.softmax_tiles import (
    NUMBERS,
    as_loaded,
    chunks_to_read,
    clear,
    clear_around,
    is_class,
    load_chunk,
    program_position,
    readable,
    row_limits,
    store_chunk,
)


@triton.jit
def _products(y, dy, column, inside, Y_COLUMN: tl.constexpr, DY_COLUMN: tl.constexpr, POLICY: tl.constexpr):
    """y and y * dy, which is 0 if y is 0."""
    weights = tl.load(y + column * Y_COLUMN, mask=inside, other=0, eviction_policy=POLICY).to(tl.float32)
    slopes = tl.load(dy + column * DY_COLUMN, mask=inside, other=0, eviction_policy=POLICY).to(tl.float32)
    return weights, tl.where(weights == 0, 0.0, weights * slopes)


@triton.jit
def _backward_tile(
    dx, dy, y, columns, is_row, low, high, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    Y_COLUMN: tl.constexpr, DY_COLUMN: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    """Compute gradients of rows held in registers: all columns, or WIDTH from `low` on that include every visible
    one.
    """
    column = tl.arange(0, WIDTH)[None, :]
    if WIDTH < BLOCK:
        column = low + column
    exists, inside = readable(column, columns, is_row, low, high, ROWS, BOUNDS, WIDTH < BLOCK)
    weights, products = _products(y, dy, column, inside, Y_COLUMN, DY_COLUMN, "")
    if WIDTH < BLOCK:
        clear_around(dx, low, columns, is_row, ROWS, BLOCK, WIDTH)
    total = tl.sum(products, 1)[:, None]
    slopes = tl.where(weights == 0, 0.0, scale * (products - weights * total))
    tl.store(dx + column, slopes.to(dx.dtype.element_ty), mask=exists)


@triton.jit
def _backward_chunks(
    dx, dy, y, columns, low, high, scale,
    CHUNK: tl.constexpr, COUNT: tl.constexpr, Y_COLUMN: tl.constexpr, DY_COLUMN: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a row of which registers hold the visible part: COUNT chunks from `low` on, of y and dy
    as they are loaded.
    """
    column = low + tl.arange(0, CHUNK)[None, :]
    y += column * Y_COLUMN
    dy += column * DY_COLUMN
    weights = ()
    slopes = ()
    for n in tl.static_range(COUNT):
        weights = weights + (load_chunk(y, column, high, n, COUNT, CHUNK, Y_COLUMN),)
        slopes = slopes + (load_chunk(dy, column, high, n, COUNT, CHUNK, DY_COLUMN),)
    clear(dx, columns * 0, low, CHUNK)
    clear(dx, low + COUNT * CHUNK, columns, CHUNK)
    totals = tl.zeros((1, CHUNK), tl.float32)
    for n in tl.static_range(COUNT):
        weight = weights[n].to(tl.float32)
        totals += tl.where(weight == 0, 0.0, weight * slopes[n].to(tl.float32))
    total = tl.sum(tl.sum(totals, 1), 0)
    for n in tl.static_range(COUNT):
        weight = as_loaded(weights[n], HIDES).to(tl.float32)
        slope = as_loaded(slopes[n], HIDES).to(tl.float32)
        slope = tl.where(weight == 0, 0.0, scale * (weight * (slope - total)))
        store_chunk(dx + column, column, columns, slope, n, COUNT, CHUNK)


@triton.jit
def _backward_long(
    dx, dy, y, columns, low, high, scale,
    CHUNK: tl.constexpr, Y_COLUMN: tl.constexpr, DY_COLUMN: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a row too long for registers: first the sum of the products, then the result."""
    start, stop, n_chunks = chunks_to_read(columns, low, high, CHUNK, BOUNDS)
    covered = start + n_chunks * CHUNK
    clear(dx, columns * 0, start, CHUNK)
    clear(dx, covered, columns, CHUNK)
    totals = tl.zeros((1, CHUNK), tl.float32)
    for chunk in range(start, stop, CHUNK):
        column = chunk + tl.arange(0, CHUNK)[None, :]
        _exists, inside = readable(column, columns, True, low, high, 1, BOUNDS, True)
        weights, products = _products(y, dy, column, inside, Y_COLUMN, DY_COLUMN, "")
        totals += products
    total = tl.sum(tl.sum(totals, 1), 0)
    for chunk in range(start, stop, CHUNK):
        column = chunk + tl.arange(0, CHUNK)[None, :]
        exists, inside = readable(column, columns, True, low, high, 1, BOUNDS, True)
        weights, products = _products(y, dy, column, inside, Y_COLUMN, DY_COLUMN, "evict_first")
        slopes = tl.where(weights == 0, 0.0, scale * (products - weights * total))
        tl.store(dx + column, slopes.to(dx.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=NUMBERS)
def backward_kernel(
    dx, dy, y, bounds, scale,
    columns, n_rows, n_inner, n_blocks, n_one,
    dx_row, dx_inner, dx_one, dx_two,
    dy_row, dy_inner, dy_one, dy_two,
    y_row, y_inner, y_one, y_two,
    bounds_row, bounds_inner, bounds_one, bounds_two,
    GRAIN: tl.constexpr, DY_COLUMN: tl.constexpr, Y_COLUMN: tl.constexpr,
    INNER: tl.constexpr, OUTER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HALVINGS: tl.constexpr, CHUNKS: tl.constexpr, LONG: tl.constexpr,
    HIDES: tl.constexpr,
):  # fmt: skip
    """Write dx = scale * (y * dy - y * sum(y * dy)), which is 0 where y is 0."""
    row, is_row, inner, one, two = program_position(n_rows, n_inner, n_blocks, n_one, INNER, OUTER, ROWS)
    columns = columns * GRAIN
    dx += (row * dx_row + inner * dx_inner + one * dx_one + two * dx_two) * GRAIN
    dy += (row * dy_row + inner * dy_inner + one * dy_one + two * dy_two) * GRAIN
    y += (row * y_row + inner * y_inner + one * y_one + two * y_two) * GRAIN
    low = 0
    high = 0
    width = 0
    BOUNDS: tl.constexpr = bounds is not None
    if BOUNDS:
        bounds += row * bounds_row + inner * bounds_inner + one * bounds_one + two * bounds_two
        _first, _end, low, high, width = row_limits(bounds, is_row, ROWS)
    if LONG:
        _backward_long(dx, dy, y, columns, low, high, scale, BLOCK, Y_COLUMN, DY_COLUMN, BOUNDS)
    elif CHUNKS > 0:
        high = tl.minimum(high, columns)
        for n in tl.static_range(1, CHUNKS + 1):
            if is_class(tl.cdiv(width, BLOCK), n):
                _backward_chunks(dx, dy, y, columns, low, high, scale, BLOCK, n, Y_COLUMN, DY_COLUMN, HIDES)
    else:
        for n in tl.static_range(0, HALVINGS + 1):
            if (HALVINGS == 0) | ((width <= BLOCK >> n) & (width > (BLOCK >> (n + 1) if n < HALVINGS else -1))):
                _backward_tile(
                    dx, dy, y, columns, is_row, low, high, scale, ROWS, BLOCK, BLOCK >> n, Y_COLUMN, DY_COLUMN, BOUNDS
                )
