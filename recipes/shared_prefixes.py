"""Policy gradients on groups of answers: each prompt computed once, not once for each of its answers.

GRPO draws a group of answers to each prompt. In a batch of sequences, padded or packed, a prompt of 4,096 tokens with
16 answers of 512 is computed 16 times. `trees.pack` lays prompt and answers out as a tree, in which the prompt stands
once, and the mask lets each token see its own path. All ways give the same losses and gradients: the loss is a sum over
answers, which weigh the tokens that they share each by its own advantage.
"""

# %%
from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import flexmasks
from _measure import DEVICE, ON_GPU, Row, check, finish, start
from flexmasks import trees
from flexmasks.bench.clock import synchronize


class Sizes(NamedTuple):
    """Sizes of the model, and of a step: prompts and their answers."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    prompts: int
    answers: int  # to each prompt
    prompt: int  # tokens
    answer: int
    row: int  # the most tokens of a row


SIZES = Sizes(4096, 1024, 16, 12, 8, 16, 4096, 512, 16384) if ON_GPU else Sizes(64, 64, 2, 2, 3, 6, 96, 24, 320)


class Step(NamedTuple):
    """The sequences of a step, prompt and answer each, and the advantage of each answer in its group."""

    sequences: list[Tensor]
    advantages: Tensor


def make_step(generator: torch.Generator) -> Step:
    """Make random groups; answers differ in length, and begin alike now and then."""
    sequences = []
    for _ in range(SIZES.prompts):
        prompt = torch.randint(SIZES.vocabulary, (SIZES.prompt,), generator=generator)
        first = torch.randint(SIZES.vocabulary, (SIZES.answer // 4,), generator=generator)
        for n in range(SIZES.answers):
            length = int(torch.randint(SIZES.answer // 2, SIZES.answer, (), generator=generator))
            answer = torch.randint(SIZES.vocabulary, (length,), generator=generator)
            sequences.append(torch.cat([prompt, first, answer] if n % 2 else [prompt, answer]))
    rewards = torch.rand(SIZES.prompts, SIZES.answers, generator=generator)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    return Step(sequences, advantages.flatten().to(DEVICE))


# %% The model knows tokens, positions and a mask; it is the same in all ways.
class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: flexmasks.Plan) -> Tensor:
        """Return the next hidden states."""
        heads: Tensor = self.qkv(self.norms[0](x)).unflatten(2, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(flexmasks.attention(q, k, v, mask=mask).transpose(1, 2).flatten(2))
        mixed: Tensor = self.mlp(self.norms[1](x))
        return x + mixed


class Model(nn.Module):
    """A small GPT, without its head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.prompt + 2 * sizes.answer, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor, positions: Tensor, mask: flexmasks.Plan) -> Tensor:
        """Return hidden states, [rows, tokens, width]."""
        x: Tensor = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return x


# %% Four ways to the log-probabilities of each sequence's tokens. Packed rows are trees that share nothing.
def by_padding(model: Model, sequences: list[Tensor]) -> tuple[list[Tensor], int]:
    """Pad all sequences to the longest; what stands behind is seen by nobody, because the mask is causal."""
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(DEVICE)
    positions = torch.arange(tokens.shape[1], device=DEVICE).expand_as(tokens)
    hidden = model(tokens, positions, flexmasks.plan("causal", tokens.shape[1], device=DEVICE))
    found = []
    for states, row, sequence in zip(hidden, tokens, sequences, strict=True):
        logits = model.head(states[: len(sequence) - 1]).float()
        found.append(logits.log_softmax(-1).gather(1, row[1 : len(sequence), None])[:, 0])
    return found, tokens.numel()


def one_by_one(model: Model, sequences: list[Tensor]) -> tuple[list[Tensor], int]:
    """Compute each sequence alone."""
    found = [by_padding(model, [sequence])[0][0] for sequence in sequences]
    return found, sum(map(len, sequences))


def by_packing(model: Model, sequences: list[Tensor], min_shared: int = SIZES.row) -> tuple[list[Tensor], int]:
    """Lay sequences end to end in rows."""
    batch = trees.pack(sequences, max_tokens=SIZES.row, min_shared=min_shared).to(DEVICE)
    hidden = model(batch.tokens, batch.position_ids, batch.plan())
    return batch.logprobs(hidden, model.head), batch.tokens.numel()


def by_trees(model: Model, sequences: list[Tensor]) -> tuple[list[Tensor], int]:
    """Let sequences share what they begin with."""
    return by_packing(model, sequences, min_shared=1)


WAYS: dict[str, Callable[[Model, list[Tensor]], tuple[list[Tensor], int]]] = {
    "one by one": one_by_one,
    "padded": by_padding,
    "packed": by_packing,
    "trees": by_trees,
}


# %% The loss of GRPO at its first step, where the old policy is the new one, over the tokens of the answers.
def loss_of(logprobs: list[Tensor], advantages: Tensor) -> Tensor:
    """Return the loss: over answers, the mean of the ratio's surrogate times the answer's advantage."""
    terms = []
    for of_sequence, advantage in zip(logprobs, advantages, strict=True):
        answer = of_sequence[SIZES.prompt - 1 :]
        ratio = (answer - answer.detach()).exp()
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean())
    return -torch.stack(terms).mean()


class Run(NamedTuple):
    """What one way gives: log-probabilities, gradients, seconds of a step, computed tokens, peak memory in bytes."""

    logprobs: Tensor
    gradient: Tensor
    seconds: float
    computed: int
    peak: int | None


def run(model: Model, way: str, steps: list[Step]) -> Run:
    """Run the steps in one way; the last ones are timed."""
    seconds: list[float] = []
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    for step in steps:
        model.zero_grad()
        synchronize(DEVICE)
        begin = time.perf_counter()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU):
            logprobs, computed = WAYS[way](model, step.sequences)
            loss = loss_of(logprobs, step.advantages)
        loss.backward()
        synchronize(DEVICE)
        seconds.append(time.perf_counter() - begin)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    peak = torch.cuda.max_memory_allocated() if ON_GPU else None
    return Run(torch.cat(logprobs).detach(), gradient, sorted(seconds[1:])[len(seconds) // 2 - 1], computed, peak)


# %% Pairs of DPO share their prompt. The logarithm of the reference model's ratio would be subtracted; it is 0 here.
def loss_of_pairs(logprobs: list[Tensor]) -> Tensor:
    """Return the loss of pairs of a preferred answer and another one."""
    sums = torch.stack([x[SIZES.prompt - 1 :].sum() for x in logprobs])
    return -nn.functional.logsigmoid(0.1 * (sums[::2] - sums[1::2])).mean()


# %% A trace of an agent branches where it tries again, and where it goes on with a shorter context.
def make_trace(generator: torch.Generator) -> list[Tensor]:
    """Return all calls of the model in a trace: what it read, and what it wrote, the last turn of each."""
    turn = max(4, SIZES.answer // 8)

    def new(turns: int = 1) -> Tensor:
        return torch.randint(SIZES.vocabulary, (turns * turn,), generator=generator)

    task = new(3)
    searched = torch.cat([task, new(), new(2)])  # the agent's turn, and a tool's result
    tries = [torch.cat([searched, new()]) for _ in range(3)]
    fixed = torch.cat([tries[-1], new(2), new()])
    return [searched, *tries, fixed, torch.cat([task, new(), new()])]  # the last one from a summary


def loss_of_trace(logprobs: list[Tensor]) -> Tensor:
    """Return the cross entropy of the last tokens of each call."""
    return -torch.stack([x[-max(4, SIZES.answer // 8) :].mean() for x in logprobs]).mean()


def check_others(model: Model, generator: torch.Generator) -> None:
    """Compare gradients of pairs and of a trace as trees with those of sequences one by one; show the trace's mask."""
    pairs = make_step(generator).sequences[: 2 * SIZES.prompts]
    trace = make_trace(generator)
    for what, sequences, loss in (("pairs", pairs, loss_of_pairs), ("a trace", trace, loss_of_trace)):
        found = []
        for way in (by_trees, one_by_one):
            model.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU):
                loss(way(model, sequences)[0]).backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        check(f"gradients of all weights, {what}", found[0], found[1], 3e-2 if ON_GPU else 1e-4)
    batch = trees.pack(trace)
    print(f"\n{len(trace)} calls of an agent, of {sum(map(len, trace))} tokens, as {batch.tokens.numel()}:\n")
    flexmasks.show(batch.mask, batch.tokens.shape[1])


# %% All ways see the same steps and weights.
def main() -> None:
    """Run all ways and compare."""
    file = start(__doc__)
    torch.manual_seed(0)
    model = Model(SIZES).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    steps = [make_step(generator) for _ in range(4)]
    begin = time.perf_counter()
    batch = trees.pack(steps[0].sequences, max_tokens=SIZES.row)
    seconds = time.perf_counter() - begin
    print(
        f"a step: {len(batch.places)} sequences; trees save {batch.saved:.0%} of their tokens, "
        f"{batch.repeated} prefixes stand twice; packed in {seconds * 1e3:.1f} ms\n"
    )
    runs = {way: run(model, way, steps) for way in WAYS}
    rows: list[Row] = []
    total = sum(map(len, steps[-1].sequences))
    for way, made in runs.items():
        if way != "one by one":
            check(f"log-probabilities, {way}", made.logprobs, runs["one by one"].logprobs, 5e-2 if ON_GPU else 1e-4)
            of_one = runs["one by one"].gradient
            check(f"gradients of all weights, {way}", made.gradient, of_one, 3e-2 if ON_GPU else 1e-4)
        row: Row = {
            "": way,
            "ms for a step": float(f"{made.seconds * 1e3:.4g}"),
            "tokens of sequences a second": round(total / made.seconds),
            "computed tokens": made.computed,
        }
        rows.append(row if made.peak is None else row | {"peak MB": round(made.peak / 1e6)})
    check_others(model, generator)
    print()
    note = f"A step has {total:,} tokens in {len(steps[-1].sequences)} sequences: prompt and answer each."
    finish(rows, file, note)


if __name__ == "__main__":
    main()
