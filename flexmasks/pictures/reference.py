"""The reference: the package's source comes in, a page of each public name goes out.

The source is read and not run, so that no page needs what an integration imports.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from flexmasks.pictures import output
from flexmasks.pictures.docstrings import Section, highlighted, sections
from flexmasks.spec.definitions import definition

# Modules whose public names have pages, with the titles of their parts. A module's public names are those of its
# `__all__`, or without one all without an underscore.
_MODULES = {
    "flexmasks": "flexmasks",
    "flexmasks.orders": "flexmasks.orders",
    "flexmasks.integrations.huggingface": "Hugging Face models: flexmasks.integrations.huggingface",
    "flexmasks.integrations.distributed": "Several GPUs: flexmasks.integrations.distributed",
}
# Names that public functions return, or that masks of one's own need.
_VALUES = (
    "flexmasks.blocks.counts.Blocks",
    "flexmasks.plans.explanation.Explanation",
    "flexmasks.cache.CacheInfo",
    "flexmasks.spec.registry.Entry",
    "flexmasks.integrations.huggingface.explore.LayerMasks",
    "flexmasks.spec.bands.Band",
    "flexmasks.spec.parameters.Size",
    "flexmasks.spec.parameters.may_read",
    "flexmasks.spec.parameters",
)
# Classes that functions make, with the members for users; all other members are for this library.
_MADE = {
    "Mask": ("name", "blocks", "to"),
    "Score": ("name", "to"),
    "Picture": ("text", "svg", "plot", "save"),
    "LayerMasks": ("distinct",),
}
# Titles, anchors and introductions of masks and scores.
_REGISTERED = {
    "mask": (
        "Masks",
        "flexmasks.masks",
        "Names for `mask=` in all calls, and for `flexmasks.get_mask`. Any two combine with `&`, `|` and `~`.",
    ),
    "score": (
        "Scores",
        "flexmasks.scores",
        "Names for `score=` in `flexmasks.attention`, and for `flexmasks.get_score`.",
    ),
}
_LINE = 88  # characters of a signature's line


@dataclass(frozen=True)
class Page:
    """A page of one public name, or a member of a class on it."""

    title: str  # the name as one writes it
    kind: str  # function, class, method, property, module, mask, score or command
    doc: str
    file: str
    code: Markup = field(default_factory=Markup)  # the signature
    accepts: Mapping[str, str] = field(default_factory=dict)  # what each parameter accepts
    members: Sequence[Page] = ()
    anchor: str = ""  # of a mask or score in the gallery, or of a member on its page
    call: str = ""  # an example, as code
    picture: Markup = field(default_factory=Markup)
    group: Group | None = None
    sections: Sequence[Section] = ()
    specified: str = ""  # the address of the page on specifications of parameters

    @property
    def short(self) -> str:
        """The name without the module."""
        return self.title if self.kind in ("command", "module") else self.title.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.doc.partition("\n")[0]

    @property
    def meaning(self) -> Markup:
        """The first line of the docstring as HTML."""
        return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(Markup.escape(self.summary))))


@dataclass(frozen=True)
class Group:
    """Names of one module, or of one kind."""

    title: str
    anchor: str
    doc: str
    pages: Sequence[Page]
    sections: Sequence[Section] = ()


def pages_of(cards: Sequence[Mapping[str, Any]], commands: Mapping[str, str]) -> list[Group]:
    """Return the pages of all public names, by groups.

    Args:
        cards: the gallery's entries of masks and scores.
        commands: the help text of each command, by name.
    """
    package = _package()
    groups = []
    for path, title in _MODULES.items():
        module = _found(package, path)
        groups.append(Group(title, path, _doc(module), list(_module_pages(module, path))))
    for place, (kind, (title, room, doc)) in enumerate(_REGISTERED.items(), 1):
        entries = [_entry_page(card) for card in cards if card["kind"] == kind]
        groups.insert(place, Group(title, room, doc, entries))
    values = [_page(_found(package, path), path) for path in _VALUES]
    groups.append(Group("Values that calls return, and parts of definitions", "values", "", values))
    if commands:
        texts = [_command_page(name, text) for name, text in commands.items()]
        groups.append(Group("The command line", "commands", "Commands of `python -m flexmasks`.", texts))
    return _rendered(groups)


def write(
    folder: Path,
    home: str,
    cards: Sequence[Mapping[str, Any]],
    commands: Mapping[str, str],
    environment: jinja2.Environment,
) -> None:
    """Write the pages, their index and the data of the search.

    Each file is replaced whole, and the index comes last.

    Args:
        folder: a folder that exists.
        home: the gallery's address, as seen from the folder.
        cards: the gallery's entries of masks and scores.
        commands: the help text of each command, by name.
        environment: what renders the templates.
    """
    groups = pages_of(cards, commands)
    template = environment.get_template("reference.html")
    shared = {"home": home, "names": "names.js"}
    for page in (page for group in groups for page in group.pages):
        output.write(folder / page.file, template.render(page=page, **shared))
    output.write(folder / "names.js", f"const NAMES = {json.dumps(list(_searched(groups)), indent=0)};\n")
    index = Page("Reference of all public names", "index", "", "index.html")
    output.write(folder / "index.html", template.render(page=index, groups=groups, **shared))


def _searched(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield what the search knows of each name and each member."""
    for group in groups:
        for page in group.pages:
            for found in (page, *page.members):
                yield {
                    "title": found.title,
                    "kind": found.kind,
                    "summary": found.summary.replace("`", ""),
                    "file": page.file if found is page else f"{page.file}#{found.anchor}",
                    "words": " ".join(f"{found.kind} {found.title} {found.doc}".lower().split()),
                    "card": found.kind in ("mask", "score"),
                }


@functools.cache
def _package() -> Any:
    """Return all that griffe reads of the library's source."""
    import griffe  # the extra `docs` may be missing

    return griffe.load("flexmasks", search_paths=[Path(__file__).parents[2]], allow_inspection=False)


def _found(package: Any, path: str) -> Any:
    """Return the object at a path, or the one that is imported there."""
    name = path.removeprefix("flexmasks").removeprefix(".")
    found = package[name] if name else package
    return found.final_target if found.is_alias else found


def _doc(found: Any) -> str:
    return inspect.cleandoc(found.docstring.value) if found.docstring else ""


def _module_pages(module: Any, path: str) -> Iterator[Page]:
    """Yield the pages of a module's public names."""
    own = [n for n, m in module.members.items() if not n.startswith("_") and not m.is_alias and m.is_function]
    for name in map(str, module.exports) if module.exports is not None else own:
        found = _found(module, name)
        if found.is_module and name in found.members:  # a function hides the module of the same name
            found = _found(found, name)
        if not found.is_module:  # masks, scores and orders have groups of their own
            yield _page(found, f"{path}.{name}")


def _page(found: Any, title: str) -> Page:
    """Return the page of a function, a class or a module."""
    # On some file systems `plan.html` and `Plan.html` are one file.
    page = Page(title, found.kind.value, _doc(found), f"{title}{'-class' if found.is_class else ''}.html")
    if found.is_function:
        return replace(page, code=_signature(found, title), accepts=_annotations(found))
    if not found.is_class:
        return page
    name = found.name
    code = _signature(found, title) if name not in _MADE and found.parameters else highlighted(f"class {title}")
    chosen = _MADE.get(name, [n for n in found.members if not n.startswith("_")])
    inherited = found.all_members
    members = [(n, m.final_target if (m := inherited[n]).is_alias else m) for n in chosen]
    listed = [_member(name, n, m, page.file) for n, m in members if m.is_function or "property" in m.labels]
    return replace(page, code=code, accepts=_annotations(found), members=listed)


def _member(name: str, member: str, found: Any, file: str) -> Page:
    """Return a method or a property of a class."""
    title = f"{name}.{member}"
    page = Page(title, "method", _doc(found), file, anchor=member)
    if found.is_function:
        return replace(page, code=_signature(found, title), accepts=_annotations(found))
    return replace(page, kind="property", code=highlighted(f"{title}: {_plain(found.annotation)}"))


def _annotations(found: Any) -> dict[str, str]:
    return {p.name.lstrip("*"): _plain(p.annotation) for p in found.parameters if p.annotation is not None}


def _plain(annotation: object) -> str:
    """Return code without the module of names that torch keeps private."""
    return str(annotation).replace("compat.", "")


def _signature(found: Any, title: str) -> Markup:
    """Return a signature, with one parameter on each line where it is long."""
    text = re.sub(r"\b(?:self|cls)(?:, |(?=\)))", "", _plain(found.signature(name=title)), count=1)
    if len(text) > _LINE:
        head, _, rest = text.partition("(")
        depth, parts = 0, [""]
        for place, letter in enumerate(rest):
            depth += (letter in "([{") - (letter in ")]}")
            if depth < 0:  # the end of the parameters
                text = "\n".join([f"{head}(", *(f"    {part.strip()}," for part in parts), rest[place:]])
                break
            if letter == "," and depth == 0:
                parts.append("")
            else:
                parts[-1] += letter
    return highlighted(text)


def _entry_page(card: Mapping[str, Any]) -> Page:
    """Return the page of a registered mask or score."""
    kind, entry = card["kind"], card["entry"]
    known = definition(kind, entry.name)
    return Page(
        title=entry.name,
        kind=kind,
        doc=known.doc,
        file=f"{kind}-{entry.name}.html",
        code=highlighted(entry.signature),
        accepts={name: parameter.spec for name, parameter in known.parameters.items()},
        anchor=f"{kind}-{entry.name}",
        call=card.get("code", ""),
        picture=card.get("pairs", card.get("picture", Markup())),
    )


def _command_page(name: str, text: str) -> Page:
    """Return the page of a command, which shows its help text."""
    summary = text.partition("\n\n")[2].partition("\n\n")[0]
    doc = f"{' '.join(summary.split())}\n\n{text}"
    return Page(f"python -m flexmasks {name}", "command", doc, f"command-{name}.html", code=Markup.escape(text.strip()))


def _rendered(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with all docstrings as HTML, whose code links to the pages."""
    addresses = {group.anchor: f"index.html#{group.anchor}" for group in groups}
    for page in (page for group in groups for page in group.pages):
        addresses[page.anchor or page.title] = page.file
        addresses |= {f"{page.title}.{m.anchor}": f"{page.file}#{m.anchor}" for m in page.members}
    # Classes are named without their modules.
    short = {page.short: page.file for group in groups for page in group.pages if page.kind == "class"}

    def link_from(module: str, own: Sequence[str]) -> Callable[[str], str | None]:
        def link(code: str) -> str | None:
            match = re.match(r"[A-Za-z_][\w.]*", code)
            name = match[0].rstrip(".") if match else ""
            if not name or name in own:
                return None
            places = (f"{module}.{name}", f"flexmasks.{name}", name, f"mask-{name}", f"score-{name}")
            return next((addresses[place] for place in places if place in addresses), short.get(name))

        return link

    def with_sections(page: Page, group: Group) -> Page:
        if page.kind == "command":
            return replace(page, group=group)
        module = group.anchor if group.anchor in _MODULES else "flexmasks"
        link = link_from(module, (page.title, page.short, *page.accepts))
        members = [with_sections(member, group) for member in page.members]
        specified = addresses["flexmasks.spec.parameters"] if page.kind in ("mask", "score") and page.accepts else ""
        made = list(sections(page.doc, page.accepts, link))
        return replace(page, group=group, members=members, sections=made, specified=specified)

    made = []
    for group in groups:
        link = link_from(group.anchor, ())
        made.append(
            replace(
                group,
                pages=[with_sections(page, group) for page in group.pages],
                sections=list(sections(group.doc, {}, link)),
            )
        )
    return made
