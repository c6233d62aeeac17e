"""The registered examples, as masks and scores at a length that they fit: for pictures, code and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexmasks.spec.arguments import get_mask, get_score
from flexmasks.spec.definitions import definition
from flexmasks.spec.values import Mask, Modifier, Score

SHORT = (64, 128, 256, 512, 1024)  # lengths to try
_Found = TypeVar("_Found")


def example(kind: str, name: str, length: int) -> Mask | Score:
    """The mask or score of that name with its example's parameters; those of a function without any need none."""
    found = definition(kind, name)
    if found.example is None and any(p.required for p in found.parameters.values()):
        raise ValueError(f"register {name!r} with example=lambda length: {{...}}, parameters that show it well.")
    params = found.example(length) if found.example is not None else {}
    return get_mask(name, **params) if kind == "mask" else get_score(name, **params)


def at_most(length: int) -> tuple[int, ...]:
    """That length, and the shorter ones of SHORT, to try where it does not fit."""
    return length, *(n for n in SHORT[::-1] if n < length)


def fitting(
    kind: str, name: str, lengths: Iterable[int], use: Callable[[Mask | Score, int], _Found]
) -> tuple[int, Mask | Score, _Found]:
    """The example at the first of these lengths at which `use(value, length)` raises nothing, and what that returned.

    Where none fits, raises what the first length raised.
    """
    failed: list[Exception] = []
    for length in lengths:
        try:
            value = example(kind, name, length)
            return length, value, use(value, length)
        except Exception as error:  # what a user's function raises
            failed.append(error)
    raise failed[0]


def on_device(value: Modifier, device: torch.device) -> Any:
    """The same mask or score with its parameters there: tensors, and sequences, which become tensors."""
    parameters = value.definition.parameters

    def moved(name: str, given: Any) -> Any:
        if isinstance(given, Modifier):
            return on_device(given, device)
        if parameters[name].is_sequence(given):
            return parameters[name].tensor(given, device)
        if isinstance(given, tuple):
            return tuple(moved(name, g) for g in given)
        return given.to(device) if isinstance(given, Tensor) else given

    return type(value)(value.definition, {n: moved(n, v) for n, v in value.params.items()})
