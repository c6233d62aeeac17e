"""Building blocks of the Triton kernels of the masked softmax: where a program works, and loads, stores and clears of
tiles.

A tile is [rows, columns] of scores. Loads are masked by limits rounded to 16 elements and never by the mask itself,
which would split them into single elements. Column counts come divided by GRAIN, as strides do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexmasks.kernels.launches import names_of_strides

NUMBERS = ["columns", "n_rows", "n_inner", "n_blocks", "n_one"]
NUMBERS += names_of_strides("x y dx dy bounds bits mask", "row inner one two")


@triton.jit
def program_position(
    n_rows, n_inner, n_blocks, n_one, INNER: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """A program's rows, which of them exist, and its indices in up to three dimensions around the rows. The inner one
    changes fastest: programs that share rows of a mask run at the same time, and read the mask once.
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
    row = block.to(tl.int64)
    is_row = True
    if ROWS > 1:
        row = row * ROWS + tl.arange(0, ROWS)[:, None]
        is_row = row < n_rows
    return row, is_row, inner.to(tl.int64), one.to(tl.int64), two.to(tl.int64)


@triton.jit
def row_limits(at, is_row, ROWS: tl.constexpr):
    """The limits of rows: exact, rounded outwards to 16, and the largest width."""
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
def is_class(count, n: tl.constexpr):
    """Whether code for n chunks computes a row of `count` chunks. A row that sees nothing counts as one chunk."""
    return (count == n) | ((n == 1) & (count < 1))


@triton.jit
def load_chunk(at, column, high, n: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr, STRIDE: tl.constexpr):
    """Load chunk n of COUNT, the first of which is at `at`, and the last of which alone may end behind `high`. It is
    read once. The distance is added to the addresses, since sums with `column` would take registers.
    """
    if n == COUNT - 1:
        inside = column + n * CHUNK < high
        return tl.load(at + n * CHUNK * STRIDE, mask=inside, other=0, eviction_policy="evict_first")
    else:
        return tl.load(at + n * CHUNK * STRIDE, eviction_policy="evict_first")


@triton.jit
def store_chunk(at, column, columns, values, n: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Store chunk n of COUNT, the first of which goes to `at`, and the last of which alone may end behind the row."""
    values = values.to(at.dtype.element_ty)
    if n == COUNT - 1:
        tl.store(at + n * CHUNK, values, mask=column + n * CHUNK < columns)
    else:
        tl.store(at + n * CHUNK, values)


@triton.jit
def as_loaded(x, HIDES: tl.constexpr):
    """x, which with HIDES the compiler does not know for x. Otherwise registers keep what was computed of x for its
    second use, such as x in float32, rather than x itself.
    """
    if not HIDES:
        return x
    elif x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@triton.jit
def chunks_to_read(columns, low, high, CHUNK: tl.constexpr, BOUNDS: tl.constexpr):
    if BOUNDS:
        start = low
        stop = high
    else:
        start = columns * 0
        stop = columns
    return start, stop, tl.cdiv(stop - start, CHUNK)


@triton.jit
def readable(column, columns, is_row, low, high, ROWS: tl.constexpr, BOUNDS: tl.constexpr, FROM_LOW: tl.constexpr):
    """Which columns exist, and which of them to read. With FROM_LOW no column is before `low`."""
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
def clear(at, start, stop, CHUNK: tl.constexpr):
    for chunk in range(start, stop, CHUNK):
        column = chunk + tl.arange(0, CHUNK)[None, :]
        tl.store(at + column, tl.zeros((1, CHUNK), at.dtype.element_ty), mask=column < stop)


@triton.jit
def clear_around(at, start, columns, is_row, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write 0 to all columns but start..start + WIDTH - 1."""
    for chunk in tl.static_range(0, BLOCK, WIDTH):
        column = chunk + tl.arange(0, WIDTH)[None, :]
        outside = ((column < start) | (column >= start + WIDTH)) & (column < columns)
        if ROWS > 1:
            outside = outside & is_row
        tl.store(at + column, tl.zeros((ROWS, WIDTH), at.dtype.element_ty), mask=outside)
