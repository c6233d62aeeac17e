"""How long backends take for a call on a GPU, by tables that were fitted to measurements on one H200.

A call takes as long as the host or the GPU, whichever takes longer. `python recipes/benchmark.py choice` measures both.
On other GPUs the part of the GPU's time that reads q, k and v is scaled by the speed of the memory, and the part that
multiplies matrices by the speed of the matrix units, where these are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from flexmasks.backends import forms
from flexmasks.backends.call import Call
from flexmasks.backends.measured_times import DEVICE, HOST
from flexmasks.compat import size_hint
from flexmasks.plans.mask_plan import Computed

MEASURED = tuple(dict.fromkeys(name for name, *_ in HOST))  # names of backends
COMPILED = "flex", "flex_flash"  # their times depend on what the mask's function reads in a partial block:
READS = PLAIN, READS_TENSORS, READS_DATA = "", "tensors", "data"
_TILE = 128


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


def fastest(call: Call, names: list[str]) -> list[str]:
    """The backends by their times for a call."""
    batch, heads, length, head_size = map(size_hint, call.q.shape)
    columns = size_hint(call.k.shape[2]) / _TILE
    case = Case(head_size, call.needs_grad, bool(call.mask.tensors), batch * heads * -(-length // _TILE), columns)

    def computed() -> tuple[Computed, str]:
        found = call.mask.computed(batch * heads, may_look="fa4" not in names)
        if not call.is_traced and forms.why_bits(call):
            return found, READS_DATA
        return found, READS_TENSORS if found.reads_tensors else PLAIN

    return by_times(names, case, computed, _gpu(call.q.device))


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
    by_host = sorted(names, key=hosts.__getitem__)
    everything = Computed(0, case.columns)
    if len(names) < 2 or _device(by_host[0], case, everything, READS_TENSORS, gpu) <= hosts[by_host[1]]:
        return by_host
    found, reads = computed()
    return sorted(names, key=lambda name: max(hosts[name], _device(name, case, found, reads, gpu)))


def features(rows: int, computed: Computed, reads: str, gpu: Gpu = _GPUS[0]) -> list[float]:
    """What numbers of DEVICE are multiplied by: 1, rows, full blocks, partial blocks, and those that read, by kind."""
    rows = max(rows, gpu.processors)  # few rows leave processors idle
    reading, computing = rows * _GPUS[0].memory / gpu.memory, rows * _GPUS[0].matrices / gpu.matrices
    full, partial = computing * computed.full, computing * computed.partial
    return [1, reading, full, partial, partial * (reads == READS_TENSORS), partial * (reads == READS_DATA)]


def _device(name: str, case: Case, computed: Computed, reads: str, gpu: Gpu) -> float:
    """Microseconds of the GPU."""
    sizes = [size for known, size, needs_grad in DEVICE if (known, needs_grad) == (name, case.needs_grad)]
    size = min((n for n in sizes if n >= case.head_size), default=max(sizes))
    found = features(case.rows, computed, reads if name in COMPILED else PLAIN, gpu)
    return sum(x * n for x, n in zip(DEVICE[name, size, case.needs_grad], found, strict=False))


def _gpu(device: torch.device) -> Gpu:
    if not torch.cuda.is_available():  # tensors without data, on a machine without a GPU
        return _GPUS[0]
    name = torch.cuda.get_device_name(device)
    return next((gpu for gpu in _GPUS if gpu.name in name), _GPUS[0])
