"""`python recipes/benchmark.py wild`: masks of other projects, planned and computed, against torch."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from benchmarks.loops import compiled_flex
from benchmarks.memory import peak_bytes
from benchmarks.results import Benchmark, Row, text_table
from benchmarks.runner import measure_passes
from benchmarks.steps_tables import github_table
from benchmarks.wild_masks import WILD, Pair, Wild
from flexmasks.attention import attention, block_mask, explain
from flexmasks.bench.clock import interleaved, wall_milliseconds
from flexmasks.cache import clear_caches
from flexmasks.planning import plan
from flexmasks.spec.arguments import get_mask

OURS, PEER = "flexmasks", "flex_attention"
LENGTHS = (512, 2000)  # at which each function is compared with its name, besides that of the measurement
_RUNS = {"cuda": 9, "cpu": 5}
_HEADS, _SIZE = 16, 64  # of attention
# Attention compiles for each mask: those whose kernels differ most.
_ATTENDED = (
    "DFlash", "Trees of rollouts", "Self-Forcing, teacher", "Radial attention", "BAGEL", "Gemma 3, window layers",
    "Qwen2.5-VL, windows", "Block diffusion",
)  # fmt: skip


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    steps: dict[str, Callable[[], list[Row]]] = {
        f"{name}, planning": functools.partial(_planning, wild, device, quick) for name, wild in WILD.items()
    }
    if device.type == "cuda":
        passes = {name: functools.partial(_attention, WILD[name], device, quick) for name in _ATTENDED}
        steps |= {f"{name}, forward and backward": step for name, step in passes.items()}
    return steps


def _planning(wild: Wild, device: torch.device, quick: bool) -> list[Row]:
    """Return what it takes to find the blocks of both masks, and on a CPU whether they are equal.

    function_ms, named_ms: without what earlier calls left in caches.
    torch_ms: create_block_mask, on a CPU compiled, and torch_first_s its first call there. For a GPU Triton compiled
        one of the functions (DFlash's) for more than a minute, and projects call create_block_mask as it is, too.
    function_mb, named_mb, torch_mb: the most memory of a GPU.
    same: all three find the same lists of blocks.

    On a CPU all times are processor time, which other work does not change.
    """
    about: Row = {"kind": "planning", "case": wild.name}
    if device.type == "cpu":
        lengths = LENGTHS[:1] if quick else (*LENGTHS, wild.length)
        compared = [wild.pair(length).compare() for length in lengths]
        proof = wild.pair(LENGTHS[0]).proof()
        about |= {"at": [*lengths], "equal": all(one.equal for one in compared), "compare": str(compared[-1])}
        about["proof"] = str(proof) if proof.verdict == "proved" else ""
    pair = wild.pair(LENGTHS[0] if quick else wild.length, device)
    sizes: dict[str, Any] = {"batch": 1, "heads": pair.heads}

    def ours(mask: Any, q_offset: int) -> BlockMask:
        clear_caches()
        return block_mask(mask, pair.q_len, pair.kv_len, device=device, check=True, q_offset=q_offset, **sizes)

    found = [functools.partial(ours, pair.function, 0), functools.partial(ours, pair.named, pair.q_offset)]
    calls: dict[str, Callable[[], object]] = dict(zip(("function", "named"), found, strict=True))
    create = _created(create_block_mask, pair, device)
    if device.type == "cpu":
        torch.compiler.reset()
        compiled = _created(torch.compile(create_block_mask, dynamic=False), pair, device)
        start = _processor_seconds()
        try:
            compiled()
            create = compiled
        except Exception as error:  # torch then offers the function as it is, which takes memory of queries x keys
            about["torch_fails"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
            start = _processor_seconds()
            create()
        about["torch_first_s"] = round(_processor_seconds() - start, 2)
    made = _lists(create())
    about["same"] = all(torch.equal(a, b) for one in found for a, b in zip(_lists(one()), made, strict=True))
    del made
    calls["torch"] = create
    times = interleaved(calls, device, _RUNS[device.type], _milliseconds)
    if device.type == "cuda":
        about |= {f"{name}_mb": round(peak_bytes(call, device) / 1e6, 2) for name, call in calls.items()}
    blocks = get_mask(pair.function).blocks(pair.q_len, pair.kv_len, device=device, q_offset=0, **sizes)
    about |= {"q_len": pair.q_len, "kv_len": pair.kv_len, "heads": pair.heads}
    about |= {f"{name}_ms": float(f"{ms:.4g}") for name, (ms, _) in times.items()}
    about |= {"blocks": blocks.total, "full": blocks.full, "partial": blocks.partial, "undecided": blocks.undecided}
    clear_caches()
    return [about]


def _created(create: Callable[..., BlockMask], pair: Pair, device: torch.device) -> Callable[[], BlockMask]:
    return lambda: create(pair.function, 1, pair.heads, pair.q_len, pair.kv_len, device=str(device))


def _processor_seconds() -> float:
    """Return the processor's time for this process and for those that it waited for."""
    return sum(os.times()[:4])


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return wall_milliseconds(call, device)
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def _lists(made: BlockMask) -> list[Tensor]:
    return [part for part in made.as_tuple() if isinstance(part, Tensor)]


def _attention(wild: Wild, device: torch.device, quick: bool) -> list[Row]:
    """Return the times of attention with the named mask, and of torch's with the function."""
    pair = wild.pair(LENGTHS[0] if quick else wild.length, device)
    heads = pair.heads if pair.heads > 1 else _HEADS
    dtype = torch.bfloat16
    shapes = [(1, heads, n, _SIZE) for n in (pair.q_len, pair.kv_len, pair.kv_len)]
    inputs = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    held = plan(pair.named, pair.q_len, pair.kv_len, batch=1, device=device, q_offset=pair.q_offset)
    made = _created(create_block_mask, pair, device)()
    torch.compiler.reset()
    flex = compiled_flex()
    ways: dict[str, Callable[..., Tensor]] = {
        OURS: lambda q, k, v: attention(q, k, v, mask=held),
        PEER: lambda q, k, v: flex(q, k, v, block_mask=made),
    }
    measured, left_out = measure_passes(ways, inputs, runs=_RUNS[device.type], required={OURS})
    rows: list[Row] = []
    for who, figures in measured.items():
        about: Row = {"kind": "attention", "case": wild.name, "who": who, "shape": "x".join(map(str, shapes[0]))}
        if who == OURS:
            about |= {"backend": explain(*inputs, mask=held).backend, "left_out": left_out}
        else:
            ours, theirs = (measured[name].output.float() for name in (OURS, who))
            about["error"] = float(f"{float((ours - theirs).norm() / theirs.norm()):.2g}")
        rows.append(about | figures.entries())
    clear_caches()
    return rows


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("what", "kind"), ("mask", "case"), ("queries", "q_len"), ("keys", "kv_len"), ("function, ms", "function_ms"),
        ("name, ms", "named_ms"), ("torch, ms", "torch_ms"), ("torch, first s", "torch_first_s"), ("same", "same"),
        ("blocks", "blocks"), ("full", "full"), ("partial", "partial"), ("looked at", "undecided"), ("who", "who"),
        ("backend", "backend"), ("forward, ms", "forward_ms"), ("backward, ms", "backward_ms"), ("first s", "first_s"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(runs: list[dict[str, Any]]) -> str:
    """Return the tables of the runs: the masks, their planning on each device, and attention.

    runs: the results of a CPU, and of a GPU if there are some.
    """
    parts = ["## The masks", _masks(runs[0])]
    for run in runs:
        parts += [f"## Planning on {_device(run)}", _planned(run)]
    for run in runs:
        rows = [row for row in run["rows"] if row["kind"] == "attention"]
        if rows:
            parts += [f"## Attention on {_device(run)}", _attended(run["machine"], rows)]
    return "\n\n".join(parts)


def _device(run: dict[str, Any]) -> str:
    return "a CPU" if run["machine"]["device_type"] == "cpu" else f"one {run['machine']['device']}"


def _masks(run: dict[str, Any]) -> str:
    """Return where each mask is defined, what it is here, and what `compare` says."""
    found = {row["case"]: row for row in run["rows"] if row["kind"] == "planning"}
    rows = [
        [
            name,
            place(wild),
            _code(wild.expression),
            said(found[name]) if name in found else "not measured",
        ]
        for name, wild in WILD.items()
    ]
    return github_table(rows, ["mask", "defined in", "here", "`compare` says"])


def place(wild: Wild) -> str:
    """Return where the mask is defined, in Markdown."""
    project = f"[{wild.project}](https://github.com/{wild.project})"
    return ", ".join([project, *map(_code, wild.file.split(": ")), wild.version])


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def said(row: Row) -> str:
    """Return what `compare` says of a function and its name: that it is proved, or how many pairs are the same."""
    if row["proof"]:
        return str(row["proof"]).removeprefix("Proof(").partition(": ")[0]
    at = ", ".join(f"{length:,}" for length in row["at"])
    return f"{row['compare'].rpartition(': ')[2].removesuffix(')')}; the same at {at} tokens"


def _planned(run: dict[str, Any]) -> str:
    by_name = {row["case"]: row for row in run["rows"] if row["kind"] == "planning"}
    rows = [by_name[name] for name in WILD if name in by_name]
    same = sum(row["same"] for row in rows)
    times = [row["torch_ms"] / row["function_ms"] for row in rows]
    faster = [row["case"] for row in rows if row["torch_ms"] < row["function_ms"]]
    exact = sum(row["undecided"] <= row["partial"] for row in rows)
    machine = run["machine"]
    time_is, torch_is = "", "create_block_mask is called as it is, not compiled; in brackets the most megabytes"
    if machine["device_type"] == "cpu":
        time_is = ", processor time"
        torch_is = "create_block_mask is compiled for the function, and its first call takes the seconds in brackets"
    about = (
        f"On {machine['device']}, torch {machine['torch']}; milliseconds{time_is}, medians. The function as the "
        "project has it and the mask of this library are planned without what earlier calls left in caches; "
        f"{torch_is}. For {same} of {len(rows)} masks all three find the same lists of blocks, and for {exact} "
        "functions only partial blocks are looked at element by element. In the median create_block_mask takes "
        f"{statistics.median(times):,.3g} times as long as planning the "
        f"function; it is faster for {'; '.join(faster) or 'none'}."
    )
    cells = [
        [
            row["case"],
            f"{row['q_len']:,} x {row['kv_len']:,}" + (f", {row['heads']} heads" if row["heads"] > 1 else ""),
            f"{row['full']:,}, {row['partial']:,} of {row['blocks']:,}",
            f"{row['undecided']:,}",
            f"{row['function_ms']:.3g}" + _brackets(row, "function_mb"),
            f"{row['named_ms']:.3g}" + _brackets(row, "named_mb"),
            f"{row['torch_ms']:.3g}"
            + _brackets(row, "torch_mb", "torch_first_s")
            + ", not compiled" * ("torch_fails" in row),
        ]
        for row in rows
    ]
    fails = [
        f"- {row['case']}: compiled, it fails with `{row['torch_fails'].partition('. ')[0]}`."
        for row in rows
        if "torch_fails" in row
    ]
    header = ["mask", "queries x keys", "full, partial blocks", "looked at", "the function", "the mask"]
    parts = [about, github_table(cells, [*header, "create_block_mask"]), "\n".join(fails)]
    return "\n\n".join(filter(None, parts))


def _brackets(row: Row, *names: str) -> str:
    """Return the figure of the first of these names that the row has, in brackets."""
    return next((f" ({row[name]:,.1f})" for name in names if name in row), "")


def _attended(machine: dict[str, str], rows: list[Row]) -> str:
    about = (
        f"On {machine['device']}, torch {machine['torch']}, bfloat16, one batch element, head size {_SIZE}; "
        "milliseconds of forward and backward, medians. flexmasks has a plan of its mask, torch's flex_attention the "
        "result of create_block_mask for the function. In brackets the seconds of the first call."
    )
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["who"]] = row
    cells = []
    for case, ways in by_case.items():
        ours = ways[OURS]
        times = [
            [f"{way['forward_ms']:.3g}", f"{way['backward_ms']:.3g}", f"{way['first_s']:.1f}"]
            if (way := ways.get(who))
            else [ours["left_out"].get(who, "not measured"), "", ""]
            for who in (OURS, PEER)
        ]
        total = [way["forward_ms"] + way["backward_ms"] for way in ways.values()]
        cells.append(
            [case, ours["shape"].replace("x", " x "), f"`{ours['backend']}`"]
            + [f"{f}, {b} ({first})" if b else f for f, b, first in times]
            + [f"{total[1] / total[0]:.2f} x" if len(total) > 1 else ""]
        )
    return f"{about}\n\n" + github_table(cells, ["mask", "queries", "backend", OURS, PEER, "torch takes"])


BENCHMARK = Benchmark("wild", _todo, table)
