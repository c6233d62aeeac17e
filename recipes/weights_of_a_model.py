"""The attention weights of a Hugging Face model, drawn: which head learned to look one period back.

A small Llama is trained on lines of words that repeat after a period, so that the next word is the one a period ago.
`output_attentions=True` returns the weights of all layers, equal to those of eager attention, and a picture shows the
head that looks there. In a long context that memory is not there: an attention function of a few lines keeps the
weights of the last rows alone, and their sums per key, which caches read that keep the keys with the most attention.
"""

# %%
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import flexmasks
from _measure import DEVICE, Row, check, finish, start
from flexmasks.integrations import huggingface

try:
    import transformers
except ImportError as missing:
    raise SystemExit(f"{missing}. This recipe needs transformers >= 5.17: pip install -e '.[huggingface]'") from None

PERIOD, LENGTH, WORDS, LAST = 12, 60, 40, 8
huggingface.register()


# %% Lines of random words, repeated. Everything is made from a seed; nothing is downloaded.
def lines(count: int) -> Tensor:
    """Return lines of words that repeat after a period, int64 [count, LENGTH]."""
    return torch.randint(WORDS, (count, PERIOD), device=DEVICE).repeat(1, LENGTH // PERIOD)


def trained(steps: int = 120) -> Any:
    """Train a model of two layers with four heads each."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flexmasks")
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        ids = lines(16)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, steps - 1):
            print(f"step {step}: loss {loss.item():.2f}")
    return model.eval()


# %% All weights, by the argument that models take for it. `watch` keeps them by the names of the layers.
@torch.no_grad()
def all_weights(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return the weights of each layer, [batch, heads, queries, keys], which are also those of eager attention."""
    seen = flexmasks.watch(model, input_ids=ids, output_attentions=True)
    assert not seen.unseen
    model.set_attn_implementation("eager")
    for (name, weights), wanted in zip(
        seen.weights.items(), model(ids, output_attentions=True).attentions, strict=True
    ):
        check(f"{name}: weights of flexmasks and eager", weights, wanted, 1e-4)
    model.set_attn_implementation("flexmasks")
    return seen.weights


# %% Some of the weights, at any length: an attention function that keeps what it wants before it attends.
KEPT: list[tuple[Tensor, Tensor]] = []


def keeping(module: nn.Module, query: Tensor, key: Tensor, *others: Any, **options: Any) -> Any:
    """Attend by flexmasks, and keep the weights of the last rows and their sums per key."""
    call: dict[str, Any] = {"mask": "causal", "scale": options["scaling"], "rows": slice(-LAST, None)}
    KEPT.append((flexmasks.weights(query, key, **call), flexmasks.key_sums(query, key, **call)))
    return ATTEND(module, query, key, *others, **options)


ATTEND = transformers.AttentionInterface()["flexmasks"]
transformers.AttentionInterface.register("keeping", keeping)
transformers.AttentionMaskInterface.register("keeping", transformers.AttentionMaskInterface()["flexmasks"])


@torch.no_grad()
def check_last_rows(model: Any, ids: Tensor, weights: dict[str, Tensor]) -> None:
    """Check what `keeping` kept, which is never more than the last rows."""
    model.set_attn_implementation("keeping")
    model(ids)
    for (name, wanted), (rows, sums) in zip(weights.items(), KEPT, strict=True):
        check(f"{name}: the last {LAST} rows", rows, wanted[:, :, -LAST:], 1e-4)
        check(f"{name}: their sums per key", sums, wanted[:, :, -LAST:].sum(2), 1e-4)


# %% What each head does: where the word a period ago stands that comes next, how spread its weights are.
def figures(weights: dict[str, Tensor]) -> list[Row]:
    """Return a row of figures for each head."""
    rows: list[Row] = []
    for layer, of_layer in enumerate(weights.values()):
        later = of_layer[:, :, PERIOD:]  # rows that have seen a whole period
        back = later.diagonal(1, -2, -1)  # row PERIOD + i sees key i + 1, whose word comes next
        entropy = -(later * later.clamp(min=1e-30).log()).sum(-1)
        rows += [
            {
                "layer": layer,
                "head": head,
                "weight a period back": round(float(back[:, head].mean()), 4),
                "weight of the first key": round(float(later[:, head, :, 0].mean()), 4),
                "entropy, nats": round(float(entropy[:, head].mean()), 3),
            }
            for head in range(of_layer.shape[1])
        ]
    return rows


def main() -> None:
    """Train, compare and draw."""
    file = start(__doc__)
    transformers.logging.set_verbosity_error()
    model, ids = trained(), lines(2)
    weights = all_weights(model, ids)
    check_last_rows(model, ids, weights)
    rows = figures(weights)
    best = max(rows, key=lambda row: row["weight a period back"])
    print(f"\nlayer {best['layer']}, head {best['head']}, which looks {PERIOD - 1} words back:\n")
    flexmasks.draw(list(weights.values())[int(best["layer"])][0], h=int(best["head"])).show(60)
    finish(rows, file, f"The next word is the one {PERIOD} words before it, {PERIOD - 1} words before the query.")


if __name__ == "__main__":
    main()
