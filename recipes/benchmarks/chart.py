"""Bars of figures as SVG, for pages of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _LABELS, _NUMBERS = 860, 210, 60  # pixels: the whole, the names on the left, the numbers right of bars
_BAR, _GAP, _TITLE = 15, 4, 26  # pixels: heights of a bar, between two, of a line of text
_OURS, _OTHERS, _LINE, _TEXT, _CARD = "#08356e", "#c9d1d9", "#c76b00", "#1f2328", "#ffffff"


def bars(title: str, groups: Mapping[str, Sequence[tuple[str, float]]], line: float) -> str:
    """Return horizontal bars in groups, each with its name and number; those of flexmasks are dark.

    groups: names and values of bars, by the title of the group.
    line: the value at which a vertical line stands.
    """
    most = max([value for group in groups.values() for _, value in group] + [line])
    scale = (_WIDTH - _LABELS - _NUMBERS) / most
    y, parts = _TITLE, [_text(8, 18, title, "font-weight='bold'")]
    at_line = _LABELS + line * scale
    for name, group in groups.items():
        y += _TITLE
        parts.append(_text(8, y - 8, name))
        top = y
        for who, value in group:
            color = _OURS if who.startswith("flexmasks") else _OTHERS
            parts.append(_text(_LABELS - 8, y + _BAR - 3, who, "text-anchor='end'"))
            parts.append(f"<rect x='{_LABELS}' y='{y}' width='{value * scale:.1f}' height='{_BAR}' fill='{color}'/>")
            parts.append(_text(_LABELS + value * scale + 6, y + _BAR - 3, f"{value:.2f}"))
            y += _BAR + _GAP
        parts.append(f"<path d='M{at_line:.1f} {top - 2}V{y}' stroke='{_LINE}' stroke-width='1.5'/>")
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {y + 8}' width='{_WIDTH}' role='img' "
        f"font-family='system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif' font-size='12' fill='{_TEXT}'>"
        f"<title>{escape(title)}</title><rect width='100%' height='100%' fill='{_CARD}'/>\n" + "\n".join(parts)
    ) + "\n</svg>\n"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {more}>{escape(text)}</text>"
