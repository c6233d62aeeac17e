"""The leaves of a structure: the tensors and numbers that a value reads, and where each is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks.spec.indexing import bounded

MOST = (1 << 31) - 1  # whole numbers beyond it stay constants


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
