"""Compiled calls for new tensors, made from an earlier call without its planning in Python."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from flexmasks import compat
from flexmasks.backends.flex import CompiledCall
from flexmasks.plans.plan import GivenPlan, MaskPlan, ScorePlan
from flexmasks.spec.structure import Aliases, Opaque, flatten, in_one_piece
from flexmasks.spec.values import Spread


class Renewal:
    """A compiled call that is made again with other tensors.

    They have the shapes of the tensors in whose places they come.

    tensors: the tensors of the call that is renewed, all different. It keeps none of them.
    spread: numbers that functions read for each head, see `Modifier.bind`.
    """

    def __init__(
        self,
        call: CompiledCall,
        plan: MaskPlan,
        aliases: Aliases,
        tensors: Sequence[Tensor],
        inputs: Sequence[int],
        spread: Spread,
    ) -> None:
        self._recorded, made = plan.recorded
        self._inputs = inputs
        # Functions hold aliases of the call's tensors, the tensors that the plan made, and both for each head.
        held = [*(aliases.of(t) for t in tensors), *made]
        places = {id(t): n for n, t in enumerate(held)}
        spread = [(number, t) for number, t in spread if id(number) in places]  # others are constants of the function
        self._spread = [(places[id(number)], t.shape) for number, t in spread]
        self._functions, leaves = flatten((call.block_mask.mask_mod, call.score_mod))
        if not self._functions.is_whole:
            raise Opaque(self._functions.unreadable)
        places |= {id(t): len(held) + n for n, (_, t) in enumerate(spread)}
        # Of each leaf, its place among the tensors of a later call, or the constant itself.
        self._leaves = [(places.get(id(t)), None if id(t) in places else t) for t in leaves.tensors]
        self._call = replace(call, block_mask=None, score_mod=None)
        self._lengths, self._block_size = call.block_mask.seq_lengths, call.block_mask.BLOCK_SIZE

    @classmethod
    def of(
        cls, call: Any, mask: MaskPlan | GivenPlan, score: ScorePlan | None, aliases: Aliases, tensors: Sequence[Tensor]
    ) -> Renewal | None:
        """Return the renewal of a call, or None.

        None if the call is not compiled, has its mask as data, or is not planned by a recorded plan.
        """
        if not isinstance(call, CompiledCall) or call.is_data or isinstance(mask, GivenPlan):
            return None
        mask = mask.resized(call.block_mask.BLOCK_SIZE)
        if not mask.is_recorded:
            return None
        if score is not None and score.prepares_tensors:
            return None
        places = {id(t): n for n, t in enumerate(tensors)}
        # One tensor in two places may be two tensors in the next call.
        if len(places) < len(tensors) or any(id(t) not in places for t in mask.inputs):
            return None
        spread = [*mask.spread, *([] if score is None else score.spread)]
        with contextlib.suppress(Opaque):
            return cls(call, mask, aliases, tensors, [places[id(t)] for t in mask.inputs], spread)
        return None

    def __call__(self, tensors: Sequence[Tensor]) -> CompiledCall:
        """Return the call with these tensors."""
        indices, made = self._recorded.renewed([tensors[n] for n in self._inputs])
        values = [*[in_one_piece(t.detach()) for t in tensors], *made]
        values += [values[n].expand(shape) for n, shape in self._spread]
        leaves = [constant if place is None else values[place] for place, constant in self._leaves]
        mask_mod, score_mod = self._functions.fill(leaves)
        call = copy.copy(self._call)  # at a third of the time of `replace`
        make: Any = compat.BlockMask  # its positional arguments have no types that fit
        block_mask = make(self._lengths, *indices, self._block_size, mask_mod)
        vars(call).update(block_mask=block_mask, score_mod=score_mod)
        return call
