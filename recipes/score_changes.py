"""Score changes: a checkerboard, ALiBi in three forms, a soft-cap.

Between q k^T and the softmax, FlexAttention calls `score_mod(score, b, h, q, kv)`, a function of one score. It compiles
the function and its gradient into the kernel, so a bias never exists as a tensor of queries x keys. The function
may capture a tensor (of slopes, say), compute its values from the indices, or be registered under a name.
"""

# %%
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexmasks
from _measure import (
    CHECKED_SHAPE,
    DEVICE,
    ON_GPU,
    TIMED_SHAPE,
    Attend,
    attention_rows,
    check_attention,
    finish,
    pair_by_pair,
    random_qkv,
    start,
    textbook,
)


# %% ALiBi is a penalty for distance: score - slope * (q - kv). A plus would favor distant keys.
# Form 1 is a closure. The slopes are a tensor that the function captures, which becomes an input of the kernel.
def alibi_closure(heads: int) -> Callable[..., Tensor]:
    """Return ALiBi with the slopes 2^(-8/H), 2^(-16/H), ... of H heads, a power of two."""
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], device=DEVICE)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - slopes[h] * (q - kv)

    return alibi


# Form 2 is a formula. The slope is computed from the index of the head, and nothing is captured.
def alibi_formula(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, heads: int) -> Tensor:
    """Apply ALiBi; `heads` is a number, so it is a constant of the kernel."""
    return score - torch.exp2(-8.0 * (h + 1) / heads) * (q - kv)


# Form 3 is the name, with the slopes of the paper for any number of heads, not only for powers of two.
def cases(heads: int) -> dict[str, Case]:
    """Return the cases by their titles."""
    causal: dict[str, Any] = {"mask": "causal"}
    formula = flexmasks.get_score(alibi_formula, heads=heads)
    return {
        "no change": Case({}, None, on_cpu=True),
        "checkerboard": Case({"score": "checkerboard"}, checkerboard),
        "ALiBi as a closure, causal": Case(causal | {"score": alibi_closure(heads)}, alibi),
        "ALiBi as a formula, causal": Case(causal | {"score": formula}, alibi),
        "ALiBi by name, causal": Case(causal | {"score": "alibi"}, alibi, on_cpu=True),
        "soft cap of 30, causal": Case(causal | {"score": "softcap", "cap": 30.0}, softcap, on_cpu=True),
        "no change, causal": Case(causal, None, on_cpu=True),
    }


class Case(NamedTuple):
    """Arguments of `attention`, a reference on all scores at once, and whether a slow CPU times the case."""

    arguments: dict[str, Any]
    reference: Callable[[Tensor], Tensor] | None
    on_cpu: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run attention; on a CPU a case that is not timed runs in plain torch, without compiling."""
        backend = "auto" if ON_GPU or self.on_cpu else "reference"
        return flexmasks.attention(q, k, v, backend=backend, **self.arguments)  # type: ignore[no-any-return]


# %% The references change all scores at once, [B, H, Q, K] in memory.
def checkerboard(scores: Tensor) -> Tensor:
    """Double scores where q + kv is even, halve them where it is odd."""
    factors = torch.full_like(scores, 0.5)
    factors[..., ::2, ::2] = factors[..., 1::2, 1::2] = 2.0
    return scores * factors


def alibi(scores: Tensor) -> Tensor:
    """Subtract the bias as a tensor of heads x queries x keys."""
    heads, length = scores.shape[1:3]
    line = torch.arange(length, device=scores.device)
    distance = (line[:, None] - line).to(scores)
    return scores - torch.stack([2.0 ** (-8 * (h + 1) / heads) * distance for h in range(heads)])


def softcap(scores: Tensor) -> Tensor:
    """Bend scores into (-30, 30)."""
    return 30 * torch.tanh(scores / 30)


# %% Check all cases, then time each score change against no change.
def main() -> None:
    """Check and time all cases."""
    file = start(__doc__)
    length = CHECKED_SHAPE[2]
    everything, causal = torch.ones(length, length, dtype=torch.bool, device=DEVICE), pair_by_pair(_causal, length)
    for what, case in cases(CHECKED_SHAPE[1]).items():
        seen = causal if "mask" in case.arguments else everything
        check_attention(what, case.attend, _reference(seen, case.reference))

    batch, heads, length, _ = TIMED_SHAPE
    q, k, v = random_qkv()
    rows = []
    for what, case in cases(heads).items():
        if ON_GPU or case.on_cpu:
            pairs = batch * heads * (length * (length + 1) // 2 if "mask" in case.arguments else length**2)
            rows += attention_rows({what: case.attend}, pairs, q, k, v)
    finish(rows, file, "TFLOP/s count the two matrix products (five backward), not what the change itself computes.")


def _reference(seen: Tensor, change: Callable[[Tensor], Tensor] | None) -> Attend:
    return lambda q, k, v: textbook(q, k, v, seen, change)


def _causal(q: int, kv: int) -> bool:
    return kv <= q


if __name__ == "__main__":
    assert math.log2(TIMED_SHAPE[1]).is_integer()
    main()
