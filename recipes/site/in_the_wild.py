"""The page of masks of other projects: the picture and the code of each, and the equal mask of this library."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import flexmasks

RECIPES = Path(__file__).parent.parent
sys.path.append(str(RECIPES))  # where the benchmarks lie

from benchmarks.wild import place, said
from benchmarks.wild_masks import WILD, Wild

LENGTH, BLOCK = 1024, 16  # tokens of the pictures, and of a cell


def page() -> str:
    """Return the page in Markdown."""
    results = {name: _planned(name) for name in ("wild_cpu", "wild_gpu")}
    parts = [
        "# Masks in the wild",
        f"{len(WILD)} masks as other projects define them: written from their definitions, with the tensors that they "
        "close over, each beside the mask of this library that equals it. `flexmasks.attention` takes the functions as "
        "they are. Pictures are of about 1,024 tokens; [the figures of all](../results/wild.md) stand on one page.",
        *(_section(wild, results) for wild in WILD.values()),
    ]
    return "\n\n".join(parts) + "\n"


def _planned(name: str) -> dict[str, Any]:
    """The rows of planning of a run by mask, none if it was not measured."""
    file = RECIPES / f"results/{name}.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    return {row["case"]: row for row in rows if row["kind"] == "planning"}


def _section(wild: Wild, results: dict[str, dict[str, Any]]) -> str:
    pair = wild.pair(LENGTH)
    drawn = flexmasks.draw(pair.function, pair.q_len, pair.kv_len, heads=pair.heads, q_offset=0, block_size=BLOCK).svg(
        style=False
    )
    found = {name: rows[wild.name] for name, rows in results.items() if wild.name in rows}
    lines = [f"Here: `{wild.expression}`."]
    if found:
        lines.append(f"`compare` says: {said(next(iter(found.values())))}.")
    for name, row in found.items():
        device = "a CPU" if name == "wild_cpu" else "one GPU"
        lines.append(
            f"Planned on {device} for {row['q_len']:,} queries and {row['kv_len']:,} keys: the function in "
            f"{row['function_ms']:.3g} ms, the mask in {row['named_ms']:.3g} ms, by create_block_mask in "
            f"{row['torch_ms']:.3g} ms."
        )
    code = inspect.getsource(wild.make)
    parts = [
        f"## {wild.name}",
        f"{wild.about}\n\n{place(wild)}",
        f"<div class='fm-pictures'>\n<figure data-search-exclude>{drawn}</figure>\n</div>",
        "\n".join(f"- {line}" for line in lines),
        f"```python\n{code[code.index('def ') :].strip()}\n```",
    ]
    return "\n\n".join(parts)
