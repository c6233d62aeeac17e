"""`python recipes/benchmark.py documents`: packed documents, against varlen kernels and compiled flex."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.chart import bars
from benchmarks.loops import compiled_create, compiled_flex
from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.runner import reason_of
from benchmarks.steps_tables import github_table
from flexmasks.attention import attention, explain
from flexmasks.bench.clock import interleaved, progress, wall_milliseconds
from flexmasks.masks.packed import packed
from flexmasks.planning import plan
from flexmasks.spec.arguments import get_mask
from flexmasks.spec.values import Mask

# Different documents, which the steps take by turns: a time is the mean over all of them. So many more or fewer they
# are, because batches of packed documents do not have the same number of them.
_MORE = (0, 3, -2, 1, -3, 2, -1, 0)
_DRAWS = len(_MORE)
_RUNS = 9
_WARM_STEPS = 2 * _DRAWS  # plans of new tensors are exact at first, then recorded; all draws are held by then
_TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}  # largest difference of outputs of random tokens
FORWARD, BOTH = "forward", "both"
NEW, REPEATED, HELD, PACKED = "flexmasks", "flexmasks, repeated mask", "flexmasks, held plan", "flexmasks, packed"
PROMISED = "flexmasks, contiguous"
FA4, VARLEN, FLEX = "FA4 varlen", "torch varlen_attn", "compiled flex"
CUDNN, CUDNN_NEW = "cuDNN, ready plan", "cuDNN, new plan"
_OURS = NEW, PROMISED, PACKED, REPEATED, HELD
_WHO = *_OURS, FA4, VARLEN, CUDNN, CUDNN_NEW, FLEX
# The most of the time of FlashAttention 4, called directly, that flexmasks may take.
_BAR_LONG, _BAR_SHORT, _BAR_HELD = 1.15, 1.5, 1.1
_LONG = 32768  # tokens of a batch from which the first one holds
Step = Callable[[int], Tensor]  # from the number of a draw to the output


class Case(NamedTuple):
    """Documents laid end to end in the rows of a batch, causal, or also within a window."""

    batch: int
    length: int
    documents: int  # in the whole batch, on average
    heads: int
    kv_heads: int
    size: int
    window: int | None = None  # keys before a query that it sees

    @property
    def mask(self) -> str:
        return "causal & document" if self.window is None else f"sliding_window({self.window:,}) & document"

    def describe(self) -> str:
        """Return the sizes in words."""
        heads = f"{self.heads} / {self.kv_heads}" if self.heads != self.kv_heads else f"{self.heads}"
        rows = "" if self.batch == 1 else f"{self.batch} x "
        return f"{rows}{self.length:,} tokens, {self.documents} documents, {heads} heads, D = {self.size}"


_CASES = [
    Case(1, 32768, 24, 32, 8, 128),
    Case(1, 32768, 48, 24, 24, 64),
    Case(1, 16384, 64, 16, 16, 128),
    Case(1, 16384, 16, 16, 16, 64),
    Case(4, 8192, 32, 16, 16, 64),
    Case(4, 8192, 32, 32, 8, 128),
    Case(1, 32768, 24, 32, 8, 128, window=1024),
    Case(1, 32768, 48, 24, 24, 64, window=1024),
]
_QUICK = [Case(1, 128, 5, 4, 2, 16), Case(2, 64, 4, 2, 2, 16, window=10)]


def draw(case: Case, generator: torch.Generator, more: int = 0) -> Tensor:
    """Return ids of documents with random cuts, [batch, length]; the rows of a batch cut too.

    more: how many more documents there are than in the case on average.
    """
    tokens = case.batch * case.length
    order = torch.rand(tokens - 1, generator=generator, device=generator.device)
    is_first = torch.zeros(tokens, dtype=torch.bool, device=generator.device)
    is_first[order.topk(case.documents + more - 1).indices + 1] = True
    return is_first.cumsum(0).view(case.batch, case.length)


def offsets_of(ids: Tensor) -> Tensor:
    """Return where the documents of all rows start, and the end of the last, int32."""
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[:, 1:] = ids.diff() != 0
    return F.pad(is_first.flatten().nonzero().flatten(), (0, 1), value=ids.numel()).int()


def intervals_of(ids: Tensor, window: int | None) -> Tensor:
    """Return the keys that each query sees as cuDNN takes them: row i sees [0, F0) and [F1, F2), [1, 3, tokens]."""
    places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32)
    is_first = F.pad(ids.diff() != 0, (1, 0), value=True)
    starts = torch.where(is_first, places, 0).cummax(1).values
    if window is not None:
        starts = torch.maximum(starts, places - window)
    edges = torch.zeros_like(starts), starts, (places + 1).expand_as(starts)
    return torch.stack([x.flatten() for x in edges])[None].int()


class _Setting:
    """The tensors of a case. q, k and v lie in memory as models make them: [batch, length, heads, size]."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)
        sizes = (case.heads, case.kv_heads, case.kv_heads)

        def normal(heads: int) -> Tensor:
            shape = case.batch, case.length, heads, case.size
            return torch.randn(shape, device=device, dtype=dtype, generator=generator)

        self.case = case
        self.leaves = tuple(normal(heads).requires_grad_() for heads in sizes)
        self.upstream = normal(case.heads)
        self.ids = [draw(case, generator, more) for more in _MORE]
        self.offsets = [offsets_of(ids) for ids in self.ids]

    def by_head(self) -> list[Tensor]:
        return [x.transpose(1, 2) for x in self.leaves]

    def in_one_row(self) -> list[Tensor]:
        """Return q, k and v as [tokens, heads, size]."""
        return [x.flatten(0, 1) for x in self.leaves]

    def shaped(self, out: Tensor) -> Tensor:
        """Return an output of one row as [batch, length, heads, size]."""
        return out.view(self.upstream.shape)


def mask_of(case: Case, ids: Tensor, contiguous: bool = False) -> Mask:
    """Return the mask as users of this library write it."""
    inner = get_mask("causal") if case.window is None else get_mask("sliding_window", window=case.window)
    return inner & get_mask("document", document_ids=ids, **({"contiguous": True} if contiguous else {}))


def _ours(setting: _Setting) -> dict[str, Step]:
    case = setting.case
    masks = [mask_of(case, ids) for ids in setting.ids]
    sizes: dict[str, Any] = {"batch": case.batch, "heads": case.heads}
    plans = [plan(mask, case.length, **sizes) for mask in masks]
    inner: dict[str, Any] = (
        {"inner": "causal"} if case.window is None else {"inner": "sliding_window", "window": case.window}
    )

    def attend(mask: Any) -> Tensor:
        out: Tensor = attention(*setting.by_head(), mask=mask)
        return out.transpose(1, 2)

    def by_offsets(i: int) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in setting.in_one_row())
        out: Tensor = attention(q, k, v, mask=packed(offsets=setting.offsets[i].clone(), **inner))
        return setting.shaped(out[0].transpose(0, 1))

    return {
        NEW: lambda i: attend(mask_of(case, setting.ids[i].clone())),
        REPEATED: lambda i: attend(masks[i]),
        HELD: lambda i: attend(plans[i]),
        PACKED: by_offsets,
        PROMISED: lambda i: attend(mask_of(case, setting.ids[i].clone(), contiguous=True)),
    }


def _fa4(setting: _Setting) -> Step:
    varlen = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    case = setting.case
    band: dict[str, Any] = {"causal": True} if case.window is None else {"window_size": (case.window, 0)}
    band |= {"max_seqlen_q": case.length, "max_seqlen_k": case.length}

    def step(i: int) -> Tensor:
        starts = setting.offsets[i]
        out = varlen(*setting.in_one_row(), cu_seqlens_q=starts, cu_seqlens_k=starts, **band)
        return setting.shaped(out[0] if isinstance(out, tuple) else out)

    return step


def _varlen_attn(setting: _Setting) -> Step:
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    case, known = setting.case, inspect.signature(varlen_attn).parameters
    if "window_size" in known:
        band: dict[str, Any] = {"window_size": (-1 if case.window is None else case.window, 0)}
    elif case.window is None:
        band = {"is_causal": True}
    else:
        raise ValueError("it knows no windows")
    if "enable_gqa" in known:
        band["enable_gqa"] = case.heads != case.kv_heads

    def step(i: int) -> Tensor:
        starts = setting.offsets[i]
        out = varlen_attn(*setting.in_one_row(), starts, starts, case.length, case.length, **band)
        return setting.shaped(out)

    return step


def _cudnn(setting: _Setting, is_ready: bool) -> Step:
    cudnn = importlib.import_module("cudnn")
    made: dict[tuple[int, bool], Any] = {}

    def plan_of(i: int) -> Any:
        return cudnn.create_mask_plan(intervals_of(setting.ids[i], setting.case.window), *setting.leaves)

    def step(i: int) -> Tensor:
        key = i, torch.is_grad_enabled()
        if is_ready and key not in made:
            made[key] = plan_of(i)
        out: Tensor = cudnn.flex_attn_func(*setting.leaves, mask_plan=made[key] if is_ready else plan_of(i))
        return out

    return step


def _flex(setting: _Setting) -> Step:
    case, create, flex = setting.case, compiled_create(), compiled_flex()

    def step(i: int) -> Tensor:
        ids, window = setting.ids[i].clone(), case.window
        if window is None:
            visible = lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv])  # noqa: E731
        else:
            visible = lambda b, h, q, kv: (q >= kv) & (q - kv <= window) & (ids[b, q] == ids[b, kv])  # noqa: E731
        block_mask = create(visible, case.batch, case.length, ids.device)
        out = flex(*setting.by_head(), block_mask=block_mask, enable_gqa=case.heads != case.kv_heads)
        return out.transpose(1, 2)

    return step


_RIVALS: dict[str, Callable[[_Setting], Step]] = {
    FA4: _fa4,
    VARLEN: _varlen_attn,
    CUDNN: functools.partial(_cudnn, is_ready=True),
    CUDNN_NEW: functools.partial(_cudnn, is_ready=False),
    FLEX: _flex,
}


def _pass_of(setting: _Setting, step: Step, kind: str) -> Callable[[], Tensor]:
    """Return a step that takes the next draw each time, forward or also backward."""
    numbers = itertools.cycle(range(_DRAWS))

    def forward() -> Tensor:
        with torch.no_grad():
            return step(next(numbers))

    def both() -> Tensor:
        out = step(next(numbers))
        torch.autograd.grad(out, setting.leaves, setting.upstream)
        return out.detach()

    return forward if kind == FORWARD else both


@dataclass
class Ready:
    """A case whose kernels are compiled."""

    setting: _Setting
    dtype: torch.dtype
    calls: dict[str, dict[str, Callable[[], Tensor]]]  # by kind of passes and by who
    differences: dict[tuple[str, str], float]  # of outputs from those of flexmasks, by kind and who
    left_out: dict[str, str]  # why, by who


def ready(case: Case, device: torch.device) -> Ready:
    """Run the first steps of all ways, which compile.

    Raises ValueError if outputs of flexmasks differ; any other implementation that fails or differs is left out.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    setting = _Setting(case, device, dtype)
    steps, made = _ours(setting), Ready(setting, dtype, {FORWARD: {}, BOTH: {}}, {}, {})
    for who, make in _RIVALS.items() if device.type == "cuda" else ():
        try:
            steps[who] = make(setting)
        except Exception as error:
            made.left_out[who] = reason_of(who, error)
    for kind, calls in made.calls.items():
        expected: Tensor | None = None
        for who, step in list(steps.items()):
            progress(f"{kind}, {who}: first steps")
            try:
                call = _pass_of(setting, step, kind)
                outputs = [call() for _ in range(_WARM_STEPS)]
                expected = outputs[-1] if expected is None else expected
                made.differences[kind, who] = difference = float((outputs[-1] - expected).abs().max())
                if not difference <= _TOLERANCE[dtype]:
                    raise ValueError(f"its output differs by {difference:.3g} from that of {NEW}")
                calls[who] = call
            except Exception as error:
                if who in _OURS:
                    raise
                made.left_out[who] = reason_of(who, error)
                del steps[who]
    return made


def timed(made: Ready, runs: int) -> list[Row]:
    """Return the times of forward passes and of both passes, everything in."""
    case, device = made.setting.case, made.setting.upstream.device
    rows: list[Row] = []
    for kind, calls in made.calls.items():
        clock = functools.partial(wall_milliseconds, calls_in_a_row=_DRAWS)
        times = interleaved(calls, device, runs, clock)
        about = {"kind": kind, "case": case.mask, "shape": case.describe(), "tokens": case.batch * case.length}
        for who, (ms, iqr) in times.items():
            figures = {"ms": float(f"{ms:.4g}"), "iqr": float(f"{iqr:.3g}"), "difference": made.differences[kind, who]}
            rows.append({**about, "dtype": str(made.dtype)[6:], "who": who, **figures})
        by_grad = [x if kind == BOTH else x.detach() for x in made.setting.by_head()]
        new = next(row for row in rows if (row["kind"], row["who"]) == (kind, NEW))
        new["backend"] = explain(*by_grad, mask=mask_of(case, made.setting.ids[0].clone())).backend
    if made.left_out:
        rows[0]["left_out"] = made.left_out
    return rows


def _rows(case: Case, device: torch.device, runs: int) -> list[Row]:
    torch.compiler.reset()
    return timed(ready(case, device), runs)


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_small = quick or device.type != "cuda"
    return {
        f"{case.mask}, {case.describe()}": functools.partial(_rows, case, device, 2 if is_small else _RUNS)
        for case in (_QUICK if is_small else _CASES)
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("mask", "case"), ("sizes", "shape"), ("passes", "kind"), ("way", "who"), ("backend", "backend"), ("ms", "ms"),
        ("IQR", "iqr"), ("difference", "difference"),
    )  # fmt: skip
    return text_table(results, columns)


_ByWho = dict[tuple[str, str], float]  # milliseconds by who and kind


def _cases(results: dict[str, Any]) -> dict[tuple[str, str], _ByWho]:
    """Return the times by mask and sizes."""
    cases: dict[tuple[str, str], _ByWho] = {}
    for row in results["rows"]:
        cases.setdefault((row["case"], row["shape"]), {})[row["who"], row["kind"]] = row["ms"]
    return cases


def _share(ms: _ByWho, who: str, kind: str) -> float | None:
    """Return the time as a share of FlashAttention 4's, if both were measured."""
    own, base = ms.get((who, kind)), ms.get((FA4, kind))
    return None if own is None or base is None else own / base


def _is_above(who: str, tokens: int, share: float) -> bool:
    """Return whether a time of flexmasks is above its bar."""
    is_held = who in (REPEATED, HELD)
    return who in _OURS and share > (_BAR_HELD if is_held else _BAR_LONG if tokens >= _LONG else _BAR_SHORT)


def _tokens(results: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(row["case"], row["shape"]): row["tokens"] for row in results["rows"]}


def _verdict(results: dict[str, Any]) -> str:
    """Return which figures hold the bars."""
    cases, tokens = _cases(results), _tokens(results)
    bars_of = (
        f"Bars, as shares of FlashAttention 4's time: at most {_BAR_LONG} of it for batches of {_LONG:,} tokens and "
        f"{_BAR_SHORT} for shorter ones with new documents at each step, and {_BAR_HELD} where the mask is repeated or "
        "a plan is held."
    )
    lines, all_kept, all_shares = [], 0, 0
    for who in _OURS:
        cells = [who]
        for kind in (FORWARD, BOTH):
            shares = [(at, share) for at, ms in cases.items() if (share := _share(ms, who, kind)) is not None]
            kept = sum(not _is_above(who, tokens[at], share) for at, share in shares)
            least, most = min((x for _, x in shares), default=0.0), max((x for _, x in shares), default=0.0)
            cells.append(f"{least:.2f} to {most:.2f}, {kept} of {len(shares)}" if shares else "")
            all_kept, all_shares = all_kept + kept, all_shares + len(shares)
        if any(cells[1:]):
            lines.append(cells)
    if not lines:
        return f"{bars_of} FlashAttention 4 was not measured."
    text = f"{bars_of} {all_kept} of {all_shares} figures hold them, and those above are bold."
    header = ["shares, and how many hold the bar", "forward", "forward and backward"]
    return f"{text}\n\n{github_table(lines, header)}"


def _promise(results: dict[str, Any]) -> str:
    """Return what the promise that documents lie end to end saves or costs."""
    ratios = [ms[PROMISED, k] / ms[NEW, k] for ms in _cases(results).values() for k in (FORWARD, BOTH)
              if (PROMISED, k) in ms and (NEW, k) in ms]  # fmt: skip
    if not ratios:
        return ""
    return f" With `contiguous=True` a call takes {min(ratios):.2f} to {max(ratios):.2f} of the time without."


def _not_measured(results: dict[str, Any]) -> str:
    """Return the cases that the results lack."""
    there = _cases(results)
    lacking = [f"{case.mask}, {case.describe()}" for case in _CASES if (case.mask, case.describe()) not in there]
    return f"Not measured in this run: {'; '.join(lacking)}." if lacking else ""


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run."""
    lines, tokens = [], _tokens(results)
    for at, ms in _cases(results).items():
        cells = [", ".join(at)]
        for who in _WHO:
            texts = []
            for kind in (FORWARD, BOTH):
                own, share = ms.get((who, kind)), _share(ms, who, kind)
                mark = "**" if share is not None and _is_above(who, tokens[at], share) else ""
                texts.append("-" if own is None else f"{own:.3g}" + (f" ({mark}{share:.2f}{mark})" if share else ""))
            cells.append("" if texts == ["-", "-"] else " / ".join(texts))
        lines.append(cells)
    backends = {row["backend"] for row in results["rows"] if "backend" in row}
    widest = max(row["iqr"] / row["ms"] for row in results["rows"])
    about = (
        "forward / forward and backward pass in milliseconds, medians of runs by turns, in brackets as shares of "
        f"FlashAttention 4's. The middle half of the runs spans up to {widest:.0%} of a median. With new documents "
        f"flexmasks takes the backend {' or '.join(sorted(backends))}.{_promise(results)}"
    )
    missing = [f"- {who}: {why}" for row in results["rows"] for who, why in row.get("left_out", {}).items()]
    parts = [f"{measured_on(results)}; {about}", github_table(lines, ["documents", *_WHO]), _verdict(results)]
    parts += filter(None, [_not_measured(results)])
    if missing:
        parts.append("\n".join(["Left out, in some cases:", "", *dict.fromkeys(missing)]))
    return "\n\n".join(parts)


def headline(results: dict[str, Any]) -> tuple[int, float, float, float]:
    """Return the number of documents of the first case, and what both passes take here, by flex and by FA4 varlen."""
    (_, sizes), ms = next(iter(_cases(results).items()))
    count = next(case.documents for case in _CASES if case.describe() == sizes)
    return count, ms[NEW, BOTH], ms[FLEX, BOTH], ms[FA4, BOTH]


def sentence(results: dict[str, Any]) -> str:
    """Return the sizes of the first case and what FlashAttention 4 takes, as the end of a sentence."""
    case, least = _CASES[0], headline(results)[-1]
    return (
        f"; packed documents are {case.length:,} tokens, {case.heads} heads in groups of "
        f"{case.heads // case.kv_heads}, for which FlashAttention 4's varlen function takes {least:.3g}"
    )


def chart(results: dict[str, Any]) -> str:
    """Return the times of both passes as a picture, in shares of FlashAttention 4's."""
    groups: dict[str, Sequence[tuple[str, float]]] = {}
    for (mask, sizes), ms in _cases(results).items():
        if (FA4, BOTH) in ms:
            base = ms[FA4, BOTH]
            groups[f"{mask}: {sizes}"] = [(who, ms[who, BOTH] / base) for who in _WHO if (who, BOTH) in ms]
    return bars("Forward and backward pass, as a share of FlashAttention 4's varlen function", groups, line=1.0)


BENCHMARK = Benchmark("documents", _todo, table)
