"""Forward and backward passes of implementations, timed by turns."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.bench.clock import Clock, device_milliseconds, interleaved
from flexmasks.bench.console import progress, synchronize
from flexmasks.bench.memory import peak_bytes

# Matrix products of attention. Forward: q @ k^T and weights @ v. Backward: q @ k^T once more, and the gradients of q,
# k, v and the weights.
_PRODUCTS = {"forward": 2, "backward": 5}


@dataclass(frozen=True)
class Measured:
    """Figures of one implementation."""

    output: Tensor
    first_seconds: float  # time of the first call, with compilation and a backward pass
    peak_bytes: float | None  # added by a forward and a backward pass on a GPU to the bytes in use before
    # By pass, "forward" or "backward": the median and the interquartile range.
    milliseconds: dict[str, tuple[float, float]] = field(default_factory=dict)


def measure_passes(
    implementations: Mapping[str, Callable[..., Tensor]],
    inputs: Sequence[Tensor],
    *,
    runs: int,
    required: Collection[str],
    backward: bool = True,
    reset_compiler: bool = False,
    clock: Clock = device_milliseconds,
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Run each implementation once, then time all passes by turns.

    Args:
        implementations: functions of the inputs, by name; the outputs have the first input's shape.
        inputs: forward passes are timed on these as they are, backward passes on copies that require gradients.
        runs: how many runs of each are timed, at least 2.
        required: names whose errors are raised; any other implementation that fails is left out.
        backward: time backward passes too.
        reset_compiler: drop what torch.compile has compiled before each first run.
        clock: how a run is timed.

    Returns:
        The figures by name, and by name why an implementation was left out.
    """
    device, upstream = inputs[0].device, torch.randn_like(inputs[0])
    leaves = [x.detach().requires_grad_() for x in inputs] if backward else inputs
    measured: dict[str, Measured] = {}
    left_out: dict[str, str] = {}
    with compat.donated_buffers_off():
        for name, call in implementations.items():
            if reset_compiler:
                torch.compiler.reset()
            try:
                measured[name] = _first_run(call, leaves, upstream if backward else None)
            except Exception as error:
                if name in required:
                    raise
                left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                progress(f"{name} left out: {left_out[name]}")
        passes: dict[str, dict[str, Callable[[], object]]] = {
            "forward": {name: functools.partial(implementations[name], *inputs) for name in measured}
        }
        if backward:
            gradient = functools.partial(torch.autograd.grad, inputs=leaves, grad_outputs=upstream, retain_graph=True)
            passes["backward"] = {name: functools.partial(gradient, m.output) for name, m in measured.items()}
        for which, calls in passes.items():
            for name, figures in interleaved(calls, device, runs, clock).items():
                measured[name].milliseconds[which] = figures
    return measured, left_out


def attention_tflops(which: str, pairs: float, head_size: int, milliseconds: float) -> float:
    """Return the TFLOP/s of a "forward" or "backward" pass of attention.

    Each matrix product takes a multiplication and an addition for each visible pair and number of a head.
    """
    return _PRODUCTS[which] * 2 * head_size * pairs / milliseconds / 1e9


def _first_run(call: Callable[..., Tensor], leaves: Sequence[Tensor], upstream: Tensor | None) -> Measured:
    """Run a forward pass, and with an upstream gradient a backward pass."""
    device = leaves[0].device
    start = time.perf_counter()
    output = call(*leaves)
    if upstream is not None:
        torch.autograd.grad(output, leaves, upstream, retain_graph=True)
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = None
    if upstream is not None and device.type == "cuda":
        peak = peak_bytes(lambda: torch.autograd.grad(call(*leaves), leaves, upstream), device)
    return Measured(output, seconds, peak)
