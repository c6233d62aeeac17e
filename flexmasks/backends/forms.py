"""The forms in which compiled kernels get a mask: its function, or data.

A function outside the table of `exact` goes as data, its bits, see `flexmasks.plans.data`. So do users' functions
without tensors on a CPU, where kernels that read data are as fast: nothing is compiled for a new function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import Call, exports_any_length
from flexmasks.backends.exact import (
    CONSTANT,
    KILLERS,
    NEGATIVE,
    OF_FLASH_ALONE,
    OF_METAL_ALONE,
    OF_SIZES,
    OVERFLOW,
    WHOLE,
    divisions,
    outside_table,
)
from flexmasks.backends.kernel_tiles import UNKNOWN_READS, Reads
from flexmasks.backends.operations import UNREADABLE, bytes_for_pairs
from flexmasks.cache import FACT, KINDS, Part
from flexmasks.context import is_capturing
from flexmasks.errors import Unfit
from flexmasks.plans.data import CannotBeData, MaskData, TooLargeForData, next_power_of_2
from flexmasks.plans.mask_plan import MaskPlan

_HOW_NOT = {
    WHOLE: "index each tensor once, by one index for each dimension",
    NEGATIVE: "clamp the index, or let an enclosing function hold the tensor",
    OVERFLOW: "write it with whole numbers that fit 32 bits",
}
# A length that a graph leaves open counts as the first of these at which a function passes, and at least as the next
# power of 2. Positions have 32 bits.
_OPEN_LENGTHS = 1 << 30, 1 << 24, 0
_MANY_DIVISIONS = 4  # from this many on, data take 0.2 to 0.7 of the function's time on a CPU; up to 3, 0.9 to 1.2
_DEAR = "reading it takes less time than the divisions of its function"
_FAILED = "torch's compiler fails for its function"
_NUMBERS = "kernels for other values of its numbers are compiled, and not for these"
_AS_FAST = "on a CPU kernels that read data are as fast, and a new function compiles nothing"
_BYTES_OF_DATA = 8  # for each pair: a word of bits, and the number of its block
_CPU = torch.device("cpu")
# By kinds of functions: why compilers may compute them otherwise than Python does; how often they divide; how
# many bytes they read for each pair; whether torch's compiler gets them wrong where lengths are symbolic.
_OUTSIDE: Part[tuple[str, ...]] = Part(KINDS, "functions_outside_table")
_DIVISIONS: Part[int] = Part(KINDS, "divisions_of_masks")
_BYTES: Part[int] = Part(KINDS, "bytes_for_pairs")
_FAILED_FOR: Part[bool] = Part(KINDS, "masks_that_failed")


def refuses(call: Call) -> str | None:
    """Return why Inductor cannot compute the functions of a call, or None."""
    return None if call.is_traced else kills(call)


def needed_data(mask: Any, why: str) -> MaskData:
    """Return a mask as data. Raises Unfit if it cannot be data, and `why` says that it must."""
    try:
        data: MaskData = mask.data()
        return data
    except TooLargeForData as error:
        why_no_data = f"{error}; write it with whole numbers that fit 32 bits, and one index for each tensor"
    except CannotBeData as error:
        why_no_data = str(error)
    raise Unfit(f"it may compute the mask otherwise than Python does: {why}; {why_no_data}")


def kills(call: Call) -> str | None:
    """Return why a kernel of Inductor's would end the process, or read other memory, for a call's score, or None.

    Any other score is computed as torch.compile computes it.
    """
    if call.score is None or call.score.is_by_library or call.score.opaque:
        return None
    reason = next((reason for reason in outside(call, is_score=True) if reason in KILLERS), None)
    if reason == NEGATIVE and call.device_type == "cpu":
        return None
    return reason and f"for the score: {reason}; {_HOW_NOT[reason]}"


def why_bits(call: Call) -> str:
    """Return why a call's mask goes as bits: the first reason why Inductor may get its function wrong, or ""."""
    return "" if call.mask.is_by_library else _why_bits(call.mask, outside(call, is_score=False))


def why_bits_of(mask: MaskPlan) -> str:
    """Return what `why_bits` does, of a mask outside of a call."""
    if mask.is_by_library:
        return ""
    size = mask.size
    sizes = size.batch, size.heads, size.q_len, size.kv_len
    return _why_bits(mask, outside_table(mask.function(), size.device, sizes))


def _why_bits(mask: Any, reasons: tuple[str, ...]) -> str:
    shows_all = reasons == (CONSTANT,) and mask.window is not None  # it has no partial blocks
    return "" if shows_all else _first_of_inductor(reasons)


def why_not_flash(call: Call) -> str | None:
    """Return why FLASH may get a call's score, or its mask if that does not go as bits, wrong, or None."""
    if call.shapes is None:
        return "it may miscompile the function, which reads variables that may change"
    of_score = outside(call, is_score=True) if call.score is not None else ()
    of_mask = () if not call.is_traced and why_bits(call) else outside(call, is_score=False)
    return next(iter(of_score), None) or next((r for r in of_mask if r in OF_FLASH_ALONE), None)


def why_bits_in_trace(mask: MaskPlan, q: Tensor, k: Tensor) -> str:
    """Return what `why_bits` does, of a mask in a graph, whose bits are computed at each run."""
    if mask.is_by_library or mask.opaque:
        return ""
    lengths, reason = (*q.shape[:3], k.shape[2]), ""
    for most in _OPEN_LENGTHS:
        sizes = [n if isinstance(n, int) else max(most, next_power_of_2(compat.size_hint(n))) for n in lengths]
        reason = _first_of_inductor(outside_table(mask.function(), q.device, sizes))
        if reason not in OF_SIZES or exports_any_length(q, k):
            break
    if not reason and most != _OPEN_LENGTHS[0]:
        all(n <= limit for n, limit in zip(lengths, sizes, strict=True))  # guards: longer calls make another graph
    return reason


def why_not_metal(call: Call) -> str | None:
    """Return why torch's kernel for MPS may get a call's score or mask wrong, or None."""
    if call.shapes is None:
        return "it may miscompile the function, which reads variables that may change"
    if reason := why_data(call):
        return f"Metal kernels take no mask as data, and {reason}"
    reasons = *outside(call, is_score=False), *(outside(call, is_score=True) if call.score is not None else ())
    return next((r for r in reasons if r in OF_METAL_ALONE or r.startswith(UNREADABLE)), None)


def _first_of_inductor(reasons: tuple[str, ...]) -> str:
    """Return the first reason that holds for Inductor, or ""."""
    return next((reason for reason in reasons if reason not in OF_FLASH_ALONE | OF_METAL_ALONE), "")


def outside(call: Call, is_score: bool) -> tuple[str, ...]:
    """Return what `outside_table` says of a call's mask or score. All functions of a kind are looked at once.

    Sizes, and where queries start, count as the next powers of 2, because decoding changes them at each step. Functions
    that do not fit these sizes are looked at again at the call's own.
    """
    part = call.score if is_score else call.mask
    if is_score not in call.findings:
        reasons = _looked_at(call, part, is_score, next_power_of_2)
        if reasons and OF_SIZES.issuperset(reasons):
            reasons = _looked_at(call, part, is_score, int)
        call.findings[is_score] = reasons
    return call.findings[is_score]


def _looked_at(call: Call, part: Any, is_score: bool, count: Callable[[int], int]) -> tuple[str, ...]:
    """Return what `outside` returns; count: a function from a size to the size that counts."""
    device, sizes = call.q.device, [count(compat.size_hint(n)) for n in (*call.q.shape[:3], call.k.shape[2])]
    if call.is_traced or call.shapes is None:
        return outside_table(part.function(), device, sizes, is_score)
    offset, *shapes = call.shapes
    kind = is_score, part.kernel_key, None if offset is None else count(offset), *shapes, call.device_type, *sizes
    reasons = _OUTSIDE.get(kind)
    if reasons is None:
        reasons = outside_table(part.function(), device, sizes, is_score)
        if not any(reason.startswith(UNREADABLE) for reason in reasons):  # which may depend on the calling code
            _OUTSIDE.put(kind, (), reasons, FACT)
    return reasons


def reads_of(call: Call, *, as_data: bool) -> Reads:
    """Return what kernels read of a call's mask, as its function or as data, and of its score change."""
    masks = _BYTES_OF_DATA if as_data else _bytes_for_pairs(call, call.mask, is_score=False)
    scores = 0 if call.score is None else _bytes_for_pairs(call, call.score, is_score=True)
    return Reads(masks + scores, call.learns)


def _bytes_for_pairs(call: Call, part: Any, is_score: bool) -> int:
    # In a graph functions are looked at over zeros, which need no memory of a GPU.
    device = _CPU if call.is_traced else call.q.device
    sizes = [compat.size_hint(n) for n in (*call.q.shape[:3], call.k.shape[2])]
    is_kept = not (call.is_traced or part.opaque)
    kind = (is_score, part.kernel_key, part.shapes, call.device_type) if is_kept else ()
    known = _BYTES.get(kind) if is_kept else None
    if known is None:
        found = bytes_for_pairs(part.function(device) if call.is_traced else part.function(), device, sizes, is_score)
        known = UNKNOWN_READS.bytes if found is None else found
        if is_kept:
            _BYTES.put(kind, (), known, FACT)
    return known


def compiled_score(call: Call, for_flash: bool) -> Callable[[Any], tuple[Callable[..., Tensor] | None, Hashable]]:
    """Return what makes of a call's score change, or one that differs in the values of tensors only, the function that
    kernels can compute, and its key.

    Kernels of FLASH take no 0-dimensional tensors in place of numbers.
    """
    key, own = call.kernel_key[1], call.score
    if own is None:
        return lambda score: (None, key)
    numbers = call.numbers_of(own)
    if numbers is not None and (for_flash or not numbers.are_inputs):
        numbers.note_function(own.mod())
    elif numbers is not None and not is_capturing(call.q.device):
        dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        sizes = *call.q.shape[:3], call.k.shape[2]
        if numbers.with_inputs(own.mod(), dtype, call.q.device, sizes) is not None:
            device = call.q.device
            return lambda score: score.numbers.with_inputs(score.mod(), dtype, device, sizes) or (score.mod(), key)
        numbers.warn()
    return lambda score: (score.mod(), key)


def why_data(call: Call, for_flash: bool = False) -> str:
    """Return why the mask goes as data, or ""."""
    if _is_as_fast(call):
        return _AS_FAST
    reason = why_bits(call)
    if not reason and call.mask.is_by_library and not for_flash and _is_dear(call):
        reason = _DEAR
    if not reason and not call.mask.is_by_library and has_failed(call):
        reason = _FAILED if _can_be_read(call) else ""
    numbers = None if reason else call.numbers_of(call.mask)
    if numbers is not None and numbers.are_inputs:
        if _can_be_read(call):
            return _NUMBERS
        numbers.warn("the mask has too many different blocks to go as data")
    return reason


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
        known = divisions(call.mask.function(), call.q.device, sizes)
        _DIVISIONS.put(kind, (), known, FACT)
    return known >= _MANY_DIVISIONS and _can_be_read(call)


def note_failed(call: Call) -> None:
    """Note that torch's compiler gets a mask's function wrong where lengths are symbolic."""
    _FAILED_FOR.put(_kind_of_failures(call), (), True, FACT)


def has_failed(call: Call) -> bool:
    """Return whether `note_failed` noted functions that differ from a call's in numbers only."""
    return call.shapes is not None and _FAILED_FOR.get(_kind_of_failures(call)) is not None


def _kind_of_failures(call: Call) -> Hashable:
    numbers = call.numbers_of(call.mask)
    return None if numbers is None else numbers.kind
