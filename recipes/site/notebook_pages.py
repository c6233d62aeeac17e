"""Notebooks with their stored outputs, as pages in Markdown."""

from __future__ import annotations

from html import escape
from typing import Any


def page(notebook: dict[str, Any]) -> str:
    """Return the page of a notebook, as nbformat 4 stores it."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"````python\n{source}\n````")
            parts += [_shown(output) for output in cell["outputs"]]
    return "\n\n".join(part for part in parts if part) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """An output in the richest form that it has. Errors, and what was printed on stderr, are not shown."""
    data = output.get("data", {})
    for form in ("image/svg+xml", "text/html"):
        if form in data:
            return f"<figure>{''.join(data[form])}</figure>"
    if output.get("name") == "stderr":
        return ""
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"<div class='fm-output'><pre>{escape(text, quote=False).rstrip()}</pre></div>" if text.strip() else ""
