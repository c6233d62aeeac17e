"""Masks as data: which functions kernels may compute, and what they read in place of the other functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functions import compiled, expressions, short_and_campaign
from helpers import DEVICES, TOLERANCE, error, one_in, skip_unless_flash_takes, try_examples
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from quick_kernels import in_cpp_on_day
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.nn.functional import embedding, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flexmasks
from benchmarks import private_torch
from flexmasks import inside_compile, road
from flexmasks.backends import forms
from flexmasks.backends.exact import KILLERS, NEGATIVE, OF_FLASH_ALONE, OVERFLOW, outside_table
from flexmasks.blocks import limits
from flexmasks.blocks.build import build
from flexmasks.blocks.elements import Elements
from flexmasks.blocks.lists import of_block_mask
from flexmasks.plans import data
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.request import Request
from flexmasks.road import plan_call
from flexmasks.spec.parameters import Size
from flexmasks.spec.registry import example
from flexmasks.spec.structure import replaced

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("cold")

LENGTH, BATCH, HEADS = 100, 2, 3
Function = Callable[..., Tensor]


def qkv(length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, HEADS, length, size, generator=generator) for size in (16, 16, 24)]


def expected(mask: Function, length: int = LENGTH, bias: Tensor | None = None) -> Tensor:
    """Return SDPA in float64 with torch's own mask; rows that see nothing are 0."""
    visible = create_mask(mask, BATCH, HEADS, length, length, "cpu")
    scores = torch.zeros(visible.shape, dtype=torch.float64) if bias is None else bias.double().expand(visible.shape)
    q, k, v = (x.double() for x in qkv(length))
    return scaled_dot_product_attention(q, k, v, attn_mask=scores.masked_fill(~visible, -torch.inf)).nan_to_num(0.0)


def check_attention(mask: Function, length: int = LENGTH) -> None:
    got = flexmasks.attention(*qkv(length), mask=mask)
    assert error(got, expected(mask, length)) < TOLERANCE[torch.float32]


def form(mask: Any) -> str:
    return flexmasks.explain(*qkv(), mask=mask).mask


# --- the bits of blocks ---


@pytest.mark.slow
@short_and_campaign(60, 600)
def test_data_shows_what_the_function_shows(examples: int) -> None:
    sizes = st.tuples(st.sampled_from([(32, 32), (64, 32), (128, 128)]), st.integers(1, 140), st.integers(1, 140))
    try_examples(examples, _check_data, expressions("c", 2), sizes)


def _check_data(expression: str, sizes: tuple[tuple[int, int], int, int]) -> None:
    block_size, q_len, kv_len = sizes
    q_len, kv_len = min(q_len, 40), min(kv_len, 40)  # the tables' length
    function = compiled(expression)
    try:
        visible = create_mask(function, 2, 2, q_len, kv_len, "cpu")
        block_mask = build(function, 2, 2, q_len, kv_len, CPU, block_size).block_mask(function)
    except Exception:
        reject()  # a division by 0, say
    whole = build(function, 2, 2, q_len, kv_len, CPU, block_size, with_bits=True)
    for bits in (None, whole.bits):
        made = data.data_of(block_mask if bits is None else whole.block_mask(function), 2, 2, bits).block_mask()
        for got, want in zip(of_block_mask(made), of_block_mask(block_mask), strict=True):
            assert torch.equal(got, want.expand_as(got))
        partial = of_block_mask(made)[0].repeat_interleave(block_size[0], 2).repeat_interleave(block_size[1], 3)
        partial = partial[..., :q_len, :kv_len]
        read = create_mask(made.mask_mod, 2, 2, q_len, kv_len, "cpu")
        assert torch.equal(read & partial, visible & partial)


@pytest.mark.parametrize("block_size", [(32, 32), (64, 128)])
@pytest.mark.parametrize("lengths", [(256, 256), (300, 170), (20, 700)])
def test_bits_of_partial_blocks(lengths: tuple[int, int], block_size: tuple[int, int]) -> None:
    """They are found with the blocks, for masks that see all indices or some."""
    q_len, kv_len = lengths
    keep = torch.rand(BATCH, max(lengths)) > 0.3
    masks: list[Function] = [
        lambda b, h, q, kv: (q >= kv) & ((q - kv) % 7 != 1),
        lambda b, h, q, kv: kv % 5 < 3 + 0 * b,
        lambda b, h, q, kv: (q + h) % 64 < 40,
        lambda b, h, q, kv: keep[b, kv] | (q == kv),
        lambda b, h, q, kv: (q - kv).abs() < 40,
        lambda b, h, q, kv: q < 1000,  # partial only where the edge cuts
        lambda b, h, q, kv: (keep[b, q] == keep[b, kv]).long().cumsum(-1) > 0,  # not by ranges
    ]
    for mask in masks:
        layout = build(mask, BATCH, HEADS, *lengths, CPU, block_size, with_bits=True)
        plain = build(mask, BATCH, HEADS, *lengths, CPU, block_size)
        assert all(map(torch.equal, layout.indices, plain.indices))
        bits, visible = layout.bits, create_mask(mask, BATCH, HEADS, q_len, kv_len, "cpu")
        assert bits is not None
        partial = of_block_mask(layout.block_mask(mask))[0]
        assert bits.shape == partial.shape
        assert torch.equal(bits.places, partial.flatten().nonzero()[:, 0])
        padded = F.pad(visible, (0, -kv_len % block_size[1], 0, -q_len % block_size[0]))
        blocks = padded.unflatten(3, (-1, block_size[1])).unflatten(2, (-1, block_size[0])).transpose(3, 4)
        are_set = (bits.words[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
        assert torch.equal(are_set.flatten(-2).bool(), blocks[: partial.shape[0], : partial.shape[1]][partial.bool()])


def test_few_different_blocks_are_kept() -> None:
    def different(mask: Function, length: int) -> int:
        return data.data_of(flexmasks.block_mask(mask, length), 1, 1).different

    assert different(lambda b, h, q, kv: q >= kv, 1024) == 1
    assert different(lambda b, h, q, kv: (q >= kv) & (q - kv <= 256), 2048) == 2
    assert different(lambda b, h, q, kv: (q - kv) % 3 == 0, 128 * 6) == 3


def test_equal_sums_of_different_blocks() -> None:
    words = torch.randint(-9, 9, (50, 4), dtype=torch.int32)
    distinct, number = data._distinct(words, torch.zeros(4, dtype=torch.int64))  # every sum is 0
    assert torch.equal(distinct[number], words)
    assert len(distinct) == len(words.unique(dim=0))


@pytest.mark.slow
@pytest.mark.parametrize("has_full_blocks", [pytest.param(False, marks=pytest.mark.campaign), True])
def test_given_block_mask(has_full_blocks: bool) -> None:
    """A user's own BlockMask becomes data where its function would be computed wrongly."""
    table = torch.rand(LENGTH, LENGTH) > 0.5

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[q][kv] & (table[q].sum() > 3)

    block_mask = flexmasks.block_mask(mask, LENGTH, block_size=32 if has_full_blocks else 128)
    got = flexmasks.attention(*qkv(), block_mask=block_mask)
    assert error(got, expected(mask)) < TOLERANCE[torch.float32]


# --- the look at functions ---

EXEMPT = {"paged"}  # its numbers of pages are small, which the look does not know


def inexact(*look: Any) -> str | None:
    """Return the first reason why Inductor may compute a function otherwise than Python does, or None."""
    return next((reason for reason in outside_table(*look) if reason not in OF_FLASH_ALONE), None)


def passing() -> dict[str, Function]:
    ids, small = torch.arange(LENGTH) // 9, torch.randint(-9, 9, (LENGTH,), dtype=torch.int32)
    table, real, of_batch = torch.rand(LENGTH, LENGTH) > 0.5, torch.randn(LENGTH), torch.rand(BATCH, LENGTH) > 0.5
    number, i8, lengths = torch.tensor(5), torch.arange(LENGTH).to(torch.int8), torch.tensor([70, 50])
    return {
        "causal": lambda b, h, q, kv: q >= kv,
        "documents": lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]),
        "table": lambda b, h, q, kv: table[q, kv],
        "columns": lambda b, h, q, kv: (table[q, 0] | table[kv, 3]) & (q >= kv),
        "padding": lambda b, h, q, kv: of_batch[b, kv] | ~(q != kv),
        "remainder": lambda b, h, q, kv: (q - kv) % 7 != 3,
        "chunks": lambda b, h, q, kv: q // 16 >= kv // 16,
        "window": lambda b, h, q, kv: (q - kv).abs() <= 20,
        "number": lambda b, h, q, kv: q - kv < number,
        "where": lambda b, h, q, kv: torch.where(h < 1, q, kv * 2) >= kv,
        "floats": lambda b, h, q, kv: real[q] > real[kv],
        "a float": lambda b, h, q, kv: real[q] > 0.1,
        "bits": lambda b, h, q, kv: ((q ^ kv) & 4 == 0) & (q >> 2 >= kv >> 3),
        "sum": lambda b, h, q, kv: ids[q] + small[kv] > ids[kv],
        "clamp": lambda b, h, q, kv: (q - 5).clamp(min=0) <= torch.clamp_max(kv, 60),
        "logical": lambda b, h, q, kv: torch.logical_and(q >= kv, q - kv < 9),
        "difference": lambda b, h, q, kv: (ids[q] - ids[kv]).abs() < 3,
        "lengths": lambda b, h, q, kv: (kv < lengths[b]) & (i8[q].int() + 5 > i8[kv].long()),
    }


def failing() -> dict[str, Function]:
    i32, i8 = torch.randint(-100, 100, (LENGTH,), dtype=torch.int32), torch.full((LENGTH,), -128, dtype=torch.int8)
    half, bf, real = torch.randn(LENGTH).half(), torch.randn(LENGTH).bfloat16(), torch.randn(LENGTH)
    table, chosen, vectors = torch.rand(LENGTH, LENGTH) > 0.5, torch.randint(0, 9, (LENGTH, 4)), torch.randn(LENGTH, 4)
    number, fraction, infinite = (
        torch.tensor(5),
        torch.tensor(0.1, dtype=torch.float64),
        torch.full((LENGTH,), torch.inf),
    )
    least, far = torch.where(torch.arange(LENGTH) % 3 == 0, -(2**63), torch.arange(LENGTH)), torch.tensor(2**40)
    hundred, thousand = torch.tensor(100), torch.tensor(1000)
    ids, small = torch.arange(LENGTH) // 9, torch.randint(-9, 9, (LENGTH,), dtype=torch.int32)
    counted, lengths = torch.arange(LENGTH).to(torch.int8), torch.tensor([70, 50])
    return {
        "a row": lambda b, h, q, kv: vectors[q].max() > vectors[kv][1],
        "reduction": lambda b, h, q, kv: (chosen[q] == kv).any(-1),
        "embedding": lambda b, h, q, kv: embedding(q, vectors)[0] > 0,
        "product": lambda b, h, q, kv: i32[q] * 100000000 > 0,
        "shift": lambda b, h, q, kv: q.int() << 28 > 0,
        "power": lambda b, h, q, kv: i32[q] ** 8 > 5,
        "positions": lambda b, h, q, kv: (q + 1) * 60_000_000 > kv,
        "absolute": lambda b, h, q, kv: torch.abs(i8[q]) < 0,
        "bytes": lambda b, h, q, kv: i8[q] + i8[kv] > 0,
        "half": lambda b, h, q, kv: half[q] * 60000 * 2 == half[kv],
        "half and a number": lambda b, h, q, kv: half[q] > 0.1,
        "half and a constant": lambda b, h, q, kv: half[q] >= torch.full_like(half[kv], 0.1),
        "a constant of truth": lambda b, h, q, kv: (q > kv) & torch.full((), 2, dtype=torch.bool),
        "bfloat16": lambda b, h, q, kv: bf[q] + 256 > 256,
        "infinite": lambda b, h, q, kv: infinite[q] * 0 == 0,
        "equal floats": lambda b, h, q, kv: real[q] == real[kv],
        "exponential": lambda b, h, q, kv: torch.exp(q) > torch.exp(kv),
        "division": lambda b, h, q, kv: q / 3 > kv,
        "division by 0": lambda b, h, q, kv: torch.where(kv > 0, q // torch.where(kv > 0, kv, 1), 0) > 1,
        "constant": lambda b, h, q, kv: torch.tensor(True),
        "number of another type": lambda b, h, q, kv: fraction + q > kv,
        "a decision": lambda b, h, q, kv: q >= kv if number > 3 else q < kv,
        "a view": lambda b, h, q, kv: table.T[q, kv],
        "sum of truth values": lambda b, h, q, kv: (q > 3) + (kv > 5),
        "order of truth values": lambda b, h, q, kv: (q > 3) < (kv > 5),
        "a cast": lambda b, h, q, kv: (q * 3).to(torch.int8) > 0,
        "to a whole number": lambda b, h, q, kv: real[q].long() >= 0,
        "a sum that fits": lambda b, h, q, kv: i8[kv] + hundred > 120,
        "a captured number": lambda b, h, q, kv: i32[q] < number,
        "a captured half": lambda b, h, q, kv: half[q] < fraction,
        "clamp": lambda b, h, q, kv: i8[kv].clamp(max=thousand) > kv,
        "clamp of bytes": lambda b, h, q, kv: i8[q].clamp(max=thousand) <= kv - 200,
        "the least number": lambda b, h, q, kv: least[kv].abs() < 5,
        "table of a table": lambda b, h, q, kv: ids[ids[q]] > kv,
        "types whose numbers fit": lambda b, h, q, kv: (counted[kv] == h) | (small[q] > h) | (kv < lengths[b]),
        "narrow types": lambda b, h, q, kv: torch.where(q > kv, counted[q], 100) > counted[kv],
        "an index of 32 bits": lambda b, h, q, kv: q.int() < far,
    }


@pytest.mark.parametrize("name", passing())
def test_functions_that_kernels_may_compute(name: str) -> None:
    assert inexact(passing()[name], CPU, (BATCH, HEADS, LENGTH, LENGTH)) is None


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("name", failing())
def test_functions_that_go_as_data(name: str) -> None:
    """Also if they are the first; `test_new_functions_compile_nothing` computes the others."""
    mask = failing()[name]
    assert inexact(mask, CPU, (BATCH, HEADS, LENGTH, LENGTH)) is not None
    assert form(mask).startswith("data: ")
    if name in ("product", "half and a number", "a row"):
        check_attention(mask)


def test_scores() -> None:
    table, bias, vectors = torch.randn(HEADS, LENGTH), torch.randn(LENGTH).half(), torch.randn(LENGTH, 4)
    i32 = torch.randint(-100, 100, (LENGTH,), dtype=torch.int32)
    right: list[Function] = [
        lambda score, b, h, q, kv: score * torch.sigmoid(score) + table[h, kv],
        lambda score, b, h, q, kv: score + bias[q] * (q - kv) / 3,
        lambda score, b, h, q, kv: torch.where(q > kv, score, score * 0.5),
        lambda score, b, h, q, kv: score + (bias[q] * bias[kv]).round(),  # as torch.compile computes it
    ]
    for function in right:
        assert flexmasks.explain(*qkv(), score=function).backend == "flex"
    killers: list[Function] = [
        lambda score, b, h, q, kv: score + vectors[q].sum(),
        lambda score, b, h, q, kv: score + (i32[q] * 100000000 > 0),
    ]
    for function in killers:
        explanation = flexmasks.explain(*qkv(), score=function)
        assert explanation.backend == "reference"
        assert "for the score: " in explanation.others["flex"]


@pytest.mark.parametrize("kind", ["mask", "score"])
def test_the_library_s_own_functions(kind: str) -> None:
    """The look knows what masks and scores are made of; those of this library are tested, and not looked at."""
    refused = set[tuple[str, str]]()
    for name in (flexmasks.list_masks if kind == "mask" else flexmasks.list_scores)():
        value = example(kind, name.name, 256)
        batch, heads = value._implied_size("B") or 2, value._implied_size("H") or 2
        q_len, kv_len = (value._implied_size(n) or value._implied_size("S") or 256 for n in ("Q", "KV"))
        size = Size(batch, heads, q_len, kv_len, CPU)
        made: Any = MaskPlan(value, size).block_mask.mask_mod if kind == "mask" else ScorePlan(value, size).mod()
        look = CPU, (batch, heads, q_len, kv_len), kind == "score"
        reasons = outside_table(made, *look)
        refused |= {(name.name, r) for r in reasons if kind == "mask" or r in KILLERS}
        if kind == "mask":
            assert value._is_by_library()
            assert not (value & (lambda b, h, q, kv: q >= kv))._is_by_library()
    assert {name for name, reason in refused if reason not in OF_FLASH_ALONE} <= EXEMPT


@pytest.mark.campaign
def test_kernels_compute_what_passes() -> None:
    """Each head of one compiled call computes another function."""
    for seed in range(6):
        _check_kernel_of_many(seed, 16)


def _check_kernel_of_many(seed: int, count: int) -> None:
    functions: list[Function] = []
    length = 40

    def collect(expression: str) -> None:
        function = compiled(expression)
        try:
            create_mask(function, 2, 2, length, length, "cpu")
        except Exception:
            reject()
        if inexact(function, CPU, (2, 2, length, length)) is None and len(functions) < count:
            functions.append(lambda b, h, q, kv: function(b, h % 2, q, kv))

    relaxed = settings(max_examples=400, suppress_health_check=list(HealthCheck), database=None, derandomize=False)
    seeded(seed)(relaxed(given(expressions("c", 2))(collect)))()
    assert len(functions) == count

    def every(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        visible = functions[0](b, h, q, kv)
        for n, function in enumerate(functions[1:], 1):
            visible = torch.where(h == n, function(b, h, q, kv), visible)
        return visible

    # Torch 2.11 compiles no call with one tensor for q and k, and kernels of smaller heads may read behind the keys.
    q, k = torch.zeros(2, 2, count, length, 32)
    v = torch.randn(2, count, length, 32)
    ones = torch.ones(1, 1, 1, dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(ones, 0 * ones[..., None], mask_mod=every, seq_lengths=(length, length))
    got = torch.compile(flex_attention, fullgraph=True, dynamic=False)(q, k, v, block_mask=blocks)
    visible = create_mask(every, 2, count, length, length, "cpu")
    want = scaled_dot_product_attention(q.double(), q.double(), v.double(), attn_mask=visible).nan_to_num(0.0)
    for n in range(count):
        assert error(got[:, n], want[:, n]) < TOLERANCE[torch.float32]


# --- which form a call takes ---

DIVIDED: dict[str, Any] = {"kernel": 3, "length": 100, "dilation": 2, "stride": 2}


class Limit:
    """A function that goes as data, and reads what may change."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv) * 30_000_000 <= self.value * 30_000_000


@pytest.mark.slow
def test_new_functions_compile_nothing() -> None:
    table = torch.rand(LENGTH, LENGTH) > 0.5
    check_attention(lambda b, h, q, kv: table[q].any() & (q >= kv))  # compiles the kernel that reads data
    graphs = private_torch.compiled_graphs()
    for n in range(1, 20):
        check_attention(lambda b, h, q, kv, n=n: q + n >= kv)
    for mask in failing().values():
        check_attention(mask)
    assert private_torch.compiled_graphs() == graphs
    limit = Limit(3)
    for value in (3, 8, 50):
        limit.value = value
        check_attention(limit)


@pytest.mark.usefixtures("quick_kernels")
def test_a_mask_of_many_divisions_goes_as_data() -> None:
    mask = flexmasks.get_mask("natten1d", **DIVIDED | {"length": 32})  # one block: quick kernels read data of all
    assert flexmasks.explain(*qkv(32), mask=mask).mask.startswith("data: ")
    check_attention(mask, 32)


@pytest.mark.slow
def test_first_calls_evaluate_each_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at their function, and undecided blocks are evaluated once, for the lists and for the data."""
    evaluated: list[int] = []

    def counted(self: Elements, *indices: Tensor) -> Tensor:
        visible = of_elements(self, *indices)
        evaluated.append(visible.numel())
        return visible

    of_elements = Elements.__call__
    length = 300
    check_attention(lambda b, h, q, kv: (q >= kv) & ((q - kv) % 3 != 1), length)
    monkeypatch.setattr(Elements, "__call__", counted)
    monkeypatch.setattr(forms, "outside_table", lambda *args: pytest.fail("a function is looked at"))
    check_attention(lambda b, h, q, kv: (q >= kv) & ((q - kv) % 5 != 1), length)
    rows = -(-length // 32)
    assert sum(evaluated) == rows * (rows + 1) // 2 * 32 * 32


class Work(TorchDispatchMode):
    """Counts operations, and records the bytes of the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        made = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *(x.untyped_storage().nbytes() for x in made)])
        return out


def test_data_take_few_operations_and_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of a GPU on a CPU: an operation takes 5 to 10 microseconds to start there."""
    on_gpu = limits.WHOLE_ELEMENTS_AT_ONCE_ON_GPU
    monkeypatch.setattr(limits, "WHOLE_ELEMENTS_AT_ONCE_ON_CPU", on_gpu)
    monkeypatch.setattr(limits, "elements_at_once", lambda device: limits.ELEMENTS_AT_ONCE_ON_GPU)
    length = 8192
    mask = flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) & ((q - kv) % 7 != 1))
    plan = MaskPlan(mask, Size(1, 8, length, length, CPU), lift=True, block_size=(128, 128), allows_bounds=True)
    with Work() as work:
        made = plan.data()
    assert made.different == 8
    assert work.largest <= 1 << 25
    assert work.operations < 720


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("renews", [False, True])
def test_new_tensors_in_data(renews: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if renews:
        monkeypatch.setattr(road, "_KINDS_ON", ("cpu", "cuda"))

    def mask(chosen: Tensor) -> Function:
        return lambda b, h, q, kv: (chosen[q] == kv).any(-1) | (q == kv)

    for _ in range(5):
        chosen = torch.randint(0, LENGTH, (LENGTH, 3))
        check_attention(mask(chosen))
        chosen[:50] += 1
        chosen.clamp_(max=LENGTH - 1)
        check_attention(mask(chosen))


@pytest.mark.slow
def test_offsets_in_data() -> None:
    table = torch.rand(200, LENGTH) > 0.5
    for offset in (7, torch.tensor([3, 50])):
        moved = offset if isinstance(offset, int) else offset[:, None, None, None]
        q, k, v = qkv()
        q = q[:, :, : LENGTH - 50]
        got = flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: table[q][kv] & table[q].any(), q_offset=offset)
        places = torch.arange(LENGTH - 50)[None, None, :, None] + moved
        visible = table[places.expand(-1, -1, -1, LENGTH), torch.arange(LENGTH)].expand(BATCH, HEADS, -1, -1)
        q, k, v = (x.double() for x in (q, k, v))
        assert error(got, scaled_dot_product_attention(q, k, v, attn_mask=visible)) < TOLERANCE[torch.float32]


@pytest.mark.slow
@in_cpp_on_day(0, of=3)
def test_chained_indices() -> None:
    """Masks with them go as data, and scores on the reference: rows of tensors end the process of a kernel."""
    for _ in range(3):
        table, bias = torch.rand(BATCH, HEADS, LENGTH, LENGTH) > 0.5, torch.randn(HEADS, LENGTH)
        chained = lambda b, h, q, kv, t=table: t[b][h][q][kv] & (q >= kv)  # noqa: E731
        got = flexmasks.attention(*qkv(), mask=chained, score=lambda s, b, h, q, kv, t=bias: s + t[h, kv])
        want = expected(lambda b, h, q, kv: table[b, h, q, kv] & (q >= kv), bias=bias[None, :, None, :])  # noqa: B023
        assert error(got, want) < TOLERANCE[torch.float32]
    explanation = flexmasks.explain(*qkv(), score=lambda s, b, h, q, kv: s + bias[h][kv])
    assert explanation.backend == "reference"
    assert "index each tensor once" in explanation.others["flex"]


@in_cpp_on_day(1, of=3)
def test_positions_of_64_bits() -> None:
    """A sum of a position and a 32-bit number has 64 bits in Python, and not in kernels."""
    starts = torch.arange(LENGTH, dtype=torch.int32) // 10 * 10
    starts[-1] = 2**31 - 1

    def window(starts: Tensor) -> Function:
        return lambda b, h, q, kv: (kv + starts[q] >= q) & (q - starts[q] < 8)

    def product(table: Tensor) -> Function:
        return lambda b, h, q, kv: table[b][q] > kv * 40_000_000

    def both(starts: Tensor, table: Tensor) -> Function:
        one, other = window(starts), product(table)
        return lambda b, h, q, kv: torch.where(b == 0, one(b, h, q, kv), other(b, h, q, kv))

    for _ in range(2):
        check_attention(both(starts.clone(), torch.randint(0, 1 << 31, (BATCH, LENGTH))))
    for make in (window(starts), product(torch.ones(BATCH, LENGTH, dtype=torch.int64))):
        flexmasks.clear_caches()
        assert form(make).startswith("data: ")


def test_functions_are_looked_at_again_for_later_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products fit 32 bits at the first positions, and not at the last ones."""
    reasons: list[tuple[str, ...]] = []

    def noted(*args: Any) -> tuple[str, ...]:
        reasons.append(outside_table(*args))
        return reasons[-1]

    monkeypatch.setattr(forms, "outside_table", noted)
    flexmasks.clear_caches()
    q, k = torch.randn(1, 1, 16, 32), torch.randn(1, 1, 2048, 32)
    ids = torch.zeros(2048, dtype=torch.int64)
    mask = lambda b, h, q, kv: (q * 2**21) // 2**21 + ids[kv] >= kv  # noqa: E731
    for offset in (0, 2032):
        flexmasks.explain(q, k, k, mask=mask, q_offset=offset, backend="flex")
    assert reasons[0] == ()
    assert OVERFLOW in reasons[1]


def test_functions_are_looked_at_for_all_positions_of_a_kind() -> None:
    q, k = torch.randn(1, 1, 16, 32), torch.randn(1, 1, 64, 32)
    ids = torch.arange(64) % 7
    mask = lambda b, h, q, kv: ids[q - 8] >= ids[kv]  # noqa: E731
    made = [flexmasks.explain(q, k, k, mask=mask, q_offset=offset, backend="flex") for offset in (8, 5)]
    assert NEGATIVE in made[1].mask


def test_masks_of_many_divisions_are_read() -> None:
    def read(mask: str, **params: Any) -> bool:
        return flexmasks.explain(*qkv(), mask=mask, **params).mask.startswith("data: reading it takes less time")

    assert read("natten1d", **DIVIDED)
    assert not read("strided", stride=7)
    assert not read("natten", kernel=3, height=10, width=10)  # kernels compute it without divisions


def test_blocks_that_are_read_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal blocks have the same bits, also those of other parts."""
    monkeypatch.setattr(limits, "ELEMENTS_KEPT", 5 * 32 * 32)
    mask = lambda b, h, q, kv: (q - kv) % 7 == 3  # noqa: E731
    made = flexmasks.block_mask(mask, 250, as_data=True, block_size=32)
    got, want = (create_mask(function, 1, 1, 250, 250, "cpu") for function in (made.mask_mod, mask))
    assert torch.equal(got, want)


def test_too_much_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_CAPACITIES", (1 << 10,))
    table = torch.rand(LENGTH, LENGTH) > 0.5

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[q].any() & table[q, kv]

    explanation = flexmasks.explain(*qkv(), mask=mask)
    assert explanation.backend == "reference"
    assert "different partial blocks take more than" in explanation.others["flex"]
    check_attention(mask)
    with pytest.raises(ValueError, match="write it with whole numbers"):
        flexmasks.attention(*qkv(), mask=mask, backend="flex")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
def test_a_kind_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def counted(*args: Any) -> tuple[str, ...]:
        looks.append(1)
        return outside_table(*args)

    monkeypatch.setattr(forms, "outside_table", counted)
    for _ in range(5):
        ids = torch.randint(0, 9, (LENGTH,))
        flexmasks.attention(*qkv(), mask=lambda b, h, q, kv: ids[q] == ids[kv])  # noqa: B023
    assert len(looks) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernels")
def test_functions_that_read_context_variables() -> None:
    """The threads that evaluate a mask see the variables of the caller's thread.

    All blocks are partial, because quick kernels read data of all.
    """
    limit: ContextVar[int] = ContextVar("limit", default=0)
    length = 600
    table = torch.rand(length, length) > 0.5
    for value in (5, 30):
        limit.set(value)
        check_attention(lambda b, h, q, kv: table[q].any() & ((q + kv) % limit.get() != 1), length)


@pytest.mark.parametrize("sizes", [(1, 1), (BATCH, HEADS)])
def test_what_reads_data_for_flash(sizes: tuple[int, int]) -> None:
    """FLASH's compiler knows no shifts: another function reads the same bits."""
    table = torch.rand(LENGTH, LENGTH) > 0.5
    block_mask = flexmasks.block_mask(lambda b, h, q, kv: table[q, kv], LENGTH, block_size=64)
    made = data.data_of(block_mask, *sizes)
    by_shifts, by_divisions = (made.block_mask(for_flash).mask_mod for for_flash in (False, True))
    shape = *sizes, LENGTH, LENGTH
    assert torch.equal(create_mask(by_shifts, *shape, "cpu"), create_mask(by_divisions, *shape, "cpu"))
    assert outside_table(by_divisions, CPU, shape) == ()
    assert inexact(by_shifts, CPU, shape) is None


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [pytest.param({}, marks=pytest.mark.campaign), {"batch": BATCH, "heads": HEADS}])
def test_block_masks_as_data(sizes: dict[str, int]) -> None:
    """They show what the mask shows, also to torch's own flex_attention."""
    table = torch.rand(LENGTH, LENGTH) > 0.5

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[q].any() & table[q, kv] & (q + b < kv + 9 if sizes else q < kv + 9)

    block_mask = flexmasks.block_mask(mask, LENGTH, as_data=True, block_size=32, **sizes)
    assert block_mask.shape[:2] == (BATCH if sizes else 1, 1)
    got = torch.compile(flex_attention, fullgraph=True, dynamic=False)(*qkv(), block_mask=block_mask)
    assert error(got, expected(mask)) < TOLERANCE[torch.float32]
    with pytest.raises(ValueError, match="must be powers of 2 from 32 on, got 48 x 48"):
        flexmasks.block_mask("causal", LENGTH, as_data=True, block_size=48)


def _tables(length: int) -> Function:
    table = torch.rand(length, length) > 0.5  # blocks of queries and keys that are empty, full, and different
    return lambda b, h, q, kv: torch.where(q // 32 == kv // 32, table[q, kv], (q // 32 + kv // 32 + h) % 2 == 0)


@pytest.mark.parametrize("for_flash", [False, True])
@pytest.mark.parametrize("lengths", [(100, 100), (64, 200), (7, 33), (256, 128)])
def test_data_show_the_mask_at_all_pairs(lengths: tuple[int, int], for_flash: bool) -> None:
    """Also where blocks are empty or full, because eager flex_attention asks mask_mod alone."""
    mask, shape = _tables(256), (BATCH, HEADS, *lengths)
    made = data.data_of(flexmasks.block_mask(mask, *lengths, heads=HEADS, block_size=32, q_offset=0), 1, HEADS)
    assert torch.equal(
        create_mask(made.block_mask(for_flash).mask_mod, *shape, "cpu"), create_mask(mask, *shape, "cpu")
    )
    for shows in (True, False):
        same = flexmasks.block_mask(lambda b, h, q, kv: (q >= 0) == shows, 64, as_data=True, block_size=32)  # noqa: B023
        assert bool(create_mask(same.mask_mod, 1, 1, 64, 64, "cpu").all()) == shows
        assert bool(create_mask(same.mask_mod, 1, 1, 64, 64, "cpu").any()) == shows


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, pytest.param(8, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("device", DEVICES)
def test_data_in_torchs_own_kernels_of_many_lengths(device: str, limit: int) -> None:
    """At its limit of compiled lengths torch takes the eager flex_attention, which ignores lists of blocks."""
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.to(device) for x in qkv(400))
    mask, block_size = _tables(400), 32 if device == "cpu" else 128  # Triton's tiles must fit into blocks
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=limit):
        for n in range(80, 80 + 32 * (limit + 2), 32):
            made = flexmasks.block_mask(mask, n, heads=HEADS, as_data=True, block_size=block_size, device="cpu").to(
                device
            )
            given = [x[:, :, :n].contiguous() for x in (q, k, v)]
            visible = create_mask(mask, BATCH, HEADS, n, n, "cpu")
            want = scaled_dot_product_attention(*(x.double().cpu() for x in given), attn_mask=visible).nan_to_num(0.0)
            for attend in (compiled, flex_attention):
                assert error(attend(*given, block_mask=made), want) < TOLERANCE[torch.float32] * (
                    100 if made.kv_indices.is_cuda else 1
                )
    torch._dynamo.reset()


_TABLE = torch.rand(LENGTH, LENGTH) > 0.5


def _chained(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, table: Tensor) -> Tensor:
    return table[q][kv]


def _products(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, numbers: Tensor) -> Tensor:
    return numbers[q] * 100000000 > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_functions_inside_torch_compile(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels may compute otherwise than Python does goes as bits, whoever reads the function."""
    i32 = torch.randint(-100, 100, (LENGTH,), dtype=torch.int32)
    torch._dynamo.reset()  # it counts the functions of this file
    compiled_attention = torch.compile(flexmasks.attention, fullgraph=True, backend="eager")
    functions: list[tuple[Function, dict[str, Tensor]]] = [(_chained, {"table": _TABLE}), (_products, {"numbers": i32})]
    for function, params in functions:
        want = expected(functools.partial(function, **params))
        got = compiled_attention(*qkv(), mask=function, backend=backend, **params)
        assert error(got, want) < TOLERANCE[torch.float32]
        got = compiled_attention(*qkv(), mask=flexmasks.get_mask(function, **params), backend=backend)
        assert error(got, want) < TOLERANCE[torch.float32]
        closure = lambda b, h, q, kv: function(b, h, q, kv, **params)  # noqa: B023, E731
        got = compiled_attention(*qkv(), mask=flexmasks.get_mask(closure), backend=backend)
        assert error(got, want) < TOLERANCE[torch.float32]
    for block_size, most in ((48, inside_compile._MOST_BITS), (128, 1 << 10)):
        monkeypatch.setattr(inside_compile, "_MOST_BITS", most)
        blocks = flexmasks.block_mask(_chained, LENGTH, block_size=block_size, table=_TABLE)
        with pytest.raises(Exception, match="as_data=True"):
            compiled_attention(*qkv(), block_mask=blocks)


@pytest.mark.slow
def test_lengths_that_a_graph_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products fit 32 bits at the first lengths, and not at the last one."""
    reasons: list[str] = []
    look = forms.why_bits_in_trace
    monkeypatch.setattr(forms, "why_bits_in_trace", lambda *args: reasons.append(look(*args)) or reasons[-1])
    mask = lambda b, h, q, kv: q * 2**22 >= kv * 2**22  # noqa: E731
    compiled = torch.compile(
        lambda q, k, v: flexmasks.attention(q, k, v, mask=mask), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length, reason in ((300, ""), (600, OVERFLOW)):
        q, k, v = torch.randn(3, 1, 1, length, 16)
        assert error(compiled(q, k, v), scaled_dot_product_attention(q, k, v, is_causal=True)) < 1e-5
        assert reasons[-1] == reason


_BYTES, _HALVES = torch.arange(-100, 100).to(torch.int8), (torch.arange(-100, 100) * 0.1).half()
_SMALL_NUMBERS: dict[str, Function] = {
    "beside h": lambda b, h, q, kv: _BYTES[kv] + h > -50,
    "beside a number": lambda b, h, q, kv: _BYTES[kv + 100] + torch.tensor(100) > 120,
    "comparison": lambda b, h, q, kv: _HALVES[q + 80] > 0.1,
    "sum": lambda b, h, q, kv: _HALVES[q + 100] + 2048 > _HALVES[kv + 100] + 2048,
    "absolute": lambda b, h, q, kv: abs(_BYTES[kv]) < 50,
    "cast": lambda b, h, q, kv: (q + 2040).half() == (kv + 2040).half(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(2, list(_SMALL_NUMBERS)))
@pytest.mark.parametrize("in_blocks", [False, True])
def test_small_numbers_inside_torch_compile(name: str, in_blocks: bool) -> None:
    """Their tensors are global variables, so that only torch can read the functions."""
    torch._dynamo.reset()  # its limit counts all functions of a line of code
    function = _SMALL_NUMBERS[name]
    made = flexmasks.block_mask(function, LENGTH, batch=BATCH, heads=HEADS) if in_blocks else None
    given: dict[str, Any] = {"block_mask": made} if in_blocks else {"mask": flexmasks.get_mask(function)}
    if name != "cast":
        with pytest.raises(Exception, match="convert such numbers first"):
            torch.compile(flexmasks.attention, fullgraph=True, backend="eager")(*qkv(), **given)
        return
    got = torch.compile(flexmasks.attention, fullgraph=True)(*qkv(), **given)
    assert error(got, expected(function)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", _SMALL_NUMBERS)
def test_small_numbers_in_functions_that_only_torch_reads(name: str) -> None:
    """They are refused in words, but not where they are only compared with one another."""
    compiled_attention = torch.compile(
        lambda q, k, v, blocks: flexmasks.attention(q, k, v, block_mask=blocks), fullgraph=True, backend="eager"
    )
    blocks = create_block_mask(_SMALL_NUMBERS[name], BATCH, HEADS, LENGTH, LENGTH, "cpu")
    with pytest.raises(Exception, match=r"because it computes with torch\.(int8|float16): convert such numbers first"):
        compiled_attention(*qkv(), blocks)
    if name == "comparison":
        blocks = create_block_mask(lambda b, h, q, kv: _BYTES[q] >= _BYTES[kv], None, None, LENGTH, LENGTH, "cpu")
        got = compiled_attention(*qkv(), blocks)
        assert error(got, expected(lambda b, h, q, kv: q >= kv)) < TOLERANCE[torch.float32]


@pytest.mark.slow
def test_given_blocks_in_a_checkpoint_inside_torch_compile() -> None:
    """torch traces neither vmap nor modes there, so nothing looks at the function."""
    blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, "cpu")
    call = functools.partial(flexmasks.attention, block_mask=blocks)
    compiled = torch.compile(lambda *x: checkpoint(call, *x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    q, k, v = qkv()
    assert error(compiled(q, k, v), flexmasks.attention(q, k, v, mask="causal")) < TOLERANCE[torch.float32]


def negative() -> dict[str, Function]:
    """Return functions with indices that count from the end."""
    ids, table = torch.randint(0, 9, (LENGTH,)), torch.rand(LENGTH, LENGTH) > 0.5
    return {
        "before the query": lambda b, h, q, kv: ids[q - 5] > ids[kv],
        "from the end": lambda b, h, q, kv: ids[-1 - kv] > ids[q],
        "one after the other": lambda b, h, q, kv: table[q][kv - 30],
        "the last": lambda b, h, q, kv: table[q, -1] | (q == kv),
        "hidden": lambda b, h, q, kv: (q >= kv) & (ids[q - kv] > 2),
        "found in a tensor": lambda b, h, q, kv: ids[ids[q]] > ids[kv],
        "length": lambda b, h, q, kv: ids[q - ids.shape[0]] > ids[kv],
    }


BIAS = torch.randn(2 * LENGTH - 1)


def test_negative_indices_at_other_sizes() -> None:
    """What is negative only at the next power of 2 runs as it is."""
    q, k, v = qkv()
    planned = plan_call(q, k, v, Request(score=lambda score, b, h, q, kv: score + BIAS[q - kv + LENGTH - 1]))
    made = planned.plans.score
    assert NEGATIVE in outside_table(made.mod(), CPU, (BATCH, HEADS, 128, 128), True)
    assert forms.kills(planned.call) is None
    negative = plan_call(q, k, v, Request(score=lambda score, b, h, q, kv: score + BIAS[q - kv])).call
    assert forms.kills(negative) is None
    on_gpu = replace(negative, q=negative.q._replace(device=torch.device("cuda")))
    assert "clamp the index" in str(forms.kills(on_gpu))


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("name", negative())
def test_negative_indices(name: str) -> None:
    """Kernels in Triton read memory before the tensor."""
    function = negative()[name]
    assert inexact(function, CPU, (BATCH, HEADS, LENGTH, LENGTH)) is not None
    assert form(function).startswith("data: ")
    check_attention(function)


def test_a_block_mask_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_CAPACITIES", (1 << 10,))
    table = torch.rand(LENGTH, LENGTH) > 0.5
    with pytest.raises(ValueError, match="the bits of its different partial blocks take more than"):
        flexmasks.block_mask(lambda b, h, q, kv: table[q, kv], LENGTH, as_data=True, block_size=32)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "flex_flash"])
@pytest.mark.parametrize("name", one_in(2, list(failing())))
def test_data_on_a_gpu(name: str, backend: str) -> None:
    """Forward and backward passes, by the kernel that reads data."""
    made = failing()[name]
    mask = replaced(made, [(t, t.cuda()) for t in flexmasks.get_mask(made)._tensors()])
    length = 1000 if name == "constant" else LENGTH
    leaves = [x.to("cuda", torch.bfloat16).requires_grad_() for x in torch.randn(3, BATCH, HEADS, length, 64)]
    if backend == "flex_flash":
        skip_unless_flash_takes(leaves, mask=mask)
    out = flexmasks.attention(*leaves, mask=mask, backend=backend)
    assert flexmasks.explain(*leaves, mask=mask, backend=backend).mask.startswith("data: ")
    upstream = torch.randn_like(out)
    visible = create_mask(mask, BATCH, HEADS, length, length, "cuda").cuda()
    others = [x.detach().double().requires_grad_() for x in leaves]
    want = scaled_dot_product_attention(*others, attn_mask=visible).nan_to_num(0.0)
    assert error(out, want.cpu()) < TOLERANCE[torch.bfloat16]
    got_gradients = torch.autograd.grad(out, leaves, upstream)
    want_gradients = torch.autograd.grad(want, others, upstream.double())
    for got, expected_gradient in zip(got_gradients, want_gradients, strict=True):
        assert error(got, expected_gradient.nan_to_num(0.0).cpu()) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [LENGTH, 5])
def test_indices_on_a_gpu(queries: int) -> None:
    """Constant and negative indices, also in torch's kernel for few queries."""
    for name, made in {**negative(), "columns": passing()["columns"]}.items():
        mask = replaced(made, [(t, t.cuda()) for t in flexmasks.get_mask(made)._tensors()])
        q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, 64, device="cuda", dtype=torch.bfloat16).unbind()
        q = q[:, :, :queries]
        visible = create_mask(mask, BATCH, HEADS, queries, LENGTH, "cuda")
        want = scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=visible).nan_to_num(0.0)
        flexmasks.clear_caches()
        how: dict[str, Any] = {"mask": mask, "backend": "flex", "q_offset": 0}
        assert flexmasks.explain(q, k, v, **how).mask.startswith("its function" if name == "columns" else "data: "), (
            name
        )
        assert error(flexmasks.attention(q, k, v, **how), want.cpu()) < 1.6e-2, name


@pytest.mark.gpu
def test_bits_on_a_gpu() -> None:
    """The bits of blocks are the same as on a CPU, whether the blocks are decided there or on the GPU."""
    for length in (300, 128 * 256):
        made = []
        for device in ("cpu", "cuda"):
            mask: Function = lambda b, h, q, kv: ((q - kv).abs() < 100) & ((q - kv) % 5 != 1)  # noqa: E731
            bits = build(mask, 1, 1, length, length, torch.device(device), with_bits=True).bits
            assert bits is not None
            assert bits.words.device.type == device
            made.append([x.cpu() for x in (bits.places, bits.words)])
        assert all(map(torch.equal, *made))
