"""The gallery: every entry, its code, and the page in a browser."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Page, browse, needs_browser
from markupsafe import escape

import benchmark
import flexmasks
import gallery as gallery_module
from flexmasks.__main__ import main
from gallery import USES, code, gallery

pytestmark = pytest.mark.usefixtures("one_thread")
OWN = '''
import flexmasks


@flexmasks.register_mask(example=lambda length: {"window": length // 4, "dilation": 2})
def every_other(b, h, q, kv, *, window: int, dilation: int):
    """Every `dilation`-th of the `window` keys before a query & its own <i>.

    Source: of my own.
    """
    return (kv <= q) & (q - kv <= window) & ((q - kv) % dilation == 0)


@flexmasks.register_mask()
def without_example(b, h, q, kv, *, window: int):
    """It says what is missing."""
    return q - kv <= window


@flexmasks.register_mask(example=lambda length: {"scale": 1 // 0})
def broken(b, h, q, kv, *, scale: int):
    """Its example raises."""
    return q >= kv
'''
ENTRIES = [("mask", m.name) for m in flexmasks.list_masks()] + [("score", s.name) for s in flexmasks.list_scores()]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gallery(tmp_path_factory.mktemp("gallery"))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "masks_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "masks_of_mine", raising=False)
    return "masks_of_mine"


@pytest.mark.slow
def test_the_page_has_every_entry_and_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    parsed = Page(text)
    assert parsed.open == []
    by_use = [name for names in USES.values() for name in names]
    assert len(set(by_use)) == len(by_use)
    anchors = [*(f"mask-{name}" for name in by_use), *(f"score-{s.name}" for s in flexmasks.list_scores())]
    assert set(anchors) == {f"{kind}-{name}" for kind, name in ENTRIES}
    assert list(parsed.articles) == anchors
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert parsed.unlabelled == []
    outside = {address for address in parsed.addresses if address[1:] not in parsed.ids} - {"data:,"}
    assert outside == {"reference/index.html"}
    assert (page.parent / "reference/index.html").is_file()
    assert "{{" not in text
    assert "No example" not in text
    for entry in [*flexmasks.list_masks(), *flexmasks.list_scores()]:
        assert escape(entry.signature) in text
        assert escape(entry.source) in text.replace("<code>", "`").replace("</code>", "`")
    sparsity = flexmasks.get_mask("causal").blocks(8192).sparsity
    assert f"Sparsity at 8,192 tokens: <strong>{sparsity:.1%}" in text
    assert len(text) < 2_000_000


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_the_code_runs_as_it_stands(kind: str, name: str, page: Path, float64: None) -> None:
    shown = code(kind, name)
    assert f"<pre tabindex='0'>{escape(shown)}</pre>" in page.read_text()
    assert run(shown).dtype == torch.float64


@pytest.mark.slow
def test_the_code_runs_compiled() -> None:
    run(code("mask", "sliding_window"))


@pytest.fixture
def float64() -> Iterator[None]:
    """Make code run on the reference backend, which compiles nothing."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run(shown: str) -> torch.Tensor:
    world: dict[str, Any] = {}
    exec(shown, world)
    out: torch.Tensor = world["out"]
    assert out.shape == world["q"].shape
    assert torch.isfinite(out).all()
    return out


def test_a_mask_of_ones_own_is_listed_shown_and_in_the_gallery(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, float64: None
) -> None:
    few = [
        "causal",
        "every_other",
        "without_example",
        "broken",
    ]  # the fixture `page` has all masks and scores of the library
    with monkeypatch.context() as patch:
        patch.setattr(gallery_module, "list_masks", lambda: [e for e in flexmasks.list_masks() if e.name in few])
        patch.setattr(gallery_module, "list_scores", list)
        gallery_module.main([str(tmp_path / "page.html"), "--import", own])
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    text = (tmp_path / "page.html").read_text()
    assert set(Page(text).articles) == {f"mask-{name}" for name in few}
    assert "a query &amp; its own &lt;i&gt;." in text
    assert "No example: ValueError: register &#39;without_example&#39; with example=" in text
    assert "No example: ZeroDivisionError" in text
    shown = code("mask", "every_other")
    assert f"import {own}" in shown
    run(shown)
    assert main(["list", "--import", own]) == 0
    assert "every_other" in capsys.readouterr().out
    assert main(["show", "every_other", "--length", "8", "--import", own, "--save", str(tmp_path / "own.svg")]) == 0
    assert "█·█·····\n" in capsys.readouterr().out
    assert (tmp_path / "own.svg").read_text().startswith("<svg")
    assert main(["list", "--import", "no_such_module"]) == 2
    assert "no_such_module" in capsys.readouterr().err


@pytest.mark.slow
def test_block_masks_of_a_mask_of_ones_own_are_measured(own: str, tmp_path: Path) -> None:
    file = tmp_path / "blocks.json"
    given = ["--device", "cpu", "--import", own, "--json"]
    names = ["--masks", "broken", "every_other", "without_example"]
    assert benchmark.main(["blocks", *names, "--lengths", "64", *given, str(file)]) == 1
    blocks = json.loads(file.read_text())
    assert [(r["mask"], r["example"], r["equal"]) for r in blocks["rows"]] == [
        ("every_other", "every_other(window=16, dilation=2)", True)
    ]
    assert list(blocks["failed"]) == ["broken, example, 64 tokens", "without_example, example, 64 tokens"]


@pytest.mark.campaign
def test_attention_with_a_mask_of_ones_own_is_measured(own: str, tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    given = ["--device", "cpu", "--import", own, "--json"]
    command = ["attention", "--masks", "every_other", "--lengths", "128", *given, str(file)]
    ran = subprocess.run(
        [sys.executable, benchmark.__file__, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert "every_other" in ran.stdout
    rows = json.loads(file.read_text())["rows"]
    assert {r["who"] for r in rows} == {"flexmasks", "flex_attention", "SDPA + mask"}
    assert all(r["difference"] < 1e-5 for r in rows)
    assert {r["example"] for r in rows} == {"every_other(window=32, dilation=2)"}


def test_code_of_parameters_of_all_kinds() -> None:
    @flexmasks.register_mask(
        example=lambda length: {
            "scale": flexmasks.get_mask("causal") & ~flexmasks.get_mask("sliding_window", window=3),
            "ids": torch.arange(length) // 9,
            "names": list(range(0, 40, 4)),
        }
    )
    def everything(b: Any, h: Any, q: Any, kv: Any, *, scale: Any, ids: Any, names: Any) -> Any:
        return scale(b, h, q, kv) & (ids[q] == ids[kv])

    shown = code("mask", "everything")
    assert 'flexmasks.get_mask("causal") & ~flexmasks.get_mask("sliding_window", window=3)' in shown
    assert "list(range(0, 40, 4))" in shown
    assert "mask=flexmasks.get_mask(" in shown  # `scale` is an argument of attention
    call = shown.replace("flexmasks.attention(", "dict(q=q, k=k, v=v, mask=").replace("q, k, v, mask=", "")
    world: dict[str, Any] = {}
    exec(call.replace("    q, k, v,\n    mask=", "    "), world)
    want = flexmasks.get_mask("everything", **flexmasks.spec.definitions.definition("mask", "everything").example(64))  # type: ignore[misc]
    assert world["out"]["mask"] == want


@pytest.mark.parametrize("name", ["document", "natten", "tree"])
def test_the_code_has_the_numbers_of_its_picture(name: str, page: Path) -> None:
    article = page.read_text().partition(f"<article id='mask-{name}'")[2].partition("</article>")[0]
    picture = article.partition("<svg")[2].partition("</svg>")[0]
    length = int(re.search(r"torch.randn\(3, 1, \d+, (\d+), 64\)", article)[1])  # type: ignore[index]
    assert f"{length} queries x {length} keys" in picture


@needs_browser
def test_in_a_browser(page: Path) -> None:
    script = """
    const result = [];
    const visible = () => cards.filter(card => card.checkVisibility()).map(card => card.id).join(" ");
    const type = text => { search.value = text; search.dispatchEvent(new Event("input")); };
    result.push(visible());
    type("Sliding  WINDOW mistral"); result.push(visible()); result.push(found.textContent);
    type("no such word anywhere"); result.push(visible()); result.push(found.textContent);
    type("causal");
    const first = cards.filter(card => card.checkVisibility()).sort((a, b) => a.style.order - b.style.order)[0];
    result.push(first.id);
    search.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"})); result.push(found.textContent);
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "/"})); result.push(document.activeElement.id);
    theme.value = "dark"; theme.dispatchEvent(new Event("change"));
    result.push(getComputedStyle(cards[0]).backgroundColor);
    result.push(getComputedStyle(cards[0].querySelector(".fm-card")).fill);
    theme.value = "light"; theme.dispatchEvent(new Event("change"));
    result.push(getComputedStyle(cards[0].querySelector(".fm-card")).fill);
    const button = document.querySelector("#mask-causal .code button");
    button.click(); result.push(button.tagName);
    result.push(document.documentElement.scrollWidth <= innerWidth);
    setTimeout(() => { document.title = JSON.stringify([...result, button.textContent]); }, 500);
    """
    for size in ("1400,900", "500,900"):
        dom, log = browse(page, script=script, arguments=(f"--window-size={size}",))
        assert "CONSOLE" not in log, [line for line in log.splitlines() if "CONSOLE" in line]
        title = re.search(r"<title>(.*?)</title>", dom)
        assert title is not None
        got = html.unescape(title[1])
        every = " ".join(Page(page.read_text()).articles)
        total = len(ENTRIES)
        assert got.startswith(f'["{every}","mask-sliding_window","1 of {total}","","0 of {total}","mask-causal",')
        rest = '"17 entries","search","rgb(21, 25, 31)","rgb(21, 25, 31)","rgb(255, 255, 255)","BUTTON",true,'
        assert rest.replace("17", str(total)) in got
        assert got.endswith(('"Copied"]', '"Selected"]'))


@needs_browser
def test_an_address_can_hold_a_search(page: Path) -> None:
    dom, log = browse(page, "?q=checkerboard")
    assert "CONSOLE" not in log
    hidden = re.findall(r"<article[^>]*? hidden=\"\"", dom)
    assert len(hidden) == len(ENTRIES) - 1
    assert f"1 of {len(ENTRIES)}<" in dom


@needs_browser
def test_the_browser_test_sees_errors(page: Path) -> None:
    assert "CONSOLE" in browse(page, script="undefined.x")[1]
