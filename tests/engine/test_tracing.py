"""Programs: the operations of a function, which give what the function gives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flexmasks.plans import tracing
from flexmasks.plans.tracing import trace


def _of_every_form(x: Tensor, n: Tensor) -> list[Tensor]:
    """Operations with lists, a tensor by name, None among indices, several results, a constant, writes in place."""
    values, order = x.sort(0)
    joined = torch.cat([values, x * torch.arange(4)], 1)
    rows = x.T.contiguous()
    found = torch.searchsorted(rows, n.expand(4, -1).float().contiguous(), sorter=rows.argsort(-1))
    table = torch.zeros(4, 8)
    table[:, n] = 1
    table[1].add_(joined[0])
    first, second = table.split(4, 1)
    return [order, joined, found, table, first - second, joined[:, n], x]


def test_a_program_is_its_function() -> None:
    def inputs() -> list[Tensor]:
        return [torch.randn(4, 4), torch.randint(8, (3,))]

    program = trace(_of_every_form, inputs())
    for _ in range(50):
        given = inputs()
        before = [x.clone() for x in given]
        assert all(map(torch.equal, program(*given), _of_every_form(*given)))
        assert all(map(torch.equal, given, before))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: [x + int(x.sum())],
        lambda x: [x if x.sum() > 0 else -x],
        lambda x: [x * x.tolist()[0]],
        lambda x: [x + float(x.numpy().max())],
        lambda x: [x + float(np.asarray(x)[0])],
        lambda x: [x + float(np.from_dlpack(x)[0])],
        lambda x: [x + torch.equal(x, x + 1)],
        lambda x: [x.nonzero()],
        lambda x: [x[x > 0]],
        lambda x: [x.repeat_interleave(x.long())],
    ],
)
def test_functions_that_read_values_have_no_program(read: Callable[[Tensor], list[Tensor]]) -> None:
    with pytest.raises(RuntimeError):
        trace(read, [torch.arange(4.0)])


def test_values_of_constants_may_be_read() -> None:
    program = trace(lambda x: [x * int(torch.arange(4).sum())], [torch.randn(1)])
    assert torch.equal(program(torch.tensor([2.0]))[0], torch.tensor([12.0]))


def test_gradients_flow_through_a_program() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x.exp() * y[:, None]).cumsum(0)]

    program = trace(function, [torch.randn(3, 4), torch.randn(3)])
    given = [torch.randn(3, 4, requires_grad=True), torch.randn(3, requires_grad=True)]
    got, want = (torch.autograd.grad(run(*given)[0].square().sum(), given) for run in (program, function))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


def test_a_program_says_which_outputs_vary() -> None:
    assert trace(lambda x: [torch.ones(3), x, x * 0, torch.arange(4)[1:]], [torch.ones(2)]).varies == [
        False,
        True,
        True,
        False,
    ]


def test_a_program_holds_no_inputs_and_nothing_that_it_made() -> None:
    def memory(tensors: list[Tensor]) -> list[Any]:
        return [weakref.ref(t.untyped_storage()) for t in tensors]

    x, y = torch.randn(2, 50)
    x, y = x.clone(), y.clone()
    program = trace(lambda x, y: [x, y[3:], x + y], [x, y])
    others = [torch.randn(50), torch.randn(50)]
    made = program(*others)
    seen = memory([x, y, *others, *made])
    del x, y, others, made
    gc.collect()
    assert [ref() for ref in seen] == [None] * 7


class _Living(TorchDispatchMode):
    """Counts the tensors that live at once, of those that operations have made."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Any] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._made.append(weakref.ref(out.untyped_storage()))
        self.most = max(self.most, sum(ref() is not None for ref in self._made))
        return out


def test_what_no_later_operation_reads_is_freed() -> None:
    def function(x: Tensor) -> list[Tensor]:
        for n in range(20):
            x = x + n
        return [x]

    program = trace(function, [torch.randn(4)])
    with _Living() as living:
        program(torch.randn(4))
    assert living.most <= 3


def test_only_small_constants_are_kept() -> None:
    """Large ones are computed at each run."""

    def steps(length: int) -> list[str]:
        program = trace(lambda x: [x * torch.arange(length).flip(0)], [torch.ones(1)])
        assert torch.equal(program(torch.full((1,), 3))[0], 3 * torch.arange(length).flip(0))
        return [step.function._schema.name for step in program.steps]

    assert steps(1000) == ["aten::mul"]
    assert steps(1 << 19) == ["aten::arange", "aten::flip", "aten::mul"]


@pytest.mark.parametrize("pick", [lambda t: t[torch.arange(16)], lambda t: torch.zeros(16, 16) + t])
@pytest.mark.parametrize("view", [lambda t: t.reshape(-1), lambda t: t.as_strided((256,), (1,))])
def test_programs_keep_layouts(pick: Callable[..., Tensor], view: Callable[..., Tensor]) -> None:
    """What an operation does to strides matters to the views behind it."""

    def function(x: Tensor) -> list[Tensor]:
        return [view(pick(x)) * 2]

    inputs = [torch.randn(16, 16).t() for _ in range(3)]
    program = trace(function, inputs[:1])
    for x in inputs:
        assert torch.equal(program(x)[0], function(x)[0])


def test_programs_keep_nothing_else_of_their_trace() -> None:
    def noted() -> int:
        gc.collect()
        return sum(type(x) in (tracing._Value, tracing._Operation) for x in gc.get_objects())

    before = noted()
    program = trace(lambda x: [x + torch.arange(1000).cumsum(0).flip(0)], [torch.ones(1000)])
    assert noted() == before
    assert torch.equal(program(torch.zeros(1000))[0], torch.arange(1000.0).cumsum(0).flip(0))
