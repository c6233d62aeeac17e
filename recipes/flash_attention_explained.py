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


def naive_softmax(x: Tensor) -> Tensor:
    """Take the softmax as the formula says; large scores give inf / inf, which is NaN."""
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def safe_softmax(x: Tensor) -> Tensor:
    """Take the softmax with the largest exponent at 0; what underflows is too small to matter."""
    exponentials = torch.exp(x - x.amax(-1, keepdim=True))
    return exponentials / exponentials.sum(-1, keepdim=True)


# %% Step 2: a softmax in parts. Each part of a row keeps its largest score, the sum of its exponentials relative to
# that score, and the sum of the values weighted by these exponentials, not yet divided.
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


# %% Check each step, then time the fused kernel against attention written out.
def main() -> None:
    """Check all steps and time the kernels."""
    file = start(__doc__)
    large = torch.tensor([[10.0, 100.0, 1000.0]], device=DEVICE)
    print(f"softmax of 10, 100, 1000: naive {naive_softmax(large).tolist()}, safe {safe_softmax(large).tolist()}")
    x = torch.randn(8, 1000, device=DEVICE) * 30
    check("safe softmax", safe_softmax(x), torch.softmax(x.double(), -1))

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
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(3))
    calls: dict[str, Callable[[], Tensor]] = {
        "fused": _pinned(SDPBackend.FLASH_ATTENTION, q, k, v),
        "written out": _pinned(SDPBackend.MATH, q, k, v),
    }
    check("fused against written out, at the size that is timed", calls["fused"](), calls["written out"]())
    times = interleaved(calls, DEVICE, 7)
    pairs = math.prod(shape[:3]) * shape[2]
    rows: list[Row] = []
    for who, (ms, _) in times.items():
        row: Row = {
            "q, k, v": "x".join(map(str, shape)),
            "": who,
            "forward ms": float(f"{ms:.4g}"),
            "TFLOP/s": float(f"{2 * 2 * shape[3] * pairs / ms / 1e9:.4g}"),
            "written out takes": f"{ms / times['fused'][0]:.1f} x",
        }
        if ON_GPU:
            row["peak MB"] = round(_peak(calls[who]) / 1e6)
        rows.append(row)
    element = torch.finfo(DTYPE).bits // 8
    note = f"The scores alone take {pairs * element / 1e6:,.0f} MB; q, k and v {3 * q.numel() * element / 1e6:,.0f} MB."
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
