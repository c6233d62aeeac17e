"""Processes of one gloo group, for tests of several processes."""

from __future__ import annotations

import datetime
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60  # seconds that a process waits for the others


class Processes:
    """Processes that run functions together, each with its rank."""

    def __init__(self, count: int, timeout: float = TIMEOUT) -> None:
        self.count = count
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = [context.Queue() for _ in range(count)]
        self._results = [context.Queue() for _ in range(count)]
        store = f"file://{self._folder.name}/store"
        self._processes = [
            context.Process(
                target=_work, args=(rank, count, store, timeout, self._jobs[rank], self._results[rank]), daemon=True
            )
            for rank in range(count)
        ]
        for process in self._processes:
            process.start()

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what all processes return, or raise the first of their errors."""
        results = self.try_run(job, *arguments)
        for rank, (_, error) in enumerate(results):
            if error:
                raise AssertionError(f"rank {rank}: {error}")
        return [result for result, _ in results]

    def try_run(self, job: Callable[..., Any], *arguments: Any) -> list[tuple[Any, str]]:
        """Return for each process what the job returns, and its traceback if it fails."""
        for jobs in self._jobs:
            jobs.put((job, arguments))
        return [results.get(timeout=600) for results in self._results]

    def close(self) -> None:
        """Stop all processes."""
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()


def _work(rank: int, count: int, store: str, timeout: float, jobs: Any, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=limit)
    while (job := jobs.get()) is not None:
        function, arguments = job
        try:
            results.put((function(*arguments), ""))
        except Exception:
            results.put((None, traceback.format_exc()))
    dist.destroy_process_group()
