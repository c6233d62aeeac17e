"""Messages say what to write: names of other libraries, owners of parameters, advice that runs when it is pasted.

Errors in a user's own function name its file and line, in a traceback of the user's code.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import operator
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex

import flexmasks
from flexmasks import orders, trees
from flexmasks.bench import demo
from flexmasks.flex import flex_attention
from flexmasks.integrations import distributed
from flexmasks.kernels import compiling
from flexmasks.spec import definitions

PACKAGE = Path(flexmasks.__file__).parent
B, H, S, D = 2, 4, 16, 8
torch.manual_seed(50)
Q, K, V = torch.randn(3, B, H, S, D).unbind(0)


def message_of(call: Callable[..., Any], *args: Any, **arguments: Any) -> str:
    """Return the message of a call that must fail in words of this library."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call(*args, **arguments)
    message = str(caught.value)
    assert type(caught.value) in (TypeError, ValueError)
    assert message.startswith("flexmasks")
    assert len(message) < 500
    return message


def refused(**arguments: Any) -> str:
    return message_of(flexmasks.attention, Q, K, V, **{"backend": "reference", **arguments})


# --- names of other libraries ---

# The classes of xformers.ops.fmha.attn_bias, and the mask or score that each is.
XFORMERS = {
    "LowerTriangularMask": "causal",
    "LowerTriangularFromBottomRightMask": "causal",
    "LowerTriangularFromBottomRightLocalAttentionMask": "sliding_window",
    "LowerTriangularMaskWithTensorBias": "alibi",
    "LocalAttentionFromBottomRightMask": "local",
    "BlockDiagonalMask": "document",
    "BlockDiagonalCausalMask": "packed",
    "BlockDiagonalCausalFromBottomRightMask": "packed",
    "BlockDiagonalCausalLocalAttentionMask": "packed",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": "packed",
    "BlockDiagonalPaddedKeysMask": "padding",
    "BlockDiagonalGappyKeysMask": "padding",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": "padding",
    "BlockDiagonalCausalWithOffsetGappyKeysMask": "padding",
    "BlockDiagonalLocalAttentionPaddedKeysMask": "padding",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": "padding",
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": "padding",
    "PagedBlockDiagonalPaddedKeysMask": "paged",
    "PagedBlockDiagonalGappyKeysMask": "paged",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": "paged",
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": "paged",
    "PagedBlockDiagonalCausalLocalPaddedKeysMask": "paged",
}
ELSEWHERE = XFORMERS | {
    "swa": "sliding_window",
    "SWA": "sliding_window",
    "sliding_attention": "sliding_window",
    "SlidingWindowMask": "sliding_window",
    "create_sliding_window_causal_mask": "sliding_window",
    "window_size": "sliding_window",
    "full_attention": "causal",
    "causal_mask": "causal",
    "causal_mask_function": "causal",
    "is_causal": "causal",
    "make_causal_mask": "causal",
    "chunked_attention": "chunked_causal",
    "ChunkedCausalMask": "chunked_causal",
    "neighborhood": "natten",
    "NeighborhoodAttention2D": "natten",
    "na2d": "natten",
    "NA1D": "natten1d",
    "generate_natten": "natten",
    "generate_doc_mask_mod": "document",
    "packed_block_causal_mask": "document",
    "segment_ids": "document",
    "generate_dilated_sliding_window": "dilated_window",
    "generate_sink_mask": "sink_window",
    "StreamingLLM": "sink_window",
    "sta": "sliding_tile",
    "LocalMask": "local",
    "local_attention": "local",
    "NumpyMask": "dense",
    "custom_mask": "dense",
    "key_padding_mask": "key_padding",
    "startend_row_indices": "flashmask",
    "block_table": "paged",
    "BlockDiagonalCausalMsk": "packed",  # misspelt
    "mistral": "sliding_window",
    "Sliding-Window": "sliding_window",
    "logits_soft_cap": "softcap",
    "generate_tanh_softcap": "softcap",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_other_libraries(name: str) -> None:
    message = message_of(flexmasks.get_mask, name)
    assert f"no mask is named {name!r}; did you mean " in message
    assert repr(ELSEWHERE[name]) in message
    if name in XFORMERS:  # what is said of the class
        assert name in message.partition("did you mean")[2]


@pytest.mark.parametrize(
    ("name", "nearest"), [("casual", "causal"), ("slidng_window", "sliding_window"), ("prefixlm", "prefix_lm")]
)
def test_misspelt_names_come_alone(name: str, nearest: str) -> None:
    hint = message_of(flexmasks.get_mask, name).partition("; ")[2]
    assert hint.startswith(f"did you mean {nearest!r}")
    assert "(" not in hint


def test_names_of_scores_in_other_libraries() -> None:
    for name, score in {"logits_soft_cap": "softcap", "attn_mask": "dense_bias", "alibi_slopes": "alibi"}.items():
        assert repr(score) in message_of(flexmasks.get_score, name)
    assert "the mask 'causal'" in message_of(flexmasks.get_score, "is_causal")


# --- parameters and keywords ---


@pytest.mark.parametrize(
    ("arguments", "owner"),
    [
        ({"cap": 30.0}, "score=flexmasks.get_score('softcap', cap=...)"),
        ({"mask": "causal", "cap": 30.0}, "of the score 'softcap'"),
        ({"mask": "causal", "slopes": [1.0] * H}, "of the score 'alibi'"),
        ({"score": "softcap", "cap": 3.0, "window": 4}, "mask=flexmasks.get_mask('sliding_window', window=...)"),
        ({"window": 4}, "of the masks 'sliding_window', 'dilated_window'"),
        ({"mask": lambda b, h, q, kv: q >= kv, "document_ids": [0] * S}, "of the masks 'document'"),
        ({"mask": "causal", "table": Q}, "of the scores 'relative_bias'"),
        ({"mask": "causal", "seq_lens": [3, 4]}, "of the mask 'grouped_tril'"),
    ],
)
def test_parameters_without_their_mask(arguments: dict[str, Any], owner: str) -> None:
    assert owner in refused(**arguments)
    kind = "score" if "score" in owner else "mask"
    assert f"a parameter of the {kind}" in refused(**arguments)


def test_parameters_without_their_mask_in_other_calls() -> None:
    for call in (flexmasks.block_mask, flexmasks.dense_mask, flexmasks.show):
        assert "of the score 'softcap'" in message_of(call, "causal", S, cap=3.0)
    assert "'sliding_window'" in message_of(flexmasks.masked_softmax, torch.zeros(1, 1, S, S), mask="causal", window=3)
    assert "'sliding_window'" in message_of(flexmasks.get_score, "softcap", cap=3.0, window=3)
    message = message_of(distributed.balance, "sliding_window", 1024, 4, window=16)
    assert "flexmasks.integrations.distributed.balance: no argument is named `window`" in message
    assert "flexmasks.get_mask('sliding_window', window=...)" in message


def public_calls() -> list[Any]:
    import flexmasks.integrations.huggingface as huggingface

    modules: list[ModuleType] = [flexmasks, distributed, huggingface]
    calls = [getattr(module, name) for module in modules for name in module.__all__]
    calls += [orders.tile_order, orders.morton_order, orders.inverse_order, orders.in_tiles]
    return [call for call in calls if inspect.isfunction(call)]


def test_arguments_that_no_public_call_takes() -> None:
    for call in public_calls():
        parameters = inspect.signature(call).parameters.values()
        if call.__name__ in ("cache_info", "clear_caches", "get_mask", "get_score"):
            continue
        given = [Q] * sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            given = ["causal", 4] if given and call.__name__ in ("block_mask", "dense_mask", "show", "draw") else given
        else:
            assert f"{call.__name__}: no argument is named `nonsense`; it takes" in message_of(call, *given, nonsense=1)
        if given:
            assert f"{call.__name__}: missing" in message_of(call)


def test_pairs_where_one_number_is_meant() -> None:
    for pair in ((3, 0), [3, 0], np.array([3, 0])):
        message = refused(mask="sliding_window", window=pair)
        assert "got (3, 0); with two sides it is mask='local', left=3, right=0" in message
    flexmasks.attention(Q, K, V, mask="local", left=3, right=0, backend="reference")
    assert "got (2, 3)." in refused(mask="sink_window", sinks=(2, 3), window=3)


def test_modules() -> None:
    for name, masks in {"causal": ["causal"], "natten": ["natten", "natten1d", "natten3d"], "local": ["local"]}.items():
        module = importlib.import_module(f"flexmasks.masks.{name}")
        for message in (refused(mask=module), message_of(flexmasks.get_mask("causal").__and__, module)):
            assert sorted(re.findall(r"mask='(\w+)'", message)) == masks
    assert "write score='softcap'" in refused(score=importlib.import_module("flexmasks.scores.softcap"))
    assert "a module; write the name of a mask" in refused(mask=flexmasks.masks)


# Calls with what they need, and the parameters of their mask.
CAUSAL, IDS = flexmasks.get_mask("causal"), flexmasks.get_mask("document", document_ids=[0] * S)
ALIBI, CAP = flexmasks.get_score("alibi"), flexmasks.get_score("softcap", cap=3.0)
TOKENS, PAGES = torch.randn(6, H, D), torch.randn(4, 8, H, D)
PUBLIC_CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "attention": (flexmasks.attention, (Q, K, V), {"backend": "reference"}),
    "explain": (flexmasks.explain, (Q, K, V), {"backend": "reference"}),
    "varlen": (flexmasks.varlen_attention, (TOKENS, TOKENS, TOKENS, [0, 6]), {}),
    "paged": (flexmasks.paged_attention, (Q[:, :, :1], PAGES, PAGES, [[0], [1]], [3, 4]), {}),
    "softmax": (flexmasks.masked_softmax, (torch.randn(B, H, S, S),), {}),
    "hidden": (flexmasks.scaled_masked_softmax, (torch.randn(B, H, S, S), torch.ones(S, S) > 0), {}),
    "blocks": (flexmasks.block_mask, ("causal", S), {}),
    "dense": (flexmasks.dense_mask, ("causal", S), {}),
    "plan": (flexmasks.plan, ("causal", S), {}),
    "draw": (flexmasks.draw, ("causal", S), {}),
    "trees": (trees.pack, ([[1, 2], [1, 3]],), {}),
}


def calling(name: str, **given: Any) -> Callable[[], Any]:
    call, args, arguments = PUBLIC_CALLS[name]
    return lambda: call(*args, **{**arguments, **given})


def made(mask: str, **given: Any) -> Callable[[], Any]:
    return lambda: flexmasks.get_mask(mask, **given)


def scored(score: Callable[..., Any]) -> Callable[[], Any]:
    return calling("attention", score=score)


SEEN = torch.ones(S, S) > 0
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    # arguments of calls elsewhere
    "BLOCK_SIZE": (
        calling("blocks", BLOCK_SIZE=64),
        "block_mask: no argument is named `BLOCK_SIZE`; did you mean `block_size`?",
    ),
    "B": (calling("dense", B=2), "did you mean `batch`?"),
    "H": (calling("plan", H=2), "flexmasks.plan: no argument is named `H`; did you mean `heads`?"),
    "Q_LEN": (
        lambda: flexmasks.block_mask("causal", Q_LEN=S),
        "missing a required argument: 'q_len'; it takes mask, q_len",
    ),
    "KV_LEN": (lambda: flexmasks.dense_mask(KV_LEN=S, mask="causal"), "q_offset; for `KV_LEN` write `kv_len`."),
    "query": (
        lambda: flexmasks.attention(query=Q, key=K, value=V),
        "for `query` write `q`; for `key` write `k`; for `value` write `v`.",
    ),
    "_compile": (calling("blocks", _compile=True), "leave it out"),
    "dim": (calling("softmax", dim=-1), "leave it out: the softmax is over the last dimension, that of the keys."),
    "dim of a mask": (calling("softmax", mask="causal", dim=-1), "leave it out: the softmax"),
    "kernel_options": (
        calling("paged", kernel_options={}),
        "flexmasks.paged_attention: no argument is named `kernel_options`; it takes q,",
    ),
    "return_max": (calling("varlen", return_max=True), "flexmasks.attention has an argument of that name"),
    "rotary_cos": (calling("varlen", rotary_cos=Q), "no argument is named `rotary_cos`; it takes q, k, v, offsets"),
    "cache_seqlens": (calling("paged", cache_seqlens=[3, 4]), "did you mean `kv_lens`?"),
    "cache_seqlens of attention": (
        calling("attention", cache_seqlens=[3, 4]),
        "pass where queries start as `q_offset`; of a paged cache, flexmasks.paged_attention takes them as `kv_lens`",
    ),
    "cache_position": (calling("attention", cache_position=3), "did you mean `q_offset`?"),
    "position_ids of documents": (
        calling("attention", mask="document", position_ids=torch.zeros(B, S)),
        "did you mean `document_ids=(position_ids == 0).cumsum(-1)`?",
    ),
    "head of a picture": (calling("draw", head=1), "did you mean `h`?"),
    "length of a row of trees": (calling("trees", length=64), "write `max_tokens`."),
    "offsets of explain": (lambda: flexmasks.explain(Q, K, V, [0, S]), "return_lse=, backend=, kernel_options=."),
    "cu_seqlens of packed": (lambda: flexmasks.packed("causal", cu_seqlens=[0, S]), "for `cu_seqlens` write `offsets`"),
    **{
        f"{n}": (calling("attention", **{n: True}), "flexmasks.weights(q, k, mask=..., rows=...) returns")
        for n in ("return_weights", "return_attention_weights", "need_weights", "output_attentions")
    },
    "softmax of a name": (
        lambda: flexmasks.scaled_masked_softmax(torch.zeros(S, S), "causal"),
        "got str; names, Masks and functions go to flexmasks.masked_softmax(x, mask=",
    ),
    "softmax of a Mask": (
        lambda: flexmasks.scaled_masked_softmax(torch.zeros(S, S), CAUSAL),
        "got Mask; names, Masks and functions go to",
    ),
    "softmax without heads": (
        calling("softmax", mask=torch.ones(B, S, S) > 0),
        "a mask [batch, queries, keys] is mask[:, None]",
    ),
    "softmax of several masks": (calling("softmax", mask=["causal", CAUSAL]), "make one mask of several by `&`"),
    "softmax of several names": (
        calling("softmax", mask=["causal", "document"], document_ids=torch.zeros(S)),
        "make one mask of several by `&`",
    ),
    "a batch of trees": (calling("attention", mask=trees.pack([[1]])), ", a batch of trees; write batch.mask."),
    "part of a sentence": (
        made("causal_document"),
        "(...generate_packed_causal_doc_mask_mod and FlashMask",
    ),
    "trees by position": (lambda: trees.pack([[1]], [[2]]), "flexmasks.trees.pack takes sequences by position"),
    "trees": (calling("trees", pad=0), "flexmasks.trees.pack: no argument is named `pad`"),
    "pages of trees": (lambda: trees.pack([[1]]).pages(page=3), "flexmasks.trees.TreeBatch.pages: missing"),
    # methods
    "Plan.update": (
        lambda: flexmasks.plan("causal", S).update(TOKENS),
        "flexmasks.Plan.update takes nothing by position",
    ),
    "Plan.explain": (
        lambda: flexmasks.plan("causal", S).explain(Q),
        "flexmasks.Plan.explain: missing a required argument: 'k'",
    ),
    "Mask.blocks": (
        lambda: CAUSAL.blocks(),
        "flexmasks.Mask.blocks: missing a required argument: 'q_len'; it takes q_len,",
    ),  # type: ignore[call-arg]
    "BLOCK_SIZE of Mask.blocks": (
        lambda: CAUSAL.blocks(S, BLOCK_SIZE=8),
        "named `BLOCK_SIZE`; it takes q_len, kv_len, batch, heads, device, block_size, q_offset, exact; write `block_",
    ),
    "TreeBatch.plan": (
        lambda: trees.pack([[1]]).plan(3),
        "flexmasks.trees.TreeBatch.plan takes nothing by position; write",
    ),
    "a head that is no function": (
        lambda: trees.pack([[1, 2]]).logprobs(torch.zeros(1, 2, 3), 3),
        "`head` must be a function",
    ),
    "a Mask of nothing": (lambda: flexmasks.Mask(), "a Mask is made by flexmasks.get_mask("),
    "list_masks of a name": (
        lambda: flexmasks.list_masks("causal"),
        "flexmasks.list_masks takes nothing by position, got 'causal'.",
    ),
    **{
        f"a device of {name}": (
            lambda call=call: call("gpu"),
            f"flexmasks.{name}: `device` must be a torch device, got 'gpu'",
        )
        for name, call in {
            "Mask.to": CAUSAL.to,
            "Score.to": ALIBI.to,
            "Plan.to": lambda d: flexmasks.plan("causal", S).to(d),
            "trees.TreeBatch.to": lambda d: trees.pack([[1]]).to(d),
            "trees.pack": lambda d: trees.pack([[1]], device=d),
            "block_mask": lambda d: flexmasks.block_mask("causal", S, device=d),
        }.items()
    },
    # what a call is made of is not named
    "offsets of varlen": (
        lambda: flexmasks.varlen_attention(TOKENS, TOKENS, TOKENS, [1, 6]),
        "flexmasks.varlen_attention: `offsets` must rise",
    ),
    "offsets of varlen, too far": (
        lambda: flexmasks.varlen_attention(TOKENS, TOKENS, TOKENS, [0, 7]),
        "flexmasks.varlen_attention: `offsets` must be",
    ),
    "scale of varlen": (calling("varlen", scale="x"), "flexmasks.varlen_attention: `scale` must be"),
    "backend of paged": (calling("paged", backend="x"), "flexmasks.paged_attention: `backend` must be"),
    "a dtype's name": (
        calling("softmax", dtype="float32"),
        "must be torch.float16, .bfloat16, .float32 or .float64, got 'f",
    ),
    "whole numbers as visible": (calling("attention", mask="dense", visible=SEEN.int()), "; pass `x.bool()` if 1 is"),
    "whole numbers as slopes": (calling("attention", score="alibi", slopes=[1, 2, 3, 4]), "; pass `x.float()`."),
    "blocks of flex_attention": (
        lambda: flex_attention(Q, K, V, block_mask=SEEN),
        "flexmasks.flex.flex_attention: `block_mask` must be a BlockMask, got Tensor",
    ),
    "return_aux": (
        lambda: flex_attention(Q, K, V, return_aux=True),
        "`return_aux` must be an AuxRequest, got True; write AuxRequest(lse=True",
    ),
    "a mask of a tuple": (
        calling("attention", mask=lambda b, h, q, kv: (q, kv)),
        "must return a boolean tensor, got a tuple.",
    ),
    # parameters of masks elsewhere
    "kernel_size": (calling("attention", mask="natten", height=4, width=4, kernel_size=3), "did you mean `kernel`?"),
    "kernel_size of get_mask": (made("natten", kernel_size=3), "did you mean `kernel`?"),
    "canvas_h": (made("natten", canvas_h=3), "did you mean `height`?"),
    "is_causal of natten": (made("natten", is_causal=True), "did you mean `causal`?"),
    "window_size": (made("sliding_window", window_size=3), "did you mean `window`?"),
    "window_size of a constructor": (lambda: flexmasks.masks.sliding_window(window_size=3), "did you mean `window`?"),
    "window_size of local": (made("local", window_size=(3, 0)), "did you mean `left=..., right=...`?"),
    "sliding_window": (made("sliding_window", sliding_window=3), "did you mean `window=sliding_window - 1`?"),
    "W": (calling("attention", mask="sliding_window", W=3), "did you mean `window=W - 1`?"),
    "W of an image": (made("sasa", height=4, W=4, window=1), "did you mean `width`?"),
    "chunk_size": (made("chunked_causal", chunk_size=3), "did you mean `chunk`?"),
    "segment_ids": (calling("blocks", mask_mod=None), "did you mean `mask`?"),
    "doc_ids": (made("document", segment_ids=[0]), "did you mean `document_ids`?"),
    "soft_cap": (lambda: flexmasks.get_score("softcap", soft_cap=3.0), "did you mean `cap`?"),
    "soft_cap of a call": (calling("attention", soft_cap=3.0), 'pass score="softcap", cap=...'),
    # operators
    **{
        f"masks and {sign}": (
            lambda operation=operation: operation(CAUSAL, IDS),
            f"masks are combined by `&`, `|` and `~`, not by `{sign}`; got causal() and document(",
        )  # type: ignore[misc]
        for sign, operation in {
            "+": operator.add,
            "-": operator.sub,
            "*": operator.mul,
            "/": operator.truediv,
            "@": operator.matmul,
            "^": operator.xor,
            "%": operator.mod,
            "<": operator.lt,
        }.items()
    },
    "minus a mask": (lambda: -CAUSAL, "not by `-`; got causal()."),  # type: ignore[operator]
    "a sum of masks": (lambda: sum([CAUSAL, IDS]), "not by `+`; got causal() and 0"),  # type: ignore[list-item]
    "a tensor plus a mask": (lambda: Q + CAUSAL, "not by `+`; got causal() and float32["),
    "or of masks": (lambda: CAUSAL or IDS, "not by `and`, `or`, `not`, `if`; got causal()"),
    "or of scores": (lambda: ALIBI or CAP, "score=[a, b], which applies them in turn, not by `and`, `or`"),
    "a sum of scores": (
        lambda: ALIBI + CAP,
        "score=[a, b], which applies them in turn, not by `+`; got alibi() and softcap(cap=3.0)",
    ),  # type: ignore[operator]
    "scores and masks": (lambda: ALIBI & CAUSAL, "scores are combined as a list"),  # type: ignore[operator]
    "masks and scores": (lambda: CAUSAL & ALIBI, "a mask is needed, but alibi() is a score"),
    # names
    **{
        f"{name!r}": (
            made(name),
            f"mask=flexmasks.get_mask('causal'){sign}flexmasks.get_mask('document', document_ids=...).",
        )
        for name, sign in {
            "causal+document": " & ",
            "causal & document": " & ",
            "causal, document": " & ",
            "causal and document": " & ",
            "causal | document": " | ",
            "causal or document": " | ",
        }.items()
    },
    "'~causal'": (made("~causal"), "mask=~flexmasks.get_mask('causal')."),
    "'not causal'": (made("not causal"), "mask=~flexmasks.get_mask('causal')."),
    "'causal()'": (made("causal()"), "pass mask=flexmasks.get_mask('causal')."),
    "'sliding_window(window=3)'": (
        made("sliding_window(window=3)"),
        "pass mask=flexmasks.get_mask('sliding_window', window=...).",
    ),
    "'softcap+alibi'": (
        lambda: flexmasks.get_score("softcap+alibi"),
        "score=[flexmasks.get_score('softcap', cap=...), flexmasks.get_score('alibi')].",
    ),
    # scores that return something else
    **{
        f"a score of {got}": (
            scored(lambda s, b, h, q, kv, x=x: x),
            f"a score function must return a floating number for each score, got {got}. (File",
        )
        for got, x in {"None": None, "a float": 1.0, "a str": "x", "a ndarray": np.ones(3)}.items()
    },
    "a score of a tuple": (scored(lambda s, b, h, q, kv: (s, b)), "floating number for each score, got a tuple."),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, words = MISTAKES[name]
    assert words in message_of(call)


SIGNATURES_ELSEWHERE = (
    "query key value attn_mask dropout_p is_causal scale enable_gqa "  # SDPA
    "softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs cu_seqlens_q cu_seqlens_k "
    "max_seqlen_q max_seqlen_k block_table cache_seqlens qv num_splits pack_gqa learnable_sink rotary_cos seqused_k "
    "cache_batch_idx leftpad_k sm_margin "  # FlashAttention
    "attn_bias p op output_dtype kernel_size stride dilation rel_pos_bias "  # xformers, NATTEN
    "attention_mask scaling sliding_window s_aux position_ids output_attentions "  # transformers
    "custom_mask logits_soft_cap window_left sm_scale pos_encoding_mode"  # FlashInfer
)


@pytest.mark.parametrize("name", PUBLIC_CALLS)
def test_arguments_of_other_libraries(name: str) -> None:
    """A call that does not take an argument says so by its name, and means only what it takes itself."""
    peers = (torch_flex.create_block_mask, torch_flex.flex_attention, torch.nn.MultiheadAttention.forward)
    theirs = {n for peer in peers for n in inspect.signature(peer).parameters} - {"self"}
    call = PUBLIC_CALLS[name][0]
    takes = {
        *inspect.signature(call).parameters,
        *(inspect.signature(flexmasks.attention).parameters if name == "explain" else ()),
    }
    where = ".".join([*(["flexmasks.trees"] if name == "trees" else ["flexmasks"]), call.__name__])
    for argument in theirs.union(SIGNATURES_ELSEWHERE.split()) - takes:
        message = message_of(calling(name, **{argument: 3}))
        assert f" is named `{argument}`; " in message
        if meant := re.search(r"(?:did you mean|write) `(\w+)", message):
            assert meant[1] in takes
        if " argument is named" in message:
            assert message.startswith(f"{where}: ")
        assert not message.endswith("takes none.") or "it takes" in message


@pytest.mark.parametrize(
    ("part", "first"),
    [
        ("sliding", "sliding_window"), ("prefix", "prefix_lm"), ("doc", "document"), ("chunk", "chunked"),
        ("pad", "padding"), ("documents", "document"), ("block", "block_causal"), ("SlidingWin", "sliding_window"),
        ("key-pad", "key_padding"),
    ],
)  # fmt: skip
def test_beginnings_of_names_come_first(part: str, first: str) -> None:
    assert f"did you mean {first!r}" in message_of(flexmasks.get_mask, part)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("flexmasks", "causal", "from flexmasks.masks import causal"),
        ("flexmasks", "softcap", "from flexmasks.scores import softcap"),
        ("flexmasks", "flex_attention", "from flexmasks.flex import flex_attention"),
        ("flexmasks", "create_block_mask", "from flexmasks.flex import create_block_mask"),
        ("flexmasks", "pack", "from flexmasks.trees import pack"),
        ("flexmasks", "huggingface", "from flexmasks.integrations import huggingface"),
        ("flexmasks", "generate_alibi_bias", "from flexmasks.scores import alibi"),
        ("flexmasks", "AlibiBias", ""),
        ("flexmasks", "flash_attn_varlen_func", "flexmasks.varlen_attention"),
        ("flexmasks", "scaled_dot_product_attention", "flexmasks.sdpa"),
        ("flexmasks", "visualize", "flexmasks.draw"),
        ("flexmasks", "register", "from flexmasks.integrations.huggingface import register"),
        ("flexmasks.masks", "causal_mask", "from flexmasks.masks import causal"),
        ("flexmasks.masks", "generate_tanh_softcap", "from flexmasks.scores import softcap"),
        ("flexmasks.masks", "softcap", "from flexmasks.scores import softcap"),
        ("flexmasks.scores", "causal", "from flexmasks.masks import causal"),
        ("flexmasks.scores", "__wrapped__", ""),
    ],
)
def test_names_that_stand_elsewhere(module: str, name: str, instead: str) -> None:
    uses = {f"import {module}; {module}.{name}": AttributeError, f"from {module} import {name}": ImportError}
    for code, kind in uses.items():
        with pytest.raises(kind) as raised:
            exec(code)
        assert re.findall("[Ww]rite `(.*)`$", str(raised.value)) == [instead][: bool(instead)]
    if instead:
        exec(instead)


def test_a_mask_of_yours_is_no_name_of_the_module() -> None:
    @flexmasks.register_mask()
    def of_this_test(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    try:
        with pytest.raises(AttributeError, match=r"write `flexmasks\.get_mask\('of_this_test'\)`"):
            flexmasks.masks.of_this_test  # type: ignore[attr-defined] # noqa: B018
    finally:
        del definitions.names("mask")["of_this_test"]


def test_a_score_of_nothing_inside_torch_compile() -> None:
    def step(q: Any) -> Any:
        return flexmasks.attention(q, K, V, score=lambda s, b, h, i, j: None)

    call = torch.compile(step, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="a score function must return a floating number for each score, got None"):
        call(Q)


def test_a_boolean_tensor_is_combined_with_masks() -> None:
    visible = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(3)) > 0.4
    lower = torch.ones(S, S, dtype=torch.bool).tril()
    for mask, want in ((CAUSAL & visible, visible & lower), (visible | CAUSAL, visible | lower)):
        assert torch.equal(flexmasks.dense_mask(mask, S), want)
        out = flexmasks.attention(Q, K, V, mask=mask, backend="reference")
        assert torch.allclose(out, F.scaled_dot_product_attention(Q, K, V, attn_mask=want).nan_to_num(), atol=1e-5)


# --- tensors in place of masks and scores ---

SHAPES = [
    (S, S), (H, S, S), (B, S, S), (B, 1, S, S), (B, H, S, S), (1, H, S, S), (1, 1, S, S), (S,), (B, 1, 1, S),
    (1, 1, 1, S), (B, H, 1, S),
]  # fmt: skip
ADVICE = re.compile(r"(?<!\w)(mask='key_padding', attention_mask|mask(?!='key)|score)=")


def expressions(text: str) -> list[str]:
    """Return the expression that a text begins with, and of two choices both."""
    first = next(
        text[:n]
        for n in range(1, len(text) + 1)
        if (text[n : n + 1] in ",; " or text[n:] in ".") and is_expression(text[:n])
    )
    choices = re.match(r"(.+?) if it is \[heads, queries, keys\], (.+?) if \[batch, queries, keys\]", text)
    return [choices[1], choices[2]] if choices else [first]


def is_expression(text: str) -> bool:
    try:
        compile(text, "", "eval")
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize("kind", ["mask", "score"])
@pytest.mark.parametrize("of", ["bool", "int64", "float32", "added", "NumPy bool", "NumPy float32"])
def test_advice_on_tensors_runs_when_pasted(of: str, kind: str) -> None:
    for shape in SHAPES:
        m: Any = torch.randn(shape)
        visible = m > -0.5
        if of == "added":
            m = torch.where(visible, 0.0, -math.inf)
        elif not of.endswith("float32"):
            m = visible.to(getattr(torch, of.removeprefix("NumPy ")))
        plain = m
        m = m.numpy() if of.startswith("NumPy") else m
        fits = plain.dtype == (torch.bool if kind == "mask" else torch.float32)
        if fits and m is plain and m.ndim > 1:
            if shape != (B, S, S):  # taken as it is, as [heads, queries, keys] or of four dimensions
                want = F.scaled_dot_product_attention(Q, K, V, attn_mask=m)
                out = flexmasks.attention(Q, K, V, backend="reference", **{kind: m})
                assert torch.allclose(out, want.nan_to_num(), atol=1e-5), shape
            continue
        message = refused(**{kind: m})
        ends = [found.span() for found in ADVICE.finditer(message)]
        assert ends
        assert "score=" in message or plain.dtype == torch.bool or kind == "mask"
        for start, end in ends:
            choices = expressions(message[end:])
            choice = choices[len(choices) > 1 and shape[0] == B]
            call = eval(f"dict({message[start:end]}{choice})", {"m": m, "q": Q, "torch": torch})
            if "attention_mask" in call and len(shape) == 2:  # [batch, keys], which this one is not
                continue
            whole = plain.bool() if "score" not in call else plain.float() if plain.dtype == torch.int64 else plain
            whole = whole[:, None] if shape == (B, S, S) else whole.expand(S, S) if shape == (S,) else whole
            want = F.scaled_dot_product_attention(Q, K, V, attn_mask=whole)
            out = flexmasks.attention(Q, K, V, backend="reference", **call)
            assert torch.allclose(out, want.nan_to_num(), atol=1e-5), (shape, choice)


@pytest.mark.parametrize("kind", ["mask", "score"])
def test_advice_on_shapes_runs_when_pasted(kind: str) -> None:
    """Tensors that broadcast in SDPA, and those of nn.MultiheadAttention and of one dimension too many or too few."""
    for shape in [(S, 1), (1, 1), (B, 1, S, 1), (1, H, S, 1), (B, H, 1, 1), (B, S, S), (B * H, S, S), (1, 1, 1, S, S)]:
        m: Any = torch.randn(shape)
        m = m > -0.5 if kind == "mask" else m
        message = refused(**{kind: m})
        advice = message.partition("; a tensor `m` like this is ")[2]
        assert advice, shape
        made = eval(advice.partition(" if it is ")[0].rstrip("."), {"m": m})
        whole = m[:, None] if shape == (B, S, S) else m.view(B, H, S, S) if shape[0] == B * H else m
        want = F.scaled_dot_product_attention(Q, K, V, attn_mask=whole.view(shape[1:]) if len(shape) == 5 else whole)
        out = flexmasks.attention(Q, K, V, backend="reference", **{kind: made})
        assert torch.allclose(out, want.nan_to_num(), atol=1e-5), shape
    padding = torch.ones(B, 1, 1, S, dtype=torch.bool)
    assert "like this is m.flatten(0, -2)." in refused(mask="key_padding", attention_mask=padding)
    lengths = torch.tensor([3])
    message = refused(mask="padding", kv_lens=lengths)
    assert "got int64[1]; a tensor `m` like this is m.expand(2)." in message
    assert "like this" not in refused(mask="padding", kv_lens=torch.tensor([3, 4, 5]))


def test_tensors_by_the_names_of_other_libraries() -> None:
    added = torch.zeros(S, S)
    for name in ("attn_mask", "attn_bias"):
        assert "score=m" in refused(**{name: added})
    assert "mask=m" in refused(attn_mask=added > 0)
    assert "score=m" in message_of(flexmasks.attention, Q, K, V, added)  # by position
    assert "score=x" in refused(mask="dense", visible=added)
    assert "add it to `x`" in message_of(flexmasks.masked_softmax, torch.zeros(1, 1, S, S), mask=added)


# --- lists in place of tensors ---


@pytest.mark.parametrize("form", [list, tuple, np.array], ids=["list", "tuple", "array"])
def test_lists_in_place_of_tensors(form: Callable[..., Any]) -> None:
    q, offset = Q[:, :, :8], torch.tensor([3, 5])
    given = {"mask": "causal", "backend": "reference"}
    want = flexmasks.attention(q, K, V, q_offset=offset, **given)
    assert torch.equal(flexmasks.attention(q, K, V, q_offset=form([3, 5]), **given), want)
    assert flexmasks.explain(q, K, V, q_offset=form([3, 5]), **given).backend == "reference"
    for call in (flexmasks.dense_mask, lambda *a, **b: flexmasks.block_mask(*a, **b).to_dense()):
        assert torch.equal(call("causal", 8, S, q_offset=form([3, 5])), call("causal", 8, S, q_offset=offset))
    for value in (flexmasks.get_mask("causal"), flexmasks.get_score("alibi")):
        picture = flexmasks.draw(value, 8, S, b=1, q_offset=form([3, 5]))
        assert picture.text() == flexmasks.draw(value, 8, S, b=1, q_offset=offset).text()
    k_cache, v_cache = torch.randn(2, 8, 16, 2, D)
    pages, lens, starts = [[3, 0, 6], [5, -1, -1]], [40, 7], [39, 4]
    for q_offset in (None, starts):
        own, tensors = (
            {"page_table": f(pages), "kv_lens": f(lens), "q_offset": None if q_offset is None else f(q_offset)}
            for f in (form, torch.tensor)
        )
        one, some = Q[:, :, :1], Q[0].transpose(0, 1)[:4]
        if q_offset is not None:
            want = flexmasks.paged_attention(one, k_cache, v_cache, mask="causal", **tensors)
            assert torch.equal(flexmasks.paged_attention(one, k_cache, v_cache, mask="causal", **own), want)
        want = flexmasks.varlen_attention(some, k_cache, v_cache, [0, 1, 4], mask="causal", **tensors)
        assert torch.equal(flexmasks.varlen_attention(some, k_cache, v_cache, [0, 1, 4], mask="causal", **own), want)


def test_numbers_of_numpy_as_offsets() -> None:
    want = flexmasks.attention(Q[:, :, :8], K, V, mask="causal", q_offset=3, backend="reference")
    out = flexmasks.attention(Q[:, :, :8], K, V, mask="causal", q_offset=np.int64(3), backend="reference")
    assert torch.equal(out, want)


# --- errors in a user's own function ---


def helper(q: Any) -> Any:
    return q + 1 if q > 3 else q


REFUSED: dict[str, Callable[..., Any]] = {
    "if": lambda b, h, q, kv: q >= kv if q > 3 else q < kv,
    "and": lambda b, h, q, kv: (q >= kv) and (kv > 2),
    "or": lambda b, h, q, kv: (q >= kv) or (kv > 2),
    "not": lambda b, h, q, kv: not (q >= kv),
    "chained": lambda b, h, q, kv: 3 <= q <= kv,
    "int": lambda b, h, q, kv: kv <= int(q),
    "float": lambda b, h, q, kv: kv <= float(q),
    "item": lambda b, h, q, kv: kv <= q.item(),
    "tolist": lambda b, h, q, kv: kv <= q.tolist(),
    "range": lambda b, h, q, kv: sum(kv == i for i in range(q)) > 0,
    "min": lambda b, h, q, kv: kv <= min(q, kv + 3),
    "max": lambda b, h, q, kv: kv <= max(q, 3),
    "in": lambda b, h, q, kv: kv in (1, 2, 3),
    "list": lambda b, h, q, kv: kv > [1, 2, 3][q],
    "math": lambda b, h, q, kv: kv > math.sqrt(q),
    "format": lambda b, h, q, kv: kv > len(f"{q:d}"),
    "helper": lambda b, h, q, kv: kv <= helper(q),
}
WRONG: dict[str, Callable[..., Any]] = {
    "raises": lambda b, h, q, kv: kv > [][0],
    "no attribute": lambda b, h, q, kv: q.nonsense > kv,
    "shapes": lambda b, h, q, kv: (torch.zeros(3) + torch.zeros(4))[q] > kv,
    "no booleans": lambda b, h, q, kv: q - kv,  # raises nothing: where it begins is named
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "attention": lambda f: flexmasks.attention(Q, K, V, mask=f),
    "reference": lambda f: flexmasks.attention(Q, K, V, mask=f, backend="reference"),
    "block_mask": lambda f: flexmasks.block_mask(f, S),
    "as data": lambda f: flexmasks.block_mask(f, S, as_data=True),
    "dense_mask": lambda f: flexmasks.dense_mask(f, S),
    "masked_softmax": lambda f: flexmasks.masked_softmax(torch.zeros(1, 1, S, S), mask=f),
    "explain": lambda f: flexmasks.explain(Q, K, V, mask=f),
    "show": lambda f: flexmasks.show(f, S),
    "combined": lambda f: flexmasks.attention(Q, K, V, mask=flexmasks.get_mask("causal") & f),
}


def check_error(call: Callable[[], Any], function: Callable[..., Any], line: int = 0) -> BaseException:
    """Check that an error of a function says where, in few frames, and shows nothing private.

    line: of the function, counted from its first.
    """
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    error, code = caught.value, function.__code__
    assert type(error) in (ValueError, TypeError)
    assert f'File "{code.co_filename}", line {code.co_firstlineno + line}, in {code.co_name}' in str(error)
    lines = traceback.format_exception(error)
    assert len(traceback.extract_tb(error.__traceback__)) <= 5 + 1  # one of this test's own
    frames = [line for line in lines if line.startswith("  File")]
    assert len(frames) <= 9
    assert sum(f'File "{PACKAGE}/' in frame for frame in frames) <= 1
    assert not re.search(r"flexmasks\.\w+\.\w+\.[A-Z]|Refused|GiveUp|BatchedTensor", "".join(lines))
    return error


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_decide(name: str) -> None:
    is_helper = name == "helper"
    error = check_error(lambda: CALLS["attention"](REFUSED[name]), helper if is_helper else REFUSED[name], is_helper)
    assert type(error) is ValueError
    assert error.__cause__ is None
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert last.filename == __file__


@pytest.mark.parametrize("call", CALLS)
def test_functions_that_decide_in_all_calls(call: str) -> None:
    for function in (REFUSED["chained"], WRONG["raises"]):
        check_error(lambda function=function: CALLS[call](function), function)


@pytest.mark.parametrize("name", WRONG)
def test_functions_that_fail(name: str) -> None:
    error = check_error(lambda: CALLS["attention"](WRONG[name]), WRONG[name])
    if name != "no booleans":
        assert error.__cause__ is not None
        assert type(error.__cause__).__module__ == "builtins"


@pytest.mark.parametrize(
    "score",
    [
        lambda score, b, h, q, kv: score if q > kv else -score,
        lambda score, b, h, q, kv: max(score, 0),
        lambda score, b, h, q, kv: score * q.item(),
        lambda score, b, h, q, kv: score * [][0],
        lambda score, b, h, q, kv: q > kv,
    ],
)
def test_scores_that_decide_or_fail(score: Callable[..., Any]) -> None:
    check_error(lambda: flexmasks.attention(Q, K, V, score=score), score)


def test_functions_in_other_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "masks_of_another_file.py").write_text(
        "def local(b, h, q, kv):\n    near = q - kv\n    return 0 <= near < 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import masks_of_another_file

    message = refused(mask=masks_of_another_file.local)
    assert f'(File "{tmp_path}/masks_of_another_file.py", line 3, in local)' in message
    sys.modules.pop("masks_of_another_file")


def test_errors_of_the_library_itself_name_no_line() -> None:
    message = refused(mask="natten", height=4, width=5, kernel=3)
    assert "File" not in message
    with pytest.raises(ValueError, match="powers of 2") as caught:
        flexmasks.block_mask("causal", S, block_size=48, as_data=True)
    assert type(caught.value) is ValueError


def test_a_traceback_of_any_message_is_short() -> None:
    with pytest.raises(TypeError) as caught:
        flexmasks.attention(Q, K, V, mask="sliding_window", window="3")
    assert [f.name for f in traceback.extract_tb(caught.value.__traceback__)][-1] == "call"
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 3


# --- masks on other devices than the call ---


class Model(torch.nn.Module):
    """A model that holds masks and scores, as people write it at first."""

    def __init__(self) -> None:
        super().__init__()
        ids, table = torch.arange(S) // 4, torch.ones(S) > 0
        self.weight = torch.nn.Parameter(torch.ones(H))
        self.register_buffer("ids", torch.arange(S) // 4)
        self.document = flexmasks.get_mask("causal") & flexmasks.get_mask("document", document_ids=ids)
        self.window = flexmasks.get_mask("sliding_window", window=torch.tensor(3))
        self.function = flexmasks.get_mask(lambda b, h, q, kv: (q >= kv) & table[kv])
        self.packed = flexmasks.packed("causal", torch.arange(3) * 8)
        self.alibi = flexmasks.get_score("alibi", slopes=torch.ones(H))
        self.score = flexmasks.get_score(lambda score, b, h, q, kv: score + table[kv])


NAMES_OF_TENSORS = {
    "document": "`document_ids`",
    "window": "`window`",
    "function": "the variable `table` of the function",
    "packed": "`offsets`",
    "alibi": "`slopes`",
    "score": "the variable `table` of the function",
}


def emptied() -> Model:
    with torch.device("meta"):
        return Model().to_empty(device="cpu")


def assigned() -> Model:
    with torch.device("meta"):
        model = Model()
    model.load_state_dict(Model().state_dict(), assign=True)
    return model


@pytest.mark.parametrize("make", [emptied, assigned])
@pytest.mark.parametrize("name", NAMES_OF_TENSORS)
def test_masks_that_a_module_left_on_meta(name: str, make: Callable[[], Model]) -> None:
    value = getattr(make(), name)
    is_score = isinstance(value, flexmasks.Score)
    calls: list[Callable[[], Any]] = [
        lambda backend=backend: flexmasks.attention(
            Q, K, V, backend=backend, **{"score" if is_score else "mask": value}
        )
        for backend in ("auto", "reference")
    ]
    calls += [lambda: flexmasks.draw(value, S), lambda: value.to("cpu")]
    if not is_score:
        calls += [
            lambda: flexmasks.block_mask(value, S),
            lambda: flexmasks.block_mask(value, S, device="cpu"),
            lambda: flexmasks.dense_mask(value, S),
            lambda: value.blocks(S),
            lambda: flexmasks.masked_softmax(torch.zeros(1, 1, S, S), mask=value),
            lambda: distributed.balance(value, S, 2),
        ]
    for call in calls:
        message = message_of(call)
        assert NAMES_OF_TENSORS[name] in message
        assert " on meta" in message
        assert "`device`" not in message
        assert "make the mask again, or in `forward`, of a buffer" in message


def test_masks_of_buffers_move_with_their_module() -> None:
    model = assigned()
    mask = flexmasks.get_mask("document", document_ids=model.ids)
    assert flexmasks.attention(Q, K, V, mask=mask, backend="reference").isfinite().all()


def test_devices_that_a_user_asks_for_are_blamed() -> None:
    assert "`device` must hold data, got meta" in message_of(flexmasks.block_mask, "causal", S, device="meta")
    on_meta = flexmasks.block_mask("causal", S).to("meta")
    assert "it has no data" in refused(block_mask=on_meta)
    assert "it has no data" in message_of(
        flexmasks.masked_softmax, torch.zeros(1, 1, S, S), mask=(torch.ones(S, S) > 0).to("meta")
    )


@pytest.mark.gpu
def test_masks_on_another_device() -> None:
    q, k, v = (x.cuda() for x in (Q, K, V))
    model = Model()
    for name in ("document", "window", "packed"):
        value = getattr(model, name)
        message = message_of(flexmasks.attention, q, k, v, mask=value)
        assert NAMES_OF_TENSORS[name] in message
        assert "got a tensor on cpu in a call on cuda:0; a module does not move the masks that it holds" in message
        moved = value.to("cuda")
        out = flexmasks.attention(q, k, v, mask=moved)
        assert torch.allclose(out.cpu(), flexmasks.attention(Q, K, V, mask=value, backend="reference"), atol=1e-2)
    message = message_of(flexmasks.attention, q, k, v, mask=model.function)
    assert "the variable `table` of the function is on cpu" in message


# --- lines before compilations; tests/engine/test_threads.py has those of torch's kernels ---


def test_own_kernels_are_announced_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    triton = pytest.importorskip("triton")
    launches = pytest.importorskip("flexmasks.kernels.launches")

    @triton.jit
    def kernel(x):  # type: ignore[no-untyped-def]
        pass

    said: list[list[str]] = []

    def warmup(*_: Any, **__: Any) -> None:
        said.append([r.getMessage() for r in caplog.records])

    monkeypatch.setattr(kernel, "warmup", warmup, raising=False)
    monkeypatch.setattr(launches, "launch_of", lambda *_: None)
    compiling.announce_once.cache_clear()
    with caplog.at_level(logging.INFO, "flexmasks"):
        for _ in range(3):
            launches.compiled(kernel, 1, 4, [torch.zeros(1)], (), ())
    line = "compiling test_messages.kernel"
    assert said == [[line]] * 3  # before the compilation


def test_the_demo_shows_what_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("flexmasks")
    handlers, level = list(log.handlers), log.level
    try:
        demo._show_log()
        compiling.announce("attention")
    finally:
        log.handlers[:], log.level = handlers, level
        log.setLevel(level)
    assert capsys.readouterr().out == "compiling attention\n"
