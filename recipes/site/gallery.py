"""The gallery: a page of each mask and score, in Markdown, and a page of all of them."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import flexmasks
from flexmasks import Mask, Picture, Score, list_masks, list_scores
from flexmasks.spec.definitions import definition

SHORT = (64, 128, 256, 512, 1024)  # lengths to try for the pictures of single pairs, and for the code
LONGER = {"mask": (1024, 8192), "score": (512, 2048)}  # tokens of the other two pictures
_LINE = 88  # characters of code
_HEADS = 8
_RESULTS = Path(__file__).parent.parent / "results/registry_gpu.json"
# What a reader has, and the masks for it, the usual ones first.
USES = {
    "Text": (
        "causal", "sliding_window", "prefix_lm", "chunked_causal", "block_causal", "full", "local", "chunked", "band",
        "block_window", "summaries",
    ),
    "Several sequences in a row": (
        "packed", "document", "cross_document", "causal_blockwise", "shared_prefix", "multi_item", "groups",
    ),
    "Padded batches": ("padding", "key_padding", "grouped_tril"),
    "Long text": (
        "sink_window", "longformer", "bigbird", "dilated_window", "strided", "fixed", "global_tokens", "flashmask",
        "vertical_slash", "key_eviction",
    ),
    "Images and video": ("natten", "natten1d", "natten3d", "sasa", "sliding_tile", "temporal_window"),
    "Text with images": ("bidirectional_spans", "private_spans", "vision_cross"),
    "Serving and drafts": ("paged", "tree", "eagle3", "anchored"),
    "Diffusion of text": ("block_diffusion", "inverse_causal"),
    "Tables and lists": ("topk", "block_topk", "block_sparse", "bsr", "intervals", "edges", "slices", "dense"),
}  # fmt: skip


class Drawing(NamedTuple):
    """The example of a mask or score at a length, and its picture."""

    length: int
    value: Mask | Score
    picture: Picture


def pages() -> Iterator[tuple[str, str]]:
    """Yield the paths and texts of all pages, the first of which lists the others."""
    entries = {(entry.kind, entry.name): entry for entry in (*list_masks(), *list_scores())}
    groups = {
        use: [entries.pop(key) for name in names if (key := ("mask", name)) in entries] for use, names in USES.items()
    }
    groups["Other masks"] = [entries.pop(key) for key in [*entries] if key[0] == "mask"]
    groups["Scores"] = [*entries.values()]
    text = (
        "# Gallery\n\nEvery mask and score. Rows are queries, columns are keys. A mask of your own gets a page, too: "
        "`python recipes/site/build.py OUT --import my_masks`.\n"
    )
    for title, group in groups.items():
        text += f"\n## {title}\n\n<div class='fm-cards' data-search-exclude>\n" if group else ""
        for entry in group:
            name = f"{entry.kind}s/{entry.name}"
            drawings = drawn(entry)
            yield f"gallery/{name}.md", page(entry, drawings)
            small = re.sub(r"<(text|title).*?</\1>", "", drawings[0].picture.svg(style=False)) if drawings else ""
            text += f"<a href='{name}.html'><b>{entry.name}</b>{small}<span>{_prose(entry.summary)}</span></a>\n"
        text += "</div>\n" if group else ""
    yield "gallery/index.md", text


def page(entry: Any, drawings: list[Drawing] | None = None) -> str:
    """Return the page of a mask or score, an entry of `list_masks()` or `list_scores()`."""
    drawings = drawn(entry) if drawings is None else drawings
    known = definition(entry.kind, entry.name)
    rows, prose = _documented(known.doc, known.parameters)
    parts = [f"# {entry.name}", f"`{entry.signature}`", markdown(entry.summary)]
    if drawings:
        parts += ["\n".join(["<div class='fm-pictures'>", *_figures_of(drawings), "</div>"])]
        parts += ["## Code", f"```python\n{_code(drawings[0].value, drawings[0].length)}\n```"]
    else:
        parts += [f"No example: {markdown(_error_of(entry))}"]
    if rows:
        head = "| parameter | takes | by default | meaning |\n|---|---|---|---|\n"
        note = "Sizes are those of the batch `B`, query heads `H`, queries `Q`, keys `KV` and positions `S`, all in "
        note += "elements: batch elements, heads and tokens. Lengths, windows and blocks are numbers of tokens."
        parts += ["## Parameters", head + "\n".join(f"| {' | '.join(row)} |" for row in rows), note]
    parts += [markdown(text) for text in prose]
    if drawings and entry.kind == "mask":
        parts += ["## Blocks", _blocks(drawings)]
    parts += _figures(entry)
    facts = {"Source": entry.source, "In other libraries": entry.peers}
    parts += [f"## {title}\n\n{markdown(text)}" for title, text in facts.items() if text]
    parts += ["## The function", f"```python\n{textwrap.dedent(inspect.getsource(known.function)).strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def drawn(entry: Any) -> list[Drawing]:
    """Return the pictures of an entry's example, pair by pair and at two lengths in blocks; none without an example."""
    try:
        return [_drawn(entry, SHORT, block_size=1), *(_drawn(entry, (n, *SHORT[::-1])) for n in LONGER[entry.kind])]
    except Exception:  # an example is a user's code, and the other entries do not depend on it
        return []


def code(kind: str, name: str) -> str:
    """Code that calls `attention` with a registered mask or score, with the parameters of its example at a short
    length.

    Raises ValueError if there is no example.

    Example:
        >>> from gallery import code
        >>> print(code("mask", "sliding_window"))
        import torch
        import flexmasks
        <BLANKLINE>
        q, k, v = torch.randn(3, 1, 8, 64, 64)
        out = flexmasks.attention(q, k, v, mask="sliding_window", window=16)
    """
    listed = list_masks() if kind == "mask" else list_scores()
    (entry,) = (entry for entry in listed if entry.name == name)
    drawing = _drawn(entry, SHORT)
    return _code(drawing.value, drawing.length)


def _figures_of(drawings: list[Drawing]) -> list[str]:
    pictures: dict[str, int] = {}  # a change that is the same anywhere has one
    for drawing in drawings:
        pictures.setdefault(drawing.picture.svg(style=False), drawing.length)
    return [
        f"<figure data-search-exclude>{picture}<figcaption>{length:,} tokens</figcaption></figure>"
        for picture, length in pictures.items()
    ]


def _error_of(entry: Any) -> str:
    try:
        _drawn(entry, SHORT)
    except Exception as error:  # as above
        return f"{type(error).__name__}: {error}"
    return ""


def _documented(doc: str, parameters: Any) -> tuple[list[tuple[str, ...]], list[str]]:
    """The rows of a table of parameters, and the paragraphs that a docstring has besides."""
    rows: list[tuple[str, ...]] = []
    prose: list[str] = []
    for paragraph in doc.split("\n\n")[1:]:
        if paragraph.startswith(("Source:", "Peers:")):
            continue
        if not set(re.split("[,:]", paragraph)[:1]) <= set(parameters):
            prose.append(paragraph)
            continue
        for item in re.split(r"\n(?! )", paragraph):
            names, _, meaning = item.partition(":")
            found = [parameters[name] for name in names.split(", ")]
            takes = {" or ".join(f"`{part}`" for part in p.spec.split(" | ") if part) or "a mask" for p in found}
            default = {"" if p.required else f"`{p.default!r}`" for p in found}
            meaning = markdown(" ".join(meaning.split())).replace("|", "&#124;")
            rows.append((f"`{names}`", ", ".join(takes), ", ".join(default), meaning))
    return rows, prose


def _blocks(drawings: list[Drawing]) -> str:
    lines = [
        "Of all blocks, of 128 queries and 128 keys, a kernel skips those that hold no visible pair, asks the mask"
    ]
    lines += ["in the partial ones, and asks nothing in the full ones.", ""]
    lines += ["| tokens | skipped | partial | full |", "|---|---|---|---|"]
    for drawing in drawings[1:]:
        skipped, partial, full = drawing.picture.counts.shares  # type: ignore[attr-defined] # of a mask
        lines.append(f"| {drawing.length:,} | {skipped:.1%} | {partial:.1%} | {full:.1%} |")
    return "\n".join(lines)


@functools.cache
def _measured() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(_RESULTS.read_text(encoding="utf-8"))
    return results


def _figures(entry: Any) -> list[str]:
    found = [
        row for row in _measured()["rows"] if (row["kind"], row["case"].partition(",")[0]) == (entry.kind, entry.name)
    ]
    if not found:
        return []
    machine = _measured()["machine"]
    about = (
        f"`{found[0]['example']}` on one {machine['device']}, torch {machine['torch']}, {found[0]['dtype']}, batch x "
        f"heads x length x head size {found[0]['shape']}, medians. TFLOP/s count visible pairs."
    )
    lines = ["| | forward ms | backward ms | forward TFLOP/s | backward TFLOP/s |", "|---|---|---|---|---|"]
    for row in found:
        numbers = [row[name] for name in ("forward_ms", "backward_ms", "forward_tflops", "backward_tflops")]
        who = f"{row['who']}, `{row['backend']}`" if "backend" in row else row["who"]
        lines.append(f"| {who} | {' | '.join(f'{number:.3g}' for number in numbers)} |")
    return ["## Measured", about, "\n".join(lines)]


def _prose(text: str) -> str:
    """A docstring's words as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def markdown(text: str) -> str:
    """A docstring's words, none of which Markdown takes for something else."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if i % 2 else re.sub(r"([*_\[\]<>#])", r"\\\1", part) for i, part in enumerate(parts))


def _drawn(entry: Any, lengths: Iterable[int], **options: Any) -> Drawing:
    """The first length at which the example of an entry can be drawn, the example and its picture.

    Raises the error of the first length if every length fails.
    """
    errors: list[Exception] = []
    for length in lengths:
        try:
            value = entry.example(length)
            return Drawing(length, value, flexmasks.draw(value, length, **options))
        except Exception as error:  # a user's function may raise anything
            errors.append(error)
    raise errors[0]


def _code(value: Mask | Score, length: int) -> str:
    kind, name, module = value._kind, value.name, value._definition.function.__module__
    lines = ["import torch", "import flexmasks"]
    if not value._definition.by_library and module != "__main__":
        lines.append(f"import {module}  # registers {name}")
    heads = value._implied_size("H") or _HEADS
    lines += ["", f"q, k, v = torch.randn(3, 1, {heads}, {length}, 64)"]
    arguments = []
    for parameter, given in value.params.items():
        text = _literal(given)
        if len(text) > _LINE - 40 and parameter not in ("q", "k", "v", "torch", "flexmasks"):
            line = f"{parameter} = {text}"
            if len(line) > _LINE:
                wrapped = textwrap.fill(text, _LINE - 4, break_long_words=False, break_on_hyphens=False)
                line = f"{parameter} = (\n{textwrap.indent(wrapped, '    ')}\n)"
            lines.append(line)
            text = parameter
        arguments.append(f"{parameter}={text}")
    if any(parameter in inspect.signature(flexmasks.attention).parameters for parameter in value.params):
        inner = ", ".join([f'"{name}"', *arguments])
        arguments = [f"{kind}=flexmasks.get_{kind}({inner})"]
    else:
        arguments = [f'{kind}="{name}"', *arguments]
    call = f"out = flexmasks.attention({', '.join(['q', 'k', 'v', *arguments])})"
    if len(call) > _LINE:
        call = "\n".join(["out = flexmasks.attention(", "    q, k, v,", *(f"    {a}," for a in arguments), ")"])
    return "\n".join([*lines, call])


def _literal(value: Any) -> str:
    """A parameter as code, with long regular lists shortened."""
    if isinstance(value, Tensor):
        return f"torch.tensor({_literal(value.tolist())}, dtype={value.dtype})"
    if isinstance(value, Mask | Score):
        return _constructor(value)
    if not isinstance(value, list | tuple):
        return repr(value)
    numbers = all(isinstance(n, int | float) for n in value)
    runs = [(n, len(list(same))) for n, same in itertools.groupby(value)] if numbers else []
    if runs and len(value) > 8 and len(runs) * 3 <= len(value):
        return " + ".join(f"[{n!r}] * {count}" for n, count in runs)
    step = value[1] - value[0] if numbers and len(value) > 8 else 0
    if isinstance(step, int) and step and list(value) == list(range(value[0], value[-1] + step, step)):
        return f"list(range({value[0]}, {value[-1] + step}, {step}))"
    return f"[{', '.join(map(_literal, value))}]"


def _constructor(value: Mask | Score) -> str:
    if value._definition.template:
        masks = value.params["masks"] if "masks" in value.params else (value.params["mask"],)
        parts = [_constructor(mask) for mask in masks]
        template = value._definition.template
        return f"{template}{parts[0]}" if len(parts) == 1 else f"({template.join(parts)})"
    if not value._definition.registered:
        raise ValueError(f"the example holds {value!r}, which is not registered, so code cannot name it.")
    given = "".join(f", {name}={_literal(v)}" for name, v in value.params.items())
    return f'flexmasks.get_{value._kind}("{value.name}"{given})'
