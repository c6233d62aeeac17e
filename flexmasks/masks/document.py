from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import (
    Band,
    Size,
    at,
    at_head,
    changes_in,
    check_covers_queries,
    in_documents,
    lie_end_to_end,
    may_read,
    register_mask,
)

# The documents in a row of which nobody says how many they are: one for each so many tokens, or at least so many.
_SHORT, _FEW = 64, 16


def _prepare_document(
    size: Size | None,
    *,
    document_ids: Annotated[Tensor, "int[S] | int[B, S]"],
    contiguous: Annotated[bool, "bool"] = False,
    max_documents: Annotated[int | None, "length in 1.."] = None,
) -> dict[str, Any]:
    _check_bound(contiguous, max_documents)
    if contiguous and may_read(size, document_ids):
        _check_promise(document_ids, max_documents)
    return {"document_ids": document_ids}


def _check_bound(contiguous: bool, max_documents: int | None) -> None:
    if max_documents is not None and not contiguous:
        raise ValueError(f"`max_documents`, {max_documents}, is for documents end to end: pass contiguous=True, too.")


def _check_promise(ids: Tensor, max_documents: int | None) -> None:
    if not lie_end_to_end(ids):
        raise ValueError(
            "`contiguous` promises that the tokens of a document lie next to each other in each row, but in "
            "`document_ids` other documents stand between them. Leave out `contiguous`."
        )
    if max_documents is not None and (count := 1 + int(changes_in(ids).max())) > max_documents:
        raise ValueError(f"`max_documents` is {max_documents}, but a row has {count} documents.")


def _band(size: Size, document_ids: Tensor, contiguous: bool, max_documents: int | None) -> Band | None:
    _check_bound(contiguous, max_documents)
    most = torch.sym_max(_FEW, -(-document_ids.shape[-1] // _SHORT)) if max_documents is None else max_documents
    return in_documents(size, document_ids, most if contiguous else None)


@register_mask(
    prepare=_prepare_document,
    example=lambda length: {"document_ids": [i * 5 // length for i in range(length)]},
    band=_band,
)
def document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, document_ids: Tensor) -> Tensor:
    """Each query sees the keys of its own document.

    document_ids: the document of each position, for all batch elements or for each; any integers in any order.
    contiguous: a promise that the tokens of each document lie next to each other in a row. FlashAttention 4 then takes
        the documents as sequences without a look of the host at their ids, also inside torch.compile and in a CUDA
        graph. The promise is checked on a CPU, and on a GPU once for calls that are alike but for values. A broken one
        gives wrong results.
    max_documents: with `contiguous`, the most documents in a row, by default one for each 64 tokens, and 16 in short
        rows. The kernel's time grows with it: by the default it takes up to 1.2 times as long as after a look (H200).
        If all rows together have more, FlashAttention's output and gradients are NaN.

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


Groups = Annotated[Tensor, "int[N] | int[B, N] | int[1, H, N] | int[B, H, N]"]


def _prepare_groups(
    size: Size | None,
    *,
    q_group: Groups,
    kv_group: Annotated[Tensor, "int[KV] | int[B, KV] | int[1, H, KV] | int[B, H, KV]"],
) -> dict[str, Any]:
    check_covers_queries("q_group", q_group.shape[-1], size, "a group")
    return {"q_group": q_group, "kv_group": kv_group}


@register_mask(
    prepare=_prepare_groups,
    example=lambda length: {
        "q_group": [i * 7 % 16 // 4 - (i % 16 == 5) for i in range(length)],
        "kv_group": [i % 16 // 4 for i in range(length)],
    },
)
def groups(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, q_group: Tensor, kv_group: Tensor) -> Tensor:
    """Each query sees the keys of its own group, and groups may differ between heads.

    q_group: the group of each query position, [positions], [batch, positions], or [batch or 1, query heads, positions];
        negative for a query that sees nothing. With `q_offset` also of the positions before the first query.
    kv_group: the group of each key in the same form; negative for a key that no query sees.

    Source: Kitaev et al., Reformer, 2020 (buckets); Roy et al., Routing Transformer, 2021 (clusters).
    Peers: `cross_document` for groups that are the same in all heads and never negative; PyTorch Geometric's `batch`
        vector, graph attention inside each graph.
    """
    own = at_head(q_group, b, h, q)
    return (own == at_head(kv_group, b, h, kv)) & (own >= 0)
