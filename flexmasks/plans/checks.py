"""Checks of the arguments of a call, before torch sees them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.blocks.lists import are_narrow, grid
from flexmasks.spec.parameters import Size, can_be_read, describe, in_message, is_dense, is_of_vmap, not_dense
from flexmasks.spec.values import Modifier

ATTENTION, VARLEN, PAGED = "flexmasks.attention", "flexmasks.varlen_attention", "flexmasks.paged_attention"
_MAX_SCALE = torch.finfo(torch.float32).max
INT_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


def fail(message: str, kind: type[Exception] = ValueError, call: str = ATTENTION) -> NoReturn:
    raise kind(f"{call}: {message}")


def described(x: Any) -> str:
    """Return a tensor's dtype, shape and device as text, or the type of anything else."""
    if not isinstance(x, Tensor):
        return f"{type(x).__name__}"
    return describe(x) if x.is_nested else f"{describe(x)} on {x.device}"


def any_nested(*tensors: Any) -> bool:
    for x in tensors:  # noqa: SIM110 # each call asks it, and a generator takes three times as long
        if isinstance(x, Tensor) and x.is_nested:
            return True
    return False


_LAYOUT = "; tensors [B, S, H, D] need layout='bshd'"


def check_qkv(q: Any, k: Any, v: Any) -> None:
    """Check q against k and v. q is [B, H, Q, D], k [B, Hkv, KV, D] and v [B, Hkv, KV, Dv]."""

    def wrong(message: str, kind: type[Exception] = ValueError) -> NoReturn:
        fail(f"{message}; got q {described(q)}, k {described(k)}, v {described(v)}.", kind)

    dims = "[B, H, S, D]"
    _check_strided(wrong, q=(q, dims), k=(k, dims), v=(v, dims))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.dtype.is_floating_point or (x is q and x.dtype.itemsize < 2):
            more = "" if x is q else ", or float8 for both k and v"
            wrong(f"`{name}` must be float16, bfloat16, float32 or float64{more}", TypeError)
    if k.dtype != v.dtype:
        wrong("k and v must have one dtype", TypeError)
    if k.dtype != q.dtype and k.dtype.itemsize >= q.dtype.itemsize:
        wrong("k and v must have the dtype of q, or as a cache one of fewer bits", TypeError)
    if not q.device == k.device == v.device:
        wrong("q, k and v must be on one device")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        wrong("q, k and v must have one batch size, or k and v batch size 1")
    if q.shape[3] != k.shape[3]:
        wrong("q and k must have one head size D")
    if k.shape[1] != v.shape[1]:
        wrong("k and v must have the same number of heads" + _LAYOUT)
    if k.shape[2] != v.shape[2]:
        wrong("k and v must have the same length")
    _check_groups(wrong, q.shape[1], k.shape[1])


def check_cache(
    call: str, q: Any, k_cache: Any, v_cache: Any, page_table: Any, kv_lens: Any, batch: int | None = None
) -> None:
    """Check q against a paged KV cache.

    The caches are [n_pages, page_size, Hkv, D] and [n_pages, page_size, Hkv, Dv], page_table is [B, P] and kv_lens [B].
    Without `batch`, the number of sequences, q is [B, H, Q, D], else [total, H, D].
    """
    dims_of_q = "[B, H, Q, D]" if batch is None else "[total, H, D]"

    def wrong(message: str, kind: type[Exception] = ValueError) -> NoReturn:
        got = f"q {described(q)}, k_cache {described(k_cache)}, v_cache {described(v_cache)}"
        fail(f"{message}; got {got}.", kind, call)

    dims = "[n_pages, page_size, Hkv, D]"
    _check_strided(wrong, q=(q, dims_of_q), k_cache=(k_cache, dims), v_cache=(v_cache, dims))
    if k_cache.shape[:3] != v_cache.shape[:3]:
        wrong("k_cache and v_cache must have one shape but for the head size")
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        wrong("q, k_cache and v_cache must have one dtype", TypeError)
    if not q.device == k_cache.device == v_cache.device:
        wrong("q, k_cache and v_cache must be on one device")
    if q.shape[-1] != k_cache.shape[3]:
        wrong("q and k_cache must have one head size D")
    of_q = "q [B, Q, H, D] needs layout='bshd', " if batch is None else ""
    advice = f"; {of_q}pages [n_pages, Hkv, page_size, D] need .transpose(1, 2)"
    _check_groups(wrong, q.shape[1], k_cache.shape[2], advice)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        has_gaps = len(x) > 1 and x.shape[1] > 1 and x.stride(0) != x.shape[1] * x.stride(1)
        if has_gaps or x.stride(3) != 1:
            fail(
                f"the pages of `{name}` must follow each other in memory, and D must be its last dimension there; its "
                f"strides are {x.stride()}. Hold k_cache and v_cache as tensors of their own, or as one tensor "
                "[2, n_pages, page_size, Hkv, D].",
                call=call,
            )
    batch = len(q) if batch is None else batch
    for name, t, dims in (("page_table", page_table, "[B, P]"), ("kv_lens", kv_lens, "[B]")):
        fits = isinstance(t, Tensor) and is_dense(t) and t.dtype in INT_DTYPES and t.ndim == dims.count(",") + 1
        if not fits or len(t) != batch or t.device != q.device:
            fail(
                f"`{name}` must be an integer tensor {dims} with B = {batch} on {q.device}, got {described(t)}.",
                ValueError if isinstance(t, Tensor) else TypeError,
                call,
            )


def _check_strided(wrong: Callable[..., NoReturn], **tensors: tuple[Any, str]) -> None:
    """Check that tensors are dense and not empty; `tensors` has each by name, with its dimensions as text."""
    for name, (x, dims) in tensors.items():
        if not isinstance(x, Tensor):
            wrong(f"`{name}` must be a tensor {dims}", TypeError)
        if x.layout != torch.strided or x.is_nested:
            wrong(f"`{name}` must be a dense tensor")
        if x.ndim != dims.count(",") + 1:
            hint = " (flexmasks.varlen_attention takes [total, H, D])" if dims == "[B, H, S, D]" and x.ndim == 3 else ""
            wrong(f"`{name}` must have {dims.count(',') + 1} dimensions, {dims}{hint}")
        sizes = x.shape if "n_pages" in dims else (x.shape[1], x.shape[-1])
        if 0 in sizes:
            wrong(f"`{name}` is empty; the heads, the head size and the pages must be at least 1")


def _check_groups(wrong: Callable[..., NoReturn], heads: int, kv_heads: int, advice: str = _LAYOUT) -> None:
    if heads % kv_heads:
        wrong("the number of query heads must be a multiple of the number of key heads" + advice)


def check_scale(scale: Any) -> None:
    if scale is None:
        return
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not -_MAX_SCALE <= scale <= _MAX_SCALE:
        hint = "; multiply q by a tensor instead" if isinstance(scale, Tensor) else ""
        fail(f"`scale` must be a finite number, or None for 1 / sqrt(D), got {in_message(scale)}{hint}.", TypeError)


def check_sinks(q: Any, sink_logits: Any) -> None:
    if any_nested(q):
        fail(
            "jagged nested tensors take no `sink_logits`; flexmasks.varlen_attention does, of q, k and v end to end: "
            "x.transpose(1, 2).values(), with offsets=x.offsets()."
        )
    heads = q.shape[1] if isinstance(q, Tensor) and q.ndim == 4 else "H"
    is_floating = isinstance(sink_logits, Tensor) and is_dense(sink_logits) and sink_logits.dtype.is_floating_point
    if not is_floating or sink_logits.shape != (heads,) or sink_logits.device != q.device:
        got = described(sink_logits)
        fail(f"`sink_logits` must be a floating tensor [H] = [{heads}] on the device of q, got {got}.", TypeError)


def check_offset(call: str, q_offset: Any, batch: int, device: torch.device) -> None:
    def wrong(got: str, kind: type[Exception] = ValueError) -> NoReturn:
        # torch.compile compiles for each batch size alone if the size is formatted, so only an error does that.
        wanted = f"an int from 0 to 2**31 - 1 or an integer tensor [B] = [{batch}] on {device}"
        fail(f"`q_offset` must be {wanted}, got {got}.", kind, call)

    if isinstance(q_offset, Tensor):
        fits = is_dense(q_offset) and q_offset.dtype in INT_DTYPES and q_offset.shape == (batch,)
        if not fits or q_offset.device != device:
            wrong(described(q_offset))
    elif isinstance(q_offset, torch.SymInt):  # of a shape in an export, whose lengths a comparison would limit
        return
    elif isinstance(q_offset, bool) or not isinstance(q_offset, int):
        wrong(in_message(q_offset), TypeError)
    elif not 0 <= q_offset < 2**31:
        wrong(str(q_offset))


def check_dense(value: Modifier, tensors: Sequence[Tensor]) -> None:
    """Check that the tensors of a mask or score are dense."""
    for t in tensors:
        if not is_dense(t):
            fail(f"{_name_in(value, t)} must be a dense tensor, got {not_dense(t)}.", call="flexmasks")


def check_unbatched(value: Modifier, tensors: Sequence[Tensor], q_offset: Any) -> None:
    """Check that torch.vmap hides no dimension of a mask's tensors, nor of `q_offset`: blocks are those of one call."""
    of_mask = tensors if value._kind == "mask" else []
    for t in [*of_mask, q_offset]:
        if isinstance(t, Tensor) and is_of_vmap(t):
            refuse_vmap("flexmasks", "`q_offset`" if t is q_offset else _name_in(value, t))


def refuse_vmap(call: str, name: str) -> NoReturn:
    fail(
        f"{name} has a dimension that torch.vmap hides, and the blocks of a mask are computed for one call; make that "
        "dimension part of the batch of q, k and v, and of the tensors of the mask, without vmap.",
        call=call,
    )


def _name_in(value: Modifier, tensor: Tensor) -> str:
    named = (name for name, t in value._named_tensors() if t is tensor)
    return next(named, f"a tensor that the {value._kind} {value._definition.name!r} reads")


def check_varlen(**tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or not is_dense(x) or x.ndim != 3:
            fail(f"`{name}` must be a tensor [total, H, D], got {described(x)}.", call=VARLEN)


def sequence_offsets(name: str, given: Any, device: torch.device) -> Tensor:
    """Offsets of sequences as an integer tensor [N + 1], whose values are checked when they are planned."""
    try:
        offsets = given if isinstance(given, Tensor) else torch.tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError):
        offsets = None
    fits = offsets is not None and is_dense(offsets) and offsets.dtype in INT_DTYPES and offsets.ndim == 1
    if offsets is None or not fits or len(offsets) < 2 or offsets.device != device:
        got = described(given) if isinstance(given, Tensor) else in_message(given)
        fail(
            f"`{name}` must be int[N + 1] on {device}, the starts of N sequences and the end of the last, got {got}.",
            call=VARLEN,
        )
    return offsets


def check_mixed(offsets: Tensor, total: int, kv_lens: Tensor | None, q_offset: Tensor, room: int) -> None:
    """Check the values of offsets of queries, and of where they start.

    total: the number of queries.
    kv_lens: the numbers of keys that the queries are the last ones of, or None if they start where `q_offset` says.
    q_offset: the position of the first query of each sequence.
    room: the number of keys that a sequence may have.
    """
    counts = offsets.diff()
    first, last, least = torch.stack([offsets[0], offsets[-1], counts.min()]).tolist()
    if first != 0 or last > total or least < 0:
        fail(f"`offsets` must rise from 0 to at most the length {total}, got {offsets.tolist()[:8]}.", call=VARLEN)
    if kv_lens is not None:
        check_are_last(VARLEN, kv_lens, counts)
        return
    is_past = (q_offset > 0) & (q_offset + counts > room)
    if bool(is_past.any()):
        s = int(is_past.nonzero()[0])
        fail(
            f"`q_offset` must be 0 or at most the keys that the pages have room for minus the queries, but sequence "
            f"{s} starts at {int(q_offset[s])} with {int(counts[s])} queries, and its pages have room for {room} keys.",
            call=VARLEN,
        )


def check_are_last(call: str, kv_lens: Tensor, counts: int | Tensor) -> None:
    """Check that queries, `counts` of each sequence, may be its last ones. One without keys is idle, and has any."""
    is_short = (kv_lens > 0) & (kv_lens < counts)
    if bool(is_short.any()):
        s = int(is_short.nonzero()[0])
        count = counts if isinstance(counts, int) else int(counts[s])
        fail(
            f"the queries are the last ones of each sequence, but sequence {s} has kv_lens = {int(kv_lens[s])} keys "
            f"and {count} queries; pass `q_offset`, where the queries start.",
            call=call,
        )


def check_block_mask(block_mask: Any, size: Size) -> None:
    if not isinstance(block_mask, compat.BlockMask):
        got = f"{type(block_mask).__name__}; flexmasks.attention takes masks as `mask`"
        fail(f"`block_mask` must be a BlockMask, got {got}.", TypeError)
    if block_mask.kv_indices.ndim != 4:
        shape = list(block_mask.kv_indices.shape)
        fail(f"`block_mask` must have lists [B, H, rows, columns], got {shape}; index a BlockMask with slices.")
    made_for = (*block_mask.kv_num_blocks.shape[:2], *block_mask.seq_lengths)
    fits = made_for[0] in (1, size.batch) and made_for[1] in (1, size.heads)
    if not fits or made_for[2:] != (size.q_len, size.kv_len):
        fail(
            f"`block_mask` was made for (batch, heads, queries, keys) = {made_for}, the call has "
            f"{(size.batch, size.heads, size.q_len, size.kv_len)}; make it with flexmasks.block_mask(mask, "
            f"{size.q_len}, {size.kv_len}, batch={size.batch}, heads={size.heads})."
        )
    _, columns = grid((size.q_len, size.kv_len), block_mask.BLOCK_SIZE)
    has_too_few = are_narrow(block_mask) and not compat.TAKES_NARROW_LISTS
    if has_too_few or block_mask.kv_indices.shape[-1] > columns:
        fail(
            f"`block_mask` must list all {columns} key blocks in each row, the blocks in use first; its kv_indices "
            f"are {list(block_mask.kv_indices.shape)}. From torch 2.14 on, lists may be shorter."
        )
    if block_mask.kv_num_blocks.device != size.device:
        here = block_mask.kv_num_blocks.device
        advice = "make it again, it has no data" if here.type == "meta" else f"use `.to({str(size.device)!r})`"
        fail(f"`block_mask` is on {here}, q on {size.device}; {advice}.")


ARRAYS = (list, tuple, np.ndarray)
_SCORE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HIDDEN_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SCORE_DTYPES)
_SYMBOLIC_NUMBERS = (torch.SymFloat, torch.SymInt)
_MAX_SCALE_OF_SOFTMAX = torch.finfo(torch.float32).max / math.log2(math.e)  # kernels compute exp as a power of two


def check_scores(call: str, x: Any, scale: Any, dtype: Any = None, ndim: int = 1) -> None:
    """Check the scores, of at least `ndim` dimensions, and the scale of a softmax."""
    _check_tensor(call, "x", x, _SCORE_DTYPES, "must be a tensor of float16, bfloat16, float32 or float64")
    if dtype is not None and dtype not in _SCORE_DTYPES:
        raise TypeError(f"{call}: `dtype` must be torch.float16, .bfloat16, .float32 or .float64, got {dtype!r}.")
    _check_scale_of_softmax(call, scale)
    if x.ndim < ndim:
        least = "one dimension" if ndim == 1 else "two dimensions, [..., Q, K]"
        raise ValueError(f"{call}: `x` must have at least {least}, got {describe(x)}.")


def check_visible(call: str, x: Tensor, mask: Any) -> None:
    """Check that a mask is None, or booleans, True = visible, that broadcast to x."""
    if mask is not None:
        expected = "must be a name, a Mask, a function, or a boolean tensor, True = visible"
        _check_mask(call, x, mask, (torch.bool,), expected)


def check_hidden(call: str, x: Tensor, mask: Any) -> None:
    """Check that a mask is a tensor, True = hidden, that broadcasts to x."""
    expected = "must be a tensor of booleans or numbers, in which True or any number but 0 hides"
    _check_mask(call, x, mask, _HIDDEN_DTYPES, expected)


def _check_scale_of_softmax(call: str, scale: Any) -> None:
    if isinstance(scale, _SYMBOLIC_NUMBERS):  # computed from a shape that is being traced
        return
    is_number = type(scale) is float or (isinstance(scale, numbers.Real) and not isinstance(scale, bool))
    if not is_number:
        is_tensor = isinstance(scale, (Tensor, np.ndarray))
        got = f"{type(scale).__name__}; multiply `x` by it instead" if is_tensor else repr(scale)
        raise TypeError(f"{call}: `scale` must be a number, got {got}.")
    if not -_MAX_SCALE_OF_SOFTMAX <= scale <= _MAX_SCALE_OF_SOFTMAX:
        raise ValueError(f"{call}: `scale` must be finite, at most {_MAX_SCALE_OF_SOFTMAX:.3g}, got {scale!r}.")


def _check_mask(call: str, x: Tensor, mask: Any, dtypes: tuple[torch.dtype, ...], expected: str) -> None:
    _check_tensor(call, "mask", mask, dtypes, expected)
    if mask.device != x.device:
        advice = "make it again, it has no data" if mask.is_meta else f"use mask.to({str(x.device)!r})"
        raise ValueError(f"{call}: `mask` is on {mask.device}, `x` on {x.device}; {advice}.")
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    fits: Callable[[int, int], bool] = (lambda m, n: m in (1, n)) if can_be_read(x) else _broadcasts
    if mask.ndim > x.ndim or not all(fits(m, n) for m, n in sizes):
        hint = "; a mask [batch, queries, keys] is mask[:, None]" if mask.ndim == x.ndim - 1 == 3 else ""
        raise ValueError(
            f"{call}: `mask` must broadcast to x's shape {list(x.shape)}: each size, from the last, that of x or 1; "
            f"got {describe(mask)}{hint}."
        )


def _broadcasts(m: int, n: int) -> bool:
    """Whether a mask's size m is 1 or n. Those that only a run of the graph knows count as equal; the run checks it."""
    if compat.guard_or_false(m == 1) or compat.guard_or_false(m == n):
        return True
    if not compat.guard_or_true(m == n):
        return False
    compat.require(m == n, lambda: "flexmasks: a mask's sizes must be those of x, or 1")
    return True


def _check_tensor(call: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], expected: str) -> None:
    if not isinstance(value, Tensor):
        hint = "; use torch.as_tensor" if isinstance(value, ARRAYS) else ""
        if name == "mask" and (isinstance(value, str) or callable(value)):
            hint = "; names, Masks and functions go to flexmasks.masked_softmax(x, mask=..., scale=...)"
        if isinstance(value, list | tuple) and any(isinstance(v, str) or callable(v) for v in value):
            hint = "; make one mask of several by `&`, as in flexmasks.get_mask('causal') & m"
        raise TypeError(f"{call}: `{name}` {expected}, got {type(value).__name__}{hint}.")
    if value.is_nested or value.layout != torch.strided:
        kind = "a nested one" if value.is_nested else f"one of layout {value.layout}"
        raise TypeError(f"{call}: `{name}` must be a dense tensor, got {kind}.")
    if value.dtype not in dtypes:
        is_added = name == "mask" and value.is_floating_point()
        hint = "; add it to `x` if it is added to scores, or pass its booleans" if is_added else ""
        raise TypeError(f"{call}: `{name}` {expected}, got {describe(value)}{hint}.")
