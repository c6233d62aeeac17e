"""The pairs that one of two masks shows alone: counted exactly, in bounded memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmasks.blocks import limits
from flexmasks.blocks.decide import Axis, decide, dependence
from flexmasks.blocks.elements import Elements, MaskMod, block_indices, coordinates_of
from flexmasks.blocks.limits import progress
from flexmasks.blocks.lists import flat_nonzero

_PARTS = 8  # parts of a square along each axis
_SMALLEST = 16  # queries and keys of the squares whose pairs are evaluated
_FIRST_SQUARES = 1 << 20  # that are decided first, at most
_CPU = torch.device("cpu")
Shape = tuple[int, int, int, int]  # of b, h, q, kv


class Difference(NamedTuple):
    """How many pairs one of two masks shows alone, in all batch elements and heads."""

    only_a: int
    only_b: int
    first: Shape | None  # the first pair, in the order of b, h, q, kv, in which the masks differ


class Truth(NamedTuple):
    """Whether all pairs of squares are visible, and whether some may be; booleans on the CPU."""

    certain: Tensor
    possible: Tensor


class Side:
    """One of the two masks, with the device that its function sees its indices on."""

    def __init__(self, mask_mod: MaskMod, device: torch.device) -> None:
        self.mask_mod, self.device = mask_mod, device
        self._elements = Elements(mask_mod, device)

    def of_axes(self, batch: int, heads: int, rows: Axis, columns: Axis) -> Truth:
        decided = decide(self.mask_mod, batch, heads, rows, columns, self.device)
        self._elements.widest = decided.widest
        shape = batch, heads, rows.count, columns.count
        return Truth(*(x.to(_CPU).expand(shape).flatten() for x in decided[:2]))

    def of_squares(self, b: Tensor, h: Tensor, *ends: tuple[Tensor, Tensor]) -> Truth | None:
        """What ranges know at b and h and between the ends of q and kv, which broadcast to [n, 1, rows, columns]."""
        shape = torch.broadcast_shapes(b.shape, *(low.shape for low, _ in ends))
        single = [x.double().to(self.device) for x in (b, h)]
        ranges = [*((x, x) for x in single), *((x.double().to(self.device), y.to(self.device)) for x, y in ends)]
        truth = self._elements.on_ranges(*(block_indices(*both) for both in ranges))
        return None if truth is None else Truth(*(x.to(_CPU).expand(shape) for x in (truth.lo, truth.hi)))

    def of_pairs(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Which pairs are visible, bool [n, queries, keys] on the CPU.

        b, h: [n]. q: [n, queries]. kv: [n, keys].
        """
        at_once = self._elements.blocks_at_once(q.shape[1] * kv.shape[1])
        parts = zip(*(x.to(self.device).split(at_once) for x in (b, h, q, kv)), strict=True)
        return torch.cat([self._elements(*part).to(_CPU) for part in parts])


def difference(a: Side, b: Side, batch: int, heads: int, q_len: int, kv_len: int) -> Difference:
    """Count the pairs that one of two masks shows alone.

    Ranges decide squares of pairs. Where both masks are decided, the square is counted whole. Any other square is cut
    into 8 x 8 parts, which ranges decide again, down to squares of 16 x 16, in which each pair is evaluated.
    """
    sizes = [dependence(side.mask_mod, batch, heads, side.device) for side in (a, b)]
    of_batch, of_heads = (max(n) for n in zip(*sizes, strict=True))
    search = _Search((a, b), (of_batch, of_heads, q_len, kv_len))
    search.run()
    repeats = (batch // of_batch) * (heads // of_heads)
    only_a, only_b = search.only
    return Difference(only_a * repeats, only_b * repeats, search.first)


class _Search:
    def __init__(self, sides: tuple[Side, Side], shape: Shape) -> None:
        self._sides, self._shape = sides, shape
        self._lengths = torch.tensor(shape[2:])
        self.only = [0, 0]
        self.first: Shape | None = None

    def run(self) -> None:
        batch, heads, *lengths = self._shape
        side = _SMALLEST
        while batch * heads * -(-lengths[0] // side) * -(-lengths[1] // side) > _FIRST_SQUARES and side < max(lengths):
            side *= _PARTS
        rows, columns = (Axis(n, side) for n in lengths)
        a, b = (of.of_axes(batch, heads, rows, columns) for of in self._sides)
        are_same = (a.certain & b.certain) | ~(a.possible | b.possible)
        places = flat_nonzero(~are_same)
        at = coordinates_of(places, torch.Size((batch, heads, rows.count, columns.count)))
        at[:, 2:] *= side
        a, b = (Truth(x.certain[places], x.possible[places]) for x in (a, b))
        self._count(at, side, a, b, is_shown=True)

    def _count(self, at: Tensor, side: int, a: Truth, b: Truth, is_shown: bool = False) -> None:
        """Count squares of a side with their first pairs at [n, (b, h, q, kv)]; those past the edge have no pairs."""
        pairs = (self._lengths - at[:, 2:]).clamp(0, side).prod(1)
        self._add(at, (a.certain & ~b.possible) * pairs, (b.certain & ~a.possible) * pairs)
        is_open = ((a.certain ^ a.possible) | (b.certain ^ b.possible)) & (pairs > 0)
        places = is_open.nonzero()[:, 0]
        look, of_square = (self._cut, _PARTS**2) if side > _SMALLEST else (self._evaluate, _SMALLEST**2)
        with progress("comparing masks", len(places), "square", is_shown) as advance:
            for some in places.split(limits.elements_at_once(_CPU) // of_square) if len(places) else ():
                look(at[some], side, *(Truth(*(x[some] for x in truth)) for truth in (a, b)))
                advance(len(some))

    def _cut(self, at: Tensor, side: int, *known: Truth) -> None:
        part, shape = side // _PARTS, (len(at), 1, _PARTS, _PARTS)
        b, h, q, kv = at.T.reshape(4, -1, 1, 1, 1)
        steps = torch.arange(0, side, part)
        q, kv = q + steps[:, None], kv + steps
        most = zip((q, kv), self._shape[2:], strict=True)
        ends = [(x.clamp(max=n - 1), (x + (part - 1)).clamp(max=n - 1)) for x, n in most]
        truths = []
        for of, whole in zip(self._sides, known, strict=True):
            certain, possible = (x.view(-1, 1, 1, 1).expand(shape) for x in whole)
            found = of.of_squares(b, h, *ends)
            if found is not None:
                certain, possible = certain | found.certain, possible & found.possible
            truths.append(Truth(certain.flatten(), possible.flatten()))
        self._count(torch.stack([x.expand(shape).flatten() for x in (b, h, q, kv)], 1), part, truths[0], truths[1])

    def _evaluate(self, at: Tensor, side: int, *known: Truth) -> None:
        b, h = at[:, 0], at[:, 1]
        q, kv = at[:, 2, None] + torch.arange(side), at[:, 3, None] + torch.arange(side)
        visible = torch.stack([truth.certain for truth in known])[..., None, None].repeat(1, 1, side, side)
        for of, truth, seen in zip(self._sides, known, visible, strict=True):
            is_open = (truth.certain ^ truth.possible).nonzero()[:, 0]
            if len(is_open):
                inside = (x[is_open].clamp(max=n - 1) for x, n in zip((q, kv), self._shape[2:], strict=True))
                seen[is_open] = of.of_pairs(b[is_open], h[is_open], *inside)
        exists = (q < self._shape[2])[:, :, None] & (kv < self._shape[3])[:, None]
        only = (visible & ~visible.flip(0) & exists).flatten(2)
        place = (only[0] | only[1]).byte().argmax(1)  # of the first pair that differs, if one does
        at = torch.stack([b, h, at[:, 2] + place // side, at[:, 3] + place % side], 1)
        self._add(at, *only.sum(2))

    def _add(self, at: Tensor, only_a: Tensor, only_b: Tensor) -> None:
        """Add the numbers of pairs [n] that each mask shows alone, the first of them at [n, (b, h, q, kv)]."""
        self.only[0] += int(only_a.sum())
        self.only[1] += int(only_b.sum())
        differing = at[(only_a + only_b) > 0]
        if len(differing):
            place = differing[:, 0]
            for n in (1, 2, 3):
                place = place * self._shape[n] + differing[:, n]
            found = tuple(differing[int(place.argmin())].tolist())
            self.first = found if self.first is None else min(self.first, found)
