"""Tiles of torch's Triton kernels that fit into shared memory, and are faster than torch's own where those are slow.

Inside a graph of torch.compile no second kernel can be tried, so tiles must fit at first. Triton's pipeline keeps what
a score change or mask reads for each pair of a query and a key, as a bias does, in shared memory, too.

The faster ones were measured on an H100 and an H200 with torch 2.11: forward and backward passes of documents, whose
blocks are partial, and of causal attention, whose blocks are nearly all full, each also with ALiBi.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends.call import HALF_DTYPES, Operand
from flexmasks.devices import nvidia_capability, shared_memory

_MEASURED_ON = (9, 0)  # the compute capability


class Reads(NamedTuple):
    """What kernels read for each pair of a query and a key.

    learns: whether a captured tensor needs a gradient, which is added up pair by pair.
    """

    bytes: int = 0
    learns: bool = False


NO_READS = Reads()
UNKNOWN_READS = Reads(8, True)  # assumed of functions that nobody can look at: a bias that learns, and a table
_OTHERS = 2  # KB that may hold more of what is read for each query or key than the kernels that were compiled


class _Tiles(NamedTuple):
    """Tiles of one pass.

    stages: of Triton's pipeline; all but one hold what is read for the pairs of a tile.
    memory: KB of shared memory of a kernel with documents, a soft-cap and slopes that learn, by Triton 3.6 and 3.7.
    """

    options: dict[str, int]
    pairs: int
    stages: int
    memory: int
    has_gradients: bool

    def memory_for(self, reads: Reads) -> int:
        """Bytes of shared memory."""
        if not reads.bytes:
            return 1024 * self.memory
        held = reads.bytes * (self.stages - 1) + 4 * (self.has_gradients and reads.learns)
        return 1024 * (self.memory + _OTHERS) + self.pairs * held


def _forward(m: int, n: int, warps: int, stages: int, memory: int) -> _Tiles:
    options = {"fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_warps": warps, "fwd_num_stages": stages}
    return _Tiles(options, m * n, stages, memory, has_gradients=False)


def _backward(m: int, n: int, warps: int, stages: int, memory: int) -> _Tiles:
    """Return tiles of a backward pass, whose kernels have tiles of both sizes."""
    options = {
        "bwd_BLOCK_M1": m, "bwd_BLOCK_N1": n, "bwd_BLOCK_M2": n, "bwd_BLOCK_N2": m,
        "bwd_num_warps": warps, "bwd_num_stages": stages,
    }  # fmt: skip
    return _Tiles(options, m * n, stages, memory, has_gradients=True)


# By smallest and largest head size: tiles of forward and of backward passes, of which the first that fit are taken.
# Comments give the time in shares of that of torch's own tiles: of documents, then of causal attention; forward /
# backward. The first ones without such a comment are torch's own.
_Sizes = dict[tuple[int, int], tuple[tuple[_Tiles, ...], tuple[_Tiles, ...]]]
_HALF: _Sizes = {
    (1, 63): ((_forward(64, 64, 4, 3, 57),), (_backward(64, 64, 4, 3, 83),)),
    (64, 64): (  # 0.81 / 0.91, 1.10 / 0.95
        (_forward(128, 64, 4, 3, 65), _forward(64, 64, 4, 3, 57)),
        (_backward(64, 64, 4, 3, 83),),
    ),
    (65, 128): (  # at 128, forward alone: 0.93, 0.98
        (_forward(64, 64, 4, 3, 113),),
        (_backward(64, 128, 8, 3, 196), _backward(64, 64, 4, 3, 147), _backward(64, 64, 4, 2, 114)),
    ),
    (129, 256): (  # 0.82 to 0.96 / 0.72, 0.68 to 0.96 / 0.74
        (_forward(128, 64, 8, 2, 193), _forward(64, 64, 4, 2, 161)),
        (_backward(64, 64, 8, 2, 210), _backward(32, 64, 8, 2, 137)),
    ),
    (257, 512): (  # torch's own do not fit forward; causal: 0.23 of those that flex_attention runs then / 0.71
        (_forward(32, 64, 4, 2, 165), _forward(32, 32, 4, 2, 99)),
        (_backward(32, 32, 8, 2, 137),),
    ),
}
_FLOAT32: _Sizes = {
    (1, 31): ((_forward(64, 64, 4, 3, 37),), (_backward(16, 16, 4, 1, 5),)),
    (32, 64): (
        (_forward(64, 64, 4, 2, 65),),
        (_backward(32, 32, 4, 2, 41),),
    ),  # 0.51 to 0.94 / 0.58, 0.72 to 0.99 / 0.56
    (65, 128): ((_forward(32, 64, 8, 2, 89),), (_backward(32, 32, 4, 2, 73),)),  # at 128: 0.42 / 0.60, 0.43 / 0.54
    (129, 256): ((_forward(32, 32, 8, 2, 101),), (_backward(32, 32, 8, 1, 132),)),  # at 256: 0.61 / 0.92, 0.58 / 0.90
    (257, 512): ((_forward(32, 16, 4, 2, 131),), (_backward(16, 16, 4, 1, 129),)),
}
_TF32: _Sizes = {
    (1, 63): ((_forward(64, 64, 4, 3, 113),), (_backward(16, 16, 4, 1, 17),)),
    (64, 64): ((_forward(128, 32, 4, 1, 40),), (_backward(64, 64, 4, 1, 80),)),  # 0.99 / 0.38, 0.90 / 0.30
    (65, 128): ((_forward(32, 64, 4, 2, 90),), (_backward(32, 32, 4, 2, 73),)),  # at 128: 0.80 / 0.51, 0.86 / 0.49
    (129, 256): ((_forward(32, 32, 4, 2, 102),), (_backward(32, 32, 8, 1, 132),)),  # at 256: 0.83 / 0.93, 0.83 / 0.89
    (257, 512): ((_forward(32, 16, 4, 2, 131),), (_backward(16, 16, 4, 1, 129),)),
}

# Tiles that fit into 100 KB of shared memory, the least that GPUs with compute capability 8.0 and above have (8.6, 8.9
# and 12.x; torch's own tiles for them do not fit); none does in float32 for head sizes above 256. Compiled for 8.6; no
# such GPU has run them.
_SMALL_HALF: _Sizes = {
    (1, 64): ((_forward(128, 64, 4, 2, 34),), (_backward(64, 64, 4, 2, 42),)),
    (65, 128): ((_forward(64, 64, 4, 2, 58),), (_backward(64, 64, 4, 1, 57),)),
    (129, 256): ((_forward(64, 32, 4, 2, 70),), (_backward(32, 32, 4, 2, 70),)),
    (257, 512): ((_forward(32, 16, 4, 2, 67),), (_backward(16, 16, 4, 1, 65),)),
}
_SMALL_FLOAT32: _Sizes = {
    (1, 64): ((_forward(64, 32, 4, 2, 42),), (_backward(32, 32, 4, 1, 37),)),
    (65, 128): ((_forward(64, 32, 4, 2, 74),), (_backward(32, 32, 4, 1, 69),)),
    (129, 256): ((_forward(32, 16, 4, 2, 68),), (_backward(16, 16, 4, 1, 66),)),
    (257, 512): ((_forward(16, 16, 4, 1, 65),), (_backward(16, 16, 4, 1, 130),)),
}
# Bytes of shared memory that a program may take, and the head sizes from which torch's own tiles may not fit into as
# many: in half precision and in float32. torch has tiles for a few head sizes, and one choice for all others.
_SMALL_FROM = ((101_376, 1, 1), (166_912, 129, 65), (232_448, 257, 129))


def chosen_tiles(
    q: Tensor | Operand, v: Tensor | Operand, block_size: tuple[int, int], reads: Reads = NO_READS
) -> dict[str, int]:
    """Return the kernel options of a call's tiles, or none for torch's own, as on GPUs that are not NVIDIA's."""
    sizes = compat.constants((q.shape[3], v.shape[3]))
    return dict(_options(q.dtype, q.device, sizes, compat.constants(tuple(block_size)), compat.constants(tuple(reads))))


@compat.constant_in_graphs
def _options(
    dtype: torch.dtype,
    device: torch.device,
    head_sizes: tuple[int, int],
    block_size: tuple[int, int],
    reads: tuple[int, bool],
) -> tuple[tuple[str, int], ...]:
    capability = nvidia_capability(device)
    if capability is None:
        return ()
    size, memory, of_pairs = max(head_sizes), shared_memory(device), Reads(*reads)
    if capability == _MEASURED_ON:
        is_known = head_sizes[0] == head_sizes[1] or any(reads) or size > 256
        sizes = _table(dtype) if is_known else {}
    else:
        sizes = _fitting(dtype, size, memory, of_pairs)
    for (least, most), (forward, backward) in sizes.items():
        if least <= size <= most:
            both = (_first_that_fits(tiles, block_size, of_pairs, memory) for tiles in (forward, backward))
            return tuple(itertools.chain.from_iterable(options.items() for options in both))
    return ()


def _first_that_fits(tiles: Sequence[_Tiles], block_size: tuple[int, int], reads: Reads, memory: int) -> dict[str, int]:
    """Return the first tiles that divide the blocks and fit into memory, or the last that divide them, in one stage."""
    able = [one for one in tiles if _divide(one.options, block_size)]
    for one in able:
        if one.memory_for(reads) <= memory:
            return one.options
    return {name: 1 if name.endswith("num_stages") else n for name, n in able[-1].options.items()} if able else {}


def _divide(tiles: dict[str, int], block_size: tuple[int, int]) -> bool:
    """Return whether blocks consist of whole tiles, as torch's kernels demand."""
    queries = [tiles.get(name, 1) for name in ("fwd_BLOCK_M", "bwd_BLOCK_M1", "bwd_BLOCK_M2")]
    keys = [tiles.get(name, 1) for name in ("fwd_BLOCK_N", "bwd_BLOCK_N1", "bwd_BLOCK_N2")]
    return all(block_size[0] % n == 0 for n in queries) and all(block_size[1] % n == 0 for n in keys)


def _fitting(dtype: torch.dtype, size: int, memory: int, reads: Reads) -> _Sizes:
    """Return tiles that fit into shared memory, if torch's own may not."""
    is_half = dtype in HALF_DTYPES
    for most, half_from, float32_from in _SMALL_FROM:
        if memory <= most:
            is_needed = reads.bytes > 0 or size >= (half_from if is_half else float32_from)
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
