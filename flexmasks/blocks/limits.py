"""Limits on the work done at once, and on the memory of results; how much a search for blocks may compute, how much it
has computed, and how far long work is.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

BLOCKS_ON_CPU = 1 << 15  # up to this many blocks are decided on the CPU, which starts operations sooner than a GPU
BLOCKS_AT_ONCE = 1 << 25  # blocks decided at once
BLOCKS_AT_ONCE_ON_CPU = 1 << 22  # the same on a CPU: less memory, and no slower
WORK_OF_DECIDING = 3 << 30  # numbers that a mask's operations compute on ranges in a bounded search: seconds on a CPU
WORK = 1 << 30  # the same on elements, which takes longer
PAIRS_WITHOUT_LIMIT = 1 << 32  # up to this many pairs, those of 65,536 tokens, a search is never bounded
ELEMENTS_AT_ONCE_ON_GPU = 1 << 23  # elements of a mask evaluated at once
ELEMENTS_AT_ONCE_ON_CPU = 1 << 19  # the same on a CPU: elements that fit its cache
WHOLE_ELEMENTS_AT_ONCE_ON_GPU = 1 << 22  # elements of whole blocks: the host prepares the next ones in the same time
WHOLE_ELEMENTS_AT_ONCE_ON_CPU = 1 << 18  # the same on a CPU, where each thread evaluates elements of its own
ELEMENTS_KEPT = 1 << 26  # elements of whole blocks whose bits are kept at once
WIDE_ELEMENTS_AT_ONCE = 1 << 25  # elements of a mask times elements of the largest tensor that its function sees
ENTRIES_OF_WIDE_LISTS = 1 << 24  # in lists of more entries, each list is no longer than the fullest one
_BYTES_OF_LISTS = 16  # for each block: an entry of 4 bytes in each of four lists
_BYTES_OF_BOOLEANS = 8  # for each block, at the peak
_ADVICE = (
    "Ask for a part of the queries at a time, with `q_offset`, or for larger blocks: `block_size` of "
    "flexmasks.block_mask."
)
_UNCHECKED_BYTES = 1 << 28  # results up to this size are made without asking how much memory is free
_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def blocks_at_once(device: torch.device) -> int:
    return _limit(device, min(BLOCKS_AT_ONCE, BLOCKS_AT_ONCE_ON_CPU), BLOCKS_AT_ONCE)


def elements_at_once(device: torch.device) -> int:
    return _limit(device, ELEMENTS_AT_ONCE_ON_CPU, ELEMENTS_AT_ONCE_ON_GPU)


def whole_elements_at_once(device: torch.device) -> int:
    return _limit(device, WHOLE_ELEMENTS_AT_ONCE_ON_CPU, WHOLE_ELEMENTS_AT_ONCE_ON_GPU)


def _limit(device: torch.device, on_cpu: int, on_gpu: int) -> int:
    return on_cpu if device.type == "cpu" else on_gpu


def check_blocks(
    matrices: int,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    device: torch.device,
    has_wide_lists: bool = True,
) -> None:
    """Raise MemoryError if the blocks of this many masks need more memory than is free.

    has_wide_lists: whether each list has a place for every block; `check_lists` checks narrow lists.
    """
    rows, columns = (-(-n // size) for n, size in zip(lengths, block_size, strict=True))
    check_memory(
        (_BYTES_OF_BOOLEANS + _BYTES_OF_LISTS * has_wide_lists) * matrices * rows * columns,
        device,
        f"the list of the blocks of {_grouped(lengths[0])} queries x {_grouped(lengths[1])} keys",
        _ADVICE,
    )


def check_lists(entries: int, device: torch.device) -> None:
    check_memory(4 * entries, device, "the list of the blocks", _ADVICE)


def _grouped(n: int) -> str:
    """A number with commas; symbolic numbers of torch 2.11 take no format."""
    return f"{n:,}" if isinstance(n, int) else str(n)


def check_memory(nbytes: int, device: torch.device, what: str, advice: str) -> None:
    """Raise MemoryError if a result needs more memory than is free: otherwise the system would end the process.

    nbytes: what the result and the work on it need at once.
    what: the result, as the subject of a sentence.
    advice: a sentence that says what needs less memory.
    """
    if nbytes <= _UNCHECKED_BYTES:
        return
    free = free_memory(device)
    if nbytes > free:
        raise MemoryError(f"flexmasks: {what} needs {nbytes:,} bytes, and {free:,} are free on {device}. {advice}")


def free_memory(device: torch.device) -> int | float:
    """The bytes that are free on a device, inf if that is unknown."""
    if device.type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return math.inf
    free: list[int | float] = [math.inf]
    with contextlib.suppress(OSError, ValueError, IndexError):
        free.append(1024 * int(_MEMINFO.read_text().partition("MemAvailable:")[2].split()[0]))
    with contextlib.suppress(OSError, ValueError):  # the limit of a container, if it has one
        limit, used = ((_CONTAINER / name).read_text() for name in ("memory.max", "memory.current"))
        free.append(max(0, int(limit) - int(used)))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        free.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(free)


_SILENT_SECONDS = 2.0  # shorter work shows no progress
_SECONDS_BETWEEN_LINES = 10.0  # where stderr is no terminal


class Work:
    """Counts the numbers that a mask's operations compute.

    limit: how many numbers may be computed before the search ends, inf for an exact search.
    shows_progress: whether a search that takes longer than two seconds says how far it is.
    """

    def __init__(self, limit: float = math.inf, shows_progress: bool = False) -> None:
        self.limit, self.shows_progress, self.done = limit, shows_progress, 0

    @classmethod
    def exact(cls) -> Work:
        return cls(shows_progress=True)

    @classmethod
    def bounded(cls, pairs: int) -> Work:
        """Work that is limited if the search is over many pairs."""
        return cls(WORK if pairs > PAIRS_WITHOUT_LIMIT else math.inf)

    @property
    def is_spent(self) -> bool:
        return self.done >= self.limit


@contextlib.contextmanager
def progress(what: str, total: int, unit: str, is_shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes how much more of long work is done. After two seconds tqdm shows it on stderr, where
    tqdm is installed; of several processes of torch.distributed only the first one shows it.
    """
    start, done, may_start = time.monotonic(), 0, is_shown
    bar: Any = None

    def advance(more: int) -> None:
        nonlocal bar, done, may_start
        done += more
        if bar is not None:
            bar.update(more)
        elif may_start and time.monotonic() - start > _SILENT_SECONDS:
            bar, may_start = _bar(f"flexmasks: {what}", total, done, unit), False

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()


def _bar(what: str, total: int, done: int, unit: str) -> Any:
    try:
        from tqdm import tqdm  # an optional package
    except ImportError:
        return None
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        return None

    class Bar(tqdm):
        monitor_interval = 0  # otherwise tqdm starts a thread, which stays

    pause = 0.5 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
    return Bar(total=total, initial=done, desc=what, unit=unit, leave=False, mininterval=pause, miniters=1)
