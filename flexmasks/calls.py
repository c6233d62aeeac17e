"""The road of a call, from the arguments of `attention` to a backend.

A call that was made before, with the same functions, parameters, shapes and tensors, is replayed from a cache. Any
other call is checked and planned, and its backend is chosen. Calls under autocast, with jagged nested tensors, varlen
layouts, paged caches or attention sinks are first turned into plain calls. A call inside a user's own torch.compile
goes to `flexmasks.inside_compile`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends import decode, fa4
from flexmasks.backends.call import OUTCOMES, Call, Refused, Replay, Result, Unavailable, first_line
from flexmasks.backends.empty import attend as attend_nothing
from flexmasks.backends.empty import computes_nothing
from flexmasks.backends.reference import frozen_functions
from flexmasks.backends.renewal import Renewal, renewal_of
from flexmasks.backends.table import BACKENDS, check, choose
from flexmasks.backends.table import run as run_on_backend
from flexmasks.blocks.lists import widened
from flexmasks.cache import ENTRY, Cache
from flexmasks.canvas import Tiles, tiles_for
from flexmasks.errors import passing_error
from flexmasks.kernels.sinks import with_sinks
from flexmasks.masks.packed import packed
from flexmasks.masks.paged import paged
from flexmasks.plans.bounds import unread
from flexmasks.plans.checks import (
    ATTENTION,
    PAGED,
    VARLEN,
    any_nested,
    autocasts,
    check_are_last,
    check_cache,
    check_mixed,
    check_offset,
    check_sinks,
    check_varlen,
    described,
    fail,
    sequence_offsets,
)
from flexmasks.plans.explanation import Explanation
from flexmasks.plans.gathered import parts_of
from flexmasks.plans.held import HeldPlan, Launch, unwrapped
from flexmasks.plans.mixed import Mixed, Sequences, by_number_of_queries, in_pieces
from flexmasks.plans.plan import GivenPlan, MaskPlan, ScorePlan, block_size_for, is_captured
from flexmasks.plans.recorded import Form
from flexmasks.plans.shifted import offset_of_last, offsets_of
from flexmasks.request import Request, checked
from flexmasks.spec.arguments import from_arguments, functions_of, get_mask
from flexmasks.spec.bands import Band, band_of, cap_of
from flexmasks.spec.definitions import is_own
from flexmasks.spec.parameters import Size, can_be_read
from flexmasks.spec.rows import rows_of
from flexmasks.spec.structure import Aliases, Opaque, flatten, plain_key, tensors_of, with_tensors
from flexmasks.spec.values import Mask, Score

_log = logging.getLogger("flexmasks")
_Run = TypeVar("_Run", bound=Callable[..., Any])
_REPLAYS: Cache[Replay] = Cache("calls", max_bytes=5 << 28)  # replays share most index tensors with the cache "blocks"
_RENEWALS: Cache[Renewal] = Cache("renewals", max_bytes=1 << 24)
_SCALES = float, int, type(None)
# On a CPU new tensors are planned from the start, which checks their values: reading them costs nothing there.
_RENEWED_ON = ("cuda",)
_OF_PAGES = 2  # the tensors of every call with pages: lengths and page table
_CUT_ON = ("cpu",)  # mixed batches are cut by their numbers of queries, which the host reads
_GATHERS_ON = ("cpu",)
_FA4_ON = ("cuda",)
_OFFSETS: Cache[Tensor] = Cache("offsets", max_bytes=1 << 22)
_LAYOUTS: Cache[Any] = Cache("layouts", max_bytes=1 << 26)  # of mixed batches, and of pages that are copied


def unseen(run: _Run) -> _Run:
    """Decorate a call that selective activation checkpointing is not to look into.

    The checkpointing keeps results of single operations, which kernels overwrite, and counts operations, of which plans
    make some at their first call only. What is inside is computed again, but for torch's own attention.
    """

    @functools.wraps(run)
    def call(*args: Any) -> Any:
        if not compat.is_compiling() and compat.in_selective_checkpointing():
            with compat.unseen_by_checkpointing():
                return run(*args)
        return run(*args)

    return cast(_Run, call)


# --- entry points of the public calls ---


def run(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call of `attention`."""
    if request.sink_logits is not None:
        check_sinks(q, request.sink_logits)
    if torch.jit.is_tracing():  # type: ignore[attr-defined] # public, and not listed
        fail(
            "torch.jit.trace cannot hold it, because values choose what is computed; use torch.export.export or "
            "torch.compile, and for ONNX torch.onnx.export with dynamo=True.",
            RuntimeError,
        )
    if not compat.is_compiling():
        return run_eagerly(q, k, v, request)
    request = unwrapped(q, k, request)
    found = tiles_for(q, k, v, request)
    if found is not None:
        return _run_in_tiles(q, k, v, *found)
    from flexmasks import inside_compile  # loads torch's compilers

    with under_autocast(q, k, v) as (q, k, v):
        if not any_nested(q, k, v):
            sinks, request = _sinks_of(request)
            return _with_sinks(inside_compile.run(q, k, v, request), sinks)
        result = inside_compile.run(*_laid_end_to_end(q, k, v, request))
        return _as_nested(q, result.out, result.lse)


def _run_in_tiles(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, own: Request) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call that takes its tokens into tiles.

    own: the request there.
    """
    out, lse = run(tiles.put(q, 2), tiles.put(k, 2), tiles.put(v, 2), own)
    return tiles.back(out, 2), None if lse is None else tiles.back(lse, 2)


def run_varlen(
    q: Tensor, k: Tensor, v: Tensor, offsets: Any, kv_offsets: Any, page_table: Any, kv_lens: Any, request: Request
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call of `varlen_attention`.

    A q_offset of None means the first key of each sequence, or, with a page table, that the queries are the last ones.
    """
    if page_table is not None or kv_lens is not None:
        return _run_mixed(q, k, v, offsets, kv_offsets, page_table, kv_lens, request)
    request = request._replace(q_offset=0) if request.q_offset is None else request
    check_varlen(q=q, k=k, v=v)
    starts = sequence_offsets("offsets", offsets, q.device)
    kv_starts = None if kv_offsets is None else sequence_offsets("kv_offsets", kv_offsets, q.device)
    if kv_starts is None and len(q) != len(k):
        fail(f"q has {len(q)} tokens and k {len(k)}: pass `kv_offsets`, where the sequences of k start.", call=VARLEN)
    check_offset(VARLEN, request.q_offset, len(starts) - 1, q.device)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = run(q, k, v, _inside_sequences(request, starts, kv_starts))
    return out[0].transpose(0, 1), None if lse is None else lse[0]


@unseen
def run_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, kv_lens: Tensor, request: Request
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call of `paged_attention`.

    A q_offset of None means that the queries are the last ones of each sequence.
    """
    if request.sink_logits is not None:
        check_sinks(q, request.sink_logits)
        sinks, request = _sinks_of(request)
        without = request._replace(sink_logits=None)
        return _with_sinks(Result(*run_paged(q, k_cache, v_cache, page_table, kv_lens, without)), sinks)
    known, replay = _known_pages(q, k_cache, v_cache, page_table, kv_lens, request)
    result = None if known is None or replay is None else _replayed(replay, q, k_cache, v_cache)
    if result is not None:
        return result
    if known is not None and replay is not None:
        _drop(*known)
    check_cache(PAGED, q, k_cache, v_cache, page_table, kv_lens)
    return _run_pages(q, k_cache, v_cache, page_table, kv_lens, _with_values(request), known)


def _known_pages(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, kv_lens: Any, request: Request
) -> tuple[tuple[Hashable, list[Tensor]] | None, Replay | None]:
    """Return key and tensors of a decoding call with pages, and its replay.

    The last two tensors are kv_lens and the page table. Both results are None for what a call does not have.
    """
    if compat.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined] # public, and not listed
        return None, None
    if not type(q) is type(page_table) is type(kv_lens) is Tensor or vars(page_table) or vars(kv_lens):
        return None, None
    known = None if is_captured(q.device) else _key_and_tensors(q, k_cache, v_cache, request)
    if known is None:
        return None, None
    known = ("pages", known[0]), [*known[1], kv_lens, page_table]
    return known, _known_replay(*known, q.device)


def _with_values(request: Request) -> Request:
    """Return the request with a Mask, and a Score or None."""
    mask, score = from_arguments(request.mask, request.score, request.params)
    return request._replace(mask=get_mask("full") if mask is None else mask, score=score, params={})


def _run_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    request: Request,
    known: tuple[Hashable, list[Tensor]] | None,
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a checked call with pages.

    A q_offset of None means that the queries are the last ones of each sequence.

    known: the call's key and tensors, if a replay may be kept.
    """
    if _may_read_pages(q, k_cache, v_cache, page_table.shape[1] * k_cache.shape[1], request):
        replay, result = _run_in_pages(q, k_cache, v_cache, page_table, kv_lens, request)
        if result is not None:
            if known is not None and replay is not None:
                _keep(*known, *replay)
            return result
    return _run_without_pages(q, k_cache, v_cache, page_table, kv_lens, request)


def _run_without_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, kv_lens: Tensor, request: Request
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a checked call whose kernel reads no pages."""
    if request.q_offset is None:
        request = request._replace(q_offset=_kept_offset_of_last(kv_lens, q.shape[2]))
    if _may_gather_pages(q, k_cache, v_cache):
        return _run_gathered(q, k_cache, v_cache, page_table, kv_lens, request)
    page_size = k_cache.shape[1]
    mask = paged(request.mask, page_table, kv_lens, page_size)
    score = None if request.score is None else paged(request.score, page_table, kv_lens, page_size)
    k, v = (_slots(x, q.shape[0]) for x in (k_cache, v_cache))
    return run(q, k, v, request._replace(mask=mask, score=score))


def _may_gather_pages(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether the pages of each sequence are copied to a place of their own.

    There, blocks have keys of one sequence. Gradients of such copies would take more memory than the copies.
    """
    tensors = q, k_cache, v_cache
    if q.device.type not in _GATHERS_ON or compat.is_compiling() or not all(type(x) is Tensor for x in tensors):
        return False
    return not (
        _learns(tensors) or computes_nothing(*tensors) or compat.transforms_active() or compat.in_dispatch_mode()
    )


def _run_gathered(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, kv_lens: Tensor, request: Request
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call whose pages are copied.

    Copies of a few sequences at a time bound the memory.
    """
    starts = cast(int | Tensor, request.q_offset)
    given = [page_table, kv_lens, *([starts] if isinstance(starts, Tensor) else [])]
    larger = max(k_cache, v_cache, key=lambda cache: cache.shape[3])
    key = "gathered", q.shape[2], larger.shape, larger.dtype, starts if isinstance(starts, int) else "tensor"
    parts = _LAYOUTS.get(key, given)
    if parts is None:
        _check_pages(q, k_cache, page_table, kv_lens)
        parts = parts_of(page_table, kv_lens, starts, q.shape[2], larger)
        _LAYOUTS.put(key, given, parts, ENTRY + sum(part.nbytes for part in parts))
    if len(parts) == 1:
        own = request._replace(mask=request.mask & get_mask("padding", seq_lens=kv_lens))
        return run(q, parts[0].gathered(k_cache), parts[0].gathered(v_cache), own)
    results = []
    for part in parts:
        own = _of_rows(request, part.sequences, part.firsts, part.lasts)
        own = own._replace(mask=own.mask & get_mask("padding", seq_lens=part.kv_lens), q_offset=part.q_offset)
        results.append(run(q[part.batch], part.gathered(k_cache), part.gathered(v_cache), own))
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses) if request.return_lse else None


def _of_rows(request: Request, sequences: Tensor, firsts: Tensor, lasts: Tensor) -> Request:
    """Return the request of a batch of rows, given a request for whole sequences."""
    mask = rows_of(request.mask, sequences, firsts, lasts)
    score = None if request.score is None else rows_of(request.score, sequences, firsts, lasts)
    return request._replace(mask=mask, score=score)


def _check_pages(q: Tensor, k_cache: Tensor, page_table: Tensor, kv_lens: Tensor) -> None:
    """Check the values of a page table and of lengths."""
    n_pages, page_size = k_cache.shape[:2]
    pages = paged(get_mask("full"), page_table, kv_lens, page_size)
    pages.resolve(Size(len(q), q.shape[1], q.shape[2], n_pages * page_size, q.device))


@unseen
def _run_mixed(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    offsets: Any,
    kv_offsets: Any,
    page_table: Tensor,
    kv_lens: Tensor,
    request: Request,
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call of `varlen_attention` with pages."""
    if kv_offsets is not None:
        fail("pass `kv_offsets`, or `page_table` and `kv_lens`, not both.", TypeError, VARLEN)
    if page_table is None or kv_lens is None:
        missing = "page_table" if page_table is None else "kv_lens"
        fail(f"a paged cache needs both `page_table` and `kv_lens`; `{missing}` is missing.", TypeError, VARLEN)
    check_varlen(q=q)
    starts = sequence_offsets("offsets", offsets, q.device)
    check_cache(VARLEN, q, k_cache, v_cache, page_table, kv_lens, len(starts) - 1)
    if request.q_offset is not None:
        check_offset(VARLEN, request.q_offset, len(kv_lens), q.device)
    request = _with_values(request)
    if request.sink_logits is not None:
        check_sinks(q[None].transpose(1, 2), request.sink_logits)
    inner = request._replace(sink_logits=None, return_lse=request.return_lse or request.sink_logits is not None)
    mixed = _mixed(q, starts, page_table, kv_lens, request.q_offset, page_table.shape[1] * k_cache.shape[1])
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    if compat.is_compiling() and q.is_cuda:  # torch's kernel for few queries fails where tensors of masks are computed
        inner = inner._replace(kernel_options={"FORCE_USE_FLEX_ATTENTION": True})
    for rows in mixed.batches:
        own = _of_rows(inner, rows.sequences, mixed.firsts, mixed.lasts)
        own = own._replace(q_offset=rows.q_offset, ends_among_keys=False)  # rows have queries that count for nothing
        own_q = q.index_select(0, rows.tokens.flatten()).view(*rows.tokens.shape, *q.shape[1:]).transpose(1, 2)
        given = own_q, k_cache, v_cache, rows.page_table, rows.kv_lens, own
        known, replay = _known_pages(*given)
        again = None if known is None or replay is None else _replayed(replay, own_q, k_cache, v_cache)
        if known is not None and replay is not None and again is None:
            _drop(*known)
        own_out, own_lse = _run_pages(*given, known) if again is None else again
        outs.append(own_out.transpose(1, 2).flatten(0, 1))
        if own_lse is not None:
            lses.append(own_lse.transpose(0, 1).flatten(1))
    if not outs:  # no sequence has queries, and the result keeps its dtype and its place in an autograd graph
        with under_autocast(q, k_cache[:0], v_cache[:0]) as (own_q, own_k, own_v):
            own_out, own_lse = attend_nothing(own_q.transpose(0, 1)[None], own_k, own_v, _learned_by(inner.score))
        outs.append(own_out[0].transpose(0, 1))
        lses.append(own_lse[0])
    # The last place is that of queries of no sequence.
    outs.append(outs[0].new_zeros(1, q.shape[1], v_cache.shape[3]))
    out = torch.cat(outs).index_select(0, mixed.places)
    if not inner.return_lse:
        return out, None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lses.append(q.new_full((q.shape[1], 1), -math.inf, dtype=dtype))
    lse = torch.cat(lses, 1).index_select(1, mixed.places)
    if request.sink_logits is None:
        return out, lse
    out, lse_with_sinks = with_sinks(out.transpose(0, 1), lse, request.sink_logits, request.return_lse)
    return out.transpose(0, 1), lse_with_sinks


def _run_in_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    request: Request,
) -> tuple[tuple[Replay, _Planned] | None, tuple[Tensor, Tensor | None] | None]:
    """Run a checked call by a kernel that reads each sequence's own pages only.

    Returns the replay with its plans, and output and lse. Both are None if no such kernel can run it, and the replay is
    None if the kernel failed and another backend ran the call. See `_run_pages`.
    """
    page_size = k_cache.shape[1]
    length = page_table.shape[1] * page_size
    # Planning reads sizes of k and v only: these have the sizes of the keys of each sequence by themselves.
    k, v = (x.as_strided((len(q), x.shape[2], length, x.shape[3]), (0, 0, 0, 1)) for x in (k_cache, v_cache))
    are_last = request.q_offset is None
    own = request._replace(mask=request.mask & get_mask("padding", seq_lens=kv_lens))
    try:
        planned = _planned_at_end(q, k, v, own, kv_lens) if are_last else _planned(q, k, v, own)
    except (ValueError, TypeError):
        if not is_captured(q.device):  # errors of the table and the lengths name the arguments of the call
            _check_pages(q, k_cache, page_table, kv_lens)
        raise
    call, name = planned.call, request.backend
    kind = "pages", call.kind
    band = None
    if are_last and isinstance(planned.mask, MaskPlan) and name != "decode":
        band = band_of(cast(Mask, request.mask), unread(planned.mask.size, kv_lens))
    is_for_fa4 = fa4.refuses_pages(call, band) is None and OUTCOMES.get(kind) is None
    decode_kind = "pages of decode", call.kind
    is_for_decode = name != "fa4" and decode.refuses(call) is None and OUTCOMES.get(decode_kind) is None
    if not (is_for_fa4 or is_for_decode):
        return None, None
    if not is_captured(q.device):  # the values of the table are checked
        _check_pages(q, k_cache, page_table, kv_lens)
    replay: Replay
    if is_for_fa4:
        replay = fa4.PagedCall.of(call, cast(Band, band), kv_lens, page_table, k_cache, v_cache)
        try:
            return (replay, planned), replay(q, k_cache, v_cache)
        except Unavailable as error:
            OUTCOMES.put(kind, (), f"it failed before: {error}", 1)
            _log.warning("FlashAttention 4 reads no pages and is left out for such calls: %s", error)
    if not is_for_decode:
        return None, None
    try:
        replay = decode.replay_of(call, page_table, page_size, are_last)
        return (replay, planned), replay(q, k_cache, v_cache)
    except Exception as error:  # kernels raise errors of any type
        if name != "auto" or passing_error(error) is not None:
            raise
        result = _run_without_pages(q, k_cache, v_cache, page_table, kv_lens, request)  # raises if the call is wrong
        why = first_line(error)
        OUTCOMES.put(decode_kind, (), f"it failed before: {why}", 1)
        _log.warning("backend 'decode' reads no pages and is left out for such calls: %s", why)
        return None, result


def _planned_at_end(q: Tensor, k: Tensor, v: Tensor, request: Request, kv_lens: Tensor) -> _Planned:
    """Plan a call whose queries are the last ones of each sequence.

    Where they start is computed only for kernels that do not find the last queries themselves. In the plans of the
    other kernels, which read no offset, the lengths stand in its place.
    """
    if decode.has_own_kernels(q.device):
        planned = _planned(q, k, v, request._replace(q_offset=kv_lens, ends_among_keys=False))
        if decode.finds_last_queries(planned.call):
            return planned
    where_last = _kept_offset_of_last(kv_lens, q.shape[2])
    return _planned(q, k, v, request._replace(q_offset=where_last))._replace(where_last=where_last)


def _may_read_pages(q: Tensor, k_cache: Tensor, v_cache: Tensor, length: int, request: Request) -> bool:
    """Return whether a kernel that reads pages may run a call, before it is planned."""
    device = q.device.type
    if request.backend not in ("auto", "decode", "fa4") or device not in ("cpu", "cuda") or compat.is_compiling():
        return False
    if not all(type(x) is Tensor for x in (q, k_cache, v_cache)) or not (q.numel() and k_cache.numel() and length):
        return False
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined] # public, and not listed
    if _learns((q, k_cache, v_cache)) or is_traced or autocasts(device):
        return False
    return (request.q_offset is None and device in _FA4_ON and fa4.is_installed()) or decode.are_few(
        q.shape[2], length, q.device
    )


def explain(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Explanation:
    """Explain how a call of `attention` would run."""
    request = unwrapped(q, k, request)
    if request.sink_logits is not None:
        check_sinks(q, request.sink_logits)
        request = request._replace(sink_logits=None, return_lse=True)
    with under_autocast(q, k, v) as (q, k, v):
        if any_nested(q, k, v):
            q, k, v, request = _laid_end_to_end(q, k, v, request)
        if computes_nothing(q, k, v):
            fail("`explain` needs q, k and v with data, on a real device, and at least one query and key.")
        found = tiles_for(q, k, v, request)
        if found is not None:
            q, k, v, request = *(found[0].put(x, 2) for x in (q, k, v)), found[1]
        planned = _planned(q, k, v, request)
        call = planned.call
        check(call, request.backend)
        able, reasons = choose(call)
        is_auto = request.backend == "auto"
        chosen = able[0] if is_auto else BACKENDS[request.backend]
        able_too = f"it can run the call, but {chosen.name} {'is faster here' if is_auto else 'was asked for'}"
        others = {b.name: reasons.get(b.name, able_too) for b in BACKENDS.values() if b is not chosen}
        compiles, blocks = chosen.compiles(call), chosen.blocks(call)
        mask = planned.mask.resized(blocks.block_mask.BLOCK_SIZE) or planned.mask
        plan = chosen.plan(call) or mask.explained()
        if found is not None:
            plan = f"{plan}; the call takes its tokens into {found[0]}, and its output back into rows"
        as_data = chosen.why_data(call)
        form = f"data: {as_data}" if as_data else "its function"
        return Explanation(chosen.name, others, compiles, chosen.recompiles_on, plan, form, blocks)


# --- a call that was made before ---


@unseen
def run_eagerly(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Run a call outside torch.compile."""
    out, lse = _run_eagerly(q, k, v, request)
    if out.requires_grad and compat.saves_by_hooks():
        # Activation checkpointing reads the tensors of mask and score again, and checks no versions.
        request = unwrapped(q, k, request)
        mask, score = from_arguments(request.mask, request.score, request.params)
        mask_mod = mask if request.block_mask is None else request.block_mask.mask_mod
        *_, check = frozen_functions(mask_mod, score, q, request.q_offset)
        out, lse = _Watched.apply(check, out, lse)
    return out, lse


class _Watched(torch.autograd.Function):
    """Results of a call whose backward pass first checks what the forward pass read."""

    @staticmethod
    def forward(ctx: Any, check: Callable[[], None], *results: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.check = check
        ctx.set_materialize_grads(False)
        return tuple(None if x is None else x.view_as(x) for x in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.check()
        return None, *gradients


def _run_eagerly(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Run a call outside torch.compile.

    A call that was made before goes straight to its kernel.
    """
    if isinstance(request.mask, HeldPlan):
        return _run_plan(q, k, v, request.mask, request)
    if compat.transforms_active():
        request = _with_plain_tensors(request)
    sinks, inner = _sinks_of(request)
    known = _key_and_tensors(q, k, v, inner)
    if known is not None and not (known[1] and is_captured(q.device)):  # a captured call plans again at each replay
        replay = _known_replay(*known, q.device)
        again = None if replay is None else _replayed(replay, q, k, v, sinks)
        if again is not None:
            return again
        if replay is not None:
            _drop(*known)
    found = tiles_for(q, k, v, request)
    if found is not None:
        return _run_in_tiles(q, k, v, *found)
    result, planned = _run_first_time(q, k, v, inner)
    if known is not None and result.replay is not None and planned is not None and not is_captured(q.device):
        _keep(*known, result.replay, planned)
    return _with_sinks(result, sinks)


def _run_plan(q: Tensor, k: Tensor, v: Tensor, held: HeldPlan, request: Request) -> tuple[Tensor, Tensor | None]:
    """Run a call of a plan that the user holds. It finds what its earlier calls made ready without a search."""
    plain = not held.is_own or request.score is not None or request.params or type(request.q_offset) is not int
    if plain or request.q_offset or compat.transforms_active():
        return _run_eagerly(q, k, v, unwrapped(q, k, request))
    sinks, inner = _sinks_of(request)
    key = _key_of_sizes(q, k, v, inner)
    launch = None if key is None else held.launch(key)
    captured = bool(held.tensors) and is_captured(q.device)
    if key is not None and launch is not None:
        launch.is_captured |= captured
        again = _replayed(launch.replay, q, k, v, sinks)
        if again is not None:
            return again
        held.launches.pop(key, None)
    request, inner = unwrapped(q, k, request), unwrapped(q, k, inner)
    found = tiles_for(q, k, v, request)
    if found is not None:
        return _run_in_tiles(q, k, v, *found)
    result, planned = _run_first_time(q, k, v, inner)
    may_keep = planned is not None and planned.call.holds_aliases and not captured
    if key is not None and result.replay is not None and planned is not None and may_keep:
        held.keep(key, Launch(result.replay, _forms_in_place(result.replay, planned)))
    return _with_sinks(result, sinks)


def _forms_in_place(replay: Replay, planned: _Planned) -> Any:
    """Return the forms of a call that can be written again, see `Launch`."""
    if isinstance(planned.mask, GivenPlan):
        return None
    if not any(plan.inputs for plan in (planned.mask, planned.score) if plan is not None):
        return []  # nothing changes
    if replay.reads is None:
        return None
    forms = []
    try:
        for name in replay.reads:
            plan = planned.score if name in ("added", "functions") else planned.mask
            if plan is not None:
                forms.append((plan, name, replay.block_size, plan.form(name, replay.block_size)))
    except Opaque:
        return None
    return forms


def _with_plain_tensors(request: Request) -> Request:
    """Return a request without the wrappers of torch.func.grad around tensors that have no gradients.

    These are whole numbers, and all that a mask holds. Nobody can read the memory of a wrapped tensor.
    """
    others = request.score, dict(request.params), request.q_offset
    if any(map(compat.is_wrapped, tensors_of((request.mask, others)))):
        with contextlib.suppress(Opaque):
            mask = with_tensors(request.mask, _without_wrappers)
            score, params, offset = with_tensors(others, lambda t: t if _may_learn(t) else _without_wrappers(t))
            return request._replace(mask=mask, score=score, params=params, q_offset=offset)
    return request


def _may_learn(tensor: Tensor) -> bool:
    """Return whether a tensor's dtype has gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def _without_wrappers(tensor: Tensor) -> Tensor:
    """Return a tensor without the wrappers of gradients. One that belongs to a batch of vmap stays as it is."""
    plain = tensor
    while compat.is_wrapped(plain):
        if compat.is_batched(plain):
            return tensor
        plain = compat.unwrapped(plain)
    return plain


def _replayed(
    replay: Replay, q: Tensor, k: Tensor, v: Tensor, sinks: _Sinks | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """Return output and lse of a replay, or None if it failed.

    A call whose replay failed is planned again. Errors that say nothing about it are raised.
    """
    try:
        if sinks is None:
            return replay(q, k, v)
        if isinstance(replay, fa4.DirectCall) and fa4.folds_sinks(q, k, v, sinks.logits):
            return _with_sinks(Result(*replay(q, k, v, sinks.logits), has_sinks=True), sinks)
        return _with_sinks(Result(*replay(q, k, v)), sinks)
    except Exception as error:  # kernels raise errors of any type
        if isinstance(error, Refused) or passing_error(error) is not None:
            raise
        return None


def _drop(key: Hashable, tensors: list[Tensor]) -> None:
    """Forget a call."""
    _REPLAYS.drop(key, tensors)
    _RENEWALS.drop((key, *_layouts(tensors)))


def _keep(key: Hashable, tensors: list[Tensor], replay: Replay, planned: _Planned) -> None:
    """Keep a call's replay, for the same tensors, and its renewal, for others."""
    if not planned.call.holds_aliases:
        return
    _REPLAYS.put(key, tensors, replay, ENTRY + replay.nbytes + planned.aliases.nbytes)
    if not tensors:
        return
    renewal = renewal_of(replay, lambda: _forms_of(replay, planned, tensors), planned.aliases, tensors)
    if renewal is not None:
        _RENEWALS.put((key, *_layouts(tensors)), (), renewal, ENTRY)


def _forms_of(replay: Replay, planned: _Planned, tensors: list[Tensor]) -> list[Form] | None:
    """Return what a call reads, or None if that is not known."""
    if replay.reads is None or isinstance(planned.mask, GivenPlan):
        return None
    forms = []
    if planned.where_last is not None:
        q_len = planned.mask.size.q_len
        forms.append(Form([planned.where_last], [tensors[-2]], lambda lens: [offset_of_last(lens[0], q_len)]))
    for name in replay.reads:
        if name == "pages" and len(tensors) > _OF_PAGES:
            return None  # the others decided what the mask is
        if name in ("pages", "table"):
            pages = tensors[-_OF_PAGES:] if name == "pages" else tensors[-1:]
            forms.append(Form(replay.taken()[0][-len(pages) :], pages, list))
        else:
            plan = planned.score if name in ("added", "functions") else planned.mask
            if plan is not None:
                forms.append(plan.form(name, replay.block_size))
    return forms


def plan_again(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Replay | None:
    """Do all that a call does before its kernel runs.

    The result is None if no call of its kind was made before.
    """
    known = _key_and_tensors(q, k, v, request)
    return None if known is None else _known_replay(*known, q.device)


def _known_replay(key: Hashable, tensors: list[Tensor], device: torch.device) -> Replay | None:
    """Return the replay of a call with these tensors.

    It is renewed from a call with other tensors of their kind, if there is one.
    """
    replay = _REPLAYS.get(key, tensors)
    if replay is None and tensors and device.type in _RENEWED_ON:
        renewal = _RENEWALS.get((key, *_layouts(tensors)))
        if renewal is not None:
            replay = renewal(tensors)
            copied = sum(t.nbytes for t in tensors if not t.is_contiguous())
            _REPLAYS.put(key, tensors, replay, ENTRY + replay.nbytes + copied)
    return replay


def _layouts(tensors: list[Tensor]) -> list[Hashable]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


def _key_and_tensors(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Hashable, list[Tensor]] | None:
    """Return the cache key of a call and the tensors it reads.

    The result is None if the call cannot be cached.
    """
    of_sizes = _key_of_sizes(q, k, v, request)
    if of_sizes is None:
        return None
    tensors: list[Tensor] = []
    functions = _simple_key(request, tensors)
    if functions is None:
        parts = functions_of("mask", request.mask), functions_of("score", request.score)
        structure, leaves = flatten((*parts, request.params, request.q_offset))
        if structure.unreadable:
            return None
        functions, tensors = structure.key, leaves.tensors
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    return (functions, of_sizes), tensors


def _key_of_sizes(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Hashable | None:
    """Return the cache key of a call without its mask and score, or None if the call cannot be cached.

    It has all on which the choice of a backend depends, so that no call takes the kernel of another one.
    """
    scale, with_lse, backend = request.scale, request.return_lse, request.backend
    if not (type(q) is type(k) is type(v) is Tensor and type(backend) is str and type(with_lse) is bool):
        return None
    if request.block_mask is not None or request.kernel_options is not None or q.is_nested:
        return None
    if type(scale) not in _SCALES or compat.in_forward_derivative() or compat.in_vmap():
        return None
    device, grad = q.device, torch.is_grad_enabled()
    if autocasts(device.type):
        return None
    return (
        scale, with_lse, request.sink_logits is not None, backend, grad, torch.get_default_dtype(),
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        device, k.device, v.device, q.requires_grad, k.requires_grad, v.requires_grad,
        compat.transforms_active(), compat.sdp_settings(),
    )  # fmt: skip


def _simple_key(request: Request, tensors: list[Tensor]) -> Hashable | None:
    """Return the key of a call with common arguments only, else None.

    Common arguments are masks and scores of the library and plain functions, with numbers and tensors. This function
    takes a third of the time of `flatten`, which reads everything.
    """
    offset: Any = request.q_offset
    key: list[Hashable] = [offset]
    for kind, value in (("mask", request.mask), ("score", request.score)):
        if value is None:
            key.append(None)
        elif type(value) is str and is_own(kind, value):
            key.append(value)
        elif type(value) is (Mask if kind == "mask" else Score) and value.own_key is not None:
            own_key, own_tensors = value.own_key
            key += [kind, own_key]
            tensors += own_tensors
        else:
            captured = plain_key(value, tensors) if type(value) is FunctionType else None
            if captured is None:
                return None
            key.append(captured)
    if type(offset) is Tensor and not vars(offset):
        tensors.append(offset)
        key[0] = "tensor"
    elif type(offset) is not int and offset is not None:
        return None
    key.append("params")
    return tuple(key) if _add_parameters(key, request.params, tensors) else None


def _add_parameters(key: list[Hashable], params: Mapping[str, Any], tensors: list[Tensor]) -> bool:
    """Add parameters to a key, and their tensors to the tensors.

    Returns whether all are numbers and plain tensors.
    """
    for name, value in params.items():
        kind: Any = type(value)
        if kind is Tensor and not vars(value):
            tensors.append(value)
            key.append(name)
        elif kind is int or kind is bool:
            key += [name, kind, value]
        elif kind is float:
            key += [name, repr(value)]  # 0.0 and -0.0 are equal, and differ in what they do
        else:
            return False
    return True


# --- a call from the start: checks, plans, backend ---


class _Planned(NamedTuple):
    """A call, and the plans that it was made from."""

    call: Call
    mask: MaskPlan | GivenPlan
    score: ScorePlan | None
    aliases: Aliases
    where_last: Tensor | None = None  # where the last queries of each sequence start, if the plans read it


def _run_first_time(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Result, _Planned | None]:
    """Check, plan and run a call.

    Returns the result, and the plans if the replay may be cached.
    """
    with under_autocast(q, k, v) as (q, k, v):
        if not any_nested(q, k, v):
            return _run_dense(q, k, v, request)
        result, _ = _run_dense(*_laid_end_to_end(q, k, v, request))
    return Result(*_as_nested(q, result.out, result.lse)), None


def _run_dense(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Result, _Planned | None]:
    if computes_nothing(q, k, v):
        return Result(*_run_nothing(q, k, v, request)), None
    planned = _planned(q, k, v, request)
    return run_on_backend(planned.call, request.backend), planned


def _run_nothing(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return the result of a call that computes nothing.

    Its mask and score are checked, but for the values of tensors.
    """
    if compat.in_tracing_mode() and any(isinstance(x, compat.FakeTensor) for x in (q, k, v)):
        fail(
            "make_fx cannot hold it with fake tensors, because blocks are planned; use torch.export.export, "
            "torch.compile, or make_fx with tracing_mode='real'.",
            RuntimeError,
        )
    size = unread(checked(q, k, v, request), cast(int | Tensor, request.q_offset))
    values = from_arguments(request.mask, request.score, request.params)
    for value in values:
        if value is not None:
            value.checked(size)
    out, lse = attend_nothing(q, k, v, _learned_by(values[1]))
    return out, lse if request.return_lse else None


def _learned_by(score: Score | None) -> list[Tensor]:
    return [] if score is None else [t for t in score.tensors() if t.requires_grad]


def _planned(q: Tensor, k: Tensor, v: Tensor, request: Request) -> _Planned:
    """Check a call's arguments and plan its mask and score."""
    size = checked(q, k, v, request)
    q_offset = cast(int | Tensor, request.q_offset)
    mask, score = from_arguments(request.mask, request.score, request.params)
    aliases = Aliases()
    mask_plan: MaskPlan | GivenPlan
    if request.block_mask is not None:
        mask_plan = GivenPlan(widened(request.block_mask))
    else:
        mask = get_mask("full") if mask is None else mask
        mask_plan = MaskPlan(
            mask, size, q_offset, lift=True, block_size=block_size_for(size), aliases=aliases, allows_bounds=True
        )
    score_plan = None if score is None else ScorePlan(score, size, q_offset, aliases=aliases)
    plans = [mask_plan] if score_plan is None else [mask_plan, score_plan]
    learns = _learns(t for plan in plans for t in plan.tensors)
    needs_grad = _learns((q, k, v))
    number_offset = q_offset if isinstance(q_offset, int) else None

    def in_blocks_of(block_size: tuple[int, int]) -> dict[str, Any] | None:
        plan = mask_plan.resized(block_size)
        return None if plan is None else _of_blocks(plan, score_plan)

    call = Call(
        q=q,
        k=k,
        v=v,
        what=mask_plan.what if score is None else f"{mask_plan.what} with score {score!r}",
        window=lambda: mask_plan.window,
        intervals=lambda: mask_plan.intervals,
        cap=None if score is None else cap_of(score, unread(size, q_offset)),
        whole=None if isinstance(mask_plan, GivenPlan) else lambda: mask_plan.whole[0],
        spanned=None if isinstance(mask_plan, GivenPlan) else lambda: mask_plan.spanned[0],
        added=None if score_plan is None else lambda: score_plan.added[0],
        line=None if score_plan is None else score_plan.line,
        **_of_blocks(mask_plan, score_plan),
        mask_is_own=mask_plan.is_own,
        reads_data_as_fast=mask_plan.reads_data_as_fast,
        score_mod=None if score_plan is None else score_plan.score_mod,
        score_is_own=score_plan is None or score_plan.is_own,
        scale=None if request.scale is None else float(request.scale),
        with_lse=request.return_lse,
        kernel_options=request.kernel_options,
        kernel_key=(mask_plan.kernel_key, None if score_plan is None else score_plan.kernel_key),
        numbers=(mask_plan.numbers, None if score_plan is None else score_plan.numbers),
        shapes=None if any(p.opaque for p in plans) else (number_offset, *(p.shapes for p in plans)),
        needs_grad=learns or needs_grad,
        learns=learns,
        has_number_tensors=any(p.has_number_tensors for p in plans),
        has_start_tensor=number_offset is None,
        in_blocks_of=in_blocks_of,
        holds_aliases=all(p.holds_aliases for p in plans),
        sinks=request.sink_logits,
    )
    return _Planned(call, mask_plan, score_plan, aliases)


def _of_blocks(mask: MaskPlan | GivenPlan, score: ScorePlan | None) -> dict[str, Any]:
    """Return the parts of a Call that depend on its blocks."""
    return {
        "blocks": mask.blocks,
        "data": mask.data,
        "computed_fraction": mask.computed_fraction,
        "is_mostly_partial": mask.is_mostly_partial,
        "proven_options": functools.partial(mask.proven_options, score is not None),
        "mask_mod": lambda: mask.blocks().block_mask.mask_mod,
    }


# --- layouts, casts and sinks around a call ---


def _learns(tensors: Iterable[Tensor]) -> bool:
    """Return whether a gradient of some of the tensors is wanted."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class _Sinks(NamedTuple):
    """The sinks of a call, and whether it wants the lse."""

    logits: Tensor
    with_lse: bool


def _sinks_of(request: Request) -> tuple[_Sinks | None, Request]:
    """Return the sinks of a call or None, and the request for its backend.

    With sinks that asks for the lse: backends that know no sinks give it, and the sinks are folded into it.
    """
    if request.sink_logits is None:
        return None, request
    return _Sinks(request.sink_logits, request.return_lse), request._replace(return_lse=True)


def _with_sinks(result: Result, sinks: _Sinks | None) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call, into which its sinks are folded."""
    if sinks is None:
        return result.out, result.lse
    if result.has_sinks:
        return result.out, result.lse if sinks.with_lse else None
    return with_sinks(result.out, cast(Tensor, result.lse), *sinks)


@contextlib.contextmanager
def under_autocast(q: Any, k: Any, v: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the tensors as torch.autocast casts them, and cast nothing else inside."""
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if not autocasts(device):
        yield q, k, v
        return
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        yield _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Cast as torch does for scaled_dot_product_attention: floats, but not float64."""
    casts = isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in (torch.float64, dtype)
    return x.to(dtype) if casts else x


def _laid_end_to_end(q: Any, k: Any, v: Any, request: Request) -> tuple[Tensor, Tensor, Tensor, Request]:
    """Return jagged nested tensors as dense tensors, with all sequences laid end to end.

    The dense tensors are [1, H, total, D], and the request gets a `packed` mask and score.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        is_jagged = isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged
        # While torch traces, every size is an int for `isinstance`.
        is_transposed = compat.is_compiling() or (is_jagged and not isinstance(x.shape[2], int))
        if not is_jagged or x.dim() != 4 or not is_transposed:
            fail(
                f"with nested tensors, q, k and v must all be jagged [B, H, jagged, D]; `{name}` is "
                f"{described(x)}. A tensor [B, jagged, H, D] needs `.transpose(1, 2)`.",
            )
        if cast(Any, x).lengths() is not None:
            fail(f"`{name}` is a jagged nested tensor with holes; make it contiguous.")
    starts, kv_starts, v_starts = (x.offsets() for x in (q, k, v))
    may_read = can_be_read(kv_starts) and can_be_read(v_starts)
    if kv_starts is not v_starts and may_read and not torch.equal(kv_starts, v_starts):
        fail("the sequences of k and v have different lengths.")
    if q.shape[0] != k.shape[0]:
        fail(f"q has {q.shape[0]} sequences, k has {k.shape[0]}.")
    if request.block_mask is not None:
        fail("jagged nested tensors take `mask`, not `block_mask`.", TypeError)
    check_offset(ATTENTION, request.q_offset, q.shape[0], q.device)
    q_dense, k_dense, v_dense = (x.values().unsqueeze(0) for x in (q, k, v))
    return q_dense, k_dense, v_dense, _inside_sequences(request, starts, None if kv_starts is starts else kv_starts)


def _as_nested(q: Tensor, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return dense output and lse as nested tensors of q's lengths."""
    starts = cast(Any, q).offsets()
    return compat.nested(out[0], starts, 2), None if lse is None else compat.nested(lse[0], starts, 2)


def _inside_sequences(request: Request, starts: Tensor, kv_starts: Tensor | None) -> Request:
    """Return the request for sequences laid end to end, given a request for each sequence."""
    mask, score = from_arguments(request.mask, request.score, request.params)
    layout = starts, kv_starts, cast(int | Tensor, request.q_offset)
    mask = packed(get_mask("full") if mask is None else mask, *layout)
    score = None if score is None else packed(score, *layout)
    return request._replace(mask=mask, score=score, params={}, q_offset=0)


def _mixed(
    q: Tensor, starts: Tensor, page_table: Tensor, kv_lens: Tensor, q_offset: int | Tensor | None, room: int
) -> Mixed:
    """Return the batches of a call of `varlen_attention` with pages.

    Equal arguments return the same tensors, so that a later call finds the replay of an earlier one.

    room: the number of keys that a sequence may have.
    """
    given = [starts, page_table, kv_lens, *([q_offset] if isinstance(q_offset, Tensor) else [])]
    reads = all(can_be_read(t) for t in (q, *given)) and not compat.transforms_active()
    is_kept = reads and not is_captured(q.device)
    key = "mixed", q.device, len(q), len(kv_lens), room, "tensor" if isinstance(q_offset, Tensor) else q_offset
    mixed = _LAYOUTS.get(key, given) if is_kept else None
    if mixed is None:
        offsets = starts.long()
        counts = offsets.diff()
        firsts = offset_of_last(kv_lens, counts) if q_offset is None else offsets_of(q_offset, len(counts), q.device)
        is_cut = reads and q.device.type in _CUT_ON
        if is_cut or (is_kept and _LAYOUTS.get((*key, "checked"), []) is None):
            check_mixed(offsets, len(q), kv_lens if q_offset is None else None, firsts, room)
            _LAYOUTS.put((*key, "checked"), [], True, 1)
        sequences = Sequences(offsets, firsts, page_table, kv_lens)
        mixed = by_number_of_queries(sequences, len(q)) if is_cut else in_pieces(sequences, len(q))
        if is_kept:
            _LAYOUTS.put(key, given, mixed, ENTRY + mixed.nbytes)
    return cast(Mixed, mixed)


def _kept_offset_of_last(kv_lens: Tensor, q_len: int) -> Tensor:
    """Return where the last queries of each sequence start.

    Equal arguments return the same tensor, so that a later call finds the replay of an earlier one.
    """
    if not can_be_read(kv_lens):  # while torch traces, it keeps equal results by itself
        return offset_of_last(kv_lens, q_len)
    captured = is_captured(kv_lens.device)
    offset = None if captured else _OFFSETS.get(q_len, [kv_lens])
    if offset is None:
        if kv_lens.device.type == "cpu":  # elsewhere reading values takes time
            check_are_last(PAGED, kv_lens, q_len)
        offset = offset_of_last(kv_lens, q_len)
        if not captured:
            _OFFSETS.put(q_len, [kv_lens], offset, ENTRY + offset.nbytes)
    return offset


def _slots(cache: Tensor, batch: int) -> Tensor:
    """Return a view of all slots of a cache, for every batch element.

    The view is [B, Hkv, slots, D].
    """
    if autocasts(cache.device.type):
        cache = _cast(cache, torch.get_autocast_dtype(cache.device.type))
    return cache.flatten(0, 1).transpose(0, 1).expand(batch, -1, -1, -1)
