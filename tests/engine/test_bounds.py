"""Plans by ranges alone: bounds of the blocks of a mask with tensors, and what is recorded of them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from helpers import captured, documents, without_waits
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode

import flexmasks
from benchmarks.examples import on_device
from flexmasks import Mask, get_mask
from flexmasks.plans import bounds
from flexmasks.plans.bounds import RecordedPlan, SizedMask, plan_bounds
from flexmasks.plans.sizes import shifted_mask, unread
from flexmasks.spec.parameters import Size
from flexmasks.spec.registry import example
from flexmasks.spec.structure import replaced

BATCH, LENGTH = 2, 512
CPU = torch.device("cpu")
SIZE = Size(BATCH, 1, LENGTH, LENGTH, CPU)
# Masks whose examples have tensors.
WITH_TENSORS = [e.name for e in flexmasks.list_masks() if on_device(example("mask", e.name, 1024), CPU)._tensors()]


def of_offsets(window: int) -> Mask:
    """A window inside sequences that lie end to end."""
    ends = torch.randint(1, LENGTH, (3,)).sort().values
    offsets = torch.cat([torch.tensor([0]), ends, torch.tensor([LENGTH])])
    return get_mask("packed", inner=get_mask("sliding_window", window=window), offsets=offsets)


MASKS: dict[str, Callable[[], Mask]] = {
    "document": lambda: get_mask("causal") & get_mask("document", document_ids=documents(LENGTH)),
    "lengths": lambda: get_mask("padding", kv_lens=torch.randint(0, LENGTH, (BATCH,))),
    "packed": lambda: of_offsets(40),
    "number": lambda: get_mask("sliding_window", window=torch.randint(0, 300, ())),
    "lambda": lambda: get_mask(_of_ids(documents(LENGTH))),
}


def _of_ids(ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: (q - kv < 70) & (ids[b, q] >= ids[b, kv])


def pairs(made: Any, mask_mod: Callable[..., Tensor], size: Size) -> Tensor:
    """The pairs that the blocks of a plan show: the lists of full blocks, and the function in partial ones."""
    block_mask = made.layout.block_mask(mask_mod)
    height, width = block_mask.BLOCK_SIZE
    shown = torch.zeros(size.batch, size.q_len, size.kv_len, dtype=torch.bool)
    visible = create_mask(mask_mod, size.batch, 1, size.q_len, size.kv_len, "cpu")[:, 0]
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices, visible)]
    lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, torch.ones_like(visible)))
    for counts, indices, seen in lists:
        for b in range(size.batch):
            of_batch = b if counts.shape[0] > 1 else 0
            for row, count in enumerate(counts[of_batch, 0].tolist()):
                for column in indices[of_batch, 0, row, :count].tolist():
                    at = b, slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
                    shown[at] = seen[at]
    return shown


@pytest.mark.parametrize(
    ("name", "starts"), [*product([n for n in MASKS if n != "packed"], ["0", "a number", "a tensor"]), ("packed", "0")]
)
def test_bounds_show_the_mask_and_read_no_values(name: str, starts: str) -> None:
    for _ in range(5):
        mask, size, offset = MASKS[name](), SIZE, {"0": 0, "a number": 77}.get(starts, torch.randint(0, 212, (BATCH,)))
        if starts != "0":
            size = Size(BATCH, 1, 300, LENGTH, CPU)
        with without_waits("cpu"):
            made = plan_bounds(SizedMask(mask, offset, size, False, (64, 64)))
        mask_mod = shifted_mask(mask._bind(made.arguments), offset)
        whole = flexmasks.dense_mask(mask, size.q_len, LENGTH, batch=BATCH, q_offset=offset).expand(BATCH, 1, -1, -1)
        assert torch.equal(pairs(made, mask_mod, size), whole[:, 0])


@pytest.mark.parametrize("name", ["document", "packed"])
def test_bounds_are_near_the_exact_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows inside sequences bound the distance of keys, which ranges of positions do not show."""
    counts = {"bounds": 0, "exact": 0, "without the band": 0}

    def count(made: Any) -> int:
        return int(made.layout.indices[0].sum() + made.layout.indices[2].sum())

    for _ in range(5):
        mask = MASKS[name]()
        given = SizedMask(mask, 0, SIZE, False, (64, 64))
        counts["bounds"] += count(plan_bounds(given))
        with monkeypatch.context() as patched:
            patched.setattr(bounds, "band_of", lambda mask, size: None)
            counts["without the band"] += count(plan_bounds(given))
        exact = create_block_mask(mask, BATCH, 1, LENGTH, LENGTH, "cpu", BLOCK_SIZE=64)
        shared = 1 if name == "packed" else BATCH  # the mask does not depend on the batch element
        counts["exact"] += int(exact.kv_num_blocks.sum() + exact.full_kv_num_blocks.sum()) * shared // BATCH
    assert counts["bounds"] <= 1.25 * counts["exact"]
    assert (counts["without the band"] > 1.25 * counts["exact"]) == (name == "packed")


@pytest.mark.parametrize("granularity", [1, 4, 16, 64, 128])
def test_blocks_of_chosen_entries_are_exact(granularity: int) -> None:
    entries, count = LENGTH // granularity, 128 // granularity
    block = torch.arange(LENGTH) // 128
    run = torch.where(block == 3, 1, (block + 2 * torch.randint(0, 2, (LENGTH,))) % 4)  # of 128 keys, for each query
    indices = run[:, None] * count + torch.randperm(count)
    chosen = torch.zeros(LENGTH, entries, dtype=torch.bool).scatter_(1, indices, True)
    visible = chosen.repeat_interleave(granularity, 1).tril()
    want = create_block_mask(lambda b, h, q, kv: visible[q, kv], None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=64)
    mask = get_mask("topk", indices=indices[:, None].int(), granularity=granularity) & get_mask("causal")
    with without_waits("cpu"):
        layout = plan_bounds(SizedMask(mask, 0, SIZE, False, (64, 64))).layout
    counts, _, full, *_ = layout.indices
    assert torch.equal(counts[0], want.kv_num_blocks[0])
    assert torch.equal(full[0], want.full_kv_num_blocks[0])
    assert 0 < int(full.sum()) < int((counts + full).sum()) < 36


@pytest.mark.parametrize("backend", ["short", "reference"])
def test_rows_of_chosen_keys_of_each_batch_element_start_where_queries_do(backend: str) -> None:
    q, k, v = (torch.randn(2, 1, n, 16, requires_grad=True) for n in (17, 50, 50))
    for starts in (torch.tensor([20, 4]), torch.tensor([33, 0])):
        indices = torch.randint(-1, 50, (2 * 17, 1, 4), dtype=torch.int32)
        out = flexmasks.attention(q, k, v, mask="topk", indices=indices, q_offset=starts, backend=backend)
        chosen = torch.zeros(2 * 17, 51, dtype=torch.bool).scatter_(1, indices[:, 0].long() % 51, True)  # -1 is last
        visible = chosen[:, :50].view(2, 1, 17, 50)
        torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, visible))


def test_plans_of_chosen_keys_hold_no_table_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["flexmasks.masks.topk"], "_ENTRIES_AT_ONCE", 1 << 14)
    sizes: dict[str, int] = {}

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes[str(func)] = max(sizes.get(str(func), 0), out.nbytes if isinstance(out, Tensor) else 0)
            return out

    mask = get_mask("topk", indices=torch.randint(-1, LENGTH, (LENGTH, 1, 8), dtype=torch.int32))
    with Watched():
        plan_bounds(SizedMask(mask & get_mask("causal"), 0, SIZE, False, (64, 64)))
    assert max(sizes.values()) <= LENGTH * LENGTH // 8, sizes  # the bits themselves


@pytest.mark.parametrize(
    ("name", "tokens"), [("topk", {"granularity": 1}), ("topk", {"granularity": 64}), ("block_topk", {"block": 64})]
)
def test_entries_behind_the_keys_are_none_where_they_are_not_read(name: str, tokens: dict[str, int]) -> None:
    keys = [0, -1, LENGTH // 64, LENGTH, 1 << 20, (1 << 63) - 1, -(1 << 63)]
    indices = torch.tensor(keys)[torch.randint(0, len(keys), (LENGTH, 1, 3))]
    indices = indices if name == "topk" else indices[: LENGTH // 64, 0]
    entries = LENGTH // next(iter(tokens.values()))
    shown = [
        get_mask(name, indices=x, **tokens)._resolve(unread(SIZE, 0))
        for x in (indices, torch.where((indices < 0) | (indices >= entries), -1, indices))
    ]
    table = "chosen" if name == "topk" else "visible_blocks"
    assert shown[0][table].any()
    assert torch.equal(*(x[table] for x in shown))


def test_sizes_that_are_not_read_are_bounds() -> None:
    starts = torch.tensor([3, 9])
    size = Size(BATCH, 3, 100, 200, CPU, dtype=torch.float64, approximate=True)
    by_number, by_tensor = unread(size, 7), unread(size, starts)
    assert (by_number.q_offset, by_number.at_most, by_number.starts) == (7, (), None)
    assert (by_tensor.q_offset, by_tensor.at_most) == (200, ("S",))
    assert by_tensor.starts is starts
    for made in (by_number, by_tensor):
        assert not made.may_read
        for name in ("batch", "heads", "q_len", "kv_len", "device", "dtype", "approximate"):
            assert getattr(made, name) == getattr(size, name)


@pytest.mark.parametrize("name", MASKS)
def test_recorded_plans_hold_no_tensors_of_masks(name: str) -> None:
    """Nor the function, which may hold tensors."""
    mask = MASKS[name]()
    tensors = mask._tensors()
    memory = [weakref.ref(t.untyped_storage()) for t in tensors]
    recorded = RecordedPlan(SizedMask(mask, 0, SIZE, False, (128, 128)), tensors)
    other = MASKS[name]()
    got, want = recorded(other._tensors()), plan_bounds(SizedMask(other, 0, SIZE, False, (128, 128)))
    assert all(map(torch.equal, got.layout.indices, want.layout.indices))
    del mask, tensors
    gc.collect()
    assert memory
    assert all(ref() is None for ref in memory)


def test_recorded_plans_note_the_bounds_of_tables() -> None:
    """Compiled functions are checked by what tables of any values hold."""
    noted = 0
    for name in WITH_TENSORS:
        kind, tensors = _sized_mask(name, CPU)
        made = RecordedPlan(kind, tensors)(tensors)
        got, want = (
            [getattr(t, "bounds", None) for t in bounds.taken_apart(x.arguments)[1]] for x in (made, plan_bounds(kind))
        )
        assert got == want
        noted += len(got) - got.count(None)
    assert noted


def _sized_mask(name: str, device: torch.device, length: int = 1024) -> tuple[SizedMask, list[Tensor]]:
    """Return the example of a name, in the sizes that it suggests, and its tensors."""
    mask = on_device(example("mask", name, length), device)
    q_len, kv_len = (mask._implied_size(n) or mask._implied_size("S") or length for n in ("Q", "KV"))
    if name == "paged":
        kv_len = int(mask.params["page_table"].max() + 1) * mask.params["page_size"]
    size = Size(mask._implied_size("B") or 1, mask._implied_size("H") or 2, q_len, kv_len, device)
    return SizedMask(mask, 0, size, False, (64, 64)), mask._tensors()


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_recorded_plans_are_those_of_the_tensors(name: str) -> None:
    kind, tensors = _sized_mask(name, CPU)
    recorded = RecordedPlan(kind, tensors)
    for change in (torch.clone, torch.clone, lambda t: t.flip(0)):
        others = [change(t) for t in tensors]
        mask = replaced(kind.mask, zip(tensors, others, strict=True))
        got, want = recorded(others), plan_bounds(kind._replace(mask=mask))
        for x, y in zip(got.layout.indices, want.layout.indices, strict=True):
            assert torch.equal(x, y)
        assert got.arguments.keys() == want.arguments.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_TENSORS)
def test_captured_calls_of_every_mask(name: str) -> None:
    """A replay equals a call outside of the graph after each of 50 changes of the tensors in place."""
    kind, tensors = _sized_mask(name, torch.device("cuda"))
    size = kind.size
    q, k = (
        torch.randn(size.batch, size.heads, n, 32, device="cuda", dtype=torch.float16)
        for n in (size.q_len, size.kv_len)
    )
    contents = [[_changed(name, t, by) for t in tensors] for by in range(5)]
    graph, out = captured(lambda: flexmasks.attention(q, k, k, mask=kind.mask))
    for turn in range(50):
        for t, content in zip(tensors, contents[turn % 5], strict=True):
            t.copy_(content)
        graph.replay()
        want = flexmasks.attention(q, k, k, mask=kind.mask)
        assert torch.equal(out.isnan(), want.isnan())
        assert (out - want).abs().max() < 2e-2


def _changed(name: str, tensor: Tensor, by: int) -> Tensor:
    """Return other valid content of a tensor: whole numbers that are lower by at most `by`, or a part negated."""
    if tensor.dtype == torch.bool:
        changed = tensor.clone()
        changed.view(-1)[:by] = ~changed.view(-1)[:by]
        return changed
    fixed = (name == "paged" and tensor.ndim == 2) or (name == "bsr" and tensor[0] == 0 and tensor.ndim == 1)
    return tensor.clone() if fixed else (tensor - by).clamp(min=tensor.min())
