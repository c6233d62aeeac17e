"""FlashAttention 4 called directly, for the masks and scores that its kernels have themselves."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmasks.dense import Dense, Sequences


@dataclass(frozen=True)
class Direct:
    """A call but for q, k and v."""

    dense: Dense
    sequences: Sequences | None
    scale: float | None
    cap: float | None  # of a soft-cap
    with_lse: bool

    @property
    def nbytes(self) -> int:
        return 0 if self.sequences is None else self.sequences.nbytes

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output [B, H, Q, D], and lse [B, H, Q] where it is wanted."""
        k, v = self.dense.cut(k), self.dense.cut(v)
        batch, _, q_len, _ = q.shape
        told = self._told(q_len, k.shape[2])
        laid = [x.transpose(1, 2) for x in (q, k, v)]
        lay = self.sequences
        if lay is not None:
            laid = [x.flatten(0, 1)[:n] for x, n in zip(laid, (lay.used[0], lay.used[1], lay.used[1]), strict=True)]
        out, lse = _Attend.apply(*laid, told, self.cap)
        if lay is not None:
            rest = batch * q_len - lay.used[0]
            if rest:
                out, lse = F.pad(out, (0, 0, 0, 0, 0, rest)), F.pad(lse, (0, rest), value=-torch.inf)
            out = out.unflatten(0, (batch, q_len))
            lse = lse.unflatten(1, (batch, q_len)).transpose(0, 1)
        return out.transpose(1, 2), lse if self.with_lse else None

    def _told(self, q_len: int, kv_len: int) -> dict[str, Any]:
        """Windows as FlashAttention counts them: with the last query at the last key."""
        shift = 0 if self.sequences is not None else self.dense.offset - (kv_len - q_len)
        left, right = self.dense.left, self.dense.right
        told: dict[str, Any] = {"softmax_scale": self.scale}
        if left is not None:
            told["window_size_left"] = left - shift
        if right is not None and right + shift == 0:
            told["causal"] = True
        elif right is not None:
            told["window_size_right"] = right + shift
        if "causal" in told and left is not None:
            told = {**told, "causal": False, "window_size_right": 0}
        if self.sequences is not None:
            lay = self.sequences
            told |= {"cu_seqlens_q": lay.q, "cu_seqlens_k": lay.kv}
            told |= {"max_seqlen_q": lay.longest[0], "max_seqlen_k": lay.longest[1]}
        return told


class _Attend(torch.autograd.Function):
    """q, k, v [B, S, H, D] or [tokens, H, D]; the output alike, lse [B, H, S] or [H, tokens]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, told: dict[str, Any], cap: float | None
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        change = {} if cap is None else {"score_mod": _softcap(cap)[0]}
        out, lse = _flash_attn_fwd(q, k, v, return_lse=True, **told, **change)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.told, ctx.cap = told, cap
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        from flash_attn.cute.interface import _flash_attn_bwd

        q, k, v, out, lse = ctx.saved_tensors
        if d_out is None and d_lse is None:
            return None, None, None, None, None
        change = {} if ctx.cap is None else dict(zip(("score_mod", "score_mod_bwd"), _softcap(ctx.cap), strict=True))
        repeatable = torch.are_deterministic_algorithms_enabled()
        repeatable = repeatable and not torch.is_deterministic_algorithms_warn_only_enabled()
        d_out = torch.zeros_like(out) if d_out is None else d_out
        given = (q, k, v, out, d_out, lse)
        found = _flash_attn_bwd(*given, **ctx.told, **change, dlse=d_lse, deterministic=repeatable)[:3]
        if torch.is_grad_enabled():
            found = _Last.apply(q, k, v, *found)
        return *found, None, None


class _Last(torch.autograd.Function):
    """The gradients as they are, which have none themselves; a derivative of them is an error and not zero."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return dq, dk, dv

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(
            "flexmasks.attention: backend 'fa4' cannot be differentiated twice; pass backend='reference', which can."
        )


@functools.lru_cache(maxsize=64)
def _softcap(cap: float) -> tuple[Any, Any]:
    """cap * tanh(score / cap) and its derivative, as functions in CuTe.

    FlashAttention's own divides exactly, which is what makes it slow; its tanh is the GPU's instruction too.
    """
    import cutlass.cute as cute

    by = 1 / cap

    @cute.jit
    def change(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return cap * cute.math.tanh(score * by, fastmath=True)

    @cute.jit
    def derivative(
        grad: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
    ) -> Any:
        bent = cute.math.tanh(score * by, fastmath=True)
        return grad * (1.0 - bent * bent)

    return change, derivative
