"""The road of a call: how many functions it runs, as the page on the house says."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmasks
from flexmasks.backends.call import Kernel
from flexmasks.backends.sdpa import SdpaKernel
from flexmasks.backends.short_kernel import ShortKernel
from flexmasks.masks import causal, document

PACKAGE = Path(flexmasks.__file__).parent
PAGE = (PACKAGE / "README.md").read_text()
MOST = {"first": 800, "repeated": 22, "of a held plan": 14, "in a compiled graph": 0}
KERNELS: dict[str, type[Kernel]] = {
    "causal, by torch's kernel": SdpaKernel,
    "documents, with the whole mask": ShortKernel,
}
LENGTH = 16


def functions_run(call: Callable[[], Any], kernel: type[Kernel]) -> int:
    """Return how many of the library's functions run, up to the call of the kernel, which counts.

    A function that is called twice counts twice; generators and comprehensions are no functions.
    """
    count, end = 0, kernel.__call__.__code__

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<"):
            count += 1
            if code is end:
                sys.setprofile(None)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("what", KERNELS)
def test_functions_of_a_call(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # what tests change so that small calls compile
    ids = torch.arange(LENGTH) // 5
    mask = causal() if what.startswith("causal") else causal() & document(document_ids=ids)
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16)
    plan = flexmasks.plan(mask, LENGTH, batch=1, heads=2)

    def call() -> Tensor:
        return flexmasks.attention(q, k, v, mask=mask)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    calls: dict[str, Callable[[], Tensor]] = {
        "first": call,
        "repeated": call,
        "of a held plan": lambda: flexmasks.attention(q, k, v, mask=plan),
        "in a compiled graph": compiled,
    }
    said = next(line for line in PAGE.splitlines() if line.startswith(f"| {what} |"))
    in_page = dict(zip(MOST, map(int, re.findall(r"\d+", said)), strict=True))
    for name, run in calls.items():
        for _ in range(3):
            run()
        if name == "first":
            flexmasks.clear_caches()
        count = functions_run(run, KERNELS[what])
        # What a first call runs depends on the version of torch.
        assert abs(count - in_page[name]) <= (in_page[name] // 10 if name == "first" else 0)
        assert count <= MOST[name]
