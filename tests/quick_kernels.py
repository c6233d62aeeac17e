"""Kernels for the CPU that are not compiled to C++, which takes seconds."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

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


def in_cpp_on_day(day: int, of: int) -> Callable[[Any], Any]:
    """Let a test take `quick_kernels`, and on one day `of` so many kernels in C++ too."""
    is_today = (int(os.environ["FLEXMASKS_SEED"]) + day) % of == 0
    in_cpp = pytest.param("in C++", marks=[] if is_today else pytest.mark.campaign)
    kernels = pytest.mark.parametrize("quick_kernels", ["without C++", in_cpp], indirect=True)
    return lambda test: pytest.mark.usefixtures("quick_kernels")(kernels(test))
