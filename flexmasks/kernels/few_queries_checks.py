"""What the operators of attention of few queries take."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 128  # keys of a tile
_INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def check(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None,
    partial_counts: Tensor, partial: Tensor, full_counts: Tensor, full: Tensor, visible: Tensor,
    weight: Tensor | None, bias: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for tensors that the operator attend_few does not take."""
    kv_len = _check_keys(q, k, v, page_table)
    batch, heads, queries, _ = q.shape
    by_batch, by_head = {1, batch}, {1, heads}
    lists = {"partial": (partial_counts, partial), "full": (full_counts, full)}
    for name, (counts, tiles) in lists.items():
        _expect(f"{name}_counts", counts, (torch.int32,), by_batch, by_head)
        _expect(name, tiles, (torch.int32,), by_batch, by_head, None)
    _expect("visible", visible, (torch.bool,), by_batch, by_head, {queries}, {kv_len})
    _check_bias(q, kv_len, weight, bias)
    _check_last_strides(partial=partial, full=full)


def check_band(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, q_starts: Tensor | None, kv_lens: Tensor | None,
    weight: Tensor | None, bias: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for tensors that the operator attend_band does not take."""
    kv_len = _check_keys(q, k, v, page_table)
    for name, numbers in (("q_starts", q_starts), ("kv_lens", kv_lens)):
        if numbers is not None:
            _expect(name, numbers, _INTS, {q.shape[0]})
    _check_bias(q, kv_len, weight, bias)


def check_place(q_start: int | None) -> None:
    """Raise ValueError for a place of the first query that kernels do not take."""
    if q_start is not None and not 0 <= q_start < 2**31:
        raise ValueError(f"few queries: q_start must be from 0 to 2**31 - 1, got {q_start}")


def _check_keys(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None) -> int:
    """Check queries, keys, values and pages, and return the number of keys."""
    batch, heads, _, k_size = q.shape
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
        raise ValueError(f"few queries: the heads of q, {heads}, must be a multiple of the heads of k, {key_heads}")
    _check_last_strides(q=q, k=k, v=v, page_table=page_table)
    return kv_len


def _check_bias(q: Tensor, kv_len: int, weight: Tensor | None, bias: Tensor | None) -> None:
    batch, heads, queries, _ = q.shape
    sizes = {1, batch}, {1, heads}, {1, queries}
    if bias is not None:
        _expect("bias", bias, (torch.float32,), *sizes, {kv_len})
    if weight is not None:
        _expect("weight", weight, (torch.float32,), *sizes, {1})
        if bias is None:
            raise ValueError("few queries: weight is multiplied with bias; got no bias")


def _check_last_strides(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"few queries: the last stride of {name} must be 1, got strides {tensor.stride()}")


def _expect(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], *sizes: set[int] | None) -> None:
    """Raise ValueError for a tensor of other dtypes or sizes; None stands for any size."""
    fits = tensor.ndim == len(sizes) and all(s is None or n in s for n, s in zip(tensor.shape, sizes, strict=True))
    if tensor.dtype not in dtypes or not fits:
        shape = ", ".join("any" if s is None else " or ".join(map(str, sorted(s))) for s in sizes)
        raise ValueError(
            f"few queries: {name} must be {' or '.join(map(str, dtypes))} [{shape}], "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )
