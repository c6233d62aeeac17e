"""What the operators of attention of few queries take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 128  # keys of a tile
_INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class KernelInputs(NamedTuple):
    """The tensors of both operators, in the order of the kernel's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor | None
    # The mask as lists of tiles:
    partial_counts: Tensor | None
    partial: Tensor | None
    full_counts: Tensor | None
    full: Tensor | None
    visible: Tensor | None
    # The tensors of a mask that is a band:
    q_starts: Tensor | None
    kv_lens: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @property
    def counts(self) -> tuple[Tensor | None, ...]:
        """The tensors from which kernels compute the numbers of tiles."""
        return self.partial_counts, self.full_counts, self.q_starts, self.kv_lens


def check(x: KernelInputs) -> None:
    kv_len = _check_keys(x.q, x.k, x.v, x.page_table)
    batch, heads, queries, _ = x.q.shape
    by_batch, by_head, by_query = {1, batch}, {1, heads}, {1, queries}
    _expect("partial_counts", x.partial_counts, (torch.int32,), by_batch, by_head)
    _expect("partial", x.partial, (torch.int32,), by_batch, by_head, None)
    _expect("full_counts", x.full_counts, (torch.int32,), by_batch, by_head)
    _expect("full", x.full, (torch.int32,), by_batch, by_head, None)
    _expect("visible", x.visible, (torch.bool,), by_batch, by_head, {queries}, {kv_len})
    _expect("q_starts", x.q_starts, _INTS, {batch})
    _expect("kv_lens", x.kv_lens, _INTS, {batch})
    _expect("bias", x.bias, (torch.float32,), by_batch, by_head, by_query, {kv_len})
    _expect("weight", x.weight, (torch.float32,), by_batch, by_head, by_query, {1})
    if x.weight is not None and x.bias is None:
        raise ValueError("few queries: weight is multiplied with bias; got no bias")
    _check_last_strides(partial=x.partial, full=x.full)


def check_place(q_start: int | None) -> None:
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


def _check_last_strides(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"few queries: the last stride of {name} must be 1, got strides {tensor.stride()}")


def _expect(name: str, tensor: Tensor | None, dtypes: tuple[torch.dtype, ...], *sizes: set[int] | None) -> None:
    """Raise ValueError for a tensor of other dtypes or sizes; None stands for any size."""
    if tensor is None:
        return
    fits = tensor.ndim == len(sizes) and all(s is None or n in s for n, s in zip(tensor.shape, sizes, strict=True))
    if tensor.dtype not in dtypes or not fits:
        shape = ", ".join("any" if s is None else " or ".join(map(str, sorted(s))) for s in sizes)
        raise ValueError(
            f"few queries: {name} must be {' or '.join(map(str, dtypes))} [{shape}], "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )
