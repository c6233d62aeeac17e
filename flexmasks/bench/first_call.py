"""The first call of a process: a script that prints its times as JSON.

`first_calls` runs it. At its top it imports nothing that a call of attention would import, so that the times are those
of a user's process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

WINDOW, CAP, DOCUMENT = 256, 30.0, 600
NO_GRADIENTS = ("decode", "cpu")  # backends for calls without gradients
IMPORTS = "imports"  # in place of a case: the modules of a former process are imported, and nothing is called


def main(case: str, backend: str, device: str, shape: tuple[int, ...], modules: Path) -> dict[str, float]:
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
    learns = backend not in NO_GRADIENTS
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=learns) for _ in range(3))
    q = q[:, :, -1:] if backend == "decode" else q
    ids = torch.arange(shape[2], device=device) // DOCUMENT
    upstream = torch.ones_like(q)

    def wait() -> float:
        """Return the seconds since `start` when the device has finished its work."""
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds["device_s"] = wait()
    before = set(sys.modules)
    start = time.perf_counter()
    offset = shape[2] - 1 if backend == "decode" else 0
    out = attention(q, k, v, backend=backend, q_offset=offset, **_arguments(case, ids))
    seconds["output_s"] = wait()
    if learns:
        torch.autograd.grad(out, (q, k, v), upstream)
        seconds["gradient_s"] = wait()
    imported = [name for name in sys.modules if name not in before and not name.startswith("flexmasks.")]
    modules.write_text("\n".join(imported))
    return seconds


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
        _backend, _device, _shape = _others
        print(json.dumps(main(_case, _backend, _device, tuple(json.loads(_shape)), Path(_modules))))
