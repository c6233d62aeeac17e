"""Long runs: new tensors and lengths at every step, on one thread and on eight, with flat memory and no late compiling.

Each test has a short form, which runs in the suite, and a long one.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import TOLERANCE, error
from torch import Tensor

import flexmasks
from benchmarks import private_torch

THREADS = 8
HEADS = 2
STATM = Path("/proc/self/statm")
PAGE = 4096

pytestmark = pytest.mark.usefixtures("one_thread", "cold")


# --- the steps ---


class Sizes(NamedTuple):
    """Sizes of the calls of a run."""

    device: str
    dtype: torch.dtype
    lengths: tuple[int, int]  # the least and the greatest
    batches: tuple[int, int]  # likewise


CPU = Sizes("cpu", torch.float32, (33, 160), (1, 3))
GPU = Sizes("cuda", torch.bfloat16, (1100, 3000), (2, 3))  # few kinds of kernels, since their compilation takes minutes


class Drawn(NamedTuple):
    """The mask and score of a step, and what they mean."""

    arguments: dict[str, Any]
    seen: Tensor  # bool[batch or 1, 1, queries, keys]
    bias: Tensor | float = 0.0
    learned: tuple[Tensor, ...] = ()


class Random:
    """Random numbers of one thread."""

    def __init__(self, seed: int, device: str) -> None:
        self._host, self.device = torch.Generator().manual_seed(seed), device

    def number(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=self._host))

    def numbers(self, most: int, *shape: int) -> Tensor:
        return torch.randint(1, most + 1, shape, generator=self._host).to(self.device)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._host).to(self.device, dtype)


Draw = Callable[[Random, int, int], Drawn]  # of a batch size and a length
DRAWS: dict[str, Draw] = {}


def draw(function: Draw) -> Draw:
    DRAWS[function.__name__] = function
    return function


def _indices(length: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.arange(length, device=device)[:, None], torch.arange(length, device=device)


@draw
def documents(random: Random, batch: int, length: int) -> Drawn:
    q, kv = _indices(length, random.device)
    ids = (random.numbers(30, batch, length) == 1).cumsum(-1)
    mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
    return Drawn({"mask": mask}, ((ids[:, :, None] == ids[:, None]) & (q >= kv))[:, None])


@draw
def padding(random: Random, batch: int, length: int) -> Drawn:
    lengths = random.numbers(length, batch)
    seen = torch.arange(length, device=random.device) < lengths[:, None, None, None]
    return Drawn({"mask": "padding", "kv_lens": lengths}, seen)


@draw
def window(random: Random, batch: int, length: int) -> Drawn:
    q, kv = _indices(length, random.device)
    size = random.number(1, length)
    return Drawn({"mask": "sliding_window", "window": size}, ((q >= kv) & (q - kv <= size))[None, None])


@draw
def own_function(random: Random, batch: int, length: int) -> Drawn:
    """A function made at each step, which holds a new tensor."""
    q, kv = _indices(length, random.device)
    hidden = random.numbers(4, length) == 1

    def own(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & ~hidden[kv]

    return Drawn({"mask": own}, ((q >= kv) & ~hidden)[None, None])


@draw
def learned_bias(random: Random, batch: int, length: int) -> Drawn:
    q, kv = _indices(length, random.device)
    table = random.normal(33).requires_grad_()

    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + table[(q - kv).clamp(-16, 16) + 16]

    bias = table[(q - kv).clamp(-16, 16) + 16]
    return Drawn({"mask": "causal", "score": biased}, (q >= kv)[None, None], bias, (table,))


@draw
def alibi(random: Random, batch: int, length: int) -> Drawn:
    q, kv = _indices(length, random.device)
    slopes = random.normal(HEADS).sigmoid()
    bias = -slopes[:, None, None] * (q - kv)
    call = {"mask": "causal", "score": "alibi", "slopes": slopes}
    return Drawn(call, (q >= kv)[None, None], bias)


def step(random: Random, batch: int, length: int, dtype: torch.dtype, name: str, trains: bool, checks: bool) -> None:
    """Draw a call, run it, and compare it with a plain computation."""
    q, k, v = (random.normal(batch, HEADS, length, 32, dtype=dtype).requires_grad_(trains) for _ in range(3))
    drawn = DRAWS[name](random, batch, length)
    leaves = [q, k, v, *drawn.learned]
    weight = random.normal(batch, HEADS, length, 32)
    with torch.set_grad_enabled(trains):
        out = flexmasks.attention(q, k, v, **drawn.arguments)
    got = [out, *torch.autograd.grad((out * weight).sum(), leaves)] if trains else [out]
    if not checks:
        return
    sees_something = drawn.seen.any(-1, keepdim=True)  # other rows have output and gradient 0
    with torch.set_grad_enabled(trains):
        scores = q.float() @ k.float().mT / math.sqrt(32) + drawn.bias
        weights = scores.masked_fill(~drawn.seen & sees_something, -math.inf).softmax(-1)
        expected = torch.where(sees_something, weights @ v.float(), 0.0)
    wanted = [expected, *torch.autograd.grad((expected * weight).sum(), leaves)] if trains else [expected]
    for x, y in zip(got, wanted, strict=True):
        assert error(x, y.detach().cpu()) < 2 * TOLERANCE[dtype], (name, batch, length, trains)


# --- what must not grow ---


def resident() -> int:
    """Return the bytes of this process that are in memory, without those that the allocator could give back."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library has no malloc_trim
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(STATM.read_text().split()[1]) * PAGE


def compilations() -> int:
    return private_torch.compiled_graphs() + private_torch.inductor_graphs()


def check_caches() -> int:
    """Assert that the caches are within their bounds, and return their bytes."""
    infos = flexmasks.cache_info()
    for name, info in infos.items():
        assert 0 <= info.bytes <= info.max_bytes, (name, info)
    return infos["total"].bytes


class Look(NamedTuple):
    """What must not grow: bytes of memory, bytes in the caches, and graphs that were compiled."""

    steps: int
    memory: int
    on_gpu: int
    cached: int
    graphs: int


@dataclass
class Run:
    """Steps in a row, of the masks by turns, and what must not grow while they run."""

    sizes: Sizes
    seed: int = 0
    checked_every: int = 1
    steps: int = 0
    seen: list[Look] = field(default_factory=list)

    def until(self, goes_on: Callable[[int], bool], modes: tuple[bool, ...]) -> None:
        sizes = self.sizes
        random = Random(self.seed + self.steps, sizes.device)
        turns = itertools.cycle(itertools.product(DRAWS, modes))
        while goes_on(self.steps):
            name, trains = next(turns)
            batch, length = random.number(*sizes.batches), random.number(*sizes.lengths)
            step(random, batch, length, sizes.dtype, name, trains, self.steps % self.checked_every == 0)
            self.steps += 1

    def warm_up(self, lengths: Iterable[int], modes: tuple[bool, ...]) -> None:
        """Run every kind of step with each batch size and these lengths."""
        random, (least, most) = Random(self.seed, self.sizes.device), self.sizes.batches
        for length, name, trains in itertools.product(lengths, DRAWS, modes):
            for batch in range(least, most + 1):
                step(random, batch, length, self.sizes.dtype, name, trains, True)

    def look_at(self, places: Iterable[int], modes: tuple[bool, ...]) -> None:
        """Run until each number of steps, and look there."""
        for place in places:
            self.until(lambda steps, place=place: steps < place, modes)  # type: ignore[misc]
            self.look()
            print(self.seen[-1], flush=True)

    def look(self) -> None:
        is_cuda = self.sizes.device == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
        on_gpu = torch.cuda.memory_allocated() if is_cuda else 0
        self.seen.append(Look(self.steps, resident(), on_gpu, check_caches(), compilations()))

    def check(self, grows_by: int) -> None:
        """Assert that nothing was compiled between the looks, and that memory grew by at most so many bytes.

        The caches may have grown besides, within their bounds. Without them, memory is as before.
        """
        assert {look.graphs for look in self.seen} == {self.seen[0].graphs}, self.seen
        flexmasks.clear_caches()
        self.look()
        first = self.seen[0]
        for later in self.seen[1:]:
            may_grow = grows_by + max(later.cached - first.cached, 0)
            assert later.memory - first.memory <= may_grow, self.seen
            assert later.on_gpu - first.on_gpu <= may_grow, self.seen


needs_statm = pytest.mark.skipif(not STATM.exists(), reason="the system has no /proc/self/statm")


@pytest.mark.slow
@needs_statm
def test_memory_and_caches_of_training_steps() -> None:
    run = Run(CPU, checked_every=5)
    run.look_at((100, 300), (True,))
    run.check(grows_by=4 << 20)


@needs_statm
@pytest.mark.campaign
def test_ten_thousand_training_steps() -> None:
    run = Run(CPU)
    run.look_at(range(1000, 11_001, 500), (True,))
    run.check(grows_by=8 << 20)


@needs_statm
@pytest.mark.campaign
def test_steps_that_train_and_evaluate() -> None:
    """Kernels are compiled for evaluation only, on a CPU."""
    run = Run(CPU)
    run.look_at(range(1000, 5001, 500), (True, False))
    run.check(grows_by=8 << 20)


@pytest.mark.gpu
@pytest.mark.campaign
def test_five_minutes_of_steps_on_a_gpu() -> None:
    end = time.monotonic() + 300
    run = Run(GPU, checked_every=50)
    # Tables have room for 16 or 32 blocks, and each room has its kernels. More is proven of the last two lengths.
    run.warm_up([1100, 1300, 1500, 2100, 2500, 2900, 2048, 2560], (True, False))
    print(f"{end - time.monotonic():.0f} s are left", flush=True)
    run.until(lambda steps: steps < 300, (True, False))
    run.look()
    while time.monotonic() < end:
        until = min(end, time.monotonic() + 30)
        run.until(lambda steps, until=until: time.monotonic() < until, (True, False))  # type: ignore[misc]
        run.look()
        print(run.seen[-1], flush=True)
    run.check(grows_by=64 << 20)


# --- eight threads ---


def _threads_for(seconds: float, modes: tuple[bool, ...], sizes: Sizes) -> list[Run]:
    """Run steps in eight threads at once; the caches are cleared now and then."""
    end = time.monotonic() + seconds
    runs = [Run(sizes, seed=1000 * n) for n in range(THREADS)]
    barrier = threading.Barrier(THREADS)

    def work(number: int) -> None:
        torch.set_num_threads(1)
        barrier.wait()
        while time.monotonic() < end:
            until = runs[number].steps + 50
            runs[number].until(lambda steps, until=until: steps < until and time.monotonic() < end, modes)  # type: ignore[misc]
            if number == 0:
                check_caches()
            if number == 1 and modes == (True,):  # no kernel is compiled again
                flexmasks.clear_caches()

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, n) for n in range(THREADS)]:
            done.result()
    return runs


@pytest.mark.slow
def test_eight_threads_train_at_once() -> None:
    runs = _threads_for(1.5, (True,), CPU)
    assert all(run.steps > 0 for run in runs)


@needs_statm
@pytest.mark.campaign
def test_eight_threads_for_two_minutes() -> None:
    warm = Run(CPU)
    warm.until(lambda steps: steps < 1000, (True, False))
    look = Run(CPU)
    for seconds in (20, 50, 50):
        runs = _threads_for(seconds, (True, False), CPU)
        assert all(run.steps > 0 for run in runs)
        look.steps += sum(run.steps for run in runs)
        look.look()
        print(look.seen[-1], flush=True)
    look.check(grows_by=32 << 20)


@pytest.mark.gpu
@pytest.mark.campaign
def test_eight_threads_on_a_gpu() -> None:
    faulthandler.dump_traceback_later(300, exit=True)  # if threads wait for each other
    try:
        runs = _threads_for(90, (True, False), GPU)
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert all(run.steps > 0 for run in runs)
