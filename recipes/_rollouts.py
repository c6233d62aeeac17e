"""Shared parts of the recipes on rollouts of trainers: answers to prompts, a small model, and sequences one by one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from _measure import DEVICE, Row, check
from flexmasks import trees
from flexmasks.integrations import huggingface

try:
    import transformers
except ImportError as missing:
    raise SystemExit(f"{missing}. This recipe needs transformers >= 5.17: pip install -e '.[huggingface]'") from None

huggingface.register()
WORDS, PROMPTS, ANSWERS = 97, 3, 4  # answers to each prompt
TEMPERATURE = 0.8
TOLERANCE = 1e-6  # the model is of float64, but for transformers' RMSNorm and rotations, which are of float32


class Rollout(NamedTuple):
    """An answer to a prompt, whose number is `group`. What the policy wrote is 1 in `own`, a tool's results are 0."""

    group: int
    prompt: list[int]
    answer: list[int]
    own: list[int]
    advantage: float


def draw(seed: int = 0) -> list[Rollout]:
    """Draw groups: some answers begin alike, one is a single word, and two share a turn and a tool's result."""
    generator = torch.Generator().manual_seed(seed)

    def words(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most, (), generator=generator))
        return torch.randint(1, WORDS, (count,), generator=generator).tolist()

    rollouts = []
    for group in range(PROMPTS):
        prompt, turn, result = words(12, 40), words(3, 9), words(2, 6)
        answers = [(words(8, 20), []), (words(1, 2), []), (turn, words(3, 8)), (turn, words(3, 8))]
        rewards = torch.rand(ANSWERS, generator=generator)
        for (first, second), advantage in zip(answers, (rewards - rewards.mean()) / rewards.std(), strict=True):
            used = result if second else []
            own = [1] * len(first) + [0] * len(used) + [1] * len(second)
            rollouts.append(Rollout(group, prompt, first + used + second, own, float(advantage)))
    return rollouts


def padded(rows: list[list[Any]], side: str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return rows of different lengths as one tensor, filled up with 0 on a side."""
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side).to(DEVICE)


def make_model(attention: str = "flexmasks", dtype: torch.dtype = torch.float64) -> Any:
    """Make a small Llama from a seed."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=dtype).to(DEVICE)


def one_by_one(model: Any, rollouts: list[Rollout], temperature: float = TEMPERATURE) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the answers' words, padded on the right; a call for each sequence."""
    logs, entropies = [], []
    for rollout in rollouts:
        words = torch.tensor([rollout.prompt + rollout.answer], device=DEVICE)
        logits = model(words, use_cache=False).logits[0, len(rollout.prompt) - 1 : -1] / temperature
        all_words = logits.log_softmax(-1)
        logs.append(all_words.gather(1, words[0, len(rollout.prompt) :, None])[:, 0])
        entropies.append(-(all_words.exp() * all_words).sum(-1))
    found = (nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (logs, entropies))
    return next(found), next(found)


def compared(what: str, losses: tuple[Tensor, Tensor], models: tuple[nn.Module, nn.Module]) -> None:
    """Compare a loss on trees and one by one, and the gradients of all weights."""
    found = [
        torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
        for loss, model in zip(losses, models, strict=True)
    ]
    check(f"{what}, loss", losses[0], losses[1], TOLERANCE)
    check(f"{what}, gradients of all weights", found[0], found[1], TOLERANCE)


def saved(batch: trees.TreeBatch, padded_tokens: int) -> list[Row]:
    """Return how many tokens a batch computes, and those of padded rows."""
    sequences = sum(len(places) for _, places in batch.places)
    return [
        {"": what, "computed tokens": count}
        for what, count in (("padded", padded_tokens), ("packed", sequences), ("trees", sum(batch.lengths)))
    ]
