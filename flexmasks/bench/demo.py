"""`python -m flexmasks demo`: grouped_tril attention on real sizes, checked, timed and drawn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from flexmasks.attention import attention, block_mask, dense_mask, explain
from flexmasks.bench.console import device_name, progress, synchronize
from flexmasks.pictures.picture import draw


def main() -> None:
    """Run the demo on the GPU where there is one, else on the CPU."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    batch, heads, length, size = (16, 16, 8192, 64) if cuda else (2, 4, 2048, 64)
    dtype = torch.bfloat16 if cuda else torch.float32
    call = "flexmasks.attention(q, k, v, mask='grouped_tril', seq_lens=...)"
    print(f"{call} on {device_name(device)}, torch {torch.__version__}")
    print(f"q, k, v [{batch}, {heads}, {length}, {size}] {str(dtype).removeprefix('torch.')}\n")

    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, size, device=device, dtype=dtype) for _ in range(3))
    seq_lens = torch.randint(length // 4, length + 1, (batch,), device=device)

    start = time.perf_counter()
    block_mask("grouped_tril", length, seq_lens=seq_lens)
    progress(f"blocks found in {(time.perf_counter() - start) * 1e3:.1f} ms; compiling the kernel")
    start = time.perf_counter()
    out = attention(q, k, v, mask="grouped_tril", seq_lens=seq_lens)
    synchronize(device)
    progress(f"first call {time.perf_counter() - start:.1f} s; checking against float64")
    error, checked = _error(out, q, k, v, seq_lens)
    progress("timing")
    header, rows = _times(q, k, v, seq_lens)
    progress("")

    picture = draw("grouped_tril", length, seq_lens=seq_lens).text(66)
    print(f"batch element 0 (seq_lens[0] = {int(seq_lens[0])} of {length}):\n{picture}\n")
    print(f"largest error against float64 SDPA with the materialised mask, {checked}: {error:.1e}\n")
    print(tabulate(rows, headers=header, floatfmt=".2f"))
    print(f"\nof all {batch} batch elements:")
    print(explain(q, k, v, mask="grouped_tril", seq_lens=seq_lens))


def _error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> tuple[float, str]:
    heads = 2  # float64 scores of the others tell nothing new
    worst = 0.0
    for b in range(len(q)):
        mask = dense_mask("grouped_tril", q.shape[2], seq_lens=seq_lens[b : b + 1])[0, 0]
        for h in range(heads):
            one_q, one_k, one_v = (x[b : b + 1, h : h + 1].double() for x in (q, k, v))
            want = F.scaled_dot_product_attention(one_q, one_k, one_v, attn_mask=mask)
            want = torch.where(mask.any(-1)[:, None], want, 0.0)  # SDPA leaves NaN in rows that see nothing
            worst = max(worst, float((out[b : b + 1, h : h + 1].double() - want).abs().max()))
            progress(f"checking against float64: batch element {b + 1} of {len(q)}, head {h + 1} of {heads}")
    return worst, f"{heads} heads of all {len(q)} batch elements"


def _times(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> tuple[list[str], list[list[object]]]:
    cuda = q.is_cuda
    mask = dense_mask("grouped_tril", q.shape[2], seq_lens=seq_lens)
    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "flexmasks, grouped_tril": lambda q, k, v: attention(q, k, v, mask="grouped_tril", seq_lens=seq_lens),
        "SDPA + materialised mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "SDPA, full attention": F.scaled_dot_product_attention,
    }
    forward, backward = {}, {}
    for name, call in calls.items():
        progress(f"timing {name}")
        forward[name] = _median(lambda call=call: call(q, k, v), cuda)  # type: ignore[misc]
        if cuda:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = call(*leaves)
            grad = torch.randn_like(out)

            def both(call: Callable[..., Tensor] = call, leaves: list[Tensor] = leaves, grad: Tensor = grad) -> None:
                call(*leaves).backward(grad)

            backward[name] = _median(both, cuda)
    ours = next(iter(calls))
    header = ["", "forward, ms", "ours is faster"]
    if cuda:
        header += ["forward + backward, ms", "ours is faster"]
    rows: list[list[object]] = []
    for name in calls:
        row: list[object] = [name, forward[name], f"{forward[name] / forward[ours]:.2f} x"]
        if cuda:
            row += [backward[name], f"{backward[name] / backward[ours]:.2f} x"]
        rows.append(row)
    return header, rows


def _median(call: Callable[[], object], cuda: bool) -> float:
    """Median milliseconds of several runs, after a warm-up."""
    if cuda:
        from triton.testing import do_bench

        return float(do_bench(call, warmup=50, rep=200, return_mode="median"))
    call()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)
