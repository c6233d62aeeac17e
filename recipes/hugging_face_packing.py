"""Packed fine-tuning by Hugging Face's Trainer, with flexmasks, SDPA and flex_attention.

A batch of documents is laid end to end in one row, with nothing padded: transformers' DataCollatorWithFlattening does
that. The positions, which start at 0 in each document, tell the model where documents end. One word chooses the
attention of the model, attn_implementation="flexmasks", and nothing else in the training changes. A Llama has causal
attention in all layers, and a Gemma 3 has windows in most of them. Both are made from a config and a seed.
"""

# %%
from __future__ import annotations

import os
import random
import tempfile
import time
from typing import Any, NamedTuple

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # Trainer spreads batches over all GPUs, and a batch has one row

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from _measure import DEVICE, DTYPE, ON_GPU, Row, check, finish, start
from flexmasks.bench.clock import synchronize
from flexmasks.integrations import huggingface

try:
    import accelerate as accelerate  # transformers' Trainer needs it
    import transformers
except ImportError as missing:
    raise SystemExit(
        f"{missing}. This recipe needs transformers >= 5.17 and accelerate: pip install -e '.[huggingface]'"
    ) from None

# %% This line makes the word known to transformers.
huggingface.register()


# %% A model has a small size for the checks, in float32, and a larger one for the times, on a GPU in bfloat16.
class Sizes(NamedTuple):
    """Sizes of the model and its batches."""

    width: int
    heads: int
    kv_heads: int
    layers: int
    window: int  # of Gemma 3: the number of keys that a token sees
    length: int  # packed tokens in a row
    documents: int  # in a row
    steps: int


WORDS = 64
CHECKED = Sizes(64, 4, 2, 3, 16, 512, 12, 8)
TIMED = Sizes(2048, 32, 8, 6, 1024, 16384, 24, 12) if ON_GPU else Sizes(64, 4, 2, 3, 64, 2048, 24, 6)
CONFIGS = {"Llama": transformers.LlamaConfig, "Gemma 3": transformers.Gemma3TextConfig}


def make_model(name: str, sizes: Sizes, attention: str, dtype: torch.dtype) -> nn.Module:
    """Make a model from a config and a seed: all attention functions get the same weights."""
    windows = {
        "sliding_window": sizes.window,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * (sizes.layers // 3),
    }
    config = CONFIGS[name](
        vocab_size=WORDS,
        hidden_size=sizes.width,
        intermediate_size=4 * sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.width // sizes.heads,
        max_position_embeddings=sizes.length,
        pad_token_id=0,
        **(windows if name == "Gemma 3" else {}),
    )
    torch.manual_seed(0)
    with DEVICE:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=dtype
        )
    return model


# %% Code generates the text. Every word has a word that mostly follows it, and there are four languages. A model that
# knows the language of a document, which earlier words of the document tell, can predict the next word.
def make_documents(sizes: Sizes) -> list[dict[str, list[int]]]:
    """Make random documents; those of a step have `sizes.length` words together."""
    generator = random.Random(0)
    languages = [generator.sample(range(1, WORDS), WORDS - 1) for _ in range(4)]
    documents = []
    for _ in range(sizes.steps):
        cuts = sorted(generator.sample(range(1, sizes.length), sizes.documents - 1))
        for begin, end in zip([0, *cuts], [*cuts, sizes.length], strict=True):
            follows = generator.choice(languages)
            text = [generator.randrange(1, WORDS)]
            for _ in range(begin + 1, end):
                is_stray = generator.random() < 0.1
                text.append(generator.randrange(1, WORDS) if is_stray else follows[text[-1] - 1])
            documents.append({"input_ids": text})
    return documents


# %% The same documents without packing: a row for each of them, padded to the longest one.
def pad(documents: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Make a batch of padded rows, with the labels of the packed row: -100 for the first word of a document."""
    texts = [torch.tensor(document["input_ids"]) for document in documents]
    words = pad_sequence(texts, batch_first=True)
    is_real = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    labels = words.masked_fill(is_real == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": words, "attention_mask": is_real, "labels": labels}


# %% Trainer trains. A callback takes the times, and Trainer's log has the losses.
class Clock(transformers.TrainerCallback):
    """Seconds of each step: forward, backward and optimizer, without the time to make the batch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.begin = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        synchronize(DEVICE)
        self.begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize(DEVICE)
        self.seconds.append(time.perf_counter() - self.begin)


class Run(NamedTuple):
    """Loss and seconds of each step, and peak memory in bytes."""

    losses: Tensor
    seconds: list[float]
    peak: int | None


def train(name: str, sizes: Sizes, attention: str, dtype: torch.dtype, packed: bool = True) -> Run:
    """Train a model; all models start from the same weights and see the same documents."""
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=make_model(name, sizes, attention, dtype),
            args=transformers.TrainingArguments(
                folder,
                max_steps=sizes.steps,
                per_device_train_batch_size=sizes.documents,
                train_sampling_strategy="sequential",  # the documents of a step stay together
                learning_rate=2e-4 if sizes.width > 1000 else 2e-3,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=not ON_GPU,
            ),
            train_dataset=make_documents(sizes),
            data_collator=transformers.DataCollatorWithFlattening() if packed else pad,
            callbacks=[clock],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(torch.tensor(losses), clock.seconds, torch.cuda.max_memory_allocated() if ON_GPU else None)


# %% Compare the losses with those of eager attention, which computes all scores and hides those of other documents, and
# with those of documents that are not packed. The last losses have gone through all the steps before them.
def compare(name: str) -> None:
    """Check the losses of all steps, in float32."""
    ours = train(name, CHECKED, "flexmasks", torch.float32).losses
    assert len(ours) == CHECKED.steps
    for what, attention, packed in (
        ("eager, packed", "eager", True),
        ("eager, padded", "eager", False),
        ("flexmasks, padded", "flexmasks", False),
    ):
        check(
            f"{name}: losses of flexmasks, packed, and of {what}",
            ours,
            train(name, CHECKED, attention, torch.float32, packed).losses,
            1e-4,
        )
    print(f"loss of {name}: " + ", ".join(f"{loss:.3f}" for loss in ours.tolist()) + "\n")
    assert ours[-1] < ours[0], "the loss does not fall"


# %% Time a training step.
def measure(name: str) -> list[Row]:
    """Return the times of a step with each attention function."""
    rows: list[Row] = []
    runs: dict[str, Run] = {}
    for attention in ("flexmasks", "sdpa", "flex_attention") if ON_GPU else ("flexmasks", "sdpa"):
        run = runs[attention] = train(name, TIMED, attention, DTYPE)
        median = sorted(run.seconds[TIMED.steps // 2 :])[TIMED.steps // 4]
        row: Row = {
            "model": name,
            "attn_implementation": attention,
            "ms for a step": float(f"{median * 1e3:.4g}"),
            "tokens a second": round(TIMED.length / median),
            "first step, s": round(run.seconds[0], 2),
            "last loss": round(float(run.losses[-1]), 4),
        }
        rows.append(row if run.peak is None else row | {"peak MB": round(run.peak / 1e6)})
        if attention != "flexmasks":
            check(
                f"{name}: losses of {attention} and flexmasks, at the size that is timed",
                run.losses,
                runs["flexmasks"].losses,
                3e-2 if ON_GPU else 1e-4,
            )
    return rows


def main() -> None:
    """Compare and measure both models."""
    file = start(__doc__)
    transformers.logging.set_verbosity_error()
    for name in CONFIGS:
        compare(name)
    rows = [row for name in CONFIGS for row in measure(name)]
    note = f"Rows of {TIMED.length} tokens in {TIMED.documents} documents."
    if not ON_GPU:
        note += " flex_attention is left out: it has no backward pass on a CPU.\n"
        note += "At this size attention is a small part of a step; on a GPU rows have 16,384 tokens."
    finish(rows, file, note)


if __name__ == "__main__":
    main()
