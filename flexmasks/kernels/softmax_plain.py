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
        hidden = _hidden(columns, part_bounds, part_bits, part_mask, visible)
        scores = _cut(x, part).to(_accumulator(x.dtype)) * scale
        if hidden is None:
            weights = scores.softmax(-1)
        else:
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0)
        _cut(y, part).copy_(weights)

    _for_parts(y, compute)
    return y


def backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """The gradient of x, given the gradient of the softmax y."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)

    def compute(part: tuple[slice, ...]) -> None:
        slopes = over_visible(lambda y, dy: scale * y * (dy - row_dot(y, dy)), _cut(y, part), _cut(dy, part))
        _cut(dx, part).copy_(slopes)

    _for_parts(y, compute)
    return dx


def over_visible(formula: Callable[..., Tensor], y: Tensor, *tensors: Tensor) -> Tensor:
    """Compute a formula of the softmax y and tensors like it, in float32 or float64. Places where y is 0 are hidden:
    there the formula reads 0 from the tensors, and the result is 0.
    """
    hidden = y == 0
    wide = _accumulator(y.dtype)
    values = formula(y.to(wide), *(t.to(wide).masked_fill(hidden, 0) for t in tensors))
    return values.masked_fill(hidden, 0).to(y.dtype)


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _hidden(
    columns: Tensor, bounds: Tensor | None, bits: Tensor | None, mask: Tensor | None, visible: bool
) -> Tensor | None:
    """The hidden places, broadcasting to [..., K], or None where nothing is hidden."""
    hidden = None
    if mask is not None:
        hidden = (mask == 0) if visible else (mask != 0)
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
