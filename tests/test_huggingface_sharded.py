"""Hugging Face's models whose sequence two processes hold together, against one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

import huggingface_jobs as jobs
from processes import Processes

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    processes = Processes(2)
    yield processes
    processes.close()


@pytest.mark.parametrize(
    ("name", "kind", "order"),
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
)
def test_a_model_equals_that_of_one_process(two: Processes, name: str, kind: str, order: str) -> None:
    assert max(two.run(jobs.compare, name, kind, order)) < TOLERANCE
