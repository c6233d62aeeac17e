"""Docstrings: text as this library writes it comes in, sections of HTML go out.

The modules griffe and pygments read and color it. They are imported at their first use, because the extra `docs`, which
brings them, may be missing.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from markupsafe import Markup, escape

Link = Callable[[str], str | None]  # from code, such as `flexmasks.get_mask("causal")`, to the address of its page
_TITLES = {"peers": "In other libraries"}  # other sections keep their titles
_NAMES = r"\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*"
_WRAPPED = 88  # a shorter line was not broken because it was full


@dataclass(frozen=True)
class Item:
    """One parameter or error, and what it means."""

    name: str
    accepts: str
    text: Markup


@dataclass(frozen=True)
class Section:
    """A section of a docstring: items, or prose and code."""

    title: str = ""  # "" for the text above all sections
    items: list[Item] = field(default_factory=list)
    body: Markup = field(default_factory=Markup)


def sections(doc: str, accepts: Mapping[str, str], link: Link) -> Iterator[Section]:
    """Yield the sections of a docstring in their order.

    Args:
        doc: the docstring, without indentation.
        accepts: what each parameter accepts, by name.
        link: the address of a name, or None where it has none.
    """
    import griffe

    kinds = griffe.DocstringSectionKind
    parsed = griffe.Docstring(_as_google(doc)).parse(
        "google", returns_multiple_items=False, returns_named_value=False, warnings=False
    )
    for section in parsed:
        value = section.value
        if section.kind is kinds.text:
            yield Section("", [], _prose(value, link))
        elif section.kind is kinds.parameters:
            yield Section("Parameters", [_parameter(p.name, p.description, accepts, link) for p in value])
        elif section.kind is kinds.raises:
            yield Section("Raises", [Item(str(e.annotation), "", _prose(e.description, link)) for e in value])
        elif section.kind is kinds.returns:
            parts = [f"{r.annotation}: {r.description}" if r.annotation else r.description for r in value]
            yield Section("Returns", [], _prose("\n\n".join(parts), link))
        elif section.kind is kinds.examples:
            shown = [_prose(t, link) if kind is kinds.text else _block(t, "pycon") for kind, t in value]
            yield Section("Example", [], Markup().join(shown))
        elif section.kind is kinds.admonition:
            title = _TITLES.get(value.kind, value.kind.capitalize())
            own = section.title if section.title and section.title.lower() != value.kind else ""
            yield Section(title, [], _prose(f"{own}\n\n{value.contents}", link))
        else:  # only docstrings of users have sections of other kinds
            items = [(getattr(part, "name", ""), part.description) for part in value]
            yield Section(section.kind.value.capitalize(), [_parameter(*item, accepts, link) for item in items])


def highlighted(code: str, language: str = "python") -> Markup:
    """Return code as HTML, with colors by classes of pygments."""
    import pygments
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    return Markup(pygments.highlight(code, get_lexer_by_name(language), HtmlFormatter(nowrap=True)).rstrip("\n"))


def _as_google(doc: str) -> str:
    """Return a docstring with all its sections in Google's form.

    Docstrings of masks have paragraphs `parameter: text`, `Source: text` and `Peers: text`.
    """
    paragraphs: list[str] = []
    for paragraph in re.split(r"\n\s*\n", doc):
        for part in re.split(r"\n(?=(?:Source|Peers): )", paragraph):
            title, _, text = part.partition(": ")
            if title in ("Source", "Peers"):
                lines = "\n".join(line.strip() for line in text.splitlines())
                paragraphs.append(f"{title}:\n{textwrap.indent(lines, '    ')}")
            elif re.match(rf"{_NAMES}: ", part):
                paragraphs.append(f"Args:\n{textwrap.indent(part, '    ')}")
            else:
                paragraphs.append(re.sub(r"^Example:$", "Examples:", part, flags=re.MULTILINE))
    return "\n\n".join(paragraphs)


def _parameter(name: str, text: str, accepts: Mapping[str, str], link: Link) -> Item:
    """Return the item of one parameter, or of several with one description."""
    accepted = dict.fromkeys(accepts.get(n.lstrip("*"), "") for n in name.split(", "))
    return Item(name, ", ".join(filter(None, accepted)), _prose(text, link))


def _prose(text: str, link: Link) -> Markup:
    """Return paragraphs, lists and indented code as HTML."""
    return Markup("\n").join(_paragraph(p, link) for p in re.split(r"\n\s*\n", text.strip("\n")) if p.strip())


def _paragraph(text: str, link: Link) -> Markup:
    lines = text.splitlines()
    if all(line.startswith("    ") for line in lines):
        code = textwrap.dedent(text)
        return _block(code, "python" if _is_python(code) else "text")
    before, *items = re.split(r"(?:^|\n)- ", text)
    if items:
        listed = Markup().join(Markup("<li>{}</li>").format(_words(item, link)) for item in items)
        lead = Markup("<p>{}</p>").format(_words(before, link)) if before.strip() else Markup()
        return lead + Markup("<ul>{}</ul>").format(listed)
    # A line that ends early was broken on purpose.
    kept = [lines[0]]
    for line in lines[1:]:
        if len(kept[-1].rpartition("\n")[2]) + 1 + len(line.split()[0]) < _WRAPPED:
            kept.append(line)
        else:
            kept[-1] += f"\n{line}"
    return Markup("<p>{}</p>").format(Markup("<br>\n").join(_words(part, link) for part in kept))


def _words(text: str, link: Link) -> Markup:
    """Return text as HTML, with words in backticks as code.

    Such words, and names that start with `flexmasks.`, link to their pages.
    """
    parts = re.split(r"(`[^`]+`|\bflexmasks\.[\w.]*\w)", " ".join(text.split()))
    shown = []
    for place, part in enumerate(parts):
        name = part.strip("`")
        html = Markup("<code>{}</code>").format(name) if name != part else escape(part)
        address = link(name) if place % 2 else None
        shown.append(Markup('<a href="{}">{}</a>').format(address, html) if address else html)
    return Markup().join(shown)


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def _block(code: str, language: str) -> Markup:
    return Markup('<pre tabindex="0"><code>{}</code></pre>').format(highlighted(code, language))
