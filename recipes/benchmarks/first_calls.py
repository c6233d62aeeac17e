"""First calls and first training steps of fresh processes.

Caches of compiled code are empty at first, and then filled.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import first_call
from benchmarks.model import Sizes
from benchmarks.results import Row
from benchmarks.steps_tables import OURS, PLAIN
from flexmasks.backends.fa4_package import KEEPS_KERNELS, KERNEL_FOLDER, is_installed
from flexmasks.bench.clock import progress

CALLS, STEPS = "first calls", "first steps"
_CASES = ("causal", "sliding_window & a lambda", "softcap", "documents")
# Backends, and the cases that each can run.
_WITHOUT_CAP = ("causal", "sliding_window & a lambda", "documents")
_ON_GPU = {
    "sdpa": _CASES[:1], "fa4": ("causal", "softcap"), "decode": _CASES, "short": _WITHOUT_CAP,
    "flex": _CASES, "flex_flash": _CASES,
}  # fmt: skip
_LENGTH_ON_GPU, _SHORT = 4096, {"short": 1024}  # numbers of tokens; the second ones are of backends for few
_ON_CPU = {"short": _WITHOUT_CAP, "flex": _CASES, "reference": _CASES}
# Environment variables that name folders of compiled code: of torch, of Triton, and of flash-attn-4's compiler.
_FOLDERS = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
    KERNEL_FOLDER,
)
_TIMEOUT = 300.0  # seconds for one process


def steps(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_cuda = device.type == "cuda"

    def shape_of(backend: str) -> tuple[int, ...]:
        if quick or not is_cuda:
            return (1, 2, 256, 64) if quick else (1, 8, 1024, 64)
        return 2, 16, _SHORT.get(backend, _LENGTH_ON_GPU), 64

    backends = {b: cases for b, cases in (_ON_GPU if is_cuda else _ON_CPU).items() if _is_there(b)}
    todo: dict[str, Callable[[], list[Row]]] = {
        f"{CALLS}, {case}, {backend}, {list(shape_of(backend))}": functools.partial(
            _call_rows, case, backend, device, shape_of(backend)
        )
        for backend, cases in backends.items()
        for case in cases
    }
    tiny = Sizes(vocabulary=256, width=256, heads=4, layers=2, batch=1, length=128)
    models = [Sizes(), Sizes(layers=32)] if is_cuda else [tiny._replace(layers=4, length=1024)]
    # flex_attention has no gradients on a CPU.
    return todo | {
        f"{STEPS}, {sizes.layers} layers, {who}": functools.partial(_step_rows, sizes, who, device)
        for sizes in ([tiny] if quick else models)
        for who in ((OURS, PLAIN) if is_cuda else (OURS,))
    }


def _is_there(backend: str) -> bool:
    return backend not in ("fa4", "flex_flash") or is_installed()


def _call_rows(case: str, backend: str, device: torch.device, shape: tuple[int, ...]) -> list[Row]:
    """Return the figures of the first call of two processes."""
    return _rows({"kind": CALLS, "case": case}, case, backend, device, shape, shape)


def _step_rows(sizes: Sizes, who: str, device: torch.device) -> list[Row]:
    """Return the figures of the first steps of two processes."""
    about = {"kind": STEPS, "case": f"{sizes.layers} layers"}
    return _rows(about, first_call.MODEL, who, device, sizes, sizes.shape)


def _rows(
    about: Row, case: str, who: str, device: torch.device, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> list[Row]:
    """Return the figures of a cold process and of a warm one.

    The cold process starts with empty caches on the disk, which the warm one finds filled. A third process imports what
    the warm one has imported during its call, and does nothing else.

    case, who, device, sizes: the arguments of `first_call`; `who` is a backend for calls.
    """
    about = {**about, "shape": "x".join(map(str, shape)), "backend": who}
    about["dtype"] = "bfloat16" if device.type == "cuda" else "float32"
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        modules = str(Path(folder) / "modules.txt")
        words = [case, who, str(device), json.dumps(sizes), modules]
        caches = {KEEPS_KERNELS: "1", **{name: str(Path(folder) / name) for name in _FOLDERS}}
        for state in ("cold", "warm"):
            progress(f"{about['kind']}, {about['case']}, {who}: {state}")
            seconds = {name: round(x, 3) for name, x in _in_a_process(words, caches).items()}
            rows.append({**about, "who": state, **seconds})
        alone = _in_a_process([first_call.IMPORTS, modules], caches)
    rows[-1] |= {name: round(x, 3) for name, x in alone.items()}
    return rows


def _in_a_process(words: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Return what `first_call` prints in a new process."""
    script = Path(first_call.__file__)
    paths = [*map(str, script.parents[1:3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-P", str(script), *words],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if ended.returncode:
        last_line = "".join(ended.stderr.strip().splitlines()[-1:])
        raise RuntimeError(f"the process ended with code {ended.returncode}: {last_line}")
    seconds: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return seconds
