"""The forms in which compiled kernels get a mask: its function, or data.

A function that a compiler may compute otherwise than Python does goes as data, see `flexmasks.plans.data`. So do users'
functions without tensors on a CPU, where kernels that read data are as fast: nothing is compiled for a new function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends import numbers
from flexmasks.backends.call import Call
from flexmasks.backends.inexact import HALF, NARROW, NEGATIVE, OVERFLOW, WHOLE, divisions, inexact
from flexmasks.backends.operations import DTYPE, UNREADABLE
from flexmasks.backends.rewritten import FROM_THE_FRONT, WAYS, WAYS_IN_TRACE
from flexmasks.cache import FACT, KINDS, Part
from flexmasks.plans.data import CannotBeData, TooLargeForData, next_power_of_2

_WRONG = (WHOLE, OVERFLOW, DTYPE, NARROW, HALF)  # what is wrong by more than rounding
_MANY_DIVISIONS = 4  # from this many on, data take 0.2 to 0.7 of the function's time on a CPU; up to 3, 0.9 to 1.2
_HOW_NOT_NEGATIVE = "clamp the index, or let an enclosing function hold the tensor"
_DEAR = "reading it takes less time than the divisions of its function"
_FAILED = "torch's compiler fails for its function"
_NUMBERS = "kernels for other values of its numbers are compiled, and not for these"
_AS_FAST = "on a CPU kernels that read data are as fast, and a new function compiles nothing"
# By kinds of functions: why Inductor may compute them otherwise than Python does, or ""; how often they divide; whether
# torch's compiler gets them wrong where lengths are symbolic.
_INEXACT: Part[str] = Part(KINDS, "inexact_functions")
_DIVISIONS: Part[int] = Part(KINDS, "divisions_of_masks")
_FAILED_FOR: Part[bool] = Part(KINDS, "masks_that_failed")


def refuses(call: Call) -> str | None:
    """Return why Inductor can compute neither functions nor data of a call, or None."""
    if call.is_traced:
        return None
    if call.score is not None and not call.score.is_by_library:
        reason = _inexact(call, call.score.mod, is_score=True)
        if reason and reason not in WAYS:
            hint = f"; {_HOW_NOT_NEGATIVE}" if reason == NEGATIVE else ""
            return f"it may compute the score otherwise than Python does: {reason}{hint}"
    # What goes as data is not looked at. Blocks that are found for the data come with their bits, so nothing else may
    # ask for blocks before.
    reason = "" if _is_as_fast(call) else why_inexact(call)
    if not reason:
        return None
    try:
        call.mask.data()
        return None
    except TooLargeForData as error:
        why_no_data = f"{error}; write it with whole numbers that fit 32 bits, and one index for each tensor"
    except CannotBeData as error:
        why_no_data = str(error)
    return f"it may compute the mask otherwise than Python does: {reason}; {why_no_data}"


def refuses_traced(call: Call) -> str | None:
    """Return why the user's own torch.compile may not compile a call's score, or None.

    Only what ends the process, or is wrong by more than rounding, is refused.
    """
    reason = way_in_trace(call, is_score=True)
    return f"it may compute the score otherwise than Python does: {reason}" if reason in _WRONG else None


def way_in_trace(call: Call, is_score: bool) -> str:
    """Return how the user's own torch.compile computes a function right, or why not.

    A key of WAYS_IN_TRACE, or "" for the function as it is. A mask may not round, and a score may.
    """
    part = "score" if is_score else "mask"
    if part not in call.findings:
        call.findings[part] = look_in_trace(call.score if is_score else call.mask, call.q, call.k, is_score)
    return call.findings[part]


def look_in_trace(part: Any, q: Tensor, k: Tensor, is_score: bool) -> str:
    """Return what `way_in_trace` returns of a TracedMask or TracedScore."""
    if part is None or part.is_by_library or part.opaque:
        return ""
    mod, device = part.mod(), q.device
    sizes = [compat.size_hint(n) for n in (*q.shape[:3], k.shape[2])]
    reasons = _WRONG if is_score else None
    reason = inexact(mod, device, sizes, is_score, reasons)
    if reason is None:
        return ""
    for way, rewrite in WAYS_IN_TRACE.items():
        if inexact(rewrite(mod), device, sizes, is_score, reasons) is None:
            return way
    return reason


def why_inexact(call: Call) -> str:
    """Return why Inductor may compute the mask otherwise than Python does, or ""."""
    reason = "" if call.mask.is_by_library else _inexact(call, call.mask.mod, is_score=False)
    return "" if reason in WAYS else reason


def compiled_mask(call: Call, block_mask: compat.BlockMask, for_flash: bool) -> compat.BlockMask:
    """Return a call's BlockMask with its function as kernels can compute it."""
    way = "" if call.mask.is_by_library else _inexact(call, call.mask.mod, is_score=False)
    if way not in WAYS or (for_flash and way in FROM_THE_FRONT):
        return block_mask
    rewritten = copy.copy(block_mask)
    rewritten.mask_mod = _rewritten(block_mask.mask_mod, way)
    return rewritten


def compiled_score(
    call: Call, has_kernel: Callable[[], bool], for_flash: bool
) -> tuple[Callable[..., Tensor] | None, Hashable]:
    """Return a call's score change as kernels can compute it, and its key.

    Kernels of FLASH take no 0-dimensional tensors in place of numbers.
    has_kernel: whether a kernel for such calls has the score change with its numbers.
    """
    key = call.kernel_key[1]
    if call.score is None:
        return None, key
    if not for_flash and numbers.are_many(call, is_score=True, has_kernel=has_kernel):
        made = numbers.score_with_inputs(call)
        reason = "" if made is None else _look(call, lambda: made[0], made[1], is_score=True)
        if made is not None and (not reason or reason in WAYS):
            return _rewritten(made[0], reason), made[1]
        numbers.warn(call, is_score=True, reason=reason)
    way = "" if call.score.is_by_library else _inexact(call, call.score.mod, is_score=True)
    # FLASH is refused if an index may be negative at the call's own sizes.
    return _rewritten(call.score.mod(), "" if for_flash and way in FROM_THE_FRONT else way), key


def _rewritten(function: Callable[..., Tensor], way: str) -> Callable[..., Tensor]:
    return cast(Callable[..., Tensor], WAYS[way](function)) if way in WAYS else function


def why_data(call: Call, is_compiled: bool, has_kernel: Callable[[], bool], for_flash: bool = False) -> str:
    """Return why the mask goes as data, or "".

    is_compiled: whether there is a kernel for the functions of mask and score.
    has_kernel: whether a kernel for such calls has the mask with its numbers.
    """
    if _is_as_fast(call):
        return _AS_FAST
    reason = why_inexact(call)
    if not reason and call.mask.is_by_library and not for_flash and _is_dear(call):
        reason = _DEAR
    if not reason and not call.mask.is_by_library and has_failed(call):
        reason = _FAILED if _can_be_read(call) else ""
    if reason or is_compiled:
        return reason
    if numbers.are_many(call, is_score=False, has_kernel=has_kernel):
        if _can_be_read(call):
            return _NUMBERS
        numbers.warn(call, is_score=False, reason="the mask has too many different blocks to go as data")
    return ""


def _is_as_fast(call: Call) -> bool:
    """Return whether a user's mask goes as data because kernels read it as fast as they compute its function."""
    return call.mask.reads_data_as_fast and not call.mask.is_by_library and _can_be_read(call)


def _can_be_read(call: Call) -> bool:
    try:
        call.mask.data()
    except CannotBeData:
        return False
    return True


def _is_dear(call: Call) -> bool:
    """Return whether kernels read the mask sooner than they compute it."""
    if not call.mask.reads_data_as_fast:
        return False
    sizes = [next_power_of_2(n) for n in (*call.q.shape[:3], call.k.shape[2])]
    kind = call.kernel_key, *sizes
    known = _DIVISIONS.get(kind)
    if known is None:
        known = divisions(call.mask.mod(), call.q.device, sizes)
        _DIVISIONS.put(kind, (), known, FACT)
    return known >= _MANY_DIVISIONS and _can_be_read(call)


def note_failed(call: Call) -> None:
    """Note that torch's compiler gets a mask's function wrong where lengths are symbolic."""
    _FAILED_FOR.put(_kind_of_failures(call), (), True, FACT)


def has_failed(call: Call) -> bool:
    """Return whether `note_failed` noted functions that differ from a call's in numbers only."""
    return call.shapes is not None and _FAILED_FOR.get(_kind_of_failures(call)) is not None


def _kind_of_failures(call: Call) -> Hashable:
    return call.mask.numbers()[0], call.q.device.type


def note_run(call: Call, is_data: bool) -> None:
    """Note that a call runs with the mask's function, or with its data."""
    numbers.note_run(call, is_score=True)
    numbers.note_run(call, is_score=False, is_data=is_data)


def _way_to_rewrite(
    function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int], is_score: bool
) -> str | None:
    """Return the first of WAYS in which Inductor computes a function as Python does."""
    for way, rewrite in WAYS.items():
        rewritten = rewrite(function)
        if rewritten is not None and inexact(rewritten, device, sizes, is_score) is None:
            return way
    return None


def _inexact(call: Call, function: Callable[[], Callable[..., Tensor]], is_score: bool) -> str:
    """Return why a call's function may be computed otherwise, one of WAYS, or ""."""
    part = "score" if is_score else "mask"
    if part not in call.findings:
        call.findings[part] = _look(call, function, call.kernel_key[is_score], is_score)
    return call.findings[part]


def _look(call: Call, function: Callable[[], Callable[..., Tensor]], key: Hashable, is_score: bool) -> str:
    """Return why a function may be computed otherwise, one of WAYS, or "".

    All functions of a key are looked at once.

    Sizes, and where queries start, count as the next powers of 2, because decoding changes them at each step. Indices
    that may be negative at these sizes are looked at again at the call's own.
    """
    reason = _look_at_sizes(call, function, key, is_score, next_power_of_2)
    return _look_at_sizes(call, function, key, is_score, int) if reason == NEGATIVE else reason


def _look_at_sizes(
    call: Call,
    function: Callable[[], Callable[..., Tensor]],
    key: Hashable,
    is_score: bool,
    count: Callable[[int], int],
) -> str:
    """Return what `_look` returns.

    count: a function from a size to the size that counts.
    """
    device, sizes = call.q.device, [count(n) for n in (*call.q.shape[:3], call.k.shape[2])]
    shapes: tuple[Any, ...] = ()
    if call.shapes is not None:
        offset, *shapes_of_tensors = call.shapes
        shapes = (None if offset is None else count(offset), *shapes_of_tensors)
    kind = is_score, key, shapes, device.type, *sizes
    reason = None if call.shapes is None else _INEXACT.get(kind)
    if reason is None:
        reason = inexact(function(), device, sizes, is_score) or ""
        if reason in (WHOLE, OVERFLOW, NEGATIVE, DTYPE, NARROW):
            reason = _way_to_rewrite(function(), device, sizes, is_score) or reason
        # Whether a function can be traced may depend on the calling code.
        if call.shapes is not None and not reason.startswith(UNREADABLE):
            _INEXACT.put(kind, (), reason, FACT)
    return reason
