"""Backend "fa4": FlashAttention 4 called directly, for windows and soft-caps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks import compat
from flexmasks.backends import fa4_kernel, fa4_package
from flexmasks.backends.call import (
    Call,
    Maker,
    Pages,
    Replay,
    Result,
    Unavailable,
    first_line,
    proven,
    raise_passing_error,
    transformed,
)
from flexmasks.backends.fa4_package import ARGUMENTS
from flexmasks.kernels.compiling import announce_once
from flexmasks.kernels.direct import with_rows_together
from flexmasks.plans.bounds import unread
from flexmasks.plans.mask_plan import MaskPlan
from flexmasks.plans.windows import Intervals, Window
from flexmasks.spec.bands import Band, Sequences, band_of

MIN_QUERIES = 128  # with fewer queries, kernels that split the keys are faster
_MAX_SEARCHED_SEQUENCES = 2048
# Slots of a page that the kernel copies as a whole tile, up to a head size: in 0.86 of the time that pages of 256 take
# (H200).
_FAST_PAGE, _MAX_SIZE_OF_FAST_PAGE = 128, 128


def refuses(call: Call) -> str | None:
    """Return why the call cannot run here, or None."""
    reason = fa4_package.refuses_package(call)
    if reason is not None:
        return reason
    if call.pages is not None:
        return _refuses_pages(call, call.pages)
    if fa4_package.is_small(call.q.device) and call.needs_grad and call.cap is not None:
        return f"on compute capability {fa4_package.SMALL} its backward pass takes no score changes"
    if call.mask.window is None:
        reason = _refuses_starts(call)
        if reason is not None:
            return reason
    return _refuses_numbers(call)


def adds_in_any_order(call: Call) -> str | None:
    """Return what the kernel adds in changing order, or None.

    In torch's deterministic mode it sums the gradients of queries in order, but not on each GPU.
    """
    return "the gradients of queries" if call.needs_grad and fa4_package.is_small(call.q.device) else None


def _refuses_starts(call: Call) -> str | None:
    """Return why a call that is no window from one position cannot run, or None."""
    intervals = call.mask.intervals
    if intervals is None or not isinstance(intervals.offset, Tensor):
        return (
            "it knows only windows, such as full and causal, and windows inside sequences laid end to end, given by "
            "offsets; it would have to read documents given by ids"
            f"{', and where queries start' if call.is_traced else ''}"
        )
    # The kernel must be told of no more keys than there are, and nobody reads where the queries start.
    if intervals.lens is not None or intervals.right != 0 or call.q.shape[2] > call.k.shape[2]:
        return (
            "where queries start at positions of a tensor, it takes windows that end at a query's position, without "
            "lengths of sequences, and no more queries than keys"
        )
    if call.needs_grad:
        return "it gives no gradients for queries that start at positions of a tensor"
    if fa4_package.is_small(call.q.device):
        return f"on compute capability {fa4_package.SMALL} it is not told where the keys of each batch element end"
    return None


def plan(call: Call) -> str:
    """Say what takes the place of a plan of blocks, or "" if nothing does."""
    return "" if call.mask.window is not None else "none: the kernel is told where the keys of each batch element end"


def _refuses_numbers(call: Call) -> str | None:
    """Return why a call of a window cannot run here, or None."""
    if call.score is not None and call.cap is None:
        return "it has no score changes except the soft-cap"
    if (numbers := call.numbers_of(call.score)) is not None and numbers.are_later:
        return "it compiles a kernel for each soft-cap, and has those for other values"
    if call.kernel_options:
        return "it takes no kernel_options"
    if call.scale is not None and call.scale <= 0:
        return "it takes scales above 0 only"
    if call.q.shape[2] < MIN_QUERIES:
        return "it does not split the keys among processors, which few queries need"
    if compat.transforms_active() or transformed():
        return "it does not run inside transforms of torch.func"
    return None


def run(call: Call) -> Result:
    """Run the call; raise Unavailable if flash-attn-4 cannot compile it."""
    _announce(call)
    if call.pages is not None or call.mask.window is None:
        ended = Fa4EndReplay.of(call)
        return Result(*ended(call.q, *call.kv), ended)
    replay = Fa4Replay.of(call)
    with _failures_are_unavailable():
        if call.sinks is None or not folds_sinks(call.q, call.k, call.v, call.sinks):
            return proven(call, replay)
        return proven(call, replay, call.sinks)._replace(has_sinks=True)


def _announce(call: Call) -> None:
    """Log, once for each kind of kernel, that flash-attn-4 compiles it."""
    q, window = call.q, call.mask.window
    parts = [
        str(q.dtype).removeprefix("torch."),
        f"head sizes {q.shape[3]} and {call.v.shape[3]}",
        "all keys" if window is not None and window.left is window.right is None else "a window",
        "pages" if call.pages is not None else "sequences" if call.sequences is not None else "",
        "a soft-cap" if call.cap is not None else "",
        "sinks" if call.sinks is not None else "",
        "gradients" if call.needs_grad else "",
    ]
    announce_once(f"attention for backend 'fa4': {', '.join(filter(None, parts))}")


@contextlib.contextmanager
def _failures_are_unavailable() -> Iterator[None]:
    """Raise Unavailable in place of other errors, but for missing memory.

    flash-attn-4 compiles at the first call, and raises errors of any type.
    """
    try:
        yield
    except Unavailable:
        raise
    except Exception as error:
        raise_passing_error(error)
        raise Unavailable(first_line(error)) from error


def folds_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> bool:
    """Return whether the kernel folds in the sinks of a call.

    It does not where sinks alone learn: the call was then chosen as one without gradients.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, sinks))
    only_sinks_learn = sinks.requires_grad and not any(x.requires_grad for x in (q, k, v))
    return not (needs_grad and (only_sinks_learn or fa4_package.is_small(q.device))) and fa4_package.knows_sinks()


def compiles(call: Call) -> str:
    """Say whether the call would compile."""
    return "yes, if it is the first call of its kind: flash-attn-4 compiles once for each kind"


@dataclass(frozen=True)
class Fa4Replay(Replay):
    """A call of FlashAttention 4 without q, k and v."""

    window: Window
    sequences: Sequences | None
    scale: float | None
    cap: float | None  # cap of a soft-cap
    with_lse: bool
    by_head: Sequences | None = None  # sequences of [B, H, S, D] in memory order, head after head, if that is faster
    is_traced: bool = False  # torch.compile traces the call

    key = "fa4"

    def with_sinks(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor | None] | None:
        return self(q, k, v, sinks) if folds_sinks(q, k, v, sinks) else None

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in (self.sequences, self.by_head) if s is not None)

    @classmethod
    def of(cls, call: Call) -> Fa4Replay:
        """Return the call for the shapes of its q and k."""
        sequences = call.sequences
        batch, heads, length, _ = call.q.shape
        by_head = None
        if sequences is not None and sequences.q is sequences.kv and batch > 1 and heads == call.k.shape[1]:
            # Reading head by head copies nothing. But FlashAttention searches the list of sequences for every tile.
            is_searched_fast = heads * len(sequences.q) <= _MAX_SEARCHED_SEQUENCES
            by_head = sequences.of_heads(heads, length) if is_searched_fast else None
        window = cast(Window, call.mask.window)
        return cls(window, sequences, call.scale, call.cap, call.with_lse, by_head, call.is_traced)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, Q, Dv], and lse [B, H, Q] or None.

        sinks: logits of attention sinks, [H].
        """
        k, v = self.window.cut(k), self.window.cut(v)
        sinks = None if sinks is None else sinks.float().contiguous()
        if self.sequences is not None:
            out, lse = self._in_sequences(q, k, v, sinks, self.sequences)
        else:
            out, lse = self._attend(None, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sinks)
            out = out.transpose(1, 2)
        return out, lse if self.with_lse else None

    def _in_sequences(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        if sequences.q is not sequences.kv:
            # Keys in padding that meet no query may get no gradient at all.
            k, v = (fa4_kernel.hide_padding(x, 2, sequences.counts[1], 0.0) for x in (k, v))
        out, lse = self._over_all_tokens(q, k, v, sinks, sequences)
        count = sequences.counts[0]
        lse_of_nothing = -torch.inf if sinks is None else sinks[:, None]
        return fa4_kernel.hide_padding(out, 2, count, 0.0), fa4_kernel.hide_padding(lse, 2, count, lse_of_nothing)

    def _over_all_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Return output and lse of sequences that may include padding."""
        batch, heads, q_len, _ = q.shape
        v_size = v.shape[3]
        has_heads_apart = self.by_head is not None and sinks is None  # where all heads count as one
        if has_heads_apart and q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
            out, lse = self._attend(self.by_head, *(x.view(-1, 1, x.shape[3]) for x in (q, k, v)))
            return out.view(batch, heads, q_len, v_size), lse.view(q.shape[:3])
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [tokens, H, D], copied if no view can be so
        out, lse = self._attend(sequences, q, k, v, sinks)
        return out.view(batch, q_len, heads, v_size).transpose(1, 2), lse.view(heads, batch, q_len).transpose(0, 1)

    def _attend(
        self, sequences: Sequences | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output and lse of q, k and v [B, S, H, D or Dv].

        With sequences, q, k and v are [tokens, H, D or Dv].
        """
        arguments = self._arguments(q.shape[1], k.shape[1], sequences)
        if self.is_traced:
            in_order = [arguments.get(name) for name in ARGUMENTS]
            out, lse = fa4_kernel.traced_forward(q, k, v, sinks, *in_order, self.cap, self.with_lse)
        else:
            out, lse = fa4_kernel.Attend.apply(q, k, v, sinks, arguments, self.cap)
        return out, lse

    def _arguments(self, q_len: int, kv_len: int, sequences: Sequences | None) -> dict[str, Any]:
        """Return the kernel's arguments; FlashAttention counts windows with the last query at the last key."""
        shift = 0 if sequences is not None else self.window.offset - (kv_len - q_len)
        left, right = self.window.left, self.window.right
        left, right = None if left is None else left - shift, None if right is None else right + shift
        arguments = {"softmax_scale": self.scale, **fa4_kernel.window_arguments(left, right)}
        if sequences is not None:
            arguments |= {"cu_seqlens_q": sequences.q, "cu_seqlens_k": sequences.kv}
            arguments |= {"max_seqlen_q": sequences.longest[0], "max_seqlen_k": sequences.longest[1]}
        return arguments


# --- keys that end where a tensor says: in pages, and for queries that start where a tensor says ---


def _band_in(pages: Pages, call: Call) -> Band | None:
    """Return the mask inside a sequence as a window, or None."""
    band = band_of(pages.mask, unread(cast(MaskPlan, call.mask).size, pages.lens))
    return None if band is None or band.sequences is not None else band


def _refuses_pages(call: Call, pages: Pages) -> str | None:
    if fa4_package.is_small(call.q.device):
        return f"on compute capability {fa4_package.SMALL} it reads no pages"
    if call.needs_grad:
        return "its kernel for pages has no gradients"
    if not pages.are_last:
        return "from pages it takes the last queries of each sequence"
    return "it knows only windows" if _band_in(pages, call) is None else _refuses_numbers(call)


class _Fixed(NamedTuple):
    """Properties of a call that do not change with its tensors.

    lengths: numbers of queries and of keys of a call whose queries start where a tensor says; None for pages.
    parts: in how many pages the kernel reads each page of the caches.
    pages: the number of pages of the caches, 0 without pages.
    """

    left: int | None
    right: int | None
    scale: float | None
    cap: float | None
    with_lse: bool
    lengths: tuple[int, int] | None
    parts: int
    pages: int


@dataclass(frozen=True)
class Fa4EndReplay(Replay):
    """A call of FlashAttention 4 without q, k and v, which is told where the keys of each batch element end.

    The kernel lays the last query at the last key. So it is told of the keys in a sequence's pages, whose last ones
    are the queries, or of the keys up to the last query's position.

    given: the tensors of the call: the lengths of sequences and their page table, or where queries start.
    ends: the number of keys that the kernel is told of, int32 [B].
    table: the page table as the kernel takes it, int32, or None.
    """

    fixed: _Fixed
    given: tuple[Tensor, ...]
    ends: Tensor
    table: Tensor | None

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("intervals",) if self.table is None else ("pages",)

    @property
    def nbytes(self) -> int:
        return self.ends.nbytes + (self.table.nbytes if self.table is not None and self.fixed.parts > 1 else 0)

    @classmethod
    def of(cls, call: Call) -> Fa4EndReplay:
        q_len, kv_len = call.q.shape[2], call.k.shape[2]
        right: int | None = 0
        if call.pages is None:
            intervals = cast(Intervals, call.mask.intervals)
            left, lengths, parts, pages = intervals.left, (q_len, kv_len), 1, 0
            given = [cast(Tensor, intervals.offset)]
        else:
            band = cast(Band, _band_in(call.pages, call))
            left, right, lengths = band.left, _reaching(band.right, q_len), None
            parts, pages = _parts_of_pages(*call.kv), len(call.pages.k_cache)
            given = [call.pages.lens.detach(), call.pages.table.detach()]
        fixed = _Fixed(_reaching(left, kv_len), right, call.scale, call.cap, call.with_lse, lengths, parts, pages)
        return cls._made(fixed, given)

    @classmethod
    def _made(cls, fixed: _Fixed, given: Sequence[Tensor]) -> Fa4EndReplay:
        if fixed.lengths is None:
            sees_all = fixed.left is None and fixed.right in (None, 0)
            # The kernel reads whole tiles of keys, and entries of keys that no query sees may be anything.
            table = given[1] if sees_all else given[1].clamp(0, fixed.pages - 1)
            return cls(fixed, tuple(given), _in_int32(given[0]), _in_parts(table, fixed.parts))
        return cls(fixed, tuple(given), _ends(given[0], fixed.lengths), None)

    def taken(self) -> tuple[Sequence[Tensor], Sequence[Tensor], Maker]:
        fixed = self.fixed
        return self.given, [], lambda read, captured: Fa4EndReplay._made(fixed, read)

    def refresh(self) -> None:
        if self.fixed.lengths is not None:
            self.ends.copy_(_ends(self.given[0], self.fixed.lengths))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, Q, Dv], and lse [B, H, Q] or None.

        k, v: caches [n_pages, page_size, Hkv, D] and [n_pages, page_size, Hkv, Dv] where there is a page table.

        Raises Unavailable if flash-attn-4 cannot compile the call.
        """
        fixed = self.fixed
        arguments = {"seqused_k": self.ends, "softmax_scale": fixed.scale}
        arguments |= fa4_kernel.window_arguments(fixed.left, fixed.right)
        q, k, v = with_rows_together(q.detach(), k.detach(), v.detach())
        if self.table is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            arguments["page_table"] = self.table
        if fixed.parts > 1:
            k, v = (x.view(-1, _FAST_PAGE, *x.shape[2:]) for x in (k, v))
        with _failures_are_unavailable():
            out, lse = fa4_kernel.forward(q.transpose(1, 2), k, v, arguments, fixed.cap)
        return out.transpose(1, 2), lse if fixed.with_lse else None


def _reaching(count: int | None, length: int) -> int | None:
    """Return how far a window reaches, or None if it reaches all positions."""
    return None if count is None or count >= length - 1 else count


def _parts_of_pages(k_cache: Tensor, v_cache: Tensor) -> int:
    """Return in how many parts the kernel reads each page of the caches.

    Parts have `_FAST_PAGE` slots, or a page is read as it is.
    """
    page_size = k_cache.shape[1]
    has_fast_page = max(k_cache.shape[3], v_cache.shape[3]) <= _MAX_SIZE_OF_FAST_PAGE and page_size % _FAST_PAGE == 0
    is_in_order = all(x.stride(0) == page_size * x.stride(1) for x in (k_cache, v_cache))
    return page_size // _FAST_PAGE if has_fast_page and is_in_order else 1


def _in_parts(table: Tensor, parts: int) -> Tensor:
    """Return a table of pages as one of their parts, int32."""
    table = _in_int32(table)
    if parts == 1:
        return table
    return (table[:, :, None] * parts + torch.arange(parts, dtype=torch.int32, device=table.device)).flatten(1)


def _in_int32(x: Tensor) -> Tensor:
    return x.detach().int().contiguous()


def _ends(starts: Tensor, lengths: tuple[int, int]) -> Tensor:
    """Return the number of keys up to the last query's position, int32 [B].

    starts: the position of the first query of each batch element. Wrong ones let no kernel read memory behind the keys.
    lengths: numbers of queries and of keys.
    """
    q_len, kv_len = lengths
    return (starts.detach().long() + q_len).clamp_(0, kv_len).int()
