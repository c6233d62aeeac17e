"""Kernels fit into GPUs with 100 KB of shared memory: compute capability 8.6, 8.9 and 12.x.

No such GPU is needed. Kernels are compiled for one, on any GPU, and their shared memory is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import one_in
from torch import Tensor

from flexmasks.backends import flex, flex_kernels, kernel_tiles

pytestmark = pytest.mark.gpu

MEMORY = 101_376
SIZES = (64, 80, 96, 128, 160, 192, 256)
LENGTH = 1024


@pytest.fixture
def compiled_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let torch compile for a GPU of a compute capability, and run nothing.

    Returns a function of the capability, which returns the list that gets the shared memory of each kernel.
    """
    import torch._inductor.config as config
    import torch._inductor.runtime.triton_heuristics as heuristics
    import triton  # not installed on every system
    from torch._inductor.runtime.hints import DeviceProperties

    found: list[int] = []

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        for tiles in self.configs:
            kernel = self._precompile_config(tiles).kernel
            assert getattr(kernel, "metadata", kernel).target.arch == capability[0] * 10 + capability[1]
            found.append(int(kernel.metadata.shared))

    capability = [9, 0]

    def start(wanted: tuple[int, int]) -> list[int]:
        capability[:] = wanted
        DeviceProperties.create.cache_clear()
        return found

    torch.cuda.current_device()
    triton.runtime.driver.active.get_current_target()  # Triton keeps the function that says which GPU is here
    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):
        if hasattr(config, name):
            monkeypatch.setattr(config, name, False)
    monkeypatch.setattr(config, "compile_threads", 1)
    monkeypatch.setattr(config, "force_disable_caches", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: tuple(capability))
    monkeypatch.setattr(kernel_tiles, "shared_memory", lambda device: MEMORY)
    monkeypatch.setattr(heuristics.CachingAutotuner, "precompile", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(heuristics.CachingAutotuner, "run", compile_only)
    yield start
    torch._dynamo.reset()
    DeviceProperties.create.cache_clear()


def _compile(size: int, dtype: torch.dtype, case: str) -> None:
    """Compile forward and backward pass of a call with the options that the library chooses."""
    ids = torch.zeros(2, LENGTH, dtype=torch.int32, device="cuda")
    table = torch.zeros(4, 2 * LENGTH, device="cuda", requires_grad=True)
    q, k, v = (torch.empty(2, 4, LENGTH, size, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    lists = (
        torch.ones(1, 1, 8, dtype=torch.int32, device="cuda"),
        torch.zeros(1, 1, 8, 8, dtype=torch.int32, device="cuda"),
    )
    of_documents = case in ("documents", "all")

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (ids[b, i] == ids[b, j]) if of_documents else i >= j

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if case in ("soft-cap", "all"):
            score = 30 * torch.tanh(score / 30)
        return score + table[h, i - j + LENGTH] if case in ("learned table", "all") else score

    block_mask = torch.nn.attention.flex_attention.BlockMask((LENGTH, LENGTH), *lists * 4, (128, 128), mask_mod)
    options = flex.options(q, k, v, None, None, (128, 128))
    call = torch.compile(
        lambda: flex_kernels.flex(q, k, v, score_mod, block_mask, None, options, False, ())[0], fullgraph=True
    )
    out = call()
    out.backward(torch.empty_like(out))


def _check(start: Any, capability: tuple[int, int], size: int, dtype: torch.dtype, precision: str, case: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = start(capability)
        _compile(size, dtype, case)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len([n for n in found if n > 8192]) == 2  # the two passes; the other kernels take next to nothing
    assert max(found) <= MEMORY


_PRECISIONS = [(torch.bfloat16, "highest"), (torch.float32, "highest"), (torch.float32, "high")]


@pytest.mark.parametrize(("dtype", "precision", "size"), one_in(5, [(*p, size) for p in _PRECISIONS for size in SIZES]))
def test_kernels_of_torch_fit(compiled_for: Any, size: int, dtype: torch.dtype, precision: str) -> None:
    """With documents, a soft-cap and a learned table at once, each of which takes memory."""
    _check(compiled_for, (8, 6), size, dtype, precision, "all")


@pytest.mark.campaign
@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)])
@pytest.mark.parametrize("case", ["causal", "documents", "soft-cap", "learned table", "all"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "precision"), _PRECISIONS)
def test_kernels_of_torch_fit_everywhere(
    compiled_for: Any, capability: tuple[int, int], case: str, size: int, dtype: torch.dtype, precision: str
) -> None:
    _check(compiled_for, capability, size, dtype, precision, case)
