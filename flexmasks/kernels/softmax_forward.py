"""Triton kernel of the masked softmax.

For N elements of s bytes, of which a fraction f is visible, the kernel moves N s (1 + f) bytes: it reads x where x is
visible and writes y. It reads no column before a row's first visible column, nor after its last. Registers hold a row
or its visible part; a row too long for registers is read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexmasks.kernels.softmax_tiles import (
    NUMBERS,
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

_NAN_CHUNK = tl.constexpr(1024)


@triton.jit
def _visible(
    bits, mask, column, inside, first, end,
    MASK_COLUMN: tl.constexpr, BOUNDS: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    visible = inside
    if bits is not None:
        words = tl.load(bits + column // 32, mask=inside, other=0)
        visible = visible & (((words >> (column % 32)) & 1) != 0)
    elif BOUNDS:  # one unsigned comparison for two: columns before `first` become large numbers
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
    x, bits, mask, column, inside, first, end,
    X_COLUMN: tl.constexpr, MASK_COLUMN: tl.constexpr, BOUNDS: tl.constexpr, VISIBLE: tl.constexpr,
    SIGN: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """The scores at `column`, -inf where hidden, and where they are visible. A negative scale changes their sign.
    `inside` limits what is read.
    """
    scores = tl.load(x + column * X_COLUMN, mask=inside, other=0, eviction_policy=POLICY).to(tl.float32)
    visible = _visible(bits, mask, column, inside, first, end, MASK_COLUMN, BOUNDS, VISIBLE)
    if SIGN < 0:
        scores = -scores
    return tl.where(visible, scores, float("-inf")), visible


@triton.jit
def _is_nan_row(row_max, total, first, end, BOUNDS: tl.constexpr):
    """Whether the visible places of a row are NaN: it holds NaN or +inf, or only -inf, and something is visible."""
    is_nan = (total != total) | (row_max == float("-inf"))
    if BOUNDS:
        is_nan = is_nan & (end > first)
    return is_nan


@triton.jit
def _fill_nan(
    y, bounds, bits, mask, columns, start, stop,
    MASK_COLUMN: tl.constexpr, BOUNDS: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    """Write NaN at the visible places of columns start..stop - 1, and 0 at the others. Everything is read again here,
    so that no registers hold it for this rare case.
    """
    first = 0
    end = columns
    if BOUNDS:
        first = tl.load(bounds)
        end = tl.load(bounds + 1)
    for chunk in range(start, stop, _NAN_CHUNK):
        column = chunk + tl.arange(0, _NAN_CHUNK)[None, :]
        exists = (column < columns) & (column < stop)
        visible = _visible(bits, mask, column, exists, first, end, MASK_COLUMN, BOUNDS, VISIBLE)
        values = tl.where(visible, float("nan"), 0.0)
        tl.store(y + column, values.to(y.dtype.element_ty), mask=exists)


@triton.jit
def _forward_tile(
    y, x, bounds, bits, mask, columns, is_row, first, end, low, high, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    X_COLUMN: tl.constexpr, MASK_COLUMN: tl.constexpr,
    BOUNDS: tl.constexpr, VISIBLE: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Compute rows held in registers: all columns, or WIDTH columns from `low` on that include every visible one."""
    start = columns * 0
    column = tl.arange(0, WIDTH)[None, :]
    if WIDTH < BLOCK:
        start = low
        column = low + column
    exists, inside = readable(column, columns, is_row, low, high, ROWS, BOUNDS, WIDTH < BLOCK)
    scores, visible = _scores(
        x, bits, mask, column, inside, first, end, X_COLUMN, MASK_COLUMN, BOUNDS, VISIBLE, SIGN, ""
    )
    if WIDTH < BLOCK:
        clear_around(y, low, columns, is_row, ROWS, BLOCK, WIDTH)
    if ROWS > 1:  # as in torch, a row that holds only -inf becomes NaN
        weights = tl.exp2((scores - tl.max(scores, 1)[:, None]) * scale)
        weights = tl.where(visible, weights * (1.0 / tl.sum(weights, 1)[:, None]), 0.0)
        tl.store(y + column, weights.to(y.dtype.element_ty), mask=exists)
    else:  # hidden weights are 0 already; to select by `visible` again would cost as much as all the rest
        row_max = tl.max(tl.max(scores, 1), 0)
        weights = tl.exp2((scores - tl.where(row_max == float("-inf"), 0.0, row_max)) * scale)
        total = tl.sum(tl.sum(weights, 1), 0)
        if _is_nan_row(row_max, total, first, end, BOUNDS):
            _fill_nan(y, bounds, bits, mask, columns, start, start + WIDTH, MASK_COLUMN, BOUNDS, VISIBLE)
        else:
            weights = weights * tl.where(total == 0, 0.0, 1.0 / total)
            tl.store(y + column, weights.to(y.dtype.element_ty), mask=exists)


@triton.jit
def _forward_chunks(
    y, x, bounds, bits, mask, columns, first, end, low, high, scale,
    CHUNK: tl.constexpr, COUNT: tl.constexpr, X_COLUMN: tl.constexpr, MASK_COLUMN: tl.constexpr,
    VISIBLE: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Compute a row of which registers hold the visible part: COUNT chunks from `low` on, in whose first and last chunk
    alone limits hide columns.
    """
    column = low + tl.arange(0, CHUNK)[None, :]
    x += column * X_COLUMN
    loaded = ()
    for n in tl.static_range(COUNT):
        loaded = loaded + (load_chunk(x, column, high, n, COUNT, CHUNK, X_COLUMN),)
    clear(y, columns * 0, low, CHUNK)
    clear(y, low + COUNT * CHUNK, columns, CHUNK)
    largest = tl.full((1, CHUNK), float("-inf"), tl.float32)
    scores = ()
    for n in tl.static_range(COUNT):
        values = loaded[n].to(tl.float32)
        if SIGN < 0:
            values = -values
        if (n == 0) | (n == COUNT - 1) | (bits is not None) | (mask is not None):
            visible = _visible(
                bits, mask, column + n * CHUNK, column + n * CHUNK < high, first, end, MASK_COLUMN, True, VISIBLE
            )
            values = tl.where(visible, values, float("-inf"))
        largest = tl.maximum(largest, values)
        scores = scores + (values,)
    row_max = tl.max(tl.max(largest, 1), 0)
    finite = tl.where(row_max == float("-inf"), 0.0, row_max)
    totals = tl.zeros((1, CHUNK), tl.float32)
    weights = ()
    for n in tl.static_range(COUNT):
        weight = tl.exp2((scores[n] - finite) * scale)
        totals += weight
        weights = weights + (weight,)
    total = tl.sum(tl.sum(totals, 1), 0)
    if _is_nan_row(row_max, total, first, end, True):
        _fill_nan(y, bounds, bits, mask, columns, low, low + COUNT * CHUNK, MASK_COLUMN, True, VISIBLE)
    else:
        factor = tl.where(total == 0, 0.0, 1.0 / total)
        for n in tl.static_range(COUNT):
            store_chunk(y + column, column, columns, weights[n] * factor, n, COUNT, CHUNK)


@triton.jit
def _forward_long(
    y, x, bounds, bits, mask, columns, first, end, low, high, scale,
    CHUNK: tl.constexpr, X_COLUMN: tl.constexpr, MASK_COLUMN: tl.constexpr,
    BOUNDS: tl.constexpr, VISIBLE: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Compute a row too long for registers. The first pass computes the maximum and the sum, the second pass the
    result. The second pass goes from the last columns to the first, since the cache mostly still holds the last
    columns.
    """
    start, stop, n_chunks = chunks_to_read(columns, low, high, CHUNK, BOUNDS)
    clear(y, columns * 0, start, CHUNK)
    clear(y, start + n_chunks * CHUNK, columns, CHUNK)
    row_max = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for chunk in range(start, stop, CHUNK):
        column = chunk + tl.arange(0, CHUNK)[None, :]
        exists, inside = readable(column, columns, True, low, high, 1, BOUNDS, True)
        scores, _ = _scores(x, bits, mask, column, inside, first, end, X_COLUMN, MASK_COLUMN, BOUNDS, VISIBLE, SIGN, "")
        new = tl.maximum(row_max, tl.max(tl.max(scores, 1), 0))
        finite = tl.where(new == float("-inf"), 0.0, new)  # so far the row may hold only -inf
        weights = tl.exp2((scores - finite) * scale)
        total = total * tl.where(row_max == float("-inf"), 0.0, tl.exp2((row_max - new) * scale))
        total += tl.sum(tl.sum(weights, 1), 0)
        row_max = new
    if _is_nan_row(row_max, total, first, end, BOUNDS):
        _fill_nan(y, bounds, bits, mask, columns, start, start + n_chunks * CHUNK, MASK_COLUMN, BOUNDS, VISIBLE)
    else:
        factor = tl.where(total == 0, 0.0, 1.0 / total)
        finite = tl.where(row_max == float("-inf"), 0.0, row_max)
        for n in range(n_chunks):
            column = start + (n_chunks - 1 - n) * CHUNK + tl.arange(0, CHUNK)[None, :]
            exists, inside = readable(column, columns, True, low, high, 1, BOUNDS, True)
            scores, _ = _scores(
                x, bits, mask, column, inside, first, end, X_COLUMN, MASK_COLUMN, BOUNDS, VISIBLE, SIGN, "evict_first"
            )
            weights = tl.exp2((scores - finite) * scale) * factor
            tl.store(y + column, weights.to(y.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    y, x, bounds, bits, mask, scale,
    columns, n_rows, n_inner, n_blocks, n_one,
    y_row, y_inner, y_one, y_two,
    x_row, x_inner, x_one, x_two,
    bounds_row, bounds_inner, bounds_one, bounds_two,
    bits_row, bits_inner, bits_one, bits_two,
    mask_row, mask_inner, mask_one, mask_two,
    GRAIN: tl.constexpr, MASK_GRAIN: tl.constexpr, X_COLUMN: tl.constexpr, MASK_COLUMN: tl.constexpr,
    INNER: tl.constexpr, OUTER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HALVINGS: tl.constexpr, CHUNKS: tl.constexpr, LONG: tl.constexpr,
    VISIBLE: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Write y = softmax(x * scale) over the visible columns, and 0 elsewhere. The argument `scale` is |scale| *
    log2(e), and SIGN is the sign of the scale.
    """
    row, is_row, inner, one, two = program_position(n_rows, n_inner, n_blocks, n_one, INNER, OUTER, ROWS)
    columns = columns * GRAIN
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
        first, end, low, high, width = row_limits(bounds, is_row, ROWS)
    if bits is not None:
        bits += row * bits_row + inner * bits_inner + one * bits_one + two * bits_two
    if mask is not None:
        mask += (row * mask_row + inner * mask_inner + one * mask_one + two * mask_two) * MASK_GRAIN
    if LONG:
        _forward_long(
            y, x, bounds, bits, mask, columns, first, end, low, high, scale,
            BLOCK, X_COLUMN, MASK_COLUMN, BOUNDS, VISIBLE, SIGN,
        )  # fmt: skip
    elif CHUNKS > 0:
        high = tl.minimum(high, columns)
        for n in tl.static_range(1, CHUNKS + 1):
            if is_class(tl.cdiv(width, BLOCK), n):
                _forward_chunks(
                    y, x, bounds, bits, mask, columns, first, end, low, high, scale,
                    BLOCK, n, X_COLUMN, MASK_COLUMN, VISIBLE, SIGN,
                )  # fmt: skip
    else:
        for n in tl.static_range(0, HALVINGS + 1):
            if (HALVINGS == 0) | ((width <= BLOCK >> n) & (width > (BLOCK >> (n + 1) if n < HALVINGS else -1))):
                _forward_tile(
                    y, x, bounds, bits, mask, columns, is_row, first, end, low, high, scale,
                    ROWS, BLOCK, BLOCK >> n, X_COLUMN, MASK_COLUMN, BOUNDS, VISIBLE, SIGN,
                )  # fmt: skip
