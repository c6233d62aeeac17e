"""Pictures of masks, score changes and attention weights: text, SVG, and matplotlib for papers."""

from __future__ import annotations

import importlib
import io
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flexmasks.pictures import svg
from flexmasks.pictures.cells import HIDDEN, PARTIAL, SKIPPED, VISIBLE, Grid, MaskCells, ScoreCells, WeightCells
from flexmasks.pictures.output import WIDEST_TEXT, check_columns, check_kind, text_width, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLE_COLUMNS = 44  # characters of a title's line, drawn by matplotlib
_MASK_CELLS = 256  # along the longer side of a picture
_SCORE_CELLS = 96  # along the longer side of a score's SVG, where fewer cells merge
_FEWEST_CELLS = 32  # an SVG that is too long gets fewer cells, down to this number
_LONGEST_CELLS = 60_000  # characters that draw an SVG's cells
_LINED_BLOCKS = 32  # along an axis; more blocks have no lines between them
_LEVEL_SYMBOLS = "█▓▒░·+*#@"  # levels of the numbers added by a score change, from the lowest to the highest; · is 0


Cells = MaskCells | ScoreCells | WeightCells


class Picture(ABC):
    """A picture of a mask, a score change or attention weights.

    `flexmasks.draw` returns it, `flexmasks.show` shows it. In Jupyter it shows itself as SVG, light or dark as the
    system is; printed, it is text.

    Example:
        >>> import flexmasks
        >>> picture = flexmasks.draw("causal", 4096)
        >>> print(picture.text(16).splitlines()[0])
        ▒▒··············
        >>> picture.svg()[:4]
        '<svg'
    """

    columns: int | None = None  # width of the printed text; None: the terminal's

    @abstractmethod
    def text(self, columns: int | None = None) -> str:
        """Return text of that many columns, by default the terminal's up to 80."""

    @abstractmethod
    def svg(self, style: bool = True) -> str:
        """Return an SVG document below 100 kB. Without `style` it has the colors of light pages only."""

    @abstractmethod
    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw with matplotlib on `ax`, or on a new figure.

        Raises ImportError if matplotlib is missing; `pip install matplotlib` installs it.
        """

    def save(self, path: str | Path) -> Path:
        """Write a .svg, .html or .txt file, or with matplotlib .pdf or .png."""
        path = Path(path)
        kind = check_kind(path)
        if kind in (".pdf", ".png"):
            figure: Any = self.plot().figure
            drawn = io.BytesIO()
            figure.savefig(drawn, format=kind[1:], bbox_inches="tight", dpi=200)
            write(path, drawn.getvalue())
        elif kind == ".html":
            write(path, f"<!doctype html>\n<meta charset='utf-8'>\n<div>{self.svg()}</div>\n")
        else:
            write(path, self.svg() if kind == ".svg" else f"{self.text()}\n")
        return path

    def show(self, columns: int | None = None) -> None:
        """Show the picture: in Jupyter as SVG, elsewhere as text of that many columns."""
        self.columns = None if columns is None else check_columns(columns)
        ipython = sys.modules.get("IPython")
        if ipython is not None and ipython.get_ipython() is not None:
            importlib.import_module("IPython.display").display(self)
        else:
            print(self)

    def __repr__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str:
        return self.svg()

    def _text_width(self, columns: int | None) -> int:
        columns = self.columns if columns is None else columns
        return text_width() if columns is None else check_columns(columns)


class MaskPicture(Picture):
    """Picture of a mask's visible pairs and of the blocks that kernels compute.

    symbols, colors: of the kinds of cells, as text and as names of `svg.LIGHT`.
    """

    symbols: ClassVar = {SKIPPED: "·", HIDDEN: "░", PARTIAL: "▒", VISIBLE: "█"}
    colors: ClassVar = {kind: f"k{kind}" for kind in (SKIPPED, HIDDEN, PARTIAL, VISIBLE)}

    def __init__(self, cells: MaskCells) -> None:
        self._cells = cells
        self.q_len, self.kv_len, self.block_size = cells.q_len, cells.kv_len, cells.block_size
        self.counts = cells.counts

    def text(self, columns: int | None = None) -> str:
        columns = self._text_width(columns)
        grid = _text_grid(self._cells, columns)
        legend = [(self.symbols[kind], meaning) for kind, meaning in self._legend(grid)]
        return _text(self._cells, grid, self.symbols, [_legend_line(legend), *self._notes()], columns)

    def svg(self, style: bool = True) -> str:
        canvas, grid = _canvas(self._cells, _MASK_CELLS, self.colors, lambda kinds: kinds, self._block_edges())
        canvas.swatches((self.colors[kind], meaning) for kind, meaning in self._legend(grid))
        canvas.notes(self._notes())
        return canvas.finished("; ".join([self._cells.name, _subtitle(self._cells), *self._notes()]), style)

    def plot(self, ax: Axes | None = None) -> Axes:
        ax = _axes(ax)
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        grid = self._cells.grid(_MASK_CELLS, _MASK_CELLS)
        colors = [svg.LIGHT[name] for name in self.colors.values()]
        _plot_cells(ax, self._cells, grid, ListedColormap(colors), (0, len(colors) - 1))
        edge = svg.LIGHT["line"]
        handles = [Patch(facecolor=colors[kind], edgecolor=edge, label=text) for kind, text in self._legend(grid)]
        notes = "\n".join(self._notes())
        ax.legend(handles=handles, title=notes, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2, frameon=False)
        return ax

    def _legend(self, grid: Grid) -> list[tuple[int, str]]:
        block, cell = self._cells.block_size, grid.cell
        if block == (1, 1):
            meanings = {VISIBLE: "visible", PARTIAL: "visible in part", SKIPPED: "hidden"}
        elif cell[0] < block[0] or cell[1] < block[1]:
            meanings = {
                VISIBLE: "visible",
                PARTIAL: "visible in part",
                HIDDEN: "hidden, in a block that is computed",
                SKIPPED: "skipped, in an empty block",
            }
        else:
            partial = "partial, or blocks of several kinds" if cell != block else "partial block"
            meanings = {VISIBLE: "full block", PARTIAL: partial, SKIPPED: "empty block, skipped"}
        present = set(grid.values.unique().tolist())
        return [(kind, meaning) for kind, meaning in meanings.items() if kind in present]

    def _notes(self) -> list[str]:
        counts, (height, width) = self.counts, self._cells.block_size
        empty, partial, full = map(_percent, counts.shares)
        if (height, width) == (1, 1):
            return [f"visible {full}, hidden {empty} of the pairs"]
        about = "about " if counts.estimated else ""
        notes = [
            f"blocks of {height} x {width}: {counts.empty:,} empty, {counts.partial:,} partial, {counts.full:,} full",
            f"of all pairs: empty {empty} (sparsity), partial {partial}, full {full}",
            f"of the computed pairs {about}{_percent(counts.hidden)} are hidden",
        ]
        if counts.unknown:
            notes.append(f"unknown: {counts.unknown:,} blocks, shown and counted as partial")
        return notes

    def _block_edges(self) -> tuple[list[float], list[float]]:
        """Where few enough blocks meet, as parts of the axes."""
        cells = self._cells
        edges: list[list[float]] = []
        for length, size in zip((cells.q_len, cells.kv_len), cells.block_size, strict=True):
            lined = size > 1 and length <= _LINED_BLOCKS * size
            edges.append([n / length for n in range(size, length, size)] if lined else [])
        return edges[0], edges[1]


class ScorePicture(Picture):
    """Picture of the numbers that a score change adds to scores, or of attention weights."""

    def __init__(self, cells: ScoreCells | WeightCells) -> None:
        self._cells = cells

    def text(self, columns: int | None = None) -> str:
        cells, columns = self._cells, self._text_width(columns)
        if isinstance(cells, ScoreCells) and cells.kind == "curve":
            scores, changed = (x[::10].tolist() for x in cells.curve)
            rows = [f"{s:10.4g} becomes {c:.4g}" for s, c in zip(scores, changed, strict=True)]
            return "\n".join([*rows, *_wrapped(["the same for all queries and keys", cells.element], columns)])
        grid = _text_grid(cells, columns)
        steps = len(_LEVEL_SYMBOLS) // 2
        levels = _levels(grid.values, steps)
        symbols = dict(enumerate([*_LEVEL_SYMBOLS, "?"], -steps))
        largest = _largest_finite(grid.values)
        meanings = {level: svg.number(level / steps * largest) for level in range(-steps, steps + 1)}
        meanings[steps + 1] = "not finite"
        legend = _legend_line((symbols[level], meanings[level]) for level in levels.unique().tolist())
        return _text(cells, Grid(levels, grid.cell), symbols, [legend, self._meaning()], columns)

    def svg(self, style: bool = True) -> str:
        cells = self._cells
        if isinstance(cells, ScoreCells) and cells.kind == "curve":
            scores, changed = (x.tolist() for x in cells.curve)
            canvas = svg.Canvas(cells.name, "what becomes of a score, anywhere", 240, svg.left_margin(["-1000"]))
            canvas.curve(list(zip(scores, changed, strict=True)), scores[-1])
            canvas.notes(filter(None, [cells.element]))
            return canvas.finished(f"{cells.name}: what becomes of a score", style)
        steps = svg.STEPS
        colors = [*(f"n{i}" for i in range(steps, 0, -1)), "k0", *(f"p{i}" for i in range(1, steps + 1))]
        classes = dict(enumerate([*colors, "card"], -steps))
        canvas, grid = _canvas(cells, _SCORE_CELLS, classes, lambda values: _levels(values, steps))
        lowest, largest = self._lowest, _largest_finite(grid.values)
        shares = [(i / 4, lowest + i / 4 * (1 - lowest)) for i in range(5)]
        canvas.bar(colors[(1 + lowest) * steps :], [(place, svg.number(largest * share)) for place, share in shares])
        if not grid.values.isfinite().all():
            canvas.swatches([("card", "not finite: hidden, where it is -inf")])
        canvas.notes([self._meaning()])
        return canvas.finished(f"{cells.name}; {_subtitle(cells)}; {self._meaning()}", style)

    def plot(self, ax: Axes | None = None) -> Axes:
        ax = _axes(ax)
        from matplotlib.colors import LinearSegmentedColormap

        cells = self._cells
        if isinstance(cells, ScoreCells) and cells.kind == "curve":
            scores, changed = cells.curve
            ax.plot(scores.numpy(), changed.numpy(), color=svg.LIGHT["k3"])
            ax.plot(scores.numpy(), scores.numpy(), color=svg.LIGHT["line"], linestyle="--", linewidth=1)
            ax.set(title=_plot_title(cells), xlabel="score", ylabel="what becomes of it")
            return ax
        grid = cells.grid(_MASK_CELLS, _MASK_CELLS)
        largest = _largest_finite(grid.values)
        names = ("n8", "k0", "p8")[1 + self._lowest :]
        colors = LinearSegmentedColormap.from_list("bias", [svg.LIGHT[name] for name in names])
        image = _plot_cells(ax, cells, grid, colors, (self._lowest * largest, largest))
        ax.figure.colorbar(image, ax=ax, label=self._meaning())
        return ax

    def _meaning(self) -> str:
        return {
            "bias": "added to each score",
            "change": "added to a score of 1; depends on the score",
            "weights": "of a query's attention, to the keys of a cell",
        }[self._cells.kind]

    @property
    def _lowest(self) -> int:
        """The lowest number of the colors, in highest ones."""
        return 0 if self._cells.kind == "weights" else -1


def _text_grid(cells: Cells, columns: int) -> Grid:
    """Cells for text, where a character is twice as tall as wide."""
    keys = max(-(-cells.kv_len // columns), -(-cells.q_len // (2 * WIDEST_TEXT)))  # of a character
    queries = keys if keys == 1 else 2 * keys
    return cells.grid(-(-cells.q_len // queries), columns)


def _text(cells: Cells, grid: Grid, symbols: Mapping[int, str], notes: list[str], columns: int) -> str:
    rows = ["".join(map(symbols.__getitem__, row)) for row in grid.values.tolist()]
    sizes = f"{cells.q_len} queries (down) x {cells.kv_len} keys (across)"
    sizes += f", a character is {grid.cell[0]} x {grid.cell[1]} of them"
    return "\n".join([*rows, *_wrapped([*notes, sizes, cells.element], columns)])


def _legend_line(entries: Iterable[tuple[str, str]]) -> str:
    """Symbols and meanings; the spaces inside keep `_wrapped` from parting them."""
    return "   ".join(f"{symbol}\xa0{meaning}" for symbol, meaning in entries)


def _wrapped(lines: Iterable[str], columns: int) -> list[str]:
    width = max(columns, 24)
    parts = [part for line in lines if line for part in textwrap.wrap(line, width, break_long_words=False)]
    return [part.replace("\xa0", " ") for part in parts]


def _canvas(
    cells: Cells,
    most_cells: int,
    classes: Mapping[int, str],
    classified: Callable[[Tensor], Tensor],
    block_edges: tuple[list[float], list[float]] = ([], []),
) -> tuple[svg.Canvas, Grid]:
    """Draw a grid as fine as an SVG's limit allows, and return both.

    most_cells: number of cells along the longer side.
    classes: the color class of each class number.
    classified: function from the grid's values to class numbers.
    block_edges: where to draw lines between rows and between columns.
    """
    width, height = svg.frame_size(cells.q_len, cells.kv_len)
    longer = max(width, height)
    left = svg.left_margin(label for _, label in svg.ticks(cells.q_len, height))
    while True:
        canvas = svg.Canvas(cells.name, _subtitle(cells), width, left)
        grid = cells.grid(-(-height * most_cells // longer), -(-width * most_cells // longer))
        lengths = (cells.q_len, cells.kv_len)
        characters = canvas.cells(lengths, classified(grid.values), grid.cell, classes, block_edges)
        if characters <= _LONGEST_CELLS or most_cells <= _FEWEST_CELLS:
            return canvas, grid
        most_cells //= 2


def _subtitle(cells: Cells) -> str:
    return ", ".join(filter(None, [f"{cells.q_len:,} queries x {cells.kv_len:,} keys", cells.element]))


def _percent(part: float) -> str:
    digits = 1 if part in (0, 1) or 0.001 <= part <= 0.999 else 3
    return f"{part:.{digits}%}"


def _largest_finite(values: Tensor) -> float:
    """The largest finite absolute value, or 1 if that is 0."""
    finite = values[values.isfinite()]
    return (float(finite.abs().max()) if len(finite) else 0.0) or 1.0


def _levels(values: Tensor, steps: int) -> Tensor:
    """Levels from -steps to steps, at the largest absolute value; steps + 1 for values that are not finite."""
    scaled = (values / _largest_finite(values) * steps).round().clamp(-steps, steps)
    return torch.where(values.isfinite(), scaled, steps + 1).nan_to_num(steps + 1).int()


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        if not hasattr(ax, "imshow"):
            raise TypeError(f"flexmasks: `ax` must be matplotlib's Axes, or None for a new figure, got {ax!r}.")
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("flexmasks: `plot` needs matplotlib; `pip install matplotlib` installs it.") from error
    return Figure(layout="constrained").add_subplot()


def _plot_title(cells: Cells) -> str:
    return "\n".join(line for line, _ in svg.title_lines(cells.name, _TITLE_COLUMNS))


def _plot_cells(ax: Axes, cells: Cells, grid: Grid, colors: Any, limits: tuple[float, float]) -> Any:
    rows, columns = grid.values.shape
    extent = (0, columns * grid.cell[1], rows * grid.cell[0], 0)
    low, high = limits
    image = ax.imshow(grid.values.numpy(), colors, vmin=low, vmax=high, extent=extent, interpolation="nearest")
    x_limits, y_limits = (0, cells.kv_len), (cells.q_len, 0)
    ax.set(title=_plot_title(cells), xlabel="keys (tokens)", ylabel="queries (tokens)", xlim=x_limits, ylim=y_limits)
    ax.xaxis.set_label_position("top")
    ax.xaxis.tick_top()
    if not 0.2 < cells.q_len / cells.kv_len < 5:
        ax.set_aspect("auto")
    return image
