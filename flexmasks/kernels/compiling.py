"""Lines in the log before compilations that take seconds."""

from __future__ import annotations

import functools
import logging

_log = logging.getLogger("flexmasks")
# About how many seconds the first calls of fresh processes took, from those with code on the disk to those without: on
# an H100 or H200, the page "limits" of the results, and on a CPU with two cores.
_SECONDS = {"cpu": "1 to 20", "flex": "2 to 13", "flex_flash": "4 to 26", "fa4": "2 to 18", "own": "1 to 3"}


def announce(what: str, kind: str) -> None:
    """Log what is compiled, and how long it takes, by a backend on a GPU, "cpu", or "own" for kernels of ours."""
    _log.info("compiling %s: about %s s (the least if it is on the disk)", what, _SECONDS[kind])


announce_once = functools.lru_cache(maxsize=1024)(announce)
