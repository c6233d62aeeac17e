"""From a mask's function to torch's BlockMask: ranges first, element by element only where they leave it open."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined] # public, and not listed

from flexmasks.ranges import GiveUp, Range, Steps, TooLarge, TooWide, evaluate
from flexmasks.ranges.value import broadcast_shape

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_Mod = TypeVar("_Mod", bound=Callable[..., Tensor])
_CHUNK = (1 << 23, 1 << 19)  # elements evaluated at once: on a GPU, and on a CPU, where they should stay in its cache
_WIDE = 1 << 25  # the same, counting what tensors have that the function sees
_BLOCKS = 1 << 25  # blocks decided at once
_SMALL = 1 << 15  # up to so many blocks of a GPU are decided on the CPU, which starts an operation sooner
_PARTS = 8  # along an axis of a block
_SPREAD = 45
_LONGEST = 1 << 31  # indices stay below
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """Where the blocks of a mask are: the eight index tensors of a BlockMask, and what it took to find them.

    It holds no tensor of the user's: `block_mask` puts the function back.
    """

    q_len: int
    kv_len: int
    block_size: tuple[int, int]
    indices: tuple[Tensor, ...]  # in BlockMask's order: kv, full_kv, q, full_q, each (counts, indices)
    undecided: int  # blocks looked at element by element
    not_understood: tuple[str, ...]

    def block_mask(self, mask_mod: MaskMod) -> BlockMask:
        """The BlockMask of these blocks and that function."""
        lengths: Any = (self.q_len, self.kv_len)
        return BlockMask(*(lengths, *self.indices, self.block_size, mask_mod))


class _ScalarIndexing(TorchFunctionMode):
    """Under vmap, `tensor[i]` with a number `i` would read its value; as an index operation it does not."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in index) and all(
                isinstance(i, Tensor) or type(i) is int for i in index
            ):
                device = tensor.device
                whole = [i if isinstance(i, Tensor) else torch.tensor(i, device=device) for i in index]
                return torch.ops.aten.index(tensor, whole)
        return func(*args, **(kwargs or {}))


def over_indices(mod: _Mod, prefix: tuple[int, ...] = ()) -> Callable[..., Tensor]:
    """A mask_mod (or, with prefix (0,), a score_mod) of numbers as one of index vectors b, h, q, kv.

    The result is [b, h, q, kv]. To the function its arguments stay numbers, as in torch's own create_mask.
    """
    function: Callable[..., Tensor] = mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=prefix + dims)

    def evaluated(*args: Tensor) -> Tensor:
        with _ScalarIndexing():
            return function(*args)

    return evaluated


def _dependence_by_vmap(mask_mod: MaskMod, batch: int, heads: int, device: torch.device) -> tuple[int, int]:
    """vmap gives a result that does not depend on an index one element in memory for all of that index."""
    sizes = []
    for n, in_dims in ((batch, (0, None, None, None)), (heads, (None, 0, None, None))):
        indices = (torch.zeros(() if d is None else n, dtype=torch.int64, device=device) for d in in_dims)
        with _ScalarIndexing():
            seen = torch.vmap(mask_mod, in_dims=in_dims)(*indices)
        sizes.append(1 if n == 1 or boolean(seen, 1).stride(0) == 0 else n)
    return sizes[0], sizes[1]


def dependence(mask_mod: MaskMod, batch: int, heads: int, device: torch.device) -> tuple[int, int]:
    """The batch and head size of a mask, 1 where its function does not depend on the index.

    Raises ValueError or TypeError where the function is no mask.
    """
    found = _evaluate(mask_mod, batch, heads, _Line(1, 1), _Line(1, 1), device, device)
    if isinstance(found, str):
        return _dependence_by_vmap(mask_mod, batch, heads, device)
    return found.certain.shape[0], found.certain.shape[1]


def dense(mask_mod: MaskMod, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """The mask as booleans, [batch or 1, heads or 1, q_len, kv_len]."""
    batch, heads = dependence(mask_mod, batch, heads, device)
    indices = (torch.arange(n, device=device) for n in (batch, heads, q_len, kv_len))
    return boolean(over_indices(mask_mod)(*indices), 4)


def build(
    mask_mod: MaskMod,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    block_size: tuple[int, int] = (128, 128),
) -> Layout:
    """Find a mask's empty, partial and full blocks, exactly those of torch's create_block_mask.

    Raises ValueError or TypeError where the function is no mask.
    """
    rows, columns = _Line(q_len, block_size[0]), _Line(kv_len, block_size[1])
    decided = decide(mask_mod, batch, heads, q_len, kv_len, device, block_size)
    certain, possible = decided.certain, decided.possible
    shape = (*certain.shape[:2], rows.count, columns.count)
    if math.prod(shape) > 4 * _SMALL:
        certain, possible = certain.to(device), possible.to(device)
    undecided = _flat_nonzero((possible ^ certain).contiguous())
    lists = torch.ones(4 * math.prod(shape), dtype=torch.int32, device=certain.device)  # while the next is prepared
    some = all_ = certain
    if len(undecided):
        some, all_ = (certain.clone(memory_format=torch.contiguous_format) for _ in range(2))
        elements = Elements(mask_mod, device, decided.widest)
        for part in undecided.split(_CHUNK[certain.device.type == "cpu"] // 2):
            coordinates = coordinates_of(part, certain.shape)
            some.view(-1)[part], all_.view(-1)[part] = _look_at(elements, coordinates, rows, columns)
    marked = torch.empty((2, *shape), dtype=torch.bool, device=certain.device)
    partial, full = marked
    full.copy_(all_)
    if q_len % block_size[0]:  # a block that the edge cuts is partial, as torch has it: past it all is hidden
        full[..., -1, :] = False
    if kv_len % block_size[1]:
        full[..., -1] = False
    torch.bitwise_xor(some.expand(shape), full, out=partial)
    del certain, possible, some, all_
    return Layout(
        q_len=q_len,
        kv_len=kv_len,
        block_size=block_size,
        indices=tuple(t.to(device) for t in _ordered(marked, lists)),
        undecided=len(undecided),
        not_understood=decided.not_understood,
    )


class Decided(NamedTuple):
    """What ranges show of blocks: booleans [B, H, rows, columns], of size 1 where the mask does not depend on it."""

    certain: Tensor  # whether all of a block is visible
    possible: Tensor  # whether any is
    not_understood: tuple[str, ...]  # operations, or why ranges gave up
    widest: int  # the most elements that a tensor had which the function saw


def decide(
    mask_mod: MaskMod,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    block_size: tuple[int, int],
) -> Decided:
    """What ranges show of each block. Few blocks of a GPU are decided, and left, on the CPU.

    Raises ValueError or TypeError where the function is no mask.
    """
    rows, columns = _Line(q_len, block_size[0]), _Line(kv_len, block_size[1])
    small = rows.count * columns.count <= _SMALL
    own = batch, heads
    if batch * heads > 1 and batch * heads * rows.count * columns.count > _BLOCKS:
        own = dependence(mask_mod, batch, heads, device)
    try:
        return _decide(mask_mod, own, rows, columns, device, _CPU if small else device)
    except TooLarge:
        return _decide(mask_mod, own, rows, columns, device, device)


def of_block_mask(block_mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Which blocks of a BlockMask are partial, and which are full: booleans [B, H, query blocks, key blocks]."""
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return partial, torch.zeros_like(partial)
    return partial, _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)


def in_use(counts: Tensor, indices: Tensor) -> Tensor:
    """Which entries of a BlockMask's lists stand for blocks: the first `counts` of each."""
    return torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    columns = indices.shape[-1]
    listed = in_use(counts, indices)
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    table.scatter_(-1, torch.where(listed, indices, columns).long(), True)
    return table[..., :columns]


@dataclass(frozen=True)
class _Line:
    """The blocks of one axis: positions `first`..`length` - 1 in blocks of `size`, the last perhaps cut."""

    length: int
    size: int
    first: int = 0

    @property
    def count(self) -> int:
        return -(-(self.length - self.first) // self.size)

    def part(self, start: int, count: int) -> _Line:
        """Blocks start..start + count - 1."""
        return _Line(min(self.length, (start + count) * self.size), self.size, start * self.size)

    def places(self, block: Tensor) -> Tensor:
        """Some positions of each block, its first and last among them; the last again for those past the edge."""
        count = min(_PARTS, self.size)
        spread = torch.arange(count, device=block.device) * (self.size - 1) // max(1, count - 1)
        return (block[:, None] * self.size + spread).clamp(max=self.length - 1)

    def part_of(self, block: Tensor, part: Tensor) -> Tensor:
        """The positions of a part of each block; the last again for those past the end of the block or the edge."""
        size = -(-self.size // _PARTS)
        places = part[:, None] * size + torch.arange(size, device=block.device)
        return (block[:, None] * self.size + places.clamp(max=self.size - 1)).clamp(max=self.length - 1)

    def range(self, dim: int, device: torch.device) -> Range:
        """The positions of each block, along a dimension of all blocks."""
        lo = torch.arange(self.first, self.length, self.size, dtype=torch.float64, device=device)
        hi = (lo + (self.size - 1)).clamp(max=self.length - 1)
        steps = Steps(self.first, self.size, self.length, dim)
        shape = [-1 if n == dim else 1 for n in range(4)]
        return Range.of_indices(lo.view(shape), hi.view(shape), self.length - 1, steps)


def _decide(
    mask_mod: MaskMod,
    own: tuple[int, int],
    rows: _Line,
    columns: _Line,
    device: torch.device,
    here: torch.device,
    width: int = 1,
) -> Decided:
    """What ranges show of each block: [B, H, rows, columns], where B and H are at most `own`.

    A dimension on which the mask does not depend has size 1. Decided on `here`, a slice of the rows at a time, which
    are the fewer the wider the tensors that the function makes. Raises TooLarge where that is not the place for it.
    """
    step = max(1, _BLOCKS // (own[0] * own[1] * columns.count * width))
    parts: list[Decided] = []
    for start in range(0, rows.count, step):
        part = rows.part(start, min(step, rows.count - start))
        most = max(width, _BLOCKS // (own[0] * own[1] * columns.count * part.count)) if step > 1 else math.inf
        try:
            found = _evaluate(mask_mod, *own, part, columns, device, here, most)
        except TooWide as error:
            return _decide(mask_mod, own, rows, columns, device, here, error.width)
        if isinstance(found, str):
            batch, heads = _dependence_by_vmap(mask_mod, *own, device)
            certain = torch.zeros((batch, heads, rows.count, columns.count), dtype=torch.bool, device=here)
            return Decided(certain, ~certain, (found,), 1)
        parts.append(found)
        if found.certain.shape[2] == 1 < part.count:  # the same for all rows
            break
    if len(parts) == 1:
        return parts[0]
    certain, possible = torch.cat([p.certain for p in parts], 2), torch.cat([p.possible for p in parts], 2)
    return parts[0]._replace(certain=certain, possible=possible)


def _evaluate(
    mask_mod: MaskMod,
    batch: int,
    heads: int,
    rows: _Line,
    columns: _Line,
    device: torch.device,
    here: torch.device,
    widest: float = math.inf,
) -> Decided | str:
    """What ranges show of each block; or why they show nothing."""
    b = torch.arange(batch, device=here).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=here).view(1, -1, 1, 1)
    indices = Range.of_indices(b, b, batch - 1), Range.of_indices(h, h, heads - 1)
    try:
        found = evaluate(mask_mod, *indices, rows.range(2, here), columns.range(3, here), device, widest)
    except GiveUp as reason:
        return str(reason)
    lo, hi = found.truth.lo, found.truth.hi
    shape = broadcast_shape(lo, hi)
    shape = (*(1,) * (4 - len(shape)), *shape)
    return Decided(lo.to(here).expand(shape), hi.to(here).expand(shape), found.not_understood, found.widest)


def _look_at(elements: Elements, blocks: Tensor, rows: _Line, columns: _Line) -> tuple[Tensor, Tensor]:
    """Whether some, and whether all elements are visible of blocks given as [n, (b, h, row, column)].

    Most show that they are partial in 8 x 8 places, and most others, with patterns finer than these, at pairs that have
    each query and each key once. The rest are cut in 8 x 8 parts; what ranges leave open of these is looked at element
    by element, the first such part of each block before all others.
    """
    some, all_ = _seen_at(elements, blocks, rows.places(blocks[:, 2]), columns.places(blocks[:, 3]))
    left = (some == all_).nonzero()[:, 0]
    if not len(left) or max(rows.size, columns.size) <= _PARTS:
        return some, all_
    some_of_pairs, all_of_pairs = _seen_at_pairs(elements, blocks[left], rows, columns)
    some[left] |= some_of_pairs
    all_[left] &= all_of_pairs
    left = left[some[left] == all_[left]]
    for chunk in left.split(elements.at_once(16 * _PARTS**2)) if len(left) else ():
        certain, possible = elements.ranges(blocks[chunk], rows, columns)
        some[chunk] |= certain.flatten(1).any(1)
        all_[chunk] &= possible.flatten(1).all(1)
        parts = (possible & ~certain).nonzero()
        is_first = torch.ones(len(parts), dtype=torch.bool, device=parts.device)
        torch.ne(parts[1:, 0], parts[:-1, 0], out=is_first[1:])
        for todo in (parts[is_first], parts[~is_first]):
            of = chunk[todo[:, 0]]
            unresolved = some[of] == all_[of]
            of, todo = of[unresolved], todo[unresolved]
            q, kv = rows.part_of(blocks[of, 2], todo[:, 1]), columns.part_of(blocks[of, 3], todo[:, 2])
            some_of_part, all_of_part = _seen_at(elements, blocks[of], q, kv)
            some[of[some_of_part]] = True
            all_[of[~all_of_part]] = False
    return some, all_


def _seen_at(elements: Elements, blocks: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Whether some, and whether all are visible of the places q [n, queries] and kv [n, keys] of each block."""
    found = []
    for chunk in torch.arange(len(blocks), device=blocks.device).split(elements.at_once(q.shape[1] * kv.shape[1])):
        whole = len(chunk) == len(blocks)
        b, h, at_q, at_kv = (x if whole else x[chunk] for x in (blocks[:, 0], blocks[:, 1], q, kv))
        seen = elements(b, h, at_q, at_kv).flatten(1)
        found.append((seen.any(1), seen.all(1)))
    return found[0] if len(found) == 1 else (torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found]))


def _seen_at_pairs(elements: Elements, blocks: Tensor, rows: _Line, columns: _Line) -> tuple[Tensor, Tensor]:
    """Whether some, and whether all are visible of pairs of each block, spread over all of its queries and keys."""
    count = min(256, max(rows.size, columns.size))
    n = torch.arange(count, device=blocks.device)
    at_q = n * _SPREAD % count * rows.size // count  # an odd factor shuffles what are mostly powers of two
    at_kv = n * columns.size // count
    found = []
    for chunk in blocks.split(elements.at_once(count)):
        q = (chunk[:, 2, None] * rows.size + at_q).clamp(max=rows.length - 1)
        kv = (chunk[:, 3, None] * columns.size + at_kv).clamp(max=columns.length - 1)
        b, h = (chunk[:, d].repeat_interleave(count) for d in (0, 1))
        seen = elements(b, h, q.view(-1, 1), kv.view(-1, 1)).view(len(chunk), count)
        found.append((seen.any(1), seen.all(1)))
    return torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found])


class Elements:
    """A mask at the elements of n blocks: b, h [n], q [n, queries] and kv [n, keys] give booleans [n, queries, keys].

    Ranges of one element each give them for most functions, and start faster than vmap, which gives them for all.
    """

    def __init__(self, mask_mod: MaskMod, device: torch.device, widest: int = 1) -> None:
        self._mask_mod, self._device, self._widest = mask_mod, device, widest
        self._try_ranges = True
        function: Callable[..., Tensor] = mask_mod
        for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
            function = torch.vmap(function, in_dims=dims)
        self._vmapped = function

    def at_once(self, elements: int) -> int:
        """How many blocks of so many elements to look at in one call, to bound its memory."""
        return max(1, min(_CHUNK[self._device.type == "cpu"] // elements, _WIDE // (elements * self._widest)))

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if not len(b):
            return torch.zeros((0, q.shape[1], kv.shape[1]), dtype=torch.bool, device=b.device)
        seen = self._by_ranges(b, h, q, kv) if self._try_ranges else None
        if seen is None:
            self._try_ranges = False
            indices = (x.clone().to(self._device) for x in (b, h, q, kv))  # the function may change them in place
            with _ScalarIndexing():
                seen = boolean(self._vmapped(*indices), 3).to(b.device)
        return seen

    def ranges(self, blocks: Tensor, rows: _Line, columns: _Line) -> tuple[Tensor, Tensor]:
        """Whether all, and whether any of each of 8 x 8 parts of blocks is visible, as far as ranges show."""
        n = len(blocks)
        parts = torch.arange(_PARTS, device=blocks.device).expand(n, _PARTS)
        at_b, at_h = (blocks[:, d].double().view(n, 1, 1, 1) for d in (0, 1))
        indices = [Range.of_indices(x, x, _LONGEST, limit_reached=False) for x in (at_b, at_h)]
        for line, dim, shape in ((rows, 2, (n, 1, _PARTS, 1)), (columns, 3, (n, 1, 1, _PARTS))):
            places = line.part_of(blocks[:, dim].repeat_interleave(_PARTS), parts.flatten())
            lo, hi = places[:, 0].double().view(shape), places[:, -1].double().view(shape)
            indices.append(Range.of_indices(lo, hi, _LONGEST, limit_reached=False))
        shape = (n, 1, _PARTS, _PARTS)
        try:
            truth = evaluate(self._mask_mod, indices[0], indices[1], indices[2], indices[3], self._device).truth
        except (GiveUp, TooLarge):
            certain = torch.zeros(shape, dtype=torch.bool, device=blocks.device)
            return certain[:, 0], ~certain[:, 0]
        return truth.lo.to(blocks.device).expand(shape)[:, 0], truth.hi.to(blocks.device).expand(shape)[:, 0]

    def _by_ranges(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor | None:
        n = len(b)
        shapes = (n, 1, 1, 1), (n, 1, 1, 1), (n, 1, -1, 1), (n, 1, 1, -1)
        lines = [x.double().view(shape) for x, shape in zip((b, h, q, kv), shapes, strict=True)]
        at_b, at_h, at_q, at_kv = (Range.of_indices(x, x, _LONGEST, limit_reached=False) for x in lines)
        try:
            truth = evaluate(self._mask_mod, at_b, at_h, at_q, at_kv, self._device).truth
        except (GiveUp, TooLarge):
            return None
        if not truth.exact:
            return None
        return truth.lo.to(b.device).expand(n, 1, q.shape[1], kv.shape[1])[:, 0]


def boolean(seen: Tensor, dims: int) -> Tensor:
    """What a mask function gave for [..] indices of so many dimensions, if it is one truth value for each."""
    if seen.dtype != torch.bool:
        raise TypeError(
            "flexmasks: a mask function must return a boolean tensor, "
            f"got one of {str(seen.dtype).removeprefix('torch.')}; compare, as in `q >= kv`."
        )
    if seen.ndim != dims:
        raise ValueError(
            "flexmasks: a mask function must return one truth value for each b, h, q, kv, all numbers; "
            f"got a tensor of shape {list(seen.shape[dims:])}."
        )
    return seen


def coordinates_of(places: Tensor, shape: torch.Size) -> Tensor:
    """torch.unravel_index as [n, dimensions]; that one waits for a GPU."""
    found = []
    for n in reversed(shape):
        found.append(places % n)
        places = places // n
    return torch.stack(found[::-1], 1)


def _ordered(marked: Tensor, indices: Tensor) -> list[Tensor]:
    """The eight index tensors of a BlockMask of [2, batch, heads, rows, columns], what is partial and what is full.

    `indices` are int32 ones, two for each of `marked`, and become the lists.

    A list names a line's marked places in order, and behind those the others, as torch has it. It is made of runs:
    where a run of marked places starts, the list jumps there, and where it ends, to the next; once all runs are
    through, to the first gap between them, and so on. Everywhere else it counts up by one, so that it is a sum of ones
    and jumps.
    """
    rows, columns = marked.shape[-2:]
    matrices = marked[..., 0, 0].numel()
    width = max(rows, columns) + 1  # a place in a line is below
    of_rows, of_columns = (_edges(marked.view(-1, rows, columns), dim) for dim in (-1, -2))
    if columns + 1 != width:
        of_rows = of_rows // (columns + 1) * width + of_rows % (columns + 1)
    above, column = of_columns // columns, of_columns % columns
    of_columns = (above // (rows + 1) * columns + column + matrices * rows) * width + above % (rows + 1)
    keys = torch.cat([of_rows, of_columns.sort().values])
    del of_rows, of_columns, above, column
    first, last = keys.view(-1, 2).unbind(1)
    line = first // width  # all rows first, then all columns
    first, last = first - line * width, last - line * width
    length = last - first
    counts = torch.zeros(matrices * (rows + columns), dtype=torch.int64, device=marked.device)
    counts.index_add_(0, line, length)
    before = length.cumsum(0) - length  # marked places before a run: in its line, once those of other lines are off
    before -= (counts.cumsum(0) - counts)[line]
    count = counts[line]
    goes_on = torch.zeros_like(line, dtype=torch.bool)  # the line's next run
    torch.eq(line[1:], line[:-1], out=goes_on[:-1])
    previous = torch.zeros_like(last)
    torch.mul(last[:-1], goes_on[:-1], out=previous[1:])
    size: int | Tensor = columns
    start = line * columns
    if rows != columns:
        is_column = line >= matrices * rows
        size = torch.where(is_column, rows, columns)
        start = torch.where(is_column, line * rows + matrices * rows * (columns - rows), start)
    # At which place of its line, and how far beyond one, a list jumps: to the run, past it in the gaps, and back.
    places = torch.stack([before, count + first - before, count])
    jumps = torch.stack([first - previous, length, last * goes_on - last])
    inside = places < size
    places = places * inside + start
    lists = [part.view(-1, n) for part, n in zip(indices.chunk(2), (columns, rows), strict=True)]
    for part in lists:
        part[:, 0] = 0
    indices.index_add_(0, places.view(-1), (jumps * inside).view(-1).int())
    found = []
    counts_of = counts.int().split((matrices * rows, matrices * columns))
    for count_of_line, part in zip(counts_of, lists, strict=True):
        torch.cumsum(part, 1, dtype=torch.int32, out=part)
        for n, index in zip(count_of_line.chunk(2), part.chunk(2), strict=True):
            shape = (*marked.shape[1:-2], 2 * len(index) // matrices)
            found += [n.clone().view(shape), _alone(index).view(*shape, -1)]
    return found


def _alone(tensor: Tensor) -> Tensor:
    """The tensor as one that begins where its memory does: torch.compile makes kernels for other beginnings."""
    aligned = tensor.storage_offset() % 64 == 0  # as kernels expect of a tensor
    return from_dlpack(to_dlpack(tensor)) if aligned else tensor.clone()


def _edges(matrices: Tensor, dim: int) -> Tensor:
    """Where in [matrices, rows, columns], one longer along `dim`, runs along `dim` start and end: flat, in order."""
    n = matrices.shape[dim]
    shape = list(matrices.shape)
    shape[dim] += 1
    edges = torch.empty(shape, dtype=torch.bool, device=matrices.device)
    for matrix, edge in zip(matrices, edges, strict=True) if matrices[0].numel() > _SMALL else [(matrices, edges)]:
        torch.ne(matrix.narrow(dim, 1, n - 1), matrix.narrow(dim, 0, n - 1), out=edge.narrow(dim, 1, n - 1))
    edges.select(dim, 0).copy_(matrices.select(dim, 0))
    edges.select(dim, n).copy_(matrices.select(dim, n - 1))
    return _flat_nonzero(edges)


def _flat_nonzero(places: Tensor) -> Tensor:
    """Which of [...] booleans, flat, are set; of many eight at a time, for those set are few and far between."""
    flat = places.view(-1)
    if flat.numel() % 8 or flat.numel() < 1 << 22 or flat.data_ptr() % 8:
        return flat.nonzero()[:, 0]
    words = flat.view(torch.int64).nonzero()[:, 0]
    word, byte = flat.view(-1, 8)[words].nonzero().unbind(1)
    return words[word] * 8 + byte
