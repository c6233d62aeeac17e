"""MeanFlow: a step of training whose target is a derivative of the network, by torch.func.jvp.

MeanFlow, sCM and rCM train a generator of few steps on how its own output changes along the path of the noise. The
derivative is one forward pass with tangents, torch.func.jvp, and the output of the same pass is differentiated
backward. Attention needs both at once: the tangent by one kernel, and the gradients of the output. Here images of
different sizes lie packed in one row, and see only themselves.
"""

# %%
from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp

import flexmasks
from _measure import DEVICE, ON_GPU, Row, check, finish, start, textbook
from flexmasks.bench.clock import interleaved, synchronize

SIZES = (1024, 576, 256, 1936, 304) if ON_GPU else (64, 100, 36)  # tokens of the images
CHANNELS, WIDTH, HEADS, LAYERS = 16, 256 if ON_GPU else 32, 4, 2
STEPS = 60
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# %% Attention among the tokens of an image, and the same as a textbook writes it, with all scores in memory.
def packed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Attend by flexmasks."""
    return flexmasks.attention(q, k, v, mask="document", document_ids=ids)


def by_formula(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Attend by the formula, which torch differentiates in any way."""
    return textbook(q, k, v, ids[:, None] == ids)


# %% A small transformer u(z, r, t): the mean velocity between the times r and t of images z at the time t.
class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norm, self.norm_out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v, ids).transpose(1, 2).flatten(2))
        return x + self.feed(self.norm_out(x))  # type: ignore[no-any-return]


class Velocity(nn.Module):
    """The network; r and t are times of each token."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.embed, self.times = nn.Linear(CHANNELS, WIDTH), nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, CHANNELS)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, ids: Tensor) -> Tensor:
        x = self.embed(z) + self.times(torch.stack([r, t, (6 * t).sin(), (6 * (t - r)).cos()], -1))
        for block in self.blocks:
            x = block(x, ids)
        return self.out(x)  # type: ignore[no-any-return]


# %% The loss. Along the path z = (1 - t) x + t e the velocity is e - x. The mean velocity u from r to t solves
# u = (e - x) - (t - r) du/dt, so du/dt, the derivative along (e - x, 0, 1), gives the target, and no gradient flows
# through it (MeanFlow, algorithm 1).
def loss_of(model: Velocity, x: Tensor, noise: Tensor, r: Tensor, t: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of MeanFlow, and du/dt."""
    z, velocity = torch.lerp(x, noise, t[..., None]), noise - x
    along = velocity, torch.zeros_like(r), torch.ones_like(t)
    u, of_u = cast(tuple[Tensor, Tensor], jvp(functools.partial(model, ids=ids), (z, r, t), along))
    target = velocity - (t - r)[..., None] * of_u
    return F.mse_loss(u, target.detach()), of_u


# %% The same derivative as a difference of two outputs, in double precision.
def difference(model: Velocity, z: Tensor, velocity: Tensor, r: Tensor, t: Tensor, ids: Tensor) -> Tensor:
    """Return du/dt from two outputs near each other."""
    step = 1e-5
    after, before = (model(z + n * step * velocity, r, t + n * step, ids) for n in (1, -1))
    return (after - before) / (2 * step)  # type: ignore[no-any-return]


def with_attend(model: Velocity, attend: Attend) -> Velocity:
    """Return the same network, weight by weight, that attends in another way."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, Block):
            module.attend = attend
    return other


def draw(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return images of waves, noise, and times of each image r <= t, by token."""
    ids = torch.arange(len(SIZES), device=DEVICE).repeat_interleave(torch.tensor(SIZES, device=DEVICE))
    place = torch.cat([torch.linspace(0, 1, n, device=DEVICE) for n in SIZES])
    waves = torch.arange(1, CHANNELS + 1, device=DEVICE) * place[:, None] * torch.pi
    x = waves.sin() * torch.rand(count, 1, CHANNELS, device=DEVICE)
    times = torch.rand(2, count, len(SIZES), device=DEVICE).sort(0).values[..., ids]
    return x, torch.randn_like(x), times[0], times[1], ids


# %% Check: the derivative, and a step's gradients, against double precision without the library.
def check_step(model: Velocity) -> None:
    """Compare loss, derivative and gradients with those of the formula in double precision."""
    x, noise, r, t, ids = draw(2)
    loss, of_u = loss_of(model, x, noise, r, t, ids)
    exact, x, noise, r, t = with_attend(model, by_formula).double(), x.double(), noise.double(), r.double(), t.double()
    want, exact_of_u = loss_of(exact, x, noise, r, t, ids)
    check("du/dt", of_u, exact_of_u, 1e-4)
    z = torch.lerp(x, noise, t[..., None])
    check("du/dt, by differences", exact_of_u, difference(with_attend(exact, packed), z, noise - x, r, t, ids), 1e-7)
    check("the loss", loss, want, 1e-4)
    gradients = [torch.autograd.grad(y, list(m.parameters())) for y, m in ((loss, model), (want, exact))]
    ours, theirs = (torch.cat([g.flatten() for g in grads]) for grads in gradients)
    check("the gradients of all weights", ours, theirs, 1e-3)


# %% Train, and time a step of both ways.
def trainer(model: Velocity) -> Callable[[], Tensor]:
    """Return the function of a step of training."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    autocast = torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU)

    def step() -> Tensor:
        with autocast:
            loss, _ = loss_of(model, *draw(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        detached: Tensor = loss.detach()
        return detached

    return step


def main() -> None:
    """Check, train and time."""
    file = start(__doc__)
    model = Velocity(packed).to(DEVICE)
    check_step(model)
    step, other = trainer(model), trainer(with_attend(model, by_formula))
    losses = torch.stack([step() for _ in range(STEPS)])
    first, last = losses[:10].mean(), losses[-10:].mean()
    print(f"mean loss of the first and the last ten steps of {STEPS}: {first:.3f}, {last:.3f}")
    assert last < 0.9 * first, "the loss does not fall"
    synchronize(DEVICE)
    times = interleaved({"flexmasks": step, "formula": other}, DEVICE, 5)
    what = f"{len(SIZES)} images in rows of {sum(SIZES):,} tokens"
    rows: list[Row] = [
        {"a step of MeanFlow": what, "attention": who, "ms": float(f"{ms:.4g}")} for who, (ms, _) in times.items()
    ]
    finish(rows, file)


if __name__ == "__main__":
    main()
