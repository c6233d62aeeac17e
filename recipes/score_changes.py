"""Changes of the scores: none, a checkerboard, ALiBi in three forms, a soft cap. Each is a function of one score.

Between q k^T and the softmax, FlexAttention calls `score_mod(score, b, h, q, kv)` and compiles it into its kernel, and
the gradient with it: a bias never exists as a tensor of queries x keys. What the function needs may be captured (a
tensor of slopes), computed from the indices, or bound by name.
"""

# %%
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _measure import (
    CHECKED,
    DEVICE,
    ON_GPU,
    TIMED,
    Attend,
    attention_rows,
    check_attention,
    finish,
    pair_by_pair,
    random_qkv,
    start,
    textbook,
)
from torch import Tensor

import flexmasks


# %% ALiBi, a penalty for distance: score - slope * (q - kv), never a plus, which would favour what is far away.
# Form 1, a closure: the slopes are a tensor that the function captured, an input of the kernel.
def alibi_closure(heads: int) -> Callable[..., Tensor]:
    """The slopes 2^(-8/H), 2^(-16/H), ... of H heads, a power of two."""
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], device=DEVICE)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - slopes[h] * (q - kv)

    return alibi


# Form 2, a formula: the slope is computed from the head's index, and nothing is captured.
def alibi_formula(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, heads: int) -> Tensor:
    """`heads` is a number, and so a constant of the kernel."""
    return score - torch.exp2(-8.0 * (h + 1) / heads) * (q - kv)


# Form 3, by name: the slopes of the paper for any number of heads, also one that is no power of two.
def cases(heads: int) -> dict[str, Case]:
    """What is tried: the arguments of `attention`, and whether a CPU, which compiles slowly, times it, too."""
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
    """Arguments of `attention`, the same on all scores at once, and whether a CPU times it."""

    arguments: dict[str, Any]
    judge: Callable[[Tensor], Tensor] | None
    on_cpu: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """On a CPU what is not timed is not compiled, but run in plain torch."""
        backend = "auto" if ON_GPU or self.on_cpu else "reference"
        return flexmasks.attention(q, k, v, backend=backend, **self.arguments)  # type: ignore[no-any-return]


# %% The judges: the same changes of all scores at once, [B, H, Q, K] in memory.
def checkerboard(scores: Tensor) -> Tensor:
    """Double where q + kv is even, half where it is odd."""
    factors = torch.full_like(scores, 0.5)
    factors[..., ::2, ::2] = factors[..., 1::2, 1::2] = 2.0
    return scores * factors


def alibi(scores: Tensor) -> Tensor:
    """The bias as a tensor of heads x queries x keys."""
    heads, length = scores.shape[1:3]
    line = torch.arange(length, device=scores.device)
    distance = (line[:, None] - line).to(scores)
    return scores - torch.stack([2.0 ** (-8 * (h + 1) / heads) * distance for h in range(heads)])


def softcap(scores: Tensor) -> Tensor:
    """Bent into (-30, 30)."""
    return 30 * torch.tanh(scores / 30)


# %% All checked; then timed: what a change costs, next to no change.
def main() -> None:
    """Check and time."""
    file = start(__doc__)
    length = CHECKED[2]
    everything, causal = torch.ones(length, length, dtype=torch.bool, device=DEVICE), pair_by_pair(_causal, length)
    for what, case in cases(CHECKED[1]).items():
        seen = causal if "mask" in case.arguments else everything
        check_attention(what, case.attend, _judged(seen, case.judge))

    batch, heads, length, _ = TIMED
    q, k, v = random_qkv()
    rows = []
    for what, case in cases(heads).items():
        if ON_GPU or case.on_cpu:
            pairs = batch * heads * (length * (length + 1) // 2 if "mask" in case.arguments else length**2)
            rows += attention_rows({what: case.attend}, pairs, q, k, v)
    finish(rows, file, "TFLOP/s count the two matrix products (five backward), not what the change itself computes.")


def _judged(seen: Tensor, change: Callable[[Tensor], Tensor] | None) -> Attend:
    return lambda q, k, v: textbook(q, k, v, seen, change)


def _causal(q: int, kv: int) -> bool:
    return kv <= q


if __name__ == "__main__":
    assert math.log2(TIMED[1]).is_integer()
    main()
