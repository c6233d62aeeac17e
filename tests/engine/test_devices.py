"""Which backends and options calls get on GPUs that are not here. The library asks for them in `devices._gpu` alone."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import other_gpus
import pytest
import torch
from flex_without_gpu import metal_of
from helpers import SHARED_MEMORY, is_turn, on_gpu_of
from other_devices import device_elsewhere, numbers
from torch import Tensor

from flexmasks import (
    attention,
    block_mask,
    compat,
    devices,
    get_mask,
    get_score,
    masked_softmax,
    paged_attention,
    pages,
)
from flexmasks.backends import cudnn, fa4_package, flex, flex_kernels, kernel_tiles
from flexmasks.backends.call import Call
from flexmasks.backends.flex_invariant import fixed_options
from flexmasks.backends.kernel_tiles import NO_READS, Reads
from flexmasks.backends.table import choose, is_not_here
from flexmasks.backends.tiles_operator import in_another_thread
from flexmasks.blocks.lists import as_kernels_read, lists_of, made_of
from flexmasks.kernels import direct
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.sizes import block_size_for
from flexmasks.request import Request
from flexmasks.road import plan_call
from flexmasks.spec.parameters import Size

CUDA = torch.device("cuda", 0)
_SOURCES = ("get_device_capability", "get_device_properties", "is_available")


def _call(kind: str, mask: Any = "causal", needs_grad: bool = False, **given: Any) -> Call:
    """Return a call on a kind of device that is not here."""
    queries, size, dtype = given.pop("queries", 300), given.pop("size", 64), given.pop("dtype", torch.float16)
    q = torch.zeros(2, 4, queries, size, dtype=dtype, requires_grad=needs_grad)
    k = torch.zeros(2, 4, 300, size, dtype=dtype, requires_grad=needs_grad)
    call = plan_call(q, k, k, Request(mask, params={}, q_offset="last", **given)).call
    there = [x._replace(device=torch.device(kind, 0)) for x in (call.q, call.k, call.v)]
    return replace(call, q=there[0], k=there[1], v=there[2])


@pytest.fixture(autouse=True)
def _planned_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are planned on a CPU, where users' masks go as data."""
    monkeypatch.setattr(MaskPlan, "reads_data_as_fast", False)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 and cuDNN's package are installed."""
    monkeypatch.setattr(fa4_package, "why_missing", lambda: "")
    monkeypatch.setattr(fa4_package, "fits_tiles", lambda: True)
    for module in (fa4_package, cudnn):
        monkeypatch.setattr(module, "_import_failures", [])
    monkeypatch.setattr(cudnn, "_why_missing", lambda: "")


_MASKS: dict[str, Callable[[], Any]] = {
    "causal": lambda: get_mask("causal"),
    "sliding window": lambda: get_mask("sliding_window", window=9),
    "documents": lambda: get_mask("causal") & get_mask("document", document_ids=torch.arange(300) // 99),
    "own": lambda: get_mask(lambda b, h, q, kv: q % 3 >= kv % 4),
}


# --- the one question ---


def test_one_file_asks() -> None:
    questions = re.compile(r"get_device_capability|version\.hip|shared_memory_per_block")
    package = Path(devices.__file__).parent
    asking = {file.name for file in package.rglob("*.py") if questions.search(file.read_text(encoding="utf-8"))}
    assert asking == {"devices.py"}


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_torch_is_asked(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's architectures have numbers of their own: gfx90a is 9.0, and gets nothing of a Hopper GPU's."""
    properties = SimpleNamespace(shared_memory_per_block_optin=232_448)
    for name, answer in zip(_SOURCES, ((9, 0), properties, True), strict=True):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert devices.nvidia_capability(CUDA) == (None if hip else (9, 0))
    assert devices.nvidia_major(CUDA) == (0 if hip else 9)
    assert devices.runs_triton(CUDA)
    assert devices.runs_own_kernels(CUDA) == (hip is None)
    for other in map(torch.device, ("cpu", "mps", "xpu", "meta")):
        assert devices.nvidia_capability(other) is None
        assert not devices.runs_triton(other)


def test_without_a_gpu_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in _SOURCES[:2]:
        monkeypatch.setattr(torch.cuda, name, None)
    assert devices.nvidia_capability(CUDA) is None
    assert (devices.shared_memory(CUDA), devices.why_no_own_kernels(CUDA)) == (devices.HOPPER, "")


def test_each_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine with two GPUs that differ, and what stands for other ones later."""
    properties = SimpleNamespace(shared_memory_per_block_optin=65_536)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for known in ([(9, 0), (7, 5)], [(8, 6), (12, 0)]):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=known: of[device.index])
        assert [devices.nvidia_capability(torch.device("cuda", n)) for n in (0, 1)] == known


# --- NVIDIA's ---


def test_options_of_hopper_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is chosen for the GPUs on which it was measured; a change of it needs a measurement."""
    on_gpu_of(monkeypatch, (9, 0))
    monkeypatch.setattr(kernel_tiles, "float32_is_exact", lambda: True)
    dtypes, others = (torch.float16, torch.bfloat16, torch.float32), (0, 8, 72)
    blocks = (128, 128), (256, 128), (128, 64), (64, 64)
    reads = (0, False), (4, False), (4, True), (12, True)
    rows = [
        (str(dtype), size, v_size, block, of, kernel_tiles._options(dtype, CUDA, (size, v_size or size), block, of))
        for dtype in dtypes
        for size, v_size, block, of in itertools.product(range(8, 521, 8), others, blocks, reads)
    ]
    found = hashlib.sha256(repr(rows).encode()).hexdigest()
    assert found == "6a077ce286d0a72cdd941f7750454730667e4cdb78db35f97c604ad487d77656"
    half = dict(kernel_tiles._options(torch.bfloat16, CUDA, (128, 128), (128, 128), (0, False)))
    assert list(half.values()) == [64, 64, 4, 3, 64, 128, 128, 64, 8, 3]


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.usefixtures("packages")
def test_backends_of_nvidia(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu_of(monkeypatch, capability)
    able = {b.name for b in choose(_call("cuda", needs_grad=True, dtype=torch.bfloat16))[0]}
    major = capability[0]
    assert ("fa4" in able) == (major >= 9)
    assert ("flex_flash" in able) == (major in (9, 10, 11))
    assert ("cudnn" in able) == (capability in ((9, 0), (10, 0), (10, 3)))
    assert ("flex" in able) == ("short" in able) == (major >= 8)
    assert {"sdpa", "reference"} <= able
    assert block_size_for(Size(1, 1, 300, 300, CUDA)) == ((256, 128) if major in (10, 11) else (128, 128))


_JOBS = other_gpus.all_jobs()


@pytest.mark.slow
@pytest.mark.parametrize("job", [job for n, job in enumerate(_JOBS) if is_turn(n, len(_JOBS))], ids=str)
def test_kernels_fit(job: other_gpus.Job) -> None:
    """One of those that `tests/other_gpus.py` compiles, another one each day."""
    pytest.importorskip("triton")
    for row in other_gpus.rows_of(job, machine_code=False):
        assert row["shared"] <= row["limit"] == SHARED_MEMORY[job.target], row


def test_compiled_kernels_fit() -> None:
    """The committed table holds each kernel for each kind of GPU, and all fit."""
    pytest.importorskip("triton")
    rows = json.loads(other_gpus.TABLE.read_text())["rows"]
    compiled = {tuple(row[name] for name in _JOBS[0].row) for row in rows}
    assert [job for job in _JOBS if other_gpus.has_kernel(job) != (tuple(job.row.values()) in compiled)] == []
    for row in rows:
        limit = SHARED_MEMORY[tuple(map(int, row["target"].split(".")))]  # type: ignore[index]
        assert row["shared"] <= row["limit"] == limit, row


def test_tiles_of_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none fits, tangents are computed by slices."""
    tangent_kernel = pytest.importorskip("flexmasks.kernels.tangent_kernel")
    for capability, dtype, size in itertools.product(SHARED_MEMORY, (torch.bfloat16, torch.float32), (64, 128, 256)):
        on_gpu_of(monkeypatch, capability)
        x = torch.empty(1, 1, 1, size, dtype=dtype)
        is_wide = dtype == torch.float32 and size > (64 if SHARED_MEMORY[capability] < devices.LITTLE_MEMORY else 128)
        assert (tangent_kernel.tiles_for(x, x) is None) == is_wide


# --- AMD's ---


@pytest.mark.parametrize("name", _MASKS)
@pytest.mark.parametrize(("queries", "needs_grad"), [(300, True), (300, False), (1, False)])
@pytest.mark.usefixtures("packages")
def test_backends_of_amd(name: str, queries: int, needs_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu_of(monkeypatch, None)
    able, reasons = choose(_call("cuda", _MASKS[name](), needs_grad, queries=queries, dtype=torch.bfloat16))
    assert {"flex", "reference"} <= {b.name for b in able} <= {"flex", "sdpa", "reference"}
    assert reasons["fa4"] == reasons["flex_flash"] == "it runs on GPUs of NVIDIA only"
    assert reasons["cudnn"] == "it needs compute capability 9.0, 10.0 or 10.3"
    for own in ("decode", "short"):
        assert reasons[own] == "it does not run on AMD GPUs: its kernels are written for NVIDIA's"
        assert is_not_here(reasons[own])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_amd_gets_no_tiles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own configurations decide, for CDNA and RDNA."""
    on_gpu_of(monkeypatch, None)
    assert block_size_for(Size(1, 1, 300, 300, CUDA)) == (128, 128)
    for size, reads in itertools.product((16, 64, 128, 192, 256, 512), (NO_READS, Reads(4, True), Reads(12, True))):
        call = _call("cuda", size=size, dtype=dtype)
        options = flex.options(call.q, call.k, call.v, None, None, (128, 128), reads)
        assert options == {"BACKEND": "TRITON"}
        assert not [n for n in fixed_options(call.q, call.v, (128, 128), reads) if n.startswith(("fwd_", "bwd_"))]


def test_softmax_of_amd_is_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the softmax hold PTX."""
    x = SimpleNamespace(dtype=torch.float16, device=CUDA)
    for capability in SHARED_MEMORY:
        on_gpu_of(monkeypatch, capability)
        assert direct.is_for_triton(x) == (capability >= (8, 0))  # type: ignore[arg-type]
    on_gpu_of(monkeypatch, None)
    assert not direct.is_for_triton(x)  # type: ignore[arg-type]


# --- Intel's and Apple's ---


@pytest.mark.parametrize("of_arc", [False, True])
def test_which_have_float64(of_arc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=not of_arc))
    monkeypatch.setattr(devices, "_intels_has_float64", devices._intels_has_float64.__wrapped__)
    has = {kind: devices.has_float64(torch.device(kind)) for kind in ("cpu", "cuda", "xpu", "mps")}
    assert has == {"cpu": True, "cuda": True, "xpu": not of_arc, "mps": False}


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose flex_attention runs on MPS, too."""
    monkeypatch.setattr(compat, "FLEX_RUNS_ON", {"cpu", "cuda", "xpu", "mps"})


def _able(call: Call) -> list[str]:
    return [b.name for b in choose(call)[0]]


@pytest.mark.parametrize("name", _MASKS)
@pytest.mark.usefixtures("newest")
def test_backends_of_intel(name: str) -> None:
    by_sdpa = ["sdpa"] * (name == "causal")
    assert _able(_call("xpu", _MASKS[name]())) == [*by_sdpa, "flex", "reference"]
    assert _able(_call("xpu", _MASKS[name](), return_lse=True)) == ["flex", "reference"]
    able, reasons = choose(call := _call("xpu", _MASKS[name](), needs_grad=True))
    assert [b.name for b in able] == [*by_sdpa, "reference"]
    assert reasons["flex"] == "on xpu it runs forward passes only"
    assert flex.options(call.q, call.k, call.v, None, None, (128, 128)) == {"BACKEND": "TRITON"}


@pytest.mark.parametrize("name", _MASKS)
@pytest.mark.usefixtures("newest")
def test_backends_of_apple(name: str) -> None:
    """Metal kernels compute all numbers in single precision, and take no masks as data."""
    call = _call("mps", _MASKS[name]())
    able, reasons = choose(call)
    by_flex = name in ("causal", "sliding window", "own")
    assert [b.name for b in able] == ["flex"] * by_flex + ["reference"]
    assert by_flex or reasons["flex"].startswith("Metal kernels compute whole numbers in single precision")
    assert flex.options(call.q, call.k, call.v, None, None, (128, 128)) == {}
    assert _able(_call("mps", _MASKS[name](), needs_grad=True)) == ["reference"]
    assert _able(_call("mps", _MASKS[name](), return_lse=True)) == ["reference"]
    assert _able(_call("mps", get_mask("full"), needs_grad=True)) == ["sdpa", "reference"]


def test_old_torch_has_no_flex_on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "FLEX_RUNS_ON", {"cpu", "cuda", "xpu"})
    able, reasons = choose(_call("mps"))
    assert [b.name for b in able] == ["reference"]
    assert reasons["flex"] == "it does not run on mps: this torch's flex_attention does not"


@pytest.mark.parametrize("kind", ["xpu", "mps", "npu"])
def test_this_torch_says_the_same(kind: str) -> None:
    """What compat says of devices is what torch checks."""
    from torch.nn.attention import flex_attention

    x: Any = SimpleNamespace(device=SimpleNamespace(type=kind), requires_grad=False)
    try:
        flex_attention._validate_device(x, x, x)
        takes = True
    except ValueError:
        takes = False
    assert (kind in compat.FLEX_RUNS_ON) == takes


def _beyond(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q * 70_000 >= kv * 69_999


def _by_truth(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.where((q & 6).bool(), score, score - 1.0)


_WRONG_ON_METAL: list[tuple[dict[str, Any], str]] = [
    ({"mask": _beyond}, "may be beyond 2**24"),
    ({"score": _by_truth}, "leave numbers as they are"),
    ({"mask": lambda b, h, q, kv: (q & 6).bool() | (q == kv)}, "take no mask as data"),
]


@pytest.mark.parametrize(("given", "why"), _WRONG_ON_METAL)
@pytest.mark.usefixtures("newest")
def test_what_metal_gets_wrong(given: dict[str, Any], why: str) -> None:
    able, reasons = choose(_call("mps", **given))
    assert [b.name for b in able] == ["reference"]
    assert why in reasons["flex"]
    assert "flex" in _able(_call("xpu", **given))


@pytest.mark.slow
@pytest.mark.skipif("mps" not in compat.FLEX_RUNS_ON, reason="torch's flex_attention does not run on MPS")
def test_source_for_metal() -> None:
    """Torch makes a kernel of library functions, and of the change by which NaN are seen. Data are nothing for it."""
    call: Any = _call("mps", get_mask("sliding_window", window=9), score=get_score("alibi", slopes=torch.ones(4)))
    score_mod, of_score = flex._with_inputs(flex_kernels._as_stored(call.score.function()))
    source = metal_of(64, torch.float16, (score_mod, of_score, *flex._with_inputs(call.mask.function())))
    assert "kernel void" in source
    assert " = INFINITY;" in source
    words = torch.zeros(40, dtype=torch.int32)
    bits = flex._with_inputs(lambda b, h, q, kv: (words[kv // 32] >> (kv % 32)) & 1 != 0)
    with pytest.raises(Exception, match="does not support op"):
        metal_of(64, torch.float16, (score_mod, of_score, *bits))


@pytest.mark.usefixtures("newest")
def test_metal_takes_numbers_that_it_gets_right() -> None:
    assert _able(_call("mps", score=get_score("alibi", slopes=torch.ones(4)))) == ["flex", "reference"]
    assert _able(_call("mps", lambda b, h, q, kv: q * 50_000 >= kv * 49_999)) == ["flex", "reference"]


# --- calls with numbers that are elsewhere ---


_TABLES: dict[str, Callable[..., dict[str, Any]]] = {
    "ssmax": lambda there: {"scales": there(torch.rand(4))},
    "kerple": lambda there: {"scales": there(torch.rand(4)), "rates": there(torch.rand(4))},
    "sandwich": lambda there: {},
    "long_temperature": lambda there: {"floor": 100, "strength": there(torch.tensor(0.5))},
}


def _results(there: Callable[..., Tensor], score: str | None) -> list[Tensor]:
    """Return output, lse and gradients of a call of attention, and a softmax."""
    torch.manual_seed(0)
    q, k, v = (there(torch.randn(2, 4, 300, 16), True) for _ in range(3))
    mask = get_mask("causal") & get_mask("document", document_ids=there(torch.arange(300) // 99))
    change = None if score is None else get_score(score, **_TABLES[score](there))
    out, lse = attention(q, k, v, mask=mask, score=change, return_lse=True)
    (out.sin().sum() + lse.sin().sum()).backward()
    rows = masked_softmax(there(torch.rand(1, 1, 300, 300)), mask=mask)
    return [out.detach(), lse.detach(), *(cast(Tensor, x.grad) for x in (q, k, v)), rows]


@pytest.mark.parametrize("score", [None, *_TABLES])
@pytest.mark.parametrize("kind", ["mps", "xpu", "cuda"])
def test_calls_elsewhere(kind: str, score: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's GPUs, and some of Intel's, have no float64, and an old one of NVIDIA's no Triton: torch's operations give
    the same numbers there.
    """
    on_gpu_of(monkeypatch, (7, 5))
    monkeypatch.setattr(devices, "_intels_has_float64", lambda device: False)
    want = _results(lambda x, learns=False: x.requires_grad_(learns), score)
    with device_elsewhere(kind, has_float64=kind == "cuda") as there:
        for x, y in zip(_results(there, score), want, strict=True):
            assert x.device.type == kind
            torch.testing.assert_close(numbers(x), y, atol=1e-5, rtol=1e-5)


def test_lists_of_blocks_of_intel() -> None:
    """torch's Triton kernels read lists of heads that are expanded wrongly, also for Intel's GPUs."""
    with device_elsewhere("xpu", has_float64=True):
        given = block_mask("causal", 300, device="xpu")
        lists = [None if t is None else t.expand(2, 4, *t.shape[2:]) for t in lists_of(given)]
        read = as_kernels_read(made_of(given.seq_lengths, lists, given.BLOCK_SIZE, given.mask_mod))
        assert all(t is None or t.is_contiguous() for t in lists_of(read))


def test_a_score_that_may_read_wrong_memory() -> None:
    """Only for a CPU does torch's kernel know negative indices."""
    table = torch.zeros(300)
    for kind in ("cpu", "cuda", "xpu"):
        reasons = choose(_call(kind, score=lambda score, b, h, q, kv: score + table[q - kv]))[1]
        assert ("negative index" in reasons.get("flex", "")) == (kind != "cpu")


@pytest.mark.parametrize(("capability", "keys"), [((7, 5), 64), ((8, 6), 160)])
def test_pages_are_copied_without_triton(
    capability: tuple[int, int], keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool has the keys of all sequences, which kernels skip by blocks."""
    lengths: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Any:
        lengths.append(k.shape[2])
        return q, None

    monkeypatch.setattr(pages, "attend", attend)
    on_gpu_of(monkeypatch, capability)
    with device_elsewhere("cuda", has_float64=True) as there:
        q, cache = there(torch.rand(2, 2, 16, 8)), there(torch.rand(10, 16, 2, 8))
        table, lens = there(torch.arange(8).view(2, 4)), there(torch.tensor([50, 60]))
        paged_attention(q, cache, cache, table, lens, backend="reference")
    assert lengths == [keys]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_another_thread_has_the_stream(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has a stream of its own as the current one."""
    streams, current = getattr(torch, kind), []
    monkeypatch.setattr(streams, "current_stream", lambda device: f"that of {device}")

    @contextlib.contextmanager
    def stream(name: str) -> Iterator[None]:
        current.append(name)
        yield
        current.pop()

    monkeypatch.setattr(streams, "stream", stream)
    assert in_another_thread(lambda: [*current], torch.device(kind, 1)) == [f"that of {kind}:1"]
    assert in_another_thread(lambda: [*current], torch.device("cpu")) == []
