"""The call of a mask's function on ranges."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Importing a module of rules registers its rules.
import flexmasks.ranges.arithmetic
import flexmasks.ranges.bits
import flexmasks.ranges.conversion
import flexmasks.ranges.lookup
import flexmasks.ranges.reductions
import flexmasks.ranges.selection
import flexmasks.ranges.truth  # noqa: F401
from flexmasks.ranges.context import (
    INF,
    Cut,
    Evaluation,
    GiveUp,
    KnownBounds,
    Refused,
    TooLarge,
    TooWide,
    current_evaluation,
    evaluations_of_mixed_dtypes,
    give_up_on_mixed_dtypes,
)
from flexmasks.ranges.operands import as_range
from flexmasks.ranges.value import Range, dispatch


class _RangesAsArguments(TorchFunctionMode):
    """Dispatches operations on tensors with ranges among their arguments, such as `tensor[range]`."""

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__()
        self._evaluation = evaluation

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._evaluation.settle_question(sys._getframe(1))
        if func is not torch.Tensor.__getitem__ and not any(
            isinstance(a, Range) or (isinstance(a, tuple | list) and any(isinstance(x, Range) for x in a))
            for a in (*args, *kwargs.values())
        ):
            return func(*args, **kwargs)
        return dispatch(func, args, kwargs)


class Evaluated(NamedTuple):
    """What a mask's function gives on ranges."""

    truth: Range  # whether a block is certainly, and possibly, visible
    not_understood: tuple[str, ...]  # names of operations that ranges do not know
    widest: int  # elements of the largest tensor that the function saw
    computed: int  # numbers in the results of the function's operations
    cuts: tuple[Cut, ...]  # where numbers that the function reads of queries or keys alone change


def evaluate(
    function: Callable[..., Any],
    b: Range,
    h: Range,
    q: Range,
    kv: Range,
    device: torch.device | None = None,
    max_width: float = INF,
    reads_values: bool = True,
    bounds: KnownBounds | None = None,
    pairs: Callable[[str, tuple[Any, ...]], Range | None] | None = None,
) -> Evaluated:
    """Call a mask's function on ranges.

    device: the device on which the function sees its indices, by default that of the ranges. Where the ranges are on
        the CPU and `device` is a GPU, tensors that the function captured are copied to the CPU.
    max_width: limit on the elements of one tensor that the function sees.
    reads_values, bounds, pairs: see `context.Evaluation`.

    Raises TooLarge for a captured tensor too large to copy, TooWide for a tensor above `max_width`, GiveUp where the
    function cannot run on ranges, ValueError or TypeError where the function is not a mask.
    """
    compute_device = q.lo.device
    evaluation = Evaluation(device or compute_device, compute_device, max_width, reads_values, bounds, pairs)
    evaluation.batch = b
    token = current_evaluation.set(evaluation)
    try:
        try:
            with _RangesAsArguments(evaluation):
                result = function(b, h, q, kv)
        except (GiveUp, Refused, TooLarge, TooWide):
            raise
        except Exception as error:  # if the function is wrong, the evaluation element by element raises it
            raise GiveUp(f"{type(error).__name__}: {error}") from error
        finally:
            evaluation.check_no_question()
        cuts = _cuts(evaluation, q, kv) if evaluation.reached else ()
        facts = tuple(evaluation.not_understood), evaluation.widest, evaluation.computed, cuts
        return Evaluated(_truth_of(result), *facts)
    finally:
        current_evaluation.reset(token)
        evaluations_of_mixed_dtypes.discard(evaluation)


def _cuts(evaluation: Evaluation, q: Range, kv: Range) -> tuple[Cut, ...]:
    of_index = {x.steps.dim: x.steps for x in (q, kv) if x.steps is not None and x.steps.first % x.steps.size == 0}
    cuts = []
    for steps, table, along, of_batch, period in evaluation.reached:
        if steps.dim in of_index:
            index = of_index[steps.dim]
            unit = index.size // steps.size
            cuts.append(Cut(steps.dim, unit, steps.first - index.first // unit, period, table, along, of_batch))
    return tuple(cuts)


def check_boolean(dtype: torch.dtype) -> None:
    """Raise TypeError for a mask function that returns a tensor of another dtype."""
    if dtype != torch.bool:
        got = str(dtype).removeprefix("torch.")
        raise TypeError(f"a mask function must return a boolean tensor, got one of {got}; compare, as in `q >= kv`.")


def _truth_of(result: Any) -> Range:
    if not isinstance(result, Range | Tensor):  # a range must not reach another isinstance, see Range.__class__
        got = repr(result) if result is None or isinstance(result, bool) else f"a {type(result).__name__}"
        raise TypeError(f"a mask function must return a boolean tensor, got {got}.")
    dtype = result.known_dtype if isinstance(result, Range) else result.dtype
    if dtype is not torch.bool:
        give_up_on_mixed_dtypes()
    check_boolean(dtype)
    if result.ndim:
        raise GiveUp("a result with dimensions")
    return as_range(result)
