"""Errors of masks and scores that cannot be pickled.

A process pickles what it sends through a queue, as a worker of a DataLoader does, in a thread of the queue. Python only
prints an error of that thread, and the receiving process waits forever. There an object that cannot be pickled is
therefore sent as its error, which the receiving process raises.
"""

from __future__ import annotations

import functools
import operator
import pickle
import sys
import threading
import types
from typing import Any, NoReturn

from torch import Tensor

_THREAD_OF_QUEUES = "QueueFeederThread"  # name of the thread of multiprocessing.Queue that pickles


def refused(message: str) -> Any:
    """Return what `__reduce__` returns for an object that cannot be pickled, or raise PicklingError."""
    if _in_queue():
        return raise_refusal, (message,)
    raise pickle.PicklingError(message)


def raise_refusal(message: str) -> NoReturn:
    raise pickle.PicklingError(message)


def why_not(value: Any) -> str:
    """Return why a function or a parameter cannot be pickled, or ""."""
    if isinstance(value, types.FunctionType):
        return "" if _has_name(value) else f"{value.__qualname__} is no function that a module holds by its name"
    if isinstance(value, functools.partial):
        return why_not((value.func, *value.args, *value.keywords.values()))
    if isinstance(value, tuple):
        return next(filter(None, map(why_not, value)), "")
    if not _in_queue():  # pickle raises its own error
        return ""
    if isinstance(value, Tensor):
        is_result = value.requires_grad and not value.is_leaf
        return "a tensor is part of an autograd graph, use `.detach()`" if is_result else ""
    try:
        pickle.dumps(value)
    except Exception as error:  # objects of users may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _in_queue() -> bool:
    return threading.current_thread().name == _THREAD_OF_QUEUES


def _has_name(function: types.FunctionType) -> bool:
    try:
        return operator.attrgetter(function.__qualname__)(sys.modules[function.__module__]) is function
    except (AttributeError, KeyError):
        return False
