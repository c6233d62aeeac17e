"""Attention in forward mode: the tangents of output and lse.

A call whose q, k or v have tangents, by torch.func.jvp or torch.autograd.forward_ad, is a plain call of these without
tangents, on any backend and with its gradients, and beside it one pass for the tangents. A Triton kernel makes that
pass on a GPU; without a score change it reads any mask, as bits. Elsewhere it goes by slices, see
`flexmasks.backends.slices`. Where nothing needs a gradient, the kernel gives output and lse in the same pass.

The reference differentiates its own operations in place of all that: for nested transforms, and for tangents of what a
mask or score reads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flexmasks import compat
from flexmasks.backends.call import BlocksAndScore, Kernel, Operand, Plans, Unavailable, first_line
from flexmasks.backends.encoded import Encoded
from flexmasks.backends.reference import frozen_functions
from flexmasks.backends.slices import Recomputed, Visible, needed_gradients, tangents_by_slices
from flexmasks.backends.tiles import learned_by, with_views
from flexmasks.backends.tiles_operator import call_of, in_another_thread, taken_apart
from flexmasks.cache import bytes_of
from flexmasks.devices import runs_own_kernels
from flexmasks.errors import passing_error
from flexmasks.kernels.direct import TRITON_DTYPES
from flexmasks.plans.data import CannotBeData, MaskData
from flexmasks.plans.sizes import block_size_for
from flexmasks.spec.structure import Opaque, tensors_of, with_tensors

_log = logging.getLogger("flexmasks")
_failures: list[str] = []  # why Triton failed; then tangents go by slices
Tangents = tuple[Tensor, Tensor, Tensor]  # of q, k and v


class Duals(NamedTuple):
    """A call in forward mode, taken apart."""

    qkv: Tangents
    tangents: Tangents
    others: Any  # what else the call reads, without wrappers of transforms

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, others: Any) -> Duals | None:
        """Return the call taken apart, None if it is not of one level, or if something else has a tangent."""
        if compat.names_of_transforms() not in ([], ["Jvp"]) or not compat.can_leave_forward_derivatives():
            return None
        try:
            if any(
                forward_ad.unpack_dual(t, level=0).tangent is not None
                for t in tensors_of(others)
                if t.is_floating_point()
            ):
                return None
            others = with_tensors(others, alone)
        except Opaque:
            return None
        duals = [forward_ad.unpack_dual(x, level=0) for x in (q, k, v)]
        primals = [alone(dual.primal) for dual in duals]
        tangents = [
            x.new_zeros(()).expand(x.shape) if dual.tangent is None else alone(dual.tangent)
            for x, dual in zip(primals, duals, strict=True)
        ]
        return cls((primals[0], primals[1], primals[2]), (tangents[0], tangents[1], tangents[2]), others)


def alone(x: Tensor) -> Tensor:
    """Return a tensor without the wrappers of transforms. One that belongs to a batch of vmap stays as it is."""
    plain = compat.without_wrappers(x)
    return x if plain is None else plain


def with_tangents(results: Sequence[Tensor], of_results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return results with their tangents, as the transform around the call takes them."""
    return tuple(forward_ad.make_dual(x, t, level=0) for x, t in zip(results, of_results, strict=True))


class Form(NamedTuple):
    """What tangents are made of: the blocks of a mask, with the function of partial ones, and a score change.

    data: for Triton the lists of blocks, and the bits of partial ones, see `kernels.tangent_kernel.tangents_of`.
    """

    blocks: BlocksAndScore
    data: tuple[Tensor, ...] | None

    @property
    def nbytes(self) -> int:
        return bytes_of(self.blocks) + sum(t.nbytes for t in self.data or ())


class TangentKernel(Kernel):
    """The pass for tangents. It is no backend: it takes tangents, too."""

    def __init__(self, scale: float | None, *qkv: Tensor | Operand) -> None:
        q, *others = qkv
        self._scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        is_one_dtype = q.dtype in TRITON_DTYPES and all(x.dtype == q.dtype for x in others)
        self._runs_triton = is_one_dtype and runs_own_kernels(q.device)

    def forms(self, plans: Plans) -> tuple[Form]:
        with contextlib.suppress(CannotBeData):
            if self._runs_triton and plans.score is None and not _failures:
                data: MaskData = plans.mask.data()
                counts, indices, full_counts, full = (cast(Tensor, t) for t in data.lists[:4])
                if full_counts is None:  # blocks of a user's own without full ones
                    full_counts, full = torch.zeros_like(counts), indices
                lists = counts, indices, full_counts, full, data.words, data.table
                return (Form(BlocksAndScore(data.block_mask(), None), lists),)
        return (Form(BlocksAndScore.of(plans), None),)

    def gives_output(self, q: Tensor, v: Tensor, form: Form) -> bool:
        """Return whether `run` gives output and lse, too, where no gradient is wanted."""
        if form.data is None or _failures:
            return False
        from flexmasks.kernels.tangent_kernel import tiles_for  # needs Triton

        return tiles_for(q, v) is not None

    def run(
        self, qkv: Tangents, tangents: Tangents, results: tuple[Tensor, Tensor] | None, form: Form
    ) -> tuple[Tensor, ...]:
        """Return output, lse and their tangents. Raises Unavailable if Triton fails; then slices run the next call.

        results: output and lse. Without them `gives_output` must hold, and no gradient is wanted.
        """
        if results is None:
            return self._by_triton(form, *qkv, *tangents)
        given, by_triton = (*qkv, *tangents, *results), self.gives_output(qkv[0], qkv[2], form)
        learned = learned_by(form.blocks.score_mod, qkv[0].device)
        wants_grad = torch.is_grad_enabled() and (learned != [] or any(x.requires_grad for x in given))
        if by_triton and not wants_grad:
            return self._by_triton(form, *given)
        by_slices = self.by_slices(form.blocks, qkv[0], wants_grad, bool(learned))
        if by_triton:
            return *results, *_ByTriton.apply(by_slices, functools.partial(self._by_triton, form), *given)
        return *results, *by_slices(*given)

    def by_slices(
        self, blocks: BlocksAndScore, q: Tensor, wants_grad: bool, learns: bool
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        visible, score_mod, check = Visible.of(blocks.block_mask), blocks.score_mod, None
        if wants_grad:
            mask_mod, score_mod, check = frozen_functions(visible.mask_mod, score_mod, q)
            visible = visible._replace(mask_mod=cast(Callable[..., Tensor], mask_mod))
        if learns and score_mod is not None:
            score_mod = with_views(score_mod)
        return functools.partial(
            tangents_by_slices, score_mod=score_mod, visible=visible, scale=self._scale,
            learned=learned_by(score_mod, q.device), check=check,
        )  # fmt: skip

    def _by_triton(self, form: Form, *given: Tensor) -> tuple[Tensor, ...]:
        from flexmasks.kernels.tangent_kernel import tangents_of  # needs Triton

        q, k, v, of_q, of_k, of_v, *results = given
        known = (results[0], results[1]) if results else None
        try:
            return tangents_of(q, k, v, (of_q, of_k, of_v), form.data or (), self._scale, known)
        except Exception as error:  # Triton raises errors of any type
            if passing_error(error) is not None:
                raise
            _failures.append(first_line(error))
            _log.warning("tangents are computed by slices, which is slow, because Triton failed: %s", _failures[-1])
            raise Unavailable(_failures[-1]) from error


class _ByTriton(Recomputed):
    """Tangents by the kernel. Their own gradients go by slices."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], by_triton: Any, *tensors: Tensor) -> Any:
        ctx.function, ctx.count = function, 0
        ctx.save_for_backward(*tensors)
        return by_triton(*tensors)[2:]


# --- in graphs of torch.compile ---


class TangentsInGraph(torch.autograd.Function):
    """The tangents of output and lse, by one node of a graph for each pass."""

    @staticmethod
    def forward(ctx: Any, encoded: Encoded, scale: float | None, *given: Tensor) -> tuple[Tensor, ...]:
        """given: q, k, v, their tangents, output and lse."""
        ctx.parts = taken_apart(encoded, scale)
        ctx.save_for_backward(*given)
        return tuple(torch.ops.flexmasks.tangents(given, [], *ctx.parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *torch.ops.flexmasks.tangents(ctx.saved_tensors, grads, *ctx.parts)


def for_graph(given: Sequence[Tensor], grads: Sequence[Tensor], leaves: Any) -> list[Tensor]:
    """Compute the tangents of output and lse, or with `grads` of these the gradients of what is given."""

    def compute() -> Sequence[Tensor]:
        call, qkv = call_of(*leaves), (given[0], given[1], given[2])
        plans = call.encoded.plans(*qkv[:2])
        plans = plans._replace(mask=plans.mask.resized(block_size_for(plans.mask.size)))
        kernel = TangentKernel(call.scale, *qkv)
        (form,) = kernel.forms(plans)
        if not grads:
            return kernel.run(qkv, (given[3], given[4], given[5]), (given[6], given[7]), form)[2:]
        by_slices = kernel.by_slices(form.blocks, qkv[0], wants_grad=False, learns=False)
        return needed_gradients(by_slices, 0, [True] * len(given), *given, *grads)

    made = in_another_thread(compute, given[0].device)
    return [x.detach().clone(memory_format=torch.contiguous_format) for x in made]
