"""Code of users of flexmasks 0.1 keeps working: imports, pickles, registered masks.

`data/pickles_0_1.json` was written by flexmasks 0.1.0: the pickles of the values below, by name, in base64.
"""

from __future__ import annotations

import base64
import functools
import importlib
import inspect
import json
import pickle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flexmasks

LENGTH, BATCH, HEADS = 16, 2, 2
PICKLES = json.loads((Path(__file__).parent / "data/pickles_0_1.json").read_text())


def near(
    b: Any, h: Any, q: Any, kv: Any, *, window: Annotated[int | Tensor, "int in 0.. | int[]"], more: int = 0
) -> Any:
    return (q - kv).abs() <= window + more


def of_documents(b: Any, h: Any, q: Any, kv: Any, *, ids: Annotated[Tensor, "int[S] | int[B, S]"]) -> Any:
    return ids[q] == ids[kv]


def scaled(score: Any, b: Any, h: Any, q: Any, kv: Any, *, factors: Annotated[Tensor, "float[H]"]) -> Any:
    return score * factors[h]


IDS = torch.tensor([0] * 5 + [1] * 7 + [3] * 4)
OFFSETS = torch.tensor([0, 6, 6, 16])
MASKS: dict[str, flexmasks.Mask] = {
    "no parameters": flexmasks.get_mask("causal"),
    "a number": flexmasks.get_mask("sliding_window", window=5),
    "a number in a tensor": flexmasks.get_mask("sliding_window", window=torch.tensor(5)),
    "a list": flexmasks.get_mask("document", document_ids=IDS.tolist()),
    "a NumPy array": flexmasks.get_mask("padding", seq_lens=np.array([3, 16])),
    "a tensor": flexmasks.get_mask("document", document_ids=IDS),
    "tuples of numbers": flexmasks.get_mask("natten", height=4, width=4, kernel=(3, 2), causal=(True, False)),
    "and": flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=IDS),
    "and, or, not": flexmasks.get_mask("causal") & ~flexmasks.get_mask("local", left=2, right=0)
    | flexmasks.get_mask("padding", seq_lens=[2, 4]),
    "packed": flexmasks.packed("causal", OFFSETS),
    "packed, with a mask of parameters": flexmasks.packed(flexmasks.get_mask("sliding_window", window=3), OFFSETS),
    "paged": flexmasks.paged(flexmasks.get_mask("causal"), torch.tensor([[0, 2], [3, 1]]), torch.tensor([7, 5]), 4),
    "a function": flexmasks.get_mask(near, window=2),
    "a function with a tensor": flexmasks.get_mask(of_documents, ids=IDS),
    "a partial function": flexmasks.get_mask(functools.partial(near, more=1), window=2),
    "a function and a name": flexmasks.get_mask(near, window=2) & flexmasks.get_mask("causal"),
}
Scores = flexmasks.Score | list[flexmasks.Score]
SCORES: dict[str, Scores] = {
    "no parameters": flexmasks.get_score("checkerboard"),
    "a number": flexmasks.get_score("softcap", cap=2.0),
    "a tensor": flexmasks.get_score("alibi", slopes=torch.tensor([0.5, 0.25])),
    "a list": flexmasks.get_score("temperature", temperatures=[2.0, 3.0]),
    "packed": flexmasks.packed(flexmasks.get_score("alibi"), OFFSETS),
    "a function": flexmasks.get_score(scaled, factors=torch.tensor([0.5, 3.0])),
    "a chain": [
        flexmasks.get_score("alibi", slopes=torch.tensor([0.5, 0.25])),
        flexmasks.get_score("softcap", cap=2.0),
    ],
}


def _unpickled(kind: str, name: str) -> Any:
    return pickle.loads(base64.b64decode(PICKLES[kind][name]))


def test_every_pickle_is_tried() -> None:
    assert {kind: set(pickles) for kind, pickles in PICKLES.items()} == {"mask": set(MASKS), "score": set(SCORES)}


@pytest.mark.parametrize("name", MASKS)
def test_old_pickles_of_masks(name: str) -> None:
    old, new = _unpickled("mask", name), MASKS[name]
    assert type(old) is flexmasks.Mask
    assert repr(old) == repr(new)
    if "partial" not in name:  # a pickle makes a new partial function, which equals no other
        assert old == new
        assert hash(old) == hash(new)
    seen, want = (flexmasks.dense_mask(m, LENGTH, batch=BATCH, heads=HEADS) for m in (old, new))
    assert torch.equal(seen, want)
    blocks = flexmasks.block_mask(old, LENGTH, batch=BATCH, heads=HEADS, block_size=4)
    wanted_blocks = flexmasks.block_mask(new, LENGTH, batch=BATCH, heads=HEADS, block_size=4)
    assert torch.equal(blocks.to_dense(), wanted_blocks.to_dense())
    again = pickle.loads(pickle.dumps(old))
    assert torch.equal(flexmasks.dense_mask(again, LENGTH, batch=BATCH, heads=HEADS), want)


@pytest.mark.parametrize("name", SCORES)
def test_old_pickles_of_scores(name: str) -> None:
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, 8)
    old, new = _unpickled("score", name), SCORES[name]
    assert type(old) is flexmasks.Score
    outs = [flexmasks.attention(q, k, v, mask="causal", score=s, backend="reference") for s in (old, new)]
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], flexmasks.attention(q, k, v, mask="causal", backend="reference"))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "flexmasks",
            "attention block_mask dense_mask explain paged_attention varlen_attention cache_info clear_caches packed "
            "paged Picture draw show get_mask get_score list_masks list_scores register_mask register_score "
            "masked_softmax scaled_masked_softmax Mask Score",
        ),
        ("flexmasks.orders", "morton_order tile_order inverse_order"),
        ("flexmasks.params", "Size per_batch at always bounded pair"),
        ("flexmasks.dense", "Band"),
        ("flexmasks.registry", "register_mask register_score get_mask get_score list_masks list_scores"),
        ("flexmasks.values", "Mask Score"),
        ("flexmasks.timing", "interleaved"),
    ],
)
def test_former_imports(module: str, names: str) -> None:
    package = Path(flexmasks.__file__).parent
    former = importlib.import_module(module)
    for name in names.split():
        value = getattr(former, name)
        assert Path(inspect.getfile(value)).is_relative_to(package), name
        assert value is getattr(flexmasks, name, value)


def test_a_mask_registered_as_before() -> None:
    from flexmasks.dense import Band
    from flexmasks.params import Size
    from flexmasks.registry import register_mask

    def prepare(size: Size | None, *, reach: Annotated[int, "int in 0.."]) -> dict[str, Any]:
        assert isinstance(size, Size)
        assert (size.q_len, size.positions) == (LENGTH, LENGTH)
        return {"twice": 2 * reach}

    @register_mask(
        name="as_before",
        example=lambda length: {"reach": length // 8},
        prepare=prepare,
        dense=lambda size, reach: Band(left=2 * reach, right=0),
    )
    def as_before(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, twice: int) -> Tensor:
        """Keys up to the query, twice `reach` back."""
        return (q >= kv) & (q - kv <= twice)

    q, k, v = torch.randn(3, 1, HEADS, LENGTH, 8)
    want = flexmasks.dense_mask("sliding_window", LENGTH, window=4)
    assert torch.equal(flexmasks.dense_mask("as_before", LENGTH, reach=2), want)
    out = flexmasks.attention(q, k, v, mask="as_before", reach=2, backend="reference")
    wanted = flexmasks.attention(q, k, v, mask="sliding_window", window=4, backend="reference")
    assert torch.allclose(out, wanted, atol=1e-5)


def test_a_mask_that_holds_a_mask_registered_as_before() -> None:
    from dataclasses import replace

    from flexmasks.params import Size

    def halved(size: Size, **params: Any) -> Size:
        return replace(size, q_len=size.q_len // 2, kv_len=size.kv_len // 2)

    @flexmasks.register_mask(inner_size=halved)
    def of_pairs(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, inner: flexmasks.Mask) -> Tensor:
        """The inner mask at pairs of tokens."""
        seen: Tensor = inner(b, h, q // 2, kv // 2)
        return seen

    mask = flexmasks.get_mask("of_pairs", inner=flexmasks.get_mask("document", document_ids=[0, 0, 1, 1]))
    want = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool()
    assert torch.equal(flexmasks.dense_mask(mask, 8)[0, 0], want)


def test_a_mask_that_is_causal_by_its_band() -> None:
    from flexmasks.dense import Band

    @flexmasks.register_mask(dense=lambda size: Band(right=0))
    def up_to_here(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Keys up to the query."""
        return q >= kv

    q, k, v = torch.randn(3, 1, HEADS, LENGTH, 8)
    assert flexmasks.explain(q, k, v, mask="up_to_here").backend == "sdpa"
    out = flexmasks.attention(q, k, v, mask="up_to_here")
    assert torch.equal(out, flexmasks.attention(q, k, v, mask="causal"))
