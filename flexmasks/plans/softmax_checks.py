"""Checks of the arguments of the masked softmax: errors name the call, the value received and what to pass."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.spec.parameters import describe

ARRAYS = (list, tuple, np.ndarray)
_SCORE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HIDDEN_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SCORE_DTYPES)
_SYMBOLIC_NUMBERS = (torch.SymFloat, torch.SymInt)
_MAX_SCALE = torch.finfo(torch.float32).max / math.log2(math.e)  # kernels compute exp as a power of two


def check_scores(call: str, x: Any, scale: Any, dtype: Any = None, ndim: int = 1) -> None:
    """Check the scores, of at least `ndim` dimensions, and the scale of a softmax."""
    _check_tensor(call, "x", x, _SCORE_DTYPES, "must be a tensor of float16, bfloat16, float32 or float64")
    if dtype is not None and dtype not in _SCORE_DTYPES:
        raise TypeError(f"{call}: `dtype` must be torch.float16, .bfloat16, .float32 or .float64, got {dtype!r}.")
    _check_scale(call, scale)
    if x.ndim < ndim:
        least = "one dimension" if ndim == 1 else "two dimensions, [..., Q, K]"
        raise ValueError(f"{call}: `x` must have at least {least}, got {describe(x)}.")


def check_visible(call: str, x: Tensor, mask: Any) -> None:
    """Check that a mask is None, or booleans, True = visible, that broadcast to x."""
    if mask is not None:
        expected = "must be a name, a Mask, a function, or a boolean tensor, True = visible"
        _check_mask(call, x, mask, (torch.bool,), expected)


def check_hidden(call: str, x: Tensor, mask: Any) -> None:
    """Check that a mask is a tensor, True = hidden, that broadcasts to x."""
    expected = "must be a tensor of booleans or numbers, in which True or any number but 0 hides"
    _check_mask(call, x, mask, _HIDDEN_DTYPES, expected)


def _check_scale(call: str, scale: Any) -> None:
    if isinstance(scale, _SYMBOLIC_NUMBERS):  # computed from a shape that is being traced
        return
    is_number = type(scale) is float or (isinstance(scale, numbers.Real) and not isinstance(scale, bool))
    if not is_number:
        is_tensor = isinstance(scale, (Tensor, np.ndarray))
        got = f"{type(scale).__name__}; multiply `x` by it instead" if is_tensor else repr(scale)
        raise TypeError(f"{call}: `scale` must be a number, got {got}.")
    if not -_MAX_SCALE <= scale <= _MAX_SCALE:
        raise ValueError(f"{call}: `scale` must be finite, at most {_MAX_SCALE:.3g}, got {scale!r}.")


def _check_mask(call: str, x: Tensor, mask: Any, dtypes: tuple[torch.dtype, ...], expected: str) -> None:
    _check_tensor(call, "mask", mask, dtypes, expected)
    if mask.device != x.device:
        advice = "make it again, it has no data" if mask.is_meta else f"use mask.to({str(x.device)!r})"
        raise ValueError(f"{call}: `mask` is on {mask.device}, `x` on {x.device}; {advice}.")
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    fits = _broadcasts if compat.is_compiling() else lambda m, n: m in (1, n)
    if mask.ndim > x.ndim or not all(fits(m, n) for m, n in sizes):
        hint = "; a mask [batch, queries, keys] is mask[:, None]" if mask.ndim == x.ndim - 1 == 3 else ""
        raise ValueError(
            f"{call}: `mask` must broadcast to x's shape {list(x.shape)}: each size, from the last, that of x or 1; "
            f"got {describe(mask)}{hint}."
        )


def _broadcasts(m: int, n: int) -> bool:
    """Whether a mask's size m is 1 or n. Those that only a run of the graph knows count as equal; the run checks it."""
    if compat.guard_or_false(m == 1) or compat.guard_or_false(m == n):
        return True
    if not compat.guard_or_true(m == n):
        return False
    compat.require(m == n, lambda: "flexmasks: a mask's sizes must be those of x, or 1")
    return True


def _check_tensor(call: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], expected: str) -> None:
    if not isinstance(value, Tensor):
        hint = "; use torch.as_tensor" if isinstance(value, ARRAYS) else ""
        if name == "mask" and (isinstance(value, str) or callable(value)):
            hint = "; names, Masks and functions go to flexmasks.masked_softmax(x, mask=..., scale=...)"
        raise TypeError(f"{call}: `{name}` {expected}, got {type(value).__name__}{hint}.")
    if value.is_nested or value.layout != torch.strided:
        kind = "a nested one" if value.is_nested else f"one of layout {value.layout}"
        raise TypeError(f"{call}: `{name}` must be a dense tensor, got {kind}.")
    if value.dtype not in dtypes:
        is_added = name == "mask" and value.is_floating_point()
        hint = "; add it to `x` if it is added to scores, or pass its booleans" if is_added else ""
        raise TypeError(f"{call}: `{name}` {expected}, got {describe(value)}{hint}.")
