from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, at, may_read, per_batch, register_mask


def _spans_prepare(size: Size | None, *, span_ids: Annotated[Tensor, "int[S] | int[B, S]"]) -> dict[str, Any]:
    return {"first": _first_of_span(span_ids)}


@register_mask(
    prepare=_spans_prepare,
    example=lambda length: {"span_ids": [i * 4 // length if i * 8 // length % 2 else -1 for i in range(length)]},
)
def bidirectional_spans(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, first: Tensor) -> Tensor:
    """Causal text with spans that see all of themselves.

    A span is an image inside a text, for example, or a prefix. A query sees the keys up to its own, and all keys of its
    span, also if other tokens lie between.

    span_ids: the span of each position, for all batch elements or for each; negative for causal text.

    Source: Beyer et al., PaliGemma, 2024; Gemma 3, 2025; Chameleon and Transfusion, 2024.
    Peers: Hugging Face causal_mask_function with blockwise_overlay(span_ids) by `or`; vLLM mm_prefix ranges.
    """
    return (kv <= q) | (at(first, b, q) == at(first, b, kv))


@register_mask(
    example=lambda length: {"span_ids": [i * 4 // length if i * 8 // length % 2 else -1 for i in range(length)]}
)
def private_spans(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, span_ids: Annotated[Tensor, "int[S] | int[B, S]"]
) -> Tensor:
    """Spans that only their own tokens see; all else is visible.

    An image that is being denoised inside a text, for example: the text behind it sees its clean copy. Combine it with
    `causal` or `bidirectional_spans`.

    span_ids: the span of each position, for all batch elements or for each; negative for positions that all see.

    Source: Deng et al., BAGEL, 2025 (spans of noise).
    Peers: BAGEL create_sparse_mask with attn_modes "noise" is this, `bidirectional_spans` of the modes "full" and
        "noise", and `document`.
    """
    seen = at(span_ids, b, kv)
    return (seen < 0) | (seen == at(span_ids, b, q))


@register_mask(
    example=lambda length: {
        "segment_ids": [i * 6 // length for i in range(length)],
        "is_summary": [i * 6 // length != (i + length // 32) * 6 // length for i in range(length)],
    }
)
def summaries(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    segment_ids: Annotated[Tensor, "int[S] | int[B, S]"],
    is_summary: Annotated[Tensor, "bool[S] | bool[B, S]"],
) -> Tensor:
    """Causal segments, of which later ones see the summary tokens only.

    segment_ids: the segment of each position, for all batch elements or for each.
    is_summary: True for the tokens that later segments see, as gist tokens at the end of a segment.

    Source: Mu et al., Learning to Compress Prompts with Gist Tokens, 2023; Chevalier et al., AutoCompressors, 2023.
    Peers: gisting make_gist_mask, with the prompt and its gist tokens as one segment and all else as another.
    """
    return (kv <= q) & ((at(segment_ids, b, q) == at(segment_ids, b, kv)) | at(is_summary, b, kv))


def _shared_prefix_prepare(
    size: Size | None,
    *,
    document_ids: Annotated[Tensor, "int[S] in 0.. | int[B, S] in 0.."],
    prefix_of: Annotated[Tensor, "int[N] in -1..N-1"],
) -> dict[str, Any]:
    if document_ids.numel() and may_read(size, document_ids) and int(document_ids.max()) >= len(prefix_of):
        raise ValueError(
            f"`prefix_of` has {len(prefix_of)} documents, `document_ids` goes up to {int(document_ids.max())}."
        )
    of_both = torch.promote_types(document_ids.dtype, prefix_of.dtype)  # holds -1 and every document
    prefix = prefix_of[document_ids.long()].to(of_both)
    return {"document_ids": document_ids.to(of_both), "prefix_ids": prefix}


@register_mask(
    prepare=_shared_prefix_prepare,
    example=lambda length: {
        "document_ids": [i * 8 // length for i in range(length)],
        "prefix_of": [-1, 0, 0, 0, -1, 4, 4, 4],
    },
)
def shared_prefix(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, document_ids: Tensor, prefix_ids: Tensor) -> Tensor:
    """Several answers after one question: each sees it and itself alone, causally.

    document_ids: the document, a question or an answer, of each position, for all batch elements or for each.
    prefix_of: for each document the other document that its tokens see, such as the question of an answer; -1 or the
        document itself if there is none. There may be any number of questions, each before its answers.

    Source: Wang et al., FlashMask, 2024 (Shared Question Mask); Rafailov et al., DPO, 2023 (pairs of answers).
    Peers: attention-gym generate_shared_prefix_mask_mod(offsets, prefix_document_id) shows a prefix also to documents
        that lie before it; its generate_jetspec_training_mask_mod has blocks as documents; FlashMask Shared Question
        Mask.
    """
    own, seen = at(document_ids, b, q), at(document_ids, b, kv)
    return (kv <= q) & ((own == seen) | (at(prefix_ids, b, q) == seen))


def _multi_item_prepare(
    size: Size | None,
    *,
    prefix_len: Annotated[int | Tensor, "int in 0..S | int[B] in 0..S"],
    item_positions: Annotated[Tensor, "int[S] in 0.. | int[B, S] in 0.."],
) -> dict[str, Any]:
    position = torch.arange(item_positions.shape[-1], device=item_positions.device)
    return {"prefix_len": prefix_len, "starts": position - item_positions + 1}


@register_mask(
    prepare=_multi_item_prepare,
    example=lambda length: {
        "prefix_len": length // 4,
        "item_positions": [max(0, i - length // 4) % (length // 8) for i in range(length)],
    },
)
def multi_item(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, prefix_len: int | Tensor, starts: Tensor) -> Tensor:
    """Many items in one pass: each sees a common prefix and itself, causally.

    prefix_len: length of the prefix, which is causal itself, one for all or one for each batch element.
    item_positions: the distance of each position from the delimiter before its item, 0 for the delimiter. Delimiters
        see only the prefix, not themselves, and no token behind the prefix sees them. Values inside the prefix are not
        used.

    Source: FlashInfer, multi-item scoring, 2025; LinkedIn's ranking with large language models.
    Peers: FlashInfer prefix_len_ptr, and token_pos_in_items_ptr, which starts behind the prefix.
    """
    prefix = per_batch(prefix_len, b)
    return (kv <= q) & ((q < prefix) | (kv < prefix) | (kv >= at(starts, b, q)))


@register_mask(
    example=lambda length: {"block_ids": [i * 5 // length if i * 5 < 4 * length else -1 for i in range(length)]}
)
def causal_blockwise(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, block_ids: Annotated[Tensor, "int[S] | int[B, S]"]
) -> Tensor:
    """Separate causal blocks, and a last block that sees everything before it.

    block_ids: the block of each position, for all batch elements or for each; negative for the last block, the test
        example behind the demonstrations of in-context learning.

    Source: Bertsch et al., In-Context Learning with Long-Context Models, 2024; FlashMask, 2024.
    Peers: FlashMask Causal Blockwise Mask.
    """
    own = at(block_ids, b, q)
    return (kv <= q) & ((own < 0) | (own == at(block_ids, b, kv)))


def _first_of_span(span_ids: Tensor) -> Tensor:
    """The first position of the span that each position lies in; outside of spans the position itself. Ids may jump
    between neighboring positions. First positions are close for close positions, which keeps ranges narrow.
    """
    ids = span_ids.reshape(-1, span_ids.shape[-1])
    position = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    if not ids.numel():
        return position.reshape(span_ids.shape).clone()
    ids, order = ids.sort(dim=1, stable=True)
    changes = (position == 0) | (ids != ids.roll(1, 1))
    # A span is a run of sorted ids, and the first token of a run is the first of its span, because the sort is stable.
    start = torch.where(changes, position, 0).cummax(1).values
    first = torch.where(ids < 0, order, order.gather(1, start))
    return torch.empty_like(first).scatter_(1, order, first).reshape(span_ids.shape)
