"""What is known of the mask of a layer's call."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexmasks import Mask, Picture, dense_mask, draw, get_mask
from flexmasks.extend import Blocks


@dataclass(frozen=True, repr=False)
class LayerMask:
    """A mask with the sizes of a layer's call; printed, or displayed by Jupyter, it is its picture.

    mask: the mask.
    q_offset: the position of the first query, as in `flexmasks.attention`.
    q_len, kv_len, batch, heads: the numbers of queries, keys, batch elements and heads of queries.
    rows: the queries that a probe looked at; at others the mask is empty. None without a probe.
    """

    mask: Mask
    q_offset: int | tuple[int, ...]
    q_len: int
    kv_len: int
    batch: int
    heads: int
    rows: tuple[int, ...] | None = None

    @functools.cached_property
    def blocks(self) -> Blocks:
        """Return the counts of its blocks of 128 x 128, over all batch elements."""
        return self.mask.blocks(self.q_len, self.kv_len, **self.extents)

    @property
    def sparsity(self) -> float:
        """Return the share of all pairs in blocks that kernels skip, from 0 to 1."""
        return self.blocks.sparsity

    def draw(self, b: int = 0, h: int = 0, block_size: int | tuple[int, int] | None = None) -> Picture:
        """Return the picture of a batch element and head, as `flexmasks.draw`."""
        return draw(self.mask, self.q_len, self.kv_len, b=b, h=h, block_size=block_size, **self.extents)

    def dense(self, device: torch.device | str) -> Tensor:
        """Return the mask as booleans, [batch or 1, heads or 1, q_len, kv_len]."""
        return dense_mask(self.mask, self.q_len, self.kv_len, device=device, **self.extents)

    @property
    def extents(self) -> dict[str, Any]:
        """The arguments `batch`, `heads` and `q_offset` of calls with the mask."""
        return {"batch": self.batch, "heads": self.heads, "q_offset": self.q_offset}

    def title(self) -> str:
        """Return the mask and its sizes."""
        probed = "" if self.rows is None else f", probed at {len(self.rows):,} queries"
        return f"{self.mask!r}, {self.q_len:,} queries, {self.kv_len:,} keys, batch {self.batch}{probed}"

    def __repr__(self) -> str:
        return f"{self.title()}\n{self.draw().text()}"

    def _repr_html_(self) -> str:
        return f"<div>{self.draw().svg()}</div>"


def layer_of_pairs(visible: Tensor, rows: tuple[int, ...] | None = None) -> LayerMask:
    """Return the mask that shows these pairs, bool [B, H, Q, KV]: a causal mask, a window or a full one, with documents
    and padding if there are such, or else the pairs as data.
    """
    batch, heads, q_len, kv_len = visible.shape
    if heads > 1 and bool((visible == visible[:, :1]).all()):
        visible = visible[:, :1]
    q, kv = visible.any(0).any(0).nonzero(as_tuple=True)
    # The last query of a causal mask sees itself at last, also in front of the free places of a static cache.
    first = max(int(kv.amax()) - q_len + 1, 0) if len(kv) and kv_len > q_len else 0
    distance = torch.arange(first, first + q_len, device=q.device)[:, None] - torch.arange(kv_len, device=q.device)
    low, high = (int(x) for x in distance[q, kv].aminmax()) if len(kv) else (1, 0)
    windows = [get_mask("full"), get_mask("causal")]
    if low <= 0 < high:
        windows.append(get_mask("local", left=high, right=-low) if low else get_mask("sliding_window", window=high))
    padding = get_mask("key_padding", attention_mask=visible.any(1).any(1))
    others: list[list[Mask]] = [[], [padding]]
    if q_len == kv_len:
        seen, places = visible.any(1), torch.arange(q_len, device=q.device)
        sees = seen.any(-1)
        # A document starts where no earlier query sees a key from there on, and no later one a key before.
        first_keys = torch.where(sees, seen.byte().argmax(-1), kv_len).flip(-1).cummin(-1).values.flip(-1)
        last_keys = torch.where(sees, kv_len - 1 - seen.flip(-1).byte().argmax(-1), -1).cummax(-1).values
        starts = (first_keys >= places) & (last_keys.roll(1, -1) < places)
        documents = get_mask("document", document_ids=starts.cumsum(-1))
        others += [[documents], [documents, padding]]
    found = get_mask("dense", visible=visible)
    for window, other in ((window, other) for other in others for window in windows):
        mask = functools.reduce(operator.and_, other if other and window.name == "full" else [window, *other])
        shown = dense_mask(mask, q_len, kv_len, batch=batch, device=visible.device, q_offset=first)
        if bool((shown == visible).all()):
            found = mask
            break
    return LayerMask(found, first, q_len, kv_len, batch, heads, rows)
