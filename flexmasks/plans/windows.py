"""Bands that kernels know natively: windows, fitted to the lengths of a call, and intervals of keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.context import reads_at_once
from flexmasks.plans.sizes import BLOCK_SIZE, Offset
from flexmasks.spec.bands import Band, band_of, intersection
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask


@dataclass(frozen=True)
class Window:
    """A band over the keys first..stop - 1.

    Query i is at position i + offset among these keys.

    left and right are None if every query sees all these keys on that side.
    """

    left: int | None
    right: int | None
    offset: int
    keys: tuple[int, int]  # first, stop: all other keys are hidden from all queries
    has_sequences: bool  # the window is inside sequences, see `MaskPlan.sequences`
    by_look: bool = False  # only values show whether it is

    def cut(self, x: Tensor) -> Tensor:
        """Return the part of keys or values [B, H, KV, D] that some query sees."""
        first, stop = self.keys
        return x if first == 0 and _holds(stop == x.shape[2]) else x[:, :, first:stop]

    def pairs(self, q_len: int) -> float:
        """Return the approximate number of visible pairs, ignoring sequences. A pair is a query and a key."""
        first, stop, offset, q_len = map(compat.size_hint, (*self.keys, self.offset, q_len))
        keys: int = stop - first

        def below(diagonal: int) -> float:
            """Return the number of pairs with 0 <= kv < min(keys, q + diagonal)."""
            first, last = (min(max(n, 0), keys) for n in (diagonal, diagonal + q_len))
            return (last - first) * (last + first) / 2 + keys * max(0, diagonal + q_len - max(diagonal, keys))

        visible = q_len * keys if self.right is None else below(offset + compat.size_hint(self.right))
        return visible if self.left is None else visible - below(offset - compat.size_hint(self.left))

    def blocks(self, q_len: int) -> tuple[float, float]:
        """The approximate numbers of full and partial blocks of 128 x 128 for 128 queries: each edge cuts one."""
        partial = (self.left is not None) + (self.right is not None)
        return max(0.0, self.pairs(q_len) / compat.size_hint(q_len) / BLOCK_SIZE[1] - partial / 2), partial


@dataclass
class Look:
    """Numbers that a device computes, and what the host does with them once they are there.

    The host need not wait where it wants them: a kernel that is launched before it does runs meanwhile.
    """

    pending: tuple[Tensor, torch.cuda.Event | None, Callable[[list[int]], None]] | None  # None once it has judged

    @classmethod
    def at(cls, numbers: Tensor, judge: Callable[[list[int]], None]) -> Look:
        """judge: raises Unfit for numbers that tell that a kernel's forms are wrong."""
        if reads_at_once(numbers.device):
            return cls((numbers, None, judge))
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(numbers.device))
        return cls((on_host, event, judge))

    def confirm(self) -> None:
        """Wait for the numbers and judge them, the first time."""
        if (pending := self.pending) is None:
            return
        numbers, event, judge = pending
        if event is not None:
            event.synchronize()
        judge(numbers.tolist())
        self.pending = None


def window_of(mask: Mask, size: Size, is_fitted: bool = True) -> Window | None:
    """Return a mask as a window at these lengths, or None.

    is_fitted: leave out keys that no query sees, and bounds behind all keys. Else keys are read from the first one on.
    """
    band = band_of(mask, size)
    if band is None:
        return None
    if band.sequences is not None:
        return (
            None if size.q_offset else Window(band.left, band.right, 0, (0, size.kv_len), True, band.check is not None)
        )
    left, right, offset, end = band.left, band.right, size.q_offset, size.q_offset + size.q_len
    first = 0 if left is None or not is_fitted else max(0, offset - left)
    stop = size.kv_len if right is None else torch.sym_min(size.kv_len, end + right)
    if left is not None and not _holds(end - 1 - left < size.kv_len):
        return None  # the last queries see nothing, and native kernels do not handle such rows
    if is_fitted and right is not None and _holds(offset + right >= stop - 1):
        right = None
    if is_fitted and left is not None and _holds(end - 1 - left <= first):
        left = None
    return Window(left, right, offset - first, (first, stop), False)


def _holds(condition: Any) -> bool:
    """Return whether a condition on lengths holds, in an export for all lengths."""
    if isinstance(condition, torch.SymBool) and compat.is_exporting():
        return compat.statically_known_true(condition)
    return bool(condition)


@dataclass(frozen=True)
class Intervals:
    """A mask of the keys around a query's position. Nothing is computed for such a mask of a few queries: kernels read
    where queries start and how many keys sequences have.

    left, right: numbers of keys before and after the position, both included. None means that there is no bound.
    offset: the position of the first query, or of each batch element's; None if the queries are the last ones.
    lens: the number of keys of each batch element; None for all keys.
    """

    left: int | None
    right: int | None
    offset: Offset | None
    lens: Tensor | None

    def with_tensors(self, offset: Offset | None, lens: Tensor | None) -> Intervals:
        """Return the same intervals with other tensors."""
        return Intervals(self.left, self.right, offset, lens)


def intervals_of(mask: Mask, size: Size, offset: Offset) -> Intervals | None:
    """A mask as intervals if it is a band, which may hide the keys behind the lengths of sequences, else None.

    No value of a tensor is read.
    """
    bands: list[Band] = []
    lens: Tensor | None = None
    for part in mask._joined():
        if part._definition.by_library and part.name == "padding":
            given = part._checked(size)["kv_lens"]
            if lens is not None or given is not part.params["kv_lens"]:
                return None
            lens = given
        else:
            band = band_of(part, size)
            if band is None or band.sequences is not None:
                return None
            bands.append(band)
    band = intersection(bands)
    if band is None or (band.left is not None and band.right is not None and band.left + band.right < 0):
        return None
    return Intervals(band.left, band.right, offset, lens)
