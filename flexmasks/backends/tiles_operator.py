"""Attention by tiles for the operator of graphs, torch.ops.flexmasks.attend, see `operators`.

A graph of torch.compile or torch.export holds one node for the forward pass and one for the backward pass. Both read
the values of tensors when they run, as `flexmasks.backends.tiles` must, which no traced operation may. The node holds
the mask and the score encoded, see `flexmasks.spec.encoding`: tensors, numbers, and a text that says how they belong
together. The text is the same in every process, because graphs are kept in files.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import Kernel, Plans
from flexmasks.backends.encoded import Encoded
from flexmasks.backends.ordered import Ordered
from flexmasks.backends.ordered_places import OrderedTiles
from flexmasks.backends.slices import Visible
from flexmasks.backends.tiles import Tiles, learned_by, with_views
from flexmasks.blocks.bits import BITS, visible_in_words, words_of_pairs
from flexmasks.blocks.elements import boolean, over_indices
from flexmasks.blocks.lists import of_block_mask
from flexmasks.graphs import Flat, text_of, value_of_text
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.sizes import block_size_for
from flexmasks.workers import Workers

_Result = TypeVar("_Result")
# What the operator gets apart from its text: by the names of lists, what they hold.
_LISTS: dict[str, Any] = {"tensors": Tensor, "numbers": torch.SymInt, "floats": float | torch.SymFloat}


@dataclass(frozen=True)
class KernelInGraph(Kernel):
    """The reference on a CPU, where reading the values of tensors waits for nothing, by one node of a graph."""

    scale: float | None
    in_order: bool  # as `flexmasks.invariant` wants it

    def forms(self, plans: Plans) -> tuple[tuple[Tensor, ...], Encoded]:
        """Return which blocks are partial and which full, bool [B or 1, H or 1, rows, columns], and what is encoded.

        Blocks in a program for any length would tie it to a range of lengths: the operator plans them.
        """
        plan, encoded = plans.mask, plans.encoded
        if compat.is_exporting() and not plan.is_given:
            return (), encoded
        plan = plan if plan.is_given else plan.resized(block_size_for(plan.size))
        return of_block_mask(plan.block_mask), encoded._replace(block_size=plan.block_size)

    def folds_sinks(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> bool:
        return self.in_order

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: Any
    ) -> tuple[Tensor, Tensor | None]:
        blocks, encoded = forms
        how = self.scale, self.in_order, sinks
        partial, full = blocks or (torch.empty(0, dtype=torch.bool, device=q.device) for _ in range(2))
        out, lse = torch.ops.flexmasks.attend(q, k, v, partial, full, *taken_apart(encoded, *how))
        return out, lse


def bits_in_graph(q: Tensor, k: Tensor, shape: Sequence[int], encoded: Encoded) -> tuple[Tensor, ...]:
    """Return what `bits` does, by one node of a graph, which no compiler sees through."""
    return torch.ops.flexmasks.bits(q, k, *taken_apart(encoded), shape)  # type: ignore[no-any-return]


class _Call(NamedTuple):
    """What the operator knows of a call."""

    encoded: Encoded
    scale: float | None
    in_order: bool
    sinks: Tensor | None

    def tiles(
        self, q: Tensor, k: Tensor, partial: Tensor, full: Tensor, plan: MaskPlan, score_mod: Any
    ) -> Tiles | Ordered:
        if partial.numel():
            visible = Visible(plan.bound(), partial, full, plan.block_size)
        else:
            visible = Visible.of(cast(MaskPlan, plan.resized(block_size_for(plan.size))).block_mask)
        if not self.in_order:
            return Tiles(q, k, score_mod, visible, self.scale)
        layout = OrderedTiles.of(plan)
        return Ordered(q, k, score_mod, visible, self.scale, layout, self.sinks)


def taken_apart(
    encoded: Encoded, scale: float | None = None, in_order: bool = False, sinks: Tensor | None = None
) -> tuple[Any, ...]:
    leaves: list[Any] = []
    text = text_of((*encoded, scale, in_order, sinks), leaves)
    places = tuple(next((kind for kind, of_kind in _LISTS.items() if isinstance(x, of_kind)), x) for x in leaves)
    lists = ([x for x in leaves if isinstance(x, of_kind)] for of_kind in _LISTS.values())
    return *lists, repr((places, text))


def call_of(tensors: Sequence[Tensor], numbers: Sequence[int], floats: Sequence[float], whole: str) -> _Call:
    """Return what the operator's last arguments say; the text says in which list each leaf is, or has the leaf."""
    places, text = value_of_text(whole)
    lists = dict(zip(_LISTS, map(iter, (tensors, numbers, floats)), strict=True))
    *encoded, scale, in_order, sinks = Flat(
        text, tuple([next(lists[x]) if isinstance(x, str) else x for x in places])
    ).values()
    return _Call(Encoded(*encoded), scale, in_order, sinks)


def in_another_thread(compute: Callable[[], _Result], device: torch.device) -> _Result:
    """Return a function's result. Autograd and torch.vmap work in it, which torch excludes inside an operator."""
    streams: Any = {"cuda": torch.cuda, "xpu": torch.xpu}.get(device.type)
    stream = None if streams is None else streams.current_stream(device)

    def on_stream() -> _Result:
        with contextlib.nullcontext() if streams is None else streams.stream(stream), torch.no_grad():
            return compute()

    return Workers(1, torch.get_num_threads()).one(on_stream)


def forward(q: Tensor, k: Tensor, v: Tensor, partial: Tensor, full: Tensor, leaves: Any) -> tuple[Tensor, Tensor]:
    """Compute the operator; `leaves` are its last arguments."""

    def compute() -> tuple[Tensor, Tensor]:
        call = call_of(*leaves)
        mask, score, *_ = call.encoded.plans(q, k)
        return call.tiles(q, k, partial, full, mask, score and score.mod()).forward(q, k, v)

    return in_another_thread(compute, q.device)


def bits(q: Tensor, k: Tensor, shape: Sequence[int], leaves: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute words and table of all blocks of a mask, see `plans.data.reading_bits`.

    Also which blocks have any and which have only visible pairs.

    shape: of the blocks [B or 1, H or 1, rows, columns], and of a block's words [queries, keys / 32].
    """
    *sizes, _, _, height, in_words = shape
    width = in_words * BITS

    # CUDA graphs of torch.compile give memory to this thread alone.
    words = torch.empty((*shape[:4], height, in_words), dtype=torch.int32, device=q.device)

    def compute() -> None:
        visible = over_indices(call_of(*leaves).encoded.plans(q, k).mask.bound())
        b, h, kv = (torch.arange(n, device=q.device) for n in (*sizes, k.shape[2]))
        for part, out in zip(torch.arange(q.shape[2], device=q.device).split(height), words.unbind(2), strict=True):
            out.copy_(words_of_pairs(boolean(visible(b, h, part, kv), 4), (height, width))[:, :, 0])

    in_another_thread(compute, q.device)
    table = torch.arange(math.prod(shape[:4]), dtype=torch.int32, device=q.device).view(*shape[:4])
    return words.view(-1, height, in_words), table, *visible_in_words(words)


def backward(
    made: Sequence[Tensor], partial: Tensor, full: Tensor, learned: Sequence[int], leaves: Any
) -> list[Tensor]:
    """Compute the gradients of q, k, v and of the tensors at the places `learned`.

    made: q, k, v, the output, the log-sum-exp and their gradients.
    """
    q, k, v, out, lse, grad_out, grad_lse = made
    tensors, *others = leaves
    given = [t.detach().requires_grad_(place in learned) for place, t in enumerate(tensors)]
    roots = [given[place] for place in learned]

    def compute() -> tuple[list[Tensor], Sequence[Tensor | None]]:
        call = call_of(given, *others)
        mask, score, *_ = call.encoded.plans(q, k)
        with torch.enable_grad():
            score_mod = None if score is None else with_views(score.mod())
            inner = learned_by(score_mod, q.device) or []
            inner += [x for x in [call.sinks] if x is not None and x.requires_grad]
        tiles = call.tiles(q, k, partial, full, mask, score_mod)
        grad_q, grad_k, grad_v, *grads = tiles.backward(q, k, v, out, lse, grad_out, grad_lse, inner)
        # The score's function reads tensors that were made of the user's.
        found = torch.autograd.grad(inner, roots, grads, allow_unused=True) if inner else [None] * len(roots)
        return [grad_q, grad_k, grad_v], found

    of_qkv, found = in_another_thread(compute, q.device)
    grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(roots, found, strict=True)]
    return [x.detach().clone(memory_format=torch.contiguous_format) for x in (*of_qkv, *grads)]
