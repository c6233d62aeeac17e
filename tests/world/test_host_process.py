"""The host process stays as it was: what flexmasks changes outside itself when it is imported, and at calls.

flexmasks/README.md lists all that it touches; the sets below are that list.
"""

from __future__ import annotations

import re

import fresh
import pytest
import torch
from helpers import one_in

# It prints what a step changed, a line each.
_SCRIPT = """
import os, sys, threading, types, warnings
import torch
if "bare" in sys.argv:
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    assert "torch._dynamo" not in sys.modules
else:
    import torch._dynamo.config, torch._functorch.config, torch._inductor.config
import torch.nn.attention.flex_attention as flex

warnings.simplefilter("ignore")


def state():
    # Settings of torch's compilers, functions and classes in torch's modules, and what a process has.
    found = {}
    for name in ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config"):
        module = sys.modules.get(name)
        if module is None:
            continue
        found |= {f"setting {module.__name__}.{name}": repr(v) for name, v in module.get_config_copy().items()}
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for key, value in [*vars(module).items()]:
            if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
                found[f"name {name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                for part, inner in [*vars(value).items()]:
                    if isinstance(inner, (types.FunctionType, staticmethod, classmethod)):
                        found[f"name {name}.{key}.{part}"] = id(inner)
    found |= {f"variable {name}": value for name, value in os.environ.items()}
    found |= {f"thread {thread.name}": True for thread in threading.enumerate()}
    found |= {f"module {name.split('.')[0]}": True for name in sys.modules}
    return found | {f"safe global {found.__name__}": True for found in torch.serialization.get_safe_globals()}


def changes(before, after):
    # Modules of torch that are new come with their names.
    known = {key.rpartition(".")[0] for key in before}
    for key in sorted({*before, *after}):
        is_new_module = key.startswith("name ") and key not in before and key.rpartition(".")[0] not in known
        if before.get(key) != after.get(key) and not is_new_module:
            yield key


q, k, v = torch.randn(3, 1, 2, 200, 16)
step = sys.argv[1]
if step == "flex":  # what torch's own compiler changes does not count
    blocks = flex.create_block_mask(lambda b, h, q, kv: q - kv < 7, None, None, 200, 200, device="cpu")
    torch.compile(flex.flex_attention)(q, k, v, block_mask=blocks)
if step != "import":
    import flexmasks
before = state()
if step == "import":
    import flexmasks
elif step == "explain":
    flexmasks.explain(q, k, v, mask="sliding_window", window=30)
    flexmasks.explain(q, k, v, mask=lambda b, h, q, kv: (q - kv) % 3 < 2, score="softcap", cap=3.0)
    for seed in range(20):
        ids = torch.arange(200) // (seed + 7)
        flexmasks.explain(q, k, v, mask="document", document_ids=ids, backend="reference")
elif step == "documents":
    for seed in range(20):
        ids = torch.arange(200) // (seed + 7)
        flexmasks.attention(q, k, v, mask="document", document_ids=ids, backend="reference")
else:
    learns = step in ("short", "reference")
    x = q[:, :, -1:] if step == "decode" else q.clone().requires_grad_(learns)
    how = {"mask": "causal"} if step == "sdpa" else {"mask": lambda b, h, q, kv: (q - kv).abs() < 30}
    out = flexmasks.attention(x, k, v, backend=step, q_offset="last", **how)
    if learns:
        out.sum().backward()
print(*changes(before, state()), sep="\\n")
"""

# Threads that compute parts of a call on a CPU stay for the next one.
_THREADS = {"thread flexmasks_0", "thread flexmasks_1"}
# A function of torch traces gradients of scores in another way, without which two threads may wait without end, or
# tensors learn NaN from hidden pairs.
_COMPILED = {"name torch._higher_order_ops.flex_attention.create_fw_bw_graph"}
# Torch's own guard of devices would end with the thread that first traces.
NEEDS_GUARD = torch.torch_version.TorchVersion(torch.__version__) < (2, 13) and torch.version.cuda is not None
TOUCHED = {
    "import": {"module flexmasks"},
    "explain": set(),
    "documents": _THREADS,
    "reference": _THREADS,
    "short": _THREADS,
    "decode": _THREADS,
    "sdpa": set(),
    "flex": _COMPILED,
}


@pytest.mark.parametrize("step", one_in(3, [step for step in TOUCHED if step != "flex"]))
def test_the_environment_stays_where_torch_has_no_compiler_yet(step: str) -> None:
    """The call that imports torch's compiler leaves the variables that the import sets."""
    ran = fresh.run(_SCRIPT, step, "bare")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [line for line in ran.stdout.splitlines() if line.startswith("variable ")] == []


@pytest.mark.parametrize("step", ["import", *one_in(3, [step for step in TOUCHED if step != "import"])])
def test_what_is_touched(step: str) -> None:
    ran = fresh.run(_SCRIPT, step)
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = {*ran.stdout.splitlines()} - {""}
    changed = {line for line in lines if not re.fullmatch("module [a-z0-9]{40,}", line)}  # modules of kernels
    guard = {"thread flexmasks-device-guard"} if step in ("flex", "explain") and NEEDS_GUARD else set()
    assert changed <= TOUCHED[step] | guard
