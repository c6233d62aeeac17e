"""`python recipes/benchmark.py sdpa`: masks as tensors, by `flexmasks.sdpa` and by torch's SDPA."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps_tables import github_table
from flexmasks import attention, sdpa
from flexmasks.bench.clock import interleaved, wall_milliseconds
from flexmasks.extend import mask_and_score

_IN_A_ROW = 5  # calls between two looks at the clock
_RUNS = 5
_SDPA, _OURS, _ALWAYS = "SDPA", "flexmasks.sdpa", "by blocks always"
_PASSES = "forward", "both"
_MASKS = "same", "new"  # at each call

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A mask, a tensor, of calls of batch x heads x length x size."""

    what: str
    batch: int
    heads: int
    length: int
    size: int
    compiled: bool = False  # measured in whole graphs of torch.compile, too

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.length, self.size

    def pairs(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        place = torch.arange(self.length, device=device)
        causal = place[:, None] >= place
        square = self.length, self.length
        if self.what == "all True":
            return torch.ones(square, dtype=torch.bool, device=device)
        if self.what == "causal":
            return causal
        if self.what == "padding, half":
            lens = torch.randint(self.length // 4, 3 * self.length // 4, (self.batch, 1, 1, 1), device=device)
            return place < lens
        if self.what == "documents":
            ids = torch.searchsorted(torch.randint(self.length, (8,), device=device).sort().values, place, right=True)
            return causal & (ids[:, None] == ids)
        if self.what == "window":
            return (place[:, None] - place).abs() < self.length // 16
        if self.what == "half of the blocks":
            return (torch.rand(self.length // 128, self.length // 128, device=device) < 0.5).kron(
                torch.ones(128, 128, dtype=torch.bool, device=device)
            )
        if self.what == "random pairs":
            return torch.rand(square, device=device) < 0.5
        bias = torch.randn(1, self.heads, *square, device=device, dtype=dtype)
        return bias if self.what == "bias" else bias.masked_fill(~causal, -math.inf)


_CASES = [
    Case("all True", 2, 16, 4096, 128),
    Case("causal", 2, 16, 4096, 128),
    Case("padding, half", 4, 16, 4096, 128),
    Case("documents", 2, 16, 8192, 128, compiled=True),
    Case("documents", 16, 16, 1024, 128),
    Case("window", 2, 16, 8192, 128),
    Case("half of the blocks", 2, 16, 4096, 128),
    Case("half of the blocks", 16, 16, 1024, 128),
    Case("random pairs", 2, 16, 4096, 128, compiled=True),
    Case("random pairs", 16, 16, 1024, 128),
    Case("random pairs", 16, 16, 512, 128),
    Case("bias", 2, 16, 4096, 128),
    Case("bias", 16, 16, 1024, 128),
    Case("causal bias", 2, 16, 4096, 128),
]
_QUICK = [Case("documents", 2, 2, 256, 16, compiled=True), Case("causal bias", 2, 2, 256, 16)]


def _always(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> Tensor:
    mask, score, _ = mask_and_score(pairs, (*q.shape[:3], k.shape[2]))
    out: Tensor = attention(q, k, v, mask=mask, score=score, q_offset=0)
    return out


_WAYS: dict[str, Attend] = {_SDPA: F.scaled_dot_product_attention, _OURS: sdpa, _ALWAYS: _always}


def _rows(case: Case, device: torch.device, runs: int) -> Iterator[Row]:
    """Yield times of forward passes and of both passes, with one mask and with another one at each call."""
    torch._dynamo.reset()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, d_out = (torch.randn(case.shape, device=device, dtype=dtype, requires_grad=True) for _ in range(4))
    pairs = case.pairs(device, dtype)
    blocks = mask_and_score(pairs, (*case.shape[:3], case.length)).visible_blocks

    def step(attend: Attend, passes: str, masks: str) -> object:
        given = pairs if masks == "same" else pairs.clone()
        if passes == "both":
            return torch.autograd.grad(attend(q, k, v, given), (q, k, v), d_out)
        with torch.no_grad():
            return attend(q, k, v, given)

    def row(masks: str, passes: str, who: str, ms: float, iqr: float) -> Row:
        about = {"case": case.what, "shape": "x".join(map(str, case.shape)), "dtype": str(dtype)[6:], "blocks": blocks}
        return {
            **about,
            "masks": masks,
            "kind": passes,
            "who": who,
            "ms": float(f"{ms:.4g}"),
            "iqr": float(f"{iqr:.3g}"),
        }

    clock = functools.partial(wall_milliseconds, calls_in_a_row=_IN_A_ROW)
    for masks in _MASKS:
        for passes in _PASSES:
            calls = {who: functools.partial(step, attend, passes, masks) for who, attend in _WAYS.items()}
            for who, (ms, iqr) in interleaved(calls, device, runs, clock).items():
                yield row(masks, passes, who, ms, iqr)
    if case.compiled:
        graphs = {who: torch.compile(_WAYS[who], fullgraph=True) for who in (_SDPA, _ALWAYS)}
        for passes in _PASSES:
            calls = {who: functools.partial(step, graph, passes, "same") for who, graph in graphs.items()}
            for who, (ms, iqr) in interleaved(calls, device, runs, clock).items():
                yield row("in a graph", passes, who, ms, iqr)


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_small = quick or device.type != "cuda"
    return {
        f"{case.what}, {'x'.join(map(str, case.shape))}": functools.partial(
            lambda *given: list(_rows(*given)), case, device, 2 if is_small else _RUNS
        )
        for case in (_QUICK if is_small else _CASES)
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("mask", "case"), ("shape", "shape"), ("blocks", "blocks"), ("masks", "masks"), ("passes", "kind"),
        ("way", "who"), ("ms", "ms"), ("IQR", "iqr"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run."""
    found: dict[tuple[str, str, float, str], dict[tuple[str, str], float]] = {}
    for row in results["rows"]:
        found.setdefault((row["case"], row["shape"], row["blocks"], row["masks"]), {})[row["who"], row["kind"]] = row[
            "ms"
        ]
    lines = []
    for (case, shape, blocks, masks), ms in found.items():
        times = [" / ".join(f"{ms[who, p]:.3g}" for p in _PASSES if (who, p) in ms) for who in (_SDPA, _OURS, _ALWAYS)]
        who = _OURS if (_OURS, "both") in ms else _ALWAYS
        share = " / ".join(f"{ms[who, p] / ms[_SDPA, p]:.2f}" for p in _PASSES)
        lines.append([case, shape, f"{blocks:.0%}", masks, *times, share])
    header = [
        "mask",
        "B x H x S x D",
        "blocks",
        "tensors",
        "SDPA, ms",
        "flexmasks.sdpa, ms",
        "by blocks always, ms",
        "of SDPA",
    ]
    about = (
        "forward / forward and backward pass, the host's time included. Blocks: the share of blocks of 128 x 128 with "
        "a visible pair. Tensors: the same at each call, a new one, which is looked at, or the same in a graph of "
        "torch.compile, where flexmasks.sdpa is SDPA. By blocks always: `mask_and_score` and `attention`, also where "
        "flexmasks.sdpa calls torch."
    )
    return f"{measured_on(results)}; {about}\n\n{github_table(lines, header)}"


BENCHMARK = Benchmark("sdpa", _todo, table)
