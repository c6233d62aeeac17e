"""Bad input raises an error that says what came and what to pass.

A good call after the error is right.
"""

from __future__ import annotations

import inspect
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexmasks
from flexmasks.blocks import build, limits
from flexmasks.orders import in_tiles, inverse_order, morton_order, tile_order
from flexmasks.spec.parameters import in_message

torch.manual_seed(0)
Q, K, V = torch.randn(3, 2, 4, 64, 16).unbind(0)
WANT = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
LONG = [65, 3]
DOCUMENT = flexmasks.get_mask("document", document_ids=[0] * 64)
CAUSAL = flexmasks.get_mask("causal")
CHECKERBOARD = flexmasks.get_score("checkerboard")


def masked(mask: Any = None, **arguments: Any) -> Callable[[], Any]:
    """Return a call of attention on good tensors."""
    return lambda: flexmasks.attention(Q, K, V, mask=mask, **{"backend": "reference", **arguments})


def scored(score: Any, **arguments: Any) -> Callable[[], Any]:
    return masked(score=score, **arguments)


def attending_to(q: Any = Q, k: Any = K, v: Any = V, **arguments: Any) -> Callable[[], Any]:
    """Return a call of attention on bad tensors."""
    return lambda: flexmasks.attention(q, k, v, **arguments)


def blocks_of(mask: Any, **arguments: Any) -> Callable[[], Any]:
    return lambda: flexmasks.block_mask(mask, **{"q_len": 64, **arguments})


def jagged(lengths: tuple[int, ...] = (5, 7), transposed: bool = True) -> Tensor:
    x = torch.nested.nested_tensor([torch.randn(n, 4, 16) for n in lengths], layout=torch.jagged)
    return x.transpose(1, 2) if transposed else x


JAGGED = jagged()


def in_dtype(dtype: torch.dtype) -> Callable[[], Any]:
    return attending_to(*(x.to(dtype) for x in (Q, K, V)))


def with_if(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv if q > 3 else q < kv


def with_and(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) and (kv > 2)


def chained(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 3 <= q <= kv


def with_item(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv <= q.item()


def windowed(b: Any, h: Any, q: Any, kv: Any, *, w: int) -> Any:
    return q - kv <= w


def weighted(score: Any, b: Any, h: Any, q: Any, kv: Any, *, w: int) -> Any:
    return score * w


class NotAMask:
    def __init__(self, b: Any, h: Any, q: Any, kv: Any) -> None: ...


def register(name: Any, function: Any = windowed) -> Callable[[], Any]:
    return lambda: flexmasks.register_mask(name=name)(function)


def specified(spec: str) -> Callable[[], Any]:
    def mask(b: Any, h: Any, q: Any, kv: Any, *, w: Any) -> Any:
        return q - kv <= w

    mask.__annotations__["w"] = Annotated[int, spec]
    return lambda: flexmasks.get_mask(mask, w=3)


def annotated(annotation: str) -> Callable[[], Any]:
    def mask(b: Any, h: Any, q: Any, kv: Any, *, w: Any, v: int = 0) -> Any:
        return q - kv <= w

    mask.__annotations__["w"] = annotation
    return lambda: flexmasks.get_mask(mask, w=3)


def grouped(seq_lens: Any) -> Callable[[], Any]:
    return masked("grouped_tril", seq_lens=seq_lens)


def canvas(name: str, height: int = 8, width: int = 8, **params: Any) -> Callable[[], Any]:
    return masked(name, height=height, width=width, **params)


def packed(offsets: Any, inner: Any = CAUSAL, **params: Any) -> Callable[[], Any]:
    return masked("packed", inner=inner, offsets=offsets, **params)


def paged(table: Any = ((0, 1), (2, 3)), lens: Any = (32, 17), page_size: Any = 16, inner: Any = CAUSAL) -> Any:
    return masked("paged", inner=inner, page_table=table, kv_lens=lens, page_size=page_size)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    # names and parameters
    "unknown mask": (masked("casual"), "no mask is named 'casual'; did you mean 'causal'"),
    "unlike any mask": (masked("zzz"), "'zzz'; flexmasks.list_masks() names the"),
    "unknown score": (scored("softcapp", cap=3.0), "no score is named 'softcapp'; did you mean 'softcap'"),
    "a score's name as mask": (masked("softcap"), "'softcap' is a score, pass it as `score=`"),
    "unknown parameter": (
        masked("sliding_window", windw=3),
        "no parameter is named `windw`; did you mean `window`?",
    ),
    "parameter of nothing": (masked(window=3), "no argument is named `window`; no mask or score is given by name"),
    "unknown parameter of get_mask": (
        lambda: flexmasks.get_mask("local", left=1, rigth=2),
        "no parameter is named `rigth`; did you mean `right`?",
    ),
    "missing parameter": (masked("sliding_window"), "mask 'sliding_window' needs `window` (int in 0"),
    "two missing parameters": (
        lambda: flexmasks.get_mask("local"),
        "needs `left` (int in 0.. | int[] in 0..), `right`",
    ),
    "missing parameter of a function": (masked(windowed), "mask 'windowed' needs `w`"),
    "parameter of mask and score": (
        masked(windowed, score=weighted, w=3),
        "`w` is a parameter of mask 'windowed' and score 'weighted'",
    ),
    "parameter of two scores": (scored([weighted, weighted], w=3), "score 'weighted' and score 'weighted'"),
    "parameter given twice": (
        masked(flexmasks.get_mask("sliding_window", window=3), window=4),
        "`window` is given twice",
    ),
    "get_mask twice": (lambda: flexmasks.get_mask(DOCUMENT, document_ids=[0] * 64), "`document_ids` is given twice"),
    # tensors as parameters
    "seq_lens too many": (
        grouped([1, 2, 3]),
        "mask 'grouped_tril': `seq_lens` must be int[B] in 0..S (here B=2, S=64)",
    ),
    "seq_lens float": (grouped(torch.tensor([1.0, 2.0])), "got float32[2]"),
    "seq_lens bool": (grouped([True, False]), "got bool[2]"),
    "seq_lens elsewhere": (grouped(torch.zeros(2, dtype=torch.int64, device="meta")), "got a tensor on meta in a call"),
    "seq_lens negative": (grouped([-1, 3]), "got values from -1 to 3"),
    "seq_lens beyond S": (grouped(torch.tensor(LONG)), "got values from 3 to 65"),
    "seq_lens a number": (grouped(3), "got 3 (int)"),
    "seq_lens None": (grouped(None), "got None (NoneType)"),
    "seq_lens a string": (grouped("3"), "got '3' (str)"),
    "seq_lens ragged": (grouped([[1], [2, 3]]), "a sequence that cannot be made a tensor"),
    "seq_lens empty": (grouped([]), "got int64[0]"),
    "padding beyond KV": (masked("padding", kv_lens=LONG), "must be int[B] in 0..KV (here B=2, KV=64), got values"),
    "document_ids too short": (masked("document", document_ids=[0] * 63), "`document_ids` must be int[S] | int[B, S]"),
    "document_ids rank 3": (
        masked("document", document_ids=torch.zeros(1, 2, 64, dtype=torch.int64)),
        "got int64[1, 2, 64]",
    ),
    "document_ids other batch": (
        masked("document", document_ids=torch.zeros(3, 64, dtype=torch.int64)),
        "got int64[3, 64]",
    ),
    "image_ids too large": (masked("vision_cross", intervals=[[0, 3]], image_ids=[1] * 64), "(here KV=64, N=1, B=2)"),
    "image_ids below -1": (masked("vision_cross", intervals=[[0, 3]], image_ids=[-2] * 64), "got values from -2 to -2"),
    "intervals of three": (masked("vision_cross", intervals=[[0, 3, 4]], image_ids=[0] * 64), "got int64[1, 3]"),
    "prefix_len of other batch": (masked("prefix_lm", prefix_len=[1, 2, 3]), "`prefix_len` must be"),
    "slopes too few": (scored("alibi", slopes=[1.0, 2.0, 3.0]), "`slopes` must be float[H] (here H=4), got float32[3]"),
    "slopes integers": (scored("alibi", slopes=[1, 2, 3, 4]), "got int64[4]"),
    "table of even width": (scored("relative_bias", table=torch.zeros(4, 6)), "an odd number, got float32[4, 6]"),
    "table of other heads": (scored("relative_bias", table=torch.zeros(3, 7)), "(here H=4), got float32[3, 7]"),
    # numbers as parameters
    "prefix_len negative": (masked("prefix_lm", prefix_len=-1), "got -1"),
    "window negative": (masked("sliding_window", window=-1), "`window` must be int in 0.. | int[] in 0.., got -1"),
    "window float": (masked("sliding_window", window=1.5), "got 1.5 (float)"),
    "window bool": (masked("sliding_window", window=True), "got True (bool)"),
    "window a list": (masked("sliding_window", window=[3]), "got int64[1]"),
    "window beyond 64 bits": (masked("sliding_window", window=10**30), "got 1000"),
    "window a negative tensor": (masked("sliding_window", window=torch.tensor(-1)), "got values from -1 to -1"),
    "cap 0": (scored("softcap", cap=0), "`cap`"),
    "cap negative": (scored("softcap", cap=-1.0), "`cap` must be float in 0.. | float[] in 0.., got -1.0"),
    "cap NaN": (scored("softcap", cap=float("nan")), "got nan"),
    "cap infinite": (scored("softcap", cap=float("inf")), "got inf"),
    "cap a string": (scored("softcap", cap="3"), "got '3' (str)"),
    # canvases
    "natten kernel too large": (canvas("natten", kernel=9), "kernel 9 with dilation 1 spans 9 pixels, `height` is 8"),
    "natten even kernel too large": (canvas("natten", kernel=(10, 3)), "pass a kernel of at most 8"),
    "natten dilation too large": (canvas("natten", kernel=3, dilation=3), "spans 9 pixels"),
    "natten other canvas": (canvas("natten", width=9, kernel=3), "8 * 9 = 72, the call has 64 keys"),
    "natten other canvas, even": (canvas("natten", width=9, kernel=4), "8 * 9 = 72, the call has 64 keys"),
    "natten kernel 0": (canvas("natten", kernel=0), "`kernel` must be int in 1.. | int(2) in 1.., got 0"),
    "natten kernel float": (canvas("natten", kernel=3.0), "got 3.0 (float)"),
    "natten three axes": (canvas("natten", kernel=(3, 3, 3)), "got (3, 3, 3) (tuple)"),
    "natten causal int": (canvas("natten", kernel=3, causal=1), "`causal` must be bool | bool(2), got 1 (int)"),
    "sasa other canvas": (canvas("sasa", width=9, window=3), "8 * 9 = 72, the call has 64 keys"),
    "sasa window negative": (canvas("sasa", window=(-1, 2)), "got (-1, 2)"),
    # packed
    "offsets of one value": (masked(flexmasks.packed("causal", [0])), "mask 'packed': `offsets` needs at least two"),
    "q_start of a wrong length": (
        masked(flexmasks.packed("causal", [0, 30, 64], q_start=[1])),
        "mask 'packed': `q_start` has 1 values, `offsets` has 2 sequences",
    ),
    "q_start beyond 2**30": (
        masked(flexmasks.packed("causal", [0, 64], q_start=2**31)),
        "mask 'packed': positions must be at most 2**30, but `q_start` is 2147483648",
    ),
    "q_start of a score beyond 2**30": (
        scored(flexmasks.packed(CHECKERBOARD, [0, 64], q_start=2**31)),
        "score 'packed': positions must be at most 2**30",
    ),
    "offsets not from 0": (packed([1, 64]), "got 1, 64; of lengths they are torch.nn.functional.pad("),
    "offsets decrease": (packed([0, 30, 20, 64]), "got 0, 30, 20, 64"),
    "offsets beyond the length": (packed([0, 65]), "got values from 0 to 65"),
    "offsets of nothing": (packed([0]), "`offsets` needs at least two values"),
    "kv_offsets of other count": (
        packed([0, 64], kv_offsets=[0, 3, 64]),
        "`offsets` has 1 sequences, `kv_offsets` has 2",
    ),
    "q_start of other count": (packed([0, 30, 64], q_start=[1]), "`q_start` has 1 values, `offsets` has 2 sequences"),
    "q_start below 0": (
        packed([0, 30, 64], q_start=[1, -1]),
        "`q_start` must be int in 0.. | int[L] in 0.. (here L=2), got values from -1 to 1",
    ),
    "inner a name": (packed([0, 64], "causal"), "`inner` must be a Mask"),
    "inner a score": (packed([0, 64], CHECKERBOARD), "`inner` must be a mask, got checkerboard(), a score"),
    "inner of other batch": (
        packed([0, 30, 64], flexmasks.get_mask("grouped_tril", seq_lens=[3, 4, 5])),
        "mask 'grouped_tril': `seq_lens` must be int[B] in 0..S (here B=2, S=34)",
    ),
    # paged
    "page_table of other batch": (
        paged([[0, 1]]),
        "mask 'paged': `page_table` must be int[B, P] (here B=2), got int64[1, 2]",
    ),
    "page_table empty": (paged(torch.zeros(2, 0, dtype=torch.int64), [0, 0]), "`page_table` needs at least one page"),
    "page beyond the pool": (
        paged([[0, 1], [3, 4]]),
        "`page_table` must have pages 0..3 where a query sees keys, got 4 for page 1 of batch element 1, which has 17",
    ),
    "page negative": (paged([[0, -1], [3, 2]]), "got -1 for page 1 of batch element 0"),
    "page twice": (paged([[0, 1], [2, 2]]), "`page_table` has a page twice in batch element 1"),
    "kv_lens negative": (paged(lens=[-1, 3]), "`kv_lens` must be int[B] in 0.. (here B=2), got values from -1 to 3"),
    "kv_lens beyond the pages": (paged(lens=[33, 3]), "must be at most 2 pages * `page_size` 16 = 32, got 33"),
    "kv_lens float": (paged(lens=[1.0, 2.0]), "got float32[2]"),
    "page_size 0": (paged(page_size=0), "`page_size` must be int in 1.., got 0"),
    "page_size does not divide": (paged(page_size=24), "`page_size` = 24 must divide the 64 keys of the call"),
    "inner of pages a name": (paged(inner="causal"), "`inner` must be a Mask"),
    # q, k, v
    "rank": (
        attending_to(Q[0]),
        "[B, H, S, D] (flexmasks.varlen_attention takes [total, H, D]); got q float32[4, 64,",
    ),
    "batch": (attending_to(Q[:1]), "one batch size, or k and v batch size 1; got q float32[1, 4, 64, 16]"),
    "dtype": (lambda: flexmasks.attention(Q, K, V.half()), "k and v must have one dtype; got q float32"),
    "more bits than q's": (
        attending_to(Q.bfloat16()),
        "or as a cache one of fewer bits; got q bfloat16",
    ),
    "as many bits as q's": (lambda: flexmasks.attention(Q.half(), K.bfloat16(), V.bfloat16()), "got q float16"),
    "more bits than a packed q's": (
        lambda: flexmasks.varlen_attention(Q[0].mT.half(), K[0].mT, V[0].mT, [0, 16]),
        "or as a cache one of fewer bits",
    ),
    "device": (attending_to(Q, K.to("meta")), "on one device; got"),
    "head size": (attending_to(Q[..., :8]), "q and k must have one head size D; got q float32[2, 4, 64, 8]"),
    "heads that do not divide": (attending_to(Q, K[:, :3], V[:, :3]), "must be a multiple of the number of key heads"),
    "lengths of k and v": (attending_to(v=V[:, :, :5]), "k and v must have the same length"),
    "heads of k and v": (attending_to(k=K[:, :2]), "k and v must have the same number of heads"),
    "integers": (in_dtype(torch.int32), "`q` must be float16, bfloat16, float32 or float64; got q int32"),
    "complex": (in_dtype(torch.complex64), "got q complex64"),
    "float8": (in_dtype(torch.float8_e4m3fn), "got q float8_e4m3fn"),
    "list": (attending_to(Q.tolist()), "`q` must be a tensor [B, H, S, D]; got q list"),
    "None": (attending_to(v=None), "`v` must be a tensor"),
    "NumPy": (attending_to(Q.numpy()), "got q ndarray"),
    "sparse": (attending_to(Q.to_sparse(), K.to_sparse(), V.to_sparse()), "`q`"),
    "no heads": (attending_to(Q[:, :0], K[:, :0], V[:, :0]), "`q` is empty"),
    "no head size": (attending_to(Q[..., :0], K[..., :0], V[..., :0]), "`q` is empty"),
    "no head size of v": (attending_to(v=V[..., :0]), "`v` is empty"),
    # other arguments
    "scale NaN": (masked(scale=float("nan")), "`scale` must be a finite number, or None for 1 / sqrt(D), got nan"),
    "scale a string": (masked(scale="1"), "got '1'"),
    "scale a bool": (masked(scale=True), "got True"),
    "q_offset negative": (
        masked(q_offset=-1),
        "`q_offset` must be an int from 0 to 2**31 - 1 or an integer tensor [B] = [2] on cpu",
    ),
    "q_offset float": (masked(q_offset=1.0), "got 1.0"),
    "q_offset bool": (masked(q_offset=True), "got True"),
    "q_offset of other batch": (masked(q_offset=torch.tensor([1, 2, 3])), "got int64[3] on cpu"),
    "q_offset float tensor": (masked(q_offset=torch.tensor([1.0, 2.0])), "got float32[2]"),
    "q_offset huge": (masked(q_offset=2**70), "`q_offset` must be an int from 0"),
    "scale huge": (masked(scale=10**400), "`scale` must be a finite number"),
    "q strided nested": (attending_to(torch.nested.nested_tensor([Q[0], K[0]]), K, V), "jagged [B, H, jagged, D]"),
    "dropout_p above 1": (masked(dropout_p=1.5), "`dropout_p` must be a number from 0 to 1, the share of weights"),
    "dropout_p NaN": (masked(dropout_p=float("nan")), "that are dropped, got nan"),
    "dropout_p None": (masked(dropout_p=None), "`dropout_p` must be a number from 0 to 1, got None"),
    "dropout_p a bool": (masked(dropout_p=True), "got True"),
    "dropout_seed a float": (masked(dropout_p=0.1, dropout_seed=0.5), "`dropout_seed` must be an int, a tensor of one"),
    "dropout_seed of several": (masked(dropout_p=0.1, dropout_seed=torch.tensor([1, 2])), "got int64[2]"),
    "dropout_seed huge": (masked(dropout_p=0.1, dropout_seed=2**70), "`dropout_seed` must fit 64 bits"),
    "dropout": (masked(dropout=0.0), "flexmasks.varlen_attention drop weights, by `dropout_p`"),
    "softmax_scale": (masked(softmax_scale=1.0), "did you mean `scale`?"),
    "deterministic": (masked(deterministic=True), "call torch.use_deterministic_algorithms(True)"),
    "return_softmax_lse": (masked(return_softmax_lse=True), "did you mean `return_lse`?"),
    "need_weights": (
        masked(need_weights=False),
        "flexmasks.weights(q, k, mask=..., rows=...) returns attention weights",
    ),
    "logits_soft_cap": (masked(logits_soft_cap=3.0), 'pass score="softcap", cap=...'),
    "sinks": (masked(sinks=Q[0, :, 0, 0]), "learned sinks are `sink_logits`"),
    "num_splits": (masked(num_splits=4), "leave it out: the keys are split as the call needs it"),
    "window_size": (masked(window_size=(3, 0)), 'pass mask="sliding_window", window=...'),
    "torch's name": (masked(is_causal=True), 'pass mask="causal"'),
    "q_offset negative tensor": (masked("causal", q_offset=torch.tensor([-1, 2])), "q_offset"),
    "kernel_options": (masked(kernel_options=3), "`kernel_options` must be a dict, got 3"),
    # functions
    "if": (masked(with_if), "mask with_if: a mask function may not decide by `if`"),
    "and": (masked(with_and), "Use `&`, `|`, `~` for and, or, not"),
    "chained comparison": (masked(chained), "a chained comparison of an index"),
    "item": (masked(with_item), "may not call `.item()` on an index"),
    "returns floats": (masked(lambda b, h, q, kv: (q - kv) * 1.0), "must return a boolean tensor, got one of float32"),
    "returns integers": (masked(lambda b, h, q, kv: q - kv), "got one of int64; compare, as in `q >= kv`"),
    "returns a bool": (masked(lambda b, h, q, kv: True), "must return a boolean tensor, got True"),
    "returns None": (masked(lambda b, h, q, kv: None), "must return a boolean tensor, got None"),
    "returns a table": (
        masked(lambda b, h, q, kv: torch.ones(3, 5) > 0),
        "mask <lambda>: a mask function must return one truth value for each b, h, q, kv",
    ),
    "three arguments": (
        masked(lambda b, h, q: q > 0),
        "must take (b, h, q, kv) by position, its signature is (b, h, q)",
    ),
    "five arguments": (masked(lambda b, h, q, kv, x: q > 0), "parameters come after `*`"),
    "raises IndexError": (masked(lambda b, h, q, kv: [1, 2][7]), "failed on index tensors: IndexError: list index"),
    "raises ZeroDivisionError": (masked(lambda b, h, q, kv: kv > 1 / 0), "division by zero"),
    "index too large": (
        masked(lambda b, h, q, kv: torch.zeros(3)[q] > 0),
        "indexes a dimension of 3 elements with an index",
    ),
    "score returns None": (scored(lambda score, b, h, q, kv: None), "flexmasks"),
    "score with if": (scored(lambda score, b, h, q, kv: score if q > kv else -score), "flexmasks"),
    "score of a wrong shape": (scored(lambda score, b, h, q, kv: score + torch.zeros(3)), "for each score"),
    "score indexes out of range": (scored(lambda score, b, h, q, kv: score + torch.zeros(10)[kv]), "out of bounds"),
    "score asserts": (scored(lambda score, b, h, q, kv: [][0]), "failed on index tensors"),
    "score raises IndexError": (scored(lambda score, b, h, q, kv: score * [][0]), "flexmasks"),
    "score of four arguments": (scored(lambda b, h, q, kv: q), "must take (score, b, h, q, kv) by position"),
    # not a mask, not a score
    "class": (masked(NotAMask), "a mask is a name, a Mask or a function, got <class"),
    "type": (masked(int), "a mask is a name, a Mask or a function, got <class 'int'>"),
    "number": (masked(5), "`mask` must be a name, a Mask or a function, got 5"),
    "bool": (masked(True), "got True"),
    "whole numbers": (
        masked(torch.ones(64, 64).int()),
        "a dense mask `m`, where 0 is hidden, is mask=m.bool()",
    ),
    "Score as mask": (masked(CHECKERBOARD), "checkerboard() is a score, pass it as `score=`"),
    "Mask as score": (scored(CAUSAL), "causal() is a mask, pass it as `mask=`"),
    "number among scores": (scored(["checkerboard", 3]), "`score` must be a name, a Score or a function, got 3"),
    "no mask": (blocks_of(None), "`mask` must be a name, a Mask or a function, got None"),
    # algebra
    "and of masks": (
        lambda: CAUSAL and DOCUMENT,
        "not by `and`, `or`, `not`, `if`; got causal()",
    ),
    "not": (lambda: not CAUSAL, "masks are combined by `&`, `|` and `~`, not by"),
    "& number": (lambda: CAUSAL & 5, "got 5"),
    "& unknown name": (lambda: "casual" | DOCUMENT, "no mask is named 'casual'; did you mean 'causal'"),
    "& score": (lambda: CAUSAL & CHECKERBOARD, "a mask is needed, but checkerboard() is a score"),
    # block masks
    "block_mask of other q length": (
        attending_to(Q[:, :, :32], block_mask=flexmasks.block_mask("causal", 64)),
        "`block_mask` was made for (batch, heads, queries, keys) = (1, 1, 64, 64), the call has (2, 4, 32, 64)",
    ),
    "block_mask of other kv length": (
        masked(block_mask=flexmasks.block_mask("causal", 64, 32, q_offset=0)),
        "(1, 1, 64, 32)",
    ),
    "block_mask of other batch": (
        masked(block_mask=flexmasks.block_mask("padding", 64, kv_lens=[1, 2, 3])),
        "make it with flexmasks.block_mask(mask, 64, 64, batch=2, heads=4)",
    ),
    "block_mask of other heads": (
        masked(block_mask=flexmasks.block_mask(lambda b, h, q, kv: (q >= kv) & (h > 0), 64, heads=3)),
        "= (1, 3, 64, 64)",
    ),
    "block_mask and mask": (masked("causal", block_mask=flexmasks.block_mask("causal", 64)), "not both"),
    "block_mask a tensor": (masked(block_mask=torch.ones(64, 64)), "must be a BlockMask, got Tensor"),
    "block_mask a name": (masked(block_mask="causal"), "must be a BlockMask, got str"),
    "block_mask with parameters": (masked(block_mask=flexmasks.block_mask("causal", 64), window=3), "`window`"),
    "q_len 0": (blocks_of("causal", q_len=0), "flexmasks.block_mask: `q_len` must be an int of at least 1, got 0"),
    "q_len float": (blocks_of("causal", q_len=3.0), "got 3.0"),
    "kv_len negative": (blocks_of("causal", kv_len=-3), "`kv_len` must be"),
    "batch 0": (blocks_of("causal", batch=0), "`batch` must be"),
    "batch unlike the parameters": (blocks_of("padding", batch=3, kv_lens=[1, 2]), "(here B=3, KV=64), got int64[2]"),
    "block_size 0": (blocks_of("causal", block_size=0), "`block_size` must be an int above 0 or a pair, got 0"),
    "block_size of three": (blocks_of("causal", block_size=(1, 2, 3)), "got (1, 2, 3)"),
    "dense_mask": (lambda: flexmasks.dense_mask("causal", 4, q_offset=-1), "flexmasks.dense_mask: `q_offset` must be"),
    "explain": (lambda: flexmasks.explain(Q, K, V, mask="causal", window=3), "no argument is named `window`"),
    # backends
    "unknown backend": (masked(backend="tritn"), "`backend` must be 'auto' or one of 'fa4', 'decode', 'sdpa'"),
    "backend None": (masked(backend=None), "got None"),
    "backend a list": (masked(backend=["flex"]), "`backend`"),
    "sdpa with a window": (masked("sliding_window", window=3, backend="sdpa"), "backend 'sdpa' cannot run this call"),
    "sdpa with lse": (masked(return_lse=True, backend="sdpa"), "it gives no lse"),
    "sdpa with a score": (scored("checkerboard", backend="sdpa"), "it has no score changes"),
    "flex_flash on the CPU": (masked(backend="flex_flash"), "'flex_flash' cannot run this call: it runs on CUDA only"),
    "flex on the CPU by FLASH": (
        masked(backend="flex", kernel_options={"BACKEND": "FLASH"}),
        "'flex_flash' cannot run this call: it runs on CUDA only",
    ),
    "flex with gradients": (attending_to(Q.clone().requires_grad_(), backend="flex"), "no gradients on the CPU"),
    "flex with a learned score": (
        scored("alibi", slopes=torch.ones(4).requires_grad_(), backend="flex"),
        "no gradients",
    ),
    "flex with lse": (masked(return_lse=True, backend="flex"), "no lse on the CPU"),
    "flex in float64": (attending_to(Q.double(), K.double(), V.double(), backend="flex"), "not float64"),
    # jagged
    "jagged and dense": (
        attending_to(JAGGED),
        "q, k and v must all be jagged [B, H, jagged, D]; `k` is float32[2, 4, 64, 16]",
    ),
    "dense and jagged": (attending_to(Q, JAGGED, JAGGED), "`q` is float32[2, 4, 64, 16]"),
    "jagged and None": (attending_to(JAGGED, None, JAGGED), "`k`"),
    "jagged not transposed": (
        attending_to(*[jagged(transposed=False)] * 3),
        "A tensor [B, jagged, H, D] needs `.transpose(1, 2)`",
    ),
    "jagged q_offset": (
        attending_to(JAGGED, JAGGED, JAGGED, q_offset=torch.tensor([1])),
        "an integer tensor [B] = [2] on cpu, got int64[1]",
    ),
    "jagged block_mask": (
        attending_to(JAGGED, JAGGED, JAGGED, block_mask=flexmasks.block_mask("causal", 12)),
        "take `mask`, not `block_mask`",
    ),
    "jagged k and v": (attending_to(JAGGED, JAGGED, jagged((6, 6))), "the sequences of k and v have different lengths"),
    "jagged of other count": (attending_to(JAGGED, *[jagged((5, 4, 3))] * 2), "q has 2 sequences, k has 3"),
    # registration
    "a mask as score": (masked(score="causal"), "'causal' is a mask, pass it as `mask=`"),
    "a combination as a name": (masked(mask="causal & document"), "masks are combined as values"),
    "registered already": (
        register("causal"),
        "a mask named 'causal' is registered already, by flexmasks.masks.causal",
    ),
    "no identifier": (register("my mask"), "an identifier, got 'my mask'"),
    "a lambda's name": (register(None, lambda b, h, q, kv: q > kv), "an identifier, got '<lambda>'"),
    "a number as name": (register(3), "an identifier, got 3"),
    "empty name": (register(""), "an identifier, got ''"),
    "register a number": (register("five", 5), "a mask is a name, a Mask or a function, got 5"),
    "register three arguments": (register("three", lambda b, h, q: q > 0), "must take (b, h, q, kv) by position"),
    **{
        f"specification {spec!r}": (specified(spec), f"cannot read the parameter specification {spec!r}")
        for spec in ("integer", "int[", "int in 0", "int in a..b", "int(0)", "int[b]", "int in 0..1..2")
    },
    **{
        f"specification {spec!r}": (specified(spec), f"takes no value: {low} is above")
        for spec, low in (("int in 5..0", "5"), ("int[B] in 0.. | float in 1..0.5", "1"), ("length in 9..-1", "9"))
    },
    **{
        f"annotation {annotation!r}": (annotated(annotation), f"of `w` cannot be read; {advice}")
        for annotation, advice in (
            ("int[B]", "write Annotated[Tensor, 'int[B]']"),
            ("'int in 0..'", "write Annotated[Tensor, 'int in 0..']"),
            ("Annotated[Unknown, 'int[B]']", "import what it names"),
        )
    },
    "specification of no size": (specified("int in 0..X"), "of `w` is bounded by 'X', which is no size"),
}


def check_message(call: Callable[[], Any], words: str) -> str:
    """Check that a call raises a short message of the library with these words, and return the message."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert message.startswith("flexmasks")
    assert words in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str) -> None:
    check_message(*CASES[name])
    good = flexmasks.attention(Q, K, V, mask="causal", backend="reference")
    assert torch.allclose(good, WANT, atol=1e-5)


SCORES = torch.randn(2, 4, 8, 8)
TOKENS = torch.randn(10, 4, 16)
ONES = torch.ones(64, 64) > 0
BLOCKS = flexmasks.block_mask("causal", 64)


def blocks(mask: Any, **params: Any) -> Callable[[], Any]:
    """Return a call of block_mask over 64 positions."""
    return lambda: flexmasks.block_mask(mask, 64, **params)


def softmax(x: Any = SCORES, **arguments: Any) -> Callable[[], Any]:
    return lambda: flexmasks.masked_softmax(x, **arguments)


def varlen(offsets: Any, *more: Any, q: Any = TOKENS, **arguments: Any) -> Callable[[], Any]:
    return lambda: flexmasks.varlen_attention(q, TOKENS, TOKENS, offsets, *more, **arguments)


def registered(**hooks: Any) -> Callable[[], Any]:
    return lambda: flexmasks.register_mask(**hooks)(windowed)


# Wrong kinds of values. What the message must say, and that it is short and in one line.
ODD: dict[str, tuple[Callable[[], Any], str]] = {
    # masks and scores of wrong kinds
    "mask an empty list": (masked([]), "`mask` is an empty list; leave it out where all keys are visible"),
    "mask an empty tuple": (lambda: flexmasks.plan((), 64), "`mask` is an empty list"),
    "mask a list of one wrong": (masked(["causal", 3]), "`mask` must be a name, a Mask or a function, got 3"),
    "mask an array": (masked(ONES.numpy()), "got a NumPy array bool[64, 64]; a dense mask `m` is mask=torch.as"),
    "a BlockMask in a list": (masked([BLOCKS]), "got a BlockMask; it is `block_mask=` of flexmasks.attention"),
    "mask of softmax a BlockMask": (softmax(mask=BLOCKS), "got a BlockMask"),
    "mask a long list": (masked([0] * 10000), "got 0"),
    "mask bytes": (masked(b"causal"), "got b'causal'"),
    "mask capital": (masked("Causal"), "did you mean 'causal'"),
    "mask with a hyphen": (masked("sliding-window", window=3), "did you mean 'sliding_window'"),
    "score a vector": (scored(torch.zeros(64)), "a bias `m`, [queries, keys] or [batch or 1"),
    "score a BlockMask": (scored(BLOCKS), "got a BlockMask; it is `block_mask=` of flexmasks.attention"),
    "score among None": (scored(["alibi", None]), "`score` must be a name, a Score or a function, got None"),
    "& tensor": (
        lambda: CAUSAL & ONES.int(),
        "got int32[64, 64]; a dense mask `m`, where 0 is hidden, is mask=m.bool()",
    ),
    "& None": (lambda: CAUSAL & None, "got None"),  # type: ignore[operator]
    "get_mask of a builtin": (lambda: flexmasks.get_mask(len), "must take (b, h, q, kv) by position"),
    "a Mask of numbers": (lambda: CAUSAL(0, 0, 3, 2), "is called with index tensors, such as torch.tensor(3), got 3"),
    "a Score of numbers": (lambda: CHECKERBOARD(1.0, 0, 0, 3, 2), "is called with index tensors"),
    # other arguments
    "scale a tensor": (masked(scale=torch.tensor(1.0)), "got float32[]; multiply q by a tensor instead"),
    "q_offset a set": (masked(q_offset={1, 2}), "an int from 0 to 2**31 - 1 or an integer tensor [B] = [2] on cpu"),
    "q_offset of no dimension": (masked("causal", q_offset=torch.tensor(3)), "got int64[] on cpu"),
    "q_offset beyond 2**31": (masked("causal", q_offset=torch.tensor([2**40, 1])), "at most 2**31 - 64"),
    "misspelt argument": (masked("causal", retrun_lse=True), "named `retrun_lse`; did you mean `return_lse`?"),
    "misspelt mask": (
        lambda: flexmasks.explain(Q, K, V, maks="causal"),
        "explain: no argument is named `maks`; did you mean `mask`?",
    ),
    "explain with sinks of other heads": (
        lambda: flexmasks.explain(Q, K, V, sink_logits=torch.zeros(3)),
        "`sink_logits` must be a floating tensor [H] = [4]",
    ),
    "sink_logits a list": (masked(sink_logits=[1.0] * 4), "`sink_logits` must be a floating tensor [H] = [4]"),
    "return_lse 1": (masked(return_lse=1), "`return_lse` must be True or False, got 1"),
    "backend in capitals": (masked(backend="CPU"), "must be 'auto' or one of 'fa4', 'decode'"),
    "as_data a string": (blocks("causal", as_data="no"), "`as_data` must be True or False, got 'no'"),
    "device unknown": (blocks("causal", device="gpu"), "`device` must be a torch device, got 'gpu'"),
    "device a list": (blocks("causal", device=["cpu"]), "`device` must be a torch device, got ['cpu']"),
    "device meta": (blocks("causal", device="meta"), "`device` must hold data, got meta"),
    "device without backend": (blocks("causal", device="mps"), "`device` must be available, got mps, and torch says"),
    "heads unknown": (blocks(lambda b, h, q, kv: (q >= kv) & (h < 1)), "depends on its head index; pass `heads`"),
    "q_len a float of NumPy": (blocks_of("causal", q_len=np.float64(64)), "`q_len` must be an int of at least 1"),
    "q_len a bool": (blocks_of("causal", q_len=True), "`q_len` must be an int of at least 1, got True"),
    "q_len beyond 2**31": (blocks_of("causal", q_len=2**33), "`q_len` must be at most 2**31 = 2147483648"),
    "kv_len beyond 2**31": (blocks_of("causal", kv_len=2**33), "`kv_len` must be at most 2**31"),
    "block_size a string": (
        blocks("causal", block_size="128"),
        "`block_size` must be an int above 0 or a pair, got",
    ),
    "length of Mask.blocks": (lambda: CAUSAL.blocks("64"), "flexmasks.Mask.blocks: `q_len` must be an int"),
    # parameters
    "ids a range": (blocks("document", document_ids=range(64)), "(range); pass a list or a tensor"),
    "ids a set": (blocks("document", document_ids={1, 2}), "got {1, 2} (set); pass a list or a tensor"),
    "ids a generator": (blocks("document", document_ids=(i for i in [0])), "(generator); pass a list or a tensor"),
    "ids strings": (blocks("document", document_ids=["a"] * 64), "a sequence that cannot be made a tensor"),
    "ids None": (blocks("document", document_ids=[None] * 64), "a sequence that cannot be made a tensor"),
    "ids huge": (blocks("document", document_ids=[2**70] * 64), "a sequence that cannot be made a tensor"),
    "ids sparse": (
        blocks("document", document_ids=torch.eye(64)[0].long().to_sparse()),
        "must be a dense tensor, got int64[64] of torch.sparse_coo; use `.to_dense()`",
    ),
    "window NaN": (blocks("sliding_window", window=math.nan), "got nan (float)"),
    "window a Mask": (blocks("sliding_window", window=CAUSAL), "got causal() (Mask)"),
    "window a float tensor": (blocks("sliding_window", window=torch.tensor(3.0)), "got float32[]"),
    "both_ends 1": (blocks("bigbird", length=64, block=8, both_ends=1), "`both_ends` must be bool, got 1 (int)"),
    **{
        f"{call.__name__} with heads second, {name} {in_message(wrong)}": (
            lambda call=call, given={"q": Q, "k": K, "v": V, name: wrong}: call(**given, layout="bshd"),  # type: ignore[misc]
            "tensors [B, S, H, D]; got q",
        )
        for call in (flexmasks.attention, flexmasks.explain)
        for name in "qkv"
        for wrong in (None, "a", torch.randn(3), Q.numpy()[0], [[1.0]])
    },
    # the softmax
    "scores a list": (softmax([[1.0]]), "got list; use torch.as_tensor"),
    "q_offset of softmax": (softmax(mask="causal", q_offset=-3), "`q_offset` must be an int from 0"),
    "q_offset of softmax, a word": (softmax(mask="causal", q_offset="end"), "must be 'first', 'last', an int"),
    "dropout of softmax": (softmax(mask="causal", dropout_p=0.1), "flexmasks.varlen_attention drop weights"),
    # sequences and pages
    "offsets a string": (varlen("0,10"), "`offsets` must be int[N + 1] on cpu, the starts of N sequences"),
    "offsets of two dimensions": (varlen([[0, 10]]), "`offsets` must be int[N + 1]"),
    "kv_offsets missing": (varlen([0, 5], q=TOKENS[:5]), "pass `kv_offsets`"),
    "block_mask of varlen": (varlen([0, 10], block_mask=BLOCKS), "only flexmasks.attention takes one"),
    "max_seqlen": (varlen([0, 10], max_seqlen=10), "leave it out: the offsets say the lengths"),
    "dropout_p of pages": (
        varlen([0, 10], dropout_p=0.1, page_table=torch.zeros(1, 1).int(), kv_lens=torch.tensor([10])),
        "flexmasks.varlen_attention: pages hold a cache, and weights are dropped in training only",
    ),
    "causal of FlashAttention": (varlen([0, 10], causal=True), 'pass mask="causal"'),
    # registration
    "example a dict": (
        registered(name="wrong", example={"w": 1}),
        "`example` must be a function, such as lambda",
    ),
    "prepare a number": (registered(name="wrong", prepare=3), "`prepare` must be a function, got 3"),
    "band a number": (registered(name="wrong", band=3), "`band` must be a function, got 3"),
    "relative a word": (lambda: flexmasks.register_score(relative="no"), "`relative` must be True or False, got 'no'"),  # type: ignore[arg-type]
    # pictures and orders
    "columns 0": (lambda: flexmasks.show("causal", 8, columns=0), "`columns` must be an int above 0, got 0"),
    "columns a float": (lambda: flexmasks.show("causal", 8, columns=8.0), "got 8.0"),  # type: ignore[arg-type]
    "columns of a text": (lambda: flexmasks.draw("causal", 8).text(0), "`columns` must be an int above 0, got 0"),
    "ax a number": (lambda: flexmasks.draw("causal", 8).plot(3), "`ax` must be matplotlib's Axes"),  # type: ignore[arg-type]
    "canvas a number": (lambda: morton_order(8), "`canvas` must be a tuple of ints"),  # type: ignore[arg-type]
    "canvas a string": (
        lambda: tile_order("8x8", (2, 2)),
        "`canvas` must be a tuple of ints, such as (48, 64)",
    ),  # type: ignore[arg-type]
    **{
        f"canvas {given}": (lambda order=order, given=given: order(*given), "flexmasks: `canvas`")  # type: ignore[misc]
        for order, *given in (
            (tile_order, (4, 4), (2,)),
            (tile_order, (4, 0), (2, 2)),
            (morton_order, ()),
            (morton_order, (3, -1)),
        )
    },
    "order a pixel twice": (
        blocks_of("natten", q_len=16, height=4, width=4, kernel=3, order=[0] * 16),
        "each pixel once",
    ),
    "order a list": (lambda: inverse_order([1, 0]), "`order` must be a tensor of one dimension"),  # type: ignore[arg-type]
    "order a word": (
        lambda: flexmasks.attention(Q, Q, Q, mask="natten", height=8, width=8, kernel=3, order="auto"),
        "`order` must be int[KV] in 0..KV-1 (here KV=64), got 'auto' (str)",
    ),
    "in_tiles of fewer tokens": (
        lambda: in_tiles(flexmasks.attention, Q, Q[:, :, :-1], Q, order=torch.arange(64), mask="causal"),
        "flexmasks.orders.in_tiles: `k` must be [B, H, 64, D] on cpu",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_values(name: str) -> None:
    assert "\n" not in check_message(*ODD[name])


with warnings.catch_warnings(action="ignore"):  # torch calls it a beta
    CSR = torch.eye(64).to_sparse_csr()
# Tensors without strides, in all places that take a tensor or no tensor at all.
NOT_DENSE = {
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested ints": torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([1])]),
    "nested booleans": torch.nested.nested_tensor([ONES[0], ONES[0, :3]]),
    "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "sparse": torch.tensor([1, 0]).to_sparse(),
    "sparse matrix": torch.eye(64).to_sparse(),
    "CSR": CSR,
}
CACHE, TABLE, LENS = torch.randn(4, 16, 4, 16), torch.tensor([[0, 1], [2, 3]]), torch.tensor([20, 9])


def paged_call(call: Any = flexmasks.paged_attention, **given: Any) -> Any:
    """Return the result of a paged call, or of a varlen call with pages, of one query for each sequence."""
    q = Q[:, :, :1] if call is flexmasks.paged_attention else Q[:, :, 0]
    offsets = {} if call is flexmasks.paged_attention else {"offsets": [0, 1, 2]}
    names = dict(zip(("q", list(inspect.signature(call).parameters)[1]), (q, CACHE), strict=True))
    v = list(inspect.signature(call).parameters)[2]
    return call(**{**names, v: CACHE, **offsets, "page_table": TABLE, "kv_lens": LENS, **given})


PLACES: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda x, name=name: flexmasks.attention(**{"q": Q, "k": K, "v": V, name: x})  # type: ignore[misc]
        for name in (
            "q", "k", "v", "mask", "score", "scale", "block_mask", "q_offset", "layout", "sink_logits", "return_lse",
            "return_max", "backend", "kernel_options", "dropout_p",
        )
    },
    "a seed": lambda x: flexmasks.attention(Q, K, V, dropout_p=0.1, dropout_seed=x),
    "a length": lambda x: flexmasks.attention(Q, K, V, mask="padding", kv_lens=x),
    "a window": lambda x: flexmasks.attention(Q, K, V, mask="sliding_window", window=x),
    "a table": lambda x: flexmasks.attention(Q[:, :, :9], K, V, mask="dense", visible=x),
    "a cap": lambda x: flexmasks.attention(Q, K, V, score="softcap", cap=x),
    "of a mask's function": lambda x: flexmasks.attention(Q, K, V, mask=lambda b, h, q, kv: x[q] > 0),
    "of a score's function": lambda x: flexmasks.attention(Q[:, :, :9], K, V, score=lambda s, b, h, q, kv: s + x[q]),
    "explain": lambda x: flexmasks.explain(Q, K, V, mask="padding", kv_lens=x),
    "explain return_max": lambda x: flexmasks.explain(Q, K, V, return_max=x),
    "plan": lambda x: flexmasks.plan("padding", 64, kv_lens=x),
    "plan q_offset": lambda x: flexmasks.plan("causal", 64, q_offset=x),
    "block_mask": lambda x: flexmasks.block_mask("padding", 64, kv_lens=x),
    "block_mask q_offset": lambda x: flexmasks.block_mask("causal", 64, q_offset=x),
    **{
        f"varlen {name}": lambda x, name=name: flexmasks.varlen_attention(  # type: ignore[misc]
            **{"q": Q[0], "k": Q[0], "v": Q[0], "offsets": [0, 4], name: x}
        )
        for name in ("q", "k", "v", "offsets", "kv_offsets", "q_offset", "mask", "max_seqlen_q", "max_seqlen_k")
    },
    **{
        f"paged {name}": lambda x, name=name: paged_call(**{name: x})  # type: ignore[misc]
        for name in ("q", "k_cache", "v_cache", "page_table", "kv_lens", "q_offset", "mask")
    },
    **{
        f"mixed {name}": lambda x, name=name: paged_call(flexmasks.varlen_attention, **{name: x})  # type: ignore[misc]
        for name in ("q", "k", "v", "offsets", "page_table", "kv_lens", "q_offset", "max_seqlen_q", "max_seqlen_k")
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.parametrize("place", PLACES)
def test_tensors_that_are_not_dense(place: str, kind: str) -> None:
    assert "\n" not in check_message(lambda: PLACES[place](NOT_DENSE[kind]), "")


@pytest.mark.parametrize("wrong", ["a", object(), -1, 2.5, True, torch.tensor(3), torch.tensor([3, 4])])
@pytest.mark.parametrize("with_pages", [False, True])
def test_wrong_longest_lengths(wrong: Any, with_pages: bool) -> None:
    pages = {"page_table": TABLE, "kv_lens": LENS} if with_pages else {}
    kv = CACHE if with_pages else Q[0, :, :2].transpose(0, 1)
    for name, other in itertools.permutations(("max_seqlen_q", "max_seqlen_k")):
        for more in ({}, {other: 3}):
            check_message(
                lambda given={name: wrong, **more}: flexmasks.varlen_attention(  # type: ignore[misc]
                    Q[0, :, :2].transpose(0, 1), kv, kv, [0, 1, 2], **pages, **given
                ),
                f"flexmasks.varlen_attention: `{name}` must be an int of at least 0, got",
            )


@pytest.mark.parametrize("wrong", ["no", 1, None, torch.tensor([1, 2])])
def test_wrong_return_max(wrong: Any) -> None:
    for call in (flexmasks.attention, flexmasks.explain):
        check_message(lambda call=call: call(Q, K, V, return_max=wrong), "`return_max` must be True or False, got")  # type: ignore[misc]
    assert flexmasks.explain(Q, K, V, return_max=True).backend == flexmasks.explain(Q, K, V).backend


OF_VMAP: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "`kv_lens` of mask 'padding'": (PLACES["a length"], LENS),
    "`window` of mask 'sliding_window'": (PLACES["a window"], torch.tensor(3)),
    "the variable `x` of the function": (PLACES["of a mask's function"], torch.ones(64)),
    "`q_offset`": (lambda x: flexmasks.attention(Q[:, :, :9], K, V, mask="causal", q_offset=x), LENS),
    "paged_attention: `kv_lens`": (lambda x: paged_call(kv_lens=x), LENS),
    "paged_attention: `page_table`": (lambda x: paged_call(page_table=x), TABLE),
    "varlen_attention: `kv_lens`": (lambda x: paged_call(flexmasks.varlen_attention, kv_lens=x), LENS),
    "varlen_attention: `page_table`": (lambda x: paged_call(flexmasks.varlen_attention, page_table=x), TABLE),
    "`offsets` of mask 'packed'": (PLACES["varlen offsets"], torch.tensor([0, 2, 4])),
}


@pytest.mark.parametrize("name", OF_VMAP)
def test_vmap_over_what_blocks_are_made_of(name: str) -> None:
    call, value = OF_VMAP[name]
    many = torch.stack([value, value])
    check_message(lambda: torch.vmap(call)(many), f"{name} has a dimension that torch.vmap hides")


def test_random_blocks_beyond_all_blocks() -> None:
    most, all_of_them = (
        flexmasks.get_mask("bigbird", length=64, block=8, random_blocks=count) for count in (10**12, 8)
    )
    assert torch.equal(flexmasks.dense_mask(most, 64), flexmasks.dense_mask(all_of_them, 64))
    assert flexmasks.dense_mask(most, 64).all()


# Arguments by position that need names: each call, and what its error says to write.
BY_POSITION: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "attention, name": (
        flexmasks.attention,
        (Q, K, V, "causal"),
        'flexmasks.attention takes q, k, v by position; write mask="causal".',
    ),
    "attention, Mask": (flexmasks.attention, (Q, K, V, CAUSAL), "write `mask=` before the mask"),
    "attention, Score": (flexmasks.attention, (Q, K, V, CHECKERBOARD), "write `score=` before the score"),
    "attention, function": (flexmasks.attention, (Q, K, V, windowed), "write `mask=` before the mask"),
    "attention, BlockMask": (
        flexmasks.attention,
        (Q, K, V, flexmasks.block_mask("causal", 64)),
        "write `block_mask=` before the block mask",
    ),
    "attention, booleans": (flexmasks.attention, (Q, K, V, torch.ones(64, 64) > 0), "write mask=m for a"),
    "attention, as SDPA": (flexmasks.attention, (Q, K, V, None, 0.0, True), "mask=, score=, scale=, block_mask="),
    "explain": (flexmasks.explain, (Q, K, V, "causal"), 'write mask="causal"'),
    "varlen_attention": (flexmasks.varlen_attention, (Q[0], K[0], V[0], [0, 4], None, "full"), 'write mask="full"'),
    "paged_attention": (flexmasks.paged_attention, (Q, K, V, Q, Q, "causal"), 'write mask="causal"'),
    "block_mask": (flexmasks.block_mask, ("causal", 8, 8, 1), "by position; write the names of the others: batch="),
    "dense_mask": (flexmasks.dense_mask, ("causal", 8, 8, 1), "heads="),
    "show": (flexmasks.show, ("causal", 8, 8, 1), "columns="),
    "draw": (flexmasks.draw, ("causal", 8, 8, 1), "block_size="),
    "compare": (flexmasks.compare, ("causal", "full", 8, 8, 1), "batch="),
    "masked_softmax": (flexmasks.masked_softmax, (Q, "causal"), 'takes x by position; write mask="causal"'),
    "scaled_masked_softmax": (flexmasks.scaled_masked_softmax, (Q, Q > 0, 1.0, 2), "write x, mask and scale"),
    "packed": (flexmasks.packed, ("causal", [0, 8], [0, 8], 0, 8), "max_length="),
    "get_mask": (flexmasks.get_mask, ("causal", 5), "write get_mask('causal'), which takes no parameters"),
    "get_mask, a parameter": (flexmasks.get_mask, ("sliding_window", 5), "write get_mask('sliding_window', window=5)"),
    "get_mask, two": (flexmasks.get_mask, ("local", 5, 6), "write get_mask('local', left=5, right=6)"),
    "get_mask, unknown": (flexmasks.get_mask, ("locl", 5), "did you mean 'local'"),
    "get_score": (flexmasks.get_score, ("softcap", 30.0), "write get_score('softcap', cap=30.0)"),
    "register_mask, a function": (flexmasks.register_mask, (windowed,), "write @flexmasks.register_mask(), with paren"),
    "register_mask, a name": (flexmasks.register_mask, ("mine",), "write @flexmasks.register_mask(name='mine') above"),
    "register_score": (flexmasks.register_score, (weighted,), "write @flexmasks.register_score(), with parentheses"),
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_arguments_by_position(name: str) -> None:
    call, arguments, words = BY_POSITION[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(words)) as caught:
        call(*arguments)
    assert str(caught.value).startswith("flexmasks")


def test_calls_keep_their_signatures() -> None:
    parameters = inspect.signature(flexmasks.attention).parameters
    assert list(parameters)[:5] == ["q", "k", "v", "mask", "score"]
    assert parameters["mask"].kind is inspect.Parameter.KEYWORD_ONLY
    for call, _, _ in BY_POSITION.values():
        kinds = {p.kind for p in inspect.signature(call).parameters.values()}
        assert inspect.Parameter.VAR_POSITIONAL not in kinds
        assert pickle.loads(pickle.dumps(call)) is call


def test_the_advice_for_head_sizes_is_right() -> None:
    v = torch.randn(2, 4, 64, 20)
    for values, size in ((V[..., :10], 16), (v, 20)):
        q, k, padded = (F.pad(x, (0, size - x.shape[-1])) for x in (Q, K, values))
        out = flexmasks.attention(q, k, padded, mask="causal", scale=16**-0.5)[..., : values.shape[-1]]
        assert torch.allclose(out, F.scaled_dot_product_attention(Q, K, values, is_causal=True), atol=1e-5)


# --- results that no memory holds ---

LONG_QUERIES = torch.zeros(1, 1, 1, 16).expand(1, 1, 10**9, 16)
TOO_LARGE: dict[str, tuple[Callable[[], Any], str]] = {
    "block_mask": (lambda: flexmasks.block_mask("causal", 10**9), "1,464,843,750,000,000 bytes"),
    "small blocks": (lambda: flexmasks.block_mask("causal", 1 << 20, block_size=1), "26,388,279,066,624 bytes"),
    "many heads": (
        lambda: flexmasks.block_mask(lambda b, h, q, kv: kv <= q + b * h, 1 << 19, batch=1000, heads=1000),
        "402,653,184,000,000 bytes",
    ),
    "blocks of a Mask": (lambda: CAUSAL.blocks(10**9), "1,464,843,750,000,000 bytes"),
    "dense_mask": (lambda: flexmasks.dense_mask("causal", 2**31), "4,611,686,018,427,387,904 bytes"),
    "show": (lambda: flexmasks.show("causal", 10**9), "bytes"),
    "attention": (attending_to(*[LONG_QUERIES] * 3, mask="sliding_window", window=9), "1,464,843,750,000,000 bytes"),
    "explain": (lambda: flexmasks.explain(*[LONG_QUERIES] * 3, mask="sliding_window", window=9), "1,464,843,750,000"),
    "attention, new tensors": (
        attending_to(
            *[LONG_QUERIES] * 3, mask=lambda b, h, q, kv: (q >= kv) & (torch.arange(10)[b] < 5), backend="flex"
        ),
        "1,464,843,750,000,000 bytes",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_results_that_no_memory_holds(name: str) -> None:
    call, words = TOO_LARGE[name]
    with pytest.raises(MemoryError, match=f"flexmasks: .* needs .*{words}.* are free on cpu. Ask for a part") as caught:
        call()
    assert "q_offset" in str(caught.value)


@pytest.mark.parametrize("part", ["exact", "bounds", "dense"])
def test_what_is_free_decides(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_UNCHECKED_BYTES", 0)
    size = 512
    needed = size**2 if part == "dense" else 24 * 16

    def call(seed: int) -> Any:
        if part == "dense":
            return flexmasks.dense_mask("causal", size)
        if part == "exact":
            return flexmasks.block_mask(lambda b, h, q, kv: q - kv > seed, size)
        ids = torch.full((size,), seed)
        x = torch.randn(1, 1, size, 16, dtype=torch.float64)
        return [flexmasks.attention(x, x, x, mask="document", document_ids=ids + n) for n in range(3)]

    if part == "bounds":  # on a CPU the blocks of float64 calls are smaller
        needed = 24 * 16 * 16
    monkeypatch.setattr(limits, "free_memory", lambda device: needed - 1)
    flexmasks.clear_caches()
    with pytest.raises(MemoryError, match=f"needs {needed:,} bytes, and {needed - 1:,} are free on cpu"):
        call(1)
    monkeypatch.setattr(limits, "free_memory", lambda device: needed)
    call(2)


def test_free_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert 1 << 20 < limits.free_memory(cpu) < 1 << 50
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:    700 kB\nCached: 3 kB\n")
    monkeypatch.setattr(limits, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limits, "_CONTAINER", tmp_path)
    assert limits.free_memory(cpu) == 700 * 1024
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert limits.free_memory(cpu) == 700 * 1024
    (tmp_path / "memory.max").write_text("65000\n")
    assert limits.free_memory(cpu) == 60000
    (tmp_path / "meminfo").unlink()
    (tmp_path / "memory.max").unlink()
    assert limits.free_memory(cpu) >= 1 << 29  # all memory of the machine
    for name, value in {
        "is_available": True,
        "is_current_stream_capturing": False,
        "memory_reserved": 50,
        "memory_allocated": 20,
        "mem_get_info": (1000, 4000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    assert limits.free_memory(gpu) == 1030
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert limits.free_memory(gpu) == math.inf
    assert limits.free_memory(torch.device("meta")) == math.inf


def test_a_dense_mask_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = flexmasks.get_mask("padding", kv_lens=[50, 7]) & flexmasks.get_mask("causal")
    whole = flexmasks.dense_mask(mask, 67, 80, q_offset=0)
    for pairs in (1, 500, 1000, 5000):
        monkeypatch.setattr(build, "_PAIRS_AT_ONCE", pairs)
        assert torch.equal(flexmasks.dense_mask(mask, 67, 80, q_offset=0), whole)
    assert whole.shape == (2, 1, 67, 80)


def test_nothing_was_registered() -> None:
    names = {entry.name for entry in flexmasks.list_masks()}
    assert names.isdisjoint({"my mask", "three", "five", "windowed"})


def test_sizes_learned_from_a_parameter_that_was_not_given() -> None:
    def mask(
        b: Any, h: Any, q: Any, kv: Any, *,
        ids: Annotated[Tensor | None, "int[N]"] = None, last: Annotated[int, "int in 0..N-1"] = 3,
    ) -> Any:  # fmt: skip
        return kv <= last

    assert flexmasks.dense_mask(mask, 8)[0, 0, 0].sum() == 4
    with pytest.raises(ValueError, match=r"`last` must be int in 0..N-1 \(here N=3\), got 3"):
        flexmasks.dense_mask(mask, 8, ids=[1, 2, 3])


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        ("float in 0.5..1.5", [0.5, 1, 1.5], [0.4, 1.6, float("nan"), float("inf")]),
        ("float in 1e-3..", [0.001, 5], [0.0009, 0]),
        ("float[B] in 0..", [[0.0, 1.5], torch.zeros(2)], [[-0.5, 1.0], [float("nan"), 1.0], [1.0]]),
        ("int in -2..S", [-2, 64], [-3, 65]),
        ("int(2) in 0.. | int", [(0, 1), -5], [(0, -1)]),
        ("bool[B, 2]", [[[True, False], [True, True]]], [[[True], [False]]]),
    ],
)
def test_specifications(spec: str, good: list[Any], bad: list[Any]) -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any, *, w: Any) -> Any:
        return kv <= q

    mask.__annotations__["w"] = Annotated[Any, spec]
    for value in good:
        flexmasks.block_mask(mask, 64, batch=2, w=value)
    for value in bad:
        with pytest.raises(ValueError, match="`w` must be"):
            flexmasks.block_mask(mask, 64, batch=2, w=value)


def test_annotations_for_type_checkers_leave_other_specifications() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any, *, lens: Annotated[Tensor, "int[B]"], w: Any = None) -> Any:
        return kv < lens[b]

    mask.__annotations__["w"] = "OnlyForTypeCheckers"
    with pytest.raises(TypeError, match=r"`lens` must be int\[B\]"):
        flexmasks.dense_mask(flexmasks.get_mask(mask, lens=torch.zeros(1, 2)), 4)
