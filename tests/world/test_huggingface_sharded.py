"""Hugging Face's models whose sequence two processes hold together, against one process."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

import huggingface_jobs as jobs
from helpers import one_in

from benchmarks.processes import Processes

TOLERANCE = 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "order"),
    one_in(
        2,
        [
            ("Llama", "rows", "natural"),
            ("Llama", "rows", "balanced"),
            ("Llama", "packed", "natural"),
            ("Llama", "packed", "balanced"),
            ("Llama", "packed", "uneven"),
            ("Llama", "left", "balanced"),
            ("Llama", "right", "natural"),
            ("Mistral", "rows", "natural"),
            ("Mistral", "packed", "balanced"),
            ("Gemma2", "packed", "natural"),
            ("Gemma2", "left", "balanced"),
            ("GptOss", "rows", "balanced"),
            ("GptOss", "packed", "natural"),
            ("Llama4", "rows", "balanced"),
            ("Llama4", "packed", "balanced"),
            ("Llama4", "left", "natural"),
            ("GPT2", "rows", "natural"),
            ("Bert", "rows", "natural"),
            ("Bert", "right", "balanced"),
            ("ModernBert", "rows", "balanced"),
            ("ModernBert", "right", "natural"),
        ],
    ),
)
def test_a_model_equals_that_of_one_process(two: Processes, name: str, kind: str, order: str) -> None:
    remaps = hasattr(jobs.masking_utils, "remap_positions_for_packed_sequence")
    if (name, kind) == ("Llama4", "packed") and not remaps:
        pytest.skip("this transformers counts chunks of packed rows from the start of the row")
    assert max(two.run(jobs.compare, name, kind, order)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("how", ["heads", "gather", "seen"])
def test_each_way_with_gradient_checkpointing(two: Processes, how: str) -> None:
    assert max(two.run(jobs.compare, "Gemma2", "packed", "balanced", how, True)) < TOLERANCE


@pytest.mark.parametrize(("name", "kind"), [("Llama", "packed"), ("Llama", "left"), ("Gemma2", "packed")])
def test_a_step_gathers_once(two: Processes, name: str, kind: str) -> None:
    assert two.run(jobs.gathers, name, kind) == [1, 1]


@pytest.mark.parametrize("kind", ["rows", "packed"])
def test_layers_without_masks(two: Processes, kind: str) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert max(two.run(jobs.without_masks, kind)) < TOLERANCE


def test_inputs_cut_by_torch(two: Processes) -> None:
    assert max(two.run(jobs.torch_buffers)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name", "layers"),
    [
        ("unchecked", "Gemma2", 2),
        *((way, "Mistral", 1) for way in ("inference", "compile")),  # each kind of layer is compiled for seconds
        *(pytest.param(way, "Gemma2", 2, marks=pytest.mark.campaign) for way in ("inference", "compile")),
    ],
)
def test_other_ways_to_run_a_model(two: Processes, way: str, name: str, layers: int) -> None:
    assert max(two.run(jobs.other_ways, way, name, layers)) < TOLERANCE


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("positions", "position_ids of each process count from 0"),
        ("generate", "position_ids of each process count from 0"),
        ("cache", "goes on with a key-value cache"),
        ("whole padding", "must be this process's part"),
        ("padding", "another `attention_mask or position_ids`"),
        ("mask", "got a mask between the tokens of its own part"),
        ("one mask", "got a mask between the tokens of its own part|rank 1 of the mesh has raised an error"),
        ("order", "has 40 tokens, but the model got 48|has 56 tokens, but the model got 48"),
        ("forgotten order", "pass `order`, the Order of these processes"),
        ("another order", "has another `order` than this process"),
        ("table", "has tensors that each process knows only for its own part"),
        ("bias", "adds a bias between the tokens of its own part"),
        ("masks", "call it outside of `sharded`"),
        ("packed", "leave out cu_seq_lens_q"),
    ],
)
def test_errors_on_every_process(two: Processes, what: str, message: str) -> None:
    for _, error in two.try_run(jobs.wrong, what):
        last = error.strip().splitlines()[-1]
        assert "ValueError" in last
        assert re.search(message, last), last
    assert max(two.run(jobs.compare, "Llama", "rows")) < TOLERANCE  # the processes are as before
