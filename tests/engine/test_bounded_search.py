"""Tests of bounded searches for blocks: what they know is right, and what they look at is bounded."""

import itertools
import math
import re
import sys
import threading

import pytest
import torch
from helpers import one_in
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from flexmasks.blocks import limits, undecided
from flexmasks.blocks.limits import Work

_BLOCK = 16


def _functions(length):
    """Masks of kinds that ranges decide, decide in part, and do not decide."""
    torch.manual_seed(length)
    runs = torch.arange(length).repeat_interleave(torch.randint(1, 90, (length,)))[:length]
    shuffled, noise = torch.randperm(length)[runs], torch.rand(length)
    table = torch.rand(-(-length // _BLOCK), -(-length // _BLOCK)) < 0.5
    return {
        "runs": lambda b, h, q, kv: (runs[q] == runs[kv]) & (q >= kv),
        "shuffled runs": lambda b, h, q, kv: (shuffled[q] == shuffled[kv]) & (q >= kv),
        "runs again": lambda b, h, q, kv: runs[q] % 5 == runs[kv] % 5,
        "other runs": lambda b, h, q, kv: shuffled[q] != runs[kv],
        "distances": lambda b, h, q, kv: (q - kv) % 7 == 0,
        "rare distances": lambda b, h, q, kv: (q * 31 + kv * 17) % 1009 == 5,
        "noise": lambda b, h, q, kv: noise[q] > noise[kv],
        "table": lambda b, h, q, kv: table[q // _BLOCK, kv // _BLOCK],
        "heads": lambda b, h, q, kv: (shuffled[q] + h) % 3 == shuffled[kv] % 3,
        "not understood": lambda b, h, q, kv: torch.sin(q * 0.3 + kv).round() > 0,
    }


NAMES = list(_functions(8))
LENGTHS = [(64, 64), (500, 333), (333, 500)]


def _expected(function, q_len, kv_len, heads):
    """The kinds of blocks, "empty", "partial" or "full", from the mask of torch: of each head, row and column."""
    visible = create_mask(function, 1, heads, q_len, kv_len, device="cpu")[0]
    kinds = []
    for of_head in visible:
        for row in of_head.split(_BLOCK):
            for block in row.split(_BLOCK, dim=1):
                is_whole = block.shape == (_BLOCK, _BLOCK)
                kinds.append("empty" if not block.any() else "full" if block.all() and is_whole else "partial")
    return kinds, float(visible.double().mean())


def _blocks(name, q_len, kv_len, exact=False):
    heads = 3 if name == "heads" else 1
    function = _functions(max(q_len, kv_len))[name]
    blocks = flexmasks.get_mask(function).blocks(q_len, kv_len, heads=heads, block_size=_BLOCK, q_offset=0, exact=exact)
    return blocks, _expected(function, q_len, kv_len, heads)


@pytest.fixture
def bounded(monkeypatch):
    """Bounds searches of all lengths, and lets them look at many blocks at once although these are few."""
    monkeypatch.setattr(limits, "PAIRS_WITHOUT_LIMIT", 0)
    monkeypatch.setattr(limits, "BLOCKS_ON_CPU", 0)
    monkeypatch.setattr(limits, "BLOCKS_AT_ONCE_ON_CPU", 64)
    flexmasks.clear_caches()
    yield monkeypatch
    flexmasks.clear_caches()


@pytest.mark.parametrize(("name", "lengths"), one_in(2, list(itertools.product(NAMES, LENGTHS))))
@pytest.mark.parametrize("limit", [1, 300_000, 3_000_000, 30_000_000])
@pytest.mark.parametrize("of_deciding", [1, 1 << 40], ids=["groups", "blocks"])
def test_counts_are_bounds_of_the_exact_ones(bounded, name, lengths, limit, of_deciding):
    bounded.setattr(limits, "WORK", limit)
    bounded.setattr(limits, "WORK_OF_DECIDING", of_deciding)
    blocks, (kinds, visible) = _blocks(name, *lengths)
    assert 0 <= kinds.count("empty") - blocks.empty <= blocks.unknown
    assert 0 <= blocks.partial - kinds.count("partial") <= blocks.unknown
    assert 0 <= kinds.count("full") - blocks.full <= blocks.unknown
    empty, _, full = blocks.shares
    assert full - 1e-9 <= visible <= 1 - empty + 1e-9
    exact, _ = _blocks(name, *lengths, exact=True)
    assert blocks.sparsity <= exact.sparsity + 1e-9
    for text in (str(blocks), repr(blocks)):
        assert bool(blocks.unknown) == ("at least" in text) == ("at most" in text)
    assert bool(blocks.unknown) == ("unknown: " in str(blocks))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_exact_blocks_after_bounds(bounded, name, lengths):
    bounded.setattr(limits, "WORK", 1)
    bounded.setattr(limits, "WORK_OF_DECIDING", 1)
    _blocks(name, *lengths)
    blocks, (kinds, _) = _blocks(name, *lengths, exact=True)
    assert (blocks.empty, blocks.partial, blocks.full) == tuple(map(kinds.count, ("empty", "partial", "full")))
    assert blocks.unknown == 0


@pytest.mark.slow
def test_attention_with_unknown_blocks_is_exact(bounded):
    bounded.setattr(limits, "WORK", 1)
    ids = torch.randperm(300)[torch.arange(300) // 7]
    q, k, v = torch.randn(3, 1, 2, 300, 16)
    function = lambda b, h, q, kv: (ids[q] == ids[kv]) | (q == kv + h)  # noqa: E731
    assert flexmasks.explain(q, k, v, mask=function).blocks.unknown > 0
    visible = create_mask(function, 1, 2, 300, 300, device="cpu")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    for backend in ("flex", "reference"):
        torch.testing.assert_close(flexmasks.attention(q, k, v, mask=function, backend=backend), expected)


def test_short_searches_are_exact():
    assert Work.bounded(65_536 * 65_536).limit == math.inf
    assert Work.bounded(65_537 * 65_536).limit == limits.WORK


@pytest.mark.parametrize("name", ["runs", "shuffled runs", "runs again", "distances", "noise"])
def test_work_over_many_tokens_is_bounded(bounded, name):
    # A bound of 2 million numbers for 1,048,576 blocks: a look at one element of each would take more.
    made = []
    init = Work.__init__
    bounded.setattr(limits, "WORK", 2_000_000)
    bounded.setattr(limits, "BLOCKS_AT_ONCE_ON_CPU", 1 << 16)
    bounded.setattr(Work, "__init__", lambda self, *more: (made.append(self), init(self, *more))[1])
    length = 131_072
    blocks = flexmasks.get_mask(_functions(length)[name]).blocks(length)
    assert sum(work.done for work in made) < 40_000_000
    assert blocks.total == 1024**2


@pytest.mark.slow
def test_runs_of_ids_over_a_million_tokens_are_exact(monkeypatch):
    # Where documents meet in blocks, their ids overlap those of most other blocks; 2**26 of 2**26 blocks are decided.
    length = 1 << 20
    torch.manual_seed(0)
    lengths = torch.randint(1, 4000, (1000,))
    ids = torch.randperm(1000).repeat_interleave(lengths)[:length]
    assert len(ids) == length
    blocks = flexmasks.get_mask(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)).blocks(length)
    assert blocks.unknown == 0
    assert blocks.undecided < 30_000
    starts = [0, *(torch.nonzero(ids[1:] != ids[:-1])[:, 0] + 1).tolist(), length]
    computed = set()
    for first, end in itertools.pairwise(starts):
        rows = range(first // 128, (end - 1) // 128 + 1)
        computed |= {(row, column) for row in rows for column in range(first // 128, row + 1)}
    assert blocks.empty == blocks.total - len(computed)


@pytest.mark.parametrize("draw", [lambda m, n: str(flexmasks.draw(m, n)), lambda m, n: flexmasks.draw(m, n).svg()])
def test_pictures_show_unknown_blocks_as_partial(bounded, draw):
    bounded.setattr(limits, "WORK", 1)
    text = draw(flexmasks.get_mask(lambda b, h, q, kv: (q * 31 + kv * 17) % 1009 == 5), 2048)
    assert re.search(r"unknown: [\d,]+ blocks, shown and counted as partial", text)


def _hard():
    return flexmasks.get_mask(lambda b, h, q, kv: (q * 31 + kv * 17) % 1009 == 5)


def test_a_long_exact_search_says_how_far_it_is(bounded, capsys):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    threads = threading.enumerate()
    bounded.setattr(limits, "_SILENT_SECONDS", 0.0)
    bounded.setattr(limits, "ELEMENTS_AT_ONCE_ON_CPU", 1 << 10)
    _hard().blocks(1024, exact=True)
    assert re.search(r"flexmasks: looking at undecided blocks: .*block", capsys.readouterr().err)
    assert threading.enumerate() == threads
    flexmasks.clear_caches()
    _hard().blocks(1024)
    bounded.undo()
    flexmasks.clear_caches()
    _hard().blocks(1024, exact=True)  # takes less than two seconds
    assert capsys.readouterr().err == ""


def test_without_tqdm_a_long_search_is_silent(bounded, capsys):
    bounded.setitem(sys.modules, "tqdm", None)
    bounded.setattr(limits, "_SILENT_SECONDS", 0.0)
    assert _hard().blocks(1024, exact=True).unknown == 0
    assert capsys.readouterr().err == ""


def test_a_search_can_be_interrupted(bounded):
    def interrupt(elements, *more):
        raise KeyboardInterrupt

    with bounded.context() as patch:
        patch.setattr(undecided._Looks, "at_samples", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _hard().blocks(1024, exact=True)
    assert _hard().blocks(1024, exact=True).unknown == 0
