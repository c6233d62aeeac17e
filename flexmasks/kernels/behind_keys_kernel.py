"""Triton kernel of attention for queries whose keys would end behind the last key.

A program takes ROWS queries of one head. It ends at once if the keys of all of them end before the last key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexmasks.kernels.few_queries_kernel import tanh
from flexmasks.kernels.whole_mask_kernel import output_and_lse, rows_of, with_scores

_NUMBERS = (
    "queries", "keys", "heads", "blocks", "left", "right", "start_stride",
    "q_batch", "q_head", "q_query", "k_batch", "k_head", "k_key", "v_batch", "v_head", "v_key",
    "out_batch", "out_head", "out_query", "lse_batch", "lse_head", "lse_query",
)  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def behind_keys_kernel(
    out, lse, q, k, v, q_starts, scale, cap,
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
    start = tl.load(q_starts + b * start_stride).to(tl.int64)
    begin = tl.maximum(keys - right - start, block * ROWS)  # the first such query
    if begin < tl.minimum((block + 1) * ROWS, queries):
        kv_head = h // GROUP
        query = block * ROWS + tl.arange(0, ROWS)
        q += (b * q_batch + h * q_head) * GRAIN
        q_rows = rows_of(q, query, q_query, queries, K_SIZE, K_WIDTH, GRAIN, False, DOT)
        k += (b * k_batch + kv_head * k_head) * GRAIN
        v += (b * v_batch + kv_head * v_head) * GRAIN
        first = start * 0
        if HAS_LEFT:
            first = tl.minimum(tl.maximum(begin + start - left, 0), keys)
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, V_WIDTH), tl.float32)
        for step in range(first, keys, KEYS):
            key = step + tl.arange(0, KEYS)
            k_rows = rows_of(k, key, k_key, keys, K_SIZE, K_WIDTH, GRAIN, False, DOT)
            scores = tl.dot(q_rows, tl.trans(k_rows)) * scale
            if HAS_CAP:
                scores = cap * tanh(scores / cap)
            is_seen = (key < keys)[None, :]
            if HAS_LEFT:
                is_seen = is_seen & (key[None, :] >= query[:, None] + start - left)
            scores = tl.where(is_seen, scores, float("-inf"))
            v_rows = rows_of(v, key, v_key, keys, V_SIZE, V_WIDTH, GRAIN, False, DOT)
            row_max, total, acc = with_scores(row_max, total, acc, scores, v_rows, DOT)
        acc, row_lse = output_and_lse(row_max, total, acc)
        is_written = (query < queries) & (query >= begin)
        row = query.to(tl.int64)
        v_column = tl.arange(0, V_WIDTH)
        tl.store(
            out + (b * out_batch + h * out_head + row[:, None] * out_query) * GRAIN + v_column[None, :],
            acc.to(out.dtype.element_ty),
            mask=is_written[:, None] & (v_column < V_SIZE)[None, :],
        )
        tl.store(lse + b * lse_batch + h * lse_head + row * lse_query, row_lse, mask=is_written)
