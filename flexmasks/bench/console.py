"""What the commands that measure share: progress, and waiting for a device."""

from __future__ import annotations

import sys

import torch


def progress(message: str) -> None:
    """One line that changes in a terminal; a line each elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)
    elif message:
        print(f"... {message}", file=sys.stderr, flush=True)


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The GPU's name, or how many threads the CPU uses."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
