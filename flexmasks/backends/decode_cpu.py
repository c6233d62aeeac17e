"""Few queries on a CPU, by torch's kernel.

The mask of a few queries is smaller than the keys of one head, so it is computed as a whole: no lists of blocks are
needed, and nothing is compiled. Grouped heads are rows of one product. Keys before the first and after the last that a
batch element sees are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from flexmasks.backends import cpu_kernel
from flexmasks.backends.added import is_added, shows
from flexmasks.backends.call import HALF_DTYPES, Call, Replay
from flexmasks.backends.plain import attend, scores_of
from flexmasks.blocks.elements import over_indices
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.workers import Workers

# Batch elements are computed one by one if together they would read this many times as many keys. Many calls of a
# kernel wait for each other where other processes take the cores.
_MANY_TIMES = 3


def refuses(call: Call) -> str | None:
    """Return why a call of a few queries cannot run here, or None."""
    if call.q.dtype not in (*HALF_DTYPES, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {call.dtype}"
    if call.q.dtype in HALF_DTYPES and call.q.shape[3] != call.v.shape[3]:
        return f"in {call.dtype} it takes only values of q's head size, as torch's kernel does"
    if call.q.dtype in HALF_DTYPES and call.score is not None and not is_added(call):
        return f"in {call.dtype} it takes only score changes that add to the score"
    return None


class _Part(NamedTuple):
    """Batch elements that are computed together, and their keys.

    The keys are those from the first to the last that one of the batch elements sees.
    """

    batch: slice
    keys: slice


@dataclass(frozen=True)
class CpuDecodeReplay(Replay):
    """A call of a few queries without q, k and v."""

    visible: Tensor  # bool [B or 1, H or 1, Q, KV]
    sees: Tensor | None  # bool [B or 1, H or 1, Q]: whether a query sees a key with a score above -inf; None if all do
    added: Tensor  # float32 [B or 1, Hkv or 1, grouped heads * Q, KV]: what is added to scores, -inf where hidden
    shows: bool  # whether torch's kernel shows all of `added`
    score_mod: Callable[..., Tensor] | None  # a score change that is more than `added`
    parts: list[_Part]
    scale: float | None
    with_lse: bool

    @property
    def nbytes(self) -> int:
        return self.visible.nbytes + self.added.nbytes

    @classmethod
    def of(cls, call: Call) -> CpuDecodeReplay:
        q, k = call.q, call.k
        visible = cast(MaskPlan, call.mask).whole.visible
        score_mod = None if call.score is None else call.score.mod()
        is_bias = is_added(call)
        added = torch.zeros((), device=q.device)
        if is_bias:
            added, score_mod = cast(ScorePlan, call.score).added.product(), None
        added = torch.where(visible, added, -math.inf)
        sees = (added != -math.inf).any(-1)
        return cls(
            visible=visible,
            sees=None if bool(sees.all()) else sees,
            added=cpu_kernel.grouped(added, q.shape[1] // k.shape[1]),
            shows=not is_bias or shows(added),
            score_mod=score_mod,
            parts=_parts(visible, k),
            scale=call.scale,
            with_lse=call.with_lse,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = q.detach(), k.detach(), v.detach()
        results = self._results(q, k, v)
        out, lse = results[0] if len(results) == 1 else (torch.cat(xs) for xs in zip(*results, strict=True))
        if self.sees is not None:
            out = torch.where(self.sees[..., None], out, 0)
            lse = torch.where(self.sees, lse, -math.inf)
        return out, lse if self.with_lse else None

    def _results(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return output and lse of each part. Each of a few threads takes the next part that is left."""
        keys = sum(part.keys.stop - part.keys.start for part in self.parts)
        workers = Workers.of(q.device, keys * q.shape[1] * q.shape[2] * max(q.shape[3], v.shape[3]), len(self.parts))
        results: dict[int, tuple[Tensor, Tensor]] = {}
        numbers = iter(range(len(self.parts)))

        def compute() -> None:
            for n in numbers:
                part = self.parts[n]
                own_k, own_v = (x[part.batch, :, part.keys] for x in (k, v))
                results[n] = self._attend(q[part.batch], own_k, own_v, part)

        if len(self.parts) == 1:
            compute()
        else:
            workers.all([compute] * workers.count)
        return [results[n] for n in range(len(self.parts))]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
        """Return output and lse of a part, right where a query sees a key."""
        (batch, heads, q_len, size), kv_heads = q.shape, k.shape[1]
        if not k.shape[2]:
            return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3], dtype=torch.float32)
        rows = q.reshape(batch, kv_heads, -1, size)
        if self.score_mod is None and self.shows and size == v.shape[3]:
            added = _of_part(self.added, part)
            out, lse = cpu_kernel.forward(rows, k, v, added, self.scale)
            # A hidden key may hold anything. In half precision the output of a score of +inf may be finite.
            if bool(lse.amax() < math.inf) and not bool(out.isnan().any()):
                return out.reshape(q.shape), lse.reshape(batch, heads, q_len)
        return self._attend_in_steps(q, rows, k, v, part)

    def _attend_in_steps(self, q: Tensor, rows: Tensor, k: Tensor, v: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
        """Attend by operations of torch, in float32; hidden scores are replaced, whatever they are."""

        def changed(scores: Tensor) -> Tensor:
            if self.score_mod is None:
                return (scores.view(*rows.shape[:3], -1) + _of_part(self.added, part)).view_as(scores)
            indices = _indices(part.batch, q.shape[1], q.shape[2], part.keys)
            return over_indices(self.score_mod, (0,))(scores, *indices)

        out, lse, _ = attend(
            scores_of(q.float(), k.float(), self.scale, changed, _of_part(self.visible, part)), v.float()
        )
        return out.to(q.dtype), lse


def _indices(batch: slice, heads: int, q_len: int, keys: slice) -> list[Tensor]:
    runs = (batch.start, batch.stop), (0, heads), (0, q_len), (keys.start, keys.stop)
    return [torch.arange(*run, device="cpu") for run in runs]


def _of_part(x: Tensor, part: _Part) -> Tensor:
    return (x if len(x) == 1 else x[part.batch])[..., part.keys]


def _parts(visible: Tensor, k: Tensor) -> list[_Part]:
    """Return the batch elements that are computed together, with their keys.

    Each batch element is a part of its own if that leaves out most keys.
    """
    batch, kv_len = k.shape[0], k.shape[2]
    seen = visible.any(1).any(1).byte()  # [B or 1, KV]
    firsts, lasts = seen.argmax(1).tolist(), (kv_len - seen.flip(1).argmax(1)).tolist()
    spans = [
        (first, last) if any_seen else (0, 0)
        for first, last, any_seen in zip(firsts, lasts, seen.any(1).tolist(), strict=True)
    ]
    filled = [span for span in spans if span[1]] or [(0, 0)]
    first, last = min(a for a, _ in filled), max(b for _, b in filled)
    if len(spans) == 1 or batch * (last - first) <= _MANY_TIMES * sum(b - a for a, b in spans):
        return [_Part(slice(0, batch), slice(first, last))]
    spans = spans if len(spans) == batch else spans * batch
    return [_Part(slice(n, n + 1), slice(*span)) for n, span in enumerate(spans)]
