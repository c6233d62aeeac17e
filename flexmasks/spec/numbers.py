"""Numbers in functions: where they are, and functions with tensors in their places.

A compiler takes the numbers that a function reads as constants, and so compiles a kernel for each of their values. In
a function with tensors in their places they are inputs of one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks.spec.captures import Place, Reader, Refilled, capture
from flexmasks.spec.indexing import bounded

MAX_COMPILED_VALUES = 6  # values of a function's numbers that are compiled in, a kernel each
_MOST = (1 << 31) - 1  # whole numbers beyond it stay constants


class Number(NamedTuple):
    """A number that a function reads."""

    place: Place
    value: int | float

    @property
    def name(self) -> str:
        """The variable, parameter or argument that holds the number."""
        return self.place.name

    @property
    def kind(self) -> Hashable:
        """Kind of the values that a kernel may take as one input.

        The kinds are floats, positive ints and other ints: the sign of a divisor matters.
        """
        return float if isinstance(self.value, float) else (int, self.value > 0)

    def tensor(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the number as a 0-dimensional tensor; of `dtype`, if it is a float."""
        if isinstance(self.value, float):
            return torch.full((), self.value, dtype=dtype, device=device)
        made = torch.full((), self.value, dtype=torch.int64, device=device)
        return bounded(made, 1 if self.value > 0 else -_MOST, _MOST)


class NumberReader(Reader):
    """A walk that notes numbers, and leaves their values out of keys.

    Numbers are found in parameters, in variables and defaults of functions, in arguments of functools.partial, and in
    dictionaries among them. A number inside a tuple or list counts as a constant.
    """

    def __init__(self) -> None:
        super().__init__([])
        self.numbers: list[Number] = []

    def slot(self, place: Place, value: Any) -> Hashable:
        if type(value) is float or (type(value) is int and abs(value) <= _MOST):
            number = Number(place, value)
            self.numbers.append(number)
            return "number", number.kind
        return super().slot(place, value)


def numbers_in(function: Callable[..., Any]) -> tuple[Hashable, list[Number]]:
    """Return a key of a function without the values of its numbers, and the numbers.

    Raises captures.Opaque if the function reads something that may change unnoticed.
    """
    reader = NumberReader()
    return reader.finish(reader.key(function)), reader.numbers


def with_inputs(function: Callable[..., Any], numbers: Sequence[Number], inputs: Sequence[Tensor]) -> Any:
    """Return a copy of a function with tensors in place of some of its numbers.

    Raises captures.Opaque for a function that cannot be copied.
    """
    tensors: list[Tensor] = []
    capture(function, tensors)
    return Refilled(function, tensors, [n.place for n in numbers])([*tensors, *inputs])
