"""What is true around a call, and that calls in different surroundings are kept apart."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from flexmasks.context import Context
from flexmasks.request import Request
from flexmasks.road import known_call

CPU = torch.device("cpu")


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    yield
    torch.use_deterministic_algorithms(False)


def inside(surrounding: contextlib.AbstractContextManager[Any]) -> Context:
    with surrounding:
        return Context.now(CPU)


def of_transform(run: Callable[[Callable[[Tensor], Tensor]], Any]) -> Context:
    """Return the context inside a function that a transform runs."""
    noted = []

    def function(x: Tensor) -> Tensor:
        noted.append(Context.now(CPU))
        return (x * 2).sum()

    run(function)
    return noted[0]


X = torch.ones(2)
FUNC = torch.func
SETTINGS = Context.now(CPU).settings
# What differs from a call in plain surroundings.
SURROUNDINGS: dict[str, tuple[Callable[[], Context], dict[str, Any]]] = {
    "no_grad": (lambda: inside(torch.no_grad()), {"wants_grad": False}),
    "inference_mode": (lambda: inside(torch.inference_mode()), {"wants_grad": False}),
    "autocast": (lambda: inside(torch.autocast("cpu", torch.bfloat16)), {"autocast": torch.bfloat16}),
    "autocast float16": (lambda: inside(torch.autocast("cpu", torch.float16)), {"autocast": torch.float16}),
    "default dtype": (lambda: inside(default_dtype(torch.float64)), {"default_dtype": torch.float64}),
    "dispatch mode": (lambda: inside(Passing()), {"in_mode": True}),
    "dual level": (lambda: inside(torch.autograd.forward_ad.dual_level()), {"is_transformed": True}),
    "grad": (lambda: of_transform(lambda f: FUNC.grad(f)(X)), {"has_transforms": True}),
    "vmap": (lambda: of_transform(lambda f: FUNC.vmap(f)(X)), {"has_transforms": True, "is_transformed": True}),
    "vmap of grad": (
        lambda: of_transform(lambda f: FUNC.vmap(FUNC.grad(f))(X)),
        {"has_transforms": True, "is_transformed": True},
    ),
    "jvp": (
        lambda: of_transform(lambda f: FUNC.jvp(f, (X,), (X,))),
        {"has_transforms": True, "is_transformed": True},
    ),
    "functionalize": (lambda: of_transform(lambda f: FUNC.functionalize(f)(X)), {"has_transforms": True}),
    "deterministic": (lambda: inside(deterministic()), {"settings": (*SETTINGS[:-2], True, False)}),
    "warns only": (lambda: inside(deterministic(warn_only=True)), {"settings": (*SETTINGS[:-2], True, True)}),
    "math only": (
        lambda: inside(sdpa_kernel(SDPBackend.MATH)),
        {"settings": (False, False, False, True, *SETTINGS[-2:])},
    ),
    "flash only": (
        lambda: inside(sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
        {"settings": (True, False, False, False, *SETTINGS[-2:])},
    ),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_context_tells_what_is_true(name: str) -> None:
    now, differs = SURROUNDINGS[name]
    plain = Context.now(CPU)
    assert now() == plain._replace(**differs) != plain
    assert Context.now(CPU) == plain


def test_plain_surroundings() -> None:
    plain = Context.now(CPU)
    assert plain.wants_grad
    assert plain.default_dtype == torch.float32
    assert plain.autocast is None
    facts = plain.has_transforms, plain.is_transformed, plain.in_mode, plain.is_capturing, plain.is_compiling
    assert facts == (False,) * 5


def test_only_autocast_of_the_device_counts() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert Context.now(torch.device("meta")).autocast is None
        assert Context.now(torch.device("cuda")).autocast is None
        with torch.autocast("cpu", enabled=False):
            assert Context.now(CPU).autocast is None
    with torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else contextlib.nullcontext():
        assert Context.now(CPU).autocast is None


def test_results_that_differ_may_be_forbidden() -> None:
    must = {name: now().must_be_deterministic for name, (now, _) in SURROUNDINGS.items()}
    assert [name for name, is_so in must.items() if is_so] == ["deterministic"]


def test_calls_in_other_surroundings_are_kept_apart() -> None:
    q = torch.zeros(1, 2, 8, 16)
    contexts = {name: now() for name, (now, _) in SURROUNDINGS.items()} | {"plain": Context.now(CPU)}
    known = {name: known_call(q, q, q, Request(mask="causal"), context) for name, context in contexts.items()}
    keys = {name: call.key for name, call in known.items() if call is not None}
    # What transforms make of tensors belongs to one call.
    assert known.keys() - keys == {"vmap", "vmap of grad", "jvp", "dual level"}
    for name, other in itertools.combinations(keys, 2):  # `no_grad` and `inference_mode` are one context
        assert (keys[name] == keys[other]) == (contexts[name] == contexts[other]), (name, other)
    assert len(set(keys.values())) == len({contexts[name] for name in keys}) == len(keys) - 2
    again = known_call(q.clone(), q, q, Request(mask="causal"), Context.now(CPU))
    assert again is not None
    assert again.key == keys["plain"]


def test_gradients_of_learned_tensors_are_part_of_a_call_that_wants_them() -> None:
    q, slopes = torch.zeros(1, 2, 8, 16), torch.ones(2)
    learned = slopes.clone().requires_grad_()

    def key(t: Tensor) -> Any:
        call = known_call(q, q, q, Request(score="alibi", params={"slopes": t}), Context.now(CPU))
        assert call is not None
        return call.key

    assert key(slopes) != key(learned)
    with torch.no_grad():
        assert key(slopes) == key(learned)
