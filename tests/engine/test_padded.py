"""Lengths padded to tiles of kernels: the same outputs and gradients, and nothing reads the padding."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import TOLERANCE, error, exact, try_examples
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexmasks
from flexmasks.backends import flex, flex_kernels, padded
from flexmasks.spec.registry import example

LAYOUTS = "[B, H, S, D]", "[B, S, H, D]", "slices of one projection", "slices of a longer cache"


def laid_out(layout: str, heads: tuple[int, ...], lengths: tuple[int, ...], size: int, **made: Any) -> list[Tensor]:
    """Return random tensors of two batch elements with NaN around them, where a layout has a place for them."""
    if layout == "slices of one projection" and len(set(lengths)) == 1:
        whole = torch.randn(2, lengths[0], sum(heads), size, **made)
        return [x.transpose(1, 2) for x in whole.split(list(heads), 2)]
    tensors = []
    for n, length in zip(heads, lengths, strict=True):
        x = torch.randn(2, n, length, size, **made)
        if layout == "[B, S, H, D]":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "slices of a longer cache":
            x = F.pad(x, (0, 0, 7, 9), value=math.nan)[:, :, 7:-9]
        tensors.append(x)
    return tensors


def attend(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor] | None, block_mask: BlockMask, *others: Any
) -> tuple[Tensor, Tensor]:
    """Return what kernels of flex_attention compute: they ask the mask in partial blocks only."""
    grid = q.shape[2], k.shape[2]
    indices = torch.meshgrid(*(torch.arange(n) for n in (q.shape[0], q.shape[1], *grid)), indexing="ij")
    rows, columns = (torch.arange(n) // size for n, size in zip(grid, block_mask.BLOCK_SIZE, strict=True))
    full = dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)[:, :, rows][..., columns]
    partial = dense(block_mask.kv_num_blocks, block_mask.kv_indices)[:, :, rows][..., columns]
    visible = full | (partial & block_mask.mask_mod(*indices))
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
    if score_mod is not None:
        scores = score_mod(scores, *indices)
    scores = scores.masked_fill(~visible, -math.inf)
    weights = torch.where(visible.any(-1, keepdim=True), scores, 0).softmax(-1) * visible
    out = weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    # The output of the kernels is laid out like q.
    by_tokens = q.stride(1) < q.stride(2)
    out = out.transpose(1, 2).contiguous().transpose(1, 2) if by_tokens else out.contiguous()
    return out, scores.logsumexp(-1)


def dense(counts: Tensor | None, indices: Tensor | None) -> Tensor:
    assert counts is not None
    assert indices is not None
    listed = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool)
    places = torch.arange(indices.shape[-1]) < counts[..., None]
    listed.scatter_(-1, torch.where(places, indices, indices.shape[-1]).long(), True)
    return listed[..., :-1]


def test_padding_changes_nothing() -> None:
    """Outputs, lse and gradients are those of the formula; functions read tables of exactly the call's lengths."""

    def check(lengths: tuple[int, int], block_size: tuple[int, int], layout: str, score: str, seed: int) -> None:
        torch.manual_seed(seed)
        made: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
        q, k, v = laid_out(layout, (4, 2, 2), (lengths[0], lengths[1], lengths[1]), 8, **made)
        table, bias = torch.rand(2, *lengths) > 0.1, torch.randn(4, *lengths, dtype=torch.float64, requires_grad=True)
        table[:, :, -300:] |= torch.rand(()) > 0.5  # full blocks, also at the end
        blocks = create_block_mask(lambda b, h, i, j: table[b, i, j], 2, None, *lengths, "cpu", BLOCK_SIZE=block_size)
        changes: dict[str, Any] = {
            "": None,
            "bias": lambda score, b, h, i, j: score + bias[h, i, j],
            "NaN for zeros": lambda score, b, h, i, j: score + (score / score.abs()).detach(),
        }
        change = changes[score]
        longer = padded.for_whole_blocks(blocks)  # kernels read all tiles of a block
        assert all(n % size == 0 for n, size in zip(longer.seq_lengths, block_size, strict=True))
        out, lse = padded.with_padding(attend, q, k, v, change, longer)

        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = q @ keys.mT / math.sqrt(8)
        scores = {"": scores, "bias": scores + bias, "NaN for zeros": scores + scores.sign()}[score]
        scores = scores.masked_fill(~table[:, None], -math.inf)
        has_keys = table.any(-1)[:, None, :, None]
        wanted = F.softmax(torch.where(has_keys, scores, 0), -1) * has_keys @ values
        assert torch.allclose(out, wanted)
        assert lse is not None
        assert torch.allclose(lse, scores.logsumexp(-1))
        by_tokens = layout in LAYOUTS[1:3] and q.stride(1) < q.stride(2)
        assert (out.transpose(1, 2) if by_tokens else out).is_contiguous()
        learned = [q, k, v, bias] if score == "bias" else [q, k, v]
        gradient = torch.randn_like(out)
        found = torch.autograd.grad(out, learned, gradient)
        for x, y in zip(found, torch.autograd.grad(wanted, learned, gradient), strict=True):
            assert torch.allclose(x, y)

    lengths = st.tuples(st.integers(1, 400), st.integers(1, 400))
    same = st.integers(1, 400).map(lambda n: (n, n))
    scores = st.sampled_from(["", "bias", "NaN for zeros"])
    sizes = st.sampled_from([(128, 128), (256, 128), (64, 64), (192, 96), (128, 384)])
    try_examples(
        60, check, lengths | same, sizes, st.sampled_from(LAYOUTS), scores, st.integers(0, 1 << 30)
    )  # fmt: skip


@pytest.mark.parametrize("name", [entry.name for entry in flexmasks.list_masks()])
def test_blocks_are_never_full_where_tokens_end(name: str) -> None:
    """Padding relies on it: full blocks do not ask the mask."""
    mask = example("mask", name, 192)
    for block_size in (128, 80, (256, 128)):
        blocks = flexmasks.block_mask(
            mask, 192, batch=mask._implied_size("B"), heads=mask._implied_size("H"), block_size=block_size
        )
        full = dense(blocks.full_kv_num_blocks, blocks.full_kv_indices)
        assert not full[..., -1, :].any()
        assert not full[..., -1].any()


def test_padding_is_traced_for_any_length() -> None:
    """Lengths stay symbolic in the graph that kernels compile, also for lengths of q and k that differ."""
    torch._dynamo.reset()
    compiled = torch.compile(flex_kernels.flex, fullgraph=True, backend="eager")
    counts = []
    for lengths in [(300, 450), (430, 600), (733, 910), (1021, 130), (1500, 1300)]:
        q, k, v = (torch.randn(2, h, n, 8) for h, n in zip((4, 2, 2), (*lengths, lengths[1]), strict=True))
        ids = torch.randint(3, (2, max(lengths)))
        mask = lambda b, h, i, j, ids=ids: ids[b, i] == ids[b, j]  # noqa: E731
        blocks = padded.for_whole_blocks(create_block_mask(mask, 2, None, *lengths, "cpu"))
        before = counters["stats"]["unique_graphs"]
        out, _ = compiled(q, k, v, None, blocks, None, {}, False, ())
        counts.append(counters["stats"]["unique_graphs"] - before)
        visible = (ids[:, : lengths[0], None] == ids[:, None, : lengths[1]])[:, None]
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        assert error(out, F.scaled_dot_product_attention(q, keys, values, visible)) < 1e-5
    assert counts[0] == 1
    assert sum(counts[:3]) <= 3
    assert sum(counts[3:]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("score", [None, "alibi", "slopes"])
def test_replays_are_padded(score: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with new documents, which use earlier plans, are padded too, here on a CPU and without C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(flex, "_lengths", lambda call, chosen: "padded")
    monkeypatch.setattr(flex_kernels, "_as_stored", lambda score_mod: score_mod)  # as on a GPU
    lengths_of_kernels: list[tuple[int, int]] = []

    def noted(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        lengths_of_kernels.append((arguments[1].shape[2], arguments[2].shape[2]))
        return padded.with_padding(*arguments)

    monkeypatch.setattr(
        flex_kernels, "padded", types.SimpleNamespace(with_padding=noted, has_more_tokens=padded.has_more_tokens)
    )
    lengths = [300, 300, 300, 433, 433, 717, 650, 717]
    slopes = 2.0 ** -(torch.arange(1, 5) * 2.0)
    change = (lambda s, b, h, i, j: s + slopes[h] * (j - i)) if score == "slopes" else score
    for length in lengths:
        q, k, v = (torch.randn(2, h, length, 16) for h in (4, 2, 2))
        ids = torch.randint(3, (2, length)).cummax(1).values
        out = flexmasks.attention(q, k, v, mask="document", document_ids=ids, score=change, backend="flex")
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        distances = torch.arange(length) - torch.arange(length)[:, None]
        bias = slopes[:, None, None] * distances if score else torch.zeros(4, 1, 1)
        visible = ids[:, None, :, None] == ids[:, None, None, :]
        wanted = F.scaled_dot_product_attention(q, keys, values, bias.masked_fill(~visible, -math.inf))
        assert error(out, wanted) < TOLERANCE[torch.float32]
    assert [int(n) for n, _ in lengths_of_kernels] == lengths


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(1061, 1061), (1030, 300), (1024, 2047), (1153, 1152)])
@pytest.mark.parametrize("form", ["documents", "key_padding", "table", "window", "learned bias", "nothing"])
def test_padded_calls(form: str, lengths: tuple[int, int], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, scores that learn and lse of calls that kernels get padded, against float64."""
    monkeypatch.setattr(flex, "_LEAST_PADDED", (1024, 0))
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = laid_out(layout, (4, 2, 2), (lengths[0], lengths[1], lengths[1]), 64, **made)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    bias = (torch.randn(4, *lengths, device="cuda") / 2).requires_grad_()
    ids = torch.arange(max(lengths), device="cuda").expand(2, -1) // 190 % 3
    shown, table = torch.rand(2, lengths[1], device="cuda") > 0.2, torch.rand(2, *lengths, device="cuda") > 0.3
    visible = torch.ones(2, *lengths, dtype=torch.bool, device="cuda")
    call: dict[str, Any] = {"mask": None}
    if form == "documents":
        call = {"mask": "document", "document_ids": ids}
        visible = ids[:, : lengths[0], None] == ids[:, None, : lengths[1]]
    elif form == "key_padding":
        call, visible = {"mask": "key_padding", "attention_mask": shown}, shown[:, None].expand_as(visible)
    elif form == "table":
        call, visible = {"mask": lambda b, h, i, j: table[b, i, j]}, table
    elif form == "window":
        i, j = (torch.arange(n, device="cuda") for n in lengths)
        call = {"mask": "sliding_window", "window": 100}
        visible = ((i[:, None] >= j) & (i[:, None] - j <= 100)).expand_as(visible)
    elif form == "learned bias":
        call = {"mask": "key_padding", "attention_mask": shown, "score": lambda s, b, h, i, j: s + bias[h, i, j]}
        visible = shown[:, None].expand_as(visible)
    out, lse = flexmasks.attention(q, k, v, backend="flex", return_lse=True, **({"q_offset": 0} | call))
    learned = [q, k, v, bias] if form == "learned bias" else [q, k, v]
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, learned, gradient)

    true = [exact(x) for x in learned]
    keys, values = (x.repeat_interleave(2, 1) for x in true[1:3])
    scores = true[0] @ keys.mT / 8 + (true[3] if form == "learned bias" else 0)
    scores = scores.masked_fill(~visible[:, None].cpu(), -math.inf)
    wanted = scores.softmax(-1).nan_to_num(0.0) @ values
    assert error(out, wanted) < TOLERANCE[torch.bfloat16]
    assert torch.allclose(lse.double().cpu(), scores.logsumexp(-1), atol=2e-2)
    assert out.is_contiguous() or out.transpose(1, 2).is_contiguous()
    for x, y in zip(found, torch.autograd.grad(wanted, true, gradient.double().cpu()), strict=True):
        assert error(x, y) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [(256, 256), (256, 128), (128, 256), (512, 512)])
@pytest.mark.parametrize("form", ["all", "causal", "table"])
def test_nothing_is_read_behind_blocks_that_lengths_cut(form: str, block_size: tuple[int, int]) -> None:
    """NaN that follows the tokens in memory reaches neither outputs nor gradients of a user's BlockMask."""
    n = 1152
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    longer = (torch.full((n + 512, 64), math.nan, **made) for _ in range(3))
    q, k, v = (x[:n].normal_()[None, None].requires_grad_() for x in longer)
    table = torch.rand(n, n, device="cuda") > 0.3
    masks: dict[str, Callable[..., Tensor]] = {
        "all": lambda b, h, i, j: i + j >= 0,
        "causal": lambda b, h, i, j: i >= j,
        "table": lambda b, h, i, j: table[i, j],
    }
    blocks = create_block_mask(masks[form], None, None, n, n, "cuda", BLOCK_SIZE=block_size)
    out = flexmasks.attention(q, k, v, mask=blocks, backend="flex")
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), gradient)

    indices = torch.arange(n, device="cuda")
    visible = masks[form](0, 0, indices[:, None], indices[None, :]).cpu()
    true = [exact(x) for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*true, visible)
    assert error(out, wanted) < TOLERANCE[torch.bfloat16]
    for x, y in zip(found, torch.autograd.grad(wanted, true, gradient.double().cpu()), strict=True):
        assert error(x, y) < 2 * TOLERANCE[torch.bfloat16]
