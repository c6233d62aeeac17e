"""`python recipes/benchmark.py tangents`: forward mode (torch.func.jvp) against forward passes, and second order."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
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
from flexmasks.bench.clock import device_milliseconds, interleaved, wall_milliseconds

_RUNS = 7
_IN_A_ROW = 5  # calls between two looks at the clock
_FORWARD, _FLEX, _JVP, _TRAINED, _BOTH = "forward", "forward, flex", "jvp", "jvp, with gradients", "jvp and backward"
_TORCH = "jvp, torch"  # of scaled_dot_product_attention by its formula, with all scores in memory
_SECOND = "second order, reference"
_PEER = "jvp_flash_attention"
_RANDOM, _SHOWN = "random pairs", 0.1
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
    Case("full", 1, 16, 16384, 64),
    Case("sliding window", 1, 16, 16384, 64),
    Case("documents", 4, 16, 4096, 64),
    Case("causal", 4, 16, 4096, 64, torch.float32),
    Case("causal, soft-cap", 1, 16, 4096, 64),
]
_QUICK = [Case("causal", 1, 2, 200, 16, torch.float32), Case("documents", 1, 2, 200, 16, torch.float32)]
# Shapes and masks of the table in the README of jvp_flash_attention, at its greatest length, and the bar's shape.
_PEER_CASES = [
    *(Case(what, 2, 12, 2048, 64, torch.float16) for what in ("full", "causal", _RANDOM)),
    *(Case(what, 4, 16, 4096, 64) for what in ("full", "causal")),
]
_QUICK_PEER_CASES = [Case(what, 1, 2, 128, 64, torch.float32) for what in ("full", "causal", _RANDOM)]
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
        by_scores = functools.partial(_by_scores, is_causal=case.what == "causal")
        calls[_TORCH] = functools.partial(jvp, by_scores, with_gradients=False)
    return calls


def _by_scores(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


def _rows(case: Case, device: torch.device, runs: int) -> list[Row]:
    """Return times with the host's part and without, and peaks of memory."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    calls = _calls(case, device)
    _check(case, device)
    times, of_device = _timed(calls, device, runs)
    return [_row(case, who, call, device, times[who], of_device[who]) for who, call in calls.items()]


def _timed(calls: dict[str, Callable[[], Any]], device: torch.device, runs: int) -> list[dict[str, Any]]:
    """Return the times of calls with the host's part, and those of the device."""
    clock = functools.partial(wall_milliseconds, calls_in_a_row=_IN_A_ROW)
    return [interleaved(calls, device, runs, c) for c in (clock, device_milliseconds)]


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


def _peer_rows(case: Case, device: torch.device, runs: int) -> list[Row]:
    """Return times, peaks of memory, and errors of output and tangent, of jvp here, in torch, and in a peer."""
    torch.manual_seed(0)
    inputs, along = (tuple(_tensors(case, device, requires_grad=False)) for _ in range(2))
    pairs = torch.rand((case.batch, case.heads, case.length, case.length), device=device) < _SHOWN
    attn_mask, is_causal = pairs if case.what == _RANDOM else None, case.what == "causal"
    by_pairs: dict[str, Any] = {"mask": lambda b, h, q, kv: pairs[b, h, q, kv]}
    given = by_pairs if case.what == _RANDOM else _mask(case, device)
    functions: dict[str, Callable[..., Tensor]] = {
        _JVP: functools.partial(attention, **given),
        _TORCH: functools.partial(_by_scores, attn_mask=attn_mask, is_causal=is_causal),
    }
    peer = importlib.import_module("jvp_flash_attention.jvp_attention").JVPAttn.fwd_dual
    functions[_PEER] = functools.partial(peer, attn_mask=attn_mask, causal=is_causal)
    of_head = functools.partial(functions[_TORCH], attn_mask=None if attn_mask is None else attn_mask[:1, :1])
    exact = torch.func.jvp(of_head, *(tuple(x[:1, :1].double() for x in tensors) for tensors in (inputs, along)))
    calls: dict[str, Callable[[], Any]]
    calls = {who: functools.partial(torch.func.jvp, function, inputs, along) for who, function in functions.items()}
    errors = {
        who: [float(f"{(x[:1, :1] - y).abs().max() / y.abs().max():.2g}") for x, y in zip(call(), exact, strict=True)]
        for who, call in calls.items()
    }
    times, of_device = _timed(calls, device, runs)
    version = {"peer": f"{_PEER} {importlib.metadata.version(_PEER)}"}
    return [
        _row(case, who, call, device, times[who], of_device[who]) | {"errors": errors[who]} | version
        for who, call in calls.items()
    ]


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
    if importlib.util.find_spec("jvp_flash_attention") is not None:
        for case in _QUICK_PEER_CASES if is_small else _PEER_CASES:
            todo[f"{_PEER}: {describe(case)}"] = functools.partial(_peer_rows, case, device, runs)
    return todo


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("what", "case"), ("shape", "shape"), ("dtype", "dtype"), ("way", "who"), ("ms", "ms"), ("IQR", "iqr"),
        ("ms of the device", "device_ms"), ("peak MB", "peak_mb"), ("errors", "errors"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of one run."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in results["rows"]:
        if "peer" not in row:
            found.setdefault(_about(row), {})[row["who"]] = row
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
        f"{github_table(second, [*of_case, 'ms', 'peak MB'])}{_peer_table(results, of_case)}"
    )


def _about(row: Row) -> tuple[str, ...]:
    return row["case"], row["shape"], row["dtype"]


def _peer_table(results: dict[str, Any], of_case: list[str]) -> str:
    rows = [row for row in results["rows"] if "peer" in row]
    if not rows:
        return ""
    columns = ("way", "ms of the GPU", "ms with the host", "peak MB", "error of the output", "error of the tangent")
    lines = [
        [*_about(r), r["who"], *(f"{r[key]:.3g}" for key in ("device_ms", "ms")), f"{r['peak_mb']:,.0f}", *r["errors"]]
        for r in rows
    ]
    return (
        f"\n\nOutput and tangent without gradients, against {rows[0]['peer']} (`JVPAttn.fwd_dual`). The cases of 2,048 "
        "tokens are those of the table in its README. Of random pairs, which it takes as a boolean tensor "
        f"[B, H, S, S], one in {1 / _SHOWN:.0f} is visible. Errors are the greatest of the first head's, divided by "
        f"the greatest number, against float64:\n\n{github_table(lines, [*of_case, *columns])}"
    )


BENCHMARK = Benchmark("tangents", _todo, table)
