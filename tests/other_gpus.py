"""Compile the kernels for GPUs that are not here, and note whether they fit: no GPU is needed, and nothing is run.

    python tests/other_gpus.py                          # all kernels; `--jobs 16` on a machine with more cores
    python tests/other_gpus.py --targets 8.6 12.0 --kernels decode --sizes 64 128

Triton compiles torch's template of flex_attention, with the tiles that the library chooses for a GPU of the kind, and
the library's own kernels that hold tiles. The rows are written into recipes/results/gpus.json, and
`python tests/test_readme.py` writes recipes/results/gpus.md from them. Rows that were not compiled again stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from flex_without_gpu import compiles_for
from helpers import SHARED_MEMORY, compiled_for_hopper, on_gpu_of
from repository import ROOT
from tabulate import tabulate
from torch import Tensor

from flexmasks import clear_caches
from flexmasks.backends import flex
from flexmasks.backends.call import Operand
from flexmasks.backends.kernel_tiles import Reads

TABLE = ROOT / "recipes/results/gpus.json"
TARGETS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
SIZES = [32, 64, 96, 128, 192, 256]
_LENGTH, _KEYS = 300, 1024
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "TF32": torch.float32}
Row = dict[str, Any]


class Job(NamedTuple):
    """Kernels that are compiled together."""

    kernel: str
    target: tuple[int, int]
    size: int  # of a head
    dtype: str
    call: str

    @property
    def row(self) -> Row:
        return {
            "kernel": self.kernel, "target": ".".join(map(str, self.target)), "size": self.size, "dtype": self.dtype,
            "call": self.call,
        }  # fmt: skip


# --- torch's template of flex_attention ---


def _unchanged(score: Tensor, *_: Tensor) -> Tensor:
    return score


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def _documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, ids: Tensor) -> Tensor:
    return (q >= kv) & (ids[b, q] == ids[b, kv])


def _capped_alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, slopes: Tensor) -> Tensor:
    return 30 * torch.tanh((score + slopes[h] * (kv - q)) / 30)


def _biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
    return score + bias[h, q, kv]


def _calls() -> dict[str, tuple[Any, Reads]]:
    """Return functions of score and mask with their tensors, and what they read for each pair."""
    ids = [torch.zeros(1, _LENGTH, dtype=torch.int64)]
    slopes, bias = (torch.zeros(shape, requires_grad=True) for shape in ((4,), (4, _LENGTH, _LENGTH)))
    return {
        "causal": ((_unchanged, [], _causal, []), Reads()),
        "documents, soft-cap, slopes that learn": ((_capped_alibi, [slopes], _documents, ids), Reads(0, True)),
        "documents, bias that learns": ((_biased, [bias], _documents, ids), Reads(4, True)),
    }


def _flex(job: Job, folder: Path, machine_code: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield the pass, the tiles and the kernel of torch's template."""
    torch.set_float32_matmul_precision("high" if job.dtype == "TF32" else "highest")
    functions, reads = _calls()[job.call]
    dtype, arch = _DTYPES[job.dtype], 10 * job.target[0] + job.target[1]
    q = Operand.of(torch.empty(1, 4, _LENGTH, job.size, dtype=dtype))._replace(device=torch.device("cuda", 0))
    options = flex.options(q, q, q, None, None, (128, 128), reads)
    with compiles_for(arch, folder, machine_code) as compile_call:
        made = compile_call(job.size, dtype, functions, options, _LENGTH)
    for name, kernel, keys in zip(("forward", "backward"), made, (("M", "N"), ("M1", "N1")), strict=True):
        prefix = name[0] + "wd"
        sizes = [options.get(f"{prefix}_BLOCK_{key}") for key in keys]
        warps, stages = (options.get(f"{prefix}_num_{what}") for what in ("warps", "stages"))
        yield name, _tile(*sizes, warps, stages) if all(sizes) else "torch's own", kernel


def _tile(rows: Any, keys: Any, warps: Any, stages: Any) -> str:
    return f"{rows} x {keys}, {warps} warps, {stages} {'stage' if stages == 1 else 'stages'}"


# --- the library's own kernels ---


def _own(job: Job) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, the tiles and the kernel of each launch of a call."""
    found: list[tuple[str, str, Any]] = []
    arch = 10 * job.target[0] + job.target[1]

    def compiled(kernel: Any, _programs: int, warps: int, *given: tuple[Any, ...]) -> Callable[..., None]:
        arguments = tuple(a for part in given for a in part)
        named = dict(zip((p.name for p in kernel.params), arguments, strict=True))
        if "KEYS" in named:  # others hold no tiles in shared memory
            tile = _tile(named["ROWS"], named["KEYS"], warps, named["STAGES"])
            name = kernel.__name__.removesuffix("_kernel").replace("_", " ")
            found.append((name, tile, compiled_for_hopper(kernel, warps, arguments, arch)))
        return lambda *_: None

    clear_caches()  # of launches that another job compiled
    _OWN[job.kernel](job, compiled)
    yield from found


def _few_queries(job: Job, compiled: Callable[..., Any]) -> None:
    """One query of 128 heads that share keys, the most rows of a program."""
    from flexmasks.kernels import few_queries_launch as launch

    q, k, v = (torch.zeros(2, n, m, job.size, dtype=_DTYPES[job.dtype]) for n, m in ((128, 1), (1, _KEYS), (1, _KEYS)))
    bias = torch.zeros(1, 128, 1, _KEYS) if "bias" in job.call else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_processors", lambda device: 84)
        patch.setattr(launch, "compiled", compiled)
        launch.attend_band(q, k, v, None, None, None, None, bias, 0.1, None, 0, None, None)


def _whole_mask(job: Job, compiled: Callable[..., Any]) -> None:
    from flexmasks.kernels import whole_mask_launch as launch
    from flexmasks.kernels.whole_mask import TILE, WholeMask, spans_of

    batch, length = (16, TILE) if "windows" in job.call else (1, 256)
    q, k, v, d_out = torch.empty(4, batch, 2, length, job.size, dtype=_DTYPES[job.dtype])
    visible = torch.ones(1, 1, length, length, dtype=torch.bool)
    bias = torch.zeros(1, 2, length, length) if "bias" in job.call else None
    mask = WholeMask(visible, *spans_of(visible, length), None, bias, None, 0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "compiled", compiled)
        kernels = launch.kernels_of(q, k, v, mask)
        out, lse = kernels.forward(q, k, v, mask)
        kernels.backward(d_out, None, q, k, v, out, lse, mask, learns=bias is not None)


def _tangents(job: Job, compiled: Callable[..., Any]) -> None:
    from flexmasks.kernels import tangent_kernel

    qkv = [torch.zeros(1, 2, 256, job.size, dtype=_DTYPES[job.dtype]) for _ in range(3)]
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    words = torch.zeros(1, 128, 4, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tangent_kernel, "compiled", compiled)
        blocks = counts, indices, counts, indices, words, indices
        tangent_kernel.tangents_of(qkv[0], qkv[1], qkv[2], (qkv[0], qkv[1], qkv[2]), blocks, 0.1, None)


_OWN = {"decode": _few_queries, "short": _whole_mask, "tangents": _tangents}
_OWN_CALLS = {
    "decode": ("a band", "a band, bias"),
    "short": ("a mask", "a mask, bias that learns", "windows, bias that learns"),
    "tangents": ("",),
}


# --- the table ---


def all_jobs() -> list[Job]:
    """Return what is compiled. TF32 is a way to multiply numbers of float32; the library's kernels have one."""
    jobs = [Job("flex", *of) for of in itertools.product(TARGETS, SIZES, _DTYPES, _calls())]
    for name, calls in _OWN_CALLS.items():
        dtypes = [d for d in _DTYPES if d != "TF32" and (name != "short" or d != "float32")]
        sizes = [n for n in SIZES if name != "short" or n <= 128]
        jobs += [Job(name, *of) for of in itertools.product(TARGETS, sizes, dtypes, calls)]
    return jobs


def has_kernel(job: Job) -> bool:
    """Return whether the library has a kernel for a job: tangents of some wide heads are computed by slices."""
    if job.kernel != "tangents":
        return True
    from flexmasks.kernels.tangent_kernel import tiles_for

    with pytest.MonkeyPatch.context() as patch:
        on_gpu_of(patch, job.target)
        x = torch.empty(1, 1, 1, job.size, dtype=_DTYPES[job.dtype])
        return tiles_for(x, x) is not None


def rows_of(job: Job, machine_code: bool = True) -> list[Row]:
    """Compile the kernels of a job; what is known of them by their machine code alone is left out without it."""
    if not has_kernel(job):
        return []
    limit = SHARED_MEMORY[job.target]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", folder)
        on_gpu_of(patch, job.target)
        made = list(_own(job) if job.kernel in _OWN else _flex(job, Path(folder), machine_code))
        about = {"limit": limit, "torch": torch.__version__.partition("+")[0]}
        rows = [job.row | {"part": part, "tile": tile, "shared": x.metadata.shared} | about for part, tile, x in made]
        if not machine_code:
            return rows
        return [row | _resources(kernel) for row, (_, _, kernel) in zip(rows, made, strict=True)]


def _resources(kernel: Any) -> dict[str, int]:
    """Return the registers of a thread, and the bytes that it keeps in local memory for want of them."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    counts = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return {"registers": counts["REG"], "local": counts["STACK"] + counts["LOCAL"]}


def _key(row: Row) -> tuple[Any, ...]:
    of_target = tuple(map(int, row["target"].split(".")))
    order = ["flex", *_OWN].index(row["kernel"]), of_target, row["size"], list(_DTYPES).index(row["dtype"])
    return *order, row["call"], row["part"]


def write(rows: list[Row], table: Path) -> None:
    """Put rows into a table, in place of those of the same kernels."""
    known = json.loads(table.read_text())["rows"] if table.exists() else []
    by_key = {_key(row): row for row in [*known, *rows]}
    made = table.with_suffix(".tmp")
    lines = ",\n".join(json.dumps(by_key[key]) for key in sorted(by_key))
    made.write_text(f'{{"rows": [\n{lines}\n]}}\n')
    made.replace(table)


def markdown(rows: list[Row]) -> str:
    """Return the tables of rows, one for each kernel: the most that any dtype, mask, score and pass of a size takes."""
    parts = []
    titles = {"flex": "torch's template, backend `flex`", "decode": "backend `decode`", "short": "backend `short`",
              "tangents": "forward mode (`torch.func.jvp`)"}  # fmt: skip
    over = [row for row in rows if row["shared"] > row["limit"]]
    kinds: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=_key):
        bits = "16 bits" if "16" in row["dtype"] else "float32"
        kinds.setdefault((row["kernel"], row["target"], bits, row["part"]), []).append(row)
    for name, title in titles.items():
        lines = [
            [target, bits, part, f"{of[0]['limit'] / 1024:.0f}", *(_cell(of, size) for size in SIZES)]
            for (kernel, target, bits, part), of in kinds.items()
            if kernel == name
        ]
        if lines:
            head = ["capability", "numbers", "pass", "KB", *(f"head size {n}" for n in SIZES)]
            used = [n for n in range(len(head)) if n < 4 or any(line[n] for line in lines)]
            table = tabulate(
                [[line[n] for n in used] for line in lines],
                [head[n] for n in used],
                tablefmt="github",
                disable_numparse=True,
            )
            parts.append(f"## {title[0].upper() + title[1:]}\n\n{table}")
    fit = f"{len(over)} do not fit" if over else "all fit"
    torches = " and ".join(sorted({row["torch"] for row in rows}))
    return f"{len(rows):,} kernels, compiled with torch {torches}, not run: {fit}.\n\n" + "\n\n".join(parts)


def _cell(rows: list[Row], size: int) -> str:
    """Return the tiles, shared memory, registers and local memory of the kernel that takes the most shared memory."""
    of_size = [row for row in rows if row["size"] == size]
    if not of_size:
        return ""
    most = max(of_size, key=lambda row: row["shared"])
    local = max(row["local"] for row in of_size)
    spilled = f", {local:,} B local" if local else ""
    return f"{most['tile']}: {most['shared'] / 1024:.0f} KB, {max(r['registers'] for r in of_size)} registers{spilled}"


def main() -> int:
    """Compile what the command line names, and return the exit status: 1 if a kernel does not fit or compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=[".".join(map(str, t)) for t in TARGETS], metavar="8.6")
    parser.add_argument("--kernels", nargs="+", default=["flex", *_OWN], metavar="NAME")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="N")
    parser.add_argument("--dtypes", nargs="+", default=[*_DTYPES], metavar="NAME")
    parser.add_argument("--calls", default="", metavar="TEXT", help="only calls with this text in their description")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, default=TABLE, metavar="FILE", help="the table, by default the page's")
    given = parser.parse_args()
    chosen = [
        job for job in all_jobs()
        if job.row["target"] in given.targets and job.kernel in given.kernels and job.size in given.sizes
        and job.dtype in given.dtypes and given.calls in job.call
    ]  # fmt: skip
    is_good = True
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(rows_of, job): job for job in chosen}
        for n, done in enumerate(as_completed(running), 1):
            if error := done.exception():
                says = f"FAILED: {error}"
            else:
                rows = done.result()
                write(rows, given.json)
                fits = all(row["shared"] <= row["limit"] for row in rows)
                says = "DOES NOT FIT" if not fits else "fits" if rows else "there is no kernel"
            is_good &= says in ("fits", "there is no kernel")
            print(f"{n}/{len(chosen)} {' '.join(map(str, running[done]))}: {says}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main())
