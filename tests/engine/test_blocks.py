"""Block lists against torch's create_block_mask, whole masks against create_mask."""

from __future__ import annotations

import collections.abc
import functools
import numbers
import pickle
import sys
import typing
from collections.abc import Callable
from typing import Any
from unittest import mock

import oracles
import pytest
import torch
from functions import (
    LONG_TABLES,
    LONGEST,
    Drawn,
    Pick,
    compiled,
    composed,
    drawn,
    expressions,
    long_tables,
    short_and_campaign,
    structured,
)
from helpers import DEVICES, TOLERANCE, arguments, by_turns, check_equal_block_masks, error, try_examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

import flexmasks
from flexmasks import compat
from flexmasks.blocks import Elements, Layout, dependence, limits, lists, materialize, of_block_mask, undecided
from flexmasks.blocks.bits import bits_in_parts
from flexmasks.blocks.build import bounds, build
from flexmasks.blocks.decide import decide
from flexmasks.blocks.lists import index_lists
from flexmasks.ranges.evaluate import evaluate
from flexmasks.spec import definitions

CPU = torch.device("cpu")
# Devices, and how many blocks of a GPU are decided on the CPU: the usual number, or none.
DECIDED_ON = [
    pytest.param("cpu", limits.BLOCKS_ON_CPU, id="cpu"),
    pytest.param("cuda", limits.BLOCKS_ON_CPU, id="cuda-decided on the CPU", marks=pytest.mark.gpu),
    pytest.param("cuda", 0, id="cuda-decided there", marks=pytest.mark.gpu),
]

pytestmark = pytest.mark.usefixtures("one_thread")


def check(
    mask: Callable[..., Tensor],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    size: tuple[int, int] = (128, 128),
    device: str = "cpu",
) -> Layout:
    """Compare a mask's blocks, dependence and booleans with torch's."""
    exact_device = torch.empty(0, device=device).device  # "cuda" is "cuda:0"
    layout = build(mask, batch, heads, q_len, kv_len, exact_device, size)
    own_batch, own_heads = layout.indices[0].shape[:2]
    assert own_batch in (1, batch)
    assert own_heads in (1, heads)
    want = create_block_mask(mask, own_batch, own_heads, q_len, kv_len, device=device, BLOCK_SIZE=size)
    got = layout.block_mask(mask)
    check_equal_block_masks(got, want)
    assert got.mask_mod is mask
    whole = create_mask(mask, batch, heads, q_len, kv_len, device=device)
    assert torch.equal(whole[:own_batch, :own_heads].expand_as(whole), whole)
    assert torch.equal(materialize(mask, batch, heads, q_len, kv_len, exact_device).expand_as(whole), whole)
    partial, full = of_block_mask(got)
    assert int(partial.sum()) == int(want.kv_num_blocks.sum())
    assert int(full.sum()) == int(want.full_kv_num_blocks.sum())
    check_bounds(bounds(mask, batch, heads, q_len, kv_len, exact_device, size).block_mask(mask), partial, full)
    return layout


def check_bounds(got: BlockMask, partial: Tensor, full: Tensor) -> None:
    """Check that bounds show every visible pair, and no hidden one in a full block.

    partial, full: the exact blocks.
    """
    listed, listed_as_full = of_block_mask(got)
    assert torch.all(~(partial | full) | (listed | listed_as_full))
    assert torch.all(~listed_as_full | full)
    lists = got.kv_num_blocks, got.kv_indices, got.full_kv_num_blocks, got.full_kv_indices
    rebuilt = BlockMask.from_kv_blocks(*lists, got.BLOCK_SIZE, got.mask_mod, got.seq_lengths)
    check_equal_block_masks(got, rebuilt)


# --- random masks ---


def is_mask(mask: Callable[..., Any], batch: int, heads: int, q_len: int, kv_len: int) -> bool:
    """Return whether torch's create_mask takes the function."""
    try:
        visible = create_mask(mask, batch, heads, q_len, kv_len, device="cpu")
    except (RuntimeError, TypeError, ValueError, ArithmeticError, IndexError, AttributeError, SystemError):
        return False
    return visible.dtype == torch.bool and visible.ndim == 4


def examples_by_device(short: int, campaign: int, cuda: int) -> pytest.MarkDecorator:
    """Parametrize the device and the number of random examples."""
    cases = [
        pytest.param("cpu", short, id="cpu-short"),
        pytest.param("cpu", campaign, id="cpu-long", marks=pytest.mark.campaign),
        pytest.param("cuda", cuda, id="cuda", marks=pytest.mark.gpu),
    ]
    return pytest.mark.parametrize(("device", "examples"), cases)


@pytest.mark.slow
@examples_by_device(short=60, campaign=2060, cuda=200)
def test_composed_functions(device: str, examples: int) -> None:
    """The campaign tries at least 2,000 functions, none counted twice."""
    tried: set[str] = set()
    mixed = 0

    @settings(max_examples=examples)
    @given(drawn(composed))
    def equal(case: Drawn) -> None:
        nonlocal mixed
        layout = check(compiled(case.expression, long_tables(device)), *case.sizes, device)
        tried.add(case.expression)
        partial, full = layout.indices[0].sum(), layout.indices[2].sum()
        mixed += bool(0 < partial + full < layout.indices[1].numel() or (partial and full))

    equal()
    assert len(tried) > (2000 if examples > 2000 else 0.9 * examples)
    assert mixed > len(tried) // 5  # masks with blocks of more than one kind


@pytest.mark.slow
@short_and_campaign(25, 100)
def test_random_functions(examples: int) -> None:
    """Any operation and operand may occur.

    Functions that torch refuses are discarded.
    """
    tried: set[str] = set()
    sizes = st.sampled_from([16, 32, 64])

    @settings(max_examples=examples)
    @given(
        expression=expressions("c", 3, odd=False) | expressions("c", 2, odd=False),
        sizes=st.tuples(*[st.integers(1, 2)] * 2, *[st.integers(1, 80)] * 2, st.tuples(sizes, sizes)),
    )
    def equal(expression: str, sizes: tuple[int, int, int, int, tuple[int, int]]) -> None:
        mask = compiled(expression, LONG_TABLES)
        assume(is_mask(mask, *sizes[:2], 2, 2) and is_mask(mask, 1, 1, *sizes[2:4]))
        check(mask, *sizes)
        tried.add(expression)

    equal()
    assert len(tried) > examples // 2


@pytest.mark.slow
@examples_by_device(short=60, campaign=400, cuda=100)
def test_structured_functions(device: str, examples: int) -> None:
    tried: set[str] = set()

    @settings(max_examples=examples)
    @given(drawn(structured))
    def equal(case: Drawn) -> None:
        check(compiled(case.expression, long_tables(device)), *case.sizes, device)
        tried.add(case.expression)

    equal()
    assert len(tried) > (250 if examples >= 400 else 0.6 * examples)


# --- pieces of blocks ---


@functools.cache
def tables_in_pieces(device: str, length: int = LONGEST + 3) -> dict[str, Any]:
    """Return tables whose numbers change now and then, as those of documents with images."""
    generator = torch.Generator().manual_seed(5)
    changes = torch.rand(5, length, generator=generator) < torch.tensor(
        [[1 / 9], [1 / 25], [1 / 60], [1 / 60], [1 / 60]]
    )
    ids = changes.cumsum(1)
    span = torch.where(ids[1] % 3 == 0, -1, torch.randperm(length, generator=generator)[ids[1]])
    tables = {"short": ids[0], "span": span, "noise": ids[1] % 3 == 1, "doc": ids[2:].int(), "rows": ids[2:].mT}
    return {name: table.to(device) for name, table in tables.items()}


CONDITIONS = ["span[q] == span[kv]", "span[q] == span[kv]", "span[kv] >= 0", "span[q] >= 0", "noise[kv]", "~noise[q]"]
CONDITIONS += [
    "kv <= q",
    "kv <= q",
    "q - kv < 50",
    "doc[b, q] == doc[b, kv]",
    "doc[b, q] == doc[b, kv]",
    "doc[h, kv] > 1",
]
CONDITIONS += ["short[q] != short[kv]", "rows[kv, b] == rows[q, b]", "q // 37 == kv // 37", "q % 37 >= (kv + 5) % 37"]
CONDITIONS += [
    "span[q + 3] != span[kv]",
    "noise[kv // 2]",
    "doc[b, q - 1] == doc[b, kv]",
    "doc[b][kv] == short[q] // 4",
]


def on_tables(pick: Pick, depth: int = 3) -> str:
    """Write a mask of conditions on tables, joined by and, or, not."""
    if depth == 0 or pick([True, False, False, False]):
        return pick(CONDITIONS)
    first, second = on_tables(pick, depth - 1), on_tables(pick, depth - 1)
    return pick(["({x}) & ({y})", "({x}) & ({y})", "({x}) | ({y})", "~({x})"]).format(x=first, y=second)


@examples_by_device(short=25, campaign=2000, cuda=200)
def test_conditions_on_tables(device: str, examples: int) -> None:
    def nothing(*_: Any) -> None: ...

    def equal(case: Drawn) -> None:
        by_pieces = mock.patch.object(undecided._Looks, "at_samples", nothing)  # which then decide all blocks
        with by_pieces, mock.patch.object(undecided, "_MANY", 1):
            check(compiled(case.expression, tables_in_pieces(device)), *case.sizes, device)

    try_examples(examples, equal, drawn(on_tables))


def test_pieces_of_tables_that_heads_read() -> None:
    """As many heads as batch elements: rows of a table change elsewhere for each of them."""
    marks = torch.zeros(2, 2048, dtype=torch.int64)
    marks[0, 40::128] = marks[1, 7::128] = 1
    for of_batch in (torch.zeros_like(marks), marks):  # another table, and the same one
        check(lambda b, h, q, kv, x=of_batch: (marks[h, kv] > 0) & (q >= kv) & (x[b, q] >= 0), 2, 2, 2048, 2048)


@pytest.mark.parametrize("batch", [1, 2])
def test_spans_and_noise_are_looked_at_in_pieces(batch: int) -> None:
    """Ranges of whole blocks leave thousands of blocks undecided that are empty or full."""
    length = 4096
    number = torch.arange(length) // torch.tensor([[40], [48]])[:batch]
    span, noise = torch.where(number % 3 == 0, -1, number), torch.where(number % 3 == 1, number, -1)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        visible = (kv <= q) | ((span[b, q] == span[b, kv]) & (span[b, q] >= 0))
        return visible & ~((noise[b, kv] >= 0) & (noise[b, q] != noise[b, kv]))

    evaluated = 0
    by_elements = Elements.__call__

    def counted(*args: Any) -> Tensor:
        nonlocal evaluated
        visible = by_elements(*args)
        evaluated += visible.numel()
        return visible

    with mock.patch.object(Elements, "__call__", counted):
        layout = build(mask, batch, 1, length, length, torch.device("cpu"))
    assert layout.undecided is not None
    assert layout.undecided > 500 * batch
    assert evaluated < 80 * layout.undecided  # 64 in the look at samples


def test_a_strip_with_few_open_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of all blocks are looked at strip by strip; this strip's blocks are few, and go to the next look."""
    monkeypatch.setattr(limits, "BLOCKS_ON_CPU", 1)
    monkeypatch.setattr(limits, "BLOCKS_AT_ONCE_ON_CPU", 64 * 16)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        never = (q >= 240) & (q < 256) & (kv < 16) & (q - q > 0)
        return never | ((q >= 256) & (q * kv % 2 == 1))

    check(mask, 1, 1, 1024, 1024, (16, 16))


# --- functions made to be hard ---


def _documents(length: int, seed: int) -> Tensor:
    ends = torch.rand(length, generator=torch.Generator().manual_seed(seed)) < 1 / 64
    return ends.cumsum(0)


def _random(*shape: int, density: float) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < density


KV_IDS = _documents(900, 2)
DENSITIES = (0.0, 1e-5, 1e-3, 0.02, 0.3, 0.5, 0.98, 0.9999, 1.0)


@functools.cache
def hard(device: str) -> dict[str, Callable[..., Any]]:
    """Return functions that are hard to decide.

    They have 700 queries, 900 keys, 2 batch elements and 3 heads. Captured tensors are on the device.
    """
    q_ids, kv_ids = _documents(900, 1).to(device), KV_IDS.to(device)
    of_density = {density: _random(700, 900, density=density).to(device) for density in DENSITIES}
    per_head = _random(2, 3, 700, 900, density=2e-4).to(device)
    by_row = torch.stack([q_ids, q_ids.flip(0)])
    shuffled = torch.randperm(900, generator=torch.Generator().manual_seed(3)).to(device)
    chosen = _random(11, 15, density=0.3).to(device)
    of_distance = _random(3, 1600, density=0.1).to(device)
    starts = torch.arange(900, device=device) // 45 * 45  # start of the sequence that a token belongs to
    chunks = torch.arange(20, device=device) % 3
    few = torch.tensor([0, 1, 333, 512, 899], device=device)
    return {
        "one column": lambda b, h, q, kv: kv == 333,
        "one row": lambda b, h, q, kv: q == 333,
        "one element": lambda b, h, q, kv: (q == 401) & (kv == 402),
        "one hidden element": lambda b, h, q, kv: (q != 401) | (kv != 402),
        "a column beside a window": lambda b, h, q, kv: (kv == 3) | ((kv <= q) & (q - kv < 70)),
        "every hundredth": lambda b, h, q, kv: (kv % 100 == 99) & (q >= kv),
        "every hundredth alone": lambda b, h, q, kv: torch.where(q % 100 == 99, q == kv, (kv % 100 != 99) & (kv <= q)),
        "checkerboard": lambda b, h, q, kv: (q + kv) % 2 == 0,
        "distance modulo 7": lambda b, h, q, kv: (q - kv) % 7 == 3,
        "distance modulo 128": lambda b, h, q, kv: (q - kv) % 128 == 0,
        "dilated window": lambda b, h, q, kv: ((q - kv) % 4 == 0) & (abs(q - kv) <= 100),
        "dilated by head": lambda b, h, q, kv: ((q - kv) % (h + 1) == 0) & (kv <= q) & (q - kv < 64 << h),
        "documents": lambda b, h, q, kv: q_ids[q] == kv_ids[kv],
        "documents, causal": lambda b, h, q, kv: (kv_ids[q] == kv_ids[kv]) & (kv <= q),
        "documents hashed": lambda b, h, q, kv: (q_ids * 2**40 + 2**61)[q] == (kv_ids * 2**40 + 2**61)[kv],
        "shuffled": lambda b, h, q, kv: shuffled[q] <= shuffled[kv],
        "sequences": lambda b, h, q, kv: (starts[q] == starts[kv]) & (q - starts[q] >= kv - starts[kv]),
        "a table of a table": lambda b, h, q, kv: chunks[starts[q] // 45] == chunks[starts[kv] // 45],
        "per batch and head": lambda b, h, q, kv: per_head[b, h, q, kv],
        "per head": lambda b, h, q, kv: per_head[0, h, q, kv] | (q - kv == h),
        "row by row": lambda b, h, q, kv: by_row[b][q] == by_row[b][kv],
        "rows by a number": lambda b, h, q, kv: (by_row[1][q] == by_row[-1][kv]) & (by_row[b, 3] < kv),
        "chosen blocks": lambda b, h, q, kv: chosen[q // 64, kv // 64],
        "chosen blocks, row by row": lambda b, h, q, kv: chosen[q // 64][kv // 64] & (kv <= q),
        "table of distances": lambda b, h, q, kv: of_distance[h, torch.where(q >= kv, q - kv, 0)],
        "table of wrapped distances": lambda b, h, q, kv: of_distance[h, q - kv],
        "is one of few": lambda b, h, q, kv: (few == kv).any() | ((few - q).abs() < 9).any(),
        "behind some of few": lambda b, h, q, kv: (few <= q).sum() == (few <= kv).sum(),
        "bits": lambda b, h, q, kv: ((q >> 4) & 1) == ((kv >> 5) & 1),
        "bits that differ": lambda b, h, q, kv: ((q ^ kv) & 192) == 0,
        "a butterfly": lambda b, h, q, kv: ((q ^ kv) & ((q ^ kv) - 1)) == 0,
        "a shift by the head": lambda b, h, q, kv: q >> (h + 3) == kv >> (h + 3),
        "a float": lambda b, h, q, kv: (q - kv).float() / 3 < 33.3,
        "all hidden": lambda b, h, q, kv: q < 0,
        "nothing hidden": lambda b, h, q, kv: q >= 0,
        "a constant": lambda b, h, q, kv: torch.ones((), dtype=torch.bool, device=device),
        "a constant of the index": lambda b, h, q, kv: q.new_zeros((), dtype=torch.bool),
        "unknown, all hidden": lambda b, h, q, kv: torch.sin(q) > 2,
        "unknown, nothing hidden": lambda b, h, q, kv: torch.sin(q * kv) > -2,
        "unknown of the batch": lambda b, h, q, kv: (b & 1) == (q & 1),
        "not a number": lambda b, h, q, kv: ~(torch.sqrt(q - 100.0) <= kv),
        "in place": lambda b, h, q, kv: q.clone().add_(1) > kv,
        **{f"random {d}": lambda b, h, q, kv, d=d: of_density[d][q, kv] for d in of_density},
    }


HARD = hard("cpu")


@pytest.mark.parametrize(("device", "blocks_on_cpu"), DECIDED_ON)
@pytest.mark.parametrize("name", HARD)
def test_hard_functions(name: str, device: str, blocks_on_cpu: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCKS_ON_CPU", blocks_on_cpu)
    check(hard(device)[name], 2, 3, 700, 900, device=device)
    check(hard(device)[name], 2, 3, 500, 450, (64, 32), device)


@pytest.mark.parametrize(("device", "blocks_on_cpu"), DECIDED_ON)
def test_isin(device: str, blocks_on_cpu: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are short, since torch.vmap calls isin once for each element."""
    monkeypatch.setattr(limits, "BLOCKS_ON_CPU", blocks_on_cpu)
    few = torch.tensor([0, 1, 33, 70], device=device)
    check(lambda b, h, q, kv: torch.isin(kv, few) | (q - kv == h), 1, 3, 60, 80, (16, 32), device)
    check(lambda b, h, q, kv: torch.isin(q - kv, few, invert=True) & (kv <= q), 1, 1, 80, 60, (32, 16), device)


SEVERAL, ONE = (2, 3, 200, 150, (32, 16)), (1, 1, 200, 190, (16, 48))
LIMITS = {
    SEVERAL: [("BLOCKS_AT_ONCE", 8), ("ELEMENTS_AT_ONCE_ON_CPU", 999)],
    ONE: [("BLOCKS_AT_ONCE", 1), ("BLOCKS_AT_ONCE", 100), ("BLOCKS_ON_CPU", 0)],
}


@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", HARD)
def test_limits_make_no_difference(name: str, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide few rows, look at few elements, and list one matrix at a time.

    turned: whether each of the two sizes has the limits of the other.
    """
    for sizes in (SEVERAL, ONE):
        want = check(HARD[name], *sizes).block_mask(HARD[name])
        *lengths, block_size = sizes
        for limit, number in LIMITS[(ONE if sizes is SEVERAL else SEVERAL) if turned else sizes]:
            with monkeypatch.context() as patched:
                patched.setattr(limits, limit, number)
                layout = build(HARD[name], *lengths, CPU, block_size)
            check_equal_block_masks(layout.block_mask(HARD[name]), want)


@pytest.mark.parametrize("q_len", [1, 127, 128, 129])
@pytest.mark.parametrize("kv_len", [1, 127, 128, 129])
def test_edges_of_blocks(q_len: int, kv_len: int) -> None:
    for name in ("one column", "nothing hidden", "all hidden", "checkerboard", "random 0.5"):
        check(HARD[name], 1, 1, q_len, kv_len)
    check(lambda b, h, q, kv: kv <= q, 1, 1, q_len, kv_len)
    check(lambda b, h, q, kv: kv <= q, 1, 1, q_len, kv_len, (1024, 2048))
    check(lambda b, h, q, kv: kv <= q, 1, 1, q_len, kv_len, (16, 8))
    # Blocks that are looked at in parts of different sizes.
    check(lambda b, h, q, kv: torch.sin(q * 20.0 + kv * 7) > 0.9998, 1, 1, q_len, kv_len, (20, 12))


def test_blocks_past_one_edge_are_partial_in_data() -> None:
    for lengths in ((64, 50), (50, 64)):
        mask = lambda b, h, q, kv: torch.special.bessel_j0((q + kv) * 0.0) > 0  # noqa: E731
        got = flexmasks.block_mask(mask, *lengths, block_size=32, as_data=True, q_offset=0)
        check_equal_block_masks(got, create_block_mask(mask, 1, 1, *lengths, device="cpu", BLOCK_SIZE=32))


@pytest.mark.parametrize("lengths", [(64, 50), (50, 64), (50, 40)])
def test_bits_past_the_edges_are_hidden(lengths: tuple[int, int]) -> None:
    blocks = torch.cartesian_prod(torch.tensor([0]), torch.tensor([0]), torch.arange(2), torch.arange(2))
    (words,) = bits_in_parts(lambda b, h, q, kv: q + kv >= 0, blocks, lengths, (32, 32))
    place = torch.arange(32)
    q, kv = (blocks[:, n, None] * 32 + place < length for n, length in zip((2, 3), lengths, strict=True))
    assert torch.equal((words >> place) & 1 != 0, q[:, :, None] & kv[:, None])


@pytest.mark.parametrize("device", DEVICES)
@by_turns(oracles.MASK_CASES, [(128, 128), (16, 32)], 2)
def test_registered_masks(
    case: oracles.Case, size: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(case, device)
    sizes, lengths = {"batch": case.batch, "heads": case.heads}, (case.q_len, case.kv_len)
    got = flexmasks.block_mask(case.name, *lengths, block_size=size, device=device, check=True, **sizes, **given)
    own = got.kv_num_blocks.shape[:2]
    check_equal_block_masks(got, create_block_mask(got.mask_mod, *own, *lengths, device=device, BLOCK_SIZE=size))
    whole = flexmasks.dense_mask(case.name, *lengths, device=device, **sizes, **given)
    assert whole.dtype == torch.bool
    assert whole.shape == (*own, *lengths)
    monkeypatch.setattr(limits, "BLOCKS_ON_CPU", 0)
    check(got.mask_mod, case.batch, case.heads, *lengths, (32, 16), device)
    plain = materialize(got.mask_mod, case.batch, case.heads, *lengths, whole.device)  # was compared in `check`
    assert torch.equal(*(x.expand(case.batch, case.heads, *lengths) for x in (whole, plain)))


# --- blocks whose visible pairs a definition counts ---


def _graph(random: torch.Generator) -> Tensor:
    """Few edges, a rectangle with all and one without any: bool [300 queries, 290 keys]."""
    graph = torch.rand(300, 290, generator=random) < 0.002
    graph[60:210, 30:280] = True
    graph[:140, 128:256] = False
    return graph


def _edges(graph: Tensor) -> flexmasks.Mask:
    """The graph, with each edge twice and the columns of rows in any order."""
    rows, columns = graph.nonzero(as_tuple=True)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).repeat(2)
    order = order[rows[order].argsort(stable=True)]
    return flexmasks.masks.edges(crow=torch.nn.functional.pad(2 * graph.sum(1).cumsum(0), (1, 0)), col=columns[order])


@pytest.mark.parametrize("size", [64, (32, 16), (7, 64)])
def test_blocks_of_a_graph_are_counted(size: int | tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _graph(torch.Generator().manual_seed(0))
    mask = _edges(graph)
    monkeypatch.setattr(Elements, "__call__", None)  # no pair is looked at
    for q_len, offset in ((300, 0), (233, 67)):
        got = mask.blocks(q_len, 290, q_offset=offset, block_size=size)
        want = create_block_mask(functools.partial(_seen, graph, offset), 1, 1, q_len, 290, "cpu", BLOCK_SIZE=size)
        check_equal_block_masks(got.block_mask, want)
        assert got.undecided == 0
        assert min(got.empty, got.partial, got.full) > 0


def _seen(graph: Tensor, offset: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return graph[q + offset, kv]


def test_blocks_that_are_not_counted_are_looked_at() -> None:
    graph = _graph(torch.Generator().manual_seed(0))
    mask = _edges(graph)
    starts = torch.tensor([0, 5])
    got = flexmasks.block_mask(mask, 280, 290, q_offset=starts, block_size=32)
    want = create_block_mask(lambda b, h, q, kv: graph[q + starts[b], kv], 2, 1, 280, 290, "cpu", BLOCK_SIZE=32)
    check_equal_block_masks(got, want)
    got = flexmasks.block_mask(~mask, 300, 290, q_offset=0, block_size=32)
    check_equal_block_masks(got, create_block_mask(lambda b, h, q, kv: ~graph[q, kv], 1, 1, 300, 290, "cpu", 32))


def test_counts_have_a_number_for_each_block() -> None:
    def counted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    integers = r"integers \[batch or 1, heads or 1, 3, 2\]"
    others = torch.ones(2), torch.ones(2, 1, 3, 2, dtype=torch.int32)
    for found, words in (*((x, integers) for x in others), (3, "a tensor or None")):
        flexmasks.register_mask(counts=lambda size, block_size, found=found: found)(counted)
        try:
            with pytest.raises((ValueError, TypeError), match=f"mask 'counted': `counts` must return {words}"):
                flexmasks.block_mask("counted", 96, 64, q_offset=0, block_size=32)
        finally:
            del definitions.names("mask")["counted"]


# --- which blocks are looked at ---


@functools.cache
def neat(device: str) -> dict[str, Callable[..., Any]]:
    by_document = torch.arange(4096, device=device) // 400
    return {
        "causal": lambda b, h, q, kv: kv <= q,
        "window": lambda b, h, q, kv: (kv <= q) & (q - kv <= 1000),
        "documents": lambda b, h, q, kv: by_document[q] == by_document[kv],
        "prefix": lambda b, h, q, kv: (kv <= q) | (kv < 1000),
        "all": lambda b, h, q, kv: q >= 0,
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [128, 16])  # at size 16 there are more blocks than the CPU decides for a GPU
@pytest.mark.parametrize("name", neat("cpu"))
def test_only_partial_blocks_are_looked_at(name: str, size: int, device: str) -> None:
    assert size == 128 or (4096 // size) ** 2 > limits.BLOCKS_ON_CPU
    layout = check(neat(device)[name], 1, 1, 4096, 4096, (size, size), device)
    assert layout.undecided == int(layout.indices[0].sum())
    assert layout.not_understood == ()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["documents", "random 0.3", "random 1e-05", "per batch and head", "not a number"])
def test_many_blocks_of_a_gpu(name: str) -> None:
    """Without changed limits, many blocks are decided on the GPU."""
    assert limits.BLOCKS_ON_CPU < 350 * 300
    check(hard("cuda")[name], 2, 3, 700, 900, (2, 3), "cuda")


def test_operations_that_ranges_do_not_know_are_named() -> None:
    assert check(HARD["unknown, all hidden"], 1, 1, 300, 300).not_understood == ("sin",)
    assert check(HARD["row by row"], 1, 1, 300, 300).not_understood == ()


# Masks of functions that ranges cannot evaluate are looked at element by element. Still, such a mask depends on b or h
# only if the function uses the index.
POSITIONS = torch.arange(600).view(300, 2) // 7
THROUGH_NO_RANGE: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {
    "product": (lambda b, h, q, kv: POSITIONS[q] @ POSITIONS[kv] > 900, (1, 1)),
    "product and batch": (lambda b, h, q, kv: (POSITIONS[q] @ POSITIONS[kv] > 900) & (b > 0), (2, 1)),
    "attribute and head": (lambda b, h, q, kv: POSITIONS[q].real.sum() > POSITIONS[kv + h - h].real.sum(), (1, 3)),
    "vmap in the function": (
        lambda b, h, q, kv: torch.vmap(lambda x: (x + q) % 3 > kv % 3)(POSITIONS[0]).any() | (b > 0),
        (2, 1),
    ),
    "derivative in the function": (lambda b, h, q, kv: torch.func.grad(lambda x: x * q * 0.5)(kv * 1.0) > kv, (1, 1)),
}


@pytest.mark.parametrize("name", THROUGH_NO_RANGE)
def test_functions_that_ranges_cannot_evaluate(name: str) -> None:
    mask, depends = THROUGH_NO_RANGE[name]
    layout = check(mask, 2, 3, 300, 290)
    assert layout.indices[0].shape[:2] == depends
    assert layout.not_understood
    assert dependence(mask, 2, 3, CPU) == depends


# Questions of a function for the type and the kind of its arguments. Those in the second table cost ranges the answer:
# such a function is looked at element by element.
@typing.runtime_checkable
class _HasItem(typing.Protocol):
    def item(self) -> Any: ...


@typing.runtime_checkable
class _HasName(typing.Protocol):
    name_of_index: str


@functools.singledispatch
def _is_single(x: Any) -> bool:
    return False


@_is_single.register
def _(x: Tensor) -> bool:
    return True


def _matches(x: Any) -> bool:
    match x:
        case Tensor():
            return True
    return False


def _is_tensor_or_caught(x: Any) -> bool:
    try:
        return isinstance(x, Tensor)
    except Exception:
        return False


def _type_checked(mask: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a mask that checks its arguments and its result as beartype does."""
    hints = typing.get_type_hints(mask)

    @functools.wraps(mask)
    def checked(b: Any, h: Any, q: Any, kv: Any) -> Any:
        result = mask(b, h, q, kv)
        for name, x in zip(hints, (b, h, q, kv, result), strict=True):
            if not isinstance(x, hints[name]):
                raise TypeError(f"{name} is {type(x)}")
        return result

    return checked


@_type_checked
def _documents_checked(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (OF_DOCUMENT[q] == OF_DOCUMENT[kv]) & (q >= kv)


_ASK = isinstance
OF_DOCUMENT = torch.arange(300) // 37
OF_EACH = torch.stack([OF_DOCUMENT, OF_DOCUMENT.flip(0)])
ANSWERED: dict[str, Callable[[Any, Any], Any]] = {
    "hasattr": lambda q, kv: hasattr(q, "item"),
    "method": lambda q, kv: callable(getattr(q, "to")),  # noqa: B009
    "callable": lambda q, kv: callable(q),
    "dtype": lambda q, kv: q.dtype == torch.int64,
    "device": lambda q, kv: q.device == CPU,
    "is_cuda": lambda q, kv: q.is_cuda,
    "ndim": lambda q, kv: q.ndim == 0,
    "dim": lambda q, kv: q.dim() == 0,
    "shape": lambda q, kv: q.shape == (),
    "len of shape": lambda q, kv: len(q.shape) == 0,
}
NOT_ANSWERED: dict[str, Callable[[Any, Any], Any]] = {
    "isinstance": lambda q, kv: isinstance(q, Tensor),
    "is_tensor": lambda q, kv: torch.is_tensor(q),
    "isinstance by another name": lambda q, kv: _ASK(q, Tensor),
    "isinstance in a map": lambda q, kv: all(map(_ASK, (q, kv), (Tensor, Tensor))),
    "where, then isinstance": lambda q, kv: [torch.where(q > 3, q, 0), _ASK(q, Tensor), torch.where(q > 3, 0, q)][1],
    "isinstance, or caught": lambda q, kv: _is_tensor_or_caught(q),
    "int or tensor": lambda q, kv: isinstance(q, (int, Tensor)),
    "union": lambda q, kv: isinstance(q, int | Tensor),
    "int": lambda q, kv: isinstance(q, int),
    "Number": lambda q, kv: isinstance(q, numbers.Number),
    "Parameter": lambda q, kv: isinstance(q, torch.nn.Parameter),
    "IntTensor": lambda q, kv: isinstance(q, torch.IntTensor),
    "LongTensor": lambda q, kv: isinstance(q, torch.LongTensor),
    "LongTensor of a table": lambda q, kv: isinstance(OF_DOCUMENT[q], torch.LongTensor),
    "IntTensor of a table": lambda q, kv: isinstance(OF_DOCUMENT.int()[q], torch.IntTensor),
    "FloatTensor": lambda q, kv: isinstance(q / 2, torch.FloatTensor),
    "BoolTensor": lambda q, kv: isinstance(q >= kv, torch.BoolTensor),
    "a comparison": lambda q, kv: isinstance(q >= kv, Tensor),
    "an element": lambda q, kv: isinstance(OF_DOCUMENT[q], Tensor),
    "rows": lambda q, kv: isinstance(OF_EACH[:, q], Tensor),
    "a row": lambda q, kv: isinstance(OF_EACH.T[q], Tensor),
    "each of a row": lambda q, kv: all(isinstance(x, Tensor) for x in OF_EACH[:, q]),
    "a stack": lambda q, kv: isinstance(torch.stack([q, kv]), Tensor),
    "one of two results": lambda q, kv: isinstance(OF_EACH[:, q].max(0).values, Tensor),
    "__class__": lambda q, kv: q.__class__ is Tensor,
    "name of the class": lambda q, kv: q.__class__.__name__ == "Tensor",
    "match": lambda q, kv: _matches(q),
    "singledispatch": lambda q, kv: _is_single(q),
    "protocol": lambda q, kv: isinstance(q, _HasItem),
    "protocol of another": lambda q, kv: isinstance(q, _HasName),
    "SupportsIndex": lambda q, kv: isinstance(q, typing.SupportsIndex),
    "Sequence": lambda q, kv: isinstance(q, collections.abc.Sequence),
    "Iterable": lambda q, kv: isinstance(q, collections.abc.Iterable),
    "an attribute of its own": lambda q, kv: isinstance(q, Tensor) and setattr(q, "name_of_index", "q") is None,
    "is_floating_point": lambda q, kv: q.is_floating_point(),
    "torch.is_floating_point": lambda q, kv: torch.is_floating_point(q),
    "requires_grad": lambda q, kv: q.requires_grad,
    "requires_grad of a tensor": lambda q, kv: isinstance(q, Tensor) and q.requires_grad,
    "grad": lambda q, kv: isinstance(q, Tensor) and q.grad is None,
    "numel": lambda q, kv: q.numel() == 1,
    "is_leaf": lambda q, kv: q.is_leaf,
    "a mixed dtype": lambda q, kv: isinstance(OF_DOCUMENT.int()[q] + kv, torch.LongTensor),
}


@pytest.mark.parametrize("name", [*ANSWERED, *NOT_ANSWERED])
def test_functions_that_ask_for_types(name: str) -> None:
    is_answered = name in ANSWERED
    question = (ANSWERED if is_answered else NOT_ANSWERED)[name]
    layout = check(lambda b, h, q, kv: (q >= kv) if question(q, kv) else (q < kv), 1, 1, 300, 290)
    assert bool(layout.not_understood) != is_answered


ASKING: dict[str, Callable[..., Any]] = {
    "checked types": _documents_checked,
    "row by row": lambda b, h, q, kv: (
        OF_EACH[b][q] >= OF_EACH[b][kv] if isinstance(OF_EACH[b], Tensor) and torch.is_tensor(b) else q < kv
    ),
    "vmap of rows": lambda b, h, q, kv: (torch.vmap(lambda x: x)(OF_EACH[:, q]) >= kv).any(),
}


@pytest.mark.parametrize("name", ASKING)
def test_functions_that_check_types(name: str) -> None:
    layout = check(ASKING[name], 2, 3, 300, 290)
    assert layout.not_understood == ("a question for the type of an index",)


# Functions for which it is easy to compute wrong ranges.
DELICATE: dict[str, Callable[..., Any]] = {
    "alias changed in place": lambda b, h, q, kv: _added(q, 20) & (q > kv),
    "integer beyond its dtype": lambda b, h, q, kv: BYTES[q] // 300 < BYTES[kv] % 300,
    "integer near 2^63": lambda b, h, q, kv: (q & (2**63 - 1)) >= kv,
    "a whole reduction's dimension": lambda b, h, q, kv: SUMMED[b, (q * 13 - kv * 7) % 300] > kv,
    "sum beyond 2^52": lambda b, h, q, kv: (HUGE[q % 4] - HUGE[q % 4].amax()).sum() + (HUGE[kv % 4].sum() * 0 + q) > kv,
    "sum past 2^52 on its way": lambda b, h, q, kv: HUGE[q % 4].sum() > HUGE[kv % 4].sum(),
    "tiny divisor": lambda b, h, q, kv: (q + 1) / (TINY * (kv + 1)) > 3e38,
    "any of bytes": lambda b, h, q, kv: (BYTES.to(torch.uint8)[q][None].any(0) + 1).bool() & (q > kv),
    "truth of a number that becomes 0": lambda b, h, q, kv: torch.logical_and(TINY * 1e-5 * (q + 1), HALF[kv]),
    "clamp by a double": lambda b, h, q, kv: q.clamp(min=DOUBLE) > kv,
    "clamp of a row by a double": lambda b, h, q, kv: (HALVES[q].clamp(min=FRACTION).sum() > 2 * FRACTION) & (q >= kv),
    "clamp of rows, named": lambda b, h, q, kv: (
        torch.clamp(input=HALVES[q], min=FRACTION, max=FRACTION).sum() > 2 * FRACTION * (kv >= 9)
    ),
    "where of a truth value": lambda b, h, q, kv: (q >= kv).where(kv > 3, q == 0),
    "where of a captured truth value": lambda b, h, q, kv: (HALF > 1)[q].where(kv > 3, q == 0),
    "limits of a mixed dtype": lambda b, h, q, kv: _least_of(HALF[q] * HALF.float()[kv], q >= kv),
    "ones of a mixed dtype": lambda b, h, q, kv: _ones_of(UNSIGNED[q] + SUMMED[0, kv], q >= kv),
    "number of a mixed dtype": lambda b, h, q, kv: (
        (UNSIGNED[q] + SUMMED[0, kv]).new_tensor(-3) < UNSIGNED[q] + SUMMED[0, kv]
    ),
    "to a mixed dtype": lambda b, h, q, kv: (SUMMED * 2**33).to((SUMMED.int()[0, q] - SUMMED[0, kv]).dtype)[0, q] > kv,
    "rows of a mixed dtype": lambda b, h, q, kv: (SUMMED[:, q].to(torch.uint8) + SUMMED[:, 1]).any() & (q >= kv),
    "dimensions ()": lambda b, h, q, kv: (POSITIONS[q] > POSITIONS[kv]).any(dim=()).all(),
}
UNSIGNED = (torch.arange(300) % 256).to(torch.uint8)
BYTES = (torch.arange(300) % 256 - 128).to(torch.int8)
SUMMED = torch.arange(2 * 300).view(2, 300)
HUGE = torch.tensor([[2**52, 1, -(2**52)], [2**52, 3, 5], [-(2**52), -1, 2**52], [1, 2, 3]])
TINY = torch.tensor(1e-39)
HALF = torch.arange(300).half() / 150
DOUBLE = torch.tensor(100.5, dtype=torch.float64)
HALVES = HALF[:, None].expand(300, 2)
FRACTION = torch.tensor(0.7, dtype=torch.float64)  # more in half precision


def _least_of(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, x * 0, torch.finfo(x.dtype).min) < -1e20


def _ones_of(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, x, -torch.ones_like(x)) > 3


def _added(x: Tensor, number: int) -> Tensor:
    x += number
    return x > 100


@pytest.mark.parametrize("name", DELICATE)
def test_delicate_functions(name: str) -> None:
    check(DELICATE[name], 2, 3, 300, 290)
    check(DELICATE[name], 2, 1, 300, 300, (16, 16))


def test_wide_functions_are_decided_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits include the tensors that the function sees."""
    table = torch.arange(600 * 30).view(600, 30) // 100
    sizes: list[int] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        evaluated = evaluate(*args, **kwargs)
        sizes.append(evaluated.widest * evaluated.truth.hi.numel())
        return evaluated

    for module in (decide.__module__, Elements.__module__):
        monkeypatch.setattr(sys.modules[module], "evaluate", spy)
    monkeypatch.setattr(limits, "BLOCKS_ON_CPU", 1)
    for limit in ("BLOCKS_AT_ONCE", "ELEMENTS_AT_ONCE_ON_CPU", "ELEMENTS_AT_ONCE_ON_GPU", "WIDE_ELEMENTS_AT_ONCE"):
        monkeypatch.setattr(limits, limit, 1 << 16)
    check(lambda b, h, q, kv: (table[q] * 7 % 12 > table[kv]).any(), 1, 1, 600, 600, (16, 16))
    assert max(sizes) <= 1 << 16
    assert len(sizes) > 10


# --- errors ---


def _lookup(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return KV_IDS[q + 300] == KV_IDS[kv]


_TWO = torch.arange(2)


def _wraps(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.arange(64)[q * kv] > 0


ERRORS: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (lambda b, h, q, kv: kv <= q if q > 3 else kv >= q, ValueError, "decide by `if`"),
    (lambda b, h, q, kv: kv <= q and q - kv < 9, ValueError, "`and`"),
    (lambda b, h, q, kv: 0 <= q - kv < 9, ValueError, "chained comparison"),
    (lambda b, h, q, kv: kv <= q.item(), ValueError, r"`\.item\(\)`"),
    (lambda b, h, q, kv: kv <= int(q), ValueError, r"`int\(\)`"),
    (lambda b, h, q, kv: [0, 1, 2][q] < kv, ValueError, "Python integer"),
    (lambda b, h, q, kv: q - kv, TypeError, "must return a boolean tensor, got one of int64"),
    (lambda b, h, q, kv: (q - kv) * 0.5, TypeError, "must return a boolean tensor, got one of float32"),
    (lambda b, h, q, kv: True, TypeError, "must return a boolean tensor, got True"),
    (lambda b, h, q, kv: None, TypeError, "must return a boolean tensor, got None"),
    (
        lambda b, h, q, kv: torch.ones(3, dtype=torch.bool),
        ValueError,
        r"one truth value .* got a tensor of shape \[3\]",
    ),
    (lambda b, h, q, kv: q[None] > kv, ValueError, r"one truth value .* got a tensor of shape \[1\]"),
    (_lookup, ValueError, "a dimension of 900 .* up to 999|index 900 is out of bounds"),
    (_wraps, ValueError, "out of range|out of bounds"),
    (
        lambda b, h, q, kv: _TWO[h] < kv,
        ValueError,
        "a dimension of 2 .* up to 2|index 2 is out of bounds",
    ),
    (lambda b, h, q, kv: q.nonsense > 3, ValueError, "nonsense"),
    (lambda b, h, q, kv: unknown_name > q, ValueError, "unknown_name"),  # type: ignore[name-defined]  # noqa: F821
    (lambda b, h, q, kv: q + "a" > kv, TypeError, "unsupported operand"),
]


@pytest.mark.parametrize(("mask", "kind", "message"), ERRORS)
@pytest.mark.parametrize("call", [flexmasks.block_mask, flexmasks.dense_mask])
def test_errors(mask: Callable[..., Any], kind: type[Exception], message: str, call: Callable[..., Any]) -> None:
    with pytest.raises(kind, match=message) as error:
        call(mask, 700, heads=3)
    assert str(error.value).startswith("flexmasks")


def test_in_place_changes_of_an_index_stay_inside() -> None:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        b.mul_(0)
        q += 1
        return q > kv

    got = build(mask, 2, 1, 300, 300, CPU).block_mask(mask)
    check_equal_block_masks(
        got, create_block_mask(lambda b, h, q, kv: q + 1 > kv, *got.kv_num_blocks.shape[:2], 300, 300, "cpu")
    )


def test_in_place_changes_of_the_batch_index_stay_inside() -> None:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        b += 1
        return q >= kv + 40 * b

    want = create_block_mask(lambda b, h, q, kv: q >= kv + 40 * (b + 1), 3, 1, 600, 600, "cpu")
    check_equal_block_masks(build(mask, 3, 1, 600, 600, CPU).block_mask(mask), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_either_dtype_leave_ranges_as_they_are(dtype: torch.dtype) -> None:
    offset = torch.tensor([0, 500], dtype=dtype)
    blocks = flexmasks.get_mask("causal").blocks(1024, 2048, batch=2, q_offset=offset)
    assert blocks.not_understood == ()
    assert blocks.undecided == blocks.partial
    want = create_block_mask(lambda b, h, q, kv: q + offset[b] >= kv, 2, 1, 1024, 2048, "cpu")
    check_equal_block_masks(blocks.block_mask, want)


def test_offsets_of_64_bits_leave_no_more_open() -> None:
    """q keeps its dtype, on which torch.iinfo(q.dtype) depends."""

    def near_past(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (q - kv < torch.iinfo(q.dtype).max)

    with_int64, with_int32 = (
        flexmasks.get_mask(near_past).blocks(512, 1024, batch=2, q_offset=torch.tensor([0, 300], dtype=dtype))
        for dtype in (torch.int64, torch.int32)
    )
    assert with_int64.undecided == with_int32.undecided < with_int64.total / 4


@pytest.mark.parametrize("offset", [2**31 - 4, torch.tensor([2**31]), torch.tensor([2**31 - 4])])
def test_positions_that_32_bits_do_not_hold(offset: int | Tensor) -> None:
    q, k = torch.randn(1, 1, 5, 16), torch.randn(1, 1, 8, 16)
    with pytest.raises(ValueError, match="`q_offset` must be at most 2\\*\\*31 - 5"):
        flexmasks.attention(q, k, k, mask="causal", q_offset=offset)
    assert flexmasks.attention(q[:, :, :3], k, k, mask="causal", q_offset=2**31 - 4).shape == (1, 1, 3, 16)


# --- masks without sizes of batch and heads ---

_LENGTH = 192


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def _near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() <= 9


def _inside_documents(inner: Callable[..., Tensor], offsets: Tensor) -> Callable[..., Tensor]:
    """Return a mask inside documents, whose positions are counted from the start of each, as attention-gym makes it."""
    counts = offsets.diff()
    ids = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (ids[q] == ids[kv]) & inner(b, h, q - offsets[ids[q]], kv - offsets[ids[kv]])

    return mask


def _without_sizes(dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """Return masks in the forms of attention-gym's generators, which depend neither on the batch nor on the head."""
    offsets = torch.tensor([0, 37, 100, 160, _LENGTH], dtype=dtype)
    ids = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), offsets.diff())
    prefixes = torch.tensor([0, 0, 2, 2])
    is_global = torch.arange(_LENGTH) % 50 == 3
    ancestors = torch.eye(_LENGTH, dtype=torch.bool).cummax(0).values & (torch.rand(_LENGTH, _LENGTH) < 0.1)
    prefix_lm = or_masks(lambda b, h, q, kv: kv < 5, _causal)
    window = and_masks(_near, _causal)

    def shared_prefix(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own, prefix = ids[q], prefixes[ids[q]]
        inside = (kv >= offsets[own]) & _causal(b, h, q, kv)
        return inside | ((own != prefix) & (kv >= offsets[prefix]) & (kv < offsets[prefix + 1]))

    def in_groups(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q // 50 == kv // 50) & prefix_lm(b, h, q % 50, kv % 50)

    def tree(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        node = (kv - 8).clamp(min=0, max=_LENGTH - 1)
        return (kv < 8) | ((kv >= 8) & ancestors[q, node])

    def near_in_frames(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        near = torch.abs((q - 10) % 40 - (kv - 10) % 40) < 7
        return (q < 10) | (kv < 10) | near

    def neighborhood(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        row = (q // 16).clamp(2, 9)
        return ((row - kv // 16).abs() <= 2) & (((q % 16).clamp(2, 13) - kv % 16).abs() <= 2)

    return {
        "causal": _inside_documents(_causal, offsets),
        "window": _inside_documents(window, offsets),
        "prefix LM": _inside_documents(prefix_lm, offsets),
        "everything": _inside_documents(noop_mask, offsets),
        "neighbors": _inside_documents(_near, offsets),
        "neighbors in groups": _inside_documents(in_groups, offsets),
        "global and near": or_masks(_near, lambda b, h, q, kv: is_global[q] | is_global[kv]),
        "unknown to ranges": or_masks(_near, lambda b, h, q, kv: torch.sin(q * 1.0) > torch.cos(kv * 1.0)),
        "changed in place": lambda b, h, q, kv: torch.zeros_like(q).add_(q) % 7 == kv % 5,
        "shared prefix": shared_prefix,
        "tree": tree,
        "near in frames": near_in_frames,
        "neighborhood": neighborhood,
    }


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", _without_sizes(torch.int32))
def test_masks_need_no_sizes_of_indices_that_they_do_not_read(name: str, dtype: torch.dtype) -> None:
    mask = _without_sizes(dtype)[name]
    got = flexmasks.dense_mask(mask, _LENGTH)
    assert got.shape == (1, 1, _LENGTH, _LENGTH)
    assert torch.equal(got, create_mask(mask, 1, 1, _LENGTH, _LENGTH, device="cpu"))
    made = flexmasks.block_mask(mask, _LENGTH, block_size=64)
    check_equal_block_masks(made, create_block_mask(mask, None, None, _LENGTH, _LENGTH, "cpu", BLOCK_SIZE=64))
    assert dependence(mask, 2, 2, CPU) == (1, 1)


@pytest.mark.parametrize(
    "inner",
    [
        lambda b, h, q, kv: q >= kv + b,
        lambda b, h, q, kv: q >= kv + b.new_full((), 2) * b,
        or_masks(_near, lambda b, h, q, kv: kv == b),
    ],
)
def test_masks_that_read_the_batch_need_its_size(inner: Callable[..., Tensor]) -> None:
    mask = _inside_documents(inner, torch.tensor([0, 90, _LENGTH], dtype=torch.int32))
    for call in (flexmasks.dense_mask, flexmasks.block_mask):
        with pytest.raises(ValueError, match="depends on its batch index; pass `batch`"):
            call(mask, _LENGTH)
    want = create_mask(mask, 3, 1, _LENGTH, _LENGTH, device="cpu")
    assert torch.equal(flexmasks.dense_mask(mask, _LENGTH, batch=3), want)


# --- lists with fewer places than there are blocks ---


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_narrow_lists_are_the_first_places_of_wide_ones(data: st.DataObject) -> None:
    sizes = (2, *(data.draw(st.integers(1, most)) for most in (2, 2, 40, 40)))
    share = data.draw(st.sampled_from([0.0, 0.02, 0.2, 0.9, 1.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20)))
    marked = torch.rand(sizes, generator=generator) < share
    marked[1] &= ~marked[0]  # no block is partial and full
    wide = index_lists(marked, torch.ones(2 * marked.numel(), dtype=torch.int32))
    narrow = index_lists(marked, narrow=True)
    for counts, more_counts in zip(wide[::2], narrow[::2], strict=True):
        assert torch.equal(counts, more_counts)
    for counts, mine, theirs in zip(wide[::2], narrow[1::2], wide[1::2], strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.is_contiguous()
        assert max(int(counts.max()), 1) <= mine.shape[-1] <= min(int(counts.max()) + 16, theirs.shape[-1])
        assert torch.equal(mine, theirs[..., : mine.shape[-1]])


@pytest.mark.parametrize("count", [1, 7, 8, 41, 64])
def test_places_are_found_one_by_one_or_eight_at_a_time(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "_WORDWISE_FROM", 0)
    places = torch.rand(count + 1) < 0.3
    for first in (0, 1):  # the second place is not at the start of a word
        part = places[first : first + count]
        assert torch.equal(lists.flat_nonzero(part), part.nonzero()[:, 0])


def test_narrow_lists_are_widened_for_kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TAKES_NARROW_LISTS", True)
    monkeypatch.setattr(limits, "ENTRIES_OF_WIDE_LISTS", 0)
    monkeypatch.setattr("flexmasks.blocks.build.on_gpu", lambda device: True)
    narrow = build(_window, 1, 1, 2944, 2944, CPU, may_be_narrow=True).block_mask(_window)
    wide = lists.in_full_width(narrow)
    assert narrow.kv_indices.shape[-1] < wide.kv_indices.shape[-1] == 23
    want = create_block_mask(_window, 1, 1, 2944, 2944, "cpu")
    for got, exactly in zip(of_block_mask(wide), of_block_mask(want), strict=True):
        assert torch.equal(got, exactly)
    for side in ("q", "full_q"):
        used = torch.arange(23) < getattr(want, f"{side}_num_blocks")[..., None]
        assert torch.equal(getattr(wide, f"{side}_indices")[used], getattr(want, f"{side}_indices")[used])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all lists be narrow, on a CPU too, where torch's own kernels do not take them."""
    if not compat.TAKES_NARROW_LISTS:
        pytest.skip("torch takes narrow lists from 2.14 on")
    monkeypatch.setattr(limits, "ENTRIES_OF_WIDE_LISTS", 0)
    monkeypatch.setattr("flexmasks.blocks.build.on_gpu", lambda device: True)
    flexmasks.clear_caches()


def _window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv <= q) & (q - kv < 700)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", [_window, "causal", "grouped_tril"])
def test_attention_by_narrow_lists(mask: Any, device: str) -> None:
    length = 2944
    params = {"seq_lens": torch.tensor([length, 1700], device=device)} if mask == "grouped_tril" else {}
    made = flexmasks.block_mask(mask, length, batch=2, heads=2, device=device, check=True, **params)
    assert made.kv_indices.shape[-1] < 23
    want = create_block_mask(made.mask_mod, *made.kv_num_blocks.shape[:2], length, length, device)
    assert torch.equal(made.to_dense(), want.to_dense())
    assert made.sparsity() == want.sparsity()
    rebuilt = BlockMask.from_kv_blocks(
        made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices,
        made.BLOCK_SIZE, made.mask_mod, seq_lengths=(length, length),
    )  # fmt: skip
    assert torch.equal(rebuilt.q_num_blocks, made.q_num_blocks)
    assert torch.equal(rebuilt.full_q_num_blocks, made.full_q_num_blocks)
    q, k, v = (torch.randn(2, 2, length, 16, device=device, requires_grad=True) for _ in range(3))
    expected = flexmasks.attention(q, k, v, mask=mask, backend="reference", **params)
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    with torch.no_grad():
        assert error(flexmasks.attention(q, k, v, block_mask=made), expected.cpu()) < TOLERANCE[torch.float32]
    out = flexmasks.attention(q, k, v, block_mask=made)
    for mine, theirs in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), gradients, strict=True):
        assert error(mine, theirs.cpu()) < 2 * TOLERANCE[torch.float32]
    if device == "cuda":
        out = torch.compile(flex_attention, fullgraph=True)(q, k, v, block_mask=made)
        assert error(out, expected.detach().cpu()) < TOLERANCE[torch.float32]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("as_data", [False, True])
def test_narrow_lists_in_pickles_and_compiled_calls(as_data: bool) -> None:
    q, k, v = torch.randn(3, 1, 1, 2944, 16)
    want = flexmasks.attention(q, k, v, mask="sliding_window", window=700, backend="reference")
    made = flexmasks.block_mask("sliding_window", 2944, device="cpu", window=700, as_data=as_data)
    assert made.kv_indices.shape[-1] < 23
    loaded = pickle.loads(pickle.dumps(made))
    check_equal_block_masks(loaded, made)
    assert error(flexmasks.attention(q, k, v, block_mask=loaded), want) < TOLERANCE[torch.float32]
    if not as_data:  # eager flex_attention would ask the function about full blocks too
        compiled_attention = torch.compile(flexmasks.attention, fullgraph=True, backend="eager")
        assert error(compiled_attention(q, k, v, block_mask=loaded), want) < TOLERANCE[torch.float32]
    assert flexmasks.explain(q, k, v, block_mask=made).backend == "flex"


def test_lists_of_half_a_million_tokens_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexmasks.blocks.build.on_gpu", lambda device: True)
    monkeypatch.setattr(compat, "TAKES_NARROW_LISTS", True)
    made = flexmasks.block_mask("sliding_window", 1 << 19, device="cpu", window=4096)
    lists = [value for value in vars(made).values() if isinstance(value, Tensor)]
    assert len(lists) == 8
    assert sum(x.nbytes for x in lists) < 4 << 20  # wide lists would take 268 MB
    assert int(made.kv_num_blocks.sum() + made.full_kv_num_blocks.sum()) == 4096 * 33 - 33 * 32 // 2
    flexmasks.clear_caches()
