"""Base of kernels of short sequences, which get the whole mask as a tensor, with their gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import Kernel, Unavailable
from flexmasks.backends.reference import attend
from flexmasks.backends.slices import gradients
from flexmasks.context import is_traced_or_transformed
from flexmasks.kernels.direct import has_memory
from flexmasks.plans.whole import Added, Summand


class ShortForm(Protocol):
    """The whole mask, and what a score change adds."""

    @property
    def visible(self) -> Tensor:
        """bool [B or 1, H or 1, Q or 1, KV or more]"""

    @property
    def bias(self) -> Added | None:
        """Numbers that are made once."""

    @property
    def summand(self) -> Summand | None:
        """What makes numbers at each call."""

    def read_by_backward(self) -> list[Tensor]:
        """Return the tensors of the mask and the bias, which the backward pass reads again."""


@dataclass(frozen=True)
class ShortKernel(Kernel):
    """Base of kernels that get the whole mask as a tensor."""

    scale: float | None
    with_lse: bool
    needs_grad: bool

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any
    ) -> tuple[Tensor, Tensor | None]:
        if compat.transforms_active():
            raise Unavailable("it does not run inside transforms of torch.func")
        (mask,) = forms
        added = [] if mask.summand is None else [mask.summand.numbers(mask.visible)]
        if not self.needs_grad:
            out, lse = self.forward(mask, q, k, v, *added)
            return out, lse if self.with_lse else None
        results = _Attend.apply(self, mask, q, k, v, *added)
        return results if self.with_lse else (results, None)

    def forward(self, mask: Any, q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the lse of its rows. The lse is None if the reference is to compute the gradients.

        added: the numbers of the mask's summand, if it has one. They may learn.
        """
        raise NotImplementedError

    def backward(
        self, mask: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor,
        d_lse: Tensor | None, *added: Tensor,
    ) -> tuple[Tensor, ...] | None:  # fmt: skip
        """Return the gradients of q, k, v and what is added. The result is None if the reference is to compute them."""
        raise NotImplementedError

    def by_reference(self, mask: ShortForm, q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and lse as the reference does, which reads nothing hidden."""
        bias = added[0] if added else None if mask.bias is None else mask.bias.product()
        share = q.shape[0] // bias.shape[0] if bias is not None else 1
        score_mod = None if bias is None else functools.partial(_added_to, bias, share)
        sizes = mask.visible.shape[:2]  # the reference takes from the lists whether batch elements and heads differ
        one = torch.ones(*sizes, 1, dtype=torch.int32, device=q.device)
        block_mask = compat.BlockMask.from_kv_blocks(
            one, torch.zeros_like(one)[..., None], BLOCK_SIZE=(q.shape[2], k.shape[2]),
            mask_mod=functools.partial(_read, mask.visible), seq_lengths=(q.shape[2], k.shape[2]),
        )  # fmt: skip
        return attend(q, k, v, score_mod, block_mask, self.scale)


class _Attend(compat.SingleLevelFunction):
    """Attention by a kernel's own passes.

    The reference computes gradients where a kernel does not, and where torch looks inside.
    """

    @staticmethod
    def forward(ctx: Any, kernel: ShortKernel, mask: ShortForm, q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> Any:
        out, lse = kernel.forward(mask, q, k, v, *added)
        ctx.kernel, ctx.mask, ctx.inputs = kernel, mask, 3 + len(added)
        ctx.set_materialize_grads(False)
        # A change of the mask's tensors in place, as by `Plan.update`, raises torch's own error.
        ctx.save_for_backward(out, lse, q, k, v, *added, *mask.read_by_backward())
        return (out, lse) if kernel.with_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        out, lse, *saved = ctx.saved_tensors
        q, k, v, *added = saved[: ctx.inputs]
        if d_out is None:
            d_out = torch.zeros_like(out)
        upstream = [d_out] if d_lse is None else [d_out, d_lse]
        # Where gradients are enabled, the caller asks for derivatives of these gradients.
        looks_inside = torch.is_grad_enabled() or is_traced_or_transformed() or not all(map(has_memory, upstream))
        grads = None
        if not looks_inside and lse is not None:
            grads = ctx.kernel.backward(ctx.mask, q, k, v, out, lse, d_out, d_lse, *added)
        if grads is not None:
            return None, None, *grads, *[None] * (ctx.inputs - len(grads))
        again = lambda *given: ctx.kernel.by_reference(ctx.mask, *given)[: len(upstream)]  # noqa: E731
        return None, None, *gradients(again, 0, ctx.needs_input_grad[2:], q, k, v, *added, *upstream)


def _read(table: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Read a table [B or 1, H or 1, Q or 1, KV] by indices."""
    sizes = table.shape[:3]
    b, h, q = (i if size > 1 else torch.zeros_like(i) for i, size in zip((b, h, q), sizes, strict=True))
    return table[b, h, q, kv]


def _added_to(bias: Tensor, share: int, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score + _read(bias, b // share, h, q, kv)
