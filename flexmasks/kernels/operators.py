"""Operators of torch without gradients, by their schemas, and the operators `separate` and `hold`.

torch.library.custom_op would import torch's compilers when an operator runs for the first time, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks import compat

NAMESPACE = "flexmasks"
library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator for all devices; `fake` returns tensors with the shapes and dtypes of its results."""
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return getattr(torch.ops.flexmasks, name).default


# A copy across which Inductor fuses nothing: torch's attention for the CPU fails with the next operation fused in.
separate = define("separate(Tensor x) -> Tensor", torch.clone, torch.empty_like)


def _nothing(result: Tensor, tensors: list[Tensor]) -> None:
    pass


# Tells Inductor that tensors are read until a result is written. It does nothing.
hold = define("hold(Tensor(a!) result, Tensor[] tensors) -> ()", _nothing, _nothing)


def positions(
    stop: int, device: torch.device, start: int = 0, step: int = 1, dtype: torch.dtype | None = None
) -> Tensor:
    """What torch.arange returns, in a form that Inductor compiles right for a CPU.

    It knows torch.arange as a formula. Where that is divided, as in `table[q // 16]`, it makes a loop over quotients
    and one over remainders, and forgets the last part of a length that the divisor does not divide.
    """
    made = torch.arange(start, stop, step, dtype=dtype, device=device)
    is_fused = device.type == "cpu" and compat.is_compiling() and not compat.in_onnx_export()
    return separate(made) if is_fused else made
