"""Kernels fit into GPUs with 100 KB of shared memory: compute capability 8.6, 8.9 and 12.x.

No such GPU is needed. Kernels are compiled for one, on any GPU, and their shared memory is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmasks
from flexmasks.backends import flex, kernel_tiles

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
    call = torch.compile(lambda: flex.flex(q, k, v, score_mod, block_mask, None, options, False)[0], fullgraph=True)
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "precision"), _PRECISIONS)
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


# --- the library's own kernels ---


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Compile each kernel of the library that is launched for compute capability 8.6, too.

    Returns the largest shared memory by the kernel's name.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    found: dict[str, int] = {}
    run = triton.JITFunction.run

    def for_another(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = run(self, *args, **kwargs)
        source, options = (
            made.src,
            {n: v for n, v in made.metadata._asdict().items() if n in ("num_warps", "num_stages")},
        )
        shared = int(triton.compile(source, target=GPUTarget("cuda", 86, 32), options=options).metadata.shared)
        found[self.__name__] = max(shared, found.get(self.__name__, 0))
        return made

    monkeypatch.setattr(triton.JITFunction, "run", for_another)
    flexmasks.clear_caches()
    return found


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("is_biased", [False, True])
def test_dense_kernels_fit(own_kernels: dict[str, int], size: int, is_biased: bool) -> None:
    q, k, v = (torch.randn(1, 2, 200, size, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    table = torch.randn(1, 2, 200, 200, device="cuda")
    score = flexmasks.get_score("dense_bias", bias=table) if is_biased else None
    flexmasks.attention(
        q, k, v, mask=lambda b, h, i, j: (i >= j) & (j % 7 != 3), score=score, backend="dense"
    ).sum().backward()
    assert len(own_kernels) >= 3
    assert max(own_kernels.values()) <= MEMORY, own_kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("heads", [2, 32, 128])
def test_kernels_for_few_queries_fit(own_kernels: dict[str, int], dtype: torch.dtype, size: int, heads: int) -> None:
    q = torch.randn(2, heads, 1, size, dtype=dtype, device="cuda")
    k, v = (torch.randn(2, 1, 3000, size, dtype=dtype, device="cuda") for _ in range(2))
    for mask in ("causal", lambda b, h, i, j: j % 7 != 3):
        flexmasks.attention(q, k, v, mask=mask, q_offset=2999, backend="decode")
    assert own_kernels
    assert max(own_kernels.values()) <= MEMORY, own_kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [1008, 4088, 20_008])
def test_kernels_of_the_softmax_fit(own_kernels: dict[str, int], dtype: torch.dtype, length: int) -> None:
    x = torch.randn(1, 1, 64, length, dtype=dtype, device="cuda", requires_grad=True)
    flexmasks.masked_softmax(x, mask="causal").sum().backward()
    assert own_kernels
    assert max(own_kernels.values()) <= MEMORY, own_kernels
