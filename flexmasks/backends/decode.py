"""Backend "decode": a few queries, with the mask as a tensor.

The mask of a few queries is smaller than the keys of one head, so it is computed as a whole: no lists of blocks are
needed, and nothing is compiled. On a GPU, a mask that is a band is no tensor: the kernel gets its numbers. On a CPU
torch's kernel runs, grouped heads are rows of one product, and keys before the first and after the last that a batch
element sees are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexmasks.backends import decode_gpu
from flexmasks.backends.added import forward_on_cpu, grouped, is_added, shows
from flexmasks.backends.call import HALF_DTYPES, TRANSFORMED, Call, Kernel, Plans
from flexmasks.backends.plain import attend, scores_of
from flexmasks.blocks.decide import dependence
from flexmasks.blocks.elements import over_indices
from flexmasks.devices import why_no_own_kernels
from flexmasks.workers import Workers

_MAX_QUERIES, _MAX_QUERIES_ON_GPU = 64, 2048
_ANY_LENGTH_UP_TO = 4
_KEYS_FOR_A_QUERY = 8  # with fewer keys for each query, other backends are as fast
_ON_GPU = ("cuda",)
_MAX_SCORES, _MAX_SCORES_ON_GPU = 1 << 26, 1 << 28  # held at a time; on a GPU marks of visible keys count


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    device = call.device_type
    if device not in ("cpu", *_ON_GPU):
        return f"it does not run on {device}"
    if lacking := why_no_own_kernels(call.q.device):
        return lacking
    if call.mask.is_given:
        return "it takes a mask, not blocks"
    if not are_few(call.q.shape[2], call.k.shape[2], call.q.device):
        return (
            f"it is for up to {_max_queries(call.q.device):,} queries, which from {_ANY_LENGTH_UP_TO + 1} queries on "
            f"have at least {_KEYS_FOR_A_QUERY} times as many keys"
        )
    most = _MAX_SCORES_ON_GPU if device in _ON_GPU else _MAX_SCORES
    if _scores_held(call, most) > most:
        return f"it holds at most {most:,} scores"
    if call.needs_grad:
        return "it has no gradients"
    if call.context.is_transformed:
        return TRANSFORMED
    if call.kernel_options:
        return "it takes no kernel_options"
    return decode_gpu.refuses(call) if device in _ON_GPU else refuses_on_cpu(call)


def are_few(q_len: int, kv_len: int, device: torch.device) -> bool:
    """Return whether queries are so few that their whole mask is small."""
    return q_len <= _ANY_LENGTH_UP_TO or (q_len <= _max_queries(device) and kv_len >= _KEYS_FOR_A_QUERY * q_len)


def _max_queries(device: torch.device) -> int:
    return _MAX_QUERIES_ON_GPU if device.type in _ON_GPU else _MAX_QUERIES


def _scores_held(call: Call, most: int) -> int:
    """Return how many scores, or marks of visible keys, are in memory at a time. Up to `most` it is a bound."""
    (batch, heads, q_len, _), kv_len = call.q.shape, call.k.shape[2]
    adds = call.score is not None and call.cap is None
    if call.device_type in _ON_GPU and not adds and batch * heads * q_len * kv_len > most:
        if call.mask.intervals is not None:
            return 0
        batch, heads = dependence(call.mask.function(), batch, heads, call.q.device, reads_values=False)
    return batch * heads * q_len * kv_len


def finds_last_queries(call: Call) -> bool:
    """Return whether the library's own kernels find the last queries of sequences by their lengths."""
    has_no_bias = call.score is None or call.cap is not None
    return has_no_bias and call.mask.intervals is not None


def kernel(call: Call) -> Kernel:
    if call.device_type in _ON_GPU:
        return decode_gpu.kernel(call)
    groups = call.q.shape[1] // call.k.shape[1]
    return CpuKernel(groups, call.k.shape[0], is_added(call), call.scale, call.with_lse)


# --- on a CPU ---


# Batch elements are computed one by one if together they would read this many times as many keys. Many calls of a
# kernel wait for each other where other processes take the cores.
_MANY_TIMES = 3


def refuses_on_cpu(call: Call) -> str | None:
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


class _Form(NamedTuple):
    """The whole mask of a few queries, and what a score change adds."""

    visible: Tensor  # bool [B or 1, H or 1, Q, KV]
    sees: Tensor | None  # bool [B or 1, H or 1, Q]: whether a query sees a key with a score above -inf; None if all do
    added: Tensor  # float32 [B or 1, Hkv or 1, grouped heads * Q, KV]: what is added to scores, -inf where hidden
    shows: bool  # whether torch's kernel shows all of `added`
    score_mod: Callable[..., Tensor] | None  # a score change that is more than `added`
    parts: list[_Part]


@dataclass(frozen=True)
class CpuKernel(Kernel):
    """A few queries on a CPU."""

    groups: int  # query heads of a key head
    batch: int
    is_bias: bool  # the score change adds
    scale: float | None
    with_lse: bool

    def forms(self, plans: Plans) -> tuple[_Form]:
        visible = plans.mask.whole.visible
        added, score_mod = torch.zeros((), device=visible.device), None
        if self.is_bias:
            added = plans.score.added.product()
        elif plans.score is not None:
            score_mod = plans.score.mod()
        added = torch.where(visible, added, -math.inf)
        sees = (added != -math.inf).any(-1)
        return (
            _Form(
                visible=visible,
                sees=None if bool(sees.all()) else sees,
                added=grouped(added, self.groups),
                shows=not self.is_bias or shows(added),
                score_mod=score_mod,
                parts=_parts(visible, self.batch),
            ),
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: _Form
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, (mask,) = q.detach(), k.detach(), v.detach(), forms
        results = self._results(q, k, v, mask)
        out, lse = results[0] if len(results) == 1 else (torch.cat(xs) for xs in zip(*results, strict=True))
        if mask.sees is not None:
            out = torch.where(mask.sees[..., None], out, 0)
            lse = torch.where(mask.sees, lse, -math.inf)
        return out, lse if self.with_lse else None

    def _results(self, q: Tensor, k: Tensor, v: Tensor, mask: _Form) -> list[tuple[Tensor, Tensor]]:
        """Return output and lse of each part. Each of a few threads takes the next part that is left."""
        parts = mask.parts
        keys = sum(part.keys.stop - part.keys.start for part in parts)
        workers = Workers.of(q.device, keys * q.shape[1] * q.shape[2] * max(q.shape[3], v.shape[3]), len(parts))
        results: dict[int, tuple[Tensor, Tensor]] = {}
        numbers = iter(range(len(parts)))

        def compute() -> None:
            for n in numbers:
                part = parts[n]
                own_k, own_v = (x[part.batch, :, part.keys] for x in (k, v))
                results[n] = self._attend(q[part.batch], own_k, own_v, mask, part)

        if len(parts) == 1:
            compute()
        else:
            workers.all([compute] * workers.count)
        return [results[n] for n in range(len(parts))]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: _Form, part: _Part) -> tuple[Tensor, Tensor]:
        """Return output and lse of a part, right where a query sees a key."""
        (batch, heads, q_len, size), kv_heads = q.shape, k.shape[1]
        if not k.shape[2]:
            return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3], dtype=torch.float32)
        rows = q.reshape(batch, kv_heads, -1, size)
        if mask.score_mod is None and mask.shows and size == v.shape[3]:
            added = _of_part(mask.added, part)
            out, lse = forward_on_cpu(rows, k, v, added, self.scale)
            # A hidden key may hold anything. In half precision the output of a score of +inf may be finite.
            if bool(lse.amax() < math.inf) and not bool(out.isnan().any()):
                return out.reshape(q.shape), lse.reshape(batch, heads, q_len)
        return self._attend_in_steps(q, rows, k, v, mask, part)

    def _attend_in_steps(
        self, q: Tensor, rows: Tensor, k: Tensor, v: Tensor, mask: _Form, part: _Part
    ) -> tuple[Tensor, Tensor]:
        """Attend by operations of torch, in float32; hidden scores are replaced, whatever they are."""

        def changed(scores: Tensor) -> Tensor:
            if mask.score_mod is None:
                return (scores.view(*rows.shape[:3], -1) + _of_part(mask.added, part)).view_as(scores)
            indices = _indices(part.batch, q.shape[1], q.shape[2], part.keys)
            return over_indices(mask.score_mod, (0,))(scores, *indices)

        out, lse, _ = attend(
            scores_of(q.float(), k.float(), self.scale, changed, _of_part(mask.visible, part)), v.float()
        )
        return out.to(q.dtype), lse


def _indices(batch: slice, heads: int, q_len: int, keys: slice) -> list[Tensor]:
    runs = (batch.start, batch.stop), (0, heads), (0, q_len), (keys.start, keys.stop)
    return [torch.arange(*run, device="cpu") for run in runs]


def _of_part(x: Tensor, part: _Part) -> Tensor:
    return (x if len(x) == 1 else x[part.batch])[..., part.keys]


def _parts(visible: Tensor, batch: int) -> list[_Part]:
    """Return the batch elements that are computed together, with their keys.

    Each batch element is a part of its own if that leaves out most keys.
    """
    kv_len = visible.shape[3]
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
