"""Plans on paper, held against the bytes that processes really exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import flexmasks
from flexmasks.integrations.distributed import Order, balance, exchange
from sequence_on_paper import plan

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

import exchange_jobs as jobs

from benchmarks.processes import Processes

LENGTH = 1024
MASKS: dict[str, Any] = {
    "causal": "causal",
    "window": flexmasks.get_mask("sliding_window", window=100),
    "sinks": flexmasks.get_mask("sink_window", window=100, sinks=3),
    "documents": flexmasks.get_mask("document", document_ids=torch.arange(LENGTH) // 150),
}


@pytest.fixture(params=["two", "four", pytest.param("eight", marks=pytest.mark.campaign)])
def processes(request: pytest.FixtureRequest) -> Processes:
    found: Processes = request.getfixturevalue(request.param)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_processes_receive_what_the_plan_says(processes: Processes, name: str, balanced: bool) -> None:
    mask, count = MASKS[name], processes.count
    order = balance("causal", LENGTH, count) if balanced else Order.natural(LENGTH, count)
    shape = batch, q_heads, kv_heads, head_size = 2, 8, 4 if balanced else 2, 16
    paper = plan(
        mask, LENGTH, count, order=order, batch=batch, q_heads=q_heads, kv_heads=kv_heads, head_size=head_size,
        dtype_bytes=4,
    )  # fmt: skip
    for way in paper.ways:
        if way.refusal is not None:
            continue
        how, rows = way.name, None
        if " x " in way.name:
            how, rows = "heads", int(way.name.split()[-1])
        figures = processes.run(jobs.received, how, mask, order.parts, shape, rows)
        forward, backward = torch.tensor(figures, dtype=torch.float64).unbind(1)
        for got, want in ((forward, way.received), (backward, way.received_in_backward)):
            assert (float(got.max()), float(got.mean())) == (want.busiest, want.mean), way.name


@pytest.mark.parametrize(("mask", "kv_heads", "way"), [
    ("causal", 2, "heads"),  # few keys are to be received, but the last process would compute three times the first
    ("causal", 1, "gather"),  # heads cannot be exchanged, and the last process sees all keys
    ("window", 2, "seen"),
    ("window", 1, "seen"),
    ("documents", 2, "heads"),
])  # fmt: skip
def test_processes_exchange_what_is_least_unless_one_computes_most(
    two: Processes, mask: str, kv_heads: int, way: str
) -> None:
    order, shape = Order.natural(LENGTH, 2), (1, 8, kv_heads, 16)
    figures = {how: two.run(jobs.received, how, MASKS[mask], order.parts, shape, None) for how in ("auto", way)}
    assert figures["auto"] == figures[way]


def test_rows_of_channels_last() -> None:
    """torch.cat keeps that order of memory, in which rows are no view."""
    x = torch.randn(2, 4, 5, 6, 3).permute(0, 4, 1, 2, 3)  # [..., B, H, D], the second dimension last in memory
    layout = exchange._Layout(x.shape[:-2], (x.shape[-2:],))
    rows = layout.packed([x], is_traced=True)
    assert torch.equal(rows, x.reshape(6, -1))
    assert torch.equal(layout.unpacked(rows)[0], x)
