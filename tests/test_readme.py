"""The README tells the truth: its table, its calls, its picture, its commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flexmasks
from flexmasks.__main__ import main, tables
from flexmasks.bench import attention as bench_attention
from flexmasks.bench import blocks as bench
from flexmasks.bench import softmax as bench_softmax

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def measurements() -> str:
    results = [json.loads((ROOT / f"recipes/results/blocks_{device}.json").read_text()) for device in ("gpu", "cpu")]
    return bench.markdown(*results)


def undecided_measurements() -> str:
    return bench.undecided_markdown(json.loads((ROOT / "recipes/results/undecided.json").read_text()))


def softmax_measurements() -> str:
    return bench_softmax.markdown(json.loads((ROOT / "recipes/results/softmax_gpu.json").read_text()))


def attention_measurements() -> str:
    return bench_attention.markdown(json.loads((ROOT / "recipes/results/attention_gpu.json").read_text()))


def registry_measurements() -> str:
    return bench_attention.registry_markdown(json.loads((ROOT / "recipes/results/registry_gpu.json").read_text()))


def pictures() -> dict[str, flexmasks.Picture]:
    """The README's pictures, by their files."""
    ids = (torch.arange(1024)[:, None] >= torch.tensor([90, 250, 400, 640, 760])).sum(-1)
    packed = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
    return {
        "notebooks/pictures/documents.svg": flexmasks.draw(packed, 1024, block_size=64),
        "notebooks/pictures/natten.svg": flexmasks.draw("natten", 1024, height=32, width=32, kernel=7, block_size=64),
    }


def test_the_pictures_are_those_of_draw() -> None:
    """`python tests/test_readme.py` writes them anew."""
    for file, picture in pictures().items():
        assert f"({file})" in README
        assert (ROOT / file).read_text() == picture.svg()


def test_the_tables_are_those_of_the_registry() -> None:
    """`python tests/test_readme.py` writes them anew."""
    # in a process of its own: other tests may have registered masks
    printed = subprocess.run(
        [sys.executable, "-m", "flexmasks", "list", "--markdown"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert printed.strip() in README


def test_the_measurements_are_those_of_the_results() -> None:
    """`python tests/test_readme.py` writes them anew."""
    assert measurements() in README
    assert undecided_measurements() in README
    assert softmax_measurements() in README
    assert attention_measurements() in README
    assert registry_measurements() in README


def test_the_calls_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    world: dict[str, object] = {}
    for block in blocks:
        exec(block, world)
    assert isinstance(world["out"], torch.Tensor)
    assert world["out"].shape == (2, 8, 1000, 64)


def test_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    picture = re.search(r"```text\n>>> (.*?)\n(.*?)```", README, re.DOTALL)
    assert picture is not None
    exec(picture[1], {"flexmasks": flexmasks})
    assert capsys.readouterr().out == picture[2]


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    for entry in [*flexmasks.list_masks(), *flexmasks.list_scores()]:
        assert entry.name in listed
        assert main(["show", entry.name, "--length", "256"]) == 0
        assert entry.summary in capsys.readouterr().out
    assert main(["show", "sliding_window", "--length", "16", "--window", "2"]) == 0
    assert "·███····" in capsys.readouterr().out
    assert main(["show", "grouped_tril", "--length", "300", "--seq-lens", "[300, 100]", "-b", "1"]) == 0
    assert main(["show", "sliding_windw"]) == 2
    assert "did you mean 'sliding_window'" in capsys.readouterr().err
    assert main(["show", "sliding_window", "--windw", "3"]) == 2
    assert "no parameter `windw`" in capsys.readouterr().err


def test_the_demo_runs_under_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    import time

    start = time.perf_counter()
    assert main(["demo"]) == 0
    assert time.perf_counter() - start < 60
    printed = capsys.readouterr().out
    worst = float(re.search(r"materialised mask, .*: (\S+)", printed)[1])  # type: ignore[index]
    assert worst < (1e-5 if "float32" in printed else 3e-2)
    assert "SDPA + materialised mask" in printed
    assert "skipped:" in printed


def _between(text: str, start: str, end: str, generated: str) -> str:
    before, rest = text.split(start)
    return f"{before}{start}\n{generated}\n\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    for file, picture in pictures().items():
        (ROOT / file).parent.mkdir(exist_ok=True)
        (ROOT / file).write_text(picture.svg())
    listed = "<!-- generated by `python -m flexmasks list --markdown` -->\n", "<!-- end -->"
    measured = "-m flexmasks bench blocks --json FILE` writes -->\n", "<!-- end of the measurements -->"
    text = _between(README, *listed, tables(markdown=True))
    text = _between(text, *measured, measurements())
    looked_at = "-m flexmasks bench blocks --all --json FILE` writes -->\n", "<!-- end of what is looked at -->"
    text = _between(text, *looked_at, undecided_measurements())
    of_softmax = "-m flexmasks bench softmax --json FILE` writes -->\n", "<!-- end of the softmax -->"
    of_attention = "-m flexmasks bench attention --json FILE` writes -->\n", "<!-- end of attention -->"
    text = _between(text, *of_attention, attention_measurements())
    of_registry = "-m flexmasks bench attention --all --json FILE` writes -->\n", "<!-- end of the registry -->"
    text = _between(text, *of_registry, registry_measurements())
    (ROOT / "README.md").write_text(_between(text, *of_softmax, softmax_measurements()))
