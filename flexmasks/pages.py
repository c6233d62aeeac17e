"""Calls over sequences laid end to end, and over pages: varlen_attention and paged_attention become plain calls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends import decode
from flexmasks.backends.call import Inputs, Operand, Pages, PageTable, Result
from flexmasks.backends.plain import attend_nothing, computes_nothing
from flexmasks.backends.table import BACKENDS, choose, why_not
from flexmasks.backends.table import run as run_on_backend
from flexmasks.cache import ENTRY, PLANS, Part, bytes_of
from flexmasks.context import Context, is_capturing, is_invariant, reads_at_once
from flexmasks.devices import compiles_by_triton, runs_triton
from flexmasks.kernels.sinks import with_sinks
from flexmasks.layouts import inside_sequences, under_autocast
from flexmasks.masks.paged import paged
from flexmasks.plans.alignment import of_word
from flexmasks.plans.checks import (
    PAGED,
    VARLEN,
    check_are_last,
    check_cache,
    check_mixed,
    check_offset,
    check_sinks,
    check_varlen,
    fail,
    refuse_vmap,
    sequence_offsets,
)
from flexmasks.plans.mixed import Mixed, PagedSequences, by_number_of_queries, in_pieces
from flexmasks.plans.sizes import offset_of_last, starts_of, unread
from flexmasks.request import Request
from flexmasks.road import (
    Known,
    Planned,
    attend,
    keep,
    known_call,
    learns_any,
    plan_call,
    run_known,
    tensors_that_learn,
    unseen,
    with_lse_for_sinks,
    with_sinks_of,
)
from flexmasks.spec.arguments import from_arguments, get_mask
from flexmasks.spec.bands import band_of
from flexmasks.spec.inside import check_pages
from flexmasks.spec.parameters import Size, can_be_read, is_of_vmap
from flexmasks.spec.parts import rows_of
from flexmasks.spec.values import Mask

_OFFSETS: Part[Tensor] = Part(PLANS, "offsets")
_WHOLE: Part[bool] = Part(PLANS, "whole tables")  # whether all keys lie in pages
_LAYOUTS: Part[Any] = Part(PLANS, "layouts")  # of mixed batches


class _Cache(NamedTuple):
    """A paged cache, see `paged_attention`."""

    k: Tensor
    v: Tensor
    page_table: Tensor
    kv_lens: Tensor
    is_traced: bool  # the call, by torch.compile
    sequences: Tensor | None = None  # what messages call the batch elements, by default their numbers

    @classmethod
    def given(cls, k: Tensor, v: Tensor, page_table: Tensor, kv_lens: Tensor) -> _Cache:
        return cls(k, v, page_table, kv_lens, compat.is_compiling())

    @property
    def is_read_by_kernels(self) -> bool:
        """Whether kernels read pages where they lie; else pages are copied."""
        return runs_triton(self.k.device)

    @property
    def room(self) -> int:
        """The number of keys that a sequence may have."""
        return self.page_table.shape[1] * self.k.shape[1]

    def check_values(self, call: str, q: Tensor, request: Request, by_position: bool = True) -> None:
        """Raise ValueError, in the name of `call`, for lengths that cannot be, and for pages that queries miss.

        request: with a Mask, and where the queries start.
        by_position: see `check_pages`.
        """
        n_pages, page_size = self.k.shape[:2]
        size = Size(len(q), q.shape[1], q.shape[2], n_pages * page_size, q.device)
        offset = cast(int | Tensor | None, request.q_offset)
        if offset is not None:
            check_offset(call, offset, size.batch, size.device)
        starts = offset_of_last(self.kv_lens, size.q_len) if offset is None else starts_of(offset, len(q), q.device)
        given = self.page_table, self.kv_lens, page_size
        try:
            paged(request.mask, *given)._checked(size)
            size = replace(size, q_offset=int(starts.amax()) if len(q) else 0, starts=starts)
            check_pages(size, request.mask, *given, n_pages, by_position=by_position, sequences=self.sequences)
        except ValueError as error:
            problem = str(error).removeprefix("flexmasks mask 'paged': ")
            raise ValueError(f"{call}: {problem}") from None

    def check_once(self, q: Tensor, request: Request) -> None:
        """Check values as `check_values` does, unless they were checked for an earlier layer of the step.

        If used pages are missing, each mask is checked: some masks hide their keys.
        """
        if self.is_traced:
            return
        if is_of_vmap(self.page_table):
            refuse_vmap(PAGED, "`page_table`")
        q_offset = request.q_offset
        given = [self.page_table, self.kv_lens, *([q_offset] if isinstance(q_offset, Tensor) else [])]
        if not all(map(can_be_read, given)):
            return
        key = "whole", q.shape[2], self.k.shape[:2], q_offset if isinstance(q_offset, int) else "tensor"
        if not _WHOLE.get(key, given):
            self.check_values(PAGED, q, request)
            used = torch.arange(0, self.room, self.k.shape[1], device=q.device) < self.kv_lens[:, None]
            is_missing = used & ((self.page_table < 0) | (self.page_table >= len(self.k)))
            _WHOLE.put(key, given, not bool(is_missing.any()), ENTRY)

    def says_what_is_wrong(self, call: str, q: Tensor, request: Request, error: ValueError) -> None:
        """Raise ValueError if pages or lengths are why a call failed, of which errors inside name other arguments."""
        for name, t in (("`page_table`", self.page_table), ("`kv_lens`", self.kv_lens)):
            if is_of_vmap(t):
                refuse_vmap(call, name)
        if can_be_read(self.kv_lens) and not is_capturing(self.k.device):
            self.check_values(call, q, request, by_position="a page twice" not in str(error))


def run_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Any,
    kv_offsets: Any,
    max_length: Any,
    page_table: Any,
    kv_lens: Any,
    request: Request,
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call of `varlen_attention`.

    With a page table, a q_offset of None means that the queries are the last ones.

    max_length: the most queries or keys of a sequence, or None.
    """
    if offsets is None:
        fail("pass `offsets`, where sequences start and the last one ends (cu_seqlens_q).", TypeError, VARLEN)
    if page_table is not None or kv_lens is not None:
        _check_given(kv_offsets, page_table, kv_lens)
        if request.dropout is not None:
            fail("pages hold a cache, and weights are dropped in training only; leave out `dropout_p`.", call=VARLEN)
        cache = _Cache.given(k, v, page_table, kv_lens)
        with unseen(cache.is_traced), under_autocast(q, k, v) as (q, k, v):
            return _run_mixed(q, offsets, cache._replace(k=k, v=v), request)
    check_varlen(q=q, k=k, v=v)
    offsets = sequence_offsets("offsets", offsets, q.device)
    kv_offsets = None if kv_offsets is None else sequence_offsets("kv_offsets", kv_offsets, q.device)
    if kv_offsets is None and len(q) != len(k):
        fail(f"q has {len(q)} tokens and k {len(k)}: pass `kv_offsets`, where the sequences of k start.", call=VARLEN)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = attend(q, k, v, inside_sequences(VARLEN, request, q, k, offsets, kv_offsets, max_length=max_length))
    return out[0].transpose(0, 1), None if lse is None else lse[0]


def run_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, kv_lens: Tensor, request: Request
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call of `paged_attention`.

    A q_offset of None means that the queries are the last ones of each sequence.
    """
    cache = _Cache.given(k_cache, v_cache, page_table, kv_lens)
    with unseen(cache.is_traced), under_autocast(q, k_cache, v_cache) as (q, k_cache, v_cache):
        cache, request = cache._replace(k=k_cache, v=v_cache), _with_offset(PAGED, request)
        if request.sink_logits is None:
            return _run_paged(q, cache, request)
        check_sinks(q, request.sink_logits)
        if _must_fold_inside(q):
            return _run_paged(q, cache, request)
        without = with_lse_for_sinks(request)._replace(sink_logits=None)
        return with_sinks_of(Result(*_run_paged(q, cache, without)), request)


def _must_fold_inside(q: Tensor) -> bool:
    """Whether sinks that are folded in behind the kernel would give bits that depend on what else is in the call."""
    return is_invariant() and q.device.type == "cpu"


def _run_paged(q: Tensor, cache: _Cache, request: Request, is_checked: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call with pages and without sinks, see `run_paged`.

    is_checked: the request has a Mask, and all arguments are right.
    """
    known = _key_of_pages(q, cache, request)
    again = None if known is None else run_known(known, q, cache.k, cache.v, request)
    if again is not None:
        return again
    if not is_checked:
        check_cache(PAGED, q, *cache[:4])
        request = _with_values(request)
    try:
        if _may_read_pages(q, cache, request):
            ran = _run_in_pages(q, cache, request)
            if ran is not None:
                result, planned = ran
                if known is not None and result.ready is not None:
                    keep(known, result, planned)
                return result.out, result.lse
        return _run_without_pages(q, cache, request)
    except ValueError as error:
        cache.says_what_is_wrong(PAGED if cache.sequences is None else VARLEN, q, request, error)
        raise


def _key_of_pages(q: Tensor, cache: _Cache, request: Request) -> Known | None:
    """Return how a decoding call with pages is found, or None if it cannot be kept.

    The last two tensors are kv_lens and the page table.
    """
    if cache.is_traced or torch.jit.is_tracing():  # type: ignore[attr-defined] # public, and not listed
        return None
    table, lens = cache.page_table, cache.kv_lens
    if not type(q) is type(table) is type(lens) is Tensor or vars(table) or vars(lens):
        return None
    context = Context.now(q.device)
    known = None if context.is_capturing else known_call(q, cache.k, cache.v, request, context)
    return None if known is None else Known(("pages", known.key), [*known.tensors, lens, table])


def _with_offset(call: str, request: Request) -> Request:
    """Return a request in which a q_offset of None stands for "last"."""
    word = request.q_offset
    if not isinstance(word, str):
        return request
    return request._replace(q_offset=None if word == "last" else of_word(call, word, 0, 0))


def _with_values(request: Request) -> Request:
    mask, score = from_arguments(request.mask, request.score, request.params)
    return request._replace(mask=get_mask("full") if mask is None else mask, score=score, params={})


def _run_without_pages(q: Tensor, cache: _Cache, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a checked call whose kernel reads no pages."""
    if request.q_offset is None:
        request = request._replace(q_offset=_kept_offset_of_last(cache.kv_lens, q.shape[2]))
    if not (cache.is_read_by_kernels or computes_nothing(q, cache.k, cache.v)) or is_invariant():
        return _run_gathered(q, cache, request)
    if cache.room > cache.k.shape[:2].numel():  # pages that repeat hold more keys than the pool has slots
        request = request._replace(ends_among_keys=False)
    pages = cache.page_table, cache.kv_lens, cache.k.shape[1]
    score = None if request.score is None else paged(request.score, *pages)
    # All slots, for every batch element: [B, Hkv, slots, D].
    k, v = (x.flatten(0, 1).transpose(0, 1).expand(q.shape[0], -1, -1, -1) for x in (cache.k, cache.v))
    return attend(q, k, v, request._replace(mask=paged(request.mask, *pages), score=score))


def _run_gathered(q: Tensor, cache: _Cache, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call whose pages are copied, so that blocks have keys of one sequence."""
    cache.check_once(q, request)
    pages = cache.page_table.long().clamp(0, len(cache.k) - 1)  # entries of keys that no query sees may be anything
    k, v = (
        x.index_select(0, pages.flatten()).view(len(q), cache.room, *x.shape[2:]).transpose(1, 2)
        for x in (cache.k, cache.v)
    )
    return attend(q, k, v, request._replace(mask=request.mask & get_mask("padding", kv_lens=cache.kv_lens)))


def _of_rows(request: Request, sequences: Tensor, mixed: Mixed, tokens: int) -> Request:
    given = sequences, mixed.firsts, mixed.lasts, mixed.offsets, tokens
    mask = rows_of(request.mask, *given)
    score = None if request.score is None else rows_of(request.score, *given)
    return request._replace(mask=mask, score=score)


def _check_given(kv_offsets: Any, page_table: Tensor | None, kv_lens: Tensor | None) -> None:
    if kv_offsets is not None:
        fail("pass `kv_offsets`, or `page_table` and `kv_lens`, not both.", TypeError, VARLEN)
    if page_table is None or kv_lens is None:
        missing = "page_table" if page_table is None else "kv_lens"
        fail(f"a paged cache needs both `page_table` and `kv_lens`; `{missing}` is missing.", TypeError, VARLEN)


def _run_mixed(q: Tensor, offsets: Any, cache: _Cache, request: Request) -> tuple[Tensor, Tensor | None]:
    """Return output and lse (or None) of a call of `varlen_attention` with pages."""
    check_varlen(q=q)
    request = _with_offset(VARLEN, request)
    offsets = sequence_offsets("offsets", offsets, q.device)
    check_cache(VARLEN, q, *cache[:4], len(offsets) - 1)
    if request.q_offset is not None:
        check_offset(VARLEN, request.q_offset, len(cache.kv_lens), q.device)
    request = _with_values(request)
    if request.sink_logits is not None:
        check_sinks(q[None].transpose(1, 2), request.sink_logits)
    sinks_after = None if _must_fold_inside(q) else request.sink_logits
    inner = request if sinks_after is None else with_lse_for_sinks(request)._replace(sink_logits=None)
    mixed = _mixed(q, offsets, cache, cast(int | Tensor | None, request.q_offset))
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    if cache.is_traced and compiles_by_triton(q.device):
        # torch's kernel for few queries fails where tensors of masks are computed.
        inner = inner._replace(kernel_options={"FORCE_USE_FLEX_ATTENTION": True})
    for rows in mixed.batches:
        own = _of_rows(inner, rows.sequences, mixed, len(q))
        own = own._replace(q_offset=rows.q_offset, ends_among_keys=False)  # rows have queries that count for nothing
        own_q = q.index_select(0, rows.tokens.flatten()).view(*rows.tokens.shape, *q.shape[1:]).transpose(1, 2)
        own_cache = cache._replace(page_table=rows.page_table, kv_lens=rows.kv_lens, sequences=rows.sequences)
        own_out, own_lse = _run_paged(own_q, own_cache, own, is_checked=True)
        outs.append(own_out.transpose(1, 2).flatten(0, 1))
        if own_lse is not None:
            lses.append(own_lse.transpose(0, 1).flatten(1))
    if not outs:  # no sequence has queries, and the result keeps its dtype and its place in an autograd graph
        own_out, own_lse = attend_nothing(
            q.transpose(0, 1)[None], cache.k[:0], cache.v[:0], tensors_that_learn(inner.score)
        )
        outs.append(own_out[0].transpose(0, 1))
        lses.append(own_lse[0])
    # The last place is that of queries of no sequence.
    outs.append(outs[0].new_zeros(1, q.shape[1], cache.v.shape[3]))
    out = torch.cat(outs).index_select(0, mixed.places)
    if not inner.return_lse:
        return out, None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    of_none = q.new_full((q.shape[1], 1), -math.inf, dtype=dtype)
    lses.append(of_none if inner.sink_logits is None else inner.sink_logits.to(dtype)[:, None])
    lse = torch.cat(lses, 1).index_select(1, mixed.places)
    if sinks_after is None:
        return out, lse
    given = sinks_after, request.return_lse, is_invariant()
    out, lse_with_sinks = with_sinks(out.transpose(0, 1), lse, *given)
    return out.transpose(0, 1), lse_with_sinks


def _run_in_pages(q: Tensor, cache: _Cache, request: Request) -> tuple[Result, Planned] | None:
    """Run a checked call by a backend that reads each sequence's own pages only, or return None if there is none.

    The result is not kept if such backends failed, and the call ran without pages. See `_run_paged`.
    """
    # Planning reads sizes of k and v only: these have the sizes of the keys of each sequence by themselves.
    k, v = (x.as_strided((len(q), x.shape[2], cache.room, x.shape[3]), (0, 0, 0, 1)) for x in (cache.k, cache.v))
    are_last = request.q_offset is None
    own = request._replace(mask=request.mask & get_mask("padding", kv_lens=cache.kv_lens))
    planned = _planned_at_end(q, k, v, own, cache.kv_lens) if are_last else plan_call(q, k, v, own)
    band = band_of(cast(Mask, request.mask), unread(planned.plans.mask.size, cache.kv_lens))
    band = None if band is None or band.sequences is not None else band
    pages = Pages(Operand.of(cache.k), Operand.of(cache.v), band, are_last)
    planned = planned._replace(
        call=replace(planned.call, pages=pages),
        plans=planned.plans._replace(pages=PageTable(cache.kv_lens, cache.page_table)),
    )
    call, name = planned.call, request.backend_name
    if not (choose(call)[0] if name == "auto" else why_not(name, call) is None):
        return None
    if not is_capturing(q.device):  # the values of the table are checked
        cache.check_values(PAGED, q, request)

    def without_pages() -> Result:
        return Result(*_run_without_pages(q, cache, request))

    inputs = Inputs(q, cache.k, cache.v, request.sink_logits, planned.plans)
    return run_on_backend(call, inputs, name, without_pages), planned


def _planned_at_end(q: Tensor, k: Tensor, v: Tensor, request: Request, kv_lens: Tensor) -> Planned:
    """Plan a call whose queries are the last ones of each sequence.

    Where they start is computed only for kernels that do not find the last queries themselves. In the plans of the
    other kernels, which read no offset, the lengths stand in its place.
    """
    planned = plan_call(q, k, v, request._replace(q_offset=kv_lens, ends_among_keys=False))
    if decode.finds_last_queries(planned.call):
        return planned
    where_last = _kept_offset_of_last(kv_lens, q.shape[2])
    return plan_call(q, k, v, request._replace(q_offset=where_last))._replace(where_last=where_last)


def _may_read_pages(q: Tensor, cache: _Cache, request: Request) -> bool:
    """Return whether a kernel that reads pages may run a call, before it is planned."""
    readers = [b for b in BACKENDS.values() if b.reads_pages and request.backend in ("auto", b.name)]
    if not readers or not cache.is_read_by_kernels:
        return False
    tensors = q, cache.k, cache.v
    if not all(type(x) is Tensor for x in tensors) or not (q.numel() and cache.k.numel() and cache.room):
        return False
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined] # public, and not listed
    if learns_any(tensors) or is_traced or cache.is_traced:
        return False
    if decode.are_few(q.shape[2], cache.room, q.device):
        return True
    return request.q_offset is None and any(b.name != "decode" and not b.lacks() for b in readers)


def _mixed(q: Tensor, offsets: Tensor, cache: _Cache, q_offset: int | Tensor | None) -> Mixed:
    """Return the batches of a call of `varlen_attention` with pages.

    Equal arguments return the same tensors, so that a later call finds what an earlier one made.
    """
    page_table, kv_lens, room = cache.page_table, cache.kv_lens, cache.room
    given = [offsets, page_table, kv_lens, *([q_offset] if isinstance(q_offset, Tensor) else [])]
    reads = all(can_be_read(t) for t in (q, *given)) and not compat.transforms_active()
    is_kept = reads and not is_capturing(q.device)
    key = "mixed", q.device, len(q), len(kv_lens), room, "tensor" if isinstance(q_offset, Tensor) else q_offset
    mixed = _LAYOUTS.get(key, given) if is_kept else None
    if mixed is None:
        offsets = offsets.long()
        counts = offsets.diff()
        places = offset_of_last(kv_lens, counts) if q_offset is None else starts_of(q_offset, len(counts), q.device)
        is_cut = reads and reads_at_once(q.device)  # by the numbers of queries
        if is_cut or (is_kept and _LAYOUTS.get((*key, "checked"), []) is None):
            check_mixed(offsets, len(q), kv_lens if q_offset is None else None, places, room)
            _LAYOUTS.put((*key, "checked"), [], True, ENTRY)
        sequences = PagedSequences(offsets, places, page_table, kv_lens)
        mixed = by_number_of_queries(sequences, len(q)) if is_cut else in_pieces(sequences, len(q))
        if is_kept:
            _LAYOUTS.put(key, given, mixed, ENTRY + bytes_of(mixed))
    return cast(Mixed, mixed)


def _kept_offset_of_last(kv_lens: Tensor, q_len: int) -> Tensor:
    """Return where the last queries of each sequence start.

    Equal arguments return the same tensor, so that a later call finds what an earlier one made.
    """
    if not can_be_read(kv_lens):  # while torch traces, it keeps equal results by itself
        return offset_of_last(kv_lens, q_len)
    capturing = is_capturing(kv_lens.device)
    offset = None if capturing else _OFFSETS.get(q_len, [kv_lens])
    if offset is None:
        if reads_at_once(kv_lens.device):
            check_are_last(PAGED, kv_lens, q_len)
        offset = offset_of_last(kv_lens, q_len)
        if not capturing:
            _OFFSETS.put(q_len, [kv_lens], offset, ENTRY + offset.nbytes)
    return offset
