"""Masks and scores for a part of a larger call.

A process may hold some of the heads, batch elements, queries and keys of a call. The functions see the indices that
these have in the whole call, and parameters are checked against its sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from torch import Tensor

from flexmasks.spec.bands import Band, band_of, cap_of
from flexmasks.spec.definitions import add_operator, define
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask, Score

_Value = TypeVar("_Value", Mask, Score)
_COUNT = "int in 0.."
_LENGTH = "length in 0.."  # no kernel is compiled for a new one


@dataclass(frozen=True)
class Part:
    """A place in a larger call, where queries and keys have the same positions."""

    batch: int  # sizes of the whole call
    heads: int
    length: int | None  # None for the number of the part's keys
    first_batch: int = 0  # the index of the part's first batch element
    first_head: int = 0
    first_position: int = 0  # added to the positions of queries, those of `q_offset` included, and of keys
    key_positions: Tensor | None = None  # int[KV], of the part's keys in the whole call, if they are no range


def part_of(value: _Value, part: Part) -> _Value:
    """Return a mask or score of a whole call for a part of it."""
    params: dict[str, Any] = {"inner": value, "batch": part.batch, "heads": part.heads}
    if part.length is not None:
        params["length"] = part.length
    firsts = {name: getattr(part, name) for name in ("first_batch", "first_head", "first_position")}
    params |= {name: first for name, first in firsts.items() if first}
    if part.key_positions is not None:
        params["key_positions"] = part.key_positions
    return type(value).of(_MASK_PART if isinstance(value, Mask) else _SCORE_PART, params)


def _prepare(
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


def _inner_size(size: Size, *, batch: int, heads: int, length: int | None, **others: Any) -> Size:
    length = size.kv_len if length is None else length
    return replace(size, batch=batch, heads=heads, q_len=length, kv_len=length, q_offset=0)


def _band(size: Size, *, inner: Mask, first_position: int, key_positions: Tensor | None, **sizes: Any) -> Band | None:
    if key_positions is not None:
        return None
    band = band_of(inner, _inner_size(size, **sizes))
    return None if band is None or band.sequences is not None else band  # distances are the same in each part


def _cap(size: Size, *, inner: Score, **sizes: Any) -> float | None:
    return cap_of(inner, _inner_size(size, **sizes))


def _of_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, inner: Callable[..., Tensor], **place: Any) -> Tensor:
    return inner(*_in_whole_call(b, h, q, kv, **place))


def _of_score(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, inner: Callable[..., Tensor], **place: Any
) -> Tensor:
    return inner(score, *_in_whole_call(b, h, q, kv, **place))


def _in_whole_call(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    first_batch: int,
    first_head: int,
    first_position: int,
    key_positions: Tensor | None,
) -> tuple[Tensor, ...]:
    kv = key_positions[kv] if key_positions is not None else _shifted(kv, first_position)
    return _shifted(b, first_batch), _shifted(h, first_head), _shifted(q, first_position), kv


def _shifted(index: Tensor, first: int) -> Tensor:
    return index + first if first else index


_HOOKS: dict[str, Any] = {"registered": True, "prepare": _prepare, "inner_size": _inner_size}
_MASK_PART = add_operator(define("mask", _of_mask, "mask_part", native=_band, **_HOOKS))
_SCORE_PART = add_operator(define("score", _of_score, "score_part", native=_cap, **_HOOKS))
