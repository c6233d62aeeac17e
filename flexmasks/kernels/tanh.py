"""Operator flexmasks::tanh_approx: tanh by the GPU instruction `tanh.approx.f32`.

In an attention kernel the exact tanh takes more time than the matrix products. The instruction's relative error is at
most 2**-11 (PTX ISA, tanh), less than float16 and bfloat16 lose by rounding queries and keys. Only kernels that torch
compiles for CUDA use the instruction; elsewhere the operator computes the exact tanh.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.devices import runs_own_kernels

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


@compat.constant_in_graphs
def _has_lowering() -> bool:
    return _lower()  # torch.compile traces into a function that keeps its result, marked or not


@functools.cache
def _lower() -> bool:
    """Let Inductor compute the operator by the instruction; False if it cannot: compiled kernels would fail on it."""
    lowering, overrides, cute_unary = compat.lowering, compat.CuteOverrides, compat.cute_unary
    if lowering is None or overrides is None or cute_unary is None:
        return False

    def lowered(x: Any) -> Any:
        def compute(value: Any) -> Any:
            if not runs_own_kernels(x.get_device()):
                return lowering.ops.tanh(value)
            return lowering.ops.inline_asm_elementwise(value, asm=_INSTRUCTION, constraints="=f,f", dtype=torch.float32)

        return lowering.make_pointwise(compute)(x)

    def for_cute(*inputs: Any, asm: str, **_: Any) -> Any:
        if asm != _INSTRUCTION:
            raise NotImplementedError(asm)
        return cute_unary(inputs[0], "cute.math.tanh({x}, fastmath=True)")

    lowering.register_lowering(torch.ops.flexmasks.tanh_approx.default, type_promotion_kind=None)(lowered)
    setattr(overrides, "inline_asm_elementwise", staticmethod(for_cute))  # noqa: B010
    return True
