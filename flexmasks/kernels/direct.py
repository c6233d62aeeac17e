"""Calls of own kernels without torch's dispatcher, which takes 20 microseconds."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.context import is_traced_or_transformed
from flexmasks.devices import runs_own_kernels

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of own kernels
_NO_CONTEXT = contextlib.nullcontext()
_PLAIN = Tensor, torch.nn.Parameter


def is_for_triton(x: Tensor) -> bool:
    """Whether own kernels may compute with a tensor, by its device and dtype."""
    return x.dtype in TRITON_DTYPES and runs_own_kernels(x.device)


def is_plain(*tensors: Tensor) -> bool:
    """Whether the memory of all tensors holds their values, and no mode or transform watches the call."""
    if is_traced_or_transformed() or compat.in_dispatch_mode():
        return False
    return all(map(_has_readable_memory, tensors))


def _has_readable_memory(x: Tensor) -> bool:
    # A tensor such as z.conj().imag is negative: kernels read its memory, which lacks the sign.
    return type(x) in _PLAIN and not (x.is_meta or x.is_neg()) and has_memory(x)


def has_memory(x: Tensor) -> bool:
    """Whether a tensor has memory; the batches of torch.autograd.grad(is_grads_batched=True) have none."""
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return True


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a device the current one, on which Triton launches; its interpreter launches on the CPU."""
    is_current = device.type == "cpu" or torch.cuda.current_device() == device.index
    return _NO_CONTEXT if is_current else torch.cuda.device(device)


def with_rows_together(*tensors: Tensor) -> list[Tensor]:
    """Return tensors whose last stride is 1, as kernels take for granted."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
