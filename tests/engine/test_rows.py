"""Rows: what each row of a mask sees, as the masked softmax reads it, against the dense mask."""

from __future__ import annotations

from typing import Any

import functions
import pytest
import torch
from functions import Drawn, drawn
from helpers import arguments, label, spread
from hypothesis import given, settings
from oracles import MASK_CASES, Case
from torch.nn.attention.flex_attention import create_mask

import flexmasks
from flexmasks.plans import rows
from flexmasks.spec.parameters import Size

pytestmark = pytest.mark.usefixtures("one_thread")


def check_rows(mod: Any, batch: int, heads: int, q_len: int, kv_len: int) -> rows.Rows:
    """Check bounds and bits of a mask's rows against the dense mask, and return the rows."""
    built = rows.build(mod, batch, heads, q_len, kv_len, torch.device("cpu"))
    visible = create_mask(mod, batch, heads, q_len, kv_len, device="cpu")
    if built.bounds is None:
        assert built.bits is None
        assert bool(visible.all())
        return built
    bounds = built.bounds.expand(batch, heads, q_len, 2)
    for seen, (first, end) in zip(visible.flatten(0, 2).tolist(), bounds.flatten(0, 2).tolist(), strict=True):
        places = [n for n, s in enumerate(seen) if s]
        assert (first, end) == ((places[0], places[-1] + 1) if places else (0, 0))
    interval = (torch.arange(kv_len) >= bounds[..., :1]) & (torch.arange(kv_len) < bounds[..., 1:])
    if built.bits is None:
        assert torch.equal(interval, visible)
    else:
        assert not torch.equal(interval, visible)
        words = built.bits.expand(batch, heads, q_len, -1)
        assert words.shape[-1] == -(-kv_len // 32)
        column = torch.arange(kv_len)
        assert torch.equal((words[..., column // 32].long() >> (column % 32) & 1).bool(), visible)
    return built


@pytest.mark.parametrize("case", spread([c for c in MASK_CASES if c.q_offset == 0], 4), ids=label)
def test_rows_of_registered_masks(case: Case) -> None:
    call_arguments = arguments(case)
    del call_arguments["q_offset"]
    mask = flexmasks.get_mask(case.name, **call_arguments)
    size = Size(case.batch, case.heads, case.q_len, case.kv_len, torch.device("cpu"))
    check_rows(mask._bind(mask._resolve(size)), case.batch, case.heads, case.q_len, case.kv_len)


@pytest.mark.parametrize("examples", [30, pytest.param(300, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("write", [functions.structured, functions.composed])
def test_rows_of_random_masks(write: Any, examples: int) -> None:
    with_holes = 0

    @settings(max_examples=examples)
    @given(drawn(write))
    def right(case: Drawn) -> None:
        nonlocal with_holes
        case_rows = check_rows(functions.compiled(case.expression, functions.LONG_TABLES), *case.sizes[:4])
        with_holes += case_rows.bits is not None

    right()
    assert examples * 0.07 < with_holes < examples * 0.93


def test_rows_have_the_dimensions_that_the_mask_depends_on() -> None:
    assert check_rows(lambda b, h, q, kv: kv >= 0, 2, 3, 5, 300) == rows.Rows(None, None)
    for mod, shape in (
        (lambda b, h, q, kv: kv < 200, (1, 1, 1, 2)),
        (lambda b, h, q, kv: (kv <= q) & (kv > b), (2, 1, 5, 2)),
        (lambda b, h, q, kv: kv < 100 + 50 * h, (1, 3, 1, 2)),
        (lambda b, h, q, kv: q > 3, (1, 1, 5, 2)),
        (lambda b, h, q, kv: kv % 7 != h, (1, 3, 1, 2)),
    ):
        bounds = check_rows(mod, 2, 3, 5, 300).bounds
        assert bounds is not None
        assert bounds.shape == shape


def test_rows_are_kept() -> None:
    flexmasks.clear_caches()
    x, lengths = torch.randn(2, 2, 8, 8), torch.tensor([5, 8])

    def hits() -> int:
        return flexmasks.cache_info()["plans"].parts["rows"].hits

    first = flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=lengths)
    assert hits() == 0
    flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=lengths)
    assert hits() == 1
    lengths[0] = 3
    second = flexmasks.masked_softmax(x, mask="grouped_tril", seq_lens=lengths)
    assert hits() == 1
    assert not torch.equal(first, second)
    assert flexmasks.cache_info()["plans"].parts["rows"].entries == 1
    del lengths
    assert flexmasks.cache_info()["plans"].parts["rows"].entries == 0
