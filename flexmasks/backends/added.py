"""Score changes that only add a number to the score, such as biases; and torch's attention kernel for the CPU, which
takes these numbers, with its log-sum-exp, which the public function does not give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import Call
from flexmasks.backends.operations import KEEP_VALUES, UNBOUNDED, Bounds, Trace, follow
from flexmasks.cache import FACT, KINDS, Part
from flexmasks.kernels.direct import with_rows_together

_ADDS: Part[bool] = Part(KINDS, "scores_that_add")


def is_added(call: Call) -> bool:
    """Return whether a score change only adds a number to the score.

    The number does not depend on the score.

    All functions of a kind are looked at once. A function that cannot be traced, or is not known to add, does not.
    """
    if call.score is None:
        return False
    sizes = [compat.size_hint(n) for n in (*call.q.shape[:3], call.k.shape[2])]
    kind = call.kernel_key[1], call.device_type
    is_known = call.shapes is not None and not call.is_traced  # the key of a traced score leaves parameters out
    adds = _ADDS.get(kind) if is_known else None
    if adds is None:
        trace = _Sum()
        error, value = follow(trace, call.score.function(), call.q.device, sizes, is_score=True)
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

    def bounds_of(self, name: str, out: Tensor, args: Any, kwargs: Any) -> Bounds:
        return (args[0], args[0]) if name == "scalar_tensor" else UNBOUNDED

    def find_errors(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        sums = [n for n, x in enumerate(args) if id(x) in self.sums]
        is_other = any(id(x) in self._others for x in args)
        if not sums and not is_other:
            return
        is_added = (name == "add" and len(sums) == 1) or (name == "sub" and sums == [0])
        keeps = name in KEEP_VALUES and out.is_floating_point() and out.dtype.itemsize >= 4
        # Where the score is replaced by -inf, as by dropout, -inf is added.
        hides = name == "where" and sums == [1] and self._bounds.get(id(args[2])) == (-math.inf, -math.inf)
        # With alpha the second operand is multiplied.
        is_sum = (is_added and (sums == [0] or kwargs.get("alpha", 1) == 1)) or hides or keeps
        (self.sums if is_sum and not is_other else self._others).add(id(out))


def shows(added: Tensor) -> bool:
    """Return whether torch's kernels for CPUs show all of what is added to the scores of a row, -inf where hidden.

    In half precision they take a block of keys whose scores are all NaN for a hidden one, and lose +inf.
    """
    return not added.numel() or bool(added.amax() < math.inf)


def grouped(x: Tensor, groups: int) -> Tensor:
    """Return a tensor with grouped heads as rows. [B or 1, H or 1, Q, N] becomes [B or 1, Hkv or 1, groups * Q, N]."""
    if x.shape[1] > 1:
        return x.unflatten(1, (-1, groups)).flatten(2, 3)  # type: ignore[no-any-return]
    return x.expand(-1, groups, -1, -1).flatten(1, 2).unsqueeze(1)


def forward_on_cpu(q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return output and lse [B, H, Q]."""
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        q, k, v = with_rows_together(q, k, v)
    out, lse = compat.flash_on_cpu(q, k, v, 0.0, False, attn_mask=added, scale=scale)
    return out, lse


def backward_on_cpu(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, added: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `forward_on_cpu`."""
    gradient, q, k, v, out = with_rows_together(gradient, q, k, v, out)
    grad_q, grad_k, grad_v = compat.flash_on_cpu_backward(
        gradient, q, k, v, out, lse, 0.0, False, attn_mask=added, scale=scale
    )
    return grad_q, grad_k, grad_v
