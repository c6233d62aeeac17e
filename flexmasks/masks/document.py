from typing import Annotated, Any

from torch import Tensor

from flexmasks.spec import Size, at, check_covers_queries, in_documents, register_mask


@register_mask(
    example=lambda length: {"document_ids": [i * 5 // length for i in range(length)]},
    band=lambda size, document_ids: in_documents(size, document_ids),
)
def document(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, document_ids: Annotated[Tensor, "int[S] | int[B, S]"]
) -> Tensor:
    """Each query sees the keys of its own document.

    document_ids: the document of each position, for all batch elements or for each; any integers in any order.

    Combine it with `causal` for packed language modeling: `causal() & document(document_ids=...)`. For documents
    that lie end to end, with another mask inside each, such as a prefix LM, use `packed`, whose values no host has to
    read. For queries and keys that are packed differently, use `cross_document`.

    Source: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.
    Peers: attention-gym generate_doc_mask_mod; Hugging Face packed_sequence_mask_function; xformers BlockDiagonalMask;
        FlashMask Document Mask; torchtitan `block_causal`, torchtune packed_block_causal_mask, attention-gym
        generate_packed_causal_doc_mask_mod and FlashMask Causal Document Mask are this and causal; JAX splash
        segment_ids; windows of Swin and other vision models, by the number of each token's window.
    """
    return at(document_ids, b, q) == at(document_ids, b, kv)


def _prepare(
    size: Size | None,
    *,
    q_document_ids: Annotated[Tensor, "int[N] | int[B, N]"],
    kv_document_ids: Annotated[Tensor, "int[KV] | int[B, KV]"],
) -> dict[str, Any]:
    check_covers_queries("q_document_ids", q_document_ids.shape[-1], size, "a document")
    return {"q_document_ids": q_document_ids, "kv_document_ids": kv_document_ids}


def _example(length: int) -> dict[str, Any]:
    return {
        "q_document_ids": [i * 5 // length for i in range(length)],
        "kv_document_ids": [min(4, i * 8 // length) for i in range(length)],
    }


@register_mask(prepare=_prepare, example=_example)
def cross_document(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, q_document_ids: Tensor, kv_document_ids: Tensor
) -> Tensor:
    """Each query sees its own document, with queries and keys packed differently.

    q_document_ids: the document of each query position, for all batch elements or for each; with `q_offset` also of
        the positions before the first query.
    kv_document_ids: the document of each key. A document may have only queries or only keys.

    Source: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.
    Peers: FlashAttention varlen cu_seqlens_q, cu_seqlens_k and xformers BlockDiagonalMask.from_seqlens(q_seqlen,
        kv_seqlen) for documents laid end to end, which `packed(mask, offsets, kv_offsets)` takes as they are.
    """
    return at(q_document_ids, b, q) == at(kv_document_ids, b, kv)
