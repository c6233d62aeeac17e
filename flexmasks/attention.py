"""The public calls: attention, block_mask, dense_mask and explain, and the checks of what comes in."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmasks import compat
from flexmasks.backends import flex as kernels
from flexmasks.backends import reference
from flexmasks.backends.table import BACKENDS, Again, Call, Ran, Unavailable, check, choose, run, transformed
from flexmasks.blocks.build import materialize
from flexmasks.cache import ENTRY, Cache
from flexmasks.plans.explanation import Explanation
from flexmasks.plans.plan import (
    FULL,
    GivenPlan,
    MaskPlan,
    ScorePlan,
    block_size_for,
    check_open_extents,
    explained,
    shifted_mask,
    shifted_score,
    sized,
)
from flexmasks.plans.windows import soft_cap
from flexmasks.spec.captures import Aliases, Opaque, Reader, capture_plainly
from flexmasks.spec.packing import packed
from flexmasks.spec.paging import paged
from flexmasks.spec.parameters import Size, describe
from flexmasks.spec.registry import from_arguments, functions_of, get_mask, is_own
from flexmasks.spec.values import Mask, Score

MaskLike = str | Mask | Callable[..., Tensor]
ScoreLike = str | Score | Callable[..., Tensor]
_CALL, _PAGED = "flexmasks.attention", "flexmasks.paged_attention"
_OUTSIDE = f"{_CALL}: a mask cannot be planned inside fullgraph; make block_mask=flexmasks.block_mask(...) outside."
_LARGEST = torch.finfo(torch.float32).max
_INTS = (torch.int8, torch.int16, torch.int32, torch.int64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    scale: float | None = None,
    block_mask: BlockMask | None = None,
    q_offset: int | Tensor = 0,
    sink_logits: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    kernel_options: dict[str, Any] | None = None,
    **params: Any,
) -> Any:
    """Exact, differentiable attention under a mask, by the best kernel there is.

    softmax(score(q @ k^T * scale)) @ v over the keys that the mask lets each query see. A row that sees nothing
    gives output 0, lse -inf and zero gradients. Hidden keys, and queries that see nothing, may hold anything, NaN
    too, in the forward pass; hidden values, and in the backward pass hidden keys and such queries too, must be
    finite (the reference backend survives them all).

    Args:
        q: queries, [B, H, Q, D], floating; or a jagged nested tensor [B, H, jagged, D], as k and v then are too.
        k, v: keys and values, [B, Hkv, KV, D]; H must be a multiple of Hkv (grouped-query attention).
        mask: a registered mask's name, a Mask, or a function (b, h, q, kv) -> bool of index tensors, True = visible;
            everything is visible by default. Tensors that a function captures are inputs of the kernel; that they
            changed, in place too, is noticed, unless torch does not count the change: one of `tensor.data`, or of
            memory shared with NumPy or written by a kernel of yours. Call `clear_caches` after one.
        score: a change of the scores: a name, a Score, a function (score, b, h, q, kv) -> score, or a list of them,
            applied in order.
        scale: factor of q @ k^T, 1 / sqrt(D) by default.
        block_mask: in place of `mask`, a BlockMask made before, by `flexmasks.block_mask` or by torch. The way to
            call this inside your own torch.compile(fullgraph=True), where torch then chooses the kernel; with `mask`
            there is a graph break. (On a CPU, gradients with `block_mask` inside torch.compile take memory for all
            Q x KV scores; otherwise they do not.)
        q_offset: where the queries start: query i is at position i + q_offset to mask and score (key j is at j). An
            int >= 0, or an integer tensor [B]. Decoding has q_offset = KV - Q. Beside `block_mask`, which has it
            built in, it moves the score only.
        sink_logits: of learned attention sinks, float [H], one for each query head: its exponential joins each row's
            sum of exponentials and adds nothing to its output (gpt-oss; Xiao et al., Efficient Streaming Language
            Models with Attention Sinks, 2024). Differentiable; -inf for a head without one. The lse has it too: for a
            row that sees nothing it is the logit. Not for jagged inputs: `varlen_attention` takes it.
        return_lse: also return the natural logarithm of each row's sum of exponentials, [B, H, Q], float32 (float64
            for float64), -inf for a row that sees nothing; differentiable.
        backend: "auto", or one by name, an error where it cannot: "fa4", "sdpa", "flash", "triton", "cpu", "reference".
        kernel_options: passed on to torch's flex_attention.
        **params: the parameters of the mask and the score given by name. Tensors and lists are inputs of the
            compiled kernel and change freely. Numbers are constants of it, each value a kernel of its own; where a
            parameter may also be a tensor, they become inputs after six values.

    Returns:
        The output, [B, H, Q, D] in q's dtype, or (output, lse). Under torch.autocast q, k and v are cast to its dtype
        first, as for torch's scaled_dot_product_attention. Jagged inputs give jagged outputs.

    Raises:
        ValueError, TypeError: on any input that does not fit, with what to pass.
        RuntimeError: a backend asked for by name failed to compile the call.

    Source: Dong et al., Flex Attention, 2024; Dao et al., FlashAttention, 2022.

    Example:
        >>> import torch, flexmasks
        >>> q, k, v = torch.randn(3, 2, 4, 100, 64)
        >>> flexmasks.attention(q, k, v, mask="grouped_tril", seq_lens=torch.tensor([100, 60])).shape
        torch.Size([2, 4, 100, 64])
    """
    with_lse = return_lse if sink_logits is None else True
    request = _Request(mask, score, params, scale, block_mask, q_offset, with_lse, backend, kernel_options)
    if sink_logits is not None:
        _check_sink(q, sink_logits)
    if not torch.compiler.is_compiling():
        out, lse = _eager(q, k, v, request)
    else:
        out, lse = (_inside_compile if mask is None else _outside)(q, k, v, request)
    if sink_logits is not None and lse is not None:
        out, lse = _with_sink(out, lse, sink_logits, return_lse)
    return (out, lse) if return_lse else out


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | Sequence[int],
    kv_offsets: Tensor | Sequence[int] | None = None,
    *,
    mask: MaskLike | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    scale: float | None = None,
    q_offset: int | Tensor = 0,
    sink_logits: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    kernel_options: dict[str, Any] | None = None,
    **params: Any,
) -> Any:
    """`attention` inside each of several sequences laid end to end, without a batch axis.

    The same as `attention` under `flexmasks.packed(mask, offsets, kv_offsets, q_offset)`, for those who hold q, k, v
    as FlashAttention's varlen functions take them. To mask and score the batch index is the number of the sequence,
    and positions start at 0 in each.

    Args:
        q: queries, [total, H, D].
        k, v: keys and values, [total of keys, Hkv, D].
        offsets: int[N + 1], where each of the N sequences starts and the last ends (cu_seqlens_q). Tokens past the
            end are padding: they give output 0.
        kv_offsets: the same for the keys (cu_seqlens_k), where these are packed otherwise.
        q_offset: where the queries of each sequence start, as in `attention`: an int >= 0, or an integer tensor [N].
            By default query 0 of a sequence is at its key 0. FlashAttention aligns the ends instead, which is
            `q_offset=kv_offsets.diff() - offsets.diff()`: the same where queries and keys are equally many.
        mask, score, scale, sink_logits, return_lse, backend, kernel_options, **params: as in `attention`.

    Returns:
        The output, [total, H, D], or (output, lse [H, total]).

    Raises:
        ValueError, TypeError: on any input that does not fit, with what to pass.

    Source: Dao et al., FlashAttention, 2022 (flash_attn_varlen_func).

    Example:
        >>> import torch, flexmasks
        >>> q, k, v = torch.randn(3, 100, 4, 64)
        >>> flexmasks.varlen_attention(q, k, v, [0, 30, 100], mask="sliding_window", window=16).shape
        torch.Size([100, 4, 64])
    """
    with_lse = return_lse if sink_logits is None else True
    request = _Request(mask, score, params, scale, None, q_offset, with_lse, backend, kernel_options)
    run = _outside_varlen if torch.compiler.is_compiling() else _eager_varlen
    out, lse = run(q, k, v, offsets, kv_offsets, request, sink_logits)
    return (out, lse) if return_lse else out


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor, with_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Each row's sum of exponentials is that of its lse; with the sink's the output is the smaller by their ratio."""
    logits = sink.to(lse.dtype)[:, None]
    least = lse.clamp(min=-1e30)  # a row that sees nothing has output 0; -inf less a sink of -inf would be NaN
    out = (out * torch.sigmoid(least - logits)[..., None]).to(out.dtype)
    return out, torch.where(lse == -math.inf, logits, torch.logaddexp(least, logits)) if with_lse else None


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    mask: MaskLike | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    sink_logits: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **params: Any,
) -> Any:
    """Attention to keys and values in a paged KV cache, as vLLM and FlashAttention hold one; nothing of it is copied.

    To mask and score, key j is the j-th of its own sequence, wherever it lies, as if the cache were contiguous.
    Decoding, prefill in chunks and prefill are the same call with one, some and all queries.

    A step that changes `page_table` or `kv_lens` plans its blocks anew, the other layers of the step find them. Blocks
    have 128 keys (on a CPU 32 or 64 where the cache is small), and each that holds a page of a sequence is computed
    for that sequence: pages of a multiple of 128 keys waste nothing; pages of 16 keys that lie apart from each other
    cost up to eight times as much. A gradient of the caches takes the memory of B of them.

    Args:
        q: queries, [B, H, Q, D], the last Q of each sequence unless `q_offset` says otherwise.
        k_cache, v_cache: [n_pages, page_size, Hkv, D], one pool for all; the pages of each must follow each other in
            memory. Unused slots may hold anything in k_cache, NaN too, but must be finite in v_cache.
        page_table: int[B, P], the page that holds keys p * page_size and following of batch element b (block_table).
            Only the first ceil(kv_lens[b] / page_size) of a row are read. Sequences may share pages.
        kv_lens: int[B], the keys of each sequence, from 0 to P * page_size (cache_seqlens, with those of this call).
            A sequence without keys gives output 0.
        mask: as in `attention`: a name, a Mask or a function; "causal" for a language model. By default each query
            sees all keys of its sequence.
        score: as in `attention`.
        q_offset: where the queries start in their sequences, an int >= 0 or an integer tensor [B]; kv_lens - Q by
            default.
        scale, sink_logits, return_lse, backend, **params: as in `attention`.

    Returns:
        The output, [B, H, Q, D] in q's dtype, or (output, lse).

    Raises:
        ValueError, TypeError: on any input that does not fit, with what to pass.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.

    Example:
        >>> import torch, flexmasks
        >>> q, (k_cache, v_cache) = torch.randn(2, 4, 1, 64), torch.randn(2, 8, 16, 2, 64)  # 8 pages of 16 keys
        >>> page_table, kv_lens = torch.tensor([[3, 0, 6], [5, -1, -1]]), torch.tensor([40, 7])
        >>> flexmasks.paged_attention(q, k_cache, v_cache, page_table, kv_lens, mask="causal").shape
        torch.Size([2, 4, 1, 64])
    """
    more = {"scale": scale, "sink_logits": sink_logits, "return_lse": return_lse, "backend": backend}
    run = _paged_outside if torch.compiler.is_compiling() else _paged
    return run(q, k_cache, v_cache, page_table, kv_lens, mask, score, params, q_offset, more)


def _paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    mask: Any,
    score: Any,
    params: Mapping[str, Any],
    q_offset: int | Tensor | None,
    more: dict[str, Any],
) -> Any:
    _check_cache(q, k_cache, v_cache, page_table, kv_lens)
    places = page_table, kv_lens, k_cache.shape[1]
    made, change = from_arguments(mask, score, params)
    k, v = (_pool(x, q.shape[0]) for x in (k_cache, v_cache))
    mask = paged(FULL if made is None else made, *places)
    score = None if change is None else paged(change, *places)
    offset = _last(kv_lens, q.shape[2]) if q_offset is None else q_offset
    return attention(q, k, v, mask=mask, score=score, q_offset=offset, **more)


_paged_outside = torch.compiler.disable(_paged, reason=_OUTSIDE)  # to a user's torch.compile a graph break
_OFFSETS: Cache[Tensor] = Cache("offsets", max_bytes=1 << 22)


def _last(kv_lens: Tensor, q_len: int) -> Tensor:
    """The offset of the last queries of each sequence: one tensor for the same lengths, so that calls are known."""
    found = _OFFSETS.get(q_len, [kv_lens])
    if found is None:
        short = (kv_lens > 0) & (kv_lens < q_len)  # sequences without keys are idle
        if bool(short.any()):
            b = int(short.nonzero()[0])
            _fail(
                f"the queries are the last ones of each sequence, but batch element {b} has kv_lens = "
                f"{int(kv_lens[b])} keys and q has {q_len} queries; pass `q_offset`, where the queries start.",
                call=_PAGED,
            )
        found = (kv_lens.long() - q_len).clamp(min=0)
        _OFFSETS.put(q_len, [kv_lens], found, ENTRY + found.nbytes)
    return found


def _pool(cache: Tensor, batch: int) -> Tensor:
    """All slots of a cache as the keys or values [B, Hkv, slots, D] of every batch element: a view."""
    if torch.is_autocast_enabled(cache.device.type):
        cache = _autocast(cache, torch.get_autocast_dtype(cache.device.type))
    return cache.flatten(0, 1).transpose(0, 1).expand(batch, -1, -1, -1)


def block_mask(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = 128,
    q_offset: int | Tensor = 0,
    **params: Any,
) -> BlockMask:
    """The BlockMask of a mask: which blocks of it are empty, partial and full, exactly.

    Equal to torch's create_block_mask, without its Q x KV work; usable in flex_attention too.

    Args:
        mask: a name, a Mask, or a function (b, h, q, kv) -> bool of index tensors.
        q_len, kv_len: numbers of queries and keys, above 0; kv_len is q_len by default.
        batch, heads: how far b and h range. The BlockMask's own batch and head sizes are 1 where the mask does not
            depend on them. By default batch is what the parameters' shapes say; a mask that depends on b or h in
            another way needs them.
        device: where the index tensors live; by default where the parameters' tensors are, else the CPU.
        block_size: an int above 0, or (queries, keys).
        q_offset: where the queries start, as in `attention`.
        **params: the mask's parameters.

    Raises:
        ValueError, TypeError: on any input that does not fit.

    Example:
        >>> import flexmasks
        >>> flexmasks.block_mask("causal", 512).full_kv_num_blocks[0, 0].tolist()
        [0, 1, 2, 3]
    """
    lengths = (q_len, kv_len, batch, heads, device, block_size, q_offset)
    return plan_mask("flexmasks.block_mask", mask, *lengths, params).block_mask()


def dense_mask(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | str | None = None,
    q_offset: int | Tensor = 0,
    **params: Any,
) -> Tensor:
    """The mask as booleans, True = visible: [batch or 1, heads or 1, q_len, kv_len].

    The batch and head dimensions are 1 where the mask does not depend on them. Arguments are those of `block_mask`.

    Example:
        >>> import flexmasks
        >>> flexmasks.dense_mask("sliding_window", 4, window=1)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    sizes = (q_len, kv_len, batch, heads, device, q_offset)
    made, size, open_extents = _mask_and_size("flexmasks.dense_mask", mask, *sizes, params)
    mod = shifted_mask(made.bind(made.resolve(sized(size, q_offset))), q_offset)
    check_open_extents(made, mod, size, open_extents)
    with explained(made):
        return materialize(mod, size.batch, size.heads, size.q_len, size.kv_len, size.device)


def explain(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Explanation:
    """Which backend `attention` takes for these arguments and why not the others, what it compiles, and what it skips.

    Takes attention's arguments, and fails as it does. Printed it is text, in Jupyter a table.

    Example:
        >>> import torch, flexmasks
        >>> q, k, v = torch.randn(3, 1, 2, 300, 64)
        >>> found = flexmasks.explain(q, k, v, mask="causal")
        >>> found.backend, found.compiles
        ('sdpa', 'no: it is there as it is')
    """
    if arguments.pop("sink_logits", None) is not None:
        arguments["return_lse"] = True
    own = {name: arguments.pop(name) for name in _Request._fields if name != "params" and name in arguments}
    request = _Request(params=arguments, **own)
    with _under_autocast(q, k, v) as (q, k, v):
        if _any_nested(q, k, v):
            q, k, v, request = _laid_end_to_end(q, k, v, request)
        call = _call(q, k, v, request)
        check(call, request.backend)
        able, reasons = choose(call)
        auto = request.backend == "auto"
        taken = able[0] if auto else BACKENDS[request.backend]
        why = f"it can, {taken.name} is faster here" if auto else f"it can, {taken.name} was asked for"
        others = {b.name: reasons.get(b.name, why) for b in BACKENDS.values() if b is not taken}
        return Explanation(taken.name, others, taken.compiles(call), taken.anew, call.blocks())


_CALLS: Cache[Again] = Cache("calls", max_bytes=5 << 28)  # their index tensors are mostly those of "blocks"


class _Request(NamedTuple):
    """The arguments of `attention` besides q, k and v."""

    mask: Any = None
    score: Any = None
    params: Mapping[str, Any] = MappingProxyType({})
    scale: float | None = None
    block_mask: BlockMask | None = None
    q_offset: int | Tensor = 0
    return_lse: bool = False
    backend: str = "auto"
    kernel_options: dict[str, Any] | None = None


def _eager(q: Tensor, k: Tensor, v: Tensor, request: _Request) -> tuple[Tensor, Tensor | None]:
    """The call as it is: one that was made before goes straight to its kernel."""
    found = _known(q, k, v, request)
    if found is None:
        ran, _ = _planned(q, k, v, request)
        return ran.out, ran.lse
    key, tensors = found
    again = _CALLS.get(key, tensors)
    if again is not None:
        try:
            return again(q, k, v)
        except Unavailable:
            pass
    ran, may_be_kept = _planned(q, k, v, request)
    if ran.again is not None and may_be_kept:
        _CALLS.put(key, tensors, ran.again, ENTRY + ran.again.nbytes)
    return ran.out, ran.lse


def _eager_varlen(
    q: Tensor, k: Tensor, v: Tensor, offsets: Any, kv_offsets: Any, request: _Request, sink: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    call = "flexmasks.varlen_attention"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 3:
            _fail(f"`{name}` must be a tensor [total, H, D], got {_kind(x)}.", call=call)
    starts = _offsets(call, "offsets", offsets, q.device)
    kv_starts = None if kv_offsets is None else _offsets(call, "kv_offsets", kv_offsets, q.device)
    if kv_starts is None and len(q) != len(k):
        _fail(f"q has {len(q)} tokens and k {len(k)}: pass `kv_offsets`, where the sequences of k start.", call=call)
    _check_offset(call, request.q_offset, len(starts) - 1, q.device)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if sink is not None:
        _check_sink(q, sink)
    out, lse = _eager(q, k, v, _inside_sequences(request, starts, kv_starts))
    if sink is not None and lse is not None:
        out, lse = _with_sink(out, lse, sink)
    return out[0].transpose(0, 1), None if lse is None else lse[0]


# to a user's torch.compile graph breaks
_outside = torch.compiler.disable(_eager, reason=_OUTSIDE)
_outside_varlen = torch.compiler.disable(_eager_varlen, reason=_OUTSIDE)


def _known(q: Tensor, k: Tensor, v: Tensor, request: _Request) -> tuple[Hashable, list[Tensor]] | None:
    """What decides all that a call does besides computing, and the tensors in it; None where it cannot be told."""
    mask, score, params, scale, block_mask, q_offset, with_lse, backend, options = request
    if not (type(q) is type(k) is type(v) is Tensor and type(backend) is str and type(with_lse) is bool):
        return None
    if not (block_mask is None is options) or q.is_nested or type(scale) not in (float, int, type(None)):
        return None
    device, grad = q.device, torch.is_grad_enabled()
    if transformed():
        return None
    if compat.autocast_anywhere() and torch.is_autocast_enabled(device.type):  # the first alone takes no time
        return None
    tensors: list[Tensor] = []
    functions = _plainly(mask, score, params, q_offset, tensors)
    if functions is None:
        tensors.clear()
        reader = Reader(tensors)
        read = functions_of("mask", mask), functions_of("score", score), params, q_offset
        try:
            functions = reader.finish(tuple(map(reader.key, read)))
        except Opaque:
            return None
    if grad and any(t.requires_grad for t in tensors):
        return None
    return (
        functions, scale, with_lse, backend, grad, torch.get_default_dtype(),
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, device, k.device, v.device,
        q.requires_grad, k.requires_grad, v.requires_grad,
    ), tensors  # fmt: skip


def _plainly(mask: Any, score: Any, params: Mapping[str, Any], q_offset: Any, tensors: list[Tensor]) -> Hashable | None:
    """What `capture` would find of own names and plain functions, with numbers and tensors, in a third of its time."""
    if type(mask) is Mask and mask.definition.own and not params:
        mask, params = mask.name, mask.params
    mask, score = _plain("mask", mask, tensors), _plain("score", score, tensors)
    if mask is None or score is None or type(q_offset) is not int:
        return None
    key: list[Hashable] = [mask, score, q_offset]
    for name, value in params.items():
        kind: Any = type(value)
        if kind is Tensor and not vars(value):
            tensors.append(value)
            key.append(name)
        elif kind is int or kind is bool:
            key += [name, kind, value]
        elif kind is float:
            key += [name, repr(value)]  # 0.0 and -0.0 are equal and differ
        else:
            return None
    return tuple(key)


def _plain(kind: str, value: Any, tensors: list[Tensor]) -> Hashable | None:
    if value is None:
        return "none"
    if type(value) is str:
        return value if is_own(kind, value) else None
    return capture_plainly(value, tensors) if type(value) is FunctionType else None


def _planned(q: Tensor, k: Tensor, v: Tensor, request: _Request) -> tuple[Ran, bool]:
    """The call from the start, and whether how it was done may be kept."""
    with _under_autocast(q, k, v) as (q, k, v):
        if not _any_nested(q, k, v):
            call = _call(q, k, v, request)
            return run(call, request.backend), call.kept
        out, lse, _ = run(_call(*_laid_end_to_end(q, k, v, request)), request.backend)
    nested, starts = torch.nested.nested_tensor_from_jagged, _ragged(q)[1]
    lse = None if lse is None else nested(lse[0], starts, jagged_dim=2)
    return Ran(nested(out[0], starts, jagged_dim=2), lse), False


def _any_nested(*tensors: Any) -> bool:
    return any(isinstance(x, Tensor) and x.is_nested for x in tensors)


@contextlib.contextmanager
def _under_autocast(q: Any, k: Any, v: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The tensors as torch.autocast casts them, and nothing else cast inside."""
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        yield q, k, v
        return
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        yield _autocast(q, dtype), _autocast(k, dtype), _autocast(v, dtype)


def _autocast(x: Any, dtype: torch.dtype) -> Any:
    """As torch casts for scaled_dot_product_attention: floats, but not float64."""
    casts = isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in (torch.float64, dtype)
    return x.to(dtype) if casts else x


def _checked(q: Tensor, k: Tensor, v: Tensor, request: _Request) -> Size:
    """Check all but mask and score, which are checked when they are planned."""
    if not isinstance(request.backend, str) or (request.backend != "auto" and request.backend not in BACKENDS):
        _fail(f"`backend` must be 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {request.backend!r}.")
    if request.kernel_options is not None and not isinstance(request.kernel_options, dict):
        _fail(f"`kernel_options` must be a dict, got {request.kernel_options!r}.", TypeError)
    if not isinstance(request.return_lse, bool):
        _fail(f"`return_lse` must be True or False, got {request.return_lse!r}.", TypeError)
    if request.block_mask is not None and request.mask is not None:
        _fail("pass `mask` or `block_mask`, not both.", TypeError)
    _check_tensors(q, k, v)
    _check_scale(request.scale)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    approximate = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    size = Size(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device, dtype=dtype, approximate=approximate)
    _check_offset(_CALL, request.q_offset, size.batch, size.device)
    if request.block_mask is not None:
        _check_block_mask(request.block_mask, size)
    return size


def _call(q: Tensor, k: Tensor, v: Tensor, request: _Request) -> Call:
    """Check everything, and plan mask and score."""
    size = _checked(q, k, v, request)
    made, change = from_arguments(request.mask, request.score, request.params)
    plan: MaskPlan | GivenPlan
    aliases = Aliases()
    if request.block_mask is not None:
        plan = GivenPlan(request.block_mask)
    else:
        blocks = block_size_for(size)
        plan = MaskPlan(FULL if made is None else made, size, request.q_offset, True, blocks, aliases=aliases)
    changed = None if change is None else ScorePlan(change, size, request.q_offset, aliases=aliases)
    plans = [plan] if changed is None else [plan, changed]
    offset = request.q_offset if isinstance(request.q_offset, int) else None
    tensors = [t for p in plans for t in p.tensors]
    enabled = torch.is_grad_enabled()
    learned = enabled and any(t.requires_grad for t in tensors)
    return Call(
        q=q,
        k=k,
        v=v,
        dense=lambda: plan.dense,
        cap=None if change is None else soft_cap(change, size),
        blocks=plan.blocks,
        share=plan.share,
        proven_options=functools.partial(plan.kernel_options, changed is not None),
        score_mod=None if changed is None else changed.score_mod,
        scale=None if request.scale is None else float(request.scale),
        with_lse=request.return_lse,
        options=request.kernel_options,
        key=(plan.kernel_key, None if changed is None else changed.kernel_key),
        form=None if any(p.opaque for p in plans) else (offset, *(p.shapes for p in plans)),
        needs_grad=learned or (enabled and any(x.requires_grad for x in (q, k, v))),
        learned=learned,
        number_tensors=any(p.has_numbers for p in plans),
        kept=all(p.kept for p in plans),
    )


def _inside_compile(q: Tensor, k: Tensor, v: Tensor, request: _Request) -> tuple[Tensor, Tensor | None]:
    """The call as traced by a user's own torch.compile: flex_attention itself, for torch to compile."""
    size = _checked(q, k, v, request)
    _, change = from_arguments(None, request.score, request.params)
    made, backend = request.block_mask, request.backend
    grad = torch.is_grad_enabled()
    needs_grad = grad and (q.requires_grad or k.requires_grad or v.requires_grad)
    needs_grad = needs_grad or (grad and change is not None and change.learns())
    if made is None:
        if change is None and not request.return_lse and backend in ("auto", "sdpa"):
            grouped = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, scale=request.scale, enable_gqa=grouped), None
        _fail("inside torch.compile scores, lse and named backends need a `block_mask`, as flexmasks.block_mask makes.")
    on_cpu = not q.is_cuda
    if backend in (("sdpa", "triton", "flash") if on_cpu else ("sdpa", "cpu")) or (
        backend == "flash" and request.return_lse
    ):
        _fail(f"backend {backend!r} cannot run this call inside torch.compile; leave the choice to torch: 'auto'.")
    score_mod = None
    if change is not None:
        score_mod = shifted_score(change.bind(change.resolve(size)), request.q_offset)
    on_reference = on_cpu and (needs_grad or request.return_lse or q.dtype == torch.float64)
    if backend == "reference" or (backend == "auto" and on_reference):
        return reference.attend(q, k, v, score_mod, made, request.scale)
    if not needs_grad:
        q, k, v = q.detach(), k.detach(), v.detach()
    options = kernels.options(q, k, "FLASH" if backend == "flash" else None, request.kernel_options)
    out, lse = kernels.flex(q, k, v, score_mod, made, request.scale, options, request.return_lse)
    return (kernels.separate(out) if on_cpu else out), lse


def _laid_end_to_end(q: Tensor, k: Tensor, v: Tensor, request: _Request) -> tuple[Tensor, Tensor, Tensor, _Request]:
    """Jagged nested tensors as dense ones, [1, H, total, D], under `packed` mask and score."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        is_jagged = isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged
        if not is_jagged or x.dim() != 4 or isinstance(x.shape[2], int):
            _fail(
                f"with nested tensors, q, k and v must all be jagged [B, H, jagged, D]; `{name}` is "
                f"{_kind(x)}. From [B, jagged, H, D] it is `.transpose(1, 2)`.",
            )
        if cast(Any, x).lengths() is not None:
            _fail(f"`{name}` is a jagged nested tensor with holes; make it contiguous.")
    starts, kv_starts, v_starts = (_ragged(x)[1] for x in (q, k, v))
    if kv_starts is not v_starts and not torch.equal(kv_starts, v_starts):
        _fail("the sequences of k and v have different lengths.")
    if q.shape[0] != k.shape[0]:
        _fail(f"q has {q.shape[0]} sequences, k has {k.shape[0]}.")
    if request.block_mask is not None:
        _fail("jagged nested tensors take `mask`, not `block_mask`.", TypeError)
    _check_offset(_CALL, request.q_offset, q.shape[0], q.device)
    q_dense, k_dense, v_dense = (_ragged(x)[0].unsqueeze(0) for x in (q, k, v))
    return q_dense, k_dense, v_dense, _inside_sequences(request, starts, None if kv_starts is starts else kv_starts)


def _inside_sequences(request: _Request, starts: Tensor, kv_starts: Tensor | None) -> _Request:
    """The request for sequences laid end to end, of one for each sequence."""
    made, change = from_arguments(request.mask, request.score, request.params)
    places = starts, kv_starts, request.q_offset
    made = packed(FULL if made is None else made, *places)
    change = None if change is None else packed(change, *places)
    return request._replace(mask=made, score=change, params={}, q_offset=0)


def _ragged(x: Any) -> tuple[Tensor, Tensor]:
    """The values [H, total, D] of a jagged nested tensor, and its offsets."""
    return x.values(), x.offsets()


# --- checks ---


def _fail(message: str, kind: type[Exception] = ValueError, call: str = _CALL) -> NoReturn:
    raise kind(f"{call}: {message}")


def _kind(x: Any) -> str:
    if not isinstance(x, Tensor):
        return f"{type(x).__name__}"
    return f"{describe(x)} on {x.device}" if not x.is_nested else f"a nested tensor of {x.layout}, {x.dim()} dimensions"


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    def fail(message: str, kind: type[Exception] = ValueError) -> NoReturn:
        _fail(f"{message}; got q {_kind(q)}, k {_kind(k)}, v {_kind(v)}.", kind)

    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            fail(f"`{name}` must be a tensor [B, H, S, D]", TypeError)
        if x.layout != torch.strided:
            fail(f"`{name}` must be a dense tensor, it is {x.layout}")
        if x.ndim != 4:
            fail(f"`{name}` must have 4 dimensions, [B, H, S, D]")
        if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
            fail(f"`{name}` must be float16, bfloat16, float32 or float64", TypeError)
        if 0 in x.shape:
            fail(f"`{name}` is empty; every dimension must be at least 1")
    if not q.dtype == k.dtype == v.dtype:
        fail("q, k and v must have one dtype", TypeError)
    if not q.device == k.device == v.device:
        fail("q, k and v must be on one device")
    if q.device.type == "meta":
        fail("q, k and v have no data")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        fail("q, k and v must have one batch size")
    if not q.shape[3] == k.shape[3] == v.shape[3]:
        fail("q, k and v must have one head size D")
    if k.shape[1] != v.shape[1]:
        fail("k and v must have as many heads as each other")
    if k.shape[2] != v.shape[2]:
        fail("k and v must have the same length")
    if q.shape[1] % k.shape[1]:
        fail("the number of query heads must be a multiple of the number of key heads")


def _check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, kv_lens: Tensor) -> None:
    def fail(message: str, kind: type[Exception] = ValueError) -> NoReturn:
        _fail(f"{message}; got q {_kind(q)}, k_cache {_kind(k_cache)}, v_cache {_kind(v_cache)}.", kind, _PAGED)

    caches = (("k_cache", k_cache), ("v_cache", v_cache))
    for name, x, dims in (("q", q, "[B, H, Q, D]"), *((n, x, "[n_pages, page_size, Hkv, D]") for n, x in caches)):
        if not isinstance(x, Tensor):
            fail(f"`{name}` must be a tensor {dims}", TypeError)
        if x.layout != torch.strided or x.is_nested or x.ndim != 4:
            fail(f"`{name}` must be a dense tensor of 4 dimensions, {dims}")
        if 0 in x.shape:
            fail(f"`{name}` is empty; every dimension must be at least 1")
    if k_cache.shape != v_cache.shape:
        fail("k_cache and v_cache must have one shape")
    if not q.dtype == k_cache.dtype == v_cache.dtype and not torch.is_autocast_enabled(q.device.type):
        fail("q, k_cache and v_cache must have one dtype", TypeError)
    if not q.device == k_cache.device == v_cache.device:
        fail("q, k_cache and v_cache must be on one device")
    if q.shape[3] != k_cache.shape[3]:
        fail("q, k_cache and v_cache must have one head size D")
    if q.shape[1] % k_cache.shape[2]:
        fail("the number of query heads must be a multiple of the number of key heads")
    for name, x in caches:
        apart = len(x) > 1 and x.shape[1] > 1 and x.stride(0) != x.shape[1] * x.stride(1)
        if apart or x.stride(3) != 1:
            _fail(
                f"the pages of `{name}` must follow each other in memory, and D be its last dimension there, to be "
                f"taken as they are; its strides are {x.stride()}. Hold k_cache and v_cache as tensors of their own, "
                "or as one [2, n_pages, page_size, Hkv, D].",
                call=_PAGED,
            )
    for name, t, dims in (
        ("page_table", page_table, "[B, P]"),
        ("kv_lens", kv_lens, "[B]"),
    ):
        fits = isinstance(t, Tensor) and t.dtype in _INTS and t.ndim == dims.count(",") + 1 and len(t) == len(q)
        if not fits or t.device != q.device:
            _fail(
                f"`{name}` must be an integer tensor {dims} with B = {len(q)} on {q.device}, got {_kind(t)}.",
                ValueError if isinstance(t, Tensor) else TypeError,
                _PAGED,
            )


def _check_scale(scale: Any) -> None:
    if scale is None:
        return
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not -_LARGEST <= scale <= _LARGEST:
        _fail(f"`scale` must be a finite number, or None for 1 / sqrt(D), got {scale!r}.", TypeError)


def _check_sink(q: Tensor, sink: Any) -> None:
    if _any_nested(q):
        _fail("jagged nested tensors take no `sink_logits`.")
    heads = q.shape[1] if isinstance(q, Tensor) and q.ndim == 4 else "H"
    is_tensor = isinstance(sink, Tensor) and sink.dtype.is_floating_point
    if not is_tensor or sink.shape != (heads,) or sink.device != q.device:
        _fail(
            f"`sink_logits` must be a floating tensor [H] = [{heads}] on the device of q, got {_kind(sink)}.", TypeError
        )


def _check_offset(call: str, offset: Any, batch: int, device: torch.device) -> None:
    wanted = f"`q_offset` must be an int from 0 to 2**31 - 1 or an integer tensor [B] = [{batch}] on {device}"
    if isinstance(offset, Tensor):
        if offset.dtype not in _INTS or offset.shape != (batch,) or offset.device != device:
            _fail(f"{wanted}, got {_kind(offset)}.", call=call)
    elif isinstance(offset, bool) or not isinstance(offset, int):
        _fail(f"{wanted}, got {offset!r}.", TypeError, call)
    elif not 0 <= offset < 2**31:
        _fail(f"{wanted}, got {offset}.", call=call)


def _offsets(call: str, name: str, given: Any, device: torch.device) -> Tensor:
    """Offsets as a tensor; what they hold is checked where they are used."""
    try:
        made = given if isinstance(given, Tensor) else torch.tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError):
        made = None
    if made is None or made.dtype not in _INTS or made.ndim != 1 or len(made) < 2 or made.device != device:
        got = _kind(given) if isinstance(given, Tensor) else repr(given)
        _fail(
            f"`{name}` must be int[N + 1] on {device}, where N sequences start and the last ends, got {got}.", call=call
        )
    return made


def _check_block_mask(block_mask: Any, size: Size) -> None:
    if not isinstance(block_mask, BlockMask):
        _fail(f"`block_mask` must be a BlockMask, got {type(block_mask).__name__}; masks go to `mask`.", TypeError)
    made = (*block_mask.kv_num_blocks.shape[:2], *block_mask.seq_lengths)
    if made[0] not in (1, size.batch) or made[1] not in (1, size.heads) or made[2:] != (size.q_len, size.kv_len):
        _fail(
            f"`block_mask` was made for (batch, heads, queries, keys) = {made}, the call has "
            f"{(size.batch, size.heads, size.q_len, size.kv_len)}; make it with flexmasks.block_mask(mask, "
            f"{size.q_len}, {size.kv_len}, batch={size.batch}, heads={size.heads})."
        )
    columns = -(-size.kv_len // block_mask.BLOCK_SIZE[1])
    if block_mask.kv_indices.shape[-1] != columns:
        _fail(
            f"`block_mask` must list all {columns} key blocks in each row, the first ones of them in use; its "
            f"kv_indices are {list(block_mask.kv_indices.shape)}."
        )
    if block_mask.kv_num_blocks.device != size.device:
        _fail(f"`block_mask` is on {block_mask.kv_num_blocks.device}, q on {size.device}; use `.to({size.device!s})`.")


def plan_mask(
    call: str,
    mask: Any,
    q_len: Any,
    kv_len: Any,
    batch: Any,
    heads: Any,
    device: Any,
    block_size: Any,
    q_offset: Any,
    params: dict[str, Any],
) -> MaskPlan:
    """What `block_mask` and `Mask.blocks` do with their arguments."""
    sizes = tuple(block_size) if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        _fail(f"`block_size` must be an int above 0 or a pair, got {block_size!r}.", call=call)
    made, size, open_extents = _mask_and_size(call, mask, q_len, kv_len, batch, heads, device, q_offset, params)
    return MaskPlan(made, size, q_offset, block_size=sizes, open_extents=open_extents)


def _mask_and_size(
    call: str,
    mask: Any,
    q_len: Any,
    kv_len: Any,
    batch: Any,
    heads: Any,
    device: Any,
    q_offset: Any,
    params: dict[str, Any],
) -> tuple[Mask, Size, tuple[str, ...]]:
    """The mask, the sizes, and which of "batch" and "heads" nobody gave."""
    kv_len = q_len if kv_len is None else kv_len
    for what, n in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch), ("heads", heads)):
        if not (n is None and what in ("batch", "heads")) and (type(n) is not int or n < 1):
            _fail(f"`{what}` must be an int of at least 1, got {n!r}.", call=call)
    made = get_mask(mask, **params)
    if device is None:
        device = next((t.device for t in [*made.tensors(), q_offset] if isinstance(t, Tensor)), torch.device("cpu"))
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        _fail(f"`device` must be a torch device, got {device!r} ({error}).", call=call)
    if device.type == "meta" or (device.type == "cuda" and not torch.cuda.is_available()):
        _fail(f"`device` must be one that is here and holds data, got {device}.", call=call)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    implied = made.batch_size() or (len(q_offset) if isinstance(q_offset, Tensor) and q_offset.ndim else None)
    size = Size(batch or implied or 1, heads or 1, q_len, kv_len, device)
    _check_offset(call, q_offset, size.batch, size.device)
    return made, size, tuple(n for n, given in (("batch", batch or implied), ("heads", heads)) if given is None)
