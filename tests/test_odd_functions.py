"""Attention under mask functions in odd styles, against torch's eager `create_mask`.

Kernels that Inductor compiles for some of these functions end the process. Therefore another process computes, and a
test fails where that process ends.
"""

from __future__ import annotations

import multiprocessing
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from functions_odd import UNLIKE_SINGLE_NUMBERS, WRITTEN, Mask, generated, of_expression
from helpers import TOLERANCE, check_equal_block_masks, error, exact
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

import flexmasks
from flexmasks import compat

SECONDS = 300  # limit of one function; compilation takes up to 30
BLOCK_SIZE = 32


@dataclass(frozen=True)
class Shape:
    """Sizes of a call, and where its queries start."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    offset: int | tuple[int, ...] = 0

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.q_len, self.kv_len

    def function(self, source: str | int, device: str) -> Mask:
        """Return a function for this shape: one of WRITTEN by name, or a generated one by seed."""
        factory = WRITTEN[source] if isinstance(source, str) else generated(source)[0]
        last = self.offset if isinstance(self.offset, int) else max(self.offset)
        positions = self.q_len + last
        return factory(torch.Generator().manual_seed(0), self.batch, self.heads, positions, self.kv_len, device=device)

    def q_offset(self, device: str) -> int | Tensor:
        return self.offset if isinstance(self.offset, int) else torch.tensor(self.offset, device=device)


SHAPES = {
    "more queries": Shape(2, 3, 100, 75),
    "more keys": Shape(2, 3, 75, 100),
    "offset": Shape(2, 3, 50, 90, 35),
    "offsets": Shape(2, 3, 60, 90, (11, 38)),
    "blocks": Shape(2, 3, 150, 200),
}


# --- what is right ---


def visible_pairs(mask: Mask, shape: Shape, device: str) -> Tensor:
    """Return what torch's eager `create_mask` computes: booleans [B, H, Q, KV]."""
    offset = shape.q_offset(device)

    def moved(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if isinstance(offset, Tensor):
            q = q + offset[b]
        elif offset:
            q = q + offset
        return mask(b, h, q, kv)

    visible = create_mask(moved, *shape.sizes, device=device)
    if visible.dtype != torch.bool or visible.shape != shape.sizes:
        raise ValueError(f"{visible.dtype} {list(visible.shape)}")
    return visible


def expected(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return attention in float64; rows that see nothing are 0."""
    sees = visible.any(-1, keepdim=True)
    out = scaled_dot_product_attention(q, k, v, attn_mask=visible | ~sees)
    return torch.where(sees, out, 0)


def faults(source: str | int, job: dict[str, Any], seen: Callable[[float], None]) -> str:
    """Return what is wrong with the library's results for one function, "" for nothing.

    seen: receives the visible share before the library is called.
    """
    shape, device, dtype = SHAPES[job["shape"]], job["device"], job["dtype"]
    mask = shape.function(source, device)
    visible = visible_pairs(mask, shape, device)
    seen(float(visible.float().mean()))
    wrong = _faults_of_attention(mask, shape, device, dtype, job["backend"], job["backward"], visible.cpu())
    if device == "cpu":
        wrong += _faults_of_blocks(mask, shape, visible)
    return "; ".join(wrong)


def _faults_of_attention(
    mask: Mask, shape: Shape, device: str, dtype: torch.dtype, backend: str, backward: bool, visible: Tensor
) -> list[str]:
    """Compare the output, and with `backward` the gradients.

    The last columns of v are a unit matrix, so that the output there is above 0 exactly where a query sees a key.
    """
    generator = torch.Generator().manual_seed(1)
    size = 128 if shape.kv_len <= 100 else 256
    lengths = [shape.q_len, shape.kv_len, shape.kv_len]
    leaves = [torch.randn(shape.batch, shape.heads, n, size, generator=generator).to(dtype) for n in lengths]
    leaves[2][..., -shape.kv_len :] = torch.eye(shape.kv_len)
    q, k, v = (x.to(device).requires_grad_(backward) for x in leaves)
    out = flexmasks.attention(q, k, v, mask=mask, q_offset=shape.q_offset(device), backend=backend)
    exact_leaves = [exact(x) for x in leaves]
    want = expected(*exact_leaves, visible)
    wrong = []
    shown = out.detach().cpu()[..., -shape.kv_len :] != 0
    if not torch.equal(shown, visible):
        where = tuple((shown != visible).nonzero()[0].tolist())
        wrong.append(
            f"attention shows {int((shown & ~visible).sum())} hidden and hides {int((visible & ~shown).sum())} visible "
            f"of {visible.numel()} pairs, the first at {where}"
        )
    elif error(out, want) > TOLERANCE[dtype]:
        wrong.append(f"the output errs by {error(out, want):.1e}")
    if backward and not wrong:
        grad = torch.randn(out.shape, generator=generator).to(dtype)
        got = torch.autograd.grad(out, (q, k, v), grad.to(device))
        theirs = torch.autograd.grad(want, exact_leaves, grad.double())
        for name, mine, right in zip("qkv", got, theirs, strict=True):
            if error(mine, right) > 2 * TOLERANCE[dtype]:
                wrong.append(f"the gradient of {name} errs by {error(mine, right):.1e}")
    return wrong


def _faults_of_blocks(mask: Mask, shape: Shape, visible: Tensor) -> list[str]:
    """Compare `block_mask` and `dense_mask`."""
    more = {"batch": shape.batch, "heads": shape.heads, "q_offset": shape.q_offset("cpu")}
    got = flexmasks.block_mask(mask, shape.q_len, shape.kv_len, block_size=BLOCK_SIZE, **more)
    own = got.kv_num_blocks.shape[:2]
    want = create_block_mask(
        lambda b, h, q, kv: visible[b, h, q, kv], *own, *shape.sizes[2:], device="cpu", BLOCK_SIZE=BLOCK_SIZE
    )
    wrong = []
    try:
        check_equal_block_masks(got, want)
        assert torch.equal(visible[: own[0], : own[1]].expand_as(visible), visible)
    except AssertionError:
        wrong.append("block_mask differs")
    if not torch.equal(flexmasks.dense_mask(mask, shape.q_len, shape.kv_len, **more).expand_as(visible), visible):
        wrong.append("dense_mask differs")
    return wrong


# --- the other process ---


@dataclass
class Judged:
    """What a process found about one function."""

    taken: bool  # whether torch's create_mask evaluates the function
    share: float  # of visible pairs
    fault: str


def _serve(connection: Connection, filters: list[tuple[Any, ...]]) -> None:
    """Judge functions until None comes, in a process of its own."""
    import conftest

    conftest.pytest_configure()
    torch.set_num_threads(1)
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        patterns = [getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)]
        warnings.filterwarnings(action, patterns[0], category, patterns[1], line)
    while (job := connection.recv()) is not None:
        if job["source"] is None:
            connection.send(first_calls())
            continue
        taken = False

        def seen(share: float) -> None:
            nonlocal taken
            taken = True
            connection.send(share)

        try:
            fault = faults(job["source"], job, seen)
        except Exception as failed:  # a compiler's error may be of any kind
            fault = f"{type(failed).__name__}: {str(failed).strip()[:300]}"
        if not taken:
            connection.send(None)
        connection.send(fault)


class Judge:
    """A process that judges functions, and starts again after a function that ended it."""

    def __init__(self) -> None:
        self.process: Any = None

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, list(warnings.filters)), daemon=True)
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None

    def answer(self, seconds: float = SECONDS) -> Any:
        if not self.connection.poll(seconds):
            raise TimeoutError(f"nothing came within {seconds} s")
        return self.connection.recv()

    def first_calls(self) -> tuple[list[float], int]:
        self.start()
        self.connection.send({"source": None})
        return self.answer(2 * SECONDS)

    def judge(
        self,
        source: str | int,
        shape: str,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        backend: str = "auto",
        backward: bool = False,
    ) -> Judged:
        if self.process is None:
            self.start()
        job = {"source": source, "shape": shape, "device": device, "dtype": dtype}
        share = None
        try:
            self.connection.send(job | {"backend": backend, "backward": backward})
            share = self.answer()
            fault = self.answer()
        except (EOFError, ConnectionError):
            self.process.join()
            fault = f"the process ends with exit code {self.process.exitcode}"
            self.stop()
        except TimeoutError as late:
            fault = str(late)
            self.stop()
        return Judged(share is not None, share or 0.0, fault)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    one = Judge()
    yield one
    one.stop()


# --- tests ---


def test_the_oracle_is_what_python_computes() -> None:
    """`create_mask` uses vmap; at single pairs, the function itself gives the same, each time that it is made."""
    shape = SHAPES["more queries"]
    wrong = []
    mixed = 0
    places = torch.stack([torch.randint(n, (25,)) for n in shape.sizes], 1).tolist()
    for name in WRITTEN:
        mask = shape.function(name, "cpu")
        visible = visible_pairs(mask, shape, "cpu")
        if not torch.equal(visible_pairs(shape.function(name, "cpu"), shape, "cpu"), visible):
            wrong.append(f"{name}: other values the second time")
        if name not in UNLIKE_SINGLE_NUMBERS:
            alone = [bool(mask(*map(torch.tensor, place))) for place in places]
            if alone != [bool(visible[tuple(place)]) for place in places]:
                wrong.append(f"{name}: other values without vmap")
        mixed += bool(visible.any()) and not bool(visible.all())
    assert not wrong, "\n".join(wrong)
    assert mixed > 0.9 * len(WRITTEN)


@pytest.mark.parametrize("name", WRITTEN)
def test_written_functions(name: str, judge: Judge) -> None:
    """Each function has one of the shapes here, and all of them in the campaign."""
    shape = list(SHAPES)[list(WRITTEN).index(name) % len(SHAPES)]
    judged = judge.judge(name, shape)
    assert judged.taken, judged.fault
    assert not judged.fault, f"{shape}: {judged.fault}"


@pytest.mark.campaign
@pytest.mark.parametrize("shape", SHAPES)
def test_written_functions_in_every_shape(shape: str, judge: Judge) -> None:
    wrong = {name: judged.fault for name in WRITTEN if (judged := judge.judge(name, shape)).fault}
    assert not wrong, "\n".join(f"{name}: {fault}" for name, fault in wrong.items())


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 50), *(pytest.param(n, 100, marks=pytest.mark.campaign) for n in range(1000, 21000, 1000))],
)
def test_generated_functions(first: int, count: int, judge: Judge) -> None:
    """Functions that torch refuses are passed over; the campaign tries 2,000 others."""
    wrong = []
    taken = mixed = 0
    seed = first
    while taken < count:
        shape = list(SHAPES)[seed % len(SHAPES)]
        judged = judge.judge(seed, shape)
        if judged.taken:
            taken += 1
            mixed += 0 < judged.share < 1
            if judged.fault:
                wrong.append(f"{seed}, {shape}: {generated(seed)[1]}: {judged.fault}")
        seed += 1
    assert not wrong, "\n".join([f"{len(wrong)} of {taken} functions:", *wrong])
    assert seed - first < 1.2 * count
    assert mixed > count // 2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("name", list(WRITTEN)[::6])
def test_written_functions_on_a_gpu(name: str, backend: str, judge: Judge) -> None:
    shape = list(SHAPES)[list(WRITTEN).index(name) // 6 % len(SHAPES)]
    judged = judge.judge(name, shape, "cuda", torch.bfloat16, backend, backward=True)
    assert judged.taken, judged.fault
    assert not judged.fault, f"{shape}: {judged.fault}"


# --- new functions are quick ---

GRAPHS = 4  # that 200 functions may compile together
MEDIAN = 0.05  # seconds
LENGTH, HEADS = 1024, 4
PLAIN = [
    *("q >= kv", "q - kv < {n}", "(q >= kv) & (q - kv <= {n})", "kv < {n}", "(q - kv) % {n} == 0", "ids[q] == ids[kv]"),
    *("(q // {n} == kv // {n}) & (q >= kv)", "(q - kv).abs() < {n} * (h + 1)", "flag[kv] | (kv < {n})", "seen[q, kv]"),
]


def many_functions() -> list[Mask]:
    """Return 100 different functions, 50 odd and 50 plain ones, and 100 with different numbers."""
    one_by_one = re.compile(r"isin|isclose|take\(|changes an index")  # what vmap computes element by element
    odd = [factory for name, factory in WRITTEN.items() if not one_by_one.search(name)]
    plain = [of_expression(PLAIN[n % len(PLAIN)].format(n=n + 17) + f" | (kv == {n})") for n in range(50)]
    chosen = [*odd[:: len(odd) // 50][:50], *plain]
    made = [make(torch.Generator().manual_seed(0), 1, HEADS, LENGTH, LENGTH) for make in chosen]
    return [*made, *(_reaches(n) for n in range(100))]


def _reaches(n: int) -> Mask:
    return lambda b, h, q, kv: q + n >= kv


def first_calls() -> tuple[list[float], int]:
    """Return the time of the first call of each function, and how many graphs compiled; stop at too many."""
    functions = many_functions()
    assert len(functions) == 200
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, 64)
    seconds = []
    before = compat.compiled_graphs()
    for number, mask in enumerate(functions):
        start = time.perf_counter()
        out = flexmasks.attention(q, k, v, mask=mask)
        seconds.append(time.perf_counter() - start)
        if number >= 100:  # query 0 sees the first keys, up to the captured number
            last = number - 100 + 1
            want = scaled_dot_product_attention(q[:, :, :1], k[:, :, :last], v[:, :, :last])
            assert error(out[:, :, :1], want) < TOLERANCE[torch.float32]
        if compat.compiled_graphs() - before > GRAPHS:
            break
    return seconds, compat.compiled_graphs() - before


def test_many_functions_compile_few_kernels() -> None:
    one = Judge()
    try:
        seconds, graphs = one.first_calls()
    except EOFError:
        one.process.join()
        pytest.fail(f"the process ends with exit code {one.process.exitcode}")
    finally:
        one.stop()
    assert graphs <= GRAPHS, f"{graphs} graphs after {len(seconds)} functions"
    median = statistics.median(seconds)
    assert median <= MEDIAN, f"{1000 * median:.0f} ms; the longest {max(seconds):.1f} s"
