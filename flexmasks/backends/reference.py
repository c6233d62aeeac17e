"""Backend "reference": attention in plain torch.

It supports any floating dtype, score changes, lse and every gradient.

Tests compare the kernels with it, and on a CPU it runs the calls that need a gradient. Its memory is bounded. It
computes a call in one of two ways, with equal results:

- By tiles (`flexmasks.backends.tiles`): the fast way, with a forward and a backward pass written by hand. torch sees
  one operation with a gradient, and can neither look inside it nor differentiate its backward pass. In a user's
  torch.compile it is the operator of `flexmasks.backends.tiles_operator`.
- By slices (`flexmasks.backends.slices`): the slower way, made of operations that torch differentiates. It runs where
  torch must look inside: in transforms of torch.func, in a user's torch.compile on a GPU, for derivatives of
  gradients, for batches of gradients, and where it cannot be known which tensors a score_mod learns.

Nothing hidden reaches an output or a gradient, not even NaN or infinity: the products run over finite values, and the
rows that do see a value that is not finite become NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import Call, Result
from flexmasks.backends.slices import OverIndices, attend_by_slices, is_traced_or_transformed
from flexmasks.backends.tiles import Tiles, Visible, learned_by


def refuses(call: Call) -> str | None:
    """Return None: every call can run here."""
    return None


def run(call: Call) -> Result:
    """Run the call."""
    score_mod = None if call.score_mod is None else call.score_mod()
    return Result(*attend(call.q, call.k, call.v, score_mod, call.blocks().block_mask, call.scale))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: compat.BlockMask | None,
    scale: float | None,
    functions: OverIndices | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Q, Dv] and the natural log-sum-exp [B, H, Q].

    The output has q's dtype. The log-sum-exp is float32, or float64 if q is.

    functions: as for `slices.attend_by_slices`.
    """
    by_slices = functools.partial(
        attend_by_slices, score_mod=score_mod, block_mask=block_mask, scale=scale, functions=functions
    )
    learned = None if is_traced_or_transformed() else learned_by(score_mod, q.device)
    if learned is None:
        return by_slices(q, k, v)
    tiles = Tiles(q, k, score_mod, Visible.of(cast(compat.BlockMask, block_mask)), scale)
    if not torch.is_grad_enabled():
        return tiles.forward(q, k, v)
    return _AttendByTiles.apply(tiles, by_slices, q, k, v, *learned)  # type: ignore[no-any-return]


class _AttendByTiles(torch.autograd.Function):
    """Attention by tiles, which saves q, k, v, the learned tensors, the output and lse.

    Its backward pass goes by slices if torch must look inside it.
    """

    @staticmethod
    def forward(
        ctx: Any, tiles: Tiles, by_slices: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = tiles.forward(*tensors[:3])
        ctx.tiles, ctx.by_slices = tiles, by_slices
        ctx.save_for_backward(out, lse, *tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        differentiable = torch.is_grad_enabled()  # the caller asks for derivatives of these gradients
        if not differentiable and not is_traced_or_transformed() and not any(map(compat.is_batched_gradient, grads)):
            q, k, v, *learned = tensors
            return None, None, *ctx.tiles.backward(q, k, v, out, lse, *grads, learned)
        needed = ctx.needs_input_grad[2:]
        inputs = [x for x, need in zip(tensors, needed, strict=True) if need]
        with torch.enable_grad():
            outputs = ctx.by_slices(*tensors[:3])
        gradients = iter(torch.autograd.grad(outputs, inputs, grads, create_graph=differentiable, allow_unused=True))
        return None, None, *(next(gradients) if need else None for need in needed)
