"""Faults: missing memory, failing backends, broken caches and packages, and processes killed while they write.

The error is clear or the next backend runs the call, and later calls are right.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fresh
import pytest
import torch
from helpers import TOLERANCE, error, in_campaigns, on_gpu_of, torch_says
from torch import Tensor
from torch._dynamo.exc import InternalTorchDynamoError
from torch._inductor.exc import InductorError

import flexmasks
from benchmarks import private_torch
from flexmasks import compat
from flexmasks.backends import call as backends_call
from flexmasks.backends import decode, fa4_package, flex_kernels, forms, sdpa, short, tiles
from flexmasks.pictures.output import write

LENGTH = 160
MISSING = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

pytestmark = pytest.mark.usefixtures("one_thread", "cold")


def _qkv(learns: bool = False) -> list[Tensor]:
    return [torch.randn(1, 2, LENGTH, 16, requires_grad=learns) for _ in range(3)]


def _check(tensors: list[Tensor], call: dict[str, Any]) -> None:
    """Assert that a call is right, with its gradients if the tensors need them."""
    got, want = flexmasks.attention(*tensors, **call), flexmasks.attention(*tensors, **call, backend="reference")
    assert error(got, want.detach()) < TOLERANCE[torch.float32]
    if tensors[0].requires_grad:
        gradients = (torch.autograd.grad(x.square().sum(), tensors) for x in (got, want))
        for x, y in zip(*gradients, strict=True):
            assert error(x, y) < 2 * TOLERANCE[torch.float32]


def _fails(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Exception, at: int = 1) -> Callable[[], int]:
    """Let a function raise at its n-th call, and from then on; return a function that counts its calls."""
    function, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= at:
            raise fault
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    return lambda: calls


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the library's warnings."""
    records = [record for record in caplog.records if record.name == "flexmasks" and record.levelno >= logging.WARNING]
    return [record.getMessage() for record in records]


def _own(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (kv % 7 != 3)


def _cubed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score**3


# --- missing memory ---

# backend, the function that runs out of memory, the call, and whether it learns
OUT_OF_MEMORY: dict[str, tuple[str, Any, str, dict[str, Any], bool]] = {
    "sdpa": ("sdpa", sdpa.F, "scaled_dot_product_attention", {"mask": "causal"}, False),
    "compiled": ("flex", flex_kernels, "_run_compiled", {"mask": "sliding_window", "window": 20}, False),
    "forward": ("reference", tiles.Tiles, "forward", {"mask": "causal", "score": _cubed}, True),
    "backward": ("reference", tiles.Tiles, "backward", {"mask": "causal", "score": _cubed}, True),
    "dense forward": ("short", short.CpuKernel, "forward", {"mask": "causal", "score": "alibi"}, True),
    "dense backward": ("short", short.CpuKernel, "backward", {"mask": "causal", "score": "alibi"}, True),
    "plan": ("flex", compat, "BlockMask", {"mask": "document", "document_ids": torch.arange(LENGTH) // 50}, False),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_missing_memory_is_raised_as_it_is(
    name: str, is_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend, owner, function, call, learns = OUT_OF_MEMORY[name]
    tensors = _qkv(learns)
    monkeypatch.setattr(torch, "compile", _Compiler(MISSING))  # kernels need no compilation here

    def run() -> None:
        out = flexmasks.attention(*tensors, **call)
        if learns:
            torch.autograd.grad(out.sum(), tensors)

    if name == "compiled" or not is_first:
        run()
        run()
    if name == "plan" and not is_first:
        call = call | {"document_ids": call["document_ids"] + 1}
    with monkeypatch.context() as patched:
        calls = _fails(patched, owner, function, MISSING)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
            run()
        assert raised.value is MISSING
        assert calls() == 1  # nothing tried it again, nor another way
    assert _warnings(caplog) == []
    for _ in range(2):
        _check(tensors, call)
    explained = flexmasks.explain(*tensors, **call)
    assert explained.backend == backend
    assert not any("failed before" in reason for reason in explained.others.values())


@pytest.mark.slow
def test_missing_memory_while_torch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps the error; the kernel is compiled again at the next call, and runs fused."""
    import torch._inductor.compile_fx as compiler

    tensors, call = _qkv(), {"mask": _own, "backend": "auto"}
    monkeypatch.setattr(forms, "_is_as_fast", lambda call: False)
    for fault in (MISSING, RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()):
        with monkeypatch.context() as patched, torch._inductor.config.patch(force_disable_caches=True):
            _fails(patched, compiler, "fx_codegen_and_compile", fault)
            with pytest.raises(type(fault)) as raised:
                flexmasks.attention(*tensors, **call)
            assert raised.value is fault
    graphs = private_torch.compiled_graphs()
    del call["backend"]
    _check(tensors, call)
    assert private_torch.compiled_graphs() == graphs + 1
    assert flexmasks.explain(*tensors, **call).backend == "flex"


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "document", "own"])
def test_a_full_gpu(mask: str) -> None:
    """Leave too little memory for a forward pass, and then for a backward pass."""
    q, k, v = (torch.randn(4, 16, 8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    ids = torch.arange(8192, device="cuda") // 3000
    call: dict[str, Any] = {
        "causal": {"mask": "causal"},
        "document": {"mask": "document", "document_ids": ids},
        "own": {"mask": _own},
    }[mask]
    expected = flexmasks.attention(q, k, v, **call)
    want = torch.autograd.grad(expected.sum(), (q, k, v))
    backend = flexmasks.explain(q, k, v, **call).backend

    def fill(left: int) -> list[Tensor]:
        """Take all memory of a limit, so that so many bytes are left."""
        torch.cuda.empty_cache()
        reserved, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(reserved / total)
        taken = []
        with suppress(torch.OutOfMemoryError):  # what is reserved has room between tensors
            while True:
                taken.append(torch.empty(left // 4, device="cuda", dtype=torch.uint8))
        torch.cuda.set_per_process_memory_fraction((reserved + left) / total)
        return taken

    try:
        for _ in range(2):
            ready = flexmasks.attention(q, k, v, **call)
            taken = fill(32 << 20)  # the output takes 64 MiB
            with pytest.raises(torch.OutOfMemoryError):
                flexmasks.attention(q, k, v, **call)
            with pytest.raises(torch.OutOfMemoryError):
                torch.autograd.grad(ready.sum(), (q, k, v))
            taken.clear()
            torch.cuda.set_per_process_memory_fraction(1.0)
            out = flexmasks.attention(q, k, v, **call)
            assert error(out, expected.detach().cpu()) < TOLERANCE[torch.bfloat16]
            for x, y in zip(torch.autograd.grad(out.sum(), (q, k, v)), want, strict=True):
                assert error(x, y.cpu()) < 2 * TOLERANCE[torch.bfloat16]
            assert flexmasks.explain(q, k, v, **call).backend == backend
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# --- backends that fail at run time ---

FAILURES: dict[str, tuple[str, str, Any, str, dict[str, Any]]] = {
    "sdpa": ("sdpa", "short", sdpa.SdpaKernel, "__call__", {"mask": "causal"}),
    "short": ("short", "reference", short.CpuKernel, "__call__", {"mask": "sliding_window", "window": 20}),
    "compiled": ("flex", "reference", flex_kernels, "_run_kernel", {"mask": "sliding_window", "window": 20}),
}


@pytest.mark.parametrize("at", [1, 3], ids=["first call", "later call"])
@pytest.mark.parametrize("name", FAILURES)
def test_the_next_backend_runs_the_call(
    name: str, at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing, next_one, owner, function, call = FAILURES[name]
    learns = name != "compiled"  # with gradients nothing is compiled on a CPU
    tensors, others = _qkv(learns), [x.detach()[:, :1].requires_grad_(learns) for x in _qkv()]
    for _ in range(at - 1):
        _check(tensors, call)
    assert flexmasks.explain(*tensors, **call).backend == failing
    if at > 1:  # kernels that ran are called without a lookup
        owner, function = (owner, function) if learns else (flex_kernels.Runner, "__call__")
    with monkeypatch.context() as patched:
        calls = _fails(patched, owner, function, ValueError("the kernel broke"))
        _check(tensors, call)
        tried = calls()
        assert 1 <= tried <= 2
        _check(tensors, call)
        assert calls() == tried or name == "compiled"
    assert _warnings(caplog) == [
        f"backend '{failing}' failed and is left out for such calls: ValueError: the kernel broke"
    ]
    for _ in range(2):
        _check(tensors, call)
    explained = flexmasks.explain(*tensors, **call)
    assert explained.backend == next_one
    assert explained.others[failing] == "it failed before: ValueError: the kernel broke"
    assert flexmasks.explain(*others, **call).backend == next_one  # the kind knows no number of heads
    assert flexmasks.explain(*(x.detach().half().requires_grad_(learns) for x in tensors), **call).backend == failing
    flexmasks.clear_caches()
    assert flexmasks.explain(*tensors, **call).backend == failing


# --- kernels that torch cannot compile ---

# what torch says of tensors that are one, of code that it cannot lower, and of C++ that it cannot compile
CANNOT_COMPILE: dict[str, Exception] = {
    "dynamo": InternalTorchDynamoError("AssertionError: sources must not be empty for symbol s47"),
    "lowering": InductorError(AssertionError("All the buffers should be in input_buffers"), None),
    "C++": InductorError(RuntimeError("CppCompileError: C++ compile error"), None),
}


class _Compiler:
    """A double of torch.compile for the library's kernels, which are not compiled, and fail at some calls."""

    def __init__(self, fault: Exception, *fault_at: int) -> None:
        self.fault, self.fault_at = fault, fault_at
        self.runs = 0
        self.dynamic: list[bool | None] = []  # of each kernel
        self.compile = torch.compile

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if not function.__name__.startswith("flexmasks_kernel"):
            return self.compile(function, **options)
        self.dynamic.append(options["dynamic"])

        def run(*args: Any) -> Any:
            self.runs += 1
            if self.runs in self.fault_at:
                raise self.fault
            return function(*args)

        return run


def _one(length: int) -> list[Tensor]:
    """Return q, k and v that are one tensor."""
    return [torch.randn(1, 2, length, 16)] * 3


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("name", CANNOT_COMPILE)
@pytest.mark.parametrize(
    "mask", [{"mask": "sink_window", "sinks": 2, "window": 5}, {"mask": "chunked_causal", "chunk": 7}]
)
def test_one_failed_compile_costs_no_backend(
    mask: dict[str, Any], name: str, at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again, from the start, and after a second failure, or where C++ is wrong, for each length alone."""
    compiler = _Compiler(CANNOT_COMPILE[name], at, *([] if name == "C++" else [at + 3]))
    monkeypatch.setattr(torch, "compile", compiler)
    for length in (17, 18, 77, 512):
        _check(_one(length), mask)
        assert flexmasks.explain(*_one(length), **mask).backend == "flex"
    assert compiler.dynamic == [None, False] if name == "C++" else [None, None, False]
    assert not _warnings(caplog)


def test_a_failure_leaves_out_its_own_lengths_and_layouts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", _Compiler(CANNOT_COMPILE["lowering"], 2, 3, 5, 6))
    call = {"mask": "sink_window", "sinks": 2, "window": 5}

    def backends() -> list[str]:
        rows = [torch.randn(1, n, 2, 16).transpose(1, 2) for n in (18, 33)]
        calls = [_one(17), _one(18), _one(33), *([x] * 3 for x in rows)]
        return [flexmasks.explain(*tensors, **call).backend for tensors in calls]

    _check(_one(17), call)
    _check(_one(18), call)  # fails, and again
    assert backends() == ["flex", "reference", "flex", "flex", "flex"]
    _check(_one(17), call)
    _check(_one(33), call)  # so does a second length: torch cannot compile the function
    assert backends() == ["reference", "reference", "reference", "flex", "flex"]
    assert len(_warnings(caplog)) == 2


@pytest.mark.slow
def test_torch_reaches_no_limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Before torch has as many graphs as it keeps for a function, another function takes its place."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile_(*args, **{**options, "backend": "eager"}))
    call = {"mask": "sliding_window", "window": 3}
    with torch._dynamo.config.patch(recompile_limit=2), torch_says(caplog):
        for batch, length in ((2, 33), (1, 40), (2, 33)):
            tensors = [torch.randn(batch, 2, length, 16) for _ in range(3)]
            for threads in (1, 2, 3) if length == 33 else (1, 2):  # torch compiles anew for another number of threads
                torch.set_num_threads(threads)
                _check(tensors, call)
                assert flexmasks.explain(*tensors, **call).backend == "flex"
    assert not [record for record in caplog.records if "recompile_limit" in record.getMessage()]


def test_an_asked_backend_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _qkv()
    with monkeypatch.context() as patched:
        _fails(patched, sdpa.SdpaKernel, "__call__", ValueError("the kernel broke"))
        with pytest.raises(ValueError, match="the kernel broke"):
            flexmasks.attention(*tensors, mask="causal", backend="sdpa")
    assert flexmasks.explain(*tensors, mask="causal").backend == "sdpa"


def test_errors_of_a_users_function_leave_no_backend_out(caplog: pytest.LogCaptureFixture) -> None:
    is_wrong = True

    def score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if is_wrong:
            raise ValueError("a fault of the function")
        return score * 2

    tensors = [x[:, :, :n] for x, n in zip(_qkv(), (4, LENGTH, LENGTH), strict=True)]
    with pytest.raises(ValueError, match="a fault of the function"):
        flexmasks.attention(*tensors, mask="causal", score=score, q_offset=0)
    assert _warnings(caplog) == []
    is_wrong = False
    _check(tensors, {"mask": "causal", "score": score, "q_offset": 0})
    assert flexmasks.explain(*tensors, mask="causal", score=score, q_offset=0).backend == "decode"


@pytest.mark.parametrize("at", [1, 2], ids=["first call", "later call"])
def test_pages_after_a_failure(at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    q, cache = torch.randn(2, 2, 1, 16), torch.randn(9, 32, 2, 16)
    pages, lens = torch.arange(8).view(2, 4), torch.tensor([100, 128])

    def call(**more: Any) -> Tensor:
        given: dict[str, Any] = {"mask": "causal", "q_offset": None, "return_lse": True} | more
        return flexmasks.paged_attention(q, cache, cache, pages, lens, **given)[0]

    want = call(backend="reference")
    with monkeypatch.context() as patched:
        _fails(patched, decode.CpuKernel, "__call__", RuntimeError("the kernel broke"), at)
        for _ in range(3):
            assert error(call(), want) < TOLERANCE[torch.float32]
    (message,) = _warnings(caplog)
    assert "left out for such calls: RuntimeError: the kernel broke" in message
    assert error(call(), want) < TOLERANCE[torch.float32]
    with monkeypatch.context() as patched:
        flexmasks.clear_caches()
        calls = _fails(patched, decode.CpuKernel, "__call__", MISSING)
        with pytest.raises(torch.OutOfMemoryError):
            call()
        assert calls() == 1
    assert error(call(), want) < TOLERANCE[torch.float32]


# --- processes with a broken surrounding ---


def _python(code: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    folders = os.pathsep.join([str(Path(flexmasks.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": folders, "TORCHINDUCTOR_COMPILE_THREADS": "1", **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


_COMPILED = """
    import logging
    import torch
    import flexmasks
    from flexmasks.backends import waiting
    waiting.WORK_BEFORE_COMPILING = 0
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 64, 16)
    call = {"mask": "sliding_window", "window": 9}
    want = flexmasks.attention(q, k, v, backend="reference", **call)
    for _ in range(2):
        assert torch.allclose(flexmasks.attention(q, k, v, **call), want, atol=1e-5)
    print(flexmasks.explain(q, k, v, **call).backend)
"""


@pytest.mark.parametrize("fault", ["truncated", "garbage", "empty"])
@pytest.mark.campaign
def test_a_corrupted_cache_of_compiled_code(fault: str, tmp_path: Path) -> None:
    _check_corrupted(fault, tmp_path)


def _check_corrupted(fault: str, folder: Path) -> None:
    first = _python(_COMPILED, TORCHINDUCTOR_CACHE_DIR=str(folder))
    assert (first.returncode, first.stdout) == (0, "flex\n"), first.stderr
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert any(file.suffix == ".so" for file in files)
    for file in files:
        data = file.read_bytes()
        file.write_bytes({"truncated": data[: len(data) // 2], "garbage": os.urandom(len(data)), "empty": b""}[fault])
    second = _python(_COMPILED, TORCHINDUCTOR_CACHE_DIR=str(folder))
    assert second.returncode == 0, second.stderr
    assert second.stdout in ("flex\n", "short\n")
    if second.stdout == "short\n":
        assert "backend 'flex' failed and is left out for such calls" in second.stderr
        assert "TORCHINDUCTOR_CACHE_DIR" in second.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no folder", pytest.param("read-only", marks=pytest.mark.campaign)])
def test_a_cache_folder_that_cannot_be_written(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.write_text("a file in the folder's place")
    if kind == "read-only":
        place = Path("/sys")  # a file system where nobody makes folders, not even root
        if not place.is_dir():
            pytest.skip("the system has no /sys")
    done = fresh.run(textwrap.dedent(_COMPILED), TORCHINDUCTOR_CACHE_DIR=str(place / "cache"))
    assert (done.returncode, done.stdout) == (0, "short\n"), done.stderr
    assert done.stderr.count("torch's compilers cannot be loaded") == 1
    assert "set TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to writable folders" in done.stderr


# --- flash-attn-4 of another version ---

_FORWARD = (
    f"def _flash_attn_fwd(q, k, v, {', '.join(f'{n}=None' for n in fa4_package._NEEDED['_flash_attn_fwd'])}): 1 / 0\n"
)
_BACKWARD = "def _flash_attn_bwd(*tensors, **arguments): 1 / 0\n"
# the package's __init__.py, its cute/__init__.py and cute/interface.py (None: there is no such file), and the reason
PACKAGES: dict[str, tuple[str, str | None, str | None, str]] = {
    "none": ("", None, None, "the package flash-attn-4 is not installed"),
    "no interface": ("", "", None, "has no flash_attn.cute.interface"),
    "no function": ("", "", _FORWARD, "has no function _flash_attn_bwd"),
    "no argument": ("", "", _FORWARD.replace("page_table=None, ", "") + _BACKWARD, "without page_table"),
    "syntax": ("", "", "def _flash_attn_fwd(:", "cannot be imported: SyntaxError"),
    "broken": ("raise OSError('no libcudart.so.11')", "", "", "cannot be imported: OSError: no libcudart.so.11"),
    "right": ("", "", _FORWARD + _BACKWARD, ""),
}


@pytest.fixture
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Put a package flash_attn into the place of an installed one, and return why it cannot be called."""
    files = PACKAGES[request.param]
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    for name, text in zip(("__init__.py", "cute/__init__.py", "cute/interface.py"), files[:3], strict=True):
        if text is not None:
            (tmp_path / "flash_attn" / name).write_text(text)
    if files[1] is None:
        (tmp_path / "flash_attn" / "cute").rmdir()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    on_gpu_of(monkeypatch, (9, 0))
    monkeypatch.setattr(fa4_package, "_import_failures", [])
    monkeypatch.setenv(fa4_package.KEEPS_KERNELS, "0")  # so that its folder stays as it is
    fa4_package._package.cache_clear()
    yield files[3]
    fa4_package._package.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


def _half_on_cuda() -> Any:
    q = torch.empty(1, 4, 256, 64, dtype=torch.bfloat16, device="meta")
    return SimpleNamespace(q=q, k=q, v=q, on_gpu=True, needs_grad=False)


@pytest.mark.parametrize("state", ["new", "chosen", "not writable", "imported"])
def test_flash_attention_keeps_its_kernels_on_disk(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {}
    if state == "chosen":
        kept = {fa4_package.KERNEL_FOLDER: "elsewhere"}
    environ = {"XDG_CACHE_HOME": str(tmp_path), **kept}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.delitem(sys.modules, "flash_attn.cute.cache_utils", raising=False)
    if state == "not writable":
        (tmp_path / "flexmasks").write_text("a file in the folder's place")
    if state == "imported":
        monkeypatch.setitem(sys.modules, "flash_attn.cute.cache_utils", ModuleType("cache_utils"))
    fa4_package._keep_kernels_on_disk()
    if state == "new":
        folder = tmp_path / "flexmasks" / "flash-attn-4"
        kept = {fa4_package.KEEPS_KERNELS: "1", fa4_package.KERNEL_FOLDER: str(folder)}
        assert folder.stat().st_mode & 0o777 == 0o700
    assert environ == {"XDG_CACHE_HOME": str(tmp_path), **kept}


@pytest.mark.parametrize("package", PACKAGES, indirect=True)
def test_another_flash_attention(package: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        reason = fa4_package.refuses_package(_half_on_cuda())
        assert (package in reason) if package and reason else (reason is None and not package)
    messages = _warnings(caplog)
    is_silent = package in ("", "the package flash-attn-4 is not installed")
    assert messages == ([] if is_silent else [f"{reason}, so other backends run its calls"])
    assert fa4_package.is_installed() == (package == "")
    q = torch.randn(1, 2, 4, 16)  # calls on a CPU do not look at the package
    flexmasks.attention(q, q, q, mask="causal")
    pages, lens = torch.arange(2).view(1, 2), torch.tensor([40])
    cache = torch.randn(2, 32, 2, 16)
    assert flexmasks.paged_attention(q, cache, cache, pages, lens, q_offset=None).shape == q.shape


@pytest.mark.parametrize("package", ["right"], indirect=True)
@pytest.mark.parametrize(
    ("version", "is_right"),
    [
        ("4.0.0b25", False), ("4.0.0b9", False), ("4.0.0b26.dev3", False), ("4.0.0.dev12", False), ("4.0.0a1", False),
        ("4.0.0b26", True), ("4.0.0b36", True), ("4.0.0b100+local", True), ("4.0.0", True), ("4.1.0b1", True),
    ],
)  # fmt: skip
def test_a_flash_attention_with_a_race(
    package: str, version: str, is_right: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before 4.0.0b26 its gradients are garbage in some launches."""
    folder = tmp_path / f"flash_attn_4-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\n")
    reason = fa4_package.refuses_package(_half_on_cuda())
    assert (reason is None) == is_right == fa4_package.is_installed()
    if not is_right:
        assert f"flash-attn-4 {version} may give garbage as gradients: before 4.0.0b26" in str(reason)
        assert _warnings(caplog) == [f"{reason}, so other backends run its calls"]


def test_the_extra_asks_for_a_flash_attention_without_the_race() -> None:
    project = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["flash"] == ["flash-attn-4>=4.0.0b26"]


@pytest.mark.parametrize("package", ["right"], indirect=True)
def test_a_flash_attention_that_fails_at_import(package: str, tmp_path: Path) -> None:
    """The source is as it should be, and importing it fails; later calls know why."""
    interface = tmp_path / "flash_attn" / "cute" / "interface.py"
    interface.write_text(f"{interface.read_text()}\nimport a_library_that_is_missing\n")
    assert fa4_package.refuses_package(_half_on_cuda()) is None
    with pytest.raises(backends_call.Unavailable, match="cannot be imported: ModuleNotFoundError"):
        fa4_package.interface()
    assert "a_library_that_is_missing" in str(fa4_package.refuses_package(_half_on_cuda()))


@pytest.mark.gpu
@pytest.mark.parametrize("package", PACKAGES, indirect=True)
@pytest.mark.parametrize("mask", ["causal", "document"])
def test_calls_beside_another_flash_attention(mask: str, package: str, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = (torch.randn(8, 16, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = torch.arange(4096, device="cuda") // 1000
    call: dict[str, Any] = {"mask": mask} | ({"document_ids": ids} if mask == "document" else {})
    want = flexmasks.attention(q[:1], k[:1], v[:1], backend="reference", **call)
    for _ in range(3):
        assert error(flexmasks.attention(q, k, v, **call)[:1], want.cpu()) < TOLERANCE[torch.bfloat16]
    explained = flexmasks.explain(q, k, v, **call)
    assert explained.backend not in ("fa4", "flex_flash")
    assert package in explained.others["flex_flash"]
    assert len(_warnings(caplog)) <= (0 if "not installed" in package else 2)


# --- processes killed while they write ---

_KILLED = """
    import itertools, os, random, signal, sys, time
    from pathlib import Path
    from benchmarks import results

    folder, way = Path(sys.argv[1]), sys.argv[2]
    if way == "directly":  # as it must not be
        def direct(path, content):
            with Path(path).open("w") as file:
                file.write(content[: len(content) // 2])
                file.flush()
                time.sleep(0.01)
                file.write(content[len(content) // 2 :])

        results.write = direct
    versions = itertools.cycle((0, 1))

    def work():
        first = next(versions)
        row = {f"figure {n}": first + n for n in range(40_000)}
        about = {"benchmark": "test", "machine": {}, "rows": []}
        results.progress = lambda message: None
        results.run_steps(about, {"one": lambda: [row]}, str(folder / "page.html"))

    whole = set()  # a file whose content would stay the same is not written
    for _ in range(2):
        start = time.perf_counter()
        work()
        lasts = time.perf_counter() - start
        whole.add((folder / "page.html").read_bytes())
    assert len(whole) == 2
    torn = 0
    random.seed(0)
    for n in range(int(sys.argv[3])):
        child = os.fork()
        if child == 0:
            while True:
                work()
        time.sleep(lasts * (0.5 + 2 * random.random()))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += (folder / "page.html").read_bytes() not in whole
    print(torn)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork a process")
@pytest.mark.parametrize("kills", [12, in_campaigns(40)])
def test_a_killed_process_leaves_the_old_file(kills: int, tmp_path: Path) -> None:
    done = fresh.run(textwrap.dedent(_KILLED), str(tmp_path), "whole", str(kills))
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert {file.name for file in tmp_path.iterdir()} <= {"page.html", "page.html.part"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork a process")
@pytest.mark.campaign
def test_the_test_of_killed_processes_sees_torn_files(tmp_path: Path) -> None:
    done = fresh.run(textwrap.dedent(_KILLED), str(tmp_path), "directly", "40")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_files_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    write(file, "é")
    assert file.read_bytes() == "é".encode()
    file.chmod(0o640)
    link.symlink_to(file)
    write(link, b"new")
    assert link.is_symlink()
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o640)
    write(os.devnull, "nothing")
    assert Path(os.devnull).exists()
    assert not Path(os.devnull).is_file()

    def refused(self: Path, target: Any) -> None:
        raise PermissionError("a folder that takes no new files")

    monkeypatch.setattr(Path, "replace", refused)
    write(file, "directly")
    assert file.read_text() == "directly"
