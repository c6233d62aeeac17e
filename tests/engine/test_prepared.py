"""Tensors that `prepare` returns inside other values are those of the call, not of an earlier one."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import error, one_in
from torch import Tensor

import flexmasks
from flexmasks import get_mask, road
from flexmasks.plans.bounds import RecordedPlan, SizedMask
from flexmasks.spec.parameters import Size
from flexmasks.spec.structure import Opaque

pytestmark = pytest.mark.usefixtures("cold")
LENGTH = 1100  # beyond the lengths of short calls, which plan nothing


class Pair(NamedTuple):
    first: Any
    second: Any


# How `prepare` holds a tensor, and how the function reads it.
HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[..., Tensor]]] = {
    "itself": (lambda x: x, lambda held, b, i: held[b, i]),
    "tuple": (lambda x: (x, 3), lambda held, b, i: held[0][b, i]),
    "dict": (lambda x: {"a": x}, lambda held, b, i: held["a"][b, i]),
    "list": (lambda x: [x], lambda held, b, i: held[0][b, i]),
    "list of a made one": (lambda x: [x + 0], lambda held, b, i: held[0][b, i]),
    "nested": (lambda x: ({"a": [x]},), lambda held, b, i: held[0]["a"][0][b, i]),
    "named tuple": (lambda x: Pair(x, x + 0), lambda held, b, i: (held.first[b, i] + held.second[b, i]) // 2),
    "closure": (lambda x: lambda b, i: x[b, i], lambda held, b, i: held(b, i)),
    "object": (lambda x: types.SimpleNamespace(x=x), lambda held, b, i: held.x[b, i]),
}


@pytest.fixture(autouse=True)
def _compiled_without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def registered(kind: str, holder: str) -> str:
    """Return the name of a mask of documents, or of a score that adds differences of ids."""
    hold, read = HOLDERS[holder]

    def prepare(size: Any, *, ids: Tensor) -> dict[str, Any]:
        return {"held": hold(ids)}

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, held: Any) -> Tensor:
        return read(held, b, q) == read(held, b, kv)

    def score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, held: Any) -> Tensor:
        return score + (read(held, b, q) - read(held, b, kv))

    name = f"held_{kind}"
    if kind == "mask":
        flexmasks.register_mask(name=name, prepare=prepare)(mask)
    else:
        flexmasks.register_score(name=name, prepare=prepare)(score)
    return name


def wanted(kind: str, q: Tensor, ids: Tensor) -> Tensor:
    differences = (ids[:, :, None] - ids[:, None])[:, None]
    return F.scaled_dot_product_attention(q, q, q, differences == 0 if kind == "mask" else differences.float())


def documents() -> Tensor:
    return torch.randint(3, (2, LENGTH)).cummax(1).values


@pytest.mark.parametrize(
    ("as_on_gpu", "kind", "holder"), one_in(6, list(itertools.product([False, True], ["mask", "score"], HOLDERS)))
)
def test_calls_with_other_tensors(kind: str, holder: str, as_on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if as_on_gpu:
        monkeypatch.setattr(road, "_KINDS_ON", ("cpu", "cuda"))
    name, ids = registered(kind, holder), documents()
    for step in range(5):
        q = torch.randn(2, 1, LENGTH, 8)
        if step == 1:
            ids.copy_(documents())
        elif step:
            ids = documents()
        out = flexmasks.attention(q, q, q, **{kind: name}, ids=ids)
        assert error(out, wanted(kind, q, ids)) < 1e-5


@pytest.mark.parametrize(("kind", "holder"), one_in(3, list(itertools.product(["mask", "score"], HOLDERS))))
def test_updates_of_plans(kind: str, holder: str) -> None:
    """A plan that cannot have new values in the same memory says so."""
    name, ids = registered(kind, holder), documents()
    call: dict[str, Any] = {"mask": name} if kind == "mask" else {"mask": "full", "score": name}
    plan = flexmasks.plan(q_len=LENGTH, batch=2, heads=1, ids=ids, **call)
    for step in range(3):
        q, ids = torch.randn(2, 1, LENGTH, 8), documents()
        if step == 0 and holder in ("named tuple", "object"):
            with pytest.raises(ValueError, match="the plan has no tensors of its own"):
                plan.update(ids=ids)
            return
        plan.update(ids=ids)
        assert error(flexmasks.attention(q, q, q, mask=plan), wanted(kind, q, ids)) < 1e-5


@pytest.mark.parametrize("holder", HOLDERS)
def test_recorded_plans(holder: str) -> None:
    """A recorded plan puts new tensors wherever `prepare` holds them, or says that it cannot."""
    mask = get_mask(registered("mask", holder), ids=documents())
    kind = SizedMask(mask, 0, Size(2, 1, LENGTH, LENGTH, torch.device("cpu")), False, (128, 128))
    if holder in ("named tuple", "object"):
        with pytest.raises(Opaque):
            RecordedPlan(kind, mask._tensors())
        return
    recorded = RecordedPlan(kind, mask._tensors())
    for _ in range(3):
        ids = documents()
        other = get_mask(mask.name, ids=ids)
        made = recorded([ids])
        b, q, kv = torch.arange(2)[:, None, None], torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        assert torch.equal(other._bind(made.arguments)(b, b * 0, q, kv), ids[:, :, None] == ids[:, None])
