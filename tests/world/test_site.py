"""The site: it is built strictly, has a place for all that is public, and works in a browser.

`SITE=FOLDER python -m pytest tests/world/test_site.py` looks at a site that `recipes/site/build.py FOLDER` built, and
`SHOTS=FOLDER` keeps pictures of its pages.
"""

from __future__ import annotations

import functools
import html
import http.server
import importlib
import inspect
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_readme
import test_recipes

import build
import flexmasks
import gallery
import in_the_wild
import plots
from flexmasks.spec.definitions import definition, is_by_library

CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
PAGES = (
    "index.html", "start.html", "which_mask.html", "gallery/index.html", "gallery/masks/natten.html",
    "guides/decoding.html", "guides/slow.html",
    "coming_from/flex_attention.html", "notebooks/02_block_sparsity.html", "results/attention.html",
    "results/registry.html", "reference/flexmasks.html",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "SITE" in os.environ:
        return Path(os.environ["SITE"]) / flexmasks.__version__
    for needed in ("zensical", "mkdocstrings", "matplotlib"):
        pytest.importorskip(needed, reason="the site needs the extra `docs`")
    with pytest.MonkeyPatch.context() as patch:  # long pictures and all plots take half of the time
        patch.setattr(gallery, "LONGER", {"mask": (512, 1024), "score": (128, 256)})
        patch.setattr(plots, "PLOTS", plots.PLOTS[:2])
        return build.build(tmp_path_factory.mktemp("site"))


def test_it_is_built(site: Path) -> None:
    """One test, so that only one of pytest's workers builds the site."""
    assert f"0; url={flexmasks.__version__}/index.html" in (site.parent / "index.html").read_text()
    assert f"0; url=../{flexmasks.__version__}/index.html" in (site.parent / "latest/index.html").read_text()
    assert [v["version"] for v in json.loads((site.parent / "versions.json").read_text())] == [flexmasks.__version__]
    for kind, entries in (("masks", flexmasks.list_masks()), ("scores", flexmasks.list_scores())):
        for entry in entries:
            if is_by_library(entry.kind, entry.name):  # not of another test
                text = (site / f"gallery/{kind}/{entry.name}.html").read_text()
                assert text.count("</figure>") == (1 if entry.name in ("softcap", "temperature") else 3)
                assert html.escape(entry.signature, quote=False) in text.replace("&quot;", '"')
    wild = (site / "gallery/wild.html").read_text()
    assert wild.count("</figure>") == len(in_the_wild.WILD)
    assert all(name in wild for name in in_the_wild.WILD)
    found = {item["location"] for item in json.loads((site / "search.json").read_text())["items"]}
    assert {"gallery/masks/natten.html", "guides/slow.html", "notebooks/01_first_steps.html"} <= found
    for module in build.MODULES:
        for name in build.public_names(module):
            _check_public_name(module, name, site)
    _check_plots(site)


def _check_plots(site: Path) -> None:
    text = (site / "results/attention.html").read_text()
    rows = json.loads((plots.RESULTS / "attention_gpu.json").read_text())["rows"]
    (row,) = (r for r in rows if (r["case"], r["shape"], r["who"]) == ("causal", "16x16x8192x128", "flexmasks"))
    assert f">{row['forward_tflops']:.0f}</text>" in text
    assert f">{row['backward_tflops']:.0f}</text>" in text


def test_plots_have_what_was_measured() -> None:
    pages = {file.stem for file in plots.RESULTS.glob("*.md")}
    for plot in plots.PLOTS:
        assert plot.page in pages
        groups = [bars for _, bars, _ in plots.groups(plot)]
        assert all(plot.who[0] in bars for bars in groups), plot.title
        assert any(len(bars) > 1 for bars in groups), plot.title


OF_MASKS_TOO = {("score", "packed"), ("score", "paged"), ("score", "checkerboard")}  # or an example only


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _check_public_name(module: str, name: str, site: Path) -> None:
    value = getattr(importlib.import_module(module), name)
    home = getattr(value, "__module__", module)
    text = (site / f"reference/{module}.html").read_text()
    if not home.startswith("flexmasks"):
        assert f"<code>{name}</code>" in text
        return
    _, found, place = text.partition(f'id="{home}.{name}"')
    assert found, name
    said = words(html.unescape(re.sub("<[^>]*>", "", re.split(r"<h2 id=", place)[0])))
    if inspect.isclass(value) or inspect.isroutine(value):
        headings = r"# doctest: [+\w, ]+|^(Args|Returns|Raises|Yields|Example|Source|Peers):"
        assert words(re.sub(headings, "", inspect.getdoc(value) or "", flags=re.MULTILINE)) <= said, name
    if inspect.isroutine(value):
        assert set(inspect.signature(value).parameters) <= said, name


def test_what_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "style.css").write_text("a { background: url('//else.where/a.png') }")
    (tmp_path / "x/b.html").write_text("<p id='here'><a href='../a.html#there'>a</a><img src='gone.png'>")
    (tmp_path / "a.html").write_text(
        "<script src='https://else.where/a.js'></script><a href='https://good'>a</a>"
        "<a href='x/b.html#here'>b</a><a href='x/b.html#gone'>b</a><a href='c.html'>c</a>"
    )
    assert sorted(build.broken(tmp_path)) == [
        "a.html asks another server: https://else.where/a.js",
        "a.html: c.html leads nowhere",
        "a.html: x/b.html#gone leads nowhere",
        "style.css asks another server",
        "x/b.html: ../a.html#there leads nowhere",
        "x/b.html: gone.png leads nowhere",
    ]
    assert list(build.stale()) == list(build.undocumented()) == []
    monkeypatch.setitem(test_readme.GENERATED, "recipes/results/blocks.md", {"blocks": lambda: "other figures"})
    monkeypatch.setattr(test_recipes, "measurements", lambda: "other figures")
    monkeypatch.setattr(flexmasks, "nothing", lambda: None, raising=False)
    monkeypatch.setattr(flexmasks, "__all__", [*flexmasks.__all__, "nothing"])
    old = [line.partition(" ")[0] for line in build.stale()]
    assert old == ["recipes/results/blocks.md", "recipes/results/README.md"]
    assert list(build.undocumented()) == ["flexmasks.nothing has no docstring"]


def test_links_between_files_lead_from_page_to_page() -> None:
    places = {"recipes/results/blocks.md": "results/blocks.md"}
    text = (
        "[b](results/blocks.md#x) [mask](../flexmasks/masks/README.md#causal) [all](../flexmasks/masks/README.md) "
        "[`no page`](benchmark.py)\n```\n[code](x)\n```\n[here](#y) [out](https://x)"
    )
    assert build.linked(text, "recipes/a.md", "guides/a.md", places) == (
        "[b](../results/blocks.md#x) [mask](../gallery/masks/causal.md) [all](../gallery/index.md) "
        "`no page`\n```\n[code](x)\n```\n[here](#y) [out](https://x)"
    )
    picture = build.linked("![p](../notebooks/pictures/natten.svg)", "recipes/a.md", "guides/a.md", places)
    assert picture.startswith("<figure><svg")
    for wrong in ("[x](gone.md)", "![x](gone.svg)"):
        with pytest.raises(SystemExit, match=r"recipes/a.md: gone.\w+ leads nowhere"):
            build.linked(wrong, "recipes/a.md", "guides/a.md", places)


def test_each_mask_and_score_has_a_job() -> None:
    text = (build.HERE / "docs/which_mask.md").read_text()
    named = dict(re.findall(r"\[`(\w+)\(([^)]*)\)`\]", text))
    for entry in (*flexmasks.list_masks(), *flexmasks.list_scores()):
        if is_by_library(entry.kind, entry.name) and (entry.kind, entry.name) not in OF_MASKS_TOO:
            parameters = definition(entry.kind, entry.name).parameters.values()
            assert named[entry.name] == ", ".join(p.name for p in parameters if p.required), entry.name


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("needs Chromium, none is here")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(browser: Any, site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/{site.name}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def opened(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page of a browser, which fails the test if it says an error or asks another server."""
    width, scheme = getattr(request, "param", (1280, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, said, origin = context.new_page(), [], address.removesuffix(f"{flexmasks.__version__}/")
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda sent: None if sent.url.startswith((origin, "data:")) else said.append(sent.url))
    yield page
    context.close()
    assert said == []


SHAPES = [(width, scheme) for width in (390, 1280) for scheme in ("light", "dark")]


@pytest.mark.parametrize("opened", SHAPES, ids=str, indirect=True)
def test_pages_fit_their_windows(opened: Any, address: str, request: pytest.FixtureRequest) -> None:
    for name in PAGES:
        opened.goto(address + name)
        opened.wait_for_timeout(200)
        if "SHOTS" in os.environ:
            shape = re.sub(r"\W+", "-", request.node.callspec.id)
            opened.screenshot(path=f"{os.environ['SHOTS']}/{name.replace('/', '-')}{shape}.png")
        assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth"), name


def test_the_keyboard_finds_a_page(opened: Any, address: str) -> None:
    opened.goto(address + "index.html", wait_until="networkidle")
    opened.keyboard.press("Control+k")
    opened.wait_for_timeout(500)
    opened.keyboard.type("sliding_window", delay=20)
    opened.get_by_text(re.compile(r"\d+ results")).wait_for()
    opened.wait_for_timeout(300)
    opened.keyboard.press("Enter")
    opened.wait_for_url("**/gallery/masks/sliding_window.html*")


def test_the_theme_changes_the_pictures(opened: Any, address: str) -> None:
    opened.goto(address + "gallery/masks/causal.html")
    fill = "getComputedStyle(document.querySelector('.fm-card')).fill"
    seen = [opened.evaluate(fill)]
    for _ in range(2):  # from the system's theme to the light one, and to the dark one
        opened.locator("label.md-header__button:visible[for^=__palette]").click()
        opened.wait_for_timeout(300)
        seen.append(opened.evaluate(fill))
    assert seen == ["rgb(255, 255, 255)", "rgb(255, 255, 255)", "rgb(21, 25, 31)"]


@pytest.mark.parametrize("opened", SHAPES[1:3], ids=str, indirect=True)
def test_accessibility(opened: Any, address: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    for name in PAGES:
        opened.goto(address + name)
        found = axe.Axe().run(opened, options={"resultTypes": ["violations"]}).response["violations"]
        grave = [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in found if v["impact"] in ("serious", "critical")]
        assert grave == [], name
