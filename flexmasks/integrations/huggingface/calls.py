"""The masks of attention calls of transformers' models, whatever attention function runs them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexmasks import Plan, dense_mask, get_mask
from flexmasks.extend import shown_by
from flexmasks.integrations.huggingface.attention import TAKING, documents_of, is_own, wants_weights, watched
from flexmasks.integrations.layers import LayerMask, layer_of_pairs

_LOOKUPS = ("get_interface", "__getitem__")
_MOST_PAIRS = 1 << 24  # of queries and keys, with which a function is tried


@contextlib.contextmanager
def calls_heard(
    model: nn.Module, hear: Callable[[nn.Module, LayerMask], None], hear_weights: Callable[[Tensor], None]
) -> Iterator[None]:
    """Tell `hear` the layer and the mask of each call of an attention function by a model, and then `hear_weights` the
    weights that the function returns, if it does.
    """
    from transformers import AttentionInterface

    layers, heard = set(model.modules()), set[Callable[..., Any]]()

    def hear_own(module: nn.Module, query: Tensor, key: Tensor, arguments: dict[str, Any]) -> None:
        given = arguments.get("mask")
        if module not in layers:
            return  # of another model, in another thread
        if isinstance(given, Plan):
            arguments |= {"mask": given.mask, "q_offset": given.q_offset}
        arguments["backend"] = "reference"  # it compiles nothing, and its memory is bounded on all devices
        if "block_mask" in arguments:
            hear(module, layer_of_pairs(_said("", module, query, key, arguments["block_mask"], {})))
        else:
            (batch, heads, q_len, _), first = query.shape, arguments["q_offset"]
            first = tuple(first.tolist()) if isinstance(first, Tensor) else first
            layer = LayerMask(get_mask(arguments["mask"]), first, q_len, key.shape[2], batch, heads)
            # A tensor of pairs, which says no positions, if there are more keys than queries.
            is_data = first == 0 and layer.kv_len > q_len
            hear(module, layer_of_pairs(layer.dense(key.device)) if is_data else layer)

    def hearing(function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.unwrap(function, stop=heard.__contains__) in heard:
            return function

        @functools.wraps(function)
        def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **options: Any) -> Any:
            is_heard, mask = call in heard and module in layers, options.pop("attention_mask", mask)
            if is_heard and not is_own(function) and not isinstance(mask, TAKING.get(function, ())):  # own ones tell
                hear(module, layer_of_pairs(_shown(function, module, q, k, v, mask, options)))
            results = function(module, q, k, v, mask, **options)
            weights = results[1] if is_heard and wants_weights(module, q.device, options) else None
            if isinstance(weights, Tensor) and weights.ndim == 4:  # flex_attention returns an lse
                hear_weights(weights.detach())
            return results

        heard.add(call)
        return call

    before = {name: vars(AttentionInterface).get(name) for name in _LOOKUPS}
    try:
        for name in _LOOKUPS:
            lookup = getattr(AttentionInterface, name)
            setattr(
                AttentionInterface, name, functools.wraps(lookup)(lambda *a, find=lookup, **o: hearing(find(*a, **o)))
            )
        with watched(hear_own):
            yield
    finally:
        heard.clear()  # a model may have kept a function
        for name, lookup in before.items():
            delattr(AttentionInterface, name) if lookup is None else setattr(AttentionInterface, name, lookup)


@torch.no_grad()
def _shown(
    function: Callable[..., Any], module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
) -> Tensor:
    """Return the pairs that a call shows, bool [B, H, Q, KV].

    They are found by calls in which all scores are equal, and values are 1 at one key and 0 at all others: these reach
    the outputs of the queries that see the key. A call tells of as many keys as values are wide; some take any width.
    """
    base = inspect.unwrap(getattr(function, "func", function))
    kind = base.__module__.rpartition(".")[2]
    said, parts = _said(kind, module, q, k, mask, options), []
    # Calls with pages write into them; flex_attention shows what blocks say, and takes long where it is not compiled.
    is_paged = options.get("cache") is not None or options.get("block_table") is not None
    if is_paged or said[0, 0].numel() > _MOST_PAIRS or (kind == "flex_attention" and isinstance(mask, BlockMask)):
        return said
    options = options | ({"dropout": 0.0} if "dropout" in options else {})
    width = 512 if kind == "sdpa_attention" or base.__name__ == "eager_attention_forward" else v.shape[3]
    for keys in torch.arange(v.shape[2], device=v.device).split(width):
        values = v.new_zeros(*v.shape[:3], width)
        values[:, :, keys, keys - keys[0]] = 1
        out = function(module, torch.zeros_like(q), torch.zeros_like(k), values, mask, **options)[0]
        parts.append(out[..., : len(keys)].transpose(1, 2) != 0)
    shown = torch.cat(parts, -1)
    # Functions differ in what they give queries without keys, such as the average of all values.
    return torch.where(said.any(-1, keepdim=True) & shown.any(-1, keepdim=True), shown, said)


def _said(kind: str, module: nn.Module, q: Tensor, k: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
    """Return the pairs that the arguments of a call say, bool [B, H, Q, KV].

    kind: the file of the attention function.
    """
    sizes = batch, heads, q_len, kv_len = k.shape[0], q.shape[1], q.shape[2], k.shape[2]
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    places = torch.arange(kv_len, device=k.device)
    if isinstance(mask, BlockMask):
        shown = dense_mask(shown_by(mask), q_len, kv_len, batch=batch, heads=heads, device=k.device, q_offset=0)
    elif isinstance(mask, Tensor) and mask.ndim == 4:
        shown = mask[..., :kv_len]
        shown = shown > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else shown.bool()
    elif mask is None and kind != "flash_attention":
        is_without = kind != "sdpa_attention" or not is_causal or q_len == 1
        shown = places >= 0 if is_without else places <= places[:q_len, None]
    else:  # flash's: padding, whose end is where queries end, and the rest by keywords
        stop = kv_len if mask is None else min(kv_len, mask.shape[1])
        distance = torch.arange(stop - q_len, stop, device=k.device)[:, None] - places
        window = options.get("sliding_window") or q_len + kv_len
        shown = (distance < window) & (distance > (-1 if is_causal else -window))
        if mask is not None:
            shown = shown & nn.functional.pad(mask[:, -kv_len:].bool(), (0, kv_len - stop))[:, None, None]
        elif q_len == kv_len:
            starts, positions = options.get("cu_seq_lens_q"), options.get("position_ids")
            if starts is not None:
                positions = places - starts[torch.bucketize(places, starts, right=True) - 1]
            if positions is not None and batch == 1:
                documents = documents_of(positions.reshape(1, -1))
                shown = shown & (documents[..., None] == documents[..., None, :])
    return shown.expand(sizes)
