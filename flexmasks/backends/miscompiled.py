"""Detect functions that torch's FLASH backend silently miscompiles.

Known errors of its compiler in torch 2.11 to 2.13 (CuteDSLOpOverrides, CuTe, flash-attn-4 4.0.0b36):

- `torch.where` between two numbers gives booleans.
- A remainder has the sign of the dividend, as in C, where torch's has the sign of the divisor.
- A cast of a number to bool keeps its lowest bit.
- A negative index reads memory before the tensor.
- A view of a captured tensor is read as the tensor itself.
- The backward pass multiplies an infinite factor by 0 where the mask hides, which is NaN.
- A constant mask skips all blocks (pytorch issue 188322).
- GPUs of capability 10 and above read tensors in scores by vectors, some wrongly (pytorch issue 188878).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.operations import COMPARISONS, KEEP_VALUES, MAKE_CONSTANTS, Trace, follow
from flexmasks.plans.sizes import capability

NO_BLOCKS = "it skips all blocks if the mask's function is a constant"
_BOOLEANS = "its compiler makes booleans of torch.where between two numbers"
_REMAINDER = "its compiler gives remainders of negative numbers the wrong sign"
_TRUTH = "its compiler reads only the lowest bit of a number used as a truth value"
_INDEX = "its compiler reads wrong memory at a negative index, and an index may be negative here"
_VIEW = "its compiler reads tensors wrongly if the function changes them as a whole"
_VECTORS = "its compiler reads some tensors wrongly on GPUs of this kind"
_INFINITE = "its backward pass is NaN where a hidden factor is infinite, and a factor may be infinite here"

_CORRECT = {
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "div", "exp", "exp2", "floor_divide",
    "index", "logical_and", "logical_not", "logical_or", "maximum", "minimum", "mul", "neg", "remainder", "rsub",
    "sigmoid", "sub", "tanh", "tanh_approx", "where", *MAKE_CONSTANTS, *KEEP_VALUES, *COMPARISONS,
}  # fmt: skip


def miscompiled(
    function: Callable[..., Tensor], device: torch.device, sizes: Sequence[int], is_score: bool = False
) -> str | None:
    """Return why FLASH may miscompile a mask_mod or score_mod, or None.

    The function is a score_mod if `is_score`.

    sizes: batch, query heads, queries and keys. NO_BLOCKS is returned for every constant mask, though a constant that
    shows all pairs needs no blocks.
    """
    trace = _Trace(is_score, is_score and compat.FLASH_READS_VECTORS and _is_blackwell(device))
    error, value = follow(trace, function, device, sizes, is_score)
    return NO_BLOCKS if error is None and not is_score and not trace.varies(value) else error


def _is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and capability(device)[0] >= 10


class _Trace(Trace):
    """Follows the operations of a function as FLASH's compiler sees them."""

    def __init__(self, is_score: bool, reads_vectors: bool) -> None:
        super().__init__(is_score)
        self.reads_vectors = reads_vectors
        self._wrong_remainders: set[int] = set()  # remainders that are correct only in a comparison with 0

    def is_known(self, name: str, args: Any) -> bool:
        return name in _CORRECT or (name == "pow" and type(args[1]) is int and args[1] > 0)

    def check_result(self, value: Any) -> None:
        self.check(value)

    def check(self, *used: Any) -> None:
        """Note an error if a wrong remainder is used."""
        if any(id(x) in self._wrong_remainders for x in used):
            self.errors[_REMAINDER] = None

    def find_errors(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if not (name in ("eq", "ne") and type(args[1]) is int and args[1] == 0):
            self.check(*tensors)
        if name == "index":
            self._check_index(*args)
        elif any(x.ndim for x in tensors):
            self.errors[_VIEW] = None
        if name == "where" and out.dtype != torch.bool and not any(map(self.varies, args[1:])):
            self.errors[_BOOLEANS] = None
        if name == "remainder" and not self._sign_does_not_matter(out, *args[:2]):
            self._wrong_remainders.add(id(out))
        is_truth = name.startswith("logical") or (name in KEEP_VALUES and out.dtype == torch.bool)
        if is_truth and any(x.dtype != torch.bool for x in tensors):
            self.errors[_TRUTH] = None
        if name in KEEP_VALUES and out.dtype in (torch.float16, torch.bfloat16):
            self.errors["its compiler does not round to half precision"] = None
        if self.is_score and name == "div" and self.varies(args[1]):
            self.errors[_INFINITE] = None
        if self.is_score and name in ("exp", "exp2") and self.bounds_or_any(args[0])[1] > 80:
            self.errors[_INFINITE] = None

    def _check_index(self, table: Tensor, indices: Sequence[Tensor | None]) -> None:
        self.check(*indices)
        if table.dtype == torch.uint8:
            self.errors["its compiler reads uint8 as signed"] = None
        if any(i is None or i.dtype == torch.bool or self.bounds_or_any(i)[0] < 0 for i in indices):
            self.errors[_INDEX] = None
        if any(i is not None and not self.varies(i) for i in indices):
            self.errors["its compiler takes no constant index"] = None
        if self.reads_vectors:
            self.errors[_VECTORS] = None

    def _sign_does_not_matter(self, out: Tensor, dividend: Any, divisor: Any) -> bool:
        """Return whether a remainder is the same with either sign.

        torch gives it the divisor's sign, FLASH's compiler the dividend's.
        """
        is_zero = type(divisor) is int and abs(divisor) == 1 and not out.is_floating_point()
        return is_zero or (self.bounds_or_any(dividend)[0] >= 0 and self.bounds_or_any(divisor)[0] >= 0)
