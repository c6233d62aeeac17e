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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks.backends.call import HALF_DTYPES, Call, Kernel, Plans, Unavailable
from flexmasks.backends.short_kernel import ShortKernel
from flexmasks.kernels.direct import is_plain, with_rows_together
from flexmasks.kernels.whole_mask import Line, WholeMask, with_bias
from flexmasks.plans.whole import Added, Summand

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


def kernel(call: Call) -> Kernel:
    score = call.score
    is_summand = score is not None and (call.learns or score.is_bias)
    return GpuKernel(
        scale=call.q.shape[3] ** -0.5 if call.scale is None else call.scale,
        with_lse=call.with_lse,
        needs_grad=call.needs_grad,
        summand=None if score is None or not is_summand else score.summand()._replace(tensors=()),
        line=None if score is None or is_summand else score.line(),
        is_traced=call.is_traced,
    )


class _Form(NamedTuple):
    """The whole mask, and what is added to scores."""

    mask: WholeMask  # with the bias
    bias: Added | None  # what a score change adds
    summand: Summand | None  # in place of the bias

    @property
    def visible(self) -> Tensor:
        return self.mask.visible

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.read_by_backward())

    def read_by_backward(self) -> list[Tensor]:
        return [*self.mask[:3], *(t for t in self.bias or () if t is not None)]


@dataclass(frozen=True)
class GpuKernel(ShortKernel):
    """Short sequences on a GPU."""

    line: Line | None  # that the bias is, whatever tensors hold
    summand: Summand | None  # what makes the numbers at each call, without its tensors
    launches: dict[Any, Any] = field(default_factory=dict, compare=False)  # by layouts of q, k and v
    is_traced: bool = False  # torch.compile traces the call, whose score learns
    key = "short"

    def forms(self, plans: Plans) -> tuple[_Form]:
        summand = None if self.summand is None else plans.score.summand(self.summand)
        bias = None if plans.score is None or summand is not None else plans.score.added
        numbers, weight = (None, None) if bias is None else bias
        numbers = None if self.line else numbers
        visible, key_spans, query_spans = plans.mask.spanned
        mask = WholeMask(visible, key_spans, query_spans, weight, numbers, self.line, cast(float, self.scale))
        return (_Form(mask, bias, summand),)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, /, *forms: _Form
    ) -> tuple[Tensor, Tensor | None]:
        if self.is_traced:
            mask, _, summand = forms[0]
            added = cast(Summand, summand).numbers(mask.visible)
            q, k, v = with_rows_together(q, k, v)
            out, lse = torch.ops.flexmasks.short(q, k, v, *mask[:3], added, self.scale)
            return out, lse if self.with_lse else None
        if not is_plain(q, k, v):
            raise Unavailable("its kernels take plain tensors, outside of modes and transforms of torch")
        return super().__call__(q, k, v, sinks, *forms)

    def forward(self, mask: _Form, q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = with_rows_together(q, k, v)
        whole = _whole(mask, q, added)
        out, lse = self._launched(q, k, v, whole).forward(q, k, v, whole)
        return out, lse

    def backward(
        self, mask: _Form, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor,
        d_lse: Tensor | None, *added: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        q, k, v, d_out = with_rows_together(q, k, v, d_out)
        d_lse = None if d_lse is None else d_lse.contiguous()
        whole = _whole(mask, q, added)
        learns = any(x.requires_grad for x in added)
        launched = self._launched(q, k, v, whole)
        return cast(tuple[Tensor, ...], launched.backward(d_out, d_lse, q, k, v, out, lse, whole, learns))

    def _launched(self, q: Tensor, k: Tensor, v: Tensor, mask: WholeMask) -> Any:
        layout: Any = q.stride(), k.stride(), v.stride(), q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16
        if self.summand is not None and mask.bias is not None:
            layout = *layout, mask.bias.shape, mask.bias.stride(), mask.bias.dtype, mask.bias.data_ptr() % 16
        launched = self.launches.get(layout)
        if launched is None:
            from flexmasks.kernels.whole_mask_launch import kernels_of  # Triton is not installed on every system

            launched = self.launches[layout] = kernels_of(q, k, v, mask)
        return launched


def _whole(mask: _Form, q: Tensor, added: Sequence[Tensor]) -> WholeMask:
    """Return the mask with numbers that are made at each call in place of the bias."""
    return with_bias(mask.mask, added[0], q.shape[0]) if added else mask.mask
