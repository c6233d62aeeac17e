"""Triton kernels of attention for few queries.

The first kernel reads the keys and values of all tiles once. With S bytes of keys and values behind the tiles it moves
S bytes, a byte for each query and key of partial tiles that are listed, and 4 bytes for each bias. Where an element's
tiles are shared out, programs write 4 (size of values + 2) bytes for each row and share, which the second kernel reads.

The mask comes in one of two forms: as lists of partial and full tiles, with a byte for each query and key, or with BAND
as an interval of keys for each query. Programs compute the tiles of a band from its numbers.

A row is one query of one query head. An element is what a list of tiles belongs to: a batch element, or with lists by
    head a query head of it. A program takes a share of one element's tiles, one key head, and up to ROWS rows. All
    shares have about the same number of tiles, whatever the numbers of tiles of the elements are: each program finds
    its element and tiles from the counts of all elements.

A step of the loop takes KEYS keys of a tile. Numbers of tiles and pages and `visible` are loaded one or two steps
ahead, so that the loop can be pipelined: keys and values are loaded two steps ahead of their use, without waiting for
the numbers that say where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexmasks.kernels import few_queries_checks
from flexmasks.kernels.launches import names_of_strides

_TILE: tl.constexpr = tl.constexpr(few_queries_checks.TILE)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _clipped(number, least, most):
    return tl.minimum(tl.maximum(number, least), most).to(tl.int32)


@triton.jit
def _place_in_band(band, element, is_element):
    """The position of an element's first query, and the number of its keys, int64."""
    q_starts, kv_lens, q_starts_stride, kv_lens_stride, q_start, _, _, kv_len, queries = band
    b = element.to(tl.int64)
    length = b * 0 + kv_len
    if kv_lens is not None:
        own_length = tl.load(kv_lens + b * kv_lens_stride, mask=is_element, other=0).to(tl.int64)
        length = tl.maximum(tl.minimum(own_length, length), 0)
    if q_starts is not None:
        start = tl.load(q_starts + b * q_starts_stride, mask=is_element, other=0).to(tl.int64)
    else:
        start = tl.where(q_start < 0, tl.maximum(length - queries, 0), b * 0 + q_start)
    return start, length


@triton.jit
def _keys_of_band(band, first_query, last_query, start, length):
    """The first key that some of an element's queries see, and the end."""
    _, _, _, _, _, left, right, _, _ = band
    first = _clipped(start + first_query - left, 0, length)
    end = _clipped(start + last_query + right + 1, first, length)
    return first, end


@triton.jit
def _tiles_of_band(band, element, is_element):
    """The first tile of an element, the first full tile, the end of the full tiles, and the end. Tiles before and
    behind the full ones are partial. An element beyond the last one has none.
    """
    _, _, _, _, _, left, right, _, queries = band
    start, length = _place_in_band(band, element, is_element)
    first_key, end_key = _keys_of_band(band, 0, queries - 1, start, length)
    first = first_key // _TILE
    end = tl.where(is_element & (first_key < end_key), tl.cdiv(end_key, _TILE), first)
    for_all = _clipped(start + queries - 1 - left, 0, length)  # the first key that all queries see
    end_for_all = _clipped(start + right + 1, 0, length)
    first_full = tl.minimum(tl.maximum(tl.cdiv(for_all, _TILE), first), end)
    end_full = tl.minimum(tl.maximum(end_for_all // _TILE, first_full), end)
    return first, first_full, end_full, end


@triton.jit
def _parts_of_band(band, element, is_element, query):
    """An element's partial and full tiles, see `_tile_of`, and the keys that some query and that each row sees."""
    queries = band[8]
    first_tile, first_full, end_full, _ = _tiles_of_band(band, element, is_element)
    start, length = _place_in_band(band, element, is_element)
    first_key, end_key = _keys_of_band(band, 0, queries - 1, start, length)
    first_of_row, end_of_row = _keys_of_band(band, query, query, start, length)
    partial = first_tile, first_full - first_tile, end_full - first_full
    return partial, (first_full, end_full - first_full, 0), (first_key, end_key, first_of_row, end_of_row)


@triton.jit
def _counts(tiles, element, elements, LIST_HEADS: tl.constexpr, BAND: tl.constexpr):
    """The numbers of partial and of full tiles, 0 beyond the last element, from the band, or from the counts of both
    lists and their strides.
    """
    is_element = element < elements
    if BAND:
        first, first_full, end_full, end = _tiles_of_band(tiles, element, is_element)
        full = end_full - first_full
        partial = end - first - full
    else:
        partial_counts, full_counts, partial_batch, partial_head, full_batch, full_head = tiles
        b = (element // LIST_HEADS).to(tl.int64)
        h = (element % LIST_HEADS).to(tl.int64)
        partial = tl.load(partial_counts + b * partial_batch + h * partial_head, mask=is_element, other=0)
        full = tl.load(full_counts + b * full_batch + h * full_head, mask=is_element, other=0)
    return partial, full


@triton.jit
def _tiles_of_share(tiles, elements, shares, LIST_HEADS: tl.constexpr, COUNTS: tl.constexpr, BAND: tl.constexpr):
    """The most tiles of a share: an element with n tiles has ceil(n / most), and all have at most `shares`."""
    total = tl.zeros((), tl.int32)
    for start in range(0, elements, COUNTS):
        partial, full = _counts(tiles, start + tl.arange(0, COUNTS), elements, LIST_HEADS, BAND)
        total += tl.sum(partial + full)
    return tl.maximum(tl.cdiv(total, shares - elements), 1)


@triton.jit
def _element_of_share(tiles, share, most, elements, LIST_HEADS: tl.constexpr, COUNTS: tl.constexpr, BAND: tl.constexpr):
    """The element of a share, which is `elements` for a share without work, and the element's first share."""
    element = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    for start in range(0, elements, COUNTS):
        place = start + tl.arange(0, COUNTS)
        partial, full = _counts(tiles, place, elements, LIST_HEADS, BAND)
        end = before + tl.cumsum(tl.cdiv(partial + full, most), 0)  # shares of elements up to this one
        is_earlier = (end <= share) & (place < elements)
        element += tl.sum(is_earlier.to(tl.int32))
        first = tl.maximum(first, tl.max(tl.where(is_earlier, end, 0)))
        before = tl.max(end)
    return element, first


@triton.jit
def _tiles_in_share(tiles, most, place, SPLIT: tl.constexpr):
    """The first tile of an element's share at a place, and the end."""
    begin, end = 0, tiles
    if SPLIT:
        in_share = tl.cdiv(tiles, tl.cdiv(tiles, most))
        begin = place * in_share
        end = tl.minimum(tiles, begin + in_share)
    return begin, end


@triton.jit
def _shares_before(tiles, element, most, LIST_HEADS: tl.constexpr, COUNTS: tl.constexpr, BAND: tl.constexpr):
    before = tl.zeros((), tl.int32)
    for start in range(0, element, COUNTS):
        partial, full = _counts(tiles, start + tl.arange(0, COUNTS), element, LIST_HEADS, BAND)
        before += tl.sum(tl.cdiv(partial + full, most))
    return before


@triton.jit
def tanh(x):
    """tanh(x), with a small relative error near 0 too."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    size = 1 - 2 / (tl.exp2(tl.abs(x) * (2 * _LOG2_E)) + 1)
    return tl.where(square < 1 / 16, series, tl.where(x < 0, -size, size))


@triton.jit
def _tile_of(tiles, step, last, STEPS: tl.constexpr, BAND: tl.constexpr):
    """The tile of a step, 0 for steps past the last one.

    tiles: a pointer to a list, or with BAND the first tile, the number of tiles up to a gap, and the tiles in the gap.
    """
    if BAND:
        first, leading, gap = tiles
        place = step // STEPS
        tile = tl.where(step < last, first + place + tl.where(place < leading, 0, gap), 0)
    else:
        tile = tl.load(tiles + step // STEPS, mask=step < last, other=0)
    return tile


@triton.jit
def _start_of(tile, step, KEYS: tl.constexpr, STEPS: tl.constexpr):
    return (tile * STEPS + step % STEPS) * KEYS


@triton.jit
def _pages_of(table, start, kv_len, KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_WORDS: tl.constexpr):
    """The page numbers of the keys of a step, one number if a page holds all of them.

    PAGE_WORDS: words of 32 bits in a number of the table. The lowest one is read.
    """
    if PAGE_SIZE == 0:
        pages = start * 0
    else:
        key = start
        if PAGE_SIZE % KEYS != 0:
            key += tl.arange(0, KEYS)
        pages = tl.load(table + key // PAGE_SIZE * PAGE_WORDS, mask=key < kv_len, other=0)
    return pages


@triton.jit
def _pairs_of(
    x, start, kv_len, is_row, KEYS: tl.constexpr, EVEN: tl.constexpr, STRIDE: tl.constexpr, SAME: tl.constexpr
):
    """The marks or biases of a step, [KEYS] if they are the same for all rows, else [rows, KEYS]."""
    key = start + tl.arange(0, KEYS)
    offsets = key.to(tl.int64) * STRIDE
    if SAME and EVEN:
        pairs = tl.load(x + offsets)
    elif SAME:
        pairs = tl.load(x + offsets, mask=key < kv_len, other=0)
    elif EVEN:
        pairs = tl.load(x[:, None] + offsets[None, :], mask=is_row[:, None], other=0)
    else:
        pairs = tl.load(x[:, None] + offsets[None, :], mask=is_row[:, None] & (key < kv_len)[None, :], other=0)
    return pairs


@triton.jit
def _load_rows(
    at, start, pages, is_needed, page_stride, key_stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GRAIN: tl.constexpr, KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The keys or values [KEYS, WIDTH] of a step, 0 from column SIZE on and, without ALL, where they are not needed."""
    place = tl.arange(0, KEYS)
    column = tl.arange(0, WIDTH)[None, :]
    if PAGE_SIZE == 0:
        at += start.to(tl.int64) * key_stride * GRAIN
        offsets = place.to(tl.int64) * key_stride * GRAIN
    elif PAGE_SIZE % KEYS == 0:
        at += (pages.to(tl.int64) * page_stride + (start % PAGE_SIZE).to(tl.int64) * key_stride) * GRAIN
        offsets = place.to(tl.int64) * key_stride * GRAIN
    else:
        slot = (start + place) % PAGE_SIZE
        offsets = (pages.to(tl.int64) * page_stride + slot.to(tl.int64) * key_stride) * GRAIN
    pointers = at + offsets[:, None] + column
    if ALL and SIZE == WIDTH:
        rows = tl.load(pointers)
    elif ALL:
        rows = tl.load(pointers, mask=column < SIZE, other=0.0)
    else:
        rows = tl.load(pointers, mask=is_needed[:, None] & (column < SIZE), other=0.0)
    return rows


@triton.jit
def _needed_and_visible(key, kv_len, marks, interval, PARTIAL: tl.constexpr, BAND: tl.constexpr, SAME: tl.constexpr):
    """The keys of a step that some row sees, and the pairs of rows and keys that see each other."""
    if PARTIAL and BAND:
        first_key, end_key, first_of_row, end_of_row = interval
        needed = (key >= first_key) & (key < end_key)
        is_visible = needed[None, :]
        if not SAME:
            is_visible = (key[None, :] >= first_of_row[:, None]) & (key[None, :] < end_of_row[:, None])
    elif PARTIAL and not SAME:
        needed = tl.max(marks.to(tl.int32), 0) != 0
        is_visible = marks != 0
    else:
        needed = marks != 0 if PARTIAL else key < kv_len
        is_visible = needed[None, :]
    return needed, is_visible


@triton.jit
def _scores_of(products, weight, biases, scale, cap, CAP: tl.constexpr, SAME_BIAS: tl.constexpr):
    """Scores of rows and keys; times log2(e) where there are neither a cap nor biases."""
    if not CAP and biases is None:
        return products * (scale * _LOG2_E)
    scores = products * scale
    if CAP:
        scores = cap * tanh(scores / cap)
    if biases is not None:
        added = biases[None, :] if SAME_BIAS else biases
        scores += added if weight is None else weight[:, None] * added
    return scores


@triton.jit
def _weights_of(scores, row_max, IN_BASE_2: tl.constexpr):
    """The largest scores of rows so far, the factor of their earlier sums, and the weights of scores."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # rows that have seen nothing
    if IN_BASE_2:
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(row_max - base)
    else:  # the product of a very low score and log2(e) would be infinite
        weights = tl.exp2((scores - base[:, None]) * _LOG2_E)
        kept = tl.exp2((row_max - base) * _LOG2_E)
    return new_max, kept, weights


@triton.jit
def _attend_tiles(
    row_max, total, acc, q, k, v, table, tiles, first, last, kv_len, is_row, visible, weight, bias, scale, cap,
    k_page, k_key, v_page, v_key,
    K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    K_GRAIN: tl.constexpr, V_GRAIN: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_WORDS: tl.constexpr, EVEN: tl.constexpr,
    VISIBLE_KEY: tl.constexpr, BIAS_KEY: tl.constexpr, SAME: tl.constexpr, SAME_BIAS: tl.constexpr, CAP: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr, BAND: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add the tiles of steps first..last - 1 to a running softmax, in base 2.

    tiles: see `_tile_of`.
    visible, bias: pointers to the rows' first keys; `visible` is read in partial tiles only. With SAME, and with
    SAME_BIAS, it is one pointer for all rows. Both are carried through the loop as they are: Triton does not pipeline
    a loop over values that it converts after loading them. With BAND, `visible` is the interval of keys that some query
    sees, and the ones of the rows.
    weight: one number for each row, or None.
    """
    LISTED: tl.constexpr = PARTIAL and not BAND
    ALL: tl.constexpr = (EVEN or BAND) and not PARTIAL  # all keys of the tiles exist: those of a band's full tiles do
    start = _start_of(_tile_of(tiles, first, last, STEPS, BAND), first, KEYS, STEPS)
    next_tile = _tile_of(tiles, first + 1, last, STEPS, BAND)
    pages = _pages_of(table, start, kv_len, KEYS, PAGE_SIZE, PAGE_WORDS)
    marks, biases = None, None
    if LISTED:
        marks = _pairs_of(visible, start, kv_len, is_row, KEYS, EVEN, VISIBLE_KEY, SAME)
    if bias is not None:
        biases = _pairs_of(bias, start, kv_len, is_row, KEYS, EVEN, BIAS_KEY, SAME_BIAS)
    for step in tl.range(first, last, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        needed, is_visible = _needed_and_visible(key, kv_len, marks, visible, PARTIAL, BAND, SAME)
        keys = _load_rows(k, start, pages, needed, k_page, k_key, K_SIZE, K_WIDTH, K_GRAIN, KEYS, PAGE_SIZE, ALL)
        products = tl.dot(q, tl.trans(keys.to(DOT)), input_precision="ieee")
        scores = _scores_of(products, weight, biases, scale, cap, CAP, SAME_BIAS)
        if not ALL:
            scores = tl.where(is_visible, scores, float("-inf"))
        row_max, kept, weights = _weights_of(scores, row_max, not CAP and bias is None)
        total = total * kept + tl.sum(weights, 1)
        values = _load_rows(v, start, pages, needed, v_page, v_key, V_SIZE, V_WIDTH, V_GRAIN, KEYS, PAGE_SIZE, ALL)
        acc = tl.dot(weights.to(values.dtype).to(DOT), values.to(DOT), acc * kept[:, None], input_precision="ieee")
        start = _start_of(next_tile, step + 1, KEYS, STEPS)
        pages = _pages_of(table, start, kv_len, KEYS, PAGE_SIZE, PAGE_WORDS)
        if LISTED:
            marks = _pairs_of(visible, start, kv_len, is_row, KEYS, EVEN, VISIBLE_KEY, SAME)
        if bias is not None:
            biases = _pairs_of(bias, start, kv_len, is_row, KEYS, EVEN, BIAS_KEY, SAME_BIAS)
        next_tile = _tile_of(tiles, step + 2, last, STEPS, BAND)
    return row_max, total, acc


@triton.jit
def _store_share(shared, lines, line, row_max, total, acc, is_row, V_SIZE: tl.constexpr, V_WIDTH: tl.constexpr):
    """Write what the rows of a share have seen: their results, largest scores, and sums of weights."""
    column = tl.arange(0, V_WIDTH)
    result = tl.where((total == 0)[:, None], 0.0, acc / total[:, None])  # NaN is not empty
    is_written = is_row[:, None] & (column < V_SIZE)[None, :]
    tl.store(shared + line[:, None] * V_SIZE + column[None, :], result, mask=is_written)
    behind_rows = shared + lines.to(tl.int64) * V_SIZE
    tl.store(behind_rows + line, row_max, mask=is_row)
    tl.store(behind_rows + lines + line, total, mask=is_row)


@triton.jit
def _store_result(out, lse, line, row_max, total, acc, is_row, V_SIZE: tl.constexpr, V_WIDTH: tl.constexpr):
    """Write the results of rows, and the log-sum-exp of their scores if it is wanted."""
    column = tl.arange(0, V_WIDTH)
    is_empty = total == 0  # NaN is not empty
    result = tl.where(is_empty[:, None], 0.0, acc / total[:, None])
    is_written = is_row[:, None] & (column < V_SIZE)[None, :]
    tl.store(out + line[:, None] * V_SIZE + column[None, :], result.to(out.dtype.element_ty), mask=is_written)
    if lse is not None:
        tl.store(lse + line, tl.where(is_empty, float("-inf"), row_max + tl.log(total)), mask=is_row)


# Sizes, strides and bounds of bands.
_NUMBERS = ["kv_len", "queries", "elements", "shares", "key_heads", "row_blocks", "rows", "lines", "table_batch"]
_NUMBERS += ["q_start", "left", "right", "q_starts_stride", "kv_lens_stride"]
_NUMBERS += names_of_strides("q k v visible weight bias", "batch head query page key")
_NUMBERS += names_of_strides("partial_count full_count partial full", "batch head")


@triton.jit(do_not_specialize=_NUMBERS)
def attend_kernel(
    out, lse, shared, q, k, v, table, partial_counts, partial, full_counts, full, visible, q_starts, kv_lens,
    weight, bias, scale, cap, q_start, left, right,
    kv_len, queries, elements, shares, key_heads, row_blocks, rows, lines,
    q_batch, q_head, q_query, k_batch, k_head, k_page, k_key, v_batch, v_head, v_page, v_key, table_batch,
    partial_count_batch, partial_count_head, full_count_batch, full_count_head,
    partial_batch, partial_head, full_batch, full_head,
    visible_batch, visible_head, visible_query, q_starts_stride, kv_lens_stride,
    weight_batch, weight_head, weight_query, bias_batch, bias_head, bias_query,
    GROUP: tl.constexpr, LIST_HEADS: tl.constexpr, COUNTS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    Q_GRAIN: tl.constexpr, K_GRAIN: tl.constexpr, V_GRAIN: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_WORDS: tl.constexpr, EVEN: tl.constexpr, GRAIN: tl.constexpr,
    VISIBLE_KEY: tl.constexpr, BIAS_KEY: tl.constexpr, SAME: tl.constexpr, SAME_BIAS: tl.constexpr,
    CAP: tl.constexpr, DOT: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of a key head over one share of an element's tiles.

    q_start: where the queries of all elements start if there are no q_starts; -1 if they are the last ones.

    Writes the result, or with SPLIT the share's result: `shared` has the rows of all shares, `lines` of them, then
    their largest scores, and then their sums of weights. One number for both would lose a sum beside a low score.
    """
    # Programs of the same keys follow each other: row blocks, then the key heads, whose keys often are neighbors.
    program = tl.program_id(0)
    row_block = program % row_blocks
    key_head = program // row_blocks % key_heads
    share = program // row_blocks // key_heads
    if BAND:
        tiles = q_starts, kv_lens, q_starts_stride, kv_lens_stride, q_start, left, right, kv_len, queries
    else:
        tiles = (
            partial_counts, full_counts, partial_count_batch, partial_count_head, full_count_batch, full_count_head
        )  # fmt: skip
    element, most, first_share = share, 0, 0
    if SPLIT:
        most = _tiles_of_share(tiles, elements, shares, LIST_HEADS, COUNTS, BAND)
        element, first_share = _element_of_share(tiles, share, most, elements, LIST_HEADS, COUNTS, BAND)
    if element < elements:
        n_partial, n_full = _counts(tiles, element, elements, LIST_HEADS, BAND)
        begin, end = _tiles_in_share(n_partial + n_full, most, share - first_share, SPLIT)

        b = (element // LIST_HEADS).to(tl.int64)
        list_head = (element % LIST_HEADS).to(tl.int64)
        if LIST_HEADS > 1:  # one query head a program
            key_head = element % LIST_HEADS // GROUP
        row = row_block * ROWS + tl.arange(0, ROWS)
        is_row = row < rows
        if LIST_HEADS > 1:
            head = list_head + row * 0
        else:
            head = (key_head * GROUP + row // queries).to(tl.int64)
        query = (row % queries).to(tl.int64)
        column = tl.arange(0, K_WIDTH)
        at = q + (b * q_batch + head * q_head + query * q_query) * Q_GRAIN
        q_rows = tl.load(at[:, None] + column[None, :], mask=is_row[:, None] & (column < K_SIZE)[None, :], other=0.0)
        q_rows = q_rows.to(DOT)

        kv_head = key_head.to(tl.int64)
        k += (b * k_batch + kv_head * k_head) * K_GRAIN
        v += (b * v_batch + kv_head * v_head) * V_GRAIN
        table_row = table
        if PAGE_SIZE > 0:
            table_row = (table + b * table_batch).to(tl.pointer_type(tl.int32), bitcast=True)
        if BAND:
            partial_tiles, full_tiles, visible_rows = _parts_of_band(tiles, element, element < elements, query)
        else:
            partial_tiles = partial + b * partial_batch + list_head * partial_head
            full_tiles = full + b * full_batch + list_head * full_head
            visible_rows = visible.to(tl.pointer_type(tl.int8), bitcast=True)
            if SAME:
                first_head = list_head if LIST_HEADS > 1 else key_head.to(tl.int64) * GROUP
                visible_rows += (b * visible_batch + first_head * visible_head) * GRAIN
            else:
                visible_rows += (b * visible_batch + head * visible_head + query * visible_query) * GRAIN
        weights, bias_rows = None, bias
        if bias is not None and SAME_BIAS:
            bias_rows = bias + b * bias_batch * GRAIN
        elif bias is not None:
            bias_rows = bias + (b * bias_batch + head * bias_head + query * bias_query) * GRAIN
        if weight is not None:
            at = weight + (b * weight_batch + head * weight_head + query * weight_query)
            weights = tl.load(at, mask=is_row, other=0.0)

        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, V_WIDTH), tl.float32)
        for PARTIAL in tl.static_range(2):  # first the full tiles
            if PARTIAL:
                part, first, last = partial_tiles, tl.minimum(begin, n_partial), tl.minimum(end, n_partial)
            else:
                part, first, last = full_tiles, tl.maximum(begin - n_partial, 0), tl.maximum(end - n_partial, 0)
            row_max, total, acc = _attend_tiles(
                row_max, total, acc, q_rows, k, v, table_row, part, first * STEPS, last * STEPS,
                kv_len, is_row, visible_rows, weights, bias_rows, scale, cap, k_page, k_key, v_page, v_key,
                K_SIZE, V_SIZE, K_WIDTH, V_WIDTH, K_GRAIN, V_GRAIN, KEYS, STEPS, PAGE_SIZE, PAGE_WORDS, EVEN,
                VISIBLE_KEY, BIAS_KEY, SAME, SAME_BIAS, CAP, DOT, STAGES, BAND, PARTIAL,
            )  # fmt: skip

        if not CAP and bias is None:
            row_max *= _LN_2
        if SPLIT:
            line = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
            _store_share(shared, lines, line, row_max, total, acc, is_row, V_SIZE, V_WIDTH)
        else:
            heads = LIST_HEADS if LIST_HEADS > 1 else key_heads * GROUP
            line = (b * heads + head) * queries + query
            _store_result(out, lse, line, row_max, total, acc, is_row, V_SIZE, V_WIDTH)


@triton.jit(do_not_specialize=_NUMBERS)
def join_kernel(
    out, lse, shared, partial_counts, full_counts, q_starts, kv_lens, q_start, left, right,
    kv_len, queries, elements, shares, key_heads, row_blocks, lines,
    partial_count_batch, partial_count_head, full_count_batch, full_count_head, q_starts_stride, kv_lens_stride,
    GROUP: tl.constexpr, LIST_HEADS: tl.constexpr, COUNTS: tl.constexpr,
    ROWS: tl.constexpr, V_SIZE: tl.constexpr, V_WIDTH: tl.constexpr, SHARES: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    query = line % queries
    if LIST_HEADS > 1:
        element = line // queries
        key_head = 0
        row = query
    else:
        heads = key_heads * GROUP
        element = line // queries // heads
        head = line // queries % heads
        key_head = head // GROUP
        row = head % GROUP * queries + query
    if BAND:
        tiles = q_starts, kv_lens, q_starts_stride, kv_lens_stride, q_start, left, right, kv_len, queries
    else:
        tiles = (
            partial_counts, full_counts, partial_count_batch, partial_count_head, full_count_batch, full_count_head
        )  # fmt: skip
    most = _tiles_of_share(tiles, elements, shares, LIST_HEADS, COUNTS, BAND)
    first = _shares_before(tiles, element, most, LIST_HEADS, COUNTS, BAND)
    n_partial, n_full = _counts(tiles, element, elements, LIST_HEADS, BAND)
    n_shares = tl.cdiv(n_partial + n_full, most)

    column = tl.arange(0, V_WIDTH)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((V_WIDTH,), tl.float32)
    for start in range(0, n_shares, SHARES):
        share = start + tl.arange(0, SHARES)
        is_share = share < n_shares
        at = (((first + share).to(tl.int64) * key_heads + key_head) * row_blocks + row // ROWS) * ROWS + row % ROWS
        behind_rows = shared + lines.to(tl.int64) * V_SIZE
        share_max = tl.load(behind_rows + at, mask=is_share, other=float("-inf"))
        share_total = tl.load(behind_rows + lines + at, mask=is_share, other=0.0)
        parts = tl.load(
            shared + at[:, None] * V_SIZE + column[None, :],
            mask=is_share[:, None] & (column < V_SIZE)[None, :], other=0.0,
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(share_max, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2((share_max - base) * _LOG2_E) * share_total
        kept = tl.exp2((largest - base) * _LOG2_E)
        total = total * kept + tl.sum(weights, 0)
        acc = acc * kept + tl.sum(weights[:, None] * parts, 0)
        largest = new_largest
    is_empty = total == 0
    acc = tl.where(is_empty, 0.0, acc / total)
    at = line.to(tl.int64)
    tl.store(out + at * V_SIZE + column, acc.to(out.dtype.element_ty), mask=column < V_SIZE)
    if lse is not None:
        tl.store(lse + at, tl.where(is_empty, float("-inf"), largest + tl.log(total)))
