"""State of one evaluation, and the exceptions that end it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.devices import has_float64

INF = math.inf
EXACT_LIMIT = 2.0**52  # float64 is exact for all integers of a smaller absolute value
_MAX_MOVED_ELEMENTS = 1 << 17  # a captured tensor with more elements is not copied from a GPU to the CPU


class GiveUp(Exception):
    """A function cannot run on ranges, for the reason given: all blocks are then undecided."""


class Refused(ValueError):
    """Error in a function that torch refuses as a mask, too."""


class TooLarge(Exception):
    """A captured tensor that is too large to copy from a GPU."""


class TooWide(Exception):
    """A tensor of `width` elements is too wide for the number of blocks evaluated at once."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.width = width


# Tensors that functions captured, by identity, version and device, with the bounds of their elements.
KnownBounds = dict[tuple[int, int, torch.device], tuple[Tensor, tuple[Tensor, Tensor, float]]]


class Cut(NamedTuple):
    """Numbers of the query, or of the key, that a function reads or computes: it may treat positions on both sides of a
    change differently, so that a block is decided only in pieces. Position n has the number n // unit + shift.
    """

    dim: int  # of the block dimensions: 2 for queries, 3 for keys
    unit: int
    shift: int
    period: int = 0  # the numbers change at its multiples
    table: Tensor | None = None  # or where the table changes along its dimension `along`
    along: int = 0
    of_batch: bool = False  # its first index is that of the batch element


class Evaluation:
    """One call of a function on ranges.

    device: the device that the function sees its indices on.
    compute_device: the device of the ranges' tensors.
    max_width: limit on the elements of one tensor that the function sees; a larger tensor raises TooWide.
    pairs: rules of operations on a number of the query and one of the key, see `ranges.intervals`; None if those of all
        ranges hold for them, too.
    reads_values: whether the host may read values of tensors. If not, the rules run operations whose shapes depend on
        shapes only, which can be traced, compiled and captured in a CUDA graph; some ranges are then wider.
    bounds: of captured tensors, which several evaluations may share.
    """

    def __init__(
        self,
        device: torch.device,
        compute_device: torch.device,
        max_width: float = INF,
        reads_values: bool = True,
        bounds: KnownBounds | None = None,
        pairs: Callable[[str, tuple[Any, ...]], Any] | None = None,
    ) -> None:
        self.pairs = pairs
        self.device, self.compute_device, self._max_width = device, compute_device, max_width
        self.reads_values = reads_values
        self.not_understood: list[str] = []  # names of operations without a rule
        self.mixed_dtypes = False  # whether an operation mixed dtypes: torch may give its result another dtype
        self.rule_depth = 0  # number of rules that are running, one inside the other
        self._asked_for_type = False  # whether the function asked for the type of a range
        self._open_question: tuple[FrameType, int] | None = None  # the caller's frame and instruction
        self.widest = 1  # elements of the largest tensor that the function saw
        self.computed = 0  # numbers in the results of the function's operations
        self.batch: Any = None  # the function's first index
        # Steps of indices of tables, with the table, the dimension and whether `batch` is its first index, or of what
        # is divided, with the divisor.
        self.reached: list[tuple[Any, Tensor | None, int, bool, int]] = []
        self._bounds: KnownBounds = {} if bounds is None else bounds

    def note_width(self, width: int) -> None:
        """Raise TooWide for too many elements, before the tensor is broadcast to another operand's blocks."""
        if width > self._max_width:
            raise TooWide(width)
        self.widest = max(self.widest, width)

    def ask_for_type(self, frame: FrameType) -> None:
        """Raise GiveUp if the function asks for the type of a range. torch itself asks, too, when it reads the
        arguments of a call such as torch.where(condition, range, 0); the call that the same instruction dispatches
        settles that question.
        """
        question = frame, frame.f_lasti
        if "isinstance" in frame.f_code.co_names or self._open_question not in (None, question):
            self._refuse_question()
        self._open_question = question

    def settle_question(self, frame: FrameType) -> None:
        if self._open_question is not None:
            if self._open_question != (frame, frame.f_lasti):
                self._refuse_question()
            self._open_question = None

    def check_no_question(self) -> None:
        """Raise GiveUp if the function asked, even if it caught the exception."""
        if self._asked_for_type or self._open_question is not None:
            self._refuse_question()

    def _refuse_question(self) -> NoReturn:
        self._asked_for_type, self._open_question = True, None
        raise GiveUp("a question for the type of an index")

    def bounds_of(self, values: Tensor) -> tuple[Tensor, Tensor, float]:
        key = id(values), version_of(values), self.compute_device
        if key not in self._bounds:
            if values.ndim and values.device != self.device:
                raise Refused(
                    f"a mask function uses a tensor on device {values.device}, but its indices are on {self.device}."
                )
            is_moved = values.device != self.compute_device and has_float64(values.device)  # else it must be
            if is_moved and values.numel() > _MAX_MOVED_ELEMENTS:
                raise TooLarge(f"a tensor of {values.numel()} elements")
            self.computed += values.numel()
            # Keeping the tensor with its bounds prevents that another tensor gets its id.
            self._bounds[key] = values, bounds_of_values(values.detach().to(self.compute_device))
        return self._bounds[key][1]


current_evaluation: ContextVar[Evaluation | None] = ContextVar("evaluation", default=None)
# What looks at a tensor, the index of a dimension and its length, and returns the index to take, see `blocks.reads`.
index_guard: ContextVar[Callable[[Any, Any, int], Any] | None] = ContextVar("index_guard", default=None)
# Running evaluations that mixed dtypes. The set is almost always empty, so reading a dtype rarely looks up the context.
evaluations_of_mixed_dtypes: set[Evaluation] = set()


def give_up_on_mixed_dtypes() -> None:
    """Raise GiveUp where a function, not a rule, reads a dtype that may be another one in torch."""
    evaluation = current_evaluation.get()
    if evaluation is not None and evaluation.mixed_dtypes and not evaluation.rule_depth:
        raise GiveUp("the dtype of an operation that mixes dtypes")


def reads_values() -> bool:
    evaluation = current_evaluation.get()
    return evaluation is None or evaluation.reads_values


def version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else compat.version(tensor)


def captured_bounds(values: Tensor) -> tuple[Tensor, Tensor, float]:
    """`bounds_of_values`, computed once in an evaluation."""
    evaluation = current_evaluation.get()
    return bounds_of_values(values) if evaluation is None else evaluation.bounds_of(values)


def bounds_of_values(values: Tensor) -> tuple[Tensor, Tensor, float]:
    """Bounds of each element, bool for truth values and float64 for numbers, and the largest absolute value. Both
    bounds are one tensor if float64 holds every element.
    """
    if values.dtype == torch.bool:
        return values, values, 1.0
    if values.is_complex():
        raise GiveUp("complex numbers")
    bound = values.detach().double()
    if not reads_values():
        return _bounds_by_dtype(values, bound)
    limit = float(bound.abs().max()) if bound.numel() else 0.0
    if limit < EXACT_LIMIT:
        return bound, bound, limit
    if not values.dtype.is_floating_point:  # the conversion to float64 may have rounded
        inf = torch.full_like(bound, INF)
        return torch.nextafter(bound, -inf), torch.nextafter(bound, inf), INF
    if math.isnan(limit):
        return torch.where(bound.isnan(), -INF, bound), torch.where(bound.isnan(), INF, bound), INF
    return bound, bound, limit


def _bounds_by_dtype(values: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, float]:
    if values.dtype.is_floating_point:
        is_known = ~bound.isnan()
    elif values.dtype.itemsize < 8:
        return bound, bound, float(torch.iinfo(values.dtype).max) + 1
    else:
        is_known = bound.abs() < EXACT_LIMIT
    return torch.where(is_known, bound, -INF), torch.where(is_known, bound, INF), INF
