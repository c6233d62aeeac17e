"""What the package `cudnn` computes, in plain torch: it takes its place in tests on a CPU."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import attend
from torch import Tensor

from flexmasks.backends import cudnn


def create_mask_plan(mask_func: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool) -> Any:
    """Return the pairs that are visible, [B, H or 1, Q, KV], with what the package checks of later calls."""
    heads, count, total = mask_func.shape
    batch, q_len, q_heads, _ = q.shape
    assert mask_func.dtype == torch.int32
    assert mask_func.is_contiguous()
    assert heads in (1, q_heads)
    assert count % 2 == 1
    assert total == batch * q_len
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    visible = torch.zeros(batch, heads, q_len, k.shape[1], dtype=torch.bool)
    for h in range(heads):
        for row in range(total):
            ends = [0, *mask_func[h, :, row].tolist()]
            for start, stop in zip(ends[::2], ends[1::2], strict=True):
                visible[row // q_len, h, row % q_len, max(0, start) : max(0, stop)] = True
    return SimpleNamespace(visible=visible, has_backward=build_backward, shapes=[x.shape for x in (q, k, v)])


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: Any, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), plan.visible, scale=scale)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


CALLS: list[dict[str, Any]] = []  # arguments of calls, the last one last


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask_plan: Any, softmax_scale: float | None, return_lse: bool
) -> tuple[Tensor, Tensor | None, None]:
    """Return output [B, S, H, Dv] and lse [B, H, S]; the lse of a query that sees nothing is any number."""
    assert mask_plan.shapes == [x.shape for x in (q, k, v)]
    assert softmax_scale is None or math.isfinite(softmax_scale)
    CALLS.append({"return_lse": return_lse})
    out, lse = _attend(q, k, v, mask_plan, softmax_scale)
    return out, torch.where(lse.isinf(), 7.0, lse) if return_lse else None, None


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, lse: Tensor, *, mask_plan: Any,
    softmax_scale: float | None, deterministic: bool, dlse_tensor: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of q, k and v."""
    assert mask_plan.has_backward
    assert d_out.is_contiguous()
    assert dlse_tensor is None or dlse_tensor.is_contiguous()
    CALLS.append({"deterministic": deterministic})
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        again, lse_again = _attend(*leaves, mask_plan, softmax_scale)
        assert torch.equal(again, out)
        assert torch.equal(torch.where(lse_again.isinf(), 7.0, lse_again), lse)
        value = (again * d_out).sum()
        if dlse_tensor is not None:
            value = value + (lse_again * dlse_tensor)[~lse_again.isinf()].sum()
    return torch.autograd.grad(value, leaves)


def replace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let backend "cudnn" run on a CPU by the functions of this file."""
    monkeypatch.setattr(cudnn, "functions", lambda: cudnn.Functions(create_mask_plan, forward, backward))
    monkeypatch.setattr(cudnn, "refuses_machine", lambda call: None)
