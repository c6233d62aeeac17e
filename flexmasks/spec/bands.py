"""Native forms of masks and scores: bands, caps and factors.

Some kernels compute windows, also inside sequences, soft-caps and ALiBi without any function of indices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmasks.errors import Unfit
from flexmasks.spec.definitions import AND
from flexmasks.spec.parameters import Size, can_be_read, check_returned, in_message
from flexmasks.spec.values import Mask, Score

_OF_DOCUMENTS = "document", "packed", "cross_document"


class Sequences(NamedTuple):
    """Sequences laid end to end over all batch elements. They cover all tokens.

    The host does not read where padding starts, so padding is in sequences of its own, and kernels must hide what they
    compute there.
    """

    q: Tensor  # int32[N + 1], the start of each sequence of queries and the end of the last one
    kv: Tensor  # the same of keys; q itself for the same sequences
    # int32[2]: the numbers of queries and of keys before the padding in each batch element, or -1 and -1 if there are
    # more sequences than these, and what kernels compute must be NaN. If the band says that the host must look, twice
    # the number of documents, negative if ids do not ascend, so that more must be looked at.
    counts: Tensor
    by_head: Tensor | None = None  # as q for [B, H, S, D] in memory order, head after head; None where that is slower

    def head_after_head(self, heads: int, length: int) -> Sequences:
        """The sequences of self-attention over `length` tokens, also for [B, H, S, D] read as one line."""
        starts, end = self.q[:-1].long(), self.q[-1:].long() * heads
        steps = torch.arange(heads, device=starts.device)[:, None] + starts // length * (heads - 1)
        # An empty sequence at the end of a batch element counts as one of the next batch element, if there is a next.
        line = torch.minimum(starts + steps * length, end).flatten().sort().values
        return self._replace(by_head=torch.cat([line, end]).int())


@dataclass(frozen=True)
class Band:
    """A mask of the keys at distances kv - q in -left..right of a query, inside the query's own sequence."""

    left: int | None = None  # the number of keys before the query's position; None for no bound
    right: int | None = None
    # Makes the sequences, with room for so many, by operations of fixed shapes. None for one sequence of all tokens.
    sequences: Callable[[int], Sequences] | None = None
    has_other_keys: bool = False  # whether the keys of sequences start elsewhere than their queries
    # Raises Unfit if ids that do not ascend are no sequences. None if the host need not look; there is no padding
    # where it must.
    check: Callable[[], None] | None = None


@dataclass(frozen=True)
class Factors:
    """A score change that adds slope * distance: the distance is kv - q, or with `is_absolute` -|kv - q|."""

    slopes: Tensor  # float[H]
    is_absolute: bool = False


def band_of(mask: Mask, size: Size) -> Band | None:
    """Return a mask as a window at these sizes, None if it is none or its definition does not say."""
    if mask._definition is AND:
        bands = [band_of(m, size) for m in mask.params["masks"]]
        return None if None in bands else intersection([b for b in bands if b is not None])
    return cast("Band | None", _asked(mask, size, mask._definition.band, _check_band))


def documents_of(mask: Mask, size: Size) -> Band | None:
    """Return the documents inside which a mask shows pairs as a band without bounds, whatever else the mask hides.

    None says that a batch element is one sequence. Raises Unfit if there are documents that are no sequences end to
    end, with as many queries as keys, inside which all pairs lie. No value of a tensor is read.
    """
    if mask._definition is AND:
        found = [d for m in mask.params["masks"] if (d := documents_of(m, size)) is not None]
        if len(found) > 1:
            raise Unfit("it knows where documents start for one set of documents, and this mask has several")
        return found[0] if found else None
    by_library, band = mask._definition.by_library, None
    if not by_library or mask.name == "document":
        band = band_of(mask, size)
    elif mask.name == "packed":
        places = mask._checked(size)
        is_nested = holds_documents(places.pop("inner"))
        band = None if is_nested or not is_zero(places.get("q_start", 0)) else in_sequences(Band(), size, **places)
    if not holds_documents(mask) and (band is None or band.sequences is None):
        return None
    if band is None or band.has_other_keys or not is_zero(size.q_offset):
        raise Unfit(
            "it must know where documents start: pass them by `packed`, or by ids of documents that lie end to end, "
            "inside torch.compile with contiguous=True; as a whole mask or joined to others by `&`, for as many "
            "queries as keys"
        )
    return replace(band, left=None, right=None)


def holds_documents(mask: Any) -> bool:
    """Return whether a mask of the library that packs documents is a mask, or inside it."""
    return isinstance(mask, Mask) and any(map(packs_documents, mask._inside()))


def packs_documents(mask: Any) -> bool:
    """Return whether a mask is one of the library by which documents are packed."""
    return bool(mask._definition.by_library and mask.name in _OF_DOCUMENTS)


def may_be_band(mask: Mask) -> bool:
    """Return whether a mask is of a kind that bands say, alone or with the lengths of its sequences."""
    if mask._definition is AND:
        return all(map(may_be_band, mask.params["masks"]))
    if mask._definition.by_library and mask.name == "padding":
        return True
    inner = [m for m in mask._operands() if isinstance(m, Mask)]
    return mask._definition.band is not None and all(map(may_be_band, inner))


def is_zero(number: Any) -> bool:
    return isinstance(number, int) and number == 0


def counts_of(mask: Mask, size: Size, block_size: tuple[int, int]) -> Tensor | None:
    """Return how many pairs of each block a mask shows, None if its definition does not say."""
    counts = mask._definition.counts
    if counts is None or size.starts is not None:
        return None
    blocks = [-(-length // n) for length, n in zip((size.q_len, size.kv_len), block_size, strict=True)]

    def check(found: Any) -> None:
        check_returned("counts", found, Tensor, "a tensor or None")
        sizes = ((1, size.batch), (1, size.heads), *((n,) for n in blocks))
        fits = found.ndim == 4 and all(n in allowed for n, allowed in zip(found.shape, sizes, strict=True))
        if found.is_floating_point() or not fits:
            wanted = f"integers [batch or 1, heads or 1, {blocks[0]}, {blocks[1]}]"
            raise ValueError(f"`counts` must return {wanted} or None, got {in_message(found)}.")

    def hook(size: Size, **arguments: Any) -> Any:
        return counts(size, block_size, **arguments)

    return cast("Tensor | None", _asked(mask, size, hook, check))


def cap_of(score: Score, size: Size) -> float | None:
    return cast("float | None", _asked(score, size, score._definition.cap, _check_cap))


def factors_of(score: Score, size: Size) -> Factors | None:
    return cast("Factors | None", _asked(score, size, score._definition.factors, _check_factors))


def _check_band(band: Any) -> None:
    check_returned("band", band, Band, "a flexmasks.spec.Band or None")


def _check_cap(cap: Any) -> None:
    check_returned("cap", cap, (int, float, torch.SymInt, torch.SymFloat), "a number above 0 or None")
    if not 0 < cap < math.inf:
        raise ValueError(f"`cap` must return a number above 0 or None, got {cap}.")


def _check_factors(factors: Any) -> None:
    check_returned("factors", factors, Factors, "flexmasks.spec.Factors or None")


def _asked(value: Mask | Score, size: Size, hook: Callable[..., Any] | None, check: Callable[[Any], None]) -> Any:
    if hook is None:
        return None
    arguments = value._checked(size)
    try:
        found = hook(size, **arguments)
        if found is not None:
            check(found)
        return found
    except (ValueError, TypeError) as error:
        raise value._named(error) from None


def intersection(bands: list[Band]) -> Band | None:
    """Return the band of pairs that all bands show.

    The result is None if more than one band has sequences, or if the keys of sequences start elsewhere than their
    queries and another band has a bound: distances inside sequences are then not those of positions.
    """
    lefts = [b.left for b in bands if b.left is not None]
    rights = [b.right for b in bands if b.right is not None]
    with_sequences = [b for b in bands if b.sequences is not None]
    if len(with_sequences) > 1 or (with_sequences and with_sequences[0].has_other_keys and (lefts or rights)):
        return None
    of_all = with_sequences[0] if with_sequences else Band()
    return replace(of_all, left=min(lefts, default=None), right=min(rights, default=None))


def in_sequences(
    band: Band | None,
    size: Size,
    offsets: Tensor,
    kv_offsets: Tensor | None = None,
    q_start: int | Tensor = 0,
    max_length: int | None = None,
) -> Band | None:
    """Return the band inside sequences that are laid end to end in each batch element.

    No value of a tensor is read. The result is None if the band is None or has sequences already, or if only values
    could decide whether kernels show the same pairs.

    offsets, kv_offsets: int[N + 1], the starts of each sequence's queries and keys, from 0, and the end of the last
        one; kv_offsets is offsets by default.
    q_start: the position of each sequence's first query; its first key is at 0.
    max_length: an upper bound of the lengths of sequences.
    """
    if band is None or band.sequences is not None:
        return None
    # Kernels count windows from the end of a sequence's queries and the end of its keys.
    ends_are_aligned = kv_offsets is None and isinstance(q_start, int) and q_start == 0
    if (band.left, band.right) != (None, None) and not ends_are_aligned:
        return None
    sequences = functools.partial(_with_padding, size, offsets, kv_offsets, max_length)
    return replace(band, sequences=sequences, has_other_keys=kv_offsets is not None)


def in_documents(size: Size, document_ids: Tensor, most: int | None = None) -> Band | None:
    """Return the band of documents that lie end to end, as is promised or as a look at their ids can show later.

    document_ids: int[S] or int[B, S], of each query and key.
    most: the number of documents in a row that is promised, None if nothing is.
    """
    if not size.q_len == size.kv_len == document_ids.shape[-1]:
        return None
    if most is not None:
        return Band(sequences=functools.partial(_of_promised_ids, size.batch, document_ids, most))
    if not can_be_read(document_ids):
        return None
    sequences = functools.partial(_of_ids, size.batch, document_ids)
    return Band(sequences=sequences, check=functools.partial(_check_ids, document_ids))


def _of_ids(batch: int, ids: Tensor, room: int) -> Sequences:
    ids = ids.expand(batch, -1)
    starts = _starts_of(ids)
    count = starts.sum()
    count = torch.where((ids[:, 1:] < ids[:, :-1]).any(), -count, count)
    laid = _laid(starts, room)
    return Sequences(laid, laid, count.int().expand(2))


def _of_promised_ids(batch: int, ids: Tensor, most: int, room: int) -> Sequences:
    starts = _starts_of(ids.expand(batch, -1))
    laid = _laid(starts, batch * most)
    before_padding = torch.where(starts.sum() > batch * most, -1, starts.shape[1])
    return Sequences(laid, laid, before_padding.expand(2).int())


def _starts_of(ids: Tensor) -> Tensor:
    first = torch.ones(ids.shape[0], 1, dtype=torch.bool, device=ids.device)
    return torch.cat([first, ids[:, 1:] != ids[:, :-1]], 1)


def _laid(starts: Tensor, room: int) -> Tensor:
    """The places where `starts` is true, and behind them the number of tokens up to a length of `room` + 1."""
    at = torch.nonzero_static(starts.flatten(), size=room).flatten()
    at = torch.cat([at, torch.full((1,), -1, device=at.device)])
    # By torch's own `fill_value` a graph would be one for this number of tokens.
    return torch.where(at < 0, starts.numel(), at).int()


def changes_in(ids: Tensor) -> Tensor:
    """Return how often another id follows in each row, int64 [...] of ids [..., S]."""
    return (ids[..., 1:] != ids[..., :-1]).sum(-1)


def lie_end_to_end(ids: Tensor) -> bool:
    """Return whether equal ids of a row [..., S] lie next to each other. The host reads values."""
    return torch.equal(changes_in(ids), changes_in(ids.sort().values))


def _check_ids(ids: Tensor) -> None:
    if not lie_end_to_end(ids):
        raise Unfit("it knows documents that lie end to end, and one has tokens on both sides of another one")


def _with_padding(
    size: Size, offsets: Tensor, kv_offsets: Tensor | None, max_length: int | None, room: int
) -> Sequences:
    """Return the sequences of all batch elements without reading a value.

    The queries and keys behind the last sequence of a batch element follow in sequences of at most `max_length` tokens,
    the same number for both.
    """
    lengths = size.q_len, size.kv_len
    longest = [max(1, n if max_length is None else min(n, max_length)) for n in lengths]
    count = max(-(-n // most) for n, most in zip(lengths, longest, strict=True))
    starts = offsets.long()
    q = _lay(starts, size.batch, size.q_len, longest[0], count)
    if kv_offsets is None and size.q_len == size.kv_len:
        return Sequences(q, q, starts[-1:].expand(2).int())
    kv_starts = starts if kv_offsets is None else kv_offsets.long()
    kv = _lay(kv_starts, size.batch, size.kv_len, longest[1], count)
    return Sequences(q, kv, torch.stack([starts[-1], kv_starts[-1]]).int())


def _lay(starts: Tensor, batch: int, length: int, longest: int, count: int) -> Tensor:
    """The starts of sequences laid end to end over batch elements of `length` tokens, and the end of the last one.

    `count` sequences of at most `longest` tokens hold the padding of each batch element.
    """
    steps = torch.arange(1, count + 1, device=starts.device) * longest
    ends = torch.cat([starts[1:], (starts[-1:] + steps).clamp(max=length)])
    first = torch.arange(batch, device=starts.device)[:, None] * length
    return torch.cat([starts[:1], (first + ends).flatten()]).int()
