"""Masks and scores for rows of queries that are parts of sequences.

Rows are some of the sequences of a batch, or pieces of their queries. The functions see the sequence and the position
that a query has there, as if all sequences were in the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from flexmasks.spec.bands import Band, band_of
from flexmasks.spec.definitions import add_operator, define
from flexmasks.spec.parameters import Size, may_read
from flexmasks.spec.values import Mask, Score

_Value = TypeVar("_Value", Mask, Score)


def rows_of(value: _Value, sequences: Tensor, firsts: Tensor, lasts: Tensor) -> _Value:
    """Return a mask or score for a batch whose rows are parts of sequences.

    Queries behind the last one of a sequence count as the last one, so that no table is too short for them.

    sequences: int[B], the sequence of each row.
    firsts, lasts: int[N], the positions of the first and the last query of each sequence, in all rows.
    """
    params = {"inner": value, "sequences": sequences, "firsts": firsts, "lasts": lasts}
    return type(value).of(_MASK_ROWS if isinstance(value, Mask) else _SCORE_ROWS, params)


def _prepare(
    size: Size | None,
    *,
    inner: Any,
    sequences: Annotated[Tensor, "int[B]"],
    firsts: Annotated[Tensor, "int[N]"],
    lasts: Annotated[Tensor, "int[N]"],
) -> dict[str, Any]:
    return {"inner": inner, "sequences": sequences, "lasts": lasts}


def _inner_size(size: Size, *, inner: Any, sequences: Tensor, firsts: Tensor, lasts: Tensor) -> Size:
    # If values may not be read, a sequence is assumed to have at most as many queries as keys.
    if not may_read(size, firsts, lasts):
        at_most = (*size.at_most, "Q", "S")
        return replace(size, batch=len(lasts), q_len=size.kv_len, q_offset=size.kv_len, at_most=at_most)
    q_len, positions = torch.stack([(lasts - firsts).max(), lasts.max()]).add(1).tolist()
    return replace(size, batch=len(lasts), q_len=q_len, q_offset=positions - q_len)


def _band(size: Size, *, inner: Mask, **places: Tensor) -> Band | None:
    # Distances are the same in each row, but for queries behind the last one of a sequence, whose results nobody takes.
    band = band_of(inner, _inner_size(size, inner=inner, **places))
    return None if band is None or band.sequences is not None else band


def _of_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, inner: Callable[..., Tensor], **rows: Tensor) -> Tensor:
    return inner(*_in_sequences(b, h, q, kv, **rows))


def _of_score(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, inner: Callable[..., Tensor], **rows: Tensor
) -> Tensor:
    return inner(score, *_in_sequences(b, h, q, kv, **rows))


def _in_sequences(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, sequences: Tensor, lasts: Tensor) -> tuple[Tensor, ...]:
    sequence = sequences[b]
    last = lasts[sequence]
    return sequence, h, torch.where(q > last, last, q), kv


_HOOKS: dict[str, Any] = {"registered": True, "prepare": _prepare, "inner_size": _inner_size}
_MASK_ROWS = add_operator(define("mask", _of_mask, "mask_rows", native=_band, **_HOOKS))
_SCORE_ROWS = add_operator(define("score", _of_score, "score_rows", **_HOOKS))
