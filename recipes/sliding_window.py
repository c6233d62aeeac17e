"""A sliding window: time grows with the window instead of the length.

Attention to all earlier keys costs length x length / 2. With a window of w keys it costs length x w, if the kernel
skips what lies outside. The edge matters: here window=w means w earlier keys *and* the query's own, which is
FlashAttention's window_size=(w, 0). Hugging Face's sliding_window=W is window=W-1.
"""

# %%
from __future__ import annotations

import flexmasks
from _measure import (
    CHECKED_SHAPE,
    ON_GPU,
    TIMED_SHAPE,
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


# %% The reference is the definition for one query and one key: the query's own key and the `window` keys before it.
def sees(q: int, kv: int, window: int) -> bool:
    """Return whether query q sees key kv."""
    return q - window <= kv <= q


# %% Draw, check, and time windows of several sizes.
def main() -> None:
    """Draw, check and time the mask."""
    file = start(__doc__)
    flexmasks.show("sliding_window", 12, window=3)

    length = CHECKED_SHAPE[2]
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
        skipped = mask.blocks(TIMED_SHAPE[2]).sparsity
        rows += [row | {"skipped": f"{skipped:.0%}"} for row in mask_rows(f"window of {window}", mask, q, k, v)]
    finish(rows + causal_rows(q, k, v), file, "TFLOP/s count the pairs that the mask shows.")


if __name__ == "__main__":
    main()
