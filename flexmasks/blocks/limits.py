"""Limits on the work done at once, which bound memory."""

from __future__ import annotations

import torch

BLOCKS_ON_CPU = 1 << 15  # up to this many blocks are decided on the CPU, which starts operations sooner than a GPU
BLOCKS_AT_ONCE = 1 << 25  # blocks decided at once
ELEMENTS_AT_ONCE_ON_GPU = 1 << 23  # elements of a mask evaluated at once
ELEMENTS_AT_ONCE_ON_CPU = 1 << 19  # the same on a CPU: elements that fit its cache
WIDE_ELEMENTS_AT_ONCE = 1 << 25  # elements of a mask times elements of the largest tensor that its function sees


def elements_at_once(device: torch.device) -> int:
    """Return how many elements of a mask to evaluate at once."""
    return ELEMENTS_AT_ONCE_ON_CPU if device.type == "cpu" else ELEMENTS_AT_ONCE_ON_GPU
