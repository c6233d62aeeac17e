"""Calls of own kernels without torch's dispatcher.

The dispatcher takes 20 microseconds.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from flexmasks import compat

_NO_CONTEXT = contextlib.nullcontext()


def is_plain(*tensors: Tensor) -> bool:
    """Return whether all tensors are plain, and no mode or transform watches the call."""
    if compat.is_compiling() or compat.transforms_active() or compat.in_dispatch_mode():
        return False
    return not compat.in_forward_derivative() and all(map(_has_readable_memory, tensors))


def _has_readable_memory(x: Tensor) -> bool:
    """Return whether the memory of a tensor holds its values."""
    return bool(
        type(x) in (Tensor, torch.nn.Parameter)
        and not compat.is_batched_gradient(x)  # under torch.autograd.grad(is_grads_batched=True)
        and not x.is_meta
        and not x.is_neg()  # as z.conj().imag is: kernels read its memory, which lacks the sign
    )


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a device the current one, on which Triton launches.

    Triton's interpreter launches on the CPU.
    """
    is_current = device.type == "cpu" or torch.cuda.current_device() == device.index
    return _NO_CONTEXT if is_current else torch.cuda.device(device)
