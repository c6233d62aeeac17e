"""Short sequences on a GPU, by the library's own kernels.

The host's time decides there. A compiled kernel of torch takes a few tenths of a millisecond of it, with gradients, and
seconds to compile for each function; these kernels take a tenth of that, and one set of them runs every mask.

What a score change adds may learn, as the biases of pairs of proteins and of windows of images do. Its gradient is
summed over the batch elements and heads that share it in one order, without atomic operations, so it is the same at
each run. A bias that is a tensor of the user's is read where it lies, without a copy for each batch element.

SDPA with the mask as a bias is as fast with gradients. It cannot take their place: NaN in a hidden key would reach its
output, which `attention` promises it does not, and it gives no lse.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks.backends.call import HALF_DTYPES, Call, Maker, Unavailable
from flexmasks.backends.short_call import ShortReplay
from flexmasks.kernels.direct import is_plain, with_rows_together
from flexmasks.kernels.whole_mask import Line, WholeMask, with_bias
from flexmasks.plans.bounds import SizedMask
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.score_plan import ScorePlan, is_bias
from flexmasks.plans.traced import TracedMask, TracedScore
from flexmasks.plans.whole import Added, Summand, added_of, as_rows, spanned_of
from flexmasks.spec.structure import Opaque
from flexmasks.spec.values import Mask, Score

_MAX_LENGTH = 4096  # of queries, and of keys
_MAX_SIZE = 128  # of a head
_MAX_PAIRS = 1 << 28  # of queries and keys of all heads: up to as many elements a mask may have
_MAX_ADDED = 1 << 26  # up to as many numbers a score change may add
_MAX_PAIRS_OF_BIAS = 1 << 30  # where it adds a tensor as it is; torch's kernels take several times as long


def refuses(call: Call) -> str | None:
    """Return why a call cannot run here, or None."""
    sizes = call.q.shape[3], call.v.shape[3]
    if max(call.q.shape[2], call.k.shape[2]) > _MAX_LENGTH:
        return f"on a GPU it is for up to {_MAX_LENGTH:,} queries and keys"
    if call.q.dtype not in HALF_DTYPES:
        return f"on a GPU it takes float16 and bfloat16, not {call.dtype}"
    if any(n % 8 or n > _MAX_SIZE for n in sizes):
        return f"on a GPU it takes head sizes that 8 divides, up to {_MAX_SIZE}, not {' and '.join(map(str, sizes))}"
    pairs = call.q.shape[:3].numel() * call.k.shape[2]
    most = _MAX_PAIRS if call.score is None else _MAX_ADDED
    if call.score is not None and call.score.is_bias:
        most = _MAX_PAIRS_OF_BIAS
    if pairs > most:
        return f"on a GPU it is for at most {most:,} pairs of queries and keys, not {pairs:,}"
    return None


@dataclass(frozen=True)
class GpuShortReplay(ShortReplay):
    """A call on a GPU without q, k and v."""

    spans: tuple[Tensor, Tensor]  # of the mask's tiles, see `kernels.whole_mask`
    line: Line | None  # that the bias is, whatever tensors hold
    kernels: dict[Any, Any] = field(default_factory=dict, compare=False)  # by layouts of q, k and v
    key = "short"  # of its kernels
    summand: Summand | None = None  # in place of the bias

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("spanned", "added") if self.summand is None else ("spanned", "functions")

    @property
    def calls_functions(self) -> bool:  # type: ignore[override]
        return self.summand is not None

    @classmethod
    def of(cls, call: Call) -> GpuShortReplay:
        spanned = cast(MaskPlan, call.mask).spanned
        spans = spanned.key_spans, spanned.query_spans
        bias, line, summand = None, None, None
        if call.score is not None and (call.learns or call.score.is_bias):
            summand = cast(ScorePlan, call.score).summand()
        elif call.score is not None:
            bias, line = cast(ScorePlan, call.score).added, cast(ScorePlan, call.score).line()
        scale = call.q.shape[3] ** -0.5 if call.scale is None else call.scale
        common = spanned.visible, bias, scale, call.with_lse, call.needs_grad, spans, line
        return cls(*common, summand=summand)

    @property
    def nbytes(self) -> int:
        """Bytes that keeping the call takes."""
        tensors = self.visible, self.bias, *self.spans
        return sum(x.nbytes for x in tensors if x is not None)

    def taken(self) -> tuple[Sequence[Tensor], Sequence[Tensor], Maker]:
        bias = [] if self.bias is None else [t for t in self.bias if t is not None]
        has_bias = self.bias is not None
        if self.summand is not None and not self.summand.tensors:
            raise Opaque("tensors of the score change that are not known")
        summand = None if self.summand is None else self.summand._replace(tensors=())
        template = copy.copy(self)  # at a third of the time of `replace`, as below
        vars(template).update(visible=None, bias=None, spans=None, summand=summand)
        vars(template).pop("mask", None)

        def make(read: Sequence[Any], captured: Sequence[Any]) -> GpuShortReplay:
            visible, *spans = read[:3]
            call = copy.copy(template)
            vars(call).update(visible=visible, spans=tuple(spans), bias=Added(*read[3:]) if has_bias else None)
            if summand is not None:
                vars(call).update(summand=summand._replace(tensors=captured))
            return call

        return [self.visible, *self.spans, *bias], [] if self.summand is None else self.summand.tensors, make

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        if not is_plain(q, k, v):
            raise Unavailable("its kernels take plain tensors, outside of modes and transforms of torch")
        return super().__call__(q, k, v)

    def read_by_backward(self) -> list[Tensor]:
        return [*self.spans, *super().read_by_backward()]

    def summand_numbers(self) -> list[Tensor]:
        return [] if self.summand is None else [self.summand.numbers(self.visible)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = with_rows_together(q, k, v)
        mask = self._mask_with(q, added)
        out, lse = self._kernels(q, k, v, mask).forward(q, k, v, mask)
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
        *added: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        q, k, v, d_out = with_rows_together(q, k, v, d_out)
        d_lse = None if d_lse is None else d_lse.contiguous()
        mask = self._mask_with(q, added)
        learns = any(x.requires_grad for x in added)
        kernels = self._kernels(q, k, v, mask)
        return cast(tuple[Tensor, ...], kernels.backward(d_out, d_lse, q, k, v, out, lse, mask, learns))

    @functools.cached_property
    def mask(self) -> WholeMask:
        """The mask and what is added to scores, as kernels take them."""
        numbers, weight = (None, None) if self.bias is None else self.bias
        return WholeMask(
            self.visible, *self.spans, weight, None if self.line else numbers, self.line, cast(float, self.scale)
        )

    def _mask_with(self, q: Tensor, added: Sequence[Tensor]) -> WholeMask:
        """Return the mask with numbers that are made at each call in place of the bias."""
        return with_bias(self.mask, added[0], q.shape[0]) if added else self.mask

    def _kernels(self, q: Tensor, k: Tensor, v: Tensor, mask: WholeMask) -> Any:
        layout: Any = q.stride(), k.stride(), v.stride(), q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16
        if self.summand is not None and mask.bias is not None:
            layout = *layout, mask.bias.shape, mask.bias.stride(), mask.bias.dtype, mask.bias.data_ptr() % 16
        kernels = self.kernels.get(layout)
        if kernels is None:
            from flexmasks.kernels.whole_mask_launch import kernels_of  # Triton is not installed on every system

            kernels = self.kernels[layout] = kernels_of(q, k, v, mask)
        return kernels


def attend_traced(call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of a call that torch.compile traces, whose score learns."""
    q, k, v = with_rows_together(call.q, call.k, call.v)
    mask, score = cast(TracedMask, call.mask), cast(TracedScore, call.score)
    of_mask, of_score = cast(Mask, mask.value), cast(Score, score.value)
    with torch.no_grad():
        visible, *spans = spanned_of(SizedMask(of_mask, mask.offset, mask.size, False, (1, 1)))
    has_one_bias = is_bias(of_score, score.size)
    shown = None if of_score.definition.by_library else visible
    added = as_rows([of_score.params["bias"]]) if has_one_bias else added_of(of_score, score.offset, score.size, shown)
    scale = q.shape[3] ** -0.5 if call.scale is None else call.scale
    return torch.ops.flexmasks.short(q, k, v, visible, *spans, added, scale)  # type: ignore[no-any-return]
