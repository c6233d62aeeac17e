"""Masks and scores for a part of a larger call, and for rows of queries that are parts of sequences.

The functions see the indices that the part's batch elements, heads, queries and keys have in the whole call, and
parameters are checked against its sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flexmasks.spec.bands import Band, Factors, band_of, cap_of, factors_of
from flexmasks.spec.definitions import add_operator, define
from flexmasks.spec.parameters import Size, may_read
from flexmasks.spec.values import Mask, Score

_Value = TypeVar("_Value", Mask, Score)
_COUNT = "int in 0.."
_LENGTH = "length in 0.."  # no kernel is compiled for a new one

# --- a part of a call, which a process holds ---


class PartOfCall(NamedTuple):
    """A place in a larger call, where queries and keys have the same positions.

    Example:
        >>> import flexmasks
        >>> from flexmasks.extend import PartOfCall, part_of
        >>> mask = flexmasks.get_mask(lambda b, h, q, kv: q + h >= kv)
        >>> last = part_of(mask, PartOfCall(batch=1, heads=8, first_head=7))
        >>> flexmasks.dense_mask(last, 3, 16, heads=1, q_offset=0)[0, 0].sum(1).tolist()
        [8, 9, 10]
    """

    batch: int  # sizes of the whole call
    heads: int
    length: int | None = None  # None for the number of the part's keys
    first_batch: int = 0  # the index of the part's first batch element
    first_head: int = 0
    first_position: int = 0  # added to the positions of queries, those of `q_offset` included, and of keys
    key_positions: Tensor | None = None  # int[KV], of the part's keys in the whole call, if they are no range

    def has_all(self, q: Tensor) -> bool:
        """Return whether q has all batch elements and heads."""
        return (self.batch, self.heads) == q.shape[:2]

    def sinks_of(self, sinks: Tensor | None, heads: int) -> Tensor | None:
        """Return those of the part's first `heads` heads."""
        if sinks is None or sinks.shape != (self.heads,):  # `attention` says what is wrong
            return sinks
        return sinks.narrow(0, self.first_head, heads)


def part_of(value: _Value, part: PartOfCall) -> _Value:
    """Return a mask or score of a whole call for a part of it. Its parameters are checked against the whole call."""
    params: dict[str, Any] = {"inner": value, "batch": part.batch, "heads": part.heads}
    if part.length is not None:
        params["length"] = part.length
    firsts = {name: getattr(part, name) for name in ("first_batch", "first_head", "first_position")}
    params |= {name: first for name, first in firsts.items() if first}
    if part.key_positions is not None:
        params["key_positions"] = part.key_positions
    return type(value)._of(_MASK_PART if isinstance(value, Mask) else _SCORE_PART, params)


def _prepare_part(
    size: Size | None,
    *,
    inner: Any,
    batch: Annotated[int, _LENGTH],
    heads: Annotated[int, _COUNT],
    length: Annotated[int | None, _LENGTH] = None,
    first_batch: Annotated[int, _COUNT] = 0,
    first_head: Annotated[int, _COUNT] = 0,
    first_position: Annotated[int, _COUNT] = 0,
    key_positions: Annotated[Tensor | None, "int[KV] in 0.."] = None,
) -> dict[str, Any]:
    firsts = {"first_batch": first_batch, "first_head": first_head, "first_position": first_position}
    return {"inner": inner, **firsts, "key_positions": key_positions}


def _size_of_call(size: Size, *, batch: int, heads: int, length: int | None, **others: Any) -> Size:
    length = size.kv_len if length is None else length
    return replace(
        size, batch=batch, heads=heads, q_len=length, kv_len=length, q_offset=0, starts=None, most_queries=None,
        end_to_end=None,
    )  # fmt: skip


def _band_of_part(
    size: Size, *, inner: Mask, first_position: int, key_positions: Tensor | None, **sizes: Any
) -> Band | None:
    if key_positions is not None:
        return None
    band = band_of(inner, _size_of_call(size, **sizes))
    return None if band is None or band.sequences is not None else band  # distances are the same in each part


def _cap_of_part(size: Size, *, inner: Score, **sizes: Any) -> float | None:
    return cap_of(inner, _size_of_call(size, **sizes))


def _of_part(
    *indices: Tensor,
    inner: Callable[..., Tensor],
    first_batch: int,
    first_head: int,
    first_position: int,
    key_positions: Tensor | None,
) -> Tensor:
    *score, b, h, q, kv = indices
    kv = key_positions[kv] if key_positions is not None else _shifted(kv, first_position)
    return inner(*score, _shifted(b, first_batch), _shifted(h, first_head), _shifted(q, first_position), kv)


def _shifted(index: Tensor, first: int) -> Tensor:
    return index + first if first else index


def _factors_of_part(
    size: Size, *, inner: Score, first_head: int, key_positions: Tensor | None, **sizes: Any
) -> Factors | None:
    if key_positions is not None:
        return None
    factors = factors_of(inner, _size_of_call(size, **sizes))
    return factors and replace(factors, slopes=factors.slopes[first_head : first_head + size.heads])


_OF_PART: dict[str, Any] = {"registered": True, "prepare": _prepare_part, "inner_size": _size_of_call}
_MASK_PART = add_operator(define("mask", _of_part, "mask_part", band=_band_of_part, **_OF_PART))
_SCORE_PART = add_operator(
    define("score", _of_part, "score_part", cap=_cap_of_part, factors=_factors_of_part, **_OF_PART)
)


# --- rows of queries: some of the sequences of a batch, or pieces of their queries ---


def rows_of(value: _Value, sequences: Tensor, firsts: Tensor, lasts: Tensor, offsets: Tensor, tokens: int) -> _Value:
    """Return a mask or score for a batch whose rows are parts of sequences.

    Queries behind the last one of a sequence count as the last one, so that no table is too short for them.

    sequences: int[B], the sequence of each row.
    firsts, lasts: int[N], the positions of the first and the last query of each sequence, in all rows.
    offsets, tokens: int[N], where the queries of each sequence start among those of all, and the number of all.
    """
    places = {"sequences": sequences, "firsts": firsts, "lasts": lasts, "offsets": offsets, "tokens": tokens}
    params = {"inner": value, **places}
    return type(value)._of(_MASK_ROWS if isinstance(value, Mask) else _SCORE_ROWS, params)


def _prepare_rows(
    size: Size | None,
    *,
    inner: Any,
    sequences: Annotated[Tensor, "int[B]"],
    firsts: Annotated[Tensor, "int[N]"],
    lasts: Annotated[Tensor, "int[N]"],
    offsets: Annotated[Tensor, "int[N]"],
    tokens: Annotated[int, _LENGTH],
) -> dict[str, Any]:
    return {"inner": inner, "sequences": sequences, "lasts": lasts}


def _size_of_sequences(
    size: Size, *, inner: Any, sequences: Tensor, firsts: Tensor, lasts: Tensor, offsets: Tensor, tokens: int
) -> Size:
    most_queries = lambda: (lasts - firsts).max() + 1  # noqa: E731
    size = replace(size, batch=len(lasts), starts=firsts, most_queries=most_queries, end_to_end=(offsets, tokens))
    # If values may not be read, a sequence is assumed to have at most as many queries as keys.
    if not may_read(size, firsts, lasts):
        at_most = (*size.at_most, "Q", "S")
        return replace(size, q_len=size.kv_len, q_offset=size.kv_len, at_most=at_most)
    q_len, positions = torch.stack([(lasts - firsts).max(), lasts.max()]).add(1).tolist()
    return replace(size, q_len=q_len, q_offset=positions - q_len)


def _band_of_rows(size: Size, *, inner: Mask, **places: Any) -> Band | None:
    # Distances are the same in each row, but for queries behind the last one of a sequence, whose results nobody takes.
    band = band_of(inner, _size_of_sequences(size, inner=inner, **places))
    return None if band is None or band.sequences is not None else band


def _factors_of_rows(size: Size, *, inner: Score, **places: Any) -> Factors | None:
    return factors_of(inner, _size_of_sequences(size, inner=inner, **places))  # distances are the same, as above


def _of_rows(*indices: Tensor, inner: Callable[..., Tensor], sequences: Tensor, lasts: Tensor) -> Tensor:
    *score, b, h, q, kv = indices
    sequence = sequences[b]
    last = lasts[sequence]
    return inner(*score, sequence, h, torch.where(q > last, last, q), kv)


_OF_ROWS: dict[str, Any] = {"registered": True, "prepare": _prepare_rows, "inner_size": _size_of_sequences}
_MASK_ROWS = add_operator(define("mask", _of_rows, "mask_rows", band=_band_of_rows, **_OF_ROWS))
_SCORE_ROWS = add_operator(define("score", _of_rows, "score_rows", factors=_factors_of_rows, **_OF_ROWS))
