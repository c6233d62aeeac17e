"""Backend "flex" on CUDA: torch's compiled flex_attention, with kernels in Triton."""

from __future__ import annotations

import torch

from flexmasks.backends import flex
from flexmasks.backends.call import HALF_DTYPES, Call


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    if call.q.dtype not in (*HALF_DTYPES, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {call.dtype}"
    if call.k.dtype != call.q.dtype and call.needs_grad:
        return "its kernel has gradients only where q, k and v have one dtype"
    return flex.refuses(call)


def adds_in_any_order(call: Call) -> str | None:
    """Return what the kernel adds in changing order, or None."""
    return "the gradients of tensors that the score or mask reads, by atomic operations," if call.learns else None
