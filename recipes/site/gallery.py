"""`python recipes/site/gallery.py OUT`: a page of all masks and scores, and by pdoc a reference of all public names."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import re
import sys
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from torch import Tensor

import flexmasks
from flexmasks import Mask, Picture, Score, list_masks, list_scores
from flexmasks.__main__ import import_modules, import_parser
from flexmasks.pictures import svg
from flexmasks.spec.definitions import definition

LENGTH = 8192  # tokens of the masks' pictures, and of the sparsity
SHORT = (64, 128, 256, 512, 1024)  # lengths to try for the pictures of single pairs, and for the code
_LINE = 88  # characters of code
_HEADS = 8
# What a reader has, and the masks for it, the usual ones first.
USES = {
    "Text": (
        "causal", "sliding_window", "prefix_lm", "chunked_causal", "block_causal", "full", "local", "chunked", "band",
    ),
    "Several sequences in a row": (
        "packed", "document", "cross_document", "causal_blockwise", "shared_prefix", "multi_item",
    ),
    "Padded batches": ("padding", "key_padding", "grouped_tril"),
    "Long text": (
        "sink_window", "longformer", "bigbird", "dilated_window", "strided", "fixed", "global_tokens", "flashmask",
        "vertical_slash", "key_eviction",
    ),
    "Images and video": ("natten", "natten1d", "natten3d", "sasa", "sliding_tile", "temporal_window"),
    "Text with images": ("bidirectional_spans", "vision_cross"),
    "Serving and drafts": ("paged", "tree", "eagle3"),
    "Diffusion of text": ("block_diffusion", "inverse_causal"),
    "Tables and lists of blocks": ("block_topk", "block_sparse", "bsr", "slices", "dense"),
}  # fmt: skip
# Modules of public names, and what they need to be imported.
_MODULES = (
    "flexmasks", "flexmasks.orders", "flexmasks.extend", "flexmasks.integrations.huggingface",
    "flexmasks.integrations.distributed",
)  # fmt: skip
_NEEDS = {"flexmasks.integrations.huggingface": "transformers"}


def gallery(out: str | Path) -> Path:
    """Write a page of all masks and scores, and a reference of the public names.

    An entry has a picture, signature, meaning, source, sparsity and code. If an example fails, its entry says why. The
    page needs no network. The reference stands in a folder beside the page: `reference`, or for a file `x.html`
    `x-reference`. Without pdoc only the page is written, and a line on stderr says so.

    Args:
        out: the file to write, or a folder for `index.html`, which is made if it is missing.

    Returns:
        The page's path.
    """
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        path.mkdir(parents=True, exist_ok=True)
        path = path / "index.html"
    folder = path.parent / ("reference" if path.name == "index.html" else f"{path.stem}-reference")
    has_reference = importlib.util.find_spec("pdoc") is not None
    if not has_reference:
        print("no reference, it needs pdoc: `pip install pdoc`.", file=sys.stderr)
    cards = {(entry.kind, entry.name): _card(entry) for entry in (*list_masks(), *list_scores())}
    if has_reference:
        _write_reference(folder)
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["prose"] = _prose
    page = environment.get_template("gallery.html").render(
        style=Markup(svg.style()),
        length=LENGTH,
        groups=_grouped(cards),
        reference=f"{folder.name}/index.html" if has_reference else "",
    )
    path.write_text(page, encoding="utf-8")
    return path


def _grouped(cards: dict[tuple[str, str], dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Titles and their cards: masks by their use, those of the user, and scores."""
    groups = {
        use: [cards.pop(key) for name in names if (key := ("mask", name)) in cards] for use, names in USES.items()
    }
    groups["Other masks"] = [cards.pop(key) for key in [*cards] if key[0] == "mask"]
    groups["Scores"] = [*cards.values()]
    return [(title, found) for title, found in groups.items() if found]


def _write_reference(folder: Path) -> None:
    import pdoc  # it may be missing

    modules = [name for name in _MODULES if importlib.util.find_spec(_NEEDS.get(name, "flexmasks")) is not None]
    # After each package come its modules, which are left out.
    chosen = [spec for name in modules for spec in (name, f"!{name}[.]")]
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings():
        # The annotations of named tuples are texts, which pdoc cannot read in another module.
        warnings.filterwarnings("ignore", "Error parsing type annotation")
        pdoc.pdoc(*chosen, output_directory=folder)


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
    length, value, _ = _drawn(entry, SHORT)
    return _code(value, length)


def _drawn(entry: Any, lengths: Iterable[int], **options: Any) -> tuple[int, Mask | Score, Picture]:
    """The first length at which the example of an entry can be drawn, the example and its picture.

    Raises the error of the first length if every length fails.
    """
    errors: list[Exception] = []
    for length in lengths:
        try:
            value = entry.example(length)
            return length, value, flexmasks.draw(value, length, **options)
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


def _card(entry: Any) -> dict[str, Any]:
    kind, doc = entry.kind, definition(entry.kind, entry.name).doc
    card: dict[str, Any] = {
        "kind": kind,
        "entry": entry,
        "doc": doc.partition("\n")[2].strip(),
        "words": " ".join(f"{kind} {entry.signature} {doc}".lower().split()),  # text that the search matches
    }
    try:
        length, value, picture = _drawn(entry, SHORT, block_size=1)
        card |= {"picture": Markup(picture.svg(style=False)), "code": _code(value, length)}
        if kind == "mask":
            long: Any = _drawn(entry, (LENGTH, *SHORT[::-1]))[2]
            card |= {"sparsity": f"{long.counts.shares[0]:.1%}", "sparsity_length": f"{long.q_len:,}"}
            card["long"] = Markup(long.svg(style=False))
    except Exception as error:  # an example is a user's code, and the other entries do not depend on it
        card["error"] = f"{type(error).__name__}: {error}"
    return card


def _prose(text: str) -> Markup:
    # Parts of a Markup are joined by Markup, which would escape the new tags.
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


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


def main(words: list[str] | None = None) -> None:
    """Write the page that the command line names."""
    parser = argparse.ArgumentParser(description="Write a page of all masks and scores.", parents=[import_parser()])
    parser.add_argument("out", metavar="OUT", help="the .html file to write, or a folder for index.html")
    arguments = parser.parse_args(words)
    import_modules(arguments.modules)
    print(gallery(arguments.out))


if __name__ == "__main__":
    main()
