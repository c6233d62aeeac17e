"""How long backends take for a call on a GPU, by tables that were fitted to measurements on one H200.

A call takes as long as the host or the GPU, whichever takes longer. `python recipes/benchmark.py choice` measures both.
On other GPUs the part of the GPU's time that reads q, k and v is scaled by the speed of the memory, and the part that
multiplies matrices by the speed of the matrix units, where these are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from flexmasks.backends import forms
from flexmasks.backends.call import Call
from flexmasks.backends.measured_times import DEVICE, HOST
from flexmasks.compat import size_hint
from flexmasks.plans.mask_plan import Computed

MEASURED = tuple(dict.fromkeys(name for name, *_ in HOST))  # names of backends
# Besides the blocks, times depend on the sequences that a kernel is told of, on the whole mask that is made of new
# tensors, or on what the mask's function reads in a partial block.
IN_SEQUENCES, WHOLE, COMPILED = ("fa4",), ("short",), ("flex", "flex_flash")
READS = PLAIN, READS_TENSORS, READS_DATA = "", "tensors", "data"
_TILE = 128
_NEAR = 1.1  # times that differ by less are equal, as far as the tables know


class Gpu(NamedTuple):
    """A GPU, by a part of its name."""

    name: str
    processors: int
    memory: float  # terabytes a second
    matrices: float  # 16-bit teraflops without sparsity


_GPUS = (
    Gpu("H200", 132, 4.8, 989), Gpu("H100", 132, 3.35, 989), Gpu("B200", 148, 8.0, 2250), Gpu("A100", 108, 2.04, 312),
    Gpu("L40S", 142, 0.864, 362), Gpu("RTX 4090", 128, 1.008, 165),
)  # fmt: skip


class Case(NamedTuple):
    """What of a call its times depend on, besides the blocks that are computed."""

    head_size: int
    needs_grad: bool
    has_tensors: bool  # the mask
    rows: int  # of 128 queries of a head
    columns: float  # of 128 keys
    whole: float  # blocks of 128 x 128 of the whole mask, which heads share, if it has tensors


def fastest(call: Call, names: list[str]) -> list[str]:
    """The backends by their times for a call."""
    case = case_of(call)

    def computed() -> tuple[Computed, str]:
        found = call.mask.computed(math.prod(map(size_hint, call.q.shape[:2])), may_look="fa4" not in names)
        if not call.is_traced and forms.why_bits(call):
            return found, READS_DATA
        return found, READS_TENSORS if found.reads_tensors else PLAIN

    return by_times(names, case, computed, _gpu(call.q.device))


def case_of(call: Call) -> Case:
    batch, heads, length, head_size = map(size_hint, call.q.shape)
    tiles, columns, tensors = -(-length // _TILE), size_hint(call.k.shape[2]) / _TILE, call.mask.tensors
    is_of_batch = any(t.ndim > 0 and size_hint(t.shape[0]) == batch for t in tensors)
    whole = bool(tensors) * (batch if is_of_batch else 1) * tiles * columns
    return Case(head_size, call.needs_grad, bool(tensors), batch * heads * tiles, columns, whole)


def by_times(
    names: list[str], case: Case, computed: Callable[[], tuple[Computed, str]], gpu: Gpu = _GPUS[0]
) -> list[str]:
    """The backends by their times.

    computed: finds the blocks that are computed, and what the mask's function reads. It is not called if the backend
        that takes the host least is the fastest even where it computes all pairs.
    """
    hosts = {
        name: HOST.get((name, case.needs_grad, case.has_tensors), HOST[name, case.needs_grad, False]) for name in names
    }

    def by(found: Computed, reads: str, weight: float) -> list[str]:
        devices = {name: _device(name, case, found, reads, gpu) for name in names}
        wholes = {name: max(hosts[name], weight * devices[name]) for name in names}
        near = _NEAR * min(wholes.values(), default=0)
        return sorted(
            names, key=lambda name: (0, hosts[name]) if wholes[name] <= near else (wholes[name], devices[name])
        )

    everything = Computed(0, case.columns), READS_TENSORS
    by_host = by(*everything, weight=0)
    if len(names) < 2 or _device(by_host[0], case, *everything, gpu) <= hosts[by_host[1]]:
        return by_host
    return by(*computed(), weight=1)


def features(name: str, case: Case, computed: Computed, reads: str, gpu: Gpu = _GPUS[0]) -> list[float]:
    """What numbers of DEVICE are multiplied by: 1, rows, full blocks and partial blocks, and then, by the backend,
    partial blocks that read, by kind, sequences, or blocks of the whole mask.
    """
    rows = max(case.rows, gpu.processors)  # few rows leave processors idle
    memory, matrices = _GPUS[0].memory / gpu.memory, _GPUS[0].matrices / gpu.matrices
    full, partial = rows * matrices * computed.full, rows * matrices * computed.partial
    more = []
    if name in COMPILED:
        more = [partial * (reads == READS_TENSORS), partial * (reads == READS_DATA)]
    elif name in IN_SEQUENCES:
        more = [rows * matrices * computed.sequences]
    elif name in WHOLE:
        more = [case.whole * memory]
    return [1, rows * memory, full, partial, *more]


def _device(name: str, case: Case, computed: Computed, reads: str, gpu: Gpu) -> float:
    """Microseconds of the GPU."""
    sizes = [size for known, size, needs_grad in DEVICE if (known, needs_grad) == (name, case.needs_grad)]
    size = min((n for n in sizes if n >= case.head_size), default=max(sizes))
    found = features(name, case, computed, reads, gpu)
    return sum(x * n for x, n in zip(DEVICE[name, size, case.needs_grad], found, strict=True))


def _gpu(device: torch.device) -> Gpu:
    if not torch.cuda.is_available():  # tensors without data, on a machine without a GPU
        return _GPUS[0]
    name = torch.cuda.get_device_name(device)
    return next((gpu for gpu in _GPUS if gpu.name in name), _GPUS[0])
