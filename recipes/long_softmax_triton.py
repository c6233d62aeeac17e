"""Softmax of rows too long for one tile, in Triton: three loops, then two.

A row of 65,536 numbers is read tile by tile. The plain way is three loops, each of which reads the row: the maximum,
the sum of exponentials, the result. The first two loops become one if it keeps the maximum so far and a sum relative to
it: whenever a tile raises the maximum, the sum so far is multiplied by exp(old - new). The row is then read twice
instead of three times. The same step makes flash attention possible.
"""

# %% Without a GPU, Triton's interpreter runs the kernels on CPU tensors. The variable must be set before Triton is
# imported.
from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from torch import Tensor

from _measure import DEVICE, ON_GPU, Row, check, finish, start
from flexmasks.bench.clock import interleaved

LOG2_E = tl.constexpr(math.log2(math.e))  # exp(x) = 2 ** (x * log2 e), and powers of two are one instruction


# %% Three loops. One program has one row. It reads each number three times and writes it once: 16 bytes in float32.
@triton.jit
def three_loops(x_ptr, y_ptr, columns, TILE: tl.constexpr):
    """Compute the maximum, then the sum, then the result."""
    row = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, TILE)

    maximum = tl.full([TILE], -float("inf"), tl.float32)
    for first in range(0, columns, TILE):
        x = tl.load(x_ptr + row + first + offsets, mask=first + offsets < columns, other=-float("inf"))
        maximum = tl.maximum(maximum, x.to(tl.float32))
    top = tl.max(maximum, 0)

    total = tl.zeros([TILE], tl.float32)
    for first in range(0, columns, TILE):
        x = tl.load(x_ptr + row + first + offsets, mask=first + offsets < columns, other=-float("inf"))
        total += tl.exp2((x.to(tl.float32) - top) * LOG2_E)
    scale = 1.0 / tl.sum(total, 0)

    for first in range(0, columns, TILE):
        inside = first + offsets < columns
        x = tl.load(x_ptr + row + first + offsets, mask=inside, other=-float("inf"))
        y = tl.exp2((x.to(tl.float32) - top) * LOG2_E) * scale
        tl.store(y_ptr + row + first + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


# %% Two loops. Each place of the tile keeps its own maximum and sum, which are merged once at the end. If a place has
# met only -inf, the difference -inf - -inf would be NaN: 0 replaces such a maximum, and the sum stays 0.
@triton.jit
def two_loops(x_ptr, y_ptr, columns, TILE: tl.constexpr):
    """Compute the maximum and the sum at once, then the result: 12 bytes for a float32."""
    row = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, TILE)

    maximum = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, columns, TILE):
        x = tl.load(x_ptr + row + first + offsets, mask=first + offsets < columns, other=-float("inf")).to(tl.float32)
        raised = tl.maximum(maximum, x)
        shift = tl.where(raised == -float("inf"), 0.0, raised)
        total = total * tl.exp2((maximum - shift) * LOG2_E) + tl.exp2((x - shift) * LOG2_E)
        maximum = raised
    top = tl.max(maximum, 0)
    shift = tl.where(maximum == -float("inf"), top, maximum)
    scale = 1.0 / tl.sum(total * tl.exp2((shift - top) * LOG2_E), 0)

    for first in range(0, columns, TILE):
        inside = first + offsets < columns
        x = tl.load(x_ptr + row + first + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        y = tl.exp2((x - top) * LOG2_E) * scale
        tl.store(y_ptr + row + first + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def softmax(kernel: triton.JITFunction, x: Tensor, tile: int = 4096) -> Tensor:
    """Return the softmax of each row of x, [rows, columns] and contiguous."""
    y = torch.empty_like(x)
    kernel[(x.shape[0],)](x, y, x.shape[1], TILE=tile, num_warps=8)
    return y


# %% Check against float64, with rows that hold -inf and lengths that no tile divides, then time.
def main() -> None:
    """Check and time both kernels."""
    file = start(__doc__)
    kernels = {"three loops": three_loops, "two loops": two_loops}
    x = torch.randn(4, 1000, device=DEVICE) * 20
    x[0, 0] = 1e4  # its exponential is infinite
    x[1, :900] = -math.inf  # whole tiles weigh nothing
    x[2, 300:] = -math.inf
    for who, kernel in kernels.items():
        check(f"{who}, 4 rows of 1,000 in tiles of 128", softmax(kernel, x, 128), torch.softmax(x.double(), -1))

    x = torch.randn(4, 200, device=DEVICE)  # the sizes of the puzzle: the last of the seven blocks is 8 wide
    for who, kernel in kernels.items():
        check(f"{who}, 4 x 200 in blocks of 32", softmax(kernel, x, 32), torch.softmax(x.double(), -1))

    rows, columns, tile = (4096, 131072, 4096) if ON_GPU else (2, 65536, 4096)
    x = torch.randn(rows, columns, device=DEVICE)
    for who, kernel in kernels.items():
        check(f"{who}, at the size that is timed", softmax(kernel, x, tile), torch.softmax(x, -1))
    calls: dict[str, Callable[[], Tensor]] = {
        "three loops": lambda: softmax(three_loops, x, tile),
        "two loops": lambda: softmax(two_loops, x, tile),
        "torch.softmax": lambda: torch.softmax(x, -1),
    }
    times = interleaved(calls, DEVICE, 7 if ON_GPU else 2)
    table: list[Row] = [
        {
            "x": f"{rows}x{columns} float32",
            "": who,
            "ms": float(f"{ms:.4g}"),
            "TB/s": float(f"{8 * x.numel() / ms / 1e9:.3g}"),
            "against three loops": f"{times['three loops'][0] / ms:.2f} x",
        }
        for who, (ms, _) in times.items()
    ]
    note = "TB/s counts each number read once and written once, 8 bytes; three loops move 16, two loops 12."
    if not ON_GPU:
        note += "\nTriton's interpreter shows that the kernels are right, not how fast they are."
    finish(table, file, note)


if __name__ == "__main__":
    main()
