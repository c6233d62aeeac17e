"""Kernels for the CPU that are not compiled to C++, which takes seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import in_campaigns, is_turn
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

import flexmasks


@pytest.fixture(params=["without C++", in_campaigns("in C++")])
def quick_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch trace kernels for the CPU and no more, for tests of what the library does around a kernel.

    Such kernels compute all blocks; the lists of blocks are checked against the mask function at each call. A number
    that is not finite must not be among the keys that nobody sees. Other tests compile the same features to C++, and
    campaigns these tests too.
    """
    flexmasks.clear_caches()
    if request.param == "without C++" and not torch.cuda.is_available():
        monkeypatch.setattr(torch, "compile", functools.partial(_traced, torch.compile))
    yield
    flexmasks.clear_caches()


def in_cpp_on_day(day: int, of: int) -> Callable[[Any], Any]:
    """Let a test take `quick_kernels`, and on one day `of` so many kernels in C++ too."""
    in_cpp = "in C++" if is_turn(day, of) else in_campaigns("in C++")
    kernels = pytest.mark.parametrize("quick_kernels", ["without C++", in_cpp], indirect=True)
    return lambda test: pytest.mark.usefixtures("quick_kernels")(kernels(test))


def _traced(compile_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    compiled = compile_function(*args, **{"backend": "aot_eager", **kwargs})
    if not args or "backend" in kwargs:  # a decorator, or what a test compiles
        return compiled

    @functools.wraps(compiled)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for lists in args:
            # The bits of a function that goes as data are those of the listed blocks alone.
            if isinstance(lists, BlockMask) and "reading_bits" not in lists.mask_mod.__qualname__:
                check_lists(lists, *args[:2])
        return compiled(*args, **kwargs)

    return checked


def check_lists(lists: BlockMask, q: Tensor, k: Tensor) -> None:
    """Check that every pair that is visible lies in a listed block, and that full blocks have no others."""
    lengths = q.shape[2], k.shape[2]
    visible = create_mask(lists.mask_mod, *q.shape[:2], *lengths, device=str(q.device))
    partial = _pairs(lists, lists.kv_num_blocks, lists.kv_indices, lengths)
    full = _pairs(lists, lists.full_kv_num_blocks, lists.full_kv_indices, lengths)
    assert not (visible & ~(partial | full)).any()
    assert not (full & ~visible).any()


def _pairs(lists: BlockMask, counts: Tensor | None, indices: Tensor | None, lengths: tuple[int, int]) -> Tensor:
    """Return the pairs of queries and keys in listed blocks, [B, H, Q, KV]."""
    if counts is None or indices is None:
        return torch.zeros(lengths, dtype=torch.bool)
    rows, columns = lists.BLOCK_SIZE
    count = -(-lengths[1] // columns)
    is_listed = torch.arange(indices.shape[-1]) < counts[..., None]
    listed = torch.zeros(*counts.shape, count + 1, dtype=torch.bool)
    listed.scatter_(-1, torch.where(is_listed, indices, count).long(), True)
    pairs = listed[..., :count].repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return pairs[..., : lengths[0], : lengths[1]]
