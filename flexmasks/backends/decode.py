"""Backend "decode": a few queries, with the mask as a tensor.

On a GPU, a mask that is a band is no tensor: the kernel gets its numbers.
"""

from __future__ import annotations

import torch

from flexmasks.backends import decode_cpu, decode_gpu
from flexmasks.backends.call import TRANSFORMED, Call, Result, transformed
from flexmasks.blocks.decide import dependence

_MAX_QUERIES, _MAX_QUERIES_ON_GPU = 64, 2048
_ANY_LENGTH_UP_TO = 4
_KEYS_FOR_A_QUERY = 8  # with fewer keys for each query, other backends are as fast
_ON_GPU = ("cuda",)
_MAX_SCORES, _MAX_SCORES_ON_GPU = 1 << 26, 1 << 28  # held at a time; on a GPU marks of visible keys count


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    device = call.q.device.type
    if device not in ("cpu", *_ON_GPU):
        return f"it does not run on {device}"
    if call.mask.is_given:
        return "it takes a mask, not blocks"
    if not are_few(call.q.shape[2], call.k.shape[2], call.q.device):
        return (
            f"it is for up to {_max_queries(call.q.device):,} queries, which from {_ANY_LENGTH_UP_TO + 1} queries on "
            f"have at least {_KEYS_FOR_A_QUERY} times as many keys"
        )
    most = _MAX_SCORES_ON_GPU if device in _ON_GPU else _MAX_SCORES
    if _scores_held(call, most) > most:
        return f"it holds at most {most:,} scores"
    if call.needs_grad:
        return "it has no gradients"
    if transformed():
        return TRANSFORMED
    if call.kernel_options:
        return "it takes no kernel_options"
    return decode_gpu.refuses(call) if device in _ON_GPU else decode_cpu.refuses(call)


def are_few(q_len: int, kv_len: int, device: torch.device) -> bool:
    """Return whether queries are so few that their whole mask is small."""
    return q_len <= _ANY_LENGTH_UP_TO or (q_len <= _max_queries(device) and kv_len >= _KEYS_FOR_A_QUERY * q_len)


def _max_queries(device: torch.device) -> int:
    return _MAX_QUERIES_ON_GPU if device.type in _ON_GPU else _MAX_QUERIES


def _scores_held(call: Call, most: int) -> int:
    """Return how many scores, or marks of visible keys, are in memory at a time. Up to `most` it is a bound."""
    (batch, heads, q_len, _), kv_len = call.q.shape, call.k.shape[2]
    adds = call.score is not None and call.cap is None
    if call.q.device.type in _ON_GPU and not adds and batch * heads * q_len * kv_len > most:
        if call.mask.intervals is not None:
            return 0
        batch, heads = dependence(call.mask.mod(), batch, heads, call.q.device, reads_values=False)
    return batch * heads * q_len * kv_len


def finds_last_queries(call: Call) -> bool:
    """Return whether the library's own kernels find the last queries of sequences by their lengths."""
    has_no_bias = call.score is None or call.cap is not None
    return has_no_bias and call.mask.intervals is not None


def plan(call: Call) -> str:
    """Say what takes the place of a plan of blocks, or "" if nothing does."""
    reads_numbers = call.q.device.type in _ON_GPU and call.mask.intervals is not None
    return "none: the kernel computes the keys of each query from the numbers of the mask" if reads_numbers else ""


def run(call: Call) -> Result:
    """Run the call."""
    replay = replay_of(call)
    return Result(*replay(call.q, *call.kv), replay)


def replay_of(call: Call) -> decode_cpu.CpuDecodeReplay | decode_gpu.GpuDecodeReplay:
    return decode_gpu.GpuDecodeReplay.of(call) if call.q.device.type in _ON_GPU else decode_cpu.CpuDecodeReplay.of(call)
