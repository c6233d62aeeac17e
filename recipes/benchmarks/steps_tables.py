"""Tables of the benchmark of steps, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from benchmarks.loops import CALLS
from benchmarks.results import Row, measured_on, text_table

# Who runs the steps.
OURS, OLD, PLAIN, DENSE = "flexmasks", "flexmasks, old tensors", "flex_attention", "SDPA + mask"


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("what", "kind"), ("case", "case"), ("shape", "shape"), ("model", "model"), ("who", "who"),
        ("backend", "backend"), ("ms", "ms"), ("IQR", "iqr"), ("alone, ms", "alone_ms"), ("steps", "steps"),
        ("first s", "first_s"), ("compiles later", "compilations"), ("longest ms", "longest_ms"),
        ("waits", "synchronizations"), ("difference", "difference"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of one run."""
    parts = [f"{measured_on(results)}; medians."]
    tables = {
        "plan": _plan_table, "loop": _loop_table, "lengths": _length_table, "gradients": _gradient_table,
        "training": _training_table,
    }  # fmt: skip
    for kind, make in tables.items():
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
            way = (r["model"],) if "model" in r else ()
            cases.setdefault((r["case"], *way, r["shape"]), {})[r["who"]] = r
    return cases


def _plan_table(cases: _Cases) -> str:
    rows = []
    for (_, shape), by_who in cases.items():
        cells = [shape.rpartition("x")[0], by_who[OURS]["backend"]]
        for key in ("ms", "alone_ms"):
            cells += [_figure(by_who, OURS, key), _against(by_who, PLAIN, key)]
        rows.append([*cells, _pair(by_who, "synchronizations")])
    header = ["B x H x S", "backend", "flexmasks, ms", "create_block_mask", "alone, ms", "create_block_mask", "waits"]
    return (
        "### Plans\n\nNew document ids are planned: what `attention` does before its kernel runs, against compiled "
        f"`create_block_mask`.\n\n{github_table(rows, header)}"
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
        f"### Loops\n\nA step is {CALLS} attentions in a chain that share the mask and, on a GPU, one backward pass. "
        "Pairs of figures are of flexmasks / of compiled torch.\n\n"
        f"{github_table(rows, header)}"
    )


def _length_table(cases: _Cases) -> str:
    rows = []
    for (case, shape), by_who in cases.items():
        cells = [case, shape, by_who[OURS]["backend"], _figure(by_who, OURS), _against(by_who, PLAIN)]
        rows.append([*cells, *(_pair(by_who, key) for key in ("first_s", "compilations"))])
    header = ["loop", "largest B x H x S x D", "backend", "flexmasks, ms", "compiled torch", "first, s"]
    return (
        "### Lengths\n\nA step runs such loops of eight batches one after the other, whose lengths are from nine "
        "sixteenths of the largest to the largest, or 37 tokens less. torch compiles for any length.\n\n"
        f"{github_table(rows, [*header, 'compiles later'])}"
    )


def _gradient_table(cases: _Cases) -> str:
    rows = []
    for (case, shape), by_who in cases.items():
        ours, theirs = by_who[OURS], by_who[DENSE]
        cells = [shape, case, ours["backend"], _figure(by_who, OURS), _figure(by_who, DENSE)]
        rows.append(
            [*cells, f"{ours['ms'] / theirs['ms']:.2f}", str(ours["compilations"]), f"{ours['longest_ms']:.0f}"]
        )
    header = ["B x H x S x D", "mask", "backend", "flexmasks, ms", "SDPA + mask, ms", "flexmasks / SDPA"]
    header += ["compiles later", "longest later, ms"]
    return (
        "### Gradients\n\nA step is one attention, forward and backward. SDPA gets the mask as a tensor, which is made "
        f"at each step; with ALiBi it is the bias.\n\n{github_table(rows, header)}"
    )


def _training_table(cases: _Cases) -> str:
    rows = []
    for (case, way, _), by_who in cases.items():
        cells = [case, way, _figure(by_who, OURS), _against(by_who, PLAIN)]
        rows.append([*cells, *(_pair(by_who, key) for key in ("first_s", "compilations", "synchronizations"))])
    _, _, shape = next(iter(cases))
    figures = next(iter(next(iter(cases.values())).values()))
    header = ["documents as", "model", "flexmasks, ms", "compiled torch", "first, s", "compiles later", "waits"]
    return (
        f"### Training\n\nA training step of a model of {figures['layers']} layers of width {figures['width']} "
        f"(B x H x S x D {shape}, or all tokens in one row), with AdamW. New documents are packed at every step. Eager "
        "models call compiled `flex_attention`; layers and whole models are compiled without graph breaks.\n\n"
        f"{github_table(rows, header)}"
    )


def _graph_table(cases: _Cases) -> str:
    rows = []
    for (case, shape), by_who in cases.items():
        cells = [case, shape, by_who[OURS]["backend"], _figure(by_who, OURS), _figure(by_who, f"{OURS}, replayed")]
        rows.append([*cells, _figure(by_who, PLAIN), _figure(by_who, f"{PLAIN}, replayed")])
    header = ["loop", "B x H x S x D", "backend", "eager, ms", "replayed, ms", "compiled torch, ms", "replayed, ms"]
    return (
        "### CUDA graphs\n\nThe same steps; the tensor of the mask changes in place before each, and a replay plans "
        f"again.\n\n{github_table(rows, header)}"
    )


def _about_losses(rows: Sequence[Row]) -> str:
    ways = dict.fromkeys(f"{r['case']}, {r['model']}" for r in rows)
    largest = max(rows, key=lambda r: r["difference"])
    return (
        f"The losses of the first {len(largest['losses'])} steps of small models differ from those of SDPA with the "
        f"mask as a tensor by at most {largest['difference']:.1g}, relative, in {largest['dtype']} ({'; '.join(ways)})."
    )


def github_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Return a table without its empty columns."""
    used = [i for i in range(len(header)) if any(row[i] for row in rows)]
    cells = [[row[i] for i in used] for row in rows]
    return tabulate(cells, headers=[header[i] for i in used], tablefmt="github", disable_numparse=True)


def _figure(by_who: dict[str, Row], who: str, key: str = "ms") -> str:
    """Return one figure as text; "fails" if the implementation was left out."""
    if who in by_who:
        is_missing = by_who[who][key] is None or (key == "first_s" and not by_who[who]["cold"])
        return "" if is_missing else f"{by_who[who][key]:.3g}"
    return "fails" if any(who in row.get("left_out", {}) for row in by_who.values()) else ""


def _against(by_who: dict[str, Row], who: str, key: str = "ms") -> str:
    """Return a figure, and how many times as long it is as that of flexmasks."""
    text = _figure(by_who, who, key)
    if OURS not in by_who or who not in by_who:
        return text
    return f"{text} ({by_who[who][key] / by_who[OURS][key]:.2f} x)"


def _pair(by_who: dict[str, Row], key: str) -> str:
    """Return a figure of flexmasks and of compiled torch, or "" if neither has it."""
    texts = [_figure(by_who, who, key) if who in by_who else "" for who in (OURS, PLAIN)]
    return " / ".join(text or "-" for text in texts) if any(texts) else ""
