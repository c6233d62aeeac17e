"""Backend "decode": a few queries, with the mask as a tensor."""

from __future__ import annotations

from torch import Tensor

from flexmasks.backends import decode_cpu, decode_gpu
from flexmasks.backends.call import TRANSFORMED, Call, Result, transformed

_MAX_QUERIES, _ANY_LENGTH_UP_TO = 64, 4
_KEYS_FOR_A_QUERY = 8  # with fewer keys for each query, other backends are as fast
_ON_GPU = ("cuda",)
_MAX_SCORES = {"cpu": 1 << 26, "cuda": 1 << 28}
_MAX_PAIRS_ON_GPU = 1 << 26  # of queries and keys; the kernels hold no scores, but what is added to scores


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    device = call.q.device.type
    if device not in _MAX_SCORES:
        return f"it does not run on {device}"
    if call.is_traced:
        return "torch.compile does not trace it"
    if call.whole is None:
        return "it takes a mask, not blocks"
    (batch, heads, q_len, _), kv_len = call.q.shape, call.k.shape[2]
    if not are_few(q_len, kv_len):
        return (
            f"it is for up to {_MAX_QUERIES} queries, which from {_ANY_LENGTH_UP_TO + 1} queries on have at least "
            f"{_KEYS_FOR_A_QUERY} times as many keys"
        )
    if device in _ON_GPU and batch * q_len * kv_len > _MAX_PAIRS_ON_GPU:
        return f"it takes at most {_MAX_PAIRS_ON_GPU:,} pairs of a query and a key"
    holds_scores = device not in _ON_GPU or call.score_mod is not None
    if holds_scores and batch * heads * q_len * kv_len > _MAX_SCORES[device]:
        return f"it computes at most {_MAX_SCORES[device]:,} scores"
    if call.needs_grad:
        return "it has no gradients"
    if transformed():
        return TRANSFORMED
    if call.kernel_options:
        return "it takes no kernel_options"
    return decode_gpu.refuses(call) if device in _ON_GPU else decode_cpu.refuses(call)


def are_few(q_len: int, kv_len: int) -> bool:
    """Return whether queries are so few that their whole mask is small."""
    return q_len <= _ANY_LENGTH_UP_TO or (q_len <= _MAX_QUERIES and kv_len >= _KEYS_FOR_A_QUERY * q_len)


def run(call: Call) -> Result:
    """Run the call."""
    replay = replay_of(call)
    return Result(*replay(call.q, call.k, call.v), replay)


def replay_of(
    call: Call, table: Tensor | None = None, page_size: int = 0
) -> decode_cpu.CpuDecode | decode_gpu.GpuDecode:
    """Return a call without q, k and v.

    With a page table, int [B, P], it is called with caches [n_pages, page_size, Hkv, D] in place of k and v.
    """
    if call.q.device.type in _ON_GPU:
        return decode_gpu.GpuDecode.of(call, table)
    return decode_cpu.CpuDecode.of(call, None if table is None else decode_cpu.Pages(table.detach(), page_size))
