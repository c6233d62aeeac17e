"""The attention function that transformers' models call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import operator
import sys
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks import Mask, Plan, Score, attention, dense_mask, get_mask, get_score, packed, trees, weights
from flexmasks.extend import Kept, definition_of, in_message, mask_and_score, source_of, tensors_of
from flexmasks.integrations.huggingface.late import (
    DecodingMask,
    GivenMask,
    LateMask,
    ShardedMask,
    check_type,
    may_keep,
    of_kind,
)
from flexmasks.integrations.huggingface.recognition import Parts
from flexmasks.integrations.huggingface.sharding import Sharding, Whole, active, fail

_DERIVED: Kept[Tensor] = Kept("huggingface")  # what a step's layers compute from one tensor

_CAUSAL = ("causal", "sliding_window")
_FAR = 1 << 30  # above every distance
_log = logging.getLogger("flexmasks")
_LOOKS = itertools.islice(itertools.count(), 100)  # at positions, to warn: each waits for the device

_Result = tuple[Tensor, Tensor | None]
_Watch = Callable[[torch.nn.Module, Tensor, Tensor, dict[str, Any]], None]
_WATCHING: list[_Watch] = []


@contextlib.contextmanager
def watched(watch: _Watch) -> Iterator[None]:
    """Call `watch` at each call of a layer.

    watch: a function of the layer, its queries and keys, and the arguments of `flexmasks.attention`: `mask` and
        `q_offset`, or `block_mask`. It may add arguments.
    """
    _WATCHING.append(watch)
    try:
        yield
    finally:
        _WATCHING.remove(watch)


def _outside_graphs_in_decoding(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Let torch.compile leave out the calls of a function that get a DecodingMask."""
    outside = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **given: Any
    ) -> _Result:
        run = outside if isinstance(attention_mask, DecodingMask) else function
        return run(module, query, key, value, attention_mask, **given)

    return call


@_outside_graphs_in_decoding
def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | EllipsisType | None = ...,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> _Result:
    """The output of a layer's attention; transformers calls this function.

    Args:
        module: the layer.
        query, key, value: [B or 1, H, Q, D], [B, Hkv, KV, D] and [B, Hkv, KV, Dv].
        attention_mask: what `make_mask` returned; a torch BlockMask; a tensor [B or 1, H or 1, Q or 1, KV or 1], bool
            (True = visible) or float (added to the scores), see `flexmasks.extend.mask_and_score`; or None.
            Without a mask it follows from `is_causal`, the layer's window or chunk, and `position_ids`, as with
            sequence parallelism, where models get no mask.
        scaling, softcap, s_aux: `scale`, the cap of the score change "softcap", and `sink_logits` of
            `flexmasks.attention`.
        is_causal: by default the attribute of the module, else True.
        sliding_window: the number of visible keys of the layer's window, or None for no window. By default that of the
            module or of its config.
        position_bias: [B or 1, H or 1, Q, KV], added to the scores. It gets a gradient.
        cu_seq_lens_q, cu_seq_lens_k: int[N + 1], the starts of the sequences of a packed row and the end of the last.
        position_ids: [B or 1, Q], the position of each token in its document.
        indices, block_indices: the keys [B, Q, k], or blocks of keys [B, G, Q, k], that the layer's indexer chose for
            each query; -1 for none. A query sees those of them that the mask shows.
        dropout: the share of attention weights that are dropped, `dropout_p` of `flexmasks.attention`.
        others: arguments for other attention functions.

    Returns:
        The output [B, Q, H, Dv], and the attention weights [B, H, Q, KV] in its dtype where the model is called with
        `output_attentions=True`, else None.

    Raises:
        ValueError: the call needs something that fused attention does not have; the message says what to use.
    """
    _check(module, others)
    returns_weights = wants_weights(module, query.device, others)
    if query.shape[0] != key.shape[0]:  # learned queries, the same for all batch elements
        query = query.expand(key.shape[0], -1, -1, -1)
    if isinstance(attention_mask, Mask | Plan):  # of a dict by kind of layer
        attention_mask = of_kind(attention_mask, query, key)
    scores = [get_score("softcap", cap=float(softcap))] if softcap else []
    if isinstance(scaling, Tensor):  # a learned scale
        query, scaling = query * scaling, 1.0
    options: dict[str, Any] = {"scale": scaling, "sink_logits": s_aux, "dropout_p": dropout or 0.0}
    layer = _Layer(
        module, query, key, attention_mask, is_causal, sliding_window, position_bias, cu_seq_lens_q, position_ids
    )
    chosen = _chosen(module, indices, block_indices)
    sharding = attention_mask.sharding if isinstance(attention_mask, ShardedMask) else active()
    if sharding is not None:
        if returns_weights:
            fail("where sequences are spread over several processes, no attention weights are returned.")
        if chosen is not None:
            fail(f"{_CHOOSES.format(layer.name)}, which knows one process's part of a sequence only.")
        mask, whole = _of_whole(sharding, layer)
        out: Tensor = sharding.attention(query, key, value, whole.order, mask=mask, score=scores or None, **options)
        return out.transpose(1, 2).contiguous(), None
    mask, q_offset, added = (_without_mask(layer), 0, None) if attention_mask is None else _of_mask(layer)
    if chosen is not None:
        if isinstance(mask, BlockMask) or isinstance(attention_mask, GivenMask):
            fail(f"{_CHOOSES.format(layer.name)}, which knows nothing of a mask of yours.")
        mask, q_offset = (mask.mask, mask.q_offset) if isinstance(mask, Plan) else (mask, q_offset)
        mask = mask & chosen
    if isinstance(mask, BlockMask):
        arguments: dict[str, Any] = {"block_mask": mask}
    else:
        if cu_seq_lens_q is not None:
            own = packed(get_mask("full"), cu_seq_lens_q, _if_others(cu_seq_lens_k, cu_seq_lens_q))
            mask = own if mask.name == "full" else mask & own
        if position_bias is not None and not (isinstance(q_offset, int) and q_offset == 0):  # its rows are the queries
            mask, q_offset = _as_rows(mask, query, key, cast(int | Tensor, q_offset)), 0
        arguments = {"mask": mask, "q_offset": q_offset}
    if isinstance(attention_mask, GivenMask) and mask is not attention_mask.plan:
        scores = [x for x in (attention_mask.plan.score, *scores) if x is not None]
    if added is not None:
        scores.append(added)
    if position_bias is not None:
        # By the same object the layers of a step find each other's plans.
        has_rows = position_bias.shape[2] == query.shape[2]
        bias = position_bias if has_rows else position_bias.expand(-1, -1, query.shape[2], -1)
        scores.append(get_score("dense_bias", bias=bias))
    rows = attention_mask.rows if isinstance(attention_mask, LateMask) else None
    if rows is not None:
        if cu_seq_lens_q is not None or position_bias is not None or chosen is not None or returns_weights:
            fail(
                f"inside flexmasks.invariant() the tokens of {type(module).__name__} are moved to the front of their "
                "rows, because of padding on the left or a cache with a window, which cu_seq_lens_q, position_bias, "
                "chosen keys and output_attentions do not know of; pass texts without padding."
            )
        query, key, value = rows.queries(query), rows.keys(key), rows.keys(value)
        plan = rows.plan
        arguments = {"mask": plan} if may_keep(key.device) else {"mask": plan.mask, "q_offset": plan.q_offset}
    for watch in _WATCHING:
        watch(module, query, key, arguments)
    out = attention(query, key, value, **arguments, score=scores or None, **options)
    out = out if rows is None else rows.output(out)
    del options["dropout_p"]  # weights are those that are dropped
    weighed = _weighed(query, key, arguments, score=scores or None, **options) if returns_weights else None
    return out.transpose(1, 2).contiguous(), weighed


TAKING: dict[Callable[..., Any], tuple[type, ...]] = {}  # functions that `taking_masks` made, and their kinds


def taking_masks(function: Callable[..., Any], own: Callable[..., Any], kinds: tuple[type, ...]) -> Callable[..., Any]:
    """transformers' function, with our own in its place where `attention_mask` is of one of these kinds."""
    if function in TAKING:
        return function

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        mask = named["attention_mask"] if "attention_mask" in named else given[4] if len(given) > 4 else None
        return (own if isinstance(mask, kinds) else function)(*given, **named)

    TAKING[call] = kinds
    return call


def is_own(function: Callable[..., Any]) -> bool:
    """Whether an attention function is `attend`, also one that somebody listens to."""
    return inspect.unwrap(function) is inspect.unwrap(attend)


class _Layer(NamedTuple):
    """What the mask of a layer follows from, see `attend`.

    Its window and its chunk are the same for every mask that it may get.
    """

    module: torch.nn.Module
    query: Tensor
    key: Tensor
    mask: Any
    is_causal: bool | None
    sliding_window: int | EllipsisType | None
    position_bias: Tensor | None
    cu_seq_lens: Tensor | None
    position_ids: Tensor | None

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def config(self) -> Any:
        return getattr(self.module, "config", None)

    @property
    def kind(self) -> str | None:
        """What the config calls layers of this kind, such as "sliding_attention", or None if it has no kinds."""
        kinds, index = getattr(self.config, "layer_types", None), getattr(self.module, "layer_idx", None)
        return None if kinds is None else "" if index is None else kinds[index]

    @property
    def window(self) -> int | None:
        """The number of keys that a query sees, or None for all. Models pass None for layers that have no window."""
        if not isinstance(self.sliding_window, EllipsisType):
            return self.sliding_window
        if not _makes_windows(type(self.module).__module__):
            return None
        own = self.config if self.kind in (None, "sliding_attention") else None
        return cast(int | None, getattr(self.module, "sliding_window", getattr(own, "sliding_window", None)))

    @property
    def chunk(self) -> int | None:
        """The number of tokens of the chunks inside which queries see keys, or None."""
        is_chunked = self.kind == "chunked_attention"
        return cast(int | None, getattr(self.config, "attention_chunk_size", None)) if is_chunked else None


@functools.cache  # torch.compile looks through it
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _makes_windows(file: str) -> bool:
    """Whether the models of a file make masks with windows. Moshi's layers have the number of one, without its use."""
    names = vars(sys.modules.get(file, object))
    return "create_causal_mask" not in names or any("sliding_window" in n for n in names)


def _check(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Raise ValueError for what fused attention does not have."""
    config = getattr(module, "config", None)
    check_type(getattr(config, "model_type", None))  # a model that got a mask of four dimensions has not been asked yet
    if others.get("sinks") is not None:
        fail(
            f"the model has sinks of each query, by `sinks` in {type(module).__name__}; use "
            'attn_implementation="eager".'
        )
    if others.get("cache") is not None:
        fail('continuous batching is not supported; use `model.generate`, or attn_implementation="paged|sdpa".')


# --- keys that a layer chooses ---

_CHOOSES = "{} chooses keys for each query by an indexer"


def _chosen(module: torch.nn.Module, indices: Tensor | None, block_indices: Tensor | None) -> Mask | None:
    """The mask of the keys that a layer chose, or None. Layers that share their indices find each other's plans."""
    if indices is not None:
        return get_mask("topk", indices=_derived(Tensor.unsqueeze, indices, 2))
    if block_indices is None:
        return None
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if size is None:
        fail(f"{type(module).__name__} chooses blocks of keys of unknown size: it has no `indexer.block_size`.")
    return get_mask("topk", indices=_derived(Tensor.transpose, block_indices, 1, 2), granularity=size)


# --- attention weights ---


def wants_weights(module: torch.nn.Module, device: torch.device, others: dict[str, Any]) -> bool:
    """Whether a call of a model returns the weights of its layers: many, but not all, tell their layers so."""
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    # torch.compile traces what the collector holds only if it traces the whole model.
    collected = collector.get() if collector is not None and (collector.compiling or may_keep(device)) else None
    if others.get("output_attentions") or any(key.endswith("attentions") for key in collected or ()):
        return True
    is_told = collected is not None or others.get("output_attentions") is not None
    return not is_told and bool(getattr(getattr(module, "config", None), "output_attentions", False))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _weighed(query: Tensor, key: Tensor, arguments: dict[str, Any], **options: Any) -> Tensor:
    """Return the weights of a call, [B, H, Q, KV], as "eager" does but for rows that see nothing, which are 0."""
    _warn_of_weights()
    mask = arguments.get("block_mask", arguments.get("mask"))
    weighed: Tensor = weights(query, key, mask=mask, q_offset=arguments.get("q_offset"), **options)
    return weighed.to(query.dtype)


@functools.cache
def _warn_of_weights() -> None:
    _log.warning(
        "output_attentions=True computes the attention weights of all layers, [batch, heads, queries, keys], besides "
        "their attention, and holds them all. flexmasks.weights(q, k, rows=, heads=, topk=) returns some of a layer, "
        "and flexmasks.key_sums(q, k) their sums, without that memory."
    )


# --- masks that are given ---


def _of_mask(layer: _Layer) -> tuple[Any, int | Tensor | None, Score | None]:
    """The plan or mask that a layer got, the position of its first query, and what changes the scores."""
    mask, query, key = layer.mask, layer.query, layer.key
    if isinstance(mask, LateMask):
        _, _, q_length, kv_length = mask.shape
        # A prefix of the keys, as PEFT adds, is visible where all keys are.
        has_other_keys = key.shape[2] > kv_length and mask.mask.name != "full"
        if query.shape[2] != q_length or has_other_keys:
            fail(
                f"the mask was made for {q_length} queries and {kv_length} keys, and the layer has {query.shape[2]} "
                f"and {key.shape[2]}. Where sequences are spread over several processes, hand on None as the mask, and "
                "the position_ids of whole sequences."
            )
        own = mask.mask
        if isinstance(mask, GivenMask):
            _check_trees(layer, own)
            if mask.replaced is not None:
                _check_replaced(layer, mask.replaced)
                own = _of_layer(layer, own)
        elif layer.cu_seq_lens is not None:
            own = Parts(mask.parts.others, []).mask()
        elif _leaves_documents_together(layer, mask):
            _warn_of_documents(layer.name)
        is_as_planned = own is mask.mask and layer.cu_seq_lens is None and layer.position_bias is None
        if is_as_planned and key.shape[2] == kv_length and may_keep(key.device):
            return mask.plan, None, None
        return own, mask.q_offset, None
    if isinstance(mask, BlockMask):
        given, q_offset = source_of(mask) or (None, 0)
        if given is None or not trees.parents_in(given) or mask.seq_lengths[1] != key.shape[2]:
            return mask, 0, None
        _check_trees(layer, given)
        own = _of_layer(layer, given)
        return (mask if own is given else own), q_offset, None
    if not isinstance(mask, Tensor) or mask.ndim != 4 or not (mask.is_floating_point() or mask.dtype == torch.bool):
        what = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else in_message(mask)
        fail(
            "a mask must be a Mask, such as flexmasks.get_mask makes of a name or function, a plan, or bool or "
            f"floating, [batch or 1, heads or 1, queries, keys], got {what}."
        )
    if mask.shape[-1] > key.shape[2]:
        mask = mask[..., : key.shape[2]]
    found = mask_and_score(mask, (*query.shape[:3], key.shape[2]))
    return get_mask("full") if found.mask is None else found.mask, 0, found.score


def _check_trees(layer: _Layer, mask: Mask) -> None:
    if trees.parents_in(mask):
        kinds = tuple(getattr(layer.config, "layer_types", None) or ())
        obstacle = _obstacle_to_trees(type(layer.module).__module__, kinds)
        if obstacle:
            fail(f"models of {layer.name} cannot compute trees of sequences: {obstacle}. Call it with whole sequences.")


def _of_layer(layer: _Layer, mask: Mask) -> Mask:
    """A user's mask with the window or the chunks of a layer, in trees along their paths."""
    parents = [torch.as_tensor(p, device=layer.query.device) for p in trees.parents_in(mask)]
    depths = [_derived(trees.depths, p) for p in parents]
    window, chunk = layer.window, layer.chunk
    if window is not None:
        near = get_mask("band", lower=1 - window, upper=_FAR)
        mask = trees.windowed(mask, window - 1, depths) if depths else mask & near
    if chunk is None:
        return mask
    if depths:
        chunks = [get_mask("document", document_ids=_derived(operator.floordiv, d, chunk)) for d in depths]
        return functools.reduce(operator.and_, chunks, mask)
    positions = layer.position_ids if _is_of_tokens(layer.position_ids, layer.query.shape[2]) else None
    documents = None if positions is None else _several_documents(positions)
    return _of_documents([mask], chunk, documents, positions, layer.query.shape[0])


_NOT_ATTENTION = {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "recurrent"}  # kinds of layers


@functools.cache  # torch.compile looks through it
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _obstacle_to_trees(file: str, kinds: tuple[str, ...]) -> str:
    """Why models of a file with these kinds of layers mix the sequences of a tree, or ""."""
    from transformers import PreTrainedModel

    found = vars(sys.modules.get(file, object)).values()
    classes: list[Any] = [x for x in found if isinstance(x, type) and x.__module__ == file]
    models = [x for x in classes if issubclass(x, PreTrainedModel)]
    others = sorted(_NOT_ATTENTION.intersection(kinds))
    if others or (not kinds and any(x._is_stateful for x in models)):
        names = f" ({', '.join(others)})" if others else ""
        return f"layers that are no attention{names} pass on all earlier tokens of a row, also those of other branches"
    if models and not any("position_ids" in inspect.signature(x.forward).parameters for x in models):
        return "they count positions along the row, and take no `position_ids`"
    return ""


def _check_replaced(layer: _Layer, replaced: list[Mask]) -> None:
    """Check that a user's mask replaces nothing of the model's own mask that it does not say."""
    window, chunk = None, None
    for own in replaced:
        if own.name not in ("causal", "full", "sliding_window", "chunked"):
            fail(f"a layer of the model has the mask {own!r} of its own, which a mask as `attention_mask` replaces.")
        window = own.params["window"] + 1 if own.name == "sliding_window" else window
        chunk = own.params["chunk"] if own.name == "chunked" else chunk
    if (window, chunk) != (layer.window, layer.chunk):
        fail(
            f"{layer.name} has a window of {layer.window} and chunks of {layer.chunk} tokens, but the model makes the "
            f"mask {Parts(replaced, []).mask()!r} for it, so it is unknown which of both a mask as "
            "`attention_mask` is to keep; pass booleans [batch, 1, queries, keys]."
        )


def _leaves_documents_together(layer: _Layer, mask: LateMask) -> bool:
    """Whether positions start anew in a row that the mask does not divide into documents. Only the first calls of a
    first layer are looked at, and none with padding, whose positions may start anew, too.
    """
    if not may_keep(mask.device) or getattr(layer.module, "layer_idx", None) or mask.parts.packing:
        return False
    _, _, q_length, kv_length = mask.shape
    if q_length != kv_length or not _is_of_tokens(layer.position_ids, q_length):
        return False
    if (
        any(m.name == "key_padding" or not definition_of(m).by_library for m in mask.parts.others)
        or next(_LOOKS, None) is None
    ):
        return False
    return _several_documents(layer.position_ids) is not None


@functools.cache
def _warn_of_documents(layer: str) -> None:
    _log.warning(
        "%s: position_ids start anew inside of rows, but transformers made the mask without them, because the model "
        "made a cache, got an attention_mask, too, or leaves them out, as GPT-OSS does. So the documents of a packed "
        'row see each other, as with attn_implementation="eager". To keep them apart, pass use_cache=False and no '
        "attention_mask, or cu_seq_lens_q and cu_seq_lens_k, as "
        "DataCollatorWithFlattening(return_flash_attn_kwargs=True) does.",
        layer,
    )


def _derived(make: Callable[..., Tensor], given: Tensor, *sizes: int) -> Tensor:
    """Return make(given, *sizes), which only the first layer of a step computes."""
    if not may_keep(given.device):
        return make(given, *sizes)
    return _DERIVED.made((make, *sizes), [given], lambda: make(given, *sizes))


def _if_others(offsets: Tensor | None, known: Tensor) -> Tensor | None:
    """Offsets, or None if they are the known ones: kernels take windows only where keys and queries start together."""
    if offsets is None or offsets is known:
        return None
    if offsets.shape != known.shape or not may_keep(known.device):
        return offsets
    are_same = _DERIVED.made((_if_others,), [offsets, known], lambda: (offsets == known).all().cpu())
    return None if bool(are_same) else offsets


def documents_of(position_ids: Tensor) -> Tensor:
    """The number of each token's document; one starts where positions do not go on by one."""
    first = position_ids[:, :1] - 1
    return (position_ids.diff(dim=1, prepend=first) != 1).cumsum(1)


def _as_rows(mask: Mask, query: Tensor, key: Tensor, q_offset: int | Tensor) -> Mask:
    """The mask with its queries at position 0."""
    batch, heads, q_length, _ = query.shape
    visible = dense_mask(mask, q_length, key.shape[2], batch=batch, heads=heads, device=query.device, q_offset=q_offset)
    return get_mask("dense", visible=visible)


# --- calls without a mask ---


def _without_mask(layer: _Layer) -> Mask:
    q_length, position_ids = layer.query.shape[2], layer.position_ids
    one = _of_one_document(layer, q_length)
    if one.name not in _CAUSAL:
        return one
    if q_length != layer.key.shape[2]:
        fail(
            f"{layer.name} got no mask, and has {q_length} queries and {layer.key.shape[2]} keys, so it is unknown "
            "where its queries start."
        )
    documents = None
    if layer.cu_seq_lens is None and _is_of_tokens(position_ids, q_length):
        documents = _several_documents(position_ids)
    return _of_documents([one], layer.chunk, documents, position_ids, layer.query.shape[0])


def _of_one_document(layer: _Layer, q_length: int) -> Mask:
    """The mask of a layer inside a document, without chunks."""
    is_causal, window = layer.is_causal, layer.window
    if is_causal is None:
        is_causal = getattr(layer.module, "is_causal", True)
    if is_causal and q_length != 1:
        return get_mask("causal") if window is None else get_mask("sliding_window", window=window - 1)
    if window is None or q_length == 1 or layer.query.shape[2] != layer.key.shape[2]:
        return get_mask("full")  # Diffusion Gemma's canvas sees all that its cache of a window has kept
    # Windows that look both ways include the number of the config; some models pass one more to attention functions.
    side = getattr(layer.config, "sliding_window", None)
    side = window - 1 if side is None else side
    return get_mask("local", left=side, right=side)


def _is_of_tokens(position_ids: Tensor | None, length: int) -> TypeGuard[Tensor]:
    """Whether positions are those of all tokens, not of a grid of pixels or of some tokens only."""
    return position_ids is not None and position_ids.ndim == 2 and position_ids.shape[1] == length


def _several_documents(position_ids: Tensor) -> Tensor | None:
    """The number of each token's document, or None if each row is one document."""
    documents = _derived(documents_of, position_ids)
    if may_keep(documents.device) and not bool(_derived(_has_several, documents)):
        return None
    return documents


def _of_documents(
    others: list[Mask],
    chunk: int | None,
    documents: Tensor | None,
    position_ids: Tensor | None,
    batch: int,
    chunk_start: Tensor | None = None,
) -> Mask:
    """The mask of rows of documents, in which chunks start anew.

    chunk_start: int[B], the position of the first chunk where each row is one document; by default 0.
    """
    if documents is not None and position_ids is not None:
        if chunk is not None:
            documents = documents * documents.shape[1] + position_ids // chunk
        others = [*others, get_mask("document", document_ids=documents.expand(batch, -1))]
    elif chunk is not None:
        start = {} if chunk_start is None else {"start": chunk_start}
        others = [*others, get_mask("chunked", chunk=chunk, **start)]
    return Parts(others, []).mask()


def _has_several(documents: Tensor) -> Tensor:
    return documents[:, -1].any().cpu()


# --- sequences of several processes ---


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.inference_mode(False)  # tensors of inference mode have no versions, by which layers find each other's plans
def _of_whole(sharding: Sharding, layer: _Layer) -> tuple[Mask, Whole]:
    """A layer's mask of the whole sequence, and the parts of the processes."""
    given, position_ids = layer.mask, layer.position_ids
    if isinstance(given, ShardedMask) and given.of_whole is not None:
        return given.of_whole
    length, padding = layer.query.shape[2], None
    problem = _problem(layer)
    if isinstance(given, ShardedMask):
        masks, padding, packing = given.parts.others, given.padding, given.position_ids
        chunk = next((m.params["chunk"] for m in masks if m.name == "chunked"), None)
        others = [m for m in masks if m.name != "chunked"]  # all processes together know where chunks start
        if any(tensors_of(m) for m in others) and not problem:
            problem = (
                f"the mask of {layer.name} has tensors that each process knows only for its own part: "
                f"{Parts(others, []).mask()!r}. Only position_ids and a two-dimensional attention_mask are made whole; "
                "for other masks call `flexmasks.integrations.distributed.attention` in the layer."
            )
    else:
        chunk = layer.chunk
        others = [_of_one_document(layer, q_length=0)]
        packing = position_ids if others[0].name in _CAUSAL and _is_of_tokens(position_ids, length) else None
    known = packing if packing is not None else position_ids if _is_of_tokens(position_ids, length) else None
    if padding is not None:
        whole = sharding.whole("attention_mask", padding, known, length, problem)
    else:
        whole = sharding.whole("position_ids of rows that may be packed", packing, known, length, problem)
    documents: Tensor | None = None
    start: Tensor | None = None
    if whole.tensor is not None and padding is None:
        documents = _several_documents(whole.tensor)
        if documents is not None and not all(definition_of(m).by_library for m in others):
            fail("a mask function of another origin cannot be applied to packed rows of a sharded sequence.")
    elif whole.tensor is not None and not (may_keep(whole.tensor.device) and bool(whole.tensor.all())):
        others.append(get_mask("key_padding", attention_mask=whole.tensor))
        start = (whole.tensor.cumsum(1) == 0).sum(1)  # transformers' chunks start behind the padding on the left
    mask = _of_documents(others, chunk, documents, whole.tensor, layer.query.shape[0], start)
    if isinstance(given, ShardedMask):
        given.of_whole = mask, whole
    return mask, whole


def _problem(layer: _Layer) -> str:
    """Why a layer cannot attend to a sequence of several processes, or ""."""
    if layer.position_bias is not None:
        return f"{layer.name} adds a bias between the tokens of its own part to the scores, which is unknown to others."
    if layer.cu_seq_lens is not None:
        return "leave out cu_seq_lens_q and cu_seq_lens_k: position_ids say where the documents of packed rows start."
    given, q_length, kv_length = layer.mask, layer.query.shape[2], layer.key.shape[2]
    if given is not None and not isinstance(given, ShardedMask):
        kind = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        return (
            f"{layer.name} got a mask between the tokens of its own part, {kind}. Pass a two-dimensional "
            "attention_mask [batch, tokens] for padding, and position_ids for packed rows; the mask must be made "
            "inside of `sharded`."
        )
    if q_length != kv_length:
        return (
            f"{layer.name} has {q_length} queries and {kv_length} keys. A sharded sequence has no key-value cache, and "
            "no cross-attention to another sequence."
        )
    if _WATCHING:
        return "`flexmasks.watch` shows the masks of whole sequences; call it outside of `sharded`."
    return ""
