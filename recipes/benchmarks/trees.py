"""`python recipes/benchmark.py trees`: training on answers to shared prompts, as trees and without sharing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory import peak_bytes
from benchmarks.model import Attend, Layer
from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps import QUICK, Pace, measure, measured_rows
from benchmarks.steps_tables import github_table
from flexmasks import trees
from flexmasks.attention import attention
from flexmasks.bench.clock import device_milliseconds, interleaved, wall_milliseconds
from flexmasks.planning import plan
from flexmasks.spec.arguments import get_mask

PACE = Pace(3, 2, 1, 10.0)
_DRAWS = 8  # different steps, which are taken by turns
_RUNS = 7  # of what is timed by itself
TREES, PACKED, _NONE = "trees", "packed", "trees, no attention"


class Sizes(NamedTuple):
    """Sizes of the model, and of a step: prompts and their answers."""

    vocabulary: int = 32_000
    width: int = 1024
    heads: int = 16
    layers: int = 12
    prompts: int = 2
    answers: int = 16  # to each prompt, an even number
    prompt: int = 4096  # tokens
    answer: int = 512  # tokens in the mean

    @property
    def longest(self) -> int:
        """The most tokens of a sequence."""
        return self.prompt + self.answer * 3 // 2

    @property
    def tokens(self) -> int:
        """The tokens of the sequences of a step."""
        return self.prompts * self.answers * (self.prompt + self.answer)


_SMALL = Sizes(vocabulary=64, width=64, heads=2, layers=2, answers=4, prompt=96, answer=32)


class Step(NamedTuple):
    """The sequences of a step, prompt and answer each, and for each token how the loss weighs its log-probability."""

    sequences: list[Tensor]
    weights: list[Tensor]


def draw(sizes: Sizes, generator: torch.Generator, device: torch.device) -> Step:
    """Draw groups whose answers have new lengths and, in sum, always as many tokens."""
    sequences, weights = [], []
    for _ in range(sizes.prompts):
        prompt = torch.randint(sizes.vocabulary, (sizes.prompt,), generator=generator)
        less = torch.randint(sizes.answer // 2, (sizes.answers // 2,), generator=generator)
        rewards = torch.rand(sizes.answers, generator=generator)
        advantages = (rewards - rewards.mean()) / rewards.std()
        for length, advantage in zip((sizes.answer + torch.cat([less, -less])).tolist(), advantages, strict=True):
            answer = torch.randint(sizes.vocabulary, (length,), generator=generator)
            of_answer = (-advantage / length / sizes.prompts / sizes.answers).expand(length)
            sequences.append(torch.cat([prompt, answer]))
            weights.append(F.pad(of_answer, (sizes.prompt - 1, 0)).to(device))
    return Step(sequences, weights)


# --- the ways ---


class Way(NamedTuple):
    """A way to compute the sequences of a step."""

    at_once: int  # sequences that go through the model together
    row: int  # the most tokens of a row
    shares: bool
    attend_of: Callable[[trees.TreeBatch], Attend]


def _by_trees(batch: trees.TreeBatch) -> Attend:
    planned = batch.plan()
    return lambda q, k, v: attention(q, k, v, mask=planned)


def _by_documents(batch: trees.TreeBatch) -> Attend:
    ids = (batch.parents < 0).cumsum(1)
    packed = get_mask("causal") & get_mask("document", document_ids=ids)
    planned = plan(packed, ids.shape[1], batch=len(ids))
    return lambda q, k, v: attention(q, k, v, mask=planned)


def _by_sdpa(_: trees.TreeBatch) -> Attend:
    return functools.partial(F.scaled_dot_product_attention, is_causal=True)


def _by_sums(_: trees.TreeBatch) -> Attend:
    return lambda q, k, v: q + k + v


def ways_of(sizes: Sizes) -> dict[str, Way]:
    """Return all ways, by their names."""
    tree, packed = (sizes.prompt * n + sizes.answers * sizes.answer for n in (1, sizes.answers))
    return {
        TREES: Way(sizes.prompts * sizes.answers, tree, True, _by_trees),
        _NONE: Way(sizes.prompts * sizes.answers, tree, True, _by_sums),
        PACKED: Way(sizes.answers, packed, False, _by_documents),
        "padded": Way(sizes.answers, sizes.longest, False, _by_sdpa),
        "one by one": Way(1, sizes.longest, False, _by_sdpa),
    }


class _Model(nn.Module):
    """A transformer from tokens to hidden states, and its head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words, self.places = (nn.Embedding(n, sizes.width) for n in (sizes.vocabulary, sizes.longest))
        self.layers = nn.ModuleList(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.last, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, batch: trees.TreeBatch, attend: Attend) -> Tensor:
        x = self.words(batch.tokens) + self.places(batch.position_ids)
        for layer in self.layers:
            x = layer(x, attend)
        return self.last(x)  # type: ignore[no-any-return]


class Training:
    """A model with its optimizer. A call is one step on new sequences: the policy gradient of GRPO."""

    def __init__(
        self, way: Way, sizes: Sizes, steps: list[Step], device: torch.device, dtype: torch.dtype,
        answers_only: bool = False,
    ) -> None:  # fmt: skip
        with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            self._model = _Model(sizes).to(dtype)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self._way, self._steps, self.device = way, itertools.cycle(steps), device
        self._is_shared = 1 if way.shares else sizes.longest + 1
        self._prompt = sizes.prompt if answers_only else None
        self.computed = 0  # tokens in the last step

    def pack(self, sequences: list[Tensor]) -> trees.TreeBatch:
        """Lay sequences out in rows on the device; sequences that share nothing are trees, too."""
        given: dict[str, Any] = {"max_tokens": self._way.row, "min_shared": self._is_shared}
        if self._prompt is None:
            return trees.pack(sequences, **given).to(self.device)
        rows = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-1)
        return trees.pack(rows, mask=rows >= 0, **given).to(self.device)

    def __call__(self) -> Tensor:
        step, losses, self.computed = next(self._steps), [], 0
        self._optimizer.zero_grad()
        for start in range(0, len(step.sequences), self._way.at_once):
            part = slice(start, start + self._way.at_once)
            batch = self.pack(step.sequences[part])
            wanted = None
            if self._prompt is not None and batch.kept is not None:
                wanted = batch.kept.clone()
                wanted[:, : self._prompt] = False
            hidden = self._model(batch, self._way.attend_of(batch))
            logprobs = batch.logprobs(hidden, self._model.head, wanted=wanted)
            loss = (torch.cat(logprobs) * torch.cat(step.weights[part])).sum()
            loss.backward()
            losses.append(loss.detach())
            self.computed += batch.tokens.numel()
        self._optimizer.step()
        return torch.stack(losses).sum()


# --- rows ---


def steps_of(sizes: Sizes, device: torch.device) -> list[Step]:
    """Return the steps that are taken by turns, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    return [draw(sizes, generator, device) for _ in range(_DRAWS)]


def training_rows(
    kind: str, ways: dict[str, Training], sizes: Sizes, dtype: torch.dtype, pace: Pace, required: Sequence[str]
) -> list[Row]:
    """Return the figures of steps by each way."""
    device = next(iter(ways.values())).device
    measured = measure(ways, device, pace, cold=False, required=required)
    shape = (sizes.prompts, sizes.answers, sizes.prompt, sizes.answer)
    rows = measured_rows(kind, f"{sizes.layers} layers of {sizes.width}", shape, dtype, measured)
    for row in rows:
        way = ways[row["who"]]
        row["peak_gb"] = float(f"{peak_bytes(way, device) / 1e9:.3g}")
        row |= {"computed_tokens": way.computed, "tokens_per_s": round(sizes.tokens / row["ms"] * 1e3)}
        if row["who"] != _NONE:
            row["difference"] = measured.difference(row["who"], PACKED)
    return rows


def _rows(sizes: Sizes, device: torch.device, dtype: torch.dtype, pace: Pace) -> list[Row]:
    """Return the figures of steps, and of what trees add to them and allow."""
    steps = steps_of(sizes, device)
    ways = {who: Training(way, sizes, steps, device, dtype) for who, way in ways_of(sizes).items()}
    rows = training_rows("training", ways, sizes, dtype, pace, (TREES, _NONE, PACKED))
    by_who = {row["who"]: row for row in rows}
    added = _of_trees(ways[TREES], steps, sizes, device, dtype)
    rest = by_who[_NONE]["ms"] - added["packing_ms"]
    bound = rest + sizes.layers * added["allowed_ms"]
    by_who[TREES] |= {name: float(f"{ms:.4g}") for name, ms in {**added, "rest_ms": rest, "bound_ms": bound}.items()}
    by_who[TREES]["backend"] = _backend(ways[TREES].pack(steps[0].sequences), sizes, dtype)
    return rows


def _of_trees(
    training: Training, steps: list[Step], sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return milliseconds of packing, of planning, of a layer's attention, and of what its computed blocks allow.

    Planning is the time that a first forward and backward pass of attention takes more than a later one. Blocks
    allow the time of causal attention of the same kernel on the same rows, times their number by that of its blocks.
    """
    turns = itertools.cycle(steps)
    packing = interleaved(
        {"": lambda: training.pack(next(turns).sequences)}, device, _RUNS, wall_milliseconds
    )[""][0]  # fmt: skip
    batches = [training.pack(step.sequences) for step in itertools.islice(turns, _RUNS + 8)]
    held, new = batches[0].plan(), iter(batches[1:])
    tokens = batches[0].tokens.shape
    causal = plan("causal", tokens[1], batch=len(batches[0].tokens), device=device)
    q, k, v = _qkv(batches[0], sizes, dtype)
    backend = _backend(batches[0], sizes, dtype)

    def passes(mask: Any, **which: Any) -> None:
        out = attention(q, k, v, mask=mask, **which)
        torch.autograd.grad(out, (q, k, v), out)

    calls: dict[str, Callable[[], object]] = {"new": lambda: passes(next(new).plan()), "held": lambda: passes(held)}
    times = interleaved(calls, device, _RUNS, wall_milliseconds)
    calls = {"held": lambda: passes(held), "causal": lambda: passes(causal, backend=backend)}
    alone = interleaved(calls, device, _RUNS, device_milliseconds)
    computed, of_causal = 1 - held.sparsity, 1 - causal.sparsity
    return {
        "packing_ms": packing,
        "planning_ms": max(0.0, times["new"][0] - times["held"][0]),
        "computed_blocks": computed,
        "attention_ms": alone["held"][0],
        "allowed_ms": alone["causal"][0] * computed / of_causal,
    }


def _qkv(batch: trees.TreeBatch, sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return queries, keys and values of a layer, laid out as the model does."""
    shape = *batch.tokens.shape, 3, sizes.heads, sizes.width // sizes.heads
    together = torch.randn(shape, dtype=dtype, device=batch.tokens.device, requires_grad=True)
    return tuple(together.permute(2, 0, 3, 1, 4).unbind())


def _backend(batch: trees.TreeBatch, sizes: Sizes, dtype: torch.dtype) -> str:
    q, k, v = _qkv(batch, sizes, dtype)
    return batch.plan().explain(q, k, v).backend


def _packing_rows(count: int, length: int) -> list[Row]:
    """Return the time of packing many sequences, of which 20 each share half of their tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(32_000, (count // 20, length // 2), generator=generator).repeat_interleave(20, 0)
    answers = torch.randint(32_000, (count, length - length // 2), generator=generator)
    sequences = list(torch.cat([prompts, answers], 1))
    pack = functools.partial(trees.pack, sequences)
    ms, iqr = interleaved({"": pack}, torch.device("cpu"), 3, wall_milliseconds)[""]
    figures = {"ms": float(f"{ms:.4g}"), "iqr": float(f"{iqr:.3g}")}
    return [{"kind": "packing", "case": "", "shape": f"{count}x{length}", "dtype": "int64", "who": TREES, **figures}]


# --- the command ---


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_large = device.type == "cuda" and not quick
    sizes, pace = (Sizes(), PACE) if is_large else (_SMALL, QUICK)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count, length = (40, 100) if quick else (1000, 2000)
    return {
        f"training, {sizes.prompts} prompts of {sizes.prompt}, {sizes.answers} answers of {sizes.answer}": (
            functools.partial(_rows, sizes, device, dtype, pace)
        ),
        f"packing, {count} sequences of {length}": functools.partial(_packing_rows, count, length),
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("what", "kind"), ("shape", "shape"), ("way", "who"), ("backend", "backend"), ("ms", "ms"), ("IQR", "iqr"),
        ("tokens/s", "tokens_per_s"), ("computed", "computed_tokens"), ("peak GB", "peak_gb"),
        ("bound, ms", "bound_ms"), ("packing, ms", "packing_ms"), ("planning, ms", "planning_ms"),
        ("attention, ms", "attention_ms"),
        ("allowed, ms", "allowed_ms"), ("first s", "first_s"), ("compiles later", "compilations"),
        ("waits", "synchronizations"), ("difference", "difference"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the table of one run, and what it shows."""
    training = [r for r in results["rows"] if r["kind"] == "training"]
    by_who = {r["who"]: r for r in training}
    ours, packed = by_who[TREES], by_who[PACKED]
    rows = [
        [
            r["who"], f"{r['ms']:.4g}", f"{r['tokens_per_s']:,}", f"{r['tokens_per_s'] / packed['tokens_per_s']:.2f} x",
            f"{r['computed_tokens']:,}", f"{r['peak_gb']:.3g}", f"{r['first_s']:.1f}", str(r["compilations"]),
            f"{r['difference']:.1e}" if "difference" in r else "",
        ]
        for r in training
    ]  # fmt: skip
    header = ["way", "ms", "tokens of sequences/s", "against packed", "computed tokens", "peak, GB", "first, s"]
    header += ["compiles later", "difference of losses"]
    prompts, answers, prompt, answer = ours["shape"].split("x")
    share = (ours["packing_ms"] + ours["planning_ms"]) / ours["ms"]
    return "\n\n".join([
        f"{measured_on({**results, 'rows': training})}; medians. A model of {ours['case']}; {prompts} prompts of "
        f"{prompt} tokens with {answers} answers of {answer} tokens in the mean; the backend of trees is "
        f"{ours['backend']}.",
        github_table(rows, header),
        f"- Trees train on {ours['tokens_per_s'] / packed['tokens_per_s']:.2f} times the tokens a second of packed "
        "rows. Target: at least 4.",
        f"- Their step takes {ours['ms'] / ours['bound_ms']:.2f} times the {ours['bound_ms']:.4g} ms that its computed "
        f"tokens and blocks allow: {ours['rest_ms']:.4g} ms of the step without attention and packing, and for each "
        f"layer {ours['allowed_ms']:.3g} ms for {ours['computed_blocks']:.1%} of all blocks, at the speed of a causal "
        f"mask in the same kernel. Attention itself takes {ours['attention_ms']:.3g} ms. Target: at most 1.1 times.",
        f"- Packing takes {ours['packing_ms']:.3g} ms and planning {ours['planning_ms']:.3g} ms, {share:.1%} of "
        "a step. Target: below 5 %.",
        *(
            f"- {count} sequences of {length} tokens are packed in {r['ms'] / 1e3:.2f} s. Target: below 2 s."
            for r in results["rows"] if r["kind"] == "packing" for count, length in [r["shape"].split("x")]
        ),
    ])  # fmt: skip


BENCHMARK = Benchmark("trees", _todo, table)
