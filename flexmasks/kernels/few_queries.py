"""The operators torch.ops.flexmasks.attend_few and attend_band: attention of few queries to many keys.

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

attend_band(q, k, v, page_table, q_starts, kv_lens, weight, bias, scale, cap, q_start, left, right) is the same for a
mask that is a band: the query at position p sees the keys p - left..p + right. Nothing is computed for it before the
kernel, which reads the positions.

q_starts: None or integers [B], the position of each first query, which may lie before or behind all keys.
q_start: the position for all batch elements if there are no q_starts; None if the queries are the last ones of each
    sequence, the first of them at least at 0.
kv_lens: None or integers [B], the number of keys of each sequence, if it is not KV. Later keys are not read.
left, right: None for all keys on that side, or whole numbers of which the sum is at least 0.

Both operators:

weight, bias: None or float32 [1 or B, 1 or H, 1 or Q, 1] and [1 or B, 1 or H, 1 or Q, KV]; weight * bias, or bias if
    there is no weight, is added to the scores. So the biases of ALiBi take no memory for each head.
scale, cap: a score is scale * (q . k), and with a cap then cap * tanh(score / cap), before anything is added.

The last stride of q, k, v and page_table is 1, other strides are free. Keys that no query sees may hold anything, NaN
included; the values of keys that some queries see must be finite for the others too.

Triton kernels run the operators on a GPU in float16, bfloat16 and float32 with head sizes that are multiples of 8 up to
256; other calls raise ValueError. No value is read on the host: a CUDA graph can capture the operators. They have no
derivatives: a backward pass raises NotImplementedError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexmasks.kernels.direct import TRITON_DTYPES, is_for_triton, on
from flexmasks.kernels.operators import NAMESPACE, define, library

_LARGEST_SIZE = 256  # of a head, for the Triton kernels


def attend_directly(name: str, arguments: tuple[Any, ...], *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Run "attend_few" or "attend_band" without torch's dispatcher, which takes 20 microseconds: only for plain tensors
    that need no gradients, where no compiler, mode or transform of torch watches. Without `with_lse`, the lse is None.
    """
    q, _, v, *_ = arguments
    if not (is_for_triton(q) and runs_on_triton(q.dtype, q.shape[-1], v.shape[-1])):
        raise ValueError(
            f"few queries: kernels run on a GPU, in float16, bfloat16 and float32, with head sizes that are multiples "
            f"of 8 up to {_LARGEST_SIZE}; got {q.dtype} on {q.device}, head sizes {q.shape[-1]} and {v.shape[-1]}"
        )
    from flexmasks.kernels import few_queries_launch  # Triton is not installed on every system

    launch: Callable[..., tuple[Tensor, Tensor | None]] = getattr(few_queries_launch, name)
    with on(q.device):
        return launch(*arguments, with_lse)


def runs_on_triton(dtype: torch.dtype, k_size: int, v_size: int) -> bool:
    return dtype in TRITON_DTYPES and all(0 < n <= _LARGEST_SIZE and n % 8 == 0 for n in (k_size, v_size))


def _fake(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _no_backward(name: str, _ctx: Any, *_: Any) -> NoReturn:
    raise NotImplementedError(f"{name} has no derivatives; flexmasks.attention takes q, k and v that need gradients")


def _run(name: str, *arguments: Any) -> tuple[Tensor, Tensor | None]:
    return attend_directly(name, arguments, with_lse=True)


attend_few = define(
    "attend_few(Tensor q, Tensor k, Tensor v, Tensor? page_table, Tensor partial_counts, Tensor partial, "
    "Tensor full_counts, Tensor full, Tensor visible, Tensor? weight, Tensor? bias, float scale, float? cap) "
    "-> (Tensor, Tensor)",
    functools.partial(_run, "attend_few"),
    _fake,
)
attend_band = define(
    "attend_band(Tensor q, Tensor k, Tensor v, Tensor? page_table, Tensor? q_starts, Tensor? kv_lens, "
    "Tensor? weight, Tensor? bias, float scale, float? cap, int? q_start, int? left, int? right) -> (Tensor, Tensor)",
    functools.partial(_run, "attend_band"),
    _fake,
)
for _name in ("attend_few", "attend_band"):
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", functools.partial(_no_backward, _name), lib=library)
