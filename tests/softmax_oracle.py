"""Oracle of the masked softmax: row by row in float64, with the gradient by torch's autograd."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(x: Tensor, visible: Tensor, scale: float = 1.0, dy: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the softmax of what each row of x [..., K] sees, put in its place, and the gradient of x (0 without dy).

    visible: boolean, broadcasting to x. Hidden places of x and dy may hold anything.
    """
    x = x.detach().double().cpu().requires_grad_()
    shape = x.shape[:-1].numel(), x.shape[-1]
    visible = visible.cpu().expand(x.shape)
    rows = []
    for scores, seen in zip(x.reshape(shape), visible.reshape(shape), strict=True):
        columns = seen.nonzero()[:, 0]
        row = torch.zeros_like(scores)
        rows.append(row.index_put((columns,), torch.softmax(scores[columns] * scale, 0)) if len(columns) else row)
    y = torch.stack(rows).view(x.shape)
    if dy is None or not y.requires_grad:
        return y.detach(), torch.zeros_like(x)
    y.backward(torch.where(visible, dy.double().cpu(), 0))
    assert x.grad is not None
    return y.detach(), x.grad
