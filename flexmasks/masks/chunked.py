from typing import Annotated

from torch import Tensor

from flexmasks.spec import per_batch, register_mask

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


@register_mask(example=lambda length: {"block": length // 8})
def block_causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, block: Length) -> Tensor:
    """Keys up to the end of the query's block: causal between blocks, full inside.

    block: number of positions in a block: the tokens of a video frame, for example.

    Source: Huang et al., Self Forcing, 2025; Arriola et al., Block Diffusion, 2025 (its sampling).
    Peers: torchtitan's `block_causal` is a different mask, causal within documents: `document` and `causal` here.
    """
    return kv // block <= q // block
