from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, at, register_mask


def _prepare(
    size: Size | None,
    *,
    parents: Annotated[Tensor, "int[N] in -1..N-1 | int[B, N] in -1..N-1"],
    start: Annotated[int | Tensor, "int in 0.. | int[B] in 0.."] = 0,
) -> dict[str, Any]:
    trees = parents.tolist() if parents.ndim == 2 else [parents.tolist()]
    starts = start.tolist() if isinstance(start, Tensor) else [start]
    rows = max(len(trees), len(starts))
    length = max(starts) + parents.shape[-1] if size is None else size.positions
    tours = [_tour(trees[n % len(trees)], starts[n % len(starts)], length) for n in range(rows)]
    entry, leave = torch.tensor(tours, device=parents.device).unbind(1)
    if parents.ndim == 1 and not isinstance(start, Tensor):
        entry, leave = entry[0], leave[0]
    return {"entry": entry.contiguous(), "leave": leave.contiguous()}


def _example(length: int) -> dict[str, Any]:
    start = length // 4
    return {"parents": [-1, *((i - 1) // 4 for i in range(1, length - start))], "start": start}


@register_mask(prepare=_prepare, example=_example)
def tree(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, entry: Tensor, leave: Tensor) -> Tensor:
    """A tree of tokens behind a causal context.

    Each token sees the context, its ancestors and itself.

    parents: the parent of each token, as its number in the tree, smaller than the token's own; -1 for a root. There may
        be several roots. One tree for all batch elements or one for each.
    start: position of the tree's first token, which is the length of the context, one for all or one for each batch
        element. Tokens behind the tree see nothing and are not seen.

    To verify the N draft tokens of a tree, pass them as queries with `q_offset=start`. Answers that share beginnings of
    different lengths are a tree, too.

    Source: Miao et al., SpecInfer, 2024; Cai et al., Medusa, 2024; Li et al., EAGLE, 2024.
    Peers: attention-gym build_tree_ancestor_matrix(parents) and generate_jetspec_tree_causal_mask_mod(start, ...);
        vLLM TreeAttentionBackend; SGLang tree_mask; Medusa medusa_attn_mask (all as dense matrices).
    """
    place = at(entry, b, q)
    # `kv <= q` follows from the other two conditions. Ranges cannot know that, and with it they find many empty blocks.
    return (kv <= q) & (at(entry, b, kv) <= place) & (place < at(leave, b, kv))


def _tour(parents: list[int], start: int, length: int) -> tuple[list[int], list[int]]:
    """Return when a walk through the tree enters and leaves each position.

    It leaves a position when it has left the subtree below it. The walk takes children in order, so that a token is an
    ancestor of the tokens entered before it is left. Before the tree each position is the parent of the next one.
    Behind the tree a position is left at the moment it is entered, so it sees nothing.
    """
    sizes = [1] * len(parents)
    for n in range(len(parents) - 1, -1, -1):
        if parents[n] >= n:
            raise ValueError(f"`parents` must come before their children, got parent {parents[n]} of token {n}.")
        if parents[n] >= 0:
            sizes[parents[n]] += sizes[n]
    if start + len(parents) > length:
        raise ValueError(
            f"a tree of {len(parents)} tokens from position {start} on does not fit in {length} positions."
        )
    end = start + len(parents)
    entry = list(range(length))
    leave = [end] * start + [0] * len(parents) + list(range(end, length))
    free = [start, *([0] * len(parents))]  # free[n + 1]: when the next child of token n is entered; free[0]: of roots
    for n, parent in enumerate(parents):
        entry[start + n] = free[parent + 1]
        leave[start + n] = entry[start + n] + sizes[n]
        free[parent + 1] += sizes[n]
        free[n + 1] = entry[start + n] + 1
    return entry, leave
