"""The choice among backends by their times: the tables that were measured, and what is asked before they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers  # noqa: F401  # it finds the benchmarks
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flexmasks
from benchmarks import choice_table
from flexmasks.backends import fa4_package, table, times
from flexmasks.backends.times import Case, Gpu
from flexmasks.plans.mask_plan import Computed, MaskPlan
from flexmasks.request import Request
from flexmasks.road import plan_call

RESULTS = Path(__file__).parents[2] / "recipes/results/choice_gpu.json"
_SLOW = Gpu("slow", 132, 0.48, 98.9)
_BOTH = ["short", "flex"]


def test_auto_takes_about_the_fastest_backend() -> None:
    """In 57 of 60 calls at most 1.15 times as long as the fastest takes, and at most 1.3 in all.

    Masks with tensors have new ones at each step.
    """
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    factors = sorted(factor for factor, *_, r in choice_table.factors(rows) if choice_table.judges(r))
    assert len(factors) >= 60
    assert factors[int(len(factors) * 57 / 60) - 1] <= choice_table.NEAR
    assert factors[-1] <= 1.3


def test_small_calls_are_chosen_by_the_time_of_the_host() -> None:
    """Nobody looks at their blocks, unless the GPU is slow."""
    small, looks = Case(64, False, False, 16, 2, 0), []

    def look() -> tuple[Computed, str]:
        looks.append(1)
        return Computed(0.5, 1), times.PLAIN

    assert times.by_times(_BOTH, small, look)[0] == "short"
    assert not looks
    times.by_times(_BOTH, small._replace(rows=4096, columns=16), look, _SLOW)
    assert looks


def test_one_more_block_takes_no_less_time() -> None:
    for name, size, needs_grad in times.DEVICE:
        for reads in times.READS:
            case = Case(size, needs_grad, True, 4096, 64, 64)
            few, *many = (
                times._device(name, case._replace(whole=whole), computed, reads, times._GPUS[0])
                for whole, computed in (
                    (64, Computed(9, 9)),
                    (64, Computed(9, 10)),
                    (64, Computed(10, 9)),
                    (99, Computed(9, 9)),
                    (64, Computed(9, 9, sequences=1)),
                )
            )
            assert few <= min(many)


def test_what_backends_make_of_tensors_takes_time() -> None:
    """A whole mask for "short", and room for each sequence for "fa4"."""
    of_short, computed = Case(128, False, True, 512, 32, 2048), Computed(0, 2.5, sequences=0.5)
    assert times.by_times(_BOTH, of_short, lambda: (computed, times.PLAIN)) == ["flex", "short"]
    assert times.by_times(_BOTH, of_short._replace(whole=512), lambda: (computed, times.PLAIN)) == ["short", "flex"]
    of_long = Case(128, False, True, 4096, 256, 2**17)
    for sequences, first in ((0.125, "fa4"), (4, "flex")):
        found = times.by_times(
            ["flex", "fa4"], of_long, lambda n=sequences: (Computed(1, 2.5, sequences=n), times.PLAIN)
        )
        assert found[0] == first


def test_sequences_are_counted_once_for_a_kind() -> None:
    """By the first tensors of a kind, whether the room for them is looked at, promised, or the shape of offsets. A
    whole mask has the batch elements of its tensors.
    """

    def case_and_computed(**mask: Any) -> tuple[Case, Computed]:
        q = torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16)
        call = plan_call(q, q, q, Request(params={}, **mask)).call
        return times.case_of(call), call.mask.computed(16, may_look=False)

    for length in (512, 256):
        ids = (torch.arange(1024) // length).expand(2, -1).clone()
        for more, room in ({}, 64), ({"contiguous": True}, 2 * 16):
            mask = flexmasks.get_mask("document", document_ids=ids, **more) & flexmasks.get_mask("causal")
            found = case_and_computed(mask=mask)
            computed = Computed(512 / 128 - 1.3, 2.5, sequences=room * 128 / 2048)
            assert found == (Case(64, False, True, 128, 8, 128), computed)
    offsets = torch.arange(0, 1025, 256)
    case, computed = case_and_computed(mask=flexmasks.packed("causal", offsets))
    assert (case.whole, computed.sequences) == (64, 2 * 5 * 128 / 2048)
    assert computed.full == pytest.approx(256 / 128 - 1.3)


def test_other_gpus_are_scaled() -> None:
    computed, of_memory = Computed(3, 2), torch.tensor([0, 1, 0, 0, 0, 0])
    case = Case(64, False, False, 4096, 64, 0)
    known, slow = (
        torch.tensor(times.features("flex", case, computed, times.PLAIN, gpu)) for gpu in (times._GPUS[0], _SLOW)
    )
    assert slow.equal(torch.where(torch.arange(6) == 0, known, known * 10))
    memory = torch.tensor(times.features("flex", case, computed, times.PLAIN, _SLOW._replace(matrices=989)))
    assert memory.equal(known * (1 + 9 * of_memory))


def _first(length: int, *, head_size: int = 64, learns: bool = False, **more: Any) -> str:
    """The backend that "auto" asks first, as on an H200."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
        q, k, v = (torch.empty(2, 8, length, head_size, dtype=torch.bfloat16, requires_grad=learns) for _ in range(3))
        return table._fastest_first(plan_call(q, k, v, Request(params={}, **more)).call)[0].name


def test_causal_calls_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host decides on short ones, for SDPA, and the GPU on long ones, for FlashAttention 4; no blocks are made."""
    monkeypatch.setattr(fa4_package, "refuses_package", lambda call: None)
    monkeypatch.setattr(MaskPlan, "_prepared", property(lambda self: pytest.fail("its blocks are looked at")))
    for learns in (False, True):
        found = [_first(length, mask=flexmasks.get_mask("causal"), learns=learns) for length in (256, 32768)]
        assert found == ["sdpa", "fa4"]
