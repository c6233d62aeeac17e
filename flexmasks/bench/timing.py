"""How long calls take: run by turns, medians, and on a GPU by its own clock."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flexmasks.bench.console import synchronize

_WARMING = 2  # runs that do not count
_FILLS = 6  # of a gigabyte: longer than the host takes to start a backward pass


def interleaved(
    calls: Mapping[str, Callable[[], object]], device: torch.device, runs: int
) -> dict[str, tuple[float, float]]:
    """Median milliseconds of each call, and the range of their middle half; all run by turns."""
    times: dict[str, list[float]] = {who: [] for who in calls}
    for run in range(runs + _WARMING):
        for who, call in calls.items():
            ms = milliseconds(call, device)
            if run >= _WARMING:
                times[who].append(ms)
    found = {}
    for who, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        found[who] = middle, high - low
    return found


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call; on a GPU with nothing in its cache, and without what the host takes to start it."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(_FILLS):  # meanwhile the host gets ahead
        _flushed(device).zero_()
    events[0].record()
    call()
    events[1].record()
    synchronize(device)
    return float(events[0].elapsed_time(events[1]))


@functools.cache
def _flushed(device: torch.device) -> Tensor:
    """More bytes than caches have."""
    return torch.empty(1 << 30, dtype=torch.uint8, device=device)
