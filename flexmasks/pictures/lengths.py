"""Lengths to draw a mask or score at, suggested by its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flexmasks import Mask, Score
from flexmasks.extend import Parameter, Size, accepts, definition_of, implied_size, tensors_of

_DEFAULT_LENGTH = 1024
_LONGEST_SUGGESTED = 1 << 16


def accepted_lengths(value: Mask | Score, b: int, h: int) -> tuple[int, int]:
    """The first numbers of queries and keys that the parameters accept: those that they suggest, the lengths of their
    tensors, powers of two. If none are accepted, the suggested ones.

    b, h: the batch element and head to draw, which must exist.
    """
    suggested = suggested_lengths(value)
    device = next((t.device for t in tensors_of(value)), torch.device("cpu"))
    batch, heads = implied_size(value, "B") or b + 1, implied_size(value, "H") or h + 1
    tensors = [t for parameter, given in _parameters(value) if (t := _tensor(parameter, given)) is not None and t.ndim]
    tables = [(t.shape[-min(t.ndim, 2)], suggested[1]) for t in tensors]  # a table has a row for each query
    rows = [(t.shape[-1], suggested[1]) for t in tensors]
    powers = [(1 << n, 1 << n) for n in range(6, 15)]
    for q_len, kv_len in (suggested, *tables, *rows, *powers):
        if accepts(value, Size(batch, heads, q_len, kv_len, device)):
            return q_len, kv_len
    return suggested


def suggested_lengths(value: Mask | Score) -> tuple[int, int]:
    """The numbers of queries and keys that parameters suggest, in this order: the lengths of tensors with one element
    for each position; a canvas's height times width; the largest number in other tensors, such as lengths and offsets,
    where parameters named kv_... count for the keys; four times the largest number, so that a window shows well; 1024.
    """
    exact = {name: implied_size(value, name) for name in ("Q", "KV", "S")}
    axes = {p.name: given for p, given in _parameters(value) if type(given) is int}
    sides = [axes[name] for name in ("depth", "height", "width") if name in axes] or [axes.get("length", 0)]
    positions = [math.prod(sides)] if all(sides) else []  # of a canvas, or of what has a length
    ends: list[int] = []
    key_ends: list[int] = []
    numbers: list[int] = []
    for parameter, given in _parameters(value):
        tensor = _tensor(parameter, given)
        if tensor is not None:
            # Numbers below the tensor's own length may belong to its positions, such as document ids.
            reached = [max(n, *tensor.shape[-1:]) for n in _largest_number(tensor)]
            (key_ends if parameter.name.startswith("kv_") else ends).extend(reached)
        else:
            numbers += [n for n in (given if isinstance(given, tuple) else (given,)) if type(n) is int]
    known = [id(given) for _, given in _parameters(value)]
    for tensor in tensors_of(value):
        if id(tensor) not in known:  # a function captured it, so only its shape and numbers are known
            longest = max(tensor.shape, default=0)
            positions += [longest] if longest >= 64 else []
            ends += _largest_number(tensor) if longest < 64 else []
    length = next((max(candidates) for candidates in (positions, ends) if candidates), 0)
    if not length and numbers:
        length = max(64, 1 << (4 * max(numbers) - 1).bit_length())
    q_len = exact["S"] or exact["Q"] or min(length, _LONGEST_SUGGESTED) or exact["KV"] or _DEFAULT_LENGTH
    return q_len, exact["S"] or exact["KV"] or max(key_ends, default=q_len)


def _tensor(parameter: Parameter, given: Any) -> Tensor | None:
    """A parameter's tensor; None for numbers, and for sequences that cannot be made a tensor."""
    if isinstance(given, Tensor) or not parameter.is_sequence(given):
        return given if isinstance(given, Tensor) else None
    try:
        return parameter.tensor(given, None)
    except (TypeError, ValueError, RuntimeError):  # the call says so
        return None


def _parameters(value: Mask | Score) -> Iterator[tuple[Parameter, Any]]:
    """Yield parameters, also of inner masks or scores over the same positions."""
    for name, given in value.params.items():
        inner = [v for v in (given if isinstance(given, tuple) else (given,)) if isinstance(v, Mask | Score)]
        if not inner:
            yield definition_of(value).parameters[name], given
        elif definition_of(value).inner_size is None:
            for modifier in inner:
                yield from _parameters(modifier)


def _largest_number(tensor: Tensor) -> list[int]:
    """A tensor's largest number as a list, empty if it cannot be a length."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or not tensor.numel():
        return []
    return [n for n in (int(tensor.max()),) if 0 < n <= _LONGEST_SUGGESTED]
