"""What the processes of tests/world/test_huggingface_sharded.py run; each function runs in all processes of a group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import masking_utils

import flexmasks
from flexmasks.integrations import distributed, huggingface
from flexmasks.integrations.distributed import shards
from flexmasks.integrations.distributed.balance import balance

BATCH, LENGTH, WORDS = 2, 96, 99
TEXT = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", TEXT),
    "Mistral": ("MistralForCausalLM", TEXT | {"sliding_window": 12}),
    "Gemma2": (
        "Gemma2ForCausalLM",
        TEXT | {"sliding_window": 12, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, "layer_types": LAYERS},
    ),
    "GptOss": (
        "GptOssForCausalLM",
        TEXT | {"sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 2, "layer_types": LAYERS},
    ),
    "Llama4": (
        "Llama4ForCausalLM",
        TEXT
        | {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 48, "moe_layers": []}
        | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "pad_token_id": 0}
        | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": None},
    ),
    "Bert": ("BertForMaskedLM", TEXT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "ModernBert": (
        "ModernBertForMaskedLM",
        TEXT | {"local_attention": 12, "global_attn_every_n_layers": 2, "attention_dropout": 0.0},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0},
    ),
}
STARTS = ((0, 20, 55, 90), (0, 48))  # of the documents of packed rows; in both, one spans several parts


def mesh_of() -> DeviceMesh:
    """Return a mesh of all processes."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def order_of(name: str) -> distributed.Order:
    """Return parts of equal lengths, of different lengths, or those that balance the work."""
    if name == "natural":
        return distributed.Order.natural(LENGTH, dist.get_world_size())
    if name == "uneven":
        return distributed.Order(LENGTH, (((0, 37),), ((37, LENGTH),)))
    return balance("causal", LENGTH, mesh_of(), block_size=8)


def model_of(name: str, **options: Any) -> nn.Module:
    """Return a tiny model in training mode, the same in all processes."""
    huggingface.register()
    class_name, given = MODELS[name]
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    # A model in training draws no random numbers: all rates of dropout are 0.
    model: nn.Module = cls._from_config(cls.config_class(**given | options), attn_implementation="flexmasks")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.train()


def inputs_of(kind: str) -> dict[str, Tensor]:
    """Return ids, positions and padding of whole rows: "rows", "packed", "left" or "right"."""
    torch.manual_seed(1)
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    inputs = {"input_ids": torch.randint(3, WORDS, (BATCH, LENGTH))}
    if kind == "packed":
        for row, starts in zip(positions, STARTS, strict=True):
            for start in starts:
                row[start:] = torch.arange(LENGTH - start)
    if kind in ("left", "right"):
        lengths = torch.tensor([[LENGTH], [40]])
        inputs["attention_mask"] = (positions < lengths if kind == "right" else positions >= LENGTH - lengths).long()
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return inputs | {"position_ids": positions}


def run(model: nn.Module, inputs: dict[str, Tensor], weights: Tensor, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the logits, and the gradients of all parameters."""
    model.zero_grad()
    logits = model(**inputs, **options).logits
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))[..., None]
    (logits * weights * real).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return (logits * real).detach(), grads


def compare(name: str, kind: str, order_name: str = "natural", how: str = "auto", checkpointed: bool = False) -> float:
    """Return the greatest error of a model over all processes against one process.

    Gradients are divided by the greatest one of the model, if that is more than 1.
    """
    mesh, order, inputs = mesh_of(), order_of(order_name), inputs_of(kind)
    model = model_of(name)
    options = {} if "Bert" in name else {"use_cache": False}
    weights = torch.randn(BATCH, LENGTH, WORDS) / LENGTH
    expected, expected_grads = run(model, inputs, weights, **options)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parts = {key: distributed.shard(x, order, mesh) for key, x in inputs.items()}
    with huggingface.sharded(mesh, None if order_name in ("natural", "uneven") else order, how):
        logits, grads = run(model, parts, distributed.shard(weights, order, mesh), **options)
    for grad in grads:
        dist.all_reduce(grad)
    scale = max(1.0, *(float(g.abs().max()) for g in expected_grads))
    errors = [float((distributed.unshard(logits, order, mesh) - expected).abs().max())]
    errors += [float((a - b).abs().max()) / scale for a, b in zip(grads, expected_grads, strict=True)]
    return max(errors)


def own_parts(inputs: dict[str, Tensor], order: distributed.Order | None = None) -> dict[str, Tensor]:
    """Return this process's parts of whole inputs."""
    mesh = mesh_of()
    return {key: distributed.shard(x, order or order_of("natural"), mesh) for key, x in inputs.items()}


def gathers(name: str, kind: str) -> int:
    """Return how often a step of a model of six layers gathers a tensor of the whole sequence."""
    layers = {"layer_types": LAYERS * 3} if name == "Gemma2" else {}
    model = model_of(name, num_hidden_layers=6, **layers)
    made = []
    unshard = shards.unshard
    model.gradient_checkpointing_enable({"use_reentrant": False})
    counted = mock.patch.object(shards, "unshard", lambda *given: made.append(given) or unshard(*given))
    with counted, huggingface.sharded(mesh_of()):
        model(**own_parts(inputs_of(kind)), use_cache=False).logits.sum().backward()
    return len(made)


def without_masks(kind: str) -> float:
    """Return the greatest error of layers that get no mask, as accelerate's context parallelism leaves them."""
    from accelerate import big_modeling

    mesh, order, inputs = mesh_of(), order_of("balanced"), inputs_of(kind)
    model = model_of("Llama").eval()
    expected = model(**inputs, use_cache=False).logits
    big_modeling._attach_context_parallel_hooks(model)
    with huggingface.sharded(mesh, order):
        logits = model(**own_parts(inputs, order), use_cache=False).logits
    return float((distributed.unshard(logits, order, mesh) - expected).abs().max())


def torch_buffers() -> float:
    """Return the greatest error of a model whose inputs torch's context_parallel cuts."""
    mesh, length = mesh_of(), 512
    inputs = {"input_ids": torch.randint(3, WORDS, (BATCH, length)), "position_ids": torch.arange(length) % 200}
    inputs["position_ids"] = inputs["position_ids"].repeat(BATCH, 1)
    order = balance("causal", length, mesh)
    model = model_of("Mistral", max_position_embeddings=length).eval()
    expected = model(**inputs, use_cache=False).logits
    buffers = [x.clone() for x in inputs.values()]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1]), huggingface.sharded(mesh, order):
        logits = model(**dict(zip(inputs, buffers, strict=True)), use_cache=False).logits
    return float((distributed.unshard(logits, order, mesh) - expected).abs().max())


def _traced(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.compile with the backend "eager", whatever the caller names."""
    return lambda *given, **options: compile_(*given, **{**options, "backend": "eager"})


def other_ways(way: str, name: str, layers: int) -> float:
    """Return the greatest error of a model without gradients, by inference mode, torch.compile, or without checks.

    Mistral's kernels are traced, and not made of C++, which takes seconds.
    """
    mesh, order, inputs = mesh_of(), order_of("balanced"), inputs_of("packed")
    model = model_of(name, num_hidden_layers=layers).eval()
    expected = model(**inputs, use_cache=False).logits.detach()
    compile_ = _traced(torch.compile) if name == "Mistral" else torch.compile
    with torch.inference_mode(way == "inference"), mock.patch.object(torch, "compile", compile_):
        call = torch.compile(model, backend="eager") if way == "compile" else model
        with huggingface.sharded(mesh, order, check=way != "unchecked"):
            parts = own_parts(inputs, order)
            for _ in range(2):
                logits = call(**parts, use_cache=False).logits
                parts["position_ids"] = parts["position_ids"].clone() if dist.get_rank() else parts["position_ids"]
    return float((distributed.unshard(logits, order, mesh) - expected).abs().max())


def wrong(what: str) -> None:
    """Make a call that cannot be."""
    mesh, inputs = mesh_of(), inputs_of("left" if what == "padding" else "rows")
    order: distributed.Order | None = order_of("natural")
    parts = own_parts(inputs)
    name = "T5" if what == "bias" else "Bert" if what == "table" else "Llama"
    model, options = model_of(name), {"use_cache": False}
    if what in ("positions", "generate"):
        del parts["position_ids"]
    if what == "whole padding":
        parts["attention_mask"] = torch.ones(BATCH, LENGTH)
    if what == "padding" and dist.get_rank() == 1:
        del parts["attention_mask"]
    if what == "mask":
        parts["attention_mask"] = torch.ones(BATCH, 1, LENGTH // 2, LENGTH // 2, dtype=torch.bool)
    if what == "one mask" and dist.get_rank() == 1:
        parts["attention_mask"] = torch.ones(BATCH, 1, LENGTH // 2, LENGTH // 2, dtype=torch.bool)
    if what == "order":
        order = distributed.Order(LENGTH, (((0, 40),), ((40, LENGTH),)))
    if what == "forgotten order":
        held, order = order_of("balanced"), None
        parts = own_parts(inputs, held)
    if what == "another order" and dist.get_rank() == 1:
        order = order_of("balanced")
    if what == "table":
        parts, options = {"input_ids": parts["input_ids"]}, {}
    if what == "bias":
        parts, options = {"input_ids": parts["input_ids"], "decoder_input_ids": parts["input_ids"]}, {}
    with huggingface.sharded(mesh, order):
        if what == "table":
            table = torch.rand(LENGTH, LENGTH) < 0.5
            make = masking_utils.create_bidirectional_mask
            own = functools.partial(make, and_mask_function=lambda b, h, q, kv: table[q, kv])
            with mock.patch("transformers.models.bert.modeling_bert.create_bidirectional_mask", own):
                model(**parts)
        elif what == "masks":
            flexmasks.watch(model, **parts, **options)
        elif what == "generate":
            model.eval().generate(**parts, max_new_tokens=3)
        elif what == "cache":
            cache = model(**parts).past_key_values
            model(**parts, past_key_values=cache)
        elif what == "packed":
            model(**parts, cu_seq_lens_q=torch.tensor([0, 5]), cu_seq_lens_k=torch.tensor([0, 5]), **options)
        else:
            model(**parts, **options)
