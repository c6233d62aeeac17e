"""Attention of the queries whose keys would end behind the last key, written over what another kernel computed.

A kernel that counts the keys of each sequence from its last query computes these queries wrong, because it takes keys
for theirs that do not exist. Only the device knows whether there are such queries; where there are none, nothing is
computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flexmasks.kernels.behind_keys_kernel import behind_keys_kernel
from flexmasks.kernels.direct import on
from flexmasks.kernels.launches import Launches, compiled, dot_type, grain_of, layouts_of, strides_of, width_of

_ROWS = 64  # queries of a program
_MOST = 2**31 - 1  # the largest number of the kernel
_launches: Launches[Callable[..., Any]] = Launches()


def attend_behind_keys(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    window: tuple[int | None, int],
    scale: float,
    cap: float | None,
) -> None:
    """Write output and lse of the queries with no key at their position + right.

    out, lse: [B, H, Q, Dv] and float32 [B, H, Q]; other queries keep theirs.
    q, k, v: [B, H, Q, D], [B, Hkv, KV, D] and [B, Hkv, KV, Dv]; the last stride is 1.
    q_starts: the position of the first query of each batch element, ints [B].
    window: how far back a query sees, None for all keys; and how far ahead it sees, negative for keys before it only.
    cap: the cap of a soft-cap, or None.
    """
    left, right = window
    tensors = out, lse, q, k, v, q_starts
    key = (left is None, cap is None, out.device.index, *layouts_of(*tensors))
    with on(out.device):
        launch = _launches.get(key)
        if launch is None:
            launch = _launch_for(tensors, left is not None, cap is not None)
            _launches.keep(key, launch)
        limits = min(_MOST, left or 0), max(-_MOST, min(_MOST, right))
        launch(tensors, (scale, 1.0 if cap is None else cap), limits)


def _launch_for(tensors: tuple[Tensor, ...], has_left: bool, has_cap: bool) -> Callable[..., Any]:
    out, lse, q, k, v, q_starts = tensors
    (batch, heads, queries, k_size), (key_heads, keys), v_size = q.shape, k.shape[1:3], v.shape[3]
    widths = width_of(k_size), width_of(v_size)
    blocks = -(-queries // _ROWS)
    row_strides = [stride for x in (q, k, v, out) for stride in strides_of(x, 3)]
    grain = grain_of(row_strides)
    sizes = queries, keys, heads, blocks
    strides = *strides_of(q_starts, 1), *(stride // grain for stride in row_strides), *strides_of(lse, 3)
    constants = (
        *(heads // key_heads, _ROWS, 32 if max(widths) > 128 else 64, k_size, v_size, *widths),
        *(grain, dot_type(q.dtype, behind_keys_kernel), has_left, has_cap),
    )
    example = 1.0, 1.0, *sizes, 0, 0, *strides, *constants
    run = compiled(behind_keys_kernel, batch * heads * blocks, 8 if max(widths) > 128 else 4, tensors, example)

    def launch(tensors: tuple[Tensor, ...], numbers: tuple[float, float], window: tuple[int, int]) -> None:
        run(tensors, (*numbers, *sizes, *window, *strides, *constants))

    return launch
