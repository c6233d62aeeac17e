"""Attention in plain torch: any floating dtype, scores, lse, every gradient, in bounded memory.

It is what the kernels are judged by, and what serves on a CPU where a gradient is needed. There are two ways. The
fast one, `Tiles`, has its gradient written by hand. The other is made of operations that torch differentiates:
for transforms of torch.func, for a user's torch.compile, for derivatives of gradients, and where it cannot be known
which tensors a change of scores learns. It takes a slice of queries at a time over the keys that its blocks reach, as
thick as `_SLICE` scores allow, and computes its scores anew in the backward pass.

Nothing hidden reaches an output or a gradient, not even NaN or infinity: products run over finite values, and the
rows that do see a non-finite value become NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from flexmasks import compat
from flexmasks.backends.call import Call, Result
from flexmasks.backends.tiles import Tiles
from flexmasks.blocks.elements import over_indices
from flexmasks.blocks.lists import of_block_mask
from flexmasks.spec.captures import Opaque, capture

_SLICE = 1 << 24  # scores held at once


def refuses(call: Call) -> str | None:
    """Return None: every call can run here."""
    return None


def run(call: Call) -> Result:
    """Run the call."""
    score_mod = None if call.score_mod is None else call.score_mod()
    return Result(*attend(call.q, call.k, call.v, score_mod, call.blocks().block_mask, call.scale))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, D] in q's dtype and natural log-sum-exp [B, H, Q] in float32 (float64 for float64)."""
    in_slices = functools.partial(_attend_in_slices, score_mod=score_mod, block_mask=block_mask, scale=scale)
    learned = None if _traced() else _learned(score_mod, q.device)
    if learned is None:
        return in_slices(q, k, v)
    tiles = Tiles(q, k, score_mod, block_mask, scale)
    if not torch.is_grad_enabled():
        return tiles.forward(q, k, v)
    return _Tiled.apply(tiles, in_slices, q, k, v, *learned)  # type: ignore[no-any-return]


class _Tiled(torch.autograd.Function):
    """Attention by tiles, which keeps q, k, v, the output and lse."""

    @staticmethod
    def forward(
        ctx: Any, tiles: Tiles, in_slices: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        found = tiles.forward(*tensors[:3])
        ctx.tiles, ctx.in_slices = tiles, in_slices
        ctx.save_for_backward(*found, *tensors)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        again = torch.is_grad_enabled()  # derivatives of these gradients are asked for
        if not again and not _traced() and not any(map(compat.is_batched_gradient, grads)):
            q, k, v, *learned = tensors
            return None, None, *ctx.tiles.backward(q, k, v, out, lse, *grads, learned)
        needed = ctx.needs_input_grad[2:]
        inputs = [x for x, need in zip(tensors, needed, strict=True) if need]
        with torch.enable_grad():
            found = ctx.in_slices(*tensors[:3])
        parts = iter(torch.autograd.grad(found, inputs, grads, create_graph=again, allow_unused=True))
        return None, None, *(next(parts) if need else None for need in needed)


def _learned(score_mod: Callable[..., Tensor] | None, device: torch.device) -> list[Tensor] | None:
    """The tensors that a score_mod captured and that need a gradient; None where that cannot be known."""
    if score_mod is None or not torch.is_grad_enabled():
        return []
    tensors: list[Tensor] = []
    try:
        capture(score_mod, tensors)
    except Opaque:
        index = torch.zeros(1, dtype=torch.int64, device=device)
        score = torch.zeros((1, 1, 1, 1), device=device)
        if over_indices(score_mod, (0,))(score, index, index, index, index).requires_grad:
            return None
    return [t for t in tensors if t.requires_grad]


def _attend_in_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """`attend` by operations that torch differentiates."""
    # Inside a user's torch.compile or torch.func no value can be looked at: every key is reached, any may be poisoned,
    # and what the backward pass needs is theirs to keep or to compute anew.
    traced = _traced()
    finite = not traced and bool(torch.stack([x.detach().isfinite().all() for x in (q, k, v)]).all())
    batch, heads, q_len, _ = q.shape
    rows, columns = block_mask.BLOCK_SIZE
    partial, full = of_block_mask(block_mask)
    used = (partial | full).any(0).any(0)  # [query blocks, key blocks]
    one_block = batch * heads * rows * k.shape[2]
    step = max(1, _SLICE // one_block)
    outs, lses = [], []
    for first in range(0, used.shape[0], step):
        blocks = slice(first, min(first + step, used.shape[0]))
        reached = [0, used.shape[1] - 1] if traced else used[blocks].any(0).nonzero()[:, 0].tolist() or [0]
        keys = (reached[0] * columns, min((reached[-1] + 1) * columns, k.shape[2]))
        # without a block's worth of memory to spare, the queries of a block are taken in parts
        thickness = max(1, min(rows * step, _SLICE // (batch * heads * (keys[1] - keys[0]))))
        for start in range(blocks.start * rows, min(blocks.stop * rows, q_len), thickness):
            stop = min(start + thickness, blocks.stop * rows, q_len)
            part = _Slice(start, stop, *keys, rows, columns, partial, full, block_mask.mask_mod, score_mod, finite)
            inputs = (q[:, :, start:stop], k[:, :, keys[0] : keys[1]], v[:, :, keys[0] : keys[1]])
            if torch.is_grad_enabled() and not traced:
                out, lse = checkpoint(part.attend, *inputs, scale, use_reentrant=False, preserve_rng_state=False)
            else:
                out, lse = part.attend(*inputs, scale)
            outs.append(out)
            lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _traced() -> bool:
    return torch.compiler.is_compiling() or compat.innermost_transform() is not None


class _Slice:
    """Queries start..stop against keys first..last of a call."""

    def __init__(
        self,
        start: int,
        stop: int,
        first: int,
        last: int,
        rows: int,
        columns: int,
        partial: Tensor,
        full: Tensor,
        mask_mod: Callable[..., Tensor],
        score_mod: Callable[..., Tensor] | None,
        finite: bool,
    ) -> None:
        device = partial.device
        self.q = torch.arange(start, stop, device=device)
        self.kv = torch.arange(first, last, device=device)
        self.mask_mod, self.score_mod, self.finite = mask_mod, score_mod, finite
        self.partial = partial[:, :, start // rows : -(-stop // rows)]
        self.full = full[:, :, start // rows : -(-stop // rows)]
        self.q_block, self.kv_block = self.q // rows - start // rows, self.kv // columns

    def visible(self) -> Tensor | None:
        """Booleans [B or 1, H or 1, q, kv], or None where everything is visible."""
        if not _traced() and not self.partial.any() and self.full[..., self.kv_block].all():
            return None
        spread = [blocks[:, :, self.q_block][..., self.kv_block] for blocks in (self.partial, self.full)]
        b, h = (torch.arange(n, device=self.q.device) for n in self.partial.shape[:2])
        return spread[1] | (spread[0] & over_indices(self.mask_mod)(b, h, self.q, self.kv))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        batch, heads, _, size = q.shape
        dtype = q.dtype
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        q, k, v = q.to(precise), k.to(precise), v.to(precise)
        bad_q = bad_k = bad_v = None
        if not self.finite:
            bad_q, bad_k = ~q.isfinite().all(-1), ~k.isfinite().all(-1)
            bad_v = ~v.isfinite()
            q, k, v = (torch.where(x.isfinite(), x, 0.0) for x in (q, k, v))
        groups = heads // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q * (1 / math.sqrt(size) if scale is None else scale)) @ k.transpose(-2, -1)
        if self.score_mod is not None:
            b, h = (torch.arange(n, device=q.device) for n in (batch, heads))
            scores = over_indices(self.score_mod, (0,))(scores, b, h, self.q, self.kv).to(precise)
        visible = self.visible()
        if bad_q is not None and bad_k is not None:
            poisoned = bad_q[..., None] | bad_k.repeat_interleave(groups, 1)[:, :, None]
            scores = torch.where(poisoned, math.nan, scores)
        if visible is not None:
            scores = torch.where(visible, scores, -math.inf)
        peak = scores.detach().amax(-1, keepdim=True)
        weights = torch.exp(scores - torch.where(peak == -math.inf, 0.0, peak))
        total = weights.sum(-1, keepdim=True)
        seen = total != 0  # NaN too
        safe = torch.where(seen, total, 1.0)
        out = torch.where(seen, (weights @ v) / safe, 0.0)
        if bad_v is not None:
            weighed = (weights.detach().nan_to_num() > 0).to(precise) @ bad_v.repeat_interleave(groups, 1).to(precise)
            out = torch.where(weighed > 0, math.nan, out)
        lse = torch.where(seen, safe.log() + peak, -math.inf)[..., 0]
        return out.to(dtype), lse
