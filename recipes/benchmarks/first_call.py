"""A process's first call, or a model's first steps, in a script that prints times.

The times are JSON. `first_calls` runs it. At its top it imports nothing that a call of attention would import, so that
the times are those of a user's process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

WINDOW, CAP, DOCUMENT = 256, 30.0, 600
IMPORTS = "imports"  # in place of a case: the modules of a former process are imported, and nothing is called
MODEL = "model"  # in place of a case: a compiled model is trained for two steps


def call(case: str, backend: str, device: str, shape: tuple[int, ...], modules: Path) -> dict[str, float]:
    """Return the seconds of imports, of the device, and of a first call.

    The first output and the first gradient count from the beginning of the call.

    shape: batch, heads, length, head size.
    modules: a file for the names of other packages' modules that the call imports.
    """
    start = time.perf_counter()
    import torch

    from flexmasks.attention import attention

    seconds = {"import_s": time.perf_counter() - start}
    start = time.perf_counter()
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    learns = backend != "decode" and (backend, device) != ("flex", "cpu")  # those have no gradients
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=learns) for _ in range(3))
    q = q[:, :, -1:] if backend == "decode" else q
    ids = torch.arange(shape[2], device=device) // DOCUMENT
    upstream = torch.ones_like(q)
    seconds["device_s"] = _seconds_since(start, device)
    before = set(sys.modules)
    start = time.perf_counter()
    offset = shape[2] - 1 if backend == "decode" else 0
    out = attention(q, k, v, backend=backend, q_offset=offset, **_arguments(case, ids))
    seconds["output_s"] = _seconds_since(start, device)
    if learns:
        torch.autograd.grad(out, (q, k, v), upstream)
        seconds["gradient_s"] = _seconds_since(start, device)
    _keep_imports(before, modules)
    return seconds


def train(who: str, device: str, sizes: tuple[int, ...], modules: Path) -> dict[str, float]:
    """Return the seconds of imports, of the device, and of a model's first steps.

    The model is compiled, and trained for two steps. Each step has new documents. flex_attention gets its block mask
    from a compiled create_block_mask.

    who: whose attention the model has, as in the benchmark of steps.
    sizes: those of `model.Sizes`.
    modules: a file for the names of other packages' modules that the steps import.
    """
    start = time.perf_counter()
    import torch

    from benchmarks.model import Sizes, Training
    from benchmarks.steps import attention_kinds

    seconds = {"import_s": time.perf_counter() - start}
    start = time.perf_counter()
    at, dtype = torch.device(device), torch.bfloat16 if device.startswith("cuda") else torch.float32
    all_sizes, kinds = attention_kinds("document ids", Sizes(*sizes), at, "compiled")
    step = Training(all_sizes, kinds[who].attend_of, kinds[who].packing, at, dtype, "compiled")
    seconds["device_s"] = _seconds_since(start, device)
    before = set(sys.modules)
    for name in ("step_s", "second_step_s"):
        start = time.perf_counter()
        step()
        seconds[name] = _seconds_since(start, device)
    _keep_imports(before, modules)
    return seconds


def _seconds_since(start: float, device: str) -> float:
    """Return the seconds since `start` when the device has finished its work."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()
    return time.perf_counter() - start


def _keep_imports(before: set[str], modules: Path) -> None:
    """Write the names of other packages' modules imported since then to a file."""
    ours = ("flexmasks.", "benchmarks.")
    imported = [name for name in sys.modules if name not in before and not name.startswith(ours)]
    modules.write_text("\n".join(imported))


def imports(modules: Path) -> dict[str, float]:
    """Return the seconds in which a process with torch and flexmasks imports modules.

    modules: a file with their names. Those that are made while a call runs cannot be imported, and are left out.
    """
    importlib.import_module("flexmasks.attention")
    names = modules.read_text().split()
    start = time.perf_counter()
    for name in names:
        with contextlib.suppress(Exception):  # a module may raise anything
            importlib.import_module(name)
    return {"modules_s": time.perf_counter() - start}


def _arguments(case: str, ids: Any) -> dict[str, Any]:
    """Return the mask and the score of a case."""
    from flexmasks.spec import get_mask

    if case == "sliding_window & a lambda":
        return {"mask": get_mask("sliding_window", window=WINDOW) & (lambda b, h, q, kv: (kv < 64) | (q - kv < 128))}
    if case == "documents":
        return {"mask": get_mask("causal") & get_mask("document", document_ids=ids)}
    return {"mask": "causal", **({"score": "softcap", "cap": CAP} if case == "softcap" else {})}


if __name__ == "__main__":
    _case, *_others, _modules = sys.argv[1:]
    if _case == IMPORTS:
        print(json.dumps(imports(Path(_modules))))
    else:
        _who, _device, _sizes = _others
        _run = train if _case == MODEL else functools.partial(call, _case)
        print(json.dumps(_run(_who, _device, tuple(json.loads(_sizes)), Path(_modules))))
