"""blocks.build against torch's create_block_mask, index tensor by index tensor, and dense masks against create_mask."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import oracles
import pytest
import test_ranges
import torch
from helpers import DEVICES, arguments, label
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import flexmasks
from flexmasks.blocks import build as blocks
from flexmasks.blocks.build import Layout

CPU = torch.device("cpu")
FIELDS = [f"{side}_{what}" for side in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")]
LONGEST = 600
MOST = 3  # batch elements and heads of random functions
# What is decided on the CPU for a GPU, as it is, and never: `blocks._SMALL`.
SMALL = [pytest.param(blocks._SMALL, id="small"), pytest.param(0, id="large")]


@functools.cache
def tables(device: str) -> dict[str, Any]:
    """What random functions capture: those of test_ranges, longer, with a row for every batch element and head."""
    generator = torch.Generator().manual_seed(4)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    more = {
        "doc": (torch.rand(MOST, LONGEST, generator=generator) < 1 / 64).cumsum(1),
        "rows": ints(-5, 99, MOST, LONGEST),
        "cube": ints(-5, 9, MOST, LONGEST, 4).int(),
        "table": ints(-9, 9, MOST, 2 * LONGEST),  # q - kv may be its index, and wrap
        "bias": ints(-9, 9, MOST, 90),
        "per_batch": ints(0, 300, MOST),
        "per_head": torch.randn(MOST, generator=generator),
        "offsets": torch.arange(20) * 30,
        "seq_idx": torch.arange(LONGEST) // 30,
        "few": torch.tensor([3, 17, 64, 100, 128, 333]),
    }
    every = {**test_ranges._tables(LONGEST), **more}
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in every.items()}


TABLES = tables("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def check_equal(got: BlockMask, want: BlockMask) -> None:
    """The same eight index tensors: dtype, shape, and the order of indices, the unused ones included."""
    assert got.seq_lengths == want.seq_lengths
    assert got.BLOCK_SIZE == want.BLOCK_SIZE
    for field in FIELDS:
        mine, theirs = getattr(got, field), getattr(want, field)
        assert (mine.dtype, mine.device) == (theirs.dtype, theirs.device), field
        assert torch.equal(mine, theirs), field


def check(
    mask: Callable[..., Tensor],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    size: tuple[int, int] = (128, 128),
    device: str = "cpu",
) -> Layout:
    """Build the blocks of a mask and compare them, its dependence on b and h, and the dense mask, with torch's."""
    where = torch.empty(0, device=device).device  # "cuda" is "cuda:0"
    built = blocks.build(mask, batch, heads, q_len, kv_len, where, size)
    own_batch, own_heads = built.indices[0].shape[:2]
    assert own_batch in (1, batch)
    assert own_heads in (1, heads)
    want = create_block_mask(mask, own_batch, own_heads, q_len, kv_len, device=device, BLOCK_SIZE=size)
    got = built.block_mask(mask)
    check_equal(got, want)
    assert got.mask_mod is mask
    dense = create_mask(mask, batch, heads, q_len, kv_len, device=device)
    assert torch.equal(dense[:own_batch, :own_heads].expand_as(dense), dense)
    assert torch.equal(blocks.dense(mask, batch, heads, q_len, kv_len, where).expand_as(dense), dense)
    partial, full = blocks.of_block_mask(got)
    assert int(partial.sum()) == int(want.kv_num_blocks.sum())
    assert int(full.sum()) == int(want.full_kv_num_blocks.sum())
    return built


# --- random masks ---

Pick = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Drawn:
    """A function and the sizes to try it at."""

    expression: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    size: tuple[int, int]

    @property
    def sizes(self) -> tuple[int, int, int, int, tuple[int, int]]:
        return self.batch, self.heads, self.q_len, self.kv_len, self.size


def drawn(write: Callable[[Pick], str]) -> st.SearchStrategy[Drawn]:
    """Functions that `write` composes by picking from lists, and their sizes.

    Hypothesis draws one string of bytes, each of which picks. Of many draws it would spend most examples on variations
    of few functions, whose parts are the same.
    """

    def decoded(choices: bytes) -> Drawn:
        left = iter(choices)

        def pick(options: Sequence[Any]) -> Any:
            return options[next(left, 0) % len(options)]

        batch, heads = pick([1, 2, 3]), pick([1, 2, 3])
        lengths = [LONGEST - pick([0, 1, 70]) if pick(range(40)) == 39 else pick(pick(LENGTHS)) for _ in range(2)]
        sizes = pick([16, 16, 32, 64, 128, 256, 100]), pick([16, 16, 32, 64, 128, 256, 17])
        expression = write(pick)
        if "isin" in expression:  # which torch.vmap calls for every element
            lengths = [n % 48 + 1 for n in lengths]
        return Drawn(expression, batch, heads, *lengths, sizes)

    return st.binary(min_size=160, max_size=160).map(decoded)


# Most are short: torch's own functions take all the time.
LENGTHS: list[Sequence[int]] = [range(1, 100), range(1, 100), range(20, 120), range(20, 120), range(90, 200)]
LENGTHS += [[1, 16, 127, 128, 129], range(200, 300)]

# Functions as the documentation of `flexmasks.block_mask` allows them: x and y are integers, f and g floats, c, d and e
# truth values, i and j indices of LONGEST elements, k, n (not 0) and s Python numbers, t dtypes. No index leaves its
# tensor, whatever is filled in: on CUDA that would end the process.
GRAMMAR: dict[str, tuple[list[str], list[str]]] = {
    "x": (
        [
            *("{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} + {k}", "{k} - {x}", "{k} * {x}", "-{x}", "abs({x})"),
            *("{x} // {n}", "{x} % {n}", "{x} // ({y} | 1)", "{x} % ({y} | 1)", "{k} // ({x} | 1)", "{k} % ({x} | 1)"),
            *("{x}.clamp({k}, {k})", "{x}.clamp(max={k})", "torch.clip({x}, min={k})", "torch.clip({x}, max={y})"),
            *("torch.minimum({x}, {y})", "torch.maximum({x}, {y})", "torch.min({x}, {y})", "torch.max({x}, {y})"),
            *("torch.where({c}, {x}, {y})", "torch.where({c}, {x}, {k})", "torch.where({c}, {k}, {x})"),
            *("{x} & {y}", "{x} | {y}", "{x} ^ {y}", "{x} & {k}", "{k} | {x}", "{x} ^ {k}", "~{x}"),
            *("{x} >> {s}", "{x} << {s}", "{k} >> ({x} % 6)", "1 << ({x} % 6)", "{x} >> ({y} % 6)"),
            *("{x}.to({t})", "{x}.long()", "{x}.int()", "{x}.to({y})", "{f}.clamp(-900, 900).long()"),
            *("{c}.int()", "{c} * {x}", "{c}.long() + {d}", "(few <= {x}).sum()", "(few - {x}).abs().amin()"),
            *("ids[{i}]", "jumbled[{i}]", "doc[b, {i}]", "doc[b][{i}]", "rows[h, {i}]", "cube[b, {i}, {j} % 4]"),
            *("offsets[seq_idx[{i}]]", "grid[{i} // 8, {j} // 8]", "table[h, {i} - {j} % 600]"),
            *("table[h, q - kv]", "table[h, torch.where(q >= kv, q - kv, 0)]", "bias[h][(q - kv).clamp(-40, 40)]"),
        ],
        ["q", "kv", "q", "kv", "q - kv", "kv - q", "q + kv", "b", "h", "ids[q]", "doc[b, kv]", "per_batch[b]"],
    ),
    "f": (
        [
            *("{x} * 0.5", "{x} / {n}", "{x}.float()", "{x}.double() / 3", "real[{i}]", "per_head[h] * {x}", "-{f}"),
            *("{f} + {g}", "{f} - {x}", "torch.maximum({f}, {g})", "{f}.clamp(-3.5, 80)", "torch.where({c}, {f}, 0.5)"),
        ],
        ["q * 0.1", "kv / 7", "real[kv]", "per_head[h] * q"],
    ),
    "c": (
        [
            *("{x} < {y}", "{x} <= {y}", "{x} > {y}", "{x} >= {y}", "{x} == {y}", "{x} != {y}"),
            *("{x} < {k}", "{k} <= {x}", "{x} > {k}", "{k} >= {x}", "{x} == {k}", "{k} != {x}"),
            *("{f} < {x}", "{f} >= {g}", "{x} <= {f}", "{f} > 2.5", "({x} & {k}) != 0", "{x}.bool()"),
            *("{c} & {d}", "{c} | {d}", "{c} ^ {d}", "~{c}", "{c} & {d} & {e}", "{c} | ~{d}", "{c} == {d}"),
            *("torch.logical_and({c}, {d})", "torch.logical_or({c}, {x})", "torch.logical_xor({c}, {d})"),
            *("torch.logical_not({x})", "torch.where({c}, {d}, {e})", "flags[{i}]", "square[{i}, {j}]"),
            *("doc[b, {i}] == doc[b, {j}]", "doc[b][{i}] == doc[b][{j}]", "square[q][{j}]", "square[kv][{i}]"),
            *("chosen[{i} // 8, {j} // 8]", "torch.isin({x}, few)", "torch.isin({i}, few, invert=True)"),
            *("(few == {x}).any()", "({x} == few).any(-1)", "(few != {x}).all()"),
        ],
        ["q >= kv", "q >= kv", "doc[b, q] == doc[b, kv]", "kv < per_batch[b]", "q - kv < 40", "flags[kv]", "kv < 100"],
    ),
    "i": (["{x}.long() % 40", "{x}.long().clamp(0, 39)", "torch.where({c}, q, 3)"], ["q", "kv", "-1 - q", "kv - 1"]),
    "k": ([], ["0", "1", "3", "-2", "7", "16", "32", "64", "100", "-40", "120"]),
    "n": ([], ["1", "2", "3", "7", "8", "16", "100", "-1", "-3", "-16"]),
    "s": ([], ["0", "1", "3", "5"]),
    "t": ([], ["torch.int8", "torch.uint8", "torch.int16", "torch.int32", "torch.int64"]),
}
GRAMMAR |= {"y": GRAMMAR["x"], "g": GRAMMAR["f"], "d": GRAMMAR["c"], "e": GRAMMAR["c"], "j": GRAMMAR["i"]}


def composed(pick: Pick, kind: str = "c", depth: int = 5) -> str:
    """Python code of a mask, or of what a hole of GRAMMAR's templates needs."""
    templates, leaves = GRAMMAR[kind]

    def filled(hole: re.Match[str]) -> str:
        code = composed(pick, hole[1], depth - pick([3, 2, 1]))
        return code if re.fullmatch(r"\w+", code) else f"({code})"

    return re.sub(r"{(\w)}", filled, pick(templates if templates and depth > 0 else leaves))


def is_mask(mask: Callable[..., Any], batch: int, heads: int, q_len: int, kv_len: int) -> bool:
    """Whether torch's create_mask takes it."""
    try:
        seen = create_mask(mask, batch, heads, q_len, kv_len, device="cpu")
    except (RuntimeError, TypeError, ValueError, ArithmeticError, IndexError, AttributeError):
        return False
    return seen.dtype == torch.bool and seen.ndim == 4


@pytest.mark.parametrize("device", DEVICES)
def test_composed_functions(device: str) -> None:
    """At least 2,000 functions, none counted twice."""
    kept: set[str] = set()
    mixed = 0

    @settings(max_examples=2060 if device == "cpu" else 200)
    @given(drawn(composed))
    def equal(case: Drawn) -> None:
        nonlocal mixed
        built = check(test_ranges.compiled(case.expression, tables(device)), *case.sizes, device)
        kept.add(case.expression)
        partial, full = built.indices[0].sum(), built.indices[2].sum()
        mixed += bool(0 < partial + full < built.indices[1].numel() or (partial and full))

    equal()
    assert len(kept) > (2000 if device == "cpu" else 180)
    assert mixed > len(kept) // 5  # blocks of more than one kind


def test_random_functions() -> None:
    """Any operation and operand, as test_ranges has them: most of what torch refuses is discarded."""
    kept: set[str] = set()
    sizes = st.sampled_from([16, 32, 64])

    @settings(max_examples=100)
    @given(
        expression=test_ranges.expressions("c", 3, odd=False) | test_ranges.expressions("c", 2, odd=False),
        sizes=st.tuples(*[st.integers(1, 2)] * 2, *[st.integers(1, 80)] * 2, st.tuples(sizes, sizes)),
    )
    def equal(expression: str, sizes: tuple[int, int, int, int, tuple[int, int]]) -> None:
        mask = test_ranges.compiled(expression, TABLES)
        assume(is_mask(mask, *sizes[:2], 2, 2) and is_mask(mask, 1, 1, *sizes[2:4]))
        check(mask, *sizes)
        kept.add(expression)

    equal()
    assert len(kept) > 50


GEOMETRY = ["kv <= q", "q - kv <= {n}", "kv < {n}", "(q + kv) % {n} == 0", "q // {n} == kv // {n}", "kv <= q + h * {n}"]
GEOMETRY += ["kv < per_batch[b]", "ids[q] == ids[kv]", "abs(q - kv) * per_head[h] < {n}", "q % {n} <= kv % {n}"]
GEOMETRY += ["square[q, kv]", "flags[kv]", "rows[b, q] >= rows[b, kv]", "q > {n}", "kv == {n}"]


def structured(pick: Pick, depth: int = 2) -> str:
    """Masks as people write them: conditions on positions, joined by and, or, not."""
    if depth == 0 or pick([True, False, False]):
        return pick(GEOMETRY).replace("{n}", str(pick([1, 7, 32, 100, 250])))
    first, second = structured(pick, depth - 1), structured(pick, depth - 1)
    return pick(["({x}) & ({y})", "({x}) | ({y})", "~({x})"]).format(x=first, y=second)


@pytest.mark.parametrize("device", DEVICES)
def test_structured_functions(device: str) -> None:
    kept: set[str] = set()

    @settings(max_examples=400 if device == "cpu" else 100)
    @given(drawn(structured))
    def equal(case: Drawn) -> None:
        check(test_ranges.compiled(case.expression, tables(device)), *case.sizes, device)
        kept.add(case.expression)

    equal()
    assert len(kept) > (250 if device == "cpu" else 60)


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
    """Functions of 700 queries and 900 keys, of 2 batch elements and 3 heads, that captured tensors on a device."""
    q_ids, kv_ids = _documents(900, 1).to(device), KV_IDS.to(device)
    of_density = {density: _random(700, 900, density=density).to(device) for density in DENSITIES}
    per_head = _random(2, 3, 700, 900, density=2e-4).to(device)
    by_row = torch.stack([q_ids, q_ids.flip(0)])
    shuffled = torch.randperm(900, generator=torch.Generator().manual_seed(3)).to(device)
    chosen = _random(11, 15, density=0.3).to(device)
    of_distance = _random(3, 1600, density=0.1).to(device)
    starts = torch.arange(900, device=device) // 45 * 45  # of the sequence that a token belongs to
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("small", SMALL)
@pytest.mark.parametrize("name", HARD)
def test_hard_functions(name: str, small: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_SMALL", small)
    check(hard(device)[name], 2, 3, 700, 900, device=device)
    check(hard(device)[name], 2, 3, 500, 450, (64, 32), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("small", SMALL)
def test_isin(small: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few elements: torch.vmap calls it for each."""
    monkeypatch.setattr(blocks, "_SMALL", small)
    few = torch.tensor([0, 1, 33, 70], device=device)
    check(lambda b, h, q, kv: torch.isin(kv, few) | (q - kv == h), 1, 3, 60, 80, (16, 32), device)
    check(lambda b, h, q, kv: torch.isin(q - kv, few, invert=True) & (kv <= q), 1, 1, 80, 60, (32, 16), device)


@pytest.mark.parametrize(("name", "value"), [("_BLOCKS", 1), ("_BLOCKS", 8), ("_BLOCKS", 100), ("_CHUNK", (999, 999))])
def test_what_is_done_at_once_makes_no_difference(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of the rows, down to one, and few blocks at a time."""
    monkeypatch.setattr(blocks, name, value)
    for mask in HARD.values():
        check(mask, 2, 3, 200, 150, (32, 16))
        check(mask, 1, 1, 200, 190, (16, 48))


@pytest.mark.parametrize("q_len", [1, 127, 128, 129])
@pytest.mark.parametrize("kv_len", [1, 127, 128, 129])
def test_edges_of_blocks(q_len: int, kv_len: int) -> None:
    for name in ("one column", "nothing hidden", "all hidden", "checkerboard", "random 0.5"):
        check(HARD[name], 1, 1, q_len, kv_len)
    check(lambda b, h, q, kv: kv <= q, 1, 1, q_len, kv_len)
    check(lambda b, h, q, kv: kv <= q, 1, 1, q_len, kv_len, (1024, 2048))
    check(lambda b, h, q, kv: kv <= q, 1, 1, q_len, kv_len, (16, 8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", oracles.MASK_CASES, ids=label)
def test_registered_masks(case: oracles.Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(case, device)
    sizes = {"batch": case.batch, "heads": case.heads}
    for size in (128, (16, 32)):
        got = flexmasks.block_mask(case.name, case.q_len, case.kv_len, block_size=size, device=device, **sizes, **given)
        own_batch, own_heads = got.kv_num_blocks.shape[:2]
        want = create_block_mask(
            got.mask_mod, own_batch, own_heads, case.q_len, case.kv_len, device=device, BLOCK_SIZE=size
        )
        check_equal(got, want)
    dense = create_mask(got.mask_mod, case.batch, case.heads, case.q_len, case.kv_len, device=device)
    assert torch.equal(dense[:own_batch, :own_heads].expand_as(dense), dense)
    own = flexmasks.dense_mask(case.name, case.q_len, case.kv_len, device=device, **sizes, **given)
    assert own.dtype == torch.bool
    assert own.shape == (own_batch, own_heads, case.q_len, case.kv_len)
    assert torch.equal(own.expand_as(dense), dense)
    monkeypatch.setattr(blocks, "_SMALL", 0)
    check(got.mask_mod, case.batch, case.heads, case.q_len, case.kv_len, (32, 16), device)


# --- what is looked at ---


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
@pytest.mark.parametrize("size", [128, 16])  # 16: more blocks than the CPU decides for a GPU
@pytest.mark.parametrize("name", neat("cpu"))
def test_only_partial_blocks_are_looked_at(name: str, size: int, device: str) -> None:
    assert size == 128 or (4096 // size) ** 2 > blocks._SMALL
    built = check(neat(device)[name], 1, 1, 4096, 4096, (size, size), device)
    assert built.undecided == int(built.indices[0].sum())
    assert built.not_understood == ()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["documents", "random 0.3", "random 1e-05", "per batch and head", "not a number"])
def test_many_blocks_of_a_gpu(name: str) -> None:
    """So many that they are decided there, the limit as it is."""
    assert blocks._SMALL < 350 * 300
    check(hard("cuda")[name], 2, 3, 700, 900, (2, 3), "cuda")


def test_what_is_not_understood_is_named() -> None:
    assert check(HARD["unknown, all hidden"], 1, 1, 300, 300).not_understood == ("sin",)
    assert check(HARD["row by row"], 1, 1, 300, 300).not_understood == ()


# What ranges cannot go through is looked at element by element, and still depends on b and h only where it uses them.
POSITIONS = torch.arange(600).view(300, 2) // 7
THROUGH_NO_RANGE: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {
    "product": (lambda b, h, q, kv: POSITIONS[q] @ POSITIONS[kv] > 900, (1, 1)),
    "product and batch": (lambda b, h, q, kv: (POSITIONS[q] @ POSITIONS[kv] > 900) & (b > 0), (2, 1)),
    "attribute and head": (lambda b, h, q, kv: POSITIONS[q].real.sum() > POSITIONS[kv + h - h].real.sum(), (1, 3)),
    "own vmap": (lambda b, h, q, kv: torch.vmap(lambda x: (x + q) % 3 > kv % 3)(POSITIONS[0]).any() | (b > 0), (2, 1)),
    "own derivative": (lambda b, h, q, kv: torch.func.grad(lambda x: x * q * 0.5)(kv * 1.0) > kv, (1, 1)),
}


@pytest.mark.parametrize("name", THROUGH_NO_RANGE)
def test_what_no_range_goes_through(name: str) -> None:
    mask, depends = THROUGH_NO_RANGE[name]
    built = check(mask, 2, 3, 300, 290)
    assert built.indices[0].shape[:2] == depends
    assert built.not_understood
    assert blocks.dependence(mask, 2, 3, CPU) == depends


WRONG_ONCE: dict[str, Callable[..., Any]] = {  # by an answer of ranges that was not torch's
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


def _least_of(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, x * 0, torch.finfo(x.dtype).min) < -1e20


def _ones_of(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, x, -torch.ones_like(x)) > 3


def _added(x: Tensor, number: int) -> Tensor:
    x += number
    return x > 100


@pytest.mark.parametrize("name", WRONG_ONCE)
def test_once_wrong(name: str) -> None:
    check(WRONG_ONCE[name], 2, 3, 300, 290)
    check(WRONG_ONCE[name], 2, 1, 300, 300, (16, 16))


def test_wide_functions_are_decided_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that the function sees count, too, in what is decided and looked at in one go."""
    table = torch.arange(600 * 30).view(600, 30) // 100
    sizes: list[int] = []
    evaluate = blocks.evaluate

    def spy(*args: Any) -> Any:
        found = evaluate(*args)
        sizes.append(found.widest * found.truth.hi.numel())
        return found

    monkeypatch.setattr(blocks, "evaluate", spy)
    monkeypatch.setattr(blocks, "_SMALL", 1)
    monkeypatch.setattr(blocks, "_BLOCKS", 1 << 16)
    monkeypatch.setattr(blocks, "_CHUNK", (1 << 16, 1 << 16))
    monkeypatch.setattr(blocks, "_WIDE", 1 << 16)
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

    got = blocks.build(mask, 2, 1, 300, 300, CPU).block_mask(mask)
    check_equal(got, create_block_mask(lambda b, h, q, kv: q + 1 > kv, *got.kv_num_blocks.shape[:2], 300, 300, "cpu"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_either_dtype_leave_ranges_as_they_are(dtype: torch.dtype) -> None:
    offset = torch.tensor([0, 500], dtype=dtype)
    found = flexmasks.get_mask("causal").blocks(1024, 2048, batch=2, q_offset=offset)
    assert found.not_understood == ()
    assert found.undecided == found.partial
    want = create_block_mask(lambda b, h, q, kv: q + offset[b] >= kv, 2, 1, 1024, 2048, "cpu")
    check_equal(found.block_mask, want)


def test_offsets_of_64_bits_leave_no_more_open() -> None:
    """q keeps its dtype, which an operation that ranges do not know needs."""

    def own(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (q - kv < torch.iinfo(q.dtype).max)

    made = [
        flexmasks.get_mask(own).blocks(512, 1024, batch=2, q_offset=torch.tensor([0, 300], dtype=dtype))
        for dtype in (torch.int64, torch.int32)
    ]
    assert made[0].undecided == made[1].undecided < made[0].total / 4


@pytest.mark.parametrize("offset", [2**31 - 4, torch.tensor([2**31]), torch.tensor([2**31 - 4])])
def test_positions_that_32_bits_do_not_hold(offset: int | Tensor) -> None:
    q, k = torch.randn(1, 1, 5, 16), torch.randn(1, 1, 8, 16)
    with pytest.raises(ValueError, match="`q_offset` must be at most 2\\*\\*31 - 5"):
        flexmasks.attention(q, k, k, mask="causal", q_offset=offset)
    assert flexmasks.attention(q[:, :, :3], k, k, mask="causal", q_offset=2**31 - 4).shape == (1, 1, 3, 16)
