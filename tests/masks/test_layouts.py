"""Masks and scores that are prepared without reading a tensor's value on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from functions import short_and_campaign
from helpers import NoLists, NoReads, arguments, label, one_in, spread, try_examples
from hypothesis import strategies as st
from oracles import MASK_CASES, SCORE_CASES, Case, dense, offsets
from oracles.case import int32, int64
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import flexmasks
from benchmarks.examples import on_device
from flexmasks.blocks.elements import over_indices
from flexmasks.plans.sizes import shifted_mask, shifted_score
from flexmasks.spec import definitions
from flexmasks.spec.parameters import Size
from flexmasks.spec.registry import example
from flexmasks.spec.values import Modifier, ResolvedInner

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a mask or score with every tensor among its parameters changed."""
    if isinstance(value, tuple):
        return tuple(with_tensors(v, change) for v in value)
    if isinstance(value, Modifier):
        return type(value)(value._definition, {n: with_tensors(v, change) for n, v in value.params.items()})
    return change(value) if isinstance(value, Tensor) else value


def tensors_of(value: Modifier) -> list[Tensor]:
    found: list[Tensor] = []
    with_tensors(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def leaves(resolved: Any) -> list[Tensor]:
    """Return the tensors in what `resolve` returned, in a fixed order."""
    if isinstance(resolved, Mapping):
        return [t for name in sorted(resolved) for t in leaves(resolved[name])]
    if isinstance(resolved, ResolvedInner):
        return [t for inner in resolved.resolved for t in leaves(inner)]
    return [resolved] if isinstance(resolved, Tensor) else []


def evaluated(value: Modifier, size: Size, starts: Tensor | None = None) -> Tensor:
    """Return the mask, or the changed scores, of all pairs; scores are 1 before the change."""
    bound = value._bind(value._resolve(size))
    shift = 0 if starts is None else starts
    indices = [torch.arange(n) for n in (size.batch, size.heads, size.q_len, size.kv_len)]
    if value._kind == "mask":
        return over_indices(shifted_mask(bound, shift))(*indices)
    ones = torch.ones([len(i) for i in indices], dtype=size.dtype)
    return over_indices(shifted_score(bound, shift), (0,))(ones, *indices)


def check_unread(value: Modifier, size: Size, starts: Tensor | None = None) -> Tensor | None:
    """Check a value whose tensors may not be read, and return the mask or the scores of all pairs.

    Its preparation reads nothing, and its operations have fixed shapes: a trace of them with other tensors gives the
    same result. What it shows is what it shows if its tensors may be read. The result is None if it has no tensors.
    """
    unread = replace(size, may_read=False)
    with NoReads(), NoLists():
        resolved = value._resolve(unread)

    def prepare(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        return leaves(with_tensors(value, lambda _: next(rest))._resolve(unread))

    tensors = tensors_of(value)
    if not tensors:
        return None
    with torch.no_grad():
        traced = make_fx(prepare, tracing_mode="fake")(*(torch.zeros_like(t) for t in tensors))
        pairs = zip(traced(*tensors), leaves(resolved), strict=True)
    assert all(torch.equal(got, want) for got, want in pairs)
    shown = evaluated(value, unread, starts)
    assert torch.equal(shown, evaluated(value, size, starts))
    return shown


def size_of(case: Case) -> tuple[Size, Tensor | None]:
    """Return the size of a case, and where the queries of each batch element start."""
    starts = offsets(case)
    size = Size(case.batch, case.heads, case.q_len, case.kv_len, CPU, max(starts), torch.float64)
    return size, None if max(starts) == 0 else torch.tensor(starts)


def value_of(kind: str, case: Case) -> Modifier:
    params = arguments(case)
    del params["q_offset"]
    get = flexmasks.get_mask if kind == "mask" else flexmasks.get_score
    return on_device(get(case.name, **params), CPU)


def test_no_reads_notices_reads() -> None:
    x = torch.arange(4)
    reads: list[Callable[[], Any]] = [
        lambda: int(x.max()),
        lambda: bool((x > 1).any()),
        lambda: x.tolist(),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: x.unique(),
        lambda: torch.equal(x, x + 0),
        lambda: x.repeat_interleave(x),
    ]
    for read in reads:
        with pytest.raises(AssertionError), NoReads(), NoLists():
            read()


@pytest.mark.parametrize("case", one_in(2, spread(MASK_CASES, 3)), ids=label)
def test_masks(case: Case) -> None:
    got = check_unread(value_of("mask", case), *size_of(case))
    assert got is None or torch.equal(got, dense(case))


@pytest.mark.parametrize("case", spread(SCORE_CASES, 2), ids=label)
def test_scores(case: Case) -> None:
    check_unread(value_of("score", case), *size_of(case))


PREPARED = [
    (kind, n) for kind in ("mask", "score") for n, d in definitions.names(kind).items() if d.prepare is not None
]


@pytest.mark.parametrize(("kind", "name"), one_in(2, PREPARED), ids=[f"{kind}-{name}" for kind, name in PREPARED])
def test_dynamo_traces_preparations(kind: str, name: str) -> None:
    value = on_device(example(kind, name, 128), CPU)
    index = [torch.zeros(1, dtype=torch.int32) for _ in range(4)]

    def run(x: Tensor, *index: Tensor) -> Tensor:
        bound = value._bind(value._resolve(Size(1, 1, len(x), len(x), CPU, may_read=False)))
        return bound(*([x[:1]] if kind == "score" else []), *index)

    torch._dynamo.reset()
    x = torch.ones(128)
    got = torch.compile(run, backend="eager", fullgraph=True)(x, *index)
    assert torch.equal(got, run(x, *index))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "name"), PREPARED, ids=[f"{kind}-{name}" for kind, name in PREPARED])
def test_preparations_do_not_wait_for_the_gpu(kind: str, name: str) -> None:
    device = torch.device("cuda", 0)
    value = on_device(example(kind, name, 128), device)
    if not tensors_of(value):
        return
    size = Size(1, 1, 128, 128, device, may_read=False)
    value._resolve(size)
    torch.cuda.set_sync_debug_mode("error")
    try:
        resolved = value._resolve(size)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = on_device(value, CPU)._resolve(replace(size, device=CPU))
    assert all(torch.equal(got.cpu(), t) for got, t in zip(leaves(resolved), leaves(want), strict=True))


# --- random layouts, against the definitions ---

FEW_AND_MANY = short_and_campaign(6, 200)


def check_case(data: st.DataObject, name: str, params: dict[str, Any], **sizes: Any) -> None:
    case = Case(name, params, **sizes)
    got = check_unread(value_of("mask", case), *size_of(case))
    assert got is not None
    assert torch.equal(got, dense(case))


def numbers(data: st.DataObject, low: int, high: int, *shape: int) -> Tensor:
    """Draw whole numbers in low..high, both included."""
    if not shape:
        return torch.tensor(data.draw(st.integers(low, high)))
    rows = [numbers(data, low, high, *shape[1:]) for _ in range(shape[0])]
    return torch.stack(rows) if rows else torch.zeros(shape, dtype=torch.int64)


def pairs_in_order(data: st.DataObject, high: int, count: int) -> Tensor:
    return numbers(data, 0, high, count, 2).sort(1).values


@pytest.mark.slow
@FEW_AND_MANY
def test_any_tree(examples: int) -> None:
    def check(data: st.DataObject) -> None:
        count, batch, start = (data.draw(st.integers(*ends)) for ends in ((1, 9), (1, 2), (0, 4)))
        rows = [[data.draw(st.integers(-1, n - 1)) for n in range(count)] for _ in range(batch)]
        starts = data.draw(st.sampled_from([start, numbers(data, 0, 4, batch)]))
        parents = data.draw(st.sampled_from([int32(rows), int64(rows[0])]))
        length = 4 + count + data.draw(st.integers(0, 3))
        sizes = {"batch": batch, "heads": 1, "q_len": length, "kv_len": length}
        check_case(data, "tree", {"parents": parents, "start": starts}, **sizes)

    try_examples(examples, check, st.data())


@pytest.mark.slow
@FEW_AND_MANY
def test_any_slices(examples: int) -> None:
    def check(data: st.DataObject) -> None:
        count, q_len, kv_len = (data.draw(st.integers(*ends)) for ends in ((0, 5), (1, 12), (1, 12)))
        params = {"q_ranges": pairs_in_order(data, q_len, count), "kv_ranges": pairs_in_order(data, kv_len, count)}
        if data.draw(st.booleans()):
            params["types"] = numbers(data, 0, 3, count)
        check_case(data, "slices", params, batch=1, heads=1, q_len=q_len, kv_len=kv_len)

    try_examples(examples, check, st.data())


@FEW_AND_MANY
def test_any_lines_and_blocks(examples: int) -> None:
    def check(data: st.DataObject) -> None:
        count, q_len, kv_len, block = (data.draw(st.integers(*ends)) for ends in ((1, 4), (1, 9), (1, 9), (1, 4)))
        sizes = {"batch": 2, "heads": 2, "q_len": q_len, "kv_len": kv_len}
        shape = data.draw(st.sampled_from([(), (2,), (2, 2)]))
        vertical = numbers(data, -1, kv_len - 1, *shape, count)
        slash = numbers(data, -1, max(q_len, kv_len) - 1, *shape, count)
        check_case(data, "vertical_slash", {"vertical": vertical, "slash": slash}, **sizes)
        rows, columns = -(-q_len // block), -(-kv_len // block)
        shape = data.draw(st.sampled_from([(), (2, 2), (2, 1), (1, 2), (1, 1)]))
        indices = numbers(data, -1, columns - 1, *shape, rows, count)
        check_case(data, "block_topk", {"indices": indices, "block": block}, **sizes)
        layout = numbers(data, 0, 1, *shape, rows, columns).bool()
        check_case(data, "block_sparse", {"visible_blocks": layout, "block": block}, **sizes)
        counts = numbers(data, 0, columns, rows)
        crow = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        columns_of = numbers(data, 0, columns - 1, int(crow[-1]))
        check_case(data, "bsr", {"crow_indices": crow, "col_indices": columns_of, "block": block}, **sizes)

    try_examples(examples, check, st.data())


@FEW_AND_MANY
def test_any_spans(examples: int) -> None:
    def check(data: st.DataObject) -> None:
        length = data.draw(st.integers(1, 12))
        ids = numbers(data, -2, 3, *data.draw(st.sampled_from([(), (2,)])), length)
        check_case(data, "bidirectional_spans", {"span_ids": ids}, batch=2, heads=1, q_len=length, kv_len=length)

    try_examples(examples, check, st.data())


@FEW_AND_MANY
def test_any_sequences(examples: int) -> None:
    def check(data: st.DataObject) -> None:
        count, more, kv_more = (data.draw(st.integers(*ends)) for ends in ((1, 4), (0, 3), (0, 3)))
        offsets, kv_offsets = (torch.tensor([0, *numbers(data, 0, 4, count).cumsum(0).tolist()]) for _ in range(2))
        places: dict[str, Any] = {"offsets": offsets.to(data.draw(st.sampled_from([torch.uint8, torch.int64])))}
        if data.draw(st.booleans()):
            places["kv_offsets"] = kv_offsets
        else:
            kv_offsets = offsets
        start = data.draw(st.sampled_from([0, 3, numbers(data, 0, 4, count)]))
        sizes = {"batch": 1, "heads": 1, "q_len": int(offsets[-1]) + more, "kv_len": int(kv_offsets[-1]) + kv_more}
        if 0 in sizes.values():
            return
        inner = data.draw(st.sampled_from([("causal", {}), ("padding", {"kv_lens": numbers(data, 0, 4, count)})]))
        size = Size(*sizes.values(), CPU)
        if inner[0] == "padding" and int(inner[1]["kv_lens"].max()) > int(kv_offsets.diff().max()):
            inner[1]["kv_lens"].zero_()
        case = Case("packed", {"mask": inner, **places, "q_start": start}, **sizes)
        got = check_unread(value_of("mask", case), size)
        assert got is not None
        assert torch.equal(got, dense(case))
        bounded = value_of("mask", case)
        bounded.params["max_length"] = data.draw(st.integers(4, 99))
        assert torch.equal(check_unread(bounded, size), got)

    try_examples(examples, check, st.data())


# --- sizes inside sequences ---


def test_tables_inside_sequences_may_have_any_length_up_to_the_bound() -> None:
    ids = torch.arange(3 * 7).view(3, 7) // 2
    inner = flexmasks.get_mask("document", document_ids=ids)
    offsets = torch.tensor([0, 7, 9, 14])
    want = flexmasks.dense_mask(flexmasks.packed(inner, offsets), 14)[0, 0]
    size = Size(1, 1, 14, 14, CPU, may_read=False)
    for mask in (flexmasks.packed(inner, offsets), flexmasks.packed(inner, offsets, max_length=7)):
        assert torch.equal(evaluated(mask, size)[0, 0], want)
    assert torch.equal(flexmasks.dense_mask(flexmasks.packed(inner, offsets, max_length=50), 14)[0, 0], want)
    with pytest.raises(ValueError, match=r"must be int\[S\]"):
        flexmasks.packed(inner, offsets, max_length=6)._resolve(size)
    with pytest.raises(ValueError, match="`max_length` is 6, but a sequence has 7 tokens"):
        flexmasks.dense_mask(flexmasks.packed(inner, offsets, max_length=6), 14)
    with pytest.raises(ValueError, match="`max_length` is 6, but a sequence has 7 tokens"):
        flexmasks.dense_mask(flexmasks.packed("full", [0, 2, 4], [0, 7, 9], max_length=6), 4, 9)
    with pytest.raises(ValueError, match="`max_length` must be length in 0"):
        flexmasks.dense_mask(flexmasks.packed(inner, offsets, max_length=-1), 14)


def test_sequences_with_a_bound_of_lengths_are_planned_without_a_read() -> None:
    q = torch.randn(1, 2, 300, 8)
    plans = []
    for start in (100, 150, 170):
        offsets = torch.tensor([0, start, 300])
        mask = flexmasks.packed(lambda b, h, q, kv: (q >= kv) & (kv % 3 != b), offsets, max_length=200)
        plans.append(flexmasks.explain(q, q, q, mask=mask).plan)
    assert "these are the first tensors" in plans[0]
    assert all(plan.startswith("bounds") for plan in plans[1:])


def test_windows_in_sequences_of_later_queries() -> None:
    """A distance is one of positions, not of the places of rows among those of a call."""
    q, k, v = torch.randn(3, 1, 2, 400, 8)
    offsets = torch.tensor([0, 30, 240, 400])
    query, key = torch.arange(270, 400)[:, None], torch.arange(400)
    sequence = torch.searchsorted(offsets, key, right=True)
    visible = (sequence[query] == sequence[key]) & (key <= query) & (query - key <= 20)
    want = torch.nn.functional.scaled_dot_product_attention(q[:, :, 270:], k, v, attn_mask=visible)
    for _ in range(2):  # the second plan of a kind is made by bounds
        mask = flexmasks.packed("sliding_window", offsets.clone(), window=20)
        out = flexmasks.attention(q[:, :, 270:], k, v, mask=mask, q_offset=270, backend="reference")
        assert torch.allclose(out, want, atol=1e-5)


def test_images_inside_sequences() -> None:
    inner = flexmasks.get_mask("natten", height=4, width=5, kernel=3, order=torch.randperm(20))
    size = Size(1, 1, 60, 60, CPU)
    check_unread(flexmasks.packed(inner, torch.tensor([0, 20, 40, 60])), size)
    check_unread(flexmasks.packed(inner, torch.tensor([0, 20, 40, 60]), max_length=20), size)


def test_values_out_of_bounds_are_no_error_if_they_may_not_be_read() -> None:
    size = Size(2, 1, 8, 8, CPU)
    mask = flexmasks.get_mask("grouped_tril", seq_lens=torch.tensor([9, 3]))
    with pytest.raises(ValueError, match="values from 3 to 9"):
        mask._resolve(size)
    mask._resolve(replace(size, may_read=False))
    with pytest.raises(ValueError, match="must be int"):  # shapes are still checked
        mask._resolve(replace(size, batch=3, may_read=False))
