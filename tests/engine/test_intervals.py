"""The keys that each query sees as intervals, found by one call of a mask's function, against the dense mask."""

from __future__ import annotations

from typing import Any

import functions
import pytest
import torch
from functions import TABLE_LENGTH, Drawn, compiled, drawn
from helpers import arguments, label, spread, try_examples
from oracles import MASK_CASES, Case, dense
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from flexmasks.plans.sizes import shifted_mask, unread
from flexmasks.ranges import GiveUp
from flexmasks.ranges.intervals import MOST, SeenKeys, seen_keys
from flexmasks.spec.parameters import Size

pytestmark = pytest.mark.usefixtures("one_thread")

_CPU = torch.device("cpu")
# Masks of few intervals whatever their parameters are, in any sizes.
ALWAYS = {
    "band", "block_causal", "block_diffusion", "causal", "chunked", "chunked_causal", "full",
    "grouped_tril", "inverse_causal", "local", "multi_item", "natten1d", "padding", "prefix_lm", "sink_window",
    "sliding_window",
}  # fmt: skip


def check(found: SeenKeys, visible: Tensor) -> Tensor:
    """Check all intervals that are known, and return for each query whether they are."""
    starts, stops, known = found
    assert starts.shape[-1] <= MOST
    kv = torch.arange(visible.shape[3])
    seen = ((kv >= starts[..., None]) & (kv < stops[..., None])).sum(-2).expand(visible.shape)
    known = known.expand(visible.shape[:3])
    assert torch.equal(seen[known], visible[known].long())  # each key is in one interval at most
    assert bool((starts <= stops).all())
    assert bool((starts[..., 1:] >= stops[..., :-1]).all())
    is_some = starts < stops
    touch = (starts[..., 1:] == stops[..., :-1]) & is_some[..., 1:] & is_some[..., :-1]
    assert not bool((touch | (is_some[..., 1:] & ~is_some[..., :-1])).any())  # empty ones are the last
    return known


@pytest.mark.parametrize("case", spread(MASK_CASES, 3), ids=label)
def test_registered_masks(case: Case) -> None:
    given = arguments(case)
    offset = given.pop("q_offset")
    mask = flexmasks.get_mask(case.name, **given)
    is_always = case.name in ALWAYS and "ids" not in given  # blocks in any order
    size = unread(Size(case.batch, case.heads, case.q_len, case.kv_len, _CPU), offset)
    mask_mod = shifted_mask(mask._bind(mask._resolve(size)), offset)
    try:
        found = seen_keys(mask_mod, case.batch, case.heads, case.q_len, case.kv_len, _CPU)
    except GiveUp:
        assert not is_always
        return
    known = check(found, dense(case))
    assert bool(known.all()) or not is_always


@pytest.mark.parametrize("examples", [40, pytest.param(2000, marks=pytest.mark.campaign)])
def test_random_masks(examples: int) -> None:
    count = 0

    def right(case: Drawn) -> None:
        nonlocal count
        mod = functions.compiled(case.expression, functions.LONG_TABLES)
        count += _checked(mod, *case.sizes[:4])

    try_examples(examples, right, drawn(functions.structured))
    assert count > examples * 0.2


@pytest.mark.parametrize("examples", [60, pytest.param(4000, marks=pytest.mark.campaign)])
def test_any_operations(examples: int) -> None:
    def right(expression: str) -> None:
        _checked(compiled(expression), 2, 2, TABLE_LENGTH, TABLE_LENGTH)

    try_examples(examples, right, functions.expressions())


def _checked(mod: Any, batch: int, heads: int, q_len: int, kv_len: int) -> bool:
    """Check a function, if it is a mask of which ranges know some intervals, and return whether it is."""
    try:
        found = seen_keys(mod, batch, heads, q_len, kv_len, _CPU)
    except (GiveUp, TypeError, ValueError):
        return False
    try:
        visible = create_mask(mod, batch, heads, q_len, kv_len, device="cpu")
    except Exception:  # it divides by 0, or is no function of indices
        return False
    return bool(check(found, visible).any())


_IDS = torch.tensor([0, 0, 0, 2, 2, -1, 5, 5, -1, -1, 3, 3])
_AGAIN = torch.tensor([0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("mod", "known"),
    [
        (lambda b, h, q, kv: _IDS[q] == _IDS[kv], [True] * 5 + [False, True, True, False, False, True, True]),
        (lambda b, h, q, kv: (_IDS[q] == _IDS[kv]) & (_IDS[q] >= 0), [True] * 12),
        (lambda b, h, q, kv: (_IDS[q] == _IDS[kv]) | (_IDS[q] < 0), [True] * 12),
        (lambda b, h, q, kv: _AGAIN[q] == _AGAIN[kv], [True] * 12),
        (lambda b, h, q, kv: _AGAIN[kv] <= _AGAIN[q], [True] * 12),
        (lambda b, h, q, kv: -_AGAIN[kv] < -_AGAIN[q], [True] * 12),
        (lambda b, h, q, kv: _IDS[kv] <= _IDS[q], [False] * 12),
        (lambda b, h, q, kv: (q - kv).abs() > 3, [True] * 12),
        (lambda b, h, q, kv: (kv - q).abs() <= 3, [True] * 12),
        (lambda b, h, q, kv: (q >= kv) != (kv < 4), [True] * 12),
        (lambda b, h, q, kv: torch.where(kv < 4, q < 9, kv - q <= 0), [True] * 12),
        (lambda b, h, q, kv: (kv % 2 == 0) & (kv <= q), [True] * 12),
        (lambda b, h, q, kv: ~(kv % 2 == 0) | (q > 20), [True] * 12),
    ],
)
def test_what_is_known(mod: Any, known: list[bool]) -> None:
    found = seen_keys(mod, 1, 1, 12, 12, _CPU)
    assert check(found, create_mask(mod, 1, 1, 12, 12, device="cpu")).flatten().tolist() == known


def test_more_intervals_than_are_kept_are_not_known() -> None:
    for count in (MOST, MOST + 1):
        found = seen_keys(lambda b, h, q, kv: (kv % 2 == 0) & (q >= 0), 1, 1, 3, 2 * count, _CPU)
        assert found.known.all() == (count == MOST)
        assert int((found.starts < found.stops).sum(-1).max()) == count or count > MOST


@pytest.mark.parametrize(
    ("mod", "why"),
    [
        (lambda b, h, q, kv: (q - kv) % 3 == 0, "`mod` of a query and a key"),
        (lambda b, h, q, kv: q * kv < 9, "`mul` of a query and a key"),
        (lambda b, h, q, kv: (q - kv).abs() == 3, "a distance of a query and a key that is one number"),
        (lambda b, h, q, kv: torch.eye(12)[q, kv] > 0, "`getitem` of a query and a key"),
        (lambda b, h, q, kv: q + 0.5 * kv < 9, "other than of whole numbers"),
    ],
)
def test_what_is_given_up(mod: Any, why: str) -> None:
    with pytest.raises(GiveUp, match=why):
        seen_keys(mod, 1, 1, 12, 12, _CPU)
