"""Hugging Face's models by attn_implementation="flexmasks", against "eager"; mask functions, one by one."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DEVICES, in_campaigns, one_in
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

import flexmasks
from flexmasks import road, trees
from flexmasks.dropout import Dropout
from flexmasks.integrations import huggingface
from flexmasks.integrations.huggingface import attention as hf_attention
from flexmasks.integrations.huggingface.attention import attend
from flexmasks.integrations.huggingface.late import LateMask, make_mask

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
masking_utils = pytest.importorskip("transformers.masking_utils")
huggingface_families = pytest.importorskip("huggingface_families")
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
# Models that compute with their masks, and take an attention function or are a part of a model that does. Old releases
# of transformers do not have them.
COMPUTING: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV4": (
        "DeepseekV4ForCausalLM",
        {n: v for n, v in TEXT.items() if n not in ("intermediate_size", "num_key_value_heads")}
        | {"sliding_window": 12, "q_lora_rank": 16, "qk_rope_head_dim": 8, "moe_intermediate_size": 16, "n_group": 1}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["moe", "moe"]}
        | {"layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"]}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}},
    ),
    "Qwen4Exp": (
        "Qwen4ExpForCausalLM",
        TEXT
        | {"layer_types": ["full_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "indexer_n_heads": 2}
        | {"indexer_head_dim": 8, "indexer_kv_heads": 1, "indexer_budget": 8, "indexer_compress_ratio": 4},
    ),
    "Gemma4Audio": (
        "Gemma4AudioModel",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 24}
        | {"subsampling_conv_channels": (128, 4)},
    ),
    "Lasr": (
        "LasrEncoder",
        {n: v for n, v in TEXT.items() if n in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "num_mel_bins": 8, "subsampling_conv_channels": 8}
        | {"dropout": 0.0, "dropout_positions": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0},
    ),
}
ALL = DECODERS | ENCODERS | OTHERS | COMPUTING


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


REMAPS = hasattr(masking_utils, "remap_positions_for_packed_sequence")
# From 5.24 on, transformers lets documents of a packed row cut overlays, too.
CUTS_OVERLAYS = REMAPS and not hasattr(masking_utils, "packed_sequence_compatibility_function")


def _remapped(function: Callable[..., Any], *overlays: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside documents, or an overlay, as the installed transformers packs rows."""
    packed = masking_utils.packed_sequence_mask_function(DOCUMENTS)
    if REMAPS:
        function = masking_utils.remap_positions_for_packed_sequence(function, POSITIONS)
    if not CUTS_OVERLAYS:
        function = masking_utils.and_masks(packed, function)
    if overlays:
        function = masking_utils.or_masks(function, *overlays)
    return masking_utils.and_masks(function, packed) if CUTS_OVERLAYS else function


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
    "sliding before": (lambda m: _left_and_right(5, 0), "sliding_window(window=4)"),
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
        lambda m: _remapped(m.causal_mask_function, m.blockwise_overlay(SPANS)),
        "causal() & document(document_ids=int64[2, 40]) | cross_document("
        if not CUTS_OVERLAYS
        else "bidirectional_spans(span_ids=int64[2, 40]) & document(document_ids=int64[2, 40])",
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
        assert not late.mask._is_by_library()
    else:
        assert late.mask._is_by_library()
        assert repr(late.mask).startswith(expected)


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_two_windows_with_a_gap(gap: int) -> None:
    """They are one window where no key lies between them."""

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & (kv >= q - 2)

    def far(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= q - 3 - gap) & (kv >= q - 6 - gap)

    function = masking_utils.or_masks(near, far)
    mask = _made(function, "all", None, make_mask)
    assert torch.equal(_dense(mask), _theirs(function, "all", None))
    assert (repr(mask.mask) == "sliding_window(window=6)") == (gap == 0)


@pytest.mark.parametrize(("limit", "is_included"), [(5, False), (5, True), (2, False)])
def test_windows_by_the_absolute_distance(limit: int, is_included: bool) -> None:
    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= limit if is_included else (q - kv).abs() < limit

    mask, side = _made(near, "all", None, make_mask), limit - (not is_included)
    assert torch.equal(_dense(mask), _theirs(near, "all", None))
    assert repr(mask.mask) == f"local(left={side}, right={side})"


def test_windows_of_layers_that_look_both_ways() -> None:
    """The config's number is one side of such a window; some models pass one more to attention functions."""
    tensors, one = _qkv(), _qkv(1)
    config = transformers.ModernBertConfig(local_attention=8, num_hidden_layers=2)
    distance = (torch.arange(20)[:, None] - torch.arange(20)).abs()
    for layer, window in ((Layer(is_causal=False), 5), (Layer(is_causal=False, config=config, layer_idx=1), 5)):
        check_call(tensors, None, _plainly(*tensors, distance < 5), layer, sliding_window=window)
    layer = Layer(is_causal=False, config=config, layer_idx=1)  # as Muse Glimmer's assistant
    check_call(tensors, None, _plainly(*tensors, distance < 5), layer, sliding_window=4)
    check_call(one, None, _plainly(*one), Layer(is_causal=False), sliding_window=5)
    canvas = _qkv(5)  # as Diffusion Gemma's decoder, which attends to a cache, too
    check_call(canvas, None, _plainly(*canvas), Layer(is_causal=False), sliding_window=5)


def test_documents_start_where_positions_do_not_go_on_by_one() -> None:
    positions = torch.tensor([[3, 4, 5, 10, 11, 0, 1], [0, 1, 2, 3, 4, 5, 6]])
    assert hf_attention.documents_of(positions).tolist() == [[0, 0, 0, 1, 1, 2, 2], [0] * 7]


FEW = {"causal", "packed", "blockwise, sliding", "own"}  # those that are compiled outside campaigns


@pytest.mark.skipif(not REMAPS, reason="positions of packed rows are not remapped")
def test_positions_in_documents_without_their_documents() -> None:
    """Only inside the documents that they count in, positions stand for distances."""
    m, other = masking_utils, SPANS.roll(5, 1)
    remapped = m.remap_positions_for_packed_sequence(m.causal_mask_function, POSITIONS)
    alone: list[Callable[..., Any]] = [
        lambda b, h, q, kv: DOCUMENTS[b, q] == DOCUMENTS[b, q],
        lambda b, h, q, kv: DOCUMENTS[b, kv] == DOCUMENTS[b, kv],
        lambda b, h, q, kv: DOCUMENTS[b, 0] == DOCUMENTS[b, 0],
        m.blockwise_overlay(SPANS),
    ]
    functions = [m.and_masks(one, remapped) for one in alone]
    functions += [m.and_masks(one, m.or_masks(remapped, m.blockwise_overlay(other))) for one in alone]
    for function in functions:
        mask = _made(function, "all", None, make_mask)
        assert torch.equal(_dense(mask), _theirs(function, "all", None))


@pytest.mark.slow
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

        out, names = torch.compile(attended, fullgraph=True, backend="eager")(q, k, v)
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
    if name not in ("Bert", "ModernBert"):
        inputs["use_cache"] = False
    return inputs


def _images_and_sounds(name: str) -> dict[str, Any]:
    """Return the inputs of the other models."""
    if name == "Whisper":
        return {"input_features": torch.randn(BATCH, 8, 80), "decoder_input_ids": IDS[:, :20], "use_cache": False}
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


def check_models(
    pair: tuple[nn.Module, nn.Module], inputs: dict[str, Any], real: Tensor | None = None, tolerance: float = TOLERANCE
) -> None:
    """Compare outputs, and the gradients of all parameters, of two models.

    real: the tokens that are no padding, if the output is one of tokens. Others may see nothing.
    """
    gradients = []
    outputs = []
    for model in pair:
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
        if want is None:
            assert got is None or not got.any(), n  # a compiled model has gradients of 0
            continue
        learned += bool(want.any())
        unit = max(1.0, float(want.norm()))
        assert float((got - want).norm()) <= 1e-4 * unit, (n, float((got - want).norm()), float(want.norm()))
    assert learned > 5


@pytest.mark.parametrize("layout", ["no padding", "right", "left", "packed"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_text_models(name: str, layout: str) -> None:
    if layout == "packed" and name in ENCODERS:
        pytest.skip("transformers does not pack the rows of encoders")
    check_models(models(name), _inputs(name, layout), REAL.get(layout))


@pytest.mark.parametrize(
    "name", ["DeepseekV4", "Gemma4Audio", "Lasr", pytest.param("Qwen4Exp", marks=pytest.mark.campaign)]
)
def test_models_that_compute_with_their_masks(name: str) -> None:
    if not hasattr(transformers, COMPUTING[name][0]):
        pytest.skip(f"this release of transformers has no {name}")
    if name in ("Gemma4Audio", "Lasr"):
        real = torch.arange(80) < torch.tensor([[80], [50]])
        sounds = torch.randn(BATCH, 80, 8 if name == "Lasr" else 128)
        check_models(models(name), {"input_features": sounds, "attention_mask": real})
        return
    check_models(models(name), _inputs(name, "left"), REAL["left"])
    with torch.no_grad():
        steps = []
        for model in models(name):
            first = model(IDS[:, :29], use_cache=True)
            rest = model(IDS[:, 29:], past_key_values=first.past_key_values)
            steps.append(torch.cat([first.logits, rest.logits], 1))
    assert torch.allclose(*steps, atol=TOLERANCE)


@pytest.mark.parametrize("name", OTHERS)
def test_images_and_sounds(name: str) -> None:
    torch.manual_seed(0)
    inputs = _images_and_sounds(name)
    check_models(models(name), inputs, REAL["left"][:, -20:] if name == "Mllama" else None)


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        *[(name, False) for name in ("Gemma2", "GptOss", "T5")],
        ("GptOss", True),
        *[pytest.param(name, True, marks=pytest.mark.campaign) for name in ("Gemma2", "T5")],  # they compile kernels
    ],
)
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    pair = copy.deepcopy(models(name))
    for model in pair:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.train()
    check_models(pair, _inputs(name, "right"), REAL["right"])


# --- models: generation ---


def _generated(model: Any, cache: str, padded: bool, **options: Any) -> Tensor:
    """Return the tokens that a model generates greedily from prompts of 30 tokens, past its windows of 12."""
    real = torch.arange(30) >= torch.tensor([0, 9])[:, None]
    mask = real.long() if padded else torch.ones_like(real).long()
    options = {"max_new_tokens": 20, "do_sample": False, "cache_implementation": cache} | options
    return model.generate(IDS[:, :30], attention_mask=mask, **options)


def _generated_or_skipped(other: Any, cache: str, padded: bool) -> Tensor:
    """Return the tokens of "eager"; skip the test where this release of transformers fails."""
    try:
        return _generated(other, cache, padded)
    except TypeError as error:  # 5.17 fails with static caches of chunked attention
        pytest.skip(f"transformers fails by itself: {error}")


def _kernels() -> int:
    """Return how many kernels were compiled."""
    info = flexmasks.cache_info()
    return info["kernels"].entries if "kernels" in info else 0


# A call without gradients may compile a kernel for the CPU, which takes seconds.
QUICK = {("GptOss", "dynamic"), ("GptOss", "static"), ("Llama", "static")}
GENERATING = [(name, cache) for name in [*DECODERS, "T5", "Bart", "Whisper"] for cache in ("dynamic", "static")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cache"), [g if g in QUICK else pytest.param(*g, marks=pytest.mark.campaign) for g in GENERATING]
)
def test_generate(name: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = models(name)
    if (name, cache) in QUICK:  # kernels are not made of C++
        compile_ = torch.compile
        monkeypatch.setattr(torch, "compile", lambda *args, **more: compile_(*args, **more | {"backend": "eager"}))
    if name == "Whisper":
        torch.manual_seed(0)
        given = {"do_sample": False, "cache_implementation": cache, "max_new_tokens": 20}
        sounds = torch.randn(BATCH, 8, 80)
        assert torch.equal(own.generate(sounds, **given), other.generate(sounds, **given))
        return
    for padded in (False, True):
        want = _generated_or_skipped(other, cache, padded)
        assert want.shape[1] > 20
        kernels = _kernels()
        assert torch.equal(_generated(own, cache, padded), want)
        # At most one kernel for the prompt in each kind of layer: no number of a step is compiled.
        assert _kernels() <= kernels + 2


@pytest.mark.campaign
def test_generate_with_images() -> None:
    torch.manual_seed(0)
    inputs = _images_and_sounds("Mllama") | {"use_cache": True}
    inputs["cross_attention_mask"] = inputs["cross_attention_mask"][:, :20]
    tokens = [m.generate(**inputs, do_sample=False, max_new_tokens=8) for m in models("Mllama")]
    assert tokens[0].shape == (BATCH, 28)
    assert torch.equal(*tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Llama", *[pytest.param(n, marks=pytest.mark.campaign) for n in ("Gemma2", "GptOss", "Llama4", "T5")]]
)
def test_generate_compiled_with_a_static_cache(name: str) -> None:
    """Check tokens, and that no graph breaks: a break raises an error with fullgraph=True."""
    own, other = models(name)
    options = transformers.CompileConfig(fullgraph=True, mode=None, backend="eager")
    options._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    padded = name != "Llama"
    want = _generated_or_skipped(other, "static", padded)
    tokens = _generated(own, "static", padded, compile_config=options)
    assert not counters["graph_break"]
    assert torch.equal(tokens, want)
    if name == "Llama":  # other models compile again for numbers in the cache, or compile a kernel for the prompt
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_steps_with_a_static_cache_inside_compile(name: str) -> None:
    """Check steps whose masks are made by the compiled model, as where a user compiles it."""
    logits = []
    for model in models(name):
        torch._dynamo.reset()
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        cache, real = transformers.StaticCache(config=model.config, max_cache_len=40), REAL["left"][:, -24:].long()
        with torch.no_grad():
            parts = [
                step(
                    IDS[:, start:stop],
                    attention_mask=real[:, :stop],
                    past_key_values=cache,
                    position_ids=torch.arange(start, stop)[None],
                ).logits[:, -1]
                for start, stop in [(0, 20), (20, 21), (21, 22), (22, 23), (23, 24)]
            ]
        logits.append(torch.stack(parts))
    assert torch.allclose(*logits, atol=TOLERANCE)


@pytest.mark.campaign
def test_beam_search() -> None:
    options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    tokens = [m.generate(IDS[:, :20], attention_mask=torch.ones_like(IDS[:, :20]), **options) for m in models("Llama")]
    assert torch.equal(*tokens)


# --- models: torch.compile and torch.export ---


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["Gemma2", "Bert"])
def test_export(name: str) -> None:
    own, other = models(name)
    inputs = _inputs(name, "left")
    program = torch.export.export(own, (), inputs, strict=False)
    got, want = program.module()(**inputs)[0], other(**inputs)[0]
    assert torch.allclose(got[REAL["left"]], want[REAL["left"]], atol=TOLERANCE)


def _compiled_inputs(name: str, layout: str) -> dict[str, Any]:
    return _inputs(name, layout) if name not in OTHERS else _images_and_sounds(name)


COMPILED = [("Llama", "packed", "aot_eager"), ("Gemma2", "left", "aot_eager")]
COMPILED_IN_CAMPAIGNS = [
    *[(name, layout, "aot_eager") for name in DECODERS for layout in ("no padding", "left", "packed")],
    *[(name, "right", "aot_eager") for name in ENCODERS],
    *[(name, "no padding", "aot_eager") for name in ("Whisper", "ViT", "Siglip")],
    ("Llama", "packed", "inductor"),
    ("GptOss", "left", "inductor"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "backend"),
    [*one_in(2, COMPILED), *[in_campaigns(c) for c in COMPILED_IN_CAMPAIGNS if c not in COMPILED]],
)
def test_compiled_forward_and_backward(name: str, layout: str, backend: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    own, other = models(name)
    forward, inputs = own.forward, _compiled_inputs(name, layout)
    own.forward = torch.compile(forward, fullgraph=True, backend=backend)
    try:
        check_models(models(name), inputs, REAL.get(layout) if name not in OTHERS else None)
    except TorchDynamoException:
        with pytest.raises(TorchDynamoException):  # old releases of torch do not compile some experts
            torch.compile(other.forward, fullgraph=True, backend=backend)(**inputs)
        pytest.skip('torch does not compile this model, by "eager" neither')
    finally:
        own.forward = forward


# --- calls of the attention function ---


class Layer(nn.Module):
    """A layer with the attributes that an attention function reads."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def _qkv(q_length: int = 20, kv_length: int = 20, size: int = 8, v_size: int = 8, batch: int = 2) -> list[Tensor]:
    """Return q with 4 heads, and k and v with 2."""
    shapes = [(batch, 4, q_length, size), (2, 2, kv_length, size), (2, 2, kv_length, v_size)]
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def _plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | bool = True,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | float = 0.0,
) -> Tensor:
    """Return attention written out, [batch, queries, heads, size]."""
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~torch.as_tensor(visible), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)
    return ((weights[..., :-1] if sinks is not None else weights) @ v).transpose(1, 2)


def _causal(q_length: int = 20, kv_length: int = 20, window: int = 99) -> Tensor:
    distance = torch.arange(q_length)[:, None] - torch.arange(kv_length)
    return (distance >= 0) & (distance < window)


def check_call(
    tensors: list[Tensor],
    mask: Any,
    want: Tensor,
    layer: nn.Module | None = None,
    atol: float = TOLERANCE,
    **given: Any,
) -> None:
    """Compare a call, and the gradients of all tensors that learn, with what was written out."""
    out, weights = attend(layer or Layer(is_causal=True), *tensors, mask, **given)
    assert weights is None
    assert out.is_contiguous()
    assert torch.allclose(out.to(want.dtype), want, atol=atol), float((out - want).abs().max())
    learning = [*tensors, *[x for x in (mask, *given.values()) if isinstance(x, Tensor) and x.requires_grad]]
    weight = torch.randn_like(want)
    for x, y in zip(
        torch.autograd.grad((out * weight).sum(), learning),
        torch.autograd.grad((want * weight).sum(), learning, retain_graph=True),
        strict=True,
    ):
        assert torch.allclose(x, y, atol=atol), float((x - y).abs().max())


def _late(q_length: int, kv_length: int, q_offset: Any = 0, function: Any = None) -> LateMask:
    function = masking_utils.causal_mask_function if function is None else function
    return make_mask(2, q_length, kv_length, q_offset, mask_function=function, device=torch.device("cpu"))


def test_scale_cap_sinks_and_bias() -> None:
    tensors, sinks = _qkv(), torch.randn(4).requires_grad_()
    bias = torch.randn(1, 4, 20, 20).requires_grad_()
    late = _late(20, 20)
    check_call(tensors, late, _plainly(*tensors, _causal(), 0.5, 2.0), scaling=0.5, softcap=2.0)
    check_call(tensors, late, _plainly(*tensors, _causal(), sinks=sinks), s_aux=sinks)
    check_call(tensors, late, _plainly(*tensors, _causal(), 1.0, bias=bias), position_bias=bias, scaling=1.0)
    capped = _plainly(*tensors, _causal(), softcap=2.0, bias=bias)
    check_call(tensors, late, capped, position_bias=bias, softcap=2.0)
    scale = torch.tensor(0.3).requires_grad_()
    check_call(tensors, late, _plainly(*tensors, _causal(), scale), scaling=scale)


@pytest.mark.parametrize("q_offset", [15, torch.tensor(15)])
def test_bias_of_the_last_queries(q_offset: Any) -> None:
    tensors, bias = _qkv(5), torch.randn(1, 4, 5, 20).requires_grad_()
    visible = _causal()[15:]
    check_call(tensors, _late(5, 20, q_offset), _plainly(*tensors, visible, bias=bias), position_bias=bias)


@pytest.mark.parametrize("v_size", [4, 12])
def test_values_of_another_size(v_size: int) -> None:
    tensors = _qkv(v_size=v_size)
    check_call(tensors, _late(20, 20), _plainly(*tensors, _causal()))
    check_call(tensors, _late(20, 20), _plainly(*tensors, _causal(), 0.7), scaling=0.7)


def test_learned_queries_of_all_batch_elements() -> None:
    tensors = _qkv(3, batch=1)
    check_call(tensors, None, _plainly(*tensors), is_causal=False)


@pytest.mark.parametrize("shape", [(2, 1, 20, 20), (1, 4, 20, 20), (2, 4, 20, 20), (2, 1, 1, 20), (1, 1, 1, 20)])
def test_masks_of_users(shape: tuple[int, ...]) -> None:
    tensors = _qkv()
    visible = torch.rand(shape) < 0.6
    visible[..., 3] = True
    check_call(tensors, visible, _plainly(*tensors, visible))
    longer = torch.cat([visible, visible], -1)  # made for the longest cache
    check_call(tensors, longer, _plainly(*tensors, visible))
    for hidden in (torch.finfo(torch.float32).min, -torch.inf):
        bias = torch.randn(shape).requires_grad_()
        additive = torch.where(visible, bias, hidden)
        out = attend(Layer(), *tensors, additive)[0]
        want = _plainly(*tensors, visible, bias=bias)
        assert torch.allclose(out, want, atol=TOLERANCE)
        for x, y in zip(
            torch.autograd.grad(out.sin().sum(), [*tensors, bias]),
            torch.autograd.grad(want.sin().sum(), [*tensors, bias]),
            strict=True,
        ):
            assert torch.allclose(x, y, atol=TOLERANCE)


def test_numbers_of_users_under_autocast() -> None:
    """SDPA casts them: the lowest number of float32 is -inf in bfloat16, and 1.001 is 1."""
    q, k, v = (x.detach() for x in _qkv())
    bias = torch.randn(2, 1, 20, 20) + 1.001
    bias[:, :, 7] = torch.finfo(torch.float32).min
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(Layer(), q, k, v, bias)[0].transpose(1, 2)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    assert (out[:, :, 7] == 0).all()
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


def test_masks_of_one_key_hold_for_all_keys() -> None:
    """Check masks of BERT's step with a cache, which transformers makes for the tokens of the step alone."""
    tensors = _qkv()
    visible = torch.ones(2, 1, 1, 1, dtype=torch.bool)
    check_call(tensors, visible, _plainly(*tensors, visible))
    bias = torch.randn(2, 1, 20, 1)
    check_call(tensors, bias, _plainly(*tensors, bias=bias))


def test_keys_before_those_of_a_mask() -> None:
    """Check the keys that prefix tuning adds, which a mask that shows all keys does not count."""
    tensors = _qkv(20, 23)
    check_call(tensors, _late(20, 20, function=masking_utils.bidirectional_mask_function), _plainly(*tensors))
    with pytest.raises(ValueError, match="made for 20 queries and 20 keys, and the layer has 20 and 23"):
        attend(Layer(), *tensors, _late(20, 20))


def test_masks_that_change_in_place() -> None:
    q, k, v = _qkv()
    visible = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    additive = torch.zeros(2, 1, 20, 20)
    for _ in range(2):
        assert torch.allclose(attend(Layer(), q, k, v, visible)[0], _plainly(q, k, v, visible), atol=TOLERANCE)
        want = _plainly(q, k, v, additive == 0)
        assert torch.allclose(attend(Layer(), q, k, v, additive)[0], want, atol=TOLERANCE)
        visible[:, :, :, 5:] = False
        additive[:, :, :, 7:] = torch.finfo(torch.float32).min


def test_block_masks_of_torch() -> None:
    tensors = _qkv()
    mask = create_block_mask(lambda b, h, q, kv: kv % 3 != q % 2, None, None, 20, 20, device="cpu")
    visible = torch.arange(20) % 3 != torch.arange(20)[:, None] % 2
    check_call(tensors, mask, _plainly(*tensors, visible))


OFFSETS = torch.tensor([0, 7, 20], dtype=torch.int32)
SAME = (torch.arange(20)[:, None] < 7) == (torch.arange(20) < 7)


def test_packed_rows_by_cu_seq_lens() -> None:
    tensors = [x[:1].detach().requires_grad_() for x in _qkv()]
    given = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 13, "max_length_k": 13}
    causal = _plainly(*tensors, SAME & _causal())
    plain = make_mask(1, 20, 20, mask_function=masking_utils.causal_mask_function)
    check_call(tensors, plain, causal, **given)
    check_call(tensors, None, causal, **given)
    check_call(tensors, None, _plainly(*tensors, SAME & _causal(window=4)), sliding_window=4, **given)
    check_call(tensors, None, _plainly(*tensors, SAME), is_causal=False, **given)
    both = _remapped_row(masking_utils.causal_mask_function)
    assert len(both.parts.packing) == 1
    check_call(tensors, both, causal, **given)  # the documents are looked at once
    chunk = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    chunks = torch.arange(20) // 4
    late = make_mask(1, 20, 20, mask_function=chunk)
    check_call(tensors, late, _plainly(*tensors, SAME & _causal() & (chunks[:, None] == chunks)), **given)


def test_offsets_of_keys_that_are_a_copy() -> None:
    """Transformers' collator makes two tensors. Kernels take windows only where queries and keys start together."""
    found: list[str] = []
    with hf_attention.watched(lambda module, query, key, arguments: found.append(repr(arguments["mask"]))):
        for offsets in (OFFSETS, OFFSETS.clone(), torch.tensor([0, 8, 20], dtype=torch.int32)):
            attend(nn.Module(), *_qkv(), None, cu_seq_lens_q=OFFSETS, cu_seq_lens_k=offsets)
    assert ["kv_offsets" in text for text in found] == [False, False, True]


@pytest.mark.parametrize("name", ["GptOss", "Llama"])
def test_models_with_packed_rows_by_cu_seq_lens(name: str) -> None:
    """GPT-OSS makes its masks without position ids, so those alone leave the documents of a row together."""
    torch.manual_seed(0)
    model, _ = models(name)
    words, starts = torch.randint(3, WORDS, (1, 40)), torch.tensor([0, 15, 40], dtype=torch.int32)
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 25, "max_length_k": 25}
    row = model(input_ids=words, position_ids=positions, use_cache=False, **given).logits
    for start, stop in ((0, 15), (15, 40)):
        alone = model(input_ids=words[:, start:stop], use_cache=False).logits
        assert torch.allclose(row[:, start:stop], alone, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "given", "warns"),
    [
        ("GptOss", {"position_ids": PACKED}, True),
        ("GptOss", {}, False),
        ("GptOss", {"attention_mask": REAL["left"].long()}, False),
        ("GptOss", {"position_ids": PACKED[:1], "cu_seq_lens_q": True}, False),
        ("Llama", {"position_ids": PACKED}, False),
        ("Llama", {"position_ids": PACKED, "attention_mask": REAL["no padding"].long()}, True),
    ],
)
def test_documents_that_see_each_other_are_told_of(
    name: str, given: dict[str, Any], warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A change of the first document changes the second one exactly where the warning says so, as in "eager"."""
    monkeypatch.setattr(hf_attention, "_LOOKS", itertools.count())
    hf_attention._warn_of_documents.cache_clear()
    torch.manual_seed(0)
    words = IDS[:1] if "cu_seq_lens_q" in given else IDS
    if "cu_seq_lens_q" in given:
        starts = torch.tensor([0, 20, 50], dtype=torch.int32)
        given = given | {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 30, "max_length_k": 30}
    other = torch.cat([words[:, :20].flip(1), words[:, 20:]], 1)
    for model in models(name)[: 1 if "cu_seq_lens_q" in given else 2]:  # "eager" knows no cu_seq_lens
        rows = [model(input_ids=x, use_cache=False, **given).logits[:, 20:] for x in (words, other)]
        if "position_ids" in given:
            assert torch.allclose(rows[0], rows[1], atol=TOLERANCE) is not warns
    told = [r.getMessage() for r in caplog.records if "see each other" in r.getMessage()]
    assert len(told) == int(warns)
    assert all(f"{name}Attention: " in t and "use_cache=False and no attention_mask" in t for t in told)


@pytest.mark.parametrize("kind", ["mask", "plan", "block mask", "booleans"])
def test_documents_of_a_mask_of_users_are_not_told_of(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They do not see each other: a change of the first one leaves the second one as it is."""
    monkeypatch.setattr(hf_attention, "_LOOKS", itertools.count())
    hf_attention._warn_of_documents.cache_clear()
    ids = (torch.arange(LENGTH) >= 20).int()
    mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
    given = {
        "mask": lambda: mask, "plan": lambda: flexmasks.plan(mask, LENGTH, batch=BATCH),
        "block mask": lambda: flexmasks.block_mask(mask, LENGTH, batch=BATCH),
        "booleans": lambda: flexmasks.dense_mask(mask, LENGTH, batch=BATCH),
    }[kind]()  # fmt: skip
    other = torch.cat([IDS[:, :20].flip(1), IDS[:, 20:]], 1)
    inputs = {"attention_mask": given, "position_ids": PACKED, "use_cache": False}
    rows = [models("Llama")[0](input_ids=x, **inputs).logits[:, 20:] for x in (IDS, other)]
    assert torch.allclose(*rows, atol=TOLERANCE)
    assert not [r for r in caplog.records if r.name == "flexmasks"]


DOCUMENT_IDS = torch.arange(LENGTH).expand(BATCH, -1) // torch.tensor([[20], [33]])
DOCUMENT_PLACES = torch.arange(LENGTH) - torch.tensor([[20], [33]]) * DOCUMENT_IDS
# By each implementation of transformers that takes masks: what is given, and the booleans that layers are to see.
GIVEN: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Tensor, Tensor], Any]]] = {
    "mask": (lambda full, _: full, lambda full, _: full),
    "plan": (lambda full, _: flexmasks.plan(full, LENGTH, batch=BATCH), lambda full, _: full),
    "dict": (
        lambda full, near: {"full_attention": full, "sliding_attention": flexmasks.plan(near, LENGTH, batch=BATCH)},
        lambda full, near: {"full_attention": full, "sliding_attention": near},
    ),
}


@functools.cache
def _by(name: str, implementation: str, **changes: Any) -> nn.Module:
    """Return a tiny model with the weights of `models(name)`."""
    class_name, given = ALL[name]
    cls = getattr(transformers, class_name)
    model = cls._from_config(cls.config_class(**copy.deepcopy(given)), attn_implementation=implementation).eval()
    model.load_state_dict(models(name)[0].state_dict())
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention", "flexmasks"])
@pytest.mark.parametrize(
    ("name", "way"),
    [("Qwen3", "mask"), ("Qwen3", "plan"), ("Gemma3", "dict"), ("ModernBert", "dict"), ("Bert", "mask")],
)
def test_masks_of_users_by_implementations_of_transformers(
    name: str, way: str, implementation: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Outputs and gradients are those of "sdpa" with booleans, and rows that start anew are not told of."""
    monkeypatch.setattr(hf_attention, "_LOOKS", itertools.count())
    hf_attention._warn_of_documents.cache_clear()
    full = flexmasks.masks.document(document_ids=DOCUMENT_IDS) & flexmasks.masks.prefix_lm(prefix_len=3)
    near = full & flexmasks.masks.local(left=4, right=2)
    dense = [flexmasks.dense_mask(m, LENGTH, batch=BATCH) for m in (full, near)]
    inputs: dict[str, Any] = {"input_ids": IDS, "position_ids": DOCUMENT_PLACES}
    given, shown = GIVEN[way]
    results = []
    for model, mask in ((_by(name, implementation), given(full, near)), (_by(name, "sdpa"), shown(*dense))):
        out = model(**inputs, attention_mask=mask)[0]
        results.append([out, *_gradients(model, [out])])
    assert _greatest(*results) < TOLERANCE
    assert not [r for r in caplog.records if r.name == "flexmasks"]


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_trees_by_implementations_of_transformers(implementation: str, caplog: pytest.LogCaptureFixture) -> None:
    """Layers with windows see them along paths, and logits are those of the sequences one by one."""
    model, (_, eager) = _by("Gemma3", implementation), models("Gemma3")
    batch = trees.pack(SEQUENCES)
    want = [eager(torch.tensor([s]), use_cache=False).logits[0] for s in SEQUENCES]
    for mask in (batch.mask, batch.plan()):
        got = model(batch.tokens, position_ids=batch.position_ids, attention_mask=mask).logits
        assert _greatest(batch.gather(got), want) < TOLERANCE
    assert not [r for r in caplog.records if r.name == "flexmasks"]


def test_calls_without_masks_of_users_stay_those_of_transformers() -> None:
    """To register again changes nothing."""
    before = [dict(x._global_mapping) for x in (transformers.AttentionInterface, transformers.AttentionMaskInterface)]
    huggingface.register()
    after = [dict(x._global_mapping) for x in (transformers.AttentionInterface, transformers.AttentionMaskInterface)]
    assert before == after
    sdpa = inspect.unwrap(after[0]["sdpa"])
    assert sdpa.__module__ == "transformers.integrations.sdpa_attention"
    tensors, mask = _qkv(), flexmasks.dense_mask("causal", 20)
    layer = Layer(num_key_value_groups=2)
    assert torch.equal(after[0]["sdpa"](layer, *tensors, mask)[0], sdpa(layer, *tensors, mask)[0])


def test_masks_of_users_that_transformers_does_not_take_say_what_to_write() -> None:
    mask, other = flexmasks.masks.causal(), models("Llama")[1]
    functions = transformers.AttentionMaskInterface._global_mapping
    for function in ("eager", "sdpa", "flex_attention"):  # also as they are before `register`
        for sizes in ((2, 50, 50), (2, 50, mask.shape[-1])):
            with pytest.raises(ValueError, match=r"after `.*register\(\)`, by .*dense_mask\(mask, tokens"):
                inspect.unwrap(functions[function])(*sizes, attention_mask=mask)
    with pytest.raises(ValueError, match=r'By any other, as "eager", they take booleans'):
        other(IDS, attention_mask=mask)
    with pytest.raises(ValueError, match=r"such as flexmasks.get_mask makes of a name .* got 'causal'"):
        _by("Gemma3", "sdpa")(IDS, attention_mask=dict.fromkeys(LAYERS, "causal"))
    with pytest.raises(ValueError, match=r"4 queries and 20 keys; pass `use_cache=False`"):
        attend(Layer(), *_qkv(4), mask)


def _remapped_row(function: Any) -> LateMask:
    documents = (torch.arange(20) >= 7).long()[None]
    packed = masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(documents))
    return make_mask(1, 20, 20, mask_function=packed)


def test_images_of_different_sizes_by_cu_seq_lens() -> None:
    q, k, v = (x[:1].detach().requires_grad_() for x in _qkv(12))
    given = {"cu_seq_lens_q": torch.tensor([0, 5, 12]), "cu_seq_lens_k": OFFSETS, "is_causal": False}
    visible = (torch.arange(12)[:, None] < 5) == (torch.arange(20) < 7)
    check_call([q, k, v], None, _plainly(q, k, v, visible), **given)


POSITION_IDS = torch.cat([torch.arange(7), torch.arange(13)])


SEQUENCES = [
    [5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 14, 15, 16], [5, 6, 17, 18, 19, 20, 21], [22, 23, 24, 25, 26, 27],
]  # fmt: skip
WAYS = {"block mask": trees.TreeBatch.block_mask, "mask": lambda batch: batch.mask, "plan": trees.TreeBatch.plan}


def _gradients(model: nn.Module, outputs: list[Tensor]) -> Any:
    weights = [torch.arange(x.numel(), device=x.device).view(x.shape).cos() for x in outputs]
    loss = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
    learning = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, learning, allow_unused=True, materialize_grads=True)


def _greatest(got: list[Tensor], want: list[Tensor]) -> float:
    unit = max(1.0, *(float(y.abs().max()) for y in want if y.numel()))
    return max(float((x - y).abs().max()) for x, y in zip(got, want, strict=True) if x.numel()) / unit


def check_family(
    name: str, monkeypatch: pytest.MonkeyPatch, device: str = "cpu", **changes: Any
) -> dict[str, float | str]:
    """Return the errors of a tiny model by "flexmasks" against "eager", which computes sequences one by one.

    The sequences are computed one by one, also by layers that get no mask, and as trees, by each way to say so.
    Messages of flexmasks stand in place of errors, and {} for a model that does not call it.
    """
    own, eager = (model.to(device) for model in huggingface_families.tiny(name, **changes))
    calls = []

    def recorded(*given: Any, **arguments: Any) -> Any:
        calls.append(given)
        return attend(*given, **arguments)

    def without_mask(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **given: Any) -> Any:
        return attend(module, q, k, v, None, **given)

    def alone(model: nn.Module) -> list[Tensor]:
        places = {"position_ids"} & set(inspect.signature(model.forward).parameters)
        arguments = [{n: torch.arange(len(s), device=device)[None] for n in places} for s in SEQUENCES]
        return [
            model(input_ids=torch.tensor([s], device=device), use_cache=False, **a).logits[0]
            for s, a in zip(SEQUENCES, arguments, strict=True)
        ]

    want = alone(eager)
    if _greatest([want[0][:4]], [want[1][:4]]) > TOLERANCE:  # of the same tokens, as Moshi of 5.17
        pytest.skip(f'{name} is not causal by "eager" either')
    wanted = _gradients(eager, want)

    def error_of(run: Callable[[], list[Tensor]]) -> float | str:
        try:
            got = run()
        except ValueError as error:
            if str(error).startswith("flexmasks.integrations.huggingface: "):
                return str(error)
            raise
        return max(_greatest(got, want), _greatest(_gradients(own, got), wanted))

    functions = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(functions, "flexmasks", recorded)
    errors = {"alone": error_of(lambda: alone(own))}
    if not calls or isinstance(errors["alone"], str):
        return errors if calls else {}
    monkeypatch.setitem(functions, "flexmasks", without_mask)
    errors["no mask"] = error_of(lambda: alone(own))
    monkeypatch.setitem(functions, "flexmasks", attend)
    batch = trees.pack(SEQUENCES, device=device)
    for way, mask_of in WAYS.items():
        given = {"attention_mask": mask_of(batch), "position_ids": batch.position_ids, "use_cache": False}
        errors[way] = error_of(lambda given=given: batch.gather(own(batch.tokens, **given).logits))
    return errors


@pytest.mark.parametrize(
    ("family", "changes", "refused"),
    [
        ("Phimoe", {}, None),
        ("Llama4", {}, None),
        ("Exaone4", {}, None),
        ("Gemma3n", {}, None),
        ("Gemma4", {"head_dim": 256, "global_head_dim": 512}, None),  # of windows, and of full layers
        ("Qwen2Moe", {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}, None),
        ("Moshi", {}, None),
        ("GPT2", {}, None),
        ("Lfm2", {}, r"cannot compute trees of sequences: layers that are no attention \(conv\)"),
        ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, "layers that are no attention"),
        ("Bart", {}, "they count positions along the row"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_families_of_models(
    family: str, changes: dict[str, Any], refused: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    if not hasattr(transformers, name):
        pytest.skip(f"this release of transformers has no {name}")
    errors = check_family(name, monkeypatch, device, **changes)
    for way in ("alone", "no mask", *WAYS):
        if refused and way in WAYS:
            assert re.search(refused, str(errors[way])), errors
        else:
            assert errors[way] < TOLERANCE, errors


@pytest.mark.campaign
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", huggingface_families.families())
def test_all_causal_families(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are right, or refused in words, in each way."""
    if name == "BigBirdPegasusForCausalLM":
        pytest.skip("its decoder does not say that it is causal, so it cannot do without masks")
    try:
        errors = check_family(name, monkeypatch, device)
    except Exception as error:  # of transformers, or of a model that computes with its mask
        pytest.skip(f"{type(error).__name__}: {error}")
    assert all(isinstance(e, str) or e < TOLERANCE for e in errors.values()), errors


@pytest.mark.campaign
@pytest.mark.parametrize("name", huggingface_families.families())
def test_all_causal_families_by_implementations_of_transformers(name: str) -> None:
    """A mask and a plan give what they give by "flexmasks", where transformers takes the implementation."""
    try:
        model, _ = huggingface_families.tiny(name)
        given: dict[str, Any] = {"input_ids": IDS % huggingface_families.VOCABULARY, "use_cache": False}
        if "position_ids" in inspect.signature(model.forward).parameters:
            given["position_ids"] = DOCUMENT_PLACES
        mask = flexmasks.masks.causal() & flexmasks.masks.document(document_ids=DOCUMENT_IDS)
        want = model(**given, attention_mask=mask).logits
    except Exception as error:  # of transformers, or of a model that computes with its mask
        pytest.skip(f"{type(error).__name__}: {error}")
    for implementation in ("sdpa", "flex_attention"):
        try:
            model.set_attn_implementation(implementation)
        except ValueError:
            continue
        if model.config._attn_implementation == implementation:
            for held in (mask, flexmasks.plan(mask, LENGTH, batch=BATCH)):
                assert _greatest([model(**given, attention_mask=held).logits], [want]) < TOLERANCE


@pytest.mark.campaign
def test_most_causal_families_are_tried() -> None:
    names = huggingface_families.families()
    assert sum(map(huggingface_families.fits, names)) > 0.6 * len(names)


def test_layers_that_get_no_mask() -> None:
    """Masks do not arrive under sequence parallelism, but positions do."""
    tensors = _qkv()
    positions = POSITION_IDS.expand(2, -1)
    check_call(tensors, None, _plainly(*tensors, _causal()))
    check_call(tensors, None, _plainly(*tensors), Layer(is_causal=False))
    check_call(tensors, None, _plainly(*tensors), is_causal=False)
    check_call(tensors, None, _plainly(*tensors, _causal()), position_ids=torch.arange(20)[None])
    check_call(tensors, None, _plainly(*tensors, SAME & _causal()), position_ids=positions)
    check_call(tensors, None, _plainly(*tensors, SAME & _causal()), position_ids=POSITION_IDS[None])
    visible = SAME & _causal(window=5)
    check_call(tensors, None, _plainly(*tensors, visible), position_ids=positions, sliding_window=5)
    check_call(tensors, None, _plainly(*tensors, visible), Layer(sliding_window=5), position_ids=positions)
    config = transformers.Llama4TextConfig(
        attention_chunk_size=4, num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"]
    )
    chunks = POSITION_IDS // 4
    visible = SAME & _causal() & (chunks[:, None] == chunks)
    layer = Layer(config=config, layer_idx=1)
    check_call(tensors, None, _plainly(*tensors, visible), layer, position_ids=positions)
    chunks = torch.arange(20) // 4
    check_call(tensors, None, _plainly(*tensors, _causal() & (chunks[:, None] == chunks)), layer)
    check_call(tensors, None, _plainly(*tensors, _causal()), Layer(config=config, layer_idx=0))
    one = _qkv(1)
    check_call(one, None, _plainly(*one))  # decoding: the query is the last token


def _config_of(**given: Any) -> Any:
    kinds = ["full_attention", "sliding_attention", "chunked_attention"]
    return transformers.Llama4TextConfig(num_hidden_layers=3, layer_types=kinds, attention_chunk_size=4, **given)


# For each way in which models say the window or the chunk of a layer: the layer, the arguments, the window, the chunk.
OWN: dict[str, tuple[dict[str, Any], dict[str, Any], int | None, int | None]] = {
    "nothing": ({}, {}, None, None),
    "argument": ({}, {"sliding_window": 5}, 5, None),
    "argument None": ({"sliding_window": 5}, {"sliding_window": None}, None, None),
    "module": ({"sliding_window": 5}, {}, 5, None),
    "config": ({"config": transformers.PhimoeConfig(sliding_window=5), "layer_idx": 0}, {}, 5, None),
    "config without": ({"config": transformers.PhimoeConfig(sliding_window=None), "layer_idx": 0}, {}, None, None),
    "full": ({"config": _config_of(sliding_window=5), "layer_idx": 0}, {}, None, None),
    "sliding": ({"config": _config_of(sliding_window=5), "layer_idx": 1}, {}, 5, None),
    "chunked": ({"config": _config_of(sliding_window=5), "layer_idx": 2}, {}, None, 4),
}
PARENTS = torch.tensor([-1, *range(8), 3, *range(9, 15), 2, 16, 17, -1])  # branches at 3 and at 2, and another tree


def _on_paths(window: int | None, chunk: int | None, parents: Tensor = PARENTS) -> Tensor:
    """Return what tokens of the tree see, bool [T, T]: ancestors one by one, with their distances and depths."""
    length = len(parents)
    visible, depths = torch.zeros(length, length, dtype=torch.bool), []
    for token in range(length):
        path = [token]
        while parents[path[-1]] >= 0:
            path.append(int(parents[path[-1]]))
        depths.append(len(path) - 1)
        for distance, ancestor in enumerate(path):
            near = window is None or distance < window
            visible[token, ancestor] = near and (chunk is None or depths[ancestor] // chunk == depths[token] // chunk)
    return visible


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", ["block mask", "mask", "plan", "nothing", "copied block mask"])
@pytest.mark.parametrize("way", OWN)
def test_windows_and_chunks_of_layers(way: str, given: str, device: str) -> None:
    """A layer's window and chunk are the same for every mask that it gets, or if it gets none."""
    attributes, arguments, window, chunk = OWN[way]
    parents, tensors, check = PARENTS, _qkv(), check_call
    if device == "cuda":  # in the precision and of a size that flash-attn-4 takes
        parents = torch.cat([torch.where(PARENTS < 0, -1, PARENTS + 20 * i) for i in range(30)])
        halves = [x.detach().to(device, torch.bfloat16) for x in _qkv(600, 600, 64, 64)]
        tensors = [x.requires_grad_() for x in halves]
        check = functools.partial(check_call, atol=0.04)
    length, layer = len(parents), Layer(is_causal=True, **attributes)
    mask = flexmasks.get_mask("tree", parents=parents.to(device))
    exact = [x.float() for x in tensors]
    if given == "nothing":
        chunks = torch.arange(length) // (chunk or length)
        visible = _causal(length, length, window or length) & (chunks[:, None] == chunks)
        check(tensors, None, _plainly(*exact, visible.to(device)), layer, **arguments)
        return
    want = _plainly(*exact, _on_paths(window, chunk, parents).to(device))
    if given.endswith("block mask"):
        blocks: Any = flexmasks.block_mask(mask, length, device=device)
        check(tensors, copy.deepcopy(blocks) if given.startswith("copied") else blocks, want, layer, **arguments)
        return
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    elif chunk is not None:
        starts = torch.zeros(2, dtype=torch.int64, device=device)
        function = masking_utils.chunked_causal_mask_function(chunk, starts)
    held = mask if given == "mask" else flexmasks.plan(mask, length, batch=2, heads=4, device=device)
    late = make_mask(2, length, None, mask_function=function, attention_mask=held)
    check(tensors, late, want, layer, **arguments)


@pytest.mark.parametrize("way", ["nothing", "sliding", "chunked"])
def test_scores_of_plans_of_users(way: str) -> None:
    attributes, arguments, window, chunk = OWN[way]
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    elif chunk is not None:
        function = masking_utils.chunked_causal_mask_function(chunk, torch.zeros(2, dtype=torch.int64))
    tensors, bias = _qkv(), torch.randn(20, 20)
    plan = flexmasks.plan("tree", 20, batch=2, heads=4, parents=PARENTS, score="dense_bias", bias=bias[None, None])
    made = make_mask(2, 20, None, mask_function=function, attention_mask=plan)
    want = _plainly(*tensors, _on_paths(window, chunk), bias=bias)
    check_call(tensors, made, want, Layer(is_causal=True, **attributes), **arguments)


def test_chunks_of_masks_of_users_start_with_documents() -> None:
    """They do so in the masks that transformers makes of rows with these positions, too."""
    tensors = _qkv()
    ids = (torch.arange(20) >= 7).long().expand(2, -1)
    mask = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
    function = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
    chunks, layer = POSITION_IDS // 4, Layer(is_causal=True, **OWN["chunked"][0])
    want = _plainly(*tensors, SAME & _causal() & (chunks[:, None] == chunks))
    made = make_mask(2, 20, None, mask_function=function, attention_mask=mask)
    check_call(tensors, made, want, layer, position_ids=POSITION_IDS[None])
    chunks = torch.arange(20) // 4
    want = _plainly(*tensors, SAME & _causal() & (chunks[:, None] == chunks))
    check_call(tensors, made, want, layer)


def test_masks_of_layers_that_do_not_say_so_are_not_replaced() -> None:
    tree, tensors = flexmasks.get_mask("tree", parents=PARENTS), _qkv()
    overlay = masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.zeros(2, 20, dtype=torch.int64))
    )
    with pytest.raises(ValueError, match=r"has the mask .* of its own, which a mask as `attention_mask` replaces"):
        attend(Layer(), *tensors, make_mask(2, 20, None, mask_function=overlay, attention_mask=tree))
    window = masking_utils.sliding_window_causal_mask_function(6)
    with pytest.raises(ValueError, match=r"Layer has a window of None .* the mask sliding_window\(window=5\) for it"):
        attend(Layer(), *tensors, make_mask(2, 20, None, mask_function=window, attention_mask=tree))


def test_queries_without_a_mask_whose_places_are_unknown() -> None:
    with pytest.raises(ValueError, match="got no mask, and has 5 queries and 20 keys"):
        attend(Layer(), *_qkv(5), None)


def test_a_model_whose_masks_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a model whose attention function gets None for every mask, as DeepSpeed's Ulysses calls it."""
    own, other = models("Gemma2")
    inputs = _inputs("Gemma2", "packed")
    want = other(**inputs).logits

    def without_mask(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
        return attend(module, q, k, v, None, **given)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flexmasks", without_mask)
    got = own(**inputs).logits
    assert torch.allclose(got, want, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("inference", [False, True])
def test_only_the_first_layer_of_a_step_searches(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**TEXT | {"num_hidden_layers": 4}), attn_implementation="flexmasks"
    ).eval()
    searches = []
    search = road.known_call
    monkeypatch.setattr(road, "known_call", lambda *given: searches.append(given) or search(*given))
    with torch.inference_mode(inference), torch.no_grad():
        for padding in (None, PADDINGS["left"], PADDINGS["left"]):
            searches.clear()
            own(IDS, attention_mask=padding)
            assert len(searches) == 2  # before the first layer plans, and before what it planned is kept


@torch.inference_mode()
def test_inference_mode() -> None:
    """Check that the tensors of a plan count their changes, by which it notices them."""
    packed = masking_utils.packed_sequence_mask_function(DOCUMENTS.clone())
    for function in (masking_utils.causal_mask_function, masking_utils.and_masks(_every_third, packed)):
        mask = _made(function, "all", PADDINGS["left"].clone(), make_mask)
        assert mask.mask._tensors()
        assert not any(t.is_inference() for t in mask.mask._tensors())
        assert torch.equal(_dense(mask), _theirs(function, "all", PADDINGS["left"]))


# --- training ---


def test_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starcoder2 learns what it learns with "eager" whose weights are dropped at the same pairs."""
    sizes = {"attention_dropout": 0.3, "residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": 12}
    config = transformers.Starcoder2Config(**TEXT, **sizes)
    model = transformers.Starcoder2ForCausalLM._from_config(config, attn_implementation="flexmasks").double()

    def dropped(weights: Tensor, p: float, training: bool) -> Tensor:
        if not (p and training):
            return weights
        batch, heads, q_len, kv_len = weights.shape
        change = Dropout(p).kept((batch, heads, q_len), kv_len, weights.device)
        indices = torch.meshgrid(*map(torch.arange, weights.shape), indexing="ij")
        return weights * (change(torch.zeros(()), *indices) == 0) / (1 - p)

    def step() -> list[Tensor]:
        model.train().zero_grad()
        torch.manual_seed(3)
        loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    in_evaluation = model.eval()(IDS).logits
    got = step()
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model.eval()(IDS).logits, in_evaluation)
    monkeypatch.setattr(torch.nn.functional, "dropout", dropped)
    for a, b in zip(got, step(), strict=True):
        torch.testing.assert_close(a, b)


# --- attention weights ---


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Gemma3", "GptOss", "GPT2", "Bert", "T5", "Bart", "ViT"])
def test_attention_weights(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Those of "eager" where a row sees a key, with padding, windows, soft-caps, sinks, biases and other sequences."""
    hf_attention._warn_of_weights.cache_clear()
    if name == "ViT":
        inputs: dict[str, Tensor] = {"pixel_values": torch.randn(BATCH, 3, 30, 30)}
    else:
        inputs = {"input_ids": IDS, "attention_mask": REAL["left" if name in DECODERS else "right"].long()}
        inputs |= {"decoder_input_ids": IDS[:, :9]} if name in ("T5", "Bart") else {}
    got, want = (model(**inputs, output_attentions=True) for model in models(name))
    kinds = [key for key, value in want.items() if key.endswith("attentions") and value]
    assert len(kinds) == (3 if name in ("T5", "Bart") else 1)
    for kind in kinds:
        for found, wanted in zip(got[kind], want[kind], strict=True):
            assert found.shape == wanted.shape
            sees = found.detach().sum(-1, keepdim=True) > 0
            assert float(((found - wanted) * sees).abs().max()) < TOLERANCE
            assert sees.float().mean() > 0.5
    (told,) = [r.getMessage() for r in caplog.records if r.name == "flexmasks"]
    assert "output_attentions=True computes the attention weights of all layers" in told
    assert not models(name)[0](**inputs).get(kinds[0])


def test_attention_weights_learn() -> None:
    own, eager = models("Llama")
    outputs = [model(IDS, output_attentions=True, use_cache=False) for model in (own, eager)]
    got, want = (
        _gradients(m, [x.logits, *x.attentions]) for m, x in zip((own, eager), outputs, strict=True)
    )  # fmt: skip
    assert _greatest(got, want) < TOLERANCE


def test_attention_weights_that_the_config_asks_for() -> None:
    config = transformers.LlamaConfig(**TEXT, output_attentions=True)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="flexmasks")
    assert len(model(IDS).attentions) == config.num_hidden_layers
    assert model(IDS, output_attentions=False).attentions is None
    assert attend(Layer(), *_qkv(), None)[1] is None
    assert attend(Layer(), *_qkv(), None, output_attentions=True)[1].shape == (2, 4, 20, 20)


@pytest.mark.campaign
def test_attention_weights_of_models_in_graphs() -> None:
    """A compiled model returns them, and layers that are compiled one by one do not ask for them."""
    model = models("Llama")[0]
    with torch.no_grad():
        want = model(IDS, output_attentions=True)
        got = torch.compile(model, backend="eager")(IDS, output_attentions=True)
        assert _greatest(list(got.attentions), list(want.attentions)) < TOLERANCE
        layer = torch.compile(model.model.layers[0].self_attn, backend="eager", fullgraph=True)
        states = torch.randn(1, 8, 32)
        places = model.model.rotary_emb(states, torch.arange(8)[None])
        assert layer(states, position_embeddings=places, attention_mask=None)[1] is None


# --- bad use ---


@pytest.mark.parametrize("mask", [torch.ones(2, 20), torch.ones(2, 1, 20, 20, dtype=torch.int64), "causal"])
def test_other_masks_are_refused(mask: Any) -> None:
    with pytest.raises(ValueError, match=r"or bool or floating, \[batch or 1, heads or 1, queries, keys\], got"):
        attend(Layer(), *_qkv(), mask)


def test_masks_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"made for 10 queries and 10 keys, and the layer has 20 and 20.*hand on None"):
        attend(Layer(), *_qkv(), _late(10, 10))


@pytest.mark.parametrize("name", ["flash_masks", "my_sdpa", "", 3])
def test_names_of_transformers_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="which transformers takes for implementations of its own"):
        huggingface.register(name)


def test_registration() -> None:
    assert huggingface.register("masks_of_mine") == huggingface.register("masks_of_mine") == "masks_of_mine"
    config = transformers.LlamaConfig(**TEXT)
    model = transformers.LlamaModel._from_config(config, attn_implementation="masks_of_mine").eval()
    own, _ = models("Llama")
    model.load_state_dict(own.model.state_dict())
    assert torch.equal(model(IDS)[0], own.model(IDS)[0])
    with pytest.raises(ValueError, match="not_registered"):
        transformers.LlamaModel._from_config(transformers.LlamaConfig(**TEXT), attn_implementation="not_registered")


def test_sinks_of_each_query_are_refused() -> None:
    q = torch.randn(1, 2, 5, 8)
    attend = transformers.AttentionInterface()["flexmasks"]
    assert attend(torch.nn.Identity(), q, q, q, sinks=None)[0].shape == (1, 5, 2, 8)
    with pytest.raises(ValueError, match=r"by `sinks` in Identity; use attn_implementation=.eager."):
        attend(torch.nn.Identity(), q, q, q, sinks=torch.zeros(1, 5, 2))


# --- layers that choose keys for each query ---

_OF_TOKENS = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 5}
_OF_BLOCKS = {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 3}
CHOOSING: dict[str, dict[str, Any]] = {
    "DeepseekV32": _OF_TOKENS,
    "GlmMoeDsa": _OF_TOKENS | {"indexer_types": ["full", "shared"]},  # the second layer takes the keys of the first
    "MiniMaxM3VL": _OF_BLOCKS | {"index_local_blocks": 1},
    "AXK2": _OF_TOKENS,
    "HYV4": _OF_TOKENS,
}
_CHOOSING = [n if n in list(CHOOSING)[:3] else pytest.param(n, marks=pytest.mark.campaign) for n in CHOOSING]


LENGTHS_OF_30 = torch.tensor([[30], [19]])


@functools.cache
def _choosing(name: str) -> tuple[Any, Any]:
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this release of transformers has no {name}")
    source = inspect.getsource(sys.modules[getattr(transformers, f"{name}ForCausalLM").__module__])
    if "indices=sparse_indices" not in source and "block_indices=block_indices" not in source:
        pytest.skip(f"in this release of transformers layers of {name} keep their indices")
    pair: tuple[Any, Any] = huggingface_families.tiny(f"{name}ForCausalLM", **CHOOSING[name])
    return pair


@pytest.mark.parametrize("name", _CHOOSING)
def test_layers_that_choose_keys(name: str) -> None:
    """Outputs and gradients are those of "eager", whose layers add a matrix; ours read a topk."""
    own, other = _choosing(name)
    ids = IDS[:, :30] % huggingface_families.VOCABULARY
    seen: list[str] = []
    with hf_attention.watched(lambda module, query, key, arguments: seen.append(repr(arguments["mask"]))):
        for padding in (None, torch.arange(30) < LENGTHS_OF_30, torch.arange(30) >= 30 - LENGTHS_OF_30):
            real = torch.ones(2, 30, dtype=torch.bool) if padding is None else padding
            given = {} if padding is None else {"attention_mask": padding.long()}
            got, want = (model(ids, use_cache=False, **given).logits[real] for model in (own, other))
            assert torch.allclose(got, want, atol=TOLERANCE)
    layers = [m for m in seen if "topk" in m]
    assert len(layers) == (3 if name == "MiniMaxM3VL" else 6)  # every second layer of MiniMaxM3 sees all keys
    assert all("dense" not in m for m in layers)
    upstream = torch.randn_like(want)
    for (label, x), y in zip(own.named_parameters(), other.parameters(), strict=True):
        gradients = [torch.autograd.grad(z, p, upstream, True, allow_unused=True)[0] for z, p in ((got, x), (want, y))]
        assert (gradients[0] is None) == (gradients[1] is None) == ("indexer" in label or gradients[0] is None)
        if gradients[0] is not None:
            assert torch.allclose(*gradients, atol=1e-4), label


@pytest.mark.slow
@pytest.mark.parametrize("name", _CHOOSING)
def test_layers_that_choose_keys_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = _choosing(name)
    compile_ = torch.compile  # kernels are not made of C++
    monkeypatch.setattr(torch, "compile", lambda *args, **more: compile_(*args, **more | {"backend": "eager"}))
    ids = IDS[:, :30] % huggingface_families.VOCABULARY
    for cache in ("dynamic", "static"):
        options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "cache_implementation": cache}
        options |= {"attention_mask": torch.ones_like(ids), "disable_compile": True}
        kernels = _kernels()
        assert torch.equal(own.generate(ids, **options), other.generate(ids, **options))
        assert _kernels() <= kernels + 2


@pytest.mark.campaign
@pytest.mark.parametrize("name", CHOOSING)
def test_layers_that_choose_keys_in_a_graph(name: str) -> None:
    own, other = _choosing(name)
    counters.clear()
    compiled = torch.compile(own, fullgraph=True)
    for _ in range(3):
        ids = torch.randint(3, huggingface_families.VOCABULARY, (2, 24))
        with torch.no_grad():
            got, want = (model(ids, use_cache=False).logits for model in (compiled, other))
        assert torch.allclose(got, want, atol=TOLERANCE)
    assert counters["stats"]["unique_graphs"] == 1


def test_layers_that_share_chosen_keys_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = _choosing("GlmMoeDsa")
    made: list[Any] = []
    with hf_attention.watched(lambda module, query, key, arguments: made.append(flexmasks.get_mask(arguments["mask"]))):
        own(IDS[:, :30] % huggingface_families.VOCABULARY, use_cache=False)
    first, second = (next(m for m in mask.params["masks"] if m.name == "topk").params["indices"] for mask in made)
    assert first is second


def test_chosen_keys_that_cannot_be() -> None:
    q = torch.randn(1, 2, 8, 4)
    chosen = torch.zeros(1, 8, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"chooses blocks of keys of unknown size: it has no `indexer\.block_size`"):
        attend(nn.Identity(), q, q, q, block_indices=chosen[:, None])
    own = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 8, 8, "cpu", BLOCK_SIZE=8)
    for mask in (own, flexmasks.get_mask("causal")):
        with pytest.raises(ValueError, match="chooses keys for each query by an indexer, which knows nothing"):
            attend(nn.Identity(), q, q, q, mask, indices=chosen)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'transformers>=5.17'"):
        huggingface.register()


@pytest.mark.parametrize(
    ("name", "given"), [("Bloom", {"n_head": 4}), ("Doge", {}), ("Mpt", {"n_heads": 4}), ("XGLM", {})]
)
def test_models_without_an_attention_function_are_refused(name: str, given: dict[str, Any]) -> None:
    cls = getattr(transformers, f"{name}Model")
    model = cls._from_config(cls.config_class(**TEXT | given), attn_implementation="flexmasks").eval()
    for ids in (IDS, IDS[:, :1]):  # a mask of one query is a tensor, with which a model could compute
        with pytest.raises(ValueError, match=r'comput.* with .* mask.*use attn_implementation="eager"'):
            model(ids)


def test_late_masks_answer_as_tensors_do() -> None:
    late = _late(20, 20, function=masking_utils.sliding_window_causal_mask_function(6))
    assert (late.shape, late.ndim, late.dim(), late.size(3)) == ((2, 1, 20, 20), 4, 4, 20)
    assert (late.dtype, late.is_floating_point()) == (torch.bool, False)
    assert late.contiguous() is late
    assert late.to("cpu").shape == late.to(device="cpu").shape == late.shape
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        late.nothing  # noqa: B018
    calls: list[Callable[[], object]] = [
        lambda: late.to(torch.float32), lambda: late.to(device="cpu", dtype=torch.float32), lambda: late.float(),
        lambda: late.to("cpu", torch.bool), lambda: late.expand(2, 4, 20, 20), lambda: late.masked_fill(late, 0.0),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match=r'computes with its mask.*use attn_implementation="eager"'):
            call()
    assert repr(late) == str(late) == "LateMask(sliding_window(window=5), shape=(2, 1, 20, 20))"
    assert torch.equal(late.to_dense()[0, 0], _causal(window=6))
    assert torch.equal(late[:, 0, 3:5], _causal(window=6)[3:5].expand(2, -1, -1))
    assert torch.equal(late.to("cpu").to_dense(), late.to_dense())
    visible, other = late[...], torch.rand(2, 1, 20, 20) < 0.5
    assert (late.dtype, late.device) == (torch.bool, torch.device("cpu"))
    assert torch.equal(~late, ~visible)
    assert torch.equal(late.logical_not(), ~visible)
    assert torch.equal(late & other, visible & other)


@pytest.mark.slow
def test_rows_of_a_mask_inside_compile() -> None:
    """Check rows that Gemma 4 cuts out of its mask, and a bias of the last queries, as T5 has in chunks of a prompt."""
    function = masking_utils.sliding_window_causal_mask_function(6)
    tensors, bias = _qkv(5), torch.randn(1, 4, 5, 20)

    def rows(other: Tensor) -> tuple[Tensor, Tensor]:
        late = _late(20, 20, function=function)
        return late[:, :, slice(-3, None), :] & other, late.logical_not()

    def biased(*given: Tensor) -> Tensor:
        return attend(Layer(), *given, _late(5, 20, 15), position_bias=bias)[0]

    other = torch.rand(2, 1, 3, 20) < 0.5
    compiled = [torch.compile(f, fullgraph=True, backend="eager") for f in (rows, biased)]
    visible, hidden = compiled[0](other)
    assert torch.equal(visible, _causal(window=6)[-3:] & other)
    assert torch.equal(hidden, ~_causal(window=6).expand_as(hidden))
    want = _plainly(*tensors, _causal()[15:], bias=bias)
    assert torch.allclose(compiled[1](*tensors), want, atol=TOLERANCE)
