"""`python recipes/site/pages.py`: the tables of all masks and scores, and a section on each, in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

import flexmasks
from flexmasks.spec.definitions import definition

_WIDTH = 120  # characters of a line


def page(kind: str, entries: Iterable[Any]) -> str:
    """Return a table of masks or scores, and below it a section on each.

    Args:
        kind: "mask" or "score".
        entries: rows of `list_masks()` or `list_scores()`.

    Example:
        >>> import flexmasks
        >>> entries = [entry for entry in flexmasks.list_masks() if entry.name == "full"]
        >>> print(page("mask", entries).partition("###")[0].strip())
        | mask | meaning |
        |---|---|
        | [`full()`](#full) | Every query sees every key. |
    """
    entries = list(entries)
    rows = [f"| [`{entry.signature}`](#{entry.name}) | {_cell(entry.summary)} |" for entry in entries]
    table = "\n".join([f"| {kind} | meaning |", "|---|---|", *rows])
    return "\n\n".join([table, *(_section(kind, entry) for entry in entries)])


def _section(kind: str, entry: Any) -> str:
    registered = definition(kind, entry.name)
    file = f"{registered.function.__module__.rpartition('.')[2]}.py"
    where = f" in [{file}]({file})" if registered.by_library else ""
    parts = [f"### {entry.name}", f"`{entry.signature}`{where}", entry.summary]
    body = [p for p in registered.doc.split("\n\n")[1:] if not p.startswith(("Source:", "Peers:"))]
    if body:
        parts.append("```text\n{}\n```".format("\n\n".join(body)))
    facts = {"Source": entry.source, "In other libraries": entry.peers}
    parts += ["\n".join(_item(f"{title}: {text}") for title, text in facts.items() if text)]
    return "\n\n".join(part for part in parts if part)


def _item(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page("mask", flexmasks.list_masks()), page("score", flexmasks.list_scores()), sep="\n\n")
