"""Masks and scores for some of their batch elements, as torch's pipelines and pytrees ask for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import arguments, spread
from oracles import MASK_CASES, Case
from torch import Tensor
from torch.utils import _pytree as pytree

import flexmasks
from flexmasks import Mask

microbatch = pytest.importorskip("torch.distributed.pipelining.microbatch", reason="torch was built without processes")

BATCH, LENGTH = 4, 30
IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) // 7
OPEN = torch.rand(BATCH, 2, LENGTH) > 0.5
_READING = flexmasks.get_mask(lambda b, h, q, kv: (IDS[b, q] == IDS[b, kv]) & OPEN[b, h, kv])
_BY_NUMBER = flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) | (b % 2 == 0))
_DOCUMENTS = flexmasks.get_mask("document", document_ids=IDS)


def split(chunks: int, **given: Any) -> list[dict[str, Any]]:
    """Return what each microbatch gets."""
    found: list[dict[str, Any]] = microbatch.split_args_kwargs_into_chunks((torch.randn(BATCH, 1),), given, chunks)[1]
    return found


def dense(mask: Mask, batch: int) -> Tensor:
    return flexmasks.dense_mask(mask, LENGTH, batch=batch, heads=2).expand(batch, 2, LENGTH, LENGTH)


@pytest.mark.parametrize(
    ("mask", "is_split"),
    [
        (flexmasks.get_mask("causal") & _DOCUMENTS, True),
        (~flexmasks.get_mask("padding", kv_lens=[3, 9, 30, 20]), True),
        (_READING, True),
        (_DOCUMENTS | _BY_NUMBER, True),  # the ids say how many batch elements the function is for
        (flexmasks.get_mask("document", document_ids=IDS[0]) & (lambda b, h, q, kv: OPEN[0, h, kv]), False),
        (flexmasks.packed("padding", [0, 10, 30], kv_lens=[3, 4]), False),  # its batch elements are sequences
    ],
    ids=["ids", "list", "function", "number and ids", "shared", "packed"],
)
def test_microbatches_get_their_batch_elements(mask: Mask, is_split: bool) -> None:
    parts = [part["mask"] for part in split(2, mask=mask, other=3)]
    assert torch.equal(torch.cat([dense(part, 2) for part in parts]), dense(mask, BATCH))
    assert [part is mask for part in parts] == [not is_split] * 2


def _parts(case: Case, value: Mask, offset: Any) -> list[tuple[Mask, Any, Tensor]]:
    leaf = pytree.tree_leaves(value)[0]
    if not isinstance(leaf, Tensor):
        return []
    rows = torch.randperm(case.batch).chunk(2)
    taken = [pytree.tree_map(lambda x, r=r: x[r], value) for r in rows]
    return [(x, (offset[r] if isinstance(offset, Tensor) else offset), r) for x, r in zip(taken, rows, strict=True)]


def test_every_mask() -> None:
    """In any order of batch elements."""
    tried = Counter[bool]()
    for case in spread([case for case in MASK_CASES if case.batch > 1], 2):
        given = arguments(case)
        offset = given.pop("q_offset")
        mask = flexmasks.get_mask(case.name, **given)
        whole = flexmasks.dense_mask(mask, case.q_len, case.kv_len, batch=case.batch, heads=case.heads, q_offset=offset)
        whole = whole.expand(case.batch, case.heads, -1, -1)
        parts = _parts(case, mask, offset)
        for part, start, rows in parts:
            got = flexmasks.dense_mask(part, case.q_len, case.kv_len, batch=len(rows), heads=case.heads, q_offset=start)
            assert torch.equal(got.expand(len(rows), case.heads, -1, -1), whole[rows]), case
        tried[bool(parts)] += 1
    assert tried[True] > 10


def test_functions_that_nothing_can_be_said_of() -> None:
    assert split(1, mask=_BY_NUMBER)[0]["mask"] is _BY_NUMBER
    with pytest.raises(ValueError, match=r"in a way of its own cannot be split .*`ids\[b, q\]`"):
        split(2, mask=_BY_NUMBER)
    with pytest.raises(ValueError, match="cannot be split"):
        pytree.tree_map(lambda x: x[:2], _BY_NUMBER)


def test_trees_hold_whole_masks() -> None:
    """What maps tensors or looks at all leaves, as FSDP and torch.func do, leaves masks as they are."""
    for value in (_DOCUMENTS, _READING, _BY_NUMBER, flexmasks.get_score("alibi")):
        tree = {"x": torch.randn(2), "value": value}
        assert pytree.tree_map_only(Tensor, lambda x: x.clone(), tree)["value"] is value
        assert pytree.tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, tree)["value"] is value
        said = pytree.tree_map(lambda _: "said", tree)
        assert pytree.tree_leaves(said) == ["said"] * 2
    q = torch.randn(BATCH, 2, LENGTH, 8)
    want = flexmasks.attention(q, q, q, mask=_DOCUMENTS, backend="reference")

    def call(q: Tensor, mask: Mask) -> Tensor:
        return flexmasks.attention(q, q, q, mask=mask, backend="reference")

    torch.testing.assert_close(torch.func.vmap(call, (0, None))(q[None], _DOCUMENTS)[0], want)
    grad = torch.func.grad(lambda q, mask: call(q, mask).sum())(q, _DOCUMENTS)
    assert grad.shape == q.shape


def test_scores() -> None:
    table = torch.randn(BATCH, 2, LENGTH, requires_grad=True)
    score = flexmasks.get_score(lambda score, b, h, q, kv: score + table[b, h, kv])
    q = torch.randn(BATCH, 2, LENGTH, 8)
    want = flexmasks.attention(q, q, q, score=score, backend="reference")
    parts = [part["score"] for part in split(2, score=score)]
    got = torch.cat(
        [flexmasks.attention(*[x] * 3, score=s, backend="reference") for x, s in zip(q.chunk(2), parts, strict=True)]
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), table)[0] for x in (got, want)))
