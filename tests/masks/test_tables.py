"""Tables with a row for each query of a call, whose batch elements start at different positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexmasks
from flexmasks import pages, road

Q, KV, BATCH, HEADS = 4, 10, 2, 2
ROWS, COLUMNS = 2, 5
_Call = tuple[dict[str, Any], Tensor]  # arguments of a call, and what they add to the scores, [B, H, Q, KV]


def _dense(batch: int) -> _Call:
    visible = torch.rand(batch, 1, Q, KV) > 0.4
    return {"mask": visible}, _added(visible)


def _dense_bias(batch: int) -> _Call:
    bias = torch.randn(batch, HEADS, Q, KV)
    return {"score": bias}, bias


def _pair_bias(batch: int) -> _Call:
    bias = torch.randn(1, HEADS, Q, KV)
    return {"score": "pair_bias", "bias": bias, "group": batch}, bias


def _decomposed_bias(batch: int) -> _Call:
    rel_h, rel_w = torch.randn(batch, HEADS, Q, ROWS), torch.randn(batch, HEADS, Q, COLUMNS)
    added = rel_h.repeat_interleave(COLUMNS, -1) + rel_w.repeat(1, 1, 1, ROWS)
    return {"score": "decomposed_bias", "rel_h": rel_h, "rel_w": rel_w}, added


def _topk(batch: int) -> _Call:
    visible = torch.rand(batch, 1, Q, KV) > 0.4
    return {"mask": flexmasks.get_mask("topk", indices=_indices(visible.flatten(0, 2)))}, _added(visible)


def _indices(visible: Tensor) -> Tensor:
    """The keys that each row sees, int32[rows, 1, keys]."""
    return torch.where(visible, torch.arange(visible.shape[-1]), -1).int()[:, None]


def _added(visible: Tensor) -> Tensor:
    return torch.where(visible, 0.0, -math.inf)


MAKERS: list[Callable[[int], _Call]] = [_dense, _dense_bias, _topk, _pair_bias, _decomposed_bias]


def _want(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1]) + added.double()
    return scores.softmax(-1).nan_to_num(0.0) @ v.double()


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(BATCH, HEADS, Q, 8), torch.randn(BATCH, HEADS, KV, 8), torch.randn(BATCH, HEADS, KV, 8)


@settings(max_examples=15, deadline=None)
@given(
    offsets=st.lists(st.integers(0, KV - Q), min_size=BATCH, max_size=BATCH),
    make=st.sampled_from(MAKERS),
    backend=st.sampled_from(["auto", "reference", "short"]),
    is_causal=st.booleans(),
    seed=st.integers(0, 9),
)
def test_rows_are_those_of_queries(
    offsets: list[int], make: Callable[[int], _Call], backend: str, is_causal: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    arguments, added = make(BATCH)
    q, k, v = _inputs()
    if is_causal:
        place = torch.arange(Q)[:, None] + torch.tensor(offsets)[:, None, None, None]
        added = torch.where(torch.arange(KV) <= place, added, -math.inf)
        mask = flexmasks.get_mask("causal")
        arguments["mask"] = mask & flexmasks.get_mask(arguments["mask"]) if "mask" in arguments else mask
    q.requires_grad_()
    for q_offset in (offsets, torch.tensor(offsets)):
        out = flexmasks.attention(q, k, v, q_offset=q_offset, backend=backend, **arguments)
        want = _want(q, k, v, added)
        assert torch.allclose(out.double(), want, atol=1e-5)
        got, expected = (torch.autograd.grad(x.square().sum(), q)[0] for x in (out, want))
        assert torch.allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("make", MAKERS)
def test_tables_of_other_calls(make: Callable[[int], _Call]) -> None:
    torch.manual_seed(0)
    arguments, added = make(BATCH)
    q, k, v = _inputs()
    want = _want(q, k, v, added)
    offsets = torch.tensor([6, 1])

    def compiled(q: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = flexmasks.attention(q, k, v, q_offset=offsets, **arguments)
        return out

    traced = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for positions in (offsets, torch.tensor([3, 3])):
        assert torch.allclose(traced(q, positions).double(), want, atol=1e-5)
    plan = flexmasks.plan(arguments.pop("mask", None), Q, KV, q_offset=offsets, batch=BATCH, heads=HEADS, **arguments)
    for changed in ([0, 5], [6, 1]):
        assert torch.allclose(flexmasks.attention(q, k, v, mask=plan).double(), want, atol=1e-5)
        plan.update(q_offset=changed)


@pytest.mark.parametrize("make", MAKERS[:3])
def test_the_last_queries_of_sequences_in_pages(make: Callable[[int], _Call]) -> None:
    torch.manual_seed(0)
    arguments, added = make(BATCH)
    q, k, v = _inputs()
    kv_lens = torch.tensor([10, 7])
    caches = [x.transpose(1, 2).reshape(-1, 5, HEADS, 8) for x in (k, v)]
    table = torch.arange(4).view(2, 2)
    out = flexmasks.paged_attention(q, *caches, table, kv_lens, **arguments)
    added = torch.where(torch.arange(KV) < kv_lens[:, None, None, None], added, -math.inf)
    assert torch.allclose(out.double(), _want(q, k, v, added), atol=1e-5)


@pytest.mark.parametrize("make", MAKERS[:3])
def test_drafts_of_sequences_in_pages(make: Callable[[int], _Call]) -> None:
    torch.manual_seed(0)
    arguments, added = make(BATCH)
    q, k, v = _inputs()
    caches = [x.transpose(1, 2).reshape(-1, 5, HEADS, 8) for x in (k, v)]
    cache = {"page_table": torch.arange(4).view(2, 2), "kv_lens": torch.tensor([10, 7])}
    for _ in range(3):
        tokens = q.transpose(1, 2).flatten(0, 1)
        out = flexmasks.varlen_attention(tokens, *caches, torch.arange(3) * Q, **cache, **arguments)
        seen = torch.where(torch.arange(KV) < cache["kv_lens"][:, None, None, None], added, -math.inf)
        assert torch.allclose(out.view(BATCH, Q, HEADS, 8).transpose(1, 2).double(), _want(q, k, v, seen), atol=1e-5)
        cache["kv_lens"] = cache["kv_lens"] - 1


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("name", ["dense", "topk"])
def test_mixed_batches_in_pages(name: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not cut by their numbers of queries are so in pieces, of which some have no query."""
    monkeypatch.setattr(pages, "reads_at_once", lambda device: is_cut)
    torch.manual_seed(0)
    q, k, v = _inputs()
    visible, kv_lens = torch.rand(BATCH, 1, Q, KV) > 0.4, torch.tensor([7, 10])
    tokens = torch.cat([q[0, :, :1], q[1]], 1).transpose(0, 1)
    flat = torch.cat([visible[0, 0, :1], visible[1, 0]])
    table = visible[[0, 0, 1]]  # the second sequence has no query
    mask = table if name == "dense" else flexmasks.get_mask("topk", indices=_indices(flat))
    caches = [x.transpose(1, 2).reshape(-1, 5, HEADS, 8) for x in (k, v)]
    cache = {"page_table": torch.tensor([[0, 1], [1, 0], [2, 3]]), "kv_lens": torch.tensor([7, 4, 10])}
    out = flexmasks.varlen_attention(tokens, *caches, [0, 1, 1, 1 + Q], mask=mask, backend="reference", **cache)
    want = _want(q, k, v, _added(visible & (torch.arange(KV) < kv_lens[:, None, None, None]))).transpose(1, 2)
    assert torch.allclose(out.double(), torch.cat([want[0, :1], want[1]]), atol=1e-5)


@pytest.mark.parametrize("q_start", one_in(2, [0, 3, "last"]))
def test_tables_inside_sequences(q_start: Any) -> None:
    torch.manual_seed(0)
    visible = torch.rand(BATCH, 1, Q, KV) > 0.4
    q, k, v = torch.randn(2 * Q, HEADS, 8), torch.randn(KV + 7, HEADS, 8), torch.randn(KV + 7, HEADS, 8)
    offsets, kv_offsets = [0, Q, 2 * Q], [0, KV, KV + 7]
    out = flexmasks.varlen_attention(q, k, v, offsets, kv_offsets, mask=visible, q_offset=q_start)
    for s, (a, b) in enumerate(pairwise(kv_offsets)):
        rows = slice(s * Q, (s + 1) * Q)
        part = [x.transpose(0, 1)[None] for x in (q[rows], k[a:b], v[a:b])]
        want = _want(*part, torch.where(visible[s : s + 1, :, :, : b - a], 0.0, -math.inf))
        assert torch.allclose(out[rows].transpose(0, 1)[None].double(), want, atol=1e-5)


_PLACES = list(itertools.product([3, "last", [6, 0, 4]], ["dense", "topk"]))


@pytest.mark.parametrize(
    ("q_start", "name", "is_traced"),
    [*((*place, False) for place in _PLACES), *one_in(6, [(*place, True) for place in _PLACES])],
)
def test_tables_inside_sequences_before_padding(q_start: Any, name: str, is_traced: bool) -> None:
    torch.manual_seed(0)
    counts, kv_counts, tokens = [3, 0, Q], [KV, 2, KV - 2], 3 + Q + 2  # two of them are padding
    offsets, kv_offsets = (torch.tensor([0, *itertools.accumulate(x)]) for x in (counts, kv_counts))
    q, k, v = (torch.randn(n, HEADS, 8) for n in (tokens, sum(kv_counts), sum(kv_counts)))
    visible = torch.rand(3, Q, KV) > 0.4
    rows = torch.cat([*(x[:n] for x, n in zip(visible, counts, strict=True)), visible[0, :2]])
    keys_of_sequences = torch.arange(KV) < torch.tensor([KV] * 3 + [KV - 2] * Q + [0] * 2)[:, None]
    indices = _indices(rows & keys_of_sequences)
    mask = visible[:, None] if name == "dense" else flexmasks.get_mask("topk", indices=indices)
    start = torch.tensor(q_start) if isinstance(q_start, list) else q_start

    def call(q: Tensor, offsets: Tensor, **more: Any) -> Tensor:
        more |= {"mask": mask, "q_offset": start, "backend": "reference"}
        out: Tensor = flexmasks.varlen_attention(q, k, v, offsets, kv_offsets, **more)
        return out

    torch.compiler.reset()  # graphs of other cases count towards a limit
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if is_traced else call
    for more in ({}, {"max_seqlen_k": KV}):
        out = run(q, offsets, **more)
        assert not out[-2:].any()
        for s, (a, b) in enumerate(pairwise(offsets.tolist())):
            keys = slice(*kv_offsets[s : s + 2].tolist())
            part = [x.transpose(0, 1)[None] for x in (q[a:b], k[keys], v[keys])]
            want = _want(*part, _added(visible[s, : b - a, : kv_counts[s]]))
            assert torch.allclose(out[a:b].transpose(0, 1)[None].double(), want, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        *itertools.product(MAKERS, ["auto", "reference"]),
        *one_in(2, [pytest.param(make, "flex", marks=pytest.mark.slow) for make in MAKERS]),
    ],
)
def test_new_starts_of_a_kind(make: Callable[[int], _Call], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(road, "_KINDS_ON", ("cpu",))
    q, k, v = _inputs()
    for step in range(4):
        torch.manual_seed(step)
        arguments, added = make(BATCH)
        offsets = torch.randint(0, KV - Q + 1, (BATCH,))
        out = flexmasks.attention(q, k, v, q_offset=offsets, backend=backend, **arguments)
        assert torch.allclose(out.double(), _want(q, k, v, added), atol=1e-5)


def test_new_starts_of_the_same_tensor_are_noticed() -> None:
    visible, offsets = torch.rand(BATCH, 1, Q, KV) > 0.4, torch.tensor([6, 1])
    for change in (None, [0, 3], [2, 2]):
        if change is not None:
            offsets.copy_(torch.tensor(change))
        assert torch.equal(flexmasks.dense_mask(visible, Q, KV, batch=BATCH, heads=1, q_offset=offsets), visible)
