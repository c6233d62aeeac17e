"""The reference that pdoc makes: a place for each public name, with all that its docstring says."""

from __future__ import annotations

import html
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flexmasks
import gallery as gallery_module
from flexmasks import extend
from flexmasks.integrations import distributed, huggingface
from flexmasks.pictures import output
from gallery import gallery

pytest.importorskip("pdoc", reason="pdoc is not installed")


def public() -> Iterator[tuple[str, str, Any]]:
    """Yield the module's page, the name and the value of each public name."""
    defined = [(n, f) for n, f in vars(flexmasks.orders).items() if inspect.isfunction(f) and not n.startswith("_")]
    orders = [n for n, f in defined if f.__module__ == flexmasks.orders.__name__]
    modules = [(flexmasks, flexmasks.__all__), (flexmasks.orders, orders)]
    modules += [(huggingface, huggingface.__all__), (distributed, distributed.__all__), (extend, extend.__all__)]
    for module, names in modules:
        for name in names:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isroutine(value):  # no modules, no unions of types
                yield f"{module.__name__.replace('.', '/')}.html", name, value


NAMES = {f"{page} {name}": (page, name, value) for page, name, value in public()}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery_module, "list_masks", lambda: flexmasks.list_masks()[:3])
        patch.setattr(gallery_module, "list_scores", list)
        gallery(folder)
    return folder


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_place(name: str, site: Path) -> None:
    page, name, value = NAMES[name]
    text = (site / "reference" / page).read_text()
    place = re.split(r"<section id=", text.partition(f'<section id="{name}">')[2])[0]
    said = html.unescape(re.sub("<[^>]*>", "", place))
    doc = re.sub(r"# doctest: [+\w, ]+", "", inspect.cleandoc(value.__doc__ or ""))
    headings = re.sub(r"^(Args|Returns|Raises|Source|Peers|Example):", "", doc, flags=re.MULTILINE)
    assert not words(headings) - words(said)
    if not inspect.isclass(value):
        assert all(parameter in said for parameter in inspect.signature(value).parameters)


def test_links_of_the_reference_lead_somewhere(site: Path) -> None:
    for file in sorted((site / "reference").rglob("*.html")):
        for address in re.findall(r'(?:href|src)="([^"]+)"', file.read_text()):
            if not re.match(r"https?:|data:|\$", address):
                target, _, anchor = address.partition("#")
                found = (file.parent / target).resolve() if target else file
                assert found.is_file(), (file, address)
                assert not anchor or f'id="{anchor}"' in found.read_text(), (file, address)
    assert not list(site.rglob("*backends*"))  # rooms of the house are not public


def test_without_pdoc(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery_module, "list_masks", list)
    monkeypatch.setattr(gallery_module, "list_scores", list)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "pdoc" else find(name, *more))
    gallery(tmp_path)
    assert capsys.readouterr().err == "no reference, it needs pdoc: `pip install pdoc`.\n"
    assert [file.name for file in tmp_path.iterdir()] == ["index.html"]
    assert "reference/" not in (tmp_path / "index.html").read_text()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.html"
    output.write(file, "old")
    monkeypatch.setattr(Path, "replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        output.write(file, "new")
    assert [f.name for f in tmp_path.iterdir()] == ["x.html"]
    assert file.read_text() == "old"
