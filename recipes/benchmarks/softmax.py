"""`python recipes/benchmark.py softmax`: the masked softmax against torch."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import private_torch
from benchmarks.results import Row, choose_device, chosen_steps, machine, machine_line, run_steps
from benchmarks.runner import measure_passes
from flexmasks.attention import block_mask, dense_mask
from flexmasks.bench.clock import Clock, device_milliseconds, interleaved, wall_milliseconds
from flexmasks.softmax import masked_softmax, scaled_masked_softmax
from flexmasks.spec.arguments import get_mask
from flexmasks.spec.values import Mask

_RUNS = {"cuda": 15, "cpu": 5}
_OF_TORCH = "torch._masked_softmax"
_CALLS_IN_A_ROW = {"cuda": 500, "cpu": 5}  # of one wall time


@dataclass(frozen=True)
class Case:
    """One call to measure.

    `mask` is a Mask, or the boolean tensor [B, 1, Q, K] of a scaled masked softmax.
    """

    name: str
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    mask: Mask | Tensor
    wall: bool = False  # measure wall time, host included, rather than the GPU's
    beside_compiled: bool = True  # measure torch.compile too, which takes most of the benchmark's time

    def ours(self, x: Tensor) -> Tensor:
        """Call flexmasks."""
        if isinstance(self.mask, Tensor):
            return scaled_masked_softmax(x, self.mask, 0.5)
        return masked_softmax(x, mask=self.mask, q_offset=0)

    def hidden(self, device: torch.device) -> Tensor:
        """Return booleans that broadcast to x, True = hidden."""
        batch, heads, q_len, kv_len = self.shape
        if isinstance(self.mask, Tensor):
            return self.mask
        return ~dense_mask(self.mask, q_len, kv_len, batch=batch, heads=heads, device=device, q_offset=0)

    def least_bytes(self, visible: float) -> dict[str, float]:
        """Return the least bytes that each pass moves for a visible share."""
        size = math.prod(self.shape) * self.dtype.itemsize
        if isinstance(self.mask, Tensor):  # scattered: all of x and y must be read, since the zeros of y are unknown
            return {"forward": 2 * size + self.mask.numel() * self.mask.itemsize, "backward": 3 * size}
        return {"forward": size * (1 + visible), "backward": size * (1 + 2 * visible)}


def cases(device: torch.device) -> list[Case]:
    """Return the calls to measure; a CPU gets small ones."""
    large = device.type == "cuda"
    heads = 32 if large else 2
    generator = torch.Generator().manual_seed(0)

    def masks(length: int, *used: float) -> dict[str, Mask]:
        """Return masks of a length; batch elements use these parts of it in "grouped_tril"."""
        ids = (torch.rand(length, generator=generator) < 7 / length).cumsum(0).to(device)
        return {
            "causal": get_mask("causal"),
            f"sliding_window {length // 4}": get_mask("sliding_window", window=length // 4),
            "document": get_mask("document", document_ids=ids),
            "grouped_tril": get_mask("grouped_tril", seq_lens=torch.tensor([int(length * u) for u in used]).to(device)),
        }

    def all_masks(shape: tuple[int, int, int, int], dtype: torch.dtype, *used: float, compiled: str) -> list[Case]:
        own = masks(shape[3], *used).items()
        return [Case(name, shape, dtype, mask, beside_compiled=name in compiled) for name, mask in own]

    def scattered(shape: tuple[int, int, int, int], compiled: bool) -> Case:
        hidden = (torch.rand(shape[0], 1, *shape[2:], generator=generator) < 0.3).to(device)  # for all heads
        return Case("scaled masked", shape, torch.float16, hidden, beside_compiled=compiled)

    short, long = (1000, 4096) if large else (200, 256)
    small = (1, 8, 1024, 1024) if large else (1, 2, 64, 64)
    of_twelve = torch.linspace(0.55, 1, 12).tolist()
    twelve = masks(short, *of_twelve)["grouped_tril"]
    all_four = "causal, sliding_window 1024, sliding_window 64, document, grouped_tril"
    cases = all_masks((3, 2 * heads, short, short), torch.float32, 1, 0.9, 0.7, compiled="grouped_tril")
    cases += [Case("grouped_tril", (12, 2 * heads, short, short), torch.float32, twelve)]
    if large:
        used = torch.linspace(0.55, 1, 16).tolist()
        cases += all_masks((16, 16, 2048, 2048), torch.float16, *used, compiled="")
    cases += all_masks((4, heads, long, long), torch.bfloat16, 1, 0.9, 0.85, 0.8, compiled=all_four)
    if large:
        cases += all_masks((1, 8, 16384, 16384), torch.bfloat16, 0.9, compiled="")
    cases += [scattered((16, 16, 2048, 2048) if large else (2, 2, 256, 256), True)]
    if large:
        cases += [scattered(shape, True) for shape in ((1, 8, 1024, 1024), (1, 1, 4096, 4096))]
        cases += [scattered((1, 16, 16384, 16384), False)]
    return [*cases, Case("causal, host included", small, torch.float16, get_mask("causal"), wall=True)]


def softmax(
    device: str | None = None, file: str | None = None, only: Sequence[str] = (), resume: bool = False
) -> dict[str, Any]:
    """Measure the softmax, print a table, and write the figures to a file (see `results.run_benchmark`)."""
    at = choose_device(device)
    copy = _copy_bandwidth(at)
    results: dict[str, Any] = {"benchmark": "softmax", "machine": machine(at), "copy_tb_s": copy, "rows": []}
    steps = {f"{c.name}, {list(c.shape)}": functools.partial(_rows, c, at, copy) for c in cases(at)}
    run_steps(results, chosen_steps(steps, only), file, resume)
    print(table(results))
    return results


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    rows = [
        [r["case"], r["shape"], r["dtype"], f"{r['visible']:.0%}", r["pass"], r["who"], r["ms"], r["tb_s"], r["share"]]
        for r in results["rows"]
    ]
    header = ["case", "shape", "dtype", "visible", "pass", "who", "ms", "TB/s of least bytes", "of copy"]
    copied = f"copy: {results['copy_tb_s']:.3g} TB/s, read and written; unmasked: all of x, no mask at all"
    text = tabulate(rows, headers=header, floatfmt=("",) * 6 + (".3g", ".3g", ".0%"))
    return f"{machine_line(results)}\n{text}\n{copied}"


def markdown(results: dict[str, Any]) -> str:
    """Return the table of a run on a GPU."""
    by_key = {(r["case"], r["shape"], r["pass"], r["who"]): r for r in results["rows"]}
    beside = [who for who in ("eager", _OF_TORCH, "torch.compile") if any(key[3] == who for key in by_key)]
    rows = []
    for case, shape, kind in dict.fromkeys(key[:3] for key in by_key):
        ours = by_key[case, shape, kind, "flexmasks"]
        of_copy = "" if "host" in case else f"{ours['share']:.0%}"
        line = [case, f"{shape} {ours['dtype']}", kind, f"{ours['ms']:.3g}", f"{ours['tb_s']:.2f}", of_copy]
        for who in beside:
            other = by_key.get((case, shape, kind, who))
            line.append("" if other is None else f"{other['ms']:.3g} ({other['ms'] / ours['ms']:.1f} x)")
        rows.append(line)
    headers = ["case", "x", "pass", "ms", "TB/s", "of copy", *beside]
    of_torch = (
        f" {_OF_TORCH}, which torch does not document, reads a mask of the shape of x that was made before; a row that "
        "sees nothing is NaN."
    )
    return (
        f"On one {results['machine']['device']}, torch {results['machine']['torch']}; medians, backward passes through "
        "autograd. TB/s count the bytes that must move: the visible part of the input is read once, the output is "
        f'written once. "of copy" is their share of the {results["copy_tb_s"]:.2f} TB/s that a copy reached in the '
        f"same run.{of_torch if _OF_TORCH in beside else ''}\n\n"
        + tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    )


def _rows(case: Case, device: torch.device, copy: float) -> list[Row]:
    """Return the figures of one case, a row for each pass and implementation."""
    hidden = case.hidden(device)
    visible = 1 - float(hidden.float().mean())
    runs = _RUNS[device.type]
    clock: Clock = device_milliseconds
    if case.wall:
        runs, clock = 5, functools.partial(wall_milliseconds, calls_in_a_row=_CALLS_IN_A_ROW[device.type])
    x = torch.randn(case.shape, dtype=case.dtype, device=device)
    torch.compiler.reset()
    implementations = _implementations(case, hidden)
    measured, _ = measure_passes(implementations, [x], runs=runs, required=("flexmasks", "eager"), clock=clock)
    ours, eager = (measured[who].output.detach().float() for who in ("flexmasks", "eager"))
    largest_error = float((ours - eager).abs().max())
    rows = []
    for which, least in case.least_bytes(visible).items():
        for who, figures in measured.items():
            ms = figures.milliseconds[which][0]
            tb_s = least / ms / 1e9
            rows.append(
                {
                    "case": case.name,
                    "shape": "x".join(map(str, case.shape)),
                    "dtype": str(case.dtype).removeprefix("torch."),
                    "visible": round(visible, 4),
                    "pass": which,
                    "who": who,
                    "ms": float(f"{ms:.5g}"),
                    "tb_s": float(f"{tb_s:.4g}"),
                    "share": float(f"{tb_s / copy:.4g}"),
                    "largest_error": largest_error if (who, which) == ("flexmasks", "forward") else None,
                }
            )
    return rows


def _implementations(case: Case, hidden: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return calls of flexmasks, torch, and installed libraries without a mask."""
    scale = 0.5 if isinstance(case.mask, Tensor) else 1.0
    empty_rows = hidden.all(-1, keepdim=True)

    def eager(x: Tensor) -> Tensor:
        return torch.softmax((x * scale).masked_fill(hidden, -math.inf), -1).masked_fill(empty_rows, 0)

    mask = case.mask
    if isinstance(mask, Mask):
        visible = block_mask(mask, case.shape[2], batch=case.shape[0], device=hidden.device).mask_mod

    def fused(x: Tensor) -> Tensor:  # torch.compile fuses the mask's computation too
        if isinstance(mask, Tensor):
            return eager(x)
        indices = (torch.arange(n, device=x.device) for n in x.shape)
        unseen = ~visible(*torch.meshgrid(*indices, indexing="ij"))
        return torch.softmax(x.masked_fill(unseen, -math.inf), -1).masked_fill(unseen, 0)

    implementations: dict[str, Callable[[Tensor], Tensor]] = {"flexmasks": case.ours, "eager": eager}
    of_all = hidden.expand(case.shape).contiguous()  # its backward pass takes no smaller mask
    implementations[_OF_TORCH] = lambda x: private_torch.masked_softmax(x if scale == 1 else x * scale, of_all)
    if case.beside_compiled:
        implementations["torch.compile"] = torch.compile(fused, dynamic=False)
    for who, module, name in (
        ("quack, unmasked", "quack.softmax", "softmax"),
        ("Liger, unmasked", "liger_kernel.transformers.functional", "liger_softmax"),
    ):
        try:
            rowwise = getattr(importlib.import_module(module), name)
        except Exception:  # not installed, or not made for this machine
            continue
        if hidden.is_cuda:
            implementations[who] = functools.partial(_of_matrix, rowwise)
    return implementations


def _of_matrix(rowwise: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call a softmax that takes [rows, columns] only."""
    return rowwise(x.reshape(-1, x.shape[-1])).view(x.shape)


def _copy_bandwidth(device: torch.device) -> float:
    """Return the TB/s of a large copy, bytes read and written."""
    size = 1 << (31 if device.type == "cuda" else 24)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms, _ = interleaved({"copy": lambda: target.copy_(source)}, device, _RUNS[device.type])["copy"]
    return 2 * size / ms / 1e9
