"""Score changes that only add a number to the score, such as biases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import Call
from flexmasks.backends.operations import KEEP_VALUES, Trace, follow
from flexmasks.cache import FACT, KINDS, Part

_ADDS: Part[bool] = Part(KINDS, "scores_that_add")


def is_added(call: Call) -> bool:
    """Return whether a score change only adds a number to the score.

    The number does not depend on the score.

    All functions of a kind are looked at once. A function that cannot be traced, or is not known to add, does not.
    """
    if call.score is None:
        return False
    sizes = [compat.size_hint(n) for n in (*call.q.shape[:3], call.k.shape[2])]
    kind = call.kernel_key[1], call.q.device.type
    is_known = call.shapes is not None and not call.is_traced  # the key of a traced score leaves parameters out
    adds = _ADDS.get(kind) if is_known else None
    if adds is None:
        trace = _Sum()
        error, value = follow(trace, call.score.mod(), call.q.device, sizes, is_score=True)
        adds = error is None and id(value) in trace.sums
        if is_known:
            _ADDS.put(kind, (), adds, FACT)
    return adds


class _Sum(Trace):
    """Follows the score through a function, as long as numbers are added to it."""

    def __init__(self) -> None:
        super().__init__(is_score=True)
        self.sums: set[int] = set()  # ids of the score, and of the score with something added
        self._others: set[int] = set()  # ids of what depends on the score otherwise

    def start(self, scores: Sequence[Tensor], indices: Sequence[Tensor]) -> None:
        self.sums.update(map(id, scores))

    def is_known(self, name: str, args: Any) -> bool:
        return True

    def find_errors(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        sums = [n for n, x in enumerate(args) if id(x) in self.sums]
        is_other = any(id(x) in self._others for x in args)
        if not sums and not is_other:
            return
        is_added = (name == "add" and len(sums) == 1) or (name == "sub" and sums == [0])
        keeps = name in KEEP_VALUES and out.is_floating_point() and out.dtype.itemsize >= 4
        # With alpha the second operand is multiplied.
        is_sum = (is_added and (sums == [0] or kwargs.get("alpha", 1) == 1)) or keeps
        (self.sums if is_sum and not is_other else self._others).add(id(out))


def shows(added: Tensor) -> bool:
    """Return whether torch's kernels for CPUs show all of what is added to the scores of a row, -inf where hidden.

    In half precision they take a block of keys whose scores are all NaN for a hidden one, and lose +inf.
    """
    return not added.numel() or bool(added.amax() < math.inf)
