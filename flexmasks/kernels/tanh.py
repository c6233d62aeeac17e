"""Operator flexmasks::tanh_approx: tanh by the GPU instruction `tanh.approx.f32`.

In an attention kernel the exact tanh takes more time than the matrix products. The instruction's relative error is at
most 2**-11 (PTX ISA, tanh), less than float16 and bfloat16 lose by rounding queries and keys. Only kernels that torch
compiles for CUDA use the instruction; elsewhere the operator computes the exact tanh.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat

_INSTRUCTION = "tanh.approx.f32 $0, $1;"  # PTX; $0 is the result, $1 the input


@torch.library.custom_op("flexmasks::tanh_approx", mutates_args=())
def _tanh_approx(x: Tensor) -> Tensor:
    return torch.tanh(x)


@_tanh_approx.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@_tanh_approx.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], x: Tensor) -> tuple[Any, int | None]:
    return _tanh_approx(x), in_dims[0]


def _save_output(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return cast(Tensor, grad * (1 - y * y))


_tanh_approx.register_autograd(_backward, setup_context=_save_output)


def tanh_approx(x: Tensor) -> Tensor:
    """tanh(x) of float32; compiled kernels for CUDA have a relative error of at most 2**-11."""
    return cast(Tensor, _tanh_approx(x)) if _has_lowering() else torch.tanh(x)


# torch.compile calls this function while it traces, and does not trace into it.
@compat.constant_in_graphs
def _has_lowering() -> bool:
    """Register the instruction with Inductor, which writes the compiled kernels; return whether that is possible."""
    return compat.lower_to_instruction(
        torch.ops.flexmasks.tanh_approx.default, _INSTRUCTION, "tanh", "cute.math.tanh({x}, fastmath=True)"
    )
