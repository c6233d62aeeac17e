"""trl on trees: GRPO's log-probabilities, entropies and loss, with each prompt of a group computed once.

GRPOTrainer holds a group of answers as rows: `prompt_ids`, padded on the left, beside `completion_ids`, padded on the
right. Its method `_get_per_token_logps_and_entropies` makes log-probabilities of them, for the policy, for the policy
before the step, and for the reference model. A trainer whose method does so on trees is all it takes: rewards,
advantages, losses, clipping and logging are trl's.

    trainer = tree_trainer()(model=..., args=GRPOConfig(model_init_kwargs={"attn_implementation": "flexmasks"}), ...)

Without trl the rollouts below stand in its format, and its loss is written anew from its definition.
"""

# %%
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from _measure import DEVICE, check, finish, start
from _rollouts import TEMPERATURE, TOLERANCE, Rollout, compared, draw, make_model, one_by_one, padded, saved
from flexmasks import trees


# %% The model's forward makes log-probabilities of trees, so that what trl wraps around a model (DDP, FSDP) is called.
def add_tree_head(model: Any, temperature: float) -> None:
    """Let `model(tree=batch, wanted=mask)` return log-probabilities and entropies of a batch of trees."""
    usual = model.forward

    def forward(*args: Any, tree: trees.TreeBatch | None = None, wanted: Tensor | None = None, **kwargs: Any) -> Any:
        if tree is None:
            return usual(*args, **kwargs)
        hidden = model.base_model(
            input_ids=tree.tokens, position_ids=tree.position_ids, attention_mask=tree.mask, use_cache=False
        ).last_hidden_state
        head = model.get_output_embeddings()
        return tree.logprobs_and_entropies(hidden, lambda x: head(x) / temperature, wanted=wanted)

    model.forward = forward


def of_answers(model: Any, input_ids: Tensor, attention_mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the last `count` tokens of padded rows, [B, count], 0 at padding."""
    batch = trees.pack(input_ids, mask=attention_mask)
    wanted = attention_mask.bool().clone()
    wanted[:, :-count] = False
    logs, entropies = model(tree=batch, wanted=wanted)
    return batch.padded(logs)[:, -count:], batch.padded(entropies)[:, -count:]


def tree_trainer() -> type[Any]:
    """Return trl's GRPOTrainer with trees for models of text."""
    from trl import GRPOTrainer

    class TreeTrainer(GRPOTrainer):  # type: ignore[misc,unused-ignore]
        """GRPO with each prompt of a group computed once."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for model in (self.model, self.ref_model):
                if model is not None:
                    add_tree_head(self.accelerator.unwrap_model(model), self.temperature)

        def _get_per_token_logps_and_entropies(
            self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
            batch_size: int | None = None, compute_entropy: bool = False, **others: Any,
        ) -> tuple[Tensor, Tensor | None, None]:  # fmt: skip
            if given := [name for name, value in others.items() if value is not None and value is not False]:
                raise ValueError(f"TreeTrainer: trees are of text alone, got {', '.join(given)}")
            with self.accelerator.autocast():
                logs, entropies = of_answers(model, input_ids, attention_mask, logits_to_keep)
            return logs, entropies if compute_entropy else None, None

    return TreeTrainer


# %% A rollout as GRPOTrainer holds it. Answers cut at the greatest length may be left out of the loss: their mask is 0.
def in_trls_format(rollouts: list[Rollout], leave_out: int | None = None) -> dict[str, Tensor]:
    """Return the rows of GRPOTrainer's `_generate_and_score_completions`; one answer may be left out as truncated."""
    prompts = [r.prompt for r in rollouts]
    answers = [r.answer for r in rollouts]
    mask = padded([[1] * len(a) for a in answers], "right")
    if leave_out is not None:
        mask[leave_out] = 0
    return {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([[1] * len(p) for p in prompts], "left"),
        "completion_ids": padded(answers, "right"),
        "completion_mask": mask,
        "tool_mask": padded([r.own for r in rollouts], "right"),
        "advantages": torch.tensor([r.advantage for r in rollouts], dtype=torch.float64, device=DEVICE),
        "num_items_in_batch": mask.sum().double(),
    }


def loss_of(
    inputs: dict[str, Tensor], logs: Tensor, kind: str, beta: float, low: float = 0.2, high: float = 0.28
) -> Tensor:
    """Return the loss of GRPOTrainer, written anew: a clipped ratio to the old policy, and beta times the k3 KL.

    The KL is weighed by the ratio, as `use_bias_correction_kl` does by default.

    kind: "grpo" means over answers of means over tokens, "bnpo" and "dapo" the mean over all tokens.
    """
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    ratio = (logs - inputs["old_per_token_logps"]).exp()
    advantages = inputs["advantages"][:, None]
    terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    apart = inputs["ref_per_token_logps"] - logs
    terms = (terms + beta * ratio * (apart.exp() - apart - 1)) * mask
    if kind == "grpo":
        return (terms.sum(1) / mask.sum(1).clamp(min=1)).mean()
    return terms.sum() / (mask.sum() if kind == "bnpo" else inputs["num_items_in_batch"])


# %% Losses and gradients on trees are those of sequences one by one.
def main() -> None:
    """Compare, and count tokens."""
    file = start(__doc__)
    rollouts = draw()
    model, alone = make_model(), make_model("sdpa")
    add_tree_head(model, TEMPERATURE)
    for what, leave_out in (("all answers", None), ("one truncated answer left out", 2)):
        inputs = in_trls_format(rollouts, leave_out)
        rows = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        kept = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logs, entropies = of_answers(model, rows, kept, inputs["completion_ids"].shape[1])
        want, want_entropies = (x * inputs["completion_mask"] for x in one_by_one(alone, rollouts))
        check(f"log-probabilities, {what}", logs, want, TOLERANCE)
        check(f"entropies, {what}", entropies, want_entropies, TOLERANCE)
        noise = torch.randn(2, *logs.shape, dtype=logs.dtype).to(DEVICE) * 0.3
        inputs |= {"old_per_token_logps": want.detach() + noise[0], "ref_per_token_logps": want.detach() + noise[1]}
        for kind in ("grpo", "bnpo", "dapo"):
            losses = loss_of(inputs, logs, kind, beta=0.04), loss_of(inputs, want, kind, beta=0.04)
            compared(f"{kind}, {what}", losses, (model, alone))
    finish(saved(trees.pack(rows, mask=kept), rows.numel()), file, f"{len(rollouts)} answers to 3 prompts.")


if __name__ == "__main__":
    main()
