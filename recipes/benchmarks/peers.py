"""Attention of other libraries, as functions of q, k and v.

What they need of a mask is made before the first call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.loops import compiled_flex, indices
from flexmasks.attention import block_mask, dense_mask
from flexmasks.kernels.operators import separate
from flexmasks.spec.parameters import Size
from flexmasks.spec.values import Mask, Score

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ready_flex(mask: Mask, score: Score | None, size: Size, grouped: bool = False) -> Attend:
    """Return compiled flex_attention with a ready BlockMask.

    size: sizes of the call; q_len and kv_len are the same.
    """
    made = block_mask(mask, size.q_len, batch=size.batch, heads=size.heads, device=size.device)
    score_mod = None if score is None else score._bind(score._resolve(size))
    compiled = compiled_flex()
    if size.device.type != "cuda":
        return lambda q, k, v: separate(compiled(q, k, v, score_mod, made, enable_gqa=grouped))
    return lambda q, k, v: compiled(q, k, v, score_mod, made, enable_gqa=grouped)


def dense_sdpa(
    mask: Mask, score: Score | None, size: Size, grouped: bool = False, dtype: torch.dtype = torch.float32
) -> Attend:
    """Return SDPA with a ready mask as a tensor.

    score: a score change that adds to the score; it is added to the mask, which then has the dtype of q.
    """
    visible = dense_mask(mask, size.q_len, batch=size.batch, heads=size.heads, device=size.device)
    if score is not None:
        score_mod = score._bind(score._resolve(size))
        zero = torch.zeros((), device=size.device)
        added = score_mod(zero, *indices(1, size.heads, size.q_len, size.device))
        visible = torch.where(visible, added, -torch.inf).to(dtype)
    return functools.partial(F.scaled_dot_product_attention, attn_mask=visible, enable_gqa=grouped)


def pinned(backend: SDPBackend, causal: bool) -> Attend:
    """Return SDPA by one of its kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def other_libraries(fa4_arguments: dict[str, Any], lengths: Tensor | None) -> dict[str, Attend]:
    """Return FlashAttention 4 if installed, and torch's varlen attention of packed documents."""
    try:
        fa4 = importlib.import_module("flash_attn.cute")
    except Exception:  # not installed, or not made for this machine
        fa4 = None
    if lengths is None:
        return {} if fa4 is None else {"FA4": by_token(functools.partial(fa4.flash_attn_func, **fa4_arguments))}
    calls: dict[str, Attend] = {}
    starts = F.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    if fa4 is not None:
        limits = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        calls["FA4, varlen"] = by_token(
            functools.partial(fa4.flash_attn_varlen_func, causal=True, **limits), varlen=True
        )
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return calls
    by_window = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if by_window else {"is_causal": True}
    calls["torch varlen_attn"] = by_token(
        lambda q, k, v: varlen_attn(q, k, v, starts, starts, longest, longest, **causal), varlen=True
    )
    return calls


def by_token(call: Callable[..., Any], varlen: bool = False) -> Attend:
    """Adapt a call of [batch, length, heads, size], or [tokens, heads, size]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = (x.transpose(1, 2) for x in (q, k, v))
        returned = call(*(x[0] for x in given)) if varlen else call(*given)
        out: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return (out[None] if varlen else out).transpose(1, 2)

    return attend
