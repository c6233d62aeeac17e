"""Causal attention as a score change and as a mask, compared.

FlexAttention takes two functions. A score change is called with every score and may set it to -inf, which hides the
pair after the work was done. A mask says beforehand which pairs count. Pairs come in blocks of 128 x 128: a block
without a visible pair is never touched, and a block of visible pairs needs no mask. For causal attention that saves
half the work. Hide with masks; change with scores.
"""

# %%
from __future__ import annotations

import math

import torch
from torch import Tensor

import flexmasks
from _measure import (
    CHECKED_SHAPE,
    TIMED_SHAPE,
    attention_rows,
    causal_rows,
    check_attention,
    finish,
    pair_by_pair,
    random_qkv,
    start,
    textbook,
)


# %% The same attention in two ways. FlexAttention runs both, because they are functions of our own. Given the name
# "causal", the library would know that SDPA has a kernel for this very mask.
def causal_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Set the score of later keys to -inf, after it was computed."""
    return torch.where(kv <= q, score, -math.inf)


def causal_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Show the query itself and earlier keys; blocks of later keys are skipped."""
    return kv <= q


def by_score(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run attention with the score change."""
    return flexmasks.attention(q, k, v, score=causal_score)


def by_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run attention with the mask."""
    return flexmasks.attention(q, k, v, mask=causal_mask)


# %% Check both against the definition, show what the mask skips, and time them.
def main() -> None:
    """Check and time both ways."""
    file = start(__doc__)
    seen = pair_by_pair(lambda q, kv: kv <= q, CHECKED_SHAPE[2])
    for what, attend in (("as a score", by_score), ("as a mask", by_mask)):
        check_attention(what, attend, lambda q, k, v: textbook(q, k, v, seen))

    batch, heads, length, _ = TIMED_SHAPE
    print(f"\nas a mask, {length} tokens: {flexmasks.get_mask(causal_mask).blocks(length)}")
    print("as a score: no block is skipped, and every block evaluates the function\n")
    q, k, v = random_qkv()
    pairs = batch * heads * length * (length + 1) // 2
    rows = attention_rows({"as a score": by_score, "as a mask": by_mask}, pairs, q, k, v) + causal_rows(q, k, v)
    finish(rows, file, "TFLOP/s count the pairs that causal attention needs; the score change computes twice as many.")


if __name__ == "__main__":
    main()
