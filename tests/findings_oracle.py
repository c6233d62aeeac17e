"""What is true of a mask [B, H, Q, KV], which findings of `flexmasks.check` must say."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from flexmasks import Findings


def shown_by(seen: Tensor, starts: list[int], ids: Tensor | None = None) -> dict[str, Tensor]:
    """Return the pairs that show each kind of finding, of a mask [B, H, Q, KV]. Its queries start at `starts`, by batch
    element, and `ids` are the documents of positions.
    """
    batch, _, q_len, kv_len = seen.shape
    q = torch.tensor(starts).expand(batch)[:, None, None, None] + torch.arange(q_len)[:, None]
    kv = torch.arange(kv_len)
    pairs = {
        "sees the future": seen & (kv > q),
        "does not see itself": ~seen & (kv == q),
        "sees nothing": ~seen.any(3, keepdim=True),
        "seen by nobody": ~seen.any(2, keepdim=True),
        "differs by batch element": seen ^ seen[:1],
        "differs by head": seen ^ seen[:, :1],
    }
    if ids is not None:
        b = torch.arange(batch)[:, None, None, None]
        rows = ids.expand(batch, -1)
        pairs["crosses a document"] = seen & (rows[b, q] != rows[b, kv])
    return {kind: found.expand(seen.shape) for kind, found in pairs.items()}


def verify(found: Findings, seen: Tensor, starts: list[int], ids: Tensor | None = None) -> None:
    """Check that findings are all that is true of a mask [B, H, Q, KV], each with a pair that shows it."""
    for kind, pairs in shown_by(seen, starts, ids).items():
        finding = found.of(kind)
        assert (finding is not None) == bool(pairs.any()), (kind, found)
        if finding is not None:
            assert finding.pair is not None
            assert pairs[finding.pair], finding
            of_what = pairs.all(2) if kind == "seen by nobody" else pairs.any(3)  # keys or rows
            count, total = (int(n.replace(",", "")) for n in re.findall(r"[\d,]+", finding.words)[:2])
            assert count * of_what.numel() == total * int(of_what.sum()), finding
    for kind, n, other in (("ignores b", 0, "differs by batch element"), ("ignores h", 1, "differs by head")):
        assert (found.of(kind) is not None) == (seen.shape[n] > 1 and found.of(other) is None)
    nothing = found.of("sees nothing")
    assert (nothing is not None and nothing.severity == "error") == (not seen.any())
