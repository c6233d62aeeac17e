"""Few queries on a GPU, by the library's own kernels.

The kernels read the tiles of keys that some query sees, and no other keys. Nothing is compiled for a mask: the whole
mask of a few queries is an input, or for a band where the queries start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from flexmasks import compat
from flexmasks.backends.added import is_added
from flexmasks.backends.call import Call, Maker, Replay
from flexmasks.kernels.direct import with_rows_together
from flexmasks.kernels.few_queries import attend_directly, runs_on_triton
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.whole import Added, Whole
from flexmasks.plans.windows import Intervals


def refuses(call: Call) -> str | None:
    """Return why a call of a few queries cannot run here, or None."""
    size, v_size = call.q.shape[3], call.v.shape[3]
    if not runs_on_triton(call.q.dtype, size, v_size):
        sizes = f"{size}" if v_size == size else f"{size} and {v_size}"
        return (
            "on a GPU it takes float16, bfloat16 and float32 with head sizes that 8 divides, up to 256, not "
            f"{call.dtype} with {sizes}"
        )
    if call.score is not None and call.cap is None and not is_added(call):
        return "on a GPU it takes only soft-caps and score changes that add to the score"
    return None


@dataclass(frozen=True)
class GpuDecodeReplay(Replay):
    """A call of a few queries without q, k and v.

    With a page table, it is called with whole caches in place of k and v.
    """

    mask: Whole | Intervals
    added: Added | None  # what the score change adds
    cap: float | None
    scale: float | None
    with_lse: bool
    pages: Tensor | None  # the page table, as it was given
    table: Tensor | None  # the same as kernels take it

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        mask = "intervals" if isinstance(self.mask, Intervals) else "whole"
        return mask, *(["added"] if self.added is not None else []), *(["table"] if self.pages is not None else [])

    @property
    def nbytes(self) -> int:
        return self.mask.nbytes + (0 if self.added is None else self.added.nbytes)

    @classmethod
    def of(cls, call: Call) -> GpuDecodeReplay:
        intervals, are_last = call.mask.intervals, call.pages is not None and call.pages.are_last
        mask: Whole | Intervals
        if intervals is None:
            mask = cast(MaskPlan, call.mask).whole
        else:
            mask = intervals.with_tensors(None, intervals.lens) if are_last else intervals
        added = None if call.score is None or call.cap is not None else cast(ScorePlan, call.score).added
        pages = None if call.pages is None else call.pages.table.detach()
        return cls(mask, added, call.cap, call.scale, call.with_lse, pages, _as_table(pages))

    def taken(self) -> tuple[Sequence[Tensor], Sequence[Tensor], Maker]:
        mask, added, fixed = self.mask, self.added, (self.cap, self.scale, self.with_lse)
        of_mask: Any = mask
        if isinstance(mask, Intervals):
            offset, lens = (isinstance(x, Tensor) for x in (mask.offset, mask.lens))
            of_mask = [x for x in (mask.offset, mask.lens) if isinstance(x, Tensor)]
            # Of the tensors, only their places stay.
            mask = mask.with_tensors(None if offset else mask.offset, None)
        counts = len(of_mask), 0 if added is None else len([t for t in added if t is not None])

        def make(read: Sequence[Any], captured: Sequence[Any]) -> GpuDecodeReplay:
            tensors, behind = iter(read), sum(counts)
            made: Whole | Intervals
            if isinstance(mask, Intervals):
                made = mask.with_tensors(next(tensors) if offset else mask.offset, next(tensors) if lens else None)
            else:
                made = Whole(*read[: counts[0]])
            numbers = Added(*read[counts[0] : behind]) if counts[1] else None
            pages = read[behind] if len(read) > behind else None
            return GpuDecodeReplay(made, numbers, *fixed, pages, _as_table(pages))

        read = [*of_mask, *(t for t in added or () if t is not None), *([] if self.pages is None else [self.pages])]
        return read, [], make

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = with_rows_together(q, k, v)
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
        if is_plain and not has_torch_function((q,)):  # only that of a TorchFunctionMode
            return attend_directly(name, arguments, with_lse=self.with_lse)
        with torch.no_grad():
            out, lse = getattr(torch.ops.flexmasks, name)(*arguments)
        return out, lse if self.with_lse else None


def _as_table(table: Tensor | None) -> Tensor | None:
    if table is None:
        return None
    table = table if table.dtype in (torch.int32, torch.int64) else table.int()
    return table if table.stride(1) == 1 else table.contiguous()
