"""Serving: decoding and prompts in chunks, from a cache with room and a paged one.

While text is generated, the keys and values of earlier tokens lie in a cache. Decoding is attention of the last query,
and reading a prompt in chunks is attention of the next few queries. Both are causal attention whose first query is not
at position 0 but at the end of its sequence. `q_offset` says where, for each batch element. Keys past a query's
position are hidden, so it does not matter what a cache with room holds behind its last token.

A cache with room for the longest sequence wastes the room that shorter sequences leave. A paged cache cuts the memory
into pages that any sequence may hold, and a table lists the pages of each sequence. `paged_attention` takes the cache
and the table in the layouts of vLLM and FlashAttention.
"""

# %%
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _measure import DEVICE, DTYPE, ON_GPU, Row, check, finish, start, textbook
from torch import Tensor

import flexmasks
from flexmasks.bench.clock import interleaved
from flexmasks.bench.console import progress

# batch, heads, key heads, room, head size
CHECKED_SHAPE = (3, 4, 2, 512, 64)
TIMED_SHAPE = (64, 32, 8, 8192, 128) if ON_GPU else CHECKED_SHAPE


# %% A cache with room, [B, Hkv, room, D]. The next queries of each sequence stand where its keys end.
def attend(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Tensor:
    """Attend from the last queries q [B, H, Q, D] of each sequence.

    Sequence b has lens[b] keys, which include the keys at the positions of q.
    """
    out: Tensor = flexmasks.attention(q, k, v, mask="causal", q_offset=lens - q.shape[2])
    return out


# %% The same cache in pages of one pool, [pages, page size, Hkv, D], with a table of the pages of each sequence.
class Pages:
    """A cache [B, Hkv, room, D] cut into pages that lie in any order."""

    def __init__(self, k: Tensor, v: Tensor, page_size: int) -> None:
        batch, _, room, _ = k.shape
        order = torch.randperm(batch * room // page_size, device=DEVICE)
        self.table = order.view(batch, -1).int()
        self.k, self.v = (self.pool(x, page_size) for x in (k, v))

    def pool(self, x: Tensor, page_size: int) -> Tensor:
        """Return all pages, [pages, page size, Hkv, D], in the order that the table gives."""
        pages = x.transpose(1, 2).unflatten(1, (-1, page_size)).flatten(0, 1)
        return torch.empty_like(pages).index_copy_(0, self.table.flatten().long(), pages)

    def attend(self, q: Tensor, lens: Tensor) -> Tensor:
        """Attend to the pages, as `attend` above does to a cache with room."""
        out: Tensor = flexmasks.paged_attention(q, self.k, self.v, self.table, lens, mask="causal")
        return out


# %% The reference takes each sequence by itself, with its own keys only, in float64.
def one_by_one(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Tensor:
    """Attend as `attend` above does, one sequence after the other."""
    outs = []
    for b, length in enumerate(lens.tolist()):
        own_k, own_v = (x[b, :, :length].repeat_interleave(q.shape[1] // x.shape[1], 0).double() for x in (k, v))
        seen = torch.ones(q.shape[2], length, dtype=torch.bool, device=DEVICE).tril(length - q.shape[2])
        outs.append(textbook(q[b].double(), own_k, own_v, seen))
    return torch.stack(outs)


def check_all() -> None:
    """Decode some tokens and read prompts in chunks, from both caches."""
    (batch, heads, kv_heads, room, size), page_size, chunk = CHECKED_SHAPE, 64, 128
    q = torch.randn(batch, heads, room, size, device=DEVICE)
    k, v = torch.randn(2, batch, kv_heads, room, size, device=DEVICE)
    first = q[:, :, :1]
    for what, call in caches(k, v, page_size).items():
        lens = torch.tensor([300, 17, 511], device=DEVICE)
        for _ in range(2):  # at each step every sequence is one token longer
            check(f"{what}, decoding at lengths {lens.tolist()}", call(first, lens), one_by_one(first, k, v, lens))
            lens += 1
    if not ON_GPU:
        q, k, v = q.double(), k.double(), v.double()  # float64 compiles nothing, which would take long on a CPU
    whole = one_by_one(q, k, v, torch.full((batch,), room))
    for what, call in caches(k, v, page_size).items():
        ends = range(chunk, room + 1, chunk)
        parts = [call(q[:, :, n - chunk : n], torch.full((batch,), n, device=DEVICE)) for n in ends]
        check(f"{what}, a prompt of {room} tokens in chunks of {chunk}", torch.cat(parts, 2), whole)


def caches(k: Tensor, v: Tensor, page_size: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return attention to each of the two caches, as a function of queries and lengths."""
    return {
        "a cache with room": lambda q, lens: attend(q, k, v, lens),
        "a cache in pages": Pages(k, v, page_size).attend,
    }


# %% Time decoding, which must read the keys and values of each sequence once.
def main() -> None:
    """Check and time both caches."""
    file = start(__doc__)
    with torch.no_grad():
        check_all()
        batch, heads, kv_heads, room, size = TIMED_SHAPE
        q = torch.randn(batch, heads, 1, size, device=DEVICE, dtype=DTYPE)
        k, v = torch.randn(2, batch, kv_heads, room, size, device=DEVICE, dtype=DTYPE)
        lens = torch.randint(1, room + 1, (batch,), device=DEVICE)
        offset = lens - 1
        seen = (torch.arange(room, device=DEVICE) < lens[:, None])[:, None, None]
        calls: dict[str, Callable[[], Tensor]] = {
            "with room": lambda: flexmasks.attention(q, k, v, mask="causal", q_offset=offset),
            "with room: SDPA + mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True),
        }
        for page_size in (256, 128, 16) if ON_GPU else (64,):
            made = Pages(k, v, page_size)
            calls[f"pages of {page_size}"] = lambda made=made: made.attend(q, lens)  # type: ignore[misc]
        progress("preparing")
        outputs = {who: call() for who, call in calls.items()}
        progress("timing")
        times = interleaved(calls, DEVICE, 5)
        progress("")
    for who, out in outputs.items():
        check(f"{who}: agrees, at the size that is timed", out, outputs["with room"])
    used = float(lens.sum()) / (batch * room)
    read = 2 * int(lens.sum()) * kv_heads * size * k.element_size()
    rows: list[Row] = [
        {"a step of decoding": who, "ms": float(f"{ms:.4g}"), "GB/s": float(f"{read / ms / 1e6:.4g}")}
        for who, (ms, *_) in times.items()
    ]
    print(f"\n{batch} sequences of up to {room} keys, {used:.0%} of the room in use, {read / 1e6:.0f} MB to be read")
    finish(rows, file, "GB/s counts the keys and values of the sequences; the blocks of a step were planned before.")


if __name__ == "__main__":
    main()
