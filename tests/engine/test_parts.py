"""Masks and scores of a part of a call, and of rows that are parts of sequences, beside those of the whole call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexmasks
from flexmasks import get_mask, get_score
from flexmasks.spec.bands import band_of, cap_of, factors_of
from flexmasks.spec.parameters import Size
from flexmasks.spec.parts import PartOfCall, part_of, rows_of
from flexmasks.spec.structure import flatten
from flexmasks.spec.values import Mask, Modifier, Score

CPU = torch.device("cpu")
BATCH, HEADS, LENGTH = 3, 4, 12


def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q * 5 + kv * 3 + b + 3 * h) % 4 < 2


def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score * (1 + b) + 7 * h - q * 0.5 + kv * 0.25


IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) // 5
VALUES: dict[str, Mask | Score] = {
    "mask": get_mask(visible),
    "document": get_mask("document", document_ids=IDS) & get_mask("causal"),
    "prefix_lm": get_mask("prefix_lm", prefix_len=[3, 5, 9]),
    "score": get_score(change),
    "alibi": get_score("alibi", slopes=[1.0, 0.5, 0.25, 0.125]),
    "bias": get_score("dense_bias", bias=torch.rand(BATCH, HEADS, LENGTH, LENGTH)),
}


def evaluated(value: Modifier, batch: int, heads: int, queries: Tensor, keys: int, **more: Any) -> Tensor:
    """Return the mask, or the changed scores, of queries of some positions; scores are 1 before the change.

    queries: positions int[Q], or int[B, Q].
    """
    q_len = queries.shape[-1]
    size = Size(batch, heads, q_len, keys, CPU, **({"q_offset": int(queries.max()) + 1 - q_len} | more))
    b, h, _, kv = torch.meshgrid(*map(torch.arange, (batch, heads, q_len, keys)), indexing="ij")
    indices = b, h, queries.view(-1, 1, q_len, 1).expand_as(b), kv
    function = value._bind(value._resolve(size))
    result = function(*indices) if value._kind == "mask" else function(torch.ones(b.shape), *indices)
    return result.expand_as(b)


# --- parts of a call ---


@pytest.mark.parametrize("name", VALUES)
def test_a_part_is_a_slice_of_the_whole(name: str) -> None:
    value, positions = VALUES[name], torch.arange(LENGTH)
    whole = evaluated(value, BATCH, HEADS, positions, LENGTH)
    part = part_of(value, PartOfCall(BATCH, HEADS, LENGTH, first_batch=1, first_head=2))
    assert torch.equal(evaluated(part, 2, 2, positions, LENGTH), whole[1:3, 2:])
    part = part_of(value, PartOfCall(BATCH, HEADS, LENGTH, first_position=4))
    assert torch.equal(evaluated(part, BATCH, HEADS, positions[:5], 8), whole[:, :, 4:9, 4:])
    keys = torch.tensor([7, 0, 3, 11, 4])
    part = part_of(value, PartOfCall(BATCH, HEADS, LENGTH, first_head=1, first_position=2, key_positions=keys))
    assert torch.equal(evaluated(part, BATCH, 3, positions[:6], 5), whole[:, 1:, 2:8, keys])


def test_parts_of_parts() -> None:
    whole = flexmasks.dense_mask(visible, LENGTH, batch=BATCH, heads=HEADS)
    half = part_of(get_mask(visible), PartOfCall(BATCH, HEADS, LENGTH, first_head=1, first_position=3))
    quarter = part_of(half, PartOfCall(BATCH, 3, 9, first_batch=1, first_head=2, first_position=2))
    assert torch.equal(evaluated(quarter, 2, 1, torch.arange(4), 7), whole[1:, 3:, 5:9, 5:])


def test_parameters_are_checked_against_the_whole_call() -> None:
    part = part_of(VALUES["document"], PartOfCall(BATCH, HEADS, LENGTH, first_batch=1))
    part._resolve(Size(2, HEADS, LENGTH, LENGTH, CPU))
    wrong = part_of(VALUES["document"], PartOfCall(BATCH + 1, HEADS, LENGTH, first_batch=1))
    with pytest.raises(ValueError, match=r"`document_ids` must be .*B=4"):
        wrong._resolve(Size(2, HEADS, LENGTH, LENGTH, CPU))
    with pytest.raises(ValueError, match="`first_head` must be int in 0"):
        part_of(VALUES["mask"], PartOfCall(BATCH, HEADS, first_head=-1))._resolve(Size(2, 1, 4, 4, CPU))


def test_the_sizes_of_a_whole_call_are_no_part_of_a_kernel() -> None:
    mask, score = flexmasks.get_mask("causal"), flexmasks.get_score("alibi")
    parts = [PartOfCall(batch, 4, length, first_position=3) for batch, length in ((1, None), (1, 96), (2, 104))]
    for value in (mask, score):
        assert len({flatten(part_of(value, part), contents=False)[0].key for part in parts}) == 1
        assert len({flatten(part_of(value, part))[0].key for part in parts}) == 3


def test_bands_caps_and_slopes_of_a_part() -> None:
    size, part = Size(1, 2, 5, 7, CPU), PartOfCall(BATCH, HEADS, LENGTH, first_head=1, first_position=3)
    window = get_mask("sliding_window", window=4)
    whole = band_of(window, Size(BATCH, HEADS, LENGTH, LENGTH, CPU))
    assert band_of(part_of(window, part), size) == whole is not None
    assert cap_of(part_of(get_score("softcap", cap=3.0), part), size) == 3.0
    factors = factors_of(part_of(VALUES["alibi"], part), size)
    assert factors is not None
    assert factors.slopes.tolist() == [0.5, 0.25]
    scattered = part._replace(key_positions=torch.tensor([7, 0, 3, 11, 4, 1, 2]))
    assert band_of(part_of(window, scattered), size) is None
    assert factors_of(part_of(VALUES["alibi"], scattered), size) is None


def test_sinks_of_a_part() -> None:
    part, sinks = PartOfCall(BATCH, HEADS, first_head=1), torch.arange(4)
    of_part = part.sinks_of(sinks, 2)
    assert of_part is not None
    assert of_part.tolist() == [1, 2]
    assert part.sinks_of(None, 2) is None
    wrong = torch.zeros(3)
    assert part.sinks_of(wrong, 2) is wrong
    assert [part.has_all(torch.empty(b, h, 5, 1)) for b, h in ((3, 4), (2, 4), (3, 2))] == [True, False, False]


# --- rows of sequences ---


@pytest.mark.parametrize("may_read", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_rows_are_those_of_their_sequences(name: str, may_read: bool) -> None:
    """Queries behind the last one of a sequence are its last one again."""
    value, positions = VALUES[name], torch.arange(LENGTH)
    whole = evaluated(value, BATCH, HEADS, positions, LENGTH)
    sequences, starts = torch.tensor([2, 0, 2, 1]), torch.tensor([5, 8, 7, 0])
    firsts, lasts = torch.tensor([8, 0, 5]), torch.tensor([9, 1, 8])
    rows = rows_of(value, sequences, firsts, lasts, torch.tensor([0, 2, 4]), 8)
    queries = starts[:, None] + torch.arange(3)
    places = torch.minimum(queries, lasts[sequences][:, None])
    want = torch.stack([whole[s, :, p] for s, p in zip(sequences, places, strict=True)])
    assert torch.equal(evaluated(rows, 4, HEADS, queries, LENGTH, may_read=may_read), want)
