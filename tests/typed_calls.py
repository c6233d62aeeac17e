"""The types of calls, which mypy checks: attention gives a tensor, and a pair of tensors with `return_lse=True`."""

from __future__ import annotations

from typing import assert_type

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flexmasks

Pair = tuple[Tensor, Tensor]


def of_attention(q: Tensor, sure: bool) -> None:
    assert_type(flexmasks.attention(q, q, q, mask="causal"), Tensor)
    assert_type(flexmasks.attention(q, q, q, mask="sliding_window", window=3, return_lse=False), Tensor)
    assert_type(flexmasks.attention(q, q, q, score=["alibi", "softcap"], cap=3.0, return_lse=True), Pair)
    assert_type(flexmasks.attention(q, q, q, return_lse=sure), Tensor | Pair)
    flexmasks.attention(q, q, q, scale="1")  # type: ignore[call-overload]
    out, lse = flexmasks.attention(q, q, q, mask=lambda b, h, q, kv: q >= kv, return_lse=True)
    out = flexmasks.attention(out, q, q) + lse.mean()


def of_sequences(q: Tensor, sure: bool) -> None:
    assert_type(flexmasks.varlen_attention(q, q, q, [0, 3]), Tensor)
    assert_type(flexmasks.varlen_attention(q, q, q, q, [0, 3], return_lse=True), Pair)
    assert_type(flexmasks.varlen_attention(q, q, q, [0, 3], return_lse=sure), Tensor | Pair)


def of_pages(q: Tensor, sure: bool) -> None:
    assert_type(flexmasks.paged_attention(q, q, q, q, q, mask="causal"), Tensor)
    assert_type(flexmasks.paged_attention(q, q, q, q, q, return_lse=True), Pair)
    assert_type(flexmasks.paged_attention(q, q, q, q, q, return_lse=sure), Tensor | Pair)


def of_others(q: Tensor) -> None:
    assert_type(flexmasks.block_mask("causal", 8), BlockMask)
    assert_type(flexmasks.dense_mask("causal", 8), Tensor)
    assert_type(flexmasks.masked_softmax(q, mask="causal"), Tensor)
    assert_type(flexmasks.scaled_masked_softmax(q, q), Tensor)
    assert_type(flexmasks.get_mask("causal") & "padding", flexmasks.Mask)
    assert_type(flexmasks.packed("sliding_window", [0, 3], window=2), flexmasks.Mask)
    assert_type(flexmasks.packed(flexmasks.get_score("alibi"), [0, 3]), flexmasks.Score)
    assert_type(flexmasks.paged(lambda b, h, q, kv: q >= kv, q, q, 16), flexmasks.Mask)
    assert_type(flexmasks.paged(flexmasks.get_score("alibi"), q, q, page_size=16), flexmasks.Score)
    assert_type(flexmasks.draw("causal"), flexmasks.Picture)
    assert_type(flexmasks.__version__, str)
