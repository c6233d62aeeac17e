"""How much a search for blocks may compute, how much it has computed, and what it says about that."""

from __future__ import annotations

import math
import sys
import time

from flexmasks.blocks import limits

_SILENT_SECONDS = 2.0  # a shorter search shows no progress
_SECONDS_BETWEEN_LINES = 10.0  # where stderr is no terminal
_SECONDS_BETWEEN_UPDATES = 0.5  # of the line in a terminal


class Work:
    """Counts the numbers that a mask's operations compute, and shows the progress of a long search on stderr.

    limit: how many numbers may be computed before the search ends, inf for an exact search.
    shows_progress: whether a search that takes longer than two seconds says how far it is.
    """

    def __init__(self, limit: float = math.inf, shows_progress: bool = False) -> None:
        self.limit, self._shows_progress = limit, shows_progress
        self.done = 0
        self._start = self._last = time.monotonic()
        self._start_of_step = self._start
        self._has_open_line = False

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

    def start_step(self) -> None:
        """Begin a part of the search in which each block takes about as long as the others."""
        self._start_of_step = time.monotonic()

    def report(self, looked_at: int, blocks: int) -> None:
        """Say on stderr how many blocks of this step have been looked at, and how long the others will take."""
        now = time.monotonic()
        is_terminal = sys.stderr.isatty()
        pause = _SECONDS_BETWEEN_UPDATES if is_terminal else _SECONDS_BETWEEN_LINES
        if not self._shows_progress or now - self._start < _SILENT_SECONDS:
            return
        if self._last > self._start and now - self._last < pause:
            return
        self._last = now
        left = (now - self._start_of_step) / max(1, looked_at) * (blocks - looked_at)
        text = f"flexmasks: {looked_at:,} of {blocks:,} undecided blocks looked at, about {_in_words(left)} left"
        self._has_open_line = is_terminal
        print(f"\r\x1b[K{text}" if is_terminal else text, end="" if is_terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove the line of progress from a terminal."""
        if self._has_open_line:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._has_open_line = False


def _in_words(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
