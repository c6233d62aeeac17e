"""Where queries start is said where it matters: in every call, for every mask and score."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import MASK_CASES, Case, dense
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor

import flexmasks
from benchmarks.examples import SHORT, fitting
from flexmasks.spec.definitions import names

PLACED = {"packed", "vision_cross"}  # parameters say where queries are
CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, **how: flexmasks.attention(q, k, k, backend="reference", **how),
    "explain": lambda q, k, **how: flexmasks.explain(q, k, k, **how).blocks.block_mask.to_dense(),
    "block_mask": lambda q, k, **how: flexmasks.block_mask(how.pop("mask"), *sizes(q, k), **how).to_dense(),
    "dense_mask": lambda q, k, **how: flexmasks.dense_mask(how.pop("mask"), *sizes(q, k), **how),
    "plan": lambda q, k, **how: flexmasks.plan(how.pop("mask"), *sizes(q, k), **how).q_offset,
    "blocks": lambda q, k, **how: how.pop("mask").blocks(*sizes(q, k), **how).sparsity,
    "softmax": lambda q, k, **how: flexmasks.masked_softmax(q @ k.mT, **how),
    "compiled": lambda q, k, **how: torch.compile(flexmasks.attention, backend="eager", fullgraph=True)(q, k, k, **how),
}


def sizes(q: Tensor, k: Tensor) -> tuple[int, int]:
    return q.shape[2], k.shape[2]


def said(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of a call, or None and what it says is to be said."""
    try:
        return call(), ""
    except Exception as error:  # torch.compile raises errors of its own
        if "query 0 is at key 0" not in str(error):
            raise
        return None, str(error)


@pytest.mark.parametrize("name", sorted(names("mask").keys() - {"packed"}))
def test_a_mask_whose_rows_differ_is_never_placed_by_chance(name: str) -> None:
    """Calls say that the alignment is missing, or both alignments give the same."""
    length, mask, _ = fitting("mask", name, SHORT, lambda mask, n: flexmasks.dense_mask(mask, n, heads=2))
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, length, 8)
    whole = flexmasks.dense_mask(mask, length, heads=2)
    rows_differ = not torch.equal(whole, whole[..., :1, :].expand_as(whole))
    out, message = said(lambda: CALLS["attention"](q, k, mask=mask))
    if name in PLACED:
        assert torch.equal(out, CALLS["attention"](q, k, mask=mask, q_offset="first"))
    elif rows_differ:
        assert f"3 queries, {length} keys: pass q_offset={length - 3} or 'last'" in message
    elif not message:
        assert torch.equal(out, CALLS["attention"](q, k, mask=mask, q_offset="last"))
        assert torch.equal(out, CALLS["attention"](q, k, mask=mask, q_offset=0))


@pytest.mark.parametrize("mask", [
    flexmasks.masks.topk(indices=torch.zeros(3, 2, dtype=torch.int64)),
    flexmasks.masks.dense(visible=torch.ones(8, dtype=torch.bool)),
])  # fmt: skip
def test_a_table_of_too_few_dimensions_is_named(mask: flexmasks.Mask) -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 8, 8)
    with pytest.raises(ValueError, match=rf"mask '{mask.name}': `(indices|visible)` must be (int|bool)\["):
        CALLS["attention"](q, k, mask=mask)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(names("score").keys() - {"packed"}))
def test_scores(name: str) -> None:
    def attended(score: Any, n: int) -> Tensor:
        return flexmasks.attention(*torch.randn(3, 1, score._implied_size("H") or 2, n, 8), score=score)

    length, score, _ = fitting("score", name, SHORT, attended)
    heads = score._implied_size("H") or 2
    q, k = torch.randn(1, heads, 3, 8), torch.randn(1, heads, length, 8)
    out, message = said(lambda: CALLS["attention"](q, k, score=score))
    assert message or torch.equal(out, CALLS["attention"](q, k, score=score, q_offset="last"))
    assert name in ("softcap", "temperature") or message or name.endswith("bias")


@pytest.fixture(autouse=True)
def _own_graphs() -> None:
    """Calls of other tests count towards torch's limit of graphs of one function."""
    torch._dynamo.reset()


@pytest.mark.parametrize("call", [n if n != "compiled" else pytest.param(n, marks=pytest.mark.slow) for n in CALLS])
def test_every_call(call: str) -> None:
    run, (q, k) = CALLS[call], (torch.randn(1, 2, 1, 8), torch.randn(1, 2, 40, 8))
    causal = flexmasks.get_mask("causal")
    assert "1 query, 40 keys: pass q_offset=39 or 'last'" in said(lambda: run(q, k, mask=causal))[1]
    more_queries = said(lambda: run(k, q, mask=causal))[1]
    assert "40 queries, 1 key: pass q_offset=0 or 'first'" in more_queries
    assert ("; tensors [B, S, H, D] need layout='bshd'" in more_queries) is ("flexmasks.attention" in more_queries)
    for word, number in (("first", 0), ("last", 39)):
        got, want = run(q, k, mask=causal, q_offset=word), run(q, k, mask=causal, q_offset=number)
        torch.testing.assert_close(got, want)
    for mask in (flexmasks.get_mask("full"), flexmasks.get_mask("padding", kv_lens=[7])):
        assert said(lambda mask=mask: run(q, k, mask=mask))[1] == ""
    assert said(lambda: run(k, k, mask=causal))[1] == ""
    with pytest.raises(Exception, match="'first', 'last', an int"):
        run(q, k, mask=causal, q_offset="end")
    with pytest.raises(Exception, match="needs at least as many keys as queries, got 40 queries, 1 key"):
        run(k, q, mask=causal, q_offset="last")


@pytest.mark.parametrize(
    "case",
    [c for c in MASK_CASES if c.q_len != c.kv_len and c.name not in {*PLACED, "paged"}],
    ids=lambda c: f"{c.name}-{c.q_len}",
)
def test_cases_of_the_oracles(case: Case) -> None:
    """Where rows of the oracle's mask differ, a call without q_offset raises."""
    visible = dense(case)
    rows_differ = not torch.equal(visible, visible[..., :1, :].expand_as(visible))
    mask = flexmasks.get_mask(case.name, **case.params)
    given: Any = {"batch": case.batch, "heads": case.heads}
    _, message = said(lambda: flexmasks.dense_mask(mask, case.q_len, case.kv_len, **given))
    rows = {"dense": ("visible", -2), "topk": ("indices", -3)}.get(case.name)
    counts = (case.q_len, case.batch * case.q_len)
    has_rows = rows is not None and case.params[rows[0]].shape[rows[1]] in counts
    assert bool(message) or not rows_differ or has_rows


def test_functions() -> None:
    """Those of users, also combined; one that reads the query for one batch element only."""
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 40, 8)
    offset = torch.tensor([0, 1])
    readers: list[Callable[..., Tensor]] = [
        lambda b, h, q, kv: kv <= q,
        lambda b, h, q, kv: kv < offset[b] * q,
        lambda b, h, q, kv: torch.where(b == 1, kv <= q, kv < 3),
        lambda b, h, q, kv: (kv < 3) | (q % 2 == 0),
    ]
    for function in readers:
        mask = flexmasks.get_mask(function)
        for combined in (mask, ~mask, mask & flexmasks.get_mask("full"), flexmasks.get_mask("full") & (mask | mask)):
            assert said(lambda m=combined: CALLS["attention"](q, k, mask=m))[1]
    for function in (lambda b, h, q, kv: kv % 3 == 0, lambda b, h, q, kv: (b == h) | (kv > 2)):
        assert not said(lambda f=function: CALLS["attention"](q, k, mask=f))[1]
    assert said(lambda: CALLS["attention"](q, k, score=lambda s, b, h, q, kv: s - (q - kv)))[1]
    assert not said(lambda: CALLS["attention"](q, k, score=lambda s, b, h, q, kv: s * 2))[1]


def test_a_function_that_asks_for_a_shape() -> None:
    """What it reads depends on the shape of a tensor."""
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 40, 8)

    def masked(count: int) -> Callable[..., Tensor]:
        first = torch.zeros(count, dtype=torch.int64)
        return lambda b, h, q, kv: kv >= (first[q] if first.shape[0] > 1 else first[0])

    for count in (1, 40, 1):
        assert bool(said(lambda n=count: CALLS["attention"](q, k, mask=masked(n)))[1]) == (count > 1)


def test_a_table_has_rows_of_queries() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 40, 8)
    table = torch.rand(3, 40) > 0.5
    out = flexmasks.attention(q, k, k, mask="dense", visible=table)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, table)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    square = torch.rand(40, 40) > 0.5
    assert said(lambda: flexmasks.attention(q, k, k, mask="dense", visible=square))[1]


def test_packed_masks_place_their_queries() -> None:
    """Where k is packed otherwise than q, a packed mask says by itself where each query is."""
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    mask = flexmasks.packed("causal", [0, 2, 5], [0, 4, 9], q_start=[2, 2])
    out = flexmasks.attention(q, k, k, mask=mask)
    for rows, keys in (((0, 2), (0, 4)), ((2, 5), (4, 9))):
        own_q, own_k = q[:, :, slice(*rows)], k[:, :, slice(*keys)]
        want = flexmasks.attention(own_q, own_k, own_k, mask="causal", q_offset=2)
        torch.testing.assert_close(out[:, :, slice(*rows)], want, atol=1e-5, rtol=1e-5)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4))
def test_sequences(lengths: list[tuple[int, int]]) -> None:
    """varlen_attention and jagged tensors: for each sequence, both alignments against attention of its own."""
    offsets, kv_offsets = ([sum(n[side] for n in lengths[:i]) for i in range(len(lengths) + 1)] for side in (0, 1))
    q, k = torch.randn(offsets[-1], 2, 8), torch.randn(kv_offsets[-1], 2, 8)

    def call(**how: Any) -> Tensor:
        return flexmasks.varlen_attention(q, k, k, offsets, kv_offsets, mask="causal", backend="reference", **how)

    def expected(word: Any) -> Tensor:
        parts = []
        for (a, b), (c, d) in zip(pairwise(offsets), pairwise(kv_offsets), strict=True):
            own_q, own_k = q[a:b].transpose(0, 1)[None], k[c:d].transpose(0, 1)[None]
            out = flexmasks.attention(own_q, own_k, own_k, mask="causal", q_offset=word, backend="reference")
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    first = next((i for i, (a, b) in enumerate(lengths) if a != b and a and b), None)
    out, message = said(call)
    if first is None:
        torch.testing.assert_close(out, expected(None))
    else:
        assert message.startswith(f"flexmasks.varlen_attention: sequence {first} has {lengths[first][0]} quer")
    torch.testing.assert_close(call(q_offset="first"), expected("first"))
    if all(a <= b for a, b in lengths):
        torch.testing.assert_close(call(q_offset="last"), expected("last"))
    else:
        with pytest.raises(ValueError, match="needs at least as many keys as queries"):
            call(q_offset="last")


def test_paged_caches_end_with_the_queries() -> None:
    """By default, and by name; "first" is another place."""
    cache, table, lens = torch.randn(6, 4, 2, 8), torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([9, 12])
    q = torch.randn(2, 2, 2, 8)

    def call(**how: Any) -> Tensor:
        return flexmasks.paged_attention(q, cache, cache, table, lens, mask="causal", **how)

    torch.testing.assert_close(call(), call(q_offset="last"))
    torch.testing.assert_close(call(), call(q_offset=lens - 2))
    torch.testing.assert_close(call(q_offset="first"), call(q_offset=0))
    assert not torch.allclose(call(), call(q_offset="first"))
