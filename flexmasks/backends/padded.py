"""Attention whose lengths are no multiples of a tile, by kernels that need not look where tokens end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.lists import lists_of, made_of

Attend = Callable[..., tuple[Tensor, Tensor | None]]


def has_more_tokens(block_mask: compat.BlockMask | None, q: Tensor, k: Tensor) -> bool:
    """Return whether a BlockMask is made for more queries or keys than there are, see `with_padding`."""
    return block_mask is not None and block_mask.seq_lengths != (q.shape[2], k.shape[2])


def for_whole_blocks(block_mask: compat.BlockMask) -> compat.BlockMask:
    """Return a BlockMask of the same blocks for the queries and keys of whole blocks, which tiles of kernels divide.

    Blocks must not be full where tokens end inside them; torch's and this library's never are.
    """
    lengths = tuple(-(-n // size) * size for n, size in zip(block_mask.seq_lengths, block_mask.BLOCK_SIZE, strict=True))
    return made_of(lengths, lists_of(block_mask), block_mask.BLOCK_SIZE, block_mask.mask_mod)


def with_padding(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: compat.BlockMask,
    *others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse of `attend` with q, k and v padded to the lengths of `block_mask`.

    Functions get no index of the padding, and no query sees it.
    """
    (more_q, more_kv), (q_len, kv_len) = block_mask.seq_lengths, (q.shape[2], k.shape[2])
    mask_mod = block_mask.mask_mod

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = mask_mod(b, h, i.clamp(max=q_len - 1), j.clamp(max=kv_len - 1))
        return seen & (i < q_len) & (j < kv_len)

    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Dynamo takes no `cast` of a function.
        return score_mod(score, b, h, i.clamp(max=q_len - 1), j.clamp(max=kv_len - 1))  # type: ignore[misc]

    out, lse = attend(
        _longer(q, more_q),
        _longer(k, more_kv),
        _longer(v, more_kv),
        None if score_mod is None else changed,
        made_of(block_mask.seq_lengths, lists_of(block_mask), block_mask.BLOCK_SIZE, visible),
        *others,
    )
    return _shorter(out, q_len), None if lse is None else lse[:, :, :q_len].contiguous()


def _longer(x: Tensor, length: int) -> Tensor:
    """Return [B, H, S, D] with zeros up to a length, in the same order in memory."""
    more = length - x.shape[2]
    if _is_by_tokens(x):
        return F.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, more)).transpose(1, 2)
    return F.pad(x, (0, 0, 0, more))


def _shorter(x: Tensor, length: int) -> Tensor:
    """Return the first tokens of [B, H, S, D], in the same order in memory without gaps."""
    if _is_by_tokens(x):
        return x.transpose(1, 2)[:, :length].contiguous().transpose(1, 2)
    return x[:, :, :length].contiguous()


def _is_by_tokens(x: Tensor) -> bool:
    return x.stride(1) < x.stride(2)
