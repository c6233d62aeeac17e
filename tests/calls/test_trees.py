"""Trees of sequences: layout against sets of prefixes; logits, losses and gradients against sequences one by one.

The oracles know no trees: they run each sequence by itself, through SDPA, and add the losses.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import one_in
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


class _Made:
    """A sequence that makes its items when they are asked for."""

    def __init__(self, items: list[list[int]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, n: int) -> list[int]:
        return list(self.items[n])


@pytest.mark.parametrize("kind_of_prompts", [None, list, torch.tensor, np.array, _Made, iter])
@pytest.mark.parametrize("kind", [list, torch.tensor, np.array, _Made, iter])
@given(rows=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_sequences_of_any_kind(kind: Any, kind_of_prompts: Any, rows: list[list[int]]) -> None:
    prompts, own = [r[:2] for r in rows], [r[2:] for r in rows]
    batch = trees.pack(kind(own), prompts=None if kind_of_prompts is None else kind_of_prompts(prompts))
    want = own if kind_of_prompts is None else rows
    assert [batch.tokens[row, path].tolist() for row, path in batch.places] == want


def test_devices() -> None:
    """The places of all sequences go to a device at once."""
    copies: list[int] = []

    class Copies(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copies.extend([1] if function is Tensor.to else [])
            return function(*args, **(kwargs or {}))

    rows = torch.arange(40).view(20, 2)
    with Copies():
        batch = trees.pack(rows, mask=rows >= 0, device="meta")
    assert len(copies) < 10
    tensors = (
        batch.tokens,
        batch.parents,
        batch.position_ids,
        batch.weights,
        batch.kept,
        *(p for _, p in batch.places),
    )
    assert {x.device.type for x in tensors if x is not None} == {"meta"}
    assert [len(p) for _, p in batch.places] == [2] * 20
    assert trees.pack(rows).to("cpu").places[3][1].tolist() == [6, 7]


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
        (([[1, -2]],), ValueError, "at least 0 .*, got tokens from -2 to 1"),
        (([torch.randn(3)],), TypeError, r"integers \[length\], got float32\[3\]"),
        (([[[1]]],), TypeError, r"integers \[length\], got \[\[1\]\]"),
        (([[[1], [2, 3]]],), TypeError, r"integers \[length\], got \[\[1\], \[2, 3\]\]"),
        (([3, 4],), TypeError, r"integers \[length\], got 3"),
        (([None],), TypeError, r"integers \[length\], got None"),
        (([np.ones(3)],), TypeError, r"integers \[length\], got a NumPy array float64\[3\]"),
        (([torch.ones(3).bfloat16()],), TypeError, r"integers \[length\], got bfloat16\[3\]"),
        (([torch.ones(3, device="meta").long()],), TypeError, r"integers \[length\], got int64\[3\] on meta"),
        (([torch.eye(2).long().to_sparse()],), TypeError, r"integers \[length\], got int64\[2, 2\]"),
        (([[2**63]],), ValueError, f"below 2\\*\\*63, got tokens from {2**63} to {2**63}"),
        (([[2**64]],), TypeError, r"integers \[length\], got \[18446744073709551616\]"),
        ((None,), TypeError, "`sequences` must be a list of sequences of tokens, got None"),
        ((torch.tensor(3),), TypeError, r"`sequences` must be a list of sequences of tokens, got int64\[\]"),
        (([[1]], [[1]]), TypeError, "by position"),
        (([[1, 2, 3]], {"max_tokens": 2}), ValueError, "at least 3, the longest sequence, got 2"),
        (([[1]], {"min_shared": 0}), ValueError, "`min_shared` must be an int of at least 1, got 0"),
        (([[1]], {"prompts": [[1], [2]]}), ValueError, "one for each of the 1 sequences, got 2"),
        (([[1]], {"prompts": 7}), TypeError, "`prompts` must be a list of sequences of tokens, got 7"),
    ],
)
def test_wrong_sequences(arguments: Any, error: type[Exception], message: str) -> None:
    by_name = arguments[-1] if isinstance(arguments[-1], dict) else {}
    with pytest.raises(error, match=message):
        trees.pack(*(x for x in arguments if x is not by_name), **by_name)


_NESTED = torch.nested.nested_tensor([torch.randn(3, 5)])


def test_wrong_logits() -> None:
    batch = trees.pack([[1, 2], [1, 3]])
    for wrong in (torch.randn(1, 2, 5), torch.randn(1, 3), torch.randn(1, 3, 2, 5), _NESTED):
        with pytest.raises(ValueError, match=r"logprobs: .* of 3 dimensions whose first dimensions are \[1, 3\], got"):
            batch.logprobs(wrong)
        with pytest.raises(ValueError, match=r"logprobs: .* of 3 dimensions whose first dimensions are \[1, 3\], got"):
            batch.logprobs(wrong, nn.Identity())
    with pytest.raises(ValueError, match=r"logits \[n, V\] of hidden states \[n, D\] = \[1, 5\], it made float32\[1\]"):
        batch.logprobs(torch.randn(1, 3, 5), lambda x: x.sum(1))
    for arguments in ((torch.randn(1, 3, 3),), (torch.randn(1, 3, 5), nn.Linear(5, 3))):
        with pytest.raises(ValueError, match=r"logits of 3 tokens, .* got 3"):
            batch.logprobs(*arguments)
    assert [len(x) for x in trees.pack([[9, 2], [9, 1]]).logprobs(torch.randn(1, 3, 3))] == [1, 1]  # 9 has no logit


@pytest.mark.parametrize("window", [-1, 2.5, True, "a", torch.tensor(2)])
def test_wrong_windows(window: Any) -> None:
    batch = trees.pack([[1, 2], [1, 3]])
    for call in (batch.sliding_window, lambda w: batch.plan(window=w)):
        with pytest.raises(ValueError, match="`window` must be an int of at least 0, got"):
            call(window)
    assert batch.plan(window=np.int64(1)) is batch.plan(window=1)  # type: ignore[arg-type]


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
    hidden = model.hidden(batch.tokens, batch.position_ids, batch.plan(window=window))
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


@settings(max_examples=30, deadline=None)
@given(
    sequences=_sequences(), most=st.none() | st.integers(12, 40), size=st.integers(1, 5), room=st.integers(0, 6),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_decoding_from_shared_pages(
    sequences: list[list[int]], most: int | None, size: int, room: int, seed: int
) -> None:
    """Each sequence attends to its own keys, also to new ones, and equal full pages stand once."""
    generator = torch.Generator().manual_seed(seed)
    most = None if most is None else max(most, *map(len, sequences))
    batch = trees.pack(sequences, max_tokens=most)
    pages = batch.pages(size, room=room)
    assert pages.kv_lens.tolist() == list(map(len, sequences))
    k, v = torch.randn(2, len(batch.tokens), 2, batch.tokens.shape[1], 8, generator=generator, dtype=torch.float64)
    caches = pages.filled(k), pages.filled(v)
    alone = [[x[row][:, places] for x in (k, v)] for row, places in batch.places]
    lens = pages.kv_lens.clone()
    for step in range(1 + room):
        q = torch.randn(len(sequences), 4, 1, 8, generator=generator, dtype=torch.float64)
        out = flexmasks.paged_attention(q, *caches, pages.page_table, lens, backend="reference")
        for n, (keys, values) in enumerate(alone):
            want = torch.nn.functional.scaled_dot_product_attention(q[n], keys, values, enable_gqa=True)
            assert torch.allclose(out[n], want)
        if step < room:  # each sequence goes on with a token of its own
            new = torch.randn(2, len(sequences), 2, 8, generator=generator, dtype=torch.float64)
            for n, length in enumerate(lens.tolist()):
                for cache, x in zip(caches, new, strict=True):
                    cache[pages.page_table[n, length // size], length % size] = x[n]
                alone[n] = [torch.cat([x, y[n][:, None]], 1) for x, y in zip(alone[n], new, strict=True)]
            lens += 1
    beginnings = {
        (row, *places[:end].tolist()) for row, places in batch.places for end in range(size, len(places) + 1, size)
    }
    own = sum(-(-(len(s) + room) // size) - len(s) // size for s in sequences)
    assert len(pages.places) == len(beginnings) + own


def test_pages_of_wrong_sizes() -> None:
    batch = trees.pack([[1, 2, 3]])
    for size in (0, True, 2.0):
        with pytest.raises(ValueError, match=f"`page_size` must be an int of at least 1, got {size}"):
            batch.pages(size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`room` must be an int of at least 0, got -1"):
        batch.pages(2, room=-1)
    for shape in ((1, 2, 2, 4), (1, 2, 4, 4), (2, 2, 3, 4), (1, 3, 4)):
        with pytest.raises(ValueError, match=r"\[R, H, N, D\] = \[1, H, 3, D\], got float32"):
            batch.pages(2).filled(torch.randn(shape))


def test_tokens_behind_the_last_reach_nothing() -> None:
    batch = trees.pack([[1, 2, 3], [4]], max_tokens=3)
    assert batch.tokens.shape == (2, 3)
    seen = flexmasks.dense_mask(batch.mask, 3)
    for row, count in enumerate(batch.lengths):
        assert not bool(seen[row, 0, :count, count:].any())


# --- padded rows ---


def _padded(sequences: list[list[int]], sides: list[int]) -> tuple[Tensor, Tensor]:
    """Return rows and their mask, each with so many tokens of padding before its sequence; a number stands there."""
    length = max(side + len(s) for s, side in zip(sequences, sides, strict=True))
    rows, mask = torch.full((len(sequences), length), 3), torch.zeros(len(sequences), length, dtype=torch.int64)
    for n, (sequence, side) in enumerate(zip(sequences, sides, strict=True)):
        rows[n, side : side + len(sequence)], mask[n, side : side + len(sequence)] = torch.tensor(sequence), 1
    return rows, mask


@settings(max_examples=15, deadline=None)
@given(
    sequences=_sequences(6), most=st.none() | st.integers(12, 30), seed=st.integers(0, 2**31), by_parts=st.booleans()
)  # fmt: skip
def test_padded_rows(sequences: list[list[int]], most: int | None, seed: int, by_parts: bool) -> None:
    """Log-probabilities and entropies of wanted tokens, and their gradients, against one sequence after the other."""
    torch.manual_seed(seed)
    rows, mask = _padded(sequences, torch.randint(4, (len(sequences),)).tolist())
    wanted = mask * torch.randint(2, mask.shape)
    model = _Model()
    batch = trees.pack(rows, mask=mask, max_tokens=most)
    hidden = model.hidden(batch.tokens, batch.position_ids, batch.plan())
    given: Any = (hidden, model.head) if by_parts else (model.head(hidden),)
    got = [batch.padded(x) for x in batch.logprobs_and_entropies(*given, wanted=wanted)]
    assert torch.equal(got[0], batch.padded(batch.logprobs(*given, wanted=wanted)))
    assert torch.equal(batch.padded(batch.gather(batch.tokens), fill=3), rows)

    want = torch.zeros(2, *rows.shape, dtype=torch.float64)
    for n, sequence in enumerate(sequences):
        (places,) = mask[n].nonzero(as_tuple=True)
        seen = torch.ones(len(sequence), len(sequence), dtype=torch.bool).tril()
        hidden = model.hidden(torch.tensor([sequence]), torch.arange(len(sequence))[None], seen)
        probabilities = model.head(hidden)[0, :-1].softmax(-1)
        of_tokens = probabilities.gather(1, torch.tensor(sequence)[1:, None])[:, 0].log()
        want[0, n, places[1:]], want[1, n, places[1:]] = of_tokens, torch.special.entr(probabilities).sum(1)
    weights = torch.randn(2, *rows.shape, dtype=torch.float64) * wanted
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x * wanted, y * wanted, rtol=0, atol=1e-10)
    if not bool((wanted * (mask.cumsum(1) > 1)).any()):
        assert not bool(got[0].any())
        return
    grads = [
        torch.autograd.grad((x * weights).sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)
        for x in (torch.stack(got), want)
    ]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_tokens_that_nobody_wants_cost_no_logits() -> None:
    rows = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])
    batch = trees.pack(rows, mask=torch.ones_like(rows))
    seen: list[int] = []

    def head(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x

    wanted = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]])
    found = batch.logprobs(torch.randn(1, 5, 10), head, wanted=wanted)
    assert seen == [1, 3]  # the first call asks for the vocabulary
    assert found[0][0] == found[1][0] == 0


def test_entropies_of_words_that_are_ruled_out() -> None:
    batch = trees.pack([[1, 2], [1, 3]])
    logits = torch.tensor([-torch.inf, 0, 0, 0, -torch.inf]).repeat(1, 3, 1).requires_grad_()
    _, entropies = batch.logprobs_and_entropies(logits)
    torch.testing.assert_close(torch.cat(entropies), torch.full((2,), 3.0).log())
    (grad,) = torch.autograd.grad(torch.cat(entropies).sum(), logits)
    assert bool(grad.isfinite().all())


def test_wrong_padded_rows() -> None:
    rows = torch.tensor([[1, 2, 3], [1, 2, 4]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    shapes = r"tensors \[count, length\] of one shape, without `prompts`, got "
    wrong: tuple[Any, ...] = ((rows.tolist(), mask), (rows, mask[:, :2]), (rows[0], mask[0]), (rows, [1]))
    for sequences, kept in wrong:
        with pytest.raises(ValueError, match=shapes):
            trees.pack(sequences, mask=kept)
    with pytest.raises(ValueError, match=shapes):
        trees.pack(rows, mask=mask, prompts=[[5], [6]])
    with pytest.raises(ValueError, match="no empty sequence; number 1 is"):
        trees.pack(rows, mask=mask * torch.tensor([[1], [0]]))
    batch, plain = trees.pack(rows, mask=mask), trees.pack([[1, 2, 3], [1, 2]])
    logits = torch.randn(1, 3, 9)
    for call in (lambda: plain.padded(plain.gather(plain.tokens)), lambda: plain.logprobs(logits, wanted=mask)):
        with pytest.raises(ValueError, match=r"padded rows; write trees.pack\(rows, mask=attention_mask\)"):
            call()
    with pytest.raises(ValueError, match=r"`wanted` must be bool or 0 and 1 \[2, 3\], .* got int64\[2, 2\]"):
        batch.logprobs_and_entropies(logits, wanted=mask[:, :2])
    with pytest.raises(ValueError, match=r"one tensor \[length\] or \[length - 1\] for each of 2 sequences"):
        batch.padded([torch.ones(3), torch.ones(1)])


# --- models of transformers ---

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "flexmasks",
}  # fmt: skip
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Mistral": ("MistralForCausalLM", {"sliding_window": 3}),
    "Gemma3": (
        "Gemma3ForCausalLM",
        {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "GptOss": (
        "GptOssForCausalLM",
        {"head_dim": 8, "sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "Llama4": (
        "Llama4ForCausalLM",
        {"head_dim": 8, "attention_chunk_size": 3, "intermediate_size_mlp": 24, "moe_layers": []}
        | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    ),
}


def _transformer(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    from flexmasks.integrations import huggingface

    huggingface.register()
    torch.manual_seed(1)
    name, more = _KINDS[kind]
    model_class = getattr(transformers, name)
    model = model_class._from_config(model_class.config_class(**{**_SMALL, **more}))
    return model if kind == "GptOss" else model.double()  # its experts take no float64


_TREES = [[[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 9], [1, 2, 3, 4, 5, 6]], [[3, 3, 3, 1], [3, 3, 2, 2, 2, 2, 2]]]


def _of_sequences(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    found = []
    for s in sequences:
        logits = model(torch.tensor([s]), use_cache=False).logits[0]
        found.append(logits.log_softmax(-1)[:-1].gather(1, torch.tensor(s)[1:, None])[:, 0])
    return found


def _of_trees(model: Any, batch: trees.TreeBatch) -> list[Tensor]:
    arguments = {"position_ids": batch.position_ids, "attention_mask": batch.block_mask(), "use_cache": False}
    return batch.logprobs(model(batch.tokens, **arguments).logits)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Gemma3", "GptOss"])
def test_models_of_transformers(kind: str, checkpoints: bool) -> None:
    """Log-probabilities and gradients, with windows along each path, sinks, and activation checkpoints."""
    model = _transformer(kind).train()
    if checkpoints:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    tolerance = 1e-10 if model.dtype == torch.float64 else 1e-5
    for sequences in _TREES:
        got, want = _of_trees(model, trees.pack(sequences, max_tokens=10)), _of_sequences(model, sequences)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=tolerance)
        losses = [-_policy(found) for found in (got, want)]
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = [torch.autograd.grad(x, parameters, allow_unused=True, materialize_grads=True) for x in losses]
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)  # its norms compute in float32


@pytest.mark.parametrize(
    ("kind", "given"), one_in(6, list(itertools.product(["Llama", "Gemma3", "Llama4"], ["mask", "plan"])))
)
def test_a_mask_in_place_of_the_models_own(kind: str, given: str) -> None:
    model = _transformer(kind).eval()
    batch = trees.pack(_TREES[0], max_tokens=12)
    arguments = {"position_ids": batch.position_ids, "use_cache": False}
    mask = batch.mask if given == "mask" else batch.plan()
    want = _of_sequences(model, _TREES[0])
    for run in (model, torch.compile(model, backend="eager")):
        got = batch.logprobs(run(batch.tokens, attention_mask=mask, **arguments).logits)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6 if kind == "Llama4" else 1e-10)


def test_a_mask_keeps_the_windows_of_layers() -> None:
    """A mask that sees both ways in a model with windows."""
    model = _transformer("Gemma3").eval()
    ids, places = torch.tensor([[0] * 9 + [1] * 11]), torch.arange(20)
    tokens = torch.randint(VOCABULARY, (1, 20))
    got = model(tokens, attention_mask=flexmasks.get_mask("document", document_ids=ids), use_cache=False).logits
    same = (ids[:, :, None] == ids[:, None])[:, None]
    near = places[:, None] - places < model.config.sliding_window
    own = {"full_attention": same, "sliding_attention": same & near}
    want = model(tokens, attention_mask=own, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_a_mask_is_not_for_a_cache() -> None:
    model, tokens = _transformer("Llama").eval(), torch.ones(1, 4, dtype=torch.int64)
    first = model(tokens, attention_mask=flexmasks.get_mask("full"), use_cache=True)
    with pytest.raises(ValueError, match="is for whole texts without a key-value cache"):
        model(tokens, attention_mask=flexmasks.get_mask("full"), past_key_values=first.past_key_values)


@pytest.mark.slow
def test_new_trees_compile_nothing() -> None:
    """A compiled model of transformers takes another batch of the same sizes in the same graph."""
    model = _transformer("Gemma3").eval()
    compiled = torch.compile(model, backend="eager")
    first = [[1, 2, 3, 4], [1, 2, 5], [1, 6]]
    with torch.no_grad():
        _of_trees(compiled, trees.pack(first))
        torch._dynamo.config.error_on_recompile = True
        try:
            for sequences in ([[4, 2, 3, 4], [4, 2, 5], [4, 6]], [[4, 2, 3], [4, 2, 5], [4, 2, 1, 1]]):
                batch = trees.pack(sequences)
                assert batch.tokens.shape == (1, 6)
                for x, y in zip(_of_trees(compiled, batch), _of_sequences(model, sequences), strict=True):
                    torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
        finally:
            torch._dynamo.config.error_on_recompile = False
