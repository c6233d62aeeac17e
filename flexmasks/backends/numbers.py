"""Numbers that functions read: a few values are compiled in, later values reach kernels otherwise.

That goes by the rule of `SeenValues`: from then on a score change gets the number as a tensor, and a mask goes as data.
Where neither can be, each value compiles a kernel, and one warning says so.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexmasks.backends.call import Call
from flexmasks.cache import FACT, KINDS, Part
from flexmasks.errors import passing_error
from flexmasks.plans.sizes import is_capturing
from flexmasks.spec.leaves import MAX_COMPILED_VALUES, Number, SeenValues
from flexmasks.spec.structure import Opaque, flatten, with_inputs

_log = logging.getLogger("flexmasks")
_SCORES = (-3.0, 0.5, 20.0)  # scores at which a function with inputs is compared with the function with numbers
_Values = tuple[int | float, ...]


@dataclass
class _Known:
    """Values that the numbers of one kind of function had."""

    values: SeenValues = field(default_factory=lambda: SeenValues(MAX_COMPILED_VALUES))
    in_functions: list[_Values] = field(default_factory=list)  # of all numbers in the functions that kernels got
    checked: set[Hashable] = field(default_factory=set)  # keys of functions with inputs
    why_constant: str = ""  # why numbers cannot be inputs
    has_warned: bool = False


_KNOWN: Part[_Known] = Part(KINDS, "numbers_in_functions")


def are_many(call: Call, is_score: bool, has_kernel: Callable[[], bool] = lambda: True) -> bool:
    """Return whether no kernel is to be compiled for the values of a function's numbers.

    has_kernel: whether a kernel for such calls has these values compiled in. It is asked for the first values if later
        values came before.
    """
    known, numbers = _known(call, is_score)
    return known.values.are_inputs(_values(numbers), has_kernel)


def note_run(call: Call, is_score: bool, is_data: bool = False) -> None:
    """Note that a call has run with the values of a function's numbers.

    is_data: whether the mask went as data.
    """
    known, numbers = _known(call, is_score)
    if not numbers or (is_data and not known.values.is_full):
        return
    is_compiled = known.values.note(_values(numbers))
    if is_compiled and is_score and call.score is not None:
        structure, leaves = flatten(call.score.mod())
        if structure.unreadable:
            known.why_constant = f"its function reads {structure.unreadable}"
        else:
            known.in_functions.append(_values(leaves.numbers))


def score_with_inputs(call: Call) -> tuple[Callable[..., Tensor], Hashable] | None:
    """Return the score change with tensors for the numbers that vary, and its key.

    The result is None if numbers must be constants.
    """
    known, _ = _known(call, is_score=True)
    if call.score is None or known.why_constant or is_capturing(call.q.device):
        return None
    function = call.score.mod()
    try:
        structure, leaves = flatten(function)
        inputs = _varying(known, _values(leaves.numbers))
        constants = [n for k, n in enumerate(leaves.numbers) if k not in inputs]
        key = "inputs", structure.key_without_numbers, inputs, _values(constants)
        dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        made = with_inputs(structure, leaves, {k: leaves.numbers[k].tensor(dtype, call.q.device) for k in inputs})
    except Opaque as error:
        known.why_constant = f"its function reads {error}"
        return None
    if key not in known.checked:
        known.why_constant = _difference(call, function, made)
        known.checked.add(key)
    return None if known.why_constant else (made, key)


def warn(call: Call, is_score: bool, reason: str = "") -> None:
    """Warn once that each value of a function's numbers compiles a kernel.

    reason: why the numbers cannot be inputs, if it is not known yet.
    """
    known, numbers = _known(call, is_score)
    if known.has_warned:
        return
    known.has_warned = True
    values: list[Any] = [*known.values.compiled, _values(numbers)]
    names = sorted({n.name for k, n in enumerate(numbers) if len({v[k] for v in values}) > 1})
    _log.warning(
        "%s, read by a %s function, had more than %d values, and each compiles a kernel of its own, because %s; "
        "pass what changes often as a tensor",
        ", ".join(f"`{name}`" for name in names), "score" if is_score else "mask", known.values.most,
        reason or known.why_constant,
    )  # fmt: skip


def _known(call: Call, is_score: bool) -> tuple[_Known, list[Number]]:
    part = call.score if is_score else call.mask
    if part is None or call.shapes is None or call.is_traced:
        return _Known(), []
    kind, numbers = part.numbers()
    key = is_score, kind, call.q.device.type
    known = _KNOWN.get(key)
    if known is None:
        known = _Known()
        _KNOWN.put(key, (), known, FACT)
    return known, numbers


def _values(numbers: Sequence[Number]) -> _Values:
    return tuple(n.value for n in numbers)


def _varying(known: _Known, values: _Values) -> tuple[int, ...]:
    """Return the places of numbers that had several values.

    Raises Opaque if the functions had different numbers of them.
    """
    if any(len(values) != len(other) for other in known.in_functions):
        raise Opaque("other numbers at each call")
    first = known.in_functions[0]
    varying = {k for other in (*known.in_functions, values) for k, n in enumerate(other) if n != first[k]}
    if any(n != first[k] for k, n in enumerate(values)) and len(known.in_functions) < 2 * MAX_COMPILED_VALUES:
        known.in_functions.append(values)
    return tuple(sorted(varying))


def _difference(call: Call, function: Callable[..., Tensor], made: Callable[..., Tensor]) -> str:
    """Return how a score change with inputs differs from the same with numbers, or ""."""
    sizes, device = (*call.q.shape[:3], call.k.shape[2]), call.q.device
    try:
        with torch.no_grad():
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
