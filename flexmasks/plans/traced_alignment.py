"""Where queries start in a call that torch traces, see `plans.alignment`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.graphs import in_graph
from flexmasks.plans.alignment import are_equal, may_differ, of_word, reads_queries, unsaid
from flexmasks.plans.checks import ATTENTION
from flexmasks.plans.shifted import Offset
from flexmasks.plans.traced import UNKNOWN, size_of, without_traced
from flexmasks.spec.encoding import decode
from flexmasks.spec.values import Score


def aligned_traced(
    q: Tensor, k: Tensor, q_offset: Any, encoded: Any, score: Score | None, encoded_score: Any, given_blocks: bool
) -> Offset:
    """Return where queries start, see `plans.alignment`; a symbolic number becomes a tensor.

    given_blocks: the user gives the blocks, whose own offset is built in.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    if isinstance(q_offset, str):
        q_offset = of_word(ATTENTION, q_offset, q_len, kv_len)
    if q_offset is None:
        is_unknown = (encoded == UNKNOWN and not given_blocks) or (score is not None and encoded_score == UNKNOWN)
        is_known = are_equal(q_len, kv_len) or not (is_unknown or _readers(encoded, encoded_score, q, k).shape[0])
        if not is_known and may_differ(q_len, kv_len):
            unsaid(ATTENTION, q_len, kv_len)
        return 0
    return in_graph_offset(cast(Offset, q_offset), q)


def in_graph_offset(q_offset: Offset, q: Tensor) -> Offset:
    """Return where queries start, as graphs take it; a symbolic number other than 0 becomes a tensor."""
    if isinstance(q_offset, Tensor):
        return q_offset
    # A comparison would tie an exported program to its result.
    if compat.has_static_value(q_offset) or (not compat.is_exporting() and q_offset == 0):
        return int(compat.as_constant(q_offset))  # a guard may have fixed a symbolic number
    return torch.full((q.shape[0],), q_offset, device=q.device)  # is planned like one that changes


@in_graph
def _readers(encoded: Any, encoded_score: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return a tensor as long as the number of functions that may read the query's position."""
    values = [decode(kind, x) for kind, x in (("mask", encoded), ("score", encoded_score)) if x != UNKNOWN]
    with compat.without_modes():
        return torch.empty(sum(reads_queries(*without_traced(v, size_of(q, k))) for v in values))
