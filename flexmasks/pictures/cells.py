"""Contents of pictures: masks and scores in cells, and block counts.

The work is bounded at every length: ranges find the cells of a mask, as they find the blocks of a BlockMask, and a
score is evaluated at a few places of each cell.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexmasks import Mask, Score
from flexmasks.extend import MaskOverLengths, ScoreOverLengths, Size

SKIPPED, HIDDEN, PARTIAL, VISIBLE = range(4)  # kinds of a mask's cells
_PLACES = 4  # positions evaluated along each axis of a score's cell
_CURVE_STEPS = 80  # between the scores of a curve


class Grid(NamedTuple):
    """Cells of a picture, each of `cell` (queries, keys): kinds of a mask's cells, or in float32 the numbers that a
    score change adds.
    """

    values: Tensor
    cell: tuple[int, int]


class MaskCells:
    """Cells of one batch element and head of a mask.

    A cell is SKIPPED if it lies in empty blocks, which kernels do not compute; HIDDEN if nothing of it is visible but
    its block is computed; VISIBLE if all of it is visible; and PARTIAL otherwise. A cell of whole blocks is PARTIAL
    too if the edge of the mask cuts one of its blocks, as torch calls such blocks, and if the search, which is bounded,
    did not find out.

    Raises ValueError or TypeError if the mask cannot be evaluated.
    """

    def __init__(self, mask: MaskOverLengths, b: int, h: int) -> None:
        self.name = short(mask.mask)
        self.q_len, self.kv_len, self.block_size = mask.size.q_len, mask.size.kv_len, mask.block_size
        self.counts = mask.counts(b, h)
        self.element = _element(b, h, mask.size, mask.depends)
        self._visible_in = functools.partial(mask.visible_in, b=b, h=h)

    def grid(self, rows: int, columns: int) -> Grid:
        """At most this many rows and columns of cells, whose sides divide those of a block or are multiples of them."""
        queries = _cell_length(-(-self.q_len // rows), self.block_size[0])
        keys = _cell_length(-(-self.kv_len // columns), self.block_size[1])
        return Grid(self._kinds((queries, keys)), (queries, keys))

    def _kinds(self, cell: tuple[int, int]) -> Tensor:
        any_visible, all_visible = self._visible_in(cell)
        computed = any_visible
        blocks = max(cell[0], self.block_size[0]), max(cell[1], self.block_size[1])
        if blocks != cell:
            computed = self._visible_in(blocks)[0]
            for dim in (0, 1):
                computed = computed.repeat_interleave(blocks[dim] // cell[dim], dim)
                computed = computed.narrow(dim, 0, any_visible.shape[dim])
        for dim, length in ((0, self.q_len), (1, self.kv_len)):
            if cell[dim] >= self.block_size[dim] and length % self.block_size[dim]:
                all_visible.select(dim, -1).fill_(False)
        hidden = torch.where(computed, HIDDEN, SKIPPED)
        return torch.where(all_visible, VISIBLE, torch.where(any_visible, PARTIAL, hidden))


class ScoreCells:
    """Cells of one batch element and head of a score change.

    `kind` is "bias" if the number added depends on the place alone, "curve" if it depends on the score alone, and
    "change" if it depends on both. For a "change", `grid` has the numbers added to a score of 1.

    Raises ValueError or TypeError if the score change cannot be evaluated.
    """

    def __init__(self, score: ScoreOverLengths, b: int, h: int) -> None:
        size = score.size
        self.name = short(score.score)
        self.q_len, self.kv_len = size.q_len, size.kv_len
        self._score, self._device, self._at = score, size.device, (b, h)
        added = [self._changed(n, *self._places(16, 16)) - n for n in (0.0, 1.0, -3.0)]
        if all(_nearly_equal(added[0], other) for other in added):
            self.kind = "bias"
        else:
            uniform = all(_nearly_equal(x, x.reshape(-1)[0].expand_as(x)) for x in added)
            self.kind = "curve" if uniform else "change"
        self.element = _element(b, h, size, self._depends)

    def grid(self, rows: int, columns: int) -> Grid:
        """The numbers added, in at most this many rows and columns. A value is the mean over at most 4 x 4 neighbors in
        the middle of the cell; inf or nan if one of them is.
        """
        cell = (-(-self.q_len // rows), -(-self.kv_len // columns))
        q, kv = (_middles(n, c, self._device) for n, c in zip((self.q_len, self.kv_len), cell, strict=True))
        score = 0.0 if self.kind == "bias" else 1.0
        added = self._changed(score, q.reshape(-1), kv.reshape(-1)) - score
        return Grid(added.view(*q.shape, *kv.shape).mean((1, 3)), cell)

    @functools.cached_property
    def curve(self) -> tuple[Tensor, Tensor]:
        """Scores around 0 that reach far enough to show the change, and the changed scores, float32 [81] each."""
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        for reach in (1.0, 10.0, 100.0, 1000.0):
            scores = torch.linspace(-reach, reach, _CURVE_STEPS + 1)
            changed = torch.stack([self._changed(float(s), zero, zero).view(()) for s in scores])
            if float((changed - scores).abs().max()) > 0.1 * reach:
                break
        return scores, changed

    def _places(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        lengths = ((self.q_len, rows), (self.kv_len, columns))
        q, kv = (_middles(n, -(-n // most), self._device).reshape(-1) for n, most in lengths)
        return q, kv

    def _changed(self, score: float, q: Tensor, kv: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        """The changed score, float32 [queries, keys], with `b` or `h` [b, h, queries, keys]."""
        own_b, own_h = (torch.tensor([n], device=self._device) for n in self._at)
        at = (own_b if b is None else b, own_h if h is None else h, q, kv)
        scores = torch.full([len(x) for x in at], score, device=self._device)
        changed = self._score.changed(scores, *at).float().cpu()
        return changed[0, 0] if b is None and h is None else changed

    def _depends(self, n: int, dim: int) -> bool:
        """Whether the change differs among n batch elements (dim 0) or heads (dim 1)."""
        index = torch.arange(n, device=self._device)
        try:
            changed = self._changed(1.0, *self._places(4, 4), **{"bh"[dim]: index})
        except (ValueError, TypeError):  # the function has data for one index only
            return True
        return not _nearly_equal(changed, changed.narrow(dim, 0, 1).expand_as(changed))


class WeightCells:
    """Cells of the attention weights [Q, KV] of one batch element and head: what a query gives to the keys of a cell,
    on average over the queries of the cell.
    """

    kind = "weights"

    def __init__(self, weights: Tensor, element: str) -> None:
        self.name, self.element = "attention weights", element
        self.q_len, self.kv_len = weights.shape
        self._weights = weights.detach().float().cpu()

    def grid(self, rows: int, columns: int) -> Grid:
        """At most this many rows and columns."""
        height, width = cell = (-(-self.q_len // rows), -(-self.kv_len // columns))
        padded = torch.nn.functional.pad(self._weights, (0, -self.kv_len % width, 0, -self.q_len % height))
        summed = padded.unflatten(1, (-1, width)).sum(2).unflatten(0, (-1, height)).sum(1)
        queries = (self.q_len - torch.arange(0, self.q_len, height)).clamp(max=height)
        return Grid(summed / queries[:, None], cell)


def short(value: Mask | Score) -> str:
    long = r"\(((?:[^(),]+, ){2}[^(),]+), (?:[^(),.]+, ){5,}[^(),]+\)"
    return re.sub(long, lambda m: f"({m[1]}, ... {m[0].count(',') + 1} values)", repr(value))


def _cell_length(wanted: int, block: int) -> int:
    """The wanted length rounded up to a divisor or a multiple of a block."""
    if wanted >= block:
        return -(-wanted // block) * block
    return next(n for n in range(wanted, block + 1) if block % n == 0)


def _middles(length: int, cell: int, device: torch.device) -> Tensor:
    """Neighbors in the middle of each cell, [cells, places]; past the edge the last position repeats."""
    places = min(cell, _PLACES)
    first = torch.arange(0, length, cell, device=device) + (cell - places) // 2
    return (first[:, None] + torch.arange(places, device=device)).clamp(max=length - 1)


def _nearly_equal(a: Tensor, b: Tensor) -> bool:
    finite = a[a.isfinite()]
    size = float(finite.abs().max()) if len(finite) else 0.0
    return bool(torch.isclose(a, b, rtol=1e-4, atol=1e-4 * min(1.0, size) + 1e-6, equal_nan=True).all())


def _element(b: int, h: int, size: Size, depends: Callable[[int, int], bool]) -> str:
    parts = (("batch element", b, size.batch), ("head", h, size.heads))
    return ", ".join(f"{what} {index}" for dim, (what, index, n) in enumerate(parts) if depends(max(2, n), dim))
