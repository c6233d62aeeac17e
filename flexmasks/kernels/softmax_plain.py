"""The masked softmax and its derivatives in plain torch, for a CPU, and for float64 on a GPU."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from flexmasks.workers import Workers

_PART_ELEMENTS = 1 << 20  # elements computed at once, which bounds the memory of float32 copies


def forward(
    x: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool, scale: float
) -> Tensor:
    """The operator flexmasks::masked_softmax."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = torch.arange(x.shape[-1], device=x.device)

    def compute(part: tuple[slice, ...]) -> None:
        part_bounds, part_bits, part_mask = (None if t is None else _cut(t, part) for t in (bounds, bits, mask))
        hidden = hidden_places(columns, part_bounds, part_bits, part_mask, visible)
        _cut(y, part).copy_(softmax(_cut(x, part), hidden, scale))

    _for_parts(y, compute)
    return y


def backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """The gradient of x, given the gradient of the softmax y."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)

    def compute(part: tuple[slice, ...]) -> None:
        _cut(dx, part).copy_(gradient(_cut(dy, part), _cut(y, part), scale))

    _for_parts(y, compute)
    return dx


def softmax(x: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """softmax(x * scale) over visible columns, and 0 elsewhere, by operations that have derivatives.

    hidden: booleans that broadcast to x, True = hidden, or None.
    """
    scores = x.to(_accumulator(x.dtype)) * scale
    if hidden is None:
        return scores.softmax(-1).to(x.dtype)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return weights.masked_fill(hidden, 0.0).to(x.dtype)  # the weights of a row that sees nothing are NaN


def gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """The gradient of x by operations that have derivatives. Places where y is 0 are hidden: there dy is not read, and
    the gradient is 0.
    """
    hidden = y == 0
    weights = y.to(_accumulator(y.dtype))
    slopes = dy.to(weights.dtype).masked_fill(hidden, 0)
    slopes = scale * weights * (slopes - (weights * slopes).sum(-1, keepdim=True))
    return slopes.masked_fill(hidden, 0).to(y.dtype)


def hidden_places(
    columns: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool
) -> Tensor | None:
    """The hidden places, broadcasting to [..., K], or None where nothing is hidden."""
    hidden = None
    if mask is not None:
        marked = mask if mask.dtype == torch.bool else mask != 0
        hidden = ~marked if visible else marked
    if bits is not None:
        word, bit = columns // 32, (columns % 32).int()
        unset = (bits.index_select(-1, word) >> bit) & 1 == 0
        hidden = unset if hidden is None else hidden | unset
    if bounds is not None:
        outside = (columns < bounds[..., :1]) | (columns >= bounds[..., 1:])
        hidden = outside if hidden is None else hidden | outside
    return hidden


def _for_parts(x: Tensor, compute: Callable[[tuple[slice, ...]], None]) -> None:
    if x.numel() == 0:
        return
    rows = x.numel() // x.shape[-1]
    workers = Workers.of(x.device, x.numel(), rows)
    count = workers.count
    parts = list(_parts(x.shape, min(_PART_ELEMENTS, x.numel()) // (count if count == 1 else 2 * count)))

    def compute_all(own: Sequence[tuple[slice, ...]]) -> None:
        for part in own:
            compute(part)

    with torch.no_grad():
        workers.all([functools.partial(compute_all, parts[n::count]) for n in range(count)])


def _parts(shape: torch.Size, elements: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices of the leading dimensions: parts of at most that many elements, or single rows."""
    *leading, size = shape
    steps: list[int] = []
    for n in reversed(leading):
        steps.insert(0, max(1, min(n, elements // size)))
        size *= steps[0]
    starts = (range(0, n, step) for n, step in zip(leading, steps, strict=True))
    for part in itertools.product(*starts):
        yield tuple(slice(start, start + step) for start, step in zip(part, steps, strict=True))


def _cut(x: Tensor, part: tuple[slice, ...]) -> Tensor:
    """A part of a tensor; dimensions of size 1 and missing ones broadcast, so they are not cut."""
    own = part[len(part) - x.ndim + 1 :] if x.ndim else ()
    return x[tuple(slice(None) if n == 1 else p for n, p in zip(x.shape[:-1], own, strict=True))]


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
