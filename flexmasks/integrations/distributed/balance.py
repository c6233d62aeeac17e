"""Orders of a sequence in which all ranks compute equally many blocks."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexmasks import Mask, get_mask
from flexmasks.extend import MaskLike, constant_in_graphs, implied_size, in_message, says_what_to_write
from flexmasks.integrations.distributed.counts import (
    Parts,
    check_int,
    check_range,
    computed_blocks,
    cut,
    fail,
    merged,
    size_of,
)

_EVEN = 1.02  # the busiest rank's blocks over the mean, at which ranks count as balanced
_MOST_PIECES = 16  # pieces of a rank
_MOST_ROWS = 1 << 13  # rows of blocks that are counted by default


@dataclass(frozen=True)
class Order:
    """The parts of a sequence that each rank holds.

    length: the number of tokens of the whole sequence.
    parts: for each rank its parts (start, stop) of the sequence. They are sorted, and parts that meet become one.
        Together they hold each token once. A rank may hold none.

    Raises:
        ValueError: the parts do not hold each token once.

    Example:
        >>> from flexmasks.integrations.distributed import Order
        >>> order = Order(8, (((0, 2), (6, 8)), ((2, 6),)))
        >>> order.sizes, order.tokens().tolist()
        ((4, 4), [0, 1, 6, 7, 2, 3, 4, 5])
    """

    length: int
    parts: tuple[Parts, ...]

    def __post_init__(self) -> None:
        check_int("Order", "length", self.length)
        if not self.parts:
            fail("Order", "`parts` must have an entry for each rank, got none.")
        for own in self.parts:
            if not isinstance(own, tuple | list):
                fail("Order", f"an entry of `parts` must hold the parts (start, stop) of a rank, got {own!r}.")
            for part in own:
                check_range("Order", "a part", part, self.length)
        covered = 0
        for start, stop in sorted(part for own in self.parts for part in own if part[0] < part[1]):
            if start != covered:
                problem = "more than once" if start < covered else "never"
                fail("Order", f"`parts` must hold each token once, but token {min(start, covered)} is held {problem}.")
            covered = stop
        if covered < self.length:
            fail("Order", f"`parts` must hold each token once, but token {covered} is held never.")
        object.__setattr__(self, "parts", tuple(merged(own) for own in self.parts))

    @classmethod
    def natural(cls, length: int, ranks: int) -> Order:
        """Return the order of the sequence itself, cut as torch.chunk cuts.

        The last ranks may hold less than others, or nothing.
        """
        check_int("Order.natural", "length", length)
        check_int("Order.natural", "ranks", ranks)
        return cls(length, tuple((part,) for part in cut(0, length, ranks)))

    def divided(self, count: int) -> Order:
        """Return the order of `count` times as many ranks, which share each rank's tokens.

        The first of them get the first tokens. Their numbers differ by at most one.

        Example:
            >>> from flexmasks.integrations.distributed import Order
            >>> Order(8, (((0, 2), (6, 8)), ((2, 6),))).divided(2).parts
            (((0, 2),), ((6, 8),), ((2, 4),), ((4, 6),))
        """
        check_int("Order.divided", "count", count)
        parts: list[Parts] = []
        for own, size in zip(self.parts, self.sizes, strict=True):
            cuts = [size * n // count for n in range(count + 1)]
            parts += [_between(own, *ends) for ends in itertools.pairwise(cuts)]
        return Order(self.length, tuple(parts))

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of tokens of each rank."""
        return tuple(map(size_of, self.parts))

    @property
    def is_natural(self) -> bool:
        """Return whether the ranks hold the sequence one after the other."""
        parts = [part for own in self.parts for part in own]
        return parts == sorted(parts)

    def tokens(self, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of the tokens that the ranks hold, rank after rank: int64 [length]."""
        return torch.cat([torch.arange(*part, device=device) for own in self.parts for part in own])


# Orders by which this process holds tokens, for as long as somebody holds the order, by the ranks of their mesh.
_HELD: weakref.WeakValueDictionary[tuple[tuple[int, ...], int], Order] = weakref.WeakValueDictionary()


def hold(order: Order, mesh: DeviceMesh) -> None:
    """Remember an order of these processes, so that calls without one ask for it."""
    if not order.is_natural:
        _HELD[_ranks_in(mesh), id(order)] = order


def forgotten_order(mesh: DeviceMesh, rank: int, length: int) -> str:
    """What to pass if a held order gives this rank just as many tokens as a call without one has, or "".

    Other ranks may have other numbers of tokens than by that order: ranks that compare their calls look at all.
    """
    for collect in (False, True):  # an order that only a cycle holds, as of an exception and its frames, is nobody's
        # Not `in`, which torch 2.13 gets wrong for symbolic sizes.
        if not any(length == size for size in _held_sizes(mesh, rank, collect)):
            return ""
    return (
        "pass `order`, the Order of these processes that `balance` made or `shard` took, by which this one has "
        f"{length} tokens. If its tokens follow those of the rank before it, pass `order=Order.natural(length, ranks)`."
    )


@constant_in_graphs
def _held_sizes(mesh: DeviceMesh, rank: int, collect: bool) -> tuple[int, ...]:
    """How many tokens each held order gives a rank.

    collect: whether to free garbage first, which may hold orders.
    """
    if collect:
        gc.collect()
    ranks = _ranks_in(mesh) if _HELD else ()
    return tuple({order.sizes[rank] for (held, _), order in list(_HELD.items()) if held == ranks})


def _ranks_in(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


@says_what_to_write()
def balance(
    masks: MaskLike | Sequence[MaskLike],
    length: int,
    mesh: DeviceMesh | int,
    *,
    block_size: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
) -> Order:
    """Return the order in which all ranks compute nearly the same number of blocks.

    It pays where ranks gather keys and values, because their number does not divide that of the key heads. Where
    `attention` exchanges heads, each rank attends over the whole sequence in any order, and that of the sequence itself
    needs no rearranging.

    The blocks are counted from the masks, and summed over masks, batch elements and heads. Each rank gets the same
    number of pieces of the sequence: one, or two, four, eight, at most 16, the least number with which the busiest rank
    computes at most 1.02 times the mean. If there is none, the number that comes closest. Pieces that meet become one
    part. Even masks such as `full` and `sliding_window` keep the order of the sequence; for `causal` rank r of n gets
    the pieces r and 2n - 1 - r of 2n.

    Ranks get the same number of tokens if their number divides `length`, else numbers that differ by one; in the order
    of the sequence itself, numbers as torch.chunk gives. All ranks that call this get the same order.

    While the order lives, or a part that `shard` made by it, `distributed.attention` on the same ranks refuses parts of
    its lengths without an `order`: a forgotten one would give tokens the positions of others.

    Args:
        masks: the mask, or the masks of all layers of a model. A mask that occurs several times counts as often.
        length: the number of tokens.
        mesh: the ranks, as a DeviceMesh, or their number. With two dimensions, ranks along the last one exchange the
            sequence for heads: balanced is what they hold together, which they divide.
        block_size: queries and keys of a block. By default 128, for more than 1,048,576 tokens the least multiple by a
            power of 2 with which there are at most 8,192 rows of blocks. Pieces start at multiples of it if they are
            long enough.
        batch, heads: numbers of batch elements and heads, by default those of the masks' tensors, or 1.

    Raises:
        ValueError, TypeError: an input does not fit.

    Example:
        >>> from flexmasks.integrations.distributed import balance
        >>> balance("causal", 65536, 4).parts[0]
        ((0, 8192), (57344, 65536))
    """
    check_int("balance", "length", length)
    for name, count in (("batch", batch), ("heads", heads)):
        if count is not None:
            check_int("balance", name, count)
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim > 2:
            fail("balance", f"`mesh` must not have {mesh.ndim} dimensions here; pass the number of ranks instead.")
        order = balance(masks, length, mesh.size(0), block_size=block_size, batch=batch, heads=heads)
        order = order if mesh.ndim == 1 else order.divided(mesh.size(1))
        hold(order, mesh)
        return order
    ranks = mesh
    if type(ranks) is not int or ranks < 1:
        fail("balance", f"`mesh` must be a DeviceMesh or the number of ranks, got {in_message(mesh)}.")
    counted = counted_masks("balance", masks)
    block_size = block_size_for(length, _MOST_ROWS) if block_size is None else block_size
    check_int("balance", "block_size", block_size)
    batch = batch_of(counted) if batch is None else batch
    rows = np.zeros(-(-length // block_size), dtype=np.int64)
    for mask, times in counted.items():
        rows += times * computed_blocks(mask, length, block_size=block_size, batch=batch, heads=heads).numpy()
    ends = np.minimum(np.arange(len(rows) + 1) * block_size, length)
    before = np.concatenate([[0], np.cumsum(rows)])

    def blocks_between(cuts: np.ndarray) -> np.ndarray:  # a cut row of blocks counts in proportion
        return np.diff(np.interp(cuts, ends, before))

    best = Order.natural(length, ranks)
    least = _unevenness(blocks_between(np.cumsum([0, *best.sizes])))
    count = 2
    while least > _EVEN and count <= _MOST_PIECES and length >= ranks * count:
        cuts, kinds = _cut(length, ranks, count, block_size)
        costs = blocks_between(cuts)
        owners = _assign(costs, kinds, ranks)
        unevenness = _unevenness(np.bincount(owners, costs, ranks))
        if unevenness < least:
            pieces = list(itertools.pairwise(cuts.tolist()))
            own = [[pieces[i] for i in np.flatnonzero(owners == rank)] for rank in range(ranks)]
            best, least = Order(length, tuple(map(tuple, own))), unevenness
        count *= 2
    return best


def _between(own: Parts, first: int, last: int) -> Parts:
    """Where tokens number `first` to `last` - 1 of a rank stand in the sequence."""
    found, before = [], 0  # `before`: how many tokens the parts before have
    for start, stop in own:
        low, high = max(start, start + first - before), min(stop, start + last - before)
        if low < high:
            found.append((low, high))
        before += stop - start
    return tuple(found)


# --- arguments that `balance` shares with recipes/sequence_on_paper.py ---


def counted_masks(call: str, masks: Any) -> Counter[Mask]:
    masks = list(masks) if isinstance(masks, Iterable) and not isinstance(masks, str | Mask) else [masks]
    if not masks:
        fail(call, "`masks` must hold at least one mask, got none.")
    return Counter(get_mask(mask) for mask in masks)


def batch_of(masks: Iterable[Mask]) -> int | None:
    return max((implied_size(mask, "B") or 0 for mask in masks), default=0) or None


def block_size_for(length: int, most_rows: int) -> int:
    block_size = 128
    while block_size * most_rows < length:
        block_size *= 2
    return block_size


# --- pieces ---


def _unevenness(loads: np.ndarray) -> float:
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def _cut(length: int, ranks: int, count: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The cuts of `count` pieces for each rank, and the kind of each piece. Kind 1 are the last pieces, one for each
    rank, if they are longer than the pieces of kind 0, which are all equal.
    """
    size = length // ranks // count
    if size >= 4 * count * block_size:  # then the last pieces are at most a quarter longer
        size -= size % block_size
    firsts = size * np.arange((count - 1) * ranks)
    last, longer = divmod(length - (count - 1) * ranks * size, ranks)
    sizes = last + (np.arange(ranks) < longer)
    cuts = np.concatenate([firsts, length - np.cumsum(sizes[::-1])[::-1], [length]])
    kinds = np.repeat([0, int(longer > 0 or last != size)], [(count - 1) * ranks, ranks])
    return cuts, kinds


def _assign(costs: np.ndarray, kinds: np.ndarray, ranks: int) -> np.ndarray:
    """The rank of each piece: every rank gets as many pieces of each kind as the others. The heaviest
    piece goes to the least loaded rank that has room for it. Swaps of two pieces then relieve the busiest rank, until
    none helps. Without swaps orders of documents need up to twice as many pieces, each a call of a kernel.
    """
    owners, loads = np.zeros(len(costs), dtype=np.int64), np.zeros(ranks)
    room = np.repeat(np.bincount(kinds, minlength=2)[:, None] // ranks, ranks, 1)
    for piece in np.lexsort((np.arange(len(costs)), -costs)):
        free = room[kinds[piece]]
        rank = int(np.argmin(np.where(free > 0, loads, np.inf)))
        owners[piece] = rank
        loads[rank] += costs[piece]
        free[rank] -= 1
    for _ in range(4 * ranks):
        busiest = int(np.argmax(loads))
        own, others = np.flatnonzero(owners == busiest), np.flatnonzero(owners != busiest)
        relief = costs[own, None] - costs[others]
        after = np.maximum(loads[busiest] - relief, loads[owners[others]] + relief)
        after[kinds[own, None] != kinds[others]] = np.inf
        if not len(others) or after.min() >= loads[busiest] * (1 - 1e-9):
            break
        give, take = np.unravel_index(int(np.argmin(after)), after.shape)
        loads[busiest] -= relief[give, take]
        loads[owners[others[take]]] += relief[give, take]
        owners[own[give]], owners[others[take]] = owners[others[take]], busiest
    return owners
