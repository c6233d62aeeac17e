"""Backend "sdpa": torch's scaled_dot_product_attention, for full and causal masks."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from flexmasks import checkpointing, compat
from flexmasks.backends.call import (
    TRANSFORMED,
    Call,
    Inputs,
    Kernel,
    Ready,
    exports_any_length,
    with_gradients_once,
)
from flexmasks.backends.slices import Visible, attend_by_slices, gradients
from flexmasks.errors import Unfit
from flexmasks.plans.windows import Window

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_NO_KERNEL = "torch has no fused kernel for this call"


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    window = call.mask.window
    is_known = window is not None and window.left is None and not window.has_sequences
    if window is None or not is_known or (window.right is not None and (window.right, window.offset) != (0, 0)):
        return "it knows only the masks full and causal, with the first query at the first key"
    if call.context.is_transformed:
        return TRANSFORMED
    if call.score is not None:
        return "it has no score changes"
    if call.with_lse:
        return "it gives no lse"
    if call.kernel_options:
        return "it takes no kernel_options"
    if call.device_type not in ("cpu", "cuda", "xpu", "mps"):
        return f"it does not run on {call.device_type}"
    if call.device_type == "mps" and window.right is not None:
        return "on mps torch's kernel adds -inf to hidden scores, so that NaN in a hidden key would be seen"
    if window.right is not None and call.scale is not None and call.scale <= 0:
        return "it is wrong if scale is not above 0, because it scales masked scores"
    if call.q.dtype == torch.float64 and call.needs_grad:
        return "it has no second derivative, which calls in float64 may need"
    if call.is_traced and (call.q.dtype == torch.float64 or call.q.shape[3] != call.v.shape[3]):
        return _NO_KERNEL  # torch cannot be asked then
    return None


def kernel(call: Call) -> SdpaKernel:
    window = cast(Window, call.mask.window)
    if call.is_traced and exports_any_length(call.q, call.k):
        # torch hides the keys that would be cut, and a cut compares lengths
        window = replace(window, keys=(0, call.k.shape[2]))
    return SdpaKernel(window, call.scale, call.is_traced)


@dataclass(frozen=True)
class SdpaKernel(Kernel):
    """scaled_dot_product_attention for q, k and v of one shape, layout, dtype, device and wish for gradients, and under
    the same settings of torch, so that torch takes the same kernel.
    """

    window: Window
    scale: float | None
    is_traced: bool  # by torch.compile

    def ready(self, inputs: Inputs) -> Ready:
        if not self.is_traced and not self._has_kernel(*inputs[:3]):
            raise Unfit(_NO_KERNEL)
        return super().ready(inputs)

    def _has_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether torch would use a fused kernel; asking copies nothing."""
        if q.device.type == "mps":  # of which torch cannot be asked; any kernel is right where nothing is hidden
            return True
        k, v = self.window.cut(k), self.window.cut(v)
        grouped = q.shape[1] != k.shape[1]
        if grouped and not q.is_cuda:  # torch's fused kernel for the CPU has no grouped heads
            k, v = (x.new_empty(len(x), q.shape[1], *x.shape[2:]) for x in (k, v))
        is_causal = self.window.right is not None
        chosen = compat.fused_sdp_choice(q, k, v, is_causal=is_causal, scale=self.scale, enable_gqa=grouped)
        return chosen != SDPBackend.MATH.value

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *_: Any) -> tuple[Tensor, None]:
        if self.is_traced or self.window.keys != (0, k.shape[2]):
            k, v = self.window.cut(k), self.window.cut(v)
        grouped = bool(q.shape[1] != k.shape[1])  # inside torch.compile(dynamic=True) it is no bool yet
        if grouped and not q.is_cuda:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        is_causal, seen = self.window.right is not None, _NOTHING
        if not self.is_traced and checkpointing.is_unseen_by_checkpointing():
            seen = checkpointing.seen_by_checkpointing()  # whose policies name torch's operations
        with seen:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=self.scale, enable_gqa=grouped)
        has_gradient = not self.is_traced and out.grad_fn is not None
        if has_gradient:
            again = functools.partial(self._gradients_again, 1 / math.sqrt(q.shape[3]))
            out = with_gradients_once("sdpa", out, "ScaledDotProduct", again=again)
        return out, None

    def _gradients_again(self, scale: float, node: Any, needed: Sequence[bool], d_out: Tensor) -> list[Tensor | None]:
        """Return the gradients of the kernel's q, k and v, which autograd's node has, with derivatives."""
        qkv = node._saved_query, node._saved_key, node._saved_value
        rows, columns = (torch.arange(-(-x.shape[2] // _BLOCK), device=x.device) for x in qkv[:2])
        same, before = rows[:, None] == columns, rows[:, None] > columns
        if self.window.right is None:
            same, before = torch.zeros_like(same), torch.ones_like(before)
        visible = Visible(_is_seen, same[None, None], before[None, None], (_BLOCK, _BLOCK))
        scale = scale if self.scale is None else self.scale

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return attend_by_slices(q, k, v, None, visible, scale, learned=())[:1]

        return gradients(attend, 0, needed, *qkv, d_out)


_BLOCK = 128


def _is_seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv
