"""`python recipes/benchmark.py attention`: attention against other libraries."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.examples import at_most, fitting, on_device
from benchmarks.peers import Attend, dense_sdpa, other_libraries, pinned, ready_flex
from benchmarks.results import Row, check_mask_names, choose_device, machine, run_steps, text_table
from benchmarks.runner import attention_tflops, measure_passes
from flexmasks.attention import attention, explain
from flexmasks.spec.arguments import get_mask, get_score
from flexmasks.spec.definitions import definition, is_by_library
from flexmasks.spec.parameters import Size
from flexmasks.spec.registry import list_masks, list_scores
from flexmasks.spec.values import Mask, Score

_RUNS = 7
_Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Case:
    """A mask and a score, and the arguments by which other libraries take them."""

    name: str
    mask: Mask
    score: Score | None = None
    fa4: dict[str, Any] | None = None  # keyword arguments of FlashAttention 4, or None if it has no such mask
    is_causal: bool | None = None  # SDPA's argument, or None if SDPA needs the mask as a tensor
    batch: int | None = None
    length: int | None = None
    lengths: Tensor | None = field(default=None, repr=False)  # lengths of documents laid end to end


def cases(batch: int, heads: int, length: int, device: torch.device) -> list[Case]:
    """Return the usual cases; a canvas has sides of powers of two."""
    generator = torch.Generator().manual_seed(0)
    rows = 1 << (int(math.log2(length)) // 2)
    canvas = {"height": rows, "width": length // rows}
    window = min(1024, length // 4)
    halves = torch.arange(length, device=device) * 2 // length
    seq_lens = torch.randint(length // 4, length + 1, (batch,), generator=generator).to(device)
    causal = get_mask("causal")
    total = 4 * length
    documents = torch.randint(64, 1137, (57 * 4,), generator=generator)
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
        Case("grouped_tril", get_mask("grouped_tril", seq_lens=seq_lens)),
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
    """Measure attention, print a table, and write the figures to a file.

    Args:
        masks: names of `cases`, and of other registered masks. Without any names, all of `cases`.
        scores: names of registered scores, which are measured under the causal mask.
        registry: measure every registered mask and score at its example, and none of `cases`.
        lengths, sizes: numbers of tokens and head sizes; by default the usual ones of the device.
        device: cuda or cpu; by default a GPU if the machine has one.
        file: the JSON file.
        resume: keep the rows that the file has of an earlier run.
    """
    at = choose_device(device)
    large = at.type == "cuda"
    dtype = torch.bfloat16 if large else torch.float32
    batch, heads, usual_length = (16, 16, 8192) if large else (1, 8, 4096)
    usual = cases(batch, heads, usual_length, at)
    check_mask_names(masks, [case.name for case in usual])
    for score in scores:
        definition("score", score)
    names: list[str] = []
    examples: list[tuple[str, str]] = []
    if registry:
        examples = [("mask", m.name) for m in list_masks()] + [("score", s.name) for s in list_scores()]
    elif masks or scores:
        names = [case.name for case in usual if case.name in masks]
        examples = [("mask", m) for m in masks if m not in names] + [("score", s) for s in scores]
    else:
        names = [case.name for case in usual if large or case.lengths is None]
    steps: dict[str, Callable[[], list[Row]]] = {}
    for size in sizes or ((64, 128) if large and names else (64,)):
        for length in lengths or (usual_length,):
            for case in cases(batch, heads, length, at) if names else ():
                if case.name in names:
                    shape = (case.batch or batch, heads, case.length or length, size)
                    steps[f"{case.name}, {list(shape)}"] = functools.partial(_rows, case, shape, dtype, at)
        for length in lengths or ((8192,) if large else (2048,)):
            for kind, name in examples:
                shape = (batch, heads, length, size)
                call = functools.partial(_example_rows, kind, name, shape, dtype, at)
                steps[f"{kind} {name}, {length} tokens, head size {size}"] = call
    results: dict[str, Any] = {"benchmark": "attention", "machine": machine(at), "rows": []}
    run_steps(results, steps, file, resume)
    print(table(results))
    return results


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("case", "case"), ("shape", "shape"), ("who", "who"), ("backend", "backend"),
        ("forward ms", "forward_ms"), ("TFLOP/s", "forward_tflops"),
        ("backward ms", "backward_ms"), ("TFLOP/s", "backward_tflops"),
        ("first call s", "first_s"), ("peak MB", "peak_mb"),
    )  # fmt: skip
    return text_table(results, columns)


# Columns of the table: the heading, and the implementations. A case has at most one of these.
_RIVALS = {
    "flex_attention": ("flex_attention",),
    "FlashAttention 4, called directly": ("FA4", "FA4, varlen"),
    "SDPA's own causal, or varlen_attn": ("SDPA", "torch varlen_attn"),
    "SDPA + mask": ("SDPA + mask",),
}


def markdown(results: dict[str, Any]) -> str:
    """Return the table of a run on a GPU, against other libraries."""
    by_case: dict[tuple[str, str], dict[str, Row]] = {}
    for r in results["rows"]:
        by_case.setdefault((r["case"], r["shape"]), {})[r["who"]] = r
    table = []
    for (case, shape), by_who in by_case.items():
        ours = by_who["flexmasks"]
        cells = [
            case,
            shape.rpartition("x")[2],
            _ms(ours),
            f"{ours['forward_tflops']:.0f} / {ours['backward_tflops']:.0f}",
        ]
        for names in _RIVALS.values():
            rival = next((by_who[n] for n in names if n in by_who), None)
            cells.append("" if rival is None else f"{_ms(rival)} ({_total(rival) / _total(ours):.2f} x)")
        table.append(cells)
    shapes = list(dict.fromkeys(shape.rpartition("x")[0] for _, shape in by_case))
    about = (
        f"On one {results['machine']['device']}, torch {results['machine']['torch']}, {results['rows'][0]['dtype']}, "
        f"batch x heads x length {' and, packed, '.join(shapes)}: forward / backward ms, medians of interleaved runs. "
        "In brackets: the total time divided by the total time of flexmasks."
    )
    header = ["case", "D", "flexmasks", "TFLOP/s", *_RIVALS]
    return f"{about}\n\n{tabulate(table, headers=header, tablefmt='github')}"


def registry_markdown(results: dict[str, Any]) -> str:
    """Return the tables of every registered mask and score on a GPU."""
    by_kind: dict[str, dict[str, dict[str, Row]]] = {"mask": {}, "score": {}}
    for r in results["rows"]:
        by_kind[r["kind"]].setdefault(r["case"], {})[r["who"]] = r
    usual_shape = statistics.mode(r["shape"] for r in results["rows"])
    columns = ["backend", "forward / backward ms", "TFLOP/s", "flex_attention", "SDPA + mask"]
    tables = []
    for kind, title, rivals in (("mask", "mask", 2), ("score", "score, causal", 1)):  # SDPA has no scores
        if by_kind[kind]:
            rows = [_registry_cells(by_who, usual_shape)[: 4 + rivals] for by_who in by_kind[kind].values()]
            header = [title, *columns][: 4 + rivals]
            tables.append(tabulate(rows, headers=header, tablefmt="github", disable_numparse=True))
    compared = [c for by_case in by_kind.values() for c in by_case.values() if "flex_attention" in c]
    gains = [_total(by_who["flex_attention"]) / _total(by_who["flexmasks"]) for by_who in compared]
    about = (
        f"Every registered mask and score at its example, on one {results['machine']['device']}, torch "
        f"{results['machine']['torch']}, {results['rows'][0]['dtype']}, "
        f"batch x heads x length x D {usual_shape}: medians of interleaved runs. TFLOP/s count visible pairs. The last "
        "columns say how many times as long flex_attention (compiled, with its defaults) and SDPA with a dense mask "
        f"take, forward and backward together. The median for flex_attention is {statistics.median(gains):.2f} times, "
        f"the range {min(gains):.2f} to {max(gains):.2f} times."
    )
    missing = [f"`{m.name}`" for m in list_masks() if is_by_library("mask", m.name) and m.name not in by_kind["mask"]]
    scores = [s.name for s in list_scores() if is_by_library("score", s.name)]
    missing += [f"the score `{name}`" for name in scores if f"{name}, causal" not in by_kind["score"]]
    if missing:
        about += f" Not measured yet: {', '.join(missing)}."
    return "\n\n".join([about, *tables])


def _registry_cells(by_who: dict[str, Row], usual_shape: str) -> list[str]:
    """Return one row of the registry's table."""
    ours = by_who["flexmasks"]
    example = f"`{ours['example']}`".replace("|", "\\|")
    cells = [example if ours["shape"] == usual_shape else f"{example}, {ours['shape']}", ours["backend"], _ms(ours)]
    cells.append(f"{ours['forward_tflops']:.3g} / {ours['backward_tflops']:.3g}")
    for who in ("flex_attention", "SDPA + mask"):
        if who in ours.get("left_out", {}):
            cells.append("fails")
        else:
            cells.append(f"{_total(by_who[who]) / _total(ours):.2f} x" if who in by_who else "")
    return cells


def _ms(row: Row) -> str:
    return f"{row['forward_ms']:.3g} / {row['backward_ms']:.3g}"


def _total(row: Row) -> float:
    return float(row["forward_ms"] + row["backward_ms"])


def _example_rows(kind: str, name: str, shape: _Shape, dtype: torch.dtype, device: torch.device) -> list[Row]:
    """Return the figures of a registered mask or score at its example.

    A score is measured under the causal mask. If the example allows only one batch element, the heads get all rows of
    the shape; if it allows only one head, the batch gets them.
    """
    batch, heads, most, size = shape
    rows = batch * heads

    def fitted(example: Mask | Score, length: int) -> tuple[Case, _Shape]:
        moved = on_device(example, device)
        mask, score = (moved, None) if kind == "mask" else (get_mask("causal"), moved)
        errors: list[Exception] = []
        for b, h in ((batch, heads), (1, rows), (rows, 1), (1, 1)):
            try:
                mask.blocks(length, batch=b, heads=h, device=device)
                if score is not None:
                    score._resolve(Size(b, h, length, length, device))
                return Case(name if score is None else f"{name}, causal", mask, score), (b, h, length, size)
            except (ValueError, TypeError) as error:
                errors.append(error)
        raise errors[0]

    _, _, (case, fitted_shape) = fitting(kind, name, at_most(most), fitted)
    about = {"kind": kind, "example": repr(case.mask if case.score is None else case.score)}
    return [{**row, **about} for row in _rows(case, fitted_shape, dtype, device)]


def _rows(case: Case, shape: _Shape, dtype: torch.dtype, device: torch.device) -> list[Row]:
    """Return the figures of one case; backward passes on a GPU only."""
    torch.manual_seed(0)
    backward = device.type == "cuda"
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=backward) for _ in range(3))
    batch, heads, length, size = shape
    blocks = case.mask.blocks(length, batch=batch, heads=heads, device=device)
    pairs = (1 - blocks.sparsity) * (1 - blocks.hidden) * length * length * batch * heads
    measured, left_out = measure_passes(
        _implementations(case, shape, device),
        (q, k, v),
        runs=_RUNS,
        required=["flexmasks"],
        backward=backward,
        reset_compiler=True,
    )
    ours = measured["flexmasks"].output.detach()
    rows = []
    for who, figures in measured.items():
        row: Row = {
            "case": case.name,
            "shape": "x".join(map(str, shape)),
            "dtype": str(dtype).removeprefix("torch."),
            "who": who,
            "peak_mb": None if figures.peak_bytes is None else round(figures.peak_bytes / 1e6),
            "difference": float((figures.output.detach() - ours).abs().max()),
            **figures.entries(),
        }
        for which, (ms, _) in figures.milliseconds.items():
            row[f"{which}_tflops"] = float(f"{attention_tflops(which, pairs, size, ms):.4g}")
        rows.append(row)
    rows[0]["backend"] = explain(q, k, v, mask=case.mask, score=case.score).backend
    if left_out:
        rows[0]["left_out"] = left_out
    return rows


def _implementations(case: Case, shape: _Shape, device: torch.device) -> dict[str, Attend]:
    """Return calls of flexmasks, flex_attention, SDPA and other libraries."""
    size = Size(shape[0], shape[1], shape[2], shape[2], device)
    calls: dict[str, Attend] = {
        "flexmasks": lambda q, k, v: attention(q, k, v, mask=case.mask, score=case.score),
        "flex_attention": ready_flex(case.mask, case.score, size),
    }
    if case.score is None and case.lengths is None:
        calls["SDPA + mask"] = dense_sdpa(case.mask, None, size)
    if case.is_causal is not None:
        calls["SDPA"] = functools.partial(F.scaled_dot_product_attention, is_causal=case.is_causal)
    if device.type == "cuda":
        if case.is_causal is not None:
            calls["SDPA, FA2"] = pinned(SDPBackend.FLASH_ATTENTION, case.is_causal)
            calls["SDPA, cuDNN"] = pinned(SDPBackend.CUDNN_ATTENTION, case.is_causal)
        if case.fa4 is not None:
            calls |= other_libraries(case.fa4, case.lengths)
    return calls
