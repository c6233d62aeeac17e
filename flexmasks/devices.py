"""What devices can. No other file asks torch for a compute capability, shared memory, or whether a GPU is AMD's: a test
replaces `_gpu` alone.

Numbers of NVIDIA's are for NVIDIA's GPUs: torch calls AMD's devices "cuda", too, and numbers their architectures as if
they were compute capabilities (gfx90a is "9.0").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flexmasks import compat

# Bytes of shared memory that a program may take: of Hopper GPUs, and more than those of consumer GPUs (8.6, 8.9, 12).
HOPPER, LITTLE_MEMORY = 232_448, 2**17
_TRITON_FROM = (8, 0)  # the least compute capability that Triton compiles for


class GpuFacts(NamedTuple):
    """What torch says of a GPU.

    capability: NVIDIA's compute capability, None for GPUs of others.
    shared_memory: bytes that a program may take.
    """

    capability: tuple[int, int] | None
    shared_memory: int


def _gpu(device: torch.device) -> GpuFacts | None:
    """Return the GPU that a device is, or None, as for tensors without data where there is no GPU."""
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return GpuFacts(None, 0)
    return _nvidia_gpu(device, torch.cuda.get_device_capability, torch.cuda.get_device_properties)


@functools.cache  # torch takes microseconds; functions that take the place of torch's are asked anew
def _nvidia_gpu(
    device: torch.device,
    capability: Callable[[torch.device], tuple[int, int]],
    properties: Callable[[torch.device], Any],
) -> GpuFacts | None:
    if not torch.cuda.is_available():
        return None
    return GpuFacts(capability(device), int(properties(device).shared_memory_per_block_optin))


@compat.constant_in_graphs
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: Apple's GPUs do not, and some of Intel's."""
    return device.type not in ("mps", "xpu") or (device.type == "xpu" and _intels_has_float64(device))


@functools.cache
def _intels_has_float64(device: torch.device) -> bool:
    return not torch.xpu.is_available() or bool(torch.xpu.get_device_properties(device).has_fp64)


def device_of_float64(device: torch.device) -> torch.device:
    """Return where numbers of float64 for a device are computed: there, or on the CPU."""
    return device if has_float64(device) else torch.device("cpu")


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def compiles_by_triton(device: torch.device) -> bool:
    """Return whether torch's flex_attention is a kernel of Triton's on a device."""
    return device.type in ("cuda", "xpu")


@compat.constant_in_graphs
def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for AMD's, other devices, and where there is no GPU."""
    gpu = _gpu(device)
    return None if gpu is None else gpu.capability


@compat.constant_in_graphs
def nvidia_major(device: torch.device) -> int:
    """Return the first number of `nvidia_capability`, 0 for None."""
    return (nvidia_capability(device) or (0, 0))[0]


@compat.constant_in_graphs
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory for a program of an NVIDIA GPU, without a GPU those of Hopper."""
    gpu = _gpu(device)
    return HOPPER if gpu is None else gpu.shared_memory


@compat.constant_in_graphs
def why_no_triton(device: torch.device) -> str:
    """Return why Triton compiles nothing for a GPU, or "", as where torch finds no GPU to ask."""
    has = nvidia_capability(device)
    if has is None or has >= _TRITON_FROM:
        return ""
    least, found = (".".join(map(str, version)) for version in (_TRITON_FROM, has))
    return f"it does not run on compute capability {found}: Triton needs {least}"


def runs_triton(device: torch.device) -> bool:
    """Return whether kernels that torch compiles by Triton may run on a device."""
    return on_gpu(device) and not why_no_triton(device)


@compat.constant_in_graphs
def why_no_own_kernels(device: torch.device) -> str:
    """Return why the library's own kernels run on no such GPU, or "".

    They hold NVIDIA's instructions (PTX), and tiles and warps that were chosen on NVIDIA's GPUs.
    """
    gpu = _gpu(device)  # asked once: calls of own kernels take microseconds
    if gpu is None or (gpu.capability is not None and gpu.capability >= _TRITON_FROM):
        return ""
    if gpu.capability is None:
        return "it does not run on AMD GPUs: its kernels are written for NVIDIA's"
    return why_no_triton(device)


def runs_own_kernels(device: torch.device) -> bool:
    return on_gpu(device) and not why_no_own_kernels(device)
