"""Every notebook runs in a fresh kernel and gives its stored outputs.

`python tests/world/test_notebooks.py [NAME ...]` runs notebooks and stores their outputs. The outputs of cells with the
tag "varies" differ from run to run, as times do, and are not compared.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flexmasks

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))
VARIES = "varies"
TORCH = torch.__version__.partition("+")[0]
_SHOWN = ("text/plain", "text/html", "image/svg+xml")


def executed(path: Path) -> Any:
    """Return the notebook with the outputs of a fresh kernel, on a CPU."""
    notebook = nbformat.read(path, as_version=4)
    environment = {"COLUMNS": "80", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ |= environment
    try:
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of the run
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "torch": TORCH,
    }
    return notebook


def shown(cell: Any) -> str:
    """Return what a cell shows, without memory addresses."""
    text = ""
    for output in cell.get("outputs", []):
        if output["output_type"] == "stream":  # a stream arrives in pieces
            text += output["text"] if output["name"] == "stdout" else ""
        else:
            data = output.get("data", {})
            text += "\n".join(f"{kind}:\n{data[kind]}" for kind in _SHOWN if kind in data)
    return re.sub(r"0x[0-9a-f]{6,}", "0x", text)


@pytest.mark.campaign  # a notebook takes half a minute
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_outputs_are_what_comes_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "hugging_face" in path.stem:
        pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests run at the same time
    stored = nbformat.read(path, as_version=4)
    rerun = executed(path)
    for number, (old, new) in enumerate(zip(stored.cells, rerun.cells, strict=True)):
        if new.cell_type != "code":
            continue
        errors = [o for o in new.outputs if o["output_type"] == "error"]
        assert not errors, f"cell {number}: {errors}"
        if VARIES in new.metadata.get("tags", []):
            assert bool(old.outputs) == bool(new.outputs), f"cell {number} has no stored output"
        elif stored.metadata.get("torch") == TORCH:  # other versions of torch print other graphs and errors
            assert shown(old) == shown(new), (
                f"cell {number} is stale; `python tests/world/test_notebooks.py` updates it"
            )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_picture_is_stored_once(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            forms = [kind for kind, data in output.get("data", {}).items() if "<svg" in data]
            assert len(forms) <= 1


def test_jupyter_gets_a_picture_in_one_form() -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    for shown in (flexmasks.draw("causal", 64), flexmasks.get_mask("causal"), flexmasks.get_score("alibi")):
        data, _ = formatters.DisplayFormatter().format(shown)
        assert [kind for kind, text in data.items() if "<svg" in text] in (["image/svg+xml"], ["text/html"])
        assert "text/plain" in data


def test_notebooks_list_every_mask_and_fit_their_columns() -> None:
    names = [entry.name for entry in flexmasks.list_masks()]
    first, second = (nbformat.read(path, as_version=4) for path in NOTEBOOKS[:2])
    listed = next(c for c in first.cells if "flexmasks.list_masks()" in c.source)
    lines = shown(listed).splitlines()
    assert [re.split(" {2,}", line, maxsplit=1)[0] for line in lines] == names
    counted = next(c for c in second.cells if "flexmasks.list_masks()" in c.source)
    assert [line.split()[0] for line in shown(counted).splitlines()[2:]] == names


@pytest.mark.parametrize(("capability", "wants"), [((7, 5), ("cpu", True)), ((9, 0), ("cuda", False))])
def test_notebooks_know_old_gpus(
    capability: tuple[int, int], wants: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch compiles no flex_attention for a T4, whose compute capability is 7.5, and has no FlashAttention for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    known: dict[str, Any] = {"torch": torch, "SDPBackend": torch.nn.attention.SDPBackend}
    for path in (NOTEBOOKS[6], NOTEBOOKS[3]):
        start = next(c.source for c in nbformat.read(path, as_version=4).cells if "device = " in c.source)
        exec("\n".join(re.findall(r"^(?:has_triton|device|is_old|fused_kernel) = .*", start, re.MULTILINE)), known)
    assert (known["device"].type, known["fused_kernel"].name == "EFFICIENT_ATTENTION") == wants


def test_there_are_notebooks() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{n:02}" for n in range(1, len(NOTEBOOKS) + 1)]


def test_what_is_compared() -> None:
    def cell(text: str) -> Any:
        output = nbformat.v4.new_output("execute_result", {"text/plain": text})
        return nbformat.v4.new_code_cell("x", outputs=[output])

    assert shown(cell("<function f at 0x7f3a5c0d1e40>")) == shown(cell("<function f at 0x7f0000000000>"))
    assert shown(cell("sparsity 92.4%")) != shown(cell("sparsity 92.5%"))


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        if len(sys.argv) == 1 or notebook.stem in sys.argv[1:]:
            print(notebook.stem)
            nbformat.write(executed(notebook), notebook)
