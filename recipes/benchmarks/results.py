"""Steps of a benchmark, and the JSON file that collects their figures."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from flexmasks.bench.clock import device_name, progress
from flexmasks.pictures.output import write
from flexmasks.spec.registry import list_masks

Row = dict[str, Any]


def choose_device(name: str | None) -> torch.device:
    """Return the named device, by default a GPU if there is one.

    Raises ValueError for another kind of device, or for a GPU that the machine does not have.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"benchmark: `--device` must be cpu or cuda, got {name!r}.")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("benchmark: torch finds no GPU on this machine; `--device cpu` measures the CPU.")
    if (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise ValueError(f"benchmark: torch finds {torch.cuda.device_count()} GPUs, so no {name}.")
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def machine(device: torch.device) -> dict[str, str]:
    """Return the device, torch and Python, on which figures depend."""
    return {
        "device": device_name(device).removeprefix("NVIDIA "),
        "device_type": device.type,
        "torch": torch.__version__.partition("+")[0],
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def machine_line(results: dict[str, Any]) -> str:
    """Return a line that names the machine, for the top of a table."""
    return ", ".join(text for name, text in results["machine"].items() if name != "device_type")


def flash_version() -> str:
    """Return the version of flash-attn-4, or that it is not installed."""
    try:
        return f"flash-attn-4 {importlib.metadata.version('flash-attn-4')}"
    except importlib.metadata.PackageNotFoundError:
        return "without flash-attn-4"


def chosen_steps(
    steps: Mapping[str, Callable[[], list[Row]]], only: Iterable[str]
) -> dict[str, Callable[[], list[Row]]]:
    """Return the steps that have one of the texts in their descriptions; without texts, all.

    Raises ValueError if there are none.
    """
    only = list(only)
    chosen = {name: step for name, step in steps.items() if not only or any(text in name for text in only)}
    if not chosen:
        raise ValueError(f"benchmark: nothing to measure is named {only}; there are {'; '.join(steps)}.")
    return chosen


def measured_on(results: dict[str, Any], gpus: str = "one") -> str:
    """Return the beginning of a sentence: the machine, libraries and dtypes of a run."""
    about = results["machine"]
    device = about["device"] if about["device_type"] == "cpu" else f"{gpus} {about['device']}"
    libraries = ", ".join([f"torch {about['torch']}", *([about["flash"]] if "flash" in about else [])])
    dtypes = " and ".join(dict.fromkeys(r["dtype"] for r in results["rows"]))
    return f"On {device}, {libraries}, {dtypes}"


def text_table(results: dict[str, Any], columns: Iterable[tuple[str, str]]) -> str:
    """Return the figures of one run as text; columns are headers and keys of rows."""
    header, keys = zip(*columns, strict=True)
    rows = [[r.get(key) for key in keys] for r in results["rows"]]
    return f"{machine_line(results)}\n{tabulate(rows, headers=header, floatfmt='.4g', missingval='')}"


def check_mask_names(names: Iterable[str], cases: Iterable[str]) -> None:
    """Raise ValueError for a name of no registered mask and no case."""
    accepted = [*(mask.name for mask in list_masks()), *cases]
    for name in names:
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`python -m flexmasks list` names them."
            raise ValueError(f"benchmark: no mask {name!r} to measure; {hint}")


def run_steps(
    results: dict[str, Any], steps: Mapping[str, Callable[[], list[Row]]], file: str | None, resume: bool = False
) -> None:
    """Run the steps, and write the results to the file after each.

    The rows of the steps are added to results["rows"]. results["measured"] holds the descriptions of the steps that
    ran. A step that raises is named with its error in results["failed"] and on stderr, and the other steps still run.

    Args:
        results: has "benchmark", "machine" and "rows".
        steps: functions that return rows, by their descriptions.
        file: the JSON file, or None.
        resume: keep the file's rows, which must be of this benchmark and machine, and run the missing steps.
    """
    results["measured"] = []
    if file is not None and (Path(file).is_dir() or not os.access(Path(file).resolve().parent, os.W_OK)):
        raise ValueError(f"benchmark: {file} cannot be written.")
    if resume and file is not None and Path(file).exists():
        results |= _earlier(results, file)
    for number, (description, rows) in enumerate(steps.items(), 1):
        if description in results["measured"]:
            continue
        progress(f"{number} of {len(steps)}: {description}")
        try:
            results["rows"] += rows()
            results["measured"].append(description)
        except Exception as error:  # a user's mask may raise, or memory may run out
            results.setdefault("failed", {})[description] = f"{type(error).__name__}: {error}"[:2000]
        if file is not None:
            write(file, json.dumps(results, indent=1) + "\n")
    progress("")
    for description, reason in results.get("failed", {}).items():
        print(f"{description} failed: {reason.splitlines()[0]}", file=sys.stderr)


class Benchmark(NamedTuple):
    """A benchmark that runs step by step."""

    name: str
    todo: Callable[[torch.device, bool], dict[str, Callable[[], list[Row]]]]  # by descriptions, given `quick` too
    table: Callable[[dict[str, Any]], str]  # the figures of one run as text


def run_benchmark(
    benchmark: Benchmark,
    only: Iterable[str] = (),
    *,
    quick: bool = False,
    device: str | None = None,
    file: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Run a benchmark, print a table, and write the figures to a file.

    Args:
        benchmark: what to measure.
        only: measure only what has one of these texts in its description.
        quick: few and small steps, to try the benchmark itself.
        device: cuda or cpu; by default a GPU if the machine has one.
        file: the JSON file.
        resume: keep the rows that the file has of an earlier run.
    """
    at = choose_device(device)
    chosen = chosen_steps(benchmark.todo(at, quick), only)
    about = machine(at)
    if at.type == "cuda":
        about["flash"] = flash_version()
    results: dict[str, Any] = {"benchmark": benchmark.name, "machine": about, "rows": []}
    run_steps(results, chosen, file, resume)
    print(benchmark.table(results))
    return results


def _earlier(results: dict[str, Any], file: str) -> dict[str, Any]:
    """Return an earlier run's rows and steps, or raise ValueError if they do not match."""
    try:
        earlier = json.loads(Path(file).read_text())
    except ValueError:
        earlier = None
    same = isinstance(earlier, dict) and earlier.get("benchmark") == results["benchmark"] and "measured" in earlier
    if not same:
        raise ValueError(f"benchmark: {file} holds no results of this benchmark that can be resumed.")
    if earlier["machine"] != results["machine"]:
        raise ValueError(f"benchmark: {file} is of another machine or another torch: {earlier['machine']}.")
    return {name: earlier[name] for name in ("rows", "measured")}
