"""`python -m flexmasks bench steps`: loops whose masks have new tensors at every step, against plain torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from flexmasks import calls, compat
from flexmasks.attention import attention, explain, varlen_attention
from flexmasks.bench.model import Attend, Sizes, Training
from flexmasks.bench.results import Row, choose_device, machine, machine_line, run_steps
from flexmasks.bench.runner import MeasuredSteps, measure_steps
from flexmasks.cache import clear_caches
from flexmasks.masks.packed import packed
from flexmasks.scores.alibi import alibi_slopes
from flexmasks.spec.arguments import get_mask
from flexmasks.spec.values import Mask

OURS, OLD, PLAIN = "flexmasks", "flexmasks, old tensors", "flex_attention"
_DOCUMENT = 600  # mean number of tokens of a document
_DRAWS = 64  # different tensors, which the steps take by turns
_LAYERS = 4  # calls of attention in a step
_CHECKED_STEPS = 5
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # largest relative difference of losses
_Shape = tuple[int, int, int, int]  # batch, heads, length, head size
_Prepare = Callable[[Tensor], Attend]
_Mod = Callable[..., Tensor]


class Pace(NamedTuple):
    """Limits of the number of timed steps, see `measure_steps`."""

    turns: int
    most_in_a_row: int
    least_in_a_row: int
    seconds: float


_USUAL, _QUICK = Pace(8, 25, 3, 10.0), Pace(2, 2, 1, 1.0)


class Draws:
    """Tensors of many steps, drawn before the first step.

    A step copies its tensor, because a new tensor is a new object. So does a step with old tensors, which does not use
    the copy.
    """

    def __init__(self, drawn: Tensor) -> None:
        self._drawn, self._steps = drawn, 0
        self._place = drawn[0].clone()

    def new(self) -> Tensor:
        """Return a new tensor with new values."""
        self._steps += 1
        return self._drawn[self._steps % len(self._drawn)].clone()

    def old(self) -> Tensor:
        """Return the same tensor at every step."""
        self.new()
        return self._place

    def in_place(self) -> Tensor:
        """Return the same tensor with new values."""
        return self._place.copy_(self.new())


# --- what the loops compute ---


@dataclass(frozen=True)
class Loop:
    """Calls of attention whose mask has a tensor."""

    name: str
    draw: Callable[[int, int, torch.Generator], Tensor]  # of batch, length: [draws, ...]
    arguments: Callable[[Tensor], dict[str, Any]]  # from the tensor to keyword arguments of `attention`
    mask_mod: Callable[[Tensor, int], _Mod]  # the same mask for torch, of the tensor and the length
    has_alibi: bool = False
    is_varlen: bool = False  # q, k, v are [tokens, heads, head size], and the tensor has offsets


def draw_ids(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return document ids, [draws, batch, length], with random cuts."""
    cuts = torch.rand(_DRAWS, batch, length, generator=generator, device=generator.device) < 1 / _DOCUMENT
    return cuts.cumsum(-1)


def draw_lengths(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return lengths of sequences, [draws, batch]."""
    return torch.randint(length // 4, length + 1, (_DRAWS, batch), generator=generator, device=generator.device)


def draw_padding(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return booleans of the keys that are no padding, [draws, batch, length]."""
    return torch.arange(length, device=generator.device) < draw_lengths(batch, length, generator)[..., None]


def draw_offsets(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return where sequences start and end, [draws, sequences + 1], laid end to end over all tokens."""
    tokens = batch * length
    order = torch.rand(_DRAWS, tokens - 1, generator=generator, device=generator.device)
    cuts = order.topk(max(tokens // _DOCUMENT - 1, 1), dim=-1).indices.sort(dim=-1).values + 1
    return F.pad(F.pad(cuts, (1, 0)), (0, 1), value=tokens).int()


def _documents(ids: Tensor) -> Mask:
    return get_mask("causal") & get_mask("document", document_ids=ids)


def _documents_mod(ids: Tensor, length: int = 0) -> _Mod:
    return lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv])


def _lengths_mod(lengths: Tensor, length: int) -> _Mod:
    return lambda b, h, q, kv: (kv <= q) & (q < lengths[b]) & (kv < lengths[b])


def _padding_mod(real: Tensor, length: int) -> _Mod:
    return lambda b, h, q, kv: real[b, kv]


def _offsets_mod(offsets: Tensor, length: int) -> _Mod:
    places = torch.arange(length, device=offsets.device)
    sequences = torch.bucketize(places, offsets[1:], right=True)
    return lambda b, h, q, kv: (q >= kv) & (sequences[q] == sequences[kv])


LOOPS = [
    Loop("documents", draw_ids, lambda ids: {"mask": _documents(ids)}, _documents_mod),
    Loop("grouped_tril", draw_lengths, lambda n: {"mask": "grouped_tril", "seq_lens": n}, _lengths_mod),
    Loop("key_padding", draw_padding, lambda real: {"mask": "key_padding", "attention_mask": real}, _padding_mod),
    Loop("a lambda over document ids", draw_ids, lambda ids: {"mask": _documents_mod(ids)}, _documents_mod),
    Loop(
        "documents, ALiBi",
        draw_ids,
        lambda ids: {"mask": _documents(ids), "score": "alibi"},
        _documents_mod,
        has_alibi=True,
    ),
    Loop("varlen_attention", draw_offsets, lambda n: {"mask": packed("causal", n)}, _offsets_mod, is_varlen=True),
]


def _ours(loop: Loop) -> _Prepare:
    """Return attention as users of this library write it."""

    def prepare(drawn: Tensor) -> Attend:
        if loop.is_varlen:
            return lambda q, k, v: varlen_attention(q, k, v, drawn, mask="causal")  # type: ignore[no-any-return]
        arguments = loop.arguments(drawn)
        return lambda q, k, v: attention(q, k, v, **arguments)  # type: ignore[no-any-return]

    return prepare


def _plain(loop: Loop, shape: _Shape, device: torch.device) -> _Prepare:
    """Return attention as users of torch write it."""
    batch, heads, length, _ = shape
    create = _compiled_create()
    flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    slopes = torch.tensor(alibi_slopes(heads), device=device)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - slopes[h] * (q - kv)

    score_mod = alibi if loop.has_alibi else None

    def prepare(drawn: Tensor) -> Attend:
        block_mask = create(loop.mask_mod(drawn, length), batch, length, device)
        if not loop.is_varlen:
            return lambda q, k, v: flex(q, k, v, score_mod, block_mask)

        def attend(*tokens: Tensor) -> Tensor:
            out: Tensor = flex(*(x.transpose(0, 1)[None] for x in tokens), score_mod, block_mask)
            return out[0].transpose(0, 1)

        return attend

    return prepare


def _compiled_create() -> Callable[[_Mod, int, int, torch.device], BlockMask]:
    """Return a compiled create_block_mask of a mask that does not depend on the head."""
    create = torch.compile(create_block_mask, dynamic=False)
    return lambda mask_mod, batch, length, device: create(mask_mod, batch, None, length, length, device=str(device))


def _plan(mask: Mask, q: Tensor) -> Tensor:
    """Plan a mask as `attention` does, and return the numbers of its partial blocks."""
    planned = calls._planned(q, q, q, calls.Request(mask=mask))
    return planned.blocks().block_mask.kv_num_blocks


# --- rows ---


def _plan_rows(shape: _Shape, device: torch.device, dtype: torch.dtype, pace: Pace) -> list[Row]:
    """Return the figures of planning new document ids."""
    batch, _, length, _ = shape
    q = torch.empty(shape, device=device, dtype=dtype)
    drawn = draw_ids(batch, length, torch.Generator(device).manual_seed(0))
    ours, theirs = Draws(drawn), Draws(drawn)
    create = _compiled_create()
    implementations: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: _plan(_documents(ours.new()), q),
        PLAIN: lambda: create(_documents_mod(theirs.new()), batch, length, device).kv_num_blocks,
    }
    measured, left_out = _measure(implementations, device, pace)
    return _rows("plan", "documents", shape, dtype, measured, left_out)


def _loop_rows(loop: Loop, shape: _Shape, device: torch.device, dtype: torch.dtype, pace: Pace) -> list[Row]:
    """Return the figures of a loop with new tensors and with old ones, and of plain torch."""
    if loop.is_varlen:
        shape = (1, shape[1], shape[0] * shape[2], shape[3])
    chain = _Chain(loop, shape, device, dtype)
    new, old, plain = (Draws(chain.drawn) for _ in range(3))
    theirs = _plain(loop, shape, device)
    implementations: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: chain.run(_ours(loop), new.new()),
        OLD: lambda: chain.run(_ours(loop), old.old()),
        PLAIN: lambda: chain.run(theirs, plain.new()),
    }
    measured, left_out = _measure(implementations, device, pace)
    rows = _rows("loop", loop.name, shape, dtype, measured, left_out)
    backend = chain.backend(new.new())
    rows = [row if row["who"] == PLAIN else {**row, "backend": backend} for row in rows]
    if PLAIN in measured:
        rows[0]["difference"] = _difference(measured[OURS], measured[PLAIN])
    return rows


def _graph_rows(loop: Loop, shape: _Shape, device: torch.device, dtype: torch.dtype, pace: Pace) -> list[Row]:
    """Return the figures of steps captured in CUDA graphs, whose tensors change in place."""
    chain = _Chain(loop, shape, device, dtype)
    theirs = _plain(loop, shape, device)
    implementations: dict[str, Callable[[], Tensor]] = {}
    for who, prepare in ((OURS, _ours(loop)), (PLAIN, theirs)):
        eager, replayed = Draws(chain.drawn), Draws(chain.drawn)
        implementations[who] = functools.partial(_in_place, chain, prepare, eager)
        implementations[f"{who}, replayed"] = _Replayed(chain, prepare, replayed)
    measured, left_out = _measure(implementations, device, pace)
    rows = _rows("graph", loop.name, shape, dtype, measured, left_out)
    for row in rows:
        row["difference"] = _difference(measured[row["who"]], measured[OURS])
    rows[0]["backend"] = chain.backend(eager.new())
    return rows


def _training_rows(
    packing: str, compiled: bool, sizes: Sizes, device: torch.device, dtype: torch.dtype, pace: Pace
) -> list[Row]:
    """Return the figures of a training step of a model, eager or compiled as a whole."""
    sizes, ways = _ways(packing, sizes, device, compiled)
    implementations = {
        who: Training(sizes, way.attend_of, way.packing, device, dtype, compiled)
        for who, way in ways.items()
        if who != _DENSE
    }
    measured, left_out = _measure(implementations, device, pace, required=())
    shape = (sizes.batch, sizes.heads, sizes.length, sizes.width // sizes.heads)
    about = {"compiled": compiled, "layers": sizes.layers, "width": sizes.width}
    rows = _rows("training", packing, shape, dtype, measured, left_out)
    return [{**row, **about} for row in rows]


def _losses_rows(packing: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Row]:
    """Return the losses of first steps, and how far they are from those of the mask as a tensor.

    Raises ValueError if they are too far.
    """
    losses: dict[str, list[float]] = {}
    left_out: dict[str, str] = {}
    for compiled in (False, True):
        small, ways = _ways(packing, sizes, device, compiled)
        for who, way in ways.items():
            if who == _DENSE and compiled:
                continue
            name = f"{who}, compiled" if compiled else who
            train = Training(small, way.attend_of, way.packing, device, dtype, compiled)
            try:
                losses[name] = [float(train()) for _ in range(_CHECKED_STEPS)]
            except Exception as error:
                if name == OURS:
                    raise
                left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    expected = losses[_DENSE]
    rows: list[Row] = []
    for name, found in losses.items():
        difference = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        if not difference <= _TOLERANCE[dtype]:
            raise ValueError(f"the losses of {name} are {found}, those of the mask as a tensor {expected}")
        row: Row = {"kind": "losses", "case": packing, "who": name, "losses": found, "difference": difference}
        row["dtype"] = str(dtype).removeprefix("torch.")
        rows.append(row)
    if left_out:
        rows[0]["left_out"] = left_out
    return rows


def _measure(
    implementations: dict[str, Callable[[], Tensor]],
    device: torch.device,
    pace: Pace,
    required: Sequence[str] = (OURS,),
) -> tuple[dict[str, MeasuredSteps], dict[str, str]]:
    """Measure steps with nothing compiled before; on a GPU with an empty folder of compiled code too."""
    torch.compiler.reset()
    clear_caches()
    cache = compat.empty_compile_cache() if device.type == "cuda" else contextlib.nullcontext()
    with cache:
        return measure_steps(implementations, device, required=required, **pace._asdict())


def _rows(
    kind: str,
    case: str,
    shape: _Shape,
    dtype: torch.dtype,
    measured: dict[str, MeasuredSteps],
    left_out: dict[str, str],
) -> list[Row]:
    rows: list[Row] = []
    for who, figures in measured.items():
        row: Row = {"kind": kind, "case": case, "shape": "x".join(map(str, shape)), "who": who}
        row["dtype"] = str(dtype).removeprefix("torch.")
        row["ms"], row["iqr"] = (float(f"{x:.4g}") for x in figures.milliseconds)
        row["alone_ms"], row["alone_iqr"] = (float(f"{x:.4g}") for x in figures.alone_milliseconds)
        row |= {
            "steps": figures.steps,
            "first_s": round(figures.first_seconds, 2),
            "compilations": figures.compilations,
            "longest_ms": float(f"{figures.longest_milliseconds:.4g}"),
            "synchronizations": figures.synchronizations,
        }
        rows.append(row)
    if not rows:
        raise RuntimeError(f"nothing could be measured: {left_out}")
    if left_out:
        rows[0]["left_out"] = left_out
    return rows


def _difference(figures: MeasuredSteps, others: MeasuredSteps) -> float:
    return float((figures.output.float() - others.output.float()).abs().max())


class _Chain:
    """Attentions in a chain that share a mask, and on a GPU one backward pass."""

    def __init__(self, loop: Loop, shape: _Shape, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        batch, heads, length, size = shape
        self._loop, self._backward = loop, device.type == "cuda"
        self._q, self._k, self._v = (
            torch.randn(
                (length, heads, size) if loop.is_varlen else shape,
                device=device,
                dtype=dtype,
                requires_grad=self._backward,
            )
            for _ in range(3)
        )
        self._upstream = torch.randn_like(self._q)
        self.drawn = loop.draw(batch, length, torch.Generator(device).manual_seed(0))

    def run(self, prepare: _Prepare, drawn: Tensor) -> Tensor:
        """Run one step, and return the last output."""
        attend, x = prepare(drawn), self._q
        for _ in range(_LAYERS):
            x = attend(x, self._k, self._v)
        if self._backward:
            torch.autograd.grad(x, (self._q, self._k, self._v), self._upstream)
        return x.detach()

    def backend(self, drawn: Tensor) -> str:
        """Return the backend that runs the calls."""
        tensors = [x.detach().requires_grad_(self._backward) for x in (self._q, self._k, self._v)]
        if self._loop.is_varlen:
            tensors = [x.transpose(0, 1)[None] for x in tensors]
        return explain(*tensors, **self._loop.arguments(drawn)).backend


def _in_place(chain: _Chain, prepare: _Prepare, draws: Draws) -> Tensor:
    return chain.run(prepare, draws.in_place())


class _Replayed:
    """Steps of a chain by a CUDA graph, captured at the first step."""

    def __init__(self, chain: _Chain, prepare: _Prepare, draws: Draws) -> None:
        self._chain, self._prepare, self._draws = chain, prepare, draws
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Tensor:
        place = self._draws.in_place()
        if self._graph is None:
            self._graph, self._output = self._capture(place)
        self._graph.replay()
        return self._output

    def _capture(self, place: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._chain.run(self._prepare, place)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._chain.run(self._prepare, place)
        return graph, output


# --- a model in training ---

_DENSE = "SDPA + mask"


class _Way(NamedTuple):
    """A way to compute a model's attention."""

    attend_of: Callable[[Any], Attend]  # inside the model, from the value of `packing`
    packing: Callable[[], Any]  # outside the model, once in a step


def _ways(packing: str, sizes: Sizes, device: torch.device, compiled: bool) -> tuple[Sizes, dict[str, _Way]]:
    """Return the sizes and the ways to compute attention among packed documents.

    packing: "document ids", [batch, length], or "offsets" of sequences in one row of batch x length tokens.
    """
    if packing == "offsets":
        sizes = sizes._replace(batch=1, length=sizes.batch * sizes.length)
    batch, length = sizes.batch, sizes.length
    draw, mod = (draw_offsets, _offsets_mod) if packing == "offsets" else (draw_ids, _documents_mod)
    drawn = draw(batch, length, torch.Generator(device).manual_seed(0))
    create = _compiled_create()
    flex: Callable[..., Tensor] = flex_attention
    if not compiled:
        flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    ours, plain, dense = (Draws(drawn) for _ in range(3))

    def attend_of_ids(ids: Tensor) -> Attend:
        mask = _documents(ids)
        return lambda q, k, v: attention(q, k, v, mask=mask)  # type: ignore[no-any-return]

    def attend_of_offsets(offsets: Tensor) -> Attend:
        def attend(*heads_first: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in heads_first)
            out: Tensor = varlen_attention(q, k, v, offsets, mask="causal")
            return out.transpose(0, 1)[None]

        return attend

    def seen() -> Tensor:
        b, h, q, kv = (torch.arange(n, device=device) for n in (batch, 1, length, length))
        mask_mod = mod(dense.new(), length)
        return mask_mod(b[:, None, None, None], h, q[:, None], kv).expand(batch, 1, length, length)

    attend_of = attend_of_offsets if packing == "offsets" else attend_of_ids
    return sizes, {
        OURS: _Way(attend_of, ours.new),
        PLAIN: _Way(
            lambda block_mask: lambda q, k, v: flex(q, k, v, block_mask=block_mask),
            lambda: create(mod(plain.new(), length), batch, length, device),
        ),
        _DENSE: _Way(
            lambda visible: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible), seen
        ),
    }


# --- the command ---


def steps(
    only: Iterable[str] = (),
    *,
    quick: bool = False,
    device: str | None = None,
    file: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Measure steps with new tensors, print a table, and write the figures to a file.

    Args:
        only: measure only what has one of these texts in its description.
        quick: few and small steps, to try the benchmark itself.
        device: cuda or cpu; by default a GPU if the machine has one.
        file: the JSON file.
        resume: keep the rows that the file has of an earlier run.
    """
    at = choose_device(device)
    todo = _todo(at, quick)
    only = list(only)
    chosen = {name: step for name, step in todo.items() if not only or any(text in name for text in only)}
    if not chosen:
        raise ValueError(f"flexmasks bench: nothing to measure is named {only}; there are {'; '.join(todo)}.")
    about = machine(at)
    if at.type == "cuda":
        about["flash"] = _flash_version()
    results: dict[str, Any] = {"benchmark": "steps", "machine": about, "rows": []}
    run_steps(results, chosen, file, resume)
    print(table(results))
    return results


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    pace = _QUICK if quick else _USUAL
    plans: list[_Shape] = [(8, 16, 4096, 64), (1, 16, 32768, 64), (1, 1, 262144, 64)]
    shapes: list[_Shape] = [(8, 16, 4096, 64), (2, 16, 16384, 64), (1, 16, 32768, 128)]
    model, small = Sizes(), Sizes(width=256, heads=4, batch=2, length=1024)
    if not is_cuda:
        plans = shapes = [(1, 8, 4096, 64)]
        small = small._replace(layers=2)
    if quick:
        plans = shapes = [(2, 2, 256, 64)]
        model = small = Sizes(vocabulary=32, width=128, heads=2, layers=2, batch=2, length=128)
    todo: dict[str, Callable[[], list[Row]]] = {}
    for shape in plans:
        todo[f"plan, documents, {list(shape)}"] = functools.partial(_plan_rows, shape, device, dtype, pace)
    for shape in shapes:
        for loop in LOOPS:
            call = functools.partial(_loop_rows, loop, shape, device, dtype, pace)
            todo[f"loop, {loop.name}, {list(shape)}"] = call
    for packing in ("document ids", "offsets"):
        todo[f"losses, {packing}"] = functools.partial(_losses_rows, packing, small, device, dtype)
        for compiled in (False, True) if is_cuda else ():
            name = f"training, {packing}, {'compiled' if compiled else 'eager'}"
            todo[name] = functools.partial(_training_rows, packing, compiled, model, device, dtype, pace)
    for loop in LOOPS[:2] if is_cuda else ():
        call = functools.partial(_graph_rows, loop, shapes[0], device, dtype, pace)
        todo[f"graph, {loop.name}, {list(shapes[0])}"] = call
    return todo


def _flash_version() -> str:
    try:
        return f"flash-attn-4 {importlib.metadata.version('flash-attn-4')}"
    except importlib.metadata.PackageNotFoundError:
        return "without flash-attn-4"


# --- tables ---


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("what", "kind"), ("case", "case"), ("shape", "shape"), ("compiled", "compiled"), ("who", "who"),
        ("backend", "backend"), ("ms", "ms"), ("IQR", "iqr"), ("alone, ms", "alone_ms"), ("steps", "steps"),
        ("first s", "first_s"), ("compiles later", "compilations"), ("longest ms", "longest_ms"),
        ("waits", "synchronizations"), ("difference", "difference"),
    )  # fmt: skip
    rows = [[r.get(key) for _, key in columns] for r in results["rows"]]
    header = [name for name, _ in columns]
    return f"{machine_line(results)}\n{tabulate(rows, headers=header, floatfmt='.4g', missingval='')}"


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of one run."""
    about = results["machine"]
    device = about["device"] if about["device_type"] == "cpu" else f"one {about['device']}"
    libraries = ", ".join([f"torch {about['torch']}", *([about["flash"]] if "flash" in about else [])])
    dtypes = " and ".join(dict.fromkeys(r["dtype"] for r in results["rows"]))
    parts = [f"On {device}, {libraries}, {dtypes}; medians."]
    for kind, make in (("plan", _plan_table), ("loop", _loop_table), ("training", _training_table)):
        cases = _cases(results, kind)
        if cases:
            parts.append(make(cases))
    losses = [r for r in results["rows"] if r["kind"] == "losses"]
    if losses:
        parts.append(_about_losses(losses))
    graphs = _cases(results, "graph")
    if graphs:
        parts.append(_graph_table(graphs))
    return "\n\n".join(parts)


_Cases = dict[tuple[str, ...], dict[str, Row]]


def _cases(results: dict[str, Any], kind: str) -> _Cases:
    """Return the rows of a kind by case and shape, then by who."""
    cases: _Cases = {}
    for r in results["rows"]:
        if r["kind"] == kind:
            way = ("compiled" if r["compiled"] else "eager",) if "compiled" in r else ()
            cases.setdefault((r["case"], *way, r["shape"]), {})[r["who"]] = r
    return cases


def _plan_table(cases: _Cases) -> str:
    rows = []
    for (_, shape), by_who in cases.items():
        cells = [shape.rpartition("x")[0]]
        for key in ("ms", "alone_ms"):
            cells += [_figure(by_who, OURS, key), _against(by_who, PLAIN, key)]
        rows.append([*cells, _pair(by_who, "synchronizations"), _pair(by_who, "first_s")])
    header = ["B x H x S", "flexmasks, ms", "create_block_mask", "alone, ms", "create_block_mask"]
    return (
        "### Plans\n\nNew document ids are planned. Waits are how often the host waits for the GPU, and the first plan "
        f"compiles: both of flexmasks / of compiled `create_block_mask`.\n\n"
        f"{_github(rows, [*header, 'waits', 'first, s'])}"
    )


def _loop_table(cases: _Cases) -> str:
    rows = []
    for (case, shape), by_who in cases.items():
        ours = by_who[OURS]
        rows.append(
            [
                case,
                shape,
                ours["backend"],
                _figure(by_who, OURS),
                _figure(by_who, OLD),
                f"{ours['ms'] / by_who[OLD]['ms']:.2f}" if OLD in by_who else "",
                _against(by_who, PLAIN),
                _pair(by_who, "first_s"),
                _pair(by_who, "compilations"),
                f"{ours['longest_ms']:.0f}",
                _pair(by_who, "synchronizations"),
            ]
        )
    header = ["loop", "B x H x S x D", "backend", "new, ms", "old, ms", "new / old", "compiled torch, new"]
    header += ["first, s", "compiles later", "longest later, ms", "waits"]
    return (
        f"### Loops\n\nA step is {_LAYERS} attentions in a chain that share the mask and, on a GPU, one backward pass. "
        "Pairs of figures are of flexmasks / of compiled torch.\n\n"
        f"{_github(rows, header)}"
    )


def _training_table(cases: _Cases) -> str:
    rows = []
    for (case, way, _), by_who in cases.items():
        cells = [case, way, _figure(by_who, OURS), _against(by_who, PLAIN)]
        rows.append([*cells, _pair(by_who, "first_s"), _pair(by_who, "compilations"), _pair(by_who, "synchronizations")])
    _, _, shape = next(iter(cases))
    figures = next(iter(next(iter(cases.values())).values()))
    header = ["documents as", "model", "flexmasks, ms", "compiled torch", "first, s", "compiles later", "waits"]
    return (
        f"### Training\n\nA training step of a model of {figures['layers']} layers of width {figures['width']} (B x H x "
        f"S x D {shape}, or all tokens in one row), with AdamW. New documents are packed at every step. Eager models "
        "call compiled `flex_attention`; compiled models are compiled as a whole, without graph breaks.\n\n"
        f"{_github(rows, header)}"
    )


def _graph_table(cases: _Cases) -> str:
    rows = []
    for (case, shape), by_who in cases.items():
        cells = [case, shape, by_who[OURS]["backend"], _figure(by_who, OURS), _figure(by_who, f"{OURS}, replayed")]
        rows.append([*cells, _figure(by_who, PLAIN), _figure(by_who, f"{PLAIN}, replayed")])
    header = ["loop", "B x H x S x D", "backend", "eager, ms", "replayed, ms", "compiled torch, ms", "replayed, ms"]
    return (
        "### CUDA graphs\n\nThe same steps; the tensor of the mask changes in place before each, and a replay plans "
        f"again.\n\n{_github(rows, header)}"
    )


def _about_losses(rows: Sequence[Row]) -> str:
    largest = max(rows, key=lambda r: r["difference"])
    return (
        f"The losses of the first {_CHECKED_STEPS} steps of small models, eager and compiled, differ from those of SDPA "
        f"with the mask as a tensor by at most {largest['difference']:.1g}, relative, in {largest['dtype']}."
    )


def _github(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    return tabulate(rows, headers=header, tablefmt="github", disable_numparse=True)


def _figure(by_who: dict[str, Row], who: str, key: str = "ms") -> str:
    """Return one figure as text; "fails" if the implementation was left out."""
    if who in by_who:
        return "" if by_who[who][key] is None else f"{by_who[who][key]:.3g}"
    return "fails" if any(who in row.get("left_out", {}) for row in by_who.values()) else ""


def _against(by_who: dict[str, Row], who: str, key: str = "ms") -> str:
    """Return a figure, and how many times as long it is as that of flexmasks."""
    text = _figure(by_who, who, key)
    if OURS not in by_who or who not in by_who:
        return text
    return f"{text} ({by_who[who][key] / by_who[OURS][key]:.2f} x)"


def _pair(by_who: dict[str, Row], key: str) -> str:
    """Return a figure of flexmasks and of compiled torch."""
    return " / ".join(text for who in (OURS, PLAIN) if (text := _figure(by_who, who, key)))
