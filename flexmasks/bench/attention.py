"""`python -m flexmasks bench attention`: attention with masks and scores, against what else there is for it."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from flexmasks.attention import attention, block_mask, dense_mask, explain
from flexmasks.backends.flex import separate
from flexmasks.bench.blocks import backward_twice, chosen, known_names, machine, measure
from flexmasks.bench.console import progress, synchronize
from flexmasks.bench.timing import interleaved
from flexmasks.spec.arguments import get_mask, get_score
from flexmasks.spec.definitions import definition, is_own
from flexmasks.spec.examples import at_most, fitting, on_device
from flexmasks.spec.parameters import Size
from flexmasks.spec.registry import list_masks, list_scores
from flexmasks.spec.values import Mask, Score

_RUNS = 7
_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Case:
    """A mask and a score over q, k, v [batch, heads, length, size], and who else computes the same."""

    name: str
    mask: Mask
    score: Score | None = None
    # Those of FlashAttention 4's own keyword arguments that say the same, if any do.
    fa4: dict[str, Any] | None = None
    is_causal: bool | None = None  # SDPA's argument, where it says the same
    batch: int | None = None
    length: int | None = None
    lengths: Tensor | None = field(default=None, repr=False)  # of documents laid end to end


def cases(batch: int, heads: int, length: int, device: torch.device) -> list[Case]:
    """What is measured, at its parameters for a length; a canvas is as square as powers of two allow."""
    generator = torch.Generator().manual_seed(0)
    rows = 1 << (int(math.log2(length)) // 2)
    canvas = {"height": rows, "width": length // rows}
    window = min(1024, length // 4)
    halves = torch.arange(length, device=device) * 2 // length
    lens = torch.randint(length // 4, length + 1, (batch,), generator=generator).to(device)
    causal = get_mask("causal")
    documents = torch.randint(64, 1137, (57 * 4,), generator=generator)
    total = 4 * length
    documents = documents[: int((documents.cumsum(0) <= total).sum())]
    documents = torch.cat([documents, (total - documents.sum())[None]]) if documents.sum() < total else documents
    ids = torch.arange(len(documents)).repeat_interleave(documents).to(device)
    return [
        Case("full", get_mask("full"), fa4={}, is_causal=False),
        Case("causal", causal, fa4={"causal": True}, is_causal=True),
        Case(
            "sliding_window",
            get_mask("sliding_window", window=window),
            fa4={"causal": True, "window_size": (window, 0)},
        ),
        Case("prefix_lm", get_mask("prefix_lm", prefix_len=length // 4)),
        Case("document, causal", causal & get_mask("document", document_ids=halves)),
        Case("grouped_tril", get_mask("grouped_tril", seq_lens=lens)),
        Case("sasa", get_mask("sasa", window=8, **canvas)),
        Case("natten", get_mask("natten", kernel=7, **canvas)),
        Case("alibi, causal", causal, get_score("alibi")),
        Case("softcap, causal", causal, get_score("softcap", cap=30.0), fa4={"causal": True, "softcap": 30.0}),
        Case(
            "packed documents",
            causal & get_mask("document", document_ids=ids),
            fa4={"causal": True},
            batch=1,
            length=total,
            lengths=documents.to(device),
        ),
    ]


def bench(
    masks: Sequence[str] = (),
    scores: Sequence[str] = (),
    *,
    registry: bool = False,
    lengths: Sequence[int] = (),
    sizes: Iterable[int] = (),
    device: str | None = None,
    file: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Measure, print a table, and write the figures to a JSON file where one is named.

    Args:
        masks: names of the comparisons of `cases`, and of other registered masks. Without any names, all of `cases`.
        scores: names of registered scores, which are measured under causal.
        registry: every registered mask and score at its example, and none of `cases`.
        resume: go on with what the file has of an earlier run.
        lengths, sizes: numbers of tokens and head sizes, where not the usual ones of the device.
    """
    at = chosen(device)
    large = at.type == "cuda"
    dtype = torch.bfloat16 if large else torch.float32
    batch, heads, usual = (16, 16, 8192) if large else (1, 8, 4096)
    known = cases(batch, heads, usual, at)
    known_names(masks, [c.name for c in known])
    for score in scores:
        definition("score", score)
    names: list[str] = []
    examples: list[tuple[str, str]] = []
    if registry:
        examples = [("mask", m.name) for m in list_masks()] + [("score", s.name) for s in list_scores()]
    elif masks or scores:
        names = [c.name for c in known if c.name in masks]
        examples = [("mask", m) for m in masks if m not in names] + [("score", s) for s in scores]
    else:
        names = [c.name for c in known if large or c.lengths is None]
    steps: dict[str, Callable[[], list[dict[str, Any]]]] = {}
    for size in sizes or ((64, 128) if large and names else (64,)):
        for length in lengths or (usual,):
            for case in cases(batch, heads, length, at) if names else ():
                if case.name in names:
                    shape = (case.batch or batch, heads, case.length or length, size)
                    steps[f"{case.name}, {list(shape)}"] = functools.partial(_rows, case, shape, dtype, at)
        for length in lengths or ((8192,) if large else (2048,)):
            for kind, name in examples:
                call = functools.partial(_example_rows, kind, name, batch, heads, length, size, dtype, at)
                steps[f"{kind} {name}, {length} tokens, head size {size}"] = call
    results: dict[str, Any] = {"benchmark": "attention", "machine": machine(at), "rows": []}
    with backward_twice():
        measure(results, steps, file, resume)
    print(table(results))
    return results


def table(results: dict[str, Any]) -> str:
    """The figures of one run as text."""
    columns = (
        ("case", "case"), ("shape", "shape"), ("who", "who"), ("backend", "backend"),
        ("forward ms", "forward_ms"), ("TFLOP/s", "forward_tflops"),
        ("backward ms", "backward_ms"), ("TFLOP/s", "backward_tflops"),
        ("first call s", "first_s"), ("peak MB", "peak_mb"),
    )  # fmt: skip
    rows = [[r.get(key) for _, key in columns] for r in results["rows"]]
    about = ", ".join(str(v) for k, v in results["machine"].items() if k != "device_type")
    header = [name for name, _ in columns]
    return f"{about}\n{tabulate(rows, headers=header, floatfmt='.4g', missingval='')}"


_RIVALS = {
    "flex_attention": ("flex_attention",),
    "FlashAttention 4, called directly": ("FA4", "FA4, varlen"),
    "SDPA's own causal, or varlen_attn": ("SDPA", "torch varlen_attn"),
    "SDPA + mask": ("SDPA + mask",),
}


def markdown(results: dict[str, Any]) -> str:
    """The README's table, of a run on a GPU: forward / backward milliseconds, and how much faster both are here."""
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for r in results["rows"]:
        rows.setdefault((r["case"], r["shape"]), {})[r["who"]] = r
    table = []
    for (case, shape), found in rows.items():
        ours = found["flexmasks"]
        cells = [
            case,
            shape.rpartition("x")[2],
            _ms(ours),
            f"{ours['forward_tflops']:.0f} / {ours['backward_tflops']:.0f}",
        ]
        for names in _RIVALS.values():
            rival = next((found[n] for n in names if n in found), None)
            cells.append("" if rival is None else f"{_ms(rival)} ({_total(rival) / _total(ours):.2f} x)")
        table.append(cells)
    shapes = list(dict.fromkeys(shape.rpartition("x")[0] for _, shape in rows))
    machine = results["machine"]
    about = (
        f"On one {machine['device']}, torch {machine['torch']}, {results['rows'][0]['dtype']}, batch x heads x length "
        f"{' and, packed, '.join(shapes)}: forward / backward ms, medians of interleaved runs, and in brackets the "
        "time of both over that of flexmasks."
    )
    header = ["case", "D", "flexmasks", "TFLOP/s", *_RIVALS]
    return f"{about}\n\n{tabulate(table, headers=header, tablefmt='github')}"


def registry_markdown(results: dict[str, Any]) -> str:
    """The README's tables of every registered mask and score, of a run on a GPU."""
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {"mask": {}, "score": {}}
    for r in results["rows"]:
        found[r["kind"]].setdefault(r["case"], {})[r["who"]] = r
    usual = statistics.mode(r["shape"] for r in results["rows"])
    tables, gains = [], []
    for kind, title in (("mask", "mask"), ("score", "score, causal")):
        if not found[kind]:
            continue
        rows = []
        for case in found[kind].values():
            ours = case["flexmasks"]
            name = f"`{ours['example']}`".replace("|", "\\|")
            row = [name if ours["shape"] == usual else f"{name}, {ours['shape']}", ours["backend"], _ms(ours)]
            row.append(f"{ours['forward_tflops']:.3g} / {ours['backward_tflops']:.3g}")
            for who in ("flex_attention", "SDPA + mask"):
                gain = _total(case[who]) / _total(ours) if who in case else None
                if who == "flex_attention" and gain is not None:
                    gains.append(gain)
                row.append("fails" if who in ours.get("left_out", {}) else "" if gain is None else f"{gain:.2f} x")
            rows.append(row)
        header = [title, "backend", "forward / backward ms", "TFLOP/s", "flex_attention", "SDPA + mask"]
        if kind == "score":  # which SDPA has none of
            header, rows = header[:-1], [row[:-1] for row in rows]
        tables.append(tabulate(rows, headers=header, tablefmt="github", disable_numparse=True))
    made = results["machine"]
    about = (
        f"Every registered mask and score at its example, on one {made['device']}, torch {made['torch']}, "
        f"{results['rows'][0]['dtype']}, batch x heads x length x D {usual}: medians of interleaved runs, TFLOP/s of "
        "visible pairs, and how many times as long flex_attention (compiled, its defaults) and SDPA with a dense mask "
        f"take, forward and backward. flex_attention takes {statistics.median(gains):.2f} times as long in the "
        f"median, {min(gains):.2f} to {max(gains):.2f} times."
    )
    missing = [f"`{m.name}`" for m in list_masks() if is_own("mask", m.name) and m.name not in found["mask"]]
    scores = [s.name for s in list_scores() if is_own("score", s.name)]
    missing += [f"the score `{name}`" for name in scores if f"{name}, causal" not in found["score"]]
    if missing:
        about += f" Not measured yet: {', '.join(missing)}."
    return "\n\n".join([about, *tables])


def _ms(row: dict[str, Any]) -> str:
    return f"{row['forward_ms']:.3g} / {row['backward_ms']:.3g}"


def _total(row: dict[str, Any]) -> float:
    return float(row["forward_ms"] + row["backward_ms"])


def _example_rows(
    kind: str, name: str, batch: int, heads: int, length: int, size: int, dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    """The figures of a registered mask, or of a score under causal, at its example.

    Where the example is for one batch element or one head, of as many of the other.
    """
    rows = batch * heads

    def case(value: Mask | Score, length: int) -> tuple[Case, _Shape]:
        there = on_device(value, device)
        mask, score = (there, None) if kind == "mask" else (get_mask("causal"), there)
        failed: list[Exception] = []
        for b, h in ((batch, heads), (1, rows), (rows, 1), (1, 1)):
            try:
                mask.blocks(length, batch=b, heads=h, device=device)
                if score is not None:
                    score.resolve(Size(b, h, length, length, device))
                return Case(name if score is None else f"{name}, causal", mask, score), (b, h, length, size)
            except (ValueError, TypeError) as error:
                failed.append(error)
        raise failed[0]

    _, _, (made, shape) = fitting(kind, name, at_most(length), case)
    about = {"kind": kind, "example": repr(made.mask if made.score is None else made.score)}
    return [{**row, **about} for row in _rows(made, shape, dtype, device)]


def _rows(case: Case, shape: _Shape, dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """The figures of one case, one row for each implementation."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    trains = device.type == "cuda"
    if trains:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    upstream = torch.randn_like(q)
    batch, heads, length, size = shape
    found = case.mask.blocks(length, batch=batch, heads=heads, device=device)
    visible = (1 - found.sparsity) * (1 - found.hidden) * length * length * batch * heads
    calls = _implementations(case, shape, device)
    outputs: dict[str, Tensor] = {}
    rows: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    for who in list(calls):
        try:
            torch.compiler.reset()
            start = time.perf_counter()
            outputs[who] = calls[who](q, k, v)
            if trains:
                torch.autograd.grad(outputs[who], (q, k, v), upstream, retain_graph=True)
            synchronize(device)
            first = time.perf_counter() - start
            peak = _peak(calls[who], q, k, v, upstream) if trains else None
        except Exception as error:  # of a rival that is not made for this
            if who == "flexmasks":
                raise
            left_out[who] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            progress(f"{who} left out: {left_out[who]}")
            del calls[who]
            outputs.pop(who, None)
            continue
        rows[who] = {
            "case": case.name,
            "shape": "x".join(map(str, shape)),
            "dtype": str(dtype).removeprefix("torch."),
            "who": who,
            "first_s": round(first, 2),
            "peak_mb": None if peak is None else round(peak / 1e6),
            "difference": float((outputs[who].detach() - outputs["flexmasks"].detach()).abs().max()),
        }
    timed: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {who: lambda call=call: call(q, k, v) for who, call in calls.items()},  # type: ignore[misc]
    }
    if trains:
        timed["backward"] = {
            who: lambda out=out: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)  # type: ignore[misc]
            for who, out in outputs.items()
        }
    for name, products in (("forward", 2), ("backward", 5)):  # each of 2 operations for a pair and a number of a head
        for who, (ms, spread) in interleaved(timed.get(name, {}), device, _RUNS).items():
            rows[who][f"{name}_ms"], rows[who][f"{name}_iqr"] = float(f"{ms:.5g}"), float(f"{spread:.3g}")
            rows[who][f"{name}_tflops"] = float(f"{products * 2 * size * visible / ms / 1e9:.4g}")
    rows["flexmasks"]["backend"] = explain(q, k, v, mask=case.mask, score=case.score).backend
    if left_out:
        rows["flexmasks"]["left_out"] = left_out
    return list(rows.values())


def _peak(call: _Attend, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> int:
    """Bytes in use at most of a forward and a backward pass, beyond those before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(call(q, k, v), (q, k, v), upstream)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _implementations(case: Case, shape: _Shape, device: torch.device) -> dict[str, _Attend]:
    """Ours; compiled flex_attention with its defaults; SDPA; FlashAttention 4 and torch's varlen, called directly."""
    batch, heads, length, _ = shape
    made = block_mask(case.mask, length, batch=batch, heads=heads, device=device)
    size = Size(batch, heads, length, length, device)
    score_mod = None if case.score is None else case.score.bind(case.score.resolve(size))
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    found: dict[str, _Attend] = {
        "flexmasks": lambda q, k, v: attention(q, k, v, mask=case.mask, score=case.score),
        "flex_attention": lambda q, k, v: compiled(q, k, v, score_mod, made),
    }
    if device.type != "cuda":
        found["flex_attention"] = lambda q, k, v: separate(compiled(q, k, v, score_mod, made))
    if case.score is None and case.lengths is None:
        seen = dense_mask(case.mask, length, batch=batch, heads=heads, device=device)
        found["SDPA + mask"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    if case.is_causal is not None:
        causal = case.is_causal
        found["SDPA"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        if device.type == "cuda":
            for who, backend in (
                ("SDPA, FA2", SDPBackend.FLASH_ATTENTION),
                ("SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION),
            ):
                found[who] = _pinned(backend, causal)
    if device.type == "cuda":
        found |= _direct(case, device)
    return found


def _pinned(backend: SDPBackend, causal: bool) -> _Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def _direct(case: Case, device: torch.device) -> dict[str, _Attend]:
    """FlashAttention 4 and torch's varlen attention, where they are here and know the mask."""
    found: dict[str, _Attend] = {}
    if case.fa4 is None:
        return found
    arguments = case.fa4
    try:
        fa4 = importlib.import_module("flash_attn.cute")
    except Exception:  # not here, or not for this machine
        fa4 = None
    if case.lengths is None:
        if fa4 is not None:

            def dense(q: Tensor, k: Tensor, v: Tensor) -> Any:
                out = fa4.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **arguments)
                return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

            found["FA4"] = dense
        return found
    starts = F.pad(case.lengths.cumsum(0), (1, 0)).int()
    longest = int(case.lengths.max())

    def varlen(call: Callable[..., Any]) -> _Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            out = call(*(x[0].transpose(0, 1) for x in (q, k, v)))
            return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)[None]

        return attend

    if fa4 is not None:
        known = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        found["FA4, varlen"] = varlen(lambda q, k, v: fa4.flash_attn_varlen_func(q, k, v, causal=True, **known))
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return found
    by_window = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if by_window else {"is_causal": True}
    found["torch varlen_attn"] = varlen(
        lambda q, k, v: varlen_attn(q, k, v, starts, starts, longest, longest, **causal)
    )
    return found
