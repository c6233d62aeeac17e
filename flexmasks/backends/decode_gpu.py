"""Few queries on a GPU, by the library's own kernels.

The kernels read the tiles of keys that some query sees, and no other keys. Nothing is compiled for a mask: the whole
mask of a few queries is an input, or for a band where the queries start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from flexmasks import compat
from flexmasks.backends.added import is_added
from flexmasks.backends.call import Call, Kernel, Plans
from flexmasks.kernels.direct import with_rows_together
from flexmasks.kernels.few_queries import attend_directly, runs_on_triton
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


def kernel(call: Call) -> Kernel:
    adds = call.score is not None and call.cap is None
    are_last = call.pages is not None and call.pages.are_last
    return GpuKernel(adds, are_last, call.cap, call.scale, call.with_lse)


@dataclass(frozen=True)
class GpuKernel(Kernel):
    """A few queries on a GPU. With a page table k and v are whole caches."""

    adds: bool  # the score change adds numbers
    are_last: bool  # queries are the last ones of sequences in pages
    cap: float | None
    scale: float | None
    with_lse: bool

    def forms(self, plans: Plans) -> tuple[Whole | Intervals, Added | None, Tensor | None]:
        intervals: Intervals | None = plans.mask.checked_intervals()
        if intervals is not None and self.are_last:
            intervals = intervals.with_tensors(None, intervals.lens)
        added = plans.score.added if self.adds else None
        table = None if plans.pages is None else _as_table(plans.pages.table.detach())
        return plans.mask.whole if intervals is None else intervals, added, table

    def instead_of_blocks(self, forms: tuple[Any, ...]) -> str:
        reads_numbers = isinstance(forms[0], Intervals)
        return "none: the kernel computes the keys of each query from the numbers of the mask" if reads_numbers else ""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any
    ) -> tuple[Tensor, Tensor | None]:
        mask, added, table = forms
        q, k, v = with_rows_together(q, k, v)
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        bias, weight = (None, None) if added is None else added
        change = weight, bias, scale, self.cap
        arguments: Any
        if isinstance(mask, Intervals):
            name = "attend_band"
            starts, start = (mask.offset, None) if isinstance(mask.offset, Tensor) else (None, mask.offset)
            arguments = (q, k, v, table, starts, mask.lens, *change, start, mask.left, mask.right)
        else:
            name = "attend_few"
            visible, *tiles = mask
            arguments = (q, k, v, table, *tiles, visible, *change)
        is_plain = type(q) is type(k) is type(v) is Tensor and not compat.in_dispatch_mode()
        if is_plain and not has_torch_function((q,)):  # only that of a TorchFunctionMode
            return attend_directly(name, arguments, with_lse=self.with_lse)
        with torch.no_grad():
            out, lse = getattr(torch.ops.flexmasks, name)(*arguments)
        return out, lse if self.with_lse else None


def _as_table(table: Tensor) -> Tensor:
    table = table if table.dtype in (torch.int32, torch.int64) else table.int()
    return table if table.stride(1) == 1 else table.contiguous()
