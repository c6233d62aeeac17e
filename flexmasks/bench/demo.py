"""`python -m flexmasks demo`: grouped_tril attention at real sizes, checked, timed and drawn."""

from __future__ import annotations

import logging
import sys
import time

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from flexmasks import attention, block_mask, dense_mask, draw, explain
from flexmasks.bench.clock import device_name, progress, synchronize
from flexmasks.bench.compare import PASSES, Attend, pass_times

_CHECKED_HEADS = 2  # checking all heads in float64 would take long and show nothing new


def main() -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    batch, heads, length, size = (16, 16, 8192, 64) if cuda else (2, 4, 2048, 64)
    dtype = torch.bfloat16 if cuda else torch.float32
    call = "flexmasks.attention(q, k, v, mask='grouped_tril', seq_lens=...)"
    print(f"{call} on {device_name(device)}, torch {torch.__version__}")
    print(f"q, k, v [{batch}, {heads}, {length}, {size}] {str(dtype).removeprefix('torch.')}\n")

    _show_log()
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, size, device=device, dtype=dtype) for _ in range(3))
    seq_lens = torch.randint(length // 4, length + 1, (batch,), device=device)

    start = time.perf_counter()
    block_mask("grouped_tril", length, seq_lens=seq_lens)
    print(f"blocks found in {(time.perf_counter() - start) * 1e3:.1f} ms")
    start = time.perf_counter()
    out = attention(q, k, v, mask="grouped_tril", seq_lens=seq_lens)
    synchronize(device)
    progress(f"first call {time.perf_counter() - start:.1f} s; checking against float64")
    error = _largest_error(out, q, k, v, seq_lens)
    checked = f"{_CHECKED_HEADS} heads of all {batch} batch elements"
    progress("timing")
    times = _time_table(q, k, v, seq_lens)
    progress("")

    picture = draw("grouped_tril", length, seq_lens=seq_lens).text(66)
    print(f"batch element 0 (seq_lens[0] = {int(seq_lens[0])} of {length}):\n{picture}\n")
    print(f"largest error against float64 SDPA with the materialized mask, {checked}: {error:.1e}\n")
    print(times)
    print(f"\nof all {batch} batch elements:")
    print(explain(q, k, v, mask="grouped_tril", seq_lens=seq_lens))


def _show_log() -> None:
    log = logging.getLogger("flexmasks")
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.setLevel(logging.INFO)


def _largest_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> float:
    largest = 0.0
    for b in range(len(q)):
        mask = dense_mask("grouped_tril", q.shape[2], seq_lens=seq_lens[b : b + 1])[0, 0]
        for h in range(_CHECKED_HEADS):
            one_q, one_k, one_v = (x[b : b + 1, h : h + 1].double() for x in (q, k, v))
            expected = F.scaled_dot_product_attention(one_q, one_k, one_v, attn_mask=mask)
            expected = torch.where(mask.any(-1)[:, None], expected, 0.0)  # SDPA leaves NaN in rows that see nothing
            largest = max(largest, float((out[b : b + 1, h : h + 1].double() - expected).abs().max()))
            progress(f"checking against float64: batch element {b + 1} of {len(q)}, head {h + 1} of {_CHECKED_HEADS}")
    return largest


def _time_table(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> str:
    mask = dense_mask("grouped_tril", q.shape[2], seq_lens=seq_lens)
    calls: dict[str, Attend] = {
        "flexmasks, grouped_tril": lambda q, k, v: attention(q, k, v, mask="grouped_tril", seq_lens=seq_lens),
        "SDPA + materialized mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "SDPA, full attention": F.scaled_dot_product_attention,
    }
    times = pass_times(calls, q, k, v)
    rows: list[list[object]] = [[name] for name in calls]
    for totals in zip(*times.values(), strict=True):
        for row, total in zip(rows, totals, strict=True):
            row += [total, f"{total / totals[0]:.2f} x"]
    columns = PASSES[: len(times["flexmasks, grouped_tril"])]
    header = ["", *(text for column in columns for text in (column, "times as long as ours"))]
    return tabulate(rows, headers=header, floatfmt=".2f")
