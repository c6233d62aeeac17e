"""What people hold is taken: tensors as SDPA takes them, lists, plans and torch's BlockMask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import one_in
from hypothesis import given
from hypothesis import strategies as st
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flexmasks

B, H, Q, KV = 2, 3, 5, 9
SHAPES = [
    (Q, KV), (1, KV), (H, Q, KV), (1, Q, KV), (H, 1, KV), (B, 1, 1, KV), (1, 1, 1, KV), (B, 1, Q, KV), (1, H, Q, KV),
    (B, H, Q, KV), (B, H, 1, KV), (1, 1, Q, KV),
]  # fmt: skip


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, Q, 8, dtype=dtype), *torch.randn(2, B, H, KV, 8, dtype=dtype)


def expected(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, added: Tensor | float = 0.0) -> Tensor:
    """The formula, with 0 for rows that see nothing."""
    scores = q @ k.mT * q.shape[-1] ** -0.5 + added
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * visible
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_booleans(shape: tuple[int, ...], backend: str) -> None:
    q, k, v = tensors(torch.float32 if backend == "auto" else torch.float64)
    visible = torch.rand(shape) > 0.4
    visible[..., 0] = True
    got = flexmasks.attention(q, k, v, mask=visible, backend=backend)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, visible), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_floats_are_added_and_learn(shape: tuple[int, ...]) -> None:
    q, k, v = tensors()
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    got = flexmasks.attention(q, k, v, score=bias)
    want = F.scaled_dot_product_attention(q, k, v, bias)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(got)
    for mine, theirs in zip(*(torch.autograd.grad((x * weight).sum(), bias) for x in (got, want)), strict=True):
        torch.testing.assert_close(mine, theirs)


@given(st.data())
def test_lists(data: st.DataObject) -> None:
    """All masks of a list must show a key; scores change one after another; parameters go where they belong."""
    table = torch.rand(Q, KV) > 0.3
    rows, keys = torch.arange(Q)[:, None] + KV - Q, torch.arange(KV)
    choices: dict[str, tuple[Any, Tensor]] = {
        "table": (table, table),
        "causal": ("causal", rows >= keys),
        "window": ("sliding_window", (rows >= keys) & (rows - keys <= 3)),
        "value": (~flexmasks.get_mask("causal"), rows < keys),
        "function": (lambda b, h, q, kv: kv % 3 != h, (keys % 3 != torch.arange(H)[:, None])[:, None]),
    }
    names = data.draw(st.lists(st.sampled_from(sorted(choices)), min_size=1, max_size=4, unique=True))
    visible = torch.ones(B, H, Q, KV, dtype=torch.bool)
    for name in names:
        visible = visible & choices[name][1]
    bias, (q, k, v) = torch.randn(Q, KV, dtype=torch.float64), tensors()
    params: Any = {"window": 3} if "window" in names else {}
    masks = [choices[name][0] for name in names]
    scores = [bias, lambda s, b, h, q, kv: s * 2]
    got = flexmasks.attention(q, k, v, mask=masks, score=scores, q_offset="last", backend="reference", **params)
    scaled = expected(q, k, v, visible, q @ k.mT * q.shape[-1] ** -0.5 + 2 * bias)
    torch.testing.assert_close(got, scaled)


@pytest.mark.usefixtures("quick_kernels")
def test_blocks() -> None:
    """torch's BlockMask as the mask, and those of this library."""
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torchs = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device="cpu")
    for mask in (torchs, flexmasks.block_mask("causal", 256), flexmasks.plan("causal", 256)):
        with torch.no_grad():
            torch.testing.assert_close(flexmasks.attention(q, k, v, mask=mask), want, atol=1e-5, rtol=1e-5)
    assert flexmasks.explain(q, k, v, mask=torchs).plan == flexmasks.explain(q, k, v, block_mask=torchs).plan


def test_other_calls() -> None:
    table = torch.rand(Q, KV) > 0.5
    assert torch.equal(flexmasks.dense_mask(table, Q, KV)[0, 0], table)
    assert torch.equal(flexmasks.plan(table, Q, KV).mask.params["visible"], table)
    assert flexmasks.block_mask(table, Q, KV, block_size=1).sparsity() == pytest.approx(
        100 * (1 - table.float().mean())
    )


def test_inside_compile() -> None:
    q, k, v = tensors(torch.float32)
    table, bias = torch.rand(B, 1, 1, KV) > 0.3, torch.randn(H, Q, KV)
    call = torch.compile(flexmasks.attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = call(q, k, v, mask=[table, "full"], score=bias)
    want = F.scaled_dot_product_attention(q, k, v, torch.where(table, bias, -torch.inf))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "floats as a mask": (lambda: flexmasks.attention(*tensors(), mask=torch.randn(Q, KV)), "score=m"),
    "booleans as a score": (
        lambda: flexmasks.attention(*tensors(), score=torch.ones(Q, KV) > 0),
        "a dense mask `m` is",
    ),
    "whole numbers": (lambda: flexmasks.attention(*tensors(), mask=torch.ones(Q, KV).int()), "where 0 is hidden"),
    "other keys": (lambda: flexmasks.attention(*tensors(), mask=torch.ones(Q, KV + 1) > 0), "`visible` must be"),
    "other heads": (lambda: flexmasks.attention(*tensors(), mask=torch.ones(H + 1, Q, KV) > 0), "`visible` must be"),
    "too few rows": (lambda: flexmasks.attention(*tensors(), mask=torch.ones(2, KV) > 0, q_offset=0), "a row for each"),
    "one row of keys": (lambda: flexmasks.attention(*tensors(), mask=torch.ones(KV) > 0), "a dense mask `m` is"),
    "a list with a BlockMask": (
        lambda: flexmasks.attention(*tensors(), mask=["causal", flexmasks.block_mask("causal", Q)], q_offset=0),
        "it is `block_mask=` of",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize("kv_heads", one_in(2, [1, 2, 4]))
def test_layout(kv_heads: int) -> None:
    """[B, S, H, D] in and out, with the lse [B, H, Q], gradients, and blocks."""
    q = torch.randn(2, 30, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 30, kv_heads, n, dtype=torch.float64, requires_grad=True) for n in (8, 6))
    out, lse = flexmasks.attention(q, k, v, mask="causal", layout="bshd", return_lse=True)
    moved = [x.transpose(1, 2) for x in (q, k, v)]
    want, want_lse = flexmasks.attention(*moved, mask="causal", return_lse=True)
    assert out.shape == (2, 30, 4, 6)
    torch.testing.assert_close((out, lse), (want.transpose(1, 2), want_lse))
    for mine, theirs in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want)), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert flexmasks.explain(q, k, v, mask="causal", layout="bshd").backend
    compiled = torch.compile(flexmasks.attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, mask="causal", layout="bshd"), out)


def test_layouts_that_do_not_fit() -> None:
    x = torch.randn(2, 30, 4, 8)
    with pytest.raises(ValueError, match="'bhsd' or 'bshd', got 'thd'"):
        flexmasks.attention(x, x, x, layout="thd")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="'bhsd' or 'bshd', got 'thd'"):
        flexmasks.explain(x, x, x, layout="thd")
    with pytest.raises(ValueError, match=r"need layout='bshd'"):
        flexmasks.attention(x[:, :20], x, x, mask="full")


@pytest.mark.slow
def test_names_of_flash_attn() -> None:
    q, k, v = torch.randn(3, 50, 2, 8)
    lengths = {"cu_seqlens_q": [0, 20, 50], "cu_seqlens_k": [0, 20, 50], "max_seqlen_q": 30, "max_seqlen_k": 30}
    out = flexmasks.varlen_attention(q, k, v, mask="causal", q_offset="last", **lengths)
    torch.testing.assert_close(out, flexmasks.varlen_attention(q, k, v, [0, 20, 50], mask="causal"))
    with pytest.raises(TypeError, match="`cu_seqlens_q` is `offsets` by another name"):
        flexmasks.varlen_attention(q, k, v, [0, 50], cu_seqlens_q=[0, 50])
    with pytest.raises(TypeError, match="pass `offsets`"):
        flexmasks.varlen_attention(q, k, v)
    with pytest.raises(ValueError, match="`max_length` is 20, but a sequence has 30"):
        flexmasks.varlen_attention(q, k, v, [0, 20, 50], mask="causal", max_seqlen_q=20)
