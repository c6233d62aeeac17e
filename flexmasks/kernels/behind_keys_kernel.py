"""Triton kernel of attention for queries whose keys would end behind the last key.

A program takes ROWS queries of one head. It ends at once if the keys of all of them end before the last key. Strides
come divided by GRAIN; multiplying them by it proves their alignment to the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexmasks.kernels.few_queries_kernel import tanh

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_NUMBERS = (
    "queries", "keys", "heads", "blocks", "left", "right", "start_stride",
    "q_batch", "q_head", "q_query", "k_batch", "k_head", "k_key", "v_batch", "v_head", "v_key",
    "out_batch", "out_head", "out_query", "lse_batch", "lse_head", "lse_query",
)  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def behind_keys_kernel(
    out, lse, q, k, v, starts, scale, cap,
    queries, keys, heads, blocks, left, right, start_stride,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key,
    out_batch, out_head, out_query, lse_batch, lse_head, lse_query,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    GRAIN: tl.constexpr, DOT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Write output and lse of the queries with no key at their position + right.

    They see all keys from their position - left on, or with HAS_LEFT off all keys.
    """
    program = tl.program_id(0)
    block = program % blocks
    b = (program // blocks // heads).to(tl.int64)
    h = (program // blocks % heads).to(tl.int64)
    start = tl.load(starts + b * start_stride).to(tl.int64)
    begin = tl.maximum(keys - right - start, block * ROWS)  # the first such query
    if begin < tl.minimum((block + 1) * ROWS, queries):
        kv_head = h // GROUP
        query = block * ROWS + tl.arange(0, ROWS)
        key_place = tl.arange(0, KEYS)
        k_column = tl.arange(0, K_WIDTH)
        v_column = tl.arange(0, V_WIDTH)
        is_query = query < queries
        q_rows = tl.load(
            q + (b * q_batch + h * q_head + query.to(tl.int64)[:, None] * q_query) * GRAIN + k_column[None, :],
            mask=is_query[:, None] & (k_column < K_SIZE)[None, :],
            other=0.0,
        ).to(DOT)
        k += (b * k_batch + kv_head * k_head) * GRAIN
        v += (b * v_batch + kv_head * v_head) * GRAIN
        first = start * 0
        if HAS_LEFT:
            first = tl.minimum(tl.maximum(begin + start - left, 0), keys)
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, V_WIDTH), tl.float32)
        for step in range(first, keys, KEYS):
            key = step + key_place
            is_key = key < keys
            k_rows = tl.load(
                k + key[:, None] * (k_key * GRAIN) + k_column[None, :],
                mask=is_key[:, None] & (k_column < K_SIZE)[None, :],
                other=0.0,
            ).to(DOT)
            scores = tl.dot(q_rows, tl.trans(k_rows)) * scale
            if HAS_CAP:
                scores = cap * tanh(scores / cap)
            is_seen = is_key[None, :]
            if HAS_LEFT:
                is_seen = is_seen & (key[None, :] >= query[:, None] + start - left)
            scores = tl.where(is_seen, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2((scores - base[:, None]) * _LOG2_E)
            kept = tl.exp2((row_max - base) * _LOG2_E)
            total = total * kept + tl.sum(weights, 1)
            v_rows = tl.load(
                v + key[:, None] * (v_key * GRAIN) + v_column[None, :],
                mask=is_key[:, None] & (v_column < V_SIZE)[None, :],
                other=0.0,
            ).to(DOT)
            acc = tl.dot(weights.to(DOT), v_rows, acc * kept[:, None])
            row_max = new_max
        is_empty = total == 0  # NaN is not empty
        acc = tl.where(is_empty[:, None], 0.0, acc / total[:, None])
        row_lse = tl.where(is_empty, float("-inf"), row_max + tl.log(total))
        is_written = is_query & (query >= begin)
        row = query.to(tl.int64)
        tl.store(
            out + (b * out_batch + h * out_head + row[:, None] * out_query) * GRAIN + v_column[None, :],
            acc.to(out.dtype.element_ty),
            mask=is_written[:, None] & (v_column < V_SIZE)[None, :],
        )
        tl.store(lse + b * lse_batch + h * lse_head + row * lse_query, row_lse, mask=is_written)
