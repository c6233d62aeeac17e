"""A score change on its way to a score_mod, or to the numbers that it adds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from flexmasks.blocks.elements import over_indices
from flexmasks.cache import FACT, KINDS, PLANS, Part
from flexmasks.context import is_capturing
from flexmasks.kernels.whole_mask import Line
from flexmasks.plans.naming import naming
from flexmasks.plans.plan import ModifierPlan, Prepared
from flexmasks.plans.recorded import Learning
from flexmasks.plans.sizes import Offset, shifted_score, sized, unread
from flexmasks.plans.whole import Added, Summand, added_by, added_of, as_rows, multiplied
from flexmasks.spec.aliases import Aliases
from flexmasks.spec.bands import Factors, cap_of, factors_of
from flexmasks.spec.parameters import Size, describe
from flexmasks.spec.structure import flatten
from flexmasks.spec.values import Score

_BIASES = "dense_bias", "pair_bias"  # scores whose sum is their tensor
_ADDED: Part[Added] = Part(PLANS, "added")
_TRIED: Part[bool] = Part(KINDS, "tried_scores")
_SCORES: Part[Prepared] = Part(PLANS, "scores")


def is_bias(score: Score, size: Size) -> bool:
    """Whether a score change adds a tensor of the user's as it is, with a row for each query or one for all."""
    bias = score.params.get("bias")
    is_known = score._definition.by_library and score._definition.name in _BIASES
    return is_known and isinstance(bias, Tensor) and bias.shape[-2] in (1, size.q_len)


def _rows_of_bias(tensors: Sequence[Tensor], _: Tensor) -> Tensor:  # one function, which updates of plans compare
    return as_rows(tensors)


def _added(score: Score, offset: Offset, size: Size) -> Sequence[Tensor]:
    factors = factors_of(score, size)
    if factors is None:
        return [added_of(score, offset, size)]
    return multiplied(factors, offset, size)


class ScorePlan(ModifierPlan):
    """A score change on its way to a score_mod."""

    def __init__(self, score: Score, size: Size, offset: Offset = 0, *, aliases: Aliases | None = None) -> None:
        super().__init__(score, size, offset, aliases=aliases)

    @property
    def score(self) -> Score:
        return cast(Score, self.value)

    def mod(self) -> Callable[..., Tensor]:
        return shifted_score(*self._bind(self._prepared))

    @functools.cached_property
    def _prepared(self) -> Prepared:
        return self._cached(_SCORES, self._build)

    @functools.cached_property
    def cap(self) -> float | None:
        """The cap, if the score change is a soft-cap."""
        return cap_of(self.score, unread(self.size, self.offset))

    @functools.cached_property
    def factors(self) -> Factors | None:
        """The slopes, if the score change adds them times the distance."""
        return factors_of(self.score, unread(self.size, self.offset))

    @functools.cached_property
    def added(self) -> Added:
        """The numbers that the score change adds; it must only add."""
        return self._made(_ADDED, Added, _added)

    def _check_values(self) -> None:
        if self.size.reads_at_once:
            self.score._resolve(sized(self.size, self.offset))

    @property
    def is_bias(self) -> bool:
        return is_bias(self.score, self.size)

    def summand(self, known: Summand | None = None) -> Summand:
        """The numbers that the score change adds as a function of its tensors; it must only add.

        known: that of a score change which differs in the values of tensors only. A function that was recorded for it
            is taken again.
        """
        if self.is_bias:
            return Summand([self._bound_to[0].params["bias"]], _rows_of_bias)
        score_mod, size = self.mod(), self.size
        functions, leaves = flatten(score_mod)
        if not (functions.is_whole and size.may_read):
            of_user = not self.is_by_library
            return Summand([], lambda _, visible: added_by(score_mod, size, visible if of_user else None))
        if known is not None:
            return known._replace(tensors=leaves.tensors)
        if self.is_by_library:  # whose derivatives are finite everywhere
            return Summand(leaves.tensors, Learning(lambda tensors: added_by(functions.fill(tensors), size)))
        # A user's function may do what its operations do not tell, as to read `tensor.data` or add hooks.
        return Summand(leaves.tensors, lambda tensors, visible: added_by(functions.fill(tensors), size, visible))

    def line(self) -> Line | None:
        """The line that the added numbers are over the distance, or None."""
        if self.factors is None or not isinstance(self.offset, int):
            return None
        return Line(-1.0 if self.factors.is_absolute else 1.0, 0.0, self.offset, self.factors.is_absolute)

    def _build(self) -> Prepared:
        if self.size.may_read and not is_capturing(self.size.device):
            key = self.kernel_key, self.size, self.shapes
            is_known = not self.opaque and _TRIED.get(key) is not None
            # On a GPU the values are read for the first score of a kind only.
            if self.size.reads_at_once or not is_known:
                resolved = self.score._resolve(sized(self.size, self.offset))
                if not is_known:
                    self._try(shifted_score(self.score._bind(resolved), self.offset))
                    _TRIED.put(key, (), True, FACT)
                return Prepared(resolved, self._offset_tensor())
        return Prepared(self.score._resolve(unread(self.size, self.offset)), self._offset_tensor())

    def _try(self, score_mod: Callable[..., Tensor]) -> None:
        """Call the function on some scores, to raise its errors here and by name.

        Of each index the first and the last are tried, on a GPU only the first: one out of range would end the process.
        """
        size = self.size
        lengths = size.batch, size.heads, size.q_len, size.kv_len
        ends = [[0, n - 1] if size.runs_on_cpu else [0] for n in lengths]
        scores = torch.zeros([len(e) for e in ends], dtype=size.dtype, device=size.device)
        with naming(self.score), torch.no_grad():
            indices = (torch.tensor(e, device=size.device) for e in ends)
            changed = over_indices(score_mod, (0,))(scores, *indices)
            if not changed.dtype.is_floating_point or changed.shape != scores.shape:
                got = f"{describe(changed)} for {describe(scores)}"
                raise TypeError(f"a score function must return a floating number for each score, got {got}.")
