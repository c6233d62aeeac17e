"""Shared parts of the recipes: device, checks, timing and tables."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks.results import Row as Row
from benchmarks.results import machine
from benchmarks.runner import attention_tflops, measure_passes
from flexmasks import Mask, attention, dense_mask
from flexmasks.bench.clock import progress
from flexmasks.pictures.output import write

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# Shapes [batch, heads, length, head size] of q, k and v, for the checks and for the timing.
CHECKED_SHAPE = (2, 2, 1024, 64)
TIMED_SHAPE = (16, 16, 8192, 64) if ON_GPU else CHECKED_SHAPE
# The largest error allowed, relative to the largest element.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def start(text: str | None, device: torch.device = DEVICE) -> Path | None:
    """Print what a recipe shows, and return the file of `--json FILE` or None."""
    text = text or ""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table's figures to a file")
    file: Path | None = parser.parse_known_args()[0].json  # a notebook's kernel has arguments of its own
    about = machine(device)
    print(f"{text.strip()}\n\nThis run: {about['device']}, torch {about['torch']}.\n")
    torch.manual_seed(0)
    return file


def finish(rows: list[Row], file: Path | None, note: str = "", device: torch.device = DEVICE) -> None:
    """Print the rows as a table, and write them to the file if one is given."""
    print(f"\n{tabulate(rows, headers='keys', floatfmt='.4g', missingval='')}\n{note}".rstrip())
    if file is not None:
        write(file, json.dumps({"machine": machine(device), "rows": rows}, indent=1) + "\n")


def check(what: str, got: Tensor, want: Tensor, tolerance: float | None = None) -> None:
    """Print the largest difference, and fail if it is too large.

    The difference is relative to the largest element of `want`.
    """
    allowed = TOLERANCE[got.dtype] if tolerance is None else tolerance
    got, want = got.detach().double(), want.detach().double()
    error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
    print(f"check: {what}: largest error {error:.1e} (allowed {allowed:.0e})")
    assert math.isfinite(error), f"{what}: the error is {error}"
    assert error <= allowed, f"{what}: the error {error:.1e} is above {allowed:.0e}"


def pair_by_pair(rule: Callable[[int, int], bool], q_len: int, kv_len: int | None = None) -> Tensor:
    """Return the booleans [q_len, kv_len] that a rule gives for each query and key."""
    seen = [[bool(rule(q, kv)) for kv in range(kv_len or q_len)] for q in range(q_len)]
    return torch.tensor(seen, device=DEVICE)


def textbook(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return attention as a textbook defines it, with all scores in memory."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = bias(scores)
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    return weights.masked_fill(~seen, 0.0) @ v  # a row that sees nothing is 0, not NaN


def check_attention(
    what: str,
    attend: Attend,
    reference: Attend,
    shape: tuple[int, int, int, int] = CHECKED_SHAPE,
    keys: int | None = None,
) -> None:
    """Compare the output in float32 and the gradients with a reference in float64.

    The output comes from a call without gradients, which may run on another backend.
    """
    torch.manual_seed(0)
    batch, heads, length, size = shape
    q, upstream = torch.randn(2, *shape, device=DEVICE)
    k, v = torch.randn(2, batch, heads, keys or length, size, device=DEVICE)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want = reference(*exact)
    check(f"{what}, output", attend(q, k, v), want)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    got_gradients = torch.autograd.grad(attend(*leaves), leaves, upstream)
    want_gradients = torch.autograd.grad(want, exact, upstream.double())
    check(f"{what}, gradients", torch.cat(got_gradients, 2), torch.cat(want_gradients, 2))


def mask_rows(what: str, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
    """Return the times of attention with a mask, and of SDPA with the mask as a tensor."""
    batch, heads = q.shape[:2]
    seen = dense_mask(mask, q.shape[2], k.shape[2], batch=batch, heads=heads, device=DEVICE)
    calls: dict[str, Attend] = {
        "flexmasks": lambda q, k, v: attention(q, k, v, mask=mask),
        "SDPA + materialised mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen),
    }
    pairs = int(seen.sum()) * (batch // seen.shape[0]) * (heads // seen.shape[1])
    return [{"mask": what, **row} for row in attention_rows(calls, pairs, q, k, v)]


def causal_rows(q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
    """Return the times of SDPA's own causal kernel."""
    batch, heads, length, _ = q.shape
    calls: dict[str, Attend] = {"SDPA": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)}
    pairs = batch * heads * length * (length + 1) // 2
    return [{"mask": "causal", **row} for row in attention_rows(calls, pairs, q, k, v)]


def random_qkv(shape: tuple[int, ...] = TIMED_SHAPE, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of the timed size."""
    batch, heads, length, size = shape
    q = torch.randn(shape, device=DEVICE, dtype=DTYPE)
    k, v = torch.randn(2, batch, heads, keys or length, size, device=DEVICE, dtype=DTYPE)
    return q, k, v


def attention_rows(calls: dict[str, Attend], pairs: float, q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
    """Return forward and backward milliseconds of each call, and TFLOP/s.

    The outputs of all calls must agree. `pairs` is the number of visible pairs of a query and a key, over batch and
    heads. The forward pass has two matrix products, q @ k^T and weights @ v. The backward pass has five: the scores
    once more, and the gradients of q, k, v and of the weights. Each product takes one multiplication and one addition
    for each pair and each element of the head size.
    """
    progress("timing")
    measured, _ = measure_passes(calls, (q, k, v), runs=5, required=calls)
    progress("")
    first, *others = calls
    for who in others:
        check(f"{who} and {first} agree, at the size that is timed", measured[who].output, measured[first].output)
    rows: list[Row] = []
    for who, figures in measured.items():
        row: Row = {"": who}
        for name, (ms, _) in figures.milliseconds.items():
            row[f"{name} ms"] = float(f"{ms:.4g}")
            row[f"{name} TFLOP/s"] = float(f"{attention_tflops(name, pairs, q.shape[-1], ms):.4g}")
        rows.append(row)
    return rows
