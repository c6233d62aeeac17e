"""Tensors of pairs of a query and a key, as scaled_dot_product_attention takes them, as a Mask and a Score."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.cache import ENTRY, PLANS, Part
from flexmasks.context import autocast_dtype, is_capturing, is_traced_or_transformed
from flexmasks.spec.arguments import get_mask, get_score
from flexmasks.spec.parameters import can_be_read, describe, is_dense
from flexmasks.spec.values import Mask, Score

_BLOCK = 128
_LARGE = 0.25  # of a call's pairs: the share for which a large tensor has numbers of its own


class MaskAndScore(NamedTuple):
    """What `flexmasks.attention` takes in place of a tensor of pairs, with `q_offset=0`."""

    mask: Mask | None  # None: every key is visible
    score: Score | None  # None: nothing is added
    # The share of blocks of 128 x 128 with a visible pair, from 0.0 to 1.0; None if values were not read.
    visible_blocks: float | None = None


class _Look(NamedTuple):
    """What the values of a tensor say."""

    mask: Mask | None
    adds: bool  # to visible pairs
    averaged: Tensor | None  # bool [B or 1, H or 1, Q or 1, 1], if there are such rows, see `_visible`
    visible_blocks: float
    score: Score | None  # of a tensor that does not learn


@dataclass(slots=True)
class _Known:
    """What has been read of a tensor so far, for calls of some sizes."""

    least: float | None = None  # see `least_visible_blocks`
    look: _Look | None = None


_KNOWN: Part[_Known] = Part(PLANS, "tensors of pairs")
# By layout the last small table that was looked at: layers make equal ones, each of its own. They then share all plans.
_LATEST: Part[tuple[Tensor, _Look]] = Part(PLANS, "last tensors of pairs")
_MOST_COMPARED = 1 << 20  # bytes of a table, which a GPU compares in no more time than it takes to read a value


def mask_and_score(pairs: Tensor, sizes: Sequence[int], *, of_keys: bool = False) -> MaskAndScore:
    """Return what `flexmasks.attention` takes in place of a mask that is a tensor, exactly as SDPA reads it.

    A key is hidden where booleans are False, or where numbers that are added to the scores are -inf or near the lowest
    number of their dtype: at most half of it, as torch.finfo(dtype).min is. Rows of -inf and of False see nothing, and
    give 0. Inside torch.autocast numbers but float64 are cast to its dtype first, as SDPA casts them: `finfo.min` of
    float32 becomes -inf.

    A number near the lowest one hides a key only beside keys with usual numbers, because SDPA adds it like any other.
    In a row that has no usual number the softmax is over all keys that are not at -inf. With `finfo.min` in float32 and
    bfloat16 it is the average of their values, as rounding loses the scores; the gradients of such a row are as wrong
    as those of torch's fused kernels, which compute its weights from a sum that has lost the scores, too.

    The values are read once, and what they say is kept until the tensor, or the tensor that it is a view of, changes,
    also in place, or is freed. A tensor that shows all gives no mask, and a lower triangle from the first query and key
    on gives `causal`. Tensors that learn and those of inference mode are read at each call. Nothing is read while
    torch.compile, torch.func or a CUDA graph records the call: the result is as exact, but no block is known.

    Args:
        pairs: bool (True = visible) or floating (added to the scores, with a gradient if it learns), of any shape that
            broadcasts to [B, H, Q, KV], and of any strides.
        sizes: B, H (of queries), Q and KV of the call.
        of_keys: whether `pairs` is [B or 1, KV], the same for all heads and queries.

    Raises:
        TypeError: `pairs` is no dense tensor of booleans or floating numbers.
        ValueError: its shape does not fit.

    Example:
        >>> import torch
        >>> from flexmasks.extend import mask_and_score
        >>> pairs = torch.zeros(2, 1, 300, 300).masked_fill(torch.arange(300) > 255, -torch.inf)
        >>> mask, score, visible_blocks = mask_and_score(pairs, (2, 8, 300, 300))
        >>> mask.name, score, round(visible_blocks, 2)
        ('dense', None, 0.67)
        >>> mask_and_score(torch.ones(300, 300, dtype=torch.bool).tril(), (2, 8, 300, 300)).mask
        causal()
    """
    _check(pairs, sizes, of_keys)
    dtype = _dtype_of(pairs)
    if math.prod(sizes) == 0:
        return MaskAndScore(None, None)
    if is_traced_or_transformed() or not can_be_read(pairs) or is_capturing(pairs.device):
        table = _as_table(pairs, sizes, of_keys, dtype)
        visible, averaged = _visible(table)
        score = None if averaged is None else get_score("dense_bias", bias=_added(table, averaged))
        return MaskAndScore(_mask(visible, sizes), score)
    return cast(MaskAndScore, read_pairs(pairs, sizes, of_keys=of_keys))


def read_pairs(
    pairs: Tensor, sizes: Sequence[int], *, of_keys: bool = False, most: float | None = None
) -> MaskAndScore | None:
    """Return what `mask_and_score` does for a tensor that fits and can be read.

    most: the largest share of blocks with a visible pair that is of use, None for any. The result is None if a quick
        look tells that more have one, and for a large tensor of numbers that comes for the first time: reading it takes
        longer than a call, so that it pays for tensors that come again.
    """
    dtype, learns = _dtype_of(pairs), pairs.requires_grad
    base = compat.base(pairs)  # layers often make views anew of the tensor that they share
    owner = [pairs if base is None else base]
    layout = pairs.shape, pairs.stride(), pairs.storage_offset(), pairs.dtype
    key = layout, tuple(sizes), of_keys, dtype, learns
    known = _KNOWN.get(key, owner)
    if known is None:
        known = _Known()
        _KNOWN.put(key, owner, known, ENTRY)
        if most is not None and pairs.is_floating_point() and pairs.numel() > _LARGE * math.prod(sizes):
            return None
    if most is not None:
        if known.least is None:
            known.least = least_visible_blocks(pairs, sizes)
        if known.least > most:
            return None
    look = known.look
    if look is None:
        with torch.no_grad(), torch.inference_mode(False):
            look = known.look = _look(_as_table(pairs.detach(), sizes, of_keys, dtype), sizes, learns, key)
        made = 0 if look.averaged is None else 2 * look.averaged.nbytes
        _KNOWN.put(key, owner, known, ENTRY + made + (pairs.numel() if pairs.is_floating_point() else 0))
    score = look.score
    if look.adds and learns:
        score = get_score("dense_bias", bias=_added(_as_table(pairs, sizes, of_keys, dtype), look.averaged))
    return MaskAndScore(look.mask, score, look.visible_blocks)


def least_visible_blocks(pairs: Tensor, sizes: Sequence[int]) -> float:
    """Return a number below `visible_blocks`, or equal to it, by one query of each block: a hundredth of the work.

    It is 0.0 for a tensor that may show all or be causal, and adds nothing, and where one query stands for all.
    """
    with torch.no_grad(), torch.inference_mode(False):  # tensors of inference mode have no versions
        return _share_of_some(_as_table(pairs.detach(), sizes, False, pairs.dtype)[:, :, ::_BLOCK])


def _share_of_some(rows: Tensor) -> float:
    """The share of blocks of keys that the first query of each block sees, of rows [B, H, Q / 128, KV]."""
    if rows.shape[2] == 1:
        return 0.0
    adds, visible = rows.new_zeros((), dtype=torch.bool), rows
    if rows.dtype != torch.bool:
        visible = ~(rows <= torch.finfo(rows.dtype).min / 2)
        adds = ((rows != 0) & visible).any()
    first = torch.arange(rows.shape[2], device=rows.device)[:, None] * _BLOCK
    is_causal = (visible == (first >= torch.arange(rows.shape[3], device=rows.device))).all()
    share = _any_in_blocks(visible, 3).float().mean()
    return float(torch.where((visible.all() | is_causal) & ~adds, 0.0, share))


def _dtype_of(pairs: Tensor) -> torch.dtype:
    """The dtype in which SDPA reads a tensor."""
    keeps = pairs.dtype in (torch.bool, torch.float64)
    return pairs.dtype if keeps else autocast_dtype(pairs.device) or pairs.dtype


def _check(pairs: Any, sizes: Sequence[int], of_keys: bool) -> None:
    is_pairs = isinstance(pairs, Tensor) and is_dense(pairs)
    if not is_pairs or not (pairs.dtype == torch.bool or pairs.is_floating_point()):
        raise TypeError(
            "flexmasks: a mask that is a tensor must be bool, True for visible keys, or floating, added to the scores, "
            f"got {describe(pairs)}; pass `mask.bool()` where 1 is a visible key."
        )
    batch, heads, q_len, kv_len = sizes
    want = [batch, kv_len] if of_keys else [batch, heads, q_len, kv_len]
    shape = list(pairs.shape)
    fits = len(shape) == 2 if of_keys else len(shape) <= 4
    if not fits or any(n not in (1, m) for n, m in zip(shape[::-1], want[::-1], strict=False)):
        raise ValueError(
            f"flexmasks: a mask that is a tensor must broadcast to {want} ({'keys' if of_keys else 'B, H, Q, KV'} of "
            f"the call), got {shape}."
        )


def _as_table(pairs: Tensor, sizes: Sequence[int], of_keys: bool, dtype: torch.dtype) -> Tensor:
    """The tensor as [B or 1, H or 1, Q or 1, KV], as a view if it has this dtype already."""
    table = pairs[:, None, None] if of_keys else pairs.expand(*(1,) * (4 - pairs.ndim), *pairs.shape)
    if table.shape[3] != sizes[3]:
        table = table.expand(-1, -1, -1, sizes[3])
    return table.to(dtype)


def _visible(table: Tensor) -> tuple[Tensor, Tensor | None]:
    """Which pairs a table shows, and which of its rows finite numbers alone would hide, if it is of numbers."""
    if table.dtype == torch.bool:
        return table, None
    lowest = torch.finfo(table.dtype).min
    greatest = table.detach().amax(-1, keepdim=True)
    averaged = (greatest <= lowest / 4) & (greatest > -math.inf)
    return torch.where(averaged, table > -math.inf, ~(table <= lowest / 2)), averaged


def _added(table: Tensor, averaged: Tensor | None) -> Tensor:
    """What is added to scores. Kernels multiply scores by log2(e), so numbers near the lowest one, which differ by much
    or not at all, are divided by 4, with the gradient that they have.
    """
    if averaged is None or table.dtype == torch.float16:  # float16 has no such numbers in float32
        return table
    return table - torch.where(averaged & (table > -math.inf), table.detach() * 0.75, 0)


def _mask(visible: Tensor, sizes: Sequence[int]) -> Mask:
    if visible.shape[1] == visible.shape[2] == 1 and visible.shape[0] == sizes[0]:
        return get_mask("key_padding", attention_mask=visible[:, 0, 0])
    return get_mask("dense", visible=visible)


def _look(table: Tensor, sizes: Sequence[int], learns: bool, key: Hashable) -> _Look:
    """Look at a table, unless the last one of this layout had equal values."""
    if learns:
        return _looked(table, sizes, learns)
    for dim in range(3):
        table = table.narrow(dim, 0, 1) if table.stride(dim) == 0 else table
    if table.nbytes > _MOST_COMPARED:
        return _looked(table, sizes, learns)
    key = key, table.device
    latest = _LATEST.get(key)
    if latest is not None and torch.equal(latest[0], table):
        return latest[1]
    own = table.clone()
    look = _looked(own, sizes, learns)
    _LATEST.put(key, [], (own, look), ENTRY + 3 * own.nbytes)
    return look


def _looked(table: Tensor, sizes: Sequence[int], learns: bool) -> _Look:
    visible, averaged = _visible(table)
    q_len, kv_len = sizes[2:]
    no, is_causal = visible.new_zeros(()), visible.new_zeros(())
    if visible.shape[2] == q_len > 1:
        is_causal = (visible == visible.new_ones(q_len, kv_len).tril()).all()
    adds = no if averaged is None else ((table != 0) & visible).any()
    has_averaged = no if averaged is None else averaged.any()
    share = _any_in_blocks(_any_in_blocks(visible, 3), 2).float().mean()
    facts = [visible.all().float(), is_causal.float(), adds.float(), has_averaged.float(), share]
    shows_all, is_causal, adds, has_averaged, share_of_blocks = torch.stack(facts).tolist()  # one wait for a GPU
    averaged = averaged if has_averaged else None
    mask = None if shows_all else get_mask("causal") if is_causal else _mask(visible, sizes)
    score = get_score("dense_bias", bias=_added(table, averaged)) if adds and not learns else None
    return _Look(mask, bool(adds), averaged, share_of_blocks, score)


def _any_in_blocks(visible: Tensor, dim: int) -> Tensor:
    """Whether blocks of queries, dimension 2, or of keys, 3, have a visible one. One that stands for all is its own."""
    if visible.shape[dim] <= 1:
        return visible
    missing = -visible.shape[dim] % _BLOCK
    visible = torch.nn.functional.pad(visible, (0, missing) if dim == 3 else (0, 0, 0, missing))
    blocks: Tensor = visible.unflatten(dim, (-1, _BLOCK))
    return blocks.any(dim + 1)
