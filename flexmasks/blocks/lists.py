"""The index lists of a BlockMask: how they are made and read."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined] # public, and not listed

from flexmasks import compat
from flexmasks.blocks import limits
from flexmasks.devices import compiles_by_triton
from flexmasks.kernels.index_lists import plain_lists

_WORDWISE_FROM = 1 << 22  # from this many booleans on, eight are searched at a time
_MOST_EDGES = 1 << 23  # of runs, of which each takes 100 bytes
_WIDTHS = 16  # the widths of narrow lists are multiples of this
_ALIGNMENT = 64  # kernels expect a tensor's offset in its memory to be a multiple of this many elements


# --- reading ---


def grid(lengths: tuple[int, int], block_size: tuple[int, int]) -> tuple[int, int]:
    return -(-lengths[0] // block_size[0]), -(-lengths[1] // block_size[1])


def of_block_mask(block_mask: compat.BlockMask) -> tuple[Tensor, Tensor]:
    """Which blocks of a BlockMask are partial and which are full: booleans [B, H, query blocks, key blocks]."""
    _, columns = grid(block_mask.seq_lengths, block_mask.BLOCK_SIZE)
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return partial, torch.zeros_like(partial)
    return partial, _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)


def pairs_shown(
    blocks: tuple[Tensor, Tensor],
    block_size: tuple[int, int],
    q: Tensor,
    kv: Tensor,
    by_function: Tensor,
    first_row: int = 0,
) -> Tensor:
    """Which pairs of the positions q and kv blocks show, bool [B or 1, H or 1, Q, KV]: all pairs of full blocks, and
    those of partial blocks that the function shows.

    blocks: which are partial and which full, see `of_block_mask`; from the row `first_row` on.
    by_function: bool [B or 1, H or 1, Q, KV].
    """
    rows, columns = q // block_size[0] - first_row, kv // block_size[1]
    partial, full = (x[..., columns][:, :, rows] for x in blocks)
    return full | (partial & by_function)


def are_narrow(block_mask: compat.BlockMask) -> bool:
    _, columns = grid(block_mask.seq_lengths, block_mask.BLOCK_SIZE)
    return any(x is not None and x.shape[-1] < columns for x in (block_mask.kv_indices, block_mask.full_kv_indices))


def as_kernels_read(block_mask: compat.BlockMask) -> compat.BlockMask:
    """A BlockMask in the form that torch's kernels read right.

    But for those of Triton, its lists need a place for each block. Triton's kernels know one step between heads, and
    take that between batch elements to follow from it, so that lists which are slices or expanded are copied: seen with
    torch 2.11.
    """
    if not compiles_by_triton(block_mask.kv_indices.device):
        return in_full_width(block_mask)
    tensors = lists_of(block_mask)
    if all(x is None or x.is_contiguous() for x in tensors):
        return block_mask
    lists = [None if x is None else x.contiguous() for x in tensors]
    return made_of(block_mask.seq_lengths, lists, block_mask.BLOCK_SIZE, block_mask.mask_mod)


def made_of(lengths: Any, lists: Any, block_size: Any, mask_mod: Any) -> compat.BlockMask:
    """A BlockMask of lists in the order of its arguments."""
    return compat.BlockMask(*(lengths, *lists, block_size, mask_mod))


def lists_of(block_mask: compat.BlockMask) -> tuple[Tensor | None, ...]:
    """The lists of a BlockMask, in the order of its arguments."""
    b = block_mask
    return (
        b.kv_num_blocks, b.kv_indices, b.full_kv_num_blocks, b.full_kv_indices,
        b.q_num_blocks, b.q_indices, b.full_q_num_blocks, b.full_q_indices,
    )  # fmt: skip


def in_full_width(block_mask: compat.BlockMask) -> compat.BlockMask:
    """A BlockMask whose lists have a place for each block."""
    if not are_narrow(block_mask):
        return block_mask
    rows, columns = grid(block_mask.seq_lengths, block_mask.BLOCK_SIZE)
    tensors = []
    for name, width in (("kv", columns), ("full_kv", columns), ("q", rows), ("full_q", rows)):
        indices = getattr(block_mask, f"{name}_indices")
        if indices is not None:
            indices = torch.nn.functional.pad(indices, (0, width - indices.shape[-1]))
        tensors += [getattr(block_mask, f"{name}_num_blocks"), indices]
    return made_of(block_mask.seq_lengths, tensors, block_mask.BLOCK_SIZE, block_mask.mask_mod)


def in_use(counts: Tensor, indices: Tensor) -> Tensor:
    """Which entries of lists stand for blocks: the first `counts`."""
    return torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    is_listed = in_use(counts, indices)
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    table.scatter_(-1, torch.where(is_listed, indices, columns).long(), True)  # unused entries mark one more column
    # Contiguous, because Inductor cannot compare strides of symbolic sums of quotients: see pytorch issue 188323.
    return table[..., :columns].contiguous()


# --- making ---


def index_lists(partial_and_full: Tensor, ones: Tensor | None = None, narrow: bool = False) -> list[Tensor]:
    """The eight index tensors of a BlockMask.

    partial_and_full: bool [2, batch, heads, rows, columns], which blocks are partial and which are full.
    ones: int32 ones, two for each element of `partial_and_full`, that become the lists; made here by default.
    narrow: only the first columns of the lists are made, as many as the fullest list of a kind needs. They take less
        memory where few blocks are marked. The host reads how many that are.

    A line is a row or a column of one matrix of blocks. Its list names the line's marked places in order and behind
    them all other places, as torch has it: 1 2 4 0 3 5 if places 1, 2 and 4 of 6 are marked. Within a run of marked
    places, and within a gap between runs, the list counts up by one. It jumps from each run to the next, from the last
    run to the first gap, and from each gap to the next. So the list is the cumulative sum of ones and jumps.

    Raises MemoryError if there is too little memory for narrow lists.
    """
    if not partial_and_full.is_cuda and _number_of_edges(partial_and_full) > _MOST_EDGES:
        return _lists_by_strips(partial_and_full)
    rows, columns = partial_and_full.shape[-2:]
    of_kind, device = partial_and_full[0, ..., 0, 0].numel(), partial_and_full.device
    runs = _runs(partial_and_full)
    lines, widths = [of_kind * n for n in (rows, rows, columns, columns)], [columns, columns, rows, rows]
    counts = torch.zeros(sum(lines), dtype=torch.int64, device=device)
    counts.index_add_(0, runs.line, runs.end - runs.first)
    if narrow:
        fullest = torch.stack([count.max() for count in counts.split(lines)]).tolist()
        # Widths are rounded up: kernels are compiled for some widths only.
        widths = [min(-(-max(n, 1) // _WIDTHS) * _WIDTHS, most) for n, most in zip(fullest, widths, strict=True)]
    sizes = [n * width for n, width in zip(lines, widths, strict=True)]
    if narrow:
        limits.check_lists(sum(sizes), device)
    if ones is None:
        ones = torch.ones(sum(sizes), dtype=torch.int32, device=device)
    lists = [part.view(-1, width) for part, width in zip(ones.split(sizes), widths, strict=True)]
    for part in lists:
        part[:, 0] = 0
    list_length: int | Tensor = widths[0]
    list_start = runs.line * list_length
    if len({*widths}) > 1:
        width, first_line, first_place = torch.tensor(
            [widths, *([0, *itertools.accumulate(numbers[:-1])] for numbers in (lines, sizes))], device=device
        )
        # Not by torch.bucketize: Inductor searches the memory that a slice is a view of from its beginning on.
        kind = (runs.line[:, None] >= first_line[1:]).sum(1)
        list_length = width[kind]
        list_start = first_place[kind] + (runs.line - first_line[kind]) * list_length
    _add_jumps(ones, runs, counts, list_start, list_length)
    for part in lists:
        torch.cumsum(part, 1, dtype=torch.int32, out=part)
    return _index_tensors(partial_and_full, counts, lists)


def _number_of_edges(partial_and_full: Tensor) -> int:
    if partial_and_full.numel() < _MOST_EDGES:
        return 0
    dims = (
        (x.narrow(d, 1, x.shape[d] - 1), x.narrow(d, 0, x.shape[d] - 1)) for x in partial_and_full for d in (-1, -2)
    )
    return sum(int((a ^ b).count_nonzero()) for a, b in dims)


def _lists_by_strips(partial_and_full: Tensor) -> list[Tensor]:
    """The index tensors of masks with so many runs that a list of them would take more memory than the lists."""
    index_tensors = []
    for marked in (partial_and_full, partial_and_full.mT):
        at_once = max(1, limits.BLOCKS_AT_ONCE_ON_CPU // marked[..., 0, :].numel())
        strips = [plain_lists(strip) for strip in marked.split(at_once, -2)]
        for n, dim in enumerate((-1, -2, -1, -2)):
            index_tensors.append(torch.cat([strip[n] for strip in strips], dim))
            for strip in strips:
                strip[n] = strip[n][:0]  # frees its memory
    return index_tensors


def _index_tensors(partial_and_full: Tensor, counts: Tensor, lists: list[Tensor]) -> list[Tensor]:
    """The lists [lines, places] of each kind, with the numbers of marked places, as a BlockMask has them."""
    batch, heads = partial_and_full.shape[1:-2]
    index_tensors = []
    for count, part in zip(counts.int().split([len(part) for part in lists]), lists, strict=True):
        shape = batch, heads, len(part) // (batch * heads)
        index_tensors += [count.clone().view(shape), _with_own_storage(part).view(*shape, -1)]
    return index_tensors


class _Runs(NamedTuple):
    """Runs of marked places, in order, first in all rows, then in all columns."""

    line: Tensor
    first: Tensor
    end: Tensor  # the place behind a run


def _runs(partial_and_full: Tensor) -> _Runs:
    rows, columns = partial_and_full.shape[-2:]
    matrices = partial_and_full[..., 0, 0].numel()
    width = max(rows, columns) + 1  # above every place in a line, and above every end of a run
    # Keys line * width + place put the runs' first places and ends in order.
    of_rows, of_columns = (_edges(partial_and_full.view(-1, rows, columns), dim) for dim in (-1, -2))
    if columns + 1 != width:
        of_rows = of_rows // (columns + 1) * width + of_rows % (columns + 1)
    above, column = of_columns // columns, of_columns % columns
    of_columns = (above // (rows + 1) * columns + column + matrices * rows) * width + above % (rows + 1)
    keys = torch.cat([of_rows, of_columns.sort().values])
    first, end = keys.view(-1, 2).unbind(1)
    line = first // width
    return _Runs(line, first - line * width, end - line * width)


def _add_jumps(lists: Tensor, runs: _Runs, counts: Tensor, list_start: Tensor, list_length: Tensor | int) -> None:
    """Add the jumps of all runs to the flat lists.

    counts: number of marked places of each line.
    list_start, list_length: the first place and the length of the list of each run's line.
    """
    line, first, end = runs
    length = end - first
    before = length.cumsum(0) - length  # number of marked places before a run, in all lines
    before -= (counts.cumsum(0) - counts)[line]  # in its own line
    count = counts[line]
    has_next_run = torch.zeros_like(line, dtype=torch.bool)  # in the same line
    torch.eq(line[1:], line[:-1], out=has_next_run[:-1])
    previous_end = torch.zeros_like(end)  # end of the run before it in the line, or 0
    torch.mul(end[:-1], has_next_run[:-1], out=previous_end[1:])
    # Each run causes three jumps: to the run, past the run when the gaps are listed, and back from the last run to the
    # first gap. A jump is added at its place in the list. The number added is one less than the distance, since the
    # list counts up by one as well.
    places = torch.stack([before, count + first - before, count])
    jumps = torch.stack([first - previous_end, length, end * has_next_run - end])
    is_inside = places < list_length
    lists.index_add_(0, (places * is_inside + list_start).view(-1), (jumps * is_inside).view(-1).int())


def _with_own_storage(tensor: Tensor) -> Tensor:
    """The tensor with a storage offset of 0; for each other one torch.compile would compile more kernels."""
    is_aligned = tensor.storage_offset() % _ALIGNMENT == 0
    return from_dlpack(to_dlpack(tensor)) if is_aligned else tensor.clone()


def _edges(matrices: Tensor, dim: int) -> Tensor:
    """The first places and the ends of runs along `dim` of bool [matrices, rows, columns]: flat places, in order, in a
    shape that is longer by one along `dim`. An end is the place behind a run.
    """
    n = matrices.shape[dim]
    shape = list(matrices.shape)
    shape[dim] += 1
    edges = torch.empty(shape, dtype=torch.bool, device=matrices.device)
    one_by_one = matrices[0].numel() > limits.BLOCKS_ON_CPU
    for matrix, edge in zip(matrices, edges, strict=True) if one_by_one else [(matrices, edges)]:
        torch.ne(matrix.narrow(dim, 1, n - 1), matrix.narrow(dim, 0, n - 1), out=edge.narrow(dim, 1, n - 1))
    edges.select(dim, 0).copy_(matrices.select(dim, 0))
    edges.select(dim, n).copy_(matrices.select(dim, n - 1))
    return flat_nonzero(edges)


def flat_nonzero(places: Tensor) -> Tensor:
    """The flat places of booleans that are true: of many, eight at a time, since these are few and far apart."""
    flat = places.view(-1)
    if flat.numel() % 8 or flat.numel() < _WORDWISE_FROM or flat.data_ptr() % 8:
        return flat.nonzero()[:, 0]
    words = flat.view(torch.int64).nonzero()[:, 0]
    word, byte = flat.view(-1, 8)[words].nonzero().unbind(1)
    return words[word] * 8 + byte
