"""Prefix language models: the prompt sees all of itself, what is generated sees what came before.

An encoder-decoder reads its input in both directions; a prefix language model does the same in one stack, by a mask:
keys 0 to P - 1, the prefix, are visible to every query, and past them attention is causal. The edge to get right: a
prefix of length P ends at key P - 1. `kv <= P` would show the first generated token to the prompt.
"""

# %%
from __future__ import annotations

import torch
from _measure import (
    CHECKED,
    DEVICE,
    TIMED,
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


# %% The judge: a list of what a query sees.
def sees(q: int, kv: int, prefix: int) -> bool:
    """Whether query q sees key kv: the prefix's keys, and those up to the query's own."""
    return kv in range(prefix) or kv in range(q + 1)


# %% Prompts differ in length: one prefix for each batch element is a tensor, and a new tensor compiles nothing.
def main() -> None:
    """Draw, check and time."""
    file = start(__doc__)
    flexmasks.show("prefix_lm", 12, prefix_len=5)

    batch, _, length, _ = CHECKED
    prefixes = [300, 0][:batch]
    seen = torch.stack([pair_by_pair(lambda q, kv, p=p: sees(q, kv, p), length) for p in prefixes])[:, None]  # type: ignore[misc]
    prefix_len = torch.tensor(prefixes, device=DEVICE)
    check_attention(
        f"prefixes of {prefixes}",
        lambda q, k, v: flexmasks.attention(q, k, v, mask="prefix_lm", prefix_len=prefix_len),
        lambda q, k, v: textbook(q, k, v, seen),
    )

    q, k, v = random_qkv()
    prefix_len = torch.randint(TIMED[2] // 2, (TIMED[0],), device=DEVICE)
    mask = flexmasks.get_mask("prefix_lm", prefix_len=prefix_len)
    print(f"\nprefixes of {prefix_len.tolist()}, of {TIMED[2]} tokens:\n{mask.blocks(TIMED[2])}\n")
    rows = mask_rows("prefix LM", mask, q, k, v) + causal_rows(q, k, v)
    finish(rows, file, "TFLOP/s count the pairs that the mask shows.")


if __name__ == "__main__":
    main()
