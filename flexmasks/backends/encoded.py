"""The mask and the score change of a call as graphs of torch.compile hold them: tensors, numbers, and text."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import Plans
from flexmasks.graphs import is_for_user
from flexmasks.plans.data import reading_bits
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.score_plan import ScorePlan
from flexmasks.plans.sizes import BLOCK_SIZE, Offset, size_of, unread
from flexmasks.spec.definitions import define
from flexmasks.spec.encoding import decode
from flexmasks.spec.values import Mask, Modifier, ResolvedInner, Score

_log = logging.getLogger("flexmasks")
UNKNOWN = ("unknown", "")  # encodes a mask or score that only torch's tracing can read
BITS = "bits"  # begins an encoded mask of bits


def _unknown(*_: Tensor) -> NoReturn:
    raise AssertionError("only torch's tracing can read the function")


class Encoded(NamedTuple):
    """The mask and the score change of a call.

    mask: what `encode` returns, UNKNOWN, or BITS with words and their table, see `plans.data`.
    offset: where the queries of the mask start.
    block_size: of given blocks, or of bits.
    sizes: the batch size and the number of heads that the mask sees; () for those of the call.
    score: what `encode` returns, UNKNOWN, or None.
    q_offset: where the queries start, for the score.
    """

    mask: Any
    offset: Offset = 0
    block_size: tuple[int, int] | None = None
    sizes: tuple[int, ...] = ()
    score: Any = None
    q_offset: Offset = 0

    def plans(self, q: Tensor, k: Tensor, lists: Sequence[Tensor | None] = ()) -> Plans:
        """Return the plans for queries and keys, made of their sizes. No value is read.

        Calls of a graph that are alike share the plan of the mask: torch merges equal operations only in graphs of
        training, and only where they read the same constants.

        lists: those of given blocks.
        """
        values: list[Any] = [lists]
        kept = compat.kept_with_graph(q)
        sizes = q.device, tuple(q.shape[:3]), tuple(k.shape[:3])
        key = None if kept is None else _key_of((self[:4], sizes, tuple(lists)), values)
        if kept is None or key is None:
            return Plans(self._mask_plan(q, k, lists), self._score_plan(q, k), encoded=self)
        if key not in kept:
            kept[key] = self._mask_plan(q, k, lists), values
        return Plans(kept[key][0], self._score_plan(q, k), encoded=self)

    def _mask_plan(self, q: Tensor, k: Tensor, lists: Sequence[Tensor | None]) -> MaskPlan:
        size, block_size = unread(size_of(q, k, self.sizes), self.offset), self.block_size or BLOCK_SIZE
        mask_mod: Callable[..., Any] | None = _unknown if self.mask == UNKNOWN else None
        if self.mask[0] == BITS:
            _, words, table = self.mask
            mask_mod = reading_bits(words, table, block_size)
        mask = decode("mask", self.mask) if mask_mod is None else Mask(define("mask", mask_mod), {})
        plan = MaskPlan(cast(Mask, mask), size, self.offset, block_size=block_size, lists=lists)
        plan.opaque = mask_mod is not None
        return plan

    def _score_plan(self, q: Tensor, k: Tensor) -> ScorePlan | None:
        if self.score is None:
            return None
        is_unknown = self.score == UNKNOWN
        score = Score(define("score", _unknown), {}) if is_unknown else cast(Score, decode("score", self.score))
        plan = ScorePlan(score, unread(size_of(q, k), self.q_offset), self.q_offset)
        plan.opaque = is_unknown
        return plan

    def with_numbers(self, change: Callable[[Any], Any]) -> Encoded:
        """Return the same with other numbers in the mask and the score."""
        return self._replace(mask=changed(self.mask, change), score=changed(self.score, change))


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a mask, a score, what `resolve` returned or something encoded, with all parts changed; torch traces it."""
    if isinstance(value, Modifier):
        return type(value)(value._definition, {n: changed(v, change) for n, v in value.params.items()})
    if isinstance(value, ResolvedInner):
        return ResolvedInner(value.source, changed(value.resolved, change))
    if isinstance(value, dict):
        return {n: changed(v, change) for n, v in value.items()}
    return tuple([changed(v, change) for v in value]) if isinstance(value, tuple | list) else change(value)


def _key_of(value: Any, values: list[Any]) -> Hashable | None:
    """Return a key of what a traced call hands on, or None.

    values: gets what must live as long as the key.
    """
    if isinstance(value, tuple | list):
        keys = [_key_of(x, values) for x in value]
        return None if None in keys else tuple(keys)
    if isinstance(value, Tensor):
        key, alive = compat.value_in_graph(value)
        values.append(alive)
        return key
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return "symbolic", str(value)
    return (type(value), value) if isinstance(value, Hashable) else None


@contextlib.contextmanager
def errors_logged() -> Iterator[None]:
    """Log errors that torch would replace by its own."""
    try:
        yield
    except Exception as error:
        if not is_for_user(error):
            _log.error("a call inside torch.compile cannot be planned: %s: %s", type(error).__name__, error)
        raise
