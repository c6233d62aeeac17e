"""Prefix language models: the prompt sees all of itself.

An encoder-decoder reads its input in both directions. A prefix language model does the same in one stack, with a mask:
keys 0 to P - 1, the prefix, are visible to every query, and after them attention is causal. The edge matters: a prefix
of length P ends at key P - 1, and `kv <= P` would show the first generated token to the prompt.
"""

# %%
from __future__ import annotations

import torch

import flexmasks
from _measure import (
    CHECKED_SHAPE,
    DEVICE,
    TIMED_SHAPE,
    causal_rows,
    check_attention,
    finish,
    mask_rows,
    pair_by_pair,
    random_qkv,
    start,
    textbook,
)


# %% The reference is a list of the keys that a query sees.
def sees(q: int, kv: int, prefix: int) -> bool:
    """Return whether query q sees key kv: the keys of the prefix, and the keys up to its own."""
    return kv in range(prefix) or kv in range(q + 1)


# %% Prompts differ in length, so the prefixes of a batch are a tensor. A new tensor compiles nothing.
def main() -> None:
    """Draw, check and time the mask."""
    file = start(__doc__)
    flexmasks.show("prefix_lm", 12, prefix_len=5)

    batch, _, length, _ = CHECKED_SHAPE
    prefixes = [300, 0][:batch]
    seen = torch.stack([pair_by_pair(lambda q, kv, p=p: sees(q, kv, p), length) for p in prefixes])[:, None]  # type: ignore[misc]
    prefix_len = torch.tensor(prefixes, device=DEVICE)
    check_attention(
        f"prefixes of {prefixes}",
        lambda q, k, v: flexmasks.attention(q, k, v, mask="prefix_lm", prefix_len=prefix_len),
        lambda q, k, v: textbook(q, k, v, seen),
    )

    q, k, v = random_qkv()
    prefix_len = torch.randint(TIMED_SHAPE[2] // 2, (TIMED_SHAPE[0],), device=DEVICE)
    mask = flexmasks.get_mask("prefix_lm", prefix_len=prefix_len)
    print(f"\nprefixes of {prefix_len.tolist()}, of {TIMED_SHAPE[2]} tokens:\n{mask.blocks(TIMED_SHAPE[2])}\n")
    rows = mask_rows("prefix LM", mask, q, k, v) + causal_rows(q, k, v)
    finish(rows, file, "TFLOP/s count the pairs that the mask shows.")


if __name__ == "__main__":
    main()
