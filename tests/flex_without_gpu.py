"""Kernels of torch's flex_attention for a GPU, compiled where there is none."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask

from flexmasks.backends import flex

Functions = tuple[Callable[..., Tensor], Sequence[Tensor], Callable[..., Tensor], Sequence[Tensor]]
_BLOCK = 128
_KERNEL = re.compile(r"async_compile\.triton\('(triton_tem\w+)', '''\n(.*?)'''", re.DOTALL)


class Kernels(NamedTuple):
    """What Triton made for a forward and a backward pass."""

    forward: Any
    backward: Any

    @property
    def memory(self) -> list[int]:
        """Bytes of shared memory."""
        return [kernel.metadata.shared for kernel in self]


@contextlib.contextmanager
def compiles_for(arch: int, folder: Path, machine_code: bool = False) -> Iterator[Callable[..., Kernels]]:
    """Let torch and Triton compile for a GPU of a compute capability, as 90, and run nothing.

    Gives a function of the arguments of `_graph` that returns both kernels.
    machine_code: whether to make it, which takes half of the time; shared memory is known before.
    """
    import torch._inductor.scheduler as scheduler
    import torch._subclasses.fake_tensor as fake_tensor
    import triton  # not installed on every system
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    target, capability = GPUTarget("cuda", arch, 32), divmod(arch, 10)
    driver = types.SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    properties = DeviceProperties(
        type="cuda", index=0, multi_processor_count=132, cc=arch, major=capability[0], regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, warp_size=32,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))  # what is compiled here may have no machine code
        if not machine_code:
            patch.setattr(CUDABackend, "make_ptx", lambda self, code, data, *args: data.update(name="kernel") or "")
            patch.setattr(CUDABackend, "make_cubin", lambda *args: b"")
        patch.setattr(DeviceProperties, "create", classmethod(lambda cls, device: properties))
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(scheduler, "has_triton", lambda: True)
        patch.setattr(fake_tensor, "init_gpu_context", lambda device: None, raising=False)
        patch.setattr(triton.runtime.driver, "_active", driver)
        yield lambda *args: _compiled(target, *_graph(*args))
    for function in vars(torch.utils._triton).values():  # what torch keeps of the GPU
        getattr(function, "cache_clear", lambda: None)()


def _graph(
    size: int, dtype: torch.dtype, functions: Functions, options: dict[str, Any], length: int = 300,
    device: str = "cuda:0", needs_grad: bool = True,
) -> tuple[FakeTensorMode, torch.fx.GraphModule]:  # fmt: skip
    """Return the graph of a forward pass, and a backward pass if wanted, over fake tensors of a GPU.

    It is traced on the CPU: where torch has no CUDA, tensors of a GPU have no autograd.

    functions: of scores and masks, each with the tensors that it takes behind its arguments.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import constant_fold_uniform_value
    from torch.fx.experimental.proxy_tensor import make_fx

    score_mod, of_score, mask_mod, of_mask = functions
    n = -(-length // _BLOCK)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def both(inputs: list[Tensor], d_out: Tensor, score_tensors: Any, mask_tensors: Any, lists: Any) -> list[Tensor]:
        blocks = BlockMask((length, length), *lists * 4, (_BLOCK, _BLOCK), mask_mod).as_tuple()[:-1]
        chosen = {**flex._OPTIONS, **options, "OUTPUT_LOGSUMEXP": needs_grad}
        operator = torch.ops.higher_order.flex_attention
        captured = tuple(score_tensors), tuple(mask_tensors)
        out = operator(*inputs, score_mod, (*blocks, mask_mod), size**-0.5, chosen, *captured)[0]
        learning = [x for x in (*inputs, *score_tensors) if x.requires_grad]
        if not needs_grad:
            return [out]
        return [out, *torch.autograd.grad(out, learning, d_out)]

    def moved(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    with mode:
        inputs = [torch.empty(1, 4, length, size, dtype=dtype, requires_grad=needs_grad) for _ in range(3)]
        lists = [torch.ones(1, 1, n, dtype=torch.int32), torch.zeros(1, 1, n, n, dtype=torch.int32)]
        captured = [[mode.from_tensor(x) for x in tensors] for tensors in (of_score, of_mask)]
        trace = make_fx(both, select_decomp_table(), _allow_non_fake_inputs=True)
        graph = trace(inputs, torch.empty_like(inputs[0]), *captured, lists)
        for module in graph.modules():
            constant_fold_uniform_value(module)
            for node in getattr(module, "graph", torch.fx.Graph()).nodes:
                node.meta["val"] = torch.utils._pytree.tree_map_only(Tensor, moved, node.meta.get("val"))
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": torch.device(device)}
    graph.graph.set_codegen(torch.fx.graph.CodeGen())  # which takes and gives flat lists
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return mode, graph


@contextlib.contextmanager
def _lowered(mode: FakeTensorMode, graph: torch.fx.GraphModule) -> Iterator[Any]:
    """Give what Inductor makes of a graph."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with mode:
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=ShapeEnv(), is_inference=True)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode), DebugContext():
            lowering.run(*inputs)
            yield lowering


def metal_of(size: int, dtype: torch.dtype, functions: Functions) -> str:
    """Return the Metal source of a forward pass that torch makes for MPS."""
    with _lowered(*_graph(size, dtype, functions, {}, device="mps", needs_grad=False)) as lowering:
        (source,) = (made.shader_source for made in lowering.operations if hasattr(made, "shader_source"))
        return cast(str, source)


def _compiled(target: Any, mode: FakeTensorMode, graph: torch.fx.GraphModule) -> Kernels:
    with _lowered(mode, graph) as lowering:
        code: Any = lowering.codegen()[0]
    kernels = _KERNEL.findall(code if isinstance(code, str) else code.value)
    return Kernels(*(_kernel(target, name, source) for name, source in kernels))


def _kernel(target: Any, name: str, source: str) -> Any:
    import linecache

    import torch._inductor.runtime.triton_heuristics as heuristics
    import triton
    from triton.compiler import ASTSource

    def template(*, num_stages: int, num_warps: int, triton_meta: dict[str, Any], **others: Any) -> Any:
        return lambda kernel: (kernel, triton_meta, {"num_stages": num_stages, "num_warps": num_warps})

    source = source.replace("triton_helpers.set_driver_to_gpu()", "")
    file = f"<{name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # which Triton reads
    module: dict[str, Any] = {"__name__": name}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heuristics, "template", template)
        exec(compile(source, file, "exec"), module)
    kernel, meta, options = module[name]
    constants = {(n,): meta["constants"][p.name] for n, p in enumerate(kernel.params) if p.name in meta["constants"]}
    signature = {p.name: meta["signature"].get(p.name, "constexpr") for p in kernel.params}
    made = ASTSource(kernel, signature, constants, dict(meta["configs"][0]))
    return triton.compile(made, target=target, options=options)
