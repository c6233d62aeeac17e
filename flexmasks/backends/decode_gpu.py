"""Few queries on a GPU, by the library's own kernels.

The kernels read the tiles of keys that some query sees, and no other keys. Nothing is compiled for a mask: the whole
mask of a few queries is an input, or for a band where the queries start.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.added import is_added
from flexmasks.backends.call import Call
from flexmasks.kernels.few_queries import attend_directly, runs_on_triton
from flexmasks.plans.intervals import Intervals
from flexmasks.plans.plan import GivenPlan, MaskPlan, ScorePlan
from flexmasks.plans.recorded import LOCK, Remade
from flexmasks.plans.shifted import offset_of_last
from flexmasks.plans.whole import Added, Whole


def refuses(call: Call) -> str | None:
    """Return why a call of a few queries cannot run here, or None."""
    size, v_size = call.q.shape[3], call.v.shape[3]
    if not runs_on_triton(call.q.dtype, size, v_size):
        sizes = f"{size}" if v_size == size else f"{size} and {v_size}"
        return (
            "on a GPU it takes float16, bfloat16 and float32 with head sizes that 8 divides, up to 256, not "
            f"{call.dtype} with {sizes}"
        )
    if call.score_mod is not None and call.cap is None and not is_added(call):
        return "on a GPU it takes only soft-caps and score changes that add to the score"
    return None


@dataclass(frozen=True)
class GpuDecode:
    """A call of a few queries without q, k and v.

    With a page table, it is called with whole caches in place of k and v.
    """

    mask: Whole | Intervals
    added: Added | None  # what the score change adds
    cap: float | None
    scale: float | None
    with_lse: bool
    table: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.mask.nbytes + (0 if self.added is None else self.added.nbytes)

    @classmethod
    def of(cls, call: Call, table: Tensor | None = None, are_last: bool = False) -> GpuDecode:
        """Return the call.

        are_last: the queries are the last ones of each sequence.
        """
        intervals = call.intervals()
        mask: Whole | Intervals
        if intervals is None:
            mask = cast(Callable[[], Whole], call.whole)()
        else:
            offset, lens = (x.detach() if isinstance(x, Tensor) else x for x in (intervals.offset, intervals.lens))
            mask = intervals.with_tensors(None if are_last else offset, cast(Tensor | None, lens))
        added = None if call.added is None or call.cap is not None else call.added()
        table = None if table is None else _as_table(table.detach())
        return cls(mask, added, call.cap, call.scale, call.with_lse, table)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = compat.with_rows_together(q, k, v)
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        bias, weight = (None, None) if self.added is None else self.added
        change = weight, bias, scale, self.cap
        mask = self.mask
        arguments: Any
        if isinstance(mask, Intervals):
            name = "attend_band"
            starts, start = (mask.offset, None) if isinstance(mask.offset, Tensor) else (None, mask.offset)
            arguments = (q, k, v, self.table, starts, mask.lens, *change, start, mask.left, mask.right)
        else:
            name = "attend_few"
            visible, *tiles = mask
            arguments = (q, k, v, self.table, *tiles, visible, *change)
        is_plain = type(q) is type(k) is type(v) is Tensor and not compat.in_dispatch_mode()
        if is_plain and not compat.in_function_mode():
            return attend_directly(name, arguments, with_lse=self.with_lse)
        with torch.no_grad():
            out, lse = getattr(torch.ops.flexmasks, name)(*arguments)
        return out, lse if self.with_lse else None


def _as_table(table: Tensor) -> Tensor:
    table = table if table.dtype in (torch.int32, torch.int64) else table.int()
    return table if table.stride(1) == 1 else table.contiguous()


class _RenewedIntervals(NamedTuple):
    """Intervals whose tensors are among a call's tensors.

    without_tensors: the intervals, with None in place of tensors.
    offset, lens: the places of the tensors; None if there is no tensor.
    """

    without_tensors: Intervals
    offset: int | None
    lens: int | None

    @classmethod
    def of(cls, intervals: Intervals, made_from: Intervals, places: dict[int, int]) -> _RenewedIntervals | None:
        """Return None if a tensor is not among the call's tensors.

        made_from: the same intervals with the call's own tensors.
        places: places of the call's tensors by their ids.
        """
        has_offset, has_lens = isinstance(intervals.offset, Tensor), intervals.lens is not None
        offset = places.get(id(made_from.offset)) if has_offset else None
        lens = places.get(id(made_from.lens)) if has_lens else None
        if (has_offset and offset is None) or (has_lens and lens is None):
            return None
        return cls(intervals.with_tensors(None if has_offset else intervals.offset, None), offset, lens)

    def renewed(self, tensors: Sequence[Tensor]) -> Intervals:
        """Return the intervals with a call's tensors."""
        offset = self.without_tensors.offset if self.offset is None else tensors[self.offset]
        return self.without_tensors.with_tensors(offset, None if self.lens is None else tensors[self.lens])


class DecodeRenewal:
    """A call of a few queries that is made again with other tensors.

    They have the layouts of the tensors in whose places they come.

    With pages, the last two tensors are the lengths of the sequences and the page table.

    mask, added: how the mask, and what the score change adds, come from a call's tensors.
    q_len: the number of queries if recorded operations read where the last queries of each sequence start, from one
        more tensor behind the others; else None.
    """

    def __init__(
        self, call: GpuDecode, mask: Remade | _RenewedIntervals, added: Remade | None, q_len: int | None
    ) -> None:
        self._fixed = call.cap, call.scale, call.with_lse
        self._mask, self._added, self._q_len, self._has_pages = mask, added, q_len, call.table is not None
        self._recorded = [part.recorded for part in (mask, added) if isinstance(part, Remade)]

    @classmethod
    def of(
        cls,
        call: GpuDecode,
        mask: MaskPlan | GivenPlan,
        score: ScorePlan | None,
        tensors: Sequence[Tensor],
        where_last: Tensor | None,
    ) -> DecodeRenewal | None:
        """Return the renewal of a call.

        where_last: where the queries start, if they are the last ones of each sequence and the plans read it.

        The result is None if the call comes neither from recorded operations nor from intervals.
        """
        held = tensors if where_last is None else [*tensors, where_last]
        places = {id(t): n for n, t in enumerate(held)}
        if isinstance(mask, GivenPlan) or len(places) < len(held):
            return None
        own_mask: Remade | _RenewedIntervals | None
        if isinstance(call.mask, Intervals):
            own_mask = _RenewedIntervals.of(call.mask, cast(Intervals, mask.intervals), places)
        else:
            own_mask = Remade.of(mask.whole[1], mask.inputs, places)
        added = None
        if call.added is not None and score is not None:
            added = Remade.of(score.added[1], score.inputs, places)
            if added is None:
                return None
        if own_mask is None:
            return None
        reads_where_last = any(isinstance(part, Remade) and len(tensors) in part.inputs for part in (own_mask, added))
        return cls(call, own_mask, added, mask.size.q_len if reads_where_last else None)

    def __call__(self, tensors: Sequence[Tensor]) -> RenewedDecode | GpuDecode:
        """Return the call with these tensors."""
        own = [t.detach() for t in tensors]
        return RenewedDecode(self, own) if self._recorded else self.lend(own)

    def turn(self, device: torch.device) -> Hashable:
        """Return what changes when the tensors that were lent last may change."""
        stream = compat.raw_stream(device) if device.type == "cuda" else 0
        return stream, *(recorded.turn for recorded in self._recorded)

    def lend(self, tensors: Sequence[Tensor]) -> GpuDecode:
        """Return the call with these tensors.

        If the call has recorded operations, it holds until another one is lent, and the caller holds LOCK.
        """
        table = _as_table(tensors[-1]) if self._has_pages else None
        if self._q_len is not None:
            tensors = [*tensors, offset_of_last(tensors[-2], self._q_len)]
        mask = Whole(*self._mask.lend(tensors)) if isinstance(self._mask, Remade) else self._mask.renewed(tensors)
        added = None if self._added is None else Added(*self._added.lend(tensors))
        return GpuDecode(mask, added, *self._fixed, table)


class RenewedDecode:
    """A call of a few queries whose mask lies in lent memory.

    The mask is made when the call runs, if another mask has been made there since.
    """

    nbytes = 0

    def __init__(self, renewal: DecodeRenewal, tensors: Sequence[Tensor]) -> None:
        self._renewal, self._tensors = renewal, tensors
        self._call: GpuDecode | None = None
        self._turn: Hashable = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        with LOCK:
            if self._call is None or self._turn != self._renewal.turn(q.device):
                self._call = self._renewal.lend(self._tensors)
                self._turn = self._renewal.turn(q.device)
            return self._call(q, k, v)
