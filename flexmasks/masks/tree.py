from typing import Annotated, Any

import torch
from torch import Tensor

from flexmasks.spec import Size, at, may_read, register_mask


def _prepare(
    size: Size | None,
    *,
    parents: Annotated[Tensor, "int[N] in -1..N-1 | int[B, N] in -1..N-1"],
    start: Annotated[int | Tensor, "int in 0.. | int[B] in 0.."] = 0,
) -> dict[str, Any]:
    tensors = [x for x in (parents, start) if isinstance(x, Tensor)]
    trees = parents.long().reshape(-1, parents.shape[-1])
    first = start.long()[:, None] if isinstance(start, Tensor) else start
    length = int(torch.as_tensor(start).max()) + trees.shape[1] if size is None else size.positions
    if may_read(size, *tensors):
        _check(trees, start, length)
    before, sizes = _tour(trees)
    position = torch.arange(length, device=parents.device)
    token = position - first
    inside = (token >= 0) & (token < trees.shape[1])
    rows = max(len(trees), len(token) if token.ndim == 2 else 1)
    place = token.clamp(0, trees.shape[1]).expand(rows, length)
    # Before the tree each position is the parent of the next one. Behind it a position is left when it is entered.
    entry = torch.where(inside, first + before.expand(rows, -1).gather(1, place), position)
    leave = torch.where(inside, entry + sizes.expand(rows, -1).gather(1, place), position)
    leave = torch.where(token < 0, first + trees.shape[1], leave)
    if len(tensors) == 1 and parents.ndim == 1:
        entry, leave = entry[0], leave[0]
    return {"entry": entry, "leave": leave}


def _example(length: int) -> dict[str, Any]:
    start = length // 4
    return {"parents": [-1, *((i - 1) // 4 for i in range(1, length - start))], "start": start}


@register_mask(prepare=_prepare, example=_example)
def tree(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, entry: Tensor, leave: Tensor) -> Tensor:
    """A tree of tokens: each sees a causal context, its ancestors and itself.

    parents: the parent of each token, as its number in the tree, smaller than the token's own; -1 for a root. There may
        be several roots. One tree for all batch elements or one for each.
    start: position of the tree's first token, which is the length of the context, one for all or one for each batch
        element. Tokens behind the tree see nothing and are not seen.

    To verify the N draft tokens of a tree, pass them as queries with `q_offset=start`. Answers that share beginnings of
    different lengths are a tree, too.

    Source: Miao et al., SpecInfer, 2024; Cai et al., Medusa, 2024; Li et al., EAGLE, 2024.
    Peers: attention-gym build_tree_ancestor_matrix(parents) and generate_jetspec_tree_causal_mask_mod(start, ...);
        vLLM TreeAttentionBackend; SGLang tree_mask; Medusa medusa_attn_mask (all as dense matrices); P-EAGLE's drafts.
    """
    place = at(entry, b, q)
    # `kv <= q` follows from the other two conditions. Ranges cannot know that, and with it they find many empty blocks.
    return (kv <= q) & (at(entry, b, kv) <= place) & (place < at(leave, b, kv))


def _check(trees: Tensor, start: int | Tensor, length: int) -> None:
    is_wrong = trees >= torch.arange(trees.shape[1], device=trees.device)
    if bool(is_wrong.any()):
        row, n = is_wrong.nonzero()[-1].tolist()
        raise ValueError(f"`parents` must come before their children, got parent {int(trees[row, n])} of token {n}.")
    last = int(start.max()) if isinstance(start, Tensor) else start
    if last + trees.shape[1] > length:
        raise ValueError(
            f"a tree of {trees.shape[1]} tokens from position {last} on does not fit in {length} positions."
        )


def _tour(trees: Tensor) -> tuple[Tensor, Tensor]:
    """When a walk through the tree enters each token, and how many tokens the subtree of each has: int64[B, N + 1], of
    which the last column belongs to no token. `trees` are the parents, int64[B, N].

    The walk takes children in order. It leaves a token when it has left the subtree below it. A token is therefore an
    ancestor of the tokens that the walk enters before it leaves the token.

    Sums along paths to the root, and sums over subtrees, take log2(N) steps. In step n, each token knows its ancestor
    2**n levels above, and the sums over less than 2**n levels.
    """
    count = trees.shape[1]
    # One more token is the parent of all roots, and its own parent.
    parents = torch.nn.functional.pad(trees, (0, 1), value=-1)
    ancestors = [torch.where(parents < 0, count, parents)]
    while 2 ** len(ancestors) < count:
        ancestors.append(ancestors[-1].gather(1, ancestors[-1]))
    sizes = torch.ones_like(ancestors[0])
    for ancestor in ancestors:
        sizes = sizes.scatter_add(1, ancestor, sizes)
    # A child is entered after its parent and after the subtrees of its earlier siblings.
    parent, order = ancestors[0].sort(dim=1, stable=True)
    ordered = sizes.gather(1, order)
    earlier = ordered.cumsum(1) - ordered
    is_first = torch.nn.functional.pad(parent[:, 1:] != parent[:, :-1], (1, 0), value=True)
    earlier = earlier - torch.where(is_first, earlier, 0).cummax(1).values + (parent < count)
    before = torch.empty_like(earlier).scatter_(1, order, earlier)
    before[:, -1] = 0
    for ancestor in ancestors:
        before = before + before.gather(1, ancestor)
    return before, sizes
