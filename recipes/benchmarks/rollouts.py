"""`python recipes/benchmark.py rollouts`: a policy step on 4, 8 and 16 answers to each prompt, as trees and padded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps import QUICK, Pace
from benchmarks.steps_tables import github_table
from benchmarks.trees import PACE, PACKED, TREES, Sizes, Training, steps_of, training_rows, ways_of

_PADDED = "padded"
_LARGE = Sizes(prompts=4, prompt=2000, answer=300)
_SMALL = Sizes(vocabulary=64, width=64, heads=2, layers=2, prompts=2, prompt=64, answer=16)


def _rows(sizes: Sizes, device: torch.device, dtype: torch.dtype, pace: Pace) -> list[Row]:
    """Return the figures of steps whose loss reads the tokens of answers only, as those of trainers do."""
    steps, all_ways = steps_of(sizes, device), ways_of(sizes)
    ways = {
        who: Training(all_ways[who], sizes, steps, device, dtype, answers_only=True) for who in (TREES, PACKED, _PADDED)
    }
    return training_rows("rollouts", ways, sizes, dtype, pace, required=tuple(ways))


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_large = device.type == "cuda" and not quick
    sizes, pace = (_LARGE, PACE) if is_large else (_SMALL, QUICK)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {
        f"{answers} answers to each of {sizes.prompts} prompts of {sizes.prompt}": functools.partial(
            _rows, sizes._replace(answers=answers), device, dtype, pace
        )
        for answers in (4, 8, 16)
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("shape", "shape"), ("way", "who"), ("ms", "ms"), ("IQR", "iqr"), ("tokens/s", "tokens_per_s"),
        ("computed", "computed_tokens"), ("peak GB", "peak_gb"), ("first s", "first_s"),
        ("compiles later", "compilations"), ("waits", "synchronizations"), ("difference", "difference"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run, and what trees save."""
    rows: list[list[str]] = []
    saved: list[str] = []
    shapes: dict[str, dict[str, Row]] = {}
    for row in results["rows"]:
        shapes.setdefault(row["shape"], {})[row["who"]] = row
    for shape, by_who in shapes.items():
        prompts, answers, prompt, answer = shape.split("x")
        ours = by_who[TREES]
        rows += [
            [
                answers, who, f"{r['computed_tokens']:,}", f"{r['ms']:.4g}", f"{r['ms'] / ours['ms']:.2f} x",
                f"{r['peak_gb']:.3g}", f"{r['difference']:.1e}",
            ]
            for who, r in by_who.items()
        ]  # fmt: skip
        tokens, time = (1 - ours[key] / by_who[_PADDED][key] for key in ("computed_tokens", "ms"))
        saved.append(f"- {answers} answers: {tokens:.0%} of the tokens and {time:.0%} of the time of padded batches.")
    header = ["answers", "way", "computed tokens", "ms", "against trees", "peak, GB", "difference of losses"]
    first = results["rows"][0]
    return "\n\n".join([
        f"{measured_on(results)}; medians. A model of {first['case']}; {prompts} prompts of {prompt} tokens, and "
        f"answers of {answer} tokens in the mean.",
        github_table(rows, header),
        "What trees save:",
        "\n".join(saved),
    ])  # fmt: skip


BENCHMARK = Benchmark("rollouts", _todo, table)
