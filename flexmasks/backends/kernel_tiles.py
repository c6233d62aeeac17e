"""Tiles of torch's Triton kernels, where torch's own are slower or do not fit.

The faster ones were measured on an H100 and an H200 with torch 2.11: forward and backward passes of documents, whose
blocks are partial, and of causal attention, whose blocks are nearly all full, each also with ALiBi.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import HALF_DTYPES, Operand
from flexmasks.kernels.direct import shared_memory
from flexmasks.plans.sizes import capability

_MEASURED_ON = (9, 0)  # the compute capability


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

# Tiles that fit into 100 KB of shared memory, the least that GPUs with compute capability 8.0 and above have (8.6, 8.9
# and 12.x; torch's own tiles for them do not fit), also if a score change reads a number for each pair and learns it.
# Compiled for 8.6 by Triton 3.6, such kernels take up to 82 KB; no such GPU has run them.
_SMALL_HALF: _Sizes = {
    (1, 64): _forward(128, 64, 4, 2) | _backward(64, 64, 4, 2),
    (65, 128): _forward(64, 64, 4, 2) | _backward(64, 64, 4, 1),
    (129, 256): _forward(64, 32, 4, 2) | _backward(32, 32, 4, 2),
}
_SMALL_FLOAT32: _Sizes = {
    (1, 64): _forward(64, 32, 4, 2) | _backward(32, 32, 4, 1),
    (65, 128): _forward(64, 32, 4, 2) | _backward(32, 32, 4, 1),
    (129, 256): _forward(32, 16, 4, 2) | _backward(16, 16, 4, 1),
}
# Bytes of shared memory that a program may take, and the head sizes from which torch's own tiles may not fit into as
# many: in half precision and in float32. torch has tiles for a few head sizes, and one choice for all others.
_SMALL_FROM = ((101_376, 1, 1), (166_912, 129, 65), (232_448, 257, 129))


def chosen_tiles(q: Tensor | Operand, v: Tensor | Operand, block_size: tuple[int, int]) -> dict[str, int]:
    """Return the kernel options of a call's tiles, or none for torch's own."""
    size = max(q.shape[3], v.shape[3])
    if capability(q.device) == _MEASURED_ON:  # torch 2.11 cannot trace `!=` with a constant of a graph
        sizes = _table(q.dtype) if q.shape[3] == v.shape[3] else {}
    else:
        sizes = _fitting(q.dtype, size, shared_memory(q.device))
    for (least, most), tiles in sizes.items():
        if least <= size <= most and _divide(tiles, block_size):
            return tiles
    return {}


def _divide(tiles: dict[str, int], block_size: tuple[int, int]) -> bool:
    """Return whether blocks consist of whole tiles, as torch's kernels demand."""
    queries = [tiles.get(name, 1) for name in ("fwd_BLOCK_M", "bwd_BLOCK_M1", "bwd_BLOCK_M2")]
    keys = [tiles.get(name, 1) for name in ("fwd_BLOCK_N", "bwd_BLOCK_N1", "bwd_BLOCK_N2")]
    return all(block_size[0] % n == 0 for n in queries) and all(block_size[1] % n == 0 for n in keys)


def _fitting(dtype: torch.dtype, size: int, memory: int) -> _Sizes:
    """Return tiles that fit into shared memory, if torch's own may not."""
    is_half = dtype in HALF_DTYPES
    for most, half_from, float32_from in _SMALL_FROM:
        if memory <= most:
            is_needed = size >= (half_from if is_half else float32_from)
            return (_SMALL_HALF if is_half else _SMALL_FLOAT32) if is_needed else {}
    return {}


def _table(dtype: torch.dtype) -> _Sizes:
    if dtype in HALF_DTYPES:
        return _HALF
    if dtype is not torch.float32:
        return {}
    return _FLOAT32 if float32_is_exact() else _TF32


@compat.constant_in_graphs
def float32_is_exact() -> bool:
    """Return whether torch multiplies float32 matrices on a GPU without rounding them to TF32.

    Kernels of flex_attention are compiled by the same rule.
    """
    precision = torch.backends.cuda.matmul.fp32_precision
    if precision == "none":
        return torch.get_float32_matmul_precision() == "highest"
    return precision in ("ieee", "bfx9")  # torch's kernels do not know how to round to the latter
