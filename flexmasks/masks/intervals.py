from typing import Annotated, Any

from torch import Tensor

from flexmasks.spec import Size, at, check_covers_queries, register_mask

Bounds = Annotated[Tensor, "int[N] | int[B, N]"]


def _prepare(
    size: Size | None,
    *,
    starts: Bounds,
    ends: Bounds,
    other_starts: Annotated[Tensor | None, "int[N] | int[B, N]"] = None,
    other_ends: Annotated[Tensor | None, "int[N] | int[B, N]"] = None,
) -> dict[str, Any]:
    if (other_starts is None) != (other_ends is None):
        missing, given = ("starts", "ends") if other_starts is None else ("ends", "starts")
        raise ValueError(f"a second interval has both bounds: pass `other_{missing}` beside `other_{given}`.")
    check_covers_queries("starts", starts.shape[-1], size, "an interval")
    return {"starts": starts, "ends": ends, "other_starts": other_starts, "other_ends": other_ends}


@register_mask(
    prepare=_prepare,
    example=lambda length: {
        "starts": [max(0, i - length // 8) for i in range(length)],
        "ends": [i // 32 * 32 + 32 for i in range(length)],
        "other_starts": [0] * length,
        "other_ends": [length // 16] * length,
    },
)
def intervals(
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    starts: Tensor,
    ends: Tensor,
    other_starts: Tensor | None,
    other_ends: Tensor | None,
) -> Tensor:
    """One interval of keys for each query, or two: starts[q] <= kv < ends[q].

    starts, ends: the first key that each query position sees, and the first one behind these, for all batch elements
        or for each; with `q_offset` also of the positions before the first query. Nothing is visible where a start is
        not below its end; bounds may lie outside of the keys.
    other_starts, other_ends: the same for a second interval, whose keys are visible, too.

    Source: Wang et al., FlashMask, 2024, which has intervals of queries for each key.
    Peers: cuDNN's flex_attention masks [0, F0) and [F1, F2) of each row; `flashmask` for those of keys.
    """
    shown = (at(starts, b, q) <= kv) & (kv < at(ends, b, q))
    if other_starts is None or other_ends is None:
        return shown
    return shown | ((at(other_starts, b, q) <= kv) & (kv < at(other_ends, b, q)))
