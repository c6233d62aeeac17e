"""`flexmasks.extend`: what frameworks, layouts and backends of others build on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmasks
from flexmasks import extend
from flexmasks.backends.table import BACKENDS

pytestmark = pytest.mark.usefixtures("one_thread")


def test_each_name_is_documented() -> None:
    assert len(extend.__all__) == len(set(extend.__all__))
    for name in extend.__all__:
        value = getattr(extend, name)
        if name not in ("MaskLike", "ScoreLike", "Alignment"):
            assert inspect.getdoc(value), name
    assert set(extend._MODULES) <= set(extend.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'part'"):
        extend.part  # noqa: B018


@pytest.mark.parametrize("name", ["causal", "sliding_window", "document"])
@pytest.mark.parametrize("cell", [(16, 8), (10, 30)])
def test_cells_of_a_mask(name: str, cell: tuple[int, int]) -> None:
    params: dict[str, Any] = {"sliding_window": {"window": 20}, "document": {"document_ids": torch.arange(90) // 40}}
    mask = flexmasks.get_mask(name, **params.get(name, {}))
    dense = flexmasks.dense_mask(mask, 90)[0, 0]
    parts = [part.split(cell[1], 1) for part in dense.split(cell[0])]
    some, every = extend.MaskOverLengths("mine", mask, q_len=90, block_size=cell).visible_in(cell)
    assert some.tolist() == [[bool(x.any()) for x in row] for row in parts]
    assert every.tolist() == [[bool(x.all()) for x in row] for row in parts]


def test_errors_name_the_call_of_the_library_around() -> None:
    with pytest.raises(ValueError, match=r"^mine\.draw: `q_len` must be an int of at least 1, got 0"):
        extend.MaskOverLengths("mine.draw", flexmasks.get_mask("causal"), q_len=0)
    by_head = flexmasks.get_mask(lambda b, h, q, kv: kv <= q + h)
    with pytest.raises(ValueError, match="depends on its head index; pass `heads`"):
        extend.MaskOverLengths("mine.draw", by_head, q_len=64)
    both = extend.MaskOverLengths("mine.draw", by_head, q_len=64, heads=2)
    assert (both.depends(3, 0), both.depends(2, 1)) == (False, True)


def test_kept_values_follow_their_tensors() -> None:
    kept: extend.Kept[Tensor] = extend.Kept("test_extend")
    given = torch.arange(5)

    def made() -> Tensor:
        return kept.made("sum", [given], lambda: given.sum())

    first = made()
    assert made() is first
    given.add_(1)
    assert made().item() == 15
    assert flexmasks.cache_info()["plans"].parts["test_extend"].entries == 1


def test_a_plan_of_a_step_takes_any_batch() -> None:
    plan = extend.plan_of_step(flexmasks.get_mask("causal"), 4, 10, 6)
    for batch in (1, 3):
        q, k, v = (torch.randn(batch, 2, n, 8) for n in (4, 10, 10))
        out = flexmasks.attention(q, k, v, mask=plan)
        torch.testing.assert_close(out, flexmasks.attention(q, k, v, mask="causal", q_offset=6))


def test_the_source_of_a_block_mask() -> None:
    window = flexmasks.get_mask("sliding_window", window=3)
    assert extend.source_of(flexmasks.block_mask(window, 300, 400, q_offset=100)) == (window, 100)
    assert extend.source_of(torch.nn.attention.flex_attention.create_block_mask(window, 1, 1, 300, 300, "cpu")) is None


@pytest.fixture
def halved() -> Iterator[list[extend.Call]]:
    """A backend that gives half of the output, with the calls that it got."""
    calls: list[extend.Call] = []

    def refuses(call: extend.Call) -> str | None:
        return "it has no gradients" if call.needs_grad else None

    class Halved(extend.Kernel):
        def forms(self, plans: Any) -> tuple[Tensor]:
            size = plans.mask.size
            return (flexmasks.dense_mask(plans.mask.value, size.q_len, size.kv_len),)

        def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Tensor) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, *forms) / 2, None

    def kernel(call: extend.Call) -> extend.Kernel:
        calls.append(call)
        return Halved()

    extend.add_backend(extend.Backend("halved", refuses, kernel))
    yield calls
    del BACKENDS["halved"]


def test_a_backend_of_somebody_else(halved: list[extend.Call]) -> None:
    assert list(BACKENDS)[-2:] == ["halved", "reference"]
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    out = flexmasks.attention(q, k, v, mask="causal", backend="halved")
    torch.testing.assert_close(out, flexmasks.attention(q, k, v, mask="causal") / 2)
    assert len(halved) == 1
    with pytest.raises(ValueError, match="backend 'halved' cannot run this call: it has no gradients"):
        flexmasks.attention(q.requires_grad_(), k, v, mask="causal", backend="halved")
    assert "halved" in str(flexmasks.explain(q, k, v, mask="causal"))
    with pytest.raises(ValueError, match="there is a backend 'halved'; take another name"):
        extend.add_backend(BACKENDS["halved"])
