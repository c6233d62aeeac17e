from typing import Annotated

from torch import Tensor

from flexmasks.dense import Band, in_runs
from flexmasks.params import Size
from flexmasks.registry import register_mask


def _dense(size: Size, *, document_ids: Tensor) -> Band | None:
    return in_runs(document_ids, size)


@register_mask(example=lambda length: {"document_ids": [i * 5 // length for i in range(length)]}, dense=_dense)
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
