"""Calls of own kernels without torch's dispatcher, which takes 20 microseconds."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.context import is_traced_or_transformed

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of own kernels
_NO_CONTEXT = contextlib.nullcontext()
_PLAIN = Tensor, torch.nn.Parameter


_TRITON_FROM = (8, 0)  # the least compute capability that Triton supports


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@compat.constant_in_graphs
def why_no_triton(device: torch.device) -> str:
    """Return why Triton compiles nothing for a GPU, or "", as where torch finds no GPU to ask."""
    return _why_no_triton(device)


@functools.cache
def _why_no_triton(device: torch.device) -> str:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return ""
    has = torch.cuda.get_device_capability(device)
    least, found = (".".join(map(str, version)) for version in (_TRITON_FROM, has))
    return "" if has >= _TRITON_FROM else f"it does not run on compute capability {found}: Triton needs {least}"


def runs_triton(device: torch.device) -> bool:
    """Whether own kernels may run on a device."""
    return on_gpu(device) and not why_no_triton(device)


def is_for_triton(x: Tensor) -> bool:
    """Whether own kernels may compute with a tensor, by its device and dtype."""
    return x.dtype in TRITON_DTYPES and runs_triton(x.device)


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


HOPPER = 232_448  # bytes of shared memory


@compat.constant_in_graphs
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory for a program, without a GPU those of Hopper."""
    if not torch.cuda.is_available():
        return HOPPER
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def with_rows_together(*tensors: Tensor) -> list[Tensor]:
    """Return tensors whose last stride is 1, as kernels take for granted."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
