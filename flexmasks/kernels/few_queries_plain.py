"""Attention of few queries by torch's own operations, and the checks of its arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TILE = 128  # keys of a tile


def check(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None,
    partial_counts: Tensor, partial: Tensor, full_counts: Tensor, full: Tensor, visible: Tensor,
    weight: Tensor | None, bias: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for tensors that the operator does not take."""
    batch, heads, queries, k_size = q.shape
    by_batch, by_head = {1, batch}, {1, heads}
    lists = {"partial": (partial_counts, partial), "full": (full_counts, full)}
    if page_table is None:
        _, key_heads, kv_len, _ = k.shape
        _expect("k", k, (q.dtype,), {batch}, None, None, {k_size})
    else:
        _, page_size, key_heads, _ = k.shape
        kv_len = page_table.shape[-1] * page_size
        _expect("page_table", page_table, (torch.int32, torch.int64), {batch}, None)
        _expect("k", k, (q.dtype,), None, None, None, {k_size})
    _expect("v", v, (q.dtype,), *({n} for n in k.shape[:3]), None)
    if not key_heads or heads % key_heads:
        raise ValueError(f"attend_few: the heads of q, {heads}, must be a multiple of the heads of k, {key_heads}")
    for name, (counts, tiles) in lists.items():
        _expect(f"{name}_counts", counts, (torch.int32,), by_batch, by_head)
        _expect(name, tiles, (torch.int32,), by_batch, by_head, None)
    _expect("visible", visible, (torch.bool,), by_batch, by_head, {queries}, {kv_len})
    if bias is not None:
        _expect("bias", bias, (torch.float32,), by_batch, by_head, {1, queries}, {kv_len})
    if weight is not None:
        _expect("weight", weight, (torch.float32,), by_batch, by_head, {1, queries}, {1})
        if bias is None:
            raise ValueError("attend_few: weight is multiplied with bias; got no bias")
    rows = {"q": q, "k": k, "v": v, "page_table": page_table, "partial": partial, "full": full}
    for name, tensor in rows.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"attend_few: the last stride of {name} must be 1, got strides {tensor.stride()}")


def _expect(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], *sizes: set[int] | None) -> None:
    """Raise ValueError for a tensor of other dtypes or sizes; None stands for any size."""
    fits = tensor.ndim == len(sizes) and all(s is None or n in s for n, s in zip(tensor.shape, sizes, strict=True))
    if tensor.dtype not in dtypes or not fits:
        shape = ", ".join("any" if s is None else " or ".join(map(str, sorted(s))) for s in sizes)
        raise ValueError(
            f"attend_few: {name} must be {' or '.join(map(str, dtypes))} [{shape}], "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )


def plain_attend_few(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None,
    partial_counts: Tensor, partial: Tensor, full_counts: Tensor, full: Tensor, visible: Tensor,
    weight: Tensor | None, bias: Tensor | None, scale: float, cap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the results of the operator, by torch's own operations.

    They are computed in float32, or in float64 if q is float64.
    It takes memory for H x Q x KV scores of each batch element.
    """
    check(q, k, v, page_table, partial_counts, partial, full_counts, full, visible, weight, bias)
    batch, heads, queries, _ = q.shape
    kv_len = k.shape[2] if page_table is None else page_table.shape[1] * k.shape[1]
    seen = _of_keys(partial_counts, partial, kv_len) & visible | _of_keys(full_counts, full, kv_len)
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
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
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
