"""`python recipes/benchmark.py ranks`: attention over sequences that several GPUs hold."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import private_torch
from benchmarks.processes import Processes
from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps_tables import OURS, github_table
from flexmasks.attention import attention
from flexmasks.bench.clock import progress, synchronize
from flexmasks.integrations import distributed
from flexmasks.spec import Mask, get_mask

ONE, RING, FLEX = "flexmasks on one", "torch context_parallel", "flex_attention, _ContextParallel"
_BALANCED, _ROWS = f"{OURS}, balanced", f"{OURS}, heads over 2"
_NEAR = 0.8  # of linear
_SECONDS, _LOOPS, _MOST_STEPS = 1.5, 5, 20  # of all loops; and of one


class Shape(NamedTuple):
    """Sizes of a call."""

    heads: int
    kv_heads: int
    length: int
    size: int

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.kv_heads == self.heads else f"{self.heads}/{self.kv_heads}"
        return f"{heads}x{self.length}x{self.size}"


_GPU = (65536, 262144, 1048576)
_LONG = 524288  # from here on steps without empty blocks take seconds on several GPUs and a minute on one


class _Masked(NamedTuple):
    """The mask of a case, for flexmasks and for torch."""

    make: Callable[[], Mask]  # new tensors at each call
    mask_mod: Callable[..., Tensor]


def _masked(name: str, length: int, device: torch.device) -> _Masked:
    if name == "window":
        window = min(4096, length // 8)
        mask = get_mask("sliding_window", window=window)
        return _Masked(lambda: mask, lambda b, h, q, kv: (kv <= q) & (q - kv <= window))
    if name == "prefix_lm":
        prefix = length // 4
        prefixes = torch.tensor([prefix], device=device)
        return _Masked(
            lambda: get_mask("prefix_lm", prefix_len=prefixes.clone()), lambda b, h, q, kv: (kv <= q) | (kv < prefix)
        )
    if name == "documents":
        cuts = torch.rand(length, generator=torch.Generator().manual_seed(0)) < 8 / length
        ids = cuts.cumsum(0).to(device)
        return _Masked(
            lambda: get_mask("causal") & get_mask("document", document_ids=ids.clone()),
            lambda b, h, q, kv: (kv <= q) & (ids[q] == ids[kv]),
        )
    causal = get_mask("causal")
    return _Masked(lambda: causal, lambda b, h, q, kv: kv <= q)


# --- what each process runs ---


def _measured(name: str, shape: Shape, who: str, device_type: str) -> dict[str, Any] | None:
    """Return the times of steps, and of their kernels, their peak memory, and part of the output.

    A step is a forward and a backward pass. The result is None in processes that do nothing.
    """
    count, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    mesh = init_device_mesh(device_type, (count // 2, 2) if who == _ROWS else (count,))
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    order = distributed.Order.natural(shape.length, count)
    if who in (_BALANCED, _ROWS):
        mask, rows = _masked(name, shape.length, torch.device("cpu")).make(), mesh.shape[0]
        order = distributed.balance(mask, shape.length, rows).divided(count // rows)
    generator = torch.Generator(device).manual_seed(0)
    whole = [
        torch.randn(1, heads, shape.length, shape.size, device=device, dtype=dtype, generator=generator)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    ]
    is_idle = who == ONE and rank > 0
    if not is_idle:
        tensors = whole if who == ONE else [distributed.shard(x, order, mesh, dim=2).clone() for x in whole]
        *leaves, upstream = tensors
        del whole
        leaves = [x.requires_grad_() for x in leaves]
        call = _call_of(name, shape, who, mesh, order, device)
        figures = _timed(lambda: _step(call, leaves, upstream), mesh if who != ONE else None, device)
        figures["output"] = figures["output"][0, 0, :: max(1, shape.length // 64)].float().cpu()
    dist.barrier()
    return None if is_idle else figures


def _step(call: Callable[..., Tensor], leaves: list[Tensor], upstream: Tensor) -> Tensor:
    for leaf in leaves:
        leaf.grad = None
    out = call(*leaves)
    out.backward(upstream)
    return out.detach()


def _call_of(
    name: str, shape: Shape, who: str, mesh: DeviceMesh, order: distributed.Order, device: torch.device
) -> Callable[..., Tensor]:
    make, mask_mod = _masked(name, shape.length, device)
    if who == ONE:
        return lambda q, k, v: attention(q, k, v, mask=make())
    if who in (OURS, _BALANCED, _ROWS):
        given = None if who == OURS else order
        return lambda q, k, v: distributed.attention(q, k, v, mesh=mesh, mask=make(), order=given)
    if who == RING:
        return functools.partial(_ring, mesh)
    return private_torch.flex_over_processes(mask_mod, shape.length, mesh, device, is_balanced=name != "window")


def _ring(mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by torch's own context parallelism, which computes causal attention in a ring, of repeated key heads."""
    from torch.distributed.tensor.experimental import context_parallel

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    buffer = torch.empty(2 * mesh.size(), device=q.device)  # it wants a tensor to cut
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _timed(step: Callable[[], Tensor], mesh: DeviceMesh | None, device: torch.device) -> dict[str, Any]:
    """Time steps in loops that all processes begin together.

    The host waits for the GPU at the end of a loop. A step that takes longer than all loops should is timed once.
    """
    start = time.perf_counter()
    figures: dict[str, Any] = {"output": step(), "exchanges": [], "others": 0.0}
    synchronize(device)
    figures["first_s"] = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    seconds = torch.tensor(time.perf_counter() - start)
    if mesh is not None:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    steps = min(max(int(_SECONDS / _LOOPS / float(seconds)), 1), _MOST_STEPS)
    is_short = float(seconds) < _SECONDS
    if is_short and device.type == "cuda" and mesh is not None:
        figures |= _kernels(step, device)
    times = [] if is_short else [float(seconds)]
    for _ in range(_LOOPS if is_short else 0):
        if mesh is not None:
            dist.all_reduce(torch.zeros(()))
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        times.append((time.perf_counter() - start) / steps)
    figures["peak"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return figures | {"times": times, "steps": steps * len(times)}


def _kernels(step: Callable[[], Tensor], device: torch.device) -> dict[str, Any]:
    """Return the milliseconds of each exchange between processes in a step, and of all other kernels together."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        synchronize(device)
    kernels = [
        (event.name, event.time_range.elapsed_us() / 1e3, event.time_range.start)
        for event in profile.events()
        if event.device_type.name == "CUDA"
    ]
    exchanges = [ms for name, ms, _ in sorted(kernels, key=lambda kernel: kernel[2]) if "nccl" in name.lower()]
    others = sum(ms for name, ms, _ in kernels if "nccl" not in name.lower())
    return {"exchanges": exchanges, "others": others}


# --- the command ---


class _Pool:
    """Processes that are started again after one of them has failed."""

    def __init__(self, count: int, device_type: str) -> None:
        self.count, self.device_type = count, device_type
        self._processes: Processes | None = None

    def run(self, *arguments: Any) -> list[dict[str, Any]]:
        """Return the figures of the processes that have some."""
        self._processes = self._processes or Processes(self.count, self.device_type, timeout=240)
        try:
            return [x for x in self._processes.run(_measured, *arguments, self.device_type) if x is not None]
        except RuntimeError:
            self._processes.close()
            self._processes = None
            raise


def _contenders(name: str, shape: Shape, device_type: str, count: int) -> tuple[str, ...]:
    """Return who can run a case; torch's own ways have no gradients on a CPU."""
    if shape.kv_heads == 1:  # processes cannot exchange heads, so that the order of the sequence matters
        return OURS, _BALANCED, ONE
    rows = (_ROWS,) if count > 2 else ()
    if device_type == "cpu":
        return OURS, *rows, ONE
    if shape.length > _LONG and name == "prefix_lm":
        return OURS, *rows
    others = (RING,) if name == "causal" else ()
    return OURS, *rows, ONE, *others, *(() if shape.length > _GPU[0] else (FLEX,))


def _rows(name: str, shape: Shape, pool: _Pool) -> list[Row]:
    """Return the figures of all contenders of a case."""
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    outputs: dict[str, Tensor] = {}
    for who in _contenders(name, shape, pool.device_type, pool.count):
        progress(f"{name}, {shape}: {who}")
        try:
            found = pool.run(name, shape, who)
        except RuntimeError as error:
            left_out[who] = str(error).strip().splitlines()[-1][:200]
            continue
        # A loop takes as long as it takes the slowest process.
        steps = [1e3 * max(times) for times in zip(*(x["times"] for x in found), strict=True)]
        quarters = statistics.quantiles(steps, n=4) if len(steps) > 1 else 3 * steps
        row: Row = {"case": name, "shape": str(shape), "who": who, "ranks": len(found)}
        row |= {"dtype": "bfloat16" if pool.device_type == "cuda" else "float32"}
        row |= {"ms": float(f"{quarters[1]:.4g}"), "iqr": float(f"{quarters[2] - quarters[0]:.4g}")}
        row |= {"first_s": round(max(x["first_s"] for x in found), 2), "steps": found[0]["steps"]}
        if pool.device_type == "cuda":
            row["peak_gib"] = float(f"{max(x['peak'] for x in found) / 2**30:.3g}")
            row |= _shares_of_kernels(found)
        outputs[who] = found[0]["output"]
        rows.append(row)
    if OURS not in outputs:
        raise RuntimeError(f"flexmasks could not be measured: {left_out[OURS]}")
    if ONE in outputs:  # the first process holds the first tokens
        rows[0]["difference"] = float((outputs[OURS] - outputs[ONE][: len(outputs[OURS])]).abs().max())
    if left_out:
        rows[0]["left_out"] = left_out
    return rows


def _shares_of_kernels(found: list[dict[str, Any]]) -> Row:
    """Return the milliseconds of a step's exchanges, and the most of other kernels in a process over their mean.

    A process waits in an exchange for the others, so the exchange itself takes what it takes the last one.
    """
    exchanges = [x["exchanges"] for x in found]
    if not all(exchanges) or len(set(map(len, exchanges))) > 1:
        return {}
    others = [x["others"] for x in found]
    exchange = sum(map(min, zip(*exchanges, strict=True)))
    return {
        "exchange_ms": float(f"{exchange:.3g}"), "imbalance": round(max(others) / statistics.fmean(others), 3),
    }  # fmt: skip


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_large = device.type == "cuda" and not quick
    count = torch.cuda.device_count() if device.type == "cuda" else 4
    if count < 2:
        raise ValueError("benchmark ranks: this machine has one GPU; `--device cpu` takes four CPU processes.")
    pool = _Pool(count, device.type)
    todo: dict[str, Callable[[], list[Row]]] = {}
    heads, kv_heads, size = (32, 8, 128) if is_large else (4, 4, 32)
    for length in _GPU if is_large else (1024,):
        for name in ("documents", "window", "causal", "prefix_lm"):
            shape = Shape(heads, kv_heads, length, size)
            todo[f"{name}, {length} tokens"] = functools.partial(_rows, name, shape, pool)
    for name in ("documents", "window", "causal", "prefix_lm"):
        shape = Shape(16 if is_large else heads, 1, _GPU[0] if is_large else 1024, size)
        todo[f"{name}, 1 key head, {shape.length} tokens"] = functools.partial(_rows, name, shape, pool)
    return todo


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("mask", "case"), ("heads x tokens x head size", "shape"), ("who", "who"), ("processes", "ranks"), ("ms", "ms"),
        ("IQR", "iqr"), ("first s", "first_s"), ("GiB at most", "peak_gib"), ("exchange, ms", "exchange_ms"),
        ("imbalance", "imbalance"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run."""
    rows = []
    alone = {(r["case"], r["shape"]): r["ms"] for r in results["rows"] if r["who"] == ONE}
    for r in results["rows"]:
        is_first = r["who"] == OURS
        one = alone.get((r["case"], r["shape"]))
        rows.append([
            r["case"] if is_first else "", r["shape"] if is_first else "", r["who"], str(r["ranks"]), f"{r['ms']:g}",
            "" if one is None or r["who"] == ONE else f"{one / r['ms']:.2f} x", f"{r.get('peak_gib', '')}",
            f"{r['exchange_ms'] / r['ms']:.0%}" if "exchange_ms" in r else "",
            f"{r['imbalance']:.2f}" if "imbalance" in r else "",
        ])  # fmt: skip
    header = ["mask", "heads x tokens x head size", "who", "processes", "ms", "as fast as one", "GiB for each"]
    header += ["exchange", "imbalance"]
    count = str(max(r["ranks"] for r in results["rows"]))
    what = "forward and backward of one call after the other, batch 1, medians of wall times"
    about = f"{measured_on(results, count)}; {what}."
    return "\n\n".join([about, github_table(rows, header), *_far_from_linear(results["rows"], alone)])


def _far_from_linear(rows: list[Row], alone: dict[tuple[str, str], float]) -> list[str]:
    """Return a sentence for each row below _NEAR of as many times the speed of one process as there are processes."""
    sentences = []
    for r in rows:
        one = alone.get((r["case"], r["shape"]))
        if r["who"] != OURS or one is None or "exchange_ms" not in r or one / r["ms"] >= _NEAR * r["ranks"]:
            continue
        sentences.append(
            f"- {r['case']}, {r['shape']}: {one / r['ms'] / r['ranks']:.2f} of linear. Of {r['ms']:.3g} ms, one GPU's "
            f"share is {one / r['ranks']:.3g} and exchanges take {r['exchange_ms']:.2g}; the busiest process computes "
            f"{r['imbalance']:.2f} of the mean."
        )
    return sentences


BENCHMARK = Benchmark("ranks", _todo, table)
