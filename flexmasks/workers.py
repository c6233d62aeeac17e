"""Threads that compute parts of a call on a CPU without waiting.

torch divides each operation among its threads, which wait for each other at the end of the operation. Attention by
tiles and the masked softmax have hundreds of operations. Where other processes take the cores, each operation then
lasts until the system runs the last of the threads again: some milliseconds, hundreds of times. Here each thread
computes whole parts of a call by itself, and the threads meet once, at the end.
"""

from __future__ import annotations

import contextvars
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.overrides import has_torch_function

from flexmasks import compat

_Result = TypeVar("_Result")
_UNDIVIDED = 1 << 15  # elements up to which torch divides no operation
_MIN_ELEMENTS = 1 << 17  # with fewer elements, several threads gain nothing
_MAX_WORKERS = 4  # parts have gradients of their own for keys and values, so more threads would take more memory


@dataclass(frozen=True)
class Workers:
    """Threads that compute parts of a call.

    count: number of threads; 1 if the call is not divided.
    threads_each: torch's threads for an operation of each thread, or 0 if the caller's own thread computes.
    """

    count: int
    threads_each: int

    @classmethod
    def of(cls, device: torch.device, elements: int, parts: int) -> Workers:
        """Return the threads for a call.

        elements: elements that its operations compute, in all.
        parts: the most parts that it can be divided into.
        """
        threads = torch.get_num_threads()
        # A mode that is active in the caller's thread would be missing in the others. A TorchFunctionMode, such as a
        # default device, is a torch function of any argument.
        if device.type != "cpu" or threads == 1 or compat.in_dispatch_mode() or has_torch_function((None,)):
            return cls(1, 0)
        if elements < _MIN_ELEMENTS:
            return cls(1, 0 if elements < _UNDIVIDED else 1)
        count = min(threads, parts, _MAX_WORKERS)
        return cls(count, threads // count if count > 1 else 0)

    @classmethod
    def alone(cls, parts: int) -> Workers:
        """Return threads for a call on a CPU, each of which computes every operation alone."""
        threads = torch.get_num_threads()
        if threads == 1 or compat.in_dispatch_mode() or has_torch_function((None,)):  # as in `of`
            return cls(1, 0)
        return cls(min(threads, parts, _MAX_WORKERS), 1)

    def all(self, works: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Return the results of functions that run at once."""
        if not self.threads_each:
            return [work() for work in works]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        pool = _pool(self.count, self.threads_each)
        # A user's function may read context variables of the caller's thread.
        futures = [
            pool.submit(contextvars.copy_context().run, functools.partial(_in_modes, work, *modes)) for work in works
        ]
        return [future.result() for future in futures]

    def one(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of a function that runs on one of the threads."""
        return self.all([work])[0]


def _in_modes(work: Callable[[], _Result], grad: bool, inference: bool) -> _Result:
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        return work()


def _start(threads: int) -> None:
    torch.get_num_threads()  # torch sets it at the first question, to the number of all threads
    torch.set_num_threads(threads)


@functools.lru_cache(maxsize=4)
def _pool(count: int, threads_each: int) -> ThreadPoolExecutor:
    """Return `count` threads, with `threads_each` of torch's threads for the operations of each."""
    pool = ThreadPoolExecutor(count, "flexmasks", _start, (threads_each,))
    own, all_started = torch.get_num_threads(), threading.Barrier(count + 1)
    for _ in range(count):
        pool.submit(all_started.wait)
    all_started.wait()
    torch.set_num_threads(own)  # each thread has set the number for all threads that start later
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of the threads
