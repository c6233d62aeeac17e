"""Forward and backward passes, and whole steps, of implementations, timed by turns."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks import private_torch
from benchmarks.memory import peak_bytes
from flexmasks.bench.clock import (
    WARMUP_RUNS,
    Clock,
    device_milliseconds,
    interleaved,
    progress,
    synchronize,
    wall_milliseconds,
)

_STEPS_BEFORE_TIMING = 4  # plans of new tensors are exact at first, then recorded, then captured
_COUNTED_STEPS = 3  # steps in which synchronizations are counted

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

    def entries(self) -> dict[str, float]:
        """Return the times as entries of a row."""
        entries = {"first_s": round(self.first_seconds, 2)}
        for which, (ms, iqr) in self.milliseconds.items():
            entries |= {f"{which}_ms": float(f"{ms:.5g}"), f"{which}_iqr": float(f"{iqr:.3g}")}
        return entries


def measure_passes(
    implementations: Mapping[str, Callable[..., Tensor]],
    inputs: Sequence[Tensor],
    *,
    runs: int,
    required: Collection[str],
    backward: bool = True,
    reset_compiler: bool = False,
    allow_unused: bool = False,
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
        allow_unused: an implementation may leave inputs unused.
        clock: how a run is timed.

    Returns:
        The figures by name, and by name why an implementation was left out.
    """
    device, upstream = inputs[0].device, torch.randn_like(inputs[0])
    leaves = [x.detach().requires_grad_() for x in inputs] if backward else inputs
    measured: dict[str, Measured] = {}
    left_out: dict[str, str] = {}
    with private_torch.donated_buffers_off():
        for name, call in implementations.items():
            if reset_compiler:
                torch.compiler.reset()
            try:
                measured[name] = _first_run(call, leaves, upstream if backward else None, allow_unused)
            except Exception as error:
                if name in required:
                    raise
                left_out[name] = reason_of(name, error)
        passes: dict[str, dict[str, Callable[[], object]]] = {
            "forward": {name: functools.partial(implementations[name], *inputs) for name in measured}
        }
        if backward:
            gradient = functools.partial(
                torch.autograd.grad,
                inputs=leaves,
                grad_outputs=upstream,
                retain_graph=True,
                allow_unused=allow_unused,
            )
            passes["backward"] = {name: functools.partial(gradient, m.output) for name, m in measured.items()}
        for which, calls in passes.items():
            for name, figures in interleaved(calls, device, runs, clock).items():
                measured[name].milliseconds[which] = figures
    return measured, left_out


class _Watched:
    """A step, and what happened in it besides its work."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        self.step = step
        self.compilations, self.longest = 0, 0.0

    def __call__(self) -> Tensor:
        compiled, start = _compilations(), time.perf_counter()
        output = self.step()
        self.longest = max(self.longest, time.perf_counter() - start)
        self.compilations += _compilations() - compiled
        return output


@dataclass(frozen=True)
class MeasuredSteps:
    """Figures of one implementation's steps."""

    output: Tensor  # of the last step; the same number for all implementations
    first_seconds: float  # time of the first step, with compilation
    milliseconds: tuple[float, float]  # wall time of a step among many, median and interquartile range
    alone_milliseconds: tuple[float, float]  # wall time of a step that the GPU starts and ends idle
    steps: int  # steps that `milliseconds` is measured on
    compilations: int  # graphs that Dynamo or Inductor compiled after the first step
    longest_milliseconds: float  # the longest time that the host took for a step after the first
    synchronizations: float | None  # how often the host waits for the GPU in a step; None on a CPU


def measure_steps(
    implementations: Mapping[str, Callable[[], Tensor]],
    device: torch.device,
    *,
    required: Collection[str],
    turns: int,
    most_in_a_row: int,
    least_in_a_row: int,
    seconds: float,
) -> tuple[dict[str, MeasuredSteps], dict[str, str]]:
    """Run each implementation's first step, then time many steps by turns.

    All implementations run the same number of steps.

    Args:
        implementations: functions that run the next step, by name.
        device: where the steps run.
        required: names whose errors are raised; any other implementation that fails is left out.
        turns: how many times each is timed, at least 2.
        most_in_a_row, least_in_a_row: limits of the steps in one turn.
        seconds: time for the timed steps of all implementations, as far as the limits allow.

    Returns:
        The figures by name, and by name why an implementation was left out.
    """
    firsts: dict[str, float] = {}
    left_out: dict[str, str] = {}
    watched: dict[str, _Watched] = {}
    for name, step in implementations.items():
        progress(f"{name}: first step")
        start = time.perf_counter()
        try:
            step()
            synchronize(device)
            firsts[name] = time.perf_counter() - start
            watched[name] = _Watched(step)
            for _ in range(_STEPS_BEFORE_TIMING):
                watched[name]()
            synchronize(device)
        except Exception as error:
            if name in required:
                raise
            watched.pop(name, None)
            left_out[name] = reason_of(name, error)
    if not watched:
        return {}, left_out
    progress(f"timing {', '.join(watched)}")
    round_seconds = sum(wall_milliseconds(step, device) for step in watched.values()) / 1e3
    rounds = seconds / (round_seconds * (turns + WARMUP_RUNS))
    in_a_row = min(max(int(rounds), least_in_a_row), most_in_a_row)
    clock = functools.partial(wall_milliseconds, calls_in_a_row=in_a_row)
    times = interleaved(watched, device, turns, clock)
    times_alone = interleaved(watched, device, turns, wall_milliseconds)
    outputs = {name: step().clone() for name, step in watched.items()}
    synchronizations = {name: _synchronizations(step, device) for name, step in watched.items()}
    return {
        name: MeasuredSteps(
            output=outputs[name],
            first_seconds=firsts[name],
            milliseconds=times[name],
            alone_milliseconds=times_alone[name],
            steps=in_a_row * turns,
            compilations=step.compilations,
            longest_milliseconds=step.longest * 1e3,
            synchronizations=synchronizations[name],
        )
        for name, step in watched.items()
    }, left_out


def attention_tflops(which: str, pairs: float, head_size: int, milliseconds: float) -> float:
    """Return the TFLOP/s of a "forward" or "backward" pass of attention.

    Each matrix product takes a multiplication and an addition for each visible pair and number of a head.
    """
    return _PRODUCTS[which] * 2 * head_size * pairs / milliseconds / 1e9


def _first_run(
    call: Callable[..., Tensor], leaves: Sequence[Tensor], upstream: Tensor | None, allow_unused: bool
) -> Measured:
    """Run a forward pass, and with an upstream gradient a backward pass."""
    device = leaves[0].device
    start = time.perf_counter()
    output = call(*leaves)
    if upstream is not None:
        torch.autograd.grad(output, leaves, upstream, retain_graph=True, allow_unused=allow_unused)
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = None
    if upstream is not None and device.type == "cuda":

        def both_passes() -> None:
            torch.autograd.grad(call(*leaves), leaves, upstream, allow_unused=allow_unused)

        peak = peak_bytes(both_passes, device)
    return Measured(output, seconds, peak)


def reason_of(name: str, error: Exception) -> str:
    """Return the first line of an error, and show it."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    progress(f"{name} left out: {reason}")
    return reason


def _compilations() -> int:
    return private_torch.compiled_graphs() + private_torch.inductor_graphs()


def _synchronizations(step: Callable[[], object], device: torch.device) -> float | None:
    """Return how often the host waits for the GPU in a step.

    torch warns of each wait. It could raise an error instead, but an error may be caught before it is seen.
    """
    if device.type != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(_COUNTED_STEPS):
                step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)
    return waits / _COUNTED_STEPS
