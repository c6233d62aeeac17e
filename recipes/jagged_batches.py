"""Jagged batches: sequences of different lengths, without padding.

A jagged nested tensor holds the tokens of all sequences end to end, and where each sequence starts. `attention` takes
such q, k and v as they are, with any mask; positions count from the start of each sequence. Ordinary tensors whose
tokens lie end to end need the offsets: `mask=flexmasks.packed("causal", offsets)`. Lengths need not be multiples of a
block.
"""

# %%
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import flexmasks
from _measure import DEVICE, DTYPE, ON_GPU, Attend, attention_rows, check, finish, start, textbook


def random_lengths(sequences: int, longest: int) -> list[int]:
    """Return random lengths, which include 1 and `longest`."""
    return [1, longest, *torch.randint(1, longest + 1, (sequences - 2,)).tolist()]


def nested(parts: list[Tensor]) -> Tensor:
    """Return sequences [H, length, D] as one jagged nested tensor [B, H, jagged, D]."""
    rows = [part.transpose(0, 1) for part in parts]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


# %% The reference takes each sequence by itself, in a loop.
def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Run causal attention inside each sequence; q, k and v are [1, H, total, D]."""
    outs = []
    for one_q, one_k, one_v in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True):
        n = one_q.shape[2]
        outs.append(textbook(one_q, one_k, one_v, torch.ones(n, n, dtype=torch.bool, device=DEVICE).tril()))
    return torch.cat(outs, 2)


# %% A second reference: SDPA takes jagged nested tensors too. Torch has no causal form of that on a CPU, so here each
# sequence sees all of itself. The total length is whatever the sequences add up to, and no multiple of a block.
def check_against_nested_sdpa(lengths: list[int]) -> None:
    """Compare outputs and gradients with SDPA's on nested tensors; it rounds as DTYPE does."""
    heads, size, total = 2, 64, sum(lengths)
    leaves = [torch.randn(1, heads, total, size, device=DEVICE, dtype=DTYPE).requires_grad_() for _ in range(3)]
    upstream = torch.randn(1, heads, total, size, device=DEVICE, dtype=DTYPE)
    mask = flexmasks.packed("full", torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=DEVICE))
    q, k, v = (nested(list(leaf[0].split(lengths, 1))) for leaf in leaves)
    outs = {
        "SDPA": F.scaled_dot_product_attention(q, k, v).values()[None],
        "nested": flexmasks.attention(q, k, v, mask="full").values()[None],
        "by offsets": flexmasks.attention(*leaves, mask=mask),
    }
    gradients = {
        who: torch.cat(torch.autograd.grad(out, leaves, upstream, retain_graph=True), 2) for who, out in outs.items()
    }
    for who in ("nested", "by offsets"):
        what = f"{who} against SDPA on nested tensors, {total} tokens"
        check(f"{what}, output", outs[who], outs["SDPA"])
        check(f"{what}, gradients", gradients[who], gradients["SDPA"])


# %% Check both ways, with gradients, then time packing against padding.
def main() -> None:
    """Check and time jagged batches."""
    file = start(__doc__)
    heads, size = 2, 64
    lengths = [1, 300, 37, 128, 211]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=DEVICE)
    q, k, v = torch.randn(3, 1, heads, sum(lengths), size, device=DEVICE)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want = one_by_one(exact[0], exact[1], exact[2], lengths)
    upstream = torch.randn_like(q)
    want_gradients = torch.cat(torch.autograd.grad(want, exact, upstream.double()), 2)

    mask = flexmasks.packed("causal", offsets)
    flexmasks.show(flexmasks.packed("causal", [0, 1, 6, 9]), 9)
    check("by offsets", flexmasks.attention(q, k, v, mask=mask), want)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flexmasks.attention(*leaves, mask=mask)
    check("by offsets, gradients", torch.cat(torch.autograd.grad(out, leaves, upstream), 2), want_gradients)

    parts = [list(leaf[0].split(lengths, 1)) for leaf in leaves]
    out = flexmasks.attention(*(nested(p) for p in parts), mask="causal")
    check("nested", torch.cat(list(out.unbind()), 1)[None], want)
    out = flexmasks.attention(*(nested(p) for p in parts), mask="causal").values()[None]
    check("nested, gradients", torch.cat(torch.autograd.grad(out, leaves, upstream), 2), want_gradients)
    lengths_of_example = random_lengths(16, 1023)
    check_against_nested_sdpa(lengths_of_example)
    check_against_nested_sdpa([*lengths_of_example, 1])  # another total: 128 divides at most one of them

    if ON_GPU:
        heads, lengths = 16, random_lengths(16, 8192)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=DEVICE)
    sequences, longest, total = len(lengths), max(lengths), sum(lengths)
    print(f"\n{sequences} sequences of 1 to {longest} tokens, {total} in all; padded: {sequences * longest}\n")
    q, k, v = (torch.randn(1, heads, total, size, device=DEVICE, dtype=DTYPE) for _ in range(3))
    mask, lens = flexmasks.packed("causal", offsets), torch.tensor(lengths, device=DEVICE)
    packed: dict[str, Attend] = {"flexmasks, packed": lambda q, k, v: flexmasks.attention(q, k, v, mask=mask)}
    padded: dict[str, Attend] = {
        "SDPA, padded, causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    }
    tril: dict[str, Attend] = {
        "flexmasks, padded, grouped_tril": lambda q, k, v: flexmasks.attention(
            q, k, v, mask="grouped_tril", seq_lens=lens
        )
    }
    pairs = heads * sum(n * (n + 1) // 2 for n in lengths)
    rows = attention_rows(packed, pairs, q, k, v)
    q, k, v = (torch.randn(sequences, heads, longest, size, device=DEVICE, dtype=DTYPE) for _ in range(3))
    rows += attention_rows(padded, pairs, q, k, v)
    if ON_GPU:  # a CPU compiles slowly, so it leaves this call out
        rows += attention_rows(tril, pairs, q, k, v)
    padding = 1 - total / (sequences * longest)
    finish(rows, file, f"{padding:.0%} of the padded tokens are padding. TFLOP/s count the pairs inside sequences.")


if __name__ == "__main__":
    main()
