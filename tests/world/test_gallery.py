"""The gallery: every mask and score, its code and its page."""

from __future__ import annotations

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

import benchmark
import flexmasks
import gallery
from flexmasks.__main__ import import_modules, main
from gallery import USES, code

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


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "masks_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "masks_of_mine", raising=False)
    return "masks_of_mine"


def test_each_mask_of_the_library_has_a_use() -> None:
    by_use = [name for names in USES.values() for name in names]
    assert len(set(by_use)) == len(by_use)
    assert {("mask", name) for name in by_use} == {entry for entry in ENTRIES if entry[0] == "mask"}


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_the_code_runs_as_it_stands(kind: str, name: str, float64: None) -> None:
    assert run(code(kind, name)).dtype == torch.float64


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
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], float64: None
) -> None:
    import_modules([own])
    pages = {
        name: gallery.page(entry)
        for name in ("every_other", "without_example", "broken")
        for entry in flexmasks.list_masks()
        if entry.name == name
    }
    assert "before a query & its own \\<i\\>." in pages["every_other"]
    assert pages["every_other"].count("<svg") == 3
    assert "No example: ValueError: register 'without\\_example' with example=" in pages["without_example"]
    assert "No example: ZeroDivisionError" in pages["broken"]
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
def test_a_page_says_all_there_is_about_a_mask(name: str) -> None:
    (entry,) = (entry for entry in flexmasks.list_masks() if entry.name == name)
    text = gallery.page(entry)
    picture = text.partition("<svg")[2].partition("</svg>")[0]
    length = int(re.search(r"torch.randn\(3, 1, \d+, (\d+), 64\)", text)[1])  # type: ignore[index]
    assert f"{length} queries x {length} keys" in picture
    assert text.count("<svg") == 3
    for parameter in entry.signature.partition("(")[2].split(", "):
        assert re.search(rf"^\| `[\w, ]*{parameter.partition('=')[0].strip(')')}\b", text, re.MULTILINE)
    sparsity = flexmasks.get_mask(name, **flexmasks.spec.definitions.definition("mask", name).example(8192)).blocks(
        8192
    )
    assert f"| 8,192 | {sparsity.sparsity:.1%} |" in text
    assert "## Measured" in text
    assert f"def {name}(" in text


def test_a_page_of_a_score_has_its_figures() -> None:
    (entry,) = (entry for entry in flexmasks.list_scores() if entry.name == "softcap")
    text = gallery.page(entry)
    assert "## Measured" in text
    assert "## Blocks" not in text
    assert text.count("<svg") == 1  # the curve is the same at any length
