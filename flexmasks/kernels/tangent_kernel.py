"""The Triton kernel of attention in forward mode: the tangent of the output, and with it output and lse.

A program takes some queries of a head, and goes over the blocks of keys that they see, in steps of KEYS keys; it reads
the bits of partial blocks. With s = scale q k^T, its tangent s' = scale (q' k^T + q k'^T) and p = softmax(s), the
tangent of the lse is p . s', and that of the output p v' + (p s') v - (p . s') out, of which the first two products
have one accumulator. If output and lse are given, p is known at once: five products of matrices, for the two of
attention alone. If not, output and lse are computed too, by a running softmax: six products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexmasks.cache import Launches
from flexmasks.devices import HOPPER, LITTLE_MEMORY, shared_memory
from flexmasks.kernels.direct import on, with_rows_together
from flexmasks.kernels.launches import (
    Launch,
    Settings,
    compiled,
    dot_type,
    layouts_of,
    names_of_strides,
    new,
    strides_of,
    width_of,
    with_grain,
)

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _offsets(rows, stride, WIDTH: tl.constexpr, GRAIN: tl.constexpr):
    return rows.to(tl.int64)[:, None] * (stride * GRAIN) + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _loaded(x, offsets, is_row, SIZE: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr):
    """Rows [rows, WIDTH], 0 from column SIZE on and, without ALL, where there are none."""
    if ALL and SIZE == WIDTH:
        values = tl.load(x + offsets)
    else:
        values = tl.load(x + offsets, mask=is_row[:, None] & (tl.arange(0, WIDTH) < SIZE)[None, :], other=0.0)
    return values


# Sizes and strides change from call to call: Triton must compile no kernel for each of their values.
_VARYING = [
    *("queries", "keys", "heads", "columns", "full_columns", "table_columns"),
    *("counts_batch", "counts_head", "indices_batch", "indices_head", "full_counts_batch", "full_counts_head"),
    *("full_batch", "full_head", "table_batch", "table_head"),
    *names_of_strides("q k v out", "batch head row"),
]


@triton.jit(do_not_specialize=_VARYING)
def tangent_kernel(
    out, lse, out_tangent, lse_tangent, q, k, v, q_tangent, k_tangent, v_tangent,
    counts, indices, full_counts, full, words, table, scale,
    queries, keys, heads, columns, full_columns, table_columns,
    counts_batch, counts_head, indices_batch, indices_head, full_counts_batch, full_counts_head,
    full_batch, full_head, table_batch, table_head,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    GROUP: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    GRAIN: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Write the tangents of output and lse, and without KNOWN output and lse, which are read otherwise.

    A tangent has the strides of what it belongs to. lse, lse_tangent: float32, contiguous [B, H, Q]. counts, indices,
    full_counts, full, words, table: see `MaskData`. The last blocks of queries are taken first: under causal masks they
    see most keys.
    """
    parts = tl.cdiv(queries, ROWS)
    number = tl.program_id(0)
    part = parts - 1 - number % parts
    head = (number // parts) % heads
    b = (number // parts // heads).to(tl.int64)
    h = head.to(tl.int64)
    key_head = h // GROUP
    row = part * ROWS + tl.arange(0, ROWS)
    is_row = row < queries
    line = (part * ROWS) // BLOCK_Q
    place = row - line * BLOCK_Q
    of_q = (b * q_batch + h * q_head) * GRAIN + _offsets(row, q_row, K_WIDTH, GRAIN)
    of_head_k = (b * k_batch + key_head * k_head) * GRAIN
    of_head_v = (b * v_batch + key_head * v_head) * GRAIN
    qs = _loaded(q, of_q, is_row, K_SIZE, K_WIDTH, EVEN_ROWS).to(DOT)
    q_tangents = _loaded(q_tangent, of_q, is_row, K_SIZE, K_WIDTH, EVEN_ROWS).to(DOT)
    of_rows = (b * heads + head) * queries + row
    slope = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, V_WIDTH), tl.float32)
    if KNOWN:
        row_max = tl.load(lse + of_rows, mask=is_row, other=0.0) * _LOG2_E
        row_max = tl.where(row_max == float("-inf"), 0.0, row_max)  # rows that see nothing: all weights are 0
    else:
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        acc_out = tl.zeros((ROWS, V_WIDTH), tl.float32)
    table += b * table_batch + h * table_head + line * table_columns
    STEPS: tl.constexpr = BLOCK_KV // KEYS
    for FULL in tl.static_range(2):
        if FULL:
            steps = tl.load(full_counts + b * full_counts_batch + h * full_counts_head + line) * STEPS
            blocks = full + b * full_batch + h * full_head + line * full_columns
        else:
            steps = tl.load(counts + b * counts_batch + h * counts_head + line) * STEPS
            blocks = indices + b * indices_batch + h * indices_head + line * columns
        next_block = tl.load(blocks, mask=steps > 0, other=0)  # one step ahead, so that the loop can be pipelined
        # Words are known a load later than keys: one more stage has both ready in time, in no more shared memory.
        for step in tl.range(0, steps, num_stages=STAGES + 1 - FULL):
            block = next_block
            next_block = tl.load(blocks + (step + 1) // STEPS, mask=step + 1 < steps, other=0)
            key = block * BLOCK_KV + step % STEPS * KEYS + tl.arange(0, KEYS)
            is_key = key < keys
            of_k = of_head_k + _offsets(key, k_row, K_WIDTH, GRAIN)
            ks = _loaded(k, of_k, is_key, K_SIZE, K_WIDTH, EVEN).to(DOT)
            k_tangents = _loaded(k_tangent, of_k, is_key, K_SIZE, K_WIDTH, EVEN).to(DOT)
            scores = tl.dot(qs, tl.trans(ks), input_precision="tf32x3") * (scale * _LOG2_E)
            slopes = tl.dot(q_tangents, tl.trans(ks), input_precision="tf32x3")
            slopes = tl.dot(qs, tl.trans(k_tangents), slopes, input_precision="tf32x3") * scale
            if not FULL:
                at = (tl.load(table + block) * BLOCK_Q + place) * (BLOCK_KV // 32) + step % STEPS * (KEYS // 32)
                of_keys = tl.load(words + at[:, None] + tl.arange(0, KEYS // 32)[None, :])  # one word for 32 keys
                bits = of_keys[:, :, None] >> tl.arange(0, 32)[None, None, :]
                is_visible = (tl.reshape(bits, (ROWS, KEYS)) & 1) != 0
                scores = tl.where(is_visible, scores, float("-inf"))
                slopes = tl.where(is_visible, slopes, 0.0)
            if not EVEN:
                scores = tl.where(is_key[None, :], scores, float("-inf"))
            if KNOWN:
                weights = tl.exp2(scores - row_max[:, None])
            else:
                new_max = tl.maximum(row_max, tl.max(scores, 1))
                base = tl.where(new_max == float("-inf"), 0.0, new_max)  # rows that have seen nothing
                weights = tl.exp2(scores - base[:, None])
                kept = tl.exp2(row_max - base)
                row_max = new_max
                total = total * kept + tl.sum(weights, 1)
                slope = slope * kept
                acc = acc * kept[:, None]
                acc_out = acc_out * kept[:, None]
            slopes = weights * slopes
            slope += tl.sum(slopes, 1)
            of_v = of_head_v + _offsets(key, v_row, V_WIDTH, GRAIN)
            vs = _loaded(v, of_v, is_key, V_SIZE, V_WIDTH, EVEN).to(DOT)
            v_tangents = _loaded(v_tangent, of_v, is_key, V_SIZE, V_WIDTH, EVEN).to(DOT)
            if not KNOWN:
                acc_out = tl.dot(weights.to(DOT), vs, acc_out, input_precision="tf32x3")
            acc = tl.dot(weights.to(DOT), v_tangents, acc, input_precision="tf32x3")
            acc = tl.dot(slopes.to(DOT), vs, acc, input_precision="tf32x3")
    of_out = (b * out_batch + h * out_head) * GRAIN + _offsets(row, out_row, V_WIDTH, GRAIN)
    is_written = is_row[:, None] & (tl.arange(0, V_WIDTH) < V_SIZE)[None, :]
    if KNOWN:
        result = tl.load(out + of_out, mask=is_written, other=0.0).to(tl.float32)
    else:
        total = tl.where(total == 0, 1.0, total)
        result = acc_out / total[:, None]
        acc = acc / total[:, None]
        slope = slope / total
        tl.store(out + of_out, result.to(out.dtype.element_ty), mask=is_written)
        tl.store(lse + of_rows, (row_max + tl.log2(total)) * _LN_2, mask=is_row)
    tangents = acc - slope[:, None] * result
    tl.store(out_tangent + of_out, tangents.to(out_tangent.dtype.element_ty), mask=is_written)
    tl.store(lse_tangent + of_rows, slope, mask=is_row)


# By the bytes of a number, and the width of a head up to which they are for: they fit registers and shared memory of an
# H200. Elsewhere all but large heads take the last ones.
TILES = {
    (2, 64): Settings(128, 64, 8, 3),
    (2, 128): Settings(128, 64, 8, 2),
    (2, 256): Settings(64, 32, 8, 2),
    (4, 64): Settings(64, 32, 4, 2),
    (4, 128): Settings(32, 32, 4, 2),
}
_SMALL = Settings(32, 32, 4, 1)
_WIDEST_OF_FLOAT32 = (
    64  # heads of which `_SMALL` fits into little memory; words of bits have 32 keys, so no tile has less
)
_launches: Launches[Launch] = Launches("tangents")


def tiles_for(q: Tensor, v: Tensor) -> Settings | None:
    """The tiles for the dtype and the sizes of a head, None if there are none."""
    size = max(q.shape[3], v.shape[3])
    tiles = next((t for (item, width), t in TILES.items() if item == q.element_size() and size <= width), None)
    memory = shared_memory(q.device)
    if tiles is None or memory >= HOPPER:
        return tiles
    fits = memory >= LITTLE_MEMORY or q.element_size() == 2 or size <= _WIDEST_OF_FLOAT32
    return _SMALL if fits else None


def tangents_of(
    q: Tensor, k: Tensor, v: Tensor, tangents: tuple[Tensor, Tensor, Tensor], blocks: tuple[Tensor, ...],
    scale: float, results: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output and lse, and their tangents, [B, H, Q, Dv] and float32 [B, H, Q].

    q, k, v: [B, H, Q, D], [B, Hkv, KV, D] and [B, Hkv, KV, Dv] of one dtype; H is a multiple of Hkv.
    blocks: the lists of partial and of full blocks and the bits of partial ones, as `MaskData` has them: counts, int32
        [B or 1, H or 1, rows], and indices [B or 1, H or 1, rows, columns] of both, words, and their table.
    results: output and lse if they are known, with attention sinks folded in or without.
    """
    (q, of_q), (k, of_k), (v, of_v) = map(_in_one_layout, (q, k, v), tangents)
    out, lse = results or (q.new_empty(*q.shape[:3], v.shape[3]), new(q.shape[:3], torch.float32, q.device))
    (out, of_out), lse = _in_one_layout(out, torch.empty_like(out)), lse.contiguous()
    tensors = out, lse, of_out, torch.empty_like(lse), q, k, v, of_q, of_k, of_v, *blocks
    key = (q.device.index, results is None, *layouts_of(*tensors))
    launch = _launches.get(key)
    with on(q.device):
        if launch is None:
            launch = _compiled(tensors, scale, results is not None)
            _launches.keep(key, launch)
        launch(tensors, (scale,))
    return tensors[0], tensors[1], tensors[2], tensors[3]


def _in_one_layout(x: Tensor, tangent: Tensor) -> list[Tensor]:
    if x.stride() != tangent.stride():
        x, tangent = x.contiguous(), tangent.contiguous()
    return with_rows_together(x, tangent.to(x.dtype))


def _compiled(tensors: tuple[Tensor, ...], scale: float, is_known: bool) -> Launch:
    out, *_, q, k, v = tensors[:7]
    _, indices, _, full, words, table = tensors[10:]
    tiles = tiles_for(q, v) or _SMALL
    block_size = words.shape[1], words.shape[2] * 32
    rows, keys = min(tiles.rows, block_size[0]), min(tiles.keys, block_size[1])
    (batch, heads, queries, size), kv_len = q.shape, k.shape[2]
    grain, strides = with_grain([n for x in (q, k, v, out) for n in strides_of(x, 3)])
    lists = [n for x in (*tensors[10:14], table) for n in strides_of(x, 2)]
    columns = indices.stride(2), full.stride(2), table.stride(2)
    fixed = (
        *(queries, kv_len, heads, *columns, *lists, *strides),
        *(heads // k.shape[1], size, v.shape[3], width_of(size), width_of(v.shape[3]), grain),
        *(*block_size, rows, keys, tiles.stages, queries % rows == 0, kv_len % block_size[1] == 0),
        *(dot_type(q.dtype, tangent_kernel), is_known),
    )
    return compiled(tangent_kernel, batch * heads * -(-queries // rows), tiles.warps, tensors, (scale,), fixed)
