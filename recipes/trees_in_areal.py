"""AReaL on trees: its rollouts packed by trees.pack, and its own tree training with a mask that is never N x N.

AReaL holds rollouts as rows that are padded on the right: `input_ids`, `attention_mask`, `loss_mask`, and `logprobs` of
the policy that wrote them. Its losses read log-probabilities at the token before, as `torch.roll(..., -1)` lays them.

With `enable_tree_training` AReaL packs tries itself, and gives attention a BlockMask of N x N booleans, which it fills
sequence by sequence. `mask_of` makes the same mask of a trie's N parents, and `attend` runs it in place of the function
that AReaL puts into transformers; everything else of its engine stays:

    areal.engine.fsdp_engine.build_tree_attn_kwargs = tree_kwargs
    areal.models.tree_attn.module_fsdp._tree_attn_fwd_func = attend  # before the engine is initialized

Without AReaL the tries, the mask and the loss below are written anew from their definitions.
"""

# %%
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flexmasks
from _measure import DEVICE, check, finish, start
from _rollouts import TEMPERATURE, TOLERANCE, Rollout, compared, draw, make_model, one_by_one, padded, saved
from flexmasks import trees


# %% The library's way: rows come in, rows go out.
def by_trees(model: Any, data: dict[str, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies [B, S] at the token before, where the loss reads them."""
    batch = trees.pack(data["input_ids"], mask=data["attention_mask"])
    hidden = model.base_model(
        input_ids=batch.tokens, position_ids=batch.position_ids, attention_mask=batch.mask, use_cache=False
    ).last_hidden_state
    head = model.get_output_embeddings()
    found = batch.logprobs_and_entropies(hidden, lambda x: head(x) / temperature, wanted=data["loss_mask"])
    logs, entropies = (batch.padded(x).roll(-1, 1) for x in found)
    return logs, entropies


# %% AReaL's way, with its tries: nodes of consecutive tokens, the first of which follows the last of its parent's.
def parents_of(trie: Any, length: int) -> Tensor:
    """Return the parents of the tokens of a trie, int64[length], and -1 behind them."""
    parents = torch.arange(-1, length - 1)
    used = torch.zeros(length, dtype=torch.bool)
    for node in trie.nodes:
        used[node.start_idx : node.end_idx + 1] = True
        parents[node.start_idx] = node.ancestors[-1].end_idx if node.ancestors else -1
    return torch.where(used, parents, -1)


def mask_of(trie: Any, length: int, device: Any) -> flexmasks.Mask:
    """Return the mask of a trie in a row of `length` tokens; those behind the trie see themselves."""
    return flexmasks.get_mask("tree", parents=parents_of(trie, length).to(device))


def tree_kwargs(trie: Any, padded_size: int, device: Any, *, dense_mask: bool = False) -> dict[str, Any]:
    """Stand in for AReaL's `build_tree_attn_kwargs`: a plan, which all layers of a step share."""
    if dense_mask:
        raise ValueError("tree_kwargs: Megatron's engine takes a tensor; keep AReaL's own function there.")
    return {"tree_block_mask": flexmasks.plan(mask_of(trie, padded_size, device), padded_size, device=device)}


def attend(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, softmax_scale: float | None = None,
    *args: Any, tree_block_mask: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Stand in for AReaL's `_tree_attn_fwd_func`: q, k and v are [B, S, H, D]."""
    return flexmasks.attention(query, key, value, mask=tree_block_mask, scale=softmax_scale, layout="bshd")


# %% A batch as AReaL's workflows make it, and what its actor makes of it before the loss.
def in_areals_format(rollouts: list[Rollout]) -> dict[str, Tensor]:
    """Return rows as AReaL's workflows do: the loss reads what the policy wrote."""
    return {
        "input_ids": padded([r.prompt + r.answer for r in rollouts], "right"),
        "attention_mask": padded([[1] * len(r.prompt + r.answer) for r in rollouts], "right"),
        "loss_mask": padded([[0] * len(r.prompt) + r.own for r in rollouts], "right"),
        "advantages": torch.tensor([[r.advantage] for r in rollouts], dtype=torch.float64, device=DEVICE),
    }


def rolled(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch as the loss gets it: masks, advantages and log-probabilities at the token before."""
    return data | {
        "loss_mask": data["loss_mask"].roll(-1, 1),
        "advantages": data["advantages"].expand(data["loss_mask"].shape),
    }


def loss_of(data: dict[str, Tensor], logs: Tensor, dual: float | None) -> Tensor:
    """Return AReaL's `ppo_actor_loss_fn`, decoupled, written anew.

    The ratio to the proximal policy, `prox_logp`, is clipped, and the loss weighed by that policy's ratio to the one
    that wrote the answers, `logprobs`. dual: the bound of losses with negative advantages.
    """
    mask, advantages = data["loss_mask"], data["advantages"]
    ratio = (logs - data["prox_logp"]).exp()
    terms = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    if dual is not None:
        terms = torch.minimum(terms, advantages.sign() * dual * advantages)
    behave = (data["prox_logp"] - data["logprobs"]).exp().clamp(max=5.0)
    return torch.where(mask.bool(), terms * behave, 0).sum() / mask.sum()


# %% Tries by their definition: the tokens in the order in which sequences bring them, one sequence after the other.
@dataclass
class Node:
    """Tokens start_idx to end_idx of a row, which the same sequences share."""

    start_idx: int
    end_idx: int
    ancestors: list[Node]


@dataclass
class Trie:
    """A row of tokens, and where each sequence stands in it."""

    tokens: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)


def in_order(sequences: list[list[int]]) -> Trie:
    """Return sequences as a trie whose nodes have one token each."""
    trie, known = Trie(), dict[tuple[int, ...], Node]()
    for sequence in sequences:
        path: list[Node] = []
        for end in range(1, len(sequence) + 1):
            beginning = tuple(sequence[:end])
            if beginning not in known:
                known[beginning] = Node(len(trie.tokens), len(trie.tokens), list(path))
                trie.tokens.append(sequence[end - 1])
                trie.nodes.append(known[beginning])
            path.append(known[beginning])
        trie.paths.append([node.start_idx for node in path])
    return trie


def dense_mask_of(trie: Trie, length: int) -> Tensor:
    """Return AReaL's mask, bool [length, length]: in each sequence the tokens see those before them, and themselves."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for path in trie.paths:
        places = torch.tensor(path)
        seen[places[:, None], places] |= torch.ones(len(path), len(path), dtype=torch.bool).tril()
    return seen


def main() -> None:
    """Compare, and count tokens."""
    file = start(__doc__)
    rollouts = draw()
    model, alone = make_model(), make_model("sdpa")
    data = in_areals_format(rollouts)
    logs, entropies = by_trees(model, data, TEMPERATURE)
    data = rolled(data)
    mask = data["loss_mask"]
    want, want_entropies = (torch.zeros_like(logs) for _ in range(2))
    for whole, found in zip((want, want_entropies), one_by_one(alone, rollouts), strict=True):
        for n, r in enumerate(rollouts):
            whole[n, len(r.prompt) - 1 : len(r.prompt + r.answer) - 1] = found[n, : len(r.answer)]
    check("log-probabilities", logs * mask, want * mask, TOLERANCE)
    check("entropies", entropies * mask, want_entropies * mask, TOLERANCE)
    noise = 0.3 * torch.randn(2, *want.shape, dtype=want.dtype).to(DEVICE)
    data |= {"prox_logp": want.detach() + noise[0], "logprobs": want.detach() + noise[1]}
    for dual in (None, 3.0):
        losses = loss_of(data, logs, dual), loss_of(data, want, dual)
        compared(f"decoupled loss, dual clip {dual}", losses, (model, alone))

    trie, length = in_order([r.prompt + r.answer for r in rollouts]), 256
    ours = mask_of(trie, length, "cpu")
    count = len(trie.tokens)
    behind = torch.diag(torch.arange(length) >= count)  # AReaL's tokens behind a trie see nothing, ours see themselves
    same = flexmasks.compare(dense_mask_of(trie, length) | behind, ours, length)
    print(f"check: AReaL's mask, and ours of its trie: {same}")
    assert same.equal
    q, k, v = torch.randn(3, 1, length, 4, 32, dtype=torch.float64)
    seen = (dense_mask_of(trie, length) | behind)[None, None]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    by_sdpa = F.scaled_dot_product_attention(heads_first[0], heads_first[1], heads_first[2], seen, scale=0.2)
    check("attention", attend(q, k, v, None, 0.2, **tree_kwargs(trie, length, "cpu")), by_sdpa.transpose(1, 2))
    batch = trees.pack(data["input_ids"], mask=data["attention_mask"])
    assert sum(batch.lengths) == count
    finish(saved(batch, data["input_ids"].numel()), file, f"{len(rollouts)} answers to 3 prompts.")


if __name__ == "__main__":
    main()
