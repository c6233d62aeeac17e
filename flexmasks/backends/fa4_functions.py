"""The functions of FlashAttention 4 with their gradients, also as operators of torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmasks.backends.call import ONCE_ONLY, differentiated_once
from flexmasks.backends.fa4_package import NUMBERS, interface, is_small
from flexmasks.devices import nvidia_major, on_gpu

# Queries and keys of a tile, and the head sizes for which flash-attn-4 takes tiles of as many keys.
_SMALL_TILE, _SIZES_OF_SMALL_TILE = (64, 128), (64, 128)


def window_arguments(left: int | None, right: int | None) -> dict[str, Any]:
    """Return the kernel's arguments for the keys at distances -left..right of a query. None is no limit."""
    if left is None and right == 0:
        return {"causal": True}
    limits = {"window_size_left": left, "window_size_right": right}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _hide_padding(x: Tensor, length: int, counts: Tensor, place: int, value: float = 0.0) -> None:
    """Write a value behind the first `counts[place]` tokens of each row of `length` tokens, or NaN if that is negative.

    x: [tokens, H, D], rows end to end.
    """
    if on_gpu(x.device):
        from flexmasks.kernels.padding_kernel import hide_padding  # loads Triton

        hide_padding(x, length, counts, place, value)
    else:
        token = torch.arange(len(x), device=x.device) % length
        x.masked_fill_((token >= counts[place])[:, None, None], torch.where(counts[place] < 0, torch.nan, value))


class Attend(torch.autograd.Function):
    """Attention by the kernel.

    q and k are [B, S, H, D] and v is [B, S, H, Dv], or they are [tokens, H, D] and [tokens, H, Dv].
    The output is [B, S, H, Dv] or [tokens, H, Dv], the lse [B, H, S] or [H, tokens].

    counts: int32[2], the numbers of queries and of keys in each batch element behind which there is padding; None if
        there is none. All sequences are then such that padding meets no other token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        arguments: dict[str, Any],
        counts: Tensor | None,
        cap: float | None,
        in_order: bool,
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, arguments, cap, sinks, counts)
        ctx.save_for_backward(q, k, v, out, lse, sinks, counts)
        ctx.arguments, ctx.cap, ctx.in_order = arguments, cap, in_order
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, sinks, counts = ctx.saved_tensors
        if d_out is None and d_lse is None:
            return (None,) * 8
        q, k, v, out, lse = saved
        d_out = torch.zeros_like(out) if d_out is None else d_out
        given = ctx.arguments, ctx.cap, sinks, counts, ctx.in_order
        gradients: tuple[Tensor | None, ...] = backward(q, k, v, out, lse, d_out, d_lse, *given)
        if torch.is_grad_enabled():
            gradients = differentiated_once("fa4", gradients, q, k, v)
        return *gradients, *[None] * (8 - len(gradients))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: dict[str, Any],
    cap: float | None,
    sinks: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and lse; the tensors have the shapes of `Attend`."""
    functions = {}
    if cap is not None:
        scale = arguments.get("softmax_scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        arguments = {**arguments, "softmax_scale": scale / cap}
        functions = {"score_mod": _softcap_of_share(cap)}
    given = _tile_of_few(q, k, v) | ({} if sinks is None else {"learnable_sink": sinks})
    out, lse = interface()._flash_attn_fwd(q, k, v, return_lse=True, **arguments, **functions, **given)[:2]
    if counts is not None:
        length = arguments["max_seqlen_q"]
        _hide_padding(out, length, counts, 0)
        _hide_padding(lse.t()[..., None], length, counts, 0, -torch.inf)
    return out, lse


def _tile_of_few(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Return the argument for a tile of fewer rows where it holds all queries that read a head's keys, if there is one.

    It takes 0.65 to 1 of the time (H200). The bits of a row are the same: it reads as many keys at a time.
    """
    rows = q.shape[1] * q.shape[2] // k.shape[-2] if q.ndim == 4 else math.inf
    if rows > _SMALL_TILE[0] or nvidia_major(q.device) != 9:
        return {}
    return {"tile_mn": _SMALL_TILE} if q.shape[-1] == v.shape[-1] in _SIZES_OF_SMALL_TILE else {}


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    arguments: dict[str, Any],
    cap: float | None,
    sinks: Tensor | None = None,
    counts: Tensor | None = None,
    in_order: bool = False,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, and of sinks if there are some.

    in_order: whether to add the gradients in order, where the GPU's kernel can.
    """
    functions = {}
    if cap is not None:
        functions = dict(zip(("score_mod", "score_mod_bwd"), _softcap(cap), strict=True))
    given = {} if sinks is None else {"learnable_sink": sinks}
    deterministic = in_order and not is_small(q.device)
    tensors = (q, k, v, out, d_out, lse)
    gradients = interface()._flash_attn_bwd(
        *tensors, **arguments, **functions, **given, dlse=d_lse, deterministic=deterministic
    )
    if counts is not None:
        _hide_padding(gradients[0], arguments["max_seqlen_q"], counts, 0)
        for gradient in gradients[1:3]:
            _hide_padding(gradient, arguments["max_seqlen_k"], counts, 1)
    return tuple(gradients[: 3 if sinks is None else 4])


# What both operators take, as schemas of torch have it.
_OF_SEQUENCES = "Tensor? sinks, Tensor? counts, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_HOW = ", ".join([f"{kind} {name}=None" for name, kind in NUMBERS.items()]) + ", float? cap=None, bool in_order=False"


def _operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    return torch.library.custom_op(f"flexmasks::{name}", mutates_args=(), device_types="cuda", schema=schema)


def _given(starts: tuple[Tensor | None, ...], numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the kernel, without those that are None."""
    arguments = {**dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True)), **numbers}
    return {name: value for name, value in arguments.items() if value is not None}


@_operator(
    "fa4_forward",
    f"(Tensor q, Tensor k, Tensor v, {_OF_SEQUENCES}, *, {_HOW}, bool lse_may_learn=False) -> (Tensor, Tensor)",
)
def traced_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, counts: Tensor | None, *starts: Tensor | None,
    cap: float | None = None, in_order: bool = False, lse_may_learn: bool = False, **numbers: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output and lse, as `Attend` does.

    lse_may_learn: the gradient of the lse counts.
    """
    return forward(q, k, v, _given(starts, numbers), cap, sinks, counts)


@traced_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any, **how: Any) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(shape, dtype=torch.float32)


@_operator(
    "fa4_backward",
    f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, {_OF_SEQUENCES}, *, {_HOW}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def traced_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
    sinks: Tensor | None, counts: Tensor | None, *starts: Tensor | None,
    cap: float | None = None, in_order: bool = False, **numbers: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and sinks, the last one empty without sinks."""
    given = _given(starts, numbers), cap, sinks, counts, in_order
    dq, dk, dv, *d_sinks = backward(q, k, v, out, lse, d_out, d_lse, *given)
    return dq, dk, dv, d_sinks[0] if d_sinks else lse.new_empty(0)


@traced_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
    sinks: Tensor | None, *_: Any, **how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_sinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:])
    ctx.how = dict(keyword_only_inputs)
    ctx.lse_may_learn = ctx.how.pop("lse_may_learn")


def _differentiate(ctx: Any, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    slopes = d_out, d_lse if ctx.lse_may_learn else None
    dq, dk, dv, d_sinks = traced_backward(*saved[:5], *slopes, *saved[5:], **ctx.how)
    return dq, dk, dv, None if saved[5] is None else d_sinks, None, None, None


def _refuse_twice(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    raise RuntimeError(ONCE_ONLY.format("fa4"))


traced_forward.register_autograd(_differentiate, setup_context=_save)


traced_backward.register_autograd(_refuse_twice)


@functools.lru_cache(maxsize=64)
def _softcap_of_share(cap: float) -> Any:
    """Return cap * tanh(share) as a function in CuTe, for shares score / cap.

    The kernel's scale divides by the cap, which saves a multiplication of each pair. In the backward pass it would
    enlarge the gradients that are kept in half precision.
    """
    import cutlass.cute as cute

    @cute.jit
    def softcap(share: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return cap * cute.math.tanh(share, fastmath=True)

    return softcap


@functools.lru_cache(maxsize=64)
def _softcap(cap: float) -> tuple[Any, Any]:
    """Return cap * tanh(score / cap) and its derivative, as functions in CuTe.

    FlashAttention's own soft-cap is slow because it divides exactly; both use the GPU's tanh instruction.
    """
    import cutlass.cute as cute

    inverse_cap = 1 / cap

    @cute.jit
    def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return cap * cute.math.tanh(score * inverse_cap, fastmath=True)

    @cute.jit
    def derivative(
        grad: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
    ) -> Any:
        tanh = cute.math.tanh(score * inverse_cap, fastmath=True)
        return grad * (1.0 - tanh * tanh)

    return softcap, derivative
