"""The leaves of a structure: the tensors and numbers that a value reads, and where each is."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks.spec.indexing import bounded

MOST = (1 << 31) - 1  # whole numbers beyond it stay constants
MAX_COMPILED_VALUES = 6  # values of numbers that are compiled in, a kernel each


class Place(NamedTuple):
    """Where a leaf or a part is: in a function, a dictionary, a tuple, a functools.partial or a Mask."""

    holder: int  # its id
    kind: str  # "variable" of a closure, "default", "global variable", "parameter", "argument", "item" or "attribute"
    key: Any  # the name of a variable, the number of an argument, or the key of an item

    @property
    def name(self) -> str:
        return f"argument {self.key}" if self.kind == "argument" else str(self.key)


class Number(NamedTuple):
    """A number that a function reads, outside tuples and lists."""

    place: Place
    value: int | float
    is_global: bool  # it is reached through a global variable, which no copy of the function has for itself

    @property
    def name(self) -> str:
        return self.place.name

    def tensor(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the number as a 0-dimensional tensor; of `dtype`, if it is a float."""
        if isinstance(self.value, float):
            return torch.full((), self.value, dtype=dtype, device=device)
        made = torch.full((), self.value, dtype=torch.int64, device=device)
        return bounded(made, 1 if self.value > 0 else -MOST, MOST)


@dataclass
class SeenValues:
    """The rule by which numbers become inputs of kernels: the first values are compiled in, later ones are inputs.

    After a later value, the first ones are inputs too where no kernel has them compiled in: none is compiled for them.
    """

    most: int  # values that are compiled in
    compiled: set[Hashable] = field(default_factory=set)
    had_more: bool = False  # later values came

    @property
    def is_full(self) -> bool:
        return len(self.compiled) >= self.most

    def are_inputs(self, values: Hashable, has_kernel: Callable[[], bool]) -> bool:
        """Return whether no kernel is to be compiled for these values."""
        return self.is_full and (values not in self.compiled or (self.had_more and not has_kernel()))

    def note(self, values: Hashable) -> bool:
        """Note that a call has these values, and return whether they are new and compiled in."""
        if values in self.compiled:
            return False
        if self.is_full:
            self.had_more = True
        else:
            self.compiled.add(values)
        return not self.had_more


class Leaves:
    """The leaves of a value, in the order of its structure: what `Structure.fill` replaces.

    nearby: tensors among the attributes of objects that cannot be read. A function may read them.
    has_global: a tensor is reached through a global variable, which no copy of the function has for itself.
    """

    __slots__ = ("_numbers", "_places", "has_global", "nearby", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.nearby: list[Tensor] = []
        self.has_global = False
        # Plain tuples: every call of `attention` walks through its mask, and asks for places only to say something.
        self._places: list[Any] = []
        self._numbers: list[Any] = []

    @property
    def all_tensors(self) -> list[Tensor]:
        return [*self.tensors, *self.nearby]

    @property
    def places(self) -> list[Place | None]:
        """The places of the tensors, None in a tuple or list."""
        return [place and Place(*place) for place in self._places]

    @property
    def numbers(self) -> list[Number]:
        return [Number(Place(*place), value, is_global) for place, value, is_global in self._numbers]
