"""`python recipes/site/build.py OUT`: the site, into OUT/VERSION, and a page in OUT that leads there.

Pages of the repository become pages of the site, at the places that PLACES says; the gallery, the notebooks, the plots
of results and the reference are made from what they show. The build fails where a link leads nowhere, a picture is
missing, a public name has no documentation, figures are older than their results, or a page asks another server for
anything. `python -m http.server -d OUT` shows the site with its search; pages can be read without a server, too.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import flexmasks
import gallery
import in_the_wild
import notebook_pages
import plots
from flexmasks.__main__ import import_modules, import_parser
from flexmasks.pictures import svg

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# Files of the repository that are pages, and where they stand on the site.
PLACES = {
    "recipes/site/docs/**/*.md": "",
    "recipes/coming_from/*.md": "coming_from",
    "recipes/good_to_know.md": "guides/good_to_know.md",
    "recipes/results/*.md": "results",
    "recipes/[!_]*.py": "recipes",
    "recipes/README.md": "recipes/README.md",
    "notebooks/*.ipynb": "notebooks",
    "flexmasks/TORCH.md": "torch_faults.md",
    "flexmasks/README.md": "house.md",
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
# Links to these lead to pages that say the same.
LINKS = {
    "flexmasks/masks/README.md": "gallery/index.md",
    "flexmasks/scores/README.md": "gallery/index.md",
    "notebooks": "notebooks/01_first_steps.md",
    "recipes/benchmarks/wild_masks.py": "gallery/wild.md",
}
# Modules of the reference. Their public names are those of `__all__`.
MODULES = (
    "flexmasks", "flexmasks.flex", "flexmasks.orders", "flexmasks.trees", "flexmasks.integrations.huggingface",
    "flexmasks.integrations.diffusers", "flexmasks.integrations.distributed", "flexmasks.extend",
)  # fmt: skip
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)|<img src=\"([^\"]+)\"[^>]*>")
_FENCED = re.compile(r"(^(`{3,}).*?^\2$)", re.MULTILINE | re.DOTALL)


def build(out: Path) -> Path:
    """Write the site into a folder of its version, and return that folder. Raises SystemExit with all that is wrong."""
    wrong = [*undocumented(), *stale()]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, text in pages():
            file = folder / "docs" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        config = tomllib.loads((HERE / "zensical.toml").read_text(encoding="utf-8"))["project"]
        config["nav"] = _listed(config["nav"], folder / "docs")
        handler = {"paths": [str(ROOT)], "options": config.pop("reference")}
        config["plugins"]["mkdocstrings"] = {"handlers": {"python": handler}}
        (folder / "mkdocs.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(folder / "mkdocs.yml")]
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        )
        (folder / "site/404.html").unlink(missing_ok=True)  # its links begin at the root of a server
        wrong += [ran.stdout + ran.stderr] if ran.returncode else broken(folder / "site")
        if wrong:
            raise SystemExit("\n".join(["the site is not built:", *wrong]))
        place = out / flexmasks.__version__
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder / "site", place)
    to = f"{flexmasks.__version__}/index.html"
    for file, address in ((out / "index.html", to), (out / "latest/index.html", f"../{to}")):
        file.parent.mkdir(exist_ok=True)
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">\n', encoding="utf-8")
    versions = sorted((found.parent.name for found in out.glob("*/search.json")), reverse=True)
    chosen = [{"version": name, "title": name, "aliases": []} for name in versions]
    (out / "versions.json").write_text(json.dumps(chosen), encoding="utf-8")  # for the choice in the header
    return place


def pages() -> Iterator[tuple[str, str]]:
    """Yield the names and texts of all pages, in Markdown, and the style of their pictures."""
    places = _places()
    for file, name in places.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        if file.endswith(".ipynb"):
            text = notebook_pages.page(json.loads(text))
        elif file.endswith(".py"):
            text = _recipe(text)
        if name.startswith("results/"):
            title, _, rest = text.partition("\n")
            text = f"{title}\n\n{plots.of_page(Path(name).stem)}\n{rest}"
        if file != "README.md":
            parts = re.split(r"<!-- README: (.*?) -->", text)  # text, and the titles of sections in turn
            texts = [(_section(part), "README.md") if i % 2 else (part, file) for i, part in enumerate(parts)]
            yield name, "".join(linked(part, where, name, places) for part, where in texts)
    home = str(HERE.relative_to(ROOT) / "home.md")
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rest = (ROOT / home).read_text(encoding="utf-8")
    wide = "---\nhide: [navigation, toc]\n---\n\n"
    yield "index.md", wide + linked(first, "README.md", "index.md", places) + linked(rest, home, "index.md", places)
    yield from gallery.pages()
    yield "gallery/wild.md", in_the_wild.page()
    for module in MODULES:
        yield f"reference/{module}.md", _reference(module)
    yield "style.css", _style()
    yield "focus.js", (HERE / "focus.js").read_text(encoding="utf-8")


def public_names(module: str) -> list[str]:
    """Return the public names of a module, but for modules."""
    there = importlib.import_module(module)
    own = [name for name, value in vars(there).items() if getattr(value, "__module__", "") == module]
    names = getattr(there, "__all__", [name for name in own if not name.startswith("_")])
    return [name for name in names if not inspect.ismodule(getattr(there, name))]


def _reference(module: str) -> str:
    there = importlib.import_module(module)
    parts = [f"# {module}", gallery.markdown((inspect.getdoc(there) or "").partition("\n")[0])]
    # Where they are defined: flexmasks.attention is a module, too.
    homes = {name: getattr(getattr(there, name), "__module__", module) for name in public_names(module)}
    torchs = [f"`{name}`" for name, home in homes.items() if not home.startswith("flexmasks")]
    parts += [f"torch's own, as they are: {', '.join(torchs)}."] if torchs else []
    parts += [f"::: {home}.{name}" for name, home in homes.items() if home.startswith("flexmasks")]
    return "\n\n".join(parts) + "\n"


def undocumented() -> Iterator[str]:
    """Yield a line for each public function or class, and each mask and score, without documentation."""
    for module in MODULES:
        for name in public_names(module):
            value = getattr(importlib.import_module(module), name)
            if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
                yield f"{module}.{name} has no docstring"
    for entry in (*flexmasks.list_masks(), *flexmasks.list_scores()):
        if not entry.summary:
            yield f"the {entry.kind} {entry.name} has no docstring"


def stale() -> Iterator[str]:
    """Yield a line for each page whose figures are not those of its results."""
    sys.path += [str(ROOT / "tests"), str(ROOT / "tests/world")]
    test_readme, test_recipes = map(importlib.import_module, ("test_readme", "test_recipes"))
    made = {name: (functools.partial(test_readme.up_to_date, name), "test_readme.py") for name in test_readme.GENERATED}
    made["recipes/results/README.md"] = (test_recipes.measurements, "world/test_recipes.py")
    for name, (make, by) in made.items():
        if (ROOT / name).read_text(encoding="utf-8") != make():
            yield f"{name} is older than what it is made of: run `python tests/{by}`"


def broken(site: Path) -> list[str]:
    """Return a line for each link of built pages that leads nowhere, and for all that another server would give."""
    texts = {file.resolve(): file.read_text(encoding="utf-8") for file in site.rglob("*.html")}
    ids = {file: set(re.findall(r"\s(?:id|name)=[\"']?([^\"'\s>]+)", text)) for file, text in texts.items()}
    wrong = []
    for file, text in texts.items():
        for tag, address in set(re.findall(r"<(\w+)\s(?:[^<>]*\s)?(?:href|src)=[\"']?([^\"'\s>]+)", text)):
            path, _, anchor = address.partition("#")
            there = (file.parent / unquote(path)).resolve() if path else file
            if re.match(r"[a-z]+:|//", address):
                outside = tag != "a" and not address.startswith("data:")
                wrong += [f"{file.name} asks another server: {address}"] if outside else []
            elif not there.is_file() or (anchor and unquote(anchor) not in ids.get(there, anchor)):
                wrong.append(f"{file.relative_to(site.resolve())}: {address} leads nowhere")
    for file in site.rglob("*.css"):
        if re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", file.read_text(encoding="utf-8")):
            wrong.append(f"{file.name} asks another server")
    return sorted(wrong)


def _places() -> dict[str, str]:
    found = {}
    for pattern, place in PLACES.items():
        base = ROOT / pattern.partition("*")[0].rpartition("/")[0]
        for file in sorted(ROOT.glob(pattern)):
            name = (
                place if place.endswith(".md") else f"{place}/{file.relative_to(base).with_suffix('.md')}".lstrip("/")
            )
            found[str(file.relative_to(ROOT))] = name
    return found


def linked(text: str, file: str, name: str, places: dict[str, str]) -> str:
    """The text of a file of the repository with its links as the page `name` needs them, and its pictures inside."""

    def link(found: re.Match[str]) -> str:
        is_picture, words, target, source = found.groups()
        path, _, anchor = (target or source).partition("#")
        if not path or re.match("[a-z]+:", path):
            return found[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
        if not (ROOT / there).exists():
            raise SystemExit(f"{file}: {target or source} leads nowhere")
        if is_picture or source:
            side = " class='fm-aside'" if 'align="right"' in found[0] else ""
            return f"<figure{side}>{(ROOT / there).read_text(encoding='utf-8')}</figure>"
        page = LINKS.get(there) or places.get(there)
        if page == "gallery/index.md" and anchor in _names():
            page, anchor = f"gallery/{posixpath.basename(posixpath.dirname(there))}/{anchor}.md", ""
        if page is None:
            return words  # a file that is no page
        to = posixpath.relpath(page, posixpath.dirname(name) or ".")
        return f"[{words}]({to}{'#' + anchor if anchor else ''})"

    parts = _FENCED.split(text)  # text, fenced code and its fence in turn
    return "".join(_LINK.sub(link, part) if i % 3 == 0 else part for i, part in enumerate(parts) if i % 3 != 2)


def _section(title: str) -> str:
    _, found, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"\n## {title}\n")
    if not found:
        raise SystemExit(f"README.md has no section {title!r}")
    return rest.partition("\n## ")[0].strip()


def _names() -> set[str]:
    return {entry.name for entry in (*flexmasks.list_masks(), *flexmasks.list_scores())}


def _recipe(text: str) -> str:
    doc = ast.get_docstring(ast.parse(text)) or ""
    first, _, rest = doc.partition("\n")
    title, _, lead = first.partition(": ")
    about = gallery.markdown(f"{lead[:1].upper()}{lead[1:]}\n\n{rest.strip()}".strip())
    code = text.split('"""', 2)[2].strip()
    return f"# {title.rstrip('.')}\n\n{about}\n\n````python\n{code}\n````\n"


def _listed(nav: list[Any], docs: Path) -> list[Any]:
    """The pages of a nav, with those that patterns stand for and that no other place of the list names."""
    named = {item for item in nav if isinstance(item, str)}
    made: list[Any] = []
    for item in nav:
        if isinstance(item, dict):
            ((title, inner),) = item.items()
            made.append({title: _listed(inner, docs) if isinstance(inner, list) else inner})
        elif "*" in item:
            made += sorted({str(file.relative_to(docs)) for file in docs.glob(item)} - named)
        else:
            made.append(item)
    return made


def _style() -> str:
    def variables(colors: dict[str, str]) -> str:
        return ";".join(f"--fm-{name}:{value}" for name, value in colors.items())

    schemes = {"default": svg.LIGHT, "slate": svg.DARK}
    own = "\n".join(f"[data-md-color-scheme={n}] .flexmasks{{{variables(c)}}}" for n, c in schemes.items())
    return f"{svg.style()}\n{own}\n{(HERE / 'style.css').read_text(encoding='utf-8')}"


def main(words: list[str] | None = None) -> None:
    """Build the site into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Build the site.", parents=[import_parser()])
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write into")
    arguments = parser.parse_args(words)
    import_modules(arguments.modules)
    print(build(arguments.out) / "index.html")


if __name__ == "__main__":
    main()
