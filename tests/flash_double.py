"""What FlashAttention 4 computes, in plain torch: its functions take its place in tests on a CPU."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import attend
from torch import Tensor

from flexmasks.backends import fa4_functions, fa4_package


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output [B, H, Q, D] and lse with one more key, whose score is the sink, and whose value is 0."""
    if sinks is None:
        return out, lse
    finite = torch.where(lse == -math.inf, -1e30, lse)
    total = torch.logaddexp(finite, sinks[:, None])
    return out * (finite - total).exp()[..., None], torch.where(total > -1e29, total, -math.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Do what FlashAttention does with tokens [total, H, D], sequence by sequence, or with [B, S, H, D]."""
    if q.ndim == 4:
        rows = [_in_sequence(*(x[i] for x in (q, k, v)), arguments) for i in range(len(q))]
        out, lse = (torch.stack(parts) for parts in zip(*rows, strict=True))
        by_head, lse = with_sinks(out.transpose(1, 2), lse, arguments.get("learnable_sink"))
        return by_head.transpose(1, 2).contiguous(), lse.contiguous()
    starts, kv_starts = arguments["cu_seqlens_q"].tolist(), arguments["cu_seqlens_k"].tolist()
    assert (starts[-1], kv_starts[-1]) == (len(q), len(k))
    parts = []
    for a, b, c, d in zip(starts, starts[1:], kv_starts, kv_starts[1:], strict=False):
        assert b - a <= arguments["max_seqlen_q"]
        assert d - c <= arguments["max_seqlen_k"]
        if b > a:
            parts.append(_in_sequence(q[a:b], k[c:d], v[c:d], arguments))
    out, lse = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)
    by_head, by_token = with_sinks(out.transpose(0, 1)[None], lse[None], arguments.get("learnable_sink"))
    return by_head[0].transpose(0, 1).contiguous(), by_token[0].contiguous()


def _in_sequence(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return output [S, H, D] and lse [H, S]."""
    if not len(k):
        return q.new_zeros(len(q), q.shape[1], v.shape[2]), torch.full((q.shape[1], len(q)), -math.inf, dtype=q.dtype)
    left, right = (arguments.get(f"window_size_{side}") for side in ("left", "right"))
    least, most = (-math.inf if left is None else -left), (math.inf if right is None else right)
    most = 0 if arguments.get("causal") else most
    distance = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))  # the ends are aligned
    out, lse = attend(*(x[None].transpose(1, 2) for x in (q, k, v)), (distance >= least) & (distance <= most))
    return out[0].transpose(0, 1), lse[0]


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, lse: Tensor, *, dlse: Tensor | None, **arguments: Any
) -> tuple[Tensor, ...]:
    """Do what FlashAttention does for the gradients. Keys that meet no query get none, but anything."""
    sinks = arguments.pop("learnable_sink", None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    more = {} if sinks is None else {"learnable_sink": leaves[3]}
    with torch.enable_grad():
        out, lse = forward(*leaves[:3], **arguments, **more)
        value = (out * d_out).sum() + (0 if dlse is None else (lse * dlse)[~lse.isinf()].sum())
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    return tuple(torch.full_like(x, 7.0) if g is None else g for x, g in zip(leaves, gradients, strict=True))


def replace(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Replace FlashAttention's functions by those of this file, or by others."""
    given = {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward, **functions}
    monkeypatch.setattr(fa4_functions, "interface", lambda: SimpleNamespace(**given))
    monkeypatch.setattr(fa4_functions, "is_small", lambda device: False)
    monkeypatch.setattr(fa4_package, "knows_sinks", lambda: True)
