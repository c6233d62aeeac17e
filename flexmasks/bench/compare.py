"""`python -m flexmasks bench`: a user's own call, timed against flex_attention and SDPA on their machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from flexmasks import Mask, Score, attention, block_mask, dense_mask, explain
from flexmasks.bench.clock import device_name, interleaved, progress, synchronize

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
RUNS = 7
PASSES = "forward, ms", "forward + backward, ms"


def compare(mask: Mask, score: Score | None, q: Tensor, k: Tensor, v: Tensor) -> str:
    """A table of the times of a call by flexmasks, by flex_attention and by SDPA: of forward passes, and on a GPU with
    their backward passes. What torch needs of a mask is made before. What it cannot run, or has no memory for, is named
    below the table.
    """
    backends = [explain(*_inputs(q, k, v, learns), mask=mask, score=score).backend for learns in _passes(q)]
    ours = f"flexmasks, backend {backends[0]!r}"
    ways: dict[str, Callable[[], Attend]] = {
        ours: lambda: functools.partial(attention, mask=mask, score=score),
        "flex_attention, compiled": lambda: _flex(mask, score, q, k),
        "SDPA, mask as a tensor": lambda: _sdpa(mask, score, q, k),
    }
    calls: dict[str, Attend] = {}
    first_seconds: dict[str, float] = {}
    notes = [] if backends[0] == backends[-1] else [f"flexmasks with gradients: backend {backends[-1]!r}"]
    for name, make in ways.items():
        progress(f"{name}: first call")
        try:
            call = make()
            start = time.perf_counter()
            _pass(call, q, k, v, learns=_passes(q)[-1])
            synchronize(q.device)
            calls[name], first_seconds[name] = call, time.perf_counter() - start
        except Exception as error:  # a compiler may raise anything
            if name == ours:
                raise
            notes.append(f"{name}, is left out: {str(error).splitlines()[0][:200]}")
    progress("timing")
    times = pass_times(calls, q, k, v)
    progress("")
    rows = [[name, seconds, *times[name]] for name, seconds in first_seconds.items()]
    headers = ["", "first call, s", *PASSES[: len(times[ours])]]
    about = f"{device_name(q.device)}, torch {torch.__version__}, {str(q.dtype).removeprefix('torch.')}"
    return "\n".join([about, tabulate(rows, headers=headers, floatfmt=".3g"), *notes])


def _passes(q: Tensor) -> tuple[bool, ...]:
    """Which passes are timed: forward alone, and with the backward pass on a GPU."""
    return (False,) if q.device.type == "cpu" else (False, True)


def pass_times(calls: dict[str, Attend], q: Tensor, k: Tensor, v: Tensor) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for learns in _passes(q):
        passes = {name: functools.partial(_pass, call, q, k, v, learns=learns) for name, call in calls.items()}
        for name, (milliseconds, _) in interleaved(passes, q.device, RUNS).items():
            times[name].append(milliseconds)
    return times


def _inputs(q: Tensor, k: Tensor, v: Tensor, learns: bool) -> list[Tensor]:
    return [x.detach().requires_grad_(learns) for x in (q, k, v)]


def _pass(call: Attend, q: Tensor, k: Tensor, v: Tensor, *, learns: bool) -> None:
    inputs = _inputs(q, k, v, learns)
    out = call(*inputs)
    if learns:
        torch.autograd.grad(out, inputs, torch.ones_like(out))


def _flex(mask: Mask, score: Score | None, q: Tensor, k: Tensor) -> Attend:
    # Not `create_block_mask`, which torch 2.11 compiles for functions only.
    blocks = block_mask(mask, q.shape[2], k.shape[2], batch=len(q), heads=q.shape[1], device=q.device)
    return functools.partial(
        torch.compile(flex_attention), score_mod=score, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1]
    )


def _sdpa(mask: Mask, score: Score | None, q: Tensor, k: Tensor) -> Attend:
    if score is not None:
        raise ValueError("it takes no score modification.")
    visible = dense_mask(mask, q.shape[2], k.shape[2], batch=len(q), heads=q.shape[1], device=q.device)
    return functools.partial(F.scaled_dot_product_attention, attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1])
