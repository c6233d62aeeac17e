"""Tensors that Inductor computes by themselves: the operator torch.ops.flexmasks.separate."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.kernels.operators import define

# A copy across which Inductor fuses nothing: torch's attention for the CPU fails with the next operation fused in.
separate = define("separate(Tensor x) -> Tensor", torch.clone, torch.empty_like)


def positions(
    stop: int, device: torch.device, start: int = 0, step: int = 1, dtype: torch.dtype | None = None
) -> Tensor:
    """What torch.arange returns, in a form that Inductor compiles right for a CPU.

    It knows torch.arange as a formula. Where that is divided, as in `table[q // 16]`, it makes a loop over quotients
    and one over remainders, and forgets the last part of a length that the divisor does not divide.
    """
    made = torch.arange(start, stop, step, dtype=dtype, device=device)
    is_fused = device.type == "cpu" and compat.is_compiling() and not compat.in_onnx_export()
    return separate(made) if is_fused else made
