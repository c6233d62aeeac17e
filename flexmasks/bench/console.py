"""Progress on the console, and the device that a command runs on."""

from __future__ import annotations

import sys

import torch


def progress(message: str) -> None:
    """Show a message; in a terminal it replaces the last message."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)
    elif message:
        print(f"... {message}", file=sys.stderr, flush=True)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work; return at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's number of threads."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
