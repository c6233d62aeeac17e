"""The same bits: a rollout by generate, and a policy gradient step on its packed rows with ratios of exactly 1.

On-policy training multiplies the gradient of each token by exp(logp_train - logp_rollout), which would be 1 if both
forward passes had the same bits. They differ: a rollout decodes token by token in a padded batch, and training reads
all sequences end to end in one row. `flexmasks.invariant()` makes attention the same in both. The rest of a model
treats each token by itself, by operations whose bits depend on the shape of all tokens:

- Matrix products: BLAS chooses tiles, and how it splits sums, by the shape; a single row is another function.
- Means along a row, as in RMSNorm: a GPU divides them among more threads where there are few rows. (`F.rms_norm` and
  log_softmax had the same bits with 1 to 2,048 rows on an H200.)
- Activations: a CPU computes the last elements of a tensor, which fill no vector, by another formula.
- Gradients of linear layers, norms and embeddings are sums over tokens.

So `prepare` runs these modules on chunks of a fixed number of rows: on one shape, no row depends on the others or on
its place. Each sequence starts a chunk; gradients are summed over a sequence first and then added in the order of the
sequences, as `backward` adds those of one loss after the other. Sums and products of elements, and sines of positions,
need nothing. Embeddings and head do not share a weight here: its gradients would be added use by use.
"""

# %%
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import flexmasks
from _measure import DEVICE, DTYPE, ON_GPU, Row, check, finish, start
from flexmasks.integrations import huggingface

try:
    import transformers
except ImportError as missing:
    raise SystemExit(f"{missing}. This recipe needs transformers >= 5.17: pip install -e '.[huggingface]'") from None

huggingface.register()
CHUNK = 256 if ON_GPU else 64  # rows


# %% A function of single tokens, on chunks of one shape. Each sequence starts a chunk, and the last one is padded.
class Chunked(torch.autograd.Function):
    """A function of rows [tokens, ...], each by itself, and its gradients, computed anew in the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], lens: list[int], rows: Tensor, *weights: Tensor) -> Tensor:
        """Compute chunk by chunk; `lens` are the lengths of the sequences, `weights` what `run` learns."""
        ctx.run, ctx.lens = run, lens
        ctx.save_for_backward(rows, *weights)
        return torch.cat([run(padded(rows[chunk]))[: len(rows[chunk])] for s in chunks_of(lens) for chunk in s])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        """Sum the gradients of weights over each sequence, in float32, and then over sequences in their order."""
        rows, *weights = ctx.saved_tensors
        learns = rows.is_floating_point()  # and is no embedding's
        of_rows: list[Tensor] = []
        totals: list[Tensor] = []
        for sequence in chunks_of(ctx.lens):
            sums: list[Tensor] = []
            for chunk in sequence:
                leaf = padded(rows[chunk]).detach().requires_grad_(learns)
                with torch.enable_grad():
                    out = ctx.run(leaf)
                found = list(torch.autograd.grad(out, [leaf] * learns + weights, padded(upstream[chunk])))
                if learns:
                    of_rows.append(found.pop(0)[: len(rows[chunk])])
                sums = [x.float() + y for x, y in zip(found, sums, strict=True)] if sums else [x.float() for x in found]
            rounded = [x.to(weight.dtype) for x, weight in zip(sums, weights, strict=True)]
            totals = [x + y for x, y in zip(totals, rounded, strict=True)] if totals else rounded
        return None, None, torch.cat(of_rows) if learns else None, *totals


def chunks_of(lens: Sequence[int]) -> Iterator[list[slice]]:
    """Yield the chunks of each sequence."""
    first = 0
    for n in lens:
        yield [slice(at, min(at + CHUNK, first + n)) for at in range(first, first + n, CHUNK)]
        first += n


def padded(rows: Tensor) -> Tensor:
    """Fill a chunk up with zeros."""
    return torch.cat([rows, rows.new_zeros(CHUNK - len(rows), *rows.shape[1:])])


# %% The modules of a model that treat each token by itself. The model notes at each pass where its sequences start.
def prepare(model: nn.Module) -> nn.Module:
    """Let linear layers, norms, embeddings and MLPs of a model run on chunks."""
    lens: list[int] = []  # of the sequences of a forward pass, whose position ids start anew in each of them

    def note(model: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        batch, length = inputs["input_ids"].shape
        positions = inputs.get("position_ids", torch.arange(length)).expand(batch, -1)
        starts = (positions.flatten() == 0).nonzero().flatten().tolist()  # none in a step of decoding
        ends = [at for at in starts if at] + [batch * length]
        lens[:] = [end - first for first, end in zip([0, *ends], ends, strict=False)]

    model.register_forward_pre_hook(note, with_kwargs=True)
    for module in of_tokens(model):
        module.forward = functools.partial(by_chunks, module, module.forward, lens)
    return model


def of_tokens(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules that are known to treat each token by itself."""
    for name, child in module.named_children():
        if name == "mlp" or isinstance(child, nn.Linear | nn.Embedding) or "Norm" in type(child).__name__:
            yield child
        else:
            yield from of_tokens(child)


def by_chunks(module: nn.Module, forward: Callable[[Tensor], Any], lens: list[int], x: Tensor) -> Any:
    """Run a module's forward; x is [B, S, ...], or [B, H, S, D] of heads."""
    has_heads = x.ndim == 4 and not x.is_contiguous()  # queries and keys after `.transpose(1, 2)`
    rows = x.transpose(1, 2) if has_heads else x
    weights = [p for p in module.parameters() if p.requires_grad]
    is_tuple = False

    def run(rows: Tensor) -> Tensor:
        nonlocal is_tuple
        out = forward(rows[None])
        is_tuple = isinstance(out, tuple)  # experts return the scores of their router, which only their own loss needs
        return cast(Tensor, (out[0] if is_tuple else out)[0])

    count = rows.shape[:2].numel()  # the head of a prompt gets the last tokens only
    out = Chunked.apply(run, list(lens) if sum(lens) == count else [count], rows.flatten(0, 1), *weights).unflatten(
        0, rows.shape[:2]
    )
    out = out.transpose(1, 2) if has_heads else out
    return (out, None) if is_tuple else out


def log_probs(logits: Tensor, words: Tensor, lens: list[int]) -> Tensor:
    """Return the log-probabilities of words [tokens], in float32, from logits [tokens, V]."""
    all_words: Tensor = Chunked.apply(lambda rows: rows.float().log_softmax(-1), lens, logits)
    return all_words.gather(1, words[:, None])[:, 0]


# %% A model from a config, and a rollout: prompts of different lengths, of which the last is answered alone.
WORDS, ENDS = 999, 40  # words below ENDS end an answer
WIDTH, HEADS, LAYERS = (512, 8, 4) if ON_GPU else (64, 4, 2)
PROMPTS = (300, 17, 129, 256, 90, 200, 1, 64) if ON_GPU else (70, 9, 33, 64, 1, 40)  # words
ANSWERS = 48 if ON_GPU else 24  # words at most
Answered = tuple[list[int], Tensor]  # a prompt with its answer, and the log-probabilities of the answer's words


def make_model() -> Any:
    """Make a Llama from a seed."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, bos_token_id=1,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, pad_token_id=0, eos_token_id=[*range(2, ENDS)],
        tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="flexmasks", dtype=DTYPE)
    return model.to(DEVICE).eval()


def roll_out(model: Any, cache: str) -> list[Answered]:
    """Sample an answer to each prompt."""
    torch.manual_seed(2)
    prompts = [torch.randint(ENDS, WORDS, (n,)) for n in PROMPTS]
    return answered(model, prompts[:-1], cache) + answered(model, prompts[-1:], cache)


def answered(model: Any, prompts: Sequence[Tensor], cache: str) -> list[Answered]:
    """Sample answers in one batch, in which shorter prompts are padded on the left."""
    rows = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True, padding_side="left").to(DEVICE)
    out = model.generate(
        rows, attention_mask=(rows != 0).long(), do_sample=True, max_new_tokens=ANSWERS, cache_implementation=cache,
        disable_compile=True,  # a compiled model has bits of its own
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    found = []
    for n, prompt in enumerate(prompts):
        words = out.sequences[n, rows.shape[1] :]
        is_end = (words < ENDS).long()
        words = words[is_end.cumsum(0) == is_end]  # padding follows
        logits = torch.stack([x[n] for x in out.logits[: len(words)]])
        found.append((prompt.tolist() + words.tolist(), log_probs(logits, words, [len(words)])))
    return found


# %% A step of training on a row that transformers' collator packs: texts end to end, positions start anew in each.
def step(model: Any, rollout: Sequence[Answered], weight: float) -> tuple[Tensor, Tensor]:
    """Add the gradients of some texts; return the ratios of their answers, and their log-probabilities."""
    packed = transformers.DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": text} for text, _ in rollout])
    ids, positions = packed["input_ids"].to(DEVICE), packed["position_ids"].to(DEVICE)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    lens = [len(text) for text, _ in rollout]
    of_texts = log_probs(logits, ids[0].roll(-1), lens).split(lens)  # of the word behind each
    now = torch.cat([x[-len(old) - 1 : -1] for x, (_, old) in zip(of_texts, rollout, strict=True)])
    ratios = (now - torch.cat([old for _, old in rollout])).exp()
    advantages = torch.cat([torch.full_like(old, 1 - 2 * len(old) / ANSWERS) for _, old in rollout])  # let it be brief
    (-(ratios * advantages).sum() * weight).backward()
    return ratios.detach(), now.detach()


def gradients(model: nn.Module) -> Tensor:
    """Take the gradients of all weights, and leave none."""
    taken = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return taken


# %% Compare the log-probabilities of rollout and training: inside the context and outside.
RUNS = (
    # model, cache, is prepared, is inside
    ("flexmasks.invariant(), chunks", "dynamic", True, True),
    ("flexmasks.invariant(), chunks", "static", True, True),
    ("flexmasks.invariant()", "dynamic", False, True),
    ("as it is", "dynamic", False, False),
)


def main() -> None:
    """Roll out, train and compare."""
    file = start(__doc__)
    transformers.logging.set_verbosity_error()
    rows: list[Row] = []
    for what, cache, is_prepared, is_inside in RUNS:
        model = make_model()
        model = prepare(model) if is_prepared else model
        with flexmasks.invariant() if is_inside else nullcontext():
            with torch.no_grad():
                rollout = roll_out(model, cache)
            before = torch.cat([old for _, old in rollout])
            ratios, now = step(model, rollout, 1 / len(before))
            of_packed = gradients(model)
            for one in rollout:
                step(model, [one], 1 / len(before))
            of_each = gradients(model)
        if is_prepared:
            check(f"{cache} cache, log-probabilities of rollout and training", now, before, 0.0)
            check(f"{cache} cache, ratios", ratios, torch.ones_like(ratios), 0.0)
            check("gradients of packed texts, and of one after the other", of_packed, of_each, 0.0)
        rows.append(
            {
                "model": what,
                "cache": cache,
                "largest difference of log-probabilities": float((now - before).abs().max()),
                "ratios of exactly 1, %": round(100 * float((ratios == 1).float().mean()), 1),
                "largest difference of gradients": float((of_packed - of_each).abs().max()),
            }
        )
    finish(rows, file, f"{len(before)} words in answers to {len(rollout)} prompts.")


if __name__ == "__main__":
    main()
