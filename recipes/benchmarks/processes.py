"""Processes that run functions together, each with its rank in a process group."""

from __future__ import annotations

import datetime
import faulthandler
import os
import queue
import shutil
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60.0  # seconds that a process waits for the others
_LONG = 600.0  # seconds after which a job says on stderr where it is


class Crash(RuntimeError):
    """A process of a group has ended in the middle of a job."""


class Processes:
    """Processes of one group.

    They use gloo on a CPU, and NCCL with a GPU for each on GPUs.

    device_type: "cpu" or "cuda".
    timeout: seconds that a process of the group waits for the others.
    """

    def __init__(self, count: int, device_type: str = "cpu", timeout: float = TIMEOUT) -> None:
        self.count, self._device_type, self._timeout = count, device_type, timeout
        self._start()

    def _start(self) -> None:
        count, device_type, timeout = self.count, self._device_type, self._timeout
        context = mp.get_context("spawn")
        folder = tempfile.mkdtemp()
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._jobs = [context.Queue() for _ in range(count)]
        self._results = [context.Queue() for _ in range(count)]
        store = f"file://{folder}/store"
        self._processes = [
            context.Process(
                target=_work,
                args=(rank, count, device_type, store, timeout, self._jobs[rank], self._results[rank]),
                daemon=True,
            )
            for rank in range(count)
        ]
        for process in self._processes:
            process.start()

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what all processes return.

        If a process crashes, which torch's gloo does now and then, all are started again, and the job once more.

        Raises RuntimeError with the traceback of the first process that fails.
        """
        try:
            results = self.try_run(job, *arguments)
        except Crash as crash:
            print(f"flexmasks: {crash}; the processes start again.", file=sys.stderr)
            self.close()
            self._start()
            results = self.try_run(job, *arguments)
        for rank, (_, error) in enumerate(results):
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
        return [result for result, _ in results]

    def try_run(self, job: Callable[..., Any], *arguments: Any) -> list[tuple[Any, str]]:
        """Return for each process what the job returns, and its traceback if it fails.

        Raises Crash if a process has ended.
        """
        for jobs in self._jobs:
            jobs.put((job, arguments))
        return [self._result(rank) for rank in range(self.count)]

    def _result(self, rank: int) -> tuple[Any, str]:
        while True:
            try:
                result: tuple[Any, str] = self._results[rank].get(timeout=1.0)
            except queue.Empty:
                if not self._processes[rank].is_alive():
                    code = self._processes[rank].exitcode
                    raise Crash(f"rank {rank}: the process has ended with code {code}") from None
            else:
                return result

    def close(self) -> None:
        """Stop all processes."""
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(10)
            process.kill()
        self._remove_folder()


def _work(rank: int, count: int, device_type: str, store: str, timeout: float, jobs: Any, results: Any) -> None:
    faulthandler.enable()
    os.environ["LOCAL_RANK"] = str(rank)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        init_method=store,
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while (job := jobs.get()) is not None:
        function, arguments = job
        torch.manual_seed(0)  # what a job draws is the same in all processes, whatever ran before
        faulthandler.dump_traceback_later(_LONG)
        try:
            results.put((function(*arguments), ""))
        except Exception:
            results.put((None, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
