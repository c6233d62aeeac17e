"""Sequences over several ranks, without any rank: balanced orders, keys that are seen, and plans on paper."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from functions import short_and_campaign
from helpers import arguments, label, one_in, peak_memory, try_examples
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing._internal.distributed.fake_pg import FakeStore

import flexmasks
import sequence_on_paper
from flexmasks.blocks import limits, strips, visible_in_strips
from flexmasks.extend import PartOfCall
from flexmasks.integrations.distributed import Order, balance, computed_blocks, seen_by
from flexmasks.integrations.distributed import counts as counts_module
from flexmasks.integrations.distributed.attention import _Call, _wanted
from flexmasks.spec.definitions import definition
from sequence_on_paper import plan

pytestmark = pytest.mark.usefixtures("one_thread")
EVEN = 1.02
SELF_ATTENTION = [c for c in oracles.MASK_CASES if c.q_len == c.kv_len and c.q_offset == 0]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def documents(length: int) -> Tensor:
    """Return ids of documents that are longer and longer."""
    return torch.arange(length).double().sqrt().long() // 6


def many(length: int) -> dict[str, tuple[Any, MaskMod]]:
    """Return masks of the library, and the same as plain functions."""
    ids = documents(length)
    prefix = length // 3
    return {
        "causal": ("causal", lambda b, h, q, kv: q >= kv),
        "full": ("full", lambda b, h, q, kv: q >= 0),
        "window": (
            flexmasks.get_mask("sliding_window", window=length // 64),
            lambda b, h, q, kv: (q >= kv) & (q - kv <= length // 64),
        ),
        "documents": (flexmasks.get_mask("document", document_ids=ids), lambda b, h, q, kv: ids[q] == ids[kv]),
        "packed": (
            flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids),
            lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv),
        ),
        "prefix_lm": (
            flexmasks.get_mask("prefix_lm", prefix_len=prefix),
            lambda b, h, q, kv: (kv < prefix) | (q >= kv),
        ),
        "function": (
            lambda b, h, q, kv: (q >= kv) & (kv % 512 < 200),
            lambda b, h, q, kv: (q >= kv) & (kv % 512 < 200),
        ),
    }


def blocks_of_rows(
    mask_mod: MaskMod, rows: tuple[int, int], length: int, block_size: int, batch: int = 1, heads: int = 1
) -> Tensor:
    """Return the computed blocks of some queries as torch counts them: [B, H, rows of blocks]."""
    start, stop = rows
    made = create_block_mask(
        lambda b, h, q, kv: mask_mod(b, h, q + start, kv), batch, heads, stop - start, length, "cpu", block_size
    )
    assert made.full_kv_num_blocks is not None
    return made.kv_num_blocks + made.full_kv_num_blocks


def blocks_of_ranks(mask_mod: MaskMod, order: Order, block_size: int) -> Tensor:
    """Return the number of blocks of each rank, as torch counts them."""
    return torch.tensor(
        [
            sum(int(blocks_of_rows(mask_mod, part, order.length, block_size).sum()) for part in own)
            for own in order.parts
        ]
    )


def unevenness(blocks: Tensor) -> float:
    return float(blocks.max() / blocks.double().mean())


# --- orders ---


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("length", [4096, 65536])
def test_causal_becomes_head_and_tail(length: int, ranks: int) -> None:
    size = length // ranks // 2
    pieces = [(n * size, (n + 1) * size) for n in range(2 * ranks)]
    order = balance("causal", length, ranks)
    middle = ((pieces[ranks - 1][0], pieces[ranks][1]),)
    assert order.parts == (*((pieces[r], pieces[2 * ranks - 1 - r]) for r in range(ranks - 1)), middle)
    assert not order.is_natural
    assert set(order.sizes) == {length // ranks}


@pytest.mark.parametrize("name", ["full", "window", "natten"])
def test_even_masks_keep_the_order_of_the_sequence(name: str) -> None:
    length = 16384
    masks = {n: mask for n, (mask, _) in many(length).items()}
    masks["natten"] = flexmasks.get_mask("natten", height=128, width=128, kernel=7)
    for ranks in (1, 3, 4):
        order = balance(masks[name], length, ranks)
        assert order == Order.natural(length, ranks)
        assert order.is_natural


@pytest.mark.parametrize("name", many(64))
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_every_rank_computes_the_same_number_of_blocks(name: str, ranks: int) -> None:
    length, block_size = 256 * ranks, 8
    mask, mask_mod = many(length)[name]
    order = balance(mask, length, ranks, block_size=block_size)
    assert unevenness(blocks_of_ranks(mask_mod, order, block_size)) <= EVEN
    assert set(order.sizes) == {256}
    # A smaller number of parts would not do: the next one is the order of the sequence if there are two parts.
    if not order.is_natural and max(map(len, order.parts)) <= 2:
        natural = blocks_of_ranks(mask_mod, Order.natural(length, ranks), block_size)
        assert unevenness(natural) > EVEN


def test_masks_are_summed_as_often_as_they_occur() -> None:
    length, ranks, block_size = 1024, 4, 8
    masks = many(length)
    names = ["packed", "documents", "documents", "prefix_lm"]
    order = balance([masks[n][0] for n in names], length, ranks, block_size=block_size)
    total = sum(blocks_of_ranks(masks[n][1], order, block_size) for n in names)
    assert unevenness(total) <= EVEN
    # A rising and a falling mask together are even; each alone is not.
    falling = flexmasks.get_mask(lambda b, h, q, kv: q <= kv)
    assert balance(["causal", falling], length, ranks, block_size=block_size).is_natural
    assert not balance(["causal", "causal", falling], length, ranks, block_size=block_size).is_natural


def test_a_mask_of_batch_elements_and_heads_is_summed_over_them() -> None:
    length = 1024
    ids = torch.stack([documents(length), documents(length).flip(0).max() - documents(length).flip(0)])
    mask = flexmasks.get_mask("document", document_ids=ids)
    first = flexmasks.get_mask("document", document_ids=ids[:1])
    assert not balance(first, length, 4, block_size=8).is_natural
    order = balance([mask, "causal"], length, 4, block_size=8)
    of_documents = blocks_of_rows(lambda b, h, q, kv: ids[b, q] == ids[b, kv], (0, length), length, 8, batch=2)
    rows = of_documents.sum((0, 1)) + 2 * torch.arange(1, 129)  # causal counts for both batch elements
    blocks = torch.tensor([sum(int(rows[a // 8 : b // 8].sum()) for a, b in own) for own in order.parts])
    assert unevenness(blocks) <= EVEN
    by_head = flexmasks.get_mask(lambda b, h, q, kv: torch.where(h == 0, q >= kv, q <= kv))
    assert balance(by_head, length, 4, block_size=8, heads=2).is_natural


def test_lengths_that_ranks_do_not_divide() -> None:
    order = balance("causal", 10_007, 3)
    assert sorted(order.sizes) == [3335, 3336, 3336]
    assert not order.is_natural
    assert unevenness(blocks_of_ranks(lambda b, h, q, kv: q >= kv, order, 128)) < 1.05  # cuts are not at whole blocks
    assert balance("causal", 3, 8).sizes == (1, 1, 1, 0, 0, 0, 0, 0)
    assert balance("causal", 1, 1).parts == (((0, 1),),)
    # The ranks divide the length: all get the same number of tokens, though pieces are not equal.
    assert set(balance("causal", 10_008, 3).sizes) == {3336}


@short_and_campaign(60, 1000)
def test_parts_hold_each_token_once(examples: int) -> None:
    def check(length: int, ranks: int, block_size: int, name: str) -> None:
        order = balance(many(length)[name][0], length, ranks, block_size=block_size)
        assert sorted(order.tokens().tolist()) == list(range(length))
        assert [len(x) for x in order.tokens().split(list(order.sizes))] == list(order.sizes)
        assert (order.length, order.ranks) == (length, ranks)
        chunks = [len(x) for x in torch.arange(length).chunk(ranks)]
        if order.is_natural:
            assert list(order.sizes) == chunks + [0] * (ranks - len(chunks))
        else:
            assert max(order.sizes) - min(order.sizes) <= (length % ranks > 0)
        for own in order.parts:
            assert all(a < b for a, b in own)
            assert all(left[1] < right[0] for left, right in itertools.pairwise(own))

    sizes = st.integers(64, 700), st.integers(1, 9), st.sampled_from([1, 4, 16, 128]), st.sampled_from(list(many(64)))
    try_examples(examples, check, *sizes)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_divided_order_has_the_tokens_of_each_rank(count: int) -> None:
    order = Order(40, (((0, 3), (30, 40)), (), ((3, 10), (12, 13), (20, 30)), ((10, 12), (13, 20))))
    divided = order.divided(count)
    assert divided.tokens().tolist() == order.tokens().tolist()
    for rank, size in enumerate(order.sizes):
        shares = divided.sizes[rank * count : (rank + 1) * count]
        assert sum(shares) == size
        assert max(shares) - min(shares) <= 1


def test_an_order_sorts_and_joins_its_parts() -> None:
    order = Order(8, (((6, 8), (0, 2), (2, 3)), (), ((3, 6),)))
    assert order.parts == (((0, 3), (6, 8)), (), ((3, 6),))
    assert order.tokens().tolist() == [0, 1, 2, 6, 7, 3, 4, 5]
    assert order.tokens().dtype == torch.int64
    assert hash(order) == hash(Order(8, order.parts))
    x = torch.randn(8)
    assert torch.equal(torch.cat([x[a:b] for own in order.parts for a, b in own]), x[order.tokens()])


def test_a_mesh_gives_the_number_of_ranks() -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh: DeviceMesh = init_device_mesh("cpu", (4,))
        assert balance("causal", 1024, mesh) == balance("causal", 1024, 4)
        assert balance("causal", 1024, init_device_mesh("cpu", (2, 2))) == balance("causal", 1024, 2).divided(2)
        with pytest.raises(ValueError, match=r"distributed\.balance: `mesh` must not have 3 dimensions here"):
            balance("causal", 1024, init_device_mesh("cpu", (2, 2, 1)))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_million_tokens_take_seconds_and_little_memory() -> None:
    before = peak_memory()
    assert max(map(len, balance("causal", 1 << 20, 64).parts)) == 2
    assert balance(flexmasks.get_mask("sliding_window", window=4096), 1 << 20, 64).is_natural
    assert peak_memory() - before < 1 << 29


# --- blocks and keys ---


@pytest.mark.parametrize(
    ("case", "size"), one_in(8, list(itertools.product(SELF_ATTENTION, [40, strips._VISIBLE_OF_STRIP]))), ids=label
)
def test_registered_masks(case: oracles.Case, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """size: how many blocks a strip has."""
    monkeypatch.setattr(strips, "_VISIBLE_OF_STRIP", size)
    given = arguments(case)
    given.pop("q_offset")
    mask, length, block_size = flexmasks.get_mask(case.name, **given), case.q_len, 8
    sizes = {"batch": case.batch, "heads": case.heads, "block_size": block_size}
    dense = oracles.dense(case)
    columns = torch.nn.functional.pad(dense, (0, -length % 8, 0, -length % 8)).unflatten(3, (-1, 8)).any(4)
    want = columns.unflatten(2, (-1, 8)).any(3).sum((0, 1, 3))
    assert torch.equal(computed_blocks(mask, length, **sizes), want)
    for rows in ((0, length), (length // 3, length // 2), (8 * (length // 16), length), (length - 1, length)):
        seen = torch.zeros(length, dtype=torch.bool)
        ranges = seen_by(mask, rows, length, **sizes)
        for start, stop in ranges:
            seen[start:stop] = True
        assert list(ranges) == sorted(ranges)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(ranges))
        needed = dense[:, :, slice(*rows)].flatten(0, 2).any(0)
        whole = columns[:, :, slice(*rows)].flatten(0, 2).any(0).repeat_interleave(8)[:length]
        assert torch.equal(seen, needed) or torch.equal(seen, whole)


def test_many_runs_of_undecided_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "_VISIBLE_OF_STRIP", 200)
    for runs in (1, 2, 100):
        monkeypatch.setattr(strips, "_MAX_RUNS", runs)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return ((kv // 7) % 5 == 0) & (q + h * 100 >= kv) | (kv // 90 == q // 90)

        got = [
            (first, visible)
            for first, visible in visible_in_strips(mask_mod, 3, 2, (37, 253), 257, (4, 8), torch.device("cpu"))
        ]
        assert [first for first, _ in got] == list(range(37, 253, 4 * got[0][1].shape[2]))
        visible = torch.cat([x for _, x in got], 2)
        mask = flexmasks.dense_mask(flexmasks.get_mask(mask_mod), 216, 257, q_offset=37, heads=2)
        want = torch.nn.functional.pad(mask, (0, 7)).unflatten(3, (-1, 8)).unflatten(2, (-1, 4)).any(5).any(3)
        assert torch.equal(visible, want)


def test_a_window_needs_the_neighbors_keys_only() -> None:
    mask = flexmasks.get_mask("sliding_window", window=100)
    assert seen_by(mask, (1000, 2000), 65536) == ((900, 2000),)
    assert seen_by(mask, (0, 10), 65536) == ((0, 10),)
    assert seen_by("full", (0, 10), 65536) == ((0, 65536),)
    assert seen_by(mask, (5, 5), 65536) == ()
    sinks = flexmasks.get_mask("sink_window", window=100, sinks=4)
    assert seen_by(sinks, (1024, 2048), 65536) == ((0, 128), (896, 2048))


def test_keys_that_calls_want_are_not_those_of_calls_of_other_sizes() -> None:
    """Other batch sizes, heads, parts and masks, in two orders: no call may take what another one has found."""
    masks = [
        flexmasks.get_mask(lambda b, h, q, kv: (q - kv).abs() <= 100 << (2 * (b + h))),
        flexmasks.get_mask("sliding_window", window=50),
    ]
    divided = [(((0, 1024),), ((1024, 2048),)), (((0, 1536),), ((1536, 2048),))]
    cases = list(itertools.product(masks, divided, (1, 2), (1, 3)))
    for mask, parts, batch, heads in (*cases, *cases[::-1]):
        place = PartOfCall(batch, heads)
        call = _Call(None, place, mask, None, None, "auto", None, False, None, parts)  # type: ignore[arg-type] # no mesh
        want = tuple(seen_by(mask, rows, 2048, batch=batch, heads=heads) for ((*rows,),) in parts)
        assert _wanted(call) == want


def test_counts_of_random_parts() -> None:
    """Blocks start where a part starts, wherever that is; a rank sees the keys of its own parts' blocks."""

    def check(length: int, ranks: int, cuts: list[int], owners: list[int], name: str, block_size: int) -> None:
        ends = sorted({0, length, *(cut % length for cut in cuts)})
        parts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for piece, owner in zip(itertools.pairwise(ends), owners, strict=False):
            parts[owner % ranks].append(piece)
        order = Order(length, [counts_module.merged(own) for own in parts])
        mask, mask_mod = many(length)[name]
        counted = counts_module.CountedMask("plan", mask, length, block_size, None, None)
        blocks, seen = counted.of_parts(order.parts)
        assert blocks.flatten().tolist() == blocks_of_ranks(mask_mod, order, block_size).tolist()
        for own, found in zip(order.parts, seen, strict=True):
            rows = torch.cat([torch.arange(*part) for part in own]) if own else torch.arange(0)
            dense = mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], torch.arange(length))
            needed = set(dense.any(0).nonzero()[:, 0].tolist())
            listed = {n for start, stop in found for n in range(start, stop)}
            assert needed <= listed
            if name not in ("causal", "full", "window"):  # whole blocks of keys
                assert listed <= {n for key in needed for n in range(length) if n // block_size == key // block_size}

    try_examples(
        100, check, st.integers(1, 300), st.integers(1, 8), st.lists(st.integers(1, 300), max_size=12),
        st.lists(st.integers(0, 7), min_size=13, max_size=13), st.sampled_from([*many(8)]),
        st.sampled_from([4, 16, 128]),
    )  # fmt: skip


# --- plans on paper ---


def received_by_exchange(order: Order, group: int, q_heads: int, kv_heads: int) -> tuple[list[int], list[int]]:
    """Return how many (token, head) each rank receives, by sets of what it has and needs, forward and backward."""
    held = [{t for a, b in own for t in range(a, b)} for own in order.parts]
    forward, backward = [], []
    for rank, own in enumerate(held):
        first, member = rank - rank % group, rank % group
        neighbors = set().union(*held[first : first + group])
        of_q, of_kv = (range(member * heads // group, (member + 1) * heads // group) for heads in (q_heads, kv_heads))
        q_mine = {(t, h) for t in own for h in range(q_heads)}
        kv_mine = {(t, h) for t in own for h in range(kv_heads)}
        q_after = {(t, h) for t in neighbors for h in of_q}
        kv_after = {(t, h) for t in range(order.length) for h in of_kv}
        kv_of_group = {(t, h) for t in neighbors for h in of_kv}
        forward.append(len(q_after - q_mine) + 2 * len(kv_after - kv_mine) + len(q_mine - q_after))
        others = order.ranks // group - 1  # groups that send gradients of this rank's part of keys and values
        gradients = len(q_mine - q_after) + 2 * len(kv_mine - kv_of_group) + 2 * others * len(kv_of_group)
        backward.append(len(q_after - q_mine) + gradients)
    return forward, backward


ORDERS = {
    "natural": Order.natural(96, 4),
    "two ranks": Order.natural(96, 2),
    "head and tail": balance("causal", 96, 4, block_size=4),
    "uneven": Order(96, (((0, 8), (88, 96)), ((8, 40),), (), ((40, 88),))),
    "inside blocks": Order.natural(93, 4),
    "eight ranks": Order.natural(93, 8),
    "eight, head and tail": balance("causal", 96, 8, block_size=4),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_bytes_of_heads_and_gather(name: str, kv_heads: int) -> None:
    order, q_heads, head_size = ORDERS[name], 4, 16
    group = math.gcd(kv_heads, order.ranks)
    paper = plan(
        ["causal", "causal", "full"], order.length, order.ranks, order=order, q_heads=q_heads, kv_heads=kv_heads,
        head_size=head_size, dtype_bytes=4, block_size=4, batch=3,
    )  # fmt: skip
    ways = {"gather": 1, "heads": order.ranks, f"heads {group} x gather {order.ranks // group}": group}
    if group in (1, order.ranks):
        ways.popitem()
    assert {way.name for way in paper.ways} == {*ways, "heads", "seen"}
    for way, size in ways.items():
        figures = paper.way(way)
        if size == order.ranks and kv_heads % order.ranks:
            assert figures.refusal == f"{order.ranks} ranks do not divide {kv_heads} key heads"
            continue
        for got, want in zip(
            (figures.received, figures.received_in_backward),
            received_by_exchange(order, size, q_heads, kv_heads),
            strict=True,
        ):
            unit = 3 * 3 * head_size * 4  # masks, batch elements, numbers of a token's head, bytes
            assert (got.busiest, got.mean) == (max(want) * unit, sum(want) / order.ranks * unit)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("masks", [("causal",), ("window",), ("documents",), ("prefix_lm", "function", "prefix_lm")])
def test_bytes_and_blocks_of_what_is_seen(name: str, masks: tuple[str, ...]) -> None:
    order, block_size, kv_heads, head_size = ORDERS[name], 4, 2, 16
    length, ranks = order.length, order.ranks
    held = [{t for a, b in own for t in range(a, b)} for own in order.parts]
    received, sent_back, blocks = [0] * ranks, [0] * ranks, [0] * ranks
    for mask_name in masks:
        mask_mod = many(length)[mask_name][1]
        q, kv = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
        dense = mask_mod(torch.tensor(0), torch.tensor(0), q, kv)
        for rank, own in enumerate(held):
            keys = dense[sorted(own)].any(0).nonzero()[:, 0].tolist()
            if mask_name not in ("causal", "window"):  # windows are exact, other masks in whole blocks
                keys = [t for block in {t // 4 for t in keys} for t in range(4 * block, min(length, 4 * block + 4))]
            received[rank] += len(set(keys) - own)
            for owner in range(ranks):
                sent_back[owner] += len(set(keys) & held[owner]) * (owner != rank)
            parts = order.parts[rank]
            blocks[rank] += sum(int(blocks_of_rows(mask_mod, part, length, block_size).sum()) for part in parts)
    paper = plan(
        [many(length)[n][0] for n in masks], length, ranks, order=order, q_heads=8, kv_heads=kv_heads,
        head_size=head_size, block_size=block_size, bandwidth=1e6, flops=1e9,
    )  # fmt: skip
    seen, unit = paper.way("seen"), 2 * kv_heads * head_size * 2
    assert (seen.received.busiest, seen.received.mean) == (max(received) * unit, sum(received) / ranks * unit)
    assert seen.received_in_backward.busiest == max(sent_back) * unit
    assert (seen.blocks.busiest, seen.blocks.mean) == (max(blocks) * 8, sum(blocks) / ranks * 8)
    assert paper.way("gather").blocks == seen.blocks
    exchange, compute = max(received) * unit / 1e6, max(blocks) * 8 * 4 * head_size * 16 / 1e9
    both = exchange + max(sent_back) * unit / 1e6 + 3.5 * compute
    assert seen.seconds == (pytest.approx(exchange + compute), pytest.approx(both))
    if kv_heads % ranks == 0:
        assert paper.way("heads").blocks.busiest == sum(blocks) * 8 / ranks


def test_blocks_of_heads_that_see_different_keys() -> None:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv).abs() <= 4 * h

    length, heads = 128, 4
    of_heads = blocks_of_rows(mask_mod, (0, length), length, 8, heads=heads).sum((0, 2))
    paper = plan(mask_mod, length, 2, q_heads=heads, kv_heads=2, block_size=8)
    assert paper.way("heads").blocks.busiest == int(of_heads[2:].sum())
    assert paper.way("heads").blocks.mean == int(of_heads.sum()) / 2
    four = plan(mask_mod, length, 4, q_heads=heads, kv_heads=2, block_size=8)
    pairs = [
        blocks_of_rows(mask_mod, rows, length, 8, heads=heads)[0, part].sum()
        for rows in ((0, 64), (64, 128))
        for part in ([0, 1], [2, 3])
    ]
    assert four.way("heads 2 x gather 2").blocks.busiest == int(max(pairs))
    assert four.way("gather").blocks.mean == int(of_heads.sum()) / 4


def test_parts_inside_others_are_merged() -> None:
    merged = counts_module.merged
    assert merged([(0, 10), (2, 5), (10, 12)]) == ((0, 12),)
    assert merged([(20, 21), (4, 4), (0, 3)]) == ((0, 3), (20, 21))


def test_many_parts_that_are_cut_inside_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = plan("causal", 1003, 8, block_size=16, q_heads=1, kv_heads=1)
    monkeypatch.setattr(counts_module, "_MOST_SPANS", 4)
    rough = plan("causal", 1003, 8, block_size=16, q_heads=1, kv_heads=1)
    assert rough.way("seen").received == exact.way("seen").received
    rows = computed_blocks("causal", 1003, block_size=16)
    parts = [own[0] for own in Order.natural(1003, 8).parts]
    assert rough.way("seen").blocks.busiest == max(int(rows[a // 16 : -(-b // 16)].sum()) for a, b in parts)
    assert abs(rough.way("seen").blocks.mean / exact.way("seen").blocks.mean - 1) < 0.1


def test_balance_pays_in_a_plan() -> None:
    natural, balanced = (plan("causal", 65536, 8, order=order) for order in (None, "balanced"))
    assert balanced.order == balance("causal", 65536, 8)
    assert natural.way("gather").blocks.unevenness > 1.8
    assert balanced.way("gather").blocks.unevenness == 1
    assert balanced.way("gather").seconds[1] < natural.way("gather").seconds[1]
    assert natural.way("heads").blocks == balanced.way("heads").blocks
    assert natural.fastest.seconds[1] == min(way.seconds[1] for way in natural.ways)


@pytest.mark.slow
def test_a_thousand_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    paper = plan(flexmasks.get_mask("sliding_window", window=4096), 4194304, 1024)
    assert paper.fastest.name == "seen"
    assert paper.way("seen").received.busiest == 4096 * 2 * 8 * 128 * 2
    assert paper.way("gather").received.busiest == 1023 * 4096 * 2 * 8 * 128 * 2
    assert paper.order.parts[1] == ((4096, 8192),)
    text = str(paper)
    for part in ("1,024 ranks", "fastest: seen", "heads cannot be: 1,024 ranks", "16.8 MB", "17.2 GB", "50 GB/s"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


def test_several_masks() -> None:
    window = flexmasks.get_mask("sliding_window", window=256)
    sizes: dict[str, Any] = {"q_heads": 8, "kv_heads": 4, "head_size": 64, "block_size": 64}
    both = plan(["causal", window, window], 4096, 4, **sizes)
    assert "2 x sliding_window(window=256)" in str(both)
    causal, windows = plan("causal", 4096, 4, **sizes), plan(window, 4096, 4, **sizes)
    for way in ("gather", "seen"):
        want = causal.way(way).received.mean + 2 * windows.way(way).received.mean
        assert both.way(way).received.mean == want
        assert both.way(way).blocks.mean == causal.way(way).blocks.mean + 2 * windows.way(way).blocks.mean


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bandwidth": float("nan")}, "plan: `bandwidth` must be a number above 0, got nan"),
        ({"q_heads": 6, "kv_heads": 4}, "`q_heads` must be a multiple of `kv_heads`"),
        ({"masks": "causl"}, "no mask is named 'causl'; did you mean 'causal'"),
    ],
)
def test_mistakes(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(**{"masks": "causal", "length": 512, "ranks": 2} | wrong)


def test_the_recipe_takes_masks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "4", "--length", "4096", "--mask", "document", "--mask", "causal", "--balance"]
    monkeypatch.setattr(sys, "argv", ["sequence_on_paper.py", *words])
    sequence_on_paper.main()
    document = flexmasks.get_mask("document", **definition("mask", "document").example(4096))
    assert str(plan([document, "causal"], 4096, 4, order="balanced")) in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["sequence_on_paper.py", "--mask", "causl"])
    with pytest.raises(SystemExit, match="no mask is named 'causl'"):
        sequence_on_paper.main()


def test_long_work_shows_its_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(strips, "_VISIBLE_OF_STRIP", 100)
    balance("causal", 4096, 4)
    assert capsys.readouterr().err == ""
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    monkeypatch.setattr(limits, "_SILENT_SECONDS", 0.0)
    balance("causal", 4096, 4)
    assert "flexmasks: counting the blocks of causal(): " in capsys.readouterr().err


# --- errors ---

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "length": (lambda: balance("causal", 0, 4), r"balance: `length` must be an int above 0, got 0"),
    "mesh": (lambda: balance("causal", 64, "4"), r"balance: `mesh` must be a DeviceMesh or the number of ranks"),  # type: ignore[arg-type]
    "no ranks": (lambda: balance("causal", 64, 0), r"balance: `mesh` must be a DeviceMesh or the number of ranks"),
    "no masks": (lambda: balance([], 64, 4), r"balance: `masks` must hold at least one mask, got none"),
    "block size": (lambda: balance("causal", 64, 4, block_size=0), r"balance: `block_size` must be an int above 0"),
    "rows": (lambda: seen_by("causal", (3, 99), 64), r"seen_by: `rows` must be \(start, stop\) with .* <= 64"),
    "no rows": (lambda: seen_by("causal", None, 64), r"seen_by: `rows` must be \(start, stop\) .*, got None"),  # type: ignore[arg-type]
    "batch": (lambda: balance("causal", 64, 4, batch=0), r"balance: `batch` must be an int above 0, got 0"),
    "number of heads": (lambda: balance("causal", 64, 4, heads=1.5), r"balance: `heads` must be an int above 0"),  # type: ignore[arg-type]
    "twice": (
        lambda: Order(8, (((0, 5),), ((4, 8),))),
        r"Order: .* once, but token 4 is held more than once",
    ),
    "gap": (lambda: Order(8, (((0, 3),), ((4, 8),))), r"Order: .* but token 3 is held never"),
    "end": (lambda: Order(8, (((0, 3),), ((3, 7),))), r"Order: .* but token 7 is held never"),
    "outside": (lambda: Order(8, (((0, 9),),)), r"Order: a part must be \(start, stop\) with .* <= 8, got \(0, 9\)"),
    "not a pair": (lambda: Order(8, [[(0, 4, 8)]]), r"Order: a part must be \(start, stop\) .*, got \(0, 4, 8\)"),  # type: ignore[arg-type, list-item]
    "floats": (lambda: Order(8, (((0, 8.0),),)), r"Order: a part must be \(start, stop\) .*, got \(0, 8\.0\)"),  # type: ignore[arg-type]
    "no ranges": (lambda: Order(8, ((0, 8),)), r"Order: a part must be \(start, stop\) .*, got 0"),  # type: ignore[arg-type]
    "no ranks' parts": (lambda: Order(8, (0, 8)), r"Order: an entry of `parts` must hold the parts .*, got 0"),  # type: ignore[arg-type]
    "no parts": (lambda: Order(8, ()), r"Order: `parts` must have an entry for each rank"),
    "natural": (lambda: Order.natural(8, 0), r"Order\.natural: `ranks` must be an int above 0, got 0"),
    "order": (
        lambda: plan("causal", 64, 4, order=Order.natural(64, 2)),
        r"plan: `order` must be \"balanced\" or an O",
    ),
    "ranks": (lambda: plan("causal", 64, 0), r"plan: `ranks` must be an int above 0, got 0"),
    "many ranks": (lambda: plan("causal", 1 << 20, 70_000), r"plan: it takes at most 16,384 ranks, got 70,000"),
    "flops": (lambda: plan("causal", 64, 4, flops=0), r"plan: `flops` must be a number above 0, got 0"),
    "heads": (
        lambda: balance(lambda b, h, q, kv: q >= kv * h, 64, 4),
        r"depends on its head index; pass `heads`, the size of that index",
    ),
    "name": (lambda: balance("causl", 64, 4), r"no mask is named 'causl'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()
