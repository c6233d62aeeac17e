"""`python recipes/benchmark.py models`: Hugging Face models with real shapes and random weights."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.loops import Draws, draw_ids
from benchmarks.results import Benchmark, Row, measured_on, text_table
from benchmarks.steps import QUICK, Pace, measure, measured_rows
from benchmarks.steps_tables import OURS, github_table

_PACE = Pace(5, 5, 1, 10.0)
_VOCABULARY = 32768


class Shape(NamedTuple):
    """A model with the shapes of a known one, and some of its layers."""

    name: str
    kind: str  # "llama", "gemma2" or "gpt_oss", as transformers names it
    sizes: dict[str, Any]  # of the config
    peers: tuple[str, ...]  # implementations of attention in transformers


_MODELS = [
    Shape(
        "Llama 3.2 1B",
        "llama",
        {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        },
        ("sdpa", "flex_attention"),
    ),
    Shape(
        "Gemma 2 2B, 13 layers",
        "gemma2",
        {
            "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 13, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 131072,
        },
        ("eager", "flex_attention"),
    ),
    Shape(
        "GPT-OSS 20B, 4 layers of 4 experts",
        "gpt_oss",
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 4,
            "num_experts_per_tok": 2, "max_position_embeddings": 131072,
        },
        ("eager", "flex_attention"),
    ),
]  # fmt: skip
_SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20, "num_local_experts": 2, "num_experts_per_tok": 1,
}  # fmt: skip
_WAYS = ("eager", "compiled")
_TRAINED = ((8192, 600), (32768, 600), (32768, 8192))  # tokens of a row, and of a document in the mean
_NONE = "no attention"


def _no_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Return sums in place of attention, to time the rest of a model."""
    added = (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query + added).transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _model(shape: Shape, implementation: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a model with the same weights for every implementation."""
    import transformers

    from flexmasks.integrations import huggingface

    make_config: Any = transformers.CONFIG_MAPPING[shape.kind]
    config = make_config(
        vocab_size=_VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, attention_dropout=0.0, **shape.sizes
    )
    huggingface.register()
    transformers.AttentionInterface.register(_NONE, _no_attention)
    transformers.AttentionMaskInterface.register(_NONE, _no_mask)
    config._attn_implementation = implementation
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def _transformers_version() -> str:
    return importlib.metadata.version("transformers")


# --- training ---


class _Training:
    """A model with its optimizer.

    A call is one training step on a row of packed documents, and returns the loss.
    """

    def __init__(
        self, shape: Shape, implementation: str, way: str, sizes: tuple[int, int], device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        length, document = sizes
        self._model = _model(shape, implementation, device, dtype).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self._run = torch.compile(self._model, dynamic=False) if way == "compiled" else self._model
        generator = torch.Generator(device).manual_seed(0)
        self._words = torch.randint(3, _VOCABULARY, (1, length), generator=generator, device=device)
        ids, places = draw_ids(1, length, generator, document), torch.arange(length, device=device)
        starts = torch.where(ids.diff(prepend=ids[..., :1]) != 0, places, 0).cummax(-1).values
        self._positions = Draws(places - starts)

    def __call__(self) -> Tensor:
        loss: Tensor = self._run(
            input_ids=self._words, labels=self._words, position_ids=self._positions.new(), use_cache=False
        ).loss
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def _training_rows(
    shape: Shape, way: str, sizes: tuple[int, int], device: torch.device, dtype: torch.dtype, pace: Pace
) -> list[Row]:
    """Return the figures of training steps, a new row of documents at each.

    sizes: tokens of a row, and of a document in the mean.
    """
    left_out = _too_large(shape, sizes[0], device)
    steps: dict[str, Callable[[], Tensor]] = {}
    for who in (*shape.peers, _NONE, OURS):  # flex_attention's first step makes the models before it compile again
        if who not in left_out:
            steps[who] = _Late(functools.partial(_Training, shape, who, way, sizes, device, dtype))
    measured = measure(steps, device, pace, cold=False)
    measured = measured._replace(left_out={**left_out, **measured.left_out})
    rows = measured_rows("training", shape.name, (1, sizes[0]), dtype, measured)
    about = {"model": way, "document": sizes[1], "transformers": _transformers_version()}
    return [{**row, **about, "loss": float(measured.figures[row["who"]].output)} for row in rows]


def _too_large(shape: Shape, length: int, device: torch.device) -> dict[str, str]:
    """Return why "eager" is left out, if it surely runs out of memory."""
    if device.type != "cuda":
        return {}
    pairs = shape.sizes["num_hidden_layers"] * shape.sizes["num_attention_heads"] * length**2
    has_room = 2 * 2 * pairs <= torch.cuda.get_device_properties(device).total_memory  # scores and their softmax
    return {} if has_room else {"eager": "the scores of all layers take more memory than the GPU has"}


class _Late:
    """A step of an object that is made at the first step.

    If making it fails, only one implementation is left out.
    """

    def __init__(self, make: Callable[[], Callable[[], Tensor]]) -> None:
        self._make = make
        self._step: Callable[[], Tensor] | None = None

    def __call__(self) -> Tensor:
        step = self._step = self._step or self._make()
        return step()


# --- generation ---


class _Generation:
    """A call generates tokens greedily with a static cache, and returns them."""

    def __init__(
        self, shape: Shape, implementation: str, batch: int, lengths: tuple[int, int], device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._model = _model(shape, implementation, device, dtype).eval()
        generator = torch.Generator(device).manual_seed(0)
        prompt, self._new = lengths
        self._words = torch.randint(3, _VOCABULARY, (batch, prompt), generator=generator, device=device)
        self._seen = torch.ones_like(self._words)
        self._seen[1:, : prompt // 4] = 0  # shorter prompts are padded on the left

    def __call__(self) -> Tensor:
        words: Tensor = self._model.generate(
            self._words, attention_mask=self._seen, max_new_tokens=self._new, min_new_tokens=self._new,
            do_sample=False, cache_implementation="static",
        )  # fmt: skip
        return words[:, self._words.shape[1] :]


def _generation_rows(
    shape: Shape, batch: int, lengths: tuple[int, int], device: torch.device, dtype: torch.dtype, pace: Pace
) -> list[Row]:
    """Return the figures of whole generations."""
    steps: dict[str, Callable[[], Tensor]] = {
        who: _Late(functools.partial(_Generation, shape, who, batch, lengths, device, dtype))
        for who in (OURS, *(p for p in shape.peers if p != "flex_attention"))
    }
    measured = measure(steps, device, pace, cold=False, required=())
    rows = measured_rows("generation", shape.name, (batch, *lengths), dtype, measured)
    about = {"transformers": _transformers_version()}
    return [{**row, **about, "tokens_per_s": float(f"{batch * lengths[1] / row['ms'] * 1e3:.4g}")} for row in rows]


# --- the command ---


def _todo(device: torch.device, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """Return what to measure, by descriptions."""
    is_large = device.type == "cuda" and not quick
    dtype, pace = torch.bfloat16 if device.type == "cuda" else torch.float32, _PACE if is_large else QUICK
    shapes = _MODELS if is_large else [s._replace(sizes=_sizes_like(s)) for s in _MODELS]
    todo: dict[str, Callable[[], list[Row]]] = {}
    for sizes in _TRAINED if is_large else ((256, 60),):
        for shape in shapes:
            for way in _WAYS if device.type == "cuda" else _WAYS[:1]:
                call = functools.partial(_training_rows, shape, way, sizes, device, dtype, pace)
                todo[f"training, {shape.name}, {sizes[0]} in documents of {sizes[1]}, {way}"] = call
    few = Pace(2, 1, 1, 1.0)
    for batch in (1, 64) if is_large else (2,):
        lengths = (1024, 128) if is_large else (16, 4)
        call = functools.partial(_generation_rows, shapes[0], batch, lengths, device, dtype, few)
        todo[f"generation, {shapes[0].name}, {batch}"] = call
    return todo


def _sizes_like(shape: Shape) -> dict[str, Any]:
    """Return small sizes in place of a model's own."""
    return {name: _SMALL.get(name, size) for name, size in shape.sizes.items()}


def table(results: dict[str, Any]) -> str:
    """Return the figures of one run as text."""
    columns = (
        ("what", "kind"), ("model", "case"), ("batch x tokens", "shape"), ("documents", "document"), ("way", "model"),
        ("attention", "who"), ("ms", "ms"), ("IQR", "iqr"), ("tokens/s", "tokens_per_s"), ("first s", "first_s"),
        ("compiles later", "compilations"), ("waits", "synchronizations"), ("loss", "loss"),
    )  # fmt: skip
    return text_table(results, columns)


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of one run."""
    parts = [
        f"{measured_on(results)}, transformers {results['rows'][0]['transformers']}; medians. Training: whole steps "
        "with AdamW, a row of packed documents, new ones at each step; documents are their tokens in the mean. "
        f"{_NONE!r}: sums of q, k and v in its place, so the rest of the step. Generation: greedy, with a static "
        "cache; batch x tokens of the prompt x new tokens. The vocabulary has 32,768 words."
    ]
    for kind in ("training", "generation"):
        cases: dict[tuple[str, ...], list[Row]] = {}
        for r in results["rows"]:
            if r["kind"] == kind:
                labels = (r["case"], r["shape"], str(r.get("document", "")), r.get("model", ""))
                cases.setdefault(labels, []).append(r)
        rows = []
        for names, of_case in cases.items():
            ours = next(r["ms"] for r in of_case if r["who"] == OURS)
            for r in sorted(of_case, key=lambda row: bool(row["who"] != OURS)):
                speed = f"{r['loss']:.4f}" if kind == "training" else f"{r['tokens_per_s']:.4g}"
                rows.append([
                    *(names if r["who"] == OURS else [""] * len(names)), r["who"], f"{r['ms']:.4g}",
                    "" if r["who"] == OURS else f"{ours / r['ms']:.2f} x", speed, f"{r['first_s']:.1f}",
                    str(r["compilations"]),
                ])  # fmt: skip
        last = "last loss" if kind == "training" else "tokens/s"
        header = [kind, "batch x tokens", "documents", "way", "attention", "ms", "flexmasks takes", last, "first, s"]
        if rows:
            parts.append(github_table(rows, [*header, "compiles later"]))
    return "\n\n".join(parts)


BENCHMARK = Benchmark("models", _todo, table)
