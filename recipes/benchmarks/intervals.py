"""`python recipes/benchmark.py intervals`: cuDNN's interval masks, against the other backends of this library."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.runner import reason_of
from benchmarks.steps_tables import github_table
from flexmasks.attention import attention, dense_mask, explain
from flexmasks.bench.clock import give_head_start, progress, synchronize, wall_milliseconds
from flexmasks.spec.arguments import get_mask
from flexmasks.spec.values import Mask

CUDNN, BACKEND = "cuDNN", "cudnn"  # its functions called directly with intervals that are ready, and the backend
LAYERS = 12  # of a model, which attend with the same mask
BAR, _BAR_CASES = 1.2, 3  # how many times as fast cuDNN had to be in how many cases, to become a backend
_DRAWS = 4  # different tensors of a mask, which the steps take by turns
_SECONDS, _ROUNDS = 2.0, 9  # the most that a case is timed
_DOCUMENT = 700  # tokens of a document on average
_HEAD_START_GIGABYTES = 24  # writing them takes a GPU longer than the host needs to start both passes
_TOLERANCE = 0.02  # relative to the norm, outputs and gradients in bfloat16
Step = Callable[[], tuple[Tensor, ...]]  # to output and gradients


class Case(NamedTuple):
    """A mask and the sizes of a call."""

    mask: str
    batch: int
    length: int
    heads: int
    size: int

    def describe(self) -> str:
        return f"[{self.batch}, {self.heads}, {self.length}, {self.size}]"


_FIXED = "block_diffusion", "prefix_lm", "sink_window"  # they have no tensors, so one plan serves all steps
_MASKS = (
    "prefix_lm & document", "bidirectional_spans & document", "chunked & document", "grouped_tril", *_FIXED,
)  # fmt: skip
_CASES = [
    Case(mask, batch, length, 16, size)
    for batch, length in ((2, 8192), (1, 32768))
    for mask in _MASKS
    for size in (64, 128)
]
_QUICK = [Case(mask, 2, 256, 2, 16) for mask in _MASKS]


def mask_of(case: Case, generator: torch.Generator) -> Callable[[], Mask]:
    """Return a function that makes the mask with tensors which no call has seen, of the same values."""
    batch, n, device = case.batch, case.length, generator.device

    def cut(mean: int) -> Tensor:
        return (torch.rand(batch, n, generator=generator, device=device) < 1 / mean).cumsum(1)

    if case.mask.endswith("& document"):
        mean = min(_DOCUMENT, n // 6)
        ids, spans = cut(mean), cut(max(2, mean // 6))
        spans = torch.where(spans % 2 == 1, spans, -1)
        outer: dict[str, Callable[[], Mask]] = {
            "prefix_lm & document": lambda: get_mask("prefix_lm", prefix_len=n // 4),
            "bidirectional_spans & document": lambda: get_mask("bidirectional_spans", span_ids=spans.clone()),
            "chunked & document": lambda: get_mask("chunked", chunk=n // 8),
        }
        return lambda: outer[case.mask]() & get_mask("document", document_ids=ids.clone())
    if case.mask == "grouped_tril":
        lens = torch.randint(n // 3, n + 1, (batch,), generator=generator, device=device)
        return lambda: get_mask("grouped_tril", seq_lens=lens.clone())
    numbers = {
        "block_diffusion": {"length": n // 2, "block": min(32, n // 16)},
        "prefix_lm": {"prefix_len": n // 4},
        "sink_window": {"sinks": min(64, n // 16), "window": min(1024, n // 4)},
    }
    return lambda: get_mask(case.mask, **numbers[case.mask])


def intervals_of(seen: Tensor) -> Tensor:
    """Return the keys that each query sees as cuDNN takes them, from booleans [batch, queries, keys].

    Int32 [1, n, batch * queries] with n odd: row i sees keys in [0, F0), [F1, F2), ...
    """
    batch, length, _ = seen.shape
    edges, widest = [], 1
    for one in seen:
        padded = F.pad(one, (1, 1))
        rows, keys = (padded[:, 1:] != padded[:, :-1]).nonzero(as_tuple=True)
        counts = torch.bincount(rows, minlength=length)
        place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        place = place + torch.where(one[:, 0], -1, 1)[rows]  # F0 is 0 unless the first key is seen
        is_kept = place >= 0
        edges.append((rows[is_kept], place[is_kept], keys[is_kept]))
        widest = max(widest, 1 + int(place.max()))
    func = torch.zeros(batch, length, widest + 1 - widest % 2, dtype=torch.int64, device=seen.device)
    for of_batch, (rows, place, keys) in zip(func, edges, strict=True):
        of_batch[rows, place] = keys
    return func.cummax(-1).values.flatten(0, 1).t().contiguous()[None].int()  # what is left over sees nothing


class Way(NamedTuple):
    """A way to run the call, in torch's deterministic mode or not."""

    who: str
    is_deterministic: bool
    with_new: Callable[[], Step]  # makes the next mask, and returns a step with it
    with_old: Step
    plan: Callable[[], object] | None = None  # what has to be done for each new mask, if that is a call of its own


@dataclass
class Ready:
    """A case whose kernels are compiled."""

    case: Case
    ways: list[Way] = field(default_factory=list)
    about: dict[tuple[str, bool], Row] = field(default_factory=dict)  # what is known before times, by who and mode
    left_out: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def _mode(is_deterministic: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def ready(case: Case, device: torch.device, deadline: float | None = None) -> Ready:
    """Run the first steps of all ways, which compile; those that differ or fail are left out.

    deadline: the time after which none is compiled.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    makers = [mask_of(case, generator) for _ in range(_DRAWS)]
    shape = case.batch, case.length, case.heads, case.size
    q, k, v, upstream = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    made = Ready(case)

    def both(out: Tensor) -> tuple[Tensor, ...]:
        """Return output and gradients, all [batch, length, heads, size]."""
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    def ours(backend: str, is_deterministic: bool) -> Way:
        def with_mask(mask: Mask) -> Step:
            def step() -> tuple[Tensor, ...]:
                out: Tensor = attention(*(x.transpose(1, 2) for x in leaves), mask=mask, backend=backend)
                return both(out.transpose(1, 2))

            return step

        next_maker = itertools.cycle(makers)
        return Way(backend, is_deterministic, lambda: with_mask(next(next_maker)()), with_mask(makers[0]()))

    @functools.cache
    def funcs() -> list[Tensor]:
        made = []
        for make in makers:
            seen = dense_mask(make(), case.length, case.length, batch=case.batch, device=device)
            made.append(intervals_of(seen.expand(case.batch, 1, -1, -1)[:, 0]))
            del seen
        if device.type == "cuda":
            torch.cuda.empty_cache()  # several cases may be prepared at once, and such a mask takes gigabytes
        return made

    def cudnn(is_deterministic: bool) -> Way:
        package = importlib.import_module("cudnn")
        next_func = itertools.cycle(funcs())

        def with_plan(plan: Any) -> Step:
            return lambda: both(package.flex_attn_func(*leaves, mask_plan=plan, deterministic=is_deterministic))

        def plan(func: Tensor) -> Any:
            return package.create_mask_plan(func.clone(), *leaves, build_backward=True)

        held, func = plan(funcs()[0]), funcs()[0]
        return Way(
            CUDNN, is_deterministic, lambda: with_plan(plan(next(next_func))), with_plan(held), lambda: plan(func)
        )

    by_head, taken = [x.transpose(1, 2) for x in leaves], {}
    for mode in (False, True):
        with _mode(mode):
            taken[mode] = explain(*by_head, mask=makers[0]()).backend
    has_flash = case.length <= 8192 or taken[False] == BACKEND
    backends = [taken[False], *(["flex_flash"] if has_flash else [])]
    # cuDNN comes early, and is compared with "flex".
    todo = [("flex", False), (CUDNN, False), (CUDNN, True), ("flex", True), (taken[True], True)]
    todo += [(backend, False) for backend in backends] + [(BACKEND, False), (BACKEND, True)]
    if device.type != "cuda":
        todo = [(taken[False], False), (CUDNN, False), (CUDNN, True), (taken[True], True)]
    expected: tuple[Tensor, ...] | None = None
    for who, mode in dict.fromkeys(todo):
        name = f"{who}{', deterministic' if mode else ''}"
        if deadline is not None and time.time() > deadline:
            made.left_out[name] = "no time to compile"
            continue
        progress(f"{case.mask}, {case.describe()}, {name}: first steps")
        try:
            with _mode(mode):
                way = cudnn(mode) if who == CUDNN else ours(who, mode)
                output = way.with_old()
                same = [all(map(torch.equal, output, way.with_old())) for _ in range(5 if mode else 1)]
                for _ in range(2 * _DRAWS):
                    way.with_new()()
                synchronize(device)
            expected = output if expected is None else expected
            error = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(output, expected, strict=True))
            if not error <= _TOLERANCE:
                raise ValueError(f"its results differ by {error:.3g} from those of {made.ways[0].who}")
            results: Row = {"error": float(f"{error:.2g}"), "is_auto": who == taken[mode]}
            if mode:
                results["same_bits"] = all(same)
            made.about[who, mode] = results
            made.ways.append(way)
        except Exception as error:
            made.left_out[name] = reason_of(name, error)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return made


def timed(made: Ready, device: torch.device, seconds: float | None = None) -> list[Row]:
    """Return the times of all ways, by turns, for as long as there is time, at least one round.

    gpu_ms: the GPU's time of both passes. host_ms: the host's time to start them. ms: all in, the same mask at each
    step. new_ms: all in, a new mask at each step. layers_ms: all in, a new mask for all layers of a step, by layer.
    plan_ms: cuDNN's plan of a mask.
    """
    case, times = made.case, dict[tuple[str, bool], dict[str, list[float]]]()
    start = time.perf_counter()
    for number in range(1 + _ROUNDS):
        ways = list(made.ways)
        random.Random(number).shuffle(ways)
        for way in ways:
            with _mode(way.is_deterministic):
                figures = _figures(way, case.mask in _FIXED, device)
            if number:  # the first round warms up
                kept = times.setdefault((way.who, way.is_deterministic), {})
                for name, ms in figures.items():
                    kept.setdefault(name, []).append(ms)
        if number and time.perf_counter() - start > (_SECONDS if seconds is None else seconds):
            break
    rows: list[Row] = []
    for (who, mode), by_name in sorted(times.items(), key=lambda item: (item[0][1], item[0][0])):
        about: Row = {"case": case.mask, "shape": case.describe(), "length": case.length, "who": who}
        about |= {"deterministic": mode, "dtype": "bfloat16" if device.type == "cuda" else "float32"}
        medians = {name: float(f"{statistics.median(ms):.4g}") for name, ms in by_name.items()}
        rows.append(about | medians | made.about[who, mode] | {"rounds": len(by_name["ms"])})
    if made.left_out and rows:
        rows[0]["left_out"] = made.left_out
    return rows


def _figures(way: Way, is_fixed: bool, device: torch.device) -> dict[str, float]:
    """Return the times of one round in milliseconds."""

    def layers() -> None:
        step = way.with_new()
        for _ in range(LAYERS):
            step()

    clock = functools.partial(wall_milliseconds, device=device)
    found = {"ms": clock(way.with_old, calls_in_a_row=_DRAWS)}
    if not is_fixed:
        found["new_ms"] = clock(lambda: way.with_new()(), calls_in_a_row=_DRAWS)
        found["layers_ms"] = clock(layers) / LAYERS
    if way.plan is not None:
        found["plan_ms"] = clock(way.plan, calls_in_a_row=_DRAWS)
    if device.type == "cuda":
        found["gpu_ms"], found["host_ms"] = _apart(way.with_old, device)
    return found


def _apart(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return milliseconds of the GPU with empty caches, and of the host, of one call that the GPU starts late."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize(device)
    give_head_start(device, _HEAD_START_GIGABYTES)
    first.record()
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    last.record()
    synchronize(device)
    return first.elapsed_time(last), host * 1e3


def _rows(case: Case, device: torch.device) -> list[Row]:
    torch.compiler.reset()
    return timed(ready(case, device), device)


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    cases = _QUICK if quick or device.type != "cuda" else _CASES
    return {f"{case.mask}, {case.describe()}": functools.partial(_rows, case, device) for case in cases}


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("mask", "case"), ("shape", "shape"), ("who", "who"), ("auto", "is_auto"), ("deterministic", "deterministic"),
        ("GPU ms", "gpu_ms"), ("host ms", "host_ms"), ("ms", "ms"), ("new mask", "new_ms"), ("by layer", "layers_ms"),
        ("plan", "plan_ms"), ("error", "error"), ("same bits", "same_bits"), ("rounds", "rounds"),
    )  # fmt: skip
    return text_table(results, columns)


_ByWho = dict[tuple[str, bool], Row]  # by who and whether in deterministic mode


def _cases(results: dict[str, Any]) -> dict[tuple[str, str], _ByWho]:
    """Return the rows by mask and sizes."""
    cases: dict[tuple[str, str], _ByWho] = {}
    for row in results["rows"]:
        cases.setdefault((row["case"], row["shape"]), {})[row["who"], row["deterministic"]] = row
    return cases


def _pair(ways: _ByWho, figure: str, is_deterministic: bool = False) -> tuple[float | None, float | None]:
    """Return the least figure of the other backends, and that of cuDNN."""
    ours = [
        row[figure]
        for (who, mode), row in ways.items()
        if who not in (CUDNN, BACKEND) and mode == is_deterministic and row.get(figure) is not None
    ]
    return min(ours, default=None), ways.get((CUDNN, is_deterministic), {}).get(figure)


def _decides(ways: _ByWho) -> str:
    """Return the figure by which the rule is judged: all in, with one plan for the layers of a step."""
    return "layers_ms" if any("layers_ms" in row for row in ways.values()) else "ms"


def _cell(ours: float | None, theirs: float | None) -> str:
    if ours is None or theirs is None:
        return "" if ours is theirs else " / ".join("-" if x is None else f"{x:.3g}" for x in (ours, theirs))
    return f"{ours:.3g} / {theirs:.3g} ({ours / theirs:.2f})"


class Judged(NamedTuple):
    """The cases of one mode by what the rule says of them, with how many times as fast cuDNN is."""

    faster: list[str]  # as much as the rule asks for, than the backend that "auto" takes too
    open: list[str]  # as much, but the backend that "auto" takes was not measured
    others: list[str]


def judged(results: dict[str, Any], is_deterministic: bool) -> Judged:
    """Return which cases count for a backend. Slower than any backend here is slower than the fastest."""
    found = Judged([], [], [])
    for (mask, shape), ways in _cases(results).items():
        ours, theirs = _pair(ways, _decides(ways), is_deterministic)
        if ours is None or theirs is None:
            continue
        has_auto = any(row["is_auto"] for (who, mode), row in ways.items() if mode == is_deterministic)
        kind = found.others if ours / theirs < BAR else found.faster if has_auto else found.open
        kind.append(f"{mask} {shape} ({ours / theirs:.2f})")
    return found


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run, and what follows from it."""
    header = ["mask", "sizes", "GPU", "host", "same mask", "new mask", f"{LAYERS} layers", "plan", "deterministic"]
    lines = []
    for (mask, shape), ways in _cases(results).items():
        figures = [_cell(*_pair(ways, name)) for name in ("gpu_ms", "host_ms", "ms", "new_ms", "layers_ms")]
        plan = ways.get((CUDNN, False), {}).get("plan_ms")
        lines.append(
            [mask, shape, *figures, "" if plan is None else f"{plan:.3g}", _cell(*_pair(ways, _decides(ways), True))]
        )
    package = f", {results['machine']['cudnn']}" if "cudnn" in results["machine"] else ""
    about = (
        f"{measured_on(results)}{package}; the fastest other backend / cuDNN, in brackets how many times "
        "as fast cuDNN is. Milliseconds of a forward and a backward pass, medians by turns."
    )
    return "\n\n".join([about, github_table(lines, header), _verdict(results)])


def _verdict(results: dict[str, Any]) -> str:
    """Return what the rule says."""
    parts, is_met, is_open = [], False, False
    for mode, where in ((False, ""), (True, " in deterministic mode")):
        found = judged(results, mode)
        count, decided = len(found.faster), len(found.faster) + len(found.others)
        is_met = is_met or count >= _BAR_CASES
        is_open = is_open or count + len(_CASES) - decided >= _BAR_CASES
        told = f": {'; '.join(found.faster)}" if found.faster else ""
        parts.append(f"All in, cuDNN is at least {BAR} times as fast in {count} of {decided} cases{where}{told}.")
        if found.open:
            parts.append(
                f"{len(found.open)} more{where} are open: it is as much faster than what was measured, but `auto` took "
                f"a backend that was not: {'; '.join(found.open)}."
            )
    if is_met:
        parts.append("So the rule asks for a backend, which is built: `cudnn`.")
    elif is_open:
        parts.append("So these figures do not ask for a backend; the cases that they lack could.")
    else:
        parts.append("So the rule asks for no backend.")
    return "\n\n".join(filter(None, [_costs(results), " ".join(parts), _not_measured(results)]))


def _costs(results: dict[str, Any]) -> str:
    """Return why cuDNN's kernels are not as much faster, all in, as on the GPU alone."""
    cases = _cases(results).values()
    pairs = {name: [_pair(ways, name) for ways in cases] for name in ("gpu_ms", "host_ms")}
    both = {name: [(a, b) for a, b in found if a is not None and b is not None] for name, found in pairs.items()}
    plans = [row["plan_ms"] for ways in cases for (_, mode), row in ways.items() if not mode and "plan_ms" in row]
    if not (both["gpu_ms"] and both["host_ms"] and plans):
        return ""
    shares = [theirs / ours for ours, theirs in both["gpu_ms"]]
    ours, theirs = zip(*both["host_ms"], strict=True)
    return (
        f"cuDNN's kernels take {_range(shares)} of the GPU's time of the fastest other backend. But to start "
        f"both passes takes the host {_range(theirs)} ms, against {_range(ours)} ms of the others, and each plan "
        f"another {_range(plans)} ms and a wait for the GPU."
    )


def _range(figures: Sequence[float]) -> str:
    return f"{min(figures):.2f} to {max(figures):.2f}"


def _not_measured(results: dict[str, Any]) -> str:
    """Return the cases that the results lack, by sizes."""
    there, lacking = _cases(results), dict[str, list[str]]()
    for case in _CASES:
        if (case.mask, case.describe()) not in there:
            lacking.setdefault(case.describe(), []).append(case.mask)
    told = [f"{shape} {'all' if len(names) == len(_MASKS) else ', '.join(names)}" for shape, names in lacking.items()]
    return f"Not measured in this run: {'; '.join(told)}." if told else ""


def cudnn_version() -> str:
    """Return the version of cuDNN's frontend, or that it is not installed."""
    try:
        return f"nvidia-cudnn-frontend {importlib.metadata.version('nvidia-cudnn-frontend')}"
    except importlib.metadata.PackageNotFoundError:
        return "without nvidia-cudnn-frontend"


BENCHMARK = Benchmark("intervals", _todo, table)
