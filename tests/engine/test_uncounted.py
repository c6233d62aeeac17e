"""Changes of tensors that torch does not count: fused optimizers, FSDP2 and collectives raise no version."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DEVICES, error
from torch import Tensor

import flexmasks
from flexmasks.backends import short, waiting

LENGTH, HEADS = 64, 2


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls are computed before they are compiled, unlike in other tests."""
    monkeypatch.setattr(short, "refuses_on_cpu", short.refuses_on_cpu.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setattr(waiting, "WORK_BEFORE_COMPILING", 1 << 36)


def _written_unseen(parameter: Tensor) -> None:
    """As FSDP2 gathers a parameter into the same memory."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):  # type: ignore[no-untyped-call]
        parameter.copy_(torch.randn_like(parameter))


def _fused(name: str) -> Callable[[Tensor], None]:
    def change(parameter: Tensor) -> None:
        optimizer = getattr(torch.optim, name)([parameter], lr=0.5, fused=True)
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        parameter.grad = None

    return change


CHANGES: dict[str, Callable[[Tensor], None]] = {
    **{name: _fused(name) for name in ("AdamW", "Adam", "SGD")},
    "memory written unseen": _written_unseen,
}
SCORES: dict[str, Callable[..., tuple[Tensor, dict[str, Any], Callable[[Tensor], Tensor]]]] = {}


def score(name: str) -> Callable[[Callable[..., Any]], None]:
    return lambda made: SCORES.update({name: made})


@score("small table")
def _small_table(device: str) -> tuple[Tensor, dict[str, Any], Callable[[Tensor], Tensor]]:
    return _table(device, 8)


@score("large table")  # larger than what is compared
def _large_table(device: str) -> tuple[Tensor, dict[str, Any], Callable[[Tensor], Tensor]]:
    return _table(device, 9000)


def _table(device: str, furthest: int) -> tuple[Tensor, dict[str, Any], Callable[[Tensor], Tensor]]:
    table = torch.randn(HEADS, 2 * furthest + 1, device=device)
    distances = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    return table, {"score": "relative_bias"}, lambda t: t[:, distances.clamp(-furthest, furthest) + furthest]


@score("captured")
def _captured(device: str) -> tuple[Tensor, dict[str, Any], Callable[[Tensor], Tensor]]:
    bias = torch.randn(HEADS, LENGTH, LENGTH, device=device)
    return bias, {"score": lambda p: lambda s, b, h, q, kv: s + p[h, q, kv]}, lambda t: t


@score("prepared")
def _prepared(device: str) -> tuple[Tensor, dict[str, Any], Callable[[Tensor], Tensor]]:
    slopes = torch.randn(HEADS, device=device)
    distances = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    return slopes, {"score": "alibi"}, lambda t: t[:, None, None] * distances


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("held", [False, True], ids=["call", "plan"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_evaluations_between_steps_see_new_parameters(
    backend: str, held: bool, change: str, name: str, device: str
) -> None:
    values, call, bias = SCORES[name](device)
    parameter = torch.nn.Parameter(values)
    parameter_name = {"relative_bias": "table", "alibi": "slopes"}.get(str(call["score"]))
    call = call | {parameter_name: parameter} if parameter_name else {"score": call["score"](parameter)}
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, 16, device=device)
    call["mask"] = "causal"
    if held:
        call = {"mask": flexmasks.plan(q_len=LENGTH, batch=1, heads=HEADS, device=device, **call)}
    later = torch.ones(LENGTH, LENGTH).triu(1).bool()
    for _ in range(4):
        with torch.no_grad():
            out = flexmasks.attention(q, k, v, backend=backend, **call)
            again = flexmasks.attention(q, k, v, backend=backend, **call)
        true = (x.double().cpu() for x in (q, k, v, parameter.detach()))
        qd, kd, vd, values = true
        scores = (qd @ kd.mT / 4 + bias(values)).masked_fill(later, -math.inf)
        wanted = scores.softmax(-1) @ vd
        assert error(out, wanted) < 1e-4
        assert error(again, wanted) < 1e-4
        flexmasks.attention(q, k, v, backend=backend, **call).sum().backward()
        CHANGES[change](parameter)


def test_versions_that_a_user_raises_are_seen() -> None:
    """torch.autograd.graph.increment_version is for writes that torch does not count, as by collectives."""
    ids, q = torch.arange(LENGTH) // 10, torch.randn(1, HEADS, LENGTH, 16)
    for size in (10, 30, 50):
        with torch.autograd._unsafe_preserve_version_counter(ids):  # type: ignore[no-untyped-call]
            ids.copy_(torch.arange(LENGTH) // size)
        torch.autograd.graph.increment_version(ids)
        out = flexmasks.attention(q, q, q, mask="document", document_ids=ids)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, ids[:, None] == ids)
        assert error(out, wanted) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", CHANGES)
def test_masks_that_read_parameters(change: str, device: str) -> None:
    limits = torch.nn.Parameter(torch.rand(HEADS, 3000, device=device) * 50)
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, 16, device=device)
    for _ in range(3):
        with torch.no_grad():
            mask = lambda b, h, i, j: (i >= j) & (i - j <= limits[h, 0].abs())  # noqa: E731
            out = flexmasks.attention(q, k, v, mask=mask)
            weights = flexmasks.masked_softmax(torch.ones(1, HEADS, LENGTH, LENGTH, device=device), mask=mask)
        distances = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        visible = (distances >= 0) & (distances <= limits.detach().cpu()[:, :1, None].abs())
        scores = (q @ k.mT / 4).double().cpu().masked_fill(~visible, -math.inf)
        assert error(out, scores.softmax(-1) @ v.double().cpu()) < 1e-4
        assert error(weights[0], visible / visible.sum(-1, keepdim=True).double()) < 1e-5
        CHANGES[change](limits)
