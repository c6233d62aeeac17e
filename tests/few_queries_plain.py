"""The operators attend_few and attend_band by torch's own operations, for tests of what calls them without a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flexmasks.backends import decode_gpu
from flexmasks.kernels import few_queries
from flexmasks.kernels.few_queries_checks import TILE, KernelInputs, check, check_place


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operators, and the calls that leave out torch's dispatcher, run these functions."""
    functions = {"attend_few": attend_few, "attend_band": attend_band}

    def attend_directly(name: str, arguments: tuple[Any, ...], *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        out, lse = functions[name](*arguments)
        return out, lse if with_lse else None

    for module in (few_queries, decode_gpu):
        monkeypatch.setattr(module, "attend_directly", attend_directly)


def attend_few(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None,
    partial_counts: Tensor, partial: Tensor, full_counts: Tensor, full: Tensor, visible: Tensor,
    weight: Tensor | None, bias: Tensor | None, scale: float, cap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the results of the operator attend_few, by torch's own operations.

    They are computed in float32, or in float64 if q is float64.
    """
    lists = partial_counts, partial, full_counts, full, visible
    check(KernelInputs(q, k, v, page_table, *lists, None, None, weight, bias))
    kv_len = visible.shape[-1]
    seen = _of_keys(partial_counts, partial, kv_len) & visible | _of_keys(full_counts, full, kv_len)
    return _attend(q, k, v, page_table, seen, weight, bias, scale, cap)


def attend_band(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, q_starts: Tensor | None, kv_lens: Tensor | None,
    weight: Tensor | None, bias: Tensor | None,
    scale: float, cap: float | None, q_start: int | None, left: int | None, right: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the results of the operator attend_band, as `attend_few` does."""
    check(KernelInputs(q, k, v, page_table, None, None, None, None, None, q_starts, kv_lens, weight, bias))
    check_place(q_start)
    kv_len = k.shape[2] if page_table is None else page_table.shape[1] * k.shape[1]
    queries = q.shape[2]
    lengths = torch.full((1,), kv_len, device=q.device) if kv_lens is None else kv_lens.long().clamp(0, kv_len)
    starts = (lengths - queries).clamp(min=0) if q_start is None else torch.full_like(lengths, q_start)
    starts = starts if q_starts is None else q_starts.long()
    key = torch.arange(kv_len, device=q.device)
    distance = key - (starts[:, None] + torch.arange(queries, device=q.device))[..., None]  # [B or 1, Q, KV]
    seen = key < lengths[:, None, None]
    seen = seen if left is None else seen & (distance >= -left)
    seen = seen if right is None else seen & (distance <= right)
    return _attend(q, k, v, page_table, seen[:, None], weight, bias, scale, cap)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, seen: Tensor,
    weight: Tensor | None, bias: Tensor | None, scale: float, cap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output and lse of queries that see marked keys.

    seen: bool [1 or B, 1 or H, 1 or Q, KV].
    """
    batch, heads, queries, _ = q.shape
    kv_len = seen.shape[-1]
    seen = seen.expand(batch, heads, queries, kv_len)
    by_batch = seen.any(2).any(1)  # [B, KV]
    if page_table is not None:
        k, v = (_gathered(pool, page_table, by_batch) for pool in (k, v))
    key_heads = k.shape[1]
    rows = heads // key_heads * queries  # that share a key head
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (t.to(dtype).masked_fill(~by_batch[:, None, :, None], 0) for t in (k, v))
    scores = (q.to(dtype).reshape(batch, key_heads, rows, q.shape[-1]) @ k.mT).view(
        batch, heads, queries, kv_len
    ) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + (bias if weight is None else weight * bias)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, scores.softmax(-1))
    out = (weights.view(batch, key_heads, rows, kv_len) @ v).view(batch, heads, queries, v.shape[-1])
    return out.to(q.dtype), lse.float()


def _of_keys(counts: Tensor, tiles: Tensor, kv_len: int) -> Tensor:
    """Return a mask of the keys in listed tiles.

    It is bool [1 or B, 1 or H, 1, KV].
    """
    n_tiles = -(-kv_len // TILE)
    places = torch.arange(tiles.shape[-1], device=tiles.device)
    listed = torch.where(places < counts[..., None], tiles, n_tiles).clamp(0, n_tiles).long()
    is_listed = torch.zeros(*tiles.shape[:-1], n_tiles + 1, dtype=torch.bool, device=tiles.device)
    is_listed.scatter_(-1, listed, True)
    return is_listed[..., :n_tiles].repeat_interleave(TILE, -1)[..., None, :kv_len]


def _gathered(pool: Tensor, page_table: Tensor, seen: Tensor) -> Tensor:
    """Return the keys or values [B, heads, KV, size] behind a page table.

    They are those of page 0 where no key of a page is seen.
    """
    batch, n_pages = page_table.shape
    is_needed = seen.view(batch, n_pages, pool.shape[1]).any(-1)
    pages = torch.where(is_needed, page_table, 0)
    return pool[pages.long()].flatten(1, 2).transpose(1, 2)
