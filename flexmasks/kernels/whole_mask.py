"""Whole masks of many queries, with the spans of tiles that hold all visible pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 64  # queries and keys of a tile
_SHARE_OF_WIDE = 8  # batch elements that share a bias, from which a copy of it in wide rows pays
NO_LINE, SIGNED, ABSOLUTE = 0, 1, 2  # kinds of a bias for kernels: a tensor or none, and lines over a distance


class Line(NamedTuple):
    """Numbers of pairs, slope * distance + start, of the distance key - query - shift or its absolute value."""

    slope: float
    start: float
    shift: int
    is_absolute: bool


class WholeMask(NamedTuple):
    """A mask and what is added to scores, as the kernels take them.

    visible: bool [B or 1, H or 1, Q or 1, KV or more], contiguous, as `in_wide_rows` returns it.
    key_spans, query_spans: what `spans_of` returns.
    weight, bias: None or float32 [B or 1, H or 1, Q or 1, 1] and [G, H or 1, Q or 1, KV] of any floating dtype; weight
        * bias, or bias if there is no weight, is added to the scores. B / G batch elements share a row.
    line: what stands in the place of a bias that is one.
    scale: number that q . k is multiplied by.
    is_wide: rows of the bias go on in memory to the end of the last tile of keys.
    """

    visible: Tensor
    key_spans: Tensor
    query_spans: Tensor
    weight: Tensor | None
    bias: Tensor | None
    line: Line | None
    scale: float
    is_wide: bool = False


def spans_of(visible: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """The spans of tiles that see each other, for each tile of queries and for each tile of keys, both int32 [B or 1, H
    or 1, tiles, 2]: the first tile and the end, 0 where nothing is visible. The host reads no value.

    visible: bool [B or 1, H or 1, Q or 1, KV].
    """
    rows, keys = visible.shape[-2:]
    below = -rows % TILE if rows > 1 else 0
    padded = F.pad(visible, (0, -keys % TILE, 0, below)) if below or keys % TILE else visible
    tiles = padded.unflatten(-1, (-1, TILE)).any(-1)
    if rows > 1:
        tiles = tiles.unflatten(-2, (-1, TILE)).any(-2)
    tiles = tiles.expand(*tiles.shape[:2], -(-queries // TILE), -1)
    return _spans(tiles), _spans(tiles.transpose(-1, -2))


def with_bias(mask: WholeMask, bias: Tensor, batch: int) -> WholeMask:
    """Return a mask with a bias, whose rows go on in memory to the end of the last tile if it pays: kernels then read
    16 bytes at once.

    batch: the batch elements of the call.
    """
    keys = bias.shape[3]
    is_wide = batch >= _SHARE_OF_WIDE * bias.shape[0] and 0 < keys % TILE < keys
    return mask._replace(bias=F.pad(bias, (0, -keys % TILE))[..., :keys] if is_wide else bias, is_wide=is_wide)


def in_wide_rows(visible: Tensor) -> Tensor:
    """A mask whose rows go on to the end of the last tile of keys, and hide what is there: kernels read 8 bytes at
    once, without waiting for them. One row for all queries stays as it is.

    visible: bool [B or 1, H or 1, Q or 1, KV], contiguous.
    """
    beyond = -visible.shape[3] % TILE
    return F.pad(visible, (0, beyond)) if visible.shape[2] > 1 and beyond else visible


def _spans(tiles: Tensor) -> Tensor:
    place = torch.arange(tiles.shape[-1], dtype=torch.int32, device=tiles.device)
    first = torch.where(tiles, place, tiles.shape[-1]).amin(-1)
    end = torch.where(tiles, place + 1, 0).amax(-1)
    return torch.stack([first, end], -1).int()
