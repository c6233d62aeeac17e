"""Independent oracles: every mask and score written element by element, straight from its definition.

Nothing here imports or mirrors the library, so an agreement between the two means something. Slow on purpose.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


# eq=False: params hold tensors and dicts, whose generated __eq__ and __hash__ would raise; identity serves instead.
@dataclass(frozen=True, eq=False)
class Case:
    """One set of parameters of one registered mask or score, and the sizes it is tried at."""

    name: str
    params: dict[str, Any]  # python numbers/bools/tuples, or torch tensors on the CPU
    batch: int = 2
    heads: int = 2
    q_len: int = 40
    kv_len: int = 40
    q_offset: int | tuple[int, ...] = 0  # added to q before the mask sees it; a tuple has one per batch element


# ---------------------------------------------------------------------------------------------------------------------
# Masks: True = visible. Every parameter arrives as plain Python (tensors as nested lists), q with its offset added.
# ---------------------------------------------------------------------------------------------------------------------


def _full(b: int, h: int, q: int, kv: int, size: Case) -> bool:
    """Always."""
    return True


def _causal(b: int, h: int, q: int, kv: int, size: Case) -> bool:
    """kv <= q."""
    return kv <= q


def _grouped_tril(b: int, h: int, q: int, kv: int, size: Case, seq_lens: list[int]) -> bool:
    """kv <= q, with both q and kv below seq_lens[b]."""
    return kv <= q and q < seq_lens[b] and kv < seq_lens[b]


def _padding(b: int, h: int, q: int, kv: int, size: Case, seq_lens: list[int]) -> bool:
    """kv < seq_lens[b]; queries are not cut."""
    return kv < seq_lens[b]


def _sliding_window(b: int, h: int, q: int, kv: int, size: Case, window: int) -> bool:
    """kv <= q and q - kv <= window: `window` earlier keys and the query's own."""
    return kv <= q and q - kv <= window


def _local(b: int, h: int, q: int, kv: int, size: Case, left: int, right: int) -> bool:
    """-right <= q - kv <= left: `left` earlier keys, the query's own, `right` later keys."""
    return -right <= q - kv <= left


def _prefix_lm(b: int, h: int, q: int, kv: int, size: Case, prefix_len: int | list[int]) -> bool:
    """kv < prefix_len(b) or kv <= q."""
    prefix = prefix_len[b] if isinstance(prefix_len, list) else prefix_len
    return kv < prefix or kv <= q


def _document(b: int, h: int, q: int, kv: int, size: Case, document_ids: list[int] | list[list[int]]) -> bool:
    """ids[q] == ids[kv], with one row of ids for all or one per batch element."""
    first = document_ids[0]
    ids: Any = document_ids[b] if isinstance(first, list) else document_ids
    return bool(ids[q] == ids[kv])


def _sasa(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    height: int,
    width: int,
    window: int | tuple[int, int],
    order: list[int] | None = None,
) -> bool:
    """Row-major tokens, or the pixels `order`; |row distance| <= window_rows and |column distance| <= window_cols."""
    window_rows, window_cols = window if isinstance(window, tuple) else (window, window)
    assert 0 <= q < height * width
    assert 0 <= kv < height * width
    if order is not None:
        q, kv = order[q], order[kv]
    q_row, q_col = q // width, q % width
    kv_row, kv_col = kv // width, kv % width
    return abs(q_row - kv_row) <= window_rows and abs(q_col - kv_col) <= window_cols


def _natten_axis(i: int, j: int, length: int, kernel: int, dilation: int, causal: bool, stride: int = 1) -> bool:
    """Whether position i sees position j of one axis, by listing i's dilation group and its window in it.

    Each `stride` neighbors of a group have the window of their leader: the middle one, the right one of two, or the
    last one where causal; the last of the group where the leader is not there.
    """
    group = [x for x in range(length) if x % dilation == i % dilation]
    if j not in group:
        return False
    place = i // dilation
    assert group[place] == i
    assert stride <= kernel <= len(group)
    together = range(place // stride * stride, place // stride * stride + stride)
    leader = min(together[-1] if causal else together[stride // 2], len(group) - 1)
    if causal:
        window = [group[p] for p in range(len(group)) if leader - kernel < p <= place]
    else:
        start = leader - kernel // 2
        while start < 0:
            start += 1
        while start + kernel > len(group):
            start -= 1
        window = group[start : start + kernel]
        assert len(window) == kernel
    return j in window


def _neighborhood(
    q: int,
    kv: int,
    canvas: tuple[int, ...],
    order: list[int] | None,
    kernel: Any,
    dilation: Any,
    stride: Any,
    causal: Any,
) -> bool:
    """Tokens in row-major order, or the pixels that `order` names; all axes must see each other.

    Not causal: exactly `kernel` keys of the dilation group, starting kernel // 2 before the leader, shifted at the
    edges to lie inside. Causal: the query and what the leader, too, has at most kernel - 1 before it in the group.
    """
    pixels = list(itertools.product(*map(range, canvas)))
    places = [pixels[n if order is None else order[n]] for n in (q, kv)]
    kernel, dilation, stride, causal = (
        x if isinstance(x, tuple) else (x,) * len(canvas) for x in (kernel, dilation, stride, causal)
    )
    axes = zip(*places, canvas, kernel, dilation, causal, stride, strict=True)
    return all(_natten_axis(*axis) for axis in axes)


def _natten(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    height: int,
    width: int,
    kernel: int | tuple[int, int],
    dilation: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
    causal: bool | tuple[bool, bool] = False,
    order: list[int] | None = None,
) -> bool:
    """A neighborhood of (rows, columns)."""
    return _neighborhood(q, kv, (height, width), order, kernel, dilation, stride, causal)


def _natten1d(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    length: int,
    kernel: int,
    dilation: int = 1,
    stride: int = 1,
    causal: bool = False,
) -> bool:
    """A neighborhood of positions."""
    return _neighborhood(q, kv, (length,), None, kernel, dilation, stride, causal)


def _natten3d(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    depth: int,
    height: int,
    width: int,
    kernel: int | tuple[int, int, int],
    dilation: int | tuple[int, int, int] = 1,
    stride: int | tuple[int, int, int] = 1,
    causal: bool | tuple[bool, bool, bool] = False,
    order: list[int] | None = None,
) -> bool:
    """A neighborhood of (depth, rows, columns)."""
    return _neighborhood(q, kv, (depth, height, width), order, kernel, dilation, stride, causal)


def _vision_cross(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    intervals: list[list[int]] | list[list[list[int]]],
    image_ids: list[int] | list[list[int]],
) -> bool:
    """image_ids[kv] >= 0 and start <= q < end, where (start, end) = intervals[image_ids[kv]]; id -1 is padding."""
    first_row, first_id = intervals[0][0], image_ids[0]
    rows: Any = intervals[b] if isinstance(first_row, list) else intervals
    ids: Any = image_ids[b] if isinstance(first_id, list) else image_ids
    image = ids[kv]
    if image < 0:
        return False
    start, end = rows[image]
    return bool(start <= q < end)


def _band(b: int, h: int, q: int, kv: int, size: Case, lower: int, upper: int) -> bool:
    """lower <= kv - q <= upper."""
    return lower <= kv - q <= upper


def _inverse_causal(b: int, h: int, q: int, kv: int, size: Case) -> bool:
    """kv >= q."""
    return kv >= q


def _chunked(b: int, h: int, q: int, kv: int, size: Case, chunk: int, start: int | list[int] = 0) -> bool:
    """Both in one of the chunks [start + n * chunk, start + (n + 1) * chunk), n any integer."""
    first = start[b] if isinstance(start, list) else start
    while first > q:
        first -= chunk
    while first + chunk <= q:
        first += chunk
    return first <= kv < first + chunk


def _chunked_causal(b: int, h: int, q: int, kv: int, size: Case, chunk: int, start: int | list[int] = 0) -> bool:
    """In one chunk, and kv <= q."""
    return kv <= q and _chunked(b, h, q, kv, size, chunk, start)


def _block_causal(b: int, h: int, q: int, kv: int, size: Case, block: int) -> bool:
    """kv below the end of the block that q is in."""
    end = block
    while end <= q:
        end += block
    return kv < end


def _dilated_window(b: int, h: int, q: int, kv: int, size: Case, window: int, dilation: int) -> bool:
    """kv is one of q, q +- dilation, q +- 2 dilation, ... within `window`."""
    return kv in {q + side * n * dilation for side in (-1, 1) for n in range(window // dilation + 1)}


def _strided(b: int, h: int, q: int, kv: int, size: Case, stride: int) -> bool:
    """max(0, q - stride) <= kv <= q, or kv one of q, q - stride, q - 2 stride, ..."""
    return max(0, q - stride) <= kv <= q or kv in range(q, -1, -stride)


def _fixed(b: int, h: int, q: int, kv: int, size: Case, stride: int, summary: int) -> bool:
    """kv <= q, of q's block or one of the last `summary` of any block."""
    blocks = [list(range(start, start + stride)) for start in range(0, max(q, kv) + 1, stride)]
    own = next(block for block in blocks if q in block)
    return kv <= q and (kv in own or any(kv in block[max(0, stride - summary) :] for block in blocks))


def _global_tokens(b: int, h: int, q: int, kv: int, size: Case, tokens: Any) -> bool:
    """Either is global: below a number, or marked."""
    if isinstance(tokens, int):
        return q < tokens or kv < tokens
    marked = tokens[b] if isinstance(tokens[0], list) else tokens
    return bool(marked[q] or marked[kv])


def _longformer(b: int, h: int, q: int, kv: int, size: Case, window: int, tokens: Any) -> bool:
    """|q - kv| <= window, or either is global."""
    return abs(q - kv) <= window or _global_tokens(b, h, q, kv, size, tokens)


def _temporal_window(b: int, h: int, q: int, kv: int, size: Case, frame: int, window: int, tokens: int = 0) -> bool:
    """Either is text, or their places in their frames are at most `window` apart."""
    if q < tokens or kv < tokens:
        return True
    frames = [range(start, start + frame) for start in range(tokens, max(q, kv) + 1, frame)]
    places = [next(f.index(n) for f in frames if n in f) for n in (q, kv)]
    return abs(places[0] - places[1]) <= window


def _sink_window(b: int, h: int, q: int, kv: int, size: Case, sinks: int, window: int) -> bool:
    """kv <= q, and kv < sinks or kv >= q - window."""
    return kv <= q and (kv < sinks or kv >= q - window)


@functools.cache
def _bigbird_blocks(
    length: int, block: int, window: int, global_blocks: int, random_blocks: int, seed: int
) -> list[set[int]]:
    """The blocks that each block sees, the random ones drawn by Floyd's algorithm.

    Row i and step n have the n-th uniform number of row i, [blocks, random_blocks] in float64 from torch's generator.
    """
    blocks = math.ceil(length / block)
    uniform = torch.rand(
        (blocks, random_blocks), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    everything = set(range(blocks))
    edges = {i for i in range(blocks) if i < global_blocks or i >= blocks - global_blocks}
    found = []
    for i in range(blocks):
        near = {j for j in everything if abs(i - j) <= window}
        rest = sorted(everything - near - edges)
        wanted = min(random_blocks, len(rest))
        drawn: list[int] = []
        for n in range(wanted):
            top = len(rest) - wanted + n
            one = math.floor(uniform[i][n] * (top + 1))
            drawn.append(top if one in drawn else one)
        assert len(set(drawn)) == wanted
        found.append(everything if i in edges else near | edges | {rest[n] for n in drawn})
    return found


def _bigbird(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    length: int,
    block: int,
    window: int = 1,
    global_blocks: int = 1,
    random_blocks: int = 3,
    seed: int = 0,
) -> bool:
    """kv's block is near q's, either is among the first or last ones, or it was drawn for q's."""
    return kv // block in _bigbird_blocks(length, block, window, global_blocks, random_blocks, seed)[q // block]


def _of(values: Any, b: int) -> Any:
    """The row of batch element b, where there are rows."""
    return values[b] if isinstance(values[0], list) else values


def _cross_document(b: int, h: int, q: int, kv: int, size: Case, q_document_ids: Any, kv_document_ids: Any) -> bool:
    """q's document is kv's."""
    return bool(_of(q_document_ids, b)[q] == _of(kv_document_ids, b)[kv])


def _bidirectional_spans(b: int, h: int, q: int, kv: int, size: Case, span_ids: Any) -> bool:
    """kv <= q, or both in one span."""
    ids = _of(span_ids, b)
    return kv <= q or bool(ids[q] >= 0 and ids[q] == ids[kv])


def _shared_prefix(b: int, h: int, q: int, kv: int, size: Case, document_ids: Any, prefix_of: list[int]) -> bool:
    """kv <= q, and kv of q's document or of that document's prefix."""
    ids = _of(document_ids, b)
    return kv <= q and ids[kv] in (ids[q], prefix_of[ids[q]])


def _multi_item(b: int, h: int, q: int, kv: int, size: Case, prefix_len: Any, item_positions: Any) -> bool:
    """kv <= q; behind the prefix, kv in the prefix or fewer than item_positions[q] positions before q."""
    prefix = prefix_len[b] if isinstance(prefix_len, list) else prefix_len
    if kv > q:
        return False
    return q < prefix or kv < prefix or q - kv < _of(item_positions, b)[q]


def _causal_blockwise(b: int, h: int, q: int, kv: int, size: Case, block_ids: Any) -> bool:
    """kv <= q, and q in the last block, of a negative id, or both in one block."""
    ids = _of(block_ids, b)
    return kv <= q and (ids[q] < 0 or ids[q] == ids[kv])


def _tree(b: int, h: int, q: int, kv: int, size: Case, parents: Any, start: Any = 0) -> bool:
    """kv is q, or before the tree and before q, or met on the way from q up to the root."""
    first = start[b] if isinstance(start, list) else start
    above = _of(parents, b)
    end = first + len(above)
    if q >= end or kv >= end:
        return False
    if q < first or kv < first:
        return kv <= q
    node = q - first
    while node >= 0:
        if node == kv - first:
            return True
        node = above[node]
    return False


def _eagle3(b: int, h: int, q: int, kv: int, size: Case, length: int) -> bool:
    """Of the first `length` keys those up to q; of each later `length` the one at q's place."""
    step, place = divmod(kv, length)
    return kv <= q if step == 0 else place == q % length


def _block_diffusion(b: int, h: int, q: int, kv: int, size: Case, length: int, block: int) -> bool:
    """Noised sees its own noised block and earlier clean ones, clean sees clean blocks up to its own."""
    q_clean, kv_clean = q >= length, kv >= length
    row = (q - length if q_clean else q) // block
    column = (kv - length if kv_clean else kv) // block
    if q_clean:
        return kv_clean and column <= row
    return column < row if kv_clean else column == row


def _key_eviction(b: int, h: int, q: int, kv: int, size: Case, evicted: Any) -> bool:
    """kv <= q < evicted[kv]."""
    if isinstance(evicted[0], list) and isinstance(evicted[0][0], list):
        rows = evicted[b]
        return kv <= q < (rows[h] if len(rows) > 1 else rows[0])[kv]
    return kv <= q < _of(evicted, b)[kv]


def _flashmask(b: int, h: int, q: int, kv: int, size: Case, startend_row_indices: Any, causal: bool) -> bool:
    """Not in a hidden interval of rows of column kv, nor, where causal, above the diagonal."""
    of_batch = startend_row_indices[b % len(startend_row_indices)]
    rows = of_batch[h % len(of_batch)][kv]
    if causal:
        start, end = rows if len(rows) == 2 else (rows[0], math.inf)
        return kv <= q and not start <= q < end
    if len(rows) == 2:
        return q < rows[0] and q >= rows[1]
    return not rows[0] <= q < rows[1] and not rows[2] <= q < rows[3]


def _slices(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    q_ranges: list[list[int]],
    kv_ranges: list[list[int]],
    types: list[int] | None = None,
) -> bool:
    """In a slice, and there not above the diagonal through the last pair, nor below that through the first."""
    for n, ((q_start, q_end), (kv_start, kv_end)) in enumerate(zip(q_ranges, kv_ranges, strict=True)):
        if not (q_start <= q < q_end and kv_start <= kv < kv_end):
            continue
        kind = 0 if types is None else types[n]
        shown = {
            0: True,
            1: kv - (kv_end - 1) <= q - (q_end - 1),
            2: kv - kv_start >= q - q_start,
            3: q - q_start <= kv - kv_start <= (kv_end - kv_start) - (q_end - q_start) + (q - q_start),
        }
        if shown[kind]:
            return True
    return False


def _key_padding(b: int, h: int, q: int, kv: int, size: Case, attention_mask: Any) -> bool:
    """attention_mask[b][kv] is 1."""
    return attention_mask[b][kv] == 1


def _two(values: Any, b: int, h: int) -> Any:
    """The table of batch element b and head h, of one table or of [batch or 1, heads or 1] of them."""
    if not isinstance(values[0][0], list):
        return values
    rows = values[b if len(values) > 1 else 0]
    return rows[h if len(rows) > 1 else 0]


def _dense(b: int, h: int, q: int, kv: int, size: Case, visible: Any) -> bool:
    """What is written there."""
    return bool(_two(visible, b, h)[q][kv])


def _block_sparse(b: int, h: int, q: int, kv: int, size: Case, layout: Any, block: Any) -> bool:
    """What is written at the pair of blocks."""
    rows, columns = block if isinstance(block, tuple) else (block, block)
    return bool(_two(layout, b, h)[q // rows][kv // columns])


def _bsr(
    b: int, h: int, q: int, kv: int, size: Case, crow_indices: list[int], col_indices: list[int], block: Any
) -> bool:
    """kv's block is listed for q's row of blocks."""
    rows, columns = block if isinstance(block, tuple) else (block, block)
    row = q // rows
    return kv // columns in col_indices[crow_indices[row] : crow_indices[row + 1]]


def _block_topk(b: int, h: int, q: int, kv: int, size: Case, indices: Any, block: Any) -> bool:
    """kv's block is among those chosen for q's."""
    rows, columns = block if isinstance(block, tuple) else (block, block)
    return kv // columns in _two(indices, b, h)[q // rows]


def _vertical_slash(b: int, h: int, q: int, kv: int, size: Case, vertical: Any, slash: Any) -> bool:
    """kv <= q, and kv among the columns or q - kv among the distances."""

    def of(values: Any) -> Any:
        if values and isinstance(values[0], list) and isinstance(values[0][0], list):
            return values[b][h]
        return values[h] if values and isinstance(values[0], list) else values

    return kv <= q and (kv in of(vertical) or q - kv in of(slash))


def _sliding_tile(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    canvas: tuple[int, ...],
    tile: tuple[int, ...],
    window: tuple[int, ...],
    text: int = 0,
) -> bool:
    """kv's tile is in the window of tiles around q's; text is seen by and sees all."""
    pixels, inside = math.prod(canvas), math.prod(tile)
    assert size.kv_len == pixels + text
    if q >= pixels or kv >= pixels:
        return True
    counts = [n // t for n, t in zip(canvas, tile, strict=True)]
    tiles = list(itertools.product(*map(range, counts)))
    places = zip(tiles[q // inside], tiles[kv // inside], counts, window, strict=True)
    return all(_natten_axis(i, j, n, w, 1, False) for i, j, n, w in places)


def _packed(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    mask: tuple[str, dict[str, Any]],
    offsets: list[int],
    kv_offsets: list[int] | None = None,
    q_start: int | list[int] = 0,
) -> bool:
    """Both of the same sequence i, and the inner mask says so at the positions there.

    These are q - offsets[i] + q_start[i] and kv - kv_offsets[i].
    """
    kv_bounds = offsets if kv_offsets is None else kv_offsets
    count = len(offsets) - 1
    for i in range(count):
        if offsets[i] <= q < offsets[i + 1] and kv_bounds[i] <= kv < kv_bounds[i + 1]:
            name, params = mask
            start = q_start[i] if isinstance(q_start, list) else q_start
            inner = Case(
                name,
                params,
                batch=count,
                heads=size.heads,
                q_len=max(offsets[n + 1] - offsets[n] for n in range(count)),
                kv_len=max(kv_bounds[n + 1] - kv_bounds[n] for n in range(count)),
            )
            return MASKS[name](i, h, q - offsets[i] + start, kv - kv_bounds[i], inner, **params)
    return False


def _paged(
    b: int,
    h: int,
    q: int,
    kv: int,
    size: Case,
    mask: tuple[str, dict[str, Any]],
    page_table: list[list[int]],
    kv_lens: list[int],
    page_size: int,
) -> bool:
    """kv is where the sequence keeps its key n < kv_lens[b], and the inner mask says so at (b, h, q, n)."""
    for n in range(kv_lens[b]):
        if kv == page_table[b][n // page_size] * page_size + n % page_size:
            name, params = mask
            inner = Case(name, params, size.batch, size.heads, size.q_len, len(page_table[b]) * page_size)
            return MASKS[name](b, h, q, n, inner, **params)
    return False


MASKS: dict[str, Callable[..., bool]] = {
    "full": _full,
    "causal": _causal,
    "grouped_tril": _grouped_tril,
    "padding": _padding,
    "sliding_window": _sliding_window,
    "local": _local,
    "prefix_lm": _prefix_lm,
    "document": _document,
    "sasa": _sasa,
    "natten": _natten,
    "vision_cross": _vision_cross,
    "packed": _packed,
    "paged": _paged,
    "band": _band,
    "inverse_causal": _inverse_causal,
    "chunked": _chunked,
    "chunked_causal": _chunked_causal,
    "block_causal": _block_causal,
    "dilated_window": _dilated_window,
    "strided": _strided,
    "fixed": _fixed,
    "global_tokens": _global_tokens,
    "longformer": _longformer,
    "temporal_window": _temporal_window,
    "sink_window": _sink_window,
    "bigbird": _bigbird,
    "cross_document": _cross_document,
    "bidirectional_spans": _bidirectional_spans,
    "shared_prefix": _shared_prefix,
    "multi_item": _multi_item,
    "causal_blockwise": _causal_blockwise,
    "tree": _tree,
    "eagle3": _eagle3,
    "block_diffusion": _block_diffusion,
    "key_eviction": _key_eviction,
    "flashmask": _flashmask,
    "slices": _slices,
    "key_padding": _key_padding,
    "dense": _dense,
    "block_sparse": _block_sparse,
    "bsr": _bsr,
    "block_topk": _block_topk,
    "vertical_slash": _vertical_slash,
    "sliding_tile": _sliding_tile,
    "natten1d": _natten1d,
    "natten3d": _natten3d,
}


# ---------------------------------------------------------------------------------------------------------------------
# Scores: what becomes of the scaled scores [B, H, Q, K] before the mask. Tensors stay tensors, so gradients flow.
# ---------------------------------------------------------------------------------------------------------------------


def _table(scores: Tensor, case: Case, cell: Callable[[int, int, int], Tensor]) -> Tensor:
    """cell(h, q, kv) at every place of the scores, q with its offset added."""
    batch, heads, q_len, kv_len = scores.shape
    starts = offsets(case)
    assert len(starts) == batch
    cells = [
        cell(h, starts[b] + row, kv).to(scores.dtype)
        for b in range(batch)
        for h in range(heads)
        for row in range(q_len)
        for kv in range(kv_len)
    ]
    return torch.stack(cells).reshape(batch, heads, q_len, kv_len)


def alibi_slopes(heads: int) -> list[float]:
    """Press et al. 2021: 2^(-8 (i + 1) / heads) for a power of two; else those of the largest power of two n below,
    followed by the slopes of 2n at even positions until there are enough."""
    n = 1
    while n * 2 <= heads:
        n *= 2
    slopes = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    position = 0
    while len(slopes) < heads:
        slopes.append(2.0 ** (-8.0 * (position + 1) / (2 * n)))
        position += 2
    return slopes


def _alibi(scores: Tensor, case: Case, slopes: Tensor | None = None, bidirectional: bool = False) -> Tensor:
    """s - slope_h * (q - kv), or of |q - kv|."""
    heads = scores.shape[1]
    per_head = torch.tensor(alibi_slopes(heads), dtype=torch.float64) if slopes is None else slopes
    assert per_head.shape == (heads,)
    return scores - _table(scores, case, lambda h, q, kv: per_head[h] * float(abs(q - kv) if bidirectional else q - kv))


def _softcap(scores: Tensor, case: Case, cap: float) -> Tensor:
    """cap * tanh(s / cap)."""
    return cap * torch.tanh(scores / cap)


def _relative_bias(scores: Tensor, case: Case, table: Tensor) -> Tensor:
    """s + table[h, clip(kv - q, -D, D) + D], for a table of [H, 2 * D + 1]."""
    assert table.shape[0] == scores.shape[1]
    assert table.shape[1] % 2 == 1
    reach = (table.shape[1] - 1) // 2
    return scores + _table(scores, case, lambda h, q, kv: table[h, min(max(kv - q, -reach), reach) + reach])


def _checkerboard(scores: Tensor, case: Case) -> Tensor:
    """s * 0.5 where |q - kv| is odd, s * 2 where it is even."""
    half, double = torch.tensor(0.5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    return scores * _table(scores, case, lambda h, q, kv: half if abs(q - kv) % 2 == 1 else double)


def _t5_bias(scores: Tensor, case: Case, table: Tensor, max_distance: int = 128, bidirectional: bool = True) -> Tensor:
    """s + table[bucket, h]: half of a side's buckets by distance, the others by its logarithm, as T5's code has it."""
    buckets = table.shape[0]

    def bucket(distance: int) -> int:
        side, found = buckets, 0
        if bidirectional:
            side //= 2
            found = side if distance > 0 else 0
            far = abs(distance)
        else:
            far = -min(distance, 0)
        exact = side // 2
        if far < exact:
            return found + far
        # 1e-9: where the logarithms' quotient is a whole number it may come out a little below
        more = math.log(far / exact) / math.log(max_distance / exact) * (side - exact) + 1e-9
        return found + min(exact + int(more), side - 1)

    return scores + _table(scores, case, lambda h, q, kv: table[bucket(kv - q), h])


def _distance_bias(scores: Tensor, case: Case, table: Tensor, distances: Tensor) -> Tensor:
    """s + table[h, distance], one matrix of distances for all batch elements or one for each."""
    batch, heads, q_len, kv_len = scores.shape
    rows = []
    for b, start in enumerate(offsets(case)):
        own = distances[b] if distances.ndim == 3 else distances
        for h in range(heads):
            rows += [table[h, int(own[start + row, kv])] for row in range(q_len) for kv in range(kv_len)]
    return scores + torch.stack(rows).reshape(batch, heads, q_len, kv_len)


def _sandwich(scores: Tensor, case: Case, dims: int = 128, ratios: Tensor | None = None, positions: int = 0) -> Tensor:
    """s + ratio, by default H / 8(h+1), times q's embedding by kv's: sin, cos of position / 10000^(2i/dims)."""

    def embedding(position: int) -> list[float]:
        angles = [position / 10000 ** (2 * i / dims) for i in range(dims // 2)]
        return [f(a) for a in angles for f in (math.sin, math.cos)]

    heads = scores.shape[1]
    places = {n: embedding(n) for n in range(max(offsets(case)) + max(case.q_len, case.kv_len))}

    def cell(h: int, q: int, kv: int) -> Tensor:
        product = sum(x * y for x, y in zip(places[q], places[kv], strict=True))
        return product * (torch.tensor(heads / (8 * (h + 1)), dtype=torch.float64) if ratios is None else ratios[h])

    return scores + _table(scores, case, cell)


def _temperature(scores: Tensor, case: Case, temperatures: Tensor) -> Tensor:
    """s / t_h."""
    return scores / _table(scores, case, lambda h, q, kv: temperatures[h])


SCORES: dict[str, Callable[..., Tensor]] = {
    "alibi": _alibi,
    "softcap": _softcap,
    "relative_bias": _relative_bias,
    "checkerboard": _checkerboard,
    "t5_bias": _t5_bias,
    "distance_bias": _distance_bias,
    "sandwich": _sandwich,
    "temperature": _temperature,
}


# ---------------------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------------------

_GENERATOR = torch.Generator().manual_seed(20240817)


def _int32(values: Any) -> Tensor:
    """An int32 tensor of the values."""
    return torch.tensor(values, dtype=torch.int32)


def _int64(values: Any) -> Tensor:
    """An int64 tensor of the values."""
    return torch.tensor(values, dtype=torch.int64)


def _random_ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Random whole numbers in [low, high)."""
    return torch.randint(low, high, shape, generator=_GENERATOR, dtype=dtype)


def _random_floats(*shape: int) -> Tensor:
    """Normal float64 numbers, a leaf tensor."""
    return torch.randn(*shape, generator=_GENERATOR, dtype=torch.float64)


def _runs(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Ids 0, 1, 2, ... each repeated by its length."""
    return torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)], dtype=dtype)


_PLAIN_CASES: list[Case] = [
    Case("full", {}),
    Case("full", {}, batch=3, heads=1, q_len=17, kv_len=53, q_offset=36),
    Case("full", {}, q_len=1, kv_len=70, q_offset=(69, 3)),
    Case("causal", {}),
    Case("causal", {}, heads=3, q_len=23, kv_len=61),
    Case("causal", {}, q_len=61, kv_len=23),
    Case("causal", {}, q_len=19, kv_len=64, q_offset=45),
    Case("causal", {}, batch=3, q_len=9, kv_len=50, q_offset=(0, 17, 41)),
    Case("causal", {}, q_len=1, kv_len=33, q_offset=(32, 0)),
    Case("causal", {}, q_len=1, kv_len=1),
    Case("causal", {}, q_len=300, kv_len=300),
    Case("causal", {}, q_len=150, kv_len=300, q_offset=(150, 77)),
    Case("causal", {}, q_len=40, kv_len=150, q_offset=110),
]

_LENGTH_CASES: list[Case] = [
    Case("grouped_tril", {"seq_lens": _int64([40, 13])}),
    Case("grouped_tril", {"seq_lens": _int32([0, 1, 39])}, batch=3, q_len=40, kv_len=40),
    Case("grouped_tril", {"seq_lens": _int64([30, 61])}, q_len=21, kv_len=61, q_offset=40),
    Case("grouped_tril", {"seq_lens": _int32([25, 47])}, q_len=17, kv_len=50, q_offset=(8, 33)),
    Case("grouped_tril", {"seq_lens": _int64([16, 33])}, q_len=57, kv_len=33),
    Case("grouped_tril", {"seq_lens": _int32([129, 128, 0, 300])}, batch=4, q_len=300, kv_len=300),
    Case("grouped_tril", {"seq_lens": _int64([200, 131])}, q_len=50, kv_len=257, q_offset=(150, 128)),
    Case("padding", {"seq_lens": _int64([40, 13])}),
    Case("padding", {"seq_lens": _int32([0, 1, 64])}, batch=3, q_len=30, kv_len=64),
    Case("padding", {"seq_lens": _int64([16, 17])}, q_len=55, kv_len=17),
    Case("padding", {"seq_lens": _int32([69, 48])}, heads=3, q_len=5, kv_len=70, q_offset=(64, 43)),
    Case("padding", {"seq_lens": _int64([0, 0])}, q_len=20, kv_len=20),
    Case("prefix_lm", {"prefix_len": 11}),
    Case("prefix_lm", {"prefix_len": 0}, q_len=33, kv_len=47),
    Case("prefix_lm", {"prefix_len": 100}, q_len=33, kv_len=47),
    Case("prefix_lm", {"prefix_len": _int64(16)}, q_len=39, kv_len=39),
    Case("prefix_lm", {"prefix_len": _int32(40)}, q_len=21, kv_len=66, q_offset=30),
    Case("prefix_lm", {"prefix_len": _int64([0, 7, 50])}, batch=3, q_len=50, kv_len=50),
    Case("prefix_lm", {"prefix_len": _int32([45, 1])}, q_len=10, kv_len=60, q_offset=(20, 50)),
    Case("prefix_lm", {"prefix_len": _int64([5, 20])}, q_len=61, kv_len=30),
]

_WINDOW_CASES: list[Case] = [
    Case("sliding_window", {"window": 8}),
    Case("sliding_window", {"window": 0}, q_len=37, kv_len=37),
    Case("sliding_window", {"window": 1000}, q_len=37, kv_len=50),
    # Queries beyond the last key's reach see nothing.
    Case("sliding_window", {"window": 5}, q_len=70, kv_len=41),
    Case("sliding_window", {"window": _int64(15)}, heads=3, q_len=20, kv_len=70, q_offset=50),
    Case("sliding_window", {"window": _int32(16)}, q_len=15, kv_len=65, q_offset=(50, 7)),
    Case("sliding_window", {"window": _int64(0)}, q_len=1, kv_len=30, q_offset=(29, 4)),
    Case("sliding_window", {"window": 130}, q_len=300, kv_len=300),
    Case("sliding_window", {"window": _int32(3)}, q_len=300, kv_len=150),
    Case("sliding_window", {"window": 127}, q_len=44, kv_len=300, q_offset=(256, 128)),
    Case("local", {"left": 4, "right": 9}),
    Case("local", {"left": 0, "right": 0}, q_len=33, kv_len=55),
    Case("local", {"left": 0, "right": 3}, q_len=33, kv_len=33),
    Case("local", {"left": 6, "right": 0}, q_len=69, kv_len=31),
    Case("local", {"left": 500, "right": 500}, q_len=29, kv_len=44),
    Case("local", {"left": _int64(10), "right": _int32(2)}, q_len=18, kv_len=60, q_offset=42),
    Case("local", {"left": _int32(3), "right": _int64(7)}, q_len=18, kv_len=60, q_offset=(0, 31)),
    # The second batch element's queries all lie beyond the reach of the keys.
    Case("local", {"left": 2, "right": _int64(1)}, q_len=16, kv_len=24, q_offset=(8, 40)),
]

_DOCUMENT_CASES: list[Case] = [
    Case("document", {"document_ids": _runs([7, 16, 1, 16])}),
    Case("document", {"document_ids": _random_ints(0, 4, 2, 40)}),
    Case("document", {"document_ids": _random_ints(-2, 3, 3, 53, dtype=torch.int32)}, batch=3, q_len=53, kv_len=53),
    Case("document", {"document_ids": torch.arange(30, dtype=torch.int32)}, q_len=30, kv_len=30),
    Case("document", {"document_ids": torch.zeros(2, 45, dtype=torch.int64)}, q_len=45, kv_len=45),
    Case("document", {"document_ids": _random_ints(0, 3, 62, dtype=torch.int32)}, q_len=19, kv_len=62, q_offset=43),
    Case("document", {"document_ids": _random_ints(0, 3, 2, 62)}, q_len=19, kv_len=50, q_offset=(5, 43)),
    Case("document", {"document_ids": _random_ints(0, 2, 2, 66)}, q_len=66, kv_len=20),
    # Ids that differ only above the lowest 32 bits.
    Case("document", {"document_ids": _random_ints(0, 3, 35) * 2**32 + 7}, q_len=35, kv_len=35),
    Case("document", {"document_ids": _runs([100, 28, 1, 99, 72], torch.int32)}, q_len=300, kv_len=300),
    Case("document", {"document_ids": _random_ints(0, 5, 2, 150)}, heads=1, q_len=150, kv_len=150),
    Case(
        "document",
        {"document_ids": torch.stack([_runs([127, 2, 171]), _runs([256, 44])])},
        q_len=44,
        kv_len=300,
        q_offset=(100, 256),
    ),
]


def _sasa_case(height: int, width: int, window: int | tuple[int, int], batch: int = 2, heads: int = 2) -> Case:
    """A sasa case over the whole canvas."""
    params = {"height": height, "width": width, "window": window}
    return Case("sasa", params, batch=batch, heads=heads, q_len=height * width, kv_len=height * width)


def _natten_case(height: int, width: int, kernel: int | tuple[int, int], **more: Any) -> Case:
    """A natten case over the whole canvas."""
    params = {"height": height, "width": width, "kernel": kernel, **more}
    return Case("natten", params, q_len=height * width, kv_len=height * width)


_CANVAS_CASES: list[Case] = [
    _sasa_case(8, 8, 1),
    _sasa_case(5, 9, 2, batch=3),
    _sasa_case(9, 5, (1, 3), heads=3),
    _sasa_case(6, 7, (2, 0)),
    _sasa_case(7, 6, 0),
    _sasa_case(4, 11, 20),
    _sasa_case(1, 37, (0, 4)),
    _sasa_case(41, 1, 3),
    _natten_case(8, 8, 3),
    _natten_case(5, 9, 5),
    _natten_case(10, 6, (7, 3)),
    _natten_case(6, 7, (4, 2)),
    _natten_case(7, 9, 4),
    _natten_case(5, 6, (5, 6)),
    _natten_case(6, 7, 1),
    _natten_case(1, 13, (1, 5)),
    _natten_case(31, 1, (6, 1)),
    _natten_case(7, 9, 3, dilation=2),
    _natten_case(7, 10, (3, 2), dilation=(2, 4)),
    _natten_case(8, 8, (2, 4), dilation=(3, 2)),
    _natten_case(6, 11, (5, 3), dilation=(1, 3), causal=False),
    _natten_case(6, 8, 3, causal=True),
    _natten_case(7, 7, (4, 3), causal=(True, False)),
    _natten_case(5, 11, (2, 4), causal=(False, True)),
    _natten_case(9, 7, 3, dilation=2, causal=True),
    _natten_case(7, 8, (2, 3), dilation=(3, 2), causal=(False, True)),
    _natten_case(11, 5, (4, 2), dilation=(2, 2), causal=(True, False)),
    _natten_case(4, 6, (4, 6), causal=(True, True)),
]

_VISION_CASES: list[Case] = [
    Case(
        "vision_cross",
        {"intervals": _int64([[0, 10], [10, 25], [25, 40]]), "image_ids": _runs([8, 16, 9])},
        q_len=40,
        kv_len=33,
    ),
    # Overlapping, empty and never-named intervals, padding between and after the images.
    Case(
        "vision_cross",
        {
            "intervals": _int32([[[3, 30], [20, 45], [9, 9]], [[0, 45], [44, 45], [0, 1]]]),
            "image_ids": _int32([[0] * 12 + [-1] * 3 + [1] * 10 + [-1] * 4, [2] * 5 + [1] * 20 + [-1] * 4]),
        },
        q_len=45,
        kv_len=29,
    ),
    Case(
        "vision_cross",
        {"intervals": _int64([[5, 21], [21, 60]]), "image_ids": _random_ints(-1, 2, 3, 34, dtype=torch.int32)},
        batch=3,
        q_len=51,
        kv_len=34,
    ),
    Case(
        "vision_cross",
        {
            "intervals": _int32([[[0, 16], [16, 50]], [[48, 64], [2, 70]]]),
            "image_ids": _int64([1] * 17 + [0] * 17 + [-1]),
        },
        heads=3,
        q_len=20,
        kv_len=35,
        q_offset=33,
    ),
    Case(
        "vision_cross",
        {"intervals": _int64([[0, 12], [12, 61]]), "image_ids": _random_ints(-1, 2, 2, 48)},
        q_len=11,
        kv_len=48,
        q_offset=(4, 50),
    ),
    Case("vision_cross", {"intervals": _int64([[0, 30]]), "image_ids": _int64([-1] * 21)}, q_len=30, kv_len=21),
]

_BAND_CASES: list[Case] = [
    Case("band", {"lower": -5, "upper": 3}),
    Case("band", {"lower": 4, "upper": 9}, q_len=33, kv_len=45),
    Case("band", {"lower": -20, "upper": -7}, q_len=50, kv_len=37, q_offset=(0, 21)),
    Case("band", {"lower": 3, "upper": 2}, q_len=20, kv_len=20),
    Case("band", {"lower": _int64(-100), "upper": _int32(40)}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("inverse_causal", {}),
    Case("inverse_causal", {}, q_len=29, kv_len=61, q_offset=(32, 5)),
    Case("inverse_causal", {}, batch=1, heads=1, q_len=150, kv_len=140),
    Case("chunked", {"chunk": 7}),
    Case("chunked", {"chunk": 1, "start": 3}, q_len=21, kv_len=33),
    Case("chunked", {"chunk": 16, "start": _int64([0, 13])}, q_len=19, kv_len=53, q_offset=(34, 20)),
    Case("chunked", {"chunk": 100}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("chunked_causal", {"chunk": 8}),
    Case("chunked_causal", {"chunk": 9, "start": _int32([5, 12])}, q_len=40, kv_len=40),
    Case("chunked_causal", {"chunk": 500}, q_len=31, kv_len=57, q_offset=26),
    Case("chunked_causal", {"chunk": 50, "start": -7}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("block_causal", {"block": 6}),
    Case("block_causal", {"block": 1}, q_len=33, kv_len=47, q_offset=(14, 3)),
    Case("block_causal", {"block": 48}, batch=1, heads=1, q_len=150, kv_len=160),
]

_SPARSE_CASES: list[Case] = [
    Case("dilated_window", {"window": 9, "dilation": 3}),
    Case("dilated_window", {"window": _int64(10), "dilation": 4}, q_len=31, kv_len=47, q_offset=(0, 30)),
    Case("dilated_window", {"window": 5, "dilation": 1}, q_len=50, kv_len=29),
    Case("dilated_window", {"window": 3, "dilation": 7}, q_len=20, kv_len=20),
    Case("strided", {"stride": 5}),
    Case("strided", {"stride": 1}, q_len=30, kv_len=25),
    Case("strided", {"stride": 16}, q_len=23, kv_len=60, q_offset=(37, 9)),
    Case("strided", {"stride": 40}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("fixed", {"stride": 8, "summary": 2}),
    Case("fixed", {"stride": 5, "summary": 0}, q_len=33, kv_len=21),
    Case("fixed", {"stride": 4, "summary": 9}, q_len=17, kv_len=49, q_offset=(32, 11)),
    Case("fixed", {"stride": 60, "summary": 7}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("global_tokens", {"tokens": 3}),
    Case("global_tokens", {"tokens": torch.rand(53, generator=_GENERATOR) < 0.1}, q_len=19, kv_len=53, q_offset=34),
    Case("global_tokens", {"tokens": torch.rand(2, 40, generator=_GENERATOR) < 0.2}),
    Case("global_tokens", {"tokens": 0}, q_len=20, kv_len=20),
    Case("longformer", {"window": 4, "tokens": 2}),
    Case(
        "longformer",
        {"window": _int64(6), "tokens": torch.rand(2, 61, generator=_GENERATOR) < 0.1},
        q_len=61,
        kv_len=50,
    ),
    Case("longformer", {"window": 20, "tokens": torch.arange(150) % 71 == 5}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("temporal_window", {"frame": 9, "window": 2, "tokens": 4}),
    Case("temporal_window", {"frame": 7, "window": 0}, q_len=21, kv_len=44, q_offset=(0, 23)),
    Case("temporal_window", {"frame": 50, "window": 12, "tokens": 3}, batch=1, heads=1, q_len=153, kv_len=153),
    Case("sink_window", {"sinks": 3, "window": 6}),
    Case("sink_window", {"sinks": 0, "window": 0}, q_len=33, kv_len=21),
    Case("sink_window", {"sinks": _int64(4), "window": _int64(9)}, q_len=15, kv_len=60, q_offset=(45, 20)),
    Case("sink_window", {"sinks": 30, "window": 25}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("bigbird", {"length": 60, "block": 4}, q_len=60, kv_len=60),
    Case("bigbird", {"length": 41, "block": 3, "random_blocks": 2, "seed": 7}, q_len=41, kv_len=41),
    Case("bigbird", {"length": 40, "block": 2, "window": 0, "global_blocks": 0, "random_blocks": 1}),
    Case("bigbird", {"length": 40, "block": 5, "window": 2, "global_blocks": 2, "random_blocks": 9}),
    Case("bigbird", {"length": 30, "block": 4, "global_blocks": 50}, q_len=30, kv_len=30),
    Case("bigbird", {"length": 33, "block": 64}, q_len=33, kv_len=33),
    Case("bigbird", {"length": 200, "block": 16, "seed": 3}, batch=1, heads=1, q_len=200, kv_len=200),
]

_SPAN_CASES: list[Case] = [
    Case(
        "cross_document",
        {"q_document_ids": _runs([9, 4, 20]), "kv_document_ids": _runs([20, 1, 30])},
        q_len=33,
        kv_len=51,
    ),
    Case(
        "cross_document",
        {"q_document_ids": _random_ints(0, 4, 2, 60), "kv_document_ids": _random_ints(-1, 5, 29)},
        q_len=19,
        kv_len=29,
        q_offset=(41, 7),
    ),
    Case(
        "cross_document",
        {
            "q_document_ids": _runs([100, 50], torch.int32),
            "kv_document_ids": torch.stack([_runs([17, 120], torch.int32), _runs([130, 7], torch.int32)]),
        },
        heads=1,
        q_len=150,
        kv_len=137,
    ),
    Case("bidirectional_spans", {"span_ids": _int64([-1] * 5 + [3] * 9 + [-1] * 6 + [1] * 12 + [-7] * 8)}),
    # Spans that other tokens interrupt, in any order of ids.
    Case(
        "bidirectional_spans",
        {"span_ids": _random_ints(-2, 4, 2, 53, dtype=torch.int32)},
        q_len=21,
        kv_len=53,
        q_offset=(32, 4),
    ),
    Case("bidirectional_spans", {"span_ids": torch.full((30,), -1)}, q_len=30, kv_len=22),
    Case("bidirectional_spans", {"span_ids": _runs([70, 80]) * 5}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("shared_prefix", {"document_ids": _runs([10, 8, 7, 15]), "prefix_of": _int64([-1, 0, 0, 0])}),
    Case(
        "shared_prefix",
        {
            "document_ids": torch.stack([_runs([5, 6, 9, 4, 8, 8]), _runs([1, 1, 20, 9, 0, 9])]),
            "prefix_of": _int32([0, 0, 0, -1, 3, 3]),
        },
    ),
    Case(
        "shared_prefix",
        {"document_ids": _random_ints(0, 4, 47), "prefix_of": _int64([1, -1, 0, 2])},
        q_len=20,
        kv_len=47,
        q_offset=(27, 9),
    ),
    Case(
        "shared_prefix",
        {"document_ids": _runs([60, 50, 40]), "prefix_of": _int64([-1, 0, 0])},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
    Case(
        "multi_item",
        {"prefix_len": 11, "item_positions": _int64([0] * 11 + [0, 1, 2, 3, 0, 1, 0, 0, 1, 2] + list(range(19)))},
    ),
    Case("multi_item", {"prefix_len": _int64([4, 30]), "item_positions": _random_ints(0, 9, 2, 40, dtype=torch.int32)}),
    Case(
        "multi_item", {"prefix_len": 0, "item_positions": torch.arange(50) % 13}, q_len=17, kv_len=50, q_offset=(33, 8)
    ),
    Case(
        "multi_item",
        {"prefix_len": 64, "item_positions": torch.arange(150) % 20},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
    Case("causal_blockwise", {"block_ids": _int64([0] * 12 + [1] * 5 + [2] * 10 + [-1] * 13)}),
    Case("causal_blockwise", {"block_ids": _random_ints(-1, 3, 2, 40)}),
    Case("causal_blockwise", {"block_ids": _runs([9, 30, 14])}, q_len=19, kv_len=53, q_offset=(34, 3)),
    Case(
        "causal_blockwise",
        {"block_ids": _int32([0] * 70 + [1] * 40 + [-1] * 40)},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
    Case("key_eviction", {"evicted": _random_ints(0, 50, 40)}),
    Case(
        "key_eviction",
        {"evicted": _random_ints(0, 70, 2, 51, dtype=torch.int32)},
        q_len=17,
        kv_len=51,
        q_offset=(34, 20),
    ),
    Case("key_eviction", {"evicted": _random_ints(0, 60, 2, 3, 40)}, heads=3),
    Case("key_eviction", {"evicted": _random_ints(0, 60, 2, 1, 40)}, heads=3),
    Case("key_eviction", {"evicted": torch.arange(150) + 60}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("flashmask", {"startend_row_indices": _random_ints(0, 41, 2, 1, 40, 1), "causal": True}),
    Case("flashmask", {"startend_row_indices": _random_ints(0, 41, 2, 2, 40, 2), "causal": True}),
    Case("flashmask", {"startend_row_indices": _random_ints(0, 41, 1, 1, 40, 2, dtype=torch.int32), "causal": False}),
    Case(
        "flashmask",
        {"startend_row_indices": _random_ints(0, 60, 1, 2, 53, 4), "causal": False},
        q_len=20,
        kv_len=53,
        q_offset=(33, 4),
    ),
    # Of each type one that is wide, high and square.
    Case(
        "slices",
        {
            "q_ranges": _int64([[0, 5], [5, 7], [7, 12]] * 4) + 13 * torch.arange(4).repeat_interleave(3)[:, None],
            "kv_ranges": _int64([[0, 2], [3, 8], [20, 25]] * 4),
            "types": torch.arange(4).repeat_interleave(3),
        },
        q_len=53,
        kv_len=30,
    ),
    Case("slices", {"q_ranges": _int32([[0, 9], [9, 40]]), "kv_ranges": _int32([[0, 40], [3, 5]])}),
    # Slices that touch, overlap, are empty, or have neither queries nor keys.
    Case(
        "slices",
        {
            "q_ranges": _int64([[4, 30], [0, 20], [10, 40], [10, 10], [3, 9], [0, 40], [12, 31]]),
            "kv_ranges": _int64([[0, 7], [7, 12], [10, 30], [0, 50], [50, 50], [38, 39], [20, 51]]),
            "types": _int32([0, 0, 1, 0, 3, 2, 3]),
        },
        q_len=40,
        kv_len=51,
    ),
    Case(
        "slices",
        {
            "q_ranges": _random_ints(0, 54, 12, 2).sort(1).values,
            "kv_ranges": _random_ints(0, 54, 12, 2).sort(1).values,
            "types": _random_ints(0, 4, 12),
        },
        q_len=20,
        kv_len=53,
        q_offset=(33, 4),
    ),
    Case("slices", {"q_ranges": _int64([[7, 7]]), "kv_ranges": _int64([[0, 9]])}, q_len=20, kv_len=9),
    Case(
        "slices",
        {
            "q_ranges": _int64([[0, 60], [60, 150], [60, 150]]),
            "kv_ranges": _int64([[0, 60], [60, 150], [0, 20]]),
            "types": _int64([1, 1, 0]),
        },
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
    Case("key_padding", {"attention_mask": torch.arange(40) >= _int64([[0], [13]])}),
    Case(
        "key_padding",
        {"attention_mask": (torch.arange(51) < _int64([[51], [0], [20]])).int()},
        batch=3,
        q_len=17,
        kv_len=51,
        q_offset=34,
    ),
    Case("key_padding", {"attention_mask": _random_ints(0, 2, 2, 150)}, heads=1, q_len=30, kv_len=150),
]

_TREE_CASES: list[Case] = [
    Case("tree", {"parents": _int64([-1, 0, 0, 1, 1, 2, 4, 6]), "start": 25}, q_len=8, kv_len=33, q_offset=25),
    Case("tree", {"parents": _int32([-1, -1, 0, 1, 1, 2, 0, -1, 7, 3])}, q_len=14, kv_len=12),
    Case(
        "tree",
        {"parents": _int64([[-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]]), "start": _int64([30, 11])},
        q_len=5,
        kv_len=40,
        q_offset=(30, 11),
    ),
    Case("tree", {"parents": _int64([-1, 0, 0, 1]), "start": _int32([0, 9])}, q_len=20, kv_len=20),
    Case("tree", {"parents": _int64([[(n - 1) // 3 for n in range(40)], [n - 1 - n % 2 for n in range(40)]])}),
    Case(
        "tree",
        {"parents": _int64([-1, *(max(0, n - 1 - n * n % 7) for n in range(1, 100))]), "start": 50},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
    Case("eagle3", {"length": 20}, q_len=20, kv_len=60),
    Case("eagle3", {"length": 40}),
    Case("eagle3", {"length": 13}, batch=3, q_len=13, kv_len=26),
    Case("eagle3", {"length": 60}, batch=1, heads=1, q_len=60, kv_len=180),
    Case("block_diffusion", {"length": 20, "block": 4}),
    Case("block_diffusion", {"length": 23, "block": 5}, q_len=46, kv_len=46),
    Case("block_diffusion", {"length": 20, "block": 1}, q_len=11, kv_len=40, q_offset=(0, 29)),
    Case("block_diffusion", {"length": 75, "block": 16}, batch=1, heads=1, q_len=150, kv_len=150),
]


def _random_bools(share: float, *shape: int) -> Tensor:
    """Random truth values of which a share is true."""
    return torch.rand(shape, generator=_GENERATOR) < share


_TABLE_CASES: list[Case] = [
    Case("dense", {"visible": _random_bools(0.3, 40, 40)}),
    Case("dense", {"visible": _random_bools(0.3, 2, 3, 50, 31)}, heads=3, q_len=17, kv_len=31, q_offset=(33, 0)),
    Case("dense", {"visible": _random_bools(0.3, 2, 1, 40, 40)}),
    Case("dense", {"visible": _random_bools(0.3, 1, 2, 40, 40)}),
    Case("dense", {"visible": torch.ones(150, 150, dtype=torch.bool).tril(3)}, batch=1, heads=1, q_len=150, kv_len=150),
    Case("block_sparse", {"layout": _random_bools(0.4, 8, 8), "block": 5}),
    Case(
        "block_sparse",
        {"layout": _random_bools(0.4, 2, 2, 7, 9), "block": (8, 6)},
        q_len=20,
        kv_len=50,
        q_offset=(36, 3),
    ),
    Case("block_sparse", {"layout": _random_bools(0.4, 1, 3, 40, 2), "block": (1, 20)}, heads=3),
    Case("block_sparse", {"layout": _random_bools(0.4, 10, 10), "block": 16}, batch=1, heads=1, q_len=150, kv_len=160),
    Case("bsr", {"crow_indices": _int64([0, 2, 2, 3, 6]), "col_indices": _int64([0, 2, 1, 3, 0, 2]), "block": 10}),
    Case(
        "bsr",
        {"crow_indices": _int32([0, 1, 4]), "col_indices": _int32([2, 0, 1, 3]), "block": (16, 8)},
        q_len=27,
        kv_len=29,
    ),
    Case(
        "bsr",
        {"crow_indices": _int64([0, 0, 0]), "col_indices": _int64([]), "block": 20},
        q_len=11,
        kv_len=40,
        q_offset=29,
    ),
    Case(
        "bsr",
        {"crow_indices": torch.arange(0, 21, 2), "col_indices": _random_ints(0, 10, 20), "block": 16},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
    Case("block_topk", {"indices": _random_ints(-1, 8, 8, 3), "block": 5}),
    Case("block_topk", {"indices": _random_ints(-1, 7, 2, 2, 40, 2, dtype=torch.int32), "block": (1, 6)}),
    Case(
        "block_topk",
        {"indices": _random_ints(0, 5, 2, 1, 9, 2), "block": (6, 10)},
        q_len=21,
        kv_len=50,
        q_offset=(33, 0),
    ),
    Case("block_topk", {"indices": torch.full((3, 1), -1), "block": 16}, q_len=40, kv_len=33),
    Case("vertical_slash", {"vertical": _int64([0, 5, 30]), "slash": _int64([0, 1, 9])}),
    Case(
        "vertical_slash",
        {"vertical": _random_ints(-1, 51, 3, 4, dtype=torch.int32), "slash": _random_ints(-1, 51, 2, 3, 5)},
        heads=3,
        q_len=20,
        kv_len=51,
        q_offset=(31, 6),
    ),
    Case("vertical_slash", {"vertical": _int64([-1]), "slash": _int64([3, 3])}, q_len=30, kv_len=20),
    Case(
        "vertical_slash",
        {"vertical": _int64([1, 140]), "slash": torch.arange(20)},
        batch=1,
        heads=1,
        q_len=150,
        kv_len=150,
    ),
]


def _volume(name: str, canvas: dict[str, int], text: int = 0, **more: Any) -> Case:
    """A case over a whole canvas, and `text` tokens after it."""
    tokens = math.prod(canvas.values()) + text
    return Case(name, {**canvas, **more}, q_len=tokens, kv_len=tokens)


def _tiles(canvas: tuple[int, ...], tile: tuple[int, ...], window: tuple[int, ...], text: int = 0) -> Case:
    """A sliding_tile case."""
    params = {"canvas": canvas, "tile": tile, "window": window, **({"text": text} if text else {})}
    tokens = math.prod(canvas) + text
    return Case("sliding_tile", params, q_len=tokens, kv_len=tokens)


_VOLUME_CASES: list[Case] = [
    _volume("natten1d", {"length": 40}, kernel=7),
    _volume("natten1d", {"length": 37}, kernel=6, dilation=3),
    _volume("natten1d", {"length": 41}, kernel=8, stride=4),
    _volume("natten1d", {"length": 29}, kernel=5, stride=3, causal=True),
    _volume("natten1d", {"length": 47}, kernel=5, stride=3, dilation=2),
    _volume("natten1d", {"length": 150}, kernel=150),
    _volume("natten", {"height": 7, "width": 8}, kernel=(4, 5), stride=(3, 2)),
    _volume("natten", {"height": 9, "width": 6}, kernel=3, stride=(2, 3), dilation=(2, 1), causal=(True, False)),
    _volume("natten", {"height": 6, "width": 8}, kernel=3, order=torch.randperm(48, generator=_GENERATOR)),
    _volume("natten3d", {"depth": 3, "height": 4, "width": 5}, kernel=3),
    _volume("natten3d", {"depth": 4, "height": 3, "width": 5}, kernel=(2, 3, 4), causal=(True, False, False)),
    _volume("natten3d", {"depth": 5, "height": 4, "width": 3}, kernel=(2, 2, 3), dilation=(2, 2, 1), stride=(2, 1, 3)),
    _volume("natten3d", {"depth": 2, "height": 4, "width": 6}, kernel=(1, 3, 3), order=_int32(list(range(47, -1, -1)))),
    _volume("sasa", {"height": 6, "width": 7}, window=(1, 2), order=torch.randperm(42, generator=_GENERATOR)),
    _tiles((6, 8), (2, 4), (1, 1)),
    _tiles((8, 6), (2, 2), (3, 2)),
    _tiles((4, 4, 6), (2, 2, 3), (1, 2, 2)),
    _tiles((6, 6), (2, 3), (3, 1), text=7),
    _tiles((3, 4, 4), (1, 2, 2), (3, 1, 2), text=3),
]


def _packed_case(
    name: str,
    inner: dict[str, Any],
    lengths: list[int],
    kv_lengths: list[int] | None = None,
    dtype: torch.dtype = torch.int64,
    trailing: int = 0,
    q_start: int | list[int] = 0,
) -> Case:
    """A packed case of sequences of these lengths, with `trailing` tokens of no sequence after the last."""
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    params: dict[str, Any] = {"mask": (name, inner), "offsets": torch.tensor(bounds, dtype=dtype)}
    kv_total = bounds[-1]
    if kv_lengths is not None:
        kv_bounds = [sum(kv_lengths[:i]) for i in range(len(kv_lengths) + 1)]
        params["kv_offsets"] = torch.tensor(kv_bounds, dtype=dtype)
        kv_total = kv_bounds[-1]
    if q_start != 0:
        params["q_start"] = torch.tensor(q_start, dtype=dtype) if isinstance(q_start, list) else q_start
    return Case("packed", params, batch=1, q_len=bounds[-1] + trailing, kv_len=kv_total + trailing)


_PACKED_CASES: list[Case] = [
    _packed_case("causal", {}, [13, 1, 26]),
    _packed_case("causal", {}, [100, 28, 1, 99, 72], dtype=torch.int32),
    # An empty sequence first, in the middle and last.
    _packed_case("causal", {}, [0, 20, 0, 0, 31, 0], dtype=torch.int32),
    _packed_case("causal", {}, [37]),
    _packed_case("causal", {}, [9, 14, 8], [16, 3, 33]),
    _packed_case("causal", {}, [17, 12], trailing=6),
    # Where the queries of each sequence start: ends aligned, and anywhere.
    _packed_case("causal", {}, [9, 1, 8, 0], [16, 30, 33, 4], q_start=[7, 29, 25, 4]),
    _packed_case("causal", {}, [9, 14, 8], [16, 3, 33], dtype=torch.int32, q_start=[0, 20, 5], trailing=3),
    _packed_case("sliding_window", {"window": 5}, [40, 130, 3], [60, 150, 23], q_start=20),
    _packed_case("prefix_lm", {"prefix_len": _int64([15, 0, 9])}, [8, 20, 11], [20, 25, 30], q_start=[12, 5, 0]),
    _packed_case("grouped_tril", {"seq_lens": _int64([10, 0, 31])}, [10, 5, 17], [12, 5, 30], q_start=[2, 0, 14]),
    _packed_case("full", {}, [1, 1, 1, 30, 1]),
    # The second sequence has no keys, the third no queries.
    _packed_case("full", {}, [12, 9, 0, 20], [30, 0, 11, 6], dtype=torch.int32),
    _packed_case("grouped_tril", {"seq_lens": _int64([10, 0, 7, 16])}, [10, 5, 17, 16]),
    _packed_case("grouped_tril", {"seq_lens": _int32([129, 60])}, [150, 150], dtype=torch.int32),
    _packed_case("padding", {"seq_lens": _int32([4, 0, 22])}, [15, 8, 11], [9, 6, 22]),
    _packed_case("sliding_window", {"window": 4}, [21, 3, 0, 30]),
    _packed_case("sliding_window", {"window": _int64(40)}, [128, 129, 43], dtype=torch.int32),
    _packed_case("sliding_window", {"window": 0}, [5, 20, 12], [5, 10, 31]),
    _packed_case("local", {"left": 3, "right": 6}, [25, 1, 16]),
    _packed_case("prefix_lm", {"prefix_len": _int64([5, 0, 40, 9])}, [18, 20, 11, 9]),
    _packed_case("prefix_lm", {"prefix_len": 6}, [24, 4, 13], [15, 20, 30], dtype=torch.int32),
    _packed_case("document", {"document_ids": _random_ints(0, 3, 3, 28)}, [28, 5, 19]),
    _packed_case("natten", {"height": 4, "width": 5, "kernel": (3, 2), "causal": (False, True)}, [20, 20, 20]),
]


def _paged_case(
    name: str,
    inner: dict[str, Any],
    page_size: int,
    page_table: list[list[int]],
    kv_lens: list[int],
    q_len: int = 40,
    n_pages: int = 8,
    q_offset: int | tuple[int, ...] = 0,
    make: Callable[[Any], Tensor] = _int64,
) -> Case:
    params = {
        "mask": (name, inner), "page_table": make(page_table), "kv_lens": make(kv_lens), "page_size": page_size,
    }  # fmt: skip
    return Case("paged", params, len(kv_lens), 2, q_len, n_pages * page_size, q_offset)


_PAGED_CASES: list[Case] = [
    _paged_case("causal", {}, 5, [[6, 2, 1, 3], [0, 7, 5, 4]], [20, 17], q_len=20),
    # Past the last page in use the table holds anything.
    _paged_case("causal", {}, 8, [[3, -1, 99], [5, 0, 2], [-7, -7, -7]], [3, 24, 0], q_offset=(2, 9, 0), make=_int32),
    # The first two pages are shared, one sequence ends in the second of them.
    _paged_case("full", {}, 16, [[4, 1, 6], [4, 1, 0], [4, 1, 1]], [41, 48, 20], q_len=7),
    _paged_case("sliding_window", {"window": 9}, 16, [[7, 3, 0, 4]], [60], q_len=30, q_offset=30),
    _paged_case("sliding_window", {"window": _int64(40)}, 1, [[9, 4, 0, 1], [2, 3, 5, 8]], [4, 3], n_pages=10),
    _paged_case("padding", {"seq_lens": _int32([3, 30])}, 12, [[1, 0, 5], [2, 4, 3]], [36, 25], make=_int32),
    _paged_case("prefix_lm", {"prefix_len": _int64([5, 20])}, 7, [[1, 0, 5], [2, 4, 3]], [21, 9], q_len=21),
    _paged_case("document", {"document_ids": _random_ints(0, 2, 2, 48)}, 16, [[1, 0, 5], [2, 4, 3]], [44, 48]),
    _paged_case("causal", {}, 130, [[2, 0], [1, 3]], [250, 131], q_len=3, n_pages=4, q_offset=(247, 128)),
    _paged_case("local", {"left": 30, "right": 2}, 64, [[5, 1, 0]], [150], q_len=140, n_pages=6, q_offset=4),
]

MASK_CASES: list[Case] = [
    *_PLAIN_CASES,
    *_LENGTH_CASES,
    *_WINDOW_CASES,
    *_DOCUMENT_CASES,
    *_CANVAS_CASES,
    *_VISION_CASES,
    *_PACKED_CASES,
    *_PAGED_CASES,
    *_BAND_CASES,
    *_SPARSE_CASES,
    *_SPAN_CASES,
    *_TREE_CASES,
    *_TABLE_CASES,
    *_VOLUME_CASES,
]

SCORE_CASES: list[Case] = [
    Case("alibi", {}, heads=2, q_len=23, kv_len=23),
    Case("alibi", {}, heads=3, q_len=13, kv_len=30, q_offset=17),
    Case("alibi", {}, heads=8, q_len=17, kv_len=11),
    Case("alibi", {}, heads=12, q_len=9, kv_len=18, q_offset=(9, 2)),
    Case("alibi", {"slopes": _random_floats(2).abs()}, heads=2, q_len=33, kv_len=20),
    Case("alibi", {"slopes": _random_floats(3)}, heads=3, q_len=12, kv_len=29, q_offset=(0, 17)),
    Case("alibi", {"slopes": _random_floats(8)}, heads=8, q_len=11, kv_len=11, q_offset=5),
    Case("alibi", {"slopes": _random_floats(12)}, heads=12, q_len=10, kv_len=13),
    Case("softcap", {"cap": 20.0}),
    Case("softcap", {"cap": 0.5}, heads=3, q_len=17, kv_len=51),
    Case("softcap", {"cap": 2.5}, q_len=37, kv_len=21, q_offset=(3, 9)),
    Case("relative_bias", {"table": _random_floats(2, 9)}, q_len=29, kv_len=29),
    Case("relative_bias", {"table": _random_floats(3, 101)}, heads=3, q_len=15, kv_len=26),
    Case("relative_bias", {"table": _random_floats(2, 33)}, q_len=14, kv_len=37, q_offset=23),
    Case("relative_bias", {"table": _random_floats(4, 15)}, heads=4, q_len=12, kv_len=19, q_offset=(0, 7)),
    Case("relative_bias", {"table": _random_floats(2, 1)}, q_len=21, kv_len=10),
    Case("checkerboard", {}, q_len=31, kv_len=31),
    Case("checkerboard", {}, heads=3, q_len=18, kv_len=27, q_offset=9),
    Case("checkerboard", {}, q_len=25, kv_len=14, q_offset=(1, 4)),
    Case("alibi", {"bidirectional": True}, heads=3, q_len=13, kv_len=30, q_offset=(0, 17)),
    Case("t5_bias", {"table": _random_floats(32, 2)}, q_len=40, kv_len=40),
    Case(
        "t5_bias",
        {"table": _random_floats(16, 3), "max_distance": 30, "bidirectional": False},
        heads=3,
        q_len=33,
        kv_len=45,
    ),
    Case("t5_bias", {"table": _random_floats(8, 2), "max_distance": 20}, q_len=14, kv_len=60, q_offset=(46, 9)),
    Case("t5_bias", {"table": _random_floats(32, 1)}, batch=1, heads=1, q_len=3, kv_len=300, q_offset=297),
    Case(
        "distance_bias", {"table": _random_floats(2, 5), "distances": _random_ints(0, 5, 21, 30)}, q_len=21, kv_len=30
    ),
    Case(
        "distance_bias",
        {"table": _random_floats(3, 9), "distances": _random_ints(0, 9, 2, 40, 17)},
        heads=3,
        q_len=19,
        kv_len=17,
        q_offset=(21, 4),
    ),
    Case(
        "distance_bias",
        {"table": _random_floats(2, 2), "distances": _random_ints(0, 2, 2, 9, 9)},
        q_len=9,
        kv_len=9,
    ),
    Case("sandwich", {}, q_len=23, kv_len=23),
    Case("sandwich", {"dims": 6}, heads=3, q_len=13, kv_len=30, q_offset=(17, 2)),
    Case("sandwich", {"dims": 64}, heads=8, q_len=12, kv_len=9),
    Case("sandwich", {"ratios": _random_floats(2), "positions": 50}, q_len=12, kv_len=19),
    Case("temperature", {"temperatures": _random_floats(2).abs() + 0.5}, q_len=23, kv_len=31),
    Case("temperature", {"temperatures": _random_floats(3) - 3.0}, heads=3, q_len=12, kv_len=29, q_offset=17),
    Case("temperature", {"temperatures": _random_floats(8).exp()}, heads=8, q_len=11, kv_len=11),
]


# ---------------------------------------------------------------------------------------------------------------------
# What the tests call
# ---------------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The value with every tensor in it turned into nested lists, 0-dim tensors into numbers."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(inner) for inner in value)
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


def offsets(case: Case) -> list[int]:
    """The q_offset of each batch element."""
    if isinstance(case.q_offset, tuple):
        assert len(case.q_offset) == case.batch
        return list(case.q_offset)
    return [case.q_offset] * case.batch


@functools.cache  # by identity; nobody changes it
def dense(case: Case) -> torch.BoolTensor:
    """The mask of a case as [B, H, Q, K], asked place by place."""
    oracle, params, starts = MASKS[case.name], plain(case.params), offsets(case)
    rows = [
        [
            [
                [oracle(b, h, starts[b] + row, kv, case, **params) for kv in range(case.kv_len)]
                for row in range(case.q_len)
            ]
            for h in range(case.heads)
        ]
        for b in range(case.batch)
    ]
    mask = torch.tensor(rows, dtype=torch.bool)
    assert mask.shape == (case.batch, case.heads, case.q_len, case.kv_len)
    return mask  # type: ignore[return-value]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scores_fn: Callable[[Tensor], Tensor] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The naive formula in the inputs' dtype: (out [B, H, Q, Dv], natural-log lse [B, H, Q]).

    Query head h uses key head h // (H // Hkv). A row that sees nothing gives exactly 0, and lse -inf.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    assert heads % kv_heads == 0
    assert v.shape[1] == kv_heads
    owner = [h // (heads // kv_heads) for h in range(heads)]
    k, v = k[:, owner], v[:, owner]
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if scores_fn is not None:
        scores = scores_fn(scores)
    visible = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
    some = visible.any(dim=-1)
    # Hidden scores are replaced before exp, and its result again after: no inf or NaN can then reach the backward.
    peak = scores.detach().masked_fill(~visible, -math.inf).amax(dim=-1, keepdim=True)
    peak = torch.where(some[..., None], peak, torch.zeros_like(peak))
    shifted = torch.where(visible, scores - peak, torch.zeros_like(scores))
    weights = torch.where(visible, shifted.exp(), torch.zeros_like(scores))
    total = weights.sum(dim=-1)
    total = torch.where(some, total, torch.ones_like(total))
    out = (weights / total[..., None]) @ v
    lse = torch.where(some, peak[..., 0] + total.log(), torch.full_like(total, -math.inf))
    return out, lse
