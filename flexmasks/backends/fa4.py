"""FlashAttention 4 called directly, for the masks and scores that its kernels have themselves."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmasks.plans.windows import Dense, Sequences

_MOST_SEQUENCES = 2048


@dataclass(frozen=True)
class Direct:
    """A call but for q, k and v."""

    dense: Dense
    sequences: Sequences | None
    scale: float | None
    cap: float | None  # of a soft-cap
    with_lse: bool
    by_head: Sequences | None = None  # the sequences of each head for itself, where that is of use

    key = "fa4"

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in (self.sequences, self.by_head) if s is not None)

    @classmethod
    def of(
        cls,
        dense: Dense,
        sequences: Sequences | None,
        scale: float | None,
        cap: float | None,
        with_lse: bool,
        q: Tensor,
        k: Tensor,
    ) -> Direct:
        """The call for q and k of these shapes."""
        (batch, heads, length, _), by_head = q.shape, None
        alike = sequences is not None and sequences.q is sequences.kv and sequences.used[0] == batch * length
        if sequences is not None and alike and batch > 1 and heads == k.shape[1]:
            # as [B, H, S, D] lies in memory: nothing is copied. FlashAttention searches the list for every tile
            by_head = sequences.of_heads(heads, length) if heads * len(sequences.q) <= _MOST_SEQUENCES else None
        return cls(dense, sequences, scale, cap, with_lse, by_head)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output [B, H, Q, D], and lse [B, H, Q] where it is wanted."""
        k, v = self.dense.cut(k), self.dense.cut(v)
        if self.sequences is not None:
            out, lse = self._in_sequences(q, k, v, self.sequences)
        else:
            out, lse = self._run(None, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            out = out.transpose(1, 2)
        return out, lse if self.with_lse else None

    def _in_sequences(self, q: Tensor, k: Tensor, v: Tensor, lay: Sequences) -> tuple[Tensor, Tensor]:
        batch, heads, q_len, size = q.shape
        if self.by_head is not None and q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
            out, lse = self._run(self.by_head, *(x.view(-1, 1, size) for x in (q, k, v)))
            return out.view(q.shape), lse.view(q.shape[:3])
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # copies, where that is no view
        used = lay.used[0], lay.used[1], lay.used[1]
        out, lse = self._run(lay, *(x[:n] if n < len(x) else x for x, n in zip(flat, used, strict=True)))
        rest = batch * q_len - lay.used[0]
        if rest:
            out, lse = F.pad(out, (0, 0, 0, 0, 0, rest)), F.pad(lse, (0, rest), value=-torch.inf)
        return out.view(batch, q_len, heads, size).transpose(1, 2), lse.view(heads, batch, q_len).transpose(0, 1)

    def _run(self, lay: Sequences | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Of q, k, v [B, S, H, D], or [tokens, H, D] in sequences."""
        out, lse = _Attend.apply(q, k, v, self._told(q.shape[1], k.shape[1], lay), self.cap)
        return out, lse

    def _told(self, q_len: int, kv_len: int, lay: Sequences | None = None) -> dict[str, Any]:
        """Windows as FlashAttention counts them: with the last query at the last key."""
        shift = 0 if lay is not None else self.dense.offset - (kv_len - q_len)
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
        if lay is not None:
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
