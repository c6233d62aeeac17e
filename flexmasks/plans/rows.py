"""Rows: the columns that each row of scores sees under a mask: the first one, the end, and the holes between.

The masked softmax reads rows. Ranges decide blocks of one row by 128 columns, and only the blocks that they leave
undecided are looked at element by element; see flexmasks.blocks and flexmasks.ranges. Rows are cached by the values
of parameters and the identity of tensors, see flexmasks.cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.decide import Axis, decide
from flexmasks.blocks.elements import Elements, MaskMod, boolean, coordinates_of, over_indices
from flexmasks.cache import ENTRY, PLANS, Part, bytes_of
from flexmasks.kernels.operators import positions
from flexmasks.plans.alignment import aligned, are_equal, may_differ, of_word, unsaid
from flexmasks.plans.checks import check_offset
from flexmasks.plans.naming import naming
from flexmasks.plans.plan import outside_transforms
from flexmasks.plans.sizes import Offset, shifted_mask, sized, unread
from flexmasks.spec.arguments import from_arguments, functions_of, get_mask
from flexmasks.spec.parameters import Size, can_be_read
from flexmasks.spec.structure import Opaque, key_of
from flexmasks.spec.values import Mask

_CALL = "flexmasks.masked_softmax"
_BLOCK_COLUMNS = 128
_BLOCK_WORDS = _BLOCK_COLUMNS // 32


class Rows(NamedTuple):
    """The visible columns of each row of a mask.

    Dimensions on which the mask does not depend have size 1.

    bounds: int32 [B or 1, H or 1, Q or 1, 2], the first visible column and the end, which is the last one + 1; 0 and 0
        where nothing is visible. None: everything is visible.
    bits: int32 [B or 1, H or 1, Q or 1, ceil(KV / 32)], column k in bit k % 32 of word k // 32; None where no row has
        hidden columns between visible ones.
    seen: in place of bits where a mask is traced, [B or 1, H or 1, Q or 1, KV], True = visible.
    """

    bounds: Tensor | None = None
    bits: Tensor | None = None
    seen: Tensor | None = None


_ROWS: Part[Rows] = Part(PLANS, "rows")


def rows_of(mask: Any, params: dict[str, Any], x: Tensor, q_offset: Any) -> Rows:
    """The cached or new rows for scores x [B, H, Q, KV] of a mask that a user passes to a call."""
    if isinstance(q_offset, str):
        q_offset = of_word(_CALL, q_offset, x.shape[2], x.shape[3])
    elif q_offset is not None:
        check_offset(_CALL, q_offset, x.shape[0], x.device)
    if compat.is_compiling():
        return _compiled_rows(mask, params, x, q_offset)
    tensors = [q_offset] if isinstance(q_offset, Tensor) else []
    key = _cache_key(mask, params, x, q_offset, tensors)
    is_fake = isinstance(x, compat.FakeTensor)
    is_traced = compat.in_dispatch_mode() or x.is_meta or is_fake or not all(map(can_be_read, tensors))
    rows = None if key is None or is_traced else _ROWS.get(key, tensors)
    if rows is None:
        value = cast(Mask, from_arguments(mask, None, params)[0])
        if not is_traced and not x.numel():
            return Rows()
        fake_mode = x.fake_mode if isinstance(x, compat.FakeTensor) else contextlib.nullcontext()
        with outside_transforms(tensors), naming(value), fake_mode, torch.no_grad():
            offset = aligned(_CALL, q_offset, Size(*_sizes(x)), [value])
            mask_mod = shifted_mask(value._bind(value._resolve(_size(x, offset, bool(is_traced)))), offset)
            rows = (trace if is_traced else build)(mask_mod, *_sizes(x))
        if key is not None and not is_traced:
            _ROWS.put(key, tensors, rows, ENTRY + bytes_of(rows))
    return rows


def _compiled_rows(mask: Any, params: dict[str, Any], x: Tensor, q_offset: Any) -> Rows:
    """The rows inside torch.compile, as operations of the user's graph."""
    offset, mask_mod = 0 if q_offset is None else q_offset, mask
    if isinstance(mask, str | Mask) or params:  # else a function, whose signature cannot be read here
        value = get_mask(mask, **params)
        mask_mod = value._bind(value._resolve(_size(x, offset, is_traced=True)))
    is_said = q_offset is not None or are_equal(x.shape[2], x.shape[3])
    return trace(shifted_mask(mask_mod, offset), *_sizes(x), is_said=is_said)


def _size(x: Tensor, offset: Offset, is_traced: bool) -> Size:
    return unread(Size(*_sizes(x)), offset) if is_traced else sized(Size(*_sizes(x)), offset)


def _cache_key(mask: Any, params: dict[str, Any], x: Tensor, q_offset: Any, tensors: list[Tensor]) -> Hashable:
    """The cache key of a mask for scores, or None. The mask's tensors are appended to `tensors`."""
    definition: Hashable = functions_of("mask", mask)
    try:
        if params or not isinstance(definition, str):  # a name without parameters captures nothing
            definition = key_of((definition, params) if params else definition, tensors)
    except Opaque:
        return None
    offset = "tensor" if isinstance(q_offset, Tensor) else q_offset
    return definition, x.shape, x.device, offset, torch.get_default_dtype()


def _sizes(x: Tensor) -> tuple[int, int, int, int, torch.device]:
    batch, heads, q_len, kv_len = x.shape
    return batch, heads, q_len, kv_len, x.device


def build(mask_mod: MaskMod, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> Rows:
    """The rows of a mask, computed exactly. Raises ValueError or TypeError where the function is no mask.

    This takes q_len * kv_len / 64 bytes of memory for each batch element and head that the mask depends on.
    """
    columns = Axis(kv_len, _BLOCK_COLUMNS)
    decided = decide(mask_mod, batch, heads, Axis(q_len, 1), columns, device)
    certain, possible, n_blocks = decided.certain, decided.possible, columns.count
    shape = certain.shape[:3]
    here = certain.device
    certain, possible = (t.expand(*shape, n_blocks).reshape(-1, n_blocks) for t in (certain, possible))
    coordinates = coordinates_of(torch.arange(len(certain), device=here), shape)  # indices of each row
    first, end, count = _limits_of_full_blocks(certain, kv_len)
    row, block = (possible ^ certain).nonzero().unbind(1)  # indices of each undecided block
    elements = Elements(mask_mod, device, decided.widest)
    place, power = torch.arange(_BLOCK_COLUMNS, device=here), torch.arange(32, dtype=torch.int32, device=here)
    words = []
    for part in torch.arange(len(row), device=here).split(elements.blocks_at_once(_BLOCK_COLUMNS)):
        rows, starts = row[part], block[part, None] * _BLOCK_COLUMNS
        b, h, q = coordinates[rows].unbind(1)
        column = starts + place
        seen = elements(b, h, q[:, None], column.clamp(max=kv_len - 1))[:, 0] & (column < kv_len)
        first.scatter_reduce_(0, rows, torch.where(seen, column, kv_len).amin(1), "amin")
        end.scatter_reduce_(0, rows, torch.where(seen, column + 1, 0).amax(1), "amax")
        count.index_add_(0, rows, seen.sum(1))
        words.append((seen.view(-1, _BLOCK_WORDS, 32).int() << power).sum(2, dtype=torch.int32))
    first = torch.minimum(first, end)
    is_full, has_holes = torch.stack([(count == kv_len).all(), (count != end - first).any()]).tolist()
    if is_full:
        return Rows()
    bits = None
    if has_holes:
        table = torch.where(certain[..., None], -1, 0).int().expand(-1, -1, _BLOCK_WORDS).contiguous()
        table[row, block] = torch.cat(words) if words else table[row, block]
        bits = table.view(*shape, -1)[..., : -(-kv_len // 32)].contiguous().to(device)
    return Rows(torch.stack([first, end], 1).int().view(*shape, 2).to(device), bits)


def _limits_of_full_blocks(certain: Tensor, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """First column, end and number of columns of the full blocks in each row; kv_len, 0 and 0 without a full block."""
    n_blocks = certain.shape[1]
    has_some = certain.any(1)
    marks = certain.to(torch.uint8)
    first = torch.where(has_some, marks.argmax(1) * _BLOCK_COLUMNS, kv_len)
    end = torch.where(has_some, ((n_blocks - marks.flip(1).argmax(1)) * _BLOCK_COLUMNS).clamp(max=kv_len), 0)
    count = certain.sum(1) * _BLOCK_COLUMNS - certain[:, -1] * (n_blocks * _BLOCK_COLUMNS - kv_len)
    return first, end, count


def trace(
    mask_mod: MaskMod, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device, is_said: bool = True
) -> Rows:
    """The rows of a mask by operations that read no value, as graphs and torch.vmap need. Raises as `build` does.

    is_said: whether the caller says where rows start, or needs not say it.
    """
    sizes = batch, heads, q_len, kv_len
    indices = (positions(_at_least_one(n), device) for n in sizes)  # vmap fails on empty indices
    seen = boolean(over_indices(mask_mod)(*indices), 4)
    # Where the mask does not depend on an index, vmap's result has one element in memory for all of that index.
    independent = [compat.statically_known_true(seen.stride(dim) == 0) for dim in (0, 1, 2)]
    if not (is_said or independent[2]) and may_differ(q_len, kv_len):
        unsaid(_CALL, q_len, kv_len)
    seen = seen[tuple(slice(0, 1 if is_same else n) for is_same, n in zip([*independent, False], sizes, strict=True))]
    if not compat.statically_known_true(kv_len > 0):  # without columns there is no first and no last one
        return Rows(seen=seen)
    column = torch.arange(kv_len, device=device)
    end = torch.where(seen, column + 1, 0).amax(-1)
    first = torch.minimum(torch.where(seen, column, kv_len).amin(-1), end)
    return Rows(bounds=torch.stack([first, end], -1).int(), seen=seen)


def _at_least_one(n: int) -> Any:
    if compat.statically_known_true(n == 0):
        return 1
    return n if compat.statically_known_true(n > 0) else torch.sym_max(n, 1)
