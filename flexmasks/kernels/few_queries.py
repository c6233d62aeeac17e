"""The operator torch.ops.flexmasks.attend_few: attention of few queries to many keys.

attend_few(q, k, v, page_table, partial_counts, partial, full_counts, full, visible, weight, bias, scale, cap) is the
output [B, H, Q, V], in the dtype of q, and the log-sum-exp of the visible scores, float32 [B, H, Q]. A query that sees
nothing has output 0 and lse -inf.

q: [B, H, Q, D].
k, v: [B, KV heads, KV, D] and [B, KV heads, KV, V]; H is a multiple of the number of KV heads. With `page_table` they
    are pools, [pages, page size, KV heads, D] and [..., V].
page_table: int32 or int64 [B, P], the pages of each sequence: key j is in slot j % page size of page j // page size,
    and KV is P times the page size. Entries that no visible key needs may hold anything.
partial_counts, partial: int32 [1 or B, 1 or H] and [1 or B, 1 or H, ...], for each batch element and head the tiles of
    128 keys of which some query sees some keys, and how many they are.
full_counts, full: the same of the tiles of which all queries see all keys. No other tile is read, and no key from KV
    on. No tile is in both lists.
visible: bool [1 or B, 1 or H, Q, KV], the keys that each query sees. It is read in partial tiles only.
weight, bias: None or float32 [1 or B, 1 or H, 1 or Q, 1] and [1 or B, 1 or H, 1 or Q, KV]; weight * bias, or bias if
    there is no weight, is added to the scores. So the biases of ALiBi take no memory for each head.
scale, cap: a score is scale * (q . k), and with a cap then cap * tanh(score / cap), before anything is added.

The last stride of q, k, v and page_table is 1, other strides are free. Keys that no query sees may hold anything, NaN
included; the values of keys that some queries see must be finite for the others too.

Triton kernels run the operator on a GPU in float16, bfloat16 and float32 with head sizes that are multiples of 8 up to
256, and plain torch runs it elsewhere. No value is read on the host: a CUDA graph can capture the operator. It has no
derivatives: a backward pass raises NotImplementedError.

Example, one query that sees the first 200 of 256 keys, thus all keys of tile 0 and some keys of tile 1:

>>> q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 256, 16), torch.randn(1, 2, 256, 16)
>>> count, tile = torch.ones(1, 1, dtype=torch.int32), torch.tensor([[[0]]], dtype=torch.int32)
>>> visible = torch.arange(256).view(1, 1, 1, 256) < 200
>>> out, lse = attend_few(q, k, v, None, count, tile + 1, count, tile, visible, None, None, 0.25, None)
>>> out.shape, lse.shape
(torch.Size([1, 4, 1, 16]), torch.Size([1, 4, 1]))
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexmasks.kernels.few_queries_plain import plain_attend_few

_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_SIZE = 256  # of a head, for the Triton kernels
_library = torch.library.Library("flexmasks", "FRAGMENT")
_library.define(
    "attend_few(Tensor q, Tensor k, Tensor v, Tensor? page_table, Tensor partial_counts, Tensor partial, "
    "Tensor full_counts, Tensor full, Tensor visible, Tensor? weight, Tensor? bias, float scale, float? cap) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
attend_few = torch.ops.flexmasks.attend_few.default


def attend(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None,
    partial_counts: Tensor, partial: Tensor, full_counts: Tensor, full: Tensor, visible: Tensor,
    weight: Tensor | None, bias: Tensor | None, scale: float, cap: float | None, *, with_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run the operator without torch's dispatcher, which takes 20 microseconds.

    Only for plain tensors that need no gradients, where no compiler, mode or transform of torch watches.
    """
    arguments = (
        q, k, v, page_table, partial_counts, partial, full_counts, full, visible, weight, bias, scale, cap,
    )  # fmt: skip
    if q.is_cuda and runs_on_triton(q.dtype, q.shape[-1], v.shape[-1]):
        from flexmasks.kernels import few_queries_launch  # Triton is not installed on every system

        if q.device.index == torch.cuda.current_device():  # Triton launches on the current device
            return few_queries_launch.attend(*arguments, with_lse)
        with torch.cuda.device(q.device):
            return few_queries_launch.attend(*arguments, with_lse)
    out, lse = plain_attend_few(*arguments)
    return out, lse if with_lse else None


def runs_on_triton(dtype: torch.dtype, k_size: int, v_size: int) -> bool:
    """Return whether the Triton kernels take a dtype and head sizes."""
    return dtype in _TRITON_DTYPES and all(0 < n <= _LARGEST_SIZE and n % 8 == 0 for n in (k_size, v_size))


def _fake(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _no_backward(_ctx: Any, *_: Any) -> NoReturn:
    raise NotImplementedError("attend_few has no derivatives; flexmasks.attention takes q, k and v that need gradients")


_library.impl("attend_few", functools.partial(attend, with_lse=True), "CompositeExplicitAutograd")
torch.library.register_fake("flexmasks::attend_few", _fake, lib=_library)
torch.library.register_autograd("flexmasks::attend_few", _no_backward, lib=_library)
