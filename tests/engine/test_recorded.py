"""Recorded computations: what they give, alone and in a CUDA graph, and what they keep."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import DEVICES, PlayedGraph, play_graphs
from torch import Tensor

from flexmasks import compat
from flexmasks.plans import recorded
from flexmasks.plans.recorded import Learning, Recorded, _Graph, _Pack


def test_recorded_operations_are_the_function() -> None:
    """Constants are kept, and writes in place done anew at each run."""

    def function(x: Tensor) -> list[Tensor]:
        table = torch.zeros(4).scatter_(0, x, 1.0)
        return [table + torch.arange(4), table + torch.arange(4), torch.zeros(4)]

    recorded = Recorded(function, [torch.tensor([1])])
    for n in (2, 3, 1):
        for got, want in zip(recorded([torch.tensor([n])]), function(torch.tensor([n])), strict=True):
            assert torch.equal(got, want)


def test_recorded_operations_are_those_that_results_need() -> None:
    def function(x: Tensor) -> list[Tensor]:
        (x * 5).sum()
        return [x * (torch.arange(4) * 2), x[:2], torch.zeros(4)]

    recorded = Recorded(function, [torch.randn(4)])
    names = [step.function._schema.name for step in recorded._run.steps]
    assert names == ["aten::mul", "aten::slice"]
    x = torch.randn(4)
    got = recorded([x])
    assert all(map(torch.equal, got, function(x)))
    assert len({t.untyped_storage().data_ptr() for t in (x, *got)}) == 4


def test_packs_are_copies_of_their_tensors() -> None:
    """They begin at multiples of 64 elements, for which kernels need not be compiled again."""
    tensors = [torch.arange(n, dtype=torch.int32).view(shape) for n, shape in ((6, (2, 3)), (70, (70,)), (1, (1, 1)))]
    pack = _Pack(list(enumerate(tensors)))
    first, second = pack.copies(), pack.copies()
    for (place, copied), other in zip(first, second, strict=True):
        assert torch.equal(copied, tensors[place])
        assert copied.is_contiguous()
        assert copied.storage_offset() % 64 == 0
        assert copied.data_ptr() != other[1].data_ptr()


WAYS = [*DEVICES, "cpu, in a graph"]


@pytest.fixture(params=WAYS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if "graph" in request.param:
        play_graphs(monkeypatch)
    return str(request.param).partition(",")[0]


def _outputs(x: Tensor, wide: Tensor, numbers: Tensor) -> list[Tensor]:
    """Outputs of several dtypes and layouts: an input, parts of inputs, and what depends on no input."""
    return [x, wide[1:], x.T + wide.sum(), numbers * 2, numbers > 1, torch.arange(3, device=x.device), numbers[:0]]


def test_later_runs_leave_outputs_alone(device: str) -> None:
    """Outputs lie in memory of their own; one input is expanded, so that elements share places."""

    def inputs() -> list[Tensor]:
        x, wide = torch.randn(6, 5, device=device).T, torch.randn(1, 4, device=device).expand(3, 4)
        return [x, wide, torch.randint(4, (7,), device=device)]

    record = Recorded(_outputs, inputs())
    runs = []
    for _ in range(5):
        given = inputs()
        runs.append((record(given), [t.clone() for t in _outputs(*given)]))
        for t in given:
            t.untyped_storage().fill_(0)
    assert (record._in_graph is not None) == (device in recorded._GRAPHS_ON)
    for got, want in runs:
        assert all(map(torch.equal, got, want))
    places = [t.untyped_storage().data_ptr() + t.storage_offset() * t.itemsize for got, _ in runs for t in got[:-1]]
    assert len(set(places)) == len(places)


def test_outputs_belong_to_no_graph_and_to_no_mode(device: str) -> None:
    """Any later call may use them, also where autograd saves them."""
    x = torch.randn(3, device=device, requires_grad=True)
    with torch.inference_mode():
        record = Recorded(lambda x: [x * 2, torch.ones(2, device=device)], [x])
        inside = record([x])
    for out in (*inside, *record([x.detach()])):
        assert not out.is_inference()
        assert not out.requires_grad


def test_operations_are_captured_once_for_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another stream, where a replay would write over what is still read, they run alone."""
    play_graphs(monkeypatch)
    graphs: list[Any] = []
    replays: list[int] = []
    of = PlayedGraph.of
    monkeypatch.setattr(PlayedGraph, "of", lambda *given: graphs.append(of(*given)) or graphs[-1])
    monkeypatch.setattr(PlayedGraph, "_replay", _counted(PlayedGraph._replay, replays))
    record = Recorded(lambda x: [x + 1], [torch.zeros(2)])
    for stream, count in ((0, 1), (0, 2), (7, 2), (0, 3)):
        monkeypatch.setattr(compat, "raw_stream", lambda device, stream=stream: stream)
        assert torch.equal(record([torch.full((2,), float(count))])[0], torch.full((2,), count + 1.0))
        assert len(replays) == count
    assert len(graphs) == 1


def _counted(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def counting(*args: Any) -> Any:
        calls.append(1)
        return function(*args)

    return counting


class _OfNothing(_Graph):
    """A graph that holds the outputs of its operations, and captures nothing."""

    def __init__(self, run: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> None:
        assert not gc.isenabled()  # what dies in a capture may end it
        self._outputs = run(*inputs)


def test_no_graph_holds_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_MAX_ELEMENTS_IN_GRAPH", 100)
    for n, repeats, is_captured in ((100, 1, True), (101, 0, False), (51, 2, False), (50, 2, True)):
        x = torch.zeros(n)
        assert (_OfNothing.of(lambda x, repeats=repeats: [x] * repeats, [x]) is not None) == is_captured
        assert gc.isenabled()


def test_operations_that_no_graph_can_hold_run_alone(caplog: pytest.LogCaptureFixture) -> None:
    def run(*_: Tensor) -> list[Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    with caplog.at_level(logging.WARNING, "flexmasks"):
        assert _OfNothing.of(run, []) is None
    assert "cannot be captured in a CUDA graph" in caplog.text
    assert gc.isenabled()


# --- functions that learn ---


def test_learning_runs_the_function_twice_and_then_its_operations() -> None:
    calls: list[int] = []

    def function(tensors: Sequence[Tensor]) -> Tensor:
        calls.append(1)
        return tensors[0][:, None] * torch.arange(4) + tensors[1]

    learning = Learning(function)
    for n in range(6):
        given = [torch.randn(3, requires_grad=True), torch.randn(3, 4)]
        got = learning(given)
        assert len(calls) == (1, 2, 2, 2, 2, 2)[n]
        want = given[0][:, None] * torch.arange(4) + given[1]
        assert torch.equal(got, want)
        assert torch.equal(*(torch.autograd.grad(x.square().sum(), given[0])[0] for x in (got, want)))


def test_learning_runs_a_function_that_reads_values_each_time() -> None:
    learning = Learning(lambda tensors: tensors[0] * int(tensors[0].sum() > 0))
    for n in (1.0, 1.0, 1.0, -1.0):
        x = torch.full((3,), n)
        assert torch.equal(learning([x]), x.clamp(min=0))
