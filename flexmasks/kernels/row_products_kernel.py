"""The Triton kernel of `row_products`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmasks.cache import Launches
from flexmasks.kernels.direct import with_rows_together
from flexmasks.kernels.launches import Launch, compiled, layouts_of, names_of_strides, new

_ROWS, _WARPS = 16, 4  # of a program
_launches: Launches[Launch] = Launches("row_products")


# No number is specialized, so that no alignment changes in which order the threads of a row add.
@triton.jit(do_not_specialize=["rows", "heads", "length", *names_of_strides("x y", "b h s")])
def row_products_kernel(
    x, y, out, rows, heads, length, x_b, x_h, x_s, y_b, y_h, y_s,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, h, s = row // length // heads, row // length % heads, row % length
    column = tl.arange(0, WIDTH)[None, :]
    is_inside = (row < rows)[:, None] & (column < SIZE)
    ones = tl.load(x + (b * x_b + h * x_h + s * x_s)[:, None] + column, mask=is_inside, other=0.0).to(tl.float32)
    others = tl.load(y + (b * y_b + h * y_h + s * y_s)[:, None] + column, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(ones * others, 1), mask=row < rows)


def products_of_rows(x: Tensor, y: Tensor) -> Tensor:
    """The sums of the products of the rows of x and y [B, H, S, D], float32 [B, H, S]."""
    x, y = with_rows_together(x, y)
    batch, heads, length, size = x.shape
    rows, out = batch * heads * length, new(x.shape[:3], torch.float32, x.device)
    key = x.device.index, *layouts_of(x, y)
    launch = _launches.get(key)
    if launch is None:
        numbers = rows, heads, length, *x.stride()[:3], *y.stride()[:3]
        constants = size, triton.next_power_of_2(size), _ROWS
        launch = compiled(row_products_kernel, -(-rows // _ROWS), _WARPS, (x, y, out), (), (*numbers, *constants))
        _launches.keep(key, launch)
    launch((x, y, out), ())
    return out
