"""Backend "short": short sequences, with the whole mask as a tensor.

No list of blocks is made, and nothing is compiled for a mask. A mask of a thousand queries is small, and one call of a
kernel is faster than many steps, even if it computes some of what is hidden.

On a CPU torch's kernel runs, with the mask as what is added to the scores. Calls with gradients run here, and at first
calls without, see `flexmasks.backends.waiting`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends import short_gpu
from flexmasks.backends.added import backward_on_cpu, forward_on_cpu, grouped, is_added, shows
from flexmasks.backends.call import HALF_DTYPES, Call, Result, proven, transformed
from flexmasks.backends.short_call import ShortReplay
from flexmasks.backends.waiting import MAX_LENGTH, Uncompiled, uncompiled
from flexmasks.plans.mask_plan import GivenPlan, MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.traced import TracedScore
from flexmasks.plans.whole import visible_in

_ON_GPU = ("cuda",)


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    device = call.q.device.type
    if device not in ("cpu", *_ON_GPU):
        return f"it does not run on {device}"
    if call.is_traced and not (call.learns and device in _ON_GPU):
        return "inside torch.compile it is for scores that learn, on a GPU"
    if call.is_traced and (call.mask.opaque or cast(TracedScore, call.score).opaque):
        return "inside torch.compile it takes masks and scores that are known outside of it"
    if call.mask.is_given and device in _ON_GPU:
        return "on a GPU it takes a mask, not blocks"
    if call.learns and device not in _ON_GPU:
        return "on a CPU it gives no gradient to captured tensors of a score"
    reason = short_gpu.refuses(call) if device in _ON_GPU else refuses_on_cpu(call)
    if reason is not None:
        return reason
    if compat.transforms_active() or transformed():
        return "it does not run inside transforms of torch.func"
    if call.kernel_options:
        return "it takes no kernel_options"
    if call.score is not None and not is_added(call):
        return "it takes only score changes that add to the score"
    return None


def plan(call: Call) -> str:
    """Say what takes the place of a plan of blocks, or "" if nothing does."""
    if call.q.device.type in _ON_GPU:
        return ""
    return "none: torch's kernel gets the whole mask as a tensor, and computes empty blocks too"


def run(call: Call) -> Result:
    """Run the call."""
    if call.q.device.type in _ON_GPU:
        return proven(call, short_gpu.GpuShortReplay.of(call))
    replay = CpuShortReplay.of(call)
    return Result(*replay(call.q, call.k, call.v), replay)


# --- on a CPU ---


_MAX_MASK = 1 << 24  # elements


def refuses_on_cpu(call: Call) -> str | None:
    """Return why a call cannot run here, or None."""
    (_, heads, q_len, size), (kv_heads, kv_len) = call.q.shape, call.k.shape[1:3]
    if not 0 < max(q_len, kv_len) <= MAX_LENGTH:
        return f"on a CPU it is for up to {MAX_LENGTH:,} queries and keys"
    if call.q.dtype not in (*HALF_DTYPES, torch.float32):
        return f"on a CPU it takes float16, bfloat16 and float32, not {call.dtype}"
    if call.v.shape[3] != size:
        return "on a CPU it takes only values of q's head size, as torch's kernel does"
    if call.with_lse:
        return "on a CPU it gives no gradient of the lse"
    sizes = call.q.shape[:2] if call.score is not None else (call.q.shape[0], heads // kv_heads)
    if math.prod(sizes) * q_len * kv_len > _MAX_MASK:
        return f"on a CPU it takes masks of at most {_MAX_MASK:,} elements"
    return None


@dataclass(frozen=True)
class CpuShortReplay(ShortReplay):
    """A call on a CPU without q, k and v."""

    added: Tensor  # float32 [B or 1, Hkv or 1, grouped heads * Q, KV]: the bias, -inf where hidden
    hidden_rows: Tensor | None  # bool [B or 1, Hkv or 1, grouped heads * Q]: queries that see nothing, if there are any
    shows: bool  # whether torch's kernel shows all of `added`
    uncompiled: Uncompiled | None  # counts the kind's calls until these are compiled

    @classmethod
    def of(cls, call: Call) -> CpuShortReplay:
        if isinstance(call.mask, GivenPlan):
            visible = visible_in(call.mask.blocks().block_mask, *call.q.shape[:2])
        else:
            visible = cast(MaskPlan, call.mask).whole.visible
        bias = None if call.score is None else cast(ScorePlan, call.score).added
        numbers = torch.zeros((), dtype=torch.float32, device="cpu") if bias is None else bias.product()
        groups = call.q.shape[1] // call.k.shape[1]
        hidden_rows = ~visible.any(-1)
        added = torch.where(visible, numbers, -math.inf)
        return cls(
            visible=visible,
            bias=bias,
            scale=call.scale,
            with_lse=False,
            needs_grad=call.needs_grad,
            added=grouped(added, groups),
            shows=bias is None or shows(added),
            uncompiled=uncompiled(call),
            hidden_rows=grouped(hidden_rows[..., None], groups)[..., 0] if bool(hidden_rows.any()) else None,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that keeping the call takes."""
        return sum(x.nbytes for x in (self.visible, self.bias, self.added, self.hidden_rows) if x is not None)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.uncompiled is not None:
            self.uncompiled.count(q, k, v)
        return super().__call__(q, k, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return output and lse, see `ShortReplay.forward`.

        Where output or lse is not finite, the reference has computed it, so that nothing hidden was read.
        """
        if not self.shows:
            return self.by_reference(q, k, v)[0], None
        rows = self._rows(q, k)
        out, lse = forward_on_cpu(rows, k, v, self.added, self.scale)
        if self.hidden_rows is not None:
            out.masked_fill_(self.hidden_rows[..., None], 0)
            lse.masked_fill_(self.hidden_rows, 0)
        # In half precision the output of a score of +inf may be finite, the lse is not.
        if not bool((out.sum(dtype=torch.float32) + lse.sum()).isfinite()):
            return self.by_reference(q, k, v)[0], None
        return out.reshape(q.shape), lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
        *added: Tensor,
    ) -> tuple[Tensor, ...] | None:  # fmt: skip
        """Return the gradients of q, k and v, None if one is not finite."""
        rows = self._rows(q, k)
        upstream, result = self._rows(d_out, k), self._rows(out, k)
        grads = backward_on_cpu(upstream, rows, k, v, result, lse, self.added, self.scale)
        if not bool(torch.stack([x.sum(dtype=torch.float32) for x in grads]).isfinite().all()):
            return None
        return grads[0].reshape(q.shape), grads[1], grads[2]

    @staticmethod
    def _rows(x: Tensor, k: Tensor) -> Tensor:
        """Return queries with grouped heads as rows, [B, Hkv, grouped heads * Q, D]."""
        return x.reshape(len(x), k.shape[1], -1, x.shape[3])
