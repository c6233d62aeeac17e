"""Triton kernels of attention with a whole mask as a tensor, forward and backward.

A program of the forward pass and of the gradient of queries takes some queries of one head, and goes over the keys from
the first tile to the last that one of them sees. A program of the gradients of keys and values takes some keys of one
key head, and goes over the queries of all its query heads. No program writes where another one does, so results are the
same at each run.

A byte of the mask is read for each pair in these tiles, and a number where there is a bias, which batch elements may
share; a bias that is a line over the distance is computed. A program of the gradient of a bias takes a tile of it, and
goes over the batch elements and heads that share it. Where all pairs of a head are one tile, as in windows of images, a
program goes over batch elements of a head instead: it reads their bias once, and computes all gradients of a tile from
one product of its queries and keys. Scores stay natural numbers, and are multiplied by log2(e) only
after the largest score was subtracted: the product of a very low score would be infinite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexmasks.kernels import whole_mask
from flexmasks.kernels.launches import names_of_strides

_TILE: tl.constexpr = tl.constexpr(whole_mask.TILE)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_NUMBERS = ["queries", "keys", "heads", "blocks", "span_count", "share", "members", "each", "parts", "shift"]
_NUMBERS += names_of_strides("q k v out d_out d_q d_k d_v visible span weight bias", "batch head query key")
_ABSOLUTE: tl.constexpr = tl.constexpr(whole_mask.ABSOLUTE)


@triton.jit
def _rows_of(
    x, position, stride, end, SIZE: tl.constexpr, WIDTH: tl.constexpr, GRAIN: tl.constexpr, EVEN: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Rows of a matrix, 0 behind its last row."""
    column = tl.arange(0, WIDTH)
    at = x + position.to(tl.int64)[:, None] * (stride * GRAIN) + column[None, :]
    if EVEN and SIZE == WIDTH:
        rows = tl.load(at)
    elif EVEN:
        rows = tl.load(at, mask=(column < SIZE)[None, :], other=0.0)
    elif SIZE == WIDTH:
        rows = tl.load(at, mask=(position < end)[:, None], other=0.0)
    else:
        rows = tl.load(at, mask=(position < end)[:, None] & (column < SIZE)[None, :], other=0.0)
    return rows.to(DOT)


@triton.jit
def _store_rows(x, rows, position, stride, end, SIZE: tl.constexpr, WIDTH: tl.constexpr, GRAIN: tl.constexpr):
    column = tl.arange(0, WIDTH)
    at = x + position.to(tl.int64)[:, None] * (stride * GRAIN) + column[None, :]
    written = (position < end)[:, None] & (column < SIZE)[None, :]
    tl.store(at, rows.to(x.dtype.element_ty), mask=written)


@triton.jit
def _span_of(spans, block, span_count, ROWS: tl.constexpr):
    """The start and the end of what a block of rows sees, from the first tile and the end of each tile of rows."""
    PARTS: tl.constexpr = ROWS // _TILE
    part = block * PARTS + tl.arange(0, PARTS)
    is_part = part < span_count
    first = tl.load(spans + part * 2, mask=is_part, other=2**24)
    end = tl.load(spans + part * 2 + 1, mask=is_part, other=0)
    return tl.min(first) * _TILE, tl.max(end) * _TILE


@triton.jit
def _scores(
    left, right, pairs, query, key,
    TURNED: tl.constexpr, EVEN: tl.constexpr, GRAIN: tl.constexpr, LINE: tl.constexpr, ONE_ROW: tl.constexpr,
    BIAS_GRAIN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scores [queries, keys], -inf where hidden; [keys, queries] if TURNED.

    left, right: queries and turned keys, or keys and turned queries.
    pairs: the mask and the bias of a batch element and head, their strides of queries, the lengths, and the scale with
        the numbers of a line.
    query, key: positions.

    WIDE: rows of the bias go on to the end of the last tile of keys.

    A mask of one row is read as a vector: from a matrix [1, keys], Triton moves all scores to the registers of it.
    """
    visible, weight, bias, visible_query, weight_query, bias_query, queries, keys, scale, slope, begin, shift = pairs
    of_query = query[None, :] if TURNED else query[:, None]
    of_key = key[:, None] if TURNED else key[None, :]
    query_row = of_query.to(tl.int64)
    if ONE_ROW:
        line = tl.load(visible + key) if EVEN else tl.load(visible + key, mask=key < keys, other=0)
        marks = line[:, None] if TURNED else line[None, :]
    elif EVEN:
        marks = tl.load(visible + query_row * (visible_query * GRAIN) + of_key)
    else:
        marks = tl.load(visible + query_row * (visible_query * GRAIN) + of_key, mask=of_query < queries, other=0)
    if LINE or bias is None:
        scores = tl.dot(left, right) * scale
    else:
        row = bias + query_row * (bias_query * BIAS_GRAIN) + of_key
        if EVEN:
            numbers = tl.load(row)
        elif WIDE:
            numbers = tl.load(row, mask=of_query < queries, other=0.0)
        else:
            numbers = tl.load(row, mask=(of_query < queries) & (of_key < keys), other=0.0)
        numbers = numbers.to(tl.float32)
        if weight is not None:
            numbers *= tl.load(weight + query_row * weight_query, mask=of_query < queries, other=0.0)
        scores = tl.dot(left, right) * scale + numbers
    if LINE:
        distance = (of_key - of_query - shift).to(tl.float32)
        numbers = slope * (tl.abs(distance) if LINE == _ABSOLUTE else distance) + begin
        if weight is not None:
            numbers *= tl.load(weight + query_row * weight_query, mask=of_query < queries, other=0.0)
        scores += numbers
    return tl.where(marks != 0, scores, float("-inf"))


@triton.jit
def _step(
    start, q_rows, query, k, v, k_key, v_key, keys, pairs,
    KEYS: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    GRAIN: tl.constexpr, MASK_GRAIN: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, LINE: tl.constexpr,
    ONE_ROW: tl.constexpr, BIAS_GRAIN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Keys, values, and the scores of queries with these keys."""
    key = start + tl.arange(0, KEYS)
    k_rows = _rows_of(k, key, k_key, keys, K_SIZE, K_WIDTH, GRAIN, EVEN, DOT)
    v_rows = _rows_of(v, key, v_key, keys, V_SIZE, V_WIDTH, GRAIN, EVEN, DOT)
    scores = _scores(
        q_rows, tl.trans(k_rows), pairs, query, key, False, EVEN, MASK_GRAIN, LINE, ONE_ROW, BIAS_GRAIN, WIDE
    )
    return k_rows, v_rows, scores


@triton.jit
def _with_scores(row_max, total, acc, scores, v_rows, DOT: tl.constexpr):
    """The state of a running softmax after more scores, -inf where hidden, and their values: the largest score of each
    row, and the sums of weights and of weighted values.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2((scores - base[:, None]) * _LOG2_E)
    kept = tl.exp2((row_max - base) * _LOG2_E)
    total = total * kept + tl.sum(weights, 1)
    acc = tl.dot(weights.to(DOT), v_rows, acc * kept[:, None])
    return new_max, total, acc


@triton.jit
def _output_and_lse(row_max, total, acc):
    is_empty = total == 0  # NaN is not empty
    acc = tl.where(is_empty[:, None], 0.0, acc / total[:, None])
    return acc, tl.where(is_empty, float("-inf"), row_max + tl.log(total))


@triton.jit
def _finite_lse(lse, at, is_query):
    """The lse of queries, 0 for queries that see nothing. Rows beyond the last get inf: whatever their scores, no
    weights.
    """
    row_lse = tl.load(lse + at, mask=is_query, other=float("inf"))
    return tl.where(row_lse == float("-inf"), 0.0, row_lse)


@triton.jit
def _bytes(visible):
    return visible.to(tl.pointer_type(tl.int8), bitcast=True)


@triton.jit(do_not_specialize=_NUMBERS)
def forward_kernel(
    out, lse, q, k, v, visible, key_spans, weight, bias, scale, slope, begin, shift,
    queries, keys, heads, blocks, span_count, share,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, out_batch, out_head, out_query,
    visible_batch, visible_head, visible_query, span_batch, span_head,
    weight_batch, weight_head, weight_query, bias_batch, bias_head, bias_query,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    GRAIN: tl.constexpr, MASK_GRAIN: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, LINE: tl.constexpr,
    ONE_ROW: tl.constexpr, BIAS_GRAIN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attend some queries of one head."""
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks  # the last queries first: under causal masks they see the most keys
    b = (program // blocks // heads).to(tl.int64)
    h = (program // blocks % heads).to(tl.int64)
    kv_head = h // GROUP
    q += (b * q_batch + h * q_head) * GRAIN
    k += (b * k_batch + kv_head * k_head) * GRAIN
    v += (b * v_batch + kv_head * v_head) * GRAIN
    out += (b * out_batch + h * out_head) * GRAIN
    lse += (b * heads + h) * queries
    marks = _bytes(visible) + (b * visible_batch + h * visible_head) * MASK_GRAIN
    key_spans += b * span_batch + h * span_head
    if bias is not None:
        bias += (b // share * bias_batch + h * bias_head) * BIAS_GRAIN
    if weight is not None:
        weight += b * weight_batch + h * weight_head
    pairs = marks, weight, bias, visible_query, weight_query, bias_query, queries, keys, scale, slope, begin, shift
    query = block * ROWS + tl.arange(0, ROWS)
    q_rows = _rows_of(q, query, q_query, queries, K_SIZE, K_WIDTH, GRAIN, EVEN, DOT)
    first, end = _span_of(key_spans, block, span_count, ROWS)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, V_WIDTH), tl.float32)
    for start in tl.range(first, end, KEYS, num_stages=STAGES):
        _, v_rows, scores = _step(
            start, q_rows, query, k, v, k_key, v_key, keys, pairs,
            KEYS, K_SIZE, V_SIZE, K_WIDTH, V_WIDTH, GRAIN, MASK_GRAIN, EVEN, DOT, LINE, ONE_ROW, BIAS_GRAIN, WIDE,
        )  # fmt: skip
        row_max, total, acc = _with_scores(row_max, total, acc, scores, v_rows, DOT)
    acc, row_lse = _output_and_lse(row_max, total, acc)
    tl.store(lse + query, row_lse, mask=query < queries)
    _store_rows(out, acc, query, out_query, queries, V_SIZE, V_WIDTH, GRAIN)


@triton.jit(do_not_specialize=_NUMBERS)
def query_gradient_kernel(
    d_q, deltas, d_out, d_lse, out, lse, q, k, v, visible, key_spans, weight, bias, scale, slope, begin, shift,
    queries, keys, heads, blocks, span_count, share,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, out_batch, out_head, out_query,
    d_out_batch, d_out_head, d_out_query, d_q_batch, d_q_head, d_q_query,
    visible_batch, visible_head, visible_query, span_batch, span_head,
    weight_batch, weight_head, weight_query, bias_batch, bias_head, bias_query,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    GRAIN: tl.constexpr, MASK_GRAIN: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, LINE: tl.constexpr,
    ONE_ROW: tl.constexpr, BIAS_GRAIN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of some queries of one head. Also writes, for the other kernel, the sum of out * d_out of
    each query, less the gradient of its lse.
    """
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    b = (program // blocks // heads).to(tl.int64)
    h = (program // blocks % heads).to(tl.int64)
    kv_head = h // GROUP
    q += (b * q_batch + h * q_head) * GRAIN
    d_q += (b * d_q_batch + h * d_q_head) * GRAIN
    k += (b * k_batch + kv_head * k_head) * GRAIN
    v += (b * v_batch + kv_head * v_head) * GRAIN
    out += (b * out_batch + h * out_head) * GRAIN
    d_out += (b * d_out_batch + h * d_out_head) * GRAIN
    line = (b * heads + h) * queries
    marks = _bytes(visible) + (b * visible_batch + h * visible_head) * MASK_GRAIN
    key_spans += b * span_batch + h * span_head
    if bias is not None:
        bias += (b // share * bias_batch + h * bias_head) * BIAS_GRAIN
    if weight is not None:
        weight += b * weight_batch + h * weight_head
    pairs = marks, weight, bias, visible_query, weight_query, bias_query, queries, keys, scale, slope, begin, shift
    query = block * ROWS + tl.arange(0, ROWS)
    is_query = query < queries
    q_rows = _rows_of(q, query, q_query, queries, K_SIZE, K_WIDTH, GRAIN, EVEN, DOT)
    upstream = _rows_of(d_out, query, d_out_query, queries, V_SIZE, V_WIDTH, GRAIN, EVEN, DOT)
    results = _rows_of(out, query, out_query, queries, V_SIZE, V_WIDTH, GRAIN, EVEN, DOT)
    delta = tl.sum(results.to(tl.float32) * upstream.to(tl.float32), 1)
    if d_lse is not None:
        delta -= tl.load(d_lse + line + query, mask=is_query, other=0.0)
    tl.store(deltas + line + query, delta, mask=is_query)
    row_lse = _finite_lse(lse, line + query, is_query)
    first, end = _span_of(key_spans, block, span_count, ROWS)
    acc = tl.zeros((ROWS, K_WIDTH), tl.float32)
    for start in tl.range(first, end, KEYS, num_stages=STAGES):
        k_rows, v_rows, scores = _step(
            start, q_rows, query, k, v, k_key, v_key, keys, pairs,
            KEYS, K_SIZE, V_SIZE, K_WIDTH, V_WIDTH, GRAIN, MASK_GRAIN, EVEN, DOT, LINE, ONE_ROW, BIAS_GRAIN, WIDE,
        )  # fmt: skip
        weights = tl.exp2((scores - row_lse[:, None]) * _LOG2_E)
        d_weights = tl.dot(upstream, tl.trans(v_rows))
        d_scores = weights * (d_weights - delta[:, None])
        acc = tl.dot(d_scores.to(DOT), k_rows, acc)
    _store_rows(d_q, acc * scale, query, d_q_query, queries, K_SIZE, K_WIDTH, GRAIN)


@triton.jit(do_not_specialize=_NUMBERS)
def key_gradients_kernel(
    d_k, d_v, deltas, d_out, lse, q, k, v, visible, query_spans, weight, bias, scale, slope, begin, shift,
    queries, keys, heads, blocks, span_count, share,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key,
    d_out_batch, d_out_head, d_out_query, d_k_batch, d_k_head, d_k_key, d_v_batch, d_v_head, d_v_key,
    visible_batch, visible_head, visible_query, span_batch, span_head,
    weight_batch, weight_head, weight_query, bias_batch, bias_head, bias_query,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    GRAIN: tl.constexpr, MASK_GRAIN: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, LINE: tl.constexpr,
    ONE_ROW: tl.constexpr, BIAS_GRAIN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of some keys of one key head, and of their values."""
    program = tl.program_id(0)
    block = program % blocks
    kv_heads = heads // GROUP
    b = (program // blocks // kv_heads).to(tl.int64)
    kv_head = (program // blocks % kv_heads).to(tl.int64)
    k += (b * k_batch + kv_head * k_head) * GRAIN
    v += (b * v_batch + kv_head * v_head) * GRAIN
    d_k += (b * d_k_batch + kv_head * d_k_head) * GRAIN
    d_v += (b * d_v_batch + kv_head * d_v_head) * GRAIN
    key = block * KEYS + tl.arange(0, KEYS)
    k_rows = _rows_of(k, key, k_key, keys, K_SIZE, K_WIDTH, GRAIN, EVEN, DOT)
    v_rows = _rows_of(v, key, v_key, keys, V_SIZE, V_WIDTH, GRAIN, EVEN, DOT)
    k_acc = tl.zeros((KEYS, K_WIDTH), tl.float32)
    v_acc = tl.zeros((KEYS, V_WIDTH), tl.float32)
    for place in range(GROUP):
        h = kv_head * GROUP + place
        line = (b * heads + h) * queries
        own_q = q + (b * q_batch + h * q_head) * GRAIN
        own_d_out = d_out + (b * d_out_batch + h * d_out_head) * GRAIN
        marks = _bytes(visible) + (b * visible_batch + h * visible_head) * MASK_GRAIN
        own_weight, own_bias = weight, bias
        if bias is not None:
            own_bias = bias + (b // share * bias_batch + h * bias_head) * BIAS_GRAIN
        if weight is not None:
            own_weight = weight + b * weight_batch + h * weight_head
        pairs = (
            marks, own_weight, own_bias, visible_query, weight_query, bias_query,
            queries, keys, scale, slope, begin, shift,
        )  # fmt: skip
        first, end = _span_of(query_spans + b * span_batch + h * span_head, block, span_count, KEYS)
        for start in tl.range(first, end, ROWS, num_stages=STAGES):
            query = start + tl.arange(0, ROWS)
            is_query = query < queries
            q_rows = _rows_of(own_q, query, q_query, queries, K_SIZE, K_WIDTH, GRAIN, EVEN, DOT)
            upstream = _rows_of(own_d_out, query, d_out_query, queries, V_SIZE, V_WIDTH, GRAIN, EVEN, DOT)
            row_lse = _finite_lse(lse, line + query, is_query)
            delta = tl.load(deltas + line + query, mask=is_query, other=0.0)
            scores = _scores(
                k_rows, tl.trans(q_rows), pairs, query, key, True, EVEN, MASK_GRAIN, LINE, ONE_ROW, BIAS_GRAIN, WIDE
            )
            weights = tl.exp2((scores - row_lse[None, :]) * _LOG2_E)
            v_acc = tl.dot(weights.to(DOT), upstream, v_acc)
            d_weights = tl.dot(v_rows, tl.trans(upstream))
            d_scores = weights * (d_weights - delta[None, :])
            k_acc = tl.dot(d_scores.to(DOT), q_rows, k_acc)
    _store_rows(d_k, k_acc * scale, key, d_k_key, keys, K_SIZE, K_WIDTH, GRAIN)
    _store_rows(d_v, v_acc, key, d_v_key, keys, V_SIZE, V_WIDTH, GRAIN)


@triton.jit(do_not_specialize=_NUMBERS)
def bias_gradient_kernel(
    d_bias, deltas, d_out, lse, q, k, v, visible, key_spans, weight, bias, scale, slope, begin, shift,
    queries, keys, heads, blocks, span_count, share, members, each,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key,
    d_out_batch, d_out_head, d_out_query,
    visible_batch, visible_head, visible_query, span_batch, span_head,
    weight_batch, weight_head, weight_query, bias_batch, bias_head, bias_query,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    GRAIN: tl.constexpr, MASK_GRAIN: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, LINE: tl.constexpr,
    ONE_ROW: tl.constexpr, BIAS_GRAIN: tl.constexpr, WIDE: tl.constexpr,
    ONE_HEAD: tl.constexpr, ONE_QUERY: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a tile of a bias over a part of the batch elements and heads that share it, in their order.

    d_bias: float32 [parts, batch elements / share, H or 1, Q or 1, KV].
    share: the batch elements that share a row of the bias.
    members: the batch elements, by heads if these share the bias too; a part has `each` of them.
    blocks: tiles of queries and keys together.
    """
    program = tl.program_id(0)
    columns = tl.cdiv(keys, KEYS)
    block, column = program % blocks // columns, program % columns
    bias_heads = 1 if ONE_HEAD else heads
    bias_queries = 1 if ONE_QUERY else queries
    own_head = program // blocks % bias_heads
    group_and_part = program // blocks // bias_heads
    parts = tl.cdiv(members, each)
    part, group = group_and_part % parts, group_and_part // parts
    groups = tl.num_programs(0) // blocks // bias_heads // parts
    steps = tl.cdiv(queries, ROWS) - block if ONE_QUERY else 1
    key = column * KEYS + tl.arange(0, KEYS)
    acc = tl.zeros((ROWS, KEYS), tl.float32)
    for step in tl.range(part * each * steps, tl.minimum(members, (part + 1) * each) * steps, num_stages=STAGES):
        member = step // steps
        h = member % heads if ONE_HEAD else own_head
        b = (group * share + (member // heads if ONE_HEAD else member)).to(tl.int64)
        query = (block + step % steps) * ROWS + tl.arange(0, ROWS)
        is_query = query < queries
        line = (b * heads + h) * queries
        own_q = q + (b * q_batch + h * q_head) * GRAIN
        own_k = k + (b * k_batch + h // GROUP * k_head) * GRAIN
        own_v = v + (b * v_batch + h // GROUP * v_head) * GRAIN
        own_d_out = d_out + (b * d_out_batch + h * d_out_head) * GRAIN
        marks = _bytes(visible) + (b * visible_batch + h * visible_head) * MASK_GRAIN
        own_bias = bias + (b // share * bias_batch + h * bias_head) * BIAS_GRAIN
        pairs = (
            marks, weight, own_bias, visible_query, weight_query, bias_query,
            queries, keys, scale, slope, begin, shift,
        )  # fmt: skip
        q_rows = _rows_of(own_q, query, q_query, queries, K_SIZE, K_WIDTH, GRAIN, EVEN, DOT)
        k_rows = _rows_of(own_k, key, k_key, keys, K_SIZE, K_WIDTH, GRAIN, EVEN, DOT)
        v_rows = _rows_of(own_v, key, v_key, keys, V_SIZE, V_WIDTH, GRAIN, EVEN, DOT)
        upstream = _rows_of(own_d_out, query, d_out_query, queries, V_SIZE, V_WIDTH, GRAIN, EVEN, DOT)
        row_lse = _finite_lse(lse, line + query, is_query)
        delta = tl.load(deltas + line + query, mask=is_query, other=0.0)
        scores = _scores(
            q_rows, tl.trans(k_rows), pairs, query, key, False, EVEN, MASK_GRAIN, LINE, ONE_ROW, BIAS_GRAIN, WIDE
        )
        weights = tl.exp2((scores - row_lse[:, None]) * _LOG2_E)
        acc += weights * (tl.dot(upstream, tl.trans(v_rows)) - delta[:, None])
    d_bias += ((part * groups + group) * bias_heads + own_head).to(tl.int64) * bias_queries * keys
    _store_bias_gradient(d_bias, acc, block * ROWS + tl.arange(0, ROWS), key, queries, keys, ONE_QUERY)


@triton.jit
def _store_bias_gradient(d_bias, tile, query, key, queries, keys, ONE_QUERY: tl.constexpr):
    """Write the gradient of a bias at some queries and keys, or with ONE_QUERY its sum over the queries."""
    if ONE_QUERY:
        tl.store(d_bias + key, tl.sum(tile, 0), mask=key < keys)
    else:
        inside = (query < queries)[:, None] & (key < keys)[None, :]
        tl.store(d_bias + query.to(tl.int64)[:, None] * keys + key[None, :], tile, mask=inside)


@triton.jit
def _one_tile(
    marks, bias, visible_query, bias_query, queries, keys,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MASK_GRAIN: tl.constexpr, BIAS_GRAIN: tl.constexpr, ONE_MASK: tl.constexpr,
):  # fmt: skip
    """Positions, which pairs exist, and what is added to their scores, -inf where the mask hides them for all."""
    query, key = tl.arange(0, ROWS), tl.arange(0, KEYS)
    inside = (query < queries)[:, None] & (key < keys)[None, :]
    row = bias + query[:, None] * (bias_query * BIAS_GRAIN) + key[None, :]
    numbers = tl.load(row, mask=inside, other=0.0)  # in half precision they take half of the registers
    if ONE_MASK:
        hidden = tl.full((ROWS, KEYS), float("-inf"), numbers.dtype)
        marks += query[:, None] * (visible_query * MASK_GRAIN) + key[None, :]
        numbers = tl.where(tl.load(marks, mask=inside, other=0) != 0, numbers, hidden)
    return query, key, inside, numbers


@triton.jit
def _scores_of_tile(
    q_rows, k_rows, marks, query, key, queries, numbers, scale, visible_query,
    MASK_GRAIN: tl.constexpr, ONE_MASK: tl.constexpr,
):  # fmt: skip
    scores = tl.dot(q_rows, tl.trans(k_rows)) * scale + numbers.to(tl.float32)
    if ONE_MASK:
        return scores
    marks += query[:, None] * (visible_query * MASK_GRAIN) + key[None, :]
    shown = tl.load(marks, mask=(query < queries)[:, None], other=0)
    return tl.where(shown != 0, scores, float("-inf"))


@triton.jit(do_not_specialize=_NUMBERS)
def forward_of_tiles_kernel(
    out, lse, q, k, v, visible, bias, scale,
    queries, keys, heads, share, parts, each,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, out_batch, out_head, out_query,
    visible_batch, visible_head, visible_query, bias_batch, bias_head, bias_query,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    GRAIN: tl.constexpr, MASK_GRAIN: tl.constexpr, BIAS_GRAIN: tl.constexpr, DOT: tl.constexpr,
    ONE_MASK: tl.constexpr,
):  # fmt: skip
    """Attend one head of some batch elements, whose bias is the same. A part has `each` of `share` elements."""
    program = tl.program_id(0)
    h = (program % heads).to(tl.int64)
    part, group = program // heads % parts, (program // heads // parts).to(tl.int64)
    marks = _bytes(visible) + h * (visible_head * MASK_GRAIN)
    query, key, _inside, numbers = _one_tile(
        marks, bias + (group * bias_batch + h * bias_head) * BIAS_GRAIN,
        visible_query, bias_query, queries, keys, ROWS, KEYS, MASK_GRAIN, BIAS_GRAIN, ONE_MASK,
    )  # fmt: skip
    for place in tl.range(part * each, tl.minimum(share, (part + 1) * each), num_stages=STAGES):
        b = group * share + place
        own_q, own_k = q + (b * q_batch + h * q_head) * GRAIN, k + (b * k_batch + h * k_head) * GRAIN
        q_rows = _rows_of(own_q, query, q_query, queries, K_SIZE, K_WIDTH, GRAIN, False, DOT)
        k_rows = _rows_of(own_k, key, k_key, keys, K_SIZE, K_WIDTH, GRAIN, False, DOT)
        own_v = v + (b * v_batch + h * v_head) * GRAIN
        v_rows = _rows_of(own_v, key, v_key, keys, V_SIZE, V_WIDTH, GRAIN, False, DOT)
        own_marks = marks + b * (visible_batch * MASK_GRAIN)
        scores = _scores_of_tile(
            q_rows, k_rows, own_marks, query, key, queries, numbers, scale, visible_query, MASK_GRAIN, ONE_MASK
        )  # fmt: skip
        row_max = tl.max(scores, 1)
        base = tl.where(row_max == float("-inf"), 0.0, row_max)
        weights = tl.exp2((scores - base[:, None]) * _LOG2_E)
        acc, row_lse = _output_and_lse(row_max, tl.sum(weights, 1), tl.dot(weights.to(DOT), v_rows))
        tl.store(lse + (b * heads + h) * queries + query, row_lse, mask=query < queries)
        own_out = out + (b * out_batch + h * out_head) * GRAIN
        _store_rows(own_out, acc, query, out_query, queries, V_SIZE, V_WIDTH, GRAIN)


@triton.jit(do_not_specialize=_NUMBERS)
def gradients_of_tiles_kernel(
    d_bias, d_q, d_k, d_v, d_out, d_lse, out, lse, q, k, v, visible, bias, scale,
    queries, keys, heads, share, parts, each,
    q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key, out_batch, out_head, out_query,
    d_out_batch, d_out_head, d_out_query,
    d_q_batch, d_q_head, d_q_query, d_k_batch, d_k_head, d_k_key, d_v_batch, d_v_head, d_v_key,
    visible_batch, visible_head, visible_query, bias_batch, bias_head, bias_query,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    GRAIN: tl.constexpr, MASK_GRAIN: tl.constexpr, BIAS_GRAIN: tl.constexpr, DOT: tl.constexpr,
    ONE_MASK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one head of some batch elements, and, unless d_bias is None, add up that of their bias.

    d_bias: float32 [parts, batch elements / share, H, Q, KV].
    """
    program = tl.program_id(0)
    h = (program % heads).to(tl.int64)
    part, group = program // heads % parts, (program // heads // parts).to(tl.int64)
    groups = tl.num_programs(0) // heads // parts
    marks = _bytes(visible) + h * (visible_head * MASK_GRAIN)
    query, key, inside, numbers = _one_tile(
        marks, bias + (group * bias_batch + h * bias_head) * BIAS_GRAIN,
        visible_query, bias_query, queries, keys, ROWS, KEYS, MASK_GRAIN, BIAS_GRAIN, ONE_MASK,
    )  # fmt: skip
    is_query = query < queries
    acc = tl.zeros((ROWS, KEYS), tl.float32)
    for place in tl.range(part * each, tl.minimum(share, (part + 1) * each), num_stages=STAGES):
        b = group * share + place
        line = (b * heads + h) * queries
        own_q, own_k = q + (b * q_batch + h * q_head) * GRAIN, k + (b * k_batch + h * k_head) * GRAIN
        q_rows = _rows_of(own_q, query, q_query, queries, K_SIZE, K_WIDTH, GRAIN, False, DOT)
        k_rows = _rows_of(own_k, key, k_key, keys, K_SIZE, K_WIDTH, GRAIN, False, DOT)
        own_v, own_out = v + (b * v_batch + h * v_head) * GRAIN, out + (b * out_batch + h * out_head) * GRAIN
        v_rows = _rows_of(own_v, key, v_key, keys, V_SIZE, V_WIDTH, GRAIN, False, DOT)
        results = _rows_of(own_out, query, out_query, queries, V_SIZE, V_WIDTH, GRAIN, False, DOT)
        own_d_out = d_out + (b * d_out_batch + h * d_out_head) * GRAIN
        upstream = _rows_of(own_d_out, query, d_out_query, queries, V_SIZE, V_WIDTH, GRAIN, False, DOT)
        delta = tl.sum(results.to(tl.float32) * upstream.to(tl.float32), 1)
        if d_lse is not None:
            delta -= tl.load(d_lse + line + query, mask=is_query, other=0.0)
        row_lse = _finite_lse(lse, line + query, is_query)
        own_marks = marks + b * (visible_batch * MASK_GRAIN)
        scores = _scores_of_tile(
            q_rows, k_rows, own_marks, query, key, queries, numbers, scale, visible_query, MASK_GRAIN, ONE_MASK
        )  # fmt: skip
        weights = tl.exp2((scores - row_lse[:, None]) * _LOG2_E)
        d_scores = weights * (tl.dot(upstream, tl.trans(v_rows)) - delta[:, None])
        acc += d_scores
        v_acc = tl.dot(tl.trans(weights.to(DOT)), upstream)
        k_acc = tl.dot(tl.trans(d_scores.to(DOT)), q_rows) * scale
        q_acc = tl.dot(d_scores.to(DOT), k_rows) * scale
        own_d_q = d_q + (b * d_q_batch + h * d_q_head) * GRAIN
        _store_rows(own_d_q, q_acc, query, d_q_query, queries, K_SIZE, K_WIDTH, GRAIN)
        own_d_k = d_k + (b * d_k_batch + h * d_k_head) * GRAIN
        _store_rows(own_d_k, k_acc, key, d_k_key, keys, K_SIZE, K_WIDTH, GRAIN)
        own_d_v = d_v + (b * d_v_batch + h * d_v_head) * GRAIN
        _store_rows(own_d_v, v_acc, key, d_v_key, keys, V_SIZE, V_WIDTH, GRAIN)
    if d_bias is not None:
        at = d_bias + ((part * groups + group) * heads + h) * queries * keys
        tl.store(at + query[:, None] * keys + key[None, :], acc, mask=inside)
