"""Where queries start among the keys: the caller says it where their numbers differ, and it is never guessed.

Two alignments are common. The queries may be the last tokens of a key-value cache, as FlashAttention takes them, or
query 0 may be at key 0, as SDPA's `is_causal` takes them. A mask that does not read the query's position needs neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.elements import over_indices
from flexmasks.cache import FACT, KINDS, Part
from flexmasks.context import reads_at_once
from flexmasks.plans.checks import fail
from flexmasks.plans.sizes import Offset, unread
from flexmasks.spec.definitions import AND, CHAIN, NOT, OR
from flexmasks.spec.parameters import Size, can_be_read, is_dense
from flexmasks.spec.structure import Opaque, flatten
from flexmasks.spec.values import Modifier

WORDS = ("first", "last")
# The parameters that have rows of queries, and the dimension of the rows.
_TABLES = {
    "dense": ("visible", -2), "topk": ("indices", -3), "dense_bias": ("bias", -2), "pair_bias": ("bias", -2),
    "decomposed_bias": ("rel_h", -2),
}  # fmt: skip
_PLACED = {"packed", "vision_cross"}  # positions of queries follow from parameters, from 0 on
_OPERATORS = AND, OR, NOT, CHAIN
_READS: Part[bool] = Part(KINDS, "reads_queries")


def aligned(call: str, q_offset: Any, size: Size, values: Sequence[Modifier | None]) -> Any:
    """Return where queries start: what the caller says, or what follows from the lengths and functions, `values`.

    Raises ValueError in the name of `call` if it does not follow.
    """
    q_len, kv_len = size.q_len, size.kv_len
    if isinstance(q_offset, str):
        return of_word(call, q_offset, q_len, kv_len)
    if q_offset is not None:
        return q_offset
    if are_equal(q_len, kv_len) or not any(reads_queries(v, size) for v in values if v is not None):
        return 0
    return unsaid(call, q_len, kv_len) if may_differ(q_len, kv_len) else 0


def are_equal(q_len: int, kv_len: int) -> bool:
    """Return whether lengths are surely equal; symbolic lengths are not compared."""
    if type(q_len) is int and type(kv_len) is int:
        return q_len == kv_len
    return bool(compat.statically_known_true(q_len == kv_len))


def may_differ(q_len: int, kv_len: int) -> bool:
    """Return whether a call with queries and keys may have different numbers of them; symbolic ones are compared."""
    if type(q_len) is int and type(kv_len) is int:
        return q_len != kv_len and q_len > 0 and kv_len > 0
    return bool(compat.guard_or_true(q_len != kv_len)) and not (are_equal(q_len, 0) or are_equal(kv_len, 0))


def of_word(call: str, word: str, q_len: int, kv_len: int) -> int:
    if word not in WORDS:
        fail(f"`q_offset` must be 'first', 'last', an int, or integers [B], got {word!r}.", call=call)
    if word == "first":
        return 0
    if kv_len < q_len:
        fail(f"q_offset='last' needs at least as many keys as queries, got {_counts(q_len, kv_len)}.", call=call)
    return kv_len - q_len


def unsaid(call: str, q_len: int, kv_len: int, where: str = "") -> NoReturn:
    """Raise the error of a call that does not say where its queries start."""
    last = layout = ""
    if kv_len > q_len:
        last = f"q_offset={kv_len - q_len} or 'last' if the queries are the last tokens of a KV cache, "
    elif call == "flexmasks.attention":  # heads in groups may stand where the lengths should
        layout = "; tensors [B, S, H, D] need layout='bshd'"
    start = f"{last}q_offset=0 or 'first' if query 0 is at key 0{layout}"
    fail(f"{where}{_counts(q_len, kv_len)}: pass {start}.", call=call)


def _counts(q_len: int, kv_len: int) -> str:
    return f"{q_len} {'query' if q_len == 1 else 'queries'}, {kv_len} {'key' if kv_len == 1 else 'keys'}"


def reads_queries(value: Modifier, size: Size, if_wrong: bool = False) -> bool:
    """Return whether a mask or score change may depend on the query's position; `if_wrong` if its parameters are wrong.

    A table with a row for each query of the call says by itself where they are.
    """
    if value._definition in _OPERATORS:
        return any(reads_queries(m, size, if_wrong) for m in value._operands())
    if value._definition.by_library and (value.name in _PLACED or _has_row_for_each_query(value, size)):
        return False
    key = None
    with contextlib.suppress(Opaque):
        structure, leaves = flatten(value)
        if not all(map(is_dense, leaves.tensors)):  # the plan says so
            return if_wrong
        key = structure.key, *[t.shape for t in leaves.tensors]  # a function may ask for them
    known = None if key is None else _READS.get(key)
    if known is None:
        try:
            with compat.without_dispatch_modes(), torch.no_grad():
                known = _reads_queries(value, size)
        except Exception:  # a function or parameter of the user's that is wrong
            return if_wrong
        if key is not None:
            _READS.put(key, (), known, FACT)
    return known


def _has_row_for_each_query(value: Modifier, size: Size) -> bool:
    """Whether a table has a row for each query of the call, or one for all."""
    name, dimension = _TABLES.get(value.name, ("", 0))
    table = value.params.get(name)
    if not (isinstance(table, Tensor) and is_dense(table) and table.ndim >= -dimension):
        return False
    of_all = [size.batch * size.q_len] * (value.name == "topk" and table.ndim == 3)
    return table.shape[dimension] in (1, size.q_len, *of_all)


def _reads_queries(value: Modifier, size: Size) -> bool:
    function = value._bind(value._resolve(unread(size, 0)))
    score = [] if value._kind == "mask" else [torch.zeros((), device=size.device)]
    indices = (torch.zeros(n, dtype=torch.int64, device=size.device) for n in (1, 1, 2, 1))
    values = over_indices(function, (None,) * len(score))(*score, *indices)
    return values.stride(2) != 0  # vmap expands what does not depend on an index


def sequences_aligned(
    call: str,
    q_offset: Any,
    offsets: Tensor,
    kv_offsets: Tensor | None,
    heads: int,
    lengths: tuple[int, int],
    values: Sequence[Modifier | None],
    waits: bool,
) -> Offset:
    """Return where the queries of sequences start that are laid end to end, see `aligned`.

    offsets, kv_offsets: int[N + 1], where the sequences of queries and of keys start and the last one ends; None for
        keys that lie as the queries do.
    lengths: numbers of all queries and of all keys.
    waits: whether the host may wait for a GPU to read the lengths of sequences.
    """
    if kv_offsets is not None and len(offsets) != len(kv_offsets):
        numbers = f"`offsets` has {len(offsets) - 1} sequences, `kv_offsets` has {len(kv_offsets) - 1}"
        fail(f"{numbers}; pass the starts and the end of the same sequences.", call=call)
    if q_offset is not None and not isinstance(q_offset, str):
        return cast(Offset, q_offset)
    if isinstance(q_offset, str):
        of_word(call, q_offset, 0, 0)  # raises for another word
    if kv_offsets is None or kv_offsets is offsets or q_offset == "first":
        return 0
    counts, kv_counts = offsets.diff(), kv_offsets.diff()
    may_read = can_be_read(counts) and can_be_read(kv_counts) and (waits or reads_at_once(counts.device))
    if q_offset == "last":
        if may_read and bool((kv_counts < counts).any()):
            n = int((kv_counts < counts).int().argmax())
            of_word(call, "last", int(counts[n]), int(kv_counts[n]))
        return (kv_counts - counts).clamp(min=0)
    size = replace(unread(Size(len(counts), heads, *lengths, offsets.device), 0), at_most=("S",))
    if not any(reads_queries(v, size, if_wrong=True) for v in values if v is not None):
        return 0
    if not may_read:
        fail(
            "the sequences of q and k may have different lengths, which are not read on the host: pass q_offset='last' "
            "if the queries are the last tokens of their sequences, q_offset='first' if each query 0 is at its key 0.",
            call=call,
        )
    differs = (counts != kv_counts) & (counts > 0) & (kv_counts > 0)
    if bool(differs.any()):
        n = int(differs.int().argmax())
        unsaid(call, int(counts[n]), int(kv_counts[n]), f"sequence {n} has ")
    return 0
