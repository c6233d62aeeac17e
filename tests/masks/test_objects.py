"""Masks and scores that read attributes of objects: methods of models, and functions inside their `forward`."""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DEVICES, error, one_in
from oracles import attend
from quick_kernels import quick_kernels as quick_kernels
from torch import Tensor, nn

import flexmasks
from flexmasks import road
from flexmasks.spec.bands import band_of, cap_of, factors_of
from flexmasks.spec.code import attributes_read
from flexmasks.spec.parameters import Size

BATCH, HEADS, LENGTH = 2, 2, 40


class Settings:
    def __init__(self, window: int) -> None:
        self.window = window


class Model(nn.Module):
    """Attention whose mask and score are methods, functions made at each call, or made once."""

    factor = 0.5

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.settings = way, Settings(5)
        self.slopes = nn.Parameter(torch.rand(HEADS))
        self.register_buffer("lens", torch.tensor([40, 30]))
        functions = self.functions() if way == "functions made once" else (self.mask, self.score)
        self.made = flexmasks.get_mask(functions[0]), flexmasks.get_score(functions[1])

    def mask(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < self.lens[b]) & ((q - kv).abs() <= self.settings.window)

    def score(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * self.factor + self.slopes[h] * (kv - q)

    def functions(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        return (
            lambda b, h, q, kv: (kv < self.lens[b]) & ((q - kv).abs() <= self.settings.window),
            lambda s, b, h, q, kv: s * self.factor + self.slopes[h] * (kv - q),
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask, score = self.functions() if self.way == "functions" else (self.mask, self.score)
        if self.way.endswith("made once"):
            mask, score = self.made
        return flexmasks.attention(q, k, v, mask=mask, score=score)

    def formula(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(LENGTH)
        distance = place - place[:, None]
        visible = (place < self.lens.cpu()[:, None, None, None]) & (distance.abs() <= self.settings.window)
        slopes = self.slopes.double().cpu()[:, None, None]
        return attend(q, k, v, visible, lambda scores: scores * self.factor + slopes * distance)[0]


def _changes(model: Model, device: str) -> list[Callable[[], Any]]:
    lens = torch.tensor([10, 35], device=device)
    return [
        lambda: None,
        lambda: model.lens[:1].fill_(20),
        lambda: setattr(model, "lens", lens),
        lambda: setattr(model.settings, "window", 9),
        lambda: setattr(model, "factor", 0.25),
        lambda: setattr(model, "settings", Settings(2)),
        lambda: model.slopes.data.mul_(2),
    ]


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("way", "is_compiled"),
    [
        ("methods", False),
        ("functions", False),
        ("functions made once", False),
        *one_in(
            2, [pytest.param(way, True, marks=pytest.mark.slow) for way in ("functions made once", "methods made once")]
        ),
    ],
)
def test_every_change_of_an_attribute_is_seen(way: str, is_compiled: bool, device: str) -> None:
    torch._dynamo.reset()
    model = Model(way).to(device)
    call: Any = torch.compile(model, fullgraph=True) if is_compiled else model
    for change in _changes(model, device):
        change()
        qkv = [torch.randn(BATCH, HEADS, LENGTH, 16, device=device, requires_grad=True) for _ in range(3)]
        for _ in range(2):
            out = call(*qkv)
            slope = torch.randn_like(out)
            got = torch.autograd.grad(out, [*qkv, model.slopes], slope)
            want = model.formula(*(x.double().cpu() for x in qkv))
            wanted = torch.autograd.grad(want, [*qkv, model.slopes], slope.double().cpu())
            for a, b in zip((out, *got), (want, *wanted), strict=True):
                assert error(a.detach().cpu(), b.detach().cpu(), unit=max(1.0, b.detach().abs().max().item())) < 3e-5


def test_later_calls_find_what_the_first_one_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("functions")
    q = torch.randn(BATCH, HEADS, LENGTH, 16)

    def call() -> Tensor:
        return flexmasks.attention(q, q, q, mask=lambda b, h, q, kv: (kv < model.lens[b]) & (q - kv <= model.factor))

    want = call()
    for module, name in ((road, "run_first_time"), (road, "plan_call")):
        monkeypatch.setattr(module, name, None)
    assert torch.equal(call(), want)


def test_what_code_does_with_an_object() -> None:
    holder: Any = types.SimpleNamespace()
    reads: list[tuple[Callable[..., Any], Any]] = [
        (lambda: holder.a + holder.b.c, {"a": None, "b": {"c": None}}),
        (lambda: [x + holder.a for x in range(3)], {"a": None}),
        (lambda: holder.b.c + holder.b, {"b": None}),
        (lambda: holder.b and holder.b.c.d, {"b": None}),
        (lambda: holder.b.c() + holder.b.c, {"b": None}),
        (lambda: holder.a(), None),
        (lambda: getattr(holder, "a"), None),  # noqa: B009
        (lambda: holder, None),
        (lambda: (holder.a, holder), None),
        (lambda: setattr(holder, "a", 1), None),
    ]
    for function, want in reads:
        assert attributes_read(function.__code__, "holder") == want


@pytest.mark.slow
def test_callable_objects_and_partials_are_registered() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    want = flexmasks.attention(q, k, v, mask="causal")

    class Causal:
        def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q >= kv

    def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, far: int) -> Tensor:
        return (q >= kv) & (q - kv <= far)

    for name, function in (("causal_object", Causal()), ("near_partial", functools.partial(near, far=8))):
        for _ in range(2):  # as a module that is loaded again
            flexmasks.register_mask(name=name)(function)
        assert torch.allclose(flexmasks.attention(q, k, v, mask=name), want, atol=1e-6)


@pytest.mark.parametrize("name", ["scale", "layout"])
def test_parameters_named_as_arguments_of_the_call(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def odd_{name}(b, h, i, j, *, {name}: int): return i - j <= {name}", namespace)
    flexmasks.register_mask()(namespace[f"odd_{name}"])
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    with pytest.raises(TypeError, match=rf"flexmasks.get_mask\('odd_{name}', {name}=...\)"):
        flexmasks.attention(q, k, v, mask=f"odd_{name}")
    mask = flexmasks.get_mask(f"odd_{name}", **{name: 2})
    assert torch.allclose(
        flexmasks.attention(q, k, v, mask=mask), flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: q - kv <= 2)
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors_that_an_object_holds_beside_what_is_read() -> None:
    class Model:
        def __init__(self) -> None:
            self.window, self.graph = 3, torch.eye(8).to_sparse_csr()

        def far(self) -> int:
            return int(repr(self).count("Model")) * self.window

    model = Model()
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    out = flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: q - kv <= model.far())
    assert torch.allclose(out, flexmasks.attention(q, k, v, mask=lambda b, h, q, kv: q - kv <= 3), atol=1e-6)


def any_of(b: Any, h: Any, q: Any, kv: Any, *, masks: Any) -> Any:
    seen = masks[0](b, h, q, kv)
    for other in masks[1:]:
        seen = seen | (other(b, h, q, kv) if callable(other) else kv == other)
    return seen


def test_parameters_hold_masks_beside_other_things() -> None:
    place, index = torch.tensor(5), torch.arange(8)
    mask = flexmasks.get_mask(any_of, masks=[flexmasks.masks.causal(), lambda b, h, q, kv: kv < 3, place])
    for at in (5, 7):
        place.fill_(at)
        want = (index[:, None] >= index) | (index < 3) | (index == at)
        assert torch.equal(flexmasks.dense_mask(mask, 8)[0, 0], want)
        x = torch.randn(1, 1, 8, 4)
        assert error(flexmasks.attention(x, x, x, mask=mask), attend(x, x, x, want)[0]) < 1e-5


def test_masks_as_defaults_and_from_prepare() -> None:
    def near(b: Any, h: Any, q: Any, kv: Any, *, inner: Any = flexmasks.masks.causal()) -> Any:  # noqa: B008
        return inner(b, h, q, kv) & (q - kv < 3)

    index = torch.arange(8)
    distance = index[:, None] - index
    assert torch.equal(flexmasks.dense_mask(near, 8)[0, 0], (distance >= 0) & (distance < 3))

    def changed(size: Any, *, inner: Any) -> dict[str, Any]:
        return {"inner": inner & flexmasks.masks.causal()}

    flexmasks.register_mask(name="changed_inner", prepare=changed)(near)
    with pytest.raises(TypeError, match="`prepare` must return the mask `inner` as it was given"):
        flexmasks.dense_mask("changed_inner", 8, inner=flexmasks.masks.sliding_window(window=3))


@pytest.mark.parametrize(
    ("hook", "returned", "message"),
    [
        ("prepare", None, "`prepare` must return a dict of the function's arguments, got None"),
        ("prepare", ("width", 3), "`prepare` must return a dict of the function's arguments, got ('width', 3)"),
        ("inner_size", 8, "`inner_size` must return a flexmasks.spec.Size, got 8"),
        ("band", (3, 0), "`band` must return a flexmasks.spec.Band or None, got (3, 0)"),
        ("factors", 2.0, "`factors` must return flexmasks.spec.Factors or None, got 2.0"),
        ("cap", "30", "`cap` must return a number above 0 or None, got '30'"),
        ("cap", True, "`cap` must return a number above 0 or None, got True"),
        ("cap", 0.0, "`cap` must return a number above 0 or None, got 0.0"),
        ("cap", math.nan, "`cap` must return a number above 0 or None, got nan"),
    ],
)
def test_hooks_that_return_what_they_may_not(hook: str, returned: Any, message: str) -> None:
    name, size = f"wrong_{hook}", Size(1, 1, 8, 8, torch.device("cpu"))
    hooks: dict[str, Any] = {hook: lambda size, *, width: returned}
    if hook in ("cap", "factors"):
        flexmasks.register_score(name=name, **hooks)(lambda score, b, h, q, kv, *, width: score * width)
    else:
        flexmasks.register_mask(name=name, **hooks)(lambda b, h, q, kv, *, width: q - kv < width)
    call: dict[str, Callable[[], Any]] = {
        "factors": lambda: factors_of(flexmasks.get_score(name, width=3), size),
        "cap": lambda: cap_of(flexmasks.get_score(name, width=3), size),
        "band": lambda: band_of(flexmasks.get_mask(name, width=3), size),
    }
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{name!r}: {message}")):
        call.get(hook, lambda: flexmasks.dense_mask(name, 8, width=3))()
