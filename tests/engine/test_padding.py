"""The kernel that writes into padding: on a GPU, by Triton's interpreter (see test_sinks.py), or compiled only."""

from __future__ import annotations

import os

import pytest
import torch
from helpers import compiled_for_hopper

pytest.importorskip("triton")
launch = pytest.importorskip("flexmasks.kernels.padding_kernel")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS_ON = "cpu" if INTERPRETED else "cuda"


@pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="the kernel needs a GPU or Triton's interpreter"
)
@pytest.mark.parametrize("layout", ["tokens", "heads", "part of a row", "lse"])
@pytest.mark.parametrize("counts", [[0, 70], [35, 1], [70, 69], [-1, -1]])
def test_padding_alone_is_written(layout: str, counts: list[int]) -> None:
    """Three rows of 70 tokens, which no program's tokens divide; another row's tokens and other tensors stay."""
    rows, length, heads, size = 3, 70, 5, 1 if layout == "lse" else 24
    memory = torch.randn(rows * length, heads, size + 8, device=KERNELS_ON)
    x = {
        "tokens": memory.clone()[..., :size].contiguous(),
        "heads": memory[..., :size].transpose(0, 1).contiguous().transpose(0, 1),
        "part of a row": memory[..., :size],
        "lse": memory[..., 0].t().contiguous().t()[..., None],
    }[layout]
    for place, count in enumerate(counts):
        want = x.clone()
        written = torch.nan if count < 0 else -torch.inf if layout == "lse" else 0.0  # NaN: sequences are not known
        want.view(rows, length, heads, size)[:, max(0, count) :] = written
        others = memory[..., size:].clone()
        value = -torch.inf if layout == "lse" else 0.0
        launch.hide_padding(x, length, torch.tensor(counts, dtype=torch.int32, device=KERNELS_ON), place, value)
        torch.testing.assert_close(x, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(memory[..., size:], others)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("dtype", "size", "value"), [(torch.bfloat16, 80, 0.0), (torch.float32, 1, -torch.inf)])
def test_it_compiles_for_hopper(dtype: torch.dtype, size: int, value: float) -> None:
    x, counts = torch.empty(1, dtype=dtype), torch.empty(1, dtype=torch.int32)
    constants = 1, value, size, 1 << (size - 1).bit_length(), 32
    compiled_for_hopper(launch.padding_kernel, 4, (x, counts, 1, 1, 1, 1, 1, *constants))
