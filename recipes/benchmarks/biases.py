"""`python recipes/benchmark.py biases`: short sequences with a bias that learns, against SDPA and compiled flex."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.memory import peak_bytes
from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps_tables import github_table
from flexmasks.attention import attention
from flexmasks.bench.clock import device_milliseconds, interleaved, wall_milliseconds
from flexmasks.spec.arguments import get_score

_IN_A_ROW = 10  # calls between two looks at the clock
_RUNS = 9
_BIASES = 3  # different tensors, which are taken by turns: those of different layers
_OURS, _SDPA, _FLEX = "flexmasks", "SDPA", "compiled flex"
_PASSES = "forward", "both"


class Case(NamedTuple):
    """Sequences of equal length; their bias [1, heads, length, length] is shared by all of them."""

    what: str
    batch: int
    heads: int
    length: int
    size: int
    padded: bool  # an eighth of the keys


_CASES = [
    Case("triangle attention", 256, 4, 256, 32, True),
    Case("triangle attention", 512, 4, 512, 32, True),
    Case("triangle attention", 128, 8, 768, 32, True),
    Case("windows of 7 x 7", 4096, 4, 49, 32, False),
    Case("windows of 8 x 8", 4096, 4, 64, 32, False),
]
_QUICK = [Case("triangle attention", 2, 2, 24, 16, True), Case("windows of 3 x 3", 4, 2, 9, 16, False)]


def _ways(case: Case, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Return the ways to attend, functions of q, k, v and a bias."""
    lens = torch.full((case.batch,), case.length - case.length // 8 * case.padded, device=device)
    hidden = torch.arange(case.length, device=device) >= lens[:, None, None, None]

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        mask: Any = {"mask": "padding", "kv_lens": lens} if case.padded else {}
        out: Tensor = attention(q, k, v, score=get_score("pair_bias", bias=bias), **mask)
        return out

    def by_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        added = bias.masked_fill(hidden, -math.inf) if case.padded else bias
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added)

    compiled, blocks = torch.compile(flex_attention), None
    if case.padded:
        visible = lambda b, h, q, kv: kv < lens[b]  # noqa: E731
        blocks = create_block_mask(visible, case.batch, None, case.length, case.length, device=str(device))

    def by_flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        score = lambda s, b, h, i, j: s + bias[0, h, i, j]  # noqa: E731
        out: Tensor = compiled(q, k, v, score, blocks)
        return out

    return {_OURS: ours, _SDPA: by_sdpa} | ({_FLEX: by_flex} if device.type == "cuda" else {})


def _rows(case: Case, device: torch.device, runs: int) -> list[Row]:
    """Return the times of forward passes and of both passes, with the host's time and without, and their memory."""
    torch._dynamo.reset()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = case.batch, case.heads, case.length, case.size
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    d_out = torch.randn(shape, device=device, dtype=dtype)
    sizes = 1, case.heads, case.length, case.length
    biases = itertools.cycle([
        torch.randn(sizes, device=device, dtype=dtype, requires_grad=True) for _ in range(_BIASES)
    ])  # fmt: skip

    def forward(attend: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return attend(q, k, v, next(biases))

    def both(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        bias = next(biases)
        return torch.autograd.grad(attend(q, k, v, bias), (q, k, v, bias), d_out)

    clock = functools.partial(wall_milliseconds, calls_in_a_row=_IN_A_ROW)
    rows = []
    for name, step in zip(_PASSES, (forward, both), strict=True):
        calls = {who: functools.partial(step, attend) for who, attend in _ways(case, device).items()}
        times, of_device = (interleaved(calls, device, runs, c) for c in (clock, device_milliseconds))
        for who, call in calls.items():
            figures = {"ms": float(f"{times[who][0]:.4g}"), "iqr": float(f"{times[who][1]:.3g}")}
            figures["device_ms"] = float(f"{of_device[who][0]:.4g}")
            figures["peak_mb"] = float(f"{peak_bytes(call, device) / 1e6:.3g}")
            about = {"kind": name, "case": case.what, "shape": "x".join(map(str, shape)), "dtype": str(dtype)[6:]}
            rows.append({**about, "who": who, **figures})
    return rows


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_small = quick or device.type != "cuda"
    return {
        f"{case.what}, {case.batch}x{case.heads}x{case.length}x{case.size}": functools.partial(
            _rows, case, device, 2 if is_small else _RUNS
        )
        for case in (_QUICK if is_small else _CASES)
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("what", "case"), ("shape", "shape"), ("passes", "kind"), ("way", "who"), ("ms", "ms"), ("IQR", "iqr"),
        ("ms of the device", "device_ms"), ("peak MB", "peak_mb"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run."""
    found: dict[tuple[str, str], dict[tuple[str, str], Row]] = {}
    for row in results["rows"]:
        found.setdefault((row["case"], row["shape"]), {})[row["who"], row["kind"]] = row
    lines = []
    for (case, shape), by_way in found.items():
        for clock, field in (("all in", "ms"), ("GPU", "device_ms")):
            times = [" / ".join(f"{by_way[who, p][field]:.3g}" for p in _PASSES) for who in (_OURS, _SDPA, _FLEX)]
            shares = [
                " / ".join(f"{by_way[_OURS, kind][field] / by_way[who, kind][field]:.2f}" for kind in _PASSES)
                for who in (_SDPA, _FLEX)
            ]
            lines.append([case, shape, clock, *times, *shares])
        peaks = (f"{by_way[who, 'both']['peak_mb']:.3g}" for who in (_OURS, _SDPA, _FLEX))
        lines.append(["", "", "peak, MB", *peaks, "", ""])
    header = ["what", "B x H x S x D", "time", "flexmasks, ms", "SDPA, ms", "compiled flex, ms", "of SDPA", "of flex"]
    about = (
        "forward / forward and backward pass. All in: the host's time and another bias at each call included; GPU: the "
        "GPU's own time, with empty caches. The bias [1, H, S, S] learns. In triangle attention an eighth of the keys "
        "is padding, which SDPA has in its attn_mask; the gradient of compiled flex is summed by atomics. Target: at "
        "most 0.5 of SDPA, and below 1 of flex."
    )
    return f"{measured_on(results)}; {about}\n\n{github_table(lines, header)}"


BENCHMARK = Benchmark("biases", _todo, table)
