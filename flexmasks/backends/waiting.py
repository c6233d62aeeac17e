"""Small calls on a CPU, which wait with compiling until it pays.

Compiling a kernel takes seconds, as long as a hundred short calls. So a kind of calls without gradients runs on `short`
at first, or if that refuses on `reference`, until its calls have computed as much as takes a few seconds, and is
compiled then: a loop takes at most about twice the time that the better way alone would have taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexmasks.backends.call import Call, Unavailable
from flexmasks.cache import FACT, KINDS, Part

MAX_LENGTH = 1024  # of queries, and of keys
# Products of a kind of calls before it is compiled. On two cores these take 2 to 3 s on `short`, and compiling takes 3
# to 30 s. A call of 8 heads of 1,024 tokens, head size 64, has 2**30: 45 to 50 ms there, and compiled 6 to 34 ms. A
# call of 64 tokens has 2**22: 0.1 ms there and compiled.
WORK_BEFORE_COMPILING = 1 << 36
_UNCOMPILED: Part[Uncompiled] = Part(KINDS, "uncompiled")


@dataclass
class Uncompiled:
    """How much a kind of calls has computed without compiling."""

    products: int = 0

    says = "no: it is small, and answered without compiling until such calls have taken as long as that would"

    def count(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Count a call. Raises Unavailable if such calls are to be compiled."""
        if self.products >= WORK_BEFORE_COMPILING:
            raise Unavailable("such calls are compiled from now on")
        self.products += q.shape[:3].numel() * k.shape[2] * (q.shape[3] + v.shape[3])


def uncompiled(call: Call) -> Uncompiled | None:
    """Return what a call's kind has computed if the call waits with compiling, else None."""
    q, k, v = call.q, call.k, call.v
    if call.device_type != "cpu" or call.needs_grad or call.is_traced or call.kernel_options:
        return None
    products = q.shape[:3].numel() * k.shape[2] * (q.shape[3] + v.shape[3])
    if max(q.shape[2], k.shape[2]) > MAX_LENGTH or products >= WORK_BEFORE_COMPILING:
        return None
    known = _UNCOMPILED.get(call.outcome_key)
    if known is None:
        known = Uncompiled()
        _UNCOMPILED.put(call.outcome_key, (), known, FACT)
    return None if known.products >= WORK_BEFORE_COMPILING else known
