"""The device that a command runs on, its messages, and times of interleaved runs: wall time, or a GPU's own time."""

from __future__ import annotations

import functools
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Clock = Callable[[Callable[[], object], torch.device], float]
WARMUP_RUNS = 2
_HEAD_START_GIGABYTES = 6  # writing them takes a GPU longer than the host needs to start a backward pass


def progress(message: str) -> None:
    """Show a message on stderr; in a terminal it replaces the last message."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)
    elif message:
        print(f"... {message}", file=sys.stderr, flush=True)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def wall_milliseconds(call: Callable[[], object], device: torch.device, calls_in_a_row: int = 1) -> float:
    """The wall time of one call, host included: the mean of several in a row, without the pauses of Python's garbage
    collector, as in timeit.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls_in_a_row):
            call()
        synchronize(device)
        return (time.perf_counter() - start) * 1e3 / calls_in_a_row
    finally:
        if collects:
            gc.enable()


def device_milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The time of one call: on CUDA the GPU's, with empty caches and without the host's; elsewhere wall time."""
    if device.type != "cuda":
        return wall_milliseconds(call, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    give_head_start(device)
    start.record()
    call()
    end.record()
    synchronize(device)
    return float(start.elapsed_time(end))


def give_head_start(device: torch.device, gigabytes: int = _HEAD_START_GIGABYTES) -> None:
    """Empty a GPU's caches, and let the host get ahead of it."""
    for _ in range(gigabytes):
        _gigabyte(device).zero_()


def interleaved(
    calls: Mapping[str, Callable[[], object]], device: torch.device, runs: int, clock: Clock = device_milliseconds
) -> dict[str, tuple[float, float]]:
    """Median milliseconds and the interquartile range of calls timed by turns, in random orders, because a call may
    leave a device slower, or faster, for the next one.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(WARMUP_RUNS + runs):
        names = list(calls)
        random.Random(run).shuffle(names)
        for name in names:
            milliseconds = clock(calls[name], device)
            if run >= WARMUP_RUNS:
                times[name].append(milliseconds)
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in times.items()}
    return {name: (middle, high - low) for name, (low, middle, high) in quartiles.items()}


@functools.cache
def _gigabyte(device: torch.device) -> Tensor:
    return torch.empty(1 << 30, dtype=torch.uint8, device=device)
