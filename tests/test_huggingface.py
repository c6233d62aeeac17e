"""Hugging Face's models by attn_implementation="flexmasks", against "eager"; mask functions, one by one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexmasks.integrations import huggingface
from flexmasks.integrations.huggingface.attention import attend
from flexmasks.integrations.huggingface.late import LateMask, make_mask

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
masking_utils = pytest.importorskip("transformers.masking_utils")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own code

BATCH, LENGTH, WORDS = 2, 50, 99
LENGTHS = (LENGTH, 31)  # of the texts of a padded batch
TOLERANCE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    assert huggingface.register() == "flexmasks"


# --- models ---

TEXT = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
IMAGE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 30,
    "patch_size": 5,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPEECH = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", TEXT),
    "Mistral": ("MistralForCausalLM", TEXT | {"sliding_window": 12}),
    "Qwen3": ("Qwen3ForCausalLM", TEXT),
    "Gemma2": (
        "Gemma2ForCausalLM",
        TEXT | {"sliding_window": 12, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, "layer_types": LAYERS},
    ),
    "Gemma3": ("Gemma3ForCausalLM", TEXT | {"sliding_window": 12, "query_pre_attn_scalar": 8, "layer_types": LAYERS}),
    "GptOss": (
        "GptOssForCausalLM",
        TEXT | {"sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": LAYERS},
    ),
    "Llama4": (
        "Llama4ForCausalLM",
        TEXT
        | {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 48, "moe_layers": []}
        | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    ),
    "DeepseekV3": (
        "DeepseekV3ForCausalLM",
        {n: v for n, v in TEXT.items() if n != "head_dim"}
        | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    "Phi3": ("Phi3ForCausalLM", TEXT | {"sliding_window": 12, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "GPT2": (
        "GPT2LMHeadModel",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "pad_token_id": 0}
        | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": None},
    ),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertModel", TEXT | NO_DROPOUT),
    "ModernBert": (
        "ModernBertModel",
        TEXT | {"local_attention": 12, "global_attn_every_n_layers": 2, "attention_dropout": 0.0},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0},
    ),
    "Bart": (
        "BartForConditionalGeneration",
        SPEECH | {"max_position_embeddings": 256, "dropout": 0.0, "eos_token_id": 2, "forced_eos_token_id": None},
    ),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Whisper": (
        "WhisperForConditionalGeneration",
        SPEECH | {"num_mel_bins": 8, "max_source_positions": 40, "max_target_positions": 60, "dropout": 0.0},
    ),
    "ViT": ("ViTModel", IMAGE | NO_DROPOUT),
    "Siglip": ("SiglipVisionModel", IMAGE),  # its head has learned queries, the same for all images
    "Mllama": (
        "MllamaForConditionalGeneration",
        {
            "text_config": TEXT
            | {"num_hidden_layers": 3, "cross_attention_layers": [1]}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
                "attention_heads": 2, "image_size": 28, "patch_size": 14, "max_num_tiles": 2, "vision_output_dim": 64,
                "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
        },
    ),
}  # fmt: skip
ALL = DECODERS | ENCODERS | OTHERS


@functools.cache
def models(name: str) -> tuple[nn.Module, nn.Module]:
    """Return a tiny model by "flexmasks", and one with the same parameters by "eager"."""
    class_name, given = ALL[name]
    cls = getattr(transformers, class_name)
    config = cls.config_class(**copy.deepcopy(given))
    made = []
    for implementation in ("flexmasks", "eager"):
        torch.manual_seed(0)
        made.append(cls._from_config(copy.deepcopy(config), attn_implementation=implementation).eval())
    own, other = made
    torch.manual_seed(1)
    for parameter in own.parameters():  # sinks, biases and gates are not 0
        parameter.data += 0.05 * torch.randn_like(parameter)
    other.load_state_dict(own.state_dict())
    return own, other


# --- mask functions ---


START = torch.tensor([0, 7])
SPANS = torch.tensor([[-1] * 9 + [0] * 11 + [-1] * 5 + [1] * 15, [2] * 13 + [-1] * 20 + [5] * 7])
DOCUMENTS = torch.arange(40).expand(2, -1) // torch.tensor([[13], [21]])
POSITIONS = torch.arange(40) - torch.tensor([[13], [21]]) * DOCUMENTS
PADDINGS = {
    "no padding": None,
    "left": torch.arange(40) >= torch.tensor([[0], [7]]),
    "right": torch.arange(40) < torch.tensor([[40], [29]]),
}


def _remapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside documents, as the installed transformers packs rows."""
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.packed_sequence_compatibility_function(function, POSITIONS, DOCUMENTS)
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(DOCUMENTS))


def _left_and_right(left: int, right: int) -> Callable[..., Any]:
    """Return a window as Gemma 3n's, T5Gemma 2's and Moonshine's encoders write it."""

    def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        dist = q_idx - kv_idx
        left_mask = (dist >= 0) & (dist < left)
        right_mask = (dist < 0) & (-dist < right)
        return left_mask | right_mask

    return inner_mask


def _token_types(types: Tensor) -> Callable[..., Any]:
    """Return a prefix that sees all of itself, as PaliGemma's older releases write it."""

    def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        safe = torch.where(kv_idx < types.shape[1], kv_idx, 0)
        return (types[batch_idx, q_idx] == 0) & (types[batch_idx, safe] == 0)

    return inner_mask


def _every_third(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx + kv_idx) % 3 != 1


# The mask that each function becomes; None for a function that goes to the library as it is.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "causal": (lambda m: m.causal_mask_function, "causal()"),
    "bidirectional": (lambda m: m.bidirectional_mask_function, "full()"),
    "sliding": (lambda m: m.sliding_window_causal_mask_function(9), "sliding_window(window=8)"),
    "sliding on both sides": (lambda m: m.sliding_window_bidirectional_mask_function(6), "local(left=6, right=6)"),
    "sliding, otherwise": (lambda m: _left_and_right(5, 4), "local(left=4, right=3)"),
    "chunked": (
        lambda m: m.chunked_causal_mask_function(8, START),
        "causal() & chunked(chunk=8, start=int64[2])",
    ),
    "packed": (lambda m: _remapped(m.causal_mask_function), "causal() & document(document_ids=int64[2, 40])"),
    "packed, sliding": (
        lambda m: _remapped(m.sliding_window_causal_mask_function(9)),
        "sliding_window(window=8) & document(document_ids=int64[2, 40])",
    ),
    "packed, chunked": (lambda m: _remapped(m.chunked_causal_mask_function(8, START * 0)), "causal() & "),
    "blockwise": (
        lambda m: m.or_masks(m.causal_mask_function, m.blockwise_overlay(SPANS)),
        "bidirectional_spans(span_ids=int64[2, 40])",
    ),
    "blockwise, sliding": (
        lambda m: m.or_masks(m.sliding_window_causal_mask_function(9), m.blockwise_overlay(SPANS)),
        "sliding_window(window=8) | cross_document(",
    ),
    "blockwise, packed": (
        lambda m: m.or_masks(_remapped(m.causal_mask_function), m.blockwise_overlay(SPANS)),
        "causal() & document(document_ids=int64[2, 40]) | cross_document(",
    ),
    "token types": (lambda m: m.or_masks(m.causal_mask_function, _token_types((SPANS < 0).long())), "causal() | "),
    "padding": (lambda m: m.padding_mask_function(PADDINGS["left"]), "key_padding(attention_mask=bool[2, 40])"),
    "own": (lambda m: m.and_masks(m.causal_mask_function, _every_third), None),
}
STEPS = {  # q_length, kv_length, q_offset, kv_offset
    "all": (40, 40, 0, 0),
    "last": (6, 40, 34, 0),
    "one": (1, 40, 39, 0),
    "static": (6, 40, torch.tensor(20), 0),
    "sliding cache": (6, 14, 34, 26),
}


def _made(function: Any, step: str, padding: Tensor | None, make: Callable[..., Any]) -> Any:
    q_length, kv_length, q_offset, kv_offset = STEPS[step]
    return make(
        batch_size=2, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=function, attention_mask=padding, allow_is_causal_skip=step != "one",
        use_vmap=function is _every_third, device=torch.device("cpu"),
    )  # fmt: skip


def _dense(mask: LateMask | Tensor) -> Tensor:
    dense = mask.to_dense() if isinstance(mask, LateMask) else mask
    return dense.expand(2, 1, *mask.shape[2:])


def _theirs(function: Any, step: str, padding: Tensor | None) -> Tensor:
    """Return the mask that transformers makes for "sdpa", which skips none."""
    return _made(function, step, padding, lambda **a: masking_utils.sdpa_mask(**a | {"allow_is_causal_skip": False}))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mask_functions(name: str) -> None:
    of, expected = FUNCTIONS[name]
    function = of(masking_utils)
    for step in STEPS:
        if step != "all" and name.startswith("packed"):
            continue  # rows are packed without a cache
        for padding in PADDINGS.values():
            mask = _made(function, step, padding, make_mask)
            assert mask.shape == (2, 1, *STEPS[step][:2])
            assert torch.equal(_dense(mask), _theirs(function, step, padding)), (step, padding)
    late = _made(function, "all", None, make_mask)
    if expected is None:
        assert not late.mask.is_own()
    else:
        assert late.mask.is_own()
        assert repr(late.mask).startswith(expected)


FEW = {"causal", "packed", "blockwise, sliding", "own"}  # those that are compiled outside campaigns


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.campaign) for n in FUNCTIONS])
def test_mask_functions_inside_compile(name: str) -> None:
    of, expected = FUNCTIONS[name]
    torch._dynamo.reset()
    for step in ("all", "static", "one"):
        if step != "all" and (name.startswith("packed") or (name in FEW and name != "causal")):
            continue
        padding = PADDINGS["left"]
        q_length, kv_length = STEPS[step][:2]
        q, k, v = torch.randn(2, 2, q_length, 8), torch.randn(2, 2, kv_length, 8), torch.randn(2, 2, kv_length, 8)

        def attended(*qkv: Tensor, padding: Tensor = padding, step: str = step) -> tuple[Tensor, Any]:
            mask = _made(of(masking_utils), step, padding, make_mask)
            names = [m.name for m in mask.parts.others + mask.parts.packing] if isinstance(mask, LateMask) else []
            return attend(nn.Identity(), *qkv, mask)[0], names

        out, names = torch.compile(attended, fullgraph=True, backend="aot_eager")(q, k, v)
        visible = _theirs(of(masking_utils), step, padding)
        want = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)
        sees = visible.any(-1)[:, 0]
        assert torch.allclose(out[sees], want[sees], atol=TOLERANCE)
        assert not out[~sees].any()
        if step == "all":
            assert ("dense" in names) == (expected is None), names


# --- models: outputs and gradients ---

IDS = torch.randint(3, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
REAL = {
    "no padding": torch.ones(BATCH, LENGTH, dtype=torch.bool),
    "right": torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None],
    "left": torch.arange(LENGTH) >= LENGTH - torch.tensor(LENGTHS)[:, None],
}
PACKED = torch.cat([torch.arange(20), torch.arange(30)]).expand(BATCH, -1)


def _inputs(name: str, layout: str) -> dict[str, Any]:
    """Return the inputs of a text model."""
    inputs: dict[str, Any] = {"input_ids": IDS}
    if layout in ("right", "left"):
        inputs["attention_mask"] = REAL[layout].long()
    if layout == "packed":
        inputs["position_ids"] = PACKED
    if name in ("T5", "Bart"):
        inputs["decoder_input_ids"] = IDS[:, :30]
    if name in DECODERS:
        inputs["use_cache"] = False
    return inputs


def _images_and_sounds(name: str) -> dict[str, Any]:
    """Return the inputs of the other models."""
    if name == "Whisper":
        return {"input_features": torch.randn(BATCH, 8, 80), "decoder_input_ids": IDS[:, :20]}
    if name == "Mllama":
        return {
            "input_ids": IDS[:, :20],
            "attention_mask": REAL["left"][:, -20:].long(),
            "pixel_values": torch.randn(BATCH, 1, 2, 3, 28, 28),
            "aspect_ratio_ids": torch.tensor([[1], [3]]),
            "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]]),
            "cross_attention_mask": torch.tensor([[[[1, 0]]], [[[1, 1]]]]).expand(-1, 20, -1, -1).contiguous(),
            "use_cache": False,
        }
    size = IMAGE["image_size"]
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def _outputs(output: Any) -> list[Tensor]:
    """Return the first output of a model, and what it pooled."""
    pooled = getattr(output, "pooler_output", None)
    return [output[0]] if pooled is None else [output[0], pooled]


def check_model(name: str, inputs: dict[str, Any], real: Tensor | None = None, tolerance: float = TOLERANCE) -> None:
    """Compare outputs, and the gradients of all parameters, with those of "eager".

    real: the tokens that are no padding, if the output is one of tokens. Others may see nothing.
    """
    gradients = []
    outputs = []
    for model in models(name):
        model.zero_grad()
        own = _outputs(model(**inputs))
        if real is not None and own[0].shape[1] == real.shape[1]:
            own = [own[0][real]]  # what is pooled may be the output of padding
        outputs.append([x.detach() for x in own])
        sum((x * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in own).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for x, y in zip(*outputs, strict=True):
        assert torch.allclose(x, y, atol=tolerance, rtol=tolerance), float((x - y).abs().max())
    learned = 0
    for n, want in gradients[1].items():
        got = gradients[0][n]
        assert (got is None) == (want is None), n
        if want is not None:
            learned += bool(want.any())
            unit = max(1.0, float(want.norm()))
            assert float((got - want).norm()) <= 1e-4 * unit, (n, float((got - want).norm()), float(want.norm()))
    assert learned > 5


@pytest.mark.parametrize("layout", ["no padding", "right", "left", "packed"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_text_models(name: str, layout: str) -> None:
    if layout == "packed" and name in ENCODERS:
        pytest.skip("transformers does not pack the rows of encoders")
    check_model(name, _inputs(name, layout), REAL.get(layout))


@pytest.mark.parametrize("name", OTHERS)
def test_images_and_sounds(name: str) -> None:
    torch.manual_seed(0)
    inputs = _images_and_sounds(name)
    check_model(name, inputs, REAL["left"][:, -20:] if name == "Mllama" else None)


@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "T5"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    for model in models(name):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.train()
    try:
        check_model(name, _inputs(name, "right"), REAL["right"])
    finally:
        for model in models(name):
            model.gradient_checkpointing_disable()
            model.disable_input_require_grads()
            model.eval()
