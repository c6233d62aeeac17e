"""A mask and a score change while torch traces: what can be said of them before their tensors have values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.plans.bounds import reads_made_tensors
from flexmasks.plans.score_plan import is_bias
from flexmasks.plans.sizes import Offset, shifted_mask, shifted_score
from flexmasks.plans.windows import Window, window_of
from flexmasks.spec.bands import cap_of
from flexmasks.spec.parameters import Size
from flexmasks.spec.structure import with_tensors
from flexmasks.spec.values import Mask, Modifier, Score

# Masks that read a tensor for each token and are expected to have few partial blocks from a number of keys on. Marks of
# padding follow each other. Documents of more than 1,400 tokens are faster on flex_flash, shorter ones on flex (H200);
# if nothing is known of their lengths but that they are between 128 and the row's, most are longer in such rows. So are
# those that matter, since attention takes more of a step.
_CUT_LITTLE_FROM = {"key_padding": 0, "document": 16384}
UNKNOWN = ("unknown", "")  # encodes a mask or score that is not given, or that only torch can read


def _unknown(*_: Any) -> NoReturn:
    raise AssertionError("the choice of a backend does not ask for this while torch traces")


@dataclass(frozen=True)
class _Traced:
    """A mask or score change with the sizes of a call, in place of a plan.

    value: None if torch must trace its function to know it.
    """

    value: Modifier | None
    size: Size
    offset: Offset
    kernel_key: Hashable
    holds_aliases = False
    shapes = ()

    @property
    def what(self) -> str:
        return repr(self.value)

    @property
    def opaque(self) -> bool:
        return self.value is None

    @property
    def tensors(self) -> list[Tensor]:
        return [] if self.value is None else self.value.tensors()

    @property
    def has_number_tensors(self) -> bool:
        return any(t.ndim == 0 for t in self.tensors)

    @property
    def is_by_library(self) -> bool:
        return self.value is not None and self.value.is_by_library()

    def function(self) -> Callable[..., Tensor]:
        """The function that a kernel would compile, over tensors of zeros: torch's trace owns the others."""
        with compat.without_modes():
            value, size = without_traced(cast(Modifier, self.value), self.size)
            offset = _zeros_like(self.offset) if isinstance(self.offset, Tensor) else compat.size_hint(self.offset)
            mod = value.bind(value.resolve(size), size.heads, for_kernels=True)
            return shifted_mask(mod, offset) if value.kind == "mask" else shifted_score(mod, offset)


@dataclass(frozen=True)
class TracedMask(_Traced):
    """A mask in place of a MaskPlan. Its blocks are planned in the traced graph, or the user gives them.

    block_size: of given blocks, else None.
    rows: batch elements x heads of the call; `size` has those that given blocks were made for.
    """

    block_size: tuple[int, int] | None = None
    rows: int = 1
    intervals = None
    reads_data_as_fast = False
    blocks = data = explained = _unknown

    @property
    def is_given(self) -> bool:
        return self.block_size is not None

    @functools.cached_property
    def window(self) -> Window | None:
        is_readable = self.value is not None and not self.is_given and isinstance(self.offset, int)
        return window_of(cast(Mask, self.value), self.size) if is_readable else None

    def resized(self, block_size: tuple[int, int]) -> TracedMask | None:
        """The mask in blocks of a size; given blocks have no other."""
        return self if self.block_size in (None, block_size) else None

    def computed_fraction(self) -> float:
        window = self.window
        pairs = self.size.q_len * self.size.kv_len
        return 0.5 if window is None or self.tensors else window.pairs(self.size.q_len) / pairs

    def is_mostly_partial(self) -> bool:
        """Whether kernels may read tensors in many partial blocks; the answer follows from names and shapes."""
        if self.value is None:
            return False
        if not self.is_by_library:
            return bool(self.tensors) or self._reads_made_tensors()
        few, length = compat.size_hint(self.rows), compat.size_hint(self.size.kv_len)
        for inner in self.value.inside():
            tensors = [x for x in inner.params.values() if isinstance(x, Tensor)]
            cuts_little = length >= _CUT_LITTLE_FROM.get(inner.name, math.inf)
            if not cuts_little and any(math.prod(map(compat.size_hint, x.shape)) > few for x in tensors):
                return True
        return self._reads_made_tensors()

    def _reads_made_tensors(self) -> bool:
        """Whether kernels read tensors that the library makes for them."""
        if self.value is None or not self.value.has_other_function():
            return False
        with compat.without_modes():
            alone, known = without_traced(self.value, self.size)
            return reads_made_tensors(alone, alone.resolve(known))


@dataclass(frozen=True)
class TracedScore(_Traced):
    """A score change in place of a ScorePlan."""

    @property
    def cap(self) -> float | None:
        return None if self.value is None else cap_of(cast(Score, self.value), self.size)

    @property
    def is_bias(self) -> bool:
        return self.value is not None and is_bias(cast(Score, self.value), self.size)


def without_traced(value: Modifier, size: Size) -> tuple[Modifier, Size]:
    """A mask or score with tensors of zeros, and a size of numbers."""
    lengths = (size.batch, size.heads, size.q_len, size.kv_len, size.q_offset)
    batch, heads, q_len, kv_len, q_end = map(compat.size_hint, lengths)
    starts = None if size.starts is None else _zeros_like(size.starts)
    known = replace(size, batch=batch, heads=heads, q_len=q_len, kv_len=kv_len, q_offset=q_end, starts=starts)
    return with_tensors(value, _zeros_like, has_own_globals=True), known


def _zeros_like(x: Tensor) -> Tensor:
    return torch.zeros([compat.size_hint(n) for n in x.shape], dtype=x.dtype, device=x.device)


def size_of(q: Tensor, k: Tensor, sizes: tuple[int, ...] = (), ends_among_keys: bool = True) -> Size:
    """The sizes of a call; sizes: the batch size and number of heads, by default those of q."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads = sizes or q.shape[:2]
    approximate = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    return Size(
        batch, heads, q.shape[2], k.shape[2], q.device, dtype=dtype, approximate=approximate,
        ends_among_keys=ends_among_keys,
    )  # fmt: skip
