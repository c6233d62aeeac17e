from typing import Annotated

from torch import Tensor

from flexmasks.registry import register_mask


@register_mask(example=lambda length: {"document_ids": [i * 5 // length for i in range(length)]})
def document(
    b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, document_ids: Annotated[Tensor, "int[S] | int[B, S]"]
) -> Tensor:
    """Each query sees the keys of its own document.

    document_ids: the document of each position, for all batch elements or for each; any integers in any order.
        Combine with causal for packed language modelling: `get_mask("causal") & get_mask("document", ...)`.

    Source: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.
    """
    if document_ids.ndim == 2:
        return document_ids[b, q] == document_ids[b, kv]
    return document_ids[q] == document_ids[kv]
