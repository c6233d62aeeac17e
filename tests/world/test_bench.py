"""The benchmarks: what they measure, and the files that they write."""

from __future__ import annotations

import functools
import gc
import json
import re
import statistics
import sys
import time
import types
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from helpers import DEVICES
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flexmasks
from benchmark import main
from benchmarks import attention as bench_attention
from benchmarks import blocks as bench_blocks
from benchmarks import choice as bench_choice
from benchmarks import choice_table, first_calls, limits_tables, loops, peers, steps_tables
from benchmarks import data as bench_data
from benchmarks import diffusers as bench_diffusers
from benchmarks import documents as bench_documents
from benchmarks import intervals as bench_intervals
from benchmarks import limits as bench_limits
from benchmarks import models as bench_models
from benchmarks import ranks as bench_ranks
from benchmarks import results as bench_results
from benchmarks import rollouts as bench_rollouts
from benchmarks import serve as bench_serve
from benchmarks import softmax as bench_softmax
from benchmarks import steps as bench_steps
from benchmarks import topk as bench_topk
from benchmarks import trees as bench_trees
from benchmarks.memory import peak_bytes
from benchmarks.model import Sizes
from benchmarks.runner import measure_passes, measure_steps
from flexmasks.backends import flex_kernels, times
from flexmasks.backends.table import BACKENDS
from flexmasks.bench.clock import interleaved, wall_milliseconds
from flexmasks.blocks.lists import of_block_mask
from flexmasks.plans import mask_plan
from flexmasks.plans.data import data_of

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _objects_of_other_tests_stay() -> Iterator[None]:
    """Benchmarks look for cycles of objects between calls, and those that are here already take them long."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("device", DEVICES)
def test_figures_are_written(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "blocks.json"
    names = ["causal", "every 100th key"]
    command = ["blocks", "--lengths", "512", "1024", "--masks", *names, "--device", device]
    assert main([*command, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())
    assert [(r["mask"], r["length"]) for r in results["rows"]] == [(n, s) for n in names for s in (512, 1024)]
    for row in results["rows"]:
        assert row["equal"] is True
        assert row["blocks"] == (row["length"] // 128) ** 2
        assert 0 < row["again_ms"] < row["ms"]
        assert row["torch_ms"] > 0
        assert row["mask"] in printed
    assert results["machine"]["device_type"] == device
    assert results["rows"][0]["undecided"] == 4


@pytest.mark.parametrize("device", ["cpu"])  # on a GPU it takes minutes
@pytest.mark.campaign
@pytest.mark.parametrize("count", [2, 8])
def test_figures_of_the_softmax_are_written(
    device: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = bench_softmax.cases
    monkeypatch.setattr(bench_softmax, "cases", lambda device: cases(device)[-count:])
    file = tmp_path / "softmax.json"
    assert main(["softmax", "--device", device, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())
    assert results["copy_tb_s"] > 0
    for row in results["rows"]:
        assert row["ms"] > 0
        assert row["share"] == pytest.approx(row["tb_s"] / results["copy_tb_s"], rel=0.1)
        assert row["case"] in printed
    ours = [r for r in results["rows"] if r["who"] == "flexmasks"]
    assert len(ours) == 2 * count
    assert all(r["largest_error"] < 0.01 for r in ours if r["pass"] == "forward")
    for who in ("torch.compile", "torch._masked_softmax"):
        assert sum(r["who"] == who for r in results["rows"]) == 2 * count
    assert main(["softmax", "--device", device, "--json", str(file), "--resume", "--only", "host"]) == 0
    assert json.loads(file.read_text())["rows"] == results["rows"]  # nothing is measured again


@pytest.mark.campaign
def test_figures_of_attention_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "attention.json"
    masks = ["causal", "sliding_window"]
    given = ["--device", "cpu", "--lengths", "512", "--json", str(file)]
    assert main(["attention", *given, "--masks", *masks]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert {(r["case"], r["who"]) for r in rows} >= {(m, w) for m in masks for w in ("flexmasks", "SDPA + mask")}
    for row in rows:
        assert row["difference"] < 1e-5
        assert row["forward_ms"] > 0
        assert row["case"] in printed
    assert [r["backend"] for r in rows if r["who"] == "flexmasks"] == ["sdpa", "flex"]
    assert main(["attention", "--masks", "causl"]) == 2
    assert "no mask 'causl' to measure; did you mean 'causal'" in capsys.readouterr().err
    assert main(["attention", "--scores", "alib"]) == 2
    assert "no score is named 'alib'" in capsys.readouterr().err


@pytest.mark.campaign
def test_registered_masks_and_scores_are_measured_and_the_failed_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @flexmasks.register_mask(example=lambda length: {"seq_lens": [length, 1]})
    def of_two(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, seq_lens: Annotated[Tensor, "int[B]"]) -> Tensor:
        return kv < seq_lens[b]

    file = tmp_path / "attention.json"
    names = ["--masks", "of_two", "--scores", "temperature"]
    assert main(["attention", "--device", "cpu", "--lengths", "128", "--json", str(file), *names]) == 1
    printed = capsys.readouterr()
    results = json.loads(file.read_text())
    assert list(results["failed"]) == ["mask of_two, 128 tokens, head size 64"]
    assert "mask of_two, 128 tokens, head size 64 failed: ValueError: flexmasks mask 'of_two'" in printed.err
    assert [(r["kind"], r["case"], r["shape"], r["who"]) for r in results["rows"]] == [
        ("score", "temperature, causal", "8x1x128x64", who)  # one head, as in the score's example
        for who in ("flexmasks", "flex_attention")
    ]
    for row in results["rows"]:
        assert row["difference"] < 1e-5
        assert row["forward_ms"] > 0
    assert results["rows"][0]["example"] == "temperature(temperatures=float32[1])"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of the benchmarks, which do not run."""
    descriptions: list[str] = []
    for module in (bench_blocks, bench_attention, bench_results):
        monkeypatch.setattr(module, "run_steps", lambda results, todo, file, resume: descriptions.extend(todo))
    return descriptions


def test_the_usual_cases_are_the_default(steps: list[str]) -> None:
    assert main(["blocks", "--device", "cpu"]) == 0
    lengths = bench_blocks.LENGTHS["cpu"]
    assert steps == [f"{name}, {n} tokens" for name in bench_blocks.masks(64, torch.device("cpu")) for n in lengths]
    steps.clear()
    assert main(["attention", "--device", "cpu"]) == 0
    cases = bench_attention.cases(1, 8, 4096, torch.device("cpu"))
    assert steps == [f"{case.name}, [1, 8, 4096, 64]" for case in cases if case.lengths is None]


def test_the_steps_with_new_tensors(steps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", "--device", "cpu"]) == 0
    named = [f"loop, {loop.name}, [1, 8, 4096, 64]" for loop in loops.LOOPS]
    ids, offsets = ["eager", "compiled layers", "compiled"], ["eager", "compiled"]
    losses = [*(f"losses, document ids, {way}" for way in ids), *(f"losses, offsets, {way}" for way in offsets)]
    shapes = "[4, 8, 256, 64]", "[4, 8, 512, 64]", "[2, 8, 1024, 64]", "[1, 8, 4096, 64]"
    gradients = [f"gradients, {loop.name}, {shape}" for shape in shapes for loop in loops.WITH_GRADIENTS]
    assert steps == ["plan, documents, [1, 8, 4096, 64]", *named, *gradients, *losses]
    steps.clear()
    assert main(["steps", "--device", "cpu", "--quick", "--only", "plan", "loop, documents, ALiBi"]) == 0
    assert steps == ["plan, documents, [2, 2, 256, 64]", "loop, documents, ALiBi, [2, 2, 256, 64]"]
    steps.clear()
    assert main(["steps", "--device", "cpu", "--quick", "--only", "lengths, documents, ALiBi"]) == 0
    assert steps == [f"lengths, documents, ALiBi, [1, 2, 512, 64] less {shorter}" for shorter in (0, 37)]
    assert main(["steps", "--device", "cpu", "--only", "plam"]) == 2
    assert "nothing to measure is named ['plam']; there are plan, documents" in capsys.readouterr().err
    for wrong in (["steps", "--masks", "causal"], ["blocks", "--quick"], ["attention", "--only", "causal"]):
        with pytest.raises(SystemExit):
            main(wrong)


def test_the_masks_in_both_forms(steps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--device", "cpu"]) == 0
    assert steps == [f"{case.name}, 2048 tokens, flex" for case in bench_data.cases(bench_data._CPU, CPU)]
    assert "natten3d 5 x 7 x 7 on 8 x 16 x 16, tiles of 2 x 4 x 8, 2048 tokens, flex" in steps
    steps.clear()
    assert main(["data", "--device", "cpu", "--quick", "--only", "causal", "256 bits"]) == 0
    assert steps == ["causal, 256 tokens, flex", "documents, causal, 256 tokens, flex"]
    assert main(["data", "--device", "cpu", "--only", "causl"]) == 2
    assert "nothing to measure is named ['causl']; there are natten3d" in capsys.readouterr().err
    for wrong in (["--masks", "causal"], ["--scores", "alibi"], ["--all"], ["--lengths", "64"], ["--resume"]):
        with pytest.raises(SystemExit) as stopped:
            main(["data", *wrong])
        assert stopped.value.code == 2


def test_the_cases_of_a_serving_loop(steps: list[str]) -> None:
    assert main(["serve", "--device", "cpu"]) == 0
    assert steps[:2] == ["decoding, 8 x 32 x 8 x 64 x 4096", "decoding, 1 x 32 x 8 x 64 x 32768"]
    for name in ("window of 1024", "ALiBi", "soft-cap", "sinks", "4 drafted tokens", "chunks of 512"):
        assert sum(name in step for step in steps) == 1
    steps.clear()
    assert main(["serve", "--device", "cpu", "--quick", "--only", "window"]) == 0
    assert steps == ["decoding, window of 16, 1 x 4 x 2 x 16 x 512"]


@pytest.mark.slow
def test_figures_of_a_serving_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs agree with SDPA's, and the roof is that of the keys that a step sees."""
    file = tmp_path / "serve.json"
    command = ["serve", "--device", "cpu", "--quick", "--json", str(file), "--only", "window", "drafted"]
    assert main(command) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())
    who = ["flexmasks", "flexmasks, pages of 16", "flexmasks, pages of 128", "SDPA + mask"]
    assert [r["who"] for r in results["rows"]] == who * 2
    assert all(r["difference"] < 1e-5 and r["ms"] > 0 and r["compilations"] == 0 for r in results["rows"])
    assert results["rows"][0]["backend"] == "decode"
    assert "decoding, window of 16" in printed
    page = bench_serve.markdown(results)
    assert page.count("| flexmasks, pages of 128 |") == 2
    case = bench_serve.Case("", bench_serve.Room(3, 4, 2, 16, 64), q_len=2, window=5)
    serving = bench_serve.Serving(case, CPU, torch.float32)
    seen = [sum(min(n, 7) for n in lens) for lens in serving.lens.tolist()]
    assert serving.bytes_to_read == pytest.approx(sum(seen) / len(seen) * 2 * 2 * 16 * 4)


@pytest.mark.campaign
def test_figures_of_hugging_face_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All implementations start from the same weights and see the same rows."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench_models, "_VOCABULARY", 64)
    file = tmp_path / "models.json"
    command = ["models", "--device", "cpu", "--quick", "--json", str(file)]
    assert main([*command, "--only", "training, Llama", "training, GPT", "generation"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    results = json.loads(file.read_text())
    training = [r for r in results["rows"] if r["kind"] == "training"]
    assert [r["who"] for r in training] == ["sdpa", "no attention", "flexmasks", "eager", "no attention", "flexmasks"]
    for other, without, ours in zip(training[::3], training[1::3], training[2::3], strict=True):
        assert ours["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert without["loss"] != ours["loss"]
        assert "flex_attention" in other["left_out"]  # it has no gradients on a CPU
    assert [r["who"] for r in results["rows"][6:]] == ["flexmasks", "sdpa"]
    assert all(r["ms"] > 0 and r["compilations"] == 0 for r in results["rows"])
    page = bench_models.markdown(results)
    assert len(re.findall(r"\| flexmasks +\|", page)) == 3
    assert "tokens/s" in page


@pytest.mark.campaign
def test_figures_of_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All ways have the same losses, and trees compute each prompt once."""
    file = tmp_path / "trees.json"
    assert main(["trees", "--device", "cpu", "--quick", "--json", str(file)]) == 0, capsys.readouterr().err
    results = json.loads(file.read_text())
    rows = {r["who"]: r for r in results["rows"] if r["kind"] == "training"}
    assert [r["computed_tokens"] for r in rows.values()][:3] == [2 * (96 + 4 * 32)] * 2 + [2 * 4 * (96 + 32)]
    assert (
        rows["padded"]["computed_tokens"] > rows["one by one"]["computed_tokens"] == rows["packed"]["computed_tokens"]
    )
    assert all(r["difference"] < 1e-6 for who, r in rows.items() if who != "trees, no attention")
    ours = rows["trees"]
    allowed = ours["rest_ms"] + 2 * ours["allowed_ms"]
    assert ours["bound_ms"] == pytest.approx(allowed, rel=1e-2)
    assert results["rows"][-1]["kind"] == "packing"
    page = bench_trees.markdown(results)
    assert f"Trees train on {rows['packed']['ms'] / ours['ms']:.2f} times" in page
    assert "40 sequences of 100 tokens are packed in" in page


@pytest.mark.campaign
def test_figures_of_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses that read answers only are the same in all ways, and trees compute each prompt once."""
    file = tmp_path / "rollouts.json"
    assert main(["rollouts", "--device", "cpu", "--quick", "--json", str(file)]) == 0, capsys.readouterr().err
    results = json.loads(file.read_text())
    for n, answers in enumerate((4, 8, 16)):
        rows = results["rows"][3 * n : 3 * n + 3]
        by_who = {r["who"]: r for r in rows}
        assert by_who["trees"]["computed_tokens"] <= 2 * (64 + answers * 16)
        assert by_who["packed"]["computed_tokens"] == 2 * answers * (64 + 16)
        assert by_who["padded"]["computed_tokens"] > by_who["packed"]["computed_tokens"]
        assert all(r["difference"] < 1e-6 for r in rows)
    page = bench_rollouts.markdown(results)
    assert page.count("| trees ") == 3
    assert len(re.findall(r"- (4|8|16) answers: \d+% of the tokens and -?\d+% of the time", page)) == 3


@pytest.mark.campaign
def test_figures_of_diffusers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All ways compute the same, but for torch's unfused flex_attention, which reads no lists of blocks."""
    pytest.importorskip("diffusers")
    file = tmp_path / "diffusers.json"
    assert main(["diffusers", "--device", "cpu", "--quick", "--json", str(file)]) == 0, capsys.readouterr().err
    results = json.loads(file.read_text())
    compared = [r for r in results["rows"] if (r["case"], r["who"]) != ("block mask", "flex") and "difference" in r]
    assert len(compared) == 9
    assert all(r["difference"] < 1e-5 for r in compared)
    assert bench_diffusers.markdown(results).count("| flexmasks  ") == 3


@pytest.mark.campaign
def test_figures_of_chosen_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All ways compute the same, and queries have as many entries as the description says."""
    file = tmp_path / "topk.json"
    assert main(["topk", "--device", "cpu", "--quick", "--json", str(file)]) == 0, capsys.readouterr().err
    rows = json.loads(file.read_text())["rows"]
    compared = [r["difference"] for r in rows if "difference" in r]
    assert len(compared) == 3 * (4 + 3) + 3 + 3  # flex has no gradients on a CPU
    assert all(x < 1e-5 for x in compared)
    assert [r["blocks"] for r in rows[::9]] == [1.0, 0.7, 0.7, 0.8]
    page = bench_topk.markdown({"rows": rows, "machine": bench_results.machine(torch.device("cpu"))})
    assert page.count("| runs") == 4
    for case in bench_topk._CASES:
        indices = case._replace(length=4096, chosen=64).indices(torch.device("cpu"))
        assert indices.shape == (4096, 1, 64)
        assert int(indices.max()) < 4096 // case.granularity


@pytest.mark.campaign
def test_figures_of_several_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of several processes is that of one."""
    file = tmp_path / "ranks.json"
    assert main(["ranks", "--device", "cpu", "--quick", "--json", str(file), "--only", "window", "prefix"]) == 0
    capsys.readouterr()
    results = json.loads(file.read_text())
    of_heads = (("flexmasks", 4), ("flexmasks, heads over 2", 4), ("flexmasks on one", 1))
    of_one_key_head = (("flexmasks", 4), ("flexmasks, balanced", 4), ("flexmasks on one", 1))
    rows = [("4x1024x32", *row) for row in of_heads] * 2 + [("4/1x1024x32", *row) for row in of_one_key_head] * 2
    assert [(r["shape"], r["who"], r["ranks"]) for r in results["rows"]] == rows
    assert all(r["difference"] < 1e-5 for r in results["rows"] if r["who"] == "flexmasks")
    assert all(r["ms"] > 0 and r["steps"] >= 3 for r in results["rows"])
    assert bench_ranks.markdown(results).count("| flexmasks on one ") == 4


def test_the_cases_of_limits(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["limits", "--device", "cpu", "--only", "small calls", "first calls, documents"]) == 0
    names, ways = ("causal", "sliding_window 64", "prefix_lm", "ALiBi, causal"), ("forward", "forward + backward")
    assert steps[:8] == [f"small calls, {name}, [1, 8, 8, 512, 64], {way}" for name in names for way in ways]
    backends = ("short", "flex", "reference")
    assert steps[16:] == [f"first calls, documents, {b}, [1, 8, 1024, 64]" for b in backends]
    cuda = torch.device("cuda")
    monkeypatch.setattr(first_calls, "is_installed", lambda: True)
    on_gpu = list(bench_limits._todo(cuda, quick=False))
    assert len(on_gpu) == len(set(on_gpu)) == 4 + 2 + 5 + 24 + 36 + 18 + 4
    assert "sinks, sliding_window 1,024, [4, 64, 8, 4096, 64]" in on_gpu
    assert "head sizes, documents, float16, [4, 16, 16, 8192, 64]" in on_gpu
    monkeypatch.setattr(first_calls, "is_installed", lambda: False)
    assert len(on_gpu) - len(bench_limits._todo(cuda, quick=False)) == 6  # fa4 and flex_flash


@pytest.fixture
def eager_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of torch's flex_attention run without compilation, which takes long."""

    def new_kernel(key: Hashable, is_static: bool = False) -> Any:
        kernel = flex_kernels._Kernel(flex_kernels.flex, is_static, on_gpu=False)
        flex_kernels.COMPILED.put(key, (), kernel, 1)
        return kernel

    monkeypatch.setattr(flex_kernels, "_new_kernel", new_kernel)
    monkeypatch.setattr(peers, "compiled_flex", lambda: flex_attention)
    yield
    flexmasks.clear_caches()


@pytest.mark.campaign
@pytest.mark.usefixtures("eager_kernels")
def test_figures_of_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs agree, and every kind of row has its table."""
    file = tmp_path / "limits.json"
    only = ["sinks", "soft-cap", "neighborhoods", "small calls", "head sizes", "first calls, softcap, reference"]
    command = ["limits", "--device", "cpu", "--quick", "--json", str(file), "--only", *only]
    assert main(command) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        rows.setdefault(row["kind"], []).append(row)
        assert row["kind"] in printed
    assert {kind: len(of_kind) for kind, of_kind in rows.items()} == {
        "sinks": 4, "soft-cap": 2, "neighborhoods": 8, "small calls": 20, "head sizes": 8, "first calls": 2
    }  # fmt: skip
    assert all(row.get("difference", 0) < 1e-5 for row in results["rows"])
    for row in (*rows["sinks"], *rows["soft-cap"], *rows["neighborhoods"]):
        assert min(row["forward_ms"], row["backward_ms"]) > 0
        assert "difference" in row
    assert all(row["inference_ms"] > 0 for row in (*rows["sinks"], *rows["neighborhoods"]))
    video = rows["neighborhoods"][0]
    assert video["visible"] == pytest.approx(27 / 256, rel=1e-3)
    assert video["visible"] < video["computed"] <= 1
    assert all(min(row["ms"], row["alone_ms"]) > 0 and "difference" in row for row in rows["small calls"])
    without = [row for row in rows["small calls"] if "flex_attention" in row.get("left_out", {})]
    assert [row["passes"] for row in without] == ["forward + backward"] * 4  # torch has no gradients on a CPU
    assert [row["who"] for row in rows["first calls"]] == ["cold", "warm"]
    assert all(0 < row["output_s"] < row["gradient_s"] and row["import_s"] > 0 for row in rows["first calls"])
    assert ["modules_s" in row for row in rows["first calls"]] == [False, True]
    page = limits_tables.markdown(results)
    assert page.count("### ") == 6
    assert page.count("Target") == 4  # sinks, head sizes, small calls, first calls
    assert "| fails " in page


@pytest.mark.campaign  # two processes compile a model
def test_first_steps_of_a_compiled_model(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    command = ["limits", "--device", "cpu", "--quick", "--json", str(file), "--only", "first steps"]
    assert main(command) == 0
    cold, warm = json.loads(file.read_text())["rows"]
    assert (cold["who"], warm["who"]) == ("cold", "warm")
    assert warm["modules_s"] > 0
    for row in (cold, warm):
        assert 0 < row["second_step_s"] < row["step_s"]


@pytest.mark.slow
def test_a_first_call_that_fails_is_named() -> None:
    shape = (1, 2, 128, 16)
    with pytest.raises(RuntimeError, match=r"with code 1: ValueError: .* backend 'short' cannot run this call"):
        first_calls._call_rows("softcap", "short", CPU, shape)


def test_the_tables_of_limits() -> None:
    about = {"shape": "4x16x16x8192x128", "dtype": "bfloat16", "difference": 0.01}

    def row(kind: str, case: str, who: str, ms: float, backend: str = "", **more: Any) -> dict[str, Any]:
        return {**about, "kind": kind, "case": case, "who": who, "backend": backend, "forward_ms": ms} | {
            "backward_ms": 2 * ms, "inference_ms": ms, **more
        }  # fmt: skip

    fractions = {"visible": 0.1, "computed": 0.4, "first_s": 5.0, "inference_first_s": 2.0}
    rows = [
        row("sinks", "causal", "with sinks", 1.04, "fa4"), row("sinks", "causal", "without", 1.0, "fa4"),
        row("sinks", "window", "with sinks", 1.2, "flex"), row("sinks", "window", "without", 1.0, "fa4"),
        row("soft-cap", "causal", "with a soft-cap", 1.3, "fa4"), row("soft-cap", "causal", "without", 1.0, "fa4"),
        row("head sizes", "causal", "flexmasks", 1.0, "fa4"), row("head sizes", "causal", "flex_attention", 1.5),
        row("head sizes", "prefix_lm", "flexmasks", 1.0, "flex"),
        row("head sizes", "prefix_lm", "flex_attention", 0.9),
        row("neighborhoods", "natten", "row-major", 1.0, "flex", inference_backend="flex_flash", **fractions),
        row("neighborhoods", "natten", "full attention", 2.0, "fa4", inference_backend="fa4"),
        *(
            row("neighborhoods", case, who, ms, "flex_flash", inference_backend="flex_flash", **fractions)
            for case in ("natten3d 9", "natten3d 9, stride 3", "natten1d 9")
            for who, ms in (("row-major", 2.0), ("in tiles", 1.0), ("full attention", 2.0))
            if not (case == "natten1d 9" and who == "in tiles")
        ),
    ]  # fmt: skip
    small = {**about, "kind": "small calls", "case": "causal", "passes": "forward"}
    rows += [
        {**small, "who": "flexmasks", "backend": "sdpa", "ms": 1.0, "alone_ms": 2.0},
        {**small, "who": "SDPA", "ms": 1.1, "alone_ms": 1.8},
        {**small, "who": "FA4", "ms": 1.2, "alone_ms": 3.0},
    ]
    first = {**about, "kind": "first calls", "case": "causal", "import_s": 3.0, "device_s": 0.5}
    rows += [
        {**first, "backend": backend, "who": who, "output_s": seconds, **more}
        for backend, more in (("fa4", {"gradient_s": 9.0}), ("decode", {}))
        for who, seconds in (("cold", 4.0), ("warm", 1.25))
    ]
    steps = {
        **about,
        "kind": "first steps",
        "case": "12 layers",
        "backend": "flexmasks",
        "import_s": 3,
        "device_s": 0.5,
    }
    rows += [
        {**steps, "who": "cold", "step_s": 20.0, "second_step_s": 0.25},
        {**steps, "who": "warm", "step_s": 8.0, "second_step_s": 0.125, "modules_s": 5.0},
    ]
    machine = {"device": "H0", "device_type": "cuda", "torch": "2.0", "flash": "flash-attn-4 1"}
    text = limits_tables.markdown({"machine": machine, "rows": rows})
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for expected in (
        "On one H0, torch 2.0, flash-attn-4 1, bfloat16; medians of interleaved runs.",
        "| window | 4x16x16x8192x128 | flex; without: fa4 | 1.2 | 1 | 1.20 | 1.2 / 2.4 | 1 / 2 | 1.20 |",
        "| 4x16x16x8192x128 | fa4 | 1.3 / 2.6 | 1 / 2 | 1.30 | at most 1.15 |",
        "| bfloat16 | 4x16x16x8192x128 | prefix_lm | flex | 1 / 2 | 0.9 / 1.8 | 0.90 x | 0.90 x |",
        "| causal | 4x16x16x8192x128 | forward | sdpa | 1 | 1.1 | 1.2 | 1.10 x | 2 | 1.8 | 3 | 0.90 x |",
        "| causal | fa4 | 4.00 | 9.00 | 1.25 | 9.00 | 3.00 / 3.00 | 0.50 / 0.50 |",
        "| causal | decode | 4.00 | | 1.25 | | 3.00 / 3.00 | 0.50 / 0.50 |",
        "| 12 layers | 4x16x16x8192x128 | flexmasks | 20.00 | 0.25 | 8.00 | 0.12 | 5.00 | 3.00 / 3.00 | 0.50 / 0.50 |",
        "| natten | 4x16x16x8192x128 | row-major | 2.00, 5.00 | 1 (flex_flash) | 1 / 2 (flex) | 2 (fa4); 2 / 4 (fa4) "
        "| 2.0 x | 2.0 x | 2.0 x | 2.5 x | 10.0 x | |",
        *(
            f"| {case} | 4x16x16x8192x128 | {tokens} | 2.00, 5.00 | {ms} (flex_flash) | {ms} / {2 * ms} (flex_flash) "
            f"| 2 (flex_flash); 2 / 4 (flex_flash) | {' | '.join([f'{2 / ms:.1f} x'] * 3)} | 2.5 x | 10.0 x | {target}|"
            for case, tokens, ms, target in (
                ("natten3d 9", "row-major", 2, ""),
                ("natten3d 9", "in tiles", 1, "2.0 x "),
                ("natten3d 9, stride 3", "in tiles", 1, "8.7 x "),
                ("natten1d 9", "row-major", 2, "12.0 x "),
            )
        ),
    ):
        assert expected in lines, "\n".join(lines)
    for sentence in (
        "Target: at most 1.05, met by 2 of 4 figures; the largest is 1.20 (window, 4x16x16x8192x128, forward).",
        "Target on fa4 and flex_flash: at least 1.3, met by 2 of 2 figures; the smallest is 1.50",
        "Target on other backends: at least 1, met by 0 of 2 figures; the smallest is 0.90",
        "Target: at least 1, met by 1 of 2 figures; the smallest is 0.90 (causal, 4x16x16x8192x128, forward, alone).",
        "in seconds: at most 1.5, met by 1 of 2 figures; the largest is 9.00 (causal, fa4).",
    ):
        assert sentence in text


def test_all_is_every_registered_mask_and_score(steps: list[str]) -> None:
    masks, scores = ([e.name for e in entries] for entries in (flexmasks.list_masks(), flexmasks.list_scores()))
    assert main(["blocks", "--all", "--lengths", "64", "--device", "cpu"]) == 0
    assert steps == [f"{name}, example, 64 tokens" for name in masks]
    steps.clear()
    assert main(["attention", "--all", "--lengths", "64", "--device", "cpu"]) == 0
    entries = [("mask", name) for name in masks] + [("score", name) for name in scores]
    assert steps == [f"{kind} {name}, 64 tokens, head size 64" for kind, name in entries]


def test_a_registered_mask_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blocks", "--masks", "tree", "causal", "--lengths", "512", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("True") == 2  # the column that says whether the blocks equal torch's
    with pytest.raises(SystemExit):
        main(["blocks", "--scores", "alibi"])
    assert "blocks takes no --scores" in capsys.readouterr().err


def test_the_table_of_undecided_blocks() -> None:
    rows = [
        {"mask": name, "length": 640, "ms": ms, "blocks": 25, "undecided": undecided, "partial": partial}
        for name, ms, undecided, partial in [("a", 1, 2, 2), ("b", 2, 3, 3), ("c", 9, 4, 1)]
    ]
    text = bench_blocks.undecided_markdown({"machine": {"device": "CPU", "torch": "2.0"}, "rows": rows})
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "3 registered masks are measured at their examples with 640 tokens. For 2 of them only partial" in lines[0]
    assert "2 ms in the median, and at most 9 ms (`c`)" in lines[0]
    assert lines[-2:] == ["| `c` | 25 | 4 (16.0%) | 1 | 3 |", "| `b` | 25 | 3 (12.0%) | 3 | 0 |"]


def test_the_table_of_the_registry() -> None:
    def rows(kind: str, case: str, example: str, shape: str, ms: dict[str, float]) -> list[dict[str, Any]]:
        about = {"kind": kind, "case": case, "example": example, "shape": shape, "dtype": "bfloat16"}
        about |= {"forward_tflops": 300.0, "backward_tflops": 400.0}
        about["backend"] = "flex_flash"
        return [{**about, "who": who, "forward_ms": n, "backward_ms": 2 * n} for who, n in ms.items()]

    band = rows("mask", "band", "band(lower=-3)", "1x16x64x64", {"flexmasks": 2, "flex_attention": 3, "SDPA + mask": 9})
    packed = rows("mask", "packed", "packed(inner=a() | b())", "1x16x64x64", {"flexmasks": 2, "SDPA + mask": 4})
    packed[0]["left_out"] = {"flex_attention": "no kernel"}
    score = rows("score", "packed, causal", "packed()", "16x1x64x64", {"flexmasks": 1, "flex_attention": 3})
    results = {"machine": {"device": "H0", "torch": "2.0"}, "rows": band + packed + score}
    text = bench_attention.registry_markdown(results)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "| `band(lower=-3)` | flex_flash | 2 / 4 | 300 / 400 | 1.50 x | 4.50 x |" in lines
    assert "| `packed(inner=a() \\| b())` | flex_flash | 2 / 4 | 300 / 400 | fails | 2.00 x |" in lines
    assert "| `packed()`, 16x1x64x64 | flex_flash | 1 / 2 | 300 / 400 | 3.00 x |" in lines
    assert "1x16x64x64" in lines[0]
    assert "The median for flex_attention is 2.25 times, the range 1.50 to 3.00 times." in lines[0]


def test_peak_memory_is_seen() -> None:
    bytes_used = peak_bytes(
        lambda: create_block_mask(lambda b, h, q, kv: kv <= q, 1, 1, 4096, 4096, device="cpu"), torch.device("cpu")
    )
    assert bytes_used > 4096**2  # the mask itself, one byte each


def test_calls_take_turns_and_warm_up() -> None:
    ran: list[str] = []
    calls = {name: functools.partial(ran.append, name) for name in "abc"}
    times = interleaved(calls, torch.device("cpu"), 9, lambda call, device: call() or float(len(ran)))
    turns = ["".join(ran[n : n + 3]) for n in range(0, len(ran), 3)]
    assert len(turns) == 11
    assert all(sorted(turn) == list("abc") for turn in turns)
    assert len({*turns}) > 3  # orders
    measured = [n + 1 for n, name in enumerate(ran) if n >= 6 and name == "b"]  # the first two turns warm up
    low, middle, high = statistics.quantiles(measured, n=4)
    assert times["b"] == (middle, high - low)


def test_a_wall_time_is_the_mean_of_calls_in_a_row() -> None:
    collecting: list[bool] = []

    def call() -> None:
        collecting.append(gc.isenabled())
        time.sleep(0.002)

    assert 2 <= wall_milliseconds(call, torch.device("cpu"), 5) < 100
    assert collecting == [False] * 5
    assert gc.isenabled()


@pytest.mark.parametrize("backward", [True, False])
def test_the_runner_leaves_out_what_fails_unless_it_is_required(backward: bool) -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("not made for this\nat all")

    calls = {"ours": torch.sin, "rival": fails, "other": torch.cos}
    x = torch.randn(8)
    measured, left_out = measure_passes(calls, [x], runs=2, required=["ours"], backward=backward)
    assert left_out == {"rival": "ValueError: not made for this"}
    assert list(measured) == ["ours", "other"]
    for name, figures in measured.items():
        assert torch.equal(figures.output, calls[name](x))
        assert list(figures.milliseconds) == ["forward", "backward"][: 1 + backward]
    with pytest.raises(ValueError, match="not made for this"):
        measure_passes(calls, [x], runs=2, required=calls)


def test_an_unknown_mask_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blocks", "--masks", "causl"]) == 2
    assert "no mask 'causl'" in capsys.readouterr().err


def test_a_stopped_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "blocks.json"
    command = ["blocks", "--device", "cpu", "--lengths", "256", "--json", str(file)]
    assert main([*command, "--masks", "causal"]) == 0
    first = json.loads(file.read_text())
    assert main([*command, "--masks", "causal", "full", "--resume"]) == 0
    both = json.loads(file.read_text())
    assert both["rows"][: len(first["rows"])] == first["rows"]
    assert both["measured"] == ["causal, 256 tokens", "full, example, 256 tokens"]
    capsys.readouterr()
    assert main(["attention", "--device", "cpu", "--json", str(file), "--resume", "--masks", "causal"]) == 2
    assert "holds no results of this benchmark" in capsys.readouterr().err
    file.write_text(json.dumps(both | {"machine": {"device": "another"}}))
    assert main([*command, "--resume"]) == 2
    assert "is of another machine" in capsys.readouterr().err
    for text in ("", "[1]", "{}"):
        file.write_text(text)
        assert main([*command, "--resume"]) == 2
        assert "holds no results of this benchmark" in capsys.readouterr().err
        assert file.read_text() == text
    for nowhere in (tmp_path, tmp_path / "no" / "file.json"):
        assert main(["blocks", "--device", "cpu", "--masks", "full", "--json", str(nowhere)]) == 2
        assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["blocks", "--lengths", "0"])
    assert "must be a whole number of at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("length", [4096, 8192, 1 << 20])
def test_the_measured_masks_fit(length: int) -> None:
    for mask in bench_blocks.masks(length, torch.device("cpu")).values():
        mask.blocks(length if length < 1 << 20 else 4096, length, q_offset=0)


# --- steps with new tensors ---


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, because that takes long."""

    def create(mask_mod: Any, batch: int, length: int, device: torch.device) -> BlockMask:
        return create_block_mask(mask_mod, batch, None, length, length, device=str(device))

    monkeypatch.setattr(bench_documents, "attention", functools.partial(flexmasks.attention, backend="reference"))
    for module in (bench_steps, loops):
        monkeypatch.setattr(module, "compiled_create", lambda dynamic=False: create)
        monkeypatch.setattr(module, "compiled_flex", lambda dynamic=False: flex_attention)
        monkeypatch.setattr(module, "attention", functools.partial(flexmasks.attention, backend="reference"))


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_figures_of_steps_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    command = ["steps", "--device", "cpu", "--quick", "--json", str(file)]
    assert main([*command, "--only", "plan", "loop, grouped_tril", "gradients, documents", "ALiBi, [1, 2"]) == 0
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())
    assert [(r["kind"], r["who"]) for r in results["rows"]] == [
        ("plan", "flexmasks"), ("plan", "flex_attention"),
        ("loop", "flexmasks"), ("loop", "flexmasks, old tensors"), ("loop", "flex_attention"),
        *[("gradients", "flexmasks"), ("gradients", "SDPA + mask")] * 2,
        *[("lengths", "flexmasks"), ("lengths", "flex_attention")] * 2,
    ]  # fmt: skip
    assert all(row["difference"] < 1e-5 for row in results["rows"][5::2])
    for row in results["rows"]:
        assert row["case"] in printed
        assert min(row["ms"], row["alone_ms"], row["longest_ms"], row["steps"]) > 0
        assert row["compilations"] == 0
        assert row["synchronizations"] is None
    ours = results["rows"][2]
    assert ours["difference"] < 1e-5
    assert ours["backend"] == "flex"
    text = steps_tables.markdown(results)
    assert "| grouped_tril | 2x2x256x64" in " ".join(text.split())
    assert "| 2x2x256x64 | documents, ALiBi | short |" in " ".join(text.split())
    for lengths in ("multiples of 32", "other lengths"):
        assert f"| documents, ALiBi, {lengths} | 1x2x512x64 |" in " ".join(text.split())


@pytest.mark.parametrize("loop", [*loops.LOOPS, *loops.WITH_GRADIENTS[:2]], ids=lambda loop: loop.name)
def test_the_loops_of_flexmasks_and_torch_have_the_same_mask(loop: loops.Loop) -> None:
    batch, length = (1, 192) if loop.is_varlen else (2, 96)
    drawn = loop.draw(batch, length, torch.Generator().manual_seed(0))
    for made in drawn[:3]:
        arguments = loop.arguments(made)
        score = arguments.pop("score", None)
        assert loop.has_alibi == (score == "alibi")
        ours = flexmasks.dense_mask(**arguments, q_len=length, batch=batch, heads=1)
        theirs = create_mask(loop.mask_mod(made, length), batch, 1, length, length, device="cpu")
        assert torch.equal(ours.expand_as(theirs), theirs)


def test_drawn_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    offsets = loops.draw_offsets(2, 3000, generator)
    assert offsets.shape == (8, 6000 // 600 + 1)
    assert bool((offsets[:, 0] == 0).all() and (offsets[:, -1] == 6000).all() and (offsets.diff() > 0).all())
    ids = loops.draw_ids(2, 30000, generator)
    assert 550 < 30000 / float(ids[..., -1].float().mean()) < 650
    draws = loops.Draws(offsets)
    first, second = draws.new(), draws.new()
    assert torch.equal(second, offsets[2])
    assert not torch.equal(first, second)
    kept = [draws.old() for _ in range(16)]
    assert all(x is y for x, y in zip(kept[:8], kept[8:], strict=True))
    assert draws.old() is not first
    place = draws.in_place()
    kept = place.clone()
    assert draws.in_place() is place
    assert not torch.equal(place, kept)


def test_the_runner_of_steps_runs_all_equally_often_and_counts_compilations() -> None:
    ran: dict[str, int] = {"ours": 0, "rival": 0}

    @torch.compile(backend="eager", dynamic=False)
    def twice(x: Tensor) -> Tensor:
        return x * 2

    def step(name: str) -> Tensor:
        ran[name] += 1
        return twice(torch.ones(3 if name == "ours" and ran[name] == 4 else 2)) * ran[name]

    def fails() -> Tensor:
        raise ValueError("not made for this\nat all")

    calls = {"ours": functools.partial(step, "ours"), "fails": fails, "rival": functools.partial(step, "rival")}
    pace = {"turns": 2, "most_in_a_row": 3, "least_in_a_row": 1, "seconds": 5.0}
    measured, left_out = measure_steps(calls, CPU, required=["ours"], **pace)
    assert left_out == {"fails": "ValueError: not made for this"}
    assert list(measured) == ["ours", "rival"]
    assert ran["ours"] == ran["rival"]
    assert torch.equal(measured["ours"].output, measured["rival"].output)
    assert [figures.compilations for figures in measured.values()] == [1, 0]
    assert all(figures.steps == 6 for figures in measured.values())
    assert measured["ours"].longest_milliseconds > measured["rival"].longest_milliseconds
    with pytest.raises(ValueError, match="not made for this"):
        measure_steps(calls, CPU, required=calls, **pace)
    assert measure_steps({"fails": fails}, CPU, required=(), **pace) == ({}, left_out)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("packing", ["document ids", "offsets"])
def test_a_model_trains_as_with_the_mask_as_a_tensor(packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(vocabulary=16, width=32, heads=2, layers=2, batch=2, length=320)
    rows = bench_steps._losses_rows(packing, "eager", sizes, CPU, torch.float32)
    ours, dense = (next(r for r in rows if r["who"] == who) for who in ("flexmasks", "SDPA + mask"))
    assert ours["losses"] == pytest.approx(dense["losses"], rel=1e-5)
    assert len(set(ours["losses"])) == 5
    monkeypatch.setattr(bench_steps, "_TOLERANCE", {torch.float32: -1.0})
    with pytest.raises(ValueError, match="the losses of flexmasks are"):
        bench_steps._losses_rows(packing, "eager", sizes, CPU, torch.float32)


@pytest.mark.gpu
def test_plans_do_not_wait_and_replays_plan_again(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    command = ["steps", "--device", "cuda", "--quick", "--json", str(file)]
    assert main([*command, "--only", "plan", "graph"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [r["synchronizations"] for r in rows if r["kind"] == "plan" and r["who"] == "flexmasks"] == [0]
    replayed = [r for r in rows if r["who"] == "flexmasks, replayed"]
    assert len(replayed) == 2
    for row in replayed:
        assert row["difference"] < 0.02
        assert row["compilations"] == 0


def test_the_tables_of_steps() -> None:
    def row(kind: str, case: str, who: str, ms: float, **more: Any) -> dict[str, Any]:
        figures = {"ms": ms, "alone_ms": 2 * ms, "first_s": 7.0, "cold": True, "compilations": 0, "longest_ms": 9.0}
        about = {"kind": kind, "case": case, "shape": "8x16x4096x64", "dtype": "bfloat16", "who": who}
        return {**about, **figures, "synchronizations": 0.0, "backend": "flex_flash", **more}

    model = {"model": "compiled", "layers": 12, "width": 1024}
    losses = {"kind": "losses", "case": "offsets", "model": "eager", "dtype": "bfloat16", "losses": [3.0, 2.0]}
    failed = {"left_out": {"flex_attention": "no kernel"}}
    rows = [
        row("plan", "documents", "flexmasks", 0.1), row("plan", "documents", "flex_attention", 0.2),
        row("loop", "documents", "flexmasks", 2.0, difference=0.01), row("loop", "documents", "flex_attention", 3.0),
        row("loop", "documents", "flexmasks, old tensors", 1.0),
        row("loop", "padding", "flexmasks", 2.0, cold=False, **failed),
        row("training", "document ids", "flexmasks", 80.0, **model),
        row("training", "document ids", "flex_attention", 88.0, **model),
        row("training", "offsets", "flex_attention", 90.0, **model, left_out={"flexmasks": "not yet"}),
        {**losses, "who": "flexmasks", "difference": 2e-3},
        row("graph", "documents", "flexmasks", 3.0), row("graph", "documents", "flexmasks, replayed", 2.0, **failed),
    ]  # fmt: skip
    machine = {"device": "H0", "device_type": "cuda", "torch": "2.0", "flash": "without flash-attn-4"}
    text = steps_tables.markdown({"machine": machine, "rows": rows})
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "On one H0, torch 2.0, without flash-attn-4, bfloat16; medians."
    for expected in (
        "| 8x16x4096 | flex_flash | 0.1 | 0.2 (2.00 x) | 0.2 | 0.4 (2.00 x) | 0 / 0 |",
        "| documents | 8x16x4096x64 | flex_flash | 2 | 1 | 2.00 | 3 (1.50 x) | 7 / 7 | 0 / 0 | 9 | 0 / 0 |",
        "| padding | 8x16x4096x64 | flex_flash | 2 | | | fails | | 0 / - | 9 | 0 / - |",
        "| document ids | compiled | 80 | 88 (1.10 x) | 7 / 7 | 0 / 0 | 0 / 0 |",
        "| offsets | compiled | fails | 90 | - / 7 | - / 0 | - / 0 |",
        "| documents | 8x16x4096x64 | flex_flash | 3 | 2 | fails |",
    ):
        assert expected in lines, "\n".join(lines)
    assert "differ from those of SDPA with the mask as a tensor by at most 0.002" in text
    assert "| waits |" not in steps_tables.markdown(
        {"machine": machine, "rows": [{**r, "synchronizations": None} for r in rows[:2]]}
    )


# --- the choice of a backend ---


@pytest.mark.slow
def test_figures_of_all_backends_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what their times depend on, and why a backend did not run."""
    uses = {"causal": bench_choice.FIT, "documents": bench_choice.CHECK}
    groups = [bench_choice.Group(mask, 16, (bench_choice.Case(use, 2, 256, 16),), 2, 2) for mask, use in uses.items()]
    monkeypatch.setattr(bench_choice, "groups", lambda: groups)
    monkeypatch.setattr(bench_choice, "choose", lambda call: ([BACKENDS["short"], BACKENDS["sdpa"]], {}))
    monkeypatch.setattr(bench_choice, "_MOST_CALLS", 2)
    file = tmp_path / "choice.json"
    assert main(["choice", "--device", "cpu", "--quick", "--json", str(file)]) == 0
    rows = [r for r in json.loads(file.read_text())["rows"] if r["gradients"]]
    assert [(r["mask"], r["new"]) for r in rows] == [("causal", False), ("documents", True), ("documents", False)]
    causal, documents, _ = rows
    assert (causal["rows"], causal["full"], causal["partial"], causal["reads"]) == (8, 0.5, 1, times.PLAIN)
    assert (documents["reads"], documents["has_tensors"]) == (times.READS_TENSORS, True)
    assert "it knows only" in documents["failed"]["sdpa"]
    assert all(r["ms"]["short"] > 0 for r in rows)
    assert "documents" in capsys.readouterr().out


def test_a_table_of_times_foretells_what_it_is_fitted_to() -> None:
    """What a head size was not measured with is as usual."""

    def row(size: int, n: int, full: int, reads: str) -> dict[str, Any]:
        us = size / 64 * n * (0.1 + 0.01 * full + (0.01 + 0.007 * bool(reads)) * 2)
        call = {"use": "fit", "gradients": False, "has_tensors": False, "new": False, "head_size": size, "heads": 1}
        call |= {"length": 128, "sequences": 0, "whole": 0}
        return {**call, "rows": n, "full": full, "partial": 2, "reads": reads, "ms": {"flex": 1e-3 * max(100, us)}}

    forms = [(64, times.PLAIN), (64, times.READS_DATA), (128, times.PLAIN)]
    rows = [row(size, n, full, form) for size, form in forms for n in (16, 2048, 4096) for full in (0, 4, 32)]
    made: dict[str, Any] = {}
    exec(choice_table.source(rows), made)
    assert made["HOST"] == {("flex", False, False): 100}
    for size in (64, 128):
        launch, each, full, plain, _, data = (x * 64 / size for x in made["DEVICE"]["flex", size, False])
        assert launch < 5
        assert (each + 2 * plain, full) == pytest.approx((0.12, 0.01), rel=0.05)
        assert data == pytest.approx(0.007, rel=0.05 if size == 64 else 0.5)


# --- packed documents ---


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_figures_of_documents_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "documents.json"
    command = ["documents", "--device", "cpu", "--quick", "--only", "4 / 2 heads", "--json", str(file)]
    assert main(command) == 0, capsys.readouterr().err
    rows = json.loads(file.read_text())["rows"]
    ours = [f"flexmasks{way}" for way in ("", ", repeated mask", ", held plan", ", packed", ", contiguous")]
    assert [(r["kind"], r["who"]) for r in rows] == [(k, w) for k in ("forward", "both") for w in ours]
    printed = capsys.readouterr().out
    for row in rows:
        assert row["who"] in printed
        assert row["ms"] > 0
        assert row["difference"] < 1e-5


@pytest.mark.usefixtures("uncompiled")
def test_a_wrong_output_of_documents_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_documents, "packed", lambda offsets, inner: flexmasks.get_mask(inner))
    with pytest.raises(ValueError, match=r"its output differs by .* from that of flexmasks"):
        bench_documents._rows(bench_documents._QUICK[0], CPU, runs=2)


@pytest.mark.parametrize("case", bench_documents._QUICK)
def test_documents_as_others_take_them(case: bench_documents.Case) -> None:
    ids = bench_documents.draw(case, torch.Generator().manual_seed(1))
    assert int(ids.max()) + 1 == case.documents
    seen = flexmasks.dense_mask(bench_documents.mask_of(case, ids), case.length, batch=case.batch)[:, 0]
    edges = bench_documents.intervals_of(ids, case.window)[0].view(3, case.batch, case.length, 1)
    keys = torch.arange(case.length)
    assert torch.equal((keys < edges[0]) | (keys >= edges[1]) & (keys < edges[2]), seen)
    offsets = bench_documents.offsets_of(ids).tolist()
    rows = [list(range(i * case.length, (i + 1) * case.length)) for i in range(case.batch)]
    flat = ids.flatten().tolist()
    firsts = [i for row in rows for i in row if i == row[0] or flat[i] != flat[i - 1]]
    assert offsets == [*firsts, case.batch * case.length]


def test_the_page_of_documents() -> None:
    def row(case: bench_documents.Case, kind: str, who: str, ms: float, **more: Any) -> dict[str, Any]:
        about = {"kind": kind, "case": case.mask, "shape": case.describe(), "tokens": case.batch * case.length}
        return {**about, "dtype": "bfloat16", "who": who, "ms": ms, "iqr": 0.1, "difference": 0.0, **more}

    long, _, short, _, batches, *_ = bench_documents._CASES
    rows = [
        row(long, "forward", "flexmasks", 1.15, backend="fa4"), row(long, "forward", "FA4 varlen", 1.0),
        row(long, "both", "flexmasks", 4.0, backend="fa4"), row(long, "both", "flexmasks, held plan", 3.33),
        row(long, "both", "FA4 varlen", 3.0), row(long, "both", "compiled flex", 6.0),
        row(short, "both", "flexmasks", 1.5, backend="flex"), row(short, "both", "FA4 varlen", 1.0),
        row(short, "both", "flexmasks, repeated mask", 1.1), row(batches, "both", "flexmasks", 2.0, backend="fa4"),
    ]  # fmt: skip
    rows[0]["left_out"] = {"cuDNN, ready plan": "ModuleNotFoundError: No module named 'cudnn'"}
    machine = {"device": "H0", "device_type": "cuda", "torch": "2.0", "flash": "flash-attn-4 1"}
    results = {"machine": machine, "rows": rows}
    text = bench_documents.markdown(results)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for expected in (
        "| causal & document, 32,768 tokens, 24 documents, 32 / 8 heads, D = 128 | 1.15 (1.15) / 4 (**1.33**) | | "
        "- / 3.33 (**1.11**) | 1 (1.00) / 3 (1.00) | - / 6 (2.00) |",
        "| causal & document, 4 x 8,192 tokens, 32 documents, 16 heads, D = 64 | - / 2 | | | | |",
        "| flexmasks | 1.15 to 1.15, 1 of 1 | 1.33 to 1.50, 1 of 2 |",
        "| flexmasks, repeated mask | | 1.10 to 1.10, 1 of 1 |",
        "| flexmasks, held plan | | 1.11 to 1.11, 0 of 1 |",
        "- cuDNN, ready plan: ModuleNotFoundError: No module named 'cudnn'",
    ):
        assert expected in lines, text
    assert "3 of 5 figures hold them, and those above are bold." in text
    assert "Not measured in this run: causal & document, 32,768 tokens, 48 documents, 24 heads, D = 64; " in text
    assert batches.describe() not in text.split("Not measured in this run: ")[1]
    assert "contiguous" not in text
    promised = [
        *rows,
        row(long, "both", "flexmasks, contiguous", 4.4),
        row(long, "forward", "flexmasks, contiguous", 1.0),
    ]
    text = bench_documents.markdown({"machine": machine, "rows": promised})
    assert "With `contiguous=True` a call takes 0.87 to 1.10 of the time without." in text
    assert "takes the backend fa4 or flex." in text
    assert bench_documents.headline(results) == (24, 4.0, 6.0, 3.0)
    told = bench_documents.sentence(results)
    assert told.endswith("32,768 tokens, 32 heads in groups of 4, for which FlashAttention 4's varlen function takes 3")
    chart = bench_documents.chart(results)
    widths = dict(re.findall(r">([^<>]+)</text>\n<rect x='210' y='\d+' width='([\d.]+)'", chart))
    assert float(widths["compiled flex"]) == pytest.approx(2 * 590 / 2.0, abs=0.1)
    assert "4 x 8,192" not in chart  # there is nothing to compare with


# --- interval masks of cuDNN ---


def _seen_in(func: Tensor, batch: int, length: int) -> Tensor:
    """Return the pairs that intervals show, [batch, length, length]."""
    edges, keys = func[0].view(-1, batch, length, 1), torch.arange(length)
    seen = keys < edges[0]
    for start, end in zip(edges[1::2], edges[2::2], strict=True):
        seen |= (keys >= start) & (keys < end)
    return seen


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package that attends by intervals as cuDNN's does, in plain operations."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, mask_plan: Tensor, deterministic: bool) -> Tensor:
        seen = _seen_in(mask_plan, q.shape[0], q.shape[1])[:, None]
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen)
        return torch.where(seen.any(-1, keepdim=True), out, 0.0).transpose(1, 2)

    package = types.ModuleType("cudnn")
    package.create_mask_plan = lambda func, q, k, v, build_backward: func  # type: ignore[attr-defined]
    package.flex_attn_func = attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cudnn", package)
    return package


@pytest.mark.parametrize("mask", bench_intervals._MASKS)
def test_intervals_show_what_the_mask_shows(mask: str) -> None:
    for batch, length in ((2, 48), (1, 130)):
        case = bench_intervals.Case(mask, batch, length, 2, 16)
        made = bench_intervals.mask_of(case, torch.Generator().manual_seed(1))()
        seen = flexmasks.dense_mask(made, length, batch=batch).expand(batch, 1, length, length)[:, 0]
        assert torch.equal(_seen_in(bench_intervals.intervals_of(seen), batch, length), seen)


@pytest.mark.usefixtures("cudnn")
def test_figures_of_intervals_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_intervals, "attention", functools.partial(flexmasks.attention, backend="reference"))
    monkeypatch.setattr(bench_intervals, "_SECONDS", 0.0)
    file = tmp_path / "intervals.json"
    names = ["grouped_tril", "prefix_lm, "]
    assert main(["intervals", "--device", "cpu", "--only", *names, "--json", str(file)]) == 0, capsys.readouterr().err
    rows = json.loads(file.read_text())["rows"]
    assert [(r["case"], r["who"] == "cuDNN", r["deterministic"]) for r in rows] == [
        (case, is_cudnn, mode)
        for case in ("grouped_tril", "prefix_lm")
        for mode in (False, True)
        for is_cudnn in (True, False)
    ]
    for row in rows:
        assert row["error"] < 1e-5
        assert ("layers_ms" in row) == (row["case"] == "grouped_tril")  # the other has one plan for all steps
        assert ("plan_ms" in row) == (row["who"] == "cuDNN")
        assert not row["deterministic"] or row["same_bits"]


def test_wrong_intervals_are_left_out(cudnn: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "create_mask_plan", lambda func, *_, build_backward: func.roll(1, 2))
    monkeypatch.setattr(bench_intervals, "attention", functools.partial(flexmasks.attention, backend="reference"))
    made = bench_intervals.ready(bench_intervals.Case("prefix_lm", 1, 64, 2, 16), CPU)
    assert len(made.ways) == 2
    assert all("its results differ by" in why for why in made.left_out.values()), made.left_out
    assert len(made.left_out) == 2


def test_the_page_of_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(mask: str, who: str, mode: bool = False, is_auto: bool = True, **figures: float) -> dict[str, Any]:
        about = {"case": mask, "shape": "[1, 2, 64, 16]", "who": who, "deterministic": mode, "dtype": "bfloat16"}
        return about | {"is_auto": is_auto and who != "cuDNN"} | figures

    def told(rows: list[dict[str, Any]]) -> str:
        return bench_intervals.markdown({"machine": machine, "rows": rows})

    monkeypatch.setattr(bench_intervals, "_CASES", [bench_intervals.Case(mask, 1, 64, 2, 16) for mask in "abcd"])
    rows = [
        row("a", "flex", gpu_ms=2.0, host_ms=0.4, ms=2.5, new_ms=3.0, layers_ms=2.4), row("a", "flex_flash", ms=2.4),
        row("a", "cuDNN", gpu_ms=1.0, host_ms=0.8, ms=1.5, new_ms=4.0, layers_ms=2.0, plan_ms=0.9),
        row("a", "flex", True, layers_ms=2.4), row("a", "cuDNN", True, layers_ms=2.4),
        row("b", "flex", ms=2.4), row("b", "cuDNN", ms=1.2), row("c", "flex", ms=1.2), row("c", "cuDNN", ms=1.1),
    ]  # fmt: skip
    machine = {"device": "H0", "device_type": "cuda", "torch": "2.0", "cudnn": "nvidia-cudnn-frontend 1"}
    text = told(rows)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert (
        "| a | [1, 2, 64, 16] | 2 / 1 (2.00) | 0.4 / 0.8 (0.50) | 2.4 / 1.5 (1.60) | 3 / 4 (0.75) | 2.4 / 2 (1.20) | "
        "0.9 | 2.4 / 2.4 (1.00) |"
    ) in lines, text
    assert "| c | [1, 2, 64, 16] | | | 1.2 / 1.1 (1.09) | | | | |" in lines, text
    assert "take 0.50 to 0.50 of the GPU's time" in text
    assert (
        "takes the host 0.80 to 0.80 ms, against 0.40 to 0.40 ms of the others, and each plan another 0.90 to 0.90 ms"
        in text
    )
    assert "at least 1.2 times as fast in 2 of 3 cases: a [1, 2, 64, 16] (1.20); b [1, 2, 64, 16] (2.00)." in text
    assert "in 0 of 1 cases in deterministic mode. So these figures do not ask for a backend" in text
    assert "Not measured in this run: [1, 2, 64, 16] d." in text
    cudnn = row("d", "cuDNN", ms=1.0)
    text = told([*rows, row("d", "flex", ms=2.4), cudnn])
    assert "So the rule asks for a backend" in text
    assert "Not measured" not in text
    text = told([*rows, row("d", "flex", is_auto=False, ms=2.4), cudnn])
    assert "2 of 3 cases" in text
    assert "1 more are open: it is as much faster" in text
    assert "a backend that was not: d [1, 2, 64, 16] (2.40)." in text
    of_mode = [row(mask, who, True, ms=1.0) for mask in "bcd" for who in ("flex", "cuDNN")]
    assert "So the rule asks for no backend" in told([*rows, *of_mode, row("d", "flex", is_auto=False, ms=1.1), cudnn])


# --- masks as functions and as data ---


@pytest.fixture
def uncompiled_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are SDPA with what the lists of blocks and the function show, because compiling takes long."""

    def attend(q: Tensor, k: Tensor, v: Tensor, score_mod: None, block_mask: BlockMask, *_: Any) -> tuple[Tensor, None]:
        (height, width), length = block_mask.BLOCK_SIZE, q.shape[2]
        partial, full = (
            blocks.repeat_interleave(height, 2).repeat_interleave(width, 3)[..., :length, :length]
            for blocks in of_block_mask(block_mask)
        )
        seen = create_mask(block_mask.mask_mod, 1, q.shape[1], length, length, device="cpu")
        return scaled_dot_product_attention(q, k, v, attn_mask=(seen & partial) | full), None

    def new_kernel(key: Hashable, is_static: bool = False) -> Any:
        kernel = flex_kernels._Kernel(attend, is_static, on_gpu=False)
        flex_kernels.COMPILED.put(key, (), kernel, 1)
        return kernel

    monkeypatch.setattr(flex_kernels, "_new_kernel", new_kernel)
    yield
    flexmasks.clear_caches()


@pytest.mark.usefixtures("uncompiled_kernels")
def test_figures_of_both_forms_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.json"
    command = ["data", "--device", "cpu", "--quick", "--json", str(file)]
    names = ["causal", "tiles of", "residues"]
    assert main([*command, "--only", *names]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())
    cases = [c.name for c in bench_data.cases(bench_data._QUICK, CPU) if any(name in c.name for name in names)]
    assert [(r["case"], r["who"]) for r in results["rows"]] == [(c, f) for c in cases for f in ("function", "data")]
    for row in results["rows"]:
        assert row["case"] in printed
        assert row["backend"] == "flex"
        assert min(row["forward_ms"], row["data_ms"], 1 + row["first_s"]) > 0
        assert "backward_ms" not in row
        assert row["difference"] == 0
        assert (
            row["data_bytes"] == (1 << 18) + 4 * 2 * 8 * 8
        )  # the least for words, and a table of blocks for two heads
    causal = next(row for row in results["rows"] if row["case"] == "causal")
    assert [causal[key] for key in ("partial", "full", "different")] == [8, 28, 1]
    assert "| causal | 1x2x256x32 | 8 / 28 | 1 | 0.26 |" in " ".join(bench_data.markdown(results).split())


def _data_rows(case: bench_data.Case) -> list[dict[str, Any]]:
    return bench_data._rows(case, "flex", bench_data._QUICK, CPU, runs=2)


@pytest.mark.usefixtures("uncompiled_kernels")
def test_forms_that_cannot_run_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    causal = bench_data.Case("causal", 64, flexmasks.get_mask("causal"))
    monkeypatch.setattr(bench_data.forms, "why_bits", lambda call: "it overflows")
    (row,) = _data_rows(causal)
    assert (row["who"], row["left_out"], row["difference"]) == ("data", {"function": "it overflows"}, None)

    def too_large(*arguments: Any) -> None:
        raise bench_data.TooLargeForData("too many bits")

    monkeypatch.setattr(bench_data, "data_of", too_large)
    (row,) = _data_rows(causal)
    assert (row["who"], row["left_out"]) == ("", {"function": "it overflows", "data": "too many bits"})
    monkeypatch.setattr(bench_data.forms, "why_bits", lambda call: "")
    (row,) = _data_rows(causal)
    assert (row["who"], row["left_out"]) == ("function", {"data": "too many bits"})


@pytest.mark.usefixtures("uncompiled_kernels")
def test_different_outputs_of_both_forms_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    of_full = flexmasks.block_mask("strided", 64, block_size=32, stride=7)
    monkeypatch.setattr(mask_plan, "data_of", lambda given, *sizes: data_of(of_full, *sizes[:2]))
    with pytest.raises(ValueError, match="the outputs by function and by data differ by"):
        _data_rows(bench_data.Case("strided", 64, flexmasks.get_mask("strided", stride=9)))


def test_the_table_of_both_forms() -> None:
    def row(case: str, who: str, ms: float, backend: str = "flex", **more: Any) -> dict[str, Any]:
        about = {"case": case, "shape": "1x8x8192x128", "dtype": "bfloat16", "backend": backend, "who": who}
        about |= {"partial": 1234, "full": 5, "different": 6, "data_bytes": 2_100_000, "data_ms": 0.5}
        return {**about, "forward_ms": ms, "backward_ms": 2 * ms, "first_s": 7.0, "difference": 0.001, **more}

    nothing = {"case": "large", "shape": "1x8x99x128", "dtype": "bfloat16", "backend": "flex_flash", "who": ""}
    rows = [
        row("causal", "function", 2.0), row("causal", "data", 3.0),
        row("bits", "function", 2.0), row("bits", "data", 1.0),
        row("bits", "data", 1.0, "flex_flash", left_out={"function": "wrong"}, difference=None),
        {**nothing, "partial": 1, "full": 0, "left_out": {"function": "wrong", "data": "too large"}},
    ]  # fmt: skip
    machine = {"device": "H0", "device_type": "cuda", "torch": "2.0", "flash": "flash-attn-4 1"}
    text = bench_data.markdown({"machine": machine, "rows": rows})
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "On one H0, torch 2.0, flash-attn-4 1, bfloat16; medians of interleaved runs."
    for expected in (
        "| causal | 1x8x8192x128 | 1,234 / 5 | 6 | 2.10 | 2 / 4 | 3 / 6 | 1.50 x | 7.0 / 7.0 | 0.5 |",
        "| bits | 1x8x8192x128 | 1,234 / 5 | 6 | 2.10 | 2 / 4 | 1 / 2 | 0.50 x | 7.0 / 7.0 | 0.5 |",
        "Data take 0.50 to 1.50 times as long as the function. The outputs of both forms differ by at most 0.001.",
        "| bits | 1x8x8192x128 | 1,234 / 5 | 6 | 2.10 | left out | 1 / 2 | | - / 7.0 | 0.5 |",
        "| large | 1x8x99x128 | 1 / 0 | | | left out | left out | | - / - | |",
        "- bits, function: wrong",
        "- large, data: too large",
    ):
        assert expected in lines, "\n".join(lines)
