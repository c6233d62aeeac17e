"""Backend "sdpa": torch's scaled_dot_product_attention, for full and causal masks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from flexmasks import compat
from flexmasks.backends.call import TRANSFORMED, Call, Result, Unavailable, exports_any_length, transformed
from flexmasks.plans.windows import Window

_MAX_CHECKED = 64
_NO_KERNEL = "torch has no fused kernel for this call"


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    window = call.window()
    is_known = window is not None and window.left is None and window.sequences is None
    if window is None or not is_known or (window.right is not None and (window.right, window.offset) != (0, 0)):
        return "it knows only the masks full and causal, with the first query at the first key"
    if not call.is_traced and transformed():
        return TRANSFORMED
    if call.score_mod is not None:
        return "it has no score changes"
    if call.with_lse:
        return "it gives no lse"
    if call.kernel_options:
        return "it takes no kernel_options"
    if call.q.device.type not in ("cpu", "cuda"):
        return f"it is not used on {call.q.device.type}"
    if window.right is not None and call.scale is not None and call.scale <= 0:
        return "it is wrong if scale is not above 0, because it scales masked scores"
    if call.q.dtype == torch.float64 and call.needs_grad:
        return "it has no second derivative, which calls in float64 may need"
    if call.is_traced:  # torch cannot be asked for its kernel
        return _NO_KERNEL if call.q.dtype == torch.float64 or call.q.shape[3] != call.v.shape[3] else None
    if not FusedCall(window, call.scale).has_kernel(call.q, call.k, call.v):
        return _NO_KERNEL
    return None


def run(call: Call) -> Result:
    """Run the call; raise Unavailable if torch has no fused kernel for it."""
    replay = FusedCall(cast(Window, call.window()), call.scale)
    return Result(*replay(call.q, call.k, call.v), replay)


@dataclass(frozen=True)
class FusedCall:
    """A call of scaled_dot_product_attention without q, k and v.

    It is called with tensors of the same shapes, dtypes, devices and wishes for gradients.
    """

    window: Window
    scale: float | None
    # By layouts and settings with a fused kernel: the keywords of torch's call, None if k and v are cut or repeated.
    checked: dict[Any, dict[str, Any] | None] = field(default_factory=dict, compare=False)
    nbytes = 0

    def has_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether torch would use a fused kernel; asking copies nothing."""
        k, v = self.window.cut(k), self.window.cut(v)
        if _needs_repeated_heads(q, k):
            k, v = (x.new_empty(len(x), q.shape[1], *x.shape[2:]) for x in (k, v))
        return compat.fused_sdp_choice(q, k, v, **self._keywords(q, k)) != SDPBackend.MATH.value

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        key = q.stride(), k.stride(), v.stride(), compat.sdp_settings()
        keywords = self.checked.get(key)
        if keywords is not None:
            return _by_torch(q, k, v, keywords), None
        if key not in self.checked:
            if not self.has_kernel(q, k, v):
                raise Unavailable(_NO_KERNEL)
            if len(self.checked) < _MAX_CHECKED:
                is_plain = self.window.cut(k) is k and self.window.cut(v) is v and not _needs_repeated_heads(q, k)
                self.checked[key] = self._keywords(q, k) if is_plain else None
        return self._attend(q, k, v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        k, v = self.window.cut(k), self.window.cut(v)
        if _needs_repeated_heads(q, k):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return _by_torch(q, k, v, self._keywords(q, k)), None

    def _keywords(self, q: Tensor, k: Tensor) -> dict[str, Any]:
        grouped = bool(q.shape[1] != k.shape[1])  # inside torch.compile(dynamic=True) it is no bool yet
        return {"is_causal": self.window.right is not None, "scale": self.scale, "enable_gqa": grouped}


def _by_torch(q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> Tensor:
    """Call torch's function; policies of selective activation checkpointing name its operations."""
    if not compat.is_compiling() and compat.is_unseen_by_checkpointing():
        with compat.seen_by_checkpointing():
            return F.scaled_dot_product_attention(q, k, v, **keywords)
    return F.scaled_dot_product_attention(q, k, v, **keywords)


class TracedCall(FusedCall):
    """A call that torch.compile traces, when torch cannot be asked for its kernel."""

    @classmethod
    def of(cls, call: Call) -> TracedCall:
        return cls(cast(Window, call.window()), call.scale)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        if exports_any_length(q, k):  # torch hides the keys that would be cut, and a cut compares lengths
            return replace(self, window=replace(self.window, keys=(0, k.shape[2])))._attend(q, k, v)
        return self._attend(q, k, v)


def _needs_repeated_heads(q: Tensor, k: Tensor) -> bool:
    """Return whether grouped heads must be repeated.

    torch's fused kernel for the CPU has no grouped heads.
    """
    return q.shape[1] != k.shape[1] and not q.is_cuda
