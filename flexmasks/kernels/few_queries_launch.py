"""Launches of the Triton kernels of attention for few queries, whose arguments the first call of a layout checks."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flexmasks.cache import Launches
from flexmasks.devices import LITTLE_MEMORY, shared_memory
from flexmasks.kernels.few_queries_checks import TILE, KernelInputs, check, check_place
from flexmasks.kernels.few_queries_kernel import attend_kernel, join_kernel
from flexmasks.kernels.launches import Launch, compiled, dot_type, layouts_of, new, strides_of, width_of, with_grain

_FEW_COUNTS, _MAX_COUNTS = 64, 1024  # counts of tiles that a program loads at a time
_LAST = -1  # in place of where queries start: they are the last ones of each sequence
_FARTHEST = 2**31 - 1  # all keys of a sequence are at most that far from any query
_NO_BAND = (0, 0, 0)


class _Launch(NamedTuple):
    """The kernels for calls of one layout."""

    attend: Launch
    join: Launch | None = None  # None if programs write the result themselves
    lines: int = 0  # rows of all shares


_launches: Launches[_Launch] = Launches("few_queries")


def attend_few(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None,
    partial_counts: Tensor, partial: Tensor, full_counts: Tensor, full: Tensor, visible: Tensor,
    weight: Tensor | None, bias: Tensor | None, scale: float, cap: float | None, with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The operator flexmasks::attend_few; without `with_lse`, the lse is None."""
    lists = partial_counts, partial, full_counts, full, visible
    tensors = KernelInputs(q, k, v, page_table, *lists, None, None, weight, bias)
    return _run(tensors, scale, cap, _NO_BAND, with_lse)


def attend_band(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None,
    q_starts: Tensor | None, kv_lens: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    scale: float, cap: float | None, q_start: int | None, left: int | None, right: int | None, with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The operator flexmasks::attend_band; without `with_lse`, the lse is None."""
    check_place(q_start)
    tensors = KernelInputs(q, k, v, page_table, None, None, None, None, None, q_starts, kv_lens, weight, bias)
    band = _LAST if q_start is None else q_start, _distance(left), _distance(right)
    return _run(tensors, scale, cap, band, with_lse)


def _distance(bound: int | None) -> int:
    return _FARTHEST if bound is None else max(-_FARTHEST, min(bound, _FARTHEST))


def _run(
    tensors: KernelInputs, scale: float, cap: float | None, band: tuple[int, int, int], with_lse: bool
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
    launch.attend((out, lse, shared, *tensors), (scale, cap or 0.0, *band))
    if launch.join is not None:
        launch.join((out, lse, shared, *tensors.counts), band)
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
    rows: int, k_size: int, v_size: int, itemsize: int, elements: int, key_heads: int, tiles: int,
    processors: int, memory: int,
) -> _Choice:  # fmt: skip
    """rows: queries times query heads that share a key head.
    itemsize: bytes of a number in q, k and v.
    elements, tiles: what the lists of tiles belong to, and the most tiles of one.
    key_heads: key heads of an element.
    processors, memory: of the GPU, and the bytes of shared memory of one.
    """
    k_width, v_width = width_of(k_size), width_of(v_size)
    width = max(k_width, v_width)
    # More rows than these would take the registers of a processor, for sums or for products without tensor cores.
    most_rows = 128 if itemsize < 4 and width <= 128 else 64 if itemsize < 4 else 16
    if itemsize < 4 and memory < LITTLE_MEMORY:
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
    shares = 0 if tiles == 1 or shares <= elements else shares + elements
    return _Choice(program_rows, keys, warps, stages, shares)


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


# --- a launch ---


class _Sizes(NamedTuple):
    """Sizes of a call.

    page_size: keys of a page, 0 without pages.
    key_heads, rows: key heads of an element, and rows of a key head.
    list_heads: heads of the lists of tiles; an element is one of them, of a batch element.
    tiles: the most tiles of an element.
    same: whether all rows of a program see the same keys.
    """

    kv_len: int
    page_size: int
    group: int
    key_heads: int
    list_heads: int
    elements: int
    rows: int
    tiles: int
    same: bool


def _sizes_of(tensors: KernelInputs) -> _Sizes:
    q, k, _, page_table, *_ = tensors
    lists: Any = tensors[4:8]
    batch, heads, queries, _ = q.shape
    page_size, kv_len, key_heads = 0, k.shape[2], k.shape[1]
    if page_table is not None:
        _, page_size, key_heads, _ = k.shape
        kv_len = page_table.shape[1] * page_size
    group, list_heads, visible_heads, tiles = heads // key_heads, 1, 1, -(-kv_len // TILE)
    if tensors.visible is not None:
        list_heads, visible_heads = max(t.shape[1] for t in lists), tensors.visible.shape[1]
        tiles = min(tiles, sum(t.shape[-1] for t in lists[1::2]))
    rows = queries
    if list_heads == 1:  # the query heads of a key head share its tiles
        rows *= group
    else:
        key_heads = 1
    same = rows == 1 or (queries == visible_heads == 1)
    return _Sizes(kv_len, page_size, group, key_heads, list_heads, batch * list_heads, rows, max(1, tiles), same)


def _launch(results: tuple[Tensor, Tensor | None], tensors: KernelInputs, has_cap: bool) -> _Launch:
    """Compile the kernels for the layout of some arguments; ValueError for those that the operator does not take."""
    check(tensors)
    q, is_band = tensors.q, tensors.visible is None
    sizes, v_size = _sizes_of(tensors), tensors.v.shape[-1]
    elements, key_heads = sizes.elements, sizes.key_heads
    on_device = _processors(q.device), shared_memory(q.device)
    choice = _choice(sizes.rows, q.shape[-1], v_size, q.element_size(), elements, key_heads, sizes.tiles, *on_device)
    split = choice.shares > 0
    row_blocks = -(-sizes.rows // choice.rows)
    programs = (choice.shares if split else elements) * key_heads * row_blocks
    lines = programs * choice.rows
    numbers = sizes.kv_len, q.shape[2], elements, choice.shares, key_heads, row_blocks
    lists = sizes.group, sizes.list_heads, _FEW_COUNTS if elements <= _FEW_COUNTS else _MAX_COUNTS
    of_steps = *lists, choice.rows, choice.keys, TILE // choice.keys, choice.stages, split
    strides, constants = _layout(tensors, sizes)
    of_call = has_cap, dot_type(q.dtype, attend_kernel), is_band
    fixed = *numbers, sizes.rows, lines, *strides, *of_steps, *constants, *of_call
    outputs = *results, torch.empty(1, device=q.device) if split else None
    attend = compiled(attend_kernel, programs, choice.warps, (*outputs, *tensors), (1.0, 1.0, *_NO_BAND), fixed)
    if not split:
        return _Launch(attend)
    together = 8 if choice.shares <= 8 * elements else 2**13 // width_of(v_size)  # shares of a step
    constants = choice.rows, v_size, width_of(v_size), together, is_band
    fixed = *numbers, lines, *_list_strides(tensors), *_band_strides(tensors), *lists, *constants
    join = compiled(join_kernel, q.shape[:3].numel(), 4, (*outputs, *tensors.counts), _NO_BAND, fixed)
    return _Launch(attend, join, lines)


def _layout(tensors: KernelInputs, sizes: _Sizes) -> tuple[tuple[int, ...], tuple[int | bool, ...]]:
    """The strides that the first kernel takes, and its constants that follow from sizes and strides."""
    q, k, v, page_table, _, partial, _, full, visible, _, _, weight, bias = tensors
    q_grain, q_strides = with_grain(strides_of(q, 3))
    k_grain, k_strides = with_grain(_key_strides(k, sizes.page_size))
    v_grain, v_strides = with_grain(_key_strides(v, sizes.page_size))
    pair_grain, pair_strides = with_grain([*strides_of(visible, 3), *strides_of(bias, 3)])
    strides = (
        *(*q_strides, *k_strides, *v_strides, *strides_of(page_table, 1)),
        *(*_list_strides(tensors), *strides_of(partial, 2), *strides_of(full, 2)),
        *(*pair_strides[:3], *_band_strides(tensors)),
        *(*strides_of(weight, 3), *pair_strides[3:]),
    )
    page_words = 0 if page_table is None else page_table.element_size() // 4
    is_even = sizes.kv_len > 0 and sizes.kv_len % TILE == 0
    if visible is None and bias is None:
        is_even = False  # a band alone makes no use of it
    is_same_bias = not any(pair_strides[4:])
    k_size, v_size = q.shape[-1], v.shape[-1]
    constants = (
        *(k_size, v_size, width_of(k_size), width_of(v_size), q_grain, k_grain, v_grain),
        *(sizes.page_size, page_words, is_even, pair_grain),
        *(_last_stride(visible), _last_stride(bias), sizes.same, is_same_bias),
    )
    return strides, constants


def _list_strides(tensors: KernelInputs) -> list[int]:
    return strides_of(tensors.partial_counts, 2) + strides_of(tensors.full_counts, 2)


def _band_strides(tensors: KernelInputs) -> list[int]:
    return strides_of(tensors.q_starts, 1) + strides_of(tensors.kv_lens, 1)


def _last_stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.shape[-1] == 1 else tensor.stride(-1)


def _key_strides(keys: Tensor, page_size: int) -> list[int]:
    """The strides of keys or values by batch element, head, page and key. A page size of 0 means no pages."""
    one, two, three = strides_of(keys, 3)
    return [0, three, one, two] if page_size else [one, two, 0, three]
