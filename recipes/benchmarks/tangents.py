"""`python recipes/benchmark.py tangents`: forward mode (torch.func.jvp) against forward passes, and second order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.memory import peak_bytes
from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps_tables import github_table
from flexmasks.attention import attention
from flexmasks.backends import tangents
from flexmasks.bench.clock import device_milliseconds, interleaved, progress, wall_milliseconds
from flexmasks.cache import Launches

_RUNS = 7
_IN_A_ROW = 5  # calls between two looks at the clock
_FORWARD, _FLEX, _JVP, _TRAINED, _BOTH = "forward", "forward, flex", "jvp", "jvp, with gradients", "jvp and backward"
_TORCH = "jvp, torch"  # of scaled_dot_product_attention by its formula, with all scores in memory
_SECOND = "second order, reference"
_MOST_SCORES = 1 << 31  # of torch's jvp


class Case(NamedTuple):
    """A call in forward mode."""

    what: str
    batch: int
    heads: int
    length: int
    size: int
    dtype: torch.dtype = torch.bfloat16
    kv_heads: int | None = None

    @property
    def shape(self) -> str:
        return "x".join(map(str, (self.batch, self.heads, self.length, self.size)))


_CASES = [
    Case("causal", 4, 16, 4096, 64),
    Case("causal", 4, 16, 4096, 128),
    Case("full", 4, 16, 4096, 64),
    Case("full", 1, 16, 16384, 64),
    Case("sliding window", 1, 16, 16384, 64),
    Case("documents", 4, 16, 4096, 64),
    Case("causal", 4, 16, 4096, 64, torch.float32),
    Case("causal, soft-cap", 1, 16, 4096, 64),
]
_QUICK = [Case("causal", 1, 2, 200, 16, torch.float32), Case("documents", 1, 2, 200, 16, torch.float32)]
_SECOND_CASES = [Case("causal", 1, 8, 8192, 64), Case("documents", 1, 8, 8192, 64)]


def _mask(case: Case, device: torch.device) -> dict[str, Any]:
    if case.what == "documents":
        ids = torch.arange(case.length, device=device) // 600
        return {"mask": "document", "document_ids": ids}
    if case.what == "sliding window":
        return {"mask": "sliding_window", "window": 1024}
    if case.what == "causal, soft-cap":
        return {"mask": "causal", "score": "softcap", "cap": 30.0}
    return {} if case.what == "full" else {"mask": "causal"}


def _tensors(case: Case, device: torch.device, requires_grad: bool) -> list[Tensor]:
    heads = case.heads, case.kv_heads or case.heads, case.kv_heads or case.heads
    shapes = [(case.batch, n, case.length, case.size) for n in heads]
    return [torch.randn(shape, device=device, dtype=case.dtype, requires_grad=requires_grad) for shape in shapes]


def _calls(case: Case, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by names."""
    given = _mask(case, device)
    inputs, along = _tensors(case, device, requires_grad=True), _tensors(case, device, requires_grad=False)
    d_out = torch.randn_like(along[0])

    def ours(*qkv: Tensor, backend: str = "auto") -> Tensor:
        out: Tensor = attention(*qkv, **given, backend=backend)
        return out

    def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.what == "causal")

    def jvp(function: Callable[..., Tensor], with_gradients: bool) -> Any:
        with torch.set_grad_enabled(with_gradients):
            return torch.func.jvp(function, tuple(inputs), tuple(along))

    def forward(backend: str) -> Tensor:
        with torch.no_grad():
            return ours(*inputs, backend=backend)

    def both() -> tuple[Tensor, ...]:
        out, _ = jvp(ours, with_gradients=True)
        return torch.autograd.grad(out, inputs, d_out)

    calls: dict[str, Callable[[], Any]] = {
        _FORWARD: functools.partial(forward, "auto"),
        _JVP: functools.partial(jvp, ours, with_gradients=False),
        _TRAINED: functools.partial(jvp, ours, with_gradients=True),
        _BOTH: both,
    }
    if device.type == "cuda":
        calls[_FLEX] = functools.partial(forward, "flex")
    if case.what in ("causal", "full") and case.batch * case.heads * case.length**2 <= _MOST_SCORES:
        calls[_TORCH] = functools.partial(jvp, by_torch, with_gradients=False)
    return calls


def _rows(case: Case, device: torch.device, runs: int) -> list[Row]:
    """Return times with the host's part and without, and peaks of memory."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    calls = _calls(case, device)
    _check(case, device)
    clock = functools.partial(wall_milliseconds, calls_in_a_row=_IN_A_ROW)
    times, of_device = (interleaved(calls, device, runs, c) for c in (clock, device_milliseconds))
    return [_row(case, who, call, device, times[who], of_device[who]) for who, call in calls.items()]


def _row(
    case: Case, who: str, call: Callable[[], Any], device: torch.device, times: Any, of_device: Any
) -> dict[str, Any]:
    about = {"case": case.what, "shape": case.shape, "dtype": str(case.dtype)[6:], "who": who}
    figures = {"ms": float(f"{times[0]:.4g}"), "iqr": float(f"{times[1]:.3g}")}
    figures["device_ms"] = float(f"{of_device[0]:.4g}")
    figures["peak_mb"] = float(f"{peak_bytes(call, device) / 1e6:.3g}")
    return about | figures


def _check(case: Case, device: torch.device) -> None:
    """Raise AssertionError if a tangent differs from that of the reference, in float32, for a part of the call."""
    part = case._replace(batch=1, heads=1, kv_heads=None)
    given, inputs, along = _mask(part, device), *(_tensors(part, device, False) for _ in range(2))
    for dtype, backend in ((case.dtype, "auto"), (torch.float32, "reference")):
        attend = functools.partial(attention, **given, backend=backend, return_lse=True)
        qkv, tangents = (tuple(x.to(dtype) for x in tensors) for tensors in (inputs, along))
        results = [x.float() for pair in torch.func.jvp(attend, qkv, tangents) for x in pair]
        if backend == "auto":
            ours = results
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, results, strict=True)]
    assert max(errors) < (1e-3 if case.dtype == torch.float32 else 3e-2), (case, errors)


def _settings_rows(case: Case, device: torch.device, runs: int) -> list[Row]:
    """Return the times of the kernel with other tiles, with output and lse known and not."""
    from flexmasks.kernels import tangent_kernel

    calls: dict[str, Callable[[], Any]] = {}
    kept = dict(tangent_kernel.TILES)
    launches: dict[Any, Launches[Any]] = {None: tangent_kernel._launches}

    def with_tiles(settings: tangent_kernel.Settings, call: Callable[[], Any]) -> Any:
        tangent_kernel.TILES.update(dict.fromkeys(tangent_kernel.TILES, settings))
        tangent_kernel._launches = launches.setdefault(settings, Launches("tangents"))
        try:
            return call()
        finally:
            tangent_kernel.TILES.update(kept)
            tangent_kernel._launches = launches[None]

    of_case = _calls(case, device)
    for rows, keys, warps, stages in itertools.chain(
        itertools.product((128,), (32, 64, 128), (8,), (2, 3)), itertools.product((64,), (32, 64), (4,), (2, 3))
    ):
        settings = tangent_kernel.Settings(rows, keys, warps, stages)
        for name in (_JVP, _TRAINED):
            who = f"{name}: {rows} x {keys}, {warps} warps, {stages} stages"
            calls[who] = functools.partial(with_tiles, settings, of_case[name])
            calls[who]()
            if tangents._failures:  # too much shared memory
                progress(f"{who}: {tangents._failures.pop()}")
                del calls[who]
    of_device = interleaved(calls, device, runs, device_milliseconds)
    about = {"case": case.what, "shape": case.shape, "dtype": str(case.dtype)[6:]}
    return [about | {"who": f"tiles: {who}", "device_ms": float(f"{of_device[who][0]:.4g}")} for who in calls]


def _second_order_rows(case: Case, device: torch.device, runs: int) -> list[Row]:
    """Return the time and memory of the gradient of a gradient's square."""
    given, inputs = _mask(case, device), _tensors(case, device, requires_grad=True)

    def second() -> tuple[Tensor, ...]:
        out = attention(*inputs, **given, backend="reference")
        first = torch.autograd.grad(out.float().square().sum(), inputs, create_graph=True)
        squares = torch.stack([x.float().square().sum() for x in first])
        return torch.autograd.grad(squares.sum(), inputs)

    times, of_device = (
        interleaved({_SECOND: second}, device, runs, c) for c in (wall_milliseconds, device_milliseconds)
    )
    return [_row(case, _SECOND, second, device, times[_SECOND], of_device[_SECOND])]


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_small = quick or device.type != "cuda"
    runs = 2 if is_small else _RUNS
    describe: Callable[[Case], str] = lambda case: f"{case.what}, {case.shape}, {str(case.dtype)[6:]}"  # noqa: E731
    todo: dict[str, Callable[[], list[Row]]]
    todo = {describe(c): functools.partial(_rows, c, device, runs) for c in (_QUICK if is_small else _CASES)}
    for case in _QUICK[:1] if is_small else _SECOND_CASES:
        todo[f"second order: {describe(case)}"] = functools.partial(_second_order_rows, case, device, 2)
    if device.type == "cuda":  # the choice of tiles; the page leaves it out
        for case in _CASES[:2]:
            todo[f"tiles: {describe(case)}"] = functools.partial(_settings_rows, case, device, 2)
    return todo


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("what", "case"), ("shape", "shape"), ("dtype", "dtype"), ("way", "who"), ("ms", "ms"), ("IQR", "iqr"),
        ("ms of the device", "device_ms"), ("peak MB", "peak_mb"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of one run."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in results["rows"]:
        found.setdefault((row["case"], row["shape"], row["dtype"]), {})[row["who"]] = row
    ways, lines, second = (_FORWARD, _FLEX, _JVP, _TRAINED, _BOTH, _TORCH), [], []
    for about, by_way in found.items():
        if _FORWARD in by_way:
            times = [f"{by_way[who]['device_ms']:.3g}" if who in by_way else "" for who in ways]
            of = by_way[_JVP]["device_ms"]
            shares = [f"{of / by_way[who]['device_ms']:.2f}" if who in by_way else "" for who in (_FORWARD, _FLEX)]
            peaks = [f"{by_way[who]['peak_mb']:,.0f}" if who in by_way else "" for who in (_FORWARD, _JVP, _TORCH)]
            lines.append([*about, *times, *shares, " / ".join(peaks)])
        if _SECOND in by_way:
            row = by_way[_SECOND]
            second.append([*about, f"{row['device_ms']:,.0f}", f"{row['peak_mb']:,.0f}"])
    of_case = ["what", "B x H x S x D", "dtype"]
    header = [
        *of_case,
        *(f"{who}, ms" for who in ways),
        "jvp of forward",
        "jvp of flex",
        "peak MB: forward / jvp / torch",
    ]
    about_all = (
        "times of the GPU, with empty caches. Forward, and jvp without gradients, run under torch.no_grad; target: jvp "
        "at most 3.2 times forward on flex. torch's own jvp holds all scores, and is left out where these are more "
        "than two billion"
    )
    return (
        f"{measured_on(results)}; {about_all}.\n\n{github_table(lines, header)}\n\n"
        'The gradient of the square of a gradient, by backend="reference":\n\n'
        f"{github_table(second, [*of_case, 'ms', 'peak MB'])}"
    )


BENCHMARK = Benchmark("tangents", _todo, table)
