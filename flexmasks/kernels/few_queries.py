"""The operator torch.ops.flexmasks.attend_few: attention of few queries, which reads visible keys and values once.

attend_few(q, k, v, page_table, partial_counts, partial, full_counts, full, visible, factor, bias, scale, cap) is the
output [B, H, Q, V], in the dtype of q, and the log-sum-exp of the visible scores, float32 [B, H, Q]. A query that sees
nothing has output 0 and lse -inf.

q: [B, H, Q, D].
k, v: [B, KV heads, KV, D] and [B, KV heads, KV, V]; H is a multiple of the number of KV heads. With `page_table` they
    are pools, [pages, page size, KV heads, D] and [..., V].
page_table: int32 or int64 [B, P], the pages of each sequence: key j is in slot j % page size of page j // page size,
    and KV is P times the page size. Entries that no visible key needs may hold anything.
partial_counts, partial: int32 [1 or B, 1 or H] and [1 or B, 1 or H, ...], for each batch element and head the tiles of
    128 keys of which some query sees some keys, and how many they are.
full_counts, full: the same of the tiles of which all queries see all keys. No other tile is read, and no key from KV
    on. No tile is in both lists.
visible: bool [1 or B, 1 or H, Q, KV], the keys that each query sees. It is read in partial tiles only.
factor, bias: None or float32 [1 or B, 1 or H, 1 or Q, KV]; a score becomes factor * score + bias.
scale, cap: a score is scale * (q . k), and with a cap then cap * tanh(score / cap), before factor and bias.

The last stride of q, k, v and page_table is 1, other strides are free. Keys that no query sees may hold anything, NaN
included; the values of keys that some queries see must be finite for the others too.

Triton kernels run the operator on a GPU in float16, bfloat16 and float32 with head sizes that are multiples of 8 up to
256, and plain torch runs it elsewhere. No value is read on the host: a CUDA graph can capture the operator. It has no
derivatives.

Example, one query that sees the first 200 of 256 keys, thus all keys of tile 0 and some keys of tile 1:

>>> q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 256, 16), torch.randn(1, 2, 256, 16)
>>> count, tile = torch.ones(1, 1, dtype=torch.int32), torch.tensor([[[0]]], dtype=torch.int32)
>>> visible = torch.arange(256).view(1, 1, 1, 256) < 200
>>> out, lse = attend_few(q, k, v, None, count, tile + 1, count, tile, visible, None, None, 0.25, None)
>>> out.shape, lse.shape
(torch.Size([1, 4, 1, 16]), torch.Size([1, 4, 1]))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TILE = 128  # keys of a tile
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_SIZE = 256  # of a head, for the Triton kernels
_library = torch.library.Library("flexmasks", "FRAGMENT")
_library.define(
    "attend_few(Tensor q, Tensor k, Tensor v, Tensor? page_table, Tensor partial_counts, Tensor partial, "
    "Tensor full_counts, Tensor full, Tensor visible, Tensor? factor, Tensor? bias, float scale, float? cap) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
attend_few = torch.ops.flexmasks.attend_few.default


def _attend_few(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None,
    partial_counts: Tensor, partial: Tensor, full_counts: Tensor, full: Tensor, visible: Tensor,
    factor: Tensor | None, bias: Tensor | None, scale: float, cap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the operator; see the top of the file."""
    arguments = (
        q, k, v, page_table, partial_counts, partial, full_counts, full, visible, factor, bias, scale, cap,
    )  # fmt: skip
    if q.is_cuda and runs_on_triton(q.dtype, q.shape[-1], v.shape[-1]):
        from flexmasks.kernels import few_queries_launch  # Triton is not installed on every system

        with torch.cuda.device(q.device):  # Triton launches on the current device
            return few_queries_launch.attend(*arguments)
    return plain_attend_few(*arguments)


def runs_on_triton(dtype: torch.dtype, k_size: int, v_size: int) -> bool:
    """Return whether the Triton kernels take a dtype, and the head sizes of keys and of values."""
    return dtype in _TRITON_DTYPES and all(0 < n <= _LARGEST_SIZE and n % 8 == 0 for n in (k_size, v_size))


def _fake(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)


def check(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None,
    partial_counts: Tensor, partial: Tensor, full_counts: Tensor, full: Tensor, visible: Tensor,
    factor: Tensor | None, bias: Tensor | None,
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
    for name, change in {"factor": factor, "bias": bias}.items():
        if change is not None:
            _expect(name, change, (torch.float32,), by_batch, by_head, {1, queries}, {kv_len})
    rows = {"q": q, "k": k, "v": v, "page_table": page_table, "partial": partial, "full": full}
    for name, tensor in rows.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"attend_few: the last stride of {name} must be 1, got strides {tensor.stride()}")


def _expect(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], *sizes: set[int] | None) -> None:
    """Raise ValueError unless a tensor has one of the dtypes, and in each dimension one of the sizes, None for any."""
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
    factor: Tensor | None, bias: Tensor | None, scale: float, cap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what the operator returns, by torch's own operations, in float32 or in float64 if q is.

    It takes memory for H x Q x KV scores of each batch element.
    """
    check(q, k, v, page_table, partial_counts, partial, full_counts, full, visible, factor, bias)
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
    if factor is not None:
        scores = scores * factor
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
    out = (weights.view(batch, key_heads, rows, kv_len) @ v).view(batch, heads, queries, v.shape[-1])
    return out.to(q.dtype), lse.float()


def _of_keys(counts: Tensor, tiles: Tensor, kv_len: int) -> Tensor:
    """Return which keys are in listed tiles, bool [1 or B, 1 or H, 1, KV]."""
    n_tiles = -(-kv_len // TILE)
    places = torch.arange(tiles.shape[-1], device=tiles.device)
    listed = torch.where(places < counts[..., None], tiles, n_tiles).clamp(0, n_tiles).long()
    is_listed = torch.zeros(*tiles.shape[:-1], n_tiles + 1, dtype=torch.bool, device=tiles.device)
    is_listed.scatter_(-1, listed, True)
    return is_listed[..., :n_tiles].repeat_interleave(TILE, -1)[..., None, :kv_len]


def _gathered(pool: Tensor, page_table: Tensor, seen: Tensor) -> Tensor:
    """Return the keys or values [B, heads, KV, size] behind a page table, of page 0 where no key of a page is seen."""
    batch, n_pages = page_table.shape
    is_needed = seen.view(batch, n_pages, pool.shape[1]).any(-1)
    pages = torch.where(is_needed, page_table, 0)
    return pool[pages.long()].flatten(1, 2).transpose(1, 2)


_library.impl("attend_few", _attend_few, "CompositeExplicitAutograd")
torch.library.register_fake("flexmasks::attend_few", _fake, lib=_library)
