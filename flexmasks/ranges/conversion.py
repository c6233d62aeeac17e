"""Rules of casts from one dtype to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.ranges.context import INF, GiveUp, current_evaluation
from flexmasks.ranges.operands import PYTHON_NUMBERS, as_dtype, as_range, fitted
from flexmasks.ranges.truth import as_truth
from flexmasks.ranges.value import Range, rule


def _cast(dtype: torch.dtype) -> Callable[..., Range]:
    def cast(a: Any, **_: Any) -> Range:
        x = as_range(a)
        if dtype == torch.bool:
            return as_truth(x)
        if dtype.is_complex:
            raise GiveUp("complex numbers")
        if x.dtype.is_floating_point and not dtype.is_floating_point:
            return fitted(x.lo.trunc(), x.hi.trunc(), dtype, INF)
        return as_dtype(x, dtype)

    return cast


rule("bool")(_cast(torch.bool))
rule("int")(_cast(torch.int32))
rule("long")(_cast(torch.int64))
rule("short")(_cast(torch.int16))
rule("float")(_cast(torch.float32))
rule("double")(_cast(torch.float64))
rule("half")(_cast(torch.float16))
rule("bfloat16")(_cast(torch.bfloat16))


@rule("to", "type_as")
def to(a: Any, *args: Any, **kwargs: Any) -> Any:
    values = (*args, *kwargs.values())
    has_device_number = bool(args) and isinstance(args[0], PYTHON_NUMBERS)
    if has_device_number or any(isinstance(x, str) and "Tensor" in x for x in values):
        raise GiveUp("a conversion by name")
    dtypes = [x for x in values if isinstance(x, torch.dtype)]
    dtypes += [x.dtype for x in values if isinstance(x, Range | Tensor)]
    evaluation = current_evaluation.get()
    if evaluation is not None and evaluation.mixed_dtypes and any(isinstance(x, Range) for x in values):
        raise GiveUp("the dtype of an operation that mixes dtypes")
    if isinstance(a, Tensor):
        return a.to(dtypes[0])
    return _cast(dtypes[0])(a) if dtypes else a


@rule("type")
def to_type(a: Any, *args: Any) -> Any:
    return to(a, *args) if args else None  # without a dtype torch returns a string
