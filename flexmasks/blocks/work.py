"""How much a search for blocks may compute, how much it has computed, and how far long work is."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flexmasks.blocks import limits

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
        return cls(limits.WORK if pairs > limits.PAIRS_WITHOUT_LIMIT else math.inf)

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
