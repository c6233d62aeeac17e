"""The import of the library and its command: what they load, and how long it takes."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import json
import os
import pydoc
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import fresh
import pytest

import flexmasks

ROOT = Path(__file__).parent.parent.parent
# Modules that take long to import. `import torch` loads none of them, only a compilation, a GPU or a picture does.
COMPILERS = ["torch._dynamo", "torch._inductor", "triton"]
HEAVY = [
    *COMPILERS,
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "mpmath",
    "networkx",
    "matplotlib",
    "jinja2",
]
SECONDS = 0.2  # of the processor, beyond `import torch`, on a quiet machine
_TIMED = """
import sys, time, torch
before, start = set(sys.modules), time.process_time()
{code}
seconds = time.process_time() - start
print(seconds, *sorted(set(sys.modules) - before), file=sys.stderr)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process that has imported torch."""
    ran = fresh.run(code)
    assert not ran.returncode, ran.stderr
    return ran


@functools.cache
def timed(code: str) -> tuple[float, set[str]]:
    """Return the processor's seconds and the new modules of code in a new process that has imported torch."""
    seconds, *modules = run(_TIMED.format(code=code)).stderr.splitlines()[-1].split()
    return float(seconds), set(modules)


def command(*arguments: str) -> str:
    """Return code that runs the command, which may end the process."""
    return (
        "from flexmasks.__main__ import main\n"
        f"try:\n    main({list(arguments)})\nexcept SystemExit as end:\n    assert not end.code"
    )


START = {
    "import flexmasks": "import flexmasks",
    "a mask": "import flexmasks; flexmasks.get_mask('causal') & flexmasks.get_mask('document', document_ids=[0, 1])",
    "--help": command("--help"),
    "list": command("list"),
    "--version": command("--version"),
}

_TENSORS = "import torch, flexmasks; q, k, v = torch.randn(3, 2, 4, 300, 16, requires_grad=True); "
_CAUSAL = "flexmasks.attention(q, k, v, mask='causal'"
# First calls that compile nothing.
CALLS = {
    "sdpa": f"{_TENSORS}{_CAUSAL}, backend='sdpa').sum().backward()",
    "short": f"{_TENSORS}mask = flexmasks.get_mask('sliding_window', window=9); "
    "flexmasks.attention(q, k, v, mask=mask, backend='short').sum().backward()",
    "reference": f"{_TENSORS}{_CAUSAL}, backend='reference').sum().backward()",
    "decode": f"{_TENSORS}q = q[:, :, -1:].detach(); k = k.detach(); v = v.detach(); "
    f"{_CAUSAL}, q_offset=torch.tensor([299, 30]), backend='decode')",
    "sinks": f"{_TENSORS}{_CAUSAL}, sink_logits=torch.randn(4)).sum().backward()",
    "softmax": f"{_TENSORS}flexmasks.masked_softmax(q, mask='causal', q_offset=0).sum().backward()",
    "weights": f"{_TENSORS}flexmasks.weights(q, k, mask='causal', rows=-1).sum().backward()",
    "block mask": "import flexmasks; flexmasks.block_mask('causal', 512)",
}


def imported(code: str, names: list[str]) -> list[str]:
    """Return the modules of packages that code imports in a new process."""
    _, modules = timed(code)
    assert "flexmasks.masks.causal" in modules
    return [m for m in modules if any(m == name or m.startswith(f"{name}.") for name in names)]


@pytest.mark.parametrize("code", START.values(), ids=START)
def test_the_start_is_light(code: str) -> None:
    assert not imported(code, HEAVY)


@pytest.mark.parametrize("code", CALLS.values(), ids=CALLS)
def test_no_compiler_is_imported(code: str) -> None:
    assert not imported(code, COMPILERS)


def test_a_torch_newer_than_the_tested_ones_is_logged() -> None:
    start = "import logging, torch; logging.basicConfig(level='INFO'); "
    later = "torch.__version__ = type(torch.__version__)('9.1.0+cpu'); "
    tested = json.loads((ROOT / "recipes/results/versions.json").read_text())["rows"]
    newest = max((row["torch"].rpartition(".")[0] for row in tested), key=lambda v: [*map(int, v.split("."))])
    said = f"INFO:flexmasks:torch 9.1.0+cpu is newer than {newest}, the newest tested one\n"
    assert run(start + later + "import flexmasks").stderr == said
    assert run(start + "import flexmasks").stderr == ""


@pytest.mark.slow
def test_the_time_of_the_import() -> None:
    """The bound has a factor of 2: other processes on the machine slow this one."""
    seconds = min(timed.__wrapped__("import flexmasks")[0] for _ in range(3))
    assert seconds < 2 * SECONDS


PUBLIC = [
    "Comparison", "Finding", "Findings", "Likeness", "Likenesses", "Mask", "Picture", "Plan", "Proof", "Score",
    "TopKeys", "alike", "attention", "block_mask", "cache_info", "check", "clear_caches", "compare", "dense_mask",
    "draw", "explain", "flex", "get_mask", "get_score", "integrations", "invariant", "key_sums", "list_masks",
    "list_scores", "masked_softmax", "masks", "orders", "packed", "paged", "paged_attention", "plan", "register_mask",
    "register_score", "safe_globals", "scaled_masked_softmax", "scores", "sdpa", "sdpa_replaced", "show", "trees",
    "varlen_attention", "watch", "weights",
]  # fmt: skip


def test_public_names() -> None:
    assert sorted(flexmasks.__all__) == PUBLIC
    assert [name for name in dir(flexmasks) if not name.startswith("__")] == PUBLIC
    names: dict[str, Any] = {}
    exec("from flexmasks import *", names)
    assert {name: names[name] for name in PUBLIC} == {name: getattr(flexmasks, name) for name in PUBLIC}
    with pytest.raises(AttributeError, match=r"flexmasks has no `atention`$"):
        flexmasks.atention  # noqa: B018
    assert set(flexmasks._MODULES) <= set(PUBLIC)


def test_the_names_of_a_new_process() -> None:
    """No name depends on what was imported before."""
    names = run("import flexmasks; print(*[n for n in dir(flexmasks) if not n.startswith('_')])").stdout.split()
    assert names == PUBLIC


@pytest.mark.parametrize("name", ["attention", "varlen_attention", "paged_attention", "block_mask", "masked_softmax"])
def test_signatures(name: str) -> None:
    function = getattr(flexmasks, name)
    signature = inspect.signature(function)
    assert {"mask", "params"} <= set(signature.parameters)
    assert set(typing.get_type_hints(function)) == {*signature.parameters, "return"}
    page = pydoc.render_doc(function, renderer=pydoc.plaintext)
    assert f"{name}(" in page
    assert function.__doc__.splitlines()[0] in page


@pytest.mark.slow
def test_version() -> None:
    number = re.fullmatch(r"\d+\.\d+\.\d+\S*", flexmasks.__version__)
    assert number
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{number[0]}]" in changelog or f"## [Unreleased]\n\nWhat becomes {number[0]}," in changelog
    assert f"\nversion: {flexmasks.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flexmasks", "--version"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout == f"flexmasks {flexmasks.__version__}\n"
    try:
        installed = importlib.metadata.version("flexmasks")
    except importlib.metadata.PackageNotFoundError:
        return
    assert installed == flexmasks.__version__


FIRST_USES = {
    "a call": "out = flexmasks.attention(q, q, q, mask='causal')",
    "explain": "flexmasks.explain(q, q, q, mask='tree', parents=[-1] * 20).backend",
    "Mask.blocks": "str(flexmasks.get_mask('causal').blocks(512))",
    "Jupyter": "assert '<svg' in flexmasks.get_mask('causal')._repr_html_()",
    "softmax of a meta tensor": "flexmasks.masked_softmax(torch.zeros(1, 1, 8, 8, device='meta'), mask='causal')",
    "torch.compile": (
        "compiled = torch.compile(lambda q: flexmasks.attention(q, q, q, mask='causal', score='softcap', cap=9.0),"
        " fullgraph=True, backend='aot_eager')\n"
        "want = flexmasks.attention(q, q, q, mask='causal', score='softcap', cap=9.0, backend='reference')\n"
        "assert torch.allclose(compiled(q), want, atol=1e-5)\n"
        "from torch._dynamo.utils import counters\n"
        "compiled(q), compiled(q + 1)\n"
        "assert counters['stats']['unique_graphs'] == 1, counters['stats']\n"
        "softmax = torch.compile(lambda x: flexmasks.masked_softmax(x, mask='causal'), fullgraph=True, "
        "backend='aot_eager')\n"
        "assert softmax(torch.zeros(1, 1, 8, 8))[0, 0, 1, 1] == 0.5"
    ),
    "a room": "flexmasks.trees.pack([[1]]), flexmasks.flex.flex_attention, flexmasks.integrations.distributed.shard",
    "a module": (
        "from flexmasks.attention import varlen_attention\n"
        "import flexmasks.attention, flexmasks.softmax, flexmasks.orders\n"
        "assert flexmasks.attention.__name__ == 'attention'"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("code", FIRST_USES.values(), ids=FIRST_USES)
def test_first_use(code: str) -> None:
    """Each use may be the first one of a process."""
    run(f"import torch, flexmasks\nq = torch.randn(1, 2, 20, 16)\n{code}")


@pytest.mark.slow
def test_first_uses_by_threads() -> None:
    """Threads import the same modules at once."""
    code = """
import threading, torch, flexmasks
q = torch.randn(1, 2, 20, 16)
uses = [
    lambda: flexmasks.attention(q, q, q, mask="causal"),
    lambda: flexmasks.attention(q, q, q, mask="prefix_lm", prefix_len=9, backend="reference"),
    lambda: flexmasks.explain(q, q, q, mask=lambda b, h, q, kv: q >= kv // 2),
    lambda: flexmasks.explain(q, q, q, score=lambda score, b, h, q, kv: score + q),
    lambda: flexmasks.block_mask("causal", 512),
    lambda: flexmasks.draw("alibi", 8),
    lambda: flexmasks.masked_softmax(torch.zeros(1, 1, 8, 8), mask="causal"),
] * 2
errors, together = [], threading.Barrier(len(uses))

def run(use):
    together.wait()
    try:
        use()
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=run, args=(use,)) for use in uses]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
"""
    run(code)
