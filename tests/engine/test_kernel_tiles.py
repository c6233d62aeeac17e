"""Tiles of torch's Triton kernels fit into the shared memory of GPUs, for which they are compiled here without one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flex_without_gpu import Functions, compiles_for
from helpers import in_campaigns, on_gpu_of, one_in
from torch import Tensor
from torch._subclasses import FakeTensorMode

import flexmasks
from flexmasks import inside_compile
from flexmasks.backends import flex, kernel_tiles
from flexmasks.backends.call import Operand
from flexmasks.backends.encoded import Encoded
from flexmasks.backends.kernel_tiles import Reads
from flexmasks.backends.operations import bytes_for_pairs
from flexmasks.spec.encoding import encode

LENGTH = 300
HOPPER, SMALL = 232_448, 101_376  # bytes of shared memory
_TABLES = {
    "half": (90, kernel_tiles._HALF, torch.bfloat16, "highest"),
    "float32": (90, kernel_tiles._FLOAT32, torch.float32, "highest"),
    "TF32": (90, kernel_tiles._TF32, torch.float32, "high"),
    "small, half": (86, kernel_tiles._SMALL_HALF, torch.bfloat16, "highest"),
    "small, float32": (86, kernel_tiles._SMALL_FLOAT32, torch.float32, "highest"),
}
_ENTRIES = [
    (name, least, most, n)
    for name, (_, sizes, *_) in _TABLES.items()
    for (least, most), passes in sizes.items()
    for n in range(max(map(len, passes)))
]
_DTYPES = [(torch.bfloat16, "highest"), (torch.float16, "highest"), (torch.float32, "highest"), (torch.float32, "high")]
_SIZES = 16, 64, 80, 128, 192, 256, 320, 512
_BIASES = "none", "dense", "table", "dense and table", "dense, with a dense mask"


@pytest.fixture
def compiled(tmp_path: Path) -> Iterator[Callable[..., list[int]]]:
    """Return a function that compiles kernels and returns their shared memory."""
    pytest.importorskip("triton")
    before = torch.get_float32_matmul_precision()

    def compiled(arch: int, precision: str, *call: Any) -> list[int]:
        torch.set_float32_matmul_precision(precision)
        with compiles_for(arch, tmp_path) as compile_call:
            return compile_call(*call).memory

    yield compiled
    torch.set_float32_matmul_precision(before)


def _unchanged(score: Tensor, *_: Tensor) -> Tensor:
    return score


def _documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, ids: Tensor) -> Tensor:
    return (q >= kv) & (ids[b, q] == ids[b, kv])


def _capped_alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, slopes: Tensor) -> Tensor:
    return 30 * torch.tanh((score + slopes[h] * (kv - q)) / 30)


def _two_biases(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, bias: Tensor, table: Tensor) -> Tensor:
    return score + bias[h, q, kv] + table[h, kv - q + LENGTH]


def _learning(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape, requires_grad=True) for shape in shapes]


_IDS = torch.zeros(1, LENGTH, dtype=torch.int64)
_WITHOUT_PAIRS = _capped_alibi, _learning((4,)), _documents, [_IDS]
_WITH_PAIRS = _two_biases, _learning((4, LENGTH, LENGTH), (4, 2 * LENGTH)), _documents, [_IDS]


def _call_in_graph(size: int, dtype: torch.dtype, biases: str) -> Any:
    """Return a call as graphs of torch.compile see it, on a GPU."""
    mask, score = flexmasks.get_mask("document", document_ids=_IDS), None
    if "mask" in biases:
        mask = flexmasks.get_mask("dense", visible=torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    if "table" in biases:
        score = flexmasks.get_score("relative_bias", table=torch.zeros(4, 2 * LENGTH - 1))
    elif "dense" in biases:
        score = flexmasks.get_score("dense_bias", bias=torch.zeros(1, 4, LENGTH, LENGTH))
    encoded: list[Any] = [None if x is None else encode(x, torch.device("cpu")).values() for x in (mask, score)]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
        q = torch.empty(1, 4, LENGTH, size, dtype=dtype)
        plans = Encoded(encoded[0], score=encoded[1]).plans(q, q)
        return inside_compile._call_of(plans, q, q, q, None, {}, (True, score is not None, False))


def _functions_of(call: Any) -> Functions:
    on_cpu = torch.device("cpu")
    score_mod, of_score = (_unchanged, ()) if call.score is None else flex._with_inputs(call.score.function(on_cpu))
    return score_mod, [x.requires_grad_() for x in of_score], *flex._with_inputs(call.mask.function(on_cpu))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dtype", "precision", "biases"),
    [
        (80, torch.float16, "highest", "dense"),
        *(in_campaigns((size, *kind, biases)) for size in _SIZES for kind in _DTYPES for biases in _BIASES),
    ],
)
def test_kernels_of_graphs_fit(
    size: int,
    dtype: torch.dtype,
    precision: str,
    biases: str,
    compiled: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inside a graph of torch.compile no smaller kernel can be tried."""
    on_gpu_of(monkeypatch, (9, 0))
    monkeypatch.setattr(kernel_tiles, "float32_is_exact", lambda: precision == "highest")
    call = _call_in_graph(size, dtype, biases)
    kernel: Any = flex.kernel(call)
    options = flex.options(call.q, call.k, call.v, None, None, kernel.block_size, kernel.reads)
    assert {"fwd_BLOCK_M", "bwd_BLOCK_M1"} <= options.keys()
    assert max(compiled(90, precision, size, dtype, _functions_of(call), options)) <= HOPPER


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least", "most", "n"), one_in(len(_ENTRIES), _ENTRIES))
def test_memory_of_tiles(name: str, least: int, most: int, n: int, compiled: Callable[..., list[int]]) -> None:
    """It is at most what the tables say, and grows with what is read for pairs."""
    arch, sizes, dtype, precision = _TABLES[name]
    passes = [tiles[min(n, len(tiles) - 1)] for tiles in sizes[least, most]]
    options = {name: value for tiles in passes for name, value in tiles.options.items()}
    size = max(least, (most - 7) // 8 * 8)  # no power of two, where there is one
    for functions, reads in ((_WITHOUT_PAIRS, kernel_tiles.NO_READS), (_WITH_PAIRS, Reads(8, True))):
        for found, tiles in zip(compiled(arch, precision, size, dtype, functions, options), passes, strict=True):
            assert found <= tiles.memory_for(reads)


@pytest.mark.parametrize("memory", [SMALL, 166_912, HOPPER])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiles_fit_by_the_tables(memory: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever functions read: in one stage, nothing of pairs is held."""
    on_gpu_of(monkeypatch, (9, 0) if memory == HOPPER else (8, 6), memory)
    small = kernel_tiles._SMALL_FLOAT32 if dtype == torch.float32 else kernel_tiles._SMALL_HALF
    table = kernel_tiles._table(dtype) if memory == HOPPER else small
    most = 256 if dtype == torch.float32 and memory == SMALL else 512
    for size, count, learns in itertools.product(range(8, most + 1, 8), (1, 2, 4, 8, 12, 20, 40), (False, True)):
        with FakeTensorMode(), torch.device("cuda:0"):
            q = torch.empty(1, 1, 1, size, dtype=dtype)
        chosen = kernel_tiles.chosen_tiles(q, q, (128, 128), Reads(count, learns))
        (both,) = (both for (least, most), both in table.items() if least <= size <= most)
        for tiles, prefix in zip(both, ("fwd", "bwd"), strict=True):
            options = {name: value for name, value in chosen.items() if name.startswith(prefix)}
            fitting = [one.options for one in tiles if one.memory_for(Reads(count, learns)) <= memory]
            last = tiles[-1].options | {f"{prefix}_num_stages": 1}
            assert options == (fitting[0] if fitting else last)


@pytest.mark.parametrize("shape", [(300, 4), (300, 1), (8, 4)], ids=["queries", "heads in groups", "few queries"])
def test_torch_compile_reads_tiles(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a graph they are merged with other options while torch traces."""
    on_gpu_of(monkeypatch, (9, 0))
    length, kv_heads = shape
    with FakeTensorMode(), torch.device("cuda:0"):
        q, k = (Operand.of(torch.empty(1, h, length, 128, dtype=torch.bfloat16)) for h in (4, kv_heads))

    def traced(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x + 1, flex.options(q, k, k, None, None, (128, 128), kernel_tiles.NO_READS)

    _, options = torch.compile(traced, backend="eager", fullgraph=True)(torch.zeros(1))
    assert options == flex.options(q, k, k, None, None, (128, 128), kernel_tiles.NO_READS)
    assert "bwd_BLOCK_M1" in options


_LENGTHS = (2, 4, LENGTH, LENGTH)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda score, b, h, q, kv: score - (q - kv).abs() * torch.ones(4)[h], 0),
        (lambda score, b, h, q, kv: score + torch.ones(4, LENGTH)[h, q] * torch.ones(LENGTH)[kv], 0),
        (lambda score, b, h, q, kv: score + torch.ones(4, LENGTH, LENGTH)[h, q, kv], 4),
        (lambda score, b, h, q, kv: score + torch.ones(2 * LENGTH, dtype=torch.float16)[q - kv + LENGTH], 2),
        (lambda score, b, h, q, kv: score + torch.ones(9)[torch.ones(3, 3).long()[q // 128, kv // 128]], 12),
        (lambda score, b, h, q, kv: torch.where(torch.ones(LENGTH, LENGTH) > 0, score, 0.0)[q, kv], 4),
        (lambda score, b, h, q, kv: score if score.item() > 0 else -score, None),
    ],
    ids=["slopes", "rows and columns", "dense", "table", "table of blocks", "rows", "values"],
)
def test_bytes_that_are_read_for_pairs(function: Callable[..., Tensor], count: int | None) -> None:
    assert bytes_for_pairs(function, torch.device("cpu"), _LENGTHS, is_score=True) == count


def test_unknown_functions_count_as_a_bias_that_learns() -> None:
    """As those which only torch can read inside a graph."""
    call = _call_in_graph(80, torch.float16, "dense")
    assert flex.kernel(call).reads == Reads(4, True)  # type: ignore[attr-defined]
    known = call.score.function
    call.score.function = lambda device: lambda *_: known(device)(*_).item()
    assert flex.kernel(call).reads == kernel_tiles.UNKNOWN_READS  # type: ignore[attr-defined]
    assert flex.KernelInGraph(None, None, False, True, None, (128, 128)).reads == kernel_tiles.UNKNOWN_READS
