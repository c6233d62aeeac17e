"""Counts and facts of blocks, against torch's mask and a naive kernel."""

from __future__ import annotations

import itertools
import math
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracles
import pytest
import torch
from functions import LONG_TABLES, Drawn, compiled, composed, drawn, short_and_campaign, structured
from helpers import TOLERANCE, arguments, by_turns, check_equal_block_masks, error, on_gpu_of
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import flexmasks
from flexmasks import compat
from flexmasks.backends import flex, kernel_tiles
from flexmasks.blocks import Blocks, count_in_strips, strips

SAFE, CONTIGUOUS = "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS"


pytestmark = pytest.mark.usefixtures("one_thread")


# --- oracles ---


def whole_mask(made: BlockMask) -> Tensor:
    return create_mask(made.mask_mod, *made.kv_num_blocks.shape[:2], *made.seq_lengths, device="cpu")


def lists_of(made: BlockMask) -> list[tuple[Tensor | None, Tensor | None]]:
    return [
        (made.kv_num_blocks, made.kv_indices),
        (made.full_kv_num_blocks, made.full_kv_indices),
        (made.q_num_blocks, made.q_indices),
        (made.full_q_num_blocks, made.full_q_indices),
    ]


def without_gap(made: BlockMask) -> bool:
    """Return whether the blocks of every list follow each other one by one."""
    for counts, indices in lists_of(made):
        assert counts is not None
        assert indices is not None
        for count, line in zip(counts.flatten().tolist(), indices.flatten(0, -2).tolist(), strict=True):
            if any(after != before + 1 for before, after in itertools.pairwise(line[:count])):
                return False
    return True


def gives_nan(made: BlockMask, whole: Tensor, tile: int) -> bool:
    """Return whether a query ends in NaN in an unsafe kernel.

    The unsafe kernel is torch's Triton kernel without its check for rows that have seen nothing.

    The kernel is an online softmax, `tile` keys at a time, over partial and then over full blocks. All scores are 0.
    """
    (height, width), (q_len, kv_len) = made.BLOCK_SIZE, made.seq_lengths
    batch, heads, rows = made.kv_num_blocks.shape
    for b, h, i in itertools.product(range(batch), range(heads), range(rows)):
        queries = range(i * height, min((i + 1) * height, q_len))
        peak = torch.full((len(queries),), -math.inf)
        total = torch.zeros(len(queries))
        for full, (counts, indices) in enumerate(lists_of(made)[:2]):
            if counts is None or indices is None:
                continue
            for j in indices[b, h, i, : counts[b, h, i]].tolist():
                for start in range(j * width, (j + 1) * width, tile):
                    keys = range(start, min(start + tile, (j + 1) * width, kv_len))
                    scores = torch.full((len(queries), tile), -math.inf)
                    if len(keys):
                        visible = whole[b, h, queries.start : queries.stop, keys.start : keys.stop]
                        scores[:, : len(keys)][visible | bool(full)] = 0.0
                    new = torch.maximum(peak, scores.amax(1))
                    total = total * torch.exp2(peak - new) + torch.exp2(scores - new[:, None]).sum(1)
                    peak = new
        if total.isnan().any():
            return True
    return False


def check(blocks: Blocks) -> None:
    """Check everything that can be counted."""
    made = blocks.block_mask
    whole = whole_mask(made)
    height, width = made.BLOCK_SIZE
    count: Counter[str] = Counter()
    pairs: Counter[str] = Counter()
    visible = 0
    for matrix in whole.flatten(0, 1):
        for block in (part for rows in matrix.split(height) for part in rows.split(width, 1)):
            visible_of_block = int(block.sum())
            full = visible_of_block == height * width
            kind = "empty" if not visible_of_block else "full" if full else "partial"
            count[kind] += 1
            pairs[kind] += block.numel()
            visible += visible_of_block
    assert (blocks.empty, blocks.partial, blocks.full) == (count["empty"], count["partial"], count["full"])
    assert blocks.total == count.total()
    want = [pairs[kind] / whole.numel() for kind in ("empty", "partial", "full")]
    assert blocks.shares == pytest.approx(want, abs=1e-12)
    assert blocks.sparsity == pytest.approx(want[0], abs=1e-12)
    computed = pairs["partial"] + pairs["full"]
    assert blocks.hidden == pytest.approx(1 - visible / computed if computed else 0.0, abs=1e-12)
    if made.seq_lengths[0] % height == made.seq_lengths[1] % width == 0:
        assert blocks.sparsity == pytest.approx(made.sparsity() / 100, abs=1e-12)
    check_facts(blocks, whole)


def check_facts(blocks: Blocks, whole: Tensor) -> None:
    made = blocks.block_mask
    assert blocks.contiguous == without_gap(made)
    # Tiles of 16 keys are the smallest that kernels use. A row that is safe with them is safe with larger ones.
    width = made.BLOCK_SIZE[1]
    counts = made.kv_num_blocks + (0 if (full := made.full_kv_num_blocks) is None else full)
    every_row_has_blocks = bool((counts > 0).all())
    assert blocks.rows_guaranteed_safe == (every_row_has_blocks and not gives_nan(made, whole, min(16, width)))
    if blocks.rows_guaranteed_safe:
        assert not any(gives_nan(made, whole, tile) for tile in (32, 64, 128) if width % tile == 0)
    facts = {SAFE: blocks.rows_guaranteed_safe, CONTIGUOUS: blocks.contiguous}
    assert blocks.kernel_options == {name: True for name, holds in facts.items() if holds}


# --- counts and facts ---


@pytest.mark.slow
@short_and_campaign(40, 300)
@pytest.mark.parametrize("write", [structured, composed])
def test_random_masks(write: Callable[..., str], examples: int) -> None:
    """Count blocks of the library, and those of torch's create_block_mask.

    The BlockMask of torch covers all batch elements and heads.
    """
    proven: Counter[str] = Counter()

    @settings(max_examples=examples)
    @given(drawn(write))
    def counts_are_right(case: Drawn) -> None:
        mod = compiled(case.expression, LONG_TABLES)
        batch, heads, q_len, kv_len, size = case.sizes
        blocks = flexmasks.get_mask(mod).blocks(q_len, kv_len, batch=batch, heads=heads, block_size=size, q_offset=0)
        check(blocks)
        every = Blocks(create_block_mask(mod, batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=size))
        copies = batch * heads // blocks.block_mask.kv_num_blocks.shape[:2].numel()
        want = tuple(n * copies for n in (blocks.empty, blocks.partial, blocks.full))
        assert (every.empty, every.partial, every.full) == want
        assert every.shares == pytest.approx(blocks.shares, abs=1e-12)
        assert every.hidden == pytest.approx(blocks.hidden, abs=1e-12)
        assert every.kernel_options == blocks.kernel_options
        assert (every.undecided, every.not_understood) == (None, ())
        proven.update(every.kernel_options or {"nothing": True})

    counts_are_right()
    assert min(proven[name] for name in (SAFE, CONTIGUOUS, "nothing")) > examples // 60, proven


@short_and_campaign(25, 150)
@pytest.mark.parametrize("blocks_of_strip", [strips._BLOCKS_OF_STRIP, 8])
def test_counts_in_strips(blocks_of_strip: int, examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "_BLOCKS_OF_STRIP", blocks_of_strip)

    @settings(max_examples=examples)
    @given(drawn(structured))
    def counts_are_equal(case: Drawn) -> None:
        mod = compiled(case.expression, LONG_TABLES)
        _, _, *lengths, size = case.sizes
        counts = count_in_strips(mod, *lengths, size, torch.device("cpu"))
        want = Blocks(create_block_mask(mod, 1, 1, *lengths, device="cpu", BLOCK_SIZE=size))
        assert (counts.empty, counts.partial, counts.full) == (want.empty, want.partial, want.full)
        assert counts.shares == pytest.approx(want.shares, abs=1e-12)
        assert counts.hidden == pytest.approx(want.hidden, abs=1e-12)
        assert not counts.estimated

    counts_are_equal()


def test_hidden_pairs_are_estimated_from_some_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "_SAMPLED_PAIRS", 64 * 64 * 5)
    counts = count_in_strips(lambda b, h, q, kv: kv <= q, 1024, 1024, (64, 64), torch.device("cpu"))
    want = flexmasks.get_mask("causal").blocks(1024, block_size=64)
    assert counts.estimated
    assert counts.shares == pytest.approx(want.shares)
    assert counts.hidden == pytest.approx(want.hidden)  # every partial block hides the same number of pairs


@by_turns(oracles.MASK_CASES, [(32, 16), (128, 128)], turns=4)
def test_registered_masks(case: oracles.Case, size: tuple[int, int]) -> None:
    given = arguments(case)
    offset = given.pop("q_offset")
    sizes = {"batch": case.batch, "heads": case.heads, "block_size": size, "q_offset": offset}
    mask = flexmasks.get_mask(case.name, **given)
    blocks = mask.blocks(case.q_len, case.kv_len, **sizes)
    check(blocks)
    made = flexmasks.block_mask(mask, case.q_len, case.kv_len, **sizes)
    check_equal_block_masks(blocks.block_mask, made)
    assert torch.equal(whole_mask(blocks.block_mask), whole_mask(made))


@pytest.mark.parametrize("lengths", [(1, 1), (128, 256), (300, 200), (129, 257)])
@pytest.mark.parametrize("size", [(128, 128), (64, 16), (16, 256), (256, 100)])
def test_nothing_and_everything_visible(lengths: tuple[int, int], size: tuple[int, int]) -> None:
    nothing = flexmasks.get_mask(lambda b, h, q, kv: q < 0).blocks(*lengths, block_size=size, q_offset=0)
    check(nothing)
    assert (nothing.sparsity, nothing.hidden, nothing.rows_guaranteed_safe) == (1.0, 0.0, False)
    everything = flexmasks.get_mask("full").blocks(*lengths, block_size=size)
    check(everything)
    assert everything.empty == everything.sparsity == everything.hidden == 0
    assert everything.kernel_options == {SAFE: True, CONTIGUOUS: True}


@pytest.mark.parametrize("q_len", [1, 100, 128, 129, 300, 512])
@pytest.mark.parametrize("kv_len", [1, 100, 128, 129, 300, 512])
def test_causal_is_safe_and_contiguous(q_len: int, kv_len: int) -> None:
    for size in (128, 16, (64, 128), (128, 64)):
        blocks = flexmasks.get_mask("causal").blocks(q_len, kv_len, block_size=size, q_offset=0)
        check(blocks)
        assert blocks.rows_guaranteed_safe
        # Where the edge cuts the last blocks, they are partial, and the blocks above them in their column are full.
        assert blocks.contiguous or q_len % blocks.block_mask.BLOCK_SIZE[0] or kv_len % blocks.block_mask.BLOCK_SIZE[1]


FACTS: list[tuple[Any, bool, bool]] = [
    ("causal", True, True),
    ("full", True, True),
    # The first block in most lists is the one where the window ends, which is hidden from the block's last query.
    (flexmasks.get_mask("sliding_window", window=512), False, False),
    (flexmasks.get_mask("prefix_lm", prefix_len=1000), True, True),
    (lambda b, h, q, kv: (kv <= q) & (kv % 100 < 99), True, True),
    (lambda b, h, q, kv: (kv <= q) & (kv % 128 > 14), False, True),
    (lambda b, h, q, kv: kv % 128 > 14, True, True),
    (lambda b, h, q, kv: kv % 128 > 15, False, True),
    (lambda b, h, q, kv: kv // 128 % 2 == 0, True, False),
    (lambda b, h, q, kv: q // 128 % 2 == 0, False, False),
    (lambda b, h, q, kv: (q != 5000) | (kv > 8000), False, False),
]


@pytest.mark.parametrize(("mask", "safe", "contiguous"), FACTS)
def test_facts_over_many_keys(mask: Any, safe: bool, contiguous: bool) -> None:
    blocks = flexmasks.get_mask(mask).blocks(8192)
    assert (blocks.rows_guaranteed_safe, blocks.contiguous) == (safe, contiguous)
    ragged = flexmasks.get_mask(mask).blocks(8192 - 37)
    assert ragged.rows_guaranteed_safe == safe


# --- BlockMasks that others made ---


def _in_four(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv <= q) & (q // 64 >= 1)


def _lists(indices: list[list[int]], **more: Any) -> BlockMask:
    """Return 4 x 4 blocks of 64 over 256 queries and 250 keys.

    The listed blocks are partial.
    """
    counts = torch.tensor([[[len(line) for line in indices]]], dtype=torch.int32)
    padded = [line + [n for n in range(4) if n not in line] for line in indices]
    options = {"BLOCK_SIZE": 64, "mask_mod": _in_four, "seq_lengths": (256, 250)} | more
    return BlockMask.from_kv_blocks(counts, torch.tensor([[padded]], dtype=torch.int32), **options)


def test_lists_without_full_blocks() -> None:
    blocks = Blocks(_lists([[0, 1, 2, 3]] * 4))
    visible = int(whole_mask(blocks.block_mask).sum())
    assert (blocks.total, blocks.empty, blocks.partial, blocks.full) == (16, 0, 16, 0)
    assert blocks.shares == (0.0, 1.0, 0.0)
    assert blocks.hidden == pytest.approx(1 - visible / (256 * 250))
    assert not blocks.rows_guaranteed_safe  # queries 0 to 63 see nothing
    assert "partial 16, full 0; skipped: 0.0%" in str(blocks)


def test_full_blocks_at_the_edge() -> None:
    """A kernel would look at the keys that exist.

    torch's create_block_mask makes no such blocks.
    """
    made = flexmasks.block_mask("full", 256, block_size=64)
    made.seq_lengths = (250, 230)
    blocks = Blocks(made)
    assert (blocks.empty, blocks.partial, blocks.full) == (0, 0, 16)
    assert (blocks.shares, blocks.hidden) == ((0.0, 0.0, 1.0), 0.0)


def test_lists_in_any_order() -> None:
    """A kernel looks at the first block of a list first."""
    lists = [[0, 1, 2, 3], [1, 0], [2, 1, 0], [3, 2, 1, 0]]
    blocks = Blocks(_lists(lists, mask_mod=lambda b, h, q, kv: kv <= q))
    assert (blocks.total, blocks.empty, blocks.partial) == (16, 3, 13)
    assert blocks.rows_guaranteed_safe
    assert not blocks.contiguous
    check_facts(blocks, whole_mask(blocks.block_mask))
    lists[0] = [1, 0, 2, 3]
    check_facts(unsafe := Blocks(_lists(lists, mask_mod=lambda b, h, q, kv: kv <= q)), whole_mask(blocks.block_mask))
    assert not unsafe.rows_guaranteed_safe


def test_without_lists_of_queries_gaps_are_unknown() -> None:
    assert not Blocks(_lists([[0, 1]] * 4, compute_q_blocks=False)).contiguous
    assert Blocks(_lists([[0, 1]] * 4)).contiguous


# --- Mask.blocks ---


def test_blocks_looked_at_are_counted() -> None:
    blocks = flexmasks.get_mask("causal").blocks(1024)
    assert (blocks.undecided, blocks.not_understood) == (8, ())
    blocks = flexmasks.get_mask(lambda b, h, q, kv: torch.sin(q * 1.0) + torch.cos(kv) > 0).blocks(256)
    assert (blocks.undecided, blocks.not_understood) == (4, ("sin", "cos"))
    blocks = flexmasks.get_mask(lambda b, h, q, kv: (torch.sin(q) > 2) & (kv <= q)).blocks(256)
    assert (blocks.undecided, blocks.not_understood) == (3, ("sin",))


def test_str() -> None:
    blocks = flexmasks.get_mask(lambda b, h, q, kv: (kv <= q) & (torch.sin(q) < 2)).blocks(1000, block_size=(128, 64))
    first, looked_at, unknown = str(blocks).split("\n")
    share = f"{sum(1000 - max(0, 128 * i + 127) // 64 * 64 - 64 for i in range(7)) * 128 / 1e6:.1%}"
    assert first == f"blocks of 128 x 64: 128, of which empty 56, partial 30, full 42; skipped: {share}"
    assert looked_at == "looked at element by element: 72"
    assert "ranges" in unknown
    assert unknown.endswith(": sin")
    assert str(Blocks(blocks.block_mask)) == first


def test_arguments_are_those_of_block_mask() -> None:
    mask = flexmasks.get_mask("padding", kv_lens=[5, 60]) & (lambda b, h, q, kv: q >= kv + h)
    sizes = {"batch": 2, "heads": 3, "device": "cpu", "block_size": (16, 32), "q_offset": torch.tensor([7, 0])}
    check_equal_block_masks(mask.blocks(50, 70, **sizes).block_mask, flexmasks.block_mask(mask, 50, 70, **sizes))
    assert mask.blocks(60, heads=2).block_mask.seq_lengths == (60, 60)


def _by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv + h


WRONG: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    ("causal", (0,), {}),
    ("causal", (3.0,), {}),
    ("causal", (True,), {}),
    ("causal", (8, -3), {}),
    ("causal", (8,), {"batch": 0}),
    ("causal", (8,), {"heads": "2"}),
    ("causal", (8,), {"device": "nowhere"}),
    ("causal", (8,), {"device": "meta"}),
    ("causal", (8,), {"block_size": 0}),
    ("causal", (8,), {"block_size": (1, 2, 3)}),
    ("causal", (8,), {"block_size": (16, 16.0)}),
    ("causal", (8,), {"q_offset": -1}),
    ("causal", (8,), {"q_offset": 1.5}),
    ("causal", (8,), {"q_offset": torch.tensor([0.5])}),
    ("causal", (8,), {"q_offset": torch.tensor([3, -1])}),
    ("causal", (8,), {"q_offset": torch.tensor([3, 1]), "batch": 3}),
    (flexmasks.get_mask("padding", kv_lens=[3, 4]), (8,), {"batch": 3}),
    (flexmasks.get_mask("padding", kv_lens=[3, 9]), (8,), {}),
    (_by_head, (8,), {}),
    (lambda b, h, q, kv: q if q > kv else kv, (8,), {}),
    (lambda b, h, q, kv: q - kv, (8,), {}),
    (lambda b, h, q, kv: torch.ones(3)[kv] > 0, (8,), {}),
]


@pytest.mark.parametrize(("mask", "lengths", "more"), WRONG)
def test_errors_are_those_of_block_mask(mask: Any, lengths: tuple[Any, ...], more: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as want:
        flexmasks.block_mask(mask, *lengths, **more)
    with pytest.raises((ValueError, TypeError)) as got:
        flexmasks.get_mask(mask).blocks(*lengths, **more)
    assert got.type is want.type
    assert str(got.value).startswith(("flexmasks.Mask.blocks: ", "flexmasks"))
    assert str(got.value).removeprefix("flexmasks.Mask.blocks") == str(want.value).removeprefix("flexmasks.block_mask")


# --- options of kernels ---


@dataclass
class _Like:
    """The attributes of a tensor that `flex.options` reads."""

    on_gpu: bool
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")


def _options(
    q_len: int,
    heads: int = 2,
    kv_heads: int = 2,
    cuda: bool = True,
    backend: str | None = None,
    size: int = 16,
    v_size: int | None = None,
    block_size: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    **given: Any,
) -> dict[str, Any]:
    q, k = (_Like(cuda, (1, n, q_len, size), dtype) for n in (heads, kv_heads))
    v = _Like(cuda, (1, kv_heads, q_len, size if v_size is None else v_size), dtype)
    before = dict(given)
    chosen = flex.options(q, k, v, backend, given, block_size)  # type: ignore[arg-type]
    assert given == before
    return chosen


def test_options_of_a_kernel() -> None:
    assert _options(129) == {"BACKEND": "TRITON"}
    assert _options(33, heads=8) == {"BACKEND": "TRITON"}  # rows of a group
    assert _options(32, heads=8) == _options(128) == _options(1) == {}
    assert _options(300, cuda=False) == {}
    assert _options(300, backend="FLASH", num_warps=4) == {"BACKEND": "FLASH", "num_warps": 4}
    # Options that the user gives come first.
    assert _options(300, ROWS_GUARANTEED_SAFE=False, BLOCK_M=64) == {SAFE: False, "BLOCK_M": 64, "BACKEND": "TRITON"}
    assert _options(300, BACKEND="TRITON_DECODE") == {"BACKEND": "TRITON_DECODE"}
    assert _options(300, FORCE_USE_FLEX_ATTENTION=True) == {"FORCE_USE_FLEX_ATTENTION": True}
    # Where 128 divides lengths, but blocks do not, torch's kernels would read past the end.
    for length in (64, 1152):
        assert _options(length, block_size=(128, 256))["IS_DIVISIBLE"] is False
    assert "IS_DIVISIBLE" not in _options(1024, block_size=(256, 256))
    assert _options(1152, block_size=(256, 256), IS_DIVISIBLE=True)["IS_DIVISIBLE"] is True


@pytest.mark.parametrize("queries", [128, 300, 1024, 1025])
@pytest.mark.parametrize("keys", [128, 300, 1024])
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("is_given", [False, True])
def test_lengths_of_whole_tiles(queries: int, keys: int, size: int, is_given: bool) -> None:
    """Options and blocks of the user, and kernels whose tiles torch chooses by other rules, are left as they are."""
    q, k = (torch.empty(1, 128, n, 128, device="meta") for n in (queries, keys))
    mask = types.SimpleNamespace(is_given=is_given, block_size=(size, 128))
    call: Any = types.SimpleNamespace(q=q, k=k, kernel_options=None, mask=mask, needs_grad=True, learns=False)
    call.context = types.SimpleNamespace(is_invariant=False)
    other = "padded" if queries >= 1024 and not is_given else ""
    whole = queries in (128, 1024) and keys in (128, 1024) and queries % size == 0
    assert flex._lengths(call, {"BACKEND": "TRITON"}) == ("whole" if whole else other)
    assert not flex._lengths(call, {})
    assert not flex._lengths(call, {"BACKEND": "FLASH"})
    call.needs_grad = False
    assert flex._lengths(call, {"BACKEND": "TRITON"}) == ("whole" if whole else "")
    call.needs_grad, call.learns = True, True
    assert flex._lengths(call, {"BACKEND": "TRITON"}) == ("whole" if whole else "")
    call.learns, call.q, call.k = False, q[:, :64], k[:, :64]
    assert flex._lengths(call, {"BACKEND": "TRITON"}) == ("whole" if whole else "")
    call.kernel_options = {"BLOCK_M": 256}
    assert not flex._lengths(call, {"BACKEND": "TRITON", "BLOCK_M": 256})


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_tiles_of_a_kernel(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu_of(monkeypatch, capability, 1 << 20)
    plain = {"BACKEND": "TRITON"}

    def chosen(**given: Any) -> dict[str, int]:
        options = _options(300, **given)
        assert plain.items() <= options.items()
        return {name: value for name, value in options.items() if name not in (*plain, "IS_DIVISIBLE")}

    for size in (64, 96, 128, 160, 256):
        assert bool(chosen(size=size, block_size=(256, 128))) == (capability == (9, 0))
    for size in (32, 64, 96, 128, 256):
        assert bool(chosen(size=size, dtype=torch.float32)) == (capability == (9, 0))
    others: list[dict[str, Any]] = [{"v_size": 128}, {"dtype": torch.float64}, {"block_size": (128, 32)}]
    for other in others:
        assert not chosen(**({"size": 64} | other))
    assert bool(chosen(size=64, v_size=300)) == (capability == (9, 0))
    assert _options(300, size=64, num_warps=8) == {**plain, "num_warps": 8}  # the user's options alone
    assert _options(300, size=64, backend="FLASH") == {"BACKEND": "FLASH"}
    assert _options(300, size=64, cuda=False) == {}
    of_few = _options(1, size=64)  # torch's decoding kernel has tiles of its own, but not its backward pass
    assert bool(of_few) == (capability == (9, 0))
    assert all(name.startswith("bwd_") for name in of_few)


@pytest.mark.parametrize(
    ("memory", "half_from", "float32_from"), [(101_376, 1, 1), (166_912, 129, 65), (232_448, 257, 129)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_that_fit(
    memory: int, half_from: int, float32_from: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little shared memory, each head size has tiles where torch's own may not fit, and they divide the blocks."""
    on_gpu_of(monkeypatch, (8, 6), memory)
    least = half_from if dtype == torch.bfloat16 else float32_from
    for size in range(8, 513, 8):
        tiles = _options(300, size=size, dtype=dtype, block_size=(128, 64))
        assert ("fwd_BLOCK_M" in tiles) == ("bwd_BLOCK_M1" in tiles) == (size >= least)
        assert bool(_options(1, size=size, dtype=dtype)) == (size >= least)
        assert _options(300, size=size, v_size=8, dtype=dtype, block_size=(128, 64)) == tiles


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_tiles_fit_in_blocks(dtype: torch.dtype, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The divisions are those that torch's kernels assert."""
    on_gpu_of(monkeypatch, (9, 0))
    monkeypatch.setattr(kernel_tiles, "float32_is_exact", lambda: precision == "highest")
    for size in range(8, 513, 8):
        tiles = _options(300, size=size, dtype=dtype)
        for name in ("fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"):
            assert 128 % tiles.get(name, 128) == 0
        if "bwd_BLOCK_M1" in tiles:
            assert tiles["bwd_BLOCK_N1"] % tiles["bwd_BLOCK_M1"] == 0
            assert tiles["bwd_BLOCK_M2"] % tiles["bwd_BLOCK_N2"] == 0


@pytest.mark.parametrize("size", [64, 96, 160])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_inside_compile(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch.compile traces the choice."""
    on_gpu_of(monkeypatch, (9, 0))

    def chosen(q: Tensor) -> Tensor:
        tiles = kernel_tiles.chosen_tiles(q, q, (128, 128))
        return q + tiles.get("fwd_BLOCK_M", 0) + 1000 * tiles.get("bwd_BLOCK_N1", 0)

    q = torch.zeros(1, 1, 2, size, dtype=dtype)
    assert torch.equal(torch.compile(chosen, fullgraph=True, backend="eager")(q), chosen(q))
    assert bool(chosen(q).any())


def test_precision_of_float32() -> None:
    """The rule is that of torch's own kernels, which imports Inductor and is read from there."""
    from torch._inductor.kernel.flex import flex_attention

    of_torch: Any = flex_attention

    def is_exact() -> bool:
        if hasattr(of_torch, "get_float32_precision"):  # up to torch 2.14
            return bool(of_torch.get_float32_precision() == "'ieee'")
        options: dict[str, str] = {}
        of_torch.set_float32_precision(options, torch.float32)
        return options["FLOAT32_PRECISION"] == "'ieee'"

    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert kernel_tiles.float32_is_exact() == (precision == "highest")
            assert kernel_tiles.float32_is_exact() == is_exact()
    finally:
        torch.set_float32_matmul_precision(before)


GPU_CASES: list[tuple[str, dict[str, Any]]] = [
    ("causal", {}),
    ("full", {}),
    ("sliding_window", {"window": 300}),
    ("sliding_window", {"window": 20}),
    ("prefix_lm", {"prefix_len": 200}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "params"), GPU_CASES)
@pytest.mark.parametrize("length", [300, 1024])
def test_attention_with_proven_options(name: str, params: dict[str, Any], length: int) -> None:
    """An option that does not hold makes results wrong, forward or backward."""
    leaves = [torch.randn(2, 2, length, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)]
    proven = flexmasks.get_mask(name, **params).blocks(length).kernel_options
    assert (SAFE in proven) == (name != "sliding_window" or params["window"] >= length)
    out = flexmasks.attention(*leaves, mask=name, backend="flex", kernel_options=proven, **params)
    weight = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, leaves, weight)]
    others = [x.detach().double().requires_grad_() for x in leaves]
    want = flexmasks.attention(*others, mask=name, backend="reference", **params)
    tolerance = TOLERANCE[torch.float16]
    assert error(got[0], want.cpu()) < tolerance
    for mine, theirs in zip(got[1:], torch.autograd.grad(want, others, weight.double()), strict=True):
        assert error(mine, theirs.cpu()) < 2 * tolerance


def test_lists_of_less_than_all_key_blocks() -> None:
    ones, first = torch.ones(1, 1, 4, dtype=torch.int32), torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1)
    made = BlockMask.from_kv_blocks(
        ones,
        first,
        BLOCK_SIZE=128,
        mask_mod=lambda b, h, q, kv: kv <= q,
        seq_lengths=(512, 512),
        compute_q_blocks=False,
    )
    assert (Blocks(made).total, Blocks(made).empty) == (16, 12)
    q = torch.randn(1, 1, 512, 16)
    if compat.TAKES_NARROW_LISTS:
        expected = flexmasks.attention(q, q, q, mask=lambda b, h, q, kv: (kv <= q) & (kv // 128 == q // 128))
        out = flexmasks.attention(q, q, q, block_mask=made)
        assert error(out, expected) < TOLERANCE[torch.float32]
    else:
        with pytest.raises(ValueError, match="must list all 4 key blocks in each row"):
            flexmasks.attention(q, q, q, block_mask=made)
