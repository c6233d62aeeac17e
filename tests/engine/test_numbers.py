"""Numbers that change: which values are compiled in, which are inputs of kernels, and what is said of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmasks
from flexmasks.spec.numbers import MAX_COMPILED_VALUES, Numbers, Seen, difference
from flexmasks.spec.structure import flatten

pytestmark = pytest.mark.usefixtures("cold")

CPU = torch.device("cpu")
SIZES = 2, 3, 8, 5  # of batch, heads, queries and keys
FACTOR = 1


def numbers_of(value: Any, size: Hashable = None, what: str = "score", device: torch.device = CPU) -> Numbers:
    structure, leaves = flatten(value, contents=False)
    return Numbers(what, structure, leaves, size, device)


def scaled(n: float, more: float = 0.5) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score * n - (q - kv) * more


# --- which values are inputs ---


def test_the_first_values_are_compiled_in() -> None:
    first = [numbers_of(scaled(n)) for n in range(1, MAX_COMPILED_VALUES + 1)]
    assert not any(numbers.are_inputs or numbers.are_later for numbers in first)
    later = numbers_of(scaled(MAX_COMPILED_VALUES + 1))
    assert later.are_inputs
    assert later.are_later
    again = numbers_of(scaled(1))
    assert not again.are_inputs
    assert not again.are_later


def test_first_values_are_inputs_at_sizes_that_they_meet_late() -> None:
    """Their kernels for other sizes would be compiled beside one that has the number as an input."""
    for n in range(1, MAX_COMPILED_VALUES + 1):
        assert not numbers_of(scaled(n), size=n % 2).are_inputs
    assert not numbers_of(scaled(1), size=5).are_inputs
    assert numbers_of(scaled(9), size=0).are_inputs
    assert not numbers_of(scaled(1), size=1).are_inputs
    assert not numbers_of(scaled(1), size=5).are_inputs
    assert numbers_of(scaled(1), size=0).are_inputs
    assert not numbers_of(scaled(1), size=0).are_later


def test_values_are_counted_by_kind() -> None:
    def kind(value: Any, **more: Any) -> Hashable:
        return numbers_of(value, **more).kind

    assert kind(scaled(1.0)) == kind(scaled(2.0), size=3)
    of_learned = [kind(lambda s, b, h, q, kv, t=t, n=n: s * t * n) for n, t in enumerate(torch.ones(2), 1)]
    assert of_learned[0] == of_learned[1]
    kinds = [kind(scaled(1.0)), kind(scaled(1)), kind(scaled(-1)), kind(lambda s, b, h, q, kv: s * FACTOR)]
    kinds += [kind(scaled(1.0), what="mask"), kind(scaled(1.0), device=torch.device("meta"))]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("most", [1, 2])
def test_values_that_are_equal_and_act_otherwise_are_others(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexmasks.spec.numbers.MAX_COMPILED_VALUES", most)
    numbers_of(scaled(0.0))
    assert numbers_of(scaled(-0.0)).are_later == (most == 1)


def test_without_numbers_nothing_is_noted() -> None:
    def change(score: Tensor, *indices: Tensor) -> Tensor:
        return score

    for size in range(MAX_COMPILED_VALUES + 2):
        assert not numbers_of(change, size).are_inputs


# --- functions with inputs ---


def evaluated(function: Callable[..., Tensor]) -> Tensor:
    score, indices = torch.linspace(-2, 3, 240).view(SIZES), torch.meshgrid(*map(torch.arange, SIZES), indexing="ij")
    return function(score, *indices)


def test_numbers_that_vary_become_tensors() -> None:
    keys = []
    for n in (2.0, 3.0, 4.0):
        function = scaled(n)
        made = numbers_of(function).with_inputs(function, torch.float32, CPU, SIZES)
        assert made is not None
        keys.append(made[1])
        assert torch.allclose(evaluated(made[0]), evaluated(scaled(n)))
        assert [t.item() for t in flatten(made[0])[1].tensors] == ([] if n == 2.0 else [n])
    assert keys[0] != keys[1] == keys[2]
    function = scaled(4.0, more=0.25)
    made = numbers_of(function).with_inputs(function, torch.float32, CPU, SIZES)
    assert made is not None
    assert made[1] not in keys
    assert sorted(t.item() for t in flatten(made[0])[1].tensors) == [0.25, 4.0]


def test_constants_belong_to_the_key_of_a_function_with_inputs() -> None:
    made = []
    for n, more in ((2.0, 0.5), (3.0, 0.5)):
        function = scaled(n, more)
        made.append(numbers_of(function).with_inputs(function, torch.float32, CPU, SIZES))
    flexmasks.clear_caches()
    for n, more in ((2.0, 0.75), (3.0, 0.75)):
        function = scaled(n, more)
        made.append(numbers_of(function).with_inputs(function, torch.float32, CPU, SIZES))
    keys = [pair[1] for pair in made if pair is not None]
    assert len(set(keys)) == 4


def by_value(n: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score * n if n > 3 else score + n


def by_type(n: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: score * n if isinstance(n, float) else score


def reads_a_global(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score - kv % FACTOR


def by_global(n: float) -> Callable[..., Tensor]:
    global FACTOR
    FACTOR = int(n)
    return reads_a_global


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (by_value, "its function fails with tensors in their places: RuntimeError"),
        (by_type, "its function computes otherwise with tensors in their places"),
        (by_global, "its function reads `FACTOR`, a global variable that no copy of the function can have otherwise"),
    ],
)
def test_a_number_that_cannot_be_an_input_is_warned_of_once(
    make: Callable[..., Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flexmasks.spec.numbers.MAX_COMPILED_VALUES", 2)
    name = "FACTOR" if make is by_global else "n"
    with caplog.at_level(logging.WARNING, "flexmasks"):
        for n in (2.0, 4.0, 5.0, 6.0):
            function = make(n)
            numbers = numbers_of(function)
            made = numbers.with_inputs(function, torch.float32, CPU, SIZES)
            assert (made is None) == (n > 2)  # as long as there is one value, nothing has to become a tensor
            if numbers.are_later:
                numbers.warn()
    assert [record.getMessage() for record in caplog.records] == [
        f"`{name}`, read by a score function, had more than 2 values, and each compiles a kernel of its own, because "
        f"{reason}; pass what changes often as a tensor"
    ]


def test_a_warning_names_only_what_varies(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flexmasks"):
        for n in range(1, MAX_COMPILED_VALUES + 2):
            numbers = numbers_of(lambda b, h, q, kv, first=n, second=3: (q - kv) % first < second, what="mask")
        numbers.warn("of the weather")
    assert caplog.messages[0].startswith("`first`, read by a mask function, had more than 6 values")
    assert "because of the weather;" in caplog.messages[0]


# --- functions that compute otherwise with tensors ---


def test_differences_are_found_where_they_are() -> None:
    """The first and the last indices are compared, at small, negative and large scores."""

    def of(wrong: Callable[..., Any]) -> str:
        right = lambda s, b, h, q, kv: s * 2 + h  # noqa: E731
        return difference(right, lambda s, *i: torch.where(torch.as_tensor(wrong(s, *i)), s, right(s, *i)), CPU, SIZES)

    assert of(lambda *_: False) == ""
    differs = "its function computes otherwise with tensors in their places"
    assert of(lambda s, b, h, q, kv: kv == SIZES[3] - 1) == of(lambda s, b, h, q, kv: q == 0) == differs
    assert of(lambda s, b, h, q, kv: s < 0) == of(lambda s, b, h, q, kv: s > 10) == differs


def test_rounding_and_nan_are_no_difference() -> None:
    right = lambda s, *i: torch.log(s)  # noqa: E731 # NaN below 0
    assert difference(right, lambda s, *i: torch.log(s) * (1 + 1e-6), CPU, SIZES) == ""
    assert difference(right, lambda s, *i: torch.log(s) * (1 + 1e-2), CPU, SIZES)
    assert difference(right, lambda s, *i: torch.log(s).double(), CPU, SIZES) == ""
    assert difference(right, lambda s, *i: torch.log(s)[None], CPU, SIZES)


def test_missing_memory_is_no_difference() -> None:
    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        difference(scaled(1.0), full, CPU, SIZES)


def test_what_is_seen_is_bounded() -> None:
    seen = Seen()
    for n in range(10_000):
        seen.note(n % MAX_COMPILED_VALUES, size=n)
    assert len(seen.compiled) == MAX_COMPILED_VALUES
    assert len(seen.met) < 1000
