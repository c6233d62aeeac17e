"""Flash attention in Triton in forty lines, with a head size of one.

With that head size q, k and v are one-dimensional, and the score of a query and a key is a product of two numbers.
What remains is the core of flash attention: a loop over tiles of keys. For each query the loop keeps the largest score
so far, the sum of exponentials relative to it, and the output so far. Whenever the largest score rises, the loop
rescales the sum and the output. Only one tile of the scores, queries x keys, exists at a time.
"""

# %% Without a GPU, Triton's interpreter runs the kernel on CPU tensors. The variable must be set before Triton is
# imported.
from __future__ import annotations

import math
import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from torch import Tensor

from _measure import DEVICE, ON_GPU, Row, check, finish, start
from flexmasks.bench.clock import interleaved

LOG2_E = tl.constexpr(math.log2(math.e))


# %% The kernel. One program has a few queries. It reads each key and value once, and writes the outputs once.
# A key is hidden where it is past the end, or, with CAUSAL, after the query. A hidden score is -inf. Until a query
# meets a visible key, its maximum is -inf too, and -inf - -inf would be NaN: 0 replaces such a maximum.
@triton.jit
def attend(q_ptr, k_ptr, v_ptr, out_ptr, queries, keys, CAUSAL: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Compute out[i] = sum over j of softmax(q[i] * k)[j] * v[j]; 0 for a query that sees nothing."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = tl.load(q_ptr + i, mask=i < queries, other=0.0).to(tl.float32) * LOG2_E
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS], tl.float32)

    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tl.program_id(0) + 1) * ROWS)  # tiles past the diagonal are skipped
    for first in range(0, end, TILE):
        j = first + tl.arange(0, TILE)
        k = tl.load(k_ptr + j, mask=j < keys, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + j, mask=j < keys, other=0.0).to(tl.float32)
        seen = j[None, :] < keys
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None])
        scores = tl.where(seen, q[:, None] * k[None, :], -float("inf"))

        raised = tl.maximum(maximum, tl.max(scores, 1))
        shift = tl.where(raised == -float("inf"), 0.0, raised)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        total = total * rescale + tl.sum(weights, 1)
        out = out * rescale + tl.sum(weights * v[None, :], 1)
        maximum = raised

    out = tl.where(total > 0.0, out / tl.where(total > 0.0, total, 1.0), 0.0)
    tl.store(out_ptr + i, out.to(out_ptr.dtype.element_ty), mask=i < queries)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: int | None = None, causal: bool = False, rows: int = 64, tile: int = 64
) -> Tensor:
    """Return the attention of q [Q] to the first `keys` of k and v [K], by default to all."""
    out = torch.empty_like(q)
    grid = (triton.cdiv(len(q), rows),)
    attend[grid](q, k, v, out, len(q), len(k) if keys is None else keys, CAUSAL=causal, ROWS=rows, TILE=tile)
    return out


# %% The reference holds all scores in memory.
def written_out(q: Tensor, k: Tensor, v: Tensor, keys: int | None = None, causal: bool = False) -> Tensor:
    """Return attention by its definition, in the dtype of the inputs."""
    i, j = torch.arange(len(q), device=q.device), torch.arange(len(k), device=q.device)
    seen = (j < (len(k) if keys is None else keys)).expand(len(q), -1)
    if causal:
        seen = seen & (j <= i[:, None])
    weights = torch.softmax((q[:, None] * k).masked_fill(~seen, -math.inf), -1)
    return weights.masked_fill(~seen, 0.0) @ v


# %% Check, including hard cases, then time.
def main() -> None:
    """Check and time the kernel."""
    file = start(__doc__)
    q, k, v = torch.randn(3, 200, device=DEVICE) * torch.tensor([[5.0], [5.0], [1.0]], device=DEVICE)
    cases: dict[str, dict[str, Any]] = {
        "200 queries and keys in tiles of 64": {},
        "causal": {"causal": True},
        "70 real keys": {"keys": 70},
        "causal, 70 real keys": {"causal": True, "keys": 70},
        "tiles larger than the lines": {"rows": 256, "tile": 256},
    }
    for what, arguments in cases.items():
        mask = {n: a for n, a in arguments.items() if n in ("causal", "keys")}
        want = written_out(*(x.double() for x in (q, k, v)), **mask)
        check(what, flash_attention(q, k, v, **arguments), want, 1e-4)
    nothing = flash_attention(q, k, v, keys=0)
    assert torch.equal(nothing, torch.zeros_like(q)), "a query that sees nothing must give 0"
    print("check: without a key every output is 0, not NaN")

    length = 32768 if ON_GPU else 512
    q, k, v = torch.randn(3, length, device=DEVICE)
    calls = {
        "flash, full": lambda: flash_attention(q, k, v),
        "flash, causal": lambda: flash_attention(q, k, v, causal=True),
        "written out, full": lambda: written_out(q, k, v),
        "written out, causal": lambda: written_out(q, k, v, causal=True),
    }
    check("full, at the size that is timed", calls["flash, full"](), calls["written out, full"](), 1e-4)
    check("causal, at the size that is timed", calls["flash, causal"](), calls["written out, causal"](), 1e-4)
    times = interleaved(calls, DEVICE, 7 if ON_GPU else 2)
    table: list[Row] = []
    for who, (ms, _) in times.items():
        pairs = length * (length + 1) // 2 if "causal" in who else length**2
        table.append(
            {
                "queries x keys": f"{length}x{length}",
                "": who,
                "ms": float(f"{ms:.4g}"),
                "billion pairs a second": float(f"{pairs / ms / 1e6:.4g}"),
            }
        )
    note = f"Written out, the scores take {4 * length**2 / 1e6:,.0f} MB; here a program holds {64 * 64} scores."
    if not ON_GPU:
        note += "\nTriton's interpreter shows that the kernel is right, not how fast it is."
    finish(table, file, note)


if __name__ == "__main__":
    main()
