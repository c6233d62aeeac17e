"""The types of calls, which mypy checks; it reports an `ignore` where a call that must be refused is not."""

from __future__ import annotations

from typing import assert_type

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flexmasks
from flexmasks import masks, scores
from flexmasks.masks import causal, document, sliding_window
from flexmasks.scores import alibi, softcap

Pair = tuple[Tensor, Tensor]


def of_attention(q: Tensor, sure: bool) -> None:
    assert_type(flexmasks.attention(q, q, q, mask="causal"), Tensor)
    assert_type(flexmasks.attention(q, q, q, mask=flexmasks.plan("causal", 3)), Tensor)
    assert_type(flexmasks.attention(q, q, q, mask="sliding_window", window=3, return_lse=False), Tensor)
    assert_type(flexmasks.attention(q, q, q, score=["alibi", "softcap"], cap=3.0, return_lse=True), Pair)
    assert_type(flexmasks.attention(q, q, q, return_lse=sure), Tensor | Pair)
    flexmasks.attention(q, q, q, scale="1")  # type: ignore[call-overload]
    out, lse = flexmasks.attention(q, q, q, mask=lambda b, h, q, kv: q >= kv, return_lse=True)
    out = flexmasks.attention(out, q, q) + lse.mean()


def of_weights(q: Tensor) -> None:
    assert_type(flexmasks.weights(q, q, mask="sliding_window", window=3, rows=slice(-2, None)), Tensor)
    assert_type(flexmasks.weights(q, q, heads=[1], topk=2), flexmasks.TopKeys)
    assert_type(flexmasks.key_sums(q, q, mask=flexmasks.plan("causal", 3), rows=-1), Tensor)
    flexmasks.weights(q, q, topk="2")  # type: ignore[call-overload]


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


def of_masks(q: Tensor, ids: Tensor) -> None:
    assert_type(causal(), flexmasks.Mask)
    assert_type(causal() & document(document_ids=ids) | ~sliding_window(window=3), flexmasks.Mask)
    for given in (
        document(document_ids=[0, 0, 1]),
        document(document_ids=[[0, 1], [0, 0]]),
        document(document_ids=ids),
    ):
        flexmasks.attention(q, q, q, mask=given)
    sliding_window(window=ids)
    masks.natten(height=8, width=8, kernel=(3, 5), causal=(True, False), order=None)
    masks.natten(height=8, width=8, kernel=3, order=[0, 1])
    masks.block_sparse(visible_blocks=[[True, False]], block=(128, 64))
    masks.key_padding(attention_mask=[[1, 0]])
    assert_type(masks.packed("causal", [0, 3]), flexmasks.Mask)
    assert_type(masks.paged("causal", q, q, 16), flexmasks.Mask)


def of_questions() -> None:
    assert_type(flexmasks.compare("causal", causal(), 64), flexmasks.Comparison)
    proof = flexmasks.compare("causal", "sliding_window", lengths="all", parameters={"window": ("q_len", None)})
    assert_type(proof, flexmasks.Proof)
    assert_type(flexmasks.check("document", lengths="all", document_ids=[0, 1]), flexmasks.Findings)


def of_scores(q: Tensor) -> None:
    assert_type(softcap(cap=30), flexmasks.Score)
    flexmasks.attention(q, q, q, score=[alibi(slopes=[0.5, 0.25]), scores.softcap(cap=30.0, exact=True)])
    assert_type(scores.packed(alibi(), [0, 3]), flexmasks.Score)


def refused(ids: Tensor) -> None:
    causal(3)  # type: ignore[call-arg]
    sliding_window()  # type: ignore[call-arg]
    sliding_window(1024)  # type: ignore[call-arg]
    sliding_window(windw=1024)  # type: ignore[call-arg]
    sliding_window(window="wide")  # type: ignore[arg-type]
    document(document_ids=3)  # type: ignore[arg-type]
    document(document_ids=["a"])  # type: ignore[arg-type]
    masks.natten(height=8, width=8, kernel=(3, 5, 7))  # type: ignore[arg-type]
    masks.natten(height=8, width=8, kernel=3, order="tiles")  # type: ignore[arg-type]
    softcap(cap="wide")  # type: ignore[arg-type]
    masks.chain()  # type: ignore[attr-defined]
