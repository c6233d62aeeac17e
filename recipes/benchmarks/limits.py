"""`python recipes/benchmark.py limits`: sinks, head sizes, small calls, first calls, soft-caps and neighborhoods."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import first_calls
from benchmarks.limits_tables import (
    CAPPED,
    FLEX,
    FULL,
    HEAD_SIZES,
    NEIGHBORHOODS,
    PLAIN,
    ROWS,
    SDPA,
    SINKS,
    SMALL_CALLS,
    SOFT_CAP,
    TILES,
    WITH_SINKS,
    table,
)
from benchmarks.loops import documents, draw_ids
from benchmarks.peers import Attend, dense_sdpa, other_libraries, ready_flex
from benchmarks.results import Benchmark, Row
from benchmarks.runner import Measured, measure_passes
from benchmarks.steps import QUICK, Pace, measure, measured_rows
from benchmarks.steps_tables import OURS
from flexmasks.attention import attention, explain
from flexmasks.cache import clear_caches
from flexmasks.orders import in_tiles, tile_order
from flexmasks.spec.arguments import get_mask, get_score
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask, Score

_RUNS, _QUICK_RUNS = 5, 2
_SMALL_PACE = Pace(5, 50, 5, 1.0)
_CAP = 30.0
_CHECKED_QUERIES = 512  # the last queries, which the reference computes too


class Shape(NamedTuple):
    """Sizes of a call."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    size: int

    @property
    def is_grouped(self) -> bool:
        return self.heads != self.kv_heads

    def tensors(self, device: torch.device, dtype: torch.dtype, requires_grad: bool) -> list[Tensor]:
        """Return q, k and v of random numbers."""
        torch.manual_seed(0)
        return [
            torch.randn(
                self.batch, heads, self.length, self.size, device=device, dtype=dtype, requires_grad=requires_grad
            )
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        ]

    def sizes(self, device: torch.device) -> Size:
        return Size(self.batch, self.heads, self.length, self.length, device)


class Kind(NamedTuple):
    """Dtype and shape of a call."""

    dtype: torch.dtype
    shape: Shape


class Neighborhood(NamedTuple):
    """A mask of neighborhoods on a sequence, an image or a video."""

    canvas: tuple[int, ...]
    kernel: tuple[int, ...]
    batch: int
    heads: int
    size: int
    stride: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()  # of pixels, if the call is measured with tokens in tiles, too

    @property
    def name(self) -> str:
        kernel, canvas, stride = (
            " x ".join(f"{n:,}" for n in sizes) for sizes in (self.kernel, self.canvas, self.stride)
        )
        name = f"natten{'1d' if len(self.canvas) == 1 else '3d' if len(self.canvas) == 3 else ''}"
        return f"{name} {kernel} of {canvas}{f', stride {stride}' if stride else ''}"

    @property
    def visible(self) -> float:
        """The fraction of all pairs that is visible; at an edge the window shifts inward."""
        return math.prod(self.kernel) / math.prod(self.canvas)

    def mask(self) -> Mask:
        if len(self.canvas) == 1:
            return get_mask("natten1d", length=self.canvas[0], kernel=self.kernel[0])
        name = "natten" if len(self.canvas) == 2 else "natten3d"
        parameters: dict[str, Any] = {"kernel": self.kernel, **({"stride": self.stride} if self.stride else {})}
        parameters |= zip(("depth", "height", "width")[-len(self.canvas) :], self.canvas, strict=True)
        return get_mask(name, **parameters)


class Scale(NamedTuple):
    """Sizes of the cases."""

    sinks: list[Shape]
    window: int
    capped: list[Shape]
    small: list[Shape]
    small_window: int
    kinds: list[Kind]  # dtypes and head sizes
    neighborhoods: list[Neighborhood]


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_GPU = Scale(
    sinks=[Shape(4, 64, 8, 4096, 64), Shape(8, 16, 16, 8192, 128)],
    window=1024,
    capped=[Shape(16, 16, 16, 8192, 64), Shape(16, 16, 16, 8192, 128)],
    small=[Shape(4, 16, 16, 1024, 64), Shape(8, 16, 16, 512, 128), Shape(2, 32, 8, 4096, 128)],
    small_window=256,
    kinds=[
        *(Kind(_BF16, Shape(4, 16, 16, 8192, size)) for size in (96, 192, 256)),
        *(Kind(_FP16, Shape(4, 16, 16, 8192, size)) for size in (64, 128)),
        Kind(_FP32, Shape(2, 16, 16, 4096, 64)),
        Kind(_BF16, Shape(4, 16, 16, 10_000, 128)),
        Kind(_BF16, Shape(4, 32, 8, 8192, 128)),
        Kind(_BF16, Shape(1, 16, 16, 8192, 128)),
    ],
    neighborhoods=[
        Neighborhood((30, 48, 80), (18, 24, 24), 1, 8, 128, tile=(2, 16, 4)),
        Neighborhood((30, 48, 80), (18, 24, 24), 1, 8, 128, stride=(2, 8, 8), tile=(2, 8, 8)),
        Neighborhood((56, 56), (7, 7), 4, 16, 128),
        Neighborhood((64, 128), (7, 7), 4, 16, 128),
        Neighborhood((32768,), (2048,), 1, 16, 128),
    ],
)
_CPU = Scale(
    sinks=[Shape(1, 8, 2, 2048, 64)],
    window=256,
    capped=[Shape(1, 8, 8, 2048, 64)],
    small=[Shape(1, 8, 8, 512, 64), Shape(1, 8, 2, 1024, 64)],
    small_window=64,
    kinds=[
        *(Kind(_FP32, Shape(1, 8, 8, 2048, size)) for size in (96, 256)),
        Kind(_BF16, Shape(1, 8, 8, 2048, 64)),
        Kind(_FP32, Shape(1, 8, 8, 1000, 64)),
        Kind(_FP32, Shape(1, 8, 2, 2048, 64)),
    ],
    neighborhoods=[
        Neighborhood((8, 16, 16), (5, 7, 7), 1, 4, 64, tile=(2, 8, 8)),
        Neighborhood((56, 56), (7, 7), 1, 4, 64),
        Neighborhood((4096,), (256,), 1, 4, 64),
    ],
)
_QUICK = Scale(
    sinks=[Shape(1, 4, 2, 128, 16)],
    window=32,
    capped=[Shape(1, 2, 2, 128, 16)],
    small=[Shape(1, 4, 2, 128, 16)],
    small_window=16,
    kinds=[Kind(_FP32, Shape(1, 4, 2, 200, 24))],
    neighborhoods=[
        Neighborhood((4, 8, 8), (3, 3, 3), 1, 2, 16, tile=(2, 8, 8)),
        Neighborhood((16, 16), (7, 7), 1, 2, 16),
        Neighborhood((256,), (16,), 1, 2, 16),
    ],
)


# --- passes on the device ---


def _measured(
    implementations: Mapping[str, Callable[..., Tensor]],
    inputs: Sequence[Tensor],
    runs: int,
    required: Collection[str],
    **options: Any,
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Measure passes with nothing planned or compiled before."""
    torch.compiler.reset()
    clear_caches()
    return measure_passes(implementations, inputs, runs=runs, required=required, **options)


def _rows_of(
    measured: Mapping[str, Measured], left_out: Mapping[str, str], about: Row, shape: Sequence[int], dtype: torch.dtype
) -> list[Row]:
    """Return a row of figures for each implementation; the first one says which others failed."""
    about = {**about, "shape": "x".join(map(str, shape)), "dtype": str(dtype).removeprefix("torch.")}
    rows = [{**about, "who": who, **figures.entries()} for who, figures in measured.items()]
    if left_out:
        rows[0]["left_out"] = dict(left_out)
    return rows


def _error(output: Tensor, inputs: Sequence[Tensor], **arguments: Any) -> float:
    """Return the largest difference of the last queries' output from the reference.

    Only the first head of the first batch element is computed, in float32.

    inputs: q, k and v, and maybe logits of sinks.
    """
    q, k, v = (x[:1, :1].detach().float() for x in inputs[:3])
    if len(inputs) > 3:
        arguments["sink_logits"] = inputs[3][:1].detach()
    first = max(0, q.shape[2] - _CHECKED_QUERIES)
    exact: Tensor = attention(q[:, :, first:], k, v, q_offset=first, backend="reference", **arguments)
    return float((output[:1, :1, first:].detach().float() - exact).abs().max())


def _masks(scale: Scale) -> dict[str, Mask]:
    return {"causal": get_mask("causal"), _window_name(scale.window): get_mask("sliding_window", window=scale.window)}


def _window_name(window: int) -> str:
    return f"sliding_window {window:,}"


def _sink_rows(name: str, mask: Mask, shape: Shape, device: torch.device, dtype: torch.dtype, runs: int) -> list[Row]:
    """Return the figures of a call with sinks and without.

    Forward passes are timed without gradients too, as in inference.
    """
    inputs = [*shape.tensors(device, dtype, True), torch.randn(shape.heads, device=device, requires_grad=True)]
    implementations: dict[str, Callable[..., Tensor]] = {
        WITH_SINKS: lambda q, k, v, sinks: attention(q, k, v, mask=mask, sink_logits=sinks),
        PLAIN: lambda q, k, v, _: attention(q, k, v, mask=mask),
    }
    inference, _ = _measured(
        implementations, [x.detach() for x in inputs], runs, required=implementations, backward=False
    )
    measured, _ = _measured(implementations, inputs, runs, required=implementations, allow_unused=True)
    rows = _rows_of(measured, {}, {"kind": SINKS, "case": name}, shape, dtype)
    for row in rows:
        row["inference_ms"] = inference[row["who"]].entries()["forward_ms"]
    q, k, v, sinks = inputs
    rows[0]["backend"] = explain(q, k, v, mask=mask, sink_logits=sinks).backend
    rows[1]["backend"] = explain(q, k, v, mask=mask).backend
    rows[0]["difference"] = _error(measured[WITH_SINKS].output, inputs, mask=mask)
    rows[1]["difference"] = _error(measured[PLAIN].output, inputs[:3], mask=mask)
    return rows


def _soft_cap_rows(shape: Shape, device: torch.device, dtype: torch.dtype, runs: int) -> list[Row]:
    """Return the figures of causal attention with a soft-cap and without."""
    inputs = shape.tensors(device, dtype, True)
    scores: dict[str, Score | None] = {CAPPED: get_score("softcap", cap=_CAP), PLAIN: None}
    implementations: dict[str, Callable[..., Tensor]] = {
        who: functools.partial(attention, mask="causal", score=score) for who, score in scores.items()
    }
    measured, _ = _measured(implementations, inputs, runs, required=implementations)
    rows = _rows_of(measured, {}, {"kind": SOFT_CAP, "case": "causal"}, shape, dtype)
    for row in rows:
        q, k, v = inputs
        score = scores[row["who"]]
        row["backend"] = explain(q, k, v, mask="causal", score=score).backend
        row["difference"] = _error(measured[row["who"]].output, inputs, mask="causal", score=score)
    return rows


def _head_masks(scale: Scale, shape: Shape, device: torch.device) -> dict[str, Callable[[], Mask]]:
    """Return masks by their names, made when they are measured."""

    def packed() -> Mask:
        return documents(draw_ids(shape.batch, shape.length, torch.Generator(device).manual_seed(0))[0])

    window = min(scale.window, shape.length // 4)
    return {
        "causal": lambda: get_mask("causal"),
        _window_name(window): lambda: get_mask("sliding_window", window=window),
        "documents": packed,
        "prefix_lm": lambda: get_mask("prefix_lm", prefix_len=shape.length // 4),
    }


def _head_rows(name: str, make: Callable[[], Mask], kind: Kind, device: torch.device, runs: int) -> list[Row]:
    """Return the figures of a dtype and shape against compiled flex_attention.

    Backward passes are timed on a GPU only: on a CPU, flex_attention has none.
    """
    backward, shape, mask = device.type == "cuda", kind.shape, make()
    q, k, v = shape.tensors(device, kind.dtype, backward)
    implementations: dict[str, Callable[..., Tensor]] = {
        OURS: functools.partial(attention, mask=mask),
        FLEX: ready_flex(mask, None, shape.sizes(device), shape.is_grouped),
    }
    measured, left_out = _measured(implementations, (q, k, v), runs, required=[OURS], backward=backward)
    rows = _rows_of(measured, left_out, {"kind": HEAD_SIZES, "case": name}, shape, kind.dtype)
    rows[0]["backend"] = explain(q, k, v, mask=mask).backend
    if FLEX in measured:
        outputs = [m.output.detach().float() for m in measured.values()]
        rows[0]["difference"] = float((outputs[0] - outputs[1]).abs().max())
    return rows


def _neighborhood_rows(case: Neighborhood, device: torch.device, dtype: torch.dtype, runs: int) -> list[Row]:
    """Return the figures of neighborhoods in each order of tokens, and of full attention.

    Forward passes are timed without gradients too, where other kernels may be faster.
    """
    length = math.prod(case.canvas)
    shape = Shape(case.batch, case.heads, case.heads, length, case.size)
    inputs = shape.tensors(device, dtype, True)
    calls: dict[str, dict[str, Any]] = {ROWS: {"mask": case.mask()}, FULL: {"mask": get_mask("full")}}
    implementations: dict[str, Callable[..., Tensor]] = {
        who: functools.partial(attention, **call) for who, call in calls.items()
    }
    if case.tile:
        calls[TILES] = {"mask": case.mask(), "order": tile_order(case.canvas, case.tile).to(device)}
        implementations[TILES] = functools.partial(in_tiles, attention, **calls[TILES])
    alone = [x.detach() for x in inputs]
    inference, _ = _measured(implementations, alone, runs, required=implementations, backward=False)
    measured, _ = _measured(implementations, inputs, runs, required=implementations)
    rows = _rows_of(measured, {}, {"kind": NEIGHBORHOODS, "case": case.name}, shape, dtype)
    for row in rows:
        who = row["who"]
        alone_of = inference[who].entries()
        row |= {"inference_ms": alone_of["forward_ms"], "inference_first_s": alone_of["first_s"]}
        row["inference_backend"] = explain(*alone, **calls[who]).backend
        explanation = explain(*inputs, **calls[who])
        row["backend"] = explanation.backend
        row["difference"] = _error(measured[who].output, inputs, mask=calls[who]["mask"])
        if who != FULL:
            row["visible"] = float(f"{case.visible:.4g}")
            row["computed"] = float(f"{1 - explanation.blocks.sparsity:.4g}")
    return rows


# --- steps with the host ---


def _small_cases(window: int) -> dict[str, tuple[Mask, Score | None, dict[str, Any] | None]]:
    """Return masks, scores, and the arguments by which FlashAttention 4 takes them, by names."""
    causal = get_mask("causal")
    return {
        "causal": (causal, None, {"causal": True}),
        _window_name(window): (
            get_mask("sliding_window", window=window),
            None,
            {"causal": True, "window_size": (window, 0)},
        ),
        "prefix_lm": (get_mask("prefix_lm", prefix_len=window), None, None),
        "ALiBi, causal": (causal, get_score("alibi"), None),
    }


def _small_rows(
    name: str, window: int, shape: Shape, backward: bool, device: torch.device, dtype: torch.dtype, pace: Pace
) -> list[Row]:
    """Return the figures of small calls, with the time of the host."""
    mask, score, fa4 = _small_cases(window)[name]
    q, k, v = shape.tensors(device, dtype, backward)
    upstream, size, grouped = torch.randn_like(q), shape.sizes(device), shape.is_grouped
    attends: dict[str, Attend] = {OURS: functools.partial(attention, mask=mask, score=score)}
    if name == "causal":
        attends[SDPA] = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=grouped)
    else:
        attends[SDPA] = dense_sdpa(mask, score, size, grouped, dtype)
    if fa4 is not None and device.type == "cuda":
        attends |= other_libraries(fa4, None)
    attends[FLEX] = ready_flex(mask, score, size, grouped)

    def step(attend: Attend) -> Tensor:
        out = attend(q, k, v)
        if backward:
            torch.autograd.grad(out, (q, k, v), upstream)
        return out.detach()

    steps = {who: functools.partial(step, attend) for who, attend in attends.items()}
    measured = measure(steps, device, pace, cold=False)
    rows = measured_rows(SMALL_CALLS, name, shape, dtype, measured)
    for row in rows:
        row["passes"] = _passes(backward)
        row["difference"] = measured.difference(row["who"], OURS)
    rows[0]["backend"] = explain(q, k, v, mask=mask, score=score).backend
    return rows


def _passes(backward: bool) -> str:
    return "forward + backward" if backward else "forward"


# --- the command ---


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_cuda = device.type == "cuda"
    dtype = _BF16 if is_cuda else _FP32
    scale = _QUICK if quick else _GPU if is_cuda else _CPU
    runs, pace = (_QUICK_RUNS, QUICK._replace(seconds=0.1)) if quick else (_RUNS, _SMALL_PACE)
    todo: dict[str, Callable[[], list[Row]]] = {}
    for shape in scale.sinks:
        for name, mask in _masks(scale).items():
            call = functools.partial(_sink_rows, name, mask, shape, device, dtype, runs)
            todo[f"{SINKS}, {name}, {list(shape)}"] = call
    for shape in scale.capped:
        call = functools.partial(_soft_cap_rows, shape, device, dtype, runs)
        todo[f"{SOFT_CAP}, causal, {list(shape)}"] = call
    for case in scale.neighborhoods:
        todo[f"{NEIGHBORHOODS}, {case.name}"] = functools.partial(_neighborhood_rows, case, device, dtype, runs)
    for shape in scale.small:
        for name in _small_cases(scale.small_window):
            for backward in (False, True):
                call = functools.partial(_small_rows, name, scale.small_window, shape, backward, device, dtype, pace)
                todo[f"{SMALL_CALLS}, {name}, {list(shape)}, {_passes(backward)}"] = call
    for kind in scale.kinds:
        for name, make in _head_masks(scale, kind.shape, device).items():
            about = f"{str(kind.dtype).removeprefix('torch.')}, {list(kind.shape)}"
            todo[f"{HEAD_SIZES}, {name}, {about}"] = functools.partial(_head_rows, name, make, kind, device, runs)
    return todo | first_calls.steps(device, quick)


BENCHMARK = Benchmark("limits", _todo, table)
