"""Kernels for the CPU that are not compiled to C++, which takes seconds."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

import flexmasks


@pytest.fixture(params=["without C++", pytest.param("in C++", marks=pytest.mark.campaign)])
def quick_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch trace kernels for the CPU and no more, for tests of what the library does around a kernel.

    Such kernels take no heed of blocks. Other tests compile the same features to C++, and campaigns these tests too.
    """
    flexmasks.clear_caches()
    if request.param == "without C++" and not torch.cuda.is_available():
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    flexmasks.clear_caches()
