"""Launches of the Triton kernels of attention for few queries, whose arguments the first call of a layout checks."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flexmasks.cache import Launches
from flexmasks.kernels.direct import shared_memory
from flexmasks.kernels.few_queries_checks import TILE, check, check_band, check_place
from flexmasks.kernels.few_queries_kernel import attend_kernel, join_kernel
from flexmasks.kernels.launches import (
    Launch,
    compiled,
    dot_type,
    grain_of,
    layouts_of,
    new,
    strides_of,
    width_of,
)

_FEW_COUNTS, _MAX_COUNTS = 64, 1024  # counts of tiles that a program loads at a time
_SHARED_MEMORY = 227 * 2**10  # of a processor of a Hopper GPU, in bytes
_LITTLE_MEMORY = 2**17  # with less shared memory, programs take half of the rows
_LAST = -1  # in place of where queries start: they are the last ones of each sequence
_FARTHEST = 2**31 - 1  # all keys of a sequence are at most that far from any query
_NO_BAND = (0, 0, 0)


class _Launch(NamedTuple):
    """Arguments of the kernels for calls of one layout, without tensors, scale, cap and band."""

    attend: Launch
    attend_scalars: tuple[Any, ...]  # numbers and constants
    join: Launch | None  # None if programs write the result themselves
    join_scalars: tuple[Any, ...]
    lines: int  # rows of all shares


_launches: Launches[_Launch] = Launches("few_queries")


def attend_few(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None,
    partial_counts: Tensor, partial: Tensor, full_counts: Tensor, full: Tensor, visible: Tensor,
    weight: Tensor | None, bias: Tensor | None, scale: float, cap: float | None, with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The operator flexmasks::attend_few; without `with_lse`, the lse is None."""
    lists = partial_counts, partial, full_counts, full, visible
    tensors = _Tensors(q, k, v, page_table, *lists, None, None, weight, bias)
    return _run(tensors, scale, cap, _NO_BAND, with_lse)


def attend_band(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None,
    q_starts: Tensor | None, kv_lens: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    scale: float, cap: float | None, q_start: int | None, left: int | None, right: int | None, with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The operator flexmasks::attend_band; without `with_lse`, the lse is None."""
    check_place(q_start)
    tensors = _Tensors(q, k, v, page_table, None, None, None, None, None, q_starts, kv_lens, weight, bias)
    band = _LAST if q_start is None else q_start, _distance(left), _distance(right)
    return _run(tensors, scale, cap, band, with_lse)


def _distance(bound: int | None) -> int:
    """A bound of a band as an int32."""
    return _FARTHEST if bound is None else max(-_FARTHEST, min(bound, _FARTHEST))


class _Tensors(NamedTuple):
    """Tensors in the order of the kernel's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor | None
    # The mask as lists of tiles:
    partial_counts: Tensor | None
    partial: Tensor | None
    full_counts: Tensor | None
    full: Tensor | None
    visible: Tensor | None
    # The tensors of a mask that is a band:
    q_starts: Tensor | None
    kv_lens: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @property
    def counts(self) -> tuple[Tensor | None, ...]:
        """The tensors from which kernels compute the numbers of tiles."""
        return self.partial_counts, self.full_counts, self.q_starts, self.kv_lens


def _run(
    tensors: _Tensors, scale: float, cap: float | None, band: tuple[int, int, int], with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Output and lse; `band` is where the queries start, and the most keys to the left and to the right of a query."""
    q, v = tensors.q, tensors.v
    out = new((*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    lse = new(q.shape[:-1], torch.float32, q.device) if with_lse else None
    key = (cap is None, with_lse, q.device.index, *layouts_of(*tensors))
    launch = _launches.get(key)
    if launch is None:
        if not out.numel():
            return out, lse
        launch = _launch((out, lse), tensors, cap is not None)
        _launches.keep(key, launch)
    shared = None  # programs write the result themselves
    if launch.join is not None:
        shared = new((launch.lines * (v.shape[-1] + 2),), torch.float32, q.device)
    launch.attend((out, lse, shared, *tensors), (scale, cap or 0.0, *band, *launch.attend_scalars))
    if launch.join is not None:
        launch.join((out, lse, shared, *tensors.counts), (*band, *launch.join_scalars))
    return out, lse


# --- sizes ---


class _Choice(NamedTuple):
    """Sizes of a launch.

    rows, keys: rows of a program, and keys of a step.
    warps, stages: of the kernel; up to stages - 1 steps are loaded ahead.
    shares: shares of all elements together; 0 if a program takes all tiles of an element.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    shares: int


def _choice(
    rows: int,
    k_size: int,
    v_size: int,
    itemsize: int,
    elements: int,
    key_heads: int,
    tiles: int,
    processors: int,
    memory: int = _SHARED_MEMORY,
) -> _Choice:
    """rows: queries times query heads that share a key head.
    itemsize: bytes of a number in q, k and v.
    elements, tiles: what the lists of tiles belong to, and the most tiles of one.
    key_heads: key heads of an element.
    processors, memory: of the GPU, and the bytes of one.
    """
    k_width, v_width = width_of(k_size), width_of(v_size)
    width = max(k_width, v_width)
    # More rows than these would take the registers of a processor, for sums or for products without tensor cores.
    most_rows = 128 if itemsize < 4 and width <= 128 else 64 if itemsize < 4 else 16
    if itemsize < 4 and memory < _LITTLE_MEMORY:
        most_rows //= 2
    least_rows = 16 if itemsize < 4 else 1  # tensor cores multiply 16 rows and more
    program_rows = max(least_rows, min(most_rows, triton.next_power_of_2(rows)))
    keys = max(16, min(64, 2**14 // (width * itemsize)))  # up to 16 KB of keys; steps of 128 keys are slower (H200)
    warps = 8 if program_rows * width > 64 * 128 else 4
    stages = 3
    step_bytes = keys * (k_width + v_width) * itemsize
    buffers = stages if program_rows >= 64 else stages - 1  # wgmma, for 64 rows and more, reads one more step
    on_processor = max(1, min(3, memory // (buffers * step_bytes + program_rows * k_width * itemsize)))
    programs = on_processor * processors  # that run at a time
    beside = key_heads * -(-rows // program_rows)  # programs of a share
    # All shares run at a time, if they are enough for elements with very different numbers of tiles; else more shares
    # than can run at a time even their times out.
    at_once = programs // beside - elements
    shares = min(at_once if at_once >= max(8, 2 * elements) else 4 * programs // beside, elements * tiles)
    if tiles == 1 or shares <= elements:
        return _Choice(program_rows, keys, warps, stages, 0)
    return _Choice(program_rows, keys, warps, stages, shares + elements)


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


# --- a launch ---


def _launch(results: tuple[Tensor, Tensor | None], tensors: _Tensors, has_cap: bool) -> _Launch:
    """Compile the kernels for the layout of some arguments; ValueError for those that the operator does not take."""
    q, k, v, page_table, *_, q_starts, kv_lens, weight, bias = tensors
    listed: Any = tensors[4:9]
    partial_counts, partial, full_counts, full, visible = listed
    is_band = visible is None
    if is_band:
        check_band(q, k, v, page_table, q_starts, kv_lens, weight, bias)
    else:
        check(q, k, v, page_table, partial_counts, partial, full_counts, full, visible, weight, bias)
    out, lse = results
    batch, heads, queries, k_size = q.shape
    v_size = v.shape[-1]
    page_size, page_words, kv_len, key_heads = 0, 0, k.shape[2], k.shape[1]
    if page_table is not None:
        _, page_size, key_heads, _ = k.shape
        page_words = page_table.element_size() // 4
        kv_len = page_table.shape[1] * page_size
    group = heads // key_heads
    list_heads = 1 if is_band else max(t.shape[1] for t in listed[:4])
    elements = batch * list_heads
    rows = queries
    if list_heads == 1:  # the query heads of a key head share its tiles
        rows *= group
    else:
        key_heads = 1
    tiles = -(-kv_len // TILE) if is_band else min(-(-kv_len // TILE), partial.shape[-1] + full.shape[-1])
    tiles = max(1, tiles)
    # All rows of a program see the same keys.
    same = rows == 1 or (queries == 1 and (is_band or visible.shape[1] == 1))
    on_device = _processors(q.device), shared_memory(q.device)
    choice = _choice(rows, k_size, v_size, q.element_size(), elements, key_heads, tiles, *on_device)
    split = choice.shares > 0
    row_blocks = -(-rows // choice.rows)
    programs = (choice.shares if split else elements) * key_heads * row_blocks
    lines = programs * choice.rows
    shared = torch.empty(1, device=q.device) if split else None
    q_grain, q_strides = _with_grain(strides_of(q, 3))
    k_grain, k_strides = _with_grain(_key_strides(k, page_size))
    v_grain, v_strides = _with_grain(_key_strides(v, page_size))
    count_strides = (*strides_of(partial_counts, 2), *strides_of(full_counts, 2))
    band_strides = (*strides_of(q_starts, 1), *strides_of(kv_lens, 1))
    pair_grain, (*visible_strides, bias_batch, bias_head, bias_query) = _with_grain(
        [*strides_of(visible, 3), *strides_of(bias, 3)]
    )
    is_same_bias = bias_head == bias_query == 0
    is_even = kv_len > 0 and kv_len % TILE == 0 and not (is_band and bias is None)  # a band alone makes no use of it
    lists = (list_heads, _FEW_COUNTS if elements <= _FEW_COUNTS else _MAX_COUNTS)
    numbers = (
        *(kv_len, queries, elements, choice.shares, key_heads, row_blocks, rows, lines),
        *(*q_strides, *k_strides, *v_strides, *strides_of(page_table, 1)),
        *(*count_strides, *strides_of(partial, 2), *strides_of(full, 2)),
        *(*visible_strides, *band_strides),
        *(*strides_of(weight, 3), bias_batch, bias_head, bias_query),
    )
    constants = (
        *(group, *lists, choice.rows, choice.keys, TILE // choice.keys, choice.stages, split),
        *(k_size, v_size, width_of(k_size), width_of(v_size), q_grain, k_grain, v_grain),
        *(page_size, page_words, is_even, pair_grain),
        *(_last_stride(visible), _last_stride(bias), same, is_same_bias),
        *(has_cap, dot_type(q.dtype, attend_kernel), is_band),
    )
    attend_scalars = *numbers, *constants
    attend = compiled(
        attend_kernel, programs, choice.warps, (out, lse, shared, *tensors), (1.0, 1.0, *_NO_BAND, *attend_scalars)
    )
    if not split:
        return _Launch(attend, attend_scalars, None, (), 0)
    join_numbers = (
        *(kv_len, queries, elements, choice.shares, key_heads, row_blocks, lines),
        *(*count_strides, *band_strides),
    )
    together = 8 if choice.shares <= 8 * elements else 2**13 // width_of(v_size)  # shares of a step
    join_constants = (group, *lists, choice.rows, v_size, width_of(v_size), together, is_band)
    join_scalars = *join_numbers, *join_constants
    join = compiled(
        join_kernel, batch * heads * queries, 4, (out, lse, shared, *tensors.counts), (*_NO_BAND, *join_scalars)
    )
    return _Launch(attend, attend_scalars, join, join_scalars, lines)


def _last_stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.shape[-1] == 1 else tensor.stride(-1)


def _key_strides(keys: Tensor, page_size: int) -> list[int]:
    """The strides of keys or values by batch element, head, page and key. A page size of 0 means no pages."""
    one, two, three = strides_of(keys, 3)
    return [0, three, one, two] if page_size else [one, two, 0, three]


def _with_grain(strides: list[int]) -> tuple[int, list[int]]:
    grain = grain_of(strides)
    return grain, [stride // grain for stride in strides]
