"""Document packing: sequences laid end to end, with nothing padded.

Documents differ in length. If they are padded to the longest, most of a batch is padding; if they are cut to one
length, the text is broken. Packed documents lie end to end in one long sequence, and a mask keeps them apart: causal,
and inside the same document. Blocks that join two documents are skipped, so the cost is the cost of the documents
themselves. The ids of the documents are a tensor, so the next batch, which has other ids, compiles nothing.
"""

# %%
from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

import flexmasks
from _measure import (
    CHECKED_SHAPE,
    DEVICE,
    ON_GPU,
    Attend,
    attention_rows,
    check,
    check_attention,
    finish,
    mask_rows,
    random_qkv,
    start,
    textbook,
)
from flexmasks.masks import causal, document


def lengths_of_documents(total: int, longest: int) -> list[int]:
    """Return random lengths that add up to `total` tokens."""
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(min(int(torch.randint(longest // 16, longest + 1, ())), total - sum(lengths)))
    return lengths


def ids_of(lengths: list[int]) -> Tensor:
    """Return the document of each token: 0 0 0 1 1 2 2 2 2 ..."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(DEVICE)


def packed_causal(ids: Tensor) -> flexmasks.Mask:
    """Return causal attention inside each document, two masks combined."""
    return causal() & document(document_ids=ids)


# %% The reference takes each document by itself, in a loop. Nothing is packed, and the only mask is causal.
def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Run attention inside each document."""
    outs = []
    for one_q, one_k, one_v in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True):
        n = one_q.shape[2]
        outs.append(textbook(one_q, one_k, one_v, torch.ones(n, n, dtype=torch.bool, device=DEVICE).tril()))
    return torch.cat(outs, 2)


# %% The documents of FlexAttention's own example, at their full size: 4,096, 4,096 and three of 8,192 tokens. SDPA runs
# each document by itself. The blocks can be counted by hand: a document of n x n blocks of 128 tokens has n on its
# diagonal, which are partial, and n (n - 1) / 2 below it, which are full. All others are empty.
def check_the_example() -> None:
    """Check the output and the blocks of five documents, which make 32,768 tokens."""
    lengths = [4096, 4096, 8192, 8192, 8192]
    mask = packed_causal(ids_of(lengths))
    q, k, v = torch.randn(3, 1, 1, sum(lengths), 64 if ON_GPU else 16, device=DEVICE)
    documents = zip(*(x.double().split(lengths, 2) for x in (q, k, v)), strict=True)
    want = torch.cat(
        [F.scaled_dot_product_attention(one_q, one_k, one_v, is_causal=True) for one_q, one_k, one_v in documents], 2
    )
    check("documents of 4,096, 4,096 and 3 x 8,192 tokens", flexmasks.attention(q, k, v, mask=mask), want)

    blocks = mask.blocks(sum(lengths))
    diagonals = [n // 128 for n in lengths]
    counts = {"partial": sum(diagonals), "full": sum(n * (n - 1) // 2 for n in diagonals)}
    print(f"blocks: {blocks}")
    assert {"partial": blocks.partial, "full": blocks.full} == counts


# %% Check with two sets of documents and at the example, then time packing and padding.
def main() -> None:
    """Draw, check and time packed documents."""
    file = start(__doc__)
    flexmasks.show(packed_causal(ids_of([5, 2, 4, 1])), 12)

    compiled = _Compiled()
    length = CHECKED_SHAPE[2]
    for attempt in ("documents", "other documents"):
        lengths = lengths_of_documents(length, 300)
        mask = packed_causal(ids_of(lengths))
        check_attention(
            f"{len(lengths)} {attempt}, one by one",
            lambda q, k, v, mask=mask: flexmasks.attention(q, k, v, mask=mask),  # type: ignore[misc]
            lambda q, k, v, lengths=lengths: one_by_one(q, k, v, lengths),  # type: ignore[misc]
        )
        print(f"kernels compiled so far: {compiled.count}")
        if attempt == "documents":
            after_first = compiled.count
    assert compiled.count == after_first, "other documents compiled a kernel"

    check_the_example()

    heads, total, longest = (16, 32768, 1136) if ON_GPU else (2, 1024, 300)
    lengths = lengths_of_documents(total, longest)
    q, k, v = random_qkv((1, heads, total, 64) if ON_GPU else CHECKED_SHAPE)
    mask = packed_causal(ids_of(lengths))
    print(f"\n{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, {total} in all:")
    print(f"{mask.blocks(total)}\n")
    rows = mask_rows("packed", mask, q, k, v)
    shape = (len(lengths) * q.shape[0], heads, max(lengths), 64)
    padded = random_qkv(shape)
    needed = sum(n * (n + 1) // 2 for n in lengths) * heads * q.shape[0]
    padded_causal: dict[str, Attend] = {"SDPA": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)}
    rows += [{"mask": "causal, padded", **row} for row in attention_rows(padded_causal, needed, *padded)]
    padding = 1 - total / (len(lengths) * max(lengths))
    note = f"Padded to the longest, {padding:.0%} of the tokens are padding, in every layer of a model."
    finish(rows, file, f"{note} TFLOP/s count the pairs inside documents.")


class _Compiled(logging.Handler):
    """A counter of the kernels that the library logs as compiled."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0
        logger = logging.getLogger("flexmasks")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().startswith("compiled")


if __name__ == "__main__":
    main()
