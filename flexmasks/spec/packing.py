"""Sequences laid end to end: a mask or a score change inside each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec.parameters import Size, bounded
from flexmasks.spec.registry import get_mask, get_score
from flexmasks.spec.values import Mask, Score


def packed(
    inner: str | Mask | Score | Callable[..., Tensor],
    offsets: Tensor | Sequence[int],
    kv_offsets: Tensor | Sequence[int] | None = None,
    q_start: int | Tensor | Sequence[int] = 0,
    **params: Any,
) -> Any:
    """The same mask (or Score) inside each of several sequences that are laid end to end; they do not see each other.

    Args:
        inner: a Mask, a mask's name, a mask function, or a Score. Inside, the batch index is the number of the
            sequence and positions start at 0.
        offsets: int[N + 1], where each of N sequences starts and the last ends (cu_seqlens of varlen attention);
            any total length. Tokens past the end are padding.
        kv_offsets: the same for the keys, where they are packed otherwise.
        q_start: the position of the first query of each sequence, int >= 0 or int[N], as `q_offset` is for a whole
            call; the first key is at 0. `kv_offsets.diff() - offsets.diff()` puts each last query at its last key,
            as FlashAttention's varlen attention does.
        **params: parameters of `inner`.

    Returns:
        A Mask, or a Score where `inner` is one.

    Example:
        >>> import flexmasks
        >>> flexmasks.dense_mask(flexmasks.packed("causal", [0, 1, 3]), 3)[0, 0].int()
        tensor([[1, 0, 0],
                [0, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    places: dict[str, Any] = {"offsets": offsets}
    if kv_offsets is not None:
        places["kv_offsets"] = kv_offsets
    if type(q_start) is not int or q_start != 0:
        places["q_start"] = q_start
    if isinstance(inner, Score):
        return get_score("packed", inner=get_score(inner, **params), **places)
    return get_mask("packed", inner=get_mask(inner, **params), **places)


def sequences(
    size: Size | None,
    *,
    inner: Any,
    offsets: Annotated[Tensor, "int[N] in 0..S"],
    kv_offsets: Annotated[Tensor | None, "int[M] in 0..S"] = None,
    q_start: Annotated[int | Tensor, "int in 0.. | int[L] in 0.."] = 0,
) -> dict[str, Any]:
    """Prepare a packed mask or score: the sequence of each query and key, and its position there.

    Queries past the last sequence are of sequence -1, keys of sequence -2.
    """
    if kv_offsets is None:
        kv_offsets = offsets
    elif len(kv_offsets) != len(offsets):
        raise ValueError(f"`offsets` has {len(offsets) - 1} sequences, `kv_offsets` has {len(kv_offsets) - 1}.")
    q_sequence, q_position = _unpack("offsets", offsets, None if size is None else size.positions_of_q, -1)
    q_position += q_start[q_sequence] * (q_sequence >= 0) if isinstance(q_start, Tensor) else q_start
    kv_sequence, kv_position = _unpack("kv_offsets", kv_offsets, None if size is None else size.kv_len, -2)
    last = 2**30 if isinstance(q_start, Tensor) else q_start + len(q_position)
    return {
        "inner": inner,
        "q_sequence": q_sequence,
        "q_position": bounded(q_position, 0, last),
        "kv_sequence": kv_sequence,
        "kv_position": bounded(kv_position, 0, len(kv_position)),
    }


def inside_sequences(
    size: Size, *, inner: Any, offsets: Tensor, kv_offsets: Tensor | None, q_start: int | Tensor
) -> Size:
    """The sizes that a mask or score inside packed sequences sees."""
    if not isinstance(inner, Mask | Score):
        raise ValueError(f"`inner` must be a Mask or a Score, as get_mask or get_score make them, got {inner!r}.")
    if offsets.numel() < 2:
        raise ValueError("`offsets` needs two values at least: 0 and the total length.")
    lengths = offsets.long().diff()
    if isinstance(q_start, Tensor) and len(q_start) != len(lengths):
        raise ValueError(f"`q_start` has {len(q_start)} values, `offsets` has {len(lengths)} sequences.")
    longest = int(lengths.max())
    kv_longest = longest if kv_offsets is None else int(kv_offsets.long().diff().max())
    reach = int((lengths + q_start).max())  # positions that queries reach, the largest of any sequence
    if not 0 <= reach <= 2**30:
        raise ValueError(f"positions may go up to 2**30, `q_start` and the lengths make {reach}.")
    return replace(size, batch=len(lengths), q_len=longest, kv_len=kv_longest, q_offset=reach - longest)


def _unpack(name: str, offsets: Tensor, length: int | None, rest: int) -> tuple[Tensor, Tensor]:
    offsets = offsets.long()
    lengths = offsets.diff()
    total = int(offsets[-1]) if length is None else length
    if int(offsets[0]) != 0 or int(offsets[-1]) > total or int(lengths.min()) < 0:
        raise ValueError(f"`{name}` must rise from 0 to at most the length {total}, got {_some(offsets)}.")
    sequence = torch.full((total,), rest, dtype=torch.int32, device=offsets.device)
    position = torch.zeros((total,), dtype=torch.int32, device=offsets.device)
    used = int(offsets[-1])
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=offsets.device)
    sequence[:used] = torch.repeat_interleave(numbers, lengths, output_size=used)
    position[:used] = torch.arange(used, device=offsets.device) - offsets[sequence[:used]]
    return sequence, position


def _some(values: Tensor) -> str:
    numbers = [str(n) for n in values[:6].tolist()]
    return ", ".join(numbers) + (", ..." if len(values) > 6 else "")
