"""The user's own code in tracebacks, without this library's, torch's and Python's."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

_NOT_THE_USERS = {"flexmasks", "torch", "numpy", *sys.stdlib_module_names}


def of_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback with the frames of the user's code alone, None without any."""
    frames = []
    while trace is not None:
        if not _is_theirs(trace.tb_frame.f_globals.get("__name__")):
            frames.append(trace)
        trace = trace.tb_next
    shown: TracebackType | None = None
    for t in reversed(frames):
        shown = TracebackType(shown, t.tb_frame, t.tb_lasti, t.tb_lineno)
    return shown


def place_of(trace: TracebackType | None, function: Any) -> str:
    """Return where the user's code raised an error, or "".

    function: the user's function, whose first line is named if it has returned what is wrong.
    """
    shown = of_user(trace)
    if shown is not None:
        while shown.tb_next is not None:
            shown = shown.tb_next
        raised = shown.tb_frame.f_code
        return f'File "{raised.co_filename}", line {shown.tb_lineno}, in {raised.co_name}'
    code = getattr(function, "__code__", None)
    if code is None or _is_theirs(function.__module__):
        return ""
    return f'File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}'


def _is_theirs(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _NOT_THE_USERS
