"""Tests of calls in many threads at once: what is compiled, what is logged, and that no thread disturbs another."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import TOLERANCE, error
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import flexmasks
from flexmasks.plans import recorded

THREADS = 8
LENGTH = 160
STARTS = [0, 60, 160]

pytestmark = pytest.mark.usefixtures("one_thread", "cold")


@pytest.fixture
def cold() -> Iterator[None]:
    """Forget all kernels before and after a test."""
    flexmasks.clear_caches()
    yield
    flexmasks.clear_caches()


class Lines(logging.Handler):
    """The lines that a logger writes."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[str]]]:
    """The lines of flexmasks from level INFO on, and torch's warnings: of its loggers, and of Python's module."""
    ours, theirs = Lines(logging.INFO), Lines(logging.WARNING)
    loggers = {"flexmasks": ours}
    loggers |= {name: theirs for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"}
    monkeypatch.setattr(logging.getLogger("flexmasks"), "level", logging.INFO)
    for name, handler in loggers.items():
        logging.getLogger(name).addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield ours.lines, theirs.lines
    for name, handler in loggers.items():
        logging.getLogger(name).removeHandler(handler)
    hidden = DeprecationWarning, PendingDeprecationWarning  # Python does not show these
    shown = [str(w.message) for w in caught if not issubclass(w.category, hidden)]
    # torch warns when the test itself makes a nested tensor
    assert [message for message in shown if "nested tensors is in prototype" not in message] == []


def in_threads(work: Callable[[int], None]) -> None:
    """Call `work` in all threads at once, and raise what it raises."""
    barrier = threading.Barrier(THREADS)

    def started(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(started, n) for n in range(THREADS)]:
            done.result()


def jagged(x: Tensor) -> Tensor:
    """Return [H, total, D] as a jagged tensor [B, H, jagged, D] of the sequences."""
    parts = [x[:, a:b].transpose(0, 1) for a, b in itertools.pairwise(STARTS)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


def test_cold_calls_at_once_compile_each_kernel_once(logged: tuple[list[str], list[str]]) -> None:
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16)
    ends_to_end = [x[0].transpose(0, 1) for x in (q, k, v)]
    nested = [jagged(x[0]) for x in (q, k, v)]
    ids = torch.arange(LENGTH) // 50

    def own(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv % 7 != 3)

    def trained(mask: Any, **params: Any) -> Tensor:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flexmasks.attention(*leaves, mask=mask, **params)
        return torch.cat([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])

    def calls(backend: str) -> list[Callable[[], Tensor]]:
        return [
            lambda: flexmasks.attention(q, k, v, mask="sliding_window", window=20, backend=backend),
            lambda: flexmasks.attention(q, k, v, mask=own, backend=backend),
            lambda: flexmasks.attention(q, k, v, mask="document", document_ids=ids.clone(), backend=backend),
            lambda: flexmasks.varlen_attention(*ends_to_end, STARTS, mask="sliding_window", window=9, backend=backend),
            lambda: flexmasks.attention(*nested, mask="sliding_window", window=9, backend=backend).values(),
            lambda: trained("sliding_window", window=20),
            lambda: trained(own),
        ]

    want = [call() for call in calls("reference")]
    ours, theirs = logged
    for expected in (
        # The nested tensors do not share their offsets. Calls that need gradients compile nothing on a CPU.
        [
            "sliding_window(window=20), float32",
            "own, float32",
            "document(document_ids=int64[160]), float32",
            "packed(inner=sliding_window(window=9), offsets=int64[3]), float32",
            "packed(inner=sliding_window(window=9), offsets=int64[3], kv_offsets=int64[3]), float32",
        ],
        [],
    ):
        ours.clear()
        graphs = counters["stats"]["unique_graphs"]

        def work(number: int) -> None:
            made = calls("auto")
            for i in range(len(made)):
                n = (number + i) % len(made)
                assert error(made[n](), want[n].detach()) < 2 * TOLERANCE[torch.float32], n

        in_threads(work)
        assert counters["stats"]["unique_graphs"] - graphs == len(expected), ours
        assert len(ours) == len(expected), ours
        for name in expected:
            (line,) = [line for line in ours if name in line]
            assert "compiled attention in" in line
            assert "float32, q [1, 2, 160, 16]" in line
            assert "the first kernel" in line or "no kernel had this mask" in line
        assert theirs == []


def test_one_cold_call_in_all_threads(logged: tuple[list[str], list[str]]) -> None:
    """All threads wait for one compilation; each new length, layout and dtype is compiled once, with its reason."""
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16)
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)
    ours, theirs = logged
    for reason, tensors in (
        ("it is the first kernel", (q, k, v)),
        ("no kernel had these lengths", (q[:, :, 1:], k, v)),
        ("no kernel had this memory layout of q, k and v", (turned, k, v)),
        ("no kernel had this dtype", (q.double().half(), k.half(), v.half())),
    ):
        ours.clear()
        outs: dict[int, Tensor] = {}

        def work(number: int, tensors: Any = tensors, outs: dict[int, Tensor] = outs) -> None:
            outs[number] = flexmasks.attention(*tensors, mask="sliding_window", window=20)

        in_threads(work)
        assert [line.partition("]: ")[2] for line in ours] == [reason]
        want = flexmasks.attention(*(x.float() for x in tensors), mask="sliding_window", window=20, backend="reference")
        assert all(error(out, want) < TOLERANCE[out.dtype] for out in outs.values())
    assert theirs == []


def test_known_calls_run_while_another_thread_compiles() -> None:
    """A compilation in another thread neither blocks known calls nor sends them another way."""
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16)
    compiles, goes_on = threading.Event(), threading.Event()

    def slow_compiler(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiles.set()
        assert goes_on.wait(60)
        return graph.forward

    def calls() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        trained = flexmasks.attention(*leaves, mask="causal", score="alibi")
        return [
            flexmasks.attention(q, k, v, mask="sliding_window", window=20),
            flexmasks.attention(q, k, v, mask="causal"),
            *torch.autograd.grad(trained.sum(), leaves),
            flexmasks.masked_softmax(q @ k.mT, mask="causal"),
            flexmasks.dense_mask("sliding_window", LENGTH, window=30),
        ]

    want = calls()
    user_code = torch.compile(lambda x: x.sin() + 1, backend=slow_compiler)
    with ThreadPoolExecutor(2) as pool:
        compiled = pool.submit(user_code, q)
        try:
            assert compiles.wait(60)
            hits = flexmasks.cache_info()["calls"].hits
            got = pool.submit(calls).result(60)
            assert flexmasks.cache_info()["calls"].hits > hits
        finally:
            goes_on.set()
        assert torch.equal(compiled.result(), q.sin() + 1)
    assert all(map(torch.equal, got, want))


def test_known_calls_run_while_another_thread_records_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch traces in one thread, it refuses compiled calls in all threads."""
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16)
    records = threading.Event()

    def make_slowly(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def slow(*inputs: Tensor) -> Any:
            records.set()
            time.sleep(0.5)
            return function(*inputs)

        return make_fx(slow, **options)

    def plan() -> None:
        for size in (30, 40):  # the second plan of a kind is recorded
            flexmasks.attention(q, k, v, mask="document", document_ids=torch.arange(LENGTH) // size)

    monkeypatch.setattr(recorded, "make_fx", make_slowly)
    want = flexmasks.attention(q, k, v, mask="sliding_window", window=20)
    with ThreadPoolExecutor(1) as pool:
        planned = pool.submit(plan)
        assert records.wait(60)
        while not planned.done():
            assert torch.equal(flexmasks.attention(q, k, v, mask="sliding_window", window=20), want)
        planned.result()
