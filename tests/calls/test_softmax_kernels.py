"""The softmax kernels against a float64 oracle: on a GPU, or with TRITON_INTERPRET=1 by Triton's interpreter.

The interpreter must be chosen before Triton is imported. Hence test_softmax.py runs this file in a process of its own.
The interpreter takes about 10 ms for each chunk of a row, whatever its width: short tests have few rows.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import TOLERANCE, assembly, error, one_in
from softmax_oracle import softmax
from torch import Tensor

triton = pytest.importorskip("triton")
launch = pytest.importorskip("flexmasks.kernels.softmax_launch")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
late = [pytest.mark.campaign] if INTERPRETED else []  # the interpreter is slow
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [1, 2, 15, 16, 17, 127, 128, 1000, 1001, 2048, 4097, 16384, 40000]
# Each length is tried with one dtype, and with two if half precision needs another configuration. Campaigns try all.
SHORT = {
    torch.float32: [1, 2, 15, 16, 17, 127, 128, 1000, 1001, 2048, 4097],
    torch.float16: [16, 1001, 40000],
    torch.bfloat16: [1, 127, 2048],
}
CASES = [
    pytest.param(n, dtype, marks=() if n in SHORT[dtype] else pytest.mark.campaign) for n in LENGTHS for dtype in DTYPES
]
NAN = math.nan

# The interpreter computes with NumPy, which warns of inf - inf and similar operations.
runs_kernels = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu


def seen(bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, columns: int) -> Tensor:
    """Return the places that the kernels' arguments make visible, [..., columns]."""
    column = torch.arange(columns)
    places = torch.ones(columns, dtype=torch.bool)
    if bounds is not None:
        places = places & (column >= bounds[..., :1]) & (column < bounds[..., 1:])
    if bits is not None:
        places = places & (bits[..., column // 32].long() >> (column % 32) & 1).bool()
    if mask is not None:
        places = places & (mask.bool() if visible else ~mask.bool())
    return places


# --- cases ---


def random_bounds(shape: tuple[int, ...], columns: int) -> Tensor:
    """Return bounds of all widths; the first row sees nothing, the last row everything."""
    first = torch.randint(0, columns, shape)
    width = (torch.rand(shape) ** 3 * (columns - first + 1)).long()
    bounds = torch.stack([first, (first + width).clamp(max=columns)], -1).int()
    bounds.view(-1, 2)[0] = 0
    bounds.view(-1, 2)[-1] = torch.tensor([0, columns])
    return bounds


def random_bits(bounds: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return bits with holes inside the bounds, and the bounds of what the bits leave visible."""
    words = torch.randint(-(2**31), 2**31, (*bounds.shape[:-1], -(-columns // 32)), dtype=torch.int64).int()
    visible = seen(bounds, words, None, False, columns)
    end = torch.where(visible, torch.arange(1, columns + 1), 0).amax(-1)
    first = torch.where(visible, torch.arange(columns), columns).amin(-1).minimum(end)
    place = torch.arange(columns)
    clean = torch.zeros(*words.shape[:-1], words.shape[-1] * 32, dtype=torch.int64)
    clean[..., :columns] = visible.long() << (place % 32)
    packed = clean.view(*words.shape, 32).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int(), torch.stack([first, end], -1).int()


@contextmanager
def buffers_of_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill new tensors with NaN, which shows the places that no kernel wrote."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, NAN, **options))
        yield


def on(device: str, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.to(device) for t in tensors]


def check(
    x: Tensor,
    bounds: Tensor | None = None,
    bits: Tensor | None = None,
    mask: Tensor | None = None,
    visible: bool = False,
    scale: float = 0.7,
    dy: Tensor | None = None,
) -> None:
    """Check forward and backward against the oracle, with NaN and inf in all hidden places."""
    places = seen(bounds, bits, mask, visible, x.shape[-1]).expand(x.shape)
    if x.is_contiguous():
        x = torch.where(places, x, torch.tensor([NAN, math.inf, -math.inf], dtype=x.dtype)[torch.randint(3, x.shape)])
    want = softmax(x, places, scale, dy if dy is not None else (dy := torch.randn(x.shape).to(x.dtype)))
    on_device = on(DEVICE, bounds, bits, mask)
    x_there = x.to(DEVICE) if x.device.type != DEVICE else x
    y = launch.forward(x_there, *on_device, visible, scale)
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    assert torch.all(y.cpu()[~places] == 0)
    assert error(y, want[0], 1e-9) < TOLERANCE[x.dtype]
    near = {torch.float32: (1e-4, 1e-9), torch.float16: (2e-3, 1e-7), torch.bfloat16: (1e-2, 1e-9)}[x.dtype]
    assert torch.allclose(
        y.cpu().double(), want[0], rtol=near[0], atol=near[1]
    )  # check every element, also the smallest
    if dy.is_contiguous():
        dy = torch.where(places, dy, torch.tensor([NAN, math.inf], dtype=x.dtype)[torch.randint(2, x.shape)])
    dx = launch.backward(dy.to(DEVICE), y, on_device[0], scale)
    assert torch.all(dx.cpu()[~places] == 0)
    # The gradient of a single column is 0 but for rounding: errors count in units of the softmax.
    unit = max(1e-9, float(want[0].norm()) / want[0].numel() ** 0.5)
    assert error(dx, want[1], unit) < 2 * TOLERANCE[x.dtype]


@runs_kernels
@pytest.mark.parametrize(("columns", "dtype"), one_in(3, CASES) if INTERPRETED else CASES, ids=str)
def test_lengths(columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (torch.randn(2, 2, 3, columns) * 3).to(dtype)
    bounds = random_bounds((2, 1, 3), columns)
    bits, inner = random_bits(bounds, columns)
    with buffers_of_nan(monkeypatch):
        check(x, bounds)
        check(x, inner, bits, scale=-1.5)
        check(x[:, :1], mask=torch.rand(2, 1, 3, columns) < 0.5)
        if columns < 4000:
            check(x, scale=1.0)


@runs_kernels
@pytest.mark.parametrize("halvings", [0, 1, 2, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_windows(rows: int, halvings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every width, in kernels that halve the columns they hold."""
    use(monkeypatch, launch.Config(1, 512, rows, halvings))
    check_windows(500, monkeypatch)


@runs_kernels
@pytest.mark.parametrize("chunks", [1, *(pytest.param(n, marks=late) for n in (2, 8)), 4])
def test_rows_held_in_chunks(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every width, in kernels that hold the visible part of a row in chunks."""
    use(monkeypatch, launch.Config(1, 512 // chunks, chunks=chunks))
    check_windows(500, monkeypatch)
    check_windows(512, monkeypatch)
    x = torch.randn(6, 512) * 5
    bits, inner = random_bits(random_bounds((6,), 512), 512)
    with buffers_of_nan(monkeypatch):
        check(x, inner, bits, scale=-0.3)
        check(x, inner, mask=torch.rand(6, 512) < 0.5, visible=True)
    check_extremes(512)


def use(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """Make the kernels compute every row in one way."""
    monkeypatch.setattr(launch, "config", lambda *_: config)
    monkeypatch.setattr(launch, "_launches", launch.Launches("of a test"))


def check_windows(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check rows of widths around multiples of 16 and of the columns held."""
    widths = [0, 1, 15, 16, 17, 47, 48, 49, 63, 64, 65, 100, 127, 128, 129, 241, 255, 256, 257, 400, 499, columns]
    starts = torch.tensor([(37 * n) % (columns - w + 1) for n, w in enumerate(widths)])
    bounds = torch.stack([starts, starts + torch.tensor(widths)], -1).int()
    bounds[0] = 0
    with buffers_of_nan(monkeypatch):
        check(torch.randn(len(widths), columns), bounds)


@runs_kernels
@pytest.mark.parametrize("columns", [384, 300])
def test_long_rows(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are read twice, a length that is a multiple of the chunk and one that is not."""
    use(monkeypatch, launch.Config(4, 128, is_long=True))
    x = torch.randn(12, columns) * 5
    bounds = random_bounds((12,), columns)
    bits, inner = random_bits(bounds, columns)
    with buffers_of_nan(monkeypatch):
        check(x[:3])
        check(x, bounds, scale=-0.3)
        check(x[6:], inner[6:], bits[6:])
        check(x[:3], mask=torch.rand(3, columns) < 0.5)


@runs_kernels
@pytest.mark.campaign
@pytest.mark.parametrize("chunk", [64, 128])
def test_long_rows_of_every_kind(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, launch.Config(4, chunk, is_long=True))
    for columns in (300, 384):
        x = torch.randn(1, 2, 12, columns) * 5
        bounds = random_bounds((1, 1, 12), columns)
        bits, inner = random_bits(bounds, columns)
        with buffers_of_nan(monkeypatch):
            check(x)
            check(x, bounds, scale=-0.3)
            check(x, inner, bits)
            check(x, mask=torch.rand(12, columns) < 0.5)
        check_extremes(columns)


@runs_kernels
@pytest.mark.parametrize("columns", [40, 4000, pytest.param(40000, marks=late)])
def test_extremes(columns: int) -> None:
    """Registers hold the short rows whole and the middle ones in chunks; the long rows are read twice."""
    check_extremes(columns)


def check_extremes(columns: int) -> None:
    """Check that rows of -inf, +inf, NaN and the largest numbers give what torch.softmax gives, hidden places 0."""
    x = torch.randn(9, columns)
    x[0] = -math.inf
    x[1, 7] = math.inf
    x[2, 7] = NAN
    x[3] = torch.finfo(torch.float32).max
    x[4] = -torch.finfo(torch.float32).max
    x[5, : columns // 2 + 3] = -math.inf
    x[6] = -1000.0
    x[7, ::2] = torch.finfo(torch.float32).max
    x[8] = NAN
    first = torch.full((9,), 2)
    bounds = torch.stack([first, torch.full((9,), columns - 1)], -1).int()
    bounds[8] = 0
    for scale in (1.0, 0.5, 0.0, -1.0):
        y = launch.forward(x.to(DEVICE), bounds.to(DEVICE), None, None, False, scale).cpu()
        assert torch.all(y[:, :2] == 0)
        assert torch.all(y[:, -1] == 0)
        assert torch.all(y[8] == 0)
        want = torch.softmax(x[:8, 2:-1].double() * scale, -1).float()
        assert torch.allclose(y[:8, 2:-1], want, rtol=1e-5, atol=1e-12, equal_nan=True), scale


@runs_kernels
def test_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any strides, with plans and masks that broadcast to any leading dimensions."""
    base = torch.randn(2, 3, 20, 35)
    bounds = random_bounds((2, 1, 20), 35)
    with buffers_of_nan(monkeypatch):
        check(base.transpose(0, 1).contiguous().transpose(0, 1), bounds)
        check(base[:, :, ::3], bounds[:, :, ::3])
        check(base[..., ::2], random_bounds((20,), 18))
        check(base.transpose(2, 3), random_bounds((2, 3, 35), 20))
        check(base[:1].expand(2, 3, 20, 35), bounds)
        check(base[..., :1].expand(2, 3, 20, 35), bounds)
        check(base[0, 0, 0], random_bounds((), 35))
        check(base[0, 0], mask=torch.rand(35) < 0.5)
        check(base, mask=torch.rand(2, 1, 1, 35) < 0.5)
        check(base, mask=torch.rand(2, 1, 20, 1) < 0.5)
        check(base, mask=torch.rand(3, 20, 35).transpose(0, 1).contiguous().transpose(0, 1) < 0.5, visible=True)
        check(base, mask=(torch.rand(35, 20) < 0.5).t())
        check(base, mask=torch.randint(0, 2, (2, 1, 20, 35), dtype=torch.int64) * 256)
        check(base, bounds, mask=torch.rand(1, 3, 20, 35) < 0.5, visible=True)
        check(base, dy=torch.randn(1, 1, 1, 1).expand(2, 3, 20, 35))
        check(base, dy=torch.randn(2, 3, 35, 20).transpose(2, 3))
        # More dimensions than the kernel knows, none of which merge.
        many = torch.randn(2, 3, 2, 3, 2, 33).permute(4, 2, 0, 3, 1, 5)
        check(many, random_bounds((2, 1, 2, 1, 3), 33))
        check(many, mask=torch.rand(2, 1, 3, 1, 33) < 0.5)


@runs_kernels
@pytest.mark.parametrize("calls", [20 if INTERPRETED else 40, pytest.param(80, marks=pytest.mark.campaign)])
def test_random_calls(calls: int) -> None:
    """Random shapes, broadcasting and arguments."""
    generator = torch.Generator().manual_seed(1)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    for _ in range(calls):
        shape = [pick(1, 2, 3, 5) for _ in range(pick(0, 1, 2, 3, 4))]
        columns = pick(1, 7, 16, 33, 64, 130)
        x = torch.randn(*shape, columns).to(pick(*DTYPES))
        leading = [n if pick(True, False) else 1 for n in shape][pick(0, 0, 1) :]
        bounds = bits = mask = None
        if pick(True, True, False):
            bounds = random_bounds(tuple(leading), columns)
            if pick(True, False):
                bits, bounds = random_bits(bounds, columns)
        if pick(True, False):
            mask = torch.rand(*[n if pick(True, False) else 1 for n in shape], pick(1, columns)) < 0.4
        check(x, bounds, bits, mask, pick(True, False), pick(1.0, 0.3, -2.0))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large")
def test_beyond_2_to_the_31() -> None:
    rows, columns = 2**16 + 3, 2**15 + 16
    x = torch.randn(64, columns, device="cuda").half().repeat(rows // 64 + 1, 1)[:rows]
    assert x.numel() > 2**31
    at = torch.arange(rows, device="cuda")
    bounds = torch.stack([at % 1000, columns - at % 777], -1).int()
    mask = torch.zeros(rows, columns, dtype=torch.bool, device="cuda")
    mask[:, 5000:5100] = True
    picked = torch.tensor([0, 1, 2**15, 2**16 - 1, 2**16, rows - 1])
    for plan, hidden in ((bounds, None), (None, mask)):
        y = launch.forward(x, plan, None, hidden, False, 1.0)
        dx = launch.backward(x, y, plan, 1.0)
        visible = seen(
            None if plan is None else plan[picked].cpu(),
            None,
            None if hidden is None else hidden[picked].cpu(),
            False,
            columns,
        )
        want = softmax(x[picked], visible.expand(len(picked), columns), 1.0, x[picked])
        assert error(y[picked], want[0], 1e-9) < TOLERANCE[torch.float16]
        assert error(dx[picked], want[1], 1e-9) < 2 * TOLERANCE[torch.float16]
        assert bool(y.isfinite().all())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter keeps no launches")
def test_launches_are_kept() -> None:
    """Reuse a kept launch for the same layout, but not for another alignment."""
    launch._launches.clear()
    base = torch.randn(64 * 100 + 8, device="cuda")
    for _ in range(3):
        x = base[: 64 * 100].view(64, 100)
        bounds = random_bounds((64,), 100)
        check(x.cpu(), bounds)
    shifted = base[1 : 64 * 100 + 1].view(64, 100)
    y = launch.forward(shifted, None, None, None, False, 1.0)
    assert torch.allclose(y, torch.softmax(shifted, -1), atol=1e-6)
    kept = len(launch._launches)
    launch.forward(shifted.clone()[:], None, None, None, False, 2.0)
    assert len(launch._launches) == kept + 1  # a second launch, because the copy is aligned


# --- what is compiled ---


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("columns", "dtype"), [(1000, "fp32"), (4096, "bf16"), (1000, "fp16"), (40000, "fp32")])
def test_loads_and_stores_are_wide(columns: int, dtype: str) -> None:
    """Loads and stores take 16 bytes, also for lengths that are no multiple of 16, but for bounds."""
    grain = math.gcd(16, columns)
    shared = {"GRAIN": grain, "INNER": False, "OUTER": 1}
    configs = {n: launch.config(n, columns, {"fp32": 4}.get(dtype, 2), True) for n in ("forward", "backward")}

    def options(kind: str) -> tuple[dict[str, Any], int]:
        chosen = configs[kind]
        more = {"ROWS": chosen.rows, "BLOCK": chosen.block, "HALVINGS": chosen.halvings, "CHUNKS": chosen.chunks}
        return shared | more | {"LONG": chosen.is_long}, chosen.warps

    constants, warps = options("forward")
    constants |= {"MASK_GRAIN": 16, "X_COLUMN": 1, "MASK_COLUMN": 0, "VISIBLE": False, "SIGN": 1}
    constants |= {"bits": None, "mask": None}
    pointer = f"*{dtype}"
    forward = assembly(launch.forward_kernel, {"x": pointer, "y": pointer, "bounds": "*i32"}, constants, warps)
    constants, warps = options("backward")
    constants |= {"DY_COLUMN": 1, "Y_COLUMN": 1, "HIDES": True}
    pointers = {"dx": pointer, "dy": pointer, "y": pointer, "bounds": "*i32"}
    backward = assembly(launch.backward_kernel, pointers, constants, warps)
    copies = 1 + max(max(c.chunks, c.halvings) for c in configs.values())  # of the code that a row may take
    for text in (forward, backward):
        for operation in ("ld", "st"):
            found = re.findall(operation + r"\.global[\w:.]*?(?:\.v(\d))?\.b(\d+)", text)
            widths = [int(count or 1) * int(bits) for count, bits in found]
            assert max(widths) == 128
            # The two bounds are short, apart or together. Rows of NaN read them again, and may write less.
            assert sum(width < 128 for width in widths) <= {"ld": 4, "st": 1}[operation] * copies
            assert widths.count(128) >= 2
