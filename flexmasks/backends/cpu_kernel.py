"""torch's attention kernel for the CPU with its log-sum-exp, which the public function does not give."""

from __future__ import annotations

from torch import Tensor

from flexmasks import compat
from flexmasks.kernels.direct import with_rows_together


def grouped(x: Tensor, groups: int) -> Tensor:
    """Return a tensor with grouped heads as rows. [B or 1, H or 1, Q, N] becomes [B or 1, Hkv or 1, groups * Q, N]."""
    if x.shape[1] > 1:
        return x.unflatten(1, (-1, groups)).flatten(2, 3)  # type: ignore[no-any-return]
    return x.expand(-1, groups, -1, -1).flatten(1, 2).unsqueeze(1)


def forward(q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return output and lse [B, H, Q]."""
    q, k, v = with_rows_together(q, k, v)
    out, lse = compat.flash_on_cpu(q, k, v, 0.0, False, attn_mask=added, scale=scale)
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, added: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `forward`."""
    gradient, q, k, v, out = with_rows_together(gradient, q, k, v, out)
    grad_q, grad_k, grad_v = compat.flash_on_cpu_backward(
        gradient, q, k, v, out, lse, 0.0, False, attn_mask=added, scale=scale
    )
    return grad_q, grad_k, grad_v
