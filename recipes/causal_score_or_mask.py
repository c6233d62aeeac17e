"""Causal attention as a change of the scores and as a mask: the same numbers, and why the mask is faster.

FlexAttention takes two functions. A score change is called with every score and may set it to -inf: that hides the
pair, after the work was done. A mask says beforehand which pairs count: of blocks of 128 x 128 pairs those without any
are never touched, and in those with all of them nothing has to be evaluated. For causal attention that is half the
work. Hide by masks; change by scores.
"""

# %%
from __future__ import annotations

import math

import torch
from _measure import (
    CHECKED,
    TIMED,
    attention_rows,
    causal_rows,
    check_attention,
    finish,
    pair_by_pair,
    random_qkv,
    start,
    textbook,
)
from torch import Tensor

import flexmasks


# %% Twice the same. As functions of our own, both are run by FlexAttention: under its name, "causal", the library would
# know that SDPA has a kernel for this very mask.
def causal_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Every score is computed, then those of later keys are thrown away."""
    return torch.where(kv <= q, score, -math.inf)


def causal_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Blocks of later keys are skipped."""
    return kv <= q


def by_score(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query sees every key, some at -inf."""
    return flexmasks.attention(q, k, v, score=causal_score)  # type: ignore[no-any-return]


def by_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query sees its keys."""
    return flexmasks.attention(q, k, v, mask=causal_mask)  # type: ignore[no-any-return]


# %% Both checked against the definition; what the mask skips; the times.
def main() -> None:
    """Check and time."""
    file = start(__doc__)
    seen = pair_by_pair(lambda q, kv: kv <= q, CHECKED[2])
    for what, attend in (("as a score", by_score), ("as a mask", by_mask)):
        check_attention(what, attend, lambda q, k, v: textbook(q, k, v, seen))

    batch, heads, length, _ = TIMED
    print(f"\nas a mask, {length} tokens: {flexmasks.get_mask(causal_mask).blocks(length)}")
    print("as a score: no block is skipped, and none is without the function\n")
    q, k, v = random_qkv()
    pairs = batch * heads * length * (length + 1) // 2
    rows = attention_rows({"as a score": by_score, "as a mask": by_mask}, pairs, q, k, v) + causal_rows(q, k, v)
    finish(rows, file, "TFLOP/s count the pairs that causal attention needs; the score change computes twice as many.")


if __name__ == "__main__":
    main()
