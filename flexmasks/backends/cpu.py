"""Backend "cpu": torch's compiled flex_attention on a CPU, which has neither gradients nor lse."""

from __future__ import annotations

import torch

from flexmasks.backends import flex
from flexmasks.backends.call import HALF_DTYPES, Call, Result


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    if call.q.device.type != "cpu":
        return "it runs on the CPU only"
    if call.q.dtype not in (*HALF_DTYPES, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {call.dtype}"
    if call.needs_grad:
        return "torch's compiled flex_attention has no gradients on the CPU"
    if call.with_lse:
        return "torch's compiled flex_attention gives no lse on the CPU"
    return flex.refuses(call)


def run(call: Call) -> Result:
    """Run the call; raise Unavailable if it cannot be compiled."""
    return flex.run(call)


def compiles(call: Call) -> str:
    """Say whether the call would compile."""
    return flex.compiles(call)
