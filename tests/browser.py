"""Pages of the gallery and the reference: their tags, and what Chromium shows of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, none is here")


class Page(HTMLParser):
    """Entries, ids and links of a page, whose tags must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.articles: dict[str, str] = {}
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.unlabelled: list[str] = []
        self.labels = re.findall(r"<label for=[\"'](\w+)", text)
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {n: v or "" for n, v in attrs}
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.addresses += [given[n] for n in ("src", "href") if n in given]
        if tag == "article" and "data-text" in given:
            self.articles[given["id"]] = given["data-text"]
        named = "aria-label" in given or given.get("id") in self.labels
        if tag in ("input", "select", "svg") and not named:
            self.unlabelled.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def browse(page: Path, query: str = "", script: str = "", arguments: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return the page after its scripts and one more script ran, and the browser's log."""
    assert CHROMIUM is not None
    if script:
        copy = page.with_name("scripted.html")
        copy.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
        page = copy
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        f"--disable-component-update --disable-sync --user-data-dir={page.parent}/profile --enable-logging=stderr "
        "--virtual-time-budget=3000 --dump-dom"
    )
    ran = subprocess.run(
        [CHROMIUM, *flags.split(), *arguments, f"{page.as_uri()}{query}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return ran.stdout, ran.stderr
