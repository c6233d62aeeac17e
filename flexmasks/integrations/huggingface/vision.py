"""Vision towers whose attention runs all images in one call."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from flexmasks.extend import says_what_to_write
from flexmasks.integrations.huggingface.attention import is_own

_CALL = "flexmasks.integrations.huggingface.patch_vision"
_MARK = "runs_all_images_at_once"  # an attribute of patched layers


@says_what_to_write()
def patch_vision(model: nn.Module) -> int:
    """Let vision towers attend to all images in one call.

    Towers of Qwen's and GLM's models, and of others that were made after them, call an attention function of another
    library once for each image, or each window of an image. After this call they give all images at once to
    `flexmasks.attention`, as one packed row. The outputs and gradients are the same within rounding. Layers of audio
    that split sounds in this way are patched, too.

    The model changes in place; other models, also of the same class, do not. A second call changes nothing. A copy of a
    patched model is patched. After `model.set_attn_implementation("sdpa")` the towers run as before.

    Args:
        model: a model of transformers, or a part of it that holds the tower.

    Returns:
        The number of attention layers that run all images in one call, at least 1.

    Raises:
        ValueError: no layer of the model splits images, or the layers run by another attention function.

    Example:
        >>> from flexmasks.integrations import huggingface
        >>> name = huggingface.register()  # doctest: +SKIP
        >>> model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        ...     "Qwen/Qwen2.5-VL-3B-Instruct", attn_implementation="flexmasks"
        ... )  # doctest: +SKIP
        >>> huggingface.patch_vision(model)  # doctest: +SKIP
        32
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_CALL}: `model` must be a torch.nn.Module, got {type(model).__name__}.")
    layers = [(module, names) for module in model.modules() if (names := _arguments(module)) is not None]
    if not layers:
        raise ValueError(
            f"{_CALL}: no attention layer of {type(model).__name__} splits its input by image, so there is nothing to "
            "patch."
        )
    own = [(layer, names) for layer, names in layers if _is_own(layer)]
    if not own:
        config: Any = layers[0][0].config
        raise ValueError(
            f"{_CALL}: the vision tower of {type(model).__name__} runs by "
            f"attn_implementation={config._attn_implementation!r}. "
            'Call `huggingface.register()`, and load the model with attn_implementation="flexmasks" or call '
            '`model.set_attn_implementation("flexmasks")`.'
        )
    for layer, names in own:
        if not hasattr(layer, _MARK):
            setattr(layer, _MARK, True)
            layer.register_forward_pre_hook(functools.partial(_with_one_turn, names), with_kwargs=True)
    return len(own)


def _arguments(layer: nn.Module) -> tuple[str, ...] | None:
    """The names of the arguments of a layer that loops over images, else None. All forwards of transformers that take
    `cu_seqlens` and ask whether flash attention is requested have the loop.
    """
    forward = inspect.unwrap(type(layer).forward)
    if "is_flash_attention_requested" not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return None
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    hands_on = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return names if "cu_seqlens" in names and hands_on else None


def _is_own(layer: Any) -> bool:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS.get(layer.config._attn_implementation)
    return function is not None and is_own(function)


def _with_one_turn(
    names: tuple[str, ...], layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with which the loop of a layer has one turn, or None to leave them as they are. The layer splits
    its input by `cu_seqlens`, so it gets those of one sequence. It hands on the arguments that it does not know to the
    attention function, which so gets the real `cu_seqlens`.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    cu_seqlens = given.get("cu_seqlens")
    if cu_seqlens is None or not _is_own(layer):
        return None
    length = given[names[0]].shape[-2]
    # The layer reads these numbers. On the host it does not wait for the device.
    given["cu_seqlens"] = torch.tensor([0, length], device="cpu")
    return (given.pop(names[0]),), given | {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
