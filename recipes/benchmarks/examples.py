"""Examples of registered masks and scores at lengths that fit them, and on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexmasks.spec.registry import example
from flexmasks.spec.values import Mask, Modifier, Score

SHORT = (64, 128, 256, 512, 1024)  # lengths, the shortest first
_Result = TypeVar("_Result")


def at_most(length: int) -> tuple[int, ...]:
    """Return a length and all shorter lengths of SHORT, the longest first."""
    return length, *(n for n in SHORT[::-1] if n < length)


def fitting(
    kind: str, name: str, lengths: Iterable[int], use: Callable[[Mask | Score, int], _Result]
) -> tuple[int, Mask | Score, _Result]:
    """Return (length, example, `use(example, length)`) for the first length at which nothing is raised.

    Raises the error of the first length if every length fails.
    """
    errors: list[Exception] = []
    for length in lengths:
        try:
            value = example(kind, name, length)
            return length, value, use(value, length)
        except Exception as error:  # a user's function may raise anything
            errors.append(error)
    raise errors[0]


def on_device(value: Modifier, device: torch.device) -> Any:
    """Return the mask or score with its tensors on a device, and sequences as tensors there."""
    parameters = value._definition.parameters

    def moved(name: str, given: Any) -> Any:
        if isinstance(given, Modifier):
            return on_device(given, device)
        if parameters[name].is_sequence(given):
            return parameters[name].tensor(given, device)
        if isinstance(given, tuple):
            return tuple(moved(name, g) for g in given)
        return given.to(device) if isinstance(given, Tensor) else given

    return type(value)(value._definition, {n: moved(n, v) for n, v in value.params.items()})
