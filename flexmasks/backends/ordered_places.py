"""Where the tokens of a call stand in their sequences, and in the tiles of `flexmasks.backends.ordered`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmasks.plans.mask_plan import GivenPlan, MaskPlan
from flexmasks.plans.sizes import Offset, sized, starts_of, unread
from flexmasks.spec.bands import band_of, packs_documents
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask

QUERIES, KEYS = 32, 128  # of a tile


class Places(NamedTuple):
    """The sequence of each token of a call, -1 for none, and its position, counted from the first key of the sequence.

    All are int64 [B, Q] or [B, KV].
    """

    q_sequence: Tensor
    q_position: Tensor
    kv_sequence: Tensor
    kv_position: Tensor


def why_unknown(plan: MaskPlan | GivenPlan, is_traced: bool) -> str | None:
    """Return why the sequences of a mask are not known, or None."""
    if isinstance(plan, GivenPlan):
        return (
            "of block masks, only one of flexmasks.block_mask in a call without `q_offset` says where sequences start"
        )
    if is_traced and plan.opaque:
        return "where sequences start is not known of a function that only torch's tracing can read, or of bits"
    if any(_is(m, "paged") for m in plan.mask._inside()):
        return "keys in pages lie in any order; flexmasks.paged_attention puts them in their own"
    for inner in plan.mask._joined():
        band = None if inner._definition.by_library else band_of(inner, unread(plan.size, plan.offset))
        if band is not None and band.sequences is not None:
            return f"of masks with sequences it knows document, cross_document and packed, not {inner.name}"
    marked = [m for m in plan.mask._inside() if _is(m, "key_padding")]
    cutting = list(filter(packs_documents, plan.mask._inside()))
    if marked and cutting:
        return f"padding may count to a document: leave key_padding out, and give padding no place in {cutting[0].name}"
    if not all(any(m is x for x in plan.mask._joined()) for m in marked):
        return "it knows key_padding as the mask or joined to others by &, not inside another mask"
    if len(cutting) > 1:
        return f"it knows documents alone, not inside others, and the mask has {cutting[0].name} and {cutting[1].name}"
    if cutting and not any(m is cutting[0] for m in plan.mask._joined()):
        return f"it knows {cutting[0].name} as the mask or joined to others by &, not inside another mask"
    return None


def _is(mask: Any, name: str) -> bool:
    return bool(mask._definition.by_library and mask.name == name)


def places_of(mask: Mask, size: Size, offset: Offset) -> Places:
    """Return where tokens stand in the sequences of a mask, of which `why_unknown` says nothing. Values are read."""
    size = sized(size, offset)
    q_at = starts_of(offset, size.batch, size.device)[:, None] + torch.arange(size.q_len, device="cpu")
    kv_at = torch.arange(size.kv_len, device="cpu").expand(size.batch, -1)
    joined = mask._joined()
    cutting = next(filter(packs_documents, joined), None)
    if cutting is None:
        return _without_padding(joined, size, Places(torch.zeros_like(q_at), q_at, torch.zeros_like(kv_at), kv_at))
    if _is(cutting, "packed"):
        tables = [cutting._resolve(size)[name].long().expand(size.batch, -1) for name in _TABLES]
        return Places(*(t.gather(1, at) for t, at in zip(tables, (q_at, q_at, kv_at, kv_at), strict=True)))
    ids = [t.long().expand(size.batch, -1) for t in cutting._checked(size).values() if isinstance(t, Tensor)]
    numbers = torch.cat([ids[0], ids[-1]], 1).unique(return_inverse=True)[1]
    of_q, of_kv = numbers.split([ids[0].shape[1], ids[-1].shape[1]], 1)
    return Places(
        of_q.gather(1, q_at), _ranks(of_q).gather(1, q_at), of_kv.gather(1, kv_at), _ranks(of_kv).gather(1, kv_at)
    )


_TABLES = "q_sequence", "q_position", "kv_sequence", "kv_position"  # of `packed`


def _ranks(numbers: Tensor) -> Tensor:
    """Return how many equal numbers stand before each one in its row."""
    in_order, order = numbers.sort(dim=1, stable=True)
    return torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device="cpu") - torch.searchsorted(in_order, in_order)
    )


def _without_padding(joined: Sequence[Any], size: Size, places: Places) -> Places:
    """Return places that are counted from the first key of a row that is not padding."""
    for mask in joined:
        if _is(mask, "key_padding"):
            first = mask._checked(size)["attention_mask"].long().argmax(1, keepdim=True)
            kv_at = places.kv_position - first
            sequence = torch.where(kv_at < 0, -1, places.kv_sequence)
            return Places(places.q_sequence, places.q_position - first, sequence, kv_at)
    return places


class OrderedTiles(NamedTuple):
    """The tiles of a call: which token stands where, as its place in the rows of all batch elements, -1 for none.

    Tiles are in order of batch elements, sequences and positions.
    """

    q: Tensor  # int64 [tiles, 32]
    kv: Tensor  # int64 [tiles, 128]
    first: Tensor  # for each tile of queries, the first tile of keys of its sequence
    end: Tensor  # and the one behind its last

    @classmethod
    def of(cls, plan: MaskPlan) -> OrderedTiles:
        places = places_of(plan.mask, plan.size, plan.offset)
        most = int(max(places.q_sequence.max(), places.kv_sequence.max())) + 2
        is_in_none = places.q_sequence < 0  # such queries have tiles, too, and no keys
        sequences = torch.where(is_in_none, most - 1, places.q_sequence)
        positions = torch.where(is_in_none, torch.arange(plan.size.q_len, device="cpu"), places.q_position)
        q, of_q = _in_tiles(sequences, positions, most, QUERIES)
        kv, of_kv = _in_tiles(places.kv_sequence, places.kv_position, most, KEYS)
        first, end = (torch.searchsorted(of_kv, of_q, right=right) for right in (False, True))
        return cls(q, kv, first, end)


def _in_tiles(sequences: Tensor, positions: Tensor, most: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of tiles [tiles, size], and the number of the sequence of each tile."""
    tokens = (sequences >= 0).flatten().nonzero()[:, 0]
    if not len(tokens):
        return tokens.new_empty(0, size), tokens
    numbers = (sequences + torch.arange(len(sequences), device="cpu")[:, None] * most).flatten()[tokens]
    positions = positions.flatten()[tokens]
    tiles = positions // size - positions.min() // size
    many = tiles.max() + 1
    found, tile = (numbers * many + tiles).unique(return_inverse=True)
    places = torch.full((len(found), size), -1)
    places[tile, positions % size] = tokens
    return places, found // many
