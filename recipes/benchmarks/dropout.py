"""`python recipes/benchmark.py dropout`: calls that drop weights, against calls that do not, and against SDPA's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps_tables import github_table
from flexmasks.attention import attention, explain
from flexmasks.bench.clock import device_milliseconds, interleaved, wall_milliseconds

_P = 0.1
_MOST = 2.2  # of the time without
_RUNS = 9
_WITHOUT, _WITH, _SDPA = "without", "with", "SDPA with"


class Case(NamedTuple):
    """Calls of equal sizes; `backend` runs the kept pairs."""

    mask: str
    backend: str
    batch: int
    heads: int
    length: int
    size: int

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.heads}x{self.length:,}x{self.size}"


_SHAPE, _LARGE_HEADS, _SHORT = (4, 16, 4096, 64), (4, 16, 4096, 128), (8, 8, 1024, 64)
_CASES = [
    *(Case(mask, "flex", *_SHAPE) for mask in ("causal", "documents", "window", "bias")),
    *(Case("causal", backend, *_SHAPE) for backend in ("flex_flash", "auto")),
    *(Case(mask, "auto", *_SHAPE) for mask in ("documents", "window")),
    Case("causal", "flex", *_LARGE_HEADS),
    *(Case("learned bias", backend, *_SHORT) for backend in ("short", "auto")),
    Case("causal", "auto", 8, 8, 512, 64),
]
_QUICK = [Case(mask, "auto", 1, 2, 64, 16) for mask in ("causal", "documents", "window", "bias", "learned bias")]


def _arguments(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the mask and the score of a call, with their parameters."""
    length = case.length
    if case.mask == "documents":
        ids = torch.arange(length, device=device) // (length * 2 // 7)
        return {"mask": ["causal", "document"], "document_ids": ids.expand(case.batch, -1).contiguous()}
    if case.mask == "window":
        return {"mask": "sliding_window", "window": length // 4 - 1}
    if "bias" in case.mask:
        bias = torch.randn(case.heads, length, length, device=device, dtype=dtype)
        return {"score": bias.requires_grad_(case.mask == "learned bias")}
    return {"mask": "causal"}


def _by_sdpa(case: Case, arguments: dict[str, Any]) -> Callable[..., Tensor] | None:
    """Return SDPA's call with dropout, where a tensor as a mask is no unfair comparison."""
    if case.mask == "causal":
        return functools.partial(F.scaled_dot_product_attention, is_causal=True, dropout_p=_P)
    if "bias" in case.mask:
        bias = arguments["score"][None]
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=_P)
    return None


def _rows(case: Case, device: torch.device, runs: int) -> list[Row]:
    """Return the times of forward and backward pass, all in and of the GPU alone; none if the backend refuses."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(case[2:], device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    d_out, arguments = torch.randn_like(q), _arguments(case, device, dtype)
    learned = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    options: dict[str, Any] = {**arguments, "backend": case.backend}
    try:
        chosen = {who: explain(q, k, v, **options, dropout_p=p).backend for who, p in ((_WITHOUT, 0.0), (_WITH, _P))}
    except ValueError as reason:
        print(f"{case.backend} takes no dropout here: {reason}")
        return []
    ways: dict[str, Callable[..., Any] | None] = {
        _WITHOUT: functools.partial(attention, **options),
        _WITH: functools.partial(attention, **options, dropout_p=_P),
        _SDPA: _by_sdpa(case, arguments),
    }

    def step(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v), (q, k, v, *learned), d_out)

    calls = {who: functools.partial(step, attend) for who, attend in ways.items() if attend is not None}
    all_in = interleaved(calls, device, runs, functools.partial(wall_milliseconds, calls_in_a_row=5))
    of_device = interleaved(calls, device, runs, device_milliseconds)
    about = {"case": case.mask, "shape": case.shape, "dtype": str(dtype)[6:], "asked": case.backend}
    return [
        {
            **about, "who": who, "backend": chosen.get(who, ""), "ms": float(f"{all_in[who][0]:.4g}"),
            "iqr": float(f"{all_in[who][1]:.3g}"), "device_ms": float(f"{of_device[who][0]:.4g}"),
        }
        for who in calls
    ]  # fmt: skip


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_small = quick or device.type != "cuda"
    return {
        f"{case.mask}, {case.backend}, {case.shape}": functools.partial(_rows, case, device, 2 if is_small else _RUNS)
        for case in (_QUICK if is_small else _CASES)
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("what", "case"), ("shape", "shape"), ("asked for", "asked"), ("way", "who"), ("backend", "backend"),
        ("ms", "ms"), ("IQR", "iqr"), ("ms of the device", "device_ms"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run."""
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in results["rows"]:
        found.setdefault((row["case"], row["shape"], row["asked"]), {})[row["who"]] = row
    lines, held = [], 0
    for (case, shape, asked), ways in found.items():
        without, dropped = ways[_WITHOUT], ways[_WITH]
        share = dropped["ms"] / without["ms"]
        held += share <= _MOST
        names = dict.fromkeys((without["backend"], dropped["backend"]))
        times = [f"{ways[who]['ms']:.3g}" if who in ways else "" for who in (_WITHOUT, _WITH, _SDPA)]
        cell = f"{share:.2f}" if share <= _MOST else f"**{share:.2f}**"
        of_device = f"{dropped['device_ms'] / without['device_ms']:.2f}"
        lines.append([case, shape, asked, " and ".join(names), *times, cell, of_device])
    header = [
        "mask", "B x H x S x D", "asked for", "runs without and with", "without, ms", "with, ms", "SDPA with, ms",
        "with / without", "GPU alone",
    ]  # fmt: skip
    about = (
        f"`dropout_p={_P}`; medians by turns of forward and backward passes, all in. GPU alone: the GPU's own time. "
        f"Bar: at most {_MOST} of the time without; {held} of {len(lines)} calls hold it, others are bold. SDPA has a "
        "tensor as its mask where it is not causal."
    )
    return f"{measured_on(results)}; {about}\n\n{github_table(lines, header)}"


BENCHMARK = Benchmark("dropout", _todo, table)
