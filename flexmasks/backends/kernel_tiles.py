"""Tiles of torch's Triton kernels, where others than torch's own are faster.

They were measured on an H100 and an H200 with torch 2.11: forward and backward passes of documents, whose blocks are
partial, and of causal attention, whose blocks are nearly all full, each also with ALiBi.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import HALF_DTYPES
from flexmasks.plans.plan import capability

_MEASURED_ON = (9, 0)  # the compute capability
_DIVIDE = 128  # block sizes that all tiles fit in are multiples of this


def _forward(m: int, n: int, warps: int, stages: int) -> dict[str, int]:
    return {"fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_warps": warps, "fwd_num_stages": stages}


def _backward(m: int, n: int, warps: int, stages: int) -> dict[str, int]:
    """Return options of a backward pass, whose kernels have tiles of both sizes."""
    return {
        "bwd_BLOCK_M1": m, "bwd_BLOCK_N1": n, "bwd_BLOCK_M2": n, "bwd_BLOCK_N2": m,
        "bwd_num_warps": warps, "bwd_num_stages": stages,
    }  # fmt: skip


# By smallest and largest head size. Comments give the time in shares of that of torch's own tiles: of documents, then
# of causal attention; forward / backward.
_Sizes = dict[tuple[int, int], dict[str, int]]
_HALF: _Sizes = {
    (64, 64): _forward(128, 64, 4, 3) | _backward(64, 64, 4, 3),  # 0.81 / 0.91, 1.10 / 0.95
    (128, 128): _forward(64, 64, 4, 3),  # 0.93, 0.98
    (129, 256): _forward(128, 64, 8, 2) | _backward(64, 64, 8, 2),  # 0.82 to 0.96 / 0.72, 0.68 to 0.96 / 0.74
}
_FLOAT32: _Sizes = {
    (32, 64): _forward(64, 64, 4, 2) | _backward(32, 32, 4, 2),  # 0.51 to 0.94 / 0.58, 0.72 to 0.99 / 0.56
    (65, 128): _forward(32, 64, 8, 2) | _backward(32, 32, 4, 2),  # 0.42 / 0.60, 0.43 / 0.54 at 128
    (129, 256): _forward(32, 32, 8, 2) | _backward(32, 32, 8, 1),  # 0.61 / 0.92, 0.58 / 0.90 at 256
}
_TF32: _Sizes = {
    (64, 64): _forward(128, 32, 4, 1) | _backward(64, 64, 4, 1),  # 0.99 / 0.38, 0.90 / 0.30
    (65, 128): _forward(32, 64, 4, 2) | _backward(32, 32, 4, 2),  # 0.80 / 0.51, 0.86 / 0.49 at 128
    (129, 256): _forward(32, 32, 4, 2) | _backward(32, 32, 8, 1),  # 0.83 / 0.93, 0.83 / 0.89 at 256
}


def faster_tiles(q: Tensor, v: Tensor, block_size: tuple[int, int]) -> dict[str, int]:
    """Return the kernel options of faster tiles for a call, if there are any."""
    size = q.shape[3]
    if size != v.shape[3] or any(n % _DIVIDE for n in block_size):
        return {}
    if capability(q.device) == _MEASURED_ON:  # torch 2.11 cannot trace `!=` with a constant of a graph
        for (least, most), tiles in _table(q.dtype).items():
            if least <= size <= most:
                return tiles
    return {}


def _table(dtype: torch.dtype) -> _Sizes:
    if dtype in HALF_DTYPES:
        return _HALF
    if dtype is not torch.float32:
        return {}
    return _FLOAT32 if compat.float32_is_exact() else _TF32
