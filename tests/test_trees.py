"""Trees of sequences: layout against sets of prefixes; logits, losses and gradients against sequences one by one.

The oracles know no trees: they run each sequence by itself, through SDPA, and add the losses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flexmasks
from flexmasks import trees

VOCABULARY, WIDTH, HEADS, LAYERS = 11, 16, 2, 2


def _sequences(largest: int = 24, tokens: int = 4) -> Any:
    """Few different tokens, so that many beginnings are shared, also whole sequences and prefixes of others."""
    return st.lists(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=12), min_size=1, max_size=largest)


# --- the layout ---


@settings(max_examples=500, deadline=None)
@given(sequences=_sequences(), most=st.none() | st.integers(12, 40))
def test_each_sequence_is_a_path(sequences: list[list[int]], most: int | None) -> None:
    batch = trees.pack(sequences, max_tokens=most)
    rows, length = batch.tokens.shape
    assert [len(p) for _, p in batch.places] == [len(s) for s in sequences]
    shares = torch.zeros(rows, length, dtype=torch.int64)
    for sequence, (row, path) in zip(sequences, batch.places, strict=True):
        assert batch.tokens[row, path].tolist() == sequence
        assert batch.parents[row, path].tolist() == [-1, *path[:-1].tolist()]
        assert batch.position_ids[row, path].tolist() == list(range(len(sequence)))
        shares[row, path] += 1
    assert torch.equal(batch.weights, shares)
    for row, count in enumerate(batch.lengths):
        assert bool((batch.weights[row, :count] > 0).all())
        assert not bool(batch.weights[row, count:].any())
    total, prefixes = sum(map(len, sequences)), {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}
    assert batch.saved == pytest.approx(1 - sum(batch.lengths) / total)
    if most is None:
        assert sum(batch.lengths) == len(prefixes)
        assert batch.repeated == 0
    else:
        assert max(batch.lengths) <= most
        assert sum(batch.lengths) <= len(prefixes) + 11 * batch.repeated


def test_few_shared_tokens_are_not_shared() -> None:
    batch = trees.pack([[1, 2, 3], [1, 2, 4], [1, 5]], min_shared=2)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 1, 5]]
    assert batch.parents.tolist() == [[-1, 0, 1, 1, -1, 4]]


def test_prompts_stand_before_sequences() -> None:
    prompt, other = [7, 8], torch.tensor([7, 9])
    batch = trees.pack([[1], [2, 3], [1]], prompts=[prompt, prompt, other])
    assert [batch.tokens[row, path].tolist() for row, path in batch.places] == [[7, 8, 1], [7, 8, 2, 3], [7, 9, 1]]
    assert sum(batch.lengths) == 7


def test_many_sequences_take_few_seconds() -> None:
    prompts = torch.randint(0, 50000, (50, 1000))
    batch = trees.pack([torch.cat([prompts[n % 50], torch.randint(0, 50000, (1000,))]) for n in range(1000)])
    assert sum(batch.lengths) <= 50 * 1000 + 1000 * 1000
    assert batch.saved > 0.47


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([],), ValueError, "at least one sequence"),
        (([[1], []],), ValueError, "no empty sequence; number 1 is"),
        (([[1, -2]],), ValueError, "at least 0, got -2"),
        (([torch.randn(3)],), TypeError, r"integers \[length\], got float32\[3\]"),
        (([[[1]]],), TypeError, r"integers \[length\], got int64\[1, 1\]"),
    ],
)
def test_wrong_sequences(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trees.pack(*arguments)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="at least 3, the longest sequence, got 2"):
        trees.pack([[1, 2, 3]], max_tokens=2)
    with pytest.raises(ValueError, match="`min_shared` must be an int of at least 1, got 0"):
        trees.pack([[1]], min_shared=0)
    with pytest.raises(ValueError, match="one for each of the 1 sequences, got 2"):
        trees.pack([[1]], prompts=[[1], [2]])
    with pytest.raises(TypeError, match="by position"):
        trees.pack([[1]], [[1]])  # type: ignore[misc]
    batch = trees.pack([[1, 2], [1, 3]])
    with pytest.raises(ValueError, match=r"first dimensions are \[1, 3\], got \[1, 2, 5\]"):
        batch.logprobs(torch.randn(1, 2, 5))


# --- models ---


class _Model(nn.Module):
    """A small GPT with learned positions, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def hidden(self, tokens: Tensor, positions: Tensor, mask: Any) -> Tensor:
        """Return hidden states [R, N, D]; mask: for flexmasks, or booleans [N, N] for SDPA."""
        x = self.tokens(tokens) + self.positions(positions)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            heads = qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            if isinstance(mask, Tensor):
                out = F.scaled_dot_product_attention(*heads, attn_mask=mask)
            else:
                out = flexmasks.attention(*heads, mask=mask)
            x = x + out.transpose(1, 2).flatten(2)
            x = x + mlp(x)
        return x  # type: ignore[no-any-return]

    def alone(self, sequence: list[int], window: int | None = None) -> Tensor:
        """Return the log-probabilities of one sequence, which stands alone."""
        n = len(sequence)
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        seen = seen if window is None else seen.triu(-window)
        logits = self.head(self.hidden(torch.tensor([sequence]), torch.arange(n)[None], seen))[0]
        return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(sequence)[1:, None])[:, 0]


def _cross_entropy(logprobs: list[Tensor]) -> Tensor:
    return -torch.stack([x.sum() for x in logprobs]).sum()


def _preferences(logprobs: list[Tensor]) -> Tensor:
    """DPO of neighbours, with a constant in the reference model's place."""
    sums = torch.stack([x.sum() for x in logprobs])
    return -F.logsigmoid(0.1 * (sums[:-1] - sums[1:]) - 0.05).sum()


def _policy(logprobs: list[Tensor]) -> Tensor:
    """GRPO: each branch has its own advantage, also for the tokens that branches share."""
    old = [x.detach() + 0.1 for x in logprobs]
    advantages = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)
    terms = []
    for new, before, advantage in zip(logprobs, old, advantages, strict=True):
        ratio = (new - before).exp()
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / max(1, len(new)))
    return -torch.stack(terms).mean()


_LOSSES = [_cross_entropy, _preferences, _policy]


def _check(sequences: list[list[int]], most: int | None, loss: Any, by_parts: bool, window: int | None) -> None:
    torch.manual_seed(len(sequences))
    model = _Model()
    parameters = list(model.parameters())
    batch = trees.pack(sequences, max_tokens=most)
    mask = batch.mask if window is None else batch.sliding_window(window)
    hidden = model.hidden(batch.tokens, batch.position_ids, batch.plan(mask))
    logprobs = batch.logprobs(hidden, model.head) if by_parts else batch.logprobs(model.head(hidden))
    want = [model.alone(s, window) for s in sequences]
    for x, y in zip(logprobs, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
    got = torch.autograd.grad(loss(logprobs), parameters, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(loss(want), parameters, allow_unused=True, materialize_grads=True)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("examples", [40, pytest.param(500, marks=pytest.mark.campaign)])
def test_losses_and_gradients_are_those_of_sequences_alone(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(
        sequences=_sequences(8),
        most=st.none() | st.integers(12, 30),
        loss=st.sampled_from(_LOSSES),
        by_parts=st.booleans(),
        window=st.none() | st.integers(0, 5),
    )
    def check(sequences: list[list[int]], most: int | None, loss: Any, by_parts: bool, window: int | None) -> None:
        _check(sequences, most, loss, by_parts, window)

    check()


def test_parts_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits by parts of few tokens, as a large vocabulary needs them."""
    monkeypatch.setattr(trees, "_AT_ONCE", 3 * VOCABULARY)
    _check([[1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3], [7]], None, _policy, True, None)


def test_values_of_sequences() -> None:
    batch = trees.pack([[1, 2, 3], [1, 2, 4], [5]], max_tokens=4)
    x = torch.randn(*batch.tokens.shape, 3, requires_grad=True)
    parts = batch.gather(x)
    assert [p.shape for p in parts] == [(3, 3), (3, 3), (1, 3)]
    (grad,) = torch.autograd.grad(sum(p.sum() for p in parts), x)
    assert torch.equal(grad[..., 0].long(), batch.weights)
    assert torch.equal(parts[0][:2], parts[1][:2])


def test_tokens_behind_the_last_reach_nothing() -> None:
    batch = trees.pack([[1, 2, 3], [4]], max_tokens=3)
    assert batch.tokens.shape == (2, 3)
    seen = flexmasks.dense_mask(batch.mask, 3)
    for row, count in enumerate(batch.lengths):
        assert not bool(seen[row, 0, :count, count:].any())
