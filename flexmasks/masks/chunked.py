from typing import Annotated, Any

from torch import Tensor

from flexmasks.spec import Size, at, check_one_of_two, per_batch, register_mask

Length = Annotated[int, "int in 1.."]
Start = Annotated[int | Tensor, "int | int[B]"]


@register_mask(example=lambda length: {"chunk": length // 8})
def chunked(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, chunk: Length, start: Start = 0) -> Tensor:
    """Each query sees its own chunk: (q - start) // chunk == (kv - start) // chunk.

    chunk: number of positions in a chunk; the last chunk may be shorter.
    start: the position where the first chunk starts, for all batch elements or for each: the number of padding tokens
        on the left, for example. Positions before it are in chunks of their own, which `key_padding` can hide.

    Source: Qiu et al., Blockwise Self-Attention for Long Document Understanding, 2020.
    Peers: Hugging Face chunked_overlay(chunk, left_padding=start).
    """
    first = per_batch(start, b)
    return (q - first) // chunk == (kv - first) // chunk


@register_mask(example=lambda length: {"chunk": length // 8})
def chunked_causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, chunk: Length, start: Start = 0) -> Tensor:
    """Each query sees itself and the keys before it in its own chunk.

    chunk, start: as in the mask `chunked`.

    Source: Llama 4, 2025 (iRoPE: attention_chunk_size).
    Peers: Hugging Face chunked_causal_mask_function(chunk, left_padding=start), create_chunked_causal_mask and the
        layer type "chunked_attention"; torchtitan fixed_block_size; vLLM chunked local attention; JAX splash
        ChunkedCausalMask (start=0).
    """
    return (kv <= q) & chunked(b, h, q, kv, chunk=chunk, start=start)


def _prepare_block_causal(
    size: Size | None,
    *,
    block: Annotated[int | None, "int in 1.."] = None,
    ids: Annotated[Tensor | None, "int[S] | int[B, S]"] = None,
    strict: Annotated[bool, "bool"] = False,
) -> dict[str, Any]:
    check_one_of_two(block=block, ids=ids)
    return {"block": 1 if block is None else block, "ids": ids, "strict": strict}


@register_mask(prepare=_prepare_block_causal, example=lambda length: {"block": length // 8})
def block_causal(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, block: int, ids: Tensor | None, strict: bool
) -> Tensor:
    """Keys up to the end of the query's block: causal between blocks, full inside.

    block: number of positions in a block: the tokens of a video frame, for example.
    ids: in place of `block` the number of each position's block, for all batch elements or for each; a query sees the
        keys with ids[kv] <= ids[q]. Blocks may have any lengths, and positions any order, as the order in which a
        permuted model predicts them.
    strict: True to hide the query's own block, too. Queries of the first block then see nothing.

    Source: Huang et al., Self Forcing, 2025; Arriola et al., Block Diffusion, 2025 (its sampling); Tian et al., Visual
        Autoregressive Modeling, 2024 (ids are scales); Yang et al., XLNet, 2019 (ids are ranks in the permutation, its
        query stream is strict).
    Peers: VAR attn_bias_for_masking; openpi make_attn_mask(input_mask, mask_ar), with ids = mask_ar.cumsum(1); XLNet
        perm_mask; torchtitan's `block_causal` is a different mask, causal within documents: `document` and `causal`
        here.
    """
    if ids is None:
        own, seen = q // block, kv // block
    else:
        own, seen = at(ids, b, q), at(ids, b, kv)
    return seen < own if strict else seen <= own


@register_mask(example=lambda length: {"chunk": length // 16, "left": 2, "right": 1})
def block_window(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    chunk: Length,
    left: Annotated[int, "int in 0.."],
    right: Annotated[int, "int in 0.."],
) -> Tensor:
    """Each query sees its chunk, `left` chunks before it and `right` after it.

    chunk: number of positions in a chunk; the last chunk may be shorter.
    left, right: numbers of chunks.

    Source: Zhang et al., Unified Streaming and Non-streaming Two-pass End-to-end Model (U2), 2020; Shi et al.,
        Emformer, 2021.
    Peers: WeNet subsequent_chunk_mask(size, chunk, num_left_chunks=left) and ESPnet make_chunk_mask(size, chunk,
        left_chunk_size=left), right=0; NeMo att_context_style "chunked_limited" with att_context_size=[left * chunk,
        chunk - 1].
    """
    behind = q // chunk - kv // chunk
    return (behind <= left) & (behind >= -right)
