"""Calls that compute nothing: without queries, keys or batch elements, or of tensors without data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexmasks import compat


def computes_nothing(*tensors: Any) -> bool:
    """Return whether q, k or v is empty or has no data.

    Tensors on the meta device and of a FakeTensorMode have no data.
    """
    return any(
        isinstance(x, Tensor) and (0 in x.shape or x.is_meta or isinstance(x, compat.FakeTensor)) for x in tensors
    )


def attend(q: Tensor, k: Tensor, v: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return output 0 [B, H, Q, Dv] and lse -inf [B, H, Q].

    A row that sees nothing has the same. All gradients are 0.

    learned: tensors of a score that require a gradient.
    """
    never = torch.zeros((), dtype=torch.bool, device=q.device)
    joined = sum((x.sum() for x in learned), q.sum() + k.sum() + v.sum()).to(q.dtype)
    out = torch.where(never, joined, 0.0).expand(*q.shape[:3], v.shape[3]).contiguous()
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, torch.where(never, out.sum(-1).to(dtype), -math.inf)
