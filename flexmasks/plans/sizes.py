"""Sizes of calls: where queries start, with functions of masks and scores for queries that start there, and blocks that
suit a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flexmasks.devices import nvidia_major
from flexmasks.spec.parameters import Size

Offset = int | Tensor


def shifted_mask(mask_mod: Callable[..., Tensor], offset: Offset) -> Callable[..., Tensor]:
    """The mask_mod with query i at position i + offset."""
    if isinstance(offset, int) and offset == 0:
        return mask_mod
    if isinstance(offset, int) or offset.ndim == 0:
        return lambda b, h, q, kv: mask_mod(b, h, q + offset, kv)
    return lambda b, h, q, kv: mask_mod(b, h, q + offset[b].type_as(q), kv)


def shifted_score(score_mod: Callable[..., Tensor], offset: Offset) -> Callable[..., Tensor]:
    """The score_mod with query i at position i + offset.

    Results of another dtype than the scores are float32, or float64 for scores in float64: kernels would take numbers
    of 64 bits, or of 16, for numbers of 32 bits.
    """
    changed = _in_dtype_of_scores(score_mod)
    if isinstance(offset, int) and offset == 0:
        return changed
    if isinstance(offset, int) or offset.ndim == 0:
        return lambda score, b, h, q, kv: changed(score, b, h, q + offset, kv)
    return lambda score, b, h, q, kv: changed(score, b, h, q + offset[b].type_as(q), kv)


def _in_dtype_of_scores(score_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        result = score_mod(score, b, h, q, kv)
        if not isinstance(result, Tensor):
            got = "None" if result is None else f"a {type(result).__name__}"
            raise TypeError(f"a score function must return a floating number for each score, got {got}.")
        if result.dtype == score.dtype or not result.dtype.is_floating_point:  # which the plan refuses
            return result
        return result.to(torch.float64 if score.dtype == torch.float64 else torch.float32)

    return changed


def starts_of(offset: Offset, count: int, device: torch.device) -> Tensor:
    """Where queries start for each of `count` batch elements, int64."""
    if isinstance(offset, Tensor):
        return offset.long()
    return torch.full((count,), offset, dtype=torch.int64, device=device)


def offset_of_last(lengths: Tensor, q_len: int | Tensor) -> Tensor:
    """Where the last queries of sequences start, 0 for sequences without keys.

    q_len: the number of queries, or of each sequence's queries.
    """
    if lengths.dtype not in (torch.int32, torch.int64):
        lengths = lengths.long()
    return (lengths - q_len).clamp(min=0)


BLOCK_SIZE = (128, 128)
_FLASH_BLOCK_SIZE = (256, 128)  # FLASH's kernels for compute capability 10 and 11 compute 256 queries at a time
_CPU_BLOCK_SIZES = ((1 << 10, 32), (1 << 15, 64))  # longest length, and the block size that is fastest up to it
MAX_POSITIONS = 1 << 31  # kernels count positions in 32 bits


def block_size_for(size: Size) -> tuple[int, int]:
    """Return the block size that suits the kernels of a call's device."""
    if size.runs_on_cpu:
        for length, n in _CPU_BLOCK_SIZES:
            if max(size.q_len, size.kv_len) <= length:
                return n, n
    elif nvidia_major(size.device) in (10, 11):
        return _FLASH_BLOCK_SIZE
    return BLOCK_SIZE


def size_of(q: Tensor, k: Tensor, sizes: tuple[int, ...] = (), ends_among_keys: bool = True) -> Size:
    """The sizes of a call; sizes: the batch size and number of heads, by default those of q."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads = sizes or q.shape[:2]
    approximate = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    return Size(
        batch, heads, q.shape[2], k.shape[2], q.device, dtype=dtype, approximate=approximate,
        ends_among_keys=ends_among_keys,
    )  # fmt: skip


def unread(size: Size, offset: Offset) -> Size:
    """The size without reading the offset; queries start among the keys.

    torch traces this function, and takes dataclasses.replace apart at each call.
    """
    if isinstance(offset, int):
        reached, at_most, starts = offset, size.at_most, None
    else:
        reached, at_most, starts = size.kv_len, ("S",), offset
    sizes = size.batch, size.heads, size.q_len, size.kv_len, size.device, reached, size.dtype, size.approximate
    return Size(*sizes, may_read=False, at_most=at_most, starts=starts)


def sized(size: Size, offset: Offset) -> Size:
    """Return the size with the largest offset in it.

    The values of an offset tensor are read. Raises ValueError for an offset that is negative or too large. A tensor's
    values are 0 or at most kv_len - q_len, so that no kernel needs a number of keys that is larger than theirs, and
    tables that are made without reading the values are long enough. If the size says that no values may be read, it is
    `unread`.
    """
    if not size.may_read:
        return unread(size, offset)
    least, most = (offset, offset) if isinstance(offset, int) else torch.stack(torch.aminmax(offset)).tolist()
    if least < 0:
        raise ValueError(f"flexmasks: `q_offset` must be at least 0, got values from {least} to {most}.")
    if most + size.q_len > MAX_POSITIONS:
        raise ValueError(
            f"flexmasks: `q_offset` must be at most 2**31 - {size.q_len} for {size.q_len} queries, got {most}."
        )
    is_ruled = isinstance(offset, Tensor) and size.ends_among_keys
    if is_ruled and most > 0 and most + size.q_len > size.kv_len:
        raise ValueError(
            "flexmasks: the values of a tensor `q_offset` must be 0 or at most KV - Q, the number of keys minus the "
            f"number of queries, {size.kv_len} - {size.q_len}, got {most}; a number may be larger."
        )
    return replace(size, q_offset=most, starts=offset if isinstance(offset, Tensor) else None)
