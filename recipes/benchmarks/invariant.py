"""`python recipes/benchmark.py invariant`: what the same bits in any batch cost, see `flexmasks.invariant`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps_tables import github_table
from flexmasks.attention import attention
from flexmasks.bench.clock import device_milliseconds, interleaved, wall_milliseconds
from flexmasks.context import invariant
from flexmasks.spec.arguments import get_mask
from flexmasks.spec.values import Mask

_RUNS = 15
_MOST = {"training": 1.15, "decoding": 1.3}  # of the usual time
_WAYS = {"usual": contextlib.nullcontext, "invariant": invariant}


class Training(NamedTuple):
    """Documents of random lengths in one row of tokens, causal."""

    tokens: int
    shortest: int
    longest: int
    heads: int
    kv_heads: int
    size: int
    score: str = ""

    @property
    def what(self) -> str:
        with_score = f" with {self.score}" if self.score else ""
        return f"documents of {self.shortest:,} to {self.longest:,} tokens{with_score}"

    @property
    def shape(self) -> str:
        return f"{self.tokens:,} tokens, {_heads(self.heads, self.kv_heads)}, D = {self.size}"


class Decoding(NamedTuple):
    """One query for each of a batch of sequences, in a static cache of `length` keys that is full."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    size: int
    what: str = "decoding"

    @property
    def shape(self) -> str:
        return f"{self.batch} x {self.length:,} keys, {_heads(self.heads, self.kv_heads)}, D = {self.size}"


def _heads(heads: int, kv_heads: int) -> str:
    return f"{heads} heads" if heads == kv_heads else f"{heads} / {kv_heads} heads"


_CASES: list[Training | Decoding] = [
    Training(32768, 300, 4000, 16, 16, 64),
    Training(32768, 300, 4000, 32, 8, 128),
    Training(32768, 20, 200, 16, 16, 64),
    Training(32768, 20, 200, 32, 8, 128),
    Training(32768, 300, 4000, 16, 16, 64, "alibi"),
    Training(32768, 20, 200, 16, 16, 64, "alibi"),
    *(Decoding(batch, 8192, 32, 8, 128) for batch in (1, 8, 32, 128)),
    *(Decoding(batch, 8192, 16, 16, 64) for batch in (1, 8, 32, 128)),
]
_QUICK: list[Training | Decoding] = [Training(256, 20, 90, 4, 2, 16), Decoding(2, 64, 4, 2, 16)]


def _drawn(case: Training, device: torch.device) -> Mask:
    """Return the mask of documents of random lengths."""
    generator = torch.Generator().manual_seed(case.shortest)
    lens: list[int] = []
    while sum(lens) < case.tokens:
        lens.append(int(torch.randint(case.shortest, case.longest + 1, (), generator=generator)))
    ids = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))[: case.tokens]
    return get_mask("causal") & get_mask("document", document_ids=ids.to(device))


def _training(case: Training, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    mask = _drawn(case, device)
    q, k, v = (
        torch.randn(1, case.tokens, n, case.size, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for n in (case.heads, case.kv_heads, case.kv_heads)
    )
    d_out = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        out = attention(q, k, v, mask=mask, score=case.score or None)
        return torch.autograd.grad(out, (q, k, v), d_out)

    return step


def _decoding(case: Decoding, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    q = torch.randn(case.batch, case.heads, 1, case.size, device=device, dtype=dtype)
    k, v = (
        torch.randn(case.batch, case.length, case.kv_heads, case.size, device=device, dtype=dtype).transpose(1, 2)
        for _ in range(2)
    )
    starts = torch.full((case.batch,), case.length - 1, device=device)

    def step() -> Tensor:
        with torch.no_grad():
            out: Tensor = attention(q, k, v, mask="causal", q_offset=starts)
            return out

    return step


def _rows(case: Training | Decoding, device: torch.device, runs: int) -> list[Row]:
    """Return the times of a call outside and inside, all in and of the GPU alone."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    is_training = isinstance(case, Training)
    step = _training(case, device, dtype) if isinstance(case, Training) else _decoding(case, device, dtype)

    def inside(way: str) -> object:
        with _WAYS[way]():
            return step()

    calls = {way: functools.partial(inside, way) for way in _WAYS}
    all_in = interleaved(calls, device, runs, functools.partial(wall_milliseconds, calls_in_a_row=5))
    of_device = interleaved(calls, device, runs, device_milliseconds)
    return [
        {
            "kind": "training" if is_training else "decoding", "case": case.what, "shape": case.shape,
            "dtype": str(dtype)[6:], "who": way, "ms": float(f"{all_in[way][0]:.4g}"),
            "iqr": float(f"{all_in[way][1]:.3g}"), "device_ms": float(f"{of_device[way][0]:.4g}"),
        }
        for way in _WAYS
    ]  # fmt: skip


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_small = quick or device.type != "cuda"
    return {
        f"{case.what}, {case.shape}": functools.partial(_rows, case, device, 3 if is_small else _RUNS)
        for case in (_QUICK if is_small else _CASES)
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = ("what", "case"), ("sizes", "shape"), ("way", "who"), ("ms", "ms"), ("IQR", "iqr"), ("GPU", "device_ms")
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run."""
    by_case: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in results["rows"]:
        by_case.setdefault((row["kind"], row["case"], row["shape"]), {})[row["who"]] = row
    lines, held = [], 0
    for (kind, case, shape), ways in by_case.items():
        usual, inside = ways["usual"], ways["invariant"]
        share = inside["ms"] / usual["ms"]
        held += share <= _MOST[kind]
        figures = (f"{row[field]:.3g}" for field in ("ms", "device_ms") for row in (usual, inside))
        cell = f"{share:.2f}" if share <= _MOST[kind] else f"**{share:.2f}**"
        lines.append([case, shape, *figures, cell, f"{inside['device_ms'] / usual['device_ms']:.2f}"])
    header = ["what", "sizes", "usual, ms", "invariant, ms", "usual, GPU", "invariant, GPU", "all in", "GPU alone"]
    about = (
        "medians by turns of forward and backward passes, and of decoding steps. GPU: the GPU's own time, with empty "
        f"caches. Bars: at most {_MOST['training']} of the usual time in training and {_MOST['decoding']} in decoding; "
        f"{held} of {len(lines)} figures hold them, the others are bold."
    )
    return f"{measured_on(results)}; {about}\n\n{github_table(lines, header)}"


BENCHMARK = Benchmark("invariant", _todo, table)
