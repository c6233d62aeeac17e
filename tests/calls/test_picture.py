"""Pictures against create_block_mask and dense masks: text, SVG and matplotlib."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from helpers import one_in
from oracles import MASKS
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flexmasks
from flexmasks.__main__ import main
from flexmasks.pictures import output, svg
from flexmasks.pictures.cells import HIDDEN, PARTIAL, SKIPPED, VISIBLE
from flexmasks.pictures.lengths import suggested_lengths
from flexmasks.pictures.picture import ScorePicture
from flexmasks.spec.registry import example

pytestmark = pytest.mark.usefixtures("one_thread")
SVG = "{http://www.w3.org/2000/svg}"
IDS = torch.arange(1000) // 170
RANDOM = torch.rand(999, 333, generator=torch.Generator().manual_seed(0)) < 0.02
CASES: dict[str, tuple[Any, int, int, dict[str, Any]]] = {
    "causal": ("causal", 1024, 1024, {}),
    "causal, odd lengths": ("causal", 999, 1001, {"q_offset": "first"}),
    "one query": ("causal", 1, 700, {"q_offset": 699}),
    "one key": ("full", 300, 1, {}),
    "window": ("sliding_window", 1000, 1000, {"window": 200}),
    "window of small blocks": ("sliding_window", 100, 100, {"window": 20, "block_size": 16}),
    "window of odd blocks": ("sliding_window", 100, 90, {"window": 20, "block_size": (7, 30), "q_offset": 0}),
    "single pairs": ("sliding_window", 40, 40, {"window": 3}),
    "nothing": (lambda b, h, q, kv: (q < 0) & (kv < 0), 300, 300, {}),
    "documents": ("document", 1000, 1000, {"document_ids": IDS}),
    "holes": (lambda b, h, q, kv: RANDOM[q, kv], 999, 333, {"q_offset": 0}),
    "canvas": ("natten", 1024, 1024, {"height": 32, "width": 32, "kernel": 5}),
    "second element": ("grouped_tril", 700, 700, {"seq_lens": [700, 300], "b": 1}),
    "third head": (lambda b, h, q, kv: (q - kv) % (h + 2) == 0, 260, 260, {"h": 2}),
    "aggregated": ("sliding_window", 700, 700, {"window": 50, "block_size": 2}),
}


def drawn(name: str) -> Any:
    mask, q_len, kv_len, more = CASES[name]
    return flexmasks.draw(mask, q_len, kv_len, **more)


def dense_of(name: str) -> Tensor:
    """Return the dense mask of the drawn batch element and head."""
    mask, q_len, kv_len, more = CASES[name]
    rest = {n: v for n, v in more.items() if n not in ("b", "h", "block_size")}
    heads = 3 if "h" in more else None
    dense = flexmasks.dense_mask(mask, q_len, kv_len, heads=heads, **rest)
    return dense[min(more.get("b", 0), len(dense) - 1), min(more.get("h", 0), dense.shape[1] - 1)]


def in_blocks(dense: Tensor, size: tuple[int, int], combine: Callable[[Tensor], Tensor], past: bool) -> Tensor:
    """Combine the pairs of each block; pairs past the edge are `past`."""
    over = [-n % s for n, s in zip(dense.shape, size, strict=True)]
    padded = torch.nn.functional.pad(dense, (0, over[1], 0, over[0]), value=past)
    rows, columns = (n // s for n, s in zip(padded.shape, size, strict=True))
    return combine(padded.view(rows, size[0], columns, size[1]).transpose(1, 2).flatten(2))


def any_in_blocks(dense: Tensor, size: tuple[int, int]) -> Tensor:
    return in_blocks(dense, size, lambda x: x.any(-1), False)


def at_pairs(blocks: Tensor, size: tuple[int, int], like: Tensor) -> Tensor:
    """Return each block's value at each of its pairs."""
    values = blocks.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
    return values[: like.shape[0], : like.shape[1]]


@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_of_torch_and_of_the_dense_mask(name: str) -> None:
    picture, dense = drawn(name), dense_of(name)
    counts, size = picture.counts, picture.block_size
    if size[0] > 2:  # torch takes long for many blocks, and calls full single pairs partial
        block_mask = create_block_mask(lambda b, h, q, kv: dense[q, kv], 1, 1, *dense.shape, "cpu", BLOCK_SIZE=size)
        assert counts.full == int(block_mask.full_kv_num_blocks.sum())
        assert counts.partial == int(block_mask.kv_num_blocks.sum())
    blocks = any_in_blocks(dense, size)
    assert counts.empty == int((~blocks).sum())
    assert counts.empty + counts.partial + counts.full == blocks.numel()
    pairs = int(at_pairs(blocks, size, dense).sum())
    assert counts.shares[0] == pytest.approx(1 - pairs / dense.numel())
    assert sum(counts.shares) == pytest.approx(1)
    assert counts.hidden == pytest.approx(1 - int(dense.sum()) / pairs if pairs else 0.0)
    assert not counts.estimated


@pytest.mark.parametrize("most", [(5, 5), (64, 64), (1000, 1000), (3, 200)])
@pytest.mark.parametrize("name", CASES)
def test_every_cell_is_what_the_dense_mask_has_there(name: str, most: tuple[int, int]) -> None:
    picture, dense = drawn(name), dense_of(name)
    grid, size = picture._cells.grid(*most), picture.block_size
    all_visible = in_blocks(dense, grid.cell, lambda x: x.all(-1), True)
    computed = any_in_blocks(at_pairs(any_in_blocks(dense, size), size, dense), grid.cell)
    if grid.cell[0] >= size[0] and dense.shape[0] % size[0]:  # the edge cuts the last blocks, so they are partial
        all_visible[-1] = False
    if grid.cell[1] >= size[1] and dense.shape[1] % size[1]:
        all_visible[:, -1] = False
    want = torch.full_like(grid.values, SKIPPED)
    want[computed] = HIDDEN
    want[any_in_blocks(dense, grid.cell)] = PARTIAL
    want[all_visible] = VISIBLE
    assert torch.equal(grid.values, want)


@pytest.mark.parametrize("columns", [1, 7, 8, 20, 40, 79, 80, 200])
@pytest.mark.parametrize("name", ["causal", "one query", "holes", "window of odd blocks", "single pairs"])
def test_text_is_as_wide_as_asked(name: str, columns: int) -> None:
    lines = drawn(name).text(columns).splitlines()
    rows = list(itertools.takewhile(re.compile("[·░▒█]+").fullmatch, lines))
    rest = lines[len(rows) :]
    assert rows
    assert max(map(len, rows)) <= columns
    assert len({len(row) for row in rows}) == 1
    assert all(len(line) <= max(columns, 24) for line in rest)
    at_least = min(columns, drawn(name).kv_len) // 2 if name == "causal" else 1
    assert len(rows[0]) >= at_least


@pytest.mark.parametrize("block_size", [(64, 16), (32, 16), (16, 64)])
def test_the_legend_speaks_of_blocks_where_a_character_holds_whole_blocks(block_size: tuple[int, int]) -> None:
    found = set()
    for length, columns in itertools.product((512, 1024, 2048), (32, 64)):
        text = " ".join(flexmasks.draw("causal", length, block_size=block_size).text(columns).split())
        rows, wide = map(int, re.findall(r"a character is (\d+) x (\d+)", text)[0])
        holds_blocks = rows >= block_size[0] and wide >= block_size[1]
        assert ("full block" in text) == holds_blocks
        assert ("visible in part" in text) != holds_blocks
        assert ("partial block" in text) == ((rows, wide) == block_size)
        found.add(holds_blocks)
    assert found == {False, True}


def test_text_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = drawn("causal")
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, str(picture).splitlines())) <= 40
    monkeypatch.setenv("COLUMNS", "500")
    assert max(map(len, str(picture).splitlines())) <= 80
    with pytest.raises(ValueError, match="`columns` must be an int above 0, got -3"):
        picture.text(-3)


def parsed(text: str) -> ET.Element:
    """Return the SVG as XML, and check that it is small and all its numbers are finite."""
    assert len(text.encode()) < 100_000
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert not re.search(r"\b(nan|inf)\b", re.sub("<text.*?</text>|aria-label='[^']*'", "", text))
    return root


def areas(root: ET.Element) -> dict[str, float]:
    """Return the part of the picture that each class of cells covers."""
    group = next(g for g in root.iter(f"{SVG}g"))
    back = group[0]
    total = float(back.attrib["width"]) * float(back.attrib["height"])
    covered = {back.attrib["class"]: 1.0}
    for path in group[1:]:
        rectangles = re.findall(r"M(\d+) (\d+)h([\d.]+)v([\d.]+)h-([\d.]+)z", path.attrib["d"])
        assert "".join(f"M{x} {y}h{w}v{h}h-{w}z" for x, y, w, h, _ in rectangles) == path.attrib["d"]
        area = sum(float(w) * float(h) for _, _, w, h, _ in rectangles) / total
        covered[path.attrib["class"]] = area
        covered[back.attrib["class"]] -= area
    return covered


@pytest.mark.parametrize("name", CASES)
def test_svg_is_xml_and_its_areas_are_right(name: str) -> None:
    picture, dense = drawn(name), dense_of(name)
    visible = float(dense.float().mean())
    root = parsed(picture.svg())
    covered = areas(root)
    assert covered.get("fm-k0", 0.0) <= picture.counts.shares[0] + 1e-3
    assert covered.get("fm-k3", 0.0) <= visible + 1e-3
    if picture._cells.grid(256, 256).cell == (1, 1) and name != "one key":
        assert covered.get("fm-k3", 0.0) == pytest.approx(visible, abs=1e-4)
    words = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert f"{dense.shape[0]:,}" in words
    assert f"{dense.shape[1]:,}" in words
    assert any("queries" in word for word in words)
    if "b" in CASES[name][3]:
        assert any("batch element 1" in word for word in words)
    if "h" in CASES[name][3]:
        assert any("head 2" in word for word in words)


@pytest.mark.parametrize("name", ["bigbird", "bsr", "cross_document", "natten3d", "alibi", "causal"])
@pytest.mark.parametrize("length", [8192, 128])
def test_titles_are_whole_and_fit(name: str, length: int) -> None:
    entry = next(e for e in [*flexmasks.list_masks(), *flexmasks.list_scores()] if e.name == name)
    picture = flexmasks.draw(entry.example(length), length)
    title, width = title_of(parsed(picture.svg()))
    assert "".join(title) == picture._cells.name
    # A bold letter of 13 pixels is 8 pixels wide on average in wide fonts.
    assert max(len(line.rstrip()) * 8 for line in title) <= width - 24


def title_of(root: ET.Element) -> tuple[list[str], float]:
    """Return the lines of a picture's title, with the spaces between them, and the picture's width."""
    lines = [t for t in root.iter(f"{SVG}text") if t.attrib.get("font-weight") == "600"]
    texts = ["".join(t.itertext()) for t in lines]
    return [f"{text} " for text in texts[:-1]] + texts[-1:], float(root.attrib["width"])


def test_a_title_that_is_too_long_has_a_tooltip() -> None:
    many = flexmasks.get_mask("causal")
    for n in range(20):
        many = many & ~flexmasks.get_mask("sliding_window", window=n)
    picture = flexmasks.draw(many, 64)
    root = parsed(picture.svg())
    lines = [t for t in root.iter(f"{SVG}text") if t.attrib.get("font-weight") == "600"]
    assert len(lines) == 3
    assert all(line[0].tag == f"{SVG}title" and line[0].text == repr(many) for line in lines)
    assert (lines[-1][0].tail or "").endswith(" …")
    assert "".join((line[0].tail or "") for line in lines).startswith("causal() & ~sliding_window(window=0)")
    assert repr(many) in root.attrib["aria-label"]


def test_svg_stays_small_whatever_the_mask() -> None:
    noise = torch.rand(256, 256) < 0.5
    parsed(flexmasks.draw(lambda b, h, q, kv: noise[q, kv], 256, block_size=1).svg())
    parsed(flexmasks.draw(lambda b, h, q, kv: noise[q // 32, kv // 32], 8192, block_size=32).svg())
    bias = torch.randn(256, 256)
    parsed(flexmasks.draw(lambda score, b, h, q, kv: score + bias[q, kv], 256).svg())
    named = flexmasks.get_mask(lambda b, h, q, kv, *, text: q >= kv, text="<&'\"> ]]>" * 50)
    parsed(named._repr_html_()[len("<div>") : -len("</div>")])


@pytest.mark.slow
def test_a_million_tokens_take_seconds_and_little_memory_and_no_matplotlib() -> None:
    """Draw in a fresh process in which matplotlib is missing."""
    code = """
import resource, sys, time
sys.modules["matplotlib"] = None
import torch, flexmasks
torch.set_num_threads(1)
length = 1 << 20
ids = torch.arange(length) // 70000
flexmasks.show("causal", 8, columns=8)
start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for mask in (flexmasks.get_mask("causal"), flexmasks.get_mask("sliding_window", window=1000),
             flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)):
    picture = flexmasks.draw(mask, length)
    assert len(picture.svg()) < 100_000 and len(picture.text(64)) < 64 * 80, mask
    print(picture.counts.partial, picture.counts.full)
flexmasks.draw("alibi", length).svg()
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
flexmasks.draw("causal", 8).plot()
"""
    ran = fresh.run(code)
    assert "ImportError: flexmasks: `plot` needs matplotlib; `pip install matplotlib` installs it." in ran.stderr
    assert ran.stdout.startswith("█·······")
    causal, window, documents, cost = ran.stdout.splitlines()[-4:]
    assert causal == f"8192 {8192 * 8191 // 2}"
    # Blocks at distance d have q - kv from 128 d - 127 to 128 d + 127; the window shows 0 to 1000.
    cut = [d for d in range(8192) if 128 * d - 127 <= 1000 and not (128 * d - 127 >= 0 and 128 * d + 127 <= 1000)]
    assert int(window.split()[0]) == sum(8192 - d for d in cut)
    assert int(documents.split()[1]) < 8192 * 8191 // 2
    seconds, kilobytes = map(float, cost.split())
    assert seconds < 60  # a quiet machine takes 5 seconds
    assert kilobytes < 1_000_000  # one BlockMask alone takes 1.07 GB


def test_show_prints_once_and_returns_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert flexmasks.show("causal", 300, columns=20) is None  # type: ignore[func-returns-value]
    picture = flexmasks.draw("causal", 300)
    picture.columns = 20
    assert capsys.readouterr().out == f"{picture!r}\n"
    assert len(repr(picture).splitlines()[0]) <= 20


SHOWN = "import flexmasks\nflexmasks.show('causal', 8)\nx = [flexmasks.show('full', 8)]\n"


def test_the_prompt_shows_a_picture_once() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run([sys.executable, "-iq"], input=SHOWN, env=environment, capture_output=True, encoding="utf-8")
    printed = ran.stdout.replace(">>> ", "").strip()
    assert printed == f"{flexmasks.draw('causal', 8)!r}\n{flexmasks.draw('full', 8)!r}"


def test_ipython_displays_a_picture_once() -> None:
    pytest.importorskip("IPython")
    code = f"""
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
shell = InteractiveShell.instance()
with capture_output() as shown:
    shell.run_cell({SHOWN!r})
print(repr(shown.stdout), [sorted(output.data) for output in shown.outputs])
"""
    ran = fresh.run(code)
    assert ran.stdout == f"'' {[['image/svg+xml', 'text/plain']] * 2}\n", ran.stderr


@pytest.mark.parametrize("length", one_in(3, [256, 1024, 2048]))
def test_every_registered_mask_and_score_shows_itself(length: int) -> None:
    for kind, entries in (
        ("mask", flexmasks.list_masks()),
        ("score", flexmasks.list_scores()),
    ):
        for entry in entries:
            html = example(kind, entry.name, length)._repr_html_()
            assert "no picture" not in html, html
            parsed(html[len("<div>") : -len("</div>")])
    assert {e.name for e in flexmasks.list_masks()} == set(MASKS)


SEQ_LENS = torch.tensor([300, 200])
TABLE = torch.randn(4, 64, 80)
SUGGESTED: dict[str, tuple[Any, tuple[int, int]]] = {
    "nothing known": (flexmasks.get_mask("causal"), (1024, 1024)),
    "four windows": (flexmasks.get_mask("sliding_window", window=100), (512, 512)),
    "a small window": (flexmasks.get_mask("sliding_window", window=2), (64, 64)),
    "a number that is huge": (flexmasks.get_mask("sliding_window", window=1 << 40), (1 << 16, 1 << 16)),
    "ids": (flexmasks.get_mask("document", document_ids=IDS), (1000, 1000)),
    "lengths": (flexmasks.get_mask("grouped_tril", seq_lens=[70, 500]), (500, 500)),
    "combined": (flexmasks.get_mask("document", document_ids=IDS) & ~flexmasks.get_mask("causal"), (1000, 1000)),
    "canvas": (flexmasks.get_mask("sasa", height=20, width=30, window=2), (600, 600)),
    "packed": (flexmasks.packed(flexmasks.get_mask("causal"), [0, 10, 333]), (333, 333)),
    "keys": (flexmasks.get_mask("vision_cross", intervals=[[0, 90], [20, 50]], image_ids=[0] * 70), (90, 70)),
    "both packed": (flexmasks.packed("causal", [0, 5, 12], [0, 3, 20]), (12, 20)),
    "both documents": (
        flexmasks.get_mask("cross_document", q_document_ids=[0] * 4 + [1] * 4, kv_document_ids=[0] * 9 + [1] * 5),
        (8, 14),
    ),
    "left padding": (flexmasks.get_mask("key_padding", attention_mask=[[0, 0, 1, 1, 1]]), (5, 5)),
    "captured ids": (flexmasks.get_mask(lambda b, h, q, kv: IDS[q] == IDS[kv]), (1000, 1000)),
    "captured lengths": (flexmasks.get_mask(lambda b, h, q, kv: kv < SEQ_LENS[b]), (300, 300)),
    "slopes": (flexmasks.get_score("alibi", slopes=[0.5, 0.25, 0.1]), (1024, 1024)),
}


@pytest.mark.parametrize("name", SUGGESTED)
def test_suggested_lengths(name: str) -> None:
    value, want = SUGGESTED[name]
    assert suggested_lengths(value) == want
    assert "no picture" not in value._repr_html_()
    assert f"{want[0]} queries" in flexmasks.draw(value).text()


def test_lengths_of_a_dense_mask() -> None:
    assert "6 queries (down) x 9 keys" in flexmasks.draw("dense", visible=torch.rand(6, 9) > 0.5).text()


def test_the_command_suggests_lengths_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "cross_document", "--q-document-ids", "[0, 0, 1]", "--kv-document-ids", "[0, 0, 1, 1]"]) == 0
    assert "3 queries (down) x 4 keys" in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe() -> None:
    command = [sys.executable, "-m", "flexmasks", "show", "causal"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as shown:
        assert shown.stdout is not None
        assert shown.stderr is not None
        shown.stdout.close()
        assert shown.stderr.read() == b""
        assert shown.wait() == 0


class Broken(flexmasks.Mask):
    def __repr__(self) -> str:
        raise RuntimeError("no name")


def undrawable(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv if q > 3 else q < kv


def test_a_mask_that_cannot_be_drawn_shows_its_repr_and_why() -> None:
    for value, parts in (
        (flexmasks.get_mask(undrawable), ("undrawable", "no picture: ", "torch.where")),
        (flexmasks.get_mask("sliding_window", window=-1), ("sliding_window(window=-1)", "no picture: flexmasks mask ")),
        (flexmasks.get_mask("document", document_ids="<b>"), ("&lt;b&gt;", "no picture: flexmasks mask ")),
        (flexmasks.get_score(lambda score, b, h, q, kv: q > kv), ("no picture: ",)),
        (Broken(flexmasks.get_mask(undrawable)._definition, {}), ("Broken\n", "no picture: ", "torch.where")),
    ):
        html = value._repr_html_()
        assert html.startswith("<pre>")
        assert "<b>" not in html
        assert all(part in html for part in parts), html


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "length 0": (lambda: flexmasks.show("causal", 0), ValueError, "`q_len` must be an int of at least 1, got 0"),
    "where queries start": (
        lambda: flexmasks.show("causal", 3, 5),
        ValueError,
        "flexmasks.show: 3 queries, 5 keys: pass q_offset=2 or 'last'",
    ),
    "a word that says nothing of queries": (
        lambda: flexmasks.show("causal", 3, 5, q_offset="middle"),
        ValueError,
        "`q_offset` must be 'first', 'last', an int, or integers [B], got 'middle'",
    ),
    "keys 0": (lambda: flexmasks.show("causal", 3, 0), ValueError, "`kv_len` must be an int of at least 1, got 0"),
    "length of a score": (lambda: flexmasks.show("alibi", 0), ValueError, "`q_len` must be an int of at least 1"),
    "length 2.5": (lambda: flexmasks.show("causal", 2.5), ValueError, "`q_len` must be an int"),  # type: ignore[arg-type]
    "batch": (
        lambda: flexmasks.show("grouped_tril", 10, seq_lens=[3, 4], b=2),
        ValueError,
        "`b` must be an int from 0 to 1, got 2",
    ),
    "batch 0": (
        lambda: flexmasks.show("causal", 10, batch=0),
        ValueError,
        "`batch` must be an int of at least 1, got 0",
    ),
    "heads 0": (
        lambda: flexmasks.show("causal", 10, heads=0),
        ValueError,
        "`heads` must be an int of at least 1, got 0",
    ),
    "head": (lambda: flexmasks.show("causal", 10, heads=4, h=-1), ValueError, "`h` must be an int from 0 to 3, got -1"),
    "block size": (lambda: flexmasks.show("causal", 10, block_size=0), ValueError, "`block_size` must be"),
    "name": (lambda: flexmasks.show("sliding_windw", 10), ValueError, "did you mean 'sliding_window'"),
    "parameter": (lambda: flexmasks.show("causal", 10, windw=3), TypeError, "no argument is named `windw`"),
    "no mask": (lambda: flexmasks.show(3, 10), TypeError, "`mask` must be a name"),  # type: ignore[arg-type]
    "file": (lambda: flexmasks.draw("causal", 10).save("mask.gif"), ValueError, "'mask.gif'"),
    "folder": (
        lambda: flexmasks.draw("causal", 10).save("no such folder/mask.svg"),
        FileNotFoundError,
        "/no such folder/mask.svg' cannot be written",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str) -> None:
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_scores_are_what_they_add() -> None:
    slopes = [2 ** -(i + 1) for i in range(8)]  # the slopes of the paper for 8 heads
    distance = torch.arange(24)[:, None] - torch.arange(24)
    for h in (0, 3):
        cells = flexmasks.draw("alibi", 24, h=h)._cells
        values, cell = cells.grid(24, 24)
        assert cells.kind == "bias"
        assert cells.element == f"head {h}"
        assert cell == (1, 1)
        assert torch.allclose(values, -slopes[h] * distance)
    cells = flexmasks.draw("checkerboard", 30, 20, q_offset="first")._cells
    values, _ = cells.grid(30, 20)
    assert cells.kind == "change"
    assert torch.equal(values, torch.where((torch.arange(30)[:, None] - torch.arange(20)) % 2 == 0, 1.0, -0.5))
    cells = flexmasks.draw("softcap", 30, cap=5.0)._cells
    scores, changed = cells.curve
    assert cells.kind == "curve"
    assert torch.allclose(changed, 5 * torch.tanh(scores / 5))
    assert float(changed[-1] / scores[-1]) < 0.9
    hidden = flexmasks.draw(lambda score, b, h, q, kv: torch.where(q >= kv, score, -torch.inf), 20)
    assert "not finite" in hidden.text()
    assert "not finite" in hidden.svg()
    assert hidden.text().startswith("·" + "?" * 19)
    packed_score = flexmasks.draw("packed", 24, inner=flexmasks.get_score("alibi"), offsets=[0, 10, 24])
    assert isinstance(packed_score, ScorePicture)
    assert isinstance(flexmasks.draw("packed", 24, inner=flexmasks.get_mask("causal"), offsets=[0, 24]).svg(), str)


def test_weights_are_the_shares_of_queries() -> None:
    weights = torch.rand(2, 3, 7, 10).softmax(-1)
    cells = flexmasks.draw(weights, b=1, h=2)._cells
    assert cells.element == "batch element 1, head 2"
    assert torch.allclose(cells.grid(7, 10).values, weights[1, 2])
    values, cell = cells.grid(4, 3)
    assert cell == (2, 4)
    for row, column in itertools.product(range(4), range(3)):
        part = weights[1, 2, 2 * row : 2 * row + 2, 4 * column : 4 * column + 4]
        assert torch.allclose(values[row, column], part.sum(1).mean())
    assert torch.allclose(values.sum(1), torch.ones(4))
    assert flexmasks.draw(torch.eye(5)).text().splitlines()[:2] == ["@····", "·@···"]
    root = parsed(flexmasks.draw(weights[0]).svg())
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert "of a query's attention, to the keys of a cell" in texts
    assert not any(text and text.startswith(("-", "−")) for text in texts)  # noqa: RUF001
    for wrong in ({"h": 3}, {"b": 2}, {"h": -1}):
        with pytest.raises(ValueError, match="must be an int from 0 to"):
            flexmasks.draw(weights, **wrong)


@pytest.mark.parametrize("length", [1, 2, 3, 23, 64, 333, 8192])
def test_pictures_of_scores_at_any_length(length: int) -> None:
    for score, params in (("alibi", {}), ("checkerboard", {}), ("softcap", {"cap": 30.0})):
        picture = flexmasks.draw(score, length, length + 1, q_offset="last", **params)
        root = parsed(picture.svg())
        if score == "alibi":
            assert "added to each score" in {t.text for t in root.iter(f"{SVG}text")}
            assert sum(areas(root).values()) == pytest.approx(1)
        assert max(map(len, picture.text(30).splitlines())) <= 36


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colors", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
@pytest.mark.parametrize("sign", ["n", "p"])
def test_levels_of_a_score_lie_evenly_between_two_colors(sign: str, colors: dict[str, str]) -> None:
    to_rgb = pytest.importorskip("matplotlib.colors").to_rgb
    levels = torch.tensor([to_rgb(colors[name]) for name in ("k0", *(f"{sign}{n}" for n in range(1, svg.STEPS + 1)))])
    even = levels[0] + (levels[-1] - levels[0]) * torch.linspace(0, 1, len(levels))[:, None]
    assert (levels - even).abs().max() <= 0.5001 / 255


@pytest.mark.parametrize("colors", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_contrast(colors: dict[str, str]) -> None:
    """WCAG asks for 4.5 for text and 3 between graphics.

    Readers who see no hues distinguish cells by lightness.
    """

    def contrast(a: str, b: str) -> float:
        low, high = sorted((luminance(colors[a]), luminance(colors[b])))
        return (high + 0.05) / (low + 0.05)

    assert contrast("text", "card") > 7
    assert min(contrast("muted", "card"), contrast("muted", "k0"), contrast("text", "k0")) > 4.5
    assert min(contrast("k2", "k0"), contrast("k3", "k2"), contrast("k3", "k1")) > 3
    assert contrast("k1", "k0") > 1.2
    assert contrast("line", "card") > 3
    assert min(contrast("n8", "k0"), contrast("p8", "k0")) > 4.5
    ramp = [luminance(colors[name]) for name in ("k0", "n2", "n4", "n6", "n8")]
    assert ramp == sorted(ramp) or ramp == sorted(ramp, reverse=True)


def test_saved(tmp_path: Path) -> None:
    picture = flexmasks.draw("causal", 1000)
    parsed(picture.save(tmp_path / "mask.svg").read_text())
    assert "<svg" in picture.save(str(tmp_path / "mask.html")).read_text()
    assert picture.save(tmp_path / "mask.txt").read_text(encoding="utf-8").splitlines()[0][0] == "▒"


@pytest.mark.slow
def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().subplots(1, 3)
    for ax, picture in zip(
        axes,
        (flexmasks.draw("causal", 999), flexmasks.draw("alibi", 64), flexmasks.draw("softcap", 64, cap=30.0)),
        strict=True,
    ):
        assert picture.plot(ax) is ax
        assert picture.save(tmp_path / "mask.png").read_bytes()[:4] == b"\x89PNG"
        assert picture.save(tmp_path / "mask.pdf").read_bytes()[:4] == b"%PDF"
    assert axes[0].get_xlim() == (0, 999)
    bigbird = flexmasks.draw("bigbird", 256, length=256, block=8, random_blocks=2, seed=11, both_ends=False)
    title = bigbird.plot().get_title()
    assert title.replace("\n", " ") == bigbird._cells.name  # type: ignore[attr-defined]
    assert max(map(len, title.split("\n"))) <= 44
    assert axes[0].get_ylim() == (999, 0)


def _documents(ids: Tensor) -> Any:
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


def _biased(bias: Tensor) -> Any:
    return lambda score, b, h, q, kv: score + bias[h, kv]


@pytest.mark.gpu
def test_pictures_of_tensors_on_a_gpu() -> None:
    ids = (torch.arange(5000) // 700).cuda()
    offsets = torch.tensor([0, 100], device="cuda")
    bias = torch.randn(3, 64, device="cuda")
    for make in (
        lambda put: flexmasks.draw("document", 5000, document_ids=put(ids)),
        lambda put: flexmasks.draw(_documents(put(ids)), 5000),
        lambda put: flexmasks.draw("causal", 300, 400, q_offset=put(offsets), b=1),
        lambda put: flexmasks.draw(_biased(put(bias)), 64, h=2),
    ):
        on_gpu, on_cpu = make(lambda t: t), make(lambda t: t.cpu())
        assert on_gpu.svg() == on_cpu.svg()
        assert on_gpu.text(60) == on_cpu.text(60)
    assert "no picture" not in flexmasks.get_mask("document", document_ids=ids)._repr_html_()


def test_titles_with_characters_that_xml_does_not_know() -> None:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    mask.__name__ = "bell\a & \x00 \ud800 \ufffe é 😀"
    drawn = flexmasks.draw(mask, 8).svg()
    titles = [text.text for text in ET.fromstring(drawn).iter() if text.tag.endswith("text")]
    assert any("bell\N{REPLACEMENT CHARACTER} & " in str(title) and "é 😀" in str(title) for title in titles)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.html"
    output.write(file, "old")
    monkeypatch.setattr(Path, "replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        output.write(file, "new")
    assert [f.name for f in tmp_path.iterdir()] == ["x.html"]
    assert file.read_text() == "old"
