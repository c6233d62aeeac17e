"""The benchmark measures what it says, and writes it down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import DEVICES
from torch.nn.attention.flex_attention import create_block_mask

from flexmasks import bench
from flexmasks.__main__ import main


@pytest.mark.parametrize("device", DEVICES)
def test_figures_are_written(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "blocks.json"
    names = ["causal", "every 100th key"]
    command = ["bench", "blocks", "--lengths", "1024", "2048", "--masks", *names, "--device", device]
    assert main([*command, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())
    assert [(r["mask"], r["length"]) for r in results["rows"]] == [(n, s) for n in names for s in (1024, 2048)]
    for row in results["rows"]:
        assert row["equal"] is True
        assert row["blocks"] == (row["length"] // 128) ** 2
        assert 0 < row["again_ms"] < row["ms"]
        assert row["torch_ms"] > 0
        assert row["mask"] in printed
    assert results["machine"]["device_type"] == device
    assert results["rows"][0]["undecided"] == 8


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("device", ["cpu"])  # on a GPU it takes minutes
def test_figures_of_the_softmax_are_written(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "softmax.json"
    assert main(["bench", "softmax", "--device", device, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())
    assert results["copy_tb_s"] > 0
    for row in results["rows"]:
        assert row["ms"] > 0
        assert row["share"] == pytest.approx(row["tb_s"] / results["copy_tb_s"], rel=0.1)
        assert row["case"] in printed
    ours = [r for r in results["rows"] if r["who"] == "flexmasks"]
    assert len(ours) == 2 * 8
    assert all(r["largest_error"] < 0.01 for r in ours if r["pass"] == "forward")
    assert sum(r["who"] == "torch.compile" for r in results["rows"]) == 2 * 8


@pytest.mark.usefixtures("one_thread")
def test_figures_of_attention_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "attention.json"
    masks = ["causal", "sliding_window"]
    assert main(["bench", "attention", "--device", "cpu", "--json", str(file), "--masks", *masks]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert {(r["case"], r["who"]) for r in rows} >= {(m, w) for m in masks for w in ("flexmasks", "SDPA + mask")}
    for row in rows:
        assert row["difference"] < 1e-5
        assert row["forward_ms"] > 0
        assert row["case"] in printed
    assert main(["bench", "attention", "--masks", "causl"]) == 2
    assert "no case 'causl'" in capsys.readouterr().err


def test_peak_memory_is_seen() -> None:
    with bench._peak_memory(torch.device("cpu")) as used:
        create_block_mask(lambda b, h, q, kv: kv <= q, 1, 1, 4096, 4096, device="cpu")
    assert used[0] > 4096**2  # the mask itself, one byte each


def test_an_unknown_mask_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "blocks", "--masks", "causl"]) == 2
    assert "no mask 'causl'" in capsys.readouterr().err


@pytest.mark.parametrize("length", [4096, 8192, 1 << 20])
def test_the_measured_masks_fit(length: int) -> None:
    for mask in bench.masks(length, torch.device("cpu")).values():
        mask.blocks(length if length < 1 << 20 else 4096, length)
