"""Backend "short": short sequences, with the whole mask as a tensor.

No list of blocks is made, and nothing is compiled for a mask. A mask of a thousand queries is small, and one call of a
kernel is faster than many steps, even if it computes some of what is hidden.
"""

from __future__ import annotations

from typing import cast

from flexmasks import compat
from flexmasks.backends import short_cpu, short_gpu
from flexmasks.backends.added import is_added
from flexmasks.backends.call import Call, Result, proven, transformed
from flexmasks.plans.traced import TracedScore

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
    reason = short_gpu.refuses(call) if device in _ON_GPU else short_cpu.refuses(call)
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
    replay = short_cpu.CpuShortReplay.of(call)
    return Result(*replay(call.q, call.k, call.v), replay)
