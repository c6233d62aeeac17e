"""The scaled masked softmax in training, against a handwritten Function.

If a model holds attention scores in memory, a training step takes y = softmax(x * scale) without the hidden places,
and in the backward pass dx = scale * (y * dy - y * sum(y * dy)). The Function below writes both in plain torch, which
takes several passes over tensors of all scores. flexmasks.scaled_masked_softmax is one kernel in each direction.
Autograd, torch.compile and torch.func know its gradient.
"""

# %% The Function, with the gradient of a softmax. A row that is hidden entirely gives 0, and its gradient is 0.
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import flexmasks
from _measure import DEVICE, ON_GPU, Row, check, finish, start
from flexmasks.bench.clock import interleaved, synchronize

Softmax = Callable[[Tensor, Tensor, float], Tensor]


class ByHand(torch.autograd.Function):
    """The softmax of x * scale outside of `hidden`, with its gradient, in plain torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: Tensor, scale: float) -> Tensor:
        scores = (x.float() * scale).masked_fill(hidden, -math.inf)
        y = torch.softmax(scores, -1).masked_fill(hidden, 0.0).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        weighted = y.float() * dy.float()
        dx = ctx.scale * (weighted - y.float() * weighted.sum(-1, keepdim=True))
        return dx.to(y.dtype), None, None


def by_hand(x: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Compute the softmax by the Function above."""
    return ByHand.apply(x, hidden, scale)  # type: ignore[no-any-return]


# %% The reference is the definition, in float64 and differentiated by torch's autograd.
def definition(x: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Compute the softmax by its definition."""
    weights = torch.exp(x * scale - (x * scale).amax(-1, keepdim=True)).masked_fill(hidden, 0.0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


# %% A layer to train: self-attention that takes its softmax as an argument.
class Attention(nn.Module):
    """Multi-head self-attention with all scores in memory."""

    def __init__(self, width: int, heads: int, softmax: Softmax) -> None:
        super().__init__()
        self.heads, self.softmax = heads, softmax
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = self.softmax(q @ k.transpose(-1, -2), hidden, q.shape[-1] ** -0.5)
        return self.out((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def train(softmax: Softmax, shape: tuple[int, int, int, int], steps: int) -> tuple[list[float], Callable[[], Tensor]]:
    """Train a layer towards the output of another layer.

    Returns the losses, and the function of one training step, which is timed later.
    """
    batch, heads, length, size = shape
    torch.manual_seed(0)
    student, teacher = (Attention(heads * size, heads, softmax).to(DEVICE) for _ in range(2))
    x = torch.randn(batch, length, heads * size, device=DEVICE)
    lens = torch.randint(length // 2, length + 1, (batch,), device=DEVICE)
    position = torch.arange(length, device=DEVICE)
    hidden = (position > position[:, None]) | (position >= lens[:, None, None, None])  # True = hidden, [B, 1, S, S]
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    autocast = torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU)
    with autocast, torch.no_grad():
        target = teacher(x, hidden)

    def step() -> Tensor:
        with autocast:
            loss = (student(x, hidden) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        detached: Tensor = loss.detach()
        return detached

    losses = torch.stack([step() for _ in range(steps)]).tolist()
    return losses, step


# %% Check the gradients, compare the losses, and time the step.
def main() -> None:
    """Check, train and time."""
    file = start(__doc__)
    ways: dict[str, Softmax] = {"flexmasks": flexmasks.scaled_masked_softmax, "Function by hand": by_hand}
    x = torch.randn(2, 3, 40, 50, device=DEVICE)
    hidden = torch.rand(2, 1, 40, 50, device=DEVICE) < 0.3
    hidden[0, 0, 7] = True  # a row that sees nothing
    upstream = torch.randn_like(x)
    exact = x.double().requires_grad_()
    want = definition(exact, hidden, 0.125)
    (want_gradient,) = torch.autograd.grad(want, exact, upstream.double())
    for who, softmax in ways.items():
        leaf = x.clone().requires_grad_()
        got = softmax(leaf, hidden, 0.125)
        check(f"{who}, output", got, want)
        check(f"{who}, gradient", torch.autograd.grad(got, leaf, upstream)[0], want_gradient)

    shape = (16, 16, 2048, 64) if ON_GPU else (2, 4, 256, 32)
    losses, steps = {}, {}
    for who, softmax in ways.items():
        losses[who], steps[who] = train(softmax, shape, steps=20)
    print(f"\nlosses of steps 1, 10 and 20: {[round(losses['flexmasks'][n], 5) for n in (0, 9, 19)]}")
    ours, theirs = (torch.tensor(line) for line in losses.values())
    check("the same losses, all 20", ours, theirs, 0.02 if ON_GPU else 1e-4)
    assert ours[-1] < ours[0] / 2, "the loss does not fall"

    synchronize(DEVICE)
    times = interleaved(steps, DEVICE, 7)
    rows: list[Row] = [
        {
            "scores": "x".join(map(str, (*shape[:2], shape[2], shape[2]))),
            "softmax": who,
            "ms for a training step": float(f"{ms:.4g}"),
            "": f"{ms / times['flexmasks'][0]:.2f} x",
        }
        for who, (ms, _) in times.items()
    ]
    finish(rows, file)


if __name__ == "__main__":
    main()
