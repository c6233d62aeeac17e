"""`python recipes/benchmark.py dropout`: calls that drop weights, against calls that do not, and against SDPA's."""

from __future__ import annotations

import functools
import math
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
_PASSES = "forward", "both"


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
    *(Case(mask, "auto", *_SHAPE) for mask in ("documents", "window", "bias")),
    *(Case(mask, "flex", *_LARGE_HEADS) for mask in ("causal", "documents")),
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
    """Return the times of forward passes and of both passes, all in and of the GPU alone."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(case[2:], device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    d_out, arguments = torch.randn_like(q), _arguments(case, device, dtype)
    learned = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    ours = functools.partial(attention, **arguments, backend=case.backend)
    ways: dict[str, Callable[..., Any] | None] = {_WITHOUT: ours, _WITH: functools.partial(ours, dropout_p=_P)}
    ways[_SDPA] = _by_sdpa(case, arguments)
    known = {who: attend for who, attend in ways.items() if attend is not None}

    def forward(attend: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    def both(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v), (q, k, v, *learned), d_out)

    about = {"case": case.mask, "shape": case.shape, "dtype": str(dtype)[6:], "asked": case.backend}
    chosen = {
        _WITHOUT: explain(q, k, v, **arguments, backend=case.backend).backend,
        _WITH: explain(q, k, v, **arguments, backend=case.backend, dropout_p=_P).backend,
    }
    rows = []
    for name, step in zip(_PASSES, (forward, both), strict=True):
        calls = {who: functools.partial(step, attend) for who, attend in known.items()}
        all_in = interleaved(calls, device, runs, functools.partial(wall_milliseconds, calls_in_a_row=5))
        of_device = interleaved(calls, device, runs, device_milliseconds)
        for who in calls:
            figures = {"ms": float(f"{all_in[who][0]:.4g}"), "iqr": float(f"{all_in[who][1]:.3g}")}
            figures["device_ms"] = float(f"{of_device[who][0]:.4g}")
            rows.append({**about, "kind": name, "who": who, "backend": chosen.get(who, ""), **figures})
    return rows


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
        ("what", "case"), ("shape", "shape"), ("asked for", "asked"), ("passes", "kind"), ("way", "who"),
        ("backend", "backend"), ("ms", "ms"), ("IQR", "iqr"), ("ms of the device", "device_ms"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run."""
    found: dict[tuple[str, str, str], dict[tuple[str, str], Row]] = {}
    for row in results["rows"]:
        found.setdefault((row["case"], row["shape"], row["asked"]), {})[row["who"], row["kind"]] = row
    lines, held = [], 0
    for (case, shape, asked), by_way in found.items():
        without, dropped = by_way[_WITHOUT, "both"], by_way[_WITH, "both"]
        shares = [by_way[_WITH, kind]["ms"] / by_way[_WITHOUT, kind]["ms"] for kind in _PASSES]
        is_held = shares[1] <= _MOST
        held += is_held
        names = dict.fromkeys((without["backend"], dropped["backend"]))
        cells = [" / ".join(f"{by_way.get((who, p), {}).get('ms', math.nan):.3g}" for p in _PASSES)
                 for who in (_WITHOUT, _WITH, _SDPA)]  # fmt: skip
        share = " / ".join(f"{x:.2f}" for x in shares)
        of_device = dropped["device_ms"] / without["device_ms"]
        more = [share if is_held else f"**{share}**", f"{of_device:.2f}"]
        lines.append([case, shape, asked, " and ".join(names), *(c.replace("nan / nan", "") for c in cells), *more])
    header = [
        "mask", "B x H x S x D", "asked for", "runs without and with", "without, ms", "with, ms", "SDPA with, ms",
        "with / without", "GPU alone",
    ]  # fmt: skip
    about = (
        f"`dropout_p={_P}`; forward / forward and backward pass, medians by turns, all in. GPU alone: both passes, the "
        f"GPU's own time. Bar: at most {_MOST} of the time without; {held} of {len(lines)} calls hold it, others are "
        "bold. SDPA's has a tensor as its mask where it is not causal."
    )
    return f"{measured_on(results)}; {about}\n\n{github_table(lines, header)}"


BENCHMARK = Benchmark("dropout", _todo, table)
