"""Launches of the Triton kernels of attention with a whole mask."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flexmasks.cache import Launches
from flexmasks.devices import LITTLE_MEMORY, shared_memory
from flexmasks.kernels.direct import on
from flexmasks.kernels.launches import (
    Launch,
    Numbers,
    Settings,
    Tensors,
    compiled,
    dot_type,
    layouts_of,
    new,
    strides_of,
    width_of,
    with_grain,
)
from flexmasks.kernels.whole_mask import ABSOLUTE, NO_LINE, SIGNED, TILE, Line, WholeMask
from flexmasks.kernels.whole_mask_kernel import (
    bias_gradient_kernel,
    forward_kernel,
    forward_of_tiles_kernel,
    gradients_of_tiles_kernel,
    key_gradients_kernel,
    query_gradient_kernel,
)

_NOTHING = Line(0.0, 0.0, 0, False)
_LONGEST_BLOCK = 128  # queries or keys that a program takes
_SMALL_HEAD = 64
_PROGRAMS = 1024  # of the gradient of a bias, about: a GPU's processors take several each
_FEW = 8  # batch elements that share a bias, below which no program goes over them
_kernels: Launches[Kernels] = Launches("whole_mask")


# By name of the kernel; for head sizes up to 64, and for larger ones; with a bias, and without. The fastest ones of
# causal attention and a window in bfloat16 on an H100.
_TILES = {
    ("forward", False, False): Settings(64, 64, 4, 3),
    ("forward", False, True): Settings(64, 64, 4, 3),
    ("forward", True, False): Settings(64, 64, 4, 2),
    ("forward", True, True): Settings(64, 64, 4, 2),
    ("query", False, False): Settings(64, 64, 4, 3),
    ("query", False, True): Settings(64, 64, 4, 3),
    ("query", True, False): Settings(64, 64, 4, 2),
    ("query", True, True): Settings(64, 32, 4, 3),
    ("key", False, False): Settings(64, 64, 4, 3),
    ("key", False, True): Settings(32, 64, 4, 3),
    ("key", True, False): Settings(64, 64, 4, 2),
    ("key", True, True): Settings(32, 64, 4, 2),
    ("bias", False, True): Settings(64, 64, 4, 3),
    ("bias", True, True): Settings(64, 64, 4, 2),
}
# Warps, stages, and programs, about; the fastest ones of windows of 7 x 7 and 8 x 8 pixels on an H100.
_OF_TILES = {"forward": (4, 3, 1056), "gradients": (4, 2, 528)}


def kernels_of(q: Tensor, k: Tensor, v: Tensor, mask: WholeMask) -> Kernels:
    tensors = q, k, v, mask.visible, mask.weight, mask.bias
    key = (q.device.index, mask.is_wide, _kind_of(mask.line), *layouts_of(*tensors))
    kernels = _kernels.get(key)
    if kernels is None:
        kernels = Kernels(_is_one_tile(q, k, v, mask))
        _kernels.keep(key, kernels)
    return kernels


def _kind_of(line: Line | None) -> int:
    return NO_LINE if line is None else ABSOLUTE if line.is_absolute else SIGNED


def _is_one_tile(q: Tensor, k: Tensor, v: Tensor, mask: WholeMask) -> bool:
    """Whether all pairs of a head are one tile, to which many batch elements add the same numbers."""
    if mask.bias is None or mask.weight is not None or mask.line is not None or q.shape[1] != k.shape[1]:
        return False
    is_small = max(q.shape[2], k.shape[2]) <= TILE and max(q.shape[3], v.shape[3]) <= _SMALL_HEAD
    return is_small and mask.bias.shape[1:3] == q.shape[1:3] and _share_of(q, mask) >= _FEW


def _numbers(mask: WholeMask) -> Numbers:
    return mask.scale, *(mask.line or _NOTHING)[:3]


class Kernels:
    """The kernels for q, k, v and a mask of the same layouts.

    q, k, v: float16 or bfloat16 [B, H, Q, D], [B, Hkv, KV, D] and [B, Hkv, KV, Dv]; H is a multiple of Hkv. The last
        stride is 1.

    Keys that a query does not see may hold anything; values that a query does not see must be finite. In the backward
    pass q, k and v must be finite where something is hidden.
    """

    def __init__(self, is_one_tile: bool) -> None:
        self._is_one_tile = is_one_tile
        self._launches: dict[Hashable, Launch] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: WholeMask) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, Dv] and lse, float32 [B, H, Q]."""
        out = torch.empty_like(q) if q.shape[3] == v.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
        lse = new(q.shape[:3], torch.float32, q.device)
        tensors: Tensors
        with on(q.device):
            if self._is_one_tile:
                tensors = out, lse, q, k, v, mask.visible, mask.bias
                self._run("forward", forward_of_tiles_kernel, tensors, (mask.scale,), mask, (q, k, v, out))
            else:
                tensors = out, lse, q, k, v, mask.visible, mask.key_spans, mask.weight, mask.bias
                self._run("forward", forward_kernel, tensors, _numbers(mask), mask, (q, k, v, out))
        return out, lse

    def backward(
        self, d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: WholeMask, learns: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The gradients of q, k and v, and of a bias that learns, given those of output and lse. The gradient of the
        bias is summed over all that share it in an order that is always the same.
        """
        d_q, d_k, d_v = map(torch.empty_like, (q, k, v))
        visible, key_spans, query_spans, weight, bias, *_ = mask
        layout = d_out.stride(), d_out.data_ptr() % 16, None if d_lse is None else d_lse.data_ptr() % 16
        tensors: Tensors
        sums = None
        if bias is not None and learns:
            parts = _parts_of_tiles("gradients", q, mask)[0] if self._is_one_tile else _parts_of(q, mask)
            sums = new((parts, *bias.shape), torch.float32, q.device)
        with on(q.device):
            if self._is_one_tile:
                tensors = sums, d_q, d_k, d_v, d_out, d_lse, out, lse, q, k, v, visible, bias
                rows = q, k, v, out, d_out, d_q, d_k, d_v
                self._run("gradients", gradients_of_tiles_kernel, tensors, (mask.scale,), mask, rows, (layout, learns))
            else:
                deltas, numbers = torch.empty_like(lse), _numbers(mask)
                tensors = d_q, deltas, d_out, d_lse, out, lse, q, k, v, visible, key_spans, weight, bias
                self._run("query", query_gradient_kernel, tensors, numbers, mask, (q, k, v, out, d_out, d_q), layout)
                tensors = d_k, d_v, deltas, d_out, lse, q, k, v, visible, query_spans, weight, bias
                self._run("key", key_gradients_kernel, tensors, numbers, mask, (q, k, v, d_out, d_k, d_v), layout)
                if sums is not None:
                    tensors = sums, deltas, d_out, lse, q, k, v, visible, key_spans, weight, bias
                    self._run("bias", bias_gradient_kernel, tensors, numbers, mask, (q, k, v, d_out), layout)
            if bias is None or sums is None:
                return d_q, d_k, d_v
            return d_q, d_k, d_v, (sums[0] if len(sums) == 1 else sums.sum(0)).to(bias.dtype)

    def _run(
        self, name: str, kernel: Any, tensors: Tensors, numbers: Numbers, mask: WholeMask,
        with_rows: Sequence[Tensor], layout: Hashable = None,
    ) -> None:  # fmt: skip
        """Run a kernel, compiled first for tensors of a new layout.

        with_rows: q, k, v, and the other tensors that have rows, in the order of the kernel's strides.
        """
        launch = self._launches.get((name, layout))
        if launch is None:
            compile_kernel = _compiled_for_tiles if self._is_one_tile else _compiled
            launch = self._launches[name, layout] = compile_kernel(name, kernel, tensors, numbers, mask, with_rows)
        launch(tensors, numbers)


def _parts_of_tiles(name: str, q: Tensor, mask: WholeMask) -> tuple[int, int]:
    """The parts of the batch elements that share a bias, and how many elements each has."""
    share = _share_of(q, mask)
    groups_and_heads = cast(Tensor, mask.bias).shape[:2].numel()
    each = -(-share // max(1, _OF_TILES[name][2] // groups_and_heads))
    return -(-share // each), each


def _compiled_for_tiles(
    name: str, kernel: Any, tensors: Tensors, numbers: Numbers, mask: WholeMask, with_rows: Sequence[Tensor]
) -> Launch:
    q, k, v = with_rows[:3]
    bias, visible = cast(Tensor, mask.bias), mask.visible
    warps, stages, _ = _OF_TILES[name]
    parts, each = _parts_of_tiles(name, q, mask)
    grain, row_strides = with_grain([stride for x in with_rows for stride in strides_of(x, 3)])
    mask_grain, mask_strides = with_grain(strides_of(visible, 3))
    bias_grain, bias_strides = with_grain(strides_of(bias, 3))
    sizes = q.shape[2], k.shape[2], q.shape[1], _share_of(q, mask), parts, each
    constants = (
        *(width_of(q.shape[2]), width_of(k.shape[2]), stages, q.shape[3], v.shape[3]),
        *(width_of(q.shape[3]), width_of(v.shape[3]), grain, mask_grain, bias_grain),
        *(dot_type(q.dtype, kernel), visible.shape[0] == 1),
    )
    fixed = *sizes, *row_strides, *mask_strides, *bias_strides, *constants
    return compiled(kernel, parts * bias.shape[:2].numel(), warps, tensors, numbers, fixed)


def _share_of(q: Tensor, mask: WholeMask) -> int:
    """The batch elements that share a row of the bias."""
    return 1 if mask.bias is None else q.shape[0] // mask.bias.shape[0]


def _members_of(q: Tensor, mask: WholeMask) -> int:
    """The batch elements, by heads if these share the bias too, that share each number of a bias."""
    return _share_of(q, mask) * (q.shape[1] if cast(Tensor, mask.bias).shape[1] == 1 else 1)


def _parts_of(q: Tensor, mask: WholeMask) -> int:
    """How many parts the members of a bias are summed in."""
    groups, heads, queries, keys = cast(Tensor, mask.bias).shape
    tiles = _TILES["bias", q.shape[3] > _SMALL_HEAD, True]
    programs = groups * heads * -(-queries // tiles.rows) * -(-keys // tiles.keys)
    each = -(-_members_of(q, mask) // max(1, _PROGRAMS // programs))
    return -(-_members_of(q, mask) // each)


def _compiled(
    name: str, kernel: Any, tensors: Tensors, numbers: Numbers, mask: WholeMask, with_rows: Sequence[Tensor]
) -> Launch:
    q, k, v = with_rows[:3]
    (batch, heads, queries, k_size), (key_heads, keys), v_size = q.shape, k.shape[1:3], v.shape[3]
    widths = width_of(k_size), width_of(v_size)
    tiles = _TILES[name, max(widths) > _SMALL_HEAD, mask.bias is not None]
    if name == "bias" and shared_memory(q.device) < LITTLE_MEMORY:
        tiles = tiles._replace(stages=2)
    spans = mask.query_spans if name == "key" else mask.key_spans
    blocks = -(-keys // tiles.keys) if name == "key" else -(-queries // tiles.rows)
    programs = batch * (key_heads if name == "key" else heads) * blocks
    members: tuple[int, ...] = ()
    of_bias: tuple[bool, ...] = ()
    if name == "bias" and mask.bias is not None:
        groups, bias_heads, rows = mask.bias.shape[:3]
        blocks = (1 if rows == 1 else blocks) * -(-keys // tiles.keys)
        parts = _parts_of(q, mask)
        programs = parts * groups * bias_heads * blocks
        members = _members_of(q, mask), -(-_members_of(q, mask) // parts)
        of_bias = bias_heads == 1, rows == 1
    grain, row_strides = with_grain([stride for x in with_rows for stride in strides_of(x, 3)])
    mask_grain, mask_strides = with_grain(strides_of(mask.visible, 3))
    bias_grain, bias_strides = with_grain(strides_of(mask.bias, 3))
    sizes = queries, keys, heads, blocks, spans.shape[2], _share_of(q, mask), *members
    strides = *row_strides, *mask_strides, *strides_of(spans, 2), *strides_of(mask.weight, 3), *bias_strides
    is_even = queries % _LONGEST_BLOCK == 0 and keys % _LONGEST_BLOCK == 0
    constants = (
        *(heads // key_heads, tiles.rows, tiles.keys, tiles.stages, k_size, v_size, *widths),
        *(grain, mask_grain, is_even, dot_type(q.dtype, kernel), _kind_of(mask.line)),
        *(mask.visible.shape[2] == 1, bias_grain, mask.is_wide, *of_bias),
    )
    return compiled(kernel, programs, tiles.warps, tensors, numbers, (*sizes, *strides, *constants))
