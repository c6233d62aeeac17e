"""Peak memory of a call."""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Callable
from pathlib import Path

import torch

_PROCESS_STATUS = Path("/proc/self/status")


def peak_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Return the most bytes that a call adds to those in use.

    On a CPU they are the bytes of the process as Linux counts them; other systems give NaN.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _PROCESS_STATUS.exists():
        call()
        return math.nan
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system, so that its next use counts
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = _process_bytes("VmRSS")
    call()
    return max(_process_bytes("VmHWM") - before, 1)


def _process_bytes(field: str) -> int:
    """Return a field of the process's status, converted from kilobytes to bytes."""
    line = next(line for line in _PROCESS_STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
