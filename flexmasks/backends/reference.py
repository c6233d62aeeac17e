"""Backend "reference": attention in plain torch.

It supports any floating dtype, score changes, lse and every gradient.

Tests compare the kernels with it, and on a CPU it runs the calls that need a gradient. Its memory is bounded. It
computes a call in one of three ways, with equal results but for rounding:

- By tiles (`flexmasks.backends.tiles`): the fast way, with a forward and a backward pass written by hand. torch sees
  one operation with a gradient, and can neither look inside it nor differentiate its backward pass. In a user's
  torch.compile it is the operator of `flexmasks.backends.tiles_operator`.
- By slices (`flexmasks.backends.slices`): the slower way, made of operations that torch differentiates. It runs where
  torch must look inside: in transforms of torch.func, in a user's torch.compile on a GPU, for derivatives of
  gradients, for batches of gradients, and where it cannot be known which tensors a score_mod learns.
- In tiles of sequences (`flexmasks.backends.ordered`): inside `flexmasks.invariant`, on a CPU. It takes two to three
  times as long as by tiles, and nine times in decoding, whose tiles have one query in 32.

Nothing hidden reaches an output or a gradient, not even NaN or infinity: the products run over finite values, and the
rows that do see a value that is not finite become NaN.

The backward pass calls the functions of mask and score again. They then compute what they computed in the forward pass,
or torch's error of a tensor that was changed in place is raised.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flexmasks import compat
from flexmasks.backends import tiles_operator
from flexmasks.backends.call import BlocksAndScore, Call, Kernel, Plans, Unavailable, first_line
from flexmasks.backends.ordered import Ordered
from flexmasks.backends.ordered_places import OrderedTiles, why_unknown
from flexmasks.backends.slices import OverIndices, Visible, attend_by_slices, gradients
from flexmasks.backends.tiles import Tiles, learned_by, with_views
from flexmasks.backends.waiting import Uncompiled, uncompiled
from flexmasks.blocks.elements import with_indexing_by_numbers
from flexmasks.context import is_traced_or_transformed
from flexmasks.errors import Unfit, passing_error
from flexmasks.kernels.direct import has_memory
from flexmasks.spec.structure import flatten

_log = logging.getLogger("flexmasks")


def refuses(call: Call) -> str | None:
    """Return None: every call can run here."""
    return None


def varies(call: Call) -> str | None:
    """Return why results may depend on what else is in the call, or None."""
    if call.device_type != "cpu":
        return "on a GPU torch chooses the kernel of a product by the number of tiles"
    if call.learns:
        return "a tensor of the score learns, and its gradient is a sum over all sequences"
    if call.context.has_transforms or call.context.is_transformed:
        return "inside transforms of torch.func, and of forward derivatives, it has other operations"
    if 1 in (call.q.shape[3], call.v.shape[3]):
        return "torch multiplies by heads of one number in a way that depends on their number"
    if call.is_traced and (not compat.IS_TESTED or (call.score is not None and call.score.opaque)):
        return "torch's tracing looks into it"
    return why_unknown(call.mask, call.is_traced)


def kernel(call: Call) -> Kernel:
    if call.is_traced:
        return tiles_operator.KernelInGraph(call.scale, call.context.is_invariant)
    if call.context.is_invariant:
        return _InOrder(call.scale)
    compiler_is_off = "torch._dynamo" in sys.modules and compat.compiler_is_off()  # loading it takes a second
    return _Reference(call.scale, compiler_is_off, uncompiled(call))


@dataclass(frozen=True)
class _Reference(Kernel):
    scale: float | None
    compiler_was_off: bool  # so that no faster backend could be chosen
    uncompiled: Uncompiled | None  # counts the kind's calls until these are compiled

    def forms(self, plans: Plans) -> tuple[BlocksAndScore]:
        return (BlocksAndScore.of(plans),)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: BlocksAndScore
    ) -> tuple[Tensor, Tensor | None]:
        if self.uncompiled is not None:
            self.uncompiled.count(q, k, v)
        if self.compiler_was_off and not compat.compiler_is_off():
            raise Unavailable("torch.compile is switched on again")
        return attend(q, k, v, forms[0].score_mod, forms[0].block_mask, self.scale)


@dataclass(frozen=True)
class _InOrder(Kernel):
    """The reference inside `flexmasks.invariant`."""

    scale: float | None

    def forms(self, plans: Plans) -> tuple[BlocksAndScore, OrderedTiles]:
        form = BlocksAndScore.of(plans)
        if learned_by(form.score_mod, form.block_mask.kv_num_blocks.device) is None:
            raise Unfit("what the score learns is not known, and its gradient is a sum over all sequences")
        return form, OrderedTiles.of(plans.mask)

    def folds_sinks(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> bool:
        return True  # what is folded in afterwards depends on where in a row of numbers it stands

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any
    ) -> tuple[Tensor, Tensor | None]:
        (block_mask, score_mod), layout = forms
        visible, check = Visible.of(block_mask), None
        learned = [x for x in (q, k, v, sinks) if x is not None and x.requires_grad]
        if learned and torch.is_grad_enabled():
            mask_mod, score_mod, check = frozen_functions(visible.mask_mod, score_mod, q)
            visible = visible._replace(mask_mod=cast(Callable[..., Tensor], mask_mod))
        tiles = Ordered(q, k, score_mod, visible, self.scale, layout, sinks)
        if check is None:
            return tiles.forward(q, k, v)
        with_sinks = [x for x in learned if x is sinks]
        return _AttendByTiles.apply(tiles, _refuse_in_order, check, q, k, v, *with_sinks)  # type: ignore[no-any-return]


def _refuse_in_order(*_: Tensor) -> NoReturn:
    raise RuntimeError(
        "flexmasks.attention: inside flexmasks.invariant() gradients on a CPU are neither differentiated nor computed "
        "in batches; leave out create_graph=True and is_grads_batched=True, or make the call outside."
    )


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

    block_mask, functions: as for `slices.attend_by_slices`.
    """
    visible = None if block_mask is None else Visible.of(block_mask)
    if visible is None or is_traced_or_transformed():
        return attend_by_slices(q, k, v, score_mod, visible, scale, functions)
    learned, check = learned_by(score_mod, q.device), None
    may_learn = learned is None or len(learned) > 0 or any(x.requires_grad for x in (q, k, v))
    if may_learn and torch.is_grad_enabled():
        mask_mod, score_mod, check = frozen_functions(visible.mask_mod, score_mod, q)
        visible = visible._replace(mask_mod=cast(Callable[..., Tensor], mask_mod))
    if learned and score_mod is not None:
        score_mod = with_views(score_mod)
        learned = learned_by(score_mod, q.device)
    by_slices = functools.partial(
        attend_by_slices, score_mod=score_mod, visible=visible, scale=scale, functions=functions, check=check,
        learned=learned,
    )  # fmt: skip
    if learned is None:
        return by_slices(q, k, v)
    tiles = Tiles(q, k, score_mod, visible, scale)
    if check is None:
        return tiles.forward(q, k, v)
    return _AttendByTiles.apply(tiles, by_slices, check, q, k, v, *learned)  # type: ignore[no-any-return]


def frozen_functions(
    mask_mod: Callable[..., Tensor] | None, score_mod: Callable[..., Tensor] | None, q: Tensor, others: Any = None
) -> tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None, Callable[[], None]]:
    """Return the functions of mask and score for a backward pass.

    Also returns a check of the tensors that they read.

    others: what else a call reads.
    """
    kept = _Kept()
    given = mask_mod, score_mod
    structure, leaves = flatten((given, others))
    (mask_mod, score_mod), _ = structure.fill([kept.of(t) for t in leaves.tensors], has_own_globals=True)
    if not structure.is_whole:  # what objects hold shows when the functions run
        score = torch.zeros((), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        indices = [torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(4)]
        try:
            mask_mod, score_mod = (
                None if f is None else _operations_of(f, [*scores, *indices], kept)
                for f, scores in zip(given, ([], [score]), strict=True)
            )
        except Exception as error:  # torch's tracing raises errors of any type
            if passing_error(error) is not None:
                raise
            _log.info("a backward pass reads attributes of objects again: %s", first_line(error))
    return mask_mod, score_mod, kept.check


class _Kept:
    """The tensors that functions read in a backward pass as in the forward pass, with their versions."""

    def __init__(self) -> None:
        self._versions: list[tuple[Tensor, int]] = []

    def of(self, tensor: Tensor) -> Tensor:
        """Return what a function gets in place of a tensor: the same memory, which may not be changed meanwhile."""
        is_plain = type(tensor) is Tensor and not (tensor.requires_grad or vars(tensor))
        kept = tensor.detach() if is_plain else tensor
        if not kept.is_inference() and compat.version is not compat.new_version:
            self._versions.append((kept, compat.version(kept)))
        return kept

    def check(self) -> None:
        """Raise torch's own error if a tensor was changed in place."""
        for t, expected in self._versions:
            if compat.version(t) != expected:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{t.type()} {list(t.shape)}] is at version {compat.version(t)}; expected version {expected} "
                    "instead. The mask or the score of flexmasks.attention reads this tensor: change a copy of it."
                )


def _operations_of(function: Callable[..., Tensor], arguments: list[Tensor], kept: _Kept) -> Callable[..., Tensor]:
    """Return the operations of a function by themselves, with the tensors that they read."""
    with torch.no_grad(), compat.compile_lock:
        operations = make_fx(with_indexing_by_numbers(function))(*arguments)
    for node in operations.graph.find_nodes(op="get_attr"):
        value = getattr(operations, node.target)
        setattr(operations, node.target, kept.of(value) if isinstance(value, Tensor) else value)
    return operations.forward


class _AttendByTiles(torch.autograd.Function):
    """Attention by tiles, which saves q, k, v, the learned tensors, the output and lse.

    Its backward pass goes by slices if torch must look inside it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tiles: Tiles | Ordered,
        by_slices: Callable[..., tuple[Tensor, Tensor]],
        check: Callable[[], None],
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out, lse = tiles.forward(*tensors[:3])
        ctx.tiles, ctx.by_slices, ctx.check = tiles, by_slices, check
        ctx.save_for_backward(out, lse, *tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.check()
        out, lse, *tensors = ctx.saved_tensors
        q, k, v, *learned = tensors
        # Where gradients are enabled, the caller asks for derivatives of these gradients.
        if not torch.is_grad_enabled() and not is_traced_or_transformed() and all(map(has_memory, grads)):
            return None, None, None, *ctx.tiles.backward(q, k, v, out, lse, *grads, learned)
        needed = ctx.needs_input_grad[3:]
        again = lambda *given: ctx.by_slices(*given[len(learned) :])  # noqa: E731
        found = gradients(again, len(learned), [*needed[3:], *needed[:3]], *learned, q, k, v, *grads)
        return None, None, None, *found[-3:], *found[:-3]
