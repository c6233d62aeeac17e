"""Functions that make masks. Written by `python tests/test_readme.py` from the definitions."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from flexmasks.masks.packed import packed as packed
from flexmasks.masks.paged import paged as paged
from flexmasks.spec.values import Mask

__all__ = [
    "anchored",
    "band",
    "bidirectional_spans",
    "bigbird",
    "block_causal",
    "block_diffusion",
    "block_sparse",
    "block_topk",
    "block_window",
    "bsr",
    "causal",
    "causal_blockwise",
    "chunked",
    "chunked_causal",
    "cross_document",
    "dense",
    "dilated_window",
    "document",
    "eagle3",
    "edges",
    "fixed",
    "flashmask",
    "full",
    "global_tokens",
    "grouped_tril",
    "groups",
    "intervals",
    "inverse_causal",
    "key_eviction",
    "key_padding",
    "local",
    "longformer",
    "multi_item",
    "natten",
    "natten1d",
    "natten3d",
    "packed",
    "padding",
    "paged",
    "prefix_lm",
    "private_spans",
    "sasa",
    "shared_prefix",
    "sink_window",
    "slices",
    "sliding_tile",
    "sliding_window",
    "strided",
    "summaries",
    "temporal_window",
    "topk",
    "tree",
    "vertical_slash",
    "vision_cross",
]

def anchored(
    *,
    anchors: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
    block: int,
    context: int,
) -> Mask:
    """Drafted blocks: each sees itself and the context before its anchor.

    anchors: the number of tokens of the context that each block sees, for all batch elements or for each; negative for
        a block that is left out, whose queries see nothing.
    block: number of tokens in a block.
    context: number of keys before those of the drafted tokens.
    """

def band(
    *,
    lower: int | Tensor,
    upper: int | Tensor,
) -> Mask:
    """Each query sees the keys at distances lower <= kv - q <= upper.

    lower, upper: signed distances; a negative one is a key before the query. `local(left, right)` is
        `band(-left, right)`. Nothing is visible if lower > upper.
    """

def bidirectional_spans(
    *,
    span_ids: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
) -> Mask:
    """Causal text with spans that see all of themselves.

    span_ids: the span of each position, for all batch elements or for each; negative for causal text.
    """

def bigbird(
    *,
    length: int,
    block: int,
    window: int = 1,
    global_blocks: int = 1,
    random_blocks: int = 3,
    seed: int = 0,
    both_ends: bool = True,
) -> Mask:
    """Neighboring, global and random blocks of keys for each block of queries.

    length: number of positions, of queries and of keys.
    block: number of positions in a block; the last block of the sequence may be shorter.
    window: number of neighboring blocks that a block sees on each side, in addition to itself.
    global_blocks: number of blocks at each end that see everything and are seen by everything.
    random_blocks: number of further blocks that each block sees, drawn without repetition; all further blocks if there
        are fewer.
    seed: seed of the draw. The draw depends on the seed, the number of blocks and the numbers above, not on the device.
    both_ends: False for global blocks at the front only.
    """

def block_causal(
    *,
    block: int | None = None,
    ids: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | None = None,
    strict: bool = False,
) -> Mask:
    """Keys up to the end of the query's block: causal between blocks, full inside.

    block: number of positions in a block: the tokens of a video frame, for example.
    ids: in place of `block` the number of each position's block, for all batch elements or for each; a query sees the
        keys with ids[kv] <= ids[q]. Blocks may have any lengths, and positions any order, as the order in which a
        permuted model predicts them.
    strict: True to hide the query's own block, too. Queries of the first block then see nothing.
    """

def block_diffusion(
    *,
    length: int,
    block: int | None = None,
    block_ids: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | None = None,
    clean_first: bool = False,
) -> Mask:
    """Training of block diffusion: noised tokens beside the same tokens clean.

    length: number of tokens; positions 0 to length - 1 are noised, the next `length` positions are clean.
    block: number of tokens in a block.
    block_ids: in place of `block` the number of each token's block, for all batch elements or for each; a block is
        earlier if its number is smaller.
    clean_first: True if the clean tokens come first.
    """

def block_sparse(
    *,
    visible_blocks: Tensor | NDArray[Any] | Sequence[Sequence[bool]] | Sequence[Sequence[Sequence[Sequence[bool]]]],
    block: int | tuple[int, int],
) -> Mask:
    """A boolean table of blocks, True where the whole block is visible.

    visible_blocks: [rows, columns] of blocks for all, or [batch or 1, query heads or 1, rows, columns].
    block: number of positions in a block, an int or (queries, keys); blocks at the end may be cut.
    """

def block_topk(
    *,
    indices: Tensor | NDArray[Any] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[Sequence[int]]]],
    block: int | tuple[int, int],
) -> Mask:
    """Blocks of keys that were chosen for each block of queries.

    indices: [rows, k] for all, or [batch or 1, query heads or 1, rows, k], the chosen blocks of keys, in any order;
        -1 for none. A router's top-k chooses them, for example.
    block: number of positions in a block, an int or (queries, keys); (1, 64) chooses for each query by itself.
    """

def block_window(
    *,
    chunk: int,
    left: int,
    right: int,
) -> Mask:
    """Each query sees its chunk, `left` chunks before it and `right` after it.

    chunk: number of positions in a chunk; the last chunk may be shorter.
    left, right: numbers of chunks.
    """

def bsr(
    *,
    crow_indices: Tensor | NDArray[Any] | Sequence[int],
    col_indices: Tensor | NDArray[Any] | Sequence[int],
    block: int | tuple[int, int],
) -> Mask:
    """Visible blocks in the block compressed sparse row format.

    crow_indices: [rows + 1], the place in `col_indices` where the columns of each row of blocks start, and the end.
    col_indices: the columns of the visible blocks, row after row.
    block: number of positions in a block, an int or (queries, keys); blocks at the end may be cut.
    """

def causal() -> Mask:
    """Each query sees itself and the keys before it."""

def causal_blockwise(
    *,
    block_ids: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
) -> Mask:
    """Separate causal blocks, and a last block that sees everything before it.

    block_ids: the block of each position, for all batch elements or for each; negative for the last block, the test
        example behind the demonstrations of in-context learning.
    """

def chunked(
    *,
    chunk: int,
    start: int | Tensor | NDArray[Any] | Sequence[int] = 0,
) -> Mask:
    """Each query sees its own chunk: (q - start) // chunk == (kv - start) // chunk.

    chunk: number of positions in a chunk; the last chunk may be shorter.
    start: the position where the first chunk starts, for all batch elements or for each: the number of padding tokens
        on the left, for example. Positions before it are in chunks of their own, which `key_padding` can hide.
    """

def chunked_causal(
    *,
    chunk: int,
    start: int | Tensor | NDArray[Any] | Sequence[int] = 0,
) -> Mask:
    """Each query sees itself and the keys before it in its own chunk.

    chunk, start: as in the mask `chunked`.
    """

def cross_document(
    *,
    q_document_ids: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
    kv_document_ids: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
) -> Mask:
    """Each query sees its own document, with queries and keys packed differently.

    q_document_ids: the document of each query position, for all batch elements or for each; with `q_offset` also of
        the positions before the first query.
    kv_document_ids: the document of each key. A document may have only queries or only keys.
    """

def dense(
    *,
    visible: Tensor | NDArray[Any] | Sequence[Sequence[bool]] | Sequence[Sequence[Sequence[Sequence[bool]]]],
) -> Mask:
    """A boolean tensor, True where the key is visible.

    visible: [queries, keys] for all, or [batch or 1, query heads or 1, queries, keys]. It has a row for each query of
        the call, or for each position from 0 on, or one for all. A tensor of booleans that is passed as the mask is
        this one, also as [query heads, queries, keys]. The kernel reads the tensor itself, one byte for each pair, and
        skips blocks without a visible pair.
    """

def dilated_window(
    *,
    window: int | Tensor,
    dilation: int,
) -> Mask:
    """Each query sees every `dilation`-th key on both sides, up to `window` away.

    window: the greatest distance, included: window // dilation keys on each side. Combine with `causal` for one side.
    dilation: distance between neighboring visible keys; 1 leaves no gaps.
    """

def document(
    *,
    document_ids: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
    contiguous: bool = False,
    max_documents: int | None = None,
) -> Mask:
    """Each query sees the keys of its own document.

    document_ids: the document of each position, for all batch elements or for each; any integers in any order.
    contiguous: a promise that the tokens of each document lie next to each other in a row. FlashAttention 4 then takes
        the documents as sequences without a look of the host at their ids, also inside torch.compile and in a CUDA
        graph. The promise is checked on a CPU, and on a GPU once for calls that are alike but for values. A broken one
        gives wrong results.
    max_documents: with `contiguous`, the most documents in a row, by default one for each 64 tokens, and 16 in short
        rows. The kernel's time grows with it: by the default it takes up to 1.2 times as long as after a look (H200).
        If all rows together have more, FlashAttention's output and gradients are NaN.
    """

def eagle3(
    *,
    length: int,
) -> Mask:
    """Training of a draft model over several steps, as in EAGLE-3.

    length: number of positions in a step. The keys of step 0 come first, then `length` keys for each later step.
    """

def edges(
    *,
    crow: Tensor | NDArray[Any] | Sequence[int],
    col: Tensor | NDArray[Any] | Sequence[int],
) -> Mask:
    """The edges of a graph: each query sees the keys that its row lists.

    crow: [rows + 1], the place in `col` where the keys of each query position start, and the number of edges, as in
        the format CSR; with `q_offset` also of the positions before the first query.
    col: the keys of all queries, row after row, in any order; a key may be listed twice.
    """

def fixed(
    *,
    stride: int,
    summary: int,
) -> Mask:
    """Each query sees its block so far, and the ends of earlier blocks.

    stride: number of positions in a block.
    summary: number of keys at the end of each block that all later queries see; the whole block from `stride` on.
    """

def flashmask(
    *,
    startend_row_indices: Tensor | NDArray[Any] | Sequence[Sequence[Sequence[Sequence[int]]]],
    causal: bool,
) -> Mask:
    """FlashMask's intervals: up to two hidden runs of queries for each key.

    startend_row_indices: [batch or 1, query heads or 1, keys, n], the ends of the hidden runs of queries; a run starts
        at its start and ends before its end. With causal=True n is 1, (start), or 2, (start, end), of the run below the
        diagonal. With causal=False n is 2, (start of the run below, end of the run above), or 4, (start, end of the run
        below, start, end of the run above). A run without an end reaches the last query, a run without a start begins
        at the first query.
    causal: True to hide the keys after each query too.
    """

def full() -> Mask:
    """Every query sees every key."""

def global_tokens(
    *,
    tokens: int | Tensor | NDArray[Any] | Sequence[bool] | Sequence[Sequence[bool]],
) -> Mask:
    """Global tokens see every key and are seen by every query; all else is hidden.

    tokens: the number of global tokens at the start, or a boolean for each position, for all batch elements or for
        each.
    """

def grouped_tril(
    *,
    seq_lens: Tensor | NDArray[Any] | Sequence[int],
) -> Mask:
    """Causal attention within the first `seq_lens[b]` tokens of each batch element.

    seq_lens: number of real tokens of each batch element. Later rows give output 0.
    """

def groups(
    *,
    q_group: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
    kv_group: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
) -> Mask:
    """Each query sees the keys of its own group, and groups may differ between heads.

    q_group: the group of each query position, [positions], [batch, positions], or [batch or 1, query heads, positions];
        negative for a query that sees nothing. With `q_offset` also of the positions before the first query.
    kv_group: the group of each key in the same form; negative for a key that no query sees.
    """

def intervals(
    *,
    starts: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
    ends: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
    other_starts: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | None = None,
    other_ends: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Mask:
    """One interval of keys for each query, or two: starts[q] <= kv < ends[q].

    starts, ends: the first key that each query position sees, and the first one behind these, for all batch elements
        or for each; with `q_offset` also of the positions before the first query. Nothing is visible where a start is
        not below its end; bounds may lie outside of the keys.
    other_starts, other_ends: the same for a second interval, whose keys are visible, too.
    """

def inverse_causal() -> Mask:
    """Each query sees itself and the keys after it."""

def key_eviction(
    *,
    evicted: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
) -> Mask:
    """Causal attention whose keys are dropped: queries j to evicted[j] - 1 see key j.

    evicted: the first query position that no longer sees each key, for all, for each batch element, or for each
        batch element and query head. A key with evicted[j] <= j is never seen.
    """

def key_padding(
    *,
    attention_mask: Tensor | NDArray[Any] | Sequence[Sequence[int]],
) -> Mask:
    """Every query sees the keys that a [B, KV] mask marks by 1.

    attention_mask: 1 or True for real keys, 0 or False for padding on any side, as tokenizers give it. Combined with
        `causal`, queries that are padding on the left see nothing and give output 0.
    """

def local(
    *,
    left: int | Tensor,
    right: int | Tensor,
) -> Mask:
    """Each query sees itself, `left` keys before it and `right` keys after it.

    left, right: numbers of keys on each side; FlashAttention's window_size=(left, right).
    """

def longformer(
    *,
    window: int | Tensor,
    tokens: int | Tensor | NDArray[Any] | Sequence[bool] | Sequence[Sequence[bool]],
) -> Mask:
    """A window on both sides of each query, and global tokens.

    window: number of keys on each side.
    tokens: the global tokens, as in the mask `global_tokens`; they see everything and are seen by everything.
    """

def multi_item(
    *,
    prefix_len: int | Tensor | NDArray[Any] | Sequence[int],
    item_positions: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
) -> Mask:
    """Many items in one pass: each sees a common prefix and itself, causally.

    prefix_len: length of the prefix, which is causal itself, one for all or one for each batch element.
    item_positions: the distance of each position from the delimiter before its item, 0 for the delimiter. Delimiters
        see only the prefix, not themselves, and no token behind the prefix sees them. Values inside the prefix are not
        used.
    """

def natten(
    *,
    height: int,
    width: int,
    kernel: int | tuple[int, int],
    dilation: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
    causal: bool | tuple[bool, bool] = False,
    order: Tensor | NDArray[Any] | Sequence[int] | None = None,
) -> Mask:
    """Neighborhood attention on an image: each pixel sees `kernel` pixels per axis.

    height, width: the canvas; token t is in row t // width and column t % width, and there are height * width keys.
    kernel: number of pixels seen per axis, an int or (rows, columns), also at an edge, where the window shifts inward;
        an even kernel has one more pixel before the query than after it.
    dilation: distance between neighboring pixels of the window, an int or (rows, columns); kernel * dilation must fit.
    stride: number of neighboring queries that share a window, an int or (rows, columns), at most the kernel. They
        share the window of their middle query (of two, the right one), or on a causal axis of their last query. With
        dilation, queries share a window only inside their dilation group.
    causal: a bool or (rows, columns). On a causal axis the window ends at the query, and an edge cuts it.
    order: the pixel of each token if tokens are not in row-major order, as flexmasks.orders gives it. With tokens in
        tiles a window mostly touches fewer blocks: flexmasks.orders.in_tiles takes q, k and v into tiles and the output
        back.
    """

def natten1d(
    *,
    length: int,
    kernel: int,
    dilation: int = 1,
    stride: int = 1,
    causal: bool = False,
) -> Mask:
    """Neighborhood attention on a sequence: each token sees exactly `kernel` tokens.

    length: number of tokens.
    kernel, dilation, stride, causal: as in the mask `natten`, for one axis.
    """

def natten3d(
    *,
    depth: int,
    height: int,
    width: int,
    kernel: int | tuple[int, int, int],
    dilation: int | tuple[int, int, int] = 1,
    stride: int | tuple[int, int, int] = 1,
    causal: bool | tuple[bool, bool, bool] = False,
    order: Tensor | NDArray[Any] | Sequence[int] | None = None,
) -> Mask:
    """Neighborhood attention on a video: each voxel sees `kernel` voxels per axis.

    depth, height, width: the canvas; token t is voxel (t // (height * width), t // width % height, t % width).
    kernel, dilation, stride, causal, order: as in the mask `natten`, one for all axes or (depth, rows, columns):
        causal=(True, False, False) is causal in time.
    """

def padding(
    *,
    kv_lens: Tensor | NDArray[Any] | Sequence[int],
) -> Mask:
    """Every query sees the first `kv_lens[b]` keys; the keys after them are padding.

    kv_lens: number of real keys of each batch element. Queries are not masked: a padded query gives some output.
    """

def prefix_lm(
    *,
    prefix_len: int | Tensor | NDArray[Any] | Sequence[int],
) -> Mask:
    """Every query sees the prefix, keys 0 to prefix_len - 1; later keys causally.

    prefix_len: length of the prefix, one for all or one for each batch element. If it is longer than the keys,
        everything is visible. Inside documents: `packed(prefix_lm(prefix_len=[one per document]), offsets)`.
    """

def private_spans(
    *,
    span_ids: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
) -> Mask:
    """Spans that only their own tokens see; all else is visible.

    span_ids: the span of each position, for all batch elements or for each; negative for positions that all see.
    """

def sasa(
    *,
    height: int,
    width: int,
    window: int | tuple[int, int],
    order: Tensor | NDArray[Any] | Sequence[int] | None = None,
) -> Mask:
    """A window of rows and columns around each pixel, cut at the edges.

    height, width: the canvas; token t is in row t // width and column t % width, and there are height * width keys.
    window: the greatest distance, one for both axes or (rows, columns); away from the edges 2 * window + 1 pixels per
        axis are visible.
    order: the pixel of each token if tokens are not in row-major order, as flexmasks.orders gives it; see the mask
        `natten`.
    """

def shared_prefix(
    *,
    document_ids: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
    prefix_of: Tensor | NDArray[Any] | Sequence[int],
) -> Mask:
    """Several answers after one question: each sees it and itself alone, causally.

    document_ids: the document, a question or an answer, of each position, for all batch elements or for each.
    prefix_of: for each document the other document that its tokens see, such as the question of an answer; -1 or the
        document itself if there is none. There may be any number of questions, each before its answers.
    """

def sink_window(
    *,
    sinks: int | Tensor,
    window: int | Tensor,
) -> Mask:
    """A causal sliding window, and the first keys as attention sinks.

    sinks: number of first keys that all later queries see.
    window: number of visible keys before the query, in addition to its own key, as in the mask `sliding_window`.
    """

def slices(
    *,
    q_ranges: Tensor | NDArray[Any] | Sequence[Sequence[int]],
    kv_ranges: Tensor | NDArray[Any] | Sequence[Sequence[int]],
    types: Tensor | NDArray[Any] | Sequence[int] | None = None,
) -> Mask:
    """Rectangles of queries and keys, each full or cut along diagonals.

    q_ranges, kv_ranges: the start and the end of the queries and of the keys of each slice; the end itself is outside.
        Slices may share queries, keys and pairs; a pair is visible if at least one slice shows it.
    types: the shape of each slice, by default full.
        0, full: all pairs.
        1, causal: its last query sees its last key, and each query before it one key less:
            kv_end - kv >= q_end - q.
        2, inverse causal: its first query sees its first key, and each query after it one key less:
            kv - kv_start >= q - q_start.
        3, bi-causal: causal and inverse causal, a band.
    """

def sliding_tile(
    *,
    canvas: tuple[int, int] | tuple[int, int, int],
    tile: tuple[int, int] | tuple[int, int, int],
    window: tuple[int, int] | tuple[int, int, int],
    text: int = 0,
) -> Mask:
    """Each tile of an image or a video sees a window of tiles.

    canvas: (height, width) or (depth, height, width). The tokens are in tiles, one tile after the other, as
        flexmasks.orders.tile_order(canvas, tile) puts them.
    tile: the sides of a tile, which divide the canvas. A tile with as many tokens as a block leaves no partial block.
    window: the sides of the window in tiles, which shifts inward at an edge; an even side has one more tile before the
        query's tile than after it.
    text: number of tokens of text after the canvas; they see everything and are seen by everything.
    """

def sliding_window(
    *,
    window: int | Tensor,
) -> Mask:
    """Each query sees itself and the `window` keys before it.

    window: number of earlier keys, so that window + 1 keys are visible in all; Hugging Face's sliding_window=W is
        window=W-1. A tensor may change without a new compilation.
    """

def strided(
    *,
    stride: int,
) -> Mask:
    """Each query sees `stride` keys before it, and every `stride`-th key further back.

    stride: the reach of the near keys, and the distance between the far keys. The query's own key is visible, too.
    """

def summaries(
    *,
    segment_ids: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
    is_summary: Tensor | NDArray[Any] | Sequence[bool] | Sequence[Sequence[bool]],
) -> Mask:
    """Causal segments, of which later ones see the summary tokens only.

    segment_ids: the segment of each position, for all batch elements or for each.
    is_summary: True for the tokens that later segments see, as gist tokens at the end of a segment.
    """

def temporal_window(
    *,
    frame: int,
    window: int,
    tokens: int = 0,
) -> Mask:
    """Each token of a video sees its neighborhood in every frame.

    frame: number of tokens in a frame; frames follow each other from position `tokens` on.
    window: the greatest distance between two places in their frames, included.
    tokens: number of tokens of text before the video, which see everything and are seen by everything.
    """

def topk(
    *,
    indices: Tensor | NDArray[Any] | Sequence[Sequence[Sequence[int]]] | Sequence[Sequence[Sequence[Sequence[int]]]],
    granularity: int = 1,
) -> Mask:
    """Keys, or short runs of keys, that were chosen for each query.

    indices: [rows, G, k] or [batch or 1, rows, G, k], the chosen entries of each row, in any order; -1 for none. G is
        1, the number of key heads, or that of query heads. There is a row for each query of the call, or for each
        position from 0 on, or one for all. A query whose entries are all -1 sees nothing, and entries that stand twice
        count once. [batch * queries, G, k] are the rows of each batch element after those of the one before: for them
        `block_mask` and `dense_mask` need `batch=`, and torch's pipelines, which split batches, [batch, queries, G, k].
    granularity: number of tokens in an entry: entry i is the keys i * granularity to (i + 1) * granularity - 1, of
        which the last entry may have fewer.
    """

def tree(
    *,
    parents: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
    start: int | Tensor | NDArray[Any] | Sequence[int] = 0,
) -> Mask:
    """A tree of tokens: each sees a causal context, its ancestors and itself.

    parents: the parent of each token, as its number in the tree, smaller than the token's own; -1 for a root. There may
        be several roots. One tree for all batch elements or one for each.
    start: position of the tree's first token, which is the length of the context, one for all or one for each batch
        element. Tokens behind the tree see nothing and are not seen.
    """

def vertical_slash(
    *,
    vertical: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
    slash: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
) -> Mask:
    """Causal attention to chosen keys, and to keys at chosen distances.

    vertical: the keys that all later queries see, for all, for each query head, or for each batch element and head;
        -1 for none.
    slash: the distances q - kv at which every query sees a key, in the same form; 0 is the query's own key.
    """

def vision_cross(
    *,
    intervals: Tensor | NDArray[Any] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
    image_ids: Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]],
) -> Mask:
    """Text sees the images whose interval it is in: image i if start_i <= q < end_i.

    intervals: (start, end) of each of the N images in text positions, for all batch elements or for each.
    image_ids: the image of each key, for all batch elements or for each; -1 for a padding key, which no query sees.
    """
