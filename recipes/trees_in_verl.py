"""verl on trees: its engine's log-probabilities, entropies and policy loss, with each prompt computed once.

verl's FSDP engine gets a micro batch whose `input_ids` are sequences end to end, a jagged tensor, and gives
`ppo_loss` jagged tensors: at each token the log-probability of the next one. OnTrees puts trees into that place:

    class TreeEngine(OnTrees, FSDPEngineWithLMHead): ...

verl's own way to share prompts, `use_prefix_grouper`, shares the prompt of a group and nothing else; its mask of a
group is compared with that of the tree. Trees share what answers have in common, too, as turns of an agent and results
of tools. Without verl the micro batch below stands in its format, and its loss is written anew from its definition.
"""

# %%
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flexmasks
from _measure import DEVICE, check, finish, start
from _rollouts import ANSWERS, TEMPERATURE, TOLERANCE, Rollout, compared, draw, make_model, one_by_one, padded, saved
from flexmasks import trees


# %% The two methods of an engine that stand before and behind the call of its model.
def packed(input_ids: Any) -> trees.TreeBatch:
    """Return sequences of a jagged tensor [B, length] as trees."""
    lens = input_ids.offsets().diff()
    rows = input_ids.to_padded_tensor(0)
    return trees.pack(rows, mask=torch.arange(rows.shape[1], device=rows.device) < lens[:, None])


def at_the_token_before(batch: trees.TreeBatch, values: list[Tensor], offsets: Tensor) -> Tensor:
    """Return values of tokens as verl's engine does: jagged, each at the token before, and 0 at the last one."""
    assert batch.kept is not None
    return torch.nested.nested_tensor_from_jagged(batch.padded(values).roll(-1, 1)[batch.kept], offsets)


class OnTrees:
    """Put before an engine with a language model's head, such as FSDPEngineWithLMHead."""

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the model is called with, and the trees."""
        batch = packed(micro_batch["input_ids"])
        inputs = {"input_ids": batch.tokens, "position_ids": batch.position_ids, "attention_mask": batch.mask}
        return inputs, {"batch": batch}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Return the policy's log-probabilities and entropies of all tokens, [B, length], jagged."""
        batch, offsets = output_args["batch"], micro_batch["input_ids"].offsets()
        temperature = torch.as_tensor(micro_batch["temperature"]).flatten()
        if bool((temperature != temperature[0]).any()):
            raise ValueError("OnTrees: answers share tokens, so their temperature must be one number.")
        found = batch.logprobs_and_entropies(output.logits / float(temperature[0]))
        log_probs, entropy = (at_the_token_before(batch, x, offsets) for x in found)
        return {"log_probs": log_probs, "entropy": entropy}


# %% A micro batch: jagged sequences, prompts and responses, and padded rows of what the trainer computed.
def in_verls_format(rollouts: list[Rollout]) -> dict[str, Any]:
    """Return the fields of verl's micro batch; "temperature" is one number, "uid" names the group."""

    def jagged(rows: list[list[int]]) -> Tensor:
        return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged, device=DEVICE)

    mask = padded([r.own for r in rollouts], "right")
    advantages = torch.tensor([[r.advantage] for r in rollouts], dtype=torch.float64, device=DEVICE) * mask
    return {
        "input_ids": jagged([r.prompt + r.answer for r in rollouts]),
        "position_ids": jagged([list(range(len(r.prompt + r.answer))) for r in rollouts]),
        "prompts": jagged([r.prompt for r in rollouts]),
        "responses": jagged([r.answer for r in rollouts]),
        "response_mask": mask,
        "advantages": advantages,
        "temperature": TEMPERATURE,
        "uid": [r.group for r in rollouts],
    }


def of_responses(values: Tensor, micro_batch: dict[str, Any]) -> Tensor:
    """Return the responses' part of a jagged output, padded on the right, as verl's `no_padding_2_padding` does."""
    lens = micro_batch["responses"].offsets().diff().tolist()
    each = [x[-n - 1 : -1] for x, n in zip(values.unbind(), lens, strict=True)]
    return torch.nn.utils.rnn.pad_sequence(each, batch_first=True)


def loss_of(micro_batch: dict[str, Any], logs: Tensor, entropies: Tensor, mode: str) -> Tensor:
    """Return verl's `ppo_loss` with policy loss "vanilla", written anew: clipped on both sides, minus entropy.

    mode: "token-mean" over all tokens, "seq-mean-token-mean" and "seq-mean-token-sum" over answers.
    """
    mask, advantages = micro_batch["response_mask"], micro_batch["advantages"]
    ratio = (logs - micro_batch["old_log_probs"]).clamp(-20, 20).exp()
    terms = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    terms = torch.where(advantages < 0, torch.minimum(terms, -advantages * 3.0), terms)
    sums = ((terms - 0.01 * entropies) * mask).sum(1)
    loss: Tensor = sums.sum() / mask.sum()
    if mode != "token-mean":
        loss = (sums / mask.sum(1) if mode == "seq-mean-token-mean" else sums).mean()
    return loss


# %% PrefixGrouper's mask, by its definition: a group is one row, its prompt sees itself, an answer both parts.
def grouped(prompt: int, answers: list[int]) -> Tensor:
    """Return which tokens see which, bool [N, N], of a row of a prompt and its answers, given by their lengths."""
    part = torch.repeat_interleave(torch.arange(1 + len(answers)), torch.tensor([prompt, *answers]))
    token = torch.arange(len(part))
    return (token[:, None] >= token) & ((part[:, None] == part) | (part == 0))


def main() -> None:
    """Compare, and count tokens."""
    file = start(__doc__)
    rollouts = draw()
    model, alone = make_model(), make_model("sdpa")
    micro_batch = in_verls_format(rollouts)
    engine = OnTrees()
    inputs, arguments = engine.prepare_model_inputs(micro_batch)
    output = engine.prepare_model_outputs(model(**inputs, use_cache=False), arguments, micro_batch, None)
    logs, entropies = (of_responses(output[name], micro_batch) for name in ("log_probs", "entropy"))
    want, want_entropies = one_by_one(alone, rollouts)
    check("log-probabilities", logs, want, TOLERANCE)
    check("entropies", entropies, want_entropies, TOLERANCE)
    micro_batch["old_log_probs"] = want.detach() + 0.3 * torch.randn_like(want)
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        losses = loss_of(micro_batch, logs, entropies, mode), loss_of(micro_batch, want, want_entropies, mode)
        compared(mode, losses, (model, alone))

    group = [r for r in rollouts if r.group == 0]
    lens = [len(r.answer) for r in group]
    unlike = [[n] * length for n, length in enumerate(lens)]  # answers that share nothing, as PrefixGrouper takes them
    tree = trees.pack(unlike, prompts=[group[0].prompt] * ANSWERS)
    same = flexmasks.compare(grouped(len(group[0].prompt), lens), tree.mask, tree.tokens.shape[1])
    print(f"check: PrefixGrouper's mask of a group, and the tree's: {same}")
    assert same.equal
    rows = saved(arguments["batch"], micro_batch["input_ids"].to_padded_tensor(0).numel())
    firsts = {r.group: len(r.prompt) for r in rollouts}
    rows.insert(
        2, {"": "prompts shared", "computed tokens": sum(firsts.values()) + sum(len(r.answer) for r in rollouts)}
    )
    finish(rows, file, f"{len(rollouts)} answers to {len(firsts)} prompts.")


if __name__ == "__main__":
    main()
