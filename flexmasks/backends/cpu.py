"""Backend "cpu": torch's compiled flex_attention on a CPU, which has neither gradients nor lse."""

from __future__ import annotations

import torch

from flexmasks.backends import flex
from flexmasks.backends.call import HALF_DTYPES, Call, Result


_HAS_WHOLE_TILES = torch.backends.cpu.get_cpu_capability() == "AVX512"  # one vector fills a tile
_TILE = 16  # keys that torch's kernel takes at once
_VECTOR = 4  # the shortest vector, in numbers
_SMALL = 24  # head sizes below it take another way through the last keys
_OVERRUN = (
    "torch's kernel reads and writes past its ends with head sizes below 24 and a number of keys that 16 does not "
    "divide, on processors without AVX-512"
)


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
    sizes = [call.k.shape[2]]
    if call.whole is None and not call.is_traced:  # the user's own blocks may have any size
        sizes.append(call.blocks().block_mask.BLOCK_SIZE[1])
    if overruns(call.q.shape[3], *sizes):
        return _OVERRUN
    return flex.refuses(call)


def overruns(head_size: int, *keys: int) -> bool:
    """Return whether torch's kernel leaves its memory at the last of a number of keys.

    It takes the last whole vectors of keys as a tile there, and what lies behind the keys then changes the output:
    seen with AVX2, in torch 2.11 and 2.13.
    """
    if _HAS_WHOLE_TILES or head_size >= _SMALL or head_size % _VECTOR:
        return False
    return any(n % _VECTOR == 0 and n % _TILE > 0 for n in keys)


def run(call: Call) -> Result:
    """Run the call; raise Unavailable if it cannot be compiled."""
    return flex.run(call)


def compiles(call: Call) -> str:
    """Say whether the call would compile."""
    return flex.compiles(call)
