"""Why a kernel cannot run a call, and what errors say: whether memory ran out, a file was damaged, or a kernel has a
known fault; which line of the user's code raised them; how they leave torch.compile; why something cannot be pickled.

A process pickles what it sends through a queue, as a worker of a DataLoader does, in a thread of the queue. Python only
prints an error of that thread, and the receiving process waits forever. There an object that cannot be pickled is
therefore sent as its error, which the receiving process raises.
"""

from __future__ import annotations

import errno
import functools
import operator
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexmasks import compat


class Unfit(Exception):
    """Error of a kernel that cannot run a call, which only the values of its tensors tell, or torch.

    `Kernel.forms` raises it where forms are made of values, `Kernel.ready` where torch is asked about q, k and v.
    """


class Outgrown(Unfit):
    """Error of a form that has no room for these values: one that is planned from the start may have it."""


def is_wrong_bound(error: Exception) -> bool:
    """Return whether a kernel for the CPU compared an index with a wrong bound.

    For some functions, tensors and lengths torch's CPU kernels for any length compare an index with the length of their
    own part of the keys or queries. No public equivalent.
    """
    return isinstance(error, RuntimeError) and "index out of bounds" in str(error) and "SplitSize" in str(error)


def is_refused_for_tracing(error: RuntimeError) -> bool:
    """Return whether a compiled function refused to run because some thread traces. No public equivalent."""
    return str(error).startswith("Detected that you are using FX to symbolically trace")


# Parts of messages about missing memory: of PyTorch's allocator for the CPU, cuBLAS, Triton and CuTe.
_NO_MEMORY = "out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED", "cudaErrorMemoryAllocation"
# Numbers of errors of a folder that cannot be made or written, or of a full disk.
_CANNOT_WRITE = errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENOSPC


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and the errors that it was raised from.

    `inner_exception` is what an error of torch's compilers wraps. No public equivalent; without it a backend would be
    left out for good after memory ran out while torch compiled.
    """
    known: set[int] = set()  # an inner error may have been raised from the outer one
    while error is not None and id(error) not in known:
        yield error
        known.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__


def passing_error(error: BaseException) -> BaseException | None:
    """Return the error that says nothing about the code that raised it, or None.

    It is the innermost one, among an error and its causes, of missing memory, or the end of what torch's activation
    checkpointing computes again: once it has all tensors that were saved, it ends the computation by an error. That
    error has no public name; without it a backend that saves the last tensors would seem to have failed.
    """
    found = None
    for e in causes(error):
        is_named = isinstance(e, (torch.OutOfMemoryError, MemoryError, compat.StopRecomputation))
        if is_named or (isinstance(e, RuntimeError) and any(text in str(e) for text in _NO_MEMORY)):
            found = e
    return found


def cannot_read(error: BaseException) -> bool:
    """Return whether an error comes from a damaged pickle, source or library."""
    kinds = EOFError, ImportError, SyntaxError, UnicodeDecodeError, pickle.UnpicklingError

    def tells(e: BaseException) -> bool:
        is_library = isinstance(e, OSError) and e.errno is None  # the system gives no number for one
        # Inductor asserts, without a word, that a file of its cache holds what was written there.
        is_silent = str(e).partition("\n")[0].rstrip().endswith("AssertionError:")
        return is_library or is_silent or (isinstance(e, kinds) and not isinstance(e, ModuleNotFoundError))

    return any(map(tells, causes(error)))


def cannot_write(error: BaseException) -> bool:
    return any(isinstance(e, OSError) and e.errno in _CANNOT_WRITE for e in causes(error))


_NOT_THE_USERS = {"flexmasks", "torch", "numpy", *sys.stdlib_module_names}


def users_frames(trace: TracebackType | None) -> TracebackType | None:
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


def users_line(trace: TracebackType | None, function: Any) -> str:
    """Return where the user's code raised an error, or "".

    function: the user's function, whose first line is named if it has returned what is wrong.
    """
    shown = users_frames(trace)
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


def no_such_name(module: str, name: str, advice: str) -> Exception:
    """Return the error that a module's `__getattr__` raises for a name that it lacks.

    Of an AttributeError, `from module import name` makes an ImportError without the advice: there it is one already.
    """
    is_imported = advice and sys._getframe(2).f_code.co_name == "_handle_fromlist"
    return (ImportError if is_imported else AttributeError)(f"{module} has no `{name}`{advice}")


def raise_to_user(is_of_type: bool, message: str) -> None:
    """Raise a TypeError or a ValueError out of torch.compile, which traces this, unless the user's code may catch it.

    Of an error that traced code raises torch makes one of its own, or it traces the library's functions one by one, and
    fails at the first that it cannot trace alone.
    """
    if torch.compiler.is_dynamo_compiling():
        _raise_to_user(is_of_type, message)


@compat.constant_in_graphs
def _raise_to_user(is_of_type: bool, message: str) -> None:
    error = compat.passed_on(TypeError if is_of_type else ValueError, message, __package__, users_frames)
    if error is not None:
        raise error


_THREAD_OF_QUEUES = "QueueFeederThread"  # name of the thread of multiprocessing.Queue that pickles


def refused_to_pickle(message: str) -> Any:
    """Return what `__reduce__` returns for an object that cannot be pickled, or raise PicklingError."""
    if _in_queue():
        return raise_refusal, (message,)
    raise pickle.PicklingError(message)


def raise_refusal(message: str) -> NoReturn:
    raise pickle.PicklingError(message)


def why_not_pickled(value: Any) -> str:
    """Return why a function or a parameter cannot be pickled, or ""."""
    if isinstance(value, types.FunctionType):
        return "" if _has_name(value) else f"{value.__qualname__} is no function that a module holds by its name"
    if isinstance(value, functools.partial):
        return why_not_pickled((value.func, *value.args, *value.keywords.values()))
    if isinstance(value, tuple):
        return next(filter(None, map(why_not_pickled, value)), "")
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
