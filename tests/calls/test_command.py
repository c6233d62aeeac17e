"""The command line: what it prints fits the terminal, and each mistake takes one line on stderr."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flexmasks
from flexmasks.__main__ import main
from flexmasks.backends import fa4_package
from flexmasks.backends.table import is_not_here
from flexmasks.bench import compare

pytestmark = pytest.mark.usefixtures("one_thread")
ENTRIES = [*flexmasks.list_masks(), *flexmasks.list_scores()]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command prints, which must succeed."""
    assert main(list(words)) == 0
    return capsys.readouterr().out


def as_words(text: str) -> str:
    return " ".join(text.split())


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys)
    assert shown.startswith("usage: python -m flexmasks")
    assert all(f"\n    {name} " in shown for name in ("demo", "list", "show", "bench"))


def test_show_asks_where_queries_start(capsys: pytest.CaptureFixture[str]) -> None:
    words = "show", "causal", "--length", "2", "--kv-length", "4"
    assert main([*words]) == 2
    assert "2 queries, 4 keys: pass q_offset=2 or 'last'" in capsys.readouterr().err
    assert "\n███·\n████\n" in printed(capsys, *words, "--q-offset", "last")
    assert "\n██··\n███·\n" in printed(capsys, *words, "--q-offset", "1")


@pytest.mark.parametrize("columns", [45, 61, 80, 200])
def test_the_list_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    listed = printed(capsys, "list")
    assert max(map(len, listed.rstrip().splitlines()[:-1])) <= min(columns, 80)
    rows = [re.split(" {2,}", line) for line in listed.splitlines()]
    assert {row[0] for row in rows} >= {entry.name for entry in ENTRIES}
    meanings = as_words(" ".join(row[-1] for row in rows))
    assert all(entry.summary in meanings for entry in ENTRIES)
    assert all(entry.source not in listed for entry in ENTRIES if entry.source)


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_the_long_list_has_all_columns(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    listed = printed(capsys, "list", "--long")
    assert max(map(len, listed.splitlines())) <= columns
    for header in ("mask", "score", "meaning", "source", "in other libraries"):
        assert header in listed
    for text in ("Vaswani", "Press", "causal()", "FlashMask"):
        assert text in listed


def test_what_a_pipe_gets_does_not_depend_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    piped = [printed(capsys, *words) for words in (["list"], ["list", "--long"], ["show", "bsr"])]
    monkeypatch.setenv("COLUMNS", "80")
    assert piped[::2] == [printed(capsys, *words) for words in (["list"], ["show", "bsr"])]
    monkeypatch.setenv("COLUMNS", "160")
    assert piped[1] == printed(capsys, "list", "--long")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [50, 80, 200])
def test_show_breaks_lines_at_words_and_cuts_lists(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for entry in ENTRIES:
        shown = printed(capsys, "show", entry.name, "--length", "256")
        text = shown.partition("\nhere ")[0]
        long = [line for line in shown.splitlines() if len(line) > min(columns, 80)]
        assert all(" " not in line.strip() for line in long), long  # a word that is wider than the terminal
        for kind in ("mask", "score"):
            if entry.name in flexmasks.spec.definitions.names(kind) and text.startswith(kind):
                doc = flexmasks.spec.definitions.definition(kind, entry.name).doc
                assert as_words(doc) in as_words(text)
    here = as_words(printed(capsys, "show", "bsr").partition("\nhere ")[2].partition("\n\n")[0])
    assert here == (
        "bsr(crow_indices=[0, 1, 3, 6, 9, 12, 15, 18, ... 17 values], "
        "col_indices=[0, 0, 1, 0, 1, 2, 0, 1, ... 45 values], block=256)"
    )


CALLS: dict[str, dict[str, Any]] = {
    "native": {"mask": "causal"},
    "compiled": {"mask": "grouped_tril", "seq_lens": torch.tensor([300, 200])},
    "a score": {"mask": "sliding_window", "window": 40, "score": "alibi"},
    "not understood": {"mask": lambda b, h, q, kv: torch.sin(q * 1.0) > torch.erf(kv * 1.0)},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("columns", [40, 80, 300])
def test_explain_breaks_lines_at_words(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    q, k, v = torch.randn(3, 2, 4, 300, 64)
    explanation = flexmasks.explain(q, k, v, **CALLS[name])
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= min(columns, 80)
    assert as_words(text).startswith(f"backend: {explanation.backend} compiles: {explanation.compiles}")
    for part in (*explanation.others.values(), explanation.compiles, explanation.plan, explanation.recompiles_on):
        assert as_words(part) in as_words(text)
        assert part == "" or part in explanation._repr_html_().replace("&#39;", "'")


def test_explain_says_in_one_line_what_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    q, k, v = torch.randn(3, 2, 4, 300, 64)
    explanation = flexmasks.explain(q, k, v, mask="causal")
    assert explanation.not_here == ("fa4", "flex_flash", "cudnn")
    lines = str(explanation).splitlines()
    assert lines.count("  not here: fa4, flex_flash, cudnn (it runs on CUDA only)") == 1
    others = {line.split(":")[0].removeprefix("  not ") for line in lines if line.startswith("  not ")}
    assert others == {"here", "decode", "flex", "short", "reference"}
    missing = replace(explanation, others={**explanation.others, "fa4": "it is not installed"})
    assert "not here: fa4 (it is not installed); flex_flash, cudnn (it runs on CUDA only)" in str(missing)
    assert missing._repr_html_().count("not here") == 1
    assert is_not_here(fa4_package.why_unusable() or "it does not run on hpu")
    assert not any(map(is_not_here, ("it gives no lse", "it does not run inside transforms of torch.func")))


HELP = {
    "": ["demo", "list", "show", "bench", "COMMAND --help"],
    "demo": ["Compute attention on this machine"],
    "list": ["List the names and meanings", "--long", "--import"],
    "show": ["show NAME [options] [--PARAMETER VALUE ...]", "--save FILE", "--seq-lens [300,100]"],
    "bench": ["Time a call of yours", "--mask NAME", "--shape B,H,S,D", "--kv-heads N", "--dtype", "--window 1024"],
}


@pytest.mark.parametrize("command", HELP)
def test_help(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([*command.split(), "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert all(part in text for part in HELP[command]), text
    assert max(map(len, text.splitlines())) <= 80


BAD: dict[str, tuple[list[str], str]] = {
    "no folder": (
        ["show", "causal", "--save", "/no/such/x.svg"],
        "'/no/such/x.svg' cannot be written, '/no/such' is no folder",
    ),
    "a folder": (["show", "causal", "--save", "FOLDER.svg"], "FOLDER.svg: Is a directory"),
    "suffix": (["show", "causal", "--save", "x.gif"], "saved as .svg, .html, .txt, .pdf or .png, got 'x.gif'"),
    "bench": (["bench", "--mask", "causl", "--shape", "1,2,64,16"], "no mask is named 'causl'; did you mean 'causal'"),
    "bench parameter": (
        ["bench", "--mask", "sliding_window", "--shape", "1,2,64,16", "--windw", "3"],
        "no parameter `windw`; the parameters here are `window`",
    ),
    "parameter without value": (["show", "sliding_window", "--window"], "given as --name value, got '--window'"),
    "negative element": (["show", "causal", "-b", "-1"], "`b` must be an int from 0, got -1"),
    "too long": (["show", "causal", "--length", "99999999999"], "`q_len` must be at most"),
    "too short for the example": (["show", "multi_item", "--length", "7"], "'multi_item' fails for length 7 (ZeroDiv"),
    "ragged": (["show", "document", "--document-ids", "[[0, 1], [0]]"], "`document_ids` must be int[S] | int[B, S]"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_take_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "FOLDER.svg").mkdir()
    words, message = BAD[name]
    words = [str(tmp_path / word) if word == "FOLDER.svg" else word for word in words]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert "blocks of 128" not in out  # nothing was drawn before


@pytest.mark.parametrize(
    "wrong", [["--length", "0"], ["--length", "abc"], ["--kv-length", "-3"], ["--block-size", "0"]]
)
def test_numbers_that_must_be_positive(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["show", "causal", *wrong])
    assert left.value.code == 2
    assert f"must be a whole number of at least 1, got {wrong[1]}" in capsys.readouterr().err


@pytest.mark.parametrize(("here", "asked", "taken"), [
    (None, "cuda", None), ("xpu", "mps", None), ("xpu", "xpu", "xpu"), ("mps", None, "mps"), ("cuda", "cpu", "cpu"),
    (None, None, "cpu"),
])  # fmt: skip
def test_the_device_of_bench(
    here: str | None,
    asked: str | None,
    taken: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = None if here is None else torch.device(here)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    made: list[str] = []
    monkeypatch.setattr(torch, "randn", lambda *_, device, dtype: made.append(device))
    monkeypatch.setattr("flexmasks.bench.compare.compare", lambda *_: "")
    arguments = ["bench", "--mask", "causal", "--shape", "1,2,64,16", *(["--device", asked] if asked else [])]
    if taken is None:
        with pytest.raises(SystemExit):
            main(arguments)
        assert f"--device {asked}: torch finds no such GPU on this machine" in capsys.readouterr().err
    else:
        main(arguments)
        assert made == [taken] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--shape", "2,64,16"], "must be four numbers B,H,S,D, got 2,64,16"),
        (["--shape", "1,2,0,16"], "must be a whole number of at least 1, got 0"),
        (["--shape", "1,3,64,16", "--kv-heads", "2"], "--kv-heads must divide the 3 query heads, got 2"),
        (["--shape", "1,2,64,16", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_call_that_cannot_be_timed(wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "--mask", "causal", *wrong])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("score", [[], ["--score", "softcap", "--cap", "5.0"]], ids=["", "softcap"])
def test_a_call_is_timed(score: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RUNS", 2)
    words = ["--shape", "1,4,200,16", "--kv-heads", "2", "--device", "cpu", "--window", "30", *score]
    shown = printed(capsys, "bench", "--mask", "sliding_window", *words)
    rows = dict(re.split(" {2,}", line, maxsplit=1) for line in shown.splitlines()[3:6] if "  " in line)
    ways = ["flexmasks, backend 'flex'", "flex_attention, compiled", *([] if score else ["SDPA, mask as a tensor"])]
    assert list(rows) == ways
    for figures in rows.values():
        assert all(float(figure) > 0 for figure in figures.split())
    assert ("SDPA, mask as a tensor, is left out: it takes no score modification." in shown) == bool(score)
    assert max(map(len, shown.splitlines())) <= 80


def test_the_backend_of_gradients_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Intel's and Apple's GPUs flex_attention has no gradients, and another backend runs them."""
    monkeypatch.setattr(compare, "_pass", lambda *_, **__: None)
    q, k, v = torch.zeros(3, 1, 2, 2048, 16)
    mask = flexmasks.get_mask("sliding_window", window=8)
    assert "gradients" not in compare.compare(mask, None, q, k, v)
    monkeypatch.setattr(compare, "_passes", lambda q: (False, True))
    shown = compare.compare(mask, None, q, k, v).splitlines()
    assert shown[3].startswith("flexmasks, backend 'flex' ")
    assert shown[-1] == "flexmasks with gradients: backend 'reference'"


@pytest.mark.parametrize("kind", ["png", "pdf"])
def test_pictures_without_matplotlib(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else found(name, *a))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["show", "causal", "--length", "256", "--save", str(tmp_path / f"x.{kind}")]) == 2
    out, err = capsys.readouterr()
    assert "pip install matplotlib" in err
    assert err.count("\n") == 1
    assert out == ""
    with pytest.raises(ImportError, match="pip install matplotlib"):
        flexmasks.draw("causal", 256).save(tmp_path / f"x.{kind}")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_file_is_replaced_only_when_the_picture_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.svg"
    file.write_text("kept")
    assert main(["show", "sliding_window", "--windw", "3", "--save", str(file)]) == 2
    assert file.read_text() == "kept"
    assert main(["show", "sliding_window", "--window", "3", "--save", str(file)]) == 0
    assert file.read_text().startswith("<svg")
    capsys.readouterr()


def test_the_width_of_a_text_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    flexmasks.show("causal", 4096)
    assert max(map(len, sys.stdout.getvalue().splitlines())) <= 80  # type: ignore[attr-defined]


def test_parameters_that_begin_like_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "block_causal", "--length", "32", "--block", "8"]) == 0
    assert "block_causal(block=8)" in capsys.readouterr().out


# --- check ---

MASKS = """
import torch
import flexmasks

ids = [0] * 10 + [1] * 6
table = torch.arange(16)

def causal(b, h, q, kv):
    return q >= kv

def next_token(b, h, q, kv):
    return table[q + 1] >= kv

def window(b, h, q, kv, *, window):
    return (q >= kv) & (q - kv < window)

class Model:
    mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
"""


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("mine:causal --length 16", 0, "nothing found"),
        ("mine:next_token --length 16", 1, "error: reads behind the end: 1 of 16 rows read past the end of the global"),
        ("mine:causal --length 16 --document-ids mine:ids", 1, "error: crosses a document: 6 of 16 rows see keys"),
        ("mine:Model.mask --length 16 --document-ids mine:ids", 0, "nothing found"),
        ("mine:causal --length 2 --document-ids [0,1]", 1, "as at (b, h, q, kv) = (0, 0, 1, 0)"),
        ("mine:window --length 16 --window 4 --heads 2", 0, "note: recompiles: `window` = 4"),
        ("mine:causal --length 4 --kv-length 8 --q-offset last --forbid sees-the-future", 0, "nothing found"),
        ("full --length 8 --forbid sees-the-future --forbid recompiles", 1, "error: sees the future: 7 of 8 rows"),
        ("sliding_window --length 64", 0, "nothing found"),
        ("mine:causal --length all --forbid sees-the-future", 0, "nothing found"),
        ("prefix_lm --length all --prefix-len 3 --forbid sees-the-future", 1, "error: sees the future: "),
        ("mine:causal --length 4 --kv-length 8", 2, "pass q_offset=4 or 'last'"),
        ("mine.py:causal --length 16", 0, "nothing found"),
        ("mine:causal", 2, "pass --length N"),
        ("causal", 2, "pass --length N"),
        ("mine:no --length 4", 2, "flexmasks: mine:no: module 'mine' has no attribute 'no'."),
        ("nowhere:no --length 4", 2, "No module named 'nowhere'"),
        ("causel --length 4", 2, "did you mean 'causal'?"),
        ("causal --length 4 --forbid nothing", 2, "names no kind of finding 'nothing'"),
    ],
)
def test_check(
    words: str,
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.py").write_text(MASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert main(["check", *words.split()]) == status
    out, error = capsys.readouterr()
    assert said in (error if status == 2 else out)
    assert not (out if status == 2 else error)
