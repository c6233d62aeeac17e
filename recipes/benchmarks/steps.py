"""`python recipes/benchmark.py steps`: new tensors at every step, against plain torch."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import private_torch
from benchmarks.loops import (
    LOOPS,
    WITH_GRADIENTS,
    Chain,
    Draws,
    Loop,
    Prepare,
    Replayed,
    Shape,
    by_flexmasks,
    by_sdpa,
    by_torch,
    compiled_create,
    compiled_flex,
    documents,
    documents_mod,
    draw_ids,
    draw_offsets,
    in_place,
    indices,
    offsets_mod,
)
from benchmarks.model import WAYS, Attend, Sizes, Training
from benchmarks.results import Benchmark, Row
from benchmarks.runner import MeasuredSteps, measure_steps
from benchmarks.steps_tables import DENSE, OLD, OURS, PLAIN, table
from flexmasks import road
from flexmasks.attention import attention, explain, varlen_attention
from flexmasks.cache import clear_caches
from flexmasks.context import Context
from flexmasks.request import Request
from flexmasks.road import plan_call

# How documents are given to a model, and how it runs.
_TRAINED = [*(("document ids", way) for way in WAYS), ("offsets", "eager"), ("offsets", "compiled")]
_CALLS_BEFORE_PLANS = 4
_CHECKED_STEPS = 5
_SIXTEENTHS = 16, 9, 13, 11, 15, 10, 14, 12  # lengths of batches that follow each other
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # largest relative difference of losses


class Pace(NamedTuple):
    """Limits of the number of timed steps, see `measure_steps`."""

    turns: int
    most_in_a_row: int
    least_in_a_row: int
    seconds: float


USUAL, QUICK = Pace(8, 25, 2, 6.0), Pace(2, 2, 1, 1.0)


class _Planning:
    """Plans of new document ids for one kind of call."""

    def __init__(self, q: Tensor, draws: Draws) -> None:
        self._q, self._draws, self._is_known = q, draws, False

    def __call__(self) -> Tensor:
        q, ids = self._q, self._draws.new()
        if not self._is_known:  # whole calls come first, as in a loop
            for _ in range(_CALLS_BEFORE_PLANS):
                attention(q, q, q, mask=documents(self._draws.new()))
            self._is_known = True
        request = Request(mask=documents(ids), params={})  # equal to what `attention` makes
        known = road.known_call(q, q, q, request, Context.now(q.device))
        if road.plan_again(known) is None:  # no earlier plan of its kind can be used
            plan_call(q, q, q, request).call.mask.blocks()
        return ids


# --- rows ---


def _plan_rows(shape: Shape, device: torch.device, dtype: torch.dtype, pace: Pace) -> list[Row]:
    """Return the figures of planning new document ids."""
    batch, _, length, _ = shape
    q = torch.zeros(shape, device=device, dtype=dtype)
    drawn = draw_ids(batch, length, torch.Generator(device).manual_seed(0))
    draws, their_draws = Draws(drawn), Draws(drawn)
    create = compiled_create()
    implementations: dict[str, Callable[[], Tensor]] = {
        OURS: _Planning(q, draws),
        PLAIN: lambda: create(documents_mod(their_draws.new()), batch, length, device).kv_num_blocks,
    }
    rows = measured_rows("plan", "documents", shape, dtype, measure(implementations, device, pace, cold=False))
    rows[0]["backend"] = explain(q, q, q, mask=documents(draws.new())).backend
    return rows


def _loop_rows(loop: Loop, shape: Shape, device: torch.device, dtype: torch.dtype, pace: Pace, cold: bool) -> list[Row]:
    """Return the figures of a loop with new tensors and with old tensors."""
    if loop.is_varlen:
        shape = (1, shape[1], shape[0] * shape[2], shape[3])
    chain = Chain(loop, shape, device, dtype)
    new, old, plain = (Draws(chain.drawn) for _ in range(3))
    theirs = by_torch(loop, shape, device)
    implementations: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: chain.run(by_flexmasks(loop), new.new()),
        OLD: lambda: chain.run(by_flexmasks(loop), old.old()),
        PLAIN: lambda: chain.run(theirs, plain.new()),
    }
    measured = measure(implementations, device, pace, cold)
    rows = measured_rows("loop", loop.name, shape, dtype, measured)
    backend = chain.backend(new.new())
    rows = [row if row["who"] == PLAIN else {**row, "backend": backend} for row in rows]
    if PLAIN in measured.figures:
        rows[0]["difference"] = measured.difference(OURS, PLAIN)
    return rows


def _length_rows(
    loop: Loop, shape: Shape, shorter: int, device: torch.device, dtype: torch.dtype, pace: Pace, cold: bool
) -> list[Row]:
    """Return the figures of steps that run batches of several lengths, one after the other.

    shorter: how many tokens the lengths have less than sixteenths of that of `shape`.
    """
    batch, heads, length, size = shape
    shapes = [(batch, heads, length * n // 16 - shorter, size) for n in _SIXTEENTHS]
    chains = [Chain(loop, of_batch, device, dtype) for of_batch in shapes]

    def step(prepares: Sequence[Prepare], draws: Sequence[Draws]) -> Tensor:
        outputs = [chain.run(prepare, d.new()) for chain, prepare, d in zip(chains, prepares, draws, strict=True)]
        return outputs[-1]

    ours = [by_flexmasks(loop) for _ in chains]
    theirs = [by_torch(loop, of_batch, device, dynamic=None) for of_batch in shapes]
    new, plain = ([Draws(chain.drawn) for chain in chains] for _ in range(2))
    implementations = {OURS: functools.partial(step, ours, new), PLAIN: functools.partial(step, theirs, plain)}
    measured = measure(implementations, device, pace, cold)
    case = f"{loop.name}, {'other lengths' if shorter else f'multiples of {length // 16}'}"
    rows = measured_rows("lengths", case, shape, dtype, measured)
    rows[0]["backend"] = chains[-1].backend(new[-1].new())
    if PLAIN in measured.figures:
        rows[0]["difference"] = measured.difference(OURS, PLAIN)
    return rows


def _graph_rows(loop: Loop, shape: Shape, device: torch.device, dtype: torch.dtype, pace: Pace) -> list[Row]:
    """Return the figures of steps captured in CUDA graphs, whose tensors change in place."""
    chain = Chain(loop, shape, device, dtype)
    theirs = by_torch(loop, shape, device)
    implementations: dict[str, Callable[[], Tensor]] = {}
    for who, prepare in ((OURS, by_flexmasks(loop)), (PLAIN, theirs)):
        eager, replayed = Draws(chain.drawn), Draws(chain.drawn)
        implementations[who] = functools.partial(in_place, chain, prepare, eager)
        implementations[f"{who}, replayed"] = Replayed(functools.partial(chain.run, prepare), replayed)
    measured = measure(implementations, device, pace, cold=False)
    rows = measured_rows("graph", loop.name, shape, dtype, measured)
    for row in rows:
        row["difference"] = measured.difference(row["who"], OURS)
    rows[0]["backend"] = chain.backend(eager.new())
    return rows


def _gradient_rows(loop: Loop, shape: Shape, device: torch.device, dtype: torch.dtype, pace: Pace) -> list[Row]:
    """Return the figures of one attention with its gradients."""
    chain = Chain(loop, shape, device, dtype, calls=1, backward=True)
    new, theirs, sdpa = Draws(chain.drawn), Draws(chain.drawn), by_sdpa(loop, shape, device)
    implementations: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: chain.run(by_flexmasks(loop), new.new()),
        DENSE: lambda: chain.run(sdpa, theirs.new()),
    }
    measured = measure(implementations, device, pace, cold=False)
    rows = measured_rows("gradients", loop.name, shape, dtype, measured)
    rows[0] |= {"backend": chain.backend(new.new()), "difference": measured.difference(OURS, DENSE)}
    return rows


def _training_rows(
    packing: str, way: str, sizes: Sizes, device: torch.device, dtype: torch.dtype, pace: Pace, cold: bool
) -> list[Row]:
    """Return the figures of training steps of a model that runs in one of WAYS."""
    sizes, kinds = attention_kinds(packing, sizes, device, way)
    implementations = {
        who: Training(sizes, kind.attend_of, kind.packing, device, dtype, way)
        for who, kind in kinds.items()
        if who != DENSE
    }
    measured = measure(implementations, device, pace, cold, required=())
    about = {"model": way, "layers": sizes.layers, "width": sizes.width}
    return [{**row, **about} for row in measured_rows("training", packing, sizes.shape, dtype, measured)]


def _losses_rows(packing: str, way: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Row]:
    """Return the losses of a small model's first steps.

    Raises ValueError if they are too far from the losses with the mask as a tensor.
    """
    torch.compiler.reset()
    losses: dict[str, list[float]] = {}
    left_out: dict[str, str] = {}
    small, kinds = attention_kinds(packing, sizes, device, way)
    if device.type == "cpu":
        del kinds[PLAIN]  # flex_attention has no gradients on a CPU
    for who, kind in kinds.items():
        train = Training(small, kind.attend_of, kind.packing, device, dtype, "eager" if who == DENSE else way)
        try:
            losses[who] = [float(train()) for _ in range(_CHECKED_STEPS)]
        except Exception as error:
            if who == OURS:
                raise
            left_out[who] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    expected = losses[DENSE]
    rows: list[Row] = []
    for who, found in losses.items():
        difference = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        if not difference <= _TOLERANCE[dtype]:
            raise ValueError(f"the losses of {who} are {found}, those of the mask as a tensor {expected}")
        row: Row = {"kind": "losses", "case": packing, "model": way, "who": who}
        rows.append({**row, "dtype": _name(dtype), "losses": found, "difference": difference})
    if left_out:
        rows[0]["left_out"] = left_out
    return rows


class Measurement(NamedTuple):
    """Figures of all implementations of a case."""

    figures: dict[str, MeasuredSteps]
    left_out: dict[str, str]
    cold: bool

    def difference(self, who: str, other: str) -> float:
        """Return the largest difference of two implementations' last outputs."""
        return float((self.figures[who].output.float() - self.figures[other].output.float()).abs().max())


def measure(
    implementations: Mapping[str, Callable[[], Tensor]],
    device: torch.device,
    pace: Pace,
    cold: bool,
    required: Sequence[str] = (OURS,),
) -> Measurement:
    """Measure steps; cold ones find no compiled code, in memory or on the disk."""
    torch.compiler.reset()
    clear_caches()
    with private_torch.empty_compile_cache() if cold else contextlib.nullcontext():
        figures, left_out = measure_steps(implementations, device, required=required, **pace._asdict())
    return Measurement(figures, left_out, cold)


def measured_rows(kind: str, case: str, shape: tuple[int, ...], dtype: torch.dtype, measured: Measurement) -> list[Row]:
    """Return a row of figures for each implementation of a case."""
    rows: list[Row] = []
    for who, figures in measured.figures.items():
        row: Row = {"kind": kind, "case": case, "shape": "x".join(map(str, shape)), "dtype": _name(dtype), "who": who}
        row["ms"], row["iqr"] = (float(f"{x:.4g}") for x in figures.milliseconds)
        row["alone_ms"], row["alone_iqr"] = (float(f"{x:.4g}") for x in figures.alone_milliseconds)
        row |= {
            "steps": figures.steps,
            "first_s": round(figures.first_seconds, 2),
            "cold": measured.cold,
            "compilations": figures.compilations,
            "longest_ms": float(f"{figures.longest_milliseconds:.4g}"),
            "synchronizations": figures.synchronizations,
        }
        rows.append(row)
    if not rows:
        raise RuntimeError(f"nothing could be measured: {measured.left_out}")
    if measured.left_out:
        rows[0]["left_out"] = measured.left_out
    return rows


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- a model in training ---


class AttentionKind(NamedTuple):
    """A kind of attention of a model."""

    attend_of: Callable[[Any], Attend]  # inside the model, from the value of `packing`
    packing: Callable[[], Any]  # outside the model, once in a step


def attention_kinds(
    packing: str, sizes: Sizes, device: torch.device, way: str
) -> tuple[Sizes, dict[str, AttentionKind]]:
    """Return the sizes, and the kinds of attention among packed documents.

    packing: "document ids", [batch, length], or "offsets" of sequences in one row of batch x length tokens.
    """
    if packing == "offsets":
        sizes = sizes._replace(batch=1, length=sizes.batch * sizes.length)
    batch, length = sizes.batch, sizes.length
    draw, mod = (draw_offsets, offsets_mod) if packing == "offsets" else (draw_ids, documents_mod)
    drawn = draw(batch, length, torch.Generator(device).manual_seed(0))
    create = compiled_create()
    flex: Any = compiled_flex() if way == "eager" else flex_attention
    ours, plain, dense = (Draws(drawn) for _ in range(3))

    def attend_of_ids(ids: Tensor) -> Attend:
        mask = documents(ids)
        return lambda q, k, v: attention(q, k, v, mask=mask)

    def attend_of_offsets(offsets: Tensor) -> Attend:
        def attend(*heads_first: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in heads_first)
            out: Tensor = varlen_attention(q, k, v, offsets, mask="causal")
            return out.transpose(0, 1)[None]

        return attend

    def seen() -> Tensor:
        return mod(dense.new(), length)(*indices(batch, 1, length, device)).expand(batch, 1, length, length)

    attend_of = attend_of_offsets if packing == "offsets" else attend_of_ids
    return sizes, {
        OURS: AttentionKind(attend_of, ours.new),
        PLAIN: AttentionKind(
            lambda block_mask: lambda q, k, v: flex(q, k, v, block_mask=block_mask),
            lambda: create(mod(plain.new(), length), batch, length, device),
        ),
        DENSE: AttentionKind(
            lambda visible: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible), seen
        ),
    }


# --- the command ---


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    pace = QUICK if quick else USUAL
    plans: list[Shape] = [(8, 16, 4096, 64), (1, 16, 32768, 64), (1, 1, 262144, 64)]
    shapes: list[Shape] = [(8, 16, 4096, 64), (2, 16, 16384, 64), (1, 16, 32768, 128)]
    model, small = Sizes(), Sizes(width=256, heads=4, layers=2, batch=2, length=1024)
    if not is_cuda:
        plans = shapes = [(1, 8, 4096, 64)]
        pace = pace._replace(seconds=2 * pace.seconds)
    if quick:
        plans = shapes = [(2, 2, 256, 64)]
        model = small = Sizes(vocabulary=32, width=128, heads=2, layers=2, batch=2, length=128)
    todo: dict[str, Callable[[], list[Row]]] = {}
    for shape in plans:
        todo[f"plan, documents, {list(shape)}"] = functools.partial(_plan_rows, shape, device, dtype, pace)

    def add_loops(shape: Shape) -> None:
        for loop in LOOPS:
            # A cold compilation takes long, so some cases have one.
            cold = is_cuda and shape == shapes[0] and loop in LOOPS[:2]
            call = functools.partial(_loop_rows, loop, shape, device, dtype, pace, cold)
            todo[f"loop, {loop.name}, {list(shape)}"] = call

    add_loops(shapes[0])
    trained: list[Shape] = [(4, 8, 256, 64), (4, 8, 512, 64), (2, 8, 1024, 64), (1, 8, 4096, 64)]
    for shape in () if is_cuda else shapes if quick else trained:
        for loop in WITH_GRADIENTS:
            call = functools.partial(_gradient_rows, loop, shape, device, dtype, pace)
            todo[f"gradients, {loop.name}, {list(shape)}"] = call
    for packing, way in _TRAINED:
        todo[f"losses, {packing}, {way}"] = functools.partial(_losses_rows, packing, way, small, device, dtype)
    for packing, way in _TRAINED if is_cuda else ():
        cold = (packing, way) == ("document ids", "compiled")
        call = functools.partial(_training_rows, packing, way, model, device, dtype, pace, cold)
        todo[f"training, {packing}, {way}"] = call
    of_lengths = (1, 2, 512, 64) if quick else shapes[0]
    for loop, shorter in itertools.product(LOOPS[:5:2] if is_cuda or quick else (), (0, 37)):
        cold = is_cuda and loop is LOOPS[0]
        call = functools.partial(_length_rows, loop, of_lengths, shorter, device, dtype, pace, cold)
        todo[f"lengths, {loop.name}, {list(of_lengths)} less {shorter}"] = call
    for loop in LOOPS[:2] if is_cuda else ():
        call = functools.partial(_graph_rows, loop, shapes[0], device, dtype, pace)
        todo[f"graph, {loop.name}, {list(shapes[0])}"] = call
    for shape in shapes[1:]:  # the longest work comes last
        add_loops(shape)
    return todo


BENCHMARK = Benchmark("steps", _todo, table)
