"""What pictures show: a mask or a score in cells of any size, and the counts beneath.

The work is bounded at every length: the cells of a mask are found as the blocks of a BlockMask are, from ranges, and a
score is looked at in a few places of each cell.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmasks.blocks.build import build
from flexmasks.blocks.decide import dependence
from flexmasks.blocks.elements import MaskMod, over_indices
from flexmasks.blocks.lists import of_block_mask
from flexmasks.blocks.strips import count_in_strips
from flexmasks.plans.plan import MaskPlan, Offset, ScorePlan, naming, shifted_mask, sized
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Modifier, Score

SKIPPED, HIDDEN, PARTIAL, VISIBLE = range(4)  # what a cell of a mask is
_PLACES = 4  # along an axis of a score's cell
_CURVE = 80


@dataclass(frozen=True)
class Grid:
    """The cells of a mask: SKIPPED, HIDDEN, PARTIAL or VISIBLE, [rows, columns], each of `cell` (queries, keys)."""

    kinds: Tensor
    cell: tuple[int, int]


class MaskCells:
    """One batch element and head of a mask, to be drawn.

    A cell is SKIPPED where kernels compute nothing, in empty blocks; HIDDEN where nothing of it is visible but its
    block is computed; VISIBLE where all of it is, and PARTIAL otherwise. Cells of whole blocks are empty, full or
    anything else in the same way: one that the edge cuts within a block is PARTIAL, as torch's blocks are.

    Raises ValueError or TypeError where the mask cannot be evaluated.
    """

    def __init__(self, plan: MaskPlan, b: int, h: int) -> None:
        size = plan.size
        mod = shifted_mask(plan.value.bind(plan.value.resolve(sized(size, plan.offset))), plan.offset)
        self.name = _short(plan.value)
        self.q_len, self.kv_len, self.block_size = size.q_len, size.kv_len, plan.block_size
        self._device = size.device
        self._mod: MaskMod = lambda _b, _h, q, kv: mod(_b + b, _h + h, q, kv)
        with naming(plan.value):
            self.counts = count_in_strips(self._mod, self.q_len, self.kv_len, self.block_size, self._device)
        depends = (self._depends(mod, max(2, n), dim) for dim, n in enumerate((size.batch, size.heads)))
        self.where = _where(b, h, *depends)

    def grid(self, rows: int, columns: int) -> Grid:
        """The cells, at most so many where blocks can be cut or put together to as few."""
        wanted = (-(-self.q_len // rows), -(-self.kv_len // columns))
        cell = _pair(_fitting(n, block) for n, block in zip(wanted, self.block_size, strict=True))
        return Grid(self._kinds(cell), cell)

    def _kinds(self, cell: tuple[int, int]) -> Tensor:
        some, all_ = self._seen(cell)
        whole = _pair(max(c, n) for c, n in zip(cell, self.block_size, strict=True))
        computed = some
        if whole != cell:
            computed = self._seen(whole)[0]
            for dim in (0, 1):
                computed = computed.repeat_interleave(whole[dim] // cell[dim], dim).narrow(dim, 0, some.shape[dim])
        for dim, length in ((0, self.q_len), (1, self.kv_len)):
            if cell[dim] >= self.block_size[dim] and length % self.block_size[dim]:
                all_.select(dim, -1).fill_(False)
        return torch.where(all_, VISIBLE, torch.where(some, PARTIAL, torch.where(computed, HIDDEN, SKIPPED)))

    def _seen(self, cell: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Whether some, and whether all pairs are visible of each cell; of those at the edge, the pairs there are."""
        mod, (q_len, kv_len) = self._mod, (self.q_len, self.kv_len)
        over = -q_len % cell[0], -kv_len % cell[1]
        if any(over):  # past the edge comes the last query, and the last key, again
            own = mod
            mod = lambda b, h, q, kv: own(b, h, q.clamp(max=q_len - 1), kv.clamp(max=kv_len - 1))  # noqa: E731
        layout = build(mod, 1, 1, q_len + over[0], kv_len + over[1], self._device, cell)
        partial, full = (x[0, 0].cpu() for x in of_block_mask(layout.block_mask(mod)))
        return partial | full, full

    def _depends(self, mod: MaskMod, n: int, dim: int) -> bool:
        """Whether the mask depends on the batch index (0) or the head index (1), which ranges over so many."""
        try:
            return dependence(mod, *((n, 1), (1, n))[dim], self._device)[dim] > 1
        except (ValueError, TypeError, LookupError, RuntimeError):  # an index that is out of range for a second one
            return True


class ScoreCells:
    """One batch element and head of a score change, to be drawn.

    `kind` is "bias" where the same is added to every score at a place, "change" where what is added depends on the
    score too: then `grid` says what is added to a score of 1. It is "curve" where it depends on the score alone:
    `curve` gives scores and what becomes of them.

    Raises ValueError or TypeError where the score change cannot be evaluated.
    """

    def __init__(self, score: Score, size: Size, offset: Offset, b: int, h: int) -> None:
        self.name = _short(score)
        self.q_len, self.kv_len = size.q_len, size.kv_len
        self._score, self._device, self._at = score, size.device, (b, h)
        self._mod = over_indices(ScorePlan(score, size, offset).score_mod(), (0,))
        samples = {at: self._changed(at, *self._places(16, 16)) - at for at in (0.0, 1.0, -3.0)}
        base = samples[0.0]
        self.kind = "curve"
        if all(_close(base, other) for other in samples.values()):
            self.kind = "bias"
        elif not all(_close(x, x.reshape(-1)[0].expand_as(x)) for x in samples.values()):
            self.kind = "change"
        self.where = _where(b, h, *(self._depends(max(2, n), dim) for dim, n in enumerate((size.batch, size.heads))))

    def grid(self, rows: int, columns: int) -> tuple[Tensor, tuple[int, int]]:
        """What is added in each cell, float32 [rows, columns], and the cell's (queries, keys).

        It is the mean over at most 4 x 4 neighbors in the middle of the cell; inf or nan where one of them is.
        """
        cell = (-(-self.q_len // rows), -(-self.kv_len // columns))
        q, kv = (_middles(n, c, self._device) for n, c in zip((self.q_len, self.kv_len), cell, strict=True))
        at = 0.0 if self.kind == "bias" else 1.0
        added = self._changed(at, q.reshape(-1), kv.reshape(-1)) - at
        return added.view(*q.shape, *kv.shape).mean((1, 3)), cell

    @functools.cached_property
    def curve(self) -> tuple[Tensor, Tensor]:
        """Scores around 0, as far as the change shows, and what becomes of them: float32, [81] each."""
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        for reach in (1.0, 10.0, 100.0, 1000.0):
            scores = torch.linspace(-reach, reach, _CURVE + 1)
            changed = torch.stack([self._changed(float(s), zero, zero).view(()) for s in scores])
            if float((changed - scores).abs().max()) > 0.1 * reach:
                break
        return scores, changed

    def _places(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        lengths = ((self.q_len, rows), (self.kv_len, columns))
        q, kv = (_middles(n, -(-n // most), self._device).reshape(-1) for n, most in lengths)
        return q, kv

    def _changed(self, score: float, q: Tensor, kv: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        """What becomes of that score, float32 [queries, keys]."""
        own_b, own_h = (torch.tensor([n], device=self._device) for n in self._at)
        at = (own_b if b is None else b, own_h if h is None else h, q, kv)
        scores = torch.full([len(x) for x in at], score, device=self._device)
        with naming(self._score), torch.no_grad():
            changed = self._mod(scores, *at).float().cpu()
        return changed[0, 0] if b is None and h is None else changed

    def _depends(self, n: int, dim: int) -> bool:
        """Whether the change depends on the batch index (0) or the head index (1), which ranges over so many."""
        index = torch.arange(n, device=self._device)
        try:
            of = self._changed(1.0, *self._places(4, 4), **{"bh"[dim]: index})
        except (ValueError, TypeError):  # an index that is out of range for a second one
            return True
        return not _close(of, of.narrow(dim, 0, 1).expand_as(of))


def _short(value: Modifier) -> str:
    """The repr of a mask or score, without the elements of long sequences."""
    return re.sub(r"\((?:[^(),]+, ){8,}[^(),]+\)", lambda m: f"<{m[0].count(',') + 1} values>", repr(value))


def _fitting(wanted: int, block: int) -> int:
    """The smallest size of at least so many positions that divides the block, or is a multiple of it."""
    if wanted >= block:
        return -(-wanted // block) * block
    return next(n for n in range(wanted, block + 1) if block % n == 0)


def _middles(length: int, cell: int, device: torch.device) -> Tensor:
    """Neighboring positions in the middle of each cell, [cells, places]; the last again for those past the edge."""
    places = min(cell, _PLACES)
    first = torch.arange(0, length, cell, device=device) + (cell - places) // 2
    return (first[:, None] + torch.arange(places, device=device)).clamp(max=length - 1)


def _close(a: Tensor, b: Tensor) -> bool:
    finite = a[a.isfinite()]
    size = float(finite.abs().max()) if len(finite) else 0.0
    return bool(torch.isclose(a, b, rtol=1e-4, atol=1e-4 * min(1.0, size) + 1e-6, equal_nan=True).all())


def _pair(values: Iterable[int]) -> tuple[int, int]:
    first, second = values
    return first, second


def _where(b: int, h: int, of_batch: bool, of_heads: bool) -> str:
    named = (("batch element", b, of_batch), ("head", h, of_heads))
    return ", ".join(f"{what} {n}" for what, n, depends in named if depends)
