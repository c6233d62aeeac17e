"""`python -m flexmasks gallery OUT`: a page of all registered masks and scores, with pictures and code."""

from __future__ import annotations

import importlib.resources
import inspect
import itertools
import re
import textwrap
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from flexmasks.attention import attention
from flexmasks.pictures import svg
from flexmasks.pictures.picture import MaskPicture, draw
from flexmasks.spec.definitions import definition
from flexmasks.spec.examples import SHORT, at_most, fitting
from flexmasks.spec.registry import Entry, list_masks, list_scores
from flexmasks.spec.values import Modifier

LENGTH = 8192  # tokens of the masks' pictures, and of the sparsity
_WIDE = 88  # characters of code
_HEADS = 8


def gallery(out: str | Path) -> Path:
    """Write a page of every registered mask and score: picture, signature, meaning, source, sparsity, code.

    The page is one HTML file that needs no other, with a search box. Where an example fails, its entry says why.

    Args:
        out: the file to write, or a folder, which is made where it is missing, for `index.html`.

    Returns:
        The file's path.

    Example:
        >>> import flexmasks.pictures.gallery
        >>> flexmasks.pictures.gallery.gallery("/tmp/masks.html")  # doctest: +SKIP
        PosixPath('/tmp/masks.html')
    """
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        path.mkdir(parents=True, exist_ok=True)
        path = path / "index.html"
    sections = []
    for kind, title, entries in (("mask", "Masks", list_masks()), ("score", "Scores", list_scores())):
        cards = "\n".join(_card(kind, entry) for entry in entries)
        sections.append(f"<section><h2>{title}</h2>\n<div class='cards'>\n{cards}\n</div></section>")
    page = importlib.resources.files("flexmasks.pictures").joinpath("gallery.html").read_text(encoding="utf-8")
    filled = {"style": svg.style(), "length": f"{LENGTH:,}", "entries": "\n".join(sections)}
    for name, text in filled.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    path.write_text(page, encoding="utf-8")
    return path


def code(kind: str, name: str) -> str:
    """Code that calls `attention` with a registered mask or score, and runs as it stands.

    Its parameters are those of the registered example, at a short length. Raises ValueError where it has none.

    Example:
        >>> from flexmasks.pictures.gallery import code
        >>> print(code("mask", "sliding_window"))
        import torch
        import flexmasks
        <BLANKLINE>
        q, k, v = torch.randn(3, 1, 8, 64, 64)
        out = flexmasks.attention(q, k, v, mask="sliding_window", window=16)
    """
    found = definition(kind, name)
    length, value, _ = fitting(kind, name, SHORT, draw)
    lines = ["import torch", "import flexmasks"]
    module = found.function.__module__
    if not found.own and module != "__main__":
        lines.append(f"import {module}  # registers {name}")
    heads = value.implied_size("H") or _HEADS
    lines += ["", f"q, k, v = torch.randn(3, 1, {heads}, {length}, 64)"]
    arguments = []
    for parameter, given in value.params.items():
        text = _literal(given)
        if len(text) > _WIDE - 40 and parameter not in ("q", "k", "v", "torch", "flexmasks"):
            line = f"{parameter} = {text}"
            if len(line) > _WIDE:
                wrapped = textwrap.fill(text, _WIDE - 4, break_long_words=False, break_on_hyphens=False)
                line = f"{parameter} = (\n{textwrap.indent(wrapped, '    ')}\n)"
            lines.append(line)
            text = parameter
        arguments.append(f"{parameter}={text}")
    taken = inspect.signature(attention).parameters
    if any(parameter in taken for parameter in value.params):
        inner = ", ".join([f'"{name}"', *arguments])
        arguments = [f"{kind}=flexmasks.get_{kind}({inner})"]
    else:
        arguments = [f'{kind}="{name}"', *arguments]
    call = f"out = flexmasks.attention({', '.join(['q', 'k', 'v', *arguments])})"
    if len(call) > _WIDE:
        call = "\n".join(["out = flexmasks.attention(", "    q, k, v,", *(f"    {a}," for a in arguments), ")"])
    return "\n".join([*lines, call])


def _card(kind: str, entry: Entry) -> str:
    found = definition(kind, entry.name)
    anchor = f"{kind}-{entry.name}"
    facts = [f"<p>{_prose(entry.summary)}</p>"] if entry.summary else []
    pictures = ""
    try:
        length, value, small = fitting(kind, entry.name, SHORT, draw)  # pictures pair by pair are of short lengths
        large = fitting(kind, entry.name, at_most(LENGTH), draw)[2] if kind == "mask" else small
        pictures += large.svg(style=False)
        if isinstance(large, MaskPicture):
            sparsity = f"Sparsity at {large.q_len:,} tokens: <strong>{large.counts.shares[0]:.1%}</strong>"
            facts.append(f"<p>{sparsity}</p>")
            pairs = draw(value, length, block_size=1).svg(style=False)
            pictures += f"<details><summary>The same for {length} tokens, pair by pair</summary>{pairs}</details>"
        listing = (
            f"<div class='code'><pre tabindex='0'>{escape(code(kind, entry.name))}</pre>"
            f"<button type='button' aria-label='Copy the code of {escape(entry.name)}'>Copy</button></div>"
        )
    except Exception as error:  # an example is a user's code: the other entries are written all the same
        listing = f"<p class='muted'>No example: {escape(f'{type(error).__name__}: {error}')}</p>"
    if entry.source:
        facts.append(f"<p class='muted'>Source: {_prose(entry.source)}</p>")
    doc = found.doc.partition("\n")[2].strip()
    details = f"<details class='doc'><summary>Documentation</summary><pre>{escape(doc)}</pre></details>" if doc else ""
    words = " ".join([kind, entry.signature, found.doc]).lower()
    return (
        f"<article id='{anchor}' aria-labelledby='{anchor}-name' data-text='{escape(' '.join(words.split()))}'>"
        f"<h3 id='{anchor}-name'><a href='#{anchor}'>{escape(entry.name)}</a></h3>"
        f"<code class='signature'>{escape(entry.signature)}</code>"
        f"{''.join(facts)}{pictures}{listing}{details}</article>"
    )


def _prose(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _literal(value: Any) -> str:
    """A parameter as code; lists of repeated or evenly spaced numbers in short."""
    if isinstance(value, Tensor):
        return f"torch.tensor({_literal(value.tolist())}, dtype={value.dtype})"
    if isinstance(value, Modifier):
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


def _constructor(value: Modifier) -> str:
    """A Mask or a Score as code."""
    if value.definition.template:
        masks = value.params["masks"] if "masks" in value.params else (value.params["mask"],)
        parts = [_constructor(mask) for mask in masks]
        template = value.definition.template
        return f"{template}{parts[0]}" if len(parts) == 1 else f"({template.join(parts)})"
    if not value.definition.registered:
        raise ValueError(f"the example holds {value!r}, a function that is not registered: no code can name it.")
    given = "".join(f", {name}={_literal(v)}" for name, v in value.params.items())
    return f'flexmasks.get_{value.kind}("{value.name}"{given})'
