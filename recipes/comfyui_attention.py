"""ComfyUI: attention with a mask by `flexmasks.sdpa`, in one file for the folder custom_nodes.

ComfyUI lets a model replace its attention: the function at `transformer_options["optimized_attention_override"]` gets
the function that would have run, and its arguments. Regional prompts and padded texts come with a mask, a tensor, which
other kernels than torch's refuse or ignore. Here it is looked at once, and its empty blocks are skipped.

To use it, install flexmasks in ComfyUI's environment, copy this file into `ComfyUI/custom_nodes/`, and put the node
"Attention by flexmasks" between the model and the sampler. Run as a recipe it needs no ComfyUI: a small stand-in calls
the override as ComfyUI does.
"""

# %%
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flexmasks
from flexmasks.extend import mask_and_score

# Arguments of ComfyUI's attention functions that change no numbers of torch's.
_IGNORED = {"transformer_options", "attn_precision", "low_precision_attention", "_inside_attn_wrapper"}

Attention = Callable[..., Tensor]


# %% The override. Calls without a mask, and calls with arguments that it does not know, go to the function that would
# have run, which may be another override.
def override(
    func: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    *rest: Any,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **options: Any,
) -> Tensor:
    """Attend as ComfyUI's attention_pytorch.

    Args:
        func: the attention function of ComfyUI.
        q, k, v: [B, N, heads * D], or [B, heads, N, D] with `skip_reshape`.
        mask: [Q, KV], [B, Q, KV] or [B or 1, heads or 1, Q or 1, KV], bool (True = visible) or added to the scores.
        rest, options: other arguments of ComfyUI's functions.

    Returns:
        The output, [B, N, heads * D], or [B, heads, N, D] with `skip_output_reshape`.
    """
    if mask is None or rest or options.keys() - _IGNORED - {"scale", "enable_gqa"}:
        layout = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
        return func(q, k, v, heads, mask, *rest, **(layout if not rest else {}), **options)
    if not skip_reshape:
        size = q.shape[2] // heads
        q, k, v = (x.unflatten(2, (-1, size)).transpose(1, 2) for x in (q, k, v))
    if mask.ndim == 3:
        mask = mask[:, None]
    chosen = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
    out = flexmasks.sdpa(q, k, v, mask, **chosen)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


# %% The node. ComfyUI finds it by the two dictionaries.
class AttentionByFlexmasks:
    """A node that sets the override of a model."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "model_patches"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model: Any) -> tuple[Any]:
        """Return a copy of a model with the override in front of the one that it has."""
        patched = model.clone()
        options = patched.model_options["transformer_options"] = {**patched.model_options["transformer_options"]}
        before = options.get("optimized_attention_override")

        def chained(func: Attention, *given: Any, **named: Any) -> Tensor:
            otherwise = func if before is None else lambda *a, **n: before(func, *a, **n)
            return override(otherwise, *given, **named)

        options["optimized_attention_override"] = chained
        return (patched,)


NODE_CLASS_MAPPINGS = {"AttentionByFlexmasks": AttentionByFlexmasks}
NODE_DISPLAY_NAME_MAPPINGS = {"AttentionByFlexmasks": "Attention by flexmasks"}


# %% A stand-in for ComfyUI: a model with options, and an attention function that asks for the override.
class StandIn:
    """What ComfyUI's ModelPatcher is to the node."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.model_options = options or {"transformer_options": {}}

    def clone(self) -> StandIn:
        return StandIn({"transformer_options": {**self.model_options["transformer_options"]}})


def by_torch(
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, skip_reshape: bool = False,
    skip_output_reshape: bool = False, scale: float | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """What ComfyUI runs without an override."""
    if not skip_reshape:
        q, k, v = (x.view(*x.shape[:2], heads, -1).transpose(1, 2) for x in (q, k, v))
    mask = mask[:, None] if mask is not None and mask.ndim == 3 else mask
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out if skip_output_reshape else out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def optimized_attention(*given: Any, transformer_options: dict[str, Any], **named: Any) -> Tensor:
    """Call the override of the options if there is one."""
    named |= {"transformer_options": transformer_options, "_inside_attn_wrapper": True}
    replacement = transformer_options.get("optimized_attention_override")
    return by_torch(*given, **named) if replacement is None else replacement(by_torch, *given, **named)


# %% Regional prompts: each region of the image and its own prompt see each other, and the regions see themselves and
# those beside them.
def regional_mask(regions: int, text: int, image: int, device: torch.device) -> Tensor:
    """Return the mask of prompts of `text` tokens, one after the other, and the image's tokens behind them, bool
    [regions * (text + image)] twice; each region is a strip of `image` tokens.
    """
    region = torch.arange(regions, device=device)
    of_token = torch.cat([region.repeat_interleave(text), region.repeat_interleave(image)])
    is_image = torch.arange(len(of_token), device=device) >= regions * text
    distance = (of_token[:, None] - of_token).abs()
    return (distance == 0) | ((distance == 1) & is_image[:, None] & is_image)


def main() -> None:
    """Compare the override with torch, and time both."""
    from _measure import DEVICE, DTYPE, ON_GPU, Attend, attention_rows, check, finish, start

    file = start(__doc__)
    plain = StandIn().model_options["transformer_options"]
    (patched,) = AttentionByFlexmasks().patch(StandIn())
    ours = patched.model_options["transformer_options"]

    heads, size = 4, 32
    mask = regional_mask(8, 64, 128, DEVICE)
    known, score, share = mask_and_score(mask, (2, heads, len(mask), len(mask)))
    print(f"{share:.0%} of the blocks of 128 x 128 have a visible pair: {known}\n")
    flat = torch.randn(3, 2, len(mask), heads * size, device=DEVICE)
    split = flat.unflatten(3, (heads, size)).transpose(2, 3)
    masks = {
        "booleans": mask,
        "a batch of booleans": mask.repeat(2, 1, 1),
        "numbers": torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, -torch.inf)[None, None],
        "no mask": None,
    }
    for what, given in masks.items():
        for layout in ({}, {"skip_reshape": True}, {"skip_reshape": True, "skip_output_reshape": True}):
            q, k, v = split if layout else flat
            out, want = (
                optimized_attention(q, k, v, heads, mask=given, transformer_options=options, **layout)
                for options in (ours, plain)
            )
            check(f"{what}, {', '.join(layout) or 'no options'}", out, want)
    q, k, v = split
    out = flexmasks.attention(q, k, v, mask=known, score=score)  # what flexmasks.sdpa calls where it pays
    check("by blocks", out, by_torch(q, k, v, heads, mask=mask, skip_reshape=True, skip_output_reshape=True))

    regions, text, image = (8, 128, 1024) if ON_GPU else (8, 64, 128)
    heads, size = (24, 128) if ON_GPU else (heads, size)
    mask = regional_mask(regions, text, image, DEVICE)
    q, k, v = torch.randn(3, 1, heads, len(mask), size, device=DEVICE, dtype=DTYPE)

    def under(options: dict[str, Any]) -> Attend:
        layout = {"skip_reshape": True, "skip_output_reshape": True}
        return lambda q, k, v: optimized_attention(q, k, v, heads, mask=mask, transformer_options=options, **layout)

    calls = {"override by flexmasks": under(ours), "torch, with the mask": under(plain)}
    rows = attention_rows(calls, heads * int(mask.sum()), q, k, v)
    finish(rows, file, f"{regions} regions of {image} tokens, each with a prompt of {text}.")


if __name__ == "__main__":
    main()
