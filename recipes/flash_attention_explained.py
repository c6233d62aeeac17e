"""Flash attention explained, one checked step at a time.

Attention is softmax(q k^T) v. Written out, all scores go to memory and come back, twice. Three steps lead to a kernel
that never writes them. First, subtract the largest score, so that no exponential overflows. Second, take the softmax of
a row in parts, each with its own largest score, and merge the parts. Third, carry the output along while merging. This
recipe takes and checks each step separately, and then times torch's fused kernel against attention written out.
"""

# %% Step 1: a safe softmax. exp(89) is more than float32 holds, but shifting all scores does not change the softmax.
from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexmasks
from _measure import DEVICE, DTYPE, ON_GPU, Row, check, finish, start
from flexmasks.bench.clock import interleaved

Shape = tuple[int, int, int, int]


def raw_softmax(x: Tensor) -> Tensor:
    """Take the softmax as the formula says; large scores give inf / inf, which is NaN."""
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def safe_softmax(x: Tensor) -> Tensor:
    """Take the softmax with the largest exponent at 0; what underflows is too small to matter."""
    exponentials = torch.exp(x - x.amax(-1, keepdim=True))
    return exponentials / exponentials.sum(-1, keepdim=True)


# %% Step 2: a softmax in parts. Each part of a row is shifted by its own largest score. A factor, exp(own - largest),
# then takes its exponentials to the largest score of the row.
def split_softmax(x: Tensor, parts: int = 2) -> Tensor:
    """Take the softmax of a row in parts, of which no part sees another's scores."""
    pieces = x.chunk(parts, -1)
    maxima = [piece.amax(-1, keepdim=True) for piece in pieces]
    exponentials = [torch.exp(piece - maximum) for piece, maximum in zip(pieces, maxima, strict=True)]
    factors = [torch.exp(maximum - torch.cat(maxima, -1).amax(-1, keepdim=True)) for maximum in maxima]
    total = torch.cat([f * e.sum(-1, keepdim=True) for f, e in zip(factors, exponentials, strict=True)], -1)
    return torch.cat([f * e for f, e in zip(factors, exponentials, strict=True)], -1) / total.sum(-1, keepdim=True)


# The numbers of one row, in Python's floats: each half by itself, then both at the larger maximum.
def work_out(row: list[float]) -> None:
    """Print and check the softmax of a row in two halves, step by step."""
    halves = row[: len(row) // 2], row[len(row) // 2 :]
    maxima = [max(half) for half in halves]
    totals = [sum(math.exp(x - m) for x in half) for half, m in zip(halves, maxima, strict=True)]
    factors = [math.exp(m - max(maxima)) for m in maxima]
    total = sum(f * t for f, t in zip(factors, totals, strict=True))
    print(f"\nthe row {row} in two halves, {halves[0]} and {halves[1]}:")
    for half, m, t, f in zip(halves, maxima, totals, factors, strict=True):
        terms = " + ".join(f"exp({x:g} - {m:g})" for x in half)
        print(f"  maximum {m:g}, total {terms} = {t:.4f}, factor exp({m:g} - {max(maxima):g}) = {f:.4f}")
    print(f"  total of the row: {factors[0]:.4f} * {totals[0]:.4f} + {factors[1]:.4f} * {totals[1]:.4f} = {total:.4f}")
    result = [f * math.exp(x - m) / total for half, m, f in zip(halves, maxima, factors, strict=True) for x in half]
    print(f"  softmax: {[round(x, 4) for x in result]}")
    for way in (raw_softmax, split_softmax):
        got = way(torch.tensor([row], dtype=torch.float64))
        check(f"{way.__name__} of this row", got, torch.tensor([result], dtype=torch.float64))


# %% The same with values. Each part of a row keeps its largest score, the sum of its exponentials relative to that
# score, and the sum of the values weighted by these exponentials, not yet divided.
class Part(NamedTuple):
    """Attention to some keys: maximum [..., Q, 1], total [..., Q, 1], weighted values [..., Q, D]."""

    maximum: Tensor
    total: Tensor
    values: Tensor


def attend_to(scores: Tensor, v: Tensor) -> Part:
    """Attend to one part of the keys."""
    maximum = scores.amax(-1, keepdim=True)
    exponentials = torch.exp(scores - maximum)
    return Part(maximum, exponentials.sum(-1, keepdim=True), exponentials @ v)


def merge(one: Part, other: Part) -> Part:
    """Merge two parts at the larger maximum m: exp(s - m) = exp(s - m_one) * exp(m_one - m)."""
    maximum = torch.maximum(one.maximum, other.maximum)
    scale_one, scale_other = torch.exp(one.maximum - maximum), torch.exp(other.maximum - maximum)
    return Part(
        maximum,
        one.total * scale_one + other.total * scale_other,
        one.values * scale_one + other.values * scale_other,
    )


# %% Step 3: flash attention. A loop over parts of the keys keeps one Part; the scores of all keys never exist at once.
def flash_attention(q: Tensor, k: Tensor, v: Tensor, keys_at_once: int = 128) -> Tensor:
    """Compute attention in the order of a fused kernel, in plain torch."""
    scale = q.shape[-1] ** -0.5
    kept: Part | None = None
    for some_k, some_v in zip(k.split(keys_at_once, -2), v.split(keys_at_once, -2), strict=True):
        part = attend_to(q @ some_k.transpose(-1, -2) * scale, some_v)
        kept = part if kept is None else merge(kept, part)
    assert kept is not None
    return kept.values / kept.total


# %% Step 4: parts from different calls. An output and its log-sum-exp, lse = maximum + log(total), are a Part that is
# already divided. So attention to a cache and attention to new tokens merge into one, and so do parts on two GPUs.
def merge_outputs(one: Tensor, lse_one: Tensor, other: Tensor, lse_other: Tensor) -> Tensor:
    """Merge two outputs, each weighted by the sum of its exponentials."""
    lse = torch.logaddexp(lse_one, lse_other)
    return one * torch.exp(lse_one - lse)[..., None] + other * torch.exp(lse_other - lse)[..., None]


# %% The size at which fused kernels were compared with torch's math path: 32 batch elements, 8 heads, 51,200 tokens.
# Written out, its scores fit into no GPU, so a share of the heads is timed, and of the tokens if one head is too much.
FULL = (32, 8, 51200, 64)
BYTES_PER_SCORE = 12  # of memory at the peak of the math path, with some room; it holds several copies of the scores


def largest_share(memory: int) -> Shape:
    """Return the largest share of FULL whose scores fit into so many bytes."""
    batch, heads, length, size = FULL
    pairs = memory // BYTES_PER_SCORE
    while length**2 > pairs:
        length //= 2
    fit = pairs // length**2
    return (min(batch, fit // heads), heads, length, size) if fit >= heads else (1, fit, length, size)


def time_paths(shape: Shape, written_out: bool) -> list[Row]:
    """Compare and time the fused kernel and, if asked, attention written out."""
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(3))
    calls: dict[str, Callable[[], Tensor]] = {"fused": _pinned(SDPBackend.FLASH_ATTENTION, q, k, v)}
    if written_out:
        calls["written out"] = _pinned(SDPBackend.MATH, q, k, v)
        check(f"fused against written out, {_text(shape)}", calls["fused"](), calls["written out"]())
    times = interleaved(calls, DEVICE, 7)
    pairs = math.prod(shape[:3]) * shape[2]
    rows: list[Row] = []
    for who, (ms, _) in times.items():
        row: Row = {
            "q, k, v": _text(shape),
            "": who,
            "forward ms": float(f"{ms:.4g}"),
            "TFLOP/s": float(f"{2 * 2 * shape[3] * pairs / ms / 1e9:.4g}"),
        }
        if written_out:
            row["written out takes"] = f"{ms / times['fused'][0]:.1f} x"
        if ON_GPU:
            row["peak MB"] = round(_peak(calls[who]) / 1e6)
        rows.append(row)
    return rows


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


# %% Check each step, then time the fused kernel against attention written out.
def main() -> None:
    """Check all steps and time the kernels."""
    file = start(__doc__)
    large = torch.tensor([[10.0, 100.0, 1000.0]], device=DEVICE)
    print(f"softmax of 10, 100, 1000: raw {raw_softmax(large).tolist()}, safe {safe_softmax(large).tolist()}")
    x = torch.randn(8, 1000, device=DEVICE) * 30
    check("safe softmax", safe_softmax(x), torch.softmax(x.double(), -1))
    check("raw softmax, of small scores", raw_softmax(x / 30), torch.softmax(x.double() / 30, -1))
    for parts in (1, 2, 7):
        check(f"split softmax, parts: {parts}", split_softmax(x, parts), torch.softmax(x.double(), -1))
    work_out([1.0, 2.0, 3.0, 4.0])

    q, k, v = torch.randn(3, 2, 4, 1000, 64, device=DEVICE)
    want = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    scores = q @ k.transpose(-1, -2) / 8
    halves = [attend_to(scores[..., part], v[..., part, :]) for part in (slice(0, 300), slice(300, 1000))]
    maximum, total, values = merge(*halves)
    check("two parts merged", values / total, want)
    check("lse of the merged parts", (maximum + total.log())[..., 0], torch.logsumexp(scores.double(), -1))
    check("flash attention, 8 parts", flash_attention(q, k, v), want)
    cached, new = (
        flexmasks.attention(q, k[..., part, :], v[..., part, :], return_lse=True)
        for part in (slice(0, 300), slice(300, 1000))
    )
    check("two calls merged by lse", merge_outputs(*cached, *new), want)

    shape = (4, 16, 8192, 64) if ON_GPU else (1, 4, 1024, 64)
    share = largest_share(round(0.9 * torch.cuda.mem_get_info()[0]) if ON_GPU else 1_000_000_000)
    where = "GPU" if ON_GPU else "recipe on a CPU, 1 GB"
    print(f"\nwritten out, {_text(share)} is the largest share of {_text(FULL)} for the memory of this {where}")
    rows = time_paths(shape, written_out=True) + time_paths(share, written_out=True)
    if ON_GPU:
        rows += time_paths(FULL, written_out=False)
    scores, element = math.prod(FULL[:3]) * FULL[2], torch.finfo(DTYPE).bits // 8
    note = f"The scores of {_text(FULL)} alone would take {scores * element / 1e9:,.0f} GB"
    note += f"; q, k and v take {3 * math.prod(FULL) * element / 1e9:,.1f} GB."
    finish(rows, file, f"{note} FLOP: 2 matrix products, each 2 operations for every pair and element of a head.")


def _pinned(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return call


def _peak(call: Callable[[], object]) -> int:
    """Return how many bytes a call adds to the GPU memory in use, at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
