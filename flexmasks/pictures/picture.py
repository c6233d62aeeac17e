"""Pictures of masks and score changes: text in a terminal, SVG in Jupyter and in files, matplotlib for papers."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexmasks.pictures import svg
from flexmasks.pictures.cells import HIDDEN, PARTIAL, SKIPPED, VISIBLE, Grid, MaskCells, ScoreCells
from flexmasks.plans.plan import Lengths, plan_mask
from flexmasks.spec.arguments import MaskLike, ScoreLike, get_mask, get_score
from flexmasks.spec.definitions import define
from flexmasks.spec.parameters import Parameter, Size
from flexmasks.spec.registry import list_masks, list_scores
from flexmasks.spec.values import Mask, Modifier, Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CALL = "flexmasks.show"
_ELEMENTS = 128  # up to so many positions a picture shows single elements, not blocks
_WIDEST = 80  # characters, of a picture as text
_CELLS = 256  # along the longer side of an SVG
_VALUES = 96  # the same for a score, whose cells merge less
_LARGEST = 60_000  # characters of an SVG's cells
_LINES = 32  # up to so many blocks have lines between them
_SHADES = {SKIPPED: "·", HIDDEN: "░", PARTIAL: "▒", VISIBLE: "█"}
_RAMP = "█▓▒░·+*#@"  # a score's change, from the lowest to the highest; 0 is in the middle
_GUESSED = 1024
_LONGEST = 1 << 16  # of guessed lengths


class Picture(ABC):
    """A picture of a mask or a score change, as `flexmasks.show` and `flexmasks.draw` make it.

    In Jupyter it shows itself as SVG, light or dark as the page is, and as text where it is printed.

    Example:
        >>> import flexmasks
        >>> picture = flexmasks.draw("causal", 4096)
        >>> print(picture.text(16).splitlines()[0])
        ▒▒··············
        >>> picture.svg()[:4]
        '<svg'
    """

    columns: int | None = None  # of the text; the terminal's by default

    @abstractmethod
    def text(self, columns: int | None = None) -> str:
        """The picture as text of so many characters in width; by default the terminal's width, at most 80."""

    @abstractmethod
    def svg(self, style: bool = True) -> str:
        """The picture as an SVG document, below 100 kB; without `style` it has the colors of light pages only."""

    @abstractmethod
    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw with matplotlib, which `pip install 'flexmasks[plot]'` brings, on `ax` or on a figure of its own.

        Raises ImportError where matplotlib is missing.
        """

    def save(self, path: str | Path) -> Path:
        """Write it to a file, whose suffix says as what: .svg, .html, .txt; .pdf and .png take matplotlib."""
        path = Path(path)
        kind = path.suffix.lower()
        if kind in (".svg", ".html", ".txt"):
            writers: dict[str, Callable[[], str]] = {
                ".svg": self.svg,
                ".html": lambda: f"<!doctype html>\n<meta charset='utf-8'>\n{self._repr_html_()}\n",
                ".txt": lambda: self.text() + "\n",
            }
            path.write_text(writers[kind](), encoding="utf-8")
        elif kind in (".pdf", ".png"):
            figure: Any = self.plot().figure
            figure.savefig(path, bbox_inches="tight", dpi=200)
        else:
            raise ValueError(f"flexmasks: a picture is saved as .svg, .html, .txt, .pdf or .png, got {str(path)!r}.")
        return path

    def __repr__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return f"<div>{self.svg()}</div>"

    def _width(self, columns: int | None) -> int:
        columns = columns or self.columns or min(shutil.get_terminal_size().columns, _WIDEST)
        if type(columns) is not int or columns < 1:
            raise ValueError(f"{_CALL}: `columns` must be an int above 0, got {columns!r}.")
        return columns


class MaskPicture(Picture):
    """Which pairs of queries and keys a mask shows, and what of them kernels compute: see `flexmasks.show`."""

    def __init__(self, cells: MaskCells) -> None:
        self._cells = cells
        self.q_len, self.kv_len, self.block_size = cells.q_len, cells.kv_len, cells.block_size
        self.counts = cells.counts

    def text(self, columns: int | None = None) -> str:
        """See `Picture.text`."""
        cells, columns = self._cells, self._width(columns)
        wanted = max(-(-cells.kv_len // columns), -(-cells.q_len // (2 * _WIDEST)))
        grid = cells.grid(-(-cells.q_len // (wanted * (1 + (wanted > 1)))), columns)  # a character is twice as tall
        rows = ["".join(map(_SHADES.__getitem__, row)) for row in grid.kinds.tolist()]
        legend = "   ".join(f"{_SHADES[kind]}\xa0{label}" for kind, label in self._legend(grid))
        sizes = f"{cells.q_len} queries (down) x {cells.kv_len} keys (across)"
        lines = [legend, *self._notes(), f"{sizes}, a character is {grid.cell[0]} x {grid.cell[1]} of them"]
        if cells.where:
            lines.append(cells.where)
        return "\n".join([*rows, *_wrapped(lines, columns)])

    def svg(self, style: bool = True) -> str:
        """See `Picture.svg`."""
        cells = self._cells
        frame = svg.Frame(cells.q_len, cells.kv_len)
        width, height = frame.size
        left = svg.left_margin(label for _, label in svg.ticks(cells.q_len, height))
        most = _CELLS
        while True:
            canvas = svg.Canvas(cells.name, _subtitle(cells), width, left)
            grid = cells.grid(-(-height * most // max(width, height)), -(-width * most // max(width, height)))
            extent = (cells.q_len / grid.cell[0], cells.kv_len / grid.cell[1])
            classes = {kind: f"k{kind}" for kind in _SHADES}
            if canvas.cells(frame, grid.kinds, classes, extent, self._lines()) <= _LARGEST or most <= 32:
                break
            most //= 2
        canvas.swatches((f"k{kind}", label) for kind, label in self._legend(grid))
        canvas.notes(self._notes())
        return canvas.finished("; ".join([cells.name, _subtitle(cells), *self._notes()]), style)

    def plot(self, ax: Axes | None = None) -> Axes:
        """See `Picture.plot`."""
        ax = _axes(ax)
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        cells = self._cells
        grid = cells.grid(_CELLS, _CELLS)
        colors = [svg.LIGHT[f"k{kind}"] for kind in _SHADES]
        rows, columns = grid.kinds.shape
        extent = (0, columns * grid.cell[1], rows * grid.cell[0], 0)
        ax.imshow(grid.kinds.numpy(), ListedColormap(colors), vmin=0, vmax=3, extent=extent, interpolation="nearest")
        _label(ax, cells)
        handles = [
            Patch(facecolor=colors[k], edgecolor=svg.LIGHT["line"], label=text) for k, text in self._legend(grid)
        ]
        notes = "\n".join(self._notes())
        ax.legend(handles=handles, title=notes, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2, frameon=False)
        return ax

    def _legend(self, grid: Grid) -> list[tuple[int, str]]:
        """The kinds of cells that there are, and what they mean."""
        block, cell = self._cells.block_size, grid.cell
        if block == (1, 1):
            words = {VISIBLE: "visible", PARTIAL: "visible in part", SKIPPED: "hidden"}
        elif cell[0] < block[0] or cell[1] < block[1]:
            words = {
                VISIBLE: "visible",
                PARTIAL: "visible in part",
                HIDDEN: "hidden, in a block that is computed",
                SKIPPED: "skipped, in an empty block",
            }
        else:
            several = "partial, or blocks of several kinds" if cell != block else "partial block"
            words = {VISIBLE: "full block", PARTIAL: several, SKIPPED: "empty block, skipped"}
        there = set(grid.kinds.unique().tolist())
        return [(kind, word) for kind, word in words.items() if kind in there]

    def _notes(self) -> list[str]:
        counts, (height, width) = self.counts, self._cells.block_size
        empty, partial, full = map(_percent, counts.shares)
        if (height, width) == (1, 1):
            return [f"visible {full}, hidden {empty} of the pairs"]
        about = "about " if counts.estimated else ""
        return [
            f"blocks of {height} x {width}: {counts.empty:,} empty, {counts.partial:,} partial, {counts.full:,} full",
            f"of all pairs: empty {empty} (sparsity), partial {partial}, full {full}",
            f"of the computed pairs {about}{_percent(counts.hidden)} are hidden",
        ]

    def _lines(self) -> tuple[list[float], list[float]]:
        """Where blocks meet, as shares of the axes."""
        cells = self._cells
        found: list[list[float]] = []
        for length, size in zip((cells.q_len, cells.kv_len), cells.block_size, strict=True):
            shown = size > 1 and length <= _LINES * size
            found.append([n / length for n in range(size, length, size)] if shown else [])
        return found[0], found[1]


class ScorePicture(Picture):
    """What a score change adds to the score of each pair of a query and a key: see `flexmasks.show`."""

    def __init__(self, cells: ScoreCells) -> None:
        self._cells = cells

    def text(self, columns: int | None = None) -> str:
        """See `Picture.text`."""
        cells, columns = self._cells, self._width(columns)
        sizes = f"{cells.q_len} queries (down) x {cells.kv_len} keys (across)"
        if cells.kind == "curve":
            scores, changed = (x[::10].tolist() for x in cells.curve)
            rows = [f"{s:10.4g} becomes {c:.4g}" for s, c in zip(scores, changed, strict=True)]
            return "\n".join([*rows, *_wrapped(["the same for all queries and keys", cells.where], columns)])
        wanted = max(-(-cells.kv_len // columns), -(-cells.q_len // (2 * _WIDEST)))
        values, cell = cells.grid(-(-cells.q_len // (wanted * (1 + (wanted > 1)))), columns)
        largest = _largest(values)
        steps = len(_RAMP) // 2
        levels = _levels(values, largest, steps)
        shown = {level: _RAMP[level + steps] for level in range(-steps, steps + 1)} | {steps + 1: "?"}
        rows = ["".join(map(shown.__getitem__, row)) for row in levels.tolist()]
        there = sorted(set(levels.unique().tolist()) - {steps + 1})
        legend = "   ".join(f"{shown[level]}\xa0{svg.number(level / steps * largest)}" for level in there)
        if steps + 1 in levels.unique():
            legend += "   ?\xa0not finite"
        lines = [legend, self._meaning(), f"{sizes}, a character is {cell[0]} x {cell[1]} of them", cells.where]
        return "\n".join([*rows, *_wrapped(lines, columns)])

    def svg(self, style: bool = True) -> str:
        """See `Picture.svg`."""
        cells = self._cells
        if cells.kind == "curve":
            scores, changed = (x.tolist() for x in cells.curve)
            canvas = svg.Canvas(cells.name, "what becomes of a score, anywhere", 240, svg.left_margin(["-1000"]))
            canvas.curve(list(zip(scores, changed, strict=True)), scores[-1])
            canvas.notes(filter(None, [cells.where]))
            return canvas.finished(f"{cells.name}: what becomes of a score", style)
        frame = svg.Frame(cells.q_len, cells.kv_len)
        width, height = frame.size
        left = svg.left_margin(label for _, label in svg.ticks(cells.q_len, height))
        steps, most = svg.STEPS, _VALUES
        names = [f"n{-i}" if i < 0 else f"p{i}" if i else "k0" for i in range(-steps, steps + 1)]
        while True:
            canvas = svg.Canvas(cells.name, _subtitle(cells), width, left)
            values, cell = cells.grid(-(-height * most // max(width, height)), -(-width * most // max(width, height)))
            largest = _largest(values)
            levels = _levels(values, largest, steps)
            classes = dict(zip(range(-steps, steps + 2), [*names, "card"], strict=True))
            extent = (cells.q_len / cell[0], cells.kv_len / cell[1])
            if canvas.cells(frame, levels, classes, extent) <= _LARGEST or most <= 32:
                break
            most //= 2
        canvas.bar(names, [(i / 4, svg.number(largest * (i / 2 - 1))) for i in range(5)])
        if steps + 1 in levels.unique():
            canvas.swatches([("card", "not finite: hidden, where it is -inf")])
        canvas.notes([self._meaning()])
        return canvas.finished(f"{cells.name}; {_subtitle(cells)}; {self._meaning()}", style)

    def plot(self, ax: Axes | None = None) -> Axes:
        """See `Picture.plot`."""
        ax = _axes(ax)
        from matplotlib.colors import LinearSegmentedColormap

        cells = self._cells
        if cells.kind == "curve":
            scores, changed = cells.curve
            ax.plot(scores.numpy(), changed.numpy(), color=svg.LIGHT["k3"])
            ax.plot(scores.numpy(), scores.numpy(), color=svg.LIGHT["line"], linestyle="--", linewidth=1)
            ax.set(title=cells.name, xlabel="score", ylabel="what becomes of it")
            return ax
        values, cell = cells.grid(_CELLS, _CELLS)
        largest = _largest(values)
        colors = LinearSegmentedColormap.from_list("bias", [svg.LIGHT[name] for name in ("n8", "k0", "p8")])
        rows, columns = values.shape
        extent = (0, columns * cell[1], rows * cell[0], 0)
        image = ax.imshow(values.numpy(), colors, vmin=-largest, vmax=largest, extent=extent, interpolation="nearest")
        _label(ax, cells)
        ax.figure.colorbar(image, ax=ax, label=self._meaning())
        return ax

    def _meaning(self) -> str:
        return "added to each score" if self._cells.kind == "bias" else "added to a score of 1; depends on the score"


def draw(
    mask: MaskLike | ScoreLike,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    b: int = 0,
    h: int = 0,
    batch: int | None = None,
    heads: int | None = None,
    block_size: int | tuple[int, int] | None = None,
    q_offset: int | Tensor = 0,
    **params: Any,
) -> Picture:
    """The picture of a mask or a score change, without showing it: to be saved, plotted or read.

    Takes and raises what `flexmasks.show` does.

    Example:
        >>> import flexmasks
        >>> picture = flexmasks.draw("causal", 1024)
        >>> picture.counts.empty, picture.counts.partial, picture.counts.full
        (28, 8, 28)
    """
    made = _value(mask, params)
    if q_len is None:
        fitting = _fitting(made, b, h)
        q_len, kv_len = fitting[0], kv_len or fitting[1]
    if batch is None:
        batch = made.batch_size() or (len(q_offset) if isinstance(q_offset, Tensor) and q_offset.ndim else None)
    heads = made.implied_size("H") if heads is None else heads
    for name, index, n in (("b", b, batch), ("h", h, heads)):
        if type(index) is not int or index < 0 or (isinstance(n, int) and index >= n):
            raise ValueError(f"{_CALL}: `{name}` must be an int from 0{f' to {n - 1}' if n else ''}, got {index!r}.")
    batch = b + 1 if batch is None else batch
    if isinstance(made, Score):
        if heads is None:
            heads = max(8, h + 1) if made.definition.registered else h + 1
        device = next((t.device for t in made.tensors()), None)
        sizes = plan_mask(_CALL, get_mask("full"), Lengths(q_len, kv_len, batch, heads, device, q_offset, 1))
        return ScorePicture(ScoreCells(made, sizes.size, q_offset, b, h))
    heads = h + 1 if heads is None else heads
    if block_size is None:
        shown = all(n is None or (type(n) is int and n <= _ELEMENTS) for n in (q_len, kv_len))
        block_size = 1 if shown else 128
    plan = plan_mask(_CALL, made, Lengths(q_len, kv_len, batch, heads, None, q_offset, block_size))
    return MaskPicture(MaskCells(plan, b, h))


def show(
    mask: MaskLike | ScoreLike,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    b: int = 0,
    h: int = 0,
    batch: int | None = None,
    heads: int | None = None,
    block_size: int | tuple[int, int] | None = None,
    q_offset: int | Tensor = 0,
    columns: int | None = None,
    **params: Any,
) -> Picture:
    """Show which pairs of queries and keys a mask makes visible and what kernels skip, or what a score change adds.

    In Jupyter the picture is an SVG, elsewhere text. It is drawn from blocks, so that a million tokens take seconds.

    Args:
        mask: a mask as in `flexmasks.block_mask`, or a score change as in `flexmasks.attention`: a name (a mask's,
            where both have it), a value, or a function.
        q_len, kv_len: numbers of queries and keys; by default such as the parameters suggest.
        b, h: the batch element and head to draw.
        batch, heads: how far b and h range, by default what the parameters' shapes say, else as far as drawn (8
            heads of registered score changes).
        block_size: an int or a pair; by default single elements up to 128 positions, else 128.
        q_offset: where the queries start, as in `flexmasks.attention`.
        columns: characters of the text in width, the terminal's by default, at most 80.
        params: the parameters of the mask or score.

    Returns:
        The picture: `.svg()`, `.text(columns)`, `.save(path)`, `.plot(ax)`. A session that displays what a call
        returns, as Jupyter and Python's prompt do, displays it; a script prints it at once.

    Raises:
        ValueError, TypeError: on any input that does not fit.

    Example:
        >>> import flexmasks
        >>> picture = flexmasks.show("sliding_window", 6, window=2)
        █·····
        ██····
        ███···
        ·███··
        ··███·
        ···███
        █ visible   · hidden
        visible 41.7%, hidden 58.3% of the pairs
        6 queries (down) x 6 keys (across), a character is 1 x 1 of them
    """
    picture = draw(
        mask,
        q_len,
        kv_len,
        b=b,
        h=h,
        batch=batch,
        heads=heads,
        block_size=block_size,
        q_offset=q_offset,
        **params,
    )
    picture.columns = columns
    if not hasattr(sys, "ps1"):  # which sessions have that display values
        print(picture)
    return picture


def html_of(value: Any) -> str:
    """What Jupyter shows of a mask or score: its picture, or its repr and why there is none. Never raises."""
    try:
        return draw(value)._repr_html_()
    except Exception as error:
        reason = f"no picture: {error or type(error).__name__}"
        try:
            name = repr(value)
        except Exception:
            name = type(value).__name__
        return f"<pre>{escape(name)}\n{escape(reason)}</pre>"


def _fitting(value: Modifier, b: int, h: int) -> tuple[int, int]:
    """Lengths that the parameters accept: those that they suggest, or else the first power of two."""
    suggested = lengths_for(value)
    device = next((t.device for t in value.tensors()), torch.device("cpu"))
    batch, heads = value.batch_size() or b + 1, value.implied_size("H") or h + 1
    tables = [torch.as_tensor(given) for parameter, given in _parameters(value) if _is_tensor(parameter, given)]
    rows = [(t.shape[-min(t.ndim, 2)], suggested[1]) for t in tables if t.ndim]  # tables with a row for each query
    lines = [(t.shape[-1], suggested[1]) for t in tables if t.ndim]
    for q_len, kv_len in (suggested, *rows, *lines, *((1 << n, 1 << n) for n in range(6, 15))):
        with contextlib.suppress(ValueError, TypeError):
            value.resolve(Size(batch, heads, q_len, kv_len, device))
            return q_len, kv_len
    return suggested


def lengths_for(value: Modifier) -> tuple[int, int]:
    """Numbers of queries and keys that a mask's or score's parameters suggest.

    The lengths of tensors that have one element for each position; a canvas' height times width; the largest number
    in other tensors, such as lengths and offsets, those of the keys in parameters named kv_...; else four times the
    largest number, so that a window shows well.
    """
    exact = {name: value.implied_size(name) for name in ("Q", "KV", "S")}
    positions: list[int] = []
    reached: list[int] = []
    reached_by_keys: list[int] = []
    numbers: list[int] = []
    for parameter, given in _parameters(value):
        if _is_tensor(parameter, given):
            tensor = torch.as_tensor(given)
            # numbers below the length are what each position has, such as ids
            found = [max(n, *tensor.shape[-1:]) for n in _largest_number(tensor)]
            (reached_by_keys if parameter.name.startswith("kv_") else reached).extend(found)
        else:
            numbers += [n for n in (given if isinstance(given, tuple) else (given,)) if type(n) is int]
    positions += _canvases(value)
    known = [id(given) for _, given in _parameters(value)]
    for tensor in value.tensors():
        if id(tensor) not in known:  # a function captured it: nothing is known of it but what it looks like
            longest = max(tensor.shape, default=0)
            positions += [longest] if longest >= 64 else []
            reached += _largest_number(tensor) if longest < 64 else []
    guess = next((max(found) for found in (positions, reached) if found), 0)
    if not guess and numbers:
        guess = max(64, 1 << (4 * max(numbers) - 1).bit_length())
    length = exact["S"] or exact["Q"] or min(guess, _LONGEST) or exact["KV"] or _GUESSED
    return length, exact["S"] or exact["KV"] or max(reached_by_keys, default=length)


def _is_tensor(parameter: Parameter, given: Any) -> bool:
    return isinstance(given, Tensor) or parameter.is_sequence(given)


def _parameters(value: Modifier) -> Iterator[tuple[Parameter, Any]]:
    """The parameters of a mask or score, and of those inside that see the same positions."""
    for name, given in value.params.items():
        inner = [v for v in (given if isinstance(given, tuple) else (given,)) if isinstance(v, Modifier)]
        if not inner:
            yield value.definition.parameters[name], given
        elif value.definition.inner_size is None:
            for modifier in inner:
                yield from _parameters(modifier)


def _canvases(value: Modifier) -> Iterator[int]:
    """The number of tokens of a canvas, by the names that its axes have; `length` is one axis."""
    axes = {p.name: given for p, given in _parameters(value) if type(given) is int}
    sides = [axes[name] for name in ("depth", "height", "width") if name in axes] or [axes.get("length", 0)]
    if all(sides):
        yield math.prod(sides)


def _largest_number(tensor: Tensor) -> list[int]:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or not tensor.numel():
        return []
    return [n for n in (int(tensor.max()),) if 0 < n <= _LONGEST]


def _value(given: Any, params: dict[str, Any]) -> Mask | Score:
    """A Mask or a Score of what `show` was given."""
    if isinstance(given, str):
        in_masks, in_scores = (any(e.name == given for e in entries) for entries in (list_masks(), list_scores()))
        holds_score = any(isinstance(v, Score) for v in params.values())
        is_score = in_scores and (holds_score or not in_masks)
    elif isinstance(given, Modifier):
        is_score = isinstance(given, Score)
    else:
        is_score = False
        if callable(given):
            try:
                define("mask", given)
            except TypeError:
                is_score = _is_score(given)
    return get_score(given, **params) if is_score else get_mask(given, **params)


def _is_score(function: Any) -> bool:
    try:
        define("score", function)
    except TypeError:
        return False
    return True


def _subtitle(cells: MaskCells | ScoreCells) -> str:
    return ", ".join(filter(None, [f"{cells.q_len:,} queries x {cells.kv_len:,} keys", cells.where]))


def _percent(share: float) -> str:
    digits = 1 if share in (0, 1) or 0.001 <= share <= 0.999 else 3
    return f"{share:.{digits}%}"


def _wrapped(lines: Iterable[str], columns: int) -> list[str]:
    width = max(columns, 24)
    parts = [part for line in lines if line for part in textwrap.wrap(line, width, break_long_words=False)]
    return [part.replace("\xa0", " ") for part in parts]  # which kept a shade and its meaning together


def _largest(values: Tensor) -> float:
    """The largest finite absolute value, above 0."""
    finite = values[values.isfinite()]
    largest = float(finite.abs().max()) if len(finite) else 0.0
    return largest or 1.0


def _levels(values: Tensor, largest: float, steps: int) -> Tensor:
    """Values from -largest to largest as -steps to steps; steps + 1 for those that are not finite."""
    scaled = (values / largest * steps).round().clamp(-steps, steps)
    return torch.where(values.isfinite(), scaled, steps + 1).nan_to_num(steps + 1).int()


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("flexmasks: `plot` needs matplotlib; pip install 'flexmasks[plot]' brings it.") from error
    return Figure(layout="constrained").add_subplot()


def _label(ax: Axes, cells: MaskCells | ScoreCells) -> None:
    ax.set(
        title=cells.name,
        xlabel="keys (tokens)",
        ylabel="queries (tokens)",
        xlim=(0, cells.kv_len),
        ylim=(cells.q_len, 0),
    )
    ax.xaxis.set_label_position("top")
    ax.xaxis.tick_top()
    if not 0.2 < cells.q_len / cells.kv_len < 5:
        ax.set_aspect("auto")


Modifier.to_html = staticmethod(html_of)
