"""The reference: every public name has a page, which says all that its docstring says, and links lead somewhere."""

from __future__ import annotations

import html
import importlib.util
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, browse, needs_browser

import flexmasks
from flexmasks.__main__ import main
from flexmasks.integrations import distributed, huggingface
from flexmasks.pictures import gallery as gallery_module
from flexmasks.pictures import output
from flexmasks.spec.definitions import definition

pytest.importorskip("griffe", reason="griffe is not installed")
DRAWN = ("causal", "alibi")  # drawing all masks and scores takes a minute
COMMANDS = ("demo", "list", "show", "bench", "gallery")
HEADINGS = {"Args": "Parameters", "Peers": "In other libraries"}
OWN = '''
import flexmasks


@flexmasks.register_mask(example=lambda length: {"window": 4})
def own_mask(b, h, q, kv, *, window: int):
    """The `window` keys before a query & its own <i>.

    Args:
        window: a number, see `flexmasks.get_mask`.

    Note:
        A section that this library's docstrings do not have.

    Yields:
        int: nothing.

    Source: of my own.
    """
    return (kv <= q) & (q - kv <= window)
'''


def public() -> Iterator[tuple[str, str, Any]]:
    """Yield the path, the file's name and the value of each public name."""
    orders = [n for n, f in vars(flexmasks.orders).items() if inspect.isfunction(f) and not n.startswith("_")]
    modules = [(flexmasks, flexmasks.__all__), (flexmasks.orders, orders)]
    modules += [(huggingface, huggingface.__all__), (distributed, distributed.__all__)]
    for module, names in modules:
        for name in names:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                path = f"{module.__name__}.{name}"
                yield path, f"{path}-class.html" if inspect.isclass(value) else f"{path}.html", value


NAMES = {path: (file, value) for path, file, value in public()}
ENTRIES = [("mask", m.name) for m in flexmasks.list_masks()] + [("score", s.name) for s in flexmasks.list_scores()]


def quick(kind: str, entry: Any) -> dict[str, Any]:
    """Return an entry of the gallery; most are not drawn."""
    if entry.name in DRAWN:
        return DRAW(kind, entry)
    return {"kind": kind, "entry": entry, "words": entry.name, "error": "not drawn"}


DRAW = gallery_module._card


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery_module, "_card", quick)
        assert main(["gallery", str(folder)]) == 0
    return folder


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text))


def text_of(page: Path) -> str:
    """Return what the main part of a page says."""
    main_part = page.read_text().partition("<main")[2].partition("</main>")[0].partition(">")[2]
    without_pictures = re.sub(r"<svg.*?</svg>", "", main_part, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", without_pictures))


def check_says(page: Path, doc: str) -> None:
    """Check that a page has all words of a docstring, and its sections as headings."""
    said = re.sub(r"# doctest: [+\w, ]+", "", doc)
    titles = re.findall(r"^(Args|Returns|Raises|Source|Peers|Example):", said, re.MULTILINE)
    headings = re.findall(r"<h3>(.*?)</h3>", page.read_text())
    assert not {HEADINGS.get(title, title) for title in titles} - set(headings)
    said = re.sub(r"^(Args|Returns|Raises|Source|Peers|Example):", "", said, flags=re.MULTILINE)
    assert not words(said) - words(text_of(page))
    assert not re.search("<p>(Source|Peers|Example)</p>", page.read_text())  # a heading says it
    outside_code = html.unescape(re.sub(r"<pre.*?</pre>|<[^>]*>", "", page.read_text(), flags=re.DOTALL))
    outside_code = outside_code.partition("use strict")[0]
    assert "`" not in outside_code
    assert ">>>" not in outside_code
    assert not re.findall(r"^\s*(?:Args|Returns|Raises|Peers|Examples?):", outside_code, re.MULTILINE)


@pytest.mark.parametrize("path", NAMES)
def test_a_public_name_has_a_page(path: str, site: Path) -> None:
    file, value = NAMES[path]
    page = site / "reference" / file
    check_says(page, inspect.cleandoc(value.__doc__ or ""))
    assert f'href="{file}"' in (site / "reference/index.html").read_text()
    signature = text_of(page).partition(")")[0]
    if not inspect.isclass(value):
        assert all(name in signature for name in inspect.signature(value).parameters)


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_a_mask_or_score_has_a_page(kind: str, name: str, site: Path) -> None:
    anchor, known = f"{kind}-{name}", definition(kind, name)
    page = site / "reference" / f"{anchor}.html"
    check_says(page, known.doc)
    text = text_of(page)
    assert all(name in text and p.spec in text for name, p in known.parameters.items())
    assert f'"../index.html#{anchor}"' in page.read_text()
    assert f"'reference/{anchor}.html'" in (site / "index.html").read_text()
    assert f'"{anchor}.html"' in (site / "reference/index.html").read_text()
    assert ("<svg" in page.read_text()) == (name in DRAWN)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_a_page(command: str, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert not words(capsys.readouterr().out) - words(text_of(site / "reference" / f"command-{command}.html"))


def test_members_of_classes(site: Path) -> None:
    for path, members in {
        "flexmasks.Mask": ["name", "blocks", "to"],
        "flexmasks.Picture": ["text", "svg", "plot", "save"],
        "flexmasks.blocks.counts.Blocks": ["total", "partial", "full", "empty", "shares", "sparsity"],
        "flexmasks.integrations.distributed.Order": ["natural", "ranks", "sizes", "is_natural", "tokens"],
    }.items():
        page = Page((site / "reference" / f"{path}-class.html").read_text())
        assert [name for name in members if name not in page.ids] == []


def test_links_lead_somewhere(site: Path) -> None:
    pages = {file: Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    assert len(pages) > len(NAMES) + len(ENTRIES) + len(COMMANDS)
    names = {file.name.lower() for file in (site / "reference").iterdir()}
    assert len(names) == len(list((site / "reference").iterdir()))  # file systems may not distinguish capitals
    for file, page in pages.items():
        assert page.open == []
        assert len(set(page.ids)) == len(page.ids), file
        assert page.unlabelled == []
        for address in page.addresses:
            if address != "data:,":
                target, _, anchor = address.partition("#")
                found = (file.parent / target).resolve() if target else file
                assert found.is_file(), (file, address)
                assert not anchor or anchor in pages[found].ids, (file, address)
    data = (site / "reference/names.js").read_text()
    for entry in json.loads(data.removeprefix("const NAMES = ").removesuffix(";\n")):
        target, _, anchor = entry["file"].partition("#")
        assert not anchor or anchor in pages[site / "reference" / target].ids
    text = (site / "reference/flexmasks.attention.html").read_text()
    assert '<a href="flexmasks.get_mask.html"><code>get_mask</code></a>' in text
    assert '"flexmasks.integrations.distributed.attention.html"' in text


def test_a_second_run_changes_nothing_and_one_that_stops_leaves_the_old_pages(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery_module, "_card", quick)
    monkeypatch.setattr(gallery_module, "list_masks", lambda: flexmasks.list_masks()[:3])
    monkeypatch.setattr(gallery_module, "list_scores", list)
    monkeypatch.setenv("COLUMNS", "40")
    out = tmp_path / "page.html"
    assert main(["gallery", str(out)]) == 0
    files = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.rglob("*.*")}
    assert tmp_path / "page-reference/index.html" in files
    for file in (site / "reference").glob("command-*"):  # the width of the terminal changes nothing
        moved = file.read_text().replace("../index.html", "../page.html")
        assert moved == (tmp_path / "page-reference" / file.name).read_text()
    assert main(["gallery", str(out)]) == 0
    assert files == {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.rglob("*.*")}

    replace = Path.replace

    def stop(file: Path, target: Path) -> Path:
        if target.name == "flexmasks.draw.html":
            raise KeyboardInterrupt
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", stop)
    monkeypatch.setattr(gallery_module, "list_masks", lambda: flexmasks.list_masks()[1:2])
    (tmp_path / "page-reference/flexmasks.draw.html").write_text("old")
    assert main(["gallery", str(out)]) == 130
    assert (tmp_path / "page-reference/flexmasks.draw.html").read_text() == "old"
    assert set(tmp_path.rglob("*.*")) == set(files)
    assert out.read_bytes() == files[out][0]


def test_without_the_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery_module, "_card", quick)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "griffe" else find(name, *more)
    )
    assert main(["gallery", str(tmp_path)]) == 0
    said = "flexmasks: no reference, it needs griffe: `pip install 'flexmasks[docs]'`.\n"
    assert said in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["index.html"]
    assert "reference/" not in (tmp_path / "index.html").read_text()


def test_a_mask_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "masks_with_pages.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gallery_module, "_card", quick)
    assert main(["gallery", str(tmp_path / "out"), "--import", "masks_with_pages"]) == 0
    page = (tmp_path / "out/reference/mask-own_mask.html").read_text()
    assert re.findall("<h3>(.*?)</h3>", page) == ["Parameters", "Note", "Yields", "Source"]
    assert "The <code>window</code> keys before a query &amp; its own &lt;i&gt;." in page
    assert 'see <a href="flexmasks.get_mask.html"><code>flexmasks.get_mask</code></a>' in page
    assert "A section that this library" in page


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.html"
    output.write(file, "old")
    monkeypatch.setattr(Path, "replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        output.write(file, "new")
    assert [f.name for f in tmp_path.iterdir()] == ["x.html"]
    assert file.read_text() == "old"


@needs_browser
def test_pages_in_a_browser(site: Path) -> None:
    """Open all pages as on a phone, in frames of 390 pixels, and search on one page of each kind."""
    pages = sorted(str(file.relative_to(site)) for file in site.rglob("*.html"))
    (site / "frames.html").write_text("<!doctype html><meta charset=utf-8><title></title><body></body>")
    script = """
    const wide = [], found = {}, seen = {};
    const load = page => new Promise(done => {
      const frame = document.createElement("iframe");
      frame.style = "width: 390px; height: 844px; border: 0";
      frame.onload = () => {
        const page_ = frame.contentDocument, root = page_.documentElement;
        if (root.scrollWidth > 390) wide.push(page + " " + root.scrollWidth);
        if (SEARCHED.includes(page)) {
          const search = page_.getElementById("search"), view = frame.contentWindow;
          for (const text of ["sliding_window", "alibi", "flexmasks.varlen_attention"]) {
            search.value = text;
            search.dispatchEvent(new view.Event("input"));
            const links = Array.from(page_.querySelectorAll("#results a"), link => link.textContent);
            const cards = Array.from(page_.querySelectorAll("article[data-text]"));
            const shown = cards.filter(card => !card.hidden).map(card => card.id);
            found[page + " " + text] = [...shown, ...links];
          }
          for (const theme of ["dark", "light"]) {
            const select = page_.getElementById("theme");
            select.value = theme;
            select.dispatchEvent(new view.Event("change"));
            seen[page + " " + theme] = view.getComputedStyle(page_.body).backgroundColor;
          }
        }
        frame.remove();
        done();
      };
      frame.src = page;
      document.body.append(frame);
    });
    (async () => {
      for (const page of PAGES) await load(page);
      document.title = JSON.stringify({wide, found, seen});
    })();
    """
    searched = ["index.html", "reference/index.html", "reference/mask-causal.html"]
    script = script.replace("PAGES", json.dumps(pages)).replace("SEARCHED", json.dumps(searched))
    dom, log = browse(
        site / "frames.html", script=script, arguments=("--allow-file-access-from-files", "--window-size=1000,900")
    )
    assert "CONSOLE" not in log, [line for line in log.splitlines() if "CONSOLE" in line]
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    got = json.loads(html.unescape(title[1]))
    assert got["wide"] == []
    for page in searched:
        card = "mask-sliding_window" if page == "index.html" else "sliding_window"
        assert card in got["found"][f"{page} sliding_window"]
        assert ("score-alibi" if page == "index.html" else "alibi") in got["found"][f"{page} alibi"]
        assert got["found"][f"{page} flexmasks.varlen_attention"][0] == "flexmasks.varlen_attention"
        assert got["seen"][f"{page} dark"] == "rgb(32, 38, 46)"
        assert got["seen"][f"{page} light"] == "rgb(238, 241, 245)"
