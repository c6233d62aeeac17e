"""`python -m flexmasks bench softmax`: the masked softmax against torch, and the bandwidth that it reaches."""

from __future__ import annotations

import functools
import gc
import importlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from flexmasks.attention import block_mask, dense_mask
from flexmasks.bench.blocks import backward_twice, chosen, machine, measure
from flexmasks.bench.console import progress, synchronize
from flexmasks.bench.timing import interleaved
from flexmasks.softmax import masked_softmax, scaled_masked_softmax
from flexmasks.spec.arguments import get_mask
from flexmasks.spec.values import Mask

_RUNS = {"cuda": 15, "cpu": 5}
_CALLS = {"cuda": 500, "cpu": 5}  # of which the wall time of one is the mean


@dataclass(frozen=True)
class Case:
    """One call that is measured. `mask` is a Mask, or the boolean tensor [B, 1, Q, K] of a scaled masked softmax."""

    name: str
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    mask: Mask | Tensor
    wall: bool = False  # time on the clock, host included, rather than the GPU's

    def ours(self, x: Tensor) -> Tensor:
        if isinstance(self.mask, Tensor):
            return scaled_masked_softmax(x, self.mask, 0.5)
        return masked_softmax(x, mask=self.mask)

    def hidden(self, device: torch.device) -> Tensor:
        """Booleans that broadcast to x."""
        batch, heads, q_len, kv_len = self.shape
        if isinstance(self.mask, Tensor):
            return self.mask
        return ~dense_mask(self.mask, q_len, kv_len, batch=batch, heads=heads, device=device)

    def floor(self, visible: float) -> dict[str, float]:
        """Bytes that must move, forward and backward."""
        size = math.prod(self.shape) * self.dtype.itemsize
        if isinstance(self.mask, Tensor):  # scattered: all of x is read, and so is y, for it is not known where it is 0
            return {"forward": 2 * size + self.mask.numel() * self.mask.itemsize, "backward": 3 * size}
        return {"forward": size * (1 + visible), "backward": size * (1 + 2 * visible)}


def cases(device: torch.device) -> list[Case]:
    """What is measured; on a CPU in small."""
    large = device.type == "cuda"
    short, long, heads = (1000, 4096, 32) if large else (200, 256, 2)
    generator = torch.Generator().manual_seed(0)

    def lengths(length: int, *shares: float) -> Mask:
        seq_lens = torch.tensor([int(length * s) for s in shares], device=device)
        return get_mask("grouped_tril", seq_lens=seq_lens)

    def padded(batch: int, length: int) -> Tensor:
        mask = torch.rand(batch, 1, length, length, generator=generator) < 0.3
        return mask.to(device)

    ids = (torch.rand(long, generator=generator) < 1 / 600).cumsum(0).to(device)
    many = (4, heads, long, long)
    half = torch.bfloat16
    few = [1, 0.9, 0.7]
    twelve = torch.linspace(0.55, 1, 12).tolist()
    scaled = (16, 16, 2048, 2048) if large else (2, 2, 256, 256)
    tril = get_mask("causal")
    window = get_mask("sliding_window", window=long // 4)
    small = (1, 8, 1024, 1024) if large else (1, 2, 64, 64)
    return [
        Case("grouped_tril", (3, 2 * heads, short, short), torch.float32, lengths(short, *few)),
        Case("grouped_tril", (12, 2 * heads, short, short), torch.float32, lengths(short, *twelve)),
        Case("grouped_tril", many, half, lengths(long, 1, 0.9, 0.85, 0.8)),
        Case("scaled masked", scaled, torch.float16, padded(scaled[0], scaled[2])),
        Case("causal", many, half, tril),
        Case(f"sliding_window {long // 4}", many, half, window),
        Case("document", many, half, get_mask("document", document_ids=ids)),
        Case("causal, host included", small, torch.float16, tril, wall=True),
    ]


def softmax(device: str | None = None, file: str | None = None) -> dict[str, Any]:
    """Measure, print a table, and write the figures to a JSON file where one is named."""
    at = chosen(device)
    results: dict[str, Any] = {
        "benchmark": "softmax",
        "machine": machine(at),
        "copy_tb_s": _copy_bandwidth(at),
        "rows": [],
    }
    copy = results["copy_tb_s"]
    steps = {f"{c.name}, {list(c.shape)}": functools.partial(_rows, c, at, copy) for c in cases(at)}
    with backward_twice():
        measure(results, steps, file)
    print(table(results))
    return results


def table(results: dict[str, Any]) -> str:
    """The figures of one run as text."""
    rows = [
        [r["case"], r["shape"], r["dtype"], f"{r['visible']:.0%}", r["pass"], r["who"], r["ms"], r["tb_s"], r["share"]]
        for r in results["rows"]
    ]
    header = ["case", "shape", "dtype", "visible", "pass", "who", "ms", "TB/s of floor bytes", "of copy"]
    about = ", ".join(str(v) for k, v in results["machine"].items() if k != "device_type")
    copied = f"copy: {results['copy_tb_s']:.3g} TB/s, read and written; unmasked: all of x, no mask at all"
    return f"{about}\n{tabulate(rows, headers=header, floatfmt=('',) * 6 + ('.3g', '.3g', '.0%'))}\n{copied}"


def markdown(results: dict[str, Any]) -> str:
    """The README's table, of a run on a GPU."""
    by_key = {(r["case"], r["shape"], r["pass"], r["who"]): r for r in results["rows"]}
    rows = []
    for case, shape, kind in dict.fromkeys(key[:3] for key in by_key):
        ours, eager = by_key[case, shape, kind, "flexmasks"], by_key[case, shape, kind, "eager"]
        compiled = by_key.get((case, shape, kind, "torch.compile"))
        of_copy = "" if "host" in case else f"{ours['share']:.0%}"
        line = [case, f"{shape} {ours['dtype']}", kind, f"{ours['ms']:.3g}", f"{ours['tb_s']:.2f}", of_copy]
        for other in (eager, compiled):
            line.append("" if other is None else f"{other['ms']:.3g} ({other['ms'] / ours['ms']:.1f} x)")
        rows.append(line)
    headers = ["case", "x", "pass", "ms", "TB/s", "of copy", "eager", "torch.compile"]
    made = results["machine"]
    return (
        f"On one {made['device']}, torch {made['torch']}: TB/s of the bytes that must move (what is visible of the "
        "input read once, the output written once), and their share of a copy's "
        f"{results['copy_tb_s']:.2f} TB/s in the same run; backward passes through autograd; medians.\n\n"
        + tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    )


def _rows(case: Case, device: torch.device, copy: float) -> list[dict[str, Any]]:
    """The figures of one case, one for each pass and implementation."""
    hidden = case.hidden(device)
    visible = 1 - float(hidden.float().mean())
    x = torch.randn(case.shape, dtype=case.dtype, device=device).requires_grad_()
    dy = torch.randn_like(x)
    calls = _implementations(case, hidden)
    outputs = {}
    for who in list(calls):
        try:
            outputs[who] = calls[who](x)
            torch.autograd.grad(outputs[who], x, dy, retain_graph=True)
        except Exception as error:  # of a rival that is not made for this
            if who == "flexmasks":
                raise
            progress(f"{who} left out: {str(error)[:200]}")
            del calls[who]
            outputs.pop(who, None)
    with torch.no_grad():
        want = outputs["eager"].float()
        worst = float((outputs["flexmasks"].float() - want).abs().max())
        del want
    passes: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {who: lambda call=call: call(x.detach()) for who, call in calls.items()},  # type: ignore[misc]
        "backward": {
            who: lambda y=y: torch.autograd.grad(y, x, dy, retain_graph=True)  # type: ignore[misc]
            for who, y in outputs.items()
        },
    }
    found = []
    for name, timed in passes.items():
        if case.wall:
            times = _wall(timed, device)
        else:
            times = {who: ms for who, (ms, _) in interleaved(timed, device, _RUNS[device.type]).items()}
        for who, ms in times.items():
            moved = case.floor(visible)[name] / ms / 1e9
            found.append(
                {
                    "case": case.name,
                    "shape": "x".join(map(str, case.shape)),
                    "dtype": str(case.dtype).removeprefix("torch."),
                    "visible": round(visible, 4),
                    "pass": name,
                    "who": who,
                    "ms": float(f"{ms:.5g}"),
                    "tb_s": float(f"{moved:.4g}"),
                    "share": float(f"{moved / copy:.4g}"),
                    "largest_error": worst if who == "flexmasks" and name == "forward" else None,
                }
            )
    return found


def _implementations(case: Case, hidden: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ours, torch's in single operations, compiled, and what libraries for it are here, unmasked."""
    scale = 0.5 if isinstance(case.mask, Tensor) else 1.0
    empty = hidden.all(-1, keepdim=True)
    mask = case.mask
    if isinstance(mask, Mask):
        mod = block_mask(mask, case.shape[2], batch=case.shape[0], device=hidden.device).mask_mod

    def eager(x: Tensor) -> Tensor:
        return torch.softmax((x * scale).masked_fill(hidden, -math.inf), -1).masked_fill(empty, 0)

    def computed(x: Tensor) -> Tensor:  # the mask too, which torch.compile fuses
        if isinstance(mask, Tensor):
            return eager(x)
        indices = (torch.arange(n, device=x.device) for n in x.shape)
        unseen = ~mod(*torch.meshgrid(*indices, indexing="ij"))
        return torch.softmax(x.masked_fill(unseen, -math.inf), -1).masked_fill(unseen, 0)

    torch.compiler.reset()
    found: dict[str, Callable[[Tensor], Tensor]]
    found = {"flexmasks": case.ours, "eager": eager, "torch.compile": torch.compile(computed, dynamic=False)}
    for name, module, function in (
        ("quack, unmasked", "quack.softmax", "softmax"),
        ("Liger, unmasked", "liger_kernel.transformers.functional", "liger_softmax"),
    ):
        try:
            call = getattr(importlib.import_module(module), function)
        except Exception:  # not here, or not for this machine
            continue
        if hidden.is_cuda:
            found[name] = lambda x, call=call: call(x.reshape(-1, x.shape[-1])).view(x.shape)  # type: ignore[misc]
    return found


def _wall(calls: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Milliseconds of each on the clock: medians of means of many calls in a row."""
    times: dict[str, list[float]] = {who: [] for who in calls}
    gc.collect()
    gc.disable()  # as timeit does
    try:
        for _ in range(5):
            for who, call in calls.items():
                synchronize(device)
                start = time.perf_counter()
                for _ in range(_CALLS[device.type]):
                    call()
                synchronize(device)
                times[who].append((time.perf_counter() - start) * 1e3 / _CALLS[device.type])
    finally:
        gc.enable()
    return {who: statistics.median(ms) for who, ms in times.items()}


def _copy_bandwidth(device: torch.device) -> float:
    """TB/s of a large copy, bytes read and written."""
    size = 1 << (31 if device.type == "cuda" else 24)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms, _ = interleaved({"copy": lambda: target.copy_(source)}, device, _RUNS[device.type])["copy"]
    return 2 * size / ms / 1e9
