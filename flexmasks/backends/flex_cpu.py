"""Backend "flex" on a CPU: torch's compiled flex_attention, which has neither gradients nor lse there."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends import flex
from flexmasks.backends.call import HALF_DTYPES, Call


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    if call.q.device.type != "cpu":
        return "it runs on CUDA and on CPUs only"
    if call.q.dtype not in (*HALF_DTYPES, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {call.dtype}"
    if call.k.dtype != call.q.dtype:
        return "torch's compiled flex_attention takes one dtype on the CPU"
    if call.needs_grad:
        return "torch's compiled flex_attention has no gradients on the CPU"
    if call.with_lse:
        return "torch's compiled flex_attention gives no lse on the CPU"
    if call.is_traced and call.mask.opaque and not call.mask.is_given:
        return "its kernel reads no tensors that the compiled function computes, and which the mask reads is not known"
    if call.is_traced and _reads_symbolic_sizes(call):
        return "torch's compiler may write wrong code for tensors of symbolic sizes that a mask or score reads"
    return flex.refuses(call)


def _reads_symbolic_sizes(call: Call) -> bool:
    """Return whether functions may read tensors of symbolic sizes.

    torch writes the names of its variables for tiles over names of sizes that begin alike, as ks1 over ks17.
    """
    if all(map(compat.has_static_value, (*call.q.shape, *call.k.shape))):
        return False
    return isinstance(call.q_offset, Tensor) or any(part.opaque or part.tensors for part in call.parts)
