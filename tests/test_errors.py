"""Bad input raises an error that says what came and what to pass.

A good call after the error is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexmasks

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
        "no parameter is named `windw`; mask 'sliding_window' takes",
    ),
    "parameter of nothing": (masked(window=3), "no parameter is named `window`; no mask or score is given by name"),
    "unknown parameter of get_mask": (
        lambda: flexmasks.get_mask("local", left=1, rigth=2),
        "mask 'local' has no parameter `rigth`; takes `left`, `right`",
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
    "padding beyond KV": (masked("padding", seq_lens=LONG), "must be int[B] in 0..KV (here B=2, KV=64), got values"),
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
    "cap negative": (scored("softcap", cap=-1.0), "`cap` must be float in 0.., got -1.0"),
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
    "offsets not from 0": (packed([1, 64]), "mask 'packed': `offsets` must rise from 0 to at most the length 64"),
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
        "`page_table` must have pages 0..3 where it is in use, got 4 for page 1 of batch element 1, which has 17 keys",
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
    "rank": (attending_to(Q[0]), "`q` must have 4 dimensions, [B, H, S, D]; got q float32[4, 64, 16] on cpu"),
    "batch": (attending_to(Q[:1]), "one batch size; got q float32[1, 4, 64, 16]"),
    "dtype": (attending_to(Q.half()), "one dtype; got q float16"),
    "device": (attending_to(Q, K.to("meta")), "on one device; got"),
    "head size": (attending_to(Q[..., :8]), "one head size D; got q float32[2, 4, 64, 8]"),
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
    "tensor": (masked(torch.ones(64, 64).bool()), "got bool[64, 64]; a dense mask `m` is mask='dense', visible=m"),
    "Score as mask": (masked(CHECKERBOARD), "checkerboard() is a score, pass it as `score=`"),
    "Mask as score": (scored(CAUSAL), "causal() is a mask, pass it as `mask=`"),
    "number among scores": (scored(["checkerboard", 3]), "`score` must be a name, a Score or a function, got 3"),
    "no mask": (blocks_of(None), "`mask` must be a name, a Mask or a function, got None"),
    # algebra
    "and of masks": (lambda: CAUSAL and DOCUMENT, "a mask has no truth value; combine masks with `&`"),
    "not": (lambda: not CAUSAL, "a mask has no truth value"),
    "& number": (lambda: CAUSAL & 5, "got 5"),
    "& unknown name": (lambda: "casual" | DOCUMENT, "no mask is named 'casual'; did you mean 'causal'"),
    "& score": (lambda: CAUSAL & CHECKERBOARD, "a mask is needed, but checkerboard() is a score"),
    # block masks
    "block_mask of other q length": (
        attending_to(Q[:, :, :32], block_mask=flexmasks.block_mask("causal", 64)),
        "`block_mask` was made for (batch, heads, queries, keys) = (1, 1, 64, 64), the call has (2, 4, 32, 64)",
    ),
    "block_mask of other kv length": (masked(block_mask=flexmasks.block_mask("causal", 64, 32)), "(1, 1, 64, 32)"),
    "block_mask of other batch": (
        masked(block_mask=flexmasks.block_mask("padding", 64, seq_lens=[1, 2, 3])),
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
    "batch unlike the parameters": (blocks_of("padding", batch=3, seq_lens=[1, 2]), "(here B=3, KV=64), got int64[2]"),
    "block_size 0": (blocks_of("causal", block_size=0), "`block_size` must be an int above 0 or a pair, got 0"),
    "block_size of three": (blocks_of("causal", block_size=(1, 2, 3)), "got (1, 2, 3)"),
    "dense_mask": (lambda: flexmasks.dense_mask("causal", 4, q_offset=-1), "flexmasks.dense_mask: `q_offset` must be"),
    "explain": (lambda: flexmasks.explain(Q, K, V, mask="causal", window=3), "no parameter is named `window`"),
    # backends
    "unknown backend": (masked(backend="tritn"), "`backend` must be 'auto' or one of 'fa4', 'sdpa', 'flash'"),
    "backend None": (masked(backend=None), "got None"),
    "backend a list": (masked(backend=["cpu"]), "`backend`"),
    "sdpa with a window": (masked("sliding_window", window=3, backend="sdpa"), "backend 'sdpa' cannot run this call"),
    "sdpa with lse": (masked(return_lse=True, backend="sdpa"), "it gives no lse"),
    "sdpa with a score": (scored("checkerboard", backend="sdpa"), "it has no score changes"),
    "triton on the CPU": (masked(backend="triton"), "backend 'triton' cannot run this call: it runs on CUDA only"),
    "flash on the CPU": (masked(backend="flash"), "backend 'flash' cannot run this call: it runs on CUDA only"),
    "cpu with gradients": (attending_to(Q.clone().requires_grad_(), backend="cpu"), "no gradients on the CPU"),
    "cpu with a learned score": (scored("alibi", slopes=torch.ones(4).requires_grad_(), backend="cpu"), "no gradients"),
    "cpu with lse": (masked(return_lse=True, backend="cpu"), "no lse on the CPU"),
    "cpu in float64": (attending_to(Q.double(), K.double(), V.double(), backend="cpu"), "not float64"),
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
    "specification of no size": (specified("int in 0..X"), "of `w` is bounded by 'X', which is no size"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str) -> None:
    call, words = CASES[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert message.startswith("flexmasks")
    assert words in message
    assert len(message) < 500
    good = flexmasks.attention(Q, K, V, mask="causal", backend="reference")
    assert torch.allclose(good, WANT, atol=1e-5)


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
