"""Plots of the committed results: bars beside those of other libraries, and what the hardware could give at most."""

from __future__ import annotations

import functools
import io
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent.parent / "results"
PEAK = {"H200": 989.5, "H100": 989.5}  # TFLOP/s in bfloat16, dense, as NVIDIA's data sheets say
# The colors of the page's theme, for which others stand while matplotlib draws.
_COLORS = {
    "#0000a1": "var(--fm-k3)", "#0000a2": "var(--fm-k2)", "#0000a3": "var(--fm-k1)", "#0000a4": "var(--fm-line)",
    "#0000a5": "var(--fm-muted)", "#0000af": "var(--fm-text)",
}  # fmt: skip
_BARS, _TEXT = [*_COLORS][:5], [*_COLORS][5]
Row = dict[str, Any]


class Plot(NamedTuple):
    """A plot on the page of some results: groups of bars, one for each of `who` that was measured."""

    page: str
    results: str
    title: str
    unit: str
    who: tuple[str, ...]
    value: tuple[str, ...]  # fields whose sum a bar shows
    kept: Row = {}  # noqa: RUF012 # fields that rows must have
    group: tuple[str, ...] = ("case",)  # fields that name a group
    roof: Callable[[Row, Row], float] | None = None  # of a group's first row and the results
    roof_title: str = ""


_BESIDE = ("flexmasks", "FA4", "FA4, varlen", "flex_attention", "SDPA + mask")
_ATTENTION = functools.partial(
    Plot, "attention", "attention_gpu", unit="TFLOP/s", who=_BESIDE, kept={"shape": "16x16x8192x128"},
    roof=lambda _, results: PEAK[results["machine"]["device"].split()[0]], roof_title="the most that the GPU computes",
)  # fmt: skip
_SOFTMAX = functools.partial(
    Plot, "softmax", "softmax_gpu", unit="TB/s", value=("tb_s",),
    who=("flexmasks", "torch.compile", "torch._masked_softmax", "eager"),
    roof=lambda _, results: float(results["copy_tb_s"]), roof_title="a copy",
)  # fmt: skip
PLOTS = (
    _ATTENTION("Forward, 16 x 16 heads of 8,192 tokens, head size 128", value=("forward_tflops",)),
    _ATTENTION("Backward, 16 x 16 heads of 8,192 tokens, head size 128", value=("backward_tflops",)),
    Plot("registry", "registry_gpu", "Every mask and score, forward and backward", "ms",
         ("flexmasks", "flex_attention"), ("forward_ms", "backward_ms"), group=("kind", "case")),
    _SOFTMAX("Forward, 4 x 32 x 4,096 x 4,096 scores", kept={"shape": "4x32x4096x4096", "pass": "forward"}),
    _SOFTMAX("Backward, 4 x 32 x 4,096 x 4,096 scores", kept={"shape": "4x32x4096x4096", "pass": "backward"}),
    Plot("serve", "serve_gpu", "A step of a serving loop", "ms",
         ("flexmasks", "flexmasks, replayed", "flexmasks, pages of 256", "SDPA + mask"), ("ms",),
         group=("case", "shape"), roof=lambda row, _: row["roof_ms"], roof_title="the keys and values are read once"),
    Plot("models", "models_gpu", "A training step of compiled models", "ms",
         ("flexmasks", "flex_attention", "sdpa", "eager", "no attention"), ("ms",),
         kept={"kind": "training", "model": "compiled"}, group=("case", "shape")),
    Plot("models", "models_gpu", "Generation", "ms", ("flexmasks", "sdpa"), ("ms",), kept={"kind": "generation"},
         group=("case", "shape")),
    Plot("documents", "documents_gpu", "Packed documents, forward and backward", "ms",
         ("flexmasks", "FA4 varlen", "cuDNN, new plan", "torch varlen_attn", "compiled flex"), ("ms",),
         kept={"kind": "both"}, group=("case", "shape")),
    Plot("steps", "steps_gpu", "Steps with new tensors", "ms", ("flexmasks", "flex_attention", "SDPA + mask"), ("ms",),
         kept={"kind": "loop", "shape": "8x16x4096x64"}),
    Plot("ranks", "ranks_gpu_four", "Four GPUs, forward and backward", "ms",
         ("flexmasks", "torch context_parallel", "flex_attention, _ContextParallel", "flexmasks on one"), ("ms",),
         group=("case", "shape")),
    Plot("trees", "trees_gpu", "A training step on groups of answers", "ms",
         ("trees", "packed", "padded", "one by one"), ("ms",), kept={"kind": "training"}, group=("case", "shape")),
    Plot("biases", "biases_gpu", "Biases that learn, forward and backward", "ms",
         ("flexmasks", "compiled flex", "SDPA"), ("ms",), kept={"kind": "both"}, group=("case", "shape")),
    Plot("invariant", "invariant_gpu", "The same bits, and as usual", "ms", ("invariant", "usual"), ("ms",),
         group=("case", "shape")),
    Plot("cudnn", "cudnn_gpu", "Masks of intervals, 2 x 16 heads of 8,192 tokens, head size 128", "ms",
         ("cuDNN", "flex_flash", "flex"), ("ms",), kept={"shape": "[2, 16, 8192, 128]", "deterministic": False}),
    Plot("topk", "topk_gpu", "Chosen keys, new ones in each call, forward and backward", "ms",
         ("flexmasks", "one plan", "SDPA + mask", "flex + dense"), ("ms",), kept={"kind": "both"},
         group=("case", "entries", "shape")),
    Plot("wild", "wild_gpu", "Masks of other projects, forward and backward", "ms", ("flexmasks", "flex_attention"),
         ("forward_ms", "backward_ms"), kept={"kind": "attention"}),
)  # fmt: skip


def of_page(name: str) -> str:
    """Return the plots of a page of results, as HTML."""
    import matplotlib as mpl  # it takes long to import

    colored = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    options: Any = dict.fromkeys(colored, _TEXT)
    options |= {"svg.fonttype": "none", "svg.hashsalt": "flexmasks", "font.family": "sans-serif", "font.size": 9}
    with mpl.rc_context(options):
        drawn = [_drawn(plot) for plot in PLOTS if plot.page == name]
        return "\n\n".join([*drawn, *([_block_masks()] if name == "blocks" else [])])


@functools.cache
def _results(name: str) -> Row:
    results: Row = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return results


def groups(plot: Plot) -> Iterator[tuple[str, dict[str, float], float | None]]:
    """Yield the name of each group, its bars by who was measured, and its roof."""
    results = _results(plot.results)
    rows = [row for row in results["rows"] if all(row.get(name) == value for name, value in plot.kept.items())]
    named: dict[str, list[Row]] = {}
    for row in rows:
        if row["who"] in plot.who and all(row.get(name) is not None for name in plot.value):
            named.setdefault(", ".join(row[name] for name in plot.group if row[name]), []).append(row)
    for name, group in named.items():
        bars = {who: sum(row[f] for f in plot.value) for who in plot.who for row in group if row["who"] == who}
        yield name, bars, plot.roof(group[0], results) if plot.roof else None


def _drawn(plot: Plot) -> str:
    drawn = list(groups(plot))
    if not drawn:
        raise SystemExit(f"results/{plot.results}.json has no rows for the plot {plot.title!r}")
    seen = [who for who in plot.who if any(who in bars for _, bars, _ in drawn)]
    figure, axes = _axes(sum(len(bars) + 0.9 for _, bars, _ in drawn) * 0.19 + 0.9)
    y, ticks = 0.0, []
    is_rate = plot.unit.endswith("/s")
    # Times are drawn as shares of the first one's, since those of groups differ a lot.
    scales = [1.0 if is_rate else next(iter(bars.values())) for _, bars, _ in drawn]
    most = max(max(bars.values()) / scale for scale, (_, bars, _) in zip(scales, drawn, strict=True))
    for scale, (name, bars, roof) in zip(scales, drawn, strict=True):
        ticks.append((y + (len(bars) - 1) / 2, textwrap.fill(name, 38)))
        top = y - 0.5
        for who, value in bars.items():
            axes.barh(
                y, value / scale, 0.86, color=_BARS[seen.index(who)], label=who if who not in _labels(axes) else None
            )
            number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            axes.text(value / scale + most * 0.008, y, number, va="center", fontsize=8, color=_TEXT)
            y += 1
        if roof is not None:
            label = plot.roof_title if plot.roof_title not in _labels(axes) else None
            axes.plot(
                [roof / scale] * 2, [top, y - 0.5], color=_TEXT, linestyle=(0, (2, 1.5)), linewidth=1.3, label=label
            )
        y += 0.9
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
    axes.set_ylim(y - 0.9, -1)
    machine = _results(plot.results)["machine"]
    shares = f"times as long as {plot.who[0]}; numbers are {plot.unit}, less is better"
    axes.set_xlabel(f"{plot.unit}, more is better" if is_rate else shares)
    return _finished(figure, axes, f"{plot.title} ({machine['device']}, torch {machine['torch']})")


def _block_masks() -> str:
    figure, axes = _axes(3.6)
    for n, mask in enumerate(("causal", "document")):
        rows = [row for row in _results("blocks_gpu")["rows"] if row["mask"] == mask]
        for who, field, style in (("flexmasks", "ms", "-"), ("create_block_mask, compiled", "torch_ms", "--")):
            points = [(row["length"], row[field]) for row in rows if row.get(field)]
            label = f"{mask}, {who}"
            axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, color=_BARS[n], label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms, less is better")
    machine = _results("blocks_gpu")["machine"]
    return _finished(figure, axes, f"Block masks ({machine['device']}, torch {machine['torch']})")


def _axes(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _labels(axes: Any) -> list[str]:
    return list(axes.get_legend_handles_labels()[1])


def _finished(figure: Any, axes: Any, title: str) -> str:
    figure.legend(loc="outside upper left", ncols=3 if axes.get_yscale() == "linear" else 2, frameon=False)
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    text = written.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>| id=\"(?![mp][0-9a-f]{10}\")[^\"]*\"", "", text, flags=re.DOTALL)
    for color, shown in _COLORS.items():
        text = text.replace(color, shown)
    picture = text[text.index("<svg") :].replace("<svg", f"<svg role='img' aria-label='{escape(title)}'", 1)
    return f"<figure class='flexmasks' data-search-exclude><figcaption>{escape(title)}</figcaption>{picture}</figure>"
