"""SVG of pictures: cells as rectangles, axes, legend and colors."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape as escape_html

from torch import Tensor

# Colors by class. k0 to k3 are the cells of a mask: SKIPPED, HIDDEN, PARTIAL and VISIBLE. n8 and p8 are the lowest and
# the highest level of a score change; the levels between them and 0, which is k0, are mixed below. The colors of cells
# differ in lightness, so a reader who sees no hues can distinguish them.
LIGHT = {
    "card": "#ffffff", "text": "#1f2328", "muted": "#57606a", "line": "#8c959f",
    "k0": "#eef1f5", "k1": "#f5cf9f", "k2": "#c76b00", "k3": "#08356e", "n8": "#08356e", "p8": "#8a3800",
}  # fmt: skip
DARK = {
    "card": "#15191f", "text": "#e6edf3", "muted": "#a3adb8", "line": "#6e7781",
    "k0": "#20262e", "k1": "#5c3f1c", "k2": "#ac681b", "k3": "#b3e0ff", "n8": "#b3e0ff", "p8": "#ffc890",
}  # fmt: skip
Ticks = Sequence[tuple[float, str]]  # places as fractions of an axis, and labels
STEPS = 8  # levels of a score change on either side of 0
_LONGER_SIDE = 288  # pixels
_SHORTER_SIDE = 56  # pixels, at least
_MARGIN = 12  # pixels
_TITLE_LETTER = 8.0  # pixels of a letter of titles, in the widest of the fonts
_TITLE_LINES = 3  # at most
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_FONT = "font-family='system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif'"


def _mixed(a: str, b: str, part_of_b: float) -> str:
    pairs = [(int(a[i : i + 2], 16), int(b[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(x + (y - x) * part_of_b):02x}" for x, y in pairs)


for _colors in (LIGHT, DARK):
    for _step in range(1, STEPS):
        for _sign in "np":
            _colors[f"{_sign}{_step}"] = _mixed(_colors["k0"], _colors[f"{_sign}{STEPS}"], _step / STEPS)


def style() -> str:
    """The style sheet of all pictures. Colors follow the page's theme (Jupyter, VS Code, Sphinx), else the system's."""

    def variables(colors: Mapping[str, str]) -> str:
        return ";".join(f"--fm-{name}:{value}" for name, value in colors.items())

    light = "[data-jp-theme-light=true],[data-theme=light],[theme=light],.vscode-light"
    dark = "[data-jp-theme-light=false],[data-theme=dark],[theme=dark],.vscode-dark,.vscode-high-contrast"
    return (
        # Programs without support for variables use the fill attributes, which are the light colors.
        "@supports (fill:var(--x)){"
        f".flexmasks{{{variables(LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{.flexmasks{{{variables(DARK)}}}}}"
        f":is({light}) .flexmasks{{{variables(LIGHT)}}}"
        f":is({dark}) .flexmasks{{{variables(DARK)}}}"
        + "".join(f".flexmasks .fm-{name}{{fill:var(--fm-{name})}}" for name in LIGHT if name != "line")
        + ".flexmasks .fm-line{stroke:var(--fm-line)}.flexmasks .fm-curve{stroke:var(--fm-k3)}}"
    )


def frame_size(q_len: int, kv_len: int) -> tuple[int, int]:
    """A picture's width and height in pixels; axes whose lengths differ a lot are not to scale."""
    longest = max(q_len, kv_len)
    width, height = (max(_SHORTER_SIDE, round(_LONGER_SIDE * n / longest)) for n in (kv_len, q_len))
    return width, height


def merged(cells: Tensor) -> dict[int, list[tuple[int, int, int, int]]]:
    """The rectangles (row, column, height, width) that equal cells [rows, columns] form, by value: a run of equal cells
    in a row, and the same run in the rows below it.
    """
    rectangles: dict[int, list[tuple[int, int, int, int]]] = {}
    open_runs: dict[tuple[int, int, int], int] = {}  # (value, first column, past the last): its first row
    for row, values in enumerate([*cells.tolist(), []]):
        starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
        ends = [*starts[1:], len(values)]
        runs = {(values[i], i, j) for i, j in zip(starts, ends, strict=False)}  # the last row is empty
        for run in [r for r in open_runs if r not in runs]:
            value, first, end = run
            top = open_runs.pop(run)
            rectangles.setdefault(value, []).append((top, first, row - top, end - first))
        for run in sorted(runs):
            open_runs.setdefault(run, row)
    return rectangles


def cells_path(rectangles: Iterable[tuple[int, int, int, int]], rows: float, columns: float) -> str:
    """Rectangles as the data of an SVG path, cut at edges."""
    data = []
    for row, column, height, width in sorted(rectangles):
        w, h = (f"{min(n, end - at):.6g}" for n, end, at in ((width, columns, column), (height, rows, row)))
        data.append(f"M{column} {row}h{w}v{h}h-{w}z")
    return "".join(data)


class Canvas:
    """An SVG that grows downward: a title, a picture with axes, a legend."""

    def __init__(self, name: str, subtitle: str, width: int, left: int) -> None:
        self._parts: list[str] = []
        self._left = left
        self._width = max(left + width + _MARGIN + 16, 372)
        self._y = 6
        for line, tooltip in title_lines(name, int((self._width - 2 * _MARGIN) / _TITLE_LETTER)):
            self._y += 18
            self._parts.append(_text(_MARGIN, self._y, line, "text", 13, more=" font-weight='600'", tooltip=tooltip))
        self._y += 18
        self._parts.append(_text(_MARGIN, self._y, _shortened(subtitle, self._width - 2 * _MARGIN, 5.9), "muted", 11))

    def cells(
        self,
        lengths: tuple[int, int],
        classified: Tensor,
        cell: tuple[int, int],
        classes: Mapping[int, str],
        block_edges: tuple[Sequence[float], Sequence[float]] = ((), ()),
    ) -> int:
        """Draw cells [rows, columns] and return the number of characters drawn.

        lengths: numbers of queries and keys.
        classified: the class number of each cell.
        cell: queries and keys of a cell.
        classes: the color class of each class number.
        block_edges: where lines are drawn between rows and between columns, as fractions of the axes.
        """
        self._y += 38
        width, height = frame_size(*lengths)
        rows, columns = lengths[0] / cell[0], lengths[1] / cell[1]  # the edge may cut the last cells
        rectangles = merged(classified)
        back = max(rectangles, key=lambda value: len(rectangles[value]))  # drawn as one, below all other classes
        drawn = [f"<rect width='{columns:.6g}' height='{rows:.6g}'{_fill(classes[back])}/>"]
        for value, name in classes.items():
            if value != back and value in rectangles:
                drawn.append(f"<path d='{cells_path(rectangles[value], rows, columns)}'{_fill(name)}/>")
        scale = f"translate({self._left} {self._y}) scale({width / columns:.8g} {height / rows:.8g})"
        path = "".join(drawn)
        self._parts.append(f"<g transform='{scale}' shape-rendering='crispEdges'>{path}</g>")
        between = "".join(f"M{self._left} {self._y + y * height:.2f}h{width}" for y in block_edges[0])
        between += "".join(f"M{self._left + x * width:.2f} {self._y}v{height}" for x in block_edges[1])
        if between:
            self._parts.append(f"<path d='{between}' fill='none' class='fm-line'{_stroke(0.5)} opacity='.55'/>")
        x_ticks, y_ticks = ticks(lengths[1], width), ticks(lengths[0], height)
        self.axes(width, height, "keys (tokens)", "queries (tokens)", x_ticks, y_ticks)
        return len(path)

    def axes(self, width: int, height: int, across: str, down: str, x_ticks: Ticks, y_ticks: Ticks) -> None:
        """Draw a frame with labels and ticks, and move below it."""
        x, y = self._left, self._y
        marks = "".join(f"M{x + at * width:.2f} {y - 4}v4" for at, _ in x_ticks)
        marks += "".join(f"M{x - 4} {y + at * height:.2f}h4" for at, _ in y_ticks)
        outline = f"M{x} {y}h{width}v{height}h-{width}z"
        self._parts.append(f"<path d='{outline}{marks}' fill='none' class='fm-line'{_stroke(1)}/>")
        self._parts += [_text(x + at * width, y - 8, label, "muted", 10, at="middle") for at, label in x_ticks]
        self._parts += [_text(x - 7, y + at * height + 3.5, label, "muted", 10, at="end") for at, label in y_ticks]
        self._parts.append(_text(x + width / 2, y - 22, across, "text", 11, at="middle"))
        turned = f" transform='rotate(-90 {_MARGIN + 8} {y + height / 2})'"
        self._parts.append(_text(_MARGIN + 8, y + height / 2, down, "text", 11, at="middle", more=turned))
        self._y = y + height + 10

    def curve(self, points: Sequence[tuple[float, float]], reach: float) -> None:
        """Draw the changed scores over scores from -reach to reach."""
        self._y += 38
        side = _LONGER_SIDE * 3 // 4
        at = [(self._left + (x / reach + 1) * side / 2, self._y + (1 - y / reach) * side / 2) for x, y in points]
        x, y = self._left, self._y
        thin = f"M{x} {y + side}l{side} -{side}M{x} {y + side / 2}h{side}M{x + side / 2} {y}v{side}"
        self._parts.append(f"<path d='{thin}' fill='none' class='fm-line'{_stroke(0.75)} stroke-dasharray='3 3'/>")
        line = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in at)
        self._parts.append(
            f"<path d='{line}' fill='none' class='fm-curve' stroke='{LIGHT['k3']}' stroke-width='2.5'"
            " stroke-linejoin='round'/>"
        )
        marks = [(i / 4, f"{reach * (i / 2 - 1):g}") for i in range(5)]
        self.axes(side, side, "score", "what becomes of it", marks, [(1 - at, label) for at, label in marks])

    def swatches(self, entries: Iterable[tuple[str, str]]) -> None:
        for name, label in entries:
            self._y += 18
            square = f"<rect x='{_MARGIN}' y='{self._y - 10}' width='12' height='12' rx='2'"
            outline = f"{square} fill='none' class='fm-line'{_stroke(0.5)}/>"
            self._parts += [f"{square}{_fill(name)}/>", outline, _text(_MARGIN + 20, self._y, label, "text", 11)]

    def bar(self, names: Sequence[str], labels: Ticks) -> None:
        width, height = _LONGER_SIDE, 12
        x, y = self._left, self._y + 8
        one = width / len(names)
        for i, name in enumerate(names):
            self._parts.append(
                f"<rect x='{x + i * one:.2f}' y='{y}' width='{one:.2f}' height='{height}'{_fill(name)}/>"
            )
        outline = f"M{x} {y}h{width}v{height}h-{width}z"
        marks = "".join(f"M{x + at * width:.2f} {y + height}v4" for at, _ in labels)
        self._parts.append(f"<path d='{outline}{marks}' fill='none' class='fm-line'{_stroke(0.75)}/>")
        for at, label in labels:
            self._parts.append(_text(x + at * width, y + height + 15, label, "muted", 10, at="middle"))
        self._y = y + height + 18

    def notes(self, lines: Iterable[str]) -> None:
        self._y += 4
        for line in lines:
            self._y += 15
            self._parts.append(_text(_MARGIN, self._y, line, "muted", 11))

    def finished(self, description: str, with_style: bool) -> str:
        width, height = self._width, self._y + _MARGIN
        sheet = f"<style>{style()}</style>" if with_style else ""
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' class='flexmasks' role='img' width='{width}' height='{height}' "
            f"viewBox='0 0 {width} {height}' aria-label='{_escape(description)}' {_FONT} "
            f"style='max-width:100%;height:auto'>{sheet}"
            f"<rect width='{width}' height='{height}' rx='8'{_fill('card')}/>{''.join(self._parts)}</svg>"
        )


def ticks(length: int, pixels: int) -> Ticks:
    """Labels of an axis in tokens, at fractions of its length."""
    most = max(1, pixels // 72)
    if length % 4 == 0 and most >= 4:
        return [(i / 4, f"{length * i // 4:,}") for i in range(5)]
    step = next(s for power in range(10) for s in (10**power, 2 * 10**power, 5 * 10**power) if length <= s * most)
    marks = [n for n in range(0, length, step) if length - n >= step / 2] + [length]
    return [(n / length, f"{n:,}") for n in marks]


def number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def left_margin(labels: Iterable[str]) -> int:
    """The pixels left of a picture for its axis's labels."""
    return _MARGIN + 26 + round(6.2 * max(map(len, labels)))


def title_lines(name: str, columns: int) -> list[tuple[str, str]]:
    """The lines of a title, each with its tooltip: the whole title if there are too many lines for it, else nothing."""
    lines = textwrap.wrap(name, columns, break_on_hyphens=False, max_lines=_TITLE_LINES, placeholder=" …") or [""]
    is_whole = "".join(name.split()) == "".join("".join(lines).split())
    return [(line, "" if is_whole else name) for line in lines]


def _text(x: float, y: float, text: str, name: str, size: int, at: str = "", more: str = "", tooltip: str = "") -> str:
    anchor = f" text-anchor='{at}'" if at else ""
    place = f"x='{x:.6g}' y='{y:.6g}'"
    shown = f"<title>{_escape(tooltip)}</title>{_escape(text)}" if tooltip else _escape(text)
    return f"<text {place} font-size='{size}'{anchor}{more}{_fill(name)}>{shown}</text>"


def _escape(text: str) -> str:
    return escape_html(_NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text))


def _shortened(text: str, width: int, letter_width: float) -> str:
    most = int(width / letter_width)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _fill(name: str) -> str:
    return f" class='fm-{name}' fill='{LIGHT[name]}'"


def _stroke(width: float) -> str:
    return f" stroke='{LIGHT['line']}' stroke-width='{width}'"
