"""Backend "short": short sequences, with the whole mask as a tensor.

No list of blocks is made, and nothing is compiled for a mask. A mask of a thousand queries is small, and one call of a
kernel is faster than many steps, even if it computes some of what is hidden.

On a CPU torch's kernel runs, with the mask as what is added to the scores. Calls with gradients run here, and at first
calls without, see `flexmasks.backends.waiting`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexmasks.backends import short_gpu
from flexmasks.backends.added import backward_on_cpu, forward_on_cpu, grouped, is_added, shows
from flexmasks.backends.call import HALF_DTYPES, Call, Kernel, Plans
from flexmasks.backends.short_kernel import ShortKernel
from flexmasks.backends.waiting import MAX_LENGTH, Uncompiled, uncompiled
from flexmasks.devices import why_no_own_kernels
from flexmasks.plans.mask_plan import GivenPlan
from flexmasks.plans.whole import Added, Summand, visible_in

_ON_GPU = ("cuda",)


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    device = call.device_type
    if device not in ("cpu", *_ON_GPU):
        return f"it does not run on {device}"
    if lacking := why_no_own_kernels(call.q.device):
        return lacking
    if call.is_traced and not (call.learns and device in _ON_GPU):
        return "inside torch.compile it is for scores that learn, on a GPU"
    if call.is_traced and (any(part.opaque for part in call.parts)):
        return "inside torch.compile it takes masks and scores that are known outside of it"
    if call.mask.is_given and device in _ON_GPU:
        return "on a GPU it takes a mask, not blocks"
    if call.learns and device not in _ON_GPU:
        return "on a CPU it gives no gradient to captured tensors of a score"
    reason = short_gpu.refuses(call) if device in _ON_GPU else refuses_on_cpu(call)
    if reason is not None:
        return reason
    if call.context.has_transforms or call.context.is_transformed:
        return "it does not run inside transforms of torch.func"
    if call.kernel_options:
        return "it takes no kernel_options"
    if call.score is not None and not is_added(call):
        return "it takes only score changes that add to the score"
    return None


def kernel(call: Call) -> Kernel:
    if call.device_type in _ON_GPU:
        return short_gpu.kernel(call)
    return CpuKernel(
        scale=call.scale,
        with_lse=False,
        needs_grad=call.needs_grad,
        sizes=(call.q.shape[0], call.q.shape[1]),
        groups=call.q.shape[1] // call.k.shape[1],
        uncompiled=uncompiled(call),
    )


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


class _Form(NamedTuple):
    """The whole mask, and what is added to scores."""

    visible: Tensor  # bool [B or 1, H or 1, Q, KV]
    bias: Added | None  # what a score change adds
    added: Tensor  # float32 [B or 1, Hkv or 1, grouped heads * Q, KV]: the bias, -inf where hidden
    hidden_rows: Tensor | None  # bool [B or 1, Hkv or 1, grouped heads * Q]: queries that see nothing, if there are any
    shows: bool  # whether torch's kernel shows all of `added`
    summand: Summand | None = None

    def read_by_backward(self) -> list[Tensor]:
        return [self.visible, *(t for t in self.bias or () if t is not None)]


@dataclass(frozen=True)
class CpuKernel(ShortKernel):
    """Short sequences on a CPU."""

    sizes: tuple[int, int]  # batch size and number of heads
    groups: int  # query heads of a key head
    uncompiled: Uncompiled | None  # counts the kind's calls until these are compiled

    def instead_of_blocks(self, forms: tuple[_Form, ...]) -> str:
        return "none: torch's kernel gets the whole mask as a tensor, and computes empty blocks too"

    def forms(self, plans: Plans) -> tuple[_Form]:
        if isinstance(plans.mask, GivenPlan):
            visible = visible_in(plans.mask.block_mask, *self.sizes)
        else:
            visible = plans.mask.whole.visible
        bias = None if plans.score is None else plans.score.added
        numbers = torch.zeros((), dtype=torch.float32, device="cpu") if bias is None else bias.product()
        hidden_rows = ~visible.any(-1)
        is_hidden = bool(hidden_rows.any())
        added = torch.where(visible, numbers, -math.inf)
        return (
            _Form(
                visible=visible,
                bias=bias,
                added=grouped(added, self.groups),
                hidden_rows=grouped(hidden_rows[..., None], self.groups)[..., 0] if is_hidden else None,
                shows=bias is None or shows(added),
            ),
        )

    def forward(self, mask: _Form, q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return output and lse, see `ShortKernel.forward`.

        Where output or lse is not finite, the reference has computed it, so that nothing hidden was read.
        """
        if self.uncompiled is not None:
            self.uncompiled.count(q, k, v)
        if not mask.shows:
            return self.by_reference(mask, q, k, v)[0], None
        rows = q if self.groups == 1 else q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        out, lse = forward_on_cpu(rows, k, v, mask.added, self.scale)
        if mask.hidden_rows is not None:
            out.masked_fill_(mask.hidden_rows[..., None], 0)
            lse.masked_fill_(mask.hidden_rows, 0)
        total = out.sum(dtype=torch.float32)
        if q.dtype != torch.float32:  # the output of a score of +inf may be finite, the lse is not
            total = total + lse.sum()
        if not math.isfinite(total.item()):
            return self.by_reference(mask, q, k, v)[0], None
        return out if self.groups == 1 else out.reshape(q.shape), lse

    def backward(
        self, mask: _Form, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor,
        d_lse: Tensor | None, *added: Tensor,
    ) -> tuple[Tensor, ...] | None:  # fmt: skip
        """Return the gradients of q, k and v, None if one is not finite."""
        rows, upstream, result = (x.reshape(x.shape[0], k.shape[1], -1, x.shape[3]) for x in (q, d_out, out))
        grads = backward_on_cpu(upstream, rows, k, v, result, lse, mask.added, self.scale)
        if not bool(torch.stack([x.sum(dtype=torch.float32) for x in grads]).isfinite().all()):
            return None
        return grads[0].reshape(q.shape), grads[1], grads[2]
