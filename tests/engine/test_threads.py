"""Tests of calls in many threads at once: what is compiled, what is logged, and that no thread disturbs another."""

from __future__ import annotations

import itertools
import logging
import re
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fresh
import pytest
import torch
from helpers import TOLERANCE, error
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch._dynamo.utils import counters

import flexmasks
from flexmasks import road
from flexmasks.backends import tiles
from flexmasks.kernels import softmax_operator
from flexmasks.plans import recorded
from flexmasks.plans.tracing import trace

THREADS = 8
LENGTH = 160
STARTS = [0, 60, 160]

pytestmark = pytest.mark.usefixtures("one_thread", "cold")


class Lines(logging.Handler):
    """The lines that a logger writes."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def after_compilations(lines: list[str]) -> list[str]:
    """Return the lines behind compilations; one before each says what comes."""
    before, after = lines[::2], lines[1::2]
    for announced, done in zip(before, after, strict=True):
        what = re.fullmatch(r"compiling attention for backend 'flex', (.*)", announced)
        assert what, announced
        assert re.match(r"compiled attention in \d+\.\d s: " + re.escape(what[1]), done)
    return after


@pytest.fixture
def logged() -> Iterator[tuple[list[str], list[str]]]:
    """The lines of flexmasks from level INFO on, and torch's warnings: of its loggers, and of Python's module."""
    ours, theirs = Lines(logging.INFO), Lines(logging.WARNING)
    loggers = {"flexmasks": ours}
    loggers |= {name: theirs for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"}
    logger = logging.getLogger("flexmasks")
    level = logger.level
    logger.setLevel(logging.INFO)
    for name, handler in loggers.items():
        logging.getLogger(name).addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield ours.lines, theirs.lines
    for name, handler in loggers.items():
        logging.getLogger(name).removeHandler(handler)
    logger.setLevel(level)
    hidden = DeprecationWarning, PendingDeprecationWarning  # Python does not show these
    shown = [str(w.message) for w in caught if not issubclass(w.category, hidden)]
    # torch warns when the test itself makes a nested tensor, and of an early patch of Python 3.13.
    expected = ("nested tensors is in prototype", "Guards may run slower on Python 3.13.0")
    assert [message for message in shown if not any(text in message for text in expected)] == []


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


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [3, pytest.param(5, marks=pytest.mark.campaign)])
def test_cold_calls_at_once_compile_each_kernel_once(kernels: int, logged: tuple[list[str], list[str]]) -> None:
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
        cold = [
            lambda: flexmasks.attention(q, k, v, mask="sliding_window", window=20, backend=backend),
            lambda: flexmasks.attention(q, k, v, mask=own, backend=backend),
            lambda: flexmasks.attention(*nested, mask="sliding_window", window=9, backend=backend).values(),
            lambda: flexmasks.attention(q, k, v, mask="document", document_ids=ids.clone(), backend=backend),
            lambda: flexmasks.varlen_attention(*ends_to_end, STARTS, mask="sliding_window", window=9, backend=backend),
        ]
        return [*cold[:kernels], lambda: trained("sliding_window", window=20), lambda: trained(own)]

    want = [call() for call in calls("reference")]
    ours, theirs = logged
    for expected in (
        # The nested tensors do not share their offsets. Calls that need gradients compile nothing on a CPU.
        [
            "sliding_window(window=20), float32",
            "own, float32",
            "packed(inner=sliding_window(window=9), offsets=int64[3], kv_offsets=int64[3]), float32",
            "document(document_ids=int64[160]), float32",
            "packed(inner=sliding_window(window=9), offsets=int64[3]), float32",
        ][:kernels],
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
        compiled = after_compilations(ours)
        assert len(compiled) == len(expected), ours
        for name in expected:
            (line,) = [line for line in compiled if name in line]
            assert "compiled attention in" in line
            assert "float32, q [1, 2, 160, 16]" in line
            assert "the first kernel" in line or "no kernel had this mask" in line
        assert theirs == []


@pytest.mark.slow
def test_one_cold_call_in_all_threads(logged: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads wait for one compilation; each new length and dtype is compiled once, with its reason.

    The kernels are traced, and not made of C++, as those of the test above are.
    """
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile_(*args, **options | {"backend": "eager"}))
    q, k, v = torch.randn(3, 1, 2, LENGTH, 32)
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)
    ours, theirs = logged
    for reason, tensors in (
        ("it is the first kernel", (q, k, v)),
        ("no kernel had these lengths", (q[:, :, 1:], k, v)),
        (None, (turned, k, v)),  # is copied into the layout of the first kernel
        ("no kernel had this dtype", (q.double().half(), k.half(), v.half())),
    ):
        ours.clear()
        outs: dict[int, Tensor] = {}

        def work(number: int, tensors: Any = tensors, outs: dict[int, Tensor] = outs) -> None:
            outs[number] = flexmasks.attention(*tensors, q_offset=0, mask="sliding_window", window=20)

        in_threads(work)
        assert [line.partition("]: ")[2] for line in after_compilations(ours)] == [reason][: reason is not None]
        want = flexmasks.attention(
            *(x.float() for x in tensors), q_offset=0, mask="sliding_window", window=20, backend="reference"
        )
        assert all(error(out, want) < TOLERANCE[out.dtype] for out in outs.values())
    assert theirs == []


_TWO_THREADS = """
    import faulthandler, importlib, sys, threading
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    from flexmasks import compat

    faulthandler.dump_traceback_later(60, exit=True)
    _setup_privateuseone_for_python_backend("npy")  # like a GPU, it has a thread of its own for backward passes
    if sys.argv[1] == "mended":
        compat.flex_attention
    create = importlib.import_module("torch._higher_order_ops.flex_attention").create_fw_bw_graph
    has_begun, lock = threading.Event(), compat.compile_lock

    class CompiledLate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            has_begun.set()
            with lock:
                return gradient * 2

    def train():
        with FakeTensorMode():
            x = torch.zeros((), device="npy:0", requires_grad=True)
            torch.autograd.grad(CompiledLate.apply(x), x)

    thread = threading.Thread(target=train, daemon=True)
    with lock:
        thread.start()
        has_begun.wait()
        if sys.argv[1] != "mended":  # torch by itself
            faulthandler.dump_traceback_later(5, exit=True)
        with FakeTensorMode():
            score = torch.zeros((), device="npy:0", requires_grad=True)
            indices = [torch.zeros((), dtype=torch.int, device="npy:0") for _ in range(4)]
            create(lambda score, b, h, q, kv: score, (score, *indices), ())
    thread.join()
    print("both threads ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mended", pytest.param("by torch", marks=pytest.mark.campaign)])
def test_a_thread_that_compiles_waits_for_no_backward_pass(way: str) -> None:
    """Both threads would wait for each other: on a GPU one thread runs all backward passes."""
    ran = fresh.run(textwrap.dedent(_TWO_THREADS), way)
    assert ("both threads ended" in ran.stdout) == (way == "mended"), ran.stderr


@pytest.mark.slow
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
            hits = flexmasks.cache_info()["plans"].parts["calls"].hits
            got = pool.submit(calls).result(60)
            assert flexmasks.cache_info()["plans"].parts["calls"].hits > hits
        finally:
            goes_on.set()
        assert torch.equal(compiled.result(), q.sin() + 1)
    assert all(map(torch.equal, got, want))


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.slow
def test_known_calls_run_while_another_thread_records_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16)
    records = threading.Event()

    def trace_slowly(function: Callable[..., Any], *arguments: Any) -> Any:
        def slow(*inputs: Tensor) -> Any:
            records.set()
            time.sleep(0.2)
            return function(*inputs)

        return trace(slow, *arguments)

    def plan() -> None:
        for size in (30, 40):  # the second plan of a kind is recorded
            flexmasks.attention(q, k, v, mask="document", document_ids=torch.arange(LENGTH) // size)

    monkeypatch.setattr(recorded, "trace", trace_slowly)
    want = flexmasks.attention(q, k, v, mask="sliding_window", window=20)
    with ThreadPoolExecutor(1) as pool:
        planned = pool.submit(plan)
        assert records.wait(60)
        while not planned.done():
            assert torch.equal(flexmasks.attention(q, k, v, mask="sliding_window", window=20), want)
        planned.result()


# --- training on a CPU ---


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Give torch three threads, whatever the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def _by_batch(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & ((kv % 5 != b) | (h == 1))


# sizes (batch, heads, heads of keys, queries, keys), and the mask and score
DIVIDED: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "one head": ((1, 1, 1, 700, 700), {"mask": "sliding_window", "window": 300}),
    "grouped heads": ((1, 6, 2, 300, 400), {"mask": "causal", "score": "alibi"}),
    "many short": ((9, 4, 4, 70, 70), {"mask": "causal"}),
    "by batch and head": ((3, 4, 4, 200, 180), {"mask": _by_batch}),
    "few queries": ((1, 2, 2, 20, 9000), {"mask": "sliding_window", "window": 8000, "q_offset": 8980}),
    "small": ((1, 2, 1, 150, 150), {"mask": "causal", "score": "softcap", "cap": 3.0}),
    "tiny": ((1, 1, 1, 20, 20), {"mask": "causal"}),
}


def _trained(sizes: tuple[int, int, int, int, int], call: dict[str, Any]) -> list[Tensor]:
    """Return output, lse and all gradients of a call, with a learned table if it has no score."""
    batch, heads, kv_heads, q_len, kv_len = sizes
    generator = torch.Generator().manual_seed(1)
    shapes = (batch, heads, q_len, 16), (batch, kv_heads, kv_len, 16), (batch, kv_heads, kv_len, 16), (heads, 33)
    *leaves, table = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    if "score" not in call:
        call = call | {"score": "relative_bias", "table": table}
        leaves.append(table)
    out, lse = flexmasks.attention(*leaves[:3], backend="reference", return_lse=True, **{"q_offset": 0, **call})
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    loss = (out * weight).sum() + lse[lse.isfinite()].square().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


_REACH = 5


@pytest.mark.parametrize("is_plan", [False, True, "with tensors"])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("what", ["global", "closure", "tensor"])
def test_what_changes_while_a_call_plans(
    what: str, moment: str, is_plan: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread changes what a mask reads, and calls too; no later call finds what was planned before."""
    near, shown = 5, torch.full((LENGTH,), 5)
    if what == "global":
        function = lambda b, h, q, kv: (q - kv).abs() <= _REACH  # noqa: E731
    elif what == "closure":
        function = lambda b, h, q, kv: (q - kv).abs() <= near  # noqa: E731
    else:
        function = lambda b, h, q, kv: (q - kv).abs() <= shown[kv]  # noqa: E731
    mask: Any = function
    if is_plan == "with tensors":
        mask = flexmasks.get_mask(function) & flexmasks.masks.padding(kv_lens=torch.tensor([LENGTH]))
    mask = flexmasks.plan(mask, LENGTH) if is_plan else mask
    own = mask.tensors["shown"][0] if is_plan and what == "tensor" else shown
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16)
    distances = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    original, is_changed = road.run_first_time, False

    def change(reach: int) -> None:
        nonlocal near
        near = reach
        monkeypatch.setitem(globals(), "_REACH", reach)
        own.fill_(reach)

    def is_right(reach: int) -> bool:
        got = flexmasks.attention(q, k, v, mask=mask, backend="reference")
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=distances <= reach)
        return error(got, want) < TOLERANCE[torch.float32]

    def planned(*call: Any) -> Any:
        nonlocal is_changed
        if is_changed:
            return original(*call)
        is_changed = True
        found = original(*call) if moment == "after" else None
        change(20)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(is_right, 20).result()
        return found or original(*call)

    monkeypatch.setattr(road, "run_first_time", planned)
    is_right(5)  # the change comes in the midst of it: either reach is right
    assert is_changed
    for reach in (20, 5, 20, 5):
        change(reach)
        assert is_right(reach)
        assert is_right(reach)


@pytest.mark.parametrize("name", DIVIDED)
def test_threads_that_share_the_tiles_give_what_one_gives(name: str, three_threads: None) -> None:
    got = _trained(*DIVIDED[name])
    for x, y in zip(got, _trained(*DIVIDED[name]), strict=True):
        assert torch.equal(x, y)  # the same in each run
    torch.set_num_threads(1)
    for x, want in zip(got, _trained(*DIVIDED[name]), strict=True):
        assert torch.allclose(x, want, rtol=1e-9, atol=1e-9)


def test_no_operation_of_a_tile_waits_for_other_threads(three_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load, each operation that is divided among threads waits until the last of them runs again."""
    threads: dict[int, set[int]] = {}  # torch's threads for an operation, in each thread
    parts: set[int] = set()
    scores, tiles_of_part = tiles.Tiles._scores, tiles.Tiles._tiles

    def noted(self: Any, *args: Any) -> Tensor:
        threads.setdefault(threading.get_ident(), set()).add(torch.get_num_threads())
        return scores(self, *args)

    def dealt(self: Any, part: int) -> Iterator[Any]:
        for tile in tiles_of_part(self, part):
            parts.add(part)
            yield tile

    monkeypatch.setattr(tiles.Tiles, "_scores", noted)
    monkeypatch.setattr(tiles.Tiles, "_tiles", dealt)
    for name in ("one head", "grouped heads", "many short", "by batch and head"):
        threads.clear()
        parts.clear()
        _trained(*DIVIDED[name])
        assert parts == {0, 1, 2}, name
        assert len(threads) <= 3, name  # a thread may take two parts
        assert set().union(*threads.values()) == {1}, name
        assert threading.get_ident() not in threads
    threads.clear()
    _trained(*DIVIDED["small"])
    assert [*threads.values()] == [{1}]  # in one thread alone
    # Neither the caller nor a thread that starts later has fewer threads than before.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: torch.ones(9).sum() and torch.get_num_threads()).result() == 3
    assert torch.get_num_threads() == 3


@pytest.mark.slow
def test_calls_from_many_threads_share_the_tiles_threads(three_threads: None) -> None:
    want = {name: _trained(*DIVIDED[name]) for name in DIVIDED}
    before = threading.active_count()

    def work(number: int) -> None:
        torch.set_num_threads(3)
        for name in [*DIVIDED][number % len(DIVIDED) :]:
            assert all(map(torch.equal, _trained(*DIVIDED[name]), want[name])), name

    in_threads(work)
    assert threading.active_count() <= before


def test_errors_in_threads_are_raised(three_threads: None) -> None:
    q = torch.randn(1, 2, 512, 16, requires_grad=True)

    def wrong(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if threading.current_thread().name.startswith("flexmasks"):
            raise ValueError("a fault of the function")
        return score

    with torch.no_grad(), pytest.raises(ValueError, match="a fault of the function"):
        flexmasks.attention(q, q, q, mask="causal", score=wrong, backend="reference")
    with torch.inference_mode():
        seen = flexmasks.attention(q, q, q, mask="causal", backend="reference")
    assert error(seen, flexmasks.attention(q, q, q, mask="causal").detach()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("shape", [(1, 4, 300, 300), (3, 2, 5, 9000), (1, 1, 700, 333), (40, 2, 30, 30), (2, 1, 8, 8)])
def test_threads_that_share_a_softmax(
    shape: tuple[int, ...], three_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(2, *shape, dtype=torch.float64)
    x.requires_grad_()
    threads: dict[int, set[int]] = {}
    hidden = softmax_operator.hidden_places

    def noted(*args: Any) -> Tensor | None:
        threads.setdefault(threading.get_ident(), set()).add(torch.get_num_threads())
        return hidden(*args)

    def call() -> list[Tensor]:
        y = flexmasks.masked_softmax(x, mask="causal", q_offset=0)
        (dx,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
        return [y, dx, *torch.autograd.grad(dx.square().sum(), x)]

    monkeypatch.setattr(softmax_operator, "hidden_places", noted)
    got = call()
    is_small = x.numel() < 1 << 15
    assert set().union(*threads.values()) == ({3} if is_small else {1})
    assert len(threads) <= (1 if x.numel() < 1 << 17 else 3)
    assert (threading.get_ident() in threads) == is_small
    assert not any(y.requires_grad for y in call()[2:])
    torch.set_num_threads(1)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(got, call(), strict=True))
