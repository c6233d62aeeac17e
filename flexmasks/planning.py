"""Plans that a user holds, `flexmasks.plan`: planned once a step, used by every layer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from flexmasks import compat
from flexmasks.attention import explain
from flexmasks.blocks.counts import Blocks
from flexmasks.plans.checks import fail
from flexmasks.plans.explanation import Explanation
from flexmasks.plans.held import HeldPlan, Sizes
from flexmasks.plans.lengths import Lengths, device_of_tensors
from flexmasks.plans.portable import count_blocks
from flexmasks.spec.arguments import Alignment, MaskLike, ScoreLike, from_arguments, get_mask
from flexmasks.spec.by_name import says_what_to_write
from flexmasks.spec.definitions import KEYWORDS
from flexmasks.spec.parameters import device_named
from flexmasks.spec.structure import state_of
from flexmasks.spec.values import Mask, Score


class Plan(HeldPlan):
    """A mask, and a score change if there is one, planned for calls of given sizes. `flexmasks.plan` makes it.

    It is passed to `attention` in place of a mask. What the first call of a kind plans and compiles, later calls find
    without a search: layers of a model, steps of a loop, and captured CUDA graphs, which see `update`.

    The plan has copies of the tensors of mask and score: changes of what it was made from do not reach it, `update`
    does. All else that functions read is read at each call: numbers, lists, dictionaries and functions without tensors,
    in closures and in global variables. What holds a tensor is copied whole: a list or a functools.partial with the
    numbers beside the tensor, a function with its defaults. Tensors that learn, and variables that cannot be copied,
    stay the user's own: then each call plans as if it were given the mask. A plan can be pickled as its mask, score
    and sizes, and moved by `.to(device)`.

    Attributes:
        mask, score: the mask, and the score change or None, with the plan's own tensors.
        sizes: q_len, kv_len, batch, heads (None for any) and device.
        q_offset: where the queries start, as in `attention`.
    """

    _blocks: tuple[Blocks, Hashable, list[torch.Tensor]] | None = None  # with the state and tensors they are made from

    @property
    def blocks(self) -> Blocks:
        """The blocks of the mask, exact and with their counts; it prints as text."""
        tensors: list[torch.Tensor] = []
        state = state_of((self.mask, self.q_offset), tensors)
        if self._blocks is None or state is None or self._blocks[1] != state:
            self._blocks = count_blocks(self.mask, **self._extents()), state, tensors
        return self._blocks[0]

    @property
    def block_mask(self) -> compat.BlockMask:
        """The exact BlockMask of the mask, as `flexmasks.block_mask(..., check=True)` returns it."""
        return self.blocks.block_mask

    @property
    def sparsity(self) -> float:
        """The share of pairs in empty blocks, which are skipped, from 0.0 to 1.0."""
        return self.blocks.sparsity

    @says_what_to_write(also=KEYWORDS)
    def explain(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Explanation:
        """Explain how `attention` would run with this plan, see `flexmasks.explain`."""
        if "mask" in arguments:
            fail("the plan is the mask; pass no `mask`, or call `flexmasks.explain`.", TypeError, _EXPLAIN)
        return explain(q, k, v, mask=self, **arguments)

    @says_what_to_write()
    def update(self, **tensors: Any) -> None:
        """Give tensors of the mask or score new values, and plan with them in the same memory.

        A CUDA graph that was captured with the plan then computes with the new values. A backward pass of an earlier
        call has the gradients of the old values, or raises torch's own error if it needs to read them from the plan, as
        where an activation checkpoint is to make the call again. Where blocks come as bounds, as on a GPU after the
        first update of a kind, the host waits for nothing.

        Args:
            **tensors: new values by the names of parameters or captured variables, or as q_offset; tensors of the same
                shape and device, or lists. A name that several parts of the mask have stands for all of them. None may
                require a gradient.

        Raises:
            ValueError, TypeError: there is no such tensor, or the value does not fit it.
            RuntimeError: a CUDA graph holds a call that cannot be planned in its memory.
            The plan is then as it was.

        Example:
            >>> import torch, flexmasks
            >>> ids = torch.arange(100) // 30
            >>> plan = flexmasks.plan("document", 100, batch=1, heads=2, document_ids=ids)
            >>> q, k, v = torch.randn(3, 1, 2, 100, 16)
            >>> before = flexmasks.attention(q, k, v, mask=plan)
            >>> plan.update(document_ids=torch.arange(100) // 20)
            >>> out = flexmasks.attention(q, k, v, mask=plan)
            >>> want = flexmasks.attention(q, k, v, mask="document", document_ids=torch.arange(100) // 20)
            >>> torch.allclose(out, want)
            True
        """
        super().update(**tensors)

    def to(self, device: torch.device | str) -> Plan:
        """Return the plan on a device, with its tensors."""
        device = device_named("flexmasks.Plan.to", device)
        q_offset = self.q_offset.to(device) if isinstance(self.q_offset, torch.Tensor) else self.q_offset
        score = None if self.score is None else self.score.to(device)
        sizes = replace(self.sizes, device=device_of_tensors(device))
        return Plan(self.mask.to(device), score, sizes, q_offset, is_invariant=self.is_invariant)

    def _extents(self) -> dict[str, Any]:
        sizes = self.sizes
        lengths = {"q_len": sizes.q_len, "kv_len": sizes.kv_len, "batch": sizes.batch, "heads": sizes.heads}
        return {**lengths, "device": sizes.device, "q_offset": self.q_offset}

    def __invert__(self, _: Any = None) -> Any:
        raise TypeError(f"flexmasks: `&`, `|` and `~` take masks, got {self!r}{self.hint}.")

    __and__ = __or__ = __invert__

    def __reduce__(self) -> Any:
        return loaded_plan, (self.mask, self.score, self._extents() | {"invariant": self.is_invariant})

    def __copy__(self) -> Plan:
        return Plan(self.mask, self.score, self.sizes, self.q_offset, is_invariant=self.is_invariant)

    def __repr__(self) -> str:
        what = repr(self.mask) if self.score is None else f"{self.mask!r} with score {self.score!r}"
        return f"Plan({what}, {self.sizes}{', invariant=True' if self.is_invariant else ''})"


_EXPLAIN = "flexmasks.Plan.explain"


def loaded_plan(mask: Mask, score: Score | None, extents: dict[str, Any]) -> Plan:
    """Return the plan that a pickle stored."""
    return plan(mask, score=score, **extents)


@says_what_to_write()
def plan(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | str | None = None,
    q_offset: Alignment = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    invariant: bool = False,
    **params: Any,
) -> Plan:
    """Return a plan of a mask for calls of these sizes, which `attention` takes in place of the mask.

    A plan spares each call the search for what earlier calls planned. It can be shown before any call: `plan.sparsity`,
    `plan.block_mask`, `plan.explain(q, k, v)`. Inside torch.compile it stands for its mask: there each graph plans, and
    a plan is made and passed to calls there, but is not updated, moved or shown.

    Args:
        mask: a name, a Mask, or a function (b, h, q, kv) -> bool of index tensors, as in `attention`.
        q_len, kv_len: numbers of queries and keys, above 0; kv_len is q_len by default.
        batch, heads: numbers of batch elements and of query heads; by default calls may have any number, as far as the
            parameters' shapes allow.
        device: the device of the calls; by default that of the parameters' tensors, or the CPU.
        q_offset: where the queries start, as in `attention`.
        score: a change of the scores, as in `attention`; by default calls may name their own.
        invariant: whether calls with the plan run as inside `flexmasks.invariant`.
        **params: the parameters of the mask and the score that are given by name.

    Raises:
        ValueError, TypeError: an input does not fit; the message says what to pass. A call whose sizes are others
            raises ValueError with both.

    Example:
        >>> import torch, flexmasks
        >>> ids = torch.arange(512) // 200
        >>> from flexmasks.masks import causal, document
        >>> packed = causal() & document(document_ids=ids)
        >>> plan = flexmasks.plan(packed, 512, batch=2, heads=4)
        >>> plan.sparsity
        0.5
        >>> q, k, v = torch.randn(3, 2, 4, 512, 64)
        >>> flexmasks.attention(q, k, v, mask=plan).shape
        torch.Size([2, 4, 512, 64])
    """
    known, change = from_arguments(mask, score, params)
    value = get_mask("full" if known is None else known)
    if compat.is_compiling():  # torch traces no checks of values; the call checks the sizes
        sizes = Sizes(q_len, q_len if kv_len is None else kv_len, batch, heads, None)
        return Plan(value, change, sizes, cast(int | torch.Tensor, q_offset), is_invariant=invariant)
    lengths = Lengths(q_len, kv_len, batch, heads, device, q_offset)
    size, _, offset = lengths.check("flexmasks.plan", value, change)
    lengths.check_parameters(size, offset, [value] if change is None else [value, change])
    sizes = Sizes(size.q_len, size.kv_len, batch, heads, size.device)
    return Plan(value, change, sizes, offset, is_invariant=invariant)
