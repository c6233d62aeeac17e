"""Biases that learn: triangle attention of proteins, and shifted windows of images, trained.

Some models add to the attention scores a bias that they compute, or learn. AlphaFold computes one from the pair
representation of a protein, and all rows of the protein share it; Swin learns a table of distances in rows and columns,
and all windows share it. A tensor of all scores is not needed for either: the kernel reads the bias itself, and its
gradient sums over all who share it.
"""

# %%
from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import flexmasks
from _measure import DEVICE, ON_GPU, Row, check, finish, start
from flexmasks.bench.clock import interleaved, synchronize

STEPS = 20
Attend = Callable[..., Tensor]


# %% The eager formula: all scores in memory, [batch, heads, queries, keys], with a bias of that shape.
def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, visible: Tensor) -> Tensor:
    """Return attention with a bias and a mask, both as tensors that broadcast to the scores."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ v


# %% Triangle attention around the starting node (AlphaFold, algorithm 13), for proteins of different lengths. Row i of
# the pair representation z attends along itself, and the score of j and k gets a bias that is computed from z[j, k].
# So the N rows of a protein are N batch elements, and `group=N` of them share a bias.
class TriangleAttention(nn.Module):
    """Gated attention along the rows of pair representations [proteins, N, N, width]."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.bias = nn.Linear(width, heads, bias=False)
        self.gate = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, z: Tensor, residues: Tensor) -> Tensor:
        x = self.norm(z)
        rows = self.qkv(x).flatten(0, 1)  # [proteins * N, N, 3 * width]
        q, k, v = rows.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.bias(x).permute(0, 3, 1, 2)  # [proteins, heads, N, N]
        attended = self.attend(q, k, v, bias, residues).transpose(1, 2).flatten(2).view_as(z)
        return self.out(attended * torch.sigmoid(self.gate(x)))  # type: ignore[no-any-return]


def triangle(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, residues: Tensor) -> Tensor:
    """Attend by flexmasks; `residues` holds the length of each protein."""
    count = q.shape[2]
    lens = residues.repeat_interleave(count)
    return flexmasks.attention(q, k, v, mask="padding", kv_lens=lens, score="pair_bias", bias=bias, group=count)


def triangle_formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, residues: Tensor) -> Tensor:
    """Attend by the formula, with the bias repeated for all rows."""
    count = q.shape[2]
    real = torch.arange(count, device=q.device) < residues[:, None]
    visible = real[:, None, None].repeat_interleave(count, 0)
    return formula(q, k, v, bias.repeat_interleave(count, 0), visible)


# %% A Swin block. The image is cut into windows of 7 x 7 tokens, every second time after a cyclic shift. A shifted
# window may hold tokens of opposite edges of the image; those of different regions do not see each other.
WINDOW, SHIFT = 7, 3


class SwinBlock(nn.Module):
    """Attention in windows of images [images, side, side, width], and a feed-forward network."""

    def __init__(self, width: int, heads: int, shift: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.shift, self.attend = heads, shift, attend
        self.norm, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(heads, 2 * WINDOW - 1, 2 * WINDOW - 1) / 10)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        side = x.shape[1]
        windows = to_windows(self.norm(x).roll((-self.shift, -self.shift), (1, 2)))
        q, k, v = self.qkv(windows).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        regions = regions_of(side, self.shift, x.device).repeat(len(x), 1)
        attended = self.attend(q, k, v, self.table, regions).transpose(1, 2).flatten(2)
        x = x + from_windows(self.out(attended), side).roll((self.shift, self.shift), (1, 2))
        return x + self.feed(self.norm_out(x))  # type: ignore[no-any-return]


def to_windows(x: Tensor) -> Tensor:
    """Cut images [images, side, side, ...] into windows [images * windows, 49, ...]."""
    count = x.shape[1] // WINDOW
    x = x.unflatten(2, (count, WINDOW)).unflatten(1, (count, WINDOW))
    return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def from_windows(x: Tensor, side: int) -> Tensor:
    """Put windows together to images again."""
    count = side // WINDOW
    x = x.unflatten(1, (WINDOW, WINDOW)).unflatten(0, (-1, count, count))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def regions_of(side: int, shift: int, device: torch.device) -> Tensor:
    """Return the region of each token of each window, [windows, 49]; without a shift there is one."""
    place = torch.arange(side, device=device)
    part = (place >= side - WINDOW).int() + (place >= side - shift).int() if shift else torch.zeros_like(place)
    return to_windows((3 * part[:, None] + part)[None, ..., None])[..., 0]


def swin(q: Tensor, k: Tensor, v: Tensor, table: Tensor, regions: Tensor) -> Tensor:
    """Attend by flexmasks: regions are documents."""
    bias = flexmasks.scores.relative_bias_2d(table=table, height=WINDOW, width=WINDOW)
    return flexmasks.attention(q, k, v, mask="document", document_ids=regions, score=bias)


def swin_formula(q: Tensor, k: Tensor, v: Tensor, table: Tensor, regions: Tensor) -> Tensor:
    """Attend by the formula, with the table read for all pairs of a window."""
    token = torch.arange(WINDOW**2, device=q.device)
    row, column = token // WINDOW, token % WINDOW
    bias = table[:, row[:, None] - row + WINDOW - 1, column[:, None] - column + WINDOW - 1]
    return formula(q, k, v, bias, (regions[:, :, None] == regions[:, None])[:, None])


# %% Both ways compute the same gradients, and in training the same losses.
def check_gradients(what: str, block: nn.Module, exact: nn.Module, *inputs: Tensor) -> None:
    """Compare a block's output in float32 and its gradients with the formula in float64."""
    out, want = block(*inputs), exact.double()(inputs[0].double(), *inputs[1:])
    check(f"{what}, output", out, want)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, list(block.parameters()), upstream)
    wanted = torch.autograd.grad(want, list(exact.parameters()), upstream.double())
    sizes = [y.abs().max() for y in wanted]  # of each weight's gradient
    ours, theirs = (torch.cat([(x / n).flatten() for x, n in zip(g, sizes, strict=True)]) for g in (got, wanted))
    check(f"{what}, gradients of {len(sizes)} weights", ours, theirs, 1e-4)


def train(block: nn.Module, target: Tensor, counts: Tensor, *inputs: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Train a block towards a target, where `counts` is 1.

    Returns the losses, and the function of one training step, which is timed later.
    """
    optimizer = torch.optim.Adam(block.parameters(), lr=3e-3)
    autocast = torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU)

    def step() -> Tensor:
        with autocast:
            error = (block(*inputs) - target).float().square() * counts
        loss = error.sum() / counts.expand_as(error).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        detached: Tensor = loss.detach()
        return detached

    return torch.stack([step() for _ in range(STEPS)]), step


def with_formula(block: nn.Module, attend: Attend) -> nn.Module:
    """Return the same block, weight by weight, that attends by the formula."""
    other = copy.deepcopy(block)
    for module in other.modules():
        if isinstance(module, TriangleAttention | SwinBlock):
            module.attend = attend
    return other


def compare(what: str, block: nn.Module, attend: Attend, counts: Tensor, *inputs: Tensor) -> list[Row]:
    """Check a block against the formula, train both towards another block, and time a step of each."""
    teacher = with_formula(block, attend)
    for weight in teacher.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    with torch.no_grad():
        target = teacher(*inputs)
    check_gradients(what, block, with_formula(block, attend), *inputs)
    other = with_formula(block, attend)
    ours, step = train(block, target, counts, *inputs)
    theirs, their_step = train(other, target, counts, *inputs)
    print(f"losses of steps 1, 10 and 20: {[round(float(ours[n]), 4) for n in (0, 9, 19)]}")
    check(f"{what}, the same losses, all {STEPS}", ours, theirs, 0.02 if ON_GPU else 1e-3)
    assert ours[-1] < 0.9 * ours[0], "the loss does not fall"
    synchronize(DEVICE)
    times = interleaved({"flexmasks": step, "formula": their_step}, DEVICE, 7)
    first = times["flexmasks"][0]
    return [
        {"block": what, "": who, "ms for a training step": float(f"{ms:.4g}"), "times as long": round(ms / first, 2)}
        for who, (ms, _) in times.items()
    ]


# %% Check, train and time both blocks.
def main() -> None:
    """Check, train and time."""
    file = start(__doc__)
    proteins, count, width, heads = (2, 256, 128, 4) if ON_GPU else (2, 40, 32, 2)
    residues = torch.randint(count // 2, count + 1, (proteins,), device=DEVICE)
    real = torch.arange(count, device=DEVICE) < residues[:, None]
    pairs = (real[:, :, None] & real[:, None])[..., None]
    z = torch.randn(proteins, count, count, width, device=DEVICE)
    block = TriangleAttention(width, heads, triangle).to(DEVICE)
    what = f"triangle attention, {proteins} proteins of up to {count} residues"
    rows = compare(what, block, triangle_formula, pairs.float(), z, residues)

    images, side, width, heads = (64, 56, 96, 3) if ON_GPU else (4, 14, 32, 2)
    x = torch.randn(images, side, side, width, device=DEVICE)
    blocks = nn.Sequential(*(SwinBlock(width, heads, shift, swin) for shift in (0, SHIFT))).to(DEVICE)
    what = f"two Swin blocks, {images} images of {side} x {side} tokens"
    rows += compare(what, blocks, swin_formula, torch.ones(1, device=DEVICE), x)
    finish(rows, file)


if __name__ == "__main__":
    main()
