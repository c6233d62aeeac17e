"""Backend "dense": short sequences with gradients on a CPU, by torch's kernel.

The kernel takes the whole mask as a tensor. No list of blocks is made. A mask of a thousand queries is small, and one
call of a kernel is faster than many tiles, even if it computes what is hidden.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.added import is_added
from flexmasks.backends.call import HALF_DTYPES, Call, Result, transformed
from flexmasks.backends.reference import attend
from flexmasks.backends.slices import is_traced_or_transformed
from flexmasks.plans.whole import Added, Whole

_MAX_LENGTH = 1024  # of queries, and of keys
_MAX_MASK = 1 << 24  # elements


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    (_, heads, q_len, size), (kv_heads, kv_len) = call.q.shape, call.k.shape[1:3]
    if call.q.device.type != "cpu":
        return "it runs on the CPU only"
    if call.is_traced:
        return "torch.compile does not trace it"
    if call.whole is None:
        return "it takes a mask, not blocks"
    if not call.needs_grad:
        return "it is for calls that need gradients"
    if call.learns:
        return "it gives no gradient to captured tensors of a mask or score"
    if not 0 < max(q_len, kv_len) <= _MAX_LENGTH:
        return f"it is for up to {_MAX_LENGTH:,} queries and keys"
    if call.q.dtype not in (*HALF_DTYPES, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {call.dtype}"
    if call.v.shape[3] != size:
        return "it takes only values of q's head size, as torch's kernel does"
    if call.with_lse:
        return "it gives no gradient of the lse"
    if compat.transforms_active() or transformed():
        return "it does not run inside transforms of torch.func"
    if call.kernel_options:
        return "it takes no kernel_options"
    if call.score_mod is not None and not is_added(call):
        return "it takes only score changes that add to the score"
    sizes = call.q.shape[:2] if call.score_mod is not None else (call.q.shape[0], heads // kv_heads)
    if math.prod(sizes) * q_len * kv_len > _MAX_MASK:
        return f"it takes masks of at most {_MAX_MASK:,} elements"
    return None


def run(call: Call) -> Result:
    """Run the call."""
    replay = DenseCall.of(call)
    return Result(*replay(call.q, call.k, call.v), replay)


@dataclass(frozen=True)
class DenseCall:
    """A call without q, k and v."""

    visible: Tensor  # bool [B or 1, H or 1, Q, KV]
    bias: Tensor | None  # what a score change adds, which broadcasts with `visible`
    added: Tensor  # float32 [B or 1, Hkv or 1, grouped heads * Q, KV]: the bias, -inf where hidden
    hidden_rows: Tensor | None  # bool [B or 1, Hkv or 1, grouped heads * Q]: queries that see nothing, if there are any
    scale: float | None

    @classmethod
    def of(cls, call: Call) -> DenseCall:
        visible = cast(Callable[[], Whole], call.whole)().visible
        bias = None if call.score_mod is None else cast(Callable[[], Added], call.added)().product()
        zero = torch.zeros((), device=call.q.device)
        groups = call.q.shape[1] // call.k.shape[1]
        hidden_rows = ~visible.any(-1)
        return cls(
            visible=visible,
            bias=bias,
            added=_grouped(torch.where(visible, zero if bias is None else bias, -math.inf), groups),
            hidden_rows=_grouped(hidden_rows[..., None], groups)[..., 0] if bool(hidden_rows.any()) else None,
            scale=call.scale,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that keeping the call takes."""
        return sum(x.nbytes for x in (self.visible, self.bias, self.added, self.hidden_rows) if x is not None)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        return _Attend.apply(self, q, k, v), None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the lse of its rows.

        The lse is None if the output is not finite in all places, so that the reference has computed it.
        """
        rows = self._rows(q, k)
        out, lse = compat.flash_attention_on_cpu(rows, k, v, self.added, self.scale)
        if self.hidden_rows is not None:
            out.masked_fill_(self.hidden_rows[..., None], 0)
            lse.masked_fill_(self.hidden_rows, 0)
        if not bool(out.sum(dtype=torch.float32).isfinite()):
            return self.by_reference(q, k, v), None
        return out.reshape(q.shape), lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, gradient: Tensor
    ) -> tuple[Tensor, ...] | None:
        """Return the gradients of q, k and v, None if one is not finite."""
        rows = self._rows(q, k)
        upstream, result = self._rows(gradient, k), self._rows(out, k)
        grads = compat.flash_attention_on_cpu_backward(upstream, rows, k, v, result, lse, self.added, self.scale)
        if not bool(torch.stack([x.sum(dtype=torch.float32) for x in grads]).isfinite().all()):
            return None
        return grads[0].reshape(q.shape), grads[1], grads[2]

    def by_reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend as the reference does, which reads nothing hidden."""
        score_mod = None if self.bias is None else functools.partial(_added_to, self.bias)
        one = torch.ones(1, 1, 1, dtype=torch.int32)
        block_mask = compat.BlockMask.from_kv_blocks(
            one, torch.zeros(1, 1, 1, 1, dtype=torch.int32), BLOCK_SIZE=(q.shape[2], k.shape[2]),
            mask_mod=functools.partial(_read, self.visible), seq_lengths=(q.shape[2], k.shape[2]),
        )  # fmt: skip
        return attend(q, k, v, score_mod, block_mask, self.scale)[0]

    @staticmethod
    def _rows(x: Tensor, k: Tensor) -> Tensor:
        """Return queries with grouped heads as rows, [B, Hkv, grouped heads * Q, D]."""
        return x.reshape(len(x), k.shape[1], -1, x.shape[3])


class _Attend(torch.autograd.Function):
    """Attention by torch's kernel.

    The reference computes gradients where something is not finite, and where torch looks inside.
    """

    @staticmethod
    def forward(ctx: Any, call: DenseCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = call.forward(q, k, v)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        differentiable = torch.is_grad_enabled()  # the caller asks for derivatives of these gradients
        looks_inside = differentiable or is_traced_or_transformed() or compat.is_batched_gradient(gradient)
        grads = None if looks_inside or lse is None else ctx.call.backward(q, k, v, out, lse, gradient)
        if grads is not None:
            return None, *grads
        needed = ctx.needs_input_grad[1:]
        inputs = [x for x, need in zip((q, k, v), needed, strict=True) if need]
        with torch.enable_grad():
            again = ctx.call.by_reference(q, k, v)
        gradients = iter(torch.autograd.grad(again, inputs, gradient, create_graph=differentiable, allow_unused=True))
        return None, *(next(gradients) if need else None for need in needed)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return a tensor with grouped heads as rows.

    [B or 1, H or 1, Q, N] becomes [B or 1, Hkv or 1, groups * Q, N].
    """
    if x.shape[1] > 1:
        return x.unflatten(1, (-1, groups)).flatten(2, 3)  # type: ignore[no-any-return]
    return x.expand(-1, groups, -1, -1).flatten(1, 2).unsqueeze(1)


def _read(table: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Read a table [B or 1, H or 1, Q or 1, KV] by indices."""
    sizes = table.shape[:3]
    b, h, q = (i if size > 1 else torch.zeros_like(i) for i, size in zip((b, h, q), sizes, strict=True))
    return table[b, h, q, kv]


def _added_to(bias: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score + _read(bias, b, h, q, kv)
