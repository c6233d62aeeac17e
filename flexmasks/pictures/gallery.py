"""`python -m flexmasks gallery OUT`: a page of all masks and scores, and the reference."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from torch import Tensor

from flexmasks.attention import attention
from flexmasks.pictures import reference, svg
from flexmasks.pictures.output import Share, check_writable, write
from flexmasks.pictures.picture import MaskPicture
from flexmasks.pictures.show import draw
from flexmasks.spec.definitions import definition
from flexmasks.spec.examples import SHORT, at_most, fitting
from flexmasks.spec.registry import Entry, list_masks, list_scores
from flexmasks.spec.values import Modifier

LENGTH = 8192  # tokens of the masks' pictures, and of the sparsity
_LINE = 88  # characters of code
_HEADS = 8


def gallery(out: str | Path, commands: Mapping[str, str] | None = None) -> Path:
    """Write a page of all masks and scores, and a reference of public names.

    An entry has a picture, signature, meaning, source, sparsity and code. If an example fails, its entry says why.
    The reference has a page of each public name, in a folder beside the gallery: `reference`, or for a file `x.html`
    `x-reference`. It needs the extra `docs`; without it only the gallery is written, and a line on stderr says so. One
    search box finds masks, scores and names on all pages. They need no network.

    Each file is replaced whole, the gallery after the reference, so a run that is stopped leaves pages that work. Other
    files in the folders stay as they are.

    Args:
        out: the file to write, or a folder for `index.html`, which is made if it is missing.
        commands: the help text of each command of the command line, by name, for the reference.

    Returns:
        The gallery's path.

    Example:
        >>> import flexmasks.pictures.gallery
        >>> flexmasks.pictures.gallery.gallery("/tmp/masks.html")  # doctest: +SKIP
        PosixPath('/tmp/masks.html')
    """
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        path.mkdir(parents=True, exist_ok=True)
        path = path / "index.html"
    check_writable(path)
    missing = [name for name in ("griffe", "pygments") if importlib.util.find_spec(name) is None]
    folder = path.parent / ("reference" if path.name == "index.html" else f"{path.stem}-reference")
    if not missing:
        folder.mkdir(exist_ok=True)
    else:
        print(
            f"flexmasks: no reference, it needs {' and '.join(missing)}: `pip install 'flexmasks[docs]'`.",
            file=sys.stderr,
        )
    environment = jinja2.Environment(loader=jinja2.PackageLoader("flexmasks.pictures", "."), autoescape=True)
    environment.filters["prose"] = _prose
    listed = {"Masks": list_masks(), "Scores": list_scores()}
    share, count = Share("pictures"), sum(map(len, listed.values()))
    sections: dict[str, list[dict[str, Any]]] = {title: [] for title in listed}
    for title, entries in listed.items():
        for entry in entries:
            sections[title].append(_card(entry.kind, entry))
            share(sum(map(len, sections.values())) / count)
    share.end()
    shown: dict[str, Any] = {"style": Markup(svg.style()), "length": LENGTH, "sections": sections.items()}
    if not missing:
        environment.globals["style"] = shown["style"]
        cards = list(itertools.chain(*sections.values()))
        reference.write(folder, f"../{path.name}", cards, commands or {}, environment)
        shown |= {"folder": f"{folder.name}/", "names": f"{folder.name}/names.js"}
    write(path, environment.get_template("gallery.html").render(shown))
    return path


def code(kind: str, name: str) -> str:
    """Return code that calls `attention` with a registered mask or score.

    It has the parameters of the registered example at a short length. Raises ValueError if there is no example.

    Example:
        >>> from flexmasks.pictures.gallery import code
        >>> print(code("mask", "sliding_window"))
        import torch
        import flexmasks
        <BLANKLINE>
        q, k, v = torch.randn(3, 1, 8, 64, 64)
        out = flexmasks.attention(q, k, v, mask="sliding_window", window=16)
    """
    length, value, _ = fitting(kind, name, SHORT, draw)
    return _code(value, length)


def _code(value: Modifier, length: int) -> str:
    """Return code that calls `attention` with a mask or score of registered parts."""
    kind, name, module = value.kind, value.name, value.definition.function.__module__
    lines = ["import torch", "import flexmasks"]
    if not value.definition.own and module != "__main__":
        lines.append(f"import {module}  # registers {name}")
    heads = value.implied_size("H") or _HEADS
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
    if any(parameter in inspect.signature(attention).parameters for parameter in value.params):
        inner = ", ".join([f'"{name}"', *arguments])
        arguments = [f"{kind}=flexmasks.get_{kind}({inner})"]
    else:
        arguments = [f'{kind}="{name}"', *arguments]
    call = f"out = flexmasks.attention({', '.join(['q', 'k', 'v', *arguments])})"
    if len(call) > _LINE:
        call = "\n".join(["out = flexmasks.attention(", "    q, k, v,", *(f"    {a}," for a in arguments), ")"])
    return "\n".join([*lines, call])


def _card(kind: str, entry: Entry) -> dict[str, Any]:
    """Return the contents of an entry, or the error of its example."""
    doc = definition(kind, entry.name).doc
    card: dict[str, Any] = {
        "kind": kind,
        "entry": entry,
        "doc": doc.partition("\n")[2].strip(),
        "words": " ".join(f"{kind} {entry.signature} {doc}".lower().split()),  # text that the search matches
    }
    try:
        length, value, short_picture = fitting(kind, entry.name, SHORT, draw)
        picture = fitting(kind, entry.name, at_most(LENGTH), draw)[2] if kind == "mask" else short_picture
        card["picture"] = Markup(picture.svg(style=False))
        if isinstance(picture, MaskPicture):
            card |= {"sparsity": f"{picture.counts.shares[0]:.1%}", "sparsity_length": f"{picture.q_len:,}"}
            card |= {"pairs": Markup(draw(value, length, block_size=1).svg(style=False)), "pairs_length": length}
        card["code"] = _code(value, length)
    except Exception as error:  # an example is a user's code, and the other entries do not depend on it
        card["error"] = f"{type(error).__name__}: {error}"
    return card


def _prose(text: str) -> Markup:
    """Return text as HTML, with words in backticks as code."""
    # Parts of a Markup are joined by Markup, which would escape the new tags.
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _literal(value: Any) -> str:
    """Return a parameter as code, with long regular lists shortened."""
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
    """Return a Mask or a Score as code."""
    if value.definition.template:
        masks = value.params["masks"] if "masks" in value.params else (value.params["mask"],)
        parts = [_constructor(mask) for mask in masks]
        template = value.definition.template
        return f"{template}{parts[0]}" if len(parts) == 1 else f"({template.join(parts)})"
    if not value.definition.registered:
        raise ValueError(f"the example holds {value!r}, which is not registered, so code cannot name it.")
    given = "".join(f", {name}={_literal(v)}" for name, v in value.params.items())
    return f'flexmasks.get_{value.kind}("{value.name}"{given})'
