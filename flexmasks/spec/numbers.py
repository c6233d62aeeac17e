"""The rule of numbers that change: the first values are compiled in, later ones are inputs of kernels.

What takes the place of later values: parameters of masks that may be tensors become tensors, other masks go as data,
and numbers that score changes read become tensors. Where nothing can, each value compiles a kernel, and one warning
says so. Inside torch.compile, where each value compiles a whole graph, parameters that torch has seen change become
tensors, see `spec.encoding`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexmasks.cache import FACT, KINDS, Part
from flexmasks.errors import passing_error
from flexmasks.spec.leaves import Leaves
from flexmasks.spec.structure import Opaque, Structure, flatten, with_inputs, with_tensors

_log = logging.getLogger("flexmasks")
MAX_COMPILED_VALUES = 6  # a kernel each
MAX_SYMBOLS_COMPILED_IN = 1  # whole numbers inside torch.compile that torch has made symbols, a graph each
_MAX_NOTED_SIZES = 384  # sizes that are noted for all values together
_SCORES = (-3.0, 0.5, 20.0)  # scores at which a function with inputs is compared with the function with numbers


@dataclass
class Seen:
    """The values that the numbers of one kind of mask, score or parameter had."""

    compiled: list[Any] = field(default_factory=list)  # the first values
    had_more: bool = False  # later values came
    met: set[Hashable] = field(default_factory=set)  # first values, with the sizes where they came before later ones
    in_functions: list[tuple[int | float, ...]] = field(default_factory=list)  # values in functions of scores
    checked: set[Hashable] = field(default_factory=set)  # keys of functions with inputs
    decided: tuple[Any, ...] = ()  # a compilation of torch.compile, and whether it compiles numbers in
    why_constant: str = ""  # why numbers cannot be inputs
    has_warned: bool = False

    def note(self, values: Hashable, size: Hashable = None) -> None:
        """Note the values of a call."""
        if values not in self.compiled:
            if len(self.compiled) < MAX_COMPILED_VALUES:
                self.compiled.append(values)
            else:
                self.had_more = True
        if not self.had_more and len(self.met) < _MAX_NOTED_SIZES:
            self.met.add((values, size))

    def are_inputs(self, values: Hashable, size: Hashable) -> bool:
        """Return whether no kernel is to be compiled for values: later ones, then first ones at other sizes too."""
        return self.had_more and (values not in self.compiled or (values, size) not in self.met)

    def warn(self, what: str, names: Sequence[str], reason: str = "") -> None:
        """Warn once that each value compiles a kernel, or a graph.

        what: "mask" or "score". reason: why the numbers cannot be inputs, if it is not known yet.
        """
        if not self.has_warned:
            self.has_warned = True
            _log.warning(
                "%s, read by a %s function, had more than %d values, and each compiles a kernel of its own, because "
                "%s; pass what changes often as a tensor",
                ", ".join(f"`{name}`" for name in names), what, max(len(self.compiled), 1),
                reason or self.why_constant,
            )  # fmt: skip


_SEEN: Part[Seen] = Part(KINDS, "numbers")


def seen_of(kind: Hashable) -> Seen:
    """Return what is known of the numbers of a kind."""
    seen = _SEEN.get(kind)
    if seen is None:
        seen = Seen()
        _SEEN.put(kind, (), seen, FACT)
    return seen


class Numbers:
    """The numbers of a call's mask or score.

    kind: what the structure is without its numbers; of other kinds nothing else is known.
    """

    def __init__(self, what: str, structure: Structure, leaves: Leaves, size: Hashable, device: torch.device) -> None:
        self._what, self._numbers, self._size = what, leaves.numbers, size
        self.kind = what, structure.key_without_numbers, device.type
        self._values = tuple(repr(n.value) for n in self._numbers)
        self._seen = seen_of(self.kind) if self._values else Seen()
        self._seen.note(self._values, size)

    @property
    def are_later(self) -> bool:
        """Whether the values came after the first ones."""
        return self._values not in self._seen.compiled

    @property
    def are_inputs(self) -> bool:
        """Whether no kernel is to be compiled for the values."""
        return self._seen.are_inputs(self._values, self._size)

    def warn(self, reason: str = "") -> None:
        """Warn once that each value compiles a kernel.

        reason: why the numbers cannot be inputs, if it is not known yet.
        """
        columns = zip(*self._seen.compiled, self._values, strict=True)
        names = sorted({n.name for n, values in zip(self._numbers, columns, strict=True) if len(set(values)) > 1})
        self._seen.warn(self._what, names, reason)

    def note_function(self, function: Callable[..., Tensor]) -> tuple[Structure, Leaves]:
        """Note a score change for kernels with its numbers, and return it taken apart."""
        structure, leaves = flatten(function)
        values, known = tuple(n.value for n in leaves.numbers), self._seen.in_functions
        if structure.unreadable:
            self._seen.why_constant = f"its function reads {structure.unreadable}"
        elif values not in known and len(known) < 2 * MAX_COMPILED_VALUES:
            known.append(values)
        return structure, leaves

    def with_inputs(
        self, function: Callable[..., Tensor], dtype: torch.dtype, device: torch.device, sizes: Sequence[int]
    ) -> tuple[Callable[..., Tensor], Hashable] | None:
        """Return a score change with tensors for the numbers that vary, and its key, or None if they are constants.

        sizes: of batch, heads, queries and keys.
        """
        seen = self._seen
        structure, leaves = self.note_function(function)
        if seen.why_constant:
            return None
        values = [n.value for n in leaves.numbers]
        try:
            if any(len(values) != len(other) for other in seen.in_functions):
                raise Opaque("other numbers at each call")
            varies = [len(set(column)) > 1 for column in zip(*seen.in_functions, values, strict=True)]
            inputs = {n: x.tensor(dtype, device) for n, x in enumerate(leaves.numbers) if varies[n]}
            made = with_inputs(structure, leaves, inputs)
        except Opaque as error:
            seen.why_constant = f"its function reads {error}"
            return None
        constants = [value for n, value in enumerate(values) if n not in inputs]
        key = "inputs", structure.key_without_numbers, tuple(inputs), *constants
        if key not in seen.checked:
            seen.why_constant = difference(function, made, device, sizes)
            seen.checked.add(key)
        return None if seen.why_constant else (made, key)


def difference(
    function: Callable[..., Tensor], made: Callable[..., Tensor], device: torch.device, sizes: Sequence[int]
) -> str:
    """Return how a score change with inputs differs from the same with numbers, or ""."""
    try:
        with torch.no_grad():
            # Without values, as compilers have it: a branch that depends on a number fails.
            of_shapes = with_tensors(made, lambda t: t.to("meta"), has_own_globals=True)
            of_shapes(*[torch.zeros((), dtype=t, device="meta") for t in (torch.float32, *[torch.int64] * 4)])
            for score, last in itertools.product(_SCORES, (False, True)):
                indices = [torch.tensor(n - 1 if last else 0, device=device) for n in sizes]
                want, got = (f(torch.tensor(score, device=device), *indices) for f in (function, made))
                if got.shape != want.shape or not torch.allclose(got, want.to(got.dtype), 1e-4, 1e-5, equal_nan=True):
                    return "its function computes otherwise with tensors in their places"
    except Exception as error:  # a user's function may raise anything
        if passing_error(error) is not None:
            raise
        return f"its function fails with tensors in their places: {type(error).__name__}"
    return ""
