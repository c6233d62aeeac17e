"""Lines in the log before compilations that take seconds, and during those that take many."""

from __future__ import annotations

import functools
import logging
import threading

_log = logging.getLogger("flexmasks")
_SLOW_SECONDS = 5.0


def announce(what: str) -> None:
    """Log what is compiled."""
    _log.info("compiling %s", what)


announce_once = functools.lru_cache(maxsize=1024)(announce)


def warn_when_slow(what: str) -> threading.Timer:
    """Return a timer that logs a warning if it is not cancelled while a compilation is short."""
    line = "compiling %s has taken %.0f s so far; calls of its kind do not wait again"
    timer = threading.Timer(_SLOW_SECONDS, _log.warning, [line, what, _SLOW_SECONDS])
    timer.daemon = True
    timer.start()
    return timer
