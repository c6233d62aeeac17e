"""flex_attention inside a function that torch.compile does not read.

Dynamo would read torch's flex_attention, and the functions of mask and score, line by line: a third of the time of a
compiled model's first step. Here the operator behind it is called as torch calls it while Dynamo reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.spec.structure import flatten

_LN_2 = math.log(2.0)
# What torch's flex_attention adds to the options of its operator.
_OPTIONS = {
    "BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True, "OUTPUT_MAX": False,
}  # fmt: skip


class _Aux(NamedTuple):
    lse: Tensor | None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: compat.BlockMask,
    scale: float | None,
    enable_gqa: bool,
    kernel_options: dict[str, Any] | None,
    return_aux: Any = None,
) -> Any:
    """Return what torch's flex_attention returns, with the arguments that it has.

    Tensors of the functions become the operator's inputs, as Dynamo makes them.
    """
    for x in (q, k, v):  # kernels are made for a number of heads and a head size
        int(x.shape[1]), int(x.shape[3])
    score, of_score = _with_inputs(score_mod or _unchanged)
    mask, of_mask = _with_inputs(block_mask.mask_mod)
    *lists, _ = block_mask.as_tuple()
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    with_lse = return_aux is not None or (q.is_cuda and torch.is_grad_enabled())
    options = {**_OPTIONS, **(kernel_options or {}), "OUTPUT_LOGSUMEXP": with_lse}
    operator = torch.ops.higher_order.flex_attention
    out, lse, _ = operator(q, k, v, score, (*lists, mask), scale, options, of_score, of_mask)
    return out if return_aux is None else (out, _Aux(lse if options["BACKEND"] == "FLASH" else lse * _LN_2))


def _unchanged(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score


def _with_inputs(function: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return a function that takes the tensors that it reads behind its arguments, and these tensors."""
    structure, leaves = flatten(function)
    count = len(leaves.tensors)

    def with_inputs(*arguments: Any) -> Tensor:
        arguments, tensors = arguments[: len(arguments) - count], arguments[len(arguments) - count :]
        result: Tensor = structure.fill(tensors, has_own_globals=True)(*arguments)
        return result

    return with_inputs, tuple(leaves.tensors)
