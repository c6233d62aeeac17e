"""From a mask's function to what a softmax needs of it: of each row the first visible column, the end, and its holes.

Ranges decide blocks of one row by some columns, and only those they leave open are looked at element by element; see
flexmasks.blocks and flexmasks.ranges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from flexmasks import compat
from flexmasks.blocks.decide import decide
from flexmasks.blocks.elements import Elements, MaskMod, boolean, coordinates_of, over_indices
from flexmasks.cache import ENTRY, Cache
from flexmasks.plans.plan import naming, outside_transforms
from flexmasks.spec.arguments import from_arguments, functions_of, get_mask
from flexmasks.spec.captures import Opaque, capture
from flexmasks.spec.parameters import Size, can_be_read
from flexmasks.spec.values import Mask

_ROWS: Cache[Rows] = Cache("rows", max_bytes=1 << 29)
_WIDTH = 128  # columns of a block
_WORDS = _WIDTH // 32


class Rows(NamedTuple):
    """What each row of a mask sees. Dimensions of which the mask does not depend have size 1.

    bounds: int32 [B or 1, H or 1, Q or 1, 2], the first visible column and the end, the last one + 1; 0 and 0 where
        nothing is visible. None: everything is visible.
    bits: int32 [B or 1, H or 1, Q or 1, ceil(KV / 32)], column k in bit k % 32 of word k // 32; None where no row has
        hidden columns between visible ones.
    seen: in place of bits where a mask is `traced`, [B or 1, H or 1, Q or 1, KV], True = visible.
    """

    bounds: Tensor | None = None
    bits: Tensor | None = None
    seen: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self if t is not None)


def build(mask_mod: MaskMod, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> Rows:
    """What the rows of a mask see, exactly.

    Memory goes with q_len * kv_len / 64 bytes, for each batch element and head that the mask depends on.
    Raises ValueError or TypeError where the function is no mask.
    """
    decided = decide(mask_mod, batch, heads, q_len, kv_len, device, (1, _WIDTH))
    certain, possible = decided.certain, decided.possible
    n_blocks = -(-kv_len // _WIDTH)
    shape = certain.shape[:3]
    here = certain.device
    certain, possible = (t.expand(*shape, n_blocks).reshape(-1, n_blocks) for t in (certain, possible))
    coordinates = coordinates_of(torch.arange(len(certain), device=here), shape)  # of rows
    # of the blocks that are visible as a whole
    some = certain.any(1)
    marks = certain.to(torch.uint8)
    first = torch.where(some, marks.argmax(1) * _WIDTH, kv_len)
    end = torch.where(some, ((n_blocks - marks.flip(1).argmax(1)) * _WIDTH).clamp(max=kv_len), 0)
    count = certain.sum(1) * _WIDTH - certain[:, -1] * (n_blocks * _WIDTH - kv_len)
    del marks
    # and of the others
    row, block = (possible ^ certain).nonzero().unbind(1)
    elements = Elements(mask_mod, device, decided.widest)
    place, power = torch.arange(_WIDTH, device=here), torch.arange(32, dtype=torch.int32, device=here)
    words = []
    for part in torch.arange(len(row), device=here).split(elements.blocks_at_once(_WIDTH)):
        rows, starts = row[part], block[part, None] * _WIDTH
        b, h, q = coordinates[rows].unbind(1)
        column = starts + place
        seen = elements(b, h, q[:, None], column.clamp(max=kv_len - 1))[:, 0] & (column < kv_len)
        first.scatter_reduce_(0, rows, torch.where(seen, column, kv_len).amin(1), "amin")
        end.scatter_reduce_(0, rows, torch.where(seen, column + 1, 0).amax(1), "amax")
        count.index_add_(0, rows, seen.sum(1))
        words.append((seen.view(-1, _WORDS, 32).int() << power).sum(2, dtype=torch.int32))
    first = torch.minimum(first, end)
    is_full, has_holes = torch.stack([(count == kv_len).all(), (count != end - first).any()]).tolist()
    if is_full:
        return Rows()
    bits = None
    if has_holes:
        table = torch.where(certain[..., None], -1, 0).int().expand(-1, -1, _WORDS).contiguous()
        table[row, block] = torch.cat(words) if words else table[row, block]
        bits = table.view(*shape, -1)[..., : -(-kv_len // 32)].contiguous().to(device)
    return Rows(torch.stack([first, end], 1).int().view(*shape, 2).to(device), bits)


def _at_least_one(n: int) -> Any:
    if statically_known_true(n == 0):
        return 1
    return n if statically_known_true(n > 0) else torch.sym_max(n, 1)  # which torch 2.11 traces of symbols only


def traced(mask_mod: MaskMod, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> Rows:
    """What the rows of a mask see, by operations that do not depend on any value: those of a graph, or of torch.vmap.

    The mask is booleans here, of the dimensions on which it depends. Raises as `build` does.
    """
    sizes = batch, heads, q_len, kv_len
    indices = (torch.arange(_at_least_one(n), device=device) for n in sizes)  # vmap fails on no indices
    seen = boolean(over_indices(mask_mod)(*indices), 4)
    # vmap gives what does not depend on an index one element in memory for all of that index
    alone = [statically_known_true(seen.stride(dim) == 0) for dim in (0, 1, 2)]
    seen = seen[tuple(slice(0, 1 if a else n) for a, n in zip([*alone, False], sizes, strict=True))]
    if not statically_known_true(kv_len > 0):  # there is no first and last of no columns
        return Rows(seen=seen)
    column = torch.arange(kv_len, device=device)
    end = torch.where(seen, column + 1, 0).amax(-1)
    first = torch.minimum(torch.where(seen, column, kv_len).amin(-1), end)
    return Rows(bounds=torch.stack([first, end], -1).int(), seen=seen)


def rows_of(mask: Any, params: dict[str, Any], x: Tensor) -> Rows:
    """What each row of scores x [B, H, Q, KV] sees of a mask, given as in a call."""
    if torch.compiler.is_compiling():
        if not (isinstance(mask, str | Mask) or params):  # a function, whose signature cannot be read here
            return traced(mask, *_sizes(x))
        made = get_mask(mask, **params)
        return traced(made.bind(made.resolve(Size(*_sizes(x)))), *_sizes(x))
    tensors: list[Tensor] = []
    read: Hashable = functions_of("mask", mask)
    key: Hashable = None
    try:
        if params or not isinstance(read, str):  # else there is nothing to read
            read = capture((read, params), tensors)
        key = read, x.shape, x.device, torch.get_default_dtype()
    except Opaque:
        pass
    is_traced = compat.in_dispatch_mode() or x.is_meta or isinstance(x, compat.FakeTensor)
    is_traced = is_traced or not all(map(can_be_read, tensors))
    found = None if key is None or is_traced else _ROWS.get(key, tensors)
    if found is None:
        made = cast(Mask, from_arguments(mask, None, params)[0])
        if not is_traced and not x.numel():
            return Rows()
        on_fake = x.fake_mode if isinstance(x, compat.FakeTensor) else contextlib.nullcontext()
        with outside_transforms(tensors), naming(made), on_fake, torch.no_grad():
            mod = made.bind(made.resolve(Size(*_sizes(x))))
            found = (traced if is_traced else build)(mod, *_sizes(x))
        if key is not None and not is_traced:
            _ROWS.put(key, tensors, found, ENTRY + found.nbytes)
    return found


def _sizes(x: Tensor) -> tuple[int, int, int, int, torch.device]:
    batch, heads, q_len, kv_len = x.shape
    return batch, heads, q_len, kv_len, x.device
