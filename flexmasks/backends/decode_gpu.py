"""Few queries on a GPU, by the library's own kernels.

The kernels read the tiles of keys that some query sees, and no other keys. Nothing is compiled for a mask: the whole
mask of a few queries is an input.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.added import is_added
from flexmasks.backends.call import Call
from flexmasks.kernels.few_queries import attend, attend_few, runs_on_triton
from flexmasks.plans.plan import GivenPlan, MaskPlan, ScorePlan
from flexmasks.plans.recorded import LOCK, Recorded
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

    whole: Whole
    added: Added | None  # what the score change adds
    cap: float | None
    scale: float | None
    with_lse: bool
    table: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes + (0 if self.added is None else self.added.nbytes)

    @classmethod
    def of(cls, call: Call, table: Tensor | None = None) -> GpuDecode:
        """Return the call."""
        whole = cast(Callable[[], Whole], call.whole)()
        added = None if call.added is None or call.cap is not None else call.added()
        return cls(whole, added, call.cap, call.scale, call.with_lse, None if table is None else _as_table(table))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        visible, *tiles = self.whole
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        bias, weight = (None, None) if self.added is None else self.added
        arguments: Any = (q, k, v, self.table, *tiles, visible, weight, bias, scale, self.cap)
        is_plain = type(q) is type(k) is type(v) is Tensor and not compat.in_dispatch_mode()
        if is_plain and not compat.in_function_mode():
            return attend(*arguments, with_lse=self.with_lse)
        with torch.no_grad():
            out, lse = attend_few(*arguments)
        return out, lse if self.with_lse else None


def _as_table(table: Tensor) -> Tensor:
    table = table.detach() if table.dtype in (torch.int32, torch.int64) else table.int()
    return table if table.stride(1) == 1 else table.contiguous()


class DecodeRenewal:
    """A call of a few queries that is made again with other tensors.

    They have the layouts of the tensors in whose places they come.

    With pages, the last two tensors are the lengths of the sequences and the page table.

    whole, added: recorded operations, and the places of their inputs among the tensors.
    q_len: the number of queries if they are the last ones of each sequence; where they start is then one more input,
        behind the tensors.
    """

    def __init__(
        self,
        call: GpuDecode,
        whole: tuple[Recorded, Sequence[int]],
        added: tuple[Recorded, Sequence[int]] | None,
        q_len: int | None,
    ) -> None:
        self._fixed = call.cap, call.scale, call.with_lse
        self._whole, self._added, self._q_len, self._has_pages = whole, added, q_len, call.table is not None

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

        where_last: where the queries start, if they are the last ones of each sequence.

        The result is None if the call does not come from recorded operations.
        """
        held = tensors if where_last is None else [*tensors, where_last]
        places = {id(t): n for n, t in enumerate(held)}
        if isinstance(mask, GivenPlan) or len(places) < len(held):
            return None
        recorded = [mask.whole[1]]
        plans: list[MaskPlan | ScorePlan] = [mask]
        if call.added is not None and score is not None:
            recorded.append(score.added[1])
            plans.append(score)
        if any(r is None for r in recorded) or any(id(t) not in places for p in plans for t in p.inputs):
            return None
        whole, *added = (
            (cast(Recorded, r), [places[id(t)] for t in p.inputs]) for r, p in zip(recorded, plans, strict=True)
        )
        return cls(call, whole, added[0] if added else None, None if where_last is None else mask.size.q_len)

    def __call__(self, tensors: Sequence[Tensor]) -> RenewedDecode:
        """Return the call with these tensors."""
        return RenewedDecode(self, [t.detach() for t in tensors])

    def turn(self, device: torch.device) -> Hashable:
        """Return what changes when the tensors that were lent last may change."""
        added = 0 if self._added is None else self._added[0].turn
        return self._whole[0].turn, added, compat.raw_stream(device) if device.type == "cuda" else 0

    def lend(self, tensors: Sequence[Tensor]) -> GpuDecode:
        """Return the call with these tensors, until another one is lent; the caller holds LOCK."""
        table = _as_table(tensors[-1]) if self._has_pages else None
        if self._q_len is not None:
            tensors = [*tensors, offset_of_last(tensors[-2], self._q_len)]
        whole, inputs = self._whole
        visible = Whole(*whole.lend([tensors[n] for n in inputs]))
        added = None
        if self._added is not None:
            change, inputs = self._added
            added = Added(*change.lend([tensors[n] for n in inputs]))
        return GpuDecode(visible, added, *self._fixed, table)


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
