"""Every private symbol of torch that the library uses: one place to mend when a torch release moves one.

Each line says what the symbol is for, how its loss would show, and which public symbol replaces it, from which
release. "public: none" was checked on torch 2.11 to 2.13. No other module may name a private torch symbol.
"""

from __future__ import annotations

import contextlib
import importlib.util
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex as TransformGetItemToIndex
from torch._dynamo.eval_frame import remove_from_cache
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError as InductorError
from torch._subclasses import FakeTensor as FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_in_any_mode_without_ignore_compile_internals,
    is_in_torch_dispatch_mode,
)

# --- the state of a tensor ---

# Count of in-place changes, by which caches notice a change. Loss: AttributeError at the first call. public: none.
version: Callable[[Tensor], int] = operator.attrgetter("_version")

# --- transforms of torch.func, and what is active around a call ---

# Whether torch.func.grad, vmap or jvp is active, and which one is innermost. Loss: AttributeError. public: none.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack

# Wrappers that these transforms put around tensors. Loss: AttributeError. public: none.
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor
unwrapped: Callable[[Tensor], Tensor] = torch._C._functorch.get_unwrapped

# Wrapper of torch.autograd.grad(is_grads_batched=True). Loss: AttributeError. public: none.
is_batched_gradient: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor

# Leave the active transforms for a block of code, so that what it makes may be kept. Loss: ImportError. public: none.
outside_transforms: Callable[[], contextlib.AbstractContextManager[Any]] = temporarily_clear_interpreter_stack

# Modes that see every operation; `foreign` leaves out torch.compile's own. Loss: ImportError. public: none.
without_dispatch_modes: Any = _disable_current_modes
in_foreign_dispatch_mode: Callable[[], bool] = is_in_any_mode_without_ignore_compile_internals
in_dispatch_mode: Callable[[], bool] = is_in_torch_dispatch_mode

# Leave the active TorchFunctionMode for a block of code. Loss: AttributeError. public: none.
without_torch_function: Any = torch._C.DisableTorchFunction

# Whether autocast is on for any device: ten times faster than asking for one. Loss: AttributeError.
# public: torch.is_autocast_enabled(device), which is slower.
autocast_anywhere: Callable[[], bool] = torch._C._is_any_autocast_enabled


def in_vmap() -> bool:
    """Return whether torch.func.vmap is among the active transforms. Loss: AttributeError. public: none."""
    if not transforms_active():
        return False
    vmap = torch._C._functorch.TransformType.Vmap
    return any(level.key() == vmap for level in torch._C._functorch.get_interpreter_stack())


def in_forward_derivative() -> bool:
    """Return whether a dual level is open (torch.autograd.forward_ad, jvp). Loss: AttributeError. public: none."""
    return torch.autograd.forward_ad._current_level >= 0


# --- torch.compile ---

# Free what torch compiled for a code object; without it, kernels pile up. Loss: ImportError. public: none.
forget_code: Callable[[Any], None] = remove_from_cache


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled, for the log. Loss: ImportError. public: none."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compiler_is_off() -> bool:
    """Return whether torch.compile is switched off for the process. Loss: AttributeError. public: none."""
    return bool(torch._dynamo.config.disable)


@contextlib.contextmanager
def donated_buffers_off() -> Iterator[None]:
    """Let a compiled backward pass run twice over one graph, to time it. Loss: AttributeError. public: none."""
    config = torch._functorch.config
    kept = config.donated_buffer
    config.donated_buffer = False
    try:
        yield
    finally:
        config.donated_buffer = kept


# --- Inductor ---

# Decompositions of operators, by which FLASH's compiler sees a function. Loss: ImportError. public: none.
inductor_decompositions: Any = select_decomp_table

# Whether torch's FLASH compiler reads captured tensors by vectors, which some GPUs get wrong (2.13 and later).
FLASH_READS_VECTORS = importlib.util.find_spec("torch._inductor.codegen.cutedsl.lane_analysis") is not None


def fake_mode() -> Any:
    """Return a mode in which operations make tensors without data. Loss: ImportError. public: none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def lower_to_instruction(op: Any, instruction: str, fallback: str, cute: str) -> None:
    """Tell Inductor how to compute an operator of one float32 tensor: by an instruction of the GPU.

    Without it, kernels would call the operator's Python code, and fail. public: none.

    Args:
        op: the operator, such as torch.ops.flexmasks.tanh_approx.default.
        instruction: PTX with `$0` for the result and `$1` for the input, for Triton's kernels on CUDA.
        fallback: name of Inductor's operation elsewhere, such as "tanh".
        cute: CuTe expression of `{x}`, for FLASH's kernels.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.codegen.cutedsl.cutedsl_op_overrides import CuteDSLOpOverrides
    from torch._inductor.virtualized import ops

    if op in lowering.lowerings:
        return

    def lowered(x: Any) -> Any:
        load = x.make_loader()

        def inner(index: Any) -> Any:
            if x.get_device().type != "cuda":
                return getattr(ops, fallback)(load(index))
            return ops.inline_asm_elementwise(load(index), asm=instruction, constraints="=f,f", dtype=torch.float32)

        return ir.Pointwise.create(
            device=x.get_device(), dtype=x.get_dtype(), inner_fn=inner, ranges=list(x.get_size())
        )

    def for_cute(*inputs: Any, asm: str, **_: Any) -> Any:
        if asm != instruction:
            raise NotImplementedError(asm)
        return CuteDSLOpOverrides._apply_unary_op(inputs[0], cute)

    lowering.register_lowering(op, type_promotion_kind=None)(lowered)
    setattr(CuteDSLOpOverrides, "inline_asm_elementwise", staticmethod(for_cute))  # noqa: B010


# --- custom operators ---

# Call an operator below autograd, from the operator's own autograd formula. Loss: AttributeError. public: none.
below_autograd: Any = torch._C._AutoDispatchBelowAutograd
after_autograd_keys: Any = torch._C._after_autograd_keyset
single_level_autograd: Any = enable_single_level_autograd_function
SingleLevelFunction: Any = _SingleLevelFunction

# Check a size inside an operator, also one that torch.export knows by a symbol. Loss: AttributeError.
# public: torch._check is documented in spite of its name; no other name exists.
require: Any = torch._check

# Switch for forward derivatives, thread by thread. Loss: AttributeError. public: none.
forward_derivatives: Callable[[bool], contextlib.AbstractContextManager[Any]] = (
    torch.autograd.forward_ad._set_fwd_grad_enabled
)

# --- scaled_dot_product_attention ---


def fused_sdp_choice(*args: Any, **keywords: Any) -> int:
    """Return the kernel that scaled_dot_product_attention would take, an SDPBackend's value.

    Without it a call that torch would run unfused is not noticed. Loss: AttributeError. public: none.
    """
    return int(torch._fused_sdp_choice(*args, **keywords))
