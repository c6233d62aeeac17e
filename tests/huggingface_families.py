"""Tiny causal models of all families of the installed transformers, found by what the release lists."""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import torch
import transformers
from torch import nn
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 60
# What configs name in many ways; each gets those that it has.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "max_position_embeddings": 256,
    "n_positions": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "conv_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "n_inner", "ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "rotary_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2), **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "first_k_dense_replace", "encoder_layers"), 1),
    "moe_layers": [], "sliding_window": 3, "attention_chunk_size": 4, "use_sliding_window": True,
    "num_kv_shared_layers": 0,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "conv_L_cache"), 8), "mamba_expand": 2, "mamba_dt_rank": 4,
    **dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
         "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0,
    ),
}  # fmt: skip
_MORE: dict[str, dict[str, Any]] = {  # what some families need besides
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Gemma4ForCausalLM": {"global_head_dim": 8},
    "Gemma4UnifiedForCausalLM": {"global_head_dim": 8},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
_OPTIONAL = ("sliding_window", "attention_chunk_size", "pad_token_id", "head_dim", "num_key_value_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers")


def families() -> list[str]:
    """Return the classes of causal models."""
    given = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return sorted({n for names in given for n in ([names] if isinstance(names, str) else names)})


def tiny(name: str, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model by "flexmasks" and one with the same parameters by "eager", with layers of each kind.

    Raises an error for families that these sizes do not fit.
    """
    cls, config = _checked(name, changes)
    made = []
    for implementation in ("flexmasks", "eager"):
        torch.manual_seed(0)
        made.append(cls._from_config(copy.deepcopy(config), attn_implementation=implementation).eval())
    torch.manual_seed(1)
    for parameter in made[0].parameters():  # sinks, biases and gates are not 0
        parameter.data += 0.05 * torch.randn_like(parameter)
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def fits(name: str) -> bool:
    """Whether these sizes fit a family."""
    try:
        _checked(name, {})
    except Exception:
        return False
    return True


def _checked(name: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """Return a class and its config, after a model without data."""
    cls = getattr(transformers, name)
    config = _tiny_config(cls.config_class, _MORE.get(name, {}) | changes)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters())
    if count > 10_000_000:  # of parts that are images or sounds
        raise ValueError(f"{name} has {count} parameters")
    return cls, config


def _has(config: Any, name: str) -> bool:
    """Whether a config has an attribute, and a value for it if it needs one."""
    try:
        return getattr(config, name) is not None or name in _OPTIONAL
    except AttributeError:
        return False
    except Exception:  # layers have different ones
        return True


def _tiny_config(cls: type, changes: dict[str, Any]) -> Any:
    usual = cls()
    known = {n for n in _SIZES if not isinstance(getattr(cls, n, None), property)}
    given = {n: _SIZES[n] for n in known if _has(usual, n)}
    count = next((n for n in _LAYERS if hasattr(usual, n)), "num_hidden_layers")
    if _has(usual, "kv_lora_rank"):  # its keys and values have as many heads as its queries
        given["num_key_value_heads"] = 4
    kinds = getattr(usual, "layer_types", None)
    if kinds and not isinstance(getattr(cls, "layer_types", None), property):
        kinds = sorted(set(kinds), reverse=True)  # the last layers of some models must be full
        if len(kinds) == 1:
            source = inspect.getsource(sys.modules[cls.__module__])
            kinds = sorted(
                {*kinds, *(k for k in LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING if f'"{k}"' in source)}, reverse=True
            )
        kinds = kinds if len(kinds) > 1 else kinds * 2
        given["layer_types"] = kinds
    given[count] = len(kinds) if kinds and "layer_types" in given else 2
    for one_each, value in (("no_rope_layers", 1), ("mlp_layer_types", None)):
        if getattr(usual, one_each, None):
            given[one_each] = [value or usual.mlp_layer_types[-1]] * given[count]
    return cls(**given | changes)
