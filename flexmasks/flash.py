"""What torch's FLASH backend would compute wrongly without saying so, found in a function before it is compiled.

Its compiler (torch 2.11 to 2.13, CuteDSLOpOverrides) makes both branches of a `where` booleans where both are numbers,
and gives remainders the sign of the dividend, as C does and torch does not. Where the mask's function is a constant it
looks at no blocks (pytorch issue 188322). On GPUs of capability 10 and above it reads the tensors of scores by
vectors since torch 2.13, some of them wrongly (issue 188878).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

_LIKE = ("full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones")
_CONSTANTS = ("full", "zeros", "ones", "scalar_tensor", *_LIKE)
_KEEP_SIGN = ("_to_copy", "alias", "clone", "expand", "floor", "lift_fresh_copy", "view")
_JOIN_SIGNS = ("add", "bitwise_or", "bitwise_xor", "div", "floor_divide", "minimum", "mul", "remainder")


_BY_VECTORS = importlib.util.find_spec("torch._inductor.codegen.cutedsl.lane_analysis") is not None


def mistake(function: Callable[..., Tensor], device: torch.device, scored: bool = False) -> str | None:
    """What FLASH would get wrong of a mask_mod, or of a score_mod where `scored`; None where nothing is known.

    That it looks at no blocks is said of every constant: whether it matters, the blocks tell.
    """
    try:
        module = traced(function, device, scored)
    except Exception as error:
        return f"its function cannot be looked at: {type(error).__name__}"
    constants: set[Node] = set()
    for node in module.graph.nodes:
        if _is_constant(node, constants, module):
            constants.add(node)
    positive = _never_negative(module, scored)
    for node in module.graph.nodes:
        name = _name(node)
        branches = node.args[1:]
        if name == "where" and not _is_bool(node) and not any(_varies(x, constants) for x in branches):
            return "its compiler makes booleans of two numbers that torch.where chooses from"
        if name == "remainder" and not _is_sure(node, positive):
            return "its compiler gives remainders of negative numbers another sign than torch does"
        if name == "index" and scored and _BY_VECTORS and _is_blackwell(device):
            return "its compiler reads some tensors wrongly on GPUs of this kind"
        if node.op == "output" and not scored and not _varies(node.args[0], constants):
            return NO_BLOCKS
    return None


NO_BLOCKS = "it looks at no blocks where the mask's function is a constant"


def _is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def traced(function: Callable[..., Tensor], device: torch.device, scored: bool) -> GraphModule:
    """The graph of a function of indices, and a score before them, with torch's own folding of constants."""

    def called(*args: Tensor) -> Tensor:
        with TransformGetItemToIndex():
            return function(*args)

    given = [torch.zeros((), dtype=torch.int32, device=device) for _ in range(4)]
    if scored:
        given.insert(0, torch.zeros((), device=device))
    with torch.no_grad(), temporarily_clear_interpreter_stack():
        module = make_fx(called, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    with contextlib.suppress(ImportError):
        from torch._inductor.fx_passes.joint_graph import constant_fold_uniform_value

        constant_fold_uniform_value(module)
    return module


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def _is_bool(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _is_constant(node: Node, constants: set[Node], module: GraphModule) -> bool:
    """Whether the compiler sees a number in it."""
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        return isinstance(value, Tensor) and value.ndim == 0
    if node.op != "call_function":
        return False
    return _name(node) in _CONSTANTS or not any(_varies(x, constants) for x in node.all_input_nodes)


def _varies(x: Any, constants: set[Node]) -> bool:
    return isinstance(x, Node) and x not in constants


def _never_negative(module: GraphModule, scored: bool) -> set[Node]:
    """The nodes of which it can be told."""
    found: set[Node] = set()

    def sure(x: Any) -> bool:
        return x in found if isinstance(x, Node) else isinstance(x, int | float) and x >= 0

    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    indices = placeholders[scored:]
    for node in module.graph.nodes:
        name, args = _name(node), node.args
        if (
            node in indices
            or _is_bool(node)
            or name == "abs"
            or (name in _KEEP_SIGN and sure(args[0]))
            or (name in _JOIN_SIGNS and all(map(sure, args[:2])))
            or (name in ("bitwise_and", "maximum") and any(map(sure, args[:2])))
            or (name == "where" and all(map(sure, args[1:])))
            or (name in ("full", "full_like") and sure(args[1]))
            or (name == "scalar_tensor" and sure(args[0]))
        ):
            found.add(node)
    return found


def _is_sure(remainder: Node, positive: set[Node]) -> bool:
    """Whether a remainder is the same by either sign: of what is not negative, or where only 0 is asked for."""
    dividend, divisor = remainder.args[:2]
    if divisor in (1, -1) and not remainder.meta["val"].is_floating_point():
        return True
    if dividend in positive and (divisor in positive or (isinstance(divisor, int | float) and divisor > 0)):
        return True
    return all(_name(user) in ("eq", "ne") and 0 in user.args for user in remainder.users)
