"""Every recipe runs on a CPU and passes its own checks."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import fresh
import numpy as np
import pytest
import torch
from helpers import in_campaigns, one_in
from tabulate import tabulate

FOLDER = Path(__file__).parent.parent.parent / "recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("[!_]*.py") if path.name != "benchmark.py")
# Recipes that compile few kernels. One runs each day; the others run in the campaigns, `.ci/campaigns`.
QUICK = {
    "biases_that_learn.py", "comfyui_attention.py", "consistency_jvp.py", "flash_attention_explained.py",
    "flash_attention_triton.py",
    "grouped_tril_softmax.py", "long_softmax_triton.py", "same_bits.py", "scaled_masked_softmax.py",
    "sequence_on_paper.py",
    "sequence_over_processes.py", "serving.py", "sliding_window.py", "softmax_in_training.py",
    "weights_of_a_model.py",
    "trees_in_areal.py", "trees_in_trl.py", "trees_in_verl.py",
}  # fmt: skip
# Packages that a recipe needs and this library does not.
NEEDS = {
    "accelerate_training.py": ("accelerate",),
    "hugging_face_packing.py": ("transformers", "accelerate"),
    "lightning_training.py": ("lightning",),
    "same_bits.py": ("transformers",),
    "torchtitan_attention.py": ("torchtitan",),
    "weights_of_a_model.py": ("transformers",),
    "trees_in_areal.py": ("transformers",),
    "trees_in_trl.py": ("transformers",),
    "trees_in_verl.py": ("transformers",),
}
_NEEDED = [(name, package) for name in NEEDS for package in NEEDS[name]]
SECONDS = 60  # limit of processor time, which other work on the machine does not change; compilation takes up to 20


@pytest.mark.parametrize("name", [*one_in(len(QUICK), sorted(QUICK)), *map(in_campaigns, sorted(set(RECIPES) - QUICK))])
def test_it_runs(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    is_old = importlib.metadata.version("triton") < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
    if is_old and name in ("flash_attention_triton.py", "long_softmax_triton.py"):
        pytest.skip("Triton 3.6's interpreter cannot loop to a number of the call with NumPy 2.4")
    file = tmp_path / "figures.json"
    seconds_before = _processor_seconds()
    ran = subprocess.run(
        [sys.executable, FOLDER / name, "--json", file],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert "check: " in ran.stdout
    rows = json.loads(file.read_text())["rows"]
    assert rows
    for row in rows:
        figures = [value for value in row.values() if isinstance(value, int | float)]
        assert figures
        assert all(math.isfinite(f) and f >= 0 for f in figures), row
    assert _processor_seconds() - seconds_before < SECONDS


@pytest.mark.parametrize(("name", "package"), one_in(len(_NEEDED), _NEEDED))
def test_without_a_package_it_says_what_to_install(name: str, package: str) -> None:
    code = f"""
import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
sys.modules[{package!r}] = None
try:
    runpy.run_path({str(FOLDER / name)!r})
except SystemExit as end:
    sys.exit(print(end.code, file=sys.stderr) or 1)
"""
    ran = fresh.run(code)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert package in ran.stderr
    assert re.search(r"pip install -e '\.\[(huggingface|doors)\]'", ran.stderr)


@pytest.mark.parametrize("name", RECIPES)
def test_it_has_the_parts_of_a_recipe(name: str) -> None:
    text = (FOLDER / name).read_text()
    tree = ast.parse(text)
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    assert f"| [{name}]({name}) | {summary} |" in (FOLDER / "README.md").read_text()
    assert text.count("\n# %%") >= 2
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)


def _systems() -> list[list[str]]:
    """Return the cells of the table of systems in recipes/README.md."""
    table = (FOLDER / "README.md").read_text().split("| system | recipe | notebook | test | figures |\n")[1]
    lines = itertools.takewhile(lambda line: line.startswith("|"), table.splitlines()[1:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _links(cell: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", cell)


@pytest.mark.parametrize("row", _systems(), ids=lambda row: row[0])
def test_a_system_has_what_its_row_names(row: list[str]) -> None:
    """`test_it_runs` runs each of these recipes, and test_notebooks.py each notebook."""
    system, recipes, notebooks, test, figures = row
    assert set(_links(recipes)) <= set(RECIPES)
    assert all((FOLDER / notebook).is_file() for notebook in _links(notebooks))
    assert _links(recipes) or _links(notebooks), f"{system} is nowhere"
    for cell in (recipes, notebooks):
        assert _links(cell) or cell == "none"

    (file,), (name,) = _links(test), re.findall(r"`(\w+)`", test)
    functions = [x.name for x in ast.parse((FOLDER / file).read_text()).body if isinstance(x, ast.FunctionDef)]
    assert name in functions

    (page, _, section), *others = (link.partition("#") for link in _links(figures))
    assert not others
    text = (FOLDER / page).read_text()
    if section and page == "results/README.md":
        (recipe, *_) = _links(recipes)
        assert section == recipe.replace(".", "")
        times = text.split(f"## [{recipe}](../{recipe})")[1].split("\n## ")[0]
        assert " ms" in times, "nothing was measured"
    else:
        assert "ms" in text


def test_every_recipe_is_of_a_system_or_the_librarys_own() -> None:
    named = {recipe for row in _systems() for recipe in _links(row[1])}
    others = {
        *NEEDS, "biases_that_learn.py", "comfyui_attention.py", "consistency_jvp.py", "packed_language_model.py",
        "sequence_on_paper.py",
        "sequence_over_processes.py", "serving.py", "shared_prefixes.py", "vllm_backend.py",
    }  # fmt: skip
    assert named | others == set(RECIPES)
    assert not named & others


def stored() -> dict[str, dict[str, Any]]:
    """Return the results that recipes wrote with `--json recipes/results/NAME.json`, by recipe."""
    files = {name: (FOLDER / "results" / name).with_suffix(".json") for name in RECIPES}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def measurements() -> str:
    """Return the page of the tables."""
    results = stored()
    machines = {tuple(run["machine"].items()) for run in results.values()}
    assert len(machines) == 1, "run all of them on one machine"
    machine = dict(machines.pop())
    parts = [
        "# What the recipes measured",
        f"On one {machine['device']}, torch {machine['torch']}. `python recipes/NAME.py` prints such a table below its "
        "checks. With `--json recipes/results/NAME.json` it writes the figures, and "
        "`python tests/world/test_recipes.py` writes this page from them.",
        "The benchmarks of the library have pages of their own: [attention](attention.md), [every mask and "
        "score](registry.md), [block masks](blocks.md), [steps with new tensors](steps.md), [packed "
        "documents](documents.md), [the choice of a backend](choice.md), [masks as data](data.md), [a serving "
        "loop](serve.md), [Hugging Face models](models.md), [sequences over several GPUs](ranks.md), [biases that "
        "learn](biases.md), [masks as tensors](sdpa.md), [keys that an indexer chose](topk.md), [dropout](dropout.md), "
        "[training on trees](trees.md), [rollouts](rollouts.md), "
        "[models of diffusers](diffusers.md), [sinks, head sizes, small and first calls, soft-caps, "
        "neighborhoods](limits.md), [the masked softmax](softmax.md), [the same bits](invariant.md), [forward "
        "mode](tangents.md), [interval masks of cuDNN](cudnn.md), [other GPUs](gpus.md), [masks of "
        "other projects](wild.md). The tests ran with [these versions](versions.md), "
        "and found [these planted "
        "faults](planted.md).",
    ]
    for name in RECIPES:
        summary = (ast.get_docstring(ast.parse((FOLDER / name).read_text())) or "").partition("\n")[0]
        table = "Computed, not measured." if name == "sequence_on_paper.py" else "Not measured yet."
        if name in results:
            table = tabulate(results[name]["rows"], headers="keys", floatfmt=".4g", missingval="", tablefmt="github")
        parts += [f"## [{name}](../{name})", summary, table]
    return "\n\n".join(parts) + "\n"


def test_the_measurements_are_those_of_a_gpu() -> None:
    """`python tests/world/test_recipes.py` rewrites the page."""
    assert (FOLDER / "results/README.md").read_text() == measurements()
    assert all(run["machine"]["device_type"] == "cuda" for run in stored().values())


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    check = importlib.import_module("_measure").check
    x = torch.ones(3)
    check("right", x, x)
    assert "check: right: largest error 0.0e+00" in capsys.readouterr().out
    with pytest.raises(AssertionError, match=r"wrong: the error 5\.0e-01 is above"):
        check("wrong", x, x + 1)


def _processor_seconds() -> float:
    """Return the processor time of all finished subprocesses."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    (FOLDER / "results/README.md").write_text(measurements())
