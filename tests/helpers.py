"""Helpers that turn an oracle's case into arguments of the library, and shared tolerances."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from oracles import MASK_CASES, Case
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import constant_fold_uniform_value
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flexmasks
from flexmasks import compat, devices
from flexmasks.backends.exact import CONSTANT, OF_FLASH_ALONE, outside_table
from flexmasks.plans import recorded
from flexmasks.spec.parameters import Size
from flexmasks.spec.structure import tensors_of

RECIPES = Path(__file__).parent.parent / "recipes"
sys.path += [str(RECIPES), str(RECIPES / "site")]  # for files that are run as scripts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Largest error of outputs; gradients may have twice it, see `error`. The half precisions allow about four roundings.
# The lse of a row is float32 in every dtype, and its error is absolute.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.5e-3, torch.bfloat16: 1.6e-2}


def check_oracle(name: str, kind: str, oracles: dict[str, Any], cases: Sequence[Case]) -> None:
    """Check that a mask or score has an oracle and three cases, and is registered."""
    known = {entry.name for entry in (flexmasks.list_masks if kind == "mask" else flexmasks.list_scores)()}
    assert name in known, f"tests/oracles has an oracle of {kind} {name!r}, which is not registered"
    assert name in oracles, f"{kind} {name!r} has no oracle: write its definition in its file of tests/oracles"
    found = len({repr(case) for case in cases if case.name == name})
    assert found >= 3, f"{kind} {name!r} has {found} cases in tests/oracles, at least 3 are needed"


# --- calls of cases ---


def arguments(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Return the keyword arguments of a case: its parameters, and q_offset."""
    offset = case.q_offset
    params = _parameters(case.params, device)
    return params | {"q_offset": torch.tensor(offset, device=device) if isinstance(offset, tuple) else offset}


def noted_bounds_hold(case: Case, value: flexmasks.Mask | flexmasks.Score) -> bool:
    """Whether a mask or score notes bounds of tables, on which checks of compiled functions rely. They must hold."""
    size = Size(case.batch, case.heads, case.q_len, case.kv_len, torch.device("cpu"))
    noted = [t for t in tensors_of(value._resolve(size)) if hasattr(t, "bounds") and t.numel()]
    for tensor in noted:
        low, high = tensor.bounds
        assert low <= tensor.min() <= tensor.max() <= high, case
    return bool(noted)


def _parameters(params: dict[str, Any], device: str) -> dict[str, Any]:
    moved = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in params.items()}
    if "mask" in moved:  # the inner mask of `packed` and `paged`: a name and its parameters
        name, inner = moved.pop("mask")
        moved["inner"] = flexmasks.get_mask(name, **_parameters(inner, device))
    return moved


def qkv(
    case: Case,
    dtype: torch.dtype,
    device: str = "cpu",
    grouped: bool = False,
    size: int = 32,
    v_size: int | None = None,
) -> list[Tensor]:
    """Return random leaves q, k, v of a case's sizes; with `grouped`, one key head for all query heads.

    v_size: the head size of v, by default `size`.
    """
    kv_heads = 1 if grouped else case.heads
    v_size = size if v_size is None else v_size
    shapes = [(case.heads, case.q_len, size), (kv_heads, case.kv_len, size), (kv_heads, case.kv_len, v_size)]
    return [torch.randn(case.batch, *s, dtype=torch.float32).to(device, dtype).requires_grad_() for s in shapes]


def spread(cases: Sequence[Case], each: int) -> list[Case]:
    """Return at most `each` cases of every name, evenly spaced among its cases."""
    by_name: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_name[case.name].append(case)
    picked = []
    for group in by_name.values():
        n = min(each, len(group))
        picked += [group[i * (len(group) - 1) // max(1, n - 1)] for i in range(n)]
    return picked


# All cases of masks; the suite tries three of each mask, campaigns the others.
_IN_THE_SUITE = set(spread(MASK_CASES, 3))
THREE_OF_EACH = [pytest.param(case, marks=[] if case in _IN_THE_SUITE else pytest.mark.campaign) for case in MASK_CASES]


def one_in(turns: int, params: Sequence[Any]) -> list[Any]:
    """Return values to parametrize a test with, of which the suite tries one in `turns`, and others the next day.

    Campaigns try all. A tuple has the values of several arguments.
    """
    return [param if is_turn(n, turns) else in_campaigns(param) for n, param in enumerate(params)]


def is_turn(number: int, turns: int) -> bool:
    """Return whether a number has its turn today, which comes each `turns` days."""
    return (number + int(os.environ.get("FLEXMASKS_SEED", 0))) % turns == 0


def in_campaigns(param: Any) -> Any:
    """Return values to parametrize a test with, which campaigns alone try."""
    if not hasattr(param, "marks"):
        param = pytest.param(*(param if type(param) is tuple else (param,)))
    return pytest.param(*param.values, marks=[*param.marks, pytest.mark.campaign], id=param.id)


def by_turns(cases: Sequence[Case], sizes: Sequence[Any], turns: int = 1) -> pytest.MarkDecorator:
    """Parametrize `case` and `size`: the suite tries one case in `turns`, each with one of the sizes; campaigns all."""
    tried = one_in(turns, range(len(cases)))
    return pytest.mark.parametrize(
        ("case", "size"),
        [
            pytest.param(
                case, size, id=f"{label(case)}-{size}",
                marks=() if tried[n] == n and n // turns % len(sizes) == m else pytest.mark.campaign,
            )
            for n, case in enumerate(cases)
            for m, size in enumerate(sizes)
        ],
    )  # fmt: skip


def label(case: Any) -> str | None:
    """Return a readable test id of a case or a dtype."""
    if isinstance(case, torch.dtype):
        return str(case).removeprefix("torch.")
    if not isinstance(case, Case):
        return None
    params = ",".join(f"{n}={v}" for n, v in case.params.items() if isinstance(v, int | float | bool))
    return f"{case.name}({params})-{case.batch}x{case.heads}x{case.q_len}x{case.kv_len}"


# --- messages ---


@contextlib.contextmanager
def torch_says(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let `caplog` have what torch's compiler logs, which it shows on stderr by itself."""
    logger = logging.getLogger("torch._dynamo")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


# --- random tests ---


def try_examples(count: int, check: Callable[..., None], *strategies: SearchStrategy[Any]) -> None:
    """Run a check on random values of the strategies, `count` times."""
    settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])(given(*strategies)(check))()


# --- errors ---


def exact(x: Tensor) -> Tensor:
    """Return the same values in float64 on the CPU, as a leaf."""
    return x.detach().double().cpu().requires_grad_()


def error(got: Tensor | None, want: Tensor | None, unit: float = 0.05) -> float:
    """Return ||got - want|| / ||want||, inf for NaN.

    The mean size of the elements of `want` counts as at least `unit`, because they may be 0.
    """
    assert got is not None
    assert want is not None
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    size = max(float(want.norm()), unit * want.numel() ** 0.5)
    difference = float((got - want).norm()) / size
    return difference if math.isfinite(difference) else math.inf


def check_lse(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Check that two lse are -inf in the same places, and elsewhere within the tolerance."""
    got = got.detach().double().cpu()
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.all(got[got.isinf()] < 0)
    visible = ~want.isinf()
    assert torch.allclose(got[visible], want[visible], atol=tolerance, rtol=tolerance)


BLOCK_MASK_FIELDS = [
    f"{side}_{what}" for side in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")
]


def check_equal_block_masks(got: BlockMask, want: BlockMask) -> None:
    """Assert equal index tensors: dtype, shape, and the order of indices, the unused ones included."""
    assert got.seq_lengths == want.seq_lengths
    assert got.BLOCK_SIZE == want.BLOCK_SIZE
    for field in BLOCK_MASK_FIELDS:
        mine, theirs = getattr(got, field), getattr(want, field)
        assert (mine.dtype, mine.device) == (theirs.dtype, theirs.device), field
        assert torch.equal(mine, theirs), field


# Operations that read values on the host, or whose results have shapes that depend on values.
READS = ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "bincount")


class NoLists(TorchFunctionMode):
    """A mode in which no tensor may become a list or an array, which is no operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (Tensor.tolist, Tensor.numpy, Tensor.__array__)
        return func(*args, **(kwargs or {}))


class NoReads(TorchDispatchMode):
    """A mode in which no operation may read a value on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_truth = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in (args[1] if isinstance(args[1], list) else ())
        )
        repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        reads = name in READS or by_truth or repeats
        assert not reads, name
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_waits(device: str) -> Iterator[None]:
    """Let nothing read a value on the host, on a CPU, and the host wait for nothing, on a GPU."""
    if device == "cpu":
        with NoReads(), NoLists():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class PlayedGraph(recorded._Graph):
    """A CUDA graph without a GPU: a replay runs the operations on the fixed places of the inputs."""

    def __init__(self, run: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> None:
        self.raw_stream = 0
        self._places = [recorded._Place(x) for x in inputs]
        for place, x in zip(self._places, inputs, strict=True):
            place.fill(x)
        self._run = run
        self._outputs = self._run_in_places()
        self._packs = [recorded._Pack(tensors) for tensors in recorded._by_dtype(self._outputs)]
        self._graph: Any = SimpleNamespace(replay=self._replay)

    def _run_in_places(self) -> list[Tensor]:
        return self._run(*(place.tensor for place in self._places))

    def _replay(self) -> None:
        for pack, tensors in zip(self._packs, recorded._by_dtype(self._run_in_places()), strict=True):
            pack.memory.copy_(recorded._Pack(tensors).memory)


def play_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recorded operations run on a CPU as in a CUDA graph."""
    monkeypatch.setattr(recorded, "_GRAPHS_ON", ("cpu", "cuda"))
    monkeypatch.setattr(recorded, "_Graph", PlayedGraph)
    monkeypatch.setattr(recorded, "_is_current", lambda device: True)
    monkeypatch.setattr(compat, "raw_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return the graph of a call, after two calls outside of it, and what the captured call returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def documents(length: int = 512, device: str = "cpu", batch: int = 2) -> Tensor:
    """Return new document ids [batch, length], of 60 tokens in the mean."""
    return (torch.rand(batch, length, device=device) < 1 / 60).cumsum(1).int()


def peak_memory() -> float:
    """Return the most memory that this process has had so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- torch's FLASH backend ---


def skip_unless_flash_takes(leaves: Sequence[Tensor], **call: Any) -> None:
    """Skip a test of backend "flex_flash" if it is not installed or cannot run such a call."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    q, k, v = leaves
    try:
        flexmasks.explain(q, k, v, **call | {"backend": "flex_flash"})
    except ValueError as error:
        if "cannot run this call" not in str(error):
            raise
        pytest.skip(str(error))


def not_for_flash(case: Case, mod: Callable[..., Tensor], scored: bool = False) -> list[str]:
    """Return the operations of a traced function that FLASH's compiler refuses or computes wrong."""
    sizes = case.batch, case.heads, case.q_len, case.kv_len
    reasons = outside_table(mod, torch.device("cpu"), sizes, scored)
    # Inductor compiles the library's masks as they are.
    wrong = next((reason for reason in reasons if scored or reason in OF_FLASH_ALONE), None)
    # If a tensor says where queries start, tracing must assume that the start may be negative.
    certain = isinstance(case.q_offset, int) or not ("remainders" in str(wrong) or "index" in str(wrong))
    refused = [str(wrong)] if certain and wrong not in (None, CONSTANT) else []
    for node in traced(mod, scored).graph.nodes:
        if node.target is torch.ops.aten.index.Tensor:
            for i in node.args[1]:
                if i is None or i.target is torch.ops.aten.full.default or i.meta["val"].dtype != torch.int32:
                    refused.append(f"index {i}")
        if re.search("clamp|maximum|minimum|select", str(node.target)):
            refused.append(str(node.target))
    return refused


def traced(mod: Callable[..., Tensor], scored: bool = False) -> torch.fx.GraphModule:
    """Return the graph of a function of indices, and with `scored` of a score, as torch's compiler sees it."""

    def called(*args: Tensor) -> Tensor:
        with TransformGetItemToIndex():
            return mod(*args)

    examples = [torch.zeros(())] * scored + [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    tracing = make_fx(called, select_decomp_table(), tracing_mode="fake", _allow_non_fake_inputs=True)
    with torch.no_grad():
        module = tracing(*examples)
    constant_fold_uniform_value(module)
    return module


# --- Triton ---


# Bytes of shared memory that a program may take, by compute capability (CUDA C++ programming guide).
SHARED_MEMORY = {
    (7, 5): 65_536, (8, 0): 166_912, (8, 6): 101_376, (8, 7): 166_912, (8, 9): 101_376, (9, 0): 232_448,
    (10, 0): 232_448, (10, 3): 232_448, (11, 0): 232_448, (12, 0): 101_376,
}  # fmt: skip


def on_gpu_of(patch: pytest.MonkeyPatch, capability: tuple[int, int] | None, memory: int | None = None) -> None:
    """Let the library take all devices for a GPU of a compute capability, or for AMD's, which answers questions only.

    memory: its shared memory, by default that of its kind.
    """
    found = SHARED_MEMORY.get(capability or (0, 0), 0) if memory is None else memory
    patch.setattr(devices, "_gpu", lambda device: devices.GpuFacts(capability, found))


def assembly(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], warps: int) -> str:
    """Return the PTX of a kernel for a Hopper GPU; no GPU is needed."""
    import triton  # not installed on every system
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constexprs: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for n, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(n,)] = constants[name]
        elif name in pointers:
            signature[name] = pointers[name]
            attributes[(n,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    source = ASTSource(kernel, signature, constexprs, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return made.asm["ptx"]


def compiled_for_hopper(kernel: Any, warps: int, arguments: tuple[Any, ...], arch: int = 90) -> Any:
    """Compile a kernel for a Hopper GPU, or one of another compute capability; none is needed."""
    import triton  # not installed on every system
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {
        torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
        torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
    }  # fmt: skip
    signature, constants, attributes = {}, {}, {}
    for n, (parameter, argument) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr or argument is None:
            signature[parameter.name] = "constexpr"
            constants[(n,)] = argument
        elif isinstance(argument, Tensor):
            signature[parameter.name] = names[argument.dtype]
            attributes[(n,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(argument, float) else "i32"
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})


def check_by_the_interpreter(file: str, *options: str) -> None:
    """Run a file of tests in a process that chose Triton's interpreter before Triton was imported."""
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 has no loops over loaded numbers with a new NumPy")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, file]
    ran = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(file).parents[1],
        capture_output=True,
    )
    assert ran.returncode == 0, ran.stdout.decode()[-4000:]
    assert " passed" in ran.stdout.decode()
