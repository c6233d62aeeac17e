from typing import Annotated

from torch import Tensor

from flexmasks.spec import per_batch, register_mask


@register_mask(example=lambda length: {"chunk": length // 8})
def chunked(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    chunk: Annotated[int, "int in 1.."],
    start: Annotated[int | Tensor, "int | int[B]"] = 0,
) -> Tensor:
    """Fixed blocks: each query sees all keys of its own chunk, (q - start) // chunk == (kv - start) // chunk.

    chunk: number of positions of a chunk; the last one may be shorter.
    start: where a chunk starts, for all batch elements or for each: the number of padding tokens on the left, say.
        Positions before it are in chunks of their own, so that key_padding must hide them.

    Source: Qiu et al., Blockwise Self-Attention for Long Document Understanding, 2020.
    Peers: Hugging Face chunked_overlay(chunk, left_padding=start).
    """
    first = per_batch(start, b)
    return (q - first) // chunk == (kv - first) // chunk


@register_mask(example=lambda length: {"chunk": length // 8})
def chunked_causal(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    chunk: Annotated[int, "int in 1.."],
    start: Annotated[int | Tensor, "int | int[B]"] = 0,
) -> Tensor:
    """Causal inside chunks: each query sees itself and the keys before it in its own chunk.

    chunk, start: as in the mask `chunked`.

    Source: Llama 4, 2025 (iRoPE: attention_chunk_size).
    Peers: Hugging Face chunked_causal_mask_function(chunk, left_padding=start); torchtitan fixed_block_size; vLLM
        chunked local attention; JAX splash ChunkedCausalMask (start=0).
    """
    return (kv <= q) & chunked(b, h, q, kv, chunk=chunk, start=start)


@register_mask(example=lambda length: {"block": length // 8})
def block_causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, block: Annotated[int, "int in 1.."]) -> Tensor:
    """Causal between blocks, full inside them: each query sees all keys up to the end of its own block.

    block: number of positions of a block: the tokens of a video frame, say.

    Source: Huang et al., Self Forcing, 2025; Arriola et al., Block Diffusion, 2025 (its sampling).
    Peers: torchtitan's `block_causal` is another mask, causal within documents: `document` and `causal` here.
    """
    return kv // block <= q // block
