"""A sliding window: each query sees the last few keys, and the time goes with the window, not with the length.

Attention over all earlier keys costs length x length / 2. With a window of w keys it costs length x w, where a kernel
skips what lies outside. What one has to be exact about is the edge: here window=w means w earlier keys *and* the
query's own, FlashAttention's window_size=(w, 0); Hugging Face's sliding_window=W is window=W-1.
"""

# %%
from __future__ import annotations

from _measure import (
    CHECKED,
    ON_GPU,
    TIMED,
    Row,
    causal_rows,
    check_attention,
    finish,
    mask_rows,
    pair_by_pair,
    random_qkv,
    start,
    textbook,
)

import flexmasks


# %% The judge: the definition, for one query and one key. q itself counts, and so do the `window` keys before it.
def sees(q: int, kv: int, window: int) -> bool:
    """Whether query q sees key kv."""
    return q - window <= kv <= q


# %% The picture, the check, and how the time goes with the window.
def main() -> None:
    """Draw, check and time."""
    file = start(__doc__)
    flexmasks.show("sliding_window", 12, window=3)

    length = CHECKED[2]
    seen = pair_by_pair(lambda q, kv: sees(q, kv, 100), length)
    check_attention(
        "window of 100",
        lambda q, k, v: flexmasks.attention(q, k, v, mask="sliding_window", window=100),
        lambda q, k, v: textbook(q, k, v, seen),
    )

    q, k, v = random_qkv()
    rows: list[Row] = []
    for window in (256, 1024, 4096) if ON_GPU else (100,):
        mask = flexmasks.get_mask("sliding_window", window=window)
        skipped = mask.blocks(TIMED[2]).sparsity
        rows += [row | {"skipped": f"{skipped:.0%}"} for row in mask_rows(f"window of {window}", mask, q, k, v)]
    finish(rows + causal_rows(q, k, v), file, "TFLOP/s count the pairs that the mask shows.")


if __name__ == "__main__":
    main()
